// How an op becomes an FFI target: contexts, buffers, errors, stages. Handlers include this;
// kernels and plans do not.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/cuda.h"
#include "core/device.h"
#include "core/dtype.h"
#include "core/fields.h"
#include "core/queue.h"
#include "core/record.h"
#include "core/registry.h"
#include "xla/ffi/api/ffi.h"

namespace JAX_GPUOPS_NAMESPACE {

namespace ffi = ::xla::ffi;

// The dtype of a buffer; throws for one that no kernel handles.
inline DType dtype_of(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::PRED:
      return DType::kBool;
    case ffi::S8:
      return DType::kInt8;
    case ffi::S16:
      return DType::kInt16;
    case ffi::S32:
      return DType::kInt32;
    case ffi::S64:
      return DType::kInt64;
    case ffi::U8:
      return DType::kUInt8;
    case ffi::U16:
      return DType::kUInt16;
    case ffi::U32:
      return DType::kUInt32;
    case ffi::U64:
      return DType::kUInt64;
    case ffi::F16:
      return DType::kFloat16;
    case ffi::BF16:
      return DType::kBFloat16;
    case ffi::F32:
      return DType::kFloat32;
    case ffi::F64:
      return DType::kFloat64;
    case ffi::F8E4M3FN:
      return DType::kFloat8E4M3FN;
    case ffi::F8E5M2:
      return DType::kFloat8E5M2;
    default:
      throw std::invalid_argument("a buffer has an element type that no kernel supports");
  }
}

inline void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

inline std::int64_t product(ffi::Span<const std::int64_t> dimensions, std::size_t begin,
                            std::size_t end) {
  std::int64_t result = 1;
  for (std::size_t i = begin; i < end; ++i) {
    require(!__builtin_mul_overflow(result, dimensions[i], &result), "an array is too large");
  }
  return result;
}

#ifdef JAX_GPUOPS_INTERPRET
// Tests set it to run kernels on buffers that begin so many bytes after where XLA put them.
inline std::atomic<std::size_t> buffer_offset{0};

// Under AddressSanitizer kernels get copies of buffers in heap blocks of the exact size: XLA packs
// buffers into arenas, where an access beyond the end would hit a neighbour unnoticed.
#ifdef __SANITIZE_ADDRESS__
inline constexpr bool kCopiesBuffers = true;
#else
inline constexpr bool kCopiesBuffers = false;
#endif
#endif

// The memory that kernels see for one buffer.
class BufferAccess {
 public:
  BufferAccess(void* data, [[maybe_unused]] std::size_t bytes, [[maybe_unused]] bool writable,
               [[maybe_unused]] bool aligned = false)
      : data_(data) {
#ifdef JAX_GPUOPS_INTERPRET
    const std::size_t offset = aligned ? 0 : buffer_offset.load();
    if (!kCopiesBuffers && offset == 0) return;
    // Keeps the alignment of the original address, on which plans depend.
    const std::size_t phase = (reinterpret_cast<std::uintptr_t>(data) + offset) % 16;
    copy_.reset(new char[phase + bytes]);
    if (bytes != 0) std::memcpy(copy_.get() + phase, data, bytes);
    data_ = copy_.get() + phase;
    original_ = data;
    bytes_ = writable ? bytes : 0;
#endif
  }
#ifdef JAX_GPUOPS_INTERPRET
  ~BufferAccess() {
    if (bytes_ != 0) std::memcpy(original_, data_, bytes_);
  }
#endif
  BufferAccess(const BufferAccess&) = delete;
  BufferAccess& operator=(const BufferAccess&) = delete;

  void* data() const { return data_; }

 private:
  void* data_;
#ifdef JAX_GPUOPS_INTERPRET
  std::unique_ptr<char[]> copy_;
  void* original_ = nullptr;
  std::size_t bytes_ = 0;  // to be copied back
#endif
};

// Operands and results as handlers pass them to launchers.
class Operand : public BufferAccess {
 public:
  explicit Operand(const ffi::AnyBuffer& buffer)
      : BufferAccess(buffer.untyped_data(), buffer.size_bytes(), /*writable=*/false) {}
};

class Result : public BufferAccess {
 public:
  explicit Result(ffi::Result<ffi::AnyBuffer> buffer)
      : BufferAccess(buffer->untyped_data(), buffer->size_bytes(), /*writable=*/true) {}
};

