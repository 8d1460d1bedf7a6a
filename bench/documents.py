"""The documents that the ladders come from: their shapes, and the times they report.

Each document optimises one kernel in steps. `python -m bench ladder` runs our version of every step
on the same shapes and shows the speed-up over the first step next to the document's. The documents
measured on other GPUs, so their times are not comparable with ours, but their speed-ups are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from bench.problem import Shape


@dataclasses.dataclass(frozen=True)
class Ladder:
    """The steps of a document, with the names of our algorithms and the document's times.

    Attributes:
      op: the op that the document optimises; its kernels are for float32.
      source: the document.
      device: the device of its measurements, as far as it is given.
      steps: our names of its steps, in its order; speed-ups are relative to the first.
      times_us: for each shape the time of every step in microseconds; None if it is not given.
      small_shape: a shape for machines without a GPU.
      aside: algorithms of the family that are meant for other problems than the document's. All
        others are steps of the document, or our own steps between and after them.
    """

    op: str
    source: str
    device: str
    steps: tuple[str, ...]
    times_us: Mapping[Shape, tuple[float | None, ...]]
    small_shape: Shape
    aside: tuple[str, ...] = ()

    def speedup(self, shape: Shape, step: str) -> float | None:
        """Returns the document's speed-up of a step over the first one, or None."""
        times = dict(zip(self.steps, self.times_us.get(shape, ()), strict=False))
        first, time = times.get(self.steps[0]), times.get(step)
        return None if first is None or time is None else first / time


_SUM_SIZE = 67_108_864
_SUM_GB_PER_S = (103.72, 164.79, 210.87, 402.45, 589.97, 645.28)  # the document gives rates

_SGEMM_SIZES = (
    128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384,
)  # fmt: skip
_SGEMM_TIMES_US = {
    "naive": (
        102.60, 101.98, 103.18, 195.35, 377.94, 755.58, 1216.69, 2756.11, 4880.28, 10711.36,
        17921.70, 39934.05, 71396.94, 159932.42, 285672.38,
    ),
    "block_tiled": (
        317.27, 317.20, 315.32, 318.14, 320.07, 344.19, 347.92, 689.83, 1365.52, 2731.15,
        4459.64, 9506.08, 16452.71, 35974.34, 63063.73,
    ),
    "bank_conflict_free": (
        299.18, 298.28, 295.30, 298.48, 299.45, 324.67, 324.94, 482.24, 946.36, 1880.96,
        3190.50, 6589.40, 11161.94, 24667.05, 43874.68,
    ),
    "double_buffered": (
        242.40, 240.48, 241.14, 241.45, 242.37, 245.40, 246.31, 457.80, 899.70, 1782.89,
        3100.57, 6198.87, 10450.51, 22858.37, 40448.23,
    ),
    "cublas": (
        36.34, 37.73, 45.24, 59.78, 102.80, 148.67, 244.60, 476.07, 878.62, 1684.34,
        2910.68, 5945.86, 10174.65, 22338.05, 39592.91,
    ),
}  # fmt: skip

LADDERS: dict[str, Ladder] = {
    "softmax": Ladder(
        op="softmax",
        source="He Wenhao, CUDA optimisation of softmax, August 2024",
        device="GeForce RTX 4060",
        steps=(
            "baseline",
            "one_warp_one_row",
            "one_warp_two_rows",
            "one_warp_four_rows",
            "one_warp_one_row_float4",
            "one_warp_two_rows_float4",
            "one_warp_four_rows_float4",
        ),
        times_us={
            (32, 32): (9.5, 4.4, 5.8, 5.0, 5.3, 4.9, 4.7),
            (32, 1024): (9.3, 7.3, 9.2, 15.7, 7.4, 7.5, 10.5),
            (32, 2048): (10.2, 9.0, 12.5, 23.0, 8.4, 10.8, 16.7),
            (1024, 32): (104.5, 6.0, 6.2, 5.2, 7.2, 5.7, 4.5),
            (1024, 1024): (115.5, 16.7, 20.9, 30.5, 17.3, 20.6, 21.6),
            (1024, 2048): (125.4, 36.8, 32.2, 56.4, 30.1, 30.2, 36.0),
            (2048, 32): (205.0, 9.3, 6.4, 6.5, 8.4, 6.6, 5.3),
            (2048, 1024): (225.8, 28.0, 32.0, 39.3, 25.5, 30.0, 33.0),
            (2048, 2048): (287.0, 139.7, 144.6, 243.1, 134.8, 141.9, 197.3),
        },
        small_shape=(32, 128),
        # For axes other than the last, rows longer than a block holds, and derivatives.
        aside=(
            "column",
            "column_two_pass",
            "column_split",
            "strip",
            "split_pipelined",
            "elementwise",
        ),
    ),
    "reduce": Ladder(
        op="sum",
        source="Notes on CUDA matrix reduction and transpose",
        device="a GPU that the document does not name",
        steps=("naive", "stride", "sequential", "first_add", "unroll", "multiple"),
        times_us={(_SUM_SIZE,): tuple(4 * _SUM_SIZE / rate / 1e3 for rate in _SUM_GB_PER_S)},
        small_shape=(8192,),
        # They reduce one axis of a matrix, or short rows.
        aside=("row", "staged", "cluster", "column", "interleaved"),
    ),
    "transpose": Ladder(
        op="transpose",
        source="Notes on CUDA matrix reduction and transpose",
        device="a GPU that the document does not name",
        steps=("naive", "tiled"),
        times_us={(16384, 16384): (63849.0, 6769.0)},
        small_shape=(128, 128),
        aside=("copy",),  # for permutations that keep the last axis in place
    ),
    "matmul": Ladder(
        op="matmul",
        source="CUDA general matrix multiplication: from entry to mastery",
        device="Tesla V100-PCIE-32GB",
        steps=tuple(_SGEMM_TIMES_US),
        times_us={
            (n, 1024, n): times
            for n, times in zip(
                _SGEMM_SIZES, zip(*_SGEMM_TIMES_US.values(), strict=True), strict=True
            )
        },
        small_shape=(64, 64, 64),
        # For 16-bit floats or TF32, or for batches.
        aside=(
            *("tensor_core", "split_k", "parallel_split_k", "skinny", "mma_pipelined"),
            *("wgmma_batched", "mma_batched", "fma_batched"),
        ),
    ),
}
"""By op family."""
