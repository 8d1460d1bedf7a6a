// matmul on Hopper's tensor cores: factors have 16 bits, are floats (multiplied in TF32), or have 8
// bits, perhaps with scales; sums are floats, or ints for integer factors; results have 16 or 32
// bits, or are scaled 8-bit integers.
//
// The kernel is persistent: a cluster computes one tile of the result after the other. In each
// block a producer copies slices of the factors, 128 bytes deep, into a ring of stages. One or two
// consumer warpgroups, each with some rows of the tile, multiply them into sums in registers, and
// write these through shared memory. Slices that all blocks of the cluster need are multicast:
//
//                 tile of b                         producer            consumers
//               | left  | right |     stage 0  ->  full[0] set  ->  multiply, empty[0] set
//     a   rows 0| block 0       |     stage 1  ->  full[1] set  ->  multiply, empty[1] set
//         rows 1| block 1       |     ...
//
//     kClusterRows = 2: blocks 0 and 1 each copy half of the slice of b to both.
//
// The rows of a tile are a multiple of 64, those of a wgmma, but its columns only of 8. So for a
// few more rows than a multiple of 64, the transposed product may take less time, result^T = b^T
// a^T, whose columns are the result's rows. If kTurned, a is therefore the problem's b and b its a,
// and rows and columns are those of the transposed result; the columns of a wave of products are
// rows of a panel, which is filled by transposing stores.
//
// If kPingPong, each consumer has tiles of its own, every other one of the block: while one
// finishes and writes its tile, the other has the tensor cores to itself. The stages follow each
// other in the order of the tiles:
//
//     stages        tile 0   | tile 1        | tile 2        | tile 3
//     consumer 0    multiply | finish, write | multiply      | finish, write
//     consumer 1             | multiply      | finish, write | multiply
//
// A wait for a stage knows its phase only by parity: two phases ahead it would return at once. So a
// consumer begins to wait only when the other has seen all stages of the tile before.
//
// If the depth is split, a tile's sums are those of a part of the depth, and the result is an array
// of them that another kernel adds: see split_k_reduce.cuh.
//
// The leading dimensions of the factors are multiples of 16 bytes, as tensor copies require, and
// the depth is at least 1. A result with another leading dimension is written by the threads.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/collectives.h"
#include "core/cuda.h"
#include "core/dispatch.h"
#include "core/ptx/bulk_copy.cuh"
#include "core/ptx/cluster.cuh"
#include "core/ptx/early_launch.cuh"
#include "core/ptx/math.cuh"
#include "core/ptx/mbarrier.cuh"
#include "core/ptx/tensor_copy.cuh"
#include "core/ptx/warpgroup.cuh"
#include "core/ptx/wgmma.cuh"
#include "core/shared.h"
#include "core/shifted_packs.cuh"
#include "core/vector.h"
#include "matmul/epilogue.cuh"
#include "matmul/hopper/addend.cuh"
#include "matmul/hopper/scales.cuh"
#include "matmul/hopper/stages.cuh"
#include "matmul/hopper/tile_columns.cuh"
#include "matmul/hopper/tile_order.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

template <class Factor_, class Result_, bool kDeepA_, bool kDeepB_, int kRows_, int kCols_,
          int kConsumers_, int kStages_, int kClusterRows_, int kPending_, bool kLateStores_,
          bool kPromotes_ = false, bool kFinishes_ = false, bool kGated_ = false,
          Scaling kScaling_ = Scaling::kNone, bool kAdds_ = false, bool kTurned_ = false,
          bool kPingPong_ = false>
struct Persistent {
  using Factor = Factor_;
  using Result = Result_;
  using Sum = ProductSum<Factor>;
  // Whether k is the contiguous dimension of a (stored m x k) and of b (stored n x k).
  static constexpr bool kDeepA = kDeepA_;
  static constexpr bool kDeepB = kDeepB_;
  // The tile of a block.
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kConsumers = kConsumers_;
  static constexpr int kStages = kStages_;
  static constexpr int kClusterRows = kClusterRows_;
  // How many stages' products may still be in flight when a consumer waits, so that the tensor
  // cores stay busy.
  static constexpr int kPending = kPending_;
  // Whether results are written while the next tile is multiplied, and not before.
  static constexpr bool kLateStores = kLateStores_;
  // Whether beta c is added after the activation.
  static constexpr bool kAdds = kAdds_;
  // Whether the products of each stage have separate sums, which are then added to the tile's:
  // tensor cores add products of 8-bit floats with only 13 bits of fraction.
  static constexpr bool kPromotes = kPromotes_;
  // Whether sums get a bias or an activation.
  static constexpr bool kFinishes = kFinishes_;
  // Whether a stage of b is half b and half `up`, both with the columns of the result's tile; the
  // activated sums of b are multiplied by those of `up`.
  static constexpr bool kGated = kGated_;
  static constexpr int kResultCols = kGated ? kCols / 2 : kCols;
  // Whether the result is stored transposed: see above.
  static constexpr bool kTurned = kTurned_;
  // Whether each consumer has tiles of its own.
  static constexpr bool kPingPong = kPingPong_;
  // How many consumers share a tile, and take a stage.
  static constexpr int kSharers = kPingPong ? 1 : kConsumers;
  // Whether the depth may be split.
  static constexpr bool kSplits =
      sizeof(Factor) == 2 && std::is_same_v<Result, float> && !kFinishes && !kPingPong;
  // Whether results are written from registers: see SumWriter.
  static constexpr bool kWritesSums = kTurned && sizeof(Result) == 4;
  // Which sums are multiplied by scales of the factors.
  static constexpr Scaling kScaling = kScaling_;
  // The parameters of the epilogue.
  using Epilogue = std::conditional_t<kScaling != Scaling::kNone, Scales,
                                      std::conditional_t<kAdds, FinishAndAdd, Finish>>;

