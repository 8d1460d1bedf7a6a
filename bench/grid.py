"""The problems that `python -m bench tune` measures, on grids of sizes for each kernel and dtype.

In a grid only sizes vary; dtype, options and alignment are the same. Rows are aligned if their
bytes are a multiple of 16, and are then read faster by XLA and by our kernels. Rows that are not
aligned have a grid for each smaller power of two that divides their bytes. Masked rows of bfloat16
that are not aligned are one grid, whose vertices stand for several lengths: a kernel has to be
faster for all of them; those of odd lengths also have a grid of their own.

A product is aligned if the rows of both factors, as they are stored, and of the result are aligned.

float16 is not measured: the classes of bfloat16 hold for it; nor is gelu_exact where gelu is
(docs/policy.md).

These are left out, so `None` leaves them to XLA: most arrays of less than 2^14 elements, masks and
scales of functions other than softmax, causal softmax with more or fewer queries than keys,
reductions with `where`, `prod`, `min` and `argmin`, sums of integers and of aligned rows, `max`
except of rows of bfloat16, `argmax` of float32 along other axes, axes that are not adjacent except
for `mean_and_var`, batches of products except in float32 at the highest precision, 8-bit floats,
and products with an addend.
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
"""The least elements of an operand, unless a grid has another limit."""

LARGEST_BYTES = 2**30
"""The most bytes of an operand: it fills a GPU many times over, and leaves room for float64."""

FILLING_BYTES = 2**26
"""An operand of this many bytes occupies all multiprocessors, and exceeds the L2 cache."""

FILLING_RESULTS = 2**23
"""A matrix of this many elements has about four tiles of 128 x 128 for each multiprocessor."""

MOST = 2**31 - 1
"""The largest size in a class."""

PRIMITIVES = {
    kernel.name.removeprefix("gpuops_"): primitive
    for primitive, kernel in _primitive.KERNELS.items()
}


@dataclasses.dataclass(frozen=True)
class Point:
    """A call of a kernel's primitive.

    Attributes:
      kernel: the primitive's name, without "gpuops_".
      shape: the shape of the main operand; for a product M x K x N, with the size of a batch first
        if there is one.
      dtype: the dtype of the main operand, or of the factors.
      axes: the axes of the rows; for a transpose the permutation; for a product the contracting
        dims of both factors.
      mask: the kind of mask: "causal", "padding" (a mask of the columns for each batch), "full" (a
        mask of the whole shape), or several of these; empty for none.
      scale: the factor of the operand.
      result: the dtype of the result of a reduction or a product.
      precision: the precision of a product, as JAX names it.
      activation: the activation of a layer, which also has a bias or a gate; empty for none.
    """

    kernel: str
    shape: Shape
    dtype: str
    axes: Shape
    mask: str = ""
    scale: float = 1.0
    result: str = ""
    precision: str = ""
    activation: str = ""

    def __str__(self) -> str:
        """Returns the point on one line, as raw results name it."""
        axes = "axes=" + ",".join(map(str, self.axes))
        scale = "" if self.scale == 1 else f"scale={self.scale}"
        parts = [self.kernel, "x".join(map(str, self.shape)), self.dtype, axes, self.mask, scale]
        parts += [self.precision, self.activation, self.result and f"to {self.result}"]
        return " ".join(filter(None, parts))

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
        """True for a product of two factors, also in a layer."""
        return self.kernel in ("gemm", "linear", "glu")

    @property
    def arrays(self) -> list[tuple[Shape, str]]:
        """The shapes and dtypes that make the problem: of an array and its masks, or of factors."""
        if not self.is_product:
            return [(self.shape, self.dtype), *((mask, "bool") for mask in self.masks)]
        *batch, m, k, n = self.shape
        is_a_transposed, is_b_transposed = (d - len(batch) == i for i, d in enumerate(self.axes))
        a, b = ((k, m) if is_a_transposed else (m, k)), ((n, k) if is_b_transposed else (k, n))
        more = {"linear": [((n,), self.dtype)], "glu": [(b, self.dtype)]}.get(self.kernel, [])
        return [((*batch, *a), self.dtype), ((*batch, *b), self.dtype), *more]

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the primitive except `implementation` and `algorithm`."""
        if self.kernel == "transpose":
            return {"permutation": self.axes}
        if self.is_product:
            how = {
                "precision": (jax.lax.Precision(self.precision),) * 2,
                "preferred_element_type": jnp.dtype(self.result),
            }
            if self.kernel != "gemm":
                return {"activation": self.activation or None, **how}
            a_axis, b_axis = self.axes
            batch = tuple(range(len(self.shape) - 3))
            numbers = (((a_axis,), (b_axis,)), (batch, batch))
            return {"dimension_numbers": numbers, "alpha": 1.0, "beta": 0.0, **how}
        if self.result:
            more: dict[str, Any] = {}
            if self.kernel in ("mean_and_var", "var"):
                more = {"correction": 0.0, "in_runs": not Rows(self.shape, self.axes).is_in_place}
            return {"axes": self.axes, "dtype": jnp.dtype(self.result), **more}
        if self.kernel.startswith("cross_entropy"):
            return {"axes": self.axes}
        return {"axes": self.axes, "scale": self.scale, "causal": "causal" in self.mask}

    @property
    def problem(self) -> dict[str, Any]:
        """The problem of the call, as the table of measurements describes it."""
        kernel = _primitive.KERNELS[PRIMITIVES[self.kernel]]
        arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in self.arrays]
        problem = kernel.problem(*arrays, **self.params)
        known = {k: v for k, v in problem.items() if k not in _primitive.OF_EXECUTION}
        return {"op": kernel.op, **known}


