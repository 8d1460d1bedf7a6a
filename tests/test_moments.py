"""var, std and mean_and_var against extended precision and against JAX."""

import functools
import inspect
import re

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_reduce
from jax.test_util import check_grads
from test_plan import planned_sum

import jax_gpuops

FUNCTIONS = ("var", "std")
ALGORITHMS = [a.name for a in jax_gpuops.algorithms("reduce") if not a.limits.startswith("sum,")]
MASKING = test_reduce.MASKING

_the_machine_has_the_algorithm = test_reduce._the_machine_has_the_algorithm


def mean_and_var(x, axis=None, **how):
    return jax_gpuops.mean_and_var(x, axis, **how)


def ours(name, x, axis=None, **keywords):
    return getattr(jax_gpuops, name)(x, axis, **keywords)


def upstream(name, x, axis=None, **keywords):
    return getattr(jnp, name)(x, axis, **keywords)


def at_axis(algorithm, shape, dtype="float32"):
    """A shape of rows along the last axis, or of such as the algorithm takes, and their axis."""
    rows, columns = shape
    each = helpers.np_dtype(dtype).itemsize
    if algorithm == "staged":
        return (rows, min(columns, 1024 // each)), -1
    if algorithm == "held":
        columns += columns % 2 if dtype == "float64" else 0  # whole packs
        return (rows, min(columns, (1 << 16) // each)), -1
    return ((*shape, 3), -2) if algorithm in ("column", "interleaved") else (shape, -1)


def with_rows(algorithm, x):
    """An array with these rows, several times where they lie apart, and their axis."""
    shape, axis = at_axis(algorithm, x.shape, x.dtype.name)
    x = x[:, : shape[1]]
    x = np.broadcast_to(x[..., None], shape) if len(shape) == 3 else x
    return np.ascontiguousarray(x), axis


def assert_right(results, x, axis, where=True):
    """Checks mean and variance against the contract: the error of the variance is relative to it,
    however far the elements are from 0. Of rows without elements both are NaN."""
    mean, variance = map(np.asarray, results)
    where = np.broadcast_to(where, x.shape)
    count = where.sum(axis)
    x = np.where(where, helpers.exact(x), 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        middle = x.sum(axis, keepdims=True) / np.expand_dims(count, axis)
        distance = np.where(where, x - middle, 0)
        rest = distance.sum(axis) / count
        true_mean = np.squeeze(middle, axis) + rest
        true = (distance**2).sum(axis) / count - rest**2
        magnitude = np.abs(x).sum(axis) / count
    assert (mean.dtype, mean.shape) == (variance.dtype, variance.shape)
    assert mean.shape == true.shape
    eps = np.finfo(np.float64 if mean.dtype.itemsize == 8 else np.float32).eps
    terms = np.log2(np.maximum(count, 2))
    bounds = 2 * terms * eps * magnitude, (4 + terms) * eps * true
    for y, expected, bound in zip((mean, variance), (true_mean, true), bounds, strict=True):
        if y.dtype.itemsize == 2:
            bound = bound + helpers.spacing(expected, y.dtype)
        assert np.all(np.isnan(y) == (count == 0))
        some = count > 0
        assert np.all(np.abs(helpers.exact(y) - expected)[some] <= bound[some])


def assert_each_right(xs, axis, **how):
    """Calls mean_and_var for each of `xs`, in one program: compiling takes most of the time."""
    with helpers.x64(xs[0].dtype.name):
        results = jax.jit(lambda xs: [mean_and_var(x, axis, **how) for x in xs])(xs)
        for x, result in zip(xs, results, strict=True):
            assert_right(result, x, axis)


# Values


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm(algorithm, dtype, implementation):
    shapes = [(3, 1), (2, 2), (3, 33), (2, 257), (1, 4096), (1, 40000)]
    xs = [helpers.normal(at_axis(algorithm, shape, dtype)[0], dtype) for shape in shapes]
    axis = at_axis(algorithm, (1, 1))[1]
    assert_each_right(xs, axis, implementation=implementation, algorithm=algorithm)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
def test_rows_whose_elements_lie_apart(dtype, implementation):
    """Few and many columns, inner sizes with and without packs, one block and several per row."""
    shapes = [(1, 2, 3), (2, 3, 1), (2, 600, 3), (3, 5, 260), (1, 3000, 33), (2, 1100, 64)]
    xs = [helpers.normal(shape, dtype) for shape in shapes]
    assert_each_right(xs, 1, implementation=implementation, algorithm="column")


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
def test_few_columns_of_many_rows_are_read_in_packs(dtype, implementation):
    """By column_kernel, since threads would have a common origin for too few columns."""
    x = helpers.normal((130, 264 * helpers.multiprocessors(implementation)), dtype)
    x[3, 1::7] *= 100
    x[::2, 5] = 0
    with helpers.recorded(implementation) as executions:
        assert_each_right([x], 0, implementation=implementation, algorithm="column")
    for each in executions:
        assert each["config"]["pack"] > 1
        assert each["config"]["column_kernel"] == "column"


WIDE = {"float16": "float32", "bfloat16": "float32"}

# As test_reduce.DIVIDED, of moments_column_kernel: in single elements and in packs, which are one,
# two and three lanes of a block; with fewer results than blocks.
DIVIDED = [(3, 1100, 33), (1, 9000, 3), (1, 9000, 8), (2, 8000, 24)]


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("algorithm", ["column", "interleaved"])
def test_columns_that_a_cluster_divides(algorithm, dtype, implementation):
    """Between blocks that have no elements, no results, or neither."""
    xs = [helpers.normal(shape, dtype) for shape in test_reduce.divided(algorithm, dtype)]
    how = {"implementation": implementation, "algorithm": algorithm}
    with helpers.recorded(implementation) as executions:
        if algorithm == "column":
            assert_each_right([helpers.normal(shape, dtype) for shape in DIVIDED], 1, **how)
        else:
            assert_each_right(xs, 1, **how)
        if algorithm == "column":
            masks = [np.random.default_rng(0).random(x.shape) < 0.5 for x in xs]
            for x, where in zip(xs, masks, strict=True):
                where[:, 200:, :3] = False
                where[-1, :, -1] = False
                with helpers.x64(dtype):
                    assert_right(mean_and_var(x, 1, where=where, **how), x, 1, where)
    test_reduce.assert_by_clusters(executions, implementation)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("shape", [(700, 40), (700, 33), (6000, 16), (2, 3, 64), (5, 300, 128)])
def test_columns_whose_distances_are_measured_again(shape, dtype, implementation):
    """Since the elements that are loaded first are far from their mean, or since a sum overflows.
    Other rows of the packs and the block get the bits that they have among rows that are not."""
    axis = len(shape) - 2
    x = np.array(3 + helpers.normal(shape, dtype)).astype(dtype)
    rows = np.arange(shape[-1]) % 3 == 0
    largest = float(np.finfo(helpers.np_dtype(dtype)).max) if dtype != "bfloat16" else 3e38
    far = x.copy()
    first = far[..., :4, :]
    first[..., rows] = (1e4 * np.ones(first.shape)).astype(dtype)[..., rows]
    far[..., 1, 0] = np.nan
    far[..., 0, 3] = np.inf
    far[..., 0::2, 6] = largest
    far[..., 1::2, 6] = -largest
    with helpers.x64(dtype):
        how = {"implementation": implementation, "algorithm": "column"}
        call = functools.partial(mean_and_var, dtype=WIDE.get(dtype, dtype), **how)
        results = call(x, axis)
        assert_right(results, x, axis)
        of_far = call(far, axis)
        for y, other in zip(results, of_far, strict=True):
            np.testing.assert_array_equal(np.asarray(y)[..., ~rows], np.asarray(other)[..., ~rows])
        assert_right([y[..., 9:] for y in of_far], far[..., 9:], axis)
    mean, variance = map(np.asarray, of_far)
    assert np.all(np.isnan(mean[..., 0]) & np.isnan(variance[..., 0]) & np.isnan(variance[..., 3]))
    np.testing.assert_array_equal(mean[..., 3], np.inf)
    true = helpers.exact(far[..., 6]).mean(axis)
    np.testing.assert_allclose(mean[..., 6], true, rtol=0, atol=1e-5 * largest)


@pytest.mark.kernel
@pytest.mark.parametrize("shape", [(40, 33), (60, 64), (3000, 64), (100000, 24)])
@pytest.mark.parametrize(
    ("dtype", "offset"), [("float32", 1e3), ("float32", -1e6), ("float64", 1e14)]
)
def test_columns_far_from_zero(shape, dtype, offset, implementation):
    """Which a thread has in single elements and in packs, with other blocks and without."""
    x = (offset + helpers.normal(shape, "float64")).astype(dtype)
    assert_each_right([x], 0, implementation=implementation, algorithm="column")


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_long_columns_of_elements_with_few_digits(dtype, implementation):
    """Such as zeros: all distances have the low-order digits of the origin, which each addition to
    a large sum would round in the same direction. On the host a thread has about 1000 elements."""
    x = np.array(helpers.normal((1 << 15, 520), "float32"))
    x[np.random.default_rng(1).random(x.shape) < 0.95] = 0
    x = x.astype(helpers.np_dtype(dtype))
    how = {"implementation": implementation, "algorithm": "column"}
    assert_right(mean_and_var(x, 0, dtype="float32", **how), x, 0)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rows_that_start_at_any_phase(algorithm, dtype, implementation):
    offsets = (1, 2, 4, 7, 8, 15)
    shapes = [at_axis(algorithm, (9, n + offset), dtype)[0] for offset in offsets for n in (0, 64)]
    xs = [helpers.normal(shape, dtype) for shape in shapes]
    axis = at_axis(algorithm, (1, 1))[1]
    assert_each_right(xs, axis, implementation=implementation, algorithm=algorithm)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
def test_rows_that_registers_hold(dtype, implementation):
    """Of a thread, of a part of a warp, a warp, several and a block; without packs for all lanes,
    of one pack for each and of as many as a thread holds; in blocks that are full and not."""
    pack = 16 // helpers.np_dtype(dtype).itemsize
    packs = [(1, 1), (700, 2), (33, 3), (9, 17), (9, 31), (70, 33), (5, 128), (3, 129), (21, 160)]
    packs += [(2, 1000), (1, 4096)]
    xs = [3 + helpers.normal((rows, pack * n), dtype) for rows, n in packs]
    assert_each_right(xs, -1, implementation=implementation, algorithm="held")


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rows_of_no_whole_packs_that_registers_hold(dtype, implementation):
    """Read by elements, and by packs between edges of every length."""
    pack = 16 // helpers.np_dtype(dtype).itemsize
    # Of up to 64 elements, so many rows that they are not read by elements.
    least = 400_000 if implementation == "cuda" else 1 << 13
    shapes = [(1, 1), (700, 3), (33, 7), (33, 9), (100, 17), (50, 33), (7, 63)]
    shapes += [(least // n + 1, n) for n in (2 * pack - 1, 2 * pack + 1, 33)]
    shapes += [(9, 100), (7, 129), (20, 16 * 33), (5, pack * 129 + 1), (3, pack * 300 + 2)]
    shapes += [(2, pack * 1021 - 3), (1, pack * 4096 - 1)]
    xs = [3 + helpers.normal(shape, dtype) for shape in shapes]
    assert_each_right(xs, -1, implementation=implementation, algorithm="held")


@pytest.mark.kernel
@pytest.mark.parametrize("columns", [5, 48, 63, 128, 197, 640, 2304, 2305])
def test_held_rows_that_are_summed_again(columns, implementation):
    """Since the elements from which they are measured first are far from their means. Other rows of
    the warp and the block get the bits that they have among rows that are not."""
    x = np.array(helpers.normal((40, columns), "float32"))
    rows = np.arange(40) % 3 == 0
    call = functools.partial(mean_and_var, implementation=implementation, algorithm="held")
    results = call(x, -1)
    assert_right(results, x, -1)
    for period in (4, 12, 16, 32):  # each for rows of other lengths
        far = x.copy()
        far[rows] += np.where(np.arange(columns) % period < period // 4, np.float32(1e5), 0)
        far[0, 0] = np.nan
        of_far = call(far, -1)
        for y, other in zip(results, of_far, strict=True):
            np.testing.assert_array_equal(np.asarray(y)[~rows], np.asarray(other)[~rows])
        assert_right([y[1:] for y in of_far], far[1:], -1)


@pytest.mark.any_version
def test_any_order_of_warps_that_hold_rows(implementation):
    """Some of which are summed again, by warps that wait for those of the other rows."""
    if implementation != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    x = np.array(helpers.normal((16, 640), "float32"))
    x[3, np.arange(640) % 32 < 8] += 1e5

    def moments():
        return jnp.stack(mean_and_var(x, -1, implementation=implementation, algorithm="held"))

    held_back = [{"warp": warp} for warp in (0, 1, 7)] + [{}, {}]
    assert_right(helpers.under_each_schedule(moments, list(enumerate(held_back, 1))), x, -1)


@pytest.mark.any_version
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("dtype", "offset"), [("float32", 1e3), ("float32", -1e6), ("float64", 1e14)]
)
def test_far_from_zero(algorithm, dtype, offset, implementation):
    """Where a mean that is off by half a digit alone would change the variance by percents."""
    rows = [at_axis(algorithm, shape, dtype) for shape in [(20, 100), (3, 5000), (1, 100000)]]
    xs = [(offset + helpers.normal(shape, "float64")).astype(dtype) for shape, _ in rows]
    assert_each_right(xs, rows[0][1], implementation=implementation, algorithm=algorithm)


@pytest.mark.parametrize("offset", [0, 1e3, 1e5, 1e6])
def test_no_less_exact_than_xla(offset, implementation):
    """Of rows close to 0, where XLA has errors of about 1.5 eps, as exact but for the last bit."""
    x = (offset + helpers.normal((200, 3000), "float64")).astype(np.float32)
    true = helpers.exact(x).var(-1)

    def error(y):
        return np.max(np.abs(helpers.exact(y) - true) / true) / np.finfo(np.float32).eps

    xla = error(jnp.var(x, -1))
    assert error(ours("var", x, -1, implementation=implementation)) <= max(xla, 2.5)
    if offset >= 1e5:
        assert xla > 100


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_element_far_from_all_others(algorithm, implementation):
    """Wherever it is: at the start of a thread's elements all others are measured from it."""
    places = [0, 1, 5, 4000, 9000, 9999]
    x = np.array(helpers.normal((2 * len(places), 10000), "float32"))
    for row, place in enumerate(places):
        x[row, place] = 1e6
        x[row + len(places), place] = -1e18
    x, axis = with_rows(algorithm, x)
    result = mean_and_var(x, axis, implementation=implementation, algorithm=algorithm)
    assert_right(result, x, axis)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rows_that_rise_and_rows_of_two_levels(algorithm, implementation):
    """Threads and blocks then have unlike means: the variance is between them."""
    along = np.arange(60000, dtype=np.float64)
    for row in (1e-3 * along, 7e4 + (along > 200), (along % 2) * 1e4 + 1e-3 * along):
        x, axis = with_rows(algorithm, row[None].astype(np.float32))
        result = mean_and_var(x, axis, implementation=implementation, algorithm=algorithm)
        assert_right(result, x, axis)


@pytest.mark.any_version
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("value", [0.0, 0.1, -3e38, 1e-40, 16777216.0])
def test_equal_elements_have_no_variance(algorithm, value, implementation):
    shape, axis = at_axis(algorithm, (2, 30001))
    x = np.full(shape, value, np.float32)
    mean, variance = mean_and_var(x, axis, implementation=implementation, algorithm=algorithm)
    np.testing.assert_array_equal(mean, np.float32(value))
    np.testing.assert_array_equal(variance, 0)


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1e-12, 1e12, 1e17])
def test_large_and_small_elements(scale, implementation):
    x = helpers.normal((5, 700), "float64").astype(np.float32) * np.float32(scale)
    mean, variance = mean_and_var(x, -1, implementation=implementation)
    true = helpers.exact(x).var(-1)
    if scale >= 1e-18:
        assert_right((mean, variance), x, -1)
    else:  # squares are below the least float, as they are in JAX
        np.testing.assert_array_equal(variance, 0)
        assert np.all(true < 1e-45)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_squares_that_overflow(algorithm, implementation):
    """The variance is infinite, as in JAX; the mean is right, where a sum would overflow too."""
    shape, axis = at_axis(algorithm, (2, 9000))
    x = helpers.normal(shape, "float64") * 3e37
    x = np.clip(x, -3.4e38, 3.4e38).astype(np.float32)
    x[0] = np.abs(x[0])
    mean, variance = mean_and_var(x, axis, implementation=implementation, algorithm=algorithm)
    np.testing.assert_array_equal(variance, np.inf)
    true = helpers.exact(x).mean(axis)
    np.testing.assert_allclose(mean, true, rtol=0, atol=1e-5 * np.abs(helpers.exact(x)).max())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_squares_that_overflow_little_by_little(algorithm, implementation):
    """Of a thread with many chunks: no square overflows, but their sum does. The thread then moves
    its origin on."""
    x = np.zeros((1, 65536), np.float32)
    x[:, 4096:] = 4.5e18
    x, axis = with_rows(algorithm, x)
    mean, variance = mean_and_var(x, axis, implementation=implementation, algorithm=algorithm)
    true = helpers.exact(x)
    np.testing.assert_allclose(mean, true.mean(axis), rtol=1e-5)
    overflows = x.shape[axis] * true.var(axis) > np.finfo(np.float32).max
    np.testing.assert_array_equal(np.isinf(variance), overflows)
    assert not np.any(np.isnan(variance))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_infinities_and_nan_wherever_they_are(algorithm, implementation):
    """The mean is what a sum of them is; then the variance is NaN."""
    specials = [np.nan, np.inf, -np.inf]
    places = [0, 256, 1000]
    x = np.array(helpers.normal((2 * 9 + 2, 1001), "float32"))
    for i in range(9):
        x[2 * i, places[i % 3]] = specials[i // 3]
    x[-2, [3, 900]] = np.inf, -np.inf
    x[-1, [3, 900]] = np.inf
    x, axis = with_rows(algorithm, x)
    mean, variance = mean_and_var(x, axis, implementation=implementation, algorithm=algorithm)
    np.testing.assert_allclose(mean, x.mean(axis), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(variance, jnp.var(x, axis), rtol=1e-5)
    assert np.all(np.isnan(variance) == ~np.isfinite(x).all(axis))


@pytest.mark.any_version
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_long_rows_stay_accurate(algorithm, implementation):
    """Equal squares, whose rounding errors all have one sign: a plain sum of 1024 is off by 96 eps.
    In a block of 512 threads each has so many chunks of 16 elements."""
    x, axis = with_rows(algorithm, np.tile(np.array([0, 0.3], np.float32), (1, 1 << 22)))
    x = x[..., :1] if algorithm == "column" else x
    assert_right(mean_and_var(x, axis, implementation=implementation, algorithm=algorithm), x, axis)


@pytest.mark.any_version
@pytest.mark.parametrize("shape", [(1, 1 << 25), (1 << 25, 1)])
def test_more_elements_than_a_float_can_count(shape, implementation):
    """2^24 + 1 is no float32: a count of ones stops there."""
    x = jnp.arange(1 << 25).reshape(shape) % 2 * 2
    axis = int(shape[0] == 1)
    results = mean_and_var(
        x.astype(jnp.bfloat16), axis, dtype=jnp.float32, implementation=implementation
    )
    np.testing.assert_allclose(results, np.ones((2, 1)), rtol=1e-6)


@pytest.mark.any_version
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_repeats_are_bit_identical(algorithm, implementation):
    shape, axis = at_axis(algorithm, (3, 33333))
    x = helpers.normal(shape, "float32", scale=5)
    runs = [
        np.asarray(mean_and_var(x, axis, implementation=implementation, algorithm=algorithm))
        for _ in range(3)
    ]
    np.testing.assert_array_equal(runs[0].view(np.int32), runs[1].view(np.int32))
    np.testing.assert_array_equal(runs[0].view(np.int32), runs[2].view(np.int32))


@pytest.mark.kernel
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_any_order_of_threads(algorithm, implementation):
    """A missing barrier gives other numbers under some order of the threads."""
    if implementation != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    shape, axis = at_axis(algorithm, (3, 9000))
    x = helpers.normal(shape, "float32")
    y = helpers.under_each_schedule(
        lambda: jnp.stack(
            mean_and_var(x, axis, implementation=implementation, algorithm=algorithm)
        ),
        [(seed, {}) for seed in range(1, 5)],
    )
    assert_right(y, x, axis)


# Masks


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("algorithm", MASKING)
def test_masks(algorithm, dtype, implementation):
    """Masks of all elements, of rows, of columns and of some dims; the kernel reads them itself."""
    shape, axis = test_reduce.SHAPE_AND_AXIS_OF_MASKS[algorithm]
    x = helpers.normal(shape, dtype)
    rng = np.random.default_rng(2)
    own = [shape, *([n if d != e else 1 for d, n in enumerate(shape)] for e in range(4))]
    own += [[1, 1, 1, shape[3]], [shape[0], 1, shape[2], 1]]
    masks = [rng.random(each) < 0.6 for each in own]
    masks.append(rng.random(shape) < 0.01)  # whole packs are left out
    call = functools.partial(
        mean_and_var, axis=axis, implementation=implementation, algorithm=algorithm
    )
    with helpers.x64(dtype):
        dirty = jnp.where(masks[0], x, np.nan).astype(x.dtype)  # what is masked is not read
        program = jax.jit(
            lambda x, masks, dirty: [
                *(call(x, where=where) for where in masks),
                call(dirty, where=masks[0]),
            ]
        )
        program = program.lower(x, masks, dirty).compile()
        calls = [each.split("{")[0] for each in helpers.custom_calls_of(program)]
        assert calls == ["jax_gpuops_mean_and_var_v1"] * (len(masks) + 1)
        *results, of_dirty = program(x, masks, dirty)
        np.testing.assert_array_equal(of_dirty, results[0])
    for result, where in zip(results, masks, strict=True):
        assert_right(result, x, axis, where)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_of_few_elements(name, implementation):
    """Of none, of one and of two elements, and fewer than the correction."""
    x = helpers.normal((4, 40), "float32")
    where = np.arange(40) < np.array([[0], [1], [2], [40]])
    for correction in (0, 1, 2, 0.5, -1):
        how = {"where": where, "correction": correction}
        y = ours(name, x, -1, **how, implementation=implementation)
        np.testing.assert_allclose(y, upstream(name, x, -1, **how), rtol=1e-5)


# Arguments


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signature_is_upstream_s_and_three_more(name):
    mine = list(inspect.signature(getattr(jax_gpuops, name)).parameters.values())
    theirs = list(inspect.signature(getattr(jnp, name)).parameters.values())
    assert [(p.name, p.default, p.kind) for p in mine[:-3]] == [
        (p.name, p.default, p.kind) for p in theirs
    ]
    assert [(p.name, p.default) for p in mine[-3:]] == [
        ("batch_invariant", False),
        ("implementation", None),
        ("algorithm", None),
    ]
    assert all(p.kind is p.KEYWORD_ONLY for p in mine[-3:])


ARGUMENTS = [
    {},
    {"axis": 0},
    {"axis": (0, 2)},
    {"axis": (1, -1), "keepdims": True},
    {"axis": None, "keepdims": True},
    {"axis": 1, "ddof": 1},
    {"axis": 1, "ddof": 6},
    {"axis": 1, "ddof": 7},
    {"axis": -1, "correction": 1.5},
    {"axis": -1, "correction": np.float32(2)},
    {"axis": -1, "ddof": np.True_},
    {"axis": -1, "where": np.arange(6) % 2 == 0},
    {"axis": 1, "where": np.arange(4)[:, None, None] != 2},
    {"axis": 0, "dtype": "float32"},
    {"axis": 0, "dtype": "float16"},
    {"axis": 0, "dtype": "bfloat16"},
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_arguments_mean_what_they_mean_upstream(dtype, implementation):
    x = helpers.normal((4, 6, 6), dtype)

    def results(function, **how):
        return jax.jit(lambda x: [function(x, **each, **how) for each in ARGUMENTS])(x)

    for name in FUNCTIONS:
        actual = results(functools.partial(ours, name), implementation=implementation)
        expected = results(functools.partial(upstream, name))
        for y, true, arguments in zip(actual, expected, ARGUMENTS, strict=True):
            assert jax.typeof(y) == jax.typeof(true), arguments
            tolerance = 1e-2 if y.dtype.itemsize == 2 else 1e-5
            y, true = (np.asarray(each, np.float32) for each in (y, true))
            np.testing.assert_allclose(y, true, rtol=tolerance, err_msg=str(arguments))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_mean_and_var_is_mean_and_var(dtype, implementation):
    @jax.jit  # one program is compiled faster than many
    def of_each(x):
        pairs = []
        for arguments in ARGUMENTS:
            how = dict(arguments)
            how["correction"] = how.pop("ddof", how.get("correction", 0))
            results = mean_and_var(x, **how, implementation=implementation)
            shared = {k: v for k, v in how.items() if k not in ("correction", "dtype")}
            variance = jnp.var(x, **how)
            # Where dtype says so, jnp.mean computes in 16 bits.
            mean = jnp.mean(x.astype(jnp.float32), **shared).astype(variance.dtype)
            pairs.append((results, (mean, variance)))
        return pairs

    of_all = of_each(helpers.normal((4, 6, 6), dtype))
    for arguments, (results, expected) in zip(ARGUMENTS, of_all, strict=True):
        for y, true in zip(results, expected, strict=True):
            assert jax.typeof(y) == jax.typeof(true), arguments
            tolerance = 1e-2 if y.dtype.itemsize == 2 else 1e-5
            y, true = (np.asarray(each, np.float32) for each in (y, true))
            np.testing.assert_allclose(y, true, rtol=tolerance, atol=1e-6, err_msg=str(arguments))


@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        ("float32", "float64"),
        ("float64", "float32"),
        ("bfloat16", "float64"),
        ("float64", "float16"),
    ],
)
def test_another_dtype_is_that_of_the_computation(dtype, result, implementation):
    x = 1e3 + helpers.normal((3, 500), dtype)
    with jax.enable_x64(True):
        for name in FUNCTIONS:
            y = ours(name, x, -1, dtype=result, implementation=implementation)
            expected = upstream(name, jnp.asarray(x), -1, dtype=result)
            assert y.dtype == expected.dtype == result
            tolerance = {"float16": 2e-3, "float32": 1e-5, "float64": 1e-12}[result]
            np.testing.assert_allclose(y, expected, rtol=tolerance)


def test_float32_of_16_bit_floats_costs_no_conversion(implementation):
    x = jnp.ones((4, 64), jnp.bfloat16)

    def function(x):
        return mean_and_var(x, -1, dtype=jnp.float32, implementation=implementation)

    text = jax.jit(function).lower(x).as_text()
    assert "tensor<4x64xf32>" not in text
    assert len(helpers.custom_calls(function, x)) == 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_types_are_upstream_s(name, implementation):
    """Weak types too: they decide what later arithmetic promotes to."""
    for x in (jnp.full((2, 3), 1.0), jnp.zeros((2, 3), jnp.bfloat16)):
        for axis in (0, 1, None):
            actual = jax.typeof(ours(name, x, axis, implementation=implementation))
            expected = jax.typeof(upstream(name, x, axis))
            assert actual == expected
            assert actual.weak_type == expected.weak_type


@pytest.mark.filterwarnings("ignore:Degrees of freedom")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 4)], ids=str)
def test_empty_arrays_as_in_jax(name, shape, implementation):
    x = jnp.zeros(shape)
    for axis in (*range(len(shape)), None, ()):
        y = ours(name, x, axis, implementation=implementation)
        np.testing.assert_array_equal(y, upstream(name, x, axis))


XLA_TAKES = {
    "integers": ({"x": np.arange(12).reshape(3, 4)}, TypeError, "dtype int32, only float16"),
    "complex": ({"x": np.ones((3, 4), "complex64")}, TypeError, "dtype complex64, only float16"),
    "8 bits": ({"x": jnp.ones((3, 4), "float8_e4m3fn")}, TypeError, "dtype float8_e4m3fn, only"),
    "result": ({"dtype": "complex64"}, TypeError, "dtype complex64, only float16"),
    "integer result": ({"dtype": "int32"}, TypeError, "dtype int32, only float16"),
    "mean": ({"mean": np.ones((3, 1), "float32")}, ValueError, "mean is given"),
    "ddof": ({"ddof": np.ones((3,), "float32")}, TypeError, "ddof is an array"),
    "correction": ({"correction": jnp.ones((3,))}, TypeError, "correction is an array"),
}


@pytest.mark.parametrize("case", XLA_TAKES)
def test_what_kernels_do_not_take_goes_to_xla(case, implementation):
    arguments, error, text = XLA_TAKES[case]
    arguments = {"x": helpers.normal((3, 4), "float32"), "axis": -1, **arguments}
    expected = upstream("var", **arguments)
    np.testing.assert_array_equal(ours("var", **arguments), expected)
    with jax_gpuops.use(implementation, strict=False):
        np.testing.assert_array_equal(ours("var", **arguments), expected)
    with pytest.raises(error, match=text):
        ours("var", **arguments, implementation=implementation)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda x, i: jax_gpuops.var(x, 2, implementation=i),
            ValueError,
            "axis 2 is out of",
        ),
        (
            lambda x, i: jax_gpuops.std(x, (0, 0), implementation=i),
            ValueError,
            "dimension twice",
        ),
        (lambda x, i: jax_gpuops.var([1.0], implementation=i), TypeError, "a must be an array"),
        (lambda x, i: jax_gpuops.var(x, out=x, implementation=i), NotImplementedError, "'out'"),
        (
            lambda x, i: jax_gpuops.var(x, ddof=1, correction=1, implementation=i),
            ValueError,
            "can't be provided simultaneously",
        ),
        (
            lambda x, i: jax_gpuops.std(x, ddof=None, implementation=i),
            TypeError,
            "ddof must be a number or an array, got NoneType: None",
        ),
        (
            lambda x, i: jax_gpuops.var(x, ddof="1", implementation=i),
            TypeError,
            "ddof must be a number or an array, got str: '1'",
        ),
        (
            lambda x, i: jax_gpuops.mean_and_var(x, correction=[1], implementation=i),
            TypeError,
            r"correction must be a number or an array, got list: \[1\]",
        ),
        (
            lambda x, i: jax_gpuops.mean_and_var(x, where=x, implementation=i),
            ValueError,
            "where must be None or a boolean array",
        ),
        (
            lambda x, i: jax_gpuops.std(x, dtype="int32", implementation=i),
            ValueError,
            "must be inexact",
        ),
        (
            lambda x, i: jax_gpuops.var(x, implementation=i, algorithm="fast"),
            ValueError,
            "'fast' is unknown; known are naive",
        ),
        (
            lambda x, i: jax_gpuops.var(x, 1, implementation=i, algorithm="naive"),
            ValueError,
            "'naive' computes only sum, prod, max and min",
        ),
        (
            lambda x, i: jax_gpuops.var(x, 0, implementation=i, algorithm="row"),
            ValueError,
            "their elements are 3 elements apart; 'column' supports these",
        ),
    ],
)
def test_bad_input_is_named_at_trace_time(call, error, text, implementation):
    with pytest.raises(error, match=text):
        jax.jit(lambda x: call(x, implementation)).trace(jnp.zeros((2, 3)))


