// Algorithm `interleaved`, for rows whose elements have a stride `inner` that is small or not a
// multiple of a pack: few channels, or 33.
//
// The elements of one `outer` are a contiguous run of memory, in which the row of an element is its
// position modulo `inner`. A block reads the run in packs of 16 bytes: in each step `stride`
// contiguous packs, one per thread. `stride` packs are a whole number of columns, so a thread's
// pack has elements of the same rows in each step. The thread folds them in registers, with a fold
// for each element of a pack:
//
//     inner 3, packs of 4, stride 3:
//
//                 thread 0      thread 1      thread 2
//     step 0      r0 r1 r2 r0   r1 r2 r0 r1   r2 r0 r1 r2      4 columns
//     step 1      r0 r1 r2 r0   r1 r2 r0 r1   r2 r0 r1 r2      4 columns
//     ...
//
// At the end the block combines its threads' partials of the same row in shared memory, in a tree.
// Several blocks may take different steps of a run. Either they form a cluster and send each other
// their partials (cluster_parts.cuh), or they have different blockIdx.y and write partials for
// combine.cuh.
//
// A run may begin and end inside a pack. The elements of these packs are read one by one.
#pragma once

#include "core/ptx/early_launch.cuh"
#include "core/shared.h"
#include "reduce/cluster_parts.cuh"
#include "reduce/instance.cuh"
#include "reduce/reducer.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

// The host divides, since a small array would wait for divisions in the kernel. Narrow types keep
// the kernel parameters that it needs within 64 bytes, which are fetched at once.
struct Runs {
  unsigned size;  // elements of a run
  int steps;      // per block
  std::uint16_t inner;
  std::uint16_t stride;        // packs
  std::uint16_t step_columns;  // columns per step
  // log2 of the blocks per cluster, which have parts of a run; 0 without clusters.
  std::uint16_t cluster_log2;
};

// How many blocks of the most threads must fit in a multiprocessor's registers. 0 leaves it to the
// compiler, which uses too many registers for partials of a medium size, and fewer for others.
template <class Reducer>
constexpr int least_interleaved_blocks() {
  constexpr int kPack = kWidestPack<typename Reducer::Element>;
  constexpr std::size_t kBytes = kPack * sizeof(typename Reducer::Partial);
  return 32 <= kBytes && kBytes <= 64 ? 2 : 0;
}

template <class Reducer>
__global__ void __launch_bounds__(kInterleavedThreads, least_interleaved_blocks<Reducer>())
    interleaved_kernel(const typename Reducer::Element* __restrict__ x, Runs runs, Target y) {
  using Element = typename Reducer::Element;
  using Value = Accumulator<Element>;
  using Partial = typename Reducer::Partial;
  constexpr int kPack = kWidestPack<Element>;
  Partial* const memory = shared_array<Partial>();
  const SpacedPartials<Partial, kPack> slots(memory);
  const typename Reducer::Reader read(y);
  const int thread = threadIdx.x;
  const int stride = runs.stride;
  const int step_size = stride * kPack;  // elements
  const int cluster = JAX_GPUOPS_HAS_CLUSTERS ? 1 << runs.cluster_log2 : 1;
  const unsigned outer = blockIdx.x >> runs.cluster_log2;
  const int part = static_cast<int>(cluster > 1 ? blockIdx.x & (cluster - 1) : blockIdx.y);

  ClusterParts<Reducer> cluster_parts(
      reinterpret_cast<char*>(memory) + interleaved_partials_bytes(stride, kPack, sizeof(Partial)),
      cluster);
  if (cluster > 1) cluster_parts.begin();

  const Element* const run = x + std::uint64_t{outer} * runs.size;
  const int phase = elements_past_alignment<kPack>(run);
  const Element* const packs = run - phase;
  const int beyond = phase + static_cast<int>(runs.size % kPack);  // after size / kPack packs
  const int whole_packs = static_cast<int>(runs.size / kPack) + beyond / kPack;
  const int cut = beyond % kPack;  // after the whole packs; pack 0 may begin before the run

  // Fold the thread's packs. Folds get the step in place of the column: the column within a step is
  // the same in each step, and is added once, at the end.
  typename Reducer::Fold fold[kPack];
  if (thread < stride) {
    int step = part * runs.steps;
    int pack = step * stride + thread;
    const auto fold_cut = [&](int begin, int end) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        if (i < begin || i >= end) continue;
        const Value value[1] = {read(packs[std::int64_t{pack} * kPack + i])};
        fold[i].add(value, step, 1);
      }
    };
    // The block's packs before end_whole are whole.
    const int end_pack = (step + runs.steps) * stride;
    const int end_whole = whole_packs < end_pack ? whole_packs : end_pack;
    if (pack == 0 && phase != 0) {
      fold_cut(phase, whole_packs > 0 ? kPack : cut);
      ++step;
      pack += stride;
    }
    const auto is_whole = [&](int u) { return pack + u * stride < end_whole; };
    const auto read_step = [&](int u) {
      return read_pack<kPack>(packs + std::int64_t{pack + u * stride} * kPack);
    };
    RegisterPack<Element, kPack> elements[kLoads] = {};
    Value value[kLoads][kPack];
    for (; is_whole(kLoads - 1); step += kLoads, pack += kLoads * stride) {
#pragma unroll
      for (int u = 0; u < kLoads; ++u) elements[u] = read_step(u);
#pragma unroll
      for (int u = 0; u < kLoads; ++u) read.widen(elements[u], value[u]);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        Value of_row[kLoads];
#pragma unroll
        for (int u = 0; u < kLoads; ++u) of_row[u] = value[u][i];
        fold[i].add(of_row, step, 1);
      }
    }
