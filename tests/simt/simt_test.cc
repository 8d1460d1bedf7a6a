// Tests of the host executor: that each collective works as on a GPU, and that each kind of faulty
// kernel is detected.

#include "simt/simt.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "check.h"
#include "core/cuda.h"
#include "core/shared.h"
#include "selftest/faults.cuh"
#include "simt/fiber.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace {

constexpr unsigned kFull = 0xffffffff;

std::string here(int line) { return std::string(__FILE__) + ":" + std::to_string(line); }

using Kernel = void (*)(const float*, float*, int);

std::vector<float> iota(int size) {
  std::vector<float> x(size);
  std::iota(x.begin(), x.end(), 1.0f);
  return x;
}

void launch_fault(Kernel kernel, const float* x, float* y, int size) {
  const unsigned blocks = (size + selftest::kFaultThreads - 1) / selftest::kFaultThreads;
  simt::launch(blocks, selftest::kFaultThreads, sizeof(selftest::FaultStorage<float>),
               [&] { kernel(x, y, size); });
}

std::vector<float> run_fault(Kernel kernel, int size) {
  const std::vector<float> x = iota(size);
  std::vector<float> y(size, -1.0f);
  launch_fault(kernel, x.data(), y.data(), size);
  return y;
}

std::string fault_error(Kernel kernel, int size) {
  try {
    run_fault(kernel, size);
  } catch (const simt::Error& error) {
    return error.what();
  }
  return "";
}

// ---- Indices, order, configuration ----

void test_indices() {
  for (const std::uint64_t seed : {0, 1, 2, 99}) {
    const Seed seeded(seed);
    std::multiset<std::tuple<int, int, int, int, int, int>> seen;
    simt::launch(dim3(3, 2, 2), dim3(5, 3, 2), 0, [&] {
      CHECK(gridDim.x == 3 && gridDim.y == 2 && gridDim.z == 2);
      CHECK(blockDim.x == 5 && blockDim.y == 3 && blockDim.z == 2);
      seen.insert({blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z});
      __syncthreads();  // the indices are the same after a switch
      CHECK(seen.count(
                {blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z}) == 1);
    });
    CHECK(seen.size() == 3 * 2 * 2 * 5 * 3 * 2);
    CHECK(*seen.begin() == std::make_tuple(0, 0, 0, 0, 0, 0));
    CHECK(*seen.rbegin() == std::make_tuple(2, 1, 1, 4, 2, 1));
  }
}

std::vector<int> order_of(std::uint64_t seed) {
  const Seed seeded(seed);
  std::vector<int> order;
  simt::launch(7, 40, 0, [&] {
    order.push_back(blockIdx.x * 40 + threadIdx.x);
    __syncthreads();
    order.push_back(blockIdx.x * 40 + threadIdx.x);
  });
  return order;
}

void test_order() {
  // Ascending blocks, in them ascending rounds, in these ascending threads. Thread 39 arrives last
  // at the barrier, so it continues at once.
  std::vector<int> ascending;
  for (int block = 0; block < 7; ++block) {
    for (int thread = 0; thread < 40; ++thread) ascending.push_back(block * 40 + thread);
    ascending.push_back(block * 40 + 39);
    for (int thread = 0; thread < 39; ++thread) ascending.push_back(block * 40 + thread);
  }
  CHECK(order_of(0) == ascending);

  CHECK(order_of(1) == order_of(1));
  CHECK(order_of(1) != order_of(2));
  const std::vector<int> shuffled = order_of(1);
  std::vector<int> blocks;
  for (std::size_t i = 0; i < shuffled.size(); i += 80) blocks.push_back(shuffled[i] / 40);
  CHECK(blocks != std::vector<int>({0, 1, 2, 3, 4, 5, 6}));
  CHECK(std::set<int>(blocks.begin(), blocks.end()).size() == 7);
  // Each round has an order of its own.
  CHECK(!std::equal(shuffled.begin(), shuffled.begin() + 40, shuffled.begin() + 40));
}

