"""The calls to run, drawn at random, once, from the shapes of published models.

A site is an operation of models, such as the softmax of the attention scores or a product of the
feed-forward layers. It draws a model, a batch, a length and a dtype, regardless of how fast the
call is. The drawn calls are kept in a file, so that a change is visible: calls are not drawn again
to suit the kernels, or the choice of `None`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bench import ops
from bench.calls import models
from bench.calls.models import Models, Transformer
from bench.problem import Problem, Shape, first_of_each_op

COUNTS = {"softmax": 130, "reduce": 70, "transpose": 40, "matmul": 60}
"""The number of calls of each family."""

OPERAND_BYTES, LARGE_BYTES, MEMORY_BYTES = 2 << 30, 256 << 20, 12 << 30
"""The most bytes of an operand; the most bytes of one that is not large (most calls with a large
one are left out); the most bytes of operands and results, in their own dtypes and in float64."""

OPERATIONS = 2**44
"""The most floating-point operations of a call."""

_KEPT_OF_LARGE = 1 / 3

_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_DTYPES = ("bfloat16",) * 4 + ("float32",) * 3 + ("float16",)


@dataclasses.dataclass(frozen=True)
class Draw:
    """The parameters that determine the calls that are drawn.

    Attributes:
      name: the name on the command line.
      models: the models whose calls are drawn.
      lengths: the sequence lengths, in ascending order; a model for shorter sequences takes those
        below its longest one, and the longest one.
      seed: the seed of the random numbers.
      file: the file of the calls, one per line, as `text` returned them when they were drawn.
      earlier: the draw before. Its calls and those of all before it are left out of this one.
    """

    name: str
    models: Models
    lengths: tuple[int, ...]
    seed: int
    file: pathlib.Path
    earlier: Draw | None = None


_FOLDER = pathlib.Path(__file__).parent

FIRST = Draw(
    "first",
    models.FIRST,
    (77, 128, 197, 256, 384, 512, 768, 1000, 1024, 1500, 2048, 4096),
    seed=2024,
    file=_FOLDER / "calls.txt",
)
"""The grids of `python -m bench tune` were revised according to measurements of its calls."""

SECOND = Draw(
    "second",
    models.FIRST + models.FURTHER,
    (64, 96, 160, 224, 320, 448, 577, 640, 729, 900, 1370, 1536, 3000, 8192),
    seed=2026,
    file=_FOLDER / "calls_second.txt",
    earlier=FIRST,
)
"""Drawn after that revision. Grids of products and of reductions were revised by its calls, too."""

THIRD = Draw(
    "third",
    models.FIRST + models.FURTHER,
    (81, 112, 176, 241, 288, 416, 481, 676, 800, 1101, 1280, 1800, 2500, 3072, 6144),
    seed=2028,
    file=_FOLDER / "calls_third.txt",
    earlier=SECOND,
)
"""Drawn after that. Most grids were then revised by its calls."""

FOURTH = Draw(
    "fourth",
    models.FIRST + models.FURTHER,
    (60, 90, 144, 210, 250, 324, 361, 500, 600, 850, 1152, 1700, 2304, 3500, 5000),
    seed=2032,
    file=_FOLDER / "calls_fourth.txt",
    earlier=THIRD,
)
"""Drawn after that. Most grids were then revised according to its calls, too."""

FIFTH = Draw(
    "fifth",
    models.FIRST + models.FURTHER,
    (56, 104, 152, 190, 275, 336, 400, 545, 690, 945, 1250, 1600, 2100, 2800, 4000),
    seed=2033,
    file=_FOLDER / "calls_fifth.txt",
    earlier=FOURTH,
)
"""Drawn after that, for an independent test."""

DRAWS = {each.name: each for each in (FIRST, SECOND, THIRD, FOURTH, FIFTH)}

Site = Callable[[random.Random, Draw], Problem]


def problems(draw: Draw = FIRST, *, gpu: bool, quick: bool = False) -> list[Problem]:
    """Returns the calls, grouped by family.

    Args:
      draw: the draw.
      gpu: False for a few small calls that run fast on the host, whatever the draw.
      quick: True for only the first call of each op.
    """
    found = list(_drawn(draw).values()) if gpu else _host()
    return first_of_each_op(found) if quick else found


def text(draw: Draw) -> str:
    """Returns the drawn calls, one per line."""
    return "".join(f"{each}\n" for each in _drawn(draw).values())


def memory(problem: Problem) -> int:
    """Returns the bytes of operands and results, in their own dtypes and in float64."""
    op = ops.OPS[problem.op]
    function = functools.partial(op.upstream, **ops.keywords(problem))
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in op.operands(problem)]
    results = jax.eval_shape(lambda *xs: op.apply(function, *op.prepare(function, *xs)), *operands)
    arrays = [*operands, *jax.tree.leaves(results)]
    return sum(x.size * (x.dtype.itemsize + 8) for x in arrays)


@functools.cache
def _drawn(draw: Draw) -> dict[str, Problem]:
    """Returns the calls by their text without the model, since models may make equal calls."""
    r = random.Random(draw.seed)
    known: set[str] = set()
    before = draw.earlier
    while before is not None:
        known |= _drawn(before).keys()
        before = before.earlier
    drawn: dict[str, Problem] = {}
    for family, sites in _SITES.items():
        wanted = len(drawn) + COUNTS[family]
        while len(drawn) < wanted:
            problem = r.choice(sites)(r, draw)
            is_large = _largest(problem) > LARGE_BYTES
            if is_large and r.random() > _KEPT_OF_LARGE:
                continue
            name = str(problem).partition(" (")[0]
            if name not in known and _fits(problem):
                drawn.setdefault(name, problem)
    return drawn


def _largest(problem: Problem) -> int:
    return max(
        math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
        for x in ops.OPS[problem.op].operands(problem)
    )


def _fits(problem: Problem) -> bool:
    is_product = ops.OPS[problem.op].limit == "matmul"
    if is_product and ops.floating_point_operations(problem) > OPERATIONS:
        return False
    return _largest(problem) <= OPERAND_BYTES and memory(problem) <= MEMORY_BYTES


def _call(
    op: str, model: str, site: str, shape: Sequence[int], dtype: str, **options: Any
) -> Problem:
    made = ops.make(op, tuple(shape), dtype, **options)
    return Problem(made.op, made.shape, made.dtype, made.options, model=f"{model}: {site}")


# What a site draws


def _transformer(r: random.Random, draw: Draw) -> Transformer:
    """Draws a decoder or an encoder of any kind, with equal probability."""
    encoders = draw.models.encoders + draw.models.patch_encoders
    return r.choice(r.choice((draw.models.decoders, encoders)))


def _length(r: random.Random, draw: Draw, model: Transformer) -> int:
    if model.lengths:
        return r.choice(model.lengths)
    longest = min(model.length, draw.lengths[-1])
    return r.choice([*(n for n in draw.lengths if n < model.length), longest])


def _batch(r: random.Random) -> int:
    return r.choice(_BATCHES)


def _tokens(r: random.Random, draw: Draw, model: Transformer) -> int:
    """The rows of a product: a batch of sequences, or one new token of each."""
    is_new = model.mask == "causal" and r.random() < 1 / 4
    return _batch(r) * (1 if is_new else _length(r, draw, model))


def _dtype(r: random.Random) -> str:
    return r.choice(_DTYPES)


def _channels_last_or_first(r: random.Random, batch: int, size: Shape) -> tuple[Shape, bool]:
    channels, height, width = size
    if r.random() < 1 / 2:
        return (batch, height, width, channels), True
    return (batch, channels, height, width), False


# Softmax and what belongs to it


def _scale(head_dim: int) -> float:
    return round(head_dim**-0.5, 6)


def _softmax_or_gradient(r: random.Random) -> str:
    return r.choice(("softmax", "softmax", "softmax_vjp"))


def _self_attention(r: random.Random, draw: Draw) -> Problem:
    model = _transformer(r, draw)
    length = _length(r, draw, model)
    options: dict[str, Any] = {"scale": _scale(model.head_dim)}
    if model.mask == "causal":
        options["causal"] = True
    elif model.mask == "padding":
        options["where"] = "padding"
    if r.random() < 1 / 4:  # hand-written attention masks and scales the scores before
        options = {}
    shape = (_batch(r), model.heads, length, length)
    return _call(
        _softmax_or_gradient(r), model.name, "attention scores", shape, _dtype(r), **options
    )


def _attention_of_a_new_token(r: random.Random, draw: Draw) -> Problem:
    model = r.choice(draw.models.decoders)
    shape = (_batch(r), model.heads, 1, _length(r, draw, model))
    options = {"scale": _scale(model.head_dim), "where": "padding"}
    return _call("softmax", model.name, "scores of a new token", shape, _dtype(r), **options)


def _cross_attention(r: random.Random, draw: Draw) -> Problem:
    model = r.choice(draw.models.cross_attention)
    shape = (_batch(r), model.heads, *r.choice(model.sizes))
    options = r.choice(({}, {"scale": _scale(model.head_dim)}))
    return _call(
        _softmax_or_gradient(r), model.name, "attention scores", shape, _dtype(r), **options
    )


def _window_attention(r: random.Random, draw: Draw) -> Problem:
    model = r.choice(draw.models.windows)
    shape = (_batch(r) * model.groups, model.heads, model.length, model.length)
    return _call(_softmax_or_gradient(r), model.name, "attention scores", shape, _dtype(r))


def _router(r: random.Random, draw: Draw) -> Problem:
    model = r.choice([each for each in draw.models.decoders if each.experts])
    op = r.choice(("softmax", "softmax_vjp", "logsumexp"))
    shape = (_batch(r) * _length(r, draw, model), model.experts)
    return _call(op, model.name, "router", shape, r.choice(("float32", "bfloat16")))


def _predictor(r: random.Random, draw: Draw) -> Transformer:
    """Draws a model that predicts tokens."""
    tokens = draw.models.decoders + draw.models.encoders
    return r.choice([each for each in tokens if each.vocabulary])


def _vocabulary(r: random.Random, draw: Draw) -> Problem:
    """The logits of all tokens in training, or of the new tokens."""
    model = _predictor(r, draw)
    op = r.choice((
        "softmax", "log_softmax", "log_softmax_vjp", "logsumexp",
        "cross_entropy", "cross_entropy_grad", "cross_entropy_grad",
    ))  # fmt: skip
    shape = (_tokens(r, draw, model), model.vocabulary)
    return _call(op, model.name, "logits", shape, _dtype(r))


def _classes(r: random.Random, draw: Draw) -> Problem:
    names = [(each.name, each.vocabulary) for each in draw.models.patch_encoders if each.vocabulary]
    names += [(each.name, each.classes) for each in draw.models.maps if each.classes]
    name, classes = r.choice(names)
    op = r.choice(("softmax", "log_softmax", "logsumexp", "cross_entropy", "cross_entropy_grad"))
    return _call(op, name, "logits", (r.choice((64, 256, 1024, 4096)), classes), _dtype(r))


def _classes_of_pixels(r: random.Random, draw: Draw) -> Problem:
    model = r.choice(draw.models.segmentation)
    op = r.choice(("softmax", "softmax_vjp", "log_softmax", "log_softmax_vjp"))
    shape = (r.choice((1, 2, 4, 8, 16)), *model.sizes[0])
    return _call(op, model.name, "logits of pixels", shape, _dtype(r), axis=1)


# Reductions


def _norm_of_hidden_states(r: random.Random, draw: Draw) -> Problem:
    model = _transformer(r, draw)
    shape = (_batch(r), _length(r, draw, model), model.width)
    # Models without biases, like Llama, normalise by the mean of squares only.
    op = r.choice(("mean_and_var", "mean_and_var", "var")) if model.bias else "mean"
    return _call(op, model.name, "norm of hidden states", shape, _dtype(r), axis=-1)


def _norm_of_channels(r: random.Random, draw: Draw) -> Problem:
    model = r.choice(draw.models.maps)
    size = r.choice(model.sizes)
    channels, height, width = size
    if not model.groups:
        shape, is_last = _channels_last_or_first(r, _batch(r), size)
        axis: tuple[int, ...] = (0, 1, 2) if is_last else (0, 2, 3)
        return _call("mean_and_var", model.name, "batch norm", shape, _dtype(r), axis=axis)
    groups, own = model.groups, channels // model.groups
    shape, axis = r.choice((
        ((_batch(r), groups, own, height, width), (2, 3, 4)),
        ((_batch(r), height, width, groups, own), (1, 2, 4)),
    ))  # fmt: skip
    return _call("mean_and_var", model.name, "group norm", shape, _dtype(r), axis=axis)


def _pool(r: random.Random, draw: Draw) -> Problem:
    model = r.choice([each for each in draw.models.maps if each.classes])
    shape, is_last = _channels_last_or_first(r, _batch(r), r.choice(model.sizes[-2:]))
    op = r.choice(("mean", "mean", "max", "sum"))
    axis = (1, 2) if is_last else (2, 3)
    return _call(op, model.name, "pooling", shape, _dtype(r), axis=axis)


def _pool_of_tokens(r: random.Random, draw: Draw) -> Problem:
    model = r.choice(draw.models.encoders + draw.models.patch_encoders)
    shape = (_batch(r), _length(r, draw, model), model.width)
    return _call(
        r.choice(("mean", "max")), model.name, "pooling of tokens", shape, _dtype(r), axis=1
    )


def _gradient_of_a_bias(r: random.Random, draw: Draw) -> Problem:
    model = _transformer(r, draw)
    width = r.choice((model.width, model.hidden))
    shape = (_batch(r) * _length(r, draw, model), width)
    return _call("sum", model.name, "gradient of a bias", shape, _dtype(r), axis=0)


def _quantisation(r: random.Random, draw: Draw) -> Problem:
    """The range of activations per token, or of weights per column or as a whole."""
    model = _transformer(r, draw)
    op = r.choice(("max", "max", "min"))
    if r.random() < 1 / 2:
        shape = (_batch(r) * _length(r, draw, model), r.choice((model.width, model.hidden)))
        return _call(op, model.name, "quantisation of tokens", shape, _dtype(r), axis=-1)
    shape = (model.width, model.hidden)
    axis = r.choice((0, None))
    return _call(op, model.name, "quantisation of weights", shape, _dtype(r), axis=axis)


def _best_token(r: random.Random, draw: Draw) -> Problem:
    model = r.choice([each for each in draw.models.decoders if each.vocabulary])
    shape = (r.choice((*_BATCHES, 256, 1024)), model.vocabulary)
    op = r.choice(("argmax", "argmax", "max"))
    return _call(op, model.name, "best token", shape, _dtype(r), axis=-1)


def _best_class_of_pixels(r: random.Random, draw: Draw) -> Problem:
    model = r.choice(draw.models.segmentation)
    shape, is_last = _channels_last_or_first(r, r.choice((1, 4, 16)), model.sizes[0])
    axis = -1 if is_last else 1
    return _call("argmax", model.name, "class of pixels", shape, _dtype(r), axis=axis)


def _mean_loss(r: random.Random, draw: Draw) -> Problem:
    model = r.choice(draw.models.decoders)
    shape = (_batch(r), _length(r, draw, model))
    return _call(r.choice(("mean", "sum")), model.name, "loss", shape, "float32")


def _all_weights(r: random.Random, draw: Draw) -> Problem:
    """The sum of a matrix of squares, for the norm of a gradient."""
    model = _transformer(r, draw)
    shape = (model.width, r.choice((model.hidden, model.heads * model.head_dim)))
    return _call("sum", model.name, "norm of a gradient", shape, r.choice(("float32", "bfloat16")))


# Transposes


def _heads(r: random.Random, draw: Draw) -> Problem:
    model = _transformer(r, draw)
    batch, length = _batch(r), _length(r, draw, model)
    shape, axes = r.choice((
        ((batch, length, model.heads, model.head_dim), (0, 2, 1, 3)),
        ((batch, model.heads, length, model.head_dim), (0, 2, 1, 3)),
        ((batch, length, 3, model.heads, model.head_dim), (2, 0, 3, 1, 4)),
        ((batch, model.heads, length, model.head_dim), (0, 1, 3, 2)),
    ))  # fmt: skip
    return _call("transpose", model.name, "heads", shape, _dtype(r), axes=axes)


def _layout_of_maps(r: random.Random, draw: Draw) -> Problem:
    model = r.choice(draw.models.maps + draw.models.segmentation)
    shape, is_last = _channels_last_or_first(r, _batch(r), r.choice(model.sizes))
    axes = (0, 3, 1, 2) if is_last else (0, 2, 3, 1)
    return _call("transpose", model.name, "layout", shape, _dtype(r), axes=axes)


def _layout_of_images(r: random.Random, draw: Draw) -> Problem:
    name, side = r.choice(draw.models.images)
    shape, is_last = _channels_last_or_first(r, _batch(r), (3, side, side))
    axes = (0, 3, 1, 2) if is_last else (0, 2, 3, 1)
    dtype = r.choice(("uint8", "float32", "bfloat16"))
    return _call("transpose", name, "images", shape, dtype, axes=axes)


def _patches(r: random.Random, draw: Draw) -> Problem:
    name, rows, size, channels = r.choice(draw.models.patches)
    shape = (_batch(r), rows, size, rows, size, channels)
    return _call("transpose", name, "patches", shape, _dtype(r), axes=(0, 1, 3, 2, 4, 5))


def _sequences(r: random.Random, draw: Draw) -> Problem:
    name, length, width = r.choice(draw.models.sequences)
    shape, axes = (_batch(r), length, width), r.choice(((0, 2, 1), (1, 0, 2)))
    return _call("transpose", name, "sequences", shape, _dtype(r), axes=axes)


def _weights(r: random.Random, draw: Draw) -> Problem:
    model = _transformer(r, draw)
    rows = r.choice((model.hidden, model.vocabulary or model.width, model.heads * model.head_dim))
    return _call("transpose", model.name, "weights", (rows, model.width), _dtype(r), axes=(1, 0))


# Products. The shape is (..., M, K, N).


def _product(r: random.Random, op: str, name: str, site: str, shape: Shape, **options) -> Problem:
    """Half of the float32 products have the highest precision, the others JAX's default."""
    dtype = _dtype(r)
    if dtype == "float32":
        options["precision"] = r.choice(("highest", "default"))
    return _call(op, name, site, shape, dtype, **options)


