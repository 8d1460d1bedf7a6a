// The CUDA language for the host compiler: the part that kernel sources use, in terms of simt.h.
//
// Shared memory is not included: see core/shared.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "simt/simt.h"

#define __launch_bounds__(...)
#define __noinline__
// Without forced inlining, kernels compile in half the time and run as fast.
#undef __forceinline__
#define __forceinline__ inline

// The CUDA headers define it as nothing, so each thread would silently get its own array.
#undef __shared__
#define __shared__ _Pragma("GCC error \"shared memory comes from core/shared.h\"")

namespace JAX_GPUOPS_NAMESPACE {
namespace simt {

// ---- Helpers, which kernels do not see ----

// A segment is an aligned group of `width` lanes, the last of which is `last`. Source lanes are as
// defined for shfl.sync in the PTX ISA: deltas are taken modulo 32, and a lane whose source is not
// in range keeps its own value.
struct Segment {
  int lane;
  int first;
  int last;
};

inline Segment segment(int width) {
  if (width <= 0 || width > kWarpSize || (width & (width - 1)) != 0) fail_width(width);
  const int own = lane();
  return {own, own & -width, own | (width - 1)};
}

template <class T>
T shuffle(const char* function, Site site, unsigned mask, int source_lane, T value) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 16,
                "lanes exchange bytes, at most 16");
  if constexpr (sizeof(T) <= sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, &value, sizeof(T));
    word = warp_shuffle(function, site, mask, source_lane, word, sizeof(T));
    std::memcpy(static_cast<void*>(&value), &word, sizeof(T));
  } else {
    warp_shuffle(function, site, mask, source_lane, &value, sizeof(T));
  }
  return value;
}

template <class T>
inline constexpr bool kIsAtomicInteger =
    std::is_same_v<T, int> || std::is_same_v<T, unsigned> || std::is_same_v<T, unsigned long long>;

template <class T>
using NotDeduced = std::common_type_t<T>;

namespace cuda {

// ---- Built-in variables ----

inline thread_local uint3 threadIdx{};
inline thread_local uint3 blockIdx{};
inline thread_local dim3 blockDim{};
inline thread_local dim3 gridDim{};
inline constexpr int warpSize = kWarpSize;

// ---- Barriers and fences ----

inline void __syncthreads(Site site = Site::here()) { block_barrier("__syncthreads", site, true); }

inline int __syncthreads_count(int predicate, Site site = Site::here()) {
  return block_barrier("__syncthreads_count", site, predicate != 0);
}

inline int __syncthreads_or(int predicate, Site site = Site::here()) {
  return block_barrier("__syncthreads_or", site, predicate != 0) != 0;
}

inline int __syncthreads_and(int predicate, Site site = Site::here()) {
  return block_barrier("__syncthreads_and", site, predicate == 0) == 0;
}

inline void __syncwarp(unsigned mask = 0xffffffff, Site site = Site::here()) {
  warp_barrier("__syncwarp", site, mask);
}

inline void __threadfence_block() {}
inline void __threadfence() {}

// ---- Integers ----

inline int min(int a, int b) { return a < b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }

// ---- Bits ----

// The position of the lowest bit that is set, counted from 1; 0 if none is.
inline int __ffs(int value) { return __builtin_ffs(value); }

inline int __float_as_int(float value) { return __builtin_bit_cast(int, value); }
inline float __int_as_float(int value) { return __builtin_bit_cast(float, value); }

// ---- Bytes ----

// Byte i of the result is the byte of (high, low) that hexadecimal digit i of `selector` selects.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned source = selector >> (4 * i) & 7;
    result |= static_cast<unsigned>(bytes >> (8 * source) & 0xff) << (8 * i);
  }
  return result;
}

// The low 32 bits of (high, low) >> shift, with the shift modulo 32.
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (shift % 32));
}

// ---- Votes ----

inline unsigned __activemask() { return live_lanes(); }

inline unsigned __ballot_sync(unsigned mask, int predicate, Site site = Site::here()) {
  return warp_vote("__ballot_sync", site, mask, predicate != 0);
}

