"""The programs, each written once, as users of JAX write it, for plain JAX and for ours.

A program takes its ops from a `Functions`, and everything else from JAX: elementwise operations,
`top_k`, random numbers, and matrix products other than dense layers and logits of vocabularies. A
new program is added to `PROGRAMS`, and nowhere else.

The same code also gives the reference in float64, so a program names no computation dtype: `_wide`
is float32 for 16-bit floats.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_gpuops
from bench import ops
from bench.ops import Operand
from bench.problem import Problem, Shape


@dataclasses.dataclass(frozen=True)
class Functions:
    """The ops of programs: those of jax_gpuops, or their equivalents in plain JAX.

    The arguments are those of jax_gpuops: `where`, `scale` and `causal` for softmax.
    """

    softmax: Callable[..., jax.Array]
    log_softmax: Callable[..., jax.Array]
    cross_entropy: Callable[..., jax.Array]
    sum: Callable[..., jax.Array]
    mean: Callable[..., jax.Array]
    argmax: Callable[..., jax.Array]
    transpose: Callable[..., jax.Array]
    matmul: Callable[..., jax.Array]
    linear: Callable[..., jax.Array]
    linear_cross_entropy: Callable[..., jax.Array]


def _masked(op: str) -> Callable[..., jax.Array]:
    """Returns a function of `jax.nn` for rows that are not fully masked.

    Plain JAX masks by -inf, which is faster than the argument `where` of `jax.nn`.
    """
    upstream = ops.OPS[op].upstream

    def function(x, axis=-1, where=None, **scale_and_causal):
        if where is not None:
            x = jnp.where(where, x, -jnp.inf)
        return upstream(x, axis, **scale_and_causal)

    return function


def _mean_cross_entropy(x, w, labels, *, preferred_element_type=None, rows_per_chunk=None):
    """The formula of `linear_cross_entropy`, without chunks."""
    del rows_per_chunk
    scores = jnp.matmul(x, w, preferred_element_type=preferred_element_type)
    return jnp.mean(ops.OPS["cross_entropy_grad"].upstream(scores, labels))


def plain() -> Functions:
    """Returns the functions in plain JAX, in the fastest form."""
    return Functions(
        softmax=_masked("softmax"),
        log_softmax=_masked("log_softmax"),
        cross_entropy=ops.OPS["cross_entropy_grad"].upstream,
        sum=jnp.sum,
        mean=jnp.mean,
        argmax=jnp.argmax,
        transpose=jnp.transpose,
        matmul=jnp.matmul,
        linear=ops.OPS["linear"].upstream,
        linear_cross_entropy=_mean_cross_entropy,
    )


def ours() -> Functions:
    """Returns the functions of jax_gpuops."""
    return Functions(
        softmax=ops.ours("softmax"),
        log_softmax=ops.ours("log_softmax"),
        cross_entropy=ops.ours("cross_entropy_grad"),
        sum=ops.ours("sum"),
        mean=ops.ours("mean"),
        argmax=ops.ours("argmax"),
        transpose=ops.ours("transpose"),
        matmul=ops.ours("matmul"),
        linear=ops.ours("linear"),
        linear_cross_entropy=jax_gpuops.linear_cross_entropy,
    )


def _wide(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _attention(f: Functions, query, key, value, lengths=None, *, mask, by_hand=False, scores=None):
    dtype = None if scores is None else jnp.promote_types(query.dtype, scores)
    scores = jnp.einsum("blhd,bmhd->bhlm", query, key, preferred_element_type=dtype)
    scale = 1 / math.sqrt(query.shape[-1])
    length = query.shape[1]
    if by_hand:
        scores = jnp.where(jnp.tri(length, dtype=bool), scores * scale, -jnp.inf)
        weights = f.softmax(scores)
    elif mask == "causal":
        weights = f.softmax(scores, scale=scale, causal=True)
    else:
        is_token = jnp.arange(length) < lengths[:, None, None, None]
        weights = f.softmax(scores, where=is_token, scale=scale)
    return jnp.einsum("bhlm,bmhd->blhd", weights.astype(value.dtype), value)


def _lm_head(f: Functions, hidden, weights, labels, *, logits=None):
    dtype = None if logits is None else jnp.promote_types(hidden.dtype, logits)
    scores = f.matmul(hidden, weights, preferred_element_type=dtype)
    return f.mean(f.cross_entropy(scores, labels))


def _lm_head_loss(f: Functions, hidden, weights, labels, *, logits=None, rows_per_chunk=None):
    dtype = hidden.dtype if logits is None else jnp.promote_types(hidden.dtype, logits)
    how = {"preferred_element_type": dtype, "rows_per_chunk": rows_per_chunk}
    return f.linear_cross_entropy(hidden, weights, labels, **how).astype(dtype)


def _router(f: Functions, hidden, weights, *, top_k):
    logits = jnp.matmul(hidden, weights, preferred_element_type=_wide(hidden))
    probabilities = f.softmax(logits)
    gates, experts = jax.lax.top_k(probabilities, top_k)
    gates = gates / f.sum(gates, -1, keepdims=True)
    chosen = jax.nn.one_hot(experts, weights.shape[-1], dtype=probabilities.dtype)
    load = f.mean(f.sum(chosen, 1), 0)
    importance = f.mean(probabilities, 0)
    return gates, experts, weights.shape[-1] * f.sum(load * importance)


def _classifier(f: Functions, features, labels, *parameters, layers):
    x = f.mean(features, (1, 2)) if features.ndim == 4 else features
    for i in range(len(layers)):
        weights, bias = parameters[2 * i : 2 * i + 2]
        x = x @ weights + bias
        if i < len(layers) - 1:
            x = jax.nn.relu(x)
    return f.mean(f.cross_entropy(x, labels))


def _mlp(f: Functions, x, *parameters, activation):
    hidden_weights, hidden_bias, weights, bias = parameters
    hidden = f.linear(x, hidden_weights, hidden_bias, activation=activation)
    return f.linear(hidden, weights, bias)


def _normalized(f: Functions, x, axes):
    """Returns x normalized to mean 0 and variance 1 over some axes, its mean and its variance."""
    x = x.astype(_wide(x))
    mean = f.mean(x, axes, keepdims=True)
    variance = f.mean(jnp.square(x - mean), axes, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5), mean, variance


def _layer_norm(f: Functions, x, residual, gain, bias):
    y, _, _ = _normalized(f, x + residual, -1)
    return (y * gain + bias).astype(x.dtype)


def _batch_norm(f: Functions, x, gain, bias):
    y, mean, variance = _normalized(f, x, (0, 1, 2))
    return jax.nn.relu(y * gain + bias).astype(x.dtype), mean, variance


def _sampling(f: Functions, logits, seed, *, top_k, temperature):
    least = jax.lax.top_k(logits, top_k)[0][:, -1:]
    log_probabilities = f.log_softmax(
        logits.astype(_wide(logits)), where=logits >= least, scale=1 / temperature
    )
    noise = jax.random.gumbel(jax.random.wrap_key_data(seed), logits.shape, jnp.float32)
    tokens = f.argmax(log_probabilities + noise, -1)
    return tokens, jnp.take_along_axis(log_probabilities, tokens[:, None], -1)[:, 0]


def _images(f: Functions, images, mean, deviation, *, to):
    """Normalizes images per channel, and converts them to the layout NCHW or from it to NHWC."""
    if to == "NCHW":
        return f.transpose((images.astype(mean.dtype) - mean) / deviation, (0, 3, 1, 2))
    return (f.transpose(images, (0, 2, 3, 1)).astype(mean.dtype) - mean) / deviation


def _heads(f: Functions, x, bias):
    *_, depth = x.shape
    return f.transpose(x + bias, (0, 2, 1, 3)) / math.sqrt(depth)


# How operands are drawn


def _scaled(key: jax.Array, shape: Shape, dtype: np.dtype) -> jax.Array:
    """Draws weights that keep the magnitude of their operand; they are contracted in dim 0."""
    return (jax.random.normal(key, shape, jnp.float32) / math.sqrt(shape[0])).astype(dtype)


def _signs(key: jax.Array, shape: Shape, dtype: np.dtype, *, size: float = 1.0) -> jax.Array:
    """Draws -size, 0 or size.

    The product of such matrices is exact in any precision, so all ways to compute it select the
    same experts.
    """
    return size * jax.random.randint(key, shape, -1, 2).astype(dtype)


def _lengths(key: jax.Array, shape: Shape, dtype: np.dtype, *, longest: int) -> jax.Array:
    """Draws the lengths of sequences: half the longest, or more."""
    return jax.random.randint(key, shape, -(-longest // 2), longest + 1, dtype)


def _positive(key: jax.Array, shape: Shape, dtype: np.dtype) -> jax.Array:
    return jax.random.uniform(key, shape, jnp.float32, 0.5, 1.5).astype(dtype)


def _bits(key: jax.Array, shape: Shape, dtype: np.dtype) -> jax.Array:
    return jax.random.bits(key, shape, dtype)


def _labels(rows: int, classes: int) -> Operand:
    return Operand((rows,), "int32", functools.partial(ops.labels, classes=classes))


def _attention_operands(problem: Problem) -> dict[str, Operand]:
    batch, length, *_ = problem.shape
    array = Operand(problem.shape, problem.dtype)
    operands = {"query": array, "key": array, "value": array}
    if problem.options["mask"] == "padded":
        draw = functools.partial(_lengths, longest=length)
        operands["lengths"] = Operand((batch,), "int32", draw)
    return operands


def _lm_head_operands(problem: Problem) -> dict[str, Operand]:
    tokens, width, vocabulary = problem.shape
    return {
        "hidden": Operand((tokens, width), problem.dtype),
        "weights": Operand((width, vocabulary), problem.dtype, _scaled),
        "labels": _labels(tokens, vocabulary),
    }


def _router_operands(problem: Problem) -> dict[str, Operand]:
    tokens, width, experts = problem.shape
    size = 2.0 ** -(round(math.log2(width) / 2))  # logits are about 1
    return {
        "hidden": Operand((tokens, width), problem.dtype, _signs),
        "weights": Operand((width, experts), problem.dtype, functools.partial(_signs, size=size)),
    }


def _classifier_operands(problem: Problem) -> dict[str, Operand]:
    rows, *_, width = problem.shape
    layers = problem.options["layers"]
    operands = {
        "features": Operand(problem.shape, problem.dtype),
        "labels": _labels(rows, layers[-1]),
    }
    for i, (inputs, outputs) in enumerate(zip((width, *layers), layers, strict=False), start=1):
        operands[f"weights {i}"] = Operand((inputs, outputs), problem.dtype, _scaled)
        operands[f"bias {i}"] = Operand((outputs,), problem.dtype)
    return operands


def _mlp_operands(problem: Problem) -> dict[str, Operand]:
    tokens, width, hidden = problem.shape
    return {
        "x": Operand((tokens, width), problem.dtype),
        "hidden weights": Operand((width, hidden), problem.dtype, _scaled),
        "hidden bias": Operand((hidden,), problem.dtype),
        "weights": Operand((hidden, width), problem.dtype, _scaled),
        "bias": Operand((width,), problem.dtype),
    }


def _layer_norm_operands(problem: Problem) -> dict[str, Operand]:
    x, row = Operand(problem.shape, problem.dtype), Operand(problem.shape[-1:], problem.dtype)
    return {"x": x, "residual": x, "gain": row, "bias": row}


def _batch_norm_operands(problem: Problem) -> dict[str, Operand]:
    operands = _layer_norm_operands(problem)
    del operands["residual"]
    return operands


def _sampling_operands(problem: Problem) -> dict[str, Operand]:
    return {
        "logits": Operand(problem.shape, problem.dtype),
        "seed": Operand((2,), "uint32", _bits),
    }


def _images_operands(problem: Problem) -> dict[str, Operand]:
    channels = (problem.shape[1 if problem.options["to"] == "NHWC" else 3],)
    return {
        "images": Operand(problem.shape, "uint8", _bits),
        "mean": Operand(channels, problem.dtype, _positive),
        "deviation": Operand(channels, problem.dtype, _positive),
    }


def _heads_operands(problem: Problem) -> dict[str, Operand]:
    return {
        "x": Operand(problem.shape, problem.dtype),
        "bias": Operand(problem.shape[-2:], problem.dtype),
    }


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, and its description for the benchmark.

    Attributes:
      function: maps a `Functions`, the operands, and the problem's options to the results.
      summary: a one-line description of what it computes.
      shape: the meaning of the dims of the problem's shape.
      operands: maps a problem to the operands, by name.
      results: the names of the results.
      has_gradient: True if the gradient with respect to all float operands is measured too. A
        scalar result is a loss, and the cotangents of other results are drawn.
      has_products: True if it multiplies matrices, which XLA does in TF32 for float32 on a GPU.
    """

    function: Callable[..., Any]
    summary: str
    shape: str
    operands: Callable[[Problem], dict[str, Operand]]
    results: tuple[str, ...]
    has_gradient: bool = True
    has_products: bool = False


