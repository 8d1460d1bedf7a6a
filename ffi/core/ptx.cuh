// The PTX that CUDA C++ has no words for. The only file with inline assembly. What needs compute
// capability 9.0 does nothing elsewhere, on the host executor among others; callers must have
// another way, for which JAX_GPUOPS_HAS_CLUSTERS tells them apart.
#pragma once

#include <math.h>  // NOLINT: unlike <cmath>, declares the float overloads globally

#include <cstdint>
#include <cstring>

#include "core/cuda.h"

// Thread-block clusters, and copies that run beside the threads.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define JAX_GPUOPS_HAS_CLUSTERS 1
#else
#define JAX_GPUOPS_HAS_CLUSTERS 0
#endif

namespace JAX_GPUOPS_NAMESPACE {

// 2 to the x, within 2 ulp; the GPU flushes subnormal arguments and results to 0.
__device__ inline float power_of_two(float x) {
#ifdef JAX_GPUOPS_INTERPRET
  return exp2f(x);
#else
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#endif
}

// 1 / x, within an ulp for x from 2^-126 to 2^126; NaN if x is 0 or infinite.
__device__ inline float reciprocal(float x) {
#ifdef JAX_GPUOPS_INTERPRET
  const float result = 1.0f / x;
#else
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
#endif
  return fmaf(fmaf(-x, result, 1.0f), result, result);
}
__device__ inline double reciprocal(double x) {
  const double result = 1.0 / x;
  return fma(fma(-x, result, 1.0), result, result);
}

// Stores words to global memory, at a multiple of their size, by one instruction.
template <int kWords>
__device__ inline void store_words(const std::uint32_t (&word)[kWords], void* to) {
  static_assert(kWords == 2 || kWords == 4);
#ifdef JAX_GPUOPS_INTERPRET
  memcpy(to, word, sizeof(word));
#else
  if constexpr (kWords == 2) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(word[0]), "r"(word[1])
                 : "memory");
  } else {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]), "r"(word[1]),
                 "r"(word[2]), "r"(word[3])
                 : "memory");
  }
#endif
}

// The calling block's number within its cluster.
__device__ inline int cluster_rank() {
#if JAX_GPUOPS_HAS_CLUSTERS
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
#else
  return 0;
#endif
}

