"""The command line: `python -m bench --help`."""

from __future__ import annotations

import argparse
import functools
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from rich.text import Text

from bench import cases, documents, ops, overhead, page, peers, report, run, tune
from bench.arguments import add_names
from bench.calls import command as calls
from bench.calls import report as calls_report
from bench.problem import Problem, Shape, Variant
from bench.programs import command as programs
from bench.programs import report as programs_report
from bench.results import Run, Unfinished, environment

_DESCRIPTION = """\
Measures the kernels of jax_gpuops against XLA, after checking every result against float64.

  python -m bench                                     the main table: every op against XLA
  python -m bench --only '^softmax .*bfloat16'        some of it
  python -m bench --only '^softmax' --algorithm warp split      by other kernels than planned
  python -m bench softmax --shape 8192x32768 --dtype bf16
  python -m bench softmax --shape 8x16x2048x2048 --dtype bf16 --causal --scale 0.125
  python -m bench sum --shape 8192x32768 --axis 0 --algorithm naive multiple
  python -m bench transpose --shape 64x1024x16x64 --axes 0,2,1,3
  python -m bench matmul --shape 4096x4096x4096 --precision highest      M x K x N
  python -m bench ladder                              every optimisation step, on the shapes of
  python -m bench ladder softmax transpose            the documents that the steps come from
  python -m bench programs                            whole programs: attention, LM heads, norms,
  python -m bench programs attention lm_head          ...; plain JAX, None and our kernels
  python -m bench calls                               300 calls with the shapes of published
                                                       models; plain JAX, None and our kernels
  python -m bench calls --draw second                 300 others, drawn later and from more models
  python -m bench --json run.json --plot figures      keep the numbers; draw them
                                                       a run that was cut short goes on from
                                                       run.json.part
  python -m bench merge a.json b.json --json run.json  make one run of its parts
  python -m bench plot run.json --out figures         draw kept numbers again
  python -m bench page docs/performance.md            make the tables of a page from kept numbers
  python -m bench tune                                measure where implementation=None is ours
  python -m bench overhead                            what a call takes on the host

On a GPU it reports speed. Without one it runs the same kernels on the host, on small shapes, and
reports only whether they are right. The exit code is 1 if a result is wrong.
"""

_RESULTS = pathlib.Path(__file__).parent / "results" / "h200"

_DEFAULTS: dict[str, Any] = {
    "json": None,
    "plot": None,
    "quick": False,
    "peers": False,
    "algorithm": None,
    "only": re.compile(""),
    "commit": None,
}
"""The defaults of the options that may stand before or after a command."""

_NOT_TAKEN = {
    "calls": {"algorithm", "peers", "plot"},
    "tune": _DEFAULTS.keys() - {"only", "commit"},
    "overhead": _DEFAULTS.keys() - {"only", "commit", "json"},
    "merge": _DEFAULTS.keys() - {"json"},
    "plot": _DEFAULTS.keys(),
    "page": _DEFAULTS.keys(),
}
"""For each command, those of these options that it does not take."""

_EPILOG = "How to read the tables:\n\n" + report.LEGEND


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      arguments: the arguments after `python -m bench`; None takes them from the process.

    Returns:
      The exit code: 0, or 1 if a result is wrong or a call failed.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    for name in sorted(_NOT_TAKEN.get(options.command, ())):
        if getattr(options, name) != _DEFAULTS[name]:
            parser.error(f"{options.command} has no --{name}; leave it out")
    if options.command == "plot":
        _plot(Run.load(options.file), options.out)
        return 0
    if options.command == "merge":
        if options.json is None:
            parser.error("merge writes to --json FILE, which is missing")
        try:
            Run.merged([Run.load(each) for each in options.parts]).save(options.json)
        except ValueError as error:
            parser.error(str(error))
        return 0
    if options.command == "page":
        options.file.write_text(page.filled(options.file.read_text(), options.results))
        return 0
    if options.command in ("tune", "overhead"):
        command = tune.command if options.command == "tune" else overhead.command
        try:
            return command(options)
        except ValueError as error:
            parser.error(str(error))
    gpu = run.has_gpu()
    try:
        run.check_kernels()
        problems = _problems(options, gpu)
    except ValueError as error:
        parser.error(str(error))
    command = options.command if options.command in _COMMANDS else "case"
    unfinished = Unfinished(Run(command, environment(options.commit)), options.json)
    done = unfinished.run
    solve, verdict = _COMMANDS.get(command, (_solve, report.verdict))
    solve(unfinished, problems, options, gpu)
    report.console().print(verdict(done, timed=gpu))
    unfinished.finish()
    if options.plot is not None:
        _plot(done, options.plot)
    return 0 if done.succeeded else 1


