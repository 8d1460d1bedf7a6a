// What the code that is being compiled runs on, for the headers of this folder.
//
// Each function of theirs stands there with its PTX and, beside it, with what the host executor
// runs instead. What needs compute capability 9.0 does nothing in code for older GPUs, where
// kernels ask JAX_GPUOPS_HAS_CLUSTERS and have another way, or trap.
#pragma once

#include "core/cuda.h"

// Thread-block clusters, and copies that run beside the threads.
#if defined(JAX_GPUOPS_INTERPRET) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900)
#define JAX_GPUOPS_HAS_CLUSTERS 1
#else
#define JAX_GPUOPS_HAS_CLUSTERS 0
#endif
// PTX of compute capability 9.0.
#if JAX_GPUOPS_HAS_CLUSTERS && !defined(JAX_GPUOPS_INTERPRET)
#define JAX_GPUOPS_HOPPER_PTX 1
#else
#define JAX_GPUOPS_HOPPER_PTX 0
#endif
// Hopper's own instructions, which no later GPU has: compiled for sm_90a alone.
#if defined(JAX_GPUOPS_INTERPRET) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define JAX_GPUOPS_HAS_WGMMA 1
#else
#define JAX_GPUOPS_HAS_WGMMA 0
#endif

namespace JAX_GPUOPS_NAMESPACE {

#ifdef JAX_GPUOPS_INTERPRET
using Site = simt::Site;
#else
// Where in the source a function was called: the executor names it in errors, a GPU does not.
struct Site {
  __host__ __device__ static constexpr Site here() { return {}; }
};
#endif

}  // namespace JAX_GPUOPS_NAMESPACE
