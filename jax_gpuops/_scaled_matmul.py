"""scaled_matmul: a matrix product of 8-bit factors with scales."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import batching

from jax_gpuops import _arguments, _linear, _primitive, _products
from jax_gpuops._implementation import dispatch, resolve_invariant

BLOCK = 128
"""The size along k, and along the columns of b, of blocks with one scale."""

_FLOATS = ("bfloat16", "float16", "float32")
_RESULTS = {"float8_e4m3fn": _FLOATS, "float8_e5m2": _FLOATS, "int8": (*_FLOATS, "int8")}
"""The factor dtypes, with the result dtypes for each."""


def scaled_matmul(
    a: jax.typing.ArrayLike,
    b: jax.typing.ArrayLike,
    a_scale: jax.typing.ArrayLike,
    b_scale: jax.typing.ArrayLike,
    *,
    transpose_b: bool = False,
    preferred_element_type: Any = None,
    precision: Any = None,
    batch_invariant: bool = False,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """Matrix product of quantised arrays: `(a * a_scale) @ (b * b_scale)`, rounded once.

    A scale applies to a whole array, to a row of a or a column of b, or to a block of 128 elements
    along k: of one row of a, or of 128 columns of b. The kernel on Hopper's tensor cores multiplies
    sums of the products of a and b by the scales, in float32. Scales of whole arrays, rows and
    columns multiply the complete sum, first the scale of a, then that of b. With blocks, the
    product of both scales multiplies the sum over each 128 elements of k.

    XLA does the same for whole arrays, rows and columns. With blocks it first multiplies both
    arrays by their scales in float32, which takes memory for both, and then multiplies these arrays
    at the given precision.

    `jax.nn.scaled_matmul` implies `transpose_b=True`, and takes arrays of three dims and scales of
    blocks along k only, of any size that divides k; `jax.lax.scaled_dot` takes such scales too.
    Here blocks have 128 elements along k, and the last one may be smaller.

    It has no derivatives, since the arrays are already rounded to 8 bits by their scales.

    Args:
      a: an array of shape (..., m, k), of float8_e4m3fn, float8_e5m2 or int8.
      b: an array of shape (..., k, n), or (..., n, k) with `transpose_b`. The kernel takes a and b
        of one dtype; XLA also takes one of each float8 dtype. Leading dims are batch dims and
        broadcast.
      a_scale: a number, or a float32 array with the rank of a, whose last two dims are (1, 1),
        (m, 1), or (m, ceil(k / 128)) for blocks. Leading dims are those of a, or 1.
      b_scale: a number, or a float32 array with the rank of b, whose last two dims are (1, 1),
        (1, n), or (ceil(k / 128), ceil(n / 128)) for blocks; with `transpose_b` these are swapped,
        as the dims of b are. The kernel takes blocks for 8-bit floats only, and does not combine
        blocks of a with a scale per column.
      transpose_b: True to transpose the last two dims of b. The tensor cores read arrays that are
        contiguous along k: other arrays are transposed first, in memory of their size.
      preferred_element_type: the dtype of the result: bfloat16, float16 or float32; None means
        float32. For int8 also int8, to which results are rounded to nearest even and saturated.
      precision: as for `matmul`. Sums of blocks are always added in float32.
      batch_invariant: as for `matmul`.
      implementation: as for `matmul`.
      algorithm: None, or "tensor_core".

    Returns:
      An array of shape (..., m, n).

    Raises:
      TypeError: as `matmul` does; also if a dtype is not supported, or if the call is
        differentiated.
      ValueError: as `matmul` does; also if shapes do not match.
    """
    operands = {
        "a": _arguments.as_array("a", a),
        "b": _arguments.as_array("b", b),
        "a_scale": _as_scale("a_scale", a_scale),
        "b_scale": _as_scale("b_scale", b_scale),
    }
    transpose_b = _arguments.flag("transpose_b", transpose_b)
    result_dtype = _arguments.preferred_dtype(
        np.float32 if preferred_element_type is None else preferred_element_type
    )
    _check_dtypes(operands["a"], operands["b"], result_dtype)
    _check_shapes(**operands, transpose_b=transpose_b)
    chosen, algorithm = resolve_invariant("matmul", batch_invariant, implementation, algorithm)
    return _jitted_scaled_matmul(
        *operands.values(),
        transpose_b=transpose_b,
        preferred_element_type=result_dtype,
        precision=_products.hashable(precision),
        implementation=chosen,
        algorithm=algorithm,
    )


# Arguments


def _as_scale(name: str, scale: Any) -> Any:
    if _arguments.is_real(scale):
        return np.float32(_arguments.factor(name, scale, "give one of dtype float32"))
    scale = _arguments.as_array(name, scale, "a number or an array")
    if jnp.result_type(scale) != np.float32:
        raise TypeError(f"{name} must have dtype float32, got {jnp.result_type(scale)}; cast it")
    return scale


def _check_dtypes(a, b, result: np.dtype) -> None:
    names = [jnp.result_type(x).name for x in (a, b)]
    for name, dtype in zip("ab", names, strict=True):
        if dtype not in _RESULTS:
            raise TypeError(
                f"scaled_matmul takes arrays of {', '.join(_RESULTS)}, but {name} is of dtype "
                f"{dtype}; multiply such arrays by their scales and call matmul"
            )
    if names[0] != names[1] and "int8" in names:
        raise TypeError(f"a and b must both be integers or both floats, got {' and '.join(names)}")
    if result.name not in _RESULTS[names[0]]:
        raise TypeError(
            f"preferred_element_type must be {' or '.join(_RESULTS[names[0]])} for a of dtype "
            f"{names[0]}, got {result}"
        )


def _check_shapes(a, b, a_scale, b_scale, *, transpose_b: bool) -> None:
    a_shape, b_shape = jnp.shape(a), jnp.shape(b)
    for name, shape in (("a", a_shape), ("b", b_shape)):
        if len(shape) < 2:
            raise ValueError(f"{name} must have at least two dimensions, got shape {shape}")
    (m, k), (b_k, n) = a_shape[-2:], b_shape[-2:][:: -1 if transpose_b else 1]
    if k != b_k:
        form = "(..., n, k), since transpose_b is True" if transpose_b else "(..., k, n)"
        raise ValueError(
            f"scaled_matmul takes a of shape (..., m, k) and b of shape {form}, got {a_shape} and "
            f"{b_shape}"
        )
    try:
        jnp.broadcast_shapes(a_shape[:-2], b_shape[:-2])
    except ValueError:
        raise ValueError(
            f"batch dimensions do not broadcast: a and b have the shapes {a_shape} and {b_shape}"
        ) from None
    depth, cols = -(-k // BLOCK), -(-n // BLOCK)
    _check_scale("a_scale", jnp.shape(a_scale), "a", a_shape, [(1, 1), (m, 1), (m, depth)])
    forms = [(1, 1), (1, n), (depth, cols)]
    forms = [form[::-1] for form in forms] if transpose_b else forms
    _check_scale("b_scale", jnp.shape(b_scale), "b", b_shape, forms)


def _check_scale(
    name: str,
    shape: tuple[int, ...],
    factor: str,
    factor_shape: tuple[int, ...],
    forms: Sequence[tuple[int, int]],
) -> None:
    if shape == ():
        return
    if (
        len(shape) != len(factor_shape)
        or shape[-2:] not in forms
        or any(own not in (1, full) for own, full in zip(shape, factor_shape[:-2], strict=False))
    ):
        tensor, vector, blocks = forms
        each = "row" if factor == "a" else "column"
        batch = "" if len(factor_shape) == 2 else f", after the batch dimensions of {factor} or 1"
        raise ValueError(
            f"{name} must be a number or, for {factor} of shape {factor_shape}, have the shape "
            f"{tensor}, or {vector} with a scale for each {each}, or {blocks} with a scale for "
            f"each block of {BLOCK}{batch}; got shape {shape}"
        )


# Derivatives: an error during tracing, for kernels and XLA alike.


@jax.custom_jvp
def _without_derivative(x: jax.Array) -> jax.Array:
    return x


@_without_derivative.defjvp
def _refuse(primals, tangents):
    del primals, tangents
    raise TypeError(
        "scaled_matmul has no derivatives: its factors were rounded to 8 bits. Pass its operands "
        "through jax.lax.stop_gradient, or define the derivatives of the layer around it with "
        "jax.custom_vjp"
    )


# From the public function to the primitive


def _scaled_matmul(
    *operands,
    transpose_b,
    preferred_element_type,
    precision,
    implementation,
    algorithm,
) -> jax.Array:
    a, b, *scales = map(_without_derivative, operands)
    a_scale, b_scale = (
        scale if scale.ndim else scale.reshape((1,) * factor.ndim)
        for scale, factor in zip(scales, (a, b), strict=True)
    )
    named = _products.named_algorithm(algorithm, precision, a)
    how = {
        "transpose_b": transpose_b,
        "precision": _products.canonical(precision),
        "preferred_element_type": preferred_element_type,
    }

    def xla():
        return _reference(a, b, a_scale, b_scale, **how)

    def kernel():
        _products.check_sharding(a, b, a_scale, b_scale)
        y = _products.bind_product(
            _scaled_matmul_p,
            *_matrices(a, b, a_scale, b_scale),
            results=_RESULTS,
            implementation=implementation,
            algorithm=named,
            **how,
        )
        batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        return y.reshape(*batch, a.shape[-2], y.shape[-1])

    return dispatch(
        "scaled_matmul", [a, b, a_scale, b_scale], implementation, algorithm, kernel, xla
    )


_jitted_scaled_matmul = _primitive.jit(
    "scaled_matmul",
    _scaled_matmul,
    *("transpose_b", "preferred_element_type", "precision", "implementation", "algorithm"),
)


def _matrices(a, b, a_scale, b_scale) -> list[jax.Array]:
    """The operands of the primitive."""
    if math.prod(b.shape[:-2]) == 1:
        a, a_scale = _rows(a, a_scale)
        b, b_scale = (x.reshape(x.shape[-2:]) for x in (b, b_scale))
        return [a, b, a_scale, b_scale]
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])

    def merged(x):
        own = x.shape[-2:]
        if math.prod(x.shape[:-2]) == 1:
            return x.reshape(own)
        return jnp.broadcast_to(x, (*batch, *own)).reshape(math.prod(batch), *own)

    return [*map(merged, (a, b, a_scale, b_scale))]


def _rows(a, a_scale) -> tuple[jax.Array, jax.Array]:
    """Merges a batch of matrices into the rows of one."""
    rows, (*_, depth) = math.prod(a.shape[:-1]), a_scale.shape
    if math.prod(a_scale.shape) == 1:
        a_scale = a_scale.reshape(1, 1)
    else:
        a_scale = jnp.broadcast_to(a_scale, (*a.shape[:-1], depth)).reshape(rows, depth)
    return a.reshape(rows, a.shape[-1]), a_scale


# The primitive: (a * a_scale) @ (b * b_scale). a is (m, k) and b is (k, n), or (n, k) with
# `transpose_b`. Each may have a leading batch dim, and its scale may then have one too.


def _scales_blocks(b, a_scale, b_scale) -> bool:
    return (
        a_scale.shape[-1] != 1
        or b_scale.shape[-2] != 1
        or b_scale.shape[-1] not in (1, b.shape[-1])
    )


def _reference(
    a, b, a_scale, b_scale, *, transpose_b, precision, preferred_element_type
) -> jax.Array:
    """The primitive in JAX's operations, for any batch dims."""
    if transpose_b:
        b, b_scale = (jnp.swapaxes(x, -1, -2) for x in (b, b_scale))
    if _scales_blocks(b, a_scale, b_scale):
        precision = _products.OF_FLOAT8.get(precision, precision)
        y = jnp.matmul(_dequantised(a, a_scale), _dequantised(b, b_scale), precision=precision)
    else:
        wide = np.int32 if a.dtype == np.int8 else np.float32
        if wide == np.int32:
            a, b = _padded(a, -1), _padded(b, -2)
        y = jnp.matmul(a, b, precision=precision, preferred_element_type=wide)
        y = y.astype(np.float32) * a_scale * b_scale
    if preferred_element_type == np.int8:
        y = jnp.clip(jnp.round(y), -128, 127)
    return y.astype(preferred_element_type)


