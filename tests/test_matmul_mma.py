"""Products by mma.sync of factors that asynchronous copies bring: dtypes, layouts, alignments."""

from fractions import Fraction

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gpuops

DTYPES = [*helpers.DTYPES_ON_TENSOR_CORES, ("float64", "float64")]

# For each tile of elements of so many bytes, m and n that the plan gives it to: the host simulates
# 4 multiprocessors.
TILES = {
    (2, 64, 128): {"interpret": (72, 136), "cuda": (72, 136)},
    (2, 128, 256): {"interpret": (200, 504), "cuda": (2000, 2000)},
    (4, 64, 128): {"interpret": (72, 136), "cuda": (72, 136)},
    (4, 128, 256): {"interpret": (200, 504), "cuda": (2000, 2000)},
    (8, 64, 64): {"interpret": (72, 104), "cuda": (72, 104)},
    (8, 128, 128): {"interpret": (200, 232), "cuda": (1400, 1400)},
}


@pytest.fixture
def mma(implementation):
    """The options of a product by mma_pipelined, which not every GPU can run."""
    return helpers.options("matmul", "mma_pipelined", implementation, [(8, 8), (8, 8)], "bfloat16")


def assert_product(y, a, b, scale=1.0, added=0.0):
    """Checks `scale * a @ b + added`."""
    a, b, added = map(helpers.exact, (a, b, added))
    magnitude = abs(scale) * (np.abs(a) @ np.abs(b)) + np.abs(added)
    helpers.assert_product(y, scale * (a @ b) + added, magnitude, a.shape[-1])


@pytest.mark.kernel
@pytest.mark.parametrize(("dtype", "result"), DTYPES)
@helpers.every_layout
@pytest.mark.parametrize("large", [False, True])
def test_every_tile(large, transpose_a, transpose_b, dtype, result, mma):
    """With rows, columns and a depth that no tile divides."""
    itemsize = helpers.np_dtype(dtype).itemsize
    tile = [each for each in TILES if each[0] == itemsize][large]
    m, n = TILES[tile][mma["implementation"]]
    with helpers.x64(dtype):
        a, b = helpers.factor((m, 136), dtype), helpers.factor((136, n), dtype, seed=1)
        y, config = helpers.recorded_dot(a, b, transpose_a, transpose_b, result, **mma)
        assert y.dtype == result
        assert_product(y, a, b)
    assert config["vector_bytes"] == 16
    if mma["implementation"] == "interpret":  # GPUs have various numbers of multiprocessors
        assert (config["tile_rows"], config["tile_cols"]) == tile[1:]


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@helpers.every_layout
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1), (3, 5, 7), (66, 34, 102), (67, 132, 33), (129, 257, 65), (5, 200, 516)],
    ids=str,
)
def test_rows_of_any_length(sizes, transpose_a, transpose_b, dtype, mma):
    """Copies move whole 16 bytes where both factors' rows consist of these, else less."""
    m, n, k = sizes
    with helpers.x64(dtype):
        a, b = helpers.factor((2, m, k), dtype), helpers.factor((2, k, n), dtype, seed=1)
        y, config = helpers.recorded_dot(a, b, transpose_a, transpose_b, dtype, **mma)
        assert_product(y, a, b)
    itemsize = helpers.np_dtype(dtype).itemsize
    lengths = (m if transpose_a else k), (k if transpose_b else n)
    widths = (16, 4, 2) if itemsize == 2 else (16, itemsize)
    expected = next(w for w in widths if all(x * itemsize % w == 0 for x in lengths))
    assert config["vector_bytes"] == expected


