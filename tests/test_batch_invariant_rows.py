"""batch_invariant=True in the softmax family: a row has the same bits in every batch."""

import helpers
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import HAS_GPU
from hypothesis import strategies as st

import jax_gpuops as ops
from jax_gpuops import _library

# By one warp, by a block, by the registers and the shared memory of a cluster, and by more blocks:
# whole packs and not.
LENGTHS = [1, 3, 128, 197, 1000, 1500, 4096, 20_001, 50_257, 140_000, 300_001]
ROWS = 70 if HAS_GPU else 3
COUNTS = [1, 2, *([4, 33, 64] if HAS_GPU else [])]
FUNCTIONS = {
    "softmax": (ops.softmax, jax.nn.softmax),
    "log_softmax": (ops.log_softmax, jax.nn.log_softmax),
    "logsumexp": (ops.logsumexp, jax.nn.logsumexp),
}


@pytest.fixture(params=FUNCTIONS)
def function(request, implementation):
    def function(x, axis=-1, **options):
        how = {"implementation": implementation, "batch_invariant": True, **options}
        return FUNCTIONS[request.param][0](x, axis, **how)

    function.name, upstream = request.param, FUNCTIONS[request.param][1]
    function.upstream = jax.jit(upstream, static_argnames="axis")
    return function


def assert_close(actual, expected):
    """float32 within a few units of the last place, 16-bit floats as they are rounded."""
    tolerance = {"float32": 2e-6, "bfloat16": 8e-3}[actual.dtype.name]
    np.testing.assert_allclose(helpers.exact(actual), expected, rtol=tolerance, atol=2e-6)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("columns", LENGTHS)
def test_any_number_of_rows(columns, dtype, function):
    x = helpers.normal((ROWS, columns), dtype, scale=4)
    parts = [slice(count) for count in COUNTS] + [slice(-count, None) for count in COUNTS]
    # One program is compiled faster than many.
    y, *of_parts = jax.jit(lambda xs: list(map(function, xs)))([x, *(x[part] for part in parts)])
    for part, of_part in zip(parts, of_parts, strict=True):
        helpers.assert_same_bits(of_part, np.asarray(y)[part])
    assert_close(np.asarray(y), function.upstream(helpers.exact(x), axis=-1))


@pytest.mark.kernel
def test_any_dtype(function):
    for dtype in ("float16", "float64"):
        with helpers.x64(dtype):
            x = helpers.normal((ROWS, 1501), dtype)
            y = function(x)
            assert y.dtype == dtype
            helpers.assert_same_bits(function(x[2:3]), y[2:3])


@pytest.mark.kernel
@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("columns", [10, 64, 197, 1500, 20_001])
def test_any_neighbours(columns, scale, function):
    """Rows so large that their elements are read again, infinities and NaN leave others alone."""
    x = helpers.normal((5, columns), "float32")
    others = np.array(x)
    others[1::4], others[2::4], others[3::4] = 1e30 * x[1::4], np.inf, np.nan
    for where in (None, np.random.default_rng(0).random(x.shape) < 0.5):
        options = {"scale": scale, "where": where}
        helpers.assert_same_bits(function(others, **options)[::4], function(x, **options)[::4])


@pytest.mark.kernel
@pytest.mark.parametrize("columns", [1, 100, 1500])
def test_any_axis(columns, function):
    """Along the last axis, another one or several, and under vmap."""
    x = helpers.normal((6, columns), "bfloat16")
    y = function(x)
    is_reduced = y.ndim == 1
    helpers.assert_same_bits(function(x.T, 0), y if is_reduced else y.T)
    helpers.assert_same_bits(jax.vmap(function)(x), y)
    helpers.assert_same_bits(jax.vmap(function, 1)(x.T), y)
    stacked = jnp.stack([x, 2 * x], 2)
    mapped = jax.vmap(lambda each: function(each, 1), 2)(stacked)
    helpers.assert_same_bits(mapped[0], y)
    folded = function(x.reshape(6, columns, 1), (1, 2))
    helpers.assert_same_bits(folded.reshape(y.shape), y)


@pytest.mark.kernel
@pytest.mark.parametrize("shape", [(6, 64, 64), (6, 1, 197), (1, 197, 197), (6, 197, 1)])
def test_masks(shape, function):
    x = helpers.normal((6, 197, 197) if 197 in shape else (6, 64, 64), "float32")
    where = np.random.default_rng(0).random(shape) < 0.5
    y = function(x, where=where)
    for i in (0, 5):
        mask = where[i : i + 1] if shape[0] == 6 else where
        helpers.assert_same_bits(function(x[i : i + 1], where=mask), y[i : i + 1])
    expected = function.upstream(helpers.exact(x), axis=-1, where=where)
    if y.ndim == 3:  # of rows that are masked as a whole jax.nn makes NaN
        nothing = -np.inf if function.name == "log_softmax" else 0
        expected = jnp.where(jnp.any(where, -1, keepdims=True), expected, nothing)
    assert_close(y, expected)


@pytest.mark.kernel
@pytest.mark.parametrize(("queries", "keys"), [(40, 40), (100, 37), (37, 100)])
def test_causal_rows(queries, keys, function):
    x = helpers.normal((3, queries, keys), "bfloat16")
    y = function(x, causal=True)
    helpers.assert_same_bits(function(x[1], causal=True), y[1])
    where = np.tril(np.ones((queries, keys), bool))
    assert_close(y, function.upstream(helpers.exact(x), axis=-1, where=where))


@pytest.mark.kernel
@pytest.mark.parametrize("scale", [0.3, -0.5, 0.0])
def test_factors(scale, function):
    """What rows are filled up with takes no part, whatever the sign of the factor."""
    x = helpers.normal((4, 131), "float32")
    y = function(x, scale=scale)
    helpers.assert_same_bits(function(x[1:3], scale=scale), y[1:3])
    assert_close(y, function.upstream(scale * helpers.exact(x), axis=-1))


