"""The benchmark: it covers everything, it believes no result unchecked, it reads well."""

import dataclasses
import functools
import json
import pathlib
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_gpuops
from bench import __main__ as command_line
from bench import (
    cases,
    documents,
    measure,
    ops,
    overhead,
    page,
    peers,
    plot,
    report,
    results,
    run,
)
from bench.problem import Floor, Problem, Variant
from bench.results import REFUSED, RIGHT, WRONG, Result, Run
from jax_gpuops import _library, _measurements, _plan

HOST_CASES = cases.main(gpu=False)


# What it covers


def test_every_public_op_is_in_the_table_of_ops():
    assert {op.public or name for name, op in ops.OPS.items()} == _plan._ops().keys()


@pytest.mark.parametrize("gpu", [False, True])
def test_main_table_has_every_op(gpu):
    assert {each.op for each in cases.main(gpu=gpu)} == ops.OPS.keys()
    assert len(cases.main(gpu=gpu, quick=True)) == len(ops.OPS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_softmax_rows_of_every_length_have_a_floor(dtype):
    lengths = {
        each.size
        for each in cases.main(gpu=True)
        if each.op == "softmax" and each.dtype == dtype and each.floor is not None
    }
    assert {2**e for e in range(5, 19)} <= lengths


@pytest.mark.parametrize("family", ops.FAMILIES)
def test_every_step_of_a_ladder_is_an_algorithm(family):
    names = [each.name for each in jax_gpuops.algorithms(family)]
    ladder = documents.LADDERS[family]
    assert {*ladder.steps, *ladder.aside} <= set(names)
    assert not {*ladder.steps} & {*ladder.aside}


@pytest.mark.any_version
@pytest.mark.skipif(run.has_gpu(), reason='"interpret" takes no arrays on a GPU')
@pytest.mark.parametrize("family", ops.FAMILIES)
def test_main_table_without_a_gpu_runs_every_portable_algorithm(family):
    never_planned = set(documents.LADDERS[family].steps) - {"cublas"}
    for problem in HOST_CASES:
        if ops.OPS[problem.op].family == family:
            for algorithm in never_planned.intersection(run.algorithms(problem)):
                result = run._start(problem, Variant("interpret", algorithm))
                assert result.algorithm == algorithm
                if result.status != REFUSED:
                    never_planned.remove(algorithm)
    assert not never_planned


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("family", "shape", "step", "speedup"),
    [
        ("softmax", (2048, 32), "one_warp_four_rows_float4", 205.0 / 5.3),
        ("softmax", (32, 2048), "one_warp_four_rows", 10.2 / 23.0),
        ("reduce", (67_108_864,), "multiple", 645.28 / 103.72),
        ("transpose", (16384, 16384), "tiled", 63849 / 6769),
        ("matmul", (16384, 1024, 16384), "cublas", 12931.6086 / 1792.2629),
        ("matmul", (128, 1024, 128), "naive", 1.0),
    ],
)
def test_ladder_claims_what_its_document_says(family, shape, step, speedup):
    assert documents.LADDERS[family].speedup(shape, step) == pytest.approx(speedup, rel=1e-4)


def test_ladders_have_the_shapes_of_the_documents():
    shapes = {f: list(ladder.times_us) for f, ladder in documents.LADDERS.items()}
    assert shapes["softmax"] == [(m, n) for m in (32, 1024, 2048) for n in (32, 1024, 2048)]
    assert shapes["reduce"] == [(2**26,)]
    assert shapes["transpose"] == [(16384, 16384)]
    assert len(shapes["matmul"]) == 15
    for ladder in documents.LADDERS.values():
        assert all(len(times) == len(ladder.steps) for times in ladder.times_us.values())


# How it judges


def first_of_each_op():
    return cases.main(gpu=False, quick=True)


