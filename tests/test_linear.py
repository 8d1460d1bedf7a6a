"""linear against float64: every activation, dtype, algorithm, shape and derivative."""

import functools
import itertools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_gpuops
from jax_gpuops import _measurements
from jax_gpuops._linear import ACTIVATIONS

NAMES = [None, *ACTIVATIONS]
LADDER = [
    a.name
    for a in jax_gpuops.algorithms("matmul")
    if a.name
    not in (
        *("tensor_core", "split_k", "parallel_split_k", "wgmma_batched", "skinny"),
        *("mma_pipelined", "mma_batched"),
        *("bf16_x6", "fp16_x3", "fma_pipelined", "fma_sliced", "fma_batched", "fma_skinny"),
        "cublas",
    )
]
SMALLEST = {"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}
"""The smallest normal numbers. A factor of an argument that is less may become 0."""
FITS = {"gelu_exact": 2.0**-13}
"""The relative error of activations whose result has 16 bits, where that is more than 8 eps."""

every_activation = pytest.mark.parametrize("activation", NAMES, ids=str)


def assert_linear(actual, x, w, b, activation, ulps=8, residual=None):
    """Checks a result against float64.

    A kernel adds up k products and a bias in the accumulator's dtype, so the argument of the
    activation is known up to that error, and not more exactly than to the accumulator's precision.
    Beside what this changes, the activation may be wrong by `ulps`, and the result is rounded once.
    A residual is added before that, in the accumulator's dtype. It may cancel the activation, and
    then leaves the error of fits that are made for results of 16 bits.
    """
    actual = np.asarray(actual)
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    bias = np.zeros(w.shape[-1]) if b is None else np.asarray(b, np.float64)
    bias = bias[..., None, :]
    sums, magnitude = x @ w + bias, np.abs(x) @ np.abs(w) + np.abs(bias)
    accumulated = np.float32 if actual.dtype.itemsize == 2 else actual.dtype
    eps = float(np.finfo(accumulated).eps)
    error = (x.shape[-1] + 4) * eps * magnitude
    low, middle, high = (
        helpers.activated(activation, each) for each in (sums - error, sums, sums + error)
    )
    assert actual.shape == middle.shape
    bound = np.maximum(np.abs(high - middle), np.abs(low - middle)) * 2 + ulps * eps * np.abs(
        middle
    )
    if residual is not None:
        if actual.dtype.itemsize == 2:
            bound = bound + FITS.get(activation, 0) * np.abs(middle)
        middle = middle + np.asarray(residual, np.float64)
        bound = bound + eps * np.abs(middle)
    if actual.dtype.itemsize == 2:
        bound = bound + np.asarray(helpers.spacing(middle, actual.dtype), np.float64)
    bound = bound + SMALLEST[actual.dtype.name] * (1 + np.abs(sums))
    difference = np.abs(actual.astype(np.float64) - middle)
    assert np.all(difference <= bound), (activation, (difference / bound).max())


def assert_every_activation(x, w, b, result, **how):
    """Calls `linear` with each, in one program: compiling takes most of the time."""
    how["preferred_element_type"] = result

    def with_each(x, w, b):
        return [jax_gpuops.linear(x, w, b, activation=each, **how) for each in NAMES]

    for activation, y in zip(NAMES, jax.jit(with_each)(x, w, b), strict=True):
        assert y.dtype == (result or x.dtype)
        assert_linear(y, x, w, b, activation)


def operands(m, n, k, dtype, result=None, batch=()):
    """x, w and b, such that x @ w + b is spread over where activations bend."""
    x = helpers.normal((*batch, m, k), dtype)
    w = helpers.normal((k, n), dtype, seed=1, scale=2 / max(1, k) ** 0.5)
    return x, w, helpers.normal((n,), result or dtype, seed=2)


# The kernels


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("algorithm", LADDER)
@pytest.mark.parametrize("sizes", [(3, 5, 7), (33, 36, 20)], ids=str)
def test_every_algorithm_for_every_gpu(sizes, algorithm, dtype, implementation):
    how = {"implementation": implementation, "algorithm": algorithm}
    with helpers.x64(dtype):
        assert_every_activation(*operands(*sizes, dtype), None, **how)


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("algorithm", "sizes"),
    [
        *[(None, sizes) for sizes in ((33, 36, 20), (33, 37, 70))],
        *[
            (algorithm, sizes)
            for algorithm in ("bf16_x6", "fp16_x3")
            for sizes in ((33, 36, 20), (33, 37, 70), (260, 132, 72))
        ],
    ],
    ids=str,
)
def test_the_highest_precision(algorithm, sizes, on_tensor_cores):
    """After products by parts, another kernel adds the bias and applies the activation."""
    how = {**on_tensor_cores, "precision": "highest", "algorithm": algorithm}
    assert_every_activation(*operands(*sizes, "float32"), None, **how)


