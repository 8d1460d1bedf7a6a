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

const RegisterLaunchers kLaunchers[] = {launchers<__half>(), launchers<__nv_bfloat16>(),
                                        launchers<float>(), launchers<double>()};

}  // namespace
}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
