// Matrix multiplication: BLAS's gemm over a batch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/algorithm.h"
#include "core/device.h"
#include "core/dtype.h"
#include "core/integer.h"
#include "core/queue.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

// The requested precision: a jax.lax.Precision (the higher one of the two operands) or a
// jax.lax.DotAlgorithmPreset, which names the types of operands, products and sums.
enum class Precision {
  kDefault,
  kHigh,
  kHighest,
  kAnyF8AnyF8F32,
  kAnyF8AnyF8F32FastAccum,
  kAnyF8AnyF8Any,
  kAnyF8AnyF8AnyFastAccum,
  kF16F16F16,
  kF16F16F32,
  kBF16BF16BF16,
  kBF16BF16F32,
  kBF16BF16F32X3,
  kBF16BF16F32X6,
  kBF16BF16F32X9,
  kTF32TF32F32,
  kTF32TF32F32X3,
  kF32F32F32,
  kF64F64F64,
};

inline constexpr std::string_view kPrecisions[] = {
    "DEFAULT",
    "HIGH",
    "HIGHEST",
    "ANY_F8_ANY_F8_F32",
    "ANY_F8_ANY_F8_F32_FAST_ACCUM",
    "ANY_F8_ANY_F8_ANY",
    "ANY_F8_ANY_F8_ANY_FAST_ACCUM",
    "F16_F16_F16",
    "F16_F16_F32",
    "BF16_BF16_BF16",
    "BF16_BF16_F32",
    "BF16_BF16_F32_X3",
    "BF16_BF16_F32_X6",
    "BF16_BF16_F32_X9",
    "TF32_TF32_F32",
    "TF32_TF32_F32_X3",
    "F32_F32_F32",
    "F64_F64_F64",
};
constexpr auto& names_of(Precision) { return kPrecisions; }

// The activation, applied to op(a) op(b) + bias before c is added and the sum is rounded: the
// function of that name in jax.nn; kGeluExact is jax.nn.gelu(approximate=False).
enum class EpilogueOp { kNone, kRelu, kGelu, kGeluExact, kSilu };

inline constexpr std::string_view kEpilogueOps[] = {"none", "relu", "gelu", "gelu_exact", "silu"};
constexpr auto& names_of(EpilogueOp) { return kEpilogueOps; }

// What each scale, a float, of a factor applies to: the whole factor, one row of op(a) or column of
// op(b), or one block. A block is kScaleBlock elements of k by one row of op(a), or by kScaleBlock
// columns of op(b); the last blocks may be smaller.
enum class ScaleKind { kNone, kTensor, kVector, kBlocks };

inline constexpr std::string_view kScaleKinds[] = {"none", "tensor", "vector", "blocks"};
constexpr auto& names_of(ScaleKind) { return kScaleKinds; }

inline constexpr int kScaleBlock = 128;

// result[i] = alpha op(a[i]) op(b[i]) + beta c[i], or epilogue(op(a[i]) op(b[i]) + bias[i]) + beta
// c[i], for each i in the batch, all row-major: op(a) is m x k and stored k x m if `transpose_a`;
// op(b) is k x n and stored n x k if `transpose_b`; c and the result are m x n; a bias has n
// elements and is added to each row. A shared factor or bias is the same for the whole batch. A
// gated result is multiplied by op(a[i]) up[i], where `up` is stored and shared like b. Either both
// factors have scales or neither has; scales are stored in the order of their factor, and may be
// shared by the batch.
struct Problem {
  DType dtype;         // of a and b
  DType result_dtype;  // of c, bias and the result: see takes_result() in plan.h
  Precision precision;
  std::int64_t batch;
  std::int64_t m;
  std::int64_t n;
  std::int64_t k;
  bool transpose_a;
  bool transpose_b;
  bool share_a;
  bool share_b;
  bool has_c;
  bool scaled;  // alpha is not 1
  bool has_bias;
  bool share_bias;  // false without one
  bool gated;
  EpilogueOp epilogue;
  ScaleKind a_scale;
  ScaleKind b_scale;
  bool share_a_scale;  // false without one
  bool share_b_scale;
  std::int64_t alignment;  // of all arrays, in bytes
  std::int64_t workspace;  // bytes; kWorkspaceAsAsked: as many as workspace_bytes() returns

  template <class Self, class Visit>
  static void fields(Self& self, Visit&& visit) {
    visit("dtype", self.dtype);
    visit("result_dtype", self.result_dtype);
    visit("precision", self.precision);
    visit("batch", self.batch);
    visit("m", self.m);
    visit("n", self.n);
    visit("k", self.k);
    visit("transpose_a", self.transpose_a);
    visit("transpose_b", self.transpose_b);
    visit("share_a", self.share_a);
    visit("share_b", self.share_b);
    visit("has_c", self.has_c);
    visit("scaled", self.scaled);
    visit("has_bias", self.has_bias);
    visit("share_bias", self.share_bias);
    visit("gated", self.gated);
    visit("epilogue", self.epilogue);
    visit("a_scale", self.a_scale);
    visit("b_scale", self.b_scale);
    visit("share_a_scale", self.share_a_scale);
    visit("share_b_scale", self.share_b_scale);
    visit("alignment", self.alignment);
    visit("workspace", self.workspace);
  }
};

inline bool has_scales(const Problem& problem) { return problem.a_scale != ScaleKind::kNone; }

// Whether the sum of each block of k is scaled separately.
inline bool scales_blocks(const Problem& problem) {
  return problem.a_scale == ScaleKind::kBlocks || problem.b_scale == ScaleKind::kBlocks;
}

// Whether a bias, an activation or a gate is applied before the sums are rounded.
inline bool has_epilogue(const Problem& problem) {
  return problem.has_bias || problem.gated || problem.epilogue != EpilogueOp::kNone;
}

