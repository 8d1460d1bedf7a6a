"""linear: a matrix product with a bias, an activation and a residual."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching

from jax_gpuops import _arguments, _primitive, _products
from jax_gpuops._implementation import dispatch, resolve_invariant
from jax_gpuops._products import DimensionNumbers

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
}
"""The activations, by the names that the kernels use."""


def linear(
    x: jax.typing.ArrayLike,
    w: jax.typing.ArrayLike,
    b: jax.typing.ArrayLike | None = None,
    *,
    activation: str | None = None,
    residual: jax.typing.ArrayLike | None = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    batch_invariant: bool = False,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """A dense layer: `activation(x @ w + b) + residual`, in one kernel on Hopper's tensor cores.

    The kernels add the bias to the float32 sums, apply the activation, add the residual, and round
    once. XLA computes the formula as written, in the dtype of the result.

    Under differentiation with "gelu", "gelu_exact" or "silu" the kernel stores `x @ w + b` in the
    dtype of the result, and XLA applies the activation to it. "relu" needs only its result. With an
    activation and a residual, XLA then adds the residual. The cotangent of the residual is that of
    the result.

    Args:
      x: an array of shape (..., k); dtypes as for `matmul`.
      w: an array of shape (k, n).
      b: None, or an array of shape (n,). It is cast to the dtype of the result.
      activation: None, "relu", "gelu", "gelu_exact" or "silu", as in `jax.nn`: "gelu" is
        `jax.nn.gelu` with its tanh approximation, and "gelu_exact" is
        `jax.nn.gelu(approximate=False)`.
      residual: None, or an array of the result's shape, which is added last. It is cast to the
        dtype of the result. On Hopper's tensor cores the kernels support it for 16-bit floats with
        a result of the dtype of x and w, for float32 in TF32 if rows of w are a multiple of 16
        bytes, and for float32 at the highest precision.
      precision: as for `matmul`.
      preferred_element_type: the dtype of the result; None for the dtype to which x, w, b and
        residual promote. The kernels support the dtype of x and w, and float32 for 16-bit floats.
      batch_invariant: as for `matmul`.
      implementation: as for `matmul`.
      algorithm: None to let the plan choose, or a name from `jax_gpuops.algorithms("matmul")`.

    Returns:
      An array of shape (..., n).

    Raises:
      TypeError: as `matmul` does; also if the arrays or the result are not of a floating-point or
        complex dtype.
      ValueError: as `matmul` does; also if shapes do not match, or the activation is unknown.
    """
    others = {"b": b, "residual": residual}
    arrays = {"x": x, "w": w} | {name: each for name, each in others.items() if each is not None}
    arrays = {name: _arguments.as_array(name, each) for name, each in arrays.items()}
    check_operands("linear", arrays)
    if b is not None and jnp.shape(arrays["b"]) != jnp.shape(arrays["w"])[1:]:
        raise ValueError(
            f"b must have an element for each column of w, {jnp.shape(arrays['w'])}, but has shape "
            f"{jnp.shape(arrays['b'])}"
        )
    shape = (*jnp.shape(arrays["x"])[:-1], jnp.shape(arrays["w"])[1])
    if residual is not None and jnp.shape(arrays["residual"]) != shape:
        raise ValueError(
            f"residual must have the shape of the result, {shape}, but has shape "
            f"{jnp.shape(arrays['residual'])}"
        )
    check_activation(activation)
    chosen, algorithm = resolve_invariant("matmul", batch_invariant, implementation, algorithm)
    return _jitted_linear(
        *(arrays.get(name) for name in ("x", "w", "b", "residual")),
        activation=activation,
        precision=_products.hashable(precision),
        preferred_element_type=preferred_element_type,
        implementation=chosen,
        algorithm=algorithm,
    )


def check_activation(activation: str | None) -> None:
    """Raises ValueError unless `activation` is None or the name of an activation."""
    is_name = isinstance(activation, str) and activation in ACTIVATIONS
    if activation is not None and not is_name:
        raise ValueError(
            f"activation must be None or one of {', '.join(map(repr, ACTIVATIONS))}, got "
            f"{activation!r}; apply another function to the result without an activation"
        )


def check_operands(op: str, arrays: dict[str, Any]) -> None:
    """Raises an error if the first two arrays are not x and the weights of a dense layer."""
    for name, each in arrays.items():
        if not jnp.issubdtype(jnp.result_type(each), jnp.inexact):
            raise TypeError(
                f"{op} takes floating-point and complex arrays, but {name} is of dtype "
                f"{jnp.result_type(each)}"
            )
    (_, x), (name, w), *_ = arrays.items()
    x, w = jnp.shape(x), jnp.shape(w)
    if len(x) < 1 or len(w) != 2 or x[-1] != w[0]:
        raise ValueError(
            f"{op} takes x of shape (..., k) and {name} of shape (k, n), got {x} and {w}"
        )


def dtype_of_result(preferred_element_type: Any, *operands) -> np.dtype:
    """Returns the dtype of a layer's result: the preferred one, as JAX canonicalizes it.

    Raises:
      TypeError: if it is not a floating-point or complex dtype.
    """
    if preferred_element_type is None:
        return jnp.result_type(*operands)
    dtype = _arguments.preferred_dtype(preferred_element_type)
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(
            f"preferred_element_type must be a floating-point or complex dtype, got {dtype}"
        )
    return dtype


def _linear(
    x,
    w,
    b,
    residual,
    *,
    activation,
    precision,
    preferred_element_type,
    implementation,
    algorithm,
) -> jax.Array:
    operands = [each for each in (x, w, b, residual) if each is not None]
    dtype = jnp.result_type(x, w)
    named = _products.named_algorithm(algorithm, precision, x, w)
    result_dtype = dtype_of_result(preferred_element_type, *operands)
    x, w = x.astype(dtype), w.astype(dtype)
    bias, residuals = (
        [] if each is None else [each.astype(result_dtype)] for each in (b, residual)
    )

    def xla():
        y = jnp.matmul(x, w, precision=precision, preferred_element_type=result_dtype)
        for each in bias:
            y = _plus(y, each)
        y = activated(y, activation)
        for each in residuals:
            y = y + each
        return y

    def kernel():
        _products.check_sharding(x, w, *bias, *residuals)
        # The dims of x stay as they are: XLA may gather them for a reshape if it partitions the
        # program and does not run a kernel.
        rows, *addends = (jnp.atleast_2d(each) for each in (x, *residuals))
        if bias or activation is not None:
            p = _linear_add_p if addends else _linear_p
            params = {"activation": activation}
        else:
            p = _products.gemm_p
            params = gemm_params(rows, w) | ({"beta": 1.0} if addends else {})
        y = _products.bind_product(
            p,
            rows,
            w,
            *addends,
            *bias,
            **params,
            precision=precision,
            preferred_element_type=result_dtype,
            implementation=implementation,
            algorithm=named,
        )
        return y.reshape(*x.shape[:-1], y.shape[-1])

    return dispatch("linear", operands, implementation, algorithm, kernel, xla)


_jitted_linear = _primitive.jit(
    "linear",
    _linear,
    *("activation", "precision", "preferred_element_type", "implementation", "algorithm"),
)


# The primitive: activation(x @ w + b). x is (..., k), w is (k, n) and b is (n,). With a leading
# batch dim of w or b, x is (m, k) or (batch, m, k); w or b may lack the batch dim if another one of
# the three has it.


def _has_batch(w, *b) -> bool:
    """True if the primitive has a batch dim."""
    return w.ndim == 3 or any(each.ndim == 2 for each in b)


def dimension_numbers(x, w) -> DimensionNumbers:
    batch = ((0,), (0,)) if x.ndim == w.ndim == 3 else ((), ())
    return ((x.ndim - 1,), (w.ndim - 2,)), batch


def gemm_params(x, w) -> dict[str, Any]:
    """The parameters of `gemm_p` for the product alone."""
    return {"dimension_numbers": dimension_numbers(x, w), "alpha": 1.0, "beta": 0.0}


def in_place(y: jax.Array, x, w) -> jax.Array:
    """Makes the batch dim of a product by `dimension_numbers` the leading one if only w has it."""
    return jnp.swapaxes(y, 0, 1) if (x.ndim, w.ndim) == (2, 3) else y


def _with_bias(y: jax.Array, *b: jax.Array) -> jax.Array:
    """Adds b to each row, in the dtype of y."""
    for each in b:
        y = _plus(y, jnp.expand_dims(each.astype(y.dtype), -2))
    return y


def _plus(y: jax.Array, other: jax.Array) -> jax.Array:
    """Adds an array of at most the rank of y, which jax.numpy_rank_promotion may not allow."""
    return y + lax.expand_dims(other, range(y.ndim - other.ndim))


def activated(y: jax.Array, activation: str | None) -> jax.Array:
    """Applies an activation, or none, in the dtype of y."""
    return y if activation is None else ACTIVATIONS[activation](y)


def activate(y: jax.Array, activation: str | None, dtype: Any) -> jax.Array:
    """Applies an activation in the accumulator's dtype, and rounds to `dtype`."""
    if activation is not None:
        y = activated(y.astype(_primitive.accumulator(dtype)), activation)
    return y.astype(dtype)


