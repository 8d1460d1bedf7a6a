#include "reduce/plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {
namespace {

void check(const Problem& problem) {
  const auto [function, dtype, result] =
      std::tuple(problem.function, problem.dtype, problem.result);
  for (const DType each : {dtype, result}) {
    if (!is_float(each) && !is_integer(each)) {
      throw std::invalid_argument("reduction kernels do not support dtype " +
                                  std::string(info(each).name));
    }
  }
  bool right = dtype == result;
  if (is_arg(function)) {
    right = result == DType::kInt32 || result == DType::kInt64;
  } else if (function == Function::kSum || function == Function::kProd) {
    right |= is_16_bit_float(dtype) && result == DType::kFloat32;
    right |= is_integer(dtype) && is_integer(result);
  } else if (function == Function::kMeanAndVar) {
    right &= is_float(dtype);
    right |= is_16_bit_float(dtype) && result == DType::kFloat32;
  }
  if (!right) {
    throw std::invalid_argument("reduction kernels do not compute a result of dtype " +
                                std::string(info(result).name) + " from x of dtype " +
                                std::string(info(dtype).name));
  }
  if (problem.masked && (is_arg(function) || !is_float(dtype))) {
    throw std::invalid_argument(
        "reduction kernels support a mask only for floating-point x, and not for argmax and "
        "argmin; apply the mask to x first");
  }
}

// The steps of the ladder

// Each launch of a ladder step leaves one element per row and block.
std::int64_t step_partials(const Problem& problem, Algorithm algorithm) {
  const std::int64_t block_columns = step_columns(algorithm);
  std::int64_t total = 0;
  for (std::int64_t left = divide_up(problem.columns, block_columns); left > 1;
       left = divide_up(left, block_columns)) {
    total += left;
  }
  return total;
}

std::string refusal_of_step(const Problem& problem) {
  if (!is_value(problem.function)) {
    return "computes only sum, prod, max and min; 'multiple', 'row' and 'column' compute all "
           "functions";
  }
  if (problem.masked) return "does not support a mask; 'multiple', 'row' and 'column' do";
  return "";
}

void configure_step(const Problem& problem, Algorithm algorithm, std::int64_t workspace,
                    Config* config) {
  config->threads = kLadderThreads;
  config->parts = divide_up(problem.columns, step_columns(algorithm));
  config->last_threads = config->parts > 1 ? kLadderThreads : 0;
  config->workspace = problem.rows() * step_partials(problem, algorithm) * partial_bytes(problem);
  if (config->workspace > workspace) {
    throw std::invalid_argument("the workspace is too small");
  }
}

// Why an algorithm cannot take a problem; empty if it can.
std::string refusal(Algorithm algorithm, const Problem& problem, const Device& device) {
  const bool takes_apart = algorithm == Algorithm::kColumn || algorithm == Algorithm::kInterleaved;
  if (!takes_apart && problem.inner != 1) {
    return "requires rows that are contiguous in memory, but their elements are " +
           std::to_string(problem.inner) + " elements apart; 'column' supports these";
  }
  if (is_step(algorithm)) return refusal_of_step(problem);
  switch (algorithm) {
    case Algorithm::kHeld:
      return refusal_of_held(problem, device);
    case Algorithm::kStaged:
      return refusal_of_staged(problem);
    case Algorithm::kCluster:
      return refusal_of_cluster(problem, device);
    case Algorithm::kColumn:
      return refusal_of_column(problem);
    case Algorithm::kInterleaved:
      return refusal_of_interleaved(problem, device);
    default:
      return "";
  }
}

Config configure(const Problem& problem, Algorithm algorithm, std::int64_t workspace,
                 const Device& device) {
  Config config;
  if (problem.rows() == 0 || problem.columns == 0) return config;  // nothing is launched
  switch (algorithm) {
    case Algorithm::kMultiple:
      configure_multiple(problem, workspace, device, &config);
      break;
    case Algorithm::kRow:
      configure_row(problem, device, &config);
      break;
    case Algorithm::kHeld:
      configure_held(problem, device, &config);
      break;
    case Algorithm::kStaged:
      configure_staged(problem, device, &config);
      break;
    case Algorithm::kCluster:
      configure_cluster(problem, &config);
      break;
    case Algorithm::kColumn:
      configure_column(problem, workspace, device, &config);
      break;
    case Algorithm::kInterleaved:
      configure_interleaved(problem, workspace, device, &config);
      break;
    default:
      configure_step(problem, algorithm, workspace, &config);
      break;
  }
  return config;
}

std::pair<Algorithm, std::string> choose(const Problem& problem, const Device& device) {
  const auto takes = [&](Algorithm algorithm) {
    return refusal(algorithm, problem, device).empty();
  };
  if (problem.inner != 1) {
    const std::string apart =
        "the elements of a row are " + std::to_string(problem.inner) + " elements apart";
    if (!is_of_moments_column(problem, device) && takes(Algorithm::kInterleaved) &&
        prefers_interleaved(problem)) {
      return {Algorithm::kInterleaved, apart + ", which is few bytes or not a multiple of 16"};
    }
    return {Algorithm::kColumn, apart};
  }
  const std::string rows = problem.batch_invariant ? "rows"
                           : problem.rows() == 1   ? "1 row"
                                                   : std::to_string(problem.rows()) + " rows";
  const std::string rows_of = rows + " of " + std::to_string(problem.columns);
  if (takes(Algorithm::kHeld) && prefers_held(problem, device)) {
    return {Algorithm::kHeld, rows_of + " elements, each held by a group of threads"};
  }
  if (takes(Algorithm::kCluster) && prefers_cluster(problem, device)) {
    return {Algorithm::kCluster, rows_of + " elements, each read by a cluster of blocks"};
  }
  if (prefers_multiple(problem, device)) {
    return {Algorithm::kMultiple, rows + " would leave multiprocessors idle with one block each"};
  }
  if (takes(Algorithm::kStaged) && prefers_staged(problem, device)) {
    return {Algorithm::kStaged, rows_of + " elements, short and not a multiple of 16 bytes"};
  }
  return {Algorithm::kRow, rows_of + " elements that are contiguous in memory"};
}

}  // namespace