def _padded(x: jax.Array, axis: int) -> jax.Array:
    """Appends zeros up to a multiple of 4 elements.

    On an H100, XLA of jax 0.11.2 returns twice the result of some products, also in jnp.matmul, if
    k is not a multiple of 4.
    """
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % 4)
    return jnp.pad(x, widths)


def _dequantised(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Multiplies x by its scales, which may be those of blocks, in float32."""
    for axis in (-2, -1):
        size = x.shape[axis]
        if scale.shape[axis] not in (1, size):
            scale = jnp.repeat(scale, BLOCK, axis)
            scale = lax.slice_in_dim(scale, 0, size, axis=axis)
    return x.astype(np.float32) * scale


def _kind(dims: Sequence[int], extent: int) -> str:
    """The kind of scale of a factor with `extent` rows or columns: see ScaleKind in matmul.h."""
    own, depth = dims
    if own == depth == 1:
        return "tensor"
    return "vector" if own == extent and depth == 1 else "blocks"


def _problem(a, b, a_scale, b_scale, *, transpose_b, **params) -> dict[str, Any]:
    *batch, b_rows, b_cols = b.shape
    plain = jax.ShapeDtypeStruct((*batch, b_cols, b_rows) if transpose_b else b.shape, b.dtype)
    sizes = _linear.problem(a, plain, activation=None, **params)
    b_dims = b_scale.shape[-2:] if transpose_b else b_scale.shape[-2:][::-1]
    return sizes | {
        "transpose_b": int(transpose_b),
        "a_scale": _kind(a_scale.shape[-2:], sizes["m"]),
        "b_scale": _kind(b_dims, sizes["n"]),
        "share_a_scale": int(a_scale.ndim == 2),
        "share_b_scale": int(b_scale.ndim == 2),
    }


def _call(
    launch: _primitive.Launch,
    *operands,
    transpose_b,
    precision,
    preferred_element_type,
) -> jax.Array:
    problem = _problem(
        *operands,
        transpose_b=transpose_b,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    y, _ = launch.custom_call(
        "jax_gpuops_scaled_matmul_v1",
        operands,
        [
            jax.ShapeDtypeStruct(launch.results[0].shape, preferred_element_type),
            _products.workspace(launch, problem),
        ],
        **_linear.attributes(None, precision) | {"transpose_b": transpose_b},
    )
    return y


_scaled_matmul_p = _primitive.primitive(
    _primitive.Kernel(
        name="gpuops_scaled_matmul",
        op="matmul",
        reference=_reference,
        problem=_problem,
        call=_call,
    )
)


# Batching


def _batch(operands, axes, **params):
    """Merges a mapped axis into the rows if only a has it; otherwise it is a batch dim."""
    size = next(x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None)
    operands = [
        each if axis is None else jnp.moveaxis(each, axis, 0)
        for each, axis in zip(operands, axes, strict=True)
    ]
    mapped = [axis is not None for axis in axes]
    for factor, scale in ((0, 2), (1, 3)):
        if mapped[scale] and not mapped[factor]:  # a scale has a batch dim only if its factor does
            operands[factor] = jnp.broadcast_to(operands[factor], (size, *operands[factor].shape))
            mapped[factor] = True
    bind = functools.partial(_scaled_matmul_p.bind, **params)
    a, b, a_scale, b_scale = operands
    if not mapped[1] and a.ndim == 3 and b.ndim == 2:
        rows, row_scale = _rows(a, a_scale)
        y = bind(rows, b, row_scale, b_scale)
        return y.reshape(size, a.shape[1], y.shape[-1]), 0
    return _linear.batched(bind, operands, mapped, [2, 2, 2, 2])


batching.primitive_batchers[_scaled_matmul_p] = _batch
