"""Every algorithm of every op once, on awkward shapes: the subset to run under compute-sanitizer.

    XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async compute-sanitizer --tool memcheck \\
        python -m pytest -m sanitizer

and the same with `--tool racecheck` and `--tool synccheck`. memcheck sees the ends of buffers only
with that allocator: JAX's pool is one allocation, and "platform" rounds each up to 2 MiB.

Without a GPU they tell that the subset works. Under AddressSanitizer run the tests of each op,
which have all of these algorithms, and more rows.
"""

import functools
import itertools
import os
import shutil
import subprocess
import sys

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gpuops as ops
from jax_gpuops import _cross_entropy

OF_OURS = ("--kernel-name", "kns=jax_gpuops_cuda")
"""The option by which the tools look at our kernels alone, as those of .ci/gpu.py do."""

pytestmark = [pytest.mark.sanitizer, pytest.mark.any_version]


def rows(dtype):
    return helpers.normal((5, 131), dtype)


COLUMN_KERNELS = ["column", "column_two_pass", "column_split", "strip"]
LONG_KERNELS = ["block_two_pass", "strided", "cluster", "cluster_shared", "split"]


def softmax_operand(algorithm, dtype, shape=None, **options):
    """An array and its axis; rows too long for one block's registers where they can be."""
    usual = {"strip": (400, 200), "column_split": (300, 131), "block": (2, 7001)}
    usual |= {"split_pipelined": (14, 40_004), **dict.fromkeys(LONG_KERNELS, (2, 40001))}
    if dtype == "float32":
        usual["split_pipelined"] = (14, 20_004)  # more than a block holds, and less than four
    shape, axis = shape or usual.get(algorithm, (5, 131)), 0 if algorithm in COLUMN_KERNELS else -1
    if why := helpers.refusal("softmax", algorithm, shape, dtype, axis=axis, **options):
        pytest.skip(why)
    return helpers.normal(shape, dtype), axis


def call_softmax(algorithm, dtype, implementation, **shape):
    x, axis = softmax_operand(algorithm, dtype, **shape)
    y = ops.softmax(x, axis, implementation=implementation, algorithm=algorithm)
    return y, jax.nn.softmax(x.astype(np.float32), axis)


def call_softmax_of_packed_columns(algorithm, dtype, implementation):
    """In packs, which other columns do not fit; they are copied to shared memory in lines."""
    return call_softmax(algorithm, dtype, implementation, shape=(9, 136))


def call_masked_softmax(algorithm, dtype, implementation, **shape):
    x, axis = softmax_operand(algorithm, dtype, **shape)
    where = np.arange(x.shape[0])[:, None] != np.arange(x.shape[1]) % 4
    if axis == -1 and helpers.refusal("softmax", algorithm, x.shape, dtype, where=where):
        whole = x.shape[1] // 8 * 8
        x, where = x[:, :whole], where[:, :whole]
    y = ops.softmax(x, axis, where, implementation=implementation, algorithm=algorithm)
    return y, jax.nn.softmax(x.astype(np.float32), axis, where)


def call_softmax_tangent(algorithm, dtype, implementation, **shape):
    x, axis = softmax_operand(algorithm, dtype, **shape)
    t = helpers.normal(x.shape, dtype, seed=1)
    y = jax.nn.softmax(x, axis)
    params = {"axes": (axis % 2,), "scale": 1.0, "causal": False}
    actual = helpers.primitive("softmax_tangent").bind(
        y, t, **params, implementation=implementation, algorithm=algorithm
    )
    y, t = np.asarray(y, np.float32), t.astype(np.float32)
    return actual, y * (t - (y * t).sum(axis, keepdims=True))


def call_cross_entropy(algorithm, dtype, implementation):
    x, labels = rows(dtype), np.array([0, 130, -1, 131, -200])
    y = ops.softmax_cross_entropy_with_integer_labels(
        x, labels, implementation=implementation, algorithm=algorithm
    )
    x = x.astype(np.float32)
    label_logit = np.array([x[0, 0], x[1, 130], x[2, 130], np.nan, np.nan])
    return y, jax.nn.logsumexp(x, -1) - label_logit


