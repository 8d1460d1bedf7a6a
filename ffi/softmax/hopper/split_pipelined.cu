// Compiled for each of: __half __nv_bfloat16 float double
#include "softmax/hopper/split_pipelined.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

using T = JAX_GPUOPS_ELEMENT;

const RegisterLaunchers kLaunchers(kDTypeOf<T>, {
                                                    {Algorithm::kSplitPipelined,
                                                     launch_split_pipelined<ForwardFunctions, T>,
                                                     launch_split_pipelined<TangentFunctions, T>},
                                                });

}  // namespace
}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
