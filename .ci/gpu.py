"""Runs all tests on a GPU, which CI does not have, or some tests under compute-sanitizer.

    python .ci/gpu.py tests --processes 8
    python .ci/gpu.py memcheck --processes 8
    python .ci/gpu.py racecheck --processes 12 --tests 12
    python .ci/gpu.py synccheck --processes 8

All tests in 14 processes ran out of 80 GB of GPU memory. The tests marked `large` take up to
36 GiB, so they run first, in a process of their own that frees memory at once: memory that XLA
keeps after one test is too fragmented for the next.

The tools check only our kernels: racecheck takes three minutes to prepare those of XLA and its
libraries, and a few seconds for ours. compute-sanitizer itself ends with a segmentation fault in
some runs. So processes run groups of tests; a group whose process ended without a summary is halved
and run again; and the outcomes are kept in OUT/TOOL.json, from which the next run continues if the
compiled kernels are the same.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck", "synccheck")
PYTEST = (sys.executable, "-m", "pytest")
# JAX otherwise takes most of the GPU's memory for the first process.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
FREED_AT_ONCE = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
# With other allocators memcheck does not see the ends of buffers.
SANITIZED = {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}
OPTIONS = ("--num-cuda-barriers", "4096", "--kernel-name", "kns=jax_gpuops_cuda")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
TESTED = re.compile(r"^\d+ (?:passed|failed|skipped|error).* in [\d.]+s", re.MULTILINE)
NOTABLE = re.compile(r"^(?:\[gw\d+\]|tests/).* (?:FAILED|ERROR) |^=.* in [\d.]+s")
TRIES = 3  # for a single test
NO_TESTS = 5  # the exit status of pytest if it selects no test


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="Other arguments are those of pytest."
    )
    parser.add_argument("what", choices=("tests", *TOOLS))
    parser.add_argument("--processes", type=int, default=6, help="at a time, on one GPU")
    parser.add_argument("--tests", type=int, default=8, help="of a process under compute-sanitizer")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which all ends")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build" / "sanitizer")
    arguments, of_pytest = parser.parse_known_args()
    os.chdir(ROOT)
    os.environ.update(ENVIRONMENT)
    if arguments.what == "tests":
        return run_tests(arguments, of_pytest)
    os.environ.update(SANITIZED)
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer, of the CUDA toolkit, is not on PATH")
    return Sanitizer(arguments.what, arguments, of_pytest).run()


def run_tests(arguments: argparse.Namespace, of_pytest: list[str]) -> int:
    """Runs all tests and returns the exit status. Prints each failure when it occurs."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + arguments.seconds
    statuses = [
        run_pytest(arguments.out / f"{name}.log", end - time.monotonic(), more, options, of_pytest)
        for name, more, options in (
            ("large", FREED_AT_ONCE, ("-m", "large")),
            (
                "tests",
                {},
                ("-m", "not large", "-n", str(arguments.processes), "--dist", "worksteal"),
            ),
        )
    ]
    return max(0 if status == NO_TESTS else abs(status) for status in statuses)


