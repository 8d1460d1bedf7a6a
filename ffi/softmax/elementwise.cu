#include "softmax/elementwise.cuh"
#include "softmax/flat.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

template <class T>
RegisterLaunchers elementwise_launchers() {
  return {kDTypeOf<T>,
          {
              {Algorithm::kElementwise, launch_elementwise<T>, nullptr},
              {Algorithm::kFlat, launch_flat<T>, nullptr},
          }};
}

const RegisterLaunchers kElementwiseLaunchers[] = {
    elementwise_launchers<__half>(), elementwise_launchers<__nv_bfloat16>(),
    elementwise_launchers<float>(), elementwise_launchers<double>()};

}  // namespace
}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
