// A contiguous row as packs of 16 bytes that are aligned to 16 bytes, so that rows of any length
// and alignment are read by vectorized loads.
//
//     addresses         |0              |16             |32             |48
//     row (4 bytes)             x0  x1  x2  x3  x4  x5  x6  x7  x8  x9
//     packs             |--- pack 0 ----|--- pack 1 ----|--- pack 2 ----|
//                         edge            whole           edge
//
// The packs that a row begins and ends in, if it shares them with its neighbours, are its edges:
// they are read whole too, and the neighbours' elements are ignored. If the first or last pack
// extends beyond the array, its elements are read one by one.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/cuda.h"
#include "core/row_masks.cuh"
#include "core/vector.h"
#include "reduce/instance.cuh"
#include "reduce/reducer.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

// A bit for each element of a pack from `begin` on and before `end`; both may be outside the pack.
template <int kPack>
__device__ __forceinline__ unsigned bits_between(std::int64_t begin, std::int64_t end) {
  constexpr unsigned kAll = (1u << kPack) - 1;
  const unsigned from = begin <= 0 ? kAll : begin < kPack ? kAll << begin : 0;
  const unsigned to = end >= kPack ? kAll : end > 0 ? (1u << end) - 1 : 0;
  return from & to;
}

// Returns `kept`, whose bits are for the columns first, first + 1, ..., without the bits of columns
// that the mask excludes. The mask is read only for bits that are set: other columns may be outside
// the row.
template <int kPack, class RowMask>
__device__ __forceinline__ unsigned kept_by(const RowMask& mask, std::int64_t first,
                                            unsigned kept) {
  if constexpr (!std::is_same_v<RowMask, NoMasks::Row>) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if ((kept >> i & 1) != 0 && !mask(first + i)) kept &= ~(1u << i);
    }
  }
  return kept;
}

// `Index` is the type of positions in a row.
template <class T, class Index>
class RowPacks {
 public:
  static constexpr int kPack = kWidestPack<T>;
  using Elements = RegisterPack<T, kPack>;

  __device__ __forceinline__ RowPacks(const T* array, ContiguousRows rows, std::int64_t row)
      : array_(array), array_end_(array + rows.count * rows.columns) {
    // Not the row's address minus the phase: the compiler would use both for each pack's address.
    constexpr std::uintptr_t kBytes = kPack * sizeof(T);
    const auto begin = reinterpret_cast<std::uintptr_t>(array + row * rows.columns);
    packs_ = reinterpret_cast<const T*>(begin & ~(kBytes - 1));
    phase_ = elements_past_alignment<kPack>(array + row * rows.columns);
    end_ = phase_ + static_cast<Index>(rows.columns);
  }

  // The whole packs are first_whole() to end_whole() - 1.
  __device__ __forceinline__ Index first_whole() const { return phase_ == 0 ? 0 : 1; }
  __device__ __forceinline__ Index end_whole() const { return end_ / kPack; }

  // The edges are the packs edge(0) and edge(1), if has_edge(0) and has_edge(1).
  __device__ __forceinline__ bool has_edges() const { return phase_ != 0 || end_ % kPack != 0; }
  __device__ __forceinline__ bool has_edge(int which) const {
    return which == 0 ? phase_ != 0 : end_ % kPack != 0 && end_whole() >= first_whole();
  }
  __device__ __forceinline__ Index edge(int which) const { return which == 0 ? 0 : end_whole(); }

  __device__ __forceinline__ Elements read(Index pack) const {
    return read_pack<kPack>(packs_ + pack * kPack);
  }
  __device__ __forceinline__ T element(Index pack, int i) const { return packs_[pack * kPack + i]; }

  // The column of a pack's first element, which may belong to a neighbouring row.
  __device__ __forceinline__ std::int64_t column(Index pack) const { return pack * kPack - phase_; }

  // Which elements of a pack belong to the row.
  __device__ __forceinline__ unsigned kept(Index pack) const {
    return bits_between<kPack>(phase_ - pack * kPack, end_ - pack * kPack);
  }

  __device__ __forceinline__ bool lies_in_array(Index pack) const {
    const T* const begin = packs_ + pack * kPack;
    return begin >= array_ && begin + kPack <= array_end_;
  }

