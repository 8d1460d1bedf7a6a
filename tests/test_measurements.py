"""The table behind `implementation=None` rests on results that are committed beside it."""

import pathlib

import pytest

from bench import run
from bench.problem import Problem
from bench.results import RIGHT, Run
from jax_gpuops import _measurements, _primitive

RESULTS = pathlib.Path(__file__).parents[1] / "bench" / "results"
FILES = {"NVIDIA H200": RESULTS / "h200" / "main.json"}


def kernel_problems(problem: Problem) -> list[dict]:
    """The problems that our kernels are given by what is timed; none if XLA alone takes it."""
    described = []
    for primitive, avals, params in run.kernel_calls(problem):
        params = {k: v for k, v in params.items() if k not in ("implementation", "algorithm")}
        kernel = _primitive.KERNELS[primitive]
        described.append({"op": kernel.op, **kernel.problem(*avals, **params)})
    return described


def measured(path: pathlib.Path) -> list[tuple[dict, float]]:
    """The problems of a results file with the speed of our kernel relative to XLA."""
    return [
        (described, result.ratio)
        for result in Run.load(path).results
        if result.ours and result.named_algorithm is None and result.status == RIGHT
        for described in kernel_problems(result.problem)
    ]


@pytest.mark.parametrize("kind", FILES)
def test_every_class_was_measured_to_be_level(kind):
    pairs = measured(FILES[kind])
    for entry in _measurements.table()[kind]:
        ratios = [ratio for problem, ratio in pairs if _measurements.contains(entry, problem)]
        assert ratios, f"nothing that was measured lies in {entry}"
        assert 1 <= entry["ratio"] <= min(ratios), entry


def test_no_kind_of_gpu_is_without_results():
    assert _measurements.table().keys() == FILES.keys()


ROWS = {"op": "softmax", "function": "softmax", "dtype": "bfloat16", "columns": 2048}


@pytest.mark.parametrize("option", [{}, {"masked": 1}, {"queries": 2048}, {"scaled": 1}])
def test_a_class_is_of_masked_or_scaled_problems_only_if_it_says_so(option):
    problem = {**ROWS, "masked": 0, "queries": 0, "scaled": 0, **option}
    assert _measurements.contains({**ROWS, "ratio": 1.0}, problem) == (option == {})
    assert _measurements.contains({**ROWS, **option, "ratio": 1.0}, problem)
