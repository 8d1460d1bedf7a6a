"""Sharded arrays: right values for every sharded dimension, and no communication for rows.

Runs on four CPU devices through "interpret", and on GPUs where there are several.
"""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_gpuops

FUNCTIONS = ("softmax", "log_softmax", "logsumexp")
UPSTREAM = {name: jax.jit(getattr(jax.nn, name), static_argnames="axis") for name in FUNCTIONS}
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def meshes():
    platforms = {"interpret": jax.devices("cpu")}
    if jax.default_backend() == "gpu" and len(jax.devices()) >= 4:
        platforms["cuda"] = jax.devices()
    return [
        pytest.param(name, np.array(devices[:4]).reshape(2, 2), id=name)
        for name, devices in platforms.items()
    ]


pytestmark = pytest.mark.parametrize(("implementation", "devices"), meshes())


def mesh_of(devices, axis_type) -> Mesh:
    return Mesh(devices, ("d", "t"), axis_types=(axis_type, axis_type))


def run(function, *arguments):
    """The results of a program with kernels of ours, and the collectives in it."""
    compiled = jax.jit(function).lower(*arguments).compile()
    text = compiled.as_text()
    assert "jax_gpuops_" in text
    found = [name for name in COLLECTIVES if f" {name}(" in text or f" {name}-start(" in text]
    return compiled(*arguments), found


def assert_close(actual, expected):
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=2e-6), actual, expected
    )


