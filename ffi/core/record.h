// Records of what handlers planned and launched, kept while Python asks for them, so that tests can
// compare plans with the kernels that ran.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/fields.h"

namespace JAX_GPUOPS_NAMESPACE {

// One execution of a handler. On the GPU, `kernels` has the names that the CUDA runtime gives the
// functions launched; on the host, those that the compiler gives them.
struct Execution {
  std::string_view op;
  Fields problem;
  std::string_view algorithm;
  Fields config;
  std::vector<std::string> kernels;
};

bool is_recording();
void start_recording();
// Returns the executions since start_recording().
std::vector<Execution> stop_recording();
void record(Execution execution);

}  // namespace JAX_GPUOPS_NAMESPACE
