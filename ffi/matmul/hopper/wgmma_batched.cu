// Compiled for each of: __half+__nv_bfloat16
#include "core/dispatch.h"
#include "core/integer.h"
#include "core/launch.h"
#include "matmul/hopper/factors.cuh"
#include "matmul/hopper/wgmma_batched.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

template <class T>
void launch_wgmma_batched(const Queue& queue, const Config& config, const Problem& problem,
                          const Buffers& buffers) {
  if (problem.k == 0) return clear_result(queue, problem, buffers);
  const LaunchShape shape{grid_extent(config.blocks), static_cast<unsigned>(config.threads),
                          static_cast<std::size_t>(config.shared_bytes)};
  const WgmmaBatchedResult result{buffers.result, problem.result_dtype == DType::kFloat32,
                                  static_cast<int>(problem.m), static_cast<int>(problem.n),
                                  config.vector_bytes};
  const WgmmaBatchedTiles tiles{Divisor(divide_up(problem.m, kWgmmaBatchedTile)),
                                Divisor(divide_up(problem.n, kWgmmaBatchedTile)),
                                static_cast<int>(divide_up(problem.k, kStageDepth<T>)),
                                config.stages,
                                problem.share_a ? 0 : 1,
                                problem.share_b ? 0 : 1};
  dispatch_layouts<T>(problem, [&](auto deep_a, auto deep_b) {
    constexpr bool kDeepA = decltype(deep_a)::value;
    constexpr bool kDeepB = decltype(deep_b)::value;
    FactorMaps a{}, b{};
    if (!queue.preparing) {
      const StoredFactor in_a = stored_a(problem), in_b = stored_b(problem);
      a = maps_of_factor<T, kDeepA>({buffers.a, in_a, in_a.length}, kWgmmaBatchedTile);
      b = maps_of_factor<T, kDeepB>({buffers.b, in_b, in_b.length}, kWgmmaBatchedTile);
    }
    using Kernel = WgmmaBatched<T, kDeepA, kDeepB>;
    static_assert(ring_bytes(1, kWgmmaBatchedLines) ==
                  kSharedBytes<WgmmaBatchedStorage> + Kernel::kStageBytes);
    launch_kernel<wgmma_batched_kernel<Kernel>>(queue, shape, a, b, result, tiles,
                                                finish_of(problem, buffers));
  });
}

#define JAX_GPUOPS_INSTANTIATE(T)                                                    \
  template void launch_wgmma_batched<T>(const Queue&, const Config&, const Problem&, \
                                        const Buffers&);
JAX_GPUOPS_EACH_ELEMENT(JAX_GPUOPS_INSTANTIATE)
#undef JAX_GPUOPS_INSTANTIATE

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
