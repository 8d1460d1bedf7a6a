// Compiled for each architecture and each of: __half+__nv_bfloat16+float+double
#include "softmax/split_rows.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

#define JAX_GPUOPS_INSTANTIATE(T)                         \
  template void launch_split_reduce_held<T>(const Call&); \
  template void launch_split_combine<T>(const Call&);
JAX_GPUOPS_EACH_ELEMENT(JAX_GPUOPS_INSTANTIATE)
#undef JAX_GPUOPS_INSTANTIATE

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
