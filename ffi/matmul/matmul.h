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

// What a product is asked to be computed in: jax.lax.Precision, the higher of the two operands', or
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

// What is done to op(a) op(b) + bias before c is added and it is rounded: the function of jax.nn of
// that name, or with kGeluExact jax.nn.gelu(approximate=False).
enum class EpilogueOp { kNone, kRelu, kGelu, kGeluExact, kSilu };

inline constexpr std::string_view kEpilogueOps[] = {"none", "relu", "gelu", "gelu_exact", "silu"};
constexpr auto& names_of(EpilogueOp) { return kEpilogueOps; }

// What of a factor has a scale of its own, a float: the factor as a whole, each row of op(a) or
// column of op(b), or each block of it. Blocks are kScaleBlock of the depth by one row of op(a), or
// by as many columns of op(b); the last ones may be smaller.
enum class ScaleKind { kNone, kTensor, kVector, kBlocks };

inline constexpr std::string_view kScaleKinds[] = {"none", "tensor", "vector", "blocks"};
constexpr auto& names_of(ScaleKind) { return kScaleKinds; }

inline constexpr int kScaleBlock = 128;

// result[i] = alpha op(a[i]) op(b[i]) + beta c[i], or epilogue(op(a[i]) op(b[i]) + bias[i]) + beta
// c[i], for each i in the batch, all row-major: op(a) is m x k and stored k x m if `transpose_a`;
// op(b) is k x n and stored n x k if `transpose_b`; c and the result are m x n; a bias is n
// numbers, which are added to each row. A shared factor or bias is one for the whole batch. A gated
// result is multiplied by op(a[i]) up[i], where `up` is stored and shared as b is. Where factors
// have scales, both have, which lie as the factors do, and are shared or not by the batch.
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
  std::int64_t workspace;  // bytes; kWorkspaceAsAsked for what workspace_bytes() says

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

// Whether sums of blocks are scaled, one by one.
inline bool scales_blocks(const Problem& problem) {
  return problem.a_scale == ScaleKind::kBlocks || problem.b_scale == ScaleKind::kBlocks;
}

