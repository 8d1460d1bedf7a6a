// Launches fma_batched.
#include "core/dispatch.h"
#include "core/launch.h"
#include "matmul/fma_batched.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

void launch_fma_batched(const Queue& queue, const Config& config, const Problem& problem,
                        const Buffers& buffers) {
  const FmaBatchedProduct product{make_gemm<float>(config, problem, buffers),
                                  number_tiles(config, problem)};
  const LaunchShape shape{grid_extent(config.blocks), static_cast<unsigned>(config.threads),
                          static_cast<std::size_t>(config.shared_bytes)};
  const auto matches = [&](const FmaBatchedTile& tile) { return tile.rows == config.tile_rows; };
  dispatch_value<false, true>(stored_a(problem).deep, [&](auto deep_a) {
    dispatch_value<false, true>(stored_b(problem).deep, [&](auto deep_b) {
      dispatch_value<16, 4>(config.vector_bytes, [&](auto vector_bytes) {
        dispatch_instance<kFmaBatchedTiles>(matches, [&](auto index) {
          using Kernel = FmaBatched<decltype(deep_a)::value, decltype(deep_b)::value,
                                    decltype(vector_bytes)::value, decltype(index)::value>;
          static_assert(sizeof(FmaBatchedStorage<Kernel>) == Kernel::kTable.shared_bytes());
          launch_kernel<fma_batched_kernel<Kernel>>(queue, shape, product);
        });
      });
    });
  });
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
