// The sizes that kernels are compiled for: what plans choose from, and launchers find.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "softmax/softmax.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

inline constexpr int kPacksOfLine = 8;  // in 128 bytes

// Of the ladder.
inline constexpr int kBaselineThreads = 256;
inline constexpr int kMaxBlockThreads = 1024;

inline constexpr int kWarpBlockThreads = 128;

// `lanes` threads on a row, `packs` packs of 16 bytes of it in each (for the functions that are
// linear in t, of both operands together), `rows` rows at a time.
struct WarpInstance {
  int lanes;
  int packs;
  int rows;
};

// Enough work to fill the GPU: two packs in flight a thread, and many threads. Two of one row take
// half the shuffles of one of each of two rows. Rows of one or two packs come four at a time, as
// bfloat16 likes it.
inline constexpr WarpInstance kWarpInstances[] = {
    {1, 1, 4},  {2, 1, 4},  {2, 2, 1},  {4, 2, 1},  {8, 2, 1},
    {16, 2, 1}, {32, 2, 1}, {32, 4, 1}, {32, 8, 1}, {32, 16, 1},
};
// Little work: as many threads as possible, for the shortest way from load to store. Two packs of
// a row in each of 4 lanes are as fast as one in each of 8, which those linear in t have.
inline constexpr WarpInstance kSmallWarpInstances[] = {
    {2, 1, 1}, {4, 1, 1}, {4, 2, 1}, {8, 1, 1}, {32, 1, 1}, {32, 2, 1}, {32, 4, 1},
};
// Long rows that do not begin and end with a pack.
inline constexpr WarpInstance kUnalignedWarpInstances[] = {
    {32, 4, 1}, {32, 5, 1}, {32, 8, 1}, {32, 9, 1}, {32, 16, 1}};
// Those with masks, and short ones without: few lanes, since where a row and its mask lie is found
// once for all rows of a warp, but for little work whole warps. Rows of 2^k elements and a few more
// have one pack more than a power of two.
template <int kOperands>
inline constexpr WarpInstance kMaskedUnalignedWarpInstances[] = {{2, 5 * kOperands, 1},
                                                                 {2, 7 * kOperands, 1},
                                                                 {4, 5 * kOperands, 1},
                                                                 {4, 7 * kOperands, 1},
                                                                 {8, 5 * kOperands, 1},
                                                                 {8, 7 * kOperands, 1},
                                                                 {16, 5 * kOperands, 1},
                                                                 {16, 7 * kOperands, 1},
                                                                 {32, kOperands, 1},
                                                                 {32, 3 * kOperands, 1},
                                                                 {32, 5 * kOperands, 1},
                                                                 {32, kOperands == 1 ? 7 : 16, 1},
                                                                 {32, 9, 1},
                                                                 {32, 16, 1}};
// Rows that begin and end with a pack, and have masks: `kPacks` a lane as long as a warp has room
// for a row with them.
template <int kPacks>
inline constexpr WarpInstance kMaskedWarpInstances[] = {
    {4, kPacks, 1}, {8, kPacks, 1}, {16, kPacks, 1}, {32, kPacks, 1}, {32, 4, 1},
    {32, 5, 1},     {32, 8, 1},     {32, 9, 1},      {32, 16, 1}};
// 16 elements of each operand, or what has room in registers, since where a row and its mask lie is
// found for all elements of a lane at once.
constexpr int masked_packs(int operands, std::size_t item_bytes) {
  const int packs = operands * static_cast<int>(item_bytes);
  return packs < 8 ? packs : 8;
}
// Short rows that do not begin and end with a pack: `packs` of one element, of each operand.
inline constexpr WarpInstance kElementsWarpInstances[] = {
    {4, 2, 1},   {8, 2, 1},   {8, 4, 1},   {8, 8, 1},   {8, 12, 1}, {8, 16, 1},
    {16, 12, 1}, {16, 14, 1}, {16, 16, 1}, {32, 12, 1}, {32, 16, 1}};
// The layout of rows that a warp takes, where others than their own were faster (docs/tuning.md).
// Read by elements, rows take four times the instructions of packs, but no lane is idle that packs
// do not fill. Longer rows by elements would take too many registers. Of whole packs only the
// shortest rows, and those of 64 bits, of which packs have two elements.
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

// Whether plans take an instance of a table, since none before it has room for as many packs, or
// none of whole warps. Two operands have some in common that differ for one.
template <std::size_t kCount>
constexpr bool is_planned(const WarpInstance (&table)[kCount], std::size_t index, int operands) {
  const auto room = [&](std::size_t i) {
    return table[i].lanes * packs_of_each(table[i], operands);
  };
  for (std::size_t i = 0; i < index; ++i) {
    const bool replaces = table[i].lanes == 32 || table[index].lanes != 32;
    if (replaces && room(i) >= room(index)) return false;
  }
  return true;
}

