// Algorithm `interleaved`, for rows whose elements lie a small or ragged number `inner` apart: few
// channels, or 33.
//
// All that belongs to one `outer` is one run of memory, in which the number of an element's row is
// its position modulo `inner`. A block reads the run in packs of 16 bytes, `stride` neighbouring
// ones at a time, a pack a thread. `stride` packs are a whole number of columns, so that a thread's
// packs hold elements of the same rows each time, which it folds in registers, a fold for each
// element of a pack:
//
//     inner 3, packs of 4, stride 3:
//
//                 thread 0      thread 1      thread 2
//     step 0      r0 r1 r2 r0   r1 r2 r0 r1   r2 r0 r1 r2      4 columns
//     step 1      r0 r1 r2 r0   r1 r2 r0 r1   r2 r0 r1 r2      4 columns
//     ...
//
// At the end the block combines in shared memory what its threads have of the same row, in a tree.
// Blocks with different blockIdx.x take different steps. They are a cluster, whose blocks send each
// other their partials (cluster_parts.cuh), or leave them for combine.cuh.
//
// A run may begin and end inside a pack. Of these packs each element is read by itself.
#pragma once

#include "core/ptx/early_launch.cuh"
#include "core/shared.h"
#include "reduce/cluster_parts.cuh"
#include "reduce/instance.cuh"
#include "reduce/reducer.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

struct Runs {
  std::int64_t count;
  std::int64_t size;  // elements of a run
  int inner;
  int stride;   // packs
  int cluster;  // blocks of one, if these have parts of a run, which then get one each; else 1
};

// Blocks of the most threads for which a multiprocessor's registers are to suffice; 0 leaves it to
// the compiler, which takes too many for partials of a medium size, and fewer for others.
template <class Reducer>
constexpr int least_interleaved_blocks() {
  constexpr int kPack = kWidestPack<typename Reducer::Element>;
  constexpr std::size_t kBytes = kPack * sizeof(typename Reducer::Partial);
  return 32 <= kBytes && kBytes <= 64 ? 2 : 0;
}