def call_cross_entropy_gradient(algorithm, dtype, implementation):
    x, labels = rows(dtype), np.array([0, 130, -1, 131, -200], np.int32)
    expected = jax.nn.softmax(x.astype(np.float32))
    log_sum = -jnp.log(expected.max(1))  # of powers relative to the maximum
    residuals = x.max(1).astype(np.float32), log_sum
    how = {"implementation": implementation, "algorithm": algorithm}
    gradient = _cross_entropy._cross_entropy_cotangent_p.bind(
        x, *residuals, jnp.ones(5), labels, axes=(1,), **how
    )
    return gradient, expected - jax.nn.one_hot([0, 130, 130, 131, -1], 131)


def call_cross_entropy_gradient_of_columns(algorithm, dtype, implementation):
    """Rows side by side: packs of them, and with a mask single ones."""
    x, labels = helpers.normal((3, 21, 12), dtype), np.arange(36).reshape(3, 12) % 21
    where = np.arange(12) + 1 != np.arange(21)[None, :, None]  # leaves out no label
    how = {"axis": 1, "implementation": implementation}

    def loss(x, **options):
        loss = ops.softmax_cross_entropy_with_integer_labels
        return loss(x, labels, **how, **options).astype(jnp.float32).sum()

    one_hot = labels[:, None] == np.arange(21)[:, None]
    expected = [jax.nn.softmax(x.astype(np.float32), 1, each) - one_hot for each in (None, where)]
    return (
        jnp.stack([jax.grad(loss)(x), jax.grad(functools.partial(loss, where=where))(x)]),
        np.stack(expected),
    )


def reduce_operand(algorithm, dtype):
    """An array and its axis, of which several blocks have parts where they can."""
    shape = {"multiple": (2, 40_001), "cluster": (2, 40_001), "interleaved": (400, 33)}
    shape, axis = shape.get(algorithm, (5, 131)), 0 if algorithm in ("column", "interleaved") else 1
    if why := helpers.refusal("max", algorithm, shape, dtype, axis=axis):
        pytest.skip(why)
    return helpers.normal(shape, dtype), axis


def call_reduce(algorithm, dtype, implementation):
    x, axis = reduce_operand(algorithm, dtype)
    y = ops.max(x, axis, implementation=implementation, algorithm=algorithm)
    return y, x.astype(np.float32).max(axis)


def call_reduce_of_short_columns(algorithm, dtype, implementation):
    """Threads divide the columns, and combine their partials."""
    x = helpers.normal((60, 131), dtype)
    y = ops.argmax(x, 0, implementation=implementation, algorithm=algorithm)
    return y, x.astype(np.float32).argmax(0)


def call_masked_reduce(algorithm, dtype, implementation):
    x, axis = reduce_operand(algorithm, dtype)
    where = np.arange(x.shape[0])[:, None] != np.arange(x.shape[1]) % 4
    how = {"implementation": implementation, "algorithm": algorithm}
    y = ops.max(x, axis, where=where, initial=-9, **how)
    return y, x.astype(np.float32).max(axis, where=where, initial=-9)


def call_mean_and_var(algorithm, dtype, implementation, **where):
    x, axis = reduce_operand(algorithm, dtype)
    how = {"implementation": implementation, "algorithm": algorithm}
    y = ops.mean_and_var(x, axis, dtype="float32", **where, **how)
    x = x.astype(np.float32)
    return np.stack(y), np.stack([x.mean(axis, **where), x.var(axis, **where)])


def call_masked_mean_and_var(algorithm, dtype, implementation):
    x, _ = reduce_operand(algorithm, dtype)
    where = np.arange(x.shape[0])[:, None] != np.arange(x.shape[1]) % 4
    return call_mean_and_var(algorithm, dtype, implementation, where=where)


