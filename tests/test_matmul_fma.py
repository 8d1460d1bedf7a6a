"""float32 products by FMAs that tensor copies supply: the results are those of double_buffered."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gpuops


@pytest.fixture
def fma_pipelined(implementation):
    """The options of a product by fma_pipelined, which not every GPU can run."""
    return helpers.options("matmul", "fma_pipelined", implementation, [(8, 8), (8, 8)], "float32")


def assert_product(y, a, b, scale=1.0, added=0.0):
    a, b, added = map(helpers.exact, (a, b, added))
    magnitude = abs(scale) * (np.abs(a) @ np.abs(b)) + np.abs(added)
    difference = np.abs(helpers.exact(y) - (scale * (a @ b) + added))
    assert np.all(difference <= (a.shape[-1] + 3) * 2.0**-24 * magnitude)


# For each tile, m and n that the plan gives it to: the host simulates 4 multiprocessors.
TILES = {
    128: {"interpret": (132, 200), "cuda": (132, 200)},
    256: {"interpret": (200, 500), "cuda": (2000, 2000)},
}


@pytest.mark.kernel
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("k", [4, 32, 36, 200])
@pytest.mark.parametrize("tile", TILES)
def test_every_layout(tile, k, transpose_b, transpose_a, fma_pipelined):
    """To the bit, as the products of an element are added in the same order."""
    implementation = fma_pipelined["implementation"]
    m, n = TILES[tile][implementation]
    a, b = helpers.normal((m, k), "float32"), helpers.normal((k, n), "float32", seed=1)
    how = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    factors = helpers.stored(a, transpose_a), helpers.stored(b, transpose_b)
    with helpers.recorded(implementation) as executions:
        y = np.asarray(jax_gpuops.gemm(*factors, **how, **fma_pipelined))
    assert_product(y, a, b)
    assert executions[0]["config"]["tile_cols"] == tile
    expected = jax_gpuops.gemm(
        *factors, **how, implementation=implementation, algorithm="double_buffered"
    )
    np.testing.assert_array_equal(y, expected)


@pytest.mark.kernel
@pytest.mark.parametrize("share", ["", "a", "b"])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_batches(transpose_b, transpose_a, share, fma_pipelined):
    """More tiles than blocks, so that the ring goes on from one to the next."""
    a, b = helpers.normal((5, 132, 68), "float32"), helpers.normal((5, 68, 140), "float32", seed=1)
    a, b = a[0] if share == "a" else a, b[0] if share == "b" else b
    how = {"transpose_a": transpose_a, "transpose_b": transpose_b, **fma_pipelined}
    assert_product(
        jax_gpuops.gemm(helpers.stored(a, transpose_a), helpers.stored(b, transpose_b), **how), a, b
    )


@pytest.mark.kernel
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("n", [3, 8, 130])
@pytest.mark.parametrize("m", [1, 5, 129])
def test_results_of_any_size(m, n, transpose_b, fma_pipelined):
    """Rows of the result need not be whole packs: of the factors, only those that are stored so."""
    a, b = helpers.normal((m, 40), "float32"), helpers.normal((40, n), "float32", seed=1)
    c = helpers.normal((m, n), "float32", seed=2)
    if not transpose_b and n % 4:
        pytest.skip("b has such rows")
    y = jax_gpuops.gemm(
        a,
        helpers.stored(b, transpose_b),
        c,
        alpha=0.5,
        beta=-2,
        transpose_b=transpose_b,
        **fma_pipelined,
    )
    assert_product(y, a, b, 0.5, -2 * helpers.exact(c))


@pytest.mark.kernel
def test_special_values_stay_in_their_row_and_column(fma_pipelined):
    """Neither what fills tiles up nor another row's element meets an infinity."""
    a, b = helpers.normal((36, 36), "float32"), helpers.normal((36, 40), "float32", seed=1)
    a[3, 35], b[2, 39], a[7, 0] = np.inf, -np.inf, np.nan
    with np.errstate(invalid="ignore"):
        expected = a @ b
    for transpose_a in (False, True):
        for transpose_b in (False, True):
            y = jax_gpuops.gemm(
                helpers.stored(a, transpose_a),
                helpers.stored(b, transpose_b),
                transpose_a=transpose_a,
                transpose_b=transpose_b,
                **fma_pipelined,
            )
            for which in (np.isnan, np.isposinf, np.isneginf):
                np.testing.assert_array_equal(which(y), which(expected))


