// matmul, algorithm `parallel_split_k`: split-K through global memory, for few tiles of a large
// depth. tensor_core's persistent kernel computes each split's partial sums, as floats, and the
// kernel below adds them, and then the bias, and applies the activation:
//
//     partial sums   [split][batch][m][n]  ->  result [batch][m][n]
//
// The splits are added in their order, so repeats have the same bits. Rows of partial sums are
// partial_pitch() floats apart, and columns from n on are not used.
#pragma once

#include <cstdint>

#include "core/cuda.h"
#include "core/integer.h"
#include "core/launch.h"
#include "core/ptx/early_launch.cuh"
#include "matmul/epilogue.cuh"
#include "matmul/hopper/depth_shares.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

inline constexpr int kReduceThreads = 256;
// Loads of a thread that are in flight together.
inline constexpr int kReduceLoads = 4;

template <class Result>
struct SplitKReduction {
  const float* partials;
  Result* result;
  std::int64_t split_stride;  // elements from one split to the next
  int splits;
  int cols;
  int pitch;
  unsigned count;   // of packs of four columns in all rows
  Divisor per_row;  // packs
  bool packed;      // packs of the result are complete and aligned
  Finish finish;
  Divisor rows;  // of a matrix of the batch
};

template <class Result, bool kFinishes>
__global__ void __launch_bounds__(kReduceThreads)
    split_k_reduce_kernel(const __grid_constant__ SplitKReduction<Result> reduction) {
  const unsigned i = blockIdx.x * kReduceThreads + threadIdx.x;
  if (i >= reduction.count) return;
  const Division at = reduction.per_row.divide(i);
  const std::int64_t row = at.quotient;
  const int col = static_cast<int>(at.remainder) * 4;
  const float* from = reduction.partials + row * reduction.pitch + col;
  float bias[4] = {};
  if constexpr (kFinishes) {
    const std::int64_t matrix = reduction.rows.quotient(at.quotient);
#pragma unroll
    for (int j = 0; j < 4; ++j) bias[j] = bias_of<Result>(reduction.finish, matrix, col + j);
  }
  wait_for_kernel_before();  // which writes the partial sums
  float4 sum{};
#pragma unroll 1
  for (int first = 0; first < reduction.splits; first += kReduceLoads) {
    float4 part[kReduceLoads];
#pragma unroll
    for (int j = 0; j < kReduceLoads; ++j) {
      part[j] = float4{};
      if (first + j < reduction.splits) {
        part[j] = *reinterpret_cast<const float4*>(from + j * reduction.split_stride);
      }
    }
#pragma unroll
    for (int j = 0; j < kReduceLoads; ++j) {
      sum = make_float4(sum.x + part[j].x, sum.y + part[j].y, sum.z + part[j].z, sum.w + part[j].w);
    }
    from += kReduceLoads * reduction.split_stride;
  }
  if constexpr (kFinishes) {
    sum = finished</*kFast=*/sizeof(Result) == 2>(reduction.finish.op, sum, bias);
  }
  write_four(sum, reduction.result + row * reduction.cols + col, reduction.cols - col,
             reduction.packed);
}

// Launched early, to start as soon as the blocks of the kernel before have exited.
template <class Result>
void launch_split_k_reduce(const Queue& queue, int splits, const Problem& problem,
                           const float* partials, const Buffers& buffers) {
  const std::int64_t per_row = divide_up(problem.n, 4);
  const std::int64_t count = problem.batch * problem.m * per_row;
  SplitKReduction<Result> reduction{};
  reduction.partials = partials;
  reduction.result = static_cast<Result*>(buffers.result);
  reduction.split_stride = partial_bytes(problem) / 4;
  reduction.splits = splits;
  reduction.cols = static_cast<int>(problem.n);
  reduction.pitch = static_cast<int>(partial_pitch(problem));
  reduction.count = static_cast<unsigned>(count);
  reduction.per_row = Divisor(per_row);
  reduction.packed = problem.n % 4 == 0;
  reduction.finish = finish_of(problem, buffers);
  reduction.rows = Divisor(problem.m);
  LaunchShape shape{dim3(grid_extent(divide_up(count, kReduceThreads))), kReduceThreads};
  shape.early = true;
  dispatch_value<false, true>(has_epilogue(problem), [&](auto finishes) {
    launch_kernel<split_k_reduce_kernel<Result, finishes>>(queue, shape, reduction);
  });
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
