// Compiled for each of: __half __nv_bfloat16
// The kernels of tensor_core for products that they finish: with a bias, an activation, a gate or
// an addend. The factors are not transposed.
#include "core/dispatch.h"
#include "matmul/hopper/launch_persistent.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {
namespace {

template <class T, class Result, bool kGated, bool kAdds>
void launch_finishing(const Queue& queue, const Config& config, const Problem& problem,
                      const Buffers& buffers) {
  launch_tile<T, Result, /*kDeepA=*/true, /*kDeepB=*/false, /*kFinishes=*/true, kGated,
              Scaling::kNone, kTensorCoreTiles, kAdds>(queue, config, problem, buffers);
}

}  // namespace

template <class T>
void launch_tensor_core_layer(const Queue& queue, const Config& config, const Problem& problem,
                              const Buffers& buffers) {
  if (problem.gated || problem.has_c) {
    return dispatch<T>(problem.result_dtype, [&](auto) {
      if (problem.gated) {
        launch_finishing<T, T, /*kGated=*/true, /*kAdds=*/false>(queue, config, problem, buffers);
      } else {
        launch_finishing<T, T, /*kGated=*/false, /*kAdds=*/true>(queue, config, problem, buffers);
      }
    });
  }
  dispatch<T, float>(problem.result_dtype, [&](auto type) {
    launch_finishing<T, typename decltype(type)::type, /*kGated=*/false, /*kAdds=*/false>(
        queue, config, problem, buffers);
  });
}

#define JAX_GPUOPS_INSTANTIATE(T)                                                        \
  template void launch_tensor_core_layer<T>(const Queue&, const Config&, const Problem&, \
                                            const Buffers&);
JAX_GPUOPS_EACH_ELEMENT(JAX_GPUOPS_INSTANTIATE)
#undef JAX_GPUOPS_INSTANTIATE

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
