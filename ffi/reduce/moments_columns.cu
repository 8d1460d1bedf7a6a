// Compiled for each architecture, some of which start the next kernel early. Instantiates the
// kernels of mean and variance along an axis whose elements have a stride, in packs, and launches
// them.

#include <algorithm>

#include "reduce/moments_column.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

int resident_moments_blocks(const Problem& problem, const Config& config, const Device& device) {
  int blocks = 0;
  dispatch_float<Function::kMeanAndVar, NoMasks>(problem.dtype, [&](auto instance) {
    using Element = typename decltype(instance)::Element;
    using A = typename decltype(instance)::Value;
    const std::size_t bytes = MomentsMemory<A>::bytes(config.lanes, config.threads / config.lanes,
                                                      kWidestPack<Element>, config.cluster);
    blocks = resident_blocks(device, moments_column_kernel<Element>, config.threads, bytes,
                             config.cluster);
  });
  // Registers for one of the largest blocks: of the nominal device they are not known.
  const int room = device.multiprocessors * (kMostMomentsThreads / config.threads);
  return std::min(blocks, room / config.cluster * config.cluster);
}

void launch_moments_columns(const Queue& queue, const Plan& plan, const Problem& problem,
                            const Buffers& buffers) {
  const Call call{queue, plan.config, problem, buffers};
  dispatch_float<Function::kMeanAndVar, NoMasks>(
      problem.dtype, [&](auto instance) { launch_moments_column<decltype(instance)>(call); });
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
