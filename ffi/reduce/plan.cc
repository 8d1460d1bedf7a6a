#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/integer.h"
#include "reduce/reduce.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {
namespace {

// A row that a block reads in a few microseconds is not worth a second launch.
constexpr std::int64_t kMultipleBytes = 64 * 1024;

std::int64_t row_bytes(const Problem& problem) {
  return problem.columns * static_cast<std::int64_t>(info(problem.dtype).bytes);
}

void check(Algorithm algorithm, const Problem& problem) {
  const std::string name(kAlgorithms[static_cast<int>(algorithm)].name);
  if (algorithm < Algorithm::kMultiple && is_arg(problem.function)) {
    throw std::invalid_argument("algorithm '" + name +
                                "' computes sum, prod, max and min; argmax and argmin have "
                                "'multiple', 'row' and 'column'");
  }
  if (algorithm != Algorithm::kColumn && problem.inner != 1) {
    throw std::invalid_argument("algorithm '" + name +
                                "' takes rows whose elements are neighbours in memory, but here "
                                "they lie " +
                                std::to_string(problem.inner) +
                                " elements apart; 'column' takes these");
  }
}

// A partial result in the workspace: a value of at most 8 bytes, or a value and its index.
std::int64_t partial_bytes(const Problem& problem) { return is_arg(problem.function) ? 16 : 8; }

std::int64_t multiple_partials(const Problem& problem) {
  return std::min(kMaxSplits, divide_up(row_bytes(problem), kSplitBytes));
}

std::int64_t column_partials(const Problem& problem) {
  return std::min(kMaxSplits, divide_up(problem.columns, kSplitColumns));
}

// Every launch of a ladder step leaves one element of a row for each of its blocks.
std::int64_t ladder_partials(const Problem& problem, Algorithm algorithm) {
  const std::int64_t block_columns = ladder_block_columns(algorithm);
  std::int64_t total = 0;
  for (std::int64_t left = divide_up(problem.columns, block_columns); left > 1;
       left = divide_up(left, block_columns)) {
    total += left;
  }
  return total;
}

}  // namespace

Plan plan(const Problem& problem, std::string_view algorithm, const Device& device) {
  if (!algorithm.empty()) {
    const auto named = algorithm_from_name<Algorithm>(kAlgorithms, algorithm);
    check(named, problem);
    return {named, "named by the caller"};
  }
  if (problem.inner != 1) {
    return {Algorithm::kColumn,
            "the elements of a row lie " + std::to_string(problem.inner) + " elements apart"};
  }
  if (row_bytes(problem) > kMultipleBytes && problem.rows() < 2 * device.multiprocessors) {
    return {Algorithm::kMultiple, std::to_string(problem.rows()) +
                                      " rows would leave multiprocessors idle if a block took "
                                      "each"};
  }
  return {Algorithm::kRow, std::to_string(problem.rows()) + " rows of " +
                               std::to_string(problem.columns) + " neighbouring elements"};
}

std::int64_t workspace_bytes(const Problem& problem, std::string_view algorithm) {
  std::int64_t partials = 0;
  if (algorithm.empty()) {
    partials = std::max(multiple_partials(problem), column_partials(problem));
  } else {
    const auto named = algorithm_from_name<Algorithm>(kAlgorithms, algorithm);
    switch (named) {
      case Algorithm::kMultiple:
        partials = multiple_partials(problem);
        break;
      case Algorithm::kRow:
        break;
      case Algorithm::kColumn:
        partials = column_partials(problem);
        break;
      default:
        partials = ladder_partials(problem, named);
        break;
    }
  }
  return partials > 1 ? partials * partial_bytes(problem) : 0;
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