def _problems(options: argparse.Namespace, gpu: bool) -> list[Problem]:
    """Returns the problems to run.

    Raises:
      ValueError: if there are none, or if an op does not have the shape or the algorithms.
    """
    if options.command == "main":
        problems = cases.main(gpu=gpu, quick=options.quick)
    elif options.command == "ladder":
        if options.algorithm:
            raise ValueError("a ladder runs every step of it; leave out --algorithm")
        problems = cases.ladder(options.family or ops.FAMILIES, gpu=gpu, quick=options.quick)
    elif options.command == "programs":
        problems = programs.problems(options, gpu)
    elif options.command == "calls":
        problems = calls.problems(options, gpu)
    else:
        given = {k: getattr(options, k) for k in ops.OPS[options.command].options if k in options}
        problems = [ops.make(options.command, options.shape, options.dtype, **given)]
    problems = [each for each in problems if options.only.search(str(each))]
    if not problems:
        raise ValueError(f"no problem matches --only {options.only.pattern!r}")
    for each in problems if options.algorithm else ():
        if unknown := set(options.algorithm) - set(known := run.algorithms(each)):
            raise ValueError(
                f"{each.op} has no algorithm {', '.join(sorted(unknown))}; it has "
                f"{', '.join(known)}"
            )
    return problems


def _variants(problem: Problem, options: argparse.Namespace, gpu: bool) -> list[Variant]:
    """Returns the ways to run a problem, those of peers last."""
    named = "cuda" if gpu else "interpret"
    if options.command == "ladder":
        aside = documents.LADDERS[ops.OPS[problem.op].family].aside
        ours = [Variant(named, each) for each in run.algorithms(problem) if each not in aside]
    elif options.algorithm:
        ours = [Variant(named, each) for each in options.algorithm]
    elif gpu or options.command == "main":
        ours = run.variants(problem)
    else:
        ours = [Variant(named)]
    return ours + [Variant(peer=name) for name in peers.NAMES if options.peers]


def _solve(
    unfinished: Unfinished, problems: Sequence[Problem], options: argparse.Namespace, gpu: bool
) -> None:
    """Runs the problems, with a progress bar, and prints each family's table when it is full."""
    runner = run.Runner(timed=gpu, seconds=0.05 if options.quick else 0.2)
    console = report.console()
    console.print(report.environment_text(unfinished.run), style="bold")
    with report.progress(console) as progress:
        task = progress.add_task("", total=len(problems))
        variants = functools.partial(_variants, options=options, gpu=gpu)
        for family in ops.FAMILIES:
            own = [each for each in problems if ops.OPS[each.op].family == family]
            report.solve_all(runner, own, variants, unfinished, progress, task)
            results = [result for each in own for result in unfinished.found(each)]
            if not results:
                continue
            runner.rate(results)
            ladder = options.command == "ladder"
            if ladder:
                run.climb(results)
            progress.console.print(report.table(results, timed=gpu, ladder=ladder))
            if ladder and gpu:
                progress.console.print(report.ladder_text(family), style="dim")
            for line in report.refusals(results):
                progress.console.print(line, style="dim", highlight=False)
            progress.console.print()


_COMMANDS: dict[str, tuple[Callable[..., None], Callable[..., Text]]] = {
    "main": (_solve, report.verdict),
    "ladder": (_solve, report.verdict),
    "programs": (programs.solve, programs_report.verdict),
    "calls": (calls.solve, calls_report.verdict),
}
"""For each command that runs several cases, the function that runs it, and its verdict."""


def _plot(done: Run, folder: pathlib.Path) -> None:
    from bench import plot  # matplotlib takes a second to import, and only figures need it

    figures = plot.draw(done, folder)
    for path in figures:
        print(path)
    if not figures:
        print("There is nothing to draw: no speed was measured.")


def _parser() -> argparse.ArgumentParser:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=plain,
    )
    parser.set_defaults(command="main", **_DEFAULTS)
    _add_common_arguments(parser)
    _add_algorithm_argument(parser)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, formatter_class=plain)
        command.set_defaults(command=name)
        return command

    ladder = add("ladder", "every step of the optimisation ladders")
    _add_common_arguments(ladder)
    add_names(ladder, "family", ops.FAMILIES)
    program = add("programs", programs.SUMMARY)
    _add_common_arguments(program)
    programs.add_arguments(program)
    single = add("calls", calls.SUMMARY)
    _add_common_arguments(single)
    calls.add_arguments(single)
    merge = add("merge", "make one JSON file of those of parts of a run, as made by --only")
    _add_common_arguments(merge)
    merge.add_argument("parts", nargs="+", type=pathlib.Path, metavar="FILE")
    plot = add("plot", "draw figures from a JSON file that --json wrote")
    plot.add_argument("file", type=pathlib.Path, metavar="FILE")
    plot.add_argument("--out", type=pathlib.Path, default=pathlib.Path(), metavar="DIR")
    pages = add("page", "make the tables of a Markdown page anew from JSON files that --json wrote")
    pages.add_argument("file", type=pathlib.Path, metavar="FILE")
    pages.add_argument("--results", type=pathlib.Path, default=_RESULTS, metavar="DIR")
    tuning = add("tune", "measure where kernels are faster than XLA, for implementation=None")
    tune.add_arguments(tuning)
    _add_selection_arguments(tuning)
    of_calls = add("overhead", "the time of a call on the host, with a kernel and with XLA")
    overhead.add_arguments(of_calls)
    _add_common_arguments(of_calls)
    for name, op in ops.OPS.items():
        case = add(name, f"one case of {name}")
        _add_common_arguments(case)
        _add_algorithm_argument(case)
        _add_case_arguments(case, op)
    return parser


