// What all transpose kernels share: words, and the step from a linear index to offsets.
//
// Kernels count words and tiles in 32 bits, because a 64-bit division costs as much as the rest of
// a small kernel; offsets into the arrays are 64-bit. Launches see to it that no kernel is given
// more than kMaxWords words.
#pragma once

#include <cstdint>

#include "core/cuda.h"
#include "transpose/transpose.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace transpose {

inline constexpr std::int64_t kMaxWords = (std::int64_t{1} << 31) - 1;

// Dimensions of a canonical problem. Each has at least two steps, so an array with more of them
// would have over 2^40 words.
inline constexpr int kMaxRank = 40;

struct Division {
  std::uint32_t quotient;
  std::uint32_t remainder;
};

// Division by a number that is known at launch: a multiplication and a shift, for dividends below
// 2^31 (Granlund and Montgomery, Division by invariant integers using multiplication, 1994).
class Divisor {
 public:
  Divisor() : Divisor(1) {}
  explicit Divisor(std::uint32_t value) : value_(value) {
    while ((std::uint64_t{1} << shift_) < value) ++shift_;
    const std::uint64_t excess = (std::uint64_t{1} << shift_) - value;
    multiplier_ = static_cast<std::uint32_t>((excess << 32) / value + 1);
  }

  __host__ __device__ std::uint32_t value() const { return value_; }

  __device__ Division divide(std::uint32_t dividend) const {
    const auto high = static_cast<std::uint32_t>((std::uint64_t{dividend} * multiplier_) >> 32);
    const std::uint32_t quotient = (high + dividend) >> shift_;
    return {quotient, dividend - quotient * value_};
  }

 private:
  std::uint32_t value_;
  std::uint32_t multiplier_ = 0;
  std::uint32_t shift_ = 0;
};

// Where a word lies in operand and result.
struct Offsets {
  std::int64_t in = 0;
  std::int64_t out = 0;
};

// Dimensions to walk, minor first.
struct Walk {
  int rank = 0;
  Divisor size[kMaxRank];
  std::int64_t in_stride[kMaxRank];
  std::int64_t out_stride[kMaxRank];

  void push(const Dim& dim) {
    size[rank] = Divisor(static_cast<std::uint32_t>(dim.size));
    in_stride[rank] = dim.in_stride;
    out_stride[rank] = dim.out_stride;
    ++rank;
  }

  // The offsets of the step `index`, counted with the first dimension the fastest.
  __device__ Offsets offsets(std::uint32_t index) const {
    Offsets offsets;
#pragma unroll 1
    for (int i = 0; i < rank; ++i) {
      const Division step = size[i].divide(index);
      offsets.in += step.remainder * in_stride[i];
      offsets.out += step.remainder * out_stride[i];
      index = step.quotient;
    }
    return offsets;
  }
};

}  // namespace transpose
}  // namespace JAX_GPUOPS_NAMESPACE
