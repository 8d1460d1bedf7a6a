"""Results of single calls as text: notable calls of each family, a summary, and a verdict."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from bench import ops
from bench.problem import Problem
from bench.report import last_word, new_table, number, problem_cell
from bench.results import Result, Run

AHEAD = 1.05
"""The least speed of our kernel relative to plain JAX at which `None` should run it."""

TAKEN = 0.9
"""The least fraction of these calls in which `None` must run it."""

LEAST = 0.98
"""The least speed of `None` relative to plain JAX in every call."""

LEGEND = f"""\
plain    what the user of JAX writes: jax.nn, jax.numpy, jax.lax, the formula of optax for cross
         entropy; scale and causal become jax.nn.softmax(where(mask, scale * x, -inf))
None     the function of jax_gpuops, with no implementation named
named    the same with implementation="cuda"
x plain  how many times as fast as plain JAX, which ran in turns with both on the same arrays
time us  of plain JAX: as in the main table, see python -m bench --help
missed   the kernel is at least {AHEAD:.2f} x plain JAX, and None runs XLA, which is slower than it
slow     None is below {LEAST:.2f} x plain JAX
where    a mask; where=padding is one of the ends of sequences, one for each batch
default  as an option: products of float32 at JAX's default precision; the others are at "highest"
The tables have only calls that are missed or slow, the summary has all."""


@dataclasses.dataclass(frozen=True)
class Call:
    """The results of a call with `implementation=None` and with a named implementation."""

    default: Result
    named: Result

    @property
    def problem(self) -> Problem:
        """The problem of the call."""
        return self.default.problem

    @property
    def is_ahead(self) -> bool:
        """True if the kernel is at least `AHEAD` times as fast as plain JAX."""
        return self.named.timed and self.named.ratio >= AHEAD

    @property
    def is_missed(self) -> bool:
        """True if the kernel is ahead, but `None` runs XLA, which is slower."""
        if not self.is_ahead or self.default.ours:
            return False
        return not (self.default.timed and self.default.ratio >= self.named.ratio)

    @property
    def is_slow(self) -> bool:
        """True if `None` is slower than `LEAST`."""
        return self.default.timed and self.default.ratio < LEAST


def calls(results: Sequence[Result]) -> list[Call]:
    """Pairs the results of each call: `None`, then the named kernel."""
    return [Call(*pair) for pair in zip(results[::2], results[1::2], strict=True)]


def table(results: Sequence[Result]) -> Table | None:
    """Returns the table of the notable calls of one family; None if there are none."""
    notable = [each for each in calls(results) if each.is_missed or each.is_slow]
    if not notable:
        return None
    table = new_table(results[0].family)
    problem_columns = ["model", "op", "shape", "dtype", "options"]
    for column in problem_columns:
        table.add_column(column, no_wrap=True)
    for column in ("plain: time us", "named", "x plain", "None", "x plain"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("note", no_wrap=True)
    for each in notable:
        named, default = each.named, each.default
        cells = [problem_cell(each.problem, column) for column in problem_columns]
        timed = next(result for result in (named, default) if result.timed)
        cells.append(number(timed.xla_time_us, "{:.2f}"))
        for result in (named, default):
            cells.append(result.algorithm if result.timed else result.status)
            cells.append(number(result.ratio if result.timed else None, "{:.2f}"))
        notes = [
            name for name, is_so in (("missed", each.is_missed), ("slow", each.is_slow)) if is_so
        ]
        table.add_row(*cells, ", ".join(notes))
    return table


def summary(results: Sequence[Result]) -> Table:
    """Returns a table that compares both with plain JAX: a row per family, and one for all."""
    table = new_table("summary, relative to plain JAX")
    table.add_column("family", no_wrap=True)
    for column in (
        "calls", "named: timed", "mean", "None: timed", "mean", "least",
        f"named {AHEAD:.2f} and more", "of these by None", f"None below {LEAST:.2f}",
    ):  # fmt: skip
        table.add_column(column, justify="right", no_wrap=True)
    families = [family for family in ops.FAMILIES if any(r.family == family for r in results)]
    for family in families:
        table.add_row(family, *_summary_cells([r for r in results if r.family == family]))
    table.add_section()
    table.add_row("all", *_summary_cells(results))
    return table


def _summary_cells(results: Sequence[Result]) -> list[str]:
    own = calls(results)
    named = [each.named.ratio for each in own if each.named.timed]
    default = [each.default.ratio for each in own if each.default.timed]
    ahead = [each for each in own if each.is_ahead]
    return [
        str(len(own)),
        str(len(named)),
        number(statistics.geometric_mean(named) if named else None, "{:.2f}"),
        str(len(default)),
        number(statistics.geometric_mean(default) if default else None, "{:.2f}"),
        number(min(default, default=None), "{:.2f}"),
        str(len(ahead)),
        str(sum(not each.is_missed for each in ahead)),
        str(sum(each.is_slow for each in own)),
    ]


def verdict(done: Run, *, timed: bool) -> Text:
    """Returns the last word on a run."""
    outcomes = [
        (f"{each.problem} by {each.implementation or 'None'}", each) for each in done.results
    ]
    return last_word(outcomes, demands_text(done.results), LEGEND, timed=timed)


def demands_text(results: Sequence[Result]) -> list[str]:
    """Returns the demands on `None` and whether they are met; nothing without a speed."""
    timed = [each for each in calls(results) if each.default.timed]
    if not timed:
        return []
    ahead = [each for each in timed if each.is_ahead]
    taken = len(ahead) - sum(each.is_missed for each in ahead)
    worst = min(timed, key=lambda each: each.default.ratio)
    slow = sum(each.is_slow for each in timed)
    share = f"{taken / len(ahead):.0%}; " if ahead else ""
    return [
        f"In {len(ahead)} of {len(timed)} calls the kernel is at least {AHEAD:.2f}x plain JAX. "
        f"None runs it, or is as fast, in {taken} of them ({share}asked are {TAKEN:.0%}): "
        f"{_met(taken >= TAKEN * len(ahead))}.",
        f"{slow} of {len(timed)} calls of None are below {LEAST:.2f}x plain JAX (asked are none): "
        f"{_met(slow == 0)}. The least is {worst.default.ratio:.3f}x, {worst.problem}.",
    ]


def _met(is_met: bool) -> str:
    return "met" if is_met else "not met"
