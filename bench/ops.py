"""The ops that the benchmark knows. A new op is added to `OPS`, and nowhere else."""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import jax_gpuops
from bench import check
from bench.problem import Floor, Problem, Shape

SHORT_DTYPES = {
    "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64",
    "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64",
    "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2",
}  # fmt: skip
"""Short names of dtypes, for the command line and the tables."""

FAMILIES = ("softmax", "reduce", "transpose", "matmul")

ON_CHIP_BYTES = 60_000_000
"""The approximate capacity of an H200's L2 cache, and of all its multiprocessors together."""


def normal(key: jax.Array, shape: Shape, dtype: np.dtype) -> jax.Array:
    """Draws independent normal numbers, or integers between -100 and 100."""
    if jnp.issubdtype(dtype, jnp.inexact):
        drawn = jnp.float32 if dtype.itemsize == 1 else dtype
        return jax.random.normal(key, shape, drawn).astype(dtype)
    if dtype == jnp.bool_:
        return jax.random.bernoulli(key, shape=shape)
    lowest = 0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -100
    return jax.random.randint(key, shape, lowest, 100, dtype)


def factors(key: jax.Array, shape: Shape, dtype: np.dtype) -> jax.Array:
    """Draws factors whose product neither overflows nor underflows, whatever their number.

    The standard deviation of the logarithm of the product is such that overflow is eight of them
    away. Of many factors only a few differ from 1 and -1: if all were near 1, the exact products
    would often be just below the midpoint of two floats, and the roundings would be biased. The
    sign of the other factors still shows if one is left out.
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


def labels(key: jax.Array, shape: Shape, dtype: np.dtype, *, classes: int) -> jax.Array:
    """Draws the index of a class for each row."""
    return jax.random.randint(key, shape, 0, classes, dtype)


def cotangents(key: jax.Array, shape: Shape, dtype: np.dtype) -> jax.Array:
    """Draws normal numbers around 1; around 0, a missing term could pass as a rounding error."""
    return 1 + jax.random.normal(key, shape, dtype)


def masks(key: jax.Array, shape: Shape, dtype: np.dtype) -> jax.Array:
    """Draws a causal mask with random holes, but none in the first column: no row is empty."""
    kept = jax.random.bernoulli(key, 7 / 8, shape).at[..., 0].set(True)
    return jnp.tril(kept).astype(dtype)


def paddings(key: jax.Array, shape: Shape, dtype: np.dtype) -> jax.Array:
    """Draws the mask of sequences in a batch whose lengths are at least half the longest."""
    longest = shape[-1]
    lengths = jax.random.randint(key, (*shape[:-1], 1), -(-longest // 2), longest + 1)
    return (jnp.arange(longest) < lengths).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand of an op, and how to draw it from a random key, its shape and its dtype."""

    shape: Shape
    dtype: str
    draw: Callable[[jax.Array, Shape, np.dtype], jax.Array] = normal


def draw(operands: Sequence[Operand], seed: str) -> list[jax.Array]:
    """Draws operands on the device, the same ones for the same seed."""

    @jax.jit
    def all_of(seed_key):
        keys = jax.random.split(seed_key, len(operands))
        return [
            each.draw(k, each.shape, jnp.dtype(each.dtype))
            for k, each in zip(keys, operands, strict=True)
        ]

    return all_of(key(seed))


def key(seed: str) -> jax.Array:
    """Returns the random key for a text, such as that of a problem."""
    return jax.random.key(zlib.crc32(seed.encode()), impl="rbg")


def one_array(problem: Problem) -> list[Operand]:
    """The op takes one array."""
    return [Operand(problem.shape, problem.dtype)]


def array_of_factors(problem: Problem) -> list[Operand]:
    """The op takes one array, and multiplies."""
    return [Operand(problem.shape, problem.dtype, factors)]


