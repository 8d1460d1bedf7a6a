// Launches, the order of threads, and collectives: barriers, shuffles, votes.

#include "simt/simt.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "simt/cuda.h"
#include "simt/fiber.h"
#include "simt/launch.h"

#ifdef JAX_GPUOPS_ASAN
#include <sanitizer/asan_interface.h>
#endif
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace JAX_GPUOPS_NAMESPACE {
namespace simt {
namespace {

constexpr unsigned kMaxBlockThreads = 1024;
constexpr std::size_t kMaxValueBytes = 16;

std::atomic<std::uint64_t> global_schedule_seed{0};
std::atomic<int> held_back_warp{-1};
std::atomic<int> held_back_block{-1};

// ---- Texts for errors ----

std::string hexadecimal(unsigned mask) {
  char text[16];
  std::snprintf(text, sizeof(text), "0x%08x", mask);
  return text;
}

uint3 to_uint3(dim3 extent) { return make_uint3(extent.x, extent.y, extent.z); }

std::uint64_t blocks_of(dim3 grid) { return std::uint64_t{grid.x} * grid.y * grid.z; }

// ---- Floating-point environment ----

// Keeps subnormal numbers while it lives.
class SubnormalsKept {
 public:
  SubnormalsKept() : saved_(get()) { set(saved_ & ~kFlushBits); }
  ~SubnormalsKept() { set(saved_); }
  SubnormalsKept(const SubnormalsKept&) = delete;
  SubnormalsKept& operator=(const SubnormalsKept&) = delete;

 private:
#if defined(__x86_64__)
  using Register = unsigned;
  static constexpr Register kFlushBits = (1u << 15) | (1u << 6);  // MXCSR: FTZ, DAZ
  static Register get() { return _mm_getcsr(); }
  static void set(Register value) { _mm_setcsr(value); }
#else
  using Register = std::uint64_t;
  static constexpr Register kFlushBits = (1u << 24) | (1u << 19);  // FPCR: FZ, FZ16
  static Register get() {
    Register value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void set(Register value) { asm volatile("msr fpcr, %0" : : "r"(value)); }
#endif

  const Register saved_;
};

// ---- Order ----

// Visits each of `count` blocks, or clusters, once. A grid may have too many for a table, so the
// shuffled order has a constant stride that is coprime to the count.
class BlockOrder {
 public:
  BlockOrder(std::uint64_t count, bool shuffled, Random& random) : count_(count) {
    if (!shuffled || count == 1) return;
    position_ = random.below(count);
    do {
      stride_ = 1 + random.below(count - 1);
    } while (std::gcd(stride_, count) != 1);
  }

  std::uint64_t next() {
    const std::uint64_t result = position_;
    position_ = (position_ + stride_) % count_;
    return result;
  }

 private:
  std::uint64_t count_;
  std::uint64_t position_ = 0;
  std::uint64_t stride_ = 1;
};

// ---- Threads ----

// Mostly both are the same literal.
bool equal(const char* a, const char* b) { return a == b || std::strcmp(a, b) == 0; }

// True if the two are the same collective, so that their threads wait for each other.
bool match(const Call& a, const Call& b) {
  return a.site.line == b.site.line && a.mask == b.mask && a.scope == b.scope &&
         a.value_bytes == b.value_bytes && a.work == b.work && a.parity == b.parity &&
         (a.scope != Scope::kMbarrier || a.value == b.value) && equal(a.function, b.function) &&
         equal(a.site.file, b.site.file);
}

std::string call_text(const Call& call) {
  std::string text = to_string(call.function, call.site);
  if (call.scope == Scope::kLanes || call.scope == Scope::kLiveLanes) {
    text += " with mask " + hexadecimal(call.mask);
  }
  return text;
}

// The stacks of this host thread, kept because mapping them costs more than most launches.
std::deque<Fiber>& pooled_fibers() {
  thread_local std::deque<Fiber> fibers;
  return fibers;
}

// The stacks of a launch. Linux limits a process to 65530 memory mappings, and a stack takes two.
// Host threads run launches at the same time, each for a device; so launches of many threads run
// one at a time, and the stacks that all host threads keep are limited.
class Stacks {
 public:
  explicit Stacks(std::size_t count) {
    if (count > kFew) many_ = std::unique_lock(many_mutex);
    auto& fibers = pooled_fibers();
    for (; fibers.size() < count; ++all_fibers) fibers.emplace_back();
  }
  ~Stacks() {
    auto& fibers = pooled_fibers();
    for (; fibers.size() > kKept || (all_fibers > kKeptByAll && !fibers.empty()); --all_fibers) {
      fibers.pop_back();
    }
  }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

 private:
  static constexpr std::size_t kFew = 1024;
  static constexpr std::size_t kKept = 8192;
  static constexpr std::size_t kKeptByAll = 12288;
  static inline std::mutex many_mutex;
  static inline std::atomic<std::size_t> all_fibers{0};

  std::unique_lock<std::mutex> many_;
};

// ---- The launch ----

thread_local Launch* active = nullptr;

#ifdef JAX_GPUOPS_ASAN
void report_place(const char*) {
  if (active == nullptr) return;
  std::fprintf(stderr, "The access above was made by %s.\n", active->place().c_str());
}
#endif

}  // namespace

std::string to_string(uint3 index) {
  return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " +
         std::to_string(index.z) + ")";
}

std::string to_string(const char* function, Site site) {
  return std::string(function) + "() at " + site.file + ":" + std::to_string(site.line);
}

// Failures have functions of their own, not inlined into frequent calls: with room for texts, stack
// frames would be several times as large, and those of all threads share the processor's caches.

[[noreturn, gnu::noinline]] static void fail_outside() {
  throw Error("a function for kernels was called outside a launch");
}

Launch& active_launch() {
  if (active == nullptr) fail_outside();
  return *active;
}

Launch::Launch(const Configuration& configuration, const std::function<void()>& body)
    : body_(body),
      configuration_(configuration),
      seed_(schedule_seed()),
      random_(seed_),
      timing_(static_cast<Timing>(seed_ % 3)),
      shared_offset_(seed_ % 8 * 128),
      blocks_(configuration.cooperative ? blocks_of(configuration.grid) : configuration.cluster),
      clusters_(blocks_.size() / configuration.cluster) {
  const dim3 extent = configuration.block;
  gridDim = configuration.grid;
  blockDim = extent;
  const std::size_t threads = std::size_t{extent.x} * extent.y * extent.z;
  const std::size_t warps = (threads + kWarpSize - 1) / kWarpSize;
  // What the seed holds back: a warp, a block, or nothing.
  std::int64_t slow_warp = held_back_warp;
  std::int64_t slow_block = held_back_block;
  if (seed_ != 0 && slow_warp < 0 && slow_block < 0) {
    const std::uint64_t choice = random_.below(4);
    if (choice == 1) slow_warp = static_cast<std::int64_t>(random_.below(warps));
    if (choice == 2) slow_block = static_cast<std::int64_t>(random_.below(blocks_.size()));
  }
  holds_back_ = slow_warp >= 0 || slow_block >= 0;
  auto& fibers = pooled_fibers();
  std::size_t fiber = 0;
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    Block& block = blocks_[b];
    block.cluster = &clusters_[b / configuration.cluster];
    block.cluster->blocks.push_back(&block);
    block.rank = static_cast<unsigned>(b % configuration.cluster);
    block.allocation.reset(::operator new(shared_offset_ + configuration.shared_bytes,
                                          std::align_val_t(kSharedAlignment)));
    block.shared = static_cast<unsigned char*>(block.allocation.get()) + shared_offset_;
#ifdef JAX_GPUOPS_ASAN
    __asan_poison_memory_region(block.allocation.get(), shared_offset_);
#endif
    block.threads.resize(threads);
    block.warp_syncs.resize(warps);
    block.live_lanes.resize(warps);
    for (std::size_t i = 0; i < threads; ++i) {
      const auto n = static_cast<unsigned>(i);
      Thread& thread = block.threads[i];
      thread.index = make_uint3(n % extent.x, n / extent.x % extent.y, n / extent.x / extent.y);
      thread.block = &block;
      thread.held_back = static_cast<std::int64_t>(i / kWarpSize) == slow_warp ||
                         static_cast<std::int64_t>(b) == slow_block;
      thread.fiber = &fibers[fiber++];
    }
  }
  active = this;
}

Launch::~Launch() {
  drop_copies();
  drop_async_copies();
  active = nullptr;
}

void Launch::run() {
  const std::uint64_t groups = blocks_of(configuration_.grid) / blocks_.size();
  BlockOrder order(groups, seed_ != 0, random_);
  for (std::uint64_t i = 0; i < groups; ++i) {
    const std::uint64_t first = order.next() * blocks_.size();
    for (std::size_t b = 0; b < blocks_.size(); ++b) start_block(blocks_[b], first + b);
    run_residents();
  }
  finish_copies();
}

void Launch::start_block(Block& block, std::uint64_t number) {
  const dim3 grid = configuration_.grid;
  block.index = make_uint3(static_cast<unsigned>(number % grid.x),
                           static_cast<unsigned>(number / grid.x % grid.y),
                           static_cast<unsigned>(number / grid.x / grid.y));
  std::memset(block.shared, 0xff, configuration_.shared_bytes);
  block.exited = 0;
  block.in_call = 0;
  block.mbarriers.clear();
  block.warpgroups.reset();
  for (Thread& thread : block.threads) {
    thread.state = Thread::State::kReady;
    thread.started = false;
    thread.arrivals = thread.waits = 0;
    thread.writes = 0;
    thread.copy_groups = 0;
    thread.fenced = thread.met_fenced = false;
    thread.fiber->assign(
        [](void* argument) {
          Launch& launch = *static_cast<Launch*>(argument);
          launch.run_thread();
          return launch.next_turn();
        },
        this);
    live_lanes_of(thread) |= 1u << Launch::number(thread) % kWarpSize;
  }
  block.cluster->phase = 0;
  block.cluster->arrived = 0;
  block.cluster->live = block.threads.size() * block.cluster->blocks.size();
}

void Launch::run_residents() {
  live_ = blocks_.size() * blocks_[0].threads.size();
  has_warpgroups_ = false;
  while (live_ > 0 && !error_) run_round();
  if (error_) {
    cancel();
    std::rethrow_exception(error_);
  }
}

template <class Predicate>
void Launch::gather(Predicate&& runs) {
  for (Block& block : blocks_) {
    for (Thread& thread : block.threads) {
      if (runs(thread)) ready_.push_back(&thread);
    }
  }
}

// Resumes each thread that can run once. Threads that are held back run only if no other can; so do
// polling threads, but at random also otherwise. If no thread can run, a copy takes place.
void Launch::run_round() {
  using State = Thread::State;
  ready_.clear();
  if (timing_ == Timing::kAny && !copies_.empty()) land_some();
  if (timing_ == Timing::kAny && has_warpgroups_) run_some_products();
  if (error_) return;
  if (!holds_back_) {
    gather([](const Thread& thread) { return thread.state == State::kReady; });
  } else {
    gather([](const Thread& t) { return t.state == State::kReady && !t.held_back; });
    if (ready_.empty()) gather([](const Thread& t) { return t.state == State::kReady; });
  }
  if (polling_ > 0 && (ready_.empty() || (seed_ != 0 && random_.below(4) == 0))) {
    gather([&](const Thread& thread) {
      return thread.state == State::kPolling && thread.polled != activity_;
    });
  }
  if (ready_.empty()) {
    if (copies_.empty()) {
      error_ = std::make_exception_ptr(Error(describe_deadlock()));
    } else {
      land(seed_ == 0 ? 0 : random_.below(copies_.size()));
    }
    return;
  }
  if (seed_ != 0) {
    for (std::size_t i = ready_.size(); i > 1; --i) {
      std::swap(ready_[i - 1], ready_[random_.below(i)]);
    }
  }
  turns_ = 1;
  begin_turn(*ready_[0]).resume();
}

Fiber& Launch::begin_turn(Thread& thread) {
  polled_ = thread.state == Thread::State::kPolling;
  if (polled_) {
    thread.state = Thread::State::kReady;
    --polling_;
  }
  thread_ = &thread;
  threadIdx = thread.index;
  blockIdx = thread.block->index;
  thread.started = true;
  return *thread.fiber;
}

void Launch::end_turn() {
  // Unsuccessful polls do not count as activity, so that polling threads do not resume each other.
  if (!polled_ || thread_->state != Thread::State::kPolling) ++activity_;
  thread_ = nullptr;
}

// Ends the running thread's turn, begins the next of the round and returns its fiber, or null if
// none is left. Fibers that switch directly to each other take half as many switches as through
// run_round().
Fiber* Launch::next_turn() {
  end_turn();
  if (error_ || turns_ == ready_.size()) return nullptr;
  return &begin_turn(*ready_[turns_++]);
}

// Returns in the next turn of the calling thread.
void Launch::suspend() {
  Fiber::suspend(next_turn());
  if (cancelled_) throw Cancelled();
}

void Launch::let_others_run(const char* function, Site site) {
  if (cancelled_) throw Cancelled();
  Thread& thread = *thread_;
  thread.call = {function, site, Scope::kOthers};
  thread.state = Thread::State::kPolling;
  thread.polled = activity_;
  ++polling_;
  suspend();
}

// What each fiber runs.
void Launch::run_thread() {
  try {
    body_();
  } catch (const Cancelled&) {
  } catch (...) {
    if (!error_) error_ = std::current_exception();
  }
  Thread& thread = *thread_;
  Block& block = *thread.block;
  thread.state = Thread::State::kExited;
  live_lanes_of(thread) &= ~(1u << number(thread) % kWarpSize);
  ++block.exited;
  --live_;
  if (cancelled_ || error_) return;
  // Lanes at __syncwarp() may have waited only for this one.
  Thread* const warp = warp_of(thread);
  for (std::size_t i = 0; i < warp_size(warp); ++i) {
    if (warp[i].state == Thread::State::kWaiting && warp[i].call.scope == Scope::kLiveLanes) {
      complete_warp_call(warp[i]);
    }
  }
  try {
    if (block.warpgroups != nullptr) check_exit(thread);
    check_async_copies(thread);
    leave_cluster(thread);
    if (block.exited == block.threads.size()) check_copies_of(block);
  } catch (...) {
    error_ = std::current_exception();
  }
}

// Ends all started threads by an exception, so that their stacks are clean for the next launch.
void Launch::cancel() {
  cancelled_ = true;
  for (Block& block : blocks_) {
    for (Thread& thread : block.threads) {
      while (thread.started && thread.state != Thread::State::kExited) {
        begin_turn(thread).resume();
      }
    }
  }
}

std::string Launch::place() const {
  if (thread_ == nullptr) return "block " + to_string(blockIdx);
  return describe(*thread_);
}

std::size_t Launch::number(const Thread& thread) { return &thread - thread.block->threads.data(); }

Thread* Launch::warp_of(const Thread& thread) {
  return &thread.block->threads[number(thread) / kWarpSize * kWarpSize];
}

std::size_t Launch::warp_size(const Thread* warp) {
  return std::min<std::size_t>(kWarpSize, warp->block->threads.size() - number(*warp));
}

unsigned& Launch::live_lanes_of(const Thread& thread) {
  return thread.block->live_lanes[number(thread) / kWarpSize];
}

// ---- Collectives ----

// The thread that completes a collective does its work for all threads at once, so that no lane can
// change what another has yet to read.

unsigned Launch::wait(const Call& call) {
  thread_->call = call;
  return wait();
}

unsigned Launch::wait() {
  if (cancelled_) throw Cancelled();
  Thread& thread = *thread_;
  const Call& call = thread.call;
  thread.state = Thread::State::kWaiting;
  bool complete;
  if (call.scope == Scope::kBlock) {
    ++thread.block->in_call;
    complete = complete_block_call(*thread.block);
  } else if (call.scope != Scope::kLanes && call.scope != Scope::kLiveLanes) {
    complete = false;  // the caller has checked
  } else {
    const unsigned absent = call.scope == Scope::kLanes ? call.mask & ~live_lanes() : 0;
    if (absent != 0 || (call.mask >> lane() & call.mask >> call.source_lane & 1) == 0) {
      fail_lanes(call);
    }
    complete = complete_warp_call(thread);
  }
  if (!complete) suspend();
  return thread.result;
}

void Launch::fail_lanes(const Call& call) const {
  if ((call.mask >> lane() & 1) == 0) {
    fail(call_text(call) + " is called by lane " + std::to_string(lane()) +
         ", which the mask does not name");
  }
  const unsigned absent = call.mask & ~live_lanes();
  if (call.scope == Scope::kLanes && absent != 0) {
    fail(call_text(call) + " names absent lanes " + hexadecimal(absent) +
         ": the warp does not have them or they have exited");
  }
  fail(call_text(call) + " reads from lane " + std::to_string(call.source_lane) +
       ", which the mask does not name");
}

void Launch::together(const char* function, Site site, void* own, WarpWork work) {
  constexpr unsigned kAllLanes = 0xffffffff;
  Call call{function, site, Scope::kLanes, kAllLanes, false, lane(), own};
  call.work = work;
  wait(call);
}

// Threads at different barriers keep waiting, which run_round() reports.
bool Launch::complete_block_call(Block& block) {
  std::vector<Thread>& threads = block.threads;
  if (block.in_call < threads.size()) return false;
  unsigned count = 0;
  bool fenced = true;
  for (const Thread& thread : threads) {
    if (!match(thread.call, threads[0].call)) return false;
    count += thread.call.predicate;
    fenced = fenced && thread.fenced;
  }
  block.in_call = 0;
  ++block.syncs;
  for (Thread& thread : threads) {
    thread.met_fenced = fenced;
    thread.fenced = false;
    release(thread, count);
  }
  return true;
}

bool Launch::complete_warp_call(const Thread& caller) {
  const Call& call = caller.call;
  Thread* const warp = warp_of(caller);
  unsigned lanes = 0;
  // Begins with the last lane: lanes mostly arrive in order, and one that has not arrived ends the
  // search.
  for (std::size_t i = warp_size(warp); i-- > 0;) {
    if ((call.mask >> i & 1) == 0) continue;
    const bool exited = warp[i].state == Thread::State::kExited;
    if (exited && call.scope == Scope::kLiveLanes) continue;
    if (warp[i].state != Thread::State::kWaiting || !match(warp[i].call, call)) return false;
    lanes |= 1u << i;
  }
  exchange(warp, lanes);
  return true;
}

void Launch::exchange(Thread* warp, unsigned lanes) {
  ++warp->block->warp_syncs[number(*warp) / kWarpSize];
  const Call& first = warp[__builtin_ctz(lanes)].call;
  if (const WarpWork work = first.work; work != nullptr) {
    void* values[kWarpSize];
    for (int i = 0; i < kWarpSize; ++i) values[i] = warp[i].call.value;
    work(values);
    for (int i = 0; i < kWarpSize; ++i) release(warp[i], 0);
    return;
  }
  if (first.value != nullptr) exchange_values(warp, lanes);
  unsigned ballot = 0;
  std::uint64_t words[kWarpSize];
  for (int i = 0; i < kWarpSize; ++i) {
    if ((lanes >> i & 1) == 0) continue;
    if (warp[i].call.predicate) ballot |= 1u << i;
    words[i] = warp[i].call.word;
  }
  for (int i = 0; i < kWarpSize; ++i) {
    if ((lanes >> i & 1) == 0) continue;
    Call& call = warp[i].call;
    call.word = words[call.source_lane];
    release(warp[i], ballot);
  }
}

void Launch::exchange_values(Thread* warp, unsigned lanes) {
  unsigned char values[kWarpSize][kMaxValueBytes];
  for (int i = 0; i < kWarpSize; ++i) {
    const Call& call = warp[i].call;
    if ((lanes >> i & 1) != 0) std::memcpy(values[i], call.value, call.value_bytes);
  }
  for (int i = 0; i < kWarpSize; ++i) {
    const Call& call = warp[i].call;
    if ((lanes >> i & 1) != 0) std::memcpy(call.value, values[call.source_lane], call.value_bytes);
  }
}

void Launch::release(Thread& thread, unsigned result) {
  thread.result = result;
  thread.state = Thread::State::kReady;
}

// No thread can run: describes which threads wait where, and which have exited.
std::string Launch::describe_deadlock() const {
  struct Group {
    const Thread* first;
    std::size_t others;
  };
  bool in_block_call = false;
  bool in_other_call = false;
  std::string who;
  const Block* first_stuck = nullptr;
  std::size_t stuck_blocks = 0;
  for (const Block& block : blocks_) {
    if (block.exited == block.threads.size()) continue;
    if (first_stuck == nullptr) first_stuck = &block;
    if (++stuck_blocks > 4) continue;
    std::vector<Group> groups;
    for (const Thread& thread : block.threads) {
      const bool exited = thread.state == Thread::State::kExited;
      if (!exited) {
        const Scope scope = thread.call.scope;
        in_block_call = in_block_call || scope == Scope::kBlock;
        in_other_call = in_other_call || (scope != Scope::kBlock && scope != Scope::kLanes &&
                                          scope != Scope::kLiveLanes);
      }
      const auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& candidate) {
        return thread.state == candidate.first->state &&
               (exited || match(thread.call, candidate.first->call));
      });
      if (group == groups.end()) {
        groups.push_back({&thread, 0});
      } else {
        ++group->others;
      }
    }
    if (&block != first_stuck) who += "; block " + to_string(block.index);
    for (const Group& group : groups) {
      const bool exited = group.first->state == Thread::State::kExited;
      who += std::string(group.first == groups[0].first ? ": " : "; ") + "thread " +
             to_string(group.first->index);
      if (group.others > 0) who += " and " + std::to_string(group.others) + " more";
      who +=
          exited ? " exited" : " at " + call_text(group.first->call) + describe_wait(*group.first);
    }
  }
  if (stuck_blocks > 4) who += "; and " + std::to_string(stuck_blocks - 4) + " more blocks";
  return "block " + to_string(first_stuck->index) + ": " +
         (in_other_call   ? "deadlock"
          : in_block_call ? "divergent barrier"
                          : "divergent warp collective") +
         ", no thread can go on" + who;
}

