"""softmax, log_softmax and logsumexp against float64 and against JAX."""

import helpers
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jax_gpuops

pytestmark = pytest.mark.kernel

FUNCTIONS = ("softmax", "log_softmax", "logsumexp")
LADDER = [a.name for a in jax_gpuops.algorithms("softmax")][:7]
PRODUCTION = ["warp", "block_shared", "block_uncached"]
UPSTREAM = {name: getattr(jax.nn, name) for name in FUNCTIONS}


def ours(name, x, axis=-1, **kwargs):
    return getattr(jax_gpuops, name)(x, axis=axis, **kwargs)


def reference(name, x, axis):
    """The function of `x` in extended precision, with JAX's values for infinite and NaN rows."""
    x = helpers.exact(x)
    with np.errstate(all="ignore"):
        largest = x.max(axis, keepdims=True)
        if name == "logsumexp":
            largest = np.where(np.isfinite(largest), largest, 0)
        shifted = x - largest
        total = np.exp(shifted).sum(axis, keepdims=True)
        if name == "softmax":
            return np.exp(shifted) / total
        if name == "log_softmax":
            return shifted - np.log(total)
        return np.squeeze(np.log(total) + largest, axis)


def assert_accurate(name, actual, x, axis=-1, *, fast=False):
    """Checks the bounds of the correctness contract, element by element.

    16-bit results are within one unit in the last place. Wider ones: exp of a difference d costs
    about |d| units, by rounding d alone, where the contract allows 6 + 1.25 |d|; logarithms add
    that of the larger term they are made of.
    """
    expected = reference(name, x, axis)
    actual = np.asarray(actual)
    assert actual.dtype == np.asarray(x).dtype
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    finite = np.isfinite(expected)
    infinite = np.isinf(expected)
    np.testing.assert_array_equal(actual[infinite], expected[infinite].astype(actual.dtype))
    if actual.dtype.itemsize == 2:
        assert np.all(helpers.ulp_error(actual, expected)[finite] <= 1)
        return
    epsilon = np.finfo(actual.dtype).eps
    with np.errstate(invalid="ignore"):
        error = np.abs(helpers.exact(actual) - expected)
    if name == "softmax":
        with np.errstate(invalid="ignore"):
            distance = helpers.exact(x).max(axis, keepdims=True) - helpers.exact(x)
        smallest = np.finfo(actual.dtype).tiny
        bound = np.where(
            expected >= smallest, (6 + 1.25 * distance) * epsilon * expected, 16 * smallest
        )
    else:
        largest = np.abs(helpers.exact(x)).max(axis, keepdims=True, initial=0, where=np.isfinite(x))
        largest = np.squeeze(largest, axis) if name == "logsumexp" else largest
        bound = 8 * epsilon * (1 + largest + np.abs(expected))
    assert np.all(error[finite] <= np.broadcast_to(bound, error.shape)[finite])


@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("algorithm", PRODUCTION)
@pytest.mark.parametrize("columns", [1, 2, 3, 8, 31, 33, 127, 256, 1001])
def test_every_production_algorithm(name, algorithm, dtype, columns, implementation):
    with helpers.x64(dtype):
        x = helpers.normal((5, columns), dtype, scale=4)
        y = ours(name, x, implementation=implementation, algorithm=algorithm)
        assert_accurate(name, y, x)


@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("algorithm", LADDER)
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (3, 32), (7, 33), (4, 130), (2, 1027)])
def test_every_step_of_the_ladder(algorithm, dtype, shape, implementation):
    """Odd rows, and row counts that two and four rows a warp do not divide."""
    with helpers.x64(dtype):
        x = helpers.normal(shape, dtype, scale=4)
        y = ours("softmax", x, implementation=implementation, algorithm=algorithm)
        assert_accurate("softmax", y, x)


