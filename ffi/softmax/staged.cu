// Compiled for each of: __half __nv_bfloat16 float double
#include "softmax/staged.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

using T = JAX_GPUOPS_ELEMENT;

const RegisterLaunchers kLaunchers(kDTypeOf<T>,
                                   {
                                       {Algorithm::kStaged, launch_staged<ForwardFunctions, T>,
                                        launch_staged<TangentFunctions, T>},
                                   });

}  // namespace
}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
