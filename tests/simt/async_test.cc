// Tests of features of Hopper in the host executor: clusters, mbarriers, asynchronous copies,
// blocks that wait for each other; and that each kind of fault in their use is detected.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "core/cuda.h"
#include "core/ptx/async_copy.cuh"
#include "core/ptx/bulk_copy.cuh"
#include "core/ptx/cluster.cuh"
#include "core/ptx/mbarrier.cuh"
#include "core/ptx/tagged_words.cuh"
#include "core/ptx/words.cuh"
#include "core/shared.h"
#include "reduce/slots.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace {

// With seeds 0, 3 ... copies complete late, with 1, 4 ... early, with others at any time.
constexpr std::uint64_t kSeeds = 18;

simt::Configuration clusters(unsigned blocks, unsigned threads, std::size_t shared_bytes,
                             unsigned cluster) {
  return {blocks, threads, shared_bytes, cluster};
}

simt::Configuration together(unsigned blocks, unsigned threads, std::size_t shared_bytes) {
  return {blocks, threads, shared_bytes, 1, true};
}

// Aligned to 16 bytes, as bulk copies require.
std::vector<float4> numbers(int count) {
  std::vector<float4> result(static_cast<std::size_t>(count) / 4);
  auto* const x = reinterpret_cast<float*>(result.data());
  std::iota(x, x + count, 1.0f);
  return result;
}

void test_configuration() {
  const auto nothing = [] {};
  CHECK(error_of(clusters(32, 1, 0, 16), nothing).empty());
  for (const unsigned cluster : {0, 3, 17, 32}) {
    check_contains(error_of(clusters(32, 1, 0, cluster), nothing),
                   {"invalid configuration argument", "clusters of " + std::to_string(cluster)});
  }
  CHECK(error_of(together(8, 1024, 1024), nothing).empty());
  check_contains(error_of(together(9, 1024, 1024), nothing),
                 {"a cooperative launch of 9 blocks", "4 multiprocessors hold 8 at a time"});
  check_contains(error_of(together(5, 32, 120 * 1024), nothing), {"hold 4 at a time"});
}

// ---- Clusters ----

struct Exchanged {
  std::uint64_t slots[4];
  float small[4];
  Mbarrier arrived;
};

// Each block of a cluster sends its number to all, twice.
void exchange(std::vector<std::uint64_t>& sums) {
  auto& storage = shared<Exchanged>();
  const int thread = threadIdx.x;
  if (thread == 0) initialise(&storage.arrived);
  __syncthreads();
  cluster_arrive();
  CHECK(cluster_rank() == static_cast<int>(blockIdx.x % 4));
  cluster_wait();
  for (unsigned phase = 0; phase < 2; ++phase) {
    if (thread == 0) announce(&storage.arrived, 4 * (8 + 4));
    if (thread < 4) {
      const int rank = cluster_rank();
      send(std::uint64_t{blockIdx.x + 100 * phase}, storage.slots + rank, &storage.arrived, thread);
      send(static_cast<float>(blockIdx.x), storage.small + rank, &storage.arrived, thread);
    }
    wait(&storage.arrived, phase);
    std::uint64_t sum = 0;
    for (int i = 0; i < 4; ++i)
      sum += storage.slots[i] + static_cast<std::uint64_t>(storage.small[i]);
    if (thread == 37) sums[2 * blockIdx.x + phase] = sum;
    // All blocks have read their slots before the next values arrive.
    cluster_arrive();
    cluster_wait();
  }
}

void test_clusters() {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Seed seeded(seed);
    std::vector<std::uint64_t> sums(2 * 12);
    simt::launch(clusters(12, 64, sizeof(Exchanged), 4), [&] { exchange(sums); });
    for (std::uint64_t block = 0; block < 12; ++block) {
      const std::uint64_t sum = 4 * (block / 4 * 4) + 6;
      CHECK(sums[2 * block] == 2 * sum);
      CHECK(sums[2 * block + 1] == 2 * sum + 400);
    }
  }
}

