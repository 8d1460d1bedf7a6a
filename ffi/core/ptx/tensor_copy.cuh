// Asynchronous copies of boxes of a tensor between global and shared memory (TMA). A tensor map,
// made on the host, describes the tensor (three dimensions here, the first contiguous), the box and
// its layout in shared memory. Elements of a box beyond the tensor's edges are read as zeros, and
// count as transaction bytes like the rest. They are not written, except up to the next multiple of
// 16 bytes in the first dimension. In that dimension a box begins at a multiple of 16 bytes, also
// before the tensor; otherwise the copy is an illegal instruction.
#pragma once

#include <cstdint>

#include "core/ptx/bulk_copy.cuh"
#include "core/ptx/hopper.h"
#include "core/ptx/mbarrier.cuh"
#include "core/tensor_map.h"

namespace JAX_GPUOPS_NAMESPACE {

// A kernel takes the map as `const __grid_constant__ TensorMap`: the copy engine reads it from
// there.
__device__ inline void prefetch_tensor_map([[maybe_unused]] const TensorMap& map) {
#if JAX_GPUOPS_HOPPER_PTX
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}

// Copies the box that begins at (x, y, z) to shared memory; its bytes complete transactions of the
// mbarrier.
__device__ inline void copy_tensor([[maybe_unused]] void* to, [[maybe_unused]] const TensorMap& map,
                                   [[maybe_unused]] int x, [[maybe_unused]] int y,
                                   [[maybe_unused]] int z, [[maybe_unused]] Mbarrier* barrier,
                                   [[maybe_unused]] Site site = Site::here()) {
#ifdef JAX_GPUOPS_INTERPRET
  simt::tensor_read("copy_tensor", site, to, map, {x, y, z}, barrier);
#elif JAX_GPUOPS_HOPPER_PTX
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
#endif
}

// The same, multicast to all blocks of the cluster whose bits are set in `blocks`. Each has its own
// copy and mbarrier, at the offsets of `to` and `barrier` in the calling block.
__device__ inline void copy_tensor([[maybe_unused]] void* to, [[maybe_unused]] const TensorMap& map,
                                   [[maybe_unused]] int x, [[maybe_unused]] int y,
                                   [[maybe_unused]] int z, [[maybe_unused]] Mbarrier* barrier,
                                   [[maybe_unused]] std::uint16_t blocks,
                                   [[maybe_unused]] Site site = Site::here()) {
#ifdef JAX_GPUOPS_INTERPRET
  simt::tensor_multicast("copy_tensor", site, to, map, {x, y, z}, barrier, blocks);
#elif JAX_GPUOPS_HOPPER_PTX
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(barrier)), "h"(blocks), "r"(x), "r"(y), "r"(z)
      : "memory");
#endif
}

// Copies from shared memory to the box that begins at (x, y, z) what all threads wrote before they
// called finish_writes_before_copies() and met at a barrier. See wait_until_read(). If
// `evict_first`, the lines leave the L2 cache before those of other data.
__device__ inline void write_tensor([[maybe_unused]] const TensorMap& map, [[maybe_unused]] int x,
                                    [[maybe_unused]] int y, [[maybe_unused]] int z,
                                    [[maybe_unused]] const void* from,
                                    [[maybe_unused]] bool evict_first = false,
                                    [[maybe_unused]] Site site = Site::here()) {
#ifdef JAX_GPUOPS_INTERPRET
  simt::tensor_write("write_tensor", site, map, {x, y, z}, from);
#elif JAX_GPUOPS_HOPPER_PTX
  if (evict_first) {
    std::uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint"
        " [%0, {%2, %3, %4}], [%1], %5;" ::"l"(&map),
        "r"(shared_address(from)), "r"(x), "r"(y), "r"(z), "l"(policy)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::
            "l"(&map),
        "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
        : "memory");
  }
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

}  // namespace JAX_GPUOPS_NAMESPACE
