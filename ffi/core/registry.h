// The registry of ops. Each op registers one `Op` from its handler.cc, so the module names no op.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/algorithm.h"
#include "core/device.h"
#include "core/fields.h"

namespace JAX_GPUOPS_NAMESPACE {

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
  // The most bytes of workspace that the problem needs. For ops on rows, which XLA may partition:
  // those of one row, whatever the number of rows.
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

}  // namespace JAX_GPUOPS_NAMESPACE