// All threads of a cluster arrive at its barrier before any of them continues; it does not wait for
// warps that have exited as a whole.
void test_cluster_barriers() {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Seed seeded(seed);
    int arrived[2] = {};
    simt::launch(clusters(4, 64, 0, 2), [&] {
      if (threadIdx.x >= 32 && blockIdx.x % 2 == 1) return;
      int& count = arrived[blockIdx.x / 2];
      for (int round = 1; round < 5; ++round) {
        ++count;
        cluster_arrive();
        cluster_wait();
        CHECK(count >= 96 * round);
      }
    });
  }
}

// ---- Copies ----

struct Staged {
  alignas(128) float tile[2][64];
  Mbarrier copied[2];
};

// Adds 1 to all elements, tile by tile: one tile is loaded while the previous one is computed.
void add_one(const float* x, float* y, int tiles) {
  auto& storage = shared<Staged>();
  const int thread = threadIdx.x;
  const auto request = [&](int tile) {
    if (tile >= tiles) return;
    announce(storage.copied + tile % 2, 256);
    copy_bulk(storage.tile[tile % 2], x + 64 * tile, 256, storage.copied + tile % 2);
  };
  if (thread == 0) {
    initialise(storage.copied);
    initialise(storage.copied + 1);
    request(0);
  }
  __syncthreads();
  for (int tile = 0; tile < tiles; ++tile) {
    if (thread == 0) {
      wait_until_read();
      request(tile + 1);
    }
    wait(storage.copied + tile % 2, tile / 2 % 2);
    storage.tile[tile % 2][thread] += 1;
    finish_writes_before_copies();
    __syncthreads();
    if (thread == 0) write_bulk(y + 64 * tile, storage.tile[tile % 2], 256);
  }
  if (thread == 0) wait_until_read();
}

void test_copies() {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Seed seeded(seed);
    const std::vector<float4> x = numbers(64 * 7);
    std::vector<float4> y(x.size());
    const auto* const from = reinterpret_cast<const float*>(x.data());
    auto* const to = reinterpret_cast<float*>(y.data());
    simt::launch(1, 64, sizeof(Staged), [&] { add_one(from, to, 7); });
    bool right = true;
    for (int i = 0; i < 64 * 7; ++i) right = right && to[i] == from[i] + 1;
    CHECK(right);
  }
}

// A thread reads the destination of a copy before and after the copy has completed.
void test_reads_before_copies() {
  const std::vector<float4> x = numbers(64);
  const auto* const from = reinterpret_cast<const float*>(x.data());
  float early = 0;
  float late = 0;
  const auto run = [&](std::uint64_t seed) {
    const Seed seeded(seed);
    simt::launch(1, 1, sizeof(Staged), [&] {
      auto& storage = shared<Staged>();
      initialise(storage.copied);
      announce(storage.copied, 256);
      copy_bulk(storage.tile[0], from, 256, storage.copied);
      early = storage.tile[0][3];
      wait(storage.copied, 0);
      late = storage.tile[0][3];
    });
  };
#ifdef JAX_GPUOPS_ASAN
  check_contains(asan_report([&] { run(0); }),
                 {"use-after-poison", "READ of size 4", "async_test.cc",
                  "The access above was made by block (0, 0, 0), thread (0, 0, 0)"});
#else
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    run(seed);
    if (seed % 3 == 0) CHECK(std::isnan(early));
    if (seed % 3 == 1) CHECK(early == 4.0f);
    CHECK(late == 4.0f);
  }
#endif
}

// ---- Blocks that wait for each other ----

