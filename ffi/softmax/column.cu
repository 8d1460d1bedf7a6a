// Compiled for each of: __half __nv_bfloat16 float double
#include "softmax/column.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

using T = JAX_GPUOPS_ELEMENT;

const RegisterLaunchers kLaunchers(kDTypeOf<T>,
                                   {
                                       {Algorithm::kColumn, launch_column<ForwardFunctions, T>,
                                        launch_column<TangentFunctions, T>},
                                       {Algorithm::kColumnTwoPass,
                                        launch_column_two_pass<ForwardFunctions, T>,
                                        launch_column_two_pass<TangentFunctions, T>},
                                   });

}  // namespace
}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
