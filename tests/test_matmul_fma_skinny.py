"""float32 products by FMAs of which one factor has few rows or columns."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gpuops


@pytest.fixture
def skinny(implementation):
    """The options of a product by fma_skinny, which not every GPU can run."""
    return helpers.options("matmul", "fma_skinny", implementation, [(8, 8), (8, 8)], "float32")


def assert_product(y, a, b, scale=1.0, added=0.0):
    """Against float64, with the error of one float32 sum of single products."""
    a, b, added = map(helpers.exact, (a, b, added))
    magnitude = abs(scale) * (np.abs(a) @ np.abs(b)) + np.abs(added)
    difference = np.abs(helpers.exact(y) - (scale * (a @ b) + added))
    assert np.all(difference <= (a.shape[-1] + 3) * 2.0**-24 * magnitude)


def factors(m, n, k):
    return helpers.normal((m, k), "float32"), helpers.normal((k, n), "float32", seed=1)


def tile_of(config, m, n):
    """The rows of the large factor and the columns of the skinny one that a block has, and whether
    it reads them in packs."""
    large, small = ("rows", "a"), ("cols", "b")
    if m <= n:
        large, small = ("cols", "b"), ("rows", "a")
    return (
        *(config[f"tile_{extent}"] for extent, _ in (large, small)),
        *(config[f"pack_{factor}"] for _, factor in (large, small)),
    )


every_order = pytest.mark.parametrize(
    ("transpose_a", "transpose_b"), [(False, False), (False, True), (True, False), (True, True)]
)

# For the rows and columns of each tile, sizes that the plan gives it to: the host simulates 4
# multiprocessors. Neither rows nor columns fill the last block.
TILES = {
    (32, 4): {"interpret": (3, 44), "cuda": (3, 4060)},
    (32, 8): {"interpret": (7, 44), "cuda": (7, 4060)},
    (32, 16): {"interpret": (13, 44), "cuda": (13, 4060)},
    (64, 4): {"interpret": (3, 300), "cuda": (3, 9724)},
    (64, 8): {"interpret": (7, 300), "cuda": (7, 9724)},
}


@pytest.mark.kernel
@every_order
@pytest.mark.parametrize("large_is_a", [False, True])
@pytest.mark.parametrize("k", [4, 16, 132, 700])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile(tile, k, large_is_a, transpose_b, transpose_a, skinny):
    """Rows of the large factor in packs; warps without a step, with one, and with more than their
    ring has stages."""
    implementation = skinny["implementation"]
    m, n = TILES[tile][implementation]
    if large_is_a:
        m, n = n, m
    a, b = factors(m, n, k)
    y, config = helpers.recorded_dot(a, b, transpose_a, transpose_b, "float32", **skinny)
    assert_product(y, a, b)
    rows, cols, packs_large, packs_skinny = tile_of(config, m, n)
    assert cols == tile[1]
    assert packs_large
    assert packs_skinny == (transpose_b if large_is_a else not transpose_a)
    if implementation == "interpret" and k > 4:  # GPUs have various numbers of multiprocessors
        is_deep = not transpose_a if large_is_a else transpose_b
        assert rows == (32 if is_deep else tile[0])


@pytest.mark.kernel
@every_order
@pytest.mark.parametrize("k", [1, 3, 127, 128, 130])
@pytest.mark.parametrize("m", range(1, 18))
def test_any_number_of_rows_and_columns(m, k, transpose_b, transpose_a, skinny):
    """Of either factor, so that rows begin at any address."""
    sizes = [each for each in ((m, 33), (33, m), (m, 16), (16, m)) if min(each) <= 16]
    pairs = [factors(rows, cols, k) for rows, cols in sizes]
    stored = [(helpers.stored(a, transpose_a), helpers.stored(b, transpose_b)) for a, b in pairs]

    @jax.jit  # one program is compiled faster than four
    def products(stored):
        return [
            helpers.dot(*each, transpose_a, transpose_b, "float32", **skinny) for each in stored
        ]

    with helpers.recorded(skinny["implementation"]) as executions:
        ys = jax.block_until_ready(products(stored))
    assert [each["algorithm"] for each in executions] == len(pairs) * ["fma_skinny"]
    for y, (a, b) in zip(ys, pairs, strict=True):
        assert_product(y, a, b)


@pytest.mark.kernel
@every_order
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1), (1, 1, 4), (3, 5, 7), (1, 131, 517), (131, 1, 260), (16, 131, 261), (9, 67, 1031)],
    ids=str,
)
def test_rows_without_whole_packs(sizes, transpose_b, transpose_a, skinny):
    m, n, k = sizes
    a, b = factors(m, n, k)
    y, config = helpers.recorded_dot(a, b, transpose_a, transpose_b, "float32", **skinny)
    assert_product(y, a, b)
    _, _, packs_large, _ = tile_of(config, m, n)
    large_is_deep = max(m, n) == 1 or (not transpose_a if m > n else transpose_b)
    assert packs_large == ((k if large_is_deep else max(m, n)) % 4 == 0)


@pytest.mark.kernel
@every_order
def test_every_element_is_written(transpose_b, transpose_a, skinny):
    """Into memory that held NaN."""
    for m, n, k in ((5, 132, 68), (131, 3, 129), (16, 33, 128)):
        a, b = factors(m, n, k)

        @jax.jit
        def product(poison, a, b):
            del poison
            return helpers.dot(a, b, transpose_a, transpose_b, "float32", **skinny)

        poison = jnp.full((m, n), np.nan, "float32")
        y = product(poison, helpers.stored(a, transpose_a), helpers.stored(b, transpose_b))
        assert_product(y, a, b)


@pytest.mark.kernel
@pytest.mark.parametrize("share", ["", "a", "b"])
@every_order
@pytest.mark.parametrize("sizes", [(4, 72, 104), (67, 3, 101), (5, 68, 264)], ids=str)
def test_batches(sizes, transpose_b, transpose_a, share, skinny):
    m, n, k = sizes
    a, b = helpers.normal((3, m, k), "float32"), helpers.normal((3, k, n), "float32", 1)
    helpers.assert_gemm_of_batch(a, b, share, transpose_a, transpose_b, **skinny)


# Clusters: few tiles of a large depth.


@pytest.mark.kernel
@every_order
@pytest.mark.parametrize(
    ("sizes", "splits", "deep_splits"),  # the second if the large factor's depth is contiguous
    [
        ((3, 20, 1100), 3, 1),
        ((12, 12, 1100), 4, 3),
        ((13, 40, 1101), 2, 2),
        ((40, 13, 1100), 2, 2),
    ],
    ids=str,
)
def test_blocks_of_a_cluster_divide_the_depth(
    sizes, splits, deep_splits, transpose_b, transpose_a, skinny
):
    """Their number need not divide the elements of a tile, nor the depth's steps."""
    m, n, k = sizes
    a, b = factors(m, n, k)
    y, config = helpers.recorded_dot(a, b, transpose_a, transpose_b, "float32", **skinny)
    assert_product(y, a, b)
    is_deep = not transpose_a if m > n else transpose_b
    if skinny["implementation"] == "interpret":
        assert config["splits"] == (deep_splits if is_deep else splits)
    elif not is_deep:  # GPUs have various numbers of multiprocessors
        assert config["splits"] > 1


