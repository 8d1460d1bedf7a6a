"""Whether XLA may fuse the operation that produces an operand with the consumer of the operand.

Our kernels are custom calls, and XLA does not fuse across a custom call. If an elementwise
operation produces the operand, its result is written to memory and read again by the kernel, which
XLA's own lowering avoids. The producer of an operand is known when a program is lowered, and in its
jaxpr. The consumers of the result are lowered later and are not known.

The operations that XLA does not fuse with a consumer are listed; all others count as fusible.
Function arguments do not, since the caller produces them. Operands that are small compared with the
others, such as a mask that many rows share, do not count either: storing them takes no time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal, Var
from jax.interpreters.mlir import ir

_SMALL = 1 / 8
"""An operand is small if it has less than this fraction of the largest operand's bytes."""


def large(avals: Sequence[Any]) -> list[bool]:
    """Returns for each operand type whether that operand is large compared with the others."""
    if not all(isinstance(size, int) for aval in avals for size in aval.shape):
        return [True] * len(avals)  # sizes of exported programs may be symbolic
    sizes = [math.prod(aval.shape) * aval.dtype.itemsize for aval in avals]
    return [size >= _SMALL * max(sizes) for size in sizes]


# In a module that is being lowered

_BARRIERS = frozenset(
    {
        *("all_gather", "all_reduce", "all_to_all", "case", "cholesky", "collective_broadcast"),
        *("collective_permute", "constant", "convolution", "custom_call", "dot", "dot_general"),
        *("fft", "if", "infeed", "optimization_barrier", "recv", "reduce_scatter", "rng"),
        *("rng_bit_generator", "scatter", "sort", "top_k", "triangular_solve", "while"),
    }
)
"""The StableHLO and CHLO operations, without their prefixes, that XLA fuses with no consumer."""

_MOVES = frozenset({"reshape", "sharding_constraint"})
"""Operations that compute nothing: the producer of their operand counts instead."""


def is_fusible(value: ir.Value, symbols: ir.SymbolTable) -> bool:
    """True if XLA may fuse the producer of a value with its consumer.

    Args:
      value: an operand in a module that is being lowered.
      symbols: the functions of the module.
    """
    source = _source(value, symbols)
    return isinstance(source, ir.Operation) and _name(source) not in _BARRIERS


def _name(operation: ir.Operation) -> str:
    return operation.name.partition(".")[2]


def _source(value: ir.Value, symbols: ir.SymbolTable) -> ir.Operation | ir.BlockArgument:
    """Returns the operation that produces a value, or the function argument that it comes from."""
    while not isinstance(value.owner, ir.Block):
        operation = value.owner.operation
        if operation.name == "func.call":
            source = _source(returned(value, symbols), symbols)
            if isinstance(source, ir.Operation):
                return source
            value = operation.operands[source.arg_number]
        elif _name(operation) in _MOVES:
            value = operation.operands[0]
        else:
            return operation
    return ir.BlockArgument(value)


def returned(value: ir.Value, symbols: ir.SymbolTable) -> ir.Value:
    """Returns the value inside a called function that a result of the call stands for."""
    result: ir.OpResult = ir.OpResult(value)
    callee = ir.FlatSymbolRefAttr(result.owner.operation.attributes["callee"]).value
    body = symbols[callee].regions[0].blocks[0]
    return list(body.operations)[-1].operands[result.result_number]


# In a jaxpr

Makers = Mapping[Var, Any]
"""The equations of a jaxpr, by the variables that they define."""

_BARRIER_PRIMITIVES = frozenset(
    {
        *("all_gather", "all_to_all", "cholesky", "cond", "conv_general_dilated", "custom_call"),
        *("dot_general", "fft", "ffi_call", "infeed", "optimization_barrier", "pallas_call"),
        *("pbroadcast", "pmax", "pmin", "ppermute", "psum", "psum_invariant", "reduce_scatter"),
        *("rng_bit_generator", "rng_uniform", "scan", "scatter", "scatter-add", "sort", "top_k"),
        *("triangular_solve", "while"),
    }
)
_MOVE_PRIMITIVES = frozenset({"reshape", "squeeze", "sharding_constraint", "gpuops_mark"})


def makers(jaxpr: Any) -> Makers:
    """Returns the equation that defines each variable of a jaxpr."""
    return {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}


def is_fusible_in(var: Any, defined: Makers, is_kernel: Callable[[Any], bool]) -> bool:
    """As `is_fusible`, for a variable of a jaxpr.

    Args:
      var: the variable, or a literal.
      defined: the makers of its jaxpr.
      is_kernel: tells whether one of our kernels runs an equation.
    """
    source = _source_in(var, defined)
    if isinstance(source, Literal | Var):
        return False
    return source.primitive.name not in _BARRIER_PRIMITIVES and not is_kernel(source)


def _source_in(var: Any, defined: Makers) -> Any:
    """Returns the equation that produces a variable, or the argument or literal it comes from."""
    while (eqn := maker(var, defined)) is not None:
        at = eqn.outvars.index(var)
        if eqn.primitive.name in _BARRIER_PRIMITIVES:
            return eqn
        if (called := body(eqn)) is not None:
            source = _source_in(called.outvars[at], makers(called))
            if source not in called.invars:
                return source
            var = eqn.invars[called.invars.index(source)]
        elif eqn.primitive.name in _MOVE_PRIMITIVES:
            var = eqn.invars[at]
        else:
            return eqn
    return var


def maker(var: Any, defined: Makers) -> Any:
    """The equation that defines a variable of a jaxpr; None for arguments and literals."""
    return None if isinstance(var, Literal) else defined.get(var)


def body(eqn: Any) -> Any:
    """The jaxpr that an equation calls; None if there is none or it has more or fewer results."""
    called = next((x for x in map(_jaxpr, eqn.params.values()) if x is not None), None)
    return None if called is None or len(called.outvars) != len(eqn.outvars) else called


def _jaxpr(value: Any) -> Any:
    """Returns the jaxpr in a parameter of an equation, or None if the parameter holds none."""
    return getattr(value, "jaxpr", value) if hasattr(value, "eqns") else None
