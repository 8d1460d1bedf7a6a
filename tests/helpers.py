"""Oracles and data that tests share."""

import contextlib

import jax
import ml_dtypes
import numpy as np

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


def ulp_error(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """|actual - expected| in units of the last place of `expected` rounded to actual's dtype."""
    actual = np.asarray(actual)
    with np.errstate(invalid="ignore"):
        spacing = np.spacing(np.abs(expected).astype(actual.dtype)).astype(np.longdouble)
        return np.abs(exact(actual) - expected) / spacing


def custom_calls(function, *arguments) -> list[str]:
    """The custom calls of ours in the compiled program, so that no test passes by a fallback."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    return [word for word in text.replace('"', " ").split() if word.startswith("jax_gpuops_")]
