"""Products with transposed arrays: the kernel reads these as they are stored."""

import functools
import json
import re

import helpers
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_gpuops
from jax_gpuops import _library, _measurements

M, N, K = 40, 24, 16
NT, TN, TT = (((1,), (1,)), ((), ())), (((0,), (0,)), ((), ())), (((0,), (1,)), ((), ()))
BATCHED_NT = (((2,), (2,)), ((0,), (0,)))


def compiled(function, *operands) -> str:
    return jax.jit(function).lower(*operands).compile().as_text()


def moves(text: str) -> bool:
    """Whether a compiled program transposes or copies an array; loops copy their counters."""
    return re.search(r"\[\d\S* (?:transpose|copy)\(", text) is not None


def zeros(*shapes, dtype="float32"):
    return [jnp.zeros(shape, dtype) for shape in shapes]


# Each makes the product of x and y, whose shapes and dimension numbers these are.
PROGRAMS = {
    "T": (lambda mm, x, y: mm(x, y.T), (M, K), (N, K), NT),
    "mT": (lambda mm, x, y: mm(x, y.mT), (M, K), (N, K), NT),
    "swapaxes": (lambda mm, x, y: mm(x, jnp.swapaxes(y, 0, 1)), (M, K), (N, K), NT),
    "transpose": (lambda mm, x, y: mm(x, jnp.transpose(y)), (M, K), (N, K), NT),
    "left": (lambda mm, x, y: mm(x.T, y), (K, M), (K, N), TN),
    "both": (lambda mm, x, y: mm(x.T, y.T), (K, M), (N, K), TT),
    "twice": (lambda mm, x, y: mm(x.T.T, y.T.T.T), (M, K), (N, K), NT),
    "in jit": (lambda mm, x, y: mm(x, jax.jit(jnp.transpose)(y)), (M, K), (N, K), NT),
    "through jit": (lambda mm, x, y: mm(x, jax.jit(lambda y: y)(y.T)), (M, K), (N, K), NT),
    "rows": (lambda mm, x, y: mm(x, y.T), (3, M, K), (N, K), (((2,), (1,)), ((), ()))),
    "vector": (lambda mm, x, y: mm(x, y.T), (K,), (N, K), (((0,), (1,)), ((), ()))),
    "batch": (lambda mm, x, y: mm(x, jnp.swapaxes(y, 1, 2)), (3, M, K), (3, N, K), BATCHED_NT),
    "batch of y": (lambda mm, x, y: mm(x, y.mT), (M, K), (3, N, K), BATCHED_NT),
    "vmap of y": (
        lambda mm, x, y: jax.vmap(lambda y: mm(x, y.T))(y),
        (M, K),
        (3, N, K),
        BATCHED_NT,
    ),
    "batch in the middle": (
        lambda mm, x, y: mm(jnp.swapaxes(x, 0, 1), jnp.transpose(y, (1, 0, 2))),
        (3, 1, K),
        (K, 1, N),
        (((2,), (0,)), ((1,), (1,))),
    ),
    "vmap": (
        lambda mm, x, y: jax.vmap(lambda x, y: mm(x, y.T))(x, y),
        *((3, M, K), (3, N, K)),
        BATCHED_NT,
    ),
    "vmap of x": (
        lambda mm, x, y: jax.vmap(lambda x: mm(x, y.T))(x),
        *((3, M, K), (N, K)),
        (((2,), (1,)), ((), ())),
    ),
    "scan": (
        lambda mm, x, y: lax.scan(lambda _, xy: (None, mm(xy[0], xy[1].T)), None, (x, y))[1],
        *((3, M, K), (3, N, K)),
        BATCHED_NT,
    ),
    "checkpoint": (
        lambda mm, x, y: jax.checkpoint(lambda x, y: mm(x, y.T))(x, y),
        (M, K),
        (N, K),
        NT,
    ),
}


@pytest.mark.kernel
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_kernel_reads_what_is_stored(program, implementation):
    """The bits are those of the product that names the dims of the stored arrays."""
    make, x_shape, y_shape, numbers = PROGRAMS[program]
    mm = functools.partial(jax_gpuops.matmul, implementation=implementation)
    x, y = helpers.normal(x_shape, "float32"), helpers.normal(y_shape, "float32", seed=1)
    function = functools.partial(make, mm)
    text = compiled(function, x, y)
    assert "jax_gpuops_gemm" in text
    assert not moves(text)
    actual = jax.jit(function)(x, y)
    if numbers == BATCHED_NT:  # dot_general has no batch that y has alone
        x = np.broadcast_to(x, (3, M, K))
    dot = functools.partial(
        jax_gpuops.dot_general, dimension_numbers=numbers, implementation=implementation
    )
    helpers.assert_same_bits(actual, jax.jit(dot)(x, y))


