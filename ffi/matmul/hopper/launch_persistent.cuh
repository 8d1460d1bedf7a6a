// Launches the kernel of a tensor_core plan, for the sources that instantiate kernels.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "core/dispatch.h"
#include "core/integer.h"
#include "core/launch.h"
#include "matmul/hopper/factors.cuh"
#include "matmul/hopper/persistent.cuh"
#include "matmul/hopper/turned.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

// The sizes of the transposed product, result^T = b^T a^T, for order_of_tiles(): a group then has
// rows of tiles of the transposed result.
inline Problem transposed(Problem problem) {
  std::swap(problem.m, problem.n);
  std::swap(problem.share_a, problem.share_b);
  return problem;
}

// Launches the kernel for the tiles from `first` on.
template <class Kernel>
void launch_persistent(const Queue& queue, const Config& config, std::int64_t first,
                       const ReadFactors& factors, const Problem& problem, const Buffers& buffers) {
  using T = typename Kernel::Factor;
  LaunchShape shape = shape_behind_copies(config, config.cluster_rows);
  if (first > 0) shape.early = true;  // the previous kernel computes the other tiles
  using Result = typename Kernel::Result;
  FactorMaps a{}, b{};
  TensorMap result{};
  ResultArray<Result> array;
  TileOrder order{};
  UpFactor<Kernel::kGated> up{};
  if (!queue.preparing) {
    constexpr bool kTurned = Kernel::kTurned;
    a = maps_of_factor<T, Kernel::kDeepA>(kTurned ? factors.b : factors.a, Kernel::kRows);
    b = maps_of_factor<T, Kernel::kDeepB>(kTurned ? factors.a : factors.b,
                                          Kernel::kCols / Kernel::kClusterRows);
    if constexpr (Kernel::kGated) {
      const ReadFactor factor{buffers.up, factors.b.stored, factors.b.pitch};
      up.maps = maps_of_factor<T, Kernel::kDeepB>(factor, Kernel::kCols / 2);
    }
    order = order_of_tiles<Kernel>(kTurned ? transposed(problem) : problem, config, kStageDepth<T>);
    order.first = static_cast<unsigned>(first);
    if (config.tiles > 0) order.tiles = static_cast<unsigned>(config.tiles);
    const std::int64_t cols = config.splits > 1 ? partial_pitch(problem) : problem.n;
    if (config.writes_elements) {
      array = {static_cast<Result*>(buffers.result), static_cast<int>(problem.m),
               static_cast<int>(cols), rows_of_step<Kernel>(order.steps)};
    } else {
      array.streams = config.streams_result;
      result = map_of<Result>(kResultType<Result>, buffers.result, problem.batch * config.splits,
                              problem.m, cols, cols, Kernel::kPanelRows);
    }
  }
  typename Kernel::Epilogue epilogue{};
  if constexpr (Kernel::kScaling != Scaling::kNone) {
    epilogue = scales_of(problem, buffers);
  } else if constexpr (Kernel::kAdds) {
    epilogue = finish_and_add_of(problem, buffers);
  } else {
    epilogue = finish_of(problem, buffers);
  }
  launch_kernel<persistent_kernel<Kernel>>(queue, shape, a, b, result, array, order, epilogue, up);
}

template <class Kernel>
void launch_turned_floats(const Queue& queue, const Config& config, const Problem& problem,
                          const Buffers& buffers) {
  const LaunchShape shape = shape_behind_copies(config, Kernel::kBlocks);
  const ReadFactors factors = read_factors<float>(queue, config, problem, buffers);
  FactorMaps a{};
  TensorMap b{}, result{};
  TileOrder order{};
  if (!queue.preparing) {
    a = maps_of_factor<float, /*kDeep=*/true>(factors.a, Kernel::kRows / Kernel::kBlocks);
    b = maps_of_factor<float, /*kDeep=*/false>(factors.b, Kernel::kPanelCols).within;
    const std::int64_t cols = config.splits > 1 ? partial_pitch(problem) : problem.n;
    result = map_of<float>(kResultType<float>, buffers.result, problem.batch * config.splits,
                           problem.m, cols, cols, Kernel::kWrittenRows);
    order = order_of_tiles<Kernel>(problem, config, Kernel::kDepth);
  }
  launch_kernel<turned_kernel<Kernel>>(queue, shape, a, b, result, order,
                                       finish_and_add_of(problem, buffers));
}

