"""What can be asked of the benchmark: a problem, and the ways to solve it."""

from __future__ import annotations

import dataclasses
from typing import Any

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Problem:
    """An op on arrays of some shape and dtype.

    Attributes:
      op: the name of a public op.
      shape: the operand's shape; for matrix products (..., M, K, N).
      dtype: the dtype of all operands.
      options: keyword arguments of the op that differ from its defaults, such as axis.
      series: the figure's line that this problem is a point of, if it is.
      size: where on that line.
    """

    op: str
    shape: Shape
    dtype: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    series: str | None = None
    size: int | None = None

    def shape_text(self) -> str:
        """Returns the shape as `--shape` takes it."""
        return "x".join(map(str, self.shape))

    def options_text(self) -> str:
        """Returns the options that are set, in a short form such as "axis=0"."""
        options = {k: str(v).replace(" ", "") for k, v in self.options.items() if v is not None}
        return " ".join(v if k == "precision" else f"{k}={v}" for k, v in options.items())

    def __str__(self) -> str:
        """Returns the problem on one line."""
        return " ".join(filter(None, [self.op, self.shape_text(), self.dtype, self.options_text()]))


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to run a problem: the two arguments that every op takes."""

    implementation: str | None = None
    algorithm: str | None = None

    def __str__(self) -> str:
        """Returns the most specific name."""
        return self.algorithm or self.implementation or "default"
