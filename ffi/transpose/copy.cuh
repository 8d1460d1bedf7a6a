// transpose, algorithm `copy`: runs that stay contiguous move in words of up to 16 bytes.
//
// The same loop as `naive`, over words instead of elements. Where the minor dimension stays,
// neighbouring lanes write neighbouring words, so reads and writes are both coalesced.
//
//     operand   | run a | run b | run c | ...        result   | run a | run c | ...
//                 lanes   lanes   lanes                         lanes   lanes
#pragma once

#include "transpose/ladder/01_naive.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace transpose {

template <class Word>
__global__ void __launch_bounds__(kThreads)
    copy_kernel(const Word* __restrict__ x, Word* __restrict__ y, std::uint32_t words, Walk walk) {
  move_words(x, y, words, walk);
}

template <class Word>
void launch_copy(const Call<Word>& call) {
  launch_kernel<copy_kernel<Word>>(call.queue, words_shape(call), call.x, call.y,
                                   static_cast<std::uint32_t>(call.movement.words()),
                                   walk(call.movement, {}));
}

}  // namespace transpose
}  // namespace JAX_GPUOPS_NAMESPACE
