"""linear_cross_entropy: the loss of a language-model head, with little memory for the logits."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jax_gpuops import _arguments, _cross_entropy, _primitive, _products
from jax_gpuops._implementation import Implementation, dispatch, resolve
from jax_gpuops._products import DimensionNumbers
from jax_gpuops._report import left_to_xla

_NAME = "linear_cross_entropy"


def linear_cross_entropy(
    x: jax.typing.ArrayLike,
    w: jax.typing.ArrayLike,
    labels: jax.typing.ArrayLike,
    *,
    where: jax.typing.ArrayLike | None = None,
    reduction: str = "mean",
    transpose_w: bool = False,
    precision: Any = None,
    preferred_element_type: Any = None,
    rows_per_chunk: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Cross entropy of `softmax(x @ w)` with integer labels, in little memory.

    It is the mean or sum of `softmax_cross_entropy_with_integer_labels(x @ w, labels)`. Only a part
    of the logits is in memory at a time, or all of them in the memory of the gradient of w if that
    is requested. The gradients are computed together with the loss, by three products as in the
    formula, and are multiplied by the cotangent later. So derivatives need no second pass, and only
    the gradients are stored for a backward pass. docs/semantics.md says how much memory it takes.

    The products and losses are computed as `matmul` and `softmax_cross_entropy_with_integer_labels`
    would, each by a kernel or by XLA.

    Args:
      x: an array of shape (..., d), of floats.
      w: an array of shape (d, classes), of floats.
      labels: integers of shape (...), or of a shape that broadcasts to it, with the same meaning as
        for `softmax_cross_entropy_with_integer_labels`.
      where: None, or a boolean array of shape (...), or of a shape that broadcasts to it: the rows
        to include. The others affect neither the result nor a gradient, whatever x and labels are.
      reduction: "mean" over the included rows, or "sum".
      transpose_w: True for w of shape (classes, d), such as an embedding that is also the head.
      precision: as for `matmul`, for all products.
      preferred_element_type: the dtype of the logits, of 16 bits or more; None for the dtype to
        which x and w promote. The gradients of the logits are rounded to the promoted dtype, in
        which they are multiplied by x and w.
      rows_per_chunk: the number of rows whose logits are computed at once. None for an eighth to a
        quarter of the rows, but at least 1024, or for all rows if their logits are in the memory of
        the gradient of w.
      implementation: None for the fastest known on the platform, "cuda", "interpret" (the same
        kernels on the host) or "xla".

    Returns:
      A scalar of float32; of float64 if the logits are.

    Raises:
      TypeError: if `x` or `w` are not floats or `labels` are not integers, if an argument has a
        type that is not accepted, or if a kernel was requested that does not support the dtypes.
      ValueError: if shapes do not match, if an argument has a value that is not accepted, or if a
        kernel was requested that does not support the problem or cannot run on the platform.
    """
    arrays = {"x": x, "w": w, "labels": labels}
    arrays = {name: _arguments.as_array(name, each) for name, each in arrays.items()}
    where = _arguments.as_mask(where)
    transpose_w = _arguments.flag("transpose_w", transpose_w)
    _check(**arrays, where=where, transpose_w=transpose_w)
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f'reduction must be "mean" or "sum", got {reduction!r}; '
            "softmax_cross_entropy_with_integer_labels returns the losses of all rows"
        )
    dtype = jnp.result_type(arrays["x"], arrays["w"])
    logits_dtype = _arguments.preferred_dtype(
        dtype if preferred_element_type is None else preferred_element_type
    )
    if not jnp.issubdtype(logits_dtype, jnp.floating):
        raise TypeError(
            f"preferred_element_type must be a floating-point dtype, got {logits_dtype}"
        )
    if logits_dtype.itemsize < 2:
        raise TypeError(
            f"logits must have 16 bits or more, got dtype {logits_dtype}; set another one with "
            "preferred_element_type"
        )
    return _jitted(
        *arrays.values(),
        where,
        reduction=reduction,
        how=_How(
            transpose_w,
            _products.hashable(precision),
            logits_dtype,
            _checked(rows_per_chunk),
            resolve("matmul", implementation, None),
        ),
    )


def _checked(rows_per_chunk: Any) -> int | None:
    """Returns the argument, or raises an error."""
    if rows_per_chunk is None:
        return None
    try:
        rows = operator.index(rows_per_chunk)
    except TypeError:  # also for traced arrays
        raise TypeError(
            "rows_per_chunk must be None or an int, known when the program is traced, got "
            f"{rows_per_chunk!r:.60}"
        ) from None
    if rows < 1:
        raise ValueError(f"rows_per_chunk must be None or at least 1, got {rows}")
    return rows


