// A function on a stack of its own that can stop halfway and be resumed.
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

// Runs a task as often as wanted on the same stack. A switch costs nanoseconds because it saves
// only the registers that a function call preserves, and asks nothing of the kernel (swapcontext
// saves the signal mask, a system call each way). A fiber stays on the host thread that first
// resumed it.
class Fiber {
 public:
  // Returns the fiber that runs next, or null for what resumed this one.
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

  // Runs the task until it, or a fiber that runs next, suspends or returns with none that runs
  // next. The task must not let an exception escape, and must not suspend while it handles one: the
  // C++ run-time keeps those per host thread.
  void resume();

  // Runs `next` until something runs the calling fiber again; if null, returns from the resume().
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
