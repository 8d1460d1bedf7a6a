// softmax, algorithm `warp`: groups of lanes hold rows in registers.
//
// A group of kLanes lanes, a power of two up to a whole warp, takes kRows rows at a time; lane l
// holds the packs l, l + kLanes, l + 2 kLanes ... of each, so neighbouring lanes read neighbouring
// addresses:
//
//     row -> | pack 0: lane 0 | pack 1: lane 1 | ... | pack kLanes: lane 0 | ...
//
// Each row is read once and written once, and all reductions are xor shuffles within the group: no
// shared memory and no barrier. All loads are issued before the first use. For the same reason
// short rows are processed several at a time: one pack in flight per thread does not saturate the
// memory bandwidth.
#pragma once

#include <stdexcept>

#include "softmax/fragment.cuh"
#include "softmax/launcher.cuh"
#include "softmax/redo.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

template <class Fragment, int kLanes, int kRows>
__global__ void __launch_bounds__(kWarpBlockThreads)
    warp_kernel(const __grid_constant__ KernelArgs<typename Fragment::Element> args) {
  using T = typename Fragment::Element;
  constexpr int kGroups = kWarpBlockThreads / kLanes;
  constexpr bool kMayBeLarge = Fragment::kOperands == 1;
  const Exponents<T> exponents(args.function, args.scale);
  const int lane = threadIdx.x % kLanes;
  const int group = threadIdx.x / kLanes;
  using RowNumber = Number<Fragment::kLayout>;
  const auto count = static_cast<RowNumber>(args.rows.count);
  const auto first_row = static_cast<RowNumber>(blockIdx.x) * kGroups * kRows;

  const auto take = [&](RowNumber first) {
    Fragment fragment[kRows];
    unsigned large = 0;  // a bit for each row of the group
    const auto slice_of = [&](int r) {
      const RowNumber number = first + r * kGroups + group;
      const Row<T, Fragment::kLayout> row(args, number, number < count);
      return typename Fragment::Slice(args, row, lane, static_cast<int>(row.packs), kLanes);
    };
    const auto finish = [&](int r, const typename Fragment::Slice& slice) {
      const RowNumber number = first + r * kGroups + group;
      const RowResult<typename Fragment::State> row_result(args, number,
                                                           lane == 0 && number < count);
      const auto total = fragment[r].template reduce<kLanes, Anchors::kNotLarge>(args);
      write_results<Totals::kOwn, Anchors::kNotLarge>(fragment[r], args, number, slice, total,
                                                      row_result);
      if constexpr (kMayBeLarge) large |= unsigned{exponents.is_large(total.anchor)} << r;
    };
    if constexpr (kHasMask<Fragment::kLayout>) {
      // Computing the address of a row's mask takes more instructions than computing a few
      // elements, so it is not repeated for the results.
      static_assert(kRows == 1);
      const typename Fragment::Slice slice = slice_of(0);
      fragment[0].load(args, slice);
      finish(0, slice);
    } else {
#pragma unroll
      for (int r = 0; r < kRows; ++r) fragment[r].load(args, slice_of(r));
#pragma unroll
      for (int r = 0; r < kRows; ++r) finish(r, slice_of(r));
    }
    if constexpr (kMayBeLarge) {
      if (!__any_sync(kFullWarp, large != 0)) return;
      __syncwarp();
#pragma unroll 1
      for (int r = 0; r < kRows; ++r) {
        const std::int64_t number = first + r * kGroups + group;
        redo_row(args, number, (large >> r & 1) != 0 && number < count, lane, kLanes);
      }
    }
  };

  if constexpr (Fragment::kLayout == RowLayout::kSmall) {
    take(first_row);
  } else {
    // The loop bounds are uniform in the block, so that all lanes reach every shuffle.
    const RowNumber step = static_cast<RowNumber>(gridDim.x) * kGroups * kRows;
    RowNumber first = first_row;  // of a row that exists
    do {
      take(first);
      first += step;
    } while (first < count);
  }
}

// Whether plans use an instance: none before it has room for as many packs, and the longest rows
// that fit in it have its layout.
template <class T, RowLayout kLayout, const auto& kTable>
constexpr bool is_planned(std::size_t index, int operands) {
  if (kLayout == RowLayout::kElements) {
    const int columns = kTable[index].lanes * kTable[index].packs;
    return warp_layout(RowLayout::kUnaligned, operands, sizeof(T), columns) == kLayout;
  }
  constexpr int kPack = kPackOf<T, kLayout>;
  const int packs = kTable[index].lanes * packs_of_each(kTable[index], operands);
  const int columns = packs * kPack - (kIsUnaligned<kLayout> ? kPack - 1 : 0);
  return is_planned(kTable, index, operands) &&
         warp_layout(kLayout, operands, sizeof(T), columns) == kLayout;
}

template <class Functions, class T, RowLayout kLayout, Variant kVariant, const auto& kTable>
void launch_warp_from(const Call& call) {
  const Config& config = call.config;
  const auto planned = [&](const WarpInstance& each) {
    return each.lanes == config.lanes && each.packs == config.packs && each.rows == config.rows;
  };
  dispatch_instance<kTable>(planned, [&](auto index) {
    constexpr WarpInstance kInstance = kTable[index];
    if constexpr (is_planned<T, kLayout, kTable>(index, Functions::kOperands)) {
      using Fragment = FragmentOf<Functions, T, kInstance.packs, kLayout, kVariant>;
      launch_kernel<warp_kernel<Fragment, kInstance.lanes, kInstance.rows>>(
          call.queue, launch_shape(call), kernel_args<T>(call));
    } else {
      throw std::logic_error("plans take another instance before this one");
    }
  });
}

template <class Functions, class T>
void launch_warp(const Call& call) {
  constexpr Variant kGeneral = Variant::kGeneral;
  dispatch_value<RowLayout::kAligned, RowLayout::kSmall, RowLayout::kElements, RowLayout::kMasked,
                 RowLayout::kUnaligned, RowLayout::kMaskedUnaligned>(
      call.config.layout, [&](auto layout) {
        if constexpr (layout == RowLayout::kSmall) {
          dispatch_variant<Functions, Variant::kSoftmax>(call, [&](auto variant) {
            launch_warp_from<Functions, T, layout, variant, kSmallWarpInstances>(call);
          });
        } else if constexpr (layout == RowLayout::kAligned) {
          launch_warp_from<Functions, T, layout, kGeneral, kWarpInstances>(call);
        } else if constexpr (layout == RowLayout::kElements) {
          launch_warp_from<Functions, T, layout, kGeneral, kElementsWarpInstances>(call);
        } else if constexpr (layout == RowLayout::kMasked) {
          constexpr int kPacks = masked_packs(Functions::kOperands, sizeof(T));
          launch_warp_from<Functions, T, layout, kGeneral, kMaskedWarpInstances<kPacks>>(call);
        } else if constexpr (layout == RowLayout::kMaskedUnaligned) {
          constexpr auto& kTable = kMaskedUnalignedWarpInstances<Functions::kOperands>;
          launch_warp_from<Functions, T, layout, kGeneral, kTable>(call);
        } else {
          launch_warp_from<Functions, T, layout, kGeneral, kUnalignedWarpInstances>(call);
        }
      });
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