def _reference(x, w, *b, activation, precision, preferred_element_type) -> jax.Array:
    """The primitive in JAX's operations."""
    wide = _primitive.accumulator(preferred_element_type)
    y = lax.dot_general(x, w, dimension_numbers(x, w), precision, wide)
    return activate(_with_bias(in_place(y, x, w), *b), activation, preferred_element_type)


def _plain(x, w, *b, activation, precision, preferred_element_type) -> jax.Array:
    """The formula in the dtype of the result, whose additions XLA can pass to cuBLAS."""
    y = plain_product(x, w, precision=precision, preferred_element_type=preferred_element_type)
    y = _with_bias(y, *b)
    return activated(y, activation)


def plain_product(x, w, *, precision, preferred_element_type) -> jax.Array:
    """The product of x and w by XLA, in the dtype of the result."""
    y = lax.dot_general(x, w, dimension_numbers(x, w), precision, preferred_element_type)
    return in_place(y, x, w)


def sums_shape(x, w) -> tuple[int, ...]:
    rows = x.shape[:-1] if w.ndim == 2 else (w.shape[0], x.shape[-2])
    return (*rows, w.shape[-1])


def problem(x, w, *b, activation, precision, preferred_element_type) -> dict[str, Any]:
    *rows, n = sums_shape(x, w)
    batch = rows.pop(0) if _has_batch(w, *b) else 1
    sizes = {"batch": batch, "m": math.prod(rows), "n": n, "k": x.shape[-1]}
    return {
        "dtype": x.dtype.name,
        "result_dtype": preferred_element_type.name,
        "precision": _products.precision_name(precision),
        **sizes,
        "transpose_a": 0,
        "transpose_b": 0,
        "share_a": int(x.ndim == 2 or not _has_batch(w, *b)),
        "share_b": int(w.ndim == 2),
        "has_c": 0,
        "scaled": 0,
        "has_bias": int(bool(b)),
        "share_bias": int(bool(b) and b[0].ndim == 1),
        "gated": 0,
        "epilogue": activation or "none",
        **_products.WITHOUT_SCALES,
        "alignment": _primitive.ALIGNMENT,
        "workspace": _products.workspace_of(sizes, x.dtype),
    }