def _projection(r: random.Random, draw: Draw) -> Problem:
    model = _transformer(r, draw)
    tokens, inside = _tokens(r, draw, model), model.heads * model.head_dim
    keys = (model.key_heads or model.heads) * model.head_dim
    into, out = r.choice((
        (model.width, inside), (model.width, keys), (model.width, inside + 2 * keys),
        (inside, model.width),
    ))  # fmt: skip
    shape = (tokens, into, out)
    if model.bias and r.random() < 1 / 2:
        residual = True if out == model.width == inside else None
        return _product(r, "linear", model.name, "projection", shape, residual=residual)
    op = r.choice(("matmul", "matmul", "dot_general"))
    return _product(r, op, model.name, "projection", shape)


def _feed_forward(r: random.Random, draw: Draw) -> Problem:
    model = _transformer(r, draw)
    tokens = _tokens(r, draw, model)
    if r.random() < 1 / 3:
        shape = (tokens, model.hidden, model.width)
        op = "linear" if model.bias else "matmul"
        return _product(r, op, model.name, "feed-forward, out", shape)
    shape = (tokens, model.width, model.hidden)
    if not (model.gated or model.bias):
        return _product(r, "matmul", model.name, "feed-forward, in", shape)
    op = "glu" if model.gated else "linear"
    activation = model.activation
    return _product(r, op, model.name, "feed-forward, in", shape, activation=activation)


