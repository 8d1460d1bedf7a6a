// Element types: the names that kernels, plans and Python share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
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
  kFloat8E4M3FN,
  kFloat8E5M2,
};

struct DTypeInfo {
  DType dtype;
  std::string_view name;  // numpy's, or ml_dtypes'
  std::size_t bytes;
};

inline constexpr DTypeInfo kDTypes[] = {
    {DType::kBool, "bool", 1},
    {DType::kInt8, "int8", 1},
    {DType::kInt16, "int16", 2},
    {DType::kInt32, "int32", 4},
    {DType::kInt64, "int64", 8},
    {DType::kUInt8, "uint8", 1},
    {DType::kUInt16, "uint16", 2},
    {DType::kUInt32, "uint32", 4},
    {DType::kUInt64, "uint64", 8},
    {DType::kFloat16, "float16", 2},
    {DType::kBFloat16, "bfloat16", 2},
    {DType::kFloat32, "float32", 4},
    {DType::kFloat64, "float64", 8},
    {DType::kFloat8E4M3FN, "float8_e4m3fn", 1},
    {DType::kFloat8E5M2, "float8_e5m2", 1},
};
static_assert(std::size(kDTypes) == static_cast<int>(DType::kFloat8E5M2) + 1);

inline const DTypeInfo& info(DType dtype) { return kDTypes[static_cast<int>(dtype)]; }

inline std::int64_t bytes_of(DType dtype) { return static_cast<std::int64_t>(info(dtype).bytes); }

inline bool is_16_bit_float(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

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
template <>
inline constexpr DType kDTypeOf<__nv_fp8_e4m3> = DType::kFloat8E4M3FN;
template <>
inline constexpr DType kDTypeOf<__nv_fp8_e5m2> = DType::kFloat8E5M2;

// The type in which an op computes with elements of T: sums of 8- and 16-bit floats in their own
// type would lose all but their first digits.
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
template <>
struct AccumulatorOf<__nv_fp8_e4m3> {
  using type = float;
};
template <>
struct AccumulatorOf<__nv_fp8_e5m2> {
  using type = float;
};
template <class T>
using Accumulator = typename AccumulatorOf<T>::type;

}  // namespace JAX_GPUOPS_NAMESPACE
