"""Single calls with the shapes of published models: which they are, and how None is judged."""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import pytest

from bench import __main__ as command_line
from bench import ops, results, run
from bench.calls import cases, models, report
from bench.problem import Variant
from bench.report import console
from bench.results import FAILED, REFUSED, WRONG, XLA, Result, Run, Unfinished

DRAWS = list(cases.DRAWS.values())
HOST = cases.problems(gpu=False)


@functools.cache
def drawn(draw=cases.FIRST):
    """The calls of a draw, drawn when a test asks: at import, other tests would wait for them."""
    return cases.problems(draw, gpu=True)


@pytest.fixture
def problem(request):
    draw, number = request.param
    return drawn(draw)[number]


of_each_draw = pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.name)
of_each_call = pytest.mark.parametrize(
    "problem",
    [
        pytest.param((draw, number), id=line)
        for draw in DRAWS
        for number, line in enumerate(draw.file.read_text().splitlines())
    ],
    indirect=True,
)


# Which they are


@pytest.mark.any_version
@of_each_draw
def test_calls_are_those_that_were_drawn_once(draw):
    assert draw.file.read_text() == cases.text(draw)


@pytest.mark.any_version
@of_each_draw
def test_there_are_300_calls_of_a_draw(draw):
    assert len(drawn(draw)) == 300
    families = collections.Counter(ops.OPS[each.op].family for each in drawn(draw))
    assert families == cases.COUNTS
    assert sum(cases.COUNTS.values()) == 300


@pytest.mark.any_version
def test_no_call_is_drawn_twice():
    calls = [(p.op, p.shape, p.dtype, p.options_text()) for draw in DRAWS for p in drawn(draw)]
    assert len(set(calls)) == len(calls)


@pytest.mark.any_version
@of_each_draw
def test_calls_come_by_family_and_name_their_model(draw):
    families = [ops.OPS[each.op].family for each in drawn(draw)]
    assert list(dict.fromkeys(families)) == list(ops.FAMILIES)
    assert families == sorted(families, key=ops.FAMILIES.index)
    assert len(model_names(drawn(draw))) >= 40
    assert len(model_names(drawn(draw)) & listed_names(draw.models)) >= 40


def model_names(calls):
    return {each.model.rpartition(": ")[0] for each in calls}


def listed_names(group):
    listed = [*group.decoders, *group.encoders, *group.patch_encoders, *group.maps]
    return {each.name for each in listed}


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("draw", "lengths"),
    [
        (cases.SECOND, {64, 729, 1370, 8192}),
        (cases.THIRD, {81, 676, 1101, 6144}),
        (cases.FOURTH, {90, 361, 850, 5000}),
        (cases.FIFTH, {56, 275, 945, 4000}),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_a_later_draw_is_of_other_models_and_lengths_too(draw, lengths):
    assert not listed_names(models.FIRST) & listed_names(models.FURTHER)
    names = model_names(drawn(draw))
    assert names & listed_names(models.FIRST)
    assert len(names & listed_names(models.FURTHER)) >= 40
    others = {length for other in DRAWS if other != draw for length in other.lengths}
    assert not set(draw.lengths) & others
    assert lengths <= {size for p in drawn(draw) for size in p.shape}


@pytest.mark.any_version
@of_each_draw
def test_calls_are_of_many_kinds(draw):
    calls = drawn(draw)
    by_op = collections.Counter(each.op for each in calls)
    assert {
        "softmax", "softmax_vjp", "log_softmax", "log_softmax_vjp", "logsumexp", "cross_entropy",
        "cross_entropy_grad", "sum", "mean", "max", "argmax", "var", "mean_and_var", "transpose",
        "matmul", "dot_general", "dot_general_of_rows", "dot_general_of_columns", "linear", "glu",
    } <= by_op.keys()  # fmt: skip
    dtypes = collections.Counter(each.dtype for each in calls)
    assert dtypes["bfloat16"] > dtypes["float32"] > dtypes["float16"] > 0
    masks = collections.Counter(
        "causal" if p.options.get("causal") else p.options.get("where")
        for p in calls
        if p.op == "softmax"
    )
    assert {None, "causal", "padding"} == masks.keys()
    assert {p.options["axis"] for p in calls if p.op == "softmax"} == {-1, 1}
    assert any(math.prod(p.shape) % 2 for p in calls)


@pytest.mark.any_version
def test_calls_have_sizes_that_are_no_powers_of_two():
    assert {50257, 1500, 197, 77} <= {size for p in drawn() for size in p.shape}


@pytest.mark.any_version
@of_each_call
def test_call_fits_a_gpu(problem):
    for each in ops.OPS[problem.op].operands(problem):
        assert math.prod(each.shape) * jnp.dtype(each.dtype).itemsize <= 2 << 30
    assert cases.memory(problem) <= 12 << 30
    if ops.OPS[problem.op].limit == "matmul":
        assert ops.floating_point_operations(problem) <= 2**44


@pytest.mark.any_version
@of_each_draw
def test_few_calls_are_large(draw):
    large = [each for each in drawn(draw) if cases._largest(each) > 256 << 20]
    assert 0 < len(large) <= 30


def test_memory_of_a_call():
    problem = ops.make("cross_entropy", (10, 100), "bfloat16")
    assert cases.memory(problem) == 1000 * (2 + 8) + 10 * (4 + 8) + 10 * (2 + 8)


@pytest.mark.any_version
@of_each_call
def test_call_can_be_traced(problem):
    op = ops.OPS[problem.op]

    def types(function):
        function = functools.partial(function, **ops.keywords(problem))
        solve = lambda *xs: op.apply(function, *op.prepare(function, *xs))  # noqa: E731
        return jax.eval_shape(solve, *run._types(problem))

    assert types(ops.ours(problem.op)) == types(op.upstream)


@pytest.mark.any_version
@of_each_draw
def test_quick_runs_an_example_of_each_op(draw):
    quick = [each.op for each in cases.problems(draw, gpu=True, quick=True)]
    assert quick == list(dict.fromkeys(each.op for each in drawn(draw)))


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("arguments", "draw"),
    [([], cases.FIRST), *((["--draw", name], draw) for name, draw in cases.DRAWS.items())],
)
def test_the_command_line_names_a_draw(arguments, draw):
    options = command_line._parser().parse_args(["calls", *arguments])
    assert command_line._problems(options, gpu=True) == drawn(draw)


