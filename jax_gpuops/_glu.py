"""glu: a gated linear unit, the elementwise product of two dense layers, one with activation."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching

from jax_gpuops import _arguments, _linear, _primitive, _products
from jax_gpuops._implementation import BATCH_INVARIANT, NoKernelError, dispatch, resolve_invariant


def glu(
    x: jax.typing.ArrayLike,
    w_gate: jax.typing.ArrayLike,
    w_up: jax.typing.ArrayLike,
    *,
    activation: str | None = "silu",
    precision: Any = None,
    preferred_element_type: Any = None,
    batch_invariant: bool = False,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """A gated linear unit: `activation(x @ w_gate) * (x @ w_up)`, in one kernel.

    With "silu" it is SwiGLU, with "gelu" GEGLU (Shazeer, 2020). The fused kernel computes both
    products, applies the activation and the gate to the float32 sums, and rounds once. It runs only
    on Hopper's tensor cores, for float16 and bfloat16. If a kernel is requested for other problems,
    two matmul kernels compute the products, and XLA the gate. XLA alone computes the formula in the
    dtype of the result.

    Under differentiation the two products are computed separately and stored.

    Args:
      x: an array of shape (..., k); dtypes as for `matmul`.
      w_gate: an array of shape (k, n). The fused kernel needs k and n to be multiples of 8.
      w_up: an array of the same shape.
      activation: as for `linear`.
      precision: as for `matmul`.
      preferred_element_type: the dtype of the result; None for the dtype to which x, w_gate and
        w_up promote, the only one that the fused kernel supports.
      batch_invariant: as for `matmul`; only the fused kernel supports it.
      implementation: as for `matmul`.
      algorithm: None, or "tensor_core".

    Returns:
      An array of shape (..., n).

    Raises:
      TypeError: as `linear` does.
      ValueError: as `linear` does.
    """
    arrays = {"x": x, "w_gate": w_gate, "w_up": w_up}
    arrays = {name: _arguments.as_array(name, each) for name, each in arrays.items()}
    _linear.check_operands("glu", arrays)
    if jnp.shape(arrays["w_up"]) != jnp.shape(arrays["w_gate"]):
        raise ValueError(
            f"w_gate and w_up must have the same shape, got {jnp.shape(arrays['w_gate'])} and "
            f"{jnp.shape(arrays['w_up'])}"
        )
    _linear.check_activation(activation)
    chosen, algorithm = resolve_invariant("matmul", batch_invariant, implementation, algorithm)
    return _jitted_glu(
        *arrays.values(),
        activation=activation,
        precision=_products.hashable(precision),
        preferred_element_type=preferred_element_type,
        implementation=chosen,
        algorithm=algorithm,
    )


def _glu(
    x, gate, up, *, activation, precision, preferred_element_type, implementation, algorithm
) -> jax.Array:
    dtype = jnp.result_type(x, gate, up)
    result_dtype = _linear.dtype_of_result(preferred_element_type, dtype)
    x, gate, up = (each.astype(dtype) for each in (x, gate, up))

    def xla():
        y, factor = (
            jnp.matmul(x, w, precision=precision, preferred_element_type=result_dtype)
            for w in (gate, up)
        )
        return _linear.activated(y, activation) * factor

    def kernel():
        _products.check_sharding(x, gate, up)
        rows = jnp.atleast_2d(x)  # its dims stay as they are: see `linear`
        how = {
            "precision": precision,
            "implementation": implementation,
            "algorithm": "tensor_core" if algorithm == BATCH_INVARIANT else algorithm,
        }
        gated = {"activation": activation, "preferred_element_type": result_dtype}
        try:
            y = _products.bind_product(_glu_p, rows, gate, up, **gated, **how)
        except NoKernelError:
            if implementation is None or algorithm is not None:
                raise
            wide = _primitive.accumulator(result_dtype)
            y, factor = (
                _products.bind_product(
                    _products.gemm_p,
                    rows,
                    w,
                    **_linear.gemm_params(rows, w),
                    preferred_element_type=wide,
                    **how,
                )
                for w in (gate, up)
            )
            function = functools.partial(_gated, activation=activation, dtype=result_dtype)
            y = _primitive.keeping_arguments(function)(y, factor)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    return dispatch("glu", [x, gate, up], implementation, algorithm, kernel, xla)


_jitted_glu = _primitive.jit(
    "glu",
    _glu,
    *("activation", "precision", "preferred_element_type", "implementation", "algorithm"),
)


# The primitive: activation(x @ gate) * (x @ up). x is (..., k), and gate and up are (k, n). If both
# are (batch, k, n), x is (m, k) or (batch, m, k).


def _gated(gate: jax.Array, up: jax.Array, *, activation: str | None, dtype: Any) -> jax.Array:
    """Applies the gate in the accumulator's dtype, and rounds to `dtype`."""
    wide = _primitive.accumulator(dtype)
    factor = _linear.activated(gate.astype(wide), activation)
    return (factor * up.astype(wide)).astype(dtype)


