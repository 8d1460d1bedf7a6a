// Instantiates the kernels for rows whose elements are neighbours, and launches them.

#include "reduce/instance.cuh"
#include "reduce/ladder/06_multiple.cuh"
#include "reduce/reduce.h"
#include "reduce/row.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

int resident_multiple_blocks(const Problem& problem, const Device& device) {
  Queue queue;
  queue.device = &device;
  int blocks = 0;
  dispatch_reduction(problem, [&](auto instance) {
    using Instance = decltype(instance);
    using First = typename Instance::First;
    blocks = resident_blocks(queue, multiple_kernel<First, typename Instance::Masks>,
                             kMultipleThreads, sizeof(MultipleStorage<First>));
  });
  return blocks;
}

void launch_rows(const Queue& queue, const Plan& plan, const Problem& problem,
                 const Buffers& buffers) {
  const Call call{queue, plan.config, problem, buffers};
  dispatch_reduction(problem, [&](auto instance) {
    using Instance = decltype(instance);
    if (plan.algorithm == Algorithm::kRow) {
      launch_row<Instance>(call);
    } else {
      launch_multiple<Instance>(call);
    }
  });
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