@pytest.mark.kernel
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    ("dtype", "odd"), [("float16", 1), ("float16", 2), ("float32", 1), ("float64", 1)]
)
@helpers.every_layout
def test_every_tile_of_narrow_vectors(transpose_a, transpose_b, dtype, odd, large, mma):
    itemsize = helpers.np_dtype(dtype).itemsize
    tile = [each for each in TILES if each[0] == itemsize][large]
    m, n = TILES[tile][mma["implementation"]]
    with helpers.x64(dtype):
        a, b = (
            helpers.factor((m - odd, 40 + odd), dtype),
            helpers.factor((40 + odd, n - odd), dtype, seed=1),
        )
        y, config = helpers.recorded_dot(a, b, transpose_a, transpose_b, dtype, **mma)
        assert_product(y, a, b)
    assert config["vector_bytes"] == itemsize * odd
    if mma["implementation"] == "interpret":
        assert (config["tile_rows"], config["tile_cols"]) == tile[1:]


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("offset", [2, 4, 8])
def test_addresses_within_vectors(offset, dtype, mma):
    if mma["implementation"] != "interpret":
        pytest.skip("JAX aligns the buffers of a GPU")
    itemsize = helpers.np_dtype(dtype).itemsize
    if offset < itemsize:
        pytest.skip("no address of an element")
    with helpers.x64(dtype), helpers.buffers_at(offset):
        a, b = helpers.factor((72, 40), dtype), helpers.factor((40, 72), dtype, seed=1)
        y, config = helpers.recorded_dot(a, b, False, False, dtype, **mma)
        assert_product(y, a, b)
    assert config["vector_bytes"] == (min(offset, 4) if itemsize == 2 else itemsize)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("share", ["", "a", "b"])
@helpers.every_layout
def test_batches_with_c(transpose_a, transpose_b, share, dtype, mma):
    """BLAS's gemm, in one rounding; a factor may be one for the whole batch."""
    with helpers.x64(dtype):
        a, b = helpers.factor((3, 70, 40), dtype), helpers.factor((3, 40, 140), dtype, seed=1)
        c = helpers.normal((3, 70, 140), dtype, seed=2)
        a, b = a[0] if share == "a" else a, b[0] if share == "b" else b
        y = jax_gpuops.gemm(
            helpers.stored(a, transpose_a),
            helpers.stored(b, transpose_b),
            c,
            alpha=0.5,
            beta=-2,
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            **mma,
        )
        assert y.dtype == dtype
        assert_product(y, a, b, 0.5, -2 * helpers.exact(c))


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("n", [3, 130, 132])
@pytest.mark.parametrize("m", [1, 5, 129])
def test_results_of_any_size(m, n, dtype, mma):
    with helpers.x64(dtype):
        a, b = helpers.factor((m, 40), dtype), helpers.factor((40, n), dtype, seed=1)
        assert_product(jax_gpuops.matmul(a, b, **mma), a, b)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_without_depth_c_is_left(dtype, mma):
    with helpers.x64(dtype):
        a, b, c = jnp.ones((8, 0), dtype), jnp.ones((0, 16), dtype), jnp.ones((8, 16), dtype)
        np.testing.assert_array_equal(jax_gpuops.matmul(a, b, **mma), np.zeros((8, 16)))
        np.testing.assert_array_equal(jax_gpuops.gemm(a, b, c, beta=2, **mma), np.full((8, 16), 2))


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@helpers.every_layout
def test_special_values_stay_in_their_row_and_column(transpose_a, transpose_b, dtype, mma):
    """Neither what fills tiles up nor another row's element meets an infinity."""
    with helpers.x64(dtype):
        for size in (36, 40):
            a, b = helpers.factor((size, size), dtype), helpers.factor((size, size), dtype, seed=1)
            a[3, size - 1], b[2, size - 1], a[7, 0] = np.inf, -np.inf, np.nan
            with np.errstate(invalid="ignore"):
                expected = helpers.exact(a) @ helpers.exact(b)
            y, _ = helpers.recorded_dot(a, b, transpose_a, transpose_b, dtype, **mma)
            y = helpers.exact(y)
            for which in (np.isnan, np.isposinf, np.isneginf):
                np.testing.assert_array_equal(which(y), which(expected))


