"""Flax layers on our operations against the stock layers: values and gradients."""

import functools
import subprocess
import sys

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jax_gpuops
from jax_gpuops.flax import attention_fn


@pytest.fixture(autouse=True)
def full_precision():
    """By default float32 is multiplied in TF32 on a GPU, which is less exact than the tolerance."""
    with jax.default_matmul_precision("highest"):
        yield


def assert_same(actual, expected, tolerance=1e-4):
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(e, np.float32), rtol=tolerance, atol=tolerance
        ),
        actual,
        expected,
    )


def nnx_results(make, x, dropout_seed=None, **kwargs):
    """The output of a module and the gradients of its parameters and its input."""
    module = make(nnx.Rngs(0))

    def loss(module, x):
        if dropout_seed is not None:
            kwargs.update(deterministic=False, rngs=nnx.Rngs(dropout=dropout_seed))
        y = module(x, **kwargs)
        return (y.astype(jnp.float32) ** 2).sum(), y

    # One program is compiled faster than many.
    results = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, y), gradients = results(module, x)
    return y, nnx.to_pure_dict(gradients[0]), gradients[1]


def linen_results(module, x, **kwargs):
    params = module.init(jax.random.key(0), x, **kwargs)

    def loss(params, x):
        y = module.apply(params, x, **kwargs)
        return (y**2).sum(), y

    (_, y), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)
    return y, gradients


LINEAR = {
    "linear": lambda rngs, **kwargs: nnx.Linear(6, 5, rngs=rngs, **kwargs),
    "linear general": lambda rngs, **kwargs: nnx.LinearGeneral(
        (3, 6), (2, 5), axis=(-2, -1), rngs=rngs, **kwargs
    ),
}


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_nnx_linear(name, dtype, implementation):
    x = jnp.asarray(helpers.normal((4, 3, 6), "float32"))
    make = LINEAR[name]
    with jax_gpuops.use(implementation):
        ours = nnx_results(
            lambda rngs: make(rngs, dtype=dtype, dot_general=jax_gpuops.dot_general), x
        )
    tolerance = 1e-4 if dtype is None else 3e-2
    assert_same(ours, nnx_results(lambda rngs: make(rngs, dtype=dtype), x), tolerance)


def test_nnx_linear_with_a_preferred_type(implementation):
    x = jnp.asarray(helpers.normal((4, 6), "float32"))

    def make(rngs, **kwargs):
        return nnx.Linear(
            6, 5, dtype=jnp.bfloat16, preferred_element_type=jnp.float32, rngs=rngs, **kwargs
        )

    with jax_gpuops.use(implementation):
        ours = nnx_results(lambda rngs: make(rngs, dot_general=jax_gpuops.dot_general), x)
    assert_same(ours, nnx_results(make, x), 3e-2)


@pytest.mark.parametrize("use_bias", [False, True])
def test_nnx_layer_with_a_preferred_type(use_bias, implementation):
    """A bias of a wider type makes the result wider."""
    x = jnp.asarray(helpers.normal((4, 6), "float32"))
    how = {"preferred_element_type": jnp.bfloat16, "use_bias": use_bias, "rngs": nnx.Rngs(0)}
    expected = nnx.Linear(6, 5, **how)(x)
    with jax_gpuops.use(implementation, strict=False):
        y = jax_gpuops.flax.Linear(6, 5, **how | {"rngs": nnx.Rngs(0)})(x)
    assert y.dtype == expected.dtype == ("float32" if use_bias else "bfloat16")
    np.testing.assert_allclose(np.asarray(y, "float32"), expected, rtol=2e-2, atol=2e-2)


def test_linen_dense(implementation):
    x = jnp.asarray(helpers.normal((4, 3, 6), "float32"))
    with jax_gpuops.use(implementation):
        ours = linen_results(linen.Dense(5, dot_general=jax_gpuops.dot_general), x)
    assert_same(ours, linen_results(linen.Dense(5), x))


