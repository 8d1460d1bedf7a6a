"""JAX's transformations and JAX's habits, for every op: one line of a table each."""

import concurrent.futures
import dataclasses
import functools
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.test_util import check_grads

import jax_gpuops
from jax_gpuops import _library


@dataclasses.dataclass(frozen=True)
class Op:
    """An op as these tests call it. Several results are one array.

    Attributes:
      name: of the public function.
      upstream: the function whose place it takes.
      shapes: of its operands.
      kwargs: its other arguments.
      closed: the result has the shape of the first operand, as the body of a scan needs.
      drop_in: the signature begins as upstream's does.
      differentiable: it has derivatives.
      factors: operands of other dtypes, which come first and stay as they are.
      keyword: of the last operand, if it has one.
    """

    name: str
    upstream: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    closed: bool = False
    drop_in: bool = True
    differentiable: bool = True
    factors: tuple[np.ndarray, ...] = ()
    keyword: str | None = None

    def __call__(self, *operands, **kwargs):
        if self.keyword is not None:
            *operands, kwargs[self.keyword] = operands
        y = getattr(jax_gpuops, self.name)(*self.factors, *operands, **self.kwargs, **kwargs)
        return jnp.stack(y) if isinstance(y, tuple) else y

    def reference(self, *operands):
        return self.upstream(*self.factors, *operands, **self.kwargs)

    def operands(self, seed: int = 0, scale: float = 1.0) -> list[jax.Array]:
        return [
            jnp.asarray(helpers.normal(shape, "float32", seed=seed + i, scale=scale))
            for i, shape in enumerate(self.shapes)
        ]


def reference_masked_softmax(x, where, causal, scale):
    assert causal
    return jax.nn.softmax(scale * x, where=where & np.tri(*x.shape[-2:], dtype=bool))


def reference_gemm(a, b, c, *, alpha, beta):
    return alpha * jnp.matmul(a, b, precision="highest") + beta * c


def reference_linear(x, w, b, *, activation, precision):
    y = jnp.matmul(x, w, precision=precision) + b
    return jax.nn.gelu(y) if activation == "gelu" else y


def reference_linear_add(x, w, b, residual, **kwargs):
    return reference_linear(x, w, b, **kwargs) + residual


def reference_glu(x, w_gate, w_up, *, activation, precision):
    y = jnp.matmul(x, w_gate, precision=precision)
    y = jax.nn.silu(y) if activation == "silu" else y
    return y * jnp.matmul(x, w_up, precision=precision)


def reference_scaled_matmul(a, b, a_scale, b_scale):
    return (a.astype("float32") @ b.astype("float32")) * a_scale * b_scale


def reference_mean_and_var(x, axis, correction):
    return jnp.stack([jnp.mean(x, axis), jnp.var(x, axis, correction=correction)])


