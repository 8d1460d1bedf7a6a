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
  using Task = void (*)(void* argument);

  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Makes the next resume() begin `task`. The last task must have returned.
  void assign(Task task, void* argument) {
    task_ = task;
    argument_ = argument;
  }

  // Runs the task until it suspends or returns. The task must not let an exception escape, and
  // must not suspend while it handles one: the C++ run-time keeps those per host thread.
  void resume();

  // Returns from the resume() that runs the calling fiber.
  static void suspend();

 private:
  [[noreturn]] static void main();
  void leave(bool last);

  void* memory_;  // a guard page, then the stack
  std::size_t memory_bytes_;
  void* stack_;
  std::size_t stack_bytes_;
  void* stack_pointer_;  // of this fiber while it is suspended
  void* resumer_stack_pointer_ = nullptr;
  Task task_ = nullptr;
  void* argument_ = nullptr;
#ifdef JAX_GPUOPS_ASAN
  void* fake_stack_ = nullptr;
  void* resumer_fake_stack_ = nullptr;
  const void* resumer_stack_ = nullptr;
  std::size_t resumer_stack_bytes_ = 0;
#endif
};

}  // namespace simt
}  // namespace JAX_GPUOPS_NAMESPACE