#pragma unroll
    for (int u = 0; u < kLoads - 1; ++u) {
      if (is_whole(u)) elements[u] = read_step(u);
    }
    int left = 0;
#pragma unroll
    for (int u = 0; u < kLoads - 1; ++u) {
      if (!is_whole(u)) break;
      ++left;
      read.widen(elements[u], value[u]);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const Value of_row[1] = {value[u][i]};
        fold[i].add(of_row, step + u, 1);
      }
    }
    // The pack in which the run ends. If the run also begins in it, it has been folded, and its
    // thread is beyond it.
    step += left;
    pack += left * stride;
    if (pack == whole_packs && pack < end_pack && cut != 0) fold_cut(0, cut);
  }
  let_next_kernel_start();

  // Combine. Slots are counted from the run's first element, so that slot s belongs to row
  // s % inner, but steps from the pack that contains this element: the first `phase` elements of a
  // step have the last slots, and columns of the previous step.
  if (thread < stride) {
    const int first = thread * kPack - phase;
    int column = 0;  // of a slot, and its row in that column
    int row = 0;
    if constexpr (kIsIndexed<Partial>) {
      column = (first < 0 ? first + step_size : first) / runs.inner;
      row = (first < 0 ? first + step_size : first) % runs.inner;
    }
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      Partial partial = fold[i].value();
      int slot = first + i;
      const bool wraps = slot < 0;
      if (wraps) slot += step_size;
      if constexpr (kIsIndexed<Partial>) {
        if (slot == 0) column = row = 0;
        if (partial.index != Reducer::identity().index) {
          partial.index = column + (partial.index - wraps) * runs.step_columns;
        }
        if (++row == runs.inner) {
          row = 0;
          ++column;
        }
      }
      slots[slot] = partial;
    }
  }
  // A thread combines 16 numbers faster than it waits at another barrier.
  constexpr int kMost = std::is_arithmetic_v<Partial> ? 2 * kMostApart : kMostApart;
  combine_rows<Reducer, kMost>(slots, runs.inner, runs.step_columns);

  // Store, or combine over the cluster.
  if (cluster > 1) {
    const auto of_block = [&](int inner) { return slots[inner]; };
    cluster_parts.combine(runs.inner, of_block, [&](int inner, const Partial& of_cluster) {
      Reducer::store(y, std::int64_t{outer} * runs.inner + inner, of_cluster);
    });
    return;
  }
  const std::int64_t result = (std::int64_t{outer} * gridDim.y + blockIdx.y) * runs.inner;
#pragma unroll 1
  for (int inner = thread; inner < runs.inner; inner += blockDim.x) {
    Reducer::store(y, result + inner, slots[inner]);
  }
}

template <class Instance>
void launch_interleaved(const Call& call) {
  const auto& [queue, config, problem, buffers] = call;
  constexpr int kPack = kWidestPack<typename Instance::Element>;
  const bool combines = config.parts == config.cluster;
  const Target to = combines ? call.result() : Instance::partial_target(call);
  const dim3 grid(grid_extent(problem.outer * config.cluster),
                  static_cast<unsigned>(config.parts / config.cluster));
  const std::int64_t size = problem.columns * problem.inner;
  const std::int64_t step_size = std::int64_t{config.stride} * kPack;
  const std::int64_t steps = divide_up(size + kPack - 1, step_size);  // of a run of any phase
  const auto narrow = [](std::int64_t number) { return static_cast<std::uint16_t>(number); };
  launch_kernel<interleaved_kernel<typename Instance::OfShortRows>>(
      queue,
      {grid, static_cast<unsigned>(config.threads), static_cast<std::size_t>(config.shared_bytes),
       config.cluster},
      Instance::elements(call),
      Runs{static_cast<unsigned>(size), static_cast<int>(divide_up(steps, config.parts)),
           narrow(problem.inner), narrow(config.stride), narrow(step_size / problem.inner),
           narrow(log2_of(config.cluster))},
      to);
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
