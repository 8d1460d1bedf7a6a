// Reductions over the values of a thread, and over the lanes of a group, a warp and a block.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/cuda.h"
#include "core/numeric.h"

namespace JAX_GPUOPS_NAMESPACE {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kFullWarp = 0xffffffffu;
inline constexpr int kMaxWarpsPerBlock = 32;

struct Add {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};

struct Multiply {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a * b;
  }
};

struct Maximum {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return maximum(a, b);
  }
};

// Ignores NaN, which Maximum keeps.
struct Largest {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return fmax(a, b);
  }
};

struct Minimum {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return minimum(a, b);
  }
};

// The value of the lane whose number differs in the bits of `distance`. Overload it for a struct,
// which must be exchanged member by member, in the struct's namespace.
template <class T>
__device__ inline T shuffle_xor(T value, int distance) {
  return __shfl_xor_sync(kFullWarp, value, distance);
}

// Combines the values of each aligned group of kLanes lanes; every lane gets the result. The whole
// warp must call it. The xor pattern adds in the same order in every lane, so all lanes agree to
// the bit.
template <int kLanes, class T, class Combine>
__device__ inline T group_reduce(T value, Combine combine) {
  static_assert(kLanes > 0 && kLanes <= kWarpSize && (kLanes & (kLanes - 1)) == 0,
                "groups are aligned powers of two, or the xor pattern would leave them");
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value = combine(value, shuffle_xor(value, distance));
  }
  return value;
}

// Maps a float to an integer with the same order, and back. A NaN is beyond infinity, on the side
// of its sign.
__device__ inline int ordered_bits(float value) {
  const int bits = __float_as_int(value);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
__device__ inline float from_ordered_bits(int bits) {
  return __int_as_float(bits ^ ((bits >> 31) & 0x7fffffff));
}

// group_reduce() to the largest value. For a whole warp there is an instruction, which takes
// integers: there a NaN may win, which is ignored elsewhere.
template <int kLanes, class A>
__device__ inline A group_largest(A value) {
  if constexpr (kLanes == kWarpSize && std::is_same_v<A, float>) {
    return from_ordered_bits(__reduce_max_sync(kFullWarp, ordered_bits(value)));
  } else {
    return group_reduce<kLanes>(value, Largest{});
  }
}

// group_reduce() of all lanes of a warp for Maximum or Minimum, by an instruction where there is
// one: NaN wins.
template <class Extreme, class A>
__device__ inline A warp_extreme(A value) {
  constexpr bool kMaximum = std::is_same_v<Extreme, Maximum>;
  static_assert(kMaximum || std::is_same_v<Extreme, Minimum>);
  const auto extreme = [](int bits) {
    return kMaximum ? __reduce_max_sync(kFullWarp, bits) : __reduce_min_sync(kFullWarp, bits);
  };
  if constexpr (std::is_same_v<A, float>) {
    constexpr int kBeyondAll = kMaximum ? 0x7fffffff : ~0x7fffffff;
    return from_ordered_bits(extreme(value == value ? ordered_bits(value) : kBeyondAll));
  } else if constexpr (std::is_same_v<A, int>) {
    return extreme(value);
  } else {
    return group_reduce<kWarpSize>(value, Extreme{});
  }
}

// The smallest of a warp's integers, none of which is negative.
__device__ inline std::int64_t warp_smallest(std::int64_t value) {
  const auto high = static_cast<unsigned>(value >> 32);
  const unsigned smallest = __reduce_min_sync(kFullWarp, high);
  const unsigned low = high == smallest ? static_cast<unsigned>(value) : ~0u;
  return static_cast<std::int64_t>(smallest) << 32 | __reduce_min_sync(kFullWarp, low);
}

__device__ inline int warp_smallest(int value) {
  return static_cast<int>(__reduce_min_sync(kFullWarp, static_cast<unsigned>(value)));
}

// group_reduce() for a number of lanes known at run time, up to kMost, which are `stride` apart,
// another power of two.
template <int kMost = kWarpSize, class T, class Combine>
__device__ inline T group_reduce(T value, Combine combine, int lanes, int stride = 1) {
  if constexpr (std::is_arithmetic_v<T>) {
    // Not a loop, whose branches would take as long as the shuffles.
#pragma unroll
    for (int distance = kMost / 2; distance > 0; distance /= 2) {
      if (distance < lanes) value = combine(value, shuffle_xor(value, distance * stride));
    }
  } else {
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      value = combine(value, shuffle_xor(value, distance * stride));
    }
  }
  return value;
}

template <class T, class Combine>
__device__ inline T warp_reduce(T value, Combine combine) {
  return group_reduce<kWarpSize>(value, combine);
}

// Combines `terms` in pairs: a sum's error then grows with the logarithm of their number. Not by a
// loop over the halves: if there are four or more, the compiler does not unroll it, and keeps the
// terms in local memory.
template <class Combine, int kCount, class A>
__device__ __forceinline__ A tree(A (&terms)[kCount]) {
  static_assert((kCount & (kCount - 1)) == 0, "a tree of halves needs a power of two");
  if constexpr (kCount == 1) {
    return terms[0];
  } else {
    A lower[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) lower[i] = Combine{}(terms[i], terms[i + kCount / 2]);
    return tree<Combine>(lower);
  }
}

// Combines the values of all threads of a block of whole warps; every thread gets the result.
// `scratch` is shared memory of kMaxWarpsPerBlock elements. It may be used again at once: the
// first barrier keeps a fast warp from overwriting what a slow one still reads.
template <class T, class Combine>
__device__ inline T block_reduce(T value, T identity, Combine combine, T* scratch) {
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  value = warp_reduce(value, combine);
  __syncthreads();
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  return warp_reduce(lane < warps ? scratch[lane] : identity, combine);
}

}  // namespace JAX_GPUOPS_NAMESPACE
