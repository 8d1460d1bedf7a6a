// Compiled for each architecture, some of which start the kernels early. Instantiates what combines
// the parts of rows, and launches it.

#include "reduce/combine.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

void launch_combine(const Queue& queue, const Plan& plan, const Problem& problem,
                    const Buffers& buffers) {
  const Call call{queue, plan.config, problem, buffers};
  dispatch_unmasked(problem, [&](auto instance) { launch_combine<decltype(instance)>(call); });
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