OPS = [
    Op("softmax", jax.nn.softmax, ((4, 6),), {"axis": -1}, closed=True),
    Op("softmax", jax.nn.softmax, ((4, 6),), {"axis": 0}, closed=True),
    Op(
        "softmax",
        reference_masked_softmax,
        ((4, 6),),
        {"where": np.arange(6) != 1, "causal": True, "scale": -0.5},
        closed=True,
        drop_in=False,
    ),
    Op("log_softmax", jax.nn.log_softmax, ((4, 6),), closed=True),
    Op("logsumexp", jax.nn.logsumexp, ((4, 6),), {"axis": -1}),
    Op(
        "softmax_cross_entropy_with_integer_labels",
        optax.softmax_cross_entropy_with_integer_labels,
        ((4, 6),),
        {"labels": np.array([0, 3, 5, 2])},
    ),
    *(
        Op(name, getattr(jnp, name), ((4, 6),), {"axis": axis})
        for name in ("sum", "prod", "max", "min", "mean")
        for axis in (0, -1)
    ),
    *(
        Op(name, getattr(jnp, name), ((4, 6),), {"axis": axis, "ddof": 1})
        for name in ("var", "std")
        for axis in (0, -1)
    ),
    Op(
        "mean_and_var",
        reference_mean_and_var,
        ((4, 6),),
        {"axis": -1, "correction": 0.5},
        drop_in=False,
    ),
    Op("argmax", jnp.argmax, ((4, 6),), {"axis": -1}, differentiable=False),
    Op("argmin", jnp.argmin, ((4, 6),), {"axis": 0}, differentiable=False),
    Op("transpose", jnp.transpose, ((5, 5),), closed=True),
    Op("transpose", jnp.transpose, ((3, 4, 5),), {"axes": (1, 2, 0)}),
    Op("matmul", jnp.matmul, ((5, 5), (5, 5)), {"precision": "highest"}, closed=True),
    Op("matmul", jnp.matmul, ((2, 3, 4), (4, 5)), {"precision": "highest"}),
    Op(
        "dot_general",
        jax.lax.dot_general,
        ((2, 5, 4), (3, 4, 2)),
        {"dimension_numbers": (((2,), (1,)), ((0,), (2,))), "precision": "highest"},
    ),
    Op(
        "gemm",
        reference_gemm,
        ((4, 5), (5, 3), (4, 3)),
        {"alpha": 0.5, "beta": -2.0},
        drop_in=False,
    ),
    Op(
        "linear",
        reference_linear,
        ((4, 4), (4, 4), (4,)),
        {"activation": "gelu", "precision": "highest"},
        closed=True,
        drop_in=False,
    ),
    Op(
        "linear",
        reference_linear_add,
        ((4, 4), (4, 4), (4,), (4, 4)),
        {"activation": None, "precision": "highest"},
        closed=True,
        drop_in=False,
        keyword="residual",
    ),
    Op(
        "glu",
        reference_glu,
        ((4, 4), (4, 4), (4, 4)),
        {"activation": "silu", "precision": "highest"},
        closed=True,
        drop_in=False,
    ),
    Op(
        "scaled_matmul",
        reference_scaled_matmul,
        ((4, 1), (1, 5)),
        drop_in=False,
        differentiable=False,
        factors=(
            helpers.factor_of_8_bits((4, 6), "int8"),
            helpers.factor_of_8_bits((6, 5), "int8", seed=1),
        ),
    ),
]


def name_of(op: Op) -> str:
    values = (value for value in op.kwargs.values() if not isinstance(value, np.ndarray))
    return "-".join([op.name, *map(str, values)])


every_op = pytest.mark.parametrize("op", OPS, ids=name_of)
differentiable_ops = pytest.mark.parametrize(
    "op", [op for op in OPS if op.differentiable], ids=name_of
)
closed_ops = pytest.mark.parametrize("op", [op for op in OPS if op.closed], ids=name_of)


def assert_close(actual, expected):
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-6), actual, expected
    )


def is_ours(lowered) -> bool:
    return "jax_gpuops_" in lowered.as_text()


# Transformations


@every_op
def test_jit_gives_the_same_bits_as_eager(op, implementation):
    operands = op.operands()
    eager = op(*operands, implementation=implementation)
    jitted = jax.jit(lambda *xs: op(*xs, implementation=implementation))
    assert is_ours(jitted.lower(*operands))
    np.testing.assert_array_equal(jitted(*operands), eager)
    assert_close(eager, op.reference(*operands))


@every_op
def test_vmap_over_every_axis(op, implementation):
    @functools.partial(jax.jit, static_argnums=0)
    def vmap(function, *xs):
        results = []
        for in_axis in range(len(op.shapes[0]) + 1):
            axes = tuple(min(in_axis, x.ndim - 1) for x in xs)
            moved = [jnp.moveaxis(x, 0, axis) for x, axis in zip(xs, axes, strict=True)]
            results += [jax.vmap(function, axes, out_axis)(*moved) for out_axis in (0, -1)]
        return results

    stacked = [jnp.stack(each) for each in zip(*map(op.operands, (0, 10, 20)), strict=True)]
    actual = vmap(lambda *xs: op(*xs, implementation=implementation), *stacked)
    assert_close(actual, vmap(op.reference, *stacked))


@every_op
def test_vmap_over_some_operands(op, implementation):
    if len(op.shapes) == 1:
        pytest.skip("the op has one operand")
    for mapped in range(len(op.shapes)):
        operands = op.operands()
        operands[mapped] = jnp.stack([operands[mapped], 2 * operands[mapped]])
        axes = tuple(0 if i == mapped else None for i in range(len(operands)))
        actual = jax.vmap(lambda *xs: op(*xs, implementation=implementation), axes)
        assert_close(actual(*operands), jax.jit(jax.vmap(op.reference, axes))(*operands))


