"""Errors of results against a float64 reference, and their bounds.

The function of an op takes the problem, the result, the reference and the operands, and returns two
numbers: the error in the measure of the op, and the largest ratio of an error to its bound, which
is above 1 (or NaN) if the result is wrong. They run on the device, in 64-bit mode.
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


def row_length(problem: Problem, x: jax.Array) -> int:
    """The number of elements per result of a reduction, or per row of softmax."""
    axis = problem.options["axis"]
    axes = range(x.ndim) if axis is None else (axis if isinstance(axis, tuple) else (axis,))
    return math.prod(x.shape[each] for each in axes)


def _scale(problem: Problem) -> float:
    """Returns the scale factor in derivatives of softmax."""
    scale = problem.options.get("scale")
    return 1.0 if scale is None else abs(scale)


def widened(x: jax.Array, *, rounds: bool, is_product: bool) -> jax.Array:
    """Returns an operand for the reference: in float64 if the op rounds, else in its own dtype.

    Factors of 8-bit integers become int32: in runs on an H200, XLA compared with wrong products of
    these, not with its own.
    """
    if rounds and jnp.issubdtype(x.dtype, jnp.inexact):
        return x.astype(jnp.float64)
    return x.astype(jnp.int32) if is_product and x.dtype == jnp.int8 else x


def exact(problem: Problem, y, reference, operands) -> Errors:
    """Every element must be equal; the error is the number of elements that differ."""
    del problem, operands
    equal = y == reference
    if jnp.issubdtype(reference.dtype, jnp.inexact):
        equal |= jnp.isnan(y) & jnp.isnan(reference)
    wrong = jnp.sum(~equal)
    return wrong, 2 * wrong  # the bound is less than one element


def _scores(problem: Problem, operands) -> jax.Array:
    """Returns the scores of softmax in float64: scaled, and -inf where masked."""
    x, options = operands[0], problem.options
    scores = x.astype(jnp.float64)
    if options.get("scale") is not None:
        scores *= options["scale"]
    if options.get("where"):
        scores = jnp.where(operands[-1], scores, -jnp.inf)
    if options.get("causal"):
        scores = jnp.where(jnp.tri(*x.shape[-2:], dtype=bool), scores, -jnp.inf)
    return scores


def _below_maximum(problem: Problem, scores: jax.Array) -> jax.Array:
    """Returns how far each element lies below the maximum of its row; 0 where masked."""
    distance = jnp.max(scores, problem.options["axis"], keepdims=True) - scores
    return jnp.where(jnp.isfinite(distance), distance, 0.0)


def _exp_bound(distance: jax.Array, dtype) -> jax.Array:
    """The bound of the relative error of exp(-distance), which grows with the distance."""
    bound = (6 + 1.25 * distance) * _computed_epsilon(dtype)
    bits = jnp.finfo(dtype).bits
    if bits == 16:
        bound += 1.5 * _epsilon(dtype)
    elif bits == 64:
        bound *= 2  # the reference is no better
    return bound


def _sum_bound(terms: int, dtype) -> float:
    """The bound of the relative error of a sum of positive terms."""
    return (8 + 2 * math.log2(terms + 1)) * _computed_epsilon(dtype)


def _at_least_normal(size: jax.Array, dtype) -> jax.Array:
    """Returns the divisor of a relative error: subnormal results lose digits.

    Its product with a bound is a normal number even for float64, since XLA divides by it.
    """
    return jnp.maximum(size, max(float(jnp.finfo(dtype).tiny), 1e-290))


def softmax(problem: Problem, y, reference, operands) -> Errors:
    """The largest relative error; its bound grows with the distance of x from the maximum."""
    distance = _below_maximum(problem, _scores(problem, operands))
    error = jnp.abs(y.astype(jnp.float64) - reference) / _at_least_normal(reference, y.dtype)
    return jnp.max(error), jnp.max(error / _exp_bound(distance, y.dtype))


def logarithm(problem: Problem, y, reference, operands) -> Errors:
    """The largest error relative to max(1, |reference|): the logarithm of a sum may be near 0."""
    x = operands[0]
    error = jnp.abs(y.astype(jnp.float64) - reference)
    error = jnp.where(y == reference, 0.0, error)  # both are -inf where masked
    error /= jnp.maximum(1.0, jnp.abs(reference))
    bound = _sum_bound(row_length(problem, x), x.dtype) + 1.5 * _epsilon(x.dtype)
    return jnp.max(error), jnp.max(error) / bound


def softmax_vjp(problem: Problem, dx, reference, operands) -> Errors:
    """The largest error of y * (dy - s), s = sum(y * dy), relative to y * (|dy - s| + sum(y|dy|)).

    The backward pass has only the rounded y, which affects the factor y and the terms of s.
    """
    dy = operands[1].astype(jnp.float64)
    axis, scores = problem.options["axis"], _scores(problem, operands)
    y = jax.nn.softmax(scores, axis)
    s = jnp.sum(y * dy, axis, keepdims=True)
    size = jnp.abs(dy - s) + jnp.sum(y * jnp.abs(dy), axis, keepdims=True)
    size *= _scale(problem) * _at_least_normal(y, dx.dtype)
    size = _at_least_normal(size, dx.dtype)
    error = jnp.abs(dx.astype(jnp.float64) - reference) / size
    distance = _below_maximum(problem, scores)
    bound = _exp_bound(distance, dx.dtype) + 10 * _computed_epsilon(dx.dtype)
    return jnp.max(error), jnp.max(error / bound)


def log_softmax_vjp(problem: Problem, dx, reference, operands) -> Errors:
    """The largest error of dy - exp(y) * sum(dy) relative to |dy| + exp(y) * sum|dy|.

    The backward pass has only the rounded y, whose absolute error is the relative error of exp(y).
    """
    dy = operands[1].astype(jnp.float64)
    axis, rounding = problem.options["axis"], _epsilon(dx.dtype)
    y = jax.nn.log_softmax(_scores(problem, operands), axis)
    sums = _sum_bound(row_length(problem, dx), dx.dtype)
    product = jnp.exp(y) * jnp.abs(jnp.sum(dy, axis, keepdims=True))
    weighted = jnp.exp(y) * jnp.sum(jnp.abs(dy), axis, keepdims=True)
    bound = (sums + rounding / 2) * jnp.maximum(1.0, jnp.abs(y)) * product
    bound += sums * weighted + rounding * (jnp.abs(dy) + product)
    bound = _at_least_normal(_scale(problem) * bound, dx.dtype)
    size = _at_least_normal(_scale(problem) * (jnp.abs(dy) + weighted), dx.dtype)
    error = jnp.abs(dx.astype(jnp.float64) - reference)
    return jnp.max(error / size), jnp.max(error / bound)


def _size_of_terms(losses: jax.Array, logsumexps: jax.Array) -> jax.Array:
    """The size of the two terms of a cross entropy: logsumexp and the label's logit."""
    return 1 + jnp.abs(logsumexps) + jnp.abs(logsumexps - losses)


