// Compiled for each of: __half __nv_bfloat16 float double
#include "softmax/column.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

using T = JAX_GPUOPS_ELEMENT;

const RegisterLaunchers kLaunchers(
    kDTypeOf<T>,
    {
        {Algorithm::kColumn, launch_column<ForwardFamily, T>, launch_column<TangentFamily, T>},
        {Algorithm::kColumnTwoPass, launch_column_two_pass<ForwardFamily, T>,
         launch_column_two_pass<TangentFamily, T>},
    });

}  // namespace
}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
