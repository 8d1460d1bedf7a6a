#include "softmax/ladder/01_baseline.cuh"
#include "softmax/ladder/02_one_warp_rows.cuh"
#include "softmax/ladder/03_block.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

template <class T>
RegisterLaunchers launchers() {
  return {kDTypeOf<T>,
          {
              {Algorithm::kBaseline, launch_baseline<T>, nullptr},
              {Algorithm::kOneWarpOneRow, launch_one_warp<T>, nullptr},
              {Algorithm::kOneWarpTwoRows, launch_one_warp<T>, nullptr},
              {Algorithm::kOneWarpFourRows, launch_one_warp<T>, nullptr},
              {Algorithm::kOneWarpOneRowFloat4, launch_one_warp<T>, nullptr},
              {Algorithm::kOneWarpTwoRowsFloat4, launch_one_warp<T>, nullptr},
              {Algorithm::kOneWarpFourRowsFloat4, launch_one_warp<T>, nullptr},
              {Algorithm::kBlockShared, launch_block_shared<T>, nullptr},
              {Algorithm::kBlockUncached, launch_block_uncached<T>, nullptr},
          }};
}

const RegisterLaunchers kLaunchers[] = {launchers<__half>(), launchers<__nv_bfloat16>(),
                                        launchers<float>(), launchers<double>()};

}  // namespace
}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
