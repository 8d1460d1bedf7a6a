"""softmax, log_softmax and logsumexp."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_gpuops import _arguments, _primitive, _rowwise
from jax_gpuops._implementation import BATCH_INVARIANT, NoKernelError, dispatch, resolve_invariant
from jax_gpuops._report import left_to_xla

Axis = int | Sequence[int] | None

DTYPES = ("float16", "bfloat16", "float32", "float64")

_UPSTREAM: dict[str, Callable[..., Any]] = {
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "logsumexp": jax.nn.logsumexp,
}


def softmax(
    x: jax.typing.ArrayLike,
    axis: Axis = -1,
    where: jax.typing.ArrayLike | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    batch_invariant: bool = False,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """Softmax over one or more axes; drop-in for `jax.nn.softmax`.

    Computes `exp(z - max(z)) / sum(exp(z - max(z)))` for `z = scale * x`. As in JAX, a row whose
    elements are all -inf, or that contains +inf or NaN, gives NaN. Masked elements are ignored and
    give 0; a fully masked row gives 0.

    Args:
      x: an array of any shape. The kernels support float16, bfloat16, float32 and float64; 16-bit
        floats are computed in float32.
      axis: the axis or axes to normalise over; None means all axes. An axis other than the last is
        read in place, without a transpose in memory.
      where: a boolean array that broadcasts to `x`: the elements to include. The kernels read it
        without expanding it in memory. In a program that XLA partitions across devices it is
        expanded to the shape of `x`, except along `axis`.
      scale: a Python number of any sign that multiplies `x` first. The product of 16-bit floats is
        not rounded to 16 bits.
      causal: True to include only the elements (i, j) of the last two dims with j <= i that `where`
        includes. The kernels do not read the others.
      batch_invariant: True for rows that have the same bits whatever the number of rows, the other
        rows, the axis and `vmap` are. Rows whose length is not a multiple of 16 bytes are padded,
        and rows along an axis other than the last are transposed.
      implementation: None for the fastest known on the platform, "cuda", "interpret" (the same
        kernels on the host) or "xla".
      algorithm: None to let the plan choose, or a name from `jax_gpuops.algorithms("softmax")`,
        which lists the limits of each. Derivatives choose their own algorithm.

    Returns:
      An array of the shape and dtype of `x`.

    Raises:
      TypeError: if an argument has a type that is not accepted, such as an array for `scale`, or if
        a kernel was requested that does not support the dtype.
      ValueError: if `axis` is out of range, if `where` is not boolean, if `scale` is not finite, if
        `causal` is True and `axis` is not the last of at least two, if `implementation` or
        `algorithm` is unknown, does not support the problem or cannot run on the platform. A
        `batch_invariant` call requests a kernel, and takes no `algorithm`.
    """
    how = (batch_invariant, implementation, algorithm)
    return _call("softmax", "x", x, axis, where, scale, causal, *how)


def log_softmax(
    x: jax.typing.ArrayLike,
    axis: Axis = -1,
    where: jax.typing.ArrayLike | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    batch_invariant: bool = False,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """Logarithm of softmax, without forming softmax; drop-in for `jax.nn.log_softmax`.

    Computes `z - max(z) - log(sum(exp(z - max(z))))` for `z = scale * x`. Masked elements are
    ignored and give -inf.

    Args:
      x: an array of any shape, dtypes as for `softmax`.
      axis: the axis or axes to normalise over; None means all axes.
      where: as for `softmax`.
      scale: as for `softmax`.
      causal: as for `softmax`.
      batch_invariant: as for `softmax`.
      implementation: as for `softmax`.
      algorithm: as for `softmax`.

    Returns:
      An array of the shape and dtype of `x`.

    Raises:
      TypeError: as `softmax` does.
      ValueError: as `softmax` does.
    """
    how = (batch_invariant, implementation, algorithm)
    return _call("log_softmax", "x", x, axis, where, scale, causal, *how)


@overload
def logsumexp(
    a: jax.typing.ArrayLike,
    axis: Axis = ...,
    b: jax.typing.ArrayLike | None = ...,
    keepdims: bool = ...,
    return_sign: Literal[False] = ...,
    where: jax.typing.ArrayLike | None = ...,
    *,
    scale: float = ...,
    causal: bool = ...,
    batch_invariant: bool = ...,
    implementation: str | None = ...,
    algorithm: str | None = ...,
) -> jax.Array: ...


@overload
def logsumexp(
    a: jax.typing.ArrayLike,
    axis: Axis = ...,
    b: jax.typing.ArrayLike | None = ...,
    keepdims: bool = ...,
    *,
    return_sign: Literal[True],
    where: jax.typing.ArrayLike | None = ...,
    scale: float = ...,
    causal: bool = ...,
    batch_invariant: bool = ...,
    implementation: str | None = ...,
    algorithm: str | None = ...,
) -> tuple[jax.Array, jax.Array]: ...


@overload
def logsumexp(
    a: jax.typing.ArrayLike,
    axis: Axis = ...,
    b: jax.typing.ArrayLike | None = ...,
    keepdims: bool = ...,
    return_sign: bool = ...,
    where: jax.typing.ArrayLike | None = ...,
    *,
    scale: float = ...,
    causal: bool = ...,
    batch_invariant: bool = ...,
    implementation: str | None = ...,
    algorithm: str | None = ...,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def logsumexp(
    a: jax.typing.ArrayLike,
    axis: Axis = None,
    b: jax.typing.ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: jax.typing.ArrayLike | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    batch_invariant: bool = False,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Logarithm of the sum of exponentials of `scale * a`; drop-in for `jax.nn.logsumexp`.

    A fully masked row gives -inf.

    Args:
      a: an array of any shape, dtypes as for `softmax`.
      axis: the axis or axes to sum over; None means all axes.
      b: factors of the exponentials. The kernels do not support it; XLA computes this case.
      keepdims: True to keep the reduced axes with size 1.
      return_sign: True to also return the sign of the sum. XLA computes this case, too.
      where: as for `softmax`.
      scale: as for `softmax`.
      causal: as for `softmax`.
      batch_invariant: as for `softmax`.
      implementation: as for `softmax`.
      algorithm: as for `softmax`.

    Returns:
      The result in the dtype of `a`, or with `return_sign` the pair (result, sign).

    Raises:
      TypeError: as `softmax` does.
      ValueError: as `softmax` does; also if a kernel is requested, or `scale` or `causal` is
        given, together with `b` or `return_sign`.
    """
    a = _arguments.as_array("a", a)
    axis = _arguments.static_axis(axis)
    axes = _arguments.canonical_axes(axis, jnp.ndim(a))
    if b is not None or return_sign:
        b = None if b is None else _arguments.as_array("b", b)
        where = _arguments.as_mask(where)
        if _factor("a", scale) != 1 or _arguments.flag("causal", causal):
            raise ValueError("scale and causal cannot be combined with b or return_sign")
        chosen, algorithm = resolve_invariant("softmax", batch_invariant, implementation, algorithm)
        return dispatch(
            "logsumexp",
            [a],
            chosen,
            algorithm,
            _refuse_factors_and_sign,
            lambda: jax.nn.logsumexp(a, axis, b, keepdims, return_sign, where),
        )
    how = (batch_invariant, implementation, algorithm)
    result = _call("logsumexp", "a", a, axis, where, scale, causal, *how)
    return jnp.expand_dims(result, axes) if keepdims else result