DTYPES = {
    "float16": "float16",
    "bfloat16": "float32",
    "float64": "float64",
    "float8_e4m3fn": "bfloat16",
    "int8": "int32",
}


@pytest.mark.kernel
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype, left, implementation):
    how = {"implementation": implementation, "preferred_element_type": DTYPES[dtype]}
    with helpers.x64(dtype):
        x = helpers.factor_of_8_bits((K, M) if left else (M, K), dtype)
        y = helpers.factor_of_8_bits((N, K), dtype, seed=1)

        def function(x, y):
            return jax_gpuops.matmul(x.T if left else x, y.T, **how)

        dot = functools.partial(jax_gpuops.dot_general, dimension_numbers=TT if left else NT, **how)
        text = compiled(function, x, y)
        assert "jax_gpuops_gemm" in text
        assert not moves(text)
        helpers.assert_same_bits(jax.jit(function)(x, y), jax.jit(dot)(x, y))


@pytest.mark.kernel
@pytest.mark.parametrize("algorithm", [each.name for each in jax_gpuops.algorithms("matmul")])
def test_every_algorithm(algorithm, implementation):
    dtype = "float64" if algorithm == "mma_pipelined" else "float32"
    precision = "default" if algorithm in ("tensor_core", "split_k") else "highest"
    how = {"implementation": implementation, "algorithm": algorithm, "precision": precision}
    of_few_rows = algorithm in ("skinny", "split_k", "fma_sliced", "fma_skinny")
    m, n, k = (8, 512, 1024) if of_few_rows else (M, N, K)
    with helpers.x64(dtype):
        x, y = helpers.normal((m, k), dtype), helpers.normal((n, k), dtype, seed=1)
        dot = functools.partial(jax_gpuops.dot_general, dimension_numbers=NT, **how)
        try:
            expected = jax.jit(dot)(x, y)
            actual = jax.jit(lambda x, y: jax_gpuops.matmul(x, y.T, **how))(x, y)
        except ValueError as error:
            pytest.skip(str(error))
        helpers.assert_same_bits(actual, expected)


@pytest.mark.kernel
def test_what_an_algorithm_refuses_is_transposed(implementation):
    options = {"precision": "highest", "algorithm": "fma_pipelined"}
    how = options | {"implementation": implementation}
    x, y = helpers.normal((K, 7), "float32"), helpers.normal((N, K), "float32", seed=1)
    with pytest.raises(ValueError, match="fma_pipelined"):
        jax_gpuops.dot_general(x, y, TT, **how)

    def function(x, y):
        return jax_gpuops.dot_general(x.T, y, NT, **how)

    text = compiled(function, x, y)
    assert "jax_gpuops_gemm" in text
    assert moves(text)
    np.testing.assert_allclose(jax.jit(function)(x, y), x.T @ y.T, rtol=1e-5, atol=1e-5)


@pytest.mark.kernel
@pytest.mark.parametrize(("dtype", "is_stored"), [("float32", True), ("bfloat16", False)])
def test_products_that_are_added_to(dtype, is_stored, implementation):
    """tensor_core adds c of 16 bits to factors that are not transposed alone."""
    x, y, c = (
        helpers.normal(shape, dtype, seed=i) for i, shape in enumerate([(M, K), (N, K), (M, N)])
    )

    def function(x, y, c):
        return jax_gpuops.gemm(x, y.T, c, beta=2.0, implementation=implementation)

    assert moves(compiled(function, x, y, c)) != is_stored
    exact = [helpers.exact(each) for each in (x, y, c)]
    tolerance = (
        {"rtol": 2e-2, "atol": 2e-2} if dtype == "bfloat16" else {"rtol": 1e-5, "atol": 1e-5}
    )
    actual = helpers.exact(jax.jit(function)(x, y, c))
    np.testing.assert_allclose(actual, exact[0] @ exact[1].T + 2 * exact[2], **tolerance)


@pytest.mark.kernel
def test_a_transposed_array_that_something_else_reads(implementation):
    x, y = helpers.normal((M, K), "float32"), helpers.normal((N, K), "float32", seed=1)

    def function(x, y):
        turned = y.T
        return jax_gpuops.matmul(x, turned, implementation=implementation), jnp.cumsum(turned)

    product, sums = jax.jit(function)(x, y)
    np.testing.assert_allclose(product, x @ y.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sums, np.cumsum(y.T), rtol=1e-4, atol=1e-4)