@pytest.mark.kernel
def test_large_products_of_the_highest_precision_are_by_parts(on_tensor_cores):
    x, w, b = operands(300, 260, 436, "float32")
    how = {**on_tensor_cores, "precision": "highest", "algorithm": None}
    with helpers.recorded(on_tensor_cores["implementation"]) as executions:
        y = jax.block_until_ready(jax_gpuops.linear(x, w, b, activation="gelu", **how))
    if on_tensor_cores["implementation"] == "interpret":  # GPUs have various ones from here on
        assert executions[0]["algorithm"] == "fp16_x3"
    assert_linear(y, x, w, b, "gelu")


@pytest.mark.kernel
def test_the_highest_precision_of_infinities(on_tensor_cores):
    """The kernel that then multiplies instead has no bias and no activation of its own."""
    x, w, b = operands(70, 72, 96, "float32")
    x[3, 5], w[7, 9] = np.inf, np.nan
    how = {**on_tensor_cores, "precision": "highest", "algorithm": "fp16_x3"}
    y = np.asarray(jax_gpuops.linear(x, w, b, activation="relu", **how))
    with np.errstate(invalid="ignore"):
        expected = jax.nn.relu(x @ w + b)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.kernel
@pytest.mark.parametrize("n", [72, 75])
def test_the_highest_precision_of_batches(n, on_tensor_cores):
    """Each matrix has its own bias."""
    x, w, b = (np.stack([each, each[::-1]]) for each in operands(70, n, 96, "float32"))
    how = {**on_tensor_cores, "precision": "highest", "algorithm": "bf16_x6"}
    y = jax.vmap(lambda x, w, b: jax_gpuops.linear(x, w, b, activation="silu", **how))(x, w, b)
    for i in range(2):
        assert_linear(y[i], x[i], w[i], b[i], "silu")


@pytest.mark.parametrize("mapped", ["w", "b"])
@pytest.mark.parametrize("has_residual", [False, True])
def test_vmap_where_ranks_may_not_be_promoted(mapped, has_residual, implementation):
    x, w, b = jnp.ones((3, 4)), jnp.ones((4, 5)), jnp.ones(5)
    residual = jnp.ones((3, 5)) if has_residual else None

    def layer(w, b):
        return jax_gpuops.linear(x, w, b, residual=residual, implementation=implementation)

    with jax.numpy_rank_promotion("raise"):
        if mapped == "w":
            y = jax.vmap(layer, (0, None))(jnp.stack([w, w]), b)
        else:
            y = jax.vmap(layer, (None, 0))(w, jnp.stack([b, b]))
    np.testing.assert_array_equal(y, np.full((2, 3, 5), 6 if has_residual else 5))


@pytest.mark.kernel
def test_kernels_of_products_alone(on_tensor_cores):
    x, w, b = operands(33, 36, 20, "float32")
    how = {**on_tensor_cores, "precision": "highest", "algorithm": "fma_pipelined"}
    with pytest.raises(
        ValueError, match="'fma_pipelined' does not support a bias or an activation"
    ):
        jax_gpuops.linear(x, w, b, **how)


# For each tile, m, n and k that the plan gives it to: the host simulates 4 multiprocessors.
TILES = {
    (64, 128): {"interpret": (72, 136, 200), "cuda": (72, 136, 200)},
    (128, 128): {"interpret": (200, 200, 136), "cuda": (1000, 2000, 136)},
    (128, 192): {"interpret": (200, 376, 136), "cuda": (1500, 1520, 136)},
    (128, 256): {"interpret": (200, 504, 136), "cuda": (2000, 2000, 136)},
}


@pytest.fixture
def on_tensor_cores(implementation):
    """The options of a call by tensor_core, which not every GPU can run."""
    return helpers.options("linear", "tensor_core", implementation, [(8, 8), (8, 8)], "bfloat16")


def operands_of_tensor_cores(m, n, k, dtype, result, batch=()):
    x, w, b = operands(m, n, k, dtype, result, batch)
    return (helpers.to_tf32(x), helpers.to_tf32(w), b) if dtype == "float32" else (x, w, b)


