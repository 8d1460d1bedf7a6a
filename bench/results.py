"""Results of the benchmark and their environment: the JSON of `--json`, which `plot` reads."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import math
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

import jax_gpuops
from bench.problem import Floor, Problem

SCHEMA = 1

XLA = "XLA"
_ALIKE = ("commit", "uncommitted_changes", "device", "driver", "jax", "jaxlib", "jax_gpuops")
"""The fields of environments that are equal in all parts of one run."""

RIGHT, WRONG, REFUSED, FAILED = "right", "WRONG", "refused", "FAILED"


@dataclasses.dataclass
class Result:
    """One way to solve one problem.

    Attributes:
      problem: the problem.
      family: the op's family.
      implementation: as requested; None is the default.
      named_algorithm: as requested; None if the plan chooses.
      algorithm: the algorithm that ran: one of ours (several joined by "+", if the op consists of
        several kernels), XLA, or the peer.
      status: RIGHT; WRONG, if an error exceeds its bound; REFUSED, if the algorithm does not
        support the problem; FAILED, if the call raised an error.
      message: the reason, unless it is right.
      error: the error against the float64 reference, in the op's measure; None if not finite.
      excess: the largest error over its bound; at most 1 if a result of ours is right.
      xla_error: the error of XLA on the same data.
      bytes: the bytes that must be moved, as the op counts them.
      operations: the floating-point operations of a matrix product.
      kernel_us: time in kernels, without the producer's; None if not timed or not seen.
      loop_us: time per call in a long loop, without the producer's.
      time_us: the one of these two that counts.
      kernels: the number of kernels that a call launches.
      xla_kernel_us, xla_loop_us, xla_time_us, xla_kernels: the same for XLA, in turns with ours.
      warm: True if the operands fit the L2 cache.
      rate: GB/s, or TFLOP/s for matrix products.
      xla_rate: the same for XLA.
      ceiling: the rate that bounds it, measured in the same run.
      speedup: the speed-up over the first step of the ladder.
      claimed_speedup: the same from the ladder's document.
      peer: the other library that ran in place of ours, if one did.
    """

    problem: Problem
    family: str
    implementation: str | None
    named_algorithm: str | None
    algorithm: str
    status: str = RIGHT
    message: str = ""
    error: float | None = None
    excess: float | None = None
    xla_error: float | None = None
    bytes: int | None = None
    operations: int | None = None
    kernel_us: float | None = None
    loop_us: float | None = None
    time_us: float | None = None
    kernels: int | None = None
    xla_kernel_us: float | None = None
    xla_loop_us: float | None = None
    xla_time_us: float | None = None
    xla_kernels: int | None = None
    warm: bool = False
    rate: float | None = None
    xla_rate: float | None = None
    ceiling: float | None = None
    speedup: float | None = None
    claimed_speedup: float | None = None
    peer: str | None = None

    @property
    def ours(self) -> bool:
        """True if our kernels ran."""
        return self.algorithm not in (XLA, self.peer)

    @property
    def timed(self) -> bool:
        """True if the numbers may be shown as a speed: measured, and of a right result."""
        return self.status == RIGHT and self.time_us is not None

    @property
    def ratio(self) -> float | None:
        """The speed relative to XLA."""
        if self.time_us is None or self.xla_time_us is None:
            return None
        return self.xla_time_us / self.time_us

    @property
    def meets_floor(self) -> bool | None:
        """Whether our kernel meets the floor; None without a floor or a speed."""
        floor = self.problem.floor
        if floor is None or not (self.ours and self.timed):
            return None
        if floor.ceiling is not None and self.rate < floor.ceiling * self.ceiling:
            return False
        if floor.tflops is not None and self.rate < floor.tflops:
            return False
        if floor.ratio is None:
            return True
        longest = self.xla_time_us / floor.ratio
        if floor.slack_us:
            longest = max(longest, self.xla_time_us + floor.slack_us)
        return self.time_us <= longest

    @property
    def outcomes(self) -> list[Result]:
        """The outcomes that have a status."""
        return [self]

    @staticmethod
    def from_dict(content: dict[str, Any]) -> Result:
        """Returns a result from what `dataclasses.asdict` made of it."""
        return Result(**{**content, "problem": _problem(content["problem"])})


@dataclasses.dataclass
class Way:
    """One way to run a whole program: with plain JAX, or with ours.

    Attributes:
      name: "plain JAX", "None" or the named implementation.
      floor: its floor, relative to plain JAX.
      status: RIGHT; WRONG, if an error exceeds its bound; REFUSED, if the kernels do not support
        the program; FAILED, if it raised an error or there is no reference.
      message: the reason, unless it is right.
      calls: the number of calls of each of our kernels in the compiled program, by name.
      error: the largest error of a result, relative to it in the Frobenius norm, against float64;
        None if not finite.
      excess: the largest error over its bound; at most 1 if the results are right.
      temporary_bytes: the memory that XLA allocates for the program beside operands and results.
      kernel_us: time in kernels; None if not timed or not seen.
      loop_us: time per call in a long loop.
      time_us: the one of these two that counts.
      kernels: the number of kernels that a call launches, including XLA's.
    """

    name: str
    floor: Floor | None = None
    status: str = RIGHT
    message: str = ""
    calls: dict[str, int] = dataclasses.field(default_factory=dict)
    error: float | None = None
    excess: float | None = None
    temporary_bytes: int | None = None
    kernel_us: float | None = None
    loop_us: float | None = None
    time_us: float | None = None
    kernels: int | None = None

    @property
    def timed(self) -> bool:
        """True if the numbers may be shown as a speed: measured, and of a right result."""
        return self.status == RIGHT and self.time_us is not None


@dataclasses.dataclass
class ProgramResult:
    """A whole program, run in several ways on the same operands.

    Attributes:
      problem: the program and its shape.
      gradient: True if the gradient was computed too, False for the forward pass alone.
      ways: plain JAX first.
      warm: True if the operands fit the L2 cache.
    """

    problem: Problem
    gradient: bool
    ways: list[Way]
    warm: bool = False

    def __str__(self) -> str:
        """Returns the program on one line."""
        return f"{self.problem} {self.phase}"

    @property
    def phase(self) -> str:
        """The part of the program that ran."""
        return "gradient" if self.gradient else "forward"

    @property
    def timed(self) -> bool:
        """True if there is a speed to show."""
        return any(each.timed for each in self.ways)

    @property
    def outcomes(self) -> list[Way]:
        """The outcomes that have a status."""
        return self.ways

    def ratio(self, way: Way) -> float | None:
        """Returns the speed relative to plain JAX."""
        plain = self.ways[0]
        return plain.time_us / way.time_us if plain.timed and way.timed else None

    def memory_ratio(self, way: Way) -> float | None:
        """Returns the temporary memory relative to plain JAX; None if plain JAX needs none."""
        plain = self.ways[0].temporary_bytes
        return way.temporary_bytes / plain if plain and way.temporary_bytes is not None else None

    def meets_floor(self, way: Way) -> bool | None:
        """Returns whether a way meets its floor; None without a floor or a speed."""
        ratio, memory_ratio = self.ratio(way), self.memory_ratio(way)
        if way.floor is None or ratio is None:
            return None
        if way.floor.ratio is not None and ratio < way.floor.ratio:
            return False
        if way.floor.memory is None:
            return True
        return memory_ratio is not None and memory_ratio <= way.floor.memory

    @staticmethod
    def from_dict(content: dict[str, Any]) -> ProgramResult:
        """Returns a result from what `dataclasses.asdict` made of it."""
        ways = [Way(**{**each, "floor": _floor(each["floor"])}) for each in content["ways"]]
        return ProgramResult(**{**content, "problem": _problem(content["problem"]), "ways": ways})


@dataclasses.dataclass
class Run:
    """All results of one command.

    Attributes:
      command: "main", "case", "ladder", "programs" or "calls".
      environment: versions, device, commit, date and command line.
      results: in the order they were found: `ProgramResult` for "programs", else `Result`.
    """

    command: str
    environment: dict[str, Any]
    results: list[Any] = dataclasses.field(default_factory=list)

    @property
    def succeeded(self) -> bool:
        """False if a result is wrong, a call failed, or nothing ran."""
        outcomes = [outcome for each in self.results for outcome in each.outcomes]
        ran = [each for each in outcomes if each.status != REFUSED]
        return bool(ran) and all(each.status == RIGHT for each in ran)

    @staticmethod
    def merged(parts: Sequence[Run]) -> Run:
        """Merges the parts of a run of one command, on the same sources and machine.

        Its environment is that of the first part, with the command lines of all.

        Raises:
          ValueError: if the parts are of different runs, or a result is in two of them.
        """
        first = parts[0]
        problems: set[str] = set()
        for part in parts:
            for name in _ALIKE:
                one, other = (each.environment[name] for each in (first, part))
                if one != other:
                    raise ValueError(f"the parts of a run have one {name}, not {one} and {other}")
            if part.command != first.command:
                raise ValueError(f"{first.command} and {part.command} are no parts of one run")
            of_part = {str(each.problem) for each in part.results}
            if both := problems & of_part:
                raise ValueError(f"two parts have results of {min(both)}")
            problems |= of_part
        lines = [part.environment["command_line"] for part in parts]
        return Run(
            first.command,
            {**first.environment, "command_line": lines},
            [result for part in parts for result in part.results],
        )

    def save(self, path: pathlib.Path) -> None:
        """Writes the run as JSON."""
        content = {"schema": SCHEMA, **dataclasses.asdict(self)}
        write(path, json.dumps(content, indent=1) + "\n")

    @staticmethod
    def load(path: pathlib.Path) -> Run:
        """Reads what `save` wrote.

        Raises:
          ValueError: if the file was not written by `save`.
        """
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or content.pop("schema", None) != SCHEMA:
            raise ValueError(f"{path} is not a result of this benchmark (schema {SCHEMA})")
        kind = ProgramResult if content["command"] == "programs" else Result
        results = [kind.from_dict(each) for each in content.pop("results")]
        return Run(**content, results=results)


class Unfinished:
    """A run in progress.

    Its results are saved next to the final file. If the run is interrupted, the same command on the
    same sources and machine continues from them.

    Attributes:
      run: the run so far.
    """

    def __init__(self, run: Run, path: pathlib.Path | None):
        """Continues an interrupted run, if there is one.

        Args:
          run: a new run, with its command and environment.
          path: the path of its JSON; None saves nothing.
        """
        self.run = run
        self._part = None if path is None else path.with_name(path.name + ".part")
        if self._part is None or not self._part.exists():
            return
        left = Run.load(self._part)
        alike = (*_ALIKE, "command_line")
        if left.command == run.command and all(
            left.environment[name] == run.environment[name] for name in alike
        ):
            self.run = left

    def solve(self, problem: Problem, solve: Callable[[], Sequence[Any]]) -> list[Any]:
        """Returns the results of a problem, from the run so far or from `solve`."""
        found = self.found(problem)
        if not found:
            found = list(solve())
            self.add(found)
        return found

    def found(self, problem: Problem) -> list[Any]:
        """Returns the results of a problem in the run so far."""
        return [each for each in self.run.results if each.problem == problem]

    def add(self, results: Sequence[Any]) -> None:
        """Adds all results of a problem, and saves them."""
        self.run.results += results
        if self._part is not None:
            self.run.save(self._part)

    def finish(self) -> None:
        """Writes the JSON of the whole run."""
        if self._part is not None:
            self.run.save(self._part)
            self._part.replace(self._part.with_suffix(""))


def write(path: pathlib.Path, text: str) -> None:
    """Writes a file; if that fails, an existing file is unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)