void test_configuration() {
  const auto nothing = [] {};
  const std::string invalid = "invalid configuration argument";
  CHECK(contains(error_of(0, 1, 0, nothing), invalid));
  CHECK(contains(error_of(1, 0, 0, nothing), invalid));
  CHECK(contains(error_of(dim3(1, 0), 1, 0, nothing), invalid));
  CHECK(contains(error_of(dim3(1, 1, 0), 1, 0, nothing), invalid));
  CHECK(contains(error_of(0x80000000u, 1, 0, nothing), invalid));
  CHECK(contains(error_of(dim3(1, 65536), 1, 0, nothing), invalid));
  CHECK(contains(error_of(dim3(1, 1, 65536), 1, 0, nothing), invalid));
  CHECK(contains(error_of(1, 1025, 0, nothing), invalid));
  CHECK(contains(error_of(1, dim3(32, 33), 0, nothing), invalid));
  CHECK(contains(error_of(1, dim3(1, 1, 65), 0, nothing), invalid));
  CHECK(contains(error_of(1, 1, 227 * 1024 + 1, nothing), invalid));
  CHECK(error_of(dim3(1, 65535), 1, 0, nothing).empty());
  CHECK(error_of(1, dim3(4, 4, 64), 227 * 1024, nothing).empty());
}

// ---- Collectives ----

void test_barriers() {
  for (const std::uint64_t seed : {0, 3, 4}) {
    const Seed seeded(seed);
    for (const int threads : {1, 31, 32, 33, 100, 1024}) {
      std::vector<int> written(threads);
      simt::launch(2, threads, 0, [&] {
        const int i = threadIdx.x;
        for (int round = 1; round < 4; ++round) {
          written[i] = round + 10 * blockIdx.x;
          __syncthreads();
          CHECK(written[threads - 1 - i] == round + 10 * static_cast<int>(blockIdx.x));
          __syncthreads();
        }
        CHECK(__syncthreads_count(i % 3 == 0) == (threads + 2) / 3);
        CHECK(__syncthreads_or(i == threads - 1) == 1);
        CHECK(__syncthreads_or(0) == 0);
        CHECK(__syncthreads_and(7) == 1);
        CHECK(__syncthreads_and(i != 0) == 0);
      });
    }
  }
}

void test_votes() {
  for (const std::uint64_t seed : {0, 5, 6}) {
    const Seed seeded(seed);
    simt::launch(1, dim3(8, 10), 0, [&] {  // lanes count along x first; the last warp is half
      const int thread = threadIdx.y * 8 + threadIdx.x;
      const int lane = thread % 32;
      const unsigned whole = thread < 64 ? kFull : 0xffff;
      CHECK(__activemask() == whole);
      CHECK(__ballot_sync(whole, lane % 2) == (0xaaaaaaaa & whole));
      CHECK(__any_sync(whole, lane == 3) == 1);
      CHECK(__any_sync(whole, 0) == 0);
      CHECK(__all_sync(whole, lane + 1) == 1);
      CHECK(__all_sync(whole, lane) == 0);
      if (lane < 8) {  // some lanes diverge, and all reconverge
        CHECK(__ballot_sync(0xff, lane == 2) == 4);
      } else {
        const unsigned rest = whole & ~0xffu;
        CHECK(__ballot_sync(rest, 1) == rest);
      }
      __syncwarp();
      __syncwarp(whole);
      CHECK(__ballot_sync(whole, 1) == whole);
    });
  }
}

struct alignas(16) Sixteen {
  std::int64_t a;
  float b;
};