@every_op
def test_vmap_of_vmap(op, implementation):
    operands = [jnp.stack([jnp.stack([x, 2 * x]), jnp.stack([-x, x])]) for x in op.operands()]
    actual = jax.vmap(jax.vmap(lambda *xs: op(*xs, implementation=implementation)))(*operands)
    assert_close(actual, jax.jit(jax.vmap(jax.vmap(op.reference)))(*operands))


@differentiable_ops
def test_jvp_and_gradient_as_in_jax(op, implementation):
    def ours(*xs):
        return op(*xs, implementation=implementation)

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(function, operands, tangents, cotangent):
        jvp = jax.jvp(function, operands, tangents)
        return jvp, jax.vjp(function, *operands)[1](cotangent)

    operands, tangents = tuple(op.operands()), tuple(op.operands(seed=5))
    y = jax.eval_shape(ours, *operands)
    arguments = operands, tangents, helpers.normal(y.shape, "float32", seed=9)
    assert_close(derivatives(ours, *arguments), derivatives(op.reference, *arguments))


@pytest.mark.any_version
@differentiable_ops
def test_derivatives_of_second_order(op, implementation):
    check_grads(
        lambda *xs: op(*xs, implementation=implementation),
        tuple(op.operands()),
        order=2,
        modes=["fwd", "rev"],
        atol=2e-2,
        rtol=2e-2,
        eps=1e-2,
    )


@differentiable_ops
def test_gradient_of_vmap(op, implementation):
    operands = [jnp.stack([x, 2 * x, -x]) for x in op.operands()]

    def gradient(function):
        return jax.jit(jax.grad(lambda *xs: (jax.vmap(function)(*xs) ** 2).sum()))(*operands)

    ours = gradient(lambda *xs: op(*xs, implementation=implementation))
    assert_close(ours, gradient(op.reference))


@closed_ops
def test_scan_and_its_gradient(op, implementation):
    def run(function, x, *others):
        return jax.lax.scan(
            lambda x, scale: (function(scale * x, *others), None), x, jnp.arange(1.0, 4.0)
        )[0]

    def ours(*xs):
        return run(lambda *xs: op(*xs, implementation=implementation), *xs)

    def reference(*xs):
        return run(op.reference, *xs)

    def value_and_gradient(function):
        @jax.jit
        def results(*xs):
            return function(*xs), jax.grad(lambda *xs: (function(*xs) ** 2).sum())(*xs)

        return results(*op.operands())

    assert_close(value_and_gradient(ours), value_and_gradient(reference))


@every_op
def test_control_flow(op, implementation):
    operands = op.operands()

    @jax.jit
    def function(flag, *xs):
        return jax.lax.cond(
            flag,
            lambda *xs: op(*xs, implementation=implementation),
            lambda *xs: jnp.zeros_like(op.reference(*xs)),
            *xs,
        )

    assert_close(function(True, *operands), op.reference(*operands))
    assert not np.any(function(False, *operands))


@differentiable_ops
def test_checkpoint(op, implementation):
    @jax.checkpoint
    def ours(*xs):
        return (op(*xs, implementation=implementation) ** 2).sum()

    operands = op.operands()
    expected = jax.jit(jax.grad(lambda *xs: (op.reference(*xs) ** 2).sum()))(*operands)
    assert_close(jax.jit(jax.grad(ours))(*operands), expected)


@closed_ops
def test_donated_operands(op, implementation):
    operands = op.operands()
    expected = np.asarray(op.reference(*operands))
    function = jax.jit(lambda *xs: op(*xs, implementation=implementation), donate_argnums=0)
    assert_close(function(*operands), expected)
    assert operands[0].is_deleted()


# Compilation


@every_op
def test_the_second_call_compiles_nothing(op, implementation):
    compilations = []

    def listen(event: str, _duration: float, **_kwargs) -> None:
        if "backend_compile" in event:
            compilations.append(event)

    jitted = jax.jit(lambda *xs: op(*xs, implementation=implementation))
    operands, others = op.operands(), op.operands(seed=3)
    jax.block_until_ready((jitted(*operands), op(*operands, implementation=implementation)))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.block_until_ready((jitted(*others), op(*others, implementation=implementation)))
        assert compilations == []
        jax.block_until_ready(jax.jit(lambda x: x + 1)(others[0]))
        assert compilations, "the listener hears no compilations"
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert jitted._cache_size() == 1


