"""var, std and mean_and_var, by one kernel that reads the array once."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_gpuops import _arguments, _primitive, _reduce, _rowwise
from jax_gpuops._implementation import BATCH_INVARIANT, NoKernelError, dispatch, resolve_invariant
from jax_gpuops._report import left_to_xla


def var(
    a: jax.typing.ArrayLike,
    axis: _reduce.Axis = None,
    dtype: jax.typing.DTypeLike | None = None,
    out: None = None,
    ddof: int = 0,
    keepdims: bool = False,
    *,
    where: jax.typing.ArrayLike | None = None,
    mean: jax.typing.ArrayLike | None = None,
    correction: int | float | None = None,
    batch_invariant: bool = False,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """Variance over one or more axes; drop-in for `jnp.var`.

    A kernel reads the array once, and is as accurate as a computation that reads it twice, for the
    mean and then for the squared differences. The same input gives the same bits in every run.

    Args:
      a: an array of any shape. The kernels support float16, bfloat16, float32 and float64; they
        compute 16-bit floats in float32. XLA computes other dtypes.
      axis: the axis or axes to reduce; None means all axes. An axis other than the last is read in
        place, without a transpose in memory.
      dtype: the dtype of the result; None means the dtype of `a`, or for integers the default
        float. float32 for an array of 16-bit floats costs no conversion.
      out: unused, as in JAX.
      ddof: the sum of squares is divided by the number of elements minus `ddof`.
      keepdims: True to keep the reduced axes with size 1.
      where: a boolean array that broadcasts to `a`: the elements to include.
      mean: the mean, if it is known. XLA computes these calls.
      correction: an alternative to `ddof`. The kernels support a number, XLA also an array.
      batch_invariant: as for `sum`.
      implementation: None for the fastest known on the platform, "cuda", "interpret" (the same
        kernels on the host) or "xla".
      algorithm: None to let the plan choose, or a name from `jax_gpuops.algorithms("reduce")` whose
        limits allow it.

    Returns:
      An array of the shape of `a` without the reduced axes.

    Raises:
      TypeError: if an argument has a type that is not accepted, or if a kernel was requested that
        does not support the dtype.
      ValueError: if `axis` is out of range, if both `ddof` and `correction` are given, if
        `implementation` or `algorithm` is unknown, does not support the problem or cannot run on
        the platform. A `batch_invariant` call requests a kernel, and takes no `algorithm`.
      NotImplementedError: if `out` is not None.
    """
    return _call(
        "var",
        a,
        axis,
        batch_invariant,
        implementation,
        algorithm,
        dtype=dtype,
        out=out,
        keepdims=keepdims,
        where=where,
        mean=mean,
        ddof=ddof,
        correction=correction,
    )


def std(
    a: jax.typing.ArrayLike,
    axis: _reduce.Axis = None,
    dtype: jax.typing.DTypeLike | None = None,
    out: None = None,
    ddof: int = 0,
    keepdims: bool = False,
    *,
    where: jax.typing.ArrayLike | None = None,
    mean: jax.typing.ArrayLike | None = None,
    correction: int | float | None = None,
    batch_invariant: bool = False,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """Standard deviation over one or more axes: the root of `var`; drop-in for `jnp.std`.

    The arguments are those of `jnp.std`; limits and errors are those of `var`.
    """
    return _call(
        "std",
        a,
        axis,
        batch_invariant,
        implementation,
        algorithm,
        dtype=dtype,
        out=out,
        keepdims=keepdims,
        where=where,
        mean=mean,
        ddof=ddof,
        correction=correction,
    )


def mean_and_var(
    a: jax.typing.ArrayLike,
    axis: _reduce.Axis = None,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    correction: int | float = 0,
    keepdims: bool = False,
    where: jax.typing.ArrayLike | None = None,
    batch_invariant: bool = False,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Mean and variance over one or more axes, from one read of the array.

    It is `(jnp.mean(a, ...), jnp.var(a, ...))` with the same arguments. For a normalisation layer
    of 16-bit floats, `dtype=jnp.float32` returns the statistics without rounding to 16 bits.

    Args:
      a: as in `var`.
      axis: the axis or axes to reduce; None means all axes.
      dtype: the dtype of both results, as in `var`.
      correction: the sum of squares is divided by the number of elements minus this.
      keepdims: True to keep the reduced axes with size 1.
      where: a boolean array that broadcasts to `a`: the elements to include.
      batch_invariant: as in `var`.
      implementation: as in `var`.
      algorithm: as in `var`.

    Returns:
      The mean and the variance, each of the shape of `a` without the reduced axes.

    Raises:
      TypeError: as `var` does.
      ValueError: as `var` does.
    """
    return _call(
        "mean_and_var",
        a,
        axis,
        batch_invariant,
        implementation,
        algorithm,
        dtype=dtype,
        keepdims=keepdims,
        where=where,
        correction=correction,
    )