void test_shuffles() {
  for (const std::uint64_t seed : {0, 7, 8}) {
    const Seed seeded(seed);
    simt::launch(1, 64, 0, [&] {
      const int lane = threadIdx.x % 32;
      const int warp = threadIdx.x / 32;
      const int value = 100 * warp + lane;
      for (const int width : {1, 2, 4, 8, 16, 32}) {
        const int first = lane / width * width;
        const int last = first + width - 1;
        for (int d = 0; d < 32; ++d) {
          const auto expected = [&](int source) { return 100 * warp + source; };
          CHECK(__shfl_sync(kFull, value, d, width) == expected(first + d % width));
          CHECK(__shfl_up_sync(kFull, value, d, width) ==
                expected(lane - d >= first ? lane - d : lane));
          CHECK(__shfl_down_sync(kFull, value, d, width) ==
                expected(lane + d <= last ? lane + d : lane));
          CHECK(__shfl_xor_sync(kFull, value, d, width) ==
                expected((lane ^ d) <= last ? lane ^ d : lane));
        }
      }
      CHECK(__shfl_sync(kFull, value, 33) == 100 * warp + 1);  // the lane modulo the width
      CHECK(__shfl_sync(kFull, value, -1) == 100 * warp + 31);
      // Halves of a warp, each with a mask of its own.
      const unsigned half = lane < 16 ? 0x0000ffff : 0xffff0000;
      CHECK(__shfl_xor_sync(half, value, 5) == 100 * warp + (lane ^ 5));

      CHECK(__shfl_xor_sync(kFull, 0.5 * lane, 1) == 0.5 * (lane ^ 1));
      CHECK(__shfl_xor_sync(kFull, static_cast<signed char>(lane), 1) == (lane ^ 1));
      CHECK(__half2float(__shfl_xor_sync(kFull, __float2half(lane), 1)) == (lane ^ 1));
      const float2 pair = __shfl_down_sync(kFull, make_float2(lane, -lane), 1, 2);
      CHECK(pair.x == (lane | 1) && pair.y == -(lane | 1));
      const Sixteen wide = __shfl_sync(kFull, Sixteen{lane, 0.5f}, 9);
      CHECK(wide.a == 9 && wide.b == 0.5f);
    });
  }
}

void test_reductions_of_a_warp() {
  for (const std::uint64_t seed : {0, 9, 10}) {
    const Seed seeded(seed);
    simt::launch(1, 64, 0, [&] {
      const int lane = threadIdx.x % 32;
      const int value = (lane * 7 + 3) % 32 - 16;  // each of -16 .. 15 once
      CHECK(__reduce_max_sync(kFull, value) == 15);
      CHECK(__reduce_min_sync(kFull, value) == -16);
      CHECK(__reduce_min_sync(kFull, static_cast<unsigned>(value)) == 0);
      CHECK(__reduce_max_sync(kFull, static_cast<unsigned>(value)) == ~0u);
      const unsigned half = lane < 16 ? 0x0000ffff : 0xffff0000;
      CHECK(__reduce_max_sync(half, lane) == (lane < 16 ? 15 : 31));
      CHECK(__reduce_min_sync(half, lane) == (lane < 16 ? 0 : 16));
    });
  }
}

// Lanes may reach a collective while others are still in one that does not name them.
void test_overlapping_masks() {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Seed seeded(seed);
    simt::launch(1, 32, 0, [&] {
      const int lane = threadIdx.x;
      int value = lane;
      if (lane < 16) value = __shfl_xor_sync(0xffff, value, 1);
      if (lane % 2 == 0) value = __shfl_xor_sync(0x55555555, value, 2);
      value = __shfl_sync(kFull, value, 31 - lane);
      const int source = 31 - lane;
      const int middle = source % 2 == 0 ? source ^ 2 : source;
      CHECK(value == (middle < 16 ? middle ^ 1 : middle));
    });
  }
}

// __syncwarp() does not wait for lanes of its mask that have exited.
void test_syncwarp_of_exited_lanes() {
  for (const std::uint64_t seed : {0, 9, 10}) {
    const Seed seeded(seed);
    int reached = 0;
    simt::launch(1, 40, 0, [&] {
      if (threadIdx.x % 2 == 0) return;
      __syncwarp();
      ++reached;
    });
    CHECK(reached == 20);
  }
}

