// Ladder, step 5: `bank_conflict_free`.
//
// As `block_tiled`, with two changes that let shared memory deliver at full rate. Both tiles are
// stored as [k][row], so that a thread loads its elements in packs of four; and a thread's 8 x 8
// elements are four quarters of 4 x 4, so that the packs of neighbouring lanes are neighbours
// (ThreadTile draws it). With 8 neighbouring columns per thread, the packs would be 8 apart, two to
// a bank.
//
//                   lane 0   lane 1   lane 2       every bank once for eight lanes
//     b at depth k  | 0..3 | | 4..7 | | 8..11 | ...
#pragma once

#include "matmul/tile.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

template <class A>
struct BankConflictFreeStorage {
  DepthTile<A> a;
  DepthTile<A> b;
};

template <class T, Order kOrderA, Order kOrderB>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<T>)
    bank_conflict_free_kernel(const __grid_constant__ Gemm<T> gemm) {
  using A = Accumulator<T>;
  auto& storage = shared<BankConflictFreeStorage<A>>();
  const Tile tile = locate_tile<kTile, kTile>(gemm);
  TileLoader<T, kOrderA> a(gemm.a, tile.batch, tile.row);
  TileLoader<T, kOrderB> b(gemm.b, tile.batch, tile.col);
  const ThreadTile mine;

  A sum[kPerThread][kPerThread] = {};
  for (std::int64_t depth_left = gemm.depth; depth_left > 0; depth_left -= kTileDepth) {
    // Load.
    a.fetch(depth_left);
    b.fetch(depth_left);
    a.template commit<1, kTileStride>(&storage.a.element[0][0]);
    b.template commit<1, kTileStride>(&storage.b.element[0][0]);
    __syncthreads();

    // Multiply.
#pragma unroll
    for (int k = 0; k < kTileDepth; ++k) {
      A fragment_a[kPerThread], fragment_b[kPerThread];
      load_fragment<ThreadTile::kRowStep>(storage.a, k, mine.row, fragment_a);
      load_fragment<ThreadTile::kColStep>(storage.b, k, mine.col, fragment_b);
      outer_product(fragment_a, fragment_b, sum);
    }
    __syncthreads();  // the next step writes where this one reads
  }
  store_tile(gemm, tile, mine, sum);
}

template <class T>
void launch_bank_conflict_free(const Call<T>& call) {
  constexpr std::size_t kSharedBytes = sizeof(BankConflictFreeStorage<Accumulator<T>>);
  if (call.config.row_major) {
    launch_tiles<bank_conflict_free_kernel<T, Order::kDeep, Order::kWide>>(call, kSharedBytes);
  } else {
    launch_tiles<bank_conflict_free_kernel<T, Order::kAny, Order::kAny>>(call, kSharedBytes);
  }
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
