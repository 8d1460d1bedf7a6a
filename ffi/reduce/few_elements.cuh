// Folds of a thread that reduces few elements of each row, with few instructions for each.
//
// Sums need no compensation: they have few terms, in trees. argmax and argmin look for the best
// element and its position, and only if that is NaN for the first NaN, by reading the row again.
// Their elements, and those of max and min, are compared in pairs if they have 16 bits: one
// instruction each for the better values, for which half is better, and for the positions.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "core/cuda.h"
#include "core/vector.h"
#include "reduce/reducer.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

// An element that changes no result.
template <class Reducer>
__device__ inline typename Reducer::Element absent_element() {
  using Element = typename Reducer::Element;
  if constexpr (kIsIndexed<typename Reducer::Partial>) {
    return narrow<Element>(Reducer::identity().value);
  } else {
    return narrow<Element>(Reducer::identity());
  }
}

// ---- One row ----

// How a thread folds the elements of a row.
template <class Reducer, bool = kIsIndexed<typename Reducer::Partial>>
struct ShortFold {
  using Partial = typename Reducer::Partial;
  using Combine = typename Reducer::Combine;

  Partial partial = Reducer::identity();

  // Elements of kCount columns: first, first + step, ...
  template <int kCount>
  __device__ void add(Partial (&value)[kCount], int, int) {
    partial = Combine{}(partial, tree<Combine>(value));
  }
};

// argmax and argmin. A thread that finds nothing better than an absent element keeps the index 0:
// another thread of the row finds something better, or none does, and then 0 is right.
template <class Reducer>
struct ShortFold<Reducer, true> {
  using Partial = typename Reducer::Partial;
  using Value = decltype(Partial::value);

  Partial partial = {Reducer::identity().value, 0};

  template <int kCount>
  __device__ void add(const Accumulator<typename Reducer::Element> (&value)[kCount], int first,
                      int step) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const auto each = static_cast<Value>(value[i]);
      const Value best = typename Reducer::Combine::Best{}(partial.value, each);
      if (best != partial.value) partial.index = first + i * step;
      partial.value = best;
    }
  }

  // What has been folded since `before` was counted from column `first` on.
  __device__ void count_from(int first, const ShortFold& before) {
    const bool is_new = partial.value != before.partial.value;
    partial.index = is_new ? first + partial.index : before.partial.index;
  }
};

// ---- Pairs of 16-bit floats in a word ----

// Whether elements of a reducer are compared in pairs.
template <class Reducer>
inline constexpr bool kComparesPairs =
    sizeof(typename Reducer::Element) == 2 &&
    std::is_same_v<Accumulator<typename Reducer::Element>, float> &&
    (kIsIndexed<typename Reducer::Partial> || std::is_same_v<typename Reducer::Combine, Maximum> ||
     std::is_same_v<typename Reducer::Combine, Minimum>);

// max or min of floats of T, and which of two is better: in each half of a word.
template <class T, bool kMaximum>
struct PairOrder {
#ifdef JAX_GPUOPS_INTERPRET
  static std::uint32_t best(std::uint32_t a, std::uint32_t b) {
    const auto [x, y] = std::pair(halves(a), halves(b));
    const auto of = [&](int i) { return kMaximum ? maximum(x[i], y[i]) : minimum(x[i], y[i]); };
    return pair_of(narrow<T>(of(0)), narrow<T>(of(1)));
  }

  // All bits of a half, if a's is better than b's, or none. NaN is not better.
  static std::uint32_t better(std::uint32_t a, std::uint32_t b) {
    const auto [x, y] = std::pair(halves(a), halves(b));
    const auto is_better = [&](int i) { return kMaximum ? x[i] > y[i] : x[i] < y[i]; };
    return (is_better(0) ? 0x0000ffffu : 0) | (is_better(1) ? 0xffff0000u : 0);
  }

 private:
  static std::array<float, 2> halves(std::uint32_t word) {
    float values[2];
    widen(RegisterPack<T, 2>{{word}}, values);
    return {values[0], values[1]};
  }
#else
  __device__ static std::uint32_t best(std::uint32_t a, std::uint32_t b) {
    const Pair result = kMaximum ? __hmax2_nan(pair(a), pair(b)) : __hmin2_nan(pair(a), pair(b));
    std::uint32_t word;
    std::memcpy(&word, &result, sizeof(word));
    return word;
  }

  // All bits of a half, if a's is better than b's, or none. NaN is not better.
  __device__ static std::uint32_t better(std::uint32_t a, std::uint32_t b) {
    return kMaximum ? __hgt2_mask(pair(a), pair(b)) : __hlt2_mask(pair(a), pair(b));
  }

 private:
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

  __device__ static Pair pair(std::uint32_t word) {
    Pair result;
    std::memcpy(&result, &word, sizeof(word));
    return result;
  }
#endif
};

// The best elements in each half of the words that a thread folds, and for argmax and argmin the
// positions of these words, below 2^16.
template <class Reducer>
struct PairFold {
  using T = typename Reducer::Element;
  using Partial = typename Reducer::Partial;
  static constexpr bool kIndexed = kIsIndexed<Partial>;

  std::uint32_t best = pair_of(absent_element<Reducer>(), absent_element<Reducer>());
  std::uint32_t positions = 0;

  __device__ void add(std::uint32_t word, int position) {
    if constexpr (kIndexed) {
      using Order = PairOrder<T, std::is_same_v<typename Reducer::Combine::Best, Maximum>>;
      const std::uint32_t better = Order::better(word, best);
      positions =
          (better & (static_cast<std::uint32_t>(position) * 0x10001u)) | (~better & positions);
      best = Order::best(word, best);
    } else {
      using Order = PairOrder<T, std::is_same_v<typename Reducer::Combine, Maximum>>;
      best = Order::best(word, best);
    }
  }

  // What has been folded since `before` was counted from position `first` on.
  __device__ void count_from(int first, const PairFold& before) {
    if constexpr (kIndexed) {
      using Order = PairOrder<T, std::is_same_v<typename Reducer::Combine::Best, Maximum>>;
      const std::uint32_t better = Order::better(best, before.best);
      positions += static_cast<std::uint32_t>(first) * 0x10001u;
      positions = (better & positions) | (~better & before.positions);
    }
  }

  // The best element of a half, and the position of its word as its index.
  __device__ Partial of_half(int half) const {
    float values[2];
    widen(RegisterPack<T, 2>{{best}}, values);
    if constexpr (kIndexed) {
      return {values[half], static_cast<int>(half == 0 ? positions & 0xffff : positions >> 16)};
    } else {
      return values[half];
    }
  }
};

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
