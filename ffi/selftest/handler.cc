#include "core/handler.h"

#include <cstdint>
#include <limits>
#include <string_view>

#include "selftest/selftest.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace selftest {

struct Attributes {
  std::string_view kernel;
};

}  // namespace selftest
}  // namespace JAX_GPUOPS_NAMESPACE

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(JAX_GPUOPS_NAMESPACE::selftest::Attributes,
                                      StructMember<std::string_view>("kernel"));

namespace JAX_GPUOPS_NAMESPACE {
namespace selftest {
namespace {

void run(Queue queue, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y, Attributes attributes) {
  require(dtype_of(x) == DType::kFloat32 && y->element_type() == x.element_type(),
          "x and the result must be float32");
  const std::size_t size = x.element_count();
  require(size > 0 && size <= std::numeric_limits<std::int32_t>::max() / 2,
          "x must have between one and 2^30 elements");
  require(y->element_count() == size, "the result must have the size of x");
  launch(attributes.kernel, static_cast<const float*>(Operand(x).data()),
         static_cast<float*>(Result(y).data()), static_cast<int>(size), queue);
}

const RegisterOp kRegistration(Op{
    "selftest",
    {},
    {make_target<&run>("jax_gpuops_selftest_v1")},
    [](const Fields&, const Device&) { return PlanInfo{}; },
    [](const Fields&) { return std::int64_t{0}; },
});

}  // namespace
}  // namespace selftest
}  // namespace JAX_GPUOPS_NAMESPACE
