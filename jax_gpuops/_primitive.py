"""How an op becomes a JAX primitive: abstract evaluation, lowering, batching, sharding.

An op describes itself by a `Kernel`; `primitive(kernel)` makes the JAX primitive. Its parameters
are those of the op's jnp reference plus `implementation` and `algorithm`. Wherever our kernel does
not run, the reference is lowered in its place, so one jaxpr serves every platform.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import string
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla
from jax.interpreters.mlir import ir
from jax.sharding import AxisType

from jax_gpuops import _library, _measurements

Layout = tuple[int, ...]  # dimensions from minor to major, as XLA writes layouts


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What `primitive` needs to know of an op.

    Attributes:
      name: the primitive's name in jaxprs.
      op: the op family in the compiled modules.
      target: the FFI target.
      result: maps operand avals and parameters to the result's aval, or to a list of avals.
      reference: the same computation in jnp: the fallback, and the oracle of the tests.
      problem: maps operand avals and parameters to the problem that the module's plan takes.
      attributes: maps parameters to the FFI attributes, except `algorithm`.
      layouts: maps operand avals and parameters to the layouts of operands and results; None for
        row-major ones.
      rows: maps parameters to how many trailing dims of the first operand belong to a row. The dims
        before them are the first ones of all operands and results, and sharding them needs no
        communication. None if the op has no such dims: it then runs within one device only.
      arrange: maps operand avals, `partitioned` (see `choose`) and parameters to None where the
        custom call takes the operands as they are; else to a function of `bind` and the operands,
        which binds the primitive to others that it takes.
      call: makes the custom call, for an op that must rearrange its operands or result around it:
        maps operands, `algorithm` and parameters to the result. With it `target`, `attributes` and
        `layouts` are not used.
      aliases: which operand's memory the custom call may take for which result, by index.
      workspace: maps the compiled module, operand avals, `algorithm` and parameters to the bytes of
        workspace that each row along the last dim of the first operand needs at most; requires
        `rows`. The custom call has it as its last result, which nobody sees: handlers must not
        allocate.
      multiple_results: True if `result` and `reference` return lists.
    """

    name: str
    op: str
    result: Callable[..., Any]
    reference: Callable[..., Any]
    problem: Callable[..., dict[str, Any]]
    target: str | None = None
    attributes: Callable[..., dict[str, Any]] = lambda **_: {}
    layouts: Callable[..., tuple[list[Layout], list[Layout]]] | None = None
    rows: Callable[..., int] | None = None
    arrange: Callable[..., Callable[..., Any] | None] | None = None
    call: Callable[..., jax.Array] | None = None
    aliases: dict[int, int] = dataclasses.field(default_factory=dict)
    workspace: Callable[..., int] | None = None
    multiple_results: bool = False


_MOST_ELEMENTS = 2**60  # kernels count elements, and their bytes, in 64 bits

KERNELS: dict[Primitive, Kernel] = {}
"""The kernel behind each primitive that `primitive` has made."""


def primitive(kernel: Kernel) -> Primitive:
    """Makes the primitive of a kernel, with everything but its derivatives and batching."""
    p = _new(kernel.name, kernel.result, multiple_results=kernel.multiple_results)
    for platform in (None, "cpu", "cuda"):
        mlir.register_lowering(p, functools.partial(_lower, p, platform), platform=platform)
    KERNELS[p] = kernel
    if kernel.rows is not None and kernel.target is not None:
        jax.ffi.register_ffi_target_as_batch_partitionable(kernel.target)
    return p


def primitive_without_kernel(
    name: str, result: Callable[..., Any], reference: Callable[..., jax.Array]
) -> Primitive:
    """Makes a primitive that XLA always computes, such as a linear map whose transpose is ours.

    Its parameters are those of a kernel's, for the sake of that transpose.

    Args:
      name: as in `Kernel`.
      result: as in `Kernel`.
      reference: as in `Kernel`.
    """
    p = _new(name, result)

    def lower(ctx, *operands, implementation, algorithm, **params):
        rule = mlir.lower_fun(functools.partial(reference, **params), multiple_results=False)
        return rule(ctx, *operands)

    mlir.register_lowering(p, lower)
    return p