def _reference(x, gate, up, *, activation, precision, preferred_element_type) -> jax.Array:
    """The primitive in JAX's operations."""
    wide = _primitive.accumulator(preferred_element_type)
    numbers = _linear.dimension_numbers(x, gate)
    products = (
        _linear.in_place(lax.dot_general(x, w, numbers, precision, wide), x, w) for w in (gate, up)
    )
    return _gated(*products, activation=activation, dtype=preferred_element_type)


def _plain(x, gate, up, *, activation, **params) -> jax.Array:
    """The formula as users write it, in the dtype of the result."""
    y, factor = (_linear.plain_product(x, w, **params) for w in (gate, up))
    return _linear.activated(y, activation) * factor


def _problem(x, gate, up, **params) -> dict[str, Any]:
    del up
    return _linear.problem(x, gate, **params) | {"gated": 1}


def _call(
    launch: _primitive.Launch, x, gate, up, *, activation, precision, preferred_element_type
) -> jax.Array:
    del preferred_element_type
    (result,) = launch.results
    y, _ = launch.custom_call(
        "jax_gpuops_glu_v1",
        [_linear.in_rows(x, gate), gate, up],
        [
            jax.eval_shape(lambda y: _linear.in_rows(y, gate), result),
            jax.ShapeDtypeStruct((0,), np.uint8),
        ],
        **_linear.attributes(activation, precision),
    )
    return y.reshape(result.shape)


_glu_p = _primitive.primitive(
    _primitive.Kernel(
        name="gpuops_glu",
        op="matmul",
        reference=_reference,
        plain=_plain,
        problem=_problem,
        call=_call,
    )
)


# Derivatives: those of two products, and of the gate.


def _jvp(primals, tangents, *, activation, preferred_element_type, **params):
    (x, gate, up), (x_dot, *factor_dots) = primals, tangents
    how = {"preferred_element_type": preferred_element_type, **params}
    products, product_dots = [], []
    for factor, factor_dot in zip((gate, up), factor_dots, strict=True):
        y = _products.bind_derivative(x, factor, **_linear.gemm_params(x, factor), **how)
        products.append(_linear.in_place(y, x, factor))
        if type(x_dot) is ad.Zero and type(factor_dot) is ad.Zero:
            product_dots.append(jnp.zeros_like(products[-1]))
        else:
            product_dots.append(_linear.tangent_of_sums(x, factor, x_dot, factor_dot, **how))
    function = functools.partial(_gated, activation=activation, dtype=preferred_element_type)
    return jax.jvp(_primitive.keeping_arguments(function), products, product_dots)


# Batching


def _batch(operands, axes, *, activation, preferred_element_type, **params):
    """As the rule of linear. If only one of gate and up is mapped, the other is broadcast."""
    how = {"preferred_element_type": preferred_element_type, **params}
    size = next(x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None)
    x, *factors = (
        each if axis is None else jnp.moveaxis(each, axis, 0)
        for each, axis in zip(operands, axes, strict=True)
    )
    mapped = [axis is not None for axis in axes]
    if mapped[1] or mapped[2]:
        factors = [
            each if is_mapped else jnp.broadcast_to(each, (size, *each.shape))
            for each, is_mapped in zip(factors, mapped[1:], strict=True)
        ]
        mapped[1:] = [True, True]
    return _linear.batched_rows(
        lambda *xs: _glu_p.bind(*xs, activation=activation, **how),
        [x, *factors],
        mapped,
        [2, 2, 2],
    )


ad.primitive_jvps[_glu_p] = _jvp
batching.primitive_batchers[_glu_p] = _batch
