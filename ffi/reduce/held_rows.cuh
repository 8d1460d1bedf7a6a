// What `held` loads: each row by a group of threads, and all of a thread's share before any of it
// is combined. The elements before a row's first whole pack of 16 bytes and after its last one are
// its edges; a thread has at most one of them, so no pack is masked:
//
//     addresses         |0              |16             |32             |48
//     row (4 bytes)             x0  x1  x2  x3  x4  x5  x6  x7  x8  x9  x10
//     8 threads                 t0  t1  |----- t0 ------|----- t1 ------| t2
//
// In rows with edges, threads without a pack load the row's last pack again: a conditional load
// would need more registers, and the compiler would combine one pack before it loads the next.
//
// Short rows that are not whole packs are read element by element, by separate kernels, if the
// array has no more elements than the GPU has resident threads: then no load depends on the
// alignment of a row, and there are no edges.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/collectives.h"
#include "core/cuda.h"
#include "core/launch.h"
#include "core/ptx/memory.cuh"
#include "core/vector.h"
#include "reduce/instance.cuh"
#include "reduce/reduce.h"
#include "reduce/reducer.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

// If a row has no more warps than this, each lane reads the partial results of all of them.
inline constexpr int kFewWarps = 4;

struct HeldRows {
  unsigned count;
  unsigned columns;
  unsigned bytes;  // of a row

  explicit HeldRows(const Problem& problem)
      : count(static_cast<unsigned>(problem.rows())),
        columns(static_cast<unsigned>(problem.columns)),
        bytes(static_cast<unsigned>(problem.columns * bytes_of(problem.dtype))) {}
};

// Blocks of (threads per row) x (rows) threads.
inline LaunchShape held_shape(const Call& call, std::size_t shared_bytes) {
  const int lanes = call.config.lanes;
  const int rows = call.config.threads / lanes;
  return {grid_extent(divide_up(call.problem.rows(), rows)), dim3(lanes, rows), shared_bytes};
}

template <class Element>
struct HeldRow {
  unsigned row;
  bool exists;  // else it is the last row again, whose result another thread stores
  const Element* begin;
};

// The row of the calling thread, in blocks of (threads per row) x (rows) threads.
template <class Element>
__device__ __forceinline__ HeldRow<Element> row_of_thread(const Element* x, const HeldRows& rows) {
  const unsigned own = blockIdx.x * blockDim.y + threadIdx.y;
  const bool exists = own < rows.count;
  const unsigned row = exists ? own : rows.count - 1;
  return {row, exists,
          reinterpret_cast<const Element*>(reinterpret_cast<const unsigned char*>(x) +
                                           std::uint64_t{row} * rows.bytes)};
}

// The packs thread, thread + threads, ... of a row, up to kPacks of them, and perhaps an element of
// its edges. kEdges: the row may begin and end inside packs.
template <class Element, bool kEdges, int kPacks>
struct HeldPacks {
  static constexpr int kPack = kWidestPack<Element>;

  RegisterPack<Element, kPack> held[kPacks] = {};  // g++ does not see that all used are loaded
  Element edge;
  int edge_column;
  bool has_edge;
  const Element* begin;  // of the row
  unsigned columns;
  int head;   // elements before the first whole pack
  int packs;  // of the row
  int thread;
  int threads;

  __device__ __forceinline__ HeldPacks(const Element* begin_, unsigned columns_)
      : begin(begin_), columns(columns_), thread(threadIdx.x), threads(blockDim.x) {
    constexpr unsigned kEach = sizeof(Element);
    constexpr unsigned kBytes = kPack * kEach;
    const auto address = reinterpret_cast<std::uintptr_t>(begin);
    const unsigned before = kEdges ? -(static_cast<unsigned>(address) / kEach) % kPack : 0;
    head = static_cast<int>(before);
    packs = static_cast<int>((columns - before) / kPack);
    const auto from = address + before * kEach;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if constexpr (kEdges) {
        const auto pack = static_cast<unsigned>(has(i) ? at(i) : packs - 1);
        // An integer address: with pointers, the compiler would compute each one from all terms.
        std::uint32_t words[kBytes / 4];
        read_once(reinterpret_cast<const void*>(from + std::uint64_t{pack} * kBytes), words);
        std::memcpy(&held[i], words, kBytes);
      } else if (has(i)) {
        held[i] = read_pack<kPack>(begin + at(i) * kPack);
      }
    }
    edge_column = thread < head ? thread : thread + packs * kPack;
    has_edge = kEdges && static_cast<unsigned>(edge_column) < columns;
    edge = has_edge ? begin[static_cast<unsigned>(edge_column)] : Element{};
  }

  // The same, loaded once more: by read_once(), since the compiler would find other loads to be
  // those of before, and keep the packs in registers.
  __device__ __forceinline__ HeldPacks<Element, true, kPacks> again() const {
    return {begin, columns};
  }

  // The place of pack i of the thread among those of the row, and whether the row has it.
  __device__ __forceinline__ int at(int i) const { return thread + i * threads; }
  __device__ __forceinline__ bool has(int i) const { return at(i) < packs; }
};

// The elements thread, thread + threads, ... of a row, up to kHeldElements of them.
template <class Element>
struct HeldElements {
  Element held[kHeldElements] = {};
  int columns;
  int thread;
  int threads;

  __device__ __forceinline__ HeldElements(const Element* begin, unsigned columns_)
      : columns(static_cast<int>(columns_)), thread(threadIdx.x), threads(blockDim.x) {
#pragma unroll
    for (int i = 0; i < kHeldElements; ++i) {
      if (has(i)) held[i] = begin[at(i)];
    }
  }

  __device__ __forceinline__ const HeldElements& again() const { return *this; }
  __device__ __forceinline__ int at(int i) const { return thread + i * threads; }
  __device__ __forceinline__ bool has(int i) const { return at(i) < columns; }
};

// Combines the partial results of a row's warps. All lanes of a warp call this and get the result.
template <class Combine, class Partial>
__device__ __forceinline__ Partial combine_warps(const Partial* warps, int count, int lane,
                                                 Partial identity) {
  if (count <= kFewWarps && !kIsIndexed<Partial>) {
    Partial terms[kFewWarps];  // of all warps, in each lane: faster than shuffles
#pragma unroll
    for (int i = 0; i < kFewWarps; ++i) terms[i] = i < count ? warps[i] : identity;
    return tree<Combine>(terms);
  }
  return group_reduce<kWarpSize>(lane < count ? warps[lane] : identity, Combine{});
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
