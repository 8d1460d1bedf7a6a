// Instantiates the kernels of rows that take a block or more, and launches them.

#include "reduce/ladder/06_multiple.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

int resident_multiple_blocks(const Problem& problem, const Device& device) {
  int blocks = 0;
  dispatch_reduction(problem, [&](auto instance) {
    using Instance = decltype(instance);
    using First = typename Instance::First;
    blocks = resident_blocks(device, multiple_kernel<First, typename Instance::Masks>,
                             kMultipleThreads, sizeof(BlockStorage<First>));
  });
  return blocks;
}

void launch_multiple(const Queue& queue, const Plan& plan, const Problem& problem,
                     const Buffers& buffers) {
  const Call call{queue, plan.config, problem, buffers};
  dispatch_reduction(problem, [&](auto instance) { launch_multiple<decltype(instance)>(call); });
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