def attributes(activation: str | None, precision: Any) -> dict[str, Any]:
    """The attributes of the FFI targets of layers."""
    return {
        "precision": _products.precision_name(precision),
        "epilogue": activation or "none",
        "transpose_a": False,
        "transpose_b": False,
        "alpha": np.float64(1),
        "beta": np.float64(0),
    }


def in_rows(x: jax.Array, w, *b) -> jax.Array:
    """Makes rows of all dims of an operand or result but the last, unless there is a batch dim."""
    return x if _has_batch(w, *b) else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _calls(target: str, problem: Callable[..., dict[str, Any]], beta: float) -> Callable[..., Any]:
    """Returns the `call` of a `Kernel` that passes its operands to an FFI target."""

    def call(
        launch: _primitive.Launch, x, w, *others, activation, precision, preferred_element_type
    ) -> jax.Array:
        sizes = problem(
            x,
            w,
            *others,
            activation=activation,
            precision=precision,
            preferred_element_type=preferred_element_type,
        )
        residual, b = others[: sizes["has_c"]], others[sizes["has_c"] :]
        (result,) = launch.results
        y, _ = launch.custom_call(
            target,
            [in_rows(x, w, *b), w, *(in_rows(each, w, *b) for each in residual), *b],
            [
                jax.eval_shape(lambda y: in_rows(y, w, *b), result),
                _products.workspace(launch, sizes),
            ],
            **attributes(activation, precision) | {"beta": np.float64(beta)},
        )
        return y.reshape(result.shape)

    return call


