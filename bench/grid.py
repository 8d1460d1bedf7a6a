"""What `python -m bench tune` measures: problems on grids of sizes, for each kernel and dtype.

A grid varies sizes alone; dtype, options and alignment are the same throughout. Rows are aligned if
their bytes are a multiple of 16, which both XLA and our kernels read faster. Of the others a vertex
of a grid stands for several lengths, an odd one, an even one and so on: a kernel has to be faster
for all of them.

Of products the factors are aligned if the rows of both, as they are stored, and those of the result
are.

Nothing of float16 is measured: classes of bfloat16 hold for it (docs/policy.md).

Left out, so that `None` leaves it to XLA: arrays of less than 2^14 elements, masks and scales of
other functions than softmax, causal softmax of more or fewer queries than keys, reductions with
`where`, axes that lie apart, `prod` and `argmin`, and products of less than 1024 rows, columns or
terms, of batches, with an addend, and in layers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bench.problem import Shape
from jax_gpuops import _measurements, _primitive
from jax_gpuops._rowwise import Rows

SMALLEST = 2**14
"""The least elements of an operand."""

LARGEST_BYTES = 2**30
"""The most bytes of an operand: it fills a GPU many times over, and leaves room for float64."""

FILLING_BYTES = 2**26
"""An operand of so many bytes occupies all multiprocessors, and is more than an L2 cache holds."""

MOST = 2**31 - 1
"""The largest size that a class names."""

PRIMITIVES = {
    kernel.name.removeprefix("gpuops_"): primitive
    for primitive, kernel in _primitive.KERNELS.items()
}


@dataclasses.dataclass(frozen=True)
class Point:
    """A call of a kernel's primitive.

    Attributes:
      kernel: the primitive's name, without "gpuops_".
      shape: of the array that the kernel is named after; of a product, M x K x N.
      dtype: of that array, or of the factors.
      axes: along which the rows lie; of a transpose, the permutation; of a product, the factors'
        dims that are contracted.
      mask: what leaves elements out: "causal", "padding" (a mask of the columns for each batch),
        "full" (one of the whole shape), or several of these; empty for none.
      scale: the factor of the operand.
      result: the dtype of the result of a reduction or a product.
      precision: of a product, as JAX names it.
    """

    kernel: str
    shape: Shape
    dtype: str
    axes: Shape
    mask: str = ""
    scale: float = 1.0
    result: str = ""
    precision: str = ""

    def __str__(self) -> str:
        """Returns the point on one line, as raw results name it."""
        axes = "axes=" + ",".join(map(str, self.axes))
        scale = "" if self.scale == 1 else f"scale={self.scale}"
        parts = [self.kernel, "x".join(map(str, self.shape)), self.dtype, axes, self.mask, scale]
        return " ".join(filter(None, [*parts, self.precision, self.result and f"to {self.result}"]))

    @property
    def masks(self) -> list[Shape]:
        """The shapes of the masks that are operands."""
        *batch, _, columns = self.shape if len(self.shape) > 1 else (1, *self.shape)
        padding = (*batch[:1], *(1 for _ in batch[1:]), 1, columns)
        return [self.shape if "full" in self.mask else padding] if self.has_mask else []

    @property
    def has_mask(self) -> bool:
        """True if a mask is an operand."""
        return "full" in self.mask or "padding" in self.mask

    @property
    def is_product(self) -> bool:
        """True for a product of two factors."""
        return self.kernel == "gemm"

    @property
    def arrays(self) -> list[tuple[Shape, str]]:
        """The shapes and dtypes of what the problem is made of: an array and masks, or factors."""
        if not self.is_product:
            return [(self.shape, self.dtype), *((mask, "bool") for mask in self.masks)]
        m, k, n = self.shape
        a, b = ((k, m) if self.axes[0] == 0 else (m, k)), ((n, k) if self.axes[1] == 1 else (k, n))
        return [(a, self.dtype), (b, self.dtype)]

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the primitive but `implementation` and `algorithm`."""
        if self.kernel == "transpose":
            return {"permutation": self.axes}
        if self.is_product:
            a_axis, b_axis = self.axes
            return {
                "dimension_numbers": (((a_axis,), (b_axis,)), ((), ())),
                "precision": (jax.lax.Precision(self.precision),) * 2,
                "preferred_element_type": jnp.dtype(self.result),
                "alpha": 1.0,
                "beta": 0.0,
            }
        if self.result:
            more: dict[str, Any] = {}
            if self.kernel == "mean_and_var":
                more = {"correction": 0.0, "in_runs": not Rows(self.shape, self.axes).adjacent}
            return {"axes": self.axes, "dtype": jnp.dtype(self.result), **more}
        if self.kernel.startswith("cross_entropy"):
            return {"axes": self.axes}
        return {"axes": self.axes, "scale": self.scale, "causal": "causal" in self.mask}

    @property
    def problem(self) -> dict[str, Any]:
        """What the table of measurements knows of the call."""
        kernel = _primitive.KERNELS[PRIMITIVES[self.kernel]]
        arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in self.arrays]
        problem = kernel.problem(*arrays, **self.params)
        known = {k: v for k, v in problem.items() if k not in _primitive.OF_EXECUTION}
        return {"op": kernel.op, **known}


