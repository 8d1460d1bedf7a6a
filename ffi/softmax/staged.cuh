// softmax, algorithm `staged`: short rows of any length, copied many at a time.
//
// A row of 33 elements begins and ends inside packs that it shares with its neighbours. So a block
// takes a tile of `tile_rows` whole rows, which together begin and end at pack boundaries, and
// copies it to shared memory as one contiguous range. Groups of kLanes lanes then each process a
// row of the tile, kPer elements per lane, and overwrite it with the results:
//
//     global      | r0 r0 r0 r0 | r0 r1 r1 r1 | r1 r1 r2 r2 | ...      packs of 16 bytes
//     shared      r0[0 .. n)   r1[0 .. n)   r2[0 .. n)  ...            group 0, group 1, group 2
//     ...
#pragma once

#include "core/ptx/bulk_copy.cuh"
#include "core/shared.h"
#include "softmax/fragment.cuh"
#include "softmax/launcher.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// Copies `count` elements with all threads of the block, one by one if a pointer is unaligned.
template <class T>
__device__ inline void move(const T* __restrict__ from, T* __restrict__ to, int count) {
  constexpr int kPack = kWidestPack<T>;
  constexpr int kBatch = 4;  // loads in flight before the first store
  int moved = 0;
  if (is_aligned<kPack>(from) && is_aligned<kPack>(to)) {
    const int packs = count / kPack;
    for (int p = threadIdx.x; p < packs; p += kBatch * kStagedThreads) {
      RegisterPack<T, kPack> batch[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int at = p + b * kStagedThreads;
        if (at < packs) batch[b] = read_pack<kPack>(from + at * kPack);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int at = p + b * kStagedThreads;
        if (at < packs) write_pack(batch[b], to + at * kPack);
      }
    }
    moved = packs * kPack;
  }
  for (int i = moved + threadIdx.x; i < count; i += kStagedThreads) to[i] = from[i];
}

// Whether bulk copies can move a tile: whole packs at multiples of 16 bytes.
template <class T>
__device__ inline bool moves_in_bulk([[maybe_unused]] const T* global, [[maybe_unused]] int count) {
#if JAX_GPUOPS_HAS_CLUSTERS
  return is_aligned<kWidestPack<T>>(global) && count % kWidestPack<T> == 0;
#else
  return false;
#endif
}

struct alignas(kSharedAlignment) StagedStorage {
  Mbarrier copied;
};
static_assert(sizeof(StagedStorage) <= kStagedOwnBytes);

