"""Flax layers on our operations. Flax is optional: this module can be imported without it.

`Linear` and `Dense` are the layers of `flax.nnx` and `flax.linen` with an activation, `GatedLinear`
and `GatedDense` the same with a gate. Other linear layers accept
`dot_general=jax_gpuops.dot_general`; attention layers accept `attention_fn` of this module. Flax
does not pass `implementation=` on: set it with `jax_gpuops.use`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_gpuops import _arguments, _primitive
from jax_gpuops._matmul import dot_general
from jax_gpuops._softmax import softmax

if TYPE_CHECKING:
    from jax_gpuops._flax_layers import Dense as Dense
    from jax_gpuops._flax_layers import GatedDense as GatedDense
    from jax_gpuops._flax_layers import GatedLinear as GatedLinear
    from jax_gpuops._flax_layers import Linear as Linear


__all__ = ["Dense", "GatedDense", "GatedLinear", "Linear", "attention_fn"]


def __getattr__(name: str) -> Any:
    """Imports the layers on first access, since they need Flax."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jax_gpuops import _flax_layers

    return getattr(_flax_layers, name)


def attention_fn(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    bias: jax.typing.ArrayLike | None = None,
    mask: jax.typing.ArrayLike | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    *,
    is_causal: bool = False,
) -> jax.Array:
    """Dot-product attention; drop-in for `dot_product_attention` of `flax.nnx` and `flax.linen`.

    Pass it as `attention_fn=` to `nnx.MultiHeadAttention` or `nn.MultiHeadDotProductAttention`.
    It uses `jax_gpuops.dot_general` for the products and `jax_gpuops.softmax`. The scores of 16-bit
    operands are float32, so that with dropout results of 16 bits may differ from Flax's by more
    than their rounding. As in Flax, a fully masked query attends to all keys with equal weights.

    Args:
      query: an array of shape (..., query length, heads, depth).
      key: an array of shape (..., key length, key heads, depth); `heads` is a multiple of
        `key heads`, and each key head serves that many neighbouring query heads.
      value: an array of shape (..., key length, key heads, value depth).
      bias: None, or an array that is added to the scores; broadcasts to (..., heads, query length,
        key length).
      mask: None, or a boolean array that broadcasts to the same shape: True where attention is
        allowed.
      broadcast_dropout: True to drop the same positions in all batches and heads.
      dropout_rng: the key for dropout; needed if there is dropout.
      dropout_rate: the probability of dropping a weight.
      deterministic: True for no dropout.
      dtype: the dtype of the computation; None for the dtype to which the operands promote, and
        float32 for integers.
      precision: as in JAX.
      module: None, or the Flax module into which the weights are sown as intermediates.
      is_causal: True to let query i attend to keys 0 to i only.

    Returns:
      An array of shape (..., query length, heads, value depth).

    Raises:
      TypeError: if an operand is not an array, or `is_causal` not a bool.
      ValueError: if shapes do not match, if `dtype` is not a floating-point or complex one, or if
        dropout has no key or an invalid rate.
    """
    operands = {"query": query, "key": key, "value": value}
    operands = {name: _arguments.as_array(name, x) for name, x in operands.items()}
    for name, x in operands.items():
        if jnp.ndim(x) < 3:
            raise ValueError(f"{name} must have at least three dims, got shape {jnp.shape(x)}")
    addends = {"bias": bias, "mask": mask}
    bias, mask = (
        None if x is None else _arguments.as_array(name, x) for name, x in addends.items()
    )
    is_causal = _arguments.flag("is_causal", is_causal)
    if dtype is None:
        dtype = jnp.result_type(*operands.values())
        if not jnp.issubdtype(dtype, jnp.inexact):  # as in Flax
            dtype = jnp.promote_types(dtype, jnp.float32)
    elif not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(f"dtype must be a floating-point or complex dtype, got {dtype!r:.60}")
    query, key, value = (jnp.asarray(x, dtype) for x in operands.values())
    *batch, _, heads, depth = query.shape
    key_heads = key.shape[-2]
    if (
        tuple(key.shape[:-3]) != tuple(batch)
        or key.shape[:-1] != value.shape[:-1]
        or key.shape[-1] != depth
        or key_heads == 0
        or heads % key_heads != 0
    ):
        raise ValueError(
            f"query, key and value of shapes {query.shape}, {key.shape} and {value.shape} do not "
            "match in batch, length, depth or heads"
        )
    if not 0 <= dropout_rate < 1:
        raise ValueError(f"dropout_rate must be at least 0 and less than 1, got {dropout_rate}")

    # Query heads in groups: (..., length, key heads, group, depth).
    grouped = query.reshape(*query.shape[:-2], key_heads, heads // key_heads, depth)
    rank = len(batch)
    batch_dims = tuple(range(rank))
    score_dtype = _primitive.accumulator(dtype)
    scores = dot_general(
        grouped,
        key,
        (((rank + 3,), (rank + 2,)), ((*batch_dims, rank + 1), (*batch_dims, rank + 1))),
        precision,
        preferred_element_type=score_dtype,
    )  # (..., key heads, query length, group, key length)
    scores = jnp.swapaxes(scores, -3, -2)
    scores = scores.reshape(*batch, heads, *scores.shape[-2:])
    for name, given in (("bias", bias), ("mask", mask)):
        if given is not None and not _arguments.broadcasts(jnp.shape(given), scores.shape):
            raise ValueError(
                f"{name} of shape {jnp.shape(given)} does not broadcast to the scores' shape "
                f"{scores.shape}"
            )
    scale = 1 / math.sqrt(depth) if depth > 0 else 1.0  # the scores are 0 without a depth
    if bias is not None:
        bias = _arguments.with_rank(jnp.asarray(bias, score_dtype), scores.ndim)
        scores, scale = scores * scale + bias, 1.0
    allowed = None
    if mask is not None:
        allowed = _arguments.with_rank(jnp.asarray(mask, bool), scores.ndim)
    weights = softmax(scores, where=allowed, scale=scale, causal=is_causal)
    if allowed is not None:
        if is_causal:
            causal = jnp.tri(scores.shape[-2], scores.shape[-1], dtype=bool)
            allowed = allowed & _arguments.with_rank(causal, scores.ndim)
        # softmax gives zeros for a query that may attend to nothing.
        attends = jnp.any(allowed, -1, keepdims=True)
        weights = jnp.where(attends, weights, 1 / max(1, scores.shape[-1]))
    weights = weights.astype(dtype)
    if module is not None:
        _sow(module, weights)
    if not deterministic and dropout_rate > 0:
        if dropout_rng is None:
            raise ValueError("dropout_rng is needed for a dropout_rate above 0, but is None")
        dropped = (1,) * (weights.ndim - 2) if broadcast_dropout else weights.shape[:-2]
        keep = jax.random.bernoulli(dropout_rng, 1 - dropout_rate, (*dropped, *weights.shape[-2:]))
        weights = weights * (keep.astype(dtype) / jnp.asarray(1 - dropout_rate, dtype))

    weights = weights.reshape(*batch, key_heads, heads // key_heads, *weights.shape[-2:])
    attended = dot_general(
        weights,
        value,
        (((rank + 3,), (rank,)), ((*batch_dims, rank), (*batch_dims, rank + 1))),
        precision,
    )  # (..., key heads, group, query length, value depth)
    attended = jnp.moveaxis(attended, -2, rank)
    return attended.reshape(*attended.shape[: rank + 1], heads, value.shape[-1])


def _sow(module: Any, weights: jax.Array) -> None:
    from flax import linen, nnx

    kind = "intermediates" if isinstance(module, linen.Module) else nnx.Intermediate
    module.sow(kind, "attention_weights", weights)