@dataclasses.dataclass(frozen=True)
class Grid:
    """Points whose problems differ in sizes.

    Attributes:
      name: the kernel, the dtype, and what else its points have in common.
      fixed: what classes name besides the sizes.
      axes: the sizes that differ, with their values in ascending order.
      vertices: the points for each combination of sizes that is measured.
      open: the size, if there is one, above whose largest value problems only take longer, as far
        as that fills the GPU: the number of rows.
    """

    name: str
    fixed: dict[str, Any]
    axes: dict[str, tuple[int, ...]]
    vertices: dict[tuple[int, ...], tuple[Point, ...]]
    open: str | None = None


def fills_the_gpu(point: Point) -> bool:
    """True if more rows only take longer."""
    if point.is_product:  # the result has more tiles than a GPU has multiprocessors
        return True
    return math.prod(point.shape) * jnp.dtype(point.dtype).itemsize >= FILLING_BYTES


def points(grids: Iterable[Grid]) -> list[Point]:
    """Returns the points of grids, each once, in the order in which they are worth measuring."""
    each = (point for grid in grids for vertex in grid.vertices.values() for point in vertex)
    return list(dict.fromkeys(each))


def grids(families: Sequence[str] = ()) -> list[Grid]:
    """Returns the grids of op families, of all by default, the most useful first."""
    return [grid for family in families or FAMILIES for grid in FAMILIES[family]()]


# Rows


def _powers(low: int, high: int, step: int) -> tuple[int, ...]:
    """2^low, 2^(low + step), ... up to 2^high."""
    return tuple(2**e for e in range(low, high + 1, step))


def _counts(step: int) -> tuple[int, ...]:
    return _powers(0, 26, step)


def _is_measured(elements: int, dtype: str) -> bool:
    return SMALLEST <= elements <= LARGEST_BYTES // jnp.dtype(dtype).itemsize


def _fixed(vertices: dict[tuple[int, ...], tuple[Point, ...]], **more: Any) -> dict[str, Any]:
    """What all problems of a grid have in common, as classes name it."""
    problems = [point.problem for vertex in vertices.values() for point in vertex]
    sizes = {"outer", "columns", "inner", "queries", "masked", "scaled", "copied", "m", "n", "k"}
    flags = {key: 1 for key in ("masked", "scaled") if problems[0].get(key)}
    aligned = [_measurements.traits(problem)["aligned"] for problem in problems]
    low, high = min(aligned), max(aligned)
    common = {k: v for k, v in problems[0].items() if k not in sizes} | flags
    return {**common, "aligned": low if low == high else [low, high], **more}


def _name(vertices: dict[tuple[int, ...], tuple[Point, ...]], *words: str) -> str:
    first = next(iter(vertices.values()))[0]
    result = f"to {first.result}" if first.result not in ("", first.dtype) else ""
    return " ".join(filter(None, [first.kernel, first.dtype, result, *words]))


