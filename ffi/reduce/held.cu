// Instantiates the kernels of rows that are held in registers, and launches them.

#include "reduce/held.cuh"
#include "reduce/held_moments.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

void launch_held(const Queue& queue, const Plan& plan, const Problem& problem,
                 const Buffers& buffers) {
  const Call call{queue, plan.config, problem, buffers};
  dispatch_unmasked(problem, [&](auto instance) {
    using Instance = decltype(instance);
    if constexpr (Instance::kFunction == Function::kMeanAndVar) {
      launch_held_moments<Instance>(call);
    } else {
      launch_held<Instance>(call);
    }
  });
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
