"""The command `python -m bench calls`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bench import ops, run
from bench import report as shared
from bench.calls import cases, report
from bench.problem import Problem, Variant
from bench.results import Unfinished

SUMMARY = "single calls drawn from the shapes of published models, by plain JAX and by ours"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument(
        "--draw",
        choices=cases.DRAWS,
        default=cases.FIRST.name,
        help="which 300 calls; first by default, with which in view the grids of tune were revised",
    )


def problems(options: argparse.Namespace, gpu: bool) -> list[Problem]:
    """Returns the problems to run, before `--only` is applied."""
    return cases.problems(cases.DRAWS[options.draw], gpu=gpu, quick=options.quick)


def solve(
    unfinished: Unfinished, chosen: Sequence[Problem], options: argparse.Namespace, gpu: bool
) -> None:
    """Runs calls, with a progress bar, and prints the notable ones of each family."""
    runner = run.Runner(timed=gpu, seconds=0.02 if options.quick else 0.05)
    variants = [Variant(), Variant("cuda" if gpu else "interpret")]
    console = shared.console()
    console.print(shared.environment_text(unfinished.run), style="bold")
    with shared.progress(console) as progress:
        task = progress.add_task("", total=len(chosen))
        shared.solve_all(runner, chosen, lambda _: variants, unfinished, progress, task)
    done = unfinished.run.results
    for family in ops.FAMILIES:
        own = [each for each in done if each.family == family]
        if not own:
            continue
        if not gpu:
            console.print(shared.table(own, timed=False))
        elif (table := report.table(own)) is not None:
            console.print(table)
        for line in shared.refusals(own):
            console.print(line, style="dim", highlight=False)
    if gpu:
        console.print(report.summary(done))
