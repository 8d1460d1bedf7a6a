"""`explain`, the log, and the calls that both tell of."""

import functools
import logging
import re
import subprocess
import sys

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_transforms import OPS, name_of

import jax_gpuops
from jax_gpuops import _library, _measurements, _primitive
from jax_gpuops.flax import attention_fn

# JAX's, of softmax of integers: of -inf as an int32.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast")

PLATFORM = {"interpret": "cpu", "cuda": "cuda"}
X = helpers.normal((8, 16), "float32")


def ran(explanation) -> list[tuple[str, str, int]]:
    return [(each.op, each.plan.implementation, each.count) for each in explanation.calls]


def instructions(function, *arguments) -> set[str]:
    """The names of the instructions that call our kernels, without "gpuops_"."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    return set(re.findall(r"%gpuops_(\w+)(?:\.\d+)? = [^=]*custom-call\(", text))


# What is found


def scanned(f):
    return lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=3)[0]


def looped(f):
    return lambda x: jax.lax.while_loop(lambda x: f(x).sum() < 0, f, x)


def sharded(f):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    return lambda x: jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(x)


TRANSFORMATIONS = {
    "none": lambda f: f,
    "jit": lambda f: jax.jit(jax.jit(f)),
    "scan": scanned,
    "while": looped,
    "cond": lambda f: lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x, f, x),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
    "remat": jax.checkpoint,
    "shard_map": sharded,
    "grad": lambda f: jax.grad(lambda x: (f(x) ** 2).sum()),
    "grad of remat": lambda f: jax.grad(lambda x: (jax.checkpoint(f)(x) ** 2).sum()),
    "grad of scan": lambda f: jax.grad(lambda x: (scanned(f)(x) ** 2).sum()),
    "second derivative": lambda f: jax.grad(lambda x: (jax.grad(lambda x: f(x)[0, 0])(x)).max()),
}


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_the_kernels_of_a_program_are_those_that_it_is_compiled_to(transformation, implementation):
    def f(x):
        y = jax_gpuops.softmax(x, implementation=implementation)
        return jax_gpuops.log_softmax(y, implementation=implementation)

    function = TRANSFORMATIONS[transformation](f)
    calls = jax_gpuops.explain(function, X).calls
    kernels = {each.op for each in calls if each.plan.implementation == implementation}
    assert kernels == instructions(function, X) != set()


@pytest.mark.parametrize("op", [op for op in OPS if op.differentiable], ids=name_of)
def test_every_op_and_its_gradient(op, implementation):
    def gradient(*xs):
        return jax.grad(lambda *xs: (op(*xs, implementation=implementation) ** 2).sum())(*xs)

    calls = jax_gpuops.explain(gradient, *op.operands()).calls
    assert {each.op for each in calls} == instructions(gradient, *op.operands()) != set()
    assert {each.plan.implementation for each in calls} == {implementation}
    assert all(each.plan.algorithm for each in calls)


def test_calls_that_are_alike_are_counted():
    """Also the second time, when JAX has cached every trace inside."""

    def f(x, n):
        return sum(jax_gpuops.softmax(x) for _ in range(2)) + jax_gpuops.softmax(n).sum()

    for _ in range(2):
        with jax_gpuops.use("xla"):
            assert ran(jax_gpuops.explain(f, X, np.ones((2, 3), int))) == [
                ("softmax", "xla", 2),
                ("softmax", "xla", 1),
            ]


def test_calls_that_nothing_uses_are_left_out():
    def f(x):
        jax_gpuops.softmax(x, implementation="xla")
        jax_gpuops.sum(x)
        return jax_gpuops.max(x)

    assert [each.op for each in jax_gpuops.explain(f, X).calls] == ["max"]


def test_layers_of_flax(implementation):
    with jax_gpuops.use(implementation, strict=False):
        model = linen.Dense(3, dot_general=jax_gpuops.dot_general)
        parameters = model.init(jax.random.key(0), X)
        layer = nnx.Linear(16, 3, rngs=nnx.Rngs(0), dot_general=jax_gpuops.dot_general)
        for explanation in (
            jax_gpuops.explain(model.apply, parameters, X),
            jax_gpuops.explain(layer, X),
        ):
            assert ran(explanation) == [("gemm", implementation, 1)]


@pytest.mark.parametrize("transformation", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_the_gradient_of_a_model_of_flax(transformation, implementation):
    attention = nnx.MultiHeadAttention(
        num_heads=2, in_features=16, attention_fn=attention_fn, decode=False, rngs=nnx.Rngs(0)
    )
    gradient = transformation(nnx.grad(lambda model, x: (model(x) ** 2).sum()))
    with jax_gpuops.use(implementation, strict=False):
        calls = jax_gpuops.explain(gradient, attention, X[None]).calls
    assert sum(each.count for each in calls if each.op == "gemm") == 6
    assert {each.op for each in calls} == {"gemm", "softmax", "softmax_tangent"}
    assert {each.plan.implementation for each in calls} == {implementation}


def test_arguments_may_be_types_keywords_and_static(implementation):
    @functools.partial(jax.jit, static_argnames=("axis", "name"))
    def f(x, *, axis, name):
        return getattr(jax_gpuops, name)(x["x"], axis)

    x = {"x": jax.ShapeDtypeStruct((4, 6), "bfloat16")}
    with jax_gpuops.use(implementation):
        (call,) = jax_gpuops.explain(f, x, axis=0, name="softmax").calls
    assert (call.operands, call.plan.implementation) == (("bf16[4,6]",), implementation)


def test_nothing_runs_and_no_program_is_changed(implementation):
    def f(x):
        jax.debug.callback(lambda: pytest.fail("it ran"))
        return jax_gpuops.softmax(x.astype(int)) + jax_gpuops.softmax(x)

    with jax_gpuops.use(implementation, strict=False):
        before = jax.jit(f).lower(X).as_text()
        jax_gpuops.explain(f, X)
        assert jax.jit(f).lower(X).as_text() == before
        assert "gpuops_mark" not in str(jax.make_jaxpr(f)(X))


# What is said

LEFT_TO_XLA = {
    "dtype": (lambda x: jax_gpuops.softmax(x.astype(int)), "dtype int32, only float16"),
    "cross entropy": (
        lambda x: jax_gpuops.softmax_cross_entropy_with_integer_labels(
            x.astype("float8_e5m2"), jnp.zeros(8, int)
        ),
        "dtype float8_e5m2, only",
    ),
    "argument": (lambda x: jax_gpuops.logsumexp(x, -1, b=x), "do not support b or return_sign"),
    "pair": (
        lambda x: jax_gpuops.logsumexp(x, -1, return_sign=True),
        "do not support b or return_sign",
    ),
    "empty rows": (lambda x: jax_gpuops.softmax(x[:, :0]), "there is nothing to normalize"),
    "no axes": (lambda x: jax_gpuops.sum(x, ()), "there is nothing to reduce"),
    "no logits": (
        lambda x: jax_gpuops.softmax_cross_entropy_with_integer_labels(x[:0], jnp.zeros(0, int)),
        "the logits have no elements",
    ),
    "variance about a mean": (
        lambda x: jax_gpuops.var(x, -1, mean=x[:, :1]),
        "mean is given",
    ),
    "integers": (
        lambda x: jax_gpuops.mean_and_var(x.astype(int), -1),
        "dtype int32, only float16",
    ),
    "complex sum": (lambda x: jax_gpuops.mean(x + 1j), "dtype complex64, only"),
    "int4": (
        lambda x: jax_gpuops.transpose(x.astype("int4")).astype(x.dtype),
        "dtype int4, only",
    ),
    "product": (
        lambda x: jax_gpuops.matmul(x, x.T, precision="TF32_TF32_F32_X3"),
        "multiply float32 with precision F32_F32_F32, not",
    ),
    "gemm": (lambda x: jax_gpuops.gemm(x + 1j, x.T), "require two operands of the same dtype"),
    "alpha": (lambda x: jax_gpuops.gemm(x, x.T, alpha=0.0), "alpha is 0"),
    "xla": (lambda x: jax_gpuops.max(x, implementation="xla"), "named by the caller"),
}


@pytest.mark.parametrize("case", LEFT_TO_XLA)
@pytest.mark.parametrize("transformation", ["none", "vmap", "grad"])
def test_what_xla_takes_when_it_is_traced_comes_with_the_reason(
    case, transformation, implementation
):
    function, reason = LEFT_TO_XLA[case]

    def loss(x):
        leaves = jax.tree.leaves(function(x))
        return sum(jnp.sum(jnp.abs(leaf)).astype(jnp.float32) for leaf in leaves)

    transformed = {
        "none": function,
        "vmap": lambda x: jax.vmap(function)(x[None]),
        "grad": jax.value_and_grad(loss),
    }[transformation]
    with jax_gpuops.use(implementation, strict=False):
        (call,) = jax_gpuops.explain(transformed, X).calls
    assert (call.plan.implementation, call.plan.algorithm, call.count) == ("xla", None, 1)
    assert reason in call.plan.reason


def test_a_product_without_measurements_is_upstreams(monkeypatch):
    monkeypatch.setattr(_measurements, "may_hold", lambda op, known: False)
    (call,) = jax_gpuops.explain(jax_gpuops.matmul, X, X.T).calls
    assert (call.op, call.operands) == ("matmul", ("f32[8,16]", "f32[16,8]"))
    assert call.plan.reason == "no measurement shows a kernel to be as fast as XLA"
    assert call.plan.second_best == "a kernel"


def test_a_derivative_without_kernel(implementation):
    def tangent(x):
        return jax.jvp(functools.partial(jax_gpuops.log_softmax), (x,), (x,))[1]

    with jax_gpuops.use(implementation):
        calls = jax_gpuops.explain(tangent, X).calls
    assert [each.op for each in calls] == ["log_softmax", "log_softmax_tangent"]
    assert calls[1].plan.reason == "no kernel computes this derivative"


def test_an_error_of_the_lowering_is_a_line():
    def f(x):
        return jax_gpuops.sum(jax_gpuops.softmax(x, implementation="interpret"))

    first, second = jax_gpuops.explain(f, X, platform="tpu").calls
    assert first.plan.implementation == "error"
    assert first.plan.reason.startswith(
        'implementation="interpret" runs on platform cpu, but the computation is lowered for tpu'
    )
    assert second.plan.reason == "jax_gpuops has no default kernel for platform tpu"
    assert second.plan.second_best == "none"


def test_an_error_of_the_trace_is_raised():
    with pytest.raises(TypeError, match="dtype int32, only"):
        jax_gpuops.explain(
            lambda x: jax_gpuops.softmax(x, implementation="interpret"), np.ones(3, "int32")
        )
    with pytest.raises(ValueError, match="platform must be one of cpu, cuda, gpu"):
        jax_gpuops.explain(jax_gpuops.softmax, X, platform="bogus")


MEASURED = ("cuda", "measured on NVIDIA Test GPU: at least 1.05 x the speed of XLA")
NOT_MEASURED = ("xla", "no measurement on NVIDIA Test GPU")


@pytest.mark.parametrize(
    ("default", "measured", "implementation", "reason", "second_best"),
    [
        (None, MEASURED, "cuda", MEASURED[1], "xla"),
        (None, NOT_MEASURED, "xla", NOT_MEASURED[1], "cuda: warp"),
        (
            "cuda",
            MEASURED,
            "cuda",
            "named by the caller",
            f"xla (implementation=None runs cuda: {MEASURED[1]})",
        ),
        (
            "cuda",
            NOT_MEASURED,
            "cuda",
            "named",
            f"xla (implementation=None runs xla: {NOT_MEASURED[1]})",
        ),
    ],
)
@pytest.mark.skipif(_library.missing("cuda") is not None, reason="its plans are built with it")
def test_what_was_measured_is_said(
    default, measured, implementation, reason, second_best, monkeypatch
):
    monkeypatch.setattr(_library, "gpu_problem", lambda: None)
    monkeypatch.setattr(_measurements, "best", lambda *_: measured)
    with jax_gpuops.use(default):
        (call,) = jax_gpuops.explain(jax_gpuops.softmax, X, platform="gpu").calls
    assert call.plan.implementation == implementation
    assert call.plan.reason.startswith(reason)
    assert call.plan.second_best == second_best


def test_the_table_has_a_line_for_each_call():
    def f(x):
        return jax_gpuops.softmax(jax_gpuops.softmax(x)).sum() + jax_gpuops.sum(x, -1).max()

    explanation = jax_gpuops.explain(f, X, platform="tpu")
    header, *lines = str(explanation).splitlines()
    assert header.split() == ["calls", "op", "operands", "runs", "why"]
    why = "jax_gpuops has no default kernel for platform tpu | second best: none"
    assert [re.split(r" {2,}", line.strip()) for line in lines] == [
        ["2", "softmax", "f32[8,16]", "xla", why],
        ["1", "sum", "f32[8,16]", "xla", why],
    ]
    columns = [header.index(word) for word in ("op", "operands", "runs", "why")]
    assert all(line[column - 1] == " " != line[column] for line in lines for column in columns)
    assert repr(explanation) == str(explanation)
    assert str(jax_gpuops.explain(jnp.sin, X)) == "no op of jax_gpuops is called"


# Programs over several devices

SEVERAL = pytest.mark.skipif(len(jax.devices()) < 4, reason="there are fewer than four devices")


def everything(x):
    """An op that XLA may partition and one that runs within one device."""
    return jax_gpuops.softmax(x).sum() + jax_gpuops.transpose(x).sum()


def over_mesh(kind, mesh):
    """The function, its argument, and how it is called, over a mesh or not."""
    sharding = NamedSharding(mesh, P("d"))
    struct = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=sharding)

    def mapped(**options):
        inner = jax.shard_map(
            lambda x: everything(x)[None], mesh=mesh, in_specs=P("d"), out_specs=P("d"), **options
        )
        return lambda x: inner(x).sum()

    def nested(x):
        inner = jax.shard_map(
            lambda x: everything(x)[None], in_specs=P("t"), out_specs=P("t"), axis_names={"t"}
        )
        return jax.shard_map(
            lambda x: inner(x).sum()[None],
            mesh=mesh,
            in_specs=P("d"),
            out_specs=P("d"),
            axis_names={"d"},
        )(x).sum()

    return {
        "one device": (everything, X),
        "argument": (everything, jax.device_put(X, sharding)),
        "type": (everything, struct),
        "in_shardings": (jax.jit(everything, in_shardings=sharding), X),
        "constraint": (lambda x: everything(jax.lax.with_sharding_constraint(x, sharding)), X),
        "set_mesh": (everything, X),
        "gradient": (jax.grad(lambda x: everything(x) ** 2), struct),
        "shard_map": (mapped(), X),
        "partial shard_map": (mapped(axis_names={"d"}), X),
        "nested shard_map": (nested, X),
    }[kind]


@SEVERAL
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    "kind",
    [
        *("one device", "argument", "type", "in_shardings", "constraint", "set_mesh", "gradient"),
        *("shard_map", "partial shard_map", "nested shard_map"),
    ],
)
def test_partitioning_is_seen_as_the_lowering_sees_it(kind, axis_type, implementation):
    mesh = jax.make_mesh((2, 2), ("d", "t"), axis_types=(axis_type,) * 2)
    if axis_type == AxisType.Explicit and kind in (
        "constraint",
        "in_shardings",
        "nested shard_map",
    ):
        pytest.skip("there, the sharding is part of the type")
    with jax.set_mesh(mesh if kind == "set_mesh" or axis_type == AxisType.Explicit else None):
        function, x = over_mesh(kind, mesh)
        if axis_type == AxisType.Explicit:
            x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P("d")))
        with jax_gpuops.use(implementation, strict=False):
            calls = jax_gpuops.explain(function, x).calls
            lowered = jax.jit(function).lower(x).as_text()
    kernels = {each.op for each in calls if each.plan.implementation == implementation}
    assert kernels == set(re.findall(r"@jax_gpuops_(\w+)_v1", lowered))
    assert "softmax" in kernels
    is_whole = kind in ("shard_map", "nested shard_map")
    if axis_type == AxisType.Auto:
        is_whole |= kind == "one device"
    assert ("transpose" in kernels) == is_whole
    for each in calls:
        if each.op == "transpose" and not is_whole:
            assert "runs on one device, but the program spans several" in each.plan.reason


# The log


@pytest.fixture
def log(caplog):
    """The messages of the logger."""
    jax.clear_caches()
    with caplog.at_level(logging.INFO, "jax_gpuops"):
        yield lambda: [r.getMessage() for r in caplog.records if r.name == "jax_gpuops"]


def test_each_lowering_of_a_call_is_logged_once(log, implementation):
    function = jax.jit(jax.grad(lambda x: (jax_gpuops.softmax(x) ** 2).sum()))
    with jax_gpuops.use(implementation):
        for _ in range(2):
            function(X)
    platform = PLATFORM[implementation]
    start = f"softmax f32[8,16] lowered for {platform} runs {implementation}: warp. Why: named by"
    assert len(log()) == 2
    assert log()[0].startswith(start)
    assert log()[0].split(". Second best: ")[1].startswith("xla")
    assert log()[1].startswith("softmax_tangent f32[8,16] f32[8,16] lowered for")


def test_each_platform_is_logged(log):
    jax.export.export(jax.jit(lambda x: jax_gpuops.softmax(x)), platforms=["cpu", "tpu", "rocm"])(X)
    platforms = [re.search(r"lowered for (\S+) runs xla\.", message)[1] for message in log()]
    assert sorted(platforms) == ["cpu", "tpu/rocm"]


def test_a_derivative_without_kernel_is_logged(log, implementation):
    with jax_gpuops.use(implementation):
        jax.jit(lambda x: jax.jvp(jax_gpuops.log_softmax, (x,), (x,))).lower(X)
    assert sum("no kernel computes this derivative" in message for message in log()) == 1


@pytest.mark.parametrize("case", ["argument", "cross entropy", "product", "xla"])
def test_what_xla_takes_when_it_is_traced_is_logged_once(case, log):
    function, reason = LEFT_TO_XLA[case]
    jitted = jax.jit(function)
    for _ in range(2):
        jitted.trace(X)
    (message,) = log()
    assert " traced runs xla. Why: " in message
    assert reason in message


def test_explain_does_not_log(log):
    jax_gpuops.explain(lambda x: jax_gpuops.softmax(jax_gpuops.softmax(x).astype(int)), X)
    assert log() == []


def test_nothing_is_planned_for_a_log_that_is_off(implementation, monkeypatch):
    def fail(*_, **__):
        pytest.fail("something was computed for the log")

    monkeypatch.setattr(_primitive, "plan_call", fail)
    jax.clear_caches()
    with jax_gpuops.use(implementation, strict=False):
        jax.jit(lambda x: (jax_gpuops.softmax(x), jax_gpuops.softmax(x.astype(int)))).lower(X)


@pytest.mark.parametrize(
    ("value", "configure", "expected", "warned"),
    [
        ("1", "", 1, False),
        ("1", "logging.basicConfig(level='INFO', format='%(name)s: %(message)s')", 1, False),
        ("0", "", 0, False),
        ("", "", 0, False),
        ("yes", "", 0, True),
    ],
)
def test_the_environment_variable(value, configure, expected, warned, monkeypatch):
    monkeypatch.setenv("JAX_GPUOPS_LOG", value)
    code = f"import logging; {configure}\nimport jax, jax_gpuops\njax_gpuops.sum(jax.numpy.ones(3))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stderr.count("jax_gpuops: sum f32[3] lowered for ") == expected
    warning = f"JAX_GPUOPS_LOG must be 0 or 1, got {value!r}; nothing is logged"
    assert (warning in process.stderr) == warned
