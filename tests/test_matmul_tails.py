"""tensor_core in two launches: smaller tiles take what whole turns of larger ones leave over."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gpuops

# Of both launches: batch, m, n and k for the host's 4 multiprocessors, and for an H200's.
TAILS = {
    ((128, 256), (64, 128)): {"interpret": (1, 136, 530, 648), "cuda": (1, 3300, 1500, 4096)},
    ((128, 256), (128, 128)): {"interpret": (1, 520, 636, 712), "cuda": (1, 4209, 8640, 4096)},
    ((128, 128), (64, 128)): {"interpret": (7, 201, 41, 1101), "cuda": (1, 1030, 4701, 3073)},
}
OF_16_BITS = [("float16", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]


@pytest.fixture
def on_tensor_cores(implementation):
    return helpers.options("matmul", "tensor_core", implementation, [(8, 8), (8, 8)], "bfloat16")


def tiles_of(config):
    """Of both launches."""
    return (
        (config["tile_rows"], config["tile_cols"]),
        (config["tail_rows"], config["tail_cols"]),
    )


def config_of(call, how):
    """The result of a call, and the config of its only kernel."""
    with helpers.recorded(how["implementation"]) as executions:
        y = jax.block_until_ready(call())
    (execution,) = executions
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
    helpers.assert_matmul(y, a, b)
    if result == dtype:  # there are fewer tiles with floats as results
        assert tiles_of(config) == tiles


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("batch", "m", "n", "k"),
    [
        (1, 250, 536, 968),  # nothing is copied
        (1, 201, 531, 1041),  # copies of both factors, and elements as results
        (1, 136, 513, 648),  # of one column
        (1, 129, 530, 648),
        (1, 1161, 41, 1241),  # the tail begins with a group, which has two rows of tiles,
        (1, 1030, 636, 981),  # within one of one row,
        (2, 65, 771, 1061),  # within the second matrix,
        (5, 201, 41, 1501),  # with the last
    ],
)
def test_where_they_begin(batch, m, n, k, on_tensor_cores):
    """Every element is written, over an array of NaN, and has the bits that one launch gives it."""
    a, b = helpers.normal((batch, m, k), "bfloat16"), helpers.normal((batch, k, n), "bfloat16", 1)

    @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
    def product(poison, a, b):
        del poison
        return jax_gpuops.matmul(a, b, **on_tensor_cores)

    poison = jnp.full((batch, m, n), np.nan, "bfloat16")
    y, config = config_of(lambda: product(poison, a, b), on_tensor_cores)
    helpers.assert_matmul(y, a, b)
    if on_tensor_cores["implementation"] == "interpret":  # an H200 has a tile for each block
        assert config["tiles"] > 0
    for matrix in range(batch):
        for col in range(0, n, 256):
            cols = np.s_[matrix, :, col : col + 256]
            part = functools.partial(jax_gpuops.matmul, a[matrix], b[cols], **on_tensor_cores)
            expected, config = config_of(part, on_tensor_cores)
            assert m > 256 or config["tiles"] == 0
            helpers.assert_same_bits(y[cols], expected)


def linear(x, w, extra, **how):
    return jax_gpuops.linear(x, w, extra[0], activation="gelu", **how)


def linear_of_float32(x, w, extra, **how):
    return linear(x, w, extra.astype("float32"), preferred_element_type="float32", **how)


def linear_with_residual(x, w, extra, **how):
    return jax_gpuops.linear(x, w, extra[0], residual=extra[1:], **how)


def glu(x, w, extra, **how):
    left, right = jnp.split(w, 2, -1)
    return jax_gpuops.glu(x, left, right, **how)


def matmul_of_8_bits(x, w, extra, **how):
    """Of twice the depth, which has as many bytes."""
    x, w = jnp.concatenate([x, x], 1), jnp.concatenate([w, w], 0)
    x, w = x.astype("float8_e4m3fn"), w.astype("float8_e4m3fn")
    return jax_gpuops.matmul(x, w, preferred_element_type="bfloat16", **how)


@pytest.mark.kernel
@pytest.mark.parametrize(
    "call", [linear, linear_of_float32, linear_with_residual, glu, matmul_of_8_bits]
)
def test_what_else_is_done_to_sums(call, on_tensor_cores):
    """Compared with columns alone, which have no tail."""
    m, n, k = {"interpret": (136, 528, 648), "cuda": (3300, 1536, 4096)}[
        on_tensor_cores["implementation"]
    ]
    x, w = helpers.normal((m, k), "bfloat16"), helpers.normal((k, n), "bfloat16", seed=1)
    extra = helpers.normal((m + 1, n), "bfloat16", seed=2)
    y, config = config_of(lambda: call(x, w, extra, **on_tensor_cores), on_tensor_cores)
    assert config["tiles"] > 0 or call is matmul_of_8_bits
    half = n // 2
    for col in range(0, y.shape[1], 128):
        cols = np.arange(col, min(col + 128, y.shape[1]))
        taken = np.concatenate([cols, cols + half]) if call is glu else cols
        part = functools.partial(call, x, w[:, taken], extra[:, taken], **on_tensor_cores)
        expected, config = config_of(part, on_tensor_cores)
        assert config["tiles"] == 0
        helpers.assert_same_bits(y[:, cols], expected)


@pytest.mark.kernel
@pytest.mark.parametrize("share", ["a", "b"])
def test_shared_factors(share, on_tensor_cores):
    batch, m, n, k = {"interpret": (2, 65, 771, 1201), "cuda": (2, 1030, 2200, 4096)}[
        on_tensor_cores["implementation"]
    ]
    a, b = helpers.normal((batch, m, k), "bfloat16"), helpers.normal((batch, k, n), "bfloat16", 1)
    a, b = (a[0], b) if share == "a" else (a, b[0])
    helpers.assert_matmul(jax_gpuops.gemm(a, b, **on_tensor_cores), a, b)


@pytest.mark.kernel
def test_results_do_not_depend_on_the_batch(on_tensor_cores):
    """Rows of a product with a tail, and without one."""
    implementation = on_tensor_cores["implementation"]
    _, m, n, k = TAILS[(128, 256), (64, 128)][implementation]
    a, b = helpers.normal((m, k), "bfloat16"), helpers.normal((k, n), "bfloat16", seed=1)
    how = {"implementation": implementation, "batch_invariant": True}
    y, config = config_of(lambda: jax_gpuops.matmul(a, b, **how), how)
    assert config["tiles"] > 0
    for rows in (slice(0, 1), slice(0, 72), slice(m - 70, m)):
        helpers.assert_same_bits(jax_gpuops.matmul(a[rows], b, **how), y[rows])


@pytest.mark.kernel
def test_a_product_of_no_depth(on_tensor_cores):
    a, b = np.ones((200, 0), jnp.bfloat16), np.ones((0, 530), jnp.bfloat16)
    y = jax_gpuops.matmul(a, b, **on_tensor_cores)
    np.testing.assert_array_equal(np.asarray(y), np.zeros((200, 530), jnp.bfloat16))