void test_blocks_that_wait() {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Seed seeded(seed);
    constexpr int kBlocks = 4;
    std::vector<std::uint64_t> slots(3 * kBlocks);
    std::vector<std::uint32_t> counter(3);
    std::vector<int> sums(kBlocks);
    simt::launch(together(kBlocks, 64, 0), [&] {
      const int thread = threadIdx.x;
      for (std::uint32_t round = 0; round < 3; ++round) {
        std::uint64_t* const own = slots.data() + round * kBlocks;
        if (thread == 40) {
          post(own + blockIdx.x, blockIdx.x + 10 * round, round + 1);
          count_one(&counter[round]);
        }
        if (thread == 0) {
          await_count(&counter[round], kBlocks);
          for (int i = 0; i < kBlocks; ++i) {
            std::uint32_t word = 0;
            while (!look(own + i, round + 1, word)) {
            }
            sums[blockIdx.x] += static_cast<int>(word);
          }
        }
        __syncthreads();
      }
    });
    CHECK(sums == std::vector<int>(kBlocks, 3 * 6 + 30 * kBlocks));
  }
}

// A count does not guarantee that a word posted before it is visible.
void test_relaxed_order() {
  std::set<bool> arrived;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Seed seeded(seed);
    std::uint64_t slot = 0;
    std::uint32_t counter = 0;
    simt::launch(together(2, 1, 0), [&] {
      if (blockIdx.x == 0) {
        post(&slot, 5, 1);
        count_one(&counter);
      } else {
        await_count(&counter, 1);
        std::uint64_t seen;
        simt::relaxed_load(&seen, &slot, sizeof(seen));
        arrived.insert(seen != 0);
      }
    });
    CHECK(slot == (std::uint64_t{1} << 32 | 5));
  }
  CHECK(arrived.size() == 2);
}

// A word arrives together with its tag; an older word with another tag is not mistaken for it.
void test_tagged_words() {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Seed seeded(seed);
    TaggedWord slots[2] = {{1, 7}, {2, 7}};
    std::uint64_t sum = 0;
    simt::launch(together(3, 1, 0), [&] {
      if (blockIdx.x < 2) {
        post(slots + blockIdx.x, {10 * (blockIdx.x + std::uint64_t{1}), 8});
        return;
      }
      for (const TaggedWord& slot : slots) {
        std::uint64_t word;
        while (!look(&slot, 8, word)) {
        }
        sum += word;
      }
    });
    CHECK(sum == 30);
  }
}

// A CUDA graph launches a kernel again with the same tag: partials of the previous launch must not
// be mistaken for those of this one.
void test_slots_of_launches_with_one_tag() {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Seed seeded(seed);
    struct Partial {
      std::uint64_t value[2];
    };
    TaggedWord memory[2 * 2] = {{1, 7}, {2, 7}, {3, 0}, {4, 9}};
    const reduce::Slots slots{memory, 8};
    for (std::uint64_t launch = 1; launch < 4; ++launch) {
      std::uint64_t sum = 0;
      simt::launch(together(3, 1, 0), [&] {
        if (blockIdx.x > 0) {
          return reduce::leave(slots, blockIdx.x - 1, Partial{{launch, 10 * launch}});
        }
        for (int slot = 0; slot < 2; ++slot) {
          const auto partial = reduce::take<Partial>(slots, slot);
          sum += partial.value[0] + partial.value[1];
        }
      });
      CHECK(sum == 22 * launch);
    }
  }
}

// Each warp, and each block, is held back with some seed.
void test_held_back() {
  std::set<unsigned> last_warps;
  std::set<unsigned> last_blocks;
  for (std::uint64_t seed = 1; seed < 100; ++seed) {
    const Seed seeded(seed);
    std::vector<unsigned> order;
    simt::launch(together(3, 96, 0), [&] {
      __syncwarp();
      order.push_back(threadIdx.x / 32 + 10 * blockIdx.x);
      __syncwarp();
      order.push_back(threadIdx.x / 32 + 10 * blockIdx.x);
    });
    const auto only = [&](auto&& part) {
      const std::vector<unsigned> end(order.end() - 64, order.end());
      return std::all_of(end.begin(), end.end(),
                         [&](unsigned w) { return part(w) == part(end[0]); });
    };
    if (only([](unsigned w) { return w % 10; })) last_warps.insert(order.back() % 10);
    if (only([](unsigned w) { return w / 10; })) last_blocks.insert(order.back() / 10);
  }
  CHECK(last_warps.size() == 3);
  CHECK(last_blocks.size() == 3);
}

