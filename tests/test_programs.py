"""Whole programs: the same text for plain JAX and for ours, checked, and judged by its floors."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bench.run
import jax_gpuops
from bench import __main__ as command_line
from bench import measure, plot, results
from bench.problem import Floor, Problem
from bench.programs import cases, command, report, run, texts
from bench.report import console
from bench.results import FAILED, REFUSED, RIGHT, WRONG, ProgramResult, Run, Unfinished, Way

HOST = cases.problems(gpu=False)
GPU = cases.problems(gpu=True)


def host_problem(name: str) -> Problem:
    return next(each for each in HOST if each.op == name)


# What it covers


@pytest.mark.parametrize("gpu", [False, True])
def test_every_program_has_a_problem(gpu):
    assert {each.op for each in cases.problems(gpu=gpu)} == texts.PROGRAMS.keys()
    assert len(cases.problems(gpu=gpu, quick=True)) == len(texts.PROGRAMS)
    assert {each.op for each in cases.problems(["heads"], gpu=gpu)} == {"heads"}


def test_shapes_of_a_gpu_are_those_of_models():
    assert all(each.model for each in GPU)
    for head in ("lm_head", "lm_head_loss"):
        assert {32000, 50257, 128256, 262144} <= {p.shape[-1] for p in GPU if p.op == head}
    lengths = {p.shape[1] for p in GPU if p.op == "attention"}
    assert {197, 512, 1500, 2048, 4096} <= lengths


@pytest.mark.parametrize("problem", GPU, ids=str)
def test_problems_of_a_gpu_can_be_traced(problem):
    program = texts.PROGRAMS[problem.op]
    operands = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in program.operands(problem).values()]
    plain, ours = (
        jax.eval_shape(run._function(problem, functions, gradient=False), operands)
        for functions in (texts.plain(), texts.ours())
    )
    assert plain == ours
    assert len(jax.tree.leaves(plain)) == len(program.results)


# What it compares


@pytest.mark.any_version
@pytest.mark.parametrize("problem", HOST, ids=str)
def test_program_is_right_in_all_ways(problem):
    found = run.Runner(timed=False).run(problem)
    assert [each.gradient for each in found] == [False, True][: len(found)]
    assert (len(found) == 2) == texts.PROGRAMS[problem.op].has_gradient
    for each in found:
        assert [way.name for way in each.ways] == ["plain JAX", "None", run.named()]
        assert [(way.status, way.message) for way in each.ways] == 3 * [(RIGHT, "")]
        plain, _, named = each.ways
        assert not plain.calls
        assert named.calls
        assert not each.timed


@pytest.mark.parametrize(
    "masks", [{"where": True}, {"causal": True}, {"where": True, "causal": True, "scale": 0.3}]
)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_plain_jax_solves_the_same_problem(name, masks):
    x = jax.random.normal(jax.random.key(0), (2, 5, 7))
    allowed = jnp.ones((5, 7), bool).at[:, 3].set(False)
    arguments = {**masks, **({"where": allowed} if "where" in masks else {})}
    mask = allowed if "where" in masks else jnp.ones((5, 7), bool)
    mask &= jnp.tri(5, 7, dtype=bool) if "causal" in masks else True
    expected = getattr(jax.nn, name)(masks.get("scale", 1) * x, where=mask)
    for functions in (texts.plain(), texts.ours()):
        actual = getattr(functions, name)(x, **arguments)
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("functions", [texts.plain(), texts.ours()])
def test_mask_by_hand_is_the_causal_one(functions):
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 9, 2, 4))
    expected = texts._attention(functions, query, key, value, mask="causal")
    actual = texts._attention(functions, query, key, value, mask="causal", by_hand=True)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def dtypes_inside(jaxpr):
    for equation in jaxpr.eqns:
        yield from (v.aval.dtype for v in equation.outvars)
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner, "jaxpr"):
                yield from dtypes_inside(inner.jaxpr)


@pytest.mark.parametrize("problem", [p for p in HOST if p.op != "sampling"], ids=str)
def test_reference_computes_in_float64_throughout(problem):
    """All but the random numbers of sampling, which must be the same."""
    has_gradient = texts.PROGRAMS[problem.op].has_gradient
    arguments = jax.eval_shape(lambda: run._arguments(problem)[: 1 + has_gradient])
    function = run._function(problem, texts.plain(), gradient=has_gradient)
    with jax.enable_x64(True):
        jaxpr = jax.make_jaxpr(lambda *xs: function(*jax.tree.map(run._widen, xs)))(*arguments)
        floats = {d for d in dtypes_inside(jaxpr.jaxpr) if jnp.issubdtype(d, jnp.inexact)}
    assert floats == {np.dtype("float64")}


# How it judges


LOSS = Problem("lm_head", (3, 4, 5), "float32")
REFERENCE = (np.float64(2.0), (np.linspace(-1, 1, 12).reshape(3, 4), np.ones((4, 5))))


def judged(changed, gradient=True, plain=REFERENCE):
    """The way named, after its results were held against plain JAX's and the reference."""
    result = ProgramResult(LOSS, gradient, [Way(run.PLAIN), Way(run.DEFAULT)])
    ys = [jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), y) for y in (plain, changed)]
    run._judge(result, result.ways, ys, REFERENCE)
    return result.ways[1]