  static constexpr int kWaves = kRows / kSharers / kProductRows;
  static constexpr int kSums = kCols / 2;
  static constexpr int kResultSums = kResultCols / 2;
  // Pairs of results that wait to be written, or of elements of c that wait to be added.
  static constexpr int kWords = kLateStores || kAdds ? kResultSums / 2 : 1;
  // Columns of a stage's separate sums: as many as the registers have room for.
  static constexpr int kStageCols = kCols < 128 ? kCols : 128;
  static constexpr int kBlocks = kClusterRows;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroupThreads;
  static constexpr int kABytes = kRows * kLineBytes;
  static constexpr int kBBytes = kCols * kLineBytes;

  // Results pass through shared memory in panels of 128 bytes of 64 rows of the result or, if
  // kTurned, of 32 rows, or of 16 if those of a tile are no multiple of 32.
  static constexpr int kPanelRows = !kTurned ? kProductRows : kCols % 32 == 0 ? 32 : 16;
  static constexpr int kPanelCols = kLineBytes / static_cast<int>(sizeof(Result));
  static constexpr int kWavePanels = kWritesSums ? 1
                                     : kTurned   ? kCols / kPanelRows
                                                 : kResultCols / kPanelCols;
  static constexpr int kPanels = kWaves * kWavePanels;
  static constexpr int kPanelBuffers = 2;
  // How many rows of a panel each lane has in flight if the threads write the result: as many as
  // the sums, and the results or elements of c that wait, leave registers for.
  static constexpr int kHeldRegisters = kWaves * (kSums + kWords);
  static constexpr int kRowBatch = kHeldRegisters > 160 ? 1 : kHeldRegisters > 100 ? 2 : 4;

  // Each consumer warp of a cluster that takes a stage arrives at the mbarriers of all its blocks,
  // whose producers fill a stage together.
  static constexpr int kEmptyArrivals = kSharers * 4 * kClusterRows;

  // The launch gives each thread 65536 / 384 registers, rounded down to a multiple of eight: 168,
  // which the warpgroups redistribute: 40 + 2 x 232 = 3 x 168.
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;

  static_assert(sizeof(Factor) == 2 || (kDeepA && kDeepB),
                "wgmma takes rows of k only for 16 bits");
  static_assert(kConsumers == 1 || kConsumers == 2);
  static_assert(kRows % (kSharers * kProductRows) == 0, "a consumer has whole wgmmas");
  static_assert(!kPingPong || (kConsumers == 2 && !kLateStores && !kPromotes && !kTurned &&
                               !kGated && kScaling == Scaling::kNone));
  static_assert(kCols % 64 == 0 || (kTurned && kDeepB && kClusterRows == 1),
                "blocks copy whole panels for each other");
  static_assert(kClusterRows <= 2);
  static_assert(kRows <= 256 && kCols <= 256, "the copy engine's largest box");
  static_assert(!kGated || (kFinishes && kCols / 2 % 64 == 0), "whole panels of both factors");
  static_assert(!kAdds || (kFinishes && !kGated && sizeof(Result) == 2),
                "c waits for the sums in registers, in pairs");
  static_assert(!kTurned || (!kFinishes && !kPromotes), "plain products");
  static_assert(!kTurned || kWritesSums ||
                    (sizeof(Result) == 2 && kPanelCols == kProductRows && kCols % kPanelRows == 0),
                "a wave of products is the columns of a panel");
  static_assert(kPending == 0 || kPending == 1);
  static_assert(!kLateStores || (sizeof(Result) == 2 && !kPromotes),
                "sums of 32 bits, or a stage's, and results that wait do not fit the registers");
  static_assert(!kPromotes || (sizeof(Factor) == 1 && kPending == 0 && kCols % kStageCols == 0));
  static_assert(kScaling == Scaling::kNone || (sizeof(Factor) == 1 && !kFinishes));
  static_assert(kScaling != Scaling::kBlocks ||
                    (kPromotes && kStageCols == kScaleBlock && kCols % kScaleBlock == 0),
                "a stage's own sums are those of one block in columns");
  static_assert(sizeof(Result) > 1 || kScaling == Scaling::kOuter,
                "results of 8 bits are rounded from scaled sums");
};

template <class Config>
struct PersistentStorage : RingStorage<Config> {
  alignas(kAtomBytes) unsigned char panels[Config::kConsumers][Config::kPanelBuffers]
                                          [Config::kPanelRows * kLineBytes];
};
template <class Config>
using StorageOf =
    std::conditional_t<Config::kWritesSums, RingStorage<Config>, PersistentStorage<Config>>;

