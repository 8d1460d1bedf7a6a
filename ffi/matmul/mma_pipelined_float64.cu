// Compiled for each architecture: products of doubles are larger from compute capability 9.0 on.
#include "matmul/mma_pipelined.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

template void launch_mma_pipelined<double>(const Queue&, const Config&, const Problem&,
                                           const Buffers&);

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
