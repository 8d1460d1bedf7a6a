#include "core/handler.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <string_view>

#include "core/row_arguments.h"
#include "softmax/softmax.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

struct Attributes {
  std::string_view algorithm;  // a name or kBatchInvariant; empty: the plan chooses
  std::int64_t inner_dims;     // how many of the leading dims lie between the row's elements
  double scale;
  bool causal;
};

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(JAX_GPUOPS_NAMESPACE::softmax::Attributes,
                                      StructMember<std::string_view>("algorithm"),
                                      StructMember<std::int64_t>("inner_dims"),
                                      StructMember<double>("scale"), StructMember<bool>("causal"));

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

using Where = std::optional<ffi::AnyBuffer>;

Problem to_problem(Function function, const ffi::AnyBuffer& x, const Where& where,
                   const Attributes& attributes) {
  const ffi::Span<const std::int64_t> dims = x.dimensions();
  const RowSizes sizes = row_sizes(dims, attributes.inner_dims);
  require(!attributes.causal || (dims.size() >= 2 && attributes.inner_dims == 0),
          "causal requires the last of at least two axes");
  return {function,
          dtype_of(x),
          sizes.outer,
          sizes.columns,
          sizes.inner,
          where.has_value(),
          attributes.causal ? dims[dims.size() - 2] : 0,
          attributes.scale != 1,
          kFullAlignment};  // until the addresses are known
}

void require_like(const ffi::AnyBuffer& other, const ffi::AnyBuffer& x, const char* what) {
  require(other.element_type() == x.element_type() && other.element_count() == x.element_count(),
          what);
}

// Arrays with one element per row have the dtype that the kernels compute in.
void require_rows(const ffi::AnyBuffer& buffer, const Problem& problem, const char* what) {
  const DType dtype = problem.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  require(dtype_of(buffer) == dtype &&
              static_cast<std::int64_t>(buffer.element_count()) == problem.rows(),
          what);
}

void require_labels(const ffi::AnyBuffer& labels, const Problem& problem) {
  require(labels.element_type() == ffi::S32 || labels.element_type() == ffi::S64,
          "labels must have dtype int32 or int64");
  require(static_cast<std::int64_t>(labels.element_count()) == problem.rows(),
          "there must be one label for each row");
}

std::int64_t alignment_of(const Problem& problem, const Buffers& buffers) {
  const std::int64_t alignment = common_alignment({buffers.x, buffers.t, buffers.y});
  const auto element_bytes = static_cast<std::int64_t>(info(problem.dtype).bytes);
  const bool has_whole_packs = problem.columns * element_bytes % kFullAlignment == 0;
  if (buffers.mask.column_stride == 0 || !has_whole_packs) return alignment;
  return std::min(alignment, common_alignment({buffers.mask.data}) * element_bytes);
}

// Plans and launches, unless there is nothing to do.
void run(const Queue& queue, Problem problem, const Attributes& attributes, const ffi::AnyBuffer& x,
         const Where& where, Buffers buffers) {
  if (x.element_count() == 0) {
    require(!reduces(problem.function) || problem.rows() == 0,
            "kernels do not compute the logsumexp of rows without elements");
    return;
  }
  std::optional<Operand> mask;
  if (where.has_value()) {
    mask.emplace(*where);
    buffers.mask = row_mask(*where, mask->data(), x.dimensions(), attributes.inner_dims);
  }
  problem.alignment = alignment_of(problem, buffers);
  plan_and_launch(queue, "softmax", problem, attributes.algorithm,
                  [&](const Queue& to_queue, const Plan& chosen) {
                    launch(to_queue, chosen, problem, attributes.scale, buffers);
                  });
}

using Out = ffi::Result<ffi::AnyBuffer>;

void run(const Queue& queue, const Problem& problem, const Attributes& attributes,
         const ffi::AnyBuffer& x, const Where& where, Out workspace, Buffers buffers) {
  const Result memory(workspace);
  buffers.workspace = memory.data();
  buffers.workspace_bytes = workspace->size_bytes();
  run(queue, problem, attributes, x, where, buffers);
}

template <Function kFunction>
void run_forward(Queue queue, ffi::AnyBuffer x, Where where, Out y, Out workspace,
                 Attributes attributes) {
  const Problem problem = to_problem(kFunction, x, where, attributes);
  require_like(*y, x, "the result must have the dtype and size of x");
  const Operand x_memory(x);
  const Result y_memory(y);
  Buffers buffers;
  buffers.x = x_memory.data();
  buffers.y = y_memory.data();
  run(queue, problem, attributes, x, where, workspace, buffers);
}

void require_logsumexp(const ffi::AnyBuffer& y, const ffi::AnyBuffer& x, const Problem& problem) {
  require(y.element_type() == x.element_type() &&
              static_cast<std::int64_t>(y.element_count()) == problem.rows(),
          "the result must have one element for each row, of the type of x");
}

void require_parts(const ffi::AnyBuffer& maximum, const ffi::AnyBuffer& log_sum,
                   const Problem& problem) {
  require_rows(maximum, problem, "maximum must have one element for each row");
  require_rows(log_sum, problem, "log_sum must have one element for each row");
}

void run_logsumexp(Queue queue, ffi::AnyBuffer x, Where where, Out y, Out workspace,
                   Attributes attributes) {
  const Problem problem = to_problem(Function::kLogSumExp, x, where, attributes);
  require_logsumexp(*y, x, problem);
  const Operand x_memory(x);
  const Result y_memory(y);
  Buffers buffers;
  buffers.x = x_memory.data();
  buffers.logsumexps.result = y_memory.data();
  run(queue, problem, attributes, x, where, workspace, buffers);
}