def losses(problem: Problem, y, reference, operands) -> Errors:
    """The largest error of a cross entropy relative to its terms: logsumexp and label's logit."""
    del problem
    x, labels = operands
    label_logits = jnp.take_along_axis(x.astype(jnp.float64), labels[..., None], -1)[..., 0]
    size = _size_of_terms(reference, reference + label_logits)
    error = jnp.max(jnp.abs(y.astype(jnp.float64) - reference) / size)
    return error, error / (_sum_bound(x.shape[-1], x.dtype) + 1.5 * _epsilon(y.dtype))


def cross_entropy_grad(problem: Problem, results, references, operands) -> Errors:
    """The larger of two errors: of the mean loss, as for `logarithm`, and of its gradient.

    The gradient is (exp(x - logsumexp(x)) - onehot) / rows; its error is relative to the sum of the
    absolute terms.
    """
    del problem
    (loss, gradient), (true_loss, true_gradient) = results, references
    h, labels = operands
    classes, rows = h.shape[-1], labels.size
    dtype = gradient.dtype
    logits = 2 * h.astype(jnp.float64)  # as the benchmark's producer makes them
    lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    sums = _sum_bound(classes, dtype)

    loss_error = jnp.abs(loss.astype(jnp.float64) - true_loss) / jnp.maximum(1.0, true_loss)
    loss_bound = sums + _sum_bound(rows, dtype) + 1.5 * _epsilon(dtype)

    size = jnp.exp(logits - lse) + (jnp.arange(classes) == labels[..., None])
    error = jnp.abs(gradient.astype(jnp.float64) - true_gradient)
    error /= _at_least_normal(size / rows, dtype)
    bound = _exp_bound(lse - logits, dtype) + sums * jnp.maximum(1.0, jnp.abs(lse))
    return (
        jnp.maximum(loss_error, jnp.max(error)),
        jnp.maximum(loss_error / loss_bound, jnp.max(error / bound)),
    )


