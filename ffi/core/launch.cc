#include "core/launch.h"

#include <algorithm>

#ifdef JAX_GPUOPS_INTERPRET
#include <cstring>
#else
#include <cxxabi.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <tuple>
#include <utility>

#include "core/errors.h"
#endif

namespace JAX_GPUOPS_NAMESPACE {

#ifdef JAX_GPUOPS_INTERPRET

void record_name_in(const Queue& queue, std::string_view function) {
  const std::size_t begin = function.find("kKernel = ") + std::string_view("kKernel = ").size();
  queue.launched->emplace_back(function.substr(begin, function.rfind(']') - begin));
}

void clear(const Queue& queue, void* memory, std::size_t bytes) {
  if (!queue.preparing) std::memset(memory, 0, bytes);
}

#else

namespace {

// Makes a device current, and the previous one when it ends.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal) {
    check_cuda(cudaGetDevice(&previous_), "reading the current device");
    changed_ = ordinal != previous_;
    if (changed_) check_cuda(cudaSetDevice(ordinal), "setting the current device");
  }
  ~CurrentDevice() {
    if (changed_) static_cast<void>(cudaSetDevice(previous_));
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

// Loads the kernel onto the device and lifts its shared memory limit. The limit becomes the
// device's maximum rather than one launch's need: the kernel is shared by every program of the
// process, and a later, smaller need must not lower it. XLA prepares each time that it runs a
// program, and these calls take longer than a launch: they are made once.
void load_kernel(const Device& device, const void* kernel) {
  static std::shared_mutex mutex;
  static auto& loaded = *new std::set<std::pair<int, const void*>>;  // handlers may run during exit
  const std::pair key{device.ordinal, kernel};
  {
    std::shared_lock lock(mutex);
    if (loaded.count(key) != 0) return;
  }
  const CurrentDevice current(device.ordinal);
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel");
  const int dynamic_bytes = static_cast<int>(device.shared_bytes_per_block) -
                            static_cast<int>(attributes.sharedSizeBytes);
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic_bytes),
      "raising a kernel's shared memory limit");
  if (device.runs_hopper_code()) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
               "allowing a kernel large clusters");
  }
  std::unique_lock lock(mutex);
  loaded.insert(key);
}

cudaLaunchAttribute cluster_attribute(int blocks) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  return attribute;
}

}  // namespace

void record_name_of(const Queue& queue, const void* kernel) {
  const char* mangled = nullptr;
  check_cuda(cudaFuncGetName(&mangled, kernel), "naming a kernel");
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(mangled, nullptr, nullptr, &status), std::free);
  queue.launched->emplace_back(status == 0 ? name.get() : mangled);
}

void launch_at(const void* kernel, const Queue& queue, const LaunchShape& shape, void** arguments) {
  if (queue.preparing) {
    load_kernel(*queue.device, kernel);
    return;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = queue.stream;
  cudaLaunchAttribute attributes[3] = {};
  config.attrs = attributes;
  if (shape.cluster > 1) attributes[config.numAttrs++] = cluster_attribute(shape.cluster);
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
  check_cuda(cudaLaunchKernelExC(&config, kernel, arguments), "launching a kernel");
}

void clear(const Queue& queue, void* memory, std::size_t bytes) {
  if (queue.preparing) return;
  check_cuda(cudaMemsetAsync(memory, 0, bytes, queue.stream), "clearing memory");
}

#endif

int resident_blocks_at(const Device& device, [[maybe_unused]] const void* kernel, int threads,
                       std::size_t shared_bytes, int cluster) {
  constexpr std::size_t kReservedBytes = 1024;  // of shared memory, for each block
  const auto by_shared = static_cast<int>((device.shared_bytes_per_block + kReservedBytes) /
                                          (shared_bytes + kReservedBytes));
  const int allowed = std::max(1, std::min(device.threads_per_multiprocessor / threads, by_shared));
  const int clusters_allowed = device.multiprocessors * allowed / cluster;
#ifdef JAX_GPUOPS_INTERPRET
  return clusters_allowed * cluster;
#else
  if (device.ordinal < 0) return clusters_allowed * cluster;
  // The query takes microseconds and its result never changes, so it is cached.
  using Key = std::tuple<int, const void*, int, std::size_t, int>;
  static std::mutex mutex;
  static auto& answers = *new std::map<Key, int>;
  const Key key{device.ordinal, kernel, threads, shared_bytes, cluster};
  std::lock_guard lock(mutex);
  const auto found = answers.find(key);
  if (found != answers.end()) return found->second;
  const CurrentDevice current(device.ordinal);
  load_kernel(device, kernel);
  if (cluster == 1) {
    int blocks = 0;
    check_cuda(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes),
        "querying the occupancy of a kernel");
    return answers[key] = device.multiprocessors * std::max(1, blocks);
  }
  cudaLaunchAttribute attribute = cluster_attribute(cluster);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(cluster));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  check_cuda(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config),
             "querying how many clusters of a kernel run at a time");
  return answers[key] = clusters * cluster;
#endif
}

}  // namespace JAX_GPUOPS_NAMESPACE
