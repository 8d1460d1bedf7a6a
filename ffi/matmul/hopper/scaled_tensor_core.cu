// Compiled for each of: __nv_fp8_e4m3+__nv_fp8_e5m2+int8_t
#include "core/dispatch.h"
#include "matmul/hopper/launch_persistent.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {
namespace {

// Calls function(Type<Result>{}) for the type of the result, one of those for scaled factors of T.
template <class T, Scaling kScaling, class Function>
void dispatch_scaled_result(DType result, Function&& function) {
  if constexpr (std::is_integral_v<T> && kScaling == Scaling::kOuter) {
    dispatch<__half, __nv_bfloat16, float, std::int8_t>(result, function);
  } else {
    dispatch<__half, __nv_bfloat16, float>(result, function);
  }
}

template <class T, Scaling kScaling>
void launch_scaling(const Queue& queue, const Config& config, const Problem& problem,
                    const Buffers& buffers) {
  dispatch_scaled_result<T, kScaling>(problem.result_dtype, [&](auto type) {
    launch_tile<T, typename decltype(type)::type, /*kDeepA=*/true, /*kDeepB=*/true,
                /*kFinishes=*/false, /*kGated=*/false, kScaling, kTensorCoreByteTiles>(
        queue, config, problem, buffers);
  });
}

}  // namespace

template <class T>
void launch_scaled_tensor_core(const Queue& queue, const Config& config, const Problem& problem,
                               const Buffers& buffers) {
  if (problem.k == 0) return clear_result(queue, problem, buffers);
  if constexpr (!std::is_integral_v<T>) {
    if (scales_blocks(problem)) {
      return launch_scaling<T, Scaling::kBlocks>(queue, config, problem, buffers);
    }
  }
  launch_scaling<T, Scaling::kOuter>(queue, config, problem, buffers);
}

#define JAX_GPUOPS_INSTANTIATE(T)                                                         \
  template void launch_scaled_tensor_core<T>(const Queue&, const Config&, const Problem&, \
                                             const Buffers&);
JAX_GPUOPS_EACH_ELEMENT(JAX_GPUOPS_INSTANTIATE)
#undef JAX_GPUOPS_INSTANTIATE

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
