"""softmax, log_softmax and logsumexp."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_gpuops import _primitive, _rowwise
from jax_gpuops._implementation import resolve

Axis = int | Sequence[int] | None

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
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """Softmax over one or more axes; drop-in for `jax.nn.softmax`.

    Computes `exp(z - max(z)) / sum(exp(z - max(z)))` of `z = scale * x`. As in JAX, a row of only
    -inf, or with +inf or NaN in it, is NaN; elements that are left out are ignored and give 0, and
    so does a row that is left out as a whole.

    Args:
      x: an array of any shape. Our kernels take float16, bfloat16, float32 and float64; 16-bit
        floats are computed in float32.
      axis: the axis or axes to normalise over; None is all of them. Another axis than the last
        is read where it lies, not transposed in memory.
      where: a boolean array that broadcasts to `x`: the elements to include. Our kernels read it as
        it is; only a program that XLA divides among devices expands it in memory, except along
        `axis`.
      scale: a Python number of any sign that multiplies `x` first. 16-bit floats are not rounded
        after it.
      causal: True to include only the elements (i, j) of the last two dims with j <= i, of those
        that `where` includes. Kernels do not read the others.
      implementation: None for the fastest known on the platform, "cuda", "interpret" (the same
        kernels on the host) or "xla".
      algorithm: None to let the plan choose, or a name from `jax_gpuops.algorithms("softmax")`,
        which tells what each cannot take. Derivatives choose their own.

    Returns:
      An array of the shape and dtype of `x`.

    Raises:
      TypeError: if an argument has a type that is not accepted, such as an array as `scale`, or a
        kernel was asked for and has no version for the dtype.
      ValueError: if `axis` is out of range, if `where` is not boolean, if `scale` is not finite, if
        `causal` is True and `axis` is not the last of at least two, if `implementation` or
        `algorithm` is unknown, cannot take the problem or cannot run on the platform.
    """
    return _call("softmax", x, axis, where, scale, causal, implementation, algorithm)


def log_softmax(
    x: jax.typing.ArrayLike,
    axis: Axis = -1,
    where: jax.typing.ArrayLike | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """Logarithm of softmax, without forming softmax; drop-in for `jax.nn.log_softmax`.

    Computes `z - max(z) - log(sum(exp(z - max(z))))` of `z = scale * x`. Elements that are left out
    are ignored and give -inf.

    Args:
      x: an array of any shape, dtypes as for `softmax`.
      axis: the axis or axes to normalise over; None is all of them.
      where: as for `softmax`.
      scale: as for `softmax`.
      causal: as for `softmax`.
      implementation: as for `softmax`.
      algorithm: as for `softmax`.

    Returns:
      An array of the shape and dtype of `x`.

    Raises:
      TypeError: as `softmax` does.
      ValueError: as `softmax` does.
    """
    return _call("log_softmax", x, axis, where, scale, causal, implementation, algorithm)


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
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Logarithm of the sum of exponentials of `scale * a`; drop-in for `jax.nn.logsumexp`.

    A row that is left out as a whole gives -inf.

    Args:
      a: an array of any shape, dtypes as for `softmax`.
      axis: the axis or axes to sum over; None is all of them.
      b: factors of the exponentials. XLA computes this case: kernels do not take it.
      keepdims: True to keep the reduced axes with size 1.
      return_sign: True to return the sign of the sum too. XLA computes this case.
      where: as for `softmax`.
      scale: as for `softmax`.
      causal: as for `softmax`.
      implementation: as for `softmax`.
      algorithm: as for `softmax`.

    Returns:
      The result in the dtype of `a`, or with `return_sign` the pair (result, sign).

    Raises:
      TypeError: as `softmax` does.
      ValueError: as `softmax` does; also if a kernel was asked for, or `scale` or `causal` given,
        together with `b` or `return_sign`.
    """
    if b is not None or return_sign:
        scale = _check("a", a, axis, where, scale, causal)
        chosen = resolve("softmax", implementation, algorithm)
        _primitive.refuse(chosen, algorithm, "logsumexp kernels take neither b nor return_sign")
        if scale != 1 or causal:
            raise ValueError("scale and causal go with neither b nor return_sign")
        return jax.nn.logsumexp(a, axis, b, keepdims, return_sign, where)
    result = _call(
        "logsumexp", a, axis, where, scale, causal, implementation, algorithm, argument="a"
    )
    axes = _primitive.canonical_axes(axis, jnp.ndim(a))
    return jnp.expand_dims(result, axes) if keepdims else result


