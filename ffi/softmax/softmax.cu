// Instantiates the softmax kernels and launches them.

#include <algorithm>

#include "core/integer.h"
#include "core/launch.h"
#include "softmax/block.cuh"
#include "softmax/ladder/01_baseline.cuh"
#include "softmax/ladder/02_one_warp_rows.cuh"
#include "softmax/rows.cuh"
#include "softmax/softmax.h"
#include "softmax/warp.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

template <class T>
struct Call {
  const Queue& queue;
  const T* x;
  T* y;
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

template <class T, Function kFunction, int kLanes, int kPacks, int kPack>
void launch_warp_kernel(const Call<T>& call) {
  constexpr int kRowsPerBlock = kWarpBlockThreads / kLanes;
  launch(call.queue, {grid_extent(divide_up(call.rows.count, kRowsPerBlock)), kWarpBlockThreads},
         warp_kernel<T, kFunction, kLanes, kPacks, kPack>, call.x, call.y, call.rows);
}

// A row of up to 32 packs takes as many lanes as it has packs, a longer one 32 lanes with several
// packs each; both rounded up to powers of two, of which each is a kernel.
template <class T, Function kFunction, int kPack>
void launch_warp_packs(const Call<T>& call) {
  constexpr int kMaxPacks = (sizeof(T) == 8 ? 1024 : 2048) / (kWarpSize * kPack);
  const std::int64_t packs = divide_up(call.rows.columns, kPack);
  if (packs < kWarpSize) {
    dispatch_power_of_two<1, kWarpSize>(power_of_two_from(packs), [&](auto lanes) {
      launch_warp_kernel<T, kFunction, lanes, 1, kPack>(call);
    });
  } else {
    dispatch_power_of_two<1, kMaxPacks>(
        power_of_two_from(divide_up(packs, kWarpSize)), [&](auto packs_per_lane) {
          launch_warp_kernel<T, kFunction, kWarpSize, packs_per_lane, kPack>(call);
        });
  }
}

template <class T, Function kFunction>
void launch_warp(const Call<T>& call) {
  constexpr int kPack = kWidestPack<T>;
  const bool packed = call.rows.inner == 1 && call.rows.columns % kPack == 0;
  // Addresses are not known while preparing, so both kernels a call may need are loaded then.
  if (call.queue.preparing || !(packed && is_aligned<kPack>(call.x) && is_aligned<kPack>(call.y))) {
    launch_warp_packs<T, kFunction, 1>(call);
    if (!call.queue.preparing) return;
  }
  if (packed) launch_warp_packs<T, kFunction, kPack>(call);
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
         kKernel, call.x, call.y, call.rows);
}

template <class T, Function kFunction>
void launch_block_uncached(const Call<T>& call) {
  launch(call.queue,
         {grid_extent(call.rows.count), kMaxBlockThreads, sizeof(BlockScratch<Accumulator<T>>)},
         block_uncached_kernel<T, kFunction>, call.x, call.y, call.rows);
}

template <class T>
void launch_ladder(Algorithm algorithm, const Call<T>& call) {
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
    default:
      return launch_one_warp<T, 4, 4>(call);
  }
}

template <class T, Function kFunction>
void launch_algorithm(Algorithm algorithm, const Call<T>& call) {
  switch (algorithm) {
    case Algorithm::kWarp:
      return launch_warp<T, kFunction>(call);
    case Algorithm::kBlockShared:
      return launch_block_shared<T, kFunction>(call);
    case Algorithm::kBlockUncached:
      return launch_block_uncached<T, kFunction>(call);
    default:
      return launch_ladder(algorithm, call);
  }
}

}  // namespace

void launch(const Plan& plan, const Problem& problem, const void* x, void* y, const Queue& queue) {
  dispatch<__half, __nv_bfloat16, float, double>(problem.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Call<T> call{queue, static_cast<const T*>(x), static_cast<T*>(y),
                       Rows{problem.rows(), problem.columns, problem.inner}};
    switch (problem.function) {
      case Function::kSoftmax:
        return launch_algorithm<T, Function::kSoftmax>(plan.algorithm, call);
      case Function::kLogSoftmax:
        return launch_algorithm<T, Function::kLogSoftmax>(plan.algorithm, call);
      case Function::kLogSumExp:
        return launch_algorithm<T, Function::kLogSumExp>(plan.algorithm, call);
    }
  });
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
