// Compiled for each architecture, of which some have clusters. Launches fma_skinny.
#include "core/dispatch.h"
#include "core/integer.h"
#include "core/launch.h"
#include "matmul/fma_skinny.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {
namespace {

Factor<float> factor_of(const void* data, const SkinnyFactor& factor, std::int64_t depth,
                        bool packed) {
  return make_factor<float>(data, factor.extent, depth, !factor.deep, factor.shared, packed);
}

}  // namespace

void launch_fma_skinny(const Queue& queue, const Config& config, const Problem& problem,
                       const Buffers& buffers) {
  const SkinnyFactors factors = skinny_factors(problem);
  const bool large_is_a = factors.large_is_a;
  const SkinnyConfig own = skinny_config(config, factors);
  const void* const large = large_is_a ? buffers.a : buffers.b;
  const void* const skinny = large_is_a ? buffers.b : buffers.a;
  const FmaSkinnyProduct product{make_gemm<float>(config, problem, buffers),
                                 factor_of(large, factors.large, problem.k, own.packs_large),
                                 factor_of(skinny, factors.skinny, problem.k, own.packs_skinny),
                                 large_is_a,
                                 Divisor(config.splits),
                                 Divisor(divide_up(factors.large.extent, own.rows))};
  const LaunchShape shape{dim3(static_cast<unsigned>(config.blocks)),
                          static_cast<unsigned>(config.threads),
                          static_cast<std::size_t>(config.shared_bytes), config.splits};
  const auto run = [&](auto deep, auto packed, auto tile_rows, auto tile_cols) {
    using Kernel = FmaSkinny<decltype(deep)::value, decltype(packed)::value,
                             decltype(tile_rows)::value, decltype(tile_cols)::value>;
    static_assert(sizeof(FmaSkinnyStorage<Kernel>) ==
                  fma_skinny_shared_bytes(Kernel::kRows, Kernel::kCols));
    launch_kernel<fma_skinny_kernel<Kernel>>(queue, shape, product);
  };
  dispatch_value<false, true>(factors.large.deep, [&](auto deep) {
    dispatch_power_of_two<4, kMostFmaSkinnyCols>(own.cols, [&](auto tile_cols) {
      dispatch_value<false, true>(own.packs_large, [&](auto packed) {
        constexpr int kMostRows = fma_skinny_most_rows(
            decltype(deep)::value, decltype(packed)::value, decltype(tile_cols)::value);
        dispatch_power_of_two<32, kMostRows>(
            own.rows, [&](auto tile_rows) { run(deep, packed, tile_rows, tile_cols); });
      });
    });
  });
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
