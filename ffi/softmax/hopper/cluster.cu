// Compiled for each of: __half __nv_bfloat16 float double
#include "softmax/cluster.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

using T = JAX_GPUOPS_ELEMENT;

const RegisterLaunchers kLaunchers(
    kDTypeOf<T>,
    {
        {Algorithm::kCluster, launch_cluster<ForwardFamily, T>, launch_cluster<TangentFamily, T>},
        {Algorithm::kClusterShared, launch_cluster_shared<ForwardFamily, T>,
         launch_cluster_shared<TangentFamily, T>},
    });

}  // namespace
}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
