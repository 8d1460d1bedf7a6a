"""Dense layers of Flax that call `linear`. Unlike `jax_gpuops.flax`, this module needs Flax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from jax_gpuops._linear import ACTIVATIONS, check_activation, linear


class Linear(nnx.Linear):
    """`flax.nnx.Linear` by `jax_gpuops.linear`: `activation(x @ kernel + bias) + residual`.

    >>> layer = jax_gpuops.flax.Linear(512, 2048, activation="gelu", rngs=nnx.Rngs(0))
    >>> y = layer(x)
    >>> y = layer(x, residual=z)  # layer(x) + z in one kernel

    Its parameters are those of `flax.nnx.Linear`. XLA computes calls with an `out_sharding`.

    Args:
      in_features: as in Flax.
      out_features: as in Flax.
      activation: as for `jax_gpuops.linear`.
      **kwargs: the other arguments of `flax.nnx.Linear`, except `dot_general`.

    Raises:
      TypeError: if `dot_general` is given, which would replace the kernel.
      ValueError: if the activation is unknown.
    """

    def __init__(
        self, in_features: int, out_features: int, *, activation: str | None = None, **kwargs: Any
    ):
        if "dot_general" in kwargs:
            raise TypeError(
                "this layer does not support dot_general: its kernel computes the product"
            )
        check_activation(activation)
        super().__init__(in_features, out_features, **kwargs)
        self.activation = activation

    def __call__(
        self, inputs: jax.Array, out_sharding: Any = None, *, residual: jax.Array | None = None
    ) -> jax.Array:
        """Applies the layer along the last dimension of the input, and adds the residual."""
        if out_sharding is not None:
            y = super().__call__(inputs, out_sharding)
            y = y if self.activation is None else ACTIVATIONS[self.activation](y)
            return y if residual is None else y + residual
        bias = None if self.bias is None else jnp.asarray(self.bias)
        operands: Any = (inputs, jnp.asarray(self.kernel), bias)
        inputs, kernel, bias = self.promote_dtype(operands, dtype=self.dtype)
        return linear(
            inputs,
            kernel,
            bias,
            activation=self.activation,
            residual=residual,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
        )


class Dense(linen.Dense):
    """`flax.linen.Dense` by `jax_gpuops.linear`: `activation(x @ kernel + bias) + residual`.

    >>> layer = jax_gpuops.flax.Dense(2048, activation="gelu")

    Its parameters, and the name that it gets in a compact module, are those of `flax.linen.Dense`.

    Attributes:
      activation: as for `jax_gpuops.linear`. The other attributes are those of `flax.linen.Dense`;
        `dot_general` and `dot_general_cls` must be None, since the kernel computes the product.
    """

    activation: str | None = None

    @linen.compact
    def __call__(self, inputs: jax.Array, *, residual: jax.Array | None = None) -> jax.Array:
        """Applies the layer along the last dimension of the input, and adds the residual."""
        if self.dot_general is not None or self.dot_general_cls is not None:
            raise TypeError(
                "this layer does not support dot_general: its kernel computes the product"
            )
        shape = (jnp.shape(inputs)[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        operands: Any = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        return linear(
            *operands, activation=self.activation, residual=residual, precision=self.precision
        )
