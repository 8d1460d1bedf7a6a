// Ladder, step 6: `multiple`, many elements per thread.
//
// A row is walked by as many blocks as the GPU holds at a time, in packs of 16 bytes; each thread
// folds its packs in registers before the block combines them once. The cost of the tree is then
// spread over thousands of elements, and the kernel runs at the speed of memory. The partials of
// the blocks are a row for the next launch: the same kernel with one block a row.
//
//     row ->  | pack: block 0, thread 0 | block 0, thread 1 | ... | block 1, thread 0 | ...
//             | block 0, thread 0 again | ...
#pragma once

#include "core/shared.h"
#include "reduce/instance.cuh"
#include "reduce/ladder/tree.cuh"
#include "reduce/reducer.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

template <class Reducer>
struct MultipleStorage {
  typename Reducer::Partial warps[kMaxWarpsPerBlock];
};

// Folds elements of a row, of which element i is in column(i), but those that the mask leaves out.
template <class Reducer, class RowMask, class Value, int kCount, class Column>
__device__ inline void fold_masked(typename Reducer::Fold& fold, const RowMask& mask,
                                   Value (&value)[kCount], const Column& column) {
  if constexpr (!std::is_same_v<RowMask, NoMasks::Row>) {
    unsigned kept = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) kept |= mask(column(i)) ? 1u << i : 0;
    if constexpr (!Reducer::kHasIdentity) {
      return fold.add_kept(value, kept, column(0), 1);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if ((kept >> i & 1) == 0) value[i] = static_cast<Value>(Reducer::identity());
      }
    }
  }
  fold.add(value, column(0), 1);
}

// Folds the columns of a row that fall to thread `thread` of `threads`: a scalar head up to the
// first aligned pack, packs, and a scalar tail. The packs are loaded kLoads at a time, before the
// first of them is folded; a thread that waited for each would leave memory idle.
template <class Reducer, class RowMask>
__device__ inline typename Reducer::Partial fold_row(const typename Reducer::Element* row,
                                                     std::int64_t columns, const RowMask& mask,
                                                     const typename Reducer::Reader& read,
                                                     int thread, int threads) {
  using Element = typename Reducer::Element;
  using Value = Accumulator<Element>;
  constexpr int kPack = kWidestPack<Element>;
  constexpr int kFolded = packs_folded<Reducer>(kLoads, kPack);  // at a time
  typename Reducer::Fold fold;

  const auto fold_scalars = [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t column = first + thread; column < end; column += threads) {
      Value value[1] = {read(row[column])};
      fold_masked<Reducer>(fold, mask, value, [&](int) { return column; });
    }
  };
  std::int64_t head = elements_to_alignment<kPack>(row);
  if (head > columns) head = columns;
  fold_scalars(0, head);

  const std::int64_t packs = (columns - head) / kPack;
  std::int64_t pack = thread;
  Value value[kLoads][kPack] = {};  // g++ does not see that what is not loaded is not read
  const auto at = [&](int i) { return pack + std::int64_t{i} * threads; };
  const auto column = [&](int i) { return head + at(i) * kPack; };
  for (; at(kLoads - 1) < packs; pack = at(kLoads)) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) read.load(row + column(i), value[i]);
#pragma unroll
    for (int i = 0; i < kLoads; i += kFolded) {
      Value chunk[kFolded * kPack];
#pragma unroll
      for (int j = 0; j < kFolded * kPack; ++j) chunk[j] = value[i + j / kPack][j % kPack];
      fold_masked<Reducer>(fold, mask, chunk,
                           [&](int j) { return column(i + j / kPack) + j % kPack; });
    }
  }
#pragma unroll
  for (int i = 0; i < kLoads - 1; ++i) {
    if (at(i) < packs) read.load(row + column(i), value[i]);
  }
#pragma unroll
  for (int i = 0; i < kLoads - 1; ++i) {
    if (at(i) < packs) {
      fold_masked<Reducer>(fold, mask, value[i], [&](int j) { return column(i) + j; });
    }
  }

  fold_scalars(head + packs * kPack, columns);
  return fold.value();
}

// blockIdx.x counts the blocks of a row, and blockIdx.y rows.
template <class Reducer, class Masks>
__global__ void __launch_bounds__(kMultipleThreads)
    multiple_kernel(const typename Reducer::Element* __restrict__ x, Target y, ContiguousRows rows,
                    Masks masks) {
  const auto warps = shared<MultipleStorage<Reducer>>().warps;
  const int thread = blockIdx.x * blockDim.x + threadIdx.x;
  const int threads = gridDim.x * blockDim.x;
  const typename Reducer::Reader read(y);

  for (std::int64_t row = blockIdx.y; row < rows.count; row += gridDim.y) {
    const auto partial = block_reduce(fold_row<Reducer>(x + row * rows.columns, rows.columns,
                                                        masks.of(row), read, thread, threads),
                                      Reducer::identity(), typename Reducer::Combine{}, warps);
    if (threadIdx.x == 0) Reducer::store(y, row * gridDim.x + blockIdx.x, partial);
  }
}

template <class Reducer, class Masks>
void launch_blocks(const Queue& queue, std::int64_t blocks_per_row, int threads,
                   const typename Reducer::Element* x, const Target& y, ContiguousRows rows,
                   const Masks& masks) {
  const dim3 grid(static_cast<unsigned>(blocks_per_row), grid_extent_beyond_x(rows.count));
  launch_kernel<multiple_kernel<Reducer, Masks>>(
      queue, {grid, static_cast<unsigned>(threads), sizeof(MultipleStorage<Reducer>)}, x, y, rows,
      masks);
}

template <class Instance>
void launch_multiple(const Call& call) {
  using First = typename Instance::First;
  const auto& [queue, config, problem, buffers] = call;
  const ContiguousRows rows{problem.rows(), problem.columns};
  const Target to = config.parts == 1 ? call.result() : Instance::partial_target(call);
  launch_blocks<First>(queue, config.parts, config.threads, Instance::elements(call), to, rows,
                       Instance::masks(call));
  if (config.parts == 1) return;
  launch_blocks<typename Instance::Last>(queue, 1, config.last_threads, Instance::partials(call),
                                         call.result(), {rows.count, config.parts}, NoMasks{});
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
