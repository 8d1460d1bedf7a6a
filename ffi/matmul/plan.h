// What the sources of the plan share: facts about problems, and for each kernel on tensor cores why
// it refuses a problem, how long it would take, and how it is launched.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/device.h"
#include "core/integer.h"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

// ---- Problems ----

inline std::string text(std::string_view view) { return std::string(view); }

inline std::int64_t bytes_of(DType dtype) { return static_cast<std::int64_t>(info(dtype).bytes); }

inline bool is_16_bit_float(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

inline bool is_8_bit_float(DType dtype) {
  return dtype == DType::kFloat8E4M3FN || dtype == DType::kFloat8E5M2;
}

// Factors that the tensor cores alone multiply.
inline bool is_8_bit(DType dtype) { return is_8_bit_float(dtype) || dtype == DType::kInt8; }

// Whether there are results of a dtype for the factors: of theirs, or of their sums. Those of 8
// bits have none of the same, but for int8 with scales, which has no sums then.
inline bool takes_result(const Problem& problem) {
  const DType dtype = problem.dtype, result = problem.result_dtype;
  const bool is_float = is_16_bit_float(result) || result == DType::kFloat32;
  if (is_8_bit_float(dtype)) return is_float;
  if (dtype == DType::kInt8) {
    return has_scales(problem) ? is_float || result == DType::kInt8 : result == DType::kInt32;
  }
  return result == dtype || (is_16_bit_float(dtype) && result == DType::kFloat32);
}

// Whether 8-bit floats are to be added in more than the 13 bits of fraction of the tensor cores. A
// precision above the default asks for it, as with XLA. Sums of blocks with scales always are.
inline bool promotes_sums(const Problem& problem) {
  if (!is_8_bit_float(problem.dtype)) return false;
  return scales_blocks(problem) || (problem.precision != Precision::kDefault &&
                                    problem.precision != Precision::kAnyF8AnyF8F32FastAccum &&
                                    problem.precision != Precision::kAnyF8AnyF8AnyFastAccum);
}

inline bool asks_for_tf32(const Problem& problem) {
  return problem.dtype == DType::kFloat32 && problem.precision == Precision::kTF32TF32F32;
}

inline bool asks_for_bf16_x6(const Problem& problem) {
  return problem.dtype == DType::kFloat32 && problem.precision == Precision::kBF16BF16F32X6;
}

// As with XLA: jax.lax.Precision.HIGH is what "tensorfloat32" means.
inline bool may_use_tf32(const Problem& problem) {
  return problem.dtype == DType::kFloat32 &&
         (problem.precision == Precision::kDefault || problem.precision == Precision::kHigh ||
          problem.precision == Precision::kTF32TF32F32);
}

// Products of elements.
inline double work_of(const Problem& problem) {
  return static_cast<double>(problem.batch) * static_cast<double>(problem.m) *
         static_cast<double>(problem.n) * static_cast<double>(problem.k);
}

// Bytes of the copies of factors that tensor copies cannot read.
inline std::int64_t copies_bytes(const Problem& problem) {
  std::int64_t bytes = 0;
  for (const StoredFactor& each : {stored_a(problem), stored_b(problem)}) {
    if (needs_copy(each)) bytes += copy_bytes(each);
  }
  return bytes;
}

// ---- Estimates ----
//
// Of times in nanoseconds, measured on an H200 (docs/tuning.md).

// What a launch takes before and after its products.
inline constexpr double kLaunchTime = 2700;

// ---- The kernels on tensor cores ----
//
// A refusal says why a kernel does not take a problem, and is empty if it does. Estimates and
// configurations are of problems that it takes.

// Coordinates of tensor copies and numbers of tiles are ints.
inline constexpr std::int64_t kMostTensorExtent = 1 << 30;

// The blocks of a launch whose clusters take tile after tile: as few as take no more turns than all
// that fit. A large product is bound by the power that the GPU may draw, and multiprocessors
// without work leave theirs to the others.
inline std::int64_t blocks_of(std::int64_t tiles, int cluster_rows, const Device& device) {
  const std::int64_t turns = divide_up(tiles, device.multiprocessors / cluster_rows);
  return cluster_rows * divide_up(tiles, std::max<std::int64_t>(turns, 1));
}

// Of the problem's c, by tensor_core.
std::string refusal_of_c(const Problem& problem);

std::string refusal_of_tensor_core(const Problem& problem, const Device& device);
double tensor_core_time(const Problem& problem, const Device& device);
Config configure_tensor_core(const Problem& problem, const Device& device);

std::string refusal_of_split_k(const Problem& problem, const Device& device);
double split_k_time(const Problem& problem, const Device& device);
Config configure_split_k(const Problem& problem, const Device& device);

std::string refusal_of_skinny(const Problem& problem, const Device& device);
// Whether skinny may be the plan's, by the problem alone.
bool suits_skinny(const Problem& problem);
// Whether to take skinny rather than the other kernels on tensor cores.
bool prefers_skinny(const Problem& problem, const Device& device);
Config configure_skinny(const Problem& problem, const Device& device);

std::string refusal_of_bf16_x6(const Problem& problem, const Device& device);
// Whether bf16_x6 or fp16_x3 may be the plan's, by the problem alone.
bool suits_bf16_x6(const Problem& problem);
// Whether to take bf16_x6 rather than kernels that multiply float32.
bool prefers_bf16_x6(const Problem& problem, const Device& device);

std::string refusal_of_fp16_x3(const Problem& problem, const Device& device);
// Whether to take fp16_x3 rather than bf16_x6 and kernels that multiply float32.
bool prefers_fp16_x3(const Problem& problem, const Device& device);
// Of both.
Config configure_parts(const Problem& problem, const Device& device);

std::string refusal_of_mma_pipelined(const Problem& problem, const Device& device);
Config configure_mma_pipelined(const Problem& problem, const Device& device);

// ---- The kernels of FMAs ----

// What the fastest of those for float32 takes.
double fma_time(const Problem& problem, const Device& device);

std::string refusal_of_fma_pipelined(const Problem& problem, const Device& device);
// Whether to take fma_pipelined rather than the other kernels of FMAs.
bool prefers_fma_pipelined(const Problem& problem, const Device& device);
Config configure_fma_pipelined(const Problem& problem, const Device& device);

std::string refusal_of_fma_sliced(const Problem& problem, const Device& device);
// Whether to take fma_sliced rather than the other kernels of FMAs.
bool prefers_fma_sliced(const Problem& problem, const Device& device);
// The same where coalesced is the other one.
bool prefers_fma_sliced_to_coalesced(const Problem& problem, const Device& device);
Config configure_fma_sliced(const Problem& problem, const Device& device);

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
