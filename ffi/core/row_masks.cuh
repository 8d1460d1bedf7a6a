// Masks as kernels on rows read them.
#pragma once

#include <cstdint>
#include <limits>

#include "core/cuda.h"
#include "core/integer.h"
#include "core/mask.h"

namespace JAX_GPUOPS_NAMESPACE {

// A mask as an argument of kernels.
class RowMasks {
 public:
  static constexpr bool kMasks = true;

  // The mask of one row: true for the columns that take part.
  struct Row {
    const std::uint8_t* data;
    std::int64_t stride;

    __device__ bool operator()(std::int64_t column) const { return data[column * stride] != 0; }
  };

  RowMasks(const Mask& mask, std::int64_t rows)
      : mask_(mask), is_small_(rows <= std::numeric_limits<std::int32_t>::max()) {
    for (int d = 0; d < mask.dims; ++d) by_size_[d] = Divisor(mask.size[d]);
  }

  __device__ Row of(std::int64_t row) const {
    const std::uint8_t* data = mask_.data;
#pragma unroll
    for (int d = 0; d < Mask::kMaxDims; ++d) {
      if (d == mask_.dims) break;
      // The index in the last dim is what is left. A 64-bit division takes long.
      const bool is_last = d + 1 == mask_.dims;
      const std::int64_t rest = is_last     ? 0
                                : is_small_ ? by_size_[d].quotient(static_cast<std::uint32_t>(row))
                                            : row / mask_.size[d];
      data += (row - rest * mask_.size[d]) * mask_.stride[d];
      row = rest;
    }
    return {data, mask_.column_stride};
  }

 private:
  Mask mask_;
  Divisor by_size_[Mask::kMaxDims];
  bool is_small_;
};

// In place of a mask where all elements take part: kernels compiled with it have no code for masks.
struct NoMasks {
  static constexpr bool kMasks = false;
  struct Row {};
  __device__ Row of(std::int64_t) const { return {}; }
};

}  // namespace JAX_GPUOPS_NAMESPACE
