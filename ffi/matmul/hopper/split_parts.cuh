// Splits float factors into 16-bit parts, which tensor cores multiply.
//
// A float has 24 significant bits and a bfloat16 eight, so three bfloat16 hold a float exactly: the
// one nearest to it, the one nearest to the remainder, and the rest.
//
//     x       1.01101001 10100101 1110001 ...
//     part 0  1.0110101                           x rounded
//     part 1         - .0000101 1                 x - part 0, rounded
//     part 2                    .0 10111100 ...   x - part 0 - part 1
//
// A float16 has eleven, so two of them, the second with its own sign, hold 23: all of a float
// except for half a unit in the last place, or one.
//
// Bfloat16 has the exponent range of float, so without scaling the parts of small floats would
// underflow and the products of large ones overflow; the range of float16 is far smaller. So each
// row of a and column of b is first scaled by the power of two that brings its largest magnitude to
// 2^kScaledExponent, and the product is scaled back. Data that no scale brings into range is
// reported: inf, NaN, rows that span too many powers of two, and rows with too many elements that
// are small compared with the largest.
//
//     from    | x ....  |      parts   0: | x0 .... |..|   1: | x1 .... |..|   2: | x2 .... |..|
//             | y ....  |                 | y0 .... |..|      | y1 .... |..|      | y2 .... |..|
//
// Parts are stored in the factor's order, in rows that begin at whole lines. Each row or column is
// read twice, to find its largest magnitude and to split it, the second time mostly from a cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/collectives.h"
#include "core/dispatch.h"
#include "core/integer.h"
#include "core/launch.h"
#include "core/ptx/math.cuh"
#include "core/ptx/memory.cuh"
#include "core/shared.h"
#include "core/vector.h"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

// ---- Three bfloat16 ----

struct BF16Parts {
  using Part = __nv_bfloat16;
  static constexpr int kParts = kBF16Parts;
  // The largest magnitude of a scaled row is in [2^46, 2^47). With a depth of 2^30 at most, sums of
  // products stay below 2^124.
  static constexpr int kScaledExponent = 46;
  static constexpr int kColumnsAhead = 4;  // loads in flight per thread, if the factor is not deep
};

// How many powers of two the nonzero elements of a row may span: all bits of its least element then
// lie at 2^(46 - 149 - 23) = 2^-126 or above, where bfloat16 is normal. 1 and the least positive
// float span so many.
inline constexpr int kMostSpan = 149;
// How many powers of two a row of a and a column of b may span together: their least product is
// then 2^(92 - 186), and the 32 bits below it, more than products of parts have, lie at 2^-126 or
// above, where float sums lose nothing but by rounding.
inline constexpr int kMostSpans = 186;
// A span up to this fits whatever the other factor's span is, and need not be reported: most data
// has no larger ones.
inline constexpr int kFreeSpan = kMostSpans - kMostSpan;
inline constexpr int kInfiniteSpan = 1 << 20;

// ---- Two float16 ----

struct FP16Parts {
  using Part = __half;
  static constexpr int kParts = kFP16Parts;
  // The largest magnitude of a scaled row is in [2^14, 2^15), and float16 ends below 2^16. With a
  // depth of 2^26 at most, sums of products stay below 2^56.
  static constexpr int kScaledExponent = 14;
  static constexpr int kColumnsAhead = 8;
};

// The parts of a scaled x leave a remainder r = x - x0 - x1. Rounding to x0 leaves at most 2^-11
// |x|, or 2^-25 where float16 is subnormal, and to x1 at most 2^-12 of that, or 2^-25. So |r| <=
// 2^-23 |x| where |x| >= 2^-2, and |r| <= 2^-25 in any case; for x = 0, r = 0. The error of the
// three products,
//
//     x y - (x0 y0 + x0 y1 + x1 y0) = x1 y1 + r_x y + (x0 + x1) r_y
//
// is then at most (2^-22 + 2^-23 + 2^-23) |x y|, eight units of 2^-24, except for tiny elements:
// those that are not 0 but below 2^-2. Each tiny element adds at most 2^-25 2^15 = 2^-10 to the
// error.
//
// That is little if the sum of all |x y| is large. Call elements of at least 2^5 large. If s_a of
// the K elements of a row are not large, and s_b of a column, then at least K - s_a - s_b products
// have two large factors, and sum |x y| >= (K - s_a - s_b) 2^10. So with t_a and t_b tiny elements
//
//     (t_a + t_b) 2^-10 <= 2^-24 sum |x y|    if    (s_a + 16 t_a) + (s_b + 16 t_b) <= K:
//
// all tiny elements together cost at most one unit of 2^-24 sum |x y|. For each row s + 16 t is
// reported. That is 2 % of K for normal data, and 52 % if half of the data is replaced by 0. An
// eighth of the depth, and at least one element, must remain, so that no sum consists of a few
// products alone, which FMAs multiply more exactly. Then no sum is so small either that elements
// which the scale itself rounds to 0, at most 2^-150, would matter; these do not count as tiny.
__device__ __forceinline__ std::int64_t most_small(std::int64_t depth) {
  return depth - (depth + 7) / 8;
}
// Up to so many fit unless the other factor has too many by itself, and need not be reported.
__device__ __forceinline__ std::int64_t free_small(std::int64_t depth) { return depth / 16; }
inline constexpr std::uint32_t kInfinitelySmall = 0xffffffff;