_linear_p = _primitive.primitive(
    _primitive.Kernel(
        name="gpuops_linear",
        op="matmul",
        reference=_reference,
        plain=_plain,
        problem=problem,
        call=_calls("jax_gpuops_linear_v1", problem, beta=0),
    )
)


# The primitive with a residual of the shape of the result: activation(x @ w + b) + residual.


def _add_reference(x, w, residual, *b, activation, precision, preferred_element_type) -> jax.Array:
    """The primitive in JAX's operations."""
    wide = _primitive.accumulator(preferred_element_type)
    y = _reference(
        x, w, *b, activation=activation, precision=precision, preferred_element_type=wide
    )
    return (y + residual.astype(wide)).astype(preferred_element_type)


def _add_plain(x, w, residual, *b, **params) -> jax.Array:
    y = _plain(x, w, *b, **params)
    return y + residual.astype(y.dtype)


def _add_problem(x, w, residual, *b, **params) -> dict[str, Any]:
    del residual
    return problem(x, w, *b, **params) | {"has_c": 1}


_linear_add_p = _primitive.primitive(
    _primitive.Kernel(
        name="gpuops_linear_add",
        op="matmul",
        reference=_add_reference,
        plain=_add_plain,
        problem=_add_problem,
        call=_calls("jax_gpuops_linear_add_v1", _add_problem, beta=1),
    )
)


# Derivatives: the product has those of matmul, the activation those of jax.nn.


def _jvp(primals, tangents, *, activation, preferred_element_type, **params):
    (x, w, *b), (x_dot, w_dot, *b_dot) = primals, tangents
    how = {"preferred_element_type": preferred_element_type, **params}
    sums_dot = tangent_of_sums(x, w, x_dot, w_dot, *b_dot, **how)
    if activation in (None, "relu"):
        y = _linear_p.bind(x, w, *b, activation=activation, **how)
        return y, sums_dot if activation is None else _relu_tangent(y, sums_dot)
    sums = _linear_p.bind(x, w, *b, activation=None, **how)
    function = functools.partial(activate, activation=activation, dtype=preferred_element_type)
    return jax.jvp(_primitive.keeping_arguments(function), (sums,), (sums_dot,))