Plan plan(const Problem& problem, std::string_view algorithm, const Device& device) {
  check(problem);
  Problem planned = problem;
  std::pair<Algorithm, std::string> chosen;
  if (algorithm.empty()) {
    chosen = choose(planned, device);
  } else if (algorithm == kBatchInvariant) {
    if (problem.inner != 1 || !has_whole_packs(problem)) {
      throw std::invalid_argument(
          "batch_invariant requires rows along the last axis, each of a multiple of 16 bytes, in "
          "an array aligned to 16 bytes");
    }
    planned.batch_invariant = true;
    chosen = choose(planned, device);
  } else {
    chosen = {algorithm_from_name<Algorithm>(kAlgorithms, algorithm),
              "the caller named the algorithm"};
  }
  if (const std::string why = refusal(chosen.first, problem, device); !why.empty()) {
    throw std::invalid_argument("algorithm '" + std::string(name_of(chosen.first)) + "' " + why);
  }
  const std::int64_t workspace = problem.workspace == kWorkspaceAsAsked
                                     ? problem.rows() * workspace_bytes(problem, algorithm)
                                     : problem.workspace;
  return {chosen.first, std::move(chosen.second),
          configure(planned, chosen.first, workspace, device)};
}

std::int64_t workspace_bytes(const Problem& problem, std::string_view algorithm) {
  const auto bytes = [](std::int64_t parts, std::int64_t each) {
    return parts > 1 ? parts * each : 0;
  };
  const auto of_multiple = bytes(multiple_parts(problem), slot_bytes(problem));
  const auto of_column = bytes(column_parts(problem), partial_bytes(problem));
  const auto of_interleaved = bytes(interleaved_parts(problem), partial_bytes(problem));
  if (algorithm.empty() || algorithm == kBatchInvariant) {
    return problem.inner == 1 ? of_multiple : std::max({of_multiple, of_column, of_interleaved});
  }
  const auto named = algorithm_from_name<Algorithm>(kAlgorithms, algorithm);
  switch (named) {
    case Algorithm::kMultiple:
      return of_multiple;
    case Algorithm::kRow:
    case Algorithm::kHeld:
    case Algorithm::kStaged:
    case Algorithm::kCluster:
      return 0;
    case Algorithm::kColumn:
      return of_column;
    case Algorithm::kInterleaved:
      return of_interleaved;
    default:
      return bytes(step_partials(problem, named), partial_bytes(problem));
  }
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