// What a scaled element subtracts from the number of elements, so that s + 16 t remains.
__device__ __forceinline__ int largeness_of(float scaled) {
  constexpr std::uint32_t kLeastLarge = (127 + 5) << 23;  // 2^5, as bits
  constexpr std::uint32_t kLeastNotTiny = (127 - 2) << 23;
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, scaled) & 0x7fffffffu;
  return (bits >= kLeastLarge ? 1 : 0) - (bits - 1 < kLeastNotTiny - 1 ? 16 : 0);
}

// ---- Powers of two ----

// 2^exponent, for exponents of normal floats.
__device__ __forceinline__ float normal_power(int exponent) {
  return __builtin_bit_cast(float, (exponent + 127) << 23);
}

// value * 2^exponent, rounded once, for exponents of at least -252.
__device__ __forceinline__ float scale_by_power(float value, int exponent) {
  // One product where the power is a float. Below, the first product is exact unless the result is
  // 0; above, it overflows only where the result does.
  const int last = exponent < -126 ? -126 : exponent > 127 ? exponent - 127 : 0;
  return value * normal_power(std::max(exponent - last, -126)) * normal_power(last);
}

// The exponent of the largest power of two that is not above the positive, finite float with these
// bits.
__device__ __forceinline__ int exponent_of(std::uint32_t bits) {
  if (bits >= 1u << 23) return static_cast<int>(bits >> 23) - 127;
  const float normal = __builtin_bit_cast(float, bits) * 0x1p24f;
  return static_cast<int>(__builtin_bit_cast(std::uint32_t, normal) >> 23) - 127 - 24;
}

// The largest of some magnitudes, and the smallest one that is not 0, as the bits of floats.
struct Magnitudes {
  std::uint32_t largest = 0;
  std::uint32_t least_less_1 = 0xffffffff;  // 0 - 1 wraps to the largest number

  __device__ __forceinline__ void add(float value) {
    const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value) & 0x7fffffffu;
    largest = std::max(largest, bits);
    least_less_1 = std::min(least_less_1, bits - 1);
  }
  __device__ __forceinline__ void add(const Magnitudes& other) {
    largest = std::max(largest, other.largest);
    least_less_1 = std::min(least_less_1, other.least_less_1);
  }
  // Adds those of the lane whose number differs in the bits of `distance`.
  __device__ __forceinline__ void add_lanes(int distance) {
    add(Magnitudes{shuffle_xor(largest, distance), shuffle_xor(least_less_1, distance)});
  }

  __device__ __forceinline__ bool finite() const { return largest < 0x7f800000u; }
  // The power of two by which results are scaled back.
  __device__ __forceinline__ int exponent() const {
    return largest == 0 || !finite() ? 0 : exponent_of(largest);
  }
  __device__ __forceinline__ int span() const {
    if (!finite()) return kInfiniteSpan;
    return largest == 0 ? 0 : exponent_of(largest) - exponent_of(least_less_1 + 1);
  }
  // A row of zeros has no small elements: its products are exact.
  __device__ __forceinline__ std::uint32_t small(std::int64_t depth, int largeness) const {
    if (!finite()) return kInfinitelySmall;
    return largest == 0 ? 0 : static_cast<std::uint32_t>(depth - largeness);
  }
};

// ---- Parts ----

template <class Parts>
struct FactorSplit {
  const float* from;
  typename Parts::Part* parts;
  std::int32_t* exponents;   // of each row of a or column of b
  std::uint32_t* worst;      // the largest span or number of small elements, if not free
  const std::int32_t* done;  // may be null; if *done is not 0, nothing is split
  std::int64_t matrices;
  std::int64_t rows;
  std::int64_t length;
  std::int64_t pitch;  // of a row of the parts
};