# Derivatives, given the residuals of the forward pass like their kernels


def softmax_tangent(problem: Problem, dx, reference, operands) -> Errors:
    """The largest error of y * (t - s), s = sum(y * t), relative to y * (|t| + sum(y|t|))."""
    y, t = (each.astype(jnp.float64) for each in operands[:2])
    t = jnp.where(y == 0, 0.0, t)  # also where masked
    axis = problem.options["axis"]
    size = y * (jnp.abs(t) + jnp.sum(y * jnp.abs(t), axis, keepdims=True))
    return _linear(problem, dx, reference, size)


def log_softmax_cotangent(problem: Problem, dx, reference, operands) -> Errors:
    """The largest error of ct - exp(y) * sum(ct) relative to |ct| + exp(y) * sum|ct|.

    The error of exp(y) grows with the distance of y from 0.
    """
    y, ct = (each.astype(jnp.float64) for each in operands[:2])
    total = jnp.sum(jnp.abs(ct), problem.options["axis"], keepdims=True)
    size = jnp.abs(ct) + jnp.exp(y) * (1 + jnp.abs(y)) * total
    return _linear(problem, dx, reference, size)


def logsumexp_cotangent(problem: Problem, dx, reference, operands) -> Errors:
    """The largest relative error of softmax * g, where the error of exp grows with its argument.

    For cross entropy g is subtracted at the label, which may cancel most of the value.
    """
    axis = problem.options["axis"]
    x, *others = (each.astype(jnp.float64) for each in operands[:4])
    maximum, log_sum, g = (jnp.expand_dims(each, axis) for each in others)
    argument = (x - maximum) * _scale(problem) - log_sum
    size = jnp.exp(argument) * jnp.abs(g) * (1 + jnp.abs(argument))
    if problem.op.startswith("cross_entropy"):
        (axis,) = axis
        is_label = jnp.arange(x.shape[axis]) == operands[4][..., None]
        size += jnp.moveaxis(is_label, -1, axis) * jnp.abs(g)
    return _linear(problem, dx, reference, size)


def _linear(problem: Problem, dx, reference, size) -> Errors:
    """The largest error of a derivative relative to the size of its terms."""
    size = _at_least_normal(_scale(problem) * size, dx.dtype)
    error = jnp.abs(dx.astype(jnp.float64) - reference)
    bound = _sum_bound(row_length(problem, dx), dx.dtype) * size
    bound += _at_least_normal(_epsilon(dx.dtype) * jnp.abs(reference), dx.dtype)
    return jnp.max(error / size), jnp.max(error / bound)


def cross_entropy(problem: Problem, results, references, operands) -> Errors:
    """The largest error of the losses and their logsumexps, relative to the terms of the loss.

    The terms are the logsumexp and the label's logit.
    """
    del operands
    loss, true_loss = results[0], references[0]
    lse, true_lse = (sum(each.astype(jnp.float64) for each in y[1:]) for y in (results, references))
    size = _size_of_terms(true_loss, true_lse)
    errors = (
        jnp.abs(y.astype(jnp.float64) - true) / size
        for y, true in ((loss, true_loss), (lse, true_lse))
    )
    error = jnp.max(jnp.maximum(*errors))
    return error, error / _sum_bound(problem.shape[problem.options["axis"][0]], loss.dtype)


