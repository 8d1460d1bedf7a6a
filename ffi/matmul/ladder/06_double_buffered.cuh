// Ladder, step 6: `double_buffered`.
//
// As `bank_conflict_free`, with two copies of the tiles in shared memory. While a block multiplies
// one tile, the loads of the next one into registers are in flight; they are written to the other
// copy after the multiplications. So the time of the loads is hidden, and one barrier per step is
// enough. The same is done within a step: the fragments of the next k are loaded while those of
// this one are multiplied.
//
//     global loads     | tile 1     | tile 2     | tile 3     |
//     multiplications  | tile 0     | tile 1     | tile 2     |
//     shared memory    | 0 -> tile 1| 1 -> tile 2| 0 -> ...
//                                   ^ barrier    ^ barrier
#pragma once

#include "matmul/tile.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

template <class A>
struct DoubleBufferedStorage {
  DepthTile<A> a[2];
  DepthTile<A> b[2];
};

template <class T, Order kOrderA, Order kOrderB>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<T>)
    double_buffered_kernel(const __grid_constant__ Gemm<T> gemm) {
  using A = Accumulator<T>;
  if (gemm.flag != nullptr && *gemm.flag == 0) return;
  auto& storage = shared<DoubleBufferedStorage<A>>();
  const Tile tile = locate_tile<kTile, kTile>(gemm);
  TileLoader<T, kOrderA> a(gemm.a, tile.batch, tile.row);
  TileLoader<T, kOrderB> b(gemm.b, tile.batch, tile.col);
  const ThreadTile mine;

  const auto commit = [&](int buffer) {
    a.template commit<1, kTileStride>(&storage.a[buffer].element[0][0]);
    b.template commit<1, kTileStride>(&storage.b[buffer].element[0][0]);
  };

  a.fetch(gemm.depth);
  b.fetch(gemm.depth);
  commit(0);
  __syncthreads();

  A sum[kPerThread][kPerThread] = {};
  int buffer = 0;
  for (std::int64_t depth_left = gemm.depth; depth_left > 0; depth_left -= kTileDepth) {
    // Start the loads of the next tile.
    const std::int64_t next_left = depth_left - kTileDepth;
    if (next_left > 0) {
      a.fetch(next_left);
      b.fetch(next_left);
    }

    // Multiply this one.
    A fragment_a[2][kPerThread], fragment_b[2][kPerThread];
    load_fragment<ThreadTile::kRowStep>(storage.a[buffer], 0, mine.row, fragment_a[0]);
    load_fragment<ThreadTile::kColStep>(storage.b[buffer], 0, mine.col, fragment_b[0]);
#pragma unroll
    for (int k = 0; k < kTileDepth; ++k) {
      if (k + 1 < kTileDepth) {
        const int next = (k + 1) % 2;
        load_fragment<ThreadTile::kRowStep>(storage.a[buffer], k + 1, mine.row, fragment_a[next]);
        load_fragment<ThreadTile::kColStep>(storage.b[buffer], k + 1, mine.col, fragment_b[next]);
      }
      outer_product(fragment_a[k % 2], fragment_b[k % 2], sum);
    }

    // Publish the next tile. Its buffer was last read before the previous barrier.
    buffer ^= 1;
    if (next_left > 0) commit(buffer);
    __syncthreads();
  }
  store_tile(gemm, tile, mine, sum);
}

template <class T>
void launch_double_buffered(const Call<T>& call) {
  constexpr std::size_t kSharedBytes = sizeof(DoubleBufferedStorage<Accumulator<T>>);
  if (call.config.row_major) {
    launch_tiles<double_buffered_kernel<T, Order::kDeep, Order::kWide>>(call, kSharedBytes);
  } else {
    launch_tiles<double_buffered_kernel<T, Order::kAny, Order::kAny>>(call, kSharedBytes);
  }
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