// For bfloat16, the span of a row is reported, which is found together with its scale; for float16,
// the number of small elements in a row, which are counted while they are split.
template <class Parts>
inline constexpr bool kCountsSpan = std::is_same_v<Parts, BF16Parts>;

__device__ __forceinline__ void report_span(std::uint32_t* worst, const Magnitudes& row) {
  if (row.span() > kFreeSpan) atomicMax(worst, static_cast<std::uint32_t>(row.span()));
}

// For a row of `depth` elements; `largeness` is the sum of largeness_of() over all of them.
__device__ __forceinline__ void report_small(std::uint32_t* worst, const Magnitudes& row,
                                             std::int64_t depth, int largeness) {
  const std::uint32_t small = row.small(depth, largeness);
  if (small > free_small(depth)) atomicMax(worst, small);
}

// Loads kPack neighbours, of which `count` exist; the others are 0.
template <bool kPacked>
__device__ __forceinline__ Pack<float, kPack> load_floats(const float* from, std::int64_t count) {
  if constexpr (kPacked) {
    return *reinterpret_cast<const Pack<float, kPack>*>(from);
  } else {
    Pack<float, kPack> values{};
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if (i < count) values.element[i] = from[i];
    }
    return values;
  }
}

// The two parts in a word, as floats.
template <class Part>
__device__ __forceinline__ float2 widen_pair(std::uint32_t word) {
  if constexpr (std::is_same_v<Part, __half>) {
    return make_float2(__half2float(__ushort_as_half(static_cast<std::uint16_t>(word))),
                       __half2float(__ushort_as_half(static_cast<std::uint16_t>(word >> 16))));
  } else {
    return make_float2(__builtin_bit_cast(float, word << 16),
                       __builtin_bit_cast(float, word & 0xffff0000u));
  }
}

// Splits scaled neighbours, and stores part i at `to` + i * `part_stride`.
template <class Parts>
__device__ __forceinline__ void store_parts(const float (&scaled)[kPack], typename Parts::Part* to,
                                            std::int64_t part_stride) {
  using Part = typename Parts::Part;
  float rest[kPack];
#pragma unroll
  for (int i = 0; i < kPack; ++i) rest[i] = scaled[i];
#pragma unroll
  for (int part = 0; part < Parts::kParts; ++part) {
    std::uint32_t words[kPack / 2];
#pragma unroll
    for (int i = 0; i < kPack; i += 2) {
      const std::uint32_t word = round_to_pair<Part>(rest[i], rest[i + 1]);
      words[i / 2] = word;
      const float2 rounded = widen_pair<Part>(word);
      rest[i] -= rounded.x;
      rest[i + 1] -= rounded.y;
    }
    store_words(words, to + part * part_stride);
  }
}

// Calls use(i, load(i)) for i = first, first + step ... below `count`. A thread has kAhead loads in
// flight when it waits for memory.
template <int kAhead, class Load, class Use>
__device__ __forceinline__ void stream(std::int64_t first, std::int64_t step, std::int64_t count,
                                       const Load& load, const Use& use) {
  for (std::int64_t begin = first; begin < count; begin += kAhead * step) {
    Pack<float, kPack> packs[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (begin + i * step < count) packs[i] = load(begin + i * step);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (begin + i * step < count) use(begin + i * step, packs[i]);
    }
  }
}

// ---- Rows that are contiguous along k: kGroup threads take one ----

inline constexpr int kSplitRowsThreads = 256;
inline constexpr int kRowsAhead = 4;

struct SplitRowsStorage {
  std::uint32_t scratch[kMaxWarpsPerBlock];
  int scratch_of_sums[kMaxWarpsPerBlock];
};

