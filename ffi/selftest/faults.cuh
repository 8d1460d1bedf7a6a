// Kernels with one planted fault each, and one without, that tests of the host executor,
// AddressSanitizer and compute-sanitizer run.
//
// All take `size` elements and are launched with blocks of kFaultThreads threads, one thread per
// element, and shared memory of sizeof(FaultStorage<T>).
#pragma once

#include "core/cuda.h"
#include "core/shared.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace selftest {

inline constexpr int kFaultThreads = 64;

template <class T>
struct FaultStorage {
  T tile[kFaultThreads];
};

__device__ inline int global_thread() { return blockIdx.x * blockDim.x + threadIdx.x; }

// Correct: y is x reversed. A shuffle reverses each warp, shared memory the warps of a tile, and
// the addresses the tiles.
template <class T>
__global__ void __launch_bounds__(kFaultThreads) reverse(const T* x, T* y, int size) {
  auto& storage = shared<FaultStorage<T>>();
  const int thread = threadIdx.x;
  const int lane = thread % warpSize;
  const int warp = thread / warpSize;
  const int warps = kFaultThreads / warpSize;

  const int from = global_thread();
  const T value = from < size ? x[from] : T(0);
  storage.tile[(warps - 1 - warp) * warpSize + lane] =
      __shfl_sync(0xffffffff, value, warpSize - 1 - lane);
  __syncthreads();
  const int to = size - static_cast<int>(blockIdx.x + 1) * kFaultThreads + thread;
  if (to >= 0) y[to] = storage.tile[thread];
}

// Each element takes its left neighbour's value, if it has one in its block. Without a barrier the
// result is right only if threads run in ascending order.
template <class T>
__global__ void __launch_bounds__(kFaultThreads) missing_barrier(const T* x, T* y, int size) {
  auto& storage = shared<FaultStorage<T>>();
  const int thread = threadIdx.x;
  const int i = global_thread();
  storage.tile[thread] = i < size ? x[i] : T(0);
  if (i < size) y[i] = storage.tile[thread == 0 ? 0 : thread - 1];
}

// The two halves of the block wait at different barriers.
template <class T>
__global__ void __launch_bounds__(kFaultThreads) divergent_barrier(const T* x, T* y, int size) {
  auto& storage = shared<FaultStorage<T>>();
  const int thread = threadIdx.x;
  const int i = global_thread();
  storage.tile[thread] = i < size ? x[i] : T(0);
  if (thread < kFaultThreads / 2) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  if (i < size) y[i] = storage.tile[kFaultThreads - 1 - thread];
}

// The last thread also writes the element beyond its own.
template <class T>
__global__ void __launch_bounds__(kFaultThreads) global_out_of_bounds(const T* x, T* y, int size) {
  const int i = global_thread();
  if (i < size) y[i] = x[i];
  if (i == size - 1) y[size] = x[i];
}

// The last thread writes beyond the tile.
template <class T>
__global__ void __launch_bounds__(kFaultThreads) shared_out_of_bounds(const T* x, T* y, int size) {
  T* const tile = shared_array<T>();
  const int thread = threadIdx.x;
  const int i = global_thread();
  tile[thread + 1] = i < size ? x[i] : T(0);
  __syncthreads();
  if (i < size) y[i] = tile[thread];
}

// Threads beyond the end have exited when the last warp shuffles with a full mask; right if the
// size is a multiple of 32.
template <class T>
__global__ void __launch_bounds__(kFaultThreads) absent_lanes(const T* x, T* y, int size) {
  const int i = global_thread();
  if (i >= size) return;
  y[i] = __shfl_xor_sync(0xffffffff, x[i], 1);
}

// The last thread reads an element that no thread has written.
template <class T>
__global__ void __launch_bounds__(kFaultThreads) unwritten_shared(const T* x, T* y, int size) {
  auto& storage = shared<FaultStorage<T>>();
  const int thread = threadIdx.x;
  const int i = global_thread();
  if (thread < kFaultThreads - 1) storage.tile[thread] = i < size ? x[i] : T(0);
  __syncthreads();
  if (i < size) y[i] = storage.tile[thread];
}

}  // namespace selftest
}  // namespace JAX_GPUOPS_NAMESPACE
