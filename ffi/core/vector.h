// Packs: several neighbouring elements moved by one instruction, and walks over a row in packs.
#pragma once

#include <math.h>  // NOLINT: unlike <cmath>, declares the float overloads globally

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/cuda.h"
#include "core/dtype.h"
#include "core/ptx/math.cuh"
#include "core/ptx/memory.cuh"

namespace JAX_GPUOPS_NAMESPACE {

// kSize elements that load and store together; 16 bytes is the widest single access.
template <class T, int kSize>
struct alignas(sizeof(T) * kSize < 16 ? sizeof(T) * kSize : 16) Pack {
  static_assert((kSize & (kSize - 1)) == 0, "the size of a pack is a power of two");
  T element[kSize];
};

// The type as which kBytes bytes are loaded and stored.
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

// A pack in 32-bit registers. The compiler would split a struct of smaller elements into a register
// for each as soon as a load or a replacement depends on a condition: twice the registers, an
// instruction for each element, and no load that is issued before the last one has arrived.
template <class T, int kSize>
struct alignas(alignof(Pack<T, kSize>)) RegisterPack {
  // Elements per register.
  static constexpr int kPer = sizeof(T) >= 4 || kSize == 1 ? 1
                              : kSize * sizeof(T) < 4      ? kSize
                                                           : 4 / sizeof(T);
  using Register = typename std::conditional_t<kPer == 1, Type<T>,
                                               WordOf<kPer* static_cast<int>(sizeof(T))>>::type;
  Register reg[kSize / kPer];
};

// Read and write a pack, by one instruction if it has no more than 16 bytes.
template <int kSize, class T>
__device__ inline RegisterPack<T, kSize> read_pack(const T* from) {
  using Result = RegisterPack<T, kSize>;
  if constexpr (sizeof(Result) > 16) {
    return *reinterpret_cast<const Result*>(from);
  } else {
    using Word = typename WordOf<sizeof(Result)>::type;
    return __builtin_bit_cast(Result, *reinterpret_cast<const Word*>(from));
  }
}

template <int kSize, class T>
__device__ inline void write_pack(const RegisterPack<T, kSize>& pack, T* to) {
  if constexpr (sizeof(pack) > 16) {
    *reinterpret_cast<RegisterPack<T, kSize>*>(to) = pack;
  } else {
    using Word = typename WordOf<sizeof(pack)>::type;
    *reinterpret_cast<Word*>(to) = __builtin_bit_cast(Word, pack);
  }
}

// write_pack() to global memory, always by one instruction: if only some packs are written, the
// compiler would store each register separately.
template <int kSize, class T>
__device__ inline void write_global_pack(const RegisterPack<T, kSize>& pack, T* to) {
  if constexpr (sizeof(pack) == 16 || sizeof(pack) == 8) {
    std::uint32_t words[sizeof(pack) / 4];
    std::memcpy(words, &pack, sizeof(pack));
    store_words(words, to);
  } else {
    write_pack(pack, to);
  }
}

// Pack i of those that a thread holds, for an i that need not be known at compile time: an index
// would move them from registers to local memory.
template <class T, int kSize, int kPacks>
__device__ inline RegisterPack<T, kSize> pack_at(const RegisterPack<T, kSize> (&packs)[kPacks],
                                                 int i) {
  RegisterPack<T, kSize> pack = packs[0];
#pragma unroll
  for (int p = 1; p < kPacks; ++p) {
    if (p == i) pack = packs[p];
  }
  return pack;
}

// How many elements of T one lane moves at a time when the address allows it.
template <class T>
inline constexpr int kWidestPack = sizeof(T) < 16 ? 16 / sizeof(T) : 1;

// Conversions to and from the type that kernels compute in.
template <class T>
__device__ inline Accumulator<T> widen(T value) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half2float(value);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return widen_bfloat16(value);
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

template <class T>
__device__ inline std::uint32_t pair_of(T low, T high) {
  std::uint16_t bits[2];
  std::memcpy(&bits[0], &low, sizeof(low));
  std::memcpy(&bits[1], &high, sizeof(high));
  return std::uint32_t{bits[1]} << 16 | bits[0];
}

template <class T, int kSize>
__device__ inline void widen(const RegisterPack<T, kSize>& pack, Accumulator<T> (&to)[kSize]) {
  constexpr int kPer = RegisterPack<T, kSize>::kPer;
  if constexpr (kPer == 1) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) to[i] = widen(pack.reg[i]);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    // A bfloat16 is the upper half of a float: one instruction for each of a pair.
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) {
      to[2 * i] = __builtin_bit_cast(float, pack.reg[i] << 16);
      to[2 * i + 1] = __builtin_bit_cast(float, pack.reg[i] & 0xffff0000u);
    }
  } else {
    Pack<T, kSize> elements;
    std::memcpy(&elements, &pack, sizeof(pack));
#pragma unroll
    for (int i = 0; i < kSize; ++i) to[i] = widen(elements.element[i]);
  }
}

template <class T, int kSize>
__device__ inline RegisterPack<T, kSize> narrow(const Accumulator<T> (&from)[kSize]) {
  RegisterPack<T, kSize> pack;
  constexpr int kPer = RegisterPack<T, kSize>::kPer;
  if constexpr (kPer == 1) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) pack.reg[i] = narrow<T>(from[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) {
      pack.reg[i] = pair_of(narrow<T>(from[2 * i]), narrow<T>(from[2 * i + 1]));
    }
  }
  return pack;
}

