"""Figures of a run: rates over sizes, comparisons with XLA, and ladders."""

from __future__ import annotations

import itertools
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence

from matplotlib import patches, ticker
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure

from bench import documents, ops, report
from bench.results import ProgramResult, Result, Run

# Okabe and Ito's colours, which people with colour vision deficiencies can distinguish, with wine
# instead of their yellow, which is faint on white. Markers distinguish the lines without colour.
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
      The files: a figure for each series of sizes, and one per family for all other results; for
      whole programs a single one.
    """
    timed = [each for each in run.results if each.timed]
    if run.command == "programs":
        figures = {"programs": _draw_programs(timed)} if timed else {}
    else:
        figures = _draw_ops(run.command, timed)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        _put_title(figure, run)
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=150)
    return paths


def _draw_ops(command: str, timed: Sequence[Result]) -> dict[str, Figure]:
    """Returns figures by name."""
    figures: dict[str, Figure] = {}
    for family, group in _grouped(timed, lambda each: each.family):
        lines = [each for each in group if each.problem.series is not None]
        for (op, series), points in _grouped(
            lines, lambda each: (each.problem.op, each.problem.series)
        ):
            name = f"{command}_{op}" + ("" if series == "ladder" else "_sizes")
            figures[name] = _draw_lines(op, series, points)
        if rest := [each for each in group if each.problem.series is None and each.ours]:
            name = f"{command}_{family}"
            figures[name] = _draw_bars(rest) if command == "ladder" else _draw_dots(rest)
    return figures


def _draw_lines(op: str, series: str, results: Sequence[Result]) -> Figure:
    """Rate over size, a panel for each dtype: our algorithms, XLA and the ceiling."""
    panels = _grouped(results, lambda each: each.problem.dtype)
    title = f"{op} ladder" if series == "ladder" else op
    figure = _figure(3 + 5 * len(panels), 6, f"{title}, {', '.join(each for each, _ in panels)}")
    same_scale = ops.OPS[op].limit != "matmul"  # a ceiling of arithmetic is the dtype's own
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=same_scale)
    for axes, (dtype, points) in zip(grid[0], panels, strict=True):
        styles = zip(itertools.cycle(_COLORS), itertools.cycle(_MARKERS), strict=False)
        if series == "ladder":
            lines = _grouped(points, lambda each: each.algorithm)
        else:  # one line, though the algorithm may change with the size
            lines = [("ours", [each for each in points if each.ours])]
        for (label, line), (color, marker) in zip(lines, styles, strict=False):
            xs = [each.problem.size for each in line]
            axes.plot(xs, [each.rate for each in line], color=color, marker=marker, label=label)
        xs = {each.problem.size: each.xla_rate for each in points}
        axes.plot(list(xs), list(xs.values()), **_XLA_STYLE)
        axes.axhline(points[0].ceiling, **_CEILING_STYLE, label="ceiling, measured")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        superscripts = re.sub(r"2\^(\d+)", r"$2^{\1}$", series)
        axes.set_xlabel("M = N, with K = 1024" if series == "ladder" else superscripts)
        if len(panels) > 1:
            axes.set_title(dtype, fontsize=10)
        axes.grid(alpha=0.3)
    grid[0][0].set_ylabel(ops.OPS[op].unit)
    for axes in grid[0]:
        _label_plainly(axes.yaxis)
    _put_legend(figure, grid[0][0])
    return figure


def _draw_dots(results: Sequence[Result]) -> Figure:
    """Every problem is a line with two dots: ours and XLA, as fractions of the ceiling.

    The line between the dots has the colour of the faster one.
    """
    figure = _figure(10, 1.9 + 0.24 * len(results), f"{results[0].family}: ours and XLA")
    axes = figure.subplots()
    ours = [each.rate / each.ceiling for each in results]
    xla = [each.xla_rate / each.ceiling for each in results]
    rows = range(len(results))
    colors = [_COLORS[0] if a >= b else "lightgray" for a, b in zip(ours, xla, strict=True)]
    axes.hlines(rows, ours, xla, color=colors, linewidth=2)
    axes.scatter(ours, rows, color=_COLORS[0], label="ours", zorder=3)
    axes.scatter(xla, rows, color="black", marker="x", label="XLA", zorder=3)
    axes.axvline(1, **_CEILING_STYLE, label="ceiling, measured")
    axes.set_yticks(rows, [f"{each.problem}  [{each.algorithm}]" for each in results], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    _label_plainly(axes.xaxis, lambda part: f"{100 * part:g}%")
    axes.set_xlabel("rate, as a part of the ceiling")
    axes.grid(alpha=0.3)
    _put_legend(figure, axes)
    return figure


def _draw_programs(results: Sequence[ProgramResult]) -> Figure:
    """Every program is a line with a dot for each way to run it: speed, and temporary memory."""
    title = "whole programs, relative to plain JAX"
    figure = _figure(14, 1.9 + 0.24 * len(results), title)
    speed, memory = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    ways = dict.fromkeys(way.name for each in results for way in each.ways[1:])
    for name, color, marker in zip(ways, ("black", _COLORS[0]), "xo", strict=True):
        found = [(i, r, w) for i, r in enumerate(results) for w in r.ways if w.name == name]
        for axes, ratio in ((speed, ProgramResult.ratio), (memory, ProgramResult.memory_ratio)):
            xs = [ratio(r, w) or math.nan for _, r, w in found]
            rows = [i for i, _, _ in found]
            axes.scatter(xs, rows, color=color, marker=marker, label=name, zorder=3)
    for axes, text in ((speed, "times as fast"), (memory, "temporary memory")):
        axes.axvline(1, **_CEILING_STYLE, label="plain JAX")
        axes.set_xscale("log")
        _label_plainly(axes.xaxis)
        axes.set_xlabel(text)
        axes.grid(alpha=0.3)
    speed.set_yticks(range(len(results)), [str(each) for each in results], fontsize=8)
    speed.invert_yaxis()
    _put_legend(figure, speed)
    return figure


def _draw_bars(results: Sequence[Result]) -> Figure:
    """A panel for each shape: the time of each algorithm, its speed-up and the document's."""
    panels = _grouped(results, lambda each: each.problem.shape_text())
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    bars = max(len(each) for _, each in panels)
    first = results[0].problem
    figure = _figure(
        max(8, 1.5 + 5 * columns),
        1.5 + rows * (0.9 + 0.26 * bars),
        f"{first.op} ladder, {first.dtype}: speed-ups over the first step",
    )
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, points) in zip(grid.flat, panels, strict=False):
        times = [each.time_us for each in points]
        ceiling_us, xla_us = _ceiling_us(points[0]), points[0].xla_time_us
        is_step = [each.algorithm in documents.LADDERS[each.family].steps for each in points]
        colors = [_COLORS[0] if each else _COLORS[2] for each in is_step]
        axes.barh([each.algorithm for each in points], times, color=colors, height=0.7)
        for y, each in enumerate(points):
            axes.annotate(
                _speedup_text(each),
                (max(each.time_us, xla_us), y),  # to the right of XLA's line
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=7.5,
            )
        axes.axvline(xla_us, color="black", linestyle="--", label="XLA")
        axes.axvline(ceiling_us, **_CEILING_STYLE, label="time at the measured ceiling")
        axes.invert_yaxis()
        axes.set_xscale("log")
        # The ceiling of a tiny problem is far to the left, and would compress the bars.
        left = max(ceiling_us, min(*times, xla_us) / 10) / 1.5
        axes.set_xlim(left, max(times) * (max(times) / left) ** 0.4)
        _label_plainly(axes.xaxis)
        axes.set_xlabel("time, us")
        axes.tick_params(axis="y", labelsize=8)
        axes.set_title(title, fontsize=10)
    kinds = [
        patches.Patch(color=_COLORS[0], label="step of the document"),
        patches.Patch(color=_COLORS[2], label="further step"),
    ]
    _put_legend(figure, grid[0][0], kinds)
    return figure


