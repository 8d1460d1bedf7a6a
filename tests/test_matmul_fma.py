"""float32 products by FMAs: through tensor copies, and of few tiles, by slices of the depth."""

import re

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


@pytest.fixture
def fma_sliced(implementation):
    """The options of a product by fma_sliced, which not every GPU can run."""
    return helpers.options("matmul", "fma_sliced", implementation, [(8, 8), (8, 8)], "float32")


@pytest.fixture(params=["fma_pipelined", "fma_sliced"])
def fma(request):
    return request.getfixturevalue(request.param)


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
    product = a, b, transpose_a, transpose_b, "float32"
    y, config = helpers.recorded_dot(*product, **fma_pipelined)
    assert_product(y, a, b)
    assert config["tile_cols"] == tile
    expected, _ = helpers.recorded_dot(
        *product, implementation=implementation, algorithm="double_buffered"
    )
    np.testing.assert_array_equal(y, expected)


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


@pytest.mark.parametrize(
    ("shapes", "why"),
    [
        (((8, 7), (7, 8)), "requires factors whose rows, as stored, are a multiple of 16 bytes"),
        (((8, 8), (8, 6)), "requires factors whose rows, as stored, are a multiple of 16 bytes"),
        (((8, 0), (0, 8)), "requires a depth k of at least 1"),
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
        pytest.raises(jax.errors.JaxRuntimeError, match="requires arrays aligned to 16 bytes"),
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


# Of both


@pytest.mark.kernel
@pytest.mark.parametrize("share", ["", "a", "b"])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_batches(transpose_b, transpose_a, share, fma):
    """More tiles than blocks, so that the ring of fma_pipelined goes on from one to the next."""
    a, b = helpers.normal((5, 132, 68), "float32"), helpers.normal((5, 68, 140), "float32", seed=1)
    a, b = a[0] if share == "a" else a, b[0] if share == "b" else b
    how = {"transpose_a": transpose_a, "transpose_b": transpose_b, **fma}
    y = jax_gpuops.gemm(helpers.stored(a, transpose_a), helpers.stored(b, transpose_b), **how)
    assert_product(y, a, b)


@pytest.mark.kernel
@pytest.mark.parametrize(("m", "k"), [(36, 36), (36, 37), (12, 1100)])
def test_special_values_stay_in_their_row_and_column(m, k, fma):
    """Neither what fills tiles up nor another row's element meets an infinity."""
    if k % 4 and fma["algorithm"] == "fma_pipelined":
        pytest.skip("it takes rows of whole packs")
    a, b = helpers.normal((m, k), "float32"), helpers.normal((k, 40), "float32", seed=1)
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
                **fma,
            )
            for which in (np.isnan, np.isposinf, np.isneginf):
                np.testing.assert_array_equal(which(y), which(expected))


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("fma", "sizes", "warps"),
    [
        ("fma_pipelined", (132, 40, 140), (4, 11)),
        ("fma_pipelined", (40, 300, 72), (4, 11)),
        ("fma_sliced", (132, 40, 340), (0, 5)),
        ("fma_sliced", (40, 31, 273), (0, 5)),
        ("fma_sliced", (28, 12, 1100), (0, 5, 12)),  # by two blocks of a cluster
    ],
    indirect=["fma"],
    ids=str,
)
def test_any_order_of_threads(fma, sizes, warps):
    if fma["implementation"] != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    m, n, k = sizes
    a, b = helpers.normal((2, m, k), "float32"), helpers.normal((2, k, n), "float32", seed=1)
    schedules = [(1, {}), (2, {}), *((3 + i, {"warp": warp}) for i, warp in enumerate(warps))]
    helpers.under_each_schedule(lambda: jax_gpuops.matmul(a, b, **fma), schedules)


@pytest.mark.kernel
def test_gradients(fma):
    a, b = helpers.normal((72, 40), "float32"), helpers.normal((40, 136), "float32", seed=1)
    g = helpers.normal((72, 136), "float32", seed=2)
    _, pull = jax.vjp(lambda a, b: jax_gpuops.matmul(a, b, **fma), a, b)
    a_bar, b_bar = pull(jnp.asarray(g))
    assert_product(a_bar, g, b.T)
    assert_product(b_bar, a.T, g)