// The part of the depth that a tile is multiplied over.
struct DepthPart {
  int first;  // step
  int steps;
  int matrix;  // of the factors
};
template <class Config>
__device__ __forceinline__ DepthPart depth_of(const TileOrder& order, const TilePosition& at) {
  if constexpr (Config::kSplits) {
    const int split = at.matrix / order.batch;
    return {order.split_steps.first(split), order.split_steps.of(split),
            at.matrix - split * order.batch};
  } else {
    return {0, order.steps, at.matrix};
  }
}

// ---- The producer ----

// The second factor of gated problems.
template <bool kGated>
struct UpFactor {};
template <>
struct UpFactor<true> {
  FactorMaps maps;
};

template <class Config>
__device__ __forceinline__ void produce(RingStorage<Config>& storage, const FactorMaps& a,
                                        const FactorMaps& b, const UpFactor<Config::kGated>& up,
                                        const TileOrder& order, int rank) {
  constexpr int kClusterRows = Config::kClusterRows;
  constexpr auto kAll = static_cast<std::uint16_t>((1u << kClusterRows) - 1);
  RingPlace<Config> ring;
  wait_for_kernel_before();  // the previous kernel may copy factors
  for (unsigned tile = order.first + blockIdx.x / Config::kBlocks; tile < order.tiles;
       tile += gridDim.x / Config::kBlocks) {
    const TilePosition at = locate<Config>(order, tile, rank);
    const DepthPart depth = depth_of<Config>(order, at);
    // A gated tile has as many columns of `up` as of b.
    constexpr int kFactors = Config::kGated ? 2 : 1;
    const int bytes = slice_bytes<Config::kDeepA, Config::kRows>(a, at.row) +
                      kFactors * slice_bytes<Config::kDeepB, Config::kResultCols>(b, at.col);
    for (int step = 0; step < depth.steps; ++step) {
      // The phase before the first counts as complete: the ring begins empty.
      wait(&storage.empty[ring.stage], ring.phase ^ 1);
      Mbarrier* const full = &storage.full[ring.stage];
      // Bytes from other blocks may come first; the phase cannot complete before this arrival.
      announce(full, bytes);
      const int k = (depth.first + step) * kStageDepth<typename Config::Factor>;
      copy_slice<Config::kDeepA, Config::kRows, 1>(
          storage.a[ring.stage], a, at.row, k, depth.matrix * order.a_batch_stride, full, 0, kAll);
      const int b_matrix = depth.matrix * order.b_batch_stride;
      if constexpr (!Config::kGated) {
        copy_slice<Config::kDeepB, Config::kCols, kClusterRows>(storage.b[ring.stage], b, at.col, k,
                                                                b_matrix, full, rank, kAll);
      } else if constexpr (kClusterRows == 1) {
        constexpr int kHalf = Config::kResultCols;
        copy_slice<Config::kDeepB, kHalf, 1>(storage.b[ring.stage], b, at.col, k, b_matrix, full, 0,
                                             kAll);
        copy_slice<Config::kDeepB, kHalf, 1>(storage.b[ring.stage] + kHalf * kLineBytes, up.maps,
                                             at.col, k, b_matrix, full, 0, kAll);
      } else {  // one block copies b, the other up, from the same column on
        copy_slice<Config::kDeepB, Config::kCols, kClusterRows>(
            storage.b[ring.stage], rank == 0 ? b : up.maps, at.col - rank * Config::kResultCols, k,
            b_matrix, full, rank, kAll);
      }
      ring.advance();
    }
  }
  drain(storage, ring);
}

// ---- Results ----

// Which of the parts of a tile's rows, one for each consumer that shares it, a consumer has.
template <class Config>
__device__ __forceinline__ int place_in_tile(int consumer) {
  return Config::kPingPong ? 0 : consumer;
}

// The rows of a panel that belong to a warp, and how many of them it writes at a time, 16 bytes per
// lane, if tensor copies cannot.
inline constexpr int kWarpRows = kProductRows / 4;
inline constexpr int kRowsAtOnce = 32 * 16 / kLineBytes;

// How a result is written: by the threads, to `data`, or by tensor copies, if that is null.
template <class Result>
struct ResultArray {
  Result* data = nullptr;
  int rows = 0;
  int cols = 0;
  int step_rows = kWarpRows;
  bool streams = false;  // lines that tensor copies write leave the L2 cache first
};

// ResultArray's step_rows: how many rows of a panel each warp writes during one of a tile's
// `steps`, if it writes the previous tile while it multiplies. The copy engine takes a panel per
// step. Threads would need longer for a panel than a step's products take, and leave the tensor
// cores idle: they write a few rows per step, if the tile has enough steps.
//
//     steps of the next tile    0     1     2     3     4     5   ...
//     rows of each warp         0-3   4-7   8-11  12-15 0-3   4-7
//                               panel 0                 panel 1
template <class Config>
int rows_of_step(int steps) {
  if (!Config::kLateStores) return kWarpRows;
  int rows = kRowsAtOnce;
  while (rows < kWarpRows && kWarpRows / rows * Config::kPanels > steps) rows *= 2;
  return rows;
}