def _speedup_text(result: Result) -> str:
    if result.speedup is None:
        return ""
    claimed = result.claimed_speedup
    document = "" if claimed in (None, 1) else f" (document {_times(claimed)})"
    return _times(result.speedup) + document


def _times(speedup: float) -> str:
    return f"{speedup:.0f}x" if speedup >= 100 else f"{speedup:.1f}x"


def _ceiling_us(result: Result) -> float:
    """The time of the problem at the ceiling's rate."""
    return result.time_us * result.rate / result.ceiling


def _figure(width: float, height: float, title: str) -> Figure:
    """Returns a figure that leaves room for its title and legend."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=11)
    return figure


def _put_title(figure: Figure, run: Run) -> None:
    """Adds the device and versions of the run to the title."""
    device, versions = report.environment_text(run).split("; ", 1)
    figure.suptitle(f"{figure.get_suptitle()}; {device}\n{versions}", fontsize=10)


def _put_legend(figure: Figure, axes: Axes, more: Sequence[Artist] = ()) -> None:
    """Puts one legend for all panels below them."""
    handles = [*more, *axes.get_legend_handles_labels()[0]]
    columns = -(-len(handles) // 2) if len(handles) > 5 else len(handles)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8)


def _label_plainly(axis: Axis, text: Callable[[float], str] = "{:g}".format) -> None:
    """Gives a logarithmic axis a few ticks with plain numbers, even if it is short."""
    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    if decades < 0.7:
        axis.set_major_locator(ticker.MaxNLocator(6, steps=(1, 2, 5, 10)))
    else:
        steps = (1, 2, 5) if decades < 3 else (1,)
        axis.set_major_locator(ticker.LogLocator(subs=steps, numticks=10))
    axis.set_minor_locator(ticker.NullLocator())
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: text(value)))


def _grouped(results: Iterable[Result], key) -> list[tuple]:
    """Groups by key, in order of first appearance."""
    groups: dict = {}
    for each in results:
        groups.setdefault(key(each), []).append(each)
    return list(groups.items())
