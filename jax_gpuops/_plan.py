"""`plan` and `explain`: which implementations ops would run, and why."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import partial_eval

from jax_gpuops import _fusion, _primitive, _report, _transposed
from jax_gpuops._implementation import Implementation, named
from jax_gpuops._report import Call, Plan


def plan(
    op: str,
    shape: Sequence[int] | Sequence[Sequence[int]],
    dtype: Any,
    *,
    platform: str | None = None,
    **arguments: Any,
) -> Plan:
    """Returns what a call of an op would run on one device, without running it.

    For a GPU the algorithm is that of an H200. Another GPU may run another one; algorithms that
    need compute capability 9.0 run on no other. What `implementation=None` chooses for "cuda"
    depends on the GPU in the machine; without one it is what an H200 would run.

    >>> jax_gpuops.plan("softmax", (8192, 4096), "float32", implementation="interpret")
    Plan(implementation='interpret', algorithm='block', reason=...)
    >>> mask = jax.ShapeDtypeStruct((2048, 2048), bool)
    >>> jax_gpuops.plan("softmax", (8, 16, 2048, 2048), "bfloat16", where=mask, platform="cuda")
    Plan(implementation=...)

    Args:
      op: the name of a public op, such as "softmax", except linear_cross_entropy, which makes
        several calls: `explain` shows them.
      shape: the operand's shape, or a sequence of shapes for an op of several operands.
      dtype: the dtype of the operands.
      platform: "cpu", "cuda" (or "gpu"), "rocm" or "tpu"; None means the platform of a named
        implementation, or of JAX's default device.
      **arguments: keyword arguments of the op, `implementation` and `algorithm` among them. An
        array, such as a mask or labels, may be a `jax.ShapeDtypeStruct`.

    Returns:
      The plan.

    Raises:
      TypeError: as the op itself would.
      ValueError: as the op itself would, or if the op, shape or platform is not valid.
    """
    ops = _ops()
    if op not in ops:
        raise ValueError(
            f"op must be one of {', '.join(ops)}, got {op!r}; explain shows the calls of a function"
        )
    _check_platform(platform)
    operands = [jax.ShapeDtypeStruct(each, dtype) for each in _shapes(shape)]
    _check_operands(op, ops[op], len(operands))
    structs = {k: x for k, x in arguments.items() if isinstance(x, jax.ShapeDtypeStruct)}
    static = {k: x for k, x in arguments.items() if k not in structs}
    jaxpr = _trace(functools.partial(ops[op], **static), operands, structs)
    eqn, partitioned, _ = next(_calls_of(jaxpr, False))
    return _call(eqn, platform, partitioned, {}).plan


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """What each call of an op in a function would run. Its text is a table.

    Attributes:
      calls: the calls, in the order of the program. Equal calls are one entry, with a count.
    """

    calls: tuple[Call, ...]

    def __str__(self) -> str:
        if not self.calls:
            return "no op of jax_gpuops is called"
        rows = [("calls", "op", "operands", "runs", "why")]
        for each in self.calls:
            what = _report.runs(each.plan.implementation, each.plan.algorithm)
            why = f"{each.plan.reason} | second best: {each.plan.second_best}"
            rows.append((str(each.count), each.op, " ".join(each.operands), what, why))
        counts, ops, operands, runs, _ = (
            max(map(len, column)) for column in zip(*rows, strict=True)
        )
        return "\n".join(
            f"{a:>{counts}}  {b:<{ops}}  {c:<{operands}}  {d:<{runs}}  {e}"
            for a, b, c, d, e in rows
        )

    __repr__ = __str__


def explain(
    f: Callable[..., Any], /, *args: Any, platform: str | None = None, **kwargs: Any
) -> Explanation:
    """Returns what each call of an op in a function would run, and why, without running it.

    The function is traced as `jax.jit` does. Calls are also found inside `jit`, `vmap`, `scan`,
    `cond`, `checkpoint`, `shard_map`, layers of Flax, and derivatives. Calls whose results are not
    used are left out, as in XLA.

    >>> x = jax.ShapeDtypeStruct((8, 128), "float32")
    >>> print(jax_gpuops.explain(jax.grad(lambda x: jax_gpuops.softmax(x).max()), x))
    calls  op  ...

    A call that is left to XLA during tracing, since no kernel supports it, is one line with the
    operands of the public function. Derivatives that consist of JAX's operations, such as those of
    such a call or of `max`, have no lines. For a GPU the algorithms are those of an H200, as with
    `plan`.

    The program counts as spanning several devices if an argument, a sharding in the function or the
    mesh of `jax.set_mesh` does. What XLA's partitioner does later is not known.

    Args:
      f: a function that JAX can trace.
      *args: its arguments. `jax.ShapeDtypeStruct` stands for an array, perhaps with a sharding.
        Values other than arrays are passed on as they are.
      platform: as in `plan`; "cuda" on a machine without a GPU shows what an H200 would run.
      **kwargs: its keyword arguments.

    Returns:
      The explanation, to be printed.

    Raises:
      ValueError: if the platform is not valid.
      Exception: any error that `f` raises when it is traced. An error of the lowering, such as that
        of a kernel for another platform, is a line of the table.
    """
    _check_platform(platform)
    jaxpr = _trace(f, args, kwargs)
    spans_devices = max(_device_counts(jaxpr, (args, kwargs))) > 1
    counts: collections.Counter[Call] = collections.Counter()
    for eqn, partitioned, makers in _calls_of(jaxpr, spans_devices):
        try:
            call = _call(eqn, platform, partitioned, makers)
        except (FileNotFoundError, ValueError) as error:
            failure = Plan("error", None, str(error), "none")
            call = _report.call_of(eqn.primitive.name, [v.aval for v in eqn.invars], failure)
        counts[call] += 1
    return Explanation(
        tuple(dataclasses.replace(call, count=count) for call, count in counts.items())
    )


_PLATFORMS = ("cpu", "cuda", "gpu", "rocm", "tpu")


def _check_platform(platform: str | None) -> None:
    if platform is not None and platform not in _PLATFORMS:
        raise ValueError(f"platform must be one of {', '.join(_PLATFORMS)}, got {platform!r}")


def _shapes(shape: Any) -> list[tuple[int, ...]]:
    """Returns the operands' shapes, given one shape or a sequence of them."""
    try:
        dims = list(shape)
        shapes = dims if any(isinstance(each, Sequence) for each in dims) else [dims]
        result = [tuple(operator.index(size) for size in each) for each in shapes]
    except TypeError:
        raise TypeError(
            f"shape must be a sequence of ints, or a sequence of such sequences, got {shape!r}"
        ) from None
    if any(size < 0 for each in result for size in each):
        raise ValueError(f"shape must have no negative sizes, got {shape!r}")
    return result


