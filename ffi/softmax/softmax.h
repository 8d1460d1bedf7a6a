// softmax, log_softmax, logsumexp and cross entropy over the rows of an array, and what their
// derivatives are made of.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "core/algorithm.h"
#include "core/device.h"
#include "core/dtype.h"
#include "core/mask.h"
#include "core/queue.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// x is scale * the operand, without the masked elements; p is softmax(x) and y a forward result.
enum class Function {
  // Forward: a maximum and a sum along the row.
  kSoftmax,
  kLogSoftmax,
  kLogSumExp,
  kCrossEntropy,  // logsumexp(x) - x[label]
  // Linear in t, with one sum along the row.
  kSoftmaxTangent,       // scale * y * (t - sum(y * t)): also its own transpose
  kLogSoftmaxCotangent,  // scale * (t - exp(y) * sum(t))
  // Linear in g, one number a row, and with no sum at all.
  kLogSumExpCotangent,     // scale * p * g
  kCrossEntropyCotangent,  // scale * (p - onehot(label)) * g
};

inline constexpr std::string_view kFunctionNames[] = {
    "softmax",         "log_softmax",           "logsumexp",           "cross_entropy",
    "softmax_tangent", "log_softmax_cotangent", "logsumexp_cotangent", "cross_entropy_cotangent"};
constexpr auto& names_of(Function) { return kFunctionNames; }

inline constexpr bool is_forward(Function function) { return function <= Function::kCrossEntropy; }
inline constexpr bool is_linear_in_t(Function function) {
  return function == Function::kSoftmaxTangent || function == Function::kLogSoftmaxCotangent;
}
inline constexpr bool is_elementwise(Function function) {
  return function >= Function::kLogSumExpCotangent;
}
// True if there is one result for each row, and none for its elements.
inline constexpr bool reduces(Function function) {
  return function == Function::kLogSumExp || function == Function::kCrossEntropy;
}
inline constexpr bool has_labels(Function function) {
  return function == Function::kCrossEntropy || function == Function::kCrossEntropyCotangent;
}

// An array of `outer` x `columns` x `inner` elements, of which `columns` is the axis reduced over.
// Row r = o * inner + i starts at element o * columns * inner + i, and its elements lie `inner`
// apart. What there is one of for each row lies at index r.
struct Problem {
  Function function;
  DType dtype;
  std::int64_t outer;
  std::int64_t columns;
  std::int64_t inner;
  bool masked;           // some elements are left out by a boolean array
  std::int64_t queries;  // if not 0, row r has no elements but the first r % queries + 1
  bool scaled;           // x is not the operand itself
  // The largest power of two, up to 16, that divides the addresses of the arrays that have all
  // elements: where it is 16, they can be read in packs. If rows are whole packs and have flags of
  // their elements, then of the mask's address times an element's bytes as well: flags of a pack
  // can be read at once. (They need no field of their own: where a row begins with a pack, so do
  // its flags, whatever dims the mask lacks.)
  std::int64_t alignment;
  // Whether plans are made without regard to the number of rows: plan() sets it where it is asked
  // for kBatchInvariant, so it is no field.
  bool batch_invariant = false;

  template <class Self, class Visit>
  static void fields(Self& self, Visit&& visit) {
    visit("function", self.function);
    visit("dtype", self.dtype);
    visit("outer", self.outer);
    visit("columns", self.columns);
    visit("inner", self.inner);
    visit("masked", self.masked);
    visit("queries", self.queries);
    visit("scaled", self.scaled);
    visit("alignment", self.alignment);
  }

  std::int64_t rows() const { return outer * inner; }
};

// Where logsumexp of each row is written to: the result, in x's type; and for gradients, its two
// parts, in the accumulator's, since their sum has fewer digits than log_sum where the maximum is
// large. Those that were not asked for are null.
struct LogSumExps {
  void* result = nullptr;
  // The operand's element that makes the largest x, or a number near it; 0 if x is infinite there.
  void* maximum = nullptr;
  // The logarithm of the sum of exp(scale * (element - maximum)).
  void* log_sum = nullptr;
};

