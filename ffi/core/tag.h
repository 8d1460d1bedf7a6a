// Tags, by which a launch distinguishes what it wrote from what was in memory before.
#pragma once

#include <atomic>
#include <cstdint>
#include <random>

namespace JAX_GPUOPS_NAMESPACE {

// Returns a number that no other launch of this process has. A word that was in memory before
// equals it with a probability of 2^-64. Replays of a CUDA graph use it again.
inline std::uint64_t unique_tag() {
  static std::atomic<std::uint64_t> next{[] {
    std::random_device random;
    return std::uint64_t{random()} << 32 | random();
  }()};
  // Odd, so that 2^64 tags pass before one comes again; neighbours differ in half of their bits.
  constexpr std::uint64_t kStep = 0x9e3779b97f4a7c15;
  return next.fetch_add(kStep, std::memory_order_relaxed);
}

}  // namespace JAX_GPUOPS_NAMESPACE
