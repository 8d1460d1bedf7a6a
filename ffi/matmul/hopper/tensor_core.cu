// Compiled for each of: __half __nv_bfloat16 float
#include "core/dispatch.h"
#include "core/integer.h"
#include "core/launch.h"
#include "matmul/hopper/factors.cuh"
#include "matmul/hopper/persistent.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {
namespace {

template <class Kernel>
void launch_persistent(const Queue& queue, const Config& config, const Problem& problem,
                       const Buffers& buffers) {
  using T = typename Kernel::Factor;
  const LaunchShape shape{dim3(static_cast<unsigned>(config.blocks)),
                          static_cast<unsigned>(config.threads),
                          static_cast<std::size_t>(config.shared_bytes), config.cluster_rows};
  const ReadFactors factors = read_factors<T>(queue, config, problem, buffers);
  using Result = typename Kernel::Result;
  TensorMap a{}, b{}, result{};
  PlainResult<Result> plain{};
  TileOrder order{};
  UpFactor<Kernel::kGated> up{};
  if (!queue.preparing) {
    a = map_of_factor<T, Kernel::kDeepA>(factors.a, Kernel::kRows / Kernel::kClusterCols);
    b = map_of_factor<T, Kernel::kDeepB>(factors.b, Kernel::kCols / Kernel::kClusterRows);
    if constexpr (Kernel::kGated) {
      const ReadFactor factor{buffers.up, factors.b.stored, factors.b.pitch};
      up.map = map_of_factor<T, Kernel::kDeepB>(factor, Kernel::kCols / 2);
    }
    if (config.writes_elements) {
      plain = {static_cast<Result*>(buffers.result), static_cast<int>(problem.m),
               static_cast<int>(problem.n)};
    } else {
      result = map_of<Result>(kResultType<Result>, buffers.result, problem.batch, problem.m,
                              problem.n, problem.n, kProductRows);
    }
    order.rows = static_cast<unsigned>(divide_up(problem.m, Kernel::kRows * Kernel::kClusterRows));
    order.cols =
        static_cast<unsigned>(divide_up(problem.n, Kernel::kResultCols * Kernel::kClusterCols));
    order.tiles = order.rows * order.cols * static_cast<unsigned>(problem.batch);
    order.group = static_cast<unsigned>(config.group);
    order.steps = static_cast<int>(divide_up(problem.k, kStageDepth<T>));
    order.a_batch_stride = problem.share_a ? 0 : 1;
    order.b_batch_stride = problem.share_b ? 0 : 1;
  }
  launch_kernel<persistent_kernel<Kernel>>(queue, shape, a, b, result, plain, order,
                                           finish_of(problem, buffers), up);
}

template <class T, bool kDeepA, bool kDeepB, bool kFinishes = false, bool kGated = false>
void launch_layout(const Queue& queue, const Config& config, const Problem& problem,
                   const Buffers& buffers) {
  const int result_bytes = static_cast<int>(info(problem.result_dtype).bytes);
  const auto matches = [&](const TensorCoreTile& tile) {
    return tile.result_bytes == result_bytes && tile.rows == config.tile_rows &&
           tile.cols == config.tile_cols;
  };
  dispatch_instance<kTensorCoreTiles>(matches, [&](auto index) {
    constexpr const TensorCoreTile& kTile = kTensorCoreTiles[decltype(index)::value];
    constexpr auto kLeast = static_cast<int>(sizeof(T));
    if constexpr (kGated ? kTile.result_bytes == kLeast : kTile.result_bytes >= kLeast) {
      using Result = std::conditional_t<kTile.result_bytes == 4, float, T>;
      using Kernel = Persistent<T, Result, kDeepA, kDeepB, kTile.rows, kTile.cols, kTile.consumers,
                                kTile.stages, kTile.cluster_rows, /*kClusterCols=*/1, kTile.pending,
                                /*kLead=*/0, kTile.late_stores, kFinishes, kGated>;
      static_assert(Kernel::kThreads == kTile.threads());
      static_assert(kSharedBytes<PersistentStorage<Kernel>> == kTile.shared_bytes());
      launch_persistent<Kernel>(queue, config, problem, buffers);
    }
  });
}

}  // namespace

template <class T>
void launch_tensor_core(const Queue& queue, const Config& config, const Problem& problem,
                        const Buffers& buffers) {
  if (problem.k == 0) {
    const std::int64_t elements = problem.batch * problem.m * problem.n;
    return clear(queue, buffers.result, elements * info(problem.result_dtype).bytes);
  }
  if constexpr (sizeof(T) == 2) {
    if (problem.gated) {
      return launch_layout<T, true, false, true, true>(queue, config, problem, buffers);
    }
  }
  if (has_epilogue(problem)) {  // factors are as linear has them, or floats, which are deep
    return launch_layout<T, true, sizeof(T) == 4, true>(queue, config, problem, buffers);
  }
  dispatch_layouts<T>(problem, [&](auto deep_a, auto deep_b) {
    launch_layout<T, decltype(deep_a)::value, decltype(deep_b)::value>(queue, config, problem,
                                                                       buffers);
  });
}

template void launch_tensor_core<JAX_GPUOPS_ELEMENT>(const Queue&, const Config&, const Problem&,
                                                     const Buffers&);

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