_ADDENDS = ("b", "c")
"""Arrays that may be left out. All other parameters with a default are options."""


def _check_operands(name: str, op: Callable[..., Any], count: int) -> None:
    """Raises TypeError if there are more shapes than the op has operands."""
    operands = itertools.takewhile(
        lambda each: each.default is inspect.Parameter.empty or each.name in _ADDENDS,
        inspect.signature(op).parameters.values(),
    )
    most = len(list(operands))
    if count > most:
        raise TypeError(f"{name} takes at most {most} operand(s), got {count} shapes")


def _ops() -> dict[str, Callable[..., Any]]:
    """Returns the public ops by name: the functions that take `implementation` and `algorithm`."""
    import jax_gpuops

    return {
        name: function
        for name, function in vars(jax_gpuops).items()
        if inspect.isfunction(function)
        and {"implementation", "algorithm"} <= inspect.signature(function).parameters.keys()
    }


def _trace(f: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Traces a function to a jaxpr, with marks for the calls that are left to XLA."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    kinds = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, kinds)]

    def call(*arrays):
        filled = list(leaves)
        for i, x in zip(places, arrays, strict=True):
            filled[i] = x
        args, kwargs = jax.tree.unflatten(tree, filled)
        return f(*args, **kwargs)

    with _report.explaining(True):
        jaxpr = jax.make_jaxpr(call)(*(leaves[i] for i in places)).jaxpr
    used, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return used


# Jaxprs


def _call(eqn, platform: str | None, partitioned: bool, makers: _fusion.Makers) -> Call:
    """Returns the record of a call in a jaxpr. A mark of `_report` contains it."""
    if eqn.primitive is _report.MARK_P:
        return eqn.params["call"]
    avals = [v.aval for v in eqn.invars]
    if eqn.primitive in _primitive.WITHOUT_KERNEL:
        return _report.call_of(eqn.primitive.name, avals, _primitive.NO_KERNEL)
    kernel = _primitive.KERNELS[eqn.primitive]

    def is_kernel(maker) -> bool:
        if maker.primitive not in _primitive.KERNELS:
            return False
        try:
            return _call(maker, platform, partitioned, makers).plan.implementation != "xla"
        except (FileNotFoundError, ValueError):  # it names a kernel that cannot run here
            return True

    call = _as_stored(eqn, platform, partitioned, makers)
    large = itertools.compress(call.operands, _fusion.large(call.avals))
    fusible = any(_fusion.is_fusible_in(var, makers, is_kernel) for var in large)
    where = {"partitioned": partitioned, "fusible": fusible}
    plan = _plan_call(kernel, call.avals, platform, **where, **call.params)
    return _report.call_of(kernel.name, call.avals, plan)


def _as_stored(
    eqn, platform: str | None, partitioned: bool, makers: _fusion.Makers
) -> _primitive.Stored:
    """The call of a kernel's primitive as lowered, with transposed arrays read as stored."""
    params = dict(eqn.params)
    how = {name: params.pop(name) for name in ("implementation", "algorithm")}
    kernel, platforms = _primitive.KERNELS[eqn.primitive], [_platform(platform, **how)]
    call = _primitive.as_stored(
        kernel,
        eqn.invars,
        [v.aval for v in eqn.invars],
        params,
        stored=lambda var: _transposed.stored_in(var, makers),
        runs_on=_primitive.possible(kernel, platforms, **how, partitioned=partitioned),
        algorithm=how["algorithm"],
    )
    return call._replace(params=call.params | how)


def _plan_call(
    kernel,
    avals,
    platform,
    *,
    implementation,
    algorithm,
    partitioned=False,
    fusible=False,
    **params,
) -> Plan:
    platform = _platform(platform, implementation, algorithm)
    where = {"partitioned": partitioned, "fusible": fusible, "without_gpu": "NVIDIA H200"}
    site = _primitive.Site(kernel, platform, avals, params, **where)
    return _primitive.plan_call(site, implementation, algorithm)


def _platform(platform: str | None, implementation: Implementation, algorithm: str | None) -> str:
    """Returns the platform of a call, by its name in lowering rules."""
    if platform is None:
        name = named(implementation, algorithm)
        platform = _primitive.PLATFORM_OF.get(name or "", jax.default_backend())
    return "cuda" if platform == "gpu" else platform


def _calls_of(jaxpr, partitioned: bool) -> Iterator[tuple[Any, bool, _fusion.Makers]]:
    """Yields the calls of our ops in a jaxpr, in the form of `_equations`."""
    ours = (*_primitive.KERNELS, *_primitive.WITHOUT_KERNEL)
    for eqn, *place in _equations(jaxpr, partitioned):
        if eqn.primitive is _report.MARK_P or (
            # A primitive with "xla" in the jaxpr belongs to a call that has a mark.
            eqn.primitive in ours and eqn.params["implementation"] != "xla"
        ):
            yield eqn, *place


def _calls(jaxpr) -> Iterator[tuple[Any, list, dict]]:
    """Yields the calls of our kernels' primitives in a jaxpr and the jaxprs inside it.

    They are lowered for one device, of the platform of a named implementation, or else JAX's
    default device.
    """
    for eqn, *place in _equations(jaxpr, False):
        if eqn.primitive in _primitive.KERNELS:
            call = _as_stored(eqn, None, *place)
            yield eqn.primitive, call.avals, call.params


def _equations(jaxpr, partitioned: bool, manual: frozenset = frozenset()) -> Iterator[tuple]:
    """Yields the equations of a jaxpr and of the jaxprs inside it.

    Args:
      jaxpr: the jaxpr.
      partitioned: True if XLA partitions its program over several devices.
      manual: the manual mesh axes, over which it is partitioned already.

    Yields:
      Each equation, whether XLA partitions it, and the makers of its jaxpr.
    """
    makers = _fusion.makers(jaxpr)
    for eqn in jaxpr.eqns:
        yield eqn, partitioned, makers
        inside = partitioned, manual
        if "newly_manual_axes" in eqn.params:  # those of shard_map
            mesh, axes = eqn.params["mesh"], manual | eqn.params["newly_manual_axes"]
            others = (mesh.shape[name] for name in mesh.axis_names if name not in axes)
            inside = math.prod(others) > 1, axes
        for value in _flat(eqn.params):
            if hasattr(value, "eqns"):
                yield from _equations(value, *inside)


def _flat(params: dict[str, Any]) -> Iterator[Any]:
    """The parameters of an equation, with the elements of tuples in place of the tuples."""
    for value in params.values():
        yield from value if isinstance(value, tuple | list) else [value]


def _device_counts(jaxpr, arguments: Any) -> Iterator[int]:
    """Yields the number of devices of each argument, sharding and mesh of a program."""
    yield max(1, jax.sharding.get_abstract_mesh().size)
    params = [value for eqn, *_ in _equations(jaxpr, False) for value in _flat(eqn.params)]
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments)]
    for each in (*params, *shardings):
        if isinstance(each, jax.sharding.Sharding):
            yield each.num_devices
        elif isinstance(each, jax.sharding.Mesh | jax.sharding.AbstractMesh):
            yield each.size
