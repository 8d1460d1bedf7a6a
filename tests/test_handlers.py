"""Handlers called without the Python that guards them: an FFI error, never a crash."""

import re

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gpuops  # noqa: F401  registers the targets

pytestmark = pytest.mark.kernel


def struct(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


GEMM_V1 = {
    "algorithm": "",
    "transpose_a": False,
    "transpose_b": False,
    "alpha": np.float64(1),
    "beta": np.float64(0),
}
GEMM = {**GEMM_V1, "precision": "DEFAULT", "epilogue": "none"}
NO_BYTES = struct(0, dtype="uint8")
ROWS = {"algorithm": "", "inner_dims": 0}
SOFTMAX = {**ROWS, "scale": np.float64(1), "causal": False}
CAUSAL = {**SOFTMAX, "causal": True}
BYTES = struct(4, 64, dtype="uint8")
Y = [struct(4, 8), BYTES]
LABELS = struct(4, dtype="int32")
VERSIONS = {"cross_entropy": 2, "cross_entropy_cotangent": 2, "logsumexp_cotangent": 2}


def mask(*shape):
    return struct(*shape, dtype="bool")


@pytest.mark.parametrize(
    ("target", "results", "operands", "attributes", "text"),
    [
        (
            "softmax",
            [struct(4, 9), BYTES],
            [(4, 8)],
            SOFTMAX,
            "the result must have the dtype and size of x",
        ),
        (
            "softmax",
            [struct(4, 8, dtype="float16"), BYTES],
            [(4, 8)],
            SOFTMAX,
            "dtype and size of x",
        ),
        ("softmax", [struct(), BYTES], [()], SOFTMAX, "at least one dimension"),
        ("softmax", Y, [(4, 8)], {**SOFTMAX, "inner_dims": 2}, "less than the rank"),
        ("softmax", Y, [(4, 8)], {**SOFTMAX, "inner_dims": -1}, "less than the rank"),
        ("softmax", Y, [(4, 8)], {**SOFTMAX, "algorithm": "none"}, "'none' is unknown"),
        ("softmax", [struct(8), BYTES], [(8,)], CAUSAL, "the last of at least two axes"),
        ("softmax", Y, [(4, 8)], {**CAUSAL, "inner_dims": 1}, "the last of at least two axes"),
        ("softmax", Y, [(4, 8), (4, 8)], SOFTMAX, "where must have dtype bool"),
        (
            "logsumexp_cotangent",
            struct(4, 8, dtype="float8_e5m2"),
            [struct(4, 8, dtype="float8_e5m2"), (4,), (4,), (4,)],
            SOFTMAX,
            "'flat' has no kernel for dtype float8_e5m2",
        ),
        ("softmax", Y, [(4, 8), mask(8)], SOFTMAX, "where must have the rank of x"),
        ("softmax", Y, [(4, 8), mask(4, 7)], SOFTMAX, "where must broadcast to x"),
        ("softmax", Y, [(4, 8), mask(3, 8)], SOFTMAX, "where must broadcast to x"),
        (
            "softmax",
            [struct(*[2] * 9), BYTES],
            [(2,) * 9, mask(2, 1, 2, 1, 2, 1, 2, 1, 2)],
            SOFTMAX,
            "where alternates too often",
        ),
        (
            "softmax",
            [struct(4, 8), struct(4, 0, dtype="uint8")],
            [(4, 8)],
            {**SOFTMAX, "algorithm": "split"},
            "the workspace is too small",
        ),
        ("logsumexp", [struct(4), BYTES], [(4, 0)], SOFTMAX, "without elements"),
        ("logsumexp", [struct(5), BYTES], [(4, 8)], SOFTMAX, "one element for each row"),
        ("softmax_tangent", Y, [(4, 8), (4, 9)], SOFTMAX, "t must have the dtype and size of y"),
        (
            "cross_entropy",
            [struct(4), struct(4), struct(4), BYTES],
            [(4, 8), struct(4, dtype="int16")],
            SOFTMAX,
            "labels must have dtype int32 or int64",
        ),
        (
            "cross_entropy",
            [struct(4), struct(4), struct(4), BYTES],
            [(4, 8), struct(3, dtype="int32")],
            SOFTMAX,
            "one label for each row",
        ),
        (
            "cross_entropy",
            [struct(4), struct(4), struct(3), BYTES],
            [(4, 8), LABELS],
            SOFTMAX,
            "log_sum must have one element for each row",
        ),
        (
            "logsumexp_with_residuals",
            [struct(4), struct(3), struct(4), BYTES],
            [(4, 8)],
            SOFTMAX,
            "maximum must have one element for each row",
        ),
        (
            "logsumexp_cotangent",
            struct(4, 8),
            [(4, 8), (3,), (4,), (4,)],
            SOFTMAX,
            "maximum must have",
        ),
        (
            "cross_entropy_cotangent",
            struct(4, 8),
            [(4, 8), (4,), (4,), (3,), LABELS],
            SOFTMAX,
            "the cotangent must have one element for each row",
        ),
        ("sum", [struct(5), BYTES], [(4, 8)], ROWS, "one element for each row"),
        ("sum", [struct(4), struct(4, 64)], [(4, 8)], ROWS, "workspace must have dtype uint8"),
        ("max", [struct(4), BYTES], [(4, 0)], ROWS, "without elements"),
        ("max", [struct(4), BYTES], [()], ROWS, "at least one dimension"),
        ("max", [struct(4), BYTES], [(4, 8)], {**ROWS, "inner_dims": 2}, "less than the rank"),
        ("sum", [struct(4), BYTES], [(4, 8), (4, 8)], ROWS, "where must have dtype bool"),
        ("sum", [struct(4), BYTES], [(4, 8), mask(4, 7)], ROWS, "where must broadcast to x"),
        (
            "argmax",
            [struct(4, dtype="int32"), BYTES],
            [(4, 8), mask(4, 8)],
            ROWS,
            "only for floating-point x, and not for argmax and argmin",
        ),
        (
            "sum",
            [struct(4, dtype="int32"), BYTES],
            [(4, 8)],
            ROWS,
            "a result of dtype int32 from x",
        ),
        (
            "mean_and_var",
            [struct(4), struct(5), BYTES],
            [(4, 8)],
            {**ROWS, "correction": np.float64(0)},
            "the results must have the same dtype and size",
        ),
        (
            "mean_and_var",
            [struct(4, dtype="int32"), struct(4, dtype="int32"), BYTES],
            [(4, 8)],
            {**ROWS, "correction": np.float64(0)},
            "a result of dtype int32 from x",
        ),
        (
            "moments",
            [struct(4), struct(4), struct(5), BYTES],
            [(4, 8)],
            ROWS,
            "the results must have the same dtype and size",
        ),
        (
            "moments",
            [*(struct(4, dtype="bfloat16") for _ in range(3)), BYTES],
            [(4, 8)],
            ROWS,
            "moments must have dtype float32 or float64",
        ),
        (
            "sum",
            [struct(1), struct(1, 0, dtype="uint8")],
            [(1, 5000)],
            {**ROWS, "algorithm": "naive"},
            "the workspace is too small",
        ),
        (
            "transpose",
            struct(8, 4),
            [(4, 8)],
            {"algorithm": "", "permutation": np.array([1, 1])},
            "permutation",
        ),
        ("gemm_v2", [struct(4, 5), NO_BYTES], [(4, 8), (7, 5)], GEMM, "same depth k"),
        ("gemm_v2", [struct(20), NO_BYTES], [(4, 8), (8, 5)], GEMM, "shape of the product"),
        ("gemm_v2", [struct(5, 4), NO_BYTES], [(4, 8), (8, 5)], GEMM, "shape of the product"),
        # m * n is 2^64 + 1: counted in 64 bits, one element.
        (
            "gemm_v2",
            [struct(1, 1), NO_BYTES],
            [(274177, 0), (0, 67280421310721)],
            GEMM,
            "shape of the product",
        ),
        (
            "gemm_v2",
            [struct(4, 5), NO_BYTES],
            [(4, 8), (8, 5), (20,)],
            GEMM,
            "c must have the shape",
        ),
        ("gemm_v2", [struct(4, 5), NO_BYTES], [(4,), (8, 5)], GEMM, "two or three dimensions"),
        ("gemm_v2", [struct(4, 5), struct(4)], [(4, 8), (8, 5)], GEMM, "must have dtype uint8"),
        (
            "gemm_v2",
            [struct(4, 5), NO_BYTES],
            [(4, 8), (8, 5)],
            {**GEMM, "precision": "HIGHER"},
            "'HIGHER' is not a value",
        ),
        (
            "gemm_v2",
            [struct(4, 5), NO_BYTES],
            [(4, 8), (8, 5)],
            {**GEMM, "precision": "TF32_TF32_F32_X3"},
            "multiply float32 with precision F32_F32_F32, not TF32_TF32_F32_X3",
        ),
        (
            "gemm_v2",
            [struct(4, 5), NO_BYTES],
            [(4, 8), (8, 5)],
            {**GEMM, "epilogue": "tanh"},
            "'tanh' is not a value",
        ),
        (
            "gemm_v2",
            [struct(4, 5), NO_BYTES],
            [struct(4, 8, dtype="uint8"), struct(8, 5, dtype="uint8")],
            GEMM,
            "not uint8",
        ),
        (
            "gemm_v2",
            [struct(4, 5, dtype="float8_e4m3fn"), NO_BYTES],
            [struct(4, 8, dtype="float8_e4m3fn"), struct(8, 5, dtype="float8_e4m3fn")],
            GEMM,
            "a result of dtype float8_e4m3fn for operands of dtype float8_e4m3fn",
        ),
        (
            "gemm_v2",
            [struct(4, 5), NO_BYTES],
            [struct(4, 8, dtype="float8_e4m3fn"), struct(8, 5, dtype="float8_e5m2")],
            GEMM,
            "a and b must have the same dtype",
        ),
        (
            "gemm_v2",
            [struct(4, 5, dtype="int32"), NO_BYTES],
            [struct(4, 8, dtype="int8"), struct(8, 5, dtype="int8")],
            {**GEMM, "algorithm": "double_buffered"},
            "'double_buffered' does not support int8; 'tensor_core' does",
        ),
        (
            "gemm_v2",
            [struct(4, 5, dtype="int32"), NO_BYTES],
            [struct(4, 8, dtype="int8"), struct(8, 5, dtype="int8")],
            GEMM,
            "computes this product of int8: 'tensor_core' requires 1152 bytes of workspace",
        ),
        (
            "gemm_v2",
            [struct(4, 5), NO_BYTES],
            [(4, 8), (8, 5)],
            {**GEMM, "algorithm": "cublas"},
            "'cublas' must be called by its own FFI target",
        ),
        *(
            (
                "gemm_v2",
                [struct(4, 5), NO_BYTES],
                [(4, 8), (8, 5), *c],
                options,
                "an activation with alpha",
            )
            for options in [{**GEMM, "epilogue": "relu", "alpha": np.float64(2)}]
            for c in ([], [(4, 5)])
        ),
        ("linear", [struct(4, 5), NO_BYTES], [(4, 8), (7, 5)], GEMM, "same depth k"),
        ("linear", [struct(5, 4), NO_BYTES], [(4, 8), (8, 5), (5,)], GEMM, "shape of the product"),
        (
            "linear",
            [struct(4, 5), struct(4)],
            [(4, 8), (8, 5), (5,)],
            GEMM,
            "must have dtype uint8",
        ),
        *(
            ("linear", [struct(4, 5), NO_BYTES], [(4, 8), (8, 5), bias], GEMM, "the bias must have")
            for bias in [(4,), (), (1, 5), (4, 5), struct(5, dtype="float16")]
        ),
        *(
            ("linear", [struct(3, 4, 5), NO_BYTES], [x, w, bias], GEMM, "the bias must have")
            for x, w in [((3, 4, 8), (8, 5)), ((4, 8), (3, 8, 5))]
            for bias in [(4,), (2, 5), (3, 4), (3, 4, 5)]
        ),
        (
            "linear",
            [struct(4, 5), NO_BYTES],
            [(4, 8), (8, 5), (5,)],
            {**GEMM, "algorithm": "cublas"},
            "'cublas' must be called by its own FFI target",
        ),
        *(
            ("linear_add", [struct(4, 5), NO_BYTES], [(4, 8), (8, 5), *others], GEMM, text)
            for others, text in [
                ([(4, 4)], "c must have the shape and dtype"),
                ([(5,)], "c must have the shape and dtype"),
                ([(1, 4, 5)], "c must have the shape and dtype"),
                ([struct(4, 5, dtype="float16")], "c must have the shape and dtype"),
                ([(4, 5), (4,)], "the bias must have"),
            ]
        ),
        (
            "linear_add",
            [struct(3, 4, 5), NO_BYTES],
            [(3, 4, 8), (8, 5), (4, 5), (5,)],
            GEMM,
            "c must have the shape and dtype",
        ),
        *(
            ("glu", [struct(4, 5), NO_BYTES], [(4, 8), (8, 5), up], GEMM, "up must have")
            for up in [(8, 4), (5,), (1, 8, 5), struct(8, 5, dtype="float16")]
        ),
        (
            "glu",
            [struct(4, 5), NO_BYTES],
            [(4, 8), (8, 5), (8, 5)],
            GEMM,
            "products only of float16",
        ),
        (
            "glu",
            [struct(4, 5), NO_BYTES],
            [(4, 8), (8, 5), (8, 5)],
            {**GEMM, "algorithm": "shared"},
            "algorithm 'shared' does not support gated products",
        ),
        *(
            (
                "scaled_matmul",
                [struct(4, 5), struct(1152, dtype="uint8")],
                [struct(4, 8, dtype="int8"), struct(8, 5, dtype="int8"), *scales],
                GEMM,
                text,
            )
            for scales, text in [
                ([(4, 1), struct(1, 5, dtype="float16")], "scales must have dtype float32"),
                ([(4,), (1, 5)], "scales must have two dimensions, or three"),
                ([(1, 4, 1), (1, 5)], "scales must have two dimensions, or three"),
                ([(1, 4), (1, 5)], "one scale, or one for each row of a"),
                ([(4, 1), (5, 1)], "one scale, or one for each row of a"),
                ([(4, 2), (1, 5)], "one scale, or one for each row of a"),
            ]
        ),
        (
            "scaled_matmul",
            [struct(4, 5), NO_BYTES],
            [(4, 8), (8, 5), (4, 1), (1, 5)],
            GEMM,
            "scales only for 8-bit factors, not for float32",
        ),
        (
            "scaled_matmul",
            [struct(4, 5), NO_BYTES],
            [struct(4, 8, dtype="int8"), struct(8, 5, dtype="int8"), (4, 1), (1, 5)],
            {**GEMM, "epilogue": "relu"},
            "not support scales with c, alpha, a bias, an activation or a gate",
        ),
        (
            "scaled_matmul",
            [struct(4, 5, dtype="int32"), NO_BYTES],
            [struct(4, 8, dtype="int8"), struct(8, 5, dtype="int8"), (4, 1), (1, 5)],
            GEMM,
            "a result of dtype int32 for operands of dtype int8",
        ),
        ("gemm", struct(4, 5), [(4, 8), (7, 5)], GEMM_V1, "same depth k"),
        ("gemm_add", struct(4, 5), [(4, 8), (8, 5), (20,)], GEMM_V1, "c must have the shape"),
    ],
)
def test_bad_calls_are_errors(target, results, operands, attributes, text, implementation):
    name = target if re.search(r"_v\d$", target) else f"{target}_v{VERSIONS.get(target, 1)}"
    call = jax.ffi.ffi_call(f"jax_gpuops_{name}", results)
    operands = [struct(*each) if isinstance(each, tuple) else each for each in operands]
    arrays = [jnp.zeros(each.shape, each.dtype) for each in operands]
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(call(*arrays, **attributes))


def test_products_of_older_programs(implementation):
    """The targets of exported programs stay, with the attributes that they had."""
    a, b, c = jnp.arange(12.0).reshape(3, 4), jnp.ones((4, 5)), jnp.ones((3, 5))
    how = {**GEMM_V1, "alpha": np.float64(2), "beta": np.float64(3)}
    y = jax.ffi.ffi_call("jax_gpuops_gemm_v1", struct(3, 5))(a, b, **how)
    np.testing.assert_array_equal(y, 2 * a @ b)
    y = jax.ffi.ffi_call("jax_gpuops_gemm_add_v1", struct(3, 5))(a, b, c, **how)
    np.testing.assert_array_equal(y, 2 * a @ b + 3 * c)


def test_the_first_version_of_gemm_has_no_workspace_for_copies(implementation):
    if why := helpers.refusal("matmul", "tensor_core", [(8, 8), (8, 8)], "bfloat16"):
        pytest.skip(why)
    x = helpers.normal((67, 67), "bfloat16")
    call = jax.ffi.ffi_call("jax_gpuops_gemm_v1", struct(67, 67, dtype="bfloat16"))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"requires \d+ bytes .* and has 0"):
        jax.block_until_ready(call(x, x, **{**GEMM_V1, "algorithm": "tensor_core"}))
    expected = x.astype("float32") @ x.astype("float32")
    np.testing.assert_allclose(call(x, x, **GEMM_V1).astype("float32"), expected, 0.01, 0.01)