def _check(x, w, labels, where, *, transpose_w) -> None:
    """Raises an error if the arrays do not match."""
    for name, each, kind, kinds in (
        ("x", x, jnp.floating, "floats"),
        ("w", w, jnp.floating, "floats"),
        ("labels", labels, jnp.integer, "integers"),
    ):
        if not jnp.issubdtype(jnp.result_type(each), kind):
            raise TypeError(f"{name} must be {kinds}, got dtype {jnp.result_type(each)}")
    x, w = jnp.shape(x), jnp.shape(w)
    if len(x) < 1 or len(w) != 2 or x[-1] != w[1 if transpose_w else 0]:
        shape = "(classes, d)" if transpose_w else "(d, classes)"
        raise ValueError(
            f"linear_cross_entropy takes x of shape (..., d) and w of shape {shape}, got {x} and "
            f"{w}; transpose_w is {transpose_w}"
        )
    batch = x[:-1]
    for name, each in {"labels": labels, "where": where}.items():
        own = () if each is None else jnp.shape(each)
        pairs = zip(own[::-1], batch[::-1], strict=False)
        if len(own) > len(batch) or any(n not in (1, size) for n, size in pairs):
            raise ValueError(
                f"{name} must have the shape of x without its last dim, {batch}, or one that "
                f"broadcasts to it, got {own}"
            )


@dataclasses.dataclass(frozen=True)
class _How:
    """How a call is computed: its static arguments.

    Attributes:
      transpose_w: as the caller gave it.
      precision: likewise.
      logits_dtype: the dtype of the logits.
      rows_per_chunk: as the caller gave it.
      implementation: as `resolve` returned it.
    """

    transpose_w: bool
    precision: Any
    logits_dtype: np.dtype
    rows_per_chunk: int | None
    implementation: Implementation

    @property
    def width_axis(self) -> int:
        """The contracting dimension of w."""
        return 1 if self.transpose_w else 0


def _apply(x, w, labels, where, *, reduction, how: _How) -> jax.Array:
    dtype = jnp.result_type(x, w)
    batch = x.shape[:-1]
    labels = jnp.broadcast_to(labels, batch)
    weights = jnp.ones(batch, _primitive.accumulator(how.logits_dtype))
    count = math.prod(batch)
    if where is not None:
        where = jnp.broadcast_to(where, batch)
        weights = where.astype(weights.dtype)
        count = jnp.sum(where).astype(weights.dtype)
        x = _where_counted(x, where)  # 0 * NaN would be NaN in the gradient of w
    # Divided by many rows, the gradients of float16 logits would underflow: the sum is divided.
    is_divided = reduction == "mean" and dtype == np.float16
    if reduction == "mean" and not is_divided:
        weights = jnp.where(weights == 0, 0, weights / count)
    operands = _primitive.vary_alike(x.astype(dtype), w.astype(dtype), labels, weights)
    if _is_left_whole(*operands):
        loss = _formula(how, *operands)
    else:
        x, w, labels, weights = operands
        rows = x.reshape(-1, x.shape[-1])
        loss, _ = _computed(how, (False, False), rows, w, labels.ravel(), weights.ravel())
    if is_divided:
        loss = loss / count
    if reduction == "mean":  # NaN for no rows; added, so that the cotangent stays a constant
        loss = loss + jnp.where(count == 0, jnp.nan, 0)
    return loss


_jitted = _primitive.jit(_NAME, _apply, "reduction", "how")


@_primitive.keeping_arguments
def _where_counted(x: jax.Array, where: jax.Array) -> jax.Array:
    """Returns x with zeros in the excluded rows."""
    return jnp.where(jnp.expand_dims(where, -1), x, 0)


def _is_left_whole(*operands) -> bool:
    """True if the rows cannot be divided: no elements, symbolic sizes or explicit shardings."""
    sizes = [size for each in operands for size in each.shape]
    has_rows = all(isinstance(size, int) and size > 0 for size in sizes)
    return not has_rows or any(map(_primitive.has_explicit_sharding, operands))


# The parts. dz is the gradient of the logits, `axis` the axis of the classes in both. The scope of
# the call does not reach into custom derivatives and loops, so the kernels' calls have it as well.