def _new(name: str, result: Callable[..., Any], *, multiple_results: bool = False) -> Primitive:
    p = Primitive(name)
    p.multiple_results = multiple_results
    p.def_impl(functools.partial(xla.apply_primitive, p))

    def abstract_eval(*avals, implementation, algorithm, **params):
        return result(*avals, **params)

    p.def_abstract_eval(abstract_eval)
    return p


def check_problem(
    p: Primitive, implementation: str | None, algorithm: str | None, *avals, **params
) -> None:
    """Raises at trace time what the kernel cannot take, where a kernel was asked for.

    Raises:
      ValueError: if the algorithm is unknown or cannot take the problem, or if the compiled
        module of the named implementation is missing.
    """
    if implementation is None and algorithm is None:
        return
    if not all(_has_constant_shape(aval) for aval in avals):
        return  # the shape is known only once an exported program runs; the handler checks then
    if implementation is None:
        implementation = "cuda" if _library.missing("cuda") is None else "interpret"
    kernel = KERNELS[p]
    result = kernel.result(*map(jax.typeof, avals), **params)
    for aval in (*avals, *(result if kernel.multiple_results else [result])):
        if math.prod(aval.shape) > _MOST_ELEMENTS:
            raise ValueError(f"{kernel.name}: an array of shape {aval.shape} has too many elements")
    _library.planned(implementation, kernel.op, kernel.problem(*avals, **params), algorithm)


def refuse(
    implementation: str | None,
    algorithm: str | None,
    why: str,
    error: type[Exception] = ValueError,
) -> None:
    """Raises `error` if a kernel was asked for; without that, XLA computes what kernels do not.

    Args:
      implementation: as resolved.
      algorithm: as the caller gave it.
      why: what the kernels do not take.
      error: ValueError or TypeError.
    """
    if implementation in ("cuda", "interpret"):
        raise error(f'{why}; implementation="{implementation}" cannot run this, "xla" can')
    if algorithm is not None:
        raise error(f"{why}; algorithm={algorithm!r} cannot run this, XLA can: leave it out")


def _has_constant_shape(aval) -> bool:
    return all(isinstance(size, int) for size in aval.shape)


# Lowering


def choose(
    kernel: Kernel,
    platform: str | None,
    implementation: str | None,
    algorithm: str | None,
    problem: Callable[[], dict[str, Any]],
    *,
    partitioned: bool,
) -> tuple[str, str]:
    """Decides what runs on a platform.

    Args:
      kernel: the op.
      platform: "cpu", "cuda", or None for any other.
      implementation: as resolved; None for the fastest.
      algorithm: as the caller gave it; naming one means ours.
      problem: gives the problem, for the table of measurements.
      partitioned: True if XLA will partition the program over several devices.

    Returns:
      "cuda", "interpret" or "xla", and why.

    Raises:
      ValueError: if a kernel was asked for and cannot run there.
    """
    reason = "named by the caller"
    if implementation is None and algorithm is not None:
        implementation = "interpret" if platform == "cpu" else "cuda"
        reason = f"algorithm {algorithm!r} is ours"
    if implementation == "xla":
        return "xla", reason
    if implementation is None:
        if platform != "cuda":
            return "xla", f"jax_gpuops has no faster kernel for platform {platform}"
        if partitioned:  # our call would collect sharded rows on one device, and XLA does not
            return "xla", "the program spans several devices, and the operands may be sharded"
        problem_of_gpu = _library.gpu_problem()
        if problem_of_gpu is not None:
            _library.warn_once(problem_of_gpu)
            return "xla", problem_of_gpu
        return _measurements.best({"op": kernel.op, **problem()})
    needed = {"cuda": "cuda", "interpret": "cpu"}[implementation]
    if platform != needed:
        raise ValueError(
            f'{kernel.name}: implementation="{implementation}" runs on platform {needed}, but the '
            f"computation is lowered for {platform or 'another one'}; implementation=None lets the "
            "platform decide"
        )
    if partitioned and kernel.rows is None:
        raise ValueError(
            f'{kernel.name}: implementation="{implementation}" runs on one device, but the program '
            "spans several; call it inside jax.shard_map, or use implementation=None"
        )
    _library.module(implementation)  # raises if it is not installed
    if implementation == "cuda" and (problem_of_gpu := _library.gpu_problem()) is not None:
        raise ValueError(f'{kernel.name}: implementation="cuda": {problem_of_gpu}')
    return implementation, reason


