#include "simt/simt.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "simt/cuda.h"
#include "simt/fiber.h"

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
constexpr std::size_t kMaxSharedBytes = 227 * 1024;
constexpr std::size_t kSharedAlignment = 128;
constexpr std::size_t kMaxValueBytes = 16;

std::atomic<std::uint64_t> global_schedule_seed{0};

// ---- Words for errors ----

std::string to_string(uint3 index) {
  return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " +
         std::to_string(index.z) + ")";
}

std::string hexadecimal(unsigned mask) {
  char text[16];
  std::snprintf(text, sizeof(text), "0x%08x", mask);
  return text;
}

uint3 to_uint3(dim3 extent) { return make_uint3(extent.x, extent.y, extent.z); }

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

// Visits each of `count` blocks once. A grid may have more blocks than fit a table, so the
// shuffled order is a walk with a stride prime to the count.
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

enum class Scope { kBlock, kLiveLanes, kLanes };

// A call that waits for other threads, with what the thread brings to it.
struct Call {
  const char* function;
  Site site;
  Scope scope;
  unsigned mask;  // the lanes that take part, for the scopes within a warp
  bool predicate;
  int source_lane;
  void* value;
  std::size_t value_bytes;
};

// True if the two are the same collective, so that their threads wait for each other.
bool match(const Call& a, const Call& b) {
  return a.site.line == b.site.line && a.mask == b.mask && a.scope == b.scope &&
         a.value_bytes == b.value_bytes && std::strcmp(a.function, b.function) == 0 &&
         std::strcmp(a.site.file, b.site.file) == 0;
}

std::string to_string(const Call& call) {
  std::string text =
      std::string(call.function) + "() at " + call.site.file + ":" + std::to_string(call.site.line);
  if (call.scope != Scope::kBlock) text += " with mask " + hexadecimal(call.mask);
  return text;
}

struct Thread {
  enum class State { kReady, kWaiting, kExited };

  uint3 index;
  State state;
  Call call;        // while it waits
  unsigned result;  // of the last call: lanes, or a number of threads
  Fiber* fiber;
  bool started;
};

// Unwinds the fibers of a launch that has failed; no std::exception, so that a kernel does not
// catch it by chance.
struct Cancelled {};

// The stacks of this host thread, kept because mapping them costs more than most launches.
Fiber& pooled_fiber(std::size_t index) {
  thread_local std::deque<Fiber> fibers;
  while (fibers.size() <= index) fibers.emplace_back();
  return fibers[index];
}

// ---- The launch ----

struct AlignedDelete {
  void operator()(void* memory) const {
    ::operator delete(memory, std::align_val_t(kSharedAlignment));
  }
};

class Launch;
thread_local Launch* active = nullptr;

// The state of one launch. The public functions below find the calling host thread's by `active`.
class Launch {
 public:
  Launch(dim3 grid, dim3 block, std::size_t shared_bytes, const std::function<void()>& body);
  ~Launch() { active = nullptr; }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  void run();

  // What the running thread calls.
  unsigned wait(const Call& call);
  [[noreturn]] void fail(const std::string& what) const { throw Error(place() + ": " + what); }
  std::string place() const;
  int lane() const { return static_cast<int>(number(*thread_) % kWarpSize); }
  unsigned live_lanes() const;

  void* shared_memory() const { return shared_memory_.get(); }
  std::size_t shared_bytes() const { return shared_bytes_; }

 private:
  void run_block();
  void run_round();
  void resume(Thread& thread);
  void run_thread();
  void cancel();

  bool complete_block_call();
  bool complete_warp_call(const Thread& caller);
  void exchange(Thread* warp, unsigned lanes);
  void release(Thread& thread, unsigned result);
  std::string describe_deadlock() const;

  std::size_t number(const Thread& thread) const { return &thread - threads_.data(); }
  std::size_t first_of_warp(const Thread& thread) const {
    return number(thread) / kWarpSize * kWarpSize;
  }

