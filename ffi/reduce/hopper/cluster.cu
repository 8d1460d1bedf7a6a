#include "reduce/hopper/cluster.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

void launch_clusters(const Queue& queue, const Plan& plan, const Problem& problem,
                     const Buffers& buffers) {
  const Call call{queue, plan.config, problem, buffers};
  dispatch_reduction(problem, [&](auto instance) { launch_cluster<decltype(instance)>(call); });
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
