// Instantiates the kernels of short columns, and launches them.

#include "reduce/short_column.cuh"
#include "reduce/whole_column.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

void launch_short_columns(const Queue& queue, const Plan& plan, const Problem& problem,
                          const Buffers& buffers) {
  const Call call{queue, plan.config, problem, buffers};
  dispatch_value<Function::kSum, Function::kMax, Function::kMin, Function::kArgMax,
                 Function::kArgMin>(problem.function, [&](auto function) {
    dispatch<__half, __nv_bfloat16, float>(problem.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      using Each = Instance<decltype(function)::value, T, Accumulator<T>>;
      if (plan.config.column_kernel == ColumnKernel::kWholeColumn) {
        launch_whole_column<Each>(call);
      } else {
        launch_short_column<Each>(call);
      }
    });
  });
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
