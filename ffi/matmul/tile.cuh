// Shared by the kernels with 128 x 128 tiles: how 256 threads copy a tile of a factor from global
// to shared memory, and which 8 x 8 elements of the result a thread holds.
#pragma once

#include "core/collectives.h"
#include "core/shared.h"
#include "matmul/gemm.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

inline constexpr int kTileDepth = 8;
inline constexpr int kPerThread = 8;
static_assert(kTile * kTileDepth == kTileThreads * kPack, "each thread loads one pack of a tile");
static_assert(kTile * kTile == kTileThreads * kPerThread * kPerThread,
              "each thread holds 8 x 8 elements of the result");

// Two blocks on a multiprocessor hide each other's barriers; 128 registers a thread allow it, but
// the 64 sums of a thread in float64 take them all.
template <class T>
inline constexpr int kTileBlocks = sizeof(Accumulator<T>) == 8 ? 1 : 2;

// Copies one tile of a factor after the other: fetch() starts the loads of the next tile into
// registers, commit() writes them to shared memory. A thread moves one pack, along the dimension
// whose elements are neighbours in memory:
//
//     deep:      row -> | 0 0 0 0 1 1 1 1 |      not deep:  k -> | 0 0 0 0 1 1 1 1 2 2 2 2 ... |
//                row -> | 2 2 2 2 3 3 3 3 |                 k -> | 32 32 32 32 ...             |
//
// Elements beyond the factor's edges are 0.
template <class T, Order kOrder>
class TileLoader {
 public:
  using A = Accumulator<T>;

  __device__ TileLoader(const Factor<T>& factor, std::int64_t batch, std::int64_t first_row)
      : is_deep_(factor.deep), packed_(factor.packed) {
    const int thread = threadIdx.x;
    row_ = deep() ? thread / 2 : thread % kWarpSize * kPack;
    k_ = deep() ? thread % 2 * kPack : thread / kWarpSize;
    const std::int64_t left = factor.extent - first_row - row_;
    rows_ = left < 0 ? 0 : left < kPack ? static_cast<int>(left) : kPack;
    step_ = kTileDepth * factor.depth_stride;
    next_ = factor.data + batch * factor.batch_stride + (first_row + row_) * factor.row_stride +
            k_ * factor.depth_stride;
  }

  // Loads the next tile, of which `depth_left` steps of depth lie within the factor.
  __device__ void fetch(std::int64_t depth_left) {
    const int depth = depth_left < kTileDepth ? static_cast<int>(depth_left) : kTileDepth;
    const int valid = deep() ? (rows_ > 0 ? depth - k_ : 0) : (k_ < depth ? rows_ : 0);
    if (packed()) {
      if (valid > 0) {
        pack_ = *reinterpret_cast<const Pack<T, kPack>*>(next_);
      } else {
#pragma unroll
        for (int i = 0; i < kPack; ++i) pack_.element[i] = T{};
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPack; ++i) pack_.element[i] = i < valid ? next_[i] : T{};
    }
    next_ += step_;
  }

  // Writes the tile so that element (row, k) is at `tile[row * kRowStride + k * kDepthStride]`.
  template <int kRowStride, int kDepthStride>
  __device__ void commit(A* tile) const {
    A* const to = tile + row_ * kRowStride + k_ * kDepthStride;
    A value[kPack];
#pragma unroll
    for (int i = 0; i < kPack; ++i) value[i] = widen(pack_.element[i]);
    if ((deep() ? kDepthStride : kRowStride) == 1) {
      store<kPack>(value, to);
    } else {
#pragma unroll
      for (int i = 0; i < kPack; ++i) to[i * (deep() ? kDepthStride : kRowStride)] = value[i];
    }
  }

 private:
  __device__ bool deep() const { return kOrder == Order::kAny ? is_deep_ : kOrder == Order::kDeep; }
  __device__ bool packed() const { return kOrder != Order::kAny || packed_; }

  const T* next_;
  std::int64_t step_;
  int row_;   // of the thread's pack in the tile
  int k_;     // likewise
  int rows_;  // how many rows from row_ on lie within the factor, at most kPack
  bool is_deep_;
  bool packed_;
  Pack<T, kPack> pack_;
};

// A tile of a factor in shared memory, as [k][row]: the rows that a thread multiplies at one k are
// neighbours. The padding spreads what a warp writes of a deep factor, 16 rows at two k's four
// apart, over all banks:
//
//     k -> | row 0 row 1 ... row 127 | padding |
inline constexpr int kTileStride = kTile + 4;

template <class A>
struct alignas(16) DepthTile {
  A element[kTileDepth][kTileStride];
};

// The elements of the tile that a thread holds: four quarters of 4 x 4. A warp has a tile of
// 32 x 64, in which the lanes of a quarter lie side by side, so that one load of four elements of b
// by eight lanes reads 32 neighbours, each bank once; those of a are broadcast.
//
//     warps of a block     quarters of a warp     lanes of a quarter
//       0 1                  64 columns             0  1  2  3  4  5  6  7
//       2 3                | q0 | q1 |              8  9 ...
//       4 5                | q2 | q3 | 32 rows     16
//       6 7                                        24               ... 31
struct ThreadTile {
  static constexpr int kRowStep = 16;  // between the quarters
  static constexpr int kColStep = 32;
  int row;
  int col;

  __device__ ThreadTile() {
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    row = warp / 2 * 32 + lane / 8 * kPack;
    col = warp % 2 * 64 + lane % 8 * kPack;
  }

  __device__ int row_of(int i) const { return row + i / kPack * kRowStep + i % kPack; }
  __device__ int col_of(int j) const { return col + j / kPack * kColStep + j % kPack; }
};

// The elements of one tile at depth k that a thread multiplies.
template <int kStep, class A>
__device__ inline void load_fragment(const DepthTile<A>& tile, int k, int first,
                                     A (&fragment)[kPerThread]) {
#pragma unroll
  for (int half = 0; half < kPerThread / kPack; ++half) {
    const auto pack =
        *reinterpret_cast<const Pack<A, kPack>*>(&tile.element[k][first + half * kStep]);
#pragma unroll
    for (int i = 0; i < kPack; ++i) fragment[half * kPack + i] = pack.element[i];
  }
}

template <class A>
__device__ inline void outer_product(const A (&a)[kPerThread], const A (&b)[kPerThread],
                                     A (&sum)[kPerThread][kPerThread]) {
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) sum[i][j] += a[i] * b[j];
  }
}

// Not inlined: a thread stores 16 packs, and the code for one, with every epilogue, is 300
// instructions long.
template <class T>
__device__ __noinline__ void store_pack(const Gemm<T>& gemm, std::int64_t batch, std::int64_t row,
                                        std::int64_t col, Pack<Accumulator<T>, kPack> sum) {
  store_results(gemm, batch, row, col, sum.element);
}

// Stores the elements a thread holds; `place` tells where in the tile they are.
template <class T, class Place>
__device__ inline void store_tile(const Gemm<T>& gemm, const Tile& tile, const Place& place,
                                  const Accumulator<T> (&sum)[kPerThread][kPerThread]) {
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
    for (int j = 0; j < kPerThread; j += kPack) {
      Pack<Accumulator<T>, kPack> pack;
#pragma unroll
      for (int l = 0; l < kPack; ++l) pack.element[l] = sum[i][j + l];
      store_pack(gemm, tile.batch, tile.row + place.row_of(i), tile.col + place.col_of(j), pack);
    }
  }
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
