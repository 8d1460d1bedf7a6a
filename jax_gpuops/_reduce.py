"""sum, prod, max, min, mean, argmax and argmin."""

from __future__ import annotations

import fractions
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_gpuops import _arguments, _primitive, _rowwise
from jax_gpuops._implementation import BATCH_INVARIANT, NoKernelError, dispatch, resolve_invariant
from jax_gpuops._report import left_to_xla

Axis = int | Sequence[int] | None

FLOATS = ("float16", "bfloat16", "float32", "float64")
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_DTYPES = (*FLOATS, *_INTEGERS)


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
    batch_invariant: bool = False,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """Sum over one or more axes; drop-in for `jnp.sum`.

    The error of a sum of n floats is at most 2 log2(n) eps times the sum of their magnitudes, for
    any row length. Integers wrap around. The same input gives the same bits in every run.

    Args:
      a: an array of any shape. The kernels support float16, bfloat16, float32, float64 and
        integers of 8 to 64 bits; 16-bit floats are summed in float32. XLA computes other dtypes.
      axis: the axis or axes to reduce; None means all axes. An axis other than the last is read in
        place, without a transpose in memory.
      dtype: the dtype of the result; None means the dtype of `a`, or for narrower integers the
        default integer dtype of the same signedness.
      out: unused, as in JAX.
      keepdims: True to keep the reduced axes with size 1.
      initial: a scalar, the start value of the reduction.
      where: a boolean array that broadcasts to `a`: the elements to include. For floats the kernels
        read the mask, except those whose limits exclude it; for other dtypes XLA applies it first.
      promote_integers: False to keep the dtype of integers if `dtype` is None.
      batch_invariant: True for rows that have the same bits whatever the number of rows, the other
        rows, the axis and `vmap` are. Rows whose length is not a multiple of 16 bytes are padded,
        and rows along an axis other than the last are transposed.
      implementation: None for the fastest known on the platform, "cuda", "interpret" (the same
        kernels on the host) or "xla".
      algorithm: None to let the plan choose, or a name from `jax_gpuops.algorithms("reduce")`.

    Returns:
      An array of the shape of `a` without the reduced axes.

    Raises:
      TypeError: if an argument has a type that is not accepted, or if a kernel was requested that
        does not support the dtype.
      ValueError: if `axis` is out of range, if `implementation` or `algorithm` is unknown, does not
        support the problem or cannot run on the platform. A `batch_invariant` call requests a
        kernel, and takes no `algorithm`.
      NotImplementedError: if `out` is not None.
    """
    return _reduce(
        "sum",
        a,
        axis,
        batch_invariant,
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
    batch_invariant: bool = False,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """Product over one or more axes; drop-in for `jnp.prod`.

    The arguments are those of `jnp.prod`; limits and errors are those of `sum`.
    """
    return _reduce(
        "prod",
        a,
        axis,
        batch_invariant,
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
    batch_invariant: bool = False,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """Maximum over one or more axes; drop-in for `jnp.max`.

    A NaN anywhere in a row is its maximum. The arguments are those of `jnp.max`; limits and
    errors are those of `sum`.
    """
    return _reduce(
        "max",
        a,
        axis,
        batch_invariant,
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
    batch_invariant: bool = False,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """Minimum over one or more axes; drop-in for `jnp.min`.

    A NaN anywhere in a row is its minimum. The arguments are those of `jnp.min`; limits and
    errors are those of `sum`.
    """
    return _reduce(
        "min",
        a,
        axis,
        batch_invariant,
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
    batch_invariant: bool = False,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """Mean over one or more axes; drop-in for `jnp.mean`.

    The arguments are those of `jnp.mean`; limits and errors are those of `sum`.
    """
    return _reduce(
        "mean",
        a,
        axis,
        batch_invariant,
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
    batch_invariant: bool = False,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """Index of the maximum along an axis, or in the flattened array; drop-in for `jnp.argmax`.

    Of equal maxima the first one counts; if there is a NaN, the first NaN. The arguments are those
    of `jnp.argmax`; limits and errors are those of `sum`.
    """
    how = (batch_invariant, implementation, algorithm)
    return _reduce("argmax", a, axis, *how, out=out, keepdims=keepdims)


def argmin(
    a: jax.typing.ArrayLike,
    axis: int | None = None,
    out: None = None,
    keepdims: bool | None = None,
    *,
    batch_invariant: bool = False,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """Index of the minimum along an axis, or in the flattened array; drop-in for `jnp.argmin`.

    Of equal minima the first one counts; if there is a NaN, the first NaN. The arguments are those
    of `jnp.argmin`; limits and errors are those of `sum`.
    """
    how = (batch_invariant, implementation, algorithm)
    return _reduce("argmin", a, axis, *how, out=out, keepdims=keepdims)


# From a call to a primitive


def _reduce(
    name,
    a,
    axis,
    batch_invariant,
    implementation,
    algorithm,
    *,
    out=None,
    initial=None,
    where=None,
    **arguments,
) -> jax.Array:
    a = _arguments.as_array("a", a)
    operands = {
        key: _arguments.as_array(key, value)
        for key, value in (("initial", initial), ("where", where))
        if value is not None
    }
    chosen, algorithm = resolve_invariant("reduce", batch_invariant, implementation, algorithm)
    if out is not None:  # upstream raises an error
        return _UPSTREAM[name](a, axis, out=out, **operands, **arguments)
    return _JITTED[name](
        a,
        operands,
        axis=_arguments.static_axis(axis),
        arguments=tuple(arguments.items()),
        implementation=chosen,
        algorithm=algorithm,
    )


def _apply(name, a, operands, *, axis, arguments, implementation, algorithm):
    keywords = dict(arguments)
    axes = _arguments.canonical_axes(axis, a.ndim)
    upstream = functools.partial(_UPSTREAM[name], axis=axis, **keywords)
    # Upstream's abstract evaluation gives the result's type and raises upstream's errors.
    result = jax.eval_shape(upstream, a, **operands)

    def kernel():
        where = operands.get("where")
        masks = [] if where is None else [_arguments.with_rank(where, a.ndim)]
        # A kernel divides by the number of elements only if all rows have the same number.
        is_quotient = name == "mean" and (
            bool(masks) or result.dtype.name not in FLOATS or algorithm == BATCH_INVARIANT
        )
        reduction = "sum" if is_quotient else name
        finishes = is_quotient or "initial" in operands
        computation = _computation_dtype(name, result.dtype, keywords)
        dtype = computation if finishes else result.dtype
        element = _element_dtype(reduction, a.dtype, dtype)
        if element.name not in _DTYPES:
            raise NoKernelError(
                f"kernels do not support dtype {element}, only {', '.join(_DTYPES)}", TypeError
            )
        _rowwise.check_unsharded("a", a, axes)
        x = a
        if is_quotient:  # 16 bits do not hold the number of elements
            x, dtype = a.astype(element), _primitive.accumulator(dtype)
        how = {"implementation": implementation, "algorithm": algorithm}
        y = _bind(reduction, x, *masks, axes=axes, dtype=np.dtype(dtype), **how)
        if "initial" in operands:
            y = _COMBINE[reduction](jnp.asarray(operands["initial"]).astype(dtype), y)
        if is_quotient:
            y = quotient(y, count(a, axes, masks, dtype), algorithm)
        if keywords.get("keepdims"):
            y = jnp.expand_dims(y, axes)
        return y.astype(result.dtype)

    def xla():
        return upstream(a, **operands)

    described = [a, *operands.values()]
    if a.size == 0 or a.ndim == 0 or axis == ():
        return left_to_xla(name, described, "there is nothing to reduce", xla)
    return dispatch(name, described, implementation, algorithm, kernel, xla)


def _bind(function: str, x, *where, axes: _rowwise.Axes, dtype, **how) -> jax.Array:
    if how["algorithm"] == BATCH_INVARIANT:
        steps: Callable[..., jax.Array] = _reduce_packs
    elif _is_by_runs(function, x, axes, **how):
        steps = _reduce_runs
    else:
        return _rowwise.bind(_PRIMITIVES[function], x, *where, axes=axes, dtype=dtype, **how)

    def reduce(x, *where):
        return steps(function, x, *where, axes=axes, dtype=dtype, **how)

    if function not in ("max", "min") or x.dtype.name not in FLOATS:
        return reduce(x, *where)
    # The derivative is the mean over all elements of a row that are equal to its result. Padding
    # must not count, and the runs of a row may have different numbers of such elements.
    reduce = jax.custom_jvp(reduce)

    @reduce.defjvp
    def jvp(primals, tangents):
        (x, *where), (t, *_) = primals, tangents
        x = _stored(x, how["implementation"])
        y = reduce(x, *where)
        return y, _choice_tangent(function, x, y, t, *where, axes=axes)

    return reduce(x, *where)


def _stored(x: jax.Array, implementation: _primitive.Implementation) -> jax.Array:
    """Makes XLA compute an operand once, for a kernel and for the comparison with its result.

    XLA may compute it again in the comparison, fused with other operations, and round it
    differently, so that no element equals the result. XLA:CPU of jax 0.10 does so despite this.
    """
    return x if implementation == "xla" else jax.lax.optimization_barrier(x)


def _reduce_packs(function, x, *where, axes, dtype, **how) -> jax.Array:
    x, where, axis = in_packs(function, x, where, axes=axes, dtype=dtype)
    return _rowwise.bind(_PRIMITIVES[function], x, *where, axes=(axis,), dtype=dtype, **how)


def _is_by_runs(function, x, axes, *, implementation, algorithm) -> bool:
    """True for axes that are not adjacent, if kernels are to reduce them without a copy."""
    return (
        not _rowwise.Rows(x.shape, axes).adjacent
        and function not in ("argmax", "argmin")
        and implementation is not None
        and algorithm is None
        and _primitive.has_constant_shape(x)
    )


def _reduce_runs(function, x, *where, axes, dtype, **how) -> jax.Array:
    """Reduces one run of adjacent axes after the other; the result of the first is small."""
    x = x.astype(_element_dtype(function, x.dtype, dtype))
    computed = dtype if function in ("max", "min") else np.dtype(_primitive.accumulator(dtype))
    left = list(range(x.ndim))
    for run in _rowwise.Rows(x.shape, axes).runs:
        own = tuple(map(left.index, run))
        x = _rowwise.bind(_PRIMITIVES[function], x, *where, axes=own, dtype=computed, **how)
        left = [d for d in left if d not in run]
        where = ()
    return x.astype(dtype)


def in_packs(function: str, x, masks, *, axes: _rowwise.Axes, dtype):
    """Makes rows in the dtype that a function's kernel reads, padded for batch invariance.

    Returns:
      The rows of the array, the rows of the masks, and the axis along which they lie.
    """
    rows = _rowwise.Rows(x.shape, axes)
    x = x.astype(_element_dtype(function, x.dtype, dtype))
    fill = _identity(function, x.dtype)
    x, masks = _rowwise.in_packs(rows, x, masks, fill, counted=function == "mean_and_var")
    return x, masks, x.ndim - 1


def _computation_dtype(name: str, result: np.dtype, keywords: dict[str, Any]) -> np.dtype:
    """The dtype in which jnp reduces: float32 for 16-bit floats, unless `dtype` is given."""
    if name in ("sum", "prod", "mean") and keywords["dtype"] is None:
        return _primitive.accumulator(result)
    return result


def count(a, axes: _rowwise.Axes, masks: Sequence[jax.Array], dtype) -> jax.Array:
    """The number of elements of each row, as an array that broadcasts to the sum."""
    if not masks:
        # From a Python int: an integer array would be int32.
        return jax.lax.convert_element_type(math.prod(a.shape[axis] for axis in axes), dtype)
    shape = list(masks[0].shape)
    for axis in axes:
        shape[axis] = a.shape[axis]
    return jnp.sum(jnp.broadcast_to(masks[0], shape), axes, dtype=dtype)


def quotient(total: jax.Array, divisor: jax.Array, algorithm: str | None) -> jax.Array:
    """Divides the sums of rows by a divisor that broadcasts to them.

    XLA multiplies by the reciprocal if it broadcasts the divisor, and divides otherwise. So for a
    mask that all rows share the bits would depend on whether there is more than one row.
    """
    if total.dtype.name in _INTEGERS:
        return jax.lax.div(total, jnp.zeros_like(total) + divisor)
    return total * (1 / divisor) if algorithm == BATCH_INVARIANT else total / divisor


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
_JITTED = {
    name: _primitive.jit(
        name,
        functools.partial(_apply, name),
        *("axis", "arguments", "implementation", "algorithm"),
    )
    for name in _UPSTREAM
}


# The primitives map an array and an optional mask to one element of `dtype` per row.


def _element_dtype(function: str, dtype: np.dtype, result: np.dtype) -> np.dtype:
    """The dtype that a kernel reads: the operand's if it implies the required computation dtype."""
    if function == "mean_and_var":
        computed = _primitive.accumulator(result)
        return dtype if _primitive.accumulator(dtype) == computed else computed
    if function not in ("sum", "mean", "prod"):
        return dtype
    is_widening = result == _primitive.accumulator(dtype)
    are_integers = dtype.name in _INTEGERS and result.name in _INTEGERS
    return dtype if is_widening or are_integers else result


def _identity(function: str, dtype: np.dtype) -> np.ndarray:
    """The value in place of excluded elements."""
    if function not in ("max", "min", "argmax", "argmin"):
        return np.asarray(function == "prod", dtype)
    is_lowest = function in ("max", "argmax")
    if dtype.name in FLOATS:
        return np.asarray(-np.inf if is_lowest else np.inf, dtype)
    limits = np.iinfo(dtype)
    return np.asarray(limits.min if is_lowest else limits.max, dtype)


def _masked(function: str, x: jax.Array, *where: jax.Array) -> jax.Array:
    return jnp.where(where[0], x, _identity(function, x.dtype)) if where else x


def _takes_mask(element: np.dtype) -> bool:
    """True if kernels read a mask for a dtype; other dtypes are masked before the kernel."""
    return element.name in FLOATS


def problem_of(function: str, x, *where, axes: _rowwise.Axes, dtype) -> dict[str, Any]:
    rows = _rowwise.Rows(x.shape, axes)
    element = _element_dtype(function, x.dtype, dtype)
    masked = bool(where) and _takes_mask(element)
    return {
        "function": "sum" if function == "mean" else function,
        "dtype": element.name,
        "result": dtype.name,
        **rows.sizes(),
        "masked": int(masked),
        "alignment": _primitive.ALIGNMENT,
        "workspace": _primitive.WORKSPACE_AS_ASKED,
        "mean": int(function == "mean"),
        "copied": int(not rows.is_in_place or element != x.dtype or bool(where) != masked),
    }


_STEPS = ("naive", "stride", "sequential", "first_add", "unroll")
"""The steps of the ladder whose workspace per row has no bound."""

_MOST_COLUMNS = 2**40  # more than any GPU's memory holds
_SOME_COLUMNS = 2**17  # a whole number of parts, below every algorithm's limit of parts


def workspace_bytes(launch: _primitive.Launch, problem: dict[str, Any]) -> Any:
    """The workspace per row, which is the same for a shard with fewer rows.

    Returns a number, or for symbolic columns an expression that is up to twice as much.
    """
    # The sizes may be symbolic.
    problem = problem | {"outer": 1, "inner": 1 if problem["inner"] == 1 else 2}
    if not isinstance(problem["columns"], int):
        if launch.algorithm in _STEPS:
            raise ValueError(
                f"algorithm={launch.algorithm!r} needs workspace that depends on the length of the "
                f"rows, which is symbolic here: {problem['columns']}"
            )
        most, some = (
            launch.workspace_bytes("reduce", problem | {"columns": columns})
            for columns in (_MOST_COLUMNS, _SOME_COLUMNS)
        )
        # A row of more than one part has less than two parts for each part that it fills. The
        # fraction is reduced, since XLA computes sizes in int32.
        each = fractions.Fraction(2 * some, _SOME_COLUMNS)
        in_parts = problem["columns"] * each.numerator // each.denominator
        return jax.core.min_dim(most, in_parts) if most else 0
    return launch.workspace_bytes("reduce", problem)


def _call(function: str, launch: _primitive.Launch, x, *where, axes: _rowwise.Axes, dtype):
    problem = problem_of(function, x, *where, axes=axes, dtype=dtype)
    x = x.astype(problem["dtype"])
    operands = [x, *where] if problem["masked"] else [_masked(function, x, *where)]
    (y,) = _rowwise.call(
        launch,
        f"jax_gpuops_{function}_v1",
        operands,
        axes=axes,
        workspace_bytes=workspace_bytes(launch, problem),
    )
    return y


def _fold(function: str, x, *where, axes: _rowwise.Axes, dtype):
    upstream = functools.partial(_UPSTREAM[function], where=where[0] if where else None)
    if function in ("max", "min"):
        return upstream(x, axes, initial=_identity(function, x.dtype) if where else None)
    if x.dtype == dtype and function != "mean":
        return upstream(x, axes, promote_integers=False)
    if function == "mean" and jnp.issubdtype(dtype, jnp.inexact):
        # Sums and divides 16-bit floats in float32; with `dtype` it would not.
        return upstream(x.astype(dtype), axes)
    return upstream(x, axes, dtype=dtype)


def _choose(function: str, x, *, axes: _rowwise.Axes, dtype):
    if len(axes) == 1:
        return _UPSTREAM[function](x, axes[0]).astype(dtype)
    return _UPSTREAM[function](_rowwise.Rows(x.shape, axes).apply(x), -1).astype(dtype)


def _make(function: str, reference: Callable[..., jax.Array]) -> Primitive:
    kernel = _primitive.Kernel(
        name=f"gpuops_{function}",
        op="reduce",
        reference=functools.partial(reference, function),
        problem=functools.partial(problem_of, function),
        call=functools.partial(_call, function),
        partitionable=True,
    )
    jax.ffi.register_ffi_target_as_batch_partitionable(f"jax_gpuops_{function}_v1")
    p = _primitive.primitive(kernel)
    _rowwise.define_batching(p)
    return p


_PRIMITIVES = {name: _make(name, _fold) for name in ("sum", "mean", "prod", "max", "min")}
_PRIMITIVES |= {name: _make(name, _choose) for name in ("argmax", "argmin")}


# Derivatives, as JAX defines them for the upstream functions.


def _linear_tangent(function, x, y, t, *where, **params):
    del x, y
    return _PRIMITIVES[function].bind(t, *where, **params)


def _linear_transpose(function, cotangent, x, *where, implementation, algorithm, **params):
    del implementation, algorithm
    others = [None] * len(where)
    if type(cotangent) is ad.Zero:
        return [ad.Zero(x.aval), *others]
    transposed = jax.linear_transpose(lambda x: _fold(function, x, *where, **params), x.aval)
    return [*transposed(cotangent), *others]


def _prod_tangent(x, y, t, *where, implementation, algorithm, **params):
    del y, implementation, algorithm
    return jax.jvp(lambda x: _fold("prod", x, *where, **params), (x,), (t,))[1]


def _choice_tangent(function, x, y, t, *where, axes, **params):
    """The mean of the tangents where the row has its maximum (minimum)."""
    del params
    chosen = (_masked(function, x, *where) == jnp.expand_dims(y, axes)).astype(t.dtype)
    return jnp.sum(_masked("sum", t, *where) * chosen, axes) / jnp.sum(chosen, axes)


def _define_jvp(p: Primitive, tangent_rule, *, compares: bool = False) -> None:
    """Defines a derivative, by a rule that perhaps compares the operand with the result."""

    def jvp(primals, tangents, **params):
        (x, *where), (t, *_) = primals, tangents
        has_tangent = tangent_rule is not None and type(t) is not ad.Zero
        has_tangent &= jnp.issubdtype(params["dtype"], jnp.inexact)  # floats may become integers
        if has_tangent and compares:
            x = _stored(x, params["implementation"])
        y = p.bind(x, *where, **params)
        if not has_tangent:
            return y, ad.Zero(jax.typeof(y).to_tangent_aval())
        return y, tangent_rule(x, y, t, *where, **params)

    ad.primitive_jvps[p] = jvp


for linear in ("sum", "mean"):
    _define_jvp(_PRIMITIVES[linear], functools.partial(_linear_tangent, linear))
    ad.primitive_transposes[_PRIMITIVES[linear]] = functools.partial(_linear_transpose, linear)
_define_jvp(_PRIMITIVES["prod"], _prod_tangent)
_define_jvp(_PRIMITIVES["max"], functools.partial(_choice_tangent, "max"), compares=True)
_define_jvp(_PRIMITIVES["min"], functools.partial(_choice_tangent, "min"), compares=True)
_define_jvp(_PRIMITIVES["argmax"], None)
_define_jvp(_PRIMITIVES["argmin"], None)