// Packs that a thread of a block holds of a row: few in short rows, for as many threads as it takes
// to hide their waits, and more in long ones, for fewer warps to wait for each other. 5 of
// unaligned rows, since those of 2^k + 1 packs would need one more warp for the last. A thread of
// the functions that are linear in t holds as many of both operands together. The launch bounds
// leave 32 registers for the rest.
inline constexpr int kBlockPacks[] = {4, 8};
inline constexpr int kUnalignedBlockPacks[] = {5, 8};
inline constexpr int kFewPacksThreads = 256;  // up to which a block holds few
inline constexpr int kMostBlockPacks = 8;
// Of rows that are read again.
inline constexpr int kPassingPacks = 4;
inline constexpr int kClusterPacks = 8;
inline constexpr int kClusterThreads = 256;
inline constexpr int kClusterBlocksResident = 4;  // on a multiprocessor
// Whether plain softmax has a kernel of its own: 64 registers are few for what other functions and
// scales need as well. Aligned rows of 16-bit elements do with them.
constexpr bool has_plain_cluster(DType dtype, RowLayout layout) {
  return layout == RowLayout::kUnaligned ||
         (dtype == DType::kFloat32 && layout != RowLayout::kMaskedUnaligned);
}
// The same of kernels that keep rows in shared memory: for a shorter way from the state of a row to
// its results. 16-bit rows gain less.
constexpr bool has_plain_in_shared(DType dtype, RowLayout layout) {
  return dtype == DType::kFloat32 && layout != RowLayout::kMaskedUnaligned;
}
inline constexpr int kBlockThreads = 512;
inline constexpr int kBlocksResident = 2;
// For little work, as many threads as 8 warps have, and few packs in each.
inline constexpr int kSmallBlockPacks[] = {1, 2, 4};
inline constexpr int kMostSmallBlockPacks = 4;
inline constexpr int kSmallBlockWarps = 8;
inline constexpr int kSmallBlockThreads = 32 * kSmallBlockWarps;
// A slice of a row in shared memory has up to kSlicePacks packs, of which each thread takes a few
// at a time: fewer of 64-bit elements, which take more registers to compute with.
inline constexpr int kSlicePacks = 4096;
inline constexpr int kSliceThreads = 256;
inline constexpr int kSlicesResident = 3;  // blocks on a multiprocessor
constexpr int slice_held(int element_bytes) { return element_bytes < 8 ? 8 : 4; }
// Blocks of split that wait for each other, one on a multiprocessor, have a ring for as many rows
// as are under way at a time. Each warp has up to ring_held() packs a thread of each, and two more
// pass on states. 16-bit elements want warps, since they take the most instructions for their
// bytes, and others registers.
inline constexpr int kRingRows = 3;
constexpr int ring_warps(int element_bytes) { return element_bytes < 4 ? 24 : 22; }
constexpr int ring_threads(int element_bytes) { return 32 * (ring_warps(element_bytes) + 2); }
constexpr int ring_held(int element_bytes) { return element_bytes < 8 ? 6 : 4; }
// The memory by which a group of them tell each other states: sets of slots, each with a counter.
inline constexpr int kMailboxSets = 2 * kRingRows;
constexpr std::int64_t mailbox_bytes(std::int64_t blocks, std::int64_t state_bytes) {
  const std::int64_t lines = (2 * state_bytes * blocks + 127) / 128;
  return kMailboxSets * (1 + lines) * 128;
}
// Of the blocks that combine what slices were reduced to.
inline constexpr int kFinishThreads = 256;
// For rows that are not packed, each element read by itself.
inline constexpr int kStridedPacks = 1;

inline constexpr int kStagedThreads = 256;

// `lanes` threads on a row, `per_lane` elements of it in each, of which at least `sure` lie in
// every row that a plan uses the instance for.
struct StagedInstance {
  int lanes;
  int per_lane;
  int sure;
};
inline constexpr StagedInstance kStagedInstances[] = {{1, 8, 0},  {2, 8, 4},   {4, 8, 4},
                                                      {4, 9, 8},  {8, 8, 4},   {16, 8, 4},
                                                      {32, 8, 4}, {32, 16, 8}, {32, 32, 16}};
inline constexpr std::int64_t kStagedColumns = 32 * 32;

inline constexpr int kElementwiseThreads = 256;
inline constexpr int kElementwisePacks = 4;  // loads in flight

// Elements side by side that a thread of column holds, 8 bytes of them, and along the axis. For an
// axis of up to 32, 8 in blocks of 128 threads.
constexpr int column_pack(int element_bytes) { return 8 / element_bytes; }
inline constexpr int kColumnHeld[] = {4, 8, 16};
// Threads side by side: with 256 bytes where that does, and with 128 at least.
inline constexpr int kColumnLanes = 32;
inline constexpr int kFewestColumnLanes = 16;
inline constexpr int kColumnThreads = 512;
inline constexpr int kColumnBlocksResident = 2;
// Steps along the axis that each warp of a strip has, of both operands together for those linear in
// t; in registers; and the others in shared memory, in pieces as long as each other.
inline constexpr int kStripBytes = 256;
inline constexpr int kStripWarps = 16;
inline constexpr int kStripThreads = 32 * kStripWarps;
inline constexpr int kStripsResident = 2;
inline constexpr int kStripSteps = 32;
inline constexpr int kStripPieces = 3;
constexpr int strip_held(bool is_linear_in_t) { return is_linear_in_t ? 7 : 11; }
// Clusters of more blocks, but not of 16, leave many multiprocessors without any.
inline constexpr int kMostUnevenStripBlocks = 9;

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