@pytest.mark.kernel
def test_a_function_that_is_called_with_several_arrays(implementation):
    """What makes its arguments is not looked at."""
    product = jax.jit(functools.partial(jax_gpuops.matmul, implementation=implementation))
    x, y = helpers.normal((K, K), "float32"), helpers.normal((K, K), "float32", seed=1)
    actual = jax.jit(lambda x, y: (product(x, y.T), product(x, y)))(x, y)
    for each, expected in zip(actual, (x @ y.T, x @ y), strict=True):
        np.testing.assert_allclose(each, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.kernel
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60, deadline=None)
def test_any_permutation_of_any_dims(data, implementation):
    sizes = st.lists(st.sampled_from([1, 2, 3]), min_size=0, max_size=2)
    batch, free_a, free_b, contract = (data.draw(sizes) for _ in range(4))

    def factor(free, seed):
        """An operand as it is stored, how it is transposed, and its contracted and batch dims."""
        groups = ["batch"] * len(batch) + ["free"] * len(free) + ["contract"] * len(contract)
        dims = data.draw(st.permutations(range(len(groups))))
        order = data.draw(st.permutations(range(len(groups))))
        named = [dims.index(d) for d in range(len(groups))]
        shape = [[*batch, *free, *contract][d] for d in dims]
        stored = [shape[d] for d in np.argsort(order)]
        by_group = {
            g: tuple(d for d, own in zip(named, groups, strict=True) if own == g) for g in groups
        }
        x = np.random.default_rng(seed).integers(-4, 5, stored).astype("float32")
        return x, order, by_group.get("contract", ()), by_group.get("batch", ())

    a, a_order, a_contract, a_batch = factor(free_a, 0)
    b, b_order, b_contract, b_batch = factor(free_b, 1)
    numbers = (a_contract, b_contract), (a_batch, b_batch)

    def function(dot, a, b):
        return dot(lax.transpose(a, a_order), lax.transpose(b, b_order), numbers)

    ours = functools.partial(jax_gpuops.dot_general, implementation=implementation)
    actual = jax.jit(functools.partial(function, ours))(a, b)
    np.testing.assert_array_equal(actual, function(lax.dot_general, a, b))


# Derivatives


@pytest.mark.kernel
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients(transposed, batch, implementation):
    x = helpers.normal((*batch, M, K), "float32")
    w = helpers.normal((*batch, N, K) if transposed else (*batch, K, N), "float32", seed=1)
    dy = helpers.normal((*batch, M, N), "float32", seed=2)

    def gradients(x, w, dy):
        def product(x, w):
            w = jnp.swapaxes(w, -1, -2) if transposed else w
            return jax_gpuops.matmul(x, w, precision="highest", implementation=implementation)

        return jax.vjp(product, x, w)[1](dy)

    text = compiled(gradients, x, w, dy)
    assert text.count('"jax_gpuops_gemm') == 2
    # The cotangent of what the product reads is what a kernel writes, and JAX transposes it.
    assert moves(text) == transposed
    dx, dw = jax.jit(gradients)(x, w, dy)
    x, w, dy = map(helpers.exact, (x, w, dy))
    swapped = functools.partial(np.swapaxes, axis1=-1, axis2=-2)
    np.testing.assert_allclose(dx, dy @ (w if transposed else swapped(w)), rtol=1e-4, atol=1e-4)
    expected = swapped(dy) @ x if transposed else swapped(x) @ dy
    np.testing.assert_allclose(dw, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("numbers", "shapes"),
    [
        (NT, [(M, K), (N, K)]),
        (TN, [(K, M), (K, N)]),
        (TT, [(K, M), (N, K)]),
        (BATCHED_NT, [(3, M, K), (3, N, K)]),
        ((((2,), (0,)), ((), ())), [(3, M, K), (K, N)]),
    ],
    ids=["NT", "TN", "TT", "batched", "rows"],
)
def test_gradients_lie_as_the_factors_do(numbers, shapes, implementation):
    def gradients(a, b):
        dot = functools.partial(
            jax_gpuops.dot_general, dimension_numbers=numbers, implementation=implementation
        )
        y, vjp = jax.vjp(dot, a, b)
        return vjp(2 * y)

    text = compiled(gradients, *map(jnp.zeros, shapes))
    assert text.count('"jax_gpuops_gemm') == 3
    assert not moves(text)


