// Ladder, step 1: `naive`.
//
// Threads take the elements in the order of the operand and store each to its position in the
// result. Reads are coalesced. Writes of neighbouring lanes are a whole row of the result apart:
// each moves a 32-byte sector for one element.
//
//     operand row   a b c d ...         result   a . . .
//                   | | | |                      b . . .
//                   lanes 0 1 2 3                c . . .
#pragma once

#include "core/launch.h"
#include "transpose/index.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace transpose {

inline constexpr int kWordsPerThread = 4;  // loads in flight
inline constexpr int kWordsPerBlock = kThreads * kWordsPerThread;

// Moves the words of a block.
template <class Word>
__device__ inline void move_words(const Word* __restrict__ x, Word* __restrict__ y,
                                  std::uint32_t words, const Walk& walk) {
  const std::uint32_t first = blockIdx.x * kWordsPerBlock + threadIdx.x;

  Word word[kWordsPerThread];
#pragma unroll
  for (int i = 0; i < kWordsPerThread; ++i) {
    const std::uint32_t index = first + i * kThreads;
    if (index < words) word[i] = x[index];
  }
#pragma unroll
  for (int i = 0; i < kWordsPerThread; ++i) {
    const std::uint32_t index = first + i * kThreads;
    if (index < words) y[walk.offsets(index).out] = word[i];
  }
}

template <class Word>
__global__ void __launch_bounds__(kThreads)
    naive_kernel(const Word* __restrict__ x, Word* __restrict__ y, std::uint32_t words, Walk walk) {
  move_words(x, y, words, walk);
}

template <class Word>
LaunchShape words_shape(const Call<Word>& call) {
  return {grid_extent(divide_up(call.movement.words(), kWordsPerBlock)), kThreads};
}

template <class Word>
void launch_naive(const Call<Word>& call) {
  launch_kernel<naive_kernel<Word>>(call.queue, words_shape(call), call.x, call.y,
                                    static_cast<std::uint32_t>(call.movement.words()),
                                    walk(call.movement, {}));
}

}  // namespace transpose
}  // namespace JAX_GPUOPS_NAMESPACE
