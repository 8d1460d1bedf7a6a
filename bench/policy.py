"""The table of `implementation=None`, made from the measurements of `python -m bench tune`.

"Ours" means that `None` runs our kernel. A vertex of a grid is ours if each of its points is right
and at least `ALONE` times as fast as XLA alone. Classes also have the speed between an elementwise
producer and consumer, which XLA may fuse with its own lowering: if such a producer makes the
operand, `None` requires at least `BETWEEN`. For the kernels in `WALLS` every point requires it with
a consumer, which is not known when `None` chooses: an elementwise operation, or the product that
follows a layer with an activation. A problem between vertices is ours if all neighbouring vertices
are, and if no point of another grid lies among them that is not ours. A problem with more rows, or
columns of a product, than were measured is ours if the largest measured numbers are, by `BEYOND` if
it is a product.

The cells of a size are each of its values, and the ranges between two adjacent values. The cells of
a grid that are ours are merged into the classes that the package reads.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench import grid
from bench.results import RIGHT
from jax_gpuops import _measurements

ALONE = 1.05
BETWEEN = 1.0
BEYOND = 1.2
"""The speed alone from which products larger than those that were measured are ours: the rest of
the last wave of tiles, and the power that a GPU may draw, change ratios by some 10 %."""

WALLS = ("transpose", "gemm", "linear", "glu")
"""Kernels whose lowering by XLA is fused with any neighbouring operation: products read and write
transposed arrays, and have epilogues."""

RULE = (
    f"a point is ours where the kernel is right and at least {ALONE} x the speed of XLA alone; of "
    f"{', '.join(WALLS)} also at least {BETWEEN} x before a consumer, which is elementwise, or a "
    "product after a layer with an activation; and where XLA may fuse what makes the operand, "
    "between an elementwise producer and this consumer; a problem is ours "
    "where all its neighbours on the grid are, and no point of another grid among them is not, "
    f"and beyond the largest number of rows where that is, of products at least {BEYOND} x alone"
)

HEADER = ("device", "driver", "jax", "jaxlib", "uncommitted_changes", "date")
"""The fields of the sweep's environment that a table contains, besides the commit."""

Speeds = tuple[float, float]
"""The speed of a kernel relative to XLA: alone, and between neighbouring operations."""

Box = tuple[tuple[int, int], ...]


def speeds(kernel: str, point: Mapping[str, Any] | None) -> Speeds | None:
    """Returns the speeds of a raw point that is ours, or None for one that is not.

    Args:
      kernel: the kernel of the point.
      point: the raw result of `tune`; None if it was not measured.
    """
    if point is None or point["status"] != RIGHT or "between_us" not in point:
        return None
    alone, between = speed(point), speed(point, "between_")
    return (alone, between) if alone >= ALONE and not is_walled(kernel, point) else None


def is_walled(kernel: str, point: Mapping[str, Any]) -> bool:
    """True if a right point was not as fast as XLA with a consumer.

    It may have been measured only with a producer as well.
    """
    around = "consumed_" if "consumed_us" in point else "between_"
    return kernel in WALLS and speed(point, around) < BETWEEN


def speed(point: Mapping[str, Any], around: str = "") -> float:
    """Returns the speed of a right point relative to XLA.

    Args:
      point: the raw result of `tune`.
      around: the prefix of the times: of the operations around the kernel, none if it is alone.
    """
    return point[f"{around}xla_us"] / point[f"{around}us"]


