// Runs plans: launches the steps of the ladder, and calls the launchers of the other kernels.

#include <stdexcept>

#include "reduce/instance.cuh"
#include "reduce/ladder/01_naive.cuh"
#include "reduce/ladder/02_stride.cuh"
#include "reduce/ladder/03_sequential.cuh"
#include "reduce/ladder/04_first_add.cuh"
#include "reduce/ladder/05_unroll.cuh"
#include "reduce/reduce.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {
namespace {

template <class Reducer>
void launch_once(Algorithm algorithm, const Queue& queue, const typename Reducer::Element* x,
                 const Target& y, ContiguousRows rows) {
  switch (algorithm) {
    case Algorithm::kNaive:
      return launch_naive<Reducer>(queue, x, y, rows);
    case Algorithm::kStride:
      return launch_stride<Reducer>(queue, x, y, rows);
    case Algorithm::kSequential:
      return launch_sequential<Reducer>(queue, x, y, rows);
    case Algorithm::kFirstAdd:
      return launch_first_add<Reducer>(queue, x, y, rows);
    case Algorithm::kUnroll:
      return launch_unroll<Reducer>(queue, x, y, rows);
    default:
      throw std::logic_error("only the first steps of the ladder are launched again and again");
  }
}

// Launches a step repeatedly, each time on the partials of the previous launch in the workspace,
// until one element of each row is left.
template <Function kFunction, class T, class A>
void launch_ladder(Algorithm algorithm, const Call& call, const T* x, std::int64_t columns,
                   A* workspace) {
  using Step = Reducer<kFunction, T, A>;
  const ContiguousRows rows{call.problem.rows(), columns};
  const std::int64_t tiles = divide_up(columns, step_columns(algorithm));
  if (tiles == 1) return launch_once<Step>(algorithm, call.queue, x, call.result(), rows);
  launch_once<Step>(algorithm, call.queue, x, call.partials(workspace), rows);
  launch_ladder<kFunction, A, A>(algorithm, call, workspace, tiles, workspace + rows.count * tiles);
}

void launch_steps(const Queue& queue, const Plan& plan, const Problem& problem,
                  const Buffers& buffers) {
  const Call call{queue, plan.config, problem, buffers};
  dispatch_unmasked(problem, [&](auto instance) {
    using Instance = decltype(instance);
    if constexpr (is_value(Instance::kFunction)) {
      launch_ladder<Instance::kFunction, typename Instance::Element, typename Instance::Value>(
          plan.algorithm, call, Instance::elements(call), problem.columns,
          Instance::partials(call));
    }
  });
}

}  // namespace

void launch(const Queue& queue, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  switch (plan.algorithm) {
    case Algorithm::kMultiple:
      return launch_multiple(queue, plan, problem, buffers);
    case Algorithm::kRow:
      if (plan.config.lanes == 0) return launch_multiple(queue, plan, problem, buffers);
      return launch_rows(queue, plan, problem, buffers);
    case Algorithm::kHeld:
      return launch_held(queue, plan, problem, buffers);
    case Algorithm::kStaged:
      return launch_staged(queue, plan, problem, buffers);
    case Algorithm::kCluster:
      return launch_clusters(queue, plan, problem, buffers);
    case Algorithm::kColumn:
      launch_columns(queue, plan, problem, buffers);
      break;
    case Algorithm::kInterleaved:
      launch_interleaved(queue, plan, problem, buffers);
      break;
    default:
      return launch_steps(queue, plan, problem, buffers);
  }
  if (plan.config.last_threads > 0) launch_combine(queue, plan, problem, buffers);
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
