// Instantiates the kernels of short rows, and launches them.

#include "reduce/row.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

void launch_rows(const Queue& queue, const Plan& plan, const Problem& problem,
                 const Buffers& buffers) {
  const Call call{queue, plan.config, problem, buffers};
  dispatch_reduction(problem, [&](auto instance) { launch_row<decltype(instance)>(call); });
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
