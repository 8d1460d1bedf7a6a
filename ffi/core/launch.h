// Kernel launches, in the same form for the GPU and for the host executor.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>
#include <type_traits>
#include <utility>

#include "core/cuda.h"
#include "core/errors.h"
#include "core/queue.h"

#ifdef JAX_GPUOPS_INTERPRET
#include "simt/simt.h"
#endif

namespace JAX_GPUOPS_NAMESPACE {

struct LaunchShape {
  dim3 grid;
  dim3 block;
  std::size_t shared_bytes = 0;
  int cluster = 1;        // neighbouring blocks along x that form a cluster, up to 16
  bool together = false;  // all blocks run at the same time, so they may wait for each other
  bool early = false;     // may start while the previous kernel runs: core/ptx/early_launch.cuh
};

// The grid's x extent for `items` blocks of work; kernels that may have more use grid-stride loops.
inline unsigned grid_extent(std::int64_t items) {
  return static_cast<unsigned>(
      std::min<std::int64_t>(items, std::numeric_limits<std::int32_t>::max()));
}

// The same for y and z, which CUDA limits to less.
inline unsigned grid_extent_beyond_x(std::int64_t items) {
  return static_cast<unsigned>(std::min(items, kMostBlocksBeyondX));
}

#ifdef JAX_GPUOPS_INTERPRET
// Records the kernel's name, given "... [with auto kKernel = ns::kernel<float>]".
void record_name_in(const Queue& queue, std::string_view function);

template <auto kKernel>
void record_name(const Queue& queue) {
  record_name_in(queue, __PRETTY_FUNCTION__);
}
#else
// Records the CUDA runtime's name of the kernel, which profilers show: "void
// ns::kernel<float>(...)".
void record_name_of(const Queue& queue, const void* kernel);

template <auto kKernel>
void record_name(const Queue& queue) {
  record_name_of(queue, reinterpret_cast<const void*>(kKernel));
}

// Launches a kernel with the arguments at these addresses; while the queue prepares, only loads it.
void launch_at(const void* kernel, const Queue& queue, const LaunchShape& shape, void** arguments);
#endif

// A parameter type to which arguments are converted, and from which nothing is deduced.
template <class T>
using Converted = std::common_type_t<T>;

template <class... Parameters>
void launch_as(void (*kernel)(Parameters...), const Queue& queue, const LaunchShape& shape,
               const Converted<Parameters>&... arguments) {
#ifdef JAX_GPUOPS_INTERPRET
  if (queue.preparing) return;
  const simt::Configuration configuration{shape.grid, shape.block, shape.shared_bytes,
                                          static_cast<unsigned>(shape.cluster), shape.together};
  simt::launch(configuration, [&] { kernel(arguments...); });
#else
  const void* addresses[] = {static_cast<const void*>(&arguments)...};
  launch_at(reinterpret_cast<const void*>(kernel), queue, shape, const_cast<void**>(addresses));
#endif
}

// Sets memory to 0 before what is launched next.
void clear(const Queue& queue, void* memory, std::size_t bytes);

// Launches kKernel; while the queue prepares, only loads it.
template <auto kKernel, class... Arguments>
void launch_kernel(const Queue& queue, const LaunchShape& shape, Arguments&&... arguments) {
  if (queue.launched != nullptr) record_name<kKernel>(queue);
  launch_as(+kKernel, queue, shape, std::forward<Arguments>(arguments)...);
}

// The same for a kernel that is known at run time only; its name is not recorded.
template <class... Parameters, class... Arguments>
void launch(const Queue& queue, const LaunchShape& shape, void (*kernel)(Parameters...),
            Arguments&&... arguments) {
  launch_as(kernel, queue, shape, std::forward<Arguments>(arguments)...);
}

// How many blocks of this shape are resident on a device, in whole clusters. For a device that is
// not at hand, and for the host's, this is the number that threads and shared memory allow.
// Clusters may be fewer, since each runs within one of the GPU's groups of multiprocessors (GPCs);
// without clusters there is at least one block per multiprocessor.
int resident_blocks_at(const Device& device, const void* kernel, int threads,
                       std::size_t shared_bytes, int cluster);

template <class... Parameters>
int resident_blocks(const Device& device, void (*kernel)(Parameters...), int threads,
                    std::size_t shared_bytes, int cluster = 1) {
  return resident_blocks_at(device, reinterpret_cast<const void*>(kernel), threads, shared_bytes,
                            cluster);
}

}  // namespace JAX_GPUOPS_NAMESPACE
