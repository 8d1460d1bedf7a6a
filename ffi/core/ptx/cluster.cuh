// Thread-block clusters: blocks that run together and reach each other's shared memory.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/ptx/hopper.h"
#include "core/ptx/mbarrier.cuh"

namespace JAX_GPUOPS_NAMESPACE {

// The calling block's number within its cluster.
__device__ inline int cluster_rank() {
#ifdef JAX_GPUOPS_INTERPRET
  return simt::cluster_rank();
#elif JAX_GPUOPS_HOPPER_PTX
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
#else
  return 0;
#endif
}

// A barrier of all threads of the cluster, in two halves. After the wait, all blocks have started,
// and mbarriers that initialise() has set up are visible. Other memory accesses are not ordered:
// for that, arriving would have to wait for all that are outstanding.
__device__ inline void cluster_arrive([[maybe_unused]] Site site = Site::here()) {
#ifdef JAX_GPUOPS_INTERPRET
  simt::cluster_arrive("cluster_arrive", site);
#elif JAX_GPUOPS_HOPPER_PTX
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ inline void cluster_wait([[maybe_unused]] Site site = Site::here()) {
#ifdef JAX_GPUOPS_INTERPRET
  simt::cluster_wait("cluster_wait", site);
#elif JAX_GPUOPS_HOPPER_PTX
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The address, in the cluster's shared memory, of block `rank`'s counterpart of `local`.
__device__ inline unsigned shared_address_in_block([[maybe_unused]] const void* local,
                                                   [[maybe_unused]] int rank,
                                                   [[maybe_unused]] Site site = Site::here()) {
#ifdef JAX_GPUOPS_INTERPRET
  return simt::window_address_in_block(local, rank, site);
#elif JAX_GPUOPS_HOPPER_PTX
  unsigned address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(shared_address(local)), "r"(rank));
  return address;
#else
  return 0;
#endif
}

// arrive() at an mbarrier of any block of the cluster, by its address from
// shared_address_in_block().
__device__ inline void arrive_at([[maybe_unused]] unsigned address,
                                 [[maybe_unused]] Site site = Site::here()) {
#ifdef JAX_GPUOPS_INTERPRET
  simt::mbarrier_arrive_at("arrive_at", site, address);
#elif JAX_GPUOPS_HOPPER_PTX
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
#endif
}

// Writes a value asynchronously to block `rank`'s counterpart of `to`; its bytes complete
// transactions of that block's counterpart of `barrier`. Threads that wait for this mbarrier see
// the value.
template <class T>
__device__ inline void send([[maybe_unused]] const T& value, [[maybe_unused]] T* to,
                            [[maybe_unused]] Mbarrier* barrier, [[maybe_unused]] int rank,
                            [[maybe_unused]] Site site = Site::here()) {
  static_assert(sizeof(T) == 4 || sizeof(T) % 8 == 0);
#ifdef JAX_GPUOPS_INTERPRET
  constexpr unsigned kBytes = sizeof(T) == 4 ? 4 : 8;
  for (unsigned at = 0; at < sizeof(T); at += kBytes) {
    simt::async_store("send", site, reinterpret_cast<const char*>(&value) + at,
                      reinterpret_cast<char*>(to) + at, kBytes, barrier, rank);
  }
#elif JAX_GPUOPS_HOPPER_PTX
  const unsigned address = shared_address_in_block(to, rank);
  const unsigned counter = shared_address_in_block(barrier, rank);
  if constexpr (sizeof(T) == 4) {
    std::uint32_t word;
    memcpy(&word, &value, sizeof(word));
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
        "r"(word), "r"(counter)
        : "memory");
  } else if constexpr (alignof(T) == 16) {
    std::uint32_t words[sizeof(T) / 4];
    memcpy(words, &value, sizeof(T));
#pragma unroll
    for (unsigned i = 0; i < sizeof(T) / 4; i += 4) {
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
          "[%5];" ::"r"(address + 4 * i),
          "r"(words[i]), "r"(words[i + 1]), "r"(words[i + 2]), "r"(words[i + 3]), "r"(counter)
          : "memory");
    }
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

}  // namespace JAX_GPUOPS_NAMESPACE
