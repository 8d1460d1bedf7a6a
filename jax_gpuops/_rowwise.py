"""Row-wise primitives: the common part of softmax, reductions and their derivatives.

The first operand is an array whose rows lie along some of its axes. Each other operand has the same
rank, or has one element per row and lacks these axes. The last operand may be a boolean mask of the
rank of the array that broadcasts to it. All such primitives have the parameter

  axes: the axes along which the rows lie, not negative, sorted.

A kernel takes rows along the last axis. `call` moves the axes there; if they are adjacent, the
layouts of the custom call make this free of copies.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jax_gpuops import _primitive
from jax_gpuops._implementation import BATCH_INVARIANT, NoKernelError

Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Rows:
    """An array as rows along some of its axes, which are merged into one, the last.

    Attributes:
      shape: the shape of the array.
      axes: the axes, sorted.
    """

    shape: tuple[int, ...]
    axes: Axes

    @property
    def leading(self) -> Axes:
        """The other axes."""
        return tuple(d for d in range(len(self.shape)) if d not in self.axes)

    @property
    def leading_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[d] for d in self.leading)

    @property
    def columns(self) -> int:
        return math.prod(self.shape[d] for d in self.axes)

    @property
    def adjacent(self) -> bool:
        """False if other axes lie between the axes, so that merging them takes a copy."""
        return self.axes[-1] - self.axes[0] == len(self.axes) - 1

    @property
    def is_in_place(self) -> bool:
        """False if making the rows takes a copy, as for axes with other axes between them.

        Dims of size 1 do not count. Adjacent axes never take a copy.
        """
        moved = [d for d in (*self.leading, *self.axes) if self.shape[d] != 1]
        return self.adjacent or moved == sorted(moved)

    @property
    def runs(self) -> list[Axes]:
        """The axes as runs of adjacent axes, the longest first. Their sizes must be known."""
        runs = [
            tuple(d for _, d in run)
            for _, run in itertools.groupby(enumerate(self.axes), lambda pair: pair[1] - pair[0])
        ]
        return sorted(runs, key=lambda run: -math.prod(self.shape[d] for d in run))

    @property
    def inner_dims(self) -> int:
        """The number of leading dims that are minor to the rows in memory."""
        return len(self.shape) - 1 - self.axes[-1] if self.adjacent else 0

    @property
    def layout(self) -> _primitive.Layout:
        """The layout of the rows, (leading..., columns), if the array is row-major."""
        count = len(self.leading)
        outer = count - self.inner_dims
        return tuple(reversed((*range(outer), count, *range(outer, count))))

    def sizes(self) -> dict[str, int]:
        """The size fields in the problem of every row-wise kernel."""
        outer = len(self.leading) - self.inner_dims
        return {
            "outer": math.prod(self.leading_shape[:outer]),
            "columns": self.columns,
            "inner": math.prod(self.leading_shape[outer:]),
        }

    def apply(self, x: jax.Array) -> jax.Array:
        """Makes rows of the array, or of a mask that is full along all of the axes or none."""
        moved = jnp.transpose(x, (*self.leading, *self.axes))
        columns = math.prod(x.shape[d] for d in self.axes)
        return moved.reshape(*(x.shape[d] for d in self.leading), columns)

    def undo(self, y: jax.Array) -> jax.Array:
        """Converts rows to an array of the original shape."""
        y = y.reshape(*self.leading_shape, *(self.shape[d] for d in self.axes))
        order = (*self.leading, *self.axes)
        return jnp.transpose(y, [order.index(d) for d in range(len(order))])


def bind(p: Primitive, x: jax.Array, *masks: jax.Array, **params: Any) -> Any:
    """Binds a kernel's primitive to an array and an optional mask, as `_primitive.bind` does."""
    _check_masks(x, masks)
    return _primitive.bind(p, _primitive.shard_alike(x, *masks), *masks, **params)


def check_unsharded(name: str, x: jax.Array, axes: Axes) -> None:
    """Raises `NoKernelError` if the type of the argument `name` has a sharding along the axes."""
    if _primitive.is_sharded_along(x, axes):
        raise NoKernelError(
            f"{name} is sharded along the reduced axes, {jax.typeof(x)}; reshard it first"
        )


