// Where a launch goes: a CUDA stream, or the host executor.
#pragma once

#include <string>
#include <vector>

#include "core/cuda.h"
#include "core/device.h"

namespace JAX_GPUOPS_NAMESPACE {

// XLA runs a handler twice: first its `initialize` stage, outside any CUDA graph, then `execute`,
// which may be captured into one. While preparing, a launch loads its kernel and sets its
// attributes, which capture forbids, and does not run it; so an op writes its launches once.
struct Queue {
#ifndef JAX_GPUOPS_INTERPRET
  cudaStream_t stream = nullptr;
#endif
  bool preparing = false;
  const Device* device = nullptr;
  std::vector<std::string>* launched = nullptr;  // kernel names are recorded there, if not null
};

}  // namespace JAX_GPUOPS_NAMESPACE
