"""sum, prod, max, min, mean, argmax and argmin."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jax_gpuops import _primitive
from jax_gpuops._implementation import resolve

Axis = int | Sequence[int] | None

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_DTYPES = (*_FLOATS, *_INTEGERS)


def sum(
    a: jax.typing.ArrayLike,
    axis: Axis = None,
    dtype: jax.typing.DTypeLike | None = None,
    out: None = None,
    keepdims: bool = False,
    initial: jax.typing.ArrayLike | None = None,
    where: jax.typing.ArrayLike | None = None,
    promote_integers: bool = True,
    *,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """Sum over one or more axes; drop-in for `jnp.sum`.

    The error of a sum of n floats is at most 2 log2(n) eps times the sum of their magnitudes,
    however long the row. Integers wrap around. The same input gives the same bits, run after run.

    Args:
      a: an array of any shape. Our kernels take float16, bfloat16, float32, float64 and the
        integers of 8 to 64 bits; 16-bit floats are summed in float32. XLA computes other dtypes.
      axis: the axis or axes to reduce; None is all of them. Another axis than the last is read
        where it lies, not transposed in memory.
      dtype: the dtype of the result; None is that of `a`, or the default integer type of its
        sign for narrower integers.
      out: unused, as in JAX.
      keepdims: True to keep the reduced axes with size 1.
      initial: a scalar that the result starts from.
      where: a boolean array that broadcasts to `a`: the elements to include.
      promote_integers: False to leave the dtype of integers as it is where `dtype` is None.
      implementation: None for the fastest known on the platform, "cuda", "interpret" (the same
        kernels on the host) or "xla".
      algorithm: None to let the plan choose, or a name from `jax_gpuops.algorithms("reduce")`.

    Returns:
      An array of the shape of `a` without the reduced axes.

    Raises:
      TypeError: if an argument has a type that is not accepted, or a kernel was asked for and has
        no version for the dtype.
      ValueError: if `axis` is out of range, if `implementation` or `algorithm` is unknown, cannot
        take the problem or cannot run on the platform.
      NotImplementedError: if `out` is not None.
    """
    return _reduce(
        "sum",
        a,
        axis,
        implementation,
        algorithm,
        initial=initial,
        where=where,
        out=out,
        keepdims=keepdims,
        dtype=dtype,
        promote_integers=promote_integers,
    )


def prod(
    a: jax.typing.ArrayLike,
    axis: Axis = None,
    dtype: jax.typing.DTypeLike | None = None,
    out: None = None,
    keepdims: bool = False,
    initial: jax.typing.ArrayLike | None = None,
    where: jax.typing.ArrayLike | None = None,
    promote_integers: bool = True,
    *,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """Product over one or more axes; drop-in for `jnp.prod`.

    Args:
      a: an array of any shape, dtypes as for `sum`.
      axis: the axis or axes to reduce; None is all of them.
      dtype: the dtype of the result, as for `sum`.
      out: unused, as in JAX.
      keepdims: True to keep the reduced axes with size 1.
      initial: a scalar that the result starts from.
      where: a boolean array that broadcasts to `a`: the elements to include.
      promote_integers: as for `sum`.
      implementation: as for `sum`.
      algorithm: as for `sum`.

    Returns:
      An array of the shape of `a` without the reduced axes.

    Raises:
      TypeError: as `sum` does.
      ValueError: as `sum` does.
      NotImplementedError: if `out` is not None.
    """
    return _reduce(
        "prod",
        a,
        axis,
        implementation,
        algorithm,
        initial=initial,
        where=where,
        out=out,
        keepdims=keepdims,
        dtype=dtype,
        promote_integers=promote_integers,
    )


def max(
    a: jax.typing.ArrayLike,
    axis: Axis = None,
    out: None = None,
    keepdims: bool = False,
    initial: jax.typing.ArrayLike | None = None,
    where: jax.typing.ArrayLike | None = None,
    *,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """Maximum over one or more axes; drop-in for `jnp.max`. A NaN anywhere in a row is its maximum.

    Args:
      a: an array of any shape, dtypes as for `sum`.
      axis: the axis or axes to reduce; None is all of them.
      out: unused, as in JAX.
      keepdims: True to keep the reduced axes with size 1.
      initial: a scalar that the result is at least.
      where: a boolean array that broadcasts to `a`: the elements to include. Needs `initial`.
      implementation: as for `sum`.
      algorithm: as for `sum`.

    Returns:
      An array of the shape of `a` without the reduced axes, and of its dtype.

    Raises:
      TypeError: as `sum` does.
      ValueError: as `sum` does; also if there is nothing to reduce and no `initial`.
      NotImplementedError: if `out` is not None.
    """
    return _reduce(
        "max",
        a,
        axis,
        implementation,
        algorithm,
        initial=initial,
        where=where,
        out=out,
        keepdims=keepdims,
    )


def min(
    a: jax.typing.ArrayLike,
    axis: Axis = None,
    out: None = None,
    keepdims: bool = False,
    initial: jax.typing.ArrayLike | None = None,
    where: jax.typing.ArrayLike | None = None,
    *,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """Minimum over one or more axes; drop-in for `jnp.min`. A NaN anywhere in a row is its minimum.

    Args:
      a: an array of any shape, dtypes as for `sum`.
      axis: the axis or axes to reduce; None is all of them.
      out: unused, as in JAX.
      keepdims: True to keep the reduced axes with size 1.
      initial: a scalar that the result is at most.
      where: a boolean array that broadcasts to `a`: the elements to include. Needs `initial`.
      implementation: as for `sum`.
      algorithm: as for `sum`.

    Returns:
      An array of the shape of `a` without the reduced axes, and of its dtype.

    Raises:
      TypeError: as `sum` does.
      ValueError: as `sum` does; also if there is nothing to reduce and no `initial`.
      NotImplementedError: if `out` is not None.
    """
    return _reduce(
        "min",
        a,
        axis,
        implementation,
        algorithm,
        initial=initial,
        where=where,
        out=out,
        keepdims=keepdims,
    )


def mean(
    a: jax.typing.ArrayLike,
    axis: Axis = None,
    dtype: jax.typing.DTypeLike | None = None,
    out: None = None,
    keepdims: bool = False,
    *,
    where: jax.typing.ArrayLike | None = None,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """Mean over one or more axes: the sum over the number of elements; drop-in for `jnp.mean`.

    Args:
      a: an array of any shape, dtypes as for `sum`.
      axis: the axis or axes to reduce; None is all of them.
      dtype: the dtype of the result; None is that of `a`, or the default float type for integers.
      out: unused, as in JAX.
      keepdims: True to keep the reduced axes with size 1.
      where: a boolean array that broadcasts to `a`: the elements to include.
      implementation: as for `sum`.
      algorithm: as for `sum`.

    Returns:
      An array of the shape of `a` without the reduced axes.

    Raises:
      TypeError: as `sum` does.
      ValueError: as `sum` does.
      NotImplementedError: if `out` is not None.
    """
    return _reduce(
        "mean",
        a,
        axis,
        implementation,
        algorithm,
        where=where,
        out=out,
        keepdims=keepdims,
        dtype=dtype,
    )


def argmax(
    a: jax.typing.ArrayLike,
    axis: int | None = None,
    out: None = None,
    keepdims: bool | None = None,
    *,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """Index of the maximum along an axis; drop-in for `jnp.argmax`.

    The first of equal maxima; the first NaN where there is one.

    Args:
      a: an array of any shape, dtypes as for `sum`.
      axis: the axis to reduce; None is all of them, with an index into the flattened array.
      out: unused, as in JAX.
      keepdims: True to keep the reduced axis with size 1.
      implementation: as for `sum`.
      algorithm: None, "multiple", "row" or "column".

    Returns:
      An array of the default integer type.

    Raises:
      TypeError: as `sum` does.
      ValueError: as `sum` does; also if there is nothing to reduce.
      NotImplementedError: if `out` is not None.
    """
    return _reduce("argmax", a, axis, implementation, algorithm, out=out, keepdims=keepdims)


def argmin(
    a: jax.typing.ArrayLike,
    axis: int | None = None,
    out: None = None,
    keepdims: bool | None = None,
    *,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """Index of the minimum along an axis; drop-in for `jnp.argmin`.

    The first of equal minima; the first NaN where there is one.

    Args:
      a: an array of any shape, dtypes as for `sum`.
      axis: the axis to reduce; None is all of them, with an index into the flattened array.
      out: unused, as in JAX.
      keepdims: True to keep the reduced axis with size 1.
      implementation: as for `sum`.
      algorithm: None, "multiple", "row" or "column".

    Returns:
      An array of the default integer type.

    Raises:
      TypeError: as `sum` does.
      ValueError: as `sum` does; also if there is nothing to reduce.
      NotImplementedError: if `out` is not None.
    """
    return _reduce("argmin", a, axis, implementation, algorithm, out=out, keepdims=keepdims)


# From a call to a primitive


def _reduce(
    name, a, axis, implementation, algorithm, *, out=None, initial=None, where=None, **arguments
) -> jax.Array:
    """Runs the primitive of `name`, or upstream's function where no kernel is to run."""
    _primitive.check_array("a", a)
    chosen = resolve("reduce", implementation, algorithm)
    operands = {"initial": initial, "where": where}
    operands = {key: value for key, value in operands.items() if value is not None}
    if chosen == "xla" or out is not None:
        return _UPSTREAM[name](a, axis, out=out, **operands, **arguments)
    return _apply(
        a,
        operands,
        name=name,
        axis=_static_axis(axis),
        arguments=tuple(arguments.items()),
        implementation=chosen,
        algorithm=algorithm,
    )