template <class Parts, int kGroup, bool kPacked>
__global__ void __launch_bounds__(kSplitRowsThreads)
    split_rows_kernel(const __grid_constant__ FactorSplit<Parts> split) {
  constexpr int kRows = kSplitRowsThreads / kGroup;
  if (split.done != nullptr && *split.done != 0) return;
  auto& storage = shared<SplitRowsStorage>();
  const int lane = threadIdx.x % kGroup;
  const std::int64_t rows = split.matrices * split.rows;
  const std::int64_t part_stride = rows * split.pitch;
  const std::int64_t packs = (split.length + kPack - 1) / kPack;
  for (std::int64_t row = blockIdx.x * std::int64_t{kRows} + threadIdx.x / kGroup; row < rows;
       row += gridDim.x * std::int64_t{kRows}) {
    const float* const from = split.from + row * split.length;
    const auto load = [&](std::int64_t pack) {
      return load_floats<kPacked>(from + pack * kPack, split.length - pack * kPack);
    };

    // -- The scale --
    Magnitudes seen;
    stream<kRowsAhead>(lane, kGroup, packs, load,
                       [&](std::int64_t, const Pack<float, kPack>& values) {
#pragma unroll
                         for (int i = 0; i < kPack; ++i) seen.add(values.element[i]);
                       });
    if constexpr (kGroup == kWarpSize) {
#pragma unroll
      for (int distance = kWarpSize / 2; distance > 0; distance /= 2) seen.add_lanes(distance);
    } else {
      seen.largest = block_reduce(seen.largest, 0u, Maximum{}, storage.scratch);
      if constexpr (kCountsSpan<Parts>) {
        seen.least_less_1 =
            block_reduce(seen.least_less_1, 0xffffffffu, Minimum{}, storage.scratch);
      }
    }
    const int exponent = seen.exponent();
    if (lane == 0) {
      split.exponents[row] = exponent;
      if constexpr (kCountsSpan<Parts>) report_span(split.worst, seen);
    }

    // -- The parts --
    int largeness = 0;
    typename Parts::Part* const to = split.parts + row * split.pitch;
    stream<kRowsAhead>(
        lane, kGroup, packs, load, [&](std::int64_t pack, const Pack<float, kPack>& values) {
          float scaled[kPack];
#pragma unroll
          for (int i = 0; i < kPack; ++i) {
            scaled[i] = scale_by_power(values.element[i], Parts::kScaledExponent - exponent);
            if constexpr (!kCountsSpan<Parts>) largeness += largeness_of(scaled[i]);
          }
          store_parts<Parts>(scaled, to + pack * kPack, part_stride);
        });
    if constexpr (!kCountsSpan<Parts>) {
      if constexpr (kGroup == kWarpSize) {
        largeness = warp_reduce(largeness, Add{});
      } else {
        largeness = block_reduce(largeness, 0, Add{}, storage.scratch_of_sums);
      }
      if (lane == 0) report_small(split.worst, seen, split.length, largeness);
    }
  }
}

// ---- Rows of k: a block takes a strip of columns ----
//
// In a strip of 32 columns eight threads read one k, a line of memory; in a strip of 16, which is
// for few columns, four threads read half a line:
//
//     k 0    | t0   t1   t2   ..  t7   |
//     k 1    | t8   t9  ...            |

inline constexpr int kSplitColumnsThreads = 512;

template <int kStrip>
struct SplitColumnsStorage {
  std::uint32_t largest[kStrip];
  std::uint32_t least_less_1[kStrip];
  int largeness[kStrip];
};

