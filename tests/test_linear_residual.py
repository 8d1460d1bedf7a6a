"""linear with a residual against float64: the kernels that add it, and what becomes of the rest."""

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
from test_linear import (
    LADDER,
    NAMES,
    TILES,
    assert_close,
    assert_linear,
    assert_vmap,
    every_activation,
    operands_of_tensor_cores,
    stacked,
)
from test_linear import operands as operands_of_layer
from test_linear import reference as reference_of_layer

import jax_gpuops

EVERY_GPU = [*LADDER, "mma_pipelined"]
"""The algorithms that add c whatever its dtype is."""

every_16_bits = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


@pytest.fixture
def on_tensor_cores(implementation):
    """The options of a call by tensor_core, which not every GPU can run."""
    return helpers.options("linear", "tensor_core", implementation, [(8, 8), (8, 8)], "bfloat16")


def operands(m, n, k, dtype, result=None, batch=()):
    x, w, b = operands_of_layer(m, n, k, dtype, result, batch)
    return x, w, b, helpers.normal((*batch, m, n), result or dtype, seed=3)


def assert_every_activation(x, w, b, residual, result=None, **how):
    """Calls `linear` with each, in one program: compiling takes most of the time."""

    def with_each(x, w, b, residual):
        how["preferred_element_type"] = result
        return [
            jax_gpuops.linear(x, w, b, activation=each, residual=residual, **how) for each in NAMES
        ]

    for activation, y in zip(NAMES, jax.jit(with_each)(x, w, b, residual), strict=True):
        assert y.dtype == (result or x.dtype)
        assert_linear(y, x, w, b, activation, residual=residual)


# The kernels


@pytest.mark.kernel
@every_activation
@every_16_bits
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tensor_core(tile, dtype, activation, on_tensor_cores):
    """Every kernel, with rows, columns and a depth that no tile divides."""
    x, w, b, residual = operands(*TILES[tile][on_tensor_cores["implementation"]], dtype)
    with helpers.recorded(on_tensor_cores["implementation"]) as executions:
        y = jax_gpuops.linear(x, w, b, activation=activation, residual=residual, **on_tensor_cores)
        jax.block_until_ready(y)
    assert_linear(y, x, w, b, activation, residual=residual)
    config = executions[-1]["config"]
    assert (config["tile_rows"], config["tile_cols"]) == tile


@pytest.mark.kernel
@every_16_bits
@pytest.mark.parametrize(
    ("ping_pong", "sizes"),
    [
        (False, {"interpret": (250, 1020, 2752), "cuda": (4000, 4104, 8192)}),
        (True, {"interpret": (760, 632, 40), "cuda": (4000, 4104, 40)}),
        *[(True, {"interpret": (500, 760, k), "cuda": (4000, 4104, k)}) for k in (136, 200)],
    ],
)
def test_tile_after_tile(ping_pong, sizes, dtype, on_tensor_cores):
    """Consumers that share a tile write it during the next, and meanwhile load what they add to it.

    Those that take turns have tiles of their own, also where a depth is over in fewer steps than a
    tile has panels.
    """
    implementation = on_tensor_cores["implementation"]
    m, n, k = sizes[implementation]
    x, w, b, residual = operands(m, n, k, dtype)
    with helpers.recorded(implementation) as executions:
        y = jax_gpuops.linear(x, w, b, residual=residual, **on_tensor_cores)
        jax.block_until_ready(y)
    assert_linear(y, x, w, b, None, residual=residual)
    config = executions[-1]["config"]
    tiles = -(-m // config["tile_rows"]) * -(-n // config["tile_cols"])
    assert config["ping_pong"] == ping_pong
    assert config["blocks"] < tiles


@pytest.mark.kernel
@every_16_bits
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [(1, 136, 64), (72, 131, 200), (129, 263, 67), (65, 257, 129), (300, 515, 72), (3, 1, 5)],
    ids=str,
)
def test_rows_of_any_length(sizes, has_bias, dtype, on_tensor_cores):
    """Odd rows begin at no multiple of four bytes, and their last element is no pair."""
    x, w, b, residual = operands(*sizes, dtype)
    b = b if has_bias else None
    y = jax_gpuops.linear(x, w, b, residual=residual, **on_tensor_cores)
    assert_linear(y, x, w, b, None, residual=residual)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("algorithm", LADDER)
