// The sizes that kernels are compiled for: plans choose from them, and launchers look them up.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "softmax/softmax.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

inline constexpr int kPacksOfLine = 8;  // in 128 bytes

// For the ladder.
inline constexpr int kBaselineThreads = 256;
inline constexpr int kMaxBlockThreads = 1024;

inline constexpr int kWarpBlockThreads = 128;

// `lanes` threads per row, each with `packs` packs of 16 bytes of it (for functions that are linear
// in t, of both operands together), and `rows` rows at a time.
struct WarpInstance {
  int lanes;
  int packs;
  int rows;
};

// For enough work to fill the GPU: two packs in flight per thread, and many threads. Two packs of
// one row take half the shuffles of one pack of each of two rows. Rows of one or two packs are
// processed four at a time, which is faster for bfloat16.
inline constexpr WarpInstance kWarpInstances[] = {
    {1, 1, 4},  {2, 1, 4},  {2, 2, 1},  {4, 2, 1},  {8, 2, 1},
    {16, 2, 1}, {32, 2, 1}, {32, 4, 1}, {32, 8, 1}, {32, 16, 1},
};
// For little work, and for rows of one or two packs: as many threads as possible, for the lowest
// latency from load to store. Two packs of a row in each of 4 lanes are as fast as one in each of
// 8, which functions that are linear in t use.
inline constexpr WarpInstance kSmallWarpInstances[] = {
    {1, 1, 1}, {2, 1, 1}, {4, 1, 1}, {4, 2, 1}, {8, 1, 1}, {32, 1, 1}, {32, 2, 1}, {32, 4, 1},
};
// For long rows that do not begin and end at pack boundaries.
inline constexpr WarpInstance kUnalignedWarpInstances[] = {
    {32, 4, 1}, {32, 5, 1}, {32, 8, 1}, {32, 9, 1}, {32, 16, 1}};
// The same for rows with masks, and for short ones without: few lanes per row, since the addresses
// of rows and masks are computed once for all rows of a warp; for little work, whole warps, or half
// of one if its lanes have a pack each. Rows of 2^k elements and a few more have one pack more than
// a power of two.
template <int kOperands>
inline constexpr WarpInstance kMaskedUnalignedWarpInstances[] = {{2, 5 * kOperands, 1},
                                                                 {2, 7 * kOperands, 1},
                                                                 {4, 5 * kOperands, 1},
                                                                 {4, 7 * kOperands, 1},
                                                                 {8, 5 * kOperands, 1},
                                                                 {8, 7 * kOperands, 1},
                                                                 {16, kOperands, 1},
                                                                 {16, 5 * kOperands, 1},
                                                                 {16, 7 * kOperands, 1},
                                                                 {32, kOperands, 1},
                                                                 {32, 3 * kOperands, 1},
                                                                 {32, 5 * kOperands, 1},
                                                                 {32, kOperands == 1 ? 7 : 16, 1},
                                                                 {32, 9, 1},
                                                                 {32, 16, 1}};
// For rows with masks that begin and end at pack boundaries: `kPacks` packs per lane, as long as a
// warp has room for a row with them.
template <int kPacks>
inline constexpr WarpInstance kMaskedWarpInstances[] = {
    {4, kPacks, 1}, {8, kPacks, 1}, {16, kPacks, 1}, {32, kPacks, 1}, {32, 4, 1},
    {32, 5, 1},     {32, 8, 1},     {32, 9, 1},      {32, 16, 1}};
// 16 elements of each operand, or as many as fit in registers: the addresses of a row and its mask
// are computed once for all elements of a lane.
constexpr int masked_packs(int operands, std::size_t item_bytes) {
  const int packs = operands * static_cast<int>(item_bytes);
  return packs < 8 ? packs : 8;
}
// For short rows that do not begin and end at pack boundaries: `packs` packs of one element, of
// each operand.
inline constexpr WarpInstance kElementsWarpInstances[] = {
    {4, 2, 1},   {8, 2, 1},   {8, 4, 1},   {8, 8, 1},   {8, 12, 1}, {8, 16, 1},
    {16, 12, 1}, {16, 14, 1}, {16, 16, 1}, {32, 12, 1}, {32, 16, 1}};