def _static_axis(axis: Any) -> Any:
    """The axis as a hashable value; what is no integer is left for upstream to judge."""
    if isinstance(axis, (list, tuple, np.ndarray)) and np.ndim(axis) == 1:
        return tuple(_static_axis(each) for each in axis)
    try:
        return operator.index(axis)
    except TypeError:
        return axis


@functools.partial(
    jax.jit, static_argnames=("name", "axis", "arguments", "implementation", "algorithm")
)
def _apply(a, operands, *, name, axis, arguments, implementation, algorithm):
    """Under jit, so that all this happens once, and the moves around a kernel cost nothing."""
    keywords = dict(arguments)
    upstream = functools.partial(_UPSTREAM[name], axis=axis, **keywords)
    # Upstream's abstract evaluation tells the result's type, and raises what upstream raises.
    result = jax.eval_shape(upstream, a, **operands)
    if a.size == 0 or a.ndim == 0 or axis == ():
        return upstream(a, **operands)
    axes = _primitive.canonical_axes(axis, a.ndim)
    computation = _computation_dtype(name, result.dtype, keywords)
    element = _element_dtype(name, a.dtype, computation)
    if element.name not in _DTYPES:
        why = f"dtype {element} is not among {', '.join(_DTYPES)}"
        _primitive.refuse(implementation, algorithm, why, TypeError)
        return upstream(a, **operands)
    if _primitive.is_sharded_along(a, axes):
        why = f"a is sharded along the reduced axes, {jax.typeof(a)}; use jax.shard_map"
        _primitive.refuse(implementation, algorithm, why)
        return upstream(a, **operands)
    rows = _primitive.Rows(axes, a.ndim)
    # XLA does these in the one pass of its reduction; for a kernel they take a pass before, or
    # leave a transpose behind where the kernel turns out not to run.
    moves = not rows.trailing or "where" in operands or element != a.dtype
    if implementation is None and algorithm is None and moves:
        return upstream(a, **operands)

    # What comes before the kernel, the kernel, and what comes after.
    x = a.astype(element)
    if (where := operands.get("where")) is not None:
        x = jnp.where(where, x, _identity(name, element))
        if x.shape != a.shape:
            raise ValueError(
                f"where of shape {jnp.shape(where)} does not broadcast to a of shape {a.shape}"
            )
    reduction = "sum" if name == "mean" else name
    finishes = name == "mean" or "initial" in operands
    dtype = computation if finishes else result.dtype
    x = rows.apply(x)
    params = {"inner_dims": rows.inner_dims, "dtype": np.dtype(dtype)}
    p = _PRIMITIVES[reduction]
    _primitive.check_problem(p, implementation, algorithm, x, **params)
    y = p.bind(x, **params, implementation=implementation, algorithm=algorithm)
    if "initial" in operands:
        y = _COMBINE[reduction](jnp.asarray(operands["initial"]).astype(dtype), y)
    if name == "mean":
        y = y / _count(a, axes, where, dtype)
    if keywords.get("keepdims"):
        y = jnp.expand_dims(y, axes)
    return y.astype(result.dtype)


