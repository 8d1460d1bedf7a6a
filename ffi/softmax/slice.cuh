// The parts of rows that blocks hold in shared memory, for the algorithms `cluster` and `split`.
//
// A multiprocessor's shared memory holds half as much again as its registers hold of rows, and
// while that is on its way no registers wait for it. Each warp has a few pieces of its own, as long
// as its registers take at a time: one lane asks for a piece, and all lanes wait for it. In a
// slice, of which a multiprocessor has room for three of 64 KiB, they lie side by side:
//
//     slice -> | warp 0: piece 0 | piece 1 | ... | warp 1: piece 0 | piece 1 | ... | warp 2 ...
//
// The warps reduce one after the other, and when the state of the row is known read them again for
// the results.
//
// From when its slice has come to when it writes, nothing is on its way to a block, so that every
// cycle counts, for which it takes many independent instructions: with pieces half as long,
// clusters take 1 to 10 % more time, with a quarter 20 %, and 10 % if all pieces of a short slice
// are short, in place of its last ones.
#pragma once

#include "core/ptx.cuh"
#include "core/shared.h"
#include "softmax/block.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

#ifndef JAX_GPUOPS_INTERPRET
// The pieces that the calling warp has of rows: kCount, each with room for what the warp's
// registers hold of each operand, one operand behind the other.
template <class Share, int kCount>
class Pieces {
 public:
  using T = typename Share::Element;
  using Packs = typename Share::Packs;
  static constexpr int kPacks = kWarpSize * Share::kHeld;  // of each operand
  static constexpr int kBytes = kCount * Share::kOperands * kPacks * 16;

  // copied, copies: of all warps of the block, one behind the other.
  __device__ __forceinline__ Pieces(const Tensors<T>& tensors, CopyBarrier* copied, void* copies)
      : tensors_(tensors),
        copied_(copied + threadIdx.x / kWarpSize * kCount),
        copies_(static_cast<T*>(copies) + threadIdx.x / kWarpSize * kCount * kElements) {}

  // To be called first, by the whole warp.
  __device__ __forceinline__ void start() const {
    for (int p = 0; p < kCount; ++p) {
      if (threadIdx.x % kWarpSize == 0) initialise(copied_ + p);
    }
    __syncwarp();
  }

  // Asks for the packs of a part of a row from `offset` on, as many as a piece has room for, as far
  // as they lie whole in the array and are read at all. One lane calls it, when all of them have
  // loaded what was there.
  __device__ __forceinline__ void request(const Part<Share>& part, std::int64_t offset,
                                          int piece) const {
    const std::int64_t from = part.begin + offset;
    const std::int64_t first = part.row.begin - part.row.phase + from * Share::kPack;
    std::int64_t packs = (tensors_.size - first) / Share::kPack;
    if (packs > part.end - from) packs = part.end - from;
    if (packs > kPacks) packs = kPacks;
    if constexpr (kHasMask<Share::kKind>) {
      const std::int64_t readable = part.row.selection.readable();
      const std::int64_t read = (readable + Share::kPack - 1) / Share::kPack - from;
      if (packs > read) packs = read;
    }
    const auto bytes = static_cast<unsigned>(packs > 0 ? packs * 16 : 0);
    announce(copied_ + piece, Share::kOperands * bytes);
    if (bytes == 0) return;
#pragma unroll
    for (int o = 0; o < Share::kOperands; ++o) {
      copy_bulk(copies(piece) + o * kPacks * Share::kPack, Share::operand(tensors_, o) + first,
                bytes, copied_ + piece);
    }
  }

  __device__ __forceinline__ void wait_for(int piece, unsigned phase) const {
    wait(copied_ + piece, phase);
  }

  // The calling lane's packs.
  __device__ __forceinline__ Packs packs(const Part<Share>& part, std::int64_t offset) const {
    const std::int64_t first = part.begin + offset;
    const std::int64_t end = first + kPacks < part.end ? first + kPacks : part.end;
    return Packs(tensors_, part.row, first + threadIdx.x % kWarpSize, end, kWarpSize);
  }

