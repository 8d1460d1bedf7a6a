"""Results as text: a table for each family, and a verdict; and the progress of a run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from bench import documents, ops
from bench.problem import Problem, Variant
from bench.results import FAILED, REFUSED, WRONG, Result, Run, Unfinished, Way
from bench.run import Runner

_WIDTH = 240  # at most, of tables that go to a file or a pipe

_DTYPE_NAMES = {name: short for short, name in ops.SHORT_DTYPES.items()}

LEGEND = """\
time us  median time of the kernels of one call, from CUPTI
loop us  time of one call in a long loop of calls; for small problems that is Python and the launch
GB/s     the bytes of the op over its time, in 1e9: operands read once, results written once; of
         cross_entropy_grad the logits read twice and the gradient written; of softmax rows above
         60 MB, which no chip holds, a second read
TFLOP/s  the additions and multiplications of a matrix product over its time, in 1e12
ceiling  the rate as a part of what this GPU did in this run: for softmax and transpose copying
         2 GiB, for reductions and logsumexp summing 2 GiB, for products XLA's best one of that
         dtype and precision
x XLA    how many times as fast as XLA, which ran in turns with ours on the same arrays. For scale
         and causal it runs jax.nn.softmax(where(mask, scale * x, -inf)), for where the argument of
         that name, for cross entropy the formula of optax
floor    what ours must reach: a part of the ceiling, TFLOP/s, a number of times XLA's speed
error    against float64: relative for softmax, prod; relative to the sum of |x| for sum, mean; to
         max(1, |y|) for log_softmax, logsumexp; to the terms that are subtracted for *_vjp, *_grad
         and cross_entropy; in the Frobenius norm for products; the number of wrong elements for
         exact ops. A result whose error is beyond its bound is WRONG and has no speed; for XLA,
         which computes some 16-bit ops in 16 bits, that bound is 8 times ours
*_vjp    the backward pass alone, from what the forward pass keeps and a cotangent
*_grad   value and gradient of the mean loss; its logits are made by a kernel whose own time, from
         the same turns, is taken off
where    a causal mask with random holes, for all matrices alike; where=padding a mask of the ends
         of sequences, one for each batch
default  what runs unless the caller asks: ours where a measurement says it is level, else XLA
k        how many kernels a call launches
loop     as a note: on a large problem loop and kernels differ by over 5 %, for ours or XLA, or no
         kernel was seen, so the rate and the ratio are those of the loops
warm     operands below 60 MB stay in the L2 cache from call to call"""


def console() -> Console:
    """Returns the console to print to, as wide as the terminal or wide enough for the tables."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=_WIDTH)


def environment_text(run: Run) -> str:
    """Returns one line on the environment of a run."""
    e = run.environment
    versions = f"jax {e['jax']}, jaxlib {e['jaxlib']}, jax_gpuops {e['jax_gpuops']}"
    driver = f", driver {e['driver']}" if e["driver"] else ""
    commit = e["commit"][:12] if e["commit"] else "unknown"
    changes = " with uncommitted changes" if e["uncommitted_changes"] else ""
    return f"{e['device']}{driver}; {versions}, commit {commit}{changes}; {e['date'][:10]}"


def new_table(title: str | None = None) -> Table:
    """Returns a table without columns."""
    return Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))


def progress(console: Console) -> Progress:
    """Returns the progress bar of a run."""
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True)


def solve_all(
    runner: Runner,
    problems: Sequence[Problem],
    variants: Callable[[Problem], Sequence[Variant]],
    unfinished: Unfinished,
    bar: Progress,
    task: TaskID,
) -> None:
    """Runs the problems that an unfinished run lacks, and adds their results to it.

    Args:
      runner: runs them.
      problems: the problems.
      variants: returns the ways to run a problem.
      unfinished: the run.
      bar: the progress bar; it says what is done.
      task: the task of the bar, advanced by one for each problem.
    """
    missing = [each for each in problems if not unfinished.found(each)]
    bar.advance(task, len(problems) - len(missing))
    ways = [(each, variants(each)) for each in missing]
    for results in runner.run_all(ways, announce=lambda text: bar.update(task, description=text)):
        unfinished.add(results)
        bar.advance(task)


def table(results: Sequence[Result], *, timed: bool, ladder: bool = False) -> Table:
    """Returns the table of one family.

    Args:
      results: the results of the family; refused ones are left out.
      timed: True for the columns on speed.
      ladder: True for the columns on the speed-up over the first step.
    """
    first = results[0].problem
    title = f"{first.op} ladder, {first.dtype}" if ladder else results[0].family
    result = new_table(title)
    problem_columns = ["shape"] if ladder else ["op", "shape", "dtype", "options"]
    for name in [*problem_columns, "algorithm"]:
        result.add_column(name, no_wrap=True)
    numbers = ["error", "XLA error"]
    if timed:
        speeds = ["k", "time us", "loop us", "XLA us", ops.OPS[first.op].unit, "ceiling", "x XLA"]
        numbers = [*speeds, *numbers]
    if timed and ladder:
        numbers += ["speed-up", "document"]
    for name in numbers:
        result.add_column(name, justify="right", no_wrap=True)
    floors = timed and any(each.problem.floor is not None for each in results)
    if floors:
        result.add_column("floor", no_wrap=True)
    result.add_column("result" if not timed else "note", no_wrap=True)

    previous = None
    for each in results:
        if each.status == REFUSED:
            continue
        same = each.problem == previous
        if previous is not None and ladder and not same:
            result.add_section()
        cells = ["" if same else problem_cell(each.problem, name) for name in problem_columns]
        previous = each.problem
        cells.append(_algorithm_cell(each))
        if timed:
            cells += _speed_cells(each)
        cells += [_error_cell(each, each.error), _error_cell(each, each.xla_error)]
        if timed and ladder:
            cells += [number(each.speedup, "{:.1f}x"), number(each.claimed_speedup, "{:.1f}x")]
        if floors:
            cells.append("" if each.meets_floor is None else str(each.problem.floor))
        result.add_row(*cells, _note(each), style="bold red" if is_bad(each) else None)
    return result


