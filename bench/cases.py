"""Which problems the main table and the ladders run, on a GPU and without one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from bench import documents, ops
from bench.problem import Floor, Problem, Shape, first_of_each_op


def main(*, gpu: bool, quick: bool = False) -> list[Problem]:
    """Returns the problems of the main table, grouped by family.

    Args:
      gpu: True for sizes that fill a GPU, False for sizes that run fast on the host.
      quick: True for only the first problem of each op.
    """
    problems = list(_gpu() if gpu else _host())
    return first_of_each_op(problems) if quick else problems


def ladder(families: Sequence[str], *, gpu: bool, quick: bool = False) -> list[Problem]:
    """Returns the problems of the documents behind the ladders.

    Args:
      families: the op families.
      gpu: False for one small shape instead of the shapes of each document.
      quick: True for only the last, largest shape of each document.
    """
    problems = []
    for family in families:
        each = documents.LADDERS[family]
        shapes = list(each.times_us) if gpu else [each.small_shape]
        series = "ladder" if len(shapes) > 1 else None
        for shape in shapes[-1:] if quick else shapes:
            size = shape[0] if family == "matmul" else None
            problems.append(ops.make(each.op, shape, "float32", series=size and series, size=size))
    return problems


def _rows(op: str, columns: Sequence[int], dtype: str, **options: Any) -> Iterator[Problem]:
    """Rows of each length, 2^28 elements in all; with a series, the points of a figure's line."""
    for n in columns:
        size = n if "series" in options else None
        yield ops.make(op, (2**28 // n, n), dtype, size=size, **options)


_SHORT_ROWS = tuple(2**e for e in range(5, 14))
_LONG_ROWS = tuple(2**e for e in range(14, 19))
_ODD_ROWS = (31, 33, 127, 1000, 1001, 1023, 4097, 50257, 128257)
_SMALL = tuple(itertools.product((32, 1024, 2048), repeat=2))
_ATTENTION = (8, 16, 2048, 2048)
_ODD_ATTENTION = ((4, 1500), (8, 1000), (128, 197))


def _softmax_family() -> Iterator[Problem]:
    """Rows of every length, with every function and option of the family.

    The floors are for an H200. They demand the copy bandwidth, of one read and one write of the
    memory, for all row lengths and ops.
    """
    lengths = "row length, 2^28 elements"
    short = Floor(ceiling=0.95, ratio=0.99, mean_ratio=1.0)
    small = Floor(ratio=1 / 1.05, slack_us=0.1)
    for dtype in ("float32", "bfloat16"):
        yield from _rows("softmax", _SHORT_ROWS, dtype, series=lengths, floor=short)
        yield from _rows("softmax", _LONG_ROWS, dtype, series=lengths, floor=Floor(ceiling=0.94))
        yield from _rows("softmax", _ODD_ROWS, dtype, floor=Floor(ceiling=0.88))
        for shape in _SMALL:
            yield ops.make("softmax", shape, dtype, floor=small)
    for shape in ((1, 2**28), (16, 2**24)):
        yield ops.make("softmax", shape, "float32", floor=Floor(ceiling=0.92))
    yield ops.make("softmax", (100, 1_000_000), "float32", floor=Floor(ceiling=0.80))
    yield ops.make("softmax", (100, 1_000_000), "bfloat16")
    yield ops.make("softmax", (40, 4_000_000), "float32")
    yield ops.make("softmax", (65536, 1024), "float32")
    yield from _rows("softmax", (4096,), "float16")
    yield from _rows("softmax", (1024,), "float64")

    attention = functools.partial(ops.make, "softmax", _ATTENTION, "bfloat16")
    yield attention(where=True, floor=Floor(ceiling=0.90))
    yield attention(scale=0.125, causal=True, floor=Floor(ceiling=1.10))  # not all is read
    yield attention(scale=0.125)
    yield ops.make("softmax_vjp", _ATTENTION, "bfloat16", scale=0.125)
    yield attention(axis=1, floor=Floor(ceiling=0.90))
    for batch, n in _ODD_ATTENTION:
        for dtype in ("bfloat16", "float32"):
            masked = functools.partial(ops.make, "softmax", (batch, 12, n, n), dtype, scale=0.125)
            yield masked(causal=True, floor=Floor(ratio=1.0))
            yield masked(where=True, floor=Floor(ratio=1.0))
    yield ops.make("softmax", (8192, 32768), "float32", axis=0, floor=Floor(ceiling=0.90))
    yield ops.make("softmax", (8192, 32768), "bfloat16", axis=0)
    for dtype in ("float32", "bfloat16"):
        yield from _rows("softmax", (1024, 32768), dtype, scale=0.125)
    for dtype in ("float32", "bfloat16"):
        yield ops.make("softmax", (2048, 131072), dtype, axis=0)
        yield ops.make("softmax", (128, 2048, 1024), dtype, axis=1)
        yield ops.make("softmax_vjp", (128, 2048, 1024), dtype, axis=1)

    for op in ("log_softmax", "logsumexp"):
        for dtype in ("float32", "bfloat16"):
            yield from _rows(op, (1024, 8192, 65536, 262144), dtype, floor=Floor(ceiling=0.94))
    for op in ("softmax_vjp", "log_softmax_vjp"):
        backward = Floor(ceiling=0.93)
        yield from _rows(op, (1024, 8192, 32768, 131072), "bfloat16", floor=backward)
    yield from _rows("cross_entropy", (8192, 131072), "bfloat16")
    yield from _rows("cross_entropy_grad", (1024,), "bfloat16")
    loss = Floor(ceiling=0.93, ratio=3.2)
    yield from _rows("cross_entropy_grad", (8192, 32768, 131072), "bfloat16", floor=loss)


_RAGGED_ROWS = (
    ("max", (1048576, 77), "bfloat16"),
    ("sum", (60000, 513), "bfloat16"),
    ("sum", (12345, 678), "bfloat16"),
    ("sum", (8388608, 10), "float32"),
    ("argmax", (1048576, 33), "int8"),
)
"""Rows whose length is not a multiple of 16 bytes."""


def _gpu() -> Iterator[Problem]:
    yield from _softmax_family()
    for exponent in (14, 16, 18, 20, 22, 24, 26, 29):
        yield ops.make("sum", (2**exponent,), "float32", series="elements", size=2**exponent)
    yield ops.make("sum", (2**26,), "bfloat16")
    yield ops.make("sum", (2**26,), "int32")
    yield ops.make("sum", (2**26,), "float64")
    for shape in ((8192, 32768), (262144, 1024), (2**22, 33)):
        for axis in (0, 1):
            yield ops.make("sum", shape, "float32", axis=axis)
    yield ops.make("sum", (64, 4096, 512), "bfloat16", axis=1)
    for op, shape, dtype in _RAGGED_ROWS:
        yield ops.make(op, shape, dtype, axis=1)
    for dtype in ("float32", "bfloat16"):  # pooling, channels first and last
        yield ops.make("mean", (64, 256, 56, 56), dtype, axis=(2, 3))
        yield ops.make("mean", (64, 56, 56, 256), dtype, axis=(1, 2))
        yield ops.make("mean", (256, 56, 56, 64), dtype, axis=(1, 2))
    for op in ("mean", "prod", "max", "min", "argmax", "argmin"):
        yield ops.make(op, (2**26,), "float32")
        yield ops.make(op, (8192, 32768), "float32", axis=1)

    yield from _moments()

    for dtype in ("float32", "bfloat16", "int8"):
        for n in (1024, 4096, 16384):
            yield ops.make("transpose", (n, n), dtype, series="rows and columns", size=n)
    for shape, axes, dtype in _TRANSPOSES:
        yield ops.make("transpose", shape, dtype, axes=axes)

    yield from _products_of_16_bits()
    yield from _products_of_floats()
    yield from _products_of_8_bits()
    yield from _layers()


def _moments() -> Iterator[Problem]:
    """Means and variances of rows, of whole arrays, and of normalisation layers.

    The floors are for an H200. XLA reads the array twice.
    """
    once = Floor(ratio=1.8)
    yield ops.make("mean_and_var", (16384, 8192), "float32", axis=1, floor=once)
    yield ops.make("var", (2**28,), "float32", floor=once)
    for op in ("var", "std"):
        yield ops.make(op, (16384, 8192), "float32", axis=1, floor=Floor(ratio=1.0))
        yield ops.make(op, (2**26,), "bfloat16")
        yield ops.make(op, (8192, 32768), "float32", axis=0)
    for dtype in ("float32", "bfloat16"):
        for columns in (1024, 4096, 8192):  # layer norm
            yield ops.make("mean_and_var", (8192, columns), dtype, axis=1)
        for shape, axis in _BATCH_NORM:
            yield ops.make("mean_and_var", shape, dtype, axis=axis)


# The channels last and first.
_BATCH_NORM = (((64, 56, 56, 256), (0, 1, 2)), ((64, 256, 56, 56), (0, 2, 3)))


_LARGE_PRODUCT = Floor(ratio=0.98, mean_ratio=1.0)
_SMALL_PRODUCT = Floor(ratio=0.95, mean_ratio=1.05)


def _products_of_16_bits() -> Iterator[Problem]:
    """Products of every size and layout; the floors are for an H200."""
    # The layouts of the gradients of a product: A B^T and A^T B.
    transposed = ("dot_general_of_rows", "dot_general_of_columns")
    for n in _SQUARES:
        floor = _LARGE_PRODUCT if n >= 2048 else _SMALL_PRODUCT
        series = "M = N = K"
        yield ops.make("matmul", (n, n, n), "bfloat16", series=series, size=n, floor=floor)
        if n >= 2048:
            for op in transposed:
                yield ops.make(op, (n, n, n), "bfloat16", floor=floor)
    for op, shape in itertools.product(("matmul", *transposed), _LARGE_PRODUCTS):
        yield ops.make(op, shape, "bfloat16", floor=_LARGE_PRODUCT)
    for shape in (*_FEW_ROWS, *_BATCHES):
        yield ops.make("matmul", shape, "bfloat16", floor=_SMALL_PRODUCT)
    yield ops.make("dot_general", (128, 1024, 128, 1024), "bfloat16")
    yield ops.make("matmul", (4096, 4096, 4096), "float16")
    for shape, tflops in _UNALIGNED_PRODUCTS.items():
        yield ops.make("matmul", shape, "bfloat16", floor=tflops and Floor(tflops=tflops))
    vocabulary = Floor(ratio=2.5)
    yield ops.make("matmul", (8192, 2048, 50257), "bfloat16", floor=vocabulary)
    yield ops.make("dot_general_of_rows", (8192, 50257, 2048), "bfloat16", floor=vocabulary)
    yield ops.make("dot_general_of_columns", (2048, 8192, 50257), "bfloat16", floor=vocabulary)


def _products_of_floats() -> Iterator[Problem]:
    """Products in float32, at the highest precision and in TF32, and in float64.

    The floors are for an H200.
    """
    floors = {4096: Floor(tflops=170), 8192: Floor(tflops=190)}
    for n in _SQUARES:
        series = "M = N = K"
        yield ops.make("matmul", (n, n, n), "float32", series=series, size=n, floor=floors.get(n))
    for n in (2048, 4096, 8192, 16384):
        yield ops.make("matmul", (n, 1024, n), "float32")
    yield ops.make("dot_general_of_rows", (4096, 4096, 4096), "float32")
    yield ops.make("matmul", (4097, 4095, 4099), "float32")
    yield ops.make("gemm", (4096, 4096, 4096), "float32")
    for n in (2048, 4096, 8192, 16384):
        in_tf32 = Floor(ratio=1.0)
        yield ops.make("matmul", (n, n, n), "float32", precision="default", floor=in_tf32)
    yield ops.make("matmul", (4096, 4096, 4096), "float64")


def _products_of_8_bits() -> Iterator[Problem]:
    """Products with B in row-major order, which tensor cores cannot read as it is, or in columns.

    The floors are for an H200.
    """
    rows, columns = "matmul", "dot_general_of_rows"
    for n in (2048, 4096, 8192):
        for op, dtype in itertools.product((rows, columns), ("float8_e4m3fn", "int8")):
            yield ops.make(op, (n, n, n), dtype, floor=_OF_8_BITS.get((op, dtype, n)))
    for n, tflops in ((4096, 1150), (8192, 1250)):
        promoted = functools.partial(ops.make, precision="highest")
        yield promoted(rows, (n, n, n), "float8_e4m3fn", floor=Floor(tflops=tflops))
        yield promoted(columns, (n, n, n), "float8_e4m3fn", floor=Floor(ratio=1.0))
    yield ops.make(columns, (4096, 4096, 4096), "float8_e5m2")
    yield ops.make(columns, (4097, 4095, 4099), "float8_e4m3fn")
    for scales in ("tensor", "vector", "blocks"):
        yield ops.make("scaled_matmul", (4096, 4096, 4096), "float8_e4m3fn", scales=scales)
        for n in (4096, 8192):
            yield ops.make("scaled_matmul_of_rows", (n, n, n), "float8_e4m3fn", scales=scales)
    yield ops.make(
        "scaled_matmul_of_rows", (4096, 4096, 4096), "float8_e4m3fn", precision="highest"
    )
    yield ops.make("scaled_matmul_of_rows", (4096, 4096, 4096), "int8")


_OF_8_BITS = {
    ("matmul", "float8_e4m3fn", 4096): Floor(tflops=1200),
    ("matmul", "float8_e4m3fn", 8192): Floor(tflops=1400),
    ("dot_general_of_rows", "float8_e4m3fn", 4096): Floor(ratio=0.97),
    ("dot_general_of_rows", "float8_e4m3fn", 8192): Floor(ratio=0.97),
    ("matmul", "int8", 4096): Floor(ratio=1.35),
    ("matmul", "int8", 8192): Floor(ratio=1.35),
}


def _layers() -> Iterator[Problem]:
    """Dense layers and a gated one; the floors are for an H200."""
    layer = functools.partial(ops.make, "linear", (8192, 4096, 16384), "bfloat16")
    for activation in (None, "relu", "gelu", "gelu_exact", "silu"):
        floor = Floor(tflops=790) if activation == "gelu" else None
        yield layer(activation=activation, floor=floor)
    yield ops.make("linear", (64, 4096, 16384), "bfloat16", activation="gelu")
    yield ops.make("linear", (8192, 4096, 4096), "bfloat16", residual=True)
    yield ops.make("glu", (8192, 4096, 11008), "bfloat16", floor=Floor(ratio=1.1))


_TRANSPOSES: tuple[tuple[Shape, Shape, str], ...] = (
    ((64, 1024, 16, 64), (0, 2, 1, 3), "bfloat16"),
    ((128, 2049, 1023), (0, 2, 1), "float32"),
    ((2**27, 2), (1, 0), "float32"),
    ((2, 2**27), (1, 0), "float32"),
    ((512, 512, 1024), (2, 1, 0), "float32"),
    ((32, 256, 32, 256), (3, 1, 2, 0), "float32"),
    ((16, 3, 1024, 1024), (0, 2, 3, 1), "float32"),
    ((16, 1024, 1024, 3), (0, 3, 1, 2), "float32"),
    ((1000, 1000, 100), (0, 2, 1), "float32"),
)

_SQUARES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)

_LARGE_PRODUCTS: tuple[Shape, ...] = (
    (8192, 4096, 11008),
    (4096, 4096, 32768),
    (8192, 8192, 1024),
    (8192, 4096, 16384),
)

# Few rows: tokens that are generated, or short prompts, with the weights of language models.
_FEW_ROWS: tuple[Shape, ...] = (
    (1, 4096, 4096),
    (1, 8192, 28672),
    (2, 4096, 14336),
    (4, 14336, 4096),
    (8, 4096, 14336),
    (16, 4096, 4096),
    (16, 8192, 8192),
    (32, 4096, 11008),
    (32, 28672, 8192),
    (64, 8192, 8192),
    (64, 4096, 28672),
    (128, 4096, 4096),
    (128, 14336, 4096),
    (256, 8192, 8192),
    (256, 4096, 14336),
    (512, 4096, 4096),
    (512, 8192, 28672),
)

_BATCHES: tuple[Shape, ...] = (
    (64, 512, 64, 512),
    (64, 512, 512, 64),
    (128, 1024, 128, 1024),
    (32, 100, 300, 200),
    (256, 33, 65, 17),
)

# Rows that do not begin at multiples of 16 bytes: those of both factors, of a, of b, and of b with
# the vocabulary of a language model; and the least TFLOP/s on an H200.
_UNALIGNED_PRODUCTS: dict[Shape, float | None] = {
    (1025, 1023, 1027): None,
    (4097, 4095, 4099): 580,
    (4096, 4095, 4096): 680,
    (4096, 4096, 4095): 680,
    (2048, 1024, 50257): 600,
}


def _host() -> Iterator[Problem]:
    """Small, odd sizes: rows that do not fill a warp, and partial tiles."""
    for op in ("softmax", "log_softmax"):
        yield ops.make(op, (33, 130), "float32")
        yield ops.make(op, (7, 65), "bfloat16")
        yield ops.make(op, (50, 9), "float32", axis=0)
    yield ops.make("logsumexp", (33, 130), "float32")
    yield ops.make("softmax", (3, 33, 40), "float32", scale=-0.5, where=True)
    yield ops.make("softmax", (3, 40, 33), "bfloat16", scale=0.3, causal=True)
    yield ops.make("softmax_vjp", (33, 130), "float32")
    yield ops.make("softmax_vjp", (3, 40, 33), "bfloat16", scale=0.3, where=True, causal=True)
    yield ops.make("log_softmax_vjp", (33, 130), "float32", scale=2.0)
    yield ops.make("log_softmax_vjp", (7, 65), "bfloat16")
    yield ops.make("cross_entropy", (33, 130), "float32")
    yield ops.make("cross_entropy", (7, 65), "bfloat16")
    yield ops.make("cross_entropy_grad", (33, 130), "float32")
    yield ops.make("cross_entropy_grad", (7, 65), "bfloat16")
    for op in ("sum", "mean", "prod", "max", "min", "argmax", "argmin"):
        yield ops.make(op, (5003,), "float32")
        yield ops.make(op, (33, 130), "bfloat16", axis=1)
        yield ops.make(op, (65, 37), "float32", axis=0)
    yield ops.make("mean", (3, 9, 7, 5), "bfloat16", axis=(1, 2))
    yield ops.make("argmax", (70, 33), "int8", axis=1)
    for op in ("var", "std", "mean_and_var"):
        yield ops.make(op, (5003,), "float32")
        yield ops.make(op, (33, 130), "bfloat16", axis=1)
        yield ops.make(op, (65, 37), "float32", axis=0)
        yield ops.make(op, (3, 10, 20, 40), "float32", axis=(0, 1, 2))
    yield ops.make("sum", (5003,), "int32")
    yield ops.make("transpose", (131, 67), "float32")
    yield ops.make("transpose", (5, 33, 19), "bfloat16", axes=(0, 2, 1))
    yield ops.make("transpose", (7, 30, 9), "int8", axes=(2, 1, 0))
    yield ops.make("matmul", (67, 45, 70), "float32")
    yield ops.make("matmul", (67, 45, 70), "bfloat16")
    yield ops.make("matmul", (67, 45, 70), "float64")
    yield ops.make("matmul", (67, 45, 70), "float8_e4m3fn")
    yield ops.make("matmul", (67, 45, 70), "int8")
    yield ops.make("dot_general", (3, 33, 17, 29), "float32")
    yield ops.make("dot_general_of_rows", (67, 45, 70), "float32")
    yield ops.make("dot_general_of_columns", (67, 45, 70), "float32")
    yield ops.make("dot_general_of_rows", (67, 45, 70), "float8_e5m2", precision="highest")
    yield ops.make("gemm", (67, 45, 70), "float32")
    yield ops.make("linear", (67, 45, 70), "float32", activation="gelu")
    yield ops.make("linear", (67, 72, 70), "bfloat16", activation="silu")
    yield ops.make("linear", (67, 72, 70), "bfloat16", residual=True)
    yield ops.make("glu", (67, 72, 80), "float32")
    yield ops.make("glu", (67, 72, 80), "bfloat16")
    for op in ("scaled_matmul", "scaled_matmul_of_rows"):
        yield ops.make(op, (67, 72, 80), "int8")
        yield ops.make(op, (67, 200, 140), "float8_e4m3fn", scales="blocks")
    yield ops.make("scaled_matmul_of_rows", (67, 72, 80), "float8_e5m2", scales="tensor")
