"""tensor_core for float32 whose b is stored as k x n: turned_kernel, without a copy of b."""

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
    64: {"interpret": (61, 456, 200), "cuda": (61, 4096, 200)},
    128: {"interpret": (104, 424, 136), "cuda": (1000, 2040, 136)},
    256: {"interpret": (250, 1000, 136), "cuda": (2000, 2040, 136)},
}
every_tile = pytest.mark.parametrize("rows", TILES)


@pytest.fixture
def on_tensor_cores(implementation):
    """The options of a product by tensor_core, which not every GPU can run."""
    return helpers.options("matmul", "tensor_core", implementation, [(8, 8), (8, 8)], "float32")


def floats(shape, seed=0):
    """Floats that TF32 holds, so that products are exact."""
    return helpers.to_tf32(helpers.normal(shape, "float32", seed))


def run(call, how):
    """The result of a call, which is waited for, and the config of its only kernel on tensor cores.

    Whatever b is, it must not have been copied.
    """
    with helpers.recorded(how["implementation"]) as executions:
        y = jax.block_until_ready(call())
    (execution,) = executions
    assert execution["algorithm"] == "tensor_core"
    assert execution["config"]["turned"]
    assert not execution["config"]["copies_b"]
    return y, execution["config"]


@pytest.mark.kernel
@every_tile
def test_every_tile(rows, on_tensor_cores):
    m, n, k = TILES[rows][on_tensor_cores["implementation"]]
    a, b = floats((m, k)), floats((k, n), 1)
    y, config = run(lambda: jax_gpuops.matmul(a, b, **on_tensor_cores), on_tensor_cores)
    helpers.assert_matmul(y, a, b)
    assert (config["tile_rows"], config["tile_cols"]) == (rows, 128)


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("batch", "m", "n", "k"),
    [
        (3, 1, 4, 1),
        (3, 63, 124, 33),
        (2, 65, 260, 32),  # one step of the depth
        (1, 17, 132, 31),
        (5, 64, 128, 300),  # each block takes several tiles, with more steps than stages
        (1, 128, 252, 77),
        (5, 129, 140, 67),
        (1, 110, 508, 290),
        (3, 257, 260, 36),
        (1, 300, 380, 140),
    ],
)
def test_edges(batch, m, n, k, on_tensor_cores):
    """Every element is written, over an array of NaN, and nothing beside them."""
    a, b = floats((batch, m, k)), floats((batch, k, n), 1)

    @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
    def product(poison, a, b):
        del poison
        return jax_gpuops.matmul(a, b, **on_tensor_cores)

    poison = jnp.full((batch, m, n), np.nan, "float32")
    y, _ = run(lambda: product(poison, a, b), on_tensor_cores)
    helpers.assert_matmul(y, a, b)


@pytest.mark.kernel
@pytest.mark.parametrize("share", ["a", "b"])
@every_tile
def test_shared_factors(rows, share, on_tensor_cores):
    m, n, k = TILES[rows]["interpret"]
    a, b = floats((2, m, k)), floats((2, k, n), 1)
    a, b = a[0] if share == "a" else a, b[0] if share == "b" else b
    y, _ = run(lambda: jax_gpuops.matmul(a, b, **on_tensor_cores), on_tensor_cores)
    helpers.assert_matmul(y, a, b)


@pytest.mark.kernel
@every_tile
def test_the_bits_are_those_of_a_transposed_b(rows, on_tensor_cores):
    """Which other kernels read as it is stored."""
    m, n, k = TILES[rows][on_tensor_cores["implementation"]]
    a, b = helpers.normal((m, k), "float32"), helpers.normal((k, n), "float32", seed=1)
    y, _ = run(lambda: jax_gpuops.matmul(a, b, **on_tensor_cores), on_tensor_cores)
    expected, config = helpers.recorded_dot(a, b, False, True, "float32", **on_tensor_cores)
    assert not config["turned"]
    helpers.assert_same_bits(y, expected)


@pytest.mark.kernel
def test_results_do_not_depend_on_the_batch(on_tensor_cores):
    """Rows of a product, and of smaller ones, by other tiles."""
    implementation = on_tensor_cores["implementation"]
    m, n, k = TILES[256][implementation]
    a, b = helpers.normal((m, k), "float32"), helpers.normal((k, n), "float32", seed=1)
    how = {"implementation": implementation, "batch_invariant": True}
    y, config = run(lambda: jax_gpuops.matmul(a, b, **how), on_tensor_cores)
    tiles = {config["tile_rows"]}
    for rows in (slice(0, 1), slice(m - 70, m), slice(3, 100)):
        part, config = run(lambda rows=rows: jax_gpuops.matmul(a[rows], b, **how), on_tensor_cores)
        helpers.assert_same_bits(part, y[rows])
        tiles.add(config["tile_rows"])
    assert len(tiles) > 1