def _rows(
    kernel: str,
    dtype: str,
    columns: Sequence[int],
    counts: Sequence[int],
    *,
    stands_for: Sequence[int] = (0,),
    **options: Any,
) -> Grid:
    """Rows that lie one after another, `outer` of them.

    Of aligned rows of `_WITH_FACTOR` one class holds with a factor and without.

    Args:
      kernel: as a point has it.
      dtype: as a point has it.
      columns: the row lengths.
      counts: the numbers of rows.
      stands_for: how many elements are added to a row length to make those that it stands for.
      **options: of the points.
    """
    vertices = {
        (n, rows): tuple(
            Point(kernel, (rows, n + more), dtype, (1,), **options) for more in stands_for
        )
        for n, rows in itertools.product(columns, counts)
        if _is_measured(n * rows, dtype)
    }
    is_odd = len(stands_for) > 1
    factor = {"scaled": [0, 1]} if kernel in _WITH_FACTOR and not is_odd else {}
    return Grid(
        _name(vertices, "odd rows" if is_odd else ""),
        _fixed(vertices, inner=1, **factor),
        {"columns": tuple(columns), "outer": tuple(counts)},
        vertices,
        open="outer",
    )


def _odd_rows(kernel: str, dtype: str, columns: Sequence[int], counts, **options: Any) -> Grid:
    """Rows of no multiple of 16 bytes: one for each smaller power of two that divides the bytes."""
    return _rows(kernel, dtype, columns, counts, stands_for=_unaligned(dtype), **options)


def _unaligned(dtype: str) -> Sequence[int]:
    return (0, 1, 3) if jnp.dtype(dtype).itemsize == 2 else (0, 1)


def _inner(kernel: str, dtype: str, columns, inners, counts, **options: Any) -> Grid:
    """Rows that lie side by side, `inner` of them, as along an axis that is not the last."""
    vertices = {
        (n, inner, outer): (Point(kernel, (outer, n, inner), dtype, (1,), **options),)
        for n, inner, outer in itertools.product(columns, inners, counts)
        if _is_measured(n * inner * outer, dtype)
    }
    return Grid(
        _name(vertices, "another axis"),
        _fixed(vertices),
        {"columns": tuple(columns), "inner": tuple(inners), "outer": tuple(counts)},
        vertices,
        open="outer",
    )


_WITH_FACTOR = ("softmax", "softmax_tangent")
"""Kernels of which aligned rows were as far ahead with a factor as without (docs/policy.md)."""

_SCALE = 0.125
"""The factor of scores: that of heads of 64 elements."""