def _lower(p, platform, ctx, *operands, implementation, algorithm, **params):
    """Lowers to our custom call or to the reference."""
    kernel = KERNELS[p]
    partitioned = _spans_devices(ctx)
    chosen, _ = choose(
        kernel,
        platform,
        implementation,
        algorithm,
        lambda: kernel.problem(*ctx.avals_in, **params),
        partitioned=partitioned,
    )
    traced = None  # what to lower in place of a custom call
    if chosen == "xla" or any(size == 0 for aval in ctx.avals_in for size in aval.shape):
        traced = functools.partial(kernel.reference, **params)
    elif kernel.call is not None:
        traced = functools.partial(kernel.call, algorithm=algorithm or "", **params)
    elif kernel.arrange is not None:
        arranged = kernel.arrange(*ctx.avals_in, partitioned=partitioned, **params)
        if arranged is not None:
            bind = functools.partial(p.bind, implementation=chosen, algorithm=algorithm)
            traced = functools.partial(arranged, bind)
    if traced is not None:
        rule = mlir.lower_fun(traced, multiple_results=kernel.multiple_results)
        return rule(ctx, *operands)
    return _lower_custom_call(kernel, ctx, *operands, chosen=chosen, algorithm=algorithm, **params)


def _lower_custom_call(kernel, ctx, *operands, chosen, algorithm, **params):
    operand_layouts = result_layouts = None
    if kernel.layouts is not None:
        operand_layouts, result_layouts = kernel.layouts(*ctx.avals_in, **params)
    if kernel.workspace is not None:
        module = _library.module(chosen)
        size = kernel.workspace(module, *ctx.avals_in, algorithm=algorithm, **params)
        workspace = _workspace_aval(ctx.avals_in[0], size)
        ctx = ctx.replace(avals_out=[*ctx.avals_out, workspace])
        if result_layouts is not None:
            result_layouts = [*result_layouts, tuple(reversed(range(workspace.ndim)))]
    rule = jax.ffi.ffi_lowering(
        kernel.target,
        operand_layouts=operand_layouts,
        result_layouts=result_layouts,
        operand_output_aliases=kernel.aliases or None,
        extra_attributes=_sharding_attributes(kernel, ctx, **params),
    )
    results = rule(ctx, *operands, algorithm=algorithm or "", **kernel.attributes(**params))
    return results if kernel.workspace is None else results[:-1]


def _workspace_aval(x, size: int):
    """Bytes for each row of `x`: a shard of the problem gets its share of them."""
    return x.update(
        shape=(*x.shape[:-1], size),
        dtype=np.dtype("uint8"),
        sharding=x.sharding.update(spec=(*x.sharding.spec[:-1], None)),
        weak_type=False,
    )


def _spans_devices(ctx) -> bool:
    """True if XLA will partition this code; inside a full shard_map it is partitioned already."""
    axis_context = ctx.module_context.axis_context
    mesh = getattr(axis_context, "mesh", None)
    if mesh is not None:
        return mesh.size > 1 and frozenset(mesh.axis_names) != axis_context.manual_axes
    return (getattr(axis_context, "num_devices", 1) or 1) > 1