RELOAD = """
import pathlib, sys
import jax, numpy as np
import jax_gpuops  # registers the custom calls
for folder in pathlib.Path(sys.argv[1]).iterdir():
    exported = jax.export.deserialize(bytearray((folder / "exported").read_bytes()))
    operands = [np.load(folder / f"operand{i}.npy") for i in range(len(exported.in_avals))]
    np.save(folder / "result.npy", exported.call(*operands))
"""


def test_export_and_run_in_another_process(implementation, tmp_path):
    """One process for all ops: it takes a second to start."""
    platform = {"interpret": "cpu", "cuda": "cuda"}[implementation]
    for i, op in enumerate(OPS):
        operands = op.operands()
        exported = jax.export.export(
            jax.jit(lambda *xs: op(*xs, implementation=implementation)),  # noqa: B023
            platforms=[platform],
            disabled_checks=jax_gpuops.EXPORT_CHECKS,
        )(*operands)
        assert "jax_gpuops_" in exported.mlir_module()
        folder = tmp_path / str(i)
        folder.mkdir()
        serialized = exported.serialize(vjp_order=int(op.differentiable))
        (folder / "exported").write_bytes(serialized)
        for j, operand in enumerate(operands):
            np.save(folder / f"operand{j}.npy", operand)
    run_python(RELOAD, tmp_path)
    for i, op in enumerate(OPS):
        expected = op(*op.operands(), implementation=implementation)
        actual = np.load(tmp_path / str(i) / "result.npy")
        np.testing.assert_array_equal(actual, expected, err_msg=name_of(op))


@every_op
def test_export_without_the_checks_disabled_names_the_target(op, implementation):
    platform = {"interpret": "cpu", "cuda": "cuda"}[implementation]
    function = jax.jit(lambda *xs: op(*xs, implementation=implementation))
    with pytest.raises(ValueError, match="jax_gpuops_"):
        jax.export.export(function, platforms=[platform])(*op.operands())


# The default implementation


@every_op
@pytest.mark.parametrize("transformation", ["jit", "scan", "cond", "remat", "vmap", "grad"])
def test_use_reaches_into_transformations(op, transformation, implementation):
    def inner(*xs):
        return op(*xs)

    def summed(*xs):
        return op(*xs).sum()

    function = {
        "jit": jax.jit(inner),
        "scan": lambda *xs: jax.lax.scan(lambda c, _: (c, inner(*xs)), 0, None, length=2)[1],
        "cond": lambda *xs: jax.lax.cond(xs[0].sum() > 0, inner, inner, *xs),
        "remat": jax.checkpoint(inner),
        "vmap": lambda *xs: jax.vmap(inner)(*(x[None] for x in xs)),
        "grad": jax.value_and_grad(summed),
    }[transformation]
    operands = op.operands()
    if transformation == "grad" and not op.differentiable:
        pytest.skip("the op has no gradient")
    with jax_gpuops.use(implementation):
        assert is_ours(jax.jit(function).lower(*operands))
    with jax_gpuops.use("xla"):
        assert not is_ours(jax.jit(function).lower(*operands))


def test_use_is_part_of_the_cache_key(implementation):
    function = jax.jit(lambda x: jax_gpuops.softmax(x))
    x = jnp.ones((2, 3))
    for _ in range(2):
        with jax_gpuops.use(implementation):
            assert is_ours(function.lower(x))
            function(x)
        with jax_gpuops.use("xla"):
            assert not is_ours(function.lower(x))
            function(x)
    assert function._cache_size() == 2


def test_an_argument_goes_before_use(implementation):
    x = jnp.ones((2, 3))
    with jax_gpuops.use(implementation):
        lowered = jax.jit(lambda x: jax_gpuops.softmax(x, implementation="xla")).lower(x)
    assert not is_ours(lowered)


def test_use_nests_and_ends(implementation):
    def lower():
        return jax.jit(lambda x: jax_gpuops.softmax(x)).lower(jnp.ones((2, 3)))

    with jax_gpuops.use(implementation):
        with jax_gpuops.use("xla"):
            assert not is_ours(lower())
        assert is_ours(lower())
        with pytest.raises(ZeroDivisionError), jax_gpuops.use("xla"):
            _ = 1 / 0
        assert is_ours(lower())


def test_threads_do_not_inherit_use(implementation):
    def lower():
        return is_ours(jax.jit(lambda x: jax_gpuops.softmax(x)).lower(jnp.ones((2, 3))))

    with jax_gpuops.use(implementation), concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert lower()
        with_none = pool.submit(lower).result()
    assert with_none == lower()