# Of slices of the depth

# For each tile's rows, m and n that the plan gives it to: the host simulates 4 multiprocessors.
SLICED_TILES = {
    16: {"interpret": (12, 252), "cuda": (16, 4000)},
    32: {"interpret": (40, 24), "cuda": (256, 256)},
    64: {"interpret": (124, 60), "cuda": (500, 512)},
}

# For each number of blocks in a cluster, with a tile's rows: m, n and k that the plan gives it to,
# on the host's 4 multiprocessors or on an H200.
SLICED_CLUSTERS = {
    "interpret": {
        (2, 16): (12, 120, 1100),
        (2, 64): (120, 28, 1100),
        (3, 16): (12, 40, 1100),
        (3, 32): (28, 12, 1100),
    },
    "cuda": {
        (2, 16): (16, 4096, 1100),
        (6, 16): (128, 128, 8200),
        (6, 64): (128, 256, 8200),
        (8, 32): (64, 64, 1100),
    },
}


@pytest.mark.kernel
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("k", [4, 16, 132, 200, 1100])
@pytest.mark.parametrize("tile", SLICED_TILES)
def test_every_layout_of_slices(tile, k, transpose_b, transpose_a, fma_sliced):
    """Whole packs, with rows, columns and a depth left over, and more steps than stages."""
    m, n = SLICED_TILES[tile][fma_sliced["implementation"]]
    a, b = helpers.normal((m, k), "float32"), helpers.normal((k, n), "float32", seed=1)
    y, config = helpers.recorded_dot(a, b, transpose_a, transpose_b, "float32", **fma_sliced)
    assert_product(y, a, b)
    assert config["tile_rows"] == tile
    assert config["vector_bytes"] == 16


@pytest.mark.kernel
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("case", range(4))
def test_blocks_of_a_cluster_divide_the_depth(case, transpose_b, transpose_a, fma_sliced):
    """Two or more, which need not divide a tile's packs, nor the depth's steps."""
    implementation = fma_sliced["implementation"]
    (splits, tile), (m, n, k) = list(SLICED_CLUSTERS[implementation].items())[case]
    a, b = helpers.normal((m, k), "float32"), helpers.normal((k, n), "float32", seed=1)
    y, config = helpers.recorded_dot(a, b, transpose_a, transpose_b, "float32", **fma_sliced)
    assert_product(y, a, b)
    assert config["splits"] > 1
    if implementation == "interpret":  # GPUs have various numbers of multiprocessors
        assert (config["splits"], config["tile_rows"]) == (splits, tile)


@pytest.mark.kernel
@pytest.mark.parametrize("share", ["", "a", "b"])
def test_clusters_of_batches(share, fma_sliced):
    a, b = (
        helpers.normal((2, 12, 1100), "float32"),
        helpers.normal((2, 1100, 12), "float32", seed=1),
    )
    a, b = a[0] if share == "a" else a, b[0] if share == "b" else b
    implementation = fma_sliced["implementation"]
    with helpers.recorded(implementation) as executions:
        y = np.asarray(jax_gpuops.matmul(a, b, **fma_sliced))
    assert_product(y, a, b)
    assert executions[0]["config"]["splits"] > 1


@pytest.mark.kernel
def test_clusters_add_in_one_order(fma_sliced):
    """Run after run the same bits, whichever block is done first."""
    a, b = helpers.normal((28, 1100), "float32"), helpers.normal((1100, 12), "float32", seed=1)
    product = jax.jit(lambda: jax_gpuops.matmul(a, b, **fma_sliced))
    expected = np.asarray(product())
    for _ in range(3 if fma_sliced["implementation"] == "interpret" else 100):
        helpers.assert_same_bits(product(), expected)