struct Buffers {
  const void* a;
  const void* b;
  const void* c;        // null if the problem has none; beta is ignored then
  const void* bias;     // null if the problem has none
  const void* up;       // null if the problem is not gated
  const void* a_scale;  // null if the problem has none
  const void* b_scale;
  void* result;
  void* workspace;
  double alpha;
  double beta;
};

enum class Algorithm {
  kNaive,
  kCoalesced,
  kShared,
  kBlockTiled,
  kBankConflictFree,
  kDoubleBuffered,
  kTensorCore,
  kSplitK,
  kParallelSplitK,
  kWgmmaBatched,
  kSkinny,
  kBF16X6,
  kFP16X3,
  kFmaPipelined,
  kFmaSliced,
  kFmaBatched,
  kFmaSkinny,
  kMmaPipelined,
  kMmaBatched,
  kCublas,
};

inline constexpr std::string_view kGemmLadder =
    "CUDA general matrix multiplication: from entry to mastery, a ladder of sgemm kernels";
inline constexpr std::string_view kBF16X6Source =
    "jax_gpuops, after Henry, Tang, Heinecke, Leveraging the bfloat16 artificial intelligence "
    "datatype for higher-precision computations, 2019, and Ootomo, Yokota, Recovering single "
    "precision accuracy from tensor cores, 2022";
inline constexpr std::string_view kFP16X3Source =
    "jax_gpuops, after Ootomo, Yokota, Recovering single precision accuracy from tensor cores, "
    "2022";
inline constexpr std::string_view kSgemmNotes =
    "Notes on sgemm: naive, coalesced and shared-memory kernels, August 2024";

inline constexpr AlgorithmInfo kAlgorithms[] = {
    {"naive", "A thread per element; the lanes of a warp read different rows of a.", kGemmLadder,
     "none", "naive_kernel"},
    {"coalesced", "A thread per element; the lanes of a warp read adjacent elements of b.",
     kSgemmNotes, "none", "coalesced_kernel"},
    {"shared", "Tiles of 32 x 32 in shared memory: each element is read 32 times less often.",
     kSgemmNotes, "none", "shared_kernel"},
    {"block_tiled", "A 128 x 128 tile per block, 8 x 8 elements per thread, in registers.",
     kGemmLadder, "none", "block_tiled_kernel"},
    {"bank_conflict_free",
     "block_tiled with a transposed in shared memory, and the elements of a thread in four "
     "quarters of the tile, which lanes read without bank conflicts.",
     kGemmLadder, "none", "bank_conflict_free_kernel"},
    {"double_buffered",
     "bank_conflict_free with two buffers: the next tile loads while this one is multiplied.",
     kGemmLadder, "none", "double_buffered_kernel"},
    {"tensor_core",
     "Tensor cores by wgmma: persistent blocks compute one tile after another; one warp copies by "
     "TMA, the others multiply.",
     "jax_gpuops, after NVIDIA CUTLASS's warp-specialised persistent kernels",
     "float16, bfloat16, float32 in TF32 where the precision allows it, float8_e4m3fn, float8_e5m2 "
     "and int8; arrays aligned to 16 bytes; alpha = 1; a bias or an activation only for float32, "
     "and for 16-bit floats that are not transposed; c only for floats that are not transposed, "
     "and of float32 only for rows of b that are a multiple of 16 bytes; scales only for 8-bit "
     "factors, those of blocks only for float8; compute capability 9.0",
     "align_rows_kernel transpose_rows_kernel transpose_bytes_kernel persistent_kernel "
     "turned_kernel"},
    {"split_k",
     "Tensor cores for few tiles: the blocks of a cluster divide the depth k of a tile and "
     "exchange their partial sums.",
     "jax_gpuops",
     "those of tensor_core, and no 8-bit dtypes, no c, and a depth k of more than 128 bytes",
     "align_rows_kernel transpose_rows_kernel split_k_kernel"},
    {"parallel_split_k",
     "Tensor cores for few tiles of a large depth k: blocks of tensor_core multiply parts of the "
     "depth, and a second kernel adds their partial sums and applies a bias and an activation.",
     "jax_gpuops, after NVIDIA CUTLASS's parallel split-K",
     "float16 and bfloat16, and float32 in TF32 with an a that is K-major, a b that is not, and "
     "rows of b that are a multiple of 16 bytes; else those of split_k, and results of at most "
     "2^23 elements, with n rounded up to a multiple of 8",
     "align_rows_kernel persistent_kernel turned_kernel split_k_reduce_kernel"},
    {"wgmma_batched",
     "Tensor cores for batches of small products: several blocks per multiprocessor, with a tile "
     "each, so that one is copied by TMA while others are multiplied or written.",
     "jax_gpuops",
     "float16 and bfloat16; arrays aligned to 16 bytes; factors whose rows are a multiple of 16 "
     "bytes; at most 2^28 columns; no c; a bias or an activation only for a result of the factors' "
     "dtype; alpha = 1; compute capability 9.0",
     "wgmma_batched_kernel"},
    {"skinny",
     "Tensor cores for few rows or columns: the other factor is read once, and each warp of a "
     "block multiplies a part of the depth k.",
     "jax_gpuops",
     "float16 and bfloat16; at most 1024 rows or columns; no c; alpha = 1; compute capability 8.0 "
     "or later",
     "skinny_kernel"},
    {"bf16_x6",
     "float32 at full accuracy on tensor cores: each element is split into three bfloat16 parts, "
     "six products of parts are added, and every 32 or 64 elements of the depth k the sums leave "
     "the tensor cores.",
     kBF16X6Source, "float32; any jax.lax.Precision, or BF16_BF16_F32_X6; compute capability 9.0",
     "split_rows_kernel split_columns_kernel part_products_kernel double_buffered_kernel "
     "finish_results_kernel"},
    {"fp16_x3",
     "As bf16_x6 in half its time, for data in which few elements are small compared to the "
     "largest of their row: two float16 parts of each element, three products of parts. For other "
     "data bf16_x6 runs after it, in the same call.",
     kFP16X3Source, "float32; any jax.lax.Precision; compute capability 9.0",
     "split_rows_kernel split_columns_kernel part_products_kernel double_buffered_kernel "
     "finish_results_kernel"},
    {"fma_pipelined",
     "float32 by FMAs: one thread copies by TMA, eight warps multiply tiles of 128 x 256 or 128 x "
     "128.",
     "jax_gpuops",
     "float32; arrays aligned to 16 bytes; factors whose rows are a multiple of 16 bytes; no bias "
     "or activation; compute capability 9.0",
     "fma_pipelined_kernel"},
    {"fma_sliced",
     "float32 by FMAs for few tiles: each warp of a block multiplies a slice of the depth k of a "
     "small tile, copied by cp.async into its own ring of stages; if there are fewer tiles than "
     "multiprocessors, the blocks of a cluster share the depth too.",
     "jax_gpuops, after NVIDIA CUTLASS's sliced-K kernels",
     "float32; compute capability 8.0 or later, 9.0 for clusters", "fma_sliced_kernel"},
    {"fma_batched",
     "float32 by FMAs for batches of small products: several blocks per multiprocessor, with a "
     "small tile each, so that one is copied by cp.async while others are multiplied.",
     "jax_gpuops", "float32; compute capability 8.0 or later", "fma_batched_kernel"},
    {"fma_skinny",
     "float32 by FMAs for few rows or columns: the other factor is read once, and each warp of a "
     "block multiplies a part of the depth k; if there are few tiles, the blocks of a cluster "
     "share the depth too.",
     "jax_gpuops",
     "float32; at most 16 rows or columns; compute capability 8.0 or later, 9.0 for clusters",
     "fma_skinny_kernel"},
    {"mma_pipelined",
     "Tensor cores of any GPU: slices of the factors are copied asynchronously into a ring of "
     "stages, and warps multiply them by mma.sync.",
     "jax_gpuops, after NVIDIA CUTLASS's multistage kernels",
     "float16, bfloat16, float32 in TF32 where the precision allows it, and float64; compute "
     "capability 8.0 or later",
     "mma_pipelined_kernel"},
    {"mma_batched",
     "Tensor cores of any GPU for batches of small products, and for rows of any alignment: "
     "several blocks per multiprocessor, with a tile each; rows of factors and results have the "
     "same offset from a multiple of 16 bytes in shared memory as in global memory.",
     "jax_gpuops",
     "float16, bfloat16, and float32 in TF32 where the precision allows it; arrays aligned to 16 "
     "bytes; no c; alpha = 1; compute capability 8.0 or later",
     "mma_batched_kernel"},
    {"cublas", "cuBLAS, from the library that JAX has loaded: what the ladder is measured against.",
     "NVIDIA cuBLAS, cublasGemmStridedBatchedEx", "CUDA only; no bias or activation"},
};

