"""JAX primitives for ops: abstract evaluation, lowering and sharding.

A `Kernel` describes an op; `primitive(kernel)` makes its JAX primitive. The parameters of the
primitive are those of the op's jnp reference plus `implementation` and `algorithm`. Where our
kernel does not run, the reference or the plain formula is lowered instead, so one jaxpr serves
every platform. The abstract evaluation of the reference gives the types of the results, so shapes,
dtypes and shardings follow JAX's own rules.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import re
import string
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla
from jax.interpreters.mlir import ir
from jax.sharding import AxisType

from jax_gpuops import _fusion, _library, _measurements, _report, _transposed
from jax_gpuops._implementation import (
    Implementation,
    NoKernelError,
    Preferred,
    asked_for,
    named,
)

Layout = tuple[int, ...]  # dimensions from minor to major, as XLA writes layouts


ALIGNMENT = 16
"""The alignment in bytes that problems assume for buffers whose addresses are not known yet.

XLA aligns its allocations to more; a handler plans again for the actual addresses.
"""

WORKSPACE_AS_ASKED = -1
"""The workspace of problems before one is allocated: as much as the module requests."""

OF_EXECUTION = frozenset({"alignment", "workspace"})
"""The fields of problems that are known only when the program runs."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What `primitive` needs to know of an op.

    Attributes:
      name: the primitive's name in jaxprs, and the custom call's in traces and profiles.
      op: the op family in the compiled modules.
      reference: the computation in jnp, a function of operands and parameters. It is the fallback,
        gives the types of the results, and is the reference of the tests.
      problem: maps operand avals and parameters to the problem that the module's plan takes.
      call: maps a `Launch`, operands and parameters to the same results as the reference, by a
        custom call and the transposes and reshapes around it.
      plain: the computation as users of JAX write it, if it differs from the reference; it is then
        lowered for XLA instead. XLA has faster implementations of some formulas that round
        intermediate results. None if it does not differ.
      as_stored: for an operand that is a transposed array, maps its index, the permutation, the
        types of all operands and the parameters to the parameters of the same call on the array
        before the transpose, or to None if the kernel cannot read that array as it is stored. None
        for a kernel that reads no transposed arrays.
      partitionable: True if XLA may partition the custom call over devices, along the `batch_dims`
        of the call. If False, the op runs within one device only.
      multiple_results: True if `reference` and `call` return lists.
    """

    name: str
    op: str
    reference: Callable[..., Any]
    problem: Callable[..., dict[str, Any]]
    call: Callable[..., Any]
    plain: Callable[..., Any] | None = None
    as_stored: Callable[..., dict[str, Any] | None] | None = None
    partitionable: bool = False
    multiple_results: bool = False


KERNELS: dict[Primitive, Kernel] = {}
"""The kernel behind each primitive that `primitive` has made."""

WITHOUT_KERNEL: set[Primitive] = set()
"""The primitives that `primitive_without_kernel` has made."""


def primitive(kernel: Kernel) -> Primitive:
    """Makes the primitive of a kernel, with everything but its derivatives and batching."""
    p = _new(kernel.name, kernel.reference, kernel.multiple_results)
    custom_call_p = _with_results(kernel.name)
    mlir.register_lowering(custom_call_p, _lower_custom_call)
    placed_p = _with_results(kernel.name)
    for platform in (None, "cpu", "cuda"):
        rule = functools.partial(_lower, kernel, custom_call_p, platform)
        mlir.register_lowering(placed_p, rule, platform=platform)
    # JAX lowers equal calls only once, but the producers of their operands may differ.
    mlir.register_lowering(p, functools.partial(_place, kernel, placed_p), cacheable=False)
    KERNELS[p] = kernel
    return p


def primitive_without_kernel(name: str, reference: Callable[..., jax.Array]) -> Primitive:
    """Makes a primitive that XLA always computes, such as the transpose of one with a kernel.

    Its parameters include those of a kernel's primitive, for its transpose.

    Args:
      name: as in `Kernel`.
      reference: as in `Kernel`.
    """
    p = _new(name, reference)

    def lower(ctx, *operands, implementation, algorithm, **params):
        if implementation != "xla" and _report.is_logging():
            _log(ctx, name, NO_KERNEL)
        rule = mlir.lower_fun(functools.partial(reference, **params), multiple_results=False)
        return rule(ctx, *operands)

    mlir.register_lowering(p, lower)
    WITHOUT_KERNEL.add(p)
    return p


def _with_results(name: str) -> Primitive:
    """Makes a primitive for lowering, whose parameter `results` has the types of its results."""
    p = Primitive(name)
    p.multiple_results = True
    p.def_abstract_eval(lambda *_, results, **__: list(results))
    return p


NO_KERNEL = _report.Plan("xla", None, "no kernel computes this derivative", "none")
"""The plan of primitives without kernel."""


def _new(name: str, reference: Callable[..., Any], multiple_results: bool = False) -> Primitive:
    p = Primitive(name)
    p.multiple_results = multiple_results
    p.def_impl(functools.partial(xla.apply_primitive, p))

    def abstract_eval(*avals, implementation, algorithm, **params):
        results = result_avals(reference, *avals, **params)
        return results if multiple_results else results[0]

    p.def_abstract_eval(abstract_eval)
    return p


def result_avals(function: Callable[..., Any], *avals, **params) -> list[Any]:
    """Returns the types of a function's results, with their shardings, unlike `jax.eval_shape`.

    JAX caches them per function object, since a call of an op needs them several times.
    """
    return list(_jitted(function, tuple(params)).trace(*avals, **params).jaxpr.out_avals)


@functools.cache
def _jitted(function: Callable[..., Any], static: tuple[str, ...]) -> Any:
    return jax.jit(function, static_argnames=static)


# From a call to a bind


_FUNCTIONS: set[str] = set()
"""The names of the public functions, which are the scopes of their calls."""


def jit(name: str, function: Callable[..., Any], *static: str) -> Any:
    """`jax.jit` of a function, under the name that profiles and compile logs show.

    The function is inlined into the caller's jaxpr, in a scope of that name, so that the producers
    of the operands can be found.

    Args:
      name: the name of the op.
      function: its implementation.
      *static: the names of its static arguments.
    """

    @functools.wraps(function)
    def named(*args, **kwargs):
        with jax.named_scope(name):
            return function(*args, **kwargs)

    named.__name__ = named.__qualname__ = name
    _FUNCTIONS.add(name)
    # Since jax 0.11, True means inlining in a later pass.
    inline = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True
    return jax.jit(named, static_argnames=static, inline=inline)


# Makes reverse mode store only the arguments of a function, and compute it again.
keeping_arguments: Callable[..., Any] = functools.partial(jax.checkpoint, prevent_cse=False)


def bind(
    p: Primitive,
    *operands: jax.Array,
    implementation: Implementation,
    algorithm: str | None,
    **params: Any,
) -> Any:
    """Binds the primitive of a kernel, after making all operands vary over the same manual axes.

    Raises:
      NoKernelError: if no kernel takes the operands.
      ValueError: if the algorithm cannot take the problem, or if the compiled module of the named
        implementation is missing.
    """
    _check_reduced(map(jax.typeof, operands))
    operands = tuple(vary_alike(*operands))
    check_named(p, *operands, implementation=implementation, algorithm=algorithm, **params)
    return p.bind(*operands, implementation=implementation, algorithm=algorithm, **params)


def check_named(
    p: Primitive,
    *operands: Any,
    implementation: Implementation,
    algorithm: str | None,
    **params: Any,
) -> None:
    """Checks that the implementation or algorithm that the caller named supports the operands.

    Raises:
      NoKernelError: if no kernel supports them.
      ValueError: as `bind` does.
    """
    name = named(implementation, algorithm)
    if name is None and algorithm is None:
        return
    if name is None:
        name = "cuda" if _library.missing("cuda") is None else "interpret"
    _check_problem(KERNELS[p], name, algorithm, *map(jax.typeof, operands), **params)


def check_plan(p: Primitive, *operands, implementation: Implementation, **params: Any) -> None:
    """Raises NoKernelError if no algorithm of the implementation supports the operands.

    If the implementation is not decided yet, an installed module is asked; without one it passes.
    """
    name = named(implementation, None) or ("interpret" if _library.missing("cuda") else "cuda")
    if _library.missing(name) is None:
        kernel = KERNELS[p]
        _check_plan(name, kernel.op, kernel.problem(*map(jax.typeof, operands), **params))


def _check_plan(
    implementation: str, op: str, problem: dict[str, Any], algorithm: str | None = None
) -> None:
    """Raises NoKernelError if no algorithm, or not the named one, supports a problem.

    Symbolic sizes count as 1: an algorithm for any size does not depend on them, and one that needs
    multiples of a size may get others at run time.
    """
    try:
        _library.planned(implementation, op, _with_sizes(problem, 1), algorithm)
    except ValueError as error:
        raise NoKernelError(str(error)) from None


def _with_sizes(problem: dict[str, Any], size: int) -> dict[str, Any]:
    """Returns a problem with `size` in place of symbolic sizes."""

    def constant(value):
        if isinstance(value, tuple):
            return tuple(map(constant, value))
        return size if jax.export.is_symbolic_dim(value) else value

    return {key: constant(value) for key, value in problem.items()}


_MOST_ELEMENTS = 2**60  # kernels count elements, and their bytes, in 64 bits


def _check_reduced(avals: Iterable[Any]) -> None:
    for aval in avals:
        if aval.sharding.spec.unreduced:
            raise NoKernelError(f"an operand has an unreduced sharding, {aval}")


def _check_problem(kernel, implementation, algorithm, *avals, **params) -> None:
    if all(has_constant_shape(aval) for aval in avals):
        _check_sizes(kernel, *avals, **params)
        _library.planned(implementation, kernel.op, kernel.problem(*avals, **params), algorithm)
    elif algorithm is not None:
        # The sizes of an exported program are known at run time, when the handler checks them. An
        # algorithm that supports none of these sizes does not support the dtypes or parameters.
        problem = kernel.problem(*avals, **params)
        *sizes, last = 1, 16, 128, 4096
        for size in sizes:
            with contextlib.suppress(ValueError):
                _library.planned(implementation, kernel.op, _with_sizes(problem, size), algorithm)
                return
        _library.planned(implementation, kernel.op, _with_sizes(problem, last), algorithm)


def _check_sizes(kernel, *avals, **params) -> None:
    for aval in (*avals, *result_avals(kernel.reference, *avals, **params)):
        if math.prod(aval.shape) > _MOST_ELEMENTS:
            raise NoKernelError(f"an array of shape {aval.shape} has too many elements")


def has_constant_shape(aval) -> bool:
    """True if no size is symbolic, as those of exported programs may be."""
    return all(isinstance(size, int) for size in aval.shape)


def vary_alike(*xs: jax.Array) -> list[jax.Array]:
    """Makes operands vary over the same manual mesh axes in a shard_map, as jnp functions do."""
    varying = [jax.typeof(x).mat.varying for x in xs]
    union = frozenset().union(*varying)
    return [
        jax.lax.pcast(x, tuple(sorted(union - axes)), to="varying") if union - axes else x
        for x, axes in zip(xs, varying, strict=True)
    ]


def accumulator(dtype: Any) -> np.dtype:
    """The dtype in which kernels compute on `dtype`: float32 for 16-bit floats, else the same."""
    dtype = jnp.dtype(dtype)
    return jnp.dtype(jnp.float32) if dtype.name in ("float16", "bfloat16") else dtype


# Types under a mesh with explicit axes, where the sharding of an array is part of its type


def has_explicit_sharding(x: jax.typing.ArrayLike) -> bool:
    """True if the mesh of `x` has explicit axes larger than 1."""
    mesh = jax.typeof(x).sharding.mesh
    return any(
        kind == AxisType.Explicit and mesh.shape[name] > 1
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
    )


def is_sharded_along(x: jax.Array, axes: Sequence[int]) -> bool:
    """True if the type of `x` says that one of these axes is sharded.

    A custom call cannot be partitioned along such an axis, but XLA's own operations can.
    """
    sharding = jax.typeof(x).sharding
    spec = sharding.spec.partitions
    names = [spec[axis] for axis in axes if axis < len(spec) and spec[axis] is not None]
    flat = (name for each in names for name in (each if isinstance(each, tuple) else (each,)))
    return any(sharding.mesh.shape[name] > 1 for name in flat)


def shard_alike(x: jax.Array, *others: jax.Array) -> jax.Array:
    """Reshards `x` as jnp functions of `x` and of others that broadcast to it do.

    The result of a primitive of all operands then has the sharding of `x`, as has the cotangent.
    """
    if not any(map(has_explicit_sharding, (x, *others))):
        return x
    (aval,) = result_avals(_combined, *map(jax.typeof, (x, *others)))
    return x if aval == jax.typeof(x) else jax.sharding.reshard(x, aval.sharding.spec)


def _combined(x, *others):
    return functools.reduce(lambda y, other: jnp.where(other == other, y, 0), others, x)


# Lowering


PLATFORM_OF = {"cuda": "cuda", "interpret": "cpu"}  # implementation -> platform


@dataclasses.dataclass(frozen=True)
class Site:
    """A call of a kernel's primitive, in a program that is lowered for a platform.

    Attributes:
      kernel: the kernel.
      platform: "cpu", "cuda" or another name.
      avals: the types of the operands.
      params: the parameters except `implementation` and `algorithm`.
      partitioned: True if XLA will partition the program over several devices.
      fusible: True if XLA may fuse the producer of an operand with its own lowering of the call.
      without_gpu: for a call that is planned and not lowered, as in `_measurements.best`.
    """

    kernel: Kernel
    platform: str
    avals: Sequence[Any]
    params: dict[str, Any]
    partitioned: bool
    fusible: bool = False
    without_gpu: str | None = None

    @property
    def problem(self) -> dict[str, Any]:
        return self.kernel.problem(*self.avals, **self.params)

    @property
    def is_empty(self) -> bool:
        return any(size == 0 for aval in self.avals for size in aval.shape)

    @property
    def has_constant_shapes(self) -> bool:
        return all(map(has_constant_shape, self.avals))

    def check(self, implementation: str) -> None:
        """Raises NoKernelError if an implementation has no kernel for the call."""
        _check_reduced(self.avals)
        if self.has_constant_shapes:
            _check_sizes(self.kernel, *map(_without_sharding, self.avals), **self.params)
        _check_plan(implementation, self.kernel.op, self.problem)

    def refusal(self, implementation: str) -> tuple[str, str] | None:
        """Returns why an implementation cannot run here and a remedy, or None if it can."""
        needed = PLATFORM_OF[implementation]
        preference = f'jax_gpuops.use("{implementation}", strict=False)'
        if self.platform != needed:
            return (
                f"runs on platform {needed}, but the computation is lowered for {self.platform}",
                f"use implementation=None or {preference}, which choose by the platform",
            )
        if self.partitioned and not self.kernel.partitionable:
            return (
                "runs on one device, but the program spans several",
                "call it inside a jax.shard_map over all axes of the mesh, or use "
                f"implementation=None or {preference}",
            )
        return None

    def algorithm(self, implementation: str, algorithm: str | None) -> tuple[str | None, str]:
        """Returns the algorithm that runs, or None if it is chosen at run time, and why."""
        if not self.has_constant_shapes:
            return algorithm, "sizes are symbolic, so the algorithm is chosen at run time"
        ours = _library.planned(implementation, self.kernel.op, self.problem, algorithm)
        return ours["algorithm"], ours["reason"]


class Choice(NamedTuple):
    """What runs: "cuda", "interpret" or "xla", and why.

    With `is_fault` XLA runs instead of a kernel for a reason that the user can fix, such as a
    module that is not installed.
    """

    implementation: str
    reason: str
    is_fault: bool = False


def choose(site: Site, implementation: Implementation, algorithm: str | None) -> Choice:
    """Decides what runs.

    Args:
      site: the call.
      implementation: as `resolve` returned it; None for the fastest.
      algorithm: as the caller gave it; a named algorithm requests a kernel.

    Returns:
      The choice.

    Raises:
      ValueError: if a kernel was requested and cannot run at the site.
    """
    name, reason = named(implementation, algorithm), "named by the caller"
    if name is None and algorithm is not None:
        name = "interpret" if site.platform == "cpu" else "cuda"
        reason = f"{asked_for(algorithm)} asks for a kernel of jax_gpuops"
    if name == "xla":
        return Choice("xla", reason)
    if name is not None:
        if (refusal := site.refusal(name)) is not None:
            why, remedy = refusal
            if algorithm is not None:
                is_alone = implementation is None or isinstance(implementation, Preferred)
                remedy = f"leave {asked_for(algorithm)} out" + ("" if is_alone else f"; {remedy}")
            raise ValueError(f'implementation="{name}" {why}; {remedy}')
        _library.module(name)  # raises if it is not installed
        if name == "cuda" and (problem_of_gpu := _library.gpu_problem()) is not None:
            raise ValueError(f'implementation="cuda": {problem_of_gpu}')
        choice = Choice(name, reason)
    elif isinstance(implementation, Preferred):
        choice = _prefer(site, implementation.name)
    else:
        choice = _fastest(site)
    if choice.implementation != "xla" and site.is_empty:
        return Choice("xla", "an operand has no elements")
    return choice


def _prefer(site: Site, name: str) -> Choice:
    """Decides for `use(name, strict=False)`: the named implementation, or XLA if it cannot run."""
    if (refusal := site.refusal(name)) is not None:
        return Choice("xla", f'implementation="{name}" {refusal[0]}')
    why = _library.gpu_problem() if name == "cuda" else _library.missing(name)
    if why is not None:
        return Choice("xla", why, is_fault=True)
    try:
        site.check(name)
    except NoKernelError as error:
        return Choice("xla", str(error))
    return Choice(name, "preferred by the caller")


def _fastest(site: Site) -> Choice:
    """Decides for `None`, by the measurements."""
    if site.platform != "cuda":
        return Choice("xla", f"jax_gpuops has no default kernel for platform {site.platform}")
    if site.partitioned:  # XLA would gather sharded rows for our custom call, not for its own ops
        return Choice("xla", "the program spans several devices, and the operands may be sharded")
    if (why := _library.gpu_problem()) is not None:
        return Choice("xla", why, is_fault=True)
    problem = {"op": site.kernel.op, **site.problem}
    return Choice(*_measurements.best(problem, site.fusible, site.without_gpu))


def plan_call(site: Site, implementation: Implementation, algorithm: str | None) -> _report.Plan:
    """Returns what `choose` decides, the algorithm, and what else could run.

    Arguments and errors are those of `choose`; an algorithm that does not support the problem is a
    ValueError too.
    """
    chosen, reason, _ = choose(site, implementation, algorithm)
    if chosen != "xla":
        name, why = site.algorithm(chosen, algorithm)
        second_best = "xla"
        if chosen == "cuda" and (implementation is not None or algorithm is not None):
            second_best += f" (implementation=None {_what_none_does(site)})"
        return _report.Plan(chosen, name, f"{reason}; {why}", second_best)
    return _report.Plan("xla", None, reason, _kernel_instead(site))


def _what_none_does(site: Site) -> str:
    try:
        choice = _fastest(site)
        return f"runs {choice.implementation}: {choice.reason}"
    except (FileNotFoundError, ValueError) as error:  # of the file of measurements
        return f"raises an error: {error}"


def _kernel_instead(site: Site) -> str:
    """The kernel that could run instead of XLA, such as "cuda: warp", or "none"."""
    for name in PLATFORM_OF:
        if site.refusal(name) is None and _library.missing(name) is None and not site.is_empty:
            with contextlib.suppress(NoKernelError):
                site.check(name)
                return _report.runs(name, site.algorithm(name, None)[0])
    return "none"


class Stored(NamedTuple):
    """A call whose transposed arrays are replaced by the arrays as they are stored.

    Attributes:
      operands: values of a module or variables of a jaxpr.
      avals: their types.
      params: the parameters of the kernel.
    """

    operands: list[Any]
    avals: list[Any]
    params: dict[str, Any]


def as_stored(
    kernel: Kernel,
    operands: Sequence[Any],
    avals: Sequence[Any],
    params: dict[str, Any],
    *,
    stored: Callable[[Any], tuple[Any, _transposed.Permutation | None]],
    runs_on: Sequence[str],
    algorithm: str | None,
) -> Stored:
    """Returns a call that reads transposed arrays as they are stored, if the kernel supports it.

    Args:
      kernel: the kernel.
      operands: the operands of the call.
      avals: their types.
      params: the parameters of the kernel.
      stored: returns for an operand the array whose transpose it is, and the permutation.
      runs_on: the implementations that may run the call: see `possible`.
      algorithm: as the caller gave it.
    """
    call = Stored(list(operands), list(avals), params)
    if kernel.as_stored is None or not runs_on:
        return call
    for i, operand in enumerate(operands):
        array, order = stored(operand)
        if order is None:
            continue
        changed = kernel.as_stored(i, order, call.avals, call.params)
        if changed is None:
            continue
        inverse = tuple(int(d) for d in np.argsort(order))
        (aval,) = result_avals(jax.lax.transpose, call.avals[i], permutation=inverse)
        new = Stored(
            [*call.operands[:i], array, *call.operands[i + 1 :]],
            [*call.avals[:i], aval, *call.avals[i + 1 :]],
            changed,
        )
        problem = kernel.problem(*new.avals, **new.params)
        with contextlib.suppress(NoKernelError):
            for name in runs_on:
                _check_plan(name, kernel.op, problem, algorithm)
            call = new
    return call


def possible(
    kernel: Kernel,
    platforms: Sequence[str],
    implementation: Implementation,
    algorithm: str | None,
    partitioned: bool,
) -> list[str]:
    """The implementations other than XLA that a call may run in a program for these platforms."""
    if implementation == "xla" or (partitioned and not kernel.partitionable):
        return []
    if isinstance(implementation, Preferred):
        names = [implementation.name]
    elif implementation is not None:
        names = [implementation]
    else:
        names = ["cuda"] if algorithm is None else [*PLATFORM_OF]
    return [x for x in names if PLATFORM_OF[x] in platforms and _library.missing(x) is None]


def _place(kernel, placed_p, ctx, *operands, implementation, algorithm, **params):
    """Lowers a call to one of `placed_p`, which knows whether its operands are fusible.

    That call reads transposed arrays as they are stored if the kernel supports it. XLA then removes
    the transposes, unless other operations use them.
    """
    symbols = ctx.module_context.symbol_table
    platforms = ctx.platforms or ctx.module_context.platforms
    call = as_stored(
        kernel,
        operands,
        ctx.avals_in,
        params,
        stored=lambda x: _transposed.stored(x, symbols),
        runs_on=possible(kernel, platforms, implementation, algorithm, _spans_devices(ctx)),
        algorithm=algorithm,
    )
    large = itertools.compress(call.operands, _fusion.large(call.avals))
    fusible = implementation is None and any(_fusion.is_fusible(x, symbols) for x in large)
    place = functools.partial(
        placed_p.bind,
        implementation=implementation,
        algorithm=algorithm,
        fusible=fusible,
        results=tuple(ctx.avals_out),
        **call.params,
    )
    rule = mlir.lower_fun(place, multiple_results=True)
    try:
        return rule(ctx.replace(avals_in=call.avals), *call.operands)
    except ValueError as error:
        raise ValueError(f"{_function_of(kernel, ctx)}: {error}") from error


def _function_of(kernel: Kernel, ctx) -> str:
    """The public function in whose scope a call was traced, or else the name of the kernel."""
    scopes = re.findall(r"\w+", str(ctx.name_stack))  # as in transpose(jvp(softmax))
    inside_out = (name for name in reversed(scopes) if name in _FUNCTIONS)
    return next(inside_out, kernel.name.removeprefix("gpuops_"))


def _lower(
    kernel,
    custom_call_p,
    platform,
    ctx,
    *operands,
    implementation,
    algorithm,
    fusible,
    results,
    **params,
):
    """Lowers to `kernel.call`, which makes our custom call, or to the formula for XLA."""
    platform = platform or _platforms(ctx)
    site = Site(kernel, platform, ctx.avals_in, params, _spans_devices(ctx), fusible)
    chosen, reason, is_fault = choose(site, implementation, algorithm)
    if is_fault:
        _library.warn_once(reason)
    if implementation != "xla" and _report.is_logging():  # "xla" was logged during tracing
        _log(ctx, kernel.name, plan_call(site, implementation, algorithm))
    function = kernel.plain or kernel.reference
    if chosen != "xla":
        launch = Launch(custom_call_p, chosen, algorithm, site.partitioned, results)
        function = functools.partial(kernel.call, launch)
        ctx = ctx.replace(avals_in=list(map(_without_sharding, ctx.avals_in)))
    rule = mlir.lower_fun(
        functools.partial(function, **params), multiple_results=kernel.multiple_results
    )
    return rule(ctx, *operands)


def _platforms(ctx) -> str:
    """The platforms that code is lowered for, several if one rule serves them all."""
    return "/".join(ctx.platforms or ctx.module_context.platforms)


def _log(ctx, name: str, plan: _report.Plan) -> None:
    _report.log(_report.call_of(name, ctx.avals_in, plan), _platforms(ctx))


def _spans_devices(ctx) -> bool:
    """True if XLA will partition this code. Manual mesh axes do not count."""
    axis_context = ctx.module_context.axis_context
    mesh = getattr(axis_context, "mesh", None)
    if mesh is not None:
        others = (n for n in mesh.axis_names if n not in axis_context.manual_axes)
        return math.prod(mesh.shape[name] for name in others) > 1
    return (getattr(axis_context, "num_devices", 1) or 1) > 1


def _without_sharding(aval):
    """The type of an array without its sharding, which is the partitioner's in the lowering."""
    return jax.typeof(jax.ShapeDtypeStruct(aval.shape, aval.dtype))


