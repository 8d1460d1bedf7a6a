// Instantiates the functions that are linear in t.

#include "softmax/production.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

struct TangentFamily {
  static constexpr bool kTangent = true;
  template <class T, int kPacks, Kind kKind>
  using Share = Tangent<T, kPacks, kKind>;
};

}  // namespace

void launch_tangent(const Plan& plan, const Problem& problem, double scale, const Buffers& buffers,
                    const Queue& queue) {
  launch_production<TangentFamily>(plan, problem, scale, buffers, queue);
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
