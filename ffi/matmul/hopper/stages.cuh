// The pipeline that the kernels on Hopper's tensor cores share: a ring of stages in shared memory,
// each with a slice of both factors, 128 bytes deep, which a producer copies and consumers
// multiply.
#pragma once

#include <cstdint>

#include "core/cuda.h"
#include "core/ptx/cluster.cuh"
#include "core/ptx/mbarrier.cuh"
#include "core/ptx/tensor_copy.cuh"
#include "core/ptx/warpgroup.cuh"
#include "core/ptx/wgmma.cuh"
#include "core/shared.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

// The depth of a stage in elements: as many as a swizzled line holds.
template <class Factor>
inline constexpr int kStageDepth = kLineBytes / static_cast<int>(sizeof(Factor));

// One wgmma has 64 rows.
inline constexpr int kProductRows = 64;

// A tile of the result, in elements.
struct TilePosition {
  int row;
  int col;
  int matrix;
};

// The row, in the tile, of sums 4 i and 4 i + 1 of a consumer's thread; sums 4 i + 2 and 4 i + 3
// are eight rows below.
template <class Config>
__device__ __forceinline__ int row_of_sums(int consumer, int wave) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;
  return (consumer * Config::kWaves + wave) * kProductRows + thread / 32 * 16 + thread % 32 / 4;
}

// The shared memory of a launch with a Storage that must begin at a multiple of kAtomBytes, because
// its stages are swizzled: shared memory itself is aligned to less.
template <class Storage>
inline constexpr int kSharedBytes = sizeof(Storage) + kAtomBytes - kSharedAlignment;

// Begins at a multiple of kAtomBytes in shared memory: the swizzle depends on the address.
template <class Config>
struct alignas(kAtomBytes) RingStorage {
  unsigned char a[Config::kStages][Config::kABytes];
  unsigned char b[Config::kStages][Config::kBBytes];
  Mbarrier full[Config::kStages];
  Mbarrier empty[Config::kStages];
};

// The next stage of the ring, and the parity of its phase.
template <class Config>
struct RingPlace {
  int stage = 0;
  unsigned phase = 0;

  __device__ __forceinline__ void advance() {
    ++stage;
    if (stage == Config::kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ void skip(int stages) {
    const unsigned next = static_cast<unsigned>(stage + stages);
    phase ^= next / Config::kStages & 1;
    stage = static_cast<int>(next % Config::kStages);
  }
  __device__ __forceinline__ int previous() const {
    return stage == 0 ? Config::kStages - 1 : stage - 1;
  }
};

// Returns the function by which a consumer's warp releases a stage. The producers of a cluster fill
// a stage together, so lane i arrives at the mbarriers of block i.
template <class Config, class Storage>
__device__ __forceinline__ auto stage_release(Storage& storage, int rank) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool tells = lane < Config::kBlocks;
  const unsigned empty =
      Config::kBlocks > 1 ? shared_address_in_block(storage.empty, tells ? lane : rank) : 0;
  return [&storage, tells, empty](int stage) {
    if constexpr (Config::kBlocks > 1) {
      if (tells) arrive_at(empty + stage * static_cast<int>(sizeof(Mbarrier)));
    } else {
      if (tells) arrive(&storage.empty[stage]);
    }
  };
}

// The end of a producer: no block may exit while others of its cluster still arrive at its
// mbarriers, or copy to it.
template <class Config, class Storage>
__device__ __forceinline__ void drain(Storage& storage, RingPlace<Config> ring) {
  if constexpr (Config::kBlocks > 1) {
    for (int stage = 0; stage < Config::kStages; ++stage) {
      wait(&storage.empty[ring.stage], ring.phase ^ 1);
      ring.advance();
    }
  }
}

// How a factor with `extent` rows, of a, or columns, of b, is read. Rows of a box beyond the end of
// the matrix take many times as long as those within (docs/tuning.md). So of a deep factor tiles
// copy only the rows that exist: by `within`, whose boxes have the `part` rows that a block copies
// at a time, or at the end by `at_edge`, whose boxes have the rows that are left over. The rest of
// the stage holds stale data: it is multiplied, but the results are not stored. A factor that is
// not deep is copied in panels of 64 rows of a or columns of b, and those wholly beyond the end are
// left out in the same way. Boxes that extend beyond the end of a line cost nothing more, and are
// needed at the end of k, where they fill the stage with zeros.
struct FactorMaps {
  TensorMap within;
  TensorMap at_edge;
  int extent;
  int part;
};

// The transaction bytes of copy_slice(), all parts together.
template <bool kDeep, int kExtent>
__device__ __forceinline__ int slice_bytes(const FactorMaps& maps, int row) {
  const int left = maps.extent - row;
  if (left >= kExtent) return kExtent * kLineBytes;
  if (left <= 0) return 0;
  return (kDeep ? left : (left + 63) / 64 * 64) * kLineBytes;
}

// Copies this block's share, part `part` of `kParts`, of a factor's slice: `kExtent` rows from row
// `row` and depth `k` on. If there are several parts, it is multicast to the blocks of the mask
// `blocks`.
template <bool kDeep, int kExtent, int kParts>
__device__ __forceinline__ void copy_slice(unsigned char* to, const FactorMaps& maps, int row,
                                           int k, int matrix, Mbarrier* full, int part,
                                           std::uint16_t blocks) {
  constexpr int kPart = kExtent / kParts;
  const int first = part * kPart;
  const auto copy = [&](const TensorMap& map, int x, int y, int line) {
    if constexpr (kParts == 1) {
      copy_tensor(to + line * kLineBytes, map, x, y, matrix, full);
    } else {
      copy_tensor(to + line * kLineBytes, map, x, y, matrix, full, blocks);
    }
  };
  if constexpr (kDeep) {
    const int left = maps.extent - row - first;
    if (left > 0) copy(left < maps.part ? maps.at_edge : maps.within, k, row + first, first);
  } else {
    // An odd number of panels: the blocks copy them in turn, and the block with the larger share
    // changes with every stage.
    constexpr bool kWhole = kPart % 64 == 0;
#pragma unroll
    for (int panel = 0; panel < (kWhole ? kPart : kExtent); panel += 64) {
      const int line = kWhole ? first + panel : panel;
      if (!kWhole && (k + panel) / 64 % kParts != part) continue;
      if (row + line < maps.extent) copy(maps.within, row + line, k, line);
    }
  }
}

// Issues the wgmmas that add the products of a stage, whose slices the descriptors give, to the
// sums of a consumer, kWaves times 64 rows. If `add` is false, the old sums are ignored.
template <class Config, class Sum>
__device__ __forceinline__ void multiply_stage(Sum (&sums)[Config::kWaves][Config::kSums],
                                               std::uint64_t a, std::uint64_t b, bool add) {
  constexpr bool kDeepA = Config::kDeepA;
  constexpr bool kDeepB = Config::kDeepB;
  begin_products();
#pragma unroll
  for (int k = 0; k < kLineBytes / kProductBytes; ++k) {
#pragma unroll
    for (int wave = 0; wave < Config::kWaves; ++wave) {
      multiply_add<typename Config::Factor, kDeepA, kDeepB>(
          sums[wave], a + (wave * kPanelBytes + k * kDepthStepBytes<kDeepA>) / 16,
          b + k * kDepthStepBytes<kDeepB> / 16, add || k > 0);
    }
  }
  end_products();
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
