// The state of a running launch, for the files of the executor.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "simt/fiber.h"
#include "simt/simt.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace simt {

// The alignment of the allocation of a block's shared memory, which begins at some multiple of 128
// bytes in it.
inline constexpr std::size_t kSharedAlignment = 1024;

std::string to_string(uint3 index);
std::string to_string(const char* function, Site site);

// SplitMix64 (Steele, Lea and Flood, 2014).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t below(std::uint64_t bound) {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return (z ^ (z >> 31)) % bound;
  }

 private:
  std::uint64_t state_;
};

// ---- What threads wait for ----

enum class Scope {
  kBlock,
  kLiveLanes,
  kLanes,
  kCluster,
  kMbarrier,
  kCopies,
  kOthers,
  kNamedBarrier,
  kRegisters,
  kProducts
};

// A blocking call, with the arguments of the thread.
struct Call {
  const char* function;
  Site site;
  Scope scope;
  unsigned mask = 0;  // the lanes that take part, for the scopes within a warp
  bool predicate = false;
  int source_lane = 0;
  void* value = nullptr;  // to exchange with other lanes, or the mbarrier that is waited for
  std::size_t value_bytes = 0;
  std::uint64_t word = 0;   // to exchange, if `value` is null
  WarpWork work = nullptr;  // to do on the values of all lanes
  unsigned parity = 0;      // of the phase of an mbarrier
  // Copies that may be pending, a named barrier, registers, or products that must be complete.
  std::uint64_t number = 0;
};

// ---- Threads, blocks, clusters ----

struct Block;
struct Warpgroups;  // in warpgroup.h

// A cp.async copy, for which only the issuing thread can wait.
struct AsyncCopy {
  const char* function;
  Site site;
  void* to;
  const void* from;  // null for zeros
  unsigned bytes;
  std::uint64_t group;                 // number of the thread's groups before it
  std::array<unsigned char, 16> data;  // what the source held when the copy was issued
};

struct Thread {
  enum class State { kReady, kWaiting, kPolling, kExited };

  uint3 index{};
  Block* block = nullptr;
  State state = State::kReady;
  bool started = false;
  bool held_back = false;  // runs only when no other can
  Call call{};             // while it waits
  unsigned result = 0;     // of the last call: lanes, or a number of threads
  Fiber* fiber = nullptr;
  std::uint64_t polled = 0;               // Launch::activity_ when it began to poll
  unsigned arrivals = 0;                  // at the cluster's barrier
  unsigned waits = 0;                     // for it, that have returned
  std::uint64_t writes = 0;               // copies from shared to global memory that it has issued
  bool fenced = false;                    // it called proxy_fence() since its last barrier
  bool met_fenced = false;                // all threads at that barrier had called it
  std::vector<AsyncCopy> async_copies{};  // pending; few, and mostly none
  std::uint64_t copy_groups = 0;          // that it has ended
};

// The state of an mbarrier. Shared memory holds only a mark, by which the executor detects that the
// kernel overwrote it.
struct MbarrierState {
  unsigned arrivals = 0;   // of each phase
  unsigned missing = 0;    // in the current phase
  std::int64_t bytes = 0;  // expected, but not arrived; negative if they arrive first
  unsigned phase = 0;      // the current one
  const Thread* owner = nullptr;
  unsigned block_syncs = 0;  // of the owner's block, when it initialised the barrier
  unsigned warp_syncs = 0;
  unsigned cluster_arrivals = 0;
  std::vector<Thread*> waiting;
};

struct Cluster {
  std::vector<Block*> blocks;
  std::size_t live = 0;     // threads that have not exited
  std::size_t arrived = 0;  // of them, in the current phase
  unsigned phase = 0;       // of the cluster's barrier
};

struct AlignedDelete {
  void operator()(void* memory) const {
    ::operator delete(memory, std::align_val_t(kSharedAlignment));
  }
};

// A resident block; the next one takes its place when all blocks that run concurrently have ended.
struct Block {
  uint3 index{};
  Cluster* cluster = nullptr;
  unsigned rank = 0;  // in the cluster
  std::unique_ptr<void, AlignedDelete> allocation;
  unsigned char* shared = nullptr;  // in `allocation`
  std::vector<Thread> threads;
  std::size_t in_call = 0;  // threads that wait at a barrier of the block
  std::size_t exited = 0;
  unsigned syncs = 0;                // completed barriers of the block
  std::vector<unsigned> warp_syncs;  // completed collectives of each warp
  std::vector<unsigned> live_lanes;  // of each warp: those that have not exited
  std::unordered_map<const void*, MbarrierState> mbarriers;
  std::shared_ptr<Warpgroups> warpgroups;  // null until it uses their instructions
};

// "block (0, 0, 0), thread (1, 0, 0)".
std::string describe(const Thread& thread);

