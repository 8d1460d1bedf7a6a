#include "core/dispatch.h"

#include <stdexcept>
#include <string>

namespace JAX_GPUOPS_NAMESPACE {

void throw_no_kernel_for(DType dtype) {
  throw std::invalid_argument("dtype " + std::string(info(dtype).name) +
                              " is not supported by the kernels of this op");
}

void throw_no_kernel_for_size(int size) {
  throw std::logic_error("no kernel was compiled for the size " + std::to_string(size));
}

void throw_no_kernel_for_plan() {
  throw std::logic_error("no kernel was compiled for the configuration of the plan");
}

}  // namespace JAX_GPUOPS_NAMESPACE