# From a call to a primitive


def _refuse_factors_and_sign():
    raise NoKernelError("logsumexp kernels do not support b or return_sign")


def _call(
    name, argument, x, axis, where, scale, causal, batch_invariant, implementation, algorithm
) -> jax.Array:
    x = _arguments.as_array(argument, x)
    axis = _arguments.static_axis(axis)
    axes = _arguments.canonical_axes(axis, jnp.ndim(x))
    where = _arguments.as_mask(where)
    scale = _factor(argument, scale)
    causal = _arguments.flag("causal", causal)
    if causal and (jnp.ndim(x) < 2 or axes != (jnp.ndim(x) - 1,)):
        raise ValueError(
            f"causal=True needs an array of at least two dims and its last axis, got axis={axis!r} "
            f"and {argument} of shape {jnp.shape(x)}"
        )
    chosen, algorithm = resolve_invariant("softmax", batch_invariant, implementation, algorithm)
    return _JITTED[name](
        x,
        where,
        axis=axis,
        scale=scale,
        causal=causal,
        implementation=chosen,
        algorithm=algorithm,
    )


def _factor(argument: str, scale: float) -> float:
    scale = _arguments.factor("scale", scale, f"multiply {argument} by it")
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    return scale


def _apply(name, x, where, *, axis, scale, causal, implementation, algorithm):
    axes = _arguments.canonical_axes(axis, x.ndim)
    masks = [] if where is None else [_arguments.with_rank(where, x.ndim)]

    def xla():
        y = _reference(name, x, *masks, axes=axis, scale=scale, causal=causal)
        mask = kept(x, *masks, causal=causal)
        return y if mask is None or name == "logsumexp" else _constant_where_masked(y, mask)

    def kernel():
        check_dtype(x)
        limits = jnp.finfo(_primitive.accumulator(x.dtype))
        largest = float(limits.max) / 4
        if abs(scale) > largest:  # kernels multiply it by log2(e), and take its reciprocal
            raise NoKernelError(f"abs(scale) must be at most {largest:.3}, got scale {scale}")
        if len(axes) > 1 or algorithm == BATCH_INVARIANT:  # the rows are reshaped
            _rowwise.check_unsharded("a" if name == "logsumexp" else "x", x, axes)
        # Kernels read -inf in place of excluded elements, and 0 * -inf is NaN.
        is_zero = np.asarray(scale, limits.dtype) == 0
        smallest = float(limits.tiny)
        if not is_zero and abs(scale) < smallest:  # CPUs may flush such a scale to 0
            raise NoKernelError(
                f"abs(scale) must be 0 or at least {smallest:.3}, got scale {scale}"
            )
        bind = functools.partial(
            _rowwise.bind,
            _PRIMITIVES[name],
            scale=1.0 if is_zero else scale,
            causal=causal,
            implementation=implementation,
            algorithm=algorithm,
        )
        operand = x * 0 if is_zero else x
        if algorithm != BATCH_INVARIANT:
            return bind(operand, *masks, axes=axes)
        rows = _rowwise.Rows(x.shape, axes)
        nothing = math.inf if scale < 0 else -math.inf
        operand, packed_masks = _rowwise.in_packs(rows, operand, masks, nothing)
        y = bind(operand, *packed_masks, axes=(operand.ndim - 1,))
        return y if name == "logsumexp" else rows.undo(y[..., : rows.columns])

    operands = [x, *masks]
    if x.size == 0 or not axes:
        return left_to_xla(name, operands, "there is nothing to normalize", xla)
    return dispatch(name, operands, implementation, algorithm, kernel, xla)