def test_the_layers_run_our_kernels(implementation):
    module = nnx.Linear(6, 5, dot_general=jax_gpuops.dot_general, rngs=nnx.Rngs(0))
    attention = nnx.MultiHeadAttention(
        2, 8, 8, decode=False, attention_fn=attention_fn, rngs=nnx.Rngs(0)
    )
    with jax_gpuops.use(implementation):
        calls = helpers.custom_calls(lambda x: module(x), jnp.zeros((4, 6)))
        attention_calls = helpers.custom_calls(lambda x: attention(x), jnp.zeros((2, 4, 8)))
    assert any(call.startswith("jax_gpuops_gemm_v2") for call in calls)
    assert any(call.startswith("jax_gpuops_gemm_v2") for call in attention_calls)
    assert any(call.startswith("jax_gpuops_softmax_v1") for call in attention_calls)


STOCK_ACTIVATIONS = {
    None: lambda x: x,
    "relu": nnx.relu,
    "gelu": nnx.gelu,
    "gelu_exact": lambda x: nnx.gelu(x, approximate=False),
    "silu": nnx.silu,
}


@pytest.mark.parametrize("activation", STOCK_ACTIVATIONS, ids=str)
@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_nnx_layer_with_an_activation(dtype, use_bias, activation, implementation):
    class Stock(nnx.Linear):
        def __call__(self, x):
            return STOCK_ACTIVATIONS[activation](super().__call__(x))

    x = jnp.asarray(helpers.normal((4, 3, 6), "float32"))
    how = {"dtype": dtype, "use_bias": use_bias}

    def make(rngs):
        return jax_gpuops.flax.Linear(6, 5, activation=activation, rngs=rngs, **how)

    with jax_gpuops.use(implementation):
        ours = nnx_results(make, x)
        calls = helpers.custom_calls(make(nnx.Rngs(0)), x)
    assert any(call.startswith("jax_gpuops_") for call in calls)
    stock = nnx_results(lambda rngs: Stock(6, 5, rngs=rngs, **how), x)
    assert_same(ours, stock, 1e-4 if dtype is None else 3e-2)


@pytest.mark.parametrize("activation", STOCK_ACTIVATIONS, ids=str)
@pytest.mark.parametrize("use_bias", [True, False])
def test_linen_layer_with_an_activation(use_bias, activation, implementation):
    """In the place of the stock layer: parameters have the same names."""

    class Model(linen.Module):
        layer: type

        @linen.compact
        def __call__(self, x):
            if self.layer is linen.Dense:
                return STOCK_ACTIVATIONS[activation](self.layer(5, use_bias=use_bias)(x))
            return self.layer(5, use_bias=use_bias, activation=activation)(x)

    x = jnp.asarray(helpers.normal((4, 3, 6), "float32"))
    with jax_gpuops.use(implementation):
        ours = linen_results(Model(jax_gpuops.flax.Dense), x)
    assert_same(ours, linen_results(Model(linen.Dense), x))


def test_layers_add_a_residual_in_the_kernel(implementation):
    x = jnp.asarray(helpers.normal((4, 3, 16), "bfloat16"))
    z = jnp.asarray(helpers.normal((4, 3, 8), "bfloat16", seed=1))
    how = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    of_nnx = jax_gpuops.flax.Linear(16, 8, activation="relu", rngs=nnx.Rngs(0), **how)
    of_linen = jax_gpuops.flax.Dense(8, activation="relu", **how)
    variables = of_linen.init(jax.random.key(0), x)
    for layer in (of_nnx, functools.partial(of_linen.apply, variables)):
        with jax_gpuops.use(implementation):
            y = layer(x, residual=z)
            (call,) = helpers.custom_calls(lambda x, z, layer=layer: layer(x, residual=z), x, z)
        assert call.startswith("jax_gpuops_linear_add")
        expected = layer(x).astype(jnp.float32) + z.astype(jnp.float32)
        np.testing.assert_allclose(y.astype(jnp.float32), expected, rtol=2e-2, atol=2e-2)


class StockGatedLinear(nnx.Module):
    """The gated layer of `flax.nnx` as users write it."""

    def __init__(self, activation, rngs, **how):
        self.gate = nnx.Linear(16, 8, use_bias=False, rngs=rngs, **how)
        self.up = nnx.Linear(16, 8, use_bias=False, rngs=rngs, **how)
        self.activation = STOCK_ACTIVATIONS[activation]

    def __call__(self, x):
        return self.activation(self.gate(x)) * self.up(x)