def _head(r: random.Random, draw: Draw) -> Problem:
    model = _predictor(r, draw)
    op = r.choice(("matmul", "dot_general_of_rows"))  # the embedding has a row for each token
    shape = (_tokens(r, draw, model), model.width, model.vocabulary)
    return _product(r, op, model.name, "head", shape)


def _gradient_of_a_product(r: random.Random, draw: Draw) -> Problem:
    model = _transformer(r, draw)
    tokens = _batch(r) * _length(r, draw, model)
    if r.random() < 1 / 2:
        shape = (model.width, tokens, model.hidden)
        return _product(r, "dot_general_of_columns", model.name, "gradient of weights", shape)
    shape = (tokens, model.hidden, model.width)
    return _product(r, "dot_general_of_rows", model.name, "gradient of the input", shape)


def _scores_and_values(r: random.Random, draw: Draw) -> Problem:
    model = _transformer(r, draw)
    length = _length(r, draw, model)
    heads = (_batch(r), model.heads)
    if r.random() < 1 / 2:
        shape = (*heads, length, model.head_dim, length)
        return _product(r, "dot_general_of_rows", model.name, "attention scores", shape)
    shape = (*heads, length, length, model.head_dim)
    return _product(r, r.choice(("matmul", "dot_general")), model.name, "attended values", shape)


