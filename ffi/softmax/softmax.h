// softmax, log_softmax, logsumexp and cross entropy over the rows of an array, and the functions
// that their derivatives are built from.
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
  // Linear in g, which has one element per row; no sum along the row.
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
// True if the function has one result per row and none per element.
inline constexpr bool reduces(Function function) {
  return function == Function::kLogSumExp || function == Function::kCrossEntropy;
}

// An `outer` x `columns` x `inner` array, reduced over the `columns` axis. Row r = o * inner + i
// starts at element o * columns * inner + i, and its elements have stride `inner`. Arrays with one
// element per row hold that of row r at index r.
struct Problem {
  Function function;
  DType dtype;
  std::int64_t outer;
  std::int64_t columns;
  std::int64_t inner;
  bool masked;           // a boolean array excludes some elements
  std::int64_t queries;  // if not 0, row r has only its first r % queries + 1 elements
  bool scaled;           // the scale is not 1
  // The largest power of two, up to 16, that divides the addresses of x, t and y: if it is 16, they
  // can be read in packs. If rows consist of whole packs and the mask has a flag per element, the
  // mask's address times the bytes of an element counts too, so that the flags of a pack can be
  // read at once. (The flags need no field of their own: where a row begins at a pack boundary,
  // so do its flags, whichever dims the mask lacks.)
  std::int64_t alignment;
  // Whether the plan must not depend on the number of rows. plan() sets it for kBatchInvariant, so
  // it is not among the fields().
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
  bool has_mask() const { return masked || queries != 0; }
};

// Where logsumexp of each row is written: the result, in x's type, and for gradients its two parts,
// in the accumulator's type. Where the maximum is large, the sum of the parts has fewer correct
// digits than log_sum. Outputs that were not requested are null.
struct LogSumExps {
  void* result = nullptr;
  // The operand's element with the largest x, or a number near it; 0 if that x is infinite.
  void* maximum = nullptr;
  // The logarithm of the sum of exp(scale * (element - maximum)).
  void* log_sum = nullptr;
};

// The arrays of a call. Those a function does not use are null.
struct Buffers {
  const void* x = nullptr;        // x, or y for functions that are linear in t
  const void* t = nullptr;        // like x
  const void* maximum = nullptr;  // as LogSumExps writes it
  const void* log_sum = nullptr;  // likewise
  const void* g = nullptr;        // the cotangent of each row's result, in the accumulator's type
  const void* labels = nullptr;   // one per row: int64 or int32
  bool wide_labels = false;
  Mask mask;
  void* y = nullptr;  // like x; may be x itself for the elementwise functions
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
  kColumnSplit,
  kStrip,
  kElementwise,
  kFlat,
};
inline constexpr int kAlgorithmCount = static_cast<int>(Algorithm::kFlat) + 1;

// The ladder steps from the reference documents. They compute softmax (the last two also
// log_softmax and logsumexp) without a mask or scale.
inline bool is_ladder(Algorithm algorithm) { return algorithm < Algorithm::kWarp; }

inline constexpr std::string_view kOptimisation =
    "He Wenhao, CUDA optimisation of softmax, August 2024";
inline constexpr std::string_view kWarpAndBlock =
    "Notes on warp and block softmax reductions after OneFlow and AITemplate, August 2024";
inline constexpr std::string_view kOnline =
    "Milakov and Gimelshein, Online normalizer calculation for softmax, 2018, arXiv:1805.02867";
inline constexpr std::string_view kOurs = "jax_gpuops";

