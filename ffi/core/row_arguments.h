// The arguments that handlers of ops on rows share: an array of rows, and a mask.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/handler.h"
#include "core/mask.h"

namespace JAX_GPUOPS_NAMESPACE {

// The sizes of an array (leading..., columns) whose last `inner_dims` leading dims come after the
// columns in memory: the caller chose a layout instead of a transpose.
struct RowSizes {
  std::int64_t outer;
  std::int64_t columns;
  std::int64_t inner;
};

inline std::size_t first_inner_dim(ffi::Span<const std::int64_t> dims, std::int64_t inner_dims) {
  require(dims.size() >= 1, "x must have at least one dimension");
  require(inner_dims >= 0 && inner_dims < static_cast<std::int64_t>(dims.size()),
          "inner_dims must be less than the rank of x");
  return dims.size() - 1 - static_cast<std::size_t>(inner_dims);
}

inline RowSizes row_sizes(ffi::Span<const std::int64_t> dims, std::int64_t inner_dims) {
  const std::size_t first_inner = first_inner_dim(dims, inner_dims);
  const std::size_t last = dims.size() - 1;
  return {product(dims, 0, first_inner), dims[last], product(dims, first_inner, last)};
}

// The mask `where` of an array with dimensions `dims`, to which it broadcasts dim by dim; `data` is
// its memory. Neighbouring dims that the mask has, or that it lacks, are merged.
inline Mask row_mask(const ffi::AnyBuffer& where, const void* data,
                     ffi::Span<const std::int64_t> dims, std::int64_t inner_dims) {
  const auto own = where.dimensions();
  require(where.element_type() == ffi::PRED, "where must have dtype bool");
  require(own.size() == dims.size(), "where must have the rank of x");
  Mask mask;
  mask.data = static_cast<const std::uint8_t*>(data);
  std::int64_t stride = 1;
  const auto add = [&](std::size_t d) {  // from the last dim in memory to the first
    require(own[d] == 1 || own[d] == dims[d], "where must broadcast to x");
    const std::int64_t own_stride = own[d] == 1 ? 0 : stride;
    stride *= own[d];
    return own_stride;
  };
  const auto add_leading = [&](std::size_t d) {
    const std::int64_t own_stride = add(d);
    if (dims[d] == 1) return;
    const int previous = mask.dims - 1;
    if (previous >= 0 && own_stride == mask.stride[previous] * mask.size[previous]) {
      mask.size[previous] *= dims[d];
      return;
    }
    require(mask.dims < Mask::kMaxDims,
            "where alternates too often between full dimensions and those of size 1; broadcast it "
            "to x");
    mask.size[mask.dims] = dims[d];
    mask.stride[mask.dims] = own_stride;
    ++mask.dims;
  };
  const std::size_t first_inner = first_inner_dim(dims, inner_dims);
  const std::size_t last = dims.size() - 1;
  for (std::size_t d = last; d > first_inner; --d) add_leading(d - 1);
  mask.column_stride = add(last);
  for (std::size_t d = first_inner; d > 0; --d) add_leading(d - 1);
  return mask;
}

}  // namespace JAX_GPUOPS_NAMESPACE
