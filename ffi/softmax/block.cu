// Compiled for each of: __half+__nv_bfloat16 float+double
#include "softmax/block.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

template <class T>
RegisterLaunchers launchers() {
  return {
      kDTypeOf<T>,
      {
          {Algorithm::kSmallBlock, launch_small_block<ForwardFunctions, T>,
           launch_small_block<TangentFunctions, T>},
          {Algorithm::kBlock, launch_block<ForwardFunctions, T>, launch_block<TangentFunctions, T>},
          {Algorithm::kBlockTwoPass, launch_block_two_pass<ForwardFunctions, T>,
           launch_block_two_pass<TangentFunctions, T>},
          {Algorithm::kStrided, launch_strided<ForwardFunctions, T>,
           launch_strided<TangentFunctions, T>},
      }};
}

const RegisterLaunchers kLaunchers[] = {JAX_GPUOPS_ELEMENTS(launchers)};

}  // namespace
}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