// Whether a bias, an activation or a gate is applied to sums before they are rounded.
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
  kSkinny,
  kBF16X6,
  kFP16X3,
  kFmaPipelined,
  kFmaSliced,
  kMmaPipelined,
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
     "block_tiled with a transposed in shared memory, and quarters that the lanes read without "
     "bank conflicts.",
     kGemmLadder, "none", "bank_conflict_free_kernel"},
    {"double_buffered",
     "bank_conflict_free with two buffers: the next tile loads while this one is multiplied.",
     kGemmLadder, "none", "double_buffered_kernel"},
    {"tensor_core",
     "Tensor cores: blocks that stay take tile after tile; one warp copies by tensor maps, others "
     "multiply by wgmma.",
     "jax_gpuops, after NVIDIA CUTLASS's warp-specialised persistent kernels",
     "float16, bfloat16, float32 by TF32 where the precision allows it, float8_e4m3fn, float8_e5m2 "
     "and int8; arrays aligned to 16 bytes; alpha 1; a bias or an activation of floats of 16 or 32 "
     "bits alone, those of 16 not transposed; c of 16 bits alone, of factors that are not "
     "transposed; scales of 8 bits alone, of blocks of float8 alone; compute capability 9.0",
     "align_rows_kernel transpose_rows_kernel transpose_bytes_kernel persistent_kernel "
     "turned_kernel"},
    {"split_k",
     "Tensor cores for few tiles: the blocks of a cluster divide the depth of a tile, and exchange "
     "their sums.",
     "jax_gpuops",
     "as tensor_core, but no dtypes of 8 bits, no c, and a depth of more than 128 bytes",
     "align_rows_kernel transpose_rows_kernel split_k_kernel"},
    {"skinny",
     "Tensor cores for few rows or columns: the other factor is read once, each warp of a block "
     "with a part of the depth.",
     "jax_gpuops",
     "float16 and bfloat16; at most 1024 rows or columns; no c, alpha 1; compute capability 8.0",
     "skinny_kernel"},
    {"bf16_x6",
     "float32 at full accuracy on tensor cores: three bfloat16 parts of each element, six products "
     "of parts, sums that leave the tensor cores every 32 or 64 of the depth.",
     kBF16X6Source,
     "float32; precision up to the highest, or BF16_BF16_F32_X6; no bias, no activation; compute "
     "capability 9.0",
     "split_rows_kernel split_columns_kernel part_products_kernel double_buffered_kernel"},
    {"fp16_x3",
     "bf16_x6 in half of its time, where few elements are small beside the largest of their row: "
     "two float16 parts of each element, three products of parts. Else bf16_x6 behind it does the "
     "work.",
     kFP16X3Source,
     "float32; precision up to the highest; no bias, no activation; compute capability 9.0",
     "split_rows_kernel split_columns_kernel part_products_kernel double_buffered_kernel"},
    {"fma_pipelined",
     "float32 by FMAs alone: one thread copies by tensor maps, eight warps multiply tiles of 128 x "
     "256 or 128 x 128.",
     "jax_gpuops",
     "float32; arrays aligned to 16 bytes, factors with rows of whole 16 bytes; no bias, no "
     "activation; compute capability 9.0",
     "fma_pipelined_kernel"},
    {"fma_sliced",
     "float32 by FMAs for few tiles: small ones, of which each warp of a block multiplies a slice "
     "of the depth, copied by cp.async into a ring of its own; of fewer than multiprocessors, the "
     "blocks of a cluster share the depth too.",
     "jax_gpuops, after NVIDIA CUTLASS's sliced-K kernels",
     "float32; compute capability 8.0, with clusters 9.0", "fma_sliced_kernel"},
    {"mma_pipelined",
     "Tensor cores of any GPU: slices of the factors come by asynchronous copies into a ring of "
     "stages, warps multiply them by mma.sync.",
     "jax_gpuops, after NVIDIA CUTLASS's multistage kernels",
     "float16, bfloat16, float32 by TF32 where the precision allows it, and float64; compute "
     "capability 8.0",
     "mma_pipelined_kernel"},
    {"cublas", "cuBLAS, from the library that JAX has loaded: what the ladder is measured against.",
     "NVIDIA cuBLAS, cublasGemmStridedBatchedEx", "CUDA only; no bias, no activation"},
};

inline std::string_view name_of(Algorithm algorithm) {
  return kAlgorithms[static_cast<int>(algorithm)].name;
}

