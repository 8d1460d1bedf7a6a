// softmax, algorithm `split_pipelined`: the launcher of split.cuh's ring.
#pragma once

#include "softmax/split.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

template <class Family, class T>
void launch_split_pipelined(const Call& call) {
  const Config& config = call.config;
  dispatch_value<Kind::kEven, Kind::kMasked, Kind::kRagged, Kind::kMaskedRagged>(
      config.layout, [&](auto kind) {
        dispatch_variant<Family, kVariantInShared<T, kind>>(call, [&](auto variant) {
          using Share = typename Family::template Share<T, ring_held(sizeof(T)), kind, variant>;
          constexpr int kWarps = ring_warps(sizeof(T));
          constexpr std::size_t kPieceBytes =
              std::size_t{kWarps} * Pieces<Share, kRingRows>::kBytes;
          auto* const board = static_cast<std::uint64_t*>(call.buffers.workspace);
          clear(call.queue, board, static_cast<std::size_t>(config.workspace_bytes));
          LaunchShape shape =
              launch_shape(call, sizeof(RingStorage<typename Share::State, kWarps>) + kPieceBytes);
          shape.together = true;
          launch_kernel<split_ring_kernel<Share>>(call.queue, shape, tensors_of<T>(call),
                                                  static_cast<int>(config.slices), config.slice,
                                                  board);
        });
      });
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
