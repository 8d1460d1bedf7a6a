#include "simt/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

#ifdef JAX_GPUOPS_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

// jax_gpuops_switch_stack(save, to) pushes the callee-saved registers, stores the stack pointer in
// *save, and continues where the stack `to` was left. MXCSR and FPCR are not saved: they belong to
// the launch. A new stack holds what the switch pops (see new_stack_pointer).
#if defined(__x86_64__)

// Jumps to the return address: the processor would predict that a ret goes back to the caller.
asm(R"(
    .text
    .hidden jax_gpuops_switch_stack
    .globl jax_gpuops_switch_stack
    .type jax_gpuops_switch_stack, @function
jax_gpuops_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmp *%rcx
    .size jax_gpuops_switch_stack, . - jax_gpuops_switch_stack
)");

#elif defined(__aarch64__)

// A new stack enters its function by jax_gpuops_start_stack, with the function in x19: the link
// register must hold a return address that unwinders do not follow.
asm(R"(
    .text
    .hidden jax_gpuops_switch_stack
    .globl jax_gpuops_switch_stack
    .type jax_gpuops_switch_stack, %function
jax_gpuops_switch_stack:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size jax_gpuops_switch_stack, . - jax_gpuops_switch_stack

    .hidden jax_gpuops_start_stack
    .globl jax_gpuops_start_stack
    .type jax_gpuops_start_stack, %function
jax_gpuops_start_stack:
    blr x19
    brk #0
    .size jax_gpuops_start_stack, . - jax_gpuops_start_stack
)");

extern "C" void jax_gpuops_start_stack();

#else
#error "simt/fiber.cc knows how to switch stacks on x86-64 and aarch64 only"
#endif

extern "C" void jax_gpuops_switch_stack(void** save, void* to);

namespace JAX_GPUOPS_NAMESPACE {
namespace simt {
namespace {

#ifdef JAX_GPUOPS_ASAN
constexpr std::size_t kStackBytes = 256 * 1024;  // redzones and unoptimized frames
#else
constexpr std::size_t kStackBytes = 64 * 1024;
#endif

constexpr std::size_t kCacheLine = 64;
constexpr std::size_t kMostOffset = 4096;  // addresses this far apart share a set

thread_local Fiber* running = nullptr;

// The caller of resume().
struct Resumer {
  void* stack_pointer = nullptr;
#ifdef JAX_GPUOPS_ASAN
  void* fake_stack = nullptr;
  const void* stack = nullptr;  // null until the first fiber of the resume() runs
  std::size_t stack_bytes = 0;
#endif
};
thread_local Resumer resumer;

// Fills the top of a new stack so that switching to it calls `function`.
void* new_stack_pointer(void* top, void (*function)()) {
  auto* word = static_cast<std::uintptr_t*>(top);
#if defined(__x86_64__)
  *--word = 0;  // the return address: unwinders stop here; also aligns the stack as a call does
  *--word = reinterpret_cast<std::uintptr_t>(function);
  for (int i = 0; i < 6; ++i) *--word = 0;
#else
  word -= 20;
  for (int i = 0; i < 20; ++i) word[i] = 0;
  word[0] = reinterpret_cast<std::uintptr_t>(function);                  // x19
  word[11] = reinterpret_cast<std::uintptr_t>(&jax_gpuops_start_stack);  // x30
#endif
  return word;
}

}  // namespace

Fiber::Fiber() {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  memory_bytes_ = page + (kStackBytes + page - 1) / page * page;
  memory_ = mmap(nullptr, memory_bytes_, PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (memory_ == MAP_FAILED) throw std::bad_alloc();
  stack_ = static_cast<char*>(memory_) + page;
  stack_bytes_ = memory_bytes_ - page;
  if (mprotect(stack_, stack_bytes_, PROT_READ | PROT_WRITE) != 0) {
    munmap(memory_, memory_bytes_);
    throw std::bad_alloc();
  }
  // Frames at the same offset in every stack would share few sets of the processor's caches.
  static std::atomic<std::size_t> count{0};
  const std::size_t offset = count++ % (kMostOffset / kCacheLine) * kCacheLine;
  char* const top = static_cast<char*>(stack_) + stack_bytes_ - offset;
  stack_pointer_ = new_stack_pointer(top, &Fiber::main);
}

Fiber::~Fiber() {
#ifdef JAX_GPUOPS_ASAN
  task_ = nullptr;
  resume();  // only the fiber itself can free its fake stack
#endif
  munmap(memory_, memory_bytes_);
}

void Fiber::resume() {
  running = this;
#ifdef JAX_GPUOPS_ASAN
  resumer.stack = nullptr;
  __sanitizer_start_switch_fiber(&resumer.fake_stack, stack_, stack_bytes_);
#endif
  jax_gpuops_switch_stack(&resumer.stack_pointer, stack_pointer_);
#ifdef JAX_GPUOPS_ASAN
  __sanitizer_finish_switch_fiber(resumer.fake_stack, nullptr, nullptr);
#endif
  running = nullptr;
}

void Fiber::suspend(Fiber* next) { running->leave(next, /*last=*/false); }

void Fiber::leave(Fiber* next, [[maybe_unused]] bool last) {
#ifdef JAX_GPUOPS_ASAN
  // Null frees the fake stack.
  __sanitizer_start_switch_fiber(last ? nullptr : &fake_stack_,
                                 next != nullptr ? next->stack_ : resumer.stack,
                                 next != nullptr ? next->stack_bytes_ : resumer.stack_bytes);
#endif
  running = next;
  jax_gpuops_switch_stack(&stack_pointer_,
                          next != nullptr ? next->stack_pointer_ : resumer.stack_pointer);
  arrive();
}

void Fiber::arrive() {
#ifdef JAX_GPUOPS_ASAN
  const bool resumed = resumer.stack == nullptr;
  __sanitizer_finish_switch_fiber(fake_stack_, resumed ? &resumer.stack : nullptr,
                                  resumed ? &resumer.stack_bytes : nullptr);
#endif
}

void Fiber::main() {
  Fiber* const self = running;
  self->arrive();
  while (self->task_ != nullptr) self->leave(self->task_(self->argument_), /*last=*/false);
  self->leave(nullptr, /*last=*/true);
  std::abort();  // resumed after its end
}

}  // namespace simt
}  // namespace JAX_GPUOPS_NAMESPACE
