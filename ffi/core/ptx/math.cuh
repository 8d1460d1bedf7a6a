// Arithmetic by one instruction.
#pragma once

#include <math.h>  // NOLINT: unlike <cmath>, declares the float overloads globally

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/ptx/target.h"

namespace JAX_GPUOPS_NAMESPACE {

// 2 to the x, within 2 ulp; the GPU flushes subnormal arguments and results to 0.
__device__ inline float power_of_two(float x) {
#ifdef JAX_GPUOPS_INTERPRET
  return exp2f(x);
#else
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#endif
}

// 1 / x, within an ulp for x from 2^-126 to 2^126; NaN if x is 0 or infinite.
__device__ inline float reciprocal(float x) {
#ifdef JAX_GPUOPS_INTERPRET
  const float result = 1.0f / x;
#else
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
#endif
  return fmaf(fmaf(-x, result, 1.0f), result, result);
}
__device__ inline double reciprocal(double x) {
  const double result = 1.0 / x;
  return fma(fma(-x, result, 1.0), result, result);
}

// 1 / x, within an ulp for x from 2^-126 to 2^126; 0 if x is infinite, infinite if x is 0. The GPU
// flushes subnormal arguments and results to 0.
__device__ inline float fast_reciprocal(float x) {
#ifdef JAX_GPUOPS_INTERPRET
  return 1.0f / x;
#else
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#endif
}
__device__ inline double fast_reciprocal(double x) { return 1.0 / x; }

// The larger and the smaller number, or NaN if one is: IEEE 754-2019 maximum and minimum.
__device__ inline float maximum_or_nan(float a, float b) {
#ifdef JAX_GPUOPS_INTERPRET
  return a != a ? a : (a < b || b != b ? b : a);
#else
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#endif
}
__device__ inline float minimum_or_nan(float a, float b) {
#ifdef JAX_GPUOPS_INTERPRET
  return a != a ? a : (b < a || b != b ? b : a);
#else
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#endif
}

// A bfloat16 is the upper half of a float. __bfloat162float() uses a PTX instruction of 9.0, and
// for 8.0 another one that ptxas compiles to more than the shift that is enough.
__device__ inline float widen_bfloat16(__nv_bfloat16 value) {
#ifdef JAX_GPUOPS_INTERPRET
  return __bfloat162float(value);
#else
  float result;
  asm("{\n\t.reg .b32 word;\n\tcvt.u32.u16 word, %1;\n\tshl.b32 %0, word, 16;\n\t}"
      : "=f"(result)
      : "h"(__bfloat16_as_ushort(value)));
  return result;
#endif
}

// Two floats, rounded to nearest even, as 16-bit floats in one word, the first in the low half.
template <class T>
__device__ __forceinline__ std::uint32_t round_to_pair(float low, float high) {
  static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>);
  std::uint32_t word;
#ifdef JAX_GPUOPS_INTERPRET
  T pair[2];
  if constexpr (std::is_same_v<T, __half>) {
    pair[0] = __float2half_rn(low);
    pair[1] = __float2half_rn(high);
  } else {
    pair[0] = __float2bfloat16_rn(low);
    pair[1] = __float2bfloat16_rn(high);
  }
  memcpy(&word, pair, sizeof(word));
#else
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  }
#endif
  return word;
}

// Two floats, rounded to nearest even and saturated, as int8 in one word, the first in the low
// byte. NaN becomes 0, as in XLA. Adding 1.5 * 2^23 rounds a number to an integer, which is in the
// last bits of the sum; conversions are slower.
__device__ __forceinline__ std::uint16_t round_to_bytes(float low, float high) {
  const auto rounded = [](float x) {
    const float number = x == x ? x : 0.0f;
    const float sum = fminf(fmaxf(number, -128.0f), 127.0f) + 12582912.0f;
    return __builtin_bit_cast(std::uint32_t, sum) & 0xff;
  };
  return static_cast<std::uint16_t>(rounded(high) << 8 | rounded(low));
}

}  // namespace JAX_GPUOPS_NAMESPACE
