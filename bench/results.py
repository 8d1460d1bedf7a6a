"""What the benchmark found, with where and how: the JSON that `--json` writes and `plot` reads."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import pathlib
import platform
import subprocess
import sys
from typing import Any

import jax

import jax_gpuops
from bench.problem import Floor, Problem

SCHEMA = 1

XLA = "XLA"
RIGHT, WRONG, REFUSED, FAILED = "right", "WRONG", "refused", "FAILED"


@dataclasses.dataclass
class Result:
    """One way to solve one problem.

    Attributes:
      problem: the problem.
      family: the op's family.
      implementation: as asked for; None is the default.
      named_algorithm: as asked for; None if the plan chooses.
      algorithm: what ran: one of our algorithms (several joined by "+", if the op is made of
        several kernels), XLA, or the peer.
      status: RIGHT; WRONG, if an error exceeds its bound; REFUSED, if the algorithm does not take
        the problem; FAILED, if the call raised.
      message: why, unless it is right.
      error: the error against the float64 reference, in the terms of the op; None if not finite.
      excess: the largest error over its bound; at most 1 if a result of ours is right.
      xla_error: the error of XLA on the same data.
      bytes: what must be moved, as the op counts it.
      operations: the floating-point operations of a matrix product.
      kernel_us: time in kernels, without the producer's; None if not timed or not seen.
      loop_us: time per call in a long loop, without the producer's.
      time_us: the one of both that counts.
      kernels: how many kernels a call launches.
      xla_kernel_us, xla_loop_us, xla_time_us, xla_kernels: the same for XLA, in turns with ours.
      warm: True if the operands fit the L2 cache.
      rate: GB/s, or TFLOP/s for matrix products.
      xla_rate: the same for XLA.
      ceiling: the rate that bounds it, measured in the same run.
      speedup: over the first step of the ladder.
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
        """True if kernels of ours ran."""
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
        """Whether ours is as fast as it must be; None without a floor, or without a speed."""
        floor = self.problem.floor
        if floor is None or not (self.ours and self.timed):
            return None
        if floor.ceiling is not None and self.rate < floor.ceiling * self.ceiling:
            return False
        if floor.ratio is None:
            return True
        longest = self.xla_time_us / floor.ratio
        if floor.slack_us:
            longest = max(longest, self.xla_time_us + floor.slack_us)
        return self.time_us <= longest


@dataclasses.dataclass
class Run:
    """All results of one command.

    Attributes:
      command: "main", "case" or "ladder".
      environment: versions, device, commit, date and command line.
      results: in the order they were found.
    """

    command: str
    environment: dict[str, Any]
    results: list[Result] = dataclasses.field(default_factory=list)

    @property
    def succeeded(self) -> bool:
        """False if a result is wrong, a call failed, or nothing ran."""
        ran = [each for each in self.results if each.status != REFUSED]
        return bool(ran) and all(each.status == RIGHT for each in ran)

    def save(self, path: pathlib.Path) -> None:
        """Writes the run as JSON."""
        content = {"schema": SCHEMA, **dataclasses.asdict(self)}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")

    @staticmethod
    def load(path: pathlib.Path) -> Run:
        """Reads what `save` wrote.

        Raises:
          ValueError: if the file was not written by `save`.
        """
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or content.pop("schema", None) != SCHEMA:
            raise ValueError(f"{path} is not a result of this benchmark (schema {SCHEMA})")
        results = content.pop("results")
        for each in results:
            problem = each["problem"]
            problem["shape"] = tuple(problem["shape"])
            problem["options"] = {k: _tuples(v) for k, v in problem["options"].items()}
            if (floor := problem.get("floor")) is not None:
                problem["floor"] = Floor(**floor)
            each["problem"] = Problem(**problem)
        return Run(**content, results=[Result(**each) for each in results])


def _tuples(value: Any) -> Any:
    """JSON has no tuples; axes are some."""
    return tuple(value) if isinstance(value, list) else value


def environment(commit: str | None = None) -> dict[str, Any]:
    """Returns what a reader needs to judge or repeat the numbers.

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
        "command_line": ["python", "-m", "bench", *sys.argv[1:]],
    }


def _git(*arguments: str) -> str | None:
    return _output("git", "-C", str(pathlib.Path(__file__).parent), *arguments)


def _output(*command: str) -> str | None:
    """Returns the first line a program prints, or None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0] or None
