// bf16_x6 and fp16_x3: float32 products at full accuracy, by six products of bfloat16 parts, or
// three of float16 ones, on Hopper's tensor cores.
//
// Factors are split into parts (split_parts.cuh): three of eight bits each, x = x0 + x1 + x2, which
// hold a float, or two of eleven bits, which hold nearly all of it. Of the nine products of three
// parts, six matter in a float; of the four products of two parts, three do. The others are at most
// 2^-23 and 2^-22 of |x y|:
//
//     x y = x2 y0 + x0 y2 + x1 y1     2^-16
//         + x1 y0 + x0 y1             2^-8        x y = x1 y0 + x0 y1     2^-11
//         + x0 y0                     1               + x0 y0             1
//
// Tensor cores truncate their sums toward zero, and over a long depth that adds up to far more than
// the rounding of floats. So they add only 64 elements of k (32 of x0 y0), the small products
// first, into separate sums, which are then added to the actual sums by float additions.
//
// Blocks, tiles, ring and roles are those of the persistent kernel, except that a stage holds one
// part of a slice of both factors. A stage is released as soon as its part is not needed any more;
// with three parts:
//
//     part         2            1            0
//     stage        0            1            2            3    ...
//     products     2 0, 0 2     1 1, 1 0, 0 1   0 0, 0 0
//     released        ^ 0                    ^ 1       ^ 2
//
// With two parts it is the same without part 2 and product 1 1. The two consumers take turns: while
// one adds its sums, the other's products keep the tensor cores busy.
//
// Float16 takes half of the time, but does not suit all data (split_parts.cuh). fp16_x3 launches
// the kernel for float16 and then the one for bfloat16, which does the work if the first has not.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/cuda.h"
#include "core/ptx/cluster.cuh"
#include "core/ptx/mbarrier.cuh"
#include "core/ptx/tensor_copy.cuh"
#include "core/ptx/warpgroup.cuh"
#include "core/ptx/wgmma.cuh"
#include "core/shared.h"
#include "matmul/hopper/float_result.cuh"
#include "matmul/hopper/split_parts.cuh"
#include "matmul/hopper/stages.cuh"
#include "matmul/hopper/tile_order.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

template <class Parts_, bool kDeepA_, bool kDeepB_, int kClusterRows_>
struct PartProducts {
  using Parts = Parts_;
  using Factor = typename Parts::Part;
  // Whether k is the contiguous dimension of a (stored m x k) and of b (stored n x k).
  static constexpr bool kDeepA = kDeepA_;
  static constexpr bool kDeepB = kDeepB_;
  // The tile of a block.
  static constexpr int kRows = kPartsTile;
  static constexpr int kCols = kPartsTile;
  static constexpr int kConsumers = 2;
  static constexpr int kStages = kPartsStages;
  // Blocks of a cluster are neighbours along m, and copy halves of b for each other.
  static constexpr int kClusterRows = kClusterRows_;
  static constexpr int kResultCols = kCols;

  static constexpr int kWaves = 1;
  static constexpr int kSums = kCols / 2;
  static constexpr int kBlocks = kClusterRows;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroupThreads;
  static constexpr int kABytes = kRows * kLineBytes;
  static constexpr int kBBytes = kCols * kLineBytes;
  static constexpr int kEmptyArrivals = kConsumers * 4 * kClusterRows;

  // As of the persistent kernel.
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;

  static_assert(kRows == kConsumers * kProductRows, "a consumer has one wgmma's rows");
  static_assert(kStages > Parts::kParts, "the next slice is copied while this one is multiplied");
  static_assert(kClusterRows == 1 || kClusterRows == 2);
};

// What the launches of a product tell each other. All 0 at first.
struct PartsReport {
  std::uint32_t span_a;  // of any row, if above kFreeSpan
  std::uint32_t span_b;
  std::int32_t refused;   // 1: bf16_x6 has left the product to the next kernel
  std::int32_t done;      // 1: fp16_x3 computes the product, and bf16_x6 has nothing to do
  std::uint32_t small_a;  // of any row, if above free_small()
  std::uint32_t small_b;
};
static_assert(sizeof(PartsReport) <= kPartsReportBytes);

