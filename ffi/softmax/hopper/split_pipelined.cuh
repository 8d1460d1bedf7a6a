// softmax, algorithm `split_pipelined`: the launcher of split.cuh's ring.
#pragma once

#include "softmax/split.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

template <class Functions, class T>
void launch_split_pipelined(const Call& call) {
  const Config& config = call.config;
  dispatch_value<RowLayout::kAligned, RowLayout::kMasked, RowLayout::kUnaligned,
                 RowLayout::kMaskedUnaligned>(config.layout, [&](auto layout) {
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
