"""`plan`: what an op would run, and why."""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jax_gpuops import _library, _primitive


@dataclasses.dataclass(frozen=True)
class Plan:
    """What an op would run for a call.

    Attributes:
      implementation: "cuda", "interpret" or "xla".
      algorithm: the kernel's algorithm, or None if XLA runs the op.
      reason: why, in a sentence or two.
    """

    implementation: str
    algorithm: str | None
    reason: str


def plan(
    op: str,
    shape: Sequence[int] | Sequence[Sequence[int]],
    dtype: Any,
    *,
    platform: str | None = None,
    **arguments: Any,
) -> Plan:
    """Says what a call of an op would run on one device, without running it.

    For a GPU the plan is made for an H200. Another GPU may run another algorithm; those that need
    compute capability 9.0 run on no other.

    >>> jax_gpuops.plan("softmax", (8192, 4096), "float32", implementation="interpret")
    Plan(implementation='interpret', algorithm='block', reason=...)
    >>> mask = jax.ShapeDtypeStruct((2048, 2048), bool)
    >>> jax_gpuops.plan("softmax", (8, 16, 2048, 2048), "bfloat16", where=mask, platform="cuda")
    Plan(implementation=...)

    Args:
      op: the name of a public op, such as "softmax".
      shape: the operand's shape, or a sequence of shapes for an op of several operands.
      dtype: the dtype of the operands.
      platform: "cpu", "cuda" (or "gpu"), "rocm" or "tpu"; None is that of a named
        implementation, or of JAX's default device.
      **arguments: keyword arguments of the op, `implementation` and `algorithm` among them. An
        array, such as a mask or labels, may be a `jax.ShapeDtypeStruct`.

    Returns:
      The plan.

    Raises:
      TypeError: as the op itself would.
      ValueError: as the op itself would, or if the op, shape or platform is not valid.
    """
    ops = _ops()
    if op not in ops:
        raise ValueError(f"op must be one of {', '.join(ops)}, got {op!r}")
    if platform is not None and platform not in _PLATFORMS:
        raise ValueError(f"platform must be one of {', '.join(_PLATFORMS)}, got {platform!r}")
    operands = [jax.ShapeDtypeStruct(each, dtype) for each in _shapes(shape)]
    structs = {k: x for k, x in arguments.items() if isinstance(x, jax.ShapeDtypeStruct)}
    static = {k: x for k, x in arguments.items() if k not in structs}
    jaxpr = jax.make_jaxpr(lambda xs, ys: ops[op](*xs, **ys, **static))(operands, structs)
    for p, avals, params in _calls(jaxpr.jaxpr):
        platform = platform or _OWN_PLATFORMS.get(params["implementation"], jax.default_backend())
        platform = "cuda" if platform == "gpu" else platform
        return _plan_call(_primitive.KERNELS[p], avals, platform, **params)
    return Plan(
        "xla",
        None,
        "XLA is requested, no kernel supports these arguments, or none is known to be faster",
    )


_OWN_PLATFORMS = {"interpret": "cpu", "cuda": "cuda"}
_PLATFORMS = ("cpu", "cuda", "gpu", "rocm", "tpu")


def _shapes(shape: Any) -> list[tuple[int, ...]]:
    """Returns the operands' shapes, given one shape or a sequence of them."""
    try:
        dims = list(shape)
        shapes = dims if any(isinstance(each, Sequence) for each in dims) else [dims]
        result = [tuple(operator.index(size) for size in each) for each in shapes]
    except TypeError:
        raise TypeError(
            f"shape must be a sequence of ints, or a sequence of these, got {shape!r}"
        ) from None
    if any(size < 0 for each in result for size in each):
        raise ValueError(f"shape must have no negative sizes, got {shape!r}")
    return result


def _ops() -> dict[str, Callable[..., Any]]:
    """Returns the public ops by name: the functions that take `implementation` and `algorithm`."""
    import jax_gpuops

    return {
        name: function
        for name, function in vars(jax_gpuops).items()
        if inspect.isfunction(function)
        and {"implementation", "algorithm"} <= inspect.signature(function).parameters.keys()
    }


def _plan_call(kernel, avals, platform, *, implementation, algorithm, **params) -> Plan:
    problem = kernel.problem(*avals, **params)
    chosen, reason = _primitive.choose(
        kernel, platform, implementation, algorithm, lambda: problem, partitioned=False
    )
    if chosen == "xla":
        return Plan("xla", None, reason)
    ours = _library.planned(chosen, kernel.op, problem, algorithm)
    return Plan(chosen, ours["algorithm"], f"{reason}; {ours['reason']}")


def _calls(jaxpr) -> Iterator[tuple[Any, list, dict]]:
    """Yields the calls of our primitives in a jaxpr and the jaxprs inside it."""
    for equation in jaxpr.eqns:
        if equation.primitive in _primitive.KERNELS:
            yield equation.primitive, [v.aval for v in equation.invars], equation.params
        for inner in equation.params.values():
            if hasattr(inner, "jaxpr"):
                yield from _calls(inner.jaxpr)