@pytest.mark.kernel
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1), (3, 5, 7), (1, 131, 33), (130, 1, 9), (33, 31, 65), (67, 45, 259), (3, 5, 1031)],
    ids=str,
)
def test_rows_without_whole_packs(sizes, transpose_b, transpose_a, fma_sliced):
    m, n, k = sizes
    a, b = helpers.normal((m, k), "float32"), helpers.normal((k, n), "float32", seed=1)
    how = {"transpose_a": transpose_a, "transpose_b": transpose_b, **fma_sliced}
    y = jax_gpuops.gemm(helpers.stored(a, transpose_a), helpers.stored(b, transpose_b), **how)
    assert_product(y, a, b)


@pytest.mark.kernel
@pytest.mark.parametrize("k", [40, 600])
@pytest.mark.parametrize("n", [3, 8, 70])
@pytest.mark.parametrize("m", [1, 5, 65])
def test_alpha_and_c_of_slices(m, n, k, fma_sliced):
    a, b = helpers.normal((m, k), "float32"), helpers.normal((k, n), "float32", seed=1)
    c = helpers.normal((m, n), "float32", seed=2)
    y = jax_gpuops.gemm(a, b, c, alpha=0.5, beta=-2, **fma_sliced)
    assert_product(y, a, b, 0.5, -2 * helpers.exact(c))


@pytest.mark.kernel
@pytest.mark.parametrize("sizes", [(37, 72, 44), (5, 600, 12)], ids=str)
def test_a_bias_and_an_activation_of_slices(sizes, fma_sliced):
    m, k, n = sizes
    x, w = helpers.normal((m, k), "float32"), helpers.normal((k, n), "float32", seed=1)
    b = helpers.normal((n,), "float32", seed=2)
    y = jax_gpuops.linear(x, w, b, activation="relu", precision="highest", **fma_sliced)
    expected = np.maximum(helpers.exact(x) @ helpers.exact(w) + helpers.exact(b), 0)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.kernel
def test_slices_without_depth_are_zero(fma_sliced):
    y = jax_gpuops.matmul(jnp.ones((8, 0)), jnp.ones((0, 40)), **fma_sliced)
    np.testing.assert_array_equal(y, np.zeros((8, 40)))


@pytest.mark.kernel
def test_slices_at_addresses_within_a_pack(fma_sliced):
    if fma_sliced["implementation"] != "interpret":
        pytest.skip("JAX aligns the buffers of a GPU")
    a, b = helpers.normal((40, 36), "float32"), helpers.normal((36, 40), "float32", seed=1)
    with helpers.buffers_at(8):
        y = np.asarray(jax_gpuops.matmul(a, b, **fma_sliced))
    assert_product(y, a, b)


def test_slices_of_other_dtypes_are_refused(fma_sliced):
    x = jnp.ones((8, 8), "bfloat16")
    with pytest.raises(
        ValueError, match=r"algorithm 'fma_sliced' supports only float32, not bfloat16"
    ):
        jax_gpuops.matmul(x, x, **fma_sliced)


def test_the_plan_takes_slices_for_few_tiles(fma_sliced):
    if fma_sliced["implementation"] == "interpret":
        pytest.skip("the host simulates too few multiprocessors")
    how = {"implementation": "cuda", "precision": "highest"}
    for m, n, k in [(256, 256, 256), (512, 512, 512), (24, 4096, 4096), (128, 128, 8192)]:
        plan = jax_gpuops.plan("matmul", [(m, k), (k, n)], "float32", **how)
        assert plan.algorithm == "fma_sliced", (m, n, k)


def test_the_plan_takes_slices_for_small_products(fma_sliced):
    """Unless the depth is so shallow that a thread for each element is done as soon."""
    how = {"implementation": fma_sliced["implementation"], "precision": "highest"}
    for size, algorithm in [(64, "fma_sliced"), (32, "fma_sliced"), (8, "coalesced")]:
        extent = min(size, 32)  # few enough tiles for the host's 4 multiprocessors
        plan = jax_gpuops.plan("matmul", [(extent, size), (size, extent)], "float32", **how)
        assert plan.algorithm == algorithm, size


def test_the_plan_says_how_many_blocks_share_a_tile(fma_sliced):
    how = {"implementation": fma_sliced["implementation"], "precision": "highest"}
    plan = jax_gpuops.plan("matmul", [(20, 4096), (4096, 20)], "float32", **how)
    assert re.search(r"the warps of \d blocks share the depth", plan.reason)