inline std::string_view name_of(Algorithm algorithm) {
  return kAlgorithms[static_cast<int>(algorithm)].name;
}

// How a kernel is launched: with one block per tile of the result or, for persistent kernels, with
// blocks that take several tiles. cublas does not use it.
struct Config {
  int threads = 0;  // of a block
  int tile_rows = 0;
  int tile_cols = 0;
  // Packs of kPack elements, or of skinny's own sizes, begin at aligned addresses and never
  // straddle an edge.
  bool pack_a = false;
  bool pack_b = false;
  bool pack_result = false;
  bool row_major = false;  // launch the kernel specialised for row-major factors in packs
  // Of the kernels on tensor cores:
  std::int64_t blocks = 0;
  int cluster_rows = 0;  // blocks of a cluster: neighbours along m, or along n if `turned`
  int stages = 0;        // of the pipeline, each with a slice of a and of b in shared memory
  int group = 0;         // rows of cluster tiles in a group: see TileOrder and transposed()
  // If there is a second launch (see Tail): how many cluster tiles the first one takes, and the
  // tile and the number of blocks of the second.
  std::int64_t tiles = 0;
  int tail_rows = 0;
  int tail_cols = 0;
  std::int64_t tail_blocks = 0;
  int splits = 1;        // parts of the depth (the extent of k), for a block of a cluster each or,
                         // in parallel_split_k, for tiles of their own
  int vector_bytes = 0;  // per copy to shared memory, if the kernel has copies of several sizes, or
                         // in wgmma_batched per store of results
  std::int64_t shared_bytes = 0;
  bool promotes = false;   // adds the products of each stage separately: see Persistent
  bool turned = false;     // computes the transposed product: see Persistent and Turned
  bool ping_pong = false;  // each consumer has tiles of its own: see Persistent
  // A factor may be copied first (see needs_copy); a result whose rows are not multiples of 16
  // bytes, or partial sums of `turned` tiles, are written by the threads.
  bool copies_a = false;
  bool copies_b = false;
  bool writes_elements = false;
  bool streams_result = false;  // its lines leave the L2 cache before those of the factors
  std::int64_t workspace_bytes = 0;

  template <class Self, class Visit>
  static void fields(Self& self, Visit&& visit) {
    visit("threads", self.threads);
    visit("tile_rows", self.tile_rows);
    visit("tile_cols", self.tile_cols);
    visit("pack_a", self.pack_a);
    visit("pack_b", self.pack_b);
    visit("pack_result", self.pack_result);
    visit("row_major", self.row_major);
    visit("blocks", self.blocks);
    visit("cluster_rows", self.cluster_rows);
    visit("stages", self.stages);
    visit("group", self.group);
    visit("tiles", self.tiles);
    visit("tail_rows", self.tail_rows);
    visit("tail_cols", self.tail_cols);
    visit("tail_blocks", self.tail_blocks);
    visit("splits", self.splits);
    visit("vector_bytes", self.vector_bytes);
    visit("shared_bytes", self.shared_bytes);
    visit("promotes", self.promotes);
    visit("turned", self.turned);
    visit("ping_pong", self.ping_pong);
    visit("copies_a", self.copies_a);
    visit("copies_b", self.copies_b);
    visit("writes_elements", self.writes_elements);
    visit("streams_result", self.streams_result);
    visit("workspace_bytes", self.workspace_bytes);
  }
};