def _add_jvp(primals, tangents, *, activation, **params):
    """Adds the tangent of the residual last, as the residual is.

    The derivative of an activation needs the value before the residual is added.
    """
    (x, w, residual, *b), (x_dot, w_dot, residual_dot, *b_dot) = primals, tangents
    if all(type(t) is ad.Zero for t in (x_dot, w_dot, *b_dot)):
        return _linear_add_p.bind(*primals, activation=activation, **params), residual_dot
    if activation is None:
        y = _linear_add_p.bind(*primals, activation=None, **params)
        t = tangent_of_sums(x, w, x_dot, w_dot, *b_dot, **params)
    else:
        y, t = _jvp((x, w, *b), (x_dot, w_dot, *b_dot), activation=activation, **params)
        y = y + residual
    return y, t if type(residual_dot) is ad.Zero else t + residual_dot


# Reverse mode stores the sums or the result, in the dtype of the result, instead of intermediate
# values of the derivative.
@_primitive.keeping_arguments
def _relu_tangent(y: jax.Array, t: jax.Array) -> jax.Array:
    return jnp.where(y > 0, t, 0)


def tangent_of_sums(x, w, x_dot, w_dot, *b_dot, preferred_element_type, **params) -> jax.Array:
    """The tangent of x @ w + b, summed in the accumulator's dtype, as cotangents of b are.

    The products, and the cotangents that are factors of products, have the dtype of the result.
    """
    how = {"preferred_element_type": preferred_element_type, **params}
    wide = _primitive.accumulator(preferred_element_type)
    terms = [
        jnp.broadcast_to(jnp.expand_dims(t.astype(wide), -2), sums_shape(x, w))
        for t in b_dot
        if type(t) is not ad.Zero
    ]
    for left, right in ((x_dot, w), (x, w_dot)):
        if type(left) is not ad.Zero and type(right) is not ad.Zero:
            y = _products.bind_derivative(left, right, **gemm_params(x, w), **how)
            terms.append(in_place(y, x, w).astype(wide))
    return functools.reduce(jnp.add, terms).astype(preferred_element_type)


# Batching


def _batch(operands, axes, *, activation, preferred_element_type, **params):
    operands = [
        each if axis is None else jnp.moveaxis(each, axis, 0)
        for each, axis in zip(operands, axes, strict=True)
    ]
    mapped = [axis is not None for axis in axes]
    how = {"preferred_element_type": preferred_element_type, **params}
    _map_rows(operands, mapped, activation, params["algorithm"])
    if mapped[0] or mapped[1]:
        bind = functools.partial(_linear_p.bind, activation=activation, **how)
        return batched_rows(bind, operands, mapped, [2, 2, 1][: len(operands)])
    # Only b is mapped: multiply once, add to each.
    x, w, b = operands
    wide = _primitive.accumulator(x.dtype)
    y = _linear_p.bind(x, w, activation=None, **how | {"preferred_element_type": wide})
    y = jnp.expand_dims(y, 0)
    b = jnp.expand_dims(b, range(b.ndim - 1, y.ndim - 1)).astype(wide)
    return activate(y + b, activation, preferred_element_type), 0


def _map_rows(
    operands: list[jax.Array], mapped: list[bool], activation: str | None, algorithm: str | None
) -> None:
    """Maps x too, where the results must have the bits of single calls: those of the kernel.

    Else a product of which neither factor is mapped is computed once, and XLA computes the
    activation, which it rounds differently.
    """
    if activation is None or algorithm is None or mapped[0] or mapped[1]:
        return
    size = operands[mapped.index(True)].shape[0]
    operands[0] = jnp.broadcast_to(operands[0], (size, *operands[0].shape))
    mapped[0] = True


