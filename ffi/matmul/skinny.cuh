// matmul, algorithm `skinny`: one factor, the skinny one, has at most 16 rows or columns. The time
// is that of reading the other, the large one, once: its elements go from global memory straight to
// registers, many loads in flight, and from there to the warp's matrix instruction, mma.sync.
//
// The large factor's rows (of a, or columns of b) are mma's 16 rows, the skinny one's its 8
// columns:
//
//     large factor                   skinny factor                    sums
//     | kRows x depth |      x       | depth x 8 or 16 |      =       | kRows x 8 or 16 |
//       warp 0 1 .. 7 0 1 ..           warp 0 1 .. 7 0 1 ..            of each warp, then added
//
// A block has kRows rows, and its warps take turns along the depth. In the end they add their sums
// through shared memory, always in the same order.
//
// Products can be added in any order, and rows stand where one likes, so that which element is in
// which register is free as long as both factors agree. In a chunk, 32 of the depth, lane 4 g + t
// has the depths 8 t .. 8 t + 7, of mma's row g and of its column g. Where the depth is contiguous
// that is a load of 16 bytes, and half h of it, four elements, is what the lane gives to product h:
//
//     deep         k 0 .. 7    8 .. 15   16 .. 23   24 .. 31      lane 4 g + t loads row g, 8 t ..
//     row g      |  t = 0   |  t = 1   |  t = 2   |  t = 3   |    words of product 0: 0 and 1,
//     row g + 8  |  t = 0   |  t = 1   |  t = 2   |  t = 3   |    of product 1: 2 and 3
//
// Where the rows are contiguous a lane loads kRows / 8 neighbouring rows of each of its 8 depths.
// Two depths' words are transposed to words of two depths each, of one row:
//
//     not deep     rows 0 ..      kRows / 8 ..                    lane 4 g + t loads k 8 t + j
//     k 8 t + j  |  g = 0   |      g = 1       | ..  g = 7  |     for j = 0 .. 7
#pragma once

#include <cstdint>

#include "core/collectives.h"
#include "core/cuda.h"
#include "core/ptx/memory.cuh"
#include "core/ptx/mma.cuh"
#include "core/shared.h"
#include "core/vector.h"
#include "matmul/epilogue.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

// How a lane reads the skinny factor: a load of 8 neighbours in depth; one of 2 neighbouring
// columns at each depth; or element by element, whatever lies where.
enum class SkinnyReads { kDepths, kColumns, kElements };

inline constexpr int kChunkDepth = 32;
inline constexpr int kLaneDepth = 8;  // of a chunk

template <class Factor_, bool kDeep_, bool kPacked_, SkinnyReads kReads_, int kRows_, int kCols_>
struct Skinny {
  using Factor = Factor_;
  static constexpr bool kDeep = kDeep_;      // the large factor's depth is contiguous
  static constexpr bool kPacked = kPacked_;  // it is read in packs
  static constexpr SkinnyReads kReads = kReads_;
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;

  static constexpr int kWarps = kSkinnyThreads / kWarpSize;
  static constexpr int kRowTiles = kRows / 16;
  static constexpr int kColTiles = kCols / 8;
  static constexpr int kLaneRows = kRows / 8;
  // Words of a chunk that a lane holds, of the large factor and of the skinny one.
  static constexpr int kLargeWords = kLaneRows * kLaneDepth / 2;
  static constexpr int kSkinnyWords = kColTiles * kLaneDepth / 2;

  // A stage is what a warp loads before it multiplies: as many chunks as 128 registers have room
  // for, so that a multiprocessor holds two blocks, each with up to 64 KiB on their way.
  static constexpr int chunks() {
    if (!kPacked) return 1;
    if (kCols == 8) return 128 / kRows;
    if (kReads == SkinnyReads::kElements) return kRows == 64 ? 1 : 2;
    return kRows == 64 ? 1 : kRows == 32 ? 3 : 4;
  }
  static constexpr int kChunks = chunks();
  static constexpr int kStageDepth = kChunks * kChunkDepth;

  static_assert(kReads != SkinnyReads::kColumns || kCols == 16, "a pair of columns for each of 8");

