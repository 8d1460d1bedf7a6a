// Asynchronous copies of single threads (cp.async). Each thread waits for its own copies, and other
// threads that keep the rules cannot observe when they land; so they land when their thread calls
// one of the functions here.

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "simt/launch.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace simt {
namespace {

// Any of the first kOvertaking pending copies may land before those issued earlier.
constexpr std::size_t kOvertaking = 4;

std::string copy_text(const Thread& thread, const AsyncCopy& copy) {
  return Caller{thread, copy.function, copy.site} + "";
}

}  // namespace

void Launch::async_copy(const char* function, Site site, void* to, const void* from,
                        unsigned bytes) {
  if (cancelled_) throw Cancelled();
  Thread& thread = *thread_;
  const Caller caller{thread, function, site};
  if (bytes != 4 && bytes != 8 && bytes != 16) {
    throw Error(caller + ": a copy has 4, 8 or 16 bytes, not " + std::to_string(bytes));
  }
  const auto check = [&](const char* what, const void* pointer) {
    if (reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0) return;
    throw Error(caller + ": misaligned copy: the " + what + " is not at a multiple of " +
                bytes_text(bytes));
  };
  check("destination", to);
  check("source", from);
  check_shared(caller, to, bytes);
  AsyncCopy copy{function, site, to, from, bytes, thread.copy_groups, {}};
  if (from != nullptr) std::memcpy(copy.data.data(), from, bytes);
  take_memory(to, bytes);
  thread.async_copies.push_back(copy);
  if (timing_ == Timing::kEarly) {
    land_async(thread, 0, 1);
  } else if (timing_ == Timing::kAny && random_.below(4) == 0) {
    land_async(thread, random_.below(std::min(thread.async_copies.size(), kOvertaking)), 1);
  }
}

void Launch::land_async(Thread& thread, std::size_t position, std::size_t number) {
  const auto first = thread.async_copies.begin() + static_cast<std::ptrdiff_t>(position);
  const auto last = first + static_cast<std::ptrdiff_t>(number);
  std::for_each(first, last, [&](const AsyncCopy& copy) { land_async(thread, copy); });
  thread.async_copies.erase(first, last);
}

void Launch::land_async(const Thread& thread, const AsyncCopy& copy) const {
  release_memory(copy.to, copy.bytes);
  if (copy.from != nullptr && std::memcmp(copy.from, copy.data.data(), copy.bytes) != 0) {
    throw Error(copy_text(thread, copy) +
                ": the source was written to while the copy was under way");
  }
  const auto* const at = static_cast<const unsigned char*>(copy.to);
  if (std::any_of(at, at + copy.bytes, [](unsigned char byte) { return byte != 0xff; })) {
    throw Error(copy_text(thread, copy) +
                ": the destination was written to before the copy landed");
  }
  std::memcpy(copy.to, copy.data.data(), copy.bytes);
}

void Launch::end_copy_group() {
  if (cancelled_) throw Cancelled();
  ++thread_->copy_groups;
}

void Launch::wait_for_copy_groups(unsigned pending) {
  if (cancelled_) throw Cancelled();
  Thread& thread = *thread_;
  const auto& copies = thread.async_copies;
  const auto next = std::find_if(copies.begin(), copies.end(), [&](const AsyncCopy& copy) {
    return copy.group + pending >= thread.copy_groups;
  });
  land_async(thread, 0, static_cast<std::size_t>(next - copies.begin()));
}

void Launch::check_async_copies(const Thread& thread) const {
  if (thread.async_copies.empty()) return;
  throw Error(copy_text(thread, thread.async_copies.front()) +
              ": the thread exited without a wait for the copy");
}

void Launch::drop_async_copies() {
  for (Block& block : blocks_) {
    for (Thread& thread : block.threads) {
      for (const AsyncCopy& copy : thread.async_copies) release_memory(copy.to, copy.bytes);
      thread.async_copies.clear();
    }
  }
}

// ---- For code in kernels ----

void async_copy(const char* function, Site site, void* to, const void* from, unsigned bytes) {
  active_launch().async_copy(function, site, to, from, bytes);
}
void end_copy_group() { active_launch().end_copy_group(); }
void wait_for_copy_groups(unsigned pending) { active_launch().wait_for_copy_groups(pending); }

}  // namespace simt
}  // namespace JAX_GPUOPS_NAMESPACE
