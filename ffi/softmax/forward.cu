// Instantiates the forward functions: softmax, log_softmax, logsumexp, cross entropy.

#include "softmax/production.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

struct ForwardFamily {
  static constexpr bool kTangent = false;
  template <class T, int kPacks, Kind kKind>
  using Share = Forward<T, kPacks, kKind>;
};

}  // namespace

void launch_forward(const Plan& plan, const Problem& problem, double scale, const Buffers& buffers,
                    const Queue& queue) {
  launch_production<ForwardFamily>(plan, problem, scale, buffers, queue);
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