_JITTED = {
    name: _primitive.jit(
        name,
        functools.partial(_apply, name),
        *("axis", "scale", "causal", "implementation", "algorithm"),
    )
    for name in _UPSTREAM
}


def check_dtype(x: jax.Array) -> None:
    """Raises NoKernelError for a dtype that the kernels of softmax do not take."""
    if x.dtype.name not in DTYPES:
        raise NoKernelError(
            f"kernels do not support dtype {x.dtype}, only {', '.join(DTYPES)}", TypeError
        )


# Functions for the references


def kept(x: jax.Array, *where: jax.Array, causal: bool) -> jax.Array | None:
    """The mask of the included elements of `x`, which broadcasts to it, or None for all."""
    masks = list(where)
    if causal:
        shape = (1,) * (x.ndim - 2) + x.shape[-2:]
        query, key = (jax.lax.broadcasted_iota(np.int32, shape, x.ndim - d) for d in (2, 1))
        masks.append(key <= query)
    return functools.reduce(jnp.logical_and, masks) if masks else None


def scaled(x: jax.Array, scale: float) -> jax.Array:
    """`scale * x`, in the dtype that kernels compute in unless the dtype of `x` is as exact.

    It is for a scale that is a power of two below 1: only subnormal numbers are rounded, which does
    not change softmax. XLA's softmax of bfloat16 takes up to 1.6 times as long in float32.
    """
    if scale == 1:
        return x
    is_exact = x.dtype.name in DTYPES and abs(scale) < 1 and math.frexp(abs(scale))[0] == 0.5
    return (x if is_exact else wide(x)) * scale


def wide(x: jax.Array) -> jax.Array:
    """`x` in the dtype that kernels compute in."""
    return x.astype(_primitive.accumulator(x.dtype))


def select(mask: jax.Array | None, x: jax.Array, otherwise: float) -> jax.Array:
    """`x` where the mask is None or True."""
    return x if mask is None else jnp.where(mask, x, otherwise)


@jax.custom_jvp
def _constant_where_masked(y: jax.Array, mask: jax.Array) -> jax.Array:
    """`y` with masked elements that are constants: their tangents and cotangents are 0.

    In log_softmax they are -inf minus the logarithm of the sum, and would have the derivatives of
    the sum. A selection of -inf would prevent that too, but take time where nothing is
    differentiated.
    """
    del mask
    return y