# How None is judged

KERNEL = "warp"


def made_up_pair(named, default, *, taken, problem=None):
    """Results of a call, given speeds relative to plain JAX, or a status in place of one."""

    def result(implementation, algorithm, speed):
        result = Result(
            problem or HOST[0], "softmax", implementation, None, algorithm, error=1e-3, excess=0.5
        )
        if isinstance(speed, str):
            result.status = speed
        else:
            result.time_us, result.xla_time_us = 100.0 / speed, 100.0
        return result

    return [
        result(None, KERNEL if taken else XLA, default),
        result("cuda", KERNEL, named),
    ]


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("named", "default", "taken", "ahead", "missed", "slow"),
    [
        (1.05, 1.05, True, True, False, False),
        (1.05, 1.00, False, True, True, False),
        (1.05, 1.06, False, True, False, False),
        (1.04, 1.00, False, False, False, False),
        (1.04, 0.97, True, False, False, True),
        (2.00, 0.97, False, True, True, True),
        (0.50, 0.98, False, False, False, False),
        (REFUSED, 1.00, False, False, False, False),
        (WRONG, 0.97, False, False, False, True),
        (2.00, FAILED, False, True, True, False),
        (2.00, FAILED, True, True, False, False),
    ],
)
def test_a_call_is_missed_or_slow(named, default, taken, ahead, missed, slow):
    (call,) = report.calls(made_up_pair(named, default, taken=taken))
    assert (call.is_ahead, call.is_missed, call.is_slow) == (ahead, missed, slow)


def lines(*pairs):
    return report.demands_text([result for pair in pairs for result in pair])


@pytest.mark.any_version
def test_none_must_run_9_of_10_kernels_that_are_ahead():
    taken = made_up_pair(1.5, 1.5, taken=True)
    missed = made_up_pair(1.5, 1.0, taken=False)
    behind = made_up_pair(0.5, 1.0, taken=False)
    share, least = lines(*(9 * [taken]), missed, *(5 * [behind]))
    assert "In 10 of 15 calls the kernel is at least 1.05x plain JAX" in share
    assert "None runs it, or is as fast, in 9 of them (90%; asked are 90%): met." in share
    assert least.startswith("0 of 15 calls of None are below 0.98x")
    assert "met. The least is 1.000x" in least
    share, _ = lines(*(8 * [taken]), missed)
    assert "8 of them (89%; asked are 90%): not met." in share


@pytest.mark.any_version
def test_no_call_of_none_may_be_slow():
    good, slow = made_up_pair(0.5, 1.0, taken=False), made_up_pair(0.5, 0.974, taken=False)
    _, least = lines(good, slow)
    assert least.startswith("1 of 2 calls of None are below 0.98x")
    assert "not met. The least is 0.974x, softmax 2x3x33x33" in least


@pytest.mark.any_version
def test_without_a_speed_nothing_is_asked():
    assert lines(made_up_pair(REFUSED, FAILED, taken=False)) == []
    share, _ = lines(made_up_pair(REFUSED, 1.0, taken=False))
    assert "In 0 of 1 calls" in share
    assert ": met." in share


def made_up_run():
    """Of every third call None misses the kernel, one is slow, one refused, one wrong."""
    found = []
    for i, problem in enumerate(drawn()):
        named, default = (1.5, 1.0) if i % 3 == 0 else (1.2, 1.2)
        if i == 1:
            named, default = 0.9, 0.9
        if i in (2, 4):
            named = REFUSED if i == 2 else WRONG
        pair = made_up_pair(named, default, taken=i % 3 != 0, problem=problem)
        for each in pair:
            each.family = ops.OPS[problem.op].family
        found += pair
    return Run("calls", results.environment(commit="abc"), found)


