"""The table behind `implementation=None` rests on results that are committed beside it."""

import json
import pathlib

import jax
import pytest

from bench import ops
from bench.problem import Problem
from jax_gpuops import _measurements, _plan, _primitive

RESULTS = pathlib.Path(__file__).parents[1] / "bench" / "results"
FILES = {"NVIDIA H200": RESULTS / "h200" / "main.json"}


def kernel_problem(problem: Problem) -> dict | None:
    """The problem that a call is to our kernels, or None if XLA alone takes it."""
    operands = [
        jax.ShapeDtypeStruct(shape, problem.dtype)
        for shape in ops.OPS[problem.op].operands(problem.shape)
    ]
    with jax.enable_x64(problem.dtype in ("float64", "int64")):
        jaxpr = jax.make_jaxpr(lambda *xs: ops.ours(problem.op)(*xs, **ops.keywords(problem)))(
            *operands
        )
    for p, avals, params in _plan._calls(jaxpr.jaxpr):
        params = {k: v for k, v in params.items() if k not in ("implementation", "algorithm")}
        kernel = _primitive.KERNELS[p]
        return {"op": kernel.op, **kernel.problem(*avals, **params)}
    return None


def measured(path: pathlib.Path) -> list[tuple[dict, float]]:
    """The problems of a results file with the speed of our kernel relative to XLA."""
    pairs = []
    for result in json.loads(path.read_text())["results"]:
        ours = result["algorithm"] != "XLA" and result["named_algorithm"] is None
        if not ours or result["status"] != "right":
            continue
        fields = result["problem"]
        problem = Problem(
            fields["op"],
            tuple(fields["shape"]),
            fields["dtype"],
            {k: tuple(v) if isinstance(v, list) else v for k, v in fields["options"].items()},
        )
        if (described := kernel_problem(problem)) is not None:
            pairs.append((described, result["xla_time_us"] / result["time_us"]))
    return pairs


@pytest.mark.parametrize("kind", FILES)
def test_every_class_was_measured_to_be_level(kind):
    pairs = measured(FILES[kind])
    for entry in _measurements.table()[kind]:
        wanted = {k: v for k, v in entry.items() if k != "ratio"}
        ratios = [
            ratio
            for problem, ratio in pairs
            if all(_measurements._matches(v, problem.get(k)) for k, v in wanted.items())
        ]
        assert ratios, f"nothing that was measured lies in {wanted}"
        assert 1 <= entry["ratio"] <= min(ratios), wanted


def test_no_kind_of_gpu_is_without_results():
    assert _measurements.table().keys() == FILES.keys()
