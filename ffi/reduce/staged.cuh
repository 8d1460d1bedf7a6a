// Algorithm `staged`, for short rows of any length: memory is read as one stretch, and each lane
// folds rows of its own.
//
// A row of 33 elements begins and ends inside packs that its neighbours share, and few lanes of a
// group on it would have a whole pack. So a warp copies tiles of whole rows, 32 or a multiple,
// which together begin and end with a pack, to its own part of shared memory; then each lane folds
// rows out of it, which takes no shuffle, and neighbouring lanes write neighbouring results:
//
//     global      | r0 r0 r0 r0 | r0 r1 r1 r1 | r1 r1 r2 r2 | ...      packs of 16 bytes
//     shared      r0[0 .. n)   r1[0 .. n)   r2[0 .. n)  ...            lane 0, lane 1, lane 2
//
// While a warp folds one tile, the next ones are on their way (cp.async). Warps do not wait for
// each other.
//
// A lane reads the words that cover its row: of 4 bytes, or of 8 if elements have 8. Neighbouring
// lanes read at the distance of a row. How many of them meet in a bank depends on its length:
//
//     an odd number of words                   1
//     an even number, no multiple of 4         2 at most
//     no whole words, elements of 2 bytes      2 at most
//     no whole words, elements of 1 byte       4 at most
#pragma once

#include <cstring>

#include "core/ptx/async_copy.cuh"
#include "core/shared.h"
#include "reduce/row_packs.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

// A row in shared memory, as packs of words that need not begin at multiples of 16 bytes.
template <class T>
class SharedRow {
 public:
  static constexpr int kPack = kWidestPack<T>;
  using Word = typename WordOf<(sizeof(T) > 4 ? sizeof(T) : 4)>::type;
  static constexpr int kPerWord = sizeof(Word) / sizeof(T);

  __device__ __forceinline__ SharedRow(const T* rows, int begin, int columns)
      : phase_(begin % kPerWord),
        end_(phase_ + columns),
        words_(reinterpret_cast<const Word*>(rows + begin - phase_)) {}

  // Elements from the first word to the row, and to its end.
  __device__ __forceinline__ int phase() const { return phase_; }
  __device__ __forceinline__ int end() const { return end_; }

  // The words from element `first` on: all, or those that have elements of the row.
  template <bool kAll>
  __device__ __forceinline__ RegisterPack<T, kPack> read(int first) const {
    constexpr int kWords = kPack / kPerWord;
    Word words[kWords] = {};
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (kAll || first + i * kPerWord < end_) words[i] = words_[first / kPerWord + i];
    }
    RegisterPack<T, kPack> pack;
    static_assert(sizeof(pack) == sizeof(words));
    std::memcpy(&pack, words, sizeof(pack));
    return pack;
  }

 private:
  int phase_;
  int end_;
  const Word* words_;
};

template <class Reducer>
__device__ __forceinline__ typename Reducer::Partial fold_shared_row(
    const SharedRow<typename Reducer::Element>& row, const typename Reducer::Reader& read) {
  using Row = SharedRow<typename Reducer::Element>;
  constexpr int kPack = Row::kPack;
  typename Reducer::Fold fold;
  Accumulator<typename Reducer::Element> value[kPack];
  const auto fold_some = [&](int first) {
    read.widen(row.template read<false>(first), value);
    const unsigned kept = bits_between<kPack>(row.phase() - first, row.end() - first);
    fold.add_kept(value, kept, first - row.phase(), 1);
  };
  int first = 0;
  if constexpr (Row::kPerWord > 1) {  // else no row begins inside a word
    fold_some(first);
    first += kPack;
  }
  for (; first + kPack <= row.end(); first += kPack) {
    read.widen(row.template read<true>(first), value);
    fold.add(value, first - row.phase(), 1);
  }
  if (first < row.end()) fold_some(first);
  return fold.value();
}

// Copies a tile: whole packs asynchronously. Elements after the last one, which only the array's
// last tile has, are copied at once.
template <class T>
__device__ __forceinline__ void copy_tile(const T* __restrict__ from, T* to, int count, int lane) {
  constexpr int kPack = kWidestPack<T>;
  const int packs = count / kPack;
  for (int pack = lane; pack < packs; pack += kWarpSize) {
    copy_async<16>(to + pack * kPack, from + pack * kPack, true);
  }
  const int rest = packs * kPack + lane;
  if (rest < count) to[rest] = from[rest];
}

// A tile has `lane_rows` rows for each lane.
template <class Reducer>
__global__ void __launch_bounds__(kStagedThreads)
    staged_kernel(const typename Reducer::Element* __restrict__ x, Target y, ContiguousRows rows,
                  int lane_rows) {
  using Element = typename Reducer::Element;
  const typename Reducer::Reader read(y);
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  const int columns = static_cast<int>(rows.columns);
  const int tile_rows = lane_rows * kWarpSize;
  const int tile_size = tile_rows * columns;
  Element* const stages = shared_array<Element>() + warp * kStagedStages * tile_size;

  const std::int64_t step = std::int64_t{gridDim.x} * warps * tile_rows;
  const auto rows_from = [&](std::int64_t first) {
    const std::int64_t left = rows.count - first;
    return left < tile_rows ? static_cast<int>(left) : tile_rows;
  };
  const auto ask = [&](std::int64_t first, Element* to) {
    if (first < rows.count) copy_tile(x + first * columns, to, rows_from(first) * columns, lane);
    end_copy_group();
  };
  std::int64_t first = (std::int64_t{blockIdx.x} * warps + warp) * tile_rows;
#pragma unroll
  for (int stage = 0; stage < kStagedStages; ++stage) {
    ask(first + stage * step, stages + stage * tile_size);
  }
  for (int stage = 0; first < rows.count; first += step) {
    Element* const tile = stages + stage * tile_size;
    wait_for_copy_groups<kStagedStages - 1>();
    __syncwarp();  // the copies of all lanes are there
    const int tile_end = rows_from(first);
    for (int row = lane; row < tile_end; row += kWarpSize) {
      const SharedRow<Element> own(tile, row * columns, columns);
      Reducer::store(y, first + row, fold_shared_row<Reducer>(own, read));
    }
    __syncwarp();  // all lanes have read the tile
    ask(first + kStagedStages * step, tile);
    stage = stage + 1 == kStagedStages ? 0 : stage + 1;
  }
}

template <class Instance>
void launch_staged(const Call& call) {
  const Config& config = call.config;
  launch_kernel<staged_kernel<typename Instance::First>>(
      call.queue,
      {grid_extent(config.blocks), static_cast<unsigned>(config.threads),
       static_cast<std::size_t>(config.shared_bytes)},
      Instance::elements(call), call.result(), call.rows(), config.lane_rows);
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
