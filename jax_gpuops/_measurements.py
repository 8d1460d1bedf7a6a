"""Which implementation is the fastest, from measurements.

`measurements.json`, a part of the package, lists for each kind of GPU the classes of problems for
which a kernel was measured to be at least as fast as XLA. `implementation=None` runs the kernel for
these and XLA's lowering for all others. `python -m bench tune` writes such a file for another GPU,
and `load_measurements` or the environment variable `JAX_GPUOPS_MEASUREMENTS` loads it.

A table is valid only for the kind of GPU that it was measured on: the speed of a kernel relative to
XLA depends on the bandwidth, the clock and the number of multiprocessors.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import math
import os
import pathlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

SCHEMA = 1

SETTING = "JAX_GPUOPS_MEASUREMENTS"
"""The environment variable that names a file to load in addition to the package's."""

Class = dict[str, Any]


class Classes(list[Class]):
    """The classes of one kind of GPU."""

    def like(self, problem: dict[str, Any]) -> Iterator[Class]:
        """Yields the classes that do not name another op family, function or dtype."""
        for group, classes in self._groups.items():
            if all(
                wanted is None or problem.get(name, wanted) == wanted
                for name, wanted in zip(_OF_GROUPS, group, strict=True)
            ):
                yield from classes

    @functools.cached_property
    def _groups(self) -> dict[tuple[Any, ...], list[Class]]:
        groups: dict[tuple[Any, ...], list[Class]] = {}
        for entry in self:
            groups.setdefault(tuple(map(entry.get, _OF_GROUPS)), []).append(entry)
        return groups


_OF_GROUPS = ("op", "function", "dtype")

_ROWS = {"function", "dtype", "outer", "columns", "inner", "masked", "copied", "aligned"}
KEYS = {
    "softmax": _ROWS | {"queries", "scaled", "square"},
    "reduce": _ROWS | {"result", "mean", "var", "runs"},
    "transpose": {
        *("element_bytes", "elements", "shape", "permutation", "aligned"),
        *("merged_permutation", *(f"size{d}" for d in range(8))),
    },
    "matmul": {
        *("dtype", "result_dtype", "precision", "batch", "m", "n", "k", "has_c", "scaled"),
        *("transpose_a", "transpose_b", "share_a", "share_b"),
        *("has_bias", "share_bias", "gated", "epilogue", "aligned"),
        *("a_scale", "b_scale", "share_a_scale", "share_b_scale"),
    },
}
"""The keys that a class may name, by op family: fields of problems, and those of `traits`."""


# Files


def load_measurements(path: str | os.PathLike[str] | None) -> None:
    """Loads a file of measurements, by which `implementation=None` chooses.

    For the kinds of GPU in the file it replaces the package's measurements. It also replaces a file
    that an earlier call or the environment variable `JAX_GPUOPS_MEASUREMENTS` named. All of JAX's
    compiled functions in the process are dropped (`jax.clear_caches`), so that the next call of
    each is compiled with the new measurements. Functions that were compiled ahead of time, by
    `.lower().compile()`, stay as they are.

    Args:
      path: a file that `python -m bench tune` wrote; None for the package's measurements alone.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if it is not a file of measurements, or has keys that this version does not know.
    """
    global _loaded
    loaded = {} if path is None else read(pathlib.Path(path))
    with _lock:
        _loaded = loaded
    jax.clear_caches()


_loaded: dict[str, Classes] | None = None  # None until the table is first needed
_lock = threading.Lock()  # the environment variable's file must not replace one being loaded


def table() -> dict[str, Classes]:
    """Returns the measured classes by device kind.

    A class gives for each of its keys the value that a problem must match, or an inclusive range of
    sizes, [low, high] or [low, high, step]; for a list, such as a shape, one of these per element.
    Some problems are only in classes that name the key: problems with a mask ("masked" is 1) or a
    causal mask ("queries" is not 0), with an operand that is multiplied by a factor ("scaled" is 1)
    or copied or cast for the kernel ("copied" is 1), variances without the mean ("var" is 1),
    moments along axes that are not adjacent ("runs" is the number of runs of adjacent axes), and
    products with a bias ("has_bias" is 1), an activation ("epilogue" is not "none"), a gate
    ("gated" is 1) or scales ("a_scale" and "b_scale" are not "none"). "ratio" is the least speed
    relative to XLA that was measured in the class; "between" is the least one between neighbouring
    operations that XLA fuses.

    Raises:
      FileNotFoundError: if the environment variable names a file that does not exist.
      ValueError: if that file is not valid.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            path = os.environ.get(SETTING)
            _loaded = read(pathlib.Path(path), f" (named by {SETTING})") if path else {}
        return _package() | _loaded


@functools.cache
def _package() -> dict[str, Classes]:
    text = importlib.resources.files("jax_gpuops").joinpath("measurements.json").read_text()
    return parse(text, "the package's measurements.json")


def read(path: pathlib.Path, why: str = "") -> dict[str, Classes]:
    """Returns the classes of a file by device kind.

    Args:
      path: the file.
      why: the origin of the path, for error messages.

    Raises:
      FileNotFoundError: if it does not exist.
      ValueError: if it is not a file of measurements, or has keys that this version does not know.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no file of measurements {path}{why}; `python -m bench tune` writes one"
        ) from None
    except (OSError, ValueError) as error:  # also for bytes that are no text, and invalid paths
        raise ValueError(f"the measurements {path}{why} cannot be read: {error}") from None
    return parse(text, f"{path}{why}")


