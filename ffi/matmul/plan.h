// Shared by the sources of the plan: properties of problems, and for each kernel why it refuses a
// problem, how long it would take, and how it is launched.
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

inline bool is_8_bit_float(DType dtype) {
  return dtype == DType::kFloat8E4M3FN || dtype == DType::kFloat8E5M2;
}

// Whether only tensor cores multiply factors of the dtype.
inline bool is_8_bit(DType dtype) { return is_8_bit_float(dtype) || dtype == DType::kInt8; }

// Whether kernels have the problem's result dtype: that of the factors or of their sums. 8-bit
// floats have no results of their own dtype, and int8 has them only with scales, instead of int32.
inline bool takes_result(const Problem& problem) {
  const DType dtype = problem.dtype, result = problem.result_dtype;
  const bool is_float = is_16_bit_float(result) || result == DType::kFloat32;
  if (is_8_bit_float(dtype)) return is_float;
  if (dtype == DType::kInt8) {
    return has_scales(problem) ? is_float || result == DType::kInt8 : result == DType::kInt32;
  }
  return result == dtype || (is_16_bit_float(dtype) && result == DType::kFloat32);
}

// Whether products of 8-bit floats must be added with more than the 13 bits of fraction of the
// tensor cores. A precision above the default requires it, as in XLA. Sums with block scales always
// are.
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

// As in XLA: jax.lax.Precision.HIGH is what "tensorfloat32" means.
inline bool may_use_tf32(const Problem& problem) {
  return problem.dtype == DType::kFloat32 &&
         (problem.precision == Precision::kDefault || problem.precision == Precision::kHigh ||
          problem.precision == Precision::kTF32TF32F32);
}

// The number of multiplications.
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

// The same for tensor_core, which need not copy a row-major b of floats (see turned_kernel).
std::int64_t tensor_core_copies_bytes(const Problem& problem);

// ---- Estimates ----
//
// Times are in nanoseconds, measured on an H200 (docs/tuning.md).

// The time of a launch before and after its products.
inline constexpr double kLaunchTime = 2700;

// The time in which `readers` multiprocessors read the factors of `tiles` tiles over the whole
// depth.
double read_time(const Problem& problem, std::int64_t tiles, std::int64_t rows, std::int64_t cols,
                 std::int64_t readers);

// ---- The kernels on tensor cores ----
//
// A refusal says why a kernel does not take a problem, and is empty if it does. Estimates and
// configurations are only for problems that the kernel takes.

// Coordinates of tensor copies and numbers of tiles are ints.
inline constexpr std::int64_t kMostTensorExtent = 1 << 30;

// The blocks of a persistent launch: the fewest that need no more waves than all that fit. A large
// product is limited by the GPU's power, and multiprocessors without work leave their share to the
// others.
inline std::int64_t blocks_of(std::int64_t tiles, int cluster_rows, const Device& device) {
  const std::int64_t turns = divide_up(tiles, device.multiprocessors / cluster_rows);
  return cluster_rows * divide_up(tiles, std::max<std::int64_t>(turns, 1));
}

// Why tensor_core does not add the problem's c.
std::string refusal_of_c(const Problem& problem);

// Why tensor copies, and kernels whose smallest tile has 64 rows and `least_cols` columns, do not
// take arrays of this alignment and these sizes.
std::string refusal_of_tensor_sizes(const Problem& problem, std::int64_t least_cols);
std::string refusal_of_tensor_core(const Problem& problem, const Device& device);
double tensor_core_time(const Problem& problem, const Device& device);
Config configure_tensor_core(const Problem& problem, const Device& device);

std::string refusal_of_split_k(const Problem& problem, const Device& device);
double split_k_time(const Problem& problem, const Device& device);
// The time of tensor_core, or of split_k if it takes the problem and is faster.
double tensor_core_or_split_k_time(const Problem& problem, const Device& device);
Config configure_split_k(const Problem& problem, const Device& device);