@pytest.mark.kernel
@pytest.mark.parametrize("size", [8, 67])
def test_doubles_are_added_as_by_fmas(size, mma):
    """To the bit, in the order of the depth."""
    k = 45
    with helpers.x64("float64"):
        a, b = helpers.factor((size, k), "float64"), helpers.factor((k, size), "float64", seed=1)
        y = np.asarray(jax_gpuops.matmul(a, b, **mma))
    for row, col in [(0, 0), (1, 5), (7, 2), (size - 1, size - 1), (size - 2, 3)]:
        total = 0.0
        for x, w in zip(a[row], b[:, col], strict=True):
            total = float(Fraction(x) * Fraction(w) + Fraction(total))
        assert y[row, col] == total


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_bits_do_not_depend_on_tiles(dtype, mma):
    """Nor on how factors lie, nor on their vectors."""
    with helpers.x64(dtype):
        m, n = TILES[
            {"bfloat16": (2, 128, 256), "float32": (4, 128, 256)}.get(dtype, (8, 128, 128))
        ][mma["implementation"]]
        a, b = helpers.factor((m, 72), dtype), helpers.factor((72, n), dtype, seed=1)
        wide = "float64" if dtype == "float64" else "float32"
        expected, _ = helpers.recorded_dot(a, b, False, False, wide, **mma)
        expected = np.asarray(expected)
        for rows, cols in ((17, 24), (33, 65), (m, n - 1)):
            for layout in ((False, False), (True, False), (False, True), (True, True)):
                y, _ = helpers.recorded_dot(a[:rows], b[:, :cols], *layout, wide, **mma)
                np.testing.assert_array_equal(y, expected[:rows, :cols])


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("sizes", [(132, 40, 140), (70, 300, 67)], ids=str)
def test_any_order_of_threads(sizes, dtype, mma):
    if mma["implementation"] != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    m, k, n = sizes
    with helpers.x64(dtype):
        a, b = helpers.factor((m, k), dtype), helpers.factor((k, n), dtype, seed=1)
        helpers.under_each_schedule(
            lambda: jax_gpuops.matmul(a, b, **mma),
            [(1, {}), (2, {}), (3, {"warp": 1}), (5, {"warp": 3})],
        )


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_gradients(dtype, mma):
    with helpers.x64(dtype):
        a, b = helpers.factor((72, 40), dtype), helpers.factor((40, 136), dtype, seed=1)
        g = helpers.factor((72, 136), dtype, seed=2)
        _, pull = jax.vjp(lambda a, b: jax_gpuops.matmul(a, b, **mma), a, b)
        a_bar, b_bar = pull(jnp.asarray(g))
        assert_product(a_bar, g, helpers.swap(b))
        assert_product(b_bar, helpers.swap(a), g)


def test_floats_are_multiplied_in_tf32_alone(mma):
    x = jnp.ones((8, 8))
    with pytest.raises(ValueError, match="multiplies float32 in TF32, which precision HIGHEST"):
        jax_gpuops.matmul(x, x, precision="highest", **mma)


def test_slices_are_counted(mma):
    how = {"implementation": mma["implementation"], "algorithm": "mma_pipelined"}
    deepest = 1 << 34
    jax_gpuops.plan("matmul", [(1, deepest), (deepest, 1)], "bfloat16", **how)
    with pytest.raises(ValueError, match=r"supports a depth k of at most 2\^34"):
        jax_gpuops.plan("matmul", [(1, deepest + 1), (deepest + 1, 1)], "bfloat16", **how)


def test_the_plan_takes_it_where_no_kernel_of_hopper_does(mma):
    how = {"implementation": mma["implementation"]}
    with helpers.x64("float64"):
        plan = jax_gpuops.plan("matmul", [(512, 512)] * 2, "float64", **how)
        assert plan.algorithm == "mma_pipelined"
        small = jax_gpuops.plan("matmul", [(16, 16)] * 2, "float64", **how)
        assert small.algorithm == "coalesced"
        x = [(512, 512)] * 2
        plan = jax_gpuops.plan("matmul", x, "bfloat16", **how)
        assert plan.algorithm in ("tensor_core", "mma_pipelined")
    a, b = helpers.factor((128, 64), "bfloat16"), helpers.factor((64, 128), "bfloat16", seed=1)
    c = helpers.normal((128, 128), "bfloat16", seed=2)
    with helpers.recorded(mma["implementation"]) as executions:
        y = jax.block_until_ready(jax_gpuops.gemm(a, b, c, alpha=2, beta=1, **how))
    assert_product(y, 2 * a, b, added=c)
    assert executions[0]["algorithm"] == "mma_pipelined"
