// softmax, algorithm `flat`: the gradients of logsumexp and cross entropy for rows without a mask.
//
// Everything except x is known per row, so each thread takes a pack of 16 bytes of the whole array,
// no matter where rows begin:
//
//     row  | 0             | 1             | 2             | 3          ...
//     pack | 0   | 1   | 2   | 3   | 4   | 5   | 6   | 7   | 8   | 9    ...
//
// So warps read and write whole lines of 128 bytes, and no lane is idle, for rows of any length.
// But a thread computes the numbers of a row for one pack, or of several rows for a pack that they
// share: with long rows, `elementwise`, whose threads take four packs of a row, executes fewer
// instructions.
#pragma once

#include <cstdint>
#include <cstring>

#include "softmax/functions.cuh"
#include "softmax/launcher.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// Replaces the elements of a pack, which begins with element `begin` of the array, by the results.
template <class T, int kPack>
__device__ __forceinline__ void replace_by_gradient(const KernelArgs<T>& args,
                                                    const Divisor& columns, std::uint32_t begin,
                                                    Accumulator<T> (&x)[kPack]) {
  const Division place = columns.divide(begin);
  const auto rows = static_cast<std::uint32_t>(args.rows.count);
  std::uint32_t row = place.quotient;
  int start = -static_cast<int>(place.remainder);  // the row's first element, counted in the pack
#pragma unroll 1
  do {
    const RowGradient<T> gradient(args, row);
    const int end = start + static_cast<int>(columns.divisor);
    const int label = gradient.label() < 0 ? -1 : start + static_cast<int>(gradient.label());
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      Accumulator<T> result = gradient(x[i]);
      if (i == label) result -= gradient.cotangent();
      if (i >= start && i < end) x[i] = result;
    }
    ++row;
    start = end;
  } while (start < kPack && row < rows);
}

template <class T>
__global__ void __launch_bounds__(kFlatThreads)
    flat_kernel(const __grid_constant__ KernelArgs<T> args, Divisor columns) {
  constexpr int kPack = kWidestPack<T>;
  const auto size = static_cast<std::uint32_t>(args.size);
  const std::uint32_t begin = (blockIdx.x * kFlatThreads + threadIdx.x) * kPack;
  if (begin >= size) return;
  const bool is_whole = begin + kPack <= size;

  RegisterPack<T, kPack> pack;
  if (is_whole) {
    pack = read_pack<kPack>(args.x + begin);
  } else {
    Pack<T, kPack> last{};
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if (begin + i < size) last.element[i] = args.x[begin + i];
    }
    std::memcpy(&pack, &last, sizeof(last));
  }

  Accumulator<T> x[kPack];
  widen(pack, x);
  replace_by_gradient(args, columns, begin, x);

  if (is_whole) {
    write_global_pack(narrow<T>(x), args.y + begin);
  } else {
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if (begin + i < size) args.y[begin + i] = narrow<T>(x[i]);
    }
  }
}

template <class T>
void launch_flat(const Call& call) {
  launch_kernel<flat_kernel<T>>(call.queue, launch_shape(call), kernel_args<T>(call),
                                Divisor(call.problem.columns));
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
