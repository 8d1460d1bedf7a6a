// Masks: boolean arrays that broadcast to an array of rows, and say which elements take part.
#pragma once

#include <cstdint>

namespace JAX_GPUOPS_NAMESPACE {

// One byte for each of the mask's own elements. Row r begins at the sum of digit[d] * stride[d],
// where the digits are those of r in mixed radix `size`.
struct Mask {
  static constexpr int kMaxDims = 4;
  const std::uint8_t* data = nullptr;  // none: all elements take part
  std::int64_t column_stride = 0;
  int dims = 0;
  std::int64_t size[kMaxDims] = {};  // the last dim first
  std::int64_t stride[kMaxDims] = {};
};

}  // namespace JAX_GPUOPS_NAMESPACE
