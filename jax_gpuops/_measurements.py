"""Which implementation is the fastest, from measurements that are part of the package.

`measurements.json` holds, for each kind of GPU, the classes of problems for which our kernel was
measured to be at least level with XLA. `None` as implementation runs ours for these and XLA's own
lowering for all others, so code that uses jax_gpuops is never slower than code that does not.
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

    A class names what a problem must match: a value, or an inclusive range [low, high] of a size;
    for a list, such as a shape, one of these for each element. Under "ratio" stands the least speed
    relative to XLA that was measured in the class.
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
        if all(_matches(entry[key], problem.get(key)) for key in entry if key != "ratio"):
            return "cuda", f"measured on {kind}: at least {entry['ratio']:.2f} x the speed of XLA"
    return "xla", f"no measurement on {kind} says that ours is level with XLA for this problem"


def _matches(wanted: Any, value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(wanted) == len(value) and all(map(_matches, wanted, value))
    if isinstance(wanted, list):
        return isinstance(value, int) and wanted[0] <= value <= wanted[1]
    return wanted == value