 private:
  const T* array_;
  const T* array_end_;
  const T* packs_;  // where pack 0 begins
  int phase_;       // elements from there to the row
  Index end_;       // elements from there to the row's end
};

// Folds the share of thread `thread` of `threads` in a row: whole packs thread, thread + threads,
// ..., and for the first two threads an edge each. A thread loads kBatch packs before it folds the
// first of them: waiting for each pack would leave memory idle. All threads have the same number of
// full batches, so that those of a warp wait together, and then the rest. Edges are loaded with the
// rest: if they were loaded first, they would take eight registers throughout the loop, and fewer
// threads would be resident. They have a fold of their own, since columns ascend in a fold. There
// must be at least two threads, if rows are not whole packs.
template <class Reducer, int kBatch, class Index, class RowMask>
__device__ __forceinline__ typename Reducer::Partial fold_row(
    const RowPacks<typename Reducer::Element, Index>& row, const RowMask& mask,
    const typename Reducer::Reader& read, int thread, int threads) {
  using Element = typename Reducer::Element;
  using Packs = RowPacks<Element, Index>;
  using Elements = typename Packs::Elements;
  constexpr int kPack = Packs::kPack;
  constexpr unsigned kAll = (1u << kPack) - 1;
  constexpr int kFolded = packs_folded<Reducer>(kBatch, kPack);  // at a time

  const auto fold_pack = [&](typename Reducer::Fold& fold, const Elements& elements,
                             std::int64_t column, unsigned kept) {
    Accumulator<Element> value[kPack];
    read.widen(elements, value);
    fold.add_kept(value, kept_by<kPack>(mask, column, kept), column, 1);
  };

  typename Reducer::Fold fold;
  Elements elements[kBatch] = {};  // g++ does not see that only loaded packs are used
  const Index end = row.end_whole();
  const Index batch = static_cast<Index>(kBatch) * threads;
  Index first = row.first_whole();
  const auto at = [&](int i) { return first + static_cast<Index>(i) * threads + thread; };
  for (; first + batch <= end; first += batch) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) elements[i] = row.read(at(i));
#pragma unroll
    for (int i = 0; i < kBatch; i += kFolded) {
      if constexpr (kFolded == 1) {
        fold_pack(fold, elements[i], row.column(at(i)), kAll);
      } else {  // the reducer does not use columns
        Accumulator<Element> chunk[kFolded * kPack];
        unsigned kept = 0;
#pragma unroll
        for (int j = 0; j < kFolded; ++j) {
          Accumulator<Element> value[kPack];
          read.widen(elements[i + j], value);
#pragma unroll
          for (int e = 0; e < kPack; ++e) chunk[j * kPack + e] = value[e];
          kept |= kept_by<kPack>(mask, row.column(at(i + j)), kAll) << (j * kPack);
        }
        fold.add_kept(chunk, kept, 0, 1);
      }
    }
  }
  if (first >= end && !row.has_edges()) return fold.value();

  const bool has_edge = row.has_edges() && thread < 2 && row.has_edge(thread);
  const Index edge = row.edge(thread);
  bool edge_is_pack = false;
  Elements edge_elements{};
  if (has_edge) {
    edge_is_pack = row.lies_in_array(edge);
    if (edge_is_pack) edge_elements = row.read(edge);
  }
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    if (at(i) < end) elements[i] = row.read(at(i));
  }
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    if (at(i) < end) fold_pack(fold, elements[i], row.column(at(i)), kAll);
  }
  if (!has_edge) return fold.value();

  typename Reducer::Fold fold_edge;
  if (edge_is_pack) {
    fold_pack(fold_edge, edge_elements, row.column(edge), row.kept(edge));
  } else {
    const unsigned kept = kept_by<kPack>(mask, row.column(edge), row.kept(edge));
#pragma unroll 1
    for (int i = 0; i < kPack; ++i) {
      if ((kept >> i & 1) == 0) continue;
      const Accumulator<Element> value[1] = {read(row.element(edge, i))};
      fold_edge.add(value, row.column(edge) + i, 1);
    }
  }
  return typename Reducer::Combine{}(fold.value(), fold_edge.value());
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
