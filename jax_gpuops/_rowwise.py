"""Row-wise primitives with a mask: what softmax, its relatives and their derivatives share.

The first operand is an array whose rows lie along one axis. The others have its shape, or one
element for each row: then they lack that axis. A boolean mask may come last; it has the rank of the
array, and each of its dims is that of the array or 1. The parameters are

  axis: the dim that the rows lie along, not negative.
  inner_dims: 0, or where `axis` is the last: how many of the dims before it lie inside the rows in
    memory, as `_primitive.row_layout` has it.
  scale: what the elements are multiplied by first.
  causal: True to keep the elements with j <= i only, i along the last axis but one and j along
    `axis`, the last.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jax_gpuops import _primitive

DTYPES = ("float16", "bfloat16", "float32", "float64")


# What references are written with


def scaled(x: jax.Array, scale: float) -> jax.Array:
    """`scale * x`, in the dtype that kernels compute in unless the scale is 1."""
    return x if scale == 1 else wide(x) * scale


def wide(x: jax.Array) -> jax.Array:
    """`x` in the dtype that kernels compute in."""
    return x.astype(_primitive.accumulator(x.dtype))


def kept(x: jax.Array, *where: jax.Array, causal: bool) -> jax.Array | None:
    """The elements of `x` that count, as a boolean array that broadcasts to it, or None for all."""
    masks = list(where)
    if causal:
        query, key = (jax.lax.broadcasted_iota(np.int32, x.shape[-2:], d) for d in (0, 1))
        masks.append(key <= query)
    return functools.reduce(jnp.logical_and, masks) if masks else None


def select(mask: jax.Array | None, x: jax.Array, otherwise: float) -> jax.Array:
    """`x` where the mask is None or True."""
    return x if mask is None else jnp.where(mask, x, otherwise)


def weights(
    x: jax.Array, lse: jax.Array, mask: jax.Array | None, *, axis: int, scale: float = 1.0
) -> jax.Array:
    """`exp(scale * x - lse)`, the softmax that belongs to a logsumexp, 0 where the mask is False.

    It is NaN, as JAX's gradient of logsumexp, in a row whose elements are all -inf.
    """
    shifted = scaled(wide(x), scale) - jnp.expand_dims(lse, axis)
    return jnp.exp(select(mask, shifted, -jnp.inf))


# Results


def without(dims: Sequence[Any], axis: int) -> tuple[Any, ...]:
    """What `dims` holds for each dim, for those other than `axis`."""
    return (*dims[:axis], *dims[axis + 1 :])


def like_array(x, *_, axis, inner_dims, scale=1.0, causal=False):
    """The aval of a result with the shape and dtype of the first operand."""
    del axis, inner_dims, scale, causal
    return x.update(weak_type=False)


def per_row(x, *_, axis, inner_dims, scale=1.0, causal=False):
    """The aval of a result with one element for each row, in the dtype that kernels compute in."""
    del inner_dims, scale, causal
    return x.update(
        shape=without(x.shape, axis),
        dtype=_primitive.accumulator(x.dtype),
        sharding=x.sharding.update(spec=without(x.sharding.spec, axis)),
        weak_type=False,
    )


# The primitives


def primitive(
    function: str,
    reference: Callable[..., Any],
    result: Callable[..., Any],
    *,
    name: str | None = None,
    has_workspace: bool = True,
    aliases: dict[int, int] | None = None,
    multiple_results: bool = False,
) -> Primitive:
    """Makes the primitive of a kernel of ffi/softmax, with everything but its derivatives.

    Args:
      function: the kernels' name for it.
      reference: as in `_primitive.Kernel`.
      result: `like_array`, `per_row`, or a function that returns a list of these.
      name: the primitive's, if not the function's.
      has_workspace: True if the kernels take workspace.
      aliases: as in `_primitive.Kernel`.
      multiple_results: as in `_primitive.Kernel`.
    """

    def layouts(*operands, **params):
        results = result(*operands, **params)
        results = results if multiple_results else [results]
        layout = functools.partial(_layout, operands[0].ndim, params["inner_dims"])
        return list(map(layout, operands)), list(map(layout, results))

    kernel = _primitive.Kernel(
        name=f"gpuops_{name or function}",
        op="softmax",
        target=f"jax_gpuops_{function}_v1",
        result=result,
        reference=reference,
        problem=functools.partial(_problem, function),
        attributes=_attributes,
        layouts=layouts,
        rows=_rows,
        arrange=_arrange,
        aliases=aliases or {},
        workspace=functools.partial(_workspace, function) if has_workspace else None,
        multiple_results=multiple_results,
    )
    return _batched(_primitive.primitive(kernel))


def primitive_without_kernel(
    function: str, reference: Callable[..., Any], result: Callable[..., Any]
) -> Primitive:
    """Makes a primitive with the same operands and parameters that XLA always computes."""
    return _batched(
        _primitive.primitive_without_kernel(f"gpuops_{function}", result, reference),
    )


def define_linear(
    p: Primitive, transposed: Primitive, reference: Callable[..., Any], linear: int
) -> None:
    """Defines the derivatives of a primitive that is linear in one of its operands.

    Those before it are differentiable too, in JAX's operations; those behind it, labels and masks,
    are not.

    Args:
      p: the primitive.
      transposed: the primitive of the transposed map; it takes the cotangent in place of the linear
        operand.
      reference: that of the primitive.
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