void test_atomics() {
  struct Counters {
    int i = 0;
    unsigned u = 0;
    unsigned long long l = 0;
    float f = 0;
    int largest = -5, smallest = 5;
    unsigned turn = 0;
    int lock = 0;
    int last = -1;
    int wrapped = std::numeric_limits<int>::max();
  } c;
  const Seed seeded(11);
  int winners = 0;
  simt::launch(4, 50, 0, [&] {
    const int i = blockIdx.x * 50 + threadIdx.x;
    atomicAdd(&c.i, -1);
    atomicAdd(&c.u, 2);
    atomicAdd(&c.l, 1ull << 40);
    atomicAdd(&c.f, 0.5f);
    __threadfence();
    atomicMax(&c.largest, i);
    __threadfence_block();
    atomicMin(&c.smallest, -i);
    CHECK(atomicInc(&c.turn, 2) <= 2);
    if (atomicCAS(&c.lock, 0, 1) == 0) ++winners;
    atomicExch(&c.last, i);
    if (i == 0) CHECK(atomicAdd(&c.wrapped, 1) == std::numeric_limits<int>::max());
    CHECK(__ldg(&c.last) == i);
  });
  CHECK(c.i == -200 && c.u == 400 && c.l == 200ull << 40 && c.f == 100.0f);
  CHECK(c.largest == 199 && c.smallest == -199);
  CHECK(c.turn == 200 % 3 && winners == 1);
  CHECK(c.wrapped == std::numeric_limits<int>::min());
}

void test_shared_memory() {
  std::set<void*> addresses;
  simt::launch(3, 33, 1000, [&] {
    auto* const bytes = static_cast<unsigned char*>(simt::shared_memory());
    addresses.insert(bytes);
    CHECK(reinterpret_cast<std::uintptr_t>(bytes) % 128 == 0);
    CHECK(simt::shared_memory_bytes() == 1000);
    CHECK(bytes[0] == 0xff && bytes[999] == 0xff);
    CHECK(std::isnan(shared_array<float>()[249]) && std::isnan(shared_array<double>()[124]));
    CHECK(__hisnan(shared_array<__half>()[499]) && __hisnan(shared_array<__nv_bfloat16>()[499]));
    __syncthreads();
    for (int i = threadIdx.x; i < 1000; i += 33) bytes[i] = 0;
  });
  CHECK(addresses.size() == 1);

  struct Storage {
    float row[4];
  };
  CHECK(error_of(1, 1, sizeof(Storage), [] { shared<Storage>().row[3] = 0; }).empty());
  check_contains(error_of(2, 3, sizeof(Storage) - 1, [] { shared<Storage>().row[0] = 0; }),
                 {"block (0, 0, 0), thread (0, 0, 0)", "16 bytes", "gave it 15"});
}

// ---- Faults ----

void test_correct_kernel() {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    const Seed seeded(seed);
    for (const int size : {1, 31, 64, 65, 1000}) {
      const std::vector<float> y = run_fault(selftest::reverse<float>, size);
      bool right = true;
      for (int i = 0; i < size; ++i) right = right && y[i] == static_cast<float>(size - i);
      CHECK(right);
    }
  }
}

void test_missing_barrier() {
  const auto wrong = [](std::uint64_t seed) {
    const Seed seeded(seed);
    const std::vector<float> y = run_fault(selftest::missing_barrier<float>, 640);
    int count = 0;
    for (int i = 0; i < 640; ++i) {
      if (!(y[i] == static_cast<float>(i % selftest::kFaultThreads == 0 ? i + 1 : i))) ++count;
    }
    return count;
  };
  CHECK(wrong(0) == 0);  // that is why tests vary the seed
  for (std::uint64_t seed = 1; seed <= 10; ++seed) CHECK(wrong(seed) > 100);
}