// The bias of a tile's columns.
template <class Config>
using TileBias = TileColumns<typename Config::Result, Config::kResultCols>;

template <class Config>
__device__ __forceinline__ TileBias<Config> load_bias(const Finish& finish,
                                                      const TilePosition& at) {
  TileBias<Config> bias;
  bias.load(
      static_cast<const typename Config::Result*>(finish.bias) + at.matrix * finish.bias_stride,
      static_cast<int>(finish.cols), at.col);
  return bias;
}

// Adds the bias to a consumer's sums of a tile, and applies the activation and the gate. Each
// activation has its own loop over all sums, since sums in registers need constant indices.
template <class Config>
__device__ __forceinline__ void finish_sums(float (&sums)[Config::kWaves][Config::kSums],
                                            const Finish& finish, const TileBias<Config>& bias) {
  using Result = typename Config::Result;
  if (finish.bias != nullptr) {
    // Sums 4 i to 4 i + 3 are those of two columns, in two rows.
#pragma unroll
    for (int i = 0; i < Config::kResultSums / 4; ++i) {
      float added[2];
      bias.columns(i, added);
#pragma unroll
      for (int wave = 0; wave < Config::kWaves; ++wave) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[wave][4 * i + j] += added[j % 2];
      }
    }
  }
  dispatch_activation(finish.op, [&](auto op) {
#pragma unroll
    for (int wave = 0; wave < Config::kWaves; ++wave) {
#pragma unroll
      for (int i = 0; i < Config::kResultSums; ++i) {
        constexpr bool kFast = sizeof(Result) == 2;
        sums[wave][i] = activated<decltype(op)::value, kFast>(sums[wave][i]);
      }
    }
  });
  if constexpr (Config::kGated) {
#pragma unroll
    for (int wave = 0; wave < Config::kWaves; ++wave) {
#pragma unroll
      for (int i = 0; i < Config::kResultSums; ++i) {
        sums[wave][i] *= sums[wave][Config::kResultSums + i];
      }
    }
  }
}

// Writes a consumer's rows of a tile, panel by panel, through two buffers in shared memory. The
// copy engine reads one while the threads fill the other. If the copy engine cannot write the
// result, each warp writes the rows that it has filled itself, and waits for no other warp.
template <class Config>
class ResultWriter {
 public:
  using Result = typename Config::Result;
  using Pair = std::conditional_t<std::is_same_v<Result, float>, float2, int2>;  // of 32 bits

  __device__ __forceinline__ ResultWriter(PersistentStorage<Config>& storage, const TensorMap& map,
                                          const ResultArray<Result>& array, int consumer)
      : map_(map),
        array_(array),
        buffers_(storage.panels[consumer][0]),
        first_row_(place_in_tile<Config>(consumer) * Config::kWaves * kProductRows),
        barrier_(1 + consumer),
        thread_(threadIdx.x % kWarpgroupThreads) {}

