// The kernel of `column` for mean and variance of packs of rows, without a mask. Not for small
// arrays (column_kernel has half as much code, and such arrays wait until it is fetched), nor for
// few columns, or many rows of the longest ones (plan_moments.cc).
//
// As in column.cuh, lanes take packs of neighbouring rows, and the threads with the same lane
// number, its depths, divide the columns. A thread takes columns from kMomentsLoads places of the
// block's part at a time, so that what it loads first is a sample of the part:
//
//     part        |- stream 0 -|- stream 1 -|- stream 2 -| ... |- stream 7 -|- rest -|
//     loads 0      0 . . . . .  0 . . . . .  0 . . . . .        0 . . . . .
//     loads 1      . 1 . . . .  . 1 . . . .  . 1 . . . .        . 1 . . . .
//     ...
//     last loads                                                              all at once
//
// The first depths write the means of what they loaded first to shared memory. From these all
// threads of a row have the same origin, so that they only sum distances and their squares
// (distances.cuh), and the block adds two numbers per thread. Of normally distributed elements, the
// origin is so far from the mean of less than one row in 10^7 that the block reads its part again.
//
// All distances have the low-order digits of the origin. If the elements have few digits of their
// own, as 16-bit floats do, additions to a large sum round these digits in the same direction each
// time. So both sums of a thread are compensated.
//
// As in column.cuh, blocks that have parts of the same columns combine their moments in a cluster,
// or write them for combine.cuh.
#pragma once

#include <algorithm>

#include "core/integer.h"
#include "core/ptx/early_launch.cuh"
#include "core/shared.h"
#include "reduce/cluster_parts.cuh"
#include "reduce/column.cuh"
#include "reduce/distances.cuh"
#include "reduce/instance.cuh"
#include "reduce/reducer.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

inline constexpr int kMomentsSamplers = 4;

// The host divides, since a small array would wait for divisions in the kernel.
struct MomentsColumns {
  std::int64_t packs;  // of neighbouring rows
  std::int64_t columns;
  std::int64_t inner;
  std::int64_t part;        // columns per block
  Divisor packs_per_outer;  // valid if `packs` is small enough for a Divisor
  Divisor lanes;
  Divisor loads;  // columns that the threads of a lane load at once
  int depths;
  // log2 of the blocks per cluster, which have parts of the columns; 0 without clusters.
  int cluster_log2;
};

// Shared memory of a block: arrays, one after the other.
template <class A>
struct MomentsMemory {
  A* samples;            // kMomentsSamplers of each row
  Moments<A>* found;     // of each row
  Distances<A>* folded;  // of each thread and row of its pack
  Distances<A>* sums;    // of each row, those of several sets of threads
  void* cluster;

  // Sets of threads, whose sums are combined first: so many that a thread adds about as many.
  __host__ __device__ static int sets(int depths) { return depths < 16 ? 1 : depths / 8; }

  __device__ MomentsMemory(void* memory, int lanes, int depths, int pack) {
    samples = static_cast<A*>(memory);
    found = reinterpret_cast<Moments<A>*>(samples + kMomentsSamplers * lanes * pack);
    folded = reinterpret_cast<Distances<A>*>(found + lanes * pack);
    sums = folded + lanes * depths * pack;
    cluster = sums + sets(depths) * lanes * pack;
  }
  static std::size_t bytes(int lanes, int depths, int pack, int cluster) {
    const std::size_t rows = static_cast<std::size_t>(lanes) * pack;
    return rows * (kMomentsSamplers * sizeof(A) + sizeof(Moments<A>) +
                   (depths + sets(depths)) * sizeof(Distances<A>)) +
           cluster_parts_bytes(static_cast<std::int64_t>(rows), cluster, sizeof(Moments<A>));
  }
};

// Compensated sums.
template <class A>
class DistanceSum {
 public:
  __device__ void add(const Distances<A>& more) {
    sum_.add(more.sum);
    squares_.add(more.squares);
  }
  __device__ Distances<A> value() const { return {sum_.value(), squares_.value()}; }

