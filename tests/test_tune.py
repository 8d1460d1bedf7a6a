"""The sweep behind `implementation=None`: what it measures, what it keeps, what the table says."""

import collections
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import __main__ as command_line
from bench import grid, measure, policy, run, tune
from bench.grid import Point
from bench.results import FAILED, RIGHT, WRONG
from jax_gpuops import _library, _measurements

GRIDS = grid.grids()
NAMED = "cuda" if run.has_gpu() else "interpret"


# What it measures


@pytest.mark.any_version
@pytest.mark.parametrize("each", GRIDS, ids=lambda each: each.name)
def test_a_vertex_is_a_problem_of_its_size(each):
    """So what is measured is what a class of the grid is asked about."""
    assert each.fixed.keys() | each.axes.keys() <= _measurements.KEYS[each.fixed["op"]] | {"op"}
    whole = {
        name: [sizes[0], grid.MOST if name in each.open else sizes[-1]]
        for name, sizes in each.axes.items()
    }
    for vertex, points in each.vertices.items():
        sizes = dict(zip(each.axes, vertex, strict=True))
        for name in {"columns", "n", "k"} & sizes.keys():  # of one of its points, or between them
            of_points = [point.problem[name] for point in points]
            assert min(of_points) <= sizes[name] <= max(of_points) <= min(of_points) + 4
        for point in points:
            own = {name: point.problem[name] for name in {"columns", "n", "k"} & sizes.keys()}
            if "scale=" in each.name and "aligned to" in each.name:  # fewer rows, of whole matrices
                own["outer"] = math.prod(point.shape[:-1])
                assert 3 / 4 * sizes["outer"] <= own["outer"] <= sizes["outer"]
            of_rows = {name: size for name, size in own.items() if name == "outer"}
            assert _measurements.contains(each.fixed | sizes | own, point.problem), point
            assert _measurements.contains(each.fixed | whole | of_rows, point.problem), point


@pytest.mark.any_version
def test_a_vertex_stands_for_every_alignment_of_its_grid():
    for each in GRIDS:
        aligned = each.fixed.get("aligned")
        for points in each.vertices.values():
            found = {_measurements.traits(point.problem)["aligned"] for point in points}
            assert [min(found), max(found)] == aligned or found == {aligned}, each.name


def test_names_of_grids_differ():
    assert len({each.name for each in GRIDS}) == len(GRIDS)


def test_every_kernel_that_is_not_left_out_has_points():
    kernels = {point.kernel for point in grid.points(GRIDS)}
    assert grid.PRIMITIVES.keys() - kernels == {
        *("logsumexp_with_residuals", "prod", "min", "argmin", "linear_add", "scaled_matmul"),
    }
    assert len({str(point) for point in grid.points(GRIDS)}) == len(grid.points(GRIDS))


def test_masks_scales_and_kinds_of_axes_are_there():
    softmax = [point for point in grid.points(GRIDS) if point.kernel == "softmax"]
    assert {point.mask for point in softmax} == {
        *("", "causal", "padding", "full", "causal padding"),
    }
    assert {point.scale for point in softmax} == {1.0, 0.125}
    assert {len(point.shape) - 1 - point.axes[0] for point in softmax} == {0, 1}
    assert {p.dtype for p in softmax} == {"bfloat16", "float32"}


def test_products_are_of_every_layout_and_precision():
    products = [point for point in grid.points(GRIDS) if point.kernel == "gemm"]
    assert {(p.dtype, p.precision) for p in products} == {
        *(("float32", "highest"), ("float32", "default"), ("bfloat16", "default")),
        ("int8", "default"),
    }
    layouts = {(p.problem["transpose_a"], p.problem["transpose_b"]) for p in products}
    assert layouts == {(0, 0), (0, 1), (1, 0)}
    aligned = {_measurements.traits(p.problem)["aligned"] for p in products}
    assert aligned == {2, 4, 8, 16}
    assert {p.problem["batch"] for p in products} == {1, 16, 64}