SPECS = [
    P("d", None, None),
    P(None, "d", None),
    P("d", "t", None),
    P(("d", "t"), None, None),
    P(None, None, "d"),
    P("t", None, "d"),
    P(None, None, None),
]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_values_and_communication(name, axis, spec, axis_type, implementation, devices):
    mesh = mesh_of(devices, axis_type)
    host = helpers.normal((8, 4, 12), "float32")
    x = jax.device_put(host, NamedSharding(mesh, spec))

    def function(x):
        return getattr(jax_gpuops, name)(x, axis=axis, implementation=implementation)

    with jax.set_mesh(mesh):
        y, collectives = run(function, x)
        np.testing.assert_allclose(y, UPSTREAM[name](host, axis=axis), rtol=1e-5, atol=1e-6)
        if spec[axis] is None:
            assert collectives == []
            kept = [s for i, s in enumerate(spec) if name != "logsumexp" or i != axis % 3]
            assert y.sharding.is_equivalent_to(NamedSharding(mesh, P(*kept)), y.ndim)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_gradient_and_vmap(name, axis_type, implementation, devices):
    mesh = mesh_of(devices, axis_type)
    host = helpers.normal((4, 8, 12), "float32")
    x = jax.device_put(host, NamedSharding(mesh, P("d", "t", None)))

    def loss(function):
        return lambda x: (function(x, axis=-1) ** 2).sum()

    def ours(x, axis):
        return getattr(jax_gpuops, name)(x, axis=axis, implementation=implementation)

    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(loss(ours)))(x)
        expected = jax.jit(jax.grad(loss(UPSTREAM[name])))(host)
        np.testing.assert_allclose(gradient, expected, atol=1e-5)
        mapped = jax.jit(jax.vmap(lambda x: ours(x, -1)))(x)
        np.testing.assert_allclose(mapped, UPSTREAM[name](host, axis=-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("manual", [{"d", "t"}, {"d"}], ids=["full", "partial"])
def test_shard_map(name, manual, implementation, devices):
    mesh = mesh_of(devices, AxisType.Auto)
    host = helpers.normal((8, 4, 12), "float32")
    x = jax.device_put(host, NamedSharding(mesh, P("d", None, None)))

    def function(x):
        return getattr(jax_gpuops, name)(x, axis=-1, implementation=implementation)

    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=P("d"), out_specs=P("d"), axis_names=manual
    )
    y, collectives = run(mapped, x)
    np.testing.assert_allclose(y, UPSTREAM[name](host, axis=-1), rtol=1e-5, atol=1e-6)
    assert collectives == []
    gradient = jax.jit(jax.grad(lambda x: (mapped(x) ** 2).sum()))(x)
    expected = jax.jit(jax.grad(lambda x: (UPSTREAM[name](x, axis=-1) ** 2).sum()))(host)
    np.testing.assert_allclose(gradient, expected, atol=1e-5)


HOST = helpers.normal((8, 4, 12), "float32")
LABELS = np.random.default_rng(0).integers(0, 12, (8, 4))


def mask(shape):
    return None if shape is None else np.random.default_rng(1).random(shape) < 0.7


def value_and_cotangent(function, x):
    """With 0 for what log_softmax has where masked."""
    y, pullback = jax.vjp(function, x)
    y = jnp.where(jnp.isfinite(y), y, 0)
    return y, pullback(y)[0]


@functools.cache
def expected_of_softmax(name, where_shape, causal):
    where = np.True_ if where_shape is None else mask(where_shape)
    if causal:
        where = where & np.tri(4, 12, dtype=bool)
    function = functools.partial(UPSTREAM[name], axis=-1, where=where)
    return jax.jit(functools.partial(value_and_cotangent, function))(HOST)


@functools.cache
def expected_of_cross_entropy(where_shape):
    function = optax.softmax_cross_entropy_with_integer_labels
    function = functools.partial(function, labels=LABELS, where=mask(where_shape))
    return jax.jit(functools.partial(value_and_cotangent, function))(HOST)


@pytest.mark.parametrize(
    "where_shape", [(8, 4, 12), (1, 4, 12), (8, 1, 12), (12,), (4, 1), (8, 1, 1), ()], ids=str
)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_mask_with_every_sharding(where_shape, spec, implementation, devices):
    mesh = mesh_of(devices, AxisType.Auto)
    x = jax.device_put(HOST, NamedSharding(mesh, spec))
    options = {"where": mask(where_shape), "implementation": implementation}
    function = functools.partial(jax_gpuops.softmax, **options)
    actual = jax.jit(functools.partial(value_and_cotangent, function))(x)
    assert_close(actual, expected_of_softmax("softmax", where_shape, False))


@pytest.mark.parametrize(
    ("name", "where_shape"),
    [*((name, (8, 1, 12)) for name in FUNCTIONS), ("softmax", None), ("softmax", (12,))],
    ids=str,
)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_causal_masks(name, where_shape, spec, axis_type, implementation, devices):
    """A row depends on its index: the last two axes stay whole."""
    mesh = mesh_of(devices, axis_type)
    x = jax.device_put(HOST, NamedSharding(mesh, spec))
    options = {"where": mask(where_shape), "causal": True, "implementation": implementation}
    function = functools.partial(getattr(jax_gpuops, name), axis=-1, **options)
    expected = expected_of_softmax(name, where_shape, True)
    with jax.set_mesh(mesh):
        actual, collectives = run(functools.partial(value_and_cotangent, function), x)
        assert_close(actual, expected)
        if spec[1] is None and spec[2] is None:
            assert collectives == []


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("where_shape", [None, (8, 4), (1, 1, 12)], ids=str)
def test_cross_entropy(spec, axis_type, where_shape, implementation, devices):
    mesh = mesh_of(devices, axis_type)
    x = jax.device_put(HOST, NamedSharding(mesh, spec))
    labels = jax.device_put(LABELS, NamedSharding(mesh, P(*spec[:2])))

    def ours(x, labels):
        function = jax_gpuops.softmax_cross_entropy_with_integer_labels
        options = {"where": mask(where_shape), "implementation": implementation}
        return value_and_cotangent(functools.partial(function, labels=labels, **options), x)

    expected = expected_of_cross_entropy(where_shape)
    with jax.set_mesh(mesh):
        actual, collectives = run(ours, x, labels)
        assert_close(actual, expected)
        if spec[2] is None:
            assert collectives == []


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("spec", "axis"), [(P(None, "d"), (0, 1)), (P(None, None, "d"), None)])
def test_several_sharded_axes_in_an_explicit_mesh(name, spec, axis, implementation, devices):
    mesh = mesh_of(devices, AxisType.Explicit)
    host = helpers.normal((8, 4, 12), "float32")
    x = jax.device_put(host, NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: getattr(jax_gpuops, name)(x, axis=axis))(x)
        np.testing.assert_allclose(y, UPSTREAM[name](host, axis=axis), rtol=1e-5, atol=1e-6)
        with pytest.raises(ValueError, match="reshard it first"):
            getattr(jax_gpuops, name)(x, axis=axis, implementation=implementation)


