// Compiled for each architecture, of which some have clusters. Launches fma_sliced.
#include "core/dispatch.h"
#include "core/launch.h"
#include "matmul/fma_sliced.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

void launch_fma_sliced(const Queue& queue, const Config& config, const Problem& problem,
                       const Buffers& buffers) {
  const SlicedProduct product{make_gemm<float>(config, problem, buffers), Divisor(config.splits),
                              number_tiles(config, problem)};
  const LaunchShape shape{dim3(static_cast<unsigned>(config.blocks)),
                          static_cast<unsigned>(config.threads),
                          static_cast<std::size_t>(config.shared_bytes), config.splits};
  const auto matches = [&](const SlicedTile& tile) { return tile.rows == config.tile_rows; };
  const auto run = [&](auto deep_a, auto deep_b, auto vector_bytes, auto index) {
    using Kernel = FmaSliced<decltype(deep_a)::value, decltype(deep_b)::value,
                             decltype(vector_bytes)::value, decltype(index)::value>;
    static_assert(sizeof(SlicedStorage<Kernel>) == Kernel::kTable.shared_bytes());
    launch_kernel<fma_sliced_kernel<Kernel>>(queue, shape, product);
  };
  dispatch_value<false, true>(stored_a(problem).deep, [&](auto deep_a) {
    dispatch_value<false, true>(stored_b(problem).deep, [&](auto deep_b) {
      dispatch_instance<kSlicedTiles>(matches, [&](auto index) {
        constexpr bool kTakesElements = kSlicedTiles[decltype(index)::value].takes_elements;
        dispatch_value<16, 4>(config.vector_bytes, [&](auto vector_bytes) {
          if constexpr (decltype(vector_bytes)::value == 16 || kTakesElements) {
            run(deep_a, deep_b, vector_bytes, index);
          }
        });
      });
    });
  });
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
