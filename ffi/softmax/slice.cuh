// Slices: the parts of rows that blocks hold in shared memory, for the algorithms `cluster` and
// `split`.
//
// A multiprocessor has room for three slices of 64 KiB, half as much again as its registers hold of
// rows, and while they are on their way no registers wait for them. Each warp has a few pieces side
// by side, as long as its registers take at a time:
//
//     slice -> | warp 0: piece 0 | piece 1 | ... | warp 1: piece 0 | piece 1 | ... | warp 2 ...
//
// One lane asks for a piece and all lanes wait for it. They reduce one after the other, and when
// the state of the row is known read them again for the results. A block that takes a row after the
// other asks for a piece of the next one as soon as it has no more use for that of the last.
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
inline constexpr int kSliceWarps = kSliceThreads / kWarpSize;
inline constexpr int kMostPieces = 4;

// What lies before a slice in shared memory: barriers, and what combines the states of slices.
template <class Own>
struct alignas(kSharedAlignment) SliceStorage {
  Own own;
  CopyBarrier copied[kMostPieces][kSliceWarps];
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
        copied_(&storage.copied[0][threadIdx.x / kWarpSize]),
        copies_(reinterpret_cast<T*>(&storage + 1) +
                threadIdx.x / kWarpSize * (kPieces * kPieceElements)),
        rank_(rank),
        size_(size) {}

  // Asks for the first row's.
  __device__ __forceinline__ void start(std::int64_t number) const {
    for (int p = 0; p < kPieces; ++p) {
      if (threadIdx.x % kWarpSize == 0) initialise(copied(p));
      request(number, p);
    }
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
        wait(copied(p), phase);
        Share share;
        load(share, part, p);
        state = combined(exponents, state, share.template reduce<1>(tensors_));
      }
      state = combine(combine_lanes<kWarpSize>(exponents, state));
#pragma unroll 1
      for (int p = 0; p < kPieces; ++p) {
        Share share;
        load(share, part, p);
        if (tensors_.y != nullptr) {
          share.template write_fresh<kOnce>(tensors_, packs(part, p), state);
        }
        request(number + step, p);
      }
      row_result.write(tensors_, number, state);
      phase ^= 1;
    }
  }

 private:
  using Packs = typename Share::Packs;
  static constexpr int kPiece = kWarpSize * Share::kHeld;  // packs
  static constexpr int kPieceElements = Share::kOperands * kPiece * Share::kPack;
  static constexpr int kPieces = kSlicePacks / (kSliceWarps * kPiece * Share::kOperands);
  static_assert(kPieces <= kMostPieces);
  // All pieces but those that a slice ends in are full, so that it pays to ask that once.
  static constexpr bool kOnce = true;

  __device__ __forceinline__ CopyBarrier* copied(int piece) const {
    return copied_ + piece * kSliceWarps;
  }
  __device__ __forceinline__ T* copies(int piece) const { return copies_ + piece * kPieceElements; }

  // Where a piece begins in the row.
  __device__ __forceinline__ std::int64_t begin(const Part<Share>& part, int piece) const {
    const int warp = threadIdx.x / kWarpSize;
    return part.begin + (warp * kPieces + piece) * kPiece;
  }

  // The calling lane's packs of it.
  __device__ __forceinline__ Packs packs(const Part<Share>& part, int piece) const {
    const std::int64_t first = begin(part, piece);
    const std::int64_t end = first + kPiece < part.end ? first + kPiece : part.end;
    return Packs(tensors_, part.row, first + threadIdx.x % kWarpSize, end, kWarpSize);
  }

  __device__ __forceinline__ void load(Share& share, const Part<Share>& part, int piece) const {
    share.template load<kOnce>(tensors_, packs(part, piece),
                               copies(piece) + threadIdx.x % kWarpSize * Share::kPack);
  }

  // Asks for a piece of each operand, as far as it lies in the slice, whole in the array, and is
  // read at all. They come one behind the other.
  __device__ __forceinline__ void request(std::int64_t number, int piece) const {
    __syncwarp();  // all lanes have loaded what was there
    if (threadIdx.x % kWarpSize != 0 || number >= tensors_.rows.count) return;
    const Part<Share> part(tensors_, number, rank_, size_);
    const std::int64_t from = begin(part, piece);
    const std::int64_t first = part.row.begin - part.row.phase + from * Share::kPack;
    std::int64_t packs = (tensors_.size - first) / Share::kPack;
    if (packs > part.end - from) packs = part.end - from;
    if (packs > kPiece) packs = kPiece;
    if constexpr (kHasMask<Share::kKind>) {
      const std::int64_t readable = part.row.selection.readable();
      const std::int64_t read = (readable + Share::kPack - 1) / Share::kPack - from;
      if (packs > read) packs = read;
    }
    const auto bytes = static_cast<unsigned>(packs > 0 ? packs * 16 : 0);
    announce(copied(piece), Share::kOperands * bytes);
    if (bytes == 0) return;
#pragma unroll
    for (int o = 0; o < Share::kOperands; ++o) {
      copy_bulk(copies(piece) + o * kPiece * Share::kPack, Share::operand(tensors_, o) + first,
                bytes, copied(piece));
    }
  }

  const Tensors<T>& tensors_;
  CopyBarrier* copied_;
  T* copies_;
  int rank_;
  std::int64_t size_;
};
#endif

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
