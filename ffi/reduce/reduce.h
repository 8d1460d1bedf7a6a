// Reductions of each row of an array to one element (sum, prod, max, min, argmax, argmin), or to
// two (its mean and its variance).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/algorithm.h"
#include "core/device.h"
#include "core/dtype.h"
#include "core/mask.h"
#include "core/queue.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

enum class Function { kSum, kProd, kMax, kMin, kArgMax, kArgMin, kMeanAndVar };

inline constexpr std::string_view kFunctions[] = {"sum",    "prod",   "max",         "min",
                                                  "argmax", "argmin", "mean_and_var"};
constexpr auto& names_of(Function) { return kFunctions; }

constexpr bool is_arg(Function function) {
  return function == Function::kArgMax || function == Function::kArgMin;
}

// sum, prod, max and min: a partial result is a value.
constexpr bool is_value(Function function) { return function < Function::kArgMax; }

// An array of `outer` x `columns` x `inner` elements, reduced over the axis `columns`. Row
// r = o * inner + i starts at element o * columns * inner + i, and its elements have the stride
// `inner`. Its result, of dtype `result`, is element r of the result array.
struct Problem {
  Function function;
  DType dtype;
  DType result;
  std::int64_t outer;
  std::int64_t columns;
  std::int64_t inner;
  bool masked;             // a boolean array excludes some elements
  std::int64_t alignment;  // of the array, in bytes
  std::int64_t workspace;  // bytes; kWorkspaceAsAsked: workspace_bytes() for each row
  // Whether the plan must not depend on the number of rows. plan() sets it for kBatchInvariant, so
  // it is not among the fields.
  bool batch_invariant = false;

  std::int64_t rows() const { return outer * inner; }

  template <class Self, class Visit>
  static void fields(Self& self, Visit&& visit) {
    visit("function", self.function);
    visit("dtype", self.dtype);
    visit("result", self.result);
    visit("outer", self.outer);
    visit("columns", self.columns);
    visit("inner", self.inner);
    visit("masked", self.masked);
    visit("alignment", self.alignment);
    visit("workspace", self.workspace);
  }
};

struct Buffers {
  const void* x;
  Mask mask;
  void* y;
  void* workspace;           // for the partials of blocks
  double divisor = 1;        // sum of floats: the result is divided by this, for a mean
  void* variance = nullptr;  // mean_and_var, whose y is the mean
  void* low = nullptr;       // mean_and_var: the low-order part of the mean; may be null
  double correction = 0;     // mean_and_var: the divisor is the number of elements minus this
};

enum class Algorithm {
  kNaive,
  kStride,
  kSequential,
  kFirstAdd,
  kUnroll,
  kMultiple,
  kRow,
  kHeld,
  kStaged,
  kCluster,
  kColumn,
  kInterleaved,
};

// The steps of the ladder before `multiple`.
constexpr bool is_step(Algorithm algorithm) { return algorithm < Algorithm::kMultiple; }

inline constexpr std::string_view kHarris =
    "Mark Harris, Optimizing Parallel Reduction in CUDA, NVIDIA, 2007";
inline constexpr std::string_view kContiguousValues =
    "sum, prod, max and min only; no mask if x is floating-point; rows that are contiguous in "
    "memory";
inline constexpr std::string_view kContiguous = "rows that are contiguous in memory";

inline constexpr AlgorithmInfo kAlgorithms[] = {
    {"naive", "A tree in shared memory; a modulo selects the active threads, so warps diverge.",
     kHarris, kContiguousValues, "naive_kernel"},
    {"stride", "The same tree with adjacent active threads and a strided index: bank conflicts.",
     kHarris, kContiguousValues, "stride_kernel"},
    {"sequential", "The tree adds the upper half to the lower: no divergence, no conflicts.",
     kHarris, kContiguousValues, "sequential_kernel"},
    {"first_add", "sequential, with the tree's first level done while loading.", kHarris,
     kContiguousValues, "first_add_kernel"},
    {"unroll", "first_add, with the last warp unrolled: shuffles instead of barriers.", kHarris,
     kContiguousValues, "unroll_kernel"},
    {"multiple", "Several blocks per row, many elements per thread, 16-byte loads.", kHarris,
     kContiguous, "multiple_kernel"},
    {"row", "A group of threads per row, from a few lanes to a block, depending on its length.",
     "NVIDIA CUB, segmented reduction", kContiguous, "row_kernel multiple_kernel"},
    {"held",
     "As row, but without a loop: the threads load the whole row before they combine any of it.",
     "NVIDIA CUB, segmented reduction",
     "no mask if x is floating-point; fewer than 2^32 - 1024 rows (2^31 if they have more than 256 "
     "bytes) that are contiguous in memory, of at most 64 KiB, and of a multiple of 16 bytes "
     "unless float32, float16 or bfloat16; of these, other rows of fewer than 7 elements (15 of "
     "16 bits) only in small arrays",
     "held_kernel held_elements_kernel held_moments_kernel held_moments_elements_kernel"},
    {"staged", "Tiles of whole rows in shared memory; each lane reduces whole rows.",
     "this project",
     "no mask if x is floating-point; rows that are contiguous in memory, of at most 1024 bytes; "
     "arrays aligned to 16 bytes",
     "staged_kernel"},
    {"cluster",
     "As multiple, but the blocks of a row are a cluster and combine their results through shared "
     "memory.",
     "this project",
     "fewer than 2^28 rows that are contiguous in memory, of at most 2^30 elements; compute "
     "capability 9.0",
     "cluster_kernel"},
    {"column",
     "Lanes along the contiguous dimension, which is not reduced; each steps along the reduced "
     "axis.",
     "PyTorch, Reduce.cuh; XLA, column reduction",
     "argmax and argmin: axes of fewer than 2^31 elements",
     "column_kernel short_column_kernel whole_column_kernel moments_column_kernel combine_kernel"},
    {"interleaved",
     "Blocks read 16 bytes per thread at a stride at which a thread always gets the same rows.",
     "this project",
     "no mask if x is floating-point; an axis that is not the last; the least common multiple of "
     "16 bytes and the bytes of the dimensions after it is at most 8 KiB",
     "interleaved_kernel combine_kernel"},
};

