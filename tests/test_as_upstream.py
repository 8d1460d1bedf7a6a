"""JAX's habits beyond transformations: foreign arrays, strict promotion, types under a mesh.

Each is checked against upstream: the same types, the same values, or the same errors.
"""

import functools
import inspect
import itertools
import types
import typing

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_transforms import assert_close, differentiable_ops, every_op

import jax_gpuops
from jax_gpuops import _measurements
from jax_gpuops.flax import attention_fn

# Objects that hold an array


@every_op
@pytest.mark.parametrize("named", [True, False])
def test_parameters_of_flax_are_arrays(op, named, implementation):
    operands = op.operands()
    how = {"implementation": implementation} if named else {}
    assert_close(op(*map(nnx.Param, operands), **how), op.reference(*operands))


def test_any_array_argument_may_be_a_parameter(implementation):
    x, how = helpers.normal((4, 6), "float32"), {"implementation": implementation}
    where, labels = x > -1, np.array([0, 3, 5, 2])
    held = nnx.Param(jnp.asarray(where))
    y = jax_gpuops.softmax(x, where=held, **how)
    np.testing.assert_allclose(y, jax.nn.softmax(x, where=where), rtol=1e-5)
    y = jax_gpuops.var(x, -1, where=held, **how)
    np.testing.assert_allclose(y, jnp.var(x, -1, where=where), rtol=1e-5)
    y = jax_gpuops.var(x, -1, mean=nnx.Param(jnp.ones((4, 1))))
    np.testing.assert_allclose(y, jnp.var(x, -1, mean=jnp.ones((4, 1))), rtol=1e-5)
    y = jax_gpuops.max(x, -1, initial=nnx.Param(jnp.float32(0)), where=held, **how)
    np.testing.assert_array_equal(y, jnp.max(x, -1, initial=0, where=where))
    y = jax_gpuops.softmax_cross_entropy_with_integer_labels(
        x, nnx.Param(jnp.asarray(labels)), where=held, **how
    )
    expected = optax.softmax_cross_entropy_with_integer_labels(x, labels, where=where)
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    y = jax_gpuops.logsumexp(x, -1, nnx.Param(jnp.ones((4, 6))))
    np.testing.assert_allclose(y, jax.nn.logsumexp(x, -1), rtol=1e-6)


@pytest.mark.parametrize("preferred", [None, "float32"])
@pytest.mark.parametrize("named", [True, False])
def test_products_of_weakly_typed_arrays(named, preferred, implementation):
    """So the dtype of later operations does not depend on what multiplies."""
    how = {"implementation": implementation} if named else {}
    weak, strong, narrow = (
        jnp.full((8, 8), 1.0),
        jnp.ones((8, 8)),
        jnp.ones((8, 8), jnp.bfloat16),
    )
    pairs = [(weak, weak), (weak, strong), (strong, weak), (weak[0], weak)]
    for a, b in pairs if preferred else [*pairs, (weak, narrow), (narrow, weak)]:
        y = jax_gpuops.matmul(a, b, preferred_element_type=preferred, **how)
        expected = jnp.matmul(a, b, preferred_element_type=preferred)
        assert (y.dtype, y.weak_type) == (expected.dtype, expected.weak_type)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("other", ["int8", "bool", "int32", "weak int"])
def test_products_of_weakly_typed_floats_and_integers(other, x64, implementation):
    """With 64 bits, float32 of the other mode becomes float64, too."""
    named = functools.partial(jax_gpuops.matmul, implementation=implementation)
    weak = jnp.full((8, 8), 2.0)
    with jax.enable_x64(x64):
        integers = jnp.full((8, 8), 3) if other == "weak int" else jnp.full((8, 8), 3, other)
        for a, b in [(weak, integers), (integers, weak), (weak[0], integers)]:
            y, expected = named(a, b), jnp.matmul(a, b)
            assert (y.dtype, y.weak_type) == (expected.dtype, expected.weak_type)
            np.testing.assert_array_equal(y, expected)
        gradient, expected = (
            jax.grad(lambda x, matmul=matmul: matmul(x, integers).sum())(weak)
            for matmul in (named, jnp.matmul)
        )
        np.testing.assert_array_equal(gradient, expected)