@pytest.mark.parametrize("sizes", [(3, 5, 7), (33, 36, 20)], ids=str)
def test_every_algorithm_for_every_gpu(sizes, algorithm, dtype, implementation):
    how = {"implementation": implementation, "algorithm": algorithm}
    with helpers.x64(dtype):
        assert_every_activation(*operands(*sizes, dtype), **how)


@pytest.mark.kernel
@pytest.mark.parametrize(("dtype", "result"), helpers.DTYPES_ON_TENSOR_CORES)
@pytest.mark.parametrize("sizes", [(5, 131, 517), (72, 264, 136)], ids=str)
def test_mma_pipelined(sizes, dtype, result, on_tensor_cores):
    x, w, b = operands_of_tensor_cores(*sizes, dtype, result)
    residual = helpers.normal((x.shape[0], w.shape[1]), result, seed=3)
    how = {**on_tensor_cores, "algorithm": "mma_pipelined"}
    assert_every_activation(x, w, b, residual, result, **how)


@pytest.mark.kernel
@pytest.mark.parametrize("algorithm", [*EVERY_GPU, "tensor_core"])
def test_without_bias_and_activation_it_is_gemm(algorithm, on_tensor_cores):
    x, w, _, residual = operands(16, 136, 136, "bfloat16")
    how = {**on_tensor_cores, "algorithm": algorithm}
    y = jax_gpuops.linear(x, w, residual=residual, **how)
    helpers.assert_same_bits(y, jax_gpuops.gemm(x, w, residual, beta=1, **how))
    assert_linear(y, x, w, None, None, residual=residual)


@pytest.mark.kernel
@pytest.mark.parametrize("beta", [1.0, -2.5, 3])
def test_tensor_core_adds_c_of_gemm(beta, on_tensor_cores):
    a, b, _, c = operands(72, 131, 64, "bfloat16")
    y = jax_gpuops.gemm(a, b, c, beta=beta, **on_tensor_cores)
    exact, magnitude = (
        f(helpers.exact(a)) @ f(helpers.exact(b)) + f(beta * helpers.exact(c))
        for f in (lambda x: x, np.abs)
    )
    helpers.assert_product(y, exact, magnitude, a.shape[1])


@pytest.mark.kernel
def test_float32_at_the_highest_precision_is_by_parts(on_tensor_cores):
    """The kernels of plain products take a residual as their c."""
    x, w, b, residual = operands(72, 136, 264, "float32")
    how = {**on_tensor_cores, "precision": "highest"}
    for algorithm in ("bf16_x6", "fp16_x3", "fma_pipelined"):
        how["algorithm"] = algorithm
        y = jax_gpuops.linear(x, w, residual=residual, **how)
        assert_linear(y, x, w, None, None, residual=residual)
    for algorithm in ("bf16_x6", "fp16_x3"):
        how["algorithm"] = algorithm
        y = jax_gpuops.linear(x, w, b, activation="gelu", residual=residual, **how)
        assert_linear(y, x, w, b, "gelu", residual=residual)


@pytest.mark.kernel
@pytest.mark.parametrize("algorithm", [*EVERY_GPU, "tensor_core"])
def test_repeats_are_bit_identical_in_any_order_of_threads(algorithm, on_tensor_cores):
    if on_tensor_cores["implementation"] != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    x, w, b, residual = operands(70, 264, 136, "bfloat16")
    how = {**on_tensor_cores, "algorithm": algorithm}
    helpers.under_each_schedule(
        lambda: jax_gpuops.linear(x, w, b, residual=residual, **how), [(1, {}), (2, {})]
    )


@pytest.mark.kernel
@every_16_bits
def test_every_element_is_written(dtype, on_tensor_cores):
    """The result lies where NaN were."""
    x, w, b, residual = operands(129, 131, 72, dtype)

    @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
    def layer(poison, *xs):
        del poison
        return jax_gpuops.linear(*xs[:3], residual=xs[3], **on_tensor_cores)

    y = layer(jnp.full((129, 131), np.nan, dtype), x, w, b, residual)
    assert_linear(y, x, w, b, None, residual=residual)


# Values