@jax.named_scope(_NAME)
def _product(how: _How, a, b, numbers: DimensionNumbers, dtype) -> jax.Array:
    def xla():
        return lax.dot_general(a, b, numbers, how.precision, dtype)

    def kernel():
        _products.check_sharding(a, b)
        return _products.bind_product(
            _products.gemm_p,
            a,
            b,
            dimension_numbers=numbers,
            alpha=1.0,
            beta=0.0,
            precision=how.precision,
            preferred_element_type=jnp.dtype(dtype),
            implementation=how.implementation,
            algorithm=None,
        )

    return dispatch(_NAME, [a, b], how.implementation, None, kernel, xla)


def _logits(how: _How, x, w, axis: int) -> jax.Array:
    numbers = ((x.ndim - 1,), (how.width_axis,)), ((), ())
    if axis == 0:
        ((x_dims, w_dims), batch) = numbers
        return _product(how, w, x, ((w_dims, x_dims), batch), how.logits_dtype)
    return _product(how, x, w, numbers, how.logits_dtype)


@jax.named_scope(_NAME)
def _losses(how: _How, logits, labels, axis: int) -> jax.Array:
    return _cross_entropy.wide_losses(
        logits, labels, None, axes=(axis,), implementation=how.implementation, algorithm=None
    )


def _weighted(losses, weights) -> jax.Array:
    """The weighted sum of the losses of the included rows; those of the others may be NaN."""
    return jnp.sum(jnp.where(weights == 0, 0, weights * losses))


def _formula(how: _How, x, w, labels, weights) -> jax.Array:
    """The loss by the formula, with all logits in memory."""
    axis = x.ndim - 1
    return _weighted(_losses(how, _logits(how, x, w, axis), labels, axis), weights)


def _chunk(how: _How, wants, x, w, labels, weights, axis: int):
    """The losses of some rows, dz if any gradient is wanted, and the gradient of x if wanted."""
    logits = _logits(how, x, w, axis)
    if not any(wants):
        return _losses(how, logits, labels, axis), None, None
    loss_and_pullback = jax.vjp(lambda z: _losses(how, z, labels, axis), logits)
    # The losses come first, so that the gradient can take the memory of the logits.
    losses, pullback = lax.optimization_barrier(loss_and_pullback)
    (dz,) = pullback(weights)
    dz = dz.astype(w.dtype)
    numbers = ((axis,), (1 - how.width_axis,)), ((), ())
    return losses, dz, _product(how, dz, w, numbers, x.dtype) if wants[0] else None


def _factors(how: _How, x, dz, axis: int) -> tuple[jax.Array, jax.Array, DimensionNumbers]:
    """The factors and dimension numbers of the product that is the gradient of w for some rows."""
    if how.transpose_w:
        return dz, x, (((1 - axis,), (0,)), ((), ()))
    return x, dz, (((0,), (1 - axis,)), ((), ()))


# Loss and gradients. Two methods need less memory than all logits take.
#
# By chunks of rows: the gradient of w is a sum over chunks, in float32 if w has 16 bits. This array
# has the size of w and may be larger than the logits.
#
# In place: the logits of d rows have as many elements as the gradient of w, and are stored in its
# memory. The gradient of a slice of classes needs dz of these classes only, and overwrites it, one
# slice at a time.

_MIN_ROWS = 1024
"""The least rows of a chunk: products of fewer rows are slower, and the sum has more steps."""

_SLICES = 16