template <class T, class Functions, int kLanes, int kPer, int kSure>
__global__ void __launch_bounds__(kStagedThreads)
    staged_kernel(const __grid_constant__ KernelArgs<T> args, int tile_rows) {
  using A = Accumulator<T>;
  constexpr bool kTangent = Functions::kIsLinearInT;
  constexpr int kGroups = kStagedThreads / kLanes;
  const Exponents<T> exponents(args.function, args.scale);
  const int lane = threadIdx.x % kLanes;
  const int columns = static_cast<int>(args.rows.columns);
  auto& storage = shared<StagedStorage>();
  T* const tile = reinterpret_cast<T*>(&storage + 1);
  T* const second = tile + tile_rows * columns;
  unsigned phase = 0;
  if (threadIdx.x == 0) initialise(&storage.copied);
  __syncthreads();

  for (std::int64_t first = std::int64_t{blockIdx.x} * tile_rows; first < args.rows.count;
       first += std::int64_t{gridDim.x} * tile_rows) {
    const std::int64_t left = args.rows.count - first;
    const int rows = left < tile_rows ? static_cast<int>(left) : tile_rows;
    const std::int64_t begin = first * columns;
    const bool in_bulk = args.packed && moves_in_bulk(args.x + begin, rows * columns);
    if (in_bulk) {
      const auto bytes = static_cast<unsigned>(rows * columns * sizeof(T));
      if (threadIdx.x == 0) {
        announce(&storage.copied, kTangent ? 2 * bytes : bytes);
        copy_bulk(tile, args.x + begin, bytes, &storage.copied);
        if constexpr (kTangent) copy_bulk(second, args.t + begin, bytes, &storage.copied);
      }
      wait(&storage.copied, phase);
      phase ^= 1;
    } else {
      move(args.x + begin, tile, rows * columns);
      if constexpr (kTangent) move(args.t + begin, second, rows * columns);
      __syncthreads();
    }

    // The loop bounds are uniform in the block, so that all lanes reach every shuffle.
    for (int r = 0; r < rows; r += kGroups) {
      const int number = r + threadIdx.x / kLanes;
      const bool has_row = number < rows;
      T* const row = tile + number * columns;
      const auto has = [&](int e) { return has_row && (e < kSure || e * kLanes + lane < columns); };
      const auto put = [&](auto&& result) {
#pragma unroll
        for (int e = 0; e < kPer; ++e) {
          if (has(e)) row[e * kLanes + lane] = narrow<T>(result(e));
        }
      };

      A x[kPer];
      const A fill = ForwardFunctions::fill(args);
#pragma unroll
      for (int e = 0; e < kPer; ++e) {
        x[e] = has(e) ? widen(row[e * kLanes + lane]) : kTangent ? A(0) : fill;
      }
      if constexpr (kTangent) {
        const T* const t_row = second + (row - tile);
        const bool logarithm = Functions::is_logarithm(args.function);
        A t[kPer];
        A sum = 0;
#pragma unroll
        for (int e = 0; e < kPer; ++e) {
          t[e] = has(e) ? widen(t_row[e * kLanes + lane]) : A(0);
          // TangentFunctions::term(), as one expression for both functions.
          sum += (logarithm ? A(1) : x[e]) * t[e];
        }
        const A total = group_reduce<kLanes>(sum, Add{});
        // Not by dispatch(): `logarithm` already tells the two apart.
        if (logarithm) {
          const LogSoftmaxCotangent<T> result{args.scale, total};
          put([&](int e) { return result(x[e], t[e]); });
        } else {
          const SoftmaxTangent<T> result{args.scale, total};
          put([&](int e) { return result(x[e], t[e]); });
        }
      } else {
        A largest = -infinity<A>();
#pragma unroll
        for (int e = 0; e < kPer; ++e) largest = fmax(largest, exponents.scaled(x[e]));
        largest = group_reduce<kLanes>(largest, Largest{});
        const A anchor = exponents.anchor(largest);
        const auto powers = exponents.powers_of_part(anchor);
        const bool replace = args.function == Function::kSoftmax;
        A sum = 0;
#pragma unroll
        for (int e = 0; e < kPer; ++e) {
          const A power = powers(x[e]);
          if (replace) x[e] = power;
          sum += power;
        }
        const MaxSum<T> total{anchor, group_reduce<kLanes>(sum, Add{})};
        if (replace) {
          // A row whose elements are all -inf has the result NaN.
          const A factor = reciprocal(total.sum);
          put([&](int e) { return x[e] * factor; });
        } else if (args.y != nullptr) {
          const LogSoftmax<T> logarithm(total, exponents.powers_of_row(anchor));
          put([&](int e) { return logarithm(x[e]); });
        }
        if (has_row && lane == 0) write_row(args, first + number, total);
      }
    }

    if (args.y == nullptr) {
      __syncthreads();  // the next tile overwrites what this one reads
    } else if (in_bulk) {
      finish_writes_before_copies();
      __syncthreads();
      if (threadIdx.x == 0) {
        write_bulk(args.y + begin, tile, static_cast<unsigned>(rows * columns * sizeof(T)));
        wait_until_read();  // the next tile overwrites it
      }
      __syncthreads();
    } else {
      __syncthreads();
      move(static_cast<const T*>(tile), args.y + begin, rows * columns);
      __syncthreads();
    }
  }
}

template <class Functions, class T>
void launch_staged(const Call& call) {
  const Config& config = call.config;
  const auto planned = [&](const StagedInstance& each) {
    return each.lanes == config.lanes && each.per_lane == config.packs;
  };
  dispatch_instance<kStagedInstances>(planned, [&](auto index) {
    constexpr StagedInstance kInstance = kStagedInstances[index];
    launch_kernel<staged_kernel<T, Functions, kInstance.lanes, kInstance.per_lane, kInstance.sure>>(
        call.queue, launch_shape(call, sizeof(StagedStorage)), kernel_args<T>(call),
        static_cast<int>(config.rows));
  });
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
