// Ladder, step 3: `shared`.
//
// A block computes a tile of 32 x 32 elements, one a thread. It walks the depth in steps of 32: the
// block loads a 32 x 32 tile of each factor into shared memory, and each thread reads a row of the
// one and a column of the other there. Every element is loaded once for 32 uses.
//
//              k ->                 cols
//     rows  | a tile |    k  |  b tile  |    =>   rows  | 32 x 32 |
//           step ->          |  step v  |
#pragma once

#include "core/shared.h"
#include "matmul/gemm.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

// Each row has one element of padding: a transposed factor is written along columns, which would
// otherwise lie in one bank.
template <class A>
struct SharedStorage {
  A a[kSharedTile][kSharedTile + 1];  // [row][k]
  A b[kSharedTile][kSharedTile + 1];  // [k][col]
};

// The element (row, k) of a factor's matrix, or 0 beyond its edges.
template <class T>
__device__ inline Accumulator<T> element_or_zero(const Factor<T>& factor, const T* matrix,
                                                 std::int64_t row, std::int64_t k,
                                                 std::int64_t depth) {
  if (row >= factor.extent || k >= depth) return 0;
  return widen(matrix[row * factor.row_stride + k * factor.depth_stride]);
}

template <class T>
__global__ void __launch_bounds__(kSharedThreads) shared_kernel(Gemm<T> gemm) {
  using A = Accumulator<T>;
  auto& storage = shared<SharedStorage<A>>();
  const Tile tile = locate_tile<kSharedTile, kSharedTile>(gemm);
  const T* const a = gemm.a.data + tile.batch * gemm.a.batch_stride;
  const T* const b = gemm.b.data + tile.batch * gemm.b.batch_stride;
  const int x = threadIdx.x % kSharedTile;
  const int y = threadIdx.x / kSharedTile;

  A sum[1] = {0};
  for (std::int64_t k = 0; k < gemm.depth; k += kSharedTile) {
    // Load: x runs along the dimension whose elements are neighbours in memory.
    if (gemm.a.deep) {
      storage.a[y][x] = element_or_zero(gemm.a, a, tile.row + y, k + x, gemm.depth);
    } else {
      storage.a[x][y] = element_or_zero(gemm.a, a, tile.row + x, k + y, gemm.depth);
    }
    if (gemm.b.deep) {
      storage.b[x][y] = element_or_zero(gemm.b, b, tile.col + y, k + x, gemm.depth);
    } else {
      storage.b[y][x] = element_or_zero(gemm.b, b, tile.col + x, k + y, gemm.depth);
    }
    __syncthreads();

    // Multiply.
#pragma unroll
    for (int i = 0; i < kSharedTile; ++i) sum[0] += storage.a[y][i] * storage.b[i][x];
    __syncthreads();  // the next step writes where this one reads
  }
  store_results(gemm, tile.batch, tile.row + y, tile.col + x, sum);
}

template <class T>
void launch_shared(const Call<T>& call) {
  launch_tiles<shared_kernel<T>>(call, sizeof(SharedStorage<Accumulator<T>>));
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
