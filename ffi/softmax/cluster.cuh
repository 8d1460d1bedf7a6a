// softmax, algorithm `cluster`: a thread block cluster of up to 16 blocks holds a row, each block a
// slice of it, in registers or, if it is longer, in shared memory.
//
// Each block reduces its slice to a state, as in block.cuh. Then it sends its state to all blocks
// through distributed shared memory, and waits until all states have arrived in its own slots:
//
//     block 0                                   block 1
//     warps -> slots -> state                   warps -> slots -> state
//     state --> slot 0 in 0 and 1               state --> slot 1 in 0 and 1
//
// No cluster takes a second row, as in block.cuh.
#pragma once

#include "core/ptx/cluster.cuh"
#include "core/shared.h"
#include "softmax/block.cuh"
#include "softmax/launcher.cuh"
#include "softmax/pieces.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// Two sets of slots, as in BlockStorage.
template <class State>
struct alignas(kSharedAlignment) ClusterStorage {
  BlockStorage<State> own;
  State slots[2][kMostClusterBlocks];
  Mbarrier arrived[2];
};

// Exchanges the states of the blocks of a cluster. A cluster barrier would do as well, but it waits
// for all earlier writes of a thread, including the results of the last row.
template <class State>
class Exchange {
 public:
  __device__ __forceinline__ Exchange(ClusterStorage<State>& storage, int blocks)
      : storage_(storage), blocks_(blocks), rank_(cluster_rank()) {}

  // Must be called before the first combine(), which waits until all blocks have called it: no
  // state may be sent to a block that has not. Callers have issued the loads of the first row
  // before.
  __device__ __forceinline__ void start() {
    if (started_) return;
    if (threadIdx.x == 0) {
      initialise(storage_.arrived);
      initialise(storage_.arrived + 1);
    }
    // The threads of the block see the mbarriers after this, and those of other blocks after the
    // cluster barrier. combine_block() writes other parts of the storage.
    __syncthreads();
    cluster_arrive();
    started_ = true;
  }

  __device__ __forceinline__ int rank() const { return rank_; }

  // The state of the cluster, from the states of the calling warps. No block exits before all
  // states that are sent to it have arrived.
  template <class T>
  __device__ __forceinline__ State combine(const Exponents<T>& exponents, State state) {
    state = combine_block(exponents, state, storage_.own.slots[turn_]);
    if (!ready_) cluster_wait();
    ready_ = true;
    State* const slots = storage_.slots[turn_];
    Mbarrier* const arrived = storage_.arrived + turn_;
    const int thread = threadIdx.x;
    if (thread == 0) announce(arrived, static_cast<unsigned>(blocks_ * sizeof(State)));
    if (thread < blocks_) send(state, slots + rank_, arrived, thread);
    wait(arrived, phase_);
    phase_ ^= turn_;
    const int slot = thread % kMostClusterBlocks;
    const State total =
        combine_lanes<kMostClusterBlocks>(exponents, slot < blocks_ ? slots[slot] : State::none());
    turn_ ^= 1;
    return total;
  }

 private:
  ClusterStorage<State>& storage_;
  int blocks_;
  int rank_;
  int turn_ = 0;
  unsigned phase_ = 0;
  bool started_ = false;
  bool ready_ = false;
};

// ---- Slices that registers hold ----

// The lanes of a warp, which compute their maximum by shuffles: clusters of 16 blocks are slower
// with the redux instruction (docs/tuning.md).
struct ShufflingLanes : Lanes<kWarpSize> {
  template <class A>
  __device__ __forceinline__ static A largest(A value) {
    return group_reduce<kWarpSize>(value, Largest{});
  }
};

template <class Fragment>
__global__ void __launch_bounds__(kClusterThreads, kClusterBlocksResident)
    cluster_kernel(const __grid_constant__ KernelArgs<typename Fragment::Element> args, int blocks,
                   std::int64_t size, int piece) {
#if JAX_GPUOPS_HAS_CLUSTERS
  using T = typename Fragment::Element;
  using State = typename Fragment::State;
  auto& storage = shared<ClusterStorage<State>>();
  const Exponents<T> exponents(args.function, args.scale);
  Exchange<State> exchange(storage, blocks);
  const int rank = exchange.rank();
  for (std::int64_t number = blockIdx.x / blocks; number < args.rows.count;
       number += gridDim.x / blocks) {
    const RowSlice<Fragment> row_slice(args, number, rank, size);
    Fragment fragment;
    fragment.load(args, row_slice.held(piece));
    exchange.start();
    const RowResult<State> row_result(args, number, rank == 0 && threadIdx.x == 0);
    const State state = exchange.combine(exponents, fragment.reduce(args, ShufflingLanes{}));
    write_results(fragment, args, number, row_slice.held(piece), state, row_result);
  }
#else
  __trap();
#endif
}

// ---- Slices that shared memory holds ----

// A multiprocessor has room for three slices of 64 KiB. The pieces of a warp are contiguous:
//
//     slice -> | warp 0: piece 0 | piece 1 | ... | warp 1: piece 0 | piece 1 | ... | warp 2 ...
//
// From the arrival of its slice until it writes, a block has no loads in flight, so every cycle
// counts. That takes many independent instructions: pieces are as long as registers allow, and only
// the last pieces of a short slice are shorter.

inline constexpr int kSliceWarps = kSliceThreads / kWarpSize;
inline constexpr int kMostPieces = 4;

// The part of shared memory before a slice.
template <class State>
struct alignas(kSharedAlignment) SliceStorage {
  ClusterStorage<State> own;
  Mbarrier copied[kSliceWarps * kMostPieces];
};