@pytest.mark.kernel
@every_activation
@pytest.mark.parametrize(("dtype", "result"), helpers.DTYPES_ON_TENSOR_CORES)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tensor_core(tile, dtype, result, activation, on_tensor_cores):
    """Every kernel, with rows, columns and a depth that no tile divides."""
    m, n, k = TILES[tile][on_tensor_cores["implementation"]]
    x, w, b = operands_of_tensor_cores(m, n, k, dtype, result)
    with helpers.recorded(on_tensor_cores["implementation"]) as executions:
        y = jax_gpuops.linear(
            x, w, b, activation=activation, preferred_element_type=result, **on_tensor_cores
        )
        jax.block_until_ready(y)
    assert y.dtype == result
    assert_linear(y, x, w, b, activation)
    config = executions[-1]["config"]
    if not (result == "float32" and tile in ((128, 128), (128, 192))):
        tile = tile[::-1] if config["turned"] and tile == (128, 256) else tile
        assert (config["tile_rows"], config["tile_cols"]) == tile


@pytest.mark.kernel
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu_exact"])
@pytest.mark.parametrize(("dtype", "result"), helpers.DTYPES_ON_TENSOR_CORES[2:])
@pytest.mark.parametrize("sizes", [(72, 131, 200), (129, 264, 67), (65, 257, 129)], ids=str)
def test_rows_that_tensor_copies_cannot_take(
    sizes, dtype, result, activation, has_bias, on_tensor_cores
):
    x, w, b = operands_of_tensor_cores(*sizes, dtype, result)
    b = b if has_bias else None
    y = jax_gpuops.linear(
        x, w, b, activation=activation, preferred_element_type=result, **on_tensor_cores
    )
    assert_linear(y, x, w, b, activation)


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("sizes", "algorithm", "dtype", "result"),
    helpers.with_16_bits_in_turn(
        [(5, 131, 261), (16, 136, 264), (72, 264, 264), (131, 9, 264)],
        ["split_k", "parallel_split_k", "mma_pipelined", "mma_batched"],
    ),
    ids=str,
)
def test_the_other_kernels_on_tensor_cores(sizes, algorithm, dtype, result, on_tensor_cores):
    if algorithm == "parallel_split_k" and dtype == "float32" and sizes[1] % 4 != 0:
        pytest.skip("not a problem of parallel_split_k")
    how = {**on_tensor_cores, "algorithm": algorithm}
    assert_every_activation(*operands_of_tensor_cores(*sizes, dtype, result), result, **how)


@pytest.mark.kernel
@pytest.mark.parametrize(("dtype", "result"), helpers.DTYPES_ON_TENSOR_CORES[:4])
@pytest.mark.parametrize("sizes", [(5, 131, 261), (16, 136, 264), (131, 9, 264)], ids=str)
def test_skinny(sizes, dtype, result, on_tensor_cores):
    how = {**on_tensor_cores, "algorithm": "skinny"}
    assert_every_activation(*operands_of_tensor_cores(*sizes, dtype, result), result, **how)


@pytest.mark.kernel
@pytest.mark.parametrize(
    "algorithm",
    [
        *LADDER,
        "tensor_core",
        "split_k",
        "parallel_split_k",
        "skinny",
        "mma_pipelined",
        "mma_batched",
    ],
)
def test_no_bias_and_no_activation_is_the_product(algorithm, on_tensor_cores):
    x, w, _ = operands(16, 136, 136, "bfloat16")
    how = {**on_tensor_cores, "algorithm": algorithm}
    y, product = jax_gpuops.linear(x, w, **how), jax_gpuops.matmul(x, w, **how)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(product))


@pytest.mark.kernel
@pytest.mark.parametrize(
    "algorithm", [*LADDER, "tensor_core", "split_k", "mma_pipelined", "mma_batched"]
)
def test_repeats_are_bit_identical_in_any_order_of_threads(algorithm, on_tensor_cores):
    if on_tensor_cores["implementation"] != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    x, w, b = operands(70, 72, 200, "bfloat16")
    how = {**on_tensor_cores, "algorithm": algorithm}
    helpers.under_each_schedule(
        lambda: jax_gpuops.linear(x, w, b, activation="gelu", **how), [(1, {}), (2, {})]
    )


# Values

SPREAD = np.concatenate([np.linspace(-14, 14, 257), np.logspace(-30, 2.3, 100)])
SPREAD = np.concatenate([SPREAD, -SPREAD])


