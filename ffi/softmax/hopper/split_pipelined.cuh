// softmax, algorithm `split_pipelined`: rows too long for a cluster are divided into slices, one
// per block, and read once, if the shared memory of the blocks that run concurrently holds them.
//
// A group of as many blocks as a row has slices stays on the GPU and processes row after row. Each
// block posts the state of its slice in global memory, and needs the states of the others for its
// results. The exchange takes as long as reading two rows, so a block has three rows in flight:
//
//     row n:     | read | reduce, post |    others' states arrive    | write |
//     row n + 1:                | read | reduce, post |    others' states arrive    | write |
//     row n + 2:                               | read | reduce, post | ...
#pragma once

#include "core/ptx/mbarrier.cuh"
#include "core/ptx/words.cuh"
#include "core/shared.h"
#include "softmax/block.cuh"
#include "softmax/launcher.cuh"
#include "softmax/pieces.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// ---- States between blocks ----

// Where the blocks of a group post the states of their slices: each word of a state is stored
// together with the group's number of the row, as one 64-bit word. Since both arrive together, no
// thread waits for its earlier writes, including the results of the last row, as it would to order
// them with a flag. (NCCL sends short messages this way.) A counter tells when polling is
// worthwhile: blocks that poll all slots all the time slow down those that post, and all loads.
//
// Sets of slots are used in turn. A block that posts for row n has the states of row n - kRingRows,
// so all others have posted that row, which they did after they had the states of row n - 2
// kRingRows: no block reads the set of that row any more.
template <class State>
class Mailbox {
 public:
  // `memory`: mailbox_bytes() for each group, initially 0.
  __device__ __forceinline__ Mailbox(std::uint64_t* memory, int group, int blocks, int rank)
      : sets_(memory + group * (mailbox_bytes(blocks, sizeof(State)) / 8)),
        blocks_(blocks),
        rank_(rank) {}

  // One thread calls it.
  __device__ __forceinline__ void post_state(std::uint32_t row, State state) const {
    const Words words = __builtin_bit_cast(Words, state);
    std::uint64_t* const own = slots(row) + rank_ * kWords;
#pragma unroll
    for (int w = 0; w < kWords; ++w) post(own + w, words.word[w], row + 1);
    count_one(counter(row));
  }

  // The combined state of all blocks; a warp calls it.
  template <class T>
  __device__ __forceinline__ State collect(const Exponents<T>& exponents, std::uint32_t row) const {
    const int lane = threadIdx.x % kWarpSize;
    if (lane == 0) await_count(counter(row), (row / kMailboxSets + 1) * blocks_);
    __syncwarp();
    State total = State::none();
    for (int first = lane; first < blocks_; first += kAtOnce * kWarpSize) {
      Words words[kAtOnce];
      bool all;
      do {
        all = true;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int slot = first + i * kWarpSize;
          if (slot >= blocks_) continue;
#pragma unroll
          for (int w = 0; w < kWords; ++w) {
            all = look(slots(row) + slot * kWords + w, row + 1, words[i].word[w]) && all;
          }
        }
      } while (!all);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i * kWarpSize >= blocks_) continue;
        total = combined(exponents, total, __builtin_bit_cast(State, words[i]));
      }
    }
    return combine_lanes<kWarpSize>(exponents, total);
  }

 private:
  static constexpr int kWords = sizeof(State) / sizeof(std::uint32_t);
  static constexpr int kLine = 128 / sizeof(std::uint64_t);
  // Slots that a lane polls at a time, enough for 160 blocks: one after the other would take that
  // many times as long.
  static constexpr int kAtOnce = 5;
  struct Words {
    std::uint32_t word[kWords];
  };

  // A set: a 128-byte line with the counter, and the slots.
  __device__ __forceinline__ std::uint64_t* set(std::uint32_t row) const {
    const auto words = static_cast<int>(mailbox_bytes(blocks_, sizeof(State)) / kMailboxSets / 8);
    return sets_ + static_cast<int>(row % kMailboxSets) * words;
  }
  __device__ __forceinline__ std::uint32_t* counter(std::uint32_t row) const {
    return reinterpret_cast<std::uint32_t*>(set(row));
  }
  __device__ __forceinline__ std::uint64_t* slots(std::uint32_t row) const {
    return set(row) + kLine;
  }

  std::uint64_t* sets_;
  int blocks_;
  int rank_;
};

// ---- The kernel ----

// The part of shared memory before the pieces. For each row in flight: the states of all warps, and
// an mbarrier for when they are written; the state of the row, and an mbarrier for when it is
// written and the states of the warps have been posted.
template <class State, int kWarps>
struct alignas(kSharedAlignment) RingStorage {
  State states[kRingRows][kWarps];
  State totals[kRingRows];
  Mbarrier reduced[kRingRows];
  Mbarrier known[kRingRows];
  Mbarrier copied[kWarps * kRingRows];
};

// The position of a row in the ring buffer, and the phase of its mbarriers.
struct RingPlace {
  int at = 0;
  unsigned phase = 0;

  __device__ __forceinline__ void advance() {
    if (++at < kRingRows) return;
    at = 0;
    phase ^= 1;
  }
};