// Whether parts and sums can hold the scaled factors.
template <class Parts>
__device__ __forceinline__ bool fits(const PartsReport& report,
                                     [[maybe_unused]] std::int64_t depth) {
  if constexpr (kCountsSpan<Parts>) {
    const auto span = [](std::uint32_t reported) {
      return reported > kFreeSpan ? static_cast<int>(reported) : kFreeSpan;
    };
    const int a = span(report.span_a);
    const int b = span(report.span_b);
    return a <= kMostSpan && b <= kMostSpan && a + b <= kMostSpans;
  } else {
    const std::int64_t a = std::max(std::int64_t{report.small_a}, free_small(depth));
    const std::int64_t b = std::max(std::int64_t{report.small_b}, free_small(depth));
    return a + b <= most_small(depth);
  }
}

// The result, and the exponents that scale the sums back.
struct PartsResult : FloatResult {
  const std::int32_t* exponents_a;
  const std::int32_t* exponents_b;
};

// ---- The producer ----

template <class Config>
__device__ __forceinline__ void produce_parts(RingStorage<Config>& storage, const FactorMaps& a,
                                              const FactorMaps& b, const TileOrder& order, int rank,
                                              int matrices_a, int matrices_b) {
  constexpr auto kAll = static_cast<std::uint16_t>((1u << Config::kBlocks) - 1);
  RingPlace<Config> ring;
  for (unsigned tile = blockIdx.x / Config::kBlocks; tile < order.tiles;
       tile += gridDim.x / Config::kBlocks) {
    const TilePosition at = locate<Config>(order, tile, rank);
    const int bytes = slice_bytes<Config::kDeepA, Config::kRows>(a, at.row) +
                      slice_bytes<Config::kDeepB, Config::kCols>(b, at.col);
    for (int step = 0; step < order.steps; ++step) {
      const int k = step * kStageDepth<typename Config::Factor>;
      // In the order in which the parts are released.
      for (int part = Config::Parts::kParts - 1; part >= 0; --part) {
        wait(&storage.empty[ring.stage], ring.phase ^ 1);
        Mbarrier* const full = &storage.full[ring.stage];
        // Bytes from the other block may come first; the phase cannot complete before this arrival.
        announce(full, bytes);
        copy_slice<Config::kDeepA, Config::kRows, 1>(
            storage.a[ring.stage], a, at.row, k,
            part * matrices_a + at.matrix * order.a_batch_stride, full, 0, kAll);
        copy_slice<Config::kDeepB, Config::kCols, Config::kClusterRows>(
            storage.b[ring.stage], b, at.col, k,
            part * matrices_b + at.matrix * order.b_batch_stride, full, rank, kAll);
        ring.advance();
      }
    }
  }
  drain(storage, ring);
}

// ---- Results ----

// Writes a consumer's sums, from row `first_row` of the result on. See multiply_add() for which of
// them a thread holds: the four lanes of a row write 32 bytes at a time.
template <class Config>
__device__ __forceinline__ void write_sums(const float (&sums)[Config::kSums],
                                           const PartsResult& result, const TileOrder& order,
                                           const TilePosition& at, int first_row) {
  constexpr int kPairs = Config::kCols / 8;
  const int thread = threadIdx.x % kWarpgroupThreads;
  const std::int64_t matrix = at.matrix;
  const int row = first_row + thread / 32 * 16 + thread % 32 / 4;
  const int first_col = at.col + thread % 4 * 2;

  // -- All exponents first, so that their loads are in flight together --
  const std::int32_t* const of_rows =
      result.exponents_a + matrix * order.a_batch_stride * result.rows;
  const std::int32_t* const of_cols =
      result.exponents_b + matrix * order.b_batch_stride * result.cols;
  int row_exponent[2];
  int col_exponent[2 * kPairs];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + half * 8;
    row_exponent[half] = (r < result.rows ? of_rows[r] : 0) - 2 * Config::Parts::kScaledExponent;
  }
