"""Runs programs with plain JAX and with ours: checks every result, and times the right ones.

The check: the same program also runs with plain JAX in float64, as the reference. The results and
gradients of every way have two errors: the Frobenius norm of the difference relative to that of the
reference, and the largest difference of an element relative to the element, or to the root mean
square of all elements if that is larger. Neither may be more than `_FACTOR` times the error of
plain JAX on the same data, or that many roundings of the dtype if plain JAX is better than one.
Integers, such as tokens, must not differ unless those of plain JAX do, too.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_gpuops
from bench import measure, ops, run
from bench.problem import Problem
from bench.programs import cases, texts
from bench.results import FAILED, REFUSED, RIGHT, WRONG, ProgramResult, Way, finite, first_line

PLAIN = "plain JAX"
DEFAULT = "None"

_FACTOR = 4
"""The largest error of a way, relative to that of plain JAX."""

_PLAIN_LIMIT = 32
"""The largest error of plain JAX in the Frobenius norm, in roundings, for a meaningful check."""

_TF32_ROUNDING = 2.0**-10
"""XLA multiplies float32 matrices in TF32 on a GPU, unless told otherwise."""


def named() -> str:
    """Returns the implementation that runs our kernels on this machine."""
    return "cuda" if run.has_gpu() else "interpret"


class Runner:
    """Runs programs one after another."""

    def __init__(self, *, timed: bool, seconds: float = 0.1):
        """Prepares to run.

        Args:
          timed: True to measure speed, which takes a GPU.
          seconds: about how long each compiled program is measured.
        """
        self._timed = timed
        self._seconds = seconds

    def run(self, problem: Problem) -> list[ProgramResult]:
        """Runs a program in all ways: forward alone, and with its gradient if it has one.

        Returns:
          A result for each of the two, right or not.
        """
        phases = [False, True] if texts.PROGRAMS[problem.op].has_gradient else [False]
        results = [_start(problem, gradient) for gradient in phases]
        try:
            arguments = _arguments(problem)
            reference = _reference(problem, arguments)
        except Exception as failure:  # the rest of a long run should go on
            for each in results:
                _fail(each, failure)
            return results
        for each in results:
            try:
                self._solve(each, arguments, reference if each.gradient else reference[0])
            except Exception as failure:
                _fail(each, failure)
        return results

    def _solve(self, result: ProgramResult, arguments: _Arguments, reference: Any) -> None:
        """Compiles, checks and times the ways that are not refused, and completes the result."""
        result.warm = sum(x.nbytes for x in jax.tree.leaves(arguments)) < ops.ON_CHIP_BYTES
        ways, calls, ys = [], [], []
        for way in result.ways:
            try:
                call = _call(result, way, arguments)
                ys.append(jax.block_until_ready(call()))
            except Exception as failure:
                if way.name == PLAIN:
                    raise
                refused = way.name == named() and isinstance(failure, TypeError | ValueError)
                way.status = REFUSED if refused else FAILED
                way.message = first_line(failure)
                continue
            ways.append(way)
            calls.append(call)
        _judge(result, ways, ys, reference)
        del ys, reference  # they may take as much memory as the program
        right = [(way, call) for way, call in zip(ways, calls, strict=True) if way.status == RIGHT]
        if self._timed:
            timings = measure.measure([call for _, call in right], seconds=self._seconds)
            for (way, _), timing, us in zip(right, timings, measure.times_us(timings), strict=True):
                way.kernel_us, way.loop_us, way.time_us = timing.kernel_us, timing.loop_us, us
                way.kernels = timing.kernels


def _fail(result: ProgramResult, failure: Exception) -> None:
    """Marks the ways that seemed right as failed."""
    for way in result.ways:
        if way.status == RIGHT:
            way.status, way.message = FAILED, first_line(failure)


_Arguments = tuple[list[jax.Array], list[jax.Array]]  # operands, and cotangents of results


def _start(problem: Problem, gradient: bool) -> ProgramResult:
    """Returns a result with the fields that are known before anything runs."""
    ways = [
        Way(PLAIN),
        Way(DEFAULT, cases.floor(problem, gradient=gradient, named=False)),
        Way(named(), cases.floor(problem, gradient=gradient, named=True)),
    ]
    return ProgramResult(problem, gradient, ways)


def _function(problem: Problem, functions: texts.Functions, *, gradient: bool) -> Callable:
    """Returns the program as a function of the operands and, for the gradient, of cotangents."""
    program = texts.PROGRAMS[problem.op]
    forward = functools.partial(program.function, functions, **problem.options)
    if not gradient:
        return lambda operands: forward(*operands)

    def value_and_gradients(operands, cotangents):
        chosen = [i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.inexact)]

        def of_chosen(*xs):
            replaced = dict(zip(chosen, xs, strict=True))
            return forward(*(replaced.get(i, x) for i, x in enumerate(operands)))

        value, pullback = jax.vjp(of_chosen, *(operands[i] for i in chosen))
        return value, pullback(_as_cotangents(value, cotangents))

    return value_and_gradients


def _needs_cotangent(y) -> bool:
    return y.ndim > 0 and jnp.issubdtype(y.dtype, jnp.inexact)


def _as_cotangents(value: Any, given: Sequence[jax.Array]) -> Any:
    """Returns the cotangents of all results, given those of float arrays; that of a loss is 1."""
    remaining = iter(given)

    def cotangent(y):
        if not jnp.issubdtype(y.dtype, jnp.inexact):
            return np.zeros(y.shape, jax.dtypes.float0)
        return next(remaining) if _needs_cotangent(y) else jnp.ones_like(y)

    return jax.tree.map(cotangent, value)


def _arguments(problem: Problem) -> _Arguments:
    program = texts.PROGRAMS[problem.op]
    operands = ops.draw(list(program.operands(problem).values()), str(problem))
    if not program.has_gradient:
        return operands, []
    results = jax.eval_shape(_function(problem, texts.plain(), gradient=False), operands)
    needed = [
        ops.Operand(y.shape, y.dtype.name) for y in jax.tree.leaves(results) if _needs_cotangent(y)
    ]
    return operands, ops.draw(needed, f"cotangents of {problem}") if needed else []


def _reference(problem: Problem, arguments: _Arguments) -> Any:
    """Returns the results, and the gradients if there are any, in float64."""
    has_gradient = texts.PROGRAMS[problem.op].has_gradient
    function = _function(problem, texts.plain(), gradient=has_gradient)

    def widened(*arguments):
        return function(*jax.tree.map(_widen, arguments))

    given = arguments[: 1 + has_gradient]
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        lowered = jax.jit(widened).lower(*given)
        # Autotuning the products would take longer than computing them once.
        results = lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})(*given)
    return results if has_gradient else (results, ())


def _widen(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _call(result: ProgramResult, way: Way, arguments: _Arguments) -> measure.Call:
    """Compiles a program, and records its calls of kernels and its temporary memory.

    Raises:
      TypeError: if a kernel was requested that does not support the program.
      ValueError: likewise.
      RuntimeError: if XLA would run instead of our kernels.
    """
    functions = texts.plain() if way.name == PLAIN else texts.ours()
    function = _function(result.problem, functions, gradient=result.gradient)
    given = arguments[: 1 + result.gradient]
    with jax_gpuops.use(way.name if way.name == named() else None):
        lowered = jax.jit(function).lower(*given)
    compiled = lowered.compile()
    targets = re.findall(r'custom_call_target="jax_gpuops_(\w+?)_v\d+"', compiled.as_text())
    way.calls = dict(sorted(collections.Counter(targets).items()))
    if not way.calls and way.name == named():
        raise RuntimeError("the compiled program does not call our kernels")
    if (memory := compiled.memory_analysis()) is not None:
        way.temporary_bytes = memory.temp_size_in_bytes
    return measure.Call(compiled, given)


# The check


def _judge(result: ProgramResult, ways: Sequence[Way], ys: Sequence[Any], reference: Any) -> None:
    """Fills in errors, and the status of wrong ways; the first way is plain JAX."""
    names = _names(result)
    errors = [_errors(y, reference) for y in ys]
    plain, roundings = (
        errors[0],
        np.array([_rounding(result.problem, y) for y in jax.tree.leaves(ys[0])]),
    )
    if not np.all(plain[:, 0] <= np.where(roundings > 0, _PLAIN_LIMIT * roundings, 0.01)):
        raise RuntimeError(f"the error of {PLAIN} itself is {np.max(plain[:, 0]):.1e}")
    bounds = _FACTOR * np.maximum(plain, roundings[:, None])
    for way, error in zip(ways, errors, strict=True):
        with np.errstate(divide="ignore", invalid="ignore"):
            excess = np.where(error == 0, 0.0, error / bounds).max(1)  # NaN if an error is
        worst = int(np.argmax(excess))  # the first NaN, if there is one
        way.error, way.excess = finite(float(error[:, 0].max())), finite(float(excess[worst]))
        if not excess[worst] <= 1:
            way.status = WRONG
            way.message = f"{names[worst]}: the error is {excess[worst]:.3g} times what it may be"


def _names(result: ProgramResult) -> list[str]:
    """Returns the names of the leaves of the results."""
    program = texts.PROGRAMS[result.problem.op]
    gradients = [
        f"gradient of {name}"
        for name, operand in program.operands(result.problem).items()
        if jnp.issubdtype(operand.dtype, jnp.inexact)
    ]
    return [*program.results, *(gradients if result.gradient else [])]


def _rounding(problem: Problem, y: jax.Array) -> float:
    """Returns the relative error of one rounding; 0 for integers."""
    if not jnp.issubdtype(y.dtype, jnp.inexact):
        return 0.0
    products = texts.PROGRAMS[problem.op].has_products
    if products and problem.dtype == "float32" and run.has_gpu():
        return _TF32_ROUNDING
    return float(jnp.finfo(y.dtype).eps)


def _errors(y: Any, reference: Any) -> np.ndarray:
    """Returns both errors of each result; infinite if the results have other shapes."""
    if jax.tree.map(jnp.shape, y) != jax.tree.map(jnp.shape, reference):
        return np.full((len(jax.tree.leaves(reference)), 2), np.inf)
    pairs = zip(jax.tree.leaves(y), jax.tree.leaves(reference), strict=True)
    with jax.enable_x64(True):
        return np.array([_two_errors(*pair) for pair in pairs])


@jax.jit
def _two_errors(y: jax.Array, reference: jax.Array) -> jax.Array:
    """Returns both errors of one result; NaN if it contains NaN."""
    if not jnp.issubdtype(reference.dtype, jnp.inexact):
        return jnp.full(2, jnp.mean(y != reference))
    difference = jnp.abs(y.astype(jnp.float64) - reference)
    size = jnp.sqrt(jnp.mean(reference**2))
    frobenius = jnp.sqrt(jnp.mean(difference**2)) / size
    # XLA's maximum on CPU may lose a NaN in a long array; the mean does not.
    largest = jnp.max(difference / jnp.maximum(jnp.abs(reference), size))
    return jnp.array([frobenius, jnp.where(jnp.isnan(frobenius), jnp.nan, largest)])