@pytest.mark.kernel
@pytest.mark.parametrize("share", ["", "a", "b"])
def test_clusters_of_batches(share, skinny):
    a, b = helpers.normal((2, 12, 1100), "float32"), helpers.normal((2, 1100, 12), "float32", 1)
    a, b = a[0] if share == "a" else a, b[0] if share == "b" else b
    with helpers.recorded(skinny["implementation"]) as executions:
        y = np.asarray(jax_gpuops.matmul(a, b, **skinny))
    assert_product(y, a, b)
    assert executions[0]["config"]["splits"] > 1


@pytest.mark.kernel
@pytest.mark.parametrize("sizes", [(12, 12, 1100), (5, 520, 1100)], ids=str)
def test_repeats_are_bit_identical(sizes, skinny):
    a, b = factors(*sizes)
    product = jax.jit(lambda: jax_gpuops.matmul(a, b, **skinny))
    expected = np.asarray(product())
    for _ in range(2 if skinny["implementation"] == "interpret" else 100):
        helpers.assert_same_bits(product(), expected)


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("sizes", "warps"),
    [((3, 72, 700), (0, 5)), ((40, 12, 701), (0, 5)), ((12, 20, 1100), (0, 5, 12))],
    ids=str,
)
def test_any_order_of_threads(sizes, warps, skinny):
    """The last one by the blocks of a cluster."""
    if skinny["implementation"] != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    m, n, k = sizes
    a, b = helpers.normal((2, m, k), "float32"), helpers.normal((2, k, n), "float32", seed=1)
    schedules = [(1, {}), (2, {}), *((3 + i, {"warp": warp}) for i, warp in enumerate(warps))]
    helpers.under_each_schedule(lambda: jax_gpuops.matmul(a, b, **skinny), schedules)


# Values