def with_element(value):
    loss, (hidden, weights) = copy.deepcopy(REFERENCE)
    hidden[1, 2] = value
    return loss, (hidden, weights)


def test_judge_accepts_what_is_as_good_as_plain_jax(monkeypatch):
    monkeypatch.setattr(bench.run, "has_gpu", lambda: False)  # whose products are in TF32
    assert judged(REFERENCE).status == RIGHT
    element = REFERENCE[1][0][1, 2]
    plain = with_element(element + 4e-6)
    assert judged(with_element(element + 1.5e-5), plain=plain).status == RIGHT
    assert judged(with_element(element + 3e-5), plain=plain).status == WRONG


@pytest.mark.parametrize("value", [0.2, np.nan, np.inf])
def test_judge_rejects_one_wrong_element(value):
    way = judged(with_element(value))
    assert way.status == WRONG
    assert way.message.startswith("gradient of hidden: the error is")


def test_judge_rejects_other_shapes():
    loss, (hidden, weights) = REFERENCE
    assert judged((loss, (hidden[None], weights))).status == WRONG


@pytest.mark.parametrize("value", [100.0, np.nan])
def test_nothing_is_right_where_plain_jax_is_wrong(value):
    with pytest.raises(RuntimeError, match="plain JAX itself"):
        judged(REFERENCE, plain=with_element(value))


def test_tokens_must_be_the_same():
    problem = host_problem("sampling")
    tokens, logs = np.arange(6), np.linspace(-3, -1, 6)
    for other, status in ((tokens, RIGHT), (tokens + (tokens == 3), WRONG)):
        result = ProgramResult(problem, False, [Way(run.PLAIN), Way(run.DEFAULT)])
        ys = [(t, jnp.asarray(logs, jnp.float32)) for t in (tokens, other)]
        run._judge(result, result.ways, ys, (tokens, logs))
        assert result.ways[1].status == status


@pytest.mark.parametrize(
    ("name", "dtype", "result", "gpu", "rounding"),
    [
        ("lm_head", "float32", "float32", True, 2.0**-10),  # products are in TF32
        ("lm_head", "float32", "float32", False, 2.0**-23),
        ("lm_head", "bfloat16", "bfloat16", True, 2.0**-7),
        ("layer_norm", "float32", "float32", True, 2.0**-23),
        ("router", "bfloat16", "float32", True, 2.0**-23),
        ("router", "bfloat16", "int32", True, 0.0),
    ],
)
def test_rounding_that_a_result_may_have(monkeypatch, name, dtype, result, gpu, rounding):
    monkeypatch.setattr(bench.run, "has_gpu", lambda: gpu)
    assert run._rounding(Problem(name, (), dtype), jnp.zeros(3, result)) == rounding


@pytest.mark.any_version
def test_wrong_gradient_of_a_right_value_is_reported(monkeypatch):
    right = jax_gpuops.softmax

    @functools.wraps(right)
    def wrong(x, **arguments):
        return right(x, **arguments) + 0.01 * (x - jax.lax.stop_gradient(x))

    monkeypatch.setattr(jax_gpuops, "softmax", wrong)
    problem = next(p for p in HOST if p.op == "attention" and p.dtype == "float32")
    forward, gradient = run.Runner(timed=False).run(problem)
    assert [way.status for way in forward.ways] == [RIGHT, RIGHT, RIGHT]
    assert [way.status for way in gradient.ways] == [RIGHT, WRONG, WRONG]
    assert "gradient of" in gradient.ways[1].message


def test_wrong_result_is_reported_and_has_no_speed(monkeypatch, tmp_path, capsys, fake_profiler):
    right = jax_gpuops.transpose
    monkeypatch.setattr(jax_gpuops, "transpose", lambda x, axes: right(x, axes) * 1.1)
    runner = functools.partial(run.Runner, timed=True)
    monkeypatch.setattr(run, "Runner", lambda **_: runner())
    path = tmp_path / "run.json"
    assert command_line.main(["programs", "images", "--only", "float32", "--json", str(path)]) == 1
    out = capsys.readouterr().out
    assert "2 of 3 results are wrong or failed" in out
    assert "WRONG, images: the error is" in out
    done = Run.load(path)
    (result,) = done.results
    assert [way.status for way in result.ways] == [RIGHT, WRONG, WRONG]
    assert [way.timed for way in result.ways] == [True, False, False]
    assert not done.succeeded


