// Named barriers and the registers of warpgroups.

#include "simt/warpgroup.h"

#include <algorithm>
#include <string>

namespace JAX_GPUOPS_NAMESPACE {
namespace simt {
namespace {

constexpr unsigned kAllLanes = 0xffffffff;
constexpr unsigned kRegistersPerMultiprocessor = 65536;
constexpr unsigned kMostRegisters = 256;

}  // namespace

Warpgroups& Launch::warpgroups(Block& block) const {
  if (block.warpgroups == nullptr) {
    const std::size_t threads = block.threads.size();
    auto made = std::make_shared<Warpgroups>();
    // What the compiler gives a kernel with one block per multiprocessor.
    const auto each = static_cast<unsigned>(kRegistersPerMultiprocessor / threads / 8 * 8);
    made->registers.assign(threads, std::min(each, kMostRegisters));
    made->groups = std::vector<Warpgroup>((threads + kWarpgroupThreads - 1) / kWarpgroupThreads);
    block.warpgroups = std::move(made);
  }
  return *block.warpgroups;
}

// Warps beyond the last whole warpgroup may not use these instructions.
Warpgroups& Launch::whole_warpgroups(const Caller& caller, Block& block) const {
  const std::size_t threads = block.threads.size();
  if (number(caller.thread) >= threads / kWarpgroupThreads * kWarpgroupThreads) {
    throw Error(caller + ": the block has " + std::to_string(threads) +
                " threads, of which this one is in no whole warpgroup of 128");
  }
  return warpgroups(block);
}

// Waits for all lanes of the warp, which execute such instructions together.
void Launch::meet_warp(const char* function, Site site) {
  wait({function, site, Scope::kLanes, kAllLanes, false, lane()});
}

void Launch::wake(Block& block, Scope scope) {
  for (Thread& thread : block.threads) {
    if (thread.state == Thread::State::kWaiting && thread.call.scope == scope) release(thread, 0);
  }
}

void Launch::named_barrier(const char* function, Site site, int number, int threads, bool waits) {
  if (cancelled_) throw Cancelled();
  Thread& thread = *thread_;
  const auto expected = static_cast<unsigned>(threads);
  const Caller caller{thread, function, site};
  if (number < 1 || number >= kNamedBarriers) {
    throw Error(caller + ": barriers have the numbers 1 to 15, not " + std::to_string(number));
  }
  if (threads < 1 || expected % kWarpSize != 0 || expected > thread.block->threads.size()) {
    throw Error(caller + ": a barrier of " + std::to_string(threads) +
                " threads, which are no whole warps of the block");
  }
  NamedBarrier& barrier = warpgroups(*thread.block).barriers[number];
  meet_warp(function, site);
  if (barrier.arrived > 0 && barrier.threads != expected) {
    throw Error(caller + ": barrier " + std::to_string(number) + " of " + std::to_string(threads) +
                " threads, where others have come to one of " + std::to_string(barrier.threads));
  }
  barrier.threads = expected;
  barrier.fenced = barrier.fenced && thread.fenced;
  thread.fenced = thread.met_fenced = false;
  if (++barrier.arrived == expected) {
    thread.met_fenced = waits && barrier.fenced;
    for (Thread* const other : barrier.waiting) {
      other->met_fenced = barrier.fenced;
      release(*other, 0);
    }
    barrier = NamedBarrier();
  } else if (waits) {
    barrier.waiting.push_back(&thread);
    Call call{function, site, Scope::kNamedBarrier};
    call.number = static_cast<std::uint64_t>(number);
    wait(call);
  }
}

void Launch::set_registers(const char* function, Site site, unsigned registers, bool takes) {
  if (cancelled_) throw Cancelled();
  Block& block = *thread_->block;
  const Caller caller{*thread_, function, site};
  Warpgroups& state = whole_warpgroups(caller, block);
  unsigned& held = state.registers[number(*thread_)];
  if (takes ? registers < held : registers > held) {
    throw Error(caller + ": the thread has " + std::to_string(held) + " registers, and may not " +
                (takes ? "take" : "give up") + " to have " + std::to_string(registers));
  }
  meet_warp(function, site);
  if (!takes) {
    state.free_registers += held - registers;
    wake(block, Scope::kRegisters);
  } else {
    while (state.free_registers < registers - held) {
      Call call{function, site, Scope::kRegisters};
      call.number = registers;
      wait(call);
    }
    state.free_registers -= registers - held;
  }
  held = registers;
}

std::string Launch::describe_wait_of_warpgroup(const Thread& thread) const {
  const Call& call = thread.call;
  if (thread.block->warpgroups == nullptr) return "";
  Warpgroups& state = *thread.block->warpgroups;
  if (call.scope == Scope::kNamedBarrier) {
    const NamedBarrier& barrier = state.barriers[call.number];
    return " for barrier " + std::to_string(call.number) + ", where " +
           std::to_string(barrier.arrived) + " of " + std::to_string(barrier.threads) +
           " threads have come";
  }
  if (call.scope == Scope::kRegisters) {
    return " to have " + std::to_string(call.number) + " registers in place of " +
           std::to_string(state.registers[number(thread)]) + "; " +
           std::to_string(state.free_registers) + " are free in the block";
  }
  if (call.scope == Scope::kProducts) {
    Warpgroup& group = state.groups[number(thread) / kWarpgroupThreads];
    const Product& product = group.product(group.issued);
    return " for " + to_string(product.function, product.site) + ", which " +
           std::to_string(product.callers) + " of the warpgroup's 128 threads have called";
  }
  return "";
}

// ---- For code in kernels ----

void named_barrier(const char* function, Site site, int number, int threads, bool waits) {
  active_launch().named_barrier(function, site, number, threads, waits);
}
void set_registers(const char* function, Site site, unsigned registers, bool takes) {
  active_launch().set_registers(function, site, registers, takes);
}

}  // namespace simt
}  // namespace JAX_GPUOPS_NAMESPACE
