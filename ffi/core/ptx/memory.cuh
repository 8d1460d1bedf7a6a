// Wide stores and loads of global memory.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/ptx/target.h"

namespace JAX_GPUOPS_NAMESPACE {

// Returns the address, but hides from the compiler how it was computed, which it would otherwise
// repeat in each branch that uses it.
template <class T>
__device__ __forceinline__ T* computed_once(T* address) {
#ifndef JAX_GPUOPS_INTERPRET
  asm("" : "+l"(address));
#endif
  return address;
}

// Stores words to global memory, at a multiple of their size, by one instruction.
template <int kWords>
__device__ inline void store_words(const std::uint32_t (&word)[kWords], void* to) {
  static_assert(kWords == 2 || kWords == 4);
#ifdef JAX_GPUOPS_INTERPRET
  memcpy(to, word, sizeof(word));
#else
  if constexpr (kWords == 2) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(word[0]), "r"(word[1])
                 : "memory");
  } else {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]), "r"(word[1]),
                 "r"(word[2]), "r"(word[3])
                 : "memory");
  }
#endif
}

// Loads words that are constant while the kernel runs and that the block does not read again, from
// a multiple of their size, by one instruction that does not allocate them in the L1 cache.
template <int kWords>
__device__ __forceinline__ void read_once(const void* from, std::uint32_t (&word)[kWords]) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
#ifdef JAX_GPUOPS_INTERPRET
  memcpy(word, from, sizeof(word));
#else
  if constexpr (kWords == 1) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.b32 %0, [%1];" : "=r"(word[0]) : "l"(from));
  } else if constexpr (kWords == 2) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.b32 {%0, %1}, [%2];"
                 : "=r"(word[0]), "=r"(word[1])
                 : "l"(from));
  } else {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "l"(from));
  }
#endif
}

}  // namespace JAX_GPUOPS_NAMESPACE