def array_and_mask(problem: Problem) -> list[Operand]:
    """The op takes an array and, with the option `where`, a mask.

    The mask is the same for all matrices of the array or, for "padding", for the rows of a batch.
    """
    where = problem.options.get("where")
    if not where:
        return one_array(problem)
    if where == "padding":
        batch, *others, length = problem.shape
        mask = Operand((batch, *(1 for _ in others), length), "bool", paddings)
    else:
        mask = Operand(problem.shape[-2:], "bool", masks)
    return [*one_array(problem), mask]


def array_cotangent_and_mask(problem: Problem) -> list[Operand]:
    """The op is a derivative: it takes the cotangent of the result, too."""
    x, *mask = array_and_mask(problem)
    return [x, Operand(problem.shape, problem.dtype, cotangents), *mask]


def array_and_labels(problem: Problem) -> list[Operand]:
    """The op takes rows, and the index of an element of each."""
    *rows, classes = problem.shape
    draw = functools.partial(labels, classes=classes)
    return [*one_array(problem), Operand(tuple(rows), "int32", draw)]


def two_matrices(problem: Problem) -> list[Operand]:
    """The op takes A (..., M, K) and B (..., K, N); the shape is (..., M, K, N)."""
    *batch, m, k, n = problem.shape
    return [Operand((*batch, m, k), problem.dtype), Operand((*batch, k, n), problem.dtype)]


def two_matrices_of_rows(problem: Problem) -> list[Operand]:
    """The op takes A (..., M, K) and B (..., N, K); the shape is (..., M, K, N)."""
    *batch, m, k, n = problem.shape
    return [Operand((*batch, m, k), problem.dtype), Operand((*batch, n, k), problem.dtype)]


def two_matrices_of_columns(problem: Problem) -> list[Operand]:
    """The op takes A (..., K, M) and B (..., K, N); the shape is (..., M, K, N)."""
    *batch, m, k, n = problem.shape
    return [Operand((*batch, k, m), problem.dtype), Operand((*batch, k, n), problem.dtype)]


KINDS_OF_SCALES = ("tensor", "vector", "blocks")


