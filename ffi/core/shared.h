#pragma once
#include "core/cuda.h"
namespace JAX_GPUOPS_NAMESPACE {
template <class T> __device__ T* shared_array() { extern __shared__ __align__(128) unsigned char m[]; return reinterpret_cast<T*>(m); }
template <class T> __device__ T& shared() { return *shared_array<T>(); }
}
