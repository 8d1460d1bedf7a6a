// Arithmetic that kernels share: limits, exponentials, and sums that stay exact enough however
// many terms they have.
#pragma once

#include <math.h>  // NOLINT: unlike <cmath>, declares the float overloads globally

#include <limits>
#include <type_traits>

#include "core/cuda.h"
#include "core/ptx/math.cuh"

namespace JAX_GPUOPS_NAMESPACE {

template <class T>
__host__ __device__ constexpr T infinity() {
  return std::numeric_limits<T>::infinity();
}

template <class T>
__device__ inline bool is_finite(T x) {
  return x - x == T(0);
}

// max and min that keep NaN, as IEEE 754-2019 maximum and minimum do and fmax does not.
template <class T>
__device__ inline T maximum(T a, T b) {
  if constexpr (std::is_same_v<T, float>) {
    return maximum_or_nan(a, b);
  } else if constexpr (std::is_floating_point_v<T>) {
    return a != a ? a : (a < b || b != b ? b : a);
  } else {
    return a < b ? b : a;
  }
}

template <class T>
__device__ inline T minimum(T a, T b) {
  if constexpr (std::is_same_v<T, float>) {
    return minimum_or_nan(a, b);
  } else if constexpr (std::is_floating_point_v<T>) {
    return a != a ? a : (b < a || b != b ? b : a);
  } else {
    return b < a ? b : a;
  }
}

// e to the x, within 2 ulp.
__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }

// The same by fewer instructions, within 8 ulp; results below 2^-126 are 0. `missing` is the
// rounding error of the exponent of two. Far from 0 it is large, infinite or NaN, and is clamped to
// 1/2 or -1/2: the power is 0, infinite or NaN there, and stays so.
__device__ inline float short_exponential(float x) {
#ifdef JAX_GPUOPS_INTERPRET
  return expf(x);
#else
  const float exponent = x * 1.44269504088896341f;
  const float missing = fmaf(-exponent, 0.693147180559945309f, x);
  return power_of_two(exponent) * (__saturatef(missing + 0.5f) + 0.5f);
#endif
}
__device__ inline double short_exponential(double x) { return exp(x); }

// a * b, rounded before anything is added to it.
#ifdef JAX_GPUOPS_INTERPRET
__device__ inline float rounded_product(float a, float b) { return a * b; }
__device__ inline double rounded_product(double a, double b) { return a * b; }
#else
__device__ inline float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double rounded_product(double a, double b) { return __dmul_rn(a, b); }
#endif

// e to the x for x <= 0, by the hardware's base-two exponential: 2 + 1.17 |x| ulp, a third of the
// instructions. Enough for 16-bit results.
__device__ inline float fast_exponential(float x) {
#ifdef JAX_GPUOPS_INTERPRET
  return expf(x);
#else
  return __expf(x);
#endif
}
__device__ inline double fast_exponential(double x) { return exp(x); }

// 1 / (1 + e^-x), the logistic function: its relative error is that of rounding x to a float and a
// few ulp. Results below 2^-126 are 0.
template <class T>
__device__ inline T logistic(T x) {
  return fast_reciprocal(T(1) + exponential(-x));
}

// 1 / (1 + 2^-x) within 2^-20: enough for 16-bit results.
__device__ inline float fast_logistic_of_log2(float x) {
  return fast_reciprocal(1.0f + power_of_two(-x));
}

// t P(t), with t = 1 / (1 + scale a) and P the polynomial with these coefficients, from that of t^0
// on.
template <int kSize>
__device__ inline float rational(float a, float scale, const float (&coefficients)[kSize]) {
  const float t = fast_reciprocal(fmaf(scale, a, 1.0f));
  float sum = coefficients[kSize - 1];
#pragma unroll
  for (int i = kSize - 2; i >= 0; --i) sum = fmaf(sum, t, coefficients[i]);
  return t * sum;
}

// The cumulative distribution function of the standard normal distribution, (1 + erf(x / sqrt 2)) /
// 2. The tail at a = |x| is e^(-a^2 / 2) times a function that falls like 1 / a, whose fit has a
// relative error of 2^-22; so small results too are as exact as x. Results below 2^-126 are 0.
__device__ inline float normal_distribution(float x) {
  const float a = fabsf(x);
  const float scaled =
      rational(a, 0.3f,
               {0.119647235f, 0.120415434f, 0.102581345f, 0.117095016f, -0.0242428463f,
                0.160014629f, -0.113423876f, 0.0129111782f, 0.0050019403f});
  const float tail = exponential(-0.5f * a * a) * scaled;
  return x < 0 ? tail : 1.0f - tail;
}
__device__ inline double normal_distribution(double x) {
  return 0.5 * erfc(-0.707106781186547524 * x);
}

// The same within 2^-13, enough for 16-bit results, by a shorter fit.
__device__ inline float fast_normal_distribution(float x) {
  const float a = fabsf(x);
  const float scaled =
      rational(a, 0.39f, {0.155495062f, 0.158336237f, 0.108583987f, 0.164547503f, -0.0869923010f});
  const float tail = power_of_two(a * a * -0.72134752f) * scaled;
  return x < 0 ? tail : 1.0f - tail;
}

// A sum and the rounding errors it has made (Neumaier's variant of Kahan summation, without its
// branch: Knuth's two-sum). Its error does not grow with the number of terms; a plain float
// accumulator stops growing at 2^24 equal terms.
template <class T>
struct CompensatedSum {
  T sum = 0;
  T error = 0;

  __device__ void add(T term) {
    const T total = sum + term;
    const T shadow = total - sum;
    error += (sum - (total - shadow)) + (term - shadow);
    sum = total;
  }

  // Where the sum overflowed or met a NaN the error term is NaN, and the sum alone is right.
  __device__ T value() const {
    const T corrected = sum + error;
    return corrected == corrected ? corrected : sum;
  }
};

}  // namespace JAX_GPUOPS_NAMESPACE
