// Packs: several neighbouring elements moved by one instruction, and walks over a row in packs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/cuda.h"
#include "core/dtype.h"

namespace JAX_GPUOPS_NAMESPACE {

// kSize elements that load and store together; 16 bytes is the widest single access.
template <class T, int kSize>
struct alignas(sizeof(T) * kSize < 16 ? sizeof(T) * kSize : 16) Pack {
  static_assert((kSize & (kSize - 1)) == 0, "the size of a pack is a power of two");
  T element[kSize];
};

// The type that so many bytes move as.
template <int kBytes>
struct WordOf;
template <>
struct WordOf<1> {
  using type = std::uint8_t;
};
template <>
struct WordOf<2> {
  using type = std::uint16_t;
};
template <>
struct WordOf<4> {
  using type = std::uint32_t;
};
template <>
struct WordOf<8> {
  using type = std::uint64_t;
};
template <>
struct WordOf<16> {
  using type = uint4;
};

// Read and write a pack, by one instruction if it has no more than 16 bytes. Assigning a Pack would
// copy its elements, and the compiler may make a store of each.
template <int kSize, class T>
__device__ inline Pack<T, kSize> read_pack(const T* from) {
  if constexpr (sizeof(Pack<T, kSize>) > 16) {
    return *reinterpret_cast<const Pack<T, kSize>*>(from);
  } else {
    using Word = typename WordOf<sizeof(Pack<T, kSize>)>::type;
    return __builtin_bit_cast(Pack<T, kSize>, *reinterpret_cast<const Word*>(from));
  }
}

template <int kSize, class T>
__device__ inline void write_pack(const Pack<T, kSize>& pack, T* to) {
  if constexpr (sizeof(Pack<T, kSize>) > 16) {
    *reinterpret_cast<Pack<T, kSize>*>(to) = pack;
  } else {
    using Word = typename WordOf<sizeof(Pack<T, kSize>)>::type;
    *reinterpret_cast<Word*>(to) = __builtin_bit_cast(Word, pack);
  }
}

// How many elements of T one lane moves at a time when the address allows it.
template <class T>
inline constexpr int kWidestPack = 16 / sizeof(T);

// Conversions to and from the type that kernels compute in.
template <class T>
__host__ __device__ inline Accumulator<T> widen(T value) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half2float(value);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __bfloat162float(value);
  } else {
    return value;
  }
}

template <class T>
__host__ __device__ inline T narrow(Accumulator<T> value) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(value);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    return value;
  }
}

template <class T, int kSize>
__device__ inline void widen(const Pack<T, kSize>& pack, Accumulator<T> (&to)[kSize]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && kSize % 2 == 0) {
    // A bfloat16 is the upper half of a float: one instruction for each of a pair.
    struct Pairs {
      std::uint32_t pair[kSize / 2];
    };
    const auto pairs = __builtin_bit_cast(Pairs, pack);
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) {
      to[2 * i] = __builtin_bit_cast(float, pairs.pair[i] << 16);
      to[2 * i + 1] = __builtin_bit_cast(float, pairs.pair[i] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) to[i] = widen(pack.element[i]);
  }
}

template <int kSize, class T>
__device__ inline void load(const T* from, Accumulator<T> (&to)[kSize]) {
  widen(read_pack<kSize>(from), to);
}

template <int kSize, class T>
__device__ inline void store(const Accumulator<T> (&from)[kSize], T* to) {
  Pack<T, kSize> pack;
#pragma unroll
  for (int i = 0; i < kSize; ++i) pack.element[i] = narrow<T>(from[i]);
  write_pack(pack, to);
}

// True if packs of kSize may be read at `pointer`.
template <int kSize, class T>
__host__ __device__ inline bool is_aligned(const T* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % alignof(Pack<T, kSize>) == 0;
}

// The number of elements from `pointer` up to the next address that packs of kSize may be read at.
// A row of odd length starts at any phase, so each row has a head of its own.
template <int kSize, class T>
__device__ inline int elements_to_alignment(const T* pointer) {
  constexpr int kAlignment = alignof(Pack<T, kSize>);
  const int past = static_cast<int>(reinterpret_cast<std::uintptr_t>(pointer) % kAlignment);
  return past == 0 ? 0 : (kAlignment - past) / static_cast<int>(sizeof(T));
}

template <int kSize>
using Width = std::integral_constant<int, kSize>;

// Walks columns [0, columns) of the row at `row` with `threads` threads of which the caller is
// `thread`: a scalar head up to the first aligned pack, aligned packs, and a scalar tail.
//
//     row ->  h h h | P P P P | P P P P | ... | P P P P | t t
//
// Calls visit(column, Width<w>{}), w being 1 or kSize; each column is visited by one thread, and
// each thread visits its columns in ascending order.
template <int kSize, class T, class Visit>
__device__ inline void visit_packed(const T* row, std::int64_t columns, int thread, int threads,
                                    Visit&& visit) {
  std::int64_t head = elements_to_alignment<kSize>(row);
  if (head > columns) head = columns;
  for (std::int64_t column = thread; column < head; column += threads) visit(column, Width<1>{});
  const std::int64_t packs = (columns - head) / kSize;
#pragma unroll 4
  for (std::int64_t pack = thread; pack < packs; pack += threads) {
    visit(head + pack * kSize, Width<kSize>{});
  }
  for (std::int64_t column = head + packs * kSize + thread; column < columns; column += threads) {
    visit(column, Width<1>{});
  }
}

}  // namespace JAX_GPUOPS_NAMESPACE
