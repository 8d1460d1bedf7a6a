// softmax, log_softmax, logsumexp and cross entropy over the rows of an array, and what their
// derivatives are made of.
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

// x is scale * the operand, without the masked elements; p is softmax(x) and y a forward result.
enum class Function {
  // Forward: a maximum and a sum along the row.
  kSoftmax,
  kLogSoftmax,
  kLogSumExp,
  kCrossEntropy,  // logsumexp(x) - x[label], and logsumexp(x)
  // Linear in t, with one sum along the row.
  kSoftmaxTangent,       // scale * y * (t - sum(y * t)): also its own transpose
  kLogSoftmaxCotangent,  // scale * (t - exp(y) * sum(t))
  // Linear in g, one number a row, and with no sum at all.
  kLogSumExpCotangent,     // scale * p * g
  kCrossEntropyCotangent,  // scale * (p - onehot(label)) * g
};

inline constexpr std::string_view kFunctions[] = {
    "softmax",         "log_softmax",           "logsumexp",           "cross_entropy",
    "softmax_tangent", "log_softmax_cotangent", "logsumexp_cotangent", "cross_entropy_cotangent"};

inline constexpr bool is_forward(Function function) { return function <= Function::kCrossEntropy; }
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

  std::int64_t rows() const { return outer * inner; }
};

// A boolean array that broadcasts to the operand: one byte for each of its own elements. Row r
// begins where the digits of r, written in mixed radix with `size`, times `stride` add up to.
struct Mask {
  static constexpr int kMaxDims = 4;
  const std::uint8_t* data = nullptr;  // none: nothing is left out
  std::int64_t column_stride = 0;
  int dims = 0;
  std::int64_t size[kMaxDims] = {};  // the last dim first
  std::int64_t stride[kMaxDims] = {};
};

// The arrays of a call. Those a function does not use are null.
struct Buffers {
  const void* x = nullptr;       // x, or y for those that are linear in t
  const void* t = nullptr;       // like x
  const void* lse = nullptr;     // logsumexp(x), in the accumulator's type
  const void* g = nullptr;       // the cotangent of each row's result, in the accumulator's type
  const void* labels = nullptr;  // of each row: int64, or int32
  bool wide_labels = false;
  Mask mask;
  void* y = nullptr;           // like x, and x itself if the elementwise functions may overwrite it
  void* row_result = nullptr;  // logsumexp(x), in the accumulator's type
  bool narrow_row_result = false;  // in x's instead
  void* loss = nullptr;            // in the accumulator's type, for cross entropy
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
  kBlock,
  kCluster,
  kSplit,
  kColumn,
  kElementwise,
};

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

inline constexpr AlgorithmInfo kAlgorithms[] = {
    {"baseline", "One block walks all rows: three passes over each, shared-memory tree reductions.",
     kOptimisation, "softmax only; no mask, causal or scale"},
    {"one_warp_one_row", "A warp per row, reduced by shuffles instead of shared memory.",
     kOptimisation, "softmax only; no mask, causal or scale"},
    {"one_warp_two_rows", "Each half of a warp takes a row: short rows leave fewer lanes idle.",
     kOptimisation, "softmax only; no mask, causal or scale"},
    {"one_warp_four_rows", "Each quarter of a warp takes a row.", kOptimisation,
     "softmax only; no mask, causal or scale"},
    {"one_warp_one_row_float4", "one_warp_one_row with loads and stores of four elements.",
     kOptimisation, "softmax only; no mask, causal or scale"},
    {"one_warp_two_rows_float4", "one_warp_two_rows with loads and stores of four elements.",
     kOptimisation, "softmax only; no mask, causal or scale"},
    {"one_warp_four_rows_float4", "one_warp_four_rows with loads and stores of four elements.",
     kOptimisation, "softmax only; no mask, causal or scale"},
    {"block_shared", "A block holds a row in shared memory: one read and one write.", kWarpAndBlock,
     "rows that fit shared memory, 227 KiB on Hopper; no mask, causal or scale; not cross entropy"},
    {"block_uncached", "A block reads its row twice, with a running maximum and sum: any length.",
     kWarpAndBlock, "no mask, causal or scale; not cross entropy"},
    {"warp", "Groups of up to 32 lanes hold rows in registers: one read and one write.",
     kWarpAndBlock, "the last axis; rows of at most 8 KiB"},
    {"staged", "Blocks move whole stretches of short rows through shared memory, aligned or not.",
     kOurs, "the last axis; rows of at most 1024 elements; no mask or causal"},
    {"block", "A block holds a row in registers; what does not fit is read again.", kOnline,
     "none"},
    {"cluster", "Up to 16 blocks share a row and exchange their sums through shared memory.",
     kOnline,
     "the last axis; rows of at most 1 MiB; compute capability 9.0; not under \"interpret\""},
    {"split",
     "Blocks share a long row: each keeps its part and waits for the others, or reads it again.",
     kOnline, "the last axis"},
    {"column",
     "Threads walk down the axis side by side, so that another axis than the last is read "
     "where it lies.",
     kOurs, "an axis that is not the last"},
    {"elementwise", "What needs no sum: the gradients of logsumexp and cross entropy.", kOurs,
     "logsumexp_cotangent and cross_entropy_cotangent"},
};

// How a kernel spreads over threads: data, for the launcher to pick the instance by.
struct Shape {
  int threads = 0;          // of a block
  int lanes = 0;            // threads on one row, if fewer than a block
  int packs = 0;            // packs of 16 bytes, or elements, that a thread holds of one row
  int rows = 1;             // rows that a group of lanes, or for staged a block, has in flight
  bool small = false;       // too little work to fill the GPU
  bool whole = true;        // threads hold all packs of their rows, or for split of their slices
  bool waits = false;       // the blocks on a row run together and wait for each other
  int cluster = 1;          // blocks on one row
  int steps = 0;            // along the axis, of a warp, if blocks of column hold strips
  std::int64_t slices = 1;  // of a row, for split
};

struct Plan {
  Algorithm algorithm;
  std::string reason;
  Shape shape;
};

// The algorithm called `algorithm`, or the best one for the problem if it is empty. Throws
// std::invalid_argument if the named one cannot take the problem.
Plan plan(const Problem& problem, std::string_view algorithm, const Device& device);

// The packs of 16 bytes that cover a row, at most.
std::int64_t most_packs(const Problem& problem);

// How many packs of a row a thread holds whose share has room for `packs`.
int packs_held(Function function, int packs);

// Bytes of workspace that a row needs at most, whatever the number of rows.
std::int64_t workspace_bytes(const Problem& problem, std::string_view algorithm);

// Run a plan. Each family of kernels is compiled in a file of its own.
void launch_ladder(const Plan& plan, const Problem& problem, const Buffers& buffers,
                   const Queue& queue);
void launch_forward(const Plan& plan, const Problem& problem, double scale, const Buffers& buffers,
                    const Queue& queue);
void launch_tangent(const Plan& plan, const Problem& problem, double scale, const Buffers& buffers,
                    const Queue& queue);
void launch_elementwise(const Plan& plan, const Problem& problem, double scale,
                        const Buffers& buffers, const Queue& queue);

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