// In the limits, "in packs" means rows of arrays that begin at multiples of 16 bytes.
inline constexpr AlgorithmInfo kAlgorithms[kAlgorithmCount] = {
    {"baseline",
     "One block computes all rows, in three passes over each, with tree reductions in shared "
     "memory.",
     kOptimisation, "softmax only; no mask, causal or scale", "baseline_kernel"},
    {"one_warp_one_row", "A warp per row, reduced by shuffles instead of shared memory.",
     kOptimisation, "softmax only; no mask, causal or scale", "one_warp_kernel"},
    {"one_warp_two_rows", "Each half of a warp computes a row: short rows leave fewer lanes idle.",
     kOptimisation, "softmax only; no mask, causal or scale", "one_warp_kernel"},
    {"one_warp_four_rows", "Each quarter of a warp computes a row.", kOptimisation,
     "softmax only; no mask, causal or scale", "one_warp_kernel"},
    {"one_warp_one_row_float4", "one_warp_one_row with loads and stores of four elements.",
     kOptimisation, "softmax only; no mask, causal or scale", "one_warp_kernel"},
    {"one_warp_two_rows_float4", "one_warp_two_rows with loads and stores of four elements.",
     kOptimisation, "softmax only; no mask, causal or scale", "one_warp_kernel"},
    {"one_warp_four_rows_float4", "one_warp_four_rows with loads and stores of four elements.",
     kOptimisation, "softmax only; no mask, causal or scale", "one_warp_kernel"},
    {"block_shared", "A block holds a row in shared memory: one read and one write.", kWarpAndBlock,
     "rows that fit in the shared memory of a block, at most 226 KiB on Hopper; no mask, causal or "
     "scale; not cross entropy or gradients",
     "block_shared_kernel"},
    {"block_uncached",
     "A block reads its row twice, with a running maximum and sum: rows of any length.",
     kWarpAndBlock, "no mask, causal or scale; not cross entropy", "block_uncached_kernel"},
    {"warp", "Groups of up to 32 lanes hold rows in registers: one read and one write.",
     kWarpAndBlock, "the last axis; arrays aligned to 16 bytes; rows of at most 8 KiB",
     "warp_kernel"},
    {"staged",
     "Blocks copy groups of adjacent short rows through shared memory, whatever their alignment.",
     kOurs, "the last axis; rows of at most 1024 elements; no mask or causal", "staged_kernel"},
    {"small_block",
     "A block holds a row in registers, with as few elements per thread as possible: for arrays "
     "that are not large.",
     kWarpAndBlock,
     "the last axis; arrays aligned to 16 bytes; rows of at most 16 KiB; fewer than 2^31 elements",
     "small_block_kernel"},
    {"block", "A block holds a row in registers: one read and one write.", kOnline,
     "the last axis; arrays aligned to 16 bytes; rows of at most 64 KiB", "block_kernel"},
    {"block_two_pass", "A block reads its row twice, except for the part that its registers hold.",
     kOnline, "the last axis; arrays aligned to 16 bytes", "block_passing_kernel"},
    {"strided", "block_two_pass element by element: any alignment, axis and mask.", kOurs, "none",
     "block_passing_kernel"},
    {"cluster", "Up to 16 blocks hold a row in registers and exchange their sums.", kOnline,
     "the last axis; arrays aligned to 16 bytes; rows of at most 512 KiB; compute capability 9.0",
     "cluster_kernel"},
    {"cluster_shared", "Up to 16 blocks hold a row in shared memory and exchange their sums.",
     kOnline,
     "the last axis; arrays aligned to 16 bytes; rows of at most 1 MiB; compute capability 9.0",
     "cluster_slice_kernel"},
    {"split",
     "Blocks share a long row in two launches: the first reduces its slices, the second combines "
     "these and writes the results.",
     kOnline, "the last axis; arrays aligned to 16 bytes",
     "split_reduce_held_kernel split_reduce_kernel split_finish_kernel split_combine_kernel"},
    {"split_pipelined",
     "Blocks that run concurrently hold long rows in shared memory and exchange partial "
     "results.",
     kOnline,
     "the last axis; arrays aligned to 16 bytes; rows too long for the shared memory of a block, "
     "of which that of the GPU holds three; not logsumexp or cross entropy; compute capability 9.0",
     "split_ring_kernel"},
    {"column",
     "Adjacent threads step along the axis and hold its elements in registers: one read and one "
     "write, without a transpose.",
     kOurs,
     "an axis that is not the last, of at most 1024 elements (gradients: 512), or 2048 (1024) in "
     "arrays of at most 8 MiB, or more if the dimensions after it take at most 32 bytes",
     "column_kernel column_lines_kernel"},
    {"column_two_pass", "As column, but the axis is read twice: any length.", kOurs,
     "an axis that is not the last", "column_kernel"},
    {"column_split",
     "As column_two_pass, but blocks share the axis in two launches: the first reduces its parts, "
     "the second combines these and writes the results.",
     kOurs, "an axis that is not the last", "column_kernel"},
    {"strip",
     "Blocks or clusters of blocks hold strips of the array along a long axis: one read and one "
     "write.",
     kOurs,
     "an axis that is not the last, of some hundred to 8192 elements (gradients: 4096); dimensions "
     "after it of a multiple of 16 bytes; arrays aligned to 16 bytes; no mask; compute capability "
     "9.0",
     "strip_kernel"},
    {"elementwise", "The gradients of logsumexp and cross entropy, which need no reduction.", kOurs,
     "logsumexp_cotangent and cross_entropy_cotangent",
     "elementwise_kernel elementwise_columns_kernel"},
    {"flat",
     "The same by packs of the whole array, which may hold elements of several rows: for short "
     "rows of any alignment.",
     kOurs,
     "logsumexp_cotangent and cross_entropy_cotangent along the last axis; no mask; arrays aligned "
     "to 16 bytes, of fewer than 2^31 elements",
     "flat_kernel"},
};