# Transformations


@pytest.mark.parametrize("shape_axis", [((4, 8), -1), ((4, 8), 0), ((100000,), None)], ids=str)
@pytest.mark.parametrize("name", [*FUNCTIONS, "mean_and_var"])
def test_one_custom_call_is_in_the_program(name, shape_axis, implementation):
    """Of a gradient too, which reads what the forward pass has left."""
    shape, axis = shape_axis

    def function(x):
        return ours(name, x, axis, implementation=implementation)

    def gradient(x):
        return jax.grad(lambda x: sum(jnp.sum(y) for y in jax.tree.leaves(function(x))))(x)

    for each in (function, gradient):
        calls = helpers.custom_calls(each, jnp.zeros(shape))
        assert len(calls) == 1
        assert calls[0].startswith("jax_gpuops_mean_and_var_v1")


def test_another_axis_costs_no_copy(implementation):
    def function(x):
        return mean_and_var(x, axis=1, implementation=implementation)

    text = jax.jit(function).lower(jnp.zeros((4, 128, 64))).compile().as_text()
    assert "operand_layout_constraints={f32[4,64,128]{1,2,0}}" in text
    if implementation == "cuda":  # XLA:CPU copies all the same
        assert " copy(" not in text
        assert " transpose(" not in text


APART = {
    "longer rows": ((3, 4, 5, 6), (0, 2, 3)),
    "more rows": ((70, 4, 3), (0, 2)),
    "groups": ((2, 4, 4, 3, 5), (1, 2, 4)),
    "three runs": ((3, 2, 4, 2, 5), (0, 2, 4)),
    "one element": ((1, 5, 1), (0, 2)),
}
"""Shapes and axes that lie apart, by what a kernel reduces of them."""


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("offset", [0, 1e6])
def test_axes_that_lie_apart(dtype, offset, implementation):
    """The means of the runs differ by less than their rounding, and it is not seen."""
    offset = offset if helpers.np_dtype(dtype).itemsize > 2 else min(offset, 100)
    with helpers.x64(dtype):
        for shape, axes in APART.values():
            x = (offset + helpers.normal(shape, "float64")).astype(helpers.np_dtype(dtype))
            result = mean_and_var(x, axes, implementation=implementation)
            assert_right(result, x, axes)


