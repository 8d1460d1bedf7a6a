#include "softmax/hopper/split_pipelined.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

template <class T>
RegisterLaunchers launchers() {
  return {kDTypeOf<T>,
          {
              {Algorithm::kSplitPipelined, launch_split_pipelined<ForwardFunctions, T>,
               launch_split_pipelined<TangentFunctions, T>},
          }};
}

const RegisterLaunchers kLaunchers[] = {launchers<__half>(), launchers<__nv_bfloat16>(),
                                        launchers<float>(), launchers<double>()};

}  // namespace
}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
