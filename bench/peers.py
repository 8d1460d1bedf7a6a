"""The same problems in other libraries, PyTorch and Pallas, if they are installed.

Each has its own rows in the tables of the softmax family. All of them are optional: a peer that is
not installed, or that does not support a problem, is left out, and the benchmark says so.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bench import measure
from bench.problem import Problem

NAMES = ("PyTorch", "Pallas")


def call(name: str, problem: Problem, operands: Sequence[jax.Array]) -> measure.Call:
    """Returns the timed part of a problem, solved by a peer.

    Raises:
      ImportError: if the peer is not installed.
      ValueError: if it does not support the problem.
    """
    return {"PyTorch": _torch, "Pallas": _pallas}[name](problem, operands)


def as_jax(result: Any) -> Any:
    """Returns a result, which may be a peer's, as JAX arrays."""
    if not isinstance(result, _Tensors):
        return result
    return jax.tree.map(jnp.from_dlpack, result.tensors)


def _pallas(problem: Problem, operands: Sequence[jax.Array]) -> measure.Call:
    """The example that comes with Pallas: a block of threads holds one row in its registers."""
    from jax.experimental.pallas.ops.gpu import softmax

    options = {name for name, value in problem.options.items() if value is not None}
    if problem.op != "softmax" or options != {"axis"}:
        raise ValueError("there is no Pallas version of it")
    function = functools.partial(softmax.softmax, axis=problem.options["axis"])
    return measure.Call(jax.jit(function), operands)


# PyTorch, in eager mode. The profiler does not see its kernels, so a loop of calls is timed.


@dataclasses.dataclass(frozen=True)
class _Tensors:
    """Tensors that `jax.block_until_ready` can wait for."""

    tensors: Any

    def block_until_ready(self) -> None:
        """Waits for the GPU."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _torch(problem: Problem, operands: Sequence[jax.Array]) -> measure.Call:
    import torch

    if problem.op not in _TORCH:
        raise ValueError("there is no PyTorch version of it")
    solve = _TORCH[problem.op](problem.options, *map(torch.from_dlpack, operands))
    return measure.Call(lambda: _Tensors(solve()), ())


def _torch_forward(name: str, options: dict[str, Any], x, where=None) -> Callable:
    function = _torch_function(name, options, x, where)
    return lambda: function(x)


def _torch_backward(name: str, options: dict[str, Any], x, dy, where=None) -> Callable:
    import torch

    x = x.detach().requires_grad_()
    y = _torch_function(name, options, x, where)(x)
    return lambda: torch.autograd.grad(y, x, dy, retain_graph=True)[0]


def _torch_function(name: str, options: dict[str, Any], x, where) -> Callable:
    """Returns torch's function of that name, after the scale and masks that our kernel fuses."""
    import torch

    masked = None if where is None else ~where
    if options.get("causal"):
        later = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        masked = later if masked is None else masked | later

    def function(x):
        if options.get("scale") is not None:
            x = x * options["scale"]
        if masked is not None:
            x = x.masked_fill(masked, -math.inf)
        return getattr(torch, name)(x, dim=options["axis"])

    return function


def _torch_cross_entropy_grad(options: dict[str, Any], h, labels) -> Callable:
    import torch

    del options
    labels = labels.long()

    def value_and_grad():
        logits = (2 * h).requires_grad_()
        loss = torch.nn.functional.cross_entropy(logits, labels)
        (gradient,) = torch.autograd.grad(loss, logits)
        return loss.detach(), gradient

    return value_and_grad


_TORCH: dict[str, Callable[..., Callable]] = {
    "softmax": functools.partial(_torch_forward, "softmax"),
    "log_softmax": functools.partial(_torch_forward, "log_softmax"),
    "logsumexp": functools.partial(_torch_forward, "logsumexp"),
    "softmax_vjp": functools.partial(_torch_backward, "softmax"),
    "log_softmax_vjp": functools.partial(_torch_backward, "log_softmax"),
    "cross_entropy_grad": _torch_cross_entropy_grad,
}
"""For each op, makes a function without arguments from the problem's options and the operands."""
