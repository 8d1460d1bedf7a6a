"""batch_invariant=True: a row has the same bits whatever the number of rows and the others are."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import HAS_GPU

import jax_gpuops as ops

# Depth and columns, of which neither is a whole tile, and more rows than the largest tile has.
K, N, M = (4168, 2056, 512) if HAS_GPU else (200, 136, 300)
EDGES = (16, 64, 128, 192, 256, 384, 512) if HAS_GPU else (16, 64, 128, 256)
COUNTS = [1, 2, 7, *(each + more for each in EDGES for more in (-1, 0, 1) if each + more <= M)]
KINDS = [
    ("bfloat16", "default"),
    ("float16", "default"),
    ("float32", "default"),
    ("float32", "highest"),
    ("float64", "highest"),
]


@pytest.fixture
def product(implementation):
    def product(a, b, precision, **options):
        how = {"implementation": implementation, "batch_invariant": True, **options}
        return ops.matmul(a, b, precision=precision, **how)

    return product


def factors(dtype):
    return helpers.normal((M, K), dtype), helpers.normal((K, N), dtype, seed=1)


@pytest.mark.kernel
@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_any_number_of_rows(dtype, precision, product):
    with jax.enable_x64(dtype == "float64"):
        a, b = factors(dtype)
        expected = product(a, b, precision)
        for count in COUNTS:
            helpers.assert_same_bits(product(a[:count], b, precision), expected[:count])
            helpers.assert_same_bits(product(a[-count:], b, precision), expected[-count:])


@pytest.mark.kernel
@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_any_neighbours(dtype, precision, product):
    """Rows out of the range of others, infinities and NaN leave the others alone."""
    with jax.enable_x64(dtype == "float64"):
        a, b = factors(dtype)
        expected = product(a, b, precision)
        others = np.array(a)
        others[1::4] *= 1e-30 if dtype in ("float32", "float64") else 1e-4
        others[2::4], others[3::4] = np.inf, np.nan
        helpers.assert_same_bits(product(others, b, precision)[::4], expected[::4])


@pytest.mark.kernel
@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_batches(dtype, precision, product):
    """Under vmap of either factor and of both, and with leading dims."""
    with jax.enable_x64(dtype == "float64"):
        a, b = factors(dtype)
        rows = a[:8]
        expected = product(a, b, precision)[:8]
        batch = jnp.stack([rows, a[8:16], rows])
        weights = jnp.stack([b, 2 * b, b])

        def map_over(*axes):
            return jax.vmap(lambda a, b: product(a, b, precision), axes)

        for y in (
            product(batch, b, precision),
            map_over(0, None)(batch, b),
            map_over(None, 0)(rows, weights),
            map_over(0, 0)(batch, weights),
        ):
            helpers.assert_same_bits(y[0], expected)
            helpers.assert_same_bits(y[2], expected)


@pytest.mark.kernel
def test_dense_layers(implementation):
    x, w = factors("bfloat16")
    b = helpers.normal((N,), "bfloat16", seed=2)

    def layer(x):
        how = {"implementation": implementation, "batch_invariant": True}
        return ops.linear(x, w, b, activation="gelu", **how)

    expected = layer(x)
    for count in (1, 16, 65, 200):
        helpers.assert_same_bits(layer(x[:count]), expected[:count])
    helpers.assert_same_bits(layer(x[:16].reshape(2, 8, K)), expected[:16].reshape(2, 8, N))


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("mapped", ["bias", "residual", "both"])
@pytest.mark.parametrize("activation", [None, "gelu", "silu"], ids=str)
def test_dense_layers_that_share_a_product(activation, mapped, dtype, implementation):
    x, w = factors(dtype)
    x = x[:40]
    b, residual = helpers.normal((3, N), dtype, seed=2), helpers.normal((3, 40, N), dtype, seed=3)
    precision = "highest" if dtype == "float32" else None
    how = {"activation": activation, "precision": precision}
    how |= {"implementation": implementation, "batch_invariant": True}

    def layer(b, residual):
        return ops.linear(x, w, b, residual=residual, **how)

    axes = {"bias": (0, None), "residual": (None, 0), "both": (0, 0)}[mapped]
    operands = [
        each[1] if axis is None else each for each, axis in zip((b, residual), axes, strict=True)
    ]
    helpers.assert_same_bits(jax.vmap(layer, axes)(*operands)[1], layer(b[1], residual[1]))
    if mapped == "bias":
        y = jax.vmap(lambda b: ops.linear(x, w, b, **how))(b)
        helpers.assert_same_bits(y[1], ops.linear(x, w, b[1], **how))


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("dtype", "alpha", "beta", "transpose"),
    [
        ("bfloat16", 1.0, 0.5, False),
        ("float16", 1.0, 0.0, True),
        ("float32", 2.0, 0.5, False),
        ("float32", 2.0, 0.5, True),
        ("float64", 2.0, 0.5, True),
    ],
)
def test_gemm(dtype, alpha, beta, transpose, implementation):
    with jax.enable_x64(dtype == "float64"):
        a, b = factors(dtype)
        c = helpers.normal((M, N), dtype, seed=2)
        b = np.ascontiguousarray(b.T) if transpose else b

        def product(a, c):
            how = {"alpha": alpha, "beta": beta, "transpose_b": transpose, "batch_invariant": True}
            return ops.gemm(a, b, c, implementation=implementation, **how)

        expected = product(a, c)
        for count in (1, 16, 65, 200):
            helpers.assert_same_bits(product(a[:count], c[:count]), expected[:count])
        batch = jax.vmap(product)(a[:16].reshape(2, 8, K), c[:16].reshape(2, 8, N))
        helpers.assert_same_bits(batch, expected[:16].reshape(2, 8, N))


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gated_layers(dtype, implementation):
    x, gate = factors(dtype)
    up = helpers.normal((K, N), dtype, seed=2)

    def layer(x, gate=gate):
        return ops.glu(x, gate, up, implementation=implementation, batch_invariant=True)

    expected = layer(x)
    for count in COUNTS:
        helpers.assert_same_bits(layer(x[:count]), expected[:count])
        helpers.assert_same_bits(layer(x[-count:]), expected[-count:])
    helpers.assert_same_bits(layer(x[:16].reshape(2, 8, K)), expected[:16].reshape(2, 8, N))
    batch = jnp.stack([x[:8], x[8:16]])
    helpers.assert_same_bits(jax.vmap(layer)(batch)[0], expected[:8])
    weights = jnp.stack([2 * gate, gate])
    helpers.assert_same_bits(jax.vmap(layer)(batch[::-1], weights)[1], expected[:8])


@pytest.mark.kernel
def test_dot_general_is_matmul(product, implementation):
    a, b = factors("bfloat16")
    dims = (((1,), (0,)), ((), ()))
    how = {"implementation": implementation, "batch_invariant": True}
    helpers.assert_same_bits(ops.dot_general(a[:5], b, dims, **how), product(a, b, None)[:5])


def test_it_is_a_kernel_or_an_error():
    a = np.ones((8, 8), np.float32)
    with pytest.raises(ValueError, match="batch_invariant=True asks for a kernel"):
        ops.matmul(a, a, batch_invariant=True, implementation="xla")
    with ops.use("xla"), pytest.raises(ValueError, match="asks for a kernel"):
        ops.linear(a, a, batch_invariant=True)
    with pytest.raises(ValueError, match="chooses the algorithm, but algorithm is 'naive'"):
        ops.matmul(a, a, batch_invariant=True, algorithm="naive")
    with pytest.raises(TypeError, match="must be True or False, got 1"):
        ops.matmul(a, a, batch_invariant=1)
    with pytest.raises(TypeError, match="matmul kernels require two operands of the same"):
        ops.matmul(np.ones((8, 8), np.int32), a.astype(np.int32), batch_invariant=True)
    refused = "batch_invariant=True cannot run this, leave it out to run XLA"
    with pytest.raises(TypeError, match=refused):
        ops.matmul(np.ones((8, 8), np.int32), a.astype(np.int32), batch_invariant=True)
    with pytest.raises(TypeError, match=refused):
        ops.linear(a, a, preferred_element_type="float16", batch_invariant=True)
    with pytest.raises(ValueError, match=r"batch_invariant=True cannot.*gated products"):
        ops.glu(a, a, a, batch_invariant=True)
    with pytest.raises(ValueError, match=r"batch_invariant=True cannot.*only alpha = 1"):
        ops.gemm(a.astype(np.float16), a.astype(np.float16), alpha=2.0, batch_invariant=True)
    of_parts = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6
    with pytest.raises(ValueError, match=r"batch_invariant=True cannot.*BF16_BF16_F32_X6"):
        ops.matmul(a, a, precision=of_parts, batch_invariant=True)
