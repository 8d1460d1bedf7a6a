// Lines of an array that begin at any address, copied to shared memory and back in packs of 16
// bytes. A line has the same phase, its offset from a multiple of 16 bytes, in both, so that packs
// move without a shift:
//
//     global memory   ... | . . . a a a a a | a a a a a a a a | a a . . . . . . | ...
//                           phase             pack
//     shared memory       | . . . a a a a a | a a a a a a a a | a a . . . . . . | padding
//
// Packs that a line shares with its neighbours are copied to shared memory as a whole, and back
// element by element.
#pragma once

#include <cstdint>

#include "core/ptx/async_copy.cuh"
#include "core/vector.h"

namespace JAX_GPUOPS_NAMESPACE {

// The distance between lines in shared memory that have up to `most` elements, whole packs.
template <class T>
constexpr int phased_pitch(int most) {
  return most + kWidestPack<T>;
}

// `count` lines of `length` elements each, which begin `stride` elements apart in global memory,
// and phased_pitch(most) apart in shared memory. `most` has a power of two of packs, at most one
// for each thread of the block.
template <class T>
class PhasedLines {
 public:
  static constexpr int kPack = kWidestPack<T>;

  __device__ __forceinline__ PhasedLines(std::int64_t stride, int count, int length, int most)
      : stride_(stride), count_(count), length_(length), packs_(most / kPack) {}

  // Issues copies of the lines that begin at `first` in global memory. The array ends at `end`, and
  // begins at a multiple of 16 bytes.
  __device__ __forceinline__ void copy(const T* first, const T* end, T* lines) const {
    each_pack([&](int line, int pack) {
      const T* const begin = first + line * stride_;
      const int phase = elements_past_alignment<kPack>(begin);
      if (pack * kPack >= phase + length_) return;
      const T* from = begin - phase + pack * kPack;
      T* to = lines + line * pitch() + pack * kPack;
      if (from + kPack <= end) {
        copy_async<16>(to, from, true);
      } else {
        for (; from < end; ++from, ++to) *to = *from;
      }
    });
  }

  // Writes the lines to global memory, where they begin at addresses of the same phases.
  __device__ __forceinline__ void write(const T* lines, T* first) const {
    each_pack([&](int line, int pack) {
      T* const begin = first + line * stride_;
      const int phase = elements_past_alignment<kPack>(begin);
      if (pack * kPack < phase || (pack + 1) * kPack > phase + length_) return;
      const T* const from = lines + line * pitch() + pack * kPack;
      write_global_pack(read_pack<kPack>(from), begin - phase + pack * kPack);
    });
    // The packs that are not whole: one at a line's beginning, and one at its end.
    for (int i = threadIdx.x; i < 2 * kPack * count_; i += blockDim.x) {
      const int line = i / (2 * kPack);
      T* const begin = first + line * stride_;
      const int phase = elements_past_alignment<kPack>(begin);
      const int last = (phase + length_) / kPack * kPack;
      const bool at_end = i / kPack % 2 != 0;
      if (at_end ? last == 0 && phase != 0 : phase == 0) continue;
      const int element = (at_end ? last : 0) + i % kPack - phase;
      if (element < 0 || element >= length_) continue;
      begin[element] = lines[line * pitch() + phase + element];
    }
  }

 private:
  __device__ __forceinline__ int pitch() const { return phased_pitch<T>(packs_ * kPack); }

  // Calls visit(line, pack) for all packs that lines can have: one more than their length has.
  template <class Visit>
  __device__ __forceinline__ void each_pack(Visit&& visit) const {
    const int log2 = __ffs(packs_) - 1;
    const int pack = threadIdx.x & (packs_ - 1);
    for (int line = threadIdx.x >> log2; line < count_; line += blockDim.x >> log2) {
      visit(line, pack);
    }
    for (int line = threadIdx.x; line < count_; line += blockDim.x) visit(line, packs_);
  }

  std::int64_t stride_;
  int count_;
  int length_;
  int packs_;
};

}  // namespace JAX_GPUOPS_NAMESPACE