# From a call to a primitive


def _call(name, x, axis, where, scale, causal, implementation, algorithm, *, argument="x"):
    scale = _check(argument, x, axis, where, scale, causal)
    return _apply(
        x,
        where,
        name=name,
        axis=tuple(axis) if isinstance(axis, list) else axis,
        scale=scale,
        causal=bool(causal),
        implementation=resolve("softmax", implementation, algorithm),
        algorithm=algorithm,
    )


def _check(argument, x, axis, where, scale, causal) -> float:
    """Returns the scale as a float; raises what `softmax` promises of these arguments."""
    _primitive.check_array(argument, x)
    axes = _primitive.canonical_axes(axis, jnp.ndim(x))
    _rowwise.check_mask(where)
    scale = _primitive.factor("scale", scale, f"multiply {argument} by it")
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    if not isinstance(causal, bool | np.bool_):
        raise TypeError(f"causal must be True or False, got {causal!r:.60}")
    if causal and (jnp.ndim(x) < 2 or axes != (jnp.ndim(x) - 1,)):
        raise ValueError(
            f"causal=True needs the last of at least two axes, got axis={axis!r} for {argument} of "
            f"shape {jnp.shape(x)}"
        )
    return scale


@functools.partial(
    jax.jit, static_argnames=("name", "axis", "scale", "causal", "implementation", "algorithm")
)
def _apply(x, where, *, name, axis, scale, causal, implementation, algorithm):
    """Under jit, so that all this happens once, and the moves around a kernel cost nothing."""
    masks = [] if where is None else [where]
    options = {"scale": scale, "causal": causal}

    def reference(*operands):
        return _reference(name, *operands, axis=axis, **options)

    jax.eval_shape(reference, x, *masks)  # raises what upstream raises
    axes = _primitive.canonical_axes(axis, x.ndim)
    rows = _primitive.Rows(axes, x.ndim)
    if implementation == "xla" or x.size == 0 or not axes:
        return reference(x, *masks)
    if implementation is None and algorithm is None and len(axes) > 1 and not rows.trailing:
        # XLA reads these axes in passing. Moves made for a kernel would stay behind where it turns
        # out not to run.
        return reference(x, *masks)
    if (refusal := _refusal(x, axes, where, scale)) is not None:
        why, error = refusal
        _primitive.refuse(implementation, algorithm, why, error)
        return reference(x, *masks)

    if np.asarray(scale, _primitive.accumulator(x.dtype)) == 0:
        # Kernels read -inf in place of elements that do not take part, and 0 * -inf is NaN.
        x, options = x * 0, {**options, "scale": 1.0}
    masks = [mask.reshape((1,) * (x.ndim - mask.ndim) + mask.shape) for mask in masks]
    operands = _primitive.vary_alike(x, *masks)
    if len(axes) == 1:
        params = {"axis": axes[0], "inner_dims": 0, **options}
    else:
        operands = [rows.apply(_expanded_along(axes, each, x.shape)) for each in operands]
        params = {"axis": len(rows.leading), "inner_dims": rows.inner_dims, **options}
    p = _PRIMITIVES[name]
    _primitive.check_problem(p, implementation, algorithm, *operands, **params)
    y = p.bind(*operands, **params, implementation=implementation, algorithm=algorithm)
    return y if len(axes) == 1 or name == "logsumexp" else rows.undo(y, x.shape)


