// The second launch of `column` and `interleaved`, if they split rows: it combines the partials of
// a row's parts into its result. It takes about a microsecond, so it starts while the first launch
// still runs, if the GPU supports that.
//
// Partials have the shape (outer, part, inner). A group of threads computes a result, and its
// threads share the parts. The groups of a warp compute neighbouring results, and neighbouring
// lanes read the same part of these, which is contiguous in memory if `inner` is more than 1:
//
//     8 threads a result:    lane 0    lane 1    lane 2    lane 3    lane 4    lane 5   ...
//                            r, part 0 r+1       r+2       r+3       r, part 1 r+1      ...
//
// Results of many parts get a block each.
#pragma once

#include "core/ptx/early_launch.cuh"
#include "core/shared.h"
#include "reduce/instance.cuh"
#include "reduce/reducer.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

struct Parts {
  std::int64_t results;
  std::int64_t inner;
  int count;  // per result
};

// `threads`, a power of two, compute a result: lanes of a warp, or the whole block. `partials` is
// not __restrict__, since the kernel that writes them may still run when this one starts.
template <class Reducer>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const typename Reducer::Element* partials, Target y, Parts parts, int threads) {
  const auto warps = shared<BlockStorage<Reducer>>().warps;
  const typename Reducer::Combine combine;
  const typename Reducer::Reader read(y);
  const bool by_block = threads > kWarpSize;
  const int in_warp = by_block ? 1 : kWarpSize / threads;  // results of a warp
  const int in_block = by_block ? 1 : kCombineThreads / threads;
  const int lane = threadIdx.x % kWarpSize;
  const int own_result = by_block ? 0 : threadIdx.x / kWarpSize * in_warp + lane % in_warp;
  const int own_part = by_block ? static_cast<int>(threadIdx.x) : lane / in_warp;
  wait_for_kernel_before();

  // The loop's bounds are those of the block, so that all threads reach every barrier.
  for (std::int64_t first = std::int64_t{blockIdx.x} * in_block; first < parts.results;
       first += std::int64_t{gridDim.x} * in_block) {
    const std::int64_t result = first + own_result;
    typename Reducer::Fold fold;
    if (result < parts.results) {
      const std::int64_t outer = result / parts.inner;
      const auto* const from = partials + outer * parts.count * parts.inner + result % parts.inner;
      for (int part = own_part; part < parts.count; part += kLoads * threads) {
        typename Reducer::Partial value[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const int loaded = part + i * threads;
          value[i] = loaded < parts.count ? read(from[loaded * parts.inner]) : Reducer::identity();
        }
        fold.add(value, part, threads);
      }
    }
    auto partial = fold.value();
    partial = by_block ? block_reduce(partial, Reducer::identity(), combine, warps)
                       : group_reduce(partial, combine, threads, in_warp);
    if (result < parts.results && own_part == 0) Reducer::store(y, result, partial);
  }
}

template <class Instance>
void launch_combine(const Call& call) {
  using Last = typename Instance::Last;
  const auto& [queue, config, problem, buffers] = call;
  const std::int64_t groups =
      config.last_lanes > kWarpSize ? 1 : kCombineThreads / config.last_lanes;
  LaunchShape shape{grid_extent(divide_up(problem.rows(), groups)), kCombineThreads,
                    sizeof(BlockStorage<Last>)};
  shape.early = true;
  launch_kernel<combine_kernel<Last>>(
      queue, shape, Instance::partials(call), call.result(),
      Parts{problem.rows(), problem.inner, static_cast<int>(config.parts)}, config.last_lanes);
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