# What `None` leaves to XLA

ALL = {
    "softmax": (jax_gpuops.softmax, jax.nn.softmax),
    "log_softmax": (jax_gpuops.log_softmax, jax.nn.log_softmax),
    "logsumexp": (jax_gpuops.logsumexp, jax.nn.logsumexp),
    "sum": (jax_gpuops.sum, jnp.sum),
    "mean": (jax_gpuops.mean, jnp.mean),
    "max": (jax_gpuops.max, jnp.max),
    "prod": (jax_gpuops.prod, jnp.prod),
    "var": (jax_gpuops.var, jnp.var),
    "masked sum": (
        lambda x, axis: jax_gpuops.sum(x, axis, where=x > 0),
        lambda x, axis: jnp.sum(x, axis, where=x > 0),
    ),
    "16-bit sum": (
        lambda x, axis: jax_gpuops.sum(x.astype("bfloat16"), axis),
        lambda x, axis: jnp.sum(x.astype("bfloat16"), axis),
    ),
}


def collectives_of(function, x):
    """How many of each kind, and the shardings of the results."""
    compiled = jax.jit(function).lower(x).compile()
    text = compiled.as_text()
    assert "jax_gpuops_" not in text
    counts = {name: text.count(f" {name}(") + text.count(f" {name}-start(") for name in COLLECTIVES}
    return counts, compiled.output_shardings


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("axis", [None, (1, 2), (0, 2)], ids=str)
@pytest.mark.parametrize("transformation", ["none", "grad", "vmap", "vmap of grad", "shard_map"])
def test_none_communicates_as_xla_does(name, axis, transformation, implementation, devices):
    """Over several axes, some of them sharded: nothing is merged or moved at trace time."""
    del implementation
    if name == "prod" and "grad" in transformation:
        pytest.skip("JAX multiplies by other means")
    mesh = mesh_of(devices, AxisType.Auto)
    host = helpers.normal((2, 4, 8, 6) if "vmap" in transformation else (4, 8, 6), "float32")
    spec = P(None, "d", "t") if "vmap" in transformation else P("d", "t")
    x = jax.device_put(host, NamedSharding(mesh, spec))

    def transformed(function):
        def call(x):
            return function(x, axis=axis)

        def gradient(x):
            return jax.grad(lambda x: (call(x).astype(jnp.float32) ** 2).sum())(x)

        return {
            "none": call,
            "grad": gradient,
            "vmap": jax.vmap(call),
            "vmap of grad": jax.vmap(gradient),
            "shard_map": jax.shard_map(
                lambda x: call(x)[None],
                mesh=mesh,
                in_specs=P("d"),
                out_specs=P("d"),
                axis_names={"d"},
            ),
        }[transformation]

    ours, upstream = map(transformed, ALL[name])
    (actual, shardings), (expected, expected_shardings) = (
        collectives_of(function, x) for function in (ours, upstream)
    )
    if name == "var" and "grad" in transformation:
        # XLA's is of three sums; ours lacks the one of the mean's tangent, whose factor is 0.
        expected["all-reduce"] = expected["all-reduce"] * 2 // 3
    assert actual == expected
    ndim = jax.eval_shape(ours, x).ndim
    assert shardings.is_equivalent_to(expected_shardings, ndim)
    np.testing.assert_allclose(
        np.asarray(jax.jit(ours)(x), np.float32),
        np.asarray(jax.jit(upstream)(x), np.float32),
        rtol=1e-2 if name == "16-bit sum" else 1e-4,
        atol=1e-5,
    )