@pytest.mark.any_version
def test_tables_summary_and_verdict_of_a_timed_run(capsys):
    done = made_up_run()
    for family in ops.FAMILIES:
        console().print(report.table([r for r in done.results if r.family == family]))
    console().print(report.summary(done.results))
    console().print(report.verdict(done, timed=True))
    out = capsys.readouterr().out
    assert out.count(" missed") >= 100
    assert all(each.shape_text() in out for each in drawn()[:2])
    (total,) = [line.split() for line in out.splitlines() if line.strip().startswith("all ")]
    assert total[1:3] == ["300", "298"]
    assert total[-3:] == ["297", "197", "1"]
    assert "None runs it, or is as fast, in 197 of them (66%; asked are 90%): not met." in out
    assert "1 of 599 results are wrong or failed" in out


@pytest.mark.any_version
def test_family_without_a_notable_call_has_no_table():
    assert report.table(made_up_pair(1.5, 1.5, taken=True)) is None


@pytest.mark.any_version
def test_json_round_trip(tmp_path):
    done = made_up_run()
    done.save(tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json") == done


# How it runs


@pytest.mark.any_version
@pytest.mark.skipif(run.has_gpu(), reason="a GPU is there")
def test_without_a_gpu_it_says_that_no_speed_was_measured(tmp_path, capsys):
    path = tmp_path / "run.json"
    assert command_line.main(["calls", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert f"All {2 * len(HOST)} results are right" in out
    assert "No speed was measured" in out
    assert "plain JAX" not in out
    done = Run.load(path)
    assert done.command == "calls"
    assert [each.problem for each in done.results] == [p for p in HOST for _ in range(2)]
    assert [each.implementation for each in done.results] == len(HOST) * [None, "interpret"]
    assert [each.ours for each in done.results] == len(HOST) * [False, True]


@pytest.mark.skipif(run.has_gpu(), reason="a GPU is there")
def test_wrong_result_is_reported(monkeypatch, capsys):
    upstream = ops.ours("transpose")
    twice = lambda x, axes, **more: 2 * upstream(x, axes, **more)  # noqa: E731
    monkeypatch.setattr(ops, "ours", lambda op: twice)
    assert command_line.main(["calls", "--only", "^transpose"]) == 1
    assert "2 of 2 results are wrong or failed" in capsys.readouterr().out


@pytest.mark.any_version
@pytest.mark.parametrize("commit", ["abc", "def"])
def test_a_run_that_was_cut_short_goes_on(commit, tmp_path, monkeypatch):
    """Where it is of the same sources; else it begins anew."""
    out = tmp_path / "run.json"
    arguments = ["calls", "--only", "^(softmax|transpose) ", "--json", str(out), "--commit"]
    chosen = [each for each in HOST if each.op in ("softmax", "transpose")]
    solved = []

    def solve(self, problems, *, announce):
        for each, variants in problems:
            assert variants == [Variant(), Variant("interpret")]
            solved.append(each)
            family = ops.OPS[each.op].family
            yield [Result(each, family, v.implementation, None, KERNEL) for v in variants]

    def cut_short(self, problems, *, announce):
        yield from solve(self, problems[:2], announce=announce)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "has_gpu", lambda: False)
    monkeypatch.setattr(run.Runner, "run_all", cut_short)
    with pytest.raises(KeyboardInterrupt):
        command_line.main([*arguments, "abc"])
    assert not out.exists()
    solved.clear()
    monkeypatch.setattr(run.Runner, "run_all", solve)
    assert command_line.main([*arguments, commit]) == 0
    assert solved == (chosen[2:] if commit == "abc" else chosen)
    assert [each.problem for each in Run.load(out).results] == [p for p in chosen for _ in range(2)]


@pytest.mark.any_version
def test_timed_command_prints_a_summary(monkeypatch, capsys):
    """As on a GPU."""
    done = made_up_run()
    options = command_line._parser().parse_args(["calls"])
    unfinished = Unfinished(Run("calls", results.environment(commit="abc")), None)
    by_problem = iter(zip(done.results[::2], done.results[1::2], strict=True))
    monkeypatch.setattr(run.Runner, "run_all", lambda *_, **__: map(list, by_problem))
    solve, _ = command_line._COMMANDS["calls"]
    solve(unfinished, drawn(), options, True)
    out = capsys.readouterr().out
    assert "summary, relative to plain JAX" in out
    assert "Not run: warp on" in out
    assert unfinished.run.results == done.results


@pytest.mark.parametrize("option", ["--peers", "--algorithm=warp", "--plot=figures"])
def test_options_that_it_does_not_have(option, capsys):
    with pytest.raises(SystemExit) as exit_info:
        command_line.main([option, "calls"])
    assert exit_info.value.code == 2
    assert f"calls has no {option.partition('=')[0]}" in capsys.readouterr().err
