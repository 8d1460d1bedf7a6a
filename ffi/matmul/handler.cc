#include "core/handler.h"

#include <string_view>

#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

struct Attributes {
  std::string_view algorithm;  // empty: the plan chooses
  bool transpose_a;
  bool transpose_b;
  double alpha;
  double beta;
};

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(JAX_GPUOPS_NAMESPACE::matmul::Attributes,
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
  const bool share_a = a_dims.size() == 2, share_b = b_dims.size() == 2;
  const std::int64_t batch = !share_a ? a_dims[0] : !share_b ? b_dims[0] : 1;
  require(share_a || share_b || a_dims[0] == b_dims[0], "a and b must have the same batch");
  const std::int64_t* const a_matrix = a_dims.end() - 2;
  const std::int64_t* const b_matrix = b_dims.end() - 2;
  const std::int64_t k = a_matrix[attributes.transpose_a ? 0 : 1];
  require(k == b_matrix[attributes.transpose_b ? 1 : 0], "a and b must have the same depth k");
  require(a.element_type() == b.element_type(), "a and b must have one dtype");
  const DType dtype = dtype_of(a), result_dtype = dtype_of(result);
  const bool is_half = dtype == DType::kFloat16 || dtype == DType::kBFloat16;
  require(result_dtype == dtype || (is_half && result_dtype == DType::kFloat32),
          "the result must have the dtype of a and b or that of their accumulator");
  return {dtype,
          result_dtype,
          batch,
          a_matrix[attributes.transpose_a ? 1 : 0],
          b_matrix[attributes.transpose_b ? 0 : 1],
          k,
          attributes.transpose_a,
          attributes.transpose_b,
          share_a,
          share_b};
}

// True for (m, n), after the batch if a or b has one.
bool has_shape_of_product(const ffi::AnyBuffer& buffer, const Problem& problem) {
  const auto dims = buffer.dimensions();
  const std::size_t rank = problem.share_a && problem.share_b ? 2 : 3;
  return dims.size() == rank && dims[rank - 2] == problem.m && dims[rank - 1] == problem.n &&
         (rank == 2 || dims[0] == problem.batch);
}

template <Backend kBackend>
void multiply(const Queue& queue, const ffi::AnyBuffer& a, const ffi::AnyBuffer& b,
              const ffi::AnyBuffer* c, ffi::Result<ffi::AnyBuffer> result,
              const Attributes& attributes) {
  const Problem problem = to_problem(a, b, *result, attributes);
  require(has_shape_of_product(*result, problem), "the result must have the shape of the product");
  require(c == nullptr ||
              (c->element_type() == result->element_type() && has_shape_of_product(*c, problem)),
          "c must have the shape and dtype of the result");
  const auto dims = result->dimensions();
  if (product(dims, 0, dims.size()) == 0) return;
  const Operand a_data(a), b_data(b);
  const Operand c_data(c == nullptr ? a : *c);
  const Result result_data(result);
  const Buffers buffers{
      a_data.data(),      b_data.data(),    c == nullptr ? nullptr : c_data.data(),
      result_data.data(), attributes.alpha, attributes.beta};
  if constexpr (kBackend == Backend::kCublas) {
    launch_cublas(problem, buffers, queue);
  } else {
    launch(plan(problem, attributes.algorithm, *queue.device), problem, buffers, queue);
  }
}

template <Backend kBackend>
void run(Queue queue, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::Result<ffi::AnyBuffer> result,
         Attributes attributes) {
  multiply<kBackend>(queue, a, b, nullptr, result, attributes);
}

template <Backend kBackend>
void run_add(Queue queue, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer c,
             ffi::Result<ffi::AnyBuffer> result, Attributes attributes) {
  multiply<kBackend>(queue, a, b, &c, result, attributes);
}

Problem to_problem(const Arguments& arguments) {
  const auto flag = [&](std::string_view name) { return arguments.integer(name) != 0; };
  return {dtype_from_name(arguments.text("dtype")),
          dtype_from_name(arguments.text("result_dtype")),
          arguments.integer("batch"),
          arguments.integer("m"),
          arguments.integer("n"),
          arguments.integer("k"),
          flag("transpose_a"),
          flag("transpose_b"),
          flag("share_a"),
          flag("share_b")};
}

// cuBLAS allocates memory and streams of its own, so its targets stay out of CUDA graphs.
constexpr ffi::Traits kNoTraits{};

const RegisterOp kRegistration(Op{
    "matmul",
    {std::begin(kAlgorithms), std::end(kAlgorithms)},
    {make_target<&run<Backend::kOurs>>("jax_gpuops_gemm_v1"),
     make_target<&run_add<Backend::kOurs>>("jax_gpuops_gemm_add_v1"),
     make_target<&run<Backend::kCublas>, kNoTraits>("jax_gpuops_cublas_gemm_v1"),
     make_target<&run_add<Backend::kCublas>, kNoTraits>("jax_gpuops_cublas_gemm_add_v1")},
    [](const Arguments& arguments, const Device& device) {
      const Plan chosen = plan(to_problem(arguments), arguments.text("algorithm"), device);
      return PlanInfo{kAlgorithms[static_cast<int>(chosen.algorithm)].name, chosen.reason};
    },
    [](const Arguments&) { return std::int64_t{0}; },
});

}  // namespace
}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
