"""The primitive of matrix products, and what all ops that compute products share.

The primitive is alpha * dot_general(a, b) + beta * c. Layers and scaled products have primitives of
their own, whose arguments, plans and derivatives have parts of these.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching

from jax_gpuops import _measurements, _primitive
from jax_gpuops._implementation import BATCH_INVARIANT, NoKernelError

DimensionNumbers = tuple[
    tuple[Sequence[int], Sequence[int]],  # contracting dims of lhs and rhs
    tuple[Sequence[int], Sequence[int]],  # batch dims of lhs and rhs
]

RESULTS = {
    "float16": ("float16", "float32"),
    "bfloat16": ("bfloat16", "float32"),
    "float32": ("float32",),
    "float64": ("float64",),
    "float8_e4m3fn": ("bfloat16", "float16", "float32"),
    "float8_e5m2": ("bfloat16", "float16", "float32"),
    "int8": ("int32",),
}
"""The factor dtypes that kernels support, with the result dtypes for each."""


# Arguments


def hashable(value: Any) -> Any:
    """Converts sequences, except a `jax.lax.DotAlgorithm`, to tuples, and numpy scalars."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return value.item()
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | lax.DotAlgorithm):
        return tuple(map(hashable, value))
    return value


def canonical(precision: Any) -> Any:
    """Returns a precision in JAX's canonical form.

    It is None, a pair of `jax.lax.Precision` for the left and the right operand, a
    `jax.lax.DotAlgorithm` or a preset of it. For None it is JAX's configured default precision.

    Raises:
      ValueError: if `precision` is not valid.
    """
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if isinstance(precision, str) and precision in lax.DotAlgorithmPreset.__members__:
        return lax.DotAlgorithmPreset[precision]
    if precision is None or isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return precision
    pair = precision if isinstance(precision, tuple) else (precision, precision)
    try:
        if len(pair) == 2 and all(isinstance(each, str | lax.Precision) for each in pair):
            return tuple(map(lax.Precision, pair))
    except ValueError:  # a string that names no precision
        pass
    raise ValueError(
        "precision must be None, a jax.lax.Precision or its name, a pair of these, a "
        "jax.lax.DotAlgorithm, or a jax.lax.DotAlgorithmPreset or its name, got "
        f"{precision!r}"
    )


def named_algorithm(algorithm: str | None, precision: Any, *factors: jax.Array) -> str | None:
    """Returns the name by which the plan knows an algorithm, or None if the plan is to choose.

    BATCH_INVARIANT becomes the algorithm whose rows have the same bits in every batch. The tensor
    core algorithms accumulate over k in order, in steps of one size whatever the tile, and
    `double_buffered` in single terms. Other algorithms divide k depending on the problem sizes
    (`split_k`, `parallel_split_k`, `skinny`, `fma_sliced`, `fma_skinny`) or depend on the values of
    all rows (`bf16_x6`, `fp16_x3`).

    Args:
      algorithm: as `resolve_invariant` returned it.
      precision: as the caller gave it.
      *factors: arrays whose dtypes promote to the dtype of the product's factors.
    """
    if algorithm != BATCH_INVARIANT:
        return algorithm
    dtype = jnp.result_type(*factors)
    precision = precision_name(canonical(precision))
    is_exact = precision not in ("DEFAULT", "HIGH", "TF32_TF32_F32")
    if dtype == np.float64:
        return "mma_pipelined"
    if dtype == np.float32 and is_exact:
        return "double_buffered"
    return "tensor_core"


def check_sharding(*operands, out_sharding=None) -> None:
    """Raises NoKernelError if the type of an operand or of the result has an explicit sharding."""
    if out_sharding is not None or any(map(_primitive.has_explicit_sharding, operands)):
        raise NoKernelError(
            "matmul kernels run on one device and do not support explicit sharding; call them "
            "inside a jax.shard_map over all axes of the mesh"
        )


