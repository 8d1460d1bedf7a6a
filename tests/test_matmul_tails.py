"""tensor_core in two launches: smaller tiles take what whole turns of the larger ones leave over."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gpuops

# Of both launches: batch, m, n and k for the host's 4 multiprocessors, and for an H200's.
TAILS = {
    ((128, 256), (64, 128)): {"interpret": (1, 200, 530, 1000), "cuda": (1, 1800, 2200, 2048)},
    ((128, 256), (128, 128)): {"interpret": (1, 520, 530, 2000), "cuda": (1, 4096, 11008, 4096)},
    ((128, 128), (64, 128)): {"interpret": (3, 200, 40, 2000), "cuda": (1, 1800, 4700, 3072)},
}
OF_16_BITS = [each for each in helpers.DTYPES_ON_TENSOR_CORES if each[0] != "float32"]


@pytest.fixture
def on_tensor_cores(implementation):
    return helpers.options("matmul", "tensor_core", implementation, [(8, 8), (8, 8)], "bfloat16")


def tiles_of(config):
    """Of both launches."""
    return (
        (config["tile_rows"], config["tile_cols"]),
        (config["tail_rows"], config["tail_cols"]),
    )


def assert_matmul(actual, a, b):
    a, b = helpers.exact(a), helpers.exact(b)
    helpers.assert_product(actual, a @ b, np.abs(a) @ np.abs(b), a.shape[-1])


def config_of_call(call, implementation):
    """The result of a call, and the config of its only execution, which has a tail."""
    with helpers.recorded(implementation) as executions:
        y = jax.block_until_ready(call())
    (execution,) = executions
    assert execution["config"]["tiles"] > 0
    return y, execution["config"]


@pytest.mark.kernel
@pytest.mark.parametrize(("dtype", "result"), OF_16_BITS)
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("tiles", TAILS, ids=str)
def test_every_kernel(tiles, transpose_b, transpose_a, dtype, result, on_tensor_cores):
    batch, m, n, k = TAILS[tiles][on_tensor_cores["implementation"]]
    a, b = helpers.normal((batch, m, k), dtype), helpers.normal((batch, k, n), dtype, seed=1)
    y, config = helpers.recorded_dot(a, b, transpose_a, transpose_b, result, **on_tensor_cores)
    assert_matmul(y, a, b)
    if result == dtype:  # there are fewer tiles with floats as results
        assert tiles_of(config) == tiles


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("batch", "m", "n", "k"),
    [
        (1, 200, 531, 1001),  # copies of both factors, and elements as results
        (1, 200, 513, 1000),  # one column
        (1, 129, 530, 1000),  # one row more than a tile of 128 has
        (1, 1030, 130, 1500),  # the tail begins with a group, which has one row of tiles,
        (1, 1160, 257, 1500),  # within one of two rows,
        (2, 100, 530, 2000),  # within the second matrix,
        (3, 200, 40, 2000),  # with it
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_where_tails_begin(batch, m, n, k, dtype, on_tensor_cores):
    """Every element is written, over an array of NaN, and has the bits that one launch gives it."""
    a, b = helpers.normal((batch, m, k), dtype), helpers.normal((batch, k, n), dtype, seed=1)

    @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
    def product(poison, a, b):
        del poison
        return jax_gpuops.matmul(a, b, **on_tensor_cores)

    implementation = on_tensor_cores["implementation"]
    with helpers.recorded(implementation) as executions:
        y = jax.block_until_ready(product(jnp.full((batch, m, n), np.nan, dtype), a, b))
    assert_matmul(y, a, b)
    if implementation == "interpret":
        assert executions[0]["config"]["tiles"] > 0
    with helpers.recorded(implementation) as executions:
        parts = [
            jax.block_until_ready(jax_gpuops.matmul(a, b[..., col : col + 256], **on_tensor_cores))
            for col in range(0, n, 256)
        ]
    if implementation == "interpret" and batch * m < 1000:
        assert all(each["config"]["tiles"] == 0 for each in executions)
    helpers.assert_same_bits(y, jnp.concatenate(parts, -1))


@pytest.mark.kernel
@pytest.mark.parametrize("share", ["a", "b"])
def test_shared_factors(share, on_tensor_cores):
    batch, m, n, k = {"interpret": (2, 100, 530, 2000), "cuda": (2, 1030, 2200, 4096)}[
        on_tensor_cores["implementation"]
    ]
    a, b = helpers.normal((batch, m, k), "bfloat16"), helpers.normal((batch, k, n), "bfloat16", 1)
    a, b = (a[0], b) if share == "a" else (a, b[0])
    assert_matmul(jax_gpuops.gemm(a, b, **on_tensor_cores), a, b)


@pytest.mark.kernel
def test_results_do_not_depend_on_the_batch(on_tensor_cores):
    """Rows of a product with a tail, and without one."""
    implementation = on_tensor_cores["implementation"]
    _, m, n, k = TAILS[(128, 256), (64, 128)][implementation]
    a, b = helpers.normal((m, k), "bfloat16"), helpers.normal((k, n), "bfloat16", seed=1)
    how = {"implementation": implementation, "batch_invariant": True}
    y, _ = config_of_call(lambda: jax_gpuops.matmul(a, b, **how), implementation)
    for rows in (slice(0, 1), slice(0, 72), slice(m - 70, m)):
        helpers.assert_same_bits(jax_gpuops.matmul(a[rows], b, **how), y[rows])


def test_a_product_of_no_depth_has_none(on_tensor_cores):
    a, b = np.ones((200, 0), jnp.bfloat16), np.ones((0, 530), jnp.bfloat16)
    y, config = helpers.recorded_dot(a, b, False, False, "bfloat16", **on_tensor_cores)
    assert config["tiles"] == 0
    np.testing.assert_array_equal(y, np.zeros((200, 530), jnp.bfloat16))