// The arrays of a call. Those a function does not use are null.
struct Buffers {
  const void* x = nullptr;        // x, or y for those that are linear in t
  const void* t = nullptr;        // like x
  const void* maximum = nullptr;  // as LogSumExps writes it
  const void* log_sum = nullptr;  // likewise
  const void* g = nullptr;        // the cotangent of each row's result, in the accumulator's type
  const void* labels = nullptr;   // of each row: int64, or int32
  bool wide_labels = false;
  Mask mask;
  void* y = nullptr;  // like x, and x itself if the elementwise functions may overwrite it
  LogSumExps logsumexps;
  void* loss = nullptr;  // in the accumulator's type, for cross entropy
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
};

enum class Algorithm {
  kBaseline,
  kOneWarpOneRow,
  kOneWarpTwoRows,
  kOneWarpFourRows,
  kOneWarpOneRowFloat4,
  kOneWarpTwoRowsFloat4,
  kOneWarpFourRowsFloat4,
  kBlockShared,
  kBlockUncached,
  kWarp,
  kStaged,
  kSmallBlock,
  kBlock,
  kBlockTwoPass,
  kStrided,
  kCluster,
  kClusterShared,
  kSplit,
  kSplitPipelined,
  kColumn,
  kColumnTwoPass,
  kStrip,
  kElementwise,
};
inline constexpr int kAlgorithmCount = static_cast<int>(Algorithm::kElementwise) + 1;

// The steps of the documents' ladders, which take plain softmax (the last two also log_softmax and
// logsumexp) without a mask or scale.
inline bool is_ladder(Algorithm algorithm) { return algorithm < Algorithm::kWarp; }

inline constexpr std::string_view kOptimisation =
    "He Wenhao, CUDA optimisation of softmax, August 2024";
inline constexpr std::string_view kWarpAndBlock =
    "Notes on warp and block softmax reductions after OneFlow and AITemplate, August 2024";
inline constexpr std::string_view kOnline =
    "Milakov and Gimelshein, Online normalizer calculation for softmax, 2018, arXiv:1805.02867";
inline constexpr std::string_view kOurs = "jax_gpuops";

