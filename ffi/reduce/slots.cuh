// Partials that the blocks of a row exchange in the workspace, in slots of words, each with the
// launch's tag. So the workspace need not be cleared before the launch, and no fence is needed. The
// thread that takes a partial clears its tags, because replays of a CUDA graph use the same tag.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/cuda.h"
#include "core/ptx/tagged_words.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

struct Slots {
  TaggedWord* memory;
  std::uint64_t tag;
};

template <class Partial>
struct Words {
  static constexpr int kCount = (sizeof(Partial) + 7) / 8;
  std::uint64_t word[kCount];
};

// One thread writes a partial to slot `slot` of the workspace.
template <class Partial>
__device__ __forceinline__ void leave(Slots slots, std::int64_t slot, const Partial& partial) {
  using Words = reduce::Words<Partial>;
  Words words{};
  memcpy(&words, &partial, sizeof(partial));
#pragma unroll
  for (int w = 0; w < Words::kCount; ++w) {
    post(slots.memory + slot * Words::kCount + w, {words.word[w], slots.tag});
  }
}

// One thread waits for a partial, and clears its slot.
template <class Partial>
__device__ __forceinline__ Partial take(Slots slots, std::int64_t slot) {
  using Words = reduce::Words<Partial>;
  TaggedWord* const from = slots.memory + slot * Words::kCount;
  Words words;
  bool all;
  do {
    all = true;
#pragma unroll
    for (int w = 0; w < Words::kCount; ++w) {
      all = look(from + w, slots.tag, words.word[w]) && all;
    }
  } while (!all);
#pragma unroll
  for (int w = 0; w < Words::kCount; ++w) post(from + w, {});
  Partial partial;
  memcpy(&partial, &words, sizeof(partial));
  return partial;
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