def call_transpose(algorithm, dtype, implementation):
    if algorithm == "copy":  # takes what keeps runs
        x = helpers.normal((5, 7, 6), dtype)
        y = ops.transpose(x, (1, 0, 2), implementation=implementation, algorithm=algorithm)
        return y, x.transpose(1, 0, 2)
    x = rows(dtype)
    return ops.transpose(x, implementation=implementation, algorithm=algorithm), x.T


def call_transpose_of_channels(algorithm, dtype, implementation):
    """From planes and to planes, in registers and through shared memory, of whole packs or not."""
    results, expected = [], []
    for channels, pixels in itertools.product((3, 6), (160, 131)):
        for shape in [(2, channels, pixels), (2, pixels, channels)]:
            x = helpers.normal(shape, dtype)
            how = {"implementation": implementation, "algorithm": algorithm}
            results.append(ops.transpose(x, (0, 2, 1), **how).ravel())
            expected.append(x.swapaxes(1, 2).ravel())
    return np.concatenate(results), np.concatenate(expected)


def call_matmul(algorithm, dtype, implementation):
    on_tensor_cores = algorithm in (
        *("tensor_core", "split_k", "parallel_split_k", "mma_pipelined", "mma_batched"),
        "wgmma_batched",
    )
    is_copied = on_tensor_cores or algorithm == "fma_pipelined"
    shapes = ((131, 72), (72, 136)) if is_copied else ((5, 131), (131, 67))
    if algorithm in ("fma_sliced", "fma_skinny"):  # of which call_linear has no cluster
        shapes = ((5, 1100), (1100, 12))
    if algorithm == "fma_batched":  # by copies of 16 bytes, which call_linear has not
        shapes = ((2, 33, 72), (2, 72, 36))
    a, b = (helpers.normal(shape, dtype, seed) for seed, shape in enumerate(shapes))
    if why := helpers.refusal("matmul", algorithm, shapes, dtype):
        pytest.skip(why)
    if on_tensor_cores and dtype == "float32":  # numbers that TF32 has
        a, b = (x.astype("bfloat16").astype("float32") for x in (a, b))
    y = ops.matmul(a, b, implementation=implementation, algorithm=algorithm)
    return y, a.astype(np.float32) @ b.astype(np.float32)


def call_turned_matmul(algorithm, dtype, implementation):
    """By tiles of 160 rows, which the plan prefers for so few more than 256.

    Of float32 by clusters with tiles of 128 rows.
    """
    on_host = implementation == "interpret"  # with 4 multiprocessors; GPUs have many
    if dtype == "float32":
        m, n = (104, 424) if on_host else (1000, 2040)
    else:
        m, n = (308, 264) if on_host else (308, 8168)
    a, b = helpers.factor((m, 136), dtype), helpers.factor((136, n), dtype, seed=1)
    if why := helpers.refusal("matmul", algorithm, (a.shape, b.shape), dtype):
        pytest.skip(why)
    y = ops.matmul(a, b, implementation=implementation, algorithm=algorithm)
    return y, a.astype(np.float32) @ b.astype(np.float32)


def call_untransposed_split(algorithm, dtype, implementation):
    """By tiles whose partial sums are written by TMA: of 16 bits for an a that is not K-major."""
    transpose_a = dtype != "float32"
    a, b = helpers.factor((131, 264), dtype), helpers.factor((264, 136), dtype, seed=1)
    if why := helpers.refusal("matmul", algorithm, (a.shape, b.shape), dtype):
        pytest.skip(why)
    how = {"implementation": implementation, "algorithm": algorithm}
    y = helpers.dot(helpers.stored(a, transpose_a), b, transpose_a, False, dtype, **how)
    return y, a.astype(np.float32) @ b.astype(np.float32)


