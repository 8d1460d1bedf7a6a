// Instantiates the steps of the ladder and launches them.

#include <algorithm>

#include "core/integer.h"
#include "core/launch.h"
#include "softmax/ladder/01_baseline.cuh"
#include "softmax/ladder/02_one_warp_rows.cuh"
#include "softmax/ladder/03_block.cuh"
#include "softmax/rows.cuh"
#include "softmax/softmax.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

template <class T>
struct Call {
  const Queue& queue;
  const T* x;
  T* y;
  RowResults<T> row_results;
  Rows rows;
};

template <class T>
void launch_baseline(const Call<T>& call) {
  launch(call.queue, {1, kBaselineThreads, sizeof(BaselineStorage<Accumulator<T>>)},
         baseline_kernel<T>, call.x, call.y, call.rows);
}

template <class T, int kRows, int kPack>
void launch_one_warp(const Call<T>& call) {
  launch(call.queue, {grid_extent(divide_up(call.rows.count, kRows)), kWarpSize},
         one_warp_kernel<T, kRows, kPack>, call.x, call.y, call.rows);
}

// The most threads that cost no residency: with larger blocks fewer fit a multiprocessor, and a
// block waiting at a barrier then leaves it idle.
template <class T, Function kFunction>
void launch_block_shared(const Call<T>& call) {
  constexpr auto kKernel = block_shared_kernel<T, kFunction>;
  const std::size_t shared_bytes = block_shared_bytes<T>(call.rows.columns);
  const int most = resident_blocks(call.queue, kKernel, 128, shared_bytes);
  int threads = 1024;
  while (threads > 128 && resident_blocks(call.queue, kKernel, threads, shared_bytes) < most) {
    threads /= 2;
  }
  launch(call.queue, {grid_extent(call.rows.count), static_cast<unsigned>(threads), shared_bytes},
         kKernel, call.x, call.y, call.row_results, call.rows);
}

template <class T, Function kFunction>
void launch_block_uncached(const Call<T>& call) {
  launch(call.queue,
         {grid_extent(call.rows.count), kMaxBlockThreads, sizeof(BlockScratch<Accumulator<T>>)},
         block_uncached_kernel<T, kFunction>, call.x, call.y, call.row_results, call.rows);
}

template <class T, Function kFunction>
void launch_block(Algorithm algorithm, const Call<T>& call) {
  if (algorithm == Algorithm::kBlockShared) return launch_block_shared<T, kFunction>(call);
  launch_block_uncached<T, kFunction>(call);
}

template <class T>
void launch_step(Algorithm algorithm, Function function, const Call<T>& call) {
  switch (algorithm) {
    case Algorithm::kBaseline:
      return launch_baseline(call);
    case Algorithm::kOneWarpOneRow:
      return launch_one_warp<T, 1, 1>(call);
    case Algorithm::kOneWarpTwoRows:
      return launch_one_warp<T, 2, 1>(call);
    case Algorithm::kOneWarpFourRows:
      return launch_one_warp<T, 4, 1>(call);
    case Algorithm::kOneWarpOneRowFloat4:
      return launch_one_warp<T, 1, 4>(call);
    case Algorithm::kOneWarpTwoRowsFloat4:
      return launch_one_warp<T, 2, 4>(call);
    case Algorithm::kOneWarpFourRowsFloat4:
      return launch_one_warp<T, 4, 4>(call);
    default:
      break;
  }
  switch (function) {
    case Function::kSoftmax:
      return launch_block<T, Function::kSoftmax>(algorithm, call);
    case Function::kLogSoftmax:
      return launch_block<T, Function::kLogSoftmax>(algorithm, call);
    default:
      return launch_block<T, Function::kLogSumExp>(algorithm, call);
  }
}

}  // namespace

void launch_ladder(const Plan& plan, const Problem& problem, const Buffers& buffers,
                   const Queue& queue) {
  dispatch<__half, __nv_bfloat16, float, double>(problem.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    launch_step<T>(plan.algorithm, problem.function,
                   {queue,
                    static_cast<const T*>(buffers.x),
                    static_cast<T*>(buffers.y),
                    {buffers.row_result, buffers.narrow_row_result},
                    Rows{problem.rows(), problem.columns, problem.inner}});
  });
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
