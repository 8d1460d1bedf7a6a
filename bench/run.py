"""Runs problems: makes the data, checks every result, times what is right."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

import jax_gpuops
from bench import documents, measure, ops, peers
from bench.problem import Problem, Variant
from bench.results import FAILED, REFUSED, RIGHT, WRONG, XLA, Result, finite, first_line
from jax_gpuops import _library, _plan, _primitive

_CEILING_ELEMENTS = 2**29
_CEILING_MATRIX = 8192


def has_gpu() -> bool:
    """True if JAX's default device is a GPU."""
    return jax.default_backend() == "gpu"


def check_kernels() -> None:
    """Raises ValueError if no kernels of ours can run here: XLA would be measured against XLA."""
    why = _library.gpu_problem() if has_gpu() else _library.missing("interpret")
    if why is not None:
        raise ValueError(f"there is nothing of ours to measure: {why}; see python -m jax_gpuops")


def variants(problem: Problem) -> list[Variant]:
    """Returns what the main table runs of a problem.

    On a GPU: what the user gets, and our kernels if that is not the same. Without one: every
    algorithm of ours on the host.
    """
    if not has_gpu():
        return [Variant("interpret", each) for each in algorithms(problem)]
    default = plans(problem, Variant())
    ours = all(each.implementation == "cuda" for each in default)
    return [Variant()] if default and ours else [Variant(), Variant("cuda")]


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
                        each.status, each.message = FAILED, first_line(failure)
        return results

    def _solve(self, problem: Problem, results: Sequence[Result]) -> None:
        """Runs, checks and times what is not refused, and completes the results."""
        operands = _operands(problem)
        upstream = _call(problem, ops.OPS[problem.op].upstream, operands)
        judge = _judge(problem, operands)
        xla_error, _ = judge(upstream())
        right: list[tuple[Result, measure.Call]] = []
        for result in results:
            try:
                call = _call_of(result, operands)
                error, excess = judge(peers.as_jax(call()))
            except Exception as failure:  # the others may work
                # A peer need not be installed, nor take every problem.
                result.status = REFUSED if result.peer else FAILED
                result.message = first_line(failure)
                continue
            result.error, result.excess = finite(error), finite(excess)
            result.xla_error = finite(xla_error)
            result.bytes, result.operations = _work(problem, operands, upstream)
            result.warm = sum(each.nbytes for each in operands) < ops.ON_CHIP_BYTES
            if excess <= _allowed_excess(result):
                right.append((result, call))
            else:
                result.status = WRONG
                times = excess / _allowed_excess(result)
                result.message = f"the error is {times:.3g} times what it may be"
        if self._timed and right:
            self._time(problem, *zip(*right, strict=True), upstream, operands)

    def rate(self, results: Sequence[Result]) -> None:
        """Fills in rates and ceilings, once all results of a family are there."""
        for each in results:
            if each.timed:
                each.rate = _rate(each, each.time_us)
                each.xla_rate = _rate(each, each.xla_time_us)
        for each in results:
            if each.timed:
                each.ceiling = self._ceiling(each, results)

    def _time(self, problem, results, calls, upstream, operands) -> None:
        """Times calls and XLA's in turns, without the part that is not the op's own."""
        producer = ops.OPS[problem.op].producer
        alone = [] if producer is None else [measure.Call(jax.jit(producer), operands)]
        xla, *timings = self._measure([upstream, *calls, *alone])
        part = timings.pop() if alone else measure.NOTHING
        for result, timing in zip(results, timings, strict=True):
            part_us, time_us, xla_time_us = measure.times_us([part, timing, xla])
            result.time_us, result.xla_time_us = time_us - part_us, xla_time_us - part_us
            own, xla_own = timing.without(part), xla.without(part)
            result.kernel_us, result.loop_us = own.kernel_us, own.loop_us
            result.xla_kernel_us, result.xla_loop_us = xla_own.kernel_us, xla_own.loop_us
            result.kernels, result.xla_kernels = own.kernels, xla_own.kernels

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


