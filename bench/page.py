"""Results in a Markdown page: the tables of docs/performance.md.

A comment in the page, `<!-- main.json: REGEX -->`, selects the results in the table below it: those
of our kernels in that file whose problem, written "op shape dtype options | series", matches. The
table below `<!-- measurements.json: DEVICE KIND -->` counts the classes of problems for which
`None` runs our kernels on that kind of GPU, by the package's measurements.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence

from bench import ops, report, run
from bench.problem import Problem
from bench.results import Result, Run
from jax_gpuops import _measurements, _primitive

_MEASUREMENTS = "measurements.json"

_TABLE = re.compile(r"^<!-- (?P<file>\S+\.json): (?P<pattern>.+) -->\n(?:\|.*\n)*", re.MULTILINE)


def filled(page: str, folder: pathlib.Path) -> str:
    """Returns a page with new tables.

    Args:
      page: the text.
      folder: the folder of the results.

    Raises:
      ValueError: if no result matches the comment of a table, or a GPU has no measurements.
    """
    runs: dict[str, Run] = {}

    def table(match: re.Match[str]) -> str:
        name, pattern = match["file"], match["pattern"]
        comment = f"<!-- {name}: {pattern} -->\n"
        if name == _MEASUREMENTS:
            return comment + _classes_table(pattern)
        if name not in runs:
            runs[name] = Run.load(folder / name)
        results = [
            each
            for each in runs[name].results
            if each.ours and each.timed and re.search(pattern, _text(each.problem))
        ]
        if not results:
            raise ValueError(f"no result of {name} matches {pattern!r}")
        kind = runs[name].environment["device"]
        return comment + _table(results, kind)

    return _TABLE.sub(table, page)


def _text(problem: Problem) -> str:
    return f"{problem} | {problem.series or ''}"


def _table(results: Sequence[Result], kind: str) -> str:
    unit = ops.OPS[results[0].problem.op].unit
    head = f"| op | shape | dtype | options | time us | XLA us | {unit} | ceiling | x XLA | None |"
    lines = [head, "|---|---|---|---|--:|--:|--:|--:|--:|---|", *(_row(r, kind) for r in results)]
    return "\n".join(lines) + "\n"


def _row(result: Result, kind: str) -> str:
    problem, rate = result.problem, "{:.1f}" if result.operations else "{:.0f}"
    cells = [
        problem.op,
        " x ".join(map(str, problem.shape)),
        report.problem_cell(problem, "dtype"),
        _options(problem),
        _time(result.time_us),
        _time(result.xla_time_us),
        rate.format(result.rate),
        f"{100 * result.rate / result.ceiling:.0f} %{' (warm)' if result.warm else ''}",
        f"{result.ratio:.2f}",
        "kernel" if is_default(problem, kind) else "XLA",
    ]
    return f"| {' | '.join(cells)} |"


def _time(us: float | None) -> str:
    if us is None:
        return ""
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def _options(problem: Problem) -> str:
    words = []
    for name, value in problem.options.items():
        if name == "where" and value:
            words.append(" x ".join(map(str, problem.shape[-2:])) + " mask")
        elif value is True:
            words.append(name)
        elif isinstance(value, tuple):
            words.append(f"{name} {', '.join(map(str, value))}")
        elif value is not None and not (name == "axis" and value == -1):
            words.append(f"{name} {value}")
    return ", ".join(words)


def is_default(problem: Problem, kind: str) -> bool:
    """True if `implementation=None` runs our kernels for a problem on a kind of GPU."""
    calls = []
    for primitive, avals, params in run.kernel_calls(problem):
        kernel = _primitive.KERNELS[primitive]
        own = {k: v for k, v in params.items() if k not in ("implementation", "algorithm")}
        calls.append({"op": kernel.op, **kernel.problem(*avals, **own)})
    classes = _measurements.table().get(kind, [])
    return bool(calls) and all(
        any(_measurements.contains(entry, call) for entry in classes) for call in calls
    )


def _classes_table(kind: str) -> str:
    """Counts the classes of problems for which `None` runs our kernels on a kind of GPU."""
    classes = _measurements.table().get(kind)
    if not classes:
        raise ValueError(f"there are no measurements of {kind!r}")
    groups: dict[tuple[int, str, str], list[_measurements.Class]] = {}
    for each in classes:
        group = (ops.FAMILIES.index(each["op"]), _functions(each), each.get("precision", ""))
        groups.setdefault(group, []).append(each)
    lines = [
        "| family | function | dtypes | classes | least speed-up | level between neighbours |",
        "|---|---|---|--:|--:|--:|",
    ]
    for (_, functions, precision), own in sorted(groups.items()):
        found = {each.get("dtype") for each in own}
        dtypes = ", ".join(short for short, name in ops.SHORT_DTYPES.items() if name in found)
        if precision == "HIGHEST":
            dtypes += " at the highest precision"
        lines.append(f"| {own[0]['op']} | {functions} | {dtypes} | {_counts(own)} |")
    return "\n".join([*lines, f"| all | | | {_counts(classes)} |"]) + "\n"


def _functions(entry: _measurements.Class) -> str:
    """Returns the functions whose problems are in a class."""
    if "transpose_a" not in entry:
        return entry.get("function", entry["op"])
    if entry.get("gated"):
        return "glu"
    layer = entry.get("has_bias") or entry.get("epilogue", "none") != "none"
    return "linear" if layer else "matmul, dot_general, gemm"


def _counts(classes: Sequence[_measurements.Class]) -> str:
    level = sum(each.get("between", 0) >= 1 for each in classes)
    return f"{len(classes)} | {min(each['ratio'] for each in classes):.2f} | {level}"
