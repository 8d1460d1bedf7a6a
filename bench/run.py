"""Runs problems: draws the operands, checks every result, and times the right ones."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """Raises ValueError if our kernels cannot run here: XLA would be measured against XLA."""
    why = _library.gpu_problem() if has_gpu() else _library.missing("interpret")
    if why is not None:
        raise ValueError(f"there is nothing of ours to measure: {why}; see python -m jax_gpuops")


def variants(problem: Problem) -> list[Variant]:
    """Returns the ways in which the main table runs a problem.

    On a GPU: the default, and our kernels if these are not the default. Without one: each of our
    algorithms on the host.
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
        return self._finish(_prepare(problem, variants))

    def run_all(
        self,
        problems: Sequence[tuple[Problem, Sequence[Variant]]],
        *,
        announce: Callable[[str], None] = lambda _: None,
        cores: int | None = None,
    ) -> Iterator[list[Result]]:
        """Runs many problems, each as `run` does.

        Compilation would take most of the time, and would disturb the measurements. So the programs
        of a batch of problems are compiled in parallel before any of the batch runs.

        Args:
          problems: the problems, each with the ways to run it.
          announce: called with what is done next: compile a batch, or run a problem.
          cores: the number of problems that are compiled at a time; None for one per core.

        Yields:
          The results of each problem, in order.
        """
        cores = cores or os.cpu_count() or 1
        size = 4 * cores
        with concurrent.futures.ThreadPoolExecutor(cores) as pool:
            for first in range(0, len(problems), size):
                batch = problems[first : first + size]
                announce(f"compiling {len(batch)} of {len(problems)} cases")
                for each in list(pool.map(lambda problem: _prepare(*problem), batch)):
                    announce(str(each.problem))
                    yield self._finish(each)

    def _finish(self, prepared: _Prepared) -> list[Result]:
        """Runs the compiled programs of a problem."""
        with _mode(prepared.problem.dtype):
            try:
                if prepared.programs is not None:
                    self._solve(prepared.problem, prepared.programs)
            except Exception as failure:  # the rest of a long run should go on
                _fail(prepared.results, failure)
        return prepared.results

    def _solve(self, problem: Problem, programs: _Programs) -> None:
        """Runs, checks and times compiled programs, and completes the results."""
        operands = programs.draw()
        upstream = programs.upstream(operands)
        judge = _judge(problem, operands, programs.errors)
        xla_error, _ = judge(upstream())
        right: list[tuple[Result, measure.Call]] = []
        for result, call_with in programs.ways:
            try:
                call = call_with(operands)
                error, excess = judge(peers.as_jax(call()))
            except Exception as failure:  # the others may work
                # A peer may not be installed, or may not support the problem.
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
            self._time(programs.producer, *zip(*right, strict=True), upstream, operands)

    def rate(self, results: Sequence[Result]) -> None:
        """Fills in rates and ceilings, given all results of a family."""
        for each in results:
            if each.timed:
                each.rate = _rate(each, each.time_us)
                each.xla_rate = _rate(each, each.xla_time_us)
        for each in results:
            if each.timed:
                each.ceiling = self._ceiling(each, results)

    def _time(self, producer, results, calls, upstream, operands) -> None:
        """Times calls and XLA's in turns, and subtracts the time of the producer."""
        alone = [] if producer is None else [measure.Call(producer, operands)]
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
        """Returns the bound of a rate: measured bandwidth, or the best product of XLA."""
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
    """Returns the context in which JAX supports a dtype: 64-bit mode for 64-bit dtypes."""
    return jax.enable_x64(jnp.dtype(dtype) in (np.int64, np.uint64, np.float64, np.complex128))


def kernel_calls(
    problem: Problem, *, whole: bool = False, **arguments: Any
) -> list[tuple[Primitive, list, dict]]:
    """Returns the calls of our kernels in the timed part of a problem, without running it.

    Args:
      problem: the problem.
      whole: True to include the untimed part, such as the forward pass of a derivative.
      **arguments: `implementation` and `algorithm`.

    Returns:
      For each call the primitive, the avals of its operands, and its parameters.

    Raises:
      TypeError: as the op would.
      ValueError: as the op would.
    """
    prepare, apply = _parts(problem, ops.ours(problem.op), **arguments)
    with _mode(problem.dtype):
        if whole:
            jaxpr = jax.make_jaxpr(lambda *operands: apply(*prepare(*operands)))(*_types(problem))
        else:
            jaxpr = jax.make_jaxpr(apply)(*jax.eval_shape(prepare, *_types(problem)))
    return list(_plan._calls(jaxpr.jaxpr))


