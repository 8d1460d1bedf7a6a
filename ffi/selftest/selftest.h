// Kernels with planted faults, callable like any op, to test the tools that must detect them: the
// host executor, AddressSanitizer and compute-sanitizer.
#pragma once

#include <string_view>

#include "core/queue.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace selftest {

// Runs the kernel of that name from faults.cuh. x and y have `size` elements. Throws
// std::invalid_argument if there is no such kernel.
void launch(std::string_view kernel, const float* x, float* y, int size, const Queue& queue);

}  // namespace selftest
}  // namespace JAX_GPUOPS_NAMESPACE