template <class Reducer>
__global__ void __launch_bounds__(kInterleavedThreads, least_interleaved_blocks<Reducer>())
    interleaved_kernel(const typename Reducer::Element* __restrict__ x, Target y, Runs runs) {
  using Element = typename Reducer::Element;
  using Value = Accumulator<Element>;
  using Partial = typename Reducer::Partial;
  constexpr int kPack = kWidestPack<Element>;
  const auto slots = shared_array<Partial>();
  const typename Reducer::Reader read(y);
  const int thread = threadIdx.x;
  const int step_size = runs.stride * kPack;        // elements
  const int step_columns = step_size / runs.inner;  // a whole number
  const int cluster = JAX_GPUOPS_HAS_CLUSTERS ? runs.cluster : 1;

  ClusterParts<Reducer> cluster_parts(slots + step_size, cluster);
  if (cluster > 1) cluster_parts.begin();

  for (std::int64_t outer = blockIdx.y; outer < runs.count; outer += gridDim.y) {
    const Element* const run = x + outer * runs.size;
    const int phase = elements_past_alignment<kPack>(run);
    const Element* const packs = run - phase;
    const std::int64_t end = phase + runs.size;
    const std::int64_t whole_packs = end / kPack;  // the first may begin before the run
    const std::int64_t steps = (end + step_size - 1) / step_size;
    const std::int64_t part = (steps + gridDim.x - 1) / gridDim.x;
    const std::int64_t first_step = blockIdx.x * part;
    const std::int64_t end_step = first_step + part < steps ? first_step + part : steps;

    // Fold the thread's packs. Folds get steps as columns: which column an element of a step
    // belongs to is the same each time, and is found out once, at the end.
    typename Reducer::Fold fold[kPack];
    if (thread < runs.stride) {
      const auto from = [&](std::int64_t step) {
        return packs + step * step_size + thread * kPack;
      };
      const auto fold_cut = [&](std::int64_t step, std::int64_t begin, std::int64_t cut_end) {
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          if (i < begin || i >= cut_end) continue;
          const Value value[1] = {read(from(step)[i])};
          fold[i].add(value, step, 1);
        }
      };
      std::int64_t step = first_step;
      if (step == 0 && thread == 0 && phase != 0) {
        fold_cut(step, phase, end);
        ++step;
      }
      // The thread's packs are whole in the steps before this one.
      std::int64_t whole = (whole_packs - thread + runs.stride - 1) / runs.stride;
      if (whole_packs <= thread) whole = 0;
      if (whole > end_step) whole = end_step;
      RegisterPack<Element, kPack> elements[kLoads] = {};
      Value value[kLoads][kPack];
      for (; step + kLoads - 1 < whole; step += kLoads) {
#pragma unroll
        for (int u = 0; u < kLoads; ++u) elements[u] = read_pack<kPack>(from(step + u));
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
        if (step + u < whole) elements[u] = read_pack<kPack>(from(step + u));
      }
#pragma unroll
      for (int u = 0; u < kLoads - 1; ++u) {
        if (step + u >= whole) break;
        read.widen(elements[u], value[u]);
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          const Value of_row[1] = {value[u][i]};
          fold[i].add(of_row, step + u, 1);
        }
      }
      // The pack that the run ends in, unless it begins there too: that one has been folded.
      const bool begins_in_it = whole_packs == 0 && phase != 0;
      if (end % kPack != 0 && !begins_in_it && thread == whole_packs % runs.stride) {
        const std::int64_t last = whole_packs / runs.stride;
        if (last >= first_step && last < end_step) fold_cut(last, 0, end % kPack);
      }
    }
    let_next_kernel_start();

    // Combine. Slots are counted from the run's first element, so that slot s is of row s % inner,
    // but steps from the pack that it lies in: the first `phase` elements of a step have the last
    // slots, and columns of the step before.
    if (thread < runs.stride) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        Partial partial = fold[i].value();
        int slot = thread * kPack + i - phase;
        const bool wraps = slot < 0;
        if (wraps) slot += step_size;
        if constexpr (kIsIndexed<Partial>) {
          if (partial.index != Reducer::identity().index) {
            partial.index = slot / runs.inner + (partial.index - wraps) * step_columns;
          }
        }
        slots[slot] = partial;
      }
    }
    combine_rows<Reducer>(slots, runs.inner, step_columns);

    // Store, or combine over the cluster.
    if (cluster > 1) {
      const auto of_block = [&](int inner) { return slots[inner]; };
      cluster_parts.combine(runs.inner, of_block, [&](int inner, const Partial& of_cluster) {
        Reducer::store(y, outer * runs.inner + inner, of_cluster);
      });
      return;
    }
    const std::int64_t result = (outer * gridDim.x + blockIdx.x) * runs.inner;
    for (int inner = thread; inner < runs.inner; inner += blockDim.x) {
      Reducer::store(y, result + inner, slots[inner]);
    }
    __syncthreads();  // the next run's slots overwrite these
  }
}

template <class Instance>
void launch_interleaved(const Call& call) {
  const auto& [queue, config, problem, buffers] = call;
  const bool combines = config.parts == config.cluster;
  const Target to = combines ? call.result() : Instance::partial_target(call);
  const dim3 grid(static_cast<unsigned>(config.parts), grid_extent_beyond_x(problem.outer));
  launch_kernel<interleaved_kernel<typename Instance::First>>(
      queue,
      {grid, static_cast<unsigned>(config.threads), static_cast<std::size_t>(config.shared_bytes),
       config.cluster},
      Instance::elements(call), to,
      Runs{problem.outer, problem.columns * problem.inner, static_cast<int>(problem.inner),
           config.stride, config.cluster});
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
