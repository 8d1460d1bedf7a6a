// Launches fma_pipelined.
#include "core/dispatch.h"
#include "core/integer.h"
#include "core/launch.h"
#include "matmul/hopper/factors.cuh"
#include "matmul/hopper/fma_pipelined.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {
namespace {

// `box`: how many rows of a or columns of b a block copies at a time.
template <bool kDeep>
TensorMap map_of_floats(const void* data, const StoredFactor& stored, int box) {
  return map_of<float>(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, data, stored.batch, stored.rows,
                       stored.length, stored.length, kDeep ? box : kFloatsOfLine);
}

template <class Kernel>
void launch_kernel_of(const Queue& queue, const Config& config, const Problem& problem,
                      const Buffers& buffers) {
  TensorMap a{}, b{};
  FloatResult result{};
  TileOrder order{};
  if (!queue.preparing) {
    a = map_of_floats<Kernel::kDeepA>(buffers.a, stored_a(problem), Kernel::kRows);
    b = map_of_floats<Kernel::kDeepB>(buffers.b, stored_b(problem), Kernel::kCols);
    result = float_result(config, problem, buffers);
    order = order_of_tiles<Kernel>(problem, config, kFloatsOfLine);
  }
  const LaunchShape shape{dim3(static_cast<unsigned>(config.blocks)),
                          static_cast<unsigned>(config.threads),
                          static_cast<std::size_t>(config.shared_bytes)};
  launch_kernel<fma_pipelined_kernel<Kernel>>(queue, shape, a, b, result, order);
}

}  // namespace

void launch_fma_pipelined(const Queue& queue, const Config& config, const Problem& problem,
                          const Buffers& buffers) {
  const auto matches = [&](const FmaTile& tile) { return tile.cols == config.tile_cols; };
  dispatch_value<false, true>(stored_a(problem).deep, [&](auto deep_a) {
    dispatch_value<false, true>(stored_b(problem).deep, [&](auto deep_b) {
      dispatch_instance<kFmaTiles>(matches, [&](auto index) {
        constexpr const FmaTile& kTile = kFmaTiles[decltype(index)::value];
        using Kernel = FmaPipelined<decltype(deep_a)::value, decltype(deep_b)::value, kTile.cols,
                                    kTile.stages>;
        static_assert(Kernel::kThreads == kFmaThreads);
        static_assert(kSharedBytes<RingStorage<Kernel>> == kTile.shared_bytes());
        launch_kernel_of<Kernel>(queue, config, problem, buffers);
      });
    });
  });
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