def plans(problem: Problem, variant: Variant, *, whole: bool = False) -> list[jax_gpuops.Plan]:
    """Returns the plan of each call of our kernels in a problem; empty if XLA runs all of it.

    Args:
      problem: the problem.
      variant: the way to solve it.
      whole: as for `kernel_calls`.

    Raises:
      TypeError: as the op would.
      ValueError: as the op would.
    """
    arguments = {"implementation": variant.implementation, "algorithm": variant.algorithm}
    calls = kernel_calls(problem, whole=whole, **arguments)
    platform = "cuda" if has_gpu() else "cpu"
    return [
        _plan._plan_call(_primitive.KERNELS[primitive], avals, platform, **params)
        for primitive, avals, params in calls
    ]


def _start(problem: Problem, variant: Variant) -> Result:
    """Returns a result with the fields that are known before anything runs."""
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


CallWith = Callable[[Sequence[jax.Array]], measure.Call]
"""Maps operands to the timed part of a problem, after running the untimed part."""


@dataclasses.dataclass
class _Programs:
    """The compiled programs of a problem.

    Attributes:
      draw: draws the operands.
      upstream: the timed part by XLA.
      ways: the timed part for each result.
      errors: `_errors` of the problem.
      producer: the producer of the op, or None.
    """

    draw: Callable[..., Any]
    upstream: CallWith
    ways: list[tuple[Result, CallWith]]
    errors: Callable[..., Any]
    producer: Callable[..., Any] | None


@dataclasses.dataclass
class _Prepared:
    """A problem that is ready to run.

    Attributes:
      problem: the problem.
      results: one for each way to run it, as `_start` returns it.
      programs: None if nothing can run.
    """

    problem: Problem
    results: list[Result]
    programs: _Programs | None = None


def _prepare(problem: Problem, variants: Sequence[Variant]) -> _Prepared:
    """Compiles all programs of a problem, in any thread.

    Failures are recorded in the results.
    """
    with _mode(problem.dtype):
        prepared = _Prepared(problem, [_start(problem, variant) for variant in variants])
        taken = [each for each in prepared.results if each.status != REFUSED]
        try:
            if taken:
                prepared.programs = _compile(problem, taken)
        except Exception as failure:
            _fail(prepared.results, failure)
    return prepared


def _compile(problem: Problem, results: Sequence[Result]) -> _Programs:
    op, operands = ops.OPS[problem.op], _types(problem)
    draw = compiled(functools.partial(_operands, problem))
    upstream, y = _compiled_call(problem, op.upstream)
    with jax.enable_x64(True):
        errors = compiled(functools.partial(_errors, problem), y, *operands, autotuned=False)
    producer = None if op.producer is None else compiled(op.producer, *operands)
    ways = []
    for result in results:
        try:
            ways.append((result, _call_of(result)))
        except Exception as failure:  # the others may work
            result.status, result.message = FAILED, first_line(failure)
    return _Programs(draw, upstream, ways, errors, producer)


def _fail(results: Sequence[Result], failure: Exception) -> None:
    """Marks the results that seemed right as failed."""
    for each in results:
        if each.status == RIGHT:
            each.status, each.message = FAILED, first_line(failure)


def compiled(function: Callable, *types: Any, autotuned: bool = True) -> jax.stages.Compiled:
    """Compiles a function, given the types of its arguments.

    Args:
      function: the function.
      *types: the types of its arguments.
      autotuned: False for a function that runs once: autotuning products, above all in float64,
        takes longer than computing them.
    """
    options = None if autotuned else {"xla_gpu_autotune_level": 0}
    return jax.jit(function).lower(*types).compile(compiler_options=options)


def _parts(problem: Problem, function: Callable, **arguments: Any) -> tuple[Callable, Callable]:
    """Returns the untimed and the timed part of a problem, solved by a function."""
    op = ops.OPS[problem.op]
    function = functools.partial(function, **ops.keywords(problem), **arguments)
    return functools.partial(op.prepare, function), functools.partial(op.apply, function)


def _call(problem: Problem, function: Callable, operands, **arguments: Any) -> measure.Call:
    """Returns the timed part of a problem, solved by a function, after running the untimed part."""
    prepare, apply = _parts(problem, function, **arguments)
    return measure.Call(jax.jit(apply), prepare(*operands))


def _compiled_call(
    problem: Problem, function: Callable, *, must_have: str = "", **arguments: Any
) -> tuple[CallWith, Any]:
    """Compiles the timed and the untimed part of a problem, solved by a function.

    Returns:
      The timed part as a function of the operands, and the types of its results.

    Raises:
      RuntimeError: if the text of the compiled program does not contain `must_have`.
    """
    prepare, apply = _parts(problem, function, **arguments)
    given = _types(problem)
    if ops.OPS[problem.op].prepare is not ops.prepare_nothing:
        prepare = compiled(prepare, *given)
        given = prepare.out_info
    lowered = jax.jit(apply).lower(*given)
    if must_have not in lowered.as_text():
        raise RuntimeError("the compiled program does not call our kernel")
    timed = lowered.compile()
    return lambda operands: measure.Call(timed, prepare(*operands)), timed.out_info


