// The gradients of logsumexp and cross entropy: of p = exp(scale * (x - maximum)) / sum all but x
// is known, so no element waits for another. One read and one write; y may be x itself.
#pragma once

#include "softmax/fragment.cuh"
#include "softmax/launcher.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// Blocks on a multiprocessor: as many as memory's pipe takes, where registers allow it without
// spills.
template <class T, RowLayout kLayout>
inline constexpr int kElementwiseBlocks = sizeof(T) < 8 && kLayout == RowLayout::kAligned ? 6 : 1;

// From the elements of a row to their results, and back to where they came from.
template <class T, RowLayout kLayout>
class RowGradient {
 public:
  using A = Accumulator<T>;
  static constexpr int kPack = kWidestPack<T>;

  __device__ __forceinline__ RowGradient(const KernelArgs<T>& args, std::int64_t number)
      : label_(has_labels(args.function) ? args.label(number) : -1),
        cotangent_(args.g[number] * args.scale),
        weight_(cotangent_) {
    const A maximum = args.maximum[number];
    // Of a row whose logsumexp is infinite, this and its powers make what JAX does: inf / inf and
    // 0 / 0 are NaN, and finite elements beside inf weigh 0.
    const A log_sum = args.log_sum[number];
    const A inverse_sum = exponential_for<T>(-log_sum);
    const Exponents<T> exponents(args.function, args.scale);
    regular_ = is_finite(log_sum) && is_finite(cotangent_);
    // Lifted as in softmax: p may be a subnormal number.
    const A lift = Exponents<T>::kBaseTwo && is_finite(log_sum) ? Exponents<T>::kLift : 0;
    power_ = exponents.powers(exponents.scaled(maximum), lift);
    if constexpr (Exponents<T>::kBaseTwo) {
      // The power of the maximum is 1, but for the lift and what the anchor was rounded by.
      factor_ = inverse_sum * power_of_two(-power_.exponent(maximum));
    } else {
      factor_ = 1;
      weight_ *= inverse_sum;
    }
  }

  __device__ __forceinline__ void write(
      const KernelArgs<T>& args, const Row<T, kLayout>& row, std::int64_t first,
      const ThreadSlice<T, kLayout>& slice,
      const RegisterPack<T, kPack> (&packs)[kElementwisePacks]) const {
    // The label's position, or one that no element has.
    const std::int64_t distance = label_ - (first * kPack - row.phase);
    const int target = label_ >= 0 && distance >= 0 ? clamped_to_int(distance) : -1;
    slice.template write<kElementwisePacks>(args, [&](int p) {
      A x[kPack];
      widen(pack_at(packs, p), x);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        x[i] = power_(x[i]) * factor_ * weight_;
      }
      if constexpr (kHasMask<kLayout>) {
        if (!regular_) replace_unkept(args, slice, p, x);
      }
      const int place = target - slice.position(p, 0);
      if (place >= 0 && place < kPack) {
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          if (i == place) x[i] -= cotangent_;
        }
      }
      return narrow<T>(x);
    });
  }

 private:
  // Masked elements weigh 0, and are told from others where the row's weights are not finite.
  __device__ __forceinline__ static void replace_unkept(const KernelArgs<T>& args,
                                                        const ThreadSlice<T, kLayout>& slice, int p,
                                                        A (&x)[kPack]) {
    const unsigned kept = slice.kept(args, p);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if ((kept >> i & 1) == 0) x[i] = A(0);
    }
  }

  std::int64_t label_;
  A cotangent_;
  A weight_;
  typename Exponents<T>::Powers power_;
  A factor_;  // apart from the weight, which may be a subnormal number
  bool regular_;
};

// `lanes` threads, a divisor of the block's, take a stretch of a row, of which each row has
// `steps`.
template <class T, RowLayout kLayout>
__global__ void __launch_bounds__(kElementwiseThreads, kElementwiseBlocks<T, kLayout>)
    elementwise_kernel(const __grid_constant__ KernelArgs<T> args, int lanes, Divisor steps) {
  using A = Accumulator<T>;
  constexpr int kPack = kWidestPack<T>;
  const int lane = threadIdx.x % lanes;
  const int rows_of_block = kElementwiseThreads / lanes;
  const T fill = narrow<T>(args.scale < 0 ? infinity<A>() : -infinity<A>());

  // Stretches of the same row come one after the other, as memory likes it.
  const std::uint32_t group = steps.quotient(blockIdx.x);
  const std::int64_t number = std::int64_t{group} * rows_of_block + threadIdx.x / lanes;
  if (number >= args.rows.count) return;
  const std::int64_t first =
      std::int64_t{blockIdx.x - group * steps.divisor} * lanes * kElementwisePacks + lane;
  const Row<T, kLayout> row(args, number);
  const ThreadSlice<T, kLayout> slice(args, row, first, row.packs, lanes);
  RegisterPack<T, kPack> pack[kElementwisePacks];
  slice.read(args, args.x, args.x + slice.begin(), fill, pack);
  // What there is one of for each row is read here, when the packs are already on their way.
  const RowGradient<T, kLayout> gradient(args, number);
  gradient.write(args, row, first, slice, pack);
}

template <class T>
void launch_elementwise(const Call& call) {
  dispatch_value<RowLayout::kAligned, RowLayout::kMasked, RowLayout::kUnaligned,
                 RowLayout::kMaskedUnaligned, RowLayout::kStrided>(
      call.config.layout, [&](auto layout) {
        launch_kernel<elementwise_kernel<T, layout>>(call.queue, launch_shape(call),
                                                     kernel_args<T>(call), call.config.lanes,
                                                     Divisor(call.config.steps));
      });
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