def call_linear(algorithm, dtype, implementation):
    on_tensor_cores = algorithm in ("tensor_core", "split_k", "mma_pipelined", "mma_batched")
    shapes = ((131, 72), (72, 131)) if on_tensor_cores else ((5, 131), (131, 67))
    if algorithm == "wgmma_batched":
        shapes = ((131, 72), (72, 136))
    x, w = (helpers.normal(shape, dtype, seed) for seed, shape in enumerate(shapes))
    b = helpers.normal(w.shape[1:], dtype, seed=2)
    if why := helpers.refusal("linear", algorithm, shapes, dtype, activation="relu"):
        pytest.skip(why)
    if on_tensor_cores and dtype == "float32":  # numbers that TF32 has
        x, w = (each.astype("bfloat16").astype("float32") for each in (x, w))
    how = {"implementation": implementation, "algorithm": algorithm}
    y = ops.linear(x, w, b, activation="relu", **how)
    x, w, b = (each.astype(np.float32) for each in (x, w, b))
    return y, np.maximum(x @ w + b, 0)


def call_linear_of_many_tiles(algorithm, dtype, implementation):
    """Of 16 bits by consumers that take turns."""
    m, n = (500, 760) if implementation == "interpret" else (4000, 4104)
    x, w = helpers.factor((m, 40), dtype), helpers.factor((40, n), dtype, seed=1)
    b = helpers.normal((n,), dtype, seed=2)
    if why := helpers.refusal("linear", algorithm, (x.shape, w.shape), dtype):
        pytest.skip(why)
    y = ops.linear(x, w, b, implementation=implementation, algorithm=algorithm)
    x, w, b = (each.astype(np.float32) for each in (x, w, b))
    return y, x @ w + b


def call_linear_with_residual(algorithm, dtype, implementation):
    shapes = ((131, 72), (72, 132))
    x, w = (helpers.normal(shape, dtype, seed) for seed, shape in enumerate(shapes))
    residual = helpers.normal((131, 132), dtype, seed=2)
    struct = jax.ShapeDtypeStruct(residual.shape, dtype)
    if why := helpers.refusal("linear", algorithm, shapes, dtype, residual=struct):
        pytest.skip(why)
    if algorithm != "double_buffered" and dtype == "float32":  # numbers that TF32 has
        x, w = (each.astype("bfloat16").astype("float32") for each in (x, w))
    how = {"implementation": implementation, "algorithm": algorithm}
    y = ops.linear(x, w, residual=residual, **how)
    x, w, residual = (each.astype(np.float32) for each in (x, w, residual))
    return y, x @ w + residual


def call_glu(algorithm, dtype, implementation):
    shapes = ((131, 72), (72, 136), (72, 136))
    x, gate, up = (helpers.normal(shape, dtype, seed) for seed, shape in enumerate(shapes))
    if why := helpers.refusal("glu", algorithm, shapes, dtype):
        pytest.skip(why)
    how = {"implementation": implementation, "algorithm": algorithm}
    y = ops.glu(x, gate, up, activation="relu", **how)
    x, gate, up = (each.astype(np.float32) for each in (x, gate, up))
    return y, np.maximum(x @ gate, 0) * (x @ up)


def names(family):
    return [a.name for a in ops.algorithms(family)]


