// softmax, algorithm `warp`: rows live in the registers of groups of lanes.
//
// A group of kLanes lanes, a power of two up to a whole warp, takes kRows rows at a time; lane l
// holds the packs l, l + kLanes, l + 2 kLanes ... of each, so neighbouring lanes read neighbouring
// addresses:
//
//     row -> | pack 0: lane 0 | pack 1: lane 1 | ... | pack kLanes: lane 0 | ...
//
// Each row is read once and written once, and all reductions are xor shuffles within the group: no
// shared memory and no barrier. All loads are issued before the first use. Short rows come several
// at a time for that reason: one pack a thread does not fill the memory's pipe.
#pragma once

#include "softmax/launcher.cuh"
#include "softmax/share.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

template <class Share, int kLanes, int kRows>
__global__ void __launch_bounds__(kWarpBlockThreads)
    warp_kernel(const __grid_constant__ Tensors<typename Share::Element> tensors) {
  using T = typename Share::Element;
  constexpr int kGroups = kWarpBlockThreads / kLanes;
  constexpr bool kMayBeLarge = Share::kOperands == 1;
  const Exponents<T> exponents(tensors.function, tensors.scale);
  const int lane = threadIdx.x % kLanes;
  const int group = threadIdx.x / kLanes;
  using RowNumber = Number<Share::kKind>;
  const auto count = static_cast<RowNumber>(tensors.rows.count);
  const auto first_row = static_cast<RowNumber>(blockIdx.x) * kGroups * kRows;

  const auto take = [&](RowNumber first) {
    Share share[kRows];
    bool any_large = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const RowNumber number = first + r * kGroups + group;
      const Row<T, Share::kKind> row(tensors, number, number < count);
      share[r].load(tensors, typename Share::Packs(tensors, row, lane, row.packs, kLanes));
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const RowNumber number = first + r * kGroups + group;
      const Row<T, Share::kKind> row(tensors, number, number < count);
      const typename Share::Packs stretch(tensors, row, lane, row.packs, kLanes);
      const RowResult<typename Share::State> row_result(tensors, number,
                                                        lane == 0 && number < count);
      const auto total = share[r].template reduce<kLanes, true>(tensors);
      write_results<true, true>(share[r], tensors, number, stretch, total, row_result);
      if constexpr (kMayBeLarge) any_large = any_large || exponents.is_large(total.anchor);
    }
    if constexpr (kMayBeLarge) {
      // All of the warp's rows: the others' results may differ in their last bit.
      if (!__any_sync(kFullWarp, any_large)) return;
      __syncwarp();
#pragma unroll 1
      for (int r = 0; r < kRows; ++r) {
        const std::int64_t number = first + r * kGroups + group;
        redo_row(tensors, number, number < count, lane, kLanes);
      }
    }
  };

  if constexpr (Share::kKind == Kind::kSmall) {
    take(first_row);
  } else {
    // The loop's bounds are those of the block, so that all lanes reach every shuffle.
    const RowNumber step = static_cast<RowNumber>(gridDim.x) * kGroups * kRows;
    for (RowNumber first = first_row; first < count; first += step) take(first);
  }
}

template <class Family, class T, Kind kKind, Variant kVariant, const auto& kTable>
void launch_warp_from(const Call& call) {
  const Config& config = call.config;
  const auto planned = [&](const WarpInstance& each) {
    return each.lanes == config.lanes && each.packs == config.packs && each.rows == config.rows;
  };
  dispatch_instance<kTable>(planned, [&](auto index) {
    constexpr WarpInstance kInstance = kTable[index];
    using Share = typename Family::template Share<T, kInstance.packs, kKind, kVariant>;
    launch_kernel<warp_kernel<Share, kInstance.lanes, kInstance.rows>>(
        call.queue, launch_shape(call), tensors_of<T>(call));
  });
}

template <class Family, class T>
void launch_warp(const Call& call) {
  constexpr Variant kGeneral = Variant::kGeneral;
  dispatch_value<Kind::kEven, Kind::kSmall, Kind::kMasked, Kind::kRagged, Kind::kMaskedRagged>(
      call.config.layout, [&](auto kind) {
        if constexpr (kind == Kind::kSmall) {
          dispatch_variant<Family, Variant::kSoftmax>(call, [&](auto variant) {
            launch_warp_from<Family, T, kind, variant, kSmallWarpInstances>(call);
          });
        } else if constexpr (kind == Kind::kEven) {
          launch_warp_from<Family, T, kind, kGeneral, kWarpInstances>(call);
        } else {
          launch_warp_from<Family, T, kind, kGeneral, kRaggedWarpInstances>(call);
        }
      });
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