// Who calls what: "block (0, 0, 0), thread (1, 0, 0): wait() at ...", in errors.
struct Caller {
  const Thread& thread;
  const char* function;
  Site site;
};
std::string operator+(const Caller& caller, const std::string& what);

// ---- Asynchronous copies ----

// A box of a tensor in global memory, and the address of its image in shared memory.
struct Box {
  TensorMap map;
  Position at;
  unsigned address;
};

struct Copy {
  // An arrival at another block's mbarrier is handled as a copy of no bytes.
  enum class Kind { kToShared, kToGlobal, kToCluster, kWord, kArrival };

  Kind kind;
  const char* function;
  Site site;
  Thread* issuer;
  void* to;
  const void* from;                 // null for copies of a value
  std::vector<unsigned char> data;  // what the source held when the copy was issued
  Block* block = nullptr;           // whose shared memory it reads or writes
  std::uint64_t* barrier = nullptr;
  std::shared_ptr<const Box> box = nullptr;  // read or written instead of `to` or `from`
  std::uint64_t number = 0;                  // of the issuer's writes
};

// ---- The launch ----

// Unwinds the fibers of a launch that has failed; not a std::exception, so that a kernel does not
// catch it by accident.
struct Cancelled {};

class Launch {
 public:
  Launch(const Configuration& configuration, const std::function<void()>& body);
  ~Launch();
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  void run();

  // Called by the running thread.
  unsigned wait(const Call& call);
  unsigned wait();  // for the current call of its thread
  [[noreturn]] void fail(const std::string& what) const { throw Error(place() + ": " + what); }
  std::string place() const;
  Thread& thread() const { return *thread_; }
  int lane() const { return static_cast<int>(number(*thread_) % kWarpSize); }
  unsigned live_lanes() const { return live_lanes_of(*thread_); }
  void together(const char* function, Site site, void* own, WarpWork work);
  void let_others_run(const char* function, Site site);
  void add_activity() { ++activity_; }

  void* shared_memory() const { return thread_->block->shared; }
  std::size_t shared_bytes() const { return configuration_.shared_bytes; }

  // In async.cc.
  void cluster_arrive(const char* function, Site site);
  void cluster_wait(const char* function, Site site);
  void mbarrier_init(std::uint64_t* barrier, unsigned arrivals, Site site);
  void mbarrier_arrive(const char* function, Site site, std::uint64_t* barrier, unsigned bytes);
  void mbarrier_wait(const char* function, Site site, std::uint64_t* barrier, unsigned parity);
  void bulk_read(const char* function, Site site, void* to, const void* from, std::size_t bytes,
                 std::uint64_t* barrier);
  void bulk_write(const char* function, Site site, void* to, const void* from, std::size_t bytes);
  void bulk_wait_read(const char* function, Site site, unsigned pending);
  void async_store(const char* function, Site site, const void* value, void* to, std::size_t bytes,
                   std::uint64_t* barrier, int rank);
  void relaxed_store(void* to, const void* value, unsigned bytes, Site site);
  void relaxed_load(void* value, const void* from, unsigned bytes);
  unsigned shared_address(const void* pointer, Site site) const;
  unsigned shared_address_in_block(const void* local, int rank, Site site) const;
  void mbarrier_arrive_at(const char* function, Site site, unsigned address);

  // In async_copy.cc.
  void async_copy(const char* function, Site site, void* to, const void* from, unsigned bytes);
  void end_copy_group();
  void wait_for_copy_groups(unsigned pending);

  // In tensor_copy.cc.
  void tensor_read(const char* function, Site site, void* to, const TensorMap& map, Position at,
                   std::uint64_t* barrier, const unsigned* blocks);
  void tensor_write(const char* function, Site site, const TensorMap& map, Position at,
                    const void* from);

  // In warpgroup.cc and wgmma.cc.
  void named_barrier(const char* function, Site site, int number, int threads, bool waits);
  void set_registers(const char* function, Site site, unsigned registers, bool takes);
  void begin_products(const char* function, Site site);
  void multiply_add(const char* function, Site site, void* sums, const ProductCall& call);
  void end_products(const char* function, Site site);
  void wait_for_products(const char* function, Site site, unsigned pending);
  void store_matrices(const char* function, Site site, unsigned address, bool transposed,
                      std::array<std::uint32_t, 4> words);
  void load_matrices(const char* function, Site site, unsigned address, bool transposed,
                     std::uint32_t (&words)[4]);

 private:
  enum class Timing { kLate, kEarly, kAny };

  // In simt.cc.
  void start_block(Block& block, std::uint64_t number);
  void run_residents();
  void run_round();
  template <class Predicate>
  void gather(Predicate&& runs);
  Fiber& begin_turn(Thread& thread);
  void end_turn();
  Fiber* next_turn();
  void suspend();
  void run_thread();
  [[noreturn, gnu::noinline]] void fail_lanes(const Call& call) const;
  void cancel();