  // Which of a block's rows is element e of a lane's, and where it has column `slot` of mma's, 0 to
  // 7, of tile c.
  __device__ static int row(int group, int e) {
    return kDeep || !kPacked ? group + 8 * e : group * kLaneRows + e;
  }
  __device__ static int col(int slot, int c) {
    return kReads == SkinnyReads::kColumns ? 2 * slot + c : 8 * c + slot;
  }
};

template <class T>
struct SkinnyOperand {
  const T* data;
  std::int64_t batch_stride;  // 0 if the batch shares the factor
  bool deep;                  // the depth is contiguous
  std::int64_t stride;        // from one row or column to the next, or if not deep, one depth
  int extent;                 // rows of the large factor, columns of the skinny one
};

struct SkinnyResult {
  void* data;
  std::int64_t batch_stride;
  std::int64_t row_stride;
  std::int64_t col_stride;
  bool is_float;  // or of the factors' type
  bool large_is_a;
  bool finishes;  // with a bias or an activation
  Finish finish;
};

template <class T>
struct SkinnyProduct {
  SkinnyOperand<T> large;
  SkinnyOperand<T> skinny;
  SkinnyResult result;
  int depth;
  unsigned tiles;  // of rows, for each matrix of the batch
};

// What a lane has of kChunks chunks.
template <class Config>
struct SkinnyStage {
  std::uint32_t large[Config::kChunks][Config::kLargeWords];
  std::uint32_t skinny[Config::kChunks][Config::kSkinnyWords];
};

// In shared memory: the warps' sums. The padding spreads mma's columns over the banks.
template <class Config>
struct SkinnyStorage {
  float sums[Config::kWarps][Config::kCols][Config::kRows + 4];
};

// ---- Loads ----

// Two elements as a word, of which those that are not `valid` are 0.
template <class T>
__device__ __forceinline__ std::uint32_t read_pair(const T* low, const T* high, bool low_valid,
                                                   bool high_valid) {
  const T zero = narrow<T>(0.0f);
  return pair_of(low_valid ? *low : zero, high_valid ? *high : zero);
}

// kWords words of the large factor, or zeros.
template <int kWords, class T>
__device__ __forceinline__ void read_pack_once(const T* from, bool valid, std::uint32_t* to) {
  std::uint32_t word[kWords] = {};
  if (valid) read_once(from, word);
#pragma unroll
  for (int i = 0; i < kWords; ++i) to[i] = word[i];
}

// From which addresses a lane reads its rows and columns. Those beyond an edge are read as the last
// ones within it, and their sums are not written: every row and column is for itself. A depth
// beyond the last, which all of them would have, is read as 0.
template <class Config>
class SkinnyReader {
 public:
  using T = typename Config::Factor;

  __device__ SkinnyReader(const SkinnyProduct<T>& product, std::int64_t matrix, int first_row,
                          int group)
      : large_(product.large.data + matrix * product.large.batch_stride),
        skinny_(product.skinny.data + matrix * product.skinny.batch_stride),
        large_stride_(product.large.stride),
        col_stride_(product.skinny.deep ? product.skinny.stride : 1),
        depth_stride_(product.skinny.deep ? 1 : product.skinny.stride),
        depth_(product.depth) {
    const int last_row = product.large.extent - (kRowsByPack ? Config::kLaneRows : 1);
#pragma unroll
    for (int e = 0; e < kLargeRows; ++e) {
      row_[e] = min(first_row + Config::row(group, e), last_row);
    }
    const int last_col = product.skinny.extent - (kColsByPair ? 2 : 1);
#pragma unroll
    for (int c = 0; c < kSkinnyCols; ++c) col_[c] = min(Config::col(group, c), last_col);
  }

  // Starts the loads of the stage in which the lane's depths begin at `k`. All of it lies within
  // the depth if it is `kWhole`.
  template <bool kWhole>
  __device__ __forceinline__ void read(int k, SkinnyStage<Config>& stage) const {
#pragma unroll
    for (int i = 0; i < Config::kChunks; ++i) {
      read_skinny<kWhole>(k + i * kChunkDepth, stage.skinny[i]);
      read_large<kWhole>(k + i * kChunkDepth, stage.large[i]);
    }
  }

