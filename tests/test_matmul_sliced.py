"""float32 products of few elements by FMAs: each warp of a block has a slice of the depth."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gpuops


@pytest.fixture
def fma_sliced(implementation):
    """The options of a product by fma_sliced, which not every GPU can run."""
    return helpers.options("matmul", "fma_sliced", implementation, [(8, 8), (8, 8)], "float32")


def assert_product(y, a, b, scale=1.0, added=0.0):
    a, b, added = map(helpers.exact, (a, b, added))
    magnitude = abs(scale) * (np.abs(a) @ np.abs(b)) + np.abs(added)
    difference = np.abs(helpers.exact(y) - (scale * (a @ b) + added))
    assert np.all(difference <= (a.shape[-1] + 3) * 2.0**-24 * magnitude)


# For each tile's rows, m and n that the plan gives it to: the host simulates 4 multiprocessors.
TILES = {
    32: {"interpret": (40, 24), "cuda": (256, 256)},
    64: {"interpret": (124, 60), "cuda": (500, 512)},
}


@pytest.mark.kernel
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("k", [4, 16, 132, 200, 1100])
@pytest.mark.parametrize("tile", TILES)
def test_every_layout(tile, k, transpose_b, transpose_a, fma_sliced):
    """Whole packs, with rows, columns and a depth left over, and more steps than stages."""
    implementation = fma_sliced["implementation"]
    m, n = TILES[tile][implementation]
    a, b = helpers.normal((m, k), "float32"), helpers.normal((k, n), "float32", seed=1)
    how = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    factors = helpers.stored(a, transpose_a), helpers.stored(b, transpose_b)
    with helpers.recorded(implementation) as executions:
        y = np.asarray(jax_gpuops.gemm(*factors, **how, **fma_sliced))
    assert_product(y, a, b)
    assert executions[0]["config"]["tile_rows"] == tile
    assert executions[0]["config"]["vector_bytes"] == 16


@pytest.mark.kernel
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (3, 5, 7), (1, 131, 33), (130, 1, 9), (33, 31, 65), (67, 45, 259)], ids=str
)
def test_rows_without_whole_packs(sizes, transpose_b, transpose_a, fma_sliced):
    m, n, k = sizes
    a, b = helpers.normal((m, k), "float32"), helpers.normal((k, n), "float32", seed=1)
    how = {"transpose_a": transpose_a, "transpose_b": transpose_b, **fma_sliced}
    y = jax_gpuops.gemm(helpers.stored(a, transpose_a), helpers.stored(b, transpose_b), **how)
    assert_product(y, a, b)


@pytest.mark.kernel
@pytest.mark.parametrize("share", ["", "a", "b"])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_batches(transpose_b, transpose_a, share, fma_sliced):
    a, b = helpers.normal((5, 68, 36), "float32"), helpers.normal((5, 36, 40), "float32", seed=1)
    a, b = a[0] if share == "a" else a, b[0] if share == "b" else b
    how = {"transpose_a": transpose_a, "transpose_b": transpose_b, **fma_sliced}
    y = jax_gpuops.gemm(helpers.stored(a, transpose_a), helpers.stored(b, transpose_b), **how)
    assert_product(y, a, b)


@pytest.mark.kernel
@pytest.mark.parametrize("n", [3, 8, 70])
@pytest.mark.parametrize("m", [1, 5, 65])
def test_alpha_and_c(m, n, fma_sliced):
    a, b = helpers.normal((m, 40), "float32"), helpers.normal((40, n), "float32", seed=1)
    c = helpers.normal((m, n), "float32", seed=2)
    y = jax_gpuops.gemm(a, b, c, alpha=0.5, beta=-2, **fma_sliced)
    assert_product(y, a, b, 0.5, -2 * helpers.exact(c))


@pytest.mark.kernel
def test_a_bias_and_an_activation(fma_sliced):
    x, w = helpers.normal((37, 72), "float32"), helpers.normal((72, 44), "float32", seed=1)
    b = helpers.normal((44,), "float32", seed=2)
    y = jax_gpuops.linear(x, w, b, activation="relu", precision="highest", **fma_sliced)
    expected = np.maximum(helpers.exact(x) @ helpers.exact(w) + helpers.exact(b), 0)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.kernel
def test_without_depth_it_is_zero(fma_sliced):
    y = jax_gpuops.matmul(jnp.ones((8, 0)), jnp.ones((0, 40)), **fma_sliced)
    np.testing.assert_array_equal(y, np.zeros((8, 40)))


@pytest.mark.kernel
@pytest.mark.parametrize("k", [36, 37])
def test_special_values_stay_in_their_row_and_column(k, fma_sliced):
    """Neither what fills tiles up nor another row's element meets an infinity."""
    a, b = helpers.normal((36, k), "float32"), helpers.normal((k, 40), "float32", seed=1)
    a[3, k - 1], b[2, 39], a[7, 0] = np.inf, -np.inf, np.nan
    with np.errstate(invalid="ignore"):
        expected = a @ b
    for transpose_a in (False, True):
        for transpose_b in (False, True):
            y = jax_gpuops.gemm(
                helpers.stored(a, transpose_a),
                helpers.stored(b, transpose_b),
                transpose_a=transpose_a,
                transpose_b=transpose_b,
                **fma_sliced,
            )
            for which in (np.isnan, np.isposinf, np.isneginf):
                np.testing.assert_array_equal(which(y), which(expected))


