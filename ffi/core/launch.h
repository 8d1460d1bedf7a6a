// How a kernel starts: one spelling for the GPU and for the host executor.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "core/cuda.h"
#include "core/errors.h"
#include "core/queue.h"

#ifdef JAX_GPUOPS_INTERPRET
#include <cstring>
#include <string_view>

#include "simt/simt.h"
#else
#include <cxxabi.h>

#include <cstdlib>
#include <map>
#include <memory>
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

#ifdef JAX_GPUOPS_INTERPRET
// What the compiler calls a kernel: "... [with auto kKernel = ns::kernel<float>; ...]".
template <auto kKernel>
std::string kernel_name() {
  const std::string_view text = __PRETTY_FUNCTION__;
  const std::size_t begin = text.find("kKernel = ") + std::string_view("kKernel = ").size();
  return std::string(text.substr(begin, text.rfind("; std::string") - begin));
}
#else
// What the CUDA runtime calls it, which is what profilers show: "void ns::kernel<float>(...)".
template <auto kKernel>
std::string kernel_name() {
  const char* mangled = nullptr;
  check_cuda(cudaFuncGetName(&mangled, reinterpret_cast<const void*>(kKernel)), "naming a kernel");
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(mangled, nullptr, nullptr, &status), std::free);
  return status == 0 ? name.get() : mangled;
}
#endif

template <class... Parameters, class... Arguments>
void launch_as(void (*kernel)(Parameters...), const Queue& queue, const LaunchShape& shape,
               Arguments&&... arguments) {
#ifdef JAX_GPUOPS_INTERPRET
  if (queue.preparing) return;
  const simt::Configuration configuration{shape.grid, shape.block, shape.shared_bytes,
                                          static_cast<unsigned>(shape.cluster), shape.together};
  simt::launch(configuration, [&] { kernel(arguments...); });
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

// Sets memory to 0 before what is launched next.
inline void clear(const Queue& queue, void* memory, std::size_t bytes) {
  if (queue.preparing) return;
#ifdef JAX_GPUOPS_INTERPRET
  std::memset(memory, 0, bytes);
#else
  check_cuda(cudaMemsetAsync(memory, 0, bytes, queue.stream), "clearing memory");
#endif
}

// Launches kKernel, or while the queue prepares loads it.
template <auto kKernel, class... Arguments>
void launch_kernel(const Queue& queue, const LaunchShape& shape, Arguments&&... arguments) {
  if (queue.launched != nullptr) queue.launched->push_back(kernel_name<kKernel>());
  launch_as(+kKernel, queue, shape, std::forward<Arguments>(arguments)...);
}

// The same for a kernel that is known at run time only; its name is not recorded.
template <class... Parameters, class... Arguments>
void launch(const Queue& queue, const LaunchShape& shape, void (*kernel)(Parameters...),
            Arguments&&... arguments) {
  launch_as(kernel, queue, shape, std::forward<Arguments>(arguments)...);
}

// How many blocks of this shape one multiprocessor holds at a time; at least 1. Of a device that is
// not at hand, and of the host's, it is what threads and shared memory allow.
template <class... Parameters>
int resident_blocks(const Queue& queue, [[maybe_unused]] void (*kernel)(Parameters...), int threads,
                    std::size_t shared_bytes) {
  constexpr std::size_t kReservedBytes = 1024;  // of shared memory, for each block
  const Device& device = *queue.device;
  const auto by_shared = static_cast<int>((device.shared_bytes_per_block + kReservedBytes) /
                                          (shared_bytes + kReservedBytes));
  const int most = std::max(1, std::min(device.threads_per_multiprocessor / threads, by_shared));
#ifdef JAX_GPUOPS_INTERPRET
  return most;
#else
  if (device.ordinal < 0) return most;
  // The query takes microseconds and its result never changes, so it is cached.
  using Key = std::tuple<int, const void*, int, std::size_t>;
  static std::mutex mutex;
  static auto& answers = *new std::map<Key, int>;
  const Key key{device.ordinal, reinterpret_cast<const void*>(kernel), threads, shared_bytes};
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
