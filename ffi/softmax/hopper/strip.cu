#include "softmax/strip.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

template <class T>
RegisterLaunchers launchers() {
  return {
      kDTypeOf<T>,
      {
          {Algorithm::kStrip, launch_strip<ForwardFunctions, T>, launch_strip<TangentFunctions, T>},
      }};
}

const RegisterLaunchers kLaunchers[] = {launchers<__half>(), launchers<__nv_bfloat16>(),
                                        launchers<float>(), launchers<double>()};

}  // namespace
}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
