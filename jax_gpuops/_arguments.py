"""Checks and conversions of the arguments of public functions."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def as_array(name: str, x: Any, form: str = "an array") -> Any:
    """Returns `x`, or the array that an object such as a Flax parameter holds.

    Args:
      name: the name of the argument.
      x: an array, a number, or an object with a `__jax_array__` method.
      form: what the argument must be, for the error message.

    Raises:
      TypeError: if `x` is anything else, as in jnp functions, or of a dtype that JAX does not have.
    """
    if not isinstance(x, jax.Array) and hasattr(x, "__jax_array__"):
        x = x.__jax_array__()
    # ArrayLike lacks the scalars of ml_dtypes, such as bfloat16, which jnp functions take.
    is_scalar = isinstance(x, np.generic) and jnp.issubdtype(x.dtype, np.number)
    if not is_scalar and not isinstance(x, (jax.Array, jax.typing.ArrayLike)):  # type: ignore[arg-type]
        raise TypeError(f"{name} must be {form}, got {type(x).__name__}: {x!r:.60}")
    if isinstance(x, np.ndarray):
        try:
            jax.typeof(x)
        except TypeError:
            raise TypeError(
                f"{name} must be {form} of a dtype that JAX has, got dtype {x.dtype}"
            ) from None
    return x


def as_mask(where: Any) -> Any:
    """Returns the argument `where` as `as_array` does, or None for None.

    Raises:
      TypeError: if it is not an array.
      ValueError: if it is not boolean, as in JAX.
    """
    if where is None:
        return None
    where = as_array("where", where)
    if jnp.result_type(where) != np.bool_:
        raise ValueError(
            f"where must be None or a boolean array, got one of dtype {jnp.result_type(where)}"
        )
    return where


def is_real(value: Any) -> bool:
    """True for a Python or numpy number that is not complex, known when the program is traced."""
    if isinstance(value, np.generic):
        kinds = (np.bool_, jnp.integer, jnp.floating)
        return any(jnp.issubdtype(value.dtype, kind) for kind in kinds)
    return isinstance(value, numbers.Real)


def factor(name: str, value: Any, instead: str) -> float:
    """Returns a static number as a float.

    Args:
      name: the name of the argument.
      value: a Python or numpy number.
      instead: what to do with an array, for the error message.

    Raises:
      TypeError: if `value` is anything else, such as an array or a traced number.
      ValueError: if it is an int beyond the largest float.
    """
    if is_real(value):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{name} must be finite, got an int of that size") from None
    raise TypeError(
        f"{name} must be a Python number, known when the program is traced, got "
        f"{type(value).__name__}; to scale by an array, {instead}"
    )


def flag(name: str, value: Any) -> bool:
    """Returns a static option that is on or off.

    Raises:
      TypeError: if `value` is not a bool.
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r:.60}")
    return bool(value)


def preferred_dtype(dtype: Any) -> np.dtype:
    """Returns the dtype that JAX gives arrays for a `preferred_element_type` other than None.

    If 64-bit dtypes are disabled, it is float32 for float64, with JAX's warning.

    Raises:
      TypeError: if it is not a dtype.
    """
    try:
        return jax.eval_shape(lambda: jnp.zeros((), dtype)).dtype
    except TypeError:
        raise TypeError(
            f"preferred_element_type must be a dtype or None, got {dtype!r:.60}"
        ) from None


def static_axis(axis: Any) -> Any:
    """The axis as a hashable value; upstream checks anything that is not an integer."""
    if isinstance(axis, (list, tuple, range)) or (isinstance(axis, np.ndarray) and axis.ndim == 1):
        return tuple(static_axis(each) for each in axis)
    try:
        return operator.index(axis)
    except TypeError:
        if isinstance(axis, jax.core.Tracer):
            raise TypeError(f"axis must be known when the program is traced, got {axis}") from None
        return axis


def canonical_axes(axis: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Returns `axis` as a sorted tuple of non-negative axes; None means all axes.

    Raises:
      TypeError: if an axis is not an integer.
      ValueError: if an axis is out of range or appears twice.
    """
    if axis is None:
        return tuple(range(ndim))
    axes = axis if isinstance(axis, (tuple, list, range)) else (axis,)
    result = []
    for each in axes:
        try:
            value = operator.index(each)
        except TypeError:  # also for traced arrays and arrays of several elements
            raise TypeError(f"axis must be an int, a tuple of ints or None, got {axis!r}") from None
        if not -ndim <= value < ndim:
            raise ValueError(f"axis {value} is out of bounds for an array of dimension {ndim}")
        result.append(value % ndim)
    if len(set(result)) != len(result):
        raise ValueError(f"axis names a dimension twice: {axis!r}")
    return tuple(sorted(result))


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """True if an array of shape `shape` broadcasts to the shape `to`."""
    try:
        return jnp.broadcast_shapes(tuple(shape), tuple(to)) == tuple(to)
    except ValueError:  # the shapes do not match
        return False


def with_rank(mask: jax.Array, ndim: int) -> jax.Array:
    """Adds leading dims of size 1 to a mask up to rank `ndim`, as broadcasting does."""
    return jax.lax.expand_dims(mask, range(ndim - mask.ndim))
