// Runs CUDA kernels on the host, for tests, debugging and teaching.
//
// A launch runs its blocks one after another on the calling thread; the blocks of a cluster, or all
// blocks of a cooperative launch, run concurrently. Every CUDA thread is a fiber, which runs until
// it must wait for others, at a barrier, a shuffle or a vote, or for a copy. Between two such
// points a thread is never interrupted, so atomics are plain accesses, and the result of a kernel
// with a missing barrier depends only on the order of its threads. The schedule seed determines
// that order, and the same seed gives the same run.
//
// Asynchronous copies take place at any time that CUDA's rules allow, which the seed determines as
// well. Until then their destination is filled with 0xFF bytes, which are NaN in every
// floating-point type, and no thread may write to it or to the source. The same holds for
// asynchronous matrix products (wgmma), their sums and their operands.
//
// A kernel that breaks the rules of CUDA's thread model stops the launch with an Error. Memory
// accesses are checked by AddressSanitizer: in a build with it, an access beyond shared memory or a
// heap buffer ends the process with a report, followed by the block and thread.
//
// simt/cuda.h provides this to kernels under the names of CUDA.
#pragma once

#include <vector_types.h>

#include <array>
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

// The simulated GPU: a Hopper GPU with few multiprocessors, so that small problems fill it.
inline constexpr int kMultiprocessors = 4;
inline constexpr int kThreadsPerMultiprocessor = 2048;
inline constexpr std::size_t kSharedBytesPerBlock = 227 * 1024;
inline constexpr unsigned kMaxClusterBlocks = 16;

// How many blocks one of its multiprocessors holds at a time.
int resident_blocks(unsigned threads, std::size_t shared_bytes);

struct Configuration {
  dim3 grid;
  dim3 block;
  std::size_t shared_bytes = 0;
  unsigned cluster = 1;      // neighbouring blocks along x that run together as a cluster
  bool cooperative = false;  // all blocks run together, so that they may wait for each other
};

// Runs `body` once for each thread of each block. Throws Error if the configuration is beyond
// CUDA's limits or the kernel fails, and whatever `body` itself throws; the rest of the grid then
// does not run. May be called by several host threads at once, but not by a kernel.
//
// Subnormal numbers are kept during the launch, as on a GPU, even where the caller (XLA:CPU) has
// the processor flush them to zero.
void launch(const Configuration& configuration, const std::function<void()>& body);

inline void launch(dim3 grid, dim3 block, std::size_t shared_bytes,
                   const std::function<void()>& body) {
  launch(Configuration{grid, block, shared_bytes}, body);
}

// Selects what may vary from run to run on a GPU, for all later launches of the process.
//
// The order of blocks, and of the threads that can run in each scheduling round: ascending for 0,
// the initial seed, else shuffled. A quarter of the other seeds hold back one warp of every block,
// and a quarter one of the blocks that run concurrently: it runs only when nothing else can.
//
// When asynchronous copies take place, and when words that blocks post for each other arrive: for
// seeds 0, 3, 6 ... only when no thread can run without them, or at the end of the launch; for 1,
// 4, 7 ... immediately; for others at any time in between.
void set_schedule_seed(std::uint64_t seed);
std::uint64_t schedule_seed();

// Holds back the given warp of every block, the given one of the blocks that run concurrently, or
// both, instead of the seed's choice. They count from 0; -1 is none.
void set_held_back(int warp, int block);

// ---- For code in kernels ----

// The block's dynamic shared memory, aligned to 128 bytes, and for seeds other than 0 not always to
// more. It is a heap allocation of exactly the launch's size, so that AddressSanitizer's redzones
// lie at its ends. At the start of each CUDA block it is filled with 0xFF bytes, which are NaN in
// every floating-point type.
void* shared_memory();
std::size_t shared_memory_bytes();

// Throws an Error that begins with the calling thread's block and thread index.
[[noreturn]] void fail(const std::string& what);

// The same for a shuffle with an invalid width, and for a kernel that uses more shared memory than
// its launch gave it.
[[noreturn]] void fail_width(int width);
[[noreturn]] void fail_shared_memory(std::size_t used_bytes);

// ---- What simt/cuda.h and core/ptx/ are built on ----

struct Site {
  const char* file;
  int line;