def _add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that may stand before or after the command, without defaults."""
    keep = argparse.SUPPRESS
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", default=keep, help="write results as JSON"
    )
    parser.add_argument(
        "--plot", type=pathlib.Path, metavar="DIR", default=keep, help="draw figures into DIR"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        default=keep,
        help="fewer problems, measured less long: a smoke test",
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        default=keep,
        help=f"also {' and '.join(peers.NAMES)}, where they are installed",
    )
    _add_selection_arguments(parser)


def _add_selection_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that select the problems, and the one that names the commit."""
    keep = argparse.SUPPRESS
    parser.add_argument(
        "--only",
        type=_pattern,
        metavar="REGEX",
        default=keep,
        help='only problems that match, such as "softmax 8192x32768 float32 axis=-1"',
    )
    parser.add_argument(
        "--commit",
        metavar="HASH",
        default=keep,
        help="what to record as the commit, for a copy without its git repository",
    )


def _add_algorithm_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--algorithm",
        nargs="+",
        metavar="NAME",
        default=argparse.SUPPRESS,
        help="kernels to run; by default what the plan chooses",
    )


def _add_case_arguments(command: argparse.ArgumentParser, op: ops.Op) -> None:
    product = op.limit == "matmul"
    command.add_argument(
        "--shape",
        type=_shape,
        required=True,
        metavar="MxKxN" if product else "AxBxC",
        help="rows and columns of the operands, batch dims first" if product else "of the operand",
    )
    command.add_argument(
        "--dtype",
        type=_dtype,
        default="float32",
        help=f"of the operands: a name, or {', '.join(ops.SHORT_DTYPES)}; float32 by default",
    )
    for name, default in op.options.items():
        kind, text = _OPTION_TYPES[name], _OPTION_HELP[name]
        if kind is bool:
            keywords = {"action": "store_true", "help": text}
        else:
            keywords = {"type": kind, "help": f"{text}; default {default}"}
        command.add_argument(f"--{name}", default=argparse.SUPPRESS, **keywords)


def _shape(text: str) -> Shape:
    try:
        return tuple(int(size) for size in text.split("x"))
    except ValueError:
        message = f"{text!r} is not a shape; write the sizes with x between them, as in 8192x32768"
        raise argparse.ArgumentTypeError(message) from None


def _dtype(text: str) -> str:
    try:
        return jnp.dtype(ops.SHORT_DTYPES.get(text, text)).name
    except TypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a dtype") from None


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None


def _activation(text: str) -> str:
    if text not in ops.ACTIVATIONS:
        known = ", ".join(each for each in ops.ACTIVATIONS if each is not None)
        raise argparse.ArgumentTypeError(f"{text!r} is none of {known}")
    return text


def _axes(text: str) -> Any:
    """Reads "1", "0,2" or "none"."""
    if text.lower() == "none":
        return None
    axes = tuple(int(each) for each in text.split(","))
    return axes if len(axes) > 1 else axes[0]


def _kind_of_scales(text: str) -> str:
    if text not in ops.KINDS_OF_SCALES:
        known = ", ".join(ops.KINDS_OF_SCALES)
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {known}")
    return text


_OPTION_TYPES: dict[str, Callable[[str], Any]] = {
    "axis": _axes,
    "scale": float,
    "causal": bool,
    "where": bool,
    "axes": _axes,
    "precision": str,
    "activation": _activation,
    "residual": bool,
    "alpha": float,
    "beta": float,
    "scales": _kind_of_scales,
}
_OPTION_HELP = {
    "axis": "the axis or axes to reduce over: 1, or 0,2, or none for all",
    "scale": "factor of the operand, inside the op",
    "causal": "leave out what lies right of the diagonal",
    "where": "leave out what a mask says, of the last two dims",
    "axes": "the permutation, such as 0,2,1,3",
    "precision": "default, high or highest; highest for float32 unless given",
    "activation": "relu, gelu, gelu_exact or silu; none unless given",
    "residual": "add an array of the result's shape",
    "alpha": "factor of the product",
    "beta": "factor of C",
    "scales": "of a tensor, a vector (each row of A and column of B), or blocks of 128",
}

if __name__ == "__main__":
    sys.exit(main())
