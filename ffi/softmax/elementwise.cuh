// The gradients of logsumexp and cross entropy: p = exp(x - logsumexp(x)), which is known, so no
// element waits for another. One read and one write; y may be x itself.
#pragma once

#include "softmax/share.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

inline constexpr int kElementwiseThreads = 256;
inline constexpr int kElementwisePacks = 4;  // loads in flight

// From the elements of a row to their results, and back to where they came from.
template <class T, Kind kKind>
class RowGradient {
 public:
  using A = Accumulator<T>;
  static constexpr int kPack = kWidestPack<T>;

  __device__ __forceinline__ RowGradient(const Tensors<T>& tensors, std::int64_t number)
      : label_(has_labels(tensors.function) ? tensors.label(number) : -1),
        cotangent_(tensors.g[number] * tensors.scale),
        weight_(cotangent_) {
    const A lse = tensors.lse[number];
    const Exponents<T> exponents(tensors.function, tensors.scale);
    regular_ = is_finite(lse);
    // Lifted as in softmax: p may be a subnormal number.
    const bool lifted = regular_ && Exponents<T>::kBaseTwo;
    const A anchor = Exponents<T>::kBaseTwo ? A(lse * (Exponents<T>::kLog2E / 2)) : lse;
    power_ = exponents.powers(regular_ ? anchor : A(0), A(lifted ? Exponents<T>::kLift : 0));
    lowering_ = lifted ? A(0x1p-64f) : A(1);
    // A row whose logsumexp is infinite has the weights that JAX gives it: inf / inf and 0 / 0 are
    // NaN, and finite elements beside inf weigh 0.
    if (!regular_) weight_ = cotangent_ / exponential(lse);
    regular_ = regular_ && is_finite(weight_);
  }

  __device__ __forceinline__ void write(
      const Tensors<T>& tensors, const Row<T, kKind>& row, std::int64_t first,
      const Stretch<T, kKind>& stretch,
      const RegisterPack<T, kPack> (&packs)[kElementwisePacks]) const {
    // The label's position, or one that no element has.
    const std::int64_t distance = label_ - (first * kPack - row.phase);
    const int target = label_ >= 0 && distance >= 0 ? clamped_to_int(distance) : -1;
    stretch.template write<kElementwisePacks>(tensors, [&](int p) {
      A x[kPack];
      widen(pack_at(packs, p), x);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        x[i] = power_(x[i]) * lowering_ * weight_;
      }
      if constexpr (kHasMask<kKind>) {
        if (!regular_) replace_unkept(tensors, stretch, p, x);
      }
      const int place = target - stretch.position(p, 0);
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
  __device__ __forceinline__ static void replace_unkept(const Tensors<T>& tensors,
                                                        const Stretch<T, kKind>& stretch, int p,
                                                        A (&x)[kPack]) {
    const unsigned kept = stretch.kept(tensors, p);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if ((kept >> i & 1) == 0) x[i] = A(0);
    }
  }

  std::int64_t label_;
  A cotangent_;
  A weight_;
  typename Exponents<T>::Powers power_;
  A lowering_;
  bool regular_;
};

// `lanes` threads, a divisor of the block's, take a stretch of a row, of which each row has
// `steps`.
template <class T, Kind kKind>
__global__ void __launch_bounds__(kElementwiseThreads)
    elementwise_kernel(const __grid_constant__ Tensors<T> tensors, int lanes, Divisor steps) {
  using A = Accumulator<T>;
  constexpr int kPack = kWidestPack<T>;
  const int lane = threadIdx.x % lanes;
  const int rows_of_block = kElementwiseThreads / lanes;
  const T fill = narrow<T>(tensors.scale < 0 ? infinity<A>() : -infinity<A>());

  // Stretches of the same row come one after the other, as memory likes it.
  const std::uint32_t group = steps.quotient(blockIdx.x);
  const std::int64_t number = std::int64_t{group} * rows_of_block + threadIdx.x / lanes;
  if (number >= tensors.rows.count) return;
  const std::int64_t first =
      std::int64_t{blockIdx.x - group * steps.divisor} * lanes * kElementwisePacks + lane;
  const Row<T, kKind> row(tensors, number);
  const Stretch<T, kKind> stretch(tensors, row, first, row.packs, lanes);
  RegisterPack<T, kPack> pack[kElementwisePacks];
  stretch.read(tensors, tensors.x, tensors.x + stretch.begin(), fill, pack);
  // What there is one of for each row is read here, when the packs are already on their way.
  const RowGradient<T, kKind> gradient(tensors, number);
  gradient.write(tensors, row, first, stretch, pack);
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