def _computation_dtype(name: str, result: np.dtype, keywords: dict[str, Any]) -> np.dtype:
    """The dtype in which jnp reduces: float32 for 16-bit floats, unless `dtype` names one."""
    if name in ("sum", "prod", "mean") and keywords["dtype"] is None and _is_16_bit_float(result):
        return np.dtype("float32")
    return result


def _element_dtype(name: str, dtype: np.dtype, computation: np.dtype) -> np.dtype:
    """The dtype that a kernel reads: that of the operand where it computes in the right one."""
    if name not in ("sum", "prod", "mean"):
        return dtype
    if _is_16_bit_float(dtype) and computation == np.float32:
        return dtype
    if dtype.name in _INTEGERS and computation.name in _INTEGERS:
        return dtype
    return computation


def _is_16_bit_float(dtype: np.dtype) -> bool:
    return dtype.name in ("float16", "bfloat16")


def _identity(name: str, dtype: np.dtype) -> Any:
    if name in ("sum", "mean"):
        return np.zeros((), dtype)
    if name == "prod":
        return np.ones((), dtype)
    lowest = name == "max"
    if dtype.name in _FLOATS:
        return np.asarray(-np.inf if lowest else np.inf).astype(dtype)
    return np.asarray(np.iinfo(dtype).min if lowest else np.iinfo(dtype).max, dtype)


