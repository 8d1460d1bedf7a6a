// softmax, log_softmax and logsumexp over the rows of an array.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/device.h"
#include "core/dtype.h"
#include "core/queue.h"
#include "core/registry.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

enum class Function { kSoftmax, kLogSoftmax, kLogSumExp };

// An array of `outer` x `columns` x `inner` elements, of which `columns` is the axis reduced over.
// Row r = o * inner + i starts at element o * columns * inner + i, and its elements lie `inner`
// apart. logsumexp writes one element a row, at index r.
struct Problem {
  Function function;
  DType dtype;
  std::int64_t outer;
  std::int64_t columns;
  std::int64_t inner;

  std::int64_t rows() const { return outer * inner; }
};

enum class Algorithm {
  kBaseline,
  kOneWarpOneRow,
  kOneWarpTwoRows,
  kOneWarpFourRows,
  kOneWarpOneRowFloat4,
  kOneWarpTwoRowsFloat4,
  kOneWarpFourRowsFloat4,
  kWarp,
  kBlockShared,
  kBlockUncached,
};

inline constexpr std::string_view kOptimisation =
    "He Wenhao, CUDA optimisation of softmax, August 2024";
inline constexpr std::string_view kWarpAndBlock =
    "Notes on warp and block softmax reductions after OneFlow and AITemplate, August 2024";

inline constexpr AlgorithmInfo kAlgorithms[] = {
    {"baseline", "One block walks all rows: three passes over each, shared-memory tree reductions.",
     kOptimisation, "softmax only"},
    {"one_warp_one_row", "A warp per row, reduced by shuffles instead of shared memory.",
     kOptimisation, "softmax only"},
    {"one_warp_two_rows", "Each half of a warp takes a row: short rows leave fewer lanes idle.",
     kOptimisation, "softmax only"},
    {"one_warp_four_rows", "Each quarter of a warp takes a row.", kOptimisation, "softmax only"},
    {"one_warp_one_row_float4", "one_warp_one_row with loads and stores of four elements.",
     kOptimisation, "softmax only"},
    {"one_warp_two_rows_float4", "one_warp_two_rows with loads and stores of four elements.",
     kOptimisation, "softmax only"},
    {"one_warp_four_rows_float4", "one_warp_four_rows with loads and stores of four elements.",
     kOptimisation, "softmax only"},
    {"warp", "Groups of up to 32 lanes hold a row in registers: one read and one write.",
     kWarpAndBlock, "rows of at most 2048 elements, 1024 for float64"},
    {"block_shared", "A block holds a row in shared memory: one read and one write.", kWarpAndBlock,
     "rows that fit the shared memory of one block, 227 KiB on Hopper"},
    {"block_uncached", "A block reads its row twice, with a running maximum and sum: any length.",
     kWarpAndBlock, "none"},
};

struct Plan {
  Algorithm algorithm;
  std::string reason;
};

// The algorithm called `algorithm`, or the best one for the problem if it is empty. Throws
// std::invalid_argument if the named one cannot take the problem.
Plan plan(const Problem& problem, std::string_view algorithm, const Device& device);

// Runs the plan: x has outer * columns * inner elements, y as many, or rows() for logsumexp.
void launch(const Plan& plan, const Problem& problem, const void* x, void* y, const Queue& queue);

// The longest row that `warp` keeps in registers.
std::int64_t warp_columns(DType dtype);

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
