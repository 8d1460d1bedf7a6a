"""Runs problems: makes the data, checks every result, times what is right."""

from __future__ import annotations

import contextlib
import functools
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_gpuops
from bench import documents, measure, ops
from bench.problem import Problem, Variant
from bench.results import FAILED, REFUSED, RIGHT, WRONG, XLA, Result

WARM_BYTES = 60_000_000
"""Operands below this size stay in an H200's L2 cache from one call to the next."""

_CEILING_ELEMENTS = 2**29
_CEILING_MATRIX = 8192


def has_gpu() -> bool:
    """True if JAX's default device is a GPU."""
    return jax.default_backend() == "gpu"


def variants(problem: Problem) -> list[Variant]:
    """Returns what the main table runs of a problem.

    On a GPU: what the user gets, and our kernel if that is not the same. Without one: every
    algorithm of ours on the host.
    """
    if not has_gpu():
        return [Variant("interpret", each) for each in algorithms(problem)]
    default = _plan(problem, Variant())
    return [Variant()] if default.implementation == "cuda" else [Variant(), Variant("cuda")]


def algorithms(problem: Problem) -> list[str]:
    """Returns the names of all algorithms of the problem's family, in ladder order."""
    return [each.name for each in jax_gpuops.algorithms(ops.OPS[problem.op].family)]


class Runner:
    """Runs problems one after another, and keeps the ceilings that it has measured."""

    def __init__(self, *, timed: bool, seconds: float = 0.2):
        """Prepares to run.

        Args:
          timed: True to measure speed, which takes a GPU.
          seconds: about how long each function is measured.
        """
        self._timed = timed
        self._measure = functools.partial(measure.measure, seconds=seconds)
        self._ceilings: dict[Any, float] = {}

    def run(self, problem: Problem, variants: Sequence[Variant]) -> list[Result]:
        """Runs a problem in several ways, on the same operands and in turns with XLA.

        Returns:
          A result for each variant, right or not.
        """
        with _mode(problem.dtype):
            results = [_start(problem, variant) for variant in variants]
            taken = [each for each in results if each.status != REFUSED]
            try:
                if taken:
                    self._solve(problem, taken)
            except Exception as failure:  # what is left of a long run is worth having
                for each in taken:
                    if each.status == RIGHT:
                        each.status, each.message = FAILED, _first_line(failure)
        return results

    def _solve(self, problem: Problem, results: Sequence[Result]) -> None:
        """Runs, checks and times what is not refused, and completes the results."""
        operands = _operands(problem)
        upstream = _jit(ops.OPS[problem.op].upstream, problem)
        judge = _judge(problem, operands)
        xla_error, _ = judge(upstream(*operands))
        right: list[tuple[Result, Callable]] = []
        for result in results:
            function = _ours(result)
            try:
                if result.algorithm != XLA:
                    _check_custom_call(function, operands)
                error, excess = judge(function(*operands))
            except Exception as failure:  # the other algorithms may work
                result.status, result.message = FAILED, _first_line(failure)
                continue
            result.error, result.excess = _finite(error), _finite(excess)
            result.xla_error = _finite(xla_error)
            result.bytes, result.operations = _work(problem, operands, function)
            result.warm = sum(each.nbytes for each in operands) < WARM_BYTES
            if excess <= _allowed_excess(result):
                right.append((result, function))
            else:
                result.status = WRONG
                times = excess / _allowed_excess(result)
                result.message = f"the error is {times:.3g} times what it may be"
        if self._timed and right:
            self._time(*zip(*right, strict=True), upstream, operands)

    def rate(self, results: Sequence[Result]) -> None:
        """Fills in rates and ceilings, once all results of a family are there."""
        for each in results:
            if each.timed:
                each.rate = _rate(each, each.time_us)
                each.xla_rate = _rate(each, each.xla_time_us)
        for each in results:
            if each.timed:
                each.ceiling = self._ceiling(each, results)

    def _time(self, results, functions, upstream, operands) -> None:
        xla, *timings = self._measure([upstream, *functions], operands)
        for result, timing in zip(results, timings, strict=True):
            result.kernel_us, result.loop_us = timing.kernel_us, timing.loop_us
            result.kernels = timing.kernels
            result.xla_kernel_us, result.xla_loop_us = xla.kernel_us, xla.loop_us
            result.xla_kernels = xla.kernels
            result.time_us, result.xla_time_us = measure.times_us([timing, xla])

    def _ceiling(self, result: Result, results: Sequence[Result]) -> float:
        """Returns what bounds a rate: measured bandwidth, or the best product of XLA."""
        problem = result.problem
        limit = ops.OPS[problem.op].limit
        if limit != "matmul":
            return self._measured(limit, functools.partial(_bandwidth, limit, self._measure))
        kind = (problem.dtype, problem.options.get("precision", "highest"))
        square = ops.make("matmul", (_CEILING_MATRIX,) * 3, problem.dtype, precision=kind[1])
        known = self._measured(kind, lambda: _matmul_rate(square, self._measure))
        seen = [
            each.xla_rate
            for each in results
            if each.xla_rate is not None
            and (each.problem.dtype, each.problem.options.get("precision", "highest")) == kind
        ]
        return max([known, *seen])

    def _measured(self, key: Any, rate: Callable[[], float]) -> float:
        if key not in self._ceilings:
            self._ceilings[key] = rate()
        return self._ceilings[key]


