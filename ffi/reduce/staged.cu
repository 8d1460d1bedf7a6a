// Instantiates the kernels of short rows of any length, and launches them.

#include "reduce/staged.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

void launch_staged(const Queue& queue, const Plan& plan, const Problem& problem,
                   const Buffers& buffers) {
  const Call call{queue, plan.config, problem, buffers};
  dispatch_unmasked(problem, [&](auto instance) { launch_staged<decltype(instance)>(call); });
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
