// Instantiates the gradients of logsumexp and cross entropy.

#include "softmax/elementwise.cuh"
#include "softmax/production.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

void launch_elementwise(const Plan& plan, const Problem& problem, double scale,
                        const Buffers& buffers, const Queue& queue) {
  dispatch<__half, __nv_bfloat16, float, double>(problem.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Launch<T> call{plan, problem, make_tensors<T>(problem, scale, buffers), buffers, queue};
    const int lanes = plan.shape.lanes;
    const std::int64_t steps = divide_up(most_packs(problem), lanes * kElementwisePacks);
    // Fewer than 2^31 in all, since each moves 512 bytes or more, and no memory has a TiB.
    const std::int64_t blocks = divide_up(call.rows(), kElementwiseThreads / lanes) * steps;
    for_kind_of_rows(call, [&](auto kind) {
      launch(queue, {grid_extent(blocks), kElementwiseThreads}, elementwise_kernel<T, kind>,
             call.tensors, lanes, Divisor(steps));
    });
  });
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
