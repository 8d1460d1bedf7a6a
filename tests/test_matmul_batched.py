"""Batches of small products, and of rows that begin at any address, on any GPU's tensor cores."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_linear import assert_linear

import jax_gpuops as ops

# For each tile, m and n that the plan gives it to.
TILES = {(32, 32): (27, 29), (64, 64): (197, 60), (128, 128): (200, 131)}


@pytest.fixture
def batched(implementation):
    """The options of a product by mma_batched, which not every GPU can run."""
    return helpers.options("matmul", "mma_batched", implementation, [(8, 8), (8, 8)], "bfloat16")


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        ("float16", "float16"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
        ("float32", "float32"),
    ],
)
@helpers.every_layout
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile(tile, transpose_a, transpose_b, dtype, result, batched):
    """With rows, columns and a depth that no tile divides."""
    sizes, layout = (*TILES[tile], 70), (transpose_a, transpose_b)
    config = helpers.assert_products(2, sizes, *layout, dtype, result, **batched)
    assert (config["tile_rows"], config["tile_cols"]) == tile


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@helpers.every_layout
@pytest.mark.parametrize(
    "sizes",
    [
        *[(1, 1, 1), (3, 5, 7), (5, 3, 513), (16, 16, 16), (66, 34, 102), (67, 132, 33)],
        *[(197, 197, 64), (197, 64, 197), (49, 32, 49), (64, 72, 128), (130, 8, 520)],
    ],
    ids=str,
)
def test_rows_of_any_length(sizes, transpose_a, transpose_b, dtype, batched):
    """Lines are copied in whole pieces of 16 bytes, which other lines share."""
    helpers.assert_products(3, sizes, transpose_a, transpose_b, dtype, dtype, **batched)


@pytest.mark.kernel
@pytest.mark.parametrize("share", ["a", "b"])
@helpers.every_layout
def test_a_factor_of_the_whole_batch(transpose_a, transpose_b, share, batched):
    a, b = helpers.factor((3, 70, 37), "float16"), helpers.factor((3, 37, 70), "float16", seed=1)
    helpers.assert_gemm_of_batch(a, b, share, transpose_a, transpose_b, **batched)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@helpers.every_layout
def test_neighbours_of_a_factor_do_not_matter(transpose_a, transpose_b, dtype, batched):
    """Pieces bring elements of other rows and matrices, here NaN and infinity."""
    a, b = helpers.factor((3, 35, 37), dtype), helpers.factor((3, 37, 33), dtype, seed=1)
    expected = ops.matmul(a[1], b[1], **batched)
    a[0], a[2], b[0], b[2] = np.nan, np.inf, np.inf, np.nan
    y, _ = helpers.recorded_dot(a, b, transpose_a, transpose_b, dtype, **batched)
    helpers.assert_same_bits(y[1], expected)
    a[1, 3], b[1, :, 5] = np.nan, np.inf
    others, _ = helpers.recorded_dot(a, b, transpose_a, transpose_b, dtype, **batched)
    rows, cols = np.arange(35) != 3, np.arange(33) != 5
    helpers.assert_same_bits(others[1][rows][:, cols], expected[rows][:, cols])
    assert np.all(np.isnan(helpers.exact(others[1, 3])))


@pytest.mark.kernel
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_exact", "silu"], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_bias_of_each_matrix(dtype, activation, batched):
    x, w = helpers.factor((3, 50, 37), dtype), helpers.factor((3, 37, 75), dtype, seed=1)
    b = helpers.normal((3, 75), dtype, seed=2)
    y = jax.vmap(lambda x, w, b: ops.linear(x, w, b, activation=activation, **batched))(x, w, b)
    assert_linear(y, x, w, b, activation)


@pytest.mark.kernel
def test_no_depth(batched):
    y = ops.matmul(jnp.ones((2, 33, 0), "bfloat16"), jnp.ones((2, 0, 5), "bfloat16"), **batched)
    helpers.assert_same_bits(y, np.zeros((2, 33, 5), y.dtype))


@pytest.mark.kernel
def test_rows_do_not_depend_on_others(batched):
    """The depth is added in the same order in every tile."""
    a, b = helpers.factor((3, 200, 150), "bfloat16"), helpers.factor((3, 150, 131), "bfloat16")
    expected = ops.matmul(a, b, **batched)
    for m, n in [(1, 131), (27, 27), (64, 60), (200, 1)]:
        y = ops.matmul(a[:, :m], b[:, :, :n], **batched)
        helpers.assert_same_bits(y, expected[:, :m, :n])


def test_addresses_within_pieces(batched):
    if batched["implementation"] != "interpret":
        pytest.skip("JAX aligns the buffers of a GPU")
    x = helpers.factor((2, 8, 8), "bfloat16")
    with helpers.buffers_at(8), pytest.raises(Exception, match="requires arrays aligned to 16"):
        jax.block_until_ready(ops.matmul(x, x, **batched))


@pytest.mark.parametrize(
    ("sizes", "chosen"),
    [
        ((96, 577, 64, 577), True),  # attention scores in rows that begin anywhere
        ((96, 197, 197, 64), True),  # weighted values: the rows of a begin anywhere
        ((96, 1500, 1500, 64), True),
        ((192, 77, 64, 77), True),  # small matrices
        ((4096, 49, 32, 49), True),
        ((4096, 27, 128, 27), True),
        ((4096, 27, 27, 128), True),  # a small depth
        ((8192, 9, 3, 9), True),
        ((48, 77, 77, 64), True),
        ((96, 200, 64, 200), False),
        ((64, 512, 64, 512), False),
        ((2, 49, 32, 49), False),  # too few for all multiprocessors
        ((8, 2049, 2049, 2049), False),  # so large that a copy pays
    ],
    ids=str,
)
def test_what_the_plan_gives_to_it(sizes, chosen, batched):
    batch, m, k, n = sizes
    shapes, how = [(batch, m, k), (batch, k, n)], {"implementation": batched["implementation"]}
    plan = ops.plan("matmul", shapes, "bfloat16", **how)
    assert (plan.algorithm == "mma_batched") == chosen
