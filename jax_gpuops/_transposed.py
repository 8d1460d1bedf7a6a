"""Operands that are transposed arrays, which a kernel may read as they are stored.

XLA folds a transpose into its own matrix product, but writes the transposed array to memory before
a custom call. The producer of an operand is known when a program is lowered, and in its jaxpr.
Arguments of functions that are not inlined are not followed, since their producers may differ
between calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.interpreters.mlir import ir

from jax_gpuops import _fusion

Permutation = tuple[int, ...]


def _composed(outer: Permutation | None, inner: Sequence[int]) -> Permutation:
    """The permutation by `inner` and then `outer`; None stands for the identity."""
    return tuple(inner) if outer is None else tuple(inner[d] for d in outer)


def stored(value: ir.Value, symbols: ir.SymbolTable) -> tuple[ir.Value, Permutation | None]:
    """Returns the array whose transpose a value is, and the permutation of its dims.

    Args:
      value: an operand in a module that is being lowered.
      symbols: the functions of the module.

    Returns:
      The array and the permutation, or the value itself and None if it is not a transpose.
    """
    array, order = value, None
    while not isinstance(value.owner, ir.Block):
        operation = value.owner.operation
        if operation.name == "stablehlo.transpose":
            permutation = ir.DenseI64ArrayAttr(operation.attributes["permutation"])
            order = _composed(order, list(permutation))
            array = value = operation.operands[0]
        elif operation.name == "func.call":
            returned = _fusion.returned(value, symbols)
            inside, inner = stored(returned, symbols)
            if not isinstance(inside.owner, ir.Block):
                break
            value = operation.operands[ir.BlockArgument(inside).arg_number]
            if inner is not None:
                array, order = value, _composed(order, inner)
        else:
            break
    return array, order


_CALLS = frozenset({"jit", "pjit", "checkpoint", "custom_jvp_call", "custom_vjp_call"})
_CASTS = frozenset({"pcast", "pvary"})  # change only the type, and have no operation in modules


def stored_in(var: Any, defined: _fusion.Makers) -> tuple[Any, Permutation | None]:
    """As `stored`, for a variable of a jaxpr.

    Args:
      var: the variable, or a literal.
      defined: the makers of its jaxpr.
    """
    array, order = var, None
    while (eqn := _fusion.maker(var, defined)) is not None:
        if eqn.primitive.name == "transpose":
            order = _composed(order, eqn.params["permutation"])
            array = var = eqn.invars[0]
        elif eqn.primitive.name in _CASTS:
            (var,) = eqn.invars
        elif eqn.primitive.name in _CALLS and (body := _fusion.body(eqn)) is not None:
            returned = body.outvars[eqn.outvars.index(var)]
            inside, inner = stored_in(returned, _fusion.makers(body))
            if inside not in body.invars:
                break
            var = eqn.invars[body.invars.index(inside)]
            if inner is not None:
                array, order = var, _composed(order, inner)
        else:
            break
    return array, order
