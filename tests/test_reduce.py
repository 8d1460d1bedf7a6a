"""sum, prod, max, min, mean, argmax and argmin against extended precision and against JAX."""

import contextlib
import functools
import inspect
import itertools
import re

import helpers
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jax_gpuops

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = (*helpers.FLOATS, *INTEGERS)
FOLDS = ("sum", "prod", "max", "min")
ARGS = ("argmax", "argmin")
FUNCTIONS = (*FOLDS, "mean", *ARGS)
ALGORITHMS = [a.name for a in jax_gpuops.algorithms("reduce")]
STEPS = ALGORITHMS[:5]  # of the ladder, before its last
PRODUCTION = ALGORITHMS[5:]
MASKING = ["multiple", "row", "cluster", "column"]
TAKEN = [(name, each) for name in FOLDS for each in ALGORITHMS]
TAKEN += [(name, each) for name in ARGS for each in PRODUCTION]


@pytest.fixture(autouse=True)
def _the_machine_has_the_algorithm(request):
    callspec = getattr(request.node, "callspec", None)
    is_named = callspec is not None and callspec.params.get("algorithm") == "cluster"
    if is_named and (why := helpers.refusal("sum", "cluster")):
        pytest.skip(why)


def as_taken(algorithm, x):
    """Rows as an algorithm takes them, short or beside each other in memory, and their axis."""
    if algorithm == "interleaved":
        return np.ascontiguousarray(x.T), 0
    if algorithm == "staged":
        return np.ascontiguousarray(x[:, : 1024 // x.itemsize]), 1
    if algorithm == "held":  # of every dtype
        pack = 16 // x.itemsize
        if x.shape[1] < pack:
            x = np.repeat(x, pack, 1)
        columns = min(x.shape[1] // pack * pack, (1 << 16) // x.itemsize)
        return np.ascontiguousarray(x[:, :columns]), 1
    return x, 1


def ours(name, x, axis=None, **keywords):
    return getattr(jax_gpuops, name)(x, axis, **keywords)


def upstream(name, x, axis=None, **keywords):
    return getattr(jnp, name)(x, axis, **keywords)


def data(shape, dtype: str, seed: int = 0) -> np.ndarray:
    """Numbers on both sides of 0, or of all sizes where the dtype has no sign."""
    dtype = helpers.np_dtype(dtype)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        rng = np.random.default_rng(seed)
        return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    return helpers.normal(shape, dtype.name, seed)


def assert_right(name, actual, x, axis=-1):
    """Checks a result of the default dtype for `x` against the contract for its function."""
    actual = np.asarray(actual)
    expected = jax.eval_shape(lambda x: upstream(name, x, axis), x)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    if name in ("max", "min", *ARGS):
        np.testing.assert_array_equal(actual, getattr(np, name)(helpers.exact(x), axis), name)
        return
    if actual.dtype.kind in "iu":
        exact = getattr(np, name)(x, axis, dtype=actual.dtype)
        np.testing.assert_array_equal(actual, exact, name)
        return
    x = helpers.exact(x)
    count = np.prod(np.take(x.shape, np.array(axis, int))) if axis is not None else x.size
    computed = np.float64 if actual.dtype == np.float64 else np.float32
    epsilon = np.finfo(computed).eps
    if name == "prod":
        exact = x.prod(axis)
        bound = 2 * count * epsilon * np.abs(exact) + np.finfo(computed).tiny
    else:
        exact, magnitude = x.sum(axis), np.abs(x).sum(axis)
        bound = 2 * max(np.log2(count), 1) * epsilon * magnitude
        if name == "mean":
            exact, bound = exact / count, bound / count + epsilon * np.abs(exact / count)
    if actual.dtype.itemsize == 2:
        bound = bound + np.spacing(np.abs(exact).astype(actual.dtype)).astype(np.float64)
    assert np.all(np.abs(helpers.exact(actual) - exact) <= bound), (name, x.shape)


def assert_each_right(names, xs, axis=-1, **how):
    """Calls each function for each of `xs`, in one program: compiling takes most of the time."""
    cases = [(name, i) for name in names for i in range(len(xs))]
    with helpers.x64(xs[0].dtype.name):
        ys = jax.jit(lambda xs: [ours(name, xs[i], axis, **how) for name, i in cases])(xs)
        for (name, i), y in zip(cases, ys, strict=True):
            assert_right(name, y, xs[i], axis)


# Values


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algorithm", PRODUCTION)
def test_every_production_algorithm(algorithm, dtype, implementation):
    """Rows of one element, of one block, and of several."""
    # With these many bytes of a row multiple has three blocks, cluster up to eight, and held the
    # longest rows that it takes.
    row_bytes = {"cluster": 80_000, "held": 1 << 16}.get(algorithm, 40_000)
    several = min(40_000, row_bytes // helpers.np_dtype(dtype).itemsize)
    xs = [as_taken(algorithm, data(shape, dtype)) for shape in [(3, 1), (2, 257), (2, several)]]
    (axis,) = {axis for _, axis in xs}
    xs = [x for x, _ in xs]
    names = [*FOLDS, *ARGS, *(["mean"] if dtype in helpers.FLOATS else [])]
    assert_each_right(names, xs, axis, implementation=implementation, algorithm=algorithm)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algorithm", STEPS)
def test_every_step_of_the_ladder(algorithm, dtype, implementation):
    """Rows around the size of a block's tile, one to three levels of partials."""
    how = {"implementation": implementation, "algorithm": algorithm}
    xs = [data(shape, dtype) for shape in [(3, 1), (2, 513)]]
    assert_each_right([*FOLDS, "mean"], xs, **how)
    if dtype in ("float32", "bfloat16", "int8"):
        assert_each_right(["sum"], [data((2, 66000), dtype)], **how)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8"])
def test_rows_whose_elements_lie_apart(dtype, implementation):
    """Few and many columns, inner sizes with and without packs, one block and several per row."""
    shapes = [(1, 2, 3), (2, 3, 1), (2, 600, 3), (3, 5, 260), (1, 3000, 33), (2, 1100, 64)]
    xs = [data(shape, dtype) for shape in shapes]
    names = "sum", "max", "mean", "argmin"
    assert_each_right(names, xs, 1, implementation=implementation, algorithm="column")


@pytest.mark.any_version
@hypothesis.given(
    draw=st.data(),
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    name=st.sampled_from(FUNCTIONS),
    special=st.sampled_from([None, "inf", "-inf", "nan", "two nans", "all -inf", "ties"]),
)
@hypothesis.settings(max_examples=100, deadline=None)
def test_any_shape_axis_and_value(draw, shape, dtype, name, special, implementation):
    axes = st.integers(-len(shape), len(shape) - 1)
    axis = draw.draw(st.one_of(st.none(), axes))
    if name not in ARGS and draw.draw(st.booleans()):
        axis = tuple({a % len(shape): a for a in draw.draw(st.lists(axes, max_size=3))}.values())
    x = data(shape, dtype, seed=draw.draw(st.integers(0, 99)))
    at = st.integers(0, x.size - 1)
    if special == "ties":
        x[...] = x.flat[0]
    elif dtype in helpers.FLOATS and special is not None:
        if name == "prod":
            x[...] = np.sign(x)  # no part of the product is 0, which times infinity would be NaN
        if special == "all -inf":
            x[...] = -np.inf
        else:
            for _ in range(2 if special == "two nans" else 1):
                x.flat[draw.draw(at)] = float("nan" if special == "two nans" else special)
    with helpers.x64(dtype):
        y = np.asarray(ours(name, x, axis, implementation=implementation))
        if special is None or dtype not in helpers.FLOATS:
            assert_right(name, y, x, axis)
            return
        expected = jax.eval_shape(lambda x: upstream(name, x, axis), x)
    assert (y.dtype, y.shape) == (expected.dtype, expected.shape)
    # The values are numpy's: XLA's max and min on a CPU lose a NaN in some shapes.
    with np.errstate(over="ignore"):
        expected = np.asarray(getattr(np, name)(helpers.exact(x), axis)).astype(y.dtype)
    y, expected = helpers.exact(y), helpers.exact(expected)
    if name in ("sum", "prod", "mean"):
        tolerance = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-4, "float64": 1e-8}[dtype]
        np.testing.assert_allclose(y, expected, rtol=tolerance, atol=tolerance)
    else:  # JAX too promises the first of equal ones, and of several NaN
        np.testing.assert_array_equal(y, expected)


@pytest.mark.any_version
@pytest.mark.parametrize(("name", "algorithm"), [pair for pair in TAKEN if pair[0] != "prod"])
def test_infinities_and_nan_wherever_they_are(name, algorithm, implementation):
    """As numpy has them: XLA's max and min on a CPU lose a NaN in some shapes."""
    specials = [(special, at) for special in (np.nan, np.inf, -np.inf) for at in (0, 253, 1000)]
    x = helpers.normal((2 * len(specials), 1001), "float32")
    for row, (special, at) in enumerate(specials):
        x[2 * row + 1, at] = special
    x, axis = as_taken(algorithm, x)
    y = ours(name, x, axis, implementation=implementation, algorithm=algorithm)
    np.testing.assert_allclose(y, getattr(np, name)(x, axis), rtol=1e-5, atol=1e-4)


@pytest.mark.any_version
@pytest.mark.parametrize("name", ARGS)
@pytest.mark.parametrize("algorithm", PRODUCTION)
@pytest.mark.parametrize("value", [0.0, np.nan, -np.inf, np.inf])
def test_the_first_of_equal_ones(name, algorithm, value, implementation):
    def places(x):
        x, axis = as_taken(algorithm, x)
        return ours(name, x, axis, implementation=implementation, algorithm=algorithm)

    x = np.full((3, 30001), value, np.float32)
    assert np.all(places(x) == 0)
    for first in (1, 3, 250, 20001):
        if first >= as_taken(algorithm, x)[0].size // 3:
            continue
        x[1, :first] = -1 if name == "argmax" else 1
        if value == 0:
            np.testing.assert_array_equal(places(x), [0, first, 0])


@pytest.mark.any_version
@pytest.mark.parametrize("algorithm", [None, *ALGORITHMS])
def test_long_sums_stay_accurate(algorithm, implementation):
    """Equal terms of 0.1, whose rounding errors all have one sign."""
    x, axis = as_taken(algorithm, np.full((2, 1 << 18), 0.1, np.float32))
    exact, terms = helpers.exact(x).sum(axis), x.shape[axis]
    y = ours("sum", x, axis, implementation=implementation, algorithm=algorithm)
    bound = 2 * np.log2(terms) * np.finfo(np.float32).eps * exact
    assert np.all(np.abs(helpers.exact(y) - exact) <= bound)


@pytest.mark.any_version
@pytest.mark.parametrize("axis", [0, 1])
def test_a_thread_may_fold_more_terms_than_a_float_can_count(axis, implementation):
    """2^24 + 1 is no float32: a plain accumulator of ones stops there."""
    shape = (1 << 25, 1) if axis == 0 else (1, 1 << 25)
    x = jnp.ones(shape, jnp.bfloat16)
    y = ours("sum", x, axis, dtype=jnp.float32, implementation=implementation)
    assert float(y[0]) == 1 << 25


def test_subnormal_sums_are_kept(implementation):
    x = np.full((1, 8), 1e-40, np.float32)
    y = np.asarray(ours("sum", x, -1, implementation=implementation))
    np.testing.assert_allclose(y, [8e-40], rtol=1e-4)


@pytest.mark.any_version
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("algorithm", [None, *ALGORITHMS])
def test_a_sum_begins_with_zero(algorithm, dtype, implementation):
    """So a sum of -0.0 is 0.0. Each thread has all elements that it has room for, which leaves no
    place for another 0: rows of a tile of the ladder, and of four packs for each thread."""
    pack = 16 // helpers.np_dtype(dtype).itemsize
    shapes = [(3, 256), (3, 512), (3, 128 * pack), (2, 4096 * pack)]
    xs = [as_taken(algorithm, np.full(shape, -0.0, helpers.np_dtype(dtype))) for shape in shapes]
    how = {"implementation": implementation, "algorithm": algorithm}
    cases = list(itertools.product(range(len(xs)), ("sum", "mean")))
    axes = [axis for _, axis in xs]

    @jax.jit  # one program is compiled faster than eight
    def results(xs):
        return [ours(name, xs[i], axes[i], **how) for i, name in cases]

    with helpers.x64(dtype):
        ys = results([x for x, _ in xs])
    for case, y in zip(cases, map(np.asarray, ys), strict=True):
        assert not np.any(y)
        assert not np.any(np.signbit(y)), case


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("algorithm", ["multiple", "row", "staged", "cluster", "column"])
def test_rows_that_start_at_any_phase(algorithm, dtype, implementation):
    """Row r of an array with n columns starts n * r elements after an aligned address; the last
    one ends where the array does."""
    offsets = (0, 1, 2, 4, 7, 8, 15)
    xs = [data((9, start + n), dtype) for n in offsets for start in (0, 16, 64) if start + n]
    names = "sum", "max", "argmin"
    assert_each_right(names, xs, implementation=implementation, algorithm=algorithm)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32", "int64"])
def test_rows_of_up_to_a_kilobyte_in_shared_memory(dtype, implementation):
    """One tile that is not full, as many as warps have at a time and more; tiles of many rows for
    each lane; rows that begin in the middle of a word, at each bank, and of an even stride."""
    longest = 1024 // helpers.np_dtype(dtype).itemsize
    shapes = [(1, 1), (31, 3), (20000, 2), (33, 33), (700, 77), (300, 10), (400, 20), (65, longest)]
    xs = [data(shape, dtype) for shape in shapes]
    names = "sum", "max", "argmax"
    assert_each_right(names, xs, implementation=implementation, algorithm="staged")


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["max", "min", *ARGS])
@pytest.mark.parametrize("dtype", ["float16", "float32", "int16"])
def test_neighbours_in_the_words_of_short_rows(name, dtype, implementation):
    """16-bit floats are compared in words, which rows of odd lengths share with their neighbours:
    these have the best elements where they meet. NaN, rows of equal and of the worst elements."""
    best = np.inf if name in ("max", "argmax") else -np.inf
    xs = [np.round(data((101, n), dtype)).astype(helpers.np_dtype(dtype)) for n in range(1, 27)]
    for x in xs if dtype != "int16" else ():
        x[::3, 0] = x[::3, -1] = best
        x[1::9] = -best
        x[4::9, x.shape[1] // 2 :] = np.nan
        x[7::27, x.shape[1] // 2] = np.nan
        x[16::27, : x.shape[1] // 2] = -best
    assert_each_right([name], xs, implementation=implementation, algorithm="staged")


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("names", [("prod",), ("sum", "max", "min", *ARGS)], ids=["prod", "others"])
def test_rows_that_registers_hold(names, dtype, implementation):
    """Rows of a thread, of a part of a warp, a warp, several and a block, with the last of them in
    a block that has no more; of one pack for a thread, as many as it holds, and in between."""
    pack = 16 // helpers.np_dtype(dtype).itemsize
    packs = [(1, 1), (700, 2), (33, 3), (9, 31), (70, 33), (5, 128), (3, 129), (2, 1000), (1, 4096)]
    xs = [data((rows, pack * n), dtype) for rows, n in packs if n < 200 or "prod" not in names]
    assert_each_right(names, xs, implementation=implementation, algorithm="held")


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("names", [("prod",), ("sum", "max", "min", *ARGS)], ids=["prod", "others"])
def test_rows_with_edges_that_registers_hold(names, dtype, implementation):
    """From the shortest to the longest ones, that begin and end at every phase, in blocks that are
    full and not; of a warp for each row, of several and of a number that is no power of two."""
    pack = 16 // helpers.np_dtype(dtype).itemsize
    # Of up to 64 elements, so many rows that they are not read by elements.
    least = 400_000 if implementation == "cuda" else 1 << 13
    shapes = [(least // n + 1, n) for n in (2 * pack - 1, 2 * pack + 1, 33)]
    shapes += [(9, 100), (7, 129), (20, 16 * 33)]
    shapes += [(5, pack * 129 + 1), (3, pack * 300 + 2), (2, pack * 1021 - 3)]
    shapes += [(2, pack * 4096 - 1)] if "prod" not in names else []
    xs = [data(shape, dtype) for shape in shapes]
    assert_each_right(names, xs, implementation=implementation, algorithm="held")


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("names", [("prod",), ("sum", "max", "min", *ARGS)], ids=["prod", "others"])
def test_few_elements_that_registers_hold(names, dtype, implementation):
    """Rows of one thread and of up to eight, that begin at any phase."""
    shapes = [(1, 1), (700, 3), (33, 7), (33, 9), (100, 17), (50, 33), (50, 47), (7, 63)]
    xs = [data(shape, dtype) for shape in shapes]
    with helpers.recorded(implementation) as executions:
        assert_each_right(names, xs, implementation=implementation, algorithm="held")
    assert all(each["config"]["pack"] == 1 for each in executions)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("names", [("prod",), ("sum", "max", "min", *ARGS)], ids=["prod", "others"])
def test_rows_that_lie_interleaved(names, dtype, implementation):
    """Runs shorter than a pack, than a step and than a block's share, that begin and end at any
    phase; columns of a pack, of less and of more, and that are as long as a block's step."""
    longest = 512 if dtype in ("bfloat16", "float32", "int8") and "prod" not in names else 130
    shapes = [(3, 1, 2), (5, 2, 3), (3, 7, 5), (2, 400, 3), (2, 301, 33), (1, 1000, 16)]
    xs = [data(shape, dtype) for shape in [*shapes, (2, 90, 64), (1, 20, longest)]]
    assert_each_right(names, xs, 1, implementation=implementation, algorithm="interleaved")


# Whole rows of a thread (whole_column_kernel), one or two of 16 bits, as words and as halves: fewer
# columns than a group, whole groups and not, as many as it loads at once, and more; an odd number
# of rows, whose last two a thread has that also another has.
WHOLE = [
    (1, 3, 1024),
    (2, 8, 600),
    (3, 21, 2049),
    (40, 29, 130),
    (3, 9, 33),
    (13, 32, 130),
    (13, 39, 131),
    (13, 40, 130),
    (13, 77, 130),
    (1, 100, 1537),
    (1, 300, 641),
    (1, 1024, 642),
]
# Columns that the threads of a block divide (short_column_kernel), on the 4 multiprocessors of the
# host: also fewer columns than threads, with lanes for a part of a warp, and with several partials
# for each thread at the end. Tiles that rows fill, and not.
SHORT = [
    (2, 101, 301),
    (3, 35, 33),
    (1, 77, 48),
    (2, 300, 64),
    (1, 1000, 37),
]


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", *ARGS])
def test_columns_of_few_elements(name, dtype, implementation):
    for shapes, kernel in ((WHOLE, "::whole_column_kernel"), (SHORT, "::short_column_kernel")):
        xs = [data(shape, dtype) for shape in shapes]
        xs += [np.round(x).astype(x.dtype) for x in xs]  # many are equal, some are -0.0
        xs += [np.full(shape, 0.1, helpers.np_dtype(dtype)) for shape in shapes]
        with helpers.recorded(implementation) as executions:
            assert_each_right([name], xs, 1, implementation=implementation, algorithm="column")
        for each in executions if implementation == "interpret" else ():
            (launched,) = each["kernels"]
            assert kernel in launched


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["max", "min", *ARGS])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_infinities_and_nan_in_columns_of_few_elements(name, dtype, implementation):
    """NaN in the columns of several threads, in all of a thread's, after infinities, and in rows of
    which all elements are the worst ones."""
    rng = np.random.default_rng(0)
    worst = -np.inf if name in ("max", "argmax") else np.inf
    xs = [data(shape, dtype) for shape in WHOLE + SHORT]
    for x in xs:
        rows = np.moveaxis(x, 1, -1).reshape(-1, x.shape[1])
        rows[::5][rng.random(rows[::5].shape) < 0.2] = np.nan
        rows[1::5, rng.integers(x.shape[1])] = np.nan
        rows[2::5] = worst
        rows[3::5, : x.shape[1] // 2] = worst
        rows[3::10, x.shape[1] // 2 :] = np.nan
        rows[4::5, rng.integers(x.shape[1])] = -worst
        x[:] = np.moveaxis(rows.reshape(x.shape[0], x.shape[2], -1), -1, 1)
    assert_each_right([name], xs, 1, implementation=implementation, algorithm="column")


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["sum", "argmax"])
def test_columns_of_few_elements_at_any_address(name, implementation):
    if implementation != "interpret":
        pytest.skip("JAX aligns the buffers of a GPU")
    for shape in ((2, 21, 1024), (1, 300, 64)):
        x = data(shape, "bfloat16")
        with helpers.buffers_at(4 if name == "argmax" else 2):
            y = ours(name, x, 1, implementation=implementation, algorithm="column")
            assert_right(name, jax.block_until_ready(y), x, 1)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["int16", "int32"])
def test_few_rows_have_blocks_of_few_lanes(dtype, implementation):
    """In place of clusters: of columns too few for two launches."""
    x = data((1, 196, 256), dtype)
    how = {"implementation": implementation, "algorithm": "column"}
    with helpers.recorded(implementation) as executions:
        assert_each_right(("sum", "argmax"), [x], 1, **how)
    for each in executions if implementation == "interpret" else ():
        assert each["config"]["lanes"] < 32
        assert each["config"]["cluster"] == 1


# Of results in more tiles than one, of which the last is not full; of fewer than the cluster has
# blocks, or fewer for the last of them; of columns in packs of all widths, and of none for the last
# block. With the least bytes of an element of which the plan has clusters for them on the host; of
# smaller ones more blocks fit, and take a second launch.
DIVIDED = [
    ("column", (3, 1100, 33), 1),
    ("column", (1, 2200, 256), 1),
    ("column", (2, 3000, 40), 4),
    ("column", (2, 5000, 16), 8),
    ("interleaved", (2, 2400, 129), 1),
    ("interleaved", (3, 1700, 40), 4),
    ("interleaved", (2, 33 * 1024, 2), 8),
]


def divided(algorithm, dtype):
    size = helpers.np_dtype(dtype).itemsize
    return [shape for each, shape, least in DIVIDED if each == algorithm and size >= least]


def assert_by_clusters(executions, implementation):
    for each in executions if implementation == "interpret" else ():
        assert 1 < each["config"]["cluster"] == each["config"]["parts"], each["problem"]
        assert len(each["kernels"]) == 1


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["int8", "uint16", "bfloat16", "float32", "int64", "float64"])
@pytest.mark.parametrize("names", [("prod",), ("sum", "max", "min", *ARGS)], ids=["prod", "others"])
def test_columns_that_a_cluster_divides(names, dtype, implementation):
    for algorithm in ("column", "interleaved"):
        xs = [data(shape, dtype) for shape in divided(algorithm, dtype)]
        with helpers.recorded(implementation) as executions:
            assert_each_right(names, xs, 1, implementation=implementation, algorithm=algorithm)
        assert_by_clusters(executions, implementation)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
def test_masked_columns_that_a_cluster_divides(dtype, implementation):
    """Of rows without elements too, and of parts of rows without."""
    how = {"implementation": implementation, "algorithm": "column"}
    xs = [data(shape, dtype) for shape in divided("column", dtype)]
    masks = [np.random.default_rng(0).random(x.shape) < 0.5 for x in xs]
    for mask in masks:
        mask[:, 200:, :3] = False
        mask[-1, :, -1] = False

    def call(xs, masks):
        return [
            [
                ours(name, x, 1, where=mask, initial=initial, **how)
                for x, mask in zip(xs, masks, strict=True)
            ]
            for name, initial in (("sum", 0), ("max", -np.inf), ("min", np.inf))
        ]

    with helpers.x64(dtype):
        with helpers.recorded(implementation) as executions:
            sums, *others = jax.block_until_ready(jax.jit(call)(xs, masks))
        assert_by_clusters(executions, implementation)
        for x, mask, y in zip(xs, masks, sums, strict=True):
            assert_right("sum", y, np.where(mask, x, np.zeros_like(x)), 1)
        for name, end, ys in zip(("max", "min"), (-np.inf, np.inf), others, strict=True):
            for x, mask, y in zip(xs, masks, ys, strict=True):
                filled = np.where(mask, helpers.exact(x), end)
                np.testing.assert_array_equal(helpers.exact(y), getattr(filled, name)(1))


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["sum", "argmax"])
@pytest.mark.parametrize(
    ("algorithm", "shape"),
    [("column", (2, 3000, 40)), ("interleaved", (3, 1700, 40)), ("interleaved", (2, 2400, 129))],
)
def test_any_order_of_blocks_that_divide_columns(algorithm, shape, name, implementation):
    """What a block sends may come late, or before the one that gets it asks for it."""
    if implementation != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    x = helpers.normal(shape, "float32")
    held_back = [{"block": block} for block in (0, 1)] + [{"warp": 0}, {}, {}]
    y = helpers.under_each_schedule(
        lambda: ours(name, x, 1, implementation=implementation, algorithm=algorithm),
        list(enumerate(held_back, 1)),
    )
    assert_right(name, y, x, 1)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32"])
def test_columns_that_are_combined_by_a_second_launch(dtype, implementation):
    """Few results of many columns: more parts than a cluster has blocks."""
    columns = 2**22 // helpers.np_dtype(dtype).itemsize  # enough bytes for 4 multiprocessors
    for algorithm, shape in (("column", (columns // 8, 8)), ("interleaved", (columns // 3, 3))):
        xs = [data(shape, dtype)]
        names = "sum", "max", "argmin"
        with helpers.recorded(implementation) as executions:
            assert_each_right(names, xs, 0, implementation=implementation, algorithm=algorithm)
        for each in executions:
            assert each["config"]["parts"] > 8
            assert len(each["kernels"]) == 2


def test_an_array_at_an_odd_address_is_not_staged(implementation):
    if implementation != "interpret":
        pytest.skip("JAX aligns the buffers of a GPU")
    x = data((40, 33), "int8")
    with helpers.buffers_at(4), helpers.recorded(implementation) as executions:
        y = jax.block_until_ready(ours("sum", x, 1, implementation=implementation))
        with pytest.raises(jax.errors.JaxRuntimeError, match="an array aligned to 16 bytes; 'row'"):
            ours("sum", x, 1, implementation=implementation, algorithm="staged").block_until_ready()
    assert_right("sum", y, x, 1)
    assert [each["algorithm"] for each in executions] == ["row"]


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["sum", "max", "argmax"])
@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32"])
@pytest.mark.parametrize("algorithm", ["multiple", "row", "cluster", "column", "interleaved", None])
def test_arrays_at_any_address(algorithm, dtype, name, implementation):
    """What lies before the first row is not read: AddressSanitizer would say so."""
    if implementation != "interpret":
        pytest.skip("JAX aligns the buffers of a GPU")
    for size in (1, 3, 40, 1000):
        x, axis = as_taken(algorithm, data((3, size), dtype))
        result = jax.eval_shape(lambda x, axis=axis: upstream(name, x, axis), x)
        widest = max(x.itemsize, result.dtype.itemsize)  # the result moves by as much
        with helpers.buffers_at(widest if size % 2 else 3 * widest):
            y = ours(name, x, axis, implementation=implementation, algorithm=algorithm)
            assert_right(name, jax.block_until_ready(y), x, axis)


@pytest.mark.any_version
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_repeats_are_bit_identical(algorithm, implementation):
    x, axis = as_taken(algorithm, helpers.normal((3, 33333), "float32", scale=5))
    runs = [
        np.asarray(ours("sum", x, axis, implementation=implementation, algorithm=algorithm))
        for _ in range(3)
    ]
    np.testing.assert_array_equal(runs[0].view(np.int32), runs[1].view(np.int32))
    np.testing.assert_array_equal(runs[0].view(np.int32), runs[2].view(np.int32))


@pytest.mark.parametrize("how", ["plain", "masked", "batch_invariant"])
def test_means_in_16_bits_have_more_elements_than_these_hold(how, implementation):
    """Neither the sum nor the number of elements is finite in float16. Gradients are 1 / number."""
    options = {
        "plain": {},
        "masked": {"where": np.ones(70_000, bool)},
        "batch_invariant": {"batch_invariant": True},
    }[how]

    def mean(x):
        return jax_gpuops.mean(x, dtype="float16", implementation=implementation, **options)

    y, gradient = jax.value_and_grad(lambda x: 1024 * mean(x).astype("float32"))(
        jnp.full(70_000, 3, "float32")
    )
    assert y == 1024 * 3
    np.testing.assert_allclose(gradient, np.full(70_000, 1024 / 70_000), rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        *itertools.product(["sum", "mean", "max", "argmax", "argmin"], [2, -3]),
        *itertools.product(["sum", "mean", "max"], [(0, 2)]),
    ],
)
def test_an_axis_out_of_range_is_an_error(name, axis):
    with pytest.raises(ValueError, match="is out of bounds for an array of dimension 2"):
        getattr(jax_gpuops, name)(jnp.ones((3, 4)), axis)


def test_rows_that_are_divided_are_one_launch(implementation):
    """Whose blocks tell theirs from what the workspace held before, time and again."""
    call = jax.jit(
        lambda x: jax_gpuops.sum(x, 1, implementation=implementation, algorithm="multiple")
    )
    for seed in range(4):
        x = helpers.normal((3, 100_003), "float32", seed)
        with helpers.recorded(implementation) as executions:
            y = jax.block_until_ready(call(x))
        assert_right("sum", y, x, 1)
        assert executions[-1]["config"]["parts"] > 1
        assert len(executions[-1]["kernels"]) == 1


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["sum", "argmax"])
def test_blocks_that_take_row_after_row(name, implementation):
    """More rows than the GPU has groups of blocks, which a batch-invariant plan does not count."""
    small = implementation == "interpret"  # a GPU of 4 multiprocessors
    x = helpers.normal((9, 270_336 if small else 1 << 20), "bfloat16")
    with helpers.recorded(implementation) as executions:
        y = ours(name, x, 1, implementation=implementation, batch_invariant=True)
        jax.block_until_ready(y)
    config = executions[-1]["config"]
    assert config["parts"] > 1
    assert config["groups"] < len(x)
    assert_right(name, y, x, 1)


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("name", "algorithm"), [pair for pair in TAKEN if pair[0] in ("sum", "argmax")]
)
def test_any_order_of_threads(name, algorithm, implementation):
    """A missing barrier gives other numbers under some order of the threads."""
    if implementation != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    shapes = {
        "column": [(2, 300, 20), (2, 300, 40)],
        "interleaved": [(2, 301, 20)],
        "staged": [(5000, 33)],
    }
    for shape in shapes.get(algorithm, [(3, 9000)]):
        x = helpers.normal(shape, "float32")
        y = helpers.under_each_schedule(
            lambda x=x: ours(name, x, 1, implementation=implementation, algorithm=algorithm),
            [(seed, {}) for seed in range(1, 5)],
        )
        assert_right(name, y, x, 1)


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


@pytest.mark.parametrize("name", ["sum", "prod", "mean"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "int32", "uint16"])
def test_dtype(name, dtype, implementation):
    x = (data((4, 6), dtype) % 7 if dtype in INTEGERS else data((4, 6), dtype)).astype(dtype)

    def of_each_dtype(function, **how):
        dtypes = (None, "float16", "bfloat16", "float32", "int16", "uint32")
        return jax.jit(lambda x: [function(name, x, 0, dtype=each, **how) for each in dtypes])(x)

    results = of_each_dtype(ours, implementation=implementation), of_each_dtype(upstream)
    for y, expected in zip(*results, strict=True):
        assert y.dtype == expected.dtype
        tolerance = 3e-2 if y.dtype.itemsize == 2 else 1e-5
        y, expected = (np.asarray(each, np.float64) for each in (y, expected))
        np.testing.assert_allclose(y, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("default", [None, "xla"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_mean_left_to_xla_adds_16_bit_floats_in_float32(dtype, default):
    """As jnp.mean does unless it is given a dtype."""
    x = (1 + jax.random.uniform(jax.random.key(0), (2, 56, 56, 3))).astype(dtype)
    exact = np.mean(np.asarray(x, np.float64), (1, 2))
    mean = np.asarray(jax_gpuops.mean(x, (1, 2), implementation=default), np.float64)
    np.testing.assert_allclose(mean, exact, rtol=float(jnp.finfo(dtype).eps))


def test_a_mean_of_integers_is_rounded_to_0(implementation):
    """From what is exact: 2^24 + 1 is no float32, and 41 times the one next to 1 / 41 is not 1."""
    x = np.full((4, 41), [[1], [3], [-1], [2**24 + 1]], np.int32)
    x[1, 0], x[2, 0] = 2, -40
    y = ours("mean", x, -1, dtype="int32", implementation=implementation)
    np.testing.assert_array_equal(y, [1, 2, -1, 2**24 + 1])
    np.testing.assert_array_equal(y, upstream("mean", x, -1, dtype="int32"))


@pytest.mark.parametrize("name", ["sum", "prod"])
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("promote", [False, True])
def test_promote_integers(name, dtype, promote, implementation):
    with jax.enable_x64(True):
        x = data((3, 50), dtype)
        y = ours(name, x, -1, promote_integers=promote, implementation=implementation)
        expected = upstream(name, jnp.asarray(x), -1, promote_integers=promote)
        assert y.dtype == expected.dtype
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32", "int8", "bool"])
def test_a_numpy_scalar_is_an_array(dtype):
    """numpy's own and those of ml_dtypes, which do not derive from numpy.number."""
    one = helpers.np_dtype(dtype).type(1)
    y = jax_gpuops.sum(one, initial=one)
    expected = jnp.sum(one, initial=one)
    assert (y, y.dtype) == (expected, expected.dtype)


@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_initial_where_and_keepdims(name, dtype, implementation):
    x = data((4, 40), dtype)
    where = np.random.default_rng(1).random((4, 40)) < 0.2
    where[2] = False

    def results(function, **how):
        return jax.jit(
            lambda x, where: [
                function(name, x, axis, initial=3, where=where, keepdims=keepdims, **how)
                for axis in (0, 1, None)
                for keepdims in (False, True)
            ]
        )(x, where)

    actual = results(ours, implementation=implementation)
    for y, expected in zip(actual, results(upstream), strict=True):
        assert (y.dtype, y.shape) == (expected.dtype, expected.shape)
        y, expected = (np.asarray(each, np.float64) for each in (y, expected))
        np.testing.assert_allclose(y, expected, rtol=2e-2, atol=1e-5)


# Of unlike dims. A row of "multiple" has several blocks; a thread of "row" has packs enough for a
# full batch and more.
SHAPE_AND_AXIS_OF_MASKS = {
    "multiple": ((3, 1, 2, 9001), 3),
    "row": ((3, 4, 5, 2401), 3),
    "cluster": ((3, 2, 5, 1201), 3),
    "column": ((3, 700, 2, 16), 1),
}


@pytest.mark.kernel
@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("algorithm", MASKING)
def test_masks_in_every_algorithm_that_takes_them(algorithm, name, dtype, implementation):
    """Masks of all elements, of rows, of columns and of some dims; the kernel reads them itself."""
    shape, axis = SHAPE_AND_AXIS_OF_MASKS[algorithm]
    x = data(shape, dtype)
    if name == "prod":
        x = (1 + x / np.array(1 << 12, x.dtype)).astype(x.dtype)
    rng = np.random.default_rng(2)
    own = [shape, *([n if d != e else 1 for d, n in enumerate(shape)] for e in range(4))]
    own += [[1, 1, 1, shape[3]], [shape[0], 1, shape[2], 1]]
    masks = [rng.random(each) < 0.6 for each in own]
    turn = FOLDS.index(name)
    masks[1:] = [m for i, m in enumerate(masks[1:], turn) if helpers.taken_in_turn(i, dtype)]
    how = {"initial": 0} if name in ("max", "min") else {}
    call = functools.partial(
        ours, name, axis=axis, **how, implementation=implementation, algorithm=algorithm
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
        assert len(helpers.custom_calls_of(program)) == len(masks) + 1
        *ys, of_dirty = program(x, masks, dirty)
        np.testing.assert_array_equal(of_dirty, ys[0])
    wide = helpers.exact(x)
    for y, where in zip(ys, masks, strict=True):
        expected = getattr(np, name)(wide, axis, where=where, **how)
        scale = np.sum(np.abs(wide), axis) if name == "sum" else np.abs(expected)
        eps = float(jnp.finfo(y.dtype).eps)
        working = 1e-12 if dtype == "float64" else 1e-4 if name == "prod" else 1e-5
        bound = eps * np.abs(expected) + working * scale
        assert np.all(np.abs(helpers.exact(y) - expected) <= bound)


@pytest.mark.parametrize("where", [None, np.arange(40) % 3 == 0, np.arange(4)[:, None] != 2])
def test_mean_counts_what_where_includes(where, implementation):
    x = helpers.normal((4, 40), "float32")
    y = ours("mean", x, -1, where=where, implementation=implementation)
    np.testing.assert_allclose(y, upstream("mean", x, -1, where=where), rtol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 4)], ids=str)
def test_empty_arrays_as_in_jax(name, shape, implementation):
    x = jnp.zeros(shape)
    for axis in range(len(shape)):
        try:
            expected = upstream(name, x, axis)
        except ValueError as error:
            with pytest.raises(ValueError, match=str(error)):
                ours(name, x, axis, implementation=implementation)
            continue
        y = ours(name, x, axis, implementation=implementation)
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_types_are_upstream_s(name, implementation):
    """Weak types too: they decide what later arithmetic promotes to."""
    for x in (jnp.full((2, 3), 1.0), jnp.full((2, 3), 1), jnp.zeros((2, 3), jnp.bfloat16)):
        for axis in (0, 1, None):
            call = functools.partial(ours, implementation=implementation)
            actual, expected = (
                jax.eval_shape(functools.partial(each, name, axis=axis), x)
                for each in (call, upstream)
            )
            assert actual == expected
            assert actual.weak_type == expected.weak_type


def test_what_kernels_do_not_take_goes_to_xla(implementation):
    bools, complexes = jnp.ones((2, 3), bool), jnp.ones((2, 3), jnp.complex64)
    for x in (bools, complexes):
        np.testing.assert_array_equal(jax_gpuops.sum(x), jnp.sum(x))
    with pytest.raises(TypeError, match="dtype bool, only float16, bfloat16, float32"):
        jax_gpuops.max(bools, implementation=implementation)
    with pytest.raises(TypeError, match="dtype complex64, only"):
        jax_gpuops.sum(complexes, algorithm="row")


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x, i: jax_gpuops.sum(x, 2, implementation=i), ValueError, "axis 2 is out of"),
        (lambda x, i: jax_gpuops.sum(x, (0, 0), implementation=i), ValueError, "dimension twice"),
        (lambda x, i: jax_gpuops.argmax(x, (0, 1), implementation=i), TypeError, "tuple"),
        (lambda x, i: jax_gpuops.sum([1.0], implementation=i), TypeError, "a must be an array"),
        (lambda x, i: jax_gpuops.sum(x, out=x, implementation=i), NotImplementedError, "'out'"),
        (
            lambda x, i: jax_gpuops.max(x, where=x > 0, implementation=i),
            ValueError,
            "one has to specify 'initial'",
        ),
        (
            lambda x, i: jax_gpuops.sum(x, where=x, implementation=i),
            ValueError,
            "where must be None or a boolean array",
        ),
        (
            lambda x, i: jax_gpuops.sum(x, initial=x, implementation=i),
            ValueError,
            "initial value must be a scalar",
        ),
        (
            lambda x, i: jax_gpuops.sum(x, implementation=i, algorithm="fast"),
            ValueError,
            "'fast' is unknown; known are naive",
        ),
        (
            lambda x, i: jax_gpuops.argmax(x, 1, implementation=i, algorithm="naive"),
            ValueError,
            "'naive' computes only sum, prod, max and min",
        ),
        (
            lambda x, i: jax_gpuops.sum(x, 0, implementation=i, algorithm="row"),
            ValueError,
            "their elements are 3 elements apart; 'column' supports these",
        ),
        (lambda x, i: jax_gpuops.sum(x, implementation="gpu"), ValueError, "got 'gpu'"),
        (
            lambda x, i: jax_gpuops.sum(x, implementation="xla", algorithm="row"),
            ValueError,
            "implementation is 'xla'",
        ),
    ],
)
def test_bad_input_is_named_at_trace_time(call, error, text, implementation):
    with pytest.raises(error, match=text):
        jax.jit(lambda x: call(x, implementation)).trace(jnp.zeros((2, 3)))


# Transformations


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_custom_call_is_in_the_program(name, implementation):
    for shape, axis in [((4, 8), -1), ((4, 8), 0), ((100000,), None)]:
        calls = helpers.custom_calls(
            lambda x, axis=axis: ours(name, x, axis, implementation=implementation),
            jnp.zeros(shape),
        )
        assert any(call.startswith(f"jax_gpuops_{name}_v1") for call in calls)


def test_axes_that_lie_apart_cost_no_copy(implementation):
    """The longer run of axes comes first, and a second kernel has little left to read."""

    def function(x):
        return jax_gpuops.sum(x, axis=(0, 2, 3), implementation=implementation)

    x = jnp.zeros((3, 4, 5, 6))
    text = jax.jit(function).lower(x).compile().as_text()
    assert not re.search(r"f32\[\d+,\d+,.*\] transpose\(", text)
    first, second = jax_gpuops.explain(function, x).calls
    assert first.operands == ("f32[3,4,5,6]",)
    assert second.operands == ("f32[3,4]",)


@pytest.mark.parametrize("name", [*FOLDS, "mean"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize(("axis", "masked"), [((0, 2, 3), False), ((0, 2, 4), True)])
def test_axes_that_lie_apart(name, dtype, axis, masked, implementation):
    x = np.asarray(helpers.normal((2, 3, 5, 4, 2), "float32") * 3).astype(dtype)
    where = {"where": np.arange(5)[:, None, None] != 2} if masked else {}
    if masked and name in ("max", "min"):
        where["initial"] = 0
    y = ours(name, x, axis, **where, implementation=implementation)
    expected = upstream(name, x, axis, **where)
    assert y.dtype == expected.dtype
    tolerance = {"bfloat16": 1e-2, "float32": 1e-5, "int8": 1e-5}[dtype]
    np.testing.assert_allclose(
        np.asarray(y, np.float64), np.asarray(expected, np.float64), tolerance, tolerance
    )


@pytest.mark.parametrize("name", [*FOLDS, "mean"])
def test_gradient_along_axes_that_lie_apart(name, implementation):
    """Of equal maxima each has the same part, whichever run of axes they share."""
    x = helpers.normal((2, 3, 4), "float32")
    x[0, :, 1] = x[0, :, 2] = x[1, :, 0] = np.abs(x).max() + 1
    x[0, :, 3] = x[1, :, 1] = x[1, :, 2] = -np.abs(x).max() - 1
    cotangent = helpers.normal((3,), "float32", seed=1)
    _, pullback = jax.vjp(lambda x: ours(name, x, (0, 2), implementation=implementation), x)
    _, expected = jax.vjp(lambda x: upstream(name, x, (0, 2)), jnp.asarray(x))
    np.testing.assert_allclose(pullback(cotangent)[0], expected(cotangent)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mean_is_one_kernel_unless_rows_have_counts_of_their_own(dtype, implementation):
    def divides(**arguments):
        function = functools.partial(ours, "mean", axis=-1, implementation=implementation)
        text = jax.jit(lambda x: function(x, **arguments)).lower(jnp.ones((4, 8), dtype)).as_text()
        return "divide" in text

    assert not divides()
    assert divides(where=np.arange(8) < 5)


def test_another_axis_costs_no_copy(implementation):
    def function(x):
        return jax_gpuops.sum(x, axis=1, implementation=implementation)

    text = jax.jit(function).lower(jnp.zeros((4, 128, 64))).compile().as_text()
    assert "operand_layout_constraints={f32[4,64,128]{1,2,0}}" in text
    if implementation == "cuda":  # XLA:CPU copies all the same
        assert " copy(" not in text
        assert " transpose(" not in text


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("in_axis", [0, 2])
@pytest.mark.parametrize("axis", [0, 1, None])
def test_vmap(name, in_axis, axis, implementation):
    x = helpers.normal((4, 6, 8), "float32")
    y = jax.vmap(lambda x: ours(name, x, axis, implementation=implementation), in_axis)(x)
    expected = jax.vmap(lambda x: upstream(name, x, axis), in_axis)(x)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.any_version
@pytest.mark.parametrize("name", [*FOLDS, "mean"])
def test_derivatives_of_any_order(name, implementation):
    """Of all elements; test_transforms reduces along one axis."""
    x = helpers.normal((3, 5), "float32")
    check_grads(
        lambda x: ours(name, x, implementation=implementation),
        (x,),
        order=2,
        modes=["fwd", "rev"],
        atol=2e-2,
        rtol=2e-2,
        eps=1e-2,
    )


@pytest.mark.parametrize("name", [*FOLDS, "mean"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradient_as_in_jax(name, dtype, implementation):
    """Ties too: max and min spread the gradient over equal elements."""
    x = helpers.normal((5, 33), dtype)
    x[:, 3] = x[:, 8] = x.max(-1)
    x[:, 5] = x[:, 9] = x.min(-1)
    cotangent = helpers.normal((5,), dtype, seed=1)
    y, pullback = jax.vjp(lambda x: ours(name, x, -1, implementation=implementation), x)
    _, expected = jax.vjp(lambda x: upstream(name, x, -1), jnp.asarray(x))
    (gradient,) = pullback(jnp.asarray(cotangent))
    assert gradient.dtype == y.dtype == x.dtype
    np.testing.assert_allclose(
        np.asarray(gradient, np.float32),
        np.asarray(expected(jnp.asarray(cotangent))[0], np.float32),
        rtol=1e-2 if dtype == "bfloat16" else 1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("name", ["max", "min"])
@pytest.mark.parametrize("axes", [(2, 3), (0, 2)], ids=str)
def test_gradient_of_the_maximum_of_a_computed_array(name, axes, implementation):
    """XLA computes such an array again where it is compared with its maximum, and may round it
    differently: then no element would be the maximum.
    """
    if implementation == "interpret" and jax.__version_info__ < (0, 11):
        pytest.skip("its XLA:CPU removes optimization barriers before it fuses")

    def gradient(x, reduce):
        def loss(x):
            mean, std = x.mean((1, 3), keepdims=True), x.std((1, 3), keepdims=True, ddof=1)
            return reduce((x - mean) / std, axes).sum()

        return jax.grad(loss)(x)

    x = helpers.normal((3, 5, 7, 9), "float32") + 2
    ours_of = functools.partial(ours, name, implementation=implementation)
    actual = jax.jit(lambda x: gradient(x, ours_of))(x)
    with jax.enable_x64(True):
        expected = gradient(x.astype(np.float64), functools.partial(upstream, name))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_sum_is_linear(implementation):
    x = jnp.zeros((2, 3, 4))
    for axis in (0, 1, 2, None, (1, 2)):
        transposed = jax.linear_transpose(
            lambda x, axis=axis: jax_gpuops.sum(x, axis, implementation=implementation), x
        )
        expected = jax.linear_transpose(lambda x, axis=axis: jnp.sum(x, axis), x)
        cotangent = helpers.normal(jnp.sum(x, axis).shape, "float32")
        np.testing.assert_array_equal(transposed(cotangent)[0], expected(cotangent)[0])


@pytest.mark.parametrize("name", ARGS)
def test_indices_have_no_tangent(name, implementation):
    x = helpers.normal((3, 5), "float32")
    y, tangent = jax.jvp(lambda x: ours(name, x, -1, implementation=implementation), (x,), (x,))
    assert tangent.dtype == jax.dtypes.float0
    gradient = jax.grad(
        lambda x: jnp.take_along_axis(
            x, ours(name, x, -1, keepdims=True, implementation=implementation), -1
        ).sum()
    )(x)
    np.testing.assert_array_equal(gradient, np.arange(5) == np.asarray(y)[:, None])


@pytest.mark.parametrize("name", ["sum", "mean", "prod"])
@pytest.mark.parametrize("each", ["ours", "preferred", None])
def test_integers_made_of_floats_have_no_tangent(name, each, implementation):
    x = helpers.normal((3, 5), "float32", scale=3)
    function = functools.partial(ours, name, axis=-1, dtype="int32")
    expected, zero = jax.jvp(functools.partial(upstream, name, axis=-1, dtype="int32"), (x,), (x,))
    assert zero.dtype == jax.dtypes.float0

    def loss(x):
        def step(_, total):
            return total + function(x) + x[:, 0]

        return jax.lax.fori_loop(0, 4, step, x[:, 0]).sum()

    named = contextlib.nullcontext()
    if each is not None:
        named = jax_gpuops.use(implementation, strict=each == "ours")
    with named:
        y, tangent = jax.jvp(function, (x,), (x,))
        np.testing.assert_array_equal(y, expected)
        assert (tangent.shape, tangent.dtype) == (zero.shape, zero.dtype)
        _, linear = jax.linearize(function, x)
        assert linear(x).dtype == zero.dtype
        _, pullback = jax.vjp(function, x)
        np.testing.assert_array_equal(pullback(zero)[0], np.zeros((3, 5)))
        np.testing.assert_array_equal(jax.grad(loss)(x), np.eye(5)[:1].repeat(3, 0) * 5)


@pytest.mark.parametrize("name", ["sum", "argmax"])
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
        np.testing.assert_allclose(again.call(x), upstream(name, x, -1), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ["sum", "argmax", "mean_and_var"])
def test_symbolic_rows_are_divided_like_others(name, axis, implementation):
    """By workspace that follows their length: rows that are not divided have none."""

    def call(x):
        return getattr(jax_gpuops, name)(x, axis, implementation=implementation)

    (columns,) = jax.export.symbolic_shape("c")
    platforms = [{"interpret": "cpu"}.get(implementation, implementation)]
    for rows, sizes in ((6, (5, 4097, 6400, 300_000)), (5000, (9,))):
        shapes = [(size, rows) if axis == 0 else (rows, size) for size in (columns, *sizes)]
        exported = jax.export.export(
            jax.jit(call), platforms=platforms, disabled_checks=jax_gpuops.EXPORT_CHECKS
        )(jax.ShapeDtypeStruct(shapes[0], jnp.float32))
        for shape in shapes[1:]:
            x = helpers.normal(shape, "float32")
            compiled = jax.jit(exported.call).lower(x).compile()
            memory = compiled.memory_analysis().temp_size_in_bytes
            copies = x.nbytes if axis == 0 else 0  # XLA for CPUs turns the array first
            assert memory < copies + 0.2 * x.nbytes + 4096
            with helpers.recorded(implementation) as executions:
                ys = jax.block_until_ready((compiled(x), call(x)))
            parts = [each["config"]["parts"] for each in executions]
            assert parts[0] == parts[1]
            for y, expected in zip(*map(jax.tree.leaves, ys), strict=True):
                np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("name", ["mean", "var", "mean_and_var"])
def test_more_elements_than_an_int32_counts(name, batch_invariant, implementation):
    x = jax.ShapeDtypeStruct((2, 1 << 31), "bfloat16")
    how = {"implementation": implementation, "batch_invariant": batch_invariant}

    def total(x, axis):
        results = jax.tree.leaves(getattr(jax_gpuops, name)(x, axis, **how))
        return sum(jnp.sum(y) for y in results)

    for axis in (1, None):
        gradient = jax.eval_shape(jax.grad(functools.partial(total, axis=axis)), x)
        assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)


MASK = jax.ShapeDtypeStruct((1,), bool)
ON_HOPPER = "cluster" if not helpers.refusal("sum", "cluster") else "row"


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("name", "shape", "axis", "dtype", "options", "algorithm"),
    [
        ("sum", (4, 8), -1, "float32", {}, "held"),
        ("mean", (100000, 8), 1, "float32", {}, "held"),
        ("argmax", (1000, 1000), 1, "int32", {}, "held"),
        ("sum", (4, 8), -1, "float32", {"where": MASK}, "row"),
        ("sum", (1 << 20,), None, "float32", {}, "multiple"),
        ("argmax", (1 << 20,), None, "float32", {}, "multiple"),
        ("sum", (1 << 14,), None, "float32", {}, "held"),  # 64 KiB
        ("sum", (1 << 14,), None, "float32", {"where": MASK}, ON_HOPPER),
        ("max", (16383,), None, "bfloat16", {}, "held"),
        ("max", (32767,), None, "int16", {}, "row"),  # too short for a second block
        ("sum", (1000, 1 << 15), 1, "float32", {}, "row"),  # more rows than a GPU has room for
        # Of up to 512 bytes that are no whole packs, unless there are few, or few elements.
        ("sum", (100, 33), 1, "float32", {}, "held"),
        ("sum", (100000, 33), 1, "float32", {}, "staged"),
        ("argmax", (100, 17), 1, "bfloat16", {}, "held"),  # no more elements than a GPU's threads
        ("argmax", (40000, 17), 1, "bfloat16", {}, "staged"),
        ("argmin", (1000, 255), 1, "int8", {}, "staged"),
        ("sum", (1000, 33), 1, "float32", {"where": MASK}, "row"),
        ("sum", (100, 65), 1, "bfloat16", {}, "held"),
        ("sum", (100000, 129), 1, "float32", {}, "held"),
        ("sum", (1000, 6), 1, "float32", {}, "held"),
        ("sum", (100000, 6), 1, "float32", {}, "staged"),  # perhaps without a whole pack
        # No whole packs beside the axis, or few.
        ("sum", (5000, 33), 0, "float32", {}, "interleaved"),
        ("mean", (8, 28, 28, 24), (1, 2), "bfloat16", {}, "interleaved"),
        ("mean", (8, 14, 14, 64), (1, 2), "bfloat16", {}, "column"),
        ("mean", (8, 99, 99, 64), (1, 2), "bfloat16", {}, "interleaved"),  # but many columns
        ("sum", (5000, 33), 0, "float32", {"where": MASK}, "column"),
        ("sum", (5000, 128), 0, "float32", {}, "column"),
        ("sum", (5000, 1001), 0, "float32", {}, "column"),
        ("sum", (5000, 3, 3), 1, "float32", {}, "column"),  # runs of 36 bytes
        ("sum", (4, 8), 0, "float32", {}, "column"),
    ],
)
def test_plan(name, shape, axis, dtype, options, algorithm, implementation):
    how = {"axis": axis, **options, "implementation": implementation}
    assert jax_gpuops.plan(name, shape, dtype, **how).algorithm == algorithm
    # What the plan chooses can be named, too.
    assert jax_gpuops.plan(name, shape, dtype, **how, algorithm=algorithm).algorithm == algorithm


@pytest.mark.parametrize(
    ("algorithm", "shape", "axis", "options", "why"),
    [
        ("staged", (9, 257), 1, {}, "at most 1024 bytes, got 1028; 'row' supports any"),
        ("staged", (9, 33), 1, {"where": MASK}, "does not support a mask; 'row' does"),
        ("held", (9, 33), 1, {"where": MASK}, "does not support a mask; 'row' does"),
        ("held", (9, 16385), 1, {}, "at most 16384 elements, got 16385; 'row' supports"),
        ("held", (100000, 6), 1, {}, "rows of fewer than 7 elements only in smaller arrays"),
        ("held", ((1 << 32) - 1024, 64), 1, {}, "at most 4294966271 rows .*; 'row' supports any"),
        ("held", (1 << 31, 68), 1, {}, "at most 2147483647 rows .*; 'row' supports any number"),
        ("held", (9, 33), 0, {}, "33 elements apart; 'column' supports these"),
        ("staged", (9, 33), 0, {}, "33 elements apart; 'column' supports these"),
        ("cluster", (9, 33), 0, {}, "33 elements apart; 'column' supports these"),
        ("interleaved", (9, 33), 1, {}, "not support rows that are contiguous in memory; 'row'"),
        ("interleaved", (9, 33), 0, {"where": MASK}, "does not support a mask; 'column' does"),
        (
            "interleaved",
            (1 << 30, 3),
            0,
            {},
            "than 2.31 as that of the others; 'column' supports any",
        ),
        ("interleaved", (9, 513), 0, {}, "elements are 513 elements apart; 'column' does"),
    ],
)
def test_a_named_algorithm_refuses_what_it_cannot_take(
    algorithm, shape, axis, options, why, implementation
):
    how = {"axis": axis, **options, "implementation": implementation, "algorithm": algorithm}
    with pytest.raises(ValueError, match=f"algorithm '{algorithm}' .*{why}"):
        jax_gpuops.plan("sum", shape, "float32", **how)