def _sharding_attributes(kernel, ctx, **params) -> dict[str, ir.Attribute] | None:
    """Tells the partitioner that leading dims shard freely, by JAX's own means for LAPACK calls.

    The Shardy rule propagates shardings through the call and gathers the row dims; the partitioner
    then slices operands and results along the `num_batch_dims` leading dims. That is right only
    because these dims are the same in all of them.
    """
    avals = [*ctx.avals_in, *ctx.avals_out]
    if kernel.rows is None or not all(_has_constant_shape(aval) for aval in avals):
        return None
    shape = ctx.avals_in[0].shape
    leading = len(shape) - kernel.rows(**params)
    if leading == 0 or any(aval.shape[:leading] != shape[:leading] for aval in avals):
        return None  # a program that is not partitioned may have masks that broadcast
    names = iter(string.ascii_lowercase[8:] + string.ascii_lowercase[:8])
    factors = {next(names): size for size in shape[:leading]}
    leading_names = list(factors)
    # Row dims of one place and size share a factor: x and y of softmax.
    row_names: dict[tuple[int, int], str] = {}

    def dims(aval) -> str:
        result = list(leading_names)
        for dim in enumerate(aval.shape[leading:]):
            if dim not in row_names:
                row_names[dim] = next(names)
                factors[row_names[dim]] = dim[1]
            result.append(row_names[dim])
        return "[" + ", ".join(result) + "]"

    operand_dims = ", ".join(map(dims, ctx.avals_in))
    result_dims = ", ".join(map(dims, ctx.avals_out))
    sizes = ", ".join(f"{name}={size}" for name, size in factors.items())
    replicated = ", ".join(row_names.values())
    rule = (
        f"#sdy.op_sharding_rule<({operand_dims})->({result_dims}) "
        f"{{{sizes}}}{f' need_replication={{{replicated}}}' if replicated else ''}, custom>"
    )
    return {
        "mhlo.frontend_attributes": mlir.ir_attribute({"num_batch_dims": str(leading)}),
        "sdy.sharding_rule": ir.Attribute.parse(rule),
    }


def is_sharded_along(x: jax.Array, axes: Sequence[int]) -> bool:
    """True if the type of `x` says that one of these axes is divided among devices.

    In an explicit-sharding mesh a custom call cannot take such an axis apart, while XLA's own
    operations can. Inside a full `jax.shard_map` every array is whole.
    """
    spec = jax.typeof(x).sharding.spec
    return any(axis < len(spec) and spec[axis] is not None for axis in axes)


# Batching


def batch_rows(p, operands: Sequence[jax.Array], axes: Sequence[int | None], **params):
    """A mapped axis becomes the first of the leading dims: more rows, same rows."""
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    moved = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    results = p.bind(*moved, **params)
    return results, [0] * len(results) if p.multiple_results else 0


# Rows: an axis of an array as the last one, without moving the data


@dataclasses.dataclass(frozen=True)
class Rows:
    """An array seen as rows along some of its axes.

    `apply` makes the axes the last one of the array; a custom call with `layouts` then reads it
    where it lies, and XLA turns the transposes into bitcasts.

    Attributes:
      axes: the reduced axes, sorted.
      ndim: the rank of the array.
    """

    axes: tuple[int, ...]
    ndim: int

    @property
    def leading(self) -> tuple[int, ...]:
        return tuple(d for d in range(self.ndim) if d not in self.axes)

    @property
    def inner_dims(self) -> int:
        """How many leading dims lie inside the rows; 0 for axes that are apart: a copy."""
        adjacent = self.axes[-1] - self.axes[0] == len(self.axes) - 1
        return self.ndim - 1 - self.axes[-1] if adjacent else 0

    @property
    def trailing(self) -> bool:
        """True if the rows are what the last axes hold, so that nothing has to be moved."""
        return self.axes == tuple(range(self.ndim - len(self.axes), self.ndim))

    def apply(self, x: jax.Array) -> jax.Array:
        y = jnp.transpose(x, (*self.leading, *self.axes))
        if len(self.axes) == 1:
            return y
        columns = math.prod(x.shape[d] for d in self.axes)
        return y.reshape(*(x.shape[d] for d in self.leading), columns)

    def undo(self, y: jax.Array, shape: Sequence[int]) -> jax.Array:
        y = y.reshape(*(shape[d] for d in self.leading), *(shape[d] for d in self.axes))
        order = (*self.leading, *self.axes)
        return jnp.transpose(y, tuple(order.index(d) for d in range(self.ndim)))


