// The pieces of rows that warps hold in shared memory, for the algorithms `cluster_shared` and
// `split_pipelined`.
//
// The shared memory of a multiprocessor holds one and a half times the rows that its registers
// hold, and copies in flight to it take no registers. Each warp has a few pieces of its own, as
// long as its registers can process at a time: one lane issues the bulk copy of a piece, and all
// lanes wait for it. They reduce it, and when the state of the row is known they read it again for
// the results.
#pragma once

#include "core/ptx/bulk_copy.cuh"
#include "softmax/block.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// The kCount pieces of the calling warp, each with room for the packs of each operand that the
// warp's registers hold, one operand after the other.
template <class Fragment, int kCount>
class Pieces {
 public:
  using T = typename Fragment::Element;
  using Slice = typename Fragment::Slice;
  static constexpr int kPacks = kWarpSize * Fragment::kHeld;  // of each operand
  static constexpr int kBytes = kCount * Fragment::kOperands * kPacks * 16;

  // copied, copies: the mbarriers and buffers of all warps of the block, one warp after the other.
  __device__ __forceinline__ Pieces(const KernelArgs<T>& args, Mbarrier* copied, void* copies)
      : args_(args),
        copied_(copied + threadIdx.x / kWarpSize * kCount),
        copies_(static_cast<T*>(copies) + threadIdx.x / kWarpSize * kCount * kElements) {}

  // Must be called first, by the whole warp.
  __device__ __forceinline__ void start() const {
    for (int p = 0; p < kCount; ++p) {
      if (threadIdx.x % kWarpSize == 0) initialise(copied_ + p);
    }
    __syncwarp();
  }

  // Issues the copies of the packs of a slice from `offset` on: as many as a piece has room for, of
  // those that lie entirely within the array and are read at all. One lane calls it, after all
  // lanes have loaded the previous contents of the piece.
  __device__ __forceinline__ void request(const RowSlice<Fragment>& row_slice, std::int64_t offset,
                                          int piece) const {
    const std::int64_t from = row_slice.begin + offset;
    const std::int64_t first = row_slice.row.begin - row_slice.row.phase + from * Fragment::kPack;
    std::int64_t packs = (args_.size - first) / Fragment::kPack;
    if (packs > row_slice.end - from) packs = row_slice.end - from;
    if (packs > kPacks) packs = kPacks;
    if constexpr (kHasMask<Fragment::kLayout>) {
      const std::int64_t readable = row_slice.row.mask.readable();
      const std::int64_t read =
          (row_slice.row.phase + readable + Fragment::kPack - 1) / Fragment::kPack - from;
      if (packs > read) packs = read;
    }
    const auto bytes = static_cast<unsigned>(packs > 0 ? packs * 16 : 0);
    announce(copied_ + piece, Fragment::kOperands * bytes);
    if (bytes == 0) return;
#pragma unroll
    for (int o = 0; o < Fragment::kOperands; ++o) {
      copy_bulk(copies(piece) + o * kPacks * Fragment::kPack, Fragment::operand(args_, o) + first,
                bytes, copied_ + piece);
    }
  }

  __device__ __forceinline__ void wait_for(int piece, unsigned phase) const {
    wait(copied_ + piece, phase);
  }

  // The calling lane's packs.
  __device__ __forceinline__ Slice packs(const RowSlice<Fragment>& row_slice,
                                         std::int64_t offset) const {
    const std::int64_t first = row_slice.begin + offset;
    const std::int64_t end = first + kPacks < row_slice.end ? first + kPacks : row_slice.end;
    return Slice(args_, row_slice.row, first + threadIdx.x % kWarpSize, end, kWarpSize);
  }

  template <bool kOnce>
  __device__ __forceinline__ void load(Fragment& fragment, const Slice& packs, int piece) const {
    fragment.template load<kOnce>(args_, packs,
                                  copies(piece) + threadIdx.x % kWarpSize * Fragment::kPack);
  }

 private:
  static constexpr int kElements = kBytes / kCount / static_cast<int>(sizeof(T));

  __device__ __forceinline__ T* copies(int piece) const { return copies_ + piece * kElements; }

  const KernelArgs<T>& args_;
  Mbarrier* copied_;
  T* copies_;
};

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
