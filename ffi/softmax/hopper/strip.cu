#include "softmax/strip.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

template <class T>
RegisterLaunchers strip_launchers() {
  return {
      kDTypeOf<T>,
      {
          {Algorithm::kStrip, launch_strip<ForwardFunctions, T>, launch_strip<TangentFunctions, T>},
      }};
}

const RegisterLaunchers kStripLaunchers[] = {strip_launchers<__half>(),
                                             strip_launchers<__nv_bfloat16>(),
                                             strip_launchers<float>(), strip_launchers<double>()};

}  // namespace
}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
