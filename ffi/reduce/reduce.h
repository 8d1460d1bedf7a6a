// Reductions of the rows of an array to one element each: sum, prod, max, min, argmax, argmin.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/device.h"
#include "core/dtype.h"
#include "core/queue.h"
#include "core/registry.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

enum class Function { kSum, kProd, kMax, kMin, kArgMax, kArgMin };

constexpr bool is_arg(Function function) { return function >= Function::kArgMax; }

// An array of `outer` x `columns` x `inner` elements, of which `columns` is the axis reduced over.
// Row r = o * inner + i starts at element o * columns * inner + i, and its elements lie `inner`
// apart. Its result, of dtype `result`, is element r of the result array.
struct Problem {
  Function function;
  DType dtype;
  DType result;
  std::int64_t outer;
  std::int64_t columns;
  std::int64_t inner;

  std::int64_t rows() const { return outer * inner; }
};

enum class Algorithm {
  kNaive,
  kStride,
  kSequential,
  kFirstAdd,
  kUnroll,
  kMultiple,
  kRow,
  kColumn,
};

inline constexpr std::string_view kHarris =
    "Mark Harris, Optimizing Parallel Reduction in CUDA, NVIDIA, 2007";
inline constexpr std::string_view kContiguousValues =
    "no argmax or argmin; rows that are contiguous in memory";
inline constexpr std::string_view kContiguous = "rows that are contiguous in memory";

inline constexpr AlgorithmInfo kAlgorithms[] = {
    {"naive", "A tree in shared memory; a modulo selects the active threads, so warps diverge.",
     kHarris, kContiguousValues},
    {"stride", "The same tree with adjacent active threads and a strided index: bank conflicts.",
     kHarris, kContiguousValues},
    {"sequential", "The tree adds the upper half to the lower: no divergence, no conflicts.",
     kHarris, kContiguousValues},
    {"first_add", "sequential, with the tree's first level done while loading.", kHarris,
     kContiguousValues},
    {"unroll", "first_add, with the last warp unrolled: shuffles instead of barriers.", kHarris,
     kContiguousValues},
    {"multiple", "Several blocks per row, many elements per thread, 16-byte loads.", kHarris,
     kContiguous},
    {"row", "A group of lanes, a warp or a block per row, by its length.",
     "NVIDIA CUB, segmented reduction", kContiguous},
    {"column", "Lanes along the contiguous axis inside the rows, threads down the columns.",
     "PyTorch, Reduce.cuh; XLA, column reduction", "none"},
};

struct Plan {
  Algorithm algorithm;
  std::string reason;
};

// Memory for what blocks pass on to the next launch. Its size need not be what workspace_bytes()
// says: the launch then splits rows less.
struct Workspace {
  void* data;
  std::size_t bytes;
};

// The algorithm called `algorithm`, or the best one for the problem if it is empty. Throws
// std::invalid_argument if the named one cannot take the problem.
Plan plan(const Problem& problem, std::string_view algorithm, const Device& device);

// Bytes of workspace for each row: an upper bound that depends neither on the number of rows nor
// on where they lie, because a shard of the problem has only its share.
std::int64_t workspace_bytes(const Problem& problem, std::string_view algorithm);

// Runs the plan: x has outer * columns * inner elements, y has rows().
void launch(const Plan& plan, const Problem& problem, const void* x, void* y, Workspace workspace,
            const Queue& queue);

// Sizes on which both the bound of the workspace and the launches depend.

inline constexpr int kLadderThreads = 256;

// How many elements a block of the ladder's steps before `multiple` takes.
constexpr std::int64_t ladder_block_columns(Algorithm algorithm) {
  return algorithm < Algorithm::kFirstAdd ? kLadderThreads : 2 * kLadderThreads;
}

// A row is split over several blocks only in parts that are worth one.
inline constexpr std::int64_t kSplitBytes = 16 * 1024;
inline constexpr std::int64_t kSplitColumns = 256;
inline constexpr std::int64_t kMaxSplits = 2048;

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