def kernel_calls(problem: Problem, **arguments: Any) -> list[tuple[Primitive, list, dict]]:
    """Returns the calls of our kernels in what is timed of a problem, without running it.

    Args:
      problem: the problem.
      **arguments: `implementation` and `algorithm`.

    Returns:
      For each call the primitive, the avals of its operands, and its parameters.

    Raises:
      TypeError: as the op would.
      ValueError: as the op would.
    """
    op = ops.OPS[problem.op]
    function = functools.partial(ops.ours(problem.op), **ops.keywords(problem), **arguments)
    operands = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in op.operands(problem)]
    with _mode(problem.dtype):
        prepared = jax.eval_shape(functools.partial(op.prepare, function), *operands)
        jaxpr = jax.make_jaxpr(functools.partial(op.apply, function))(*prepared)
    return list(_plan._calls(jaxpr.jaxpr))


def plans(problem: Problem, variant: Variant) -> list[jax_gpuops.Plan]:
    """Returns what each call of our kernels in a problem would run; empty if XLA takes it all.

    Raises:
      TypeError: as the op would.
      ValueError: as the op would.
    """
    calls = kernel_calls(
        problem, implementation=variant.implementation, algorithm=variant.algorithm
    )
    platform = "cuda" if has_gpu() else "cpu"
    return [
        _plan._plan_call(_primitive.KERNELS[primitive], avals, platform, **params)
        for primitive, avals, params in calls
    ]


def _start(problem: Problem, variant: Variant) -> Result:
    """Returns a result with what is known before anything runs."""
    result = Result(
        problem,
        ops.OPS[problem.op].family,
        variant.implementation,
        variant.algorithm,
        algorithm=str(variant),
        peer=variant.peer,
    )
    if variant.peer is None:
        try:
            names = [each.algorithm or XLA for each in plans(problem, variant)]
            planned = "+".join(dict.fromkeys(names)) or XLA
            if variant.algorithm not in (None, *names):  # a derivative may choose for itself
                raise ValueError(f"what is timed of it runs {planned}")
            result.algorithm = planned
        except (TypeError, ValueError) as error:
            result.status, result.message = REFUSED, first_line(error)
    return result


def _call(problem: Problem, function: Callable, operands, **arguments: Any) -> measure.Call:
    """Returns the timed part of a problem, solved by a function; what comes before is done."""
    op = ops.OPS[problem.op]
    function = functools.partial(function, **ops.keywords(problem), **arguments)
    prepared = op.prepare(function, *operands)
    return measure.Call(jax.jit(functools.partial(op.apply, function)), prepared)


def kernel_and_xla(problem: Problem) -> tuple[measure.Call, measure.Call]:
    """Returns the timed part of a problem by a kernel on the GPU and by XLA, each called once."""
    operands = _operands(problem)
    ours = _call(problem, ops.ours(problem.op), operands, implementation="cuda")
    xla = _call(problem, ops.OPS[problem.op].upstream, operands)
    jax.block_until_ready((ours(), xla()))
    return ours, xla


def _call_of(result: Result, operands) -> measure.Call:
    """Returns the timed part of the problem as a result says that it is to be solved.

    Raises:
      RuntimeError: if XLA would compute what should be a kernel of ours.
    """
    if result.peer is not None:
        return peers.call(result.peer, result.problem, operands)
    call = _call(
        result.problem,
        ops.ours(result.problem.op),
        operands,
        implementation=result.implementation,
        algorithm=result.named_algorithm,
    )
    if result.ours or result.implementation not in (None, "xla"):
        program = call.function.lower(*call.arguments).as_text()
        if "jax_gpuops_" not in program:
            raise RuntimeError("the compiled program does not call our kernel")
    return call


def _operands(problem: Problem) -> list[jax.Array]:
    """Draws the operands, the same ones for the same problem, on the device."""
    return ops.draw(ops.OPS[problem.op].operands(problem), str(problem))