@pytest.mark.kernel
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", [None, "relu"])
@every_tile
def test_a_residual(rows, activation, has_bias, on_tensor_cores):
    m, n, k = TILES[rows][on_tensor_cores["implementation"]]
    x, w, residual = floats((m, k)), floats((k, n), 1), helpers.normal((m, n), "float32", 2)
    bias = helpers.normal((n,), "float32", seed=3) if has_bias else None
    y, config = run(
        lambda: jax_gpuops.linear(
            x, w, bias, activation=activation, residual=residual, **on_tensor_cores
        ),
        on_tensor_cores,
    )
    sums = helpers.exact(x) @ helpers.exact(w) + (0 if bias is None else helpers.exact(bias))
    expected = (np.maximum(sums, 0) if activation else sums) + helpers.exact(residual)
    magnitude = np.abs(helpers.exact(x)) @ np.abs(helpers.exact(w)) + np.abs(expected) + 4
    helpers.assert_product(y, expected, magnitude, k)
    assert config["tile_rows"] == rows


@pytest.mark.kernel
@pytest.mark.parametrize("sizes", [(2, 70, 132, 67), (3, 130, 388, 40), (2, 257, 4, 33)], ids=str)
def test_residuals_of_a_batch(sizes, on_tensor_cores):
    batch, m, n, k = sizes
    x, w = floats((batch, m, k)), floats((batch, k, n), 1)
    residual = helpers.normal((batch, m, n), "float32", seed=2)

    def layer(x, w, residual):
        return jax_gpuops.linear(x, w, residual=residual, **on_tensor_cores)

    y, _ = run(lambda: jax.vmap(layer)(x, w, residual), on_tensor_cores)
    exact, magnitude = (
        f(helpers.exact(x)) @ f(helpers.exact(w)) + f(helpers.exact(residual))
        for f in (lambda x: x, np.abs)
    )
    helpers.assert_product(y, exact, magnitude, k)


def test_no_memory_is_reserved_for_a_copy_of_b(on_tensor_cores):
    """With a residual only turned_kernel takes the product; the name rules out split_k, too."""
    implementation = on_tensor_cores["implementation"]
    x, w, residual = floats((70, 72)), floats((72, 132), 1), floats((70, 132), 2)
    for how in ({"implementation": implementation}, on_tensor_cores):
        with helpers.recorded(implementation) as executions:
            jax.block_until_ready(jax_gpuops.linear(x, w, residual=residual, **how))
        (execution,) = executions
        assert execution["algorithm"] == "tensor_core"
        assert execution["problem"]["workspace"] == 0


@pytest.mark.parametrize("n", [130, 133])
def test_c_requires_rows_of_b_that_tensor_copies_take(n, on_tensor_cores):
    x, w, residual = np.ones((8, 8)), np.ones((8, n)), np.ones((8, n))
    operands = [np.float32(each) for each in (x, w)]
    with pytest.raises(ValueError, match="c of float32 only if the rows of b are a multiple of 16"):
        jax_gpuops.linear(*operands, residual=np.float32(residual), **on_tensor_cores)


@pytest.mark.kernel
@every_tile
def test_special_values_stay_in_their_row_and_column(rows, on_tensor_cores):
    """Stages keep old rows beyond the last row of a, and zeros beyond the end of the depth."""
    m, n, k = TILES[rows][on_tensor_cores["implementation"]]
    a, b = floats((m, k)), floats((k, n), 1)
    a[3, k - 1], a[m - 1, 5], b[2, n - 1] = np.inf, np.nan, -np.inf
    y, _ = run(lambda: jax_gpuops.matmul(a, b, **on_tensor_cores), on_tensor_cores)
    special = np.zeros((m, n), bool)
    special[[3, m - 1]], special[:, n - 1] = True, True
    np.testing.assert_array_equal(np.isfinite(np.asarray(y)), ~special)


@pytest.mark.kernel
@pytest.mark.parametrize("sizes", [(1, 61, 136, 330), (5, 100, 264, 70)], ids=str)
def test_any_order_of_threads(sizes, on_tensor_cores):
    if on_tensor_cores["implementation"] != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    batch, m, n, k = sizes
    a, b = floats((batch, m, k)), floats((batch, k, n), 1)
    y = helpers.under_each_schedule(
        lambda: jax_gpuops.matmul(a, b, **on_tensor_cores),
        [(1, {}), (2, {}), *[(2 + block, {"block": block}) for block in (1, 2)]],
    )
    helpers.assert_matmul(y, a, b)