@pytest.mark.kernel
@pytest.mark.parametrize("sizes", [(132, 40, 340), (40, 31, 273)], ids=str)
def test_any_order_of_threads(sizes, fma_sliced):
    if fma_sliced["implementation"] != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    m, n, k = sizes
    a, b = helpers.normal((2, m, k), "float32"), helpers.normal((2, k, n), "float32", seed=1)
    helpers.under_each_schedule(
        lambda: jax_gpuops.matmul(a, b, **fma_sliced),
        [(1, {}), (2, {}), (3, {"warp": 0}), (4, {"warp": 5})],
    )


@pytest.mark.kernel
def test_addresses_within_a_pack(fma_sliced):
    if fma_sliced["implementation"] != "interpret":
        pytest.skip("JAX aligns the buffers of a GPU")
    a, b = helpers.normal((40, 36), "float32"), helpers.normal((36, 40), "float32", seed=1)
    with helpers.buffers_at(8):
        y = np.asarray(jax_gpuops.matmul(a, b, **fma_sliced))
    assert_product(y, a, b)


@pytest.mark.kernel
def test_gradients(fma_sliced):
    a, b = helpers.normal((72, 40), "float32"), helpers.normal((40, 136), "float32", seed=1)
    g = helpers.normal((72, 136), "float32", seed=2)
    _, pull = jax.vjp(lambda a, b: jax_gpuops.matmul(a, b, **fma_sliced), a, b)
    a_bar, b_bar = pull(jnp.asarray(g))
    assert_product(a_bar, g, b.T)
    assert_product(b_bar, a.T, g)


def test_it_refuses_other_dtypes(fma_sliced):
    x = jnp.ones((8, 8), "bfloat16")
    with pytest.raises(ValueError, match=r"algorithm 'fma_sliced' takes float32, not bfloat16"):
        jax_gpuops.matmul(x, x, **fma_sliced)


def test_the_plan_takes_it_for_few_tiles(fma_sliced):
    if fma_sliced["implementation"] == "interpret":
        pytest.skip("the host simulates too few multiprocessors")
    how = {"implementation": "cuda", "precision": "highest"}
    for m, n, k in [(256, 256, 256), (512, 512, 512), (16, 4096, 4096)]:
        plan = jax_gpuops.plan("matmul", [(m, k), (k, n)], "float32", **how)
        assert plan.algorithm == "fma_sliced", (m, n, k)
