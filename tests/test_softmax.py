"""softmax, log_softmax and logsumexp against float64 and against JAX."""

import functools
import itertools

import helpers
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jax_gpuops
from jax_gpuops import _library, _primitive

FUNCTIONS = ("softmax", "log_softmax", "logsumexp")
LADDER = [a.name for a in jax_gpuops.algorithms("softmax")][:7]
UNMASKED = ["block_shared", "block_uncached"]  # steps of a ladder that all three functions have
COLUMNS = ("column", "column_two_pass", "column_split")
LONG_ROWS = ("block_two_pass", "strided", "split", "cluster", "cluster_shared")
"""Algorithms with a block or more for each row, of which the executor runs every thread."""
LONG = helpers.algorithms("softmax", *LONG_ROWS)
MASKED = [*helpers.algorithms("softmax", "warp", "small_block", "block"), *LONG]
PRODUCTION = [*MASKED, *helpers.algorithms("softmax", "staged")]
LONGEST = {"warp": 8000, "small_block": 16_000, "block": 64_000}  # bytes of a row, or of both
UPSTREAM = {name: getattr(jax.nn, name) for name in FUNCTIONS}


def ours(name, x, axis=-1, **kwargs):
    return getattr(jax_gpuops, name)(x, axis=axis, **kwargs)


def takes(algorithm, name, x, axis=-1, **options):
    """Whether an algorithm runs a call on this machine."""
    dtype = np.dtype(x.dtype).name
    return not helpers.refusal(name, algorithm, x.shape, dtype, axis=axis, **options)


@functools.partial(jax.jit, static_argnames=("name", "axis", "scale", "causal"))
def upstream(name, x, axis=-1, where=None, scale=1.0, causal=False):
    """What JAX's function gives for the options that ours has beyond it."""
    if causal:
        where = jnp.tri(*x.shape[-2:], dtype=bool) & (True if where is None else where)
    return UPSTREAM[name](x if scale == 1 else x * scale, axis=axis, where=where)


# Most of the time of a small test is that of compiling it, so cases share programs.


def of_each(function, *lists):
    """`map(function, *lists)`, compiled as one program."""
    return jax.jit(lambda lists: list(map(function, *lists)))(lists)


def under_each(options, function, *arrays):
    """Pairs of each of the `options` and `function(*arrays, **options)`, compiled as one program.

    Masks are operands, as they are in calls outside of jit.
    """
    masks = [{k: v for k, v in each.items() if k == "where"} for each in options]
    others = [{k: v for k, v in each.items() if k != "where"} for each in options]

    @jax.jit
    def run(masks, arrays):
        return [function(*arrays, **a, **b) for a, b in zip(masks, others, strict=True)]

    return zip(options, run(masks, arrays), strict=True)


def kept(x, where=None, causal=False, **_):
    """The elements of x that count, as a boolean array of its shape."""
    result = np.broadcast_to(True if where is None else where, x.shape)
    return result & np.tri(*x.shape[-2:], dtype=bool) if causal else result


def reference(name, x, axis=-1, scale=1.0, **options):
    """The function of `x` in extended precision, with JAX's values for rows that have none."""
    keep = kept(x, **options)
    x = np.where(keep, helpers.exact(x), 0) * scale
    x = np.where(keep, x, -np.inf)
    with np.errstate(all="ignore"):
        largest = x.max(axis, keepdims=True)
        if name == "logsumexp":
            largest = np.where(np.isfinite(largest), largest, 0)
        shifted = x - largest
        total = np.exp(shifted).sum(axis, keepdims=True)
        if name == "softmax":
            return np.where(keep, np.exp(shifted) / total, 0)
        if name == "log_softmax":
            return np.where(keep, shifted - np.log(total), -np.inf)
        return np.squeeze(np.log(total) + largest, axis)


def assert_accurate(name, actual, x, axis=-1, scale=1.0, **options):
    """Checks the bounds of the correctness contract, element by element.

    16-bit results are within one unit in the last place; logarithms near 0, such as that of a
    softmax near 1, within what the float32 sum behind them resolves. Wider ones: exp of a
    difference d costs about |d| units, by rounding d alone, where the contract allows 6 + 1.25 |d|;
    logarithms add that of the larger term they are made of. A scale that is no power of two rounds
    each term.
    """
    expected = reference(name, x, axis, scale, **options)
    actual = np.asarray(actual)
    assert actual.dtype == np.asarray(x).dtype
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    with np.errstate(over="ignore"):
        rounded = expected.astype(actual.dtype)  # infinite where the dtype ends
    finite = np.isfinite(rounded)
    infinite = np.isinf(rounded)
    np.testing.assert_array_equal(actual[infinite], rounded[infinite])
    if actual.dtype.itemsize == 2:
        resolution = 0 if name == "softmax" else 4 * np.finfo(np.float32).eps
        bound = helpers.spacing(expected[finite], actual.dtype) + resolution
        error = np.abs(helpers.exact(actual)[finite] - expected[finite])
        assert np.all(error <= bound), (x.shape, axis, scale, options)
        return
    epsilon = np.finfo(actual.dtype).eps
    with np.errstate(invalid="ignore"):
        error = np.abs(helpers.exact(actual) - expected)
        z = helpers.exact(x) * scale
        is_finite = np.isfinite(z) & kept(x, **options)
        largest = np.abs(z).max(axis, keepdims=True, initial=0, where=is_finite)
        scaling = 0 if abs(np.frexp(scale)[0]) in (0, 0.5) else 2 * largest
        distance = z.max(axis, keepdims=True, initial=-np.inf, where=is_finite) - z
    if name == "softmax":
        smallest = np.finfo(actual.dtype).tiny
        with np.errstate(invalid="ignore"):
            relative = (6 + 1.25 * distance + scaling) * epsilon
            bound = np.where(expected >= smallest, relative * expected, 16 * smallest)
    else:
        bound = 8 * epsilon * (1 + largest + scaling)
        bound = np.squeeze(bound, axis) if name == "logsumexp" else bound
        bound = bound + 8 * epsilon * np.abs(expected)
    is_bounded = error[finite] <= np.broadcast_to(bound, error.shape)[finite]
    assert np.all(is_bounded), (x.shape, axis, scale, options)


def assert_each_accurate(name, xs, dtype, axis=-1, **how):
    """Calls the function for each of `xs`, in one program, and checks the results."""
    with helpers.x64(dtype):
        ys = of_each(lambda x: ours(name, x, axis, **how), xs)
    for x, y in zip(xs, ys, strict=True):
        assert_accurate(name, y, x, axis)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("algorithm", [*PRODUCTION, *UNMASKED])
def test_every_production_algorithm(name, algorithm, dtype, implementation):
    rows = 2 if algorithm in (*LONG_ROWS, "block_uncached") else 5
    lengths = (1, 2, 8, 31, 33, 127, 256, 1001, 1023)
    xs = [helpers.normal((rows, columns), dtype, scale=4) for columns in lengths]
    assert_each_accurate(name, xs, dtype, implementation=implementation, algorithm=algorithm)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("algorithm", [*LONG, "block_uncached"])