def _layer_of_a_perceptron(r: random.Random, draw: Draw) -> Problem:
    model = r.choice(draw.models.perceptrons)
    i = r.randrange(len(model.widths) - 1)
    shape = (r.choice(model.batches), *model.widths[i : i + 2])
    last = i == len(model.widths) - 2
    activation = None if last else "gelu" if "Mixer" in model.name else "relu"
    return _product(r, "linear", model.name, f"layer {i + 1}", shape, activation=activation)


def _convolution_of_single_pixels(r: random.Random, draw: Draw) -> Problem:
    model = r.choice([each for each in draw.models.maps if each.inner])
    channels, height, width = r.choice(model.sizes[1:])
    into_and_out = (channels, int(model.inner * channels))
    shape = (_batch(r) * height * width, *r.choice((into_and_out, into_and_out[::-1])))
    return _product(r, "matmul", model.name, "convolution, 1 x 1", shape)


def _experts(r: random.Random, draw: Draw) -> Problem:
    model = r.choice([each for each in draw.models.decoders if each.experts])
    tokens = r.choice((16, 64, 128, 256, 512))
    shape = r.choice((
        (model.experts, tokens, model.width, model.hidden),
        (model.experts, tokens, model.hidden, model.width),
    ))  # fmt: skip
    return _product(r, "matmul", model.name, "experts", shape)


