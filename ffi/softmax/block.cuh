// softmax, algorithm `block`: a block holds a row, or a slice of one for the algorithms that divide
// rows, in registers.
//
// Each warp holds a piece of the slice, of which lane l holds packs l, l + 32, l + 64 and so on. It
// reduces the piece to one state and writes that to its own slot; after one barrier every warp
// combines all slots.
//
// For little work, the maximum over all warps is computed first, and then the sum: that takes two
// barriers, but saves a second round of shuffles and of exponentials.
//
// No block takes a second row: the loads of the next block overlap with the reductions, waits and
// writes of this one.
#pragma once

#include "core/shared.h"
#include "softmax/fragment.cuh"
#include "softmax/launcher.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// Two sets of slots, used in turn. A warp that writes to a set has passed the barrier of the row in
// between, and no warp arrives there before it has read the set's previous row.
template <class State>
struct alignas(kSharedAlignment) BlockStorage {
  State slots[2][kMaxWarpsPerBlock];
};

// The state of the block, from the states of the calling warps.
template <class T, class State>
__device__ __forceinline__ State combine_block(const Exponents<T>& exponents, State state,
                                               State* slots) {
  const int thread = threadIdx.x;
  const int warps = blockDim.x / kWarpSize;
  if (thread % kWarpSize == 0) slots[thread / kWarpSize] = state;
  __syncthreads();
  const auto combine = [&](auto most) {
    const int slot = thread % most;
    return combine_lanes<most>(exponents, slot < warps ? slots[slot] : State::none());
  };
  // Fewer warps need fewer shuffles, which matters in short kernels.
  if (warps <= 8) return combine(std::integral_constant<int, 8>{});
  return combine(std::integral_constant<int, kMaxWarpsPerBlock>{});
}

// A slice of row `number`: the packs [begin, end), `size` of them from rank * size on. A size of 0
// is the whole row. The plan computes the size, since a division in the kernel takes longer than a
// load.
template <class Fragment>
struct RowSlice {
  using T = typename Fragment::Element;
  using Slice = typename Fragment::Slice;

  __device__ __forceinline__ RowSlice(const KernelArgs<T>& args, std::int64_t number,
                                      std::int64_t rank = 0, std::int64_t size = 0)
      : args(args), row(args, number), begin(0), end(row.packs) {
    if (size == 0) return;
    begin = rank * size < row.packs ? rank * size : row.packs;
    if (begin + size < row.packs) end = begin + size;
  }

  // The calling thread's packs of a slice that the block's fragments hold, `piece` packs per warp.
  __device__ __forceinline__ Slice held(int piece) const {
    const std::int64_t first = begin + threadIdx.x / kWarpSize * piece;
    const std::int64_t next = first + piece < end ? first + piece : end;
    return Slice(args, row, first + threadIdx.x % kWarpSize, next, kWarpSize);
  }

  const KernelArgs<T>& args;
  Row<T, Fragment::kLayout> row;
  std::int64_t begin;
  std::int64_t end;
};

// ---- Rows that the registers hold ----

template <class Fragment, int kMostThreads, int kLeastBlocks>
__global__ void __launch_bounds__(kMostThreads, kLeastBlocks)
    block_kernel(const __grid_constant__ KernelArgs<typename Fragment::Element> args, int piece) {
  using T = typename Fragment::Element;
  using State = typename Fragment::State;
  auto& storage = shared<BlockStorage<State>>();
  const Exponents<T> exponents(args.function, args.scale);
  int turn = 0;
  for (std::int64_t number = blockIdx.x; number < args.rows.count; number += gridDim.x) {
    const RowSlice<Fragment> row_slice(args, number);
    Fragment fragment;
    fragment.load(args, row_slice.held(piece));
    const RowResult<State> row_result(args, number, threadIdx.x == 0);
    State state = fragment.template reduce<kWarpSize>(args);
    state = combine_block(exponents, state, storage.slots[turn]);
    write_results(fragment, args, number, row_slice.held(piece), state, row_result);
    turn ^= 1;
  }
}

// ---- Small problems ----

// Reductions over a block of at most 8 warps. Each thread reads the numbers of all warps from
// shared memory, which takes about as long as one of the shuffles that would otherwise combine
// them.
template <class A>
class SmallBlock {
 public:
  struct alignas(kSharedAlignment) Storage {
    A largest[kSmallBlockWarps];
    A sum[kSmallBlockWarps];
  };