def _count(a, axes: tuple[int, ...], where, dtype) -> jax.Array:
    """How many elements the mean is of, as an array that divides the sum."""
    if where is None:
        return jnp.asarray(math.prod(a.shape[axis] for axis in axes)).astype(dtype)
    return jnp.sum(jnp.broadcast_to(where, a.shape), axes, dtype=dtype)


# Primitives: rows to elements. `dtype` is that of the result.


def _problem(function: str, x, *, inner_dims: int, dtype) -> dict[str, Any]:
    return {
        "function": function,
        "dtype": x.dtype.name,
        "result": dtype.name,
        **_primitive.row_problem(x.shape, inner_dims),
    }


def _result(x, *, inner_dims: int, dtype):
    del inner_dims
    sharding = x.sharding.update(spec=x.sharding.spec[:-1])
    weak = x.weak_type and x.dtype == dtype
    return x.update(shape=x.shape[:-1], dtype=dtype, sharding=sharding, weak_type=weak)


def _layouts(x, *, inner_dims: int, dtype):
    del dtype
    return [_primitive.row_layout(x.ndim, inner_dims)], [tuple(reversed(range(x.ndim - 1)))]


def _attributes(*, inner_dims: int, dtype):
    del dtype
    return {"inner_dims": inner_dims}


_UNKNOWN_COLUMNS = 2**40  # where exported shapes are symbolic: more than any GPU's memory holds


