"""The compiled modules: loads them, checks their version, registers their FFI targets.

Importing this module does not access a GPU and never fails. If a compiled module could not be
loaded, an operation that needs it raises an error that says why.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import types
import warnings
from typing import Any

import jax

from jax_gpuops import __version__

_PACKAGE = "jax_gpuops_ffi"
_PLATFORMS = {"cuda": "CUDA", "interpret": "cpu"}  # implementation -> FFI platform


def _load(implementation: str) -> types.ModuleType | str:
    """Returns the module of an implementation, or why it cannot be used."""
    try:
        module = importlib.import_module(f"{_PACKAGE}._{implementation}")
    except ImportError as error:
        return (
            f"{_PACKAGE}._{implementation} cannot be imported ({error}); `python -m jax_gpuops` "
            "shows how to install it"
        )
    built = module.build_info()["version"]
    if built != __version__:
        return (
            f"{_PACKAGE}._{implementation} was built from jax_gpuops {built}, but this is "
            f"jax_gpuops {__version__}; reinstall with `pip install .`"
        )
    for name, stages in module.registrations().items():
        jax.ffi.register_ffi_target(name, stages, platform=_PLATFORMS[implementation])
    return module


_MODULES = {implementation: _load(implementation) for implementation in _PLATFORMS}

_TARGETS: tuple[str, ...] = tuple(
    sorted(
        {
            name
            for module in _MODULES.values()
            if not isinstance(module, str)
            for name in module.registrations()
        }
    )
)

EXPORT_CHECKS = [jax.export.DisabledSafetyCheck.custom_call(name) for name in _TARGETS]
"""For `jax.export.export(..., disabled_checks=jax_gpuops.EXPORT_CHECKS)`: our custom calls."""


def module(implementation: str) -> types.ModuleType:
    """Returns the compiled module of `implementation` ("cuda" or "interpret").

    Raises:
      ValueError: if it is missing or of another version; the message says what to do.
    """
    loaded = _MODULES[implementation]
    if isinstance(loaded, str):
        raise ValueError(f'implementation="{implementation}" is not available: {loaded}')
    return loaded


def missing(implementation: str) -> str | None:
    """Returns why `implementation` cannot be used, or None if its module is loaded."""
    loaded = _MODULES[implementation]
    return loaded if isinstance(loaded, str) else None


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """One named algorithm of an op.

    Attributes:
      name: what `algorithm=` takes.
      summary: the idea, in a sentence.
      source: the publication or project that it comes from.
      limits: the restrictions on its problems, or "none".
      kernels: the CUDA kernels that it launches, as profilers name them without namespace and
        template arguments.
    """

    name: str
    summary: str
    source: str
    limits: str
    kernels: tuple[str, ...]


def algorithms(op: str) -> tuple[Algorithm, ...]:
    """Lists the algorithms of an op family, in ladder order.

    Args:
      op: an op family: "softmax", "reduce", "transpose" or "matmul".

    Returns:
      The algorithms that `algorithm=` can name; those of the ladders first.

    Raises:
      ValueError: if there is no such op family, or no compiled module is installed.
    """
    return _algorithms(str(op))


@functools.cache
def _algorithms(op: str) -> tuple[Algorithm, ...]:
    names: dict[str, Algorithm] = {}
    loaded = [each for each in _MODULES.values() if not isinstance(each, str)]
    if not loaded:
        raise ValueError("no compiled module of jax_gpuops is installed; run `pip install .`")
    for each in loaded:
        for entry in each.algorithms(op):
            entry["kernels"] = tuple(entry["kernels"].split())
            names.setdefault(entry["name"], Algorithm(**entry))
    return tuple(names.values())


def planned(
    implementation: str, op: str, problem: dict[str, Any], algorithm: str | None
) -> dict[str, Any]:
    """Returns what a module would run for a problem: a dict with "algorithm", "reason", "config".

    Raises:
      ValueError: if the algorithm is unknown or cannot take the problem.
    """
    return module(implementation).plan(op, {**problem, "algorithm": algorithm or ""})


@functools.cache
def gpu_problem() -> str | None:
    """Returns why this machine's GPU cannot run our kernels, with the fix, or None if it can.

    It is also None without a GPU, since a program may be exported for a GPU of another machine.
    """
    if (why := missing("cuda")) is not None:
        return why
    try:
        gpu = jax.devices("cuda")[0]
    except RuntimeError:
        return None
    capability = float(gpu.compute_capability)
    if capability < 8.0:
        return (
            f"the GPU ({gpu.device_kind}) has compute capability {capability}, and the kernels "
            'need 8.0 or later; implementation="xla" runs on it'
        )
    info = module("cuda").build_info()
    driver, built = tuple(module("cuda").driver_version()), tuple(info["cuda_version"])
    if driver < built:
        return (
            f"the NVIDIA driver supports CUDA {driver[0]}.{driver[1]}, but jax_gpuops was built "
            f"with CUDA {built[0]}.{built[1]}; update the driver"
        )
    return None


@functools.cache
def warn_once(message: str) -> None:
    """Warns, once in the process, that XLA runs in place of our kernels."""
    warnings.warn(f"jax_gpuops uses XLA: {message}", stacklevel=2)
