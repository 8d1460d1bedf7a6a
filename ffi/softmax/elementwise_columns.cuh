// softmax, algorithm `elementwise` where the elements of rows have a stride, or lie at any address:
// the gradients of logsumexp and cross entropy along an axis that is not the last, such as that of
// the classes of an image's pixels.
//
// A chunk of the axis, `stride` times `taken` elements of each row, has `stride` threads for each
// pack of rows that lie side by side. Neighbouring threads take neighbouring packs, so that a warp
// accesses `stride * inner` elements that are contiguous, however few rows lie side by side:
//
//                   inner ->
//     axis  thread  | 0  | 1  | 2  |          <- element 0 of 3 * kPack rows
//      |            | 3  | 4  | 5  |          <- element 1
//      v            | 0  | 1  | 2  |          <- element 2: stride is 2
//                   | 3  | 4  | 5  |          <- element 3: taken is 2
//                   | 6  | 7  | 8  |          <- element 4, of the next chunk
//
// The numbers of a row are read and computed once for all elements that a thread takes, kSteps of
// them at a time.
#pragma once

#include <cstdint>

#include "core/integer.h"
#include "softmax/functions.cuh"
#include "softmax/launcher.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// `packs`: side by side, of an element of the axis; `chunks`: of the axis. With a mask kPack is 1,
// since each row has its own mask.
template <class T, int kPack, bool kMasked>
__global__ void __launch_bounds__(kElementwiseThreads)
    elementwise_columns_kernel(const __grid_constant__ KernelArgs<T> args, WideDivisor packs,
                               int log2_stride, int taken, WideDivisor chunks) {
  static_assert(kPack == 1 || !kMasked);
  constexpr int kSteps = elementwise_steps(kPack, sizeof(T));
  using A = Accumulator<T>;
  const std::int64_t columns = args.rows.columns;
  const std::int64_t inner = args.rows.inner;
  const int stride = 1 << log2_stride;
  const WideDivision place =
      packs.divide(std::int64_t{blockIdx.x} * kElementwiseThreads + threadIdx.x);
  const WideDivision chunk = chunks.divide(place.quotient >> log2_stride);
  const std::int64_t side = place.remainder * kPack;
  const std::int64_t number = chunk.quotient * inner + side;  // of the thread's first row
  // Element k that the thread takes of a row is element first + k * stride.
  const int own = static_cast<int>(place.quotient) & (stride - 1);
  const std::int64_t first = chunk.remainder * taken * stride + own;
  if (number >= args.rows.count || first >= columns) return;
  // What is left of the chunk, and of the row, from `first` on.
  const std::int64_t left = columns - first;
  const int left_of_chunk = taken * stride - own;
  const int end = left < left_of_chunk ? static_cast<int>(left) : left_of_chunk;
  const std::int64_t begin = (chunk.quotient * columns + first) * inner + side;
  const std::int64_t hop = inner << log2_stride;

  RowMask<T> row_mask;
  if constexpr (kMasked) row_mask = RowMask<T>(args, number);
  RegisterPack<T, kPack> x[kSteps];
  std::uint8_t flags[kMasked ? kSteps : 1];  // not 0: the element takes part
  // Loads the elements from position `position` on, and their flags, before one is tested.
  const auto load = [&](int position) {
    const T* from = args.x + begin + (position >> log2_stride) * hop;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int at = position + (k << log2_stride);
      if (at >= end) break;
      x[k] = read_pack<kPack>(from);
      if constexpr (kMasked) {
        flags[k] = row_mask.flags() == nullptr ? std::uint8_t{1}
                                               : row_mask.flags()[(first + at) * row_mask.stride()];
      }
      from += hop;
    }
  };
  load(0);
  // Arrays with one element per row are read here, when the loads of the packs are already in
  // flight.
  RowGradient<T> gradients[kPack];
  int labels[kPack];  // counted from `first`
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    gradients[i] = RowGradient<T>(args, number + i);
    const std::int64_t label = gradients[i].label() - first;
    labels[i] = label >= 0 ? clamped_to_int(label) : -1;
  }
  int position = 0;
  T* to = args.y + begin;
#pragma unroll 1
  while (true) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int at = position + (k << log2_stride);
      if (at >= end) return;
      A results[kPack];
      widen(x[k], results);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        results[i] = gradients[i](results[i]);
        if constexpr (kMasked) {
          if (flags[k] == 0 || first + at >= row_mask.readable()) {
            results[i] = RowGradient<T>::left_out();
          }
        }
        if (at == labels[i]) results[i] -= gradients[i].cotangent();
      }
      write_global_pack(narrow<T>(results), to);
      to += hop;
    }
    position += kSteps << log2_stride;
    load(position);
  }
}

template <class T>
void launch_elementwise_columns(const Call& call) {
  const auto launch = [&](auto pack, auto masked) {
    launch_kernel<elementwise_columns_kernel<T, pack, masked>>(
        call.queue, launch_shape(call), kernel_args<T>(call),
        WideDivisor(call.problem.inner / pack), log2_of(call.config.lanes), call.config.packs,
        WideDivisor(call.config.steps));
  };
  if (call.problem.has_mask()) {
    launch(Constant<1>{}, Constant<true>{});
  } else if (call.config.pack == 1) {
    launch(Constant<1>{}, Constant<false>{});
  } else if constexpr (column_pack(sizeof(T)) > 1) {
    launch(Constant<column_pack(sizeof(T))>{}, Constant<false>{});
  }
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