  const std::function<void()>& body_;
  const std::size_t shared_bytes_;
  const std::unique_ptr<void, AlignedDelete> shared_memory_;
  const std::uint64_t seed_;
  Random random_;
  std::vector<Thread> threads_;
  std::vector<Thread*> ready_;  // of this round
  std::size_t in_block_call_ = 0;
  std::size_t exited_ = 0;
  Thread* thread_ = nullptr;  // the running one
  std::exception_ptr error_;
  bool cancelled_ = false;
};

#ifdef JAX_GPUOPS_ASAN
void report_place(const char*) {
  if (active == nullptr) return;
  std::fprintf(stderr, "The access above was made by %s.\n", active->place().c_str());
}
#endif

Launch::Launch(dim3 grid, dim3 block, std::size_t shared_bytes, const std::function<void()>& body)
    : body_(body),
      shared_bytes_(shared_bytes),
      shared_memory_(::operator new(shared_bytes, std::align_val_t(kSharedAlignment))),
      seed_(schedule_seed()),
      random_(seed_),
      threads_(std::size_t{block.x} * block.y * block.z) {
  active = this;
  gridDim = grid;
  blockDim = block;
  for (std::size_t i = 0; i < threads_.size(); ++i) {
    const auto n = static_cast<unsigned>(i);
    threads_[i].index = make_uint3(n % block.x, n / block.x % block.y, n / block.x / block.y);
  }
}

void Launch::run() {
  for (std::size_t i = 0; i < threads_.size(); ++i) threads_[i].fiber = &pooled_fiber(i);
  const std::uint64_t blocks = std::uint64_t{gridDim.x} * gridDim.y * gridDim.z;
  BlockOrder order(blocks, seed_ != 0, random_);
  for (std::uint64_t i = 0; i < blocks; ++i) {
    const std::uint64_t block = order.next();
    blockIdx = make_uint3(static_cast<unsigned>(block % gridDim.x),
                          static_cast<unsigned>(block / gridDim.x % gridDim.y),
                          static_cast<unsigned>(block / gridDim.x / gridDim.y));
    run_block();
  }
}

void Launch::run_block() {
  std::memset(shared_memory_.get(), 0xff, shared_bytes_);
  exited_ = 0;
  in_block_call_ = 0;
  for (Thread& thread : threads_) {
    thread.state = Thread::State::kReady;
    thread.started = false;
    thread.fiber->assign([](void* launch) { static_cast<Launch*>(launch)->run_thread(); }, this);
  }
  while (exited_ < threads_.size() && !error_) run_round();
  if (error_) {
    cancel();
    std::rethrow_exception(error_);
  }
}

// Resumes each thread that can run once.
void Launch::run_round() {
  ready_.clear();
  for (Thread& thread : threads_) {
    if (thread.state == Thread::State::kReady) ready_.push_back(&thread);
  }
  if (ready_.empty()) {
    error_ = std::make_exception_ptr(Error(describe_deadlock()));
    return;
  }
  if (seed_ != 0) {
    for (std::size_t i = ready_.size(); i > 1; --i) {
      std::swap(ready_[i - 1], ready_[random_.below(i)]);
    }
  }
  for (Thread* thread : ready_) {
    resume(*thread);
    if (error_) return;
  }
}

void Launch::resume(Thread& thread) {
  thread_ = &thread;
  threadIdx = thread.index;
  thread.started = true;
  thread.fiber->resume();
  thread_ = nullptr;
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
  thread.state = Thread::State::kExited;
  ++exited_;
  // Lanes at __syncwarp() may have waited for this one alone.
  const std::size_t begin = first_of_warp(thread);
  const std::size_t end = std::min(begin + kWarpSize, threads_.size());
  for (std::size_t i = begin; i < end && !cancelled_; ++i) {
    const Thread& other = threads_[i];
    if (other.state == Thread::State::kWaiting && other.call.scope == Scope::kLiveLanes) {
      complete_warp_call(other);
    }
  }
}

