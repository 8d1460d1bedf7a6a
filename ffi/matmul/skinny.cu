// Compiled for each of: __half+__nv_bfloat16
#include "core/dispatch.h"
#include "core/integer.h"
#include "core/launch.h"
#include "matmul/matmul.h"
#include "matmul/skinny.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {
namespace {

template <class T>
SkinnyOperand<T> make_operand(const void* data, const SkinnyFactor& factor, std::int64_t depth) {
  return {static_cast<const T*>(data), factor.shared ? 0 : factor.extent * depth, factor.deep,
          factor.deep ? depth : factor.extent, static_cast<int>(factor.extent)};
}

// The large factor's rows are rows of the m x n result if that factor is a, else columns.
template <class T>
SkinnyProduct<T> make_product(const Problem& problem, const Buffers& buffers, int rows) {
  const SkinnyFactors factors = skinny_factors(problem);
  const bool large_is_a = factors.large_is_a;
  return {make_operand<T>(large_is_a ? buffers.a : buffers.b, factors.large, problem.k),
          make_operand<T>(large_is_a ? buffers.b : buffers.a, factors.skinny, problem.k),
          {buffers.result, problem.m * problem.n, large_is_a ? problem.n : 1,
           large_is_a ? 1 : problem.n, problem.result_dtype == DType::kFloat32, large_is_a,
           has_epilogue(problem), finish_of(problem, buffers)},
          static_cast<int>(problem.k),
          Divisor(divide_up(factors.large.extent, rows))};
}

template <class Kernel>
void launch_tile(const Queue& queue, const Config& config, const Problem& problem,
                 const Buffers& buffers) {
  using T = typename Kernel::Factor;
  static_assert(sizeof(SkinnyStorage<Kernel>) ==
                skinny_shared_bytes(Kernel::kRows, Kernel::kCols, Kernel::kCopies));
  const std::int64_t cols = divide_up(skinny_factors(problem).skinny.extent, Kernel::kCols);
  const LaunchShape shape{
      dim3(static_cast<unsigned>(config.blocks / cols), static_cast<unsigned>(cols)),
      static_cast<unsigned>(config.threads), static_cast<std::size_t>(config.shared_bytes)};
  launch_kernel<skinny_kernel<Kernel>>(queue, shape,
                                       make_product<T>(problem, buffers, Kernel::kRows));
}

}  // namespace

template <class T>
void launch_skinny(const Queue& queue, const Config& config, const Problem& problem,
                   const Buffers& buffers) {
  const SkinnyFactors factors = skinny_factors(problem);
  const SkinnyConfig own = skinny_config(config, factors);
  dispatch_value<false, true>(factors.large.deep, [&](auto is_deep) {
    constexpr bool kDeep = decltype(is_deep)::value;
    const auto run = [&](auto packed, auto reads, auto tile_rows, auto tile_cols) {
      launch_tile<Skinny<T, kDeep, decltype(packed)::value, decltype(reads)::value,
                         decltype(tile_rows)::value, decltype(tile_cols)::value>>(queue, config,
                                                                                  problem, buffers);
    };
    if (!own.packs_large) {
      run(Constant<false>{}, Constant<SkinnyReads::kElements>{},
          Constant<kSkinnyUnpackedTile.rows>{}, Constant<kSkinnyUnpackedTile.cols>{});
      return;
    }
    dispatch_power_of_two<16, 64>(own.rows, [&](auto tile_rows) {
      const Constant<true> packed;
      if (own.packs_skinny && factors.skinny.deep) {
        dispatch_power_of_two<8, 16>(own.cols, [&](auto tile_cols) {
          run(packed, Constant<SkinnyReads::kDepths>{}, tile_rows, tile_cols);
        });
      } else if (own.packs_skinny) {
        run(packed, Constant<SkinnyReads::kColumns>{}, tile_rows, Constant<16>{});
      } else {
        run(packed, Constant<SkinnyReads::kElements>{}, tile_rows, Constant<16>{});
      }
    });
  });
}

#define JAX_GPUOPS_INSTANTIATE(T) \
  template void launch_skinny<T>(const Queue&, const Config&, const Problem&, const Buffers&);
JAX_GPUOPS_EACH_ELEMENT(JAX_GPUOPS_INSTANTIATE)
#undef JAX_GPUOPS_INSTANTIATE

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