# From a call to the primitive


def _call(
    name, a, axis, batch_invariant, implementation, algorithm, *, out=None, **arguments
) -> Any:
    a = _arguments.as_array("a", a)
    chosen, algorithm = resolve_invariant("reduce", batch_invariant, implementation, algorithm)
    operands = {
        key: _arguments.as_array(key, value)
        for key, value in arguments.items()
        if key in ("where", "mean") and value is not None
    }
    static = {key: value for key, value in arguments.items() if key not in ("where", "mean")}
    for key in ("ddof", "correction"):
        value = static.get(key, 0)
        if value is None and key == "correction":
            continue
        if not _arguments.is_real(value):
            operands[key] = _arguments.as_array(key, static.pop(key), "a number or an array")
        elif not isinstance(value, int | float):
            static[key] = float(value)
    if out is not None:  # upstream raises an error
        return _UPSTREAM[name](a, axis, out=out, **operands, **static)
    return _JITTED[name](
        a,
        operands,
        axis=_arguments.static_axis(axis),
        arguments=tuple(static.items()),
        implementation=chosen,
        algorithm=algorithm,
    )


def _apply(name, a, operands, *, axis, arguments, implementation, algorithm):
    axes = _arguments.canonical_axes(axis, a.ndim)
    keywords = dict(arguments)
    upstream = functools.partial(_UPSTREAM[name], axis=axis, **keywords)
    # Upstream's abstract evaluation gives the results' type and raises upstream's errors.
    result = jax.tree.leaves(jax.eval_shape(upstream, a, **operands))[-1]

    def kernel():
        # Upstream computes in a given integer dtype, but returns floats, so that NaN is possible.
        named = keywords["dtype"]
        for dtype in (a.dtype, result.dtype if named is None else jnp.dtype(named)):
            if dtype.name not in _reduce.FLOATS:
                floats = ", ".join(_reduce.FLOATS)
                raise NoKernelError(
                    f"kernels do not support dtype {dtype}, only {floats}", TypeError
                )
        if "mean" in operands:
            raise NoKernelError("mean is given, but kernels compute it themselves")
        for key in ("ddof", "correction"):
            if key in operands:
                raise NoKernelError(
                    f"{key} is an array, but kernels require a number that is known when the "
                    "program is traced",
                    TypeError,
                )
        _rowwise.check_unsharded("a", a, axes)
        where = operands.get("where")
        masks = [] if where is None else [_arguments.with_rank(where, a.ndim)]
        correction = keywords["correction"]
        if correction is None:
            correction = keywords.get("ddof", 0)
        is_narrow = result.dtype == a.dtype and name != "std"  # the root is taken before rounding
        computed = result.dtype if is_narrow else _primitive.accumulator(result.dtype)
        x, rows_axes = a, axes
        if algorithm == BATCH_INVARIANT:
            x, masks, axis = _reduce.in_packs("mean_and_var", a, masks, axes=axes, dtype=computed)
            rows_axes = (axis,)
        results = _rowwise.bind(
            _MEAN_AND_VAR if name == "mean_and_var" else _VAR,
            x,
            *masks,
            axes=rows_axes,
            dtype=computed,
            correction=float(correction),
            in_runs=_is_in_runs(x, masks, rows_axes, algorithm),
            implementation=implementation,
            algorithm=algorithm,
        )
        if name == "std":
            results = jnp.sqrt(results)
        if keywords["keepdims"]:
            results = jax.tree.map(lambda y: jnp.expand_dims(y, axes), results)
        results = jax.tree.map(lambda y: y.astype(result.dtype), results)
        return tuple(results) if name == "mean_and_var" else results

    def xla():
        return upstream(a, **operands)

    described = [a, *operands.values()]
    if a.size == 0 or a.ndim == 0 or axis == ():
        return left_to_xla(name, described, "there is nothing to reduce", xla)
    return dispatch(name, described, implementation, algorithm, kernel, xla)


