// What each op tells the module about itself. An op registers one `Op` from its handler.cc, so the
// module names no op.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/device.h"
#include "core/fields.h"

namespace JAX_GPUOPS_NAMESPACE {

// The workspace of a problem that is planned before its buffers are known: what the op asks for.
inline constexpr std::int64_t kWorkspaceAsAsked = -1;

// One named algorithm, as `jax_gpuops.algorithms()` shows it.
struct AlgorithmInfo {
  std::string_view name;
  std::string_view summary;
  std::string_view source;
  std::string_view limits;
  std::string_view kernels = {};  // the __global__ functions it may launch, separated by spaces
};

// What would run for a problem, and why.
struct PlanInfo {
  std::string_view algorithm;
  std::string reason;
  Fields config = {};
};

// The entry points of one FFI target, one for each stage XLA runs.
struct Target {
  std::string_view name;
  void* initialize;
  void* execute;
};

struct Op {
  std::string_view name;
  std::vector<AlgorithmInfo> algorithms;
  std::vector<Target> targets;
  // Throws std::invalid_argument where the named algorithm cannot take the problem.
  PlanInfo (*plan)(const Fields& problem, const Device& device);
  // Bytes of workspace that the problem needs at most. Of rows, which XLA may partition: those of
  // one row, whatever the number of rows.
  std::int64_t (*workspace)(const Fields& problem);
};

inline std::vector<Op>& registry() {
  static std::vector<Op> ops;
  return ops;
}

struct RegisterOp {
  explicit RegisterOp(Op op) { registry().push_back(std::move(op)); }
};

// The functions of an op that registers `Problem`, whose plan() and workspace_bytes() are found in
// its namespace.
template <class Problem>
PlanInfo plan_of_fields(const Fields& fields, const Device& device) {
  const auto chosen = plan(from_fields<Problem>(fields), fields.text("algorithm"), device);
  return {name_of(chosen.algorithm), chosen.reason, to_fields(chosen.config)};
}

template <class Problem>
std::int64_t workspace_of_fields(const Fields& fields) {
  return workspace_bytes(from_fields<Problem>(fields), fields.text("algorithm"));
}

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