def _add_batch(operands, axes, *, activation, preferred_element_type, **params):
    """As the rule of linear. A residual has the batch dim of the result."""
    operands = [
        each if axis is None else jnp.moveaxis(each, axis, 0)
        for each, axis in zip(operands, axes, strict=True)
    ]
    mapped = [axis is not None for axis in axes]
    how = {"activation": activation, **params}
    _map_rows(operands, mapped, activation, params["algorithm"])
    x, w, residual, *b = operands
    if mapped[0] or mapped[1]:
        if not mapped[2]:
            size = (x if mapped[0] else w).shape[0]
            residual = jnp.broadcast_to(residual, (size, *residual.shape))
            mapped[2] = True
        bind = functools.partial(
            _linear_add_p.bind, preferred_element_type=preferred_element_type, **how
        )
        ranks = [2, 2, 2, 1][: len(operands)]
        return batched_rows(bind, [x, w, residual, *b], mapped, ranks, with_rows=(0, 2))
    # Only the residual and b are mapped: multiply once.
    how["preferred_element_type"] = wide = _primitive.accumulator(preferred_element_type)
    if mapped[3:] == [True]:
        y, _ = _batch([x, w, *b], [None, None, 0], **how)
    else:
        b = [each.astype(wide) for each in b]
        y = jnp.expand_dims(_linear_p.bind(x, w, *b, **how), 0)
    return _plus(y, residual.astype(wide)).astype(preferred_element_type), 0


def batched_rows(
    bind: Callable[..., jax.Array],
    operands: Sequence[jax.Array],
    mapped: Sequence[bool],
    ranks: Sequence[int],
    with_rows: Sequence[int] = (0,),
) -> tuple[jax.Array, int]:
    """As `batched`, for operands whose rows have any number of dims if there is no batch dim.

    If then exactly the operands with these dims are mapped, the mapped axis is one more of them.

    Args:
      bind: binds the primitive.
      operands: x and the others. A mapped axis is the first one.
      mapped: whether each operand has a mapped axis.
      ranks: as for `batched`; the rows of x count as one dim.
      with_rows: the indices of the operands that have the rows of x.
    """
    others = [i for i in range(len(operands)) if i not in with_rows]
    if any(operands[i].ndim - mapped[i] > ranks[i] for i in others):
        return batched(bind, operands, mapped, ranks)
    if not any(mapped[i] for i in others) and all(mapped[i] for i in with_rows):
        return bind(*operands), 0
    rows = operands[0].shape[mapped[0] : -1]
    merged = [
        each.reshape(*each.shape[: mapped[i]], math.prod(rows), each.shape[-1])
        if i in with_rows
        else each
        for i, each in enumerate(operands)
    ]
    y, axis = batched(bind, merged, mapped, ranks)
    return y.reshape(y.shape[0], *rows, y.shape[-1]), axis


def batched(
    bind: Callable[..., jax.Array],
    operands: Sequence[jax.Array],
    mapped: Sequence[bool],
    ranks: Sequence[int],
) -> tuple[jax.Array, int]:
    """Binds a primitive to operands with a mapped axis, as batching rules do.

    The mapped axis becomes a batch dim, merged with an existing one.

    Args:
      bind: binds the primitive.
      operands: its operands. A mapped axis is the first one.
      mapped: whether each operand has a mapped axis.
      ranks: the rank of each operand without a mapped axis and a batch dim.
    """
    size = operands[mapped.index(True)].shape[0]
    owns = [each.shape[each.ndim - rank :] for each, rank in zip(operands, ranks, strict=True)]
    batches = [
        each.shape[is_mapped : each.ndim - rank]
        for each, is_mapped, rank in zip(operands, mapped, ranks, strict=True)
    ]
    batch = max(batches, key=len)
    merged = list(operands)
    for i, (is_mapped, own, own_batch) in enumerate(zip(mapped, owns, batches, strict=True)):
        if is_mapped or own_batch:
            lead = (size if is_mapped else 1, *(own_batch or [1] * len(batch)))
            full = jnp.broadcast_to(operands[i].reshape(*lead, *own), (size, *batch, *own))
            merged[i] = full.reshape(math.prod((size, *batch)), *own)
    y = bind(*merged)
    return y.reshape(size, *batch, *y.shape[1:]), 0


ad.primitive_jvps[_linear_p] = _jvp
ad.primitive_jvps[_linear_add_p] = _add_jvp
batching.primitive_batchers[_linear_p] = _batch
batching.primitive_batchers[_linear_add_p] = _add_batch
