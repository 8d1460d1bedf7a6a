"""Sharded arrays: right values for every sharded dimension, and no communication for whole rows."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_sharding import SPECS, mesh_of, meshes, run

import jax_gpuops

FUNCTIONS = ("sum", "max", "mean", "var", "argmax")

pytestmark = pytest.mark.parametrize(("implementation", "devices"), meshes())


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_values_and_communication(name, axis, spec, axis_type, implementation, devices):
    """Rows long enough for partials in the workspace, which is cut along with them."""
    mesh = mesh_of(devices, axis_type)
    host = helpers.normal((8, 4, 300) if axis == -1 else (8, 300, 4), "float32")
    x = jax.device_put(host, NamedSharding(mesh, spec))

    def function(x):
        return getattr(jax_gpuops, name)(x, axis, implementation=implementation)

    with jax.set_mesh(mesh):
        if spec[axis] is not None and axis_type == AxisType.Explicit:
            with pytest.raises(ValueError, match=r"sharded along the reduced axes.*reshard"):
                jax.jit(function)(x)
            y = jax.jit(lambda x: getattr(jax_gpuops, name)(x, axis))(x)
            np.testing.assert_allclose(y, getattr(jnp, name)(host, axis), rtol=1e-5, atol=1e-5)
            return
        y, collectives = run(function, x)
        np.testing.assert_allclose(y, getattr(jnp, name)(host, axis), rtol=1e-5, atol=1e-5)
        if spec[axis] is None:
            assert collectives == []
            kept = [s for i, s in enumerate(spec) if i != axis % 3]
            assert y.sharding.is_equivalent_to(NamedSharding(mesh, P(*kept)), y.ndim)


@pytest.mark.kernel
@pytest.mark.parametrize(
    "algorithm", ["naive", "unroll", "multiple", "row", "column", "interleaved"]
)
@pytest.mark.parametrize("spec", [P("d"), P(("d", "t")), P(None)], ids=str)
def test_each_shard_has_its_share_of_the_workspace(algorithm, spec, implementation, devices):
    mesh = mesh_of(devices, AxisType.Auto)
    host = helpers.normal((8, 5000, 4) if algorithm == "interleaved" else (8, 20000), "float32")
    x = jax.device_put(host, NamedSharding(mesh, spec))
    how = {"implementation": implementation, "algorithm": algorithm}
    y = jax.jit(lambda x: jax_gpuops.sum(x, 1, **how))(x)
    np.testing.assert_allclose(y, host.astype(np.float64).sum(1), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_full_reduction(name, implementation, devices):
    """Nothing is left to divide among devices, so the array is collected: right, if not fast."""
    mesh = mesh_of(devices, AxisType.Auto)
    host = helpers.normal((8, 40), "float32")
    x = jax.device_put(host, NamedSharding(mesh, P("d", "t")))
    y = jax.jit(lambda x: getattr(jax_gpuops, name)(x, implementation=implementation))(x)
    np.testing.assert_allclose(y, getattr(jnp, name)(host), rtol=1e-5, atol=1e-5)


@pytest.mark.kernel
@pytest.mark.parametrize("algorithm", ["multiple", "row", "column"])
@pytest.mark.parametrize("spec", [P("d"), P(("d", "t")), P(None)], ids=str)
def test_both_results_are_sharded(algorithm, spec, implementation, devices):
    mesh = mesh_of(devices, AxisType.Auto)
    host = helpers.normal((8, 2000), "float32")
    where = np.arange(8)[:, None] < np.arange(2000) // 100
    x, mask = (jax.device_put(each, NamedSharding(mesh, spec)) for each in (host, where))
    how = {"implementation": implementation, "algorithm": algorithm}
    for masks in ({}, {"where": mask}):
        results, collectives = run(lambda x: jax_gpuops.mean_and_var(x, -1, **masks, **how), x)  # noqa: B023
        true = {"where": where} if masks else {}
        wide = host.astype(np.float64)
        np.testing.assert_allclose(results[0], wide.mean(-1, **true), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(results[1], wide.var(-1, **true), rtol=1e-5)
        assert collectives == []
        for y in results:
            assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), 1)


@pytest.mark.parametrize("name", ["sum", "max", "mean", "var"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_gradient_and_vmap(name, axis_type, implementation, devices):
    mesh = mesh_of(devices, axis_type)
    host = helpers.normal((4, 8, 12), "float32")
    x = jax.device_put(host, NamedSharding(mesh, P("d", "t", None)))

    def ours(x, axis):
        return getattr(jax_gpuops, name)(x, axis, implementation=implementation)

    def loss(function):
        return lambda x: (function(x, -1) ** 2).sum()

    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(loss(ours)))(x)
        expected = jax.grad(loss(getattr(jnp, name)))(host)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)
        mapped = jax.jit(jax.vmap(lambda x: ours(x, -1)))(x)
        np.testing.assert_allclose(mapped, getattr(jnp, name)(host, -1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("manual", [{"d", "t"}, {"d"}], ids=["full", "partial"])
def test_shard_map(name, manual, implementation, devices):
    mesh = mesh_of(devices, AxisType.Auto)
    host = helpers.normal((8, 4, 12), "float32")
    x = jax.device_put(host, NamedSharding(mesh, P("d", None, None)))

    def function(x):
        return getattr(jax_gpuops, name)(x, -1, implementation=implementation)

    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=P("d"), out_specs=P("d"), axis_names=manual
    )
    y, collectives = run(mapped, x)
    np.testing.assert_allclose(y, getattr(jnp, name)(host, -1), rtol=1e-5, atol=1e-5)
    assert collectives == []
    if name != "argmax":
        gradient = jax.jit(jax.grad(lambda x: (mapped(x) ** 2).sum()))(x)
        expected = jax.grad(lambda x: (getattr(jnp, name)(x, -1) ** 2).sum())(host)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)
