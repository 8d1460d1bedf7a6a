"""batch_invariant=True in reductions: a row has the same bits in every batch."""

import functools
import inspect

import helpers
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_moments
import test_reduce
from conftest import HAS_GPU
from hypothesis import strategies as st
from jax.test_util import check_grads

import jax_gpuops as ops
from jax_gpuops import _library, _primitive

FOLDS = ("sum", "prod", "max", "min", "mean")
ARGS = ("argmax", "argmin")
MOMENTS = ("var", "std", "mean_and_var")
FUNCTIONS = (*FOLDS, *ARGS, *MOMENTS)
MASKING = (*FOLDS, *MOMENTS)
EXTREMES = ("max", "min", *ARGS)

# By some lanes, by a warp, by a block, by a cluster, and by more blocks: whole packs and not.
LENGTHS = [1, 3, 128, 197, 1000, 5001, 65_001, 140_000, 300_001]
ROWS = 70 if HAS_GPU else 3
COUNTS = [1, *([3, 33, 64] if HAS_GPU else [])]


@pytest.fixture(params=FUNCTIONS)
def name(request):
    return request.param


@pytest.fixture
def reduce(name, implementation):
    """The function, whose results are always a list."""

    def reduce(x, axis=-1, **options):
        how = {"implementation": implementation, "batch_invariant": True, **options}
        return jax.tree.leaves(getattr(ops, name)(x, axis, **how))

    return reduce


def upstream(name, x, axis=-1, **options):
    """The same function of numpy or of `jax.numpy`."""
    xp = np if isinstance(x, np.ndarray) else jnp
    each = ["mean", "var"] if name == "mean_and_var" else [name]
    return [getattr(xp, one)(x, axis, **options) for one in each]


def data(name, shape, dtype, seed=0):
    """Numbers of both signs; for `prod`, numbers near 1, of which many have a product."""
    if name == "prod" and dtype in helpers.FLOATS:
        x = helpers.normal(shape, "float64", seed)
        return (1 + x / 64).astype(helpers.np_dtype(dtype))
    return test_reduce.data(shape, dtype, seed)


def assert_right(name, ys, x):
    """Checks results of rows along the last axis in float64."""
    if name == "mean_and_var":
        test_moments.assert_right(ys, x, -1)
    elif name in MOMENTS:
        (y,) = ys
        bound = 1e-12 if y.dtype == np.float64 else 1e-5
        bound += float(jnp.finfo(y.dtype).eps) if y.dtype.itemsize == 2 else 0
        (expected,) = upstream(name, helpers.exact(x))
        np.testing.assert_allclose(helpers.exact(y), expected, rtol=bound, atol=0)
    else:
        test_reduce.assert_right(name, ys[0], x)


def bits(y):
    return np.asarray(y).view(f"uint{8 * y.dtype.itemsize}")


def assert_same_bits(actual, expected):
    for y, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(bits(y), bits(other))


def rows_of(ys, rows):
    return [y[rows] for y in ys]


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_number_of_rows(dtype, name, reduce):
    xs = [data(name, (ROWS, columns), dtype) for columns in LENGTHS]
    parts = [slice(count) for count in COUNTS] + [slice(-count, None) for count in COUNTS]
    everything = jax.jit(lambda xs: [reduce(x) for x in xs])(xs)
    apart = jax.jit(lambda xs: [[reduce(x[part]) for part in parts] for x in xs])(xs)
    for x, ys, of_parts in zip(xs, everything, apart, strict=True):
        assert_right(name, ys, x)
        for part, zs in zip(parts, of_parts, strict=True):
            assert_same_bits(zs, rows_of(ys, part))


@pytest.mark.kernel
@pytest.mark.parametrize(
    "dtype", ["float16", "float64", "int8", "uint8", "int16", "int32", "uint64"]
)
def test_any_dtype(dtype, name, reduce):
    if name in MOMENTS and dtype not in helpers.FLOATS:
        pytest.skip("kernels take floats")
    with helpers.x64(dtype):
        xs = [data(name, (ROWS, columns), dtype) for columns in (1, 197, 1501)]
        results = jax.jit(lambda xs: [(reduce(x), reduce(x[2:3])) for x in xs])(xs)
        for x, (ys, of_one) in zip(xs, results, strict=True):
            assert_right(name, ys, x)
            assert_same_bits(of_one, rows_of(ys, slice(2, 3)))