 private:
  CompensatedSum<A> sum_;
  CompensatedSum<A> squares_;
};

// The sum of from[i * apart] for i = first, first + step, ... before `end`.
template <class A>
__device__ inline Distances<A> sum_apart(const Distances<A>* from, int first, int end, int step,
                                         int apart) {
  Distances<A> all{};
#pragma unroll 1
  for (int i = first; i < end; i += 8 * step) {
    Distances<A> terms[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int at = i + j * step;
      terms[j] = at < end ? from[at * apart] : Distances<A>{};
    }
    all = AddDistances{}(all, tree<AddDistances>(terms));
  }
  return all;
}

template <class Element>
__global__ void __launch_bounds__(kMostMomentsThreads)
    moments_column_kernel(const Element* __restrict__ x, MomentsColumns rows, Target y) {
  using A = Accumulator<Element>;
  using Reducer = MomentsReducer<Element, A>;
  constexpr int kPack = kWidestPack<Element>;
  using Elements = RegisterPack<Element, kPack>;
  using Values = RegisterPack<A, kPack>;
  constexpr int kPer = Elements::kPer;
  constexpr unsigned kAll = (1u << kMomentsLoads) - 1;
  const int lanes = static_cast<int>(rows.lanes.divisor);
  const int depths = rows.depths;
  const MomentsMemory<A> memory(shared_array<unsigned char>(), lanes, depths, kPack);
  const Division place = rows.lanes.divide(threadIdx.x);
  const int lane = static_cast<int>(place.remainder);
  const int depth = static_cast<int>(place.quotient);
  const int cluster = JAX_GPUOPS_HAS_CLUSTERS ? 1 << rows.cluster_log2 : 1;

  const std::int64_t first = std::int64_t{blockIdx.x >> rows.cluster_log2} * lanes;
  const std::int64_t pack = first + lane;
  const bool has_rows = depth < depths && pack < rows.packs;
  const int own_part = cluster > 1 ? blockIdx.x & (cluster - 1) : blockIdx.y;
  const std::int64_t begin = own_part * rows.part;
  const std::int64_t left = rows.columns - begin;
  const std::int64_t columns = left < rows.part ? left : rows.part;  // 0 or less for some blocks

  ClusterParts<Reducer> cluster_parts(memory.cluster, cluster);
  if (cluster > 1) cluster_parts.begin();

  // The thread's columns: streams of `steps` columns each, and the rest.
  const bool is_small = columns <= std::numeric_limits<std::int32_t>::max();
  const std::int64_t steps = columns <= 0 ? 0
                             : is_small   ? rows.loads.quotient(static_cast<unsigned>(columns))
                                          : columns / rows.loads.divisor;
  const std::int64_t rest = columns - steps * rows.loads.divisor - depth;
  const std::int64_t step = depths * rows.inner;
  const Element* own = x;
  if (has_rows) {
    const PackPlace at = place_of(pack, rows, kPack);
    own += (at.outer * rows.columns + begin + depth) * rows.inner + at.number * kPack;
  }
  Elements elements[kMomentsLoads] = {};
  const auto load = [&](std::int64_t k) {  // returns which are loaded
    unsigned present = 0;
    if (!has_rows) return present;
    if (k < steps) {
      const Element* const from = own + k * step;
#pragma unroll
      for (int u = 0; u < kMomentsLoads; ++u) {
        elements[u] = read_pack<kPack>(from + u * (steps * step));
      }
      return kAll;
    }
    const Element* const from = own + kMomentsLoads * steps * step;
#pragma unroll
    for (int u = 0; u < kMomentsLoads; ++u) {
      if (u * depths >= rest) continue;
      elements[u] = read_pack<kPack>(from + u * step);
      present |= 1u << u;
    }
    return present;
  };

  const int in_pack = lane * kPack;  // the lane's first row in the block
  const A count = static_cast<A>(columns);
  const A each = fast_reciprocal(count);
  // Of the rows of the lane that the thread combines: those whose distances are measured again, and
  // those whose elements are divided.
  unsigned again = 0;
  unsigned divided = 0;
  for (int pass = 0;; ++pass) {
    const A scale = pass == 2 ? each : A(1);
    unsigned present = load(0);

    // The origins: the means of samples; later, the means that were found.
    int samples = 1;
    if (pass == 0) {
      samples = kMomentsSamplers;
      while (samples > depths || (samples > 1 && samples > columns)) samples /= 2;
      if (depth < samples && present != 0) {
        // Of 8, 4, 2 or 1 elements, whose mean is exactly their value if all are equal.
        const int taken = present >> 7 != 0 ? 8 : present >> 3 != 0 ? 4 : present >> 1 != 0 ? 2 : 1;
        A weight[kMomentsLoads];
#pragma unroll
        for (int u = 0; u < kMomentsLoads; ++u) {
          weight[u] = u < taken ? A(1) / static_cast<A>(taken) : A(0);
        }
        Values means;
#pragma unroll
        for (int r = 0; r < kPack / kPer; ++r) {
          A terms[kPer][kMomentsLoads];
#pragma unroll
          for (int u = 0; u < kMomentsLoads; ++u) {
            A value[kPer];
            widen(RegisterPack<Element, kPer>{{elements[u].reg[r]}}, value);
#pragma unroll
            for (int e = 0; e < kPer; ++e) terms[e][u] = value[e] * weight[u];
          }
#pragma unroll
          for (int e = 0; e < kPer; ++e) means.reg[r * kPer + e] = tree<Add>(terms[e]);
        }
        write_pack<kPack>(means, memory.samples + depth * lanes * kPack + in_pack);
      }
      __syncthreads();
    }
    const A sample_weight = A(1) / static_cast<A>(samples);
    const auto origin_of = [&](int i) {
      A terms[kMomentsSamplers];
#pragma unroll
      for (int s = 0; s < kMomentsSamplers; ++s) {
        const A* const sample = memory.samples + s * lanes * kPack + in_pack + i;
        terms[s] = s < samples ? *sample * sample_weight : A(0);
      }
      return tree<Add>(terms);
    };
    A origin[kPack];
#pragma unroll
    for (int i = 0; i < kPack; ++i) origin[i] = has_rows && columns > 0 ? origin_of(i) : A(0);

    // Fold the thread's columns.
    DistanceSum<A> sums[kPack];
    const auto fold = [&](unsigned folded) {
#pragma unroll
      for (int r = 0; r < kPack / kPer; ++r) {  // one register at a time, so that few are live
        A value[kMomentsLoads][kPer];
#pragma unroll
        for (int u = 0; u < kMomentsLoads; ++u) {
          widen(RegisterPack<Element, kPer>{{elements[u].reg[r]}}, value[u]);
        }
#pragma unroll
        for (int e = 0; e < kPer; ++e) {
          const int i = r * kPer + e;
          A distance[kMomentsLoads];
          A squares[2];
#pragma unroll
          for (int u = 0; u < kMomentsLoads; ++u) {
            distance[u] = (folded >> u & 1) != 0 ? scale * value[u][e] - origin[i] : A(0);
            squares[u % 2] = distance[u] * distance[u] + (u < 2 ? A(0) : squares[u % 2]);
          }
          sums[i].add({tree<Add>(distance), squares[0] + squares[1]});
        }
      }
    };
    for (std::int64_t k = 0;;) {
      if (present == kAll) {
        fold(kAll);
      } else if (present != 0) {
        fold(present);
      }
      if (++k > steps) break;
      present = load(k);
    }
    if (pass == 0) let_next_kernel_start();

    // Combine over the depths: row i of each pack by the threads of depths i, i + kPack, ...
    const int threads = lanes * depths;
    const int sets = memory.sets(depths);
    if (has_rows) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) memory.folded[i * threads + threadIdx.x] = sums[i].value();
    }
    const auto find = [&](int i, const Distances<A>& all) {
      const unsigned bit = 1u << i;
      if ((pass == 1 && (again & bit) == 0) || (pass == 2 && (divided & bit) == 0)) return;
      Moments<A> moments{};
      if (columns > 0) {
        const Measured<A> measured{{scale, origin_of(i), pass == 2}, all};
        if (pass == 0 && is_far(all, A(1), each)) {
          const Measure<A> by = from_mean(measured, each);
          memory.samples[in_pack + i] = by.origin;
          (by.divides ? divided : again) |= bit;
          return;
        }
        moments = moments_of(measured, count, each);
      }
      memory.found[in_pack + i] = moments;
    };
    __syncthreads();
    if (has_rows) {
#pragma unroll 1
      for (int slot = depth; slot < sets * kPack; slot += depths) {
        const int i = slot % kPack;
        const int set = slot / kPack;
        const Distances<A> all =
            sum_apart(memory.folded + i * threads + lane, set, depths, sets, lanes);
        if (sets == 1) {
          find(i, all);
        } else {
          memory.sums[slot * lanes + lane] = all;
        }
      }
    }
    if (sets > 1) {
      __syncthreads();
      if (has_rows) {
#pragma unroll 1
        for (int i = depth; i < kPack; i += depths) {
          find(i, sum_apart(memory.sums + i * lanes + lane, 0, sets, 1, kPack * lanes));
        }
      }
    }
    const unsigned open = pass == 0 ? again | divided : pass == 1 ? divided : 0;
    if (__syncthreads_or(static_cast<int>(open)) == 0) break;
  }

  // Store, or combine over the cluster.
  const std::int64_t packs_left = rows.packs - first;
  const int block_rows = (packs_left < lanes ? static_cast<int>(packs_left) : lanes) * kPack;
  const std::int64_t first_row = first * kPack;
  if (cluster > 1) {
    const auto of_block = [&](int row) { return memory.found[row]; };
    cluster_parts.combine(block_rows, of_block, [&](int row, const Moments<A>& of_cluster) {
      Reducer::store(y, first_row + row, of_cluster);
    });
    return;
  }
