// Ladder, step 4: `block_tiled`.
//
// A block computes a tile of 128 x 128 in steps of depth 8, and each of its 256 threads 8 x 8
// neighbouring elements, whose sums stay in registers. At every depth a thread reads 8 + 8 elements
// from shared memory for 64 multiplications, where `shared` reads 2 for one: most instructions are
// now arithmetic, not memory accesses.
//
//                      128 columns of b           thread (ty, tx) of 16 x 16:
//                    8 | 8 x 128 tile |
//         8                                         tx * 8 ...
//     | 128 x 8 |      | 128 x 128    |    ty * 8  | 8 x 8 |
//     |  tile   |      |  results     |     ...
//
// a lies in shared memory as in global memory, [row][k]: the lanes of a warp read rows 64 elements
// apart, from few banks. The next step avoids that.
#pragma once

#include "matmul/tile.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

template <class A>
struct BlockTiledStorage {
  alignas(16) A a[kTile][kTileDepth];
  alignas(16) A b[kTileDepth][kTile];
};

struct SquareThreadTile {
  int row = threadIdx.x / (kTile / kPerThread) * kPerThread;
  int col = threadIdx.x % (kTile / kPerThread) * kPerThread;

  __device__ int row_of(int i) const { return row + i; }
  __device__ int col_of(int j) const { return col + j; }
};

template <class T, Order kOrderA, Order kOrderB>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<T>)
    block_tiled_kernel(const __grid_constant__ Gemm<T> gemm) {
  using A = Accumulator<T>;
  auto& storage = shared<BlockTiledStorage<A>>();
  const Tile tile = locate_tile<kTile, kTile>(gemm);
  TileLoader<T, kOrderA> a(gemm.a, tile.batch, tile.row);
  TileLoader<T, kOrderB> b(gemm.b, tile.batch, tile.col);
  const SquareThreadTile mine;

  A sum[kPerThread][kPerThread] = {};
  for (std::int64_t depth_left = gemm.depth; depth_left > 0; depth_left -= kTileDepth) {
    // Load.
    a.fetch(depth_left);
    b.fetch(depth_left);
    a.template commit<kTileDepth, 1>(&storage.a[0][0]);
    b.template commit<1, kTile>(&storage.b[0][0]);
    __syncthreads();

    // Multiply.
#pragma unroll
    for (int k = 0; k < kTileDepth; ++k) {
      A fragment_a[kPerThread], fragment_b[kPerThread];
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        fragment_a[i] = storage.a[mine.row + i][k];
        fragment_b[i] = storage.b[k][mine.col + i];
      }
      outer_product(fragment_a, fragment_b, sum);
    }
    __syncthreads();  // the next step writes where this one reads
  }
  store_tile(gemm, tile, mine, sum);
}

template <class T>
void launch_block_tiled(const Call<T>& call) {
  constexpr std::size_t kSharedBytes = sizeof(BlockTiledStorage<Accumulator<T>>);
  if (call.config.row_major) {
    launch_tiles<block_tiled_kernel<T, Order::kDeep, Order::kWide>>(call, kSharedBytes);
  } else {
    launch_tiles<block_tiled_kernel<T, Order::kAny, Order::kAny>>(call, kSharedBytes);
  }
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