@pytest.mark.kernel
@every_16_bits
@pytest.mark.parametrize("algorithm", ["coalesced", "tensor_core", "mma_pipelined"])
def test_the_residual_is_added_before_rounding(algorithm, dtype, on_tensor_cores):
    """1 + 1/4096 is 1 in 16 bits, so that a layer rounded by itself would cancel to 0."""
    x, w = jnp.full((4, 2), 1, dtype), jnp.zeros((2, 8), dtype).at[0].set(1).at[1].set(1 / 4096)
    residual, how = jnp.full((4, 8), -1, dtype), on_tensor_cores | {"algorithm": algorithm}
    for b, activation in itertools.product((None, jnp.zeros(8, dtype)), (None, "relu")):
        y = jax_gpuops.linear(x, w, b, activation=activation, residual=residual, **how)
        np.testing.assert_array_equal(np.asarray(y, np.float32), np.float32(1 / 4096))


@pytest.mark.kernel
@pytest.mark.parametrize("algorithm", ["coalesced", "tensor_core", "mma_pipelined"])
def test_nan_and_infinities_stay_where_they_are(algorithm, on_tensor_cores):
    x, w, b, residual = operands(72, 136, 64, "bfloat16")
    special = {(0, 0): np.nan, (7, 8): np.inf, (8, 7): -np.inf, (71, 135): np.nan}
    expected = jax_gpuops.linear(x, w, b, residual=residual, **on_tensor_cores)
    expected = np.array(expected, np.float32)
    for place, value in special.items():
        residual[place] = expected[place] = value
    y = jax_gpuops.linear(x, w, b, residual=residual, **on_tensor_cores | {"algorithm": algorithm})
    y = np.asarray(y, np.float32)
    np.testing.assert_array_equal(np.isfinite(y), np.isfinite(expected))
    np.testing.assert_array_equal(y[~np.isfinite(y)], expected[~np.isfinite(expected)])
    np.testing.assert_allclose(y, expected, rtol=1e-2, atol=1e-2)


@every_activation
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("sizes", [(3, 4, 0), (0, 4, 3), (3, 0, 4), (0, 0, 0)], ids=str)
def test_arrays_without_elements(sizes, has_bias, activation, implementation):
    m, n, k = sizes
    x, w = jnp.ones((2, m, k)), jnp.ones((k, n))
    b = jnp.linspace(-1.0, 1.0, n) if has_bias else None
    residual = helpers.normal((2, m, n), "float32")
    y = jax_gpuops.linear(
        x, w, b, activation=activation, residual=residual, implementation=implementation
    )
    row = np.zeros(n) if b is None else b
    expected = helpers.activated(activation, row) + residual
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6), (2, 1, 3, 6)], ids=str)
@pytest.mark.parametrize("activation", [None, "silu"], ids=str)
def test_leading_dims(shape, activation, implementation):
    x, (_, w, b) = helpers.normal(shape, "float32"), operands_of_layer(1, 5, 6, "float32")
    residual = helpers.normal((*shape[:-1], 5), "float32", seed=3)
    how = {"precision": "highest", "implementation": implementation}
    y = jax_gpuops.linear(x, w, b, activation=activation, residual=residual, **how)
    assert y.shape == residual.shape
    exact = helpers.activated(activation, x.astype(np.float64) @ w + b) + residual
    np.testing.assert_allclose(y, exact, rtol=2e-5, atol=1e-6)


# Dtypes and arguments


@pytest.mark.parametrize(
    ("dtypes", "preferred", "result"),
    [
        (("bfloat16", "bfloat16", "bfloat16", "bfloat16"), None, "bfloat16"),
        (("bfloat16", "bfloat16", "bfloat16", "float32"), None, "float32"),
        (("bfloat16", "bfloat16", "float32", "bfloat16"), None, "float32"),
        (("bfloat16", "bfloat16", "bfloat16", "float32"), "bfloat16", "bfloat16"),
        (("float16", "float16", "float16", "float16"), "float32", "float32"),
    ],
)
def test_dtypes_promote_as_in_the_formula(dtypes, preferred, result, implementation):
    x, w, b, residual = (
        jnp.asarray(each, t) for each, t in zip(operands(4, 5, 6, "float32"), dtypes, strict=True)
    )
    how = {"activation": "relu", "preferred_element_type": preferred}
    for name in (implementation, "xla"):
        y = jax_gpuops.linear(x, w, b, residual=residual, implementation=name, **how)
        assert y.dtype == result
    if preferred is None:
        assert jnp.result_type(x @ w + b + residual) == result