// ---- Faults ----

struct OneTile {
  alignas(128) float tile[64];
  Mbarrier copied;
};

// Runs `body(storage, x)` in a block of 64 threads, after an mbarrier for one arrival has been
// initialised.
template <class Body>
std::string copy_error(Body&& body) {
  const std::vector<float4> x = numbers(128);
  const auto* const from = reinterpret_cast<const float*>(x.data());
  return error_of(1, 64, sizeof(OneTile), [&] {
    auto& storage = shared<OneTile>();
    if (threadIdx.x == 0) initialise(&storage.copied);
    __syncthreads();
    body(storage, from);
  });
}

void test_wrong_phase() {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Seed seeded(seed);
    check_contains(
        copy_error([](OneTile& storage, const float* x) {
          if (threadIdx.x == 0) {
            announce(&storage.copied, 256);
            copy_bulk(storage.tile, x, 256, &storage.copied);
          }
          for (int turn = 0; turn < 2; ++turn) wait(&storage.copied, turn);
        }),
        {"deadlock, no thread can go on", std::string("and 63 more at wait() at ") + __FILE__,
         "for phase 1 of the mbarrier at byte 256 of shared memory", "1 phases are over",
         "1 of 1 arrivals"});
  }
#ifndef JAX_GPUOPS_ASAN
  // A wait for the previous phase returns at once, which shows if copies complete late.
  float early = 0;
  CHECK(copy_error([&](OneTile& storage, const float* x) {
          if (threadIdx.x == 0) {
            announce(&storage.copied, 256);
            copy_bulk(storage.tile, x, 256, &storage.copied);
          }
          wait(&storage.copied, 1);
          if (threadIdx.x == 0) early = storage.tile[0];
          wait(&storage.copied, 0);
        }).empty());
  CHECK(std::isnan(early));
#endif
}

void test_wrong_bytes() {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Seed seeded(seed);
    check_contains(copy_error([](OneTile& storage, const float* x) {
                     if (threadIdx.x == 0) {
                       announce(&storage.copied, 128);
                       copy_bulk(storage.tile, x, 256, &storage.copied);
                     }
                     wait(&storage.copied, 0);
                   }),
                   {"thread (0, 0, 0)", std::string("copy_bulk() at ") + __FILE__,
                    "too few bytes are expected", "in phase 0", "128 bytes more"});
    check_contains(copy_error([](OneTile& storage, const float* x) {
                     if (threadIdx.x == 0) {
                       announce(&storage.copied, 384);
                       copy_bulk(storage.tile, x, 256, &storage.copied);
                     }
                     wait(&storage.copied, 0);
                   }),
                   {"deadlock", "at wait()", "0 of 1 arrivals and 128 bytes are missing"});
  }
  check_contains(copy_error([](OneTile& storage, const float*) { announce(&storage.copied, 16); }),
                 {"announce()", "all 1 arrivals of phase 0"});
}

void test_unsynchronized_mbarrier() {
  const auto error = [](auto&& between) {
    return error_of(2, 64, sizeof(OneTile), [&] {
      auto& storage = shared<OneTile>();
      if (threadIdx.x == 0) initialise(&storage.copied, 64);
      between();
      arrive(&storage.copied);
    });
  };
  CHECK(error([] { __syncthreads(); }).empty());
  check_contains(error([] {}), {"thread (1, 0, 0): arrive()", "may not be visible yet",
                                "its initialisation by block (0, 0, 0), thread (0, 0, 0)"});
  check_contains(error([] { __syncwarp(); }), {"thread (63, 0, 0)", "may not be visible yet"});
  check_contains(error_of(1, 1, sizeof(OneTile), [] { wait(&shared<OneTile>().copied, 0); }),
                 {"wait()", "is not initialised"});
  check_contains(copy_error([](OneTile& storage, const float*) {
                   if (threadIdx.x == 0) storage.copied = 0;
                   __syncthreads();
                   wait(&storage.copied, 0);
                 }),
                 {"was overwritten"});
  check_contains(copy_error([](OneTile& storage, const float*) { initialise(&storage.copied); }),
                 {"is initialised already"});
}

