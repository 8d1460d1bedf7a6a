// Compiled for each of: __half __nv_bfloat16 float double
#include "softmax/strip.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

using T = JAX_GPUOPS_ELEMENT;

const RegisterLaunchers kLaunchers(kDTypeOf<T>,
                                   {
                                       {Algorithm::kStrip, launch_strip<ForwardFunctions, T>,
                                        launch_strip<TangentFunctions, T>},
                                   });

}  // namespace
}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