def test_use_checks_its_arguments():
    with (
        pytest.raises(ValueError, match="'cuda', 'interpret', 'xla', got 'gpu'"),
        jax_gpuops.use("gpu"),
    ):
        pass
    with (
        pytest.raises(TypeError, match="strict must be True or False, got 'no'"),
        jax_gpuops.use("cuda", strict="no"),
    ):
        pass


# A preference: use(name, strict=False)


@every_op
def test_a_preference_runs_the_kernel_forward_and_backward(op, implementation):
    def gradient(*xs):
        return jax.grad(lambda *xs: (op(*xs) ** 2).sum())(*xs)

    function = gradient if op.differentiable else lambda *xs: op(*xs)
    operands = op.operands()
    with jax_gpuops.use(implementation):
        named = jax.jit(function).lower(*operands).as_text()
    with jax_gpuops.use(implementation, strict=False):
        preferred = jax.jit(function).lower(*operands).as_text()
    assert preferred == named
    assert "jax_gpuops_" in named


@every_op
@pytest.mark.parametrize("name", ["cuda", "interpret"])
def test_a_preference_is_xla_on_platforms_without_the_kernels(op, name, recwarn):
    """Without a warning: what is missing there cannot be installed."""
    _library.warn_once.cache_clear()
    others = {"cuda": ["cpu", "tpu"], "interpret": ["rocm", "tpu"]}[name]
    with jax_gpuops.use(name, strict=False):
        exported = jax.export.export(jax.jit(lambda *xs: op(*xs)), platforms=others)(*op.operands())
    assert "jax_gpuops_" not in exported.mlir_module()
    assert not [each for each in recwarn if "jax_gpuops" in str(each.message)]


CUDA = pytest.mark.skipif(
    _library.missing("cuda") is not None, reason="the module for CUDA is not built"
)


@CUDA
@every_op
def test_a_preference_is_settled_for_each_platform(op, monkeypatch):
    """As `jax.export` needs it, for a GPU from a machine without one, too."""
    monkeypatch.setattr(_library, "gpu_problem", lambda: None)
    with jax_gpuops.use("cuda", strict=False):
        traced = jax.jit(lambda *xs: op(*xs)).trace(*op.operands())
    for platform, expected in (("cuda", True), ("cpu", False), ("tpu", False)):
        assert is_ours(traced.lower(lowering_platforms=(platform,))) == expected


def test_a_preference_is_part_of_the_cache_key(implementation):
    function = jax.jit(lambda x: jax_gpuops.sum(x, -1))
    for _ in range(2):
        for strict in (True, False):
            with jax_gpuops.use(implementation, strict=strict):
                function(jnp.ones((2, 3)))
    assert function._cache_size() == 2


@pytest.mark.parametrize("name", [None, "xla"])
def test_none_and_xla_refuse_nothing_strict_or_not(name):
    function = jax.jit(lambda x: jax_gpuops.softmax(x))
    x = jnp.ones((2, 3))
    with jax_gpuops.use(name):
        function(x)
    with jax_gpuops.use(name, strict=False):
        function(x)
    assert function._cache_size() == 1


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # JAX, of -inf to int32
def test_what_no_kernel_takes_is_xla_under_a_preference(implementation):
    def function(x):
        return jax_gpuops.softmax(x.astype(int)) + jax_gpuops.softmax(x)

    x = jnp.ones((2, 3))
    with jax_gpuops.use(implementation), pytest.raises(TypeError, match="dtype int32"):
        jax.jit(function).trace(x)
    with jax_gpuops.use(implementation, strict=False):
        assert helpers.custom_calls(function, x) == ["jax_gpuops_softmax_v1"]


def test_what_a_plan_refuses_is_xla_under_a_preference(implementation):
    x = jax.ShapeDtypeStruct((2**32, 2**32), "float32")
    with jax_gpuops.use(implementation, strict=False):
        plan = jax_gpuops.plan("softmax", x.shape, x.dtype)
        assert not is_ours(jax.jit(lambda x: jax_gpuops.softmax(x)).lower(x))
    assert plan.implementation == "xla"
    assert "has too many elements" in plan.reason