def test_unlike_runs(implementation):
    """Of means that are far from each other, and of squares that all lie in one run."""
    x = helpers.normal((4, 3, 50), "float32")
    x[:, 0] += 1e4 * np.arange(4)[:, None]
    x[1:, 1] = 0
    x[:, 2] = 7
    assert_right(mean_and_var(x, (0, 2), implementation=implementation), x, (0, 2))


def test_infinities_and_nan_in_one_run(implementation):
    x = helpers.normal((3, 5, 40), "float32")
    x[0, 0, 3] = np.nan
    x[1, 1, 3] = np.inf
    x[0, 2, 3] = -np.inf
    x[:2, 3, 3] = np.inf, -np.inf
    x[:, 4] = np.array([3e38, -3e38, 3e38])[:, None]
    mean, variance = mean_and_var(x, (0, 2), implementation=implementation)
    true = helpers.exact(x).mean((0, 2))
    np.testing.assert_allclose(mean, true, rtol=1e-6)
    np.testing.assert_array_equal(variance, [np.nan] * 4 + [np.inf])


@pytest.mark.parametrize("axis", [(0, 2, 3), (1, 3)])
def test_axes_that_lie_apart_cost_no_copy(axis, implementation):
    """A kernel reduces the longest run of them, of which the moments are left."""

    def function(x):
        return mean_and_var(x, axis, implementation=implementation)

    program = jax.jit(function).lower(jnp.zeros((3, 4, 5, 6))).compile()
    (call,) = helpers.custom_calls_of(program)
    assert call.startswith("jax_gpuops_moments_v1")
    assert not re.search(r"f32\[\d+,\d+,\d+,\d+\]\S* (transpose|copy)\(", program.as_text())


