"""Oracles and data that tests share."""

import contextlib

import jax
import ml_dtypes
import numpy as np
import pytest

import jax_gpuops
from jax_gpuops import _primitive

FLOATS = ("float16", "bfloat16", "float32", "float64")


def np_dtype(name: str) -> np.dtype:
    """The numpy dtype called `name`, bfloat16 included."""
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def x64(dtype: str) -> contextlib.AbstractContextManager:
    """JAX keeps 64-bit dtypes only in this mode; other tests run in the mode users have."""
    return jax.enable_x64(np_dtype(dtype).itemsize >= 8)


def normal(shape, dtype: str, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Independent normal numbers, the same for the same seed."""
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np_dtype(dtype))


def exact(x: np.ndarray) -> np.ndarray:
    """The same values in the precision that references are computed in."""
    return np.asarray(x).astype(np.longdouble)


def spacing(values: np.ndarray, dtype) -> np.ndarray:
    """The distance between neighbouring numbers of `dtype` at `values`."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.spacing(np.abs(values).astype(dtype)).astype(np.longdouble)


def custom_calls(function, *arguments) -> list[str]:
    """The custom calls of ours in the compiled program, so that no test passes by a fallback."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    return [word for word in text.replace('"', " ").split() if word.startswith("jax_gpuops_")]


def refusal(op: str, algorithm: str) -> str:
    """Why this machine cannot run an algorithm for any rows; empty if it can."""
    try:
        jax_gpuops.plan(op, (1, 1), "float32", algorithm=algorithm)
    except ValueError as error:
        return str(error)
    return ""


def algorithms(op: str, *names: str) -> list:
    """Parameters for tests of an op: the named algorithms, skipped where the plan refuses them."""
    return [
        pytest.param(name, marks=pytest.mark.skipif(bool(why := refusal(op, name)), reason=why))
        for name in names
    ]


def primitive(function: str):
    """The primitive of one of our kernels, for what no argument of a public function reaches."""
    return next(p for p, k in _primitive.KERNELS.items() if k.name == f"gpuops_{function}")
