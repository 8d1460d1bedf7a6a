// softmax by a block per row, for rows that the registers of a warp do not hold.
//
// `block_shared` keeps the row in shared memory: one read and one write of the array. Each thread
// reads back only what it wrote itself, so the row needs no barrier; only the reductions do.
// `block_uncached` keeps nothing: it reads the row once for a running maximum and sum, and again
// for the results.
#pragma once

#include "core/collectives.h"
#include "core/shared.h"
#include "softmax/ladder/walk.cuh"
#include "softmax/launcher.cuh"
#include "softmax/numerics.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

template <class A>
struct BlockScratch {
  A warps[kMaxWarpsPerBlock];
};

// The shared memory of block_shared: scratch, then the row, which starts at the same offset within
// 16 bytes as the row in x, so that both have the same packs.
template <class T>
std::size_t block_shared_bytes(std::int64_t columns) {
  return sizeof(BlockScratch<Accumulator<T>>) + 16 + static_cast<std::size_t>(columns) * sizeof(T);
}

// What is subtracted before exponentials are taken. softmax of a row whose maximum is infinite is
// NaN, which inf - inf gives. logsumexp of such a row is the maximum, which subtracting 0
// preserves.
template <Function kFunction, class A>
__device__ inline A shift(A maximum) {
  if constexpr (kFunction == Function::kLogSumExp) {
    return is_finite(maximum) ? maximum : A(0);
  } else {
    return maximum;
  }
}

// The step from x - shift to the result of a row with the given sum of exponentials.
template <Function kFunction, class T>
struct Finish {
  using A = Accumulator<T>;
  A parameter;

  __device__ explicit Finish(A sum)
      : parameter(kFunction == Function::kSoftmax ? A(1) / sum : A(log(sum))) {}

  __device__ A operator()(A shifted) const {
    if constexpr (kFunction == Function::kSoftmax) {
      return exponential_for<T>(shifted) * parameter;
    } else {
      return shifted - parameter;
    }
  }
};

template <class T, class A>
__device__ inline void write_logsumexp(const RowResults<T>& row_results, std::int64_t row, A base,
                                       A sum) {
  const A lse = A(log(sum)) + base;
  row_results.write(row, lse);
  if (row_results.has_parts()) row_results.write_parts(row, lse, true, base, A(log(sum)));
}

template <class T, Function kFunction>
__global__ void __launch_bounds__(kMaxBlockThreads)
    block_shared_kernel(const T* __restrict__ x, T* __restrict__ y, RowResults<T> row_results,
                        Rows rows) {
  using A = Accumulator<T>;
  constexpr int kPack = kWidestPack<T>;
  unsigned char* const memory = shared_array<unsigned char>();
  A* const scratch = reinterpret_cast<BlockScratch<A>*>(memory)->warps;
  T* const cache = reinterpret_cast<T*>(memory + sizeof(BlockScratch<A>));
  const int threads = blockDim.x;

  for (std::int64_t row = blockIdx.x; row < rows.count; row += gridDim.x) {
    const std::int64_t begin = rows.begin(row);
    const T* const source = x + begin;
    T* const target = y + begin;
    T* const cached = cache + reinterpret_cast<std::uintptr_t>(source) % 16 / sizeof(T);

    A largest = -infinity<A>();
    visit_columns<kPack>(rows, source, threadIdx.x, threads, [&](std::int64_t column, auto width) {
      constexpr int kWidth = width;
      A value[kWidth];
      load<kWidth>(source + column * rows.inner, value);
      store_any<kWidth>(value, cached + column);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) largest = fmax(largest, value[i]);
    });
    const A base = shift<kFunction>(block_reduce(largest, -infinity<A>(), Largest{}, scratch));

    CompensatedSum<A> partial;
    visit_columns<kPack>(rows, source, threadIdx.x, threads, [&](std::int64_t column, auto width) {
      constexpr int kWidth = width;
      A pack_sum = 0;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        pack_sum += exponential_for<T>(widen(cached[column + i]) - base);
      }
      partial.add(pack_sum);
    });
    const A sum = block_reduce(partial.value(), A(0), Add{}, scratch);

    if constexpr (kFunction == Function::kLogSumExp) {
      if (threadIdx.x == 0) write_logsumexp(row_results, row, base, sum);
    } else {
      const Finish<kFunction, T> finish(sum);
      visit_columns<kPack>(rows, source, threadIdx.x, threads,
                           [&](std::int64_t column, auto width) {
                             constexpr int kWidth = width;
                             A value[kWidth];
#pragma unroll
                             for (int i = 0; i < kWidth; ++i) {
                               value[i] = finish(widen(cached[column + i]) - base);
                             }
                             store_any<kWidth>(value, target + column * rows.inner);
                           });
    }
    // The packs of the next row may begin elsewhere in the cache, where other threads still read.
    __syncthreads();
  }
}

