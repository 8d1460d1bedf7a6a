// Words that blocks send each other through global memory that has not been cleared, without
// ordering other accesses. For all GPUs; words.cuh is for Hopper's kernels.
#pragma once

#include <cstdint>

#include "core/ptx/target.h"

namespace JAX_GPUOPS_NAMESPACE {

// A word and the tag of a launch (core/tag.h), which distinguishes it from what was in memory
// before.
struct alignas(16) TaggedWord {
  std::uint64_t word;
  std::uint64_t tag;
};

// Writes both by one access of 16 bytes, so that no thread sees one without the other.
__device__ inline void post(TaggedWord* to, TaggedWord both,
                            [[maybe_unused]] Site site = Site::here()) {
#ifdef JAX_GPUOPS_INTERPRET
  simt::relaxed_store(to, &both, sizeof(both), site);
#else
  asm volatile(
      "{\n\t.reg .b128 both;\n\tmov.b128 both, {%1, %2};\n\t"
      "st.relaxed.gpu.global.b128 [%0], both;\n\t}" ::"l"(to),
      "l"(both.word), "l"(both.tag)
      : "memory");
#endif
}

// Reads a word, and returns whether it has the tag `tag`. For loops that wait for it.
__device__ inline bool look(const TaggedWord* from, std::uint64_t tag, std::uint64_t& word,
                            [[maybe_unused]] Site site = Site::here()) {
  TaggedWord both;
#ifdef JAX_GPUOPS_INTERPRET
  simt::relaxed_load(&both, from, sizeof(both));
  if (both.tag != tag) simt::let_others_run("look", site);
#else
  asm volatile(
      "{\n\t.reg .b128 both;\n\tld.relaxed.gpu.global.b128 both, [%2];\n\t"
      "mov.b128 {%0, %1}, both;\n\t}"
      : "=l"(both.word), "=l"(both.tag)
      : "l"(from)
      : "memory");
#endif
  word = both.word;
  return both.tag == tag;
}

}  // namespace JAX_GPUOPS_NAMESPACE