def _check_masks(x: jax.Array, masks: Sequence[jax.Array]) -> None:
    for mask in masks:
        if jnp.broadcast_shapes(mask.shape, x.shape) != x.shape:
            raise NoKernelError(f"where of shape {mask.shape} does not broadcast to {x.shape}")


def in_packs(
    rows: Rows,
    x: jax.Array,
    masks: Sequence[jax.Array],
    fill: jax.typing.ArrayLike,
    counted: bool = False,
) -> tuple[jax.Array, list[jax.Array]]:
    """Makes rows for batch-invariant kernels, padded to whole packs along the last axis.

    The same threads then read the same elements of every row.

    Args:
      rows: the position of the rows in the array.
      x: the array.
      masks: the mask of a primitive, or none.
      fill: the padding of the rows of the array.
      counted: True for a kernel that counts elements: padded rows then get a mask.

    Returns:
      The rows of the array and of the masks.

    Raises:
      NoKernelError: if a mask does not broadcast to the array.
    """
    _check_masks(x, masks)
    missing = -rows.columns % (_primitive.ALIGNMENT // x.dtype.itemsize)

    def filled(y, fill):
        return jnp.pad(y, [(0, 0)] * (y.ndim - 1) + [(0, missing)], constant_values=fill)

    x = rows.apply(x)
    masks = [rows.apply(_expanded_along(mask, rows)) for mask in masks]
    if counted and missing != 0:
        masks = [
            filled(jnp.broadcast_to(mask, (*mask.shape[:-1], rows.columns)), False)
            for mask in masks or [jnp.ones((1,) * x.ndim, bool)]
        ]
    else:
        masks = [mask if mask.shape[-1] == 1 else filled(mask, False) for mask in masks]
    return filled(x, fill), masks


def call(
    launch: _primitive.Launch,
    target: str,
    operands: Sequence[jax.Array],
    *,
    axes: Axes,
    row_dims: int = 1,
    workspace_bytes: int | None = None,
    aliases: tuple[tuple[int, int], ...] = (),
    **attributes: Any,
) -> list[jax.Array]:
    """Makes the custom call of a row-wise kernel.

    Args:
      launch: as in `_primitive.Kernel.call`.
      target: the FFI target.
      operands: the operands of the primitive.
      axes: its parameter.
      row_dims: the number of last dims that are no batch dims, with the rows along the last: 2 if a
        row depends on its index.
      workspace_bytes: the bytes of workspace per row; None if the kernel takes none.
      aliases: as in `_primitive.Launch.custom_call`.
      **attributes: the target's attributes except `algorithm` and `inner_dims`.

    Returns:
      The results of the primitive.
    """
    rows = Rows(operands[0].shape, axes)
    ndim, leading = len(rows.shape), rows.leading_shape
    if has_mask(operands):
        operands = [*operands[:-1], _expanded(operands[-1], rows, launch.partitioned)]

    def is_array(x) -> bool:
        return x.ndim == ndim

    def layout(x) -> _primitive.Layout:
        return rows.layout if is_array(x) else tuple(reversed(range(x.ndim)))

    shapes = [(*leading, rows.columns) if is_array(x) else leading for x in launch.results]
    results = [
        jax.ShapeDtypeStruct(shape, x.dtype)
        for shape, x in zip(shapes, launch.results, strict=True)
    ]
    result_layouts = list(map(layout, launch.results))
    if workspace_bytes is not None:
        results.append(jax.ShapeDtypeStruct((*leading, workspace_bytes), np.uint8))
        result_layouts.append(tuple(reversed(range(len(leading) + 1))))
    ys = launch.custom_call(
        target,
        [rows.apply(x) if is_array(x) else x for x in operands],
        results,
        operand_layouts=tuple(map(layout, operands)),
        result_layouts=tuple(result_layouts),
        batch_dims=len(leading) + 1 - row_dims,
        aliases=aliases,
        inner_dims=rows.inner_dims,
        **attributes,
    )
    return [
        rows.undo(y) if is_array(aval) else y
        for y, aval in zip(ys, launch.results, strict=False)  # the workspace is dropped
    ]


def has_mask(operands: Sequence[Any]) -> bool:
    """True if the last operand, or its aval, is a mask."""
    return operands[-1].dtype == np.bool_


def _expanded(mask: jax.Array, rows: Rows, partitioned: bool) -> jax.Array:
    """Broadcasts a mask as far as a kernel needs.

    Along the axes of the rows it stays as it is, unless only some of them are broadcast. It gets
    the leading dims of the array if XLA partitions the program, since the partitioner slices all
    operands alike, and if it is one of the rare masks that kernels cannot index.
    """
    mask = _expanded_along(mask, rows)
    shape = list(mask.shape)
    own = [shape[d] for d in rows.leading]
    if partitioned or _mask_parts(own, rows) > _MOST_MASK_PARTS:
        for d in rows.leading:
            shape[d] = rows.shape[d]
    return jnp.broadcast_to(mask, shape)


def _expanded_along(mask: jax.Array, rows: Rows) -> jax.Array:
    """Broadcasts a mask along all axes of the rows, or along none."""
    shape = list(mask.shape)
    if any(shape[d] != 1 for d in rows.axes):
        for d in rows.axes:
            shape[d] = rows.shape[d]
    return jnp.broadcast_to(mask, shape)


_MOST_MASK_PARTS = 4


def _mask_parts(own: Sequence[int], rows: Rows) -> int:
    """The number of runs of adjacent leading dims in which the mask is either full or broadcast.

    The kernels index a mask by these runs. A run does not contain both outer and inner dims.

    Args:
      own: the leading dims of the mask.
      rows: the rows of the array.
    """
    outer_dims = len(own) - rows.inner_dims
    dims = (d for d, size in enumerate(rows.leading_shape) if size != 1)
    return len(list(itertools.groupby(dims, lambda d: (d < outer_dims, own[d] != 1))))


# Batching and derivatives


def of_derivatives(algorithm: str | None) -> str | None:
    """The algorithm for a call's derivatives, whose kernels have other algorithms."""
    return algorithm if algorithm == BATCH_INVARIANT else None


def define_batching(p: Primitive) -> None:
    """Defines a batching rule that makes the mapped axis the first leading dim."""

    def batch(operands, mapped, *, axes: Axes, **params):
        operands, mapped = list(operands), list(mapped)
        if has_mask(operands) and mapped[-1] is None:  # the mask broadcasts
            operands[-1], mapped[-1] = jnp.expand_dims(operands[-1], 0), 0
        pairs = list(zip(operands, mapped, strict=True))
        size = next(x.shape[axis] for x, axis in pairs if axis is not None)
        moved = [
            jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
            for x, axis in pairs
        ]
        results = p.bind(*moved, axes=tuple(axis + 1 for axis in axes), **params)
        return results, [0] * len(results) if p.multiple_results else 0

    batching.primitive_batchers[p] = batch


def define_linear(
    p: Primitive, transposed: Primitive, reference: Callable[..., Any], linear: int
) -> None:
    """Defines the derivatives of a primitive that is linear in one of its operands.

    The operands before it are differentiable too, in JAX's operations; the operands after it,
    labels and masks, are not.

    Args:
      p: the primitive.
      transposed: the primitive of the transposed map; it takes the cotangent in place of the linear
        operand.
      reference: the reference of the primitive.
      linear: the index of the linear operand.
    """

    def replaced(operands, x):
        return [*operands[:linear], x, *operands[linear + 1 :]]

    def jvp(primals, tangents, *, implementation, algorithm, **params):
        bind = functools.partial(
            p.bind, implementation=implementation, algorithm=algorithm, **params
        )
        terms = []
        if type(tangents[linear]) is not ad.Zero:
            terms.append(bind(*replaced(primals, tangents[linear])))
        if not all(type(tangent) is ad.Zero for tangent in tangents[:linear]):
            terms.append(
                jax.jvp(
                    lambda *residuals: reference(*residuals, *primals[linear:], **params),
                    primals[:linear],
                    tuple(map(ad.instantiate_zeros, tangents[:linear])),
                )[1]
            )
        return bind(*primals), functools.reduce(jnp.add, terms)

    def transpose(cotangent, *operands, **params):
        results: list[Any] = [None] * len(operands)
        if type(cotangent) is ad.Zero:
            results[linear] = ad.Zero(operands[linear].aval)
        else:
            results[linear] = transposed.bind(*replaced(operands, cotangent), **params)
        return results

    ad.primitive_jvps[p] = jvp
    ad.primitive_transposes[p] = transpose
