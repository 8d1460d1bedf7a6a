"""softmax_cross_entropy_with_integer_labels."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from jax_gpuops import _arguments, _primitive, _rowwise, _softmax
from jax_gpuops._implementation import (
    BATCH_INVARIANT,
    NoKernelError,
    dispatch,
    resolve_invariant,
)
from jax_gpuops._report import left_to_xla

_NAME = "softmax_cross_entropy_with_integer_labels"


def softmax_cross_entropy_with_integer_labels(
    logits: jax.typing.ArrayLike,
    labels: jax.typing.ArrayLike,
    axis: int | tuple[int, ...] = -1,
    where: jax.typing.ArrayLike | None = None,
    *,
    batch_invariant: bool = False,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """Cross entropy of softmax(logits) with integer labels, as the optax function of this name.

    Computes `logsumexp(logits) - logits[label]` for each row of logits. As in optax, a label from
    -classes to -1 counts from the end, and any other label outside the classes gives NaN. The logit
    of the label is used even if `where` excludes it. A fully masked row gives 0.

    The forward pass reads the logits once and keeps two floats per row, in float32 for 16-bit
    logits. The backward pass reads the logits once more and may write their gradient to the same
    memory. XLA allows that if the logits are an intermediate result that no later operation reads,
    or a donated argument. Otherwise, as for an argument that is not donated, XLA copies them first.

    Args:
      logits: an array of any shape, dtypes as for `softmax`.
      labels: integers of the shape of the logits without `axis`, or of a shape that broadcasts
        with it.
      axis: the axis of the classes. With a tuple of axes, a label is an index into these axes,
        flattened in the given order; the logits are then transposed unless these are the last axes.
      where: a boolean array that has the rank of `logits` (elements to include), or that rank
        without `axis` (rows to include).
      batch_invariant: as for `softmax`.
      implementation: as for `softmax`.
      algorithm: as for `softmax`.

    Returns:
      An array of the dtype and shape of `logits`, without `axis`.

    Raises:
      TypeError: as `softmax` does; also if `logits` are not floats or `labels` are not integers.
      ValueError: as `softmax` does; also if the shapes do not match.
    """
    logits = _arguments.as_array("logits", logits)
    labels = _arguments.as_array("labels", labels)
    for name, x, kind, kinds in (
        ("logits", logits, jnp.floating, "floats"),
        ("labels", labels, jnp.integer, "integers"),
    ):
        if not jnp.issubdtype(jnp.result_type(x), kind):
            raise TypeError(f"{name} must be {kinds}, got dtype {jnp.result_type(x)}")
    if axis is None:
        raise TypeError("axis must be an int or a tuple of ints, got None")
    chosen, algorithm = resolve_invariant("softmax", batch_invariant, implementation, algorithm)
    return _jitted(
        logits,
        labels,
        _arguments.as_mask(where),
        axes=_ordered_axes(axis, jnp.ndim(logits)),
        implementation=chosen,
        algorithm=algorithm,
    )


def _ordered_axes(axis: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    _arguments.canonical_axes(axis, ndim)  # raises for invalid axes
    axes = axis if isinstance(axis, Sequence) else [axis]
    return tuple(operator.index(a) % ndim for a in axes)


def _apply(logits, labels, where, **how):
    return wide_losses(logits, labels, where, **how).astype(logits.dtype)


def wide_losses(logits, labels, where, *, axes, implementation, algorithm):
    """The losses in the dtype of the computation, float32 for 16-bit logits."""
    x, labels, masks, axis = _as_rows(logits, labels, where, axes)
    x = _primitive.shard_alike(x, jnp.expand_dims(labels, axis), *masks)
    operands = (x, _indices(labels), *masks)

    def xla():
        varying = _primitive.vary_alike(*operands)
        return _cross_entropy_p.bind(*varying, axes=(axis,), implementation="xla", algorithm=None)

    def kernel():
        _softmax.check_dtype(x)
        bind = functools.partial(
            _primitive.bind, _cross_entropy_p, implementation=implementation, algorithm=algorithm
        )
        if algorithm != BATCH_INVARIANT:
            return bind(*operands, axes=(axis,))
        if _primitive.is_sharded_along(x, (axis,)):
            raise NoKernelError(f"the classes are sharded, {jax.typeof(x)}; reshard x first")
        rows = _rowwise.Rows(x.shape, (axis,))
        logits, packed_masks = _rowwise.in_packs(rows, x, masks, -math.inf)
        return bind(logits, _classes(labels, rows.columns), *packed_masks, axes=(x.ndim - 1,))

    if x.size == 0:
        loss, *_ = left_to_xla(_NAME, operands, "the logits have no elements", xla)
    else:
        loss, *_ = dispatch(_NAME, operands, implementation, algorithm, kernel, xla)
    for mask in masks:
        loss = jnp.where(jnp.any(mask, axis), loss, 0)
    return loss


_jitted = _primitive.jit(_NAME, _apply, "axes", "implementation", "algorithm")


def _as_rows(logits, labels, where, axes):
    """Returns logits, labels and masks of matching shapes, and the single axis of the classes."""
    given = None if where is None else where.shape
    if where is not None and where.ndim + len(axes) == logits.ndim:
        where = jnp.expand_dims(where, axes)
    if where is not None and where.ndim != logits.ndim:
        raise ValueError(
            f"where must have {logits.ndim} dimensions as logits, or "
            f"{logits.ndim - len(axes)} as logits without axis, got shape {given}"
        )
    if where is not None and any(where.shape[d] not in (1, logits.shape[d]) for d in axes):
        classes = " x ".join(str(logits.shape[d]) for d in axes)
        raise ValueError(f"where of shape {given} does not broadcast to {classes} classes")
    masks = [] if where is None else [where]
    if len(axes) == 1:
        (axis,) = axes
    else:
        batch = tuple(d for d in range(logits.ndim) if d not in axes)
        axis = len(batch)
        if masks and any(where.shape[d] != 1 for d in axes):
            shape = (logits.shape[d] if d in axes else n for d, n in enumerate(where.shape))
            masks = [jnp.broadcast_to(where, tuple(shape))]
        logits, *masks = (
            jnp.transpose(each, (*batch, *axes)).reshape(
                *(each.shape[d] for d in batch), math.prod(each.shape[d] for d in axes)
            )
            for each in (logits, *masks)
        )
    batch_shapes = [(*x.shape[:axis], *x.shape[axis + 1 :]) for x in (logits, *masks)]
    try:
        if labels.ndim != logits.ndim - 1:
            raise ValueError("labels have another rank")
        batch_shape = jnp.broadcast_shapes(labels.shape, *batch_shapes)
    except ValueError:
        raise ValueError(
            f"labels and where must have the shape of logits without axis, {batch_shapes[0]}, or "
            f"one of the same rank that broadcasts with it, got labels of shape {labels.shape}"
            + ("" if where is None else f" and where of shape {given}")
        ) from None
    classes = logits.shape[axis]
    logits = jnp.broadcast_to(logits, (*batch_shape[:axis], classes, *batch_shape[axis:]))
    return logits, jnp.broadcast_to(labels, batch_shape), masks, axis


def _indices(labels):
    """Casts labels to int32 or int64, as kernels read them, and saturates those that are larger."""
    if labels.dtype in (np.int32, np.int64):
        return labels
    dtype = np.dtype("int64" if labels.dtype == np.uint64 else "int32")
    if labels.dtype.itemsize == dtype.itemsize:
        labels = jnp.minimum(labels, np.iinfo(dtype).max)
    return labels.astype(dtype)


def _classes(labels, count):
    """Labels for rows padded beyond `count` classes: negative ones wrap, invalid ones saturate."""
    labels = _indices(labels)
    labels = jnp.where(labels < 0, labels + count, labels)
    is_class = (labels >= 0) & (labels < count)
    return jnp.where(is_class, labels, np.iinfo(labels.dtype).max)


# The primitives. maximum and log_sum are the two parts of the row's logsumexp, t is the tangent of
# x, g the cotangent of the loss.


def _one_hot(x, labels, axis):
    """True at the label's class; False everywhere in a row whose label is not a class."""
    indices = jnp.where(labels < 0, labels + x.shape[axis], labels)
    return jax.lax.broadcasted_iota(labels.dtype, x.shape, axis) == jnp.expand_dims(indices, axis)