@pytest.mark.kernel
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("algorithm", ["coalesced", "tensor_core", "mma_pipelined", "mma_batched"])
def test_activations_are_exact_in_their_tails(algorithm, dtype, activation, implementation):
    """Small results too have small relative errors: e^-80 is not the 0 of 1 + tanh(-40)."""
    if why := helpers.refusal("linear", algorithm, [(8, 8), (8, 8)], dtype):
        pytest.skip(why)
    with helpers.x64(dtype):
        # Sums of one term: the activations of these numbers themselves.
        x = SPREAD.astype(helpers.np_dtype(dtype))
        x = helpers.to_tf32(x) if dtype == "float32" else x
        x = x[np.isfinite(x.astype(np.float64))][:, None]
        columns = np.zeros((1, 8), x.dtype)
        columns[0, 3] = 1
        y = jax_gpuops.linear(
            x, columns, activation=activation, implementation=implementation, algorithm=algorithm
        )
        y = np.asarray(y)[:, 3]
    value = x[:, 0].astype(np.float64)
    exact = helpers.activated(activation, value)
    eps = float(jnp.finfo(dtype).eps)
    # e^t is as exact as t, whose rounding in the accumulator's dtype it magnifies by |t|.
    accumulated = np.finfo(np.float64 if dtype == "float64" else np.float32).eps
    exponent = np.minimum(np.abs(value) + np.abs(value) ** 3 / 10, 800)
    bound = np.abs(exact) * (0.51 * eps + (8 + 2 * exponent) * accumulated)
    if dtype in ("float16", "bfloat16"):
        bound = bound + np.abs(exact) * 2.0**-13
    bound = bound + SMALLEST[dtype] * eps
    if dtype != "float64":
        bound = bound + np.abs(value) * 2.0**-126
    assert np.all(np.abs(y.astype(np.float64) - exact) <= bound)


@pytest.mark.kernel
@every_activation
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("algorithm", ["coalesced", "tensor_core", "mma_pipelined", "mma_batched"])
def test_special_values_as_in_jax(algorithm, dtype, activation, implementation):
    if why := helpers.refusal("linear", algorithm, [(8, 8), (8, 8)], dtype):
        pytest.skip(why)
    values = jnp.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 2.0**100, -(2.0**100)], dtype)[:, None]
    one = jnp.ones((1, 8), dtype)
    how = {"implementation": implementation, "algorithm": algorithm}
    y = jax_gpuops.linear(values, one, activation=activation, **how)
    expected = jnp.broadcast_to(values, (7, 8))
    expected = expected if activation is None else ACTIVATIONS[activation](expected)
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(expected, np.float32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_bias_is_added_before_rounding(dtype, on_tensor_cores):
    """1 + 1/4096 is 1 in 16 bits, so that a product rounded by itself would cancel to 0."""
    x, w = jnp.full((4, 2), 1, dtype), jnp.zeros((2, 8), dtype).at[0].set(1).at[1].set(1 / 4096)
    b = jnp.full(8, -1, dtype)
    for algorithm in ["coalesced", "tensor_core", "skinny", "mma_pipelined", "mma_batched"]:
        y = jax_gpuops.linear(x, w, b, **on_tensor_cores | {"algorithm": algorithm})
        np.testing.assert_array_equal(np.asarray(y, np.float32), np.float32(1 / 4096))


@every_activation
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("sizes", [(3, 4, 0), (0, 4, 3), (3, 0, 4), (0, 0, 0)], ids=str)
def test_arrays_without_elements(sizes, has_bias, activation, implementation):
    m, n, k = sizes
    x, w = jnp.ones((2, m, k)), jnp.ones((k, n))
    b = jnp.linspace(-1.0, 1.0, n) if has_bias else None
    y = jax_gpuops.linear(x, w, b, activation=activation, implementation=implementation)
    row = np.zeros(n) if b is None else b
    expected = np.broadcast_to(helpers.activated(activation, row), (2, m, n))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6), (2, 1, 3, 6)], ids=str)
def test_leading_dims(shape, implementation):
    x, (_, w, b) = helpers.normal(shape, "float32"), operands(1, 5, 6, "float32")
    y = jax_gpuops.linear(
        x, w, b, activation="silu", precision="highest", implementation=implementation
    )
    assert y.shape == (*shape[:-1], 5)
    exact = helpers.activated("silu", x.astype(np.float64) @ w + b)
    np.testing.assert_allclose(y, exact, rtol=2e-5, atol=1e-6)


# Dtypes and arguments


@pytest.mark.parametrize(
    ("dtypes", "preferred", "result"),
    [
        (("bfloat16", "bfloat16", "bfloat16"), None, "bfloat16"),
        (("bfloat16", "bfloat16", "float32"), None, "float32"),
        (("bfloat16", "float32", "bfloat16"), None, "float32"),
        (("bfloat16", "bfloat16", "float32"), "bfloat16", "bfloat16"),
        (("bfloat16", "bfloat16", "bfloat16"), "float32", "float32"),
        (("float16", "float16", "float16"), "float32", "float32"),
    ],
)
def test_dtypes_promote_as_in_the_formula(dtypes, preferred, result, implementation):
    x, w, b = (
        jnp.asarray(each, t) for each, t in zip(operands(4, 5, 6, "float32"), dtypes, strict=True)
    )
    for name in (implementation, "xla"):
        y = jax_gpuops.linear(
            x, w, b, activation="relu", preferred_element_type=preferred, implementation=name
        )
        assert y.dtype == result
    if preferred is None:
        assert jnp.result_type(x @ w + b) == result


