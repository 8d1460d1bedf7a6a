// The matrix instruction of a warp, mma.sync, with operands and sums in the registers of its lanes;
// and ldmatrix, which loads its operands from shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/ptx/shared_address.cuh"

namespace JAX_GPUOPS_NAMESPACE {

// A lane's word of an operand: two 16-bit neighbours along k, or one element.
template <class T>
using MmaWord = std::conditional_t<std::is_same_v<T, double>, double, std::uint32_t>;
template <class T>
using MmaSum = std::conditional_t<std::is_same_v<T, double>, double, float>;

// The elements of a word, and the depth of a product.
template <class T>
inline constexpr int kMmaPerWord = sizeof(T) == 2 ? 2 : 1;
template <class T>
inline constexpr int kMmaDepth = 8 * kMmaPerWord<T>;

#ifndef JAX_GPUOPS_INTERPRET
// sums += left right, of 8 x 4 by 4 x 8 doubles. In lane 4 g + t, left is at row g and k t, right
// at k t and column g, and the sums are at row g and columns 2 t and 2 t + 1.
__device__ __forceinline__ void multiply_add_8x8x4(double& sum0, double& sum1, double left,
                                                   double right) {
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(sum0), "+d"(sum1)
      : "d"(left), "d"(right));
}
#endif

// sums += left right, of 16 x k by k x 8, k = kMmaDepth. All lanes of a warp must call it. The
// elements of a word are neighbours along k, the first in the low half. With e = kMmaPerWord, lane
// 4 g + t holds:
//
//     left[0]: row g, k e t        left[1]: row g + 8, k e t        right[0]: k e t, col g
//     left[2]: row g, k e (t + 4)  left[3]: row g + 8, k e (t + 4)  right[1]: k e (t + 4), col g
//
//     sums[0], sums[1]: row g, col 2 t and 2 t + 1              sums[2], sums[3]: row g + 8
//
// Floats are multiplied in TF32: their lower 13 bits do not count, see round_to_tf32(). Doubles are
// added as by FMAs.
template <class T>
__device__ __forceinline__ void multiply_add_warp(MmaSum<T> (&sums)[4], const MmaWord<T> (&left)[4],
                                                  const MmaWord<T> (&right)[2],
                                                  [[maybe_unused]] Site site = Site::here()) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  constexpr bool kBFloat16 = std::is_same_v<T, __nv_bfloat16>;
  constexpr bool kFloat = std::is_same_v<T, float>;
  static_assert(kHalf || kBFloat16 || kFloat || std::is_same_v<T, double>);
#ifdef JAX_GPUOPS_INTERPRET
  if constexpr (std::is_same_v<T, double>) {
    simt::multiply_add_warp("multiply_add_warp", site, sums, left, right);
  } else {
    constexpr auto kType = kHalf       ? simt::FactorType::kFloat16
                           : kBFloat16 ? simt::FactorType::kBFloat16
                                       : simt::FactorType::kTf32;
    simt::multiply_add_warp("multiply_add_warp", site, sums, left, right, kType);
  }
#else
  if constexpr (kHalf) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
  } else if constexpr (kBFloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
  } else if constexpr (kFloat) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
  } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+d"(sums[0]), "+d"(sums[1]), "+d"(sums[2]), "+d"(sums[3])
        : "d"(left[0]), "d"(left[1]), "d"(left[2]), "d"(left[3]), "d"(right[0]), "d"(right[1]));
#else  // before 9.0 there are no larger products
    multiply_add_8x8x4(sums[0], sums[1], left[0], right[0]);
    multiply_add_8x8x4(sums[2], sums[3], left[1], right[0]);
    multiply_add_8x8x4(sums[0], sums[1], left[2], right[1]);
    multiply_add_8x8x4(sums[2], sums[3], left[3], right[1]);
#endif
  }
#endif
}

// The nearest TF32 number, with ties away from zero, as a word of an operand.
__device__ __forceinline__ std::uint32_t round_to_tf32(std::uint32_t bits) {
#ifdef JAX_GPUOPS_INTERPRET
  const bool finite = (bits & 0x7f800000) != 0x7f800000;
  return finite ? (bits + 0x1000) & 0xffffe000 : bits;
#else
  std::uint32_t word;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(word) : "f"(__uint_as_float(bits)));
  return word;
#endif
}

// Loads four matrices of 8 rows of 16 bytes from shared memory. Lane 8 i + r gives the address of
// row r of matrix i, a multiple of 16. Lane 4 g + t gets word t of row g of each matrix; with
// kTransposed, for matrices of 8 x 8 elements of 16 bits, elements g of rows 2 t and 2 t + 1.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(unsigned address, std::uint32_t (&words)[4],
                                              [[maybe_unused]] Site site = Site::here()) {
#ifdef JAX_GPUOPS_INTERPRET
  simt::load_matrices("load_matrices", site, address, kTransposed, words);
#else
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
  }
#endif
}

}  // namespace JAX_GPUOPS_NAMESPACE