  // Fills a buffer with panel `panel`, a constant once the caller's loop is unrolled, for the copy
  // engine or write_rows(). word(wave, i) is the pair of sums 2 i and 2 i + 1, packed into two
  // results; if results have 32 bits, it is sum i.
  template <class Word>
  __device__ __forceinline__ void fill(int panel, const TilePosition& at, const Word& word) {
    const int wave = panel / kPerWave;
    const int first = panel % kPerWave;
    unsigned char* const buffer = buffers_ + turn_ * kBufferBytes;
    turn_ ^= 1;
    const bool copies = Config::kTurned || array_.data == nullptr;
    if (copies) {
      if (thread_ == 0) wait_until_read<Config::kPanelBuffers - 1>();
      meet(barrier_, kWarpgroupThreads);
    } else {
      __syncwarp();
    }
    // Row r of the panel is line r, swizzled as tensor copies expect it.
    const int lane = thread_ % 32;
    const int warp_row = thread_ / 32 * 16;
    if constexpr (Config::kTurned) {
      // Lane i gives the address of column i % 8 of matrix i / 8, a part of a line. The matrices
      // are rows 0 to 7 and 8 to 15, of 64, of eight columns, then of the next eight.
      const int in_eight = lane % 8;
      const unsigned from = shared_address(buffer + (lane / 16 * 8 + in_eight) * kLineBytes +
                                           ((warp_row / 8 + lane / 8 % 2) ^ in_eight) * 16);
#pragma unroll
      for (int line = 0; line < Config::kPanelRows; line += 16) {
        const int i = (first * Config::kPanelRows + line) / 4;
        store_matrices</*kTransposed=*/true>(from + line * kLineBytes, word(wave, i),
                                             word(wave, i + 1), word(wave, i + 2),
                                             word(wave, i + 3));
      }
    } else if constexpr (sizeof(Result) == 2) {
      // Lane i gives the address of row i % 8 of matrix i / 8. The matrices are rows 0 to 7 and 8
      // to 15 of eight columns, then of the next eight.
      const int row = warp_row + lane % 16;
      const unsigned line = shared_address(buffer + row * kLineBytes);
#pragma unroll
      for (int piece = 0; piece < 8; piece += 2) {
        const int i = first * 16 + piece * 2;
        store_matrices</*kTransposed=*/false>(line + ((piece + lane / 16) ^ (row % 8)) * 16,
                                              word(wave, i), word(wave, i + 1), word(wave, i + 2),
                                              word(wave, i + 3));
      }
    } else if constexpr (sizeof(Result) == 1) {
      const int row = warp_row + lane / 4;
      unsigned char* const line = buffer + row * kLineBytes + lane % 4 * 2;
#pragma unroll
      for (int eight = 0; eight < Config::kPanelCols / 8; ++eight) {
        unsigned char* const to = line + (eight / 2 ^ row % 8) * 16 + eight % 2 * 8;
        const int i = first * 32 + eight * 2;
        *reinterpret_cast<std::uint16_t*>(to) = word(wave, i);
        *reinterpret_cast<std::uint16_t*>(to + kAtomBytes) = word(wave, i + 1);
      }
    } else {
      const int row = warp_row + lane / 4;
      unsigned char* const line = buffer + row * kLineBytes + lane % 2 * 8;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Rows row and row + 8 are one atom apart, and have the same swizzle.
        unsigned char* const to = line + ((2 * i + lane % 4 / 2) ^ (row % 8)) * 16;
        const int s = first * 16 + i * 4;
        *reinterpret_cast<Pair*>(to) = Pair{word(wave, s), word(wave, s + 1)};
        *reinterpret_cast<Pair*>(to + kAtomBytes) = Pair{word(wave, s + 2), word(wave, s + 3)};
      }
    }
    if (copies) {
      finish_writes_before_copies();
      meet(barrier_, kWarpgroupThreads);
      if (thread_ == 0) {
        const int row = at.row + first_row_ + wave * kProductRows;
        if constexpr (Config::kTurned) {
          write_tensor(map_, row, at.col + first * Config::kPanelRows, at.matrix, buffer,
                       array_.streams);
        } else {
          write_tensor(map_, at.col + first * Config::kPanelCols, row, at.matrix, buffer,
                       array_.streams);
        }
      }
    } else {
      __syncwarp();
    }
  }

  // Writes `rows` rows of each warp, from its row `first_row` on, of the panel that was filled
  // last, unless the copy engine does.
  __device__ __forceinline__ void write_rows(int panel, const TilePosition& at, int first_row,
                                             int rows) const {
    if constexpr (!Config::kTurned) {
      if (array_.data == nullptr) return;
      const int wave = panel / kPerWave;
      const int first = panel % kPerWave;
      write_elements(buffers_ + (turn_ ^ 1) * kBufferBytes, buffers_ + turn_ * kBufferBytes,
                     first == 0, first == kPerWave - 1, at.row + first_row_ + wave * kProductRows,
                     at.col + first * Config::kPanelCols, at.matrix, first_row, rows);
    }
  }

  template <class Word>
  __device__ __forceinline__ void write(int panel, const TilePosition& at, const Word& word) {
    fill(panel, at, word);
    write_rows(panel, at, 0, kWarpRows);
  }

  // To be called before the block exits.
  __device__ __forceinline__ void finish() const {
    if (thread_ == 0) wait_until_read<0>();
  }

 private:
  static constexpr int kPerWave = Config::kWavePanels;
  static constexpr int kBufferBytes = Config::kPanelRows * kLineBytes;
  static constexpr int kPackBytes = 16;
  static constexpr int kRowLanes = kLineBytes / kPackBytes;

  // Writes the panel that begins at (first_row, col). Its rows may begin within a sector of 32
  // bytes, and memory takes whole sectors many times as fast as parts. So the incomplete last
  // sector of a panel's row is left to the next panel, while the buffers hold both: only at the two
  // ends of a tile's row are parts of sectors written. Each warp has 16 rows, of which it writes
  // `rows` from row `skipped` on. Eight lanes write a row, each one pack of 16 bytes, of which two
  // are a sector.
  //
  //     sectors    | . . . . | . . . . | . . . . | . . . . | . . . . |
  //     panel 0        e e e  P P P P P P P P P
  //     panel 1                              P P P P P P P P P P P P ...     e: element by element
  //
  // `before` is the panel to the left; `begins` and `ends` say that the tile has no panel to the
  // left or to the right.
  __device__ __forceinline__ void write_elements(const unsigned char* panel,
                                                 const unsigned char* before, bool begins,
                                                 bool ends, int first_row, int col, int matrix,
                                                 int skipped, int rows) const {
    constexpr int kBytes = static_cast<int>(sizeof(Result));
    constexpr int kSectorBytes = 32;
    const int bytes = min(Config::kPanelCols, array_.cols - col) * kBytes;
    if (bytes <= 0) return;
    ends = ends || col + Config::kPanelCols >= array_.cols;
    const int lane = thread_ % kRowLanes;
    const int warp_row = thread_ / 32 * kWarpRows + skipped;
    int row = warp_row + thread_ % 32 / kRowLanes;
    const int end = min(warp_row + rows, array_.rows - first_row);
    auto* to = reinterpret_cast<unsigned char*>(
        array_.data + (std::int64_t{matrix} * array_.rows + first_row + row) * array_.cols + col);
    const std::int64_t step = std::int64_t{kRowsAtOnce * kBytes} * array_.cols;
    // Bytes are counted from the first one of the panel's row; its sector begins `skew` bytes
    // before.
    const auto skew_of = [](const unsigned char* row_to) {
      return static_cast<int>(reinterpret_cast<std::uintptr_t>(row_to) % kSectorBytes);
    };
    const auto piece = [&](int row, int number) {
      return (number < 0 ? before : panel) + row * kLineBytes +
             ((number ^ row) & (kRowLanes - 1)) * kPackBytes;
    };
    // Writes the elements of a row from byte `from` to byte `until`, at most `most` bytes, in a few
    // turns of eight lanes. A loop that is not unrolled takes longer.
    const auto write_edge = [&](auto most, int this_row, unsigned char* row_to, int from,
                                int until) {
      constexpr int kTurnBytes = kRowLanes * kBytes;
      constexpr int kTurns = (decltype(most)::value + kTurnBytes - 1) / kTurnBytes;
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int at = from + turn * kTurnBytes + lane * kBytes;
        if (at < until) {
          *reinterpret_cast<Result*>(row_to + at) =
              *reinterpret_cast<const Result*>(piece(this_row, at >> 4) + (at & (kPackBytes - 1)));
        }
      }
    };
    constexpr int kBatch = Config::kRowBatch;
