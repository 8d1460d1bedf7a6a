"""tensor_core's tiles of 96 and 160 to 208 rows, which compute the transposed product."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gpuops

# For each tile's rows, m, n and k that the plan gives it to, on the host's 4 multiprocessors and on
# an H200.
TILES = {
    96: {"interpret": (90, 520, 136), "cuda": (285, 4096, 264)},
    160: {"interpret": (300, 264, 136), "cuda": (308, 8168, 136)},
    192: {"interpret": (190, 392, 72), "cuda": (190, 16832, 192)},
    208: {"interpret": (200, 832, 192), "cuda": (200, 14400, 192)},
}
FLOATS_OF_16_BITS = ["float16", "bfloat16"]


@pytest.fixture
def on_tensor_cores(implementation):
    return helpers.options("matmul", "tensor_core", implementation, [(8, 8), (8, 8)], "bfloat16")


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", FLOATS_OF_16_BITS)
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("rows", TILES)
def test_every_kernel(rows, transpose_b, dtype, on_tensor_cores):
    m, n, k = TILES[rows][on_tensor_cores["implementation"]]
    a, b = helpers.normal((m, k), dtype), helpers.normal((k, n), dtype, seed=1)
    y, config = helpers.recorded_dot(a, b, False, transpose_b, dtype, **on_tensor_cores)
    assert y.dtype == dtype
    helpers.assert_matmul(y, a, b)
    assert (config["turned"], config["tile_rows"], config["tile_cols"]) == (True, rows, 128)


@pytest.mark.kernel
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(
    ("batch", "m", "n", "k"),
    [
        (3, 70, 504, 72),
        (1, 96, 520, 131),
        (3, 129, 136, 64),  # one step of the depth, fewer than panels of a tile
        (3, 160, 264, 67),  # copies of factors
        (5, 131, 264, 200),  # each block takes several tiles,
        (5, 308, 264, 72),  # of two rows
        (1, 320, 504, 136),
        (5, 161, 264, 136),
        (3, 192, 520, 67),
        (1, 201, 832, 64),
        (7, 197, 128, 128),
        (7, 208, 120, 128),
        (11, 129, 8, 136),  # of few columns
    ],
)
def test_edges(batch, m, n, k, transpose_b, on_tensor_cores):
    """Every element is written, over an array of NaN, and nothing beside them."""
    dtype = "bfloat16" if k % 8 == 0 else "float16"
    a, b = helpers.normal((batch, m, k), dtype), helpers.normal((batch, k, n), dtype, seed=1)

    @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
    def product(poison, a, b):
        del poison
        return helpers.dot(a, b, False, transpose_b, dtype, **on_tensor_cores)

    with helpers.recorded(on_tensor_cores["implementation"]) as executions:
        poison = jnp.full((batch, m, n), np.nan, dtype)
        y = jax.block_until_ready(product(poison, a, helpers.stored(b, transpose_b)))
    helpers.assert_matmul(y, a, b)
    if on_tensor_cores["implementation"] == "interpret":  # an H200 has a small tile for each block
        assert executions[0]["config"]["turned"]


@pytest.mark.kernel
@pytest.mark.parametrize("share", ["a", "b"])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_shared_factors(transpose_b, share, on_tensor_cores):
    """With a shared b, the rows of the batch are those of one product."""
    batch, m, n, k = {"interpret": (2, 150, 264, 72), "cuda": (2, 308, 4096, 136)}[
        on_tensor_cores["implementation"]
    ]
    a, b = helpers.normal((batch, m, k), "bfloat16"), helpers.normal((batch, k, n), "bfloat16", 1)
    a, b = a[0] if share == "a" else a, b[0] if share == "b" else b
    with helpers.recorded(on_tensor_cores["implementation"]) as executions:
        y = jax.block_until_ready(
            jax_gpuops.gemm(
                a, helpers.stored(b, transpose_b), transpose_b=transpose_b, **on_tensor_cores
            )
        )
    helpers.assert_matmul(y, a, b)
    if on_tensor_cores["implementation"] == "interpret" or share == "a":
        assert executions[0]["config"]["turned"]


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", FLOATS_OF_16_BITS)
@pytest.mark.parametrize("rows", TILES)
def test_the_bits_are_those_of_other_tiles(rows, dtype, on_tensor_cores):
    """Of an a whose depth is not contiguous, the product is not transposed."""
    m, n, k = TILES[rows][on_tensor_cores["implementation"]]
    a, b = helpers.normal((m, k), dtype), helpers.normal((k, n), dtype, seed=1)
    y, config = helpers.recorded_dot(a, b, False, False, dtype, **on_tensor_cores)
    assert config["turned"]
    expected, config = helpers.recorded_dot(a, b, True, False, dtype, **on_tensor_cores)
    assert not config["turned"]
    helpers.assert_same_bits(y, expected)


@pytest.mark.kernel
def test_results_do_not_depend_on_the_batch(on_tensor_cores):
    """Rows of a product, and of smaller ones, by other tiles."""
    implementation = on_tensor_cores["implementation"]
    m, n, k = TILES[160][implementation]
    a, b = helpers.normal((m, k), "bfloat16"), helpers.normal((k, n), "bfloat16", seed=1)
    how = {"implementation": implementation, "batch_invariant": True}
    with helpers.recorded(implementation) as executions:
        y = jax.block_until_ready(jax_gpuops.matmul(a, b, **how))
    assert executions[0]["config"]["turned"]
    for rows in (slice(0, 1), slice(0, 72), slice(m - 70, m)):
        helpers.assert_same_bits(jax_gpuops.matmul(a[rows], b, **how), y[rows])


@pytest.mark.kernel
def test_special_values_stay_in_their_row_and_column(on_tensor_cores):
    """Stages keep old rows beyond the last row of a, and zeros beyond the end of the depth."""
    m, n, k = TILES[160][on_tensor_cores["implementation"]]
    a, b = helpers.normal((m, k), "bfloat16"), helpers.normal((k, n), "bfloat16", seed=1)
    a[3, k - 1], a[m - 1, 5], b[2, n - 1] = np.inf, np.nan, -np.inf
    y, config = helpers.recorded_dot(a, b, False, False, "bfloat16", **on_tensor_cores)
    assert config["turned"]
    special = np.zeros((m, n), bool)
    special[[3, m - 1]], special[:, n - 1] = True, True
    np.testing.assert_array_equal(np.isfinite(np.asarray(y, np.float32)), ~special)


@pytest.mark.kernel
@pytest.mark.parametrize("batch", [1, 5])
def test_any_order_of_threads(batch, on_tensor_cores):
    if on_tensor_cores["implementation"] != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    a = helpers.normal((batch, 136, 200), "bfloat16")
    b = helpers.normal((batch, 200, 264), "bfloat16", seed=1)
    with helpers.recorded("interpret") as executions:
        y = helpers.under_each_schedule(
            lambda: jax_gpuops.matmul(a, b, **on_tensor_cores),
            [(1, {}), (2, {}), *[(2 + block, {"block": block}) for block in (1, 2)]],
        )
    assert all(each["config"]["turned"] for each in executions)
    helpers.assert_matmul(y, a, b)


def multiply(x, w, **how):
    return jax_gpuops.matmul(x, w, **how)


def of_float32(x, w, **how):
    return jax_gpuops.matmul(x, w, preferred_element_type="float32", **how)


def of_columns(x, w, **how):
    return jax_gpuops.gemm(jnp.array(x.T), w, transpose_a=True, **how)


def of_partial_packs(x, w, **how):
    return jax_gpuops.matmul(x, w[:, :-1], **how)


def with_a_bias(x, w, **how):
    return jax_gpuops.linear(x, w, w[0], **how)


def with_an_activation(x, w, **how):
    return jax_gpuops.linear(x, w, activation="relu", **how)


def with_a_residual(x, w, **how):
    return jax_gpuops.gemm(x, w, jnp.ones((x.shape[0], w.shape[1]), w.dtype), beta=1, **how)


@pytest.mark.parametrize(
    "call",
    [of_float32, of_columns, of_partial_packs, with_a_bias, with_an_activation, with_a_residual],
)
def test_other_products_have_other_tiles(call, on_tensor_cores):
    m, n, k = TILES[160][on_tensor_cores["implementation"]]
    x, w = helpers.normal((m, k), "bfloat16"), helpers.normal((k, n), "bfloat16", seed=1)
    for function, turned in ((multiply, True), (call, False)):
        with helpers.recorded(on_tensor_cores["implementation"]) as executions:
            jax.block_until_ready(function(x, w, **on_tensor_cores))
        assert executions[-1]["config"]["turned"] == turned


@pytest.mark.kernel
@pytest.mark.parametrize(("m", "n"), [(90, 0), (0, 136)])
@pytest.mark.parametrize("k", [1024, 1032])
def test_no_elements(k, m, n, on_tensor_cores):
    """Of which no multiprocessor has a tile: the plan must not divide by their number."""
    a, b = jnp.ones((m, k), "bfloat16"), jnp.ones((k, n), "bfloat16")
    assert jax_gpuops.matmul(a, b, **on_tensor_cores).shape == (m, n)
