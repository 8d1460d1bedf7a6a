"""Batches of small float32 products by FMAs."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_linear import assert_linear
from test_matmul_fma import assert_product

import jax_gpuops as ops
from jax_gpuops import _library


@pytest.fixture
def batched(implementation):
    """The options of a product by fma_batched, which not every GPU can run."""
    return helpers.options("matmul", "fma_batched", implementation, [(8, 8), (8, 8)], "float32")


def factors(batch, m, n, k):
    return helpers.normal((batch, m, k), "float32"), helpers.normal((batch, k, n), "float32", 1)


@pytest.mark.kernel
@pytest.mark.parametrize("aligned", [True, False], ids=["16 bytes", "4 bytes"])
@helpers.every_layout
@pytest.mark.parametrize("tile", [32, 64])
def test_every_kernel(tile, transpose_a, transpose_b, aligned, batched):
    """Copies of packs and of elements, with rows, columns and a depth left over."""
    few, many = 3, 2 * helpers.multiprocessors(batched["implementation"])
    sizes = {
        (32, True): (few, 28, 20, 68),
        (32, False): (few, 27, 29, 69),
        (64, True): (many, 60, 64, 36),
        (64, False): (many, 61, 59, 37),
    }
    a, b = factors(*sizes[tile, aligned])
    y, config = helpers.recorded_dot(a, b, transpose_a, transpose_b, "float32", **batched)
    assert_product(y, a, b)
    assert (config["tile_rows"], config["tile_cols"]) == (tile, tile)
    assert config["vector_bytes"] == (16 if aligned else 4)


@pytest.mark.kernel
@helpers.every_layout
@pytest.mark.parametrize(
    "sizes",
    [
        *[(1, 1, 1), (1, 65, 3), (65, 1, 31), (31, 77, 32), (32, 33, 33), (33, 31, 128)],
        *[(49, 49, 32), (27, 27, 128), (64, 32, 160), (77, 64, 77), (32, 64, 3), (40, 24, 16)],
        *[(36, 49, 4), (49, 36, 132)],  # rows of whole packs in one factor alone, or in the result
    ],
    ids=str,
)
def test_edges_of_tiles(sizes, transpose_a, transpose_b, batched):
    a, b = factors(2, *sizes)
    y, _ = helpers.recorded_dot(a, b, transpose_a, transpose_b, "float32", **batched)
    assert_product(y, a, b)


@pytest.mark.kernel
@helpers.every_layout
@pytest.mark.parametrize("offset", [4, 8, 12])
def test_addresses_within_a_pack(offset, transpose_a, transpose_b, batched):
    if batched["implementation"] != "interpret":
        pytest.skip("JAX aligns the buffers of a GPU")
    a, b = factors(2, 36, 40, 20)
    with helpers.buffers_at(offset):
        y, config = helpers.recorded_dot(a, b, transpose_a, transpose_b, "float32", **batched)
    assert_product(y, a, b)
    assert config["vector_bytes"] == 4
    assert not config["pack_result"]


@pytest.mark.kernel
@pytest.mark.parametrize("share", ["a", "b"])
@helpers.every_layout
def test_a_factor_of_the_whole_batch(transpose_a, transpose_b, share, batched):
    a, b = factors(3, 49, 33, 37)
    helpers.assert_gemm_of_batch(a, b, share, transpose_a, transpose_b, **batched)


@pytest.mark.kernel
@pytest.mark.parametrize("k", [36, 37])
@helpers.every_layout
def test_infinities_stay_in_their_row_and_column(transpose_a, transpose_b, k, batched):
    """Neither what fills tiles up, nor another row or matrix, meets them."""
    a, b = factors(3, 35, 33, k)
    a[0], a[2], b[0], b[2] = np.nan, np.inf, -np.inf, np.nan
    a[1, 3, k - 1], b[1, 2, 32], a[1, 7, 0] = np.inf, -np.inf, np.nan
    y, _ = helpers.recorded_dot(a, b, transpose_a, transpose_b, "float32", **batched)
    with np.errstate(invalid="ignore"):
        expected = a[1].astype(np.float64) @ b[1].astype(np.float64)
    for which in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(which(y[1]), which(expected))


@pytest.mark.kernel
@pytest.mark.parametrize("sizes", [(27, 27, 37), (33, 40, 64)], ids=str)
def test_alpha_and_c(sizes, batched):
    """With rows of the result that are no whole packs, or are."""
    a, b = factors(3, *sizes)
    c = helpers.normal((3, *sizes[:2]), "float32", seed=2)
    y = ops.gemm(a, b, c, alpha=0.5, beta=-2, **batched)
    assert_product(y, a, b, 0.5, -2 * helpers.exact(c))


@pytest.mark.kernel
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_exact", "silu"], ids=str)
@pytest.mark.parametrize("n", [29, 36])
def test_a_bias_of_each_matrix(n, activation, batched):
    x, w = factors(3, 50, n, 37)
    b = helpers.normal((3, n), "float32", seed=2)
    y = jax.vmap(lambda x, w, b: ops.linear(x, w, b, activation=activation, **batched))(x, w, b)
    assert_linear(y, x, w, b, activation)


@pytest.mark.kernel
def test_no_depth(batched):
    a, b, c = jnp.ones((2, 33, 0)), jnp.ones((2, 0, 5)), helpers.normal((2, 33, 5), "float32")
    helpers.assert_same_bits(ops.matmul(a, b, **batched), np.zeros((2, 33, 5), "float32"))
    helpers.assert_same_bits(ops.gemm(a, b, c, beta=2, **batched), 2 * c)


@pytest.mark.kernel
def test_rows_do_not_depend_on_others(batched):
    """The depth is added in the same order in every tile."""
    a, b = factors(2 * helpers.multiprocessors(batched["implementation"]), 64, 62, 70)
    expected = ops.matmul(a, b, **batched)
    for m, n in [(1, 62), (27, 27), (64, 1)]:
        y = ops.matmul(a[:, :m], b[:, :, :n], **batched)
        helpers.assert_same_bits(y, expected[:, :m, :n])


@pytest.mark.kernel
@pytest.mark.parametrize("sizes", [(2, 33, 27, 100), (8, 64, 62, 68)], ids=str)
def test_any_order_of_threads(sizes, batched):
    if batched["implementation"] != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    a, b = factors(*sizes)
    schedules = [(1, {}), (2, {}), (3, {"warp": 0}), (4, {"warp": 1})]
    y = helpers.under_each_schedule(lambda: ops.matmul(a, b, **batched), schedules)
    assert_product(y, a, b)


def test_what_it_refuses(batched):
    x = jnp.ones((2, 8, 8))
    with pytest.raises(ValueError, match="'fma_batched' supports only float32, not bfloat16"):
        ops.matmul(*2 * [x.astype("bfloat16")], **batched)
    for precision in ("TF32_TF32_F32", "BF16_BF16_F32_X6"):
        with pytest.raises(
            ValueError, match=f"multiplies float32 with precision F32_F32_F32, not {precision}"
        ):
            ops.matmul(x, x, precision=precision, **batched)


@pytest.mark.parametrize("precision", ["highest", "F32_F32_F32"])
@pytest.mark.parametrize(
    ("products", "sizes", "chosen"),
    [
        (248, (27, 27, 128), True),  # feature interactions of DLRM
        (16, (27, 27, 128), True),
        (31, (49, 49, 32), True),  # windows of Swin
        (1.5, (77, 77, 64), True),  # attention scores of CLIP
        (1.5, (197, 64, 197), True),  # weighted values of ViT
        (1.25, (160, 24, 160), True),
        (4, (1024, 1024, 1024), False),  # large tiles read the factors less often
        (1, (32, 32, 2048), False),  # warps share the depth of few tiles
        (1024, (2, 2, 2), False),  # a thread computes an element as fast
    ],
    ids=str,
)
def test_what_the_plan_gives_to_it(products, sizes, chosen, precision, batched):
    """Batches of so many products for each multiprocessor."""
    m, n, k = sizes
    batch = int(products * helpers.multiprocessors(batched["implementation"]))
    how = {"implementation": batched["implementation"], "precision": precision}
    plan = ops.plan("matmul", [(batch, m, k), (batch, k, n)], "float32", **how)
    assert (plan.algorithm == "fma_batched") == chosen, plan


@pytest.mark.parametrize(
    ("tiles", "chosen"),
    [
        (0.25, False),  # warps share the depth of few tiles
        (6, True),
        (16, False),  # larger tiles read the factors less often
    ],
)
def test_which_single_products_the_plan_gives_to_it(tiles, chosen, batched):
    """Of so many tiles of 32 x 32 for each multiprocessor."""
    implementation = batched["implementation"]
    m = int(8 * tiles * helpers.multiprocessors(implementation))
    how = {"implementation": implementation, "precision": "highest"}
    plan = ops.plan("matmul", [(m, 192), (192, 128)], "float32", **how)
    assert (plan.algorithm == "fma_batched") == chosen, plan


def test_the_plan_keeps_tensor_cores_where_the_precision_allows_them(batched):
    shapes = [(256, 49, 32), (256, 32, 49)]
    plan = ops.plan("matmul", shapes, "float32", implementation=batched["implementation"])
    assert plan.algorithm == "mma_batched"


@pytest.mark.kernel
def test_it_needs_no_workspace(batched):
    """Neither in the plan nor in the call that the plan describes."""
    implementation = batched["implementation"]
    a, b = factors(16 * helpers.multiprocessors(implementation), 27, 27, 33)
    with helpers.recorded(implementation) as executions:
        y = jax.block_until_ready(
            ops.matmul(a, b, implementation=implementation, precision="highest")
        )
    assert_product(y, a, b)
    (execution,) = executions
    assert execution["problem"]["workspace"] == 0
    plan = _library.module(implementation).plan(
        "matmul", {**execution["problem"], "algorithm": ""}, 0
    )
    assert (execution["algorithm"], execution["config"]) == ("fma_batched", plan["config"])
    assert plan["config"]["workspace_bytes"] == 0
