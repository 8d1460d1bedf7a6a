// What each op tells the module about itself. An op registers one `Op` from its handler.cc, so the
// module names no op.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/device.h"

namespace JAX_GPUOPS_NAMESPACE {

// One named algorithm, as `jax_gpuops.algorithms()` shows it.
struct AlgorithmInfo {
  std::string_view name;
  std::string_view summary;
  std::string_view source;
  std::string_view limits;
};

// A problem as Python describes it, by name.
class Arguments {
 public:
  using Integers = std::vector<std::int64_t>;
  using Value = std::variant<std::int64_t, std::string, Integers>;

  void set(std::string name, Value value) { values_[std::move(name)] = std::move(value); }
  std::int64_t integer(std::string_view name) const { return get<std::int64_t>(name); }
  const Integers& integers(std::string_view name) const { return get<Integers>(name); }
  const std::string& text(std::string_view name) const { return get<std::string>(name); }

 private:
  template <class T>
  const T& get(std::string_view name) const {
    const auto found = values_.find(name);
    if (found == values_.end()) {
      throw std::invalid_argument("the problem lacks " + std::string(name));
    }
    if (const T* value = std::get_if<T>(&found->second)) return *value;
    throw std::invalid_argument("the problem's " + std::string(name) + " has the wrong type");
  }

  std::map<std::string, Value, std::less<>> values_;
};

// What would run for a problem, and why.
struct PlanInfo {
  std::string_view algorithm;
  std::string reason;
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
  PlanInfo (*plan)(const Arguments& problem, const Device& device);
  // Bytes of workspace that one row of the problem needs at most, whatever the number of rows.
  std::int64_t (*workspace)(const Arguments& problem);
};

inline std::vector<Op>& registry() {
  static std::vector<Op> ops;
  return ops;
}

struct RegisterOp {
  explicit RegisterOp(Op op) { registry().push_back(std::move(op)); }
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
