"""`python -m bench tune`: measures the grids of `bench.grid`, and writes the table of `None`.

Each point is a call of a kernel's primitive. Its result is checked against the reference in
float64, then it is timed in turns with XLA's lowering of the same primitive on the same arrays. If
it is fast enough, a program with an elementwise producer and a consumer around the call, which XLA
may fuse with its own lowering, is timed too. If the table then depends on the consumer alone, so is
a program without the producer. The consumer is elementwise; that of a layer with an activation is
a product.

Compilation takes most of the time. The programs of a batch of points are compiled in parallel, on
all cores, before any of the batch is measured.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from rich.table import Table

from bench import check, grid, measure, ops, policy, report, run
from bench.arguments import add_names
from bench.grid import Point
from bench.problem import Problem
from bench.results import FAILED, RIGHT, WRONG, environment, write
from jax_gpuops import _measurements, _primitive

SCHEMA = 1

SECONDS = 0.02
"""About how long one program is measured."""

COMPILE_S, TRACE_S, CALL_S = 0.35, 0.015, 0.03
"""Estimated times of a program: compilation on a core (0.2 to 0.5 s); tracing, which threads cannot
do in parallel; measurement, including the start and the end of the profiler."""

PROGRAMS, MEASURED = 6, 4
"""The number of programs of most points that are ours, and of those that are measured: one draws
the operands and one checks; the measured ones are the kernel and XLA, alone and between
neighbouring operations."""


# The parts of a point


def _kernel(name: str) -> _primitive.Kernel:
    return _primitive.KERNELS[grid.PRIMITIVES[name]]


def _draw(point: Point) -> tuple[jax.Array, ...]:
    """Draws the operands of the primitive: an array and others, such as a mask, or factors."""
    keys = iter(jax.random.split(ops.key(str(point)), 4))
    if point.is_product:
        return tuple(ops.normal(next(keys), shape, jnp.dtype(of)) for shape, of in point.arrays)
    shape, dtype = point.shape, jnp.dtype(point.dtype)
    x = ops.normal(next(keys), shape, dtype)
    masks = [
        jax.random.bernoulli(next(keys), 7 / 8, mask).at[..., 0].set(True) for mask in point.masks
    ]
    if point.kernel in _FORWARD:
        y = _kernel(_FORWARD[point.kernel]).reference(x, *masks, **point.params)
        return y, ops.cotangents(next(keys), shape, dtype), *masks
    rows = tuple(size for d, size in enumerate(shape) if d not in point.axes)
    others: list[jax.Array] = []
    if point.kernel in ("logsumexp_cotangent", "cross_entropy_cotangent"):
        options = {"scale": point.scale, "causal": "causal" in point.mask}
        forward = _kernel("logsumexp_with_residuals").reference
        given = 2 * x if point.kernel in _IN_PLACE else x  # as _produced() makes it
        _, *residuals = forward(given, *masks, axes=point.axes, **options)
        others += [*residuals, ops.cotangents(next(keys), rows, residuals[0].dtype)]
    if point.kernel.startswith("cross_entropy"):
        (axis,) = point.axes
        others.append(ops.labels(next(keys), rows, jnp.dtype("int32"), classes=shape[axis]))
    return x, *others, *masks


_FORWARD = {"softmax_tangent": "softmax", "log_softmax_cotangent": "log_softmax"}
"""Maps whose first operand is the result of another."""

_IN_PLACE = ("cross_entropy_cotangent",)
"""Kernels that overwrite their first operand, unless that is an argument of the program."""


def _bind(point: Point, implementation: str, *operands: jax.Array) -> Any:
    primitive = grid.PRIMITIVES[point.kernel]
    how = {"implementation": implementation, "algorithm": None}
    return primitive.bind(*operands, **how, **point.params)


def _produced(point: Point, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """The operands, one of them produced by an elementwise operation that does not round."""
    at = 1 if point.kernel in _FORWARD else 0
    return [2 * x if i == at else x for i, x in enumerate(operands)]


def _alone(point: Point, implementation: str, *operands: jax.Array) -> Any:
    if point.kernel in _IN_PLACE and implementation != "xla":
        operands = (jax.lax.optimization_barrier(_before(point, *operands)), *operands[1:])
    return _bind(point, implementation, *operands)


def _before(point: Point, *operands: jax.Array) -> jax.Array:
    """Produces the array that a kernel overwrites, which is not part of the kernel's time.

    XLA's lowering does not need it, and would be fused with it.
    """
    return _produced(point, operands)[0]


def _between(point: Point, implementation: str, *operands: jax.Array) -> Any:
    return _consumed(point, implementation, *_produced(point, operands))


def _consumed(point: Point, implementation: str, *operands: jax.Array) -> Any:
    results = _bind(point, implementation, *operands)
    if point.activation:  # as in a feed-forward block, the next layer has the shape of w transposed
        _, w, *_ = operands
        return jnp.matmul(results, w.T, precision=point.precision)
    return jax.tree.map(lambda y: 3 * y, results)


_ERRORS: dict[str, Callable[..., check.Errors]] = {
    "softmax": check.softmax,
    "log_softmax": check.logarithm,
    "logsumexp": check.logarithm,
    "softmax_tangent": check.softmax_tangent,
    "log_softmax_cotangent": check.log_softmax_cotangent,
    "logsumexp_cotangent": check.logsumexp_cotangent,
    "cross_entropy": check.cross_entropy,
    "cross_entropy_cotangent": check.logsumexp_cotangent,
    "sum": check.total,
    "mean_and_var": check.mean_and_variance,
    "var": check.variance,
    "mean": check.total,
    **dict.fromkeys(("gemm", "linear", "glu"), check.matmul),
}


def _excess(point: Point, results: Any, *operands: jax.Array) -> jax.Array:
    """Returns the largest ratio of an error to its bound, against the reference in float64."""
    if point.kernel in _IN_PLACE:
        operands = tuple(_produced(point, operands))
    rounds = point.kernel in _ERRORS and jnp.issubdtype(point.dtype, jnp.inexact)
    params = dict(point.params)
    if rounds:
        result = params.keys() & {"dtype", "preferred_element_type"}
        params |= dict.fromkeys(result, jnp.dtype("float64"))
    widen = functools.partial(check.widened, rounds=rounds, is_product=point.is_product)
    reference = _kernel(point.kernel).reference(*map(widen, operands), **params)
    options = {
        "axis": point.axes,
        "scale": point.scale,
        "causal": "causal" in point.mask,
        "where": point.has_mask,
        "precision": point.precision,
    }
    problem = Problem(point.kernel, point.shape, point.dtype, options)
    error = _ERRORS[point.kernel] if rounds else check.exact
    _, excess = error(problem, results, reference, operands)
    nan = jax.tree.map(lambda a, b: jnp.any(jnp.isnan(a) != jnp.isnan(b)), results, reference)
    lost = functools.reduce(jnp.logical_or, jax.tree.leaves(nan), excess < 0)
    return jnp.where(lost, jnp.inf, excess)


# The sweep


Programs = dict[str, jax.stages.Compiled]
"""The compiled programs of a point, by what they do."""


class Sweep:
    """Measures points, in batches."""

    def __init__(
        self,
        *,
        implementation: str = "cuda",
        timed: Callable[[Sequence[measure.Call]], list[measure.Timing]] | None = None,
        cores: int | None = None,
    ):
        """Prepares to measure.

        Args:
          implementation: the implementation of our kernels.
          timed: times calls in turns; None for `measure.measure`.
          cores: the number of programs that are compiled at a time; None for all cores.
        """
        self._implementation = implementation
        self._timed = timed or functools.partial(measure.measure, rounds=2, seconds=SECONDS)
        self._cores = cores or os.cpu_count() or 1

    def run(
        self,
        points: Sequence[Point],
        *,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> Iterator[dict[Point, dict[str, Any]]]:
        """Measures points until the time is up.

        Args:
          points: the points, in this order.
          seconds: the time after which no batch is begun.
          clock: returns the time.

        Yields:
          The raw result of each point of a batch.
        """
        start, size = clock(), 4 * self._cores
        with concurrent.futures.ThreadPoolExecutor(self._cores) as pool:
            for first in range(0, len(points), size):
                if clock() - start > seconds:
                    return
                yield self._batch(pool, points[first : first + size])

    def _batch(self, pool, points: Sequence[Point]) -> dict[Point, dict[str, Any]]:
        programs = dict(zip(points, pool.map(_attempt(self._compile), points), strict=True))
        found = {
            point: _attempted(functools.partial(self._measure_alone, point), programs[point])
            for point in points
        }
        ahead = [point for point in points if _ratio(found[point]) >= policy.ALONE]
        self._add(pool, "between_", _between, ahead, programs, found)
        walled = [
            point
            for point in ahead
            if found[point]["status"] == RIGHT and policy.is_walled(point.kernel, found[point])
        ]
        self._add(pool, "consumed_", _consumed, walled, programs, found)
        return found

    def _add(self, pool, around: str, function: Callable, points, programs, found) -> None:
        """Adds the times of points with other operations around the kernel to what was found."""
        compiling = _attempt(functools.partial(self._compile_around, function))
        more = zip(points, pool.map(compiling, points), strict=True)
        for point, compiled in list(more):  # all are compiled before one is measured
            draw = programs[point]["draw"]
            measured = functools.partial(self._measure_around, around, point, draw)
            found[point] = found[point] | _attempted(measured, compiled)

    def _compile(self, point: Point) -> Programs:
        with run._mode(point.dtype):
            draw = functools.partial(_draw, point)
            operands = jax.eval_shape(draw)
            programs = self._compile_both(_alone, point, operands)
            programs["draw"] = run.compiled(draw)
            if point.kernel in _IN_PLACE:
                programs["before"] = run.compiled(functools.partial(_before, point), *operands)
        with jax.enable_x64(True):
            results = programs["xla"].out_info
            excess = functools.partial(_excess, point)
            types = map(_types, (results, *operands))
            programs["excess"] = run.compiled(excess, *types, autotuned=False)
        return programs

    def _compile_around(self, function: Callable, point: Point) -> Programs:
        with run._mode(point.dtype):
            return self._compile_both(function, point, jax.eval_shape(lambda: _draw(point)))

    def _compile_both(self, function: Callable, point: Point, operands) -> Programs:
        return {
            name: run.compiled(functools.partial(function, point, implementation), *operands)
            for name, implementation in (("ours", self._implementation), ("xla", "xla"))
        }

    def _measure_alone(self, point: Point, programs: Programs) -> dict[str, Any]:
        with run._mode(point.dtype):
            operands = programs["draw"]()
            results = programs["ours"](*operands)
        with jax.enable_x64(True):
            excess = float(programs["excess"](results, *operands))
        del results
        if not excess <= 1:
            return {"status": WRONG, "message": f"the error is {excess:.3g} times what it may be"}
        return {"status": RIGHT, **self._times("", point, programs, operands)}

    def _measure_around(
        self, around: str, point: Point, draw: jax.stages.Compiled, programs: Programs
    ) -> dict[str, Any]:
        with run._mode(point.dtype):
            operands = draw()
        return self._times(around, point, programs, operands)

    def _times(self, prefix: str, point: Point, programs: Programs, operands) -> dict[str, float]:
        names = [name for name in ("ours", "xla", "before") if name in programs]
        with run._mode(point.dtype):
            calls = [measure.Call(programs[name], operands) for name in names]
            ours, xla, *before = self._timed(calls)
        part_us, us, xla_us = measure.times_us([*(before or [measure.NOTHING]), ours, xla])
        if not part_us < us:
            raise RuntimeError("it takes no longer than what comes before it")
        times = {"us": us - part_us, "xla_us": xla_us}
        return {prefix + name: round(value, 3) for name, value in times.items()}


def _types(operands: Any) -> Any:
    """The shapes and dtypes of operands, without their shardings."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)


