#include "softmax/split.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

template <class T>
RegisterLaunchers launchers() {
  return {
      kDTypeOf<T>,
      {
          {Algorithm::kSplit, launch_split<ForwardFunctions, T>, launch_split<TangentFunctions, T>},
      }};
}

const RegisterLaunchers kLaunchers[] = {launchers<__half>(), launchers<__nv_bfloat16>(),
                                        launchers<float>(), launchers<double>()};

}  // namespace
}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