def _judge(problem: Problem, operands) -> Callable[[Any], tuple[float, float]]:
    """Returns a function that gives the error of a result and its excess over the bound.

    The reference is XLA's result in float64, for the whole array. Ops that round nothing, and
    integers, have their reference in their own dtype.
    """
    op = ops.OPS[problem.op]
    rounds = jnp.issubdtype(problem.dtype, jnp.inexact) and op.error is not ops.check.exact
    error = op.error if rounds else ops.check.exact

    def widen(x):
        return x.astype(jnp.float64) if rounds and jnp.issubdtype(x.dtype, jnp.inexact) else x

    def compute_reference(*operands):
        keywords = ops.keywords(problem)
        if rounds:
            for name in ("preferred_element_type", "dtype"):
                keywords.pop(name, None)
        function = functools.partial(op.upstream, **keywords)
        return op.apply(function, *op.prepare(function, *map(widen, operands)))

    @jax.jit
    def errors(y, *operands):
        reference = compute_reference(*operands)
        value, excess = error(problem, y, reference, operands)
        # Not left to the maxima in `error`: XLA's on CPU lose NaN in long arrays.
        lost = excess < 0
        if rounds:
            nan = jax.tree.map(lambda a, b: jnp.any(jnp.isnan(a) != jnp.isnan(b)), y, reference)
            lost |= functools.reduce(jnp.logical_or, jax.tree.leaves(nan))
        return value, jnp.where(lost, jnp.inf, excess)

    def judge(y) -> tuple[float, float]:
        with jax.enable_x64(True):
            expected = jax.eval_shape(compute_reference, *operands)
            if jax.tree.map(jnp.shape, y) != jax.tree.map(jnp.shape, expected):
                return float("inf"), float("inf")
            value, excess = errors(y, *operands)
        return float(value), float(excess)

    return judge


def _allowed_excess(result: Result) -> float:
    """Returns how many times the bound an error may be."""
    op = ops.OPS[result.problem.op]
    if result.ours or op.error is ops.check.exact:
        return 1
    # The bounds are our contract, which has 16-bit floats computed in float32. Others may round
    # every step of softmax to 16 bits, so several roundings add up where we have one.
    dtype = jnp.dtype(result.problem.dtype)
    return 8 if jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize == 2 else 1


def _work(problem: Problem, operands, call: measure.Call) -> tuple[int, int | None]:
    results = jax.tree.leaves(jax.eval_shape(call.function, *call.arguments))
    op = ops.OPS[problem.op]
    moved = op.bytes(problem, operands, results)
    return moved, ops.floating_point_operations(problem) if op.limit == "matmul" else None


def _rate(result: Result, time_us: float) -> float:
    """Returns TFLOP/s for a matrix product, else GB/s."""
    if result.operations is not None:
        return result.operations / time_us / 1e6
    return result.bytes / time_us / 1e3


def _bandwidth(limit: str, measure_calls) -> float:
    """Returns the GB/s of a copy or of a sum that is far larger than the L2 cache."""
    x = jax.random.normal(jax.random.key(0, impl="rbg"), (_CEILING_ELEMENTS,), jnp.float32)
    function = jax.jit({"copy": lambda x: x + 1, "read": jnp.sum}[limit])
    (timing,) = measure_calls([measure.Call(function, [x])])
    moved = x.nbytes * {"copy": 2, "read": 1}[limit]
    return moved / measure.times_us([timing])[0] / 1e3


def _matmul_rate(problem: Problem, measure_calls) -> float:
    """Returns the TFLOP/s of XLA for a large product."""
    with _mode(problem.dtype):
        call = _call(problem, ops.OPS[problem.op].upstream, _operands(problem))
        (timing,) = measure_calls([call])
    return ops.floating_point_operations(problem) / measure.times_us([timing])[0] / 1e6