  // As a default argument: the place where the function is called.
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

// Waits for the lanes in `mask`; returns `word` of `source_lane`, in which the value has `bytes`
// bytes.
std::uint64_t warp_shuffle(const char* function, Site site, unsigned mask, int source_lane,
                           std::uint64_t word, std::size_t bytes);

// The same for values of up to 16 bytes; replaces the value.
void warp_shuffle(const char* function, Site site, unsigned mask, int source_lane, void* value,
                  std::size_t bytes);

// Waits for all lanes; then one of them calls `work` once, with the `own` pointers of all lanes.
using WarpWork = void (*)(void* const (&lanes)[kWarpSize]);
void warp_together(const char* function, Site site, void* own, WarpWork work);

// The calling thread's place in its warp, and the lanes of the warp that have not exited.
int lane();
unsigned live_lanes();

// For polling loops that wait for writes of other blocks. Returns when another thread has run or a
// copy has taken place.
void let_others_run(const char* function, Site site);

// Relaxed accesses to global memory, which order no others: a store may become visible late, but
// all of its bytes at once.
void relaxed_store(void* to, const void* value, unsigned bytes, Site site);
void relaxed_load(void* value, const void* from, unsigned bytes);
void relaxed_add(std::uint32_t* counter, std::uint32_t value);

// Clusters. Either all lanes of a warp take part in a barrier, or none.
int cluster_rank();
void cluster_arrive(const char* function, Site site);
void cluster_wait(const char* function, Site site);

// Mbarriers, in the calling block's shared memory. Other threads see an initialised mbarrier after
// a barrier with the thread that initialised it. A phase completes when mbarrier_arrive() has been
// called as often as mbarrier_init() was told, and all transaction bytes that these calls expect
// have arrived; `parity` is that of the phase's number, which begins with 0.
void mbarrier_init(std::uint64_t* barrier, unsigned arrivals, Site site);
void mbarrier_arrive(const char* function, Site site, std::uint64_t* barrier, unsigned bytes);
void mbarrier_wait(const char* function, Site site, std::uint64_t* barrier, unsigned parity);

// Asynchronous copies: bulk_read() from global to shared memory, which completes on the mbarrier;
// bulk_write() from shared to global memory; bulk_wait_read() waits until all of the calling
// thread's writes but the last `pending` have read their source; async_store() copies up to 8 bytes
// to `to` in block `rank` of the cluster, and completes on `barrier` there.
void bulk_read(const char* function, Site site, void* to, const void* from, std::size_t bytes,
               std::uint64_t* barrier);
void proxy_fence();
void bulk_write(const char* function, Site site, void* to, const void* from, std::size_t bytes);
void bulk_wait_read(const char* function, Site site, unsigned pending);
void async_store(const char* function, Site site, const void* value, void* to, std::size_t bytes,
                 std::uint64_t* barrier, int rank);

// Addresses in PTX's shared state space: in the calling block's memory, and of the location of
// `local` in block `rank` of the cluster, at which a thread may arrive.
unsigned window_address(const void* pointer, Site site);
unsigned window_address_in_block(const void* local, int rank, Site site);
void mbarrier_arrive_at(const char* function, Site site, unsigned address);

// Tensor copies. A box is stored in shared memory as swizzled lines of 128 bytes: the 16-byte piece
// p of the line at address a is at p ^ (a / 128 % 8). core/tensor_map.h makes the maps.
struct TensorMap {
  unsigned char* data = nullptr;
  int element_bytes = 0;
  std::int64_t extent[3] = {};
  std::int64_t stride_bytes[2] = {};
  int box[3] = {};
  bool rounds_to_tf32 = false;  // to nearest, when floats are read
};
using Position = std::array<int, 3>;
void tensor_read(const char* function, Site site, void* to, const TensorMap& map, Position at,
                 std::uint64_t* barrier);
void tensor_multicast(const char* function, Site site, void* to, const TensorMap& map, Position at,
                      std::uint64_t* barrier, unsigned blocks);
void tensor_write(const char* function, Site site, const TensorMap& map, Position at,
                  const void* from);

// Warpgroups. named_barrier() is bar.sync, or bar.arrive if not `waits`. set_registers() is
// setmaxnreg, and starts from the registers of a launch with one block per multiprocessor.
void named_barrier(const char* function, Site site, int number, int threads, bool waits);
void set_registers(const char* function, Site site, unsigned registers, bool takes);

enum class FactorType { kFloat16, kBFloat16, kTf32, kFloat8E4M3, kFloat8E5M2, kInt8 };

// One wgmma: sums (+)= left * right^T, with 64 x `cols` sums over a depth of 32 bytes. The sums are
// floats, or ints if the factors are integers. The left operand may be in registers, four words per
// thread.
struct ProductCall {
  unsigned cols;
  FactorType type;
  bool deep_left;
  bool deep_right;
  bool add;
  std::uint64_t left;
  std::uint64_t right;
  const std::uint32_t* left_words = nullptr;  // of the calling thread, if in registers
};
void begin_products(const char* function, Site site);
void multiply_add(const char* function, Site site, void* sums, const ProductCall& call);
void end_products(const char* function, Site site);
void wait_for_products(const char* function, Site site, unsigned pending);
void store_matrices(const char* function, Site site, unsigned address, bool transposed,
                    std::array<std::uint32_t, 4> words);

// One mma.sync by all lanes of a warp: sums += left * right, with 16 x 8 sums over a depth of 16,
// or 8 for TF32 and doubles.
void multiply_add_warp(const char* function, Site site, float (&sums)[4],
                       const std::uint32_t (&left)[4], const std::uint32_t (&right)[2],
                       FactorType type);
void multiply_add_warp(const char* function, Site site, double (&sums)[4], const double (&left)[4],
                       const double (&right)[2]);

// All lanes of a warp load four matrices of 8 rows of 16 bytes (ldmatrix); lane 8 i + r gives the
// address of row r of matrix i.
void load_matrices(const char* function, Site site, unsigned address, bool transposed,
                   std::uint32_t (&words)[4]);

// Asynchronous copies of 4, 8 or 16 bytes from global to shared memory (cp.async), or of zeros if
// `from` is null; the end of a copy group of the thread; and the wait until all of its groups but
// the last `pending` are complete.
void async_copy(const char* function, Site site, void* to, const void* from, unsigned bytes);
void end_copy_group();
void wait_for_copy_groups(unsigned pending);

}  // namespace simt
}  // namespace JAX_GPUOPS_NAMESPACE