def with_scales(matrices: Callable[[Problem], list[Operand]]) -> Callable[..., list[Operand]]:
    """The op takes two matrices, with B in row-major or column-major order, and scales of both."""

    def operands(problem: Problem) -> list[Operand]:
        a, b = matrices(problem)
        *batch, m, k, n = problem.shape
        depth, cols = -(-k // 128), -(-n // 128)
        dims = [((1, 1), (1, 1)), ((m, 1), (1, n)), ((m, depth), (depth, cols))]
        of_a, of_b = dims[KINDS_OF_SCALES.index(problem.options["scales"])]
        of_b = of_b if matrices is two_matrices else of_b[::-1]
        return [a, b, *(Operand((*batch, *each), "float32", _scales) for each in (of_a, of_b))]

    return operands


def _scales(key: jax.Array, shape: Shape, dtype: np.dtype) -> jax.Array:
    """Draws scales that bring sums of some thousands of products of int8 into its range."""
    return jax.random.uniform(key, shape, dtype, 0.005, 0.02)


def three_matrices(problem: Problem) -> list[Operand]:
    """The op takes A, B and a C (M, N) to add to."""
    m, _, n = problem.shape
    return [*two_matrices(problem), Operand((m, n), problem.dtype)]


def dense_layer(problem: Problem) -> list[Operand]:
    """The op takes x (M, K), weights (K, N) that keep the magnitude of x, and a bias (N,).

    With the option `residual` it takes a residual (M, N) too.
    """
    m, k, n = problem.shape
    draw = functools.partial(_weights, depth=k)
    layer = [
        Operand((m, k), problem.dtype),
        Operand((k, n), problem.dtype, draw),
        Operand((n,), problem.dtype),
    ]
    residual = Operand((m, n), problem.dtype)
    return [*layer, residual] if problem.options.get("residual") else layer


def gated_layer(problem: Problem) -> list[Operand]:
    """The op takes x (M, K), and two factors (K, N)."""
    x, weights, _ = dense_layer(problem)
    return [x, weights, weights]


def _weights(key: jax.Array, shape: Shape, dtype: np.dtype, *, depth: int) -> jax.Array:
    return (jax.random.normal(key, shape, jnp.float32) / math.sqrt(depth)).astype(dtype)


# The timed part, if it is not just a call of the op's function with the operands: of `prepare` and
# `apply` of an `Op`, only the second is timed.


def prepare_nothing(function, *operands):
    """Returns the operands: nothing runs before the timed part."""
    del function
    return operands


def _apply(function, *operands):
    return function(*operands)


def _apply_masked(function, x, where=None):
    return function(x, where=where)


def _apply_layer(function, x, w, b, residual=None):
    return function(x, w, b, residual=residual)


def _run_forward(function, x, dy, where=None):
    """Returns the pullback, which contains the residuals, and the cotangent."""
    _, pullback = jax.vjp(lambda x: function(x, where=where), x)
    return pullback, dy


def _run_backward(function, pullback, dy):
    del function
    (dx,) = pullback(dy)
    return dx


def _produce_logits(h, labels=None):
    """Produces logits as in a network: an array in memory that only the loss reads."""
    del labels
    return jax.lax.optimization_barrier(2 * h)


def _value_and_grad(function, h, labels):
    def mean_loss(logits):
        return jnp.mean(function(logits, labels))

    return jax.value_and_grad(mean_loss)(_produce_logits(h))


# The bytes that an op must move, given the problem, its operands and its results


def _each_once(problem: Problem, operands, results) -> int:
    """Operands are read once, results are written once."""
    del problem
    return sum(each.size * each.dtype.itemsize for each in [*operands, *results])


def _each_once_or_long_rows_twice(problem: Problem, operands, results) -> int:
    """A row above `ON_CHIP_BYTES` does not fit on the chip, and is read again for the result."""
    x, *_ = operands
    moved = _each_once(problem, operands, results)
    row_bytes = check.row_length(problem, x) * x.dtype.itemsize
    return moved + x.size * x.dtype.itemsize if row_bytes > ON_CHIP_BYTES else moved


def _two_reads_one_write(problem: Problem, operands, results) -> int:
    """Logits are read for the loss, and read again for the gradient that overwrites them."""
    del problem, results
    logits, *_ = operands
    return 3 * logits.size * logits.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Op:
    """The description of an op for the benchmark: a function of jax_gpuops, or a derivative of one.

    Attributes:
      family: the op family, as `jax_gpuops.algorithms` takes it.
      upstream: the function of JAX with the same arguments.
      error: the error function of `bench.check`.
      limit: the bound of the speed: the copy or read bandwidth of the memory, or arithmetic.
      options: the options of problems, with defaults: keyword arguments of the function, `where`
        for a mask (True or "padding"), `residual` for an array to add, and `scales` for the kind of
        scales: "tensor", "vector" or "blocks". The default None means the function's own default.
      public: the name of the function in jax_gpuops; None for the name of the op.
      operands: maps a problem to the operands.
      fixed: maps a problem to further keyword arguments.
      prepare: maps the function and the operands to the arguments of `apply`, untimed.
      apply: maps the function and these arguments to the results; this is timed.
      producer: a part of `apply`, as a function of the operands, that does not belong to the op; it
        is timed alone, and its time is subtracted.
      bytes: maps the problem, the operands and the results to the bytes that must be moved.
      products: the number of matrix products, each with the sizes of the shape.
    """

    family: str
    upstream: Callable[..., jax.Array]
    error: Callable[..., check.Errors]
    limit: Literal["copy", "read", "matmul"]
    options: dict[str, Any]
    public: str | None = None
    operands: Callable[[Problem], list[Operand]] = one_array
    fixed: Callable[[Problem], dict[str, Any]] = lambda problem: {}
    prepare: Callable[..., tuple] = prepare_nothing
    apply: Callable[..., Any] = _apply
    producer: Callable[..., jax.Array] | None = None
    bytes: Callable[..., int] = _each_once
    products: int = 1

    @property
    def unit(self) -> str:
        """The unit of the op's rate."""
        return "TFLOP/s" if self.limit == "matmul" else "GB/s"


def _with_scale_and_causal(function: Callable) -> Callable:
    """Adds `scale` and `causal` to a function of `jax.nn`, in the fastest way of plain JAX.

    It multiplies by the scale, and selects -inf by the causal mask: XLA fuses both into its
    softmax. `where` remains the argument of `jax.nn`.
    """

    def upstream(x, axis=-1, where=None, *, scale=None, causal=None):
        if scale is not None:
            x = scale * x
        if causal:
            x = jnp.where(jnp.tri(*x.shape[-2:], dtype=bool), x, -jnp.inf)
        return function(x, axis=axis, where=where)

    return upstream


def _cross_entropy(logits, labels):
    """The formula of `optax.softmax_cross_entropy_with_integer_labels`, over the last axis."""
    label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - label_logits


def _gemm(a, b, c, *, alpha, beta):
    return alpha * jnp.matmul(a, b, precision="highest") + beta * c


def _linear(x, w, b, *, activation=None, residual=None, precision=None):
    """A dense layer as users write it: XLA passes the bias and some activations to a library."""
    y = ACTIVATIONS[activation](jnp.matmul(x, w, precision=precision) + b)
    return y if residual is None else y + residual


def _glu(x, w_gate, w_up, *, activation=None, precision=None):
    """A gated layer as users write it."""
    gate, up = (jnp.matmul(x, w, precision=precision) for w in (w_gate, w_up))
    return ACTIVATIONS[activation](gate) * up


ACTIVATIONS: dict[str | None, Callable[[jax.Array], jax.Array]] = {
    None: lambda y: y,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
}
"""The activations of `jax_gpuops.linear`, in plain JAX."""


def _scaled_matmul(
    a, b, a_scale, b_scale, *, transpose_b=False, precision=None, preferred_element_type=None
):
    """A product of quantised matrices in the form that is fastest in XLA.

    Scales of rows and columns multiply the sums. For floats with one scale per matrix, XLA makes
    one cuBLAS call if the scales multiply the factors, as scales of blocks must.
    """
    if transpose_b:
        b, b_scale = (jnp.swapaxes(x, -1, -2) for x in (b, b_scale))
    is_integer = jnp.issubdtype(a.dtype, jnp.integer)
    of_matrices = a_scale.shape[-2:] == b_scale.shape[-2:] == (1, 1)
    of_vectors = a_scale.shape[-1] == b_scale.shape[-2] == 1 and b_scale.shape[-1] == b.shape[-1]
    if of_vectors or (of_matrices and is_integer):
        sums = jnp.int32 if is_integer else a_scale.dtype
        y = jnp.matmul(a, b, precision=precision, preferred_element_type=sums)
        y = y.astype(a_scale.dtype) * a_scale * b_scale
    else:
        y = jnp.matmul(_dequantised(a, a_scale), _dequantised(b, b_scale), precision=precision)
    if preferred_element_type == "int8":
        y = jnp.clip(jnp.round(y), -128, 127)
    return y if preferred_element_type is None else y.astype(preferred_element_type)


def _dequantised(x, scale):
    for axis in (-1, -2):
        if scale.shape[axis] not in (1, x.shape[axis]):
            scale = jnp.repeat(scale, 128, axis)
            scale = jax.lax.slice_in_dim(scale, 0, x.shape[axis], axis=axis)
    return x.astype(scale.dtype) * scale


def _mean_and_var(x, axis=None, dtype=None):
    """The statistics of a normalisation layer, in float32 for 16-bit floats."""
    x = x if dtype is None else x.astype(dtype)
    return jnp.mean(x, axis), jnp.var(x, axis)


def _float32_of_16_bits(problem: Problem) -> dict[str, Any]:
    return {"dtype": "float32"} if jnp.dtype(problem.dtype).itemsize == 2 else {}


_RESULTS = {"float8_e4m3fn": "bfloat16", "float8_e5m2": "bfloat16", "int8": "int32"}
"""The dtypes of results for factors whose own dtype has too little range for them."""


def _result(problem: Problem) -> dict[str, Any]:
    if problem.dtype not in _RESULTS:
        return {}
    return {"preferred_element_type": _RESULTS[problem.dtype]}


def _result_of_scaled(problem: Problem) -> dict[str, Any]:
    return {"preferred_element_type": "int8" if problem.dtype == "int8" else "bfloat16"}


def _result_of_scaled_rows(problem: Problem) -> dict[str, Any]:
    return {"transpose_b": True, **_result_of_scaled(problem)}


def _contract_last_with_first(problem: Problem) -> dict[str, Any]:
    batch = tuple(range(len(problem.shape) - 3))
    last = len(batch) + 1
    return {"dimension_numbers": (((last,), (last - 1,)), (batch, batch)), **_result(problem)}


def _contract_last_with_last(problem: Problem) -> dict[str, Any]:
    batch = tuple(range(len(problem.shape) - 3))
    last = len(batch) + 1
    return {"dimension_numbers": (((last,), (last,)), (batch, batch)), **_result(problem)}


def _contract_first_with_first(problem: Problem) -> dict[str, Any]:
    batch = tuple(range(len(problem.shape) - 3))
    first = len(batch)
    return {"dimension_numbers": (((first,), (first,)), (batch, batch)), **_result(problem)}


_softmax = functools.partial(
    Op,
    family="softmax",
    limit="copy",
    options={"axis": -1, "scale": None, "causal": None, "where": None},
    operands=array_and_mask,
    apply=_apply_masked,
)
_softmax_vjp = functools.partial(
    _softmax, operands=array_cotangent_and_mask, prepare=_run_forward, apply=_run_backward
)
_losses = functools.partial(
    Op,
    family="softmax",
    public="softmax_cross_entropy_with_integer_labels",
    upstream=_cross_entropy,
    options={},
    operands=array_and_labels,
)
_reduce = functools.partial(Op, family="reduce", limit="read", options={"axis": None})
_matmul = functools.partial(Op, family="matmul", limit="matmul", error=check.matmul)

OPS: dict[str, Op] = {
    "softmax": _softmax(
        upstream=_with_scale_and_causal(jax.nn.softmax),
        error=check.softmax,
        bytes=_each_once_or_long_rows_twice,
    ),
    "log_softmax": _softmax(
        upstream=_with_scale_and_causal(jax.nn.log_softmax),
        error=check.logarithm,
        bytes=_each_once_or_long_rows_twice,
    ),
    "logsumexp": _softmax(
        upstream=_with_scale_and_causal(jax.nn.logsumexp), error=check.logarithm, limit="read"
    ),
    "softmax_vjp": _softmax_vjp(
        public="softmax",
        upstream=_with_scale_and_causal(jax.nn.softmax),
        error=check.softmax_vjp,
    ),
    "log_softmax_vjp": _softmax_vjp(
        public="log_softmax",
        upstream=_with_scale_and_causal(jax.nn.log_softmax),
        error=check.log_softmax_vjp,
        options={"axis": -1, "scale": None},
    ),
    "cross_entropy": _losses(error=check.losses, limit="read"),
    "cross_entropy_grad": _losses(
        error=check.cross_entropy_grad,
        limit="copy",
        apply=_value_and_grad,
        producer=_produce_logits,
        bytes=_two_reads_one_write,
    ),
    "sum": _reduce(upstream=jnp.sum, error=check.total),
    "mean": _reduce(upstream=jnp.mean, error=check.total),
    "var": _reduce(upstream=jnp.var, error=check.variance),
    "std": _reduce(upstream=jnp.std, error=check.variance),
    "mean_and_var": _reduce(
        upstream=_mean_and_var, error=check.mean_and_variance, fixed=_float32_of_16_bits
    ),
    "prod": _reduce(upstream=jnp.prod, error=check.product, operands=array_of_factors),
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
    "matmul": _matmul(
        upstream=jnp.matmul, options={"precision": None}, operands=two_matrices, fixed=_result
    ),
    "dot_general": _matmul(
        upstream=jax.lax.dot_general,
        options={"precision": None},
        operands=two_matrices,
        fixed=_contract_last_with_first,
    ),
    "dot_general_of_rows": _matmul(
        public="dot_general",
        upstream=jax.lax.dot_general,
        options={"precision": None},
        operands=two_matrices_of_rows,
        fixed=_contract_last_with_last,
    ),
    "dot_general_of_columns": _matmul(
        public="dot_general",
        upstream=jax.lax.dot_general,
        options={"precision": None},
        operands=two_matrices_of_columns,
        fixed=_contract_first_with_first,
    ),
    "gemm": _matmul(
        upstream=_gemm,
        options={"alpha": 1.5, "beta": 0.5},
        operands=three_matrices,
    ),
    "linear": _matmul(
        upstream=_linear,
        options={"activation": None, "residual": None, "precision": None},
        operands=dense_layer,
        apply=_apply_layer,
    ),
    "glu": _matmul(
        upstream=_glu,
        options={"activation": "silu", "precision": None},
        operands=gated_layer,
        products=2,
    ),
    "scaled_matmul": _matmul(
        upstream=_scaled_matmul,
        options={"scales": "vector", "precision": None},
        operands=with_scales(two_matrices),
        fixed=_result_of_scaled,
    ),
    "scaled_matmul_of_rows": _matmul(
        public="scaled_matmul",
        upstream=_scaled_matmul,
        options={"scales": "vector", "precision": None},
        operands=with_scales(two_matrices_of_rows),
        fixed=_result_of_scaled_rows,
    ),
}

_OF_OPERANDS = ("where", "scales", "residual")
"""Options that determine the operands and are not arguments."""


def ours(op: str) -> Callable[..., jax.Array]:
    """Returns the public function of jax_gpuops that an op calls."""
    return getattr(jax_gpuops, OPS[op].public or op)


def keywords(problem: Problem) -> dict[str, Any]:
    """Returns the keyword arguments of a problem, for our function and for XLA's."""
    op = OPS[problem.op]
    given = {
        name: value
        for name, value in problem.options.items()
        if name not in _OF_OPERANDS and not (value is None and op.options[name] is None)
    }
    return {**given, **op.fixed(problem)}


def make(
    op: str,
    shape: Shape,
    dtype: str,
    *,
    series: str | None = None,
    size: int | None = None,
    floor: Floor | None = None,
    **options: Any,
) -> Problem:
    """Returns a problem, with the op's defaults for options that are not given.

    Raises:
      ValueError: if the op has no such option, or does not support the shape.
    """
    defaults = OPS[op].options
    if unknown := options.keys() - defaults.keys():
        raise ValueError(f"{op} has no option {', '.join(sorted(unknown))}")
    if OPS[op].operands in (dense_layer, gated_layer) and len(shape) != 3:
        raise ValueError(f"{op} takes the shape MxKxN, got {shape}")
    if OPS[op].limit == "matmul" and len(shape) < 3:
        raise ValueError(f"{op} takes the shape MxKxN (batch dims before it), got {shape}")
    if (options.get("causal") or options.get("where")) and len(shape) < 2:
        raise ValueError(f"a mask takes the shape of a matrix (batch dims before it), got {shape}")
    if defaults.get("precision", ...) is None and dtype in ("float32", "float64"):
        defaults = {**defaults, "precision": "highest"}
    return Problem(op, shape, dtype, {**defaults, **options}, series, size, floor)


def floating_point_operations(problem: Problem) -> int:
    """Returns the arithmetic of matrix products: a multiplication and an addition each count."""
    return 2 * OPS[problem.op].products * math.prod(problem.shape)
