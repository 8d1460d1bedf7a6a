// Shared memory, for kernels: `auto& s = shared<Storage>()`.
//
// It is all dynamic: the launch gives its size. Static `__shared__` variables would be ordinary
// statics on the host, where AddressSanitizer does not guard them and they keep the last block's
// values, which hides missing barriers.
#pragma once

#include <type_traits>

#include "core/cuda.h"

#ifdef JAX_GPUOPS_INTERPRET
#include "simt/simt.h"
#endif

namespace JAX_GPUOPS_NAMESPACE {

inline constexpr int kSharedAlignment = 128;

// The block's shared memory as an array of as many T as the launch gave room for.
template <class T>
__device__ inline T* shared_array() {
  static_assert(alignof(T) <= kSharedAlignment, "shared memory begins at a multiple of 128 bytes");
  static_assert(std::is_trivially_copyable_v<T>,
                "shared memory is neither constructed nor destroyed");
#ifdef JAX_GPUOPS_INTERPRET
  return static_cast<T*>(simt::shared_memory());
#else
  extern __shared__ __align__(kSharedAlignment) unsigned char memory[];
  return reinterpret_cast<T*>(memory);
#endif
}

// The block's shared memory as one Storage, uninitialized.
template <class Storage>
__device__ inline Storage& shared() {
#ifdef JAX_GPUOPS_INTERPRET
  if (sizeof(Storage) > simt::shared_memory_bytes()) simt::fail_shared_memory(sizeof(Storage));
#endif
  return *shared_array<Storage>();
}

}  // namespace JAX_GPUOPS_NAMESPACE
