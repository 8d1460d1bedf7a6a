"""Problems of the benchmark, and the ways to solve them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Floor:
    """The least speed of our kernel for the problem to count as solved.

    Attributes:
      ceiling: the least rate, as a fraction of the rate that bounds it.
      tflops: the least TFLOP/s of a matrix product.
      ratio: the least speed relative to XLA.
      slack_us: with `ratio`: the time by which a kernel may always be slower than XLA. For a kernel
        that takes 2 us, 5 % are below the resolution of the clock.
      mean_ratio: the least geometric mean of the speeds relative to XLA, over all problems of a
        run that have an equal floor.
      memory: the most temporary memory of a whole program, relative to plain JAX.
    """

    ceiling: float | None = None
    tflops: float | None = None
    ratio: float | None = None
    slack_us: float = 0.0
    mean_ratio: float | None = None
    memory: float | None = None

    def __str__(self) -> str:
        """Returns the demands on a single result, such as "95%, 0.99x"."""
        parts = []
        if self.ceiling is not None:
            parts.append(f"{self.ceiling:.0%}")
        if self.tflops is not None:
            parts.append(f"{self.tflops:g} TFLOP/s")
        if self.ratio is not None:
            slack = f" or +{self.slack_us:g} us" if self.slack_us else ""
            parts.append(f"{self.ratio:.2f}x{slack}")
        if self.memory is not None:
            parts.append(f"{self.memory:.2f}x memory")
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True)
class Problem:
    """An op or a whole program, on arrays of some shape and dtype.

    Attributes:
      op: the name of an op of `bench.ops`, or of a program of `bench.programs`.
      shape: the operand's shape; for matrix products (..., M, K, N); for programs see `Program`.
      dtype: the dtype of the operands.
      options: the op's options, such as axis; None for the op's own default.
      series: the line of a figure to which the problem belongs, or None.
      size: its position on that line.
      floor: the least speed of our kernel, or None.
      model: the published model that has a program of this shape, or None.
    """

    op: str
    shape: Shape
    dtype: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    series: str | None = None
    size: int | None = None
    floor: Floor | None = None
    model: str | None = None

    def shape_text(self) -> str:
        """Returns the shape as `--shape` takes it."""
        return "x".join(map(str, self.shape))

    def options_text(self) -> str:
        """Returns the options that are set, in a short form such as "axis=0 causal"."""
        texts = []
        for name, value in self.options.items():
            if value is True:
                texts.append(name)
            elif name == "precision" and value is not None:
                texts.append(value)
            elif value is not None:
                texts.append(f"{name}={value}".replace(" ", ""))
        return " ".join(texts)

    def __str__(self) -> str:
        """Returns the problem on one line."""
        model = None if self.model is None else f"({self.model})"
        parts = [self.op, self.shape_text(), self.dtype, self.options_text(), model]
        return " ".join(filter(None, parts))


def first_of_each_op(problems: Iterable[Problem]) -> list[Problem]:
    """Returns the first problem of each op, in their order."""
    first: dict[str, Problem] = {}
    for each in problems:
        first.setdefault(each.op, each)
    return list(first.values())


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to run a problem: the two arguments that every op takes, or a peer of ours.

    Attributes:
      implementation: as the ops take it.
      algorithm: as the ops take it.
      peer: another library, one of `bench.peers.NAMES`, that runs in place of ours.
    """

    implementation: str | None = None
    algorithm: str | None = None
    peer: str | None = None

    def __str__(self) -> str:
        """Returns the most specific name."""
        return self.peer or self.algorithm or self.implementation or "default"