// A barrier of all threads of the cluster, in two halves. All that have waited know that all blocks
// have started, and see what initialise() did; to order other memory accesses too, arriving would
// have to wait for all those under way.
__device__ inline void cluster_arrive() {
#if JAX_GPUOPS_HAS_CLUSTERS
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ inline void cluster_wait() {
#if JAX_GPUOPS_HAS_CLUSTERS
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// For kernels that are launched while the one before may still run. Its blocks let the next
// kernel's start, once all have called the first of these, or ended. The next one's wait, by the
// second, for all of it to have ended, and see what it wrote.
__device__ inline void let_next_kernel_start() {
#if JAX_GPUOPS_HAS_CLUSTERS
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ inline void wait_for_kernel_before() {
#if JAX_GPUOPS_HAS_CLUSTERS
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// PTX's mbarrier, in shared memory, for threads to wait for each other and for copies. A phase is
// over when all threads have arrived that belong to it, and all bytes that were announced in it; a
// barrier's first phase is 0, the next is 1, the next 0 again.
using Mbarrier = std::uint64_t;

__device__ inline unsigned shared_address([[maybe_unused]] const void* pointer) {
#if JAX_GPUOPS_HAS_CLUSTERS
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
#else
  return 0;
#endif
}

// One thread calls it, before the barrier that the threads which wait for it meet at first.
// `arrivals`: how many calls of announce() or arrive() belong to a phase.
__device__ inline void initialise([[maybe_unused]] Mbarrier* barrier,
                                  [[maybe_unused]] unsigned arrivals = 1) {
#if JAX_GPUOPS_HAS_CLUSTERS
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// One thread calls it once in a phase, before the copies.
__device__ inline void announce([[maybe_unused]] Mbarrier* barrier,
                                [[maybe_unused]] unsigned bytes) {
#if JAX_GPUOPS_HAS_CLUSTERS
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
#endif
}

// Whoever waits sees what the calling thread wrote before.
__device__ inline void arrive([[maybe_unused]] Mbarrier* barrier) {
#if JAX_GPUOPS_HAS_CLUSTERS
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
#endif
}

// Copies from global to shared memory without registers. Addresses and size are multiples of 16.
__device__ inline void copy_bulk([[maybe_unused]] void* to, [[maybe_unused]] const void* from,
                                 [[maybe_unused]] unsigned bytes,
                                 [[maybe_unused]] Mbarrier* barrier) {
#if JAX_GPUOPS_HAS_CLUSTERS
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
#endif
}

__device__ inline void wait([[maybe_unused]] Mbarrier* barrier, [[maybe_unused]] unsigned phase) {
#if JAX_GPUOPS_HAS_CLUSTERS
  unsigned done = 0;
  while (done == 0) {
    asm volatile(
        "{\n"
        "  .reg .pred done;\n"
        "  mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "  selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(phase)
        : "memory");
  }
#endif
}

// The address in the cluster's shared memory of what block `rank` has where the calling one has
// `local`.
__device__ inline unsigned shared_address_in_block([[maybe_unused]] const void* local,
                                                   [[maybe_unused]] int rank) {
  unsigned address = 0;
#if JAX_GPUOPS_HAS_CLUSTERS
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(shared_address(local)), "r"(rank));
#endif
  return address;
}

// Writes a value to block `rank` of the cluster, where the calling one has `to` and `barrier`, and
// counts its bytes there. Whoever waits for the barrier sees the value.
template <class T>
__device__ inline void send([[maybe_unused]] const T& value, [[maybe_unused]] T* to,
                            [[maybe_unused]] Mbarrier* barrier, [[maybe_unused]] int rank) {
#if JAX_GPUOPS_HAS_CLUSTERS
  static_assert(sizeof(T) == 4 || sizeof(T) % 8 == 0);
  const unsigned address = shared_address_in_block(to, rank);
  const unsigned counter = shared_address_in_block(barrier, rank);
  if constexpr (sizeof(T) == 4) {
    std::uint32_t word;
    memcpy(&word, &value, sizeof(word));
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
        "r"(word), "r"(counter)
        : "memory");
  } else {
    std::uint64_t words[sizeof(T) / 8];
    memcpy(words, &value, sizeof(T));
#pragma unroll
    for (unsigned i = 0; i < sizeof(T) / 8; ++i) {
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(
              address + 8 * i),
          "l"(words[i]), "r"(counter)
          : "memory");
    }
  }
#endif
}

// A word and a number that tells it from those that lay there before, for other blocks: both are
// written, and read, at once, and nothing else is ordered.
__device__ inline void post([[maybe_unused]] std::uint64_t* to, [[maybe_unused]] std::uint32_t word,
                            [[maybe_unused]] std::uint32_t number) {
#if JAX_GPUOPS_HAS_CLUSTERS
  const std::uint64_t both = std::uint64_t{number} << 32 | word;
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(both) : "memory");
#endif
}

// Reads such a word, and returns whether it is the one with `number`.
__device__ inline bool look([[maybe_unused]] const std::uint64_t* from,
                            [[maybe_unused]] std::uint32_t number,
                            [[maybe_unused]] std::uint32_t& word) {
#if JAX_GPUOPS_HAS_CLUSTERS
  std::uint64_t both;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(both) : "l"(from) : "memory");
  word = static_cast<std::uint32_t>(both);
  return both >> 32 == number;
#else
  return false;
#endif
}

// Adds 1 to a counter, and orders nothing else.
__device__ inline void count_one([[maybe_unused]] std::uint32_t* counter) {
#if JAX_GPUOPS_HAS_CLUSTERS
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
#endif
}

// Waits until a counter is `count` or more, modulo 2^32, and orders nothing else.
__device__ inline void await_count([[maybe_unused]] const std::uint32_t* counter,
                                   [[maybe_unused]] std::uint32_t count) {
#if JAX_GPUOPS_HAS_CLUSTERS
  std::uint32_t seen;
  do {
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  } while (static_cast<std::int32_t>(seen - count) < 0);
#endif
}

// Copies from shared to global memory without registers, of what all threads wrote before they
// called finish_writes_before_copies() and met at a barrier. wait_until_read() returns when the
// caller's copies no longer need the shared memory.
__device__ inline void finish_writes_before_copies() {
#if JAX_GPUOPS_HAS_CLUSTERS
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ inline void write_bulk([[maybe_unused]] void* to, [[maybe_unused]] const void* from,
                                  [[maybe_unused]] unsigned bytes) {
#if JAX_GPUOPS_HAS_CLUSTERS
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

__device__ inline void wait_until_read() {
#if JAX_GPUOPS_HAS_CLUSTERS
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}

}  // namespace JAX_GPUOPS_NAMESPACE