@pytest.mark.parametrize("layer", ["linear", "glu"])
@pytest.mark.parametrize("named", [True, False])
def test_a_dtype_that_jax_does_not_have_is_the_nearest(layer, named, implementation):
    """As with jnp.matmul: float32 in place of float64, with a warning."""
    x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
    with jax_gpuops.use(implementation if named else None):
        layer = functools.partial(getattr(jax_gpuops, layer), x, w, *([w] * (layer == "glu")))
        with pytest.warns(UserWarning, match="float64"):
            y = layer(preferred_element_type="float64")
        np.testing.assert_array_equal(y, layer())


def test_strict_promotion(implementation):
    x, w, b = map(jnp.asarray, operands(4, 5, 6, "bfloat16"))
    with jax.numpy_dtype_promotion("strict"):
        jax_gpuops.linear(x, w, b, activation="gelu", implementation=implementation)
        with pytest.raises(ValueError, match="promotion"):
            jax_gpuops.linear(x, w.astype("float32"), implementation=implementation)


def test_arrays_in_other_objects(implementation):
    class Parameter:
        def __jax_array__(self):
            return jnp.ones((3, 2))

    y = jax_gpuops.linear(jnp.ones((1, 3)), Parameter(), implementation=implementation)
    np.testing.assert_array_equal(y, [[3, 3]])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        (((4, 6), (5, 3)), {}, ValueError, "x of shape"),
        (((), (5, 3)), {}, ValueError, "x of shape"),
        (((4, 5), (2, 5, 3)), {}, ValueError, "w of shape"),
        (((4, 5), (5, 3), (5,)), {}, ValueError, "b must have an element for each column"),
        (((4, 5), (5, 3), (1, 3)), {}, ValueError, "b must have an element for each column"),
        (((4, 5), (5, 3)), {"activation": "tanh"}, ValueError, "None or one of 'relu', 'gelu'"),
        (((4, 5), (5, 3)), {"activation": jax.nn.relu}, ValueError, "None or one of 'relu'"),
        (((4, 5), (5, 3)), {"activation": ["relu"]}, ValueError, r"None or one of .* \['relu'\]"),
        (((4, 5), (5, 3)), {"preferred_element_type": int}, TypeError, "floating-point or complex"),
        (((4, 5), (5, 3), (3,)), {"algorithm": "cublas"}, ValueError, "cublas"),
        (((4, 5), (5, 3)), {"algorithm": "fastest"}, ValueError, "'fastest' is unknown"),
    ],
)
def test_bad_arguments(arguments, options, error, text, implementation):
    arrays = [jnp.ones(shape) for shape in arguments]
    with pytest.raises(error, match=text):
        jax_gpuops.linear(*arrays, **{"implementation": implementation} | options)


def test_integers_are_refused():
    with pytest.raises(TypeError, match=r"linear takes floating-point .* w is of dtype int32"):
        jax_gpuops.linear(jnp.ones((2, 3)), jnp.ones((3, 2), int))


@pytest.mark.parametrize("activation", ["gelu", None])
def test_what_kernels_cannot_take_runs_in_xla(activation, implementation):
    x, w = jnp.ones((4, 5), jnp.complex64), jnp.ones((5, 3), jnp.complex64)
    with pytest.raises(TypeError, match="matmul kernels require two operands of the same"):
        jax_gpuops.linear(x, w, activation=None, implementation=implementation)
    with jax_gpuops.use(implementation, strict=False):
        y = jax_gpuops.linear(x, w, activation=activation)
    assert y.dtype == jnp.complex64


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_a_sharded_sequence_is_not_gathered(
    activation, has_bias, has_residual, is_mapped, implementation
):
    """In a program that XLA partitions; a reshape to rows would gather it."""
    x = helpers.normal((4, 6, 8), "float32")
    w, b = helpers.normal((8, 10), "float32", seed=1), helpers.normal((10,), "float32", seed=2)
    operands = {"b": b} if has_bias else {}
    residual = helpers.normal((4, 6, 10), "float32", seed=3) if has_residual else None

    def layer(x, residual):
        return jax_gpuops.linear(x, w, **operands, activation=activation, residual=residual)

    with jax_gpuops.use(implementation, strict=False):
        helpers.assert_not_gathered(jax.vmap(layer) if is_mapped else layer, x, residual)