class StockGatedDense(linen.Module):
    """The same of `flax.linen`."""

    activation: str | None

    @linen.compact
    def __call__(self, x):
        gate, up = (linen.Dense(8, use_bias=False, name=name)(x) for name in ("gate", "up"))
        return STOCK_ACTIVATIONS[self.activation](gate) * up


@pytest.mark.parametrize("activation", STOCK_ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_nnx_layer_with_a_gate(dtype, activation, implementation):
    """In the place of two stock layers: values and gradients have the same names."""
    x = jnp.asarray(helpers.normal((4, 3, 16), "float32"))

    def make(rngs):
        how = {"activation": activation, "dtype": dtype}
        return jax_gpuops.flax.GatedLinear(16, 8, rngs=rngs, **how)

    with jax_gpuops.use(implementation):
        ours = nnx_results(make, x)
        calls = helpers.custom_calls(make(nnx.Rngs(0)), x)
    assert any(call.startswith("jax_gpuops_") for call in calls)
    stock = nnx_results(lambda rngs: StockGatedLinear(activation, rngs, dtype=dtype), x)
    assert_same(ours, stock, 1e-4 if dtype is None else 5e-2)


@pytest.mark.parametrize("activation", STOCK_ACTIVATIONS, ids=str)
def test_linen_layer_with_a_gate(activation, implementation):
    x = jnp.asarray(helpers.normal((4, 3, 16), "float32"))
    with jax_gpuops.use(implementation):
        ours = linen_results(jax_gpuops.flax.GatedDense(8, activation=activation), x)
    assert_same(ours, linen_results(StockGatedDense(activation), x))


def test_layers_have_the_same_bits_in_any_batch(implementation):
    """`batch_invariant` reaches the kernel of every layer."""
    how = {"dtype": jnp.bfloat16, "batch_invariant": True}
    x = jnp.asarray(helpers.normal((40, 16), "bfloat16"))
    dense, gated = jax_gpuops.flax.Dense(8, **how), jax_gpuops.flax.GatedDense(8, **how)
    key = jax.random.key(0)
    layers = [
        jax_gpuops.flax.Linear(16, 8, rngs=nnx.Rngs(0), **how),
        jax_gpuops.flax.GatedLinear(16, 8, rngs=nnx.Rngs(0), **how),
        functools.partial(dense.apply, dense.init(key, x)),
        functools.partial(gated.apply, gated.init(key, x)),
    ]
    for layer in layers:
        with helpers.recorded(implementation) as executions:
            y, first = layer(x), layer(x[:1])
        assert {each["algorithm"] for each in executions} == {"tensor_core"}
        helpers.assert_same_bits(first, y[:1])


def test_layers_refuse_what_they_do_not_know():
    with pytest.raises(ValueError, match="activation must be None or one of"):
        jax_gpuops.flax.Linear(6, 5, activation="tanh", rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="not support dot_general"):
        jax_gpuops.flax.Linear(6, 5, dot_general=jax.lax.dot_general, rngs=nnx.Rngs(0))
    x = jnp.ones((4, 6))
    with pytest.raises(ValueError, match="activation must be None or one of"):
        jax_gpuops.flax.Dense(5, activation="tanh").init(jax.random.key(0), x)
    with pytest.raises(TypeError, match="not support dot_general"):
        jax_gpuops.flax.Dense(5, dot_general=jax.lax.dot_general).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="activation must be None or one of"):
        jax_gpuops.flax.GatedLinear(6, 5, activation="tanh", rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="not support dot_general"):
        jax_gpuops.flax.GatedLinear(6, 5, dot_general=jax.lax.dot_general, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="use_bias"):
        jax_gpuops.flax.GatedLinear(6, 5, use_bias=True, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="activation must be None or one of"):
        jax_gpuops.flax.GatedDense(5, activation="tanh").init(jax.random.key(0), x)
    with pytest.raises(AttributeError, match="has no attribute 'Conv'"):
        _ = jax_gpuops.flax.Conv