def test_a_named_algorithm_is_no_preference(implementation):
    x = jnp.ones((2, 4000))
    platform = {"interpret": "cuda", "cuda": "cpu"}[implementation]
    with jax_gpuops.use(implementation, strict=False):
        with pytest.raises(ValueError, match="cannot hold rows"):
            jax_gpuops.softmax(x, algorithm="warp")
        with pytest.raises(TypeError, match=f'implementation="{implementation}" cannot run this'):
            jax_gpuops.softmax(x.astype(int), algorithm="block")
        traced = jax.jit(lambda x: jax_gpuops.softmax(x, algorithm="block")).trace(x)
        with pytest.raises(ValueError, match=r"is lowered for .*; leave algorithm='block' out$"):
            traced.lower(lowering_platforms=(platform,))


def test_the_derivatives_of_a_named_algorithm_are_preferred(implementation):
    def function(x):
        return jax.grad(lambda x: (jax_gpuops.softmax(x, algorithm="block") ** 2).sum())(x)

    with jax_gpuops.use(implementation, strict=False):
        forward, backward = jax_gpuops.explain(function, jnp.ones((2, 40))).calls
    assert forward.plan.reason.startswith("named by the caller")
    assert backward.plan.reason.startswith("preferred by the caller")


def test_an_argument_goes_before_a_preference(implementation):
    with jax_gpuops.use(implementation, strict=False), pytest.raises(TypeError, match="int32"):
        jax_gpuops.softmax(jnp.ones(3, int), implementation=implementation)


@pytest.mark.parametrize("missing", [False, True])
def test_a_preference_that_cannot_be_met_is_one_warning(missing, implementation, monkeypatch):
    """What stands in the way can be removed: a module to build, a driver to update."""
    why = "it was never built" if missing else "the driver is too old; update it"
    if missing or implementation == "interpret":
        monkeypatch.setattr(_library, "_MODULES", {"cuda": why, "interpret": why})
    monkeypatch.setattr(_library, "gpu_problem", lambda: why)
    _library.warn_once.cache_clear()
    x = jnp.ones((2, 3))
    with jax_gpuops.use(implementation, strict=False):
        with pytest.warns(UserWarning, match=f"jax_gpuops uses XLA: {why}") as warned:
            y = jax.jit(lambda x: jax_gpuops.softmax(jax_gpuops.softmax(2 * x)))(x)
        assert len(warned) == 1
        with pytest.raises(
            ValueError, match=f"{why}|no compiled module of jax_gpuops is installed"
        ):
            jax_gpuops.softmax(x, algorithm="warp")
    assert_close(y, jnp.full((2, 3), 1 / 3))


@pytest.mark.parametrize("function", [jax_gpuops.softmax, jax_gpuops.sum], ids=["softmax", "sum"])
def test_a_preference_with_symbolic_shapes(function, implementation):
    """As with a name, the algorithm is chosen when the exported program runs."""
    x = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("b"), 64), "float32")
    with jax_gpuops.use(implementation, strict=False):
        exported = jax.export.export(
            jax.jit(lambda x: function(x, -1)),
            platforms=[{"interpret": "cpu", "cuda": "cuda"}[implementation]],
            disabled_checks=jax_gpuops.EXPORT_CHECKS,
        )(x)
        (call,) = jax_gpuops.explain(lambda x: function(x, -1), x).calls
    assert "jax_gpuops_" in exported.mlir_module()
    assert (call.operands, call.plan.algorithm) == (("f32[b,64]",), None)
    assert "the algorithm is chosen at run time" in call.plan.reason
    x = jnp.asarray(helpers.normal((5, 64), "float32"))
    assert_close(exported.call(x), function(x, -1))


@pytest.mark.skipif(len(jax.devices()) < 4, reason="there are fewer than four devices")
@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_a_model_over_several_devices_under_a_preference(explicit, implementation):
    """Kernels that XLA may partition run, the others are XLA, and the values are right."""
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    host, weights = helpers.normal((8, 6), "float32"), helpers.normal((6, 5), "float32")

    def model(functions, x, weights):
        def loss(x):
            logits = functions.matmul(x, weights, precision="highest")
            y = functions.softmax(logits, -1) * functions.transpose(logits).T
            return (functions.sum(y, -1) ** 2).sum() + functions.sum(y, 0)[0]

        return jax.value_and_grad(loss)(x)

    class Upstream:
        matmul, softmax, transpose, sum = jnp.matmul, jax.nn.softmax, jnp.transpose, jnp.sum

    expected = jax.jit(functools.partial(model, Upstream))(host, weights)
    x = jax.device_put(host, sharding)
    function = jax.jit(functools.partial(model, jax_gpuops))
    with jax.set_mesh(mesh):
        with jax_gpuops.use(implementation), pytest.raises(ValueError, match="shard_map"):
            function.lower(x, weights)
        with jax_gpuops.use(implementation, strict=False):
            text = function.lower(x, weights).as_text()
            assert_close(function(x, weights), expected)
    targets = set(re.findall(r"@jax_gpuops_(\w+)_v1", text))
    assert targets == {"softmax", "softmax_tangent", "sum"}


