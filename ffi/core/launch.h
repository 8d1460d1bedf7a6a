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
};

// The grid's x extent for `items` blocks of work; kernels walk what is left in grid strides.
inline unsigned grid_extent(std::int64_t items) {
  return static_cast<unsigned>(
      std::min<std::int64_t>(items, std::numeric_limits<std::int32_t>::max()));
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
  if (queue.device->compute_capability >= 90) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
               "allowing a kernel large clusters");
  }
}

// What CUDA wants to know of a launch; it points into itself.
class LaunchConfig {
 public:
  LaunchConfig(const Queue& queue, const LaunchShape& shape) {
    config_.gridDim = shape.grid;
    config_.blockDim = shape.block;
    config_.dynamicSmemBytes = shape.shared_bytes;
    config_.stream = queue.stream;
    if (shape.cluster == 1) return;
    cluster_.id = cudaLaunchAttributeClusterDimension;
    cluster_.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
    config_.attrs = &cluster_;
    config_.numAttrs = 1;
  }
  LaunchConfig(const LaunchConfig&) = delete;
  LaunchConfig& operator=(const LaunchConfig&) = delete;

  const cudaLaunchConfig_t& get() const { return config_; }

 private:
  cudaLaunchConfig_t config_{};
  cudaLaunchAttribute cluster_{};
};
#endif

template <class... Parameters, class... Arguments>
void launch(const Queue& queue, const LaunchShape& shape, void (*kernel)(Parameters...),
            Arguments&&... arguments) {
#ifdef JAX_GPUOPS_INTERPRET
  if (queue.preparing) return;
  if (shape.cluster > 1) throw std::logic_error("the host executor has no clusters");
  simt::launch(shape.grid, shape.block, shape.shared_bytes, [&] { kernel(arguments...); });
#else
  if (queue.preparing) {
    load_kernel(queue, kernel);
    return;
  }
  const LaunchConfig config(queue, shape);
  check_cuda(cudaLaunchKernelEx(&config.get(), kernel, std::forward<Arguments>(arguments)...),
             "launching a kernel");
#endif
}

// How many clusters of this shape (blocks, where a cluster is one block) the GPU holds at a time;
// at least 1.
template <class... Parameters>
int resident_clusters(const Queue& queue, void (*kernel)(Parameters...), const LaunchShape& shape) {
  const int multiprocessors = queue.device->multiprocessors;
#ifdef JAX_GPUOPS_INTERPRET
  (void)kernel;
  const auto by_shared = queue.device->shared_bytes_per_block / (shape.shared_bytes + 1024);
  const auto by_threads = queue.device->threads_per_multiprocessor / shape.block.x;
  return multiprocessors *
         std::max(1, static_cast<int>(std::min<std::size_t>(by_threads, by_shared)));
#else
  // The query takes microseconds and its answer never changes, so each is asked once.
  using Key = std::tuple<int, const void*, unsigned, std::size_t, int>;
  static std::mutex mutex;
  static auto& answers = *new std::map<Key, int>;
  const Key key{queue.device->ordinal, reinterpret_cast<const void*>(kernel), shape.block.x,
                shape.shared_bytes, shape.cluster};
  std::lock_guard lock(mutex);
  const auto found = answers.find(key);
  if (found != answers.end()) return found->second;
  load_kernel(queue, kernel);
  int clusters = 0;
  if (shape.cluster == 1) {
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                   &clusters, kernel, static_cast<int>(shape.block.x), shape.shared_bytes),
               "asking for a kernel's occupancy");
    clusters *= multiprocessors;
  } else {
    LaunchShape one = shape;
    one.grid = static_cast<unsigned>(shape.cluster);
    const LaunchConfig config(queue, one);
    check_cuda(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config.get()),
               "asking for a kernel's occupancy");
  }
  return answers[key] = std::max(1, clusters);
#endif
}

// How many blocks of this shape one multiprocessor holds at a time; at least 1.
template <class... Parameters>
int resident_blocks(const Queue& queue, void (*kernel)(Parameters...), int threads,
                    std::size_t shared_bytes) {
  const LaunchShape shape{1, static_cast<unsigned>(threads), shared_bytes};
  return resident_clusters(queue, kernel, shape) / queue.device->multiprocessors;
}

}  // namespace JAX_GPUOPS_NAMESPACE