std::string refusal_of_parallel_split_k(const Problem& problem, const Device& device);
// Whether the plan may choose parallel_split_k, on some device.
bool suits_parallel_split_k(const Problem& problem);
double parallel_split_k_time(const Problem& problem, const Device& device);
// Whether to take parallel_split_k rather than tensor_core and split_k.
bool prefers_parallel_split_k(const Problem& problem, const Device& device);
// The time of the one of the three that the plan would choose.
double tensor_core_or_splits_time(const Problem& problem, const Device& device);
Config configure_parallel_split_k(const Problem& problem, const Device& device);
// Bytes of workspace for copies of factors and partial sums.
std::int64_t parallel_split_k_workspace(const Problem& problem);

std::string refusal_of_wgmma_batched(const Problem& problem, const Device& device);
// Infinite where the plan never chooses it.
double wgmma_batched_time(const Problem& problem, const Device& device);
// Whether to take wgmma_batched rather than the other kernels on tensor cores.
bool prefers_wgmma_batched(const Problem& problem, const Device& device);
Config configure_wgmma_batched(const Problem& problem, const Device& device);

// The sizes that skinny and fma_skinny refuse: a skinny factor of more than `most_extent` rows or
// columns, and more tiles than grids have blocks if tiles have the fewest rows, `least_rows`.
std::string refusal_of_skinny_sizes(const Problem& problem, std::int64_t most_extent,
                                    std::int64_t least_rows);
std::string refusal_of_skinny(const Problem& problem, const Device& device);
// Whether the plan may choose skinny, on some device.
bool suits_skinny(const Problem& problem);
// Whether to take skinny rather than the other kernels on tensor cores.
bool prefers_skinny(const Problem& problem, const Device& device);
Config configure_skinny(const Problem& problem, const Device& device);

std::string refusal_of_bf16_x6(const Problem& problem, const Device& device);
// Whether the plan may choose bf16_x6 or fp16_x3, on some device.
bool suits_bf16_x6(const Problem& problem);
// Whether to take bf16_x6 rather than kernels that multiply float32.
bool prefers_bf16_x6(const Problem& problem, const Device& device);

std::string refusal_of_fp16_x3(const Problem& problem, const Device& device);
// Whether to take fp16_x3 rather than bf16_x6 and kernels that multiply float32.
bool prefers_fp16_x3(const Problem& problem, const Device& device);
// The configuration of bf16_x6 and fp16_x3.
Config configure_parts(const Problem& problem, const Device& device);

std::string refusal_of_mma_pipelined(const Problem& problem, const Device& device);
Config configure_mma_pipelined(const Problem& problem, const Device& device);

std::string refusal_of_mma_batched(const Problem& problem, const Device& device);
// Whether the plan chooses mma_batched, if it takes the problem.
bool suits_mma_batched(const Problem& problem);
Config configure_mma_batched(const Problem& problem);

// ---- The kernels of FMAs ----

// The time of the fastest FMA kernel for float32.
double fma_time(const Problem& problem, const Device& device);

std::string refusal_of_fma_pipelined(const Problem& problem, const Device& device);
// Whether to take fma_pipelined rather than the other kernels of FMAs.
bool prefers_fma_pipelined(const Problem& problem, const Device& device);
Config configure_fma_pipelined(const Problem& problem, const Device& device);

std::string refusal_of_fma_sliced(const Problem& problem, const Device& device);
// Whether to take fma_sliced rather than the other kernels of FMAs.
bool prefers_fma_sliced(const Problem& problem, const Device& device);
// Whether to take fma_sliced rather than coalesced.
bool prefers_fma_sliced_to_coalesced(const Problem& problem, const Device& device);
Config configure_fma_sliced(const Problem& problem, const Device& device);

std::string refusal_of_fma_batched(const Problem& problem, const Device& device);
// Whether to take fma_batched rather than the other kernels of FMAs, except coalesced.
bool prefers_fma_batched(const Problem& problem, const Device& device);
// Whether to take it rather than any of them.
bool prefers_fma_batched_to_coalesced(const Problem& problem, const Device& device);
Config configure_fma_batched(const Problem& problem, const Device& device);
std::string refusal_of_fma_skinny(const Problem& problem, const Device& device);
// Whether the plan may choose fma_skinny, on some device.
bool suits_fma_skinny(const Problem& problem);
// Whether to take fma_skinny rather than the other kernels for float32.
bool prefers_fma_skinny(const Problem& problem, const Device& device);
Config configure_fma_skinny(const Problem& problem, const Device& device);

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
