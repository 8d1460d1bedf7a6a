// Integer arithmetic of launches.
#pragma once

#include <cstdint>
#include <limits>

#include "core/cuda.h"

namespace JAX_GPUOPS_NAMESPACE {

inline std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// The smallest power of two that is at least `value`, but at most `most`, a power of two.
inline int power_of_two_from(std::int64_t value, int most) {
  int power = 1;
  while (power < value && power < most) power *= 2;
  return power;
}

// The logarithm of a power of two.
inline int log2_of(int power) { return __builtin_ctz(static_cast<unsigned>(power)); }

// The logarithm of the smallest power of two that is at least `value`.
inline int log2_up(std::int64_t value) {
  int log2 = 0;
  while ((std::int64_t{1} << log2) < value) ++log2;
  return log2;
}

struct Division {
  std::uint32_t quotient;
  std::uint32_t remainder;
};

// Division by a number known at launch but not at compile time, as a multiplication: Granlund and
// Montgomery, Division by invariant integers using multiplication, 1994. Exact for dividends below
// 2^31.
struct Divisor {
  std::uint32_t divisor = 1;
  std::uint32_t multiplier = std::uint32_t{1} << 31;
  int shift = 31;

  Divisor() = default;
  explicit Divisor(std::int64_t number) {
    // All quotients are 0; with nothing to divide, a divisor may be 0.
    if (number < 1 || number > std::numeric_limits<std::int32_t>::max()) {
      multiplier = 0;
      return;
    }
    divisor = static_cast<std::uint32_t>(number);
    while (std::int64_t{1} << (shift - 31) < number) ++shift;
    multiplier = static_cast<std::uint32_t>(((std::uint64_t{1} << shift) + divisor - 1) / divisor);
  }

  __host__ __device__ std::uint32_t quotient(std::uint32_t dividend) const {
    return static_cast<std::uint32_t>(std::uint64_t{dividend} * multiplier >> shift);
  }

  __host__ __device__ Division divide(std::uint32_t dividend) const {
    const std::uint32_t whole = quotient(dividend);
    return {whole, dividend - whole * divisor};
  }
};

struct WideDivision {
  std::int64_t quotient;
  std::int64_t remainder;
};

// Divisor for dividends that may have 2^31 or more: these take a division.
struct WideDivisor {
  std::int64_t divisor;
  Divisor of_small;

  explicit WideDivisor(std::int64_t number) : divisor(number), of_small(number) {}

  __host__ __device__ WideDivision divide(std::int64_t dividend) const {
    const std::int64_t whole = dividend <= std::numeric_limits<std::int32_t>::max()
                                   ? of_small.quotient(static_cast<std::uint32_t>(dividend))
                                   : dividend / divisor;
    return {whole, dividend - whole * divisor};
  }
};

}  // namespace JAX_GPUOPS_NAMESPACE