// Memory for partial results, which is aligned as XLA aligns what it allocates.
class WorkspaceBuffer : public BufferAccess {
 public:
  explicit WorkspaceBuffer(ffi::Result<ffi::AnyBuffer> buffer)
      : BufferAccess(buffer->untyped_data(), buffer->size_bytes(), /*writable=*/false,
                     /*aligned=*/true) {}
};

// The largest alignment that kernels rely on, in bytes: that of an access of 16 bytes.
inline constexpr std::int64_t kFullAlignment = 16;

// The largest power of two, up to kFullAlignment, that divides all addresses; null ones do not
// count.
inline std::int64_t common_alignment(std::initializer_list<const void*> addresses) {
  std::uintptr_t bits = kFullAlignment;
  for (const void* address : addresses) bits |= reinterpret_cast<std::uintptr_t>(address);
  return static_cast<std::int64_t>(bits & (~bits + 1));
}

// The alignment that all buffers of a problem have, in bytes. An op whose problems have no dtype
// overloads it.
template <class Problem>
std::int64_t least_alignment(const Problem& problem) {
  return static_cast<std::int64_t>(info(problem.dtype).bytes);
}

// A plan that is kept.
template <class Plan>
struct KeptPlan {
  Plan plan;
  // Whether its kernels are loaded; for full alignment also, if the initialize stage set it, those
  // of the least alignment.
  std::atomic<bool> prepared = false;

  explicit KeptPlan(Plan&& made) : plan(std::move(made)) {}
};

// The plan of a problem. An executable asks for the same ones in both stages of each run, so they
// are kept. Throws std::invalid_argument if the named algorithm cannot take the problem.
template <class Problem>
auto& planned(const Problem& problem, std::string_view algorithm, const Device& device) {
  using Kept = KeptPlan<decltype(plan(problem, algorithm, device))>;
  static std::shared_mutex mutex;
  static auto& plans = *new std::unordered_map<std::string, Kept>;  // handlers may run during exit
  thread_local std::string key;
  key.clear();
  append_field(key, device.ordinal);
  append_fields(key, problem);
  key += algorithm;
  {
    std::shared_lock lock(mutex);
    const auto found = plans.find(key);
    if (found != plans.end()) return found->second;
  }
  auto made = plan(problem, algorithm, device);
  std::unique_lock lock(mutex);
  return plans.try_emplace(key, std::move(made)).first->second;
}

// Plans a problem and launches the plan: the one way from a problem to a kernel. The problem has
// the alignment of the addresses of this execution. In the initialize stage, which is a part of
// every run, the addresses of the execute stage are not known, so the kernels of two cases are
// loaded: full alignment, and that of an element. Those of another alignment, which XLA's own
// arrays never have, are loaded when it occurs.
template <class Problem, class Launch>
void plan_and_launch(const Queue& queue, std::string_view op, Problem problem,
                     std::string_view algorithm, Launch&& launch) {
  if (queue.preparing) {
    problem.alignment = kFullAlignment;
    auto& aligned = planned(problem, algorithm, *queue.device);
    if (aligned.prepared) return;
    launch(queue, aligned.plan);
    problem.alignment = least_alignment(problem);
    try {
      auto& unaligned = planned(problem, algorithm, *queue.device);
      launch(queue, unaligned.plan);
      unaligned.prepared = true;
    } catch (const std::invalid_argument&) {
      // A named algorithm may need alignment: the execute stage reports it if it is missing.
    }
    aligned.prepared = true;
    return;
  }
  auto& kept = planned(problem, algorithm, *queue.device);
  const auto& chosen = kept.plan;
  if (!kept.prepared) {
    Queue preparing = queue;
    preparing.preparing = true;
    launch(preparing, chosen);
    kept.prepared = true;
  }
  if (!is_recording()) return launch(queue, chosen);
  Execution execution{
      op, to_fields(problem), name_of(chosen.algorithm), to_fields(chosen.config), {}};
  Queue recorded = queue;
  recorded.launched = &execution.kernels;
  launch(recorded, chosen);
  record(std::move(execution));
}

// Runs a handler's body. Whatever it throws becomes an FFI error: an exception that crossed into
// XLA would end the process.
template <class Body>
ffi::Error guarded(Body&& body) {
  try {
    body();
    return ffi::Error::Success();
  } catch (const std::invalid_argument& error) {
    return ffi::Error::InvalidArgument(std::string("jax_gpuops: ") + error.what());
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("jax_gpuops: ") + error.what());
  }
}

