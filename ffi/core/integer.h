// Integer arithmetic of launches.
#pragma once

#include <cstdint>

namespace JAX_GPUOPS_NAMESPACE {

inline std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// The smallest power of two that is at least `value`.
inline int power_of_two_from(std::int64_t value) {
  int power = 1;
  while (power < value) power *= 2;
  return power;
}

}  // namespace JAX_GPUOPS_NAMESPACE
