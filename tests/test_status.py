"""What the library says of itself: the status report, plans, algorithms, measurements."""

import functools
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest

import jax_gpuops
from jax_gpuops import _library, _measurements, _plan, _primitive

FAMILIES = ("softmax", "reduce", "transpose", "matmul")


def test_the_report_is_a_command():
    outcome = subprocess.run(
        [sys.executable, "-m", "jax_gpuops"], capture_output=True, text=True, check=True
    )
    for expected in (jax_gpuops.__version__, jax.__version__, "interpret", *FAMILIES):
        assert expected in outcome.stdout


@pytest.mark.parametrize("implementation", ["cuda", "interpret"])
def test_what_is_missing_comes_with_a_fix(implementation, monkeypatch):
    broken = {**_library._MODULES, implementation: "it was never built"}
    monkeypatch.setattr(_library, "_MODULES", broken)
    monkeypatch.setattr(_library, "gpu_problem", lambda: "it was never built")
    report = jax_gpuops.status()
    assert f"{implementation:<10}  missing: it was never built" in report
    assert "fix: pip install" in report
    with pytest.raises(ValueError, match="is not available: it was never built"):
        _library.module(implementation)


def test_a_module_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(_library, "__version__", "9.9.9")
    why = _library._load("interpret")
    assert isinstance(why, str)
    assert "was built from jax_gpuops 0.1.0, but this is jax_gpuops 9.9.9" in why


def test_a_gpu_that_cannot_run_the_kernels_means_xla_and_one_warning(monkeypatch):
    monkeypatch.setattr(_library, "gpu_problem", lambda: "the driver is too old; update it")
    _library.warn_once.cache_clear()
    with warnings.catch_warnings(action="error"):  # of a plan nothing runs
        plan = jax_gpuops.plan("softmax", (4, 8), "float32", platform="cuda")
        calls = jax_gpuops.explain(jax_gpuops.softmax, jnp.ones(3), platform="cuda").calls
    for each in (plan, calls[0].plan):
        assert (each.implementation, each.reason) == ("xla", "the driver is too old; update it")
    with pytest.warns(UserWarning, match="uses XLA: the driver is too old; update it"):
        jax.export.export(jax.jit(jax_gpuops.softmax), platforms=["cuda"])(jnp.ones(3))
    if _library.missing("cuda") is None:
        with pytest.raises(ValueError, match="the driver is too old"):
            jax_gpuops.plan("softmax", (4, 8), "float32", platform="cuda", implementation="cuda")


@pytest.mark.parametrize("family", FAMILIES)
def test_algorithms_describe_themselves(family):
    algorithms = jax_gpuops.algorithms(family)
    assert len({a.name for a in algorithms}) == len(algorithms) > 1
    for algorithm in algorithms:
        assert algorithm.summary.endswith(".")
        assert algorithm.source
        assert algorithm.limits


def test_a_plan_says_why(implementation):
    plan = jax_gpuops.plan("softmax", (8, 100), "float32", implementation=implementation)
    assert (plan.implementation, plan.algorithm) == (implementation, "warp")
    assert "named by the caller; rows of 100 float32 elements fit" in plan.reason
    plan = jax_gpuops.plan("softmax", (8, 100), "float32", platform="cpu")
    assert (plan.implementation, plan.algorithm) == ("xla", None)
    plan = jax_gpuops.plan("softmax", (8, 100), "int32")
    assert plan.implementation == "xla"
    with pytest.raises(ValueError, match=r"op must be one of .*softmax.*, got 'sofmax'; explain"):
        jax_gpuops.plan("sofmax", (8, 100), "float32")


def test_a_plan_of_a_masked_call(implementation):
    """A mask is told by its shape, as the operand is."""
    plan = functools.partial(
        jax_gpuops.plan,
        "softmax",
        (8, 16, 100, 100),
        "bfloat16",
        where=jax.ShapeDtypeStruct((100, 100), "bool"),
        causal=True,
        scale=0.125,
        implementation=implementation,
    )
    assert plan().implementation == implementation
    with pytest.raises(ValueError, match="'baseline' does not support a mask"):
        plan(algorithm="baseline")
    with pytest.raises(ValueError, match="where must be None or a boolean array"):
        plan(where=jax.ShapeDtypeStruct((100, 100), "int8"))


def test_a_plan_is_for_the_platform_of_the_named_implementation(implementation, monkeypatch):
    other = {"interpret": "gpu", "cuda": "cpu"}[implementation]
    monkeypatch.setattr(jax, "default_backend", lambda: other)
    plan = jax_gpuops.plan("softmax", (8, 100), "float32", implementation=implementation)
    assert plan.implementation == implementation


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("limit", "other_size", "options"),
    [
        ("no mask", 8, {"where": jax.ShapeDtypeStruct((8, 1), bool)}),
        ("causal", 64, {"causal": True}),
        ("scale", 8, {"scale": 0.5}),
        ("the last axis", 8, {"axis": 0}),
        ("an axis that is not the last", 8, {"axis": 1}),
    ],
)
def test_limits_of_the_softmax_algorithms_are_those_of_their_plans(
    limit, other_size, options, implementation
):
    long = {"split_pipelined": 20000, "strip": 300}
    for algorithm in jax_gpuops.algorithms("softmax"):
        if algorithm.name in ("elementwise", "flat"):
            continue
        columns, is_on_last_axis = long.get(algorithm.name, 64), options.get("axis") != 0
        shape = (other_size, columns) if is_on_last_axis else (columns, other_size)
        how = {"implementation": implementation, "algorithm": algorithm.name}
        try:
            jax_gpuops.plan("softmax", shape, "float32", **how, **options)
            refused = False
        except ValueError:
            refused = True
        is_column = algorithm.name in ("column", "column_two_pass", "column_split", "strip")
        expected = limit in algorithm.limits or (is_on_last_axis and is_column)
        assert refused == expected, algorithm


