"""matmul, dot_general and gemm."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_gpuops import _arguments, _primitive, _products
from jax_gpuops._implementation import (
    NoKernelError,
    dispatch,
    resolve_invariant,
)
from jax_gpuops._products import DimensionNumbers
from jax_gpuops._report import left_to_xla


def matmul(
    a: jax.typing.ArrayLike,
    b: jax.typing.ArrayLike,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    batch_invariant: bool = False,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """Matrix product of two arrays; drop-in for `jax.numpy.matmul`.

    Leading dims are batch dims and broadcast. A matrix that a whole batch shares is not copied.
    Under `jax.jit` a transposed matrix is not copied either, such as `w.T` in `matmul(x, w.T)`.

    Args:
      a: an array of shape (..., m, k) or (k,). The kernels support float16, bfloat16, float32 and
        float64, and on Hopper's tensor cores float8_e4m3fn, float8_e5m2 and int8. They accumulate
        products of 8-bit and 16-bit floats in float32, and products of int8 in int32.
      b: an array of shape (..., k, n) or (k,).
      precision: as in JAX. On tensor cores the kernels multiply float32 in TF32, as XLA does. At
        the highest precision they split float32 into parts on Hopper, and are as accurate as in
        float32. Products of 8-bit floats are accumulated with 13 fraction bits, as in XLA; above
        the default precision, each 128 of them are added to a float32 sum. The kernels accept the
        members of `jax.lax.DotAlgorithmPreset` that they implement.
      preferred_element_type: the dtype of the result. The kernels support the dtype of a and b, and
        float32 for 16-bit floats. For 8-bit floats it must be bfloat16, float16 or float32, and for
        int8 it must be int32.
      out_sharding: as in JAX; the kernels do not support it.
      batch_invariant: True for rows that have the same bits whatever the number of rows, the other
        rows and the batch are. A kernel then runs that accumulates in an order determined only by
        the dtype, the precision and k. A call that no such kernel supports is an error.
      implementation: None for the fastest known on the platform, "cuda", "interpret" (the same
        kernels on the host) or "xla".
      algorithm: None to let the plan choose, or a name from `jax_gpuops.algorithms("matmul")`. A
        derivative that it does not support uses the algorithm of batch-invariant calls.

    Returns:
      An array of shape (..., m, n), without m or n where an operand is a vector.

    Raises:
      TypeError: if shapes do not match or an argument has a type that is not accepted, or if a
        kernel was requested that does not support the dtypes.
      ValueError: if `implementation` or `algorithm` is unknown, does not support the problem or
        cannot run on the platform, or if a kernel was requested and the arrays are explicitly
        sharded. A `batch_invariant` call requests a kernel, and takes no `algorithm`.
    """
    chosen, algorithm = resolve_invariant("matmul", batch_invariant, implementation, algorithm)
    return _jitted_matmul(
        _arguments.as_array("a", a),
        _arguments.as_array("b", b),
        precision=_products.hashable(precision),
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        implementation=chosen,
        algorithm=algorithm,
    )


def dot_general(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike,
    dimension_numbers: DimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
    batch_invariant: bool = False,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """General product of two arrays; drop-in for `jax.lax.dot_general`.

    Flax layers accept it: `nnx.Linear(..., dot_general=jax_gpuops.dot_general)`. The kernels
    multiply batches of matrices; operands that are not laid out so in memory are transposed. Under
    `jax.jit` a transposed array is read in the layout of the array before the transpose.

    Args:
      lhs: an array, dtypes as for `matmul`.
      rhs: an array.
      dimension_numbers: ((contracting dims of lhs, of rhs), (batch dims of lhs, of rhs)).
      precision: as for `matmul`.
      preferred_element_type: as for `matmul`.
      out_sharding: as for `matmul`.
      batch_invariant: as for `matmul`.
      implementation: as for `matmul`.
      algorithm: as for `matmul`.

    Returns:
      An array whose dims are the batch dims, the free dims of lhs, and the free dims of rhs.

    Raises:
      TypeError: as `matmul` does.
      ValueError: as `matmul` does.
    """
    chosen, algorithm = resolve_invariant("matmul", batch_invariant, implementation, algorithm)
    return _jitted_dot_general(
        _arguments.as_array("lhs", lhs),
        _arguments.as_array("rhs", rhs),
        dimension_numbers=_dimension_numbers(dimension_numbers),
        precision=_products.hashable(precision),
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        implementation=chosen,
        algorithm=algorithm,
    )


def gemm(
    a: jax.typing.ArrayLike,
    b: jax.typing.ArrayLike,
    c: jax.typing.ArrayLike | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    transpose_a: bool = False,
    transpose_b: bool = False,
    batch_invariant: bool = False,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """BLAS's gemm: `alpha * op(a) @ op(b) + beta * c`, rounded once.

    As in BLAS, an operand whose factor is 0 is not read: NaN in `c` has no effect if `beta` is 0,
    nor has NaN in `a` or `b` if `alpha` is 0. float32 is multiplied in float32, not TF32, by XLA
    too.

    Args:
      a: an array of shape (..., m, k), or (..., k, m) with `transpose_a`; dtypes as for `matmul`,
        except 8-bit ones.
      b: an array of shape (..., k, n), or (..., n, k) with `transpose_b`.
      c: None, or an array that broadcasts to the result.
      alpha: the factor of the product, a Python number.
      beta: the factor of `c`, a Python number.
      transpose_a: True to transpose the last two dims of a.
      transpose_b: True to transpose the last two dims of b.
      batch_invariant: as for `matmul`; 16-bit arrays then need an `alpha` of 0 or 1 and, with a
        `c` that is read, factors that are not transposed.
      implementation: as for `matmul`.
      algorithm: as for `matmul`.

    Returns:
      An array of shape (..., m, n), of the dtype to which a, b and c promote.

    Raises:
      TypeError: as `matmul` does; also if `alpha` or `beta` is not a Python number, or the arrays
        are not of a floating-point or complex dtype.
      ValueError: as `matmul` does; also if `a` or `b` has fewer than two dims, or if `c` is
        missing with a `beta` other than 0, or has a shape that does not broadcast to that of the
        result.
    """
    arrays = {"a": a, "b": b} | ({} if c is None else {"c": c})
    arrays = {name: _arguments.as_array(name, x) for name, x in arrays.items()}
    for name, x in arrays.items():
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            raise TypeError(
                f"gemm takes floating-point and complex arrays, but {name} is of dtype "
                f"{jnp.result_type(x)}; matmul takes integers"
            )
        if name != "c" and jnp.ndim(x) < 2:
            raise ValueError(
                f"{name} must have at least two dimensions, got shape {jnp.shape(x)}; matmul takes "
                "vectors"
            )
    transpose_a = _arguments.flag("transpose_a", transpose_a)
    transpose_b = _arguments.flag("transpose_b", transpose_b)
    shapes = [jnp.shape(arrays[name]) for name in "ab"]
    if shapes[0][-2 if transpose_a else -1] != shapes[1][-1 if transpose_b else -2]:
        a_form, b_form = "k, m" if transpose_a else "m, k", "n, k" if transpose_b else "k, n"
        raise TypeError(
            f"gemm takes a of shape (..., {a_form}) and b of shape (..., {b_form}), got "
            f"{shapes[0]} and {shapes[1]}"
        )
    alpha = _arguments.factor("alpha", alpha, "multiply the result")
    beta = _arguments.factor("beta", beta, "multiply the result")
    if c is None and beta != 0:
        raise ValueError(f"beta={beta} needs the argument c, which is None")
    chosen, algorithm = resolve_invariant("matmul", batch_invariant, implementation, algorithm)
    return _jitted_gemm(
        *arrays.values(),
        alpha=alpha,
        beta=beta,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        implementation=chosen,
        algorithm=algorithm,
    )


# Arguments


def _dimension_numbers(numbers: Any) -> Any:
    """Returns the dimension numbers of `dot_general` as tuples of ints.

    Raises:
      TypeError: if they do not have the required form.
    """
    try:
        (a, b), (a_batch, b_batch) = numbers
        contract, batch = (
            tuple(
                tuple(map(operator.index, dims if isinstance(dims, Iterable) else (dims,)))
                for dims in pair
            )
            for pair in ((a, b), (a_batch, b_batch))
        )
    except (TypeError, ValueError):
        raise TypeError(
            "dimension_numbers must be ((contracted dims of lhs, of rhs), (batch dims of lhs, of "
            f"rhs)), each a sequence of ints or an int, got {numbers!r:.100}"
        ) from None
    return contract, batch


# From the public functions to the primitive, under jit, so that reshapes around it cost nothing.


def _dot_general(
    lhs,
    rhs,
    *,
    dimension_numbers,
    precision,
    preferred_element_type,
    out_sharding,
    implementation,
    algorithm,
):
    named = _products.named_algorithm(algorithm, precision, lhs)

    def xla():
        return lax.dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            out_sharding=out_sharding,
        )

    def kernel():
        _products.check_sharding(lhs, rhs, out_sharding=out_sharding)
        result = jax.eval_shape(xla)  # raises as JAX does
        return _products.bind_product(
            _products.gemm_p,
            lhs,
            rhs,
            dimension_numbers=dimension_numbers,
            alpha=1.0,
            beta=0.0,
            precision=precision,
            preferred_element_type=result.dtype,
            implementation=implementation,
            algorithm=named,
        )

    return dispatch("dot_general", [lhs, rhs], implementation, algorithm, kernel, xla)


def _matmul(
    a,
    b,
    *,
    precision,
    preferred_element_type,
    out_sharding,
    implementation,
    algorithm,
):
    named = _products.named_algorithm(algorithm, precision, a, b)

    def xla():
        return jnp.matmul(
            a,
            b,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )

    def kernel():
        _products.check_sharding(a, b, out_sharding=out_sharding)
        result = jax.eval_shape(xla)  # raises as JAX does
        if preferred_element_type is not None and a.dtype != b.dtype:
            raise NoKernelError(
                "with preferred_element_type, matmul kernels require operands of the same dtype, "
                f"got {a.dtype} and {b.dtype}",
                TypeError,
            )
        dtype = jnp.result_type(a, b)
        product = _Broadcast.of(a.shape, b.shape)
        if result.weak_type:  # a product with a Python number stays weakly typed, unlike astype
            one = dtype.type(1).item()
            factors = [x if x.dtype == dtype else x * one for x in (a, b)]
        else:
            factors = [x.astype(dtype) for x in (a, b)]
        y = _products.bind_product(
            _products.gemm_p,
            *product.squeeze(*factors),
            dimension_numbers=product.dimension_numbers,
            alpha=1.0,
            beta=0.0,
            precision=precision,
            preferred_element_type=result.dtype,
            implementation=implementation,
            algorithm=named,
        )
        return lax.transpose(y, product.order)

    return dispatch("matmul", [a, b], implementation, algorithm, kernel, xla)


def _gemm(a, b, c=None, *, alpha, beta, transpose_a, transpose_b, implementation, algorithm):
    dtype = jnp.result_type(a, b)
    result_dtype = jnp.result_type(dtype, *([] if c is None else [c]))
    product = _Broadcast.of(a.shape, b.shape, transpose_a=transpose_a, transpose_b=transpose_b)
    a, b = product.squeeze(a.astype(dtype), b.astype(dtype))
    params = {
        "dimension_numbers": product.dimension_numbers,
        "precision": (lax.Precision.HIGHEST, lax.Precision.HIGHEST),
        "preferred_element_type": result_dtype,
        "alpha": alpha,
        "beta": beta,
    }
    y = jax.eval_shape(functools.partial(_products.reference, **params), a, b)  # raises as JAX does
    shape = tuple(y.shape[d] for d in product.order)
    addends = []
    if c is not None:
        if not _arguments.broadcasts(c.shape, shape):
            raise ValueError(
                f"c of shape {c.shape} does not broadcast to the result's shape {shape}"
            )
        if beta != 0:
            c = jnp.broadcast_to(c.astype(result_dtype), shape)
            addends = [lax.transpose(c, np.argsort(product.order))]

    def xla():
        return _products.reference(a, b, *addends, **params)

    def kernel():
        _products.check_sharding(a, b, *addends)
        results = _products.RESULTS.get(dtype.name, ())
        if results and result_dtype.name not in results:
            raise NoKernelError(
                f"gemm kernels do not support a result of dtype {result_dtype} for a and b of "
                f"dtype {dtype}, only {' or '.join(results)}",
                TypeError,
            )
        named = _products.named_algorithm(algorithm, lax.Precision.HIGHEST, a, b)
        return _products.bind_product(
            _products.gemm_p,
            a,
            b,
            *addends,
            implementation=implementation,
            algorithm=named,
            **params,
        )

    def without_product():
        # Sharded as the product in an explicit mesh, and varying as it does in a jax.shard_map.
        is_explicit = any(map(_primitive.has_explicit_sharding, (a, b)))
        zeros = jnp.zeros_like(y) if is_explicit else jnp.zeros(y.shape, y.dtype)
        zeros, *_ = _primitive.vary_alike(zeros, a, b)
        return zeros + beta * addends[0] if addends else zeros

    operands = [a, b, *addends]
    if alpha == 0:
        result = left_to_xla("gemm", operands, "alpha is 0", without_product)
    else:
        result = dispatch("gemm", operands, implementation, algorithm, kernel, xla)
    return lax.transpose(result, product.order)


_STATIC = ("implementation", "algorithm")
_OPTIONS = (
    *("precision", "preferred_element_type", "out_sharding"),
    *_STATIC,
)
_FACTORS = ("alpha", "beta", "transpose_a", "transpose_b")
_jitted_dot_general = _primitive.jit("dot_general", _dot_general, "dimension_numbers", *_OPTIONS)
_jitted_matmul = _primitive.jit("matmul", _matmul, *_OPTIONS)
_jitted_gemm = _primitive.jit("gemm", _gemm, *_FACTORS, *_STATIC)


@dataclasses.dataclass(frozen=True)
class _Broadcast:
    """A product of batches of matrices that broadcast, as a dot_general.

    A batch dim of both operands becomes a batch dim of the dot_general. A batch dim of only one
    operand becomes a free dim of it, so nothing is copied.

    Attributes:
      a_squeezed: the dims of size 1 to squeeze from a.
      b_squeezed: the dims of size 1 to squeeze from b.
      dimension_numbers: the dimension numbers of the dot_general.
      order: the permutation that transposes its result to the result of the product.
    """

    a_squeezed: tuple[int, ...]
    b_squeezed: tuple[int, ...]
    dimension_numbers: DimensionNumbers
    order: tuple[int, ...]

    @classmethod
    def of(
        cls,
        a_shape: Sequence[int],
        b_shape: Sequence[int],
        *,
        transpose_a: bool = False,
        transpose_b: bool = False,
    ) -> _Broadcast:
        a_batch_shape, b_batch_shape = a_shape[:-2], b_shape[:-2]
        ndim = max(len(a_batch_shape), len(b_batch_shape))
        a_start, b_start = ndim - len(a_batch_shape), ndim - len(b_batch_shape)
        both, a_only, b_only = [], [], []  # dims of the result
        a_squeezed, b_squeezed = [], []
        for d in range(ndim):
            a_size = a_batch_shape[d - a_start] if d >= a_start else None
            b_size = b_batch_shape[d - b_start] if d >= b_start else None
            if a_size is not None and b_size is not None and a_size == b_size:
                both.append(d)
            elif a_size is None or (b_size is not None and a_size == 1):
                b_only.append(d)
                a_squeezed += [] if a_size is None else [d - a_start]
            elif b_size is None or b_size == 1:
                a_only.append(d)
                b_squeezed += [] if b_size is None else [d - b_start]
            else:
                raise ValueError(
                    f"batch dimensions do not broadcast: operands of shapes {tuple(a_shape)} and "
                    f"{tuple(b_shape)}"
                )
        a_dims = [d for d in range(ndim) if d in both or d in a_only]
        b_dims = [d for d in range(ndim) if d in both or d in b_only]
        a_contract = len(a_dims) + (len(a_shape) > 1 and not transpose_a)
        b_contract = len(b_dims) + (len(b_shape) > 1 and transpose_b)
        rows = [ndim] if len(a_shape) > 1 else []
        cols = [ndim + len(rows)] if len(b_shape) > 1 else []
        return cls(
            tuple(a_squeezed),
            tuple(b_squeezed),
            (
                ((a_contract,), (b_contract,)),
                (tuple(map(a_dims.index, both)), tuple(map(b_dims.index, both))),
            ),
            tuple(int(d) for d in np.argsort([*both, *a_only, *rows, *b_only, *cols])),
        )

    def squeeze(self, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.squeeze(a, self.a_squeezed), lax.squeeze(b, self.b_squeezed)