def _workspace(function: str, module, x, *, algorithm, inner_dims: int, dtype) -> int:
    problem = _problem(function, x, inner_dims=inner_dims, dtype=dtype)
    if not isinstance(problem["columns"], int):
        if algorithm not in (None, "multiple", "row", "column"):
            raise ValueError(
                f"algorithm={algorithm!r} needs workspace that depends on the length of the rows, "
                f"which is symbolic here: {problem['columns']}"
            )
        problem["columns"] = _UNKNOWN_COLUMNS
    problem |= {"outer": 1, "inner": 1, "algorithm": algorithm or ""}
    return module.workspace("reduce", problem)


def _make(function: str, reference: Callable[..., jax.Array]) -> Primitive:
    kernel = _primitive.Kernel(
        name=f"gpuops_{function}",
        op="reduce",
        target=f"jax_gpuops_{function}_v1",
        result=_result,
        reference=reference,
        problem=functools.partial(_problem, function),
        attributes=_attributes,
        layouts=_layouts,
        rows=lambda **_: 1,
        workspace=functools.partial(_workspace, function),
    )
    p = _primitive.primitive(kernel)
    batching.primitive_batchers[p] = functools.partial(_primitive.batch_rows, p)
    return p


def _folding(upstream):
    def reference(x, *, inner_dims: int, dtype):
        del inner_dims  # where the row lies in memory is the compiler's business here
        if x.dtype == dtype:
            return upstream(x, -1, promote_integers=False)
        return upstream(x, -1, dtype=dtype)

    return reference


def _choosing(upstream):
    def reference(x, *, inner_dims: int, dtype):
        del inner_dims
        return upstream(x, -1).astype(dtype)

    return reference


_UPSTREAM: dict[str, Callable[..., Any]] = {
    "sum": jnp.sum,
    "prod": jnp.prod,
    "max": jnp.max,
    "min": jnp.min,
    "mean": jnp.mean,
    "argmax": jnp.argmax,
    "argmin": jnp.argmin,
}
_COMBINE = {"sum": jnp.add, "prod": jnp.multiply, "max": jnp.maximum, "min": jnp.minimum}
_PRIMITIVES = {
    name: _make(name, (_folding if name in ("sum", "prod") else _choosing)(_UPSTREAM[name]))
    for name in _UPSTREAM
    if name != "mean"
}


# Derivatives: those that JAX gives the upstream functions.


def _sum_transpose(cotangent, x, *, inner_dims: int, dtype, implementation, algorithm):
    del inner_dims, dtype, implementation, algorithm
    aval = x.aval
    return [
        jax.lax.broadcast_in_dim(
            cotangent.astype(aval.dtype),
            aval.shape,
            tuple(range(aval.ndim - 1)),
            out_sharding=aval.sharding,
        )
    ]


def _prod_tangent(x, y, t, **params):
    del y
    reference = functools.partial(_folding(jnp.prod), **params)
    return jax.jvp(reference, (x,), (t,))[1]


def _choice_tangent(x, y, t, **params):
    """The mean of the tangents at the places where the row has its maximum (minimum)."""
    del params
    chosen = (x == jnp.expand_dims(y, -1)).astype(t.dtype)
    return jnp.sum(t * chosen, -1) / jnp.sum(chosen, -1)


def _define_jvp(p: Primitive, tangent_rule) -> None:
    def jvp(primals, tangents, *, implementation, algorithm, **params):
        (x,), (t,) = primals, tangents
        y = p.bind(x, implementation=implementation, algorithm=algorithm, **params)
        if tangent_rule is None or type(t) is ad.Zero:
            return y, ad.Zero(jax.typeof(y).to_tangent_aval())
        return y, tangent_rule(x, y, t, **params)

    ad.primitive_jvps[p] = jvp


ad.deflinear2(_PRIMITIVES["sum"], _sum_transpose)
_define_jvp(_PRIMITIVES["prod"], _prod_tangent)
_define_jvp(_PRIMITIVES["max"], _choice_tangent)
_define_jvp(_PRIMITIVES["min"], _choice_tangent)
_define_jvp(_PRIMITIVES["argmax"], None)
_define_jvp(_PRIMITIVES["argmin"], None)