// How a kernel is launched, one block a tile of the result, but for tensor_core, whose blocks take
// several. cublas has none of it.
struct Config {
  int threads = 0;  // of a block
  int tile_rows = 0;
  int tile_cols = 0;
  // Packs of kPack elements, or of skinny's own sizes, begin at aligned addresses and never
  // straddle an edge.
  bool pack_a = false;
  bool pack_b = false;
  bool pack_result = false;
  bool row_major = false;  // the kernel for row-major factors in packs, of those with two
  // Of the kernels on tensor cores:
  std::int64_t blocks = 0;
  int cluster_rows = 0;  // blocks of a cluster: neighbours along m, or if turned along n
  int stages = 0;        // of slices of a and b, in shared memory
  int group = 0;         // rows of tiles of clusters that are taken together
  // If a second launch is to take what whole turns leave over: how many tiles of clusters the first
  // one takes, and the tile and the blocks of the second. See Tail.
  std::int64_t tiles = 0;
  int tail_rows = 0;
  int tail_cols = 0;
  std::int64_t tail_blocks = 0;
  int splits = 1;        // of the depth, among the blocks of a cluster
  int vector_bytes = 0;  // that a copy of mma_pipelined or fma_sliced moves
  std::int64_t shared_bytes = 0;
  bool promotes = false;  // adds the products of each stage apart: see Persistent
  bool turned = false;    // multiplies the transposes of floats: see Turned
  // A factor may be copied first (see needs_copy); a result whose rows are not whole 16 bytes is
  // written by the threads.
  bool copies_a = false;
  bool copies_b = false;
  bool writes_elements = false;
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
    visit("copies_a", self.copies_a);
    visit("copies_b", self.copies_b);
    visit("writes_elements", self.writes_elements);
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

// The same where the factors have scales, of T: __nv_fp8_e4m3, __nv_fp8_e5m2 or std::int8_t.
template <class T>
void launch_scaled_tensor_core(const Queue& queue, const Config& config, const Problem& problem,
                               const Buffers& buffers);

// The same of split_k, which takes no factors of 8 bits.
template <class T>
void launch_split_k(const Queue& queue, const Config& config, const Problem& problem,
                    const Buffers& buffers);

// The same of skinny, which is compiled for all GPUs.
template <class T>
void launch_skinny(const Queue& queue, const Config& config, const Problem& problem,
                   const Buffers& buffers);

// Of bf16_x6, which is compiled for compute capability 9.0 alone.
void launch_bf16_x6(const Queue& queue, const Config& config, const Problem& problem,
                    const Buffers& buffers);

// The same of fp16_x3.
void launch_fp16_x3(const Queue& queue, const Config& config, const Problem& problem,
                    const Buffers& buffers);

// The same of fma_pipelined.
void launch_fma_pipelined(const Queue& queue, const Config& config, const Problem& problem,
                          const Buffers& buffers);

// Of fma_sliced, which is compiled for all GPUs.
void launch_fma_sliced(const Queue& queue, const Config& config, const Problem& problem,
                       const Buffers& buffers);

// The same of mma_pipelined, for __half, __nv_bfloat16, float or double, which is compiled for all
// GPUs.
template <class T>
void launch_mma_pipelined(const Queue& queue, const Config& config, const Problem& problem,
                          const Buffers& buffers);

// Launches double_buffered for floats, to run where *flag is not 0 by then.
void launch_where_flagged(const Queue& queue, const Config& config, const Problem& problem,
                          const Buffers& buffers, const std::int32_t* flag);

// Sizes on which both plans and kernels depend.

inline constexpr int kPack =
    4;  // what a thread loads from global memory, or stores to it, at a time

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

// A factor as it is stored: `batch` matrices of `rows` rows of `length` neighbours. It is deep if
// they are neighbours along k.
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

// What a line of a stage in shared memory holds: a stage's depth, and where rows should begin.
inline constexpr int kTensorLineBytes = 128;

// Whether tensor copies take rows of so many bytes.
inline bool fits_tensor_copies(std::int64_t bytes) { return bytes % 16 == 0; }

// Factors that the kernels cannot read as they are stored are copied first: rows that do not fit
// tensor copies to rows that begin at whole lines, and those that are not deep to their transpose,
// but for 16 bits.
inline bool is_transposed(const StoredFactor& factor) {
  return factor.element_bytes != 2 && !factor.deep;
}
inline bool needs_copy(const StoredFactor& factor) {
  return is_transposed(factor) || !fits_tensor_copies(factor.length * factor.element_bytes);
}

// Of its copy: what it is, how many elements lie from one row to the next, and its bytes. Copies
// lie one behind the other in the workspace, that of a first.
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
  // Speed once all multiprocessors have a tile, in percent of that of the largest: of factors whose
  // rows begin at multiples of 128 bytes, and of others. Measured on an H200 with 16-bit results;
  // with those of 32 bits, the small tile's are estimates.
  int speed;
  int unaligned_speed;

  constexpr int threads() const { return 128 * (1 + consumers); }

  // Whether halves of its columns are whole panels of both factors of a gated problem.
  constexpr bool gates() const { return cols % 128 == 0; }

  // The ring of slices 128 bytes deep, two panels of results for each consumer, and the barriers,
  // from a multiple of 1024 on; what a launch gives begins at a multiple of 128.
  constexpr int shared_bytes() const {
    const int bytes =
        stages * (rows + cols) * kTensorLineBytes + consumers * 2 * 8192 + 2 * stages * 8;
    return (bytes + 1023) / 1024 * 1024 + 1024 - 128;
  }
};