#pragma unroll 1
  for (int row = threadIdx.x; row < block_rows; row += blockDim.x) {
    std::int64_t result = first_row + row;
    if (gridDim.y > 1) {
      result = (result / rows.inner * gridDim.y + blockIdx.y) * rows.inner + result % rows.inner;
    }
    Reducer::store(y, result, memory.found[row]);
  }
}

template <class Instance>
void launch_moments_column(const Call& call) {
  using Element = typename Instance::Element;
  using A = typename Instance::Value;
  const Config& config = call.config;
  const Problem& problem = call.problem;
  const bool combines = config.parts == config.cluster;
  const Target to = combines ? call.result() : Instance::partial_target(call);
  constexpr int kPack = kWidestPack<Element>;
  const std::int64_t packs_per_outer = problem.inner / kPack;
  const int depths = config.threads / config.lanes;
  const MomentsColumns rows{problem.outer * packs_per_outer,
                            problem.columns,
                            problem.inner,
                            divide_up(problem.columns, config.parts),
                            Divisor(packs_per_outer),
                            Divisor(config.lanes),
                            Divisor(std::int64_t{kMomentsLoads} * depths),
                            depths,
                            log2_of(config.cluster)};
  const dim3 grid(grid_extent(divide_up(rows.packs, config.lanes) * config.cluster),
                  static_cast<unsigned>(config.parts / config.cluster));
  launch_kernel<moments_column_kernel<Element>>(
      call.queue,
      {grid, static_cast<unsigned>(config.threads),
       MomentsMemory<A>::bytes(config.lanes, depths, kPack, config.cluster), config.cluster},
      Instance::elements(call), rows, to);
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