# The custom call


@dataclasses.dataclass(frozen=True)
class Launch:
    """How and where a kernel is to run, with methods to call it.

    Attributes:
      custom_call_p: the primitive of its custom call.
      implementation: "cuda" or "interpret".
      algorithm: as the caller gave it.
      partitioned: True if XLA will partition the program over several devices.
      results: the avals of the results.
    """

    custom_call_p: Primitive
    implementation: str
    algorithm: str | None
    partitioned: bool
    results: tuple[Any, ...]

    def custom_call(
        self,
        target: str,
        operands: Sequence[jax.Array],
        results: Sequence[jax.ShapeDtypeStruct],
        *,
        operand_layouts: Sequence[Layout] | None = None,
        result_layouts: Sequence[Layout] | None = None,
        batch_dims: int = 0,
        aliases: tuple[tuple[int, int], ...] = (),
        **attributes: Any,
    ) -> list[jax.Array]:
        """Calls an FFI target.

        Args:
          target: the name of the target.
          operands: its operands.
          results: the types of its results.
          operand_layouts: None for row-major layouts.
          result_layouts: None for row-major layouts.
          batch_dims: the number of leading dims that the partitioner may divide, if all operands
            and results have them.
          aliases: pairs of an operand and a result that may share its memory.
          **attributes: the target's attributes except `algorithm`. A tuple is an array of int64.
        """
        return self.custom_call_p.bind(
            *operands,
            target=target,
            results=tuple(map(jax.typeof, results)),
            operand_layouts=operand_layouts,
            result_layouts=result_layouts,
            batch_dims=batch_dims,
            aliases=aliases,
            attributes=(("algorithm", self.algorithm or ""), *attributes.items()),
        )

    def workspace_bytes(self, op: str, problem: dict[str, Any]) -> int:
        """Returns the most bytes of workspace that a problem needs, per row for row-wise kernels.

        The workspace is the last result of the custom call, which is dropped: handlers must not
        allocate.
        """
        module = _library.module(self.implementation)
        return module.workspace(op, {**problem, "algorithm": self.algorithm or ""})


