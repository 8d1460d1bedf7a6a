#include <iterator>
#include <stdexcept>
#include <string>

#include "softmax/softmax.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

// A local static, since source files register before main(), in an unspecified order.
Launchers& launchers_of(Algorithm algorithm, DType dtype) {
  static Launchers table[kAlgorithmCount][std::size(kDTypes)];
  return table[static_cast<int>(algorithm)][static_cast<int>(dtype)];
}

}  // namespace

RegisterLaunchers::RegisterLaunchers(DType dtype, std::initializer_list<Launchers> launchers) {
  for (const Launchers& each : launchers) {
    Launchers& known = launchers_of(each.algorithm, dtype);
    if (each.launch != nullptr) known.launch = each.launch;
    if (each.launch_tangent != nullptr) known.launch_tangent = each.launch_tangent;
  }
}

void launch(const Queue& queue, const Plan& plan, const Problem& problem, double scale,
            const Buffers& buffers) {
  const std::string algorithm(name_of(plan.algorithm));
  if (plan.config.workspace_bytes > static_cast<std::int64_t>(buffers.workspace_bytes)) {
    throw std::invalid_argument("the workspace is too small for algorithm '" + algorithm + "'");
  }
  const Launchers& launchers = launchers_of(plan.algorithm, problem.dtype);
  const Launcher launcher =
      is_linear_in_t(problem.function) ? launchers.launch_tangent : launchers.launch;
  if (launcher == nullptr) {
    throw std::invalid_argument("algorithm '" + algorithm + "' has no kernel for dtype " +
                                std::string(info(problem.dtype).name));
  }
  launcher({problem, plan.config, scale, buffers, queue});
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