namespace internal {

// Binds the parameters of a body one by one, as ffi::Ffi::BindTo does, which has no optional
// operands.
template <class Body, class Binding>
auto bind_parameters(Body* body, ffi::Traits traits, Binding&& binding) {
  return std::forward<Binding>(binding).To(body, {traits});
}

template <class First, class... Rest, class Body, class Binding>
auto bind_parameters(Body* body, ffi::Traits traits, Binding&& binding) {
  const auto rest = [&](auto&& bound) {
    return bind_parameters<Rest...>(body, traits, std::forward<decltype(bound)>(bound));
  };
  if constexpr (std::is_same_v<First, std::optional<ffi::AnyBuffer>>) {
    return rest(std::forward<Binding>(binding).template OptionalArg<ffi::AnyBuffer>());
  } else if constexpr (std::is_same_v<First, ffi::AnyBuffer>) {
    return rest(std::forward<Binding>(binding).template Arg<ffi::AnyBuffer>());
  } else if constexpr (std::is_same_v<First, ffi::Result<ffi::AnyBuffer>>) {
    return rest(std::forward<Binding>(binding).template Ret<ffi::AnyBuffer>());
  } else if constexpr (std::is_same_v<First, Queue>) {
    return rest(std::forward<Binding>(binding).template Ctx<Queue>());
  } else {
    return rest(std::forward<Binding>(binding).template Attrs<First>());
  }
}

template <auto kBody, ffi::Traits kTraits>
struct Stages;

template <class... Parameters, void (*kBody)(Queue, Parameters...), ffi::Traits kTraits>
struct Stages<kBody, kTraits> {
  template <bool kPreparing>
  static ffi::Error run(Queue queue, Parameters... parameters) {
    queue.preparing = kPreparing;
    return guarded([&] { kBody(queue, parameters...); });
  }

  template <ffi::ExecutionStage kStage>
  static XLA_FFI_Error* handle(XLA_FFI_CallFrame* frame) {
    auto* const body = &run<kStage == ffi::ExecutionStage::kInitialize>;
    static auto* handler =
        bind_parameters<Queue, Parameters...>(body, kTraits, ffi::Ffi::Bind<kStage>()).release();
    return handler->Call(frame);
  }
};

}  // namespace internal

// The FFI target `name`, whose body is `void kBody(Queue, operands..., results..., attributes)`:
// operands are ffi::AnyBuffer, the last of them perhaps std::optional, results
// ffi::Result<ffi::AnyBuffer>, attributes a struct registered with
// XLA_FFI_REGISTER_STRUCT_ATTR_DECODING. The body runs in both stages: see Queue. A body that
// cannot be captured into a CUDA graph, because it calls a library that allocates, has no traits.
template <auto kBody, ffi::Traits kTraits = ffi::Traits::kCmdBufferCompatible>
Target make_target(std::string_view name) {
  using ffi::ExecutionStage;
  using Stages = internal::Stages<kBody, kTraits>;
  return {name, reinterpret_cast<void*>(&Stages::template handle<ExecutionStage::kInitialize>),
          reinterpret_cast<void*>(&Stages::template handle<ExecutionStage::kExecute>)};
}

}  // namespace JAX_GPUOPS_NAMESPACE

namespace xla::ffi {

template <>
struct CtxBinding<JAX_GPUOPS_NAMESPACE::Queue> {
  using Ctx = JAX_GPUOPS_NAMESPACE::Queue;
};

template <>
struct CtxDecoding<JAX_GPUOPS_NAMESPACE::Queue> {
  using Type = JAX_GPUOPS_NAMESPACE::Queue;

  static std::optional<Type> Decode([[maybe_unused]] const XLA_FFI_Api* api,
                                    [[maybe_unused]] XLA_FFI_ExecutionContext* context,
                                    DiagnosticEngine& diagnostic) {
    Type queue;
    std::int32_t ordinal = 0;
#ifndef JAX_GPUOPS_INTERPRET
    const auto stream = CtxDecoding<PlatformStream<cudaStream_t>>::Decode(api, context, diagnostic);
    const auto device = CtxDecoding<DeviceOrdinal>::Decode(api, context, diagnostic);
    if (!stream || !device) return std::nullopt;
    queue.stream = *stream;
    ordinal = *device;
#endif
    try {
      queue.device = &JAX_GPUOPS_NAMESPACE::device(ordinal);
    } catch (const std::exception& error) {
      diagnostic.Emit(error.what());
      return std::nullopt;
    }
    return queue;
  }
};

}  // namespace xla::ffi