@pytest.mark.kernel
@pytest.mark.parametrize("has_residual", [False, True])
def test_nested_vmaps_of_rows_of_several_dims(has_residual, implementation):
    """Any of the operands is mapped by the outer vmap, and any by the inner one."""
    mapped = [each for each in itertools.product((0, None), repeat=3) if any(a == 0 for a in each)]
    own = [(4, 5, 8), (8, 6), (6,)]

    def layer(x, w, b, linear):
        residual = {"residual": 2 * (x[..., :6] - 1)} if has_residual else {}
        return linear(x, w, b, activation="relu", precision="highest", **residual)

    def plain(x, w, b, *, activation, precision, residual=0):
        del activation
        return jax.nn.relu(jnp.matmul(x, w, precision=precision) + b) + residual

    def results(linear):
        ys = []
        for outer, inner in itertools.product(mapped, repeat=2):
            shapes = [
                (*[2] * (o == 0), *[3] * (i == 0), *shape)
                for o, i, shape in zip(outer, inner, own, strict=True)
            ]
            xs = [helpers.normal(shape, "float32", seed) for seed, shape in enumerate(shapes)]
            call = functools.partial(layer, linear=linear)
            ys.append(jax.vmap(jax.vmap(call, inner), outer)(*xs))
        return ys

    ours = functools.partial(jax_gpuops.linear, implementation=implementation)
    for y, expected in zip(jax.jit(lambda: results(ours))(), results(plain), strict=True):
        assert y.shape == expected.shape
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_arrays_with_explicit_shardings_are_refused():
    devices = np.array(jax.devices("cpu")[:2])
    mesh = Mesh(devices, ("d",), axis_types=(AxisType.Explicit,))
    with jax.default_device(devices[0]), jax.set_mesh(mesh):
        x = jax.device_put(np.ones((4, 6), np.float32), NamedSharding(mesh, P("d", None)))
        w = jax.device_put(np.ones((6, 3), np.float32), NamedSharding(mesh, P(None, None)))
        with pytest.raises(ValueError, match="not support explicit sharding"):
            jax_gpuops.linear(x, w, implementation="interpret")
        assert jax.typeof(jax_gpuops.linear(x, w, activation="silu")).sharding.spec[0] == "d"


def test_symbolic_sizes(implementation):
    """There is no workspace for kernels that need it, as in the other products."""
    m, n, k = jax.export.symbolic_shape("m, n, k")
    structs = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((m, k), (k, n), (n,))]
    layer = functools.partial(jax_gpuops.linear, activation="relu", implementation=implementation)
    exported = jax.export.export(
        jax.jit(layer),
        platforms=[{"interpret": "cpu"}.get(implementation, implementation)],
        disabled_checks=jax_gpuops.EXPORT_CHECKS,
    )(*structs)
    assert "tensor<0xui8>" in exported.mlir_module()
    x, w, b = operands(33, 37, 20, "bfloat16")
    assert_linear(exported.call(x, w, b), x, w, b, "relu")


def test_the_kernel_is_in_the_program(implementation):
    x, w, b = operands(4, 5, 6, "float32")

    def layer(x, w, b):
        return jax_gpuops.linear(x, w, b, activation="gelu", implementation=implementation)

    assert helpers.custom_calls(layer, x, w, b)[0].startswith("jax_gpuops_linear_v1")
    (call,) = jax_gpuops.explain(layer, x, w, b).calls
    assert call.op == "linear"
    m, k, n = (64, 8192, 512) if implementation == "cuda" else (512, 512, 512)
    plan = jax_gpuops.plan(
        "linear", [(m, k), (k, n)], "bfloat16", activation="silu", implementation=implementation
    )
    assert plan.algorithm == ("parallel_split_k" if implementation == "cuda" else "tensor_core")


# Derivatives and batching


def reference(x, w, b, activation):
    y = jnp.matmul(x, w, precision="highest") + b
    return y if activation is None else ACTIVATIONS[activation](y)


def ours(x, w, b, activation, implementation):
    return jax_gpuops.linear(
        x, w, b, activation=activation, precision="highest", implementation=implementation
    )


def assert_close(actual, expected, tolerance=2e-5):
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance),
        actual,
        expected,
    )