// The layout that `warp` uses for rows of `layout`: another one where that was faster
// (docs/tuning.md). Single elements take four times the instructions of packs, but leave no lane
// idle where packs do not fill all lanes. Longer rows read by elements would take too many
// registers. Of masked rows of whole packs, only the shortest are read by elements, and those of
// 64-bit elements, which have two elements per pack.
constexpr RowLayout warp_layout(RowLayout layout, int operands, std::size_t item_bytes,
                                std::int64_t columns) {
  const std::int64_t most = 32 * (operands == 1 ? 16 : 12);
  switch (layout) {
    case RowLayout::kMasked: {
      const bool is_short = columns <= (item_bytes == 8 ? most : 8);
      return operands == 1 && is_short ? RowLayout::kElements : layout;
    }
    case RowLayout::kUnaligned:
    case RowLayout::kMaskedUnaligned:
      if (columns <= (item_bytes == 2 ? 16 : most)) return RowLayout::kElements;
      return item_bytes == 2 && columns <= 32 * 16 ? RowLayout::kMaskedUnaligned : layout;
    default:
      return layout;
  }
}

// How many packs of each operand a lane of an instance holds.
constexpr int packs_of_each(const WarpInstance& instance, int operands) {
  return instance.packs < operands ? 1 : instance.packs / operands;
}

// Whether plans use an instance of a table: not if one before it has room for as many packs, which
// for an instance of at least 16 lanes must have as many lanes, too. Some instances that differ for
// one operand are equal for two.
template <std::size_t kCount>
constexpr bool is_planned(const WarpInstance (&table)[kCount], std::size_t index, int operands) {
  const auto room = [&](std::size_t i) {
    return table[i].lanes * packs_of_each(table[i], operands);
  };
  for (std::size_t i = 0; i < index; ++i) {
    const bool replaces = table[i].lanes >= table[index].lanes || table[index].lanes < 16;
    if (replaces && room(i) >= room(index)) return false;
  }
  return true;
}

// Packs of a row per thread of a block: few for short rows, so that enough threads hide latency,
// and more for long rows, so that fewer warps wait for each other. 5 for unaligned rows, since with
// 4 those of 2^k + 1 packs would need one more warp for the last pack. For functions that are
// linear in t, the packs are of both operands together. The launch bounds leave 32 registers for
// everything else.
inline constexpr int kBlockPacks[] = {4, 8};
inline constexpr int kUnalignedBlockPacks[] = {5, 8};
inline constexpr int kFewPacksThreads = 256;  // the most of a block with few packs per thread
inline constexpr int kMostBlockPacks = 8;
// For rows that are read twice.
inline constexpr int kPassingPacks = 4;
inline constexpr int kClusterPacks = 8;
inline constexpr int kClusterThreads = 256;
inline constexpr int kClusterBlocksResident = 4;  // on a multiprocessor
// Whether plain softmax has a kernel of its own: 64 registers are too few for code that supports
// other functions and scales as well, except for aligned rows of 16-bit elements.
constexpr bool has_plain_cluster(DType dtype, RowLayout layout) {
  return layout == RowLayout::kUnaligned ||
         (dtype == DType::kFloat32 && layout != RowLayout::kMaskedUnaligned);
}
// The same for kernels that keep rows in shared memory, for a lower latency from the state of a row
// to its results. 16-bit rows gain less.
constexpr bool has_plain_in_shared(DType dtype, RowLayout layout) {
  return dtype == DType::kFloat32 && layout != RowLayout::kMaskedUnaligned;
}
inline constexpr int kBlockThreads = 512;
inline constexpr int kBlocksResident = 2;
// For little work: up to 8 warps, with few packs per thread.
inline constexpr int kSmallBlockPacks[] = {1, 2, 4};
inline constexpr int kMostSmallBlockPacks = 4;
inline constexpr int kSmallBlockWarps = 8;
inline constexpr int kSmallBlockThreads = 32 * kSmallBlockWarps;
// A slice of a row in shared memory has up to kSlicePacks packs. Each thread processes a few at a
// time: fewer of 64-bit elements, whose arithmetic takes more registers.
inline constexpr int kSlicePacks = 4096;
inline constexpr int kSliceThreads = 256;
inline constexpr int kSlicesResident = 3;  // blocks on a multiprocessor
constexpr int slice_held(int element_bytes) { return element_bytes < 8 ? 8 : 4; }
// The blocks of split_pipelined, which wait for each other, run one per multiprocessor and have a
// ring buffer for the rows in flight. Each of ring_warps() warps holds up to ring_held() packs per
// thread of each row, and two more warps exchange states. 16-bit elements need more warps, since
// they take the most instructions per byte; others need registers.
inline constexpr int kRingRows = 3;
constexpr int ring_warps(int element_bytes) { return element_bytes < 4 ? 24 : 22; }
constexpr int ring_threads(int element_bytes) { return 32 * (ring_warps(element_bytes) + 2); }
constexpr int ring_held(int element_bytes) { return element_bytes < 8 ? 6 : 4; }
// The global memory through which a group of blocks exchange states: sets of slots, each with a
// counter.
inline constexpr int kMailboxSets = 2 * kRingRows;
constexpr std::int64_t mailbox_bytes(std::int64_t blocks, std::int64_t state_bytes) {
  const std::int64_t lines = (2 * state_bytes * blocks + 127) / 128;
  return kMailboxSets * (1 + lines) * 128;
}
// For the blocks that combine the states of slices.
inline constexpr int kFinishThreads = 256;
// For rows that are not packed: each element is loaded separately.
inline constexpr int kStridedPacks = 1;