def kernel_and_xla(problem: Problem) -> tuple[measure.Call, measure.Call]:
    """Returns the timed part of a problem by a kernel on the GPU and by XLA, each called once."""
    operands = _operands(problem)
    ours = _call(problem, ops.ours(problem.op), operands, implementation="cuda")
    xla = _call(problem, ops.OPS[problem.op].upstream, operands)
    jax.block_until_ready((ours(), xla()))
    return ours, xla


def _call_of(result: Result) -> CallWith:
    """Compiles the timed part of the problem of a result, in its way.

    Raises:
      RuntimeError: if XLA would run instead of our kernel.
    """
    if result.peer is not None:
        return functools.partial(peers.call, result.peer, result.problem)
    is_kernel = result.ours or result.implementation not in (None, "xla")
    call, _ = _compiled_call(
        result.problem,
        ops.ours(result.problem.op),
        must_have="jax_gpuops_" if is_kernel else "",
        implementation=result.implementation,
        algorithm=result.named_algorithm,
    )
    return call


def _types(problem: Problem) -> list[jax.ShapeDtypeStruct]:
    """Returns the types of the operands."""
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ops.OPS[problem.op].operands(problem)]


def _operands(problem: Problem) -> list[jax.Array]:
    """Draws the operands, the same ones for the same problem, on the device."""
    return ops.draw(ops.OPS[problem.op].operands(problem), str(problem))


def _rounds(problem: Problem) -> bool:
    """True if results are compared with a float64 reference, and not for equality."""
    is_exact = ops.OPS[problem.op].error is ops.check.exact
    return jnp.issubdtype(problem.dtype, jnp.inexact) and not is_exact


def _reference(problem: Problem, *operands: jax.Array) -> Any:
    """Returns XLA's result in float64, for the whole array.

    The reference of exact ops and of integers has their own dtype.
    """
    op, rounds = ops.OPS[problem.op], _rounds(problem)
    widen = functools.partial(ops.check.widened, rounds=rounds, is_product=op.limit == "matmul")
    keywords = ops.keywords(problem)
    if rounds:
        for name in ("preferred_element_type", "dtype"):
            keywords.pop(name, None)
    function = functools.partial(op.upstream, **keywords)
    return op.apply(function, *op.prepare(function, *map(widen, operands)))


def _errors(problem: Problem, y: Any, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the error of a result, and its excess over the bound."""
    rounds = _rounds(problem)
    error = ops.OPS[problem.op].error if rounds else ops.check.exact
    reference = _reference(problem, *operands)
    value, excess = error(problem, y, reference, operands)
    # The maxima in `error` do not suffice: those of XLA on CPU lose NaN in long arrays.
    lost = excess < 0
    if rounds:
        nan = jax.tree.map(lambda a, b: jnp.any(jnp.isnan(a) != jnp.isnan(b)), y, reference)
        lost |= functools.reduce(jnp.logical_or, jax.tree.leaves(nan))
    return value, jnp.where(lost, jnp.inf, excess)


def _judge(
    problem: Problem, operands, errors: Callable[..., Any] | None = None
) -> Callable[[Any], tuple[float, float]]:
    """Returns a function that gives the error of a result and its excess over the bound.

    Args:
      problem: the problem.
      operands: its operands.
      errors: `_errors` of the problem, compiled; None to compile it.
    """
    errors = errors or jax.jit(functools.partial(_errors, problem))

    def judge(y) -> tuple[float, float]:
        with jax.enable_x64(True):
            expected = jax.eval_shape(functools.partial(_reference, problem), *operands)
            if jax.tree.map(jnp.shape, y) != jax.tree.map(jnp.shape, expected):
                return float("inf"), float("inf")
            value, excess = errors(y, *operands)
        return float(value), float(excess)

    return judge


def _allowed_excess(result: Result) -> float:
    """Returns the largest allowed ratio of an error to its bound."""
    op = ops.OPS[result.problem.op]
    variant = Variant(result.implementation, result.named_algorithm)
    if op.error is ops.check.exact or (
        result.ours
        and all(p.implementation != "xla" for p in plans(result.problem, variant, whole=True))
    ):
        return 1
    # The bounds are our contract: 16-bit floats are computed in float32. XLA and others may round
    # every step of softmax to 16 bits, so several roundings add up instead of one. XLA does so in
    # the forward pass of our derivatives, too.
    dtype = jnp.dtype(result.problem.dtype)
    return 8 if jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize == 2 else 1


def _work(problem: Problem, operands, call: measure.Call) -> tuple[int, int | None]:
    results = jax.tree.leaves(call.function.out_info)
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