def _refusal(x, axes, where, scale) -> tuple[str, type[Exception]] | None:
    """Returns why no kernel takes the call, and the error that says so, or None if one does."""
    if x.dtype.name not in _rowwise.DTYPES:
        return f"dtype {x.dtype} is not among {', '.join(_rowwise.DTYPES)}", TypeError
    largest = float(jnp.finfo(_primitive.accumulator(x.dtype)).max) / 2
    if abs(scale) > largest:  # kernels multiply it by log2(e)
        return f"scale {scale} is beyond {largest:.3}", ValueError
    if where is not None and jnp.broadcast_shapes(where.shape, x.shape) != x.shape:
        return f"where of shape {where.shape} does not broadcast to {x.shape}", ValueError
    if len(axes) > 1 and _primitive.is_sharded_along(x, axes):
        return (
            f"x is sharded along the reduced axes, {jax.typeof(x)}; use jax.shard_map",
            ValueError,
        )
    return None


def _expanded_along(axes, mask, shape):
    """The mask of an array of `shape` such that its `axes` can become one, of size 1 or of all."""
    if all(mask.shape[d] == 1 for d in axes):
        return mask
    return jnp.broadcast_to(
        mask, tuple(shape[d] if d in axes else size for d, size in enumerate(mask.shape))
    )


# The primitives. y is the forward result, lse that of logsumexp; t is the operand's tangent.


def _reference(
    function: str, x, *where, axis: Axis, scale: float, causal: bool, inner_dims: int = 0
) -> jax.Array:
    del inner_dims  # where the row lies in memory is the compiler's business here
    mask = _rowwise.kept(x, *where, causal=causal)
    y = _UPSTREAM[function](_rowwise.scaled(x, scale), axis=axis, where=mask)
    is_narrow = _primitive.accumulator(x.dtype) != x.dtype
    return y.astype(x.dtype) if is_narrow else y


def _wide_logsumexp(x, *where, **params):
    """In the dtype that kernels compute in: of a rounded result no gradient would be accurate."""
    return _reference("logsumexp", _rowwise.wide(x), *where, **params)


def _logsumexp(x, *where, **params):
    return _wide_logsumexp(x, *where, **params).astype(x.dtype)


def _narrow_per_row(x, *others, **params):
    return _rowwise.per_row(x, *others, **params).update(dtype=x.dtype)


def _softmax_tangent(y, t, *where, axis, inner_dims, scale, causal):
    """`scale * y * (t - sum(y * t))`; the map is symmetric, so the cotangent's is the same."""
    del inner_dims
    mask = _rowwise.kept(y, *where, causal=causal)
    wide_y, wide_t = _rowwise.wide(y), _rowwise.wide(_rowwise.select(mask, t, 0))
    total = jnp.sum(wide_y * wide_t, axis, keepdims=True)
    return _rowwise.select(mask, scale * wide_y * (wide_t - total), 0).astype(y.dtype)


def _log_softmax_tangent(y, t, *where, axis, inner_dims, scale, causal):
    """`scale * (t - sum(exp(y) * t))`."""
    del inner_dims
    mask = _rowwise.kept(y, *where, causal=causal)
    wide_y, wide_t = _rowwise.wide(y), _rowwise.wide(_rowwise.select(mask, t, 0))
    total = jnp.sum(jnp.exp(wide_y) * wide_t, axis, keepdims=True)
    return _rowwise.select(mask, scale * (wide_t - total), 0).astype(y.dtype)


def _log_softmax_cotangent(y, ct, *where, axis, inner_dims, scale, causal):
    """`scale * (ct - exp(y) * sum(ct))`, the transpose of the tangent."""
    del inner_dims
    mask = _rowwise.kept(y, *where, causal=causal)
    wide_y, wide_ct = _rowwise.wide(y), _rowwise.wide(_rowwise.select(mask, ct, 0))
    total = jnp.sum(wide_ct, axis, keepdims=True)
    return _rowwise.select(mask, scale * (wide_ct - jnp.exp(wide_y) * total), 0).astype(y.dtype)


def _logsumexp_tangent(x, lse, t, *where, axis, inner_dims, scale, causal):
    """`scale * sum(exp(scale * x - lse) * t)`."""
    del inner_dims
    mask = _rowwise.kept(x, *where, causal=causal)
    weights = _rowwise.weights(x, lse, mask, axis=axis, scale=scale)
    return scale * jnp.sum(weights * _rowwise.wide(_rowwise.select(mask, t, 0)), axis)


