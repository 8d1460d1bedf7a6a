// Algorithm `staged`, for short rows of any length: a warp reads contiguous memory across rows, and
// each lane folds rows of its own.
//
// A row of 33 elements begins and ends inside packs that it shares with its neighbours, and few
// lanes of a group would have a whole pack. So a warp copies a tile of 32 rows, or a multiple of
// 32, which begins and ends at pack boundaries, to its own part of shared memory. Then each lane
// folds rows of the tile, without shuffles, and neighbouring lanes write neighbouring results:
//
//     global      | r0 r0 r0 r0 | r0 r1 r1 r1 | r1 r1 r2 r2 | ...      packs of 16 bytes
//     shared      r0[0 .. n)   r1[0 .. n)   r2[0 .. n)  ...            lane 0, lane 1, lane 2
//
// A warp has one tile and waits for no other warp: while it waits for its copies, other warps of
// the multiprocessor fold their tiles. The code is short, since small arrays take about as long as
// it takes to fetch the instructions.
//
// Neighbouring lanes read shared memory with the stride of a row. How many of them access the same
// bank depends on its length:
//
//     an odd number of words                   1
//     an even number, no multiple of 4         2 at most
//     no whole words, elements of 2 bytes      2 at most
//     no whole words, elements of 1 byte       4 at most
#pragma once

#include "core/ptx/async_copy.cuh"
#include "core/shared.h"
#include "reduce/few_elements.cuh"
#include "reduce/instance.cuh"
#include "reduce/reducer.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

struct StagedRows {
  std::int64_t count;
  unsigned columns;
  unsigned lane_rows;  // rows of a tile per lane
};

// Copies a tile: whole packs asynchronously, and the elements after the last one, which only the
// array's last tile has, synchronously.
template <class T>
__device__ __forceinline__ void copy_tile(const T* __restrict__ from, T* to, unsigned count,
                                          unsigned lane) {
  constexpr unsigned kPack = kWidestPack<T>;
  const unsigned whole = count / kPack * kPack;
  constexpr unsigned kWarpPacks = kWarpSize * kPack;
  constexpr unsigned kCopies = 4;  // predicated: a warp would wait for a branch
  const T* source = from + lane * kPack;
  T* target = to + lane * kPack;
#pragma unroll 1
  for (unsigned first = lane * kPack; first < whole; first += kCopies * kWarpPacks) {
#pragma unroll
    for (unsigned i = 0; i < kCopies; ++i) {
      if (first + i * kWarpPacks < whole) {
        copy_async<16>(target + i * kWarpPacks, source + i * kWarpPacks, true);
      }
    }
    source += kCopies * kWarpPacks;
    target += kCopies * kWarpPacks;
  }
  const unsigned rest = whole + lane;
  if (rest < count) to[rest] = from[rest];
}

// Folds a row from element `first` on, kCount elements at a time; the rest with kCount / 2, and so
// on.
template <int kCount, class Reducer, class Fold>
__device__ __forceinline__ void fold_shared_row(const typename Reducer::Element* row, int first,
                                                int columns, const typename Reducer::Reader& read,
                                                Fold& fold) {
  const int end = columns / kCount * kCount;
#pragma unroll 1
  for (; first < end; first += kCount) {
    Accumulator<typename Reducer::Element> value[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) value[i] = read(row[first + i]);
    if constexpr (kIsIndexed<typename Reducer::Partial>) {
      const Fold before = fold;
      fold.add(value, 0, 1);
      fold.count_from(first, before);
    } else {
      fold.add(value, first, 1);
    }
  }
  if constexpr (kCount > 1) fold_shared_row<kCount / 2, Reducer>(row, first, columns, read, fold);
}