struct Plan {
  Algorithm algorithm;
  std::string reason;
  Config config;
};

// The algorithm called `algorithm`, or the best one for the problem if it is empty. Throws
// std::invalid_argument if no kernel, or not the named one, can take the problem.
Plan plan(const Problem& problem, std::string_view algorithm, const Device& device);

// Bytes of workspace for the whole problem: rows are not independent here, and XLA partitions none.
std::int64_t workspace_bytes(const Problem& problem, std::string_view algorithm);

// Runs the plan.
void launch(const Queue& queue, const Plan& plan, const Problem& problem, const Buffers& buffers);

// The library call of `cublas`. While the queue prepares, loads the library and creates its handle.
void launch_cublas(const Queue& queue, const Problem& problem, const Buffers& buffers);

// The launcher of tensor_core for factors of dtype T: __half, __nv_bfloat16, float, __nv_fp8_e4m3,
// __nv_fp8_e5m2 or std::int8_t. Its source is compiled for compute capability 9.0 alone.
template <class T>
void launch_tensor_core(const Queue& queue, const Config& config, const Problem& problem,
                        const Buffers& buffers);

// The same for factors with scales, for T: __nv_fp8_e4m3, __nv_fp8_e5m2 or std::int8_t.
template <class T>
void launch_scaled_tensor_core(const Queue& queue, const Config& config, const Problem& problem,
                               const Buffers& buffers);

// The launcher of split_k, for the same T except those of 8 bits.
template <class T>
void launch_split_k(const Queue& queue, const Config& config, const Problem& problem,
                    const Buffers& buffers);

// The launcher of parallel_split_k, for __half, __nv_bfloat16 or float.
template <class T>
void launch_parallel_split_k(const Queue& queue, const Config& config, const Problem& problem,
                             const Buffers& buffers);

// The launcher of wgmma_batched, for __half or __nv_bfloat16.
template <class T>
void launch_wgmma_batched(const Queue& queue, const Config& config, const Problem& problem,
                          const Buffers& buffers);

// The launcher of skinny, which is compiled for all GPUs.
template <class T>
void launch_skinny(const Queue& queue, const Config& config, const Problem& problem,
                   const Buffers& buffers);

// The launcher of bf16_x6, which is compiled for compute capability 9.0 alone.
void launch_bf16_x6(const Queue& queue, const Config& config, const Problem& problem,
                    const Buffers& buffers);

// The same for fp16_x3.
void launch_fp16_x3(const Queue& queue, const Config& config, const Problem& problem,
                    const Buffers& buffers);

// The same for fma_pipelined.
void launch_fma_pipelined(const Queue& queue, const Config& config, const Problem& problem,
                          const Buffers& buffers);

// The launcher of fma_sliced, which is compiled for all GPUs.
void launch_fma_sliced(const Queue& queue, const Config& config, const Problem& problem,
                       const Buffers& buffers);

// The same for fma_batched.
void launch_fma_batched(const Queue& queue, const Config& config, const Problem& problem,
                        const Buffers& buffers);
// The same for fma_skinny.
void launch_fma_skinny(const Queue& queue, const Config& config, const Problem& problem,
                       const Buffers& buffers);

// The launcher of mma_pipelined, for __half, __nv_bfloat16, float or double; it is compiled for all
// GPUs.
template <class T>
void launch_mma_pipelined(const Queue& queue, const Config& config, const Problem& problem,
                          const Buffers& buffers);

// The launcher of mma_batched, for __half, __nv_bfloat16 or float; it is compiled for all GPUs.
template <class T>
void launch_mma_batched(const Queue& queue, const Config& config, const Problem& problem,
                        const Buffers& buffers);

// Launches double_buffered for floats; it does nothing if *flag is 0 when it starts.
void launch_where_flagged(const Queue& queue, const Config& config, const Problem& problem,
                          const Buffers& buffers, const std::int32_t* flag);

// Sizes on which both plans and kernels depend.

inline constexpr int kPack = 4;         // elements in one global load or store of a thread
inline constexpr int kPieceBytes = 16;  // of lines of factors in shared memory, as copied

// naive and coalesced: a thread for each element.
inline constexpr int kElementThreads = 256;
inline constexpr int kNaiveRows = 32;
inline constexpr int kNaiveCols = kElementThreads / kNaiveRows;
inline constexpr int kCoalescedCols = 32;
inline constexpr int kCoalescedRows = kElementThreads / kCoalescedCols;

// shared
inline constexpr int kSharedTile = 32;
inline constexpr int kSharedThreads = kSharedTile * kSharedTile;

// block_tiled and those after it
inline constexpr int kTile = 128;
inline constexpr int kTileThreads = 256;

// tensor_core

// A factor as it is stored: `batch` row-major matrices of `rows` rows of `length` elements. It is
// deep (K-major) if its rows are contiguous along k.
struct StoredFactor {
  std::int64_t batch;
  std::int64_t rows;
  std::int64_t length;
  bool deep;
  int element_bytes;
};
inline StoredFactor stored_a(const Problem& problem) {
  const bool deep = !problem.transpose_a;
  return {problem.share_a ? 1 : problem.batch, deep ? problem.m : problem.k,
          deep ? problem.k : problem.m, deep, static_cast<int>(info(problem.dtype).bytes)};
}
inline StoredFactor stored_b(const Problem& problem) {
  const bool deep = problem.transpose_b;
  return {problem.share_b ? 1 : problem.batch, deep ? problem.n : problem.k,
          deep ? problem.k : problem.n, deep, static_cast<int>(info(problem.dtype).bytes)};
}

// Bytes of a line of a stage in shared memory: the depth of a stage, and the alignment that rows in
// global memory should have.
inline constexpr int kTensorLineBytes = 128;

