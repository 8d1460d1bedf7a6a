// Compiled for each architecture, some of which start the next kernel early. Instantiates the
// kernels of rows whose elements lie apart, and launches them.

#include "reduce/column.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {
namespace {

// Calls f(kernel, shared_bytes) for the kernel of a problem.
template <class F>
void with_column_kernel(const Problem& problem, int pack, int lanes, int cluster, F&& f) {
  dispatch_reduction(problem, [&](auto instance) {
    using Instance = decltype(instance);
    using First = typename Instance::First;
    dispatch_value<1, kWidestPack<typename Instance::Element>>(pack, [&](auto packs) {
      constexpr int kPack = decltype(packs)::value;
      f(column_kernel<First, kPack, typename Instance::Masks>,
        column_bytes<First, kPack>(lanes, cluster));
    });
  });
}

}  // namespace

int resident_column_blocks(const Problem& problem, int pack, const Device& device) {
  Queue queue;
  queue.device = &device;
  int blocks = 0;
  with_column_kernel(problem, pack, 1, 1, [&](auto kernel, std::size_t shared_bytes) {
    blocks = resident_blocks(queue, kernel, kColumnThreads, shared_bytes);
  });
  return blocks;
}

int resident_column_clusters(const Problem& problem, int pack, int lanes, int cluster,
                             const Device& device) {
  Queue queue;
  queue.device = &device;
  int clusters = 0;
  with_column_kernel(problem, pack, lanes, cluster, [&](auto kernel, std::size_t shared_bytes) {
    clusters = resident_clusters(queue, kernel, kColumnThreads, shared_bytes, cluster);
  });
  return clusters;
}

void launch_columns(const Queue& queue, const Plan& plan, const Problem& problem,
                    const Buffers& buffers) {
  const Call call{queue, plan.config, problem, buffers};
  dispatch_reduction(problem, [&](auto instance) { launch_column<decltype(instance)>(call); });
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