def _attempt(function: Callable[[Point], Programs]) -> Callable[[Point], Programs | Exception]:
    """Returns a function that returns the error that `function` raises."""

    def attempt(point: Point) -> Programs | Exception:
        try:
            return function(point)
        except Exception as failure:  # the others may work
            return failure

    return attempt


def _attempted(
    function: Callable[[Programs], dict[str, Any]], programs: Programs | Exception
) -> dict[str, Any]:
    """Returns the result of the function, or of its failure."""
    try:
        if isinstance(programs, Exception):
            raise programs
        return function(programs)
    except Exception as failure:  # the rest of a long sweep should go on
        return {"status": FAILED, "message": run.first_line(failure)}


def _ratio(found: Mapping[str, Any]) -> float:
    return policy.speed(found) if found["status"] == RIGHT else 0.0


# The raw results


@dataclasses.dataclass
class Raw:
    """The measurements of one machine.

    Attributes:
      environment: as `bench.results.environment` returns it.
      points: the raw result of each point, by its name: "status", as in other results, and a
        "message" unless it is right; the times in microseconds "us" of our kernel and "xla_us" of
        XLA alone, and if ours is fast enough "between_us" and "between_xla_us" between neighbouring
        operations, and perhaps "consumed_us" and "consumed_xla_us" with a consumer alone.
    """

    environment: dict[str, Any]
    points: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def add(self, found: Mapping[Point, dict[str, Any]]) -> None:
        """Adds the points of a batch."""
        self.points |= {str(point): each for point, each in found.items()}

    def missing(self, points: Sequence[Point]) -> list[Point]:
        """Returns the points that are not measured yet."""
        return [point for point in points if str(point) not in self.points]

    def save(self, path: pathlib.Path) -> None:
        """Writes a file, one point per line; if that fails, an existing file is unchanged."""
        lines = (f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in self.points.items())
        text = (
            f'{{\n "schema": {SCHEMA},\n "environment": {json.dumps(self.environment)},\n'
            f' "points": {{\n' + ",\n".join(lines) + "\n }\n}\n"
        )
        write(path, text)

    @staticmethod
    def load(path: pathlib.Path) -> Raw:
        """Reads what `save` wrote.

        Raises:
          ValueError: if the file does not exist, or was not written by `save`.
        """
        try:
            content = json.loads(path.read_text())
        except FileNotFoundError:
            raise ValueError(f"there is no file {path}") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise ValueError(f"{path} has no points of bench tune (schema {SCHEMA})")
        return Raw(content["environment"], content["points"])

    def difference(self, environment: Mapping[str, Any]) -> str:
        """Returns the differences from another environment that make points not comparable."""
        return ", ".join(
            f"{key} {self.environment.get(key)} and not {environment.get(key)}"
            for key in ("device", "driver", "jax", "jaxlib", "commit", "uncommitted_changes")
            if self.environment.get(key) != environment.get(key)
        )


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `python -m bench tune`."""
    add_names(parser, "family", grid.FAMILIES, "all of them, in this order, if none is named")
    parser.add_argument(
        "--minutes",
        type=_minutes,
        default=25.0,
        metavar="N",
        help="stop after about so many minutes (25); the same command again measures the rest",
    )
    parser.add_argument(
        "--points", type=pathlib.Path, metavar="FILE", help="the raw results, kept and added to"
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="FILE",
        help="the measurements; of a file that has some, those of other GPUs stay",
    )
    parser.add_argument("--restart", action="store_true", help="measure again what --points has")
    parser.add_argument(
        "--table", action="store_true", help="measure nothing, and write --out from --points"
    )
    parser.add_argument(
        "--list", action="store_true", help="print how many points there are, and measure nothing"
    )


def _minutes(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text} is not a number of minutes above 0")
    return value


def command(options: argparse.Namespace) -> int:
    """Runs `python -m bench tune`.

    Args:
      options: the parsed arguments of `add_arguments`.

    Returns:
      The exit code: 0, or 1 if a result is wrong.

    Raises:
      ValueError: if the options cannot be used here; the message says what to do.
    """
    console = report.console()
    grids = grid.grids(options.family)
    points = [point for point in grid.points(grids) if options.only.search(str(point))]
    if not points:
        raise ValueError(f"no point matches --only {options.only.pattern!r}")
    if options.list:
        console.print(grid_table(grids, points))
        return 0
    if options.table:
        if options.points is None or options.out is None:
            raise ValueError("--table takes the raw results in --points and writes to --out")
        raw = Raw.load(options.points)
        _write_table(raw, options.out)
        console.print(_summary(raw, options.out))
        return 0
    if not run.has_gpu():
        raise ValueError(
            "tune measures kernels on a GPU, and JAX sees none, so nothing can be measured; --list "
            "prints what would be, --table makes a table of points that were measured elsewhere"
        )
    run.check_kernels()
    here = environment(options.commit)
    name = re.sub("[^a-z0-9]+", "-", here["device"].lower())
    path = options.points or pathlib.Path(f"tune-{name}.json")
    out = options.out or pathlib.Path(f"measurements-{name}.json")
    raw = Raw(here)
    if path.exists() and not options.restart:
        raw = Raw.load(path)
        if difference := raw.difference(here):
            raise ValueError(
                f"{path} was measured with {difference}; name another file with --points, or "
                "measure everything again with --restart"
            )
    try:
        sweep(Sweep(), raw, points, path, 60 * options.minutes)
    except KeyboardInterrupt:
        console.print("Interrupted; what was measured before is kept.")
    _write_table(raw, out)
    console.print(_summary(raw, out))
    if left := len(raw.missing(points)):
        console.print(f"Not measured yet: {left} of {len(points)}. The same command again goes on.")
    return 1 if any(each["status"] == WRONG for each in raw.points.values()) else 0


def sweep(
    measuring: Sweep, raw: Raw, points: Sequence[Point], path: pathlib.Path, seconds: float
) -> None:
    """Measures the missing points, with a progress bar, and saves them batch by batch."""
    missing = raw.missing(points)
    with report.progress(report.console()) as progress:
        done = len(points) - len(missing)
        task = progress.add_task("compiling", total=len(points), completed=done)
        for found in measuring.run(missing, seconds=seconds):
            raw.add(found)
            raw.save(path)
            for point, each in found.items():
                if each["status"] in (WRONG, FAILED):
                    progress.console.print(f"{point}: {each['status']}, {each['message']}")
            progress.update(task, advance=len(found), description=str(point))


def _write_table(raw: Raw, out: pathlib.Path) -> None:
    devices = {}
    if out.exists():
        _measurements.read(out)  # raises for a file of something else
        devices = json.loads(out.read_text())["devices"]
    devices[raw.environment["device"]] = policy.device_table(dataclasses.asdict(raw))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(policy.text(devices))


def _summary(raw: Raw, out: pathlib.Path) -> str:
    states = [each["status"] for each in raw.points.values()]
    ours = [policy.speeds(name.split()[0], each) for name, each in raw.points.items()]
    ahead = sum(_ratio(each) >= policy.ALONE for each in raw.points.values())
    level = sum(each is not None and each[1] >= policy.BETWEEN for each in ours)
    device = raw.environment["device"]
    return (
        f"{len(states)} points: {states.count(RIGHT)} right, {states.count(WRONG)} wrong, "
        f"{states.count(FAILED)} failed.\n"
        f"A kernel is at least {policy.ALONE} x as fast as XLA alone in {ahead} of them, and in "
        f"{level} of these at least {policy.BETWEEN} x between neighbours.\n"
        f"{out} has {len(_measurements.read(out)[device])} classes for {device}. Use it with "
        f"jax_gpuops.load_measurements({str(out)!r}) or {_measurements.SETTING}={out}."
    )


def grid_table(grids: Sequence[grid.Grid], points: Sequence[Point]) -> Table:
    """Returns a table of the grids that have some of the points: varying sizes and counts."""
    cores = os.cpu_count() or 1
    minutes = estimate_s(len(points), cores) / 60
    kernels = collections.Counter(point.kernel for point in points)
    table = Table(
        title=f"{len(points)} points, at most about {minutes:.0f} minutes with {cores} cores",
        caption=", ".join(f"{kernel} {count}" for kernel, count in kernels.items()),
    )
    for heading in ("grid", "sizes", "points"):
        table.add_column(heading, justify="right" if heading == "points" else "left")
    chosen = set(points)
    for each in grids:
        if count := len(chosen & set(grid.points([each]))):
            sizes = ", ".join(
                f"{name} {v[0]}" + (f" to {v[-1]}" if len(v) > 1 else "")
                for name, v in each.axes.items()
            )
            table.add_row(each.name, sizes, str(count))
    return table


def estimate_s(points: int, cores: int) -> float:
    """Estimates the seconds that a sweep takes if our kernel is ahead at each point.

    Args:
      points: the number of points.
      cores: the number of programs that are compiled at a time; each core is 0.6 times as fast as
        if it were alone.
    """
    compiling = PROGRAMS * COMPILE_S / max(1, 0.6 * cores)
    return points * (compiling + PROGRAMS * TRACE_S + MEASURED * CALL_S)