@_constant_where_masked.defjvp
def _constant_where_masked_jvp(primals, tangents):
    (_, mask), (t, _) = primals, tangents
    return _constant_where_masked(*primals), select(mask, t, 0)


def included(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """`x` with -inf where masked, which has no effect on a maximum or a sum of exponentials.

    On a GPU, XLA computes the softmax of this in one kernel. With the mask as `where`, the terms of
    the sum would differ from those that are divided by it, which takes a second kernel.
    """
    return select(mask, x, -jnp.inf)


def logsumexp_parts(
    x: jax.Array, mask: jax.Array | None, *, axes: Axis, scale: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """The two parts of `logsumexp(scale * x)`, from which gradients are computed.

    Their sum would be less accurate than the second part if the first is large. The maximum is
    subtracted from `x` before the multiplication by the scale, so no rounded products cancel.

    Returns:
      The maximum of each row, or its minimum if the scale is negative; as in JAX, it is 0 if its
      product with the scale is not finite. And the logarithm of the sum of
      `exp(scale * (x - maximum))`.
    """
    lowest = math.copysign(math.inf, -scale)
    kept_x = select(mask, wide(x), lowest)
    extremum = (jnp.max if scale > 0 else jnp.min)(kept_x, axes, keepdims=True, initial=lowest)
    extremum = jax.lax.stop_gradient(extremum)
    maximum = jnp.where(jnp.isfinite(scaled(extremum, scale)), extremum, 0)
    log_sum = jnp.log(jnp.sum(jnp.exp(scaled(kept_x - maximum, scale)), axes))
    return jnp.squeeze(maximum, axes), log_sum


def weights(
    x: jax.Array,
    maximum: jax.Array,
    log_sum: jax.Array,
    mask: jax.Array | None,
    *,
    axes: _rowwise.Axes,
    scale: float = 1.0,
) -> jax.Array:
    """`exp(scale * (x - maximum) - log_sum)`: softmax, and 0 where the mask is False.

    In a row whose elements are all -inf it is NaN, like JAX's gradient of logsumexp.
    """
    shifted = scaled(wide(x) - jnp.expand_dims(maximum, axes), scale)
    return jnp.exp(select(mask, shifted - jnp.expand_dims(log_sum, axes), -jnp.inf))


# Replaces symbolic sizes of exported programs: few rows, longer than any memory holds.
_UNKNOWN = {"outer": 1, "inner": 1, "columns": 2**40, "queries": 1}


def _workspace_bytes(launch: _primitive.Launch, problem: dict[str, Any]) -> int:
    """The workspace per row, which suffices for all values of symbolic sizes."""
    known = {k: v if isinstance(v, int | str) else _UNKNOWN[k] for k, v in problem.items()}
    most = launch.workspace_bytes("softmax", known)
    if isinstance(problem["inner"], int) or launch.algorithm not in (None, "column_split"):
        return most
    # The fewer elements follow the axis, the more blocks share it.
    split = dataclasses.replace(launch, algorithm="column_split")
    return max(most, split.workspace_bytes("softmax", known | {"inner": 2}))


def make_primitive(
    function: str,
    reference: Callable[..., Any],
    *,
    name: str | None = None,
    version: int = 1,
    has_workspace: bool = True,
    aliases: tuple[tuple[int, int], ...] = (),
    multiple_results: bool = False,
) -> Primitive:
    """Makes the primitive of a kernel of ffi/softmax, with everything but its derivatives.

    Args:
      function: the name of the function in problems.
      reference: as in `_primitive.Kernel`.
      name: the name of the primitive and of the FFI target; None for that of the function.
      version: the version of the FFI target.
      has_workspace: True if the kernels take workspace.
      aliases: as in `_primitive.Launch.custom_call`.
      multiple_results: as in `_primitive.Kernel`.
    """
    name = name or function
    target = f"jax_gpuops_{name}_v{version}"

    def problem(x, *others, axes, scale=1.0, causal=False) -> dict[str, Any]:
        rows = _rowwise.Rows(x.shape, axes)
        return {
            "function": function,
            "dtype": x.dtype.name,
            **rows.sizes(),
            "masked": int(_rowwise.has_mask([x, *others])),
            "queries": x.shape[-2] if causal else 0,
            "scaled": int(scale != 1),
            "alignment": _primitive.ALIGNMENT,
            "copied": int(not rows.is_in_place),
        }

    def call(launch, *operands, axes, scale=1.0, causal=False):
        workspace_bytes = None
        if has_workspace:
            described = problem(*operands, axes=axes, scale=scale, causal=causal)
            workspace_bytes = _workspace_bytes(launch, described)
        results = _rowwise.call(
            launch,
            target,
            operands,
            axes=axes,
            row_dims=2 if causal else 1,
            workspace_bytes=workspace_bytes,
            aliases=aliases,
            scale=np.float64(scale),
            causal=np.bool_(causal),
        )
        return results if multiple_results else results[0]

    jax.ffi.register_ffi_target_as_batch_partitionable(target)
    kernel = _primitive.Kernel(
        name=f"gpuops_{name}",
        op="softmax",
        reference=reference,
        problem=problem,
        call=call,
        partitionable=True,
        multiple_results=multiple_results,
    )
    p = _primitive.primitive(kernel)
    _rowwise.define_batching(p)
    return p


def make_primitive_without_kernel(function: str, reference: Callable[..., Any]) -> Primitive:
    """Makes a primitive that XLA always computes, with the same operands and parameters."""
    p = _primitive.primitive_without_kernel(f"gpuops_{function}", reference)
    _rowwise.define_batching(p)
    return p


# The primitives. y is the forward result, maximum and log_sum are the two parts of logsumexp, g is
# its cotangent; t is the operand's tangent.


def _is_small(mask: jax.Array, x: jax.Array) -> bool:
    """True for a mask that many rows share, such as a mask of columns.

    XLA selects by such a mask in less time than it takes to find the rows that are not fully
    masked. With such a mask, softmax of 16-bit floats is also faster in float32.
    """
    return _primitive.has_constant_shape(x) and 8 * mask.size <= x.size


def _reference(function: str, x, *where, axes: Axis, scale: float, causal: bool) -> jax.Array:
    mask = kept(x, *where, causal=causal)
    upstream = functools.partial(_UPSTREAM[function], axis=axes)
    is_small = mask is not None and not causal and _is_small(mask, x)
    z = scaled(wide(x) if is_small else x, scale)
    if x.dtype.name in DTYPES:
        y = upstream(included(z, mask))
        if where and function != "logsumexp":  # a fully masked row is NaN
            counts = mask if is_small else jnp.any(jnp.asarray(mask), axes, keepdims=True)
            y = select(counts, y, 0 if function == "softmax" else -jnp.inf)
    else:  # other dtypes may have no -inf
        y = upstream(z, where=mask)
    is_narrow = _primitive.accumulator(x.dtype) != x.dtype
    return y.astype(x.dtype) if is_narrow else y


def _logsumexp(x, *where, **params):
    return _reference("logsumexp", wide(x), *where, **params).astype(x.dtype)


def _logsumexp_with_residuals(x, *where, axes, scale, causal):
    """logsumexp, and its two parts in the dtype that kernels compute in."""
    mask = kept(x, *where, causal=causal)
    maximum, log_sum = logsumexp_parts(x, mask, axes=axes, scale=scale)
    return [(scaled(maximum, scale) + log_sum).astype(x.dtype), maximum, log_sum]


def _softmax_tangent(y, t, *where, axes, scale, causal):
    """`scale * y * (t - sum(y * t))`; the map is symmetric, so it is its own transpose."""
    mask = kept(y, *where, causal=causal)
    wide_y, wide_t = wide(y), wide(select(mask, t, 0))
    total = jnp.sum(wide_y * wide_t, axes, keepdims=True)
    return select(mask, scale * wide_y * (wide_t - total), 0).astype(y.dtype)


def _log_softmax_tangent(y, t, *where, axes, scale, causal):
    """`scale * (t - sum(exp(y) * t))`."""
    mask = kept(y, *where, causal=causal)
    wide_y, wide_t = wide(y), wide(select(mask, t, 0))
    total = jnp.sum(jnp.exp(wide_y) * wide_t, axes, keepdims=True)
    return select(mask, scale * (wide_t - total), 0).astype(y.dtype)


def _log_softmax_cotangent(y, ct, *where, axes, scale, causal):
    """`scale * (ct - exp(y) * sum(ct))`, the transpose of the tangent."""
    mask = kept(y, *where, causal=causal)
    wide_y, wide_ct = wide(y), wide(select(mask, ct, 0))
    total = jnp.sum(wide_ct, axes, keepdims=True)
    return select(mask, scale * (wide_ct - jnp.exp(wide_y) * total), 0).astype(y.dtype)


def _logsumexp_tangent(x, maximum, log_sum, t, *where, axes, scale, causal):
    """`scale * sum(weights * t)`."""
    mask = kept(x, *where, causal=causal)
    terms = weights(x, maximum, log_sum, mask, axes=axes, scale=scale)
    return scale * jnp.sum(terms * wide(select(mask, t, 0)), axes)


def _logsumexp_cotangent(x, maximum, log_sum, g, *where, axes, scale, causal):
    """`scale * weights * g`, the transpose of the tangent."""
    mask = kept(x, *where, causal=causal)
    terms = weights(x, maximum, log_sum, mask, axes=axes, scale=scale) * jnp.expand_dims(g, axes)
    return select(mask, scale * terms, 0).astype(x.dtype)


_PRIMITIVES = {
    "softmax": make_primitive("softmax", functools.partial(_reference, "softmax")),
    "log_softmax": make_primitive("log_softmax", functools.partial(_reference, "log_softmax")),
    "logsumexp": make_primitive("logsumexp", _logsumexp),
}
_logsumexp_with_residuals_p = make_primitive(
    "logsumexp",
    _logsumexp_with_residuals,
    name="logsumexp_with_residuals",
    multiple_results=True,
)
_softmax_tangent_p = make_primitive("softmax_tangent", _softmax_tangent)
_log_softmax_tangent_p = make_primitive_without_kernel("log_softmax_tangent", _log_softmax_tangent)
_log_softmax_cotangent_p = make_primitive("log_softmax_cotangent", _log_softmax_cotangent)
logsumexp_tangent_p = make_primitive_without_kernel("logsumexp_tangent", _logsumexp_tangent)
_logsumexp_cotangent_p = make_primitive(
    "logsumexp_cotangent", _logsumexp_cotangent, version=2, has_workspace=False
)


# Derivatives


def _define_jvp(p: Primitive, tangent_p: Primitive):
    def jvp(primals, tangents, *, algorithm, **params):
        _, *where = primals
        y = p.bind(*primals, algorithm=algorithm, **params)
        t = ad.instantiate_zeros(tangents[0])
        algorithm = _rowwise.of_derivatives(algorithm)
        return y, tangent_p.bind(y, t, *where, algorithm=algorithm, **params)

    ad.primitive_jvps[p] = jvp


def _logsumexp_jvp(primals, tangents, *, algorithm, **params):
    results, dt = _logsumexp_with_residuals_jvp(primals, tangents, algorithm=algorithm, **params)
    return results[0], dt[0]


def _logsumexp_with_residuals_jvp(primals, tangents, *, algorithm, **params):
    x, *where = primals
    results = _logsumexp_with_residuals_p.bind(*primals, algorithm=algorithm, **params)
    t = ad.instantiate_zeros(tangents[0])
    algorithm = _rowwise.of_derivatives(algorithm)
    dt = logsumexp_tangent_p.bind(x, *results[1:], t, *where, algorithm=algorithm, **params)
    return results, [dt.astype(x.dtype), *residual_tangents(results[1], dt)]


def residual_tangents(maximum: jax.Array, dt: jax.Array) -> list[Any]:
    """The tangents of the two parts of logsumexp, given its own; the maximum is a constant.

    As in JAX: a change of the maximum would be cancelled by the logarithm of the sum.
    """
    return [ad.Zero(jax.typeof(maximum)), dt]


_define_jvp(_PRIMITIVES["softmax"], _softmax_tangent_p)
_define_jvp(_PRIMITIVES["log_softmax"], _log_softmax_tangent_p)
ad.primitive_jvps[_PRIMITIVES["logsumexp"]] = _logsumexp_jvp
ad.primitive_jvps[_logsumexp_with_residuals_p] = _logsumexp_with_residuals_jvp
for _p, _transposed_p, _map, _linear in [
    (_softmax_tangent_p, _softmax_tangent_p, _softmax_tangent, 1),
    (_log_softmax_tangent_p, _log_softmax_cotangent_p, _log_softmax_tangent, 1),
    (_log_softmax_cotangent_p, _log_softmax_tangent_p, _log_softmax_cotangent, 1),
    (logsumexp_tangent_p, _logsumexp_cotangent_p, _logsumexp_tangent, 3),
    (_logsumexp_cotangent_p, logsumexp_tangent_p, _logsumexp_cotangent, 3),
]:
    _rowwise.define_linear(_p, _transposed_p, _map, _linear)