def classes(
    grids: Iterable[grid.Grid], points: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Returns the classes of problems that are ours, sorted.

    Args:
      grids: the grids.
      points: the raw points by their names; missing points are not ours.
    """
    grids = list(grids)
    lost = [
        point.problem
        for point in grid.points(grids)
        if str(point) in points and speeds(point.kernel, points[str(point)]) is None
    ]
    found = []
    for each in grids:
        for box, (alone, between) in merged(_without(lost, each, cells(each, points))).items():
            sizes = {name: list(bounds) for name, bounds in zip(each.axes, box, strict=True)}
            ratios = {"ratio": _floor(alone), "between": _floor(between)}
            for fixed in _also(each.fixed):
                order = json.dumps(fixed), list(each.axes), box
                found.append((order, {**fixed, **sizes, **ratios}))
    return [entry for _, entry in sorted(found, key=lambda pair: pair[0])]


def _without(
    lost: Sequence[dict[str, Any]], each: grid.Grid, ours: Mapping[Box, Speeds]
) -> dict[Box, Speeds]:
    """Returns the cells of a grid without those in which a kernel lost a point of another grid."""

    def holds(box: Box, problem: dict[str, Any]) -> bool:
        sizes = {name: list(bounds) for name, bounds in zip(each.axes, box, strict=True)}
        return _measurements.contains({**each.fixed, **sizes}, problem)

    whole = tuple((sizes[0], grid.MOST) for sizes in each.axes.values())
    near = [problem for problem in lost if holds(whole, problem)]
    return {box: least for box, least in ours.items() if not any(holds(box, p) for p in near)}


_ALSO = {"bfloat16": "float16"}, {"max": "min", "argmax": "argmin"}, {"gelu": "gelu_exact"}
"""Dtypes and functions for which the classes of others hold, too: both ours and XLA's run the same
code on the same number of bytes, or XLA's is slower for the other function."""


def _also(fixed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the fixed fields of classes, and those of all problems for which they hold, too.

    Sums and moments of bfloat16 were as far ahead with results of bfloat16 as of float32.
    """
    result = [dict(fixed)]
    if fixed["op"] == "reduce" and fixed["dtype"] == "bfloat16" and fixed["result"] == "float32":
        result.append({**fixed, "result": "bfloat16"})
    for others in _ALSO:
        for each in list(result):
            named = {k: others.get(v, v) if isinstance(v, str) else v for k, v in each.items()}
            if named != each:
                result.append(named)
    return result


def _floor(ratio: float) -> float:
    return math.floor(100 * ratio) / 100


def cells(each: grid.Grid, points: Mapping[str, Mapping[str, Any]]) -> dict[Box, Speeds]:
    """Returns the cells of a grid that are ours, with the least speeds of their vertices."""
    ours = {
        vertex: _least(speeds(point.kernel, points.get(str(point))) for point in corner)
        for vertex, corner in each.vertices.items()
    }
    axes = measured_sizes(each, points)
    axes |= {name: (*axes[name], grid.MOST) for name in each.open}
    ours |= _beyond(each, ours, axes)
    result = {}
    for cell in itertools.product(*map(_intervals, axes.values())):
        corners = itertools.product(*(corners for _, corners in cell))
        if (least := _least(ours.get(corner) for corner in corners)) is not None:
            result[tuple(bounds for bounds, _ in cell)] = least
    return result


def measured_sizes(
    each: grid.Grid, points: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[int, ...]]:
    """Returns the axes of a grid without the sizes for which no point was measured.

    The measurements on both sides of such a size hold for it, as for sizes that are not on the
    grid. So a size may be added to a grid before it is measured.
    """
    known = [
        vertex
        for vertex, corner in each.vertices.items()
        if any(str(point) in points for point in corner)
    ]
    return {
        name: tuple(size for size in sizes if any(vertex[i] == size for vertex in known))
        for i, (name, sizes) in enumerate(each.axes.items())
    }


def _least(each: Iterable[Speeds | None]) -> Speeds | None:
    """Returns the least of several speeds, or None if one of them is."""
    known = list(each)
    if not all(known):
        return None
    alone, between = zip(*known, strict=True)
    return min(alone), min(between)


def _beyond(
    each: grid.Grid, ours: Mapping[tuple[int, ...], Speeds | None], axes: Mapping[str, Any]
) -> dict[tuple[int, ...], Speeds | None]:
    """Returns the speeds for more rows than were measured: those of the largest numbers of rows.

    They hold if the largest numbers fill the GPU. `axes` are those of `measured_sizes`, with
    `grid.MOST` added to the open ones.
    """
    is_open = [name in each.open for name in axes]
    measured = [
        vertex
        for vertex in each.vertices
        if all(size in sizes for size, sizes in zip(vertex, axes.values(), strict=True))
    ]

    def is_of_more_rows(more: tuple[int, ...], vertex: tuple[int, ...]) -> bool:
        sizes = zip(more, vertex, is_open, strict=True)
        return more != vertex and all(a >= b if may_grow else a == b for a, b, may_grow in sizes)

    result: dict[tuple[int, ...], Speeds | None] = {}
    for more in itertools.product(*axes.values()):
        if more in each.vertices:
            continue
        fewer = [vertex for vertex in measured if is_of_more_rows(more, vertex)]
        largest = [v for v in fewer if not any(is_of_more_rows(other, v) for other in fewer)]
        filling = (all(map(grid.fills_the_gpu, each.vertices[vertex])) for vertex in largest)
        if largest and all(filling):
            least = _least(ours[vertex] for vertex in largest)
            is_product = any(point.is_product for point in each.vertices[largest[0]])
            result[more] = None if least and is_product and least[0] < BEYOND else least
    return result


def _intervals(sizes: Sequence[int]) -> list[tuple[tuple[int, int], Sequence[int]]]:
    """Returns (bounds, values at the corners) of the cells along one axis, in ascending order."""
    result: list[tuple[tuple[int, int], Sequence[int]]] = []
    for size, following in itertools.zip_longest(sizes, sizes[1:]):
        result.append(((size, size), (size,)))
        if following is not None and following > size + 1:
            result.append(((size + 1, following - 1), (size, following)))
    return result


def merged(cells: Mapping[Box, Speeds]) -> dict[Box, Speeds]:
    """Joins boxes that touch along one axis and are equal along the others.

    Boxes that are as fast as XLA between neighbouring operations are not joined with others.

    Returns:
      Boxes of the same problems, each with the least speeds of its parts.
    """
    result = dict(cells)
    axes = range(len(next(iter(result)))) if result else ()
    for axis in reversed(axes):
        lines: dict[Box, list[Box]] = {}
        for box in result:
            lines.setdefault((*box[:axis], *box[axis + 1 :]), []).append(box)
        joined: dict[Box, Speeds] = {}
        for line in lines.values():
            last: Box | None = None
            for box in sorted(line, key=lambda box: box[axis]):
                least = result[box]
                if (
                    last is not None
                    and last[axis][1] + 1 == box[axis][0]
                    and (joined[last][1] >= BETWEEN) == (least[1] >= BETWEEN)
                ):
                    least = min(joined[last][0], least[0]), min(joined[last][1], least[1])
                    del joined[last]
                    box = (*box[:axis], (last[axis][0], box[axis][1]), *box[axis + 1 :])
                joined[box] = least
                last = box
        result = joined
    return result


# The file


def device_table(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the table for the device of a raw sweep: a header and the classes."""
    environment = raw["environment"]
    return {
        "made": "by python -m bench tune",
        "commit": environment["commit"],
        "rule": RULE,
        "environment": {key: environment[key] for key in HEADER},
        "points": len(raw["points"]),
        "classes": classes(grid.grids(), raw["points"]),
    }


def text(devices: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the text of a file of measurements: devices in order, one class per line.

    Args:
      devices: the table of each kind of device.
    """
    blocks = []
    for kind, device in sorted(devices.items()):
        head = [
            f"   {json.dumps(k)}: {json.dumps(v)}," for k, v in device.items() if k != "classes"
        ]
        lines = ",\n".join(f"    {json.dumps(entry)}" for entry in device["classes"])
        body = "\n".join([*head, '   "classes": [', *([lines] if lines else []), "   ]"])
        blocks.append(f"  {json.dumps(kind)}: {{\n{body}\n  }}")
    joined = ",\n".join(blocks)
    return f'{{\n "schema": {_measurements.SCHEMA},\n "devices": {{\n{joined}\n }}\n}}\n'
