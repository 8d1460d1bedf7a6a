// From a value that a plan holds to a template argument: calls f with a constant of that value.
// Each throws if the value is none of those that kernels were compiled for.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include "core/dtype.h"

namespace JAX_GPUOPS_NAMESPACE {

template <auto kValue>
using Constant = std::integral_constant<decltype(kValue), kValue>;

// Calls f(Type<T>{}) for the T among Ts that `dtype` names.
template <class... Ts, class F>
void dispatch(DType dtype, F&& f) {
  const bool found = ((dtype == kDTypeOf<Ts> ? (f(Type<Ts>{}), true) : false) || ...);
  if (!found) {
    throw std::invalid_argument("dtype " + std::string(info(dtype).name) +
                                " is not among those this op has kernels for");
  }
}

// Calls f(Constant<value>{}) for the value among kValues that is `value`.
template <auto... kValues, class Value, class F>
void dispatch_value(Value value, F&& f) {
  const bool found = ((value == kValues ? (f(Constant<kValues>{}), true) : false) || ...);
  if (!found) throw std::logic_error("no kernel was compiled for a value of the plan");
}

// Calls f(Constant<n>{}) for the power of two n in [kSmallest, kLargest] that is `value`.
template <int kSmallest, int kLargest, class F>
void dispatch_power_of_two(int value, F&& f) {
  if (value == kSmallest) {
    f(Constant<kSmallest>{});
  } else if constexpr (kSmallest < kLargest) {
    dispatch_power_of_two<2 * kSmallest, kLargest>(value, f);
  } else {
    throw std::logic_error("no kernel was compiled for the size " + std::to_string(value));
  }
}

// Calls f(Constant<i>{}) for the first kTable[i] that `matches`.
template <const auto& kTable, int kIndex = 0, class Matches, class F>
void dispatch_instance(Matches&& matches, F&& f) {
  if constexpr (kIndex < std::extent_v<std::remove_reference_t<decltype(kTable)>>) {
    if (matches(kTable[kIndex])) return f(Constant<kIndex>{});
    dispatch_instance<kTable, kIndex + 1>(matches, f);
  } else {
    throw std::logic_error("no kernel was compiled for the configuration of the plan");
  }
}

}  // namespace JAX_GPUOPS_NAMESPACE