void run_logsumexp_with_residuals(Queue queue, ffi::AnyBuffer x, Where where, Out y, Out maximum,
                                  Out log_sum, Out workspace, Attributes attributes) {
  const Problem problem = to_problem(Function::kLogSumExp, x, where, attributes);
  require_logsumexp(*y, x, problem);
  require_parts(*maximum, *log_sum, problem);
  const Operand x_memory(x);
  const Result y_memory(y);
  const Result maximum_memory(maximum);
  const Result log_sum_memory(log_sum);
  Buffers buffers;
  buffers.x = x_memory.data();
  buffers.logsumexps = {y_memory.data(), maximum_memory.data(), log_sum_memory.data()};
  run(queue, problem, attributes, x, where, workspace, buffers);
}

void run_cross_entropy(Queue queue, ffi::AnyBuffer x, ffi::AnyBuffer labels, Where where, Out loss,
                       Out maximum, Out log_sum, Out workspace, Attributes attributes) {
  const Problem problem = to_problem(Function::kCrossEntropy, x, where, attributes);
  require_labels(labels, problem);
  require_rows(*loss, problem, "the loss must have one element for each row");
  require_parts(*maximum, *log_sum, problem);
  const Operand x_memory(x);
  const Operand labels_memory(labels);
  const Result loss_memory(loss);
  const Result maximum_memory(maximum);
  const Result log_sum_memory(log_sum);
  Buffers buffers;
  buffers.x = x_memory.data();
  buffers.labels = labels_memory.data();
  buffers.wide_labels = labels.element_type() == ffi::S64;
  buffers.loss = loss_memory.data();
  buffers.logsumexps = {nullptr, maximum_memory.data(), log_sum_memory.data()};
  run(queue, problem, attributes, x, where, workspace, buffers);
}

template <Function kFunction>
void run_tangent(Queue queue, ffi::AnyBuffer y, ffi::AnyBuffer t, Where where, Out result,
                 Out workspace, Attributes attributes) {
  const Problem problem = to_problem(kFunction, y, where, attributes);
  require_like(t, y, "t must have the dtype and size of y");
  require_like(*result, y, "the result must have the dtype and size of y");
  const Operand y_memory(y);
  const Operand t_memory(t);
  const Result result_memory(result);
  Buffers buffers;
  buffers.x = y_memory.data();
  buffers.t = t_memory.data();
  buffers.y = result_memory.data();
  run(queue, problem, attributes, y, where, workspace, buffers);
}

// The result may be x itself.
void run_elementwise(Queue queue, Function function, const ffi::AnyBuffer& x,
                     const ffi::AnyBuffer& maximum, const ffi::AnyBuffer& log_sum,
                     const ffi::AnyBuffer& g, const ffi::AnyBuffer* labels, const Where& where,
                     Out result, const Attributes& attributes) {
  const Problem problem = to_problem(function, x, where, attributes);
  require_parts(maximum, log_sum, problem);
  require_rows(g, problem, "the cotangent must have one element for each row");
  require_like(*result, x, "the result must have the dtype and size of x");
  const Operand x_memory(x);
  const Operand maximum_memory(maximum);
  const Operand log_sum_memory(log_sum);
  const Operand g_memory(g);
  std::optional<Operand> labels_memory;
  const Result result_memory(result);
  Buffers buffers;
  buffers.x = x_memory.data();
  buffers.maximum = maximum_memory.data();
  buffers.log_sum = log_sum_memory.data();
  buffers.g = g_memory.data();
  if (labels != nullptr) {
    require_labels(*labels, problem);
    labels_memory.emplace(*labels);
    buffers.labels = labels_memory->data();
    buffers.wide_labels = labels->element_type() == ffi::S64;
  }
  buffers.y = result_memory.data();
  run(queue, problem, attributes, x, where, buffers);
}

void run_logsumexp_cotangent(Queue queue, ffi::AnyBuffer x, ffi::AnyBuffer maximum,
                             ffi::AnyBuffer log_sum, ffi::AnyBuffer g, Where where, Out result,
                             Attributes attributes) {
  run_elementwise(queue, Function::kLogSumExpCotangent, x, maximum, log_sum, g, nullptr, where,
                  result, attributes);
}

void run_cross_entropy_cotangent(Queue queue, ffi::AnyBuffer x, ffi::AnyBuffer maximum,
                                 ffi::AnyBuffer log_sum, ffi::AnyBuffer g, ffi::AnyBuffer labels,
                                 Where where, Out result, Attributes attributes) {
  run_elementwise(queue, Function::kCrossEntropyCotangent, x, maximum, log_sum, g, &labels, where,
                  result, attributes);
}

const RegisterOp kRegistration(Op{
    "softmax",
    {std::begin(kAlgorithms), std::end(kAlgorithms)},
    {make_target<&run_forward<Function::kSoftmax>>("jax_gpuops_softmax_v1"),
     make_target<&run_forward<Function::kLogSoftmax>>("jax_gpuops_log_softmax_v1"),
     make_target<&run_logsumexp>("jax_gpuops_logsumexp_v1"),
     make_target<&run_logsumexp_with_residuals>("jax_gpuops_logsumexp_with_residuals_v1"),
     make_target<&run_cross_entropy>("jax_gpuops_cross_entropy_v2"),
     make_target<&run_tangent<Function::kSoftmaxTangent>>("jax_gpuops_softmax_tangent_v1"),
     make_target<&run_tangent<Function::kLogSoftmaxCotangent>>(
         "jax_gpuops_log_softmax_cotangent_v1"),
     make_target<&run_logsumexp_cotangent>("jax_gpuops_logsumexp_cotangent_v2"),
     make_target<&run_cross_entropy_cotangent>("jax_gpuops_cross_entropy_cotangent_v2")},
    &plan_of_fields<Problem>,
    &workspace_of_fields<Problem>,
});

}  // namespace
}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