def _is_in_runs(x, masks, axes: _rowwise.Axes, algorithm: str | None) -> bool:
    """True for axes that are not adjacent, if a kernel is to reduce one run without a copy."""
    return (
        not _rowwise.Rows(x.shape, axes).is_in_place
        and not masks
        and algorithm is None
        and _primitive.has_constant_shape(x)
    )


def _mean_and_var(a, axis=None, dtype=None, *, correction=0, keepdims=False, where=None):
    """The formula as users write it: XLA reads the array for the mean, then for the variance."""
    result = jax.eval_shape(functools.partial(jnp.mean, dtype=dtype), a).dtype
    mean = jnp.mean(a, axis, dtype=_primitive.accumulator(result), keepdims=True, where=where)
    variance = jnp.var(  # type: ignore[call-arg]  # the stubs of JAX lack `mean`
        a,
        axis,
        dtype=dtype,
        keepdims=keepdims,
        where=where,
        mean=mean,
        correction=correction,
    )
    return (mean if keepdims else jnp.squeeze(mean, axis)).astype(result), variance


_UPSTREAM: dict[str, Callable[..., Any]] = {
    "var": jnp.var,
    "std": jnp.std,
    "mean_and_var": _mean_and_var,
}
_JITTED = {
    name: _primitive.jit(
        name,
        functools.partial(_apply, name),
        *("axis", "arguments", "implementation", "algorithm"),
    )
    for name in _UPSTREAM
}


# The primitives map an array and an optional mask to the mean and the variance of each row in
# `dtype`, or to the variance alone, for which XLA may need fewer passes. With `in_runs` a kernel
# reduces the longest run of adjacent axes, and XLA the few remaining moments.


def _reference(
    x, *where, axes: _rowwise.Axes, dtype, correction: float, in_runs: bool
) -> list[jax.Array]:
    del in_runs
    results = _mean_and_var(
        x.astype(_primitive.accumulator(dtype)),
        axes,
        correction=correction,
        where=where[0] if where else None,
    )
    return [y.astype(dtype) for y in results]


def _reference_of_variance(
    x, *where, axes: _rowwise.Axes, dtype, correction: float, in_runs: bool
) -> jax.Array:
    del in_runs
    x = x.astype(_primitive.accumulator(dtype))
    mask = where[0] if where else None
    return jnp.var(x, axes, correction=correction, where=mask).astype(dtype)


def _problem_of_variance(x, *where, **params: Any) -> dict[str, Any]:
    return _problem(x, *where, **params) | {"var": 1}


def _problem(
    x, *where, axes: _rowwise.Axes, dtype, correction: float, in_runs: bool
) -> dict[str, Any]:
    del correction
    if not in_runs:
        return _reduce.problem_of("mean_and_var", x, *where, axes=axes, dtype=dtype)
    runs = _rowwise.Rows(x.shape, axes).runs
    computed = np.dtype(_primitive.accumulator(dtype))
    problem = _reduce.problem_of("mean_and_var", x, *where, axes=runs[0], dtype=computed)
    return problem | {"runs": len(runs)}


def _custom_call(
    launch: _primitive.Launch,
    x,
    *where,
    axes: _rowwise.Axes,
    dtype,
    correction: float,
    in_runs: bool,
) -> list[jax.Array]:
    problem = _problem(x, *where, axes=axes, dtype=dtype, correction=correction, in_runs=in_runs)
    if in_runs:
        return _call_for_runs(launch, x, problem, axes=axes, dtype=dtype, correction=correction)
    return _rowwise.call(
        launch,
        "jax_gpuops_mean_and_var_v1",
        [x.astype(problem["dtype"]), *where],
        axes=axes,
        workspace_bytes=_reduce.workspace_bytes(launch, problem),
        correction=np.float64(correction),
    )


def _custom_call_for_variance(launch: _primitive.Launch, x, *where, **params: Any) -> jax.Array:
    both = dataclasses.replace(launch, results=launch.results * 2)
    _, variance = _custom_call(both, x, *where, **params)
    return variance


def _call_for_runs(
    launch: _primitive.Launch, x, problem, *, axes: _rowwise.Axes, dtype, correction: float
) -> list[jax.Array]:
    run = _rowwise.Rows(x.shape, axes).runs[0]
    left = [d for d in range(x.ndim) if d not in run]
    moments = jax.ShapeDtypeStruct([x.shape[d] for d in left], np.dtype(problem["result"]))
    mean, variance, low = _rowwise.call(
        dataclasses.replace(launch, results=(moments,) * 3),
        "jax_gpuops_moments_v1",
        [x.astype(problem["dtype"])],
        axes=run,
        workspace_bytes=_reduce.workspace_bytes(launch, problem),
    )
    rest = tuple(i for i, d in enumerate(left) if d in axes)
    count = math.prod(x.shape[d] for d in run)
    merged = _merged(mean, variance, low, rest, count, correction)
    return [y.astype(dtype) for y in merged]