@pytest.mark.kernel
@pytest.mark.parametrize("sizes", [(5, 72, 264), (5, 67, 261), (12, 12, 1100)], ids=str)
def test_special_values_stay_in_their_row_and_column(sizes, skinny):
    """Neither what fills tiles up nor another row's element meets an infinity."""
    m, n, k = sizes
    a, b = factors(m, n, k)
    a[3, k - 1], b[2, n - 1], a[4, 0] = np.inf, -np.inf, np.nan
    with np.errstate(invalid="ignore"):
        expected = a @ b
    for transpose_a in (False, True):
        for transpose_b in (False, True):
            y = helpers.dot(
                helpers.stored(a, transpose_a),
                helpers.stored(b, transpose_b),
                transpose_a,
                transpose_b,
                "float32",
                **skinny,
            )
            for which in (np.isnan, np.isposinf, np.isneginf):
                np.testing.assert_array_equal(which(y), which(expected))


@pytest.mark.kernel
@pytest.mark.parametrize("sizes", [(6, 72, 264), (6, 67, 261), (6, 20, 1100)], ids=str)
def test_a_row_does_not_depend_on_the_others(sizes, skinny):
    a, b = factors(*sizes)
    others = helpers.normal(a.shape, "float32", seed=2, scale=1e6)
    others[4] = a[4]
    y, z = jax_gpuops.matmul(a, b, **skinny), jax_gpuops.matmul(others, b, **skinny)
    helpers.assert_same_bits(y[4], z[4])


@pytest.mark.kernel
@pytest.mark.parametrize("k", [40, 600, 1100])
@pytest.mark.parametrize(("m", "n"), [(1, 70), (5, 8), (65, 3), (65, 16)])
def test_alpha_and_c(m, n, k, skinny):
    a, b = factors(m, n, k)
    c = helpers.normal((m, n), "float32", seed=2)
    y = jax_gpuops.gemm(a, b, c, alpha=0.5, beta=-2, **skinny)
    assert_product(y, a, b, 0.5, -2 * helpers.exact(c))


@pytest.mark.kernel
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("sizes", [(7, 44, 72), (37, 12, 73), (5, 12, 1100)], ids=str)
def test_a_bias_an_activation_and_a_residual(sizes, activation, skinny):
    m, n, k = sizes
    x, w = factors(m, n, k)
    bias, residual = helpers.normal((n,), "float32", 2), helpers.normal((m, n), "float32", 3)
    y = jax_gpuops.linear(x, w, bias, activation=activation, residual=residual, **skinny)
    total = helpers.exact(x) @ helpers.exact(w) + helpers.exact(bias)
    expected = helpers.activated(activation, total) + helpers.exact(residual)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.kernel
def test_without_depth_it_is_zero(skinny):
    y = jax_gpuops.matmul(jnp.ones((8, 0)), jnp.ones((0, 40)), **skinny)
    np.testing.assert_array_equal(y, np.zeros((8, 40)))


@pytest.mark.kernel
@pytest.mark.parametrize("offset", [4, 8])
def test_any_address(offset, skinny):
    """What begins within a pack is read element by element."""
    if skinny["implementation"] != "interpret":
        pytest.skip("JAX aligns the buffers of a GPU")
    a, b = factors(8, 40, 132)
    with helpers.buffers_at(offset), helpers.recorded("interpret") as executions:
        y = np.asarray(jax_gpuops.matmul(a, b, **skinny))
    assert_product(y, a, b)
    config = executions[0]["config"]
    assert not config["pack_a"]
    assert not config["pack_b"]


@pytest.mark.kernel
def test_gradients(skinny):
    """Those of a factor with more rows and columns are the plan's."""
    a, b = factors(5, 136, 12)
    g = helpers.normal((5, 136), "float32", seed=2)
    how = {**skinny, "precision": "highest"}
    _, pull = jax.vjp(lambda a, b: jax_gpuops.matmul(a, b, **how), a, b)
    a_bar, b_bar = pull(jnp.asarray(g))
    assert_product(a_bar, g, b.T)
    assert_product(b_bar, a.T, g)


# The plan


@pytest.mark.parametrize(
    ("shapes", "dtype", "precision", "why"),
    [
        (((8, 8), (8, 8)), "bfloat16", None, "supports only float32, not bfloat16"),
        (((8, 8), (8, 8)), "float64", None, "supports only float32, not float64"),
        (((17, 8), (8, 17)), "float32", None, "supports at most 16 rows or columns"),
        (((8, 8), (8, 8)), "float32", "TF32_TF32_F32", "multiplies float32 with precision F32"),
        (((8, 8), (8, 8)), "float32", "BF16_BF16_F32_X6", "multiplies float32 with precision F32"),
    ],
)
def test_what_it_refuses(shapes, dtype, precision, why, skinny):
    with helpers.x64(dtype), pytest.raises(ValueError, match=f"algorithm 'fma_skinny' {why}"):
        jax_gpuops.matmul(
            *(jnp.ones(shape, dtype) for shape in shapes), precision=precision, **skinny
        )