def bind_product(
    p,
    a,
    b,
    *others,
    precision,
    preferred_element_type,
    implementation,
    algorithm,
    results=RESULTS,
    **params,
) -> jax.Array:
    """Binds a primitive of a product, or raises NoKernelError if no kernel takes its operands.

    Args:
      p: the primitive of gemm, of a layer or of a scaled product.
      a: the left factor.
      b: the right factor.
      *others: further operands, in the dtypes that the primitive requires.
      precision: as the caller gave it.
      preferred_element_type: the dtype of the result.
      implementation: as `resolve` returned it.
      algorithm: a name that the plan knows, or None.
      results: the supported dtypes of the result for each dtype of the factors.
      **params: the other parameters of the primitive.
    """
    precision = canonical(precision)
    if a.dtype != b.dtype or a.dtype.name not in results:
        raise NoKernelError(
            f"matmul kernels require two operands of the same dtype, one of {', '.join(results)}, "
            f"got {a.dtype} and {b.dtype}",
            TypeError,
        )
    if preferred_element_type.name not in results[a.dtype.name]:
        raise NoKernelError(
            f"matmul kernels do not support a result of dtype {preferred_element_type} for "
            f"operands of dtype {a.dtype}; set preferred_element_type to "
            f"{' or '.join(results[a.dtype.name])}",
            TypeError,
        )
    if isinstance(precision, lax.DotAlgorithm):
        raise NoKernelError(
            f"matmul kernels support no precision without a preset, such as {precision}"
        )
    params |= {"precision": precision, "preferred_element_type": preferred_element_type}
    if algorithm is None:
        _primitive.check_plan(p, a, b, *others, implementation=implementation, **params)
    if implementation is None and algorithm is None:
        # Our primitive hides the product from checkpoint policies, so it must be worth it. vmap may
        # change the sizes m, n and batch later.
        problem = _primitive.KERNELS[p].problem(a, b, *others, **params)
        named = (
            *("dtype", "result_dtype", "precision", "has_c", "has_bias", "gated", "epilogue", "k"),
            *("a_scale", "b_scale"),
        )
        known = {key: problem[key] for key in named}
        forms = [problem]
        if _primitive.KERNELS[p].as_stored:  # the lowering finds how factors are stored
            flags = itertools.product((0, 1), repeat=2)
            forms = [problem | {"transpose_a": a, "transpose_b": b} for a, b in flags]
        if not any(
            _measurements.may_hold("matmul", known | _measurements.traits(form)) for form in forms
        ):
            raise NoKernelError(
                "no measurement shows a kernel to be as fast as XLA", second_best="a kernel"
            )
    return _primitive.bind(
        p,
        a,
        b,
        *others,
        implementation=implementation,
        algorithm=algorithm,
        **params,
    )


# The primitive: alpha * dot_general(a, b) + beta * c


def reference(
    a, b, *c, dimension_numbers, precision, preferred_element_type, alpha, beta, outer=None
) -> jax.Array:
    """The primitive in JAX's operations."""
    del outer  # only the kernels use it
    if alpha == 1 and not c:
        return lax.dot_general(a, b, dimension_numbers, precision, preferred_element_type)
    wide = _primitive.accumulator(preferred_element_type)
    y = alpha * lax.dot_general(a, b, dimension_numbers, precision, wide)
    for addend in c:
        y = y + beta * addend.astype(wide)
    return y.astype(preferred_element_type)


def _remaining(ndim: int, *used: Sequence[int]) -> tuple[int, ...]:
    return tuple(d for d in range(ndim) if not any(d in dims for dims in used))


def _is_in_place(order: Sequence[int], shape: Sequence[int]) -> bool:
    """True if a permutation of the dims of an array moves no data."""
    moved = [d for d in order if shape[d] != 1]
    return moved == sorted(moved)