def _problem(content: dict[str, Any]) -> Problem:
    options = {k: _tuples(v) for k, v in content["options"].items()}
    floor = _floor(content.get("floor"))
    return Problem(
        **{**content, "shape": tuple(content["shape"]), "options": options, "floor": floor}
    )


def _floor(content: dict[str, Any] | None) -> Floor | None:
    return None if content is None else Floor(**content)


def _tuples(value: Any) -> Any:
    """Converts a list to a tuple, such as axes, since JSON has no tuples."""
    return tuple(value) if isinstance(value, list) else value


def finite(number: float) -> float | None:
    """Returns a number, or None for NaN and infinity, which JSON does not have."""
    return number if math.isfinite(number) else None


def first_line(error: Exception) -> str:
    """Returns the first line of an error message, or the error's type if it has none."""
    return (str(error) or type(error).__name__).partition("\n")[0]


def environment(commit: str | None = None) -> dict[str, Any]:
    """Returns the environment of a run, as needed to judge or repeat the numbers.

    Args:
      commit: the commit of this checkout; None asks git.
    """
    device = jax.devices()[0]
    head = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "backend": " ".join(device.client.platform_version.split()),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "jax_gpuops": jax_gpuops.__version__,
        "commit": commit or head,
        "uncommitted_changes": None if head is None else changes is not None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command_line": ["python", "-m", "bench", *map(_without_folder, sys.argv[1:])],
    }


def _without_folder(argument: str) -> str:
    """Removes the folders of an absolute path, which mean nothing on another machine."""
    return re.sub("(^|=)/.*/", r"\1", argument)


def _git(*arguments: str) -> str | None:
    return _output("git", "-C", str(pathlib.Path(__file__).parent), *arguments)


def _output(*command: str) -> str | None:
    """Returns the first line a program prints, or None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0] or None