  template <bool kOnce>
  __device__ __forceinline__ void load(Share& share, const Packs& packs, int piece) const {
    share.template load<kOnce>(tensors_, packs,
                               copies(piece) + threadIdx.x % kWarpSize * Share::kPack);
  }

 private:
  static constexpr int kElements = kBytes / kCount / static_cast<int>(sizeof(T));

  __device__ __forceinline__ T* copies(int piece) const { return copies_ + piece * kElements; }

  const Tensors<T>& tensors_;
  CopyBarrier* copied_;
  T* copies_;
};

inline constexpr int kSliceWarps = kSliceThreads / kWarpSize;
inline constexpr int kMostPieces = 4;

// What lies before a slice in shared memory: barriers, and what combines the states of slices.
template <class Own>
struct alignas(kSharedAlignment) SliceStorage {
  Own own;
  CopyBarrier copied[kSliceWarps * kMostPieces];
};

// The slices that a block takes of rows: the packs from rank * size on, `size` of each operand.
template <class Share>
class Slices {
 public:
  using T = typename Share::Element;
  using State = typename Share::State;

  template <class Own>
  __device__ __forceinline__ Slices(const Tensors<T>& tensors, SliceStorage<Own>& storage, int rank,
                                    std::int64_t size)
      : tensors_(tensors),
        pieces_(tensors, storage.copied, &storage + 1),
        rank_(rank),
        size_(size) {}

  // Asks for the first row's.
  __device__ __forceinline__ void start(std::int64_t number) const {
    pieces_.start();
    for (int p = 0; p < kPieces; ++p) request(number, p);
  }

  // Takes the rows first, first + step ... of which start() asked for the first. combine(state)
  // makes the state of a row of those of all warps.
  template <class Combine>
  __device__ __forceinline__ void take(const Exponents<T>& exponents, std::int64_t first,
                                       std::int64_t step, Combine&& combine) const {
    unsigned phase = 0;
    for (std::int64_t number = first; number < tensors_.rows.count; number += step) {
      const Part<Share> part(tensors_, number, rank_, size_);
      const RowResult<State> row_result(tensors_, number, rank_ == 0 && threadIdx.x == 0);
      State state = State::none();
#pragma unroll 1
      for (int p = 0; p < kPieces; ++p) {
        pieces_.wait_for(p, phase);
        Share share;
        pieces_.template load<kOnce>(share, pieces_.packs(part, offset(p)), p);
        state = combined(exponents, state, share.template reduce<1>(tensors_));
      }
      state = combine(combine_lanes<kWarpSize>(exponents, state));
#pragma unroll 1
      for (int p = 0; p < kPieces; ++p) {
        Share share;
        const auto packs = pieces_.packs(part, offset(p));
        pieces_.template load<kOnce>(share, packs, p);
        if (tensors_.y != nullptr) share.template write_fresh<kOnce>(tensors_, packs, state);
        request(number + step, p);
      }
      row_result.write(tensors_, number, state);
      phase ^= 1;
    }
  }

 private:
  static constexpr int kPieces =
      kSlicePacks / (kSliceWarps * kWarpSize * Share::kHeld * Share::kOperands);
  static_assert(kPieces <= kMostPieces);
  // All pieces but those that a slice ends in are full, so that it pays to ask that once.
  static constexpr bool kOnce = true;

  // Where in the slice a piece of the calling warp begins.
  __device__ __forceinline__ static std::int64_t offset(int piece) {
    const int warp = threadIdx.x / kWarpSize;
    return (warp * kPieces + piece) * Pieces<Share, kPieces>::kPacks;
  }

  __device__ __forceinline__ void request(std::int64_t number, int piece) const {
    __syncwarp();
    if (threadIdx.x % kWarpSize != 0 || number >= tensors_.rows.count) return;
    pieces_.request(Part<Share>(tensors_, number, rank_, size_), offset(piece), piece);
  }

  const Tensors<T>& tensors_;
  Pieces<Share, kPieces> pieces_;
  int rank_;
  std::int64_t size_;
};
#endif

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