def test_a_layer_with_an_out_sharding_runs_in_xla():
    devices = jax.devices("cpu")[:2]
    mesh = jax.make_mesh(
        (2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,), devices=devices
    )
    with jax.default_device(devices[0]), jax.set_mesh(mesh):
        layer = jax_gpuops.flax.Linear(6, 4, activation="silu", rngs=nnx.Rngs(0))
        x = jnp.asarray(helpers.normal((2, 6), "float32"))
        y = layer(x, out_sharding=jax.P(None, "d"))
        assert jax.typeof(y).sharding.spec[1] == "d"
        assert_same(y, nnx.silu(nnx.Linear(6, 4, rngs=nnx.Rngs(0))(x)))
        layer = jax_gpuops.flax.GatedLinear(6, 4, rngs=nnx.Rngs(0))
        y = layer(x, out_sharding=jax.P(None, "d"))
        assert jax.typeof(y).sharding.spec[1] == "d"
        assert_same(y, nnx.silu(layer.gate(x)) * layer.up(x))


def test_xla_does_not_stand_in_for_a_batch_invariant_kernel():
    for make in (jax_gpuops.flax.Linear, jax_gpuops.flax.GatedLinear):
        layer = make(16, 8, batch_invariant=True, rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match="batch_invariant=True cannot run this"):
            layer(jnp.ones((2, 16)), out_sharding=jax.P(None, None))


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "mask": {"mask": np.random.default_rng(0).random((2, 1, 5, 5)) < 0.6},
    "mask and causal": {
        "mask": np.random.default_rng(0).random((2, 1, 5, 5)) < 0.6,
        "is_causal": True,
    },
    "nothing allowed": {"mask": np.zeros((2, 1, 5, 5), bool)},
}


@pytest.mark.parametrize("mask", MASKS)
def test_nnx_attention(mask, implementation):
    x = jnp.asarray(helpers.normal((2, 5, 8), "float32"))

    def make(rngs, **kwargs):
        return nnx.MultiHeadAttention(2, 8, 8, decode=False, rngs=rngs, **kwargs)

    with jax_gpuops.use(implementation):
        ours = nnx_results(lambda rngs: make(rngs, attention_fn=attention_fn), x, **MASKS[mask])
    assert_same(ours, nnx_results(make, x, **MASKS[mask]))


@pytest.mark.parametrize("broadcast_dropout", [False, True])
def test_nnx_attention_drops_what_stock_drops(broadcast_dropout, implementation):
    x = jnp.asarray(helpers.normal((2, 5, 8), "float32"))

    def make(rngs, **kwargs):
        return nnx.MultiHeadAttention(
            2, 8, 8, dropout_rate=0.5, broadcast_dropout=broadcast_dropout, decode=False,
            rngs=rngs, **kwargs,
        )  # fmt: skip

    with jax_gpuops.use(implementation):
        ours = nnx_results(lambda rngs: make(rngs, attention_fn=attention_fn), x, dropout_seed=1)
    assert_same(ours, nnx_results(make, x, dropout_seed=1))


@pytest.mark.parametrize("masked", [False, True])
def test_linen_attention(masked, implementation):
    """Linen hands attention functions only the arguments whose names it finds in the signature."""
    x = jnp.asarray(helpers.normal((2, 5, 8), "float32"))
    kwargs = {"mask": MASKS["mask"]["mask"]} if masked else {}

    def make(**more):
        return linen.MultiHeadDotProductAttention(2, qkv_features=8, **more)

    with jax_gpuops.use(implementation):
        ours = linen_results(make(attention_fn=attention_fn), x, **kwargs)
    assert_same(ours, linen_results(make(), x, **kwargs))


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_grouped_heads_and_bias(key_heads, implementation):
    query, key = (
        helpers.normal((2, 5, 4, 8), "float32"),
        helpers.normal((2, 6, key_heads, 8), "float32", seed=1),
    )
    value = helpers.normal((2, 6, key_heads, 8), "float32", seed=2)
    bias = helpers.normal((1, 4, 5, 6), "float32", seed=3)
    with jax_gpuops.use(implementation):
        y = attention_fn(query, key, value, bias)
    assert_same(y, jax.nn.dot_product_attention(query, key, value, bias))