def total(problem: Problem, y, reference, operands) -> Errors:
    """The largest error of a sum or mean relative to the sum or mean of the absolute values."""
    (x,) = operands
    terms = row_length(problem, x)
    scale = jnp.sum(jnp.abs(x.astype(jnp.float64)), problem.options["axis"])
    if problem.op == "mean":
        scale /= terms
    error = jnp.abs(y.astype(jnp.float64) - reference)
    bound = 2 * math.log2(terms + 1) * _computed_epsilon(x.dtype) * scale
    bound += _epsilon(y.dtype) * jnp.abs(reference)
    return jnp.max(error / scale), jnp.max(error / bound)


def variance(problem: Problem, y, reference, operands) -> Errors:
    """The largest relative error; the bound of a square root is half as large.

    A variance of 0, such as that of one element, must be exact.
    """
    (x,) = operands
    error = jnp.abs(y.astype(jnp.float64) - reference)
    error = jnp.max(jnp.where(error == 0, 0.0, error / reference))
    bound = (4 + math.log2(row_length(problem, x))) * _computed_epsilon(x.dtype)
    return error, error / (bound / (2 if problem.op == "std" else 1) + _epsilon(y.dtype))


def mean_and_variance(problem: Problem, results, references, operands) -> Errors:
    """The larger of the error of the mean, relative to the mean magnitude, and of the variance."""
    (mean, var), (true_mean, true_var) = results, references
    (x,) = operands
    scale = jnp.mean(jnp.abs(x.astype(jnp.float64)), problem.options["axis"])
    error = jnp.abs(mean.astype(jnp.float64) - true_mean)
    bound = 2 * math.log2(row_length(problem, x) + 1) * _computed_epsilon(x.dtype) * scale
    bound += _epsilon(mean.dtype) * jnp.abs(true_mean)
    var_error, var_share = variance(problem, var, true_var, operands)
    return (
        jnp.maximum(var_error, jnp.max(error / scale)),
        jnp.maximum(var_share, jnp.max(error / bound)),
    )


def product(problem: Problem, y, reference, operands) -> Errors:
    """The largest relative error; each of the factors adds a rounding error.

    The worst case, half an epsilon per factor, is no useful bound for millions of factors. Unbiased
    rounding errors add up to at most lambda * sqrt(factors) / 2 epsilons, except with probability
    2 * exp(-lambda**2 / 2) (Higham and Mary, 2019); lambda is 8 here.
    """
    (x,) = operands
    factors = row_length(problem, x)
    error = jnp.abs(y.astype(jnp.float64) - reference) / jnp.abs(reference)
    bound = 4 * factors**0.5 * _computed_epsilon(x.dtype) + _epsilon(y.dtype)
    return jnp.max(error), jnp.max(error) / bound


def matmul(problem: Problem, y, reference, operands) -> Errors:
    """The relative error in the Frobenius norm; the bound of an element is 12 times as large.

    The rounding error of an element's result is added to its bound, since some elements of a gated
    product are 30 times as large as most.

    The rounding errors of a dot product of length K add up like a random walk, to about sqrt(K) / 6
    of one. At the default precision XLA multiplies float32 in TF32, which has 10 fraction bits.
    Products of 8-bit floats are accumulated with 13 fraction bits, and these errors add up the same
    way; a higher precision limits that to 128 products.
    """
    k = problem.shape[-2]
    rounding = _computed_epsilon(y.dtype)
    if y.dtype == jnp.float32 and problem.options.get("precision", "highest") != "highest":
        rounding = 2.0**-10
    if operands[0].dtype.itemsize == 1:
        terms = k if problem.options.get("precision") in (None, "default") else min(k, 128)
        rounding = 2.0**-13 * (2 + terms**0.5 / 4)
    bound = _epsilon(y.dtype) + (1 + k**0.5 / 2) * _computed_epsilon(y.dtype) + rounding
    difference = y.astype(jnp.float64) - reference
    rms = jnp.sqrt(jnp.mean(reference**2))
    frobenius = jnp.sqrt(jnp.mean(difference**2)) / rms
    own_rounding = _epsilon(y.dtype) / 2 * jnp.abs(reference)
    worst = jnp.max(jnp.abs(difference) - own_rounding) / rms
    return frobenius, jnp.maximum(frobenius, worst / 12) / bound