inline constexpr int kStagedThreads = 256;

// `lanes` threads per row, with `per_lane` elements each; the first `sure` of these lie in every
// row that a plan uses the instance for.
struct StagedInstance {
  int lanes;
  int per_lane;
  int sure;
};
inline constexpr StagedInstance kStagedInstances[] = {{1, 8, 0},  {2, 8, 4},   {4, 8, 4},
                                                      {4, 9, 8},  {8, 8, 4},   {16, 8, 4},
                                                      {32, 8, 4}, {32, 16, 8}, {32, 32, 16}};
inline constexpr std::int64_t kStagedColumns = 32 * 32;
inline constexpr std::int64_t kStagedOwnBytes = 128;  // of shared memory, besides its tiles

inline constexpr int kElementwiseThreads = 256;
inline constexpr int kElementwisePacks = 4;  // loads in flight
// The elements that a thread of elementwise_columns_kernel holds of each of `pack` rows: 64 bytes
// in flight, or 16 elements.
constexpr int elementwise_steps(int pack, int element_bytes) {
  return pack * element_bytes < 4 ? 16 : 64 / (pack * element_bytes);
}
inline constexpr int kFlatThreads = 256;

// The elements that a thread of column holds: 8 bytes side by side, and kColumnHeld along the axis.
// For an axis of up to 32, at most 8 in blocks of 128 threads.
constexpr int column_pack(int element_bytes) { return 8 / element_bytes; }
inline constexpr int kColumnHeld[] = {4, 8, 16};
inline constexpr int kColumnThreads = 512;
inline constexpr int kColumnBlocksResident = 2;
// For rows that cannot be read in packs, a block of column has lines of a tile in shared memory. A
// thread has line_rows() rows, and kLineSteps steps of each at a time.
constexpr int line_rows(int element_bytes, int operands) {
  return column_pack(element_bytes) < 4 / operands ? column_pack(element_bytes) : 4 / operands;
}
inline constexpr int kLineSteps = 8;
inline constexpr int kLineThreads = 512;
inline constexpr int kLineBlocksResident = 2;
// Each warp of a strip has up to kStripSteps steps along the axis, of both operands together for
// functions that are linear in t: strip_held() of each operand in registers, and the others in
// shared memory, in kStripPieces pieces of equal length.
inline constexpr int kStripBytes = 256;
inline constexpr int kStripWarps = 16;
inline constexpr int kStripThreads = 32 * kStripWarps;
inline constexpr int kStripsResident = 2;
inline constexpr int kStripSteps = 32;
inline constexpr int kStripPieces = 3;
constexpr int strip_held(bool is_linear_in_t) { return is_linear_in_t ? 7 : 11; }

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