@hypothesis.given(
    data=st.data(),
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    dtype=st.sampled_from(helpers.FLOATS),
    name=st.sampled_from(FUNCTIONS),
    special=st.sampled_from([None, "-inf", "inf", "nan", "all -inf", "large"]),
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_any_shape_axis_and_value(data, shape, dtype, name, special, implementation):
    axes = st.integers(-len(shape), len(shape) - 1)
    axis = data.draw(st.one_of(st.none(), axes, st.lists(axes, min_size=1, max_size=2)))
    if isinstance(axis, list):
        axis = tuple({a % len(shape): a for a in axis}.values())
    x = helpers.normal(shape, dtype, seed=data.draw(st.integers(0, 99)), scale=3)
    at = data.draw(st.integers(0, x.size - 1))
    if special == "all -inf":
        x[...] = -np.inf
    elif special == "large":
        x = (x.astype(np.float64) * 1e4).astype(x.dtype)
    elif special is not None:
        x.flat[at] = float(special)
    with helpers.x64(dtype):
        y = ours(name, x, axis, implementation=implementation)
        assert_accurate(name, y, x, axis)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("algorithm", PRODUCTION)
@pytest.mark.parametrize("special", ["-inf", "inf", "nan", "all -inf", "half -inf"])
def test_infinities_and_nan_as_in_jax(name, algorithm, special, implementation):
    """Also where the parts of a row that one thread or warp sees are -inf as a whole."""
    x = helpers.normal((3, 300), "float32")
    x[1] = {"all -inf": -np.inf, "half -inf": x[1]}.get(special, x[1])
    x[1, :150] = -np.inf if special == "half -inf" else x[1, :150]
    if special in ("-inf", "inf", "nan"):
        x[1, 77] = float(special)
    y = ours(name, x, implementation=implementation, algorithm=algorithm)
    np.testing.assert_allclose(y, UPSTREAM[name](x, axis=-1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("algorithm", [*LADDER, *PRODUCTION])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_an_axis_is_read_where_it_lies(algorithm, axis, implementation):
    x = helpers.normal((6, 10, 12), "float32")
    y = ours("softmax", x, axis, implementation=implementation, algorithm=algorithm)
    assert_accurate("softmax", y, x, axis)


def test_another_axis_costs_no_copy(implementation):
    def function(x):
        return jax_gpuops.softmax(x, axis=1, implementation=implementation)

    text = jax.jit(function).lower(jnp.zeros((4, 128, 64))).compile().as_text()
    assert "operand_layout_constraints={f32[4,64,128]{1,2,0}}" in text
    if implementation == "cuda":  # XLA:CPU copies all the same
        assert " copy(" not in text
        assert " transpose(" not in text


@pytest.mark.parametrize("offset", range(1, 4))
@pytest.mark.parametrize("algorithm", [*LADDER, *PRODUCTION])
def test_rows_that_start_at_any_phase(algorithm, offset, implementation):
    """Row r of an array with n columns starts n * r elements after an aligned address."""
    x = helpers.normal((8, 64 + offset), "float32")
    y = ours("softmax", x, implementation=implementation, algorithm=algorithm)
    assert_accurate("softmax", y, x)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("mask", ["full shape", "row", "column", "scalar", "empty row"])
def test_where(name, mask, implementation):
    x = helpers.normal((6, 40), "float32")
    x[2, 3] = np.nan
    where = {
        "full shape": np.random.default_rng(1).random((6, 40)) < 0.7,
        "row": np.arange(40) % 3 != 0,
        "column": np.arange(6)[:, None] % 2 == 0,
        "scalar": True,
        "empty row": np.arange(6)[:, None] != np.zeros(40),
    }[mask]
    y = ours(name, x, where=where, implementation=implementation)
    np.testing.assert_allclose(y, UPSTREAM[name](x, axis=-1, where=where), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_masked_values_have_no_gradient(name, implementation):
    x = helpers.normal((4, 20), "float32")
    where = np.arange(20) % 4 != 1
    x[:, 1] = np.nan
    gradient = jax.grad(
        lambda x: jnp.where(
            where if name != "logsumexp" else True,
            ours(name, x, where=where, implementation=implementation),
            0,
        ).sum()
    )(x)
    assert np.all(np.asarray(gradient)[:, ~where] == 0)
    assert np.all(np.isfinite(gradient))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 4)])
def test_empty_arrays_as_in_jax(name, shape, implementation):
    x = jnp.zeros(shape)
    for axis in range(len(shape)):
        try:
            expected = UPSTREAM[name](x, axis=axis)
        except ValueError:
            with pytest.raises(ValueError, match="zero-size"):
                ours(name, x, axis, implementation=implementation)
            continue
        np.testing.assert_array_equal(ours(name, x, axis, implementation=implementation), expected)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("shape", "axis"), [((0, 3, 4), (1, 2)), ((2, 0, 3, 4), (2, 3))])
