"""Times on a GPU, measured in two ways: kernels alone, and calls in a long loop.

CUPTI, through the profiler of JAX's Mosaic, times each kernel on the device. It sees neither copies
and memsets nor the gaps between kernels, so the time of one call in a long loop that waits only at
its end is measured too. For small problems the loop measures Python and the launch; for large ones
the two should agree, and if they do not, the loop counts.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

LARGE_US = 100.0
"""The kernel time from which on the host is faster than the GPU, and a loop measures the GPU."""

AGREEMENT = 0.05
"""The largest difference of the two times of a large problem, relative to the kernel time."""

_KEPT_BYTES = 8 << 30  # the profiler keeps the result of every iteration
_MAX_CHUNK = 35  # about 200 runs of a short kernel in six rounds


@dataclasses.dataclass(frozen=True)
class Call:
    """A function and its arguments.

    Attributes:
      function: the result of `jax.jit`, or compiled; the profiler does not support others.
      arguments: arrays, and pytrees of arrays.
    """

    function: Callable
    arguments: Sequence[Any]

    def __call__(self) -> Any:
        """Returns the function's result, which may not be ready yet."""
        return self.function(*self.arguments)


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time of one call, in microseconds.

    Attributes:
      kernel_us: median of the kernels' time; None if the profiler saw none.
      loop_us: time per call of the fastest loop, since any disturbance makes a loop slower.
      kernels: the number of kernels that a call launches.
    """

    kernel_us: float | None
    loop_us: float
    kernels: int

    @property
    def kernels_tell(self) -> bool:
        """False if the loop shows that a call takes longer than its kernels."""
        if self.kernel_us is None:
            return False
        difference = abs(self.loop_us - self.kernel_us)
        return self.kernel_us < LARGE_US or difference <= AGREEMENT * self.kernel_us

    def without(self, part: Timing) -> Timing:
        """Returns the timing minus that of a part that was timed alone."""
        seen = self.kernel_us is not None and part.kernel_us is not None
        return Timing(
            self.kernel_us - part.kernel_us if seen else None,
            self.loop_us - part.loop_us,
            self.kernels - part.kernels,
        )


NOTHING = Timing(kernel_us=0.0, loop_us=0.0, kernels=0)
"""The timing of no work at all."""


def times_us(timings: Sequence[Timing]) -> list[float]:
    """Returns comparable times: of the kernels if `kernels_tell` for all, else of the loops."""
    if all(each.kernels_tell for each in timings):
        return [each.kernel_us for each in timings if each.kernel_us is not None]
    return [each.loop_us for each in timings]


def measure(calls: Sequence[Call], *, rounds: int = 6, seconds: float = 0.2) -> list[Timing]:
    """Times calls in turns, so that they share the GPU's state.

    Args:
      calls: the calls, of functions that have been called once.
      rounds: the number of turns of each call.
      seconds: about how long one call is measured in total; slow ones take at least `rounds` kernel
        runs and loops of two calls.

    Returns:
      One timing for each call.
    """
    estimates = [loop(call, 2) for call in calls]
    per_turn = seconds / rounds / 2
    kernel_times: list[list[float]] = [[] for _ in calls]
    loop_times: list[list[float]] = [[] for _ in calls]
    kernels = [0] * len(calls)
    # A GPU gets slower as it warms up: in an even number of rounds, each of two calls comes first
    # equally often.
    turns = [(turn + i) % len(calls) for turn in range(rounds) for i in range(len(calls))]
    for n, i in enumerate(turns):
        iterations = max(1, min(_MAX_CHUNK, int(per_turn / estimates[i])))
        runs = _kernel_runs(calls[i], iterations, is_last=n == len(turns) - 1)
        kernel_times[i] += [sum(us for _, us in run) for run in runs]
        kernels[i] = max([kernels[i], *map(len, runs)])
    for i in turns:
        repeats = max(2, min(1000, int(per_turn / estimates[i])))
        loop_times[i].append(1e6 * loop(calls[i], repeats))
    return [
        Timing(statistics.median(k) if k else None, min(loops), count)
        for k, loops, count in zip(kernel_times, loop_times, kernels, strict=True)
    ]


def _kernel_runs(
    call: Call, iterations: int, *, is_last: bool = True
) -> list[list[tuple[str, float]]]:
    """Returns (name, microseconds) of every kernel, for each iteration; empty if none was seen.

    CUPTI is detached after the last runs, before loops are timed. That takes some 20 ms, more than
    most runs.
    """
    from jax.experimental.mosaic.gpu import profiler  # needs a jaxlib with GPU support

    if not isinstance(call.function, jax.stages.Wrapped | jax.stages.Compiled):
        return []
    iterations = max(1, min(iterations, _KEPT_BYTES // _result_bytes(call)))
    cupti = profiler.Cupti(finalize=is_last)
    run = cupti.measure(call.function, aggregate=False, iterations=iterations)
    try:
        _, timings = run(*call.arguments)
    except RuntimeError:  # the iterations did not launch the same kernels
        return []
    if timings is None:
        return []
    runs = [timings] if iterations == 1 else timings
    return [[(name, 1e3 * milliseconds) for name, milliseconds in run] for run in runs]


def loop(call: Call, repeats: int) -> float:
    """Returns the seconds per call in a loop that waits at its end."""
    jax.block_until_ready(call())
    start = time.perf_counter()
    for _ in range(repeats):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / repeats


def _result_bytes(call: Call) -> int:
    if isinstance(call.function, jax.stages.Compiled):
        results = jax.tree.leaves(call.function.out_info)
    else:
        results = jax.tree.leaves(jax.eval_shape(call.function, *call.arguments))
    return max(1, sum(each.size * each.dtype.itemsize for each in results))
