"""`python -m bench overhead`: the time of a call of a kernel on the host, compared with XLA.

The arrays are so small that the host takes longer for a call than the GPU. A loop of calls that
waits only at its end then measures the time of a call on the host. Loops of our calls and of XLA's
take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics

import jax
import jax.numpy as jnp
from rich.table import Table

from bench import measure, ops, report, run
from bench.results import Run, environment

LOOPS, CALLS = 5, 1000

CASES = [
    ops.make("softmax", (128, 128), "float32"),
    ops.make("softmax", (128, 128), "bfloat16", causal=True),
    ops.make("logsumexp", (128, 128), "float32"),
    ops.make("softmax_vjp", (128, 128), "float32"),
    ops.make("sum", (128, 128), "float32"),
    ops.make("argmax", (128, 128), "float32"),
    ops.make("transpose", (128, 96), "float32"),
    ops.make("matmul", (128, 128, 128), "bfloat16"),
    ops.make("linear", (128, 128, 128), "bfloat16", activation="gelu"),
]
FLOOR = "a custom call without a plan"


@dataclasses.dataclass(frozen=True)
class Overhead:
    """The time of a call on the host in microseconds: the median of all loops.

    Attributes:
      case: the call.
      kernel_us: the time with our kernel.
      xla_us: the time with XLA.
    """

    case: str
    kernel_us: float
    xla_us: float

    @property
    def overhead_us(self) -> float:
        """The time that our call takes longer."""
        return self.kernel_us - self.xla_us


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `python -m bench overhead`."""
    parser.add_argument(
        "--calls", type=_count, default=CALLS, metavar="N", help=f"of a loop ({CALLS})"
    )


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of calls")
    return value


def command(options: argparse.Namespace) -> int:
    """Runs `python -m bench overhead`.

    Args:
      options: as parsed; `json` and `commit` among them.

    Returns:
      The exit code.

    Raises:
      ValueError: if there is nothing to measure here, with the reason.
    """
    if not run.has_gpu():
        raise ValueError("overhead measures calls of kernels on a GPU, and JAX sees none")
    run.check_kernels()
    here = environment(options.commit)
    chosen = [each for each in CASES if options.only.search(str(each))]
    console = report.console()
    console.print(report.environment_text(Run("overhead", here)), style="bold")
    pairs = {str(each): run.kernel_and_xla(each) for each in chosen}
    pairs[FLOOR] = _reversals()
    overheads = [measured(case, *pair, options.calls) for case, pair in pairs.items()]
    console.print(table(overheads))
    if options.json is not None:
        results = [
            dataclasses.asdict(each) | {"overhead_us": each.overhead_us} for each in overheads
        ]
        kept = {"environment": here, "loops": LOOPS, "calls": options.calls, "results": results}
        options.json.write_text(json.dumps(kept, indent=1) + "\n")
    return 0


def measured(case: str, ours: measure.Call, xla: measure.Call, calls: int) -> Overhead:
    """Times two calls in turns; each has been called once before."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(LOOPS):
        for i in (0, 1) if turn % 2 == 0 else (1, 0):
            times[i].append(1e6 * measure.loop((ours, xla)[i], calls))
    return Overhead(case, *map(statistics.median, times))


def table(overheads: list[Overhead]) -> Table:
    """Returns the table to print."""
    result = report.new_table("the time of a call on the host, in microseconds")
    for name in ("call", "kernel", "XLA", "more"):
        result.add_column(name, justify="left" if name == "call" else "right", no_wrap=True)
    for each in overheads:
        times = (each.kernel_us, each.xla_us, each.overhead_us)
        result.add_row(each.case, *(f"{us:.2f}" for us in times))
    return result


def _reversals() -> tuple[measure.Call, measure.Call]:
    """The minimum for a custom call with a kernel: one that reverses an array."""
    x = jnp.arange(60, dtype=jnp.float32)
    reverse = jax.ffi.ffi_call("jax_gpuops_selftest_v1", jax.ShapeDtypeStruct(x.shape, x.dtype))
    ours = measure.Call(jax.jit(lambda x: reverse(x, kernel="reverse")), [x])
    xla = measure.Call(jax.jit(lambda x: x[::-1]), [x])
    jax.block_until_ready((ours(), xla()))
    return ours, xla