# Import


def run_python(code: str, *arguments) -> str:
    """Runs a program in a fresh interpreter and returns what it prints."""
    process = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_import_touches_no_backend():
    """Programs configure JAX after their imports; a GPU taken at import is a GPU taken in vain."""
    run_python("""
import jax
import jax_gpuops
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
jax_gpuops.algorithms("softmax")
assert not xla_bridge.backends_are_initialized()
""")


@pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""),
    reason="AddressSanitizer doubles the time of an import",
)
def test_import_is_fast(tmp_path):
    """At most 0.1 s beyond that of jax; the least of several runs, as other programs only add.

    The first run compiles the sources, as pip does when it installs them.
    """
    code = """
import sys, time
import jax, jax.numpy, jax.export, jax.ffi
sys.pycache_prefix, sys.dont_write_bytecode = sys.argv[1], False
start = time.process_time()
import jax_gpuops
print(time.process_time() - start)
"""
    assert min(float(run_python(code, tmp_path)) for _ in range(4)) <= 0.1


# Arguments


def public_ops() -> list[str]:
    return [
        name
        for name, value in vars(jax_gpuops).items()
        if inspect.isfunction(value)
        and {"implementation", "algorithm"} <= inspect.signature(value).parameters.keys()
    ]


@pytest.mark.parametrize("op", [op for op in OPS if op.drop_in], ids=name_of)
def test_signature_is_upstreams_and_ours_comes_after(op):
    ours = list(inspect.signature(getattr(jax_gpuops, op.name)).parameters.values())
    theirs = list(inspect.signature(op.upstream).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [
        (p.name, p.default) for p in theirs
    ]
    extra = ours[len(theirs) :]
    assert [p.name for p in extra][-2:] == ["implementation", "algorithm"]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in extra)
    assert all(p.default is None for p in extra[-2:])


@every_op
def test_both_extra_arguments_are_checked_before_anything_runs(op, implementation):
    def trace(**kwargs):
        jax.jit(lambda *xs: op(*xs, **kwargs)).trace(*op.operands())

    with pytest.raises(ValueError, match="must be None or one of 'cuda', 'interpret', 'xla', got"):
        trace(implementation="gpu")
    with pytest.raises(TypeError, match="algorithm must be None or a string, got 3"):
        trace(algorithm=3)
    with pytest.raises(ValueError, match="implementation is 'xla'"):
        trace(implementation="xla", algorithm="naive")
    with pytest.raises(ValueError, match="algorithm 'fast' is unknown; known are"):
        trace(implementation=implementation, algorithm="fast")
    with pytest.raises(ValueError, match="algorithm 'fast' is unknown; known are"):
        trace(algorithm="fast")


@every_op
def test_operands_must_be_arrays(op, implementation):
    for wrong in ([1.0, 2.0], "text", None, object()):
        for kwargs in ({}, {"implementation": implementation}):
            with pytest.raises(TypeError, match=r"must be (a number or )?an array, got"):
                op(wrong, *op.operands()[1:], **kwargs)


@every_op
@pytest.mark.parametrize("dtype", ["object", "U1", "datetime64[D]", "longdouble"])
def test_operands_must_be_of_a_dtype_that_jax_has(op, dtype):
    first, *others = op.operands()
    wrong = np.zeros(np.shape(first), dtype)
    what = re.escape(f"an array of a dtype that JAX has, got dtype {wrong.dtype}")
    with pytest.raises(TypeError, match=rf"^\w+ must be .*{what}$"):
        op(wrong, *others)