def climb(results: Iterable[Result]) -> None:
    """Fills in the speed-ups over the first step of a ladder, next to the document's."""
    results = list(results)
    for each in results:
        ladder = documents.LADDERS[each.family]
        each.claimed_speedup = ladder.speedup(each.problem.shape, each.algorithm)
        first = next(
            r for r in results if r.problem == each.problem and r.algorithm == ladder.steps[0]
        )
        if each.timed and first.timed:
            each.speedup = first.time_us / each.time_us


def _mode(dtype: str) -> contextlib.AbstractContextManager:
    """JAX keeps 64-bit dtypes only in this mode."""
    return jax.enable_x64(jnp.dtype(dtype) in (np.int64, np.uint64, np.float64, np.complex128))


def _plan(problem: Problem, variant: Variant) -> jax_gpuops.Plan:
    with _mode(problem.dtype):
        return jax_gpuops.plan(
            problem.op,
            ops.OPS[problem.op].operands(problem.shape),
            problem.dtype,
            implementation=variant.implementation,
            algorithm=variant.algorithm,
            **ops.keywords(problem),
        )


def _start(problem: Problem, variant: Variant) -> Result:
    """Returns a result with what is known before anything runs."""
    result = Result(
        problem,
        ops.OPS[problem.op].family,
        variant.implementation,
        variant.algorithm,
        algorithm=str(variant),
    )
    try:
        result.algorithm = _plan(problem, variant).algorithm or XLA
    except (TypeError, ValueError) as error:
        result.status, result.message = REFUSED, _first_line(error)
    return result


def _jit(function: Callable, problem: Problem, **arguments: Any) -> Callable:
    return jax.jit(functools.partial(function, **ops.keywords(problem), **arguments))


def _ours(result: Result) -> Callable:
    return _jit(
        ops.ours(result.problem.op),
        result.problem,
        implementation=result.implementation,
        algorithm=result.named_algorithm,
    )


def _operands(problem: Problem) -> list[jax.Array]:
    """Draws the operands, the same ones for the same problem, on the device."""
    op, dtype = ops.OPS[problem.op], np.dtype(jnp.dtype(problem.dtype))
    draw = jax.jit(op.draw, static_argnums=(1, 2))
    key = jax.random.key(zlib.crc32(str(problem).encode()), impl="rbg")
    shapes = op.operands(problem.shape)
    keys = jax.random.split(key, len(shapes))
    return [draw(k, shape, dtype) for k, shape in zip(keys, shapes, strict=True)]