// Runs the threads that are halfway to their ends by an exception, so that their stacks are clean
// for the next launch.
void Launch::cancel() {
  cancelled_ = true;
  for (Thread& thread : threads_) {
    while (thread.started && thread.state != Thread::State::kExited) resume(thread);
  }
}

std::string Launch::place() const {
  std::string text = "block " + to_string(blockIdx);
  if (thread_ != nullptr) text += ", thread " + to_string(thread_->index);
  return text;
}

unsigned Launch::live_lanes() const {
  unsigned lanes = 0;
  const std::size_t begin = first_of_warp(*thread_);
  const std::size_t end = std::min(begin + kWarpSize, threads_.size());
  for (std::size_t i = begin; i < end; ++i) {
    if (threads_[i].state != Thread::State::kExited) lanes |= 1u << (i - begin);
  }
  return lanes;
}

// ---- Collectives ----

// The thread that completes a collective does its work for all, at once: no lane can then change
// what another has yet to read.

unsigned Launch::wait(const Call& call) {
  if (cancelled_) throw Cancelled();
  Thread& thread = *thread_;
  thread.call = call;
  thread.state = Thread::State::kWaiting;
  bool complete;
  if (call.scope == Scope::kBlock) {
    ++in_block_call_;
    complete = complete_block_call();
  } else {
    if ((call.mask >> lane() & 1) == 0) {
      fail(to_string(call) + " is called by lane " + std::to_string(lane()) +
           ", which the mask does not name");
    }
    const unsigned absent = call.mask & ~live_lanes();
    if (call.scope == Scope::kLanes && absent != 0) {
      fail(to_string(call) + " names absent lanes " + hexadecimal(absent) +
           ": the warp does not have them or they have exited");
    }
    if ((call.mask >> call.source_lane & 1) == 0) {
      fail(to_string(call) + " reads from lane " + std::to_string(call.source_lane) +
           ", which the mask does not name");
    }
    complete = complete_warp_call(thread);
  }
  if (!complete) {
    Fiber::suspend();
    if (cancelled_) throw Cancelled();
  }
  return thread.result;
}

// Threads at different barriers all stay waiting, which run_round() then finds.
bool Launch::complete_block_call() {
  if (in_block_call_ < threads_.size()) return false;
  unsigned count = 0;
  for (const Thread& thread : threads_) {
    if (!match(thread.call, threads_[0].call)) return false;
    count += thread.call.predicate;
  }
  in_block_call_ = 0;
  for (Thread& thread : threads_) release(thread, count);
  return true;
}

bool Launch::complete_warp_call(const Thread& caller) {
  const Call& call = caller.call;
  Thread* const warp = &threads_[first_of_warp(caller)];
  const std::size_t size = std::min<std::size_t>(kWarpSize, &threads_.back() + 1 - warp);
  unsigned lanes = 0;
  for (std::size_t i = 0; i < size; ++i) {
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
  unsigned ballot = 0;
  unsigned char values[kWarpSize][kMaxValueBytes];
  for (int i = 0; i < kWarpSize; ++i) {
    if ((lanes >> i & 1) == 0) continue;
    const Call& call = warp[i].call;
    if (call.predicate) ballot |= 1u << i;
    if (call.value_bytes != 0) std::memcpy(values[i], call.value, call.value_bytes);
  }
  for (int i = 0; i < kWarpSize; ++i) {
    if ((lanes >> i & 1) == 0) continue;
    const Call& call = warp[i].call;
    if (call.value_bytes != 0) std::memcpy(call.value, values[call.source_lane], call.value_bytes);
    release(warp[i], ballot);
  }
}

void Launch::release(Thread& thread, unsigned result) {
  thread.result = result;
  thread.state = Thread::State::kReady;
}

// No thread can run: says who waits where, and who has left.
std::string Launch::describe_deadlock() const {
  struct Group {
    const Thread* first;
    std::size_t others;
  };
  std::vector<Group> groups;
  for (const Thread& thread : threads_) {
    const auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& candidate) {
      return thread.state == candidate.first->state &&
             (thread.state == Thread::State::kExited || match(thread.call, candidate.first->call));
    });
    if (group == groups.end()) {
      groups.push_back({&thread, 0});
    } else {
      ++group->others;
    }
  }
  std::string text = "block " + to_string(blockIdx) + ": divergent " +
                     (in_block_call_ > 0 ? "barrier" : "warp collective") + ", no thread can go on";
  for (const Group& group : groups) {
    const bool exited = group.first->state == Thread::State::kExited;
    text += std::string(group.first == groups[0].first ? ": " : "; ") + "thread " +
            to_string(group.first->index);
    if (group.others > 0) text += " and " + std::to_string(group.others) + " more";
    text += exited ? " exited" : " at " + to_string(group.first->call);
  }
  return text;
}