// Whether tensor copies (TMA) take rows of `bytes` bytes.
inline bool fits_tensor_copies(std::int64_t bytes) { return bytes % 16 == 0; }

// Factors that the kernels cannot read as they are stored are copied first. Rows that do not fit
// tensor copies are copied to rows that begin at whole lines; factors that are not deep are
// transposed, unless they have 16 bits.
inline bool is_transposed(const StoredFactor& factor) {
  return factor.element_bytes != 2 && !factor.deep;
}
inline bool needs_copy(const StoredFactor& factor) {
  return is_transposed(factor) || !fits_tensor_copies(factor.length * factor.element_bytes);
}

// Of the copy of a factor: its layout, the distance between its rows in elements, and its bytes.
// The copies lie in the workspace one after the other, the copy of a first.
inline StoredFactor copy_of(const StoredFactor& factor) {
  if (!is_transposed(factor)) return factor;
  return {factor.batch, factor.length, factor.rows, true, factor.element_bytes};
}
inline std::int64_t pitch_of_copy(const StoredFactor& factor) {
  const int per_line = kTensorLineBytes / factor.element_bytes;
  return divide_up(copy_of(factor).length, per_line) * per_line;
}
inline std::int64_t copy_bytes(const StoredFactor& factor) {
  return factor.batch * copy_of(factor).rows * pitch_of_copy(factor) * factor.element_bytes;
}

// The tiles that it has kernels for.
struct TensorCoreTile {
  int result_bytes;  // of an element
  int rows;
  int cols;
  int consumers;  // warpgroups that multiply
  int stages;
  int cluster_rows;
  // See Persistent.
  int pending;
  bool late_stores;
  bool promotes;
  // Speed once all multiprocessors have a tile, in percent of the largest tile's: with factors
  // whose rows begin at multiples of 128 bytes, and with others. Measured on an H200 with 16-bit
  // results; the small tile's values for 32-bit results are estimates.
  int speed;
  int unaligned_speed;
  bool turned = false;  // computes the transposed product: see Persistent
  // Whether it does so for floats, see Turned: the blocks of a cluster are then neighbours along n.
  bool floats = false;
  // Whether each consumer has tiles of its own, see Persistent: only for an a that is K-major, and
  // without a gate.
  bool ping_pong = false;

  constexpr int threads() const { return 128 * (1 + consumers); }

  // Whether half of its columns is a whole number of panels: in a gated problem, one half holds
  // columns of b and the other columns of up.
  constexpr bool gates() const { return cols % 128 == 0 && !ping_pong; }

  // The ring of stages, two panels of results for each consumer unless they are written from
  // registers, and the mbarriers. They begin at a multiple of 1024 bytes, but the shared memory of
  // a launch only at a multiple of 128.
  constexpr int shared_bytes() const {
    const int panel_rows = !turned || floats ? 64 : result_bytes > 2 ? 0 : rows % 32 == 0 ? 32 : 16;
    const int panels = consumers * 2 * panel_rows * kTensorLineBytes;
    const int bytes = stages * (rows + cols) * kTensorLineBytes + panels + 2 * stages * 8;
    return (bytes + 1023) / 1024 * 1024 + 1024 - 128;
  }
};

// clang-format off
inline constexpr TensorCoreTile kTensorCoreTiles[] = {
    // result  tile   consumers, stages, cluster  pending, late   promotes  speeds
    {2, 128, 256,     2, 4, 2,                    0,       true,  false,    100, 100},
    {2, 128, 192,     2, 4, 2,                    0,       true,  false,    98, 80},
    {2, 128, 128,     2, 6, 1,                    1,       true,  false,    96, 57},
    {2, 128, 128,     2, 6, 2,                    1,       false, false,    96, 80,
                                                                            false, false, true},
    {2, 64, 128,      1, 8, 1,                    1,       false, false,    86, 38},
    {4, 128, 256,     2, 4, 2,                    0,       false, false,    100, 100},
    {4, 64, 128,      1, 8, 1,                    1,       false, false,    90, 40},
};

// For plain products of 16-bit floats with few more rows than a multiple of 64. The speeds for rows
// that do not begin at multiples of 128 bytes are estimates, with as many lines per second as those
// of the tiles of 128 x 128 and 64 x 128.
inline constexpr TensorCoreTile kTensorCoreTurnedTiles[] = {
    {2, 96, 128,      2, 7, 1,                    1,       true,  false,    92, 50,     true},
    {2, 160, 128,     2, 5, 1,                    0,       true,  false,    97, 62,     true},
    {2, 192, 128,     2, 5, 1,                    0,       true,  false,    98, 66,     true},
    {2, 208, 128,     2, 5, 1,                    0,       true,  false,    98, 68,     true},
};

// The same for partial sums of parallel_split_k.
inline constexpr TensorCoreTile kSplitTurnedTiles[] = {
    {4, 96, 128,      2, 8, 1,                    1,       false, false,    92, 50,     true},
    {4, 160, 128,     2, 6, 1,                    0,       false, false,    97, 62,     true},
    {4, 208, 128,     2, 5, 1,                    0,       false, false,    98, 68,     true},
};

// For floats, if b is not K-major (see Turned). The second speeds are estimates, for rows of a that
// do not begin at multiples of 128 bytes; rows of b count as if they did.
inline constexpr TensorCoreTile kTurnedFloatTiles[] = {
    {4, 256, 128,     2, 4, 2,                    0,       false, false,    100, 100,   true, true},
    {4, 128, 128,     2, 6, 2,                    0,       false, false,    90, 70,     true, true},
    {4, 64, 128,      2, 8, 1,                    0,       false, false,    70, 50,     true, true},
};

