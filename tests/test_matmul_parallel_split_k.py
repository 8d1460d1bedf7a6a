"""parallel_split_k: tiles over parts of the depth, whose partial sums a second kernel adds."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gpuops

# For each tile and whether its product is transposed, m, n and k that the plan gives it to, on the
# host's 4 multiprocessors and on an H200.
TILES = {
    (96, 128, True): {"interpret": (90, 136, 264), "cuda": (90, 1032, 1032)},
    (160, 128, True): {"interpret": (155, 136, 264), "cuda": (150, 4096, 4096)},
    (208, 128, True): {"interpret": (200, 136, 264), "cuda": (200, 4096, 4096)},
    (64, 128, False): {"interpret": (60, 136, 264), "cuda": (200, 1024, 8192)},
    (128, 256, False): {"interpret": (256, 520, 264), "cuda": (512, 4096, 4096)},
}
FLOATS_OF_16_BITS = ["float16", "bfloat16"]
LAYOUTS = [(False, False), (False, True), (True, False), (True, True)]


@pytest.fixture
def split(implementation):
    shapes = [(8, 136), (136, 8)]
    return helpers.options("matmul", "parallel_split_k", implementation, shapes, "bfloat16")


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", FLOATS_OF_16_BITS)
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_kernel(tile, transpose_b, dtype, split):
    m, n, k = TILES[tile][split["implementation"]]
    a, b = helpers.normal((m, k), dtype), helpers.normal((k, n), dtype, seed=1)
    rows, cols, turned = tile
    y, config = helpers.recorded_dot(a, b, False, transpose_b, dtype, **split)
    assert y.dtype == dtype
    helpers.assert_matmul(y, a, b)
    assert config["splits"] >= 2
    assert (config["tile_rows"], config["tile_cols"], config["turned"]) == (rows, cols, turned)


# For each tile's rows, m, n and k of float32 that the plan gives it to.
TILES_OF_FLOATS = {
    64: {"interpret": (60, 136, 520), "cuda": (60, 1024, 4096)},
    128: {"interpret": (120, 264, 328), "cuda": (128, 2048, 4096)},
    256: {"interpret": (250, 264, 328), "cuda": (500, 4096, 4096)},
}


@pytest.mark.kernel
@pytest.mark.parametrize("rows", TILES_OF_FLOATS)
def test_every_kernel_of_float32(rows, split):
    m, n, k = TILES_OF_FLOATS[rows][split["implementation"]]
    a, b = helpers.factor((m, k), "float32"), helpers.factor((k, n), "float32", seed=1)
    y, config = helpers.recorded_dot(a, b, False, False, "float32", **split)
    helpers.assert_matmul(y, a, b)
    assert config["splits"] >= 2
    assert not config["copies_b"]
    assert (config["tile_rows"], config["tile_cols"], config["turned"]) == (rows, 128, True)


@pytest.mark.kernel
@pytest.mark.parametrize(
    "sizes", [(3, 1, 4, 33), (2, 65, 132, 259), (1, 130, 4, 77), (5, 70, 268, 131)], ids=str
)
def test_edges_of_float32(sizes, split):
    """Rows of partial sums are a multiple of 32 bytes, those of the result of 16."""
    batch, m, n, k = sizes
    a, b = (
        helpers.factor((batch, m, k), "float32"),
        helpers.factor((batch, k, n), "float32", seed=1),
    )

    @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
    def product(poison, a, b):
        del poison
        return jax_gpuops.matmul(a, b, **split)

    y = product(jnp.full((batch, m, n), np.nan, "float32"), a, b)
    helpers.assert_matmul(y, a, b)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", FLOATS_OF_16_BITS)
@pytest.mark.parametrize(("transpose_a", "transpose_b"), LAYOUTS)
@pytest.mark.parametrize("sizes", [(90, 136, 264), (131, 67, 517)], ids=str)
def test_float32_results(sizes, transpose_a, transpose_b, dtype, split):
    """Products of an a that is not K-major are not transposed."""
    m, n, k = sizes
    a, b = helpers.normal((m, k), dtype), helpers.normal((k, n), dtype, seed=1)
    y, config = helpers.recorded_dot(a, b, transpose_a, transpose_b, "float32", **split)
    assert y.dtype == np.float32
    helpers.assert_matmul(y, a, b)
    assert not (transpose_a and config["turned"])


@pytest.mark.kernel
@pytest.mark.parametrize(("transpose_a", "transpose_b"), LAYOUTS)
@pytest.mark.parametrize(
    ("batch", "m", "n", "k"),
    [
        (1, 1, 1, 65),  # the second split has one element of the depth
        (3, 70, 504, 328),  # shares of three and two steps
        (1, 96, 517, 131),  # copies of factors; rows of no whole packs
        (3, 160, 261, 264),
        (5, 131, 262, 200),  # blocks take several tiles,
        (2, 308, 264, 712),  # of two rows
        (3, 192, 520, 67),
        (1, 201, 832, 1032),
        (2, 197, 128, 520),
        (7, 129, 8, 136),  # of few columns
    ],
)
def test_edges(batch, m, n, k, transpose_a, transpose_b, split):
    """Every element is written, over an array of NaN, and nothing beside them."""
    dtype = "bfloat16" if k % 8 == 0 else "float16"
    a, b = helpers.normal((batch, m, k), dtype), helpers.normal((batch, k, n), dtype, seed=1)

    @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
    def product(poison, a, b):
        del poison
        return helpers.dot(a, b, transpose_a, transpose_b, dtype, **split)

    poison = jnp.full((batch, m, n), np.nan, dtype)
    y = product(poison, helpers.stored(a, transpose_a), helpers.stored(b, transpose_b))
    helpers.assert_matmul(y, a, b)


@pytest.mark.kernel
@pytest.mark.parametrize("share", ["a", "b"])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_shared_factors(transpose_b, share, split):
    a, b = helpers.normal((3, 150, 328), "bfloat16"), helpers.normal((3, 328, 264), "bfloat16", 1)
    a, b = a[0] if share == "a" else a, b[0] if share == "b" else b
    y = jax_gpuops.gemm(a, helpers.stored(b, transpose_b), transpose_b=transpose_b, **split)
    helpers.assert_matmul(y, a, b)


@pytest.mark.kernel
def test_special_values_stay_in_their_row_and_column(split):
    """Stages keep old rows beyond the last row of a, and zeros beyond the end of the depth."""
    m, n, k = 155, 137, 517
    a, b = helpers.normal((m, k), "bfloat16"), helpers.normal((k, n), "bfloat16", seed=1)
    a[3, k - 1], a[m - 1, 5], b[2, n - 1] = np.inf, np.nan, -np.inf
    y = jax_gpuops.matmul(a, b, **split)
    special = np.zeros((m, n), bool)
    special[[3, m - 1]], special[:, n - 1] = True, True
    np.testing.assert_array_equal(np.isfinite(np.asarray(y, np.float32)), ~special)


@pytest.mark.kernel
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_repeats_have_the_same_bits(tile, split):
    m, n, k = TILES[tile][split["implementation"]]
    a, b = helpers.normal((m, k), "bfloat16"), helpers.normal((k, n), "bfloat16", seed=1)
    first, second = (jax_gpuops.matmul(a, b, **split) for _ in range(2))
    helpers.assert_same_bits(first, second)


@pytest.mark.kernel
@pytest.mark.parametrize("transpose_a", [False, True])
def test_any_order_of_threads(transpose_a, split):
    if split["implementation"] != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    a = helpers.normal((2, 90, 328), "bfloat16")
    b = helpers.normal((2, 328, 200), "bfloat16", seed=1)
    stored = helpers.stored(a, transpose_a)
    y = helpers.under_each_schedule(
        lambda: jax_gpuops.gemm(stored, b, transpose_a=transpose_a, **split),
        [(1, {}), (2, {}), *[(2 + block, {"block": block}) for block in (1, 2)]],
    )
    helpers.assert_matmul(y, a, b)


@pytest.mark.kernel
def test_the_plan_chooses_it(split):
    """For few tiles of a large depth; its rows depend on their number, so not for the invariant."""
    implementation = split["implementation"]
    m, n, k = {"interpret": (90, 64, 4096), "cuda": (257, 1024, 8192)}[implementation]
    a, b = helpers.normal((m, k), "bfloat16"), helpers.normal((k, n), "bfloat16", seed=1)
    how = {"implementation": implementation}
    with helpers.recorded(implementation) as executions:
        y = jax.block_until_ready(jax_gpuops.matmul(a, b, **how))
        jax.block_until_ready(jax_gpuops.matmul(a, b, batch_invariant=True, **how))
    helpers.assert_matmul(y, a, b)
    chosen, invariant = executions
    assert chosen["algorithm"] == "parallel_split_k"
    assert chosen["config"]["splits"] == {"interpret": 4, "cuda": 3}[implementation]
    assert chosen["config"]["workspace_bytes"] <= chosen["problem"]["workspace"]
    names = [helpers.base_name(kernel) for kernel in chosen["kernels"]]
    assert names == ["persistent_kernel", "split_k_reduce_kernel"]
    assert invariant["algorithm"] == "tensor_core"


@pytest.mark.parametrize(
    ("shapes", "dtype", "reason"),
    [
        ([(8, 64), (64, 8)], "bfloat16", "requires a depth k of more than 64"),
        ([(8, 136), (136, 6)], "float32", "supports float32 only if a is K-major and b is not"),
        ([(4096, 136), (136, 4096)], "float16", "supports results of at most 8388608 elements"),
    ],
)
def test_refusals(shapes, dtype, reason, split):
    a, b = (jnp.ones(shape, dtype) for shape in shapes)
    with pytest.raises(ValueError, match=f"algorithm 'parallel_split_k' {reason}"):
        jax_gpuops.matmul(a, b, **split)


def test_neither_c_nor_a_gate(split):
    x, w = jnp.ones((8, 136), "bfloat16"), jnp.ones((136, 8), "bfloat16")
    with pytest.raises(ValueError, match="'parallel_split_k' does not support c"):
        jax_gpuops.gemm(x, w, jnp.ones((8, 8), "bfloat16"), beta=1, **split)
    with pytest.raises(ValueError, match="'parallel_split_k' does not support gated products"):
        jax_gpuops.glu(x, w, w, activation="silu", **split)


@pytest.mark.parametrize("k", [1024, 1032])
def test_no_elements(k, split):
    a, b = jnp.ones((90, k), "bfloat16"), jnp.ones((k, 0), "bfloat16")
    assert jax_gpuops.matmul(a, b, **split).shape == (90, 0)