@pytest.mark.kernel
@pytest.mark.parametrize("columns", [197, 5001, 140_000])
def test_any_neighbours(columns, name, reduce):
    """Infinities, NaN and large elements leave other rows alone."""
    x = data(name, (5, columns), "float32")
    others = np.array(x)
    others[1::4], others[2::4], others[3::4] = 1e30 * x[1::4], np.inf, np.nan
    each_fourth = slice(None, None, 4)
    beside_others, ys = jax.jit(lambda others, x: (reduce(others), reduce(x)))(others, x)
    assert_same_bits(rows_of(beside_others, each_fourth), rows_of(ys, each_fourth))


@pytest.mark.kernel
@pytest.mark.parametrize("columns", [1, 100, 1500])
def test_any_axis(columns, name, reduce):
    """Along the last axis, another one or several, and under vmap."""
    x = data(name, (6, columns), "bfloat16")
    shape = (6, max(1, columns // 10), min(columns, 10))

    def in_each_way(x, transposed, column, stacked, apart):
        yield reduce(x)
        yield reduce(transposed, 0)
        yield [y.squeeze(0) for y in reduce(transposed, 0, keepdims=True)]
        yield jax.vmap(reduce)(x)
        yield jax.vmap(reduce, 1)(transposed)
        yield jax.vmap(functools.partial(reduce, axis=None))(x.reshape(6, -1, 1))
        yield rows_of(jax.vmap(lambda each: reduce(each, 1), 2)(stacked), 0)
        if name not in ARGS:
            yield reduce(x.reshape(shape), (1, 2))
            yield reduce(apart, (0, 2))
        yield reduce(column, None)

    arrays = x, x.T, x[2].reshape(-1, 1), np.stack([x, x + x], 2), x.reshape(shape).swapaxes(0, 1)
    ys, *others, of_column = jax.jit(lambda *arrays: list(in_each_way(*arrays)))(*arrays)
    for zs in others:
        assert_same_bits(zs, ys)
    assert_same_bits(of_column, rows_of(ys, 2))


@pytest.mark.kernel
@pytest.mark.parametrize("name", MASKING)
@pytest.mark.parametrize(
    "shape", [(6, 64, 64), (6, 1, 197), (1, 197, 197), (6, 197, 1), (6, 1, 1), (197,)], ids=str
)
def test_masks(shape, name, reduce):
    """Of all elements, of columns, of rows; some rows are left out as a whole."""
    x = data(name, (6, 64, 64) if 64 in shape else (6, 197, 197), "float32")
    where = np.random.default_rng(0).random(shape) < 0.5
    options = {"initial": 0} if name in ("max", "min") else {}
    batches = [slice(None), slice(0, 1), slice(5, 6)]
    arrays = [(x[batch], where[batch] if shape[0] == 6 else where) for batch in batches]
    program = jax.jit(lambda arrays: [reduce(x, where=where, **options) for x, where in arrays])
    ys, *of_one = program(arrays)
    for batch, zs in zip(batches[1:], of_one, strict=True):
        assert_same_bits(zs, rows_of(ys, batch))
    if name == "mean_and_var":
        test_moments.assert_right(ys, x, -1, where)
        return
    full = np.broadcast_to(where, x.shape)
    is_empty = ~full.any(-1)
    kept = np.where(is_empty[..., None], True, full)  # numpy warns of a mean of nothing
    (expected,) = upstream(name, helpers.exact(x), where=kept, **options)
    if name in ("mean", *MOMENTS):
        expected = np.where(is_empty, np.nan, expected)
    else:
        expected = np.where(is_empty, float(name == "prod"), expected)
    np.testing.assert_allclose(helpers.exact(ys[0]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.kernel
@pytest.mark.parametrize("name", MASKING)
def test_masks_of_rows_that_are_mostly_filled_up(name, reduce):
    """Of one element, where a mask of rows and one of elements look alike, and of three."""
    for columns in (1, 3):
        x = data(name, (5, columns), "bfloat16")
        where = np.ones((5, columns), bool)
        where[3] = False
        options = {"initial": 0} if name in ("max", "min") else {}
        ys = reduce(x, where=where, **options)
        assert_same_bits(reduce(x, where=where[:, :1], **options), ys)
        plain = reduce(x, **options)
        included = np.array([0, 1, 2, 4])
        assert_same_bits(rows_of(ys, included), rows_of(plain, included))


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize("dtype", ["int8", "uint32"])
def test_masks_of_integers(dtype, name, reduce):
    x = data(name, (5, 131), dtype)
    where = np.random.default_rng(0).random(x.shape) < 0.5
    options = {"initial": 1} if name in ("max", "min") else {}
    (y,) = reduce(x, where=where, **options)
    if name in ("sum", "prod"):
        expected = getattr(np, name)(x, -1, where=where, dtype=y.dtype)
    else:
        (expected,) = upstream(name, x, where=where, **options)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.kernel
@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("columns", [1, 3, 197, 5001])
def test_rows_of_what_they_are_filled_up_with(columns, name, reduce):
    """The place of an extreme is that of an element of the row, the first of equal ones."""
    values = [(np.float32, v) for v in (-np.inf, np.inf, np.nan)]
    values += [(dtype, v) for dtype in (np.int8, np.uint8, np.int32) for v in _limits(dtype)]
    for dtype, value in values:
        (y,) = reduce(np.full((3, columns), value, dtype))
        np.testing.assert_array_equal(y, 0 if name in ARGS else value)


def _limits(dtype):
    return np.iinfo(dtype).min, np.iinfo(dtype).max


@pytest.mark.kernel
@pytest.mark.parametrize("options", [{"initial": 3}, {"dtype": "float32"}, {"dtype": "bfloat16"}])
def test_arguments_of_sums(options, implementation):
    how = {"batch_invariant": True, "implementation": implementation}
    for dtype in ("bfloat16", "float32", "int8"):
        x = data("sum", (4, 131), dtype)
        y = ops.sum(x, -1, **options, **how)
        expected = jnp.sum(x, -1, **options)
        assert y.dtype == expected.dtype
        assert_same_bits([ops.sum(x[1:2], -1, **options, **how)], [y[1:2]])
        rounded = float(jnp.finfo(y.dtype).eps) if y.dtype in (jnp.bfloat16, jnp.float32) else 0
        np.testing.assert_allclose(
            helpers.exact(y), helpers.exact(expected), rtol=2 * rounded, atol=100 * rounded
        )


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("name", "columns"),
    [
        (name, columns)
        for name in MASKING
        for columns in (1, 131, 1500, 20_001)
        if name != "prod" or columns <= 131  # JAX's derivative of long ones takes long to compile
    ],
)
def test_gradients(columns, name, reduce):
    x = data(name, (5, columns), "float32")

    def pulled_back(x, cotangents):
        ys, pullback = jax.vjp(reduce, x)
        return ys, pullback(cotangents)[0]

    count = len(jax.eval_shape(reduce, x))
    cotangents = [helpers.normal((5,), "float32", seed=1 + i) for i in range(count)]
    ys, gradient = jax.jit(pulled_back)(x, cotangents)
    assert_same_bits(ys, reduce(x))
    _, part = jax.jit(pulled_back)(x[1:3], rows_of(cotangents, slice(1, 3)))
    assert_same_bits([part], [gradient[1:3]])
    if name == "std" and columns == 1:
        return  # the root has no derivative at 0
    with jax.enable_x64(True):
        wide, wide_cotangents = jax.tree.map(helpers.exact, (jnp.asarray(x), cotangents))
        (expected,) = jax.jit(lambda x, ts: jax.vjp(functools.partial(upstream, name), x)[1](ts))(
            wide, wide_cotangents
        )
        gradient, expected = np.asarray(gradient), np.asarray(expected)
    scale = np.abs(expected).max(-1, keepdims=True)
    assert np.all(np.abs(gradient - expected) <= 1e-5 * np.abs(expected) + 1e-6 * scale)


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["max", "min"])
def test_gradients_of_rows_that_are_infinite_throughout(name, reduce):
    """What they are filled up with has no part of the gradient."""
    x = np.full((3, 5), {"max": -np.inf, "min": np.inf}[name], np.float32)
    x[1, 2] = 0
    gradient = jax.grad(lambda x: reduce(x)[0].sum())(x)
    np.testing.assert_array_equal(gradient[1], [0, 0, 1, 0, 0])
    np.testing.assert_allclose(gradient[::2], 0.2)


@pytest.mark.any_version
@pytest.mark.parametrize("name", ["sum", "mean", "var", "mean_and_var", "max"])
def test_derivatives_with_masks(name, reduce):
    """In forward and reverse mode, of masked rows that are filled up."""
    x = helpers.normal((4, 131), "float32")
    t = helpers.normal(x.shape, "float32", seed=1)
    where = np.random.default_rng(0).random(x.shape) < 0.7
    options = {"where": where} | ({"initial": -9} if name == "max" else {})
    _, tangents = jax.jvp(lambda x: reduce(x, **options), (x,), (t,))
    with jax.enable_x64(True):
        wide, wide_t = jnp.asarray(x, "float64"), jnp.asarray(t, "float64")
        _, expected = jax.jvp(lambda x: upstream(name, x, **options), (wide,), (wide_t,))
    for actual, true in zip(tangents, expected, strict=True):
        np.testing.assert_allclose(actual, true, rtol=1e-5, atol=1e-5)

    def gradient_of(x, where):
        ys, pullback = jax.vjp(lambda x: reduce(x, **{**options, "where": where}), x)
        return pullback([jnp.ones_like(y) for y in ys])[0]

    for mask in (where, where[:1]):  # one for each row, or one for all
        gradient = gradient_of(x, mask)
        part = gradient_of(x[:1], mask[:1])
        assert_same_bits([part], [gradient[:1]])
    gradient = gradient_of(x, where)
    assert not np.any(np.asarray(gradient)[~where])
    np.testing.assert_allclose(
        np.sum(gradient * t, -1), np.sum(np.stack(expected), 0), rtol=1e-5, atol=1e-5
    )


@pytest.mark.any_version
@pytest.mark.parametrize("name", ["max", "mean", "mean_and_var"])
def test_derivatives_of_any_order(reduce):
    x = helpers.normal((3, 7), "float32")
    modes = ["fwd", "rev"]
    check_grads(reduce, (x,), order=2, modes=modes, atol=2e-2, rtol=2e-2, eps=1e-2)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
@pytest.mark.parametrize("name", ["sum", "max", "mean_and_var"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_rows_of_several_devices(kind, name, reduce):
    x = helpers.normal((8, 131), "float32")
    ys = reduce(x)
    mesh = jax.make_mesh((2,), ("rows",), (jax.sharding.AxisType[kind],))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P("rows")))
        zs = jax.jit(reduce)(sharded)
        assert all(z.sharding.spec[0] == "rows" for z in zs)
        assert_same_bits(zs, ys)
        if kind == "Explicit":
            with pytest.raises(ValueError, match="sharded along the reduced axes"):
                reduce(sharded, 0)


FIELDS = {"inner": 1, "alignment": 16, "workspace": _primitive.WORKSPACE_AS_ASKED}


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(
    function=st.sampled_from(["sum", "prod", "max", "min", "argmax", "argmin", "mean_and_var"]),
    dtype=st.sampled_from(["float32", "bfloat16", "float64", "int8", "int32"]),
    packs=st.one_of(st.integers(1, 2**10), st.integers(1, 2**18)),
    counts=st.tuples(*[st.integers(1, 2**24)] * 2),
    masked=st.booleans(),
)
def test_plans_say_the_same_of_any_number_of_rows(
    function, dtype, packs, counts, masked, implementation
):
    """With the workspace that a row has, which does not depend on their number either."""
    is_float = dtype in helpers.FLOATS
    hypothesis.assume(is_float or function != "mean_and_var")
    problem = {
        "function": function,
        "dtype": dtype,
        "result": "int32" if function.startswith("arg") else dtype,
        "columns": packs * 16 // np.dtype(jnp.dtype(dtype)).itemsize,
        "masked": int(masked and is_float and not function.startswith("arg")),
        **FIELDS,
    }

    def planned(outer):
        each = {**problem, "outer": outer, "algorithm": "batch_invariant"}
        room = _library.module(implementation).workspace("reduce", each)
        given = problem | {"outer": outer, "workspace": outer * room}
        plan = _library.planned(implementation, "reduce", given, "batch_invariant")
        assert plan["config"]["workspace"] <= outer * room
        config = {k: v for k, v in plan["config"].items() if k != "workspace"}
        return room, plan["algorithm"], plan["reason"], config

    assert planned(counts[0]) == planned(counts[1])


@pytest.mark.parametrize(
    ("function", "dtype", "columns", "algorithm"),
    [
        ("sum", "float32", 12, "held"),
        ("sum", "bfloat16", 24, "held"),
        ("sum", "float32", 64, "held"),
        ("sum", "bfloat16", 128, "held"),
        ("mean_and_var", "float32", 12, "row"),
        ("mean_and_var", "float32", 64, "held"),
        ("mean_and_var", "bfloat16", 128, "held"),
    ],
)
def test_plans_say_the_same_of_more_rows_than_an_int32_counts(
    function, dtype, columns, algorithm, implementation
):
    """Whose partial results another algorithm would add in another order."""
    problem = {"function": function, "dtype": dtype, "result": "float32", "masked": 0, **FIELDS}

    def planned(outer):
        given = problem | {"outer": outer, "columns": columns}
        return _library.planned(implementation, "reduce", given, "batch_invariant")

    expected = planned(1)
    assert expected["algorithm"] == algorithm
    for outer in ((1 << 31) - 1, 1 << 31, (1 << 32) - 1025):
        assert planned(outer) == expected


def test_rows_are_not_divided_otherwise_where_workspace_is_lacking(implementation):
    problem = {"function": "sum", "dtype": "float32", "result": "float32", "masked": 0, **FIELDS}
    problem |= {"outer": 1, "columns": 1 << 22, "workspace": 4}
    with pytest.raises(ValueError, match="the workspace is too small"):
        _library.planned(implementation, "reduce", problem, "batch_invariant")


def test_it_is_a_kernel_or_an_error(implementation):
    x = np.ones((8, 8), np.float32)
    with pytest.raises(ValueError, match="batch_invariant=True asks for a kernel"):
        ops.sum(x, batch_invariant=True, implementation="xla")
    with ops.use("xla"), pytest.raises(ValueError, match="asks for a kernel"):
        ops.var(x, batch_invariant=True)
    with pytest.raises(ValueError, match="chooses the algorithm, but algorithm is 'row'"):
        ops.argmax(x, -1, batch_invariant=True, algorithm="row")
    with pytest.raises(ValueError, match="'batch_invariant' is unknown"):
        ops.mean_and_var(x, algorithm="batch_invariant")
    with pytest.raises(TypeError, match="must be True or False, got 1"):
        ops.max(x, batch_invariant=1)
    with pytest.raises(TypeError, match="not support dtype complex64"):
        ops.sum(x.astype(np.complex64), batch_invariant=True)
    with pytest.raises(ValueError, match="batch_invariant=True cannot run this, leave it"):
        ops.var(x, -1, mean=x[:, :1], batch_invariant=True)
    with (
        ops.use(implementation, strict=False),
        pytest.raises(TypeError, match="not support dtype int32"),
    ):
        ops.std(x.astype(np.int32), -1, batch_invariant=True)
    with pytest.raises(ValueError, match=r"where of shape \(3, 8, 8\) does not broadcast"):
        ops.sum(x, -1, where=np.ones((3, 8, 8), bool), batch_invariant=True)


def test_the_plan_is_that_of_a_kernel(name, implementation):
    how = {"batch_invariant": True, "implementation": implementation, "axis": -1}
    plan = ops.plan(name, (8, 131), "float32", **how)
    algorithm = "row" if name in MOMENTS else "held"
    assert (plan.implementation, plan.algorithm) == (implementation, algorithm)
    assert "batch_invariant" in inspect.signature(getattr(ops, name)).parameters


@pytest.mark.skipif(HAS_GPU, reason="moves buffers of the host")
def test_rows_at_other_addresses_are_an_error():
    """The threads that read an element would be others."""
    x = np.ones((8, 8), np.float32)
    for function in (ops.sum, ops.argmin, ops.var):
        with helpers.buffers_at(4), pytest.raises(jax.errors.JaxRuntimeError, match="aligned to"):
            function(x, -1, batch_invariant=True, implementation="interpret").block_until_ready()