@pytest.mark.parametrize(("error", "status"), [(ValueError, REFUSED), (RuntimeError, FAILED)])
def test_program_that_kernels_do_not_take(monkeypatch, error, status):
    right = jax_gpuops.transpose

    def refusing(x, axes):
        if jax_gpuops._implementation._default.value is not None:
            raise error("no kernel takes it")
        return right(x, axes)

    monkeypatch.setattr(jax_gpuops, "transpose", refusing)
    (result,) = run.Runner(timed=False).run(host_problem("images"))
    assert [way.status for way in result.ways] == [RIGHT, RIGHT, status]
    assert result.ways[2].message == "no kernel takes it"
    assert len(report.refusals([result])) == (status == REFUSED)


def test_program_without_our_kernels_fails(monkeypatch):
    """A silent fallback would compare XLA with XLA."""
    monkeypatch.setattr(texts, "ours", texts.plain)
    (result,) = run.Runner(timed=False).run(host_problem("images"))
    assert [way.status for way in result.ways] == [RIGHT, RIGHT, FAILED]
    assert "does not call our kernels" in result.ways[2].message


def test_failure_of_plain_jax_fails_all(monkeypatch):
    def broken(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(run, "_reference", broken)
    (result,) = run.Runner(timed=False).run(host_problem("images"))
    assert [(way.status, way.message) for way in result.ways] == 3 * [(FAILED, "out of memory")]


# How it measures, and what it asks


@pytest.fixture
def fake_profiler(monkeypatch):
    """Every call takes two kernels and 200 us, in loops 205 us."""
    monkeypatch.setattr(
        measure, "_kernel_runs", lambda call, n, **_: n * [[("first", 150.0), ("second", 50.0)]]
    )
    monkeypatch.setattr(measure, "loop", lambda call, repeats: 205e-6)


@pytest.mark.usefixtures("fake_profiler")
def test_timed_run_reports_speed_memory_and_kernels():
    (result,) = run.Runner(timed=True).run(host_problem("images"))
    for way in result.ways:
        assert (way.kernel_us, way.loop_us, way.time_us) == (200, pytest.approx(205), 200)
        assert way.kernels == 2
        assert way.temporary_bytes is not None
        assert result.ratio(way) == 1
    assert result.ways[2].calls == {"transpose": 1}


@pytest.mark.usefixtures("fake_profiler")
def test_timed_command_prints_tables_and_a_summary(capsys):
    options = command_line._parser().parse_args(["programs", "images", "--quick"])
    done = Run("programs", results.environment())
    command.solve(Unfinished(done, None), [host_problem("images")], options, gpu=True)
    out = capsys.readouterr().out
    assert "a data pipeline" in out
    assert "200.0" in out
    assert "summary" in out
    assert all(result.timed for result in done.results)


def test_bytes_of_the_results_of_a_compiled_program():
    x = jnp.ones((8, 4))
    compiled = jax.jit(lambda x: (x, x.sum(0))).lower(x).compile()
    assert measure._result_bytes(measure.Call(compiled, [x])) == 4 * (32 + 4)


def test_iterations_that_launch_different_kernels_have_no_kernel_time(monkeypatch):
    profiler = pytest.importorskip("jax.experimental.mosaic.gpu.profiler")

    def measured(cupti, function, **_):
        def run(*arguments):
            raise RuntimeError("Kernel names are not consistent across iterations")

        return run

    monkeypatch.setattr(profiler.Cupti, "measure", measured)
    assert measure._kernel_runs(measure.Call(jax.jit(jnp.sin), [1.0]), 3) == []


@pytest.mark.any_version
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("problem", GPU, ids=str)
def test_floors_are_those_of_the_plan(problem, gradient):
    swapped, named = (cases.floor(problem, gradient=gradient, named=n) for n in (False, True))
    assert swapped.ratio == 0.98
    is_small = problem.op == "lm_head_loss" or (problem.op == "lm_head" and not problem.options)
    memory = 0.35 if is_small and gradient else None
    assert swapped.memory == memory
    assert (named and named.memory) == memory
    named_ratios = {
        "attention 4x2048x16x128 bfloat16 mask=causal (Pythia 1.4B)": 1.8,
        "lm_head 8192x2048x50257 bfloat16 (GPT-Neo 1.3B)": 2.0,
        "mlp 8192x4096x16384 bfloat16 activation=gelu (GPT-J 6B)": 1.0,
    }
    assert (named and named.ratio) == (named_ratios.get(str(problem)) if gradient else None)


@pytest.mark.parametrize(
    ("floor", "met"),
    [
        (Floor(ratio=0.98), True),
        (Floor(ratio=1.8), True),
        (Floor(ratio=2.1), False),
        (Floor(memory=0.35), True),
        (Floor(memory=0.2), False),
        (Floor(ratio=0.98, memory=0.2), False),
        (Floor(ratio=2.1, memory=0.35), False),
        (None, None),
    ],
    ids=str,
)
def test_program_twice_as_fast_as_plain_jax_in_a_quarter_of_its_memory(floor, met):
    result = made_up_result(LOSS, floor=floor)
    assert result.meets_floor(result.ways[2]) is met
    assert result.meets_floor(result.ways[0]) is None
    result.ways[2].status = WRONG
    assert result.meets_floor(result.ways[2]) is None


def test_memory_floor_is_not_met_by_a_program_whose_memory_is_unknown():
    result = made_up_result(LOSS, floor=Floor(memory=0.35))
    result.ways[2].temporary_bytes = None
    assert result.meets_floor(result.ways[2]) is False


def made_up_result(problem, floor=None, gradient=True):
    def way(name, us, megabytes, **more):
        return Way(
            name, temporary_bytes=megabytes * 10**6, error=1e-3, excess=0.5,
            kernels=9, kernel_us=us, loop_us=us + 1, time_us=us, **more,
        )  # fmt: skip

    ways = [
        way("plain JAX", 2000.0, 400),
        way("None", 2100.0, 400, floor=Floor(ratio=0.98)),
        way("cuda", 1000.0, 100, floor=floor, calls={"softmax": 1, "softmax_tangent": 2}),
    ]
    return ProgramResult(problem, gradient, ways)


def made_up_run():
    made_up = [made_up_result(problem, Floor(ratio=1.8, memory=0.35)) for problem in GPU]
    return Run("programs", results.environment(commit="abc"), made_up)


# What it shows


@pytest.mark.any_version
def test_tables_and_verdict_of_a_timed_run(capsys):
    done = made_up_run()
    for name in texts.PROGRAMS:
        own = [each for each in done.results if each.problem.op == name]
        console().print(report.table(own, timed=True))
    console().print(report.summary(done.results))
    console().print(report.verdict(done, timed=True))
    out = capsys.readouterr().out
    assert "Pythia 1.4B" in out
    assert "softmax, softmax_tangent x 2" in out
    assert f"{len(GPU)} of {2 * len(GPU)} results meet their floor" in out
    assert "gradient by None: 0.95x, 1.00x memory; floor 0.98x" in out
    assert "x plain" in out


@pytest.mark.any_version
def test_figure_of_a_timed_run_and_of_its_file(tmp_path):
    done = made_up_run()
    done.results[0].ways[0].temporary_bytes = 0  # no ratio to show
    done.results[1].ways[1].status = WRONG
    done.save(tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json") == done
    (path,) = plot.draw(done, tmp_path)
    assert path.name == "programs.png"
    assert path.stat().st_size > 10_000
    path.unlink()
    assert command_line.main(["plot", str(tmp_path / "run.json"), "--out", str(tmp_path)]) == 0
    assert path.exists()


@pytest.mark.any_version
@pytest.mark.skipif(run.named() == "cuda", reason="a GPU is there")
def test_without_a_gpu_it_says_that_no_speed_was_measured(tmp_path, capsys):
    path = tmp_path / "run.json"
    arguments = ["programs", "images", "heads", "--quick", "--json", str(path), "--plot"]
    assert command_line.main([*arguments, str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "All 9 results are right" in out
    assert "No speed was measured" in out
    assert "nothing to draw" in out
    assert "time us" not in out
    done = Run.load(path)
    assert done.command == "programs"
    assert [str(each) for each in done.results] == [
        "images 2x9x11x3 bfloat16 to=NCHW forward",
        "heads 2x9x3x8 bfloat16 forward",
        "heads 2x9x3x8 bfloat16 gradient",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attn"], "'attn' is not one of attention, lm_head"),
        (["attention", "--only", "rnn"], "no problem matches"),
        (["--peers"], "leave out --peers"),
    ],
)
def test_usage_errors_name_what_is_accepted(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        command_line.main(["programs", *arguments])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_a_program_runs_the_kernels_that_are_planned(capsys):
    with pytest.raises(SystemExit):
        command_line.main(["--algorithm", "warp", "--quick", "programs"])
    assert "leave out --algorithm" in capsys.readouterr().err


def test_help_lists_the_programs(capsys):
    with pytest.raises(SystemExit):
        command_line.main(["programs", "--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in texts.PROGRAMS)