void test_divergent_barrier() {
  for (const std::uint64_t seed : {0, 12}) {
    const Seed seeded(seed);
    const std::string error = fault_error(selftest::divergent_barrier<float>, 64);
    check_contains(error, {"block (0, 0, 0)", "divergent barrier", "thread (0, 0, 0) and 31 more",
                           "thread (32, 0, 0) and 31 more", "__syncthreads() at", "faults.cuh:"});
  }

  // Different functions on the same source line are different barriers.
  CHECK(contains(
      error_of(2,
               [] { threadIdx.x == 0 ? (void)__syncthreads_or(1) : (void)__syncthreads_and(1); }),
      "divergent barrier"));

  // A thread that exits keeps the others waiting, whether it exits before they arrive or after.
  for (const unsigned leaver : {0, 63}) {
    const int line = __LINE__ + 3;
    const std::string left = error_of(dim3(1, 2), dim3(8, 8), 0, [&] {
      if (threadIdx.y * 8 + threadIdx.x == leaver) return;
      __syncthreads();
    });
    check_contains(
        left, {"block (0, 0, 0)", "divergent barrier", "and 62 more at __syncthreads()", here(line),
               leaver == 0 ? "thread (0, 0, 0) exited" : "thread (7, 7, 0) exited"});
  }

  // A barrier and a shuffle wait for each other.
  check_contains(error_of(32,
                          [] {
                            if (threadIdx.x == 5) {
                              __syncthreads();
                            } else {
                              __shfl_sync(kFull, 0, 0);
                            }
                          }),
                 {"divergent barrier", "thread (5, 0, 0) at __syncthreads()",
                  "thread (0, 0, 0) and 30 more at __shfl_sync()", "mask 0xffffffff"});
}

void test_divergent_warp() {
  const auto check_divergent = [](const std::function<void()>& body) {
    check_contains(error_of(dim3(1, 1, 1), 32, 0, body),
                   {"block (0, 0, 0)", "divergent warp collective", "thread (0, 0, 0)"});
  };
  check_divergent([] {  // another mask
    const unsigned mask = threadIdx.x == 0 ? 0xffffffff : 0xfffffffe;
    __ballot_sync(mask, 1);
  });
  check_divergent([] {  // another line
    if (threadIdx.x < 16) {
      __shfl_xor_sync(kFull, 1, 1);
    } else {
      __shfl_xor_sync(kFull, 1, 1);
    }
  });
  check_divergent([] {  // another kind
    threadIdx.x == 0 ? __any_sync(kFull, 1) : __all_sync(kFull, 1);
  });
  check_divergent([] {  // a lane exits while others wait for it
    if (threadIdx.x < 31) __shfl_xor_sync(kFull, 1, 1);
  });
}

void test_absent_lanes() {
  CHECK(fault_error(selftest::absent_lanes<float>, 96).empty());
  for (const std::uint64_t seed : {0, 13}) {
    const Seed seeded(seed);
    const std::string error = fault_error(selftest::absent_lanes<float>, 80);
    // Lanes that exit early are absent; those that exit late keep the others waiting.
    CHECK(contains(error, "names absent lanes") || contains(error, "divergent warp collective"));
    check_contains(error, {"block (1, 0, 0)", "thread (", "__shfl_xor_sync() at", "faults.cuh:"});
  }

  int line = __LINE__ + 1;
  check_contains(error_of(40, [] { __shfl_down_sync(kFull, 1.0f, 1); }),
                 {"block (0, 0, 0), thread (32, 0, 0): __shfl_down_sync() at " + here(line),
                  "names absent lanes 0xffffff00"});
  check_contains(error_of(40, [] { __ballot_sync(kFull, 1); }),
                 {"thread (32, 0, 0): __ballot_sync()", "names absent lanes 0xffffff00"});
  check_contains(error_of(32,
                          [] {
                            if (threadIdx.x > 0) __any_sync(kFull, 1);
                          }),
                 {"thread (1, 0, 0): __any_sync()", "names absent lanes 0x00000001"});
  check_contains(error_of(32, [] { __shfl_sync(0x0000ffff, 1, 0); }),
                 {"thread (16, 0, 0)", "called by lane 16, which the mask does not name"});
  check_contains(error_of(32, [] { __syncwarp(1); }),
                 {"thread (1, 0, 0)", "called by lane 1, which the mask does not name"});
  check_contains(error_of(32,
                          [] {
                            if (threadIdx.x < 8) __shfl_sync(0xff, 1, 8);
                          }),
                 {"thread (0, 0, 0)", "reads from lane 8, which the mask does not name"});
  check_contains(error_of(32, [] { __shfl_sync(kFull, 1, 0, 12); }),
                 {"thread (0, 0, 0)", "width 12"});
}

