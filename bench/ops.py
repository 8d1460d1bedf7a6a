"""The ops that the benchmark knows. A new op is added to `OPS`, and nowhere else."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import jax_gpuops
from bench import check
from bench.problem import Problem, Shape

SHORT_DTYPES = {
    "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64",
    "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64",
}  # fmt: skip
"""Short names of dtypes, for the command line and the tables."""

FAMILIES = ("softmax", "reduce", "transpose", "matmul")


def normal(key: jax.Array, shape: Shape, dtype: np.dtype) -> jax.Array:
    """Draws independent normal numbers, or integers between -100 and 100."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jax.random.normal(key, shape, dtype)
    if dtype == jnp.bool_:
        return jax.random.bernoulli(key, shape=shape)
    lowest = 0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -100
    return jax.random.randint(key, shape, lowest, 100, dtype)


def factors(key: jax.Array, shape: Shape, dtype: np.dtype) -> jax.Array:
    """Draws factors whose product neither overflows nor vanishes, however many they are.

    The logarithm of the product spreads so far that overflow is eight standard deviations away. Of
    many factors it comes from a few: were all of them near 1, the exact products would lie just
    below the middle between two floats again and again, and all roundings would lean to one side.
    The others are 1 or -1; the sign still tells if one is left out.
    """
    if not jnp.issubdtype(dtype, jnp.inexact):
        return normal(key, shape, dtype)
    largest = min(float(jnp.finfo(dtype).max), float(jnp.finfo(jnp.float32).max))
    spread = math.log(largest) / 8 / math.sqrt(max(1, math.prod(shape)))
    wider = max(spread, 1 / 8)
    magnitudes, choice, signs = jax.random.split(key, 3)
    logarithms = wider * jax.random.normal(magnitudes, shape, jnp.float32)
    chosen = jax.random.bernoulli(choice, (spread / wider) ** 2, shape)
    signs = jax.random.rademacher(signs, shape, jnp.float32)
    return (signs * jnp.exp(jnp.where(chosen, logarithms, 0.0))).astype(dtype)


def one_array(shape: Shape) -> list[Shape]:
    """The op takes one array."""
    return [shape]


def two_matrices(shape: Shape) -> list[Shape]:
    """The op takes A (..., M, K) and B (..., K, N); `shape` is (..., M, K, N)."""
    *batch, m, k, n = shape
    return [(*batch, m, k), (*batch, k, n)]


def three_matrices(shape: Shape) -> list[Shape]:
    """The op takes A, B and a C (M, N) to add to."""
    m, _, n = shape
    return [*two_matrices(shape), (m, n)]


@dataclasses.dataclass(frozen=True)
class Op:
    """What the benchmark must know of an op.

    Attributes:
      family: the folder of kernels, as `jax_gpuops.algorithms` takes it.
      upstream: the function of JAX with the same arguments.
      error: how a result is judged, from `bench.check`.
      limit: what bounds the speed: the copy or read bandwidth of the memory, or arithmetic.
      options: the keyword arguments that a problem may set, with their defaults.
      operands: maps the shape of a problem to those of the operands.
      fixed: further keyword arguments, from the problem.
      draw: makes an operand from a random key, shape and dtype.
    """

    family: str
    upstream: Callable[..., jax.Array]
    error: Callable[..., check.Errors]
    limit: Literal["copy", "read", "matmul"]
    options: dict[str, Any]
    operands: Callable[[Shape], list[Shape]] = one_array
    fixed: Callable[[Problem], dict[str, Any]] = lambda problem: {}
    draw: Callable[[jax.Array, Shape, np.dtype], jax.Array] = normal

    @property
    def unit(self) -> str:
        """The unit of the op's rate."""
        return "TFLOP/s" if self.limit == "matmul" else "GB/s"


def _gemm(a, b, c, *, alpha, beta):
    return alpha * jnp.matmul(a, b, precision="highest") + beta * c


def _contract_last_with_first(problem: Problem) -> dict[str, Any]:
    batch = tuple(range(len(problem.shape) - 3))
    last = len(batch) + 1
    return {"dimension_numbers": (((last,), (last - 1,)), (batch, batch))}


_softmax = functools.partial(Op, family="softmax", limit="copy", options={"axis": -1})
_reduce = functools.partial(Op, family="reduce", limit="read", options={"axis": None})
_matmul = functools.partial(Op, family="matmul", limit="matmul", error=check.matmul)

OPS: dict[str, Op] = {
    "softmax": _softmax(upstream=jax.nn.softmax, error=check.softmax),
    "log_softmax": _softmax(upstream=jax.nn.log_softmax, error=check.logarithm),
    "logsumexp": _softmax(upstream=jax.nn.logsumexp, error=check.logarithm, limit="read"),
    "sum": _reduce(upstream=jnp.sum, error=check.total),
    "mean": _reduce(upstream=jnp.mean, error=check.total),
    "prod": _reduce(upstream=jnp.prod, error=check.product, draw=factors),
    "max": _reduce(upstream=jnp.max, error=check.exact),
    "min": _reduce(upstream=jnp.min, error=check.exact),
    "argmax": _reduce(upstream=jnp.argmax, error=check.exact),
    "argmin": _reduce(upstream=jnp.argmin, error=check.exact),
    "transpose": Op(
        family="transpose",
        upstream=jnp.transpose,
        error=check.exact,
        limit="copy",
        options={"axes": None},
    ),
    "matmul": _matmul(upstream=jnp.matmul, options={"precision": None}, operands=two_matrices),
    "dot_general": _matmul(
        upstream=jax.lax.dot_general,
        options={"precision": None},
        operands=two_matrices,
        fixed=_contract_last_with_first,
    ),
    "gemm": _matmul(
        upstream=_gemm,
        options={"alpha": 1.5, "beta": 0.5},
        operands=three_matrices,
    ),
}


def ours(op: str) -> Callable[..., jax.Array]:
    """Returns the public function of jax_gpuops."""
    return getattr(jax_gpuops, op)


def keywords(problem: Problem) -> dict[str, Any]:
    """Returns the keyword arguments of a problem, for ours and for XLA."""
    op = OPS[problem.op]
    return {**problem.options, **op.fixed(problem)}


def make(op: str, shape: Shape, dtype: str, **options: Any) -> Problem:
    """Returns a problem with the op's defaults for what `options` leaves out.

    Raises:
      ValueError: if the op has no such option, or cannot have such a shape.
    """
    defaults = OPS[op].options
    if unknown := options.keys() - defaults.keys() - {"series", "size"}:
        raise ValueError(f"{op} has no option {', '.join(sorted(unknown))}")
    if OPS[op].limit == "matmul" and len(shape) < 3:
        raise ValueError(f"{op} takes the shape MxKxN (batch dims before it), got {shape}")
    series, size = options.pop("series", None), options.pop("size", None)
    if defaults.get("precision", ...) is None and dtype in ("float32", "float64"):
        defaults = {**defaults, "precision": "highest"}
    return Problem(op, shape, dtype, {**defaults, **options}, series, size)


def floating_point_operations(problem: Problem) -> int:
    """Returns the arithmetic of a matrix product: a multiplication and an addition each count."""
    return 2 * math.prod(problem.shape)
