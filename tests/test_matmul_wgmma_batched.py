"""Batches of small products on Hopper's tensor cores: wgmma_batched."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_linear import assert_linear

import jax_gpuops as ops


@pytest.fixture
def batched(implementation):
    """The options of a product by wgmma_batched, which only a Hopper GPU and the host run."""
    return helpers.options("matmul", "wgmma_batched", implementation, [(8, 8), (8, 8)], "bfloat16")


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("dtype", "result"),
    [("float16", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")],
)
@helpers.every_layout
@pytest.mark.parametrize(
    "sizes",
    [(8, 8, 8), (64, 64, 64), (72, 16, 136), (136, 200, 72), (64, 64, 1032)],
    ids=str,
)
def test_every_layout(sizes, transpose_a, transpose_b, dtype, result, batched):
    """With one tile or several, some at an edge; with one step, several, and more than stages."""
    helpers.assert_products(3, sizes, transpose_a, transpose_b, dtype, result, **batched)


@pytest.mark.kernel
@pytest.mark.parametrize("result", ["bfloat16", "float32"])
@pytest.mark.parametrize("n", [2, 3, 63, 66, 100, 131])
def test_rows_of_results_of_any_length(n, result, batched):
    """Results are written in words of 16, 4 and 2 bytes, whatever their rows allow."""
    helpers.assert_products(2, (70, n, 40), False, True, "bfloat16", result, **batched)


@pytest.mark.kernel
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_exact", "silu"], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_a_bias_and_an_activation(shared, activation, batched):
    x, w = helpers.factor((3, 70, 72), "bfloat16"), helpers.factor((3, 72, 136), "bfloat16", seed=1)
    b = helpers.normal((136,) if shared else (3, 136), "bfloat16", seed=2)
    layer = functools.partial(ops.linear, activation=activation, **batched)
    y = jax.vmap(layer, (0, 0, None if shared else 0))(x, w, b)
    assert_linear(y, x, w, b, activation)
    if activation is not None:
        assert_linear(layer(x[0], w[0]), x[0], w[0], None, activation)


@pytest.mark.kernel
@pytest.mark.parametrize("share", ["a", "b"])
@helpers.every_layout
def test_a_factor_of_the_whole_batch(transpose_a, transpose_b, share, batched):
    a, b = helpers.factor((3, 72, 40), "float16"), helpers.factor((3, 40, 72), "float16", seed=1)
    helpers.assert_gemm_of_batch(a, b, share, transpose_a, transpose_b, **batched)


@pytest.mark.kernel
def test_how_many_stages(batched):
    """The fewer blocks, the more, but one for each step along k; 3 if they do not all fit."""
    if batched["implementation"] != "interpret":
        pytest.skip("the host simulates 4 multiprocessors")
    stages = {}
    for batch, k in [(4, 1024), (16, 1024), (32, 1024), (48, 1024), (4, 64)]:
        sizes, dtypes = (8, 8, k), ("bfloat16", "bfloat16")
        config = helpers.assert_products(batch, sizes, False, False, *dtypes, **batched)
        stages[batch, k] = config["stages"]
    assert stages == {(4, 1024): 8, (16, 1024): 3, (32, 1024): 1, (48, 1024): 3, (4, 64): 1}


@pytest.mark.kernel
@helpers.every_layout
def test_neighbours_of_a_factor_do_not_matter(transpose_a, transpose_b, batched):
    """No copy extends into other matrices, here of NaN and infinity."""
    shape = 3, 40, 40
    a, b = helpers.factor(shape, "bfloat16"), helpers.factor(shape, "bfloat16", seed=1)
    expected, _ = helpers.recorded_dot(a[1:2], b[1:2], transpose_a, transpose_b, None, **batched)
    a[0], a[2], b[0], b[2] = np.nan, np.inf, np.inf, np.nan
    y, _ = helpers.recorded_dot(a, b, transpose_a, transpose_b, None, **batched)
    helpers.assert_same_bits(y[1], expected[0])


@pytest.mark.kernel
def test_rows_do_not_depend_on_others(batched):
    """The depth is added in the same order in every tile, by any number of stages."""
    a, b = helpers.factor((9, 200, 520), "bfloat16"), helpers.factor((9, 520, 136), "bfloat16")
    expected, config = helpers.recorded_dot(a, b, False, False, "bfloat16", **batched)
    stages = {config["stages"]}
    for batch, m, n in [(1, 1, 136), (2, 27, 32), (3, 64, 64), (1, 200, 8)]:
        parts = a[:batch, :m], b[:batch, :, :n]
        y, config = helpers.recorded_dot(*parts, False, False, "bfloat16", **batched)
        helpers.assert_same_bits(y, expected[:batch, :m, :n])
        stages.add(config["stages"])
    if batched["implementation"] == "interpret":
        assert stages == {3, 8}  # a GPU has room for all of these blocks


@pytest.mark.kernel
def test_special_values_stay_in_their_row_and_column(batched):
    a, b = helpers.factor((2, 33, 72), "bfloat16"), helpers.factor((2, 72, 40), "bfloat16", seed=1)
    expected = np.array(ops.matmul(a, b, **batched))
    a[1, 3, 71], b[1, 2, 36], a[1, 7, 0] = np.inf, -np.inf, np.nan
    y = np.array(ops.matmul(a, b, **batched))
    assert not np.any(np.isfinite(helpers.exact(y[1, [3, 7]])))
    assert not np.any(np.isfinite(helpers.exact(y[1, :, 36])))
    y[1, [3, 7]], y[1, :, 36] = expected[1, [3, 7]], expected[1, :, 36]
    helpers.assert_same_bits(y, expected)


@pytest.mark.kernel
def test_any_order_of_threads(batched):
    if batched["implementation"] != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    a, b = (helpers.factor((6, *shape), "bfloat16") for shape in ((72, 264), (264, 72)))
    y = helpers.under_each_schedule(
        lambda: ops.matmul(a, b, **batched), [(1, {}), (2, {}), (3, {"warp": 0}), (4, {"warp": 3})]
    )
    helpers.assert_matmul(y, a, b)
    bias = helpers.normal((b.shape[2],), "bfloat16", seed=2)
    y = helpers.under_each_schedule(
        lambda: ops.linear(a[0], b[0], bias, activation="relu", **batched),
        [(1, {}), (2, {}), (3, {"warp": 0}), (4, {"warp": 3})],
    )
    assert_linear(y, a[0], b[0], bias, "relu")


@pytest.mark.kernel
def test_no_depth(batched):
    y = ops.matmul(jnp.ones((2, 40, 0), "bfloat16"), jnp.ones((2, 0, 8), "bfloat16"), **batched)
    helpers.assert_same_bits(y, np.zeros((2, 40, 8), y.dtype))


@pytest.mark.parametrize(
    ("shapes", "dtype", "why"),
    [
        ([(2, 8, 8)] * 2, "float32", "float16 and bfloat16, not float32"),
        ([(2, 8, 12), (2, 12, 8)], "bfloat16", "factors whose rows are a multiple of 16 bytes"),
        ([(1, 8, 8), (1, 8, 2**28 + 8)], "bfloat16", r"at most 2\^28 columns"),
        ([(2, 8, 8), (2, 8, 12)], "bfloat16", "factors whose rows are a multiple of 16 bytes"),
    ],
    ids=str,
)
def test_refusals(shapes, dtype, why, batched):
    with pytest.raises(ValueError, match=f"algorithm 'wgmma_batched' supports (only )?{why}"):
        ops.plan("matmul", shapes, dtype, **batched)


def test_addresses_within_pieces(batched):
    if batched["implementation"] != "interpret":
        pytest.skip("JAX aligns the buffers of a GPU")
    x = helpers.factor((2, 8, 8), "bfloat16")
    with helpers.buffers_at(8), pytest.raises(Exception, match="requires arrays aligned to 16"):
        jax.block_until_ready(ops.matmul(x, x, **batched))


def test_refusal_of_a_bias_of_a_wider_result(batched):
    x, b = jnp.ones((8, 8), "bfloat16"), jnp.ones(8, "bfloat16")
    with pytest.raises(ValueError, match="supports a bias or an activation only for a result of"):
        ops.linear(x, x, b, preferred_element_type="float32", **batched)


@pytest.mark.parametrize(
    ("sizes", "transpose_b", "result", "chosen"),
    [
        ((2, 64, 64, 64), False, "bfloat16", True),
        ((2, 64, 64, 64), False, "float32", True),
        ((1, 128, 128, 64), True, "bfloat16", True),
        ((1, 577, 64, 577), True, "bfloat16", True),  # scores in rows that begin anywhere
        ((1, 577, 64, 577), True, "float32", True),
        ((1, 577, 64, 577), False, "bfloat16", False),  # the rows of b begin anywhere
        ((1, 512, 64, 512), False, "bfloat16", False),  # so many tiles that a pipeline pays
        ((1, 64, 1032, 64), False, "bfloat16", False),  # so deep
    ],
    ids=str,
)
def test_what_the_plan_gives_to_it(sizes, transpose_b, result, chosen, batched):
    per_multiprocessor, m, k, n = sizes
    batch = per_multiprocessor * (4 if batched["implementation"] == "interpret" else 132)
    shapes = [(batch, m, k), (batch, n, k) if transpose_b else (batch, k, n)]
    plan = ops.plan(
        "dot_general",
        shapes,
        "bfloat16",
        dimension_numbers=(((2,), (2 if transpose_b else 1,)), ((0,), (0,))),
        preferred_element_type=result,
        implementation=batched["implementation"],
    )
    assert (plan.algorithm == "wgmma_batched") == chosen


@pytest.mark.parametrize(
    ("tiles", "k", "chosen"),
    [
        (1, 64, True),
        (8, 128, True),
        (9, 64, False),  # more than are multiplied at a time
        (1, 520, False),  # so deep
    ],
)
def test_which_single_products_the_plan_gives_to_it(tiles, k, chosen, batched):
    """Of so many tiles for each multiprocessor."""
    implementation = batched["implementation"]
    m = 64 * tiles * helpers.multiprocessors(implementation)
    plan = ops.plan("matmul", [(m, k), (k, 64)], "bfloat16", implementation=implementation)
    assert (plan.algorithm == "wgmma_batched") == chosen, plan
