// Instantiates the transpose kernels and launches them.

#include "core/dispatch.h"
#include "core/vector.h"
#include "transpose/copy.cuh"
#include "transpose/ladder/01_naive.cuh"
#include "transpose/ladder/02_tiled.cuh"
#include "transpose/narrow.cuh"
#include "transpose/shifted.cuh"
#include "transpose/swizzled.cuh"
#include "transpose/transpose.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace transpose {
namespace {

// Halves the outermost dimension as long as there are too many words, so that a part is contiguous
// in the operand.
template <class Word>
void launch_parts(const Plan& plan, Call<Word> call) {
  if (call.movement.words() > kMaxWords) {
    Dim& outermost = call.movement.outermost();
    const std::int64_t half = outermost.size / 2;
    outermost.size -= half;
    launch_parts(plan, call);
    call.x += outermost.size * outermost.in_stride;
    call.y += outermost.size * outermost.out_stride;
    outermost.size = half;
    return launch_parts(plan, call);
  }
  switch (plan.algorithm) {
    case Algorithm::kNaive:
      return launch_naive(call);
    case Algorithm::kTiled:
      return launch_tiled(call, plan.config);
    case Algorithm::kSwizzled:
      return launch_swizzled(call, plan.config);
    case Algorithm::kShifted:
      if constexpr (sizeof(Word) <= kWidestShiftedWord) launch_shifted(call, plan.config);
      return;
    case Algorithm::kNarrow:
      if constexpr (sizeof(Word) <= kWidestNarrowWord) launch_narrow(call, plan.config);
      return;
    case Algorithm::kCopy:
      return launch_copy(call, plan.config);
  }
}

}  // namespace

void launch(const Queue& queue, const Plan& plan, const void* x, void* y) {
  dispatch_power_of_two<1, kWidestWord>(plan.config.word_bytes, [&](auto bytes) {
    using Word = typename WordOf<bytes>::type;
    launch_parts<Word>(plan,
                       {queue, static_cast<const Word*>(x), static_cast<Word*>(y), plan.movement});
  });
}

}  // namespace transpose
}  // namespace JAX_GPUOPS_NAMESPACE