@dataclasses.dataclass(frozen=True)
class _Matrices:
    """An operand as a batch of matrices, or as one matrix for the whole batch.

    Attributes:
      order: the permutation of the operand's dims before the reshape to `shape`; data moves only if
        dims larger than 1 change their order.
      shape: (batch, rows, cols), or (rows, cols) for one matrix.
      transpose: True if the matrices are transposed.
      moves: True if data moves.
    """

    order: tuple[int, ...]
    shape: tuple[int, ...]
    transpose: bool
    moves: bool

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        batch: Sequence[int],
        rows: Sequence[int],
        cols: Sequence[int],
        *,
        is_batched: bool,
    ) -> _Matrices:
        plain, transposed = (*batch, *rows, *cols), (*batch, *cols, *rows)
        transpose = not _is_in_place(plain, shape) and _is_in_place(transposed, shape)
        groups = [cols, rows] if transpose else [rows, cols]
        if is_batched:
            groups.insert(0, batch)
        sizes = tuple(math.prod(shape[d] for d in group) for group in groups)
        order = transposed if transpose else plain
        return cls(order, sizes, transpose, not _is_in_place(order, shape))

    def apply(self, x: jax.Array) -> jax.Array:
        return lax.transpose(x, self.order).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class _Canonical:
    """A dot_general in the form that kernels take: (batch, m, k) x (batch, k, n) -> (batch, m, n).

    If there are no batch dims, the free dims before the contracting ones may serve as the batch:
    (m, k) x (batch, k, n) shares its left matrix, so that no data moves.

    Attributes:
      a: the left operand, (batch, m, k).
      b: the right operand, (batch, k, n).
      result_order: the permutation of the result of dot_general to (batch, m, n).
      result_dims: the sizes of the result's dims in that order.
      outer: the free dims of b that serve as the batch.
      has_batch: True if the result is (batch, m, n) rather than (m, n).
    """

    a: _Matrices
    b: _Matrices
    result_order: tuple[int, ...]
    result_dims: tuple[int, ...]
    outer: tuple[int, ...]
    has_batch: bool

    @classmethod
    def of(
        cls,
        a_shape: Sequence[int],
        b_shape: Sequence[int],
        dimension_numbers: DimensionNumbers,
        outer: Sequence[int] | None = None,
    ) -> _Canonical:
        """Returns the form of a dot_general.

        Args:
          a_shape: the shape of the left operand.
          b_shape: the shape of the right operand.
          dimension_numbers: the dimension numbers of the dot_general.
          outer: the free dims of b that serve as the batch; None to choose them by `_outer_dims`.
        """
        (a_contract, b_contract), (a_batch, b_batch) = dimension_numbers
        pairs = sorted(zip(a_contract, b_contract, strict=True))
        a_contract, b_contract = [a for a, _ in pairs], [b for _, b in pairs]
        a_free = _remaining(len(a_shape), a_contract, a_batch)
        b_free = _remaining(len(b_shape), b_contract, b_batch)
        a_outer: Sequence[int] = ()
        b_outer: Sequence[int] = ()
        if outer is not None:
            b_outer = outer
        elif not a_batch:
            a_outer = _outer_dims(a_shape, a_contract, a_free)
            b_outer = () if a_outer else _outer_dims(b_shape, b_contract, b_free)
        a_rows = [d for d in a_free if d not in a_outer]
        b_cols = [d for d in b_free if d not in b_outer]
        a = _Matrices.of(
            a_shape, [*a_batch, *a_outer], a_rows, a_contract, is_batched=bool(a_batch or a_outer)
        )
        b = _Matrices.of(
            b_shape, [*b_batch, *b_outer], b_contract, b_cols, is_batched=bool(b_batch or b_outer)
        )
        # dot_general orders its result's dims: batch, a_free, b_free.
        sizes = [*(a_shape[d] for d in (*a_batch, *a_free)), *(b_shape[d] for d in b_free)]
        first_b = len(a_batch) + len(a_free)
        first = [first_b + b_free.index(d) for d in b_outer]
        order = (*first, *_remaining(len(sizes), first))
        has_batch = bool(a_batch or a_outer or b_outer)
        return cls(a, b, order, tuple(sizes[d] for d in order), tuple(b_outer), has_batch)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes batch, m, n and k."""
        *_, a_rows, a_cols = self.a.shape
        *_, b_rows, b_cols = self.b.shape
        return {
            "batch": (self.a.shape if len(self.a.shape) == 3 else self.b.shape)[0]
            if self.has_batch
            else 1,
            "m": a_cols if self.a.transpose else a_rows,
            "n": b_rows if self.b.transpose else b_cols,
            "k": a_rows if self.a.transpose else a_cols,
        }

    @property
    def result_shape(self) -> tuple[int, ...]:
        sizes = self.sizes
        shape = (sizes["batch"], sizes["m"], sizes["n"])
        return shape if self.has_batch else shape[1:]

    def from_result(self, c: jax.Array) -> jax.Array:
        """Converts an array of the result's shape in dot_general to the kernels' form."""
        return lax.transpose(c, self.result_order).reshape(self.result_shape)

    def to_result(self, y: jax.Array) -> jax.Array:
        """Converts the kernels' result to the form of dot_general."""
        return lax.transpose(y.reshape(self.result_dims), np.argsort(self.result_order))