#pragma unroll
  for (int i = 0; i < 2 * kPairs; ++i) {
    const int col = first_col + i / 2 * 8 + i % 2;
    col_exponent[i] = col < result.cols ? of_cols[col] : 0;
  }

  // -- Scale back and store, half of the rows at a time --
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + half * 8;
    const std::int64_t line = (matrix * result.rows + r) * result.cols;
    const auto is_within = [&](int i) {
      return r < result.rows && first_col + i / 2 * 8 + i % 2 < result.cols;
    };
    float added[2 * kPairs] = {};
    if (result.c != nullptr) {
#pragma unroll
      for (int i = 0; i < 2 * kPairs; ++i) {
        if (is_within(i)) added[i] = result.c[line + first_col + i / 2 * 8 + i % 2];
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * kPairs; i += 2) {
      const auto value = [&](int e) {
        // Exponents go down to -390, where sums are as large as 2^124: the first product is exact
        // unless the result is 0.
        const int exponent = row_exponent[half] + col_exponent[i + e];
        const int before = std::min(std::max(exponent + 252, -126), 0);
        const float sum = scale_by_power(sums[2 * i + 2 * half + e] * normal_power(before),
                                         std::max(exponent, -252));
        // Without c nothing is added, so that -0 stays -0.
        return result.c == nullptr ? result.alpha * sum
                                   : result.alpha * sum + result.beta * added[i + e];
      };
      float* const to = result.data + line + first_col + i / 2 * 8;
      const float2 pair = make_float2(value(0), value(1));
      if (result.packed) {
        if (is_within(i)) *reinterpret_cast<float2*>(to) = pair;
      } else {
        if (is_within(i)) to[0] = pair.x;
        if (is_within(i + 1)) to[1] = pair.y;
      }
    }
  }
}

// ---- A consumer ----

// Issues the wgmmas that add the products of two parts of a slice, steps kFirst to kLast of its
// depth, to the sums, as multiply_stage() does.
template <class Config, int kFirst, int kLast>
__device__ __forceinline__ void multiply_parts(float (&sums)[Config::kSums], std::uint64_t a,
                                               std::uint64_t b, bool add) {
  constexpr bool kDeepA = Config::kDeepA;
  constexpr bool kDeepB = Config::kDeepB;
  begin_products();
#pragma unroll
  for (int k = kFirst; k < kLast; ++k) {
    multiply_add<typename Config::Factor, kDeepA, kDeepB>(
        sums, a + k * kDepthStepBytes<kDeepA> / 16, b + k * kDepthStepBytes<kDeepB> / 16,
        add || k > kFirst);
  }
  end_products();
}