@pytest.mark.kernel
@pytest.mark.parametrize("sizes", [(132, 40, 140), (40, 300, 72)], ids=str)
def test_any_order_of_threads(sizes, fma_pipelined):
    if fma_pipelined["implementation"] != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    m, n, k = sizes
    a, b = helpers.normal((2, m, k), "float32"), helpers.normal((2, k, n), "float32", seed=1)
    helpers.under_each_schedule(
        lambda: jax_gpuops.matmul(a, b, **fma_pipelined),
        [(1, {}), (2, {}), (3, {"warp": 4}), (4, {"warp": 11})],
    )


@pytest.mark.kernel
def test_gradients(fma_pipelined):
    a, b = helpers.normal((72, 40), "float32"), helpers.normal((40, 136), "float32", seed=1)
    g = helpers.normal((72, 136), "float32", seed=2)
    _, pull = jax.vjp(lambda a, b: jax_gpuops.matmul(a, b, **fma_pipelined), a, b)
    a_bar, b_bar = pull(jnp.asarray(g))
    assert_product(a_bar, g, b.T)
    assert_product(b_bar, a.T, g)


@pytest.mark.parametrize(
    ("shapes", "why"),
    [
        (((8, 7), (7, 8)), "takes factors whose rows, as stored, are whole 16 bytes"),
        (((8, 8), (8, 6)), "takes factors whose rows, as stored, are whole 16 bytes"),
        (((8, 0), (0, 8)), "takes a depth of at least 1"),
    ],
)
def test_what_it_refuses(shapes, why, fma_pipelined):
    with pytest.raises(ValueError, match=f"algorithm 'fma_pipelined' {why}"):
        jax_gpuops.matmul(*map(jnp.ones, shapes), **fma_pipelined)


@pytest.mark.kernel
def test_addresses_within_a_pack_are_refused_at_run_time(fma_pipelined):
    if fma_pipelined["implementation"] != "interpret":
        pytest.skip("JAX aligns the buffers of a GPU")
    x = jnp.ones((16, 16))
    with (
        helpers.buffers_at(8),
        pytest.raises(jax.errors.JaxRuntimeError, match="takes arrays aligned to 16 bytes"),
    ):
        jax.block_until_ready(jax_gpuops.matmul(x, x, **fma_pipelined))


def test_the_plan_takes_it_for_float32_in_its_own_arithmetic(fma_pipelined):
    implementation = fma_pipelined["implementation"]
    x = [(4096, 4096)] * 2
    how = {"implementation": implementation, "precision": "F32_F32_F32"}
    assert jax_gpuops.plan("matmul", x, "float32", **how).algorithm == "fma_pipelined"
    odd = [(4096, 4095), (4095, 4096)]
    assert jax_gpuops.plan("matmul", odd, "float32", **how).algorithm == "double_buffered"


@pytest.mark.kernel
def test_the_plan_takes_it_for_sums_with_c(fma_pipelined):
    """As no kernel on tensor cores has a c."""
    implementation = fma_pipelined["implementation"]
    a, b = helpers.normal((256, 64), "float32"), helpers.normal((64, 256), "float32", seed=1)
    c = helpers.normal((256, 256), "float32", seed=2)
    with helpers.recorded(implementation) as executions:
        y = np.asarray(jax_gpuops.gemm(a, b, c, beta=1, implementation=implementation))
    assert_product(y, a, b, added=c)
    if implementation == "interpret":  # GPUs have various numbers of multiprocessors
        assert executions[0]["algorithm"] == "fma_pipelined"
