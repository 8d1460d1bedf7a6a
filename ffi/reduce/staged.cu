// Instantiates the kernels of short rows of any length, and launches them.

#include "reduce/staged.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

int resident_staged_blocks(const Problem& problem, int threads, std::int64_t shared_bytes,
                           const Device& device) {
  int blocks = 0;
  dispatch_unmasked(problem, [&](auto instance) {
    using First = typename decltype(instance)::First;
    blocks = resident_blocks(device, staged_kernel<First>, threads,
                             static_cast<std::size_t>(shared_bytes));
  });
  return blocks;
}

void launch_staged(const Queue& queue, const Plan& plan, const Problem& problem,
                   const Buffers& buffers) {
  const Call call{queue, plan.config, problem, buffers};
  dispatch_unmasked(problem, [&](auto instance) { launch_staged<decltype(instance)>(call); });
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