namespace {

// Blocks that run concurrently must fit on the simulated GPU.
void check_residency(const Configuration& configuration) {
  const std::string invalid = "invalid configuration argument: ";
  const unsigned cluster = configuration.cluster;
  if (cluster - 1u >= kMaxClusterBlocks || configuration.grid.x % cluster != 0) {
    throw Error(invalid + "clusters of " + std::to_string(cluster) + " blocks in a grid of " +
                std::to_string(configuration.grid.x) + " along x; clusters have 1 to " +
                std::to_string(kMaxClusterBlocks) + " blocks, and divide the grid");
  }
  if (!configuration.cooperative) return;
  const dim3 block = configuration.block;
  const auto room = static_cast<std::uint64_t>(kMultiprocessors) *
                    resident_blocks(block.x * block.y * block.z, configuration.shared_bytes);
  if (blocks_of(configuration.grid) > room) {
    throw Error(invalid + "a cooperative launch of " +
                std::to_string(blocks_of(configuration.grid)) + " blocks, of which " +
                std::to_string(kMultiprocessors) + " multiprocessors hold " + std::to_string(room) +
                " at a time");
  }
}

void check_configuration(const Configuration& configuration) {
  const dim3 grid = configuration.grid;
  const dim3 block = configuration.block;
  const auto within = [](unsigned extent, unsigned limit) { return extent - 1u < limit; };
  if (within(grid.x, 0x7fffffff) && within(grid.y, 65535) && within(grid.z, 65535) &&
      within(block.x, 1024) && within(block.y, 1024) && within(block.z, 64) &&
      std::uint64_t{block.x} * block.y * block.z <= kMaxBlockThreads &&
      configuration.shared_bytes <= kSharedBytesPerBlock) {
    return check_residency(configuration);
  }
  throw Error("invalid configuration argument: grid " + to_string(to_uint3(grid)) + ", block " +
              to_string(to_uint3(block)) + ", " + std::to_string(configuration.shared_bytes) +
              " bytes of shared memory; the limits are (2147483647, 65535, 65535), "
              "(1024, 1024, 64) with 1024 threads, and " +
              std::to_string(kSharedBytesPerBlock) + " bytes, and no extent may be 0");
}

}  // namespace