def _chunk_rows(how: _How, x) -> int:
    """Returns the number of rows whose logits are computed at once.

    It is an eighth to a quarter of the rows: as many as fit in the memory of the gradient of w.
    """
    rows, width = x.shape
    if how.rows_per_chunk is not None:
        return min(how.rows_per_chunk, rows)
    eighth, quarter = (128 * -(-rows // (128 * count)) for count in (8, 4))
    room = width * x.dtype.itemsize // how.logits_dtype.itemsize
    return min(rows, max(_MIN_ROWS, eighth, min(quarter, room)))


def _chunk_rows_in_place(how: _How, x) -> int:
    """The same for the in-place method: all rows, if the logits need no memory besides dz."""
    rows, width = x.shape
    is_other = how.logits_dtype.itemsize > x.dtype.itemsize or rows < width
    return _chunk_rows(how, x) if is_other or how.rows_per_chunk is not None else rows


def _is_in_place(how: _How, x) -> bool:
    """True if the in-place method takes less memory. The sizes compared are bytes per class."""
    rows, width = x.shape
    chunk = _chunk_rows(how, x)
    if chunk == rows:
        return False  # there is no sum
    size, logits_size = x.dtype.itemsize, how.logits_dtype.itemsize
    by_sums = chunk * logits_size
    if _primitive.accumulator(x.dtype) != x.dtype:
        # The memory of the gradient is unused until the end, so the logits may take it.
        by_sums = 4 * width + (0 if by_sums <= width * size else by_sums)
    if logits_size > size:
        by_sums += chunk * size  # for dz
    in_place = max(rows - width, 0) * size + (rows + width) * size // _SLICES
    chunk = _chunk_rows_in_place(how, x)
    if chunk < rows:
        in_place += chunk * logits_size
    return in_place < by_sums


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _computed(how: _How, wants: tuple[bool, bool], x, w, labels, weights):
    """The weighted sum of the losses, and the gradients that are wanted.

    Args:
      how: how the call is computed.
      wants: whether the gradients of x and of w are wanted.
      x: (rows, d).
      w: of the dtype of x.
      labels: (rows,).
      weights: (rows,), the factors of the losses.

    Returns:
      The sum, and the gradients of x and of w, each None if it is not wanted.
    """
    if wants[1] and _is_in_place(how, x):
        losses, gradients = _in_place(how, wants, x, w, labels, weights)
    else:
        losses, gradients = _by_chunks(how, wants, x, w, labels, weights)
    return _weighted(losses, weights), gradients


def _by_chunks(how: _How, wants, x, w, labels, weights):
    rows = len(x)
    chunk = _chunk_rows(how, x)
    if chunk == rows:
        losses, dz, dx = _chunk(how, wants, x, w, labels, weights, 1)
        dw = _product(how, *_factors(how, x, dz, 1), w.dtype) if wants[1] else None
        return losses, (dx, dw)

    def step(total, operands):
        x, labels, weights = operands
        losses, dz, dx = _chunk(how, wants, x, w, labels, weights, 1)
        if wants[1]:
            total = _added(how, total, x, dz)
        return total, (losses, dx)

    chunks = -(-rows // chunk)

    def divided(each):
        """Divides rows into chunks, and pads the last one with rows of weight 0."""
        filled = jnp.pad(each, [(0, chunks * chunk - rows), *[(0, 0)] * (each.ndim - 1)])
        return filled.reshape(chunks, chunk, *each.shape[1:])

    operands = [divided(each) for each in (x, labels, weights)]
    if wants[1]:  # starting the sum with the first chunk costs less than with zeros
        total, first = step(None, [each[0] for each in operands])
        total, others = lax.scan(step, total, [each[1:] for each in operands])
        results = jax.tree.map(lambda y, ys: jnp.concatenate([y[None], ys]), first, others)
        dw = total.astype(w.dtype)
    else:
        _, results = lax.scan(step, None, operands)
        dw = None
    losses, dx = jax.tree.map(lambda ys: ys.reshape(-1, *ys.shape[2:])[:rows], results)
    return losses, (dx, dw)


def _added(how: _How, total, x, dz) -> jax.Array:
    """Adds the gradient of w for some more rows to `total`, which is None before the first."""
    dtype = _primitive.accumulator(x.dtype)
    if total is None:
        return _product(how, *_factors(how, x, dz, 1), dtype)
    if how.implementation in (None, "xla"):
        a, b, numbers = _factors(how, x, dz, 1)

        def xla():
            return total + lax.dot_general(a, b, numbers, how.precision, dtype)

        why = "XLA adds the product to the sum in place"  # a kernel's product is a separate array
        return left_to_xla(_NAME, [a, b], why, xla, "a kernel")
    axis = 1 - how.width_axis

    def add(total, start, count):
        of_slice = lax.dynamic_slice_in_dim(dz, start, count, 1)
        part = _product(how, *_factors(how, x, of_slice, 1), dtype)
        part = part + lax.dynamic_slice_in_dim(total, start, count, axis)
        return lax.dynamic_update_slice_in_dim(total, part, start, axis)

    return _in_slices(add, total, axis)


def _in_place(how: _How, wants, x, w, labels, weights):
    rows, width = x.shape
    chunk = _chunk_rows_in_place(how, x)
    axis = 1 - how.width_axis  # dz has the classes along the same axis as w
    parts = [slice(0, min(rows, width))] + ([slice(width, rows)] if rows > width else [])
    filled = []
    for part in parts:
        slots = width if part.start == 0 else rows - width
        each = (x[part], w, labels[part], weights[part])
        filled.append(_filled(how, wants, *each, chunk=chunk, axis=axis, slots=slots))
    losses, kept, dx = zip(*filled, strict=True)
    # The gradients of x are computed from dz, which is overwritten below.
    (dw, *others), dx = lax.optimization_barrier((kept, dx))

    def overwrite(dw, start, count):
        sizes = list(dw.shape)
        sizes[axis], sizes[1 - axis] = count, min(rows, width)
        starts = [0, 0]
        starts[axis] = start
        dz = [
            lax.dynamic_slice(dw, starts, sizes),
            *(lax.dynamic_slice_in_dim(each, start, count, axis) for each in others),
        ]
        part = _product(how, *_factors(how, x, jnp.concatenate(dz, 1 - axis), axis), w.dtype)
        return lax.dynamic_update_slice_in_dim(dw, part, start, axis)

    of_x = jnp.concatenate(dx) if wants[0] else None
    return jnp.concatenate(losses), (of_x, _in_slices(overwrite, dw, axis))


def _in_slices(change, w, axis: int) -> jax.Array:
    """Applies `change` to an array like w, slice of classes by slice, given its start and size."""
    classes = w.shape[axis]
    count = min(classes, 128 * -(-classes // (128 * _SLICES)))
    whole, rest = divmod(classes, count)
    w = lax.fori_loop(0, whole, lambda i, w: change(w, i * count, count), w)
    return change(w, whole * count, rest) if rest else w


def _filled(how: _How, wants, x, w, labels, weights, *, chunk: int, axis: int, slots: int):
    """As `_chunk`, for several chunks of rows, with dz in an array of `slots` rows or more.

    The last chunk ends with the last row; rows that it shares with another are computed twice.
    """
    rows = len(x)
    chunk = min(rows, chunk)
    if chunk == rows == slots:
        return _chunk(how, wants, x, w, labels, weights, axis)
    shape = [slots, slots]
    shape[axis] = w.shape[1 - how.width_axis]
    axes = (0, 1 - axis, 0)
    results = (
        _zeros((rows,), weights.dtype, x),
        _zeros(shape, w.dtype, x),
        _zeros(x.shape, x.dtype, x) if wants[0] else None,
    )

    def step(i, results):
        start = jnp.minimum(i * chunk, rows - chunk)
        x_, labels_, weights_ = (
            lax.dynamic_slice_in_dim(each, start, chunk) for each in (x, labels, weights)
        )
        new = _chunk(how, wants, x_, w, labels_, weights_, axis)
        return tuple(
            old if old is None else lax.dynamic_update_slice_in_dim(old, each, start, along)
            for old, each, along in zip(results, new, axes, strict=True)
        )

    return lax.fori_loop(0, -(-rows // chunk), step, results)


def _zeros(shape, dtype, like) -> jax.Array:
    """Zeros that vary over the same manual mesh axes as `like`, as loop carries must."""
    return _primitive.vary_alike(jnp.zeros(shape, dtype), like)[0]


# Derivatives: gradients are computed with the loss; derivatives of gradients use the formula.


@functools.partial(_computed.defjvp, symbolic_zeros=True)
def _jvp(how: _How, wants, primals, tangents):
    x, w, labels, weights = primals
    dots = [None if isinstance(t, SymbolicZero) else t for t in tangents[:2]]
    if any(wants):
        of_formula = functools.partial(_of_formula, how, wants, labels, weights)
        x_dot, w_dot = (
            jnp.zeros_like(each) if t is None else t for each, t in zip((x, w), dots, strict=True)
        )
        return jax.jvp(of_formula, (x, w), (x_dot, w_dot))
    loss, gradients = _computed(how, tuple(t is not None for t in dots), *primals)
    inner_product = _primitive.keeping_arguments(functools.partial(_inner_product, loss.dtype))
    terms = [
        inner_product(gradient, t)
        for gradient, t in zip(gradients, dots, strict=True)
        if t is not None
    ]
    return (loss, (None, None)), (functools.reduce(jnp.add, terms), (None, None))


def _inner_product(dtype: np.dtype, gradient: jax.Array, t: jax.Array) -> jax.Array:
    return jnp.sum(gradient.astype(dtype) * t.astype(dtype))


def _of_formula(how: _How, wants, labels, weights, x, w):
    """What `_computed` returns, in a form that can be differentiated again."""
    argnums = tuple(i for i, wanted in enumerate(wants) if wanted)
    function = jax.value_and_grad(lambda x, w: _formula(how, x, w, labels, weights), argnums)
    loss, found = function(x, w)
    remaining = iter(found)
    return loss, tuple(next(remaining) if wanted else None for wanted in wants)