  __device__ __forceinline__ explicit SmallBlock(Storage& storage) : storage_(storage) {}

  __device__ __forceinline__ A largest(A value) const {
    return combine(group_largest<kWarpSize>(value), -infinity<A>(), storage_.largest, Largest{});
  }
  __device__ __forceinline__ A sum(A value) const {
    return combine(group_reduce<kWarpSize>(value, Add{}), A(0), storage_.sum, Add{});
  }

 private:
  template <class Combine>
  __device__ __forceinline__ static A combine(A value, A identity, A (&slots)[kSmallBlockWarps],
                                              Combine&& combined) {
    const int thread = threadIdx.x;
    const int warps = blockDim.x / kWarpSize;
    if (thread % kWarpSize == 0) slots[thread / kWarpSize] = value;
    if (thread >= warps && thread < kSmallBlockWarps) slots[thread] = identity;
    __syncthreads();
    A each[kSmallBlockWarps];
#pragma unroll
    for (int w = 0; w < kSmallBlockWarps; ++w) each[w] = slots[w];
#pragma unroll
    for (int half = kSmallBlockWarps / 2; half > 0; half /= 2) {
#pragma unroll
      for (int w = 0; w < half; ++w) each[w] = combined(each[w], each[w + half]);
    }
    return each[0];
  }

  Storage& storage_;
};

// A block for each row.
template <class Fragment>
__global__ void __launch_bounds__(kSmallBlockThreads)
    small_block_kernel(const __grid_constant__ KernelArgs<typename Fragment::Element> args) {
  using T = typename Fragment::Element;
  using Group = SmallBlock<Accumulator<T>>;
  const Group group(shared<typename Group::Storage>());
  const int number = blockIdx.x;
  const Row<T, Fragment::kLayout> row(args, number);
  const typename Fragment::Slice packs(args, row, threadIdx.x, row.packs, blockDim.x);
  Fragment fragment;
  fragment.load(args, packs);
  const RowResult<typename Fragment::State> row_result(args, number, threadIdx.x == 0);
  const auto total = fragment.reduce(args, group);
  write_results<Totals::kOwn>(fragment, args, number, packs, total, row_result);
}

// ---- Longer rows ----

// A slice that is longer than the block's fragments is reduced in several steps, and read again for
// the results, from the L2 cache if the rows in flight fit there.
template <class Fragment>
struct TwoPassRow : RowSlice<Fragment> {
  using State = typename Fragment::State;
  using typename RowSlice<Fragment>::Slice;
  using typename RowSlice<Fragment>::T;
  using RowSlice<Fragment>::RowSlice;
  using RowSlice<Fragment>::begin;
  using RowSlice<Fragment>::end;
  using RowSlice<Fragment>::row;
  using RowSlice<Fragment>::args;

  // In the step that begins with pack `from`, thread t of n has packs t, t + n, t + 2n ...
  __device__ __forceinline__ Slice packs(std::int64_t from) const {
    return Slice(args, row, from + threadIdx.x, end, static_cast<int>(blockDim.x));
  }

  __device__ __forceinline__ std::int64_t step() const {
    return std::int64_t{blockDim.x} * Fragment::kHeld;
  }

  // The calling warp's state of the slice, whose last step stays in the fragment. Each lane has its
  // own state until the end: shuffles would take longer than the sums.
  __device__ __forceinline__ State reduce(const Exponents<T>& exponents, Fragment& fragment) const {
    Running<State> running;
    for (std::int64_t from = begin; from < end; from += step()) {
      fragment.load(args, packs(from));
      running.add(exponents, fragment.template reduce<1, Anchors::kAny, Keep::kElements>(args));
    }
    return combine_lanes<kWarpSize>(exponents, running.value());
  }

  // Writes the results: of the last step first, which the fragment still has. The steps before are
  // read again, those that were read last first.
  __device__ __forceinline__ void write(Fragment& fragment, State total) const {
    const std::int64_t last = begin + (end - begin - 1) / step() * step();
    for (std::int64_t from = last; from >= begin; from -= step()) {
      if (from != last) fragment.load(args, packs(from));
      fragment.write_fresh(args, packs(from), total);
    }
  }