inline std::string_view name_of(Algorithm algorithm) {
  return kAlgorithms[static_cast<int>(algorithm)].name;
}

// The kernels of `column`: column_kernel and so on.
enum class ColumnKernel { kColumn, kShortColumn, kWholeColumn, kMomentsColumn };
inline constexpr std::string_view kColumnKernelNames[] = {"column", "short_column", "whole_column",
                                                          "moments_column"};
constexpr auto& names_of(ColumnKernel) { return kColumnKernelNames; }

// The launch of a kernel, and of a second one if it combines partial results of the first in the
// workspace.
struct Config {
  ColumnKernel column_kernel = ColumnKernel::kColumn;  // column
  int threads = 0;                                     // per block
  int lanes = 0;            // row, held: threads per row, 0 for a block; column: lanes per column
  int pack = 1;             // column: rows, held: elements that a thread reads at a time
  int stride = 0;           // interleaved: packs that a block reads at a time
  bool edges = false;       // held: rows are read by packs, but are not whole packs
  int lane_rows = 0;        // staged: rows of a tile per lane
  int cluster = 1;          // blocks per cluster; column, interleaved: 1, or `parts`
  int packs = 0;            // held: the most packs per thread
  std::int64_t blocks = 0;  // staged: blocks of the grid
  std::int64_t shared_bytes = 0;  // staged, interleaved
  std::int64_t parts = 1;         // of a row: each is reduced by a block to a partial result
  std::int64_t groups = 0;        // multiple: the most groups of `parts` blocks in a grid
  int last_threads = 0;           // per block of the second launch; 0: there is none
  int last_lanes = 0;             // of these, the threads per row
  std::int64_t workspace = 0;     // bytes in use

  template <class Self, class Visit>
  static void fields(Self& self, Visit&& visit) {
    visit("column_kernel", self.column_kernel);
    visit("threads", self.threads);
    visit("lanes", self.lanes);
    visit("pack", self.pack);
    visit("stride", self.stride);
    visit("edges", self.edges);
    visit("lane_rows", self.lane_rows);
    visit("cluster", self.cluster);
    visit("packs", self.packs);
    visit("blocks", self.blocks);
    visit("shared_bytes", self.shared_bytes);
    visit("parts", self.parts);
    visit("groups", self.groups);
    visit("last_threads", self.last_threads);
    visit("last_lanes", self.last_lanes);
    visit("workspace", self.workspace);
  }
};

struct Plan {
  Algorithm algorithm;
  std::string reason;
  Config config;
};

// The algorithm called `algorithm`, or the best one for the problem if it is empty or
// kBatchInvariant. Rows are split into no more parts than the workspace has room for partial
// results; for kBatchInvariant it must have room for all. Throws std::invalid_argument if no
// kernel, or not the named one, can take the problem.
Plan plan(const Problem& problem, std::string_view algorithm, const Device& device);

// Bytes of workspace for each row: an upper bound that does not depend on the number of rows, since
// each shard of the problem gets workspace for its own rows only. It is also enough for shards with
// a smaller `inner`.
std::int64_t workspace_bytes(const Problem& problem, std::string_view algorithm);

// How many blocks of the algorithm's first launch are resident on the device at a time, in whole
// clusters; for `multiple` and `column`, blocks of the most threads. If the device is present, this
// takes the registers of the compiled kernel into account. For moments_column_kernel, `config` has
// the lanes, the threads and the cluster.
int resident_multiple_blocks(const Problem& problem, const Device& device);
int resident_column_blocks(const Problem& problem, int pack, int lanes, int cluster,
                           const Device& device);
int resident_moments_blocks(const Problem& problem, const Config& config, const Device& device);
int resident_interleaved_blocks(const Problem& problem, int threads, std::int64_t shared_bytes,
                                int cluster, const Device& device);