def _has_mask(operands: Sequence[Any]) -> bool:
    return operands[-1].dtype == np.bool_


def _problem(
    function: str,
    x,
    *others,
    axis: int,
    inner_dims: int,
    scale: float = 1.0,
    causal: bool = False,
) -> dict[str, Any]:
    last_axis_shape = (*without(x.shape, axis), x.shape[axis])
    return {
        "function": function,
        "dtype": x.dtype.name,
        **_primitive.row_problem(last_axis_shape, inner_dims + x.ndim - 1 - axis),
        "masked": int(_has_mask([x, *others])),
        "queries": x.shape[-2] if causal else 0,
        "scaled": int(scale != 1),
    }


# What is not known of exported shapes that are symbolic: few rows, longer than any memory holds.
_UNKNOWN = {"outer": 1, "inner": 1, "columns": 2**40, "queries": 1}


def _workspace(function: str, module, *operands, algorithm, **params) -> int:
    problem = _problem(function, *operands, **params)
    known = {
        key: value if isinstance(value, int | str) else _UNKNOWN[key]
        for key, value in problem.items()
    }
    return module.workspace("softmax", {**known, "algorithm": algorithm or ""})


def _attributes(
    *, axis: int, inner_dims: int, scale: float = 1.0, causal: bool = False
) -> dict[str, Any]:
    del axis
    return {"inner_dims": inner_dims, "scale": np.float64(scale), "causal": np.bool_(causal)}


def _layout(ndim: int, inner_dims: int, aval) -> _primitive.Layout:
    """The layout of an operand or result of a call on an array of `ndim` dims."""
    if aval.ndim == ndim:
        return _primitive.row_layout(ndim, inner_dims)
    return tuple(reversed(range(aval.ndim)))


def _rows(*, causal: bool = False, **_: Any) -> int:
    """With a causal mask a row depends on its index, and so cannot be taken from its array."""
    return 2 if causal else 1


_MOST_MASK_PARTS = 4


def _mask_parts(mask: Sequence[int], leading: Sequence[int], outer_dims: int) -> int:
    """How many groups of neighbouring dims the mask has and lacks in turns, as kernels index it.

    Args:
      mask: its dims but the axis.
      leading: those of the array.
      outer_dims: how many of them lie outside the rows in memory; no group goes beyond these.
    """
    dims = (d for d, size in enumerate(leading) if size != 1)
    return len(list(itertools.groupby(dims, lambda d: (d < outer_dims, mask[d] != 1))))


def _arrange(*avals, partitioned: bool, axis: int, inner_dims: int, **params):
    """Moves the axis last, which the layouts of the custom call make no move in memory.

    Where XLA partitions the program, it also gives the mask the leading dims of the array, since
    the partitioner slices all operands alike; so it does with the rare mask that kernels cannot
    index. Along `axis` the mask stays as it is.
    """
    ndim, last = avals[0].ndim, avals[0].ndim - 1
    leading = without(avals[0].shape, axis)
    broadcasts = _has_mask(avals) and (
        _mask_parts(without(avals[-1].shape, axis), leading, axis - inner_dims) > _MOST_MASK_PARTS
        or (partitioned and without(avals[-1].shape, axis) != leading)
    )
    if axis == last and not broadcasts:
        return None

    def arrange(x):
        if x.ndim < ndim:
            return x
        x = jnp.moveaxis(x, axis, -1)
        return jnp.broadcast_to(x, (*leading, x.shape[-1])) if broadcasts else x

    def restore(y):
        return y if y.ndim < ndim else jnp.moveaxis(y, -1, axis)

    def arranged(bind, *operands):
        inner = inner_dims + last - axis
        results = bind(*map(arrange, operands), axis=last, inner_dims=inner, **params)
        return jax.tree.map(restore, results)

    return arranged


def _batched(p: Primitive) -> Primitive:
    def batch(operands, axes, *, axis: int, **params):
        operands, axes = list(operands), list(axes)
        if _has_mask(operands) and axes[-1] is None:  # one mask for all, which broadcasts
            operands[-1], axes[-1] = jnp.expand_dims(operands[-1], 0), 0
        return _primitive.batch_rows(p, operands, axes, axis=axis + 1, **params)

    batching.primitive_batchers[p] = batch
    return p


# Arguments


def check_mask(where: jax.typing.ArrayLike | None) -> None:
    """Raises unless `where` is None or a boolean array, as JAX does."""
    if where is None:
        return
    _primitive.check_array("where", where)
    if jnp.result_type(where) != np.bool_:
        raise ValueError(
            f"where must be None or a boolean array, got one of dtype {jnp.result_type(where)}"
        )