 private:
  static constexpr bool kRowsByPack = !Config::kDeep && Config::kPacked;
  static constexpr bool kColsByPair = Config::kReads == SkinnyReads::kColumns;
  static constexpr int kLargeRows = kRowsByPack ? 1 : Config::kLaneRows;
  static constexpr int kSkinnyCols = kColsByPair ? 1 : Config::kColTiles;

  template <bool kWhole>
  __device__ __forceinline__ void read_large(int k,
                                             std::uint32_t (&word)[Config::kLargeWords]) const {
    const auto at = [&](int e, int j) {
      return Config::kDeep ? large_ + row_[e] * large_stride_ + (k + j)
                           : large_ + row_[e] + (k + j) * large_stride_;
    };
    const auto valid = [&](int j) { return kWhole || k + j < depth_; };
    if constexpr (Config::kDeep) {
#pragma unroll
      for (int e = 0; e < Config::kLaneRows; ++e) {
        if constexpr (Config::kPacked) {
          read_pack_once<4>(at(e, 0), valid(0), &word[4 * e]);
        } else {
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            word[4 * e + w] =
                read_pair(at(e, 2 * w), at(e, 2 * w + 1), valid(2 * w), valid(2 * w + 1));
          }
        }
      }
    } else {
      constexpr int kPerDepth = Config::kLaneRows / 2;
#pragma unroll
      for (int j = 0; j < kLaneDepth; ++j) {
        if constexpr (Config::kPacked) {
          read_pack_once<kPerDepth>(at(0, j), valid(j), &word[kPerDepth * j]);
        } else {
#pragma unroll
          for (int w = 0; w < kPerDepth; ++w) {
            word[kPerDepth * j + w] = read_pair(at(2 * w, j), at(2 * w + 1, j), valid(j), valid(j));
          }
        }
      }
    }
  }

  template <bool kWhole>
  __device__ __forceinline__ void read_skinny(int k,
                                              std::uint32_t (&word)[Config::kSkinnyWords]) const {
    const auto at = [&](int c, int j) {
      return skinny_ + col_[c] * col_stride_ + (k + j) * depth_stride_;
    };
    const auto valid = [&](int j) { return kWhole || k + j < depth_; };
    if constexpr (kColsByPair) {
#pragma unroll
      for (int j = 0; j < kLaneDepth; ++j) {
        const T* const from = skinny_ + col_[0] + (k + j) * depth_stride_;
        word[j] = valid(j) ? read_pack<2>(from).reg[0] : 0;
      }
    } else {
#pragma unroll
      for (int c = 0; c < Config::kColTiles; ++c) {
        if constexpr (Config::kReads == SkinnyReads::kDepths) {
          RegisterPack<T, 8> pack{};
          if (valid(0)) pack = read_pack<8>(skinny_ + col_[c] * col_stride_ + k);
#pragma unroll
          for (int w = 0; w < 4; ++w) word[4 * c + w] = pack.reg[w];
        } else {
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            word[4 * c + w] =
                read_pair(at(c, 2 * w), at(c, 2 * w + 1), valid(2 * w), valid(2 * w + 1));
          }
        }
      }
    }
  }

  const T* large_;
  const T* skinny_;
  std::int64_t large_stride_;
  std::int64_t col_stride_;    // of the skinny factor
  std::int64_t depth_stride_;  // the same
  int depth_;
  int row_[kLargeRows];
  int col_[kSkinnyCols];
};

// ---- Products ----

// Of words that hold two rows of one depth each, that with both depths of the first or second row.
__device__ __forceinline__ std::uint32_t transpose_pair(std::uint32_t even, std::uint32_t odd,
                                                        int second) {
  return __byte_perm(even, odd, second != 0 ? 0x7632 : 0x5410);
}

template <class Config>
using SkinnySums = float[Config::kRowTiles][Config::kColTiles][4];

