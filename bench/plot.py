"""Figures of a run: rates over sizes, comparisons with XLA, and ladders."""

from __future__ import annotations

import itertools
import math
import pathlib
from collections.abc import Iterable, Sequence

from matplotlib import ticker
from matplotlib.axis import Axis
from matplotlib.figure import Figure

from bench import ops, report
from bench.results import XLA, Result, Run

# Okabe and Ito's colours, which people with colour vision deficiencies can tell apart, but wine for
# their yellow, which is faint on white. Markers tell the lines apart without any colour.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#882255")
_MARKERS = "osD^vP*X"
_XLA_STYLE = {"color": "black", "linestyle": "--", "marker": "x", "label": "XLA"}
_CEILING_STYLE = {"color": "gray", "linestyle": ":"}


def draw(run: Run, folder: pathlib.Path) -> list[pathlib.Path]:
    """Draws the figures of a run.

    Args:
      run: the run; results without a speed are left out.
      folder: where the PNG files go; made if missing.

    Returns:
      The files: for each line of sizes a figure, and for each family one of all that is on none.
    """
    timed = [each for each in run.results if each.timed]
    figures: dict[str, Figure] = {}
    for family, group in _grouped(timed, lambda each: each.family):
        lines = [each for each in group if each.problem.series is not None]
        for (op, series), points in _grouped(
            lines, lambda each: (each.problem.op, each.problem.series)
        ):
            name = f"{run.command}_{op}" + ("" if series == "ladder" else "_sizes")
            figures[name] = _draw_lines(op, series, points)
        if rest := [
            each for each in group if each.problem.series is None and each.algorithm != XLA
        ]:
            name = f"{run.command}_{family}"
            figures[name] = _draw_bars(rest) if run.command == "ladder" else _draw_dots(rest)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        figure.text(0.5, 0.005, report.environment_text(run), ha="center", fontsize=7, color="gray")
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=150)
    return paths


def _draw_lines(op: str, series: str, results: Sequence[Result]) -> Figure:
    """Rate over size, a panel for each dtype: our algorithms, XLA and the ceiling."""
    panels = _grouped(results, lambda each: each.problem.dtype)
    figure = _figure(2 + 5 * len(panels), 5)
    grid = figure.subplots(1, len(panels), squeeze=False)
    for axes, (dtype, points) in zip(grid[0], panels, strict=True):
        styles = zip(itertools.cycle(_COLORS), itertools.cycle(_MARKERS), strict=False)
        if series == "ladder":
            lines = _grouped(points, lambda each: each.algorithm)
        else:  # one line, though the algorithm may change with the size
            lines = [("ours", [each for each in points if each.algorithm != XLA])]
        for (label, line), (color, marker) in zip(lines, styles, strict=False):
            xs = [each.problem.size for each in line]
            axes.plot(xs, [each.rate for each in line], color=color, marker=marker, label=label)
        xs = {each.problem.size: each.xla_rate for each in points}
        axes.plot(list(xs), list(xs.values()), **_XLA_STYLE)
        axes.axhline(points[0].ceiling, **_CEILING_STYLE, label="ceiling, measured")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("M = N, with K = 1024" if series == "ladder" else series)
        axes.set_ylabel(ops.OPS[op].unit)
        axes.set_title(f"{op}{' ladder' if series == 'ladder' else ''}, {dtype}")
        _label_plainly(axes.yaxis, "{:g}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return figure


def _draw_dots(results: Sequence[Result]) -> Figure:
    """Every problem is a line with two dots: ours and XLA, as parts of the ceiling."""
    figure = _figure(9, 1.6 + 0.2 * len(results))
    axes = figure.subplots()
    rows = range(len(results))
    axes.scatter(
        [each.rate / each.ceiling for each in results],
        rows,
        color=_COLORS[0],
        label="ours",
        zorder=3,
    )
    axes.scatter(
        [each.xla_rate / each.ceiling for each in results],
        rows,
        color="black",
        marker="x",
        label="XLA",
        zorder=3,
    )
    axes.axvline(1, **_CEILING_STYLE, label="ceiling, measured")
    axes.set_yticks(rows, [f"{each.problem}  [{each.algorithm}]" for each in results], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    _label_plainly(axes.xaxis, "{:.0%}")
    axes.set_xlabel("rate, as a part of the ceiling")
    axes.set_title(f"{results[0].family}: ours and XLA")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def _draw_bars(results: Sequence[Result]) -> Figure:
    """A panel for each shape: the time of each algorithm, its speed-up and the document's."""
    panels = _grouped(results, lambda each: f"{each.problem.op} {each.problem.shape_text()}")
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    bars = max(len(each) for _, each in panels)
    figure = _figure(1.5 + 5 * columns, 0.8 + rows * (0.9 + 0.26 * bars))
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, points) in zip(grid.flat, panels, strict=False):
        times = [each.time_us for each in points]
        axes.barh([each.algorithm for each in points], times, color=_COLORS[0])
        for y, each in enumerate(points):
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
            axes.text(each.time_us, y, _speedup_text(each), va="center", fontsize=7, bbox=behind)
        axes.axvline(points[0].xla_time_us, color="black", linestyle="--", label="XLA")
        axes.axvline(_ceiling_us(points[0]), **_CEILING_STYLE, label="ceiling, measured")
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlim(right=max(times) * 10)
        _label_plainly(axes.xaxis, "{:g}")
        axes.set_xlabel("time, us")
        axes.tick_params(axis="y", labelsize=7)
        axes.set_title(title, fontsize=9)
        axes.legend(fontsize=7)
    return figure


def _speedup_text(result: Result) -> str:
    if result.speedup is None:
        return ""
    claimed = result.claimed_speedup
    document = "" if claimed in (None, 1) else f" (document {claimed:.1f}x)"
    return f" {result.speedup:.1f}x{document}"


def _ceiling_us(result: Result) -> float:
    """The time of the problem at the ceiling's rate."""
    return result.time_us * result.rate / result.ceiling


def _figure(width: float, height: float) -> Figure:
    """Returns a figure with room for a line below."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.03, 1, 0.97))
    return figure


def _label_plainly(axis: Axis, form: str) -> None:
    """Gives a logarithmic axis a handful of ticks without powers of ten, however short it is."""
    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    if decades < 0.7:
        axis.set_major_locator(ticker.MaxNLocator(6))
    else:
        steps = (1, 2, 5) if decades < 2.5 else (1,)
        axis.set_major_locator(ticker.LogLocator(subs=steps, numticks=10))
    axis.set_minor_locator(ticker.NullLocator())
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: form.format(value)))


def _grouped(results: Iterable[Result], key) -> list[tuple]:
    """Groups by key, in order of first appearance."""
    groups: dict = {}
    for each in results:
        groups.setdefault(key(each), []).append(each)
    return list(groups.items())