@pytest.mark.parametrize("precision", [None, "high", "highest", "F32_F32_F32"])
@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 4096), (4096, 5120)),
        ((4, 2560), (2560, 9728)),
    ],
    ids=str,
)
def test_the_plan_takes_it_for_few_rows_or_columns(shapes, precision, skinny):
    """At any precision that float32 products satisfy, though it is not the highest."""
    how = {"implementation": skinny["implementation"], "precision": precision}
    assert jax_gpuops.plan("matmul", shapes, "float32", **how).algorithm == "fma_skinny"


@pytest.mark.parametrize(
    ("precision", "algorithms"),
    [(None, ["tensor_core", "split_k"]), ("highest", ["fma_sliced"])],
)
def test_the_plan_leaves_a_large_factor_that_is_deep(precision, algorithms, skinny):
    """As of an output layer: tensor cores read it without a copy, and FMAs in longer runs."""
    plan = jax_gpuops.plan(
        "dot_general",
        [(4, 1024), (51865, 1024)],
        "float32",
        dimension_numbers=(((1,), (1,)), ((), ())),
        implementation=skinny["implementation"],
        precision=precision,
    )
    assert plan.algorithm in algorithms


@pytest.mark.parametrize(
    ("shapes", "dtype", "precision"),
    [
        (((2, 4096), (4096, 5120)), "bfloat16", None),
        (((2, 4096), (4096, 5120)), "float32", "TF32_TF32_F32"),
        (((2, 4096), (4096, 5120)), "float32", "BF16_BF16_F32_X6"),
        (((17, 4096), (4096, 5120)), "float32", None),
        (((2, 100), (100, 5120)), "float32", None),  # no depth for all warps
        (((1, 256), (256, 64)), "float32", None),
    ],
    ids=str,
)
def test_the_plan_does_not_take_it_for_others(shapes, dtype, precision, skinny):
    how = {"implementation": skinny["implementation"], "precision": precision}
    assert jax_gpuops.plan("matmul", shapes, dtype, **how).algorithm != "fma_skinny"


@pytest.mark.kernel
@pytest.mark.parametrize("precision", ["default", "highest"])
@every_order
@pytest.mark.parametrize("sizes", [(5, 520, 300), (300, 13, 516), (16, 132, 131)], ids=str)
def test_what_runs_is_what_was_planned(sizes, transpose_b, transpose_a, precision, skinny):
    """Without workspace for copies of factors that tensor cores could not read."""
    m, n, k = sizes
    implementation = skinny["implementation"]
    a, b = factors(m, n, k)
    how = {"implementation": implementation, "precision": precision}
    contract = (((0 if transpose_a else 1,), (1 if transpose_b else 0,)), ((), ()))
    a_stored, b_stored = helpers.stored(a, transpose_a), helpers.stored(b, transpose_b)
    planned = jax_gpuops.plan(
        "dot_general",
        [a_stored.shape, b_stored.shape],
        "float32",
        dimension_numbers=contract,
        **how,
    )
    with helpers.recorded(implementation) as executions:
        y = jax.block_until_ready(
            helpers.dot(a_stored, b_stored, transpose_a, transpose_b, "float32", **how)
        )
    assert executions[0]["algorithm"] == planned.algorithm
    assert executions[0]["problem"]["workspace"] == 0
    if planned.algorithm == "fma_skinny":
        assert_product(y, a, b)


@pytest.mark.kernel
def test_rows_that_must_not_depend_on_their_number_are_by_others(skinny):
    implementation = skinny["implementation"]
    a, b = factors(2, 520, 300)
    with helpers.recorded(implementation) as executions:
        for precision in ("default", "highest"):
            how = {"implementation": implementation, "precision": precision}
            jax.block_until_ready(jax_gpuops.matmul(a, b, batch_invariant=True, **how))
            jax.block_until_ready(jax_gpuops.matmul(a, b, **how))
    names = [each["algorithm"] for each in executions]
    assert names[::2] == ["tensor_core", "double_buffered"]
    if implementation == "interpret":  # GPUs have various numbers of multiprocessors
        assert names[1::2] == ["fma_skinny"] * 2