@pytest.mark.parametrize("how", [{"algorithm": "row"}, {"where": np.arange(6) != 2}], ids=str)
def test_axes_that_lie_apart_as_named_rows_and_with_a_mask(how, implementation):
    x = helpers.normal((3, 4, 5, 6), "float32")
    result = mean_and_var(x, (0, 2, 3), implementation=implementation, **how)
    assert_right(result, x, (0, 2, 3), how.get("where", True))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("correction", [0, 1, 60])
def test_derivatives_along_axes_that_lie_apart(name, correction, implementation):
    """Also of batches, and for divisors that are not positive."""
    x = 3 + helpers.normal((2, 3, 4, 5), "float32")

    def total(function, how):
        def of_each(x):
            y = function(name, x, (0, 2), correction=correction, **how)
            return jnp.sum(y * jnp.arange(1.0, 4.0))

        return jax.vmap(jax.value_and_grad(of_each), in_axes=3)(x)

    y, gradient = total(ours, {"implementation": implementation})
    expected, expected_gradient = total(upstream, {})
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("in_axis", [0, 2])
@pytest.mark.parametrize("axis", [0, 1, None])
def test_vmap(name, in_axis, axis, implementation):
    x = helpers.normal((4, 6, 8), "float32")
    where = np.random.default_rng(1).random((6, 8) if in_axis == 0 else (4, 6)) < 0.8
    for how in ({"axis": axis}, {"axis": axis, "where": where}):
        function = functools.partial(ours, name, **how, implementation=implementation)
        y = jax.vmap(function, in_axis)(x)
        expected = jax.vmap(functools.partial(upstream, name, **how), in_axis)(x)
        np.testing.assert_allclose(y, expected, rtol=1e-5)