def _outer_dims(
    shape: Sequence[int], contract: Sequence[int], free: Sequence[int]
) -> tuple[int, ...]:
    """The free dims before the contracting ones, if there are others behind and none between."""
    large = [d for d in contract if shape[d] != 1]
    if not large:
        return ()
    before = tuple(d for d in free if d < large[0])
    behind = [d for d in free if d > large[-1]]
    between = [d for d in free if large[0] < d < large[-1] and shape[d] != 1]
    is_split = any(shape[d] != 1 for d in before) and any(shape[d] != 1 for d in behind)
    return before if is_split and large == sorted(large) and not between else ()


def precision_name(precision: Any) -> str:
    """The name of a canonical precision in problems, such as "HIGHEST" or "BF16_BF16_F32".

    For a pair it is the higher one, which XLA also uses for both operands.
    """
    if precision is None:
        return lax.Precision.DEFAULT.name
    if isinstance(precision, tuple):
        return max(precision, key=lambda each: each.value).name
    return precision.name


WITHOUT_SCALES = {"a_scale": "none", "b_scale": "none", "share_a_scale": 0, "share_b_scale": 0}
"""The problem fields of factor scales, for products without scales."""


def problem_of_product(
    a, b, *c, dimension_numbers, precision, preferred_element_type, alpha=1.0, beta=0.0, outer=None
) -> dict[str, Any]:
    """The problem of a product without bias and activation, for the compiled module's plan."""
    del beta
    form = _Canonical.of(a.shape, b.shape, dimension_numbers, outer)
    return {
        "dtype": a.dtype.name,
        "result_dtype": preferred_element_type.name,
        "precision": precision_name(precision),
        **form.sizes,
        "transpose_a": int(form.a.transpose),
        "transpose_b": int(form.b.transpose),
        "share_a": int(len(form.a.shape) == 2),
        "share_b": int(len(form.b.shape) == 2),
        "has_c": int(bool(c)),
        "scaled": int(alpha != 1),
        "has_bias": 0,
        "share_bias": 0,
        "gated": 0,
        "epilogue": "none",
        **WITHOUT_SCALES,
        "alignment": _primitive.ALIGNMENT,
        "workspace": workspace_of(form.sizes, a.dtype),
    }


def workspace(launch: _primitive.Launch, problem: dict[str, Any]) -> jax.ShapeDtypeStruct:
    """The workspace of a problem, which is the last result of its custom call.

    Problems with symbolic sizes get none, except those with 8-bit factors: their only kernel may
    need copies of both factors, in lines of 128 bytes.
    """
    batch, m, n, k = (problem[key] for key in _SIZES)
    if _has_constant_sizes(problem):
        size = launch.workspace_bytes("matmul", problem)
    elif problem["workspace"]:
        size = batch * (m + n) * (k + 127)
    else:
        size = 0
    return jax.ShapeDtypeStruct((size,), np.uint8)


_SIZES = ("batch", "m", "n", "k")


def workspace_of(sizes: dict[str, Any], dtype: np.dtype) -> int:
    """The field `workspace` of a problem: 0 if its call gets none, see `workspace`."""
    gets_some = _has_constant_sizes(sizes) or dtype.itemsize == 1
    return _primitive.WORKSPACE_AS_ASKED if gets_some else 0


def _has_constant_sizes(problem: dict[str, Any]) -> bool:
    return all(isinstance(problem[key], int) for key in _SIZES)


def _call(
    launch: _primitive.Launch,
    a,
    b,
    *c,
    dimension_numbers,
    precision,
    preferred_element_type,
    alpha,
    beta,
    outer=None,
) -> jax.Array:
    """The custom call and the transposes around it. cuBLAS has its own target: see handler.cc."""
    problem = problem_of_product(
        a,
        b,
        *c,
        dimension_numbers=dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
        alpha=alpha,
        beta=beta,
        outer=outer,
    )
    form = _Canonical.of(a.shape, b.shape, dimension_numbers, outer)
    library = "cublas_" if launch.algorithm == "cublas" else ""
    y, _ = launch.custom_call(
        f"jax_gpuops_{library}gemm_v2",
        [form.a.apply(a), form.b.apply(b), *map(form.from_result, c)],
        [
            jax.ShapeDtypeStruct(form.result_shape, preferred_element_type),
            workspace(launch, problem),
        ],
        precision=problem["precision"],
        epilogue=problem["epilogue"],
        transpose_a=form.a.transpose,
        transpose_b=form.b.transpose,
        alpha=np.float64(alpha),
        beta=np.float64(beta),
    )
    return form.to_result(y)