@pytest.mark.any_version
@pytest.mark.parametrize("problem", first_of_each_op(), ids=str)
def test_judge_accepts_xla_and_rejects_one_wrong_element(problem):
    operands = run._operands(problem)
    judge = run._judge(problem, operands)
    results = run._call(problem, ops.OPS[problem.op].upstream, operands)()
    error, excess = judge(results)
    assert excess <= 1
    assert error < 1e-5
    leaves, tree = jax.tree.flatten(results)
    for i, y in enumerate(leaves):

        def with_wrong(wrong, i=i, y=y):
            return tree.unflatten([*leaves[:i], wrong.reshape(y.shape), *leaves[i + 1 :]])

        last = y.ravel()[-1]
        assert judge(with_wrong(y.ravel().at[-1].add((1 + abs(last) // 2).astype(y.dtype))))[1] > 1
        if jnp.issubdtype(y.dtype, jnp.inexact):
            assert not judge(with_wrong(y.ravel().at[0].set(jnp.nan)))[1] <= 1
    assert judge(jax.tree.map(lambda y: jnp.zeros((*y.shape, 2), y.dtype), results))[1] > 1


@pytest.mark.any_version
@pytest.mark.parametrize("op", ["matmul", "dot_general_of_rows"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("precision", [None, "highest"])
def test_judge_of_products_of_8_bits(precision, dtype, op):
    """Results of 16 or 32 bits; an element that is off is an error."""
    problem = ops.make(op, (40, 3000, 24), dtype, precision=precision)
    operands = run._operands(problem)
    judge = run._judge(problem, operands)
    y = run._call(problem, ops.OPS[op].upstream, operands)()
    assert y.dtype == ("int32" if dtype == "int8" else "bfloat16")
    assert judge(y)[1] <= 1
    assert judge(y.at[-1, -1].add(10))[1] > 1
    assert judge(y.at[0].set(0))[1] > 1


@pytest.mark.any_version
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("columns", [1024, 131072])
@pytest.mark.parametrize("op", ["softmax_vjp", "log_softmax_vjp"])
def test_judge_rejects_a_backward_pass_that_lost_a_part_of_its_sum(op, columns, dtype):
    """As would happen if one of many blocks did not contribute."""
    problem = ops.make(op, (4, columns), dtype)
    operands = run._operands(problem)
    x, dy = (each.astype(jnp.float32) for each in operands)
    y, s = jax.nn.softmax(x), jnp.sum(dy[:, columns // 16 :], -1, keepdims=True)
    if op == "softmax_vjp":
        s = jnp.sum((y * dy)[:, columns // 16 :], -1, keepdims=True)
        dx = y * (dy - s)
    else:
        dx = dy - y * s
    assert run._judge(problem, operands)(dx.astype(dtype))[1] > 1


@pytest.mark.parametrize("op", ["softmax", "log_softmax", "logsumexp"])
def test_xla_is_given_the_same_problem(op):
    """What our kernels fuse, XLA gets in the form that it is fastest with."""
    problem = ops.make(op, (2, 7, 9), "float32", scale=-0.5, causal=True, where=True)
    x, where = run._operands(problem)
    actual = run._call(problem, ops.OPS[op].upstream, (x, where))()
    expected = getattr(jax.nn, op)(-0.5 * x, axis=-1, where=where & jnp.tri(7, 9, dtype=bool))
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_cross_entropy_of_xla_is_that_of_optax():
    problem = ops.make("cross_entropy_grad", (9, 70), "float32")
    h, labels = run._operands(problem)

    def mean_loss(logits):
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    actual = run._call(problem, ops.OPS[problem.op].upstream, (h, labels))()
    expected = jax.value_and_grad(mean_loss)(2 * h)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), actual, expected)


@pytest.mark.any_version
def test_no_row_of_a_mask_is_empty():
    problem = ops.make("softmax", (3, 50, 20), "float32", where=True)
    _, mask = run._operands(problem)
    assert mask.shape == (50, 20)
    assert mask.any(-1).all()
    assert not mask.all()
    assert not (mask & ~jnp.tri(50, 20, dtype=bool)).any()


def test_losses_of_xla_are_those_of_optax():
    problem = ops.make("cross_entropy", (9, 70), "float32")
    x, labels = run._operands(problem)
    actual = run._call(problem, ops.OPS[problem.op].upstream, (x, labels))()
    expected = optax.softmax_cross_entropy_with_integer_labels(x, labels)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.any_version
@pytest.mark.parametrize("length", [1, 2, 197])
def test_padding_leaves_out_at_most_half_of_each_sequence(length):
    problem = ops.make("softmax", (40, 2, 3, length), "float32", where="padding")
    _, mask = run._operands(problem)
    assert mask.shape == (40, 1, 1, length)
    lengths = mask.sum(-1, keepdims=True)
    np.testing.assert_array_equal(mask, jnp.arange(length) < lengths)
    assert jnp.all(2 * lengths >= length)
    assert bool(mask.all()) == (length == 1)


@pytest.fixture
def wrong_softmax(monkeypatch):
    """Our softmax, off by a part in a thousand."""
    right = jax_gpuops.softmax

    @functools.wraps(right)
    def wrong(x, **arguments):
        return right(x, **arguments) * 1.001

    monkeypatch.setattr(jax_gpuops, "softmax", wrong)


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("dtype", "factor", "status"),
    [("bfloat16", 1.05, RIGHT), ("bfloat16", 1.2, WRONG), ("float32", 1.05, WRONG)],
)
def test_xla_may_compute_16_bit_floats_in_16_bits(monkeypatch, dtype, factor, status):
    upstream = jax.nn.softmax
    off = lambda x, axis, **_: factor * upstream(x, axis)  # noqa: E731
    monkeypatch.setattr(ops, "ours", lambda op: off)
    problem = ops.make("softmax", (9, 70), dtype)
    (result,) = run.Runner(timed=False).run(problem, [Variant("xla")])
    assert result.status == status
    assert result.excess > 1


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 5), ("float32", 2**22), ("bfloat16", 2**20), ("float16", 2**20)]
)
def test_factors_of_a_product_round_to_both_sides(dtype, size):
    problem = ops.make("prod", (size,), dtype)
    operands = run._operands(problem)
    one_by_one = np.multiply.accumulate(np.asarray(operands[0], np.float32))
    assert np.all(np.isfinite(one_by_one) & (one_by_one != 0))
    _, excess = run._judge(problem, operands)(jnp.asarray(one_by_one[-1], dtype))
    assert excess <= 1


SMALL = ["softmax", "--shape", "9x70"]


@pytest.mark.usefixtures("wrong_softmax")
def test_wrong_result_is_reported_and_has_no_speed(tmp_path, capsys):
    path = tmp_path / "run.json"
    assert command_line.main([*SMALL, "--algorithm", "warp", "--json", str(path)]) == 1
    assert "WRONG" in capsys.readouterr().out
    (result,) = Run.load(path).results
    assert result.status == WRONG
    assert result.excess > 1
    assert not result.timed


def test_result_without_our_custom_call_fails(monkeypatch):
    """A silent fallback would compare XLA with XLA."""
    upstream = jax.nn.softmax
    fake = lambda x, axis, **_: upstream(x, axis)  # noqa: E731
    monkeypatch.setattr(ops, "ours", lambda op: fake)
    problem = ops.make("softmax", (9, 70), "float32")
    (result,) = run.Runner(timed=False).run(problem, [Variant(named_implementation())])
    assert result.status == results.FAILED
    assert "does not call our kernel" in result.message


def named_implementation() -> str:
    return "cuda" if run.has_gpu() else "interpret"


def test_algorithm_that_cannot_take_a_problem_is_refused_with_the_reason():
    problem = ops.make("softmax", (2, 5000), "float32")
    variants = [Variant(named_implementation(), a) for a in ("warp", "block_uncached")]
    refused, right = run.Runner(timed=False).run(problem, variants)
    assert refused.status == REFUSED
    assert "5000" in refused.message
    assert right.status == RIGHT


@pytest.mark.any_version
def test_many_problems_run_as_each_alone():
    """Also where there are more than are compiled at a time, and where one fails."""
    fits = [ops.make("softmax", (9, n), "float32") for n in range(70, 75)]
    fails = ops.make("softmax", (9, 70), "float32", axis=5)
    problems = [*fits[:2], fails, *fits[2:]]
    variants = [Variant("xla"), Variant(named_implementation())]
    each_with_variants = [(each, variants) for each in problems]
    announced = []
    runner = run.Runner(timed=False)
    found = list(runner.run_all(each_with_variants, announce=announced.append, cores=1))
    names = list(map(str, problems))
    first, second = "compiling 4 of 6 cases", "compiling 2 of 6 cases"
    assert announced == [first, *names[:4], second, *names[4:]]
    assert [[each.problem for each in group] for group in found] == [2 * [p] for p in problems]
    alone = [run.Runner(timed=False).run(each, variants) for each in problems]
    assert found == alone
    assert {each.status for each in found[2]} <= {REFUSED, results.FAILED}
    assert {each.status for group in [*found[:2], *found[3:]] for each in group} == {RIGHT}


# How it measures


def timing(kernel_us, loop_us):
    return measure.Timing(kernel_us, loop_us, kernels=1)


@pytest.mark.parametrize(
    ("ours", "xla", "expected"),
    [
        (timing(500, 510), timing(600, 606), [500, 600]),
        (timing(2, 15), timing(3, 16), [2, 3]),  # small: the loop times the host
        (timing(500, 560), timing(600, 606), [560, 606]),  # more than kernels takes time
        (timing(500, 510), timing(None, 606), [510, 606]),  # a copy is no kernel
    ],
)
def test_loops_count_where_kernels_do_not_tell_the_whole(ours, xla, expected):
    assert measure.times_us([ours, xla]) == expected


@pytest.fixture
def fake_profiler(monkeypatch):
    """Every call takes two kernels and 200 us, in loops 205 us; ceilings come from small arrays."""
    monkeypatch.setattr(
        measure, "_kernel_runs", lambda call, n, **_: n * [[("first", 150.0), ("second", 50.0)]]
    )
    monkeypatch.setattr(measure, "loop", lambda call, repeats: 205e-6)
    monkeypatch.setattr(run, "_CEILING_ELEMENTS", 1000)
    monkeypatch.setattr(run, "_CEILING_MATRIX", 16)


def test_the_fastest_loop_and_the_median_of_200_kernel_runs_count(monkeypatch):
    runs, loops = [], iter([30e-6, 31e-6, 20e-6, 25e-6, 28e-6, 22e-6, 24e-6])

    def kernel_runs(call, iterations, *, is_last):
        runs.extend(range(len(runs), len(runs) + iterations))
        return [[("kernel", float(i))] for i in runs[-iterations:]]

    monkeypatch.setattr(measure, "_kernel_runs", kernel_runs)
    monkeypatch.setattr(measure, "loop", lambda call, repeats: next(loops))
    (found,) = measure.measure([measure.Call(jax.jit(jnp.sin), [1.0])])
    assert len(runs) >= 200
    assert found == measure.Timing(len(runs) / 2 - 0.5, pytest.approx(20), 1)


def test_calls_take_turns_at_being_first(monkeypatch):
    """A GPU gets slower as it gets warm, and who is always last would seem slower."""
    calls = [measure.Call(jax.jit(jnp.sin), [float(i)]) for i in range(3)]
    seen = []

    def kernel_runs(call, iterations, *, is_last):
        seen.append((call.arguments[0], is_last))
        return iterations * [[("kernel", 1.0)]]

    monkeypatch.setattr(measure, "_kernel_runs", kernel_runs)
    monkeypatch.setattr(measure, "loop", lambda call, repeats: 1e-3)
    measure.measure(calls, rounds=3)
    assert [first for first, _ in seen] == [0.0, 1.0, 2.0, 1.0, 2.0, 0.0, 2.0, 0.0, 1.0]
    assert [is_last for _, is_last in seen] == 8 * [False] + [True]


@pytest.mark.usefixtures("fake_profiler")
def test_timed_run_reports_rate_ceiling_and_ratio():
    problem = ops.make("softmax", (10, 100), "float32")
    runner = run.Runner(timed=True)
    found = runner.run(problem, [Variant(named_implementation(), "warp")])
    runner.rate(found)
    (result,) = found
    assert (result.kernel_us, result.loop_us, result.time_us) == (200, pytest.approx(205), 200)
    assert result.kernels == 2
    assert result.bytes == 2 * 4 * 1000
    assert result.rate == pytest.approx(8000 / 200e-6 / 1e9)
    assert result.ceiling == pytest.approx(8000 / 200e-6 / 1e9)
    assert result.ratio == 1
    assert result.warm


@pytest.mark.usefixtures("fake_profiler")
def test_time_of_the_producer_is_not_the_ops(monkeypatch):
    """The logits take 60 us to make, the loss and the gradient 90 us more."""

    def kernels(call):
        alone = len(jax.tree.leaves(call.function.out_info)) == 1
        return [("multiply", 60.0), *([] if alone else [("loss", 50.0), ("gradient", 40.0)])]

    monkeypatch.setattr(measure, "_kernel_runs", lambda call, n, **_: n * [kernels(call)])
    monkeypatch.setattr(
        measure, "loop", lambda call, repeats: 1e-6 * sum(us + 1 for _, us in kernels(call))
    )
    runner = run.Runner(timed=True)
    problem = ops.make("cross_entropy_grad", (10, 100), "float32")
    (result,) = runner.run(problem, [Variant(named_implementation())])
    assert (result.time_us, result.kernel_us, result.kernels) == (90, 90, 2)
    assert (result.xla_time_us, result.xla_kernel_us, result.xla_kernels) == (90, 90, 2)
    assert result.loop_us == result.xla_loop_us == pytest.approx(92)


@pytest.mark.parametrize(
    ("op", "primitives", "read"),
    [
        ("softmax", ["gpuops_softmax"], 1),
        ("softmax_vjp", ["gpuops_softmax_tangent"], 2),  # the result and its cotangent, no more
        ("log_softmax_vjp", ["gpuops_log_softmax_cotangent"], 2),
        ("cross_entropy_grad", ["gpuops_cross_entropy", "gpuops_cross_entropy_cotangent"], 1),
    ],
)
def test_what_is_timed(op, primitives, read):
    problem = ops.make(op, (9, 70), "bfloat16")
    calls = run.kernel_calls(problem, implementation=named_implementation())
    assert [primitive.name for primitive, _, _ in calls] == primitives
    function = functools.partial(ops.ours(op), implementation=named_implementation())
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ops.OPS[op].operands(problem)]
    arguments = jax.eval_shape(functools.partial(ops.OPS[op].prepare, function), *operands)
    assert [x.shape for x in jax.tree.leaves(arguments) if x.ndim == 2] == read * [(9, 70)]


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("problem", "moved"),
    [
        (ops.make("softmax", (100, 1000), "float32"), 2 * 400_000),
        (ops.make("logsumexp", (100, 1000), "float32"), 400_000 + 400),
        (ops.make("softmax", (3, 100, 1000), "bfloat16", where=True), 2 * 600_000 + 100_000),
        (ops.make("softmax", (3, 100, 1000), "bfloat16", causal=True), 2 * 600_000),
        (ops.make("softmax_vjp", (100, 1000), "bfloat16"), 3 * 200_000),
        (ops.make("cross_entropy_grad", (100, 1000), "bfloat16"), 3 * 200_000),
        # A row that no chip holds is read once for its sum and once for its result.
        (ops.make("softmax", (4, 20_000_000), "float32"), 3 * 320_000_000),
        (ops.make("softmax", (20_000_000, 4), "float32", axis=0), 3 * 320_000_000),
        (ops.make("softmax", (20_000_000, 4), "float32"), 2 * 320_000_000),
        (ops.make("logsumexp", (4, 20_000_000), "float32"), 320_000_000 + 16),
    ],
    ids=str,
)
def test_bytes_that_an_op_must_move(problem, moved):
    op = ops.OPS[problem.op]
    operands = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in op.operands(problem)]
    function = functools.partial(op.upstream, **ops.keywords(problem))
    results = jax.eval_shape(lambda *xs: op.apply(function, *op.prepare(function, *xs)), *operands)
    assert op.bytes(problem, operands, jax.tree.leaves(results)) == moved


# What it asks of us


@pytest.mark.parametrize(
    ("floor", "met"),
    [
        (Floor(ceiling=0.94), True),
        (Floor(ceiling=0.96), False),
        (Floor(ratio=0.89), True),
        (Floor(ratio=0.91), False),
        (Floor(ratio=0.99, slack_us=0.2), False),
        (Floor(ratio=0.99, slack_us=0.3), True),
        (Floor(ceiling=0.96, ratio=0.89), False),
        (Floor(tflops=949), True),
        (Floor(tflops=951), False),
        (None, None),
    ],
    ids=str,
)
def test_result_at_95_percent_of_the_ceiling_and_90_percent_of_xla(floor, met):
    problem = ops.make("softmax", (9, 70), "float32", floor=floor)
    result = made_up_result(problem, "warp", time_us=2.5)
    result.rate, result.ceiling, result.xla_time_us = 950, 1000, 2.25
    assert result.meets_floor is met


def test_a_floor_above_the_speed_of_xla_is_not_met_by_being_level():
    problem = ops.make("softmax", (9, 70), "float32", floor=Floor(ratio=3.2))
    for time_us, met in ((5.0, False), (3.0, True)):
        result = made_up_result(problem, "warp", time_us=time_us)
        result.xla_time_us = 10.0
        assert result.meets_floor is met


def test_report_says_which_floors_are_missed():
    floor = Floor(ratio=0.99, mean_ratio=1.0)
    found = [
        made_up_result(ops.make("softmax", (9, n), "float32", floor=floor), "warp", time_us)
        for n, time_us in ((70, 10.0), (71, 40.0))  # XLA's is 20
    ]
    for each in found:
        each.ceiling = each.rate
    first, missed, mean = report.floors_text(found)
    assert first.startswith("1 of 2")
    assert "9x71" in missed
    assert "0.50x XLA; floor 0.99x" in missed
    assert "1.000x XLA; floor 1.00x" in mean
    found[0].algorithm = results.XLA  # what XLA reaches is not ours to reach
    assert report.floors_text(found)[0].startswith("0 of 1")


# Whom it compares with


@pytest.mark.filterwarnings("ignore:jax.experimental.pallas:DeprecationWarning")
def test_peer_that_is_not_installed_is_left_out(monkeypatch, capsys):
    for module in ("torch", "jax.experimental.pallas.ops.gpu"):
        monkeypatch.setitem(sys.modules, module, None)
    assert command_line.main([*SMALL, "--peers", "--algorithm", "warp"]) == 0
    out = capsys.readouterr().out
    assert "Not run: PyTorch on softmax 9x70" in out
    assert "Not run: Pallas on softmax 9x70" in out
    assert "All 1 results are right" in out


@pytest.mark.parametrize(
    "problem",
    [each for each in HOST_CASES if each.op in peers._TORCH],
    ids=str,
)
def test_pytorch_solves_the_same_problem(problem):
    pytest.importorskip("torch")
    (result,) = run.Runner(timed=False).run(problem, [Variant(peer="PyTorch")])
    assert (result.status, result.message, result.algorithm) == (RIGHT, "", "PyTorch")
    assert not result.ours


@pytest.mark.any_version
@pytest.mark.usefixtures("fake_profiler")
@pytest.mark.parametrize("command", ["main", "ladder"])
def test_figures_and_tables_of_a_timed_run(command, tmp_path, capsys):
    done = Run(command, results.environment(), list(made_up_results(command)))
    if command == "ladder":
        run.climb(done.results)
    for family in ops.FAMILIES:
        group = [each for each in done.results if each.family == family]
        report.console().print(report.table(group, timed=True, ladder=command == "ladder"))
    out = capsys.readouterr().out
    assert "TFLOP/s" in out
    assert "GB/s" in out
    assert ("document" in out) == (command == "ladder")
    figures = plot.draw(done, tmp_path)
    assert len(figures) >= len(ops.FAMILIES)
    assert all(path.stat().st_size > 10_000 for path in figures)


def made_up_results(command):
    if command == "main":
        problems = [(each, ["block_shared"]) for each in cases.main(gpu=True)]
    else:
        problems = [
            (each, documents.LADDERS[ops.OPS[each.op].family].steps)
            for each in cases.ladder(ops.FAMILIES, gpu=True)
        ]
    for problem, algorithms in problems:
        for i, algorithm in enumerate(algorithms):
            yield made_up_result(problem, algorithm, time_us=100.0 / (i + 1))


def made_up_result(problem: Problem, algorithm: str, time_us: float) -> Result:
    return Result(
        problem, ops.OPS[problem.op].family, "cuda", algorithm, algorithm,
        error=1e-7, excess=0.5, xla_error=1e-7, bytes=1000, operations=1000, kernels=1,
        kernel_us=time_us, loop_us=time_us + 1, time_us=time_us,
        xla_kernels=1, xla_kernel_us=20.0, xla_loop_us=21.0, xla_time_us=20.0,
        rate=1 / time_us, xla_rate=1 / 20, ceiling=0.2,
    )  # fmt: skip


@pytest.mark.usefixtures("fake_profiler")
def test_speedup_is_over_the_first_step_of_the_same_shape():
    found = list(made_up_results("ladder"))
    run.climb(found)
    last = next(r for r in found if r.problem.shape == (2048, 32) and "four_rows_f" in r.algorithm)
    assert last.speedup == pytest.approx(7)
    assert last.claimed_speedup == pytest.approx(205 / 5.3)


# The command line


@pytest.mark.parametrize(
    "command", ["ladder", "programs", "merge", "plot", "tune", "overhead", *ops.OPS]
)
def test_help_mentions_every_command(command, capsys):
    with pytest.raises(SystemExit):
        command_line.main(["--help"])
    assert f" {command} " in capsys.readouterr().out.replace("\n", " \n")


def test_case_runs_end_to_end(tmp_path, capsys):
    path = tmp_path / "run.json"
    assert command_line.main([*SMALL, "--dtype", "bf16", "--axis", "0", "--json", str(path)]) == 0
    done = Run.load(path)
    # On a GPU: the default, and our kernel if the default is XLA.
    assert len(done.results) in ([1, 2] if run.has_gpu() else [1])
    assert f"All {len(done.results)} results are right" in capsys.readouterr().out
    assert done.command == "case"
    assert done.results[0].problem == ops.make("softmax", (9, 70), "bfloat16", axis=0)
    assert done.environment["jax"] == jax.__version__


def test_options_of_a_case():
    arguments = ["softmax", "--shape", "3x5x7", "--scale", "0.125", "--causal", "--where"]
    options = command_line._parser().parse_args(arguments)
    (problem,) = command_line._problems(options, gpu=False)
    assert problem == ops.make(
        "softmax", (3, 5, 7), "float32", scale=0.125, causal=True, where=True
    )
    assert str(problem) == "softmax 3x5x7 float32 axis=-1 scale=0.125 causal where"


def test_only_what_matches_is_run():
    arguments = ["--only", "^softmax .*bfloat16", "--algorithm", "warp", "block"]
    options = command_line._parser().parse_args(arguments)
    chosen = command_line._problems(options, gpu=True)
    assert {(each.op, each.dtype) for each in chosen} == {("softmax", "bfloat16")}
    assert command_line._variants(chosen[0], options, gpu=True) == [
        Variant("cuda", "warp"),
        Variant("cuda", "block"),
    ]


@pytest.mark.any_version
@pytest.mark.skipif(run.has_gpu(), reason="a GPU is there")
def test_without_a_gpu_it_says_that_no_speed_was_measured(tmp_path, capsys):
    assert command_line.main(["ladder", "softmax", "--plot", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "No speed was measured" in out
    assert "us" not in out.split()
    assert "nothing to draw" in out


@pytest.mark.parametrize("gpu", [True, False])
def test_it_refuses_to_compare_xla_with_xla(gpu, monkeypatch, capsys):
    """Without our kernels every row would be XLA's own, right, and a result of nothing."""
    named = "cuda" if gpu else "interpret"
    monkeypatch.setattr(run, "has_gpu", lambda: gpu)
    broken = {**_library._MODULES, named: "it was never built"}
    monkeypatch.setattr(_library, "_MODULES", broken)
    _library.gpu_problem.cache_clear()
    with pytest.raises(SystemExit) as stop:
        command_line.main(["--quick"])
    _library.gpu_problem.cache_clear()
    assert stop.value.code == 2
    assert "it was never built" in capsys.readouterr().err


def test_json_round_trip(tmp_path):
    done = Run("main", results.environment(commit="abc"), list(made_up_results("main")))
    done.save(tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json") == done


def test_json_of_something_else_is_rejected(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"schema": 0}')
    with pytest.raises(ValueError, match="not a result of this benchmark"):
        Run.load(path)


@pytest.mark.parametrize(
    ("commit", "solved_again"), [("abc", [(7, 65)]), ("def", [(33, 130), (7, 65)])]
)
def test_a_run_that_was_cut_short_goes_on(commit, solved_again, tmp_path, monkeypatch):
    """Where it is the same command on the same sources; else it begins anew."""
    out = tmp_path / "run.json"
    arguments = ["--only", "^softmax (33x130|7x65) ", "--json", str(out), "--commit"]
    solved = []

    def solve(self, problems, *, announce):
        for problem, _ in problems:
            solved.append(problem.shape)
            yield [Result(problem, "softmax", None, None, "warp")]

    def cut_short(self, problems, *, announce):
        yield from solve(self, problems[:1], announce=announce)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "has_gpu", lambda: False)  # for problems of the host everywhere
    monkeypatch.setattr(run.Runner, "run_all", cut_short)
    with pytest.raises(KeyboardInterrupt):
        command_line.main([*arguments, "abc"])
    assert solved == [(33, 130)]
    assert not out.exists()
    solved.clear()
    monkeypatch.setattr(run.Runner, "run_all", solve)
    command_line.main([*arguments, commit])
    assert solved == solved_again
    assert [each.problem.shape for each in Run.load(out).results] == [(33, 130), (7, 65)]
    assert list(tmp_path.iterdir()) == [out]


def part_of_a_run(path, *shapes, **environment):
    problems = [ops.make("softmax", shape, "float32") for shape in shapes]
    found = [Result(each, "softmax", None, None, "warp") for each in problems]
    Run("main", results.environment("abc") | environment, found).save(path)
    return str(path)


def test_a_command_line_is_kept_without_the_folders_of_a_machine(monkeypatch):
    arguments = ["--json", "/some/where/run.json", "--plot=/some/where", "--only", "a/b"]
    monkeypatch.setattr("sys.argv", ["bench", *arguments])
    kept = results.environment("abc")["command_line"]
    assert kept == ["python", "-m", "bench", "--json", "run.json", "--plot=where", "--only", "a/b"]


def test_parts_of_a_run_are_merged(tmp_path):
    first = part_of_a_run(tmp_path / "a", (3, 5), (3, 6), command_line=["a"])
    second = part_of_a_run(tmp_path / "b", (3, 7), command_line=["b"], date="later")
    out = tmp_path / "run.json"
    assert command_line.main(["merge", first, second, "--json", str(out)]) == 0
    merged = Run.load(out)
    assert [each.problem.shape for each in merged.results] == [(3, 5), (3, 6), (3, 7)]
    assert merged.environment["command_line"] == [["a"], ["b"]]
    assert merged.environment["commit"] == "abc"


@pytest.mark.parametrize(
    ("shape", "environment", "message"),
    [
        ((3, 7), {"commit": "def"}, "one commit, not abc and def"),
        ((3, 7), {"device": "another"}, "have one device"),
        ((3, 5), {}, "two parts have results of softmax 3x5"),
    ],
)
def test_what_is_no_part_of_the_run_is_an_error(shape, environment, message, tmp_path, capsys):
    parts = [
        part_of_a_run(tmp_path / "a", (3, 5)),
        part_of_a_run(tmp_path / "b", shape, **environment),
    ]
    with pytest.raises(SystemExit):
        command_line.main(["merge", *parts, "--json", str(tmp_path / "run.json")])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["softmax"], "--shape"),
        (["merge", "a.json"], "merge writes to --json"),
        (
            ["softmax", "--shape", "3xtwo"],
            "--shape: '3xtwo' is not a shape; write the sizes with x",
        ),
        (["softmax", "--shape", "3x2", "--dtype", "f33"], "--dtype: 'f33' is not a dtype"),
        (["softmax", "--shape", "3x2", "--algorithm", "fastest"], "it has baseline"),
        (["matmul", "--shape", "3x2"], "MxKxN"),
        (["ladder", "fft"], "softmax"),
        (["softmax", "--shape", "3", "--causal"], "shape of a matrix"),
        (["--only", "softmaxx"], "softmaxx"),
        (["--only", "("], "regular expression"),
        (["--only", "^softmax ", "--algorithm", "naive"], "it has baseline"),
        (["--algorithm", "warp", "--quick", "ladder"], "every step"),
        (["--json", "run.json", "tune"], "tune has no --json"),
        (["--quick", "tune", "--only", "^sum"], "tune has no --quick"),
        (["--only", "^sum", "plot", "run.json"], "plot has no --only"),
        (["--quick", "overhead"], "overhead has no --quick"),
        (["overhead", "--calls", "0"], "not a number of calls"),
        (["--plot", "figures", "page", "docs/performance.md"], "page has no --plot"),
    ],
)
def test_usage_errors_name_what_is_accepted(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        command_line.main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("families", [(), ("reduce",), ("softmax", "matmul")])
def test_ladders_of_some_families_or_all(families):
    options = command_line._parser().parse_args(["ladder", *families])
    chosen = command_line._problems(options, gpu=True)
    assert {ops.OPS[each.op].family for each in chosen} == set(families or ops.FAMILIES)


def test_outputs_may_be_named_before_and_after_the_command():
    parse = command_line._parser().parse_args
    assert parse(["--json", "a", *SMALL]).json == parse([*SMALL, "--json", "a"]).json
    assert parse(SMALL).json is None


def test_the_overhead_of_a_call_is_what_the_host_needs_more():
    def sleeping(seconds):
        def function(x):
            time.sleep(seconds)
            return x

        return measure.Call(function, [np.ones(1)])

    result = overhead.measured("sleep", sleeping(0.02), sleeping(0.005), calls=2)
    assert result.overhead_us == result.kernel_us - result.xla_us
    assert 5e3 < result.overhead_us < 5e4


@pytest.mark.skipif(not run.has_gpu(), reason="measures a GPU's calls")
def test_overhead_runs_end_to_end(tmp_path, capsys):
    path = tmp_path / "overhead.json"
    assert command_line.main(["overhead", "--calls", "20", "--json", str(path)]) == 0
    kept = json.loads(path.read_text())
    assert [each["case"] for each in kept["results"]] == [
        *map(str, overhead.CASES),
        overhead.FLOOR,
    ]
    assert overhead.FLOOR in capsys.readouterr().out


@pytest.mark.skipif(run.has_gpu(), reason="there is a GPU")
def test_overhead_needs_a_gpu(capsys):
    with pytest.raises(SystemExit):
        command_line.main(["overhead"])
    assert "on a GPU, and JAX sees none" in capsys.readouterr().err


def test_every_result_field_is_documented():
    for field in dataclasses.fields(Result):
        assert field.name in Result.__doc__


# The page

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.any_version
def test_the_tables_of_the_page_are_those_of_the_results():
    text = (ROOT / "docs" / "performance.md").read_text()
    assert text.count("-->\n| op |") == 14
    assert page.filled(text, ROOT / "bench" / "results" / "h200") == text


@pytest.mark.any_version
def test_a_number_that_was_changed_by_hand_is_put_right():
    text = (ROOT / "docs" / "performance.md").read_text()
    changed = text.replace("| softmax | 8388608 x 32 | f32 |", "| softmax | 8388608 x 33 | f32 |")
    assert changed != text
    assert page.filled(changed, ROOT / "bench" / "results" / "h200") == text


@pytest.mark.any_version
def test_the_page_counts_the_classes_of_every_gpu():
    text = (ROOT / "docs" / "performance.md").read_text()
    classes = _measurements._package()
    assert re.findall(r"<!-- measurements\.json: (.+) -->\n\|", text) == sorted(classes)
    for each in classes.values():
        assert f"\n| all | | | {len(each)} | " in text


def test_products_among_the_classes_are_told_apart(monkeypatch):
    product = {"op": "matmul", "transpose_a": 0, "ratio": 1.5, "between": 1.2}
    layer = {**product, "dtype": "bfloat16", "has_bias": 1, "gated": 0, "ratio": 1.25}
    classes = [
        {**product, "dtype": "float32", "precision": "HIGHEST"},
        layer,
        {**layer, "dtype": "float16"},
        {**layer, "gated": 1},
        {"op": "transpose", "element_bytes": 2, "ratio": 1.1, "between": 0.9},
    ]
    monkeypatch.setattr(_measurements, "table", lambda: {"A": classes})
    comment = "<!-- measurements.json: A -->\n"
    assert page.filled(comment, ROOT).splitlines()[3:] == [
        "| transpose | transpose |  | 1 | 1.10 | 0 |",
        "| matmul | glu | bf16 | 1 | 1.25 | 1 |",
        "| matmul | linear | bf16, f16 | 2 | 1.25 | 2 |",
        "| matmul | matmul, dot_general, gemm | f32 at the highest precision | 1 | 1.50 | 1 |",
        "| all | | | 5 | 1.10 | 4 |",
    ]
    with pytest.raises(ValueError, match="no measurements of 'B'"):
        page.filled(comment.replace("A", "B"), ROOT)


def test_a_table_without_results_is_an_error():
    with pytest.raises(ValueError, match=r"no result of main\.json matches 'no such op'"):
        page.filled("<!-- main.json: no such op -->\n", ROOT / "bench" / "results" / "h200")
