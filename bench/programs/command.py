"""The command `python -m bench programs`."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

from bench import report as shared
from bench.arguments import add_names
from bench.problem import Problem
from bench.programs import cases, report, run, texts
from bench.results import Unfinished

SUMMARY = "whole programs, with plain JAX and with ours"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add_names(parser, "program", texts.PROGRAMS)


def problems(options: argparse.Namespace, gpu: bool) -> list[Problem]:
    """Returns the problems to run, before `--only` is applied.

    Raises:
      ValueError: if an option was given that whole programs do not have.
    """
    if options.algorithm:
        raise ValueError("a program runs the kernels that are planned; leave out --algorithm")
    if options.peers:
        raise ValueError("there are no programs of peers; leave out --peers")
    return cases.problems(options.program, gpu=gpu, quick=options.quick)


def solve(
    unfinished: Unfinished, chosen: Sequence[Problem], options: argparse.Namespace, gpu: bool
) -> None:
    """Runs problems, with a progress bar, and prints each program's table when it is full."""
    runner = run.Runner(timed=gpu, seconds=0.05 if options.quick else 0.1)
    console = shared.console()
    console.print(shared.environment_text(unfinished.run), style="bold")
    with shared.progress(console) as progress:
        task = progress.add_task("", total=len(chosen))
        for name in texts.PROGRAMS:
            results = []
            for problem in chosen:
                if problem.op == name:
                    progress.update(task, description=str(problem))
                    results += unfinished.solve(problem, functools.partial(runner.run, problem))
                    progress.advance(task)
            if results:
                progress.console.print(report.heading(name))
                progress.console.print(report.table(results, timed=gpu))
                for line in report.refusals(results):
                    progress.console.print(line, style="dim", highlight=False)
                progress.console.print()
    if gpu:
        console.print(report.summary(unfinished.run.results))