def _attention(
    kernel: str,
    dtype: str,
    masks: Sequence[str],
    *,
    columns: Sequence[int] = (128, 512, 2048, 8192),
    counts: Sequence[int] = _counts(3),
    stands_for: Sequence[int] = (0,),
) -> Grid:
    """Matrices of scores with masks, of which one class holds for each kind in `masks`.

    There are as many rows as go into whole matrices: of odd lengths up to an eighth less than a
    vertex says. Where there is a mask, classes hold without the factor, too: 107 pairs of points on
    an H200 were as far ahead with it as without, but for 1 %.
    """
    is_odd = columns[0] % 2 == 1

    def point(n: int, rows: int, mask: str) -> Point:
        queries = n if rows >= n else rows
        matrices = rows // queries
        batch = matrices if is_odd else 2 ** (matrices.bit_length() // 2)
        shape = (batch, matrices // batch, queries, n)
        return Point(kernel, shape, dtype, (3,), mask, _SCALE)

    def exists(n: int, rows: int) -> bool:
        is_taken = rows // n >= 7 if is_odd else rows % n == 0 or "causal" not in masks[0]
        return _is_measured(n * rows, dtype) and is_taken

    vertices = {
        (n, rows): tuple(
            point(n + more, rows, mask) for more, mask in itertools.product(stands_for, masks)
        )
        for n, rows in itertools.product(columns, counts)
        if exists(n, rows)
    }
    causal = {"queries": [1, MOST], "square": 1} if "causal" in masks[0] else {}
    odd = "odd rows" if is_odd else ""
    return Grid(
        _name(vertices, " or ".join(masks), f"scale={_SCALE}", odd),
        _fixed(vertices, inner=1, scaled=[0, 1], **causal),
        {"columns": tuple(columns), "outer": tuple(counts)},
        vertices,
        open="outer",
    )


def _odd_attention(kernel: str, dtype: str, masks: Sequence[str]) -> Grid:
    """The same for rows of no multiple of 16 bytes: those of the least and the most aligned."""
    sizes = {"columns": (65, 513, 2049), "counts": tuple(2**e for e in (11, 14, 17, 20))}
    return _attention(kernel, dtype, masks, **sizes, stands_for=_unaligned(dtype)[::2])


# The softmax family


def _softmax() -> Iterator[Grid]:
    floats = ("bfloat16", "float32")
    every_length = (*_powers(3, 18, 1), *_powers(20, 24, 2))
    for dtype in floats:
        yield _rows("softmax", dtype, every_length, _counts(2))
    for kernel in ("cross_entropy", "cross_entropy_cotangent", "softmax_tangent"):
        for dtype in floats:
            yield _rows(kernel, dtype, _powers(3, 19, 2), _counts(3))
    for dtype in floats:
        for mask in (["causal"], ["padding", "full"], ["causal padding"]):
            yield _attention("softmax", dtype, mask)
        for mask in (["causal"], ["padding", "full"]):
            yield _attention("softmax_tangent", dtype, mask)
        for kernel in ("softmax", "softmax_tangent"):
            for mask in (["causal"], ["padding", "full"]):
                yield _odd_attention(kernel, dtype, mask)
    for kernel in ("log_softmax", "logsumexp", "log_softmax_cotangent"):
        for dtype in floats:
            yield _rows(kernel, dtype, _powers(3, 19, 2), _counts(3))
    for dtype in floats:
        yield _odd_rows("softmax", dtype, _odd(3, 19, 2), _counts(3))
    for kernel in ("cross_entropy", "cross_entropy_cotangent", "softmax_tangent"):
        for dtype in floats:
            yield _odd_rows(kernel, dtype, _odd(5, 17, 4), _counts(4))
    for kernel in ("softmax", "softmax_tangent"):
        for dtype in floats:
            columns, inners = (16, 128, 1024, 8192), (16, 256, 4096, 65536)
            yield _inner(kernel, dtype, columns, inners, (1, 32, 1024))
    for kernel in ("log_softmax", "logsumexp", "log_softmax_cotangent"):
        for dtype in floats:
            yield _odd_rows(kernel, dtype, _odd(5, 17, 4), _counts(4))
    for dtype in floats:
        yield _rows("logsumexp_cotangent", dtype, _powers(3, 19, 4), _counts(3))


def _odd(low: int, high: int, step: int) -> tuple[int, ...]:
    return tuple(power + 1 for power in _powers(low, high, step))


# Reductions: their dtypes are those of the operand and of the result; a mean of 16-bit floats is
# made of sums in float32.


def _reduce() -> Iterator[Grid]:
    columns, counts = _powers(6, 28, 2), _counts(4)
    places = (128, 4096, 65536), (64, 1024, 16384), (1, 64)
    sums = [("float32",) * 2, ("bfloat16", "float32"), ("bfloat16",) * 2, ("int32",) * 2]
    for dtype, result in sums:
        yield _rows("sum", dtype, columns, counts, result=result)
        yield _inner("sum", dtype, *places, result=result)
    for kernel, dtype in itertools.product(("max", "argmax", "min"), ("float32", "bfloat16")):
        result = "int32" if kernel.startswith("arg") else dtype
        yield _rows(kernel, dtype, _powers(7, 27, 4), counts, result=result)
        yield _inner(kernel, dtype, *places, result=result)
    for dtype, result in sums[:3]:
        yield _rows("mean_and_var", dtype, _powers(7, 27, 4), counts, result=result)
        yield _inner("mean_and_var", dtype, *places, result=result)
    for dtype, result in sums[:3]:
        yield _odd_rows("sum", dtype, _odd(7, 17, 5), counts, result=result)


# Transposes, by what is left of them once dims that stay neighbours are merged


def _transpose() -> Iterator[Grid]:
    sides = (512, 2048, 8192, 16384)
    dtypes = {"float32": sides, "bfloat16": sides, "int8": sides, "float64": sides[:3]}
    for dtype, sizes in dtypes.items():
        yield _permuted(dtype, (1, 0), sizes, sizes)
    for dtype in ("bfloat16", "float32"):
        yield _permuted(dtype, (0, 2, 1, 3), (4, 32), (128, 512, 2048), (8, 32), (64, 128))
        yield _permuted(dtype, (0, 2, 1), (8, 64), (64, 512, 2048), (64, 512, 2048))
        yield _permuted(dtype, (1, 0, 2), (8, 128), (128, 2048), (64, 512))
        yield _permuted(dtype, (2, 1, 0), (64, 512), (64, 512), (64, 512))
    for dtype in ("bfloat16", "float32", "int8"):  # the channels of images, first and last
        yield _permuted(dtype, (0, 2, 1), (8, 64, 256), (3,), (2**12, 2**16, 2**20))
        yield _permuted(dtype, (0, 2, 1), (8, 64, 256), (2**12, 2**16, 2**20), (3,))
    for dtype in ("bfloat16", "float32"):
        odd = (513, 2049, 8193)
        yield _permuted(dtype, (1, 0), odd, odd)
        yield _permuted(dtype, (1, 0), (2, 4), (2**16, 2**20, 2**24))
        yield _permuted(dtype, (1, 0), (2**16, 2**20, 2**24), (2, 4))


def _permuted(dtype: str, permutation: Shape, *sizes: Sequence[int]) -> Grid:
    vertices = {
        shape: (Point("transpose", shape, dtype, permutation),)
        for shape in itertools.product(*sizes)
        if _is_measured(math.prod(shape), dtype)
    }
    ((first,), *_) = vertices.values()
    alignment = _fixed(vertices)["aligned"]
    return Grid(
        _name(
            vertices,
            f"axes={','.join(map(str, permutation))}",
            f"{'x'.join(map(str, first.shape))} and up",
        ),
        {
            "op": "transpose",
            "element_bytes": jnp.dtype(dtype).itemsize,
            "merged_permutation": list(permutation),
            "aligned": alignment,
        },
        {f"size{d}": tuple(values) for d, values in enumerate(sizes)},
        vertices,
    )


# Products. Of 8-bit factors the tensor cores read only those whose terms are contiguous, and XLA is
# slow with others.


def _matmul() -> Iterator[Grid]:
    rows, cols, depths = (1024, 8192), (1024, 8192, 65536), (1024, 8192)
    for axes in _LAYOUTS.values():
        yield _products("float32", axes, rows, cols, depths, "highest")
    for name in ("NN", "NT"):
        yield _products("bfloat16", _LAYOUTS[name], (1025, 8193), (1025, 50257), (1025, 8193))
    for axes in _LAYOUTS.values():
        yield _products("bfloat16", axes, rows, cols, depths)
    bytes_of = (2048, 8192), (2048, 8192), (2048, 8192)
    for name in ("NN", "NT"):
        yield _products("int8", _LAYOUTS[name], *bytes_of, result="int32")
        for precision in ("default", "highest"):
            axes, how = _LAYOUTS[name], (precision, "bfloat16")
            yield _products("float8_e4m3fn", axes, *bytes_of, *how)
    yield _products("float32", _LAYOUTS["NN"], rows, cols[:2], depths)


_LAYOUTS = {"NN": (1, 0), "NT": (1, 1), "TN": (0, 0)}
"""The dims of a and of b that are contracted; "T": the matrix is stored transposed."""


def _products(
    dtype: str,
    axes: Shape,
    rows: Sequence[int],
    cols: Sequence[int],
    depths: Sequence[int],
    precision: str = "default",
    result: str = "",
) -> Grid:
    """Products of one layout.

    With odd sizes a vertex stands for n and k of which one is aligned, and for even ones that are
    not.

    Args:
      dtype: of the factors.
      axes: the dims that are contracted, of a and of b.
      rows: the values of m.
      cols: the values of n.
      depths: the values of k.
      precision: as a point has it.
      result: the dtype of the result; that of the factors unless given.
    """
    how = {"result": result or dtype, "precision": precision}
    is_odd = rows[0] % 2 == 1
    more = [(0, 0), (-1, 0), (0, -1), (3, 3)] if is_odd else [(0, 0)]  # of n and of k
    vertices = {
        (m, n, k): tuple(
            Point("gemm", (m, k + more_k, n + more_n), dtype, axes, **how)
            for more_n, more_k in more
        )
        for m, n, k in itertools.product(rows, cols, depths)
    }
    (layout,) = (name for name, each in _LAYOUTS.items() if each == axes)
    return Grid(
        _name(vertices, layout, precision, "odd sizes" if is_odd else ""),
        _fixed(vertices),
        {"m": tuple(rows), "n": tuple(cols), "k": tuple(depths)},
        vertices,
        open="m",
    )


FAMILIES: dict[str, Callable[[], Iterator[Grid]]] = {
    "softmax": _softmax,
    "reduce": _reduce,
    "transpose": _transpose,
    "matmul": _matmul,
}
"""The grids of each op family that has some; a family's place in the sweep is its place here."""