void test_unwritten_shared() {
  const std::vector<float> y = run_fault(selftest::unwritten_shared<float>, 128);
  for (int i = 0; i < 128; ++i) CHECK(std::isnan(y[i]) == (i == 63 || i == 127));
}

#ifdef JAX_GPUOPS_ASAN
void test_out_of_bounds() {
  check_contains(asan_report([] { run_fault(selftest::global_out_of_bounds<float>, 80); }),
                 {"heap-buffer-overflow", "WRITE of size 4", "global_out_of_bounds",
                  "block (1, 0, 0), thread (15, 0, 0)"});
  check_contains(asan_report([] { run_fault(selftest::shared_out_of_bounds<float>, 80); }),
                 {"heap-buffer-overflow", "WRITE of size 4", "shared_out_of_bounds",
                  "256-byte region", "block (0, 0, 0), thread (63, 0, 0)"});
}
#endif

// ---- Exceptions ----

struct Tracked {
  explicit Tracked(int& alive) : alive(alive) { ++alive; }
  ~Tracked() { --alive; }
  int& alive;
};

void test_exceptions() {
  for (const std::uint64_t seed : {0, 14}) {
    const Seed seeded(seed);
    // An exception of a kernel is rethrown unchanged, and the other threads' stacks are unwound.
    int alive = 0;
    int at_most = 0;
    try {
      simt::launch(3, 100, 0, [&] {
        const Tracked tracked(alive);
        at_most = std::max(at_most, alive);
        __syncthreads();
        if (threadIdx.x == 40) throw std::out_of_range("forty");
        __syncthreads();
      });
      CHECK(false);
    } catch (const std::out_of_range& error) {
      CHECK(std::string(error.what()) == "forty");
    }
    CHECK(at_most == 100);
    CHECK(alive == 0);
    CHECK(!error_of(64, [&] {
             const Tracked tracked(alive);
             if (threadIdx.x != 0) __syncthreads();
           }).empty());
    CHECK(alive == 0);
  }

  // Nested exceptions keep their order.
  try {
    simt::launch(1, 32, 0, [] {
      __syncwarp();
      try {
        throw std::runtime_error("inner");
      } catch (...) {
        std::throw_with_nested(std::runtime_error("outer"));
      }
    });
    CHECK(false);
  } catch (const std::runtime_error& outer) {
    CHECK(std::string(outer.what()) == "outer");
    try {
      std::rethrow_if_nested(outer);
      CHECK(false);
    } catch (const std::runtime_error& inner) {
      CHECK(std::string(inner.what()) == "inner");
    }
  }

  // A launch, failing or not, while an exception is handled and while another unwinds the stack.
  struct LaunchOnExit {
    ~LaunchOnExit() {
      CHECK(std::uncaught_exceptions() == 1);
      CHECK(run_fault(selftest::reverse<float>, 100)[0] == 100.0f);
      CHECK(!fault_error(selftest::divergent_barrier<float>, 100).empty());
      CHECK(std::uncaught_exceptions() == 1);
    }
  };
  try {
    const LaunchOnExit launch_on_exit;
    throw std::runtime_error("first");
  } catch (const std::runtime_error& first) {
    CHECK(!fault_error(selftest::divergent_barrier<float>, 100).empty());
    CHECK(run_fault(selftest::reverse<float>, 100)[0] == 100.0f);
    CHECK(std::string(first.what()) == "first");
  }

  check_contains(error_of(2, [] { simt::launch(1, 1, 0, [] {}); }),
                 {"block (0, 0, 0), thread (0, 0, 0)", "may not launch"});
  try {
    __syncthreads();
    CHECK(false);
  } catch (const simt::Error& error) {
    check_contains(error.what(), {"outside a launch"});
  }
}