// A maximum and the sum of exponentials relative to it, for part of a row. A part whose elements
// are all -inf has maximum -inf and sum 0: it must contribute nothing to a row with other elements,
// so only 0 is ever subtracted from -inf.
template <Function kFunction, class T>
struct RunningSum {
  using A = Accumulator<T>;
  A largest = -infinity<A>();
  CompensatedSum<A> sum;

  __device__ static A base(A largest) {
    return largest == -infinity<A>() ? A(0) : shift<kFunction>(largest);
  }

  // exp(-inf) is 0, so the sum of a part without elements is rescaled to 0.
  __device__ void raise(A to) {
    const A factor = exponential(largest - base(to));
    sum.sum *= factor;
    sum.error *= factor;
    largest = to;
  }

  template <int kSize>
  __device__ void add(const A (&value)[kSize]) {
    A pack_largest = value[0];
#pragma unroll
    for (int i = 1; i < kSize; ++i) pack_largest = fmax(pack_largest, value[i]);
    if (pack_largest > largest) raise(pack_largest);
    A pack_sum = 0;
#pragma unroll
    for (int i = 0; i < kSize; ++i) pack_sum += exponential_for<T>(value[i] - base(largest));
    sum.add(pack_sum);
  }
};

template <class T, Function kFunction>
__global__ void __launch_bounds__(kMaxBlockThreads)
    block_uncached_kernel(const T* __restrict__ x, T* __restrict__ y, RowResults<T> row_results,
                          Rows rows) {
  using A = Accumulator<T>;
  using Running = RunningSum<kFunction, T>;
  constexpr int kPack = kWidestPack<T>;
  auto& scratch = shared<BlockScratch<A>>();
  const int threads = blockDim.x;

  for (std::int64_t row = blockIdx.x; row < rows.count; row += gridDim.x) {
    const std::int64_t begin = rows.begin(row);
    const T* const source = x + begin;
    T* const target = y + begin;

    Running running;
    visit_columns<kPack>(rows, source, threadIdx.x, threads, [&](std::int64_t column, auto width) {
      constexpr int kWidth = width;
      A value[kWidth];
      load<kWidth>(source + column * rows.inner, value);
      running.add(value);
    });
    const A largest = block_reduce(running.largest, -infinity<A>(), Largest{}, scratch.warps);
    running.raise(largest);
    const A sum = block_reduce(running.sum.value(), A(0), Add{}, scratch.warps);
    const A base = shift<kFunction>(largest);

    if constexpr (kFunction == Function::kLogSumExp) {
      if (threadIdx.x == 0) write_logsumexp(row_results, row, base, sum);
    } else {
      const Finish<kFunction, T> finish(sum);
      visit_columns<kPack>(rows, source, threadIdx.x, threads,
                           [&](std::int64_t column, auto width) {
                             constexpr int kWidth = width;
                             A value[kWidth];
                             load<kWidth>(source + column * rows.inner, value);
#pragma unroll
                             for (int i = 0; i < kWidth; ++i) value[i] = finish(value[i] - base);
                             store_any<kWidth>(value, target + column * rows.inner);
                           });
    }
  }
}

// The most threads per block with as many resident blocks as for 128 threads: with fewer blocks, a
// multiprocessor is idle while one waits at a barrier. Occupancy depends on the compiled kernel.
template <class Kernel>
unsigned block_shared_threads(const Device& device, Kernel kernel, std::size_t shared_bytes) {
  const int most = resident_blocks(device, kernel, 128, shared_bytes);
  int threads = kMaxBlockThreads;
  while (threads > 128 && resident_blocks(device, kernel, threads, shared_bytes) < most) {
    threads /= 2;
  }
  return static_cast<unsigned>(threads);
}

template <class T>
void launch_block_shared(const Call& call) {
  const Buffers& buffers = call.buffers;
  dispatch_value<Function::kSoftmax, Function::kLogSoftmax, Function::kLogSumExp>(
      call.problem.function, [&](auto function) {
        constexpr auto kKernel = block_shared_kernel<T, function>;
        LaunchShape shape = launch_shape(call, block_shared_bytes<T>(call.problem.columns));
        shape.block = block_shared_threads(*call.queue.device, kKernel, shape.shared_bytes);
        launch_kernel<kKernel>(call.queue, shape, static_cast<const T*>(buffers.x),
                               static_cast<T*>(buffers.y), make_row_results<T>(buffers.logsumexps),
                               rows_of(call.problem));
      });
}

template <class T>
void launch_block_uncached(const Call& call) {
  const Buffers& buffers = call.buffers;
  dispatch_value<Function::kSoftmax, Function::kLogSoftmax, Function::kLogSumExp>(
      call.problem.function, [&](auto function) {
        launch_kernel<block_uncached_kernel<T, function>>(
            call.queue, launch_shape(call, sizeof(BlockScratch<Accumulator<T>>)),
            static_cast<const T*>(buffers.x), static_cast<T*>(buffers.y),
            make_row_results<T>(buffers.logsumexps), rows_of(call.problem));
      });
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