def _cross_entropy(x, labels, *where, axes):
    (axis,) = axes
    mask = _softmax.kept(x, *where, causal=False)
    maximum, log_sum = _softmax.logsumexp_parts(x, mask, axes=axis)
    if _primitive.is_sharded_along(x, axes):  # a gather cannot index a sharded axis
        is_label = _one_hot(x, labels, axis)
        label_logit = jnp.sum(jnp.where(is_label, x, 0), axis)
        label_logit = jnp.where(jnp.any(is_label, axis), label_logit, jnp.nan)
    else:
        classes = x.shape[axis]
        # JAX wraps indices that its index dtype cannot hold.
        indices = jnp.expand_dims(jnp.clip(labels, -classes - 1, classes), axis)
        label_logit = jnp.squeeze(jnp.take_along_axis(x, indices, axis), axis)
    return [maximum + log_sum - _softmax.wide(label_logit), maximum, log_sum]


def _cross_entropy_tangent(x, maximum, log_sum, t, labels, *where, axes):
    """`sum(weights * t) - t[label]`."""
    (axis,) = axes
    mask = _softmax.kept(x, *where, causal=False)
    t = _softmax.wide(t)
    label_t = jnp.where(_one_hot(x, labels, axis), t, 0)
    weights = _softmax.weights(x, maximum, log_sum, mask, axes=axes)
    return jnp.sum(weights * _softmax.select(mask, t, 0) - label_t, axis)


