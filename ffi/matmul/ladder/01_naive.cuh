// Ladder, step 1: `naive`.
//
// A thread computes one element: the product of a row of a and a column of b, both from global
// memory. The lanes of a warp take 32 rows of one column, so with row-major matrices each load of a
// touches 32 rows, k elements apart, and each store 32 rows of the result.
//
//              col
//               |
//     lane 0 -> x      each x reads a row of a: 32 cache lines for 32 lanes
//     lane 1 -> x
//     ...
#pragma once

#include "matmul/gemm.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

// The product of one row of op(a) and one column of op(b).
template <class T>
__device__ inline Accumulator<T> inner_product(const Gemm<T>& gemm, std::int64_t batch,
                                               std::int64_t row, std::int64_t col) {
  const T* a = gemm.a.data + batch * gemm.a.batch_stride + row * gemm.a.row_stride;
  const T* b = gemm.b.data + batch * gemm.b.batch_stride + col * gemm.b.row_stride;
  Accumulator<T> sum = 0;
  for (std::int64_t k = 0; k < gemm.depth; ++k) {
    sum += widen(*a) * widen(*b);
    a += gemm.a.depth_stride;
    b += gemm.b.depth_stride;
  }
  return sum;
}

template <class T>
__global__ void __launch_bounds__(kElementThreads) naive_kernel(Gemm<T> gemm) {
  const Tile tile = locate_tile<kNaiveRows, kNaiveCols>(gemm);
  const std::int64_t row = tile.row + threadIdx.x % kNaiveRows;
  const std::int64_t col = tile.col + threadIdx.x / kNaiveRows;
  if (row >= gemm.a.extent || col >= gemm.b.extent) return;
  const Accumulator<T> sum[1] = {inner_product(gemm, tile.batch, row, col)};
  store_results(gemm, tile.batch, row, col, sum);
}

template <class T>
void launch_naive(const Call<T>& call) {
  launch_tiles<naive_kernel<T>>(call, 0);
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