def refusals(results: Iterable[Result]) -> list[str]:
    """Returns one line for each algorithm that did not support some problem."""
    refused: dict[str, list[Result]] = {}
    for each in results:
        if each.status == REFUSED:
            refused.setdefault(each.algorithm, []).append(each)
    lines = []
    for first, *others in refused.values():
        more = f" (and {len(others)} more)" if others else ""
        lines.append(f"Not run: {first.algorithm} on {first.problem}{more}: {first.message}")
    return lines


def floors_text(results: Iterable[Result]) -> list[str]:
    """Returns a line with the number of floors that are met, and one for each that is not."""
    held = [each for each in results if each.meets_floor is not None]
    if not held:
        return []
    missed = [each for each in held if not each.meets_floor]
    lines = [f"{len(held) - len(missed)} of {len(held)} results meet their floor."]
    for each in missed:
        reached = f"{each.rate / each.ceiling:.1%} of the ceiling, {each.ratio:.2f}x XLA"
        if each.problem.floor.tflops is not None:
            reached += f", {each.rate:.0f} TFLOP/s"
        lines.append(f"  {each.problem} by {each.algorithm}: {reached}; floor {each.problem.floor}")
    for floor in dict.fromkeys(each.problem.floor for each in held):
        if floor.mean_ratio is not None:
            ratios = [each.ratio for each in held if each.problem.floor == floor]
            lines.append(
                f"  geometric mean of the {len(ratios)} with floor {floor}: "
                f"{statistics.geometric_mean(ratios):.3f}x XLA; floor {floor.mean_ratio:.2f}x"
            )
    return lines


def ladder_text(family: str) -> str:
    """Returns a sentence on the source of a ladder's document."""
    ladder = documents.LADDERS[family]
    return f'The column "document" is from: {ladder.source}; measured on {ladder.device}.'


def verdict(run: Run, *, timed: bool) -> Text:
    """Returns the last word on a run."""
    outcomes = [(f"{each.problem} by {each.algorithm}", each) for each in run.results]
    return last_word(outcomes, floors_text(run.results), LEGEND, timed=timed)


def last_word(
    outcomes: Sequence[tuple[str, Result | Way]], floors: Sequence[str], legend: str, *, timed: bool
) -> Text:
    """Returns the wrong and failed results, the lines on floors, and the legend.

    Args:
      outcomes: all outcomes of a run, each with its name.
      floors: lines on the floors.
      legend: the legend of the tables.
      timed: False if no speed was measured.
    """
    ran = [(name, each) for name, each in outcomes if each.status != REFUSED]
    bad = [(name, each) for name, each in ran if is_bad(each)]
    text = Text()
    if bad:
        text.append(f"{len(bad)} of {len(ran)} results are wrong or failed:\n", style="bold red")
        for name, each in bad:
            text.append(f"  {name}: {each.status}, {each.message}\n")
    elif not ran:
        text.append("Nothing ran.\n", style="bold red")
    else:
        text.append(f"All {len(ran)} results are right.\n", style="green")
    for line in floors:
        text.append(line + "\n")
    if timed:
        text.append(legend, style="dim")
    else:
        text.append(
            "No speed was measured: there is no GPU here. The kernels ran on the host through "
            '"interpret",\nwhich shows that they are right, not how fast they are.'
        )
    return text


def is_bad(outcome: Result | Way) -> bool:
    """True if a result is wrong or its call failed."""
    return outcome.status in (WRONG, FAILED)


def problem_cell(problem: Problem, column: str) -> str:
    """Returns the cell of a problem in one of a table's columns."""
    return {
        "model": problem.model or "",
        "op": problem.op,
        "shape": problem.shape_text(),
        "dtype": _DTYPE_NAMES.get(problem.dtype, problem.dtype),
        "options": problem.options_text(),
    }[column]


def _algorithm_cell(result: Result) -> str:
    """Returns the algorithm, marked if it is the default."""
    asked = result.implementation or result.named_algorithm or result.peer
    return result.algorithm if asked else f"{result.algorithm} (default)"


def _speed_cells(result: Result) -> list[str]:
    if not result.timed:
        return [""] * 7
    return [
        number(result.kernels, "{}"),
        number(result.kernel_us, "{:.2f}"),
        number(result.loop_us, "{:.2f}"),
        number(result.xla_time_us, "{:.2f}"),
        number(result.rate, "{:.1f}" if result.operations else "{:.0f}"),
        number(result.rate / result.ceiling if result.ceiling else None, "{:.0%}"),
        number(result.ratio, "{:.2f}"),
    ]


def _error_cell(result: Result, error: float | None) -> str:
    if error is None:
        return ""
    return "exact" if error == 0 else f"{error:.1e}"


def _note(result: Result) -> str:
    if not result.timed:
        return result.status  # the verdict says why
    notes = ["warm"] if result.warm else []
    if result.time_us != result.kernel_us:
        notes.append("loop")
    if result.meets_floor is False:
        notes.append("below floor")
    return ", ".join(notes)


def number(value: float | None, form: str) -> str:
    """Returns a formatted number, or an empty string for None."""
    return "" if value is None else form.format(value)