def test_strict_promotion(implementation):
    x, w, b, residual = map(jnp.asarray, operands(4, 5, 6, "bfloat16"))
    with jax.numpy_dtype_promotion("strict"):
        jax_gpuops.linear(x, w, b, residual=residual, implementation=implementation)
        with pytest.raises(ValueError, match="promotion"):
            jax_gpuops.linear(
                x, w, residual=residual.astype("float32"), implementation=implementation
            )


@pytest.mark.parametrize(
    ("residual", "error", "text"),
    [
        (np.ones((4, 5), np.float32), ValueError, r"shape of the result, \(2, 4, 5\), but has"),
        (np.ones((1, 4, 5), np.float32), ValueError, "residual must have the shape of the result"),
        (np.ones((2, 4, 6), np.float32), ValueError, "residual must have the shape of the result"),
        (np.float32(1), ValueError, "residual must have the shape of the result"),
        (np.ones((2, 4, 5), np.int32), TypeError, "but residual is of dtype int32"),
        ("text", TypeError, "residual"),
    ],
)
def test_bad_residuals(residual, error, text, implementation):
    x, w = np.ones((2, 4, 6), np.float32), np.ones((6, 5), np.float32)
    for name in (implementation, "xla"):
        with pytest.raises(error, match=text):
            jax_gpuops.linear(x, w, residual=residual, implementation=name)


@pytest.mark.parametrize(
    ("algorithm", "text"),
    [
        ("split_k", "'split_k' does not support c"),
        ("skinny", "'skinny' does not support c"),
        ("cublas", "cublas"),
    ],
)
def test_kernels_that_add_none_refuse_it(algorithm, text, on_tensor_cores):
    x, w, b, residual = operands(16, 136, 136, "bfloat16")
    how = {**on_tensor_cores, "algorithm": algorithm}
    with pytest.raises(ValueError, match=text):
        jax_gpuops.linear(x, w, b, residual=residual, **how)


def test_the_plan_chooses_among_kernels_that_add_it(on_tensor_cores):
    implementation = on_tensor_cores["implementation"]
    for (m, n, k), dtype, algorithm in [
        ((512, 512, 512), "bfloat16", "tensor_core"),
        ((1, 2048, 2048), "bfloat16", "tensor_core"),  # skinny without a residual
        ((64, 512, 8192), "float16", "tensor_core"),  # split_k without a residual
        ((512, 512, 512), "float32", "tensor_core"),
        ((512, 511, 512), "float32", "mma_pipelined"),  # rows that tensor copies cannot read
        ((4, 5, 6), "bfloat16", "coalesced"),
    ]:
        plan = jax_gpuops.plan(
            "linear",
            [(m, k), (k, n), (n,)],
            dtype,
            residual=jax.ShapeDtypeStruct((m, n), dtype),
            implementation=implementation,
        )
        assert plan.algorithm == algorithm, (m, n, k, dtype)


def test_residuals_with_explicit_shardings_are_refused():
    devices = np.array(jax.devices("cpu")[:2])
    mesh = Mesh(devices, ("d",), axis_types=(AxisType.Explicit,))
    with jax.default_device(devices[0]), jax.set_mesh(mesh):
        x, w, residual = (
            jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, spec))
            for shape, spec in [((4, 6), P("d")), ((6, 3), P()), ((4, 3), P("d"))]
        )
        with pytest.raises(ValueError, match="not support explicit sharding"):
            jax_gpuops.linear(x, w, residual=residual, implementation="interpret")
        assert jax.typeof(jax_gpuops.linear(x, w, residual=residual)).sharding.spec[0] == "d"


def test_what_kernels_cannot_take_runs_in_xla(implementation):
    x, w = jnp.ones((4, 5), jnp.complex64), jnp.ones((5, 3), jnp.complex64)
    residual = jnp.full((4, 3), 2, jnp.complex64)
    with pytest.raises(TypeError, match="matmul kernels require two operands of the same"):
        jax_gpuops.linear(x, w, residual=residual, implementation=implementation)
    with jax_gpuops.use(implementation, strict=False):
        y = jax_gpuops.linear(x, w, activation="gelu", residual=residual)
    np.testing.assert_allclose(y, 2 + jax.nn.gelu(x @ w))