// For 8-bit factors. Their stages have as many bytes and take as long, so the speeds are the same;
// the speeds of tiles with promotion are estimates.
inline constexpr TensorCoreTile kTensorCoreByteTiles[] = {
    {2, 128, 256,     2, 4, 2,                    0,       true,  false,    100, 100},
    {2, 64, 128,      1, 8, 1,                    1,       false, false,    86, 38},
    {4, 128, 256,     2, 4, 2,                    0,       false, false,    100, 100},
    {4, 64, 128,      1, 8, 1,                    1,       false, false,    90, 40},
    {2, 128, 256,     2, 4, 2,                    0,       false, true,     90, 90},
    {2, 64, 128,      1, 8, 1,                    0,       false, true,     60, 38},
    {4, 128, 256,     2, 4, 2,                    0,       false, true,     90, 90},
    {4, 64, 128,      1, 8, 1,                    0,       false, true,     60, 38},
    // int8 results of scaled sums
    {1, 128, 256,     2, 4, 2,                    0,       false, false,    100, 100},
    {1, 64, 128,      1, 8, 1,                    1,       false, false,    86, 38},
};
// clang-format on

// The second launch of a tensor_core plan that has one. If the last wave would leave most
// multiprocessors idle, its part of the result is divided into smaller tiles, enough for all
// multiprocessors. Every tile adds its products in the order of k, so the results are bitwise those
// of one launch.
//
// Both launches take the tiles of a group of rows column by column, and their groups have the same
// rows. So if the first launch stops at the beginning of a column, the rest of the result is the
// last tiles of the second launch's order:
//
//     first launch: 10 tiles        second launch: from tile 40 on
//     |  0     2     4     6  |     |                          |
//     |  1     3     5     7  |     |                          |
//     |  8                    |     |       40 44 48 52 56 60  |
//     |                       |     |       41 45 49 53 57 61  |
//     |  9                    |     |       42 46 50 54 58 62  |
//     |                       |     |       43 47 51 55 59 63  |
struct Tail {
  Config config;
  std::int64_t first;  // tile of the second launch
};
Tail tail_of(const Problem& problem, const Config& config);

// The shared memory of kernels whose mbarriers come before a ring of stages, each of `lines` lines
// of factors; aligned as above.
constexpr int ring_bytes(int stages, int lines) {
  return 1024 + stages * lines * kTensorLineBytes + 1024 - 128;
}

// How many stages fit, at least one, if `blocks` blocks share a multiprocessor. The system reserves
// 1 KiB for each.
constexpr int ring_stages(int blocks, int lines) {
  int most = 1;
  while (blocks * (ring_bytes(most + 1, lines) + 1024) <= 228 * 1024) ++most;
  return most;
}

// split_k
inline constexpr int kMostSplits = 8;         // blocks of a cluster: the portable maximum
inline constexpr int kMostSplitKStages = 16;  // SplitKStorage has mbarriers for so many

// The tiles that it has kernels for.
struct SplitKTile {
  int rows;
  int cols;
  int resident;  // blocks on a multiprocessor, at most
  int speed;     // as in TensorCoreTile

  constexpr int threads() const { return 128 * (rows / 64) + 32; }

  // The exchanged sums are received in place of the stages.
  constexpr int shared_bytes(int stages) const { return ring_bytes(stages, rows + cols); }
  constexpr int stages(int blocks) const { return ring_stages(blocks, rows + cols); }
};

inline constexpr SplitKTile kSplitKTiles[] = {{64, 128, 2, 86}, {128, 128, 2, 86}};

// parallel_split_k

// The distance between rows of partial sums, in floats: whole sectors of 32 bytes.
inline std::int64_t partial_pitch(const Problem& problem) { return divide_up(problem.n, 8) * 8; }
// Of one split.
inline std::int64_t partial_bytes(const Problem& problem) {
  return problem.batch * problem.m * partial_pitch(problem) * 4;
}

// wgmma_batched

inline constexpr int kWgmmaBatchedTile = 64;  // rows and columns
inline constexpr int kMostWgmmaBatchedStages = 8;
inline constexpr int kResidentWgmmaBatched = 8;  // blocks on a multiprocessor, at most
inline constexpr int kWgmmaBatchedLines = 2 * kWgmmaBatchedTile;  // of a stage

// skinny

inline constexpr int kSkinnyExtent = 16;        // rows or columns of a block
inline constexpr int kMostSkinnyExtent = 1024;  // of the problem; each block reads the large factor
inline constexpr int kSkinnyThreads = 256;

// A factor as skinny and fma_skinny see it: `extent` rows of a or columns of b, each of k elements.
struct SkinnyFactor {
  std::int64_t extent;
  bool deep;  // the depth is contiguous
  bool shared;
};
struct SkinnyFactors {
  bool large_is_a;
  SkinnyFactor large;
  SkinnyFactor skinny;
};
inline SkinnyFactors skinny_factors(const Problem& problem) {
  const SkinnyFactor a{problem.m, !problem.transpose_a || problem.m == 1, problem.share_a};
  const SkinnyFactor b{problem.n, problem.transpose_b || problem.n == 1, problem.share_b};
  return problem.m > problem.n ? SkinnyFactors{true, a, b} : SkinnyFactors{false, b, a};
}

// What a config says of the two factors: the rows of a tile are those of the large factor, its
// columns those of the skinny one.
struct SkinnyConfig {
  int rows;
  int cols;
  bool packs_large;
  bool packs_skinny;
};
inline SkinnyConfig skinny_config(const Config& config, const SkinnyFactors& factors) {
  if (factors.large_is_a) {
    return {config.tile_rows, config.tile_cols, config.pack_a, config.pack_b};
  }
  return {config.tile_cols, config.tile_rows, config.pack_b, config.pack_a};
}

// The sums of a warp: `rows` of the large factor by `cols` of the skinny one.
struct SkinnyTile {
  int rows;
  int cols;
};
// For a large factor that is not read in packs.
inline constexpr SkinnyTile kSkinnyUnpackedTile{32, 16};

// The stages of a warp's ring, each with 32 elements of k, if the factors are copied to shared
// memory: 104 KiB per block, so that two blocks fit on a multiprocessor.
inline constexpr int kSkinnyStepDepth = 32;
constexpr int skinny_stages(int rows, int cols) {
  return 13 * 1024 / ((rows + cols) * kSkinnyStepDepth * 2);
}

