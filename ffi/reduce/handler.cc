#include "core/handler.h"

#include <optional>
#include <string_view>

#include "core/row_arguments.h"
#include "reduce/reduce.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

struct Attributes {
  std::string_view algorithm;  // a name or kBatchInvariant; empty: the plan chooses
  std::int64_t inner_dims;     // how many of the leading dims are minor to the columns in memory
};

struct VarianceAttributes {
  std::string_view algorithm;
  std::int64_t inner_dims;
  double correction;  // the divisor is the number of elements minus this
};

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(JAX_GPUOPS_NAMESPACE::reduce::Attributes,
                                      StructMember<std::string_view>("algorithm"),
                                      StructMember<std::int64_t>("inner_dims"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(JAX_GPUOPS_NAMESPACE::reduce::VarianceAttributes,
                                      StructMember<std::string_view>("algorithm"),
                                      StructMember<std::int64_t>("inner_dims"),
                                      StructMember<double>("correction"));

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {
namespace {

// x has the dims (leading..., columns). In memory the last `inner_dims` of the leading dims are
// minor to the columns: the caller chose a layout instead of a transpose. `buffers` has the
// launch's other arguments.
void run(Function function, const Queue& queue, const ffi::AnyBuffer& x,
         const std::optional<ffi::AnyBuffer>& where, ffi::Result<ffi::AnyBuffer> y,
         ffi::Result<ffi::AnyBuffer> workspace, const Attributes& attributes, Buffers buffers) {
  const RowSizes sizes = row_sizes(x.dimensions(), attributes.inner_dims);
  const Operand elements(x);
  const Result results(y);
  const WorkspaceBuffer memory(workspace);
  const Problem problem{function,
                        dtype_of(x),
                        dtype_of(*y),
                        sizes.outer,
                        sizes.columns,
                        sizes.inner,
                        where.has_value(),
                        common_alignment({elements.data()}),
                        static_cast<std::int64_t>(workspace->size_bytes())};
  require(static_cast<std::int64_t>(y->element_count()) == problem.rows(),
          "the result must have one element for each row");
  require(workspace->element_type() == ffi::U8, "the workspace must have dtype uint8");
  buffers.x = elements.data();
  buffers.y = results.data();
  buffers.workspace = memory.data();
  std::optional<Operand> mask;
  if (where.has_value()) {
    mask.emplace(*where);
    buffers.mask = row_mask(*where, mask->data(), x.dimensions(), attributes.inner_dims);
  }
  if (problem.rows() == 0) return;
  require(problem.columns > 0, "kernels do not reduce rows without elements");
  plan_and_launch(queue, "reduce", problem, attributes.algorithm,
                  [&](const Queue& to_queue, const Plan& chosen) {
                    launch(to_queue, chosen, problem, buffers);
                  });
}

void require_same(const ffi::AnyBuffer& mean, const ffi::AnyBuffer& other) {
  require(
      other.element_type() == mean.element_type() && other.element_count() == mean.element_count(),
      "the results must have the same dtype and size");
}

template <Function kFunction>
void run_one(Queue queue, ffi::AnyBuffer x, std::optional<ffi::AnyBuffer> where,
             ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> workspace,
             Attributes attributes) {
  run(kFunction, queue, x, where, y, workspace, attributes, {});
}

void run_mean(Queue queue, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
              ffi::Result<ffi::AnyBuffer> workspace, Attributes attributes) {
  const DType result = dtype_of(*y);
  require(result >= DType::kFloat16, "the mean must have a floating-point dtype");
  Buffers buffers{};
  buffers.divisor = static_cast<double>(row_sizes(x.dimensions(), attributes.inner_dims).columns);
  run(Function::kSum, queue, x, std::nullopt, y, workspace, attributes, buffers);
}

void run_mean_and_var(Queue queue, ffi::AnyBuffer x, std::optional<ffi::AnyBuffer> where,
                      ffi::Result<ffi::AnyBuffer> mean, ffi::Result<ffi::AnyBuffer> variance,
                      ffi::Result<ffi::AnyBuffer> workspace, VarianceAttributes attributes) {
  require_same(*mean, *variance);
  const Result second(variance);
  Buffers buffers{};
  buffers.variance = second.data();
  buffers.correction = attributes.correction;
  run(Function::kMeanAndVar, queue, x, where, mean, workspace,
      {attributes.algorithm, attributes.inner_dims}, buffers);
}

// The mean as the sum of two numbers, for callers that merge the moments of several rows: for an
// array like 1e6 + x, with x near 1, the rounding error of one number would show in the variance.
void run_moments(Queue queue, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> mean,
                 ffi::Result<ffi::AnyBuffer> variance, ffi::Result<ffi::AnyBuffer> low,
                 ffi::Result<ffi::AnyBuffer> workspace, Attributes attributes) {
  require_same(*mean, *variance);
  require_same(*mean, *low);
  const DType result = dtype_of(*mean);
  require(result == DType::kFloat32 || result == DType::kFloat64,
          "moments must have dtype float32 or float64");
  const Result second(variance);
  const Result third(low);
  Buffers buffers{};
  buffers.variance = second.data();
  buffers.low = third.data();
  run(Function::kMeanAndVar, queue, x, std::nullopt, mean, workspace, attributes, buffers);
}

const RegisterOp kRegistration(Op{
    "reduce",
    {std::begin(kAlgorithms), std::end(kAlgorithms)},
    {make_target<&run_one<Function::kSum>>("jax_gpuops_sum_v1"),
     make_target<&run_mean>("jax_gpuops_mean_v1"),
     make_target<&run_one<Function::kProd>>("jax_gpuops_prod_v1"),
     make_target<&run_one<Function::kMax>>("jax_gpuops_max_v1"),
     make_target<&run_one<Function::kMin>>("jax_gpuops_min_v1"),
     make_target<&run_one<Function::kArgMax>>("jax_gpuops_argmax_v1"),
     make_target<&run_one<Function::kArgMin>>("jax_gpuops_argmin_v1"),
     make_target<&run_mean_and_var>("jax_gpuops_mean_and_var_v1"),
     make_target<&run_moments>("jax_gpuops_moments_v1")},
    &plan_of_fields<Problem>,
    &workspace_of_fields<Problem>,
});

}  // namespace
}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
