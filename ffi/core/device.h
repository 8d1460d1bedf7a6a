// The properties of a device that plans depend on.
#pragma once

#include <cstddef>
#include <cstdint>

namespace JAX_GPUOPS_NAMESPACE {

// How many blocks a grid has along y, and along z, at most.
inline constexpr std::int64_t kMostBlocksBeyondX = 65535;

// How many blocks a cluster has at most; over 8 are hard to place.
inline constexpr int kMostClusterBlocks = 16;

struct Device {
  int ordinal;             // -1 for the nominal device, which cannot be queried
  int compute_capability;  // 10 * major + minor
  int multiprocessors;
  int threads_per_multiprocessor;
  std::size_t shared_bytes_per_block;  // the opt-in maximum of one block
  bool simulated = false;              // by the host executor
  bool has_hopper_code = true;         // all kernels were compiled for 9.0, too

  // Whether it runs the code for 9.0, which uses core/ptx/hopper.h. Newer GPUs run the code for
  // 8.0.
  bool runs_hopper_code() const { return compute_capability == 90 && has_hopper_code; }
};

// The properties of CUDA device `ordinal`, read once and kept. The host executor simulates one
// device, a Hopper GPU with few multiprocessors, so that small tests reach the grid-stride paths.
// Throws std::runtime_error where the driver refuses.
const Device& device(int ordinal);

// The device that a plan is made for when none is at hand: an H200.
const Device& nominal_device();

}  // namespace JAX_GPUOPS_NAMESPACE