def parse(text: str, name: str) -> dict[str, Classes]:
    """Returns the classes in the text of a file, by device kind.

    Raises:
      ValueError: if it is not a file of measurements, or has keys that this version does not know.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA or not isinstance(content.get("devices"), dict):
        raise ValueError(
            f"{name} is not a file of measurements of schema {SCHEMA}"
            + (f", but of schema {schema}" if schema not in (None, SCHEMA) else "")
            + "; write it with `python -m bench tune` of this version"
        )
    result = {}
    for kind, device in content["devices"].items():
        classes = device.get("classes") if isinstance(device, dict) else None
        if not isinstance(classes, list):
            raise ValueError(f'{name}: {kind!r} has no list of "classes"')
        for number, entry in enumerate(classes, 1):
            if (why := _objection(entry)) is not None:
                raise ValueError(f"{name}: class {number} of {kind!r}: {why}")
        result[kind] = Classes(classes)
    return result


def _objection(entry: Any) -> str | None:
    """Returns what is wrong with a class, or None."""
    if not isinstance(entry, dict):
        return f"it must be an object, got {entry!r:.60}"
    op = entry.get("op")
    if not isinstance(op, str) or op not in KEYS:
        return f'"op" must be one of {", ".join(KEYS)}, got {op!r}'
    if unknown := entry.keys() - KEYS[op] - {"op", "ratio", "between"}:
        return (
            f"a class of {op} has no key {', '.join(map(repr, sorted(unknown)))}; its keys are "
            f"{', '.join(sorted(KEYS[op]))}"
        )
    for key in ("ratio", "between"):
        value = entry.get(key, 1.0 if key == "between" else None)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value <= sys.float_info.max
        ):
            return f'"{key}" must be a positive number, got {value!r}'
    for key in sorted(entry.keys() & KEYS[op]):
        value = entry[key]
        if key in ("permutation", "merged_permutation"):
            valid, form = isinstance(value, list) and all(map(_is_int, value)), "a list of ints"
        elif key == "shape":
            valid = isinstance(value, list) and all(map(_is_size, value))
            form = "a list of ints and of ranges [low, high]"
        else:
            valid = isinstance(value, str) or _is_size(value)
            form = "a string, an int, or a range [low, high] or [low, high, step]"
        if not valid:
            return f'"{key}" must be {form}, got {value!r:.60}'
    return None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_size(value: Any) -> bool:
    if isinstance(value, list):
        is_range = len(value) in (2, 3) and all(map(_is_int, value)) and value[0] <= value[1]
        return is_range and (len(value) == 2 or value[2] > 0)
    return _is_int(value)


# The choice


def gpu_kind() -> str | None:
    """Returns the kind of the first GPU, or None without one."""
    try:
        return jax.devices("cuda")[0].device_kind
    except RuntimeError:
        return None


def best(
    problem: dict[str, Any], fusible: bool = False, without_gpu: str | None = None
) -> tuple[str, str]:
    """Returns the implementation that `None` stands for on this machine's GPU, and why.

    Args:
      problem: the problem for the op's plan, with the op family under "op".
      fusible: True if XLA may fuse the producer of an operand with its own lowering. A kernel must
        then be as fast between such neighbouring operations, too.
      without_gpu: the kind of GPU for which to answer if none is visible.
    """
    kind = gpu_kind() or without_gpu
    if kind is None:
        return "xla", "no GPU is visible"
    classes = table().get(kind)
    if classes is None:
        return "xla", f"nothing was measured on {kind}; `python -m bench tune` measures it"
    described = _described(problem)
    holding = [entry for entry in classes.like(problem) if _holds(entry, described)]
    for entry in holding:
        if not fusible or entry.get("between", 0) >= 1:
            return "cuda", f"measured on {kind}: at least {entry['ratio']:.2f} x the speed of XLA"
    if holding:
        return "xla", "XLA may fuse what computes an operand with its own lowering of the op"
    return "xla", f"no measurement on {kind} shows a kernel to be as fast as XLA for this problem"


def may_hold(op: str, known: dict[str, Any]) -> bool:
    """True if a class of any kind of GPU may contain a problem with the known fields.

    Also if the file of measurements cannot be read: only a lowering for a GPU needs it, and raises.
    """
    try:
        classes = table()
    except (OSError, ValueError):
        return True
    return any(
        all(_matches(entry.get(k, _UNLESS_NAMED.get(k, v)), v) for k, v in known.items())
        for of_kind in classes.values()
        for entry in of_kind.like({"op": op, **known})
    )


_UNLESS_NAMED = {
    "masked": 0,
    "queries": 0,
    "scaled": 0,
    "copied": 0,
    "var": 0,
    "runs": 1,
    "has_bias": 0,
    "gated": 0,
    "epilogue": "none",
    "a_scale": "none",
    "b_scale": "none",
}


def contains(entry: Class, problem: dict[str, Any]) -> bool:
    """True if a class of the table contains a problem."""
    return _holds(entry, _described(problem))


def _described(problem: dict[str, Any]) -> dict[str, Any]:
    return _UNLESS_NAMED | traits(problem) | problem


def _holds(entry: Class, described: dict[str, Any]) -> bool:
    # Loops take two thirds of the time of all(), and there are hundreds of classes to look at.
    for key, wanted in entry.items():
        if key not in ("ratio", "between") and not _matches(wanted, described.get(key)):
            return False
    for key, value in _UNLESS_NAMED.items():
        if key not in entry and described[key] != value:
            return False
    return True


def _matches(wanted: Any, value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(wanted) == len(value) and all(map(_matches, wanted, value))
    if isinstance(wanted, list):
        low, high, *step = wanted
        return isinstance(value, int) and value in range(low, high + 1, *step)
    return wanted == value


def traits(problem: dict[str, Any]) -> dict[str, Any]:
    """Returns the properties that follow from the sizes of a problem and affect its speed.

    "aligned" is the largest power of two up to 16 that divides the bytes of the contiguous dims.
    Rows have "aligned", and "square", which is 1 if a causal problem has as many queries as
    columns. A transpose has the number of "elements", and the same problem without dims of size 1
    and with dims that stay adjacent merged, as "merged_permutation" and the operand's sizes
    "size0", "size1" and so on; its "aligned" is that of the last merged dims of operand and result.
    A product has "aligned" for the rows of the result and of both factors as they are stored.
    """
    if "permutation" in problem:
        return _transpose_traits(problem["shape"], problem["permutation"], problem["element_bytes"])
    if "transpose_a" in problem:
        return _product_traits(problem)
    if "columns" not in problem or "dtype" not in problem:
        return {}
    inner, columns = problem.get("inner", 1), problem["columns"]
    together = columns if inner == 1 else inner
    if not isinstance(together, int):  # the sizes of exported programs may be symbolic
        return {}
    result = {"aligned": math.gcd(together * jnp.dtype(problem["dtype"]).itemsize, 16)}
    return result | ({"square": int(problem["queries"] == columns)} if "queries" in problem else {})


def _product_traits(problem: dict[str, Any]) -> dict[str, Any]:
    m, n, k = (problem[name] for name in ("m", "n", "k"))
    if not all(isinstance(size, int) for size in (m, n, k)):
        return {}
    rows_a, rows_b = m if problem["transpose_a"] else k, k if problem["transpose_b"] else n
    factor, result = (jnp.dtype(problem[name]).itemsize for name in ("dtype", "result_dtype"))
    return {"aligned": math.gcd(16, rows_a * factor, rows_b * factor, n * result)}


def _transpose_traits(shape, permutation, element_bytes) -> dict[str, Any]:
    if not all(isinstance(size, int) for size in shape):
        return {}
    order = [d for d in permutation if shape[d] != 1]
    runs: list[list[int]] = []
    for d in order:
        if runs and _are_neighbours(shape, runs[-1][-1], d):
            runs[-1].append(d)
        else:
            runs.append([d])
    operand = sorted(runs)
    sizes = [math.prod(shape[d] for d in run) for run in operand]
    merged = [operand.index(run) for run in runs]
    last = [sizes[-1], sizes[merged[-1]]] if sizes else []
    return {
        "elements": math.prod(shape),
        "merged_permutation": merged,
        **{f"size{d}": size for d, size in enumerate(sizes)},
        "aligned": math.gcd(16, *(size * element_bytes for size in last)),
    }


def _are_neighbours(shape, first: int, second: int) -> bool:
    """True if only dims of size 1 lie between the first dim and the second."""
    return first < second and all(shape[d] == 1 for d in range(first + 1, second))