void test_misaligned_copies() {
  const auto error = [](int to, int from, unsigned bytes) {
    return copy_error([=](OneTile& storage, const float* x) {
      if (threadIdx.x != 0) return;
      announce(&storage.copied, bytes);
      copy_bulk(storage.tile + to, x + from, bytes, &storage.copied);
      wait(&storage.copied, 0);
    });
  };
  CHECK(error(4, 8, 64).empty());
  check_contains(error(1, 0, 64), {"copy_bulk()", "misaligned bulk copy: the destination"});
  check_contains(error(0, 3, 64), {"misaligned bulk copy: the source"});
  check_contains(error(0, 0, 60), {"misaligned bulk copy: the size, 60 bytes"});
  check_contains(error(96, 0, 64), {"64 bytes at", "are not in the block's shared memory"});
}

// The source or destination of a copy is used while the copy is in flight.
void test_buffers_used_too_early() {
  std::vector<float4> y = numbers(64);
  const auto written_too_early = [&](bool waits) {
    return copy_error([&](OneTile& storage, const float*) {
      storage.tile[threadIdx.x] = 1;
      finish_writes_before_copies();
      __syncthreads();
      if (threadIdx.x != 0) return;
      write_bulk(y.data(), storage.tile, 256);
      if (waits) wait_until_read();
      storage.tile[5] = 2;
      wait_until_read();
    });
  };
  CHECK(written_too_early(true).empty());
  check_contains(written_too_early(false),
                 {"write_bulk()", "the source was written to while the copy was under way"});
#ifndef JAX_GPUOPS_ASAN
  check_contains(copy_error([](OneTile& storage, const float* x) {
                   if (threadIdx.x != 0) return;
                   announce(&storage.copied, 256);
                   copy_bulk(storage.tile, x, 256, &storage.copied);
                   storage.tile[7] = 0;
                   wait(&storage.copied, 0);
                 }),
                 {"copy_bulk()", "the destination was written to before the copy landed"});
#endif
  check_contains(copy_error([](OneTile& storage, const float* x) {
                   if (threadIdx.x != 0) return;
                   announce(&storage.copied, 256);
                   copy_bulk(storage.tile, x, 256, &storage.copied);
                 }),
                 {"copy_bulk()", "the block exited while the copy was under way"});
  check_contains(copy_error([&](OneTile& storage, const float*) {
                   storage.tile[threadIdx.x] = 1;
                   __syncthreads();
                   if (threadIdx.x == 0) write_bulk(y.data(), storage.tile, 256);
                 }),
                 {"write_bulk()", "finish_writes_before_copies()"});
}