def run_pytest(
    log: pathlib.Path,
    seconds: float,
    environment: dict[str, str],
    options: Sequence[str],
    more: list[str],
) -> int:
    """Runs pytest for at most `seconds`, and returns its exit status."""
    with (
        log.open("w", buffering=1) as written,
        subprocess.Popen(
            [*PYTEST, "-v", *options, *more],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        clock = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
        clock.daemon = True
        clock.start()
        for line in process.stdout:
            written.write(line)
            if NOTABLE.search(line):
                print(line, end="", flush=True)
        clock.cancel()
    print(f"the exit status is {process.returncode}; see {log}")
    return process.returncode


@dataclasses.dataclass
class Group:
    """The tests of one process."""

    tests: list[str]
    tries: int = 0

    def halves(self) -> list[Group]:
        """Returns the groups to run after a run without a summary."""
        if len(self.tests) == 1:
            return [Group(self.tests, self.tries + 1)] if self.tries + 1 < TRIES else []
        middle = len(self.tests) // 2
        return [Group(self.tests[:middle]), Group(self.tests[middle:])]


class Sanitizer:
    """One tool on the tests marked `sanitizer`."""

    def __init__(self, tool: str, arguments: argparse.Namespace, of_pytest: list[str]):
        """Reads the outcomes of an earlier run with the same kernels."""
        self.tool = tool
        self.arguments = arguments
        self.of_pytest = of_pytest
        self.end = time.monotonic() + arguments.seconds
        self.lock = threading.Lock()
        self.file = arguments.out / f"{tool}.json"
        arguments.out.mkdir(parents=True, exist_ok=True)
        self.kernels = digest_of_kernels()
        self.outcomes: dict[str, str] = {}
        if self.file.exists():
            kept = json.loads(self.file.read_text())
            if kept["kernels"] == self.kernels:
                self.outcomes = kept["outcomes"]

    def run(self) -> int:
        """Returns 0 if all tests ran and the tool reported nothing."""
        collect = [*PYTEST, "-m", "sanitizer", "--collect-only", "-q", *self.of_pytest]
        collected = subprocess.run(collect, capture_output=True, text=True, check=True)
        tests = [line for line in collected.stdout.splitlines() if "::" in line]
        left = [test for test in tests if test not in self.outcomes]
        # The ids contain the op and then the algorithm, whose kernels are loaded once per group.
        left.sort(key=lambda test: test.split("-")[1:])
        size = self.arguments.tests
        groups = [Group(left[i : i + size]) for i in range(0, len(left), size)]
        with concurrent.futures.ThreadPoolExecutor(self.arguments.processes) as pool:
            running = {pool.submit(self.take, group) for group in groups}
            while running:
                done, running = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
                again = [group for each in done for group in each.result()]
                running |= {pool.submit(self.take, group) for group in again}
        counts = collections.Counter(self.outcomes.get(test, "not run") for test in tests)
        print(self.tool, dict(counts))
        return int(set(counts) != {"clean"})

    def take(self, group: Group) -> list[Group]:
        """Runs a group, saves the outcomes, and returns the groups to run again."""
        left = self.end - time.monotonic()
        if left <= 0:
            return []
        sanitizer = ("compute-sanitizer", "--tool", self.tool, *OPTIONS)
        command = [*sanitizer, *PYTEST, "-q", "-p", "no:cacheprovider", *group.tests]
        code, text = run_alone(command, left)
        summary = SUMMARY.search(text)
        # The tool may also outlive the process under test, with nothing to report.
        if summary is None or TESTED.search(text) is None:
            print(f"{self.tool}: no summary, exit status {code}: {group.tests[0]} ...", flush=True)
            return group.halves()
        outcome = "clean"
        if summary[1] != "0":
            outcome = "reported"
        elif code != 0:
            outcome = "failed"  # a test failed, but the tool reported nothing
        with self.lock:
            self.outcomes |= dict.fromkeys(group.tests, outcome)
            self.file.write_text(
                json.dumps({"kernels": self.kernels, "outcomes": self.outcomes}, indent=1)
            )
            if outcome != "clean":
                log = self.arguments.out / f"{self.tool}-{len(self.outcomes)}.log"
                log.write_text(text)
                print(f"{self.tool}: {outcome}, see {log}", flush=True)
        return []


def digest_of_kernels() -> str:
    """Returns the SHA-256 of the module that holds the kernels."""
    module = importlib.util.find_spec("jax_gpuops_ffi._cuda")
    if module is None or module.origin is None:
        sys.exit("jax_gpuops_ffi._cuda is not installed")
    return hashlib.sha256(pathlib.Path(module.origin).read_bytes()).hexdigest()


def run_alone(command: list[str], seconds: float) -> tuple[int, str]:
    """Runs a command in a process group of its own, and ends the group afterwards.

    If compute-sanitizer dies, the process under test would continue and hold GPU memory. Returns
    the exit status and the output.
    """
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(
            command, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        printed.seek(0)
        return code, printed.read()


if __name__ == "__main__":
    sys.exit(main())
