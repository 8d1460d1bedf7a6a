"""How long things take on a GPU, measured twice: kernels alone, and calls in a long loop.

CUPTI, through the profiler of JAX's Mosaic, times each kernel on the device. It does not see
what is no kernel (copies, memsets) nor the gaps between kernels, so the time of one call in a long
loop that waits only at its end is measured too. For small problems that loop times Python and the
launch; for large ones the two should agree, and where they do not, the loop counts.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import jax

LARGE_US = 100.0
"""From this kernel time on, the host is faster than the GPU and a loop times the GPU."""

AGREEMENT = 0.05
"""How far the two times of a large problem may be apart, as a fraction of the kernel time."""

_KEPT_BYTES = 8 << 30  # the profiler keeps the result of every iteration
_MAX_CHUNK = 10


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time of one call, in microseconds.

    Attributes:
      kernel_us: median of the kernels' time; None if the profiler saw none.
      loop_us: median over loops of the time per call.
      kernels: how many kernels a call launches.
    """

    kernel_us: float | None
    loop_us: float
    kernels: int

    @property
    def kernels_tell(self) -> bool:
        """False if the loop shows that more than the kernels takes time."""
        if self.kernel_us is None:
            return False
        difference = abs(self.loop_us - self.kernel_us)
        return self.kernel_us < LARGE_US or difference <= AGREEMENT * self.kernel_us


def times_us(timings: Sequence[Timing]) -> list[float]:
    """Returns comparable times: the kernels' if they tell the whole for all, else the loops'."""
    if all(each.kernels_tell for each in timings):
        return [each.kernel_us for each in timings if each.kernel_us is not None]
    return [each.loop_us for each in timings]


def measure(
    functions: Sequence[Callable],
    operands: Sequence[jax.Array],
    *,
    rounds: int = 3,
    seconds: float = 0.2,
) -> list[Timing]:
    """Times functions on the same operands, in turns, so that they share the GPU's state.

    Args:
      functions: jitted functions that have been called once.
      operands: what they are called with.
      rounds: how many turns each gets.
      seconds: about how long one function is measured in all; slow functions take at least
        `rounds` kernel runs and loops of two calls.

    Returns:
      One timing for each function.
    """
    estimates = [_loop(f, operands, 2) for f in functions]
    per_turn = seconds / rounds / 2
    kernel_times: list[list[float]] = [[] for _ in functions]
    loop_times: list[list[float]] = [[] for _ in functions]
    kernels = [0] * len(functions)
    for _ in range(rounds):
        for i, (f, estimate) in enumerate(zip(functions, estimates, strict=True)):
            chunk = min(_MAX_CHUNK, _KEPT_BYTES // _result_bytes(f, operands))
            runs = _kernel_runs(f, operands, max(1, min(chunk, int(per_turn / estimate))))
            kernel_times[i] += [sum(us for _, us in run) for run in runs]
            kernels[i] = max((len(run) for run in runs), default=0)
        for i, (f, estimate) in enumerate(zip(functions, estimates, strict=True)):
            calls = max(2, min(1000, int(per_turn / estimate)))
            loop_times[i].append(1e6 * _loop(f, operands, calls))
    return [
        Timing(statistics.median(k) if k else None, statistics.median(loops), count)
        for k, loops, count in zip(kernel_times, loop_times, kernels, strict=True)
    ]


def _kernel_runs(f, operands, iterations: int) -> list[list[tuple[str, float]]]:
    """Returns (name, microseconds) of every kernel, for each iteration; empty if none was seen."""
    from jax.experimental.mosaic.gpu import profiler  # needs a jaxlib with GPU support

    _, timings = profiler.measure(f, aggregate=False, iterations=iterations)(*operands)
    if timings is None:
        return []
    runs = [timings] if iterations == 1 else timings
    return [[(name, 1e3 * milliseconds) for name, milliseconds in run] for run in runs]


def _loop(f, operands, calls: int) -> float:
    """Returns the seconds per call."""
    jax.block_until_ready(f(*operands))
    start = time.perf_counter()
    for _ in range(calls):
        result = f(*operands)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def _result_bytes(f, operands) -> int:
    results = jax.tree.leaves(jax.eval_shape(f, *operands))
    return max(1, sum(each.size * each.dtype.itemsize for each in results))
