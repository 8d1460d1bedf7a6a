// Compiled for each of: __half+__nv_bfloat16 float+double
#include "softmax/cluster.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

template <class T>
RegisterLaunchers launchers() {
  return {kDTypeOf<T>,
          {
              {Algorithm::kCluster, launch_cluster<ForwardFunctions, T>,
               launch_cluster<TangentFunctions, T>},
              {Algorithm::kClusterShared, launch_cluster_shared<ForwardFunctions, T>,
               launch_cluster_shared<TangentFunctions, T>},
          }};
}

const RegisterLaunchers kLaunchers[] = {JAX_GPUOPS_ELEMENTS(launchers)};

}  // namespace
}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
