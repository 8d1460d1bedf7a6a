// transpose, algorithm `copy`: words move without shared memory, in the order of the result.
//
// Writes of neighbouring lanes are coalesced. So are reads where runs of words stay contiguous:
//
//     operand   | run a | run b | run c | ...        result   | run a | run c | ...
//                                                               lanes   lanes
//
// Where the operand's minor dimension is only near in the result, as in images whose channels
// become the minor dimension, the other words of a sector are read by the same block, from the L1
// cache.
//
// Words of a few bytes take more instructions than a copy of them may, if each offset is computed
// in 64 bits by a loop over the dimensions. So arrays of less than 2^31 words and of few dimensions
// have kernels of their own.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "core/dispatch.h"
#include "core/launch.h"
#include "transpose/index.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace transpose {

// The dimensions of a movement in the order of the result, minor first.
inline std::vector<Dim> dims_of_result(const Movement& movement) {
  std::vector<Dim> dims = movement.dims;
  std::sort(dims.begin(), dims.end(),
            [](const Dim& a, const Dim& b) { return a.out_stride < b.out_stride; });
  return dims;
}

// Where the word with an index in the order of the result is in the operand, and where in the
// result. The result may have more words than are moved by one launch.
struct LongGather {
  Walk walk;

  explicit LongGather(const std::vector<Dim>& dims) {
    for (const Dim& dim : dims) walk.push(dim);
  }

  __device__ std::int64_t in(std::uint32_t index) const { return walk.offsets(index).in; }
  __device__ std::int64_t out(std::uint32_t index) const { return walk.offsets(index).out; }
};

// The same for up to kDims dimensions, if one launch moves all words.
template <int kDims>
struct ShortGather {
  Divisor size[kDims - 1];  // the last dimension has what is left of an index
  std::uint32_t stride[kDims] = {};

  explicit ShortGather(const std::vector<Dim>& dims) {
    for (std::size_t i = 0; i < dims.size(); ++i) {
      if (i < kDims - 1) size[i] = Divisor(dims[i].size);
      stride[i] = static_cast<std::uint32_t>(dims[i].in_stride);
    }
  }

  __device__ std::uint32_t out(std::uint32_t index) const { return index; }
  __device__ std::uint32_t in(std::uint32_t index) const {
    std::uint32_t offset = 0;
#pragma unroll
    for (int i = 0; i < kDims - 1; ++i) {
      const Division place = size[i].divide(index);
      offset += place.remainder * stride[i];
      index = place.quotient;
    }
    return offset + index * stride[kDims - 1];
  }
};

template <class Word, class Gather>
__global__ void __launch_bounds__(kThreads)
    copy_kernel(const Word* __restrict__ x, Word* __restrict__ y, std::uint32_t words,
                const __grid_constant__ Gather gather) {
  const std::uint32_t first = blockIdx.x * kCopyBlockWords + threadIdx.x;
  Word word[kCopyWords];
#pragma unroll
  for (int i = 0; i < kCopyWords; ++i) {
    const std::uint32_t index = first + i * kThreads;
    if (index < words) word[i] = x[gather.in(index)];
  }
#pragma unroll
  for (int i = 0; i < kCopyWords; ++i) {
    const std::uint32_t index = first + i * kThreads;
    if (index < words) y[gather.out(index)] = word[i];
  }
}

template <class Word>
void launch_copy(const Call<Word>& call, const Config& config) {
  const auto launch = [&](const auto& gather) {
    const auto words = static_cast<std::uint32_t>(call.movement.words());
    launch_kernel<copy_kernel<Word, std::decay_t<decltype(gather)>>>(
        call.queue, {grid_extent(divide_up(words, kCopyBlockWords)), kThreads}, call.x, call.y,
        words, gather);
  };
  const std::vector<Dim> dims = dims_of_result(call.movement);
  if (config.dims == 0) return launch(LongGather(dims));
  dispatch_value<kFewestCopyDims, 3, 4, 5, kMostCopyDims>(
      config.dims, [&](auto most) { launch(ShortGather<most>(dims)); });
}

}  // namespace transpose
}  // namespace JAX_GPUOPS_NAMESPACE