def test_integers_are_computed_in_float32(implementation):
    query, key, value = (np.arange(40).reshape(1, 5, 2, 4) % (3 + i) for i in range(3))
    with jax_gpuops.use(implementation):
        y = attention_fn(query, key, value)
    assert_same(y, nnx.dot_product_attention(*map(jnp.asarray, (query, key, value))))


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_any_number_of_batch_dims(batch, implementation):
    query, key, value = (helpers.normal((*batch, 5, 2, 4), "float32", seed) for seed in range(3))
    with jax_gpuops.use(implementation):
        y = attention_fn(query, key, value, is_causal=True)
    expected = jax.nn.dot_product_attention(
        *(x.reshape(-1, 5, 2, 4) for x in (query, key, value)), is_causal=True
    )
    assert_same(y, expected.reshape(query.shape))


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_weights_are_sown(implementation):
    x = jnp.asarray(helpers.normal((2, 5, 8), "float32"))
    module = linen.MultiHeadDotProductAttention(2, attention_fn=attention_fn)
    params = module.init(jax.random.key(0), x)
    with jax_gpuops.use(implementation):
        _, state = module.apply(params, x, sow_weights=True, mutable=["intermediates"])
        (weights,) = state["intermediates"]["attention_weights"]
        assert_same(weights.sum(-1), jnp.ones((2, 2, 5)))
        attention = nnx.MultiHeadAttention(
            2, 8, 8, decode=False, attention_fn=attention_fn, rngs=nnx.Rngs(0)
        )
        attention(x, sow_weights=True)
        assert_same(attention.attention_weights[0].sum(-1), jnp.ones((2, 2, 5)))


def test_errors():
    x = jnp.ones((2, 5, 2, 4))
    with pytest.raises(ValueError, match="do not match in batch"):
        attention_fn(x, jnp.ones((2, 5, 3, 4)), x)
    with pytest.raises(ValueError, match="do not match in batch"):
        attention_fn(x, x[:, :, :0], x[:, :, :0])
    with pytest.raises(ValueError, match="dropout_rng is needed"):
        attention_fn(x, x, x, dropout_rate=0.5)
    with pytest.raises(ValueError, match="dropout_rate must be"):
        attention_fn(x, x, x, dropout_rate=1.5)
    with pytest.raises(ValueError, match="at least three dims"):
        attention_fn(x[0, 0], x, x)
    with pytest.raises(ValueError, match=r"floating-point or complex dtype, got <class.*int32"):
        attention_fn(x, x, x, dtype=jnp.int32)
    for name in ("bias", "mask"):
        with pytest.raises(
            ValueError, match=rf"{name} of shape \(3, 1, 1, 5, 5\) does not broadcast"
        ):
            attention_fn(x, x, x, **{name: jnp.ones((3, 1, 1, 5, 5), bool)})
        with pytest.raises(TypeError, match=f"{name} must be an array, got str: 'a'"):
            attention_fn(x, x, x, **{name: "a"})
    with pytest.raises(TypeError, match="is_causal must be True or False, got 'no'"):
        attention_fn(x, x, x, is_causal="no")


def test_attention_without_a_depth():
    x = jnp.ones((2, 5, 4, 0))
    assert attention_fn(x, x, x).shape == x.shape
    value = jax.random.normal(jax.random.key(0), (2, 5, 4, 3))
    mean = jnp.broadcast_to(value.mean(1, keepdims=True), value.shape)
    assert_same(attention_fn(x, x, value), mean)


def test_the_layers_are_listed():
    for name in ("Dense", "GatedDense", "GatedLinear", "Linear", "attention_fn"):
        assert name in jax_gpuops.flax.__all__
        assert callable(getattr(jax_gpuops.flax, name))


def test_flax_is_optional():
    code = (
        "import sys; sys.modules['flax'] = None\n"
        "import jax.numpy as jnp, jax_gpuops.flax as f\n"
        "x = jnp.ones((1, 2, 1, 4)); assert f.attention_fn(x, x, x).shape == x.shape"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
