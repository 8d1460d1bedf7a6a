#include "core/handler.h"

#include <string_view>

#include "softmax/softmax.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

struct Attributes {
  std::string_view algorithm;  // empty: the plan chooses
  std::int64_t inner_dims;     // how many of the leading dims lie between the row's elements
};

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(JAX_GPUOPS_NAMESPACE::softmax::Attributes,
                                      StructMember<std::string_view>("algorithm"),
                                      StructMember<std::int64_t>("inner_dims"));

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

// x is (leading..., columns). In memory the last `inner_dims` of the leading dims lie inside the
// row: the caller chose a layout instead of a transpose.
template <Function kFunction>
void run(Queue queue, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y, Attributes attributes) {
  const auto dims = x.dimensions();
  require(dims.size() >= 1, "x must have at least one dimension");
  require(
      attributes.inner_dims >= 0 && attributes.inner_dims < static_cast<std::int64_t>(dims.size()),
      "inner_dims must be less than the rank of x");
  require(y->element_type() == x.element_type(), "x and the result must have one dtype");
  const std::size_t last = dims.size() - 1;
  const std::size_t first_inner = last - static_cast<std::size_t>(attributes.inner_dims);
  const Problem problem{kFunction, dtype_of(x), product(dims, 0, first_inner), dims[last],
                        product(dims, first_inner, last)};
  const std::size_t results =
      kFunction == Function::kLogSumExp ? problem.rows() : x.element_count();
  require(y->element_count() == results, "the result has the wrong number of elements");
  if (x.element_count() == 0) {
    require(results == 0, "logsumexp of rows without elements has no kernel");
    return;
  }
  const Plan chosen = plan(problem, attributes.algorithm, *queue.device);
  launch(chosen, problem, Operand(x).data(), Result(y).data(), queue);
}

Problem to_problem(const Arguments& arguments) {
  const std::string& function = arguments.text("function");
  return {function == "softmax"       ? Function::kSoftmax
          : function == "log_softmax" ? Function::kLogSoftmax
                                      : Function::kLogSumExp,
          dtype_from_name(arguments.text("dtype")), arguments.integer("outer"),
          arguments.integer("columns"), arguments.integer("inner")};
}

const RegisterOp kRegistration(Op{
    "softmax",
    {std::begin(kAlgorithms), std::end(kAlgorithms)},
    {make_target<&run<Function::kSoftmax>>("jax_gpuops_softmax_v1"),
     make_target<&run<Function::kLogSoftmax>>("jax_gpuops_log_softmax_v1"),
     make_target<&run<Function::kLogSumExp>>("jax_gpuops_logsumexp_v1")},
    [](const Arguments& arguments, const Device& device) {
      const Plan chosen = plan(to_problem(arguments), arguments.text("algorithm"), device);
      return PlanInfo{kAlgorithms[static_cast<int>(chosen.algorithm)].name, chosen.reason};
    },
    [](const Arguments&) { return std::int64_t{0}; },
});

}  // namespace
}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
