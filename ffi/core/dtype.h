// Element types: the names that kernels, plans and Python share, and the step from a run-time type
// to a template argument.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

#include "core/cuda.h"

namespace JAX_GPUOPS_NAMESPACE {

enum class DType {
  kBool,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUInt8,
  kUInt16,
  kUInt32,
  kUInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
};

struct DTypeInfo {
  DType dtype;
  std::string_view name;  // numpy's name
  std::size_t bytes;
};

inline constexpr DTypeInfo kDTypes[] = {
    {DType::kBool, "bool", 1},         {DType::kInt8, "int8", 1},
    {DType::kInt16, "int16", 2},       {DType::kInt32, "int32", 4},
    {DType::kInt64, "int64", 8},       {DType::kUInt8, "uint8", 1},
    {DType::kUInt16, "uint16", 2},     {DType::kUInt32, "uint32", 4},
    {DType::kUInt64, "uint64", 8},     {DType::kFloat16, "float16", 2},
    {DType::kBFloat16, "bfloat16", 2}, {DType::kFloat32, "float32", 4},
    {DType::kFloat64, "float64", 8},
};

inline const DTypeInfo& info(DType dtype) { return kDTypes[static_cast<int>(dtype)]; }

inline DType dtype_from_name(std::string_view name) {
  for (const DTypeInfo& entry : kDTypes) {
    if (entry.name == name) return entry.dtype;
  }
  throw std::invalid_argument("dtype " + std::string(name) + " is not supported by any kernel");
}

template <class T>
struct Type {
  using type = T;
};

template <class T>
inline constexpr DType kDTypeOf = DType::kBool;
template <>
inline constexpr DType kDTypeOf<std::int8_t> = DType::kInt8;
template <>
inline constexpr DType kDTypeOf<std::int16_t> = DType::kInt16;
template <>
inline constexpr DType kDTypeOf<std::int32_t> = DType::kInt32;
template <>
inline constexpr DType kDTypeOf<std::int64_t> = DType::kInt64;
template <>
inline constexpr DType kDTypeOf<std::uint8_t> = DType::kUInt8;
template <>
inline constexpr DType kDTypeOf<std::uint16_t> = DType::kUInt16;
template <>
inline constexpr DType kDTypeOf<std::uint32_t> = DType::kUInt32;
template <>
inline constexpr DType kDTypeOf<std::uint64_t> = DType::kUInt64;
template <>
inline constexpr DType kDTypeOf<__half> = DType::kFloat16;
template <>
inline constexpr DType kDTypeOf<__nv_bfloat16> = DType::kBFloat16;
template <>
inline constexpr DType kDTypeOf<float> = DType::kFloat32;
template <>
inline constexpr DType kDTypeOf<double> = DType::kFloat64;

// Calls f(Type<T>{}) for the T among Ts that `dtype` names; throws if it is none of them.
template <class... Ts, class F>
void dispatch(DType dtype, F&& f) {
  const bool found = ((dtype == kDTypeOf<Ts> ? (f(Type<Ts>{}), true) : false) || ...);
  if (!found) {
    throw std::invalid_argument("dtype " + std::string(info(dtype).name) +
                                " is not among those this op has kernels for");
  }
}

// Calls f(std::integral_constant<int, n>{}) for the power of two n in [kSmallest, kLargest] that is
// `value`; throws if it is none of them.
template <int kSmallest, int kLargest, class F>
void dispatch_power_of_two(int value, F&& f) {
  if (value == kSmallest) {
    f(std::integral_constant<int, kSmallest>{});
  } else if constexpr (kSmallest < kLargest) {
    dispatch_power_of_two<2 * kSmallest, kLargest>(value, f);
  } else {
    throw std::logic_error("no kernel was built for the size " + std::to_string(value));
  }
}

// The type in which an op computes with elements of T: sums of 16-bit floats would lose all but
// their first digits in their own type.
template <class T>
struct AccumulatorOf {
  using type = T;
};
template <>
struct AccumulatorOf<__half> {
  using type = float;
};
template <>
struct AccumulatorOf<__nv_bfloat16> {
  using type = float;
};
template <class T>
using Accumulator = typename AccumulatorOf<T>::type;

}  // namespace JAX_GPUOPS_NAMESPACE
