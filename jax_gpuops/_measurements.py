"""Which implementation is the fastest, from measurements that are part of the package.

`measurements.json` lists, for each kind of GPU, the classes of problems for which a kernel was
measured to be at least as fast as XLA. `implementation=None` runs the kernel for these and XLA's
lowering for all others.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from typing import Any

import jax


@functools.cache
def table() -> dict[str, list[dict[str, Any]]]:
    """Returns the measured classes by device kind.

    A class names what a problem must match: a value, or an inclusive range of a size, [low, high]
    or [low, high, step]; for a list, such as a shape, one of these for each element. Problems with
    a mask ("masked" is 1), or a causal one ("queries" is not 0), or whose operand is multiplied by
    a factor ("scaled" is 1) or copied or cast for the kernel ("copied" is 1), are only in classes
    that name these. Under "ratio" stands the least speed relative to XLA that was measured in the
    class.
    """
    text = importlib.resources.files("jax_gpuops").joinpath("measurements.json").read_text()
    return json.loads(text)


def gpu_kind() -> str | None:
    """Returns the kind of the first GPU, or None without one."""
    try:
        return jax.devices("cuda")[0].device_kind
    except RuntimeError:
        return None


def best(problem: dict[str, Any]) -> tuple[str, str]:
    """Returns the implementation that `None` stands for on this machine's GPU, and why.

    Args:
      problem: what the op's plan takes, with its family under "op".
    """
    kind = gpu_kind()
    if kind is None:
        return "xla", "no GPU is visible"
    for entry in table().get(kind, []):
        if contains(entry, problem):
            return "cuda", f"measured on {kind}: at least {entry['ratio']:.2f} x the speed of XLA"
    return "xla", f"no measurement on {kind} shows a kernel to be as fast as XLA for this problem"


def may_hold(op: str, known: dict[str, Any]) -> bool:
    """True if a class, on whichever kind of GPU, may contain a problem of which this is known."""
    return any(
        entry["op"] == op and all(_matches(entry[k], v) for k, v in known.items() if k in entry)
        for entries in table().values()
        for entry in entries
    )


_UNLESS_NAMED = {"masked": 0, "queries": 0, "scaled": 0, "copied": 0}


def contains(entry: dict[str, Any], problem: dict[str, Any]) -> bool:
    """True if a class of the table contains a problem."""
    wanted, problem = _UNLESS_NAMED | entry, _UNLESS_NAMED | problem
    return all(_matches(wanted[key], problem.get(key)) for key in wanted if key != "ratio")


def _matches(wanted: Any, value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(wanted) == len(value) and all(map(_matches, wanted, value))
    if isinstance(wanted, list):
        low, high, *step = wanted
        return isinstance(value, int) and value in range(low, high + 1, *step)
    return wanted == value