// For functions with results for the elements. Two warps of each block only exchange states, so
// that the others wait only for their own pieces, and for states that were posted two rows before.
// docs/tuning.md lists what else was tried.
template <class Fragment>
__global__ void __launch_bounds__(ring_threads(sizeof(typename Fragment::Element)), 1)
    split_ring_kernel(const __grid_constant__ KernelArgs<typename Fragment::Element> args,
                      int slices, std::int64_t size, std::uint64_t* mailbox_memory) {
#if JAX_GPUOPS_HAS_CLUSTERS
  using T = typename Fragment::Element;
  using State = typename Fragment::State;
  constexpr int kWarps = ring_warps(sizeof(T));
  auto& storage = shared<RingStorage<State, kWarps>>();
  const Exponents<T> exponents(args.function, args.scale);
  const int group = blockIdx.x / slices;
  const int groups = gridDim.x / slices;
  const int rank = blockIdx.x - group * slices;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const std::int64_t count = args.rows.count;
  if (threadIdx.x == 0) {
    for (int r = 0; r < kRingRows; ++r) {
      initialise(storage.reduced + r, kWarps);
      initialise(storage.known + r, 2);
    }
  }
  __syncthreads();

  RingPlace place;
  if (warp >= kWarps) {
    const Mailbox<State> mailbox(mailbox_memory, group, slices, rank);
    std::uint32_t row = 0;
    for (std::int64_t number = group; number < count; number += groups, ++row, place.advance()) {
      if (warp == kWarps) {
        // The warps wrote their states before they arrived. They overwrite them only after they
        // have waited for `known`, at which lane 0 arrives when all lanes have read.
        wait(storage.reduced + place.at, place.phase);
        State state = lane < kWarps ? storage.states[place.at][lane] : State::none();
        state = combine_lanes<kWarpSize>(exponents, state);
        __syncwarp();
        if (lane == 0) {
          mailbox.post_state(row, state);
          arrive(storage.known + place.at);  // the warps' states may be overwritten
        }
      } else {
        const State state = mailbox.collect(exponents, row);
        if (lane == 0) {
          // The warps read the previous total here before they arrived for this row. They have
          // arrived, since their states were posted, but posts do not order other accesses.
          wait(storage.reduced + place.at, place.phase);
          storage.totals[place.at] = state;
          arrive(storage.known + place.at);
        }
      }
    }
    return;
  }

  constexpr bool kOnce = false;  // each pack is tested separately
  const Pieces<Fragment, kRingRows> pieces(args, storage.copied, &storage + 1);
  const auto slice_of = [&](std::int64_t number) {
    return RowSlice<Fragment>(args, number, rank * kWarps + warp, size);
  };
  const auto request = [&](std::int64_t number, int piece) {
    __syncwarp();
    if (lane == 0 && number < count) pieces.request(slice_of(number), 0, piece);
  };
  pieces.start();
  for (int r = 0; r < kRingRows; ++r) request(group + std::int64_t{r} * groups, r);
  // Results are written kRingRows - 1 rows after the reduction.
  const std::int64_t behind = std::int64_t{kRingRows - 1} * groups;
  RingPlace due;
  for (std::int64_t number = group; number < count + behind; number += groups) {
    if (number < count) {
      pieces.wait_for(place.at, place.phase);
      Fragment fragment;
      pieces.template load<kOnce>(fragment, pieces.packs(slice_of(number), 0), place.at);
      const State state = fragment.template reduce<kWarpSize>(args);
      if (lane == 0) {
        storage.states[place.at][warp] = state;
        arrive(storage.reduced + place.at);
      }
      place.advance();
    }
    if (number - behind < 0) continue;
    Fragment fragment;
    const auto packs = pieces.packs(slice_of(number - behind), 0);
    pieces.template load<kOnce>(fragment, packs, due.at);
    // The total was written before the collecting warp arrived. It is overwritten only after this
    // warp has arrived at `reduced` for the row that it requests below.
    wait(storage.known + due.at, due.phase);
    fragment.template write_fresh<kOnce>(args, packs, storage.totals[due.at]);
    request(number - behind + std::int64_t{kRingRows} * groups, due.at);
    due.advance();
  }
#else
  __trap();
#endif
}

template <class Functions, class T>
void launch_split_pipelined(const Call& call) {
  const Config& config = call.config;
  dispatch_packed_layout(call, [&](auto layout) {
    dispatch_variant<Functions, kVariantInShared<T, layout>>(call, [&](auto variant) {
      using Fragment = FragmentOf<Functions, T, ring_held(sizeof(T)), layout, variant>;
      constexpr int kWarps = ring_warps(sizeof(T));
      constexpr std::size_t kPieceBytes = std::size_t{kWarps} * Pieces<Fragment, kRingRows>::kBytes;
      auto* const mailbox = static_cast<std::uint64_t*>(call.buffers.workspace);
      clear(call.queue, mailbox, static_cast<std::size_t>(config.workspace_bytes));
      LaunchShape shape =
          launch_shape(call, sizeof(RingStorage<typename Fragment::State, kWarps>) + kPieceBytes);
      shape.together = true;
      launch_kernel<split_ring_kernel<Fragment>>(call.queue, shape, kernel_args<T>(call),
                                                 static_cast<int>(config.slices), config.slice,
                                                 mailbox);
    });
  });
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
