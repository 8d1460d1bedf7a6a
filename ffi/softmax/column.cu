#include "softmax/column.cuh"
#include "softmax/column_lines.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

template <class T>
RegisterLaunchers launchers() {
  return {kDTypeOf<T>,
          {
              {Algorithm::kColumn, launch_column<ForwardFunctions, T>,
               launch_column<TangentFunctions, T>},
              {Algorithm::kColumnTwoPass, launch_column_two_pass<ForwardFunctions, T>,
               launch_column_two_pass<TangentFunctions, T>},
              {Algorithm::kColumnSplit, launch_column_split<ForwardFunctions, T>,
               launch_column_split<TangentFunctions, T>},
          }};
}

const RegisterLaunchers kLaunchers[] = {launchers<__half>(), launchers<__nv_bfloat16>(),
                                        launchers<float>(), launchers<double>()};

}  // namespace
}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
