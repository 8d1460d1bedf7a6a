// What compute capability 9.0 has beyond 8.0, for the headers and kernels that use it. In code for
// older GPUs the functions of these headers do nothing; kernels check JAX_GPUOPS_HAS_CLUSTERS and
// do without, or trap.
#pragma once

#include "core/ptx/target.h"

#ifdef JAX_GPUOPS_ONE_PTX
#error "This source is compiled once for all architectures: CMakeLists.txt says how to change that"
#endif

// Thread block clusters and asynchronous copies.
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