template <class Config>
__device__ __forceinline__ void multiply(const SkinnyStage<Config>& stage,
                                         SkinnySums<Config>& sums) {
#pragma unroll
  for (int i = 0; i < Config::kChunks; ++i) {
    const auto& large = stage.large[i];
    const auto& skinny = stage.skinny[i];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t right[Config::kColTiles][2];
#pragma unroll
      for (int c = 0; c < Config::kColTiles; ++c) {
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          if constexpr (Config::kReads == SkinnyReads::kColumns) {
            const int j = 4 * half + 2 * w;
            right[c][w] = transpose_pair(skinny[j], skinny[j + 1], c);
          } else {
            right[c][w] = skinny[4 * c + 2 * half + w];
          }
        }
      }
#pragma unroll
      for (int r = 0; r < Config::kRowTiles; ++r) {
        std::uint32_t left[4];  // elements 2 r and 2 r + 1 of the lane's rows, two words of each
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          if constexpr (Config::kDeep) {
            left[w] = large[4 * (2 * r + w % 2) + 2 * half + w / 2];
          } else {
            constexpr int kPerDepth = Config::kLaneRows / 2;
            const int j = 4 * half + w / 2 * 2;
            left[w] =
                transpose_pair(large[kPerDepth * j + r], large[kPerDepth * (j + 1) + r], w % 2);
          }
        }
#pragma unroll
        for (int c = 0; c < Config::kColTiles; ++c) {
          multiply_add_warp<typename Config::Factor>(sums[r][c], left, right[c]);
        }
      }
    }
  }
}

// ---- The kernel ----

template <class Config>
__global__ void __launch_bounds__(kSkinnyThreads, 2)
    skinny_kernel(const SkinnyProduct<typename Config::Factor> product) {
  const unsigned matrix = blockIdx.x / product.tiles;
  const int first_row = static_cast<int>(blockIdx.x - matrix * product.tiles) * Config::kRows;
  // From a shuffle the compiler learns that a warp's threads have it in common.
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  const int lane = threadIdx.x % kWarpSize;
  const int group = lane / 4;

  // -- Products: the warps take turns --
  const SkinnyReader<Config> reader(product, matrix, first_row, group);
  const int lane_depth = lane % 4 * kLaneDepth;
  SkinnySums<Config> sums = {};
#pragma unroll 1
  for (int k = warp * Config::kStageDepth; k < product.depth;
       k += Config::kWarps * Config::kStageDepth) {
    SkinnyStage<Config> stage;
    if (product.depth - k >= Config::kStageDepth) {
      reader.template read<true>(k + lane_depth, stage);
    } else {
      reader.template read<false>(k + lane_depth, stage);
    }
    multiply<Config>(stage, sums);
  }

  // -- Sums of all warps --
  auto& storage = shared<SkinnyStorage<Config>>();
#pragma unroll
  for (int r = 0; r < Config::kRowTiles; ++r) {
#pragma unroll
    for (int c = 0; c < Config::kColTiles; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = Config::row(group, 2 * r + i / 2);
        const int col = Config::col(lane % 4 * 2 + i % 2, c);
        storage.sums[warp][col][row] = sums[r][c][i];
      }
    }
  }
  __syncthreads();

  // -- Results: neighbouring threads write neighbours --
  const SkinnyResult& result = product.result;
  const int cols = product.skinny.extent;
  const int rows = min(Config::kRows, product.large.extent - first_row);
  for (int i = threadIdx.x; i < rows * cols; i += kSkinnyThreads) {
    const int row = result.row_stride == 1 ? i % rows : i / cols;
    const int col = result.row_stride == 1 ? i / rows : i % cols;
    float sum = storage.sums[0][col][row];
#pragma unroll
    for (int w = 1; w < Config::kWarps; ++w) sum += storage.sums[w][col][row];
    if (result.finishes) {
      using T = typename Config::Factor;
      const int at_col = result.large_is_a ? col : first_row + row;
      sum += result.is_float ? bias_of<float>(result.finish, matrix, at_col)
                             : bias_of<T>(result.finish, matrix, at_col);
      dispatch_activation(result.finish.op, [&](auto op) {
        sum = activated<decltype(op)::value, /*kFast=*/false>(sum);
      });
    }
    const std::int64_t at = matrix * result.batch_stride + (first_row + row) * result.row_stride +
                            col * result.col_stride;
    if (result.is_float) {
      static_cast<float*>(result.data)[at] = sum;
    } else {
      using T = typename Config::Factor;
      static_cast<T*>(result.data)[at] = narrow<T>(sum);
    }
  }
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