def test_layers_have_a_bias_and_an_activation_or_a_gate():
    layers = [point.problem for point in grid.points(GRIDS) if point.kernel in ("linear", "glu")]
    assert {(p["epilogue"], p["has_bias"], p["gated"]) for p in layers} == {
        *((activation, 1, 0) for activation in ("none", "gelu", "gelu_exact", "relu")),
        *(("silu", 0, 1), ("gelu", 0, 1)),
    }


def test_all_of_it_fits_into_25_minutes_on_16_cores():
    """By the estimates of `bench.tune`, if ours is ahead at every point."""
    assert tune.estimate_s(len(grid.points(GRIDS)), cores=16) <= 25 * 60


def test_the_documentation_counts_the_points():
    text = (pathlib.Path(__file__).parents[1] / "docs" / "policy.md").read_text()
    points = grid.points(GRIDS)
    counts = collections.Counter(point.kernel for point in points)
    assert f"| {len(points)} points |" in text
    for kernel in ("softmax", "sum", "transpose", "gemm", "linear"):
        assert f"| {kernel} | {counts[kernel]} |" in text


# How it measures

SMALL = {
    "softmax": Point("softmax", (2, 3, 9, 33), "bfloat16", (3,), "causal padding", 0.125),
    "log_softmax": Point("log_softmax", (5, 33), "float32", (1,)),
    "logsumexp": Point("logsumexp", (3, 33, 8), "bfloat16", (1,)),
    "softmax_tangent": Point("softmax_tangent", (2, 3, 9, 33), "float32", (3,), "full", 0.125),
    "log_softmax_cotangent": Point("log_softmax_cotangent", (5, 33), "bfloat16", (1,)),
    "logsumexp_cotangent": Point("logsumexp_cotangent", (5, 33), "float32", (1,)),
    "cross_entropy": Point("cross_entropy", (5, 33), "float32", (1,)),
    "cross_entropy_cotangent": Point("cross_entropy_cotangent", (5, 33), "bfloat16", (1,)),
    "sum": Point("sum", (5, 33), "bfloat16", (1,), result="float32"),
    "max": Point("max", (3, 33, 8), "float32", (1,), result="float32"),
    "mean": Point("mean", (1, 33), "bfloat16", (1,), result="bfloat16"),
    "argmax": Point("argmax", (5, 33), "float32", (1,), result="int32"),
    "mean_and_var": Point("mean_and_var", (5, 33), "bfloat16", (1,), result="float32"),
    "var": Point("var", (5, 33), "bfloat16", (1,), result="float32"),
    "transpose": Point("transpose", (5, 6, 7), "int8", (0, 2, 1)),
    "gemm": Point("gemm", (5, 33, 7), "bfloat16", (0, 1), result="float32", precision="highest"),
    "linear": Point(
        *("linear", (5, 33, 8), "bfloat16", (1, 0)),
        result="bfloat16",
        precision="default",
        activation="gelu_exact",
    ),
    "glu": Point(
        *("glu", (5, 32, 8), "bfloat16", (1, 0)),
        result="bfloat16",
        precision="default",
        activation="silu",
    ),
}
OTHERS = [
    Point("mean_and_var", (8, 4, 6), "float32", (0, 2), result="float32"),
    Point("mean_and_var", (2, 3, 4, 5), "bfloat16", (1, 3), result="float32"),
    # Variances of single elements, which are 0.
    Point("mean_and_var", (4, 1, 12), "float32", (1,), result="float32"),
    Point("var", (4, 1, 12), "bfloat16", (1,), result="float32"),
    Point("gemm", (3, 5, 16, 7), "float32", (2, 2), result="float32", precision="highest"),
    Point("softmax", (5, 33), "bfloat16", (1,), scale=0.125),
]
"""Other kinds of points of these kernels."""


def test_small_points_are_of_every_kernel():
    assert SMALL.keys() == {point.kernel for point in grid.points(GRIDS)}