  bool complete_block_call(Block& block);
  bool complete_warp_call(const Thread& caller);
  void exchange(Thread* warp, unsigned lanes);
  static void exchange_values(Thread* warp, unsigned lanes);
  void release(Thread& thread, unsigned result);
  std::string describe_deadlock() const;

  // In async.cc.
  std::string describe_wait(const Thread& thread) const;
  void complete_cluster_barrier(Cluster& cluster);
  void leave_cluster(Thread& thread);
  MbarrierState& find_mbarrier(const Caller& caller, std::uint64_t* barrier, Block& block,
                               const Thread& user);
  void end_phase(MbarrierState& state);
  void arrive(const Caller& caller, MbarrierState& state, const void* barrier, const Block& block,
              unsigned bytes);
  Block& block_of_cluster(const Caller& caller, int rank) const;
  void* in_block(const void* local, const Block& block) const;
  unsigned char* at_shared_address(const Caller& caller, unsigned address, std::size_t bytes) const;
  void check_shared(const Caller& caller, const void* pointer, std::size_t bytes) const;
  void check_fenced(const Caller& caller) const;
  bool reads_under_way(const Thread& thread, std::uint64_t pending) const;
  void issue(Copy copy);
  void land(std::size_t position);
  void land_some();
  void count_bytes(const Copy& copy);
  void check_copies_of(const Block& block) const;
  void finish_copies();
  void finish_words(const void* at, const Thread* issuer);
  void drop_copies();

  // In async_copy.cc.
  void land_async(Thread& thread, std::size_t position, std::size_t number);
  void land_async(const Thread& thread, const AsyncCopy& copy) const;
  void check_async_copies(const Thread& thread) const;
  void drop_async_copies();

  // In warpgroup.cc and wgmma.cc.
  Warpgroups& warpgroups(Block& block) const;
  Warpgroups& whole_warpgroups(const Caller& caller, Block& block) const;
  void meet_warp(const char* function, Site site);
  void wake(Block& block, Scope scope);
  std::string describe_wait_of_warpgroup(const Thread& thread) const;
  void check_not_read(const Copy& copy) const;
  void check_exit(const Thread& thread) const;
  void run_some_products();
  unsigned char* row_of_matrix(const Caller& caller, unsigned address) const;

  static std::size_t number(const Thread& thread);
  static Thread* warp_of(const Thread& thread);
  static std::size_t warp_size(const Thread* warp);
  static unsigned& live_lanes_of(const Thread& thread);

  const std::function<void()>& body_;
  const Configuration configuration_;
  const std::uint64_t seed_;
  Random random_;
  const Timing timing_;
  const std::size_t shared_offset_;  // of shared memory in its allocation
  std::vector<Block> blocks_;        // resident
  std::vector<Cluster> clusters_;
  bool holds_back_ = false;
  std::vector<Thread*> ready_;  // that run in this round
  std::size_t turns_ = 0;       // of this round that have begun
  std::size_t live_ = 0;
  std::size_t polling_ = 0;
  std::uint64_t activity_ = 0;   // counts events that may end another thread's polling
  bool has_warpgroups_ = false;  // of some resident block
  std::deque<Copy> copies_;      // pending; mostly the first one lands first
  std::deque<Copy> written_;     // copies to global memory that have read their source
  Thread* thread_ = nullptr;     // the running one
  bool polled_ = false;          // whether it was polling
  std::exception_ptr error_;
  bool cancelled_ = false;
};

// The first address in PTX's shared state space that a block may use: CUDA reserves those below.
// Addresses of other blocks of the cluster have 1 + their rank in the upper bits.
inline constexpr unsigned kFirstSharedAddress = 1024;
inline constexpr unsigned kRankShift = 24;

// Texts for errors.
std::string bytes_text(std::int64_t bytes);
std::string copy_text(const Copy& copy);
std::string mbarrier_text(const void* barrier, const Block& block);

// Fills memory that no thread may access until release_memory().
void take_memory(void* memory, std::size_t bytes);
void release_memory(void* memory, std::size_t bytes);

// read_box() returns the image of a box, with zeros beyond the tensor; take_box() and release_box()
// take and release the global memory of a box; write_box() writes an image to it.
std::vector<unsigned char> read_box(const Box& box);
void take_box(const Box& box);
void release_box(const Box& box);
void write_box(const Box& box, const unsigned char* image);

// The address to which the 128-byte swizzle moves the data at an address.
inline unsigned swizzled(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

// The calling host thread's launch.
Launch& active_launch();

}  // namespace simt
}  // namespace JAX_GPUOPS_NAMESPACE