@dataclasses.dataclass(frozen=True)
class Grid:
    """Points whose problems differ only in sizes.

    Attributes:
      name: the kernel, the dtype, and other common properties of its points.
      fixed: the keys of classes besides the sizes, with their values.
      axes: the sizes that vary, with their values in ascending order.
      vertices: the points for each combination of sizes that is measured.
      open: the sizes, numbers of rows or of a product's columns, whose classes extend beyond the
        largest value if that fills the GPU, since larger problems then only take longer.
    """

    name: str
    fixed: dict[str, Any]
    axes: dict[str, tuple[int, ...]]
    vertices: dict[tuple[int, ...], tuple[Point, ...]]
    open: tuple[str, ...] = ()


def fills_the_gpu(point: Point) -> bool:
    """True if the point fills the GPU, so that more rows only take longer."""
    if point.is_product:
        *_, m, _, n = point.shape
        return m * n >= FILLING_RESULTS
    return math.prod(point.shape) * jnp.dtype(point.dtype).itemsize >= FILLING_BYTES


def points(grids: Iterable[Grid]) -> list[Point]:
    """Returns the points of grids, each once, in the order of the grids."""
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


def _is_measured(elements: int, dtype: str, smallest: int | None = None) -> bool:
    largest = LARGEST_BYTES // jnp.dtype(dtype).itemsize
    return (SMALLEST if smallest is None else smallest) <= elements <= largest


def _fixed(vertices: dict[tuple[int, ...], tuple[Point, ...]], **more: Any) -> dict[str, Any]:
    """The common fields of all problems of a grid, as classes name them."""
    problems = [point.problem for vertex in vertices.values() for point in vertex]
    named = ("masked", "scaled", "copied", "mean", "var")
    flags = {key: 1 for key in named if problems[0].get(key)}
    sizes = {"outer", "columns", "inner", "queries", "batch", "m", "n", "k", *named}
    aligned = [_measurements.traits(problem)["aligned"] for problem in problems]
    low, high = min(aligned), max(aligned)
    common = {k: v for k, v in problems[0].items() if k not in sizes} | flags
    return {**common, "aligned": low if low == high else [low, high], **more}


def _name(vertices: dict[tuple[int, ...], tuple[Point, ...]], *words: str) -> str:
    first = next(iter(vertices.values()))[0]
    result = f"to {first.result}" if first.result not in ("", first.dtype) else ""
    return " ".join(filter(None, [first.kernel, first.dtype, result, *words]))


def _alignment(fixed: dict[str, Any]) -> str:
    """The words for rows that are not aligned, in a name."""
    return "" if fixed["aligned"] == 16 else f"aligned to {fixed['aligned']} bytes"


def _ends(sizes: Sequence[int], more: Sequence[int], *, is_open: bool = False) -> dict[int, int]:
    """Names sizes that each stand for others, larger by each number in `more`.

    Returns:
      The first by the least size that it stands for; the last by the largest, unless classes extend
      beyond the last; and others as they are.
    """
    names = dict(zip(sizes, sizes, strict=True))
    last = sizes[-1] if is_open else sizes[-1] + max(more)
    return names | {sizes[0]: sizes[0] + min(more)} | {sizes[-1]: last}