def test_none_leaves_programs_over_several_devices_to_xla(monkeypatch):
    """Its rows may be sharded, which XLA reduces in place, and our call collects."""
    monkeypatch.setattr(_library, "gpu_problem", lambda: None)
    monkeypatch.setattr(_measurements, "best", lambda *_: ("cuda", "measured"))
    x = jnp.ones((2, 3))
    for op in (jax_gpuops.softmax, jax_gpuops.logsumexp, jax_gpuops.sum):
        ((p, avals, params),) = _plan._calls(jax.make_jaxpr(op)(x).jaxpr)
        params = {k: v for k, v in params.items() if k not in ("implementation", "algorithm")}
        for partitioned, expected in ((False, "cuda"), (True, "xla")):
            site = _primitive.Site(_primitive.KERNELS[p], "cuda", avals, params, partitioned)
            assert _primitive.choose(site, None, None)[0] == expected


def test_measured_classes_decide_for_none(monkeypatch):
    kind = "NVIDIA Test GPU"
    classes = [
        {"op": "a", "columns": [8, 64], "inner": [2, 8, 2], "shape": [[1, 4], 2], "ratio": 1.05}
    ]
    monkeypatch.setattr(_measurements, "gpu_kind", lambda: kind)
    monkeypatch.setattr(_measurements, "table", lambda: {kind: _measurements.Classes(classes)})
    inside = {"op": "a", "columns": 8, "inner": 6, "shape": (4, 2), "more": 1}
    assert _measurements.best(inside)[0] == "cuda"
    assert "at least 1.05 x the speed of XLA" in _measurements.best(inside)[1]
    shapes = [{"shape": shape} for shape in ((5, 2), (4, 2, 1))]
    for change in ({"op": "b"}, {"columns": 65}, {"inner": 5}, {"inner": 10}, *shapes):
        assert _measurements.best({**inside, **change})[0] == "xla"


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (((4, 8), "float32", "bogus"), ValueError, "platform must be one of cpu, cuda, gpu"),
        ((4, "float32"), TypeError, "shape must be a sequence of ints"),
        (((-4, 8), "float32"), ValueError, "no negative sizes"),
        (([(4, 8), (4, 8)], "float32"), TypeError, r"softmax takes at most 1 operand\(s\), got 2"),
    ],
)
def test_plans_of_bad_calls(arguments, error, text):
    shape, dtype, *platform = arguments
    with pytest.raises(error, match=text):
        jax_gpuops.plan("softmax", shape, dtype, platform=platform[0] if platform else None)


def test_a_plan_for_more_rows_side_by_side_than_an_int_counts(implementation):
    plan = jax_gpuops.plan(
        "softmax", (2, 2**31 + 2), "float32", axis=0, implementation=implementation
    )
    assert plan.algorithm == "column"


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "algorithm"),
    [
        ((1000, 256, 64), "float32", {}, "column"),  # a block's registers hold it
        ((1000, 257, 64), "float32", {}, "strip"),
        ((10, 257, 64), "float32", {}, "column"),  # narrow tiles of a small array
        ((8, 8192, 128), "bfloat16", {}, "strip"),
        ((8, 8193, 128), "bfloat16", {}, "column_split"),
        ((1000, 8193, 128), "bfloat16", {}, "column_two_pass"),
        ((1000, 300, 48), "float32", {}, "strip"),
        ((1000, 300, 44), "float32", {}, "column"),  # less than three quarters of a strip
        ((1000, 300, 66), "float32", {}, "column"),  # no multiple of 16 bytes
        ((1000, 300, 64), "float32", {"where": jax.ShapeDtypeStruct((300, 1), bool)}, "column"),
    ],
)
@pytest.mark.skipif(_library.missing("cuda") is not None, reason="its plans are built with it")
def test_plans_of_an_axis_that_blocks_hold_in_strips(shape, dtype, options, algorithm):
    how = {"implementation": "cuda", "platform": "cuda"}
    plan = jax_gpuops.plan("softmax", shape, dtype, axis=1, **options, **how)
    assert plan.algorithm == algorithm


@pytest.mark.parametrize("op", ["softmax", "sum", "transpose"])
def test_arrays_beyond_counting_are_refused(op, implementation):
    with pytest.raises(ValueError, match=r"an array of shape \(.*\) has too many elements"):
        jax_gpuops.plan(op, (2**32, 2**32), "float32", implementation=implementation)


@pytest.mark.parametrize("op", ["softmax", "sum", "argmax", "transpose"])
def test_an_algorithm_is_never_ignored(op, implementation):
    """Not even where there is nothing to compute."""
    for shape in ((0, 3), (2, 3)):
        with pytest.raises(ValueError, match="'nonsense' is unknown; known are"):
            getattr(jax_gpuops, op)(
                jnp.ones(shape), implementation=implementation, algorithm="nonsense"
            )


def test_an_unknown_family_is_named():
    with pytest.raises(ValueError, match=r"no op family 'sum'; there are: .*reduce"):
        jax_gpuops.algorithms("sum")
    with pytest.raises(ValueError, match=r"no op family '\['softmax'\]'; there are: .*reduce"):
        jax_gpuops.algorithms(["softmax"])
    with pytest.raises(ValueError, match=r"no op family 'None'; there are: .*reduce"):
        jax_gpuops.algorithms(None)
