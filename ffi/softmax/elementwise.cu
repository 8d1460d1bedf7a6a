// Compiled for each of: __half __nv_bfloat16 float double
#include "softmax/elementwise.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

using T = JAX_GPUOPS_ELEMENT;

const RegisterLaunchers kLaunchers(kDTypeOf<T>,
                                   {
                                       {Algorithm::kElementwise, launch_elementwise<T>, nullptr},
                                   });

}  // namespace
}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