template <int kSize, class T>
__device__ inline RegisterPack<T, kSize> filled(T value) {
  RegisterPack<T, kSize> pack;
#pragma unroll
  for (auto& reg : pack.reg) {
    if constexpr (RegisterPack<T, kSize>::kPer == 1) {
      reg = value;
    } else {
      reg = pair_of(value, value);
    }
  }
  return pack;
}

// Replaces each element i for which keeps(i) is false by `fill`.
template <class T, int kSize, class Keeps>
__device__ inline void replace_unless(Keeps&& keeps, T fill, RegisterPack<T, kSize>& pack) {
  using Elements = RegisterPack<T, kSize>;
  const Elements filling = filled<kSize>(fill);
  if constexpr (Elements::kPer == 1) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (!keeps(i)) pack.reg[i] = filling.reg[i];
    }
  } else {
#pragma unroll
    for (int r = 0; r < kSize / 2; ++r) {
      const std::uint32_t low = keeps(2 * r) ? 0x0000ffffu : 0;
      const std::uint32_t high = keeps(2 * r + 1) ? 0xffff0000u : 0;
      pack.reg[r] = (pack.reg[r] & (low | high)) | (filling.reg[r] & ~(low | high));
    }
  }
}

// The same for flags, bytes of 0 and 1.
template <class T, int kSize>
__device__ inline void replace_unset(const RegisterPack<std::uint8_t, kSize>& flags, T fill,
                                     RegisterPack<T, kSize>& pack) {
  using Elements = RegisterPack<T, kSize>;
  if constexpr (sizeof(T) == 2 && kSize % 4 == 0) {
    const Elements filling = filled<kSize>(fill);
#pragma unroll
    for (int r = 0; r < kSize / 2; ++r) {
      // Bytes of 0 and 255, each of which is then doubled.
      const std::uint32_t mask =
          __byte_perm(flags.reg[r / 2] * 0xffu, 0, r % 2 == 0 ? 0x1100 : 0x3322);
      pack.reg[r] = (pack.reg[r] & mask) | (filling.reg[r] & ~mask);
    }
  } else {
    replace_unless(
        [&](int i) {
          constexpr int kPer = RegisterPack<std::uint8_t, kSize>::kPer;
          return (flags.reg[i / kPer] >> (8 * (i % kPer)) & 0xff) != 0;
        },
        fill, pack);
  }
}

// The larger of each two elements, or the smaller. A number wins against NaN.
template <bool kSmaller, class T, int kSize>
__device__ inline RegisterPack<T, kSize> extreme(const RegisterPack<T, kSize>& a,
                                                 const RegisterPack<T, kSize>& b) {
#ifndef JAX_GPUOPS_INTERPRET
  if constexpr (RegisterPack<T, kSize>::kPer == 2) {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    RegisterPack<T, kSize> result;
#pragma unroll
    for (int r = 0; r < kSize / 2; ++r) {
      Pair first;
      Pair second;
      std::memcpy(&first, &a.reg[r], sizeof(first));
      std::memcpy(&second, &b.reg[r], sizeof(second));
      const Pair better = kSmaller ? __hmin2(first, second) : __hmax2(first, second);
      std::memcpy(&result.reg[r], &better, sizeof(better));
    }
    return result;
  }
#endif
  Accumulator<T> x[kSize];
  Accumulator<T> y[kSize];
  widen(a, x);
  widen(b, y);
#pragma unroll
  for (int i = 0; i < kSize; ++i) x[i] = kSmaller ? fmin(x[i], y[i]) : fmax(x[i], y[i]);
  return narrow<T>(x);
}

template <int kSize, class T>
__device__ inline void load(const T* from, Accumulator<T> (&to)[kSize]) {
  widen(read_pack<kSize>(from), to);
}

template <int kSize, class T>
__device__ inline void store(const Accumulator<T> (&from)[kSize], T* to) {
  write_pack(narrow<T, kSize>(from), to);
}

// True if packs of kSize may be read at `pointer`.
template <int kSize, class T>
__host__ __device__ inline bool is_aligned(const T* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % alignof(Pack<T, kSize>) == 0;
}

// The number of elements from `pointer` up to the next address at which packs of kSize may be read.
// A row of odd length may start at any element, so each row has a head of its own.
template <int kSize, class T>
__device__ inline int elements_to_alignment(const T* pointer) {
  constexpr int kAlignment = alignof(Pack<T, kSize>);
  const int past = static_cast<int>(reinterpret_cast<std::uintptr_t>(pointer) % kAlignment);
  return past == 0 ? 0 : (kAlignment - past) / static_cast<int>(sizeof(T));
}

// The number of elements from the last address, at or before `pointer`, at which packs of kSize may
// be read.
template <int kSize, class T>
__device__ inline int elements_past_alignment(const T* pointer) {
  constexpr unsigned kAlignment = alignof(Pack<T, kSize>);
  const auto past = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(pointer) % kAlignment);
  return static_cast<int>(past / sizeof(T));
}

template <int kSize>
using Width = std::integral_constant<int, kSize>;

// Walks columns [0, columns) of the row at `row` with `threads` threads, the caller being number
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