@pytest.mark.parametrize(
    ("has_bias", "activation", "target"),
    [
        (False, None, "jax_gpuops_gemm_v2"),
        (True, None, "jax_gpuops_linear_add_v1"),
        (False, "gelu", "jax_gpuops_linear_add_v1"),
    ],
)
def test_the_kernel_is_in_the_program(has_bias, activation, target, implementation):
    x, w, b, residual = operands(4, 5, 6, "float32")
    b = b if has_bias else None

    def layer(x, w, residual):
        how = {"activation": activation, "implementation": implementation}
        return jax_gpuops.linear(x, w, b, residual=residual, **how)

    (call,) = helpers.custom_calls(layer, x, w, residual)
    assert call.startswith(target)


@every_16_bits
def test_rows_are_the_same_in_every_batch(dtype, on_tensor_cores):
    x, w, b, residual = operands(200, 136, 264, dtype)

    def layer(count):
        how = {"batch_invariant": True, "implementation": on_tensor_cores["implementation"]}
        return jax_gpuops.linear(x[:count], w, b, residual=residual[:count], **how)

    expected = layer(200)
    for count in (1, 16, 65):
        helpers.assert_same_bits(layer(count), expected[:count])


# Derivatives and batching


def reference(x, w, b, residual, activation=None):
    return reference_of_layer(x, w, b, activation) + residual


def ours(x, w, b, residual, activation, implementation):
    how = {"precision": "highest", "implementation": implementation}
    return jax_gpuops.linear(x, w, b, activation=activation, residual=residual, **how)


@every_activation
def test_derivatives(activation, implementation):
    function = functools.partial(ours, activation=activation, implementation=implementation)
    expected = functools.partial(reference, activation=activation)
    primals = operands(6, 5, 4, "float32")
    tangents = tuple(2 * each for each in primals)
    assert_close(jax.jvp(function, primals, tangents), jax.jvp(expected, primals, tangents))
    (y, vjp), (y_expected, vjp_expected) = jax.vjp(function, *primals), jax.vjp(expected, *primals)
    assert_close((y, vjp(y)), (y_expected, vjp_expected(y)))


@every_activation
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_cotangent_passes_to_the_residual(has_bias, activation, implementation):
    x, w, b, residual = operands(6, 5, 4, "bfloat16")
    b = b if has_bias else None
    how = {"activation": activation, "implementation": implementation}
    _, vjp = jax.vjp(lambda r: jax_gpuops.linear(x, w, b, residual=r, **how), residual)
    cotangent = jnp.asarray(helpers.normal((6, 5), "bfloat16", seed=7))
    helpers.assert_same_bits(vjp(cotangent)[0], cotangent)


@pytest.mark.any_version
@every_activation
def test_derivatives_of_second_order(activation, implementation):
    function = functools.partial(ours, activation=activation, implementation=implementation)
    expected = functools.partial(reference, activation=activation)
    primals = operands(4, 3, 5, "float32")
    if activation != "relu":
        check_grads(function, primals, order=2, atol=2e-2, rtol=2e-2, eps=1e-2)

    def hessian(f):
        return jax.hessian(lambda *xs: (f(*xs) ** 2).sum(), (0, 1, 2, 3))(*primals)

    assert_close(hessian(function), hessian(expected), 2e-4)


@every_activation
@every_16_bits
def test_gradients_in_16_bits(dtype, activation, on_tensor_cores):
    """They are those in float32, but for roundings."""
    xs = operands(72, 136, 64, dtype)

    def gradients(layer, *xs):
        return jax.grad(lambda *xs: (layer(*xs).astype("float32") ** 2).mean(), (0, 1, 2, 3))(*xs)

    how = {"activation": activation, "implementation": on_tensor_cores["implementation"]}
    actual = gradients(lambda *xs: jax_gpuops.linear(*xs[:3], residual=xs[3], **how), *xs)
    wide = [jnp.asarray(each, "float32") for each in xs]
    expected = gradients(functools.partial(reference, activation=activation), *wide)
    for each, exact in zip(actual, expected, strict=True):
        assert each.dtype == dtype
        scale = np.abs(exact).max()
        assert np.abs(np.asarray(each, "float32") - exact).max() <= 0.02 * scale