// clang-format off
inline constexpr TensorCoreTile kTensorCoreTiles[] = {
    // result  tile   consumers, stages, cluster  pending, late   promotes  speeds
    {2, 128, 256,     2, 4, 2,                    0,       true,  false,    100, 100},
    {2, 128, 192,     2, 4, 2,                    0,       true,  false,    98, 80},
    {2, 128, 128,     2, 6, 1,                    1,       true,  false,    96, 57},
    {2, 64, 128,      1, 8, 1,                    1,       false, false,    86, 38},
    {4, 128, 256,     2, 4, 2,                    0,       false, false,    100, 100},
    {4, 64, 128,      1, 8, 1,                    1,       false, false,    90, 40},
};

// Of factors of 8 bits. Their stages have as many bytes and take as long, so that the speeds are
// the same, those of sums that are promoted estimates.
inline constexpr TensorCoreTile kTensorCoreByteTiles[] = {
    {2, 128, 256,     2, 4, 2,                    0,       true,  false,    100, 100},
    {2, 64, 128,      1, 8, 1,                    1,       false, false,    86, 38},
    {4, 128, 256,     2, 4, 2,                    0,       false, false,    100, 100},
    {4, 64, 128,      1, 8, 1,                    1,       false, false,    90, 40},
    {2, 128, 256,     2, 4, 2,                    0,       false, true,     90, 90},
    {2, 64, 128,      1, 8, 1,                    0,       false, true,     60, 38},
    {4, 128, 256,     2, 4, 2,                    0,       false, true,     90, 90},
    {4, 64, 128,      1, 8, 1,                    0,       false, true,     60, 38},
    // int8 from scaled sums
    {1, 128, 256,     2, 4, 2,                    0,       false, false,    100, 100},
    {1, 64, 128,      1, 8, 1,                    1,       false, false,    86, 38},
};
// clang-format on

// The second launch of a plan of tensor_core that has one. Where the last turn would leave most
// multiprocessors idle, what is left over for it is cut into smaller tiles, enough for all. Every
// tile adds its products in the order of the depth, so that the bits are those of one launch.
//
// Both launches take tiles column by column of a group of rows, and their groups have the same
// rows. So, from the beginning of a column on, the last tiles of the one are the last tiles of the
// other:
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
  std::int64_t first;  // of its tiles
};
Tail tail_of(const Problem& problem, const Config& config);

// Of floats whose transposes are multiplied (see Turned), as many as the largest tile has.
inline constexpr int kTurnedRows = 256;
inline constexpr int kTurnedCols = 128;

// split_k
inline constexpr int kMostSplits = 8;         // blocks of a cluster that are easy to place
inline constexpr int kMostSplitKStages = 16;  // of which a block has barriers

// The tiles that it has kernels for.
struct SplitKTile {
  int rows;
  int cols;
  int resident;  // blocks on a multiprocessor, at most
  int speed;     // as TensorCoreTile has it

  constexpr int threads() const { return 128 * (rows / 64) + 32; }

  // The barriers, and the ring of slices 128 bytes deep, which has room for the sums that are
  // exchanged; the rest as above.
  constexpr int shared_bytes(int stages) const {
    return 1024 + stages * (rows + cols) * kTensorLineBytes + 1024 - 128;
  }

  // As many as fit, if so many blocks share a multiprocessor, each with 1 KiB for the system.
  constexpr int stages(int blocks) const {
    int most = 1;
    while (blocks * (shared_bytes(most + 1) + 1024) <= 228 * 1024) ++most;
    return most;
  }
};

inline constexpr SplitKTile kSplitKTiles[] = {{64, 128, 2, 86}, {128, 128, 2, 86}};

// skinny

inline constexpr int kSkinnyExtent = 16;        // rows or columns of a block
inline constexpr int kMostSkinnyExtent = 1024;  // of the problem: more blocks read the large factor
inline constexpr int kSkinnyThreads = 256;

// A factor as skinny sees it: a's rows or b's columns, each of the depth.
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

// A warp's rows of the large factor, and columns for those of the skinny one.
struct SkinnyTile {
  int rows;
  int cols;
};
// Of a large factor that is not read in packs.
inline constexpr SkinnyTile kSkinnyUnpackedTile{32, 16};

