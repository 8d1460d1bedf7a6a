// Compiled for each of: __half+__nv_bfloat16+float
#include <type_traits>

#include "core/dispatch.h"
#include "matmul/hopper/split_k_reduce.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

template <class T>
void launch_parallel_split_k(const Queue& queue, const Config& config, const Problem& problem,
                             const Buffers& buffers) {
  // The copies of factors lie before the partial sums.
  auto* const partials = static_cast<float*>(
      static_cast<void*>(static_cast<unsigned char*>(buffers.workspace) + config.workspace_bytes -
                         config.splits * partial_bytes(problem)));
  Problem split = problem;
  split.result_dtype = DType::kFloat32;
  split.has_bias = false;
  split.epilogue = EpilogueOp::kNone;
  Buffers to_partials = buffers;
  to_partials.result = partials;
  to_partials.bias = nullptr;
  launch_tensor_core<T>(queue, config, split, to_partials);
  const auto reduce = [&](auto type) {
    launch_split_k_reduce<typename decltype(type)::type>(queue, config.splits, problem, partials,
                                                         buffers);
  };
  if constexpr (std::is_same_v<T, float>) {
    dispatch<float>(problem.result_dtype, reduce);
  } else {
    dispatch<T, float>(problem.result_dtype, reduce);
  }
}

#define JAX_GPUOPS_INSTANTIATE(T)                                                       \
  template void launch_parallel_split_k<T>(const Queue&, const Config&, const Problem&, \
                                           const Buffers&);
JAX_GPUOPS_EACH_ELEMENT(JAX_GPUOPS_INSTANTIATE)
#undef JAX_GPUOPS_INSTANTIATE

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