def test_axes_are_arrays_and_not_traced():
    x = helpers.normal((3, 4, 5), "float32")
    axes = np.array([0, 1])
    for keepdims in (True, False):
        y = jax_gpuops.logsumexp(x, axis=axes, keepdims=keepdims)
        expected = jax.nn.logsumexp(x, axis=(0, 1), keepdims=keepdims)
        np.testing.assert_allclose(y, expected, rtol=1e-6)
    for function in (jax_gpuops.sum, jax_gpuops.var, jax_gpuops.softmax):
        with pytest.raises(TypeError, match="traced"):
            jax.jit(function)(x, 0)


# Types of results, for type checkers


def test_the_type_of_logsumexp_goes_by_return_sign_as_upstream():
    name = types.SimpleNamespace(__module__="jax_gpuops._softmax", __qualname__="logsumexp")
    ours, theirs = map(typing.get_overloads, (name, jax.nn.logsumexp))

    def described(overload):
        signature = inspect.signature(overload)
        returned = str(signature.return_annotation).replace("jax.", "")
        return returned, signature.parameters["return_sign"].annotation

    assert list(map(described, ours)) == list(map(described, theirs))


# Strict promotion


@differentiable_ops
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("named", [True, False])
def test_strict_promotion(op, dtype, named, implementation):
    operands = [x.astype(dtype) for x in op.operands()]
    how = {"implementation": implementation} if named else {}

    @jax.jit  # one program is compiled faster than many
    def results(*operands):
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            y, pullback = jax.vjp(lambda *xs: op(*xs, **how), *operands)
            cotangents = pullback(y)
            jax.jvp(lambda *xs: op(*xs, **how), operands, operands)
            mapped = jax.vmap(lambda *xs: op(*xs, **how))(*(x[None] for x in operands))
        expected, expected_pullback = jax.vjp(op.reference, *operands)
        return (y, mapped[0], cotangents), (expected, expected, expected_pullback(expected))

    tolerance = {"bfloat16": 5e-2, "float32": 2e-5}[dtype]
    for actual, reference in zip(*map(jax.tree.leaves, results(*operands)), strict=True):
        assert actual.dtype == dtype
        np.testing.assert_allclose(
            *(np.asarray(each, np.float32) for each in (actual, reference)),
            rtol=tolerance,
            atol=tolerance,
        )