def _cross_entropy_cotangent(x, maximum, log_sum, g, labels, *where, axes):
    """`(weights - one_hot(label)) * g`, the transpose of the tangent."""
    (axis,) = axes
    mask = _softmax.kept(x, *where, causal=False)
    g = jnp.expand_dims(g, axis)
    label_g = jnp.where(_one_hot(x, labels, axis), g, 0)
    weights = _softmax.weights(x, maximum, log_sum, mask, axes=axes)
    return (_softmax.select(mask, weights * g, 0) - label_g).astype(x.dtype)


_cross_entropy_p = _softmax.make_primitive(
    "cross_entropy", _cross_entropy, version=2, multiple_results=True
)
_cross_entropy_tangent_p = _softmax.make_primitive_without_kernel(
    "cross_entropy_tangent", _cross_entropy_tangent
)
_cross_entropy_cotangent_p = _softmax.make_primitive(
    "cross_entropy_cotangent",
    _cross_entropy_cotangent,
    version=2,
    has_workspace=False,
    aliases=((0, 0),),
)


# Derivatives


def _jvp(primals, tangents, *, algorithm, **params):
    x, labels, *where = primals
    loss, *residuals = _cross_entropy_p.bind(*primals, algorithm=algorithm, **params)
    t = ad.instantiate_zeros(tangents[0])
    params["algorithm"] = _rowwise.of_derivatives(algorithm)
    dt = _softmax.logsumexp_tangent_p.bind(
        x, *residuals, t, *where, **params, scale=1.0, causal=False
    )
    return [loss, *residuals], [
        _cross_entropy_tangent_p.bind(x, *residuals, t, labels, *where, **params),
        *_softmax.residual_tangents(residuals[0], dt),
    ]


ad.primitive_jvps[_cross_entropy_p] = _jvp
_rowwise.define_linear(
    _cross_entropy_tangent_p, _cross_entropy_cotangent_p, _cross_entropy_tangent, 3
)
_rowwise.define_linear(
    _cross_entropy_cotangent_p, _cross_entropy_tangent_p, _cross_entropy_cotangent, 3
)
