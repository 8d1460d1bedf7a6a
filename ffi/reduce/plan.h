// Shared by the sources of the plan: properties of problems, and for each kernel why it refuses a
// problem, and how it is launched.
#pragma once

#include <cstdint>
#include <string>

#include "core/device.h"
#include "core/integer.h"
#include "reduce/reduce.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

// ---- Problems ----

inline constexpr std::int64_t kPackBytes = 16;
inline constexpr int kWarpLanes = 32;

inline std::int64_t row_bytes(const Problem& problem) {
  return problem.columns * bytes_of(problem.dtype);
}

inline std::int64_t expected_rows(const Problem& problem) {
  return JAX_GPUOPS_NAMESPACE::expected_rows(problem.batch_invariant, problem.rows(),
                                             row_bytes(problem));
}

inline bool is_float(DType dtype) { return dtype >= DType::kFloat16 && dtype <= DType::kFloat64; }

inline bool is_integer(DType dtype) { return dtype >= DType::kInt8 && dtype <= DType::kUInt64; }

inline std::int64_t pack_of(const Problem& problem) { return kPackBytes / bytes_of(problem.dtype); }

inline bool is_aligned(const Problem& problem) { return problem.alignment >= kPackBytes; }

// Whether rows begin and end at the boundaries of packs.
inline bool has_whole_packs(const Problem& problem) {
  return is_aligned(problem) && problem.columns % pack_of(problem) == 0;
}

// ---- Partial results ----

// The bytes of the type that a kernel computes in: see dispatch_reduction().
inline std::int64_t accumulator_bytes(const Problem& problem) {
  const bool wide = bytes_of(problem.dtype) == 8;
  const bool modular = problem.function == Function::kSum || problem.function == Function::kProd;
  if (is_float(problem.dtype) || !modular) return wide ? 8 : 4;
  return bytes_of(problem.dtype) == 4 && bytes_of(problem.result) <= 4 ? 4 : 8;
}

// A partial result in the workspace: a value, a value and its index, or Moments.
inline std::int64_t partial_bytes(const Problem& problem) {
  if (problem.function == Function::kMeanAndVar) return 4 * accumulator_bytes(problem);
  return is_arg(problem.function) ? 16 : accumulator_bytes(problem);
}

// The most parts of a row.
inline constexpr std::int64_t kMostParts = 2048;

// ---- The kernels ----
//
// A refusal says why a kernel does not take a problem, and is empty if it does. Configurations are
// only for problems that the kernel takes.

// The kernels of rows that are contiguous in memory, in plan_rows.cc.

std::string refusal_of_held(const Problem& problem, const Device& device);
// Whether to take held, if it takes the problem, rather than staged, row and cluster.
bool prefers_held(const Problem& problem, const Device& device);
void configure_held(const Problem& problem, const Device& device, Config* config);

std::string refusal_of_staged(const Problem& problem);
// Whether to take staged rather than row.
bool prefers_staged(const Problem& problem, const Device& device);
void configure_staged(const Problem& problem, const Device& device, Config* config);

std::string refusal_of_cluster(const Problem& problem, const Device& device);
// Whether to take cluster rather than multiple, staged and row.
bool prefers_cluster(const Problem& problem, const Device& device);
void configure_cluster(const Problem& problem, Config* config);

// Whether to take multiple rather than staged and row.
bool prefers_multiple(const Problem& problem, const Device& device);
// The most parts of a row, and so partial results in slots.
std::int64_t multiple_parts(const Problem& problem);
std::int64_t slot_bytes(const Problem& problem);
void configure_multiple(const Problem& problem, std::int64_t workspace, const Device& device,
                        Config* config);

void configure_row(const Problem& problem, const Device& device, Config* config);

// The kernels of rows whose elements have a stride, in plan_columns.cc.

std::string refusal_of_column(const Problem& problem);
// The most parts of a row, and so partial results in the workspace.
std::int64_t column_parts(const Problem& problem);
void configure_column(const Problem& problem, std::int64_t workspace, const Device& device,
                      Config* config);

// The same for moments_column_kernel, in plan_moments.cc.
bool is_of_moments_column(const Problem& problem, const Device& device);
void configure_moments_column(const Problem& problem, std::int64_t workspace, const Device& device,
                              Config* config);

std::string refusal_of_interleaved(const Problem& problem, const Device& device);
// Whether to take interleaved rather than column.
bool prefers_interleaved(const Problem& problem);
std::int64_t interleaved_parts(const Problem& problem);
void configure_interleaved(const Problem& problem, std::int64_t workspace, const Device& device,
                           Config* config);

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
