// Runs CUDA kernels on the host, for tests, debugging and teaching.
//
// A launch runs its blocks one after another on the calling thread. Every CUDA thread of a block is
// a fiber, which runs until it must wait for others at a barrier, a shuffle or a vote. Between two
// such points a thread is never interrupted, so atomics need no care, and what a kernel with a
// missing barrier computes depends on the order of its threads alone: that order is the schedule
// seed's to choose, and the same seed gives the same run.
//
// A kernel that breaks the rules of CUDA's thread model stops the launch with an Error. Memory is
// AddressSanitizer's to check: built with it, an access beyond shared memory or a heap buffer ends
// the process with a report, and below it the block and thread.
//
// Kernels see this through simt/cuda.h, which spells it in CUDA's words.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

namespace JAX_GPUOPS_NAMESPACE {
namespace simt {

inline constexpr int kWarpSize = 32;

// What a kernel or its launch did wrong.
class Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Runs `body` once for each thread of each block. Throws Error if the configuration is beyond
// CUDA's limits or the kernel fails, and whatever `body` itself throws; the rest of the grid then
// does not run. May be called by several host threads at once, but not by a kernel.
//
// Subnormal numbers are kept during the launch, as on a GPU, even where the caller (XLA:CPU) has
// the processor flush them to zero.
void launch(dim3 grid, dim3 block, std::size_t shared_bytes, const std::function<void()>& body);

// The order of blocks, and of the threads that can run in each scheduling round: ascending for 0,
// the initial seed, else shuffled. The seed holds for all launches of the process that begin later.
void set_schedule_seed(std::uint64_t seed);
std::uint64_t schedule_seed();

// ---- For code in kernels ----

// The block's dynamic shared memory, aligned to 128 bytes. It is a heap block of just the launch's
// size, so that AddressSanitizer's redzones lie at its ends, and begins each CUDA block filled with
// 0xFF bytes, which are NaN in every floating-point type.
void* shared_memory();
std::size_t shared_memory_bytes();

// Throws an Error that begins with the calling thread's block and thread index.
[[noreturn]] void fail(const std::string& what);

// ---- What simt/cuda.h is made of ----

struct Site {
  const char* file;
  int line;

  // As a default argument: where the function that has it is called.
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// Waits for all threads of the block; returns for how many of them the predicate is true.
int block_barrier(const char* function, Site site, bool predicate);

// Waits for the lanes in `mask` that have not exited.
void warp_barrier(const char* function, Site site, unsigned mask);

// Waits for the lanes in `mask`; returns those for which the predicate is true.
unsigned warp_vote(const char* function, Site site, unsigned mask, bool predicate);

// Waits for the lanes in `mask`; replaces the value, of up to 16 bytes, by that of `source_lane`.
void warp_shuffle(const char* function, Site site, unsigned mask, int source_lane, void* value,
                  std::size_t bytes);

// The calling thread's place in its warp, and the lanes of the warp that have not exited.
int lane();
unsigned live_lanes();

}  // namespace simt
}  // namespace JAX_GPUOPS_NAMESPACE