def test_several_axes_of_an_empty_array(name, shape, axis, implementation):
    for each in (None, implementation):
        y = ours(name, jnp.zeros(shape), axis, implementation=each)
        assert y.shape == UPSTREAM[name](jnp.zeros(shape), axis=axis).shape


@pytest.mark.parametrize("axis", [0, 1, (0, 2)])
def test_none_leaves_no_moves_behind(axis):
    """On another axis XLA's own lowering runs; the program must be the one JAX makes."""

    def program(function):
        text = jax.jit(function).lower(jnp.zeros((8, 64, 32))).compile().as_text()
        return text.count(" copy("), text.count(" transpose(")

    assert program(lambda x: jax_gpuops.softmax(x, axis)) == program(
        lambda x: jax.nn.softmax(x, axis)
    )


def test_a_mask_must_be_boolean(implementation):
    """An additive mask in its place would give numbers that mean nothing."""
    x = jnp.ones((2, 3))
    with pytest.raises(ValueError, match="where must be None or a boolean array"):
        jax_gpuops.softmax(x, where=x, implementation=implementation)


def test_a_mask_of_higher_rank(implementation):
    x, where = jnp.ones((2, 3)), jnp.ones((4, 2, 3), bool)
    np.testing.assert_array_equal(
        jax_gpuops.softmax(x, where=where), jax.nn.softmax(x, where=where)
    )
    with pytest.raises(ValueError, match="does not broadcast to"):
        jax_gpuops.softmax(x, where=where, implementation=implementation)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("axis", [0, 1])