def _rows(
    kernel: str,
    dtype: str,
    columns: Sequence[int],
    counts: Sequence[int],
    *,
    smallest: int | None = None,
    **options: Any,
) -> Grid:
    """Contiguous rows, `outer` of them.

    For the kernels of `_WITH_FACTOR` classes hold with a factor and without.

    Args:
      kernel: as in `Point`.
      dtype: as in `Point`.
      columns: the row lengths, of one alignment.
      counts: the numbers of rows.
      smallest: the least elements of an operand; None for `SMALLEST`.
      **options: options of the points.
    """
    vertices = {
        (n, rows): (Point(kernel, (rows, n), dtype, (1,), **options),)
        for n, rows in itertools.product(columns, counts)
        if _is_measured(n * rows, dtype, smallest)
    }
    fixed = _fixed(vertices, inner=1)
    factor = {"scaled": [0, 1]} if kernel in _WITH_FACTOR else {}
    return Grid(
        _name(vertices, "one row" if tuple(counts) == (1,) else "", _alignment(fixed)),
        fixed | factor,
        {"columns": tuple(columns), "outer": tuple(counts)},
        vertices,
        open=("outer",),
    )


def _odd_rows(
    kernel: str, dtype: str, columns: Sequence[int], counts: Sequence[int], **options: Any
) -> Iterator[Grid]:
    """A grid of rows of odd lengths, and of longer ones for each larger alignment below 16."""
    for more in _unaligned(dtype):
        yield _rows(kernel, dtype, [n + more for n in columns], counts, **options)


_NORMS = (128, 512, 2048, 16384), (1, 8, 64)
"""The numbers of channels, and the numbers of images."""