void launch(const Configuration& configuration, const std::function<void()>& body) {
  check_configuration(configuration);
  if (active != nullptr) fail("a kernel may not launch another");
#ifdef JAX_GPUOPS_ASAN
  __asan_set_error_report_callback(&report_place);
#endif
  const SubnormalsKept subnormals_kept;
  const dim3 block = configuration.block;
  const std::uint64_t blocks =
      configuration.cooperative ? blocks_of(configuration.grid) : configuration.cluster;
  const Stacks stacks(std::size_t{block.x} * block.y * block.z * blocks);
  Launch(configuration, body).run();
}

int resident_blocks(unsigned threads, std::size_t shared_bytes) {
  constexpr std::size_t kReservedBytes = 1024;  // by CUDA, for each block
  constexpr std::size_t kSharedBytes = kSharedBytesPerBlock + kReservedBytes;
  return static_cast<int>(std::min<std::size_t>(kThreadsPerMultiprocessor / threads,
                                                kSharedBytes / (shared_bytes + kReservedBytes)));
}

void set_schedule_seed(std::uint64_t seed) { global_schedule_seed = seed; }
std::uint64_t schedule_seed() { return global_schedule_seed; }

void set_held_back(int warp, int block) {
  held_back_warp = warp;
  held_back_block = block;
}

