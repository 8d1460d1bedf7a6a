// A function with its own stack, which can be suspended and resumed.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#define JAX_GPUOPS_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define JAX_GPUOPS_ASAN 1
#endif
#endif

namespace JAX_GPUOPS_NAMESPACE {
namespace simt {

// Runs tasks one after the other on the same stack. A switch takes nanoseconds because it saves
// only callee-saved registers and makes no system call (swapcontext saves the signal mask, with a
// system call each way). A fiber stays on the host thread that first resumed it.
class Fiber {
 public:
  // Returns the fiber to run next, or null to return from resume().
  using Task = Fiber* (*)(void* argument);

  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Makes the next resume() begin `task`. The last task must have returned.
  void assign(Task task, void* argument) {
    task_ = task;
    argument_ = argument;
  }

  // Runs the task, and the fibers to run next, until one of them suspends or returns with no fiber
  // to run next. The task must not let an exception escape, and must not suspend while it handles
  // one: the C++ runtime keeps these per host thread.
  void resume();

  // Suspends the calling fiber and runs `next`; if null, resume() returns.
  static void suspend(Fiber* next);

 private:
  [[noreturn]] static void main();
  void leave(Fiber* next, bool last);
  void arrive();

  void* memory_;  // a guard page, then the stack
  std::size_t memory_bytes_;
  void* stack_;
  std::size_t stack_bytes_;
  void* stack_pointer_;  // of this fiber while it is suspended
  Task task_ = nullptr;
  void* argument_ = nullptr;
#ifdef JAX_GPUOPS_ASAN
  void* fake_stack_ = nullptr;
#endif
};

}  // namespace simt
}  // namespace JAX_GPUOPS_NAMESPACE
