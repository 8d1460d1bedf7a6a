// Hopper's matrix instruction, wgmma: a warpgroup (four warps, the first of which has a number that
// is a multiple of 4) multiplies a block of 64 rows by one of kCols columns, both in shared memory
// and 32 bytes deep, and adds the product to sums in its registers. It is asynchronous:
//
//     begin_products();              // the sums' registers are ready
//     multiply_add(...) ...          // of one group, any number
//     end_products();                // the group is complete
//     wait_for_products<n>();        // all groups but the last n are done
//
// No thread may access the sums, or overwrite the operands, until their group is done.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/ptx/hopper.h"
#include "core/ptx/mbarrier.cuh"

namespace JAX_GPUOPS_NAMESPACE {

// ---- Operands ----
//
// An operand in shared memory has the layout of tensor copies with a 128-byte swizzle: lines of 128
// bytes (128 elements of 8 bits, 64 of 16, 32 of 32), eight lines to an atom of 1024 bytes, and
// within an atom the 16-byte piece p of line l at p ^ l. If it is `deep` (K-major), a line holds
// elements along k of one row (m or n), and the lines are consecutive rows:
//
//     row 0   | k 0 .. 63 |            step of 16 in depth: 32 bytes, within the lines
//     row 1   | k 0 .. 63 |
//
// Otherwise (MN-major, for 16-bit elements only) a line holds 64 rows at one k, the lines are
// consecutive in k, and the next 64 rows follow as another panel:
//
//     k 0     | row 0 .. 63 |          step of 16 in depth: 2048 bytes, 16 lines
//     ...
//     k 63    | row 0 .. 63 |
//     k 0     | row 64 .. 127 |        a panel: 64 lines, 8192 bytes
inline constexpr int kLineBytes = 128;
inline constexpr int kAtomBytes = 1024;
inline constexpr int kPanelBytes = 64 * kLineBytes;
inline constexpr int kProductBytes = 32;  // of a row, along k

// The distance from one product's operand to the next one's along k.
template <bool kDeep>
inline constexpr int kDepthStepBytes = kDeep ? kProductBytes : kProductBytes / 2 * kLineBytes;

// PTX's matrix descriptor, for an operand that begins at a multiple of kAtomBytes. Its fields are
// in units of 16 bytes, so an offset of `bytes` is added as `bytes` / 16.
//   bits 0-13: the address. 16-29: from one panel to the next; unused if deep, by convention 1.
//   32-45: from one atom to the next, of rows if deep, else of k. 49-51: 0, as atoms are aligned.
//   62-63: 1, the 128-byte swizzle.
// In a cluster, addresses have the block's rank above the 18 bits of its own memory.
template <bool kDeep>
__device__ inline std::uint64_t matrix_descriptor(const void* operand, Site site = Site::here()) {
  constexpr std::uint64_t kPanels = kDeep ? 1 : kPanelBytes / 16;
  constexpr std::uint64_t kAtoms = kAtomBytes / 16;
  constexpr std::uint64_t kSwizzle = 1;
  constexpr unsigned kOwnMemory = (1u << 18) - 1;
  return (shared_address(operand, site) & kOwnMemory) / 16 | kPanels << 16 | kAtoms << 32 |
         kSwizzle << 62;
}

// ---- Products ----

__device__ inline void begin_products([[maybe_unused]] Site site = Site::here()) {
#ifdef JAX_GPUOPS_INTERPRET
  simt::begin_products("begin_products", site);
#elif JAX_GPUOPS_HAS_WGMMA
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

__device__ inline void end_products([[maybe_unused]] Site site = Site::here()) {
#ifdef JAX_GPUOPS_INTERPRET
  simt::end_products("end_products", site);
#elif JAX_GPUOPS_HAS_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

template <int kPending>
__device__ inline void wait_for_products([[maybe_unused]] Site site = Site::here()) {
#ifdef JAX_GPUOPS_INTERPRET
  simt::wait_for_products("wait_for_products", site, kPending);
#elif JAX_GPUOPS_HAS_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

// Keeps the compiler from moving reads of sums before the preceding wait: it does not know that the
// products write them asynchronously.
template <int kCount>
__device__ inline void hold([[maybe_unused]] float (&sums)[kCount]) {
#ifndef JAX_GPUOPS_INTERPRET
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
#endif
}
template <int kCount>
__device__ inline void hold([[maybe_unused]] int (&sums)[kCount]) {
#ifndef JAX_GPUOPS_INTERPRET
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(sums[i])::"memory");
#endif
}
// The same for operands in registers, which must not be reused before the wait.
template <int kCount>
__device__ inline void hold([[maybe_unused]] std::uint32_t (&left)[kCount]) {
#ifndef JAX_GPUOPS_INTERPRET
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(left[i])::"memory");
#endif
}

// The registers of an instruction with 64 to 256 columns, mostly 32 at a time.
#define JAX_GPUOPS_NAMES_0                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define JAX_GPUOPS_NAMES_32_TO_47 \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define JAX_GPUOPS_NAMES_1                   \
  JAX_GPUOPS_NAMES_32_TO_47 JAX_GPUOPS_COMMA \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define JAX_GPUOPS_NAMES_64_TO_79 \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define JAX_GPUOPS_NAMES_2                   \
  JAX_GPUOPS_NAMES_64_TO_79 JAX_GPUOPS_COMMA \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define JAX_GPUOPS_NAMES_96_TO_103 "%96, %97, %98, %99, %100, %101, %102, %103"
#define JAX_GPUOPS_NAMES_3                                                                         \
  JAX_GPUOPS_NAMES_96_TO_103 JAX_GPUOPS_COMMA                                                      \
      "%104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, " \
      "%119, %120, %121, %122, %123, %124, %125, %126, %127"
// Their constraints in an asm statement: "+f" for floats, "+r" for integers.
#define JAX_GPUOPS_SUMS_8(as, sums, i)                                             \
  as(sums[i]), as(sums[i + 1]), as(sums[i + 2]), as(sums[i + 3]), as(sums[i + 4]), \
      as(sums[i + 5]), as(sums[i + 6]), as(sums[i + 7])
#define JAX_GPUOPS_SUMS_16(as, sums, i) \
  JAX_GPUOPS_SUMS_8(as, sums, i), JAX_GPUOPS_SUMS_8(as, sums, i + 8)
#define JAX_GPUOPS_SUMS_32(as, sums, i) \
  JAX_GPUOPS_SUMS_16(as, sums, i), JAX_GPUOPS_SUMS_16(as, sums, i + 16)
#define JAX_GPUOPS_COMMA ", "

// What follows the columns in the instruction's name, and what follows the operands: for floats the
// signs of the factors, both positive, and for factors of 16 bits then the transpositions, 0 if
// deep, else 1.
#define JAX_GPUOPS_16_BITS(type) "k16.f32." type "." type
#define JAX_GPUOPS_TF32 "k8.f32.tf32.tf32"
#define JAX_GPUOPS_FLOAT8(type) "k32.f32." type "." type
#define JAX_GPUOPS_INT8 "k32.s32.s8.s8"
#define JAX_GPUOPS_LAYOUTS(a, b) ", 1, 1, %" #a ", %" #b
#define JAX_GPUOPS_NO_LAYOUTS(a, b) ", 1, 1"
#define JAX_GPUOPS_NO_SIGNS(a, b) ""

// %a and so on: the operands after the sums.
#define JAX_GPUOPS_WGMMA(cols, kind, flags, names, a, b, accumulate, wide_a, wide_b, ...) \
  asm volatile(                                                                                \
      "{\n"                                                                                    \
      "  .reg .pred accumulate;\n"                                                             \
      "  setp.ne.b32 accumulate, %" #accumulate                                                \
      ", 0;\n"                                                                                 \
      "  wgmma.mma_async.sync.aligned.m64n" #cols kind " {" names "}, %" #a ", %" #b           \
      ", accumulate" flags(wide_a, wide_b) ";\n"                                                \
      "}"                                                                                      \
      : __VA_ARGS__                                                                            \
      : "l"(left), "l"(right), "r"(static_cast<int>(add)), "n"(kDeepA ? 0 : 1),                \
        "n"(kDeepB ? 0 : 1))

#define JAX_GPUOPS_WGMMA_64(as, kind, flags)                                \
  JAX_GPUOPS_WGMMA(64, kind, flags, JAX_GPUOPS_NAMES_0, 32, 33, 34, 35, 36, \
                   JAX_GPUOPS_SUMS_32(as, sums, 0))
#define JAX_GPUOPS_WGMMA_96(as, kind, flags)                                                       \
  JAX_GPUOPS_WGMMA(96, kind, flags, JAX_GPUOPS_NAMES_0 JAX_GPUOPS_COMMA JAX_GPUOPS_NAMES_32_TO_47, \
                   48, 49, 50, 51, 52, JAX_GPUOPS_SUMS_32(as, sums, 0),                            \
                   JAX_GPUOPS_SUMS_16(as, sums, 32))
#define JAX_GPUOPS_WGMMA_128(as, kind, flags)                                                    \
  JAX_GPUOPS_WGMMA(128, kind, flags, JAX_GPUOPS_NAMES_0 JAX_GPUOPS_COMMA JAX_GPUOPS_NAMES_1, 64, \
                   65, 66, 67, 68, JAX_GPUOPS_SUMS_32(as, sums, 0),                              \
                   JAX_GPUOPS_SUMS_32(as, sums, 32))
#define JAX_GPUOPS_WGMMA_160(as, kind, flags)                                              \
  JAX_GPUOPS_WGMMA(160, kind, flags,                                                       \
                   JAX_GPUOPS_NAMES_0 JAX_GPUOPS_COMMA JAX_GPUOPS_NAMES_1 JAX_GPUOPS_COMMA \
                       JAX_GPUOPS_NAMES_64_TO_79,                                          \
                   80, 81, 82, 83, 84, JAX_GPUOPS_SUMS_32(as, sums, 0),                    \
                   JAX_GPUOPS_SUMS_32(as, sums, 32), JAX_GPUOPS_SUMS_16(as, sums, 64))
#define JAX_GPUOPS_WGMMA_192(as, kind, flags)                                                     \
  JAX_GPUOPS_WGMMA(                                                                               \
      192, kind, flags,                                                                           \
      JAX_GPUOPS_NAMES_0 JAX_GPUOPS_COMMA JAX_GPUOPS_NAMES_1 JAX_GPUOPS_COMMA JAX_GPUOPS_NAMES_2, \
      96, 97, 98, 99, 100, JAX_GPUOPS_SUMS_32(as, sums, 0), JAX_GPUOPS_SUMS_32(as, sums, 32),     \
      JAX_GPUOPS_SUMS_32(as, sums, 64))
#define JAX_GPUOPS_WGMMA_208(as, kind, flags)                                              \
  JAX_GPUOPS_WGMMA(208, kind, flags,                                                       \
                   JAX_GPUOPS_NAMES_0 JAX_GPUOPS_COMMA JAX_GPUOPS_NAMES_1 JAX_GPUOPS_COMMA \
                       JAX_GPUOPS_NAMES_2 JAX_GPUOPS_COMMA JAX_GPUOPS_NAMES_96_TO_103,     \
                   104, 105, 106, 107, 108, JAX_GPUOPS_SUMS_32(as, sums, 0),               \
                   JAX_GPUOPS_SUMS_32(as, sums, 32), JAX_GPUOPS_SUMS_32(as, sums, 64),     \
                   JAX_GPUOPS_SUMS_8(as, sums, 96))
#define JAX_GPUOPS_WGMMA_256(as, kind, flags)                                              \
  JAX_GPUOPS_WGMMA(256, kind, flags,                                                       \
                   JAX_GPUOPS_NAMES_0 JAX_GPUOPS_COMMA JAX_GPUOPS_NAMES_1 JAX_GPUOPS_COMMA \
                       JAX_GPUOPS_NAMES_2 JAX_GPUOPS_COMMA JAX_GPUOPS_NAMES_3,             \
                   128, 129, 130, 131, 132, JAX_GPUOPS_SUMS_32(as, sums, 0),               \
                   JAX_GPUOPS_SUMS_32(as, sums, 32), JAX_GPUOPS_SUMS_32(as, sums, 64),     \
                   JAX_GPUOPS_SUMS_32(as, sums, 96))
// For all numbers of columns.
#define JAX_GPUOPS_WGMMAS(as, kind, flags)                             \
  do {                                                                 \
    if constexpr (kCols == 64) JAX_GPUOPS_WGMMA_64(as, kind, flags);   \
    if constexpr (kCols == 96) JAX_GPUOPS_WGMMA_96(as, kind, flags);   \
    if constexpr (kCols == 128) JAX_GPUOPS_WGMMA_128(as, kind, flags); \
    if constexpr (kCols == 160) JAX_GPUOPS_WGMMA_160(as, kind, flags); \
    if constexpr (kCols == 192) JAX_GPUOPS_WGMMA_192(as, kind, flags); \
    if constexpr (kCols == 208) JAX_GPUOPS_WGMMA_208(as, kind, flags); \
    if constexpr (kCols == 256) JAX_GPUOPS_WGMMA_256(as, kind, flags); \
  } while (false)

// The type of sums of products of T.
template <class T>
using ProductSum = std::conditional_t<std::is_same_v<T, std::int8_t>, int, float>;

// sums (+)= left right^T, of 64 rows and kCols columns, over 32 bytes along k; if `add` is false,
// the old sums are ignored. Floats are multiplied in TF32: only their upper 19 bits count. Products
// of 8-bit floats are added with 13 bits of fraction, those of integers modulo 2^32. With row = 16
// (t / 32) + t % 32 / 4 and col = 8 i + 2 (t % 4), thread t of the warpgroup holds, for i = 0 ..
// kCols/8 - 1:
//     sums[4 i], sums[4 i + 1]: (row, col), (row, col + 1)    the next two: (row + 8, ...)
template <class T, bool kDeepA, bool kDeepB, int kSums>
__device__ __forceinline__ void multiply_add([[maybe_unused]] ProductSum<T> (&sums)[kSums],
                                             [[maybe_unused]] std::uint64_t left,
                                             [[maybe_unused]] std::uint64_t right,
                                             [[maybe_unused]] bool add,
                                             [[maybe_unused]] Site site = Site::here()) {
  constexpr int kCols = 2 * kSums;
  static_assert(kCols == 64 || kCols == 96 || kCols == 128 || kCols == 160 || kCols == 192 ||
                kCols == 208 || kCols == 256);
  constexpr bool kHalf = std::is_same_v<T, __half>;
  constexpr bool kBFloat16 = std::is_same_v<T, __nv_bfloat16>;
  constexpr bool kFloat = std::is_same_v<T, float>;
  constexpr bool kE4M3 = std::is_same_v<T, __nv_fp8_e4m3>;
  constexpr bool kE5M2 = std::is_same_v<T, __nv_fp8_e5m2>;
  constexpr bool kInt8 = std::is_same_v<T, std::int8_t>;
  static_assert(kHalf || kBFloat16 || kFloat || kE4M3 || kE5M2 || kInt8);
  static_assert(sizeof(T) == 2 || (kDeepA && kDeepB), "wgmma takes rows of k only for 16 bits");
#ifdef JAX_GPUOPS_INTERPRET
  constexpr simt::FactorType kType = kHalf       ? simt::FactorType::kFloat16
                                     : kBFloat16 ? simt::FactorType::kBFloat16
                                     : kFloat    ? simt::FactorType::kTf32
                                     : kE4M3     ? simt::FactorType::kFloat8E4M3
                                     : kE5M2     ? simt::FactorType::kFloat8E5M2
                                                 : simt::FactorType::kInt8;
  simt::multiply_add("multiply_add", site, sums, {kCols, kType, kDeepA, kDeepB, add, left, right});
#elif JAX_GPUOPS_HAS_WGMMA
  if constexpr (kFloat) {
    JAX_GPUOPS_WGMMAS("+f", JAX_GPUOPS_TF32, JAX_GPUOPS_NO_LAYOUTS);
  } else if constexpr (kHalf) {
    JAX_GPUOPS_WGMMAS("+f", JAX_GPUOPS_16_BITS("f16"), JAX_GPUOPS_LAYOUTS);
  } else if constexpr (kBFloat16) {
    JAX_GPUOPS_WGMMAS("+f", JAX_GPUOPS_16_BITS("bf16"), JAX_GPUOPS_LAYOUTS);
  } else if constexpr (kE4M3) {
    JAX_GPUOPS_WGMMAS("+f", JAX_GPUOPS_FLOAT8("e4m3"), JAX_GPUOPS_NO_LAYOUTS);
  } else if constexpr (kE5M2) {
    JAX_GPUOPS_WGMMAS("+f", JAX_GPUOPS_FLOAT8("e5m2"), JAX_GPUOPS_NO_LAYOUTS);
  } else {
    JAX_GPUOPS_WGMMAS("+r", JAX_GPUOPS_INT8, JAX_GPUOPS_NO_SIGNS);
  }
#endif
}

// The same in TF32 with the left block in registers, which threads can load from any layout: a
// float operand in shared memory must be deep. The thread that holds sums of the rows row and row +
// 8 gives, with k = t % 4,
//     left[0]: (row, k)   left[1]: (row + 8, k)   left[2]: (row, k + 4)   left[3]: (row + 8, k + 4)
// and must not change them until the group is done.
template <int kSums>
__device__ __forceinline__ void multiply_add([[maybe_unused]] float (&sums)[kSums],
                                             [[maybe_unused]] const std::uint32_t (&left)[4],
                                             [[maybe_unused]] std::uint64_t right,
                                             [[maybe_unused]] bool add,
                                             [[maybe_unused]] Site site = Site::here()) {
  constexpr int kCols = 2 * kSums;
  static_assert(kCols == 64 || kCols == 128 || kCols == 256);
#ifdef JAX_GPUOPS_INTERPRET
  simt::multiply_add("multiply_add", site, sums,
                     {kCols, simt::FactorType::kTf32, true, true, add, 0, right, left});
#elif JAX_GPUOPS_HAS_WGMMA
#define JAX_GPUOPS_WGMMA_OF_REGISTERS(cols, names, words, right_operand, accumulate, ...) \
  asm volatile(                                                                           \
      "{\n"                                                                               \
      "  .reg .pred accumulate;\n"                                                        \
      "  setp.ne.b32 accumulate, %" #accumulate                                           \
      ", 0;\n"                                                                            \
      "  wgmma.mma_async.sync.aligned.m64n" #cols JAX_GPUOPS_TF32 " {" names "}, {" words \
      "}, %" #right_operand                                                               \
      ", accumulate, 1, 1;\n"                                                             \
      "}"                                                                                 \
      : __VA_ARGS__                                                                       \
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right),               \
        "r"(static_cast<int>(add)))
  if constexpr (kCols == 64) {
    JAX_GPUOPS_WGMMA_OF_REGISTERS(64, JAX_GPUOPS_NAMES_0, "%32, %33, %34, %35", 36, 37,
                                  JAX_GPUOPS_SUMS_32("+f", sums, 0));
  } else if constexpr (kCols == 128) {
    JAX_GPUOPS_WGMMA_OF_REGISTERS(128, JAX_GPUOPS_NAMES_0 JAX_GPUOPS_COMMA JAX_GPUOPS_NAMES_1,
                                  "%64, %65, %66, %67", 68, 69, JAX_GPUOPS_SUMS_32("+f", sums, 0),
                                  JAX_GPUOPS_SUMS_32("+f", sums, 32));
  } else {
    JAX_GPUOPS_WGMMA_OF_REGISTERS(
        256,
        JAX_GPUOPS_NAMES_0 JAX_GPUOPS_COMMA JAX_GPUOPS_NAMES_1 JAX_GPUOPS_COMMA JAX_GPUOPS_NAMES_2
            JAX_GPUOPS_COMMA JAX_GPUOPS_NAMES_3,
        "%128, %129, %130, %131", 132, 133, JAX_GPUOPS_SUMS_32("+f", sums, 0),
        JAX_GPUOPS_SUMS_32("+f", sums, 32), JAX_GPUOPS_SUMS_32("+f", sums, 64),
        JAX_GPUOPS_SUMS_32("+f", sums, 96));
  }
#undef JAX_GPUOPS_WGMMA_OF_REGISTERS
#endif
}

#undef JAX_GPUOPS_WGMMAS
#undef JAX_GPUOPS_WGMMA_256
#undef JAX_GPUOPS_WGMMA_208
#undef JAX_GPUOPS_WGMMA_192
#undef JAX_GPUOPS_WGMMA_160
#undef JAX_GPUOPS_WGMMA_128
#undef JAX_GPUOPS_WGMMA_96
#undef JAX_GPUOPS_WGMMA_64
#undef JAX_GPUOPS_WGMMA
#undef JAX_GPUOPS_NO_SIGNS
#undef JAX_GPUOPS_NO_LAYOUTS
#undef JAX_GPUOPS_LAYOUTS
#undef JAX_GPUOPS_INT8
#undef JAX_GPUOPS_FLOAT8
#undef JAX_GPUOPS_TF32
#undef JAX_GPUOPS_16_BITS
#undef JAX_GPUOPS_COMMA
#undef JAX_GPUOPS_SUMS_32
#undef JAX_GPUOPS_SUMS_16
#undef JAX_GPUOPS_SUMS_8
#undef JAX_GPUOPS_NAMES_3
#undef JAX_GPUOPS_NAMES_96_TO_103
#undef JAX_GPUOPS_NAMES_2
#undef JAX_GPUOPS_NAMES_64_TO_79
#undef JAX_GPUOPS_NAMES_1
#undef JAX_GPUOPS_NAMES_32_TO_47
#undef JAX_GPUOPS_NAMES_0

// ---- Sums to shared memory ----

// Stores four matrices of 8 x 8 elements of 16 bits. Each word of a thread holds two neighbours, in
// the register layout of sums. Lane 8 i + r gives the address of row r of matrix i, or with
// kTransposed of its column r, a multiple of 16.
template <bool kTransposed>
__device__ inline void store_matrices([[maybe_unused]] unsigned address,
                                      [[maybe_unused]] std::uint32_t word0,
                                      [[maybe_unused]] std::uint32_t word1,
                                      [[maybe_unused]] std::uint32_t word2,
                                      [[maybe_unused]] std::uint32_t word3,
                                      [[maybe_unused]] Site site = Site::here()) {
#ifdef JAX_GPUOPS_INTERPRET
  simt::store_matrices("store_matrices", site, address, kTransposed, {word0, word1, word2, word3});
#elif JAX_GPUOPS_HOPPER_PTX
  if constexpr (kTransposed) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(
            address),
        "r"(word0), "r"(word1), "r"(word2), "r"(word3)
        : "memory");
  } else {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(word0), "r"(word1), "r"(word2), "r"(word3)
        : "memory");
  }
#endif
}

}  // namespace JAX_GPUOPS_NAMESPACE