@every_activation
@pytest.mark.parametrize("has_bias", [False, True])
def test_what_is_kept_for_the_gradient(has_bias, activation, implementation):
    """As without a residual, which itself is not kept."""
    x, w, b, residual = map(jnp.asarray, operands(16, 24, 8, "bfloat16"))
    b = b if has_bias else None

    def layer(x, w, residual):
        how = {"activation": activation, "implementation": implementation}
        return jax_gpuops.linear(x, w, b, residual=residual, **how)

    _, vjp = jax.jit(lambda *xs: jax.vjp(layer, *xs))(x, w, residual)
    kept = [each for each in jax.tree.leaves(vjp) if each.size == 16 * 24]
    assert [each.dtype for each in kept] == ([] if activation is None else [jnp.bfloat16])


BATCHES = [axes for axes in itertools.product((0, None), repeat=4) if axes != (None,) * 4]


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
def test_vmap_of_vmap(outer, implementation):
    function = functools.partial(ours, activation="gelu", implementation=implementation)
    expected = functools.partial(reference, activation="gelu")
    operands = [
        [
            each if axis is None else np.stack([each, 2 * each])
            for each, axis in zip(stacked(inner), outer, strict=True)
        ]
        for inner in BATCHES
    ]

    @functools.partial(jax.jit, static_argnums=0)  # one program is compiled faster than many
    def results(layer, operands):
        return [
            jax.vmap(jax.vmap(layer, inner), outer)(*xs)
            for inner, xs in zip(BATCHES, operands, strict=True)
        ]

    assert_close(results(function, operands), results(expected, operands))


def test_vmap_over_the_residual_alone(on_tensor_cores):
    """The product, of 16-bit factors, is computed once, in the accumulator's dtype."""
    x, w, b, residual = operands(72, 136, 64, "bfloat16")
    residuals = np.stack([residual, residual[::-1]])
    y = jax.vmap(lambda r: jax_gpuops.linear(x, w, b, residual=r, **on_tensor_cores))(residuals)
    for each, own in zip(y, residuals, strict=True):
        assert_linear(each, x, w, b, None, residual=own)


@pytest.mark.parametrize("mapped", ["x", "w", "x and w"])
def test_vmap_on_tensor_cores(mapped, on_tensor_cores):
    """Rows are folded; of other batches each matrix has a residual of its own."""
    axes = {"x": (0, None, None, 0), "w": (None, 0, None, None), "x and w": (0, 0, 0, 0)}[mapped]
    xs = [
        each if axis is None else np.stack([each, each[::-1]])
        for each, axis in zip(operands(72, 136, 64, "bfloat16"), axes, strict=True)
    ]

    def layer(x, w, b, residual):
        return jax_gpuops.linear(x, w, b, residual=residual, **on_tensor_cores)

    def batch(i):
        return xs[i] if axes[i] == 0 else np.stack([xs[i]] * 2)

    with helpers.recorded(on_tensor_cores["implementation"]) as executions:
        y = jax.block_until_ready(jax.vmap(layer, axes)(*xs))
    (execution,) = executions
    sizes = (1, 144) if mapped == "x" else (2, 72)
    assert (execution["problem"]["batch"], execution["problem"]["m"]) == sizes
    x, w, b, residual = map(batch, range(4))
    assert_linear(y, x, w, b, None, residual=residual)


@pytest.mark.parametrize("activation", [None, "relu", "silu"], ids=str)
def test_gradients_inside_shard_map(activation, implementation):
    """Rows are divided, and those of the residual with them."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    layer = functools.partial(ours, activation=activation, implementation=implementation)
    specs = (P("d"), P(), P(), P("d"))
    divided = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=P("d")))
    xs = operands(6, 5, 4, "float32")

    def results(f):
        return f(*xs), jax.grad(lambda *xs: (f(*xs) ** 2).sum(), (0, 1, 2, 3))(*xs)

    assert_close(results(divided), results(functools.partial(reference, activation=activation)))