ROW_KERNELS = ["warp", "small_block", "block", *LONG_KERNELS]
ROW_GRADIENTS = ["elementwise", "flat"]
CALLS = [
    (call_softmax, [name for name in names("softmax") if name not in ROW_GRADIENTS]),
    (call_softmax_of_packed_columns, ["column"]),
    (call_masked_softmax, [*ROW_KERNELS, "column", "column_two_pass", "column_split"]),
    (call_softmax_tangent, ["staged", *ROW_KERNELS, *COLUMN_KERNELS]),
    (call_cross_entropy, ["staged", *ROW_KERNELS]),
    (call_cross_entropy_gradient, ROW_GRADIENTS),
    (call_cross_entropy_gradient_of_columns, ["elementwise"]),
    (call_reduce, names("reduce")),
    (call_reduce_of_short_columns, ["column"]),
    (call_masked_reduce, ["multiple", "row", "cluster", "column"]),
    (call_mean_and_var, names("reduce")[5:]),
    (call_masked_mean_and_var, ["multiple", "row", "cluster", "column"]),
    (call_transpose, names("transpose")),
    (call_transpose_of_channels, ["narrow"]),
    (call_matmul, names("matmul")),
    (call_turned_matmul, ["tensor_core"]),
    (call_untransposed_split, ["parallel_split_k"]),
    (call_linear, [name for name in names("matmul") if name != "cublas"]),
    (call_linear_of_many_tiles, ["tensor_core"]),
    (call_linear_with_residual, ["tensor_core", "mma_pipelined", "double_buffered"]),
    (call_glu, ["tensor_core"]),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("call", "algorithm"),
    [(call, name) for call, algorithms in CALLS for name in algorithms],
    ids=lambda value: value if isinstance(value, str) else value.__name__.removeprefix("call_"),
)
def test_every_algorithm(call, algorithm, dtype, implementation):
    if call is call_cross_entropy and (why := helpers.refusal("softmax", algorithm)):
        pytest.skip(why)
    if algorithm == "cublas" and implementation != "cuda":
        pytest.skip("the library cuBLAS runs on GPUs")
    check(call(algorithm, dtype, implementation), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("call", "algorithm", "rows", "row_bytes"),
    [
        (call_softmax, "cluster_shared", 2, 560_000),
        (call_masked_softmax, "cluster_shared", 2, 560_000),
        (call_softmax_tangent, "cluster_shared", 2, 400_000),
        # By one group of blocks or two, in which all that tells states is used for a second row.
        (call_softmax, "split_pipelined", 14, 4_200_000),
        (call_masked_softmax, "split_pipelined", 14, 4_200_000),
        (call_softmax_tangent, "split_pipelined", 14, 4_200_000),
    ],
)
def test_rows_that_shared_memory_holds(call, algorithm, rows, row_bytes, dtype, implementation):
    """By the blocks of a cluster, and by blocks that wait for each other."""
    if implementation == "interpret" and algorithm == "split_pipelined":
        row_bytes = 84_000  # for 4 multiprocessors
    ragged = call is not call_masked_softmax
    shape = (rows, row_bytes // helpers.np_dtype(dtype).itemsize + ragged)
    check(call(algorithm, dtype, implementation, shape=shape), dtype)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("transpose", [False, True])
def test_factors_of_8_bits(transpose, dtype, implementation):
    """Rows that are copied or transposed, whole 16 bytes or not, and sums that are promoted."""
    if why := helpers.refusal("matmul", "tensor_core", [(8, 8)] * 2, "bfloat16"):
        pytest.skip(why)
    result = "int32" if dtype == "int8" else "float32"
    for sizes in ((131, 137, 200), (144, 272, 129)):
        m, n, k = sizes
        a = helpers.factor_of_8_bits((m, k), dtype)
        b = helpers.factor_of_8_bits((n, k) if transpose else (k, n), dtype, seed=1)

        def product(a, b):
            how = {"implementation": implementation, "algorithm": "tensor_core"}
            how |= {"precision": "highest", "preferred_element_type": result}
            return ops.matmul(a, b.T if transpose else b, **how)

        y = jax.jit(product)(a, b)
        check((y, a.astype(np.float32) @ (b.T if transpose else b).astype(np.float32)), "bfloat16")


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        *(("float8_e4m3fn", kind) for kind in ("tensor", "vector", "blocks")),
        *(("int8", kind) for kind in ("tensor", "vector")),
    ],
)
def test_scaled_factors_of_8_bits(dtype, kind, implementation):
    """Scales up to the last row, column and block, and results of 8, 16 and 32 bits."""
    if why := helpers.refusal("matmul", "tensor_core", [(8, 8)] * 2, "bfloat16"):
        pytest.skip(why)
    for (m, n, k), result in (
        ((131, 137, 200), "float32"),
        ((144, 272, 129), "bfloat16"),
        ((70, 300, 64), "int8" if dtype == "int8" else "float16"),
    ):
        a = helpers.factor_of_8_bits((m, k), dtype)
        b = helpers.factor_of_8_bits((k, n), dtype, seed=1)
        depth, cols = -(-k // 128), -(-n // 128)
        dims = {
            "tensor": ((1, 1), (1, 1)),
            "vector": ((m, 1), (1, n)),
            "blocks": ((m, depth), (depth, cols)),
        }
        size = 1e-3 if result == "int8" else 1.0
        a_scale, b_scale = (
            (size * (1 + np.random.default_rng(i).random(each))).astype(np.float32)
            for i, each in enumerate(dims[kind])
        )
        how = {"implementation": implementation, "preferred_element_type": result}
        y = ops.scaled_matmul(a, b, a_scale, b_scale, precision="highest", **how)
        expected = helpers.dequantised(a, a_scale) @ helpers.dequantised(b, b_scale)
        if result == "int8":
            expected = np.clip(np.rint(expected), -128, 127)
        check((y, expected), "bfloat16")


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("sizes", [(131, 138, 72), (200, 232, 67)], ids=str)
def test_products_of_doubles(sizes, transpose, implementation):
    """In pairs and one by one, by the instruction of the tensor cores for them."""
    m, n, k = sizes
    with helpers.x64("float64"):
        a = helpers.normal((m, k), "float64")
        b = helpers.normal((n, k) if transpose else (k, n), "float64", seed=1)

        def product(a, b):
            how = {"implementation": implementation, "algorithm": "mma_pipelined"}
            return ops.matmul(a, b.T if transpose else b, **how)

        y = jax.jit(product)(a, b)
        check((y, a @ (b.T if transpose else b)), "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("call", [call_softmax, call_softmax_tangent])
@pytest.mark.parametrize("columns", [400, 1100])
def test_columns_in_strips(call, columns, dtype, implementation):
    """By one block or more, with an axis that does not fill them, and a strip that is not whole."""
    check(call("strip", dtype, implementation, shape=(columns, 200)), dtype)


def check(actual_and_expected, dtype):
    actual, expected = (np.asarray(each, np.float32) for each in actual_and_expected)
    rtol = 1e-5 if dtype == "float32" else 1e-2
    # Sums that cancel keep the error of their terms: a thousandth of the largest result at most.
    atol = 0.1 * rtol * np.nanmax(np.abs(expected))
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="needs compute-sanitizer")
@pytest.mark.skipif("NV_SANITIZER_INJECTION_PORT_BASE" in os.environ, reason="runs under one")
@pytest.mark.parametrize(
    ("tool", "kernel", "report"),
    [
        ("memcheck", "global_out_of_bounds", "Invalid __global__ write of size 4 bytes"),
        ("memcheck", "shared_out_of_bounds", "Invalid __shared__ write of size 4 bytes"),
        ("racecheck", "missing_barrier", "hazards displayed"),
        ("synccheck", "divergent_barrier", "Barrier error detected"),
        ("initcheck", "reverse", "ERROR SUMMARY: 0 errors"),
    ],
)
def test_a_planted_fault_is_reported(tool, kernel, report):
    program = (
        "import jax, numpy as np, jax_gpuops; x = jax.device_put(np.arange(60, dtype=np.float32));"
        "call = jax.ffi.ffi_call('jax_gpuops_selftest_v1', jax.ShapeDtypeStruct(x.shape, x.dtype));"
        f"print(call(x, kernel={kernel!r}))"
    )
    outcome = subprocess.run(
        [*("compute-sanitizer", "--tool", tool), *OF_OURS, sys.executable, "-c", program],
        env={**os.environ, "XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"},
        capture_output=True,
        text=True,
    )
    assert report in outcome.stdout + outcome.stderr