def row_layout(ndim: int, inner_dims: int) -> Layout:
    """The layout of an array whose last axis lies outside `inner_dims` of its leading ones."""
    leading = ndim - 1
    major_to_minor = (
        *range(leading - inner_dims),
        leading,
        *range(leading - inner_dims, leading),
    )
    return tuple(reversed(major_to_minor))


def row_problem(shape: Sequence[int], inner_dims: int) -> dict[str, int]:
    """The sizes that the compiled modules know a row-wise problem by."""
    *leading, columns = shape
    outer = inner = 1
    for i, size in enumerate(leading):
        if i < len(leading) - inner_dims:
            outer *= size
        else:
            inner *= size
    return {"outer": outer, "columns": columns, "inner": inner}


# Arguments


def check_array(name: str, x: object) -> None:
    """Raises TypeError unless `x` is an array or a number, as jnp functions do."""
    if not isinstance(x, (jax.Array, jax.typing.ArrayLike)):  # type: ignore[arg-type]
        raise TypeError(f"{name} must be an array, got {type(x).__name__}: {x!r:.60}")


def factor(name: str, value: Any, instead: str) -> float:
    """Returns a static number as a float.

    Args:
      name: of the argument.
      value: a Python or numpy number.
      instead: what to do with an array.

    Raises:
      TypeError: if it is anything else, such as an array or a traced number.
    """
    if isinstance(value, numbers.Real) or (isinstance(value, np.generic) and np.isrealobj(value)):
        return float(value)
    raise TypeError(
        f"{name} must be a Python number, known when the program is traced, got "
        f"{type(value).__name__}; to scale by an array, {instead}"
    )


def accumulator(dtype: Any) -> np.dtype:
    """The dtype in which kernels compute on `dtype`: float32 for 16-bit floats, else the same."""
    dtype = jnp.dtype(dtype)
    return jnp.dtype(jnp.float32) if dtype.name in ("float16", "bfloat16") else dtype


def has_explicit_sharding(x: jax.typing.ArrayLike) -> bool:
    """True if the sharding of `x` is part of its type: under a mesh with explicit axes."""
    mesh = jax.typeof(x).sharding.mesh
    return not mesh.empty and AxisType.Explicit in mesh.axis_types


def vary_alike(*xs: jax.Array) -> list[jax.Array]:
    """Makes operands vary over the same mesh axes inside a shard_map, as jnp functions do."""
    varying = [jax.typeof(x).mat.varying for x in xs]
    union = frozenset().union(*varying)
    return [
        jax.lax.pcast(x, tuple(sorted(union - axes)), to="varying") if union - axes else x
        for x, axes in zip(xs, varying, strict=True)
    ]


def canonical_axes(axis: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Returns `axis` as a sorted tuple of non-negative axes; None is all of them.

    Raises:
      TypeError: if it is not made of integers.
      ValueError: if an axis is out of range or appears twice.
    """
    if axis is None:
        return tuple(range(ndim))
    axes = axis if isinstance(axis, (tuple, list)) else (axis,)
    result = []
    for each in axes:
        try:
            value = each.__index__()
        except AttributeError:
            raise TypeError(f"axis must be an int, a tuple of ints or None, got {axis!r}") from None
        if not -ndim <= value < ndim:
            raise ValueError(f"axis {value} is out of bounds for an array of dimension {ndim}")
        result.append(value % ndim)
    if len(set(result)) != len(result):
        raise ValueError(f"axis names a dimension twice: {axis!r}")
    return tuple(sorted(result))