@every_activation
def test_derivatives(activation, implementation):
    function = functools.partial(ours, activation=activation, implementation=implementation)
    expected = functools.partial(reference, activation=activation)
    primals, tangents = operands(6, 5, 4, "float32"), operands(6, 5, 4, "float32", "float32")
    assert_close(jax.jvp(function, primals, tangents), jax.jvp(expected, primals, tangents))
    (y, vjp), (y_expected, vjp_expected) = jax.vjp(function, *primals), jax.vjp(expected, *primals)
    assert_close((y, vjp(y)), (y_expected, vjp_expected(y)))


@pytest.mark.any_version
@every_activation
def test_derivatives_of_second_order(activation, implementation):
    function = functools.partial(ours, activation=activation, implementation=implementation)
    expected = functools.partial(reference, activation=activation)
    primals = operands(4, 3, 5, "float32")
    if activation != "relu":
        check_grads(function, primals, order=2, atol=2e-2, rtol=2e-2, eps=1e-2)

    def hessian(f):
        return jax.hessian(lambda *xs: (f(*xs) ** 2).sum(), (0, 1, 2))(*primals)

    assert_close(hessian(function), hessian(expected), 2e-4)


@every_activation
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_in_16_bits(dtype, activation, on_tensor_cores):
    """They are those in float32, but for roundings: of x @ w + b, of its cotangent, of results."""
    x, w, b = operands(72, 136, 64, dtype)

    def gradients(layer, *xs):
        return jax.grad(lambda *xs: (layer(*xs).astype("float32") ** 2).mean(), (0, 1, 2))(*xs)

    actual = gradients(
        lambda *xs: jax_gpuops.linear(
            *xs, activation=activation, implementation=on_tensor_cores["implementation"]
        ),
        x, w, b,
    )  # fmt: skip
    wide = [jnp.asarray(each, "float32") for each in (x, w, b)]
    expected = gradients(lambda *xs: reference(*xs, activation), *wide)
    for each, exact in zip(actual, expected, strict=True):
        assert each.dtype == dtype
        scale = np.abs(exact).max()
        assert np.abs(np.asarray(each, "float32") - exact).max() <= 0.02 * scale


@every_activation
def test_products_of_gradients_run_on_kernels(activation, implementation):
    x, w, b = operands(6, 5, 4, "float32")

    def loss(*xs):
        return ours(*xs, activation, implementation).sum()

    calls = helpers.custom_calls(jax.grad(loss, (0, 1, 2)), x, w, b)
    assert sum(call.startswith("jax_gpuops_gemm_v2") for call in calls) == 2
    # Without an activation the gradient does not depend on the value.
    layers = sum(call.startswith("jax_gpuops_linear_v1") for call in calls)
    assert layers == (activation is not None)


@every_activation
def test_what_is_kept_for_the_gradient(activation, implementation):
    """Besides the operands, the argument of the activation in the dtype of the result.

    For relu it is the result, and without an activation nothing.
    """
    x, w, b = map(jnp.asarray, operands(16, 24, 8, "bfloat16"))
    layer = functools.partial(
        jax_gpuops.linear, activation=activation, implementation=implementation
    )
    _, vjp = jax.jit(lambda *xs: jax.vjp(layer, *xs))(x, w, b)
    kept = [each for each in jax.tree.leaves(vjp) if each.size == 16 * 24]
    assert [each.dtype for each in kept] == ([] if activation is None else [jnp.bfloat16])


BATCHES = [axes for axes in itertools.product((0, None), repeat=3) if axes != (None,) * 3]


def stacked(axes, size=3):
    """x, w, b and a residual, as many as there are axes, which say of what there is a batch."""
    shapes = ((4, 6), (6, 5), (5,), (4, 5))[: len(axes)]
    return [
        jnp.asarray(helpers.normal(shape if axis is None else (size, *shape), "float32", seed))
        for seed, (shape, axis) in enumerate(zip(shapes, axes, strict=True))
    ]


def assert_vmap(function, expected, axes, size=3):
    """Compares two layers and their gradients."""
    xs = stacked(axes, size)

    def value_and_gradient(f):
        @jax.jit  # one program is compiled faster than many
        def results(*xs):
            y, pullback = jax.vjp(jax.vmap(f, axes), *xs)
            return y, pullback(2 * y)

        return results(*xs)

    y, gradient = value_and_gradient(function)
    y_expected, gradient_expected = value_and_gradient(expected)
    assert_close(y, y_expected)
    assert_close(gradient, gradient_expected, 1e-4)


@pytest.mark.parametrize("axes", BATCHES, ids=str)
@pytest.mark.parametrize("activation", [None, "silu"], ids=str)
def test_vmap(activation, axes, implementation):
    function = functools.partial(ours, activation=activation, implementation=implementation)
    assert_vmap(function, functools.partial(reference, activation=activation), axes)