#pragma unroll 1
    for (; row < end; row += kBatch * kRowsAtOnce, to += kBatch * step) {
      uint4 low[kBatch];
      uint4 high[kBatch];
      int at[kBatch];
      bool whole[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int this_row = row + i * kRowsAtOnce;
        at[i] = lane * kPackBytes - skew_of(to + i * step);
        whole[i] = this_row < end && at[i] + kPackBytes <= bytes && (at[i] >= 0 || !begins);
        if (!whole[i]) continue;
        // If the pack does not extend beyond the first piece, the second one is not used.
        const int first = at[i] >> 4;  // rounds down
        low[i] = *reinterpret_cast<const uint4*>(piece(this_row, first));
        high[i] = *reinterpret_cast<const uint4*>(piece(this_row, first + 1));
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (!whole[i]) continue;
        write_shifted(low[i], high[i], static_cast<unsigned>(at[i]) % kPackBytes,
                      to + i * step + at[i]);
      }
      // The ends of the tile's rows, element by element.
      if (!begins && !ends) continue;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int this_row = row + i * kRowsAtOnce;
        if (this_row >= end) break;
        unsigned char* const row_to = to + i * step;
        const int skew = skew_of(row_to);
        const int head = begins ? min(bytes, -skew & (kPackBytes - 1)) : -kSectorBytes;
        const int tail = min((bytes + skew) / kPackBytes, kRowLanes) * kPackBytes - skew;
        if (begins) write_edge(Constant<kPackBytes - 1>{}, this_row, row_to, 0, head);
        if (ends) {
          write_edge(Constant<kSectorBytes - 1>{}, this_row, row_to, tail > head ? tail : head,
                     bytes);
        }
      }
    }
  }

  const TensorMap& map_;
  const ResultArray<Result>& array_;
  unsigned char* buffers_;
  int first_row_;
  int barrier_;
  int thread_;
  int turn_ = 0;
};

// Writes a consumer's sums of a tile of the transposed product from registers, to rows that are
// whole sectors of 32 bytes. A store of a warp writes eight neighbours in each of four rows: whole
// sectors.
template <class Config>
class SumWriter {
 public:
  using Result = typename Config::Result;

  __device__ __forceinline__ SumWriter(RingStorage<Config>&, const TensorMap&,
                                       const ResultArray<Result>& array, int consumer)
      : array_(array), consumer_(consumer) {}

  // Writes the sums of a wave; word(wave, i) is sum i.
  template <class Word>
  __device__ __forceinline__ void write(int wave, const TilePosition& at, const Word& word) const {
    const int col = at.row + row_of_sums<Config>(consumer_, wave);
    const int row = at.col + static_cast<int>(threadIdx.x) % 4 * 2;
    const std::int64_t cols = array_.cols;
    Result* to = array_.data + (std::int64_t{at.matrix} * array_.rows + row) * cols + col;
    const int rows = array_.rows - row;
    const bool has_left = col < array_.cols;
    const bool has_right = col + 8 < array_.cols;
#pragma unroll
    for (int i = 0; i < Config::kSums / 4; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (8 * i + j >= rows) continue;
        if (has_left) to[j * cols] = word(wave, 4 * i + j);
        if (has_right) to[j * cols + 8] = word(wave, 4 * i + 2 + j);
      }
      to += 8 * cols;
    }
  }

  __device__ __forceinline__ void finish() const {}

 private:
  const ResultArray<Result>& array_;
  int consumer_;
};

template <class Config>
using WriterOf = std::conditional_t<Config::kWritesSums, SumWriter<Config>, ResultWriter<Config>>;

// ---- A consumer ----

// Consumer i waits for its turn at named barrier kTurnBarrier + i.
inline constexpr int kTurnBarrier = 3;

