"""Which implementation runs: the `implementation=` and `algorithm=` arguments and their default."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax

from jax_gpuops import _library

IMPLEMENTATIONS = ("cuda", "interpret", "xla")

_default = jax.make_user_context(None)

_T = TypeVar("_T")


def _check(implementation: object) -> None:
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be None or one of {', '.join(map(repr, IMPLEMENTATIONS))}, "
            f"got {implementation!r}"
        )


@contextlib.contextmanager
def use(implementation: str | None) -> Iterator[None]:
    """Sets the default of `implementation=` for the ops called inside the `with` block.

    For code that cannot pass the argument, such as a Flax model. The default is part of JAX's
    compilation cache keys, so a jitted function is traced again under another default. New threads
    do not inherit it.

    Args:
      implementation: None, "cuda", "interpret" or "xla", as the ops take it.

    Raises:
      ValueError: if `implementation` is not one of these.
    """
    _check(implementation)
    with _default(implementation):
        yield


def resolve(family: str, implementation: str | None, algorithm: str | None) -> str | None:
    """Returns the implementation that a call to an op of `family` asks for, given its arguments.

    Raises:
      ValueError: if it is unknown or not installed, or is "xla" while an algorithm of ours is
        named, or if there is no such algorithm.
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
    if chosen in ("cuda", "interpret"):
        _library.module(chosen)  # raises if it is not installed
    return chosen


class NoKernelError(Exception):
    """No kernel takes a call. Raised between a public function and the bind of its primitive.

    Attributes:
      error: what it becomes for a user who asked for a kernel, TypeError or ValueError.
    """

    def __init__(self, why: str, error: type[Exception] = ValueError):
        super().__init__(why)
        self.error = error


def dispatch(
    implementation: str | None,
    algorithm: str | None,
    kernel: Callable[[], _T],
    xla: Callable[[], _T],
) -> _T:
    """Returns what `kernel` computes, or what `xla` does where that is asked for or no kernel fits.

    Args:
      implementation: as `resolve` returns it.
      algorithm: as the caller gave it.
      kernel: binds the primitive of a kernel, or raises `NoKernelError`.
      xla: calls the upstream function.

    Raises:
      TypeError: if no kernel takes the call, but one was asked for.
      ValueError: likewise.
    """
    if implementation == "xla":
        return xla()
    try:
        return kernel()
    except NoKernelError as why:
        if implementation is not None:
            raise why.error(
                f'{why}; implementation="{implementation}" cannot run this, "xla" can'
            ) from None
        if algorithm is not None:
            raise why.error(
                f"{why}; algorithm={algorithm!r} cannot run this, XLA can: leave it out"
            ) from None
    return xla()