def test_long_rows(name, algorithm, dtype, implementation):
    """Rows that fit the registers of a block, and rows that do not."""
    xs = [helpers.normal((2, columns), dtype, scale=4) for columns in (4097, 40000, 40001)]
    assert_each_accurate(name, xs, dtype, implementation=implementation, algorithm=algorithm)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_that_a_cluster_holds_in_shared_memory(name, dtype, implementation):
    """By 16 blocks or as few as it takes; with a last slice that is short, and with full ones."""
    how = {"implementation": implementation, "algorithm": "cluster_shared"}
    size = jnp.dtype(dtype).itemsize
    rows, row_bytes = 17, (600_000, 300_000, 600_000 + size, 1 << 20)
    if implementation == "interpret":
        rows, row_bytes = 4, (560_000, 530_000 + size)
    xs = [helpers.normal((rows, bytes_ // size), dtype, scale=4) for bytes_ in row_bytes]
    for x in xs:
        x[0, : x.shape[1] // 2], x[1] = -np.inf, -np.inf
        x[2, 77], x[3, -1] = np.inf, np.nan
    assert_each_accurate(name, xs, dtype, **how)
    for x in xs[:1] if implementation == "interpret" else xs[1:3]:
        where = np.random.default_rng(0).random(x.shape) < 0.5
        where[1] = False
        every_option = ({"where": where}, {"where": where[2]}, {"causal": True}, {"scale": -0.3})
        for i, options in enumerate(every_option):
            if helpers.taken_in_turn(i, dtype):
                with helpers.x64(dtype):
                    assert_accurate(name, ours(name, x, **options, **how), x, **options)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_more_long_rows_than_a_gpu_holds(name, dtype, implementation):
    """Blocks that wait for each other, on one row, two and many; and rows too long for that."""
    how = {"implementation": implementation}
    size = jnp.dtype(dtype).itemsize
    columns = 80_000 // size
    shapes = [
        (400, columns),
        (400, columns + 1),
        (14, 700001),
        (1, 8_900_000 // size),
        (2, 5_900_000 // size),
        (1, 13000001),
    ]
    if implementation == "interpret":  # its GPU has 4 multiprocessors
        shapes = [(9, columns), (9, columns + 1), (3, 130_000 // size), (2, 170_000 // size)]
        shapes.append((1, 300_000 // size + 1))
    xs = [helpers.normal(shape, dtype, scale=4) for shape in shapes]
    for x in xs[:2]:
        x[1], x[3, : columns // 2] = -np.inf, -np.inf
        x[5, 77], x[-1, columns - 1] = np.inf, np.nan
    for algorithm in ("split", "split_pipelined"):
        taken = [x for x in xs if takes(algorithm, name, x)]
        assert len(taken) >= 4 or name == "logsumexp"
        assert_each_accurate(name, taken, dtype, algorithm=algorithm, **how)
        for i, x in enumerate(xs[:2]):
            where = np.random.default_rng(0).random(x.shape) < 0.5
            where[7] = False
            masks = {"where": where}, {"where": where[3]}, {"causal": True, "scale": 0.5}
            for j, options in enumerate(masks):
                drawn = helpers.taken_in_turn(i + j, dtype)
                if drawn and takes(algorithm, name, x, **options):
                    with helpers.x64(dtype):
                        y = ours(name, x, algorithm=algorithm, **options, **how)
                        assert_accurate(name, y, x, **options)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("algorithm", ["small_block", "block"])
def test_a_few_rows_of_any_even_length(name, algorithm, dtype, implementation):
    """What small problems have kernels for: one to four packs in each thread of up to 8 warps."""
    how = {"implementation": implementation, "algorithm": algorithm}
    lengths = (8, 16, 32, 64, 128, 264, 520, 1000, 2048, 4096, 8192)
    xs = [helpers.normal((3, columns), dtype, scale=4) for columns in lengths]
    xs = [x for x in xs if takes(algorithm, name, x)]
    assert_each_accurate(name, xs, dtype, **how)
    x = helpers.normal((5, 2048), dtype, scale=4)
    x[1], x[2, 7], x[3, :1000] = -np.inf, np.inf, -np.inf
    where = np.random.default_rng(0).random(x.shape) < 0.5
    where[2:4, :8], where[4] = False, False
    with helpers.x64(dtype):
        every_option = ({}, {"where": where}, {"causal": True, "scale": -0.5})
        for options, y in under_each(every_option, functools.partial(ours, name, **how), x):
            assert_accurate(name, y, x, **options)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_columns_that_blocks_hold_in_strips(name, dtype, implementation):
    """By one block to 16, of which those of 1500 and 4400 do not divide the rows of a strip into
    equal shares; up to 69 strips."""
    shapes = [(2, columns, 200) for columns in (257, 513, 1500, 2000, 4400, 5000, 8192)]
    shapes.append((3, 300, 2184))
    if implementation == "interpret":
        shapes = [(2, 257, 200), (1, 1500, 72), (1, 4400, 72)]
    xs = [helpers.normal(shape, dtype, scale=4) for shape in shapes]
    for x in xs:
        x[0, :, 3], x[0, : x.shape[1] // 2, 4] = -np.inf, -np.inf
        x[-1, 77, 5], x[-1, -1, -1] = np.inf, np.nan
        # So large that a row of 16-bit elements is computed a second time.
        if dtype != "float16":
            x[0, :, 6] *= np.asarray(1e9, x.dtype)
    assert_each_accurate(name, xs, dtype, 1, implementation=implementation, algorithm="strip")


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("columns", "inner", "algorithm"),
    [
        (40, 40, "column"),
        (40, 4, "column"),
        (40, 40, "column_two_pass"),
        (600, 40, "column_two_pass"),
        (600, 40, "column_split"),
        (600, 4, "column_split"),
    ],
)
def test_columns_of_large_values_beside_infinite_ones(
    name, columns, inner, algorithm, dtype, implementation
):
    """logsumexp of them is inf, though exp() of the finite ones is as well."""
    sizes = ([100.0, 3e7, 1e9, 1e20, 3e38] * 8)[-inner:]
    x = np.linspace(0.5, 1, columns)[:, None] * np.asarray(sizes).astype(dtype).astype(np.float64)
    x = x.astype(dtype)
    x[7] = np.inf
    x[:, inner // 2 :] = -x[:, inner // 2 :]
    how = {"implementation": implementation, "algorithm": algorithm}
    with helpers.x64(dtype):
        assert_accurate(name, ours(name, x, 0, **how), x, 0)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("scale", [0.3, -2.0])
def test_scales_of_columns_in_strips(name, scale, dtype, implementation):
    x = helpers.normal((1500, 72), dtype, scale=4)
    if why := helpers.refusal("softmax", "strip", x.shape, axis=0):
        pytest.skip(why)
    x[:, 1], x[7, 2], x[8, 3] = -np.inf, np.inf, -np.inf
    with helpers.x64(dtype):
        how = {"implementation": implementation, "algorithm": "strip"}
        assert_accurate(name, ours(name, x, 0, scale=scale, **how), x, 0, scale=scale)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("inner", [2, 8, 13])
@pytest.mark.parametrize(
    ("algorithm", "lengths"),
    [
        ("column", (1, 31, 33, 500)),
        ("column_two_pass", (1, 33, 1023)),
        ("column_split", (1, 129, 1023)),
    ],
)
def test_columns(name, inner, algorithm, lengths, dtype, implementation):
    """Columns side by side that fill packs of 16 bytes, and such that do not."""
    xs = [helpers.normal((2, columns, inner), dtype, scale=4) for columns in lengths]
    assert_each_accurate(name, xs, dtype, 1, implementation=implementation, algorithm=algorithm)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_columns_of_rows_that_packs_would_not_fit(name, dtype, implementation):
    """Blocks copy their tiles to shared memory, in lines of any phase; the last tile is narrow."""
    shapes = [(2, 2, 387), (2, 21, 129), (2, 33, 225), (2, 100, 191), (2, 150, 257)]
    tiles = helpers.multiprocessors(implementation) // 4
    xs = [helpers.normal((tiles * outer, *shape), dtype, scale=4) for outer, *shape in shapes]
    for x in xs:
        x[0, :, 3], x[0, : x.shape[1] // 2, 40] = -np.inf, -np.inf
        x[-1, 1, 77], x[-1, -1, -1] = np.inf, np.nan
        # So large that a row of 16-bit elements is computed a second time.
        if dtype != "float16":
            x[0, :, -2] *= np.asarray(1e9, x.dtype)
    with helpers.recorded(implementation) as executions:
        assert_each_accurate(name, xs, dtype, 1, implementation=implementation, algorithm="column")
    # Of float64 a pack is an element, and 2 elements of the axis are held without lines.
    lines = [each["config"]["lines"] for each in executions]
    expected = [dtype != "float64" and columns > 2 for _, columns, _ in shapes]
    assert sorted(lines) == sorted(expected)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("algorithm", LADDER)
def test_every_step_of_the_ladder(algorithm, dtype, implementation):
    """Odd rows, and row counts that two and four rows a warp do not divide."""
    shapes = [(1, 1), (5, 3), (3, 32), (7, 33), (4, 130), (2, 1027)]
    xs = [helpers.normal(shape, dtype, scale=4) for shape in shapes]
    assert_each_accurate("softmax", xs, dtype, implementation=implementation, algorithm=algorithm)


@pytest.mark.kernel
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
@pytest.mark.parametrize("algorithm", [*PRODUCTION, *UNMASKED])
def test_infinities_and_nan_as_in_jax(name, algorithm, implementation):
    """Also where the parts of a row that one thread or warp sees are -inf as a whole."""
    x = helpers.normal((11, 300), "float32")
    x[1, 77], x[3, 77], x[5, 77] = -np.inf, np.inf, np.nan
    x[7] = -np.inf
    x[9, :150] = -np.inf
    y = ours(name, x, implementation=implementation, algorithm=algorithm)
    np.testing.assert_allclose(y, upstream(name, x), rtol=1e-4, atol=1e-6)


def large_values(dtype):
    """Rows as masks that are added leave them: equal, or far below the largest."""
    most = float(jnp.finfo(dtype).max)
    values = [v for v in (-1e4, 6e4, -1e9, 1.4e9, 3e9, -1e30, 1e30, -most, most) if abs(v) <= most]
    x = np.zeros((3 * len(values), 40), dtype)
    for row, value in enumerate(values):
        x[3 * row : 3 * row + 3] = value
        x[3 * row + 1, 7::9] = -most
        x[3 * row + 2, ::2] = np.arange(20)
    return x


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("algorithm", [*PRODUCTION, *UNMASKED, "column"])
def test_rows_of_large_values(name, algorithm, dtype, implementation):
    x = large_values(dtype)
    # With a scale none may be beyond the dtype, and those of float16 need one to be large.
    small = x[np.abs(x.astype(np.float64)).max(1) < float(jnp.finfo(dtype).max) / 2]
    cases = [(x, 1.0)]
    if algorithm not in UNMASKED:
        scaled = [(small, 0.3), (small, -0.3)]
        scaled += [(x, -3e10), (x, 1e33)] if dtype == "float16" else []
        turn = FUNCTIONS.index(name)
        cases += [c for i, c in enumerate(scaled, turn) if helpers.taken_in_turn(i, dtype)]
    axis = -1
    if algorithm == "column":
        # Of columns, an even number can be read in packs, another cannot.
        axis = 0
        cases = [(m, scale) for x, scale in cases for m in (x.T, x.T[:, :8], x.T[:, :16])]
    cases = [(x, {} if scale == 1 else {"scale": scale}) for x, scale in cases]
    how = {"implementation": implementation, "algorithm": algorithm}
    with helpers.x64(dtype):
        ys = of_cases(functools.partial(ours, name, axis=axis, **how), cases)
    for (x, options), y in zip(cases, ys, strict=True):
        assert_accurate(name, y, x, axis, **options)


@pytest.mark.any_version
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("algorithm", [*PRODUCTION, "column"])
def test_rows_that_a_scale_makes_infinite(name, algorithm, dtype, implementation):
    """They give what rows of these infinities give: NaN where all elements are -inf, say.

    They are read as rows of large values are.
    """
    x = np.full((8, 40), -1, dtype)  # 8 columns are read in packs where there is no mask
    x[1, 7] = x[2, ::3] = 0
    x[3], x[4, 5] = 1, 1
    scale = 1e35 if dtype == "float16" else 10.0
    axis = -1
    wheres = [None] if algorithm == "staged" else [None, np.arange(40) != 7]
    if algorithm == "column":
        axis, x, wheres = 0, x.T, [None, wheres[1][:, None]]
    infinite = np.where(x == 0, 0, np.copysign(np.inf, x)).astype(dtype)
    most = jnp.finfo(dtype).max
    cases = [
        (sign * x * most, {"where": where, "scale": sign * scale})
        for where, sign in itertools.product(wheres, (1, -1))
    ]
    how = {"implementation": implementation, "algorithm": algorithm}
    with helpers.x64(dtype):
        ys = of_cases(functools.partial(ours, name, axis=axis, **how), cases)
    for (_, options), y in zip(cases, ys, strict=True):
        assert_accurate(name, y, infinite, axis, where=options["where"])


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("algorithm", LONG)
def test_long_rows_of_large_values(algorithm, dtype, implementation):
    """Rows that a cluster holds in shared memory, or registers; on the host, shorter ones."""
    most = 12_000 if algorithm == "cluster" else 15_000
    times = (most if implementation == "cuda" else 1_000) // jnp.dtype(dtype).itemsize
    x = np.tile(large_values(dtype), (1, times))
    for i, name in enumerate(FUNCTIONS):
        if helpers.taken_in_turn(i, dtype):
            with helpers.x64(dtype):
                y = ours(name, x, implementation=implementation, algorithm=algorithm)
                assert_accurate(name, y, x)


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("algorithm", "axis"),
    [
        *((name, axis) for name in (*LADDER, *UNMASKED, "strided") for axis in range(3)),
        *((name, axis) for name in COLUMNS for axis in (0, 1)),
        ("warp", 2),
    ],
)
def test_an_axis_is_read_where_it_lies(algorithm, axis, implementation):
    x = helpers.normal((3, 5, 8), "float32")
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


@pytest.mark.kernel
@pytest.mark.parametrize("algorithm", [*LADDER, *UNMASKED, *PRODUCTION])
def test_rows_that_start_at_any_phase(algorithm, implementation):
    """Row r of an array with n columns starts n * r elements after an aligned address."""
    xs = [helpers.normal((8, 64 + offset), "float32") for offset in (1, 2, 3)]
    how = {"implementation": implementation, "algorithm": algorithm}
    assert_each_accurate("softmax", xs, "float32", **how)


# Scale, masks, causal


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
    np.testing.assert_allclose(y, upstream(name, x, where=where), rtol=1e-5, atol=1e-6)


SCALES = {
    "none": {},
    "scale": {"scale": 0.3},
    "negative scale": {"scale": -2.0},
    "zero scale": {"scale": 0.0},
    "scale that float32 rounds to zero": {"scale": 1e-60},
}


def options_for(shape):
    """Options for an array of three dims."""
    _, rows, columns = shape
    random = np.random.default_rng(0).random
    return [
        *SCALES.values(),
        {"causal": True},
        {"causal": True, "scale": -0.125},
        {"where": random(shape) < 0.6},
        {"where": np.arange(columns) % 3 != 1},
        {"where": np.array([[True], [False], [True], [True], [False]])[:rows]},
        {"where": random((rows, columns)) < 0.4, "causal": True, "scale": 1.7},
    ]


OPTIONS = options_for((3, 5, 133))


def options_and_operand(algorithm, name, columns, dtype):
    """Those of them that an algorithm takes, of which not all take masks, with such an array.

    A dtype gets every second option with one of two lengths, and the others with the other.
    """
    x = helpers.normal((*((2, 3) if algorithm in LONG_ROWS else (3, 5)), columns), dtype, scale=3)
    taken = [each for each in options_for(x.shape) if takes(algorithm, name, x, **each)]
    numbered = enumerate(taken, start=columns)
    return [each for i, each in numbered if helpers.taken_in_turn(i, dtype)], x


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("columns", [133, 136])
@pytest.mark.parametrize("algorithm", PRODUCTION)
def test_options_of_every_production_algorithm(name, algorithm, columns, dtype, implementation):
    """Causal rows are short: threads, warps and blocks behind their ends see no element at all."""
    taken, x = options_and_operand(algorithm, name, columns, dtype)
    assert taken
    function = functools.partial(ours, name, implementation=implementation, algorithm=algorithm)
    for options, y in under_each(taken, function, x):
        assert_accurate(name, y, x, **options)


# Lengths of rows, and so phases of their flags, that are no multiples of what is read at a time.
ODD_LENGTHS = (1, 3, 7, 9, 131, 133, 197, 1000, 1500, 2047)
ODD_LENGTHS_OF_BLOCKS = ODD_LENGTHS
if jax.default_backend() != "gpu":  # the executor takes its time
    ODD_LENGTHS = (1, 7, 133, 1500)
    ODD_LENGTHS_OF_BLOCKS = (1, 133, 1500)


def odd_lengths(algorithm):
    """Those whose rows an algorithm is tested with."""
    return ODD_LENGTHS_OF_BLOCKS if algorithm in LONG_ROWS else ODD_LENGTHS


def masks_of_any_phase(shape, seed=0):
    """Options with masks of each broadcast, and what is left out by causality alone.

    The rows of a mask lie as those of the array do, or not: leading dims that it lacks, or has
    alone, give its rows other phases. A mask that has no columns leaves out whole rows.
    """
    rng = np.random.default_rng(seed)
    leading, rows, columns = shape
    shapes = [shape, (rows, columns), (leading, 1, columns), (columns,), (leading, rows, 1)]
    masks = [rng.random(each) < 0.6 for each in shapes]
    if rows > 1:
        masks[0][0, 1] = False
    return [
        {"causal": True},
        *({"where": mask} for mask in masks),
        {"where": masks[1], "causal": True, "scale": -0.5},
        {"where": masks[3], "causal": True},
    ]


def masked_cases(xs, dtype):
    """Pairs of an array and options with masks of any phase: on a GPU all, else half of them."""
    return [
        (x, options)
        for i, x in enumerate(xs)
        for j, options in enumerate(masks_of_any_phase(x.shape))
        if helpers.taken_in_turn(i + j, dtype)
    ]


def of_cases(function, cases, *arrays):
    """`function(x, *others, **options)` for each pair of x and options, as one program.

    `arrays`: lists of the others.
    """
    static = [{k: v for k, v in each.items() if k != "where"} for _, each in cases]
    masks = [{k: v for k, v in each.items() if k == "where"} for _, each in cases]

    @jax.jit
    def run(xs, masks, arrays):
        return [
            function(*operands, **mask, **options)
            for *operands, mask, options in zip(xs, *arrays, masks, static, strict=True)
        ]

    return run([x for x, _ in cases], masks, arrays)


def special_rows(shape, dtype):
    """Rows with an element that is not finite, or throughout, beside others."""
    x = helpers.normal(shape, dtype, scale=3)
    x[0, 2, -1], x[1, 0, 0], x[1, 1] = np.inf, np.nan, -np.inf
    x[1, 2, : shape[-1] // 2] = -np.inf
    return x


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("algorithm", MASKED)
def test_masks_of_rows_of_any_phase(name, algorithm, dtype, implementation):
    size = jnp.dtype(dtype).itemsize
    lengths = [n for n in odd_lengths(algorithm) if n * size <= LONGEST.get(algorithm, np.inf)]
    xs = [special_rows((2, 3, columns), dtype) for columns in lengths]
    cases = masked_cases(xs, dtype)
    function = functools.partial(ours, name, implementation=implementation, algorithm=algorithm)
    with helpers.x64(dtype):
        ys = of_cases(function, cases)
    for (x, options), y in zip(cases, ys, strict=True):
        assert_accurate(name, y, x, **options)


SHORT_LENGTHS = (7, 8, 9, 16, 17, 32, 33, 64, 65, 96, 128, 192, 193, 224, 256, 257, 384, 512, 513)
"""On both sides of where warps take other kernels for rows with masks."""


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_masks_of_short_rows_of_every_length(name, dtype, implementation):
    xs = [special_rows((2, 3, columns), dtype) for columns in SHORT_LENGTHS]
    cases = [
        (x, options)
        for i, x in enumerate(xs)
        for j, options in enumerate(masks_of_any_phase(x.shape))
        if (i + j) % 3 == 0
    ]
    how = {"implementation": implementation, "algorithm": "warp"}
    with helpers.x64(dtype):
        ys = of_cases(functools.partial(ours, name, **how), cases)
    for (x, options), y in zip(cases, ys, strict=True):
        assert_accurate(name, y, x, **options)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("algorithm", LONG)
def test_masks_of_long_rows_of_any_phase(name, algorithm, dtype, implementation):
    xs = [helpers.normal((2, 1, columns), dtype, scale=4) for columns in (9001, 40001)]
    for x in xs:
        x[1, 0, -2] = -np.inf
    cases = masked_cases(xs, dtype)
    function = functools.partial(ours, name, implementation=implementation, algorithm=algorithm)
    for (x, options), y in zip(cases, of_cases(function, cases), strict=True):
        assert_accurate(name, y, x, **options)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_masks_of_many_rows_of_any_phase(name, dtype, implementation):
    """More work than the kernels for little work take: by warps, and by blocks."""
    shapes = ((4, 700, 197), (4, 130, 2049))
    if implementation == "interpret":  # its GPU has 4 multiprocessors
        shapes = ((4, 200, 197), (4, 80, 2049))
    xs = [helpers.normal(shape, dtype, scale=3) for shape in shapes]
    cases = masked_cases(xs, dtype)
    function = functools.partial(ours, name, implementation=implementation)
    for (x, options), y in zip(cases, of_cases(function, cases), strict=True):
        assert_accurate(name, y, x, **options)


@pytest.mark.kernel
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("algorithm", ["strided", *COLUMNS])
def test_options_on_another_axis(name, algorithm, implementation):
    x = helpers.normal((3, 5, 8), "float32", scale=3)
    every_option = [
        {"axis": axis, "where": np.random.default_rng(0).random(shape) < 0.6, "scale": -0.5}
        for axis in (0, 1)
        for shape in [(3, 5, 8), (3, 1, 1), (1, 5, 1), (5, 8), (8,)]
    ]
    function = functools.partial(ours, name, implementation=implementation, algorithm=algorithm)
    for options, y in under_each(every_option, function, x):
        assert_accurate(name, y, x, **options)


MASKED_ROWS = {
    "a finite row": {},
    "one masked element": {"special": (slice(None), 1)},
    "one element that counts": {"special": (slice(None), 2)},
    "all that count": {"special": (slice(None), slice(None, None, 2))},
    "all": {"special": (slice(None), slice(None))},
    "no element counts": {"special": (slice(None), 3), "empty": True},
}


@functools.cache  # for all cases, which differ in their numbers alone
def values_and_derivatives(name, function, causal):
    """A program with the values and their derivatives of two orders of rows with a mask."""

    def program(x, t, ct, where):
        def of(x):
            return finite(lambda x: function(name, x, where=where, causal=causal))(x)

        def gradient(x):
            y, pullback = jax.vjp(of, x)
            return pullback(ct[:, 0] if y.ndim == 1 else ct)[0]

        values = function(name, x, where=where, causal=causal)
        return values, jax.jvp(of, (x,), (t,)), jax.jvp(gradient, (x,), (t,))

    return jax.jit(program)


OURS_WITH = {each: functools.partial(ours, implementation=each) for each in ("xla", None)}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("special", [-np.inf, np.inf, np.nan])
@pytest.mark.parametrize("row", MASKED_ROWS)
@pytest.mark.parametrize("each", OURS_WITH)
def test_what_xla_computes_of_masked_rows_is_as_upstream(name, special, row, each):
    """With its derivatives of two orders, though -inf leaves elements out, and not `where`.

    So masked elements are NaN where a row is.
    """
    x, t, ct = (helpers.normal((5, 6), "float32", seed) for seed in range(3))
    x[MASKED_ROWS[row].get("special", (0, 1))] = special
    where = np.tile(np.arange(6) % 2 == 0, (5, 1))
    if MASKED_ROWS[row].get("empty"):
        where[2] = False
    for causal in (False, True):
        actual, expected = (
            values_and_derivatives(name, function, causal)(x, t, ct, where)
            for function in (OURS_WITH[each], upstream)
        )
        if name != "logsumexp":
            is_nan = np.isnan(expected[0]).any(-1, keepdims=True)
            is_masked = ~(where & np.tri(5, 6, dtype=bool) if causal else where)
            values = np.where(is_nan & is_masked, np.nan, expected[0])
            actual = (np.where(is_nan & is_masked, np.nan, actual[0]), *actual[1:])
            expected = (values, *expected[1:])
        assert_same = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
        jax.tree.map(assert_same, actual, expected)


def selections(jaxpr, shape) -> int:
    """How many arrays of a shape are selected in a jaxpr and those that it calls."""
    count = 0
    for equation in jaxpr.eqns:
        count += equation.primitive.name == "select_n" and equation.outvars[0].aval.shape == shape
        for inner in equation.params.values():
            inner = getattr(inner, "jaxpr", inner)
            count += selections(inner, shape) if hasattr(inner, "eqns") else 0
    return count


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("options", [{"where": np.ones((4, 8), bool)}, {"causal": True}], ids=list)
def test_xla_sums_the_terms_that_it_divides(name, options):
    """A selection between the exponentials and their sum would take another kernel.

    There is one before, which leaves elements out, and with `where` one of the rows.
    """
    function = functools.partial(ours, name, implementation="xla", **options)
    jaxpr = jax.make_jaxpr(function)(jnp.ones((3, 4, 8))).jaxpr
    one = name == "logsumexp" or "causal" in options
    assert selections(jaxpr, (3, 4, 8)) == (1 if one else 2)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "complex64"])
def test_masks_of_dtypes_without_kernels(dtype):
    """Some have no -inf."""
    x = jnp.asarray(helpers.normal((3, 40), "float32", scale=3)).astype(dtype)
    where = np.arange(40) % 3 != 0
    for name in FUNCTIONS:
        actual, expected = ours(name, x, where=where), upstream(name, x, where=where)
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual.astype("complex64"), expected.astype("complex64"))


@pytest.mark.kernel
@hypothesis.given(
    data=st.data(),
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    dtype=st.sampled_from(helpers.FLOATS),
    name=st.sampled_from(FUNCTIONS),
    scale=st.sampled_from([1.0, 0.25, -3.0, 0.1, 0.0]),
    special=st.sampled_from([None, -np.inf, np.inf, np.nan]),
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_any_mask(data, shape, dtype, name, scale, special, implementation):
    ndim = len(shape)
    axis = data.draw(st.one_of(st.none(), st.integers(0, ndim - 1), st.just((ndim - 1, 0))))
    axis = 0 if ndim == 1 and isinstance(axis, tuple) else axis
    causal = axis == ndim - 1 and ndim > 1 and data.draw(st.booleans())
    where_shape = tuple(data.draw(st.sampled_from([1, size])) for size in shape)
    where_shape = where_shape[data.draw(st.integers(0, ndim)) :]
    where = np.random.default_rng(data.draw(st.integers(0, 99))).random(where_shape) < 0.6
    x = helpers.normal(shape, dtype, scale=3)
    if special is not None and scale != 0:
        x.flat[data.draw(st.integers(0, x.size - 1))] = special
    options = {"where": where, "scale": scale, "causal": causal}
    with helpers.x64(dtype):
        y = ours(name, x, axis, implementation=implementation, **options)
    assert_accurate(name, y, x, axis, **options)


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("axis", "mask_shape"),
    [
        (-1, (2, 1, 2, 1, 2, 1, 2, 1, 2, 3)),
        ((3, 4), (2, 1, 2, 2, 2, 2, 1)),  # those behind the axes do not go with those before
    ],
)
def test_a_mask_with_many_broadcast_dims(axis, mask_shape, implementation):
    """Kernels follow few changes between dims that the mask has and lacks."""
    x = helpers.normal([max(size, 2) for size in mask_shape], "float32")
    where = np.random.default_rng(0).random(mask_shape) < 0.7
    y = ours("softmax", x, axis, where=where, implementation=implementation)
    assert_accurate("softmax", y, x, axis, where=where)


def test_a_mask_is_not_expanded(implementation):
    def function(x, where):
        return jax_gpuops.softmax(x, where=where, causal=True, implementation=implementation)

    arguments = jnp.zeros((2, 3, 16, 24)), jnp.ones((16, 24), bool)
    text = jax.jit(function).lower(*arguments).compile().as_text()
    assert "pred[1,1,16,24]" in text
    assert "pred[2,3,16,24]" not in text


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_scale_does_not_round_16_bit_floats(name, implementation):
    x = helpers.normal((4, 30), "bfloat16", scale=4)
    y = ours(name, x, scale=0.3, implementation=implementation)
    if name != "logsumexp":
        assert_accurate(name, y, x, scale=0.3)
    wide = upstream(name, x.astype(np.float32), scale=0.3)
    np.testing.assert_array_equal(y, wide.astype(jnp.bfloat16))


@pytest.mark.parametrize("sign", [1, -1])
def test_gradient_of_logsumexp_with_the_largest_scale(sign, implementation):
    scale = sign * float(jnp.finfo(jnp.float32).max) / 4
    x = jnp.array([[1e-36, 0.0]])
    gradient = jax.grad(
        lambda x: jax_gpuops.logsumexp(x, -1, scale=scale, implementation=implementation)[0]
    )(x)
    np.testing.assert_allclose(gradient, scale * jax.nn.softmax(scale * x), rtol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("algorithm", [*LADDER, *UNMASKED])
@pytest.mark.parametrize("option", ["where", "causal", "scale"])
def test_ladders_take_no_options(name, algorithm, option, implementation):
    options = {
        "where": {"where": np.ones(3, bool)},
        "causal": {"causal": True},
        "scale": {"scale": 2},
    }
    with pytest.raises(ValueError, match=f"algorithm '{algorithm}' "):
        jax.jit(
            lambda x: ours(
                name, x, implementation=implementation, algorithm=algorithm, **options[option]
            )
        ).trace(jnp.zeros((2, 3)))


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


# Derivatives


def finite(function):
    """`function` with 0 in place of infinite results, such as log_softmax has where masked."""

    def masked(x):
        y = function(x)
        return jnp.where(jnp.isfinite(y), y, 0)

    return masked


@pytest.mark.any_version
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    "options",
    [
        {"axis": (0, 1)},
        {"axis": -1, "scale": -1.5},
        {"axis": 0, "where": np.arange(12).reshape(3, 4) % 5 != 1, "scale": 0.5},
        {"axis": -1, "where": np.array([[True], [False], [True]])},
        {"axis": -1, "causal": True, "where": np.array([0, 1, 1, 1], bool), "scale": 2.0},
    ],
    ids=str,
)
def test_derivatives_of_any_order(name, options, implementation):
    """In float64, where differences are close; test_transforms has float32 and plain calls."""
    with jax.enable_x64(True):
        check_grads(
            finite(lambda x: ours(name, x, implementation=implementation, **options)),
            (jnp.asarray(helpers.normal((3, 4), "float64")),),
            order=2,
            modes=["fwd", "rev"],
        )


def assert_accurate_cotangent(name, actual, x, y, cotangent, axis=-1, scale=1.0, **options):
    """Checks a cotangent of x against what follows exactly from the result y and its cotangent.

    16-bit ones are rounded once. All have some roundings in the dtype of the computation, relative
    to the terms they are the sum of; exp of an element adds those of its argument.
    """
    keep = kept(x, **options)
    accumulator = np.float64 if actual.dtype == np.float64 else np.float32
    x, y, cotangent = map(helpers.exact, (x, y, cotangent))
    argument = 0
    if name == "softmax":
        total = (y * cotangent).sum(axis, keepdims=True, where=keep)
        magnitude = (np.abs(y * cotangent)).sum(axis, keepdims=True, where=keep)
        expected = scale * y * (cotangent - total)
        terms = y * (np.abs(cotangent) + magnitude)
    elif name == "log_softmax":
        total = cotangent.sum(axis, keepdims=True, where=keep)
        expected = scale * (cotangent - np.exp(y) * total)
        magnitude = np.abs(cotangent).sum(axis, keepdims=True, where=keep)
        terms = np.abs(cotangent) + np.exp(y) * magnitude
    else:
        weights, argument = exact_weights(x, keep, axis, scale)
        expected = scale * weights * np.expand_dims(cotangent, axis)
        terms = np.abs(expected)
    expected = np.where(keep, expected, 0)
    spacing = helpers.spacing(expected, actual.dtype)
    roundings = (16 + 2 * argument) * np.finfo(accumulator).eps * max(1, abs(scale))
    error = np.abs(helpers.exact(actual) - expected)
    assert np.all((error <= spacing + roundings * terms)[keep]), (x.shape, axis, scale, options)
    assert np.all(np.asarray(actual)[~keep] == 0)


def exact_weights(x, keep, axis=-1, scale=1.0):
    """Softmax, and the magnitude of what exp may be taken of for it.

    That is `(scale * x - max(scale * x)) - log(sum)`: however large the elements are, it is not.
    But their products are rounded, unless the scale is a power of two.
    """
    z = np.where(keep, scale * helpers.exact(x), -np.inf)
    shifted = z - z.max(axis, keepdims=True)
    log_sum = np.log(np.exp(shifted).sum(axis, keepdims=True))
    rounded = 0 if np.frexp(scale)[0] in (0.5, -0.5) else np.abs(z)
    argument = np.where(keep, np.abs(shifted) + log_sum + rounded, 0)
    return np.exp(shifted - log_sum), argument


@pytest.mark.any_version
@pytest.mark.parametrize("each", ["ours", "xla", None])
@pytest.mark.parametrize(
    "options",
    [{}, {"scale": -2.0, "causal": True}, {"where": np.arange(301) % 3 != 1}, {"scale": 0.3}],
    ids=["plain", "causal", "masked", "scaled"],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_derivatives_of_logsumexp_are_as_exact_at_any_offset(dtype, options, each, implementation):
    implementation = implementation if each == "ours" else each
    xs = [helpers.with_offset(offset, (5, 301), dtype) for offset in helpers.OFFSETS]
    v = helpers.normal((5, 301), "float32", seed=1).astype(xs[0].dtype)
    scale, keep = options.get("scale", 1.0), np.broadcast_to(kept(xs[0], **options), v.shape)

    def derivatives(x):
        def function(x):
            return ours("logsumexp", x, -1, implementation=implementation, **options)

        def gradient(x):
            return jax.grad(lambda x: function(x).astype("float32").sum())(x)

        return gradient(x), jax.jvp(function, (x,), (v,))[1], jax.jvp(gradient, (x,), (v,))[1]

    def assert_close(actual, expected, terms):
        eps = jnp.finfo(v.dtype if each == "xla" else np.float32).eps  # XLA computes in the dtype
        bound = eps * terms + helpers.spacing(expected, v.dtype)
        assert np.all(np.abs(helpers.exact(actual) - expected) <= bound), x[0, 0]

    results = jax.jit(lambda xs: [derivatives(x) for x in xs])(xs)
    for x, (gradient, tangent, second) in zip(xs, results, strict=True):
        weights, argument = exact_weights(x, keep, scale=scale)
        weights_v = weights * helpers.exact(v)
        total = weights_v.sum(-1, keepdims=True)
        roundings = 16 + 2 * argument
        assert_close(gradient, scale * weights, abs(scale) * roundings * weights)
        terms = (roundings * np.abs(weights_v)).sum(-1, keepdims=True)
        assert_close(tangent, scale * total[:, 0], abs(scale) * terms[:, 0])
        terms = roundings * np.abs(weights_v) + weights * (terms + roundings * np.abs(total))
        assert_close(second, scale**2 * (weights_v - weights * total), scale**2 * terms)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradient(name, dtype, implementation):
    x = helpers.normal((3, 5, 133), dtype, scale=3)
    cotangent = helpers.normal(x.shape[:2] if name == "logsumexp" else x.shape, dtype, seed=1)

    def function(x, cotangent, **options):
        y, pullback = jax.vjp(lambda x: ours(name, x, implementation=implementation, **options), x)
        return y, pullback(cotangent)[0]

    with helpers.x64(dtype):
        results = under_each(OPTIONS, function, x, cotangent)
    for options, (y, actual) in results:
        assert actual.dtype == x.dtype
        assert_accurate_cotangent(name, np.asarray(actual), x, y, cotangent, **options)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradient_under_masks_of_rows_of_any_phase(name, dtype, implementation):
    lengths = (1, 7, 9, 197, 1001)
    xs = [helpers.normal((2, 3, columns), dtype, scale=3) for columns in lengths]
    cases = masked_cases(xs, dtype)
    shapes = [x.shape[:2] if name == "logsumexp" else x.shape for x, _ in cases]
    cotangents = [helpers.normal(shape, dtype, seed=1) for shape in shapes]

    def function(x, cotangent, **options):
        y, pullback = jax.vjp(lambda x: ours(name, x, implementation=implementation, **options), x)
        return y, pullback(cotangent)[0]

    with helpers.x64(dtype):
        results = of_cases(function, cases, cotangents)
    for (x, options), cotangent, (y, actual) in zip(cases, cotangents, results, strict=True):
        assert_accurate_cotangent(name, np.asarray(actual), x, y, cotangent, **options)


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("columns", "mask"),
    [(65, 1), (105, 2), (153, 3), (197, 4), (300, 6), (430, 7), (513, 0), (800, 3)],
)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_masks_of_many_short_rows(name, columns, mask, implementation):
    """Warps take several rows at a time, in packs at a phase of each: here and in the gradient."""
    x = helpers.normal((2, 34_000 * 8 // columns, columns), "bfloat16", scale=3)
    options = masks_of_any_phase(x.shape)[mask]
    cotangent = helpers.normal(x.shape, "bfloat16", seed=1)

    @jax.jit
    def run(x, cotangent):
        y, pullback = jax.vjp(lambda x: ours(name, x, implementation=implementation, **options), x)
        return y, pullback(cotangent)[0]

    y, gradient = run(x, cotangent)
    assert_accurate(name, y, x, **options)
    assert_accurate_cotangent(name, np.asarray(gradient), x, y, cotangent, **options)


TANGENTS = {"softmax": "softmax_tangent", "log_softmax": "log_softmax_cotangent"}


def takes_tangent(algorithm, name, x):
    """As `takes` of a derivative along the last axis."""
    kernel = _primitive.KERNELS[helpers.primitive(TANGENTS[name])]
    implementation = "cuda" if jax.default_backend() == "gpu" else "interpret"
    problem = kernel.problem(x, x, axes=(x.ndim - 1,))
    try:
        _library.planned(implementation, "softmax", problem, algorithm)
    except ValueError:
        return False
    return True


def assert_tangents_accurate(name, cases, dtype, **how):
    """Checks a kernel by name: derivatives of calls let the plan choose one.

    The cases are pairs of an array and options. The map is symmetric, so that the tangent is that
    of the cotangent too.
    """
    ys = [reference(name, x, **options).astype(x.dtype) for x, options in cases]
    ts = [helpers.normal(x.shape, dtype, seed=1) for x, _ in cases]
    masks = [
        [] if where is None else [where.reshape((1,) * (x.ndim - where.ndim) + where.shape)]
        for x, where in ((x, options.get("where")) for x, options in cases)
    ]

    @jax.jit
    def run(ys, ts, masks):
        return [
            helpers.primitive(TANGENTS[name]).bind(
                y,
                t,
                *mask,
                axes=(options.get("axis", -1) % y.ndim,),
                scale=options.get("scale", 1.0),
                causal=options.get("causal", False),
                **how,
            )
            for y, t, mask, (_, options) in zip(ys, ts, masks, cases, strict=True)
        ]

    with helpers.x64(dtype):
        results = run(ys, ts, masks)
    for (x, options), y, t, actual in zip(cases, ys, ts, results, strict=True):
        assert_accurate_cotangent(name, np.asarray(actual), x, y, t, **options)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("name", TANGENTS)
@pytest.mark.parametrize("algorithm", PRODUCTION)
def test_tangents_of_every_production_algorithm(name, algorithm, dtype, implementation):
    lengths = (1, 8, 31, 33, 127, 501)
    cases = [(helpers.normal((5, columns), dtype, scale=3), {}) for columns in lengths]
    how = {"implementation": implementation, "algorithm": algorithm}
    assert_tangents_accurate(name, cases, dtype, **how)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("name", TANGENTS)
@pytest.mark.parametrize("algorithm", ["small_block", "block"])
def test_tangents_of_a_few_rows_of_any_even_length(name, algorithm, dtype, implementation):
    """What small problems have kernels for: one to four packs in each thread of up to 8 warps."""
    lengths = (8, 32, 128, 264, 520, 1000, 2048, 4096, 8192)
    cases = [(helpers.normal((3, columns), dtype, scale=3), {}) for columns in lengths]
    x = helpers.normal((3, 2048), dtype, scale=3)
    where = np.random.default_rng(0).random(x.shape) < 0.5
    where[1] = False
    cases += [(x, {"where": where}), (x, {"causal": True})]
    cases = [(x, options) for x, options in cases if takes_tangent(algorithm, name, x)]
    how = {"implementation": implementation, "algorithm": algorithm}
    assert_tangents_accurate(name, cases, dtype, **how)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", TANGENTS)
@pytest.mark.parametrize("algorithm", LONG)
def test_tangents_of_long_rows(name, algorithm, dtype, implementation):
    lengths = (1023, 4097, 20001)
    cases = [(helpers.normal((2, columns), dtype, scale=3), {}) for columns in lengths]
    how = {"implementation": implementation, "algorithm": algorithm}
    assert_tangents_accurate(name, cases, dtype, **how)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("name", TANGENTS)
def test_tangents_of_rows_that_a_cluster_holds_in_shared_memory(name, dtype, implementation):
    size = jnp.dtype(dtype).itemsize
    rows, row_bytes = 5, (300_000, 300_000 + size, 1 << 19)
    if implementation == "interpret":
        rows, row_bytes = 2, row_bytes[:2]
    shapes = [(rows, bytes_ // size) for bytes_ in row_bytes]
    cases = [(helpers.normal(shape, dtype, scale=3), {}) for shape in shapes]
    cases.append((cases[0][0], {"causal": True}))
    how = {"implementation": implementation, "algorithm": "cluster_shared"}
    assert_tangents_accurate(name, cases, dtype, **how)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("name", TANGENTS)
def test_tangents_of_more_long_rows_than_a_gpu_holds(name, dtype, implementation):
    size = jnp.dtype(dtype).itemsize
    columns = 40_000 // size
    shapes = [(800, columns), (800, columns + 1), (14, 1_400_000 // size + 1), (1, 7000001)]
    if implementation == "interpret":  # its GPU has 4 multiprocessors
        shapes = [(9, columns), (9, columns + 1), (3, 88_000 // size), (1, 200_000 // size + 1)]
    cases = [(helpers.normal(shape, dtype, scale=3), {}) for shape in shapes]
    cases.append((cases[0][0], {"causal": True}))
    for algorithm in ("split", "split_pipelined"):
        taken = [each for each in cases if takes_tangent(algorithm, name, each[0])]
        how = {"implementation": implementation, "algorithm": algorithm}
        assert_tangents_accurate(name, taken, dtype, **how)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", TANGENTS)
@pytest.mark.parametrize("algorithm", PRODUCTION)
@pytest.mark.parametrize("columns", [133, 136])
def test_options_of_tangents(name, algorithm, columns, dtype, implementation):
    taken, x = options_and_operand(algorithm, "softmax", columns, dtype)
    cases = [(x, options) for options in taken]
    how = {"implementation": implementation, "algorithm": algorithm}
    assert_tangents_accurate(name, cases, dtype, **how)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("name", TANGENTS)
def test_tangents_under_masks_of_short_rows_of_every_length(name, dtype, implementation):
    xs = [helpers.normal((2, 3, columns), dtype, scale=3) for columns in SHORT_LENGTHS[:-1]]
    masks = [masks_of_any_phase(x.shape) for x in xs]
    cases = [(x, each[i % len(each)]) for i, (x, each) in enumerate(zip(xs, masks, strict=True))]
    how = {"implementation": implementation, "algorithm": "warp"}
    assert_tangents_accurate(name, cases, dtype, **how)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("name", TANGENTS)
@pytest.mark.parametrize("algorithm", MASKED)
def test_tangents_under_masks_of_rows_of_any_phase(name, algorithm, dtype, implementation):
    size = jnp.dtype(dtype).itemsize
    lengths = [n for n in odd_lengths(algorithm) if 2 * n * size <= LONGEST.get(algorithm, np.inf)]
    xs = [helpers.normal((2, 3, columns), dtype, scale=3) for columns in lengths]
    long = helpers.normal((1, 1, 40001), dtype, scale=3)
    with helpers.x64(dtype):
        xs += [long] if takes_tangent(algorithm, name, long) else []
    cases = masked_cases(xs, dtype)
    how = {"implementation": implementation, "algorithm": algorithm}
    assert_tangents_accurate(name, cases, dtype, **how)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", TANGENTS)
@pytest.mark.parametrize("inner", [8, 13])
@pytest.mark.parametrize(
    ("algorithm", "lengths"),
    [("column", (1, 33, 250)), ("column_two_pass", (1, 1023)), ("column_split", (1, 1023))],
)
def test_tangents_of_columns(name, inner, algorithm, lengths, dtype, implementation):
    cases = []
    for columns in lengths:
        x = helpers.normal((2, columns, inner), dtype, scale=3)
        where = np.random.default_rng(0).random((columns, 1)) < 0.6
        cases += [(x, {"axis": 1}), (x, {"axis": 1, "where": where})]
    how = {"implementation": implementation, "algorithm": algorithm}
    assert_tangents_accurate(name, cases, dtype, **how)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("name", TANGENTS)
def test_tangents_of_columns_of_rows_that_packs_would_not_fit(name, dtype, implementation):
    outer = helpers.multiprocessors(implementation) // 2
    xs = [helpers.normal((outer, columns, 197), dtype, scale=3) for columns in (2, 21, 100)]
    how = {"implementation": implementation, "algorithm": "column"}
    assert_tangents_accurate(name, [(x, {"axis": 1}) for x in xs], dtype, **how)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("name", TANGENTS)
def test_tangents_of_columns_that_blocks_hold_in_strips(name, dtype, implementation):
    shapes = [(2, columns, 200) for columns in (129, 257, 700, 2300, 2500, 4096)]
    shapes.append((3, 150, 2184))
    if implementation == "interpret":
        shapes = [(2, 129, 200), (1, 700, 72), (1, 2300, 72)]
    xs = [helpers.normal(shape, dtype, scale=3) for shape in shapes]
    how = {"implementation": implementation, "algorithm": "strip"}
    assert_tangents_accurate(name, [(x, {"axis": 1}) for x in xs], dtype, **how)


@pytest.mark.kernel
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("axis", [0, 1])
def test_gradient_of_any_length(name, axis, implementation):
    lengths = (1, 3, 33, 1001, 5000)
    shapes = [(3, columns) if axis == 1 else (columns, 3) for columns in lengths]
    xs = [helpers.normal(shape, "float32", scale=3) for shape in shapes]
    ts = [helpers.normal(3 if name == "logsumexp" else s, "float32", seed=1) for s in shapes]

    def function(x, t):
        y, pullback = jax.vjp(lambda x: ours(name, x, axis, implementation=implementation), x)
        return y, pullback(t)[0]

    for x, t, (y, actual) in zip(xs, ts, of_each(function, xs, ts), strict=True):
        assert_accurate_cotangent(name, np.asarray(actual), x, y, t, axis)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("each", ["ours", None])
def test_jvp_and_vjp_as_in_jax(name, each, implementation):
    implementation = implementation if each == "ours" else None
    x, t = (helpers.normal((3, 5, 133), "float32", seed) for seed in range(2))
    cotangent = helpers.normal(x.shape[:2] if name == "logsumexp" else x.shape, "float32", seed=2)

    def derivatives(function, x, t, cotangent, **options):
        function = finite(functools.partial(function, name, **options))
        return jax.jvp(function, (x,), (t,)), jax.vjp(function, x)[1](cotangent)

    actual, expected = (
        under_each(OPTIONS, functools.partial(derivatives, function), x, t, cotangent)
        for function in (functools.partial(ours, implementation=implementation), upstream)
    )
    assert_same = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(assert_same, [y for _, y in actual], [y for _, y in expected])


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("special", [-np.inf, np.inf, np.nan])
@pytest.mark.parametrize("each", ["ours", None])
def test_gradients_of_special_rows_as_in_jax(name, special, each, implementation):
    """One special element, a row of only these, and a row that the mask leaves out."""
    implementation = implementation if each == "ours" else None
    x = helpers.normal((4, 7), "float32")
    x[0, 2] = x[1] = x[2] = special
    where = np.arange(4)[:, None] != 2

    def gradient(function):
        return jax.grad(lambda x: finite(lambda x: function(name, x, where=where))(x).sum())(x)

    np.testing.assert_allclose(
        gradient(functools.partial(ours, implementation=implementation)),
        gradient(upstream),
        atol=1e-6,
    )


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("special", [np.nan, np.inf])
@pytest.mark.parametrize("each", ["ours", "xla"])
def test_masked_values_have_no_gradient(name, causal, special, each, implementation):
    """Nor does what comes back for them: of log_softmax there, -inf, it is often not finite."""
    implementation = implementation if each == "ours" else each
    x = helpers.normal((4, 20), "float32")
    where = np.arange(20) % 4 != 1
    x[:, 1] = special
    if causal:
        x[2, 3:] = special
    options = {"where": where, "causal": causal, "implementation": implementation}
    y, pullback = jax.vjp(lambda x: ours(name, x, **options), x)
    keep = kept(x, where, causal)
    cotangent = np.ones(y.shape, np.float32)
    if name != "logsumexp":
        cotangent = np.where(keep, cotangent, special)
    (gradient,) = pullback(jnp.asarray(cotangent))
    assert np.all(np.asarray(gradient)[~keep] == 0)
    assert np.all(np.isfinite(gradient))


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("each", ["ours", "xla", None])
def test_results_of_masked_elements_are_constants(name, each, implementation):
    """Their tangents are 0, and what comes back for them has no effect, to second order."""
    implementation = implementation if each == "ours" else each
    x, t, *cotangents = (helpers.normal((3, 5, 133), "float32", seed) for seed in range(4))

    def derivatives(function, x, t, cotangents, **options):
        function = functools.partial(function, name, **options)

        def gradient(x):
            return jax.vjp(function, x)[1](cotangents[0])[0]

        of_each_cotangent = jax.vmap(jax.vjp(function, x)[1])(jnp.stack(cotangents))
        return jax.jvp(function, (x,), (t,)), of_each_cotangent, jax.jvp(gradient, (x,), (t,))

    actual, expected = (
        under_each(OPTIONS, functools.partial(derivatives, function), x, t, cotangents)
        for function in (functools.partial(ours, implementation=implementation), upstream)
    )
    assert_same = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(assert_same, [y for _, y in actual], [y for _, y in expected])


@pytest.mark.parametrize("algorithm", [*LADDER, *UNMASKED, "warp"])
def test_gradient_of_a_named_algorithm(algorithm, implementation):
    """Ladders have no derivatives of their own; those of the plan's choice take their place."""
    x = helpers.normal((4, 33), "float32")

    def loss(x, **kwargs):
        return (jax_gpuops.softmax(x, implementation=implementation, **kwargs) ** 2).sum()

    gradient = jax.grad(functools.partial(loss, algorithm=algorithm))(x)
    np.testing.assert_allclose(gradient, jax.grad(loss)(x), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("softmax", {"softmax_v1", "softmax_tangent_v1"}),
        ("log_softmax", {"log_softmax_v1", "log_softmax_cotangent_v1"}),
        ("logsumexp", {"logsumexp_with_residuals_v1", "logsumexp_cotangent_v2"}),
    ],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_gradients_run_our_kernels(name, targets, axis, implementation):
    calls = helpers.custom_calls(
        jax.grad(lambda x: (ours(name, x, axis, implementation=implementation) ** 2).sum()),
        jnp.zeros((4, 8)),
    )
    assert set(calls) == {f"jax_gpuops_{target}" for target in targets}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("in_axis", [0, 1, 2])
@pytest.mark.parametrize("axis", [0, 1])
def test_vmap(name, in_axis, axis, implementation):
    x = helpers.normal((4, 6, 8), "float32")
    y = jax.vmap(lambda x: ours(name, x, axis, implementation=implementation), in_axis)(x)
    expected = jax.vmap(lambda x: upstream(name, x, axis), in_axis)(x)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("x_axis", "where_axis"), [(0, None), (1, 0), (2, 1), (None, 0)])
@pytest.mark.parametrize(("axis", "causal"), [(0, False), (1, False), (1, True)])
def test_vmap_of_masks(name, x_axis, where_axis, axis, causal, implementation):
    x = helpers.normal((6, 6, 6)[: 2 if x_axis is None else 3], "float32")
    where = np.random.default_rng(0).random((6, 6) if where_axis is not None else 6) < 0.7
    axes = (x_axis, where_axis)

    def results(function):
        def mapped(x):
            return jax.vmap(
                lambda x, where: function(name, x, axis, where=where, causal=causal), axes
            )(x, where)

        return jax.jit(lambda x: (mapped(x), jax.grad(lambda x: finite(mapped)(x).sum())(x)))(x)

    y, gradient = results(functools.partial(ours, implementation=implementation))
    expected_y, expected_gradient = results(upstream)
    np.testing.assert_allclose(y, expected_y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_custom_call_is_in_the_program(name, implementation):
    calls = helpers.custom_calls(
        lambda x: ours(name, x, implementation=implementation), jnp.zeros((4, 8))
    )
    assert any(call.startswith(f"jax_gpuops_{name}_v1") for call in calls)


@pytest.mark.any_version
@pytest.mark.parametrize("algorithm", [*LADDER, *UNMASKED, *PRODUCTION])
def test_repeats_are_bit_identical(algorithm, implementation):
    x = helpers.normal((9, 333), "float32", scale=5)
    runs = [
        np.asarray(ours("softmax", x, implementation=implementation, algorithm=algorithm))
        for _ in range(3)
    ]
    np.testing.assert_array_equal(runs[0].view(np.int32), runs[1].view(np.int32))
    np.testing.assert_array_equal(runs[0].view(np.int32), runs[2].view(np.int32))


@pytest.mark.kernel
@pytest.mark.parametrize("algorithm", [*LADDER, *UNMASKED, *PRODUCTION])
def test_any_order_of_threads(algorithm, implementation):
    """A missing barrier gives other numbers under some order of the threads."""
    if implementation != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    x = helpers.normal((5, 100), "float32")
    helpers.under_each_schedule(
        lambda: ours("softmax", x, implementation=implementation, algorithm=algorithm),
        [(seed, {}) for seed in range(1, 5)],
    )


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("algorithm", "row_bytes", "shape", "axis", "warps"),
    [
        ("cluster", 140_000, (2, 0), -1, (0, 1, 7)),
        ("cluster_shared", 530_000, (2, 0), -1, (0, 3, 7)),
        # Two groups of two blocks. Behind 24 or 22 warps with pieces of rows come one that posts
        # states and one that collects those of the other block.
        ("split_pipelined", 80_000, (18, 0), -1, (0, 10, 22, 23, 24, 25)),
        ("strip", None, (300, 136), 0, (0, 8, 15)),  # strips of one block
        ("strip", None, (1500, 72), 0, (0, 8, 15)),  # and of several
        ("column", None, (40, 131), 0, (0, 1, 3)),  # whose tiles are in shared memory, in lines
        ("staged", None, (700, 33), -1, (0, 3, 7)),
    ],
    ids=["cluster", "cluster_shared", "split_pipelined", "strip", "strips", "column", "staged"],
)
def test_any_order_of_blocks_and_copies(
    algorithm, row_bytes, shape, axis, warps, dtype, implementation
):
    """Blocks that work together, and copies beside the threads: with copies that come late, early
    or at any time, and with any of the blocks or warps held back as long as others can run."""
    if implementation != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    if row_bytes is not None:
        shape = (shape[0], row_bytes // jnp.dtype(dtype).itemsize)
    x = helpers.normal(shape, dtype, scale=4)
    schedules = [
        *((seed, {}) for seed in range(1, 4)),
        *((seed, {"warp": warp}) for seed, warp in enumerate(warps)),
        *((seed, {"block": block}) for seed, block in enumerate((0, 1, 3))),
    ]
    schedules = [each for i, each in enumerate(schedules) if helpers.taken_in_turn(i, dtype)]
    y = helpers.under_each_schedule(
        lambda: ours("softmax", x, axis, implementation=implementation, algorithm=algorithm),
        schedules,
    )
    assert_accurate("softmax", y, x, axis)


@pytest.mark.kernel
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", ["c", "r, c", "r, 1"])
def test_export_with_symbolic_shapes(name, causal, mask, implementation):
    def function(x, where):
        return ours(name, x, where=where, causal=causal, implementation=implementation)

    scope = jax.export.SymbolicScope()
    x_shape, mask_shape = (jax.export.symbolic_shape(s, scope=scope) for s in ("r, c", mask))
    exported = jax.export.export(
        jax.jit(function),
        platforms=[{"interpret": "cpu"}.get(implementation, implementation)],
        disabled_checks=jax_gpuops.EXPORT_CHECKS,
    )(jax.ShapeDtypeStruct(x_shape, "float32"), jax.ShapeDtypeStruct(mask_shape, "bool"))
    for shape in ((5, 33), (1, 7), (2, 40000)):
        x, where = helpers.normal(shape, "float32"), np.arange(np.prod(shape)) % 3 != 1
        sizes = dict(zip("rc", shape, strict=True)) | {"1": 1}
        where = np.resize(where, [sizes[each] for each in mask.split(", ")])
        assert_accurate(name, exported.call(x, where), x, where=where, causal=causal)


@pytest.mark.kernel
@pytest.mark.parametrize("algorithm", [None, "column_split"])
@pytest.mark.parametrize("shape", ["a, 5000, b", "a, c, b"])
def test_export_with_symbolic_sizes_around_an_axis(shape, algorithm, implementation):
    """The fewer elements follow the axis, the more blocks share it, each with workspace."""

    def function(x):
        return ours("softmax", x, 1, implementation=implementation, algorithm=algorithm)

    exported = jax.export.export(
        jax.jit(function),
        platforms=[{"interpret": "cpu"}.get(implementation, implementation)],
        disabled_checks=jax_gpuops.EXPORT_CHECKS,
    )(jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), "float32"))
    for outer, inner in ((1, 16), (1, 3), (3, 40)):
        x = helpers.normal((outer, 5000, inner), "float32")
        assert_accurate("softmax", exported.call(x), x, 1)


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


BEYOND_INT = 2**31 + 5


@pytest.mark.large
@pytest.mark.parametrize("algorithm", ["block_two_pass", "split"])
def test_a_row_longer_than_32_bits_count(algorithm, implementation):
    x = jax.lax.rem(jax.lax.iota(jnp.uint32, BEYOND_INT), jnp.uint32(7)).astype(jnp.bfloat16)[None]
    options = {"algorithm": algorithm, "implementation": implementation}
    per_value = np.bincount(np.arange(BEYOND_INT % 7), minlength=7) + BEYOND_INT // 7
    lse = np.log(np.sum(per_value * np.exp(np.arange(7.0))))
    y = jax_gpuops.softmax(x, **options)
    worst = jax.jit(lambda x, y: jnp.max(jnp.abs(y / jnp.exp(x.astype(jnp.float32) - lse) - 1)))
    assert worst(x, y) < 2**-8
    result = jax_gpuops.logsumexp(x, **options).astype(np.float32)
    np.testing.assert_allclose(result, [lse], rtol=2**-8)


@pytest.mark.large
def test_masked_rows_longer_than_32_bits_count(implementation):
    """Flags that all rows share lie at another phase than the second row. And the gradient."""
    x = jnp.zeros((2, BEYOND_INT), jnp.bfloat16)
    where = jnp.ones(BEYOND_INT, bool)

    def total(x):
        return jnp.sum(jax_gpuops.logsumexp(x, -1, where=where, implementation=implementation))

    share = np.array(2.0**-31, jnp.bfloat16)
    two_pass = {"algorithm": "block_two_pass", "implementation": implementation}
    for result in (jax_gpuops.softmax(x, where=where, **two_pass), jax.grad(total)(x)):
        # On the host: indices of XLA's operations have 32 bits.
        assert np.all(np.asarray(result).view(np.uint16) == share.view(np.uint16))


@pytest.mark.large
def test_a_causal_row_longer_than_32_bits_count(implementation):
    """Most of it lies more than 2^31 elements behind the last that takes part."""
    x = jnp.ones((2, BEYOND_INT - BEYOND_INT % 8 + 8), jnp.bfloat16)
    y = jax_gpuops.softmax(x, causal=True, implementation=implementation)
    np.testing.assert_array_equal(y[:, :2].astype(np.float32), [[1, 0], [0.5, 0.5]])
    assert jnp.sum(y != 0) == 3


@pytest.mark.large
def test_more_elements_than_33_bits_count(implementation):
    rows, columns = 2**18 + 1, 2**15

    @jax.jit
    def draw():
        row, column = (jax.lax.broadcasted_iota(jnp.int32, (rows, columns), d) for d in (0, 1))
        return ((row * 31 + column) % 13).astype(jnp.bfloat16)

    x = draw()
    y = jax_gpuops.softmax(x, implementation=implementation)
    for first in range(0, rows, 2**15):  # XLA's autotuning copies what it sums
        total = jnp.sum(y[first : first + 2**15], axis=1, dtype=jnp.float32)
        np.testing.assert_allclose(total, np.ones(total.size), atol=2**-8)
    for part in (slice(0, 8), slice(2**17, 2**17 + 8), slice(-8, None)):
        expected = jax.nn.softmax(x[part].astype(jnp.float32))
        np.testing.assert_allclose(y[part].astype(np.float32), expected, rtol=2**-8)


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
    with pytest.raises(TypeError, match="dtype int32, only float16, bfloat16, float32"):
        jax_gpuops.softmax(integers, implementation=implementation)
    x, b = jnp.ones(4), jnp.arange(4.0)
    np.testing.assert_array_equal(jax_gpuops.logsumexp(x, b=b), jax.nn.logsumexp(x, b=b))
    with pytest.raises(ValueError, match="do not support b or return_sign"):
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
            "'warp' cannot hold rows of 4000 float32 elements",
        ),
        (
            lambda x, i: jax_gpuops.softmax(x, 0, implementation=i, algorithm="warp"),
            ValueError,
            "'warp' supports only the last axis; 'strided' supports any axis",
        ),
        (
            lambda x, i: jax_gpuops.softmax(x, where=x > 0, implementation=i, algorithm="staged"),
            ValueError,
            "'staged' supports only rows of at most 1024 elements along the last axis",
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
            lambda x, i: jax_gpuops.softmax(x, implementation=np.array(["cuda", "xla"])),
            ValueError,
            "implementation must be None or one of",
        ),
        (
            lambda x, i: jax_gpuops.softmax(x, implementation="xla", algorithm="warp"),
            ValueError,
            "implementation is 'xla'",
        ),
        (lambda x, i: jax_gpuops.softmax(x, algorithm=3), TypeError, "algorithm must be None or a"),
        (
            lambda x, i: jax_gpuops.softmax(x, scale=x[0, 0]),
            TypeError,
            "scale must be a Python num",
        ),
        (lambda x, i: jax_gpuops.softmax(x, scale=np.ones(2)), TypeError, "scale must be a Python"),
        (lambda x, i: jax_gpuops.softmax(x, scale="2"), TypeError, "got str; to scale by an array"),
        (
            lambda x, i: jax_gpuops.softmax(x, scale=np.str_("2")),
            TypeError,
            "got str_; to scale by",
        ),
        (lambda x, i: jax_gpuops.softmax(x, scale=np.nan), ValueError, "scale must be finite, got"),
        (lambda x, i: jax_gpuops.softmax(x, scale=np.inf), ValueError, "scale must be finite, got"),
        (
            lambda x, i: jax_gpuops.softmax(x, scale=1.5e38, implementation=i),
            ValueError,
            r"must be at most 8.51e\+37, got scale 1.5e\+38",
        ),
        (lambda x, i: jax_gpuops.softmax(x, np.arange(2.0)), TypeError, "axis must be an int, a t"),
        (lambda x, i: jax_gpuops.softmax(x, x), TypeError, r"axis must be .*, got .*float32\[2"),
        (
            lambda x, i: jax_gpuops.softmax(x, scale=-1e-39, implementation=i),
            ValueError,
            r"must be 0 or at least 1.18e-38, got scale -1e-39",
        ),
        (lambda x, i: jax_gpuops.softmax(x, where=[True]), TypeError, "where must be an array"),
        (lambda x, i: jax_gpuops.softmax(x, causal=1), TypeError, "causal must be True or False"),
        (
            lambda x, i: jax_gpuops.softmax(x, 0, causal=True),
            ValueError,
            "at least two dims and its last axis",
        ),
        (
            lambda x, i: jax_gpuops.softmax(x[0], causal=True),
            ValueError,
            "at least two dims and its last axis",
        ),
        (
            lambda x, i: jax_gpuops.logsumexp(x, causal=True),
            ValueError,
            r"causal=True needs .* got axis=None and a of shape \(2, 3\)",
        ),
        (
            lambda x, i: jax_gpuops.logsumexp(x, -1, b=x, scale=2.0),
            ValueError,
            "scale and causal cannot be combined with b or return_sign",
        ),
        (
            lambda x, i: jax_gpuops.logsumexp(x, -1, return_sign=True, causal="no"),
            TypeError,
            "causal must be True or False, got 'no'",
        ),
    ],
)
def test_bad_input_is_named_at_trace_time(call, error, text, implementation):
    with pytest.raises(error, match=text):
        jax.jit(lambda x: call(x, implementation)).trace(jnp.zeros((2, 3)))
