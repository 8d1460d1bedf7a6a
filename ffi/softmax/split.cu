// Compiled for each of: __half __nv_bfloat16 float double
#include "softmax/split.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

using T = JAX_GPUOPS_ELEMENT;

const RegisterLaunchers kLaunchers(kDTypeOf<T>,
                                   {
                                       {Algorithm::kSplit, launch_split<ForwardFunctions, T>,
                                        launch_split<TangentFunctions, T>},
                                   });

}  // namespace
}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
