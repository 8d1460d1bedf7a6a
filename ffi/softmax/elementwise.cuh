// softmax, algorithm `elementwise`: the gradients of logsumexp and cross entropy. In
// p = exp(scale * (x - maximum)) / sum, everything except x is known per row, so there is no
// reduction. One read and one write; y may be x itself.
//
// The kernel of this file is for rows along the last axis, in packs; elementwise_columns.cuh has
// the one for all other rows.
#pragma once

#include "softmax/elementwise_columns.cuh"
#include "softmax/functions.cuh"
#include "softmax/launcher.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// Blocks per multiprocessor: as many as saturate the memory bandwidth, where registers allow it
// without spills.
template <class T, RowLayout kLayout>
inline constexpr int kElementwiseBlocks = sizeof(T) < 8 && kLayout == RowLayout::kAligned ? 6 : 1;

// Writes the results of a thread's packs to their positions in y. `first`: the row's pack with
// which `slice` begins.
template <class T, RowLayout kLayout>
__device__ __forceinline__ void write_gradient(
    const KernelArgs<T>& args, const RowGradient<T>& gradient, const Row<T, kLayout>& row,
    std::int64_t first, const ThreadSlice<T, kLayout>& slice,
    const RegisterPack<T, kWidestPack<T>> (&packs)[kElementwisePacks]) {
  using A = Accumulator<T>;
  constexpr int kPack = kWidestPack<T>;
  // The label's position, or one that no element has.
  const std::int64_t distance = gradient.label() - (first * kPack - row.phase);
  const int target = gradient.label() >= 0 && distance >= 0 ? clamped_to_int(distance) : -1;
  slice.template write<kElementwisePacks>(args, [&](int p) {
    A x[kPack];
    widen(pack_at(packs, p), x);
#pragma unroll
    for (int i = 0; i < kPack; ++i) x[i] = gradient(x[i]);
    if constexpr (kHasMask<kLayout>) {
      if (!gradient.is_regular()) {
        const unsigned kept = slice.kept(args, p);
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          if ((kept >> i & 1) == 0) x[i] = RowGradient<T>::left_out();
        }
      }
    }
    const int place = target - slice.position(p, 0);
    if (place >= 0 && place < kPack) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        if (i == place) x[i] -= gradient.cotangent();
      }
    }
    return narrow<T>(x);
  });
}

// `lanes` threads, a divisor of the block's, process one of the `steps` steps of a row.
template <class T, RowLayout kLayout>
__global__ void __launch_bounds__(kElementwiseThreads, kElementwiseBlocks<T, kLayout>)
    elementwise_kernel(const __grid_constant__ KernelArgs<T> args, int lanes, Divisor steps) {
  constexpr int kPack = kWidestPack<T>;
  const int lane = threadIdx.x % lanes;
  const int rows_of_block = kElementwiseThreads / lanes;
  const T fill = narrow<T>(ForwardFunctions::fill(args));

  // Neighbouring blocks take neighbouring steps of the same rows.
  const std::uint32_t group = steps.quotient(blockIdx.x);
  const std::int64_t number = std::int64_t{group} * rows_of_block + threadIdx.x / lanes;
  if (number >= args.rows.count) return;
  const std::int64_t first =
      std::int64_t{blockIdx.x - group * steps.divisor} * lanes * kElementwisePacks + lane;
  const Row<T, kLayout> row(args, number);
  const ThreadSlice<T, kLayout> slice(args, row, first, row.packs, lanes);
  RegisterPack<T, kPack> pack[kElementwisePacks];
  slice.read(args, slice.operand(args.x, args.x + slice.begin(), fill, pack));
  // Arrays with one element per row are read here, when the loads of the packs are already in
  // flight.
  const RowGradient<T> gradient(args, number);
  write_gradient(args, gradient, row, first, slice, pack);
}

template <class T>
void launch_elementwise(const Call& call) {
  if (call.config.layout == RowLayout::kStrided) return launch_elementwise_columns<T>(call);
  dispatch_packed_layout(call, [&](auto layout) {
    launch_kernel<elementwise_kernel<T, layout>>(call.queue, launch_shape(call),
                                                 kernel_args<T>(call), call.config.lanes,
                                                 Divisor(call.config.steps));
  });
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
