#include "core/handler.h"

#include <algorithm>
#include <string_view>

#include "reduce/reduce.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

struct Attributes {
  std::string_view algorithm;  // empty: the plan chooses
  std::int64_t inner_dims;     // how many of the leading dims lie between the row's elements
};

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(JAX_GPUOPS_NAMESPACE::reduce::Attributes,
                                      StructMember<std::string_view>("algorithm"),
                                      StructMember<std::int64_t>("inner_dims"));

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {
namespace {

bool is_float(DType dtype) { return dtype >= DType::kFloat16; }

bool is_16_bit_float(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

void check_dtypes(const Problem& problem) {
  const auto [function, dtype, result] =
      std::tuple(problem.function, problem.dtype, problem.result);
  require(dtype != DType::kBool && result != DType::kBool, "no kernel takes bool");
  bool right = dtype == result;
  if (is_arg(function)) {
    right = result == DType::kInt32 || result == DType::kInt64;
  } else if (function == Function::kSum || function == Function::kProd) {
    right |= is_16_bit_float(dtype) && result == DType::kFloat32;
    right |= !is_float(dtype) && !is_float(result);
  }
  require(right, "the result has a dtype that the kernels do not compute from that of x");
}

// x is (leading..., columns). In memory the last `inner_dims` of the leading dims lie inside the
// row: the caller chose a layout instead of a transpose.
template <Function kFunction>
void run(Queue queue, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
         ffi::Result<ffi::AnyBuffer> workspace, Attributes attributes) {
  const auto dims = x.dimensions();
  require(dims.size() >= 1, "x must have at least one dimension");
  require(
      attributes.inner_dims >= 0 && attributes.inner_dims < static_cast<std::int64_t>(dims.size()),
      "inner_dims must be less than the rank of x");
  const std::size_t last = dims.size() - 1;
  const std::size_t first_inner = last - static_cast<std::size_t>(attributes.inner_dims);
  const Problem problem{kFunction,    dtype_of(x),
                        dtype_of(*y), product(dims, 0, first_inner),
                        dims[last],   product(dims, first_inner, last)};
  check_dtypes(problem);
  require(static_cast<std::int64_t>(y->element_count()) == problem.rows(),
          "the result must have one element for each row");
  require(workspace->element_type() == ffi::U8, "the workspace must be of bytes");
  if (problem.rows() == 0) return;
  require(problem.columns > 0, "the reduction of rows without elements has no kernel");
  const Plan chosen = plan(problem, attributes.algorithm, *queue.device);
  const Result memory(workspace);
  launch(chosen, problem, Operand(x).data(), Result(y).data(),
         {memory.data(), workspace->size_bytes()}, queue);
}

constexpr std::string_view kFunctions[] = {"sum", "prod", "max", "min", "argmax", "argmin"};

Problem to_problem(const Arguments& arguments) {
  const auto* const function =
      std::find(std::begin(kFunctions), std::end(kFunctions), arguments.text("function"));
  if (function == std::end(kFunctions)) {
    throw std::invalid_argument("there is no reduction '" + arguments.text("function") + "'");
  }
  return {static_cast<Function>(function - std::begin(kFunctions)),
          dtype_from_name(arguments.text("dtype")),
          dtype_from_name(arguments.text("result")),
          arguments.integer("outer"),
          arguments.integer("columns"),
          arguments.integer("inner")};
}

const RegisterOp kRegistration(Op{
    "reduce",
    {std::begin(kAlgorithms), std::end(kAlgorithms)},
    {make_target<&run<Function::kSum>>("jax_gpuops_sum_v1"),
     make_target<&run<Function::kProd>>("jax_gpuops_prod_v1"),
     make_target<&run<Function::kMax>>("jax_gpuops_max_v1"),
     make_target<&run<Function::kMin>>("jax_gpuops_min_v1"),
     make_target<&run<Function::kArgMax>>("jax_gpuops_argmax_v1"),
     make_target<&run<Function::kArgMin>>("jax_gpuops_argmin_v1")},
    [](const Arguments& arguments, const Device& device) {
      const Plan chosen = plan(to_problem(arguments), arguments.text("algorithm"), device);
      return PlanInfo{kAlgorithms[static_cast<int>(chosen.algorithm)].name, chosen.reason};
    },
    [](const Arguments& arguments) {
      return workspace_bytes(to_problem(arguments), arguments.text("algorithm"));
    },
});

}  // namespace
}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