// The rings of the warps; later their sums in the same place.
constexpr int skinny_shared_bytes(int rows, int cols, bool copies) {
  const int warps = kSkinnyThreads / 32;
  const int sums = cols * (rows + 4) * 4;
  const int ring = copies ? skinny_stages(rows, cols) * (rows + cols) * kSkinnyStepDepth * 2 : 0;
  return warps * (ring > sums ? ring : sums);
}

// bf16_x6 and fp16_x3

inline constexpr int kBF16Parts = 3;
inline constexpr int kFP16Parts = 2;
inline constexpr int kPartsTile = kTile;  // rows and columns
inline constexpr int kPartsThreads = 384;
// A stage holds one part of a slice of both factors.
inline constexpr int kPartsStages = 7;
// The ring and its mbarriers, aligned as for tensor_core.
inline constexpr int kPartsSharedBytes =
    (kPartsStages * 2 * (kPartsTile * kTensorLineBytes + 8) + 1023) / 1024 * 1024 + 1024 - 128;

// The distance, in elements, between rows of a factor's parts, which are stored in the factor's
// order.
inline std::int64_t pitch_of_parts(const StoredFactor& factor) {
  constexpr int kPerLine = kTensorLineBytes / 2;
  return divide_up(factor.length, kPerLine) * kPerLine;
}

// The workspace of bf16_x6 and fp16_x3: a report, the exponents of a's rows and b's columns, and
// the parts of both. The members are offsets in bytes. fp16_x3 has fewer parts; they lie where
// bf16_x6, if it has to compute the product, writes its own.
struct PartsWorkspace {
  std::int64_t exponents_a;
  std::int64_t exponents_b;
  std::int64_t parts_a;
  std::int64_t parts_b;
  std::int64_t bytes;  // of the whole workspace
};
inline constexpr std::int64_t kPartsReportBytes = kTensorLineBytes;
inline PartsWorkspace parts_workspace(const Problem& problem) {
  const StoredFactor a = stored_a(problem);
  const StoredFactor b = stored_b(problem);
  const auto exponents = [](const StoredFactor& factor) {
    const std::int64_t bytes = factor.batch * (factor.deep ? factor.rows : factor.length) * 4;
    return divide_up(bytes, kTensorLineBytes) * kTensorLineBytes;
  };
  const auto parts = [](const StoredFactor& factor) {
    return kBF16Parts * factor.batch * factor.rows * pitch_of_parts(factor) * 2;
  };
  PartsWorkspace at{};
  at.exponents_a = kPartsReportBytes;
  at.exponents_b = at.exponents_a + exponents(a);
  at.parts_a = at.exponents_b + exponents(b);
  at.parts_b = at.parts_a + parts(a);
  at.bytes = at.parts_b + parts(b);
  return at;
}

// fma_pipelined

inline constexpr int kFmaRows = 128;  // of a tile
inline constexpr int kFmaThreads = 384;

// The tiles that it has kernels for.
struct FmaTile {
  int cols;
  int stages;
  // Time of a multiprocessor per element of k, in nanoseconds, measured on an H200.
  double time;

  // Aligned as for tensor_core.
  constexpr int shared_bytes() const {
    const int bytes = stages * ((kFmaRows + cols) * kTensorLineBytes + 16);
    return (bytes + 1023) / 1024 * 1024 + 1024 - 128;
  }
};

inline constexpr FmaTile kFmaTiles[] = {{256, 4, 190}, {128, 6, 93}};

// fma_sliced and fma_batched

inline constexpr int kFmaStepDepth = 16;  // elements of k

// fma_sliced

inline constexpr int kSlicedThreads = 256;
// Blocks of a cluster, which divide the depth: the portable maximum.
inline constexpr int kMostSlicedSplits = 8;

// The tiles that it has kernels for.
struct SlicedTile {
  int rows;
  int cols;
  int lanes_down;  // rows of the grid in which a warp's 32 lanes are arranged
  int packs;       // along k of a step: how far its loop is unrolled
  int stages;
  int resident;         // blocks on a multiprocessor
  bool takes_elements;  // also takes factors whose rows are not multiples of 16 bytes
  // Predicted time of a multiprocessor per element of k, in nanoseconds.
  double time;

  constexpr int warp_rows() const { return rows; }  // each warp computes the whole tile
  constexpr int warp_cols() const { return cols; }
  constexpr int copiers() const { return 32; }  // threads that copy a step
  // The rings of the warps, in whose place their sums lie later; and the sums received from the
  // cluster, with an mbarrier.
  constexpr int shared_bytes() const {
    return kSlicedThreads / 32 * stages * (rows + cols) * kFmaStepDepth * 4 +
           (rows * cols / kPack + kMostSlicedSplits) * 16;
  }
};

// clang-format off
inline constexpr SlicedTile kSlicedTiles[] = {
    // tile lanes_down, packs, stages, resident  elements  time
    {64, 32, 8,         4,     4,      1,        false,    10.5},
    {32, 16, 8,         4,     4,      2,        true,     3},
    // For few rows, which would leave half of a tile of 32 rows empty.
    {16, 64, 4,         2,     3,      1,        false,    5.6},
};
// clang-format on

// fma_batched

// The tiles that it has kernels for.
struct FmaBatchedTile {
  int rows;
  int cols;
  int warps_down;  // that divide the rows, and the columns, of a tile
  int warps_across;
  int lanes_down;  // rows of the grid in which a warp's 32 lanes are arranged
  int packs;       // along k of a step: how far its loop is unrolled
  int stages;
  int resident;  // blocks per multiprocessor, at least: limits the registers
  // Times in nanoseconds, measured on an H200. Of four warps, one for each scheduler of a
  // multiprocessor: of a tile before and after its products, and per element of k. And of one block
  // alone, per element of k.
  double tile_time;
  double time;
  double lone_time;