  // The same without a fragment of the last step.
  __device__ __forceinline__ void write(State total) const {
    for (std::int64_t from = begin; from < end; from += step()) {
      Fragment fragment;
      fragment.load(args, packs(from));
      fragment.write_fresh(args, packs(from), total);
    }
  }
};

template <class Fragment, int kMostThreads, int kLeastBlocks>
__global__ void __launch_bounds__(kMostThreads, kLeastBlocks)
    block_passing_kernel(const __grid_constant__ KernelArgs<typename Fragment::Element> args) {
  using T = typename Fragment::Element;
  using State = typename Fragment::State;
  auto& storage = shared<BlockStorage<State>>();
  const Exponents<T> exponents(args.function, args.scale);
  int turn = 0;
  for (std::int64_t number = blockIdx.x; number < args.rows.count; number += gridDim.x) {
    const TwoPassRow<Fragment> row_slice(args, number);
    Fragment fragment;
    State state = row_slice.reduce(exponents, fragment);
    state = combine_block(exponents, state, storage.slots[turn]);
    if (args.y != nullptr) row_slice.write(fragment, state);
    if (threadIdx.x == 0) write_row(args, number, state);
    turn ^= 1;
  }
}

template <class Functions, class T>
void launch_block(const Call& call) {
  const auto launch = [&](auto layout, auto packs) {
    using Fragment = FragmentOf<Functions, T, packs, layout>;
    launch_kernel<block_kernel<Fragment, kBlockThreads, kBlocksResident>>(
        call.queue, launch_shape(call, sizeof(BlockStorage<typename Fragment::State>)),
        kernel_args<T>(call), call.config.piece);
  };
  dispatch_packed_layout(call, [&](auto layout) {
    if constexpr (Functions::kIsLinearInT) {
      dispatch_value<kMostBlockPacks>(call.config.packs,
                                      [&](auto packs) { launch(layout, packs); });
    } else {
      constexpr auto& kPacks = layout == RowLayout::kUnaligned ? kUnalignedBlockPacks : kBlockPacks;
      dispatch_value<kPacks[0], kPacks[1]>(call.config.packs,
                                           [&](auto packs) { launch(layout, packs); });
    }
  });
}

template <class Functions, class T>
void launch_small_block(const Call& call) {
  constexpr int kOperands = Functions::kIsLinearInT ? 2 : 1;
  const auto launch = [&](auto layout, auto packs, auto variant) {
    using Fragment = FragmentOf<Functions, T, packs, layout, variant>;
    launch_kernel<small_block_kernel<Fragment>>(
        call.queue, launch_shape(call, sizeof(typename SmallBlock<Accumulator<T>>::Storage)),
        kernel_args<T>(call));
  };
  dispatch_value<RowLayout::kSmall, RowLayout::kMasked, RowLayout::kUnaligned,
                 RowLayout::kMaskedUnaligned>(call.config.layout, [&](auto layout) {
    if constexpr (layout == RowLayout::kSmall) {
      dispatch_variant<Functions, Variant::kSoftmax>(call, [&](auto variant) {
        constexpr auto& kPacks = kSmallBlockPacks;
        dispatch_value<kOperands * kPacks[0], kOperands * kPacks[1], kOperands * kPacks[2]>(
            call.config.packs, [&](auto packs) { launch(layout, packs, variant); });
      });
    } else {
      dispatch_value<kOperands * kMostSmallBlockPacks>(call.config.packs, [&](auto packs) {
        launch(layout, packs, Constant<Variant::kGeneral>{});
      });
    }
  });
}

template <class Functions, class T, RowLayout kLayout, int kPacks>
void launch_passing_block(const Call& call) {
  using Fragment = FragmentOf<Functions, T, kPacks, kLayout>;
  launch_kernel<block_passing_kernel<Fragment, kBlockThreads, kBlocksResident>>(
      call.queue, launch_shape(call, sizeof(BlockStorage<typename Fragment::State>)),
      kernel_args<T>(call));
}

template <class Functions, class T>
void launch_block_two_pass(const Call& call) {
  dispatch_packed_layout(
      call, [&](auto layout) { launch_passing_block<Functions, T, layout, kPassingPacks>(call); });
}

template <class Functions, class T>
void launch_strided(const Call& call) {
  launch_passing_block<Functions, T, RowLayout::kStrided, kStridedPacks>(call);
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
