// What Hopper adds to launches: clusters, mbarriers and asynchronous copies.

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "simt/launch.h"

#ifdef JAX_GPUOPS_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace JAX_GPUOPS_NAMESPACE {
namespace simt {
namespace {

constexpr std::size_t kBulkAlignment = 16;
constexpr unsigned kMostArrivals = (1u << 20) - 1;

std::string hexadecimal(const void* pointer) {
  char text[24];
  std::snprintf(text, sizeof(text), "%p", pointer);
  return text;
}

bool is_multiple(const void* pointer, std::size_t of) {
  return reinterpret_cast<std::uintptr_t>(pointer) % of == 0;
}

// What an mbarrier holds in shared memory.
std::uint64_t mark(const void* barrier) {
  return 0x6d62617272696572 ^ reinterpret_cast<std::uintptr_t>(barrier);
}

// Where something lies in its block's shared memory, for errors.
std::string offset_text(const void* pointer, const Block& block) {
  return "byte " + std::to_string(static_cast<const char*>(pointer) -
                                  reinterpret_cast<const char*>(block.shared));
}

}  // namespace

std::string bytes_text(std::int64_t bytes) { return std::to_string(bytes) + " bytes"; }

std::string mbarrier_text(const void* barrier, const Block& block) {
  return "the mbarrier at " + offset_text(barrier, block) + " of shared memory";
}

void take_memory(void* memory, std::size_t bytes) {
  std::memset(memory, 0xff, bytes);
#ifdef JAX_GPUOPS_ASAN
  __asan_poison_memory_region(memory, bytes);
#endif
}

void release_memory([[maybe_unused]] void* memory, [[maybe_unused]] std::size_t bytes) {
#ifdef JAX_GPUOPS_ASAN
  __asan_unpoison_memory_region(memory, bytes);
#endif
}

std::string operator+(const Caller& caller, const std::string& what) {
  return describe(caller.thread) + ": " + to_string(caller.function, caller.site) + what;
}

std::string copy_text(const Copy& copy) {
  return Caller{*copy.issuer, copy.function, copy.site} + "";
}

std::string describe(const Thread& thread) {
  return "block " + to_string(thread.block->index) + ", thread " + to_string(thread.index);
}

std::string Launch::describe_wait(const Thread& thread) const {
  const Block& block = *thread.block;
  if (thread.call.scope == Scope::kCluster) {
    const Cluster& cluster = *block.cluster;
    return ", for " + std::to_string(cluster.live - cluster.arrived) +
           " threads of the cluster that have not arrived";
  }
  if (thread.call.scope != Scope::kMbarrier) return describe_wait_of_warpgroup(thread);
  const MbarrierState& state = block.mbarriers.at(thread.call.value);
  return " for phase " + std::to_string(thread.call.parity) + " of " +
         mbarrier_text(thread.call.value, block) + ", of which " + std::to_string(state.phase) +
         " phases are over; in the next " + std::to_string(state.missing) + " of " +
         std::to_string(state.arrivals) + " arrivals and " + bytes_text(state.bytes) +
         " are missing";
}

// ---- Clusters ----

void Launch::cluster_arrive(const char* function, Site site) {
  if (cancelled_) throw Cancelled();
  Thread& thread = *thread_;
  if (thread.arrivals != thread.waits) {
    throw Error(Caller{thread, function, site} +
                ": the thread has arrived before, and not waited since");
  }
  ++thread.arrivals;
  Cluster& cluster = *thread.block->cluster;
  ++cluster.arrived;
  complete_cluster_barrier(cluster);
}

void Launch::cluster_wait(const char* function, Site site) {
  if (cancelled_) throw Cancelled();
  Thread& thread = *thread_;
  if (thread.arrivals == thread.waits) {
    throw Error(Caller{thread, function, site} +
                ": the thread has not arrived at the cluster's barrier");
  }
  if (thread.block->cluster->phase < thread.arrivals) wait({function, site, Scope::kCluster});
  ++thread.waits;
}

// The barrier completes when all threads that have not exited have arrived. No thread of a warp may
// exit without having arrived with the others of its warp.
void Launch::complete_cluster_barrier(Cluster& cluster) {
  if (cluster.live == 0 || cluster.arrived < cluster.live) return;
  ++cluster.phase;
  cluster.arrived = 0;
  for (Block* const block : cluster.blocks) {
    std::vector<Thread>& threads = block->threads;
    for (Thread& thread : threads) {
      if (thread.state == Thread::State::kExited && thread.arrivals < cluster.phase) {
        Thread* const warp = warp_of(thread);
        for (std::size_t i = 0; i < warp_size(warp); ++i) {
          if (warp[i].arrivals < cluster.phase) continue;
          throw Error(describe(thread) +
                      ": exited without arriving at a barrier of the cluster, where thread " +
                      to_string(warp[i].index) + " of its warp did");
        }
      }
      if (thread.state == Thread::State::kWaiting && thread.call.scope == Scope::kCluster) {
        release(thread, 0);
      }
    }
  }
}

void Launch::leave_cluster(Thread& thread) {
  Cluster& cluster = *thread.block->cluster;
  --cluster.live;
  if (thread.arrivals > cluster.phase) --cluster.arrived;
  complete_cluster_barrier(cluster);
}

// ---- Mbarriers ----

void Launch::check_shared(const Caller& caller, const void* pointer, std::size_t bytes) const {
  const auto* const begin = static_cast<const char*>(shared_memory());
  const auto* const from = static_cast<const char*>(pointer);
  if (from >= begin && from + bytes <= begin + shared_bytes()) return;
  throw Error(caller + ": " + bytes_text(static_cast<std::int64_t>(bytes)) + " at " +
              hexadecimal(pointer) + " are not in the block's shared memory");
}

void Launch::mbarrier_init(std::uint64_t* barrier, unsigned arrivals, Site site) {
  if (cancelled_) throw Cancelled();
  const Thread& thread = *thread_;
  Block& block = *thread.block;
  const Caller caller{*thread_, "initialise", site};
  check_shared(caller, barrier, sizeof(*barrier));
  if (!is_multiple(barrier, sizeof(*barrier))) {
    throw Error(caller + ": " + mbarrier_text(barrier, block) + " is not at a multiple of 8 bytes");
  }
  if (arrivals - 1u >= kMostArrivals) {
    throw Error(caller + ": an mbarrier has 1 to " + std::to_string(kMostArrivals) +
                " arrivals in a phase, not " + std::to_string(arrivals));
  }
  MbarrierState state;
  state.arrivals = state.missing = arrivals;
  state.owner = &thread;
  state.block_syncs = block.syncs;
  state.warp_syncs = block.warp_syncs[number(thread) / kWarpSize];
  state.cluster_arrivals = thread.arrivals;
  if (!block.mbarriers.emplace(barrier, std::move(state)).second) {
    throw Error(caller + ": " + mbarrier_text(barrier, block) + " is initialised already");
  }
  *barrier = mark(barrier);
}

// The mbarrier in `block` for the thread `user`, which must be able to see it.
MbarrierState& Launch::find_mbarrier(const Caller& caller, std::uint64_t* barrier, Block& block,
                                     const Thread& user) {
  const auto found = block.mbarriers.find(barrier);
  if (found == block.mbarriers.end()) {
    throw Error(caller + ": " + mbarrier_text(barrier, block) + " is not initialised");
  }
  MbarrierState& state = found->second;
  if (*barrier != mark(barrier)) {
    throw Error(caller + ": " + mbarrier_text(barrier, block) + " was overwritten");
  }
  const Thread& owner = *state.owner;
  const bool met_in_cluster = user.waits > state.cluster_arrivals;
  const bool met_in_block = user.block == &block && block.syncs != state.block_syncs;
  const bool met_in_warp = user.block == &block &&
                           number(user) / kWarpSize == number(owner) / kWarpSize &&
                           block.warp_syncs[number(owner) / kWarpSize] != state.warp_syncs;
  if (&user != &owner && !met_in_cluster && !met_in_block && !met_in_warp) {
    throw Error(caller + ": " + mbarrier_text(barrier, block) +
                " may not be visible yet: no barrier lies between this and its initialisation by " +
                describe(owner));
  }
  return state;
}

void Launch::end_phase(MbarrierState& state) {
  if (state.missing != 0 || state.bytes != 0) return;
  ++state.phase;
  state.missing = state.arrivals;
  ++activity_;
  for (Thread* const thread : state.waiting) release(*thread, 0);
  state.waiting.clear();
}

void Launch::mbarrier_arrive(const char* function, Site site, std::uint64_t* barrier,
                             unsigned bytes) {
  if (cancelled_) throw Cancelled();
  Block& block = *thread_->block;
  const Caller caller{*thread_, function, site};
  arrive(caller, find_mbarrier(caller, barrier, block, *thread_), barrier, block, bytes);
}

void Launch::arrive(const Caller& caller, MbarrierState& state, const void* barrier,
                    const Block& block, unsigned bytes) {
  if (state.missing == 0) {
    throw Error(caller + ": all " + std::to_string(state.arrivals) + " arrivals of phase " +
                std::to_string(state.phase) + " of " + mbarrier_text(barrier, block) +
                " have been made; it waits for " + bytes_text(state.bytes));
  }
  state.bytes += bytes;
  --state.missing;
  if (state.missing == 0 && state.bytes < 0) {
    throw Error(caller + ": too few bytes are expected in phase " + std::to_string(state.phase) +
                " of " + mbarrier_text(barrier, block) + ": copies have brought " +
                bytes_text(-state.bytes) + " more");
  }
  end_phase(state);
}

void Launch::mbarrier_wait(const char* function, Site site, std::uint64_t* barrier,
                           unsigned parity) {
  if (cancelled_) throw Cancelled();
  Block& block = *thread_->block;
  const Caller caller{*thread_, function, site};
  MbarrierState& state = find_mbarrier(caller, barrier, block, *thread_);
  if (parity > 1) throw Error(caller + ": the parity of a phase is 0 or 1");
  if (state.phase % 2 != parity) return;
  state.waiting.push_back(thread_);
  Call call{function, site, Scope::kMbarrier};
  call.value = barrier;
  call.parity = parity;
  wait(call);
}

unsigned Launch::shared_address(const void* pointer, Site site) const {
  check_shared({*thread_, "shared_address", site}, pointer, 0);
  return kFirstSharedAddress +
         static_cast<unsigned>(shared_offset_ +
                               static_cast<std::size_t>(static_cast<const unsigned char*>(pointer) -
                                                        thread_->block->shared));
}

unsigned Launch::shared_address_in_block(const void* local, int rank, Site site) const {
  block_of_cluster({*thread_, "shared_address_in_block", site}, rank);
  return shared_address(local, site) + ((static_cast<unsigned>(rank) + 1) << kRankShift);
}

// The host memory of an address in the calling block's shared memory.
unsigned char* Launch::at_shared_address(const Caller& caller, unsigned address,
                                         std::size_t bytes) const {
  const std::size_t first = kFirstSharedAddress + shared_offset_;
  if (address < first || address + bytes > first + shared_bytes()) {
    char text[16];
    std::snprintf(text, sizeof(text), "%#x", address);
    throw Error(caller + ": " + bytes_text(static_cast<std::int64_t>(bytes)) + " at address " +
                text + " are not in the block's shared memory");
  }
  return thread_->block->shared + (address - first);
}

// Block `rank` of the cluster, which must have started and not exited.
Block& Launch::block_of_cluster(const Caller& caller, int rank) const {
  const Thread& thread = *thread_;
  const Cluster& cluster = *thread.block->cluster;
  if (rank < 0 || static_cast<std::size_t>(rank) >= cluster.blocks.size()) {
    throw Error(caller + ": there is no block " + std::to_string(rank) + " in a cluster of " +
                std::to_string(cluster.blocks.size()));
  }
  Block& target = *cluster.blocks[static_cast<std::size_t>(rank)];
  if (target.exited == target.threads.size()) {
    throw Error(caller + ": a remote access to block " + to_string(target.index) +
                ", which has exited");
  }
  if (&target != thread.block && thread.waits == 0) {
    throw Error(caller + ": a remote access to block " + to_string(target.index) +
                ", which may not have started: the thread has waited at no barrier of the cluster");
  }
  return target;
}

void* Launch::in_block(const void* local, const Block& block) const {
  return block.shared + (static_cast<const unsigned char*>(local) - thread_->block->shared);
}

void Launch::mbarrier_arrive_at(const char* function, Site site, unsigned address) {
  if (cancelled_) throw Cancelled();
  const Caller caller{*thread_, function, site};
  const int rank = static_cast<int>(address >> kRankShift) - 1;
  auto* const local = reinterpret_cast<std::uint64_t*>(
      at_shared_address(caller, address & ((1u << kRankShift) - 1), sizeof(std::uint64_t)));
  if (rank < 0 || rank == static_cast<int>(thread_->block->rank)) {
    return mbarrier_arrive(function, site, local, 0);
  }
  Block& target = block_of_cluster(caller, rank);
  auto* const remote = static_cast<std::uint64_t*>(in_block(local, target));
  find_mbarrier(caller, remote, target, *thread_);
  issue({Copy::Kind::kArrival, function, site, thread_, nullptr, nullptr, {}, &target, remote});
}

// ---- Copies ----

namespace {

// Whether threads must not access the destination of the copy.
bool takes_memory(const Copy& copy) {
  return copy.kind != Copy::Kind::kWord && copy.kind != Copy::Kind::kArrival;
}

// Whether the source is unchanged since the copy was issued.
bool holds_the_same(const Copy& copy) {
  if (copy.from != nullptr) return std::memcmp(copy.from, copy.data.data(), copy.data.size()) == 0;
  return copy.box == nullptr || read_box(*copy.box) == copy.data;
}

void release_destination(const Copy& copy) {
  if (copy.kind == Copy::Kind::kToGlobal && copy.box != nullptr) {
    release_box(*copy.box);
  } else if (takes_memory(copy)) {
    release_memory(copy.to, copy.data.size());
  }
}

}  // namespace

// Adds a pending copy, and takes its destination from the threads.
void Launch::issue(Copy copy) {
  if (copy.kind == Copy::Kind::kToGlobal && copy.box != nullptr) {
    take_box(*copy.box);
  } else if (takes_memory(copy)) {
    if (copy.block != nullptr && copy.block->warpgroups != nullptr) check_not_read(copy);
    take_memory(copy.to, copy.data.size());
  }
  copies_.push_back(std::move(copy));
  if (timing_ == Timing::kEarly) land(copies_.size() - 1);
}

// Performs a pending copy.
void Launch::land(std::size_t position) {
  Copy copy = std::move(copies_[position]);
  copies_.erase(copies_.begin() + static_cast<std::ptrdiff_t>(position));
  ++activity_;
  const std::size_t bytes = copy.data.size();
  try {
    if (!holds_the_same(copy)) {
      throw Error(copy_text(copy) + ": the source was written to while the copy was under way");
    }
    if (copy.kind == Copy::Kind::kToGlobal) {
      Thread& thread = *copy.issuer;
      if (thread.state == Thread::State::kWaiting && thread.call.scope == Scope::kCopies &&
          !reads_under_way(thread, thread.call.number)) {
        release(thread, 0);
      }
      written_.push_back(std::move(copy));
      if (timing_ != Timing::kLate) finish_copies();
      return;
    }
    if (copy.kind == Copy::Kind::kArrival) {
      const Caller caller{*copy.issuer, copy.function, copy.site};
      return arrive(caller, find_mbarrier(caller, copy.barrier, *copy.block, *copy.issuer),
                    copy.barrier, *copy.block, 0);
    }
    if (takes_memory(copy)) {
      release_memory(copy.to, bytes);
      const auto* const at = static_cast<const unsigned char*>(copy.to);
      if (std::any_of(at, at + bytes, [](unsigned char byte) { return byte != 0xff; })) {
        throw Error(copy_text(copy) + ": the destination was written to before the copy landed");
      }
    }
    std::memcpy(copy.to, copy.data.data(), bytes);
    if (copy.barrier != nullptr) count_bytes(copy);
  } catch (...) {
    release_destination(copy);  // it is no longer in copies_
    if (thread_ != nullptr) throw;
    error_ = std::current_exception();
  }
}

void Launch::land_some() {
  for (std::size_t i = copies_.size(); i-- > 0 && !error_;) {
    if (random_.below(4) == 0) land(i);
  }
}

// Completes the copies to global memory that have read their source; after the last thread has
// exited, also all pending copies.
void Launch::finish_copies() {
  for (const Copy& copy : written_) {
    release_destination(copy);
    if (copy.box != nullptr) {
      write_box(*copy.box, copy.data.data());
    } else {
      std::memcpy(copy.to, copy.data.data(), copy.data.size());
    }
  }
  written_.clear();
  if (live_ > 0) return;
  while (!copies_.empty()) land(0);
}

void Launch::drop_copies() {
  for (const std::deque<Copy>* const copies : {&copies_, &written_}) {
    for (const Copy& copy : *copies) release_destination(copy);
  }
}

void Launch::count_bytes(const Copy& copy) {
  Block& block = *copy.block;
  const Caller caller{*copy.issuer, copy.function, copy.site};
  MbarrierState& state = find_mbarrier(caller, copy.barrier, block, *copy.issuer);
  state.bytes -= static_cast<std::int64_t>(copy.data.size());
  if (state.missing == 0 && state.bytes < 0) {
    throw Error(caller + ": too few bytes are expected in phase " + std::to_string(state.phase) +
                " of " + mbarrier_text(copy.barrier, block) + " of block " +
                to_string(block.index) + ": the copy has brought " + bytes_text(-state.bytes) +
                " more");
  }
  end_phase(state);
}

// The block has exited: nothing may use its shared memory any more.
void Launch::check_copies_of(const Block& block) const {
  for (const Copy& copy : copies_) {
    if (copy.block != &block) continue;
    throw Error(copy_text(copy) +
                (copy.kind == Copy::Kind::kToCluster || copy.kind == Copy::Kind::kArrival
                     ? ": a remote access to block " + to_string(block.index) + ", which has exited"
                     : ": the block exited while the copy was under way"));
  }
}

namespace {

void check_bulk(const Caller& caller, const void* to, const void* from, std::size_t bytes) {
  const auto check = [&](const char* what, std::uintptr_t value, const std::string& text) {
    if (value % kBulkAlignment == 0) return;
    throw Error(caller + ": misaligned bulk copy: the " + what + ", " + text +
                ", is not a multiple of 16");
  };
  check("destination", reinterpret_cast<std::uintptr_t>(to), hexadecimal(to));
  check("source", reinterpret_cast<std::uintptr_t>(from), hexadecimal(from));
  check("size", bytes, bytes_text(static_cast<std::int64_t>(bytes)));
}

std::vector<unsigned char> bytes_at(const void* from, std::size_t bytes) {
  const auto* const begin = static_cast<const unsigned char*>(from);
  return {begin, begin + bytes};
}

}  // namespace

void Launch::bulk_read(const char* function, Site site, void* to, const void* from,
                       std::size_t bytes, std::uint64_t* barrier) {
  if (cancelled_) throw Cancelled();
  Block& block = *thread_->block;
  const Caller caller{*thread_, function, site};
  check_bulk(caller, to, from, bytes);
  check_shared(caller, to, bytes);
  find_mbarrier(caller, barrier, block, *thread_);
  issue({Copy::Kind::kToShared, function, site, thread_, to, from, bytes_at(from, bytes), &block,
         barrier});
}

void Launch::bulk_write(const char* function, Site site, void* to, const void* from,
                        std::size_t bytes) {
  if (cancelled_) throw Cancelled();
  Block& block = *thread_->block;
  const Caller caller{*thread_, function, site};
  check_bulk(caller, to, from, bytes);
  check_shared(caller, from, bytes);
  check_fenced(caller);
  issue({Copy::Kind::kToGlobal, function, site, thread_, to, from, bytes_at(from, bytes), &block,
         nullptr, nullptr, ++thread_->writes});
}

// Throws unless the calling thread may issue copies of what it and others wrote to shared memory.
void Launch::check_fenced(const Caller& caller) const {
  if (thread_->fenced || thread_->met_fenced) return;
  throw Error(
      caller +
      ": not all threads that met at the last barrier had called finish_writes_before_copies(), "
      "nor has this one since, so that the copy may not see what they wrote");
}

// Whether any of the thread's copies but the last `pending` has yet to read its source.
bool Launch::reads_under_way(const Thread& thread, std::uint64_t pending) const {
  return std::any_of(copies_.begin(), copies_.end(), [&](const Copy& copy) {
    return copy.kind == Copy::Kind::kToGlobal && copy.issuer == &thread &&
           copy.number + pending <= thread.writes;
  });
}

void Launch::bulk_wait_read(const char* function, Site site, unsigned pending) {
  if (cancelled_) throw Cancelled();
  if (!reads_under_way(*thread_, pending)) return;
  Call call{function, site, Scope::kCopies};
  call.number = pending;
  wait(call);
}

void Launch::async_store(const char* function, Site site, const void* value, void* to,
                         std::size_t bytes, std::uint64_t* barrier, int rank) {
  if (cancelled_) throw Cancelled();
  const Thread& thread = *thread_;
  const Caller caller{*thread_, function, site};
  check_shared(caller, to, bytes);
  check_shared(caller, barrier, sizeof(*barrier));
  if (!is_multiple(to, bytes)) {
    throw Error(caller + ": the destination, " + offset_text(to, *thread.block) +
                " of shared memory, is not at a multiple of " + bytes_text(bytes));
  }
  Block& target = block_of_cluster(caller, rank);
  auto* const remote = static_cast<std::uint64_t*>(in_block(barrier, target));
  find_mbarrier(caller, remote, target, thread);
  issue({Copy::Kind::kToCluster, function, site, thread_, in_block(to, target), nullptr,
         bytes_at(value, bytes), &target, remote});
}

// Words stored to the same address arrive in order.
void Launch::relaxed_store(void* to, const void* value, unsigned bytes, Site site) {
  if (cancelled_) throw Cancelled();
  finish_words(to, nullptr);
  issue({Copy::Kind::kWord, "post", site, thread_, to, nullptr, bytes_at(value, bytes), nullptr,
         nullptr});
  ++activity_;
}

void Launch::relaxed_load(void* value, const void* from, unsigned bytes) {
  if (cancelled_) throw Cancelled();
  finish_words(from, thread_);
  std::memcpy(value, from, bytes);
}

// Performs pending stores of words to an address, by one thread or by any.
void Launch::finish_words(const void* at, const Thread* issuer) {
  for (std::size_t i = 0; i < copies_.size();) {
    const Copy& copy = copies_[i];
    if (copy.to == at && (issuer == nullptr || copy.issuer == issuer)) {
      land(i);
    } else {
      ++i;
    }
  }
}

// ---- For code in kernels ----

void let_others_run(const char* function, Site site) {
  active_launch().let_others_run(function, site);
}

void relaxed_store(void* to, const void* value, unsigned bytes, Site site) {
  active_launch().relaxed_store(to, value, bytes, site);
}
void relaxed_load(void* value, const void* from, unsigned bytes) {
  active_launch().relaxed_load(value, from, bytes);
}
void relaxed_add(std::uint32_t* counter, std::uint32_t value) {
  active_launch().add_activity();
  *counter += value;
}

int cluster_rank() { return static_cast<int>(active_launch().thread().block->rank); }
void cluster_arrive(const char* function, Site site) {
  active_launch().cluster_arrive(function, site);
}
void cluster_wait(const char* function, Site site) { active_launch().cluster_wait(function, site); }

void mbarrier_init(std::uint64_t* barrier, unsigned arrivals, Site site) {
  active_launch().mbarrier_init(barrier, arrivals, site);
}
void mbarrier_arrive(const char* function, Site site, std::uint64_t* barrier, unsigned bytes) {
  active_launch().mbarrier_arrive(function, site, barrier, bytes);
}
void mbarrier_wait(const char* function, Site site, std::uint64_t* barrier, unsigned parity) {
  active_launch().mbarrier_wait(function, site, barrier, parity);
}

void bulk_read(const char* function, Site site, void* to, const void* from, std::size_t bytes,
               std::uint64_t* barrier) {
  active_launch().bulk_read(function, site, to, from, bytes, barrier);
}
void proxy_fence() { active_launch().thread().fenced = true; }
void bulk_write(const char* function, Site site, void* to, const void* from, std::size_t bytes) {
  active_launch().bulk_write(function, site, to, from, bytes);
}
void bulk_wait_read(const char* function, Site site, unsigned pending) {
  active_launch().bulk_wait_read(function, site, pending);
}
void async_store(const char* function, Site site, const void* value, void* to, std::size_t bytes,
                 std::uint64_t* barrier, int rank) {
  active_launch().async_store(function, site, value, to, bytes, barrier, rank);
}

unsigned window_address(const void* pointer, Site site) {
  return active_launch().shared_address(pointer, site);
}
unsigned window_address_in_block(const void* local, int rank, Site site) {
  return active_launch().shared_address_in_block(local, rank, site);
}
void mbarrier_arrive_at(const char* function, Site site, unsigned address) {
  active_launch().mbarrier_arrive_at(function, site, address);
}

}  // namespace simt
}  // namespace JAX_GPUOPS_NAMESPACE
