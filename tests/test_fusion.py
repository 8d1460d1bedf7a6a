"""What `None` runs by what makes the operand, which XLA may fuse with its own lowering."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gpuops
from jax_gpuops import _library, _measurements

X, W = (jax.ShapeDtypeStruct((8, 8), "float32") for _ in range(2))


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """A function that says how fast softmax was measured to be between neighbours."""
    monkeypatch.setattr(_measurements, "gpu_kind", lambda: "NVIDIA Test GPU")
    monkeypatch.setattr(_library, "gpu_problem", lambda: None)
    if _library.missing("cuda"):  # a module that knows workspaces, as lowering asks for them
        monkeypatch.setitem(_library._MODULES, "cuda", _library.module("interpret"))
    monkeypatch.setattr(_library, "planned", lambda *_: {"algorithm": "some", "reason": "a test"})
    monkeypatch.setattr(_measurements, "_loaded", None)

    def load(**between):
        functions = ("softmax", "softmax_tangent")
        classes = [{"op": "softmax", "function": f, "ratio": 1.5, **between} for f in functions]
        devices = {"NVIDIA Test GPU": {"classes": classes}}
        path = tmp_path / "measurements.json"
        path.write_text(json.dumps({"schema": _measurements.SCHEMA, "devices": devices}))
        jax_gpuops.load_measurements(path)

    load()
    return load


def explained(function) -> list[tuple[str, str]]:
    calls = jax_gpuops.explain(function, X, W, platform="cuda").calls
    return [(each.op, each.plan.implementation) for each in calls]


def lowered(function) -> str:
    return jax.jit(function).trace(X, W).lower(lowering_platforms=("cuda",)).as_text()


MAKERS = {
    # Arguments, and what XLA fuses with no consumer.
    "argument": (lambda x, w: x, True),
    "product": (lambda x, w: x @ w, True),
    "einsum": (lambda x, w: jnp.einsum("qhd,khd->hqk", x[None], w[None]), True),
    "product in jit": (lambda x, w: jax.jit(jnp.matmul)(x, w), True),
    "product in checkpoint": (lambda x, w: jax.checkpoint(jnp.matmul)(x, w), True),
    "reshaped product": (lambda x, w: (x @ w).reshape(4, 16), True),
    "argument of jit": (lambda x, w: jax.jit(lambda x: x)(x @ w), True),
    "squeezed product": (lambda x, w: jnp.squeeze((x @ w).reshape(8, 1, 8), 1), True),
    "sort": (lambda x, w: jnp.sort(x), True),
    "top k": (lambda x, w: jax.lax.top_k(x, 3)[0], True),
    "scan": (lambda x, w: jax.lax.scan(lambda c, x: (c, x * 2), 0.0, x)[1], True),
    "kernel": (lambda x, w: jax_gpuops.softmax(x), True),
    "a value behind a barrier": (lambda x, w: jax.lax.optimization_barrier(x * 2), True),
    # Others.
    "multiplication": (lambda x, w: 2 * (x @ w), False),
    "cast": (lambda x, w: (x @ w).astype("bfloat16"), False),
    "mask": (lambda x, w: jnp.where(w > 0, x @ w, -jnp.inf), False),
    "bias": (lambda x, w: x @ w + w[0], False),
    "reshaped sum": (lambda x, w: (x + w).reshape(4, 16), False),
    "custom derivative": (lambda x, w: jax.nn.relu(x @ w), False),
    "sum in jit": (lambda x, w: jax.jit(jnp.add)(x, w), False),
    "sum before jit": (lambda x, w: jax.jit(lambda x: x)(x + w), False),
    "reshape in jit": (lambda x, w: jax.jit(lambda x: x.reshape(4, 16))(x + w), False),
    "sum in checkpoint": (lambda x, w: jax.checkpoint(jnp.add)(x, w), False),
    "softmax of XLA": (lambda x, w: jax.nn.softmax(x), False),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.usefixtures("measured")
def test_a_kernel_runs_unless_xla_may_fuse_what_makes_the_operand(maker):
    make, is_kernel = MAKERS[maker]

    def function(x, w):
        return jax_gpuops.softmax(make(x, w), axis=-1)

    assert explained(function)[-1] == ("softmax", "cuda" if is_kernel else "xla")
    kernels = lowered(function).count("@jax_gpuops_softmax")
    assert kernels == is_kernel * (2 if maker == "kernel" else 1)


@pytest.mark.parametrize(("between", "is_kernel"), [(0.99, False), (1.0, True)])
def test_a_kernel_that_is_as_fast_between_neighbours_runs_there(between, is_kernel, measured):
    measured(between=between)

    def function(x, w):
        return jax_gpuops.softmax(x + w)

    assert explained(function) == [("softmax", "cuda" if is_kernel else "xla")]
    assert ("@jax_gpuops_softmax" in lowered(function)) == is_kernel


MASKS = {
    "of all elements": (lambda x: x > 0, False),
    "of the columns": (lambda x: jnp.arange(128) < jnp.sum(x[:, :1]), True),
}


@pytest.mark.parametrize("mask", MASKS)
def test_what_makes_a_small_operand_does_not_count(mask, monkeypatch, measured):
    make, is_kernel = MASKS[mask]
    monkeypatch.setattr(_measurements, "_UNLESS_NAMED", {})  # the class says nothing of masks
    x = jax.ShapeDtypeStruct((128, 128), "bfloat16")

    def function(x, w):
        return jax_gpuops.softmax(x @ w, where=make(w))

    (call,) = jax_gpuops.explain(function, x, x, platform="cuda").calls
    assert call.plan.implementation == ("cuda" if is_kernel else "xla")
    text = jax.jit(function).trace(x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert ("@jax_gpuops_softmax" in text) == is_kernel


@pytest.mark.usefixtures("measured")
def test_a_program_for_several_platforms():
    """Each part of it knows what makes its operand."""

    def function(x, w):
        return jax_gpuops.softmax(x @ w), jax_gpuops.softmax(x + w)

    traced = jax.jit(function).trace(X, W)
    text = traced.lower(lowering_platforms=("cpu", "cuda")).as_text()
    assert text.count("@jax_gpuops_softmax") == 1


@pytest.mark.usefixtures("measured")
def test_the_reason_is_told():
    (call,) = jax_gpuops.explain(
        lambda x, w: jax_gpuops.softmax(x + w), X, W, platform="cuda"
    ).calls
    assert (
        call.plan.reason == "XLA may fuse what computes an operand with its own lowering of the op"
    )
    assert call.plan.second_best == "cuda: some"


@pytest.mark.usefixtures("measured")
def test_one_program_may_run_both():
    """The lowerings of calls that are alike are not shared."""

    def function(x, w):
        return jax_gpuops.softmax(x @ w) + jax_gpuops.softmax(x + w)

    assert explained(function) == [("softmax", "cuda"), ("softmax", "xla")]
    assert lowered(function).count("@jax_gpuops_softmax") == 1


@pytest.mark.usefixtures("measured")
def test_derivatives_go_by_what_makes_their_operands():
    """The result of a kernel and a product of the cotangent; or else what XLA made of both."""

    def attention(x, w):
        return jax_gpuops.softmax(x @ w) @ w

    def masked(x, w):
        return jax_gpuops.softmax(jnp.where(w > 0, x @ w, -1)) @ w

    for function, runs in ((attention, "cuda"), (masked, "xla")):
        gradient = jax.grad(lambda x, w, f=function: (f(x, w) @ w)[0, 0])
        assert explained(gradient) == [("softmax", runs), ("softmax_tangent", runs)]


@pytest.mark.usefixtures("measured")
def test_a_named_kernel_runs_wherever_its_operand_comes_from():
    with jax_gpuops.use("cuda", strict=False):
        assert "@jax_gpuops_softmax" in lowered(lambda x, w: jax_gpuops.softmax(x + w))
    x = np.ones((8, 8), np.float32)
    assert jax_gpuops.softmax(x + x, implementation="xla").shape == x.shape