def _judge(problem: Problem, operands) -> Callable[[jax.Array], tuple[float, float]]:
    """Returns a function that gives the error of a result and its excess over the bound.

    The reference is XLA's result in float64, for the whole array. Ops that round nothing, and
    integers, have their reference in their own dtype.
    """
    op = ops.OPS[problem.op]
    dtype = jnp.dtype(problem.dtype)
    rounds = jnp.issubdtype(dtype, jnp.inexact) and op.error is not ops.check.exact
    error = op.error if rounds else ops.check.exact
    wide = jnp.promote_types(dtype, jnp.float64) if rounds else dtype

    def compute_reference(*operands):
        return op.upstream(*[x.astype(wide) for x in operands], **ops.keywords(problem))

    with jax.enable_x64(True):
        reference = jax.jit(compute_reference)(*operands)

        @jax.jit
        def errors(y, reference, *operands):
            value, excess = error(problem, y, reference, operands)
            # Not left to the maxima in `error`: XLA's on CPU lose NaN in long arrays.
            lost = jnp.any(jnp.isnan(y) != jnp.isnan(reference)) if rounds else False
            return value, jnp.where(lost, jnp.inf, excess)

    def judge(y) -> tuple[float, float]:
        if y.shape != reference.shape:
            return float("inf"), float("inf")
        with jax.enable_x64(True):
            value, excess = errors(y, reference, *operands)
        return float(value), float(excess)

    return judge


def _allowed_excess(result: Result) -> float:
    """Returns how many times the bound an error may be."""
    op = ops.OPS[result.problem.op]
    if result.algorithm != XLA or op.error is ops.check.exact:
        return 1
    # The bounds are our contract, which has 16-bit floats computed in float32. XLA may round every
    # step of softmax to 16 bits, so several roundings add up where we have one.
    dtype = jnp.dtype(result.problem.dtype)
    return 8 if jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize == 2 else 1


def _check_custom_call(function: Callable, operands) -> None:
    """Raises RuntimeError if XLA would compute what should be a kernel of ours."""
    if "jax_gpuops_" not in function.lower(*operands).as_text():
        raise RuntimeError("the compiled program does not call our kernel")


def _work(problem: Problem, operands, function) -> tuple[int, int | None]:
    results = jax.tree.leaves(jax.eval_shape(function, *operands))
    moved = sum(each.size * each.dtype.itemsize for each in [*operands, *results])
    if ops.OPS[problem.op].limit == "matmul":
        return moved, ops.floating_point_operations(problem)
    return moved, None


def _rate(result: Result, time_us: float) -> float:
    """Returns TFLOP/s for a matrix product, else GB/s."""
    if result.operations is not None:
        return result.operations / time_us / 1e6
    return result.bytes / time_us / 1e3


def _bandwidth(limit: str, measure_functions) -> float:
    """Returns the GB/s of a copy or of a sum that is far larger than the L2 cache."""
    x = jax.random.normal(jax.random.key(0, impl="rbg"), (_CEILING_ELEMENTS,), jnp.float32)
    function = jax.jit({"copy": lambda x: x + 1, "read": jnp.sum}[limit])
    (timing,) = measure_functions([function], [x])
    moved = x.nbytes * {"copy": 2, "read": 1}[limit]
    return moved / measure.times_us([timing])[0] / 1e3


def _matmul_rate(problem: Problem, measure_functions) -> float:
    """Returns the TFLOP/s of XLA for a large product."""
    with _mode(problem.dtype):
        function = _jit(ops.OPS[problem.op].upstream, problem)
        (timing,) = measure_functions([function], _operands(problem))
    return ops.floating_point_operations(problem) / measure.times_us([timing])[0] / 1e6


def _finite(number: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return number if math.isfinite(number) else None


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]
