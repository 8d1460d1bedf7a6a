"""glu against float64: activations, tiles, tails, derivatives, batches, and what has no kernel."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jax_gpuops
from jax_gpuops._linear import ACTIVATIONS

every_activation = pytest.mark.parametrize("activation", [None, *ACTIVATIONS], ids=str)


@pytest.fixture
def on_tensor_cores(implementation):
    """The options of a call by the kernel, which not every GPU can run."""
    return helpers.options("glu", "tensor_core", implementation, [(8, 8)] * 3, "bfloat16")


def operands(m, n, k, dtype, batch=()):
    """x and both factors, such that products are spread over where activations bend."""
    return (
        helpers.normal((*batch, m, k), dtype),
        *(helpers.normal((k, n), dtype, seed, scale=2 / k**0.5) for seed in (1, 2)),
    )


def assert_glu(actual, x, gate, up, activation):
    """Checks a 16-bit result, rounded once from what float32 sums give."""
    x, gate, up = (np.asarray(each, np.float64) for each in (x, gate, up))
    eps = (x.shape[-1] + 4) * 2.0**-23
    low, high = np.inf, -np.inf
    exact = helpers.activated(activation, x @ gate) * (x @ up)
    for sign, other in [(1, 1), (1, -1), (-1, 1), (-1, -1)]:
        left = helpers.activated(activation, x @ gate + sign * eps * (np.abs(x) @ np.abs(gate)))
        each = left * (x @ up + other * eps * (np.abs(x) @ np.abs(up)))
        low, high = np.minimum(low, each), np.maximum(high, each)
    actual = np.asarray(actual)
    bound = 2 * np.maximum(high - exact, exact - low) + 2.0**-126
    bound = bound + np.asarray(helpers.spacing(exact, actual.dtype), np.float64)
    assert actual.shape == exact.shape
    assert np.all(np.abs(actual.astype(np.float64) - exact) <= bound)


# For each tile, m, n and k that the plan gives it to: the host simulates 4 multiprocessors. Half of
# its columns are those of the result.
TILES = {
    (64, 128): {"interpret": (72, 72, 200), "cuda": (72, 72, 200)},
    (128, 128): {"interpret": (200, 104, 136), "cuda": (1000, 1000, 136)},
    (128, 256): {"interpret": (200, 256, 136), "cuda": (2000, 1000, 136)},
}


@pytest.mark.kernel
@every_activation
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_kernel(tile, dtype, activation, on_tensor_cores):
    """With rows, columns and a depth that no tile divides."""
    m, n, k = TILES[tile][on_tensor_cores["implementation"]]
    xs = operands(m, n, k, dtype)
    with helpers.recorded(on_tensor_cores["implementation"]) as executions:
        y = jax.block_until_ready(jax_gpuops.glu(*xs, activation=activation, **on_tensor_cores))
    assert y.dtype == dtype
    assert_glu(y, *xs, activation)
    (execution,) = executions
    assert execution["problem"]["gated"] == 1
    assert (execution["config"]["tile_rows"], execution["config"]["tile_cols"]) == tile


@pytest.mark.kernel
@pytest.mark.parametrize("sizes", [(1, 8, 8), (130, 8, 72), (8, 520, 64), (129, 136, 520)], ids=str)
def test_tails(sizes, on_tensor_cores):
    xs = operands(*sizes, "bfloat16")
    assert_glu(jax_gpuops.glu(*xs, **on_tensor_cores), *xs, "silu")


@pytest.mark.kernel
def test_any_order_of_threads(on_tensor_cores):
    if on_tensor_cores["implementation"] != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    xs = operands(136, 264, 200, "bfloat16")
    helpers.under_each_schedule(
        lambda: jax_gpuops.glu(*xs, **on_tensor_cores),
        [(1, {}), (2, {}), *[(2 + block, {"block": block}) for block in (1, 2, 3)]],
    )


@pytest.mark.parametrize(
    ("shapes", "dtype", "text"),
    [
        (((4, 8), (8, 8), (8, 8)), "float32", "gated products only of float16 and bfloat16"),
        (((4, 8), (8, 9), (8, 9)), "bfloat16", "factors whose rows are a multiple of 16 bytes"),
        (((4, 9), (9, 8), (9, 8)), "bfloat16", "factors whose rows are a multiple of 16 bytes"),
    ],
)
def test_other_problems_are_two_products(shapes, dtype, text, on_tensor_cores):
    """The kernel refuses them; without its name two kernels compute what the gate takes."""
    xs = [helpers.normal(shape, dtype, seed) for seed, shape in enumerate(shapes)]
    with pytest.raises(ValueError, match=text):
        jax_gpuops.glu(*xs, **on_tensor_cores)
    how = {"implementation": on_tensor_cores["implementation"], "precision": "highest"}
    layer = functools.partial(jax_gpuops.glu, activation="gelu_exact", **how)
    calls = helpers.custom_calls(layer, *xs)
    assert [call.split(",")[0].startswith("jax_gpuops_gemm_v2") for call in calls] == [True, True]
    x, gate, up = (each.astype(np.float64) for each in xs)
    exact = helpers.activated("gelu_exact", x @ gate) * (x @ up)
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    y = np.asarray(layer(*xs), np.float64)
    np.testing.assert_allclose(y, exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("preferred", [None, "float32"])
def test_the_kernel_is_in_the_program(preferred, on_tensor_cores):
    xs = operands(16, 24, 8, "bfloat16")
    how = {"implementation": on_tensor_cores["implementation"]}
    layer = functools.partial(jax_gpuops.glu, preferred_element_type=preferred, **how)
    kinds = {call.op for call in jax_gpuops.explain(layer, *xs).calls}
    assert kinds == ({"glu"} if preferred is None else {"gemm"})
    assert layer(*xs).dtype == (preferred or "bfloat16")


@pytest.mark.parametrize(
    ("dtype", "n", "kinds"),
    [
        ("bfloat16", "8", {"glu"}),
        ("bfloat16", "5", {"gemm"}),
        ("bfloat16", "n", {"gemm"}),  # which may be no multiple of 8
        ("float32", "8", {"gemm"}),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_symbolic_sizes(dtype, n, kinds, strict, on_tensor_cores):
    """What the kernel refuses of any size is two products, as with sizes that are known."""
    *_, n = m, k, n = jax.export.symbolic_shape(f"m, 16, {n}")
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape in [(m, k), (k, n), (k, n)]]
    implementation = on_tensor_cores["implementation"]
    with jax_gpuops.use(implementation, strict=strict):
        exported = jax.export.export(
            jax.jit(jax_gpuops.glu),
            platforms=[{"interpret": "cpu"}.get(implementation, implementation)],
            disabled_checks=jax_gpuops.EXPORT_CHECKS,
        )(*structs)
        assert {call.op for call in jax_gpuops.explain(jax_gpuops.glu, *structs).calls} == kinds
    xs = operands(4, n if isinstance(n, int) else 5, k, dtype)
    np.testing.assert_allclose(
        np.asarray(exported.call(*xs), np.float32),
        np.asarray(jax_gpuops.glu(*xs, implementation="xla"), np.float32),
        **dict.fromkeys(["rtol", "atol"], 3e-2),
    )


@pytest.mark.parametrize("result", ["float32", "bfloat16", "float16"])
def test_float8_is_two_products(result, on_tensor_cores):
    xs = [each.astype("float8_e4m3fn") for each in operands(33, 40, 16, "float32")]
    how = {"preferred_element_type": result}
    y = jax_gpuops.glu(*xs, implementation=on_tensor_cores["implementation"], **how)
    assert y.dtype == result
    expected = jax_gpuops.glu(*xs, implementation="xla", **how)
    np.testing.assert_allclose(
        *(np.asarray(each, np.float32) for each in (y, expected)), rtol=2e-2, atol=2e-2
    )


def test_wider_results_than_products_have_are_refused(on_tensor_cores):
    with helpers.x64("float64"), pytest.raises(TypeError, match="a result of dtype float64"):
        jax_gpuops.glu(
            *operands(33, 40, 16, "float32"),
            preferred_element_type="float64",
            implementation=on_tensor_cores["implementation"],
        )


@pytest.mark.parametrize(("dtype", "n"), [("float32", 40), ("bfloat16", 41)])
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", None])
def test_two_kernels_leave_two_products_for_the_gradient(dtype, n, activation, implementation):
    layer = functools.partial(jax_gpuops.glu, activation=activation, implementation=implementation)
    _, vjp = jax.jit(lambda *xs: jax.vjp(layer, *xs))(*operands(72, n, 16, dtype))
    assert sum(each.size == 72 * n for each in jax.tree.leaves(vjp)) == 2


def test_bad_arguments(implementation):
    x, w = jnp.ones((4, 6)), jnp.ones((6, 3))
    with pytest.raises(ValueError, match="w_gate of shape"):
        jax_gpuops.glu(x, jnp.ones((5, 3)), w, implementation=implementation)
    with pytest.raises(ValueError, match="w_gate and w_up must have the same shape"):
        jax_gpuops.glu(x, w, jnp.ones((6, 4)), implementation=implementation)
    with pytest.raises(ValueError, match="activation must be None or one of"):
        jax_gpuops.glu(x, w, w, activation="tanh", implementation=implementation)
    with pytest.raises(TypeError, match="w_up is of dtype int32"):
        jax_gpuops.glu(x, w, w.astype(int), implementation=implementation)
    with pytest.raises(TypeError, match="preferred_element_type must be a floating-point"):
        jax_gpuops.glu(x, w, w, preferred_element_type=int, implementation=implementation)
    with pytest.raises(ValueError, match="algorithm 'shared' does not support gated"):
        jax_gpuops.glu(x, w, w, implementation=implementation, algorithm="shared")


@every_activation
def test_arrays_without_elements(activation, implementation):
    for m, n, k in [(3, 4, 0), (0, 4, 3), (3, 0, 4)]:
        x, w = jnp.ones((2, m, k)), jnp.ones((k, n))
        y = jax_gpuops.glu(x, w, w, activation=activation, implementation=implementation)
        np.testing.assert_array_equal(y, np.zeros((2, m, n)))


# Derivatives and batches


def reference(x, gate, up, activation):
    y, factor = (jnp.matmul(x, w, precision="highest") for w in (gate, up))
    return (y if activation is None else ACTIVATIONS[activation](y)) * factor


@every_activation
def test_gradients(activation, on_tensor_cores):
    """Those of the kernel are those in float32, but for roundings; products are kept in 16 bits."""
    xs = [jnp.asarray(x) for x in operands(72, 40, 64, "bfloat16")]

    def layer(*xs):
        return jax_gpuops.glu(
            *xs, activation=activation, implementation=on_tensor_cores["implementation"]
        )

    def gradients(layer, *xs):
        return jax.grad(lambda *xs: (layer(*xs).astype("float32") ** 2).mean(), (0, 1, 2))(*xs)

    assert jax.make_jaxpr(layer)(*xs).eqns[-1].primitive.name == "gpuops_glu"
    wide = [each.astype("float32") for each in xs]
    expected = gradients(functools.partial(reference, activation=activation), *wide)
    for each, exact in zip(gradients(layer, *xs), expected, strict=True):
        assert each.dtype == "bfloat16"
        error = np.abs(np.asarray(each, "float32") - exact).max()
        assert error <= 0.03 * np.abs(exact).max()
    _, vjp = jax.jit(lambda *xs: jax.vjp(layer, *xs))(*xs)
    kept = [each.dtype for each in jax.tree.leaves(vjp) if each.size == 72 * 40]
    assert kept == [jnp.bfloat16] * 2


@pytest.mark.any_version
def test_derivatives_of_the_primitive():
    """In float32, where XLA computes it, to the second order, forward and in reverse."""
    glu_p = helpers.primitive("glu")

    def layer(*xs):
        return glu_p.bind(
            *xs,
            activation="silu",
            precision=("highest", "highest"),
            preferred_element_type=jnp.dtype("float32"),
            implementation="xla",
            algorithm=None,
        )

    check_grads(layer, operands(3, 4, 5, "float32"), 2, atol=2e-2, rtol=2e-2, eps=1e-2)


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, 0), (0, 0, None), (0, 0, 0)], ids=str)
def test_vmap_on_tensor_cores(axes, on_tensor_cores):
    xs = [
        each if axis is None else np.stack([each, each[::-1], 2 * each])
        for each, axis in zip(operands(72, 136, 64, "bfloat16"), axes, strict=True)
    ]
    y = jax.vmap(functools.partial(jax_gpuops.glu, **on_tensor_cores), axes)(*xs)
    batches = [np.broadcast_to(x, (3, *x.shape[-2:])) for x in xs]
    for i in range(3):
        assert_glu(y[i], *(x[i] for x in batches), "silu")


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, 0), (0, 0, None), (0, 0, 0)], ids=str)
def test_vmap_over_an_axis_of_size_0(axes, on_tensor_cores):
    xs = [
        jnp.asarray(each if axis is None else np.empty((0, *each.shape), each.dtype))
        for each, axis in zip(operands(72, 136, 64, "bfloat16"), axes, strict=True)
    ]
    layer = functools.partial(jax_gpuops.glu, implementation=on_tensor_cores["implementation"])
    y, pullback = jax.vjp(jax.vmap(layer, axes), *xs)
    assert y.shape == (0, 72, 136)
    for x, gradient in zip(xs, pullback(y), strict=True):
        np.testing.assert_array_equal(gradient, np.zeros(x.shape))


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_sharded_sequence_is_not_gathered(dtype, is_mapped, implementation):
    """In a program that XLA partitions; a reshape to rows would gather it."""
    x, gate, up = operands(6, 24, 16, dtype, batch=(4,))

    def layer(x):
        return jax_gpuops.glu(x, gate, up)

    with jax_gpuops.use(implementation, strict=False):
        helpers.assert_not_gathered(
            jax.vmap(layer) if is_mapped else layer,
            x,
            tolerance=2e-2 if dtype == "bfloat16" else 1e-4,
        )