BAD_CALLS = [
    ("softmax", ((2, 3),), {"axis": 2}, ValueError, "axis 2 is out of bounds"),
    ("softmax", ((),), {}, ValueError, "axis -1 is out of bounds"),
    ("softmax", ((2, 3),), {"axis": 0.5}, TypeError, "axis must be an int"),
    ("softmax", ((2, 4000),), {"algorithm": "warp"}, ValueError, "cannot hold rows"),
    ("log_softmax", ((2, 3),), {"algorithm": "baseline"}, ValueError, "computes softmax only"),
    ("logsumexp", ((2, 3),), {"axis": (0, 0)}, ValueError, "names a dimension twice"),
    ("softmax", ((2, 3),), {"axis": 0, "causal": True}, ValueError, "at least two dims"),
    ("transpose", ((2, 3),), {"axes": (0,)}, ValueError, "each of the 2 dimensions"),
    ("transpose", ((2, 3),), {"axes": (0, 2)}, ValueError, "axis 2 is out of bounds"),
    ("transpose", ((2, 3),), {"axes": 1}, TypeError, "axes must be a sequence of ints"),
]


@pytest.mark.parametrize(("name", "shapes", "kwargs", "error", "text"), BAD_CALLS)
def test_bad_calls_raise_before_anything_runs(name, shapes, kwargs, error, text, implementation):
    operands = [jnp.zeros(shape) for shape in shapes]
    function = getattr(jax_gpuops, name)
    with pytest.raises(error, match=text):
        jax.jit(lambda *xs: function(*xs, **kwargs, implementation=implementation)).trace(*operands)


BAD_DTYPES = [("softmax", "int32"), ("log_softmax", "int32"), ("logsumexp", "complex64")]
BAD_DTYPES += [("transpose", "int4")]


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # JAX, of -inf to int32
@pytest.mark.parametrize(("name", "dtype"), BAD_DTYPES)
def test_a_dtype_without_kernels_raises_only_where_one_is_named(name, dtype, implementation):
    x = jnp.ones((2, 3)).astype(dtype)
    function = getattr(jax_gpuops, name)
    jax.jit(function).trace(x)
    with pytest.raises(TypeError, match=f"kernels do not support dtype {dtype}"):
        jax.jit(lambda x: function(x, implementation=implementation)).trace(x)


@every_op
def test_cuda_needs_a_gpu(op):
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match='implementation="cuda"'):
        op(*op.operands(), implementation="cuda")


@every_op
def test_without_arguments_every_platform_works(op):
    operands = op.operands()
    assert_close(op(*operands), op.reference(*operands))
    exported = jax.export.export(
        jax.jit(lambda *xs: op(*xs)), platforms=["cpu", "tpu", "rocm"], disabled_checks=[]
    )(*operands)
    assert "jax_gpuops_" not in exported.mlir_module()


@every_op
def test_interpret_runs_on_cpu_only(op):
    """What depends on the platform shows when the computation is lowered for it."""
    function = jax.jit(lambda *xs: op(*xs, implementation="interpret"))
    with pytest.raises(
        ValueError, match=f'^{op.name}: implementation="interpret" runs on platform'
    ):
        jax.export.export(function, platforms=["cuda"], disabled_checks=jax_gpuops.EXPORT_CHECKS)(
            *op.operands()
        )


@pytest.mark.parametrize("transformation", ["grad", "scan", "checkpoint", "scope"])
def test_errors_of_the_lowering_name_the_function_that_was_called(transformation):
    """Not the kernel, which may be that of a derivative or serve several functions."""

    def loss(x):
        return jax_gpuops.std(x, -1, implementation="interpret").sum()

    def transformed(x):
        if transformation == "scan":
            return jax.lax.scan(lambda total, _: (total + loss(x), None), 0.0, None, 2)[0]
        if transformation == "checkpoint":
            return jax.grad(jax.checkpoint(loss))(x)
        if transformation == "scope":
            with jax.named_scope("softmax"):
                return loss(x)
        return jax.grad(loss)(x)

    traced = jax.jit(transformed).trace(jnp.ones((2, 3)))
    with pytest.raises(ValueError, match=r"^std: implementation=.* runs on platform cpu"):
        traced.lower(lowering_platforms=("tpu",))


def test_errors_of_the_lowering_name_a_loss_and_not_its_products():
    x, w, labels = jnp.ones((4, 6)), jnp.ones((6, 5)), jnp.zeros(4, int)
    for rows in (2, 4):
        function = functools.partial(
            jax_gpuops.linear_cross_entropy, rows_per_chunk=rows, implementation="interpret"
        )
        for each in (function, jax.grad(function)):
            traced = jax.jit(each).trace(x, w, labels)
            with pytest.raises(ValueError, match=r"^linear_cross_entropy: implementation="):
                traced.lower(lowering_platforms=("tpu",))


def test_every_public_op_is_in_the_table():
    assert set(public_ops()) <= {op.name for op in OPS}
