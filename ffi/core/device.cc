#include "core/device.h"

#include <mutex>
#include <vector>

#include "core/cuda.h"
#include "core/errors.h"

#ifdef JAX_GPUOPS_INTERPRET
#include "simt/simt.h"
#endif

namespace JAX_GPUOPS_NAMESPACE {
namespace {

constexpr std::size_t kHopperSharedBytes = 227 * 1024;

#ifndef JAX_GPUOPS_INTERPRET
int attribute(cudaDeviceAttr name, int ordinal) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, name, ordinal), "reading a device attribute");
  return value;
}

Device read_device(int ordinal) {
  Device device{};
  device.ordinal = ordinal;
  device.compute_capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor, ordinal) +
                              attribute(cudaDevAttrComputeCapabilityMinor, ordinal);
  device.multiprocessors = attribute(cudaDevAttrMultiProcessorCount, ordinal);
  device.threads_per_multiprocessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor, ordinal);
  device.shared_bytes_per_block =
      static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal));
  device.has_hopper_code = JAX_GPUOPS_HAS_CODE_FOR_90;
  return device;
}
#endif

}  // namespace

const Device& device(int ordinal) {
#ifdef JAX_GPUOPS_INTERPRET
  static const Device host{ordinal,
                           90,
                           simt::kMultiprocessors,
                           simt::kThreadsPerMultiprocessor,
                           simt::kSharedBytesPerBlock,
                           /*simulated=*/true};
  return host;
#else
  static std::mutex mutex;
  static auto& devices = *new std::vector<const Device*>;  // handlers may run during exit
  std::lock_guard lock(mutex);
  if (static_cast<std::size_t>(ordinal) >= devices.size()) devices.resize(ordinal + 1);
  if (devices[ordinal] == nullptr) devices[ordinal] = new Device(read_device(ordinal));
  return *devices[ordinal];
#endif
}

const Device& nominal_device() {
  static const Device h200{-1, 90, 132, 2048, kHopperSharedBytes};
  return h200;
}

}  // namespace JAX_GPUOPS_NAMESPACE