// Limits: "in packs" are rows of arrays that begin at multiples of 16 bytes.
inline constexpr AlgorithmInfo kAlgorithms[kAlgorithmCount] = {
    {"baseline", "One block walks all rows: three passes over each, shared-memory tree reductions.",
     kOptimisation, "softmax only; no mask, causal or scale", "baseline_kernel"},
    {"one_warp_one_row", "A warp per row, reduced by shuffles instead of shared memory.",
     kOptimisation, "softmax only; no mask, causal or scale", "one_warp_kernel"},
    {"one_warp_two_rows", "Each half of a warp takes a row: short rows leave fewer lanes idle.",
     kOptimisation, "softmax only; no mask, causal or scale", "one_warp_kernel"},
    {"one_warp_four_rows", "Each quarter of a warp takes a row.", kOptimisation,
     "softmax only; no mask, causal or scale", "one_warp_kernel"},
    {"one_warp_one_row_float4", "one_warp_one_row with loads and stores of four elements.",
     kOptimisation, "softmax only; no mask, causal or scale", "one_warp_kernel"},
    {"one_warp_two_rows_float4", "one_warp_two_rows with loads and stores of four elements.",
     kOptimisation, "softmax only; no mask, causal or scale", "one_warp_kernel"},
    {"one_warp_four_rows_float4", "one_warp_four_rows with loads and stores of four elements.",
     kOptimisation, "softmax only; no mask, causal or scale", "one_warp_kernel"},
    {"block_shared", "A block holds a row in shared memory: one read and one write.", kWarpAndBlock,
     "rows that fit shared memory, 227 KiB on Hopper; no mask, causal or scale; not cross entropy",
     "block_shared_kernel"},
    {"block_uncached", "A block reads its row twice, with a running maximum and sum: any length.",
     kWarpAndBlock, "no mask, causal or scale; not cross entropy", "block_uncached_kernel"},
    {"warp", "Groups of up to 32 lanes hold rows in registers: one read and one write.",
     kWarpAndBlock, "the last axis in packs; rows of at most 8 KiB", "warp_kernel"},
    {"staged", "Blocks move whole stretches of short rows through shared memory, aligned or not.",
     kOurs, "the last axis; rows of at most 1024 elements; no mask or causal", "staged_kernel"},
    {"small_block",
     "A block holds a row in registers, as few packs a thread as possible: for little work.",
     kWarpAndBlock, "the last axis in packs; rows of at most 16 KiB; less than 2^31 elements",
     "small_block_kernel"},
    {"block", "A block holds a row in registers: one read and one write.", kOnline,
     "the last axis in packs; rows of at most 64 KiB", "block_kernel"},
    {"block_two_pass", "A block reads its row twice, but for what its registers hold.", kOnline,
     "the last axis in packs", "block_passing_kernel"},
    {"strided", "block_two_pass element by element: any address, axis and mask.", kOurs, "none",
     "block_passing_kernel"},
    {"cluster", "Up to 16 blocks hold a row in registers and exchange their sums.", kOnline,
     "the last axis in packs; rows of at most 512 KiB; compute capability 9.0", "cluster_kernel"},
    {"cluster_shared", "Up to 16 blocks hold a row in shared memory and exchange their sums.",
     kOnline, "the last axis in packs; rows of at most 1 MiB; compute capability 9.0",
     "cluster_slice_kernel"},
    {"split", "Blocks share a long row in two launches: states of its slices, then the results.",
     kOnline, "the last axis in packs",
     "split_reduce_held_kernel split_reduce_kernel split_finish_kernel split_combine_kernel"},
    {"split_pipelined",
     "Blocks that run together hold long rows in shared memory and wait for each other's states.",
     kOnline,
     "the last axis in packs; rows of which the shared memory of the GPU holds three, and that of "
     "a "
     "block none; "
     "not logsumexp or cross entropy; compute capability 9.0",
     "split_ring_kernel"},
    {"column",
     "Threads walk down the axis side by side, and hold it in registers: it is read where it lies.",
     kOurs, "an axis that is not the last, of at most 512 elements (gradients: 256)",
     "column_kernel"},
    {"column_two_pass", "Threads walk down the axis side by side twice: any length.", kOurs,
     "an axis that is not the last", "column_kernel"},
    {"strip", "Blocks, or clusters of them, hold strips of an axis that is long: one read.", kOurs,
     "an axis that is not the last, of some hundred to 8192 elements (gradients: 4096), beside "
     "whole packs; no mask; compute capability 9.0",
     "strip_kernel"},
    {"elementwise", "What needs no sum: the gradients of logsumexp and cross entropy.", kOurs,
     "logsumexp_cotangent and cross_entropy_cotangent", "elementwise_kernel"},
};

inline constexpr std::string_view name_of(Algorithm algorithm) {
  return kAlgorithms[static_cast<int>(algorithm)].name;
}

// How kernels find the elements of rows, and so which code they are compiled to.
enum class RowLayout {
  kAligned,          // rows begin and end with a pack of 16 bytes
  kSmall,            // they do, and their array has less than 2^31 elements
  kMasked,           // they do, and so does the mask, or the columns that take part end somewhere
  kUnaligned,        // they have any length, and so any phase
  kMaskedUnaligned,  // and a mask of any phase, or columns that do not take part
  kElements,         // likewise: neighbouring lanes read neighbouring elements, one at a time
  kStrided,          // nothing is known: each element is read by itself
};
inline constexpr std::string_view kRowLayoutNames[] = {
    "aligned", "small", "masked", "unaligned", "masked_unaligned", "elements", "strided"};