// Multiplies a stage, kStageCols columns at a time, into sums that start from zero, and adds these
// to the tile's. While one consumer adds, the tensor cores are free for the other. add(sum, part,
// wave, block, i) adds sum i of block `block` of kStageCols columns.
template <class Config, class Add>
__device__ __forceinline__ void promote_stage(float (&sums)[Config::kWaves][Config::kSums],
                                              std::uint64_t a, std::uint64_t b, const Add& add) {
  constexpr int kSums = Config::kStageCols / 2;
  float part[kSums];
#pragma unroll
  for (int wave = 0; wave < Config::kWaves; ++wave) {
#pragma unroll
    for (int first = 0; first < Config::kSums; first += kSums) {
      begin_products();
#pragma unroll
      for (int k = 0; k < kLineBytes / kProductBytes; ++k) {
        multiply_add<typename Config::Factor, true, true>(
            part, a + (wave * kPanelBytes + k * kProductBytes) / 16,
            b + (2 * first * kLineBytes + k * kProductBytes) / 16, k > 0);
      }
      end_products();
      wait_for_products<0>();
      hold(part);
#pragma unroll
      for (int i = 0; i < kSums; ++i) add(sums[wave][first + i], part[i], wave, first / kSums, i);
    }
  }
}

template <class Config>
__device__ __forceinline__ void consume(StorageOf<Config>& storage, const TensorMap& result,
                                        const ResultArray<typename Config::Result>& array,
                                        const typename Config::Epilogue& epilogue,
                                        const TileOrder& order, int rank, int consumer) {
  using Result = typename Config::Result;

  typename Config::Sum sums[Config::kWaves][Config::kSums];
  RingPlace<Config> ring;
  WriterOf<Config> writer(storage, result, array, consumer);
  const int place = place_in_tile<Config>(consumer);
  // 64 rows of a are 8192 bytes in both orders: 64 lines of 128 bytes if deep, else a panel.
  const std::uint64_t a_first =
      matrix_descriptor<Config::kDeepA>(storage.a[0] + place * Config::kWaves * kPanelBytes);
  const std::uint64_t b_first = matrix_descriptor<Config::kDeepB>(storage.b[0]);

  const auto release = stage_release<Config>(storage, rank);

  [[maybe_unused]] TilePosition here{};
  const auto multiply = [&](int step) {
    [[maybe_unused]] BlockScales<Config> scales;
    if constexpr (Config::kScaling == Scaling::kBlocks) scales.load(epilogue, here, place, step);
    wait(&storage.full[ring.stage], ring.phase);
    const std::uint64_t a = a_first + ring.stage * (Config::kABytes / 16);
    const std::uint64_t b = b_first + ring.stage * (Config::kBBytes / 16);
    if constexpr (Config::kScaling == Scaling::kBlocks) {
      promote_stage<Config>(sums, a, b, [&](float& sum, float part, int wave, int block, int i) {
        scales.add(sum, part, wave, block, i);
      });
    } else if constexpr (Config::kPromotes) {
      promote_stage<Config>(sums, a, b, [](float& sum, float part, int, int, int) { sum += part; });
    } else {
      multiply_stage<Config>(sums, a, b, step > 0);
    }
  };
  // Releases the last stage whose products are complete, and advances.
  const auto retire = [&](int step) {
    wait_for_products<Config::kPending>();
    if (Config::kPending == 0) {
      release(ring.stage);
    } else if (step > 0) {
      release(ring.previous());
    }
    ring.advance();
  };

  std::uint32_t words[Config::kWaves][Config::kWords];
  const int step_rows = Config::kTurned ? kWarpRows : array.step_rows;
  TilePosition before{};
  bool waiting = false;

  unsigned tile = order.first + blockIdx.x / Config::kBlocks;
  const unsigned clusters = gridDim.x / Config::kBlocks;
  if (Config::kPingPong && consumer == 1) {
    tile += clusters;
    ring.skip(order.steps);
  }
  for (; tile < order.tiles; tile += (Config::kPingPong ? 2 : 1) * clusters) {
    if (Config::kPingPong && tile >= order.first + clusters) {
      meet(kTurnBarrier + consumer, 2 * kWarpgroupThreads);
    }
    // -- Multiply, and meanwhile write the results of the previous tile --
    [[maybe_unused]] TileBias<Config> bias;
    if constexpr (Config::kFinishes) {
      if (epilogue.bias != nullptr) {
        bias = load_bias<Config>(epilogue, locate<Config>(order, tile, rank));
      }
    }
    [[maybe_unused]] OuterScales<Config> scales;
    if constexpr (Config::kScaling == Scaling::kOuter) {
      scales.load(epilogue, locate<Config>(order, tile, rank), place);
    }
    if constexpr (Config::kScaling == Scaling::kBlocks || Config::kAdds) {
      here = locate<Config>(order, tile, rank);
    }
    const int steps = depth_of<Config>(order, locate<Config>(order, tile, rank)).steps;
    int step = 0;
    if constexpr (Config::kPromotes) {
#pragma unroll
      for (int wave = 0; wave < Config::kWaves; ++wave) {
#pragma unroll
        for (int i = 0; i < Config::kSums; ++i) sums[wave][i] = 0;
      }
    }
    if constexpr (Config::kLateStores || Config::kAdds) {
#pragma unroll
      for (int panel = 0; panel < Config::kPanels; ++panel) {
        if (step < steps) multiply(step);
        if constexpr (Config::kLateStores) {
          if (waiting) {
            writer.fill(panel, before, [&](int wave, int i) { return words[wave][i]; });
          }
        }
#pragma unroll 1
        for (int row = 0;;) {
          if (waiting) writer.write_rows(panel, before, row, step_rows);
          row += step_rows;
          if (row >= kWarpRows) break;
          retire(step);
          ++step;
          multiply(step);  // if a panel takes several steps, there are enough
        }
        if constexpr (Config::kAdds) load_addend<Config>(epilogue, here, place, panel, words);
        if (step < steps) {
          retire(step);
          ++step;
        }
      }
    }
#pragma unroll 1
    for (; step < steps; ++step) {
      multiply(step);
      retire(step);
    }
    if (Config::kPingPong && tile + clusters < order.tiles) {
      pass(kTurnBarrier + 1 - consumer, 2 * kWarpgroupThreads);
    }
    wait_for_products<0>();
    if (Config::kPending > 0) release(ring.previous());
    if constexpr (Config::kPingPong) ring.skip(order.steps);  // those of the other's next tile
    if constexpr (!Config::kPromotes) {
#pragma unroll
      for (int wave = 0; wave < Config::kWaves; ++wave) hold(sums[wave]);
    }

    // -- Write the results, or round them and write them during the next tile --
    const TilePosition at = locate<Config>(order, tile, rank);
    if constexpr (Config::kFinishes) finish_sums<Config>(sums, epilogue, bias);
    if constexpr (Config::kAdds) add_addend<Config>(sums, words, epilogue.beta);
    if constexpr (Config::kScaling == Scaling::kOuter) scales.apply(sums);
    const auto sum = [&](int wave, int i) {
      if constexpr (Config::kScaling == Scaling::kOuter) {
        return __builtin_bit_cast(float, sums[wave][i]);
      } else {
        return sums[wave][i];
      }
    };
    if constexpr (Config::kLateStores) {
#pragma unroll
      for (int wave = 0; wave < Config::kWaves; ++wave) {
#pragma unroll
        for (int i = 0; i < Config::kResultSums / 2; ++i) {
          words[wave][i] = round_to_pair<Result>(sum(wave, 2 * i), sum(wave, 2 * i + 1));
        }
      }
      before = at;
      waiting = true;
    } else {
#pragma unroll
      for (int panel = 0; panel < Config::kPanels; ++panel) {
        writer.write(panel, at, [&](int wave, int i) {
          if constexpr (sizeof(Result) == 4) {
            return sum(wave, i);
          } else if constexpr (sizeof(Result) == 2) {
            return round_to_pair<Result>(sum(wave, 2 * i), sum(wave, 2 * i + 1));
          } else {
            return round_to_bytes(sum(wave, 2 * i), sum(wave, 2 * i + 1));
          }
        });
      }
    }
  }
  if constexpr (Config::kLateStores) {
    if (waiting) {
#pragma unroll
      for (int panel = 0; panel < Config::kPanels; ++panel) {
        writer.write(panel, before, [&](int wave, int i) { return words[wave][i]; });
      }
    }
  }
  writer.finish();
}