// The slices of rows that a block holds: `size` packs of each operand, from rank * size on.
template <class Fragment>
class Slices {
 public:
  using T = typename Fragment::Element;
  using State = typename Fragment::State;

  __device__ __forceinline__ Slices(const KernelArgs<T>& args, SliceStorage<State>& storage,
                                    int rank, std::int64_t size)
      : args_(args), pieces_(args, storage.copied, &storage + 1), rank_(rank), size_(size) {}

  // Issues the copies of the first row's slice.
  __device__ __forceinline__ void start(std::int64_t number) const {
    pieces_.start();
    for (int p = 0; p < kPieces; ++p) request(number, p);
  }

  // Processes the rows first, first + step ...; start() has issued the copies of the first.
  // combine(state) makes the state of a row from those of all warps.
  template <class Combine>
  __device__ __forceinline__ void take(const Exponents<T>& exponents, std::int64_t first,
                                       std::int64_t step, Combine&& combine) const {
    unsigned phase = 0;
    for (std::int64_t number = first; number < args_.rows.count; number += step) {
      const RowSlice<Fragment> row_slice(args_, number, rank_, size_);
      const RowResult<State> row_result(args_, number, rank_ == 0 && threadIdx.x == 0);
      State state = State::none();
#pragma unroll 1
      for (int p = 0; p < kPieces; ++p) {
        pieces_.wait_for(p, phase);
        Fragment fragment;
        pieces_.template load<kOnce>(fragment, pieces_.packs(row_slice, offset(p)), p);
        state = combined(exponents, state, fragment.template reduce<1>(args_));
      }
      state = combine(combine_lanes<kWarpSize>(exponents, state));
#pragma unroll 1
      for (int p = 0; p < kPieces; ++p) {
        Fragment fragment;
        const auto packs = pieces_.packs(row_slice, offset(p));
        pieces_.template load<kOnce>(fragment, packs, p);
        if (args_.y != nullptr) fragment.template write_fresh<kOnce>(args_, packs, state);
        request(number + step, p);
      }
      row_result.write(args_, number, state);
      phase ^= 1;
    }
  }

 private:
  static constexpr int kPieces =
      kSlicePacks / (kSliceWarps * kWarpSize * Fragment::kHeld * Fragment::kOperands);
  static_assert(kPieces <= kMostPieces);
  // All pieces except those in which a slice ends are full, so it pays to test that once.
  static constexpr bool kOnce = true;

  // Where in the slice a piece of the calling warp begins.
  __device__ __forceinline__ static std::int64_t offset(int piece) {
    const int warp = threadIdx.x / kWarpSize;
    return (warp * kPieces + piece) * Pieces<Fragment, kPieces>::kPacks;
  }

  __device__ __forceinline__ void request(std::int64_t number, int piece) const {
    __syncwarp();
    if (threadIdx.x % kWarpSize != 0 || number >= args_.rows.count) return;
    pieces_.request(RowSlice<Fragment>(args_, number, rank_, size_), offset(piece), piece);
  }

  const KernelArgs<T>& args_;
  Pieces<Fragment, kPieces> pieces_;
  int rank_;
  std::int64_t size_;
};

template <class Fragment>
__global__ void __launch_bounds__(kSliceThreads, kSlicesResident)
    cluster_slice_kernel(const __grid_constant__ KernelArgs<typename Fragment::Element> args,
                         int blocks, std::int64_t size) {
#if JAX_GPUOPS_HAS_CLUSTERS
  using State = typename Fragment::State;
  using Storage = SliceStorage<State>;
  const Exponents<typename Fragment::Element> exponents(args.function, args.scale);
  const std::int64_t first = blockIdx.x / blocks;
  auto& storage = shared<Storage>();
  Exchange<State> exchange(storage.own, blocks);
  const Slices<Fragment> own(args, storage, exchange.rank(), size);
  own.start(first);
  exchange.start();
  own.take(exponents, first, gridDim.x / blocks,
           [&](State state) { return exchange.combine(exponents, state); });
#else
  __trap();
#endif
}

template <class Functions, class T>
void launch_cluster(const Call& call) {
  const Config& config = call.config;
  dispatch_packed_layout(call, [&](auto layout) {
    constexpr bool kHasPlain = has_plain_cluster(kDTypeOf<T>, layout);
    constexpr Variant kOther = kHasPlain ? Variant::kPlainSoftmax : Variant::kGeneral;
    dispatch_variant<Functions, kOther>(call, [&](auto variant) {
      using Fragment = FragmentOf<Functions, T, kClusterPacks, layout, variant>;
      launch_kernel<cluster_kernel<Fragment>>(
          call.queue, launch_shape(call, sizeof(ClusterStorage<typename Fragment::State>)),
          kernel_args<T>(call), config.cluster, config.slice, config.piece);
    });
  });
}

template <class Functions, class T>
void launch_cluster_shared(const Call& call) {
  const Config& config = call.config;
  dispatch_packed_layout(call, [&](auto layout) {
    dispatch_variant<Functions, kVariantInShared<T, layout>>(call, [&](auto variant) {
      using Fragment = FragmentOf<Functions, T, slice_held(sizeof(T)), layout, variant>;
      launch_kernel<cluster_slice_kernel<Fragment>>(
          call.queue, launch_shape(call, sizeof(SliceStorage<typename Fragment::State>)),
          kernel_args<T>(call), config.cluster, config.slice);
    });
  });
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