void* shared_memory() { return active_launch().shared_memory(); }
std::size_t shared_memory_bytes() { return active_launch().shared_bytes(); }

void fail(const std::string& what) { active_launch().fail(what); }

void fail_width(int width) {
  fail("a shuffle has width " + std::to_string(width) + ", which is not a power of 2 up to 32");
}

void fail_shared_memory(std::size_t used_bytes) {
  fail("the kernel uses " + std::to_string(used_bytes) +
       " bytes of shared memory, but its launch gave it " + std::to_string(shared_memory_bytes()));
}

int block_barrier(const char* function, Site site, bool predicate) {
  Launch& launch = active_launch();
  launch.thread().call = {function, site, Scope::kBlock, 0, predicate};
  return static_cast<int>(launch.wait());
}

void warp_barrier(const char* function, Site site, unsigned mask) {
  Launch& launch = active_launch();
  launch.thread().call = {function, site, Scope::kLiveLanes, mask, false, launch.lane()};
  launch.wait();
}

unsigned warp_vote(const char* function, Site site, unsigned mask, bool predicate) {
  Launch& launch = active_launch();
  launch.thread().call = {function, site, Scope::kLanes, mask, predicate, launch.lane()};
  return launch.wait();
}

std::uint64_t warp_shuffle(const char* function, Site site, unsigned mask, int source_lane,
                           std::uint64_t word, std::size_t bytes) {
  Launch& launch = active_launch();
  Thread& thread = launch.thread();
  thread.call = {function, site, Scope::kLanes, mask, false, source_lane, nullptr, bytes, word};
  launch.wait();
  return thread.call.word;
}

void warp_shuffle(const char* function, Site site, unsigned mask, int source_lane, void* value,
                  std::size_t bytes) {
  Launch& launch = active_launch();
  launch.thread().call = {function, site, Scope::kLanes, mask, false, source_lane, value, bytes};
  launch.wait();
}

void warp_together(const char* function, Site site, void* own, WarpWork work) {
  active_launch().together(function, site, own, work);
}

int lane() { return active_launch().lane(); }
unsigned live_lanes() { return active_launch().live_lanes(); }

}  // namespace simt
}  // namespace JAX_GPUOPS_NAMESPACE
