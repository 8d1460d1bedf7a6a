// How a kernel starts: one spelling for the GPU and for the host executor.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include "core/cuda.h"
#include "core/errors.h"
#include "core/queue.h"

#ifdef JAX_GPUOPS_INTERPRET
#include <stdexcept>

#include "simt/simt.h"
#else
#include <map>
#include <mutex>
#include <tuple>
#endif

namespace JAX_GPUOPS_NAMESPACE {

struct LaunchShape {
  dim3 grid;
  dim3 block;
  std::size_t shared_bytes = 0;
  int cluster = 1;  // how many neighbouring blocks along x share their shared memory, up to 16
  bool together = false;  // all blocks run at the same time, so they may wait for each other
  bool early = false;     // may start while the kernel before runs, and waits for it by itself
};

// The grid's x extent for `items` blocks of work; kernels that may have more walk what is left in
// grid strides.
inline unsigned grid_extent(std::int64_t items) {
  return static_cast<unsigned>(
      std::min<std::int64_t>(items, std::numeric_limits<std::int32_t>::max()));
}

// The same for y and z, of which CUDA takes less.
inline unsigned grid_extent_beyond_x(std::int64_t items) {
  return static_cast<unsigned>(std::min(items, kMostBlocksBeyondX));
}

#ifndef JAX_GPUOPS_INTERPRET
// Loads the kernel onto the device and lifts its shared memory limit. The limit becomes the
// device's maximum rather than one launch's need: the kernel is shared by every program of the
// process, and a later, smaller need must not lower it.
template <class... Parameters>
void load_kernel(const Queue& queue, void (*kernel)(Parameters...)) {
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel");
  const int dynamic_bytes = static_cast<int>(queue.device->shared_bytes_per_block) -
                            static_cast<int>(attributes.sharedSizeBytes);
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic_bytes),
      "raising a kernel's shared memory limit");
  if (queue.device->runs_hopper_code()) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
               "allowing a kernel large clusters");
  }
}
#endif

template <class... Parameters, class... Arguments>
void launch(const Queue& queue, const LaunchShape& shape, void (*kernel)(Parameters...),
            Arguments&&... arguments) {
#ifdef JAX_GPUOPS_INTERPRET
  if (queue.preparing) return;
  if (shape.cluster > 1 || shape.together) {
    throw std::logic_error("the host executor runs one block after the other");
  }
  simt::launch(shape.grid, shape.block, shape.shared_bytes, [&] { kernel(arguments...); });
#else
  if (queue.preparing) {
    load_kernel(queue, kernel);
    return;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = queue.stream;
  cudaLaunchAttribute attributes[3] = {};
  config.attrs = attributes;
  if (shape.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  }
  if (shape.together) {
    cudaLaunchAttribute& cooperative = attributes[config.numAttrs++];
    cooperative.id = cudaLaunchAttributeCooperative;
    cooperative.val.cooperative = 1;
  }
  if (shape.early && queue.device->runs_hopper_code()) {
    cudaLaunchAttribute& early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  check_cuda(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...),
             "launching a kernel");
#endif
}

#ifndef JAX_GPUOPS_INTERPRET
// Sets memory to 0 before what is launched next.
inline void clear(const Queue& queue, void* memory, std::size_t bytes) {
  if (queue.preparing) return;
  check_cuda(cudaMemsetAsync(memory, 0, bytes, queue.stream), "clearing memory");
}
#endif

// How many blocks of this shape one multiprocessor holds at a time; at least 1.
template <class... Parameters>
int resident_blocks(const Queue& queue, void (*kernel)(Parameters...), int threads,
                    std::size_t shared_bytes) {
#ifdef JAX_GPUOPS_INTERPRET
  (void)kernel;
  const auto by_shared = queue.device->shared_bytes_per_block / (shared_bytes + 1024);
  return std::max(1, std::min<int>(queue.device->threads_per_multiprocessor / threads,
                                   static_cast<int>(by_shared)));
#else
  // The query takes microseconds and its result never changes, so it is cached.
  using Key = std::tuple<int, const void*, int, std::size_t>;
  static std::mutex mutex;
  static auto& answers = *new std::map<Key, int>;
  const Key key{queue.device->ordinal, reinterpret_cast<const void*>(kernel), threads,
                shared_bytes};
  std::lock_guard lock(mutex);
  const auto found = answers.find(key);
  if (found != answers.end()) return found->second;
  int blocks = 0;
  load_kernel(queue, kernel);
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes),
             "querying the occupancy of a kernel");
  return answers[key] = std::max(1, blocks);
#endif
}

}  // namespace JAX_GPUOPS_NAMESPACE
