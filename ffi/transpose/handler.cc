#include "core/handler.h"

#include <string_view>

#include "transpose/transpose.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace transpose {

struct Attributes {
  std::string_view algorithm;  // empty: the plan chooses
  ffi::Span<const std::int64_t> permutation;
};

}  // namespace transpose
}  // namespace JAX_GPUOPS_NAMESPACE

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    JAX_GPUOPS_NAMESPACE::transpose::Attributes,
    ::xla::ffi::StructMember<std::string_view>("algorithm"),
    ::xla::ffi::StructMember<::xla::ffi::Span<const std::int64_t>>("permutation"));

namespace JAX_GPUOPS_NAMESPACE {
namespace transpose {
namespace {

// The bytes of an element; throws for types of which XLA packs several elements into a byte.
int element_bytes(ffi::DataType type) {
  switch (type) {
    case ffi::S1:
    case ffi::S2:
    case ffi::S4:
    case ffi::U1:
    case ffi::U2:
    case ffi::U4:
    case ffi::F4E2M1FN:
      throw std::invalid_argument("transpose kernels do not support elements smaller than a byte");
    default:
      return static_cast<int>(ffi::ByteWidth(type));
  }
}

void run(Queue queue, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y, Attributes attributes) {
  require(y->element_type() == x.element_type(), "x and the result must have the same dtype");
  const auto dims = x.dimensions();
  const auto result_dims = y->dimensions();
  const Operand from(x);
  const Result to(y);
  const Problem problem{element_bytes(x.element_type()),
                        {dims.begin(), dims.end()},
                        {attributes.permutation.begin(), attributes.permutation.end()},
                        common_alignment({from.data(), to.data()})};
  check(problem);
  require(result_dims.size() == dims.size(), "x and the result must have the same rank");
  for (std::size_t i = 0; i < dims.size(); ++i) {
    require(result_dims[i] == dims[problem.permutation[i]],
            "the result must have the permuted shape of x");
  }
  if (x.element_count() == 0) return;
  plan_and_launch(queue, "transpose", problem, attributes.algorithm,
                  [&](const Queue& to_queue, const Plan& chosen) {
                    launch(to_queue, chosen, from.data(), to.data());
                  });
}

const RegisterOp kRegistration(Op{
    "transpose",
    {std::begin(kAlgorithms), std::end(kAlgorithms)},
    {make_target<&run>("jax_gpuops_transpose_v1")},
    &plan_of_fields<Problem>,
    &workspace_of_fields<Problem>,
});

}  // namespace
}  // namespace transpose
}  // namespace JAX_GPUOPS_NAMESPACE