def _as_stored(operand: int, permutation, avals, params) -> dict[str, Any] | None:
    """The parameters of a product that reads a transposed factor as it is stored.

    None if the dims of its result would have another order, or if an array would be copied for it.
    """
    is_factor = operand < 2
    # For 16-bit factors with c, tensor_core needs factors that are not transposed, and the other
    # algorithms are slower.
    if not is_factor or (len(avals) == 3 and avals[0].dtype.itemsize == 2):
        return None
    numbers, outer = params["dimension_numbers"], params.get("outer")
    shapes = [tuple(aval.shape) for aval in avals[:2]]
    old = _Canonical.of(shapes[0], shapes[1], numbers, outer)
    contract, batch = map(list, numbers)
    free = _remaining(len(permutation), contract[operand], batch[operand])
    if sorted(free, key=permutation.__getitem__) != list(free):
        return None
    for dims in (contract, batch):
        dims[operand] = tuple(permutation[d] for d in dims[operand])
    shapes[operand] = tuple(shapes[operand][d] for d in np.argsort(permutation))
    numbers = tuple(contract), tuple(batch)
    if old.outer:  # these come first in the result, too
        outer = tuple(permutation[d] for d in old.outer) if operand == 1 else old.outer
    new = _Canonical.of(shapes[0], shapes[1], numbers, outer)
    own, other = (new.a, new.b) if operand == 0 else (new.b, new.a)
    other_moved = (old.b if operand == 0 else old.a).moves
    if own.moves or other.moves > other_moved or new.result_order != old.result_order:
        return None
    return params | {"dimension_numbers": numbers, "outer": outer}


gemm_p = _primitive.primitive(
    _primitive.Kernel(
        name="gpuops_gemm",
        op="matmul",
        reference=reference,
        problem=problem_of_product,
        call=_call,
        as_stored=_as_stored,
    )
)


# Derivatives and batching, as for dot_general, which is linear in each operand.


def bind_derivative(a, b, **params):
    """Binds the product of a derivative, by the algorithm that was named for the call.

    If that does not support the product, such as one of the wider dtype of the cotangent, the
    algorithm is that of batch-invariant calls, which the call may be.
    """
    if params["algorithm"] is not None:
        try:
            _primitive.check_named(gemm_p, a, b, **params)
        except ValueError:
            params["algorithm"] = named_algorithm(BATCH_INVARIANT, params["precision"], a)
            _primitive.check_named(gemm_p, a, b, **params)
    return gemm_p.bind(a, b, **params)


def _jvp(primals, tangents, *, alpha, beta, **params):
    y = gemm_p.bind(*primals, alpha=alpha, beta=beta, **params)
    (a, b, *_), (a_dot, b_dot, *c_dot) = primals, tangents
    terms = []
    if type(a_dot) is not ad.Zero:
        terms.append(bind_derivative(a_dot, b, alpha=alpha, beta=0.0, **params))
    if type(b_dot) is not ad.Zero:
        terms.append(bind_derivative(a, b_dot, alpha=alpha, beta=0.0, **params))
    terms += [beta * t for t in c_dot if type(t) is not ad.Zero]
    return y, functools.reduce(jnp.add, terms)


def _transpose(
    cotangent,
    a,
    b,
    *c,
    dimension_numbers,
    preferred_element_type,
    alpha,
    beta,
    **params,
):
    del preferred_element_type
    operands = [a, b, *c]
    results = [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in operands]
    if type(cotangent) is ad.Zero:
        return results
    for i, (linear, other, is_lhs) in enumerate([(a, b, True), (b, a, False)]):
        if ad.is_undefined_primal(linear):
            results[i] = _factor_cotangent(
                cotangent,
                linear.aval,
                other,
                dimension_numbers=dimension_numbers,
                is_lhs=is_lhs,
                alpha=alpha,
                **params,
            )
    if c and ad.is_undefined_primal(c[0]):
        results[2] = beta * cotangent
    return results


OF_FLOAT8 = {
    lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32: lax.Precision.HIGHEST,
    lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM: lax.Precision.DEFAULT,
    lax.DotAlgorithmPreset.ANY_F8_ANY_F8_ANY: lax.Precision.HIGHEST,
    lax.DotAlgorithmPreset.ANY_F8_ANY_F8_ANY_FAST_ACCUM: lax.Precision.DEFAULT,
}
"""The precision of derivatives, whose floats are wider, for presets that name 8-bit floats."""


