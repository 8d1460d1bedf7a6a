"""Layers of Flax that call `linear` and `glu`. Unlike `jax_gpuops.flax`, this module needs Flax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from jax_gpuops._glu import glu
from jax_gpuops._linear import activated, check_activation, linear

_NO_DOT_GENERAL = "this layer does not support dot_general: its kernel computes the product"


def _check_may_run_in_xla(batch_invariant: bool) -> None:
    """Raises ValueError for a batch-invariant call with an `out_sharding`."""
    if batch_invariant:
        raise ValueError(
            "batch_invariant=True cannot run this: XLA computes calls with an out_sharding"
        )


class Linear(nnx.Linear):
    """`flax.nnx.Linear` by `jax_gpuops.linear`: `activation(x @ kernel + bias) + residual`.

    >>> layer = jax_gpuops.flax.Linear(512, 2048, activation="gelu", rngs=nnx.Rngs(0))
    >>> y = layer(x)
    >>> y = layer(x, residual=z)  # layer(x) + z in one kernel

    Its parameters are those of `flax.nnx.Linear`. XLA computes calls with an `out_sharding`,
    which is an error with `batch_invariant`.

    Args:
      in_features: as in Flax.
      out_features: as in Flax.
      activation: as for `jax_gpuops.linear`.
      batch_invariant: as for `jax_gpuops.linear`.
      **kwargs: the other arguments of `flax.nnx.Linear`, except `dot_general`.

    Raises:
      TypeError: if `dot_general` is given, which would replace the kernel.
      ValueError: if the activation is unknown.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        activation: str | None = None,
        batch_invariant: bool = False,
        **kwargs: Any,
    ):
        if "dot_general" in kwargs:
            raise TypeError(_NO_DOT_GENERAL)
        check_activation(activation)
        super().__init__(in_features, out_features, **kwargs)
        self.activation = activation
        self.batch_invariant = batch_invariant

    def __call__(
        self, inputs: jax.Array, out_sharding: Any = None, *, residual: jax.Array | None = None
    ) -> jax.Array:
        """Applies the layer along the last dimension of the input, and adds the residual."""
        if out_sharding is not None:
            _check_may_run_in_xla(self.batch_invariant)
            y = activated(super().__call__(inputs, out_sharding), self.activation)
            return y if residual is None else y + residual
        bias = None if self.bias is None else jnp.asarray(self.bias)
        operands: Any = (inputs, jnp.asarray(self.kernel), bias)
        inputs, kernel, bias = self.promote_dtype(operands, dtype=self.dtype)
        dtype = self.preferred_element_type
        if dtype is not None and bias is not None:  # nnx.Linear promotes when it adds the bias
            dtype = jnp.promote_types(dtype, bias.dtype)
        return linear(
            inputs,
            kernel,
            bias,
            activation=self.activation,
            residual=residual,
            precision=self.precision,
            preferred_element_type=dtype,
            batch_invariant=self.batch_invariant,
        )


