"""Is a result right? Errors against a float64 reference, and how large they may be.

Every function here takes the problem, the result, the reference and the operands, and returns two
numbers: the error in the terms that suit the op, and the largest ratio of an error to its bound,
which is above 1 (or NaN) if the result is wrong. They run on the device, in 64-bit mode.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from bench.problem import Problem

Errors = tuple[jax.Array, jax.Array]


def _epsilon(dtype) -> float:
    return float(jnp.finfo(dtype).eps)


def _computed_epsilon(dtype) -> float:
    """The precision that kernels compute in: float32 for 16-bit floats."""
    return _epsilon(jnp.promote_types(dtype, jnp.float32))


def _row_length(problem: Problem, x: jax.Array) -> int:
    """How many elements make one result, or one row of softmax."""
    axis = problem.options["axis"]
    axes = range(x.ndim) if axis is None else (axis if isinstance(axis, tuple) else (axis,))
    return math.prod(x.shape[each] for each in axes)


def exact(problem: Problem, y, reference, operands) -> Errors:
    """Every element must be equal; the error is how many are not."""
    del problem, operands
    equal = y == reference
    if jnp.issubdtype(reference.dtype, jnp.inexact):
        equal |= jnp.isnan(y) & jnp.isnan(reference)
    wrong = jnp.sum(~equal)
    return wrong, 2 * wrong  # the bound is less than one element


def softmax(problem: Problem, y, reference, operands) -> Errors:
    """The largest relative error; exp(x - max) may lose more the farther x is from the maximum."""
    (x,) = operands
    wide, info = x.astype(jnp.float64), jnp.finfo(x.dtype)
    error = jnp.abs(y.astype(jnp.float64) - reference)
    error /= jnp.maximum(reference, float(info.tiny))
    distance = jnp.max(wide, problem.options["axis"], keepdims=True) - wide
    bound = (6 + 1.25 * distance) * _computed_epsilon(x.dtype)
    if info.bits == 16:
        bound += 1.5 * _epsilon(x.dtype)
    elif info.bits == 64:
        bound *= 2  # the reference is no better
    return jnp.max(error), jnp.max(error / bound)


def logarithm(problem: Problem, y, reference, operands) -> Errors:
    """The largest error relative to max(1, |reference|): the logarithm of a sum may be near 0."""
    (x,) = operands
    error = jnp.abs(y.astype(jnp.float64) - reference)
    error /= jnp.maximum(1.0, jnp.abs(reference))
    bound = (8 + 2 * math.log2(_row_length(problem, x) + 1)) * _computed_epsilon(x.dtype)
    bound += 1.5 * _epsilon(x.dtype)
    return jnp.max(error), jnp.max(error) / bound


def total(problem: Problem, y, reference, operands) -> Errors:
    """The largest error of a sum or mean relative to that of the absolute values."""
    (x,) = operands
    terms = _row_length(problem, x)
    scale = jnp.sum(jnp.abs(x.astype(jnp.float64)), problem.options["axis"])
    if problem.op == "mean":
        scale /= terms
    error = jnp.abs(y.astype(jnp.float64) - reference)
    bound = 2 * math.log2(terms + 1) * _computed_epsilon(x.dtype) * scale
    bound += _epsilon(y.dtype) * jnp.abs(reference)
    return jnp.max(error / scale), jnp.max(error / bound)


def product(problem: Problem, y, reference, operands) -> Errors:
    """The largest relative error; each of the factors adds a rounding.

    The worst case, half an epsilon for each, would allow anything of millions of factors. Roundings
    that lean to neither side add up to lambda * sqrt(factors) / 2 epsilons at most, but for a
    chance of 2 * exp(-lambda**2 / 2) (Higham and Mary, 2019); lambda is 8 here.
    """
    (x,) = operands
    factors = _row_length(problem, x)
    error = jnp.abs(y.astype(jnp.float64) - reference) / jnp.abs(reference)
    bound = 4 * factors**0.5 * _computed_epsilon(x.dtype) + _epsilon(y.dtype)
    return jnp.max(error), jnp.max(error) / bound


def matmul(problem: Problem, y, reference, operands) -> Errors:
    """The relative error in the Frobenius norm; single elements may be off by 12 times as much.

    The roundings of a dot product of length K add up like a random walk, to about sqrt(K) / 6 of
    one. At the default precision XLA multiplies float32 as TF32, which has 10 bits of fraction.
    """
    k = operands[0].shape[-1]
    rounding = _computed_epsilon(y.dtype)
    if y.dtype == jnp.float32 and problem.options.get("precision", "highest") != "highest":
        rounding = 2.0**-10
    bound = _epsilon(y.dtype) + (1 + k**0.5 / 2) * _computed_epsilon(y.dtype) + rounding
    difference = y.astype(jnp.float64) - reference
    rms = jnp.sqrt(jnp.mean(reference**2))
    frobenius = jnp.sqrt(jnp.mean(difference**2)) / rms
    worst = jnp.max(jnp.abs(difference)) / rms
    return frobenius, jnp.maximum(frobenius, worst / 12) / bound
