// Compiled for each of: __half __nv_bfloat16 float double
#include "softmax/block.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

using T = JAX_GPUOPS_ELEMENT;

const RegisterLaunchers kLaunchers(
    kDTypeOf<T>,
    {
        {Algorithm::kSmallBlock, launch_small_block<ForwardFamily, T>,
         launch_small_block<TangentFamily, T>},
        {Algorithm::kBlock, launch_block<ForwardFamily, T>, launch_block<TangentFamily, T>},
        {Algorithm::kBlockTwoPass, launch_block_two_pass<ForwardFamily, T>,
         launch_block_two_pass<TangentFamily, T>},
        {Algorithm::kStrided, launch_strided<ForwardFamily, T>, launch_strided<TangentFamily, T>},
    });

}  // namespace
}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