@pytest.mark.any_version
@pytest.mark.parametrize(
    "arguments", [{}, {"correction": 1}, {"where": np.arange(7) != 2}], ids=str
)
def test_derivatives_of_any_order(arguments, implementation):
    x = helpers.normal((3, 7), "float32")
    check_grads(
        lambda x: mean_and_var(x, -1, **arguments, implementation=implementation),
        (x,),
        order=3,
        modes=["fwd", "rev"],
        atol=2e-2,
        rtol=2e-2,
        eps=1e-2,
    )


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "arguments", [{}, {"ddof": 1}, {"where": np.arange(33) % 3 > 0}], ids=["", "ddof", "where"]
)
def test_gradient_as_in_jax(name, dtype, arguments, implementation):
    x = 3 + helpers.normal((5, 33), dtype)
    cotangent = helpers.normal((5,), dtype, seed=1)
    y, pullback = jax.vjp(
        lambda x: ours(name, x, -1, **arguments, implementation=implementation), x
    )
    _, expected = jax.vjp(lambda x: upstream(name, x, -1, **arguments), jnp.asarray(x))
    (gradient,) = pullback(jnp.asarray(cotangent))
    assert gradient.dtype == y.dtype == x.dtype
    np.testing.assert_allclose(
        np.asarray(gradient, np.float32),
        np.asarray(expected(jnp.asarray(cotangent))[0], np.float32),
        rtol=2e-2 if dtype == "bfloat16" else 2e-5,
        atol=2e-3 if dtype == "bfloat16" else 1e-6,
    )


