// Ladder, step 2: `coalesced`.
//
// As `naive`, with the lanes of a warp along a row of the result. Now the 32 loads of b are
// neighbours, one cache line, all lanes read the same element of a, one broadcast, and the stores
// are neighbours too.
//
//            lane 0 1 2 ... 31
//     row ->      x x x ... x      one row of a for all, 32 columns of b
#pragma once

#include "matmul/gemm.cuh"
#include "matmul/ladder/01_naive.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

template <class T>
__global__ void __launch_bounds__(kElementThreads) coalesced_kernel(Gemm<T> gemm) {
  const Tile tile = locate_tile<kCoalescedRows, kCoalescedCols>(gemm);
  const std::int64_t row = tile.row + threadIdx.x / kCoalescedCols;
  const std::int64_t col = tile.col + threadIdx.x % kCoalescedCols;
  if (row >= gemm.a.extent || col >= gemm.b.extent) return;
  const Accumulator<T> sum[1] = {inner_product(gemm, tile.batch, row, col)};
  store_results(gemm, tile.batch, row, col, sum);
}

template <class T>
void launch_coalesced(const Call<T>& call) {
  launch_tiles<coalesced_kernel<T>>(call, 0);
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