def _logsumexp_cotangent(x, lse, g, *where, axis, inner_dims, scale, causal):
    """`scale * exp(scale * x - lse) * g`, the transpose of the tangent."""
    del inner_dims
    mask = _rowwise.kept(x, *where, causal=causal)
    weights = _rowwise.weights(x, lse, mask, axis=axis, scale=scale)
    return _rowwise.select(mask, scale * weights * jnp.expand_dims(g, axis), 0).astype(x.dtype)


_PRIMITIVES = {
    "softmax": _rowwise.primitive(
        "softmax", functools.partial(_reference, "softmax"), _rowwise.like_array
    ),
    "log_softmax": _rowwise.primitive(
        "log_softmax", functools.partial(_reference, "log_softmax"), _rowwise.like_array
    ),
    "logsumexp": _rowwise.primitive("logsumexp", _logsumexp, _narrow_per_row),
}
_wide_logsumexp_p = _rowwise.primitive(
    "logsumexp", _wide_logsumexp, _rowwise.per_row, name="wide_logsumexp"
)
_softmax_tangent_p = _rowwise.primitive("softmax_tangent", _softmax_tangent, _rowwise.like_array)
_log_softmax_tangent_p = _rowwise.primitive_without_kernel(
    "log_softmax_tangent", _log_softmax_tangent, _rowwise.like_array
)
_log_softmax_cotangent_p = _rowwise.primitive(
    "log_softmax_cotangent", _log_softmax_cotangent, _rowwise.like_array
)
logsumexp_tangent_p = _rowwise.primitive_without_kernel(
    "logsumexp_tangent", _logsumexp_tangent, _rowwise.per_row
)
_logsumexp_cotangent_p = _rowwise.primitive(
    "logsumexp_cotangent", _logsumexp_cotangent, _rowwise.like_array, has_workspace=False
)


# Derivatives


def _define_jvp(p: Primitive, tangent_p: Primitive, residuals: Callable[..., list[jax.Array]]):
    def jvp(primals, tangents, *, algorithm, **params):
        x, *where = primals
        y = p.bind(*primals, algorithm=algorithm, **params)
        t = ad.instantiate_zeros(tangents[0])
        return y, tangent_p.bind(*residuals(x, y), t, *where, algorithm=None, **params)

    ad.primitive_jvps[p] = jvp


def _logsumexp_jvp(primals, tangents, *, algorithm, **params):
    """From the wide result, which the tangent needs too."""
    x, *where = primals
    lse = _wide_logsumexp_p.bind(*primals, algorithm=algorithm, **params)
    t = ad.instantiate_zeros(tangents[0])
    dt = logsumexp_tangent_p.bind(x, lse, t, *where, algorithm=None, **params)
    return lse.astype(x.dtype), dt.astype(x.dtype)


_define_jvp(_PRIMITIVES["softmax"], _softmax_tangent_p, lambda x, y: [y])
_define_jvp(_PRIMITIVES["log_softmax"], _log_softmax_tangent_p, lambda x, y: [y])
_define_jvp(_wide_logsumexp_p, logsumexp_tangent_p, lambda x, y: [x, y])
ad.primitive_jvps[_PRIMITIVES["logsumexp"]] = _logsumexp_jvp
for _p, _transposed_p, _map, _linear in [
    (_softmax_tangent_p, _softmax_tangent_p, _softmax_tangent, 1),
    (_log_softmax_tangent_p, _log_softmax_cotangent_p, _log_softmax_tangent, 1),
    (_log_softmax_cotangent_p, _log_softmax_tangent_p, _log_softmax_cotangent, 1),
    (logsumexp_tangent_p, _logsumexp_cotangent_p, _logsumexp_tangent, 2),
    (_logsumexp_cotangent_p, logsumexp_tangent_p, _logsumexp_cotangent, 2),
]:
    _rowwise.define_linear(_p, _transposed_p, _map, _linear)
