// Shared by the plans of all ops: algorithms and their names.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace JAX_GPUOPS_NAMESPACE {

// The workspace of a problem that is planned before its buffers are known: as much as the op asks
// for.
inline constexpr std::int64_t kWorkspaceAsAsked = -1;

// In place of an algorithm's name: the plan chooses by the length and the dtype of rows, not by
// their number, so that a row's result is bitwise the same in every batch.
inline constexpr std::string_view kBatchInvariant = "batch_invariant";

// The size of the array for which batch-invariant plans are made, such as a few rows of a
// vocabulary or many of attention: a few blocks share a long row.
inline constexpr std::int64_t kExpectedBytes = 4 << 20;

// The number of rows for which a plan is made: if it must not depend on the actual number, as many
// as make an array of kExpectedBytes. Grids have the actual number.
constexpr std::int64_t expected_rows(bool batch_invariant, std::int64_t rows,
                                     std::int64_t row_bytes) {
  const std::int64_t expected = kExpectedBytes / std::max<std::int64_t>(1, row_bytes);
  return std::max<std::int64_t>(1, batch_invariant ? expected : rows);
}

// One named algorithm, as `jax_gpuops.algorithms()` shows it.
struct AlgorithmInfo {
  std::string_view name;
  std::string_view summary;
  std::string_view source;
  std::string_view limits;
  std::string_view kernels = {};  // the __global__ functions it may launch, separated by spaces
};

// The algorithm called `name` in a table indexed by the enumeration `Algorithm`.
template <class Algorithm, std::size_t kCount>
Algorithm algorithm_from_name(const AlgorithmInfo (&table)[kCount], std::string_view name) {
  std::string known;
  for (std::size_t i = 0; i < kCount; ++i) {
    if (table[i].name == name) return static_cast<Algorithm>(i);
    known += (i ? ", " : "") + std::string(table[i].name);
  }
  throw std::invalid_argument("algorithm '" + std::string(name) + "' is unknown; known are " +
                              known);
}

}  // namespace JAX_GPUOPS_NAMESPACE
