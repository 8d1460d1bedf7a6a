// Compiled for each of: __half+__nv_bfloat16 float+double
#include "softmax/warp.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

template <class T>
RegisterLaunchers launchers() {
  return {kDTypeOf<T>,
          {
              {Algorithm::kWarp, nullptr, launch_warp<TangentFunctions, T>},
          }};
}

const RegisterLaunchers kLaunchers[] = {JAX_GPUOPS_ELEMENTS(launchers)};

}  // namespace
}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