constexpr auto& names_of(RowLayout) { return kRowLayoutNames; }

// Which functions the code of a kernel is for.
enum class Variant {
  kGeneral,       // all functions with the same reduction
  kSoftmax,       // softmax alone
  kPlainSoftmax,  // softmax alone, and x is the operand itself
};
inline constexpr std::string_view kVariantNames[] = {"general", "softmax", "plain_softmax"};
constexpr auto& names_of(Variant) { return kVariantNames; }

// How an algorithm is launched: everything that the launchers need beside the arrays. What an
// algorithm does not use is 0.
struct Config {
  RowLayout layout = RowLayout::kStrided;
  Variant variant = Variant::kGeneral;
  std::int64_t blocks = 0;  // along x
  std::int64_t blocks_along_y = 1;
  int threads = 0;          // of a block; for block_shared the launcher asks for the compiled
                            // kernel's occupancy
  int cluster = 1;          // blocks on one row, or one strip, that form a cluster
  int lanes = 0;            // threads on one row, or side by side for column
  int packs = 0;            // that a thread holds (of both operands, where there are two), or
                            // elements of it for staged, column and the layout of elements
  int pack = 0;             // elements side by side that a thread of column has
  std::int64_t rows = 0;    // that a group of lanes, or for staged a block, has in flight
  std::int64_t steps = 0;   // along the axis, of a thread of column or a warp of strip; of
                            // elementwise, of a row
  std::int64_t slices = 0;  // of a row, each of a block
  std::int64_t slice = 0;   // packs of one, or of a warp's part of it for split_pipelined
  int piece = 0;            // packs of a warp
  std::int64_t finish_blocks = 0;  // of the second launch of split
  int finish_threads = 0;
  std::int64_t shared_bytes = 0;  // of dynamic shared memory, beside the kernel's own structures
  std::int64_t workspace_bytes = 0;

  template <class Self, class Visit>
  static void fields(Self& self, Visit&& visit) {
    visit("layout", self.layout);
    visit("variant", self.variant);
    visit("blocks", self.blocks);
    visit("blocks_along_y", self.blocks_along_y);
    visit("threads", self.threads);
    visit("cluster", self.cluster);
    visit("lanes", self.lanes);
    visit("packs", self.packs);
    visit("pack", self.pack);
    visit("rows", self.rows);
    visit("steps", self.steps);
    visit("slices", self.slices);
    visit("slice", self.slice);
    visit("piece", self.piece);
    visit("finish_blocks", self.finish_blocks);
    visit("finish_threads", self.finish_threads);
    visit("shared_bytes", self.shared_bytes);
    visit("workspace_bytes", self.workspace_bytes);
  }
};

struct Plan {
  Algorithm algorithm;
  std::string reason;
  Config config;
};

// The algorithm called `algorithm`, or the best one for the problem if it is empty, or that for
// kBatchInvariant. Throws std::invalid_argument if the named one cannot take the problem.
Plan plan(const Problem& problem, std::string_view algorithm, const Device& device);

// Bytes of workspace that a row needs at most, whatever the number of rows.
std::int64_t workspace_bytes(const Problem& problem, std::string_view algorithm);

// A planned call, as launchers take it.
struct Call {
  const Problem& problem;
  const Config& config;
  double scale;
  const Buffers& buffers;
  const Queue& queue;
};

// How an algorithm is launched: for functions that are linear in t, and for all others.
using Launcher = void (*)(const Call&);
struct Launchers {
  Algorithm algorithm;
  Launcher launch;
  Launcher launch_tangent;
};

// By which each source of kernels says which launchers it has, for elements of `dtype`.
struct RegisterLaunchers {
  RegisterLaunchers(DType dtype, std::initializer_list<Launchers> launchers);
};

// Runs a plan.
void launch(const Queue& queue, const Plan& plan, const Problem& problem, double scale,
            const Buffers& buffers);

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