# The choice


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """A function that has products of a form be measured as faster than XLA's."""
    monkeypatch.setattr(_measurements, "gpu_kind", lambda: "NVIDIA Test GPU")
    monkeypatch.setattr(_library, "gpu_problem", lambda: None)
    if _library.missing("cuda"):
        monkeypatch.setitem(_library._MODULES, "cuda", _library.module("interpret"))
    monkeypatch.setattr(_measurements, "_loaded", None)

    def load(**form):
        entry = {"op": "matmul", "ratio": 1.5, "between": 0.5, **form}
        devices = {"NVIDIA Test GPU": {"classes": [entry]}}
        path = tmp_path / "measurements.json"
        path.write_text(json.dumps({"schema": _measurements.SCHEMA, "devices": devices}))
        jax_gpuops.load_measurements(path)

    return load


@pytest.mark.parametrize(
    ("form", "is_kernel"),
    [
        ({"transpose_a": 0, "transpose_b": 1}, True),
        ({"transpose_a": 0, "transpose_b": 0}, False),
        ({"transpose_a": 1, "transpose_b": 1}, False),
    ],
    ids=str,
)
def test_none_runs_what_was_measured_for_the_stored_arrays(form, is_kernel, measured):
    measured(**form)
    x, w = zeros((M, K), (N, K))

    def function(x, w):
        return jax_gpuops.matmul(x, w.T)

    (call,) = jax_gpuops.explain(function, x, w, platform="cuda").calls
    assert call.plan.implementation == ("cuda" if is_kernel else "xla")
    text = jax.jit(function).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert ("@jax_gpuops_gemm" in text) == is_kernel
    assert ("transpose_b = true" in text) == is_kernel


def test_none_waits_for_how_stored_rows_are_aligned(measured):
    """Rows of 7 bfloat16 are not; what is stored has rows of 8."""
    measured(transpose_a=1, transpose_b=0, aligned=16)
    x, w = zeros((7, 8), (7, 8), dtype="bfloat16")
    (call,) = jax_gpuops.explain(
        lambda x, w: jax_gpuops.matmul(x.T, w), x, w, platform="cuda"
    ).calls
    assert call.plan.implementation == "cuda"


def test_explain_names_what_the_kernel_reads(implementation):
    x, w = zeros((M, K), (N, K))

    @jax.jit
    def turned(w):
        return w.T

    def function(x, w):
        return jax_gpuops.matmul(x, turned(w), implementation=implementation)

    (call,) = jax_gpuops.explain(function, x, w).calls
    assert call.operands == (f"f32[{M},{K}]", f"f32[{N},{K}]")


# Other programs


def test_shard_map(implementation):
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    x, w = helpers.normal((M, K), "float32"), helpers.normal((N, K), "float32", seed=1)

    def function(x, w):
        return jax_gpuops.matmul(x, w.T, precision="highest", implementation=implementation)

    sharded = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d")))
    text = sharded.lower(x, w).compile().as_text()
    assert "jax_gpuops_gemm" in text
    assert not moves(text)
    np.testing.assert_allclose(sharded(x, w), x @ w.T, rtol=1e-5, atol=1e-5)


def test_symbolic_shapes(implementation):
    (rows,) = jax.export.symbolic_shape("rows")
    x, w = helpers.normal((M, K), "float32"), helpers.normal((N, K), "float32", seed=1)

    def function(x, w):
        return jax_gpuops.matmul(x, w.T, precision="highest", implementation=implementation)

    exported = jax.export.export(jax.jit(function), disabled_checks=jax_gpuops.EXPORT_CHECKS)(
        jax.ShapeDtypeStruct((rows, K), x.dtype), jax.ShapeDtypeStruct(w.shape, w.dtype)
    )
    assert "stablehlo.transpose" not in exported.mlir_module()
    assert "transpose_b = true" in exported.mlir_module()
    np.testing.assert_allclose(exported.call(x, w), x @ w.T, rtol=1e-5, atol=1e-5)


@pytest.mark.kernel
def test_layers_without_bias_and_activation(implementation):
    x, w = helpers.normal((M, K), "float32"), helpers.normal((N, K), "float32", seed=1)

    def function(x, w):
        return jax_gpuops.linear(x, w.T, implementation=implementation)

    text = compiled(function, x, w)
    assert "jax_gpuops_gemm" in text
    assert not moves(text)
    np.testing.assert_allclose(jax.jit(function)(x, w), x @ w.T, rtol=1e-5, atol=1e-5)
