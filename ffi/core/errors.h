// Errors. Plans and launchers throw: std::invalid_argument for what the caller asked for,
// std::runtime_error for what the machine refused. The FFI handler turns both into an FFI error
// and nanobind into ValueError and RuntimeError, so nothing leaves a handler as an exception.
#pragma once

#include <stdexcept>
#include <string>

#include "core/cuda.h"

namespace JAX_GPUOPS_NAMESPACE {

#ifndef JAX_GPUOPS_INTERPRET
inline void check_cuda(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("CUDA error while ") + doing + ": " +
                           cudaGetErrorString(error));
}
#endif

}  // namespace JAX_GPUOPS_NAMESPACE