// Runs the plan: x has outer * columns * inner elements, y has rows(), at least one each.
void launch(const Queue& queue, const Plan& plan, const Problem& problem, const Buffers& buffers);

// The launchers of the kernels, each compiled in a source file of its own.
void launch_multiple(const Queue& queue, const Plan& plan, const Problem& problem,
                     const Buffers& buffers);
void launch_rows(const Queue& queue, const Plan& plan, const Problem& problem,
                 const Buffers& buffers);
void launch_held(const Queue& queue, const Plan& plan, const Problem& problem,
                 const Buffers& buffers);
void launch_staged(const Queue& queue, const Plan& plan, const Problem& problem,
                   const Buffers& buffers);
void launch_clusters(const Queue& queue, const Plan& plan, const Problem& problem,
                     const Buffers& buffers);
void launch_columns(const Queue& queue, const Plan& plan, const Problem& problem,
                    const Buffers& buffers);
void launch_short_columns(const Queue& queue, const Plan& plan, const Problem& problem,
                          const Buffers& buffers);
void launch_moments_columns(const Queue& queue, const Plan& plan, const Problem& problem,
                            const Buffers& buffers);
void launch_interleaved(const Queue& queue, const Plan& plan, const Problem& problem,
                        const Buffers& buffers);
void launch_combine(const Queue& queue, const Plan& plan, const Problem& problem,
                    const Buffers& buffers);

// Sizes on which both plans and kernels depend.

inline constexpr int kLoads = 4;  // packs that a thread loads before it folds the first of them
inline constexpr int kLadderThreads = 256;
inline constexpr int kMultipleThreads = 512;  // at most
inline constexpr int kMultipleLoads = 4;      // packs that a thread loads before it folds one
inline constexpr int kRowThreads = 128;
inline constexpr int kMostHeldThreads = 1024;
inline constexpr int kStagedThreads = 256;   // at most
inline constexpr int kClusterThreads = 512;  // at most
inline constexpr int kClusterLoads = 4;      // packs that a thread loads before it folds one
inline constexpr int kColumnThreads = 256;
inline constexpr int kInterleavedThreads = 512;  // at most
inline constexpr int kCombineThreads = 256;

// held: the most packs per thread, which fit in the registers of a thread at full occupancy.
inline constexpr int kHeldPacks = 4;

// held, for rows that are read by elements: the most elements per thread, and threads per row.
inline constexpr int kHeldElements = 8;
inline constexpr int kMostElementLanes = 8;

// Whether `held` takes rows that are not whole packs.
constexpr bool holds_edges(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32;
}

// column: the rows that a thread of column_kernel reads at a time, if not one. If each row has a
// mask of its own, half of them where that was as fast or faster (docs/tuning.md) and compiles in
// half the time.
constexpr int column_pack(Function function, std::size_t item_bytes, bool masked) {
  const std::size_t halved = function == Function::kMeanAndVar ? 4 : 2;
  return (masked && item_bytes <= halved ? 8 : 16) / static_cast<int>(item_bytes);
}

// The most blocks per cluster: larger clusters are hard to schedule, and have more partials than
// combine_apart() combines at once.
inline constexpr int kMostReducingBlocks = 8;

// column, for rows of few elements (short_column.cuh).
inline constexpr int kMostShortColumnThreads = 1024;
inline constexpr int kShortColumnLoads = 8;  // columns that a thread loads before it folds one
inline constexpr int kShortColumnSets = 8;   // that a thread combines at a time, and the fewest

// column, for mean and variance of packs without a mask (moments_column.cuh).
inline constexpr int kMostMomentsThreads = 512;
inline constexpr int kMomentsLoads = 8;  // columns that a thread loads before it folds one

// column, interleaved: the place in shared memory of partial i of `bytes` bytes, of threads with
// `per` partials each, and so the number of places for i partials: see SpacedPartials in
// reducer.cuh.
constexpr int spaced_partials(int i, int per, std::int64_t bytes) {
  return per > 1 && bytes > 4 ? i + i / per : i;
}

// interleaved: shared memory for the partials of a step of `stride` packs, a multiple of 8 bytes.
constexpr std::int64_t interleaved_partials_bytes(int stride, int pack, std::int64_t bytes) {
  return (spaced_partials(stride * pack, pack, bytes) * bytes + 7) / 8 * 8;
}

// Shared memory that each block of a cluster of `blocks` blocks needs to combine the partials of
// `results` results: see cluster_parts.cuh.
constexpr std::int64_t cluster_parts_bytes(std::int64_t results, std::int64_t blocks,
                                           std::int64_t partial_bytes) {
  const std::int64_t share = (results + blocks - 1) / blocks;
  return blocks > 1 ? 8 + blocks * share * partial_bytes : 0;
}

// How many elements a block reduces in a step of the ladder.
constexpr std::int64_t step_columns(Algorithm algorithm) {
  return algorithm < Algorithm::kFirstAdd ? kLadderThreads : 2 * kLadderThreads;
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