def _factor_cotangent(cotangent, linear, other, *, dimension_numbers, is_lhs, **params):
    """The cotangent of one factor: the product of the result's cotangent and the other factor.

    The cotangent's dims are batch, free dims of lhs, free dims of rhs. Contracting the free dims of
    the other factor leaves the batch, free and contracting dims of the linear factor.
    """
    contract, batch = dimension_numbers
    mine, theirs = (0, 1) if is_lhs else (1, 0)
    my_free = _remaining(linear.ndim, contract[mine], batch[mine])
    their_free = _remaining(other.ndim, contract[theirs], batch[theirs])
    batch_dims = tuple(range(len(batch[mine])))
    first_theirs = len(batch_dims) + (len(my_free) if is_lhs else 0)
    their_dims = tuple(range(first_theirs, first_theirs + len(their_free)))
    if params["precision"] in OF_FLOAT8:  # cotangents are no 8-bit floats
        params["precision"] = (OF_FLOAT8[params["precision"]],) * 2
    # The contracting dims of the other factor remain, in ascending order.
    by_theirs = [m for _, m in sorted(zip(contract[theirs], contract[mine], strict=True))]
    # The dtype of the cotangent is that of a and b, or wider.
    factors = [
        (cotangent, their_dims, batch_dims),
        (other.astype(cotangent.dtype), their_free, batch[theirs]),
    ]
    dims, swapped = [*batch[mine], *my_free, *by_theirs], [*batch[mine], *by_theirs, *my_free]
    if swapped == sorted(swapped):  # the other factor comes first, and the result is in place
        factors.reverse()
        dims = swapped
    operands, contracted, batches = zip(*factors, strict=True)
    y = bind_derivative(
        *operands,
        dimension_numbers=(contracted, batches),
        preferred_element_type=cotangent.dtype,
        beta=0.0,
        **params,
    )
    y = lax.transpose(y, np.argsort(dims)).astype(linear.dtype)
    if jax.typeof(y).sharding != linear.sharding:  # in the type only: all is on one device
        y = jax.sharding.reshard(y, linear.sharding.spec)
    return y


def _batch(operands, axes, *, dimension_numbers, preferred_element_type, beta, **params):
    """A mapped axis of both factors becomes a batch dim; of one factor, a free dim of it."""
    (a, b, *c), (a_axis, b_axis, *c_axis) = operands, axes
    (a_contract, b_contract), (a_batch, b_batch) = dimension_numbers
    is_a, is_b = a_axis is not None, b_axis is not None
    if not (is_a or is_b):  # only c is mapped: multiply once, add to each
        wide = _primitive.accumulator(a.dtype)
        y = gemm_p.bind(
            a,
            b,
            dimension_numbers=dimension_numbers,
            preferred_element_type=wide,
            beta=0.0,
            **params,
        )
        added = jnp.moveaxis(c[0], c_axis[0], 0)
        return (jnp.expand_dims(y, 0) + beta * added.astype(wide)).astype(added.dtype), 0
    if is_a:
        a = jnp.moveaxis(a, a_axis, 0)
        a_contract, a_batch = (tuple(d + 1 for d in dims) for dims in (a_contract, a_batch))
    if is_b:
        b = jnp.moveaxis(b, b_axis, 0)
        b_contract, b_batch = (tuple(d + 1 for d in dims) for dims in (b_contract, b_batch))
    if is_a and is_b:
        a_batch, b_batch = (0, *a_batch), (0, *b_batch)
        out = 0
    elif is_a:
        out = len(a_batch)
    else:
        out = a.ndim - len(a_contract)
    if c:
        size = a.shape[0] if is_a else b.shape[0]
        c = [
            jnp.broadcast_to(
                jnp.expand_dims(c[0], out), (*c[0].shape[:out], size, *c[0].shape[out:])
            )
            if c_axis[0] is None
            else jnp.moveaxis(c[0], c_axis[0], out)
        ]
    y = gemm_p.bind(
        a,
        b,
        *c,
        dimension_numbers=((a_contract, b_contract), (a_batch, b_batch)),
        preferred_element_type=preferred_element_type,
        beta=beta,
        **params,
    )
    return y, out


ad.primitive_jvps[gemm_p] = _jvp
ad.primitive_transposes[gemm_p] = _transpose
batching.primitive_batchers[gemm_p] = _batch
