// Compiled for each of: __half+__nv_bfloat16+float
#include "core/dispatch.h"
#include "core/integer.h"
#include "core/launch.h"
#include "matmul/hopper/factors.cuh"
#include "matmul/hopper/split_k.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {
namespace {

template <class Kernel>
void launch_tile(const Queue& queue, const Config& config, const Problem& problem,
                 const Buffers& buffers) {
  using T = typename Kernel::Factor;
  const LaunchShape shape = shape_behind_copies(config, config.splits);
  const ReadFactors factors = read_factors<T>(queue, config, problem, buffers);
  FactorMaps a{}, b{};
  SplitKResult result{};
  SplitKOrder order{};
  if (!queue.preparing) {
    a = maps_of_factor<T, Kernel::kDeepA>(factors.a, Kernel::kRows);
    b = maps_of_factor<T, Kernel::kDeepB>(factors.b, Kernel::kCols);
    result = {buffers.result,
              static_cast<int>(problem.m),
              static_cast<int>(problem.n),
              problem.result_dtype == DType::kFloat32,
              problem.n % 4 == 0,
              has_epilogue(problem),
              finish_of(problem, buffers)};
    order.rows = static_cast<unsigned>(divide_up(problem.m, Kernel::kRows));
    order.cols = static_cast<unsigned>(divide_up(problem.n, Kernel::kCols));
    order.steps = shares_of(static_cast<int>(divide_up(problem.k, kStageDepth<T>)), config.splits);
    order.groups = shares_of(Kernel::kGroups, config.splits);
    order.splits = config.splits;
    order.stages = config.stages;
    order.a_batch_stride = problem.share_a ? 0 : 1;
    order.b_batch_stride = problem.share_b ? 0 : 1;
  }
  launch_kernel<split_k_kernel<Kernel>>(queue, shape, a, b, result, order);
}

}  // namespace

template <class T>
void launch_split_k(const Queue& queue, const Config& config, const Problem& problem,
                    const Buffers& buffers) {
  const auto matches = [&](const SplitKTile& tile) {
    return tile.rows == config.tile_rows && tile.cols == config.tile_cols;
  };
  dispatch_instance<kSplitKTiles>(matches, [&](auto index) {
    constexpr const SplitKTile& kTile = kSplitKTiles[decltype(index)::value];
    dispatch_layouts<T>(problem, [&](auto deep_a, auto deep_b) {
      using Kernel = SplitK<T, decltype(deep_a)::value, decltype(deep_b)::value, kTile.rows,
                            kTile.cols, kTile.resident>;
      static_assert(Kernel::kThreads == kTile.threads());
      launch_tile<Kernel>(queue, config, problem, buffers);
    });
  });
}

#define JAX_GPUOPS_INSTANTIATE(T) \
  template void launch_split_k<T>(const Queue&, const Config&, const Problem&, const Buffers&);
JAX_GPUOPS_EACH_ELEMENT(JAX_GPUOPS_INSTANTIATE)
#undef JAX_GPUOPS_INSTANTIATE

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