// What a warp has on its way, in steps of 32 of the depth, if it copies them: 104 KiB of a block,
// so that a multiprocessor holds two.
inline constexpr int kSkinnyStepDepth = 32;
constexpr int skinny_stages(int rows, int cols) {
  return 13 * 1024 / ((rows + cols) * kSkinnyStepDepth * 2);
}

// The steps of each warp, or later its sums.
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
// The ring and its barriers, from a multiple of 1024 on; as of tensor_core.
inline constexpr int kPartsSharedBytes =
    (kPartsStages * 2 * (kPartsTile * kTensorLineBytes + 8) + 1023) / 1024 * 1024 + 1024 - 128;

// Of the parts of a factor, which lie as it is stored: how many elements lie from one row to the
// next.
inline std::int64_t pitch_of_parts(const StoredFactor& factor) {
  constexpr int kPerLine = kTensorLineBytes / 2;
  return divide_up(factor.length, kPerLine) * kPerLine;
}

// Their workspace: a report, the exponents of a's rows and b's columns, and the parts of both.
// Where each begins, in bytes. Those of fp16_x3 are fewer, and lie where bf16_x6, if it is to do
// the work, writes its own.
struct PartsWorkspace {
  std::int64_t exponents_a;
  std::int64_t exponents_b;
  std::int64_t parts_a;
  std::int64_t parts_b;
  std::int64_t bytes;  // of it all
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
  // Of a multiprocessor, for each of the depth, in nanoseconds, measured on an H200.
  double time;

  // As of tensor_core.
  constexpr int shared_bytes() const {
    const int bytes = stages * ((kFmaRows + cols) * kTensorLineBytes + 16);
    return (bytes + 1023) / 1024 * 1024 + 1024 - 128;
  }
};

inline constexpr FmaTile kFmaTiles[] = {{256, 4, 190}, {128, 6, 93}};

// fma_sliced

inline constexpr int kSlicedThreads = 256;
inline constexpr int kSlicedDepth = 16;  // of a step
// Of the depth, among the blocks of a cluster: as many as any GPU with clusters takes.
inline constexpr int kMostSlicedSplits = 8;

// The tiles that it has kernels for.
struct SlicedTile {
  int rows;
  int cols;
  int lanes_down;  // of a warp's 32: how many rows of them lie in a tile
  int packs;       // of a step's depth that are unrolled
  int stages;
  int resident;         // blocks on a multiprocessor
  bool takes_elements;  // of factors whose rows are not whole 16 bytes, too
  // Predictions, of a multiprocessor for each of the depth, in nanoseconds.
  double time;

  // The ring of each warp, which has room for the sums of all warps too; and what the blocks of a
  // cluster send, with a barrier.
  constexpr int shared_bytes() const {
    return kSlicedThreads / 32 * stages * (rows + cols) * kSlicedDepth * 4 +
           (rows * cols / kPack + kMostSlicedSplits) * 16;
  }
};

// clang-format off
inline constexpr SlicedTile kSlicedTiles[] = {
    // tile lanes_down, packs, stages, resident  elements  time
    {64, 32, 8,         4,     4,      1,        false,    10.5},
    {32, 16, 8,         4,     4,      2,        true,     3},
    // Of few rows, too, which would leave half of a tile of 32 empty.
    {16, 64, 4,         2,     3,      1,        false,    5.6},
};
// clang-format on

// mma_pipelined

// The tiles that it has kernels for.
struct MmaTile {
  int element_bytes;  // of the factors
  int rows;
  int cols;
  int warp_rows;  // of a warp's part of it
  int warp_cols;
  int slice_bytes;  // how deep a stage is
  int stages;
  int resident;  // blocks of which a multiprocessor has room for the registers, at least
  // An estimate: once all multiprocessors have a tile, in percent of that of the largest.
  int speed;

  constexpr bool is_largest() const { return speed == 100; }
  constexpr int threads() const { return rows / warp_rows * (cols / warp_cols) * 32; }
  constexpr int shared_bytes() const { return stages * (rows + cols) * slice_bytes; }
};

// What GPUs of all compute capabilities from 8.0 on have is 99 KiB of shared memory for a block.
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

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
