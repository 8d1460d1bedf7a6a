#include "core/handler.h"

#include <algorithm>
#include <optional>
#include <string_view>

#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

struct Attributes {
  std::string_view algorithm;  // empty: the plan chooses
  std::string_view precision;  // by its name in kPrecisions
  std::string_view epilogue;   // by its name in kEpilogueOps
  bool transpose_a;
  bool transpose_b;
  double alpha;
  double beta;
};

// The attributes of programs exported before there was a choice of precision and epilogue.
struct AttributesV1 {
  std::string_view algorithm;
  bool transpose_a;
  bool transpose_b;
  double alpha;
  double beta;
};

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(JAX_GPUOPS_NAMESPACE::matmul::Attributes,
                                      StructMember<std::string_view>("algorithm"),
                                      StructMember<std::string_view>("precision"),
                                      StructMember<std::string_view>("epilogue"),
                                      StructMember<bool>("transpose_a"),
                                      StructMember<bool>("transpose_b"),
                                      StructMember<double>("alpha"), StructMember<double>("beta"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(JAX_GPUOPS_NAMESPACE::matmul::AttributesV1,
                                      StructMember<std::string_view>("algorithm"),
                                      StructMember<bool>("transpose_a"),
                                      StructMember<bool>("transpose_b"),
                                      StructMember<double>("alpha"), StructMember<double>("beta"));

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {
namespace {

enum class Backend { kOurs, kCublas };

// a and b are matrices, or batches of them in three dims; a matrix with a batch is shared by it.
Problem to_problem(const ffi::AnyBuffer& a, const ffi::AnyBuffer& b, const ffi::AnyBuffer& result,
                   const Attributes& attributes) {
  const auto a_dims = a.dimensions(), b_dims = b.dimensions();
  require(a_dims.size() == 2 || a_dims.size() == 3, "a must have two or three dimensions");
  require(b_dims.size() == 2 || b_dims.size() == 3, "b must have two or three dimensions");
  Problem problem{};
  problem.share_a = a_dims.size() == 2;
  problem.share_b = b_dims.size() == 2;
  problem.batch = !problem.share_a ? a_dims[0] : !problem.share_b ? b_dims[0] : 1;
  require(problem.share_a || problem.share_b || a_dims[0] == b_dims[0],
          "a and b must have the same batch");
  const std::int64_t* const a_matrix = a_dims.end() - 2;
  const std::int64_t* const b_matrix = b_dims.end() - 2;
  problem.transpose_a = attributes.transpose_a;
  problem.transpose_b = attributes.transpose_b;
  problem.m = a_matrix[problem.transpose_a ? 1 : 0];
  problem.n = b_matrix[problem.transpose_b ? 0 : 1];
  problem.k = a_matrix[problem.transpose_a ? 0 : 1];
  require(problem.k == b_matrix[problem.transpose_b ? 1 : 0], "a and b must have the same depth k");
  require(a.element_type() == b.element_type(), "a and b must have the same dtype");
  problem.dtype = dtype_of(a);
  problem.result_dtype = dtype_of(result);
  problem.precision = enum_from_name<Precision>(attributes.precision);
  problem.epilogue = enum_from_name<EpilogueOp>(attributes.epilogue);
  return problem;
}

// True for (m, n), after the batch if a or b has one.
bool has_shape_of_product(const ffi::AnyBuffer& buffer, const Problem& problem) {
  const auto dims = buffer.dimensions();
  const std::size_t rank = problem.share_a && problem.share_b ? 2 : 3;
  return dims.size() == rank && dims[rank - 2] == problem.m && dims[rank - 1] == problem.n &&
         (rank == 2 || dims[0] == problem.batch);
}

// True for (n), or (batch, n) where the product has a batch.
bool has_shape_of_bias(const ffi::AnyBuffer& buffer, const Problem& problem) {
  const auto dims = buffer.dimensions();
  if (dims.size() == 1) return dims[0] == problem.n;
  const bool has_batch = !problem.share_a || !problem.share_b;
  return has_batch && dims.size() == 2 && dims[0] == problem.batch && dims[1] == problem.n;
}

bool has_shape_of(const ffi::AnyBuffer& buffer, const ffi::AnyBuffer& other) {
  const auto dims = buffer.dimensions(), others = other.dimensions();
  return std::equal(dims.begin(), dims.end(), others.begin(), others.end());
}

// The kind of a factor's scales, by their shape: (1, 1), (extent, 1), or (blocks, blocks of the
// depth), transposed if `transposed`. The batch comes first if the factor has one and the scales
// are not shared.
ScaleKind kind_of_scale(const ffi::AnyBuffer& scale, const ffi::AnyBuffer& factor,
                        std::int64_t extent, std::int64_t blocks, std::int64_t depth,
                        bool transposed) {
  require(scale.element_type() == ffi::F32, "scales must have dtype float32");
  const auto dims = scale.dimensions(), of_factor = factor.dimensions();
  require(
      dims.size() == 2 || (dims.size() == 3 && of_factor.size() == 3 && dims[0] == of_factor[0]),
      "scales must have two dimensions, or three of which the first is the batch of their factor");
  const std::int64_t own = dims.end()[transposed ? -1 : -2];
  const std::int64_t deep = dims.end()[transposed ? -2 : -1];
  if (own == 1 && deep == 1) return ScaleKind::kTensor;
  if (own == extent && deep == 1) return ScaleKind::kVector;
  require(
      own == blocks && deep == divide_up(depth, kScaleBlock),
      "there must be one scale, or one for each row of a or column of b, or one for each block");
  return ScaleKind::kBlocks;
}

using Addend = std::optional<ffi::AnyBuffer>;
using Out = ffi::Result<ffi::AnyBuffer>;

// The operands of a product besides its factors.
struct Others {
  Addend c;
  Addend bias;
  Addend up;
  Addend a_scale;  // both or none
  Addend b_scale;
};

template <Backend kBackend>
void multiply(const Queue& queue, const ffi::AnyBuffer& a, const ffi::AnyBuffer& b,
              const Others& others, Out result, std::optional<Out> workspace,
              const Attributes& attributes) {
  const auto& [c, bias, up, a_scale, b_scale] = others;
  require((attributes.algorithm == name_of(Algorithm::kCublas)) == (kBackend == Backend::kCublas),
          "algorithm 'cublas' must be called by its own FFI target, and no other algorithm may");
  require(!workspace || (*workspace)->element_type() == ffi::U8,
          "the workspace must have dtype uint8");
  Problem problem = to_problem(a, b, *result, attributes);
  require(has_shape_of_product(*result, problem), "the result must have the shape of the product");
  require(!c || (c->element_type() == result->element_type() && has_shape_of_product(*c, problem)),
          "c must have the shape and dtype of the result");
  require(!bias ||
              (bias->element_type() == result->element_type() && has_shape_of_bias(*bias, problem)),
          "the bias must have the dtype of the result and an element for each of its columns");
  require(!up || (up->element_type() == b.element_type() && has_shape_of(*up, b)),
          "up must have the shape and dtype of b");
  if (a_scale) {
    problem.a_scale =
        kind_of_scale(*a_scale, a, problem.m, problem.m, problem.k, problem.transpose_a);
    problem.b_scale = kind_of_scale(*b_scale, b, problem.n, divide_up(problem.n, kScaleBlock),
                                    problem.k, !problem.transpose_b);
    problem.share_a_scale = a_scale->dimensions().size() == 2;
    problem.share_b_scale = b_scale->dimensions().size() == 2;
  }
  const auto dims = result->dimensions();
  if (product(dims, 0, dims.size()) == 0) return;
  const Operand a_data(a), b_data(b);
  std::optional<Operand> c_data;
  if (c) c_data.emplace(*c);
  std::optional<Operand> bias_data;
  if (bias) bias_data.emplace(*bias);
  std::optional<Operand> up_data;
  if (up) up_data.emplace(*up);
  std::optional<Operand> a_scale_data, b_scale_data;
  if (a_scale) a_scale_data.emplace(*a_scale);
  if (b_scale) b_scale_data.emplace(*b_scale);
  const Result result_data(result);
  std::optional<WorkspaceBuffer> memory;
  if (workspace) memory.emplace(*workspace);
  const Buffers buffers{a_data.data(),
                        b_data.data(),
                        c ? c_data->data() : nullptr,
                        bias ? bias_data->data() : nullptr,
                        up ? up_data->data() : nullptr,
                        a_scale ? a_scale_data->data() : nullptr,
                        b_scale ? b_scale_data->data() : nullptr,
                        result_data.data(),
                        memory ? memory->data() : nullptr,
                        attributes.alpha,
                        attributes.beta};
  problem.has_c = c.has_value();
  problem.scaled = attributes.alpha != 1;
  problem.has_bias = bias.has_value();
  problem.gated = up.has_value();
  problem.share_bias = bias && bias->dimensions().size() == 1;
  problem.workspace = workspace ? static_cast<std::int64_t>((*workspace)->size_bytes()) : 0;
  problem.alignment =
      common_alignment({buffers.a, buffers.b, buffers.c, buffers.up, buffers.result});
  plan_and_launch(queue, "matmul", problem, attributes.algorithm,
                  [&](const Queue& to_queue, const Plan& chosen) {
                    launch(to_queue, chosen, problem, buffers);
                  });
}

template <Backend kBackend>
void run(Queue queue, ffi::AnyBuffer a, ffi::AnyBuffer b, Addend c, Out result, Out workspace,
         Attributes attributes) {
  Others others;
  others.c = c;
  multiply<kBackend>(queue, a, b, others, result, workspace, attributes);
}

// A product with a bias in place of c.
void run_linear(Queue queue, ffi::AnyBuffer a, ffi::AnyBuffer b, Addend bias, Out result,
                Out workspace, Attributes attributes) {
  Others others;
  others.bias = bias;
  multiply<Backend::kOurs>(queue, a, b, others, result, workspace, attributes);
}

// The same with a c, too.
void run_linear_add(Queue queue, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer c, Addend bias,
                    Out result, Out workspace, Attributes attributes) {
  Others others;
  others.c = c;
  others.bias = bias;
  multiply<Backend::kOurs>(queue, a, b, others, result, workspace, attributes);
}

// A gated product: b is the gate's factor.
void run_glu(Queue queue, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer up, Out result,
             Out workspace, Attributes attributes) {
  Others others;
  others.up = up;
  multiply<Backend::kOurs>(queue, a, b, others, result, workspace, attributes);
}

// A product of factors with scales.
void run_scaled(Queue queue, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer a_scale,
                ffi::AnyBuffer b_scale, Out result, Out workspace, Attributes attributes) {
  Others others;
  others.a_scale = a_scale;
  others.b_scale = b_scale;
  multiply<Backend::kOurs>(queue, a, b, others, result, workspace, attributes);
}

// The first version had a separate target for products with c.

Attributes of_this_version(const AttributesV1& v1) {
  return {v1.algorithm,
          kPrecisions[static_cast<int>(Precision::kDefault)],
          kEpilogueOps[static_cast<int>(EpilogueOp::kNone)],
          v1.transpose_a,
          v1.transpose_b,
          v1.alpha,
          v1.beta};
}

template <Backend kBackend>
void run_v1(Queue queue, ffi::AnyBuffer a, ffi::AnyBuffer b, Out result, AttributesV1 attributes) {
  multiply<kBackend>(queue, a, b, Others{}, result, std::nullopt, of_this_version(attributes));
}

template <Backend kBackend>
void run_add_v1(Queue queue, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer c, Out result,
                AttributesV1 attributes) {
  Others others;
  others.c = c;
  multiply<kBackend>(queue, a, b, others, result, std::nullopt, of_this_version(attributes));
}

// cuBLAS allocates memory and streams of its own, so its targets stay out of CUDA graphs.
constexpr ffi::Traits kNoTraits{};

const RegisterOp kRegistration(Op{
    "matmul",
    {std::begin(kAlgorithms), std::end(kAlgorithms)},
    {make_target<&run<Backend::kOurs>>("jax_gpuops_gemm_v2"),
     make_target<&run<Backend::kCublas>, kNoTraits>("jax_gpuops_cublas_gemm_v2"),
     make_target<&run_linear>("jax_gpuops_linear_v1"),
     make_target<&run_linear_add>("jax_gpuops_linear_add_v1"),
     make_target<&run_glu>("jax_gpuops_glu_v1"),
     make_target<&run_scaled>("jax_gpuops_scaled_matmul_v1"),
     make_target<&run_v1<Backend::kOurs>>("jax_gpuops_gemm_v1"),
     make_target<&run_add_v1<Backend::kOurs>>("jax_gpuops_gemm_add_v1"),
     make_target<&run_v1<Backend::kCublas>, kNoTraits>("jax_gpuops_cublas_gemm_v1"),
     make_target<&run_add_v1<Backend::kCublas>, kNoTraits>("jax_gpuops_cublas_gemm_add_v1")},
    &plan_of_fields<Problem>,
    &workspace_of_fields<Problem>,
});

}  // namespace
}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
