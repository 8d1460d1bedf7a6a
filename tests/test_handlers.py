"""Handlers called without the Python that guards them: an FFI error, never a crash."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gpuops  # noqa: F401  registers the targets

pytestmark = pytest.mark.kernel


def struct(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


GEMM = {
    "algorithm": "",
    "transpose_a": False,
    "transpose_b": False,
    "alpha": np.float64(1),
    "beta": np.float64(0),
}
ROWS = {"algorithm": "", "inner_dims": 0}
BYTES = struct(4, 64, dtype="uint8")


@pytest.mark.parametrize(
    ("target", "results", "operands", "attributes", "text"),
    [
        ("softmax", struct(4, 9), [(4, 8)], ROWS, "wrong number of elements"),
        ("softmax", struct(4, 8, dtype="float16"), [(4, 8)], ROWS, "one dtype"),
        ("softmax", struct(), [()], ROWS, "at least one dimension"),
        ("softmax", struct(4, 8), [(4, 8)], {**ROWS, "inner_dims": 2}, "less than the rank"),
        ("softmax", struct(4, 8), [(4, 8)], {**ROWS, "algorithm": "none"}, "'none' is unknown"),
        ("softmax", struct(4, 8), [(4, 8)], {**ROWS, "inner_dims": -1}, "less than the rank"),
        ("logsumexp", struct(4), [(4, 0)], ROWS, "without elements"),
        ("sum", [struct(5), BYTES], [(4, 8)], ROWS, "one element for each row"),
        ("sum", [struct(4), struct(4, 64)], [(4, 8)], ROWS, "workspace must be of bytes"),
        ("max", [struct(4), BYTES], [(4, 0)], ROWS, "without elements"),
        (
            "transpose",
            struct(8, 4),
            [(4, 8)],
            {"algorithm": "", "permutation": np.array([1, 1])},
            "permutation",
        ),
        ("gemm", struct(4, 5), [(4, 8), (7, 5)], GEMM, "same depth k"),
        ("gemm", struct(20), [(4, 8), (8, 5)], GEMM, "shape of the product"),
        ("gemm", struct(5, 4), [(4, 8), (8, 5)], GEMM, "shape of the product"),
        # m * n is 2^64 + 1: counted in 64 bits, one element.
        ("gemm", struct(1, 1), [(274177, 0), (0, 67280421310721)], GEMM, "shape of the product"),
        ("gemm_add", struct(4, 5), [(4, 8), (8, 5), (20,)], GEMM, "c must have the shape"),
        ("gemm", struct(4, 5), [(4,), (8, 5)], GEMM, "two or three dimensions"),
    ],
)
def test_bad_calls_are_errors(target, results, operands, attributes, text, implementation):
    call = jax.ffi.ffi_call(f"jax_gpuops_{target}_v1", results)
    arrays = [jnp.zeros(shape) for shape in operands]
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(call(*arrays, **attributes))
