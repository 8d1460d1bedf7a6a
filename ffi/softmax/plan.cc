#include <stdexcept>
#include <string>

#include "softmax/softmax.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

// block_shared keeps the row in its own type, with room for one pack of alignment, and a few
// numbers for each warp.
constexpr std::size_t kBlockSharedOverhead = 1024;

bool fits_shared(const Problem& problem, const Device& device) {
  const std::size_t capacity =
      (device.shared_bytes_per_block - kBlockSharedOverhead) / info(problem.dtype).bytes;
  return problem.columns <= static_cast<std::int64_t>(capacity);
}

std::string columns_text(const Problem& problem) {
  return "rows of " + std::to_string(problem.columns) + " " +
         std::string(info(problem.dtype).name) + " elements";
}

void check(Algorithm algorithm, const Problem& problem, const Device& device) {
  const std::string name(kAlgorithms[static_cast<int>(algorithm)].name);
  if (algorithm < Algorithm::kWarp && problem.function != Function::kSoftmax) {
    throw std::invalid_argument("algorithm '" + name +
                                "' computes softmax only; log_softmax and logsumexp have 'warp', "
                                "'block_shared' and 'block_uncached'");
  }
  if (algorithm == Algorithm::kWarp && problem.columns > warp_columns(problem.dtype)) {
    throw std::invalid_argument("algorithm 'warp' takes rows of at most " +
                                std::to_string(warp_columns(problem.dtype)) + " " +
                                std::string(info(problem.dtype).name) + " elements, not " +
                                std::to_string(problem.columns));
  }
  if (algorithm == Algorithm::kBlockShared && !fits_shared(problem, device)) {
    throw std::invalid_argument("algorithm 'block_shared' cannot hold " + columns_text(problem) +
                                " in " + std::to_string(device.shared_bytes_per_block) +
                                " bytes of shared memory; 'block_uncached' takes any length");
  }
}

}  // namespace

std::int64_t warp_columns(DType dtype) { return dtype == DType::kFloat64 ? 1024 : 2048; }

Plan plan(const Problem& problem, std::string_view algorithm, const Device& device) {
  if (!algorithm.empty()) {
    const auto named = algorithm_from_name<Algorithm>(kAlgorithms, algorithm);
    check(named, problem, device);
    return {named, "named by the caller"};
  }
  if (problem.columns <= warp_columns(problem.dtype)) {
    return {Algorithm::kWarp, columns_text(problem) + " fit the registers of a warp"};
  }
  if (fits_shared(problem, device)) {
    return {Algorithm::kBlockShared, columns_text(problem) + " fit shared memory"};
  }
  return {Algorithm::kBlockUncached, columns_text(problem) +
                                         " fit neither registers nor shared "
                                         "memory"};
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