  constexpr int warp_rows() const { return rows / warps_down; }
  constexpr int warp_cols() const { return cols / warps_across; }
  constexpr int threads() const { return warps_down * warps_across * 32; }
  constexpr int copiers() const { return threads(); }
  // The ring, in whose place the sums lie later.
  constexpr int shared_bytes() const { return stages * (rows + cols) * kFmaStepDepth * 4; }
};

// clang-format off
inline constexpr FmaBatchedTile kFmaBatchedTiles[] = {
    // tile  warps  lanes_down, packs, stages, resident  time of a tile, of k, of k alone
    {64, 64, 1, 2,  8,          1,     3,      6,        1300,           56,   45},
    {32, 32, 1, 1,  8,          4,     3,      16,       700,            27.3, 33},
};
// clang-format on

// fma_skinny

inline constexpr int kFmaSkinnyThreads = 256;
inline constexpr int kMostFmaSkinnyCols = 16;  // of the skinny factor

// A block has 32 or 64 rows of the large factor, and sums for 4, 8 or 16 columns. If the large
// factor is deep, a step of more rows would have fewer bytes of each; if it is not read in packs, a
// copy has one element; and with 16 columns the FMAs take longer than the reads. Then blocks have
// 32 rows.
constexpr int fma_skinny_most_rows(bool deep, bool packed, int cols) {
  return packed && !deep && cols <= 8 ? 64 : 32;
}

// The depth of a step, which has 16 elements of the large factor for each lane.
constexpr int fma_skinny_step_depth(int rows) { return 16 * 32 / rows; }

// The stages of a warp's ring: up to 96 KiB per block, which every GPU from compute capability 8.0
// on has, so that two blocks fit on a multiprocessor of an H100.
constexpr int fma_skinny_stage_bytes(int rows, int cols) {
  return (rows + cols) * fma_skinny_step_depth(rows) * 4;
}
constexpr int fma_skinny_stages(int rows, int cols) {
  return 12 * 1024 / fma_skinny_stage_bytes(rows, cols);
}

// The rings of the warps, in whose place their sums lie later; and the sums received from the
// cluster, with an mbarrier.
constexpr int fma_skinny_shared_bytes(int rows, int cols) {
  const int warps = kFmaSkinnyThreads / 32;
  const int ring = warps * fma_skinny_stages(rows, cols) * fma_skinny_stage_bytes(rows, cols);
  const int parts = warps * fma_skinny_step_depth(rows) / kPack;
  const int sums = parts * cols * (rows + kPack) * 4;
  return (ring > sums ? ring : sums) + (rows * cols + kMostSlicedSplits) * 4 + 16;
}

// mma_pipelined

// The tiles that it has kernels for.
struct MmaTile {
  int element_bytes;  // of the factors
  int rows;
  int cols;
  int warp_rows;  // of a warp's part of the tile
  int warp_cols;
  int slice_bytes;  // along k: the depth of a stage
  int stages;
  int resident;  // blocks per multiprocessor, at least: limits the registers
  // Estimated speed once all multiprocessors have a tile, in percent of the largest tile's.
  int speed;

  constexpr bool is_largest() const { return speed == 100; }
  constexpr int threads() const { return rows / warp_rows * (cols / warp_cols) * 32; }
  constexpr int shared_bytes() const { return stages * (rows + cols) * slice_bytes; }
};

// All GPUs from compute capability 8.0 on have at least 99 KiB of shared memory per block.
// clang-format off
inline constexpr MmaTile kMmaTiles[] = {
    // bytes  tile      of a warp  slice, stages, resident  speed
    {2,       128, 256, 64, 64,    64, 4,         1,        100},
    {2,       64, 128,  32, 64,    64, 4,         3,        75},
    {4,       128, 256, 64, 64,    64, 4,         1,        100},
    {4,       64, 128,  32, 64,    64, 4,         2,        75},
    {8,       128, 128, 64, 32,    128, 3,        1,        100},
    {8,       64, 64,   32, 32,    128, 3,        2,        85},
};
// clang-format on

// mma_batched

inline constexpr int kMmaBatchedSliceBytes = 128;  // along k

// The bytes in shared memory of a slice of a factor, with `extent` rows or columns, in the larger
// of both orders. Lines have a piece more than their elements need, for their phase.
constexpr int mma_batched_slice_bytes(int extent, int element_bytes) {
  const int deep = extent * (kMmaBatchedSliceBytes + kPieceBytes);
  const int wide = kMmaBatchedSliceBytes / element_bytes * (extent * element_bytes + kPieceBytes);
  return deep > wide ? deep : wide;
}

// The bytes in shared memory of a line of results.
constexpr int mma_batched_result_pitch(int cols, int element_bytes) {
  return cols * element_bytes + kPieceBytes;
}

// The tiles that it has kernels for.
struct MmaBatchedTile {
  int rows;
  int cols;
  int warp_rows;  // of a warp's part of the tile
  int warp_cols;
  int resident;  // blocks per multiprocessor, at least: limits the registers
  // Nanoseconds of a multiprocessor for a tile and for each of its slices, as measured on an H200.
  int tile_time;
  int slice_time;

  constexpr int threads() const { return rows / warp_rows * (cols / warp_cols) * 32; }
  constexpr int shared_bytes(int stages, int element_bytes, int result_bytes) const {
    const int factors = stages * (mma_batched_slice_bytes(rows, element_bytes) +
                                  mma_batched_slice_bytes(cols, element_bytes));
    const int results = rows * mma_batched_result_pitch(cols, result_bytes);
    return factors > results ? factors : results;
  }
};

// clang-format off
inline constexpr MmaBatchedTile kMmaBatchedTiles[] = {
    // tile    of a warp  resident  time of a tile, a slice
    {128, 128, 32, 64,    2,        1700, 900},
    {64, 64,   32, 32,    6,        500, 400},
    {32, 32,   32, 32,    20,       120, 280},
};
// clang-format on

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