void test_cluster_faults() {
  const auto run = [](auto&& body) {
    return error_of(clusters(2, 64, sizeof(Exchanged), 2), [&] {
      auto& storage = shared<Exchanged>();
      if (threadIdx.x == 0) initialise(&storage.arrived);
      __syncthreads();
      body(storage);
    });
  };
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Seed seeded(seed);
    // The destination block exits without waiting: before the send, or before it completes.
    check_contains(run([](Exchanged& storage) {
                     cluster_arrive();
                     cluster_wait();
                     if (blockIdx.x == 0 && threadIdx.x == 0) {
                       if (simt::schedule_seed() % 3 == 1) {
                         // Else the copy would complete before the other block can exit.
                         for (int i = 0; i < 9; ++i) __syncwarp(1);
                       }
                       send(std::uint64_t{1}, storage.slots, &storage.arrived, 1);
                     }
                     if (blockIdx.x == 0) __syncthreads();
                   }),
                   simt::schedule_seed() % 3 == 0
                       ? std::vector<std::string>{"send()",
                                                  "a remote access to block (1, 0, 0), "
                                                  "which has exited"}
                       : std::vector<std::string>{});
    // A thread misses a barrier of the cluster: it exits, or waits for something else.
    check_contains(run([](Exchanged&) {
                     if (threadIdx.x == 5 && blockIdx.x == 1) return;
                     cluster_arrive();
                     cluster_wait();
                   }),
                   {"block (1, 0, 0), thread (5, 0, 0)",
                    "exited without arriving at a barrier of "
                    "the cluster"});
    check_contains(run([](Exchanged&) {
                     if (threadIdx.x == 5 && blockIdx.x == 1) __syncthreads();
                     cluster_arrive();
                     cluster_wait();
                   }),
                   {"deadlock", "block (1, 0, 0): ", "thread (5, 0, 0) at __syncthreads()",
                    "at cluster_wait()", "for 1 threads of the cluster that have not arrived"});
  }
  check_contains(run([](Exchanged&) { cluster_wait(); }), {"has not arrived at the cluster's"});
  check_contains(run([](Exchanged&) {
                   cluster_arrive();
                   cluster_arrive();
                 }),
                 {"cluster_arrive()", "has arrived before, and not waited since"});
  check_contains(run([](Exchanged& storage) { send(1.0f, storage.small, &storage.arrived, 1); }),
                 {"send()", "block (1, 0, 0), which may not have started"});
  check_contains(run([](Exchanged& storage) {
                   cluster_arrive();
                   cluster_wait();
                   send(1.0f, storage.small, &storage.arrived, 2);
                 }),
                 {"there is no block 2 in a cluster of 2"});
}

void test_blocks_that_wait_in_vain() {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Seed seeded(seed);
    std::uint32_t counter = 0;
    std::uint64_t slot = 0;
    check_contains(error_of(together(3, 32, 0),
                            [&] {
                              if (threadIdx.x > 0) return;
                              if (blockIdx.x < 2) count_one(&counter);
                              await_count(&counter, blockIdx.x == 2 ? 2 : 3);
                              std::uint32_t word;
                              while (!look(&slot, 1, word)) {
                              }
                            }),
                   {"deadlock", "block (0, 0, 0)", "at await_count()", "block (2, 0, 0)",
                    "at look()", "30 more exited"});
  }
}

// ---- Asynchronous copies by single threads ----

enum class CopyFault { kNone, kNoWait, kNoBarrier, kWritten, kSourceWritten, kNoWaitAtEnd };

// Reverses `tiles` tiles of 64 floats, each copied by 16 threads in pieces of kBytes while the
// previous one is written; elements beyond `count` are 0.
template <int kBytes>
void reverse_tiles(float* x, float* y, int count, int tiles, CopyFault fault = CopyFault::kNone) {
  constexpr int kFloats = kBytes / 4;
  constexpr int kStages = 3;
  float* const ring = shared_array<float>();
  const int thread = threadIdx.x;
  const auto copy = [&](int tile) {
    for (int i = thread * kFloats; tile < tiles && i < 64; i += 16 * kFloats) {
      const int at = 64 * tile + i;
      copy_async<kBytes>(ring + tile % kStages * 64 + i, x + at, at < count);
    }
    end_copy_group();
  };
  copy(0);
  copy(1);
  for (int tile = 0; tile < tiles; ++tile) {
    float* const stage = ring + tile % kStages * 64;
    if (fault == CopyFault::kWritten && thread == 0) stage[0] = 1;
    if (fault == CopyFault::kSourceWritten && thread == 0) x[64 * tile] = -1;
    if (fault != CopyFault::kNoWait) wait_for_copy_groups<1>();
    if (fault != CopyFault::kNoBarrier) __syncthreads();
    if (fault != CopyFault::kNoWaitAtEnd || tile + 2 < tiles) copy(tile + 2);
    if (fault == CopyFault::kNoWaitAtEnd && tile + 2 >= tiles) return;
    for (int i = thread; i < 64; i += 16) y[64 * tile + i] = stage[63 - i];
  }
}

