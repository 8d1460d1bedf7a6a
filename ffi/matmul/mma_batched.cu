// Compiled for each of: __half+__nv_bfloat16+float
#include "matmul/mma_batched.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

#define JAX_GPUOPS_INSTANTIATE(T) \
  template void launch_mma_batched<T>(const Queue&, const Config&, const Problem&, const Buffers&);
JAX_GPUOPS_EACH_ELEMENT(JAX_GPUOPS_INSTANTIATE)
#undef JAX_GPUOPS_INSTANTIATE

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
