// Compiled for each architecture, some of which start the next kernel early. Instantiates the
// kernels of rows whose elements have a stride, and launches them.

#include "reduce/column.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

int resident_column_blocks(const Problem& problem, int pack, int lanes, int cluster,
                           const Device& device) {
  int blocks = 0;
  dispatch_reduction(problem, [&](auto instance) {
    using Instance = decltype(instance);
    using First = typename Instance::OfShortRows;
    dispatch_value<1, kColumnPack<Instance>>(pack, [&](auto packs) {
      constexpr int kPack = decltype(packs)::value;
      blocks = resident_blocks(device, column_kernel<First, kPack, typename Instance::Masks>,
                               kColumnThreads, column_bytes<First, kPack>(lanes, cluster), cluster);
    });
  });
  return blocks;
}

void launch_columns(const Queue& queue, const Plan& plan, const Problem& problem,
                    const Buffers& buffers) {
  switch (plan.config.column_kernel) {
    case ColumnKernel::kShortColumn:
    case ColumnKernel::kWholeColumn:
      return launch_short_columns(queue, plan, problem, buffers);
    case ColumnKernel::kMomentsColumn:
      return launch_moments_columns(queue, plan, problem, buffers);
    case ColumnKernel::kColumn:
      break;
  }
  const Call call{queue, plan.config, problem, buffers};
  dispatch_reduction(problem, [&](auto instance) { launch_column<decltype(instance)>(call); });
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