void check_configuration(dim3 grid, dim3 block, std::size_t shared_bytes) {
  const auto within = [](unsigned extent, unsigned limit) { return extent - 1u < limit; };
  if (within(grid.x, 0x7fffffff) && within(grid.y, 65535) && within(grid.z, 65535) &&
      within(block.x, 1024) && within(block.y, 1024) && within(block.z, 64) &&
      std::uint64_t{block.x} * block.y * block.z <= kMaxBlockThreads &&
      shared_bytes <= kMaxSharedBytes) {
    return;
  }
  throw Error("invalid configuration argument: grid " + to_string(to_uint3(grid)) + ", block " +
              to_string(to_uint3(block)) + ", " + std::to_string(shared_bytes) +
              " bytes of shared memory; the limits are (2147483647, 65535, 65535), "
              "(1024, 1024, 64) with 1024 threads, and " +
              std::to_string(kMaxSharedBytes) + " bytes, and no extent may be 0");
}

Launch& active_launch() {
  if (active == nullptr) throw Error("a function for kernels was called outside a launch");
  return *active;
}

}  // namespace

void launch(dim3 grid, dim3 block, std::size_t shared_bytes, const std::function<void()>& body) {
  check_configuration(grid, block, shared_bytes);
  if (active != nullptr) fail("a kernel may not launch another");
#ifdef JAX_GPUOPS_ASAN
  __asan_set_error_report_callback(&report_place);
#endif
  const SubnormalsKept subnormals_kept;
  Launch(grid, block, shared_bytes, body).run();
}

void set_schedule_seed(std::uint64_t seed) { global_schedule_seed = seed; }
std::uint64_t schedule_seed() { return global_schedule_seed; }

void* shared_memory() { return active_launch().shared_memory(); }
std::size_t shared_memory_bytes() { return active_launch().shared_bytes(); }

void fail(const std::string& what) { active_launch().fail(what); }

int block_barrier(const char* function, Site site, bool predicate) {
  const Call call{function, site, Scope::kBlock, 0, predicate, 0, nullptr, 0};
  return static_cast<int>(active_launch().wait(call));
}

void warp_barrier(const char* function, Site site, unsigned mask) {
  Launch& launch = active_launch();
  launch.wait({function, site, Scope::kLiveLanes, mask, false, launch.lane(), nullptr, 0});
}

unsigned warp_vote(const char* function, Site site, unsigned mask, bool predicate) {
  Launch& launch = active_launch();
  return launch.wait({function, site, Scope::kLanes, mask, predicate, launch.lane(), nullptr, 0});
}

void warp_shuffle(const char* function, Site site, unsigned mask, int source_lane, void* value,
                  std::size_t bytes) {
  active_launch().wait({function, site, Scope::kLanes, mask, false, source_lane, value, bytes});
}

int lane() { return active_launch().lane(); }
unsigned live_lanes() { return active_launch().live_lanes(); }

}  // namespace simt
}  // namespace JAX_GPUOPS_NAMESPACE