def _interaction(r: random.Random, draw: Draw) -> Problem:
    features, width = models.DLRM_FEATURES, models.DLRM_WIDTH
    shape = (r.choice((2048, 8192, 32768)), features, width, features)
    return _product(r, "dot_general_of_rows", "DLRM", "interaction", shape)


_SITES: dict[str, Sequence[Site]] = {
    "softmax": (
        *(5 * (_self_attention,)),
        *(4 * (_vocabulary,)),
        _attention_of_a_new_token,
        _cross_attention,
        _window_attention,
        _router,
        _classes,
        _classes_of_pixels,
    ),
    "reduce": (
        *(2 * (_norm_of_hidden_states,)),
        *(2 * (_norm_of_channels,)),
        _pool,
        _pool_of_tokens,
        _gradient_of_a_bias,
        _quantisation,
        _best_token,
        _best_class_of_pixels,
        _mean_loss,
        _all_weights,
    ),
    "transpose": (
        *(2 * (_heads,)),
        _layout_of_maps,
        _layout_of_images,
        _patches,
        _sequences,
        _weights,
    ),
    "matmul": (
        *(2 * (_projection,)),
        *(3 * (_feed_forward,)),
        *(2 * (_head,)),
        _gradient_of_a_product,
        _scores_and_values,
        _layer_of_a_perceptron,
        _convolution_of_single_pixels,
        _experts,
        _interaction,
    ),
}
"""The sites of each family. Operations that are more frequent in models are listed more often."""


def _host() -> list[Problem]:
    """Small, odd sizes."""
    make = ops.make
    return [
        make("softmax", (2, 3, 33, 33), "bfloat16", scale=0.3, causal=True),
        make("softmax", (2, 3, 9, 40), "float32", scale=0.3, where="padding"),
        make("log_softmax_vjp", (7, 65), "bfloat16"),
        make("cross_entropy", (33, 130), "float32"),
        make("mean_and_var", (2, 9, 70), "bfloat16", axis=-1),
        make("argmax", (2, 5, 9, 11), "float32", axis=1),
        make("transpose", (2, 9, 3, 8), "bfloat16", axes=(0, 2, 1, 3)),
        make("dot_general_of_rows", (2, 3, 17, 8, 17), "bfloat16"),
        make("linear", (67, 72, 70), "bfloat16", activation="gelu"),
    ]