def _merged(mean, variance, low, axes: _rowwise.Axes, count: int, correction: float):
    """Merges the moments of several rows into the mean and the variance of all their elements.

    Args:
      mean: the mean of each row.
      variance: the variance of each row: its sum of squares divided by `count`.
      low: the low part of the mean, which was lost in rounding.
      axes: the axes along which rows are merged.
      count: the number of elements of a row.
      correction: as in `mean_and_var`.
    """
    origin = mean
    for axis in axes:
        origin = jax.lax.index_in_dim(origin, 0, axis)
    distance = (mean - origin) + low
    step = jnp.mean(distance, axes, keepdims=True)
    rows = math.prod(mean.shape[axis] for axis in axes)
    squares = count * jnp.sum(variance + jnp.square(distance - step), axes)
    divisor = rows * count - correction
    step, origin = jnp.squeeze(step, axes), jnp.squeeze(origin, axes)
    # The mean if elements are infinite, or so far apart that their squares overflow.
    mean_if_far = jnp.sum(mean / rows, axes)
    far = jnp.where(jnp.isfinite(mean_if_far), jnp.inf, jnp.nan)
    is_near = jnp.isfinite(step)
    total = jnp.where(is_near, origin + step, mean_if_far)
    divided = squares / divisor if divisor > 0 else jnp.full_like(squares, jnp.nan)
    return total, jnp.where(is_near, divided, far.astype(squares.dtype))


def _make(kernel: _primitive.Kernel) -> Primitive:
    p = _primitive.primitive(kernel)
    _rowwise.define_batching(p)
    return p


_MEAN_AND_VAR = _make(
    _primitive.Kernel(
        name="gpuops_mean_and_var",
        op="reduce",
        reference=_reference,
        problem=_problem,
        call=_custom_call,
        partitionable=True,
        multiple_results=True,
    )
)
_VAR = _make(
    _primitive.Kernel(
        name="gpuops_var",
        op="reduce",
        reference=_reference_of_variance,
        problem=_problem_of_variance,
        call=_custom_call_for_variance,
        partitionable=True,
    )
)
for target in ("jax_gpuops_mean_and_var_v1", "jax_gpuops_moments_v1"):
    jax.ffi.register_ffi_target_as_batch_partitionable(target)


# Derivatives, in JAX's operations. The tangent of the variance has no term with the tangent of the
# mean, since its factor is the sum of the differences from the mean, which is 0.


def _jvp(primals, tangents, *, axes: _rowwise.Axes, dtype, correction, in_runs, **how):
    (x, *where), (t, *_) = primals, tangents
    bind = functools.partial(
        _MEAN_AND_VAR.bind, x, *where, axes=axes, correction=correction, in_runs=in_runs, **how
    )
    if type(t) is ad.Zero:
        results = bind(dtype=dtype)
        return results, [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in results]
    computed = _primitive.accumulator(dtype)
    mean, variance = bind(dtype=computed)

    def included(y):
        return jnp.where(where[0], y, jnp.zeros((), y.dtype)) if where else y

    t = included(t.astype(computed))
    difference = included(x.astype(computed) - jnp.expand_dims(mean, axes))
    count = _reduce.count(x, axes, where, computed)
    divisor = count - correction
    mean_t = _reduce.quotient(jnp.sum(t, axes), count, how["algorithm"])
    squares_t = 2 * jnp.sum(difference * t, axes)
    variance_t = _reduce.quotient(squares_t, divisor, how["algorithm"])
    variance_t = jnp.where(divisor > 0, variance_t, jnp.zeros((), computed))
    return (
        [mean.astype(dtype), variance.astype(dtype)],
        [mean_t.astype(dtype), variance_t.astype(dtype)],
    )


def _jvp_of_variance(primals, tangents, **params):
    if type(tangents[0]) is ad.Zero:
        y = _VAR.bind(*primals, **params)
        return y, ad.Zero(jax.typeof(y).to_tangent_aval())
    (_, y), (_, t) = _jvp(primals, tangents, **params)
    return y, t


ad.primitive_jvps[_MEAN_AND_VAR] = _jvp
ad.primitive_jvps[_VAR] = _jvp_of_variance