template <bool kFinishes>
void launch_turned_float_tile(const Queue& queue, const Config& config, const Problem& problem,
                              const Buffers& buffers) {
  const auto matches = [&](const TensorCoreTile& tile) { return tile.rows == config.tile_rows; };
  dispatch_instance<kTurnedFloatTiles>(matches, [&](auto index) {
    constexpr const TensorCoreTile& kTile = kTurnedFloatTiles[decltype(index)::value];
    using Kernel = Turned<kTile.rows, kTile.stages, kTile.cluster_rows, kFinishes>;
    static_assert(Kernel::kCols == kTile.cols && Kernel::kThreads == kTile.threads());
    static_assert(kSharedBytes<PersistentStorage<Kernel>> == kTile.shared_bytes());
    launch_turned_floats<Kernel>(queue, config, problem, buffers);
  });
}

// Launches the kernel that computes the transposed product of a deep a, for factors of 16 bits.
template <class T, class Result, bool kDeepB, const auto& kTiles>
void launch_turned_tile(const Queue& queue, const Config& config, const Problem& problem,
                        const Buffers& buffers) {
  const ReadFactors factors = read_factors<T>(queue, config, problem, buffers);
  const auto matches = [&](const TensorCoreTile& tile) {
    return tile.rows == config.tile_rows && tile.cols == config.tile_cols;
  };
  dispatch_instance<kTiles>(matches, [&](auto index) {
    constexpr const TensorCoreTile& kTile = kTiles[decltype(index)::value];
    using Kernel =
        Persistent<T, Result, kDeepB, /*kDeepB=*/true, kTile.cols, kTile.rows, kTile.consumers,
                   kTile.stages, kTile.cluster_rows, kTile.pending, kTile.late_stores,
                   kTile.promotes, /*kFinishes=*/false, /*kGated=*/false, Scaling::kNone,
                   /*kAdds=*/false, /*kTurned=*/true>;
    static_assert(kTile.result_bytes == static_cast<int>(sizeof(Result)));
    static_assert(Kernel::kThreads == kTile.threads());
    static_assert(kSharedBytes<StorageOf<Kernel>> == kTile.shared_bytes());
    launch_persistent<Kernel>(queue, config, 0, factors, problem, buffers);
  });
}

template <class T, class Result, bool kDeepA, bool kDeepB, bool kFinishes, bool kGated,
          Scaling kScaling, const auto& kTiles, bool kAdds = false>
void launch_tile(const Queue& queue, const Config& config, const Problem& problem,
                 const Buffers& buffers) {
  const ReadFactors factors = read_factors<T>(queue, config, problem, buffers);
  const auto launch_tiles = [&](const Config& part, std::int64_t first) {
    const auto matches = [&](const TensorCoreTile& tile) {
      return tile.result_bytes == static_cast<int>(sizeof(Result)) && tile.rows == part.tile_rows &&
             tile.cols == part.tile_cols && tile.promotes == part.promotes &&
             tile.ping_pong == part.ping_pong;
    };
    dispatch_instance<kTiles>(matches, [&](auto index) {
      constexpr const TensorCoreTile& kTile = kTiles[decltype(index)::value];
      constexpr bool kExists = kTile.result_bytes == static_cast<int>(sizeof(Result)) &&
                               !(kTile.promotes && std::is_integral_v<T>) &&
                               !(kGated && !kTile.gates()) && !(kTile.ping_pong && !kDeepA) &&
                               !(kScaling == Scaling::kBlocks && !kTile.promotes);
      if constexpr (kExists) {
        using Kernel = Persistent<T, Result, kDeepA, kDeepB, kTile.rows, kTile.cols,
                                  kTile.consumers, kTile.stages, kTile.cluster_rows, kTile.pending,
                                  kTile.late_stores, kTile.promotes, kFinishes, kGated, kScaling,
                                  kAdds, /*kTurned=*/false, kTile.ping_pong>;
        static_assert(Kernel::kThreads == kTile.threads());
        static_assert(kSharedBytes<StorageOf<Kernel>> == kTile.shared_bytes());
        launch_persistent<Kernel>(queue, part, first, factors, problem, buffers);
      }
    });
  };
  launch_tiles(config, 0);
  if (config.tiles > 0) {
    const Tail tail = tail_of(problem, config);
    launch_tiles(tail.config, tail.first);
  }
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