@pytest.mark.kernel
@pytest.mark.parametrize("columns", [131, 1500, 20_001])
def test_gradients(columns, function):
    x = helpers.normal((5, columns), "float32")
    y, pullback = jax.vjp(function, x)
    cotangent = helpers.normal(y.shape, "float32", seed=1)
    (gradient,) = pullback(cotangent)
    _, pullback = jax.vjp(function, x[1:3])
    helpers.assert_same_bits(pullback(cotangent[1:3])[0], gradient[1:3])
    with jax.enable_x64(True):
        _, pullback = jax.vjp(lambda x: function.upstream(x, axis=-1), helpers.exact(x))
        (expected,) = pullback(helpers.exact(cotangent))
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.kernel
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("classes", [10, 131, 50_257])
def test_cross_entropy(classes, axis, implementation):
    """Labels that count from the end, and those of no class, mean the same in filled up rows."""
    logits = helpers.normal((6, classes), "float32", scale=3)
    labels = np.array([0, classes - 1, -1, -classes, classes, -classes - 1], np.int32)

    def loss(logits, labels, **how):
        return ops.softmax_cross_entropy_with_integer_labels(
            jnp.moveaxis(logits, 1, axis), labels, axis, **how
        )

    def loss_and_gradient(rows):
        how = {"implementation": implementation, "batch_invariant": True}
        y, pullback = jax.vjp(lambda x: loss(x, labels[rows], **how), logits[rows])
        return y, pullback(jnp.ones_like(y))[0]

    whole = loss_and_gradient(slice(None))
    for rows in (slice(0, 1), slice(1, 4), slice(5, 6)):
        for part, expected in zip(loss_and_gradient(rows), whole, strict=True):
            helpers.assert_same_bits(part, expected[rows])
    expected, pullback = jax.vjp(lambda x: loss(x, labels, implementation="xla"), logits)
    np.testing.assert_allclose(whole[0], expected, rtol=2e-6)
    (gradient,) = pullback(jnp.ones_like(expected))
    np.testing.assert_allclose(whole[1], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_rows_of_several_devices(implementation):
    x = helpers.normal((8, 131), "float32")
    mesh = jax.make_mesh((2,), ("rows",), (jax.sharding.AxisType.Auto,))
    sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P("rows")))

    @jax.jit
    def function(x):
        return ops.softmax(x, batch_invariant=True, implementation=implementation)

    y = function(sharded)
    assert y.sharding.spec[0] == "rows"
    helpers.assert_same_bits(y, function(x))


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(
    function=st.sampled_from(
        ["softmax", "log_softmax", "logsumexp", "cross_entropy", "softmax_tangent"]
    ),
    dtype=st.sampled_from(["float32", "bfloat16", "float64"]),
    packs=st.integers(1, 2**18),
    counts=st.tuples(*[st.integers(1, 2**24)] * 2),
    masked=st.booleans(),
    queries=st.sampled_from([0, 7]),
)
def test_plans_say_the_same_of_any_number_of_rows(
    function, dtype, packs, counts, masked, queries, implementation
):
    def planned(outer):
        columns = packs * 16 // np.dtype(jnp.dtype(dtype)).itemsize
        problem = {"function": function, "dtype": dtype, "outer": outer, "columns": columns}
        problem |= {"inner": 1, "masked": int(masked), "queries": queries, "scaled": 0}
        plan = _library.planned(
            implementation, "softmax", problem | {"alignment": 16}, "batch_invariant"
        )
        of_grids = ("blocks", "blocks_along_y", "finish_blocks", "workspace_bytes")
        return plan["algorithm"], {k: v for k, v in plan["config"].items() if k not in of_grids}

    assert planned(counts[0]) == planned(counts[1])


def test_it_is_a_kernel_or_an_error(implementation):
    x = np.ones((8, 8), np.float32)
    with pytest.raises(ValueError, match="batch_invariant=True asks for a kernel"):
        ops.softmax(x, batch_invariant=True, implementation="xla")
    with ops.use("xla"), pytest.raises(ValueError, match="asks for a kernel"):
        ops.logsumexp(x, batch_invariant=True)
    with pytest.raises(ValueError, match="chooses the algorithm, but algorithm is 'warp'"):
        ops.log_softmax(x, batch_invariant=True, algorithm="warp")
    with pytest.raises(ValueError, match="'batch_invariant' is unknown"):
        ops.softmax(x, algorithm="batch_invariant")
    with pytest.raises(TypeError, match="must be True or False, got 1"):
        ops.softmax_cross_entropy_with_integer_labels(x, np.zeros(8, int), batch_invariant=1)
    with pytest.raises(TypeError, match="int32"):
        ops.softmax(x.astype(np.int32), batch_invariant=True)
    with pytest.raises(ValueError, match="batch_invariant=True cannot run this, leave it"):
        ops.logsumexp(x, -1, b=x, batch_invariant=True)
    with (
        ops.use(implementation, strict=False),
        pytest.raises(ValueError, match="do not support b or return_sign"),
    ):
        ops.logsumexp(x, -1, return_sign=True, batch_invariant=True)


@pytest.mark.skipif(HAS_GPU, reason="moves buffers of the host")
def test_rows_at_other_addresses_are_an_error():
    """The threads that read an element would be others."""
    x = np.ones((8, 8), np.float32)
    with helpers.buffers_at(4), pytest.raises(jax.errors.JaxRuntimeError, match="aligned to 16"):
        ops.softmax(x, batch_invariant=True, implementation="interpret").block_until_ready()
