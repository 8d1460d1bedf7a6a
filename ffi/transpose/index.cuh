// What all transpose kernels share: the step from a linear index to offsets.
//
// Kernels count words and tiles in 32 bits, because a 64-bit division costs as much as the rest of
// a small kernel; offsets into the arrays are 64-bit. The launchers give no kernel more than
// kMaxWords words.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "core/cuda.h"
#include "core/integer.h"
#include "transpose/transpose.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace transpose {

// The work of one launch.
template <class Word>
struct Call {
  const Queue& queue;
  const Word* x;
  Word* y;
  Movement movement;  // may have dimensions of size 1 if it is a part of a larger one
};

// The offsets of a word in operand and result.
struct Offsets {
  std::int64_t in = 0;
  std::int64_t out = 0;
};

// Dimensions to iterate over, minor first. What belongs to one dimension is in one place: reading a
// line of the parameters for the first time takes as long as hundreds of instructions.
struct Walk {
  struct Step {
    Divisor size;
    std::int64_t in_stride;
    std::int64_t out_stride;
  };

  int rank = 0;
  Step step[kMaxRank];

  void push(const Dim& dim) {
    step[rank] = {Divisor(dim.size), dim.in_stride, dim.out_stride};
    ++rank;
  }

  // The offsets at the linear index `index`, in which the first dimension varies fastest.
  __device__ Offsets offsets(std::uint32_t index) const {
    Offsets offsets;
#pragma unroll 1
    for (int i = 0; i < rank; ++i) {
      const Division place = step[i].size.divide(index);
      offsets.in += place.remainder * step[i].in_stride;
      offsets.out += place.remainder * step[i].out_stride;
      index = place.quotient;
    }
    return offsets;
  }
};

// All dimensions except the given ones, minor first.
inline Walk walk(const Movement& movement, std::initializer_list<const Dim*> except) {
  Walk walk;
  for (auto dim = movement.dims.rbegin(); dim != movement.dims.rend(); ++dim) {
    if (std::find(except.begin(), except.end(), &*dim) == except.end()) walk.push(*dim);
  }
  return walk;
}

}  // namespace transpose
}  // namespace JAX_GPUOPS_NAMESPACE