@pytest.mark.parametrize("named", [True, False])
def test_strict_promotion_of_products_of_16_bit(named, implementation):
    a, b = helpers.normal((5, 6), "bfloat16"), helpers.normal((6, 7), "bfloat16", seed=1)
    how = {"implementation": implementation} if named else {}

    def loss(matmul, a, b, **how):
        return (matmul(a, b, preferred_element_type=jnp.float32, **how) ** 2).sum()

    with jax.numpy_dtype_promotion("strict"):
        actual = jax.grad(functools.partial(loss, jax_gpuops.matmul, **how), (0, 1))(a, b)
        scaled = jax_gpuops.gemm(a, b, alpha=0.5, **how)
        added = jax_gpuops.gemm(a, b, jnp.ones((5, 7), "bfloat16"), beta=2.0, **how)
    for x, y in zip(
        actual, jax.grad(functools.partial(loss, jnp.matmul), (0, 1))(a, b), strict=True
    ):
        np.testing.assert_allclose(x.astype("float32"), y.astype("float32"), rtol=2e-2, atol=1e-1)
    product = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(np.asarray(scaled, np.float64), product / 2, rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(np.asarray(added, np.float64), product + 2, rtol=1e-2, atol=2e-2)


reductions = pytest.mark.parametrize(
    ("function", "upstream"),
    [
        (jax_gpuops.softmax, jax.nn.softmax),
        (jax_gpuops.log_softmax, jax.nn.log_softmax),
        (jax_gpuops.logsumexp, jax.nn.logsumexp),
        (jax_gpuops.sum, jnp.sum),
        (jax_gpuops.var, jnp.var),
    ],
)


@reductions
@pytest.mark.parametrize(
    ("axis", "axes"),
    [
        (range(2), (0, 1)),
        ([0, 1], (0, 1)),
        ((np.array(0), 1), (0, 1)),
        ([jnp.array(0)], 0),
        (np.array(1), 1),
        (jnp.array(1), 1),
        (np.int64(-1), -1),
    ],
    ids=repr,
)
def test_an_axis_may_have_any_form(function, upstream, axis, axes):
    x = helpers.normal((3, 4), "float32")
    np.testing.assert_allclose(function(x, axis=axis), upstream(x, axis=axes), rtol=1e-5, atol=1e-6)


@reductions
@pytest.mark.parametrize("axis", [((0,), 1), 1.0], ids=repr)
def test_an_axis_must_be_an_integer(function, upstream, axis):
    with pytest.raises(TypeError):
        function(helpers.normal((3, 4), "float32"), axis=axis)


@pytest.mark.parametrize("mapped", ["b", "residual", "c"])
def test_ranks_may_not_promote_where_only_an_addend_is_mapped(mapped, implementation):
    x, w = helpers.normal((4, 5), "float32"), helpers.normal((5, 6), "float32", seed=1)
    addends = helpers.normal((3, 6) if mapped == "b" else (3, 4, 6), "float32", seed=2)
    function = {
        "b": lambda b: jax_gpuops.linear(x, w, b, activation="relu"),
        "residual": lambda c: jax_gpuops.linear(x, w, residual=c),
        "c": lambda c: jax_gpuops.gemm(x, w, c, beta=1.0),
    }[mapped]
    with jax_gpuops.use(implementation), jax.numpy_rank_promotion("raise"):
        y = jax.vmap(function)(addends)
    for each, addend in zip(y, addends, strict=True):
        expected = x.astype(np.float64) @ w + addend
        expected = np.maximum(expected, 0) if mapped == "b" else expected
        np.testing.assert_allclose(each, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("named", [True, False])
def test_ranks_may_not_promote(named, implementation):
    x = helpers.normal((2, 3, 5, 5), "float32")
    mask = np.random.default_rng(0).random((2, 1, 5, 5)) < 0.7
    query = helpers.normal((2, 5, 3, 4), "float32")
    default = jax_gpuops.use(implementation if named else None)
    with default, jax.numpy_rank_promotion("raise"):
        y = jax_gpuops.softmax(x, where=mask, causal=True)
        attended = attention_fn(query, query, query, mask=mask, is_causal=True)
        jax.grad(lambda x: jax_gpuops.logsumexp(x, -1, where=mask, causal=True).sum())(x)
    expected = jax.nn.softmax(x, where=mask & np.tri(5, dtype=bool))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    expected = nnx.dot_product_attention(query, query, query, mask=mask & np.tri(5, dtype=bool))
    np.testing.assert_allclose(attended, expected, rtol=1e-4, atol=1e-5)


# Checkpoint policies


def test_none_keeps_products_that_checkpoint_policies_save():
    """They know JAX's products by their primitive."""
    w = [jnp.ones((8, 8))] * 3

    def count_products(matmul):
        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
        def f(x, w):
            for each in w:
                x = jnp.tanh(matmul(x, each))
            return x.sum()

        text = jax.jit(jax.grad(f, (0, 1))).lower(jnp.ones((4, 8)), w).as_text()
        return text.count("stablehlo.dot_general")

    stock = count_products(jnp.matmul)
    assert count_products(jax_gpuops.matmul) == stock
    general = functools.partial(jax_gpuops.dot_general, dimension_numbers=(((1,), (0,)), ((), ())))
    assert count_products(general) == stock
    assert count_products(jax_gpuops.gemm) == stock


def test_none_binds_a_product_that_was_measured(monkeypatch):
    classes = [{"op": "matmul", "dtype": "float32", "m": [1, 64], "ratio": 1.1}]
    monkeypatch.setattr(
        _measurements, "table", lambda: {"NVIDIA Test GPU": _measurements.Classes(classes)}
    )
    for dtype, expected in (("float32", "gpuops_gemm"), ("bfloat16", "dot_general")):
        x = jnp.ones((4, 4), dtype)
        jax.clear_caches()
        jaxpr = jax.make_jaxpr(lambda x: jax_gpuops.matmul(x, x))(x)
        assert [each.primitive.name for each in jaxpr.eqns] == [expected]
    jax.clear_caches()


# Types in a mesh with explicit axes

UPSTREAM = types.SimpleNamespace(
    softmax=jax.nn.softmax,
    log_softmax=jax.nn.log_softmax,
    logsumexp=jax.nn.logsumexp,
    sum=jnp.sum,
    mean=jnp.mean,
    max=jnp.max,
    argmax=jnp.argmax,
    var=jnp.var,
    std=jnp.std,
    transpose=jnp.transpose,
    matmul=jnp.matmul,
    cross_entropy=optax.softmax_cross_entropy_with_integer_labels,
)
OURS = types.SimpleNamespace(
    **{name: getattr(jax_gpuops, name) for name in vars(UPSTREAM) if name != "cross_entropy"},
    cross_entropy=jax_gpuops.softmax_cross_entropy_with_integer_labels,
)
MASKED = {
    "softmax": lambda ops, x, mask: ops.softmax(x, where=mask),
    "log_softmax": lambda ops, x, mask: jnp.where(mask, ops.log_softmax(x, where=mask), 0),
    "logsumexp": lambda ops, x, mask: ops.logsumexp(x, -1, where=mask),
    "sum": lambda ops, x, mask: ops.sum(x, -1, where=mask),
    "mean": lambda ops, x, mask: ops.mean(x, -1, where=mask),
    "max": lambda ops, x, mask: ops.max(x, -1, initial=-9, where=mask),
    "var": lambda ops, x, mask: ops.var(x, -1, where=mask, correction=-1),
    "cross_entropy": lambda ops, x, mask: ops.cross_entropy(x, jnp.arange(8) % 4, where=mask),
}
UNARY = {
    "softmax": lambda ops, x: ops.softmax(x),
    "log_softmax": lambda ops, x: ops.log_softmax(x),
    "logsumexp": lambda ops, x: ops.logsumexp(x, -1),
    "logsumexp of all": lambda ops, x: ops.logsumexp(x),
    "sum": lambda ops, x: ops.sum(x, -1),
    "sum of all": lambda ops, x: ops.sum(x),
    "mean": lambda ops, x: ops.mean(x, 0),
    "max": lambda ops, x: ops.max(x, -1),
    "argmax": lambda ops, x: ops.argmax(x, -1),
    "var": lambda ops, x: ops.var(x, -1),
    "std of all": lambda ops, x: ops.std(x),
    "transpose": lambda ops, x: ops.transpose(x),
    "matmul": lambda ops, x: ops.matmul(x, jnp.ones((x.shape[-1], 3))),
}
SPECS = [P(None, None), P("d", None), P("t", None), P("d", "t"), P(("d", "t"), None)]
X = helpers.normal((8, 4), "float32")
MASK = X > -1


def explicit_mesh(d=2, t=2) -> Mesh:
    devices = np.array(jax.devices("cpu")[: d * t]).reshape(d, t)
    return Mesh(devices, ("d", "t"), axis_types=(AxisType.Explicit,) * 2)


def outcome(function, *arguments):
    """The type of the result, or of the error."""
    try:
        return str(jax.make_jaxpr(function)(*arguments).out_avals[0])
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("name", MASKED)
def test_the_type_is_that_of_all_operands(name):
    mesh = explicit_mesh()
    ours, upstream = (functools.partial(MASKED[name], ops) for ops in (OURS, UPSTREAM))
    specs = SPECS[:2] if name == "cross_entropy" else SPECS  # optax gathers the label's logit
    with jax.set_mesh(mesh):
        for x_spec, mask_spec in itertools.product(specs, specs):
            x = jax.device_put(X, NamedSharding(mesh, x_spec))
            mask = jax.device_put(MASK, NamedSharding(mesh, mask_spec))
            assert outcome(ours, x, mask) == outcome(upstream, x, mask), (x_spec, mask_spec)
        x = jax.device_put(X, NamedSharding(mesh, P(None, None)))
        mask = jax.device_put(MASK, NamedSharding(mesh, P("d", None)))
        np.testing.assert_allclose(jax.jit(ours)(x, mask), upstream(X, MASK), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("named", [True, False])
def test_the_gradient_has_the_type_of_its_operand(name, named):
    """Also where a mask is sharded and the array is not."""
    mesh = explicit_mesh()

    def gradient(ops, x, mask):
        return jax.grad(lambda x: (MASKED[name](ops, x, mask) ** 2).sum())(x)

    with jax.set_mesh(mesh), jax_gpuops.use("interpret" if named else None):
        x = jax.device_put(X, NamedSharding(mesh, P(None, None)))
        mask = jax.device_put(MASK, NamedSharding(mesh, P("d", None)))
        actual = jax.jit(functools.partial(gradient, OURS))(x, mask)
        assert jax.typeof(actual) == jax.typeof(x)
    np.testing.assert_allclose(actual, gradient(UPSTREAM, X, MASK), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_c", [False, True])
def test_a_product_times_zero_has_the_type_of_the_product(has_c):
    mesh = explicit_mesh()
    with jax.set_mesh(mesh):
        a, b, c = (
            jax.device_put(np.ones((4, 4), np.float32), NamedSharding(mesh, spec))
            for spec in (P("d", None), P(None, "t"), P(None, None))
        )
        how = {"c": c, "beta": 2.0} if has_c else {}
        y = jax_gpuops.gemm(a, b, alpha=0, **how)
        assert jax.typeof(y) == jax.typeof(jax_gpuops.gemm(a, b, alpha=1, **how))
    np.testing.assert_array_equal(y, np.full((4, 4), 2.0 * has_c))


@pytest.mark.parametrize("has_c", [False, True])
@pytest.mark.parametrize("alpha", [0, 1])
def test_products_in_a_partly_manual_shard_map(alpha, has_c):
    devices = np.array(jax.devices("cpu")[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("d", "t"), axis_types=(AxisType.Auto,) * 2)
    a, b, c = (np.ones(shape, np.float32) for shape in ((8, 16), (16, 12), (8, 12)))

    def product(a, b, c):
        return jax_gpuops.gemm(a, b, c if has_c else None, alpha=alpha, beta=2.0 * has_c)

    with jax.set_mesh(mesh):
        specs = {"in_specs": (P("d"), P(), P("d")), "out_specs": P("d"), "axis_names": {"d"}}
        y = jax.jit(jax.shard_map(product, **specs))(a, b, c)
    np.testing.assert_array_equal(y, np.full((8, 12), 16.0 * alpha + 2 * has_c))


def test_labels_shard_their_logits():
    mesh = explicit_mesh()
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P(None, None)))
        labels = jax.device_put(np.arange(8) % 4, NamedSharding(mesh, P("d")))
        expected = outcome(UPSTREAM.cross_entropy, x, labels)
        assert outcome(OURS.cross_entropy, x, labels) == expected
        gradient = jax.grad(lambda x: OURS.cross_entropy(x, labels).sum())(x)
        assert jax.typeof(gradient) == jax.typeof(x)


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("kind", ["reduced", "unreduced"])
@pytest.mark.parametrize("preferred", [False, True])
def test_reduced_and_unreduced_arrays(name, kind, preferred, implementation):
    mesh = explicit_mesh()

    def of_kind(function, ops):
        spec = P("d", None, **{kind: {"t"}})

        def call(x):
            if kind == "reduced":
                return function(ops, jax.sharding.reshard(x, spec))
            a, b = (
                jax.sharding.reshard(x, P("d", "t")),
                jax.sharding.reshard(jnp.ones((4, 6)), P("t")),
            )
            return function(ops, jnp.einsum("ij,jk->ik", a, b, out_sharding=spec))

        return call

    default = jax_gpuops.use(implementation if preferred else None, strict=False)
    with default, jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("d", None)))
        actual, expected = (outcome(of_kind(UNARY[name], ops), x) for ops in (OURS, UPSTREAM))
        assert actual == expected


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("spec", [P("d", "t"), P("t", "d"), P(None, ("d", "t"))], ids=str)
def test_a_mesh_of_one_device_divides_nothing(name, spec):
    """Kernels run there as they do without a mesh, and results have upstream's type."""
    mesh = explicit_mesh(1, 1)
    with jax.set_mesh(mesh), jax_gpuops.use("interpret"):
        x = jax.device_put(X, NamedSharding(mesh, spec))
        ours = jax.jit(functools.partial(UNARY[name], OURS))
        assert "jax_gpuops_" in ours.lower(x).as_text()
        expected = jax.jit(functools.partial(UNARY[name], UPSTREAM))(x)
        np.testing.assert_allclose(ours(x), expected, rtol=1e-5, atol=1e-6)
        assert jax.typeof(ours(x)) == jax.typeof(expected)
        if name != "argmax":
            jax.jit(jax.grad(lambda x: ours(x).sum()))(x)


@pytest.mark.parametrize("name", UNARY)
def test_an_axis_of_one_device_is_not_divided(name):
    if name in ("transpose", "matmul"):
        pytest.skip("they run within one device")
    mesh = explicit_mesh(2, 1)
    spec = P("t", "d") if name == "mean" else P("d", "t")
    if name.endswith("of all"):
        spec = P("t", None)
    with jax.set_mesh(mesh), jax_gpuops.use("interpret"):
        x = jax.device_put(X, NamedSharding(mesh, spec))
        ours = jax.jit(functools.partial(UNARY[name], OURS))
        assert "jax_gpuops_" in ours.lower(x).as_text()
        np.testing.assert_allclose(ours(x), UNARY[name](UPSTREAM, X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_manual_axis_does_not_count(name, kind):
    """A kernel that runs within one device does so where the axes left over have one."""
    devices = np.array(jax.devices("cpu")[:2]).reshape(2, 1)
    mesh = Mesh(devices, ("d", "t"), axis_types=(kind, kind))
    with jax.set_mesh(mesh), jax_gpuops.use("interpret"):
        mapped = jax.shard_map(
            functools.partial(UNARY[name], OURS),
            in_specs=P("d"),
            out_specs=P("d"),
            axis_names={"d"},
            check_vma=False,
        )
        if name.endswith("of all"):
            pytest.skip("its result has no axis")
        x = jax.device_put(X, NamedSharding(mesh, P("d")))
        assert "jax_gpuops_" in jax.jit(mapped).lower(x).as_text()
        expected = jnp.concatenate([UNARY[name](UPSTREAM, part) for part in (X[:4], X[4:])])
        np.testing.assert_allclose(jax.jit(mapped)(x), expected, rtol=1e-5, atol=1e-6)