template <int kBytes>
void check_copies_of_threads() {
  constexpr int kTiles = 5;
  constexpr int kCount = 64 * kTiles - 12;
  const auto run = [&](CopyFault fault, std::vector<float4>& y) {
    std::vector<float4> x = numbers(64 * kTiles);
    y.assign(x.size(), {});
    return error_of(1, 16, 3 * 64 * 4, [&] {
      reverse_tiles<kBytes>(reinterpret_cast<float*>(x.data()), reinterpret_cast<float*>(y.data()),
                            kCount, kTiles, fault);
    });
  };
  const auto is_right = [&](const std::vector<float4>& y) {
    const auto* const numbers = reinterpret_cast<const float*>(y.data());
    for (int i = 0; i < 64 * kTiles; ++i) {
      const int from = i / 64 * 64 + 63 - i % 64;
      if (!(numbers[i] == (from < kCount ? static_cast<float>(from + 1) : 0.0f))) return false;
    }
    return true;
  };
  std::vector<float4> y;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Seed seeded(seed);
    CHECK(run(CopyFault::kNone, y).empty());
    CHECK(is_right(y));
    if (seed % 3 == 0) {
      check_contains(run(CopyFault::kSourceWritten, y),
                     {"thread (0, 0, 0): copy_async()", "the source was written to"});
      check_contains(run(CopyFault::kNoWaitAtEnd, y),
                     {"copy_async()", "the thread exited without a wait for the copy"});
    }
  }
#ifdef JAX_GPUOPS_ASAN
  check_contains(asan_report([&] { run(CopyFault::kNoWait, y); }),
                 {"AddressSanitizer", "READ of size 4", "async_test.cc",
                  "The access above was made by block (0, 0, 0), thread ("});
#else
  bool shows_wait = false;
  bool shows_barrier = false;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Seed seeded(seed);
    shows_wait = shows_wait || !run(CopyFault::kNoWait, y).empty() || !is_right(y);
    shows_barrier = shows_barrier || !run(CopyFault::kNoBarrier, y).empty() || !is_right(y);
    if (seed % 3 == 0) {
      check_contains(run(CopyFault::kWritten, y),
                     {"thread (0, 0, 0): copy_async()", "was written to before the copy landed"});
    }
  }
  CHECK(shows_wait);
  CHECK(shows_barrier);
#endif
}

void test_copies_of_threads() {
  check_copies_of_threads<4>();
  check_copies_of_threads<8>();
  check_copies_of_threads<16>();

  std::vector<float4> x = numbers(64);
  const auto* const from = reinterpret_cast<const float*>(x.data());
  const auto copy = [&](auto bytes, int to, int at) {
    return error_of(1, 1, 256, [&] {
      copy_async<decltype(bytes)::value>(shared_array<float>() + to, from + at, true);
      wait_for_copy_groups<0>();
    });
  };
  const std::integral_constant<int, 8> eight;
  const std::integral_constant<int, 16> sixteen;
  check_contains(copy(sixteen, 2, 4),
                 {"copy_async()", "the destination is not at a multiple of 16"});
  check_contains(copy(sixteen, 4, 2), {"copy_async()", "the source is not at a multiple of 16"});
  check_contains(copy(eight, 1, 2), {"the destination is not at a multiple of 8"});
  check_contains(copy(eight, 64, 0), {"copy_async()", "are not in the block's shared memory"});
  // A copy group that has not been committed is not waited for.
  check_contains(copy(eight, 0, 0), {"the thread exited without a wait for the copy"});
}

}  // namespace

void test_async() {
  test_configuration();
  test_clusters();
  test_cluster_barriers();
  test_copies();
  test_copies_of_threads();
  test_reads_before_copies();
  test_blocks_that_wait();
  test_relaxed_order();
  test_tagged_words();
  test_slots_of_launches_with_one_tag();
  test_held_back();
  test_wrong_phase();
  test_wrong_bytes();
  test_unsynchronized_mbarrier();
  test_misaligned_copies();
  test_buffers_used_too_early();
  test_cluster_faults();
  test_blocks_that_wait_in_vain();
}

}  // namespace JAX_GPUOPS_NAMESPACE
