"""Results of programs as text: a table for each program, a summary, and a verdict."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from rich.table import Table
from rich.text import Text

from bench.programs import texts
from bench.report import is_bad, last_word, new_table, number, problem_cell
from bench.results import REFUSED, ProgramResult, Run, Way

LEGEND = """\
plain JAX  the program with jax.nn, jax.numpy and the formula of optax; a mask is -inf in the scores
None       the same program with the functions of jax_gpuops: only the import is swapped
cuda       the same, and jax_gpuops.use("cuda"): every call of ours is a kernel. Matrix products
           other than those of mlp and the LM heads are JAX's in all ways
by_hand    ours get masked and scaled scores, as jax.nn.softmax does; elsewhere mask and scale are
           arguments of ours
scores=    the dtype of the scores, and logits= of the logits, where it is not that of the operands
forward    the results alone
gradient   the results, and the gradients of all operands that are floats
k          how many kernels run, XLA's among them
time us    median time of the kernels of one call, from CUPTI
loop       as a note: on a large program kernels and loop differ by over 5 %, or no kernel was seen,
           so the times of all ways are those of one call in a long loop
warm       as a note: operands below 60 MB stay in the L2 cache from call to call
x plain    how many times as fast as plain JAX, which ran in turns with it on the same arrays
MB         temporary memory in 1e6 bytes: what XLA allocates beside operands and results
x MB       the temporary memory relative to plain JAX; less is better
ours       which kernels of ours the compiled program calls, and how often
error      of the result that is worst, in the Frobenius norm, against the program in float64. A
           way is WRONG, and has no speed, if an error is over 4 times that of plain JAX on the same
           data, or over 4 roundings where plain JAX is better than one
floor      what must be reached, relative to plain JAX: speed, temporary memory"""


def heading(name: str) -> Text:
    """Returns the heading of a program's table."""
    program = texts.PROGRAMS[name]
    return Text(f"{name}: {program.summary}; shape {program.shape}", "italic")


def table(results: Sequence[ProgramResult], *, timed: bool) -> Table:
    """Returns the table of one program.

    Args:
      results: the results of the program.
      timed: True for the columns on speed and memory.
    """
    result = new_table()
    problem_columns = ["model", "shape", "dtype", "options"]
    if not any(each.problem.model for each in results):
        del problem_columns[0]
    for column in [*problem_columns, "", "way"]:
        result.add_column(column, no_wrap=True)
    for column in [*(["k", "time us", "x plain", "MB", "x MB"] if timed else []), "error"]:
        result.add_column(column, justify="right", no_wrap=True)
    result.add_column("ours", overflow="fold")
    if timed:
        result.add_column("floor", no_wrap=True)
    result.add_column("note" if timed else "result", no_wrap=True)
    previous = None
    for each in results:
        if previous is not None and each.problem != previous:
            result.add_section()
        for way in each.ways:
            if way.status == REFUSED:
                continue
            is_first = way is each.ways[0]
            known = not is_first or each.problem == previous
            cells = ["" if known else problem_cell(each.problem, c) for c in problem_columns]
            cells += [each.phase if is_first else "", way.name]
            if timed:
                cells += _speed_cells(each, way)
            cells.append("" if way.error is None else f"{way.error:.1e}")
            cells.append(_calls_text(way))
            if timed:
                cells.append(str(way.floor or ""))
            result.add_row(*cells, _note(each, way), style="bold red" if is_bad(way) else None)
        previous = each.problem
    return result


def summary(results: Sequence[ProgramResult]) -> Table:
    """Returns a table that compares our ways with plain JAX, with rows for each program."""
    result = new_table("summary, relative to plain JAX")
    for column in ("program", "way"):
        result.add_column(column, no_wrap=True)
    for column in ("timed", "speed, mean", "worst", "best", "memory, mean", "floors met"):
        result.add_column(column, justify="right", no_wrap=True)
    for program in dict.fromkeys(each.problem.op for each in results):
        first = program
        own = [each for each in results if each.problem.op == program]
        for name in dict.fromkeys(way.name for each in own for way in each.ways[1:]):
            pairs = [(each, way) for each in own for way in each.ways if way.name == name]
            ratios = [r for r in (each.ratio(way) for each, way in pairs) if r is not None]
            if not ratios:
                continue
            memory = [r for r in (each.memory_ratio(way) for each, way in pairs) if r]
            met = [m for m in (each.meets_floor(way) for each, way in pairs) if m is not None]
            result.add_row(
                first,
                name,
                str(len(ratios)),
                f"{statistics.geometric_mean(ratios):.2f}",
                f"{min(ratios):.2f}",
                f"{max(ratios):.2f}",
                f"{statistics.geometric_mean(memory):.2f}" if memory else "",
                f"{sum(met)} of {len(met)}" if met else "",
            )
            first = ""
    return result


def refusals(results: Sequence[ProgramResult]) -> list[str]:
    """Returns one line for each program that could not be run as requested."""
    return [
        f"Not run: {way.name} on {each}: {way.message}"
        for each in results
        for way in each.ways
        if way.status == REFUSED
    ]


def verdict(done: Run, *, timed: bool) -> Text:
    """Returns the last word on a run."""
    outcomes = [(f"{each} by {way.name}", way) for each in done.results for way in each.ways]
    return last_word(outcomes, list(_floors_text(done.results)), LEGEND, timed=timed)


def _floors_text(results: Sequence[ProgramResult]) -> Iterator[str]:
    held = [
        (each, way, met)
        for each in results
        for way in each.ways
        if (met := each.meets_floor(way)) is not None
    ]
    if held:
        yield f"{sum(met for _, _, met in held)} of {len(held)} results meet their floor."
    for each, way, met in held:
        if not met:
            memory = number(each.memory_ratio(way), ", {:.2f}x memory")
            yield f"  {each} by {way.name}: {each.ratio(way):.2f}x{memory}; floor {way.floor}"


def _speed_cells(result: ProgramResult, way: Way) -> list[str | Text]:
    if not way.timed:
        return [""] * 5
    megabytes = None if way.temporary_bytes is None else way.temporary_bytes / 1e6
    speed = memory = Text()
    if way is not result.ways[0]:
        speed = _colored(result.ratio(way), lambda ratio: ratio)
        memory = _colored(result.memory_ratio(way), lambda ratio: 1 / max(ratio, 1e-9))
    return [
        number(way.kernels, "{}"), number(way.time_us, "{:.1f}"), speed,
        number(megabytes, "{:.1f}"), memory,
    ]  # fmt: skip


def _colored(ratio: float | None, gain: Callable[[float], float]) -> Text:
    """Returns a ratio to plain JAX: green for a gain that matters, red for a loss."""
    if ratio is None:
        return Text()
    style = "green" if gain(ratio) >= 1.05 else "red" if gain(ratio) < 0.98 else ""
    return Text(f"{ratio:.2f}", style)


def _calls_text(way: Way) -> str:
    return ", ".join(
        name if count == 1 else f"{name} x {count}" for name, count in way.calls.items()
    )


def _note(result: ProgramResult, way: Way) -> str:
    if not way.timed:
        return way.status  # the verdict says why
    notes = ["warm"] if result.warm else []
    if way.time_us != way.kernel_us:
        notes.append("loop")
    if result.meets_floor(way) is False:
        notes.append("below floor")
    return ", ".join(notes)