inline int __any_sync(unsigned mask, int predicate, Site site = Site::here()) {
  return warp_vote("__any_sync", site, mask, predicate != 0) != 0;
}

inline int __all_sync(unsigned mask, int predicate, Site site = Site::here()) {
  return warp_vote("__all_sync", site, mask, predicate == 0) == 0;
}

// ---- Shuffles ----

template <class T>
T __shfl_sync(unsigned mask, T value, int source_lane, int width = warpSize,
              Site site = Site::here()) {
  const int source = segment(width).first + (source_lane & (width - 1));
  return shuffle("__shfl_sync", site, mask, source, value);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize,
                 Site site = Site::here()) {
  const Segment s = segment(width);
  const int source = s.lane - static_cast<int>(delta % warpSize);
  return shuffle("__shfl_up_sync", site, mask, source >= s.first ? source : s.lane, value);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize,
                   Site site = Site::here()) {
  const Segment s = segment(width);
  const int source = s.lane + static_cast<int>(delta % warpSize);
  return shuffle("__shfl_down_sync", site, mask, source <= s.last ? source : s.lane, value);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = warpSize,
                  Site site = Site::here()) {
  const Segment s = segment(width);
  const int source = s.lane ^ (lane_mask & (warpSize - 1));
  return shuffle("__shfl_xor_sync", site, mask, source <= s.last ? source : s.lane, value);
}

// ---- Reductions of a warp ----

template <class T, class Combine>
T warp_reduction(const char* name, unsigned mask, T value, Combine combine, Site site) {
  T result = value;
  for (int lane = 0; lane < warpSize; ++lane) {
    if ((mask >> lane & 1) != 0) result = combine(result, shuffle(name, site, mask, lane, value));
  }
  return result;
}

template <class T>
T __reduce_max_sync(unsigned mask, T value, Site site = Site::here()) {
  return warp_reduction(
      "__reduce_max_sync", mask, value, [](T a, T b) { return a < b ? b : a; }, site);
}

template <class T>
T __reduce_min_sync(unsigned mask, T value, Site site = Site::here()) {
  return warp_reduction(
      "__reduce_min_sync", mask, value, [](T a, T b) { return b < a ? b : a; }, site);
}

// ---- Atomics ----

// Threads are not interrupted, so these are plain reads and writes. CUDA overloads them for certain
// types only and converts the operand to the type in memory.

template <class T>
T atomicExch(T* address, NotDeduced<T> value) {
  static_assert(kIsAtomicInteger<T> || std::is_same_v<T, float>);
  return std::exchange(*address, value);
}

template <class T>
T atomicCAS(T* address, NotDeduced<T> expected, NotDeduced<T> value) {
  static_assert(kIsAtomicInteger<T>);
  return std::exchange(*address, *address == expected ? value : *address);
}

template <class T>
T atomicAdd(T* address, NotDeduced<T> value) {
  static_assert(kIsAtomicInteger<T> || std::is_same_v<T, float>);
  if constexpr (std::is_same_v<T, int>) {  // overflow wraps
    const unsigned sum = static_cast<unsigned>(*address) + static_cast<unsigned>(value);
    return std::exchange(*address, static_cast<int>(sum));
  } else {
    return std::exchange(*address, *address + value);
  }
}

template <class T>
T atomicMax(T* address, NotDeduced<T> value) {
  static_assert(kIsAtomicInteger<T>);
  return std::exchange(*address, *address < value ? value : *address);
}

template <class T>
T atomicMin(T* address, NotDeduced<T> value) {
  static_assert(kIsAtomicInteger<T>);
  return std::exchange(*address, value < *address ? value : *address);
}

inline unsigned atomicInc(unsigned* address, unsigned limit) {
  return std::exchange(*address, *address >= limit ? 0 : *address + 1);
}

template <class T>
T __ldg(const T* address) {
  return *address;
}

}  // namespace cuda
}  // namespace simt
}  // namespace JAX_GPUOPS_NAMESPACE

// At global scope, as in CUDA.
using namespace JAX_GPUOPS_NAMESPACE::simt::cuda;  // NOLINT(google-build-using-namespace)