// What a failed launch leaves on its stacks must not affect the next launch: AddressSanitizer would
// report deep frames that overlap stale redzones.
void test_launch_after_error() {
  for (int round = 0; round < 20; ++round) {
    CHECK(!fault_error(selftest::divergent_barrier<float>, 64).empty());
    bool right = true;
    simt::launch(1, 64, 0, [&] {
      char buffer[8192];
      std::memset(buffer, threadIdx.x, sizeof(buffer));
      __syncthreads();
      for (const char byte : buffer) right = right && byte == static_cast<char>(threadIdx.x);
    });
    CHECK(right);
  }
}

// ---- Floating-point environment, host threads, scale ----

void test_subnormals() {
#if defined(__x86_64__)
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | (1u << 15) | (1u << 6));
  volatile float smallest_normal = std::numeric_limits<float>::min();
  volatile float half = 0.5f;
  float inside = 0;
  float doubled = 0;
  const float outside = smallest_normal * half;
  const unsigned flushing = _mm_getcsr();
  simt::launch(1, 1, 0, [&] {
    inside = smallest_normal * half;
    volatile float subnormal = inside;
    doubled = subnormal * 2.0f;
  });
  const bool restored = _mm_getcsr() == flushing;
  const std::string error = error_of(1, [] { simt::fail("on purpose"); });
  const bool restored_after_error = _mm_getcsr() == flushing;
  _mm_setcsr(before);
  CHECK(outside == 0.0f);  // the test would prove nothing if flushing were off
  CHECK(inside == std::numeric_limits<float>::min() / 2);
  CHECK(doubled == std::numeric_limits<float>::min());
  CHECK(restored && restored_after_error && !error.empty());
#endif
}

void test_host_threads() {
  const auto work = [] {
    for (int round = 0; round < 50; ++round) {
      const std::vector<float> y = run_fault(selftest::reverse<float>, 500);
      bool right = true;
      for (int i = 0; i < 500; ++i) right = right && y[i] == static_cast<float>(500 - i);
      CHECK(right);
      CHECK(!fault_error(selftest::divergent_barrier<float>, 64).empty());
    }
  };
  std::thread a(work);
  std::thread b(work);
  work();
  a.join();
  b.join();
}