template <class Parts, int kStrip, bool kPacked>
__global__ void __launch_bounds__(kSplitColumnsThreads)
    split_columns_kernel(const __grid_constant__ FactorSplit<Parts> split) {
  constexpr int kAcross = kStrip / kPack;
  constexpr int kDown = kSplitColumnsThreads / kAcross;
  auto& storage = shared<SplitColumnsStorage<kStrip>>();
  const int first = threadIdx.x % kAcross * kPack;
  const int down = threadIdx.x / kAcross;
  if (split.done != nullptr && *split.done != 0) return;
  const std::int64_t strips = (split.length + kStrip - 1) / kStrip;
  const std::int64_t part_stride = split.matrices * split.rows * split.pitch;
  for (std::int64_t number = blockIdx.x; number < split.matrices * strips; number += gridDim.x) {
    const std::int64_t matrix = number / strips;
    const std::int64_t col = (number - matrix * strips) * kStrip + first;
    const std::int64_t left = split.length - col;
    const float* const from = split.from + matrix * split.rows * split.length + col;
    const std::int64_t rows = left > 0 ? split.rows : 0;
    const auto load = [&](std::int64_t row) {
      return load_floats<kPacked>(from + row * split.length, left);
    };

    // -- The scales --
    if (threadIdx.x < kStrip) {
      storage.largest[threadIdx.x] = 0;
      storage.least_less_1[threadIdx.x] = 0xffffffff;
      if constexpr (!kCountsSpan<Parts>) storage.largeness[threadIdx.x] = 0;
    }
    __syncthreads();
    Magnitudes seen[kPack];
    stream<Parts::kColumnsAhead>(down, kDown, rows, load,
                                 [&](std::int64_t, const Pack<float, kPack>& values) {
#pragma unroll
                                   for (int i = 0; i < kPack; ++i) seen[i].add(values.element[i]);
                                 });
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
#pragma unroll
      for (int distance = kWarpSize / 2; distance >= kAcross; distance /= 2) {
        seen[i].add_lanes(distance);
      }
      if (threadIdx.x % kWarpSize < kAcross) {
        atomicMax(&storage.largest[first + i], seen[i].largest);
        atomicMin(&storage.least_less_1[first + i], seen[i].least_less_1);
      }
    }
    __syncthreads();
    int exponent[kPack];
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const Magnitudes all{storage.largest[first + i], storage.least_less_1[first + i]};
      exponent[i] = all.exponent();
      if (down == 0 && i < left) {
        split.exponents[matrix * split.length + col + i] = exponent[i];
        if constexpr (kCountsSpan<Parts>) report_span(split.worst, all);
      }
    }

    // -- The parts --
    int largeness[kPack] = {};
    typename Parts::Part* const to = split.parts + matrix * split.rows * split.pitch + col;
    stream<Parts::kColumnsAhead>(
        down, kDown, rows, load, [&](std::int64_t row, const Pack<float, kPack>& values) {
          float scaled[kPack];
#pragma unroll
          for (int i = 0; i < kPack; ++i) {
            scaled[i] = scale_by_power(values.element[i], Parts::kScaledExponent - exponent[i]);
            if constexpr (!kCountsSpan<Parts>) largeness[i] += largeness_of(scaled[i]);
          }
          store_parts<Parts>(scaled, to + row * split.pitch, part_stride);
        });
    if constexpr (!kCountsSpan<Parts>) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
#pragma unroll
        for (int distance = kWarpSize / 2; distance >= kAcross; distance /= 2) {
          largeness[i] += shuffle_xor(largeness[i], distance);
        }
        if (threadIdx.x % kWarpSize < kAcross) {
          atomicAdd(&storage.largeness[first + i], largeness[i]);
        }
      }
      __syncthreads();
      if (down == 0) {
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          const Magnitudes all{storage.largest[first + i], storage.least_less_1[first + i]};
          if (i < left) {
            report_small(split.worst, all, split.rows, storage.largeness[first + i]);
          }
        }
      }
    }
    __syncthreads();  // the next strip's scales overwrite this one's
  }
}

// ---- Launch ----

// Longer rows are split by a block, not a warp.
inline constexpr std::int64_t kLongestSplitOfWarp = 1024;

// Per multiprocessor. A split that may have nothing to do has no more blocks than run at a time:
// they exit at once.
inline constexpr int kBlocksIfDone = 8;

template <class Parts>
void launch_split(const Queue& queue, const FactorSplit<Parts>& split, bool deep, bool packed) {
  const auto grid_of = [&](std::int64_t blocks) {
    const std::int64_t most = std::int64_t{kBlocksIfDone} * queue.device->multiprocessors;
    return dim3(grid_extent(split.done == nullptr ? blocks : std::min(blocks, most)));
  };
  dispatch_value<false, true>(packed, [&](auto is_packed) {
    constexpr bool kPacked = decltype(is_packed)::value;
    if (!deep) {
      const auto strips = [&](int width) {
        return split.matrices * divide_up(split.length, width);
      };
      const int width = strips(32) < queue.device->multiprocessors ? 16 : 32;
      dispatch_power_of_two<16, 32>(width, [&](auto strip) {
        constexpr int kStrip = decltype(strip)::value;
        launch_kernel<split_columns_kernel<Parts, kStrip, kPacked>>(
            queue,
            {grid_of(strips(kStrip)), kSplitColumnsThreads, sizeof(SplitColumnsStorage<kStrip>)},
            split);
      });
      return;
    }
    const std::int64_t rows = split.matrices * split.rows;
    const auto launch_groups = [&](auto group) {
      constexpr int kGroup = decltype(group)::value;
      launch_kernel<split_rows_kernel<Parts, kGroup, kPacked>>(
          queue,
          {grid_of(divide_up(rows, kSplitRowsThreads / kGroup)), kSplitRowsThreads,
           sizeof(SplitRowsStorage)},
          split);
    };
    if (split.length <= kLongestSplitOfWarp) {
      launch_groups(Constant<kWarpSize>{});
    } else {
      launch_groups(Constant<kSplitRowsThreads>{});
    }
  });
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