def test_the_gradient_far_from_zero(implementation):
    """2 (x - mean) / n, of which JAX's mean of float32 leaves one digit here."""
    x = (1e6 + helpers.normal((3, 1000), "float64")).astype(np.float32)
    gradient = jax.grad(lambda x: jax_gpuops.var(x, -1, implementation=implementation).sum())(x)
    wide = helpers.exact(x)
    true = 2 * (wide - wide.mean(-1, keepdims=True)) / 1000
    np.testing.assert_allclose(gradient, true, atol=2 * np.spacing(np.float32(1e6)) / 1000)


def test_masked_elements_have_no_gradient(implementation):
    """NaN and infinities too, of which JAX makes NaN."""
    x = helpers.normal((3, 50), "float32")
    where = np.arange(50) % 4 != 1
    dirty = np.where(where, x, [[np.nan], [np.inf], [1.0]]).astype(np.float32)

    def gradient(x):
        function = functools.partial(jax_gpuops.var, implementation=implementation)
        return jax.grad(lambda x: function(x, -1, where=where).sum())(x)

    expected = jax.grad(lambda x: jnp.var(x, -1, where=where).sum())(jnp.asarray(x))
    np.testing.assert_allclose(gradient(dirty), expected, rtol=1e-5, atol=1e-7)
    assert not np.any(np.asarray(gradient(dirty))[:, ~where])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_export_with_symbolic_shapes(name, implementation):
    platform = {"interpret": "cpu"}.get(implementation, implementation)
    rows, columns = jax.export.symbolic_shape("r, c")
    exported = jax.export.export(
        jax.jit(lambda x: ours(name, x, -1, implementation=implementation)),
        platforms=[platform],
        disabled_checks=jax_gpuops.EXPORT_CHECKS,
    )(jax.ShapeDtypeStruct((rows, columns), jnp.float32))
    again = jax.export.deserialize(exported.serialize())
    for shape in [(3, 7), (1, 40000)]:
        x = helpers.normal(shape, "float32")
        np.testing.assert_allclose(again.call(x), upstream(name, x, -1), rtol=1e-5)