// ---- The kernel ----

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    persistent_kernel(const __grid_constant__ FactorMaps a, const __grid_constant__ FactorMaps b,
                      const __grid_constant__ TensorMap result,
                      const __grid_constant__ ResultArray<typename Config::Result> array,
                      const TileOrder order,
                      const __grid_constant__ typename Config::Epilogue epilogue,
                      const __grid_constant__ UpFactor<Config::kGated> up) {
#if JAX_GPUOPS_HAS_WGMMA
  unsigned char* const memory = shared_array<unsigned char>();
  const unsigned past_atom = shared_address(memory) % kAtomBytes;
  auto& storage =
      *reinterpret_cast<StorageOf<Config>*>(memory + (kAtomBytes - past_atom) % kAtomBytes);
  // The shuffle tells the compiler that the value is the same for all threads of a warp.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroupThreads, 0);
  const int rank = Config::kBlocks > 1 ? cluster_rank() : 0;

  // -- Set up --
  if (threadIdx.x == 0) {
    prefetch_tensor_map(a.within);
    prefetch_tensor_map(b.within);
    if constexpr (Config::kGated) prefetch_tensor_map(up.maps.within);
    if (array.data == nullptr) prefetch_tensor_map(result);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      initialise(&storage.full[stage]);
      initialise(&storage.empty[stage], Config::kEmptyArrivals);
    }
  }
  __syncthreads();
  if constexpr (Config::kBlocks > 1) {
    cluster_arrive();
    cluster_wait();
  }

  // -- Roles: one thread of warpgroup 0 is the producer; the other warpgroups are consumers --
  if (warpgroup == 0) {
    if constexpr (Config::kConsumers > 1) give_up_registers<Config::kProducerRegisters>();
    if (threadIdx.x == 0) produce<Config>(storage, a, b, up, order, rank);
  } else {
    if constexpr (Config::kConsumers > 1) take_registers<Config::kConsumerRegisters>();
    consume<Config>(storage, result, array, epilogue, order, rank, warpgroup - 1);
  }
#else
  __trap();
#endif
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
