"""scaled_matmul against float64: kinds of scales, tiles, layouts, batches, and what is refused."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_gpuops

FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]
FLOATS = ["bfloat16", "float16", "float32"]
DTYPES = [
    *((dtype, result) for dtype in FLOAT8 for result in FLOATS),
    *(("int8", result) for result in (*FLOATS, "int8")),
]
"""Of factors and of results."""
KINDS = ["tensor", "vector", "blocks"]
TILES = {
    (64, 128): {"interpret": (72, 136, 200), "cuda": (72, 136, 200)},
    (128, 256): {"interpret": (200, 320, 136), "cuda": (2000, 2000, 136)},
}
"""For each tile, m, n and k that the plan gives it to: the host simulates 4 multiprocessors."""


@pytest.fixture
def on_tensor_cores(implementation):
    """The options of a call by the kernel, which not every GPU can run."""
    shapes = [(8, 8), (8, 8)]
    return helpers.options("matmul", "tensor_core", implementation, shapes, "bfloat16")


def scale(shape, seed, size=1.0):
    """Scales that differ by up to a factor of 16, and are no powers of two."""
    return (size * 2 ** np.random.default_rng(seed).uniform(-2, 2, shape)).astype(np.float32)


def blocks(extent):
    return -(-extent // 128)


def scale_of_a(kind, batch, m, k, seed=2, size=1.0):
    dims = {"tensor": (1, 1), "vector": (m, 1), "blocks": (m, blocks(k))}
    return scale((*batch, *dims[kind]), seed, size)


def scale_of_b(kind, batch, k, n, seed=3, size=1.0):
    dims = {"tensor": (1, 1), "vector": (1, n), "blocks": (blocks(k), blocks(n))}
    return scale((*batch, *dims[kind]), seed, size)


def assert_scaled_product(actual, a, b, a_scale, b_scale, *, promoted=False):
    """Checks a result that is rounded once from scaled sums, in the error that these may have.

    Sums of int8 are exact. Those of 8-bit floats are cut off at 2**-13 of the largest product or of
    the sum so far, 32 products at a time, or with `promoted` 128 at a time, which are added in
    float32.
    """
    actual = np.asarray(actual)
    a_wide, b_wide = helpers.dequantised(a, a_scale), helpers.dequantised(b, b_scale)
    exact, magnitude = a_wide @ b_wide, np.abs(a_wide) @ np.abs(b_wide)
    assert actual.shape == exact.shape
    steps = -(-a.shape[-1] // 32)
    bound = (steps / 4 + 4) * 2.0**-23 * magnitude
    if a.dtype != np.int8:
        bound = bound + 34 * 2.0**-13 * magnitude * (min(steps, 4) if promoted else steps)
    if actual.dtype == np.int8:
        exact = np.clip(exact, -128, 127)
        bound = bound + 0.5
    elif actual.dtype != np.float32:
        bound = bound + helpers.spacing(exact, actual.dtype)
    assert np.all(np.abs(helpers.exact(actual) - exact) <= bound)
    if actual.dtype == np.int8:
        assert len(np.unique(actual)) > min(actual.size / 4, 100)


def operands(dtype, result, kind, m, n, k, batch=()):
    """Factors and scales, by which most results of int8 are within the range of theirs."""
    a = helpers.factor_of_8_bits((*batch, m, k), dtype)
    b = helpers.factor_of_8_bits((*batch, k, n), dtype, seed=1)
    size = {"int8": 100, "float16": 500}.get(result, 1e6) / (5400 * max(k, 1) ** 0.5)
    size = size if dtype == "int8" else 1.0
    a_scale = scale_of_a(kind, (1,) * len(batch), m, k, size=size)
    return a, b, a_scale, scale_of_b(kind, (1,) * len(batch), k, n)


def kinds_of(dtype):
    return [kind for kind in KINDS if dtype != "int8" or kind != "blocks"]


def precisions_of(dtype):
    return ["default"] if dtype == "int8" else ["default", "highest"]


# The kernel


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("dtype", "result", "kind", "precision"),
    [(d, r, k, p) for d, r in DTYPES for k in kinds_of(d) for p in precisions_of(d)],
)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_kernel(tile, dtype, result, kind, precision, on_tensor_cores):
    """With rows, columns and a depth that no tile and no block divides."""
    m, n, k = TILES[tile][on_tensor_cores["implementation"]]
    k += 152  # three stages, the last one not full
    a, b, a_scale, b_scale = operands(dtype, result, kind, m, n, k)
    with helpers.recorded(on_tensor_cores["implementation"]) as executions:
        y = jax_gpuops.scaled_matmul(
            a,
            helpers.swap(b),
            a_scale,
            helpers.swap(b_scale),
            transpose_b=True,
            precision=precision,
            preferred_element_type=result,
            **on_tensor_cores,
        )
        jax.block_until_ready(y)
    (execution,) = executions
    config, problem = execution["config"], execution["problem"]
    assert (config["tile_rows"], config["tile_cols"]) == tile
    assert (problem["a_scale"], problem["b_scale"]) == (kind, kind)
    promoted = kind == "blocks" or precision == "highest"
    assert config["promotes"] == promoted
    assert y.dtype == result
    assert_scaled_product(y, a, b, a_scale, b_scale, promoted=promoted)


SIZES = [
    *((1, 1, 1), (3, 5, 7), (1, 129, 128), (129, 1, 129)),
    *((63, 127, 127), (64, 128, 128), (65, 129, 255), (127, 255, 256), (129, 257, 257)),
    *((136, 272, 144), (16, 512, 384)),
]


@pytest.mark.kernel
@pytest.mark.parametrize(("dtype", "result"), [("float8_e4m3fn", "bfloat16"), ("int8", "int8")])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_edges(sizes, transpose_b, dtype, result, on_tensor_cores):
    """Sizes around tiles and blocks, with b by rows and by columns, and each kind of scale."""
    m, n, k = sizes
    for kind in kinds_of(dtype):
        a, b, a_scale, b_scale = operands(dtype, result, kind, m, n, k)
        y = jax_gpuops.scaled_matmul(
            a,
            helpers.stored(b, transpose_b),
            a_scale,
            helpers.stored(b_scale, transpose_b),
            transpose_b=transpose_b,
            preferred_element_type=result,
            **on_tensor_cores,
        )
        assert_scaled_product(y, a, b, a_scale, b_scale, promoted=kind == "blocks")


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("a_kind", "b_kind"),
    [
        *((a, b) for a in ("tensor", "vector") for b in ("tensor", "vector")),
        *(("blocks", "tensor"), ("tensor", "blocks"), ("vector", "blocks"), ("blocks", "blocks")),
    ],
)
def test_kinds_of_scales_beside_each_other(a_kind, b_kind, on_tensor_cores):
    m, n, k = 70, 140, 300
    a = helpers.factor_of_8_bits((m, k), "float8_e4m3fn")
    b = helpers.factor_of_8_bits((k, n), "float8_e4m3fn", seed=1)
    a_scale, b_scale = scale_of_a(a_kind, (), m, k), scale_of_b(b_kind, (), k, n)
    y = jax_gpuops.scaled_matmul(a, b, a_scale, b_scale, precision="highest", **on_tensor_cores)
    assert y.dtype == np.float32
    assert_scaled_product(y, a, b, a_scale, b_scale, promoted=True)


@pytest.mark.kernel
@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_blocks_are_applied_to_their_blocks_alone(kind, on_tensor_cores):
    """All products are 1, so that each result is the sum of the scales that belong to it."""
    m, n, k = 66, 260, 390
    a, b = np.ones((m, k), np.int8), np.ones((k, n), np.int8)
    a, b = a.astype(helpers.np_dtype("float8_e4m3fn")), b.astype(helpers.np_dtype("float8_e4m3fn"))
    random = np.random.default_rng(0)
    a_scale, b_scale = (
        2.0 ** random.integers(-3, 4, shape).astype(np.float32)
        for shape in (scale_of_a(kind, (), m, k).shape, scale_of_b(kind, (), k, n).shape)
    )
    y = jax_gpuops.scaled_matmul(a, b, a_scale, b_scale, **on_tensor_cores)
    np.testing.assert_array_equal(
        y, helpers.dequantised(a, a_scale) @ helpers.dequantised(b, b_scale)
    )


@pytest.mark.kernel
@pytest.mark.parametrize("result", ["int8", *FLOATS])
def test_int8_is_rounded_once(result, on_tensor_cores):
    """Sums are exact in int32, and are multiplied by the scale of a and then by that of b."""
    a, b, a_scale, b_scale = operands("int8", result, "vector", 130, 264, 200)
    if result == "int8":
        a_scale[::2] *= 40  # results that are out of range, too
    how = on_tensor_cores | {"preferred_element_type": result}
    y = np.asarray(jax_gpuops.scaled_matmul(a, b, a_scale, b_scale, **how))
    sums = a.astype(np.int32) @ b.astype(np.int32)
    scaled = sums.astype(np.float32) * a_scale * b_scale
    if result == "int8":
        scaled = np.clip(np.rint(scaled), -128, 127)
        assert {-128, 127} <= set(y.ravel().tolist())
    np.testing.assert_array_equal(y, scaled.astype(y.dtype))


@pytest.mark.kernel
def test_int8_of_nan_is_0(on_tensor_cores):
    """As XLA converts it; infinities saturate."""
    a, b = np.ones((3, 16), "int8"), np.ones((16, 4), "int8")
    a_scale = np.array([[np.nan], [np.inf], [-np.inf]], "float32")
    how = on_tensor_cores | {"preferred_element_type": "int8"}
    y = jax_gpuops.scaled_matmul(a, b, a_scale, 1.0, **how)
    np.testing.assert_array_equal(np.asarray(y)[:, 0], [0, 127, -128])


@pytest.mark.kernel
def test_int8_is_rounded_to_nearest_even(on_tensor_cores):
    halves = np.arange(-300, 301, dtype=np.float32)[:, None] / 2
    one = np.ones((1, 1), np.int8)
    a = np.ones((halves.size, 1), np.int8)
    how = on_tensor_cores | {"preferred_element_type": "int8"}
    y = jax_gpuops.scaled_matmul(a, one, halves, 1.0, **how)
    np.testing.assert_array_equal(y, np.clip(np.rint(halves), -128, 127))


@pytest.mark.kernel
@pytest.mark.parametrize("kind", KINDS)
def test_special_scales_stay_in_their_row_and_column(kind, on_tensor_cores):
    m, n, k = 130, 260, 200
    a, b, a_scale, b_scale = operands("float8_e4m3fn", "float32", kind, m, n, k)
    a, b = (np.abs(x.astype(np.float32)) + 1 for x in (a, b))
    a, b = (x.astype(helpers.np_dtype("float8_e4m3fn")) for x in (a, b))
    a_scale[-1, 0], b_scale[0, -1] = np.inf, np.nan
    y = jax_gpuops.scaled_matmul(a, b, a_scale, b_scale, **on_tensor_cores)
    expected = helpers.dequantised(a, a_scale) @ helpers.dequantised(b, b_scale)
    for which in (np.isnan, np.isposinf, np.isfinite):
        np.testing.assert_array_equal(which(y), which(expected))


@pytest.mark.kernel
@pytest.mark.parametrize("kind", KINDS)
def test_scales_that_are_far_from_one(kind, on_tensor_cores):
    """The scale of a first: neither the product of both nor a sum without its own overflows."""
    a, b, a_scale, b_scale = operands("float8_e4m3fn", "float32", kind, 8, 16, 256)
    how = on_tensor_cores | {"precision": "highest"}
    for power in (-60, 60):
        scales = a_scale * np.float32(2.0**power), b_scale * np.float32(2.0**-power)
        assert_scaled_product(
            jax_gpuops.scaled_matmul(a, b, *scales, **how), a, b, *scales, promoted=True
        )


@pytest.mark.kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(
    ("a_batch", "b_batch", "a_scales", "b_scales"),
    [
        ((3,), (3,), (3,), (3,)),
        ((3,), (3,), (1,), (3,)),
        ((3,), (3,), (3,), (1,)),
        ((3,), (), (3,), ()),
        ((3,), (1,), (1,), (1,)),
        ((), (3,), (), (3,)),
        ((2, 1), (2, 3), (2, 1), (1, 3)),
        ((2, 3), (1, 1), (1, 3), (1, 1)),
    ],
)
def test_batches(a_batch, b_batch, a_scales, b_scales, transpose_b, kind, on_tensor_cores):
    m, n, k = 24, 136, 144
    a = helpers.factor_of_8_bits((*a_batch, m, k), "float8_e4m3fn")
    b = helpers.factor_of_8_bits((*b_batch, k, n), "float8_e4m3fn", seed=1)
    a_scale, b_scale = scale_of_a(kind, a_scales, m, k), scale_of_b(kind, b_scales, k, n)
    y = jax_gpuops.scaled_matmul(
        a,
        helpers.stored(b, transpose_b),
        a_scale,
        helpers.stored(b_scale, transpose_b),
        transpose_b=transpose_b,
        **on_tensor_cores,
    )
    assert_scaled_product(y, a, b, a_scale, b_scale, promoted=kind == "blocks")


@pytest.mark.kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "axes",
    [
        *((0, None, None, None), (1, None, 1, None), (None, 1, None, 0), (0, 2, 0, None)),
        *((None, None, 0, None), (None, None, None, 1), (None, 0, 0, None), (0, 0, 0, 0)),
    ],
    ids=str,
)
def test_vmap(axes, kind, on_tensor_cores):
    m, n, k = 24, 40, 144
    whole = operands("float8_e4m3fn", "float32", kind, m, n, k)
    xs = [
        x if axis is None else np.stack([x, x[::-1], x[:, ::-1]], axis)
        for x, axis in zip(whole, axes, strict=True)
    ]
    y = jax.vmap(functools.partial(jax_gpuops.scaled_matmul, **on_tensor_cores), axes)(*xs)
    full = [
        np.broadcast_to(x, (3, *x.shape)) if axis is None else np.moveaxis(x, axis, 0)
        for x, axis in zip(xs, axes, strict=True)
    ]
    for i in range(3):
        assert_scaled_product(y[i], *(x[i] for x in full), promoted=kind == "blocks")


def test_vmap_of_vmap(on_tensor_cores):
    m, n, k = 8, 24, 144
    a, b, a_scale, b_scale = operands("float8_e4m3fn", "float32", "blocks", m, n, k)
    a = np.stack([a, -a, a[::-1]])
    b = np.stack([b, b[:, ::-1]])
    product = functools.partial(jax_gpuops.scaled_matmul, **on_tensor_cores)
    inner = jax.vmap(product, (0, None, None, None))
    y = jax.vmap(inner, (None, 0, None, None))(a, b, a_scale, b_scale)
    for i in range(2):
        for j in range(3):
            assert_scaled_product(y[i, j], a[j], b[i], a_scale, b_scale, promoted=True)


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("dtype", "kind"), [(d, kind) for d in ("float8_e4m3fn", "int8") for kind in kinds_of(d)]
)
def test_batch_invariant(dtype, kind, on_tensor_cores):
    """A row has the same bits whatever the number of rows is, and the tile by which it is done."""
    how = {"implementation": on_tensor_cores["implementation"], "batch_invariant": True}
    m, n, k = 300, 136, 200
    a, b, a_scale, b_scale = operands(dtype, "float32", kind, m, n, k)
    for precision in precisions_of(dtype):
        product = functools.partial(jax_gpuops.scaled_matmul, precision=precision, **how)
        expected = product(a, b, a_scale, b_scale)
        for rows in (1, 7, 64, 129):
            own = a_scale if kind == "tensor" else a_scale[-rows:]
            helpers.assert_same_bits(product(a[-rows:], b, own, b_scale), expected[-rows:])
    with pytest.raises(ValueError, match="scales of blocks only for 8-bit floats"):
        product(a.astype(np.int8), b.astype(np.int8), np.ones((m, 2), np.float32), 1.0)


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("dtype", "kind"), [*(("float8_e4m3fn", kind) for kind in KINDS), ("int8", "vector")]
)
def test_any_order_of_threads(dtype, kind, on_tensor_cores):
    if on_tensor_cores["implementation"] != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    result = "int8" if dtype == "int8" else "bfloat16"
    xs = operands(dtype, result, kind, 200, 320, 272)
    how = on_tensor_cores | {"preferred_element_type": result}
    helpers.under_each_schedule(
        lambda: jax_gpuops.scaled_matmul(*xs, **how), [(seed, {}) for seed in range(1, 4)]
    )


@pytest.mark.kernel
@pytest.mark.parametrize(("dtype", "result"), DTYPES)
@pytest.mark.parametrize("sizes", [(131, 257, 129), (200, 512, 16)], ids=str)
def test_results_are_written_whole(sizes, dtype, result, on_tensor_cores):
    """Over a donated array, of NaN or of -1."""
    xs = operands(dtype, result, "vector", *sizes)
    how = on_tensor_cores | {"preferred_element_type": result}

    @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
    def product(poison, *xs):
        del poison
        return jax_gpuops.scaled_matmul(*xs, **how)

    m, n, _ = sizes
    poison = jnp.full((m, n), -1 if result == "int8" else np.nan, result)
    assert_scaled_product(product(poison, *xs), *xs)


@pytest.mark.kernel
def test_a_factor_that_a_batch_shares_is_not_repeated(on_tensor_cores):
    xs = operands("float8_e4m3fn", "float32", "vector", 16, 32, 48)
    a, b, a_scale, b_scale = xs
    with helpers.recorded(on_tensor_cores["implementation"]) as executions:
        rows = jax_gpuops.scaled_matmul(
            np.stack([a, -a]), b, a_scale[None], b_scale, **on_tensor_cores
        )
        batch = jax_gpuops.scaled_matmul(
            a, np.stack([b, -b]), a_scale, b_scale[None], **on_tensor_cores
        )
        jax.block_until_ready((rows, batch))
    problems = [execution["problem"] for execution in executions]
    sizes = [[each[key] for key in ("batch", "m", "share_a", "share_b")] for each in problems]
    assert sizes == [[1, 32, 1, 1], [2, 16, 1, 0]]
    np.testing.assert_array_equal(rows, batch)


@pytest.mark.kernel
@pytest.mark.parametrize("kind", KINDS)
def test_a_by_columns(kind, on_tensor_cores):
    """What no argument of the public function reaches: its target takes a as it takes b."""
    m, n, k = 140, 130, 272
    a, b, a_scale, b_scale = operands("float8_e4m3fn", "float32", kind, m, n, k)
    call = jax.ffi.ffi_call(
        "jax_gpuops_scaled_matmul_v1",
        [jax.ShapeDtypeStruct((m, n), "float32"), jax.ShapeDtypeStruct((1 << 18,), "uint8")],
    )
    how = {"algorithm": "", "precision": "HIGHEST", "epilogue": "none"}
    how |= {"alpha": np.float64(1), "beta": np.float64(0)}
    xs = map(helpers.swap, (a, b, a_scale, b_scale))
    y, _ = call(*xs, transpose_a=True, transpose_b=True, **how)
    assert_scaled_product(y, a, b, a_scale, b_scale, promoted=True)


# XLA, and what is chosen


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(("dtype", "result"), DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_plain_jax(kind, dtype, result, transpose_b):
    """XLA takes all kinds of scales, and is what runs where nothing was measured."""
    a, b, a_scale, b_scale = operands(dtype, result, kind, 20, 140, 150)
    b, stored, b_stored = b, helpers.stored(b, transpose_b), helpers.stored(b_scale, transpose_b)
    how = {"preferred_element_type": result, "transpose_b": transpose_b, "precision": "highest"}

    def product(*xs):
        return jax_gpuops.scaled_matmul(*xs, **how)

    assert helpers.custom_calls(product, a, stored, a_scale, b_stored) == []
    y = product(a, stored, a_scale, b_stored)
    assert y.dtype == result
    assert_scaled_product(y, a, b, a_scale, b_scale)
    named = jax_gpuops.scaled_matmul(a, stored, a_scale, b_stored, implementation="xla", **how)
    helpers.assert_same_bits(named, y)


@pytest.mark.parametrize("k", [2, 3, 5, 7, 9, 33])
def test_plain_jax_of_int8_of_any_depth(k):
    """XLA doubles such products on an H100 unless the depth it sees is a multiple of 4."""
    a, b, *scales = operands("int8", "float32", "vector", 4, 5, k)
    assert_scaled_product(jax_gpuops.scaled_matmul(a, b, *scales), a, b, *scales)
    depth = -(-k // 4) * 4
    text = jax.jit(jax_gpuops.scaled_matmul).lower(a, b, *scales).as_text()
    assert f"(tensor<4x{depth}xi8>, tensor<{depth}x5xi8>)" in text


def test_plain_jax_of_two_kinds_of_floats(implementation):
    a, _, *scales = operands("float8_e4m3fn", "float32", "vector", 9, 10, 11)
    _, b, *_ = operands("float8_e5m2", "float32", "vector", 9, 10, 11)
    assert_scaled_product(jax_gpuops.scaled_matmul(a, b, *scales), a, b, *scales)
    with pytest.raises(TypeError, match="of the same dtype, one of float8_e4m3fn, "):
        jax_gpuops.scaled_matmul(a, b, *scales, implementation=implementation)


def test_plain_jax_of_columns_beside_blocks(on_tensor_cores):
    m, n, k = 9, 140, 150
    a, b, a_scale, _ = operands("float8_e4m3fn", "float32", "blocks", m, n, k)
    b_scale = scale_of_b("vector", (), k, n)
    y = jax_gpuops.scaled_matmul(a, b, a_scale, b_scale, precision="highest")
    assert_scaled_product(y, a, b, a_scale, b_scale)
    with pytest.raises(
        ValueError, match="scales of the columns of b together with those of blocks"
    ):
        jax_gpuops.scaled_matmul(a, b, a_scale, b_scale, **on_tensor_cores)


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_and_xla_agree(kind, on_tensor_cores):
    xs = operands("float8_e4m3fn", "float32", kind, 40, 140, 300)
    how = {"precision": "highest"}
    ours = jax_gpuops.scaled_matmul(*xs, **how, **on_tensor_cores)
    xla = jax_gpuops.scaled_matmul(*xs, **how, implementation="xla")
    error = np.linalg.norm(np.asarray(ours) - np.asarray(xla)) / np.linalg.norm(xla)
    assert error < 3e-4


def test_the_kernel_is_in_the_program(on_tensor_cores):
    xs = operands("float8_e4m3fn", "float32", "vector", 16, 32, 48)
    how = {"implementation": on_tensor_cores["implementation"]}
    product = functools.partial(jax_gpuops.scaled_matmul, **how)
    (call,) = helpers.custom_calls(product, *xs)
    assert call.startswith("jax_gpuops_scaled_matmul_v1")
    (call,) = jax_gpuops.explain(product, *xs).calls
    assert (call.op, call.plan.algorithm) == ("scaled_matmul", "tensor_core")
    (call,) = jax_gpuops.explain(jax_gpuops.scaled_matmul, *xs).calls
    assert (call.op, call.plan.implementation) == ("scaled_matmul", "xla")
    plan = jax_gpuops.plan(
        "scaled_matmul", [(16, 48), (48, 32)], "int8", a_scale=0.5, b_scale=0.25, **how
    )
    assert plan.algorithm == "tensor_core"


@pytest.mark.parametrize(
    "scalar",
    [2, 2.0, np.int32(2), np.float16(2), np.float32(2), jnp.float32(2), jnp.full((1, 1), 2.0)],
    ids=lambda scalar: f"{type(scalar).__name__}{np.ndim(scalar)}",
)
def test_scales_of_a_tensor(scalar, on_tensor_cores):
    x = jnp.ones((8, 16), "float8_e4m3fn")
    for how in (on_tensor_cores, {"implementation": "xla"}):
        y = jax_gpuops.scaled_matmul(x, x, scalar, scalar, transpose_b=np.True_, **how)
        np.testing.assert_array_equal(y, np.full((8, 8), 64))


@pytest.mark.parametrize("sizes", [(0, 4, 3), (3, 0, 4), (3, 4, 0)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_arrays_without_elements(kind, sizes, on_tensor_cores):
    m, n, k = sizes
    xs = operands("float8_e4m3fn", "bfloat16", kind, m, n, k)
    how = on_tensor_cores | {"preferred_element_type": "bfloat16"}
    np.testing.assert_array_equal(jax_gpuops.scaled_matmul(*xs, **how), np.zeros((m, n)))


# Refusals


def fp8(*shape):
    return jnp.ones(shape, "float8_e4m3fn")


def ones(*shape, dtype="float32"):
    return jnp.ones(shape, dtype)


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda f: f(ones(4, 8), fp8(8, 4), 1.0, 1.0), TypeError, "but a is of dtype float32"),
        (
            lambda f: f(fp8(4, 8), ones(8, 4, dtype="bfloat16"), 1.0, 1.0),
            TypeError,
            "but b is of dtype bfloat16; multiply such arrays by their scales and",
        ),
        (
            lambda f: f(fp8(4, 8), ones(8, 4, dtype="int8"), 1.0, 1.0),
            TypeError,
            "both be integers or both floats, got float8_e4m3fn and int8",
        ),
        (
            lambda f: f(fp8(4, 8), fp8(8, 4), ones(dtype="bfloat16"), 1.0),
            TypeError,
            "a_scale must have dtype float32, got bfloat16; cast it",
        ),
        (
            lambda f: f(fp8(4, 8), fp8(8, 4), 1.0, np.ones((1, 4), int)),
            TypeError,
            "b_scale must have dtype float32, got int32; cast it",
        ),
        (
            lambda f: f(fp8(4, 8), fp8(8, 4), 1j, 1.0),
            TypeError,
            "a_scale must have dtype float32, got complex64",
        ),
        (
            lambda f: f(fp8(4, 8), fp8(8, 4), [1.0], 1.0),
            TypeError,
            "a_scale must be a number or an array, got list",
        ),
        (
            lambda f: f(fp8(4, 8), fp8(8, 4), 10**400, 1.0),
            ValueError,
            "a_scale must be finite, got an int of that size",
        ),
        *(
            (
                lambda f, dtype=dtype: f(fp8(4, 8), fp8(8, 4), 1, 1, preferred_element_type=dtype),
                TypeError,
                f"preferred_element_type must be a dtype or None, got {dtype!r}",
            )
            for dtype in ("", 0, "single_precision")
        ),
        (
            lambda f: f(fp8(4, 8), fp8(8, 4), 1.0, 1.0, transpose_b="no"),
            TypeError,
            "transpose_b must be True or False, got 'no'",
        ),
        (
            lambda f: f(fp8(4, 8), fp8(8, 4), 1.0, 1.0, preferred_element_type="int8"),
            TypeError,
            "bfloat16 or float16 or float32 for a of dtype float8_e4m3fn, got int8",
        ),
        (
            lambda f: f(*[ones(8, 8, dtype="int8")] * 2, 1.0, 1.0, preferred_element_type="int32"),
            TypeError,
            "or float32 or int8 for a of dtype int8, got int32",
        ),
        (lambda f: f(fp8(8), fp8(8, 4), 1.0, 1.0), ValueError, "a must have at least two dim"),
        (
            lambda f: f(fp8(4, 8), fp8(4, 8), 1.0, 1.0),
            ValueError,
            r"b of shape \(..., k, n\), got \(4, 8\) and \(4, 8\)",
        ),
        (
            lambda f: f(fp8(4, 8), fp8(8, 4), 1.0, 1.0, transpose_b=True),
            ValueError,
            r"b of shape \(..., n, k\), since transpose_b is True, got",
        ),
        (
            lambda f: f(fp8(2, 4, 8), fp8(3, 8, 4), 1.0, 1.0),
            ValueError,
            "batch dimensions do not broadcast",
        ),
        *(
            (
                lambda f, shape=shape: f(fp8(4, 300), fp8(300, 5), ones(*shape), 1.0),
                ValueError,
                r"a_scale must be a number or, for a of shape \(4, 300\), have the shape "
                r"\(1, 1\), or \(4, 1\) with a scale for each row, or \(4, 3\) with a scale for",
            )
            for shape in [(4,), (1, 4), (4, 300), (4, 2), (1, 3), (1, 4, 1), (300, 1)]
        ),
        *(
            (
                lambda f, shape=shape: f(fp8(4, 300), fp8(300, 200), 1.0, ones(*shape)),
                ValueError,
                r"b_scale must be .* \(1, 200\) with a scale for each column, or \(3, 2\) with",
            )
            for shape in [(200,), (200, 1), (3, 200), (3, 1), (300, 2), (2, 3)]
        ),
        (
            lambda f: f(fp8(4, 300), fp8(200, 300), 1.0, ones(1, 200), transpose_b=True),
            ValueError,
            r"b_scale must be .* \(200, 1\) with a scale for each column, or \(2, 3\) with",
        ),
        (
            lambda f: f(fp8(2, 4, 8), fp8(8, 4), ones(3, 4, 1), 1.0),
            ValueError,
            r"\(4, 1\) with a .* block of 128, after the batch dimensions of a or 1; got",
        ),
    ],
)
def test_bad_arguments(call, error, text, kernel, implementation):
    """They are named when the call is traced, whatever is to run."""
    how = {"implementation": implementation} if kernel else {}
    with pytest.raises(error, match=text):
        call(functools.partial(jax_gpuops.scaled_matmul, **how))


def test_other_algorithms_refuse_8_bits(on_tensor_cores):
    how = {"implementation": on_tensor_cores["implementation"]}
    for name in [a.name for a in jax_gpuops.algorithms("matmul") if a.name != "tensor_core"]:
        with pytest.raises(
            ValueError, match=f"algorithm '{name}' (does not support float8|is CUDA only)"
        ):
            jax_gpuops.scaled_matmul(fp8(8, 8), fp8(8, 8), 1.0, 1.0, algorithm=name, **how)


def test_the_kernel_has_no_blocks_of_int8(on_tensor_cores):
    x = ones(8, 256, dtype="int8")
    how = {"transpose_b": True, "implementation": on_tensor_cores["implementation"]}
    with pytest.raises(ValueError, match="scales of blocks only for 8-bit floats, not for int8"):
        jax_gpuops.scaled_matmul(x, x, ones(8, 2), 1.0, **how)
    with jax_gpuops.use(on_tensor_cores["implementation"], strict=False):
        y = jax_gpuops.scaled_matmul(x, x, ones(8, 2), 1.0, transpose_b=True)
    np.testing.assert_array_equal(y, np.full((8, 8), 256))


@pytest.mark.parametrize("argument", range(4))
@pytest.mark.parametrize("kernel", [False, True])
def test_derivatives_are_refused(kernel, argument, implementation):
    """With respect to factors and scales, forward and in reverse, and through what comes before."""
    how = {"implementation": implementation} if kernel else {}
    xs = [fp8(8, 16), fp8(16, 8), ones(8, 1), ones(1, 8)]

    def loss(x):
        return jax_gpuops.scaled_matmul(*xs[:argument], x, *xs[argument + 1 :], **how).sum()

    for derivative in (jax.grad(loss), lambda x: jax.jvp(loss, (x,), (x,))):
        with pytest.raises(TypeError, match="scaled_matmul has no derivatives"):
            derivative(xs[argument])

    def quantised(x):
        scale = jnp.abs(x).max(1, keepdims=True) / 448
        return jax_gpuops.scaled_matmul(
            (x / scale).astype("float8_e4m3fn"), xs[1], scale, 1.0, **how
        )

    with pytest.raises(TypeError, match=r"scaled_matmul has no derivatives.*stop_gradient"):
        jax.grad(lambda x: quantised(x).sum())(ones(8, 16))
    gradient = jax.grad(lambda x, s: (s * quantised(jax.lax.stop_gradient(x))).sum(), 1)
    assert gradient(ones(8, 16), 2.0) == 8 * 8 * 16


def test_tangents_of_int8_are_none(on_tensor_cores):
    """Integers have none; what is differentiated beside them has."""
    x = ones(8, 8, dtype="int8")
    product = functools.partial(
        jax_gpuops.scaled_matmul, a_scale=0.5, b_scale=2.0, **on_tensor_cores
    )
    zeros = np.zeros(x.shape, jax.dtypes.float0)
    y, tangent = jax.jvp(product, (x, x), (zeros, zeros))
    np.testing.assert_array_equal(y, np.full((8, 8), 8))
    np.testing.assert_array_equal(tangent, np.zeros((8, 8)))


# Several devices


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_arrays(axis_type, implementation):
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("d",), axis_types=(axis_type,), devices=devices)
    a, b, a_scale, b_scale = operands("float8_e4m3fn", "float32", "vector", 16, 24, 32)
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(x, NamedSharding(mesh, P("d", None))) for x in (a, a_scale)]
        whole = [jax.device_put(x, NamedSharding(mesh, P())) for x in (b, b_scale)]
        xs = sharded[0], whole[0], sharded[1], whole[1]
        y = jax.jit(jax_gpuops.scaled_matmul)(*xs)
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("d", None)), 2)
        assert_scaled_product(y, a, b, a_scale, b_scale)
        named = functools.partial(jax_gpuops.scaled_matmul, implementation=implementation)
        with pytest.raises(ValueError, match=r"jax\.shard_map"):
            jax.jit(named)(*xs)


@pytest.mark.parametrize("kind", KINDS)
def test_shard_map(kind, on_tensor_cores):
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    xs = operands("float8_e4m3fn", "float32", kind, 16, 24, 144)
    rows = P() if kind == "tensor" else P("d")
    product = functools.partial(jax_gpuops.scaled_matmul, **on_tensor_cores)
    mapped = jax.shard_map(product, mesh=mesh, in_specs=(P("d"), P(), rows, P()), out_specs=P("d"))
    assert_scaled_product(jax.jit(mapped)(*xs), *xs, promoted=kind == "blocks")


@pytest.mark.parametrize("kind", ["tensor", "vector"])
def test_export_with_symbolic_shapes(kind, on_tensor_cores):
    m, k, n = jax.export.symbolic_shape("m, k, n")
    scales = [(1, 1), (1, 1)] if kind == "tensor" else [(m, 1), (1, n)]
    implementation = on_tensor_cores["implementation"]
    exported = jax.export.export(
        jax.jit(functools.partial(jax_gpuops.scaled_matmul, implementation=implementation)),
        platforms=[{"interpret": "cpu"}.get(implementation, implementation)],
        disabled_checks=jax_gpuops.EXPORT_CHECKS,
    )(
        *(jax.ShapeDtypeStruct(shape, "float8_e4m3fn") for shape in [(m, k), (k, n)]),
        *(jax.ShapeDtypeStruct(shape, "float32") for shape in scales),
    )
    for sizes in ((16, 48, 32), (5, 7, 33)):
        drawn = operands("float8_e4m3fn", "float32", kind, *sizes)
        assert_scaled_product(exported.call(*drawn), *drawn)


def test_a_batch_of_symbolic_size(on_tensor_cores):
    implementation = on_tensor_cores["implementation"]
    (size,) = jax.export.symbolic_shape("size")
    a, b, *scales = operands("float8_e4m3fn", "float32", "tensor", 16, 48, 32)
    numbers = [scale.item() for scale in scales]
    exported = jax.export.export(
        jax.jit(lambda a: jax_gpuops.scaled_matmul(a, b, *numbers, implementation=implementation)),
        platforms=[{"interpret": "cpu"}.get(implementation, implementation)],
        disabled_checks=jax_gpuops.EXPORT_CHECKS,
    )(jax.ShapeDtypeStruct((size, *a.shape), a.dtype))
    y = exported.call(np.stack([a, a]))
    for each in y:
        assert_scaled_product(each, a, b, *scales)
