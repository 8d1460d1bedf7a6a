"""Which implementation runs: the `implementation=` and `algorithm=` arguments and their default."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from jax_gpuops import _arguments, _library, _report

IMPLEMENTATIONS = ("cuda", "interpret", "xla")

BATCH_INVARIANT = "batch_invariant"
"""Given as the algorithm, it lets the plan choose by the row length and the dtype alone."""


@dataclasses.dataclass(frozen=True)
class Preferred:
    """A kernel where one supports the call, else XLA: the meaning of `use(name, strict=False)`.

    It is a parameter of primitives and is resolved when they are lowered, since the platform and
    the number of devices are known only then.

    Attributes:
      name: "cuda" or "interpret".
    """

    name: str


Implementation = str | Preferred | None

_default = jax.make_user_context(None)

_T = TypeVar("_T")


def _check(implementation: object) -> None:
    is_known = isinstance(implementation, str) and implementation in IMPLEMENTATIONS
    if implementation is not None and not is_known:
        raise ValueError(
            f"implementation must be None or one of {', '.join(map(repr, IMPLEMENTATIONS))}, "
            f"got {implementation!r}"
        )


@contextlib.contextmanager
def use(implementation: str | None, *, strict: bool = True) -> Iterator[None]:
    """Sets the default of `implementation=` for the ops called inside the `with` block.

    It serves code that cannot pass the argument, such as a Flax model. The default is part of JAX's
    compilation cache keys, so a jitted function is traced again under another default. New threads
    do not inherit it.

    `use("cuda", strict=False)` enables the kernels for a whole model: each call, including those of
    derivatives, runs a kernel if one supports it, measured or not, and XLA otherwise, without an
    error. XLA runs calls with arguments or dtypes that no kernel supports, calls in programs for
    another platform, and, in programs that span several devices, calls of kernels that run within
    one device only. A call that names an `algorithm` never falls back to XLA. `explain` shows what
    each call runs.

    Args:
      implementation: None, "cuda", "interpret" or "xla", as the ops take it.
      strict: False to run XLA if the named kernels do not support a call; True to raise an error.
        It has no effect with None and "xla", which support every call.

    Raises:
      TypeError: if `strict` is not a bool.
      ValueError: if `implementation` is not one of these.
    """
    _check(implementation)
    strict = _arguments.flag("strict", strict)
    default: Implementation = implementation
    if implementation in ("cuda", "interpret") and not strict:
        default = Preferred(implementation)
    with _default(default):
        yield


def resolve(family: str, implementation: str | None, algorithm: str | None) -> Implementation:
    """Returns the implementation that a call to an op of `family` asks for, given its arguments.

    Raises:
      ValueError: if the implementation is unknown or not installed, if it is "xla" although an
        algorithm is named, or if the algorithm is unknown.
      TypeError: if `algorithm` is not a string.
    """
    _check(implementation)
    if algorithm is not None and not isinstance(algorithm, str):
        raise TypeError(f"algorithm must be None or a string, got {algorithm!r}")
    chosen = _default.value if implementation is None else implementation
    if chosen == "xla" and algorithm is not None:
        raise ValueError(
            f"algorithm={algorithm!r} names a kernel of jax_gpuops, but implementation is 'xla'; "
            "leave one of them out"
        )
    if algorithm is not None:
        known = [each.name for each in _library.algorithms(family)]
        if algorithm not in known:
            raise ValueError(f"algorithm {algorithm!r} is unknown; known are {', '.join(known)}")
    if (name := named(chosen, algorithm)) in ("cuda", "interpret"):
        _library.module(name)  # raises if it is not installed
    return chosen


def resolve_invariant(
    family: str, batch_invariant: bool, implementation: str | None, algorithm: str | None
) -> tuple[Implementation, str | None]:
    """Returns `implementation` and `algorithm` of a call that may ask for batch invariance.

    Raises:
      TypeError: as `resolve` does; also if `batch_invariant` is not a bool.
      ValueError: as `resolve` does; also if `batch_invariant` is True and XLA or an algorithm is
        named.
    """
    batch_invariant = _arguments.flag("batch_invariant", batch_invariant)
    chosen = resolve(family, implementation, algorithm)
    if not batch_invariant:
        return chosen, algorithm
    if algorithm is not None:
        raise ValueError(
            f"batch_invariant=True chooses the algorithm, but algorithm is {algorithm!r}; leave "
            "one of them out"
        )
    if chosen == "xla":
        raise ValueError(
            "batch_invariant=True asks for a kernel of jax_gpuops, but implementation is 'xla'"
        )
    return chosen, BATCH_INVARIANT


def asked_for(algorithm: str) -> str:
    """The argument by which a caller requested a kernel, as error messages show it."""
    if algorithm == BATCH_INVARIANT:
        return "batch_invariant=True"
    return f"algorithm={algorithm!r}"


def named(implementation: Implementation, algorithm: str | None) -> str | None:
    """Returns the implementation that a call must run, or None if there is a choice.

    If an algorithm is named, a preferred implementation is mandatory.
    """
    if isinstance(implementation, Preferred):
        return None if algorithm is None else implementation.name
    return implementation


class NoKernelError(Exception):
    """No kernel supports a call. Raised between a public function and the bind of its primitive.

    Attributes:
      error: the error that a user who requested a kernel gets, TypeError or ValueError.
      second_best: as in `Plan`, for a call that a kernel could run.
    """

    def __init__(self, why: str, error: type[Exception] = ValueError, second_best: str = "none"):
        super().__init__(why)
        self.error = error
        self.second_best = second_best


def dispatch(
    op: str,
    operands: Sequence[Any],
    implementation: Implementation,
    algorithm: str | None,
    kernel: Callable[[], _T],
    xla: Callable[[], _T],
) -> _T:
    """Returns the result of `kernel`, or that of `xla` if XLA is named or no kernel supports it.

    Args:
      op: the name of the public function.
      operands: the operands of the call.
      implementation: as `resolve` returns it.
      algorithm: as the caller gave it.
      kernel: binds the primitive of a kernel, or raises `NoKernelError`.
      xla: calls the upstream function.

    Raises:
      TypeError: if a kernel was requested, but none supports the call.
      ValueError: likewise.
    """
    name = named(implementation, algorithm)
    if name == "xla":
        return _report.left_to_xla(op, operands, "named by the caller", xla, "not considered")
    try:
        return kernel()
    except NoKernelError as error:
        why = error
    except ValueError as error:  # the plan's: it names an algorithm that the caller did not name
        if algorithm != BATCH_INVARIANT:
            raise
        raise ValueError(f"{asked_for(algorithm)} cannot run this: {error}") from None
    if name is not None:
        raise why.error(f'{why}; implementation="{name}" cannot run this, "xla" can')
    if algorithm is not None:
        asked = asked_for(algorithm)
        raise why.error(f"{why}; {asked} cannot run this, leave it out to run XLA")
    return _report.left_to_xla(op, operands, str(why), xla, why.second_best)
