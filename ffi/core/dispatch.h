// Converts a value of a plan to a template argument: each function calls f with a constant of the
// value, and throws if no kernel was compiled for it.
#pragma once

#include <type_traits>

#include "core/dtype.h"

namespace JAX_GPUOPS_NAMESPACE {

template <auto kValue>
using Constant = std::integral_constant<decltype(kValue), kValue>;

// Not inline, since most kernel sources would compile them many times.
[[noreturn]] void throw_no_kernel_for(DType dtype);
[[noreturn]] void throw_no_kernel_for_size(int size);
[[noreturn]] void throw_no_kernel_for_plan();

// Calls f(Type<T>{}) for the T among Ts that `dtype` names.
template <class... Ts, class F>
void dispatch(DType dtype, F&& f) {
  const bool found = ((dtype == kDTypeOf<Ts> ? (f(Type<Ts>{}), true) : false) || ...);
  if (!found) throw_no_kernel_for(dtype);
}

// Calls f(Constant<value>{}) for the value among kValues that is `value`.
template <auto... kValues, class Value, class F>
void dispatch_value(Value value, F&& f) {
  const bool found = ((value == kValues ? (f(Constant<kValues>{}), true) : false) || ...);
  if (!found) throw_no_kernel_for_plan();
}

// Calls f(Constant<n>{}) for the power of two n in [kSmallest, kLargest] that is `value`.
template <int kSmallest, int kLargest, class F>
void dispatch_power_of_two(int value, F&& f) {
  if (value == kSmallest) {
    f(Constant<kSmallest>{});
  } else if constexpr (kSmallest < kLargest) {
    dispatch_power_of_two<2 * kSmallest, kLargest>(value, f);
  } else {
    throw_no_kernel_for_size(value);
  }
}

// Calls f(Constant<i>{}) for the first kTable[i] that `matches`.
template <const auto& kTable, int kIndex = 0, class Matches, class F>
void dispatch_instance(Matches&& matches, F&& f) {
  if constexpr (kIndex < std::extent_v<std::remove_reference_t<decltype(kTable)>>) {
    if (matches(kTable[kIndex])) return f(Constant<kIndex>{});
    dispatch_instance<kTable, kIndex + 1>(matches, f);
  } else {
    throw_no_kernel_for_plan();
  }
}

}  // namespace JAX_GPUOPS_NAMESPACE