@pytest.mark.parametrize("sizes", ["n, 3, 5, 4", "n, 3, h, w", "2, c, 5, 4"])
@pytest.mark.parametrize("named", [True, False])
def test_axes_that_lie_apart_of_symbolic_sizes(sizes, named, implementation):
    """As of a batch norm, along (0, 2, 3) of images whose channels come before their pixels."""
    function = functools.partial(jax_gpuops.mean_and_var, axis=(0, 2, 3))
    with jax_gpuops.use(implementation if named else None):
        exported = jax.export.export(jax.jit(function), disabled_checks=jax_gpuops.EXPORT_CHECKS)(
            jax.ShapeDtypeStruct(jax.export.symbolic_shape(sizes), "float32")
        )
    x = helpers.normal((2, 3, 5, 4), "float32")
    np.testing.assert_allclose(
        exported.call(x), (jnp.mean(x, (0, 2, 3)), jnp.var(x, (0, 2, 3))), rtol=1e-5, atol=1e-6
    )


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("shape", "axis", "algorithm"),
    [
        ((16, 2048), -1, "held"),
        ((64, 197), -1, "held"),
        ((16384, 8192), -1, "held"),
        ((1 << 20, 1280), -1, "held"),
        ((1 << 20, 31), -1, "staged"),
        ((4096, 20000), -1, "row"),
        ((64, 56, 56, 256), (0, 1, 2), "column"),
        ((1 << 20,), None, "multiple"),
    ],
)
@pytest.mark.parametrize("name", [*FUNCTIONS, "mean_and_var"])
def test_plan(name, shape, axis, algorithm, implementation):
    plan = jax_gpuops.plan(name, shape, "float32", axis=axis, implementation=implementation)
    assert plan.algorithm == algorithm


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("dtype", "columns"), [("float32", 678), ("bfloat16", 678), ("float32", 32), ("bfloat16", 64)]
)
def test_plan_of_rows_for_which_row_has_fewer_threads(dtype, columns, implementation):
    """Rows of no whole packs, and of few: in small arrays `held` takes them."""
    for rows, algorithm in ((8, "held"), (1 << 20, "row")):
        plan = jax_gpuops.plan(
            "var", (rows, columns), dtype, axis=-1, implementation=implementation
        )
        assert plan.algorithm == algorithm


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        # Small arrays are read by single elements, others in packs if these fit.
        ((256, 128), "bfloat16", {"pack": 1}),
        ((257, 128), "bfloat16", {"pack": 8, "lanes": 4, "cluster": 1}),
        ((257, 129), "bfloat16", {"pack": 1}),
        ((4096, 8), "bfloat16", {"pack": 1}),
        ((4097, 4), "float32", {"pack": 4, "lanes": 1}),
        # As many blocks as run at a time: 8 of 256 threads, or 4 of 512.
        ((20000, 64), "bfloat16", {"lanes": 4, "cluster": 4, "threads": 256}),
        ((20000, 128), "bfloat16", {"lanes": 4, "cluster": 2, "threads": 256}),
        ((1500, 128), "bfloat16", {"lanes": 4, "cluster": 1, "threads": 512}),
        ((20000, 8192), "bfloat16", {"lanes": 32, "cluster": 1, "threads": 256}),
        # No more depths than leave a thread four columns.
        ((260, 256), "bfloat16", {"lanes": 8, "cluster": 1, "threads": 256}),
        # Few columns, and many long ones, are column_kernel's.
        ((255, 4096), "bfloat16", {"pack": 8, "column_kernel": "column"}),
        ((256, 4096), "bfloat16", {"pack": 8, "column_kernel": "moments_column"}),
        ((65535, 512), "bfloat16", {"pack": 8, "column_kernel": "moments_column"}),
        ((65536, 512), "bfloat16", {"pack": 8, "column_kernel": "column"}),
        ((256, 65535), "bfloat16", {"pack": 1, "column_kernel": "column"}),
        ((256, 65536), "bfloat16", {"pack": 8, "column_kernel": "moments_column"}),
        ((256, 65536), "float32", {"pack": 4, "column_kernel": "column"}),
    ],
    ids=str,
)
def test_plan_of_columns(shape, dtype, expected, implementation):
    if implementation != "interpret":
        pytest.skip("the sizes are for 4 multiprocessors")
    config = planned_sum(implementation, shape, 0, dtype, "mean_and_var", "column")
    assert config | expected == config
    assert config["parts"] == config["cluster"]


@pytest.mark.any_version
def test_arrays_beyond_the_cache_are_read_in_whole_lines(implementation):
    if implementation != "interpret":
        pytest.skip("the sizes are for 4 multiprocessors")
    for columns, lanes, last_threads in ((2**19, 4, 0), (2**19 + 1, 8, 256)):  # 128 MiB, and more
        config = planned_sum(implementation, (columns, 64), 0, "float32", "mean_and_var", "column")
        assert (config["lanes"], config["last_threads"]) == (lanes, last_threads)