template <class Config>
__device__ __forceinline__ void consume_parts(RingStorage<Config>& storage,
                                              const PartsResult& result, const TileOrder& order,
                                              int rank, int consumer) {
  // The named barriers at which a consumer waits for its turn.
  constexpr int kTurn = 1;
  constexpr int kTurnThreads = 2 * kWarpgroupThreads;
  const int own_turn = kTurn + consumer;
  const int next_turn = kTurn + 1 - consumer;

  constexpr int kSteps = kLineBytes / kProductBytes;
  constexpr int kParts = Config::Parts::kParts;

  float sums[Config::kSums];
  float recent[Config::kSums];  // of a slice, except those of `second`:
  float second[Config::kSums];  // x0 y0 of the slice's second half
  RingPlace<Config> ring;
  const std::uint64_t a_first =
      matrix_descriptor<Config::kDeepA>(storage.a[0] + consumer * kPanelBytes);
  const std::uint64_t b_first = matrix_descriptor<Config::kDeepB>(storage.b[0]);

  const auto release = stage_release<Config>(storage, rank);
  const auto parts_a = [&](int stage) { return a_first + stage * (Config::kABytes / 16); };
  const auto parts_b = [&](int stage) { return b_first + stage * (Config::kBBytes / 16); };
  const auto multiply = [&](int stage_a, int stage_b, bool add) {
    multiply_parts<Config, 0, kSteps>(recent, parts_a(stage_a), parts_b(stage_b), add);
  };

  if (consumer == 1) pass(next_turn, kTurnThreads);
  for (unsigned tile = blockIdx.x / Config::kBlocks; tile < order.tiles;
       tile += gridDim.x / Config::kBlocks) {
#pragma unroll
    for (int i = 0; i < Config::kSums; ++i) sums[i] = 0;
#pragma unroll 1
    for (int step = 0; step < order.steps; ++step) {
      // -- Wait for the parts of a slice, and for the turn --
      int stage[kParts];
#pragma unroll
      for (int part = kParts - 1; part >= 0; --part) {
        stage[part] = ring.stage;
        wait(&storage.full[ring.stage], ring.phase);
        ring.advance();
      }
      meet(own_turn, kTurnThreads);

      // -- Multiply: seven or four groups of wgmmas, the small products first --
      if constexpr (kParts == 3) {
        multiply(stage[2], stage[0], false);
        multiply(stage[0], stage[2], true);
        multiply(stage[1], stage[1], true);
      }
      multiply(stage[1], stage[0], kParts == 3);
      multiply(stage[0], stage[1], true);
      multiply_parts<Config, 0, kSteps / 2>(recent, parts_a(stage[0]), parts_b(stage[0]), true);
      multiply_parts<Config, kSteps / 2, kSteps>(second, parts_a(stage[0]), parts_b(stage[0]),
                                                 false);

      // -- Release each stage when the last group that reads it is complete; pass the turn on while
      // the last groups are in flight --
      if constexpr (kParts == 3) {
        wait_for_products<5>();
        release(stage[2]);
      }
      wait_for_products<2>();
      pass(next_turn, kTurnThreads);
      release(stage[1]);
      wait_for_products<0>();
      release(stage[0]);

      // -- Add, rounding to nearest --
      hold(recent);
      hold(second);
#pragma unroll
      for (int i = 0; i < Config::kSums; ++i) sums[i] += recent[i] + second[i];
    }
    const TilePosition at = locate<Config>(order, tile, rank);
    write_sums<Config>(sums, result, order, at, at.row + consumer * kProductRows);
  }
  // Matches the last turn that the second consumer has passed on.
  if (consumer == 0) meet(own_turn, kTurnThreads);
}

// ---- The kernel ----

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    part_products_kernel(const __grid_constant__ FactorMaps a, const __grid_constant__ FactorMaps b,
                         const __grid_constant__ PartsResult result, const TileOrder order,
                         const int matrices_a, const int matrices_b, PartsReport* const report,
                         const std::int64_t depth) {
#if JAX_GPUOPS_HAS_WGMMA
  // -- Which kernel does the work: each tells the next one --
  using Parts = typename Config::Parts;
  const bool reports = blockIdx.x == 0 && threadIdx.x == 0;
  const bool does_fit = fits<Parts>(*report, depth);
  if constexpr (kCountsSpan<Parts>) {
    if (report->done != 0) return;
    if (!does_fit && reports) report->refused = 1;
  } else {
    if (does_fit && reports) report->done = 1;
  }
  if (!does_fit) return;
  unsigned char* const memory = shared_array<unsigned char>();
  const unsigned past_atom = shared_address(memory) % kAtomBytes;
  auto& storage =
      *reinterpret_cast<RingStorage<Config>*>(memory + (kAtomBytes - past_atom) % kAtomBytes);
  // The shuffle tells the compiler that the value is the same for all threads of a warp.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroupThreads, 0);
  const int rank = Config::kBlocks > 1 ? cluster_rank() : 0;

  // -- Set up --
  if (threadIdx.x == 0) {
    prefetch_tensor_map(a.within);
    prefetch_tensor_map(b.within);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      initialise(&storage.full[stage]);
      initialise(&storage.empty[stage], Config::kEmptyArrivals);
    }
  }
  __syncthreads();
  if constexpr (Config::kBlocks > 1) {
    cluster_arrive();
    cluster_wait();
  }

  // -- Roles: one thread of warpgroup 0 is the producer; the other warpgroups are consumers --
  if (warpgroup == 0) {
    give_up_registers<Config::kProducerRegisters>();
    if (threadIdx.x == 0) {
      produce_parts(storage, a, b, order, rank, matrices_a, matrices_b);
    }
  } else {
    take_registers<Config::kConsumerRegisters>();
    consume_parts(storage, result, order, rank, warpgroup - 1);
  }
#else
  __trap();
#endif
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
