"""Reports of what calls run: the log, and marks in jaxprs for `explain`."""

from __future__ import annotations

import dataclasses
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


@dataclasses.dataclass(frozen=True)
class Plan:
    """What an op would run for a call.

    Attributes:
      implementation: "cuda", "interpret" or "xla"; in an `Explanation` also "error" for a call that
        raises an error when the program is lowered.
      algorithm: the kernel's algorithm, or None if XLA runs the op.
      reason: why, in a sentence or two.
      second_best: the alternative that was not chosen, or "none" if nothing else can run the call.
    """

    implementation: str
    algorithm: str | None
    reason: str
    second_best: str


@dataclasses.dataclass(frozen=True)
class Call:
    """Equal calls of an op, and what they run.

    Attributes:
      op: the primitive's name without "gpuops_", as profiles show it; for a call that was left to
        XLA during tracing, the name of the public function.
      operands: the types of the operands, as JAX writes them in jaxprs.
      plan: what runs.
      count: the number of such calls in the program. A call in a loop counts once.
    """

    op: str
    operands: tuple[str, ...]
    plan: Plan
    count: int = 1


def runs(implementation: str, algorithm: str | None) -> str:
    """Returns what runs as text, such as "cuda: warp"."""
    return implementation if algorithm is None else f"{implementation}: {algorithm}"


def call_of(name: str, avals: Sequence[Any], plan: Plan) -> Call:
    """Returns the record of a call of the primitive or public function called `name`."""
    operands = tuple(aval.str_short(short_dtypes=True) for aval in avals)
    return Call(name.removeprefix("gpuops_"), operands, plan)


# The log

_VARIABLE = "JAX_GPUOPS_LOG"

_logger = logging.getLogger("jax_gpuops")


def _configure_log() -> None:
    """Configures the log by the environment variable: 1 sends it to standard error."""
    value = os.environ.get(_VARIABLE, "")
    if value == "1":
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        # A program that configures logging gets the records through its own handlers.
        handler.addFilter(lambda record: not logging.getLogger().handlers)
        _logger.addHandler(handler)
        _logger.setLevel(logging.INFO)
    elif value not in ("", "0"):
        warnings.warn(f"{_VARIABLE} must be 0 or 1, got {value!r}; nothing is logged", stacklevel=2)


_configure_log()


def is_logging() -> bool:
    """True if what runs is to be logged. Otherwise nothing is computed for the log."""
    return _logger.isEnabledFor(logging.INFO)


def log(call: Call, platform: str | None) -> None:
    """Logs what runs a call.

    Args:
      call: the call.
      platform: the platform that it is lowered for; None if it is being traced.
    """
    _logger.info(
        "%s %s %s runs %s. Why: %s. Second best: %s",
        call.op,
        " ".join(call.operands),
        "traced" if platform is None else f"lowered for {platform}",
        runs(call.plan.implementation, call.plan.algorithm),
        call.plan.reason,
        call.plan.second_best,
    )


# Calls that are left to XLA when they are traced. `explain` finds them in the jaxpr by a mark,
# since code that runs during tracing misses the calls whose traces JAX has cached.

explaining = jax.make_user_context(False)
"""True while `explain` traces. Part of jit's cache key, so no program that runs has marks."""

MARK_P = Primitive("gpuops_mark")
"""The identity of a call's results; its parameter `call` is the record of the call."""

MARK_P.multiple_results = True
MARK_P.def_impl(lambda *xs, call: list(xs))
MARK_P.def_abstract_eval(lambda *avals, call: list(avals))
mlir.register_lowering(MARK_P, lambda ctx, *xs, call: list(xs))
ad.primitive_jvps[MARK_P] = lambda xs, ts, call: (MARK_P.bind(*xs, call=call), ts)
ad.primitive_transposes[MARK_P] = lambda cotangents, *_, call: cotangents
batching.primitive_batchers[MARK_P] = lambda xs, axes, call: (MARK_P.bind(*xs, call=call), axes)


def left_to_xla(
    op: str, operands: Sequence[Any], why: str, xla: Callable[[], Any], second_best: str = "none"
) -> Any:
    """Returns the result of `xla`, and reports that the call was left to XLA during tracing.

    Args:
      op: the name of the public function.
      operands: the operands of the call.
      why: the reason.
      xla: calls the upstream function.
      second_best: as in `Plan`.
    """
    if not (explaining.value or is_logging()):
        return xla()
    call = call_of(op, list(map(jax.typeof, operands)), Plan("xla", None, why, second_best))
    if explaining.value:
        leaves, tree = jax.tree.flatten(xla())
        return jax.tree.unflatten(tree, MARK_P.bind(*leaves, call=call))
    log(call, None)
    return xla()
