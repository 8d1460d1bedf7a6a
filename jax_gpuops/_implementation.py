"""Which implementation runs: the `implementation=` and `algorithm=` arguments and their default."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from jax_gpuops import _library

IMPLEMENTATIONS = ("cuda", "interpret", "xla")

_default = jax.make_user_context(None)


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
      ValueError: if `implementation` is none of these.
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