def _lower_custom_call(
    ctx,
    *operands,
    target,
    results,
    operand_layouts,
    result_layouts,
    batch_dims,
    aliases,
    attributes,
):
    del results
    rule = jax.ffi.ffi_lowering(
        target,
        operand_layouts=operand_layouts,
        result_layouts=result_layouts,
        operand_output_aliases=dict(aliases) or None,
        extra_attributes=_sharding_attributes(ctx, batch_dims),
    )
    decoded = {
        name: np.array(value, np.int64) if isinstance(value, tuple) else value
        for name, value in attributes
    }
    return rule(ctx, *operands, **decoded)


def _sharding_attributes(ctx, batch_dims: int) -> dict[str, ir.Attribute] | None:
    """Tells the partitioner that leading dims may be sharded, as JAX does for LAPACK calls.

    The Shardy rule propagates shardings through the call and gathers the other dims; the
    partitioner then slices operands and results along the `num_batch_dims` leading dims. This is
    correct only because these dims are the same in all operands and results.
    """
    avals = [*ctx.avals_in, *ctx.avals_out]
    if batch_dims == 0 or not all(map(has_constant_shape, avals)):
        return None
    batch = ctx.avals_in[0].shape[:batch_dims]
    if any(aval.shape[:batch_dims] != batch for aval in avals):
        return None  # a program that is not partitioned may have masks that broadcast
    names = iter(string.ascii_lowercase[8:] + string.ascii_lowercase[:8])
    factors = {next(names): size for size in batch}
    batch_names = list(factors)
    # Other dims of the same position and size share a factor, such as those of x and y of softmax.
    row_names: dict[tuple[int, int], str] = {}

    def dims(aval) -> str:
        result = list(batch_names)
        for dim in enumerate(aval.shape[batch_dims:]):
            if dim not in row_names:
                row_names[dim] = next(names)
                factors[row_names[dim]] = dim[1]
            result.append(row_names[dim])
        return "[" + ", ".join(result) + "]"

    operand_dims = ", ".join(map(dims, ctx.avals_in))
    result_dims = ", ".join(map(dims, ctx.avals_out))
    sizes = ", ".join(f"{name}={size}" for name, size in factors.items())
    replicated = ", ".join(row_names.values())
    rule = (
        f"#sdy.op_sharding_rule<({operand_dims})->({result_dims}) "
        f"{{{sizes}}}{f' need_replication={{{replicated}}}' if replicated else ''}, custom>"
    )
    return {
        "mhlo.frontend_attributes": mlir.ir_attribute({"num_batch_dims": str(batch_dims)}),
        "sdy.sharding_rule": ir.Attribute.parse(rule),
    }