// Folds a row that begins at element `begin` of a tile, in words of two 16-bit elements. Its first
// and last word may have an element of a neighbouring row.
//
//     begin 17, 5 columns:     x  r0   r1 r2   r3 r4
//     begin 18, 5 columns:     r0 r1   r2 r3   r4 x
template <class Reducer>
__device__ __forceinline__ typename Reducer::Partial fold_shared_pairs(
    const typename Reducer::Element* tile, unsigned begin, int columns) {
  using Partial = typename Reducer::Partial;
  constexpr int kWords = 4;  // at a time
  const auto words = reinterpret_cast<const std::uint32_t*>(tile) + begin / 2;
  const int phase = static_cast<int>(begin % 2);
  const int last = (phase + columns - 1) / 2;
  PairFold<Reducer> fold;
  const std::uint32_t absent = fold.best;
  const auto word_at = [&](int i) {
    const std::uint32_t low = i > 0 || phase == 0 ? 0x0000ffffu : 0;
    const std::uint32_t high = i < last || (phase + columns) % 2 == 0 ? 0xffff0000u : 0;
    return (words[i] & (low | high)) | (absent & ~(low | high));
  };
  fold.add(word_at(0), 0);
  int first = 1;
  if (last > kWords) {
    do {  // the last of these words may have been folded before, which makes no difference
      first = min(first, last - kWords);
      const PairFold<Reducer> before = fold;
#pragma unroll
      for (int u = 0; u < kWords; ++u) fold.add(words[first + u], u);
      fold.count_from(first, before);
      first += kWords;
    } while (first < last);
  }
#pragma unroll 1
  for (; first < last; ++first) fold.add(words[first], first);
  if (last > 0) fold.add(word_at(last), last);

  const Partial low = fold.of_half(0);
  const Partial high = fold.of_half(1);
  if constexpr (kIsIndexed<Partial>) {
    const auto best = typename Reducer::Combine::Best{}(low.value, high.value);
    const int low_column = 2 * low.index - phase;
    const int high_column = 2 * high.index + 1 - phase;
    const bool is_high = low.value == high.value ? high_column < low_column : best == high.value;
    const int column = is_high ? high_column : low_column;
    return {best, column < 0 ? 0 : column};  // -1 is found if all elements are the worst ones
  } else {
    return typename Reducer::Combine{}(low, high);
  }
}

// argmax and argmin of a row that begins at element `begin` of a tile.
template <class Reducer>
__device__ __forceinline__ int best_of_shared(const typename Reducer::Element* tile, unsigned begin,
                                              int columns, const typename Reducer::Reader& read) {
  typename Reducer::Partial best;
  if constexpr (kComparesPairs<Reducer>) {
    best = fold_shared_pairs<Reducer>(tile, begin, columns);
  } else {
    ShortFold<Reducer> fold;
    fold_shared_row<8, Reducer>(tile + begin, 0, columns, read, fold);
    best = fold.partial;
  }
  if (best.value != best.value) {  // find the first NaN
    const auto is_nan = [&](int column) {
      const auto value = read(tile[begin + column]);
      return value != value;
    };
    best.index = 0;
    while (!is_nan(best.index)) ++best.index;
  }
  return best.index;
}

template <class Reducer>
__global__ void __launch_bounds__(kStagedThreads)
    staged_kernel(const typename Reducer::Element* __restrict__ x, StagedRows rows, Target y) {
  using Element = typename Reducer::Element;
  constexpr int kChunk = Reducer::kChunk > 8 ? Reducer::kChunk : 8;
  const typename Reducer::Reader read(y);
  const unsigned lane = threadIdx.x;
  const unsigned warp = threadIdx.y;
  const unsigned tile_rows = rows.lane_rows * kWarpSize;
  const unsigned tile_elements = tile_rows * rows.columns;
  const unsigned number = blockIdx.x * blockDim.y + warp;  // of the tile
  const std::int64_t first = std::int64_t{number} * tile_rows;
  if (first >= rows.count) return;

  const std::int64_t left = rows.count - first;
  const unsigned own_rows = left < tile_rows ? static_cast<unsigned>(left) : tile_rows;
  Element* const tile = shared_array<Element>() + warp * tile_elements;
  copy_tile(x + std::uint64_t{number} * tile_elements, tile, own_rows * rows.columns, lane);
  end_copy_group();
  wait_for_copy_groups<0>();
  __syncwarp();  // the copies of all lanes have completed

#pragma unroll 1
  for (unsigned row = lane; row < own_rows; row += kWarpSize) {
    if constexpr (kIsIndexed<typename Reducer::Partial>) {
      const int index = best_of_shared<Reducer>(tile, row * rows.columns, rows.columns, read);
      store_result(y, first + row, std::int64_t{index});
    } else if constexpr (kComparesPairs<Reducer>) {
      Reducer::store(y, first + row,
                     fold_shared_pairs<Reducer>(tile, row * rows.columns, rows.columns));
    } else {
      typename Reducer::Fold fold;
      fold_shared_row<kChunk, Reducer>(tile + row * rows.columns, 0, static_cast<int>(rows.columns),
                                       read, fold);
      Reducer::store(y, first + row, fold.value());
    }
  }
}

template <class Instance>
void launch_staged(const Call& call) {
  const auto& [queue, config, problem, buffers] = call;
  launch_kernel<staged_kernel<typename Instance::OfShortRows>>(
      queue,
      {grid_extent(config.blocks), dim3(kWarpSize, config.threads / kWarpSize),
       static_cast<std::size_t>(config.shared_bytes)},
      Instance::elements(call),
      StagedRows{problem.rows(), static_cast<unsigned>(problem.columns),
                 static_cast<unsigned>(config.lane_rows)},
      call.result());
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
