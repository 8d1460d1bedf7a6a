#include <stdexcept>
#include <string>

#include "core/launch.h"
#include "selftest/faults.cuh"
#include "selftest/selftest.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace selftest {
namespace {

using Kernel = void (*)(const float*, float*, int);

struct Entry {
  std::string_view name;
  Kernel kernel;
};

constexpr Entry kKernels[] = {
    {"reverse", reverse<float>},
    {"missing_barrier", missing_barrier<float>},
    {"divergent_barrier", divergent_barrier<float>},
    {"global_out_of_bounds", global_out_of_bounds<float>},
    {"shared_out_of_bounds", shared_out_of_bounds<float>},
    {"absent_lanes", absent_lanes<float>},
    {"unwritten_shared", unwritten_shared<float>},
};

}  // namespace

void launch(std::string_view kernel, const float* x, float* y, int size, const Queue& queue) {
  for (const Entry& entry : kKernels) {
    if (entry.name != kernel) continue;
    const unsigned blocks = static_cast<unsigned>((size + kFaultThreads - 1) / kFaultThreads);
    launch(queue, {blocks, kFaultThreads, sizeof(FaultStorage<float>)}, entry.kernel, x, y, size);
    return;
  }
  throw std::invalid_argument("there is no self-test kernel '" + std::string(kernel) + "'");
}

}  // namespace selftest
}  // namespace JAX_GPUOPS_NAMESPACE
