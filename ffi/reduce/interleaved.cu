// Compiled for each architecture, some of which start the next kernel early. Instantiates the
// kernels of interleaved rows, and launches them.

#include "reduce/interleaved.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

int resident_interleaved_blocks(const Problem& problem, int threads, std::int64_t shared_bytes,
                                int cluster, const Device& device) {
  int blocks = 0;
  dispatch_unmasked(problem, [&](auto instance) {
    using First = typename decltype(instance)::OfShortRows;
    blocks = resident_blocks(device, interleaved_kernel<First>, threads,
                             static_cast<std::size_t>(shared_bytes), cluster);
  });
  return blocks;
}

void launch_interleaved(const Queue& queue, const Plan& plan, const Problem& problem,
                        const Buffers& buffers) {
  const Call call{queue, plan.config, problem, buffers};
  dispatch_unmasked(problem, [&](auto instance) { launch_interleaved<decltype(instance)>(call); });
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