inline constexpr std::string_view name_of(Algorithm algorithm) {
  return kAlgorithms[static_cast<int>(algorithm)].name;
}

// How kernels address the elements of rows: a template parameter of the kernels.
enum class RowLayout {
  kAligned,          // rows begin and end at pack boundaries, multiples of 16 bytes
  kSmall,            // aligned, in an array of less than 2^31 elements
  kMasked,           // aligned, with an aligned mask, or only the first columns take part
  kUnaligned,        // rows of any length, which begin anywhere within a pack
  kMaskedUnaligned,  // the same with a mask at any address, or only the first columns take part
  kElements,         // the same, but lanes load single elements, coalesced
  kStrided,          // no alignment is known: each element is loaded separately
};
inline constexpr std::string_view kRowLayoutNames[] = {
    "aligned", "small", "masked", "unaligned", "masked_unaligned", "elements", "strided"};
constexpr auto& names_of(RowLayout) { return kRowLayoutNames; }

// Which functions a kernel is compiled for.
enum class Variant {
  kGeneral,       // all functions with the same reduction
  kSoftmax,       // softmax alone
  kPlainSoftmax,  // softmax alone, with a scale of 1
};
inline constexpr std::string_view kVariantNames[] = {"general", "softmax", "plain_softmax"};
constexpr auto& names_of(Variant) { return kVariantNames; }

// The launch configuration of an algorithm: everything that its launcher needs besides the arrays.
// Fields that an algorithm does not use keep their defaults.
struct Config {
  RowLayout layout = RowLayout::kStrided;
  Variant variant = Variant::kGeneral;
  std::int64_t blocks = 0;  // along x
  std::int64_t blocks_along_y = 1;
  int threads = 0;          // per block; for block_shared the launcher uses the compiled
                            // kernel's occupancy
  int cluster = 1;          // blocks per cluster, which share one row or one strip
  int lanes = 0;            // threads per row; side by side for column; per chunk of an axis
                            // for elementwise
  int packs = 0;            // per thread (of both operands together, if there are two);
                            // elements for staged, column and RowLayout::kElements
  int pack = 0;             // elements side by side per thread, for column, the ladder, and
                            // elementwise if elements have a stride
  bool lines = false;       // for column: blocks copy their tiles to shared memory, in lines, and
                            // the `pack` elements of a thread are apart
  std::int64_t rows = 0;    // at a time, per group of lanes; per block for staged, column and strip
  std::int64_t steps = 0;   // along the axis, per thread of column or warp of strip; per
                            // row for elementwise, or chunks of the axis
  std::int64_t slices = 0;  // per row, one per block; parts of the axis for column_split
  std::int64_t slice = 0;   // packs per slice; per warp's part of it for split_pipelined
  int piece = 0;            // packs per warp
  std::int64_t finish_blocks = 0;  // of the second launch of split
  int finish_threads = 0;
  std::int64_t shared_bytes = 0;  // of dynamic shared memory, besides the kernel's own structures
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
    visit("lines", self.lines);
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

// Plans the algorithm named `algorithm`; if it is empty or kBatchInvariant, chooses the best one
// for the problem. Throws std::invalid_argument if the named one cannot take the problem.
Plan plan(const Problem& problem, std::string_view algorithm, const Device& device);

// The bytes of workspace that suffice for each row, however many rows there are.
std::int64_t workspace_bytes(const Problem& problem, std::string_view algorithm);

// A planned call, as launchers take it.
struct Call {
  const Problem& problem;
  const Config& config;
  double scale;
  const Buffers& buffers;
  const Queue& queue;
};

// The launchers of an algorithm: for functions that are linear in t, and for all others.
using Launcher = void (*)(const Call&);
struct Launchers {
  Algorithm algorithm;
  Launcher launch;
  Launcher launch_tangent;
};

// Registers the launchers that a kernel source file has for elements of `dtype`.
struct RegisterLaunchers {
  RegisterLaunchers(DType dtype, std::initializer_list<Launchers> launchers);
};

// Runs a plan.
void launch(const Queue& queue, const Plan& plan, const Problem& problem, double scale,
            const Buffers& buffers);

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