@pytest.mark.parametrize("axes", BATCHES, ids=str)
def test_vmap_over_an_axis_of_size_0(axes, implementation):
    function = functools.partial(ours, activation="silu", implementation=implementation)
    assert_vmap(function, functools.partial(reference, activation="silu"), axes, size=0)


@pytest.mark.parametrize("outer", BATCHES, ids=str)
@pytest.mark.parametrize("inner", BATCHES, ids=str)
def test_vmap_of_vmap(inner, outer, implementation):
    xs = [
        each if axis is None else jnp.stack([each, 2 * each])
        for each, axis in zip(stacked(inner), outer, strict=True)
    ]
    function = functools.partial(ours, activation="gelu", implementation=implementation)
    expected = functools.partial(reference, activation="gelu")
    actual = jax.vmap(jax.vmap(function, inner), outer)(*xs)
    assert_close(actual, jax.vmap(jax.vmap(expected, inner), outer)(*xs))


@pytest.mark.parametrize("mapped", ["x", "w", "b"])
@pytest.mark.parametrize("algorithm", ["tensor_core", "parallel_split_k"])
def test_vmap_on_tensor_cores(algorithm, mapped, on_tensor_cores):
    """Rows are folded; other batches have a shared factor or a shared bias."""
    on_tensor_cores = {**on_tensor_cores, "algorithm": algorithm}
    x, w, b = operands(72, 136, 200, "bfloat16")
    axes = {"x": (0, None, None), "w": (None, 0, None), "b": (0, None, 0)}[mapped]
    xs = [
        each if axis is None else np.stack([each, each[::-1]])
        for each, axis in zip((x, w, b), axes, strict=True)
    ]
    y = jax.vmap(functools.partial(jax_gpuops.linear, activation="relu", **on_tensor_cores), axes)
    wide = [each.astype(np.float64) for each in xs]
    left = wide[0] if axes[0] == 0 else wide[0][None]
    bias = wide[2] if axes[2] == 0 else wide[2][None]
    exact = np.maximum(left @ wide[1] + bias[:, None], 0)
    np.testing.assert_allclose(np.asarray(y(*xs), np.float64), exact, rtol=1e-2, atol=1e-3)


def differentiates_erf(mesh) -> bool:
    """False if JAX refuses the derivative of erf inside shard_map, as 0.12.0 does."""
    tangent = jax.shard_map(
        lambda x: jax.jvp(jax.lax.erf, (x,), (x,))[1],
        mesh=mesh,
        in_specs=P("d"),
        out_specs=P("d"),
    )
    try:
        jax.eval_shape(tangent, jnp.ones(2))
    except ValueError as error:
        assert "varying manual axes" in str(error)  # noqa: PT017
        return False
    return True


@every_activation
def test_gradients_inside_shard_map(activation, implementation):
    """Rows are divided, weights are not, and their cotangents are summed over the devices."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    if activation == "gelu_exact" and not differentiates_erf(mesh):
        pytest.skip("this version of JAX does not differentiate erf there")
    layer = functools.partial(ours, activation=activation, implementation=implementation)
    specs = (P("d"), P(), P())
    divided = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=P("d")))
    xs = operands(6, 5, 4, "float32")

    def results(f):
        return f(*xs), jax.grad(lambda *xs: (f(*xs) ** 2).sum(), (0, 1, 2))(*xs)

    assert_close(results(divided), results(functools.partial(reference, activation=activation)))


@pytest.mark.parametrize("activation", ["gelu", "relu", None])
@pytest.mark.parametrize("op", ["linear", "residual", "glu"])
def test_what_a_table_leaves_to_xla_is_the_plain_formula(op, activation, monkeypatch):
    """Which rounds in between; the kernels' reference does not, and XLA is slower with it."""
    monkeypatch.setattr(_measurements, "may_hold", lambda op, known: True)
    x, w, b = map(jnp.asarray, operands(64, 32, 48, "bfloat16"))
    arrays, options = {"linear": ((x, w, b), {}), "glu": ((x, w, w), {})}.get(
        op, ((x, w, b), {"residual": jnp.ones((64, 32), "bfloat16")})
    )
    function = jax_gpuops.glu if op == "glu" else jax_gpuops.linear
    options["activation"] = activation
    bound = jax.make_jaxpr(functools.partial(function, **options))(*arrays)
    assert "gpuops_" in str(bound)
    np.testing.assert_array_equal(
        jax.jit(functools.partial(function, **options))(*arrays),
        jax.jit(functools.partial(function, implementation="xla", **options))(*arrays),
    )