def _images(kernel: str, dtype: str, columns, counts, **options: Any) -> Grid:
    """Rows of channels in 8 images: a kernel reduces each image, and the results are merged."""
    vertices = {
        (n, rows): (Point(kernel, (8, rows // 8, n), dtype, (0, 2), **options),)
        for n, rows in itertools.product(columns, counts)
        if _is_measured(n * rows, dtype)
    }
    fixed = _fixed(vertices, inner=1)
    return Grid(
        _name(vertices, "axes apart", _alignment(fixed)),
        fixed,
        {"columns": tuple(columns), "outer": tuple(counts)},
        vertices,
        open=("outer",),
    )


def _unaligned(dtype: str) -> Sequence[int]:
    return (0, 1, 3) if jnp.dtype(dtype).itemsize == 2 else (0, 1)


def _inner(
    kernel: str,
    dtype: str,
    columns,
    inners,
    counts,
    *,
    width: int = 1,
    within: str = "",
    smallest: int | None = None,
    **options: Any,
) -> Grid:
    """Rows along an axis that is not the last, `inner` of them interleaved in memory.

    With a `width`, that many adjacent ones form one row, as for groups of channels that come last:
    a kernel reduces each channel, and the results are merged. `within` tells a grid from a larger
    one, in whose range its sizes are.
    """

    def point(n: int, inner: int, outer: int) -> Point:
        if width == 1:
            return Point(kernel, (outer, n, inner), dtype, (1,), **options)
        return Point(kernel, (outer, n, inner // width, width), dtype, (1, 3), **options)

    vertices = {
        (n, inner, outer): (point(n, inner, outer),)
        for n, inner, outer in itertools.product(columns, inners, counts)
        if _is_measured(n * inner * outer, dtype, smallest)
    }
    fixed = _fixed(vertices)
    words = "another axis" if width == 1 else "axes apart, channels last"
    return Grid(
        _name(vertices, words, within, _alignment(fixed)),
        fixed,
        {"columns": tuple(columns), "inner": tuple(inners), "outer": tuple(counts)},
        vertices,
        open=("inner", "outer"),
    )


_WITH_FACTOR = ("softmax", "softmax_tangent")
"""Kernels that were as far ahead with a factor as without, or further (docs/policy.md)."""

_SCALE = 0.125
"""The factor of scores, for heads of 64 elements."""


def _attention(
    kernel: str,
    dtype: str,
    masks: Sequence[str],
    columns: Sequence[int],
    counts: Sequence[int],
    *,
    stands_for: Sequence[int] = (0,),
    is_aligned: bool = True,
) -> Grid:
    """Matrices of scores with masks; a class holds for all kinds of `masks`.

    Of aligned rows, matrices have as many queries as columns, or a power of two if that does not
    divide the rows; fewer rows are one matrix. Of others they are as many square ones as fit, which
    leaves out up to a quarter of the rows; if these are fewer than three, rows have one query each,
    as of a new token. With a mask, classes hold without the factor, too: 107 pairs of points on an
    H200 were as far ahead with it as without, within 1 %.

    Args:
      kernel: as in `Point`.
      dtype: as in `Point`.
      masks: the kinds of masks.
      columns: the row lengths.
      counts: the numbers of rows.
      stands_for: what is added to a length for the points of a vertex.
      is_aligned: whether the rows are aligned.
    """

    def point(n: int, rows: int, mask: str) -> Point:
        if is_aligned:
            queries = n if rows % n == 0 else min(rows, 2 ** (n.bit_length() - 1))
        else:
            queries = n if rows // n >= 3 else 1
        matrices = rows // queries
        is_square = not is_aligned and queries > 1
        batch = matrices if is_square else 2 ** (matrices.bit_length() // 2)
        shape = (batch, matrices // batch, queries, n)
        return Point(kernel, shape, dtype, (3,), mask, _SCALE)

    def exists(n: int, rows: int) -> bool:
        is_whole = rows % n == 0 if is_aligned else rows // n >= 3
        return _is_measured(n * rows, dtype) and (is_whole or "causal" not in masks[0])

    names = _ends(columns, stands_for)
    vertices = {
        (names[n], rows): tuple(
            point(n + more, rows, mask) for more, mask in itertools.product(stands_for, masks)
        )
        for n, rows in itertools.product(columns, counts)
        if exists(n, rows)
    }
    causal = {"queries": [1, MOST], "square": 1} if "causal" in masks[0] else {}
    fixed = _fixed(vertices, inner=1, scaled=[0, 1], **causal)
    return Grid(
        _name(vertices, " or ".join(masks), f"scale={_SCALE}", _alignment(fixed)),
        fixed,
        {"columns": tuple(names.values()), "outer": tuple(counts)},
        vertices,
        open=("outer",),
    )


def _odd_attention(kernel: str, dtype: str, masks: Sequence[str]) -> Iterator[Grid]:
    """The same for rows that are not aligned.

    Those of float32 are one grid for each alignment. Those of bfloat16 are one grid, of the least
    and the most alignment, and one of the least alone, of which kernels take more.
    """
    if kernel == "softmax":  # texts of encoders of images have 77 tokens
        columns = (49, 65, 257, 513, 2049) if dtype == "bfloat16" else (77, 257, 513, 2049)
        counts = tuple(2**e for e in (11, 12, 14, 17, 20))
    elif dtype == "bfloat16" and masks == ["causal"]:
        columns, counts = (49, 193, 257, 2049), tuple(2**e for e in (10, 12, 14, 17, 20))
    else:
        shortest = (49, 193) if masks == ["causal"] else (193,) if dtype == "bfloat16" else (49,)
        columns, counts = (*shortest, 2049), tuple(2**e for e in (10, 14, 17, 20))
    if dtype == "bfloat16":
        grids = [(columns, _unaligned(dtype)[::2]), (columns, (0,))]
    else:
        grids = [(tuple(n + more for n in columns), (0,)) for more in _unaligned(dtype)]
    for lengths, stands_for in grids:
        yield _attention(
            kernel, dtype, masks, lengths, counts, stands_for=stands_for, is_aligned=False
        )


# The softmax family. Lengths and numbers of rows without which the table took the same calls of
# published models are left out.


def _softmax() -> Iterator[Grid]:
    floats = ("bfloat16", "float32")
    # For bfloat16, XLA takes as long for a row as for one of the next power of two.
    lengths = sorted({*_LENGTHS, 136, 240, 264, 480, 520, 960})
    counts = (*_powers(0, 10, 2), *_powers(14, 18, 2), 2**24)
    yield _rows("softmax", "bfloat16", lengths, counts, smallest=2**12)
    lengths = sorted({*_LENGTHS, 8, 196, 400, 1500})
    counts = (1, *_powers(4, 20, 2), 2**24, 2**26)
    yield _rows("softmax", "float32", lengths, counts, smallest=2**12)
    lengths = (8, 128, 2048, 131072, 524288)
    counts = (1, 8, 64, 2**12, *_powers(18, 24, 3))
    yield _rows("softmax_tangent", "bfloat16", lengths, counts, smallest=2**9)
    counts = (*_powers(0, 9, 3), 2**15, 2**21, 2**24)
    yield _rows("softmax_tangent", "float32", lengths, counts, smallest=2**9)
    for kernel, dtype in itertools.product(("softmax", "softmax_tangent"), floats):
        inners = _powers(8, 20, 4) if kernel == "softmax" else (256, 4096, 2**14, 2**16, 2**20)
        longer = {("softmax", "bfloat16"): (1024, 8192), ("softmax", "float32"): (8192,)}
        lengths = (16, 128, *longer.get((kernel, dtype), (1024,)))
        yield _inner(kernel, dtype, lengths, inners, (1, 32, 1024))
        # Of tokens or keys, with a head or an expert for each element side by side.
        yield _inner(kernel, dtype, (128, 1024), (8, 32), (32, 1024), within="of few side by side")
    for dtype in floats:  # the classes of pixels
        channels, pixels = (16, 64, 256), (2**14, 2**16, 2**17, 2**20)
        yield _inner("log_softmax_cotangent", dtype, channels, pixels, (1, 32))
    matrices = tuple(2**e for e in (10, 12, 15, 16, 18, 21))
    for dtype in floats:
        widths = (128, 256, 512, 2048, 8192)
        yield _attention("softmax", dtype, ["causal padding"], widths, matrices)
        between = (136,) if dtype == "bfloat16" else ()
        widths = (64, *between, 256, 512, 2048, 8192)
        yield _attention("softmax", dtype, ["causal"], widths, matrices)
        more = (64, 136, 4096) if dtype == "bfloat16" else (320,)
        widths, counts = sorted({*more, 256, 512, 1152, 2048, 8192}), (2**6, *matrices)
        yield _attention("softmax", dtype, ["padding", "full"], widths, counts)
        widths, counts = (64, 512, 2048, 8192), (*_powers(0, 9, 3), *_powers(15, 24, 3))
        yield _attention("softmax_tangent", dtype, ["causal"], widths, _counts(3))
        yield _attention("softmax_tangent", dtype, ["padding", "full"], widths, counts)
        for kernel in ("softmax", "softmax_tangent"):
            for mask in (["causal"], ["padding", "full"]):
                yield from _odd_attention(kernel, dtype, mask)
    for dtype in floats:
        lengths = (512, 1000, 2048, 8192, 2**15, 2**19)
        yield _rows("log_softmax", dtype, lengths, _FEWER_COUNTS)
    for dtype in floats:
        columns = (33, 513, 8193, *((30521,) if dtype == "float32" else ()), 50257, 131073)
        counts = sorted({*_counts(4), 64})
        yield from _odd_rows("log_softmax_cotangent", dtype, columns, counts)
    for dtype in floats:
        longer = (32769,) if dtype == "float32" else ()
        columns = (9, 33, 73, 193, 257, 2049, 8193, *longer, 524289)
        yield from _odd_rows("softmax", dtype, columns, _counts(3))
    for dtype in floats:
        yield _inner("log_softmax", dtype, (16, 256), (2**14, 2**17, 2**20), (1, 32))
    classes, pixels = (19, 150), (65**2, 513**2, 1025**2)  # images of odd sizes
    for kernel, dtype in itertools.product(
        ("softmax", "log_softmax", "log_softmax_cotangent"), floats
    ):
        yield _inner(kernel, dtype, classes, pixels, (1, 16))
    for kernel, dtype in itertools.product(("cross_entropy", "cross_entropy_cotangent"), floats):
        yield _inner(kernel, dtype, (16, 128), (2**14, 2**18), (1, 32))
        yield _inner(kernel, dtype, classes, (pixels[0], pixels[-1]), (1, 16))
    for dtype in floats:
        lengths = (8, 32, 128, 512, 2048, 32768, 524288)
        yield _rows("cross_entropy", dtype, lengths, _FEWER_COUNTS)
    for dtype in floats:
        lengths = (1000, 2048, 32768, 524288)
        lengths = (8, 128, *lengths) if dtype == "bfloat16" else lengths
        yield _rows("cross_entropy_cotangent", dtype, lengths, _FEWER_COUNTS)
    for dtype in floats:
        lengths = (8, 32, 2048, 524288)
        yield _rows("logsumexp", dtype, lengths, _FEWER_COUNTS, smallest=2**9)
    for dtype in floats:
        lengths = (8, 32, 512, 2048, 8192, 32768, 524288)
        yield _rows("log_softmax_cotangent", dtype, lengths, _FEWER_COUNTS, smallest=2**13)
    counts = sorted({*_counts(4), 64})
    # The vocabulary of XLM-R has 250002 words.
    longest: dict[str, tuple[int, ...]] = {"bfloat16": (2**18 + 1,), "float32": ()}
    for dtype in floats:
        yield from _odd_rows("cross_entropy", dtype, (*_odd(5, 17, 4), *longest[dtype]), counts)
        yield from _odd_rows("logsumexp", dtype, _odd(5, 17, 4), counts, smallest=2**13)
    for dtype in floats:
        lengths = (33, 513, 8193, 32769, 131073, *longest[dtype])
        yield from _odd_rows("log_softmax", dtype, lengths, _counts(4))
    lengths = (*_odd(5, 17, 4), *longest["bfloat16"])
    yield from _odd_rows("cross_entropy_cotangent", "bfloat16", lengths, counts)
    yield from _odd_rows("cross_entropy_cotangent", "float32", (8193, 131073), counts[1:])
    for dtype in floats:
        patches = (257,) if dtype == "float32" else ()  # 16 x 16, and one more
        lengths = (33, *patches, 8193, 131073)
        yield from _odd_rows("softmax_tangent", dtype, lengths, _counts(4)[1:], smallest=2**13)
    yield _rows("logsumexp_cotangent", "bfloat16", _powers(3, 19, 4), _FEWER_COUNTS)


_LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32000, 2**24)
"""Row lengths of softmax, which is ahead for some and behind for others."""

_FEWER_COUNTS = (*_powers(0, 18, 3), 2**24)
"""Numbers of rows for functions that are ahead for 2^21 if they are for 2^18 and 2^24."""


def _odd(low: int, high: int, step: int) -> tuple[int, ...]:
    return tuple(power + 1 for power in _powers(low, high, step))


# Reductions: the dtypes are those of the operand and of the result; a mean of 16-bit floats uses
# sums in float32. Classes of sums hold for means, too, which take XLA longer, and classes of
# bfloat16 hold for results of bfloat16 and of float32.


def _reduce() -> Iterator[Grid]:
    counts = _counts(4)
    places = (64, 1024, 16384), (1, 64)
    tokens = (128, 512, 4096, 65536)
    sums = [("bfloat16", "float32"), ("float32", "float32")]
    # The mean of losses.
    losses = _powers(7, 17, 2)
    yield _rows("mean", "float32", losses, (1,), smallest=128, result="float32")
    for dtype, result in sums:
        pixels, channels = (64, 256, 16384, 65536), (64, *_powers(8, 17, 3))
        yield _images("mean_and_var", dtype, pixels, channels, result=result)
        # 13 x 13 to 149 x 149 pixels, and their even neighbours, which are multiples of 4.
        for more in _unaligned(dtype)[::2]:
            sizes = (169 + more, 22201 + more), (256, 4096, 16384)
            yield _images("mean_and_var", dtype, *sizes, result=result)
        yield _inner("mean_and_var", dtype, _powers(6, 18, 4), *_NORMS, width=16, result=result)
    for dtype, result in sums:
        lengths = (128, 2048, 2**27)
        yield _rows("mean_and_var", dtype, lengths, counts, smallest=2**11, result=result)
        norms = (64, 256, 1024, 4096, 16384), (1, 64)
        pixels = (*tokens, 2**20)
        yield _inner("mean_and_var", dtype, pixels, *norms, smallest=2**13, result=result)
        lengths = (384, 1024, 2048, 2**15, 2**27)
        yield _rows("var", dtype, lengths, sorted({*counts, 1024}), result=result)
        yield _inner("var", dtype, tokens, *places, result=result)
    for dtype in ("bfloat16", "float32"):  # of hidden states, and of maps of 7 x 7 pixels and more
        widths, rows = (64, 512, 1024, 4096, 8192), (64, 256, 4096, 16384)
        yield _rows("mean", dtype, widths, rows, result=dtype)
        counts_of_maps = (512, 4096, 16384, 65536)
        yield from _odd_rows("mean", dtype, (49, 193), counts_of_maps, result=dtype)
    # Also gradients of biases.
    sizes = (128, 1024, 2048, 4096, 16384, 65536), (64, 1024, 4096, 16384)
    yield _inner("sum", "bfloat16", *sizes, places[1], result="float32")
    sizes = (128, 1024, 4096, 16384, 65536), (64, 1024, 4096, 16384)
    yield _inner("sum", "float32", *sizes, places[1], result="float32")
    # XLA is mostly faster for powers of two: grids of the numbers of tokens between two of them.
    octaves = (264, 496), (528, 992), (1040, 2000), (2080, 4000), (4112, 8000)
    for kernel, dtype, some, channels, images in (
        ("sum", "bfloat16", octaves[2:], (336, 768, 1280, 5120), (1,)),
        ("sum", "float32", octaves[3:], (336, 768, 1280, 5120), (1,)),
        ("mean", "bfloat16", octaves[:4], (768, 1280, 4096), (4, 32)),
    ):
        result = "float32" if kernel == "sum" else dtype
        for lengths in some:
            within = "of {} to {}".format(*lengths)
            yield _inner(kernel, dtype, lengths, channels, images, within=within, result=result)
    for dtype in ("float32", "bfloat16"):  # pooling of 7 x 7 and 14 x 14 pixels, and of frames
        lengths = (49, 196, 512, 1024, 1536, 4096)
        images = (1, 8, 64, *((512,) if dtype == "bfloat16" else ()))
        yield _inner("mean", dtype, lengths, (256, 512, 2048), images, result=dtype)
    lengths = (128, 2048, 32768, 155648)
    yield _rows("max", "bfloat16", lengths, counts[2:], result="bfloat16")
    for dtype in ("float32", "bfloat16"):
        lengths = sorted({*_powers(7, 27, 4), 8192})
        yield _rows("argmax", dtype, lengths, sorted({*counts, 32}), result="int32")
    classes = (16, 128, 256, 4096, 65536)
    yield _inner("argmax", "bfloat16", classes, places[0], (1, 8, 64), result="int32")
    yield from _odd_rows("sum", "bfloat16", _odd(7, 17, 5), counts, result="float32")
    yield from _odd_rows("sum", "float32", (9, 33, 129), counts, result="float32")
    for dtype in ("float32", "bfloat16"):  # of pixels' classes, and of vocabularies
        yield from _odd_rows("argmax", dtype, (17, 129, 1025, 50257), counts, result="int32")


# Transposes, after dims that stay adjacent are merged. Many are ahead alone, but none is between
# neighbouring operations, since XLA fuses its own transpose into these.


def _transpose() -> Iterator[Grid]:
    yield _permuted("bfloat16", (0, 2, 1, 3), (32,), (2048,), (8, 32), (64, 128))  # heads


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


# Products. The tensor cores read integers of 8 bits only if they are contiguous along k, and XLA is
# slow with others.


def _matmul() -> Iterator[Grid]:
    sizes = (1, 16, 128, 256, 1024, 8192), (1024, 3072, 8192), (384, 768, 2048)
    yield _layers("linear", "bfloat16", *sizes, activation="gelu")
    sizes = (2048, 65536), (384, 4096), (193, 1025)
    for activation in ("gelu", "relu"):
        yield _layers("linear", "bfloat16", *sizes, activation=activation)
    # In TF32, JAX's default, XLA copies a b that is stored row by row.
    sizes = (192, 384, 1024, 4096), (384, 1024, 4096), (512, 1024, 4096)
    yield _products("float32", _LAYOUTS["NN"], *sizes)
    sizes = (192, 4096, 32768), (3072, 4096, 16384), (768, 4096)
    yield _layers("linear", "float32", *sizes, activation="gelu")
    yield _layers("linear", "float32", sizes[0][1:], *sizes[1:], activation="gelu_exact")
    for axes in _LAYOUTS.values():
        sizes = (1024, 8192), (1024, 3072, 65536), (512, 1024, 8192)
        yield _products("float32", axes, *sizes, "highest")
    for activation in ("", "gelu"):
        sizes = (384, 1024, 16384), (768, 6400), (768, 6400)
        how = {"activation": activation, "precision": "highest"}
        yield _layers("linear", "float32", *sizes, **how)
    # Sizes for which k is divided among blocks.
    yield _products("bfloat16", _LAYOUTS["NT"], (128, 256, 1024), (512, 1024), (2048, 4096))
    # Vocabularies of odd sizes, and other odd sizes.
    yield _products("bfloat16", _LAYOUTS["NN"], (1025, 8193), (1025, 50257), (1025, 8193))
    for layout in ("NN", "NT"):
        yield _products("float32", _LAYOUTS[layout], (512, 4096), (8193, 50257), (312, 4096))
    yield _products("float32", _LAYOUTS["NT"], (1024,), (8193, 50257), (384, 2048), "highest")
    # Fewer elements than fill the GPU.
    sizes = (128, 768), (256, 1024, 3072), (384, 1024, 4096)
    yield _products("bfloat16", _LAYOUTS["NN"], *sizes)
    yield _layers("linear", "bfloat16", *sizes)
    heads = {"batch": (16, 64)}
    yield _products("float32", (2, 2), (512, 2048), (512, 2048), (128,), "highest", **heads)
    yield _layers(
        "glu", "bfloat16", (64, 1024, 4096), (5632, 14336), (2048, 5120), activation="silu"
    )
    yield _layers("glu", "bfloat16", (1024, 8192), (5120, 16384), (2048, 4096), activation="gelu")
    of_bytes = (2048, 8192), (2048, 8192), (2048, 8192)
    yield _products("int8", _LAYOUTS["NN"], *of_bytes, result="int32")


_LAYOUTS = {"NN": (1, 0), "NT": (1, 1), "TN": (0, 0)}
"""The contracting dims of a and b; "T": the matrix is stored transposed."""


def _products(
    dtype: str,
    axes: Shape,
    rows: Sequence[int],
    cols: Sequence[int],
    depths: Sequence[int],
    precision: str = "default",
    result: str = "",
    batch: Sequence[int] = (),
) -> Grid:
    """Products of one layout.

    With odd sizes a vertex also stands for n and k of which one is aligned, and for even ones that
    are not aligned. If only n is odd, it also stands for even n.

    Args:
      dtype: the dtype of the factors.
      axes: the contracting dims of a and b.
      rows: the values of m.
      cols: the values of n.
      depths: the values of k.
      precision: as in `Point`.
      result: the dtype of the result; that of the factors unless given.
      batch: the sizes of batches; empty for single products.
    """
    how = {"result": result or dtype, "precision": precision}
    more = [(0, 0)]  # of n and of k
    if cols[0] % 2 == 1:
        more = [(0, 0), (-1, 0), (0, -1), (3, 3)] if depths[0] % 2 == 1 else [(0, 0), (1, 0)]
    more_of_n, more_of_k = zip(*more, strict=True)
    names_of_n = _ends(cols, more_of_n, is_open=True)
    names_of_k = _ends(depths, more_of_k)
    vertices = {
        (*b, m, names_of_n[n], names_of_k[k]): tuple(
            Point("gemm", (*b, m, k + more_k, n + more_n), dtype, axes, **how)
            for more_n, more_k in more
        )
        for *b, m, n, k in itertools.product(*([batch] if batch else []), rows, cols, depths)
    }
    lead = 1 if batch else 0
    (layout,) = (
        name for name, each in _LAYOUTS.items() if each == tuple(axis - lead for axis in axes)
    )
    words = ["batches" if batch else "", "odd sizes" if len(more) > 1 else ""]
    return Grid(
        _name(vertices, layout, precision, *words),
        _fixed(vertices),
        {
            **({"batch": tuple(batch)} if batch else {}),
            "m": tuple(rows),
            "n": tuple(names_of_n.values()),
            "k": tuple(names_of_k.values()),
        },
        vertices,
        open=("m", "n"),
    )


def _layers(
    kernel: str,
    dtype: str,
    rows: Sequence[int],
    cols: Sequence[int],
    depths: Sequence[int],
    *,
    activation: str = "",
    precision: str = "default",
) -> Grid:
    """Dense layers with a bias, or with a gate.

    With odd k a vertex stands for k of the least alignment, and of the most below 16 bytes.

    Args:
      kernel: "linear" or "glu".
      dtype: the dtype of the operands and of the result.
      rows: the values of m.
      cols: the values of n.
      depths: the values of k.
      activation: as in `Point`.
      precision: as in `Point`.
    """
    how = {"result": dtype, "precision": precision, "activation": activation}
    is_odd = depths[0] % 2 == 1
    stands_for = _unaligned(dtype)[::2] if is_odd else (0,)
    names = _ends(depths, stands_for)
    vertices = {
        (m, n, names[k]): tuple(
            Point(kernel, (m, k + more, n), dtype, (1, 0), **how) for more in stands_for
        )
        for m, n, k in itertools.product(rows, cols, depths)
    }
    return Grid(
        _name(vertices, activation, precision, "odd sizes" if is_odd else ""),
        _fixed(vertices),
        {"m": tuple(rows), "n": tuple(cols), "k": tuple(names.values())},
        vertices,
        open=("m", "n"),
    )


FAMILIES: dict[str, Callable[[], Iterator[Grid]]] = {
    "softmax": _softmax,
    "reduce": _reduce,
    "transpose": _transpose,
    "matmul": _matmul,
}
"""The grids of each op family, in the order of the sweep."""