def test_derivatives_of_any_order(name, axis, implementation):
    x = helpers.normal((3, 5), "float32")
    check_grads(
        lambda x: ours(name, x, axis, implementation=implementation),
        (x,),
        order=2,
        modes=["fwd", "rev"],
        atol=1e-2,
        rtol=1e-2,
        eps=1e-2,
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradient_as_in_jax(name, implementation):
    x = helpers.normal((5, 33), "float32")
    cotangent = helpers.normal(UPSTREAM[name](x, axis=-1).shape, "float32", seed=1)
    _, pullback = jax.vjp(lambda x: ours(name, x, implementation=implementation), x)
    _, expected = jax.vjp(lambda x: UPSTREAM[name](x, axis=-1), x)
    np.testing.assert_allclose(pullback(cotangent)[0], expected(cotangent)[0], atol=2e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("in_axis", [0, 1, 2])
@pytest.mark.parametrize("axis", [0, 1])
def test_vmap(name, in_axis, axis, implementation):
    x = helpers.normal((4, 6, 8), "float32")
    y = jax.vmap(lambda x: ours(name, x, axis, implementation=implementation), in_axis)(x)
    expected = jax.vmap(lambda x: UPSTREAM[name](x, axis=axis), in_axis)(x)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_custom_call_is_in_the_program(name, implementation):
    calls = helpers.custom_calls(
        lambda x: ours(name, x, implementation=implementation), jnp.zeros((4, 8))
    )
    assert any(call.startswith(f"jax_gpuops_{name}_v1") for call in calls)


@pytest.mark.parametrize("algorithm", [*LADDER, *PRODUCTION])
def test_repeats_are_bit_identical(algorithm, implementation):
    x = helpers.normal((9, 333), "float32", scale=5)
    runs = [
        np.asarray(ours("softmax", x, implementation=implementation, algorithm=algorithm))
        for _ in range(3)
    ]
    np.testing.assert_array_equal(runs[0].view(np.int32), runs[1].view(np.int32))
    np.testing.assert_array_equal(runs[0].view(np.int32), runs[2].view(np.int32))


@pytest.mark.parametrize("algorithm", [*LADDER, *PRODUCTION])
def test_any_order_of_threads(algorithm, implementation):
    """A missing barrier gives other numbers under some order of the threads."""
    if implementation != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    from jax_gpuops_ffi import _interpret

    x = helpers.normal((5, 100), "float32")
    results = []
    try:
        for seed in range(5):
            _interpret.set_schedule_seed(seed)
            y = ours("softmax", x, implementation=implementation, algorithm=algorithm)
            results.append(np.asarray(y))
    finally:
        _interpret.set_schedule_seed(0)
    for result in results[1:]:
        np.testing.assert_array_equal(results[0], result)


def test_subnormal_results_are_kept(implementation):
    """XLA:CPU calls handlers with flush-to-zero on; the executor must not compute with it."""
    x = np.array([[0.0, -95.0]], np.float32)
    y = np.asarray(ours("softmax", x, implementation=implementation, algorithm="warp"))
    assert 0 < y[0, 1] < np.finfo(np.float32).tiny


def test_sums_of_long_rows_stay_accurate(implementation):
    """Equal terms: a plain float sum of one thread's share would drift by many ulp."""
    x = np.zeros((1, 1 << 20), np.float32)
    y = np.asarray(ours("logsumexp", x, implementation=implementation, algorithm="block_uncached"))
    np.testing.assert_allclose(y, [np.log(float(1 << 20))], rtol=2e-7)


def test_shape_rules():
    x = jax.ShapeDtypeStruct((3, 4, 5), jnp.bfloat16)
    for axis in (0, 1, 2, -1, None, (0, 2), (1, 2)):
        for name in FUNCTIONS:
            actual = jax.eval_shape(lambda x: ours(name, x, axis), x)  # noqa: B023
            expected = jax.eval_shape(lambda x: UPSTREAM[name](x, axis=axis), x)  # noqa: B023
            assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    kept = jax.eval_shape(lambda x: jax_gpuops.logsumexp(x, axis=1, keepdims=True), x)
    assert kept.shape == (3, 1, 5)


def test_what_kernels_do_not_take_goes_to_xla(implementation):
    integers = jnp.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(jax_gpuops.softmax(integers), jax.nn.softmax(integers))
    with pytest.raises(TypeError, match="dtype int32 is not among float16, bfloat16, float32"):
        jax_gpuops.softmax(integers, implementation=implementation)
    x, b = jnp.ones(4), jnp.arange(4.0)
    np.testing.assert_array_equal(jax_gpuops.logsumexp(x, b=b), jax.nn.logsumexp(x, b=b))
    with pytest.raises(ValueError, match="neither b nor return_sign"):
        jax_gpuops.logsumexp(x, b=b, implementation=implementation)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x, i: jax_gpuops.softmax(x, 2, implementation=i), ValueError, "axis 2 is out of"),
        (lambda x, i: jax_gpuops.softmax(x, "a", implementation=i), TypeError, "axis must be"),
        (lambda x, i: jax_gpuops.softmax(x, (0, 0), implementation=i), ValueError, "twice"),
        (lambda x, i: jax_gpuops.softmax(1.0, implementation=i), ValueError, "axis -1 is out of"),
        (lambda x, i: jax_gpuops.softmax([1.0], implementation=i), TypeError, "x must be an array"),
        (
            lambda x, i: jax_gpuops.softmax(x, implementation=i, algorithm="fast"),
            ValueError,
            "'fast' is unknown; known are baseline",
        ),
        (
            lambda x, i: jax_gpuops.softmax(
                jnp.zeros((2, 4000)), implementation=i, algorithm="warp"
            ),
            ValueError,
            "'warp' takes rows of at most 2048 float32 elements, not 4000",
        ),
        (
            lambda x, i: jax_gpuops.logsumexp(x, implementation=i, algorithm="baseline"),
            ValueError,
            "'baseline' computes softmax only",
        ),
        (
            lambda x, i: jax_gpuops.softmax(
                jnp.zeros((1, 60000)), implementation=i, algorithm="block_shared"
            ),
            ValueError,
            "cannot hold rows of 60000 float32 elements",
        ),
        (
            lambda x, i: jax_gpuops.softmax(x, where=jnp.ones((3, 3), bool), implementation=i),
            ValueError,
            "ncompatible shapes|does not broadcast",
        ),
        (lambda x, i: jax_gpuops.softmax(x, implementation="gpu"), ValueError, "got 'gpu'"),
        (
            lambda x, i: jax_gpuops.softmax(x, implementation="xla", algorithm="warp"),
            ValueError,
            "implementation is 'xla'",
        ),
        (lambda x, i: jax_gpuops.softmax(x, algorithm=3), TypeError, "algorithm must be None or a"),
    ],
)
def test_bad_input_is_named_at_trace_time(call, error, text, implementation):
    with pytest.raises(error, match=text):
        jax.jit(lambda x: call(x, implementation)).trace(jnp.zeros((2, 3)))
