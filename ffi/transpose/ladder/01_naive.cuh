// Ladder, step 1: `naive`; and with words wider than an element, `copy`.
//
// Threads take the words in the order of the operand and put each where it belongs. Reads are
// coalesced. Writes of neighbouring lanes lie a whole column of the result apart: each moves a
// 32-byte sector for the sake of one word. Where the minor dimension stays, writes come in runs
// too, and the same kernel is as good as a copy.
//
//     operand row   a b c d ...         result   a . . .
//                   | | | |                      b . . .
//                   lanes 0 1 2 3                c . . .
#pragma once

#include "transpose/index.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace transpose {

inline constexpr int kNaiveThreads = 256;
inline constexpr int kNaiveWordsPerThread = 4;  // loads in flight
inline constexpr int kNaiveWordsPerBlock = kNaiveThreads * kNaiveWordsPerThread;

template <class Word>
__global__ void __launch_bounds__(kNaiveThreads)
    naive_kernel(const Word* __restrict__ x, Word* __restrict__ y, std::uint32_t words, Walk walk) {
  const std::uint32_t first = blockIdx.x * kNaiveWordsPerBlock + threadIdx.x;

  Word word[kNaiveWordsPerThread];
#pragma unroll
  for (int i = 0; i < kNaiveWordsPerThread; ++i) {
    const std::uint32_t index = first + i * kNaiveThreads;
    if (index < words) word[i] = x[index];
  }
#pragma unroll
  for (int i = 0; i < kNaiveWordsPerThread; ++i) {
    const std::uint32_t index = first + i * kNaiveThreads;
    if (index < words) y[walk.offsets(index).out] = word[i];
  }
}

}  // namespace transpose
}  // namespace JAX_GPUOPS_NAMESPACE