// More stacks than the operating system maps for a process, if all existed at the same time.
void test_large_launches_of_many_host_threads() {
  std::vector<std::thread> threads;
  std::atomic<int> visits{0};
  for (int i = 0; i < 12; ++i) {
    threads.emplace_back([&] {
      simt::launch({16, 512, 0, 1, /*cooperative=*/true}, [&] {
        __syncthreads();
        ++visits;
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(visits == 12 * 16 * 512);
}

void test_many_blocks() {
  for (const std::uint64_t seed : {0, 15}) {
    const Seed seeded(seed);
    std::vector<int> visits(10000);
    simt::launch(10000, 33, 16, [&] {
      auto* const sum = shared_array<int>();
      if (threadIdx.x == 0) *sum = 0;
      __syncthreads();
      atomicAdd(sum, 1);
      __syncthreads();
      if (threadIdx.x == 32) visits[blockIdx.x] += *sum;
    });
    CHECK(visits == std::vector<int>(10000, 33));
  }
}

std::size_t resident_pages() {
  std::FILE* const file = std::fopen("/proc/self/statm", "r");
  std::size_t total = 0;
  std::size_t resident = 0;
  const int fields = std::fscanf(file, "%zu %zu", &total, &resident);
  std::fclose(file);
  return fields == 2 ? resident : 0;
}

void test_many_launches() {
  const auto launch_some = [](int count) {
    for (int i = 0; i < count; ++i) simt::launch(1, 64, 1000, [] { __syncthreads(); });
  };
  launch_some(1000);
  const std::size_t before = resident_pages();
  launch_some(5000);
#ifdef JAX_GPUOPS_ASAN
  // AddressSanitizer keeps freed memory for a while.
  CHECK(before > 0);
#else
  CHECK(resident_pages() < before + 100);
#endif
}

// ---- Speed ----

double seconds_of(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void warp_softmax(const float* x, float* y, int columns) {
  const float* const source = x + std::size_t{blockIdx.x} * columns;
  float* const target = y + std::size_t{blockIdx.x} * columns;
  float largest = -std::numeric_limits<float>::infinity();
  for (int i = threadIdx.x; i < columns; i += 32) largest = fmaxf(largest, source[i]);
  for (int d = 16; d > 0; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(kFull, largest, d));
  float sum = 0;
  for (int i = threadIdx.x; i < columns; i += 32) sum += target[i] = expf(source[i] - largest);
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(kFull, sum, d);
  for (int i = threadIdx.x; i < columns; i += 32) target[i] /= sum;
}

void test_speed() {
  struct Switcher {
    static simt::Fiber* run(void* rounds) {
      for (long i = *static_cast<long*>(rounds); i > 0; --i) simt::Fiber::suspend(nullptr);
      return nullptr;
    }
  };
  long rounds = 1000000;
  simt::Fiber fiber;
  fiber.assign(&Switcher::run, &rounds);
  const double pairs = seconds_of([&] {
    for (long i = 0; i <= rounds; ++i) fiber.resume();
  });
  std::printf("fiber: %.1f ns for a switch there and back\n", 1e9 * pairs / rounds);

  const double barriers = seconds_of([] {
    simt::launch(1, 1024, 0, [] {
      for (int i = 0; i < 1000; ++i) __syncthreads();
    });
  });
  std::printf("__syncthreads: %.1f ns a thread in a block of 1024\n", 1e9 * barriers / 1024000);

  constexpr int kSize = 1024;
  std::vector<float> x(kSize * kSize);
  std::vector<float> y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
  const double softmax = seconds_of(
      [&] { simt::launch(kSize, 32, 0, [&] { warp_softmax(x.data(), y.data(), kSize); }); });
  std::printf("softmax of 1024 x 1024, a warp a row: %.3f s\n", softmax);
  double total = 0;
  for (const float value : y) total += value;
  CHECK(std::abs(total - kSize) < 1e-3 * kSize);
}

void run_all() {
  test_indices();
  test_order();
  test_configuration();
  test_barriers();
  test_votes();
  test_shuffles();
  test_reductions_of_a_warp();
  test_overlapping_masks();
  test_syncwarp_of_exited_lanes();
  test_atomics();
  test_shared_memory();
  test_correct_kernel();
  test_missing_barrier();
  test_divergent_barrier();
  test_divergent_warp();
  test_absent_lanes();
  test_unwritten_shared();
#ifdef JAX_GPUOPS_ASAN
  test_out_of_bounds();
#endif
  test_exceptions();
  test_launch_after_error();
  test_subnormals();
  test_host_threads();
  test_large_launches_of_many_host_threads();
  test_many_blocks();
  test_many_launches();
  test_arithmetic();
  test_async();
  test_tensor();
  test_speed();
}

}  // namespace
}  // namespace JAX_GPUOPS_NAMESPACE

int main() {
  JAX_GPUOPS_NAMESPACE::run_all();
  const int failed = JAX_GPUOPS_NAMESPACE::failed;
  std::printf("%d passed, %d failed\n", JAX_GPUOPS_NAMESPACE::passed.load(), failed);
  return failed == 0 ? 0 : 1;
}