@pytest.mark.any_version
@pytest.mark.parametrize("point", [*SMALL.values(), *OTHERS], ids=str)
def test_a_result_is_checked(point):
    """The kernel's is right; with one wrong element, or a NaN, it is not."""
    operands = jax.jit(functools.partial(tune._draw, point))()
    results = jax.jit(functools.partial(tune._alone, point, NAMED))(*operands)
    (y, *others), tree = jax.tree.flatten(results)
    wrong = [np.array(y)]  # of numpy: each operation of jnp would be a program
    last = wrong[0].reshape(-1)[-1:]
    last += (1 + abs(last) // 2).astype(y.dtype)
    if jnp.issubdtype(y.dtype, jnp.inexact):
        wrong.append(np.array(y))
        wrong[1].flat[0] = np.nan
    with jax.enable_x64(True):
        excess = jax.jit(functools.partial(tune._excess, point))
        assert excess(results, *operands) <= 1
        for each in wrong:
            changed = tree.unflatten([each, *others])
            assert not excess(changed, *operands) <= 1


def timing(us):
    return measure.Timing(us, us + 5, 1)


class Clock:
    """Stands in for the measurement: what each program takes, and what was asked for."""

    def __init__(self, alone=(10.0, 20.0), between=(30.0, 40.0), consumed=(50.0, 60.0), before=5.0):
        self.alone, self.between, self.consumed, self.before = alone, between, consumed, before
        self.calls = []

    def __call__(self, calls):
        """Both programs of a point: alone, with a producer and a consumer, or with a consumer."""
        texts = [call.function.as_text() for call in calls]
        self.calls.append(texts)
        has_producer, has_consumer = [f"constant({n})" in texts[0] for n in (2, 3)]
        us = self.alone
        if has_consumer:
            us = self.between if has_producer else self.consumed
        return list(map(timing, [*us, self.before][: len(calls)]))


def swept(points, clock, **more):
    measuring = tune.Sweep(implementation=NAMED, timed=clock, cores=2)
    found = {}
    for batch in measuring.run(points, seconds=1e9, **more):
        found |= batch
    return found


def test_a_point_is_measured_alone_and_between_neighbours():
    clock = Clock()
    point = SMALL["log_softmax"]
    assert swept([point], clock) == {
        point: {
            "status": RIGHT,
            "us": 10.0,
            "xla_us": 20.0,
            "between_us": 30.0,
            "between_xla_us": 40.0,
        }
    }
    for ours, xla in clock.calls:
        assert "jax_gpuops_log_softmax" in ours
        assert "jax_gpuops_" not in xla


def test_what_comes_before_a_kernel_in_place_is_not_of_its_time():
    point = SMALL["cross_entropy_cotangent"]
    clock = Clock(alone=(15.0, 20.0), before=5.0)
    found = swept([point], clock)[point]
    assert (found["us"], found["xla_us"]) == (10.0, 20.0)
    assert (found["between_us"], found["between_xla_us"]) == (30.0, 40.0)
    ours, xla, before = clock.calls[0]
    assert ["constant(2)" in text for text in (ours, xla, before)] == [True, False, True]
    (entry,) = re.findall(r"^ENTRY .*", before, re.MULTILINE)
    *_, result = entry.split("->")
    assert "(" not in result, "copies of other operands are no part of what comes before"


@pytest.mark.parametrize(("kernel", "walled"), [("gemm", True), ("sum", False)])
@pytest.mark.parametrize("between", [(30.0, 30.0), (30.0, 29.0)])
def test_a_product_that_is_behind_between_neighbours_is_measured_with_a_consumer(
    between, kernel, walled
):
    clock = Clock(between=between)
    found = swept([SMALL[kernel]], clock)[SMALL[kernel]]
    if walled and between[1] < between[0]:
        assert (found["consumed_us"], found["consumed_xla_us"]) == (50.0, 60.0)
        assert len(clock.calls) == 3
    else:
        assert "consumed_us" not in found
        assert len(clock.calls) == 2
    assert policy.speeds(kernel, found) == (2.0, between[1] / between[0])


def test_a_product_that_is_behind_with_a_consumer_is_not_ours():
    found = swept([SMALL["gemm"]], Clock(between=(30.0, 29.0), consumed=(50.0, 49.0)))
    assert policy.speeds("gemm", found[SMALL["gemm"]]) is None


@pytest.mark.parametrize("kernel", ["linear", "glu"])
def test_a_product_follows_a_layer_with_an_activation(kernel):
    """As in a feed-forward block, whose next layer has as many columns as this one has terms."""
    point = SMALL[kernel]
    m, k, _ = point.shape
    operands = jax.eval_shape(functools.partial(tune._draw, point))
    for around, has_producer in ((tune._between, True), (tune._consumed, False)):
        program = jax.make_jaxpr(functools.partial(around, point, "xla"))(*operands)
        *_, last = program.eqns
        assert last.primitive.name == "dot_general"
        assert last.outvars[0].aval.shape == (m, k)
        assert any(eqn.primitive.name == "mul" for eqn in program.eqns) == has_producer


def test_a_point_that_is_behind_alone_is_not_measured_between_neighbours():
    clock = Clock(alone=(10.0, 10.4))
    found = swept([SMALL["sum"]], clock)[SMALL["sum"]]
    assert found == {"status": RIGHT, "us": 10.0, "xla_us": 10.4}
    assert len(clock.calls) == 1


def test_a_wrong_result_has_no_speed_and_is_never_ours(monkeypatch):
    bind = tune._bind
    monkeypatch.setattr(
        tune, "_bind", lambda point, how, *xs: bind(point, how, *xs) * (1 + (how == NAMED) / 100)
    )
    point = SMALL["sum"]
    found = swept([point], Clock())[point]
    assert found["status"] == WRONG
    assert "us" not in found
    assert "times what it may be" in found["message"]
    assert policy.speeds("sum", found) is None


def test_a_failure_leaves_the_other_points():
    """No kernel takes rows of this dtype; what is left of a long sweep is worth having."""
    bad = dataclasses.replace(SMALL["log_softmax"], dtype="float8_e4m3fn")
    found = swept([bad, SMALL["transpose"]], Clock())
    assert found[bad]["status"] == FAILED
    assert found[bad]["message"]
    assert found[SMALL["transpose"]]["status"] == RIGHT
    assert policy.speeds("log_softmax", found[bad]) is None


def test_no_batch_begins_after_the_time_is_up(monkeypatch):
    monkeypatch.setattr(
        tune.Sweep, "_batch", lambda self, pool, points: {p: {"status": RIGHT} for p in points}
    )
    points = [dataclasses.replace(SMALL["sum"], shape=(n, 33)) for n in range(1, 40)]
    ticks = iter([0, 10, 20, 31])
    batches = list(
        tune.Sweep(cores=2).run(points, seconds=30, clock=functools.partial(next, ticks))
    )
    assert [len(batch) for batch in batches] == [8, 8]


# What it keeps


def raw_of(device="NVIDIA Test GPU", **points):
    environment = {
        **dict.fromkeys(("driver", "jax", "jaxlib", "commit", "date"), "1"),
        "device": device,
        "uncommitted_changes": False,
    }
    return tune.Raw(environment, points)


def test_raw_results_are_kept_and_not_measured_again(tmp_path):
    raw, path = raw_of(), tmp_path / "tune.json"
    raw.add({SMALL["sum"]: {"status": RIGHT, "us": 1.0, "xla_us": 0.5}})
    raw.save(path)
    assert tune.Raw.load(path) == raw
    assert tune.Raw.load(path).missing([SMALL["max"], SMALL["sum"]]) == [SMALL["max"]]


def test_a_write_that_is_cut_off_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    raw, path = raw_of(), tmp_path / "tune.json"
    raw.save(path)

    def half(self, text):
        with self.open("w") as file:
            file.write(text[: len(text) // 2])
        raise OSError("no space left")

    monkeypatch.setattr(pathlib.Path, "write_text", half)
    with pytest.raises(OSError, match="no space left"):
        raw_of(more={"status": RIGHT}).save(path)
    assert tune.Raw.load(path) == raw


@pytest.mark.parametrize("key", ["device", "driver", "jax", "jaxlib", "commit"])
def test_points_of_another_environment_are_not_comparable(key):
    raw = raw_of()
    assert raw.difference(raw.environment) == ""
    assert raw.difference(raw.environment | {key: "2"}) == f"{key} {raw.environment[key]} and not 2"


# What the table says

SAMPLE = [
    grid._rows("softmax", "bfloat16", (1024, 2048, 8192), (16, 512, 65536, 262144)),
    *grid._odd_rows("softmax", "float32", (33, 1025), (512, 8192)),
    grid._inner("sum", "float32", (128, 1024), (64, 4096), (1, 256), result="float32"),
    grid._permuted("float32", (0, 2, 1), (8, 64), (64, 512), (64, 2048)),
]
STATES = {
    "ours": {"status": RIGHT, "us": 1.0, "xla_us": 1.3, "between_us": 1.0, "between_xla_us": 1.1},
    "level": {"status": RIGHT, "us": 1.0, "xla_us": 1.05, "between_us": 1.0, "between_xla_us": 1.0},
    "behind": {"status": RIGHT, "us": 1.0, "xla_us": 1.04},
    "walled": {"status": RIGHT, "us": 1.0, "xla_us": 3.0, "between_us": 1.0, "between_xla_us": 0.9},
    "consumed": {
        "status": RIGHT,
        "us": 1.0,
        "xla_us": 3.0,
        "between_us": 1.0,
        "between_xla_us": 0.9,
        "consumed_us": 1.0,
        "consumed_xla_us": 1.0,
    },
    "wrong": {"status": WRONG, "message": "the error is 2 times what it may be"},
    "failed": {"status": FAILED, "message": "out of memory"},
    "missing": None,
}
OURS = ("ours", "level", "walled", "consumed")


def is_ours_at(point, state):
    """The rule for one point: of transposes and products it asks for a consumer, too."""
    return state in OURS and not (state == "walled" and point.kernel in ("transpose", "gemm"))


@st.composite
def sweeps(draw):
    """A grid and the state of each of its points; most are ours."""
    each = draw(st.sampled_from(SAMPLE))
    states = st.sampled_from([*OURS * 6, *STATES])
    return each, {point: draw(states) for point in grid.points([each])}


def table_of(each, states):
    raw = {str(p): STATES[state] for p, state in states.items() if STATES[state] is not None}
    return policy.classes([each], raw)


def around(values, size):
    """The values next to a size, or the size; None where there is none."""
    below = max((v for v in values if v <= size), default=None)
    above = min((v for v in values if v >= size), default=None)
    return {below, above}


def is_ours(each, ours, sizes):
    """The rule, in words: all neighbours are ours, or the largest numbers of rows if it is more.

    Sizes without any measured point are no neighbours.
    """
    values = {name: (*v, grid.MOST) if name in each.open else v for name, v in each.axes.items()}
    near = [around(v, sizes[name]) for name, v in values.items()]
    return all(is_ours_or_beyond(each, ours, vertex) for vertex in itertools.product(*near))


def is_ours_or_beyond(each, ours, vertex):
    if vertex in each.vertices:
        return vertex in ours
    if None in vertex:
        return False

    def grows(a, b):  # from a to b
        pairs = list(zip(each.axes, a, b, strict=True))
        return a != b and all(x <= y if name in each.open else x == y for name, x, y in pairs)

    measured = set(itertools.product(*each.axes.values())) & each.vertices.keys()
    fewer = [v for v in measured if grows(v, vertex)]
    largest = [v for v in fewer if not any(grows(v, w) for w in fewer)]
    points = [point for v in largest for point in each.vertices[v]]
    return (
        bool(largest) and all(v in ours for v in largest) and all(map(grid.fills_the_gpu, points))
    )


@pytest.mark.any_version
@pytest.mark.parametrize("state", STATES)
def test_no_class_of_a_grid_has_a_point_that_another_grid_lost(state):
    large = grid._inner("sum", "float32", (1024, 4096), (64, 1024), (1, 64), result="float32")
    small = grid._inner("sum", "float32", (2080, 4000), (336, 768), (1,), result="float32")
    (one, *others) = grid.points([small])
    raw = {str(point): STATES["ours"] for point in [*grid.points([large]), *others]}
    if STATES[state] is not None:
        raw[str(one)] = STATES[state]
    is_taken = any(
        _measurements.contains(entry, one.problem) for entry in policy.classes([large, small], raw)
    )
    assert is_taken == (state == "missing" or is_ours_at(one, state))


@pytest.mark.any_version
def test_more_rows_are_ours_where_the_largest_measured_number_is():
    """The grid has a larger number, 2^18, of which no point was measured yet."""
    each = SAMPLE[0]
    counts = each.axes["outer"]
    assert each.name == "softmax bfloat16"
    assert counts[-2:] == (2**16, 2**18)
    states = {
        point: "missing" if point.shape[0] == counts[-1] else OURS[0]
        for point in grid.points([each])
    }
    more = each.fixed | {"aligned": 16, "scaled": 0, "columns": 1024, "outer": 2**16 + 1}
    assert any(_measurements.contains(entry, more) for entry in table_of(each, states))


@pytest.mark.any_version
def test_rows_side_by_side_may_be_more_than_measured_too():
    each = grid._inner("sum", "float32", (128,), (64, 4096), (1, 256), result="float32")
    states = dict.fromkeys(grid.points([each]), OURS[0])

    def is_in_a_class(inner, outer):
        problem = each.fixed | {"aligned": 16, "columns": 128, "inner": inner, "outer": outer}
        return any(_measurements.contains(entry, problem) for entry in table_of(each, states))

    assert is_in_a_class(inner=4097, outer=256)
    assert is_in_a_class(inner=4097, outer=257)
    assert not is_in_a_class(inner=4097, outer=1)  # what was measured does not fill a GPU


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("state", "rows", "holds"),
    [("ours", 4096, True), ("level", 4096, False), ("ours", 1024, False)],
)
def test_larger_products_are_ours_where_the_kernel_is_far_ahead_on_all_multiprocessors(
    state, rows, holds
):
    each = grid._products("bfloat16", (1, 1), (128, rows), (512, 2048), (1024,))
    states = dict.fromkeys(grid.points([each]), state)
    measured = each.fixed | {"aligned": 16, "m": rows, "n": 2048, "k": 1024}
    larger = measured | {"m": rows + 1, "n": 4096}
    classes = table_of(each, states)
    assert any(_measurements.contains(entry, measured) for entry in classes)
    assert any(_measurements.contains(entry, larger) for entry in classes) is holds


@pytest.mark.any_version
@hypothesis.given(sweep=sweeps(), data=st.data())
@hypothesis.settings(max_examples=150, deadline=None)
def test_a_problem_is_in_a_class_where_the_rule_says_so(sweep, data):
    """And in no more than one: cells are merged without loss, and without anything added."""
    each, states = sweep
    ours = {v for v, ps in each.vertices.items() if all(is_ours_at(p, states[p]) for p in ps)}
    classes = table_of(each, states)
    measured = {str(point): {} for point, state in states.items() if state != "missing"}
    each = dataclasses.replace(each, axes=policy.measured_sizes(each, measured))
    hypothesis.assume(all(each.axes.values()))
    aligned = each.fixed["aligned"]
    fixed = each.fixed | {"aligned": aligned[0] if isinstance(aligned, list) else aligned}
    for _ in range(20):
        sizes = {
            name: data.draw(
                st.sampled_from([size + more for size in values for more in (-1, 0, 1)])
                | st.integers(values[0] // 2, 2 * values[-1])
                | st.sampled_from([1, 2**31 - 1]),
                label=name,
            )
            for name, values in each.axes.items()
        }
        inside = [entry for entry in classes if _measurements.contains(entry, fixed | sizes)]
        assert len(inside) == int(is_ours(each, ours, sizes)), sizes


@pytest.mark.any_version
@hypothesis.given(sweep=sweeps())
@hypothesis.settings(max_examples=100, deadline=None)
def test_a_measured_point_is_in_a_class_if_and_only_if_its_vertex_is_ours(sweep):
    each, states = sweep
    classes = table_of(each, states)
    assert classes == table_of(each, dict(reversed(states.items())))
    measured = {str(point): {} for point, state in states.items() if state != "missing"}
    axes = policy.measured_sizes(each, measured).values()
    for sizes, points in each.vertices.items():
        if not all(size in axis for size, axis in zip(sizes, axes, strict=True)):
            continue  # off the grid until a point of the size is measured
        inside = [e for e in classes if _measurements.contains(e, points[0].problem)]
        assert bool(inside) == all(is_ours_at(point, states[point]) for point in points)
        for entry in inside:
            behind = ("walled", "consumed")
            assert (entry["between"] >= 1) == all(states[point] not in behind for point in points)
            for point in points:
                raw = STATES[states[point]]
                assert policy.ALONE <= entry["ratio"] <= raw["xla_us"] / raw["us"]
                assert entry["between"] <= raw["between_xla_us"] / raw["between_us"]


def test_a_size_of_which_nothing_is_measured_is_as_if_it_were_not_there():
    """So what a table says stays when a grid gets another size, which is measured later."""
    without = grid._rows("softmax", "bfloat16", (1024, 8192), (16, 65536))
    classes = table_of(without, dict.fromkeys(grid.points([without]), "ours"))
    states = {
        point: "ours" if 2048 not in point.shape and 512 not in point.shape else "missing"
        for point in grid.points(
            [grid._rows("softmax", "bfloat16", (1024, 2048, 8192), (16, 512, 65536))]
        )
    }
    with_more = grid._rows("softmax", "bfloat16", (1024, 2048, 8192), (16, 512, 65536))
    assert table_of(with_more, states) == classes
    one = next(point for point, state in states.items() if state == "missing")
    assert table_of(with_more, states | {one: "behind"}) != classes


def test_many_cells_become_few_classes_which_hold_for_float16_if_for_bfloat16():
    each = SAMPLE[0]
    entry, of_float16 = table_of(each, dict.fromkeys(grid.points([each]), "ours"))
    assert of_float16 == entry | {"dtype": "float16"}
    assert entry == {
        **each.fixed,
        "columns": [1024, 8192],
        "outer": [16, 2**31 - 1],
        "ratio": 1.3,
        "between": 1.1,
    }


def test_a_vertex_that_stands_for_several_lengths_needs_them_all():
    options = {"stands_for": (0, 3), "is_aligned": False}
    each = grid._attention("softmax", "bfloat16", ["causal"], (65, 513), (2**14, 2**17), **options)
    states = dict.fromkeys(grid.points([each]), "ours")
    first, one = each.vertices[516, 2**17]
    classes = table_of(each, states | {one: "behind"})
    problem = first.problem
    assert any(_measurements.contains(entry, problem) for entry in table_of(each, states))
    assert not any(_measurements.contains(entry, problem) for entry in classes)


@pytest.mark.any_version
def test_the_file_has_a_header_and_a_class_a_line(tmp_path):
    raw = raw_of(**{str(point): STATES["ours"] for point in grid.points(GRIDS)})
    path = tmp_path / "measurements.json"
    tune._write_table(raw, path)
    device = json.loads(path.read_text())["devices"]["NVIDIA Test GPU"]
    assert device["commit"] == "1"
    assert device["environment"]["jax"] == "1"
    assert device["rule"] == policy.RULE
    assert device["points"] == len(raw.points)
    assert _measurements.read(path) == {"NVIDIA Test GPU": device["classes"]}
    lines = [line.strip().rstrip(",") for line in path.read_text().splitlines()]
    assert [line for line in lines if line.startswith('{"op"')] == list(
        map(json.dumps, device["classes"])
    )


@pytest.mark.any_version
def test_a_file_keeps_the_measurements_of_other_gpus(tmp_path):
    path = tmp_path / "measurements.json"
    for device in ("B", "A", "B"):
        tune._write_table(raw_of(device), path)
    assert list(_measurements.read(path)) == ["A", "B"]


# The command line


@pytest.fixture
def small_sweep(monkeypatch, tmp_path):
    """A GPU of a few points, whose times are made up."""
    monkeypatch.setattr(grid, "SMALLEST", 1)
    each = grid._permuted("float32", (1, 0), (32, 64), (32,))
    monkeypatch.setattr(grid, "grids", lambda families=(): [each])
    monkeypatch.setattr(run, "has_gpu", lambda: True)
    monkeypatch.setattr(_library, "gpu_problem", lambda: None)
    clock = Clock()
    made_up = functools.partial(tune.Sweep, implementation=NAMED, timed=clock, cores=2)
    monkeypatch.setattr(tune, "Sweep", made_up)
    monkeypatch.chdir(tmp_path)
    return clock


def test_a_sweep_from_end_to_end(small_sweep, tmp_path, capsys):
    kind = jax.devices()[0].device_kind
    assert command_line.main(["tune", "--commit", "abc"]) == 0
    assert "2 points: 2 right, 0 wrong, 0 failed" in capsys.readouterr().out
    (raw,) = tmp_path.glob("tune-*.json")
    (out,) = tmp_path.glob("measurements-*.json")
    assert [entry["size0"] for entry in _measurements.read(out)[kind]] == [[32, 64]]

    # The same command has nothing left to measure, and --table makes the same table.
    calls = len(small_sweep.calls)
    table = out.read_text()
    assert command_line.main(["tune", "--commit", "abc"]) == 0
    assert len(small_sweep.calls) == calls
    again = tmp_path / "again.json"
    assert command_line.main(["tune", "--table", "--points", str(raw), "--out", str(again)]) == 0
    assert out.read_text() == again.read_text() == table

    # Points of another commit are not mixed with these.
    with pytest.raises(SystemExit):
        command_line.main(["tune", "--commit", "def"])
    assert "was measured with commit abc and not def" in capsys.readouterr().err
    assert command_line.main(["tune", "--commit", "def", "--restart"]) == 0
    assert tune.Raw.load(raw).environment["commit"] == "def"


def test_a_sweep_that_is_stopped_says_what_is_left(small_sweep, capsys, monkeypatch):
    monkeypatch.setattr(tune.Sweep.func, "run", lambda self, points, seconds: iter(()))
    assert command_line.main(["tune", "--commit", "abc"]) == 0
    assert "Not measured yet: 2 of 2" in capsys.readouterr().out


def test_an_interrupted_sweep_keeps_what_it_has(small_sweep, tmp_path, capsys, monkeypatch):
    def interrupted(self, points, seconds):
        yield {points[0]: STATES["ours"]}
        raise KeyboardInterrupt

    monkeypatch.setattr(tune.Sweep.func, "run", interrupted)
    assert command_line.main(["tune", "--commit", "abc"]) == 0
    assert "Interrupted" in (out := capsys.readouterr().out)
    assert "Not measured yet: 1 of 2" in out
    (raw,) = tmp_path.glob("tune-*.json")
    assert list(tune.Raw.load(raw).points.values()) == [STATES["ours"]]


def test_a_wrong_result_is_told_by_the_exit_code(small_sweep, monkeypatch, capsys):
    monkeypatch.setattr(tune, "_excess", lambda point, results, *xs: jnp.float32(7))
    assert command_line.main(["tune", "--commit", "abc"]) == 1
    assert "WRONG, the error is 7 times what it may be" in " ".join(capsys.readouterr().out.split())


def test_the_list_of_points(capsys):
    assert command_line.main(["tune", "reduce", "--list"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"{len(grid.points(grid.grids(['reduce'])))} points" in text
    assert "softmax" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *([([], "JAX sees none, so nothing can be measured; --list")] if not run.has_gpu() else []),
        (["fft"], "'fft' is not one of softmax, reduce, transpose"),
        (["--minutes", "0"], "not a number of minutes above 0"),
        (["--minutes", "soon"], "--minutes"),
        (["--only", "softmaxx"], "no point matches --only 'softmaxx'"),
        (["--table"], "takes the raw results in --points"),
        (["--table", "--points", "none.json", "--out", "x"], "there is no file none.json"),
    ],
)
def test_usage_errors_name_what_to_do(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        command_line.main(["tune", *arguments])
    assert exit_info.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_file_of_something_else_is_no_raw_result(tmp_path):
    path = tmp_path / "other.json"
    for text, message in (("{", "is not JSON"), ('{"schema": 0}', "has no points of bench tune")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            tune.Raw.load(path)