class Dense(linen.Dense):
    """`flax.linen.Dense` by `jax_gpuops.linear`: `activation(x @ kernel + bias) + residual`.

    >>> layer = jax_gpuops.flax.Dense(2048, activation="gelu")

    Its parameters, and the name that it gets in a compact module, are those of `flax.linen.Dense`.

    Attributes:
      activation, batch_invariant: as for `jax_gpuops.linear`. The other attributes are those of
        `flax.linen.Dense`; `dot_general` and `dot_general_cls` must be None, since the kernel
        computes the product.
    """

    activation: str | None = None
    batch_invariant: bool = False

    @linen.compact
    def __call__(self, inputs: jax.Array, *, residual: jax.Array | None = None) -> jax.Array:
        """Applies the layer along the last dimension of the input, and adds the residual."""
        if self.dot_general is not None or self.dot_general_cls is not None:
            raise TypeError(_NO_DOT_GENERAL)
        shape = (jnp.shape(inputs)[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        operands: Any = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        return linear(
            *operands,
            activation=self.activation,
            residual=residual,
            precision=self.precision,
            batch_invariant=self.batch_invariant,
        )


class GatedLinear(nnx.Module):
    """A gated linear unit of `flax.nnx` by `jax_gpuops.glu`, as in feed-forward layers of Llama.

    It computes `activation(x @ gate.kernel) * (x @ up.kernel)`.

    >>> layer = jax_gpuops.flax.GatedLinear(512, 2048, rngs=nnx.Rngs(0))
    >>> y = layer(x)

    XLA computes calls with an `out_sharding`,
    which is an error with `batch_invariant`.

    Attributes:
      gate: a `flax.nnx.Linear` without a bias, which has the kernel of the activated product.
      up: the same for the other product.

    Args:
      in_features: the number of features of the input.
      out_features: the number of features of the output.
      activation: as for `jax_gpuops.glu`.
      batch_invariant: as for `jax_gpuops.glu`.
      **kwargs: arguments of both `flax.nnx.Linear`, except `use_bias` and `dot_general`.

    Raises:
      TypeError: if `use_bias` or `dot_general` is given.
      ValueError: if the activation is unknown.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        activation: str | None = "silu",
        batch_invariant: bool = False,
        **kwargs: Any,
    ):
        if "dot_general" in kwargs:
            raise TypeError(_NO_DOT_GENERAL)
        check_activation(activation)
        self.gate = nnx.Linear(in_features, out_features, use_bias=False, **kwargs)
        self.up = nnx.Linear(in_features, out_features, use_bias=False, **kwargs)
        self.activation = activation
        self.batch_invariant = batch_invariant

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Applies the layer along the last dimension of the input."""
        if out_sharding is not None:
            _check_may_run_in_xla(self.batch_invariant)
            gate, up = (layer(inputs, out_sharding) for layer in (self.gate, self.up))
            return activated(gate, self.activation) * up
        kernels = (jnp.asarray(layer.kernel) for layer in (self.gate, self.up))
        operands: Any = (inputs, *kernels)
        return glu(
            *self.gate.promote_dtype(operands, dtype=self.gate.dtype),
            activation=self.activation,
            precision=self.gate.precision,
            preferred_element_type=self.gate.preferred_element_type,
            batch_invariant=self.batch_invariant,
        )


class GatedDense(linen.Module):
    """A gated linear unit of `flax.linen` by `jax_gpuops.glu`, as in feed-forward layers of Llama.

    It computes `activation(x @ gate.kernel) * (x @ up.kernel)`. Its parameters are those of two
    `flax.linen.Dense` without a bias that are called "gate" and "up".

    >>> layer = jax_gpuops.flax.GatedDense(2048)

    Attributes:
      features: the number of features of the output.
      activation, batch_invariant: as for `jax_gpuops.glu`.
      dtype, param_dtype, precision, kernel_init, promote_dtype: as for `flax.linen.Dense`.
    """

    features: int
    activation: str | None = "silu"
    batch_invariant: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Any = linen.Dense.kernel_init
    promote_dtype: Any = linen.Dense.promote_dtype

    @linen.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Applies the layer along the last dimension of the input."""
        how = self.kernel_init, (jnp.shape(inputs)[-1], self.features), self.param_dtype
        gate, up = (_Kernel(*how, name=name)() for name in ("gate", "up"))
        return glu(
            *self.promote_dtype(inputs, gate, up, dtype=self.dtype),
            activation=self.activation,
            precision=self.precision,
            batch_invariant=self.batch_invariant,
        )


class _Kernel(linen.Module):
    """The parameter of a `flax.linen.Dense` without a bias."""

    init_kernel: Any
    shape: tuple[int, int]
    dtype: Any

    @linen.compact
    def __call__(self) -> jax.Array:
        return self.param("kernel", self.init_kernel, self.shape, self.dtype)
