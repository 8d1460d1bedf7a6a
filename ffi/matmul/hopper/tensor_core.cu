// Compiled for each of: __half+__nv_bfloat16 float+__nv_fp8_e4m3+__nv_fp8_e5m2+int8_t
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
    a = map_of_factor<T, Kernel::kDeepA>(factors.a, Kernel::kRows);
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
    order = order_of_tiles<Kernel>(problem, config, kStageDepth<T>);
  }
  launch_kernel<persistent_kernel<Kernel>>(queue, shape, a, b, result, plain, order,
                                           finish_of(problem, buffers), up);
}

// Calls function(Type<Result>{}) for the type of the result, of those that factors of T have.
template <class T, class Function>
void dispatch_result(DType result, Function&& function) {
  if constexpr (std::is_integral_v<T>) {
    dispatch<std::int32_t>(result, function);
  } else if constexpr (sizeof(T) == 1) {
    dispatch<__half, __nv_bfloat16, float>(result, function);
  } else if constexpr (sizeof(T) == 2) {
    dispatch<T, float>(result, function);
  } else {
    dispatch<float>(result, function);
  }
}

template <class T, class Result, bool kDeepA, bool kDeepB, bool kFinishes, bool kGated,
          const auto& kTiles>
void launch_tile(const Queue& queue, const Config& config, const Problem& problem,
                 const Buffers& buffers) {
  const auto matches = [&](const TensorCoreTile& tile) {
    return tile.result_bytes == static_cast<int>(sizeof(Result)) && tile.rows == config.tile_rows &&
           tile.cols == config.tile_cols && tile.promotes == config.promotes;
  };
  dispatch_instance<kTiles>(matches, [&](auto index) {
    constexpr const TensorCoreTile& kTile = kTiles[decltype(index)::value];
    constexpr bool kExists = kTile.result_bytes == static_cast<int>(sizeof(Result)) &&
                             !(kTile.promotes && std::is_integral_v<T>);
    if constexpr (kExists) {
      using Kernel = Persistent<T, Result, kDeepA, kDeepB, kTile.rows, kTile.cols, kTile.consumers,
                                kTile.stages, kTile.cluster_rows, kTile.pending, kTile.late_stores,
                                kTile.promotes, kFinishes, kGated>;
      static_assert(Kernel::kThreads == kTile.threads());
      static_assert(kSharedBytes<PersistentStorage<Kernel>> == kTile.shared_bytes());
      launch_persistent<Kernel>(queue, config, problem, buffers);
    }
  });
}

template <class T, bool kDeepA, bool kDeepB, bool kFinishes = false, bool kGated = false>
void launch_layout(const Queue& queue, const Config& config, const Problem& problem,
                   const Buffers& buffers) {
  const auto launch_result = [&](auto type) {
    using Result = typename decltype(type)::type;
    if constexpr (sizeof(T) == 1) {
      launch_tile<T, Result, kDeepA, kDeepB, kFinishes, kGated, kTensorCoreByteTiles>(
          queue, config, problem, buffers);
    } else {
      launch_tile<T, Result, kDeepA, kDeepB, kFinishes, kGated, kTensorCoreTiles>(queue, config,
                                                                                  problem, buffers);
    }
  };
  if constexpr (kGated) {
    dispatch<T>(problem.result_dtype, launch_result);
  } else {
    dispatch_result<T>(problem.result_dtype, launch_result);
  }
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
  if constexpr (sizeof(T) > 1) {
    if (has_epilogue(problem)) {  // factors are as linear has them, or floats, which are deep
      return launch_layout<T, true, sizeof(T) == 4, true>(queue, config, problem, buffers);
    }
  }
  dispatch_layouts<T>(problem, [&](auto deep_a, auto deep_b) {
    launch_layout<T, decltype(deep_a)::value, decltype(deep_b)::value>(queue, config, problem,
                                                                       buffers);
  });
}

#define JAX_GPUOPS_INSTANTIATE(T) \
  template void launch_tensor_core<T>(const Queue&, const Config&, const Problem&, const Buffers&);
JAX_GPUOPS_EACH_ELEMENT(JAX_GPUOPS_INSTANTIATE)
#undef JAX_GPUOPS_INSTANTIATE

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