PROGRAMS: dict[str, Program] = {
    "attention": Program(
        _attention,
        "softmax of masked, scaled scores, and the two products around it",
        "batch x length x heads x head dim",
        _attention_operands,
        ("attended values",),
        has_products=True,
    ),
    "lm_head": Program(
        _lm_head,
        "logits of a vocabulary, and the mean of their cross entropy",
        "tokens x width x vocabulary",
        _lm_head_operands,
        ("loss",),
        has_products=True,
    ),
    "lm_head_loss": Program(
        _lm_head_loss,
        "the same by linear_cross_entropy, which has not all logits in memory",
        "tokens x width x vocabulary",
        _lm_head_operands,
        ("loss",),
        has_products=True,
    ),
    "router": Program(
        _router,
        "mixture of experts: logits, softmax, top-k, gates that sum to 1, load-balancing loss",
        "tokens x width x experts",
        _router_operands,
        ("gates", "experts", "loss"),
        has_products=True,
    ),
    "classifier": Program(
        _classifier,
        "mean over the pixels if there are some, dense layers, cross entropy",
        "batch (x height x width) x features",
        _classifier_operands,
        ("loss",),
        has_products=True,
    ),
    "mlp": Program(
        _mlp,
        "two dense layers with an activation between them, the block of a transformer",
        "tokens x width x hidden width",
        _mlp_operands,
        ("y",),
        has_products=True,
    ),
    "layer_norm": Program(
        _layer_norm,
        "residual sum, mean and variance of each row, gain and bias",
        "batch x length x width",
        _layer_norm_operands,
        ("normalized",),
    ),
    "batch_norm": Program(
        _batch_norm,
        "mean and variance of each channel, gain and bias, relu",
        "batch x height x width x channels",
        _batch_norm_operands,
        ("normalized", "mean", "variance"),
    ),
    "sampling": Program(
        _sampling,
        "top-k, temperature, log_softmax, and a token drawn by Gumbel noise",
        "batch x vocabulary",
        _sampling_operands,
        ("tokens", "log probabilities"),
        has_gradient=False,
    ),
    "images": Program(
        _images,
        "a data pipeline: bytes to normalized floats, between NHWC and NCHW",
        "of the images",
        _images_operands,
        ("images",),
        has_gradient=False,
    ),
    "heads": Program(
        _heads,
        "bias, heads before length, scale: what comes before attention",
        "batch x length x heads x head dim",
        _heads_operands,
        ("heads",),
    ),
}
"""The programs by name."""
