"""The plan is what runs: problems drawn at random, compared with what handlers launched for them.

`JAX_GPUOPS_EXAMPLES=1000` in the environment draws as many problems for each family.
"""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import helpers
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import jax_gpuops
from jax_gpuops import _library, _plan, _primitive

EXAMPLES = int(os.environ.get("JAX_GPUOPS_EXAMPLES", "25"))


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of an op.

    Attributes:
      call: the op as a function of the operands, with `implementation` and `algorithm` to be named.
      operands: arrays.
      check: raises unless its argument is the result.
      widest: the bytes of the widest elements of arrays between the calls of an op and its
        derivative, if these are wider than the operands and results.
    """

    call: Callable[..., Any]
    operands: tuple[np.ndarray, ...]
    check: Callable[[Any], None]
    widest: int = 1


def of_few_rows(shape: list[int], axes: tuple[int, ...]) -> list[int]:
    """The shape with at most 1000 rows along these axes, or as it is on a GPU.

    Some algorithms have a block for each row, and the executor takes a minute for 10,000.
    """
    if jax.default_backend() == "gpu":
        return shape
    most = 1000
    shape = list(shape)
    for d in range(len(shape)):
        if d not in axes:
            shape[d] = min(shape[d], most)
            most //= shape[d]
    return shape


def sizes(most: int):
    """Sizes of all magnitudes up to `most`: short ones, and around what packs and tiles divide."""
    near = [n for p in (8, 32, 64, 128, 256, 512, 1024) for n in (p - 1, p, p + 1)]
    return st.one_of(
        st.integers(1, 9),
        st.sampled_from([n for n in near if n <= most] or [1]),
        st.integers(1, most),
    )


# transpose


@st.composite
def transposes(draw) -> Case:
    """Permutations of up to five dims, of elements of each size."""
    dtype = draw(st.sampled_from(["uint8", "uint16", "uint32", "uint64", "complex128"]))
    rank = draw(st.integers(0, 5))
    shape: list[int] = []
    for _ in range(rank):
        shape.append(draw(sizes(max(1, 60000 // int(np.prod(shape, dtype=np.int64))))))
    shape = draw(st.permutations(shape))
    axes = draw(st.permutations(range(rank)))
    x = np.random.default_rng(0).integers(0, 256, shape).astype(dtype)
    return Case(
        lambda x, **how: jax_gpuops.transpose(x, axes, **how),
        (x,),
        lambda y: np.testing.assert_array_equal(y, x.transpose(axes)),
    )


# softmax

TOLERANCES = {"float16": 1e-2, "bfloat16": 6e-2, "float32": 1e-4, "float64": 1e-12}


@st.composite
def softmaxes(draw) -> Case:
    """Functions of the family, or their gradients, along any axes, with masks of any broadcast."""
    name = draw(st.sampled_from(["softmax", "log_softmax", "logsumexp", "cross_entropy"]))
    dtype = draw(st.sampled_from(helpers.FLOATS))
    rank = draw(st.integers(1, 4))
    shape: list[int] = []
    for _ in range(rank):
        shape.append(draw(sizes(max(1, 12000 // int(np.prod(shape, dtype=np.int64))))))
    shape = draw(st.permutations(shape))
    axis = draw(st.sampled_from([rank - 1, rank - 1, *range(rank)]))
    axes = (axis,)
    if rank > 1 and name != "cross_entropy" and draw(st.integers(0, 4)) == 0:
        axes = tuple(sorted(draw(st.permutations(range(rank)))[:2]))
    shape = of_few_rows(shape, axes)
    options: dict[str, Any] = {}
    random = np.random.default_rng(draw(st.integers(0, 9)))
    keep = np.ones(shape, bool)
    if draw(st.booleans()):
        mask = random.random([n if draw(st.booleans()) else 1 for n in shape]) < 0.7
        # Each row keeps an element: what derivatives of empty rows are is tested elsewhere.
        mask[tuple(slice(1) if d in axes else slice(None) for d in range(rank))] = True
        options["where"], keep = mask, keep & mask
    if name != "cross_entropy":
        options["scale"] = draw(st.sampled_from([1.0, 1.0, -0.5]))
        if rank > 1 and axes == (rank - 1,) and draw(st.booleans()):
            options["causal"], keep = True, keep & np.tri(*shape[-2:], dtype=bool)
    x = helpers.normal(shape, dtype, scale=2)
    scale = options.get("scale", 1.0)
    z = np.where(keep, helpers.exact(x) * scale, -np.inf)
    powers = np.exp(z - z.max(axes, keepdims=True))
    total = powers.sum(axes, keepdims=True)
    lse = np.log(total) + z.max(axes, keepdims=True)
    softmax = powers / total
    rows = [n for d, n in enumerate(shape) if d not in axes]
    g = helpers.normal(shape if name.endswith("softmax") else rows, dtype, seed=1)
    wide_g = np.where(keep, helpers.exact(g), 0) if name.endswith("softmax") else None
    row_g = None if wide_g is not None else np.expand_dims(helpers.exact(g), axes)
    operands: tuple[np.ndarray, ...] = (x,)
    if name == "softmax":
        y = softmax
        gradient = scale * softmax * (wide_g - (softmax * wide_g).sum(axes, keepdims=True))
    elif name == "log_softmax":
        y = z - lse
        gradient = scale * np.where(keep, wide_g - softmax * wide_g.sum(axes, keepdims=True), 0)
    elif name == "logsumexp":
        y, gradient = np.squeeze(lse, axes), scale * softmax * row_g
    else:
        labels = random.integers(0, shape[axis], rows).astype(draw(st.sampled_from(["i4", "i8"])))
        operands = (x, labels)
        one_hot = np.zeros(shape)
        np.put_along_axis(one_hot, np.expand_dims(labels, axis), 1, axis)
        y = np.squeeze(lse - (helpers.exact(x) * one_hot).sum(axis, keepdims=True), axis)
        gradient = (softmax - one_hot) * row_g
    has_gradient = draw(st.booleans())

    def call(x, *labels, **how):
        def function(x):
            if name == "cross_entropy":
                return jax_gpuops.softmax_cross_entropy_with_integer_labels(
                    x, *labels, axis, **options, **how
                )
            return getattr(jax_gpuops, name)(x, axis=axes, **options, **how)

        if not has_gradient:
            return function(x)
        y, pullback = jax.vjp(function, x)
        return y, pullback(jnp.asarray(g))[0]

    def check(actual):
        pairs = zip(actual, (y, gradient), strict=True) if has_gradient else [(actual, y)]
        for ours, expected in pairs:
            assert ours.dtype == x.dtype
            ours = helpers.exact(ours)
            atol = TOLERANCES[dtype] * max(1, np.abs(expected[np.isfinite(expected)]).max())
            np.testing.assert_allclose(ours, expected, rtol=TOLERANCES[dtype], atol=atol)

    return Case(call, operands, check, widest=8 if dtype == "float64" else 4)


# matmul


RESULTS_OF_8_BITS = {
    "float8_e4m3fn": ["bfloat16", "float16", "float32"],
    "float8_e5m2": ["bfloat16", "float16", "float32"],
    "int8": ["int32"],
}


@st.composite
def products_of_8_bits(draw) -> Case:
    """Products of matrices or batches of them, in each orientation."""
    dtype = draw(st.sampled_from(list(RESULTS_OF_8_BITS)))
    result = draw(st.sampled_from(RESULTS_OF_8_BITS[dtype]))
    m, n, k = (draw(sizes(270)) for _ in range(3))
    batch = draw(st.sampled_from([(), (), (2,)]))
    transpose_a, transpose_b = draw(st.booleans()), draw(st.booleans())
    precision = draw(st.sampled_from(["default", "highest"]))
    a = helpers.factor_of_8_bits((*batch, *((k, m) if transpose_a else (m, k))), dtype)
    b = helpers.factor_of_8_bits((*batch, *((n, k) if transpose_b else (k, n))), dtype, seed=1)
    left = helpers.exact(a.swapaxes(-1, -2) if transpose_a else a)
    right = helpers.exact(b.swapaxes(-1, -2) if transpose_b else b)
    exact, magnitude = left @ right, np.abs(left) @ np.abs(right)

    def call(a, b, **how):
        a = a.swapaxes(-1, -2) if transpose_a else a
        b = b.swapaxes(-1, -2) if transpose_b else b
        how |= {"precision": precision, "preferred_element_type": result}
        return jax_gpuops.matmul(a, b, **how)

    def check(y):
        assert y.dtype == helpers.np_dtype(result)
        steps = 4 if precision == "highest" else -(-k // 32)
        bound = 0 if result == "int32" else steps * 34 * 2.0**-13 * magnitude
        if result in ("bfloat16", "float16"):
            bound = bound + float(jnp.finfo(result).eps) * np.abs(exact) + 2.0**-24
        assert np.all(np.abs(helpers.exact(y) - exact) <= bound)

    # The only kernel for them takes arrays at multiples of 16 bytes.
    return Case(call, (a, b), check, widest=16)


@st.composite
def scaled_products(draw) -> Case:
    """Products of factors of 8 bits with scales of each kind, one or one for each of a batch."""
    dtype = draw(st.sampled_from(list(RESULTS_OF_8_BITS)))
    floats = ["bfloat16", "float16", "float32"]
    result = draw(st.sampled_from([*floats, "int8"] if dtype == "int8" else floats))
    m, n, k = (draw(sizes(270)) for _ in range(3))
    batch = draw(st.sampled_from([(), (), (2,)]))
    a_batch, b_batch = (draw(st.sampled_from([batch, ()])) for _ in "ab")
    transpose_b = draw(st.booleans())
    precision = draw(st.sampled_from(["default", "highest"]))
    blocks = -(-k // 128), -(-n // 128)
    a_dims, b_dims = (1, 1) if draw(st.booleans()) else (m, 1), (1, 1)
    if dtype != "int8" and draw(st.booleans()):
        a_dims = draw(st.sampled_from([a_dims, (m, blocks[0])]))
        b_dims = draw(st.sampled_from([b_dims, blocks]))
    elif draw(st.booleans()):
        b_dims = (1, n)
    a = helpers.factor_of_8_bits((*a_batch, m, k), dtype)
    b = helpers.factor_of_8_bits((*b_batch, k, n), dtype, seed=1)
    a_scale, b_scale = (
        (1 + np.random.default_rng(i).random((*own, *dims))).astype(np.float32)
        for i, (own, dims) in enumerate([(a_batch, a_dims), (b_batch, b_dims)])
    )
    a_scale = a_scale * np.float32(1e-2 / (k**0.5) if dtype == "int8" else 1)

    left, right = helpers.dequantised(a, a_scale), helpers.dequantised(b, b_scale)
    exact, magnitude = left @ right, np.abs(left) @ np.abs(right)

    def call(a, b, a_scale, b_scale, **how):
        how |= {"precision": precision, "preferred_element_type": result}
        return jax_gpuops.scaled_matmul(a, b, a_scale, b_scale, transpose_b=transpose_b, **how)

    def check(y):
        assert y.dtype == helpers.np_dtype(result)
        steps = -(-k // 32)
        bound = (steps + 4) * 2.0**-23 * magnitude
        if dtype != "int8":
            bound = bound + (4 if precision == "highest" else steps) * 34 * 2.0**-13 * magnitude
        if result in ("bfloat16", "float16"):
            bound = bound + float(jnp.finfo(result).eps) * np.abs(exact) + 2.0**-24
        expected = exact
        if result == "int8":
            expected, bound = np.clip(exact, -128, 127), bound + 0.5
        assert np.all(np.abs(helpers.exact(y) - expected) <= bound)

    stored = [np.ascontiguousarray(x.swapaxes(-1, -2)) if transpose_b else x for x in (b, b_scale)]
    # The only kernel for them takes arrays at multiples of 16 bytes.
    return Case(call, (a, stored[0], a_scale, stored[1]), check, widest=16)


@st.composite
def products(draw) -> Case:
    """BLAS products of matrices or batches of them, in each orientation, perhaps added to c."""
    kind = draw(st.integers(0, 4))
    if kind < 2:
        return draw([products_of_8_bits, scaled_products][kind]())
    dtype = draw(st.sampled_from(helpers.FLOATS))
    m, n, k = (draw(sizes(140)) for _ in range(3))
    batch = draw(st.sampled_from([(), (), (1,), (2,), (3,)]))
    transpose_a, transpose_b = draw(st.booleans()), draw(st.booleans())
    share_a, share_b = draw(st.booleans()), draw(st.booleans())
    has_c = draw(st.booleans())
    precisions: list[Any] = ["default", "high", "highest", ("default", "high")]
    if dtype == "float32" and not helpers.refusal("matmul", "bf16_x6", [(8, 8), (8, 8)]):
        precisions.append("BF16_BF16_F32_X6")
    precision = draw(st.sampled_from(precisions))
    a_shape = (() if share_a else batch) + ((k, m) if transpose_a else (m, k))
    b_shape = (() if share_b else batch) + ((n, k) if transpose_b else (k, n))
    a, b = helpers.normal(a_shape, dtype), helpers.normal(b_shape, dtype, seed=1)
    if dtype == "float32" and precision != "highest":  # TF32 has these numbers, and is as exact
        a, b = helpers.to_tf32(a), helpers.to_tf32(b)
    wide = "float64" if dtype == "float64" else "float32"
    result = draw(st.sampled_from([dtype, wide]))
    left = a.swapaxes(-1, -2) if transpose_a else a
    right = b.swapaxes(-1, -2) if transpose_b else b
    exact = helpers.exact(left) @ helpers.exact(right)
    magnitude = np.abs(helpers.exact(left)) @ np.abs(helpers.exact(right)) + 1
    if has_c:  # gemm, whose result has the dtype of c
        c = helpers.normal(exact.shape, result, seed=2)

        def call(a, b, c, **how):
            how |= {"transpose_a": transpose_a, "transpose_b": transpose_b}
            return jax_gpuops.gemm(a, b, c, beta=1, **how)

        operands, exact = (a, b, c), exact + helpers.exact(c)
    else:  # dot_general, which sees the transposed matrices

        def call(a, b, **how):
            a = a.swapaxes(-1, -2) if transpose_a else a
            b = b.swapaxes(-1, -2) if transpose_b else b
            how |= {"precision": precision, "preferred_element_type": result}
            return jax_gpuops.matmul(a, b, **how)

        operands = (a, b)

    def check(y):
        assert y.dtype == helpers.np_dtype(result)
        epsilon = float(jnp.finfo(result).eps) + (k + 3) * float(jnp.finfo(wide).eps)
        assert np.all(np.abs(helpers.exact(y) - exact) <= epsilon * (magnitude + np.abs(exact)))

    return Case(call, operands, check)


@st.composite
def layers(draw) -> Case:
    """Products with a bias, an activation or a residual, of one matrix or of batches."""
    dtype = draw(st.sampled_from(helpers.FLOATS))
    m, n, k = draw(sizes(140)), draw(sizes(140)), draw(sizes(140))
    wide = "float64" if dtype == "float64" else "float32"
    result = draw(st.sampled_from([dtype, wide]))
    # Which operands a batch of 3 has its own of: as the batching rule of linear has them.
    own = draw(st.sampled_from([(0, 0, 0), (1, 0, 1), (0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 1, 1)]))
    shapes = ((m, k), (k, n), (n,))[: draw(st.sampled_from([2, 3]))]
    types = (dtype, dtype, result)
    operands = tuple(
        helpers.normal(((3, *shape) if is_own else shape), each, seed)
        for seed, (shape, is_own, each) in enumerate(zip(shapes, own, types, strict=False))
    )
    own = own[: len(shapes)]
    activation = draw(st.sampled_from([None, "relu", "gelu", "gelu_exact", "silu"]))
    x, w, *b = map(helpers.exact, operands)
    bias = (b[0] if not own[2] else b[0][:, None]) if b else 0
    exact = x @ w + bias
    magnitude = np.abs(x) @ np.abs(w) + np.abs(bias) + 1
    residual, has_residual = helpers.normal(exact.shape, result, 3), draw(st.booleans())
    if has_residual:
        operands, own = (*operands, residual), (*own, int(any(own)))

    def call(*operands, **how):
        how |= {"activation": activation, "preferred_element_type": result}

        def layer(x, w, *others):
            *b, added = others if has_residual else (*others, None)
            return jax_gpuops.linear(x, w, *b, residual=added, **how)

        axes = tuple(0 if each else None for each in own)
        return jax.vmap(layer, axes)(*operands) if any(own) else layer(*operands)

    def check(y):
        assert y.dtype == helpers.np_dtype(result)
        rounding = (k + 4) * float(jnp.finfo(wide).eps)
        if dtype == "float32":  # the kernels on tensor cores round factors to TF32
            rounding = 2.0**-10
        epsilon = float(jnp.finfo(result).eps) + 2 * rounding  # derivatives are less than 2
        expected = helpers.exact(helpers.activated(activation, exact))
        size = magnitude + np.abs(exact)
        if has_residual:
            added = helpers.exact(residual)
            expected, size = expected + added, size + np.abs(added)
        assert np.all(np.abs(helpers.exact(y) - expected) <= epsilon * size)

    return Case(call, operands, check)


@st.composite
def gated_layers(draw) -> Case:
    """Products of which one gates the other; those that the kernel does not take are two."""
    dtype = draw(st.sampled_from(helpers.FLOATS))
    m, n, k = draw(sizes(140)), 8 * draw(sizes(30)), 8 * draw(sizes(16))
    own = draw(st.sampled_from([(0, 0, 0), (1, 1, 1), (0, 1, 1), (1, 0, 0)]))
    operands = tuple(
        helpers.normal(((3, *shape) if is_own else shape), dtype, seed)
        for seed, (shape, is_own) in enumerate(zip(((m, k), (k, n), (k, n)), own, strict=True))
    )
    activation = draw(st.sampled_from([None, "relu", "gelu", "gelu_exact", "silu"]))

    def call(*operands, **how):
        layer = functools.partial(jax_gpuops.glu, activation=activation, **how)
        axes = tuple(0 if each else None for each in own)
        return jax.vmap(layer, axes)(*operands) if any(own) else layer(*operands)

    x, gate, up = map(helpers.exact, operands)
    expected = helpers.exact(helpers.activated(activation, x @ gate)) * (x @ up)
    sizes_of = [np.abs(x) @ np.abs(w) + 1 for w in (gate, up)]

    def check(y):
        assert y.dtype == helpers.np_dtype(dtype)
        wide = "float64" if dtype == "float64" else "float32"
        rounding = 2.0**-10 if dtype == "float32" else (k + 4) * float(jnp.finfo(wide).eps)
        bound = 4 * rounding * sizes_of[0] * sizes_of[1]
        bound = bound + float(jnp.finfo(dtype).eps) * np.abs(expected)
        assert np.all(np.abs(helpers.exact(y) - expected) <= bound)

    # The only kernel with a gate, of 16-bit floats, takes arrays at multiples of 16 bytes.
    return Case(call, operands, check, widest=16 if dtype in ("float16", "bfloat16") else 1)


# reduce

FOLDS = ("sum", "prod", "max", "min")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def check_mean_and_var(x, axes, results, *where):
    """Checks results for elements of about 1 in magnitude; rows without elements have NaN."""
    mask = np.broadcast_to(where[0], x.shape) if where else np.ones(x.shape, bool)
    count = mask.sum(axes)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(mask, x, 0).sum(axes) / count
        squares = np.where(mask, x - np.expand_dims(mean, axes), 0) ** 2
        expected = mean, squares.sum(axes) / count
    for y, true in zip(results, expected, strict=True):
        own = float(jnp.finfo(y.dtype).eps)
        working = np.finfo(np.float64 if y.dtype.itemsize == 8 else np.float32).eps
        bound = own * np.abs(true) + 20 * working * (1 + np.abs(true))
        assert np.all(np.isnan(y) == (count == 0))
        assert np.all((np.abs(helpers.exact(y) - true) <= bound) | (count == 0))


@st.composite
def reductions(draw) -> Case:
    """Rows along any axes, perhaps masked, short ones and such as several blocks share."""
    name = draw(st.sampled_from([*FOLDS, "mean_and_var", "argmax", "argmin"]))
    takes_masks = name in (*FOLDS, "mean_and_var")
    dtypes = helpers.FLOATS if name == "mean_and_var" else [*helpers.FLOATS, *INTEGERS]
    dtype = draw(st.sampled_from(dtypes))
    rank = draw(st.integers(1, 4))
    shape: list[int] = []
    for _ in range(rank):
        shape.append(draw(sizes(max(1, 40000 // int(np.prod(shape, dtype=np.int64))))))
    shape = draw(st.permutations(shape))
    axes: Any = draw(st.integers(0, rank - 1))
    if takes_masks:
        axes = tuple(draw(st.sets(st.integers(0, rank - 1), min_size=1)))
    shape = of_few_rows(shape, axes if takes_masks else (axes,))
    rng = np.random.default_rng(0)
    if helpers.np_dtype(dtype).kind in "iu":
        limits = np.iinfo(dtype)
        x = rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    else:
        x = helpers.normal(shape, dtype)
    if name == "prod" and helpers.np_dtype(dtype).kind not in "iu":
        x = (1 + x / np.array(1 << 10, x.dtype)).astype(x.dtype)
    masks = []
    if takes_masks and draw(st.booleans()):
        kept = [size if draw(st.booleans()) else 1 for size in shape]
        masks = [rng.random(kept) < 0.7]

    def call(x, *where, **how):
        if where:
            how |= {"where": where[0]}
        if where and name in ("max", "min"):
            how |= {"initial": x.dtype.type(0)}
        return getattr(jax_gpuops, name)(x, axes, **how)

    def check(y):
        wide = x if x.dtype.kind in "iu" else helpers.exact(x)
        if name == "mean_and_var":
            check_mean_and_var(wide, axes, y, *masks)
            return
        if name not in FOLDS:
            np.testing.assert_array_equal(y, getattr(np, name)(wide, axes))
            return
        how: dict[str, Any] = {"where": masks[0]} if masks else {}
        if masks and name in ("max", "min"):
            how |= {"initial": 0}
        if x.dtype.kind in "iu" and name in ("sum", "prod"):
            how |= {"dtype": y.dtype}
        expected = getattr(np, name)(wide, axes, **how)
        if x.dtype.kind in "iu" or name in ("max", "min"):
            np.testing.assert_array_equal(y, expected.astype(y.dtype))
            return
        count = int(np.prod([shape[d] for d in axes]))
        own = float(jnp.finfo(y.dtype).eps)
        working = np.finfo(np.float64 if dtype == "float64" else np.float32).eps
        if name == "sum":
            bound = 2 * max(np.log2(count), 1) * working * np.sum(np.abs(wide), axes)
        else:
            bound = 2 * count * working * np.abs(expected)
        assert np.all(np.abs(helpers.exact(y) - expected) <= bound + own * np.abs(expected))

    return Case(call, (x, *masks), check)


FAMILIES = {
    "transpose": transposes(),
    "softmax": softmaxes(),
    "matmul": st.one_of(products(), layers(), gated_layers()),
    "reduce": reductions(),
}


# The comparison

OWN = tuple(_primitive.OF_EXECUTION)
"""What is known only when a program runs."""

AROUND = ("copied", "mean", "runs")
"""What the Python side says of a call besides the problem of the kernel."""


def described(jaxpr) -> list[tuple[dict[str, Any], str | None]]:
    """The problems of the calls in a jaxpr, as Python describes them, and the named algorithms."""
    problems = []
    for p, avals, params in _plan._calls(jaxpr.jaxpr):
        algorithm = params["algorithm"]
        params = {k: v for k, v in params.items() if k not in ("implementation", "algorithm")}
        problems.append((_primitive.KERNELS[p].problem(*avals, **params), algorithm))
    return problems


def without(problem: dict[str, Any], *names: str) -> dict[str, Any]:
    values = {k: v for k, v in problem.items() if k not in names}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def planned(implementation, family, problem, algorithm) -> tuple[str, dict[str, Any]]:
    """What the plan says for a problem, on the device that the tests run on."""
    module = _library.module(implementation)
    plan = module.plan(family, {**problem, "algorithm": algorithm or ""}, 0)
    return plan["algorithm"], plan["config"]


def names(family: str) -> list[str]:
    return [each.name for each in jax_gpuops.algorithms(family)]


@pytest.mark.kernel
@pytest.mark.parametrize("family", FAMILIES)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=EXAMPLES, deadline=None)
def test_the_plan_is_what_runs(family, data, implementation):
    with jax.enable_x64(True):
        case = data.draw(FAMILIES[family])
        algorithm = data.draw(st.sampled_from([None, *names(family)]))

        def function(*operands):
            return case.call(*operands, implementation=implementation, algorithm=algorithm)

        try:
            jaxpr = jax.make_jaxpr(function)(*case.operands)
        except ValueError as error:
            assert f"algorithm '{algorithm}'" in str(error)  # noqa: PT017
            hypothesis.event("refused")
            return
        offset = 0
        if implementation == "interpret":
            avals = (*jaxpr.in_avals, *jaxpr.out_avals)
            widest = max(case.widest, *(each.dtype.itemsize for each in avals))
            offset = data.draw(st.sampled_from(range(0, 16, widest)))
        problems = described(jaxpr)
        operands = [jnp.asarray(x) for x in case.operands]
        with helpers.buffers_at(offset), helpers.recorded(implementation) as executions:
            try:
                y = jax.block_until_ready(jax.jit(function)(*operands))
            except jax.errors.JaxRuntimeError as error:
                assert offset != 0 and f"algorithm '{algorithm}'" in str(error)  # noqa: PT017, PT018
                hypothesis.event("refused for its alignment")
                return
    case.check(jax.tree.map(np.asarray, y))
    assert len(executions) == len(problems)
    kernels = {each.name: each.kernels for each in jax_gpuops.algorithms(family)}
    for (problem, named), execution in zip(problems, executions, strict=True):
        assert execution["op"] == family
        ran = execution["problem"]
        assert without(ran, *_primitive.OF_EXECUTION) == without(
            problem, *_primitive.OF_EXECUTION, *AROUND
        )
        what = execution["algorithm"], execution["config"]
        assert what == planned(implementation, family, ran, named)
        if ran["alignment"] == problem["alignment"]:
            assert what == planned(implementation, family, problem, named)
        launched = [helpers.base_name(kernel) for kernel in execution["kernels"]]
        hypothesis.event(f"{what[0]}: {', '.join(sorted(set(launched)))}")
        assert set(launched) <= set(kernels[what[0]]), execution
        assert bool(launched) == bool(kernels[what[0]]), execution


@pytest.mark.kernel
@pytest.mark.parametrize(("family", "name"), [("softmax", "logsumexp"), ("reduce", "sum")])
def test_the_plan_of_many_rows_is_what_runs(family, name, implementation):
    """More than are drawn for the executor."""
    x = helpers.normal((10_000, 3), "float32")
    with helpers.recorded(implementation) as executions:
        y = getattr(jax_gpuops, name)(x, -1, implementation=implementation)
        y = jax.block_until_ready(y)
    (execution,) = executions
    what = execution["algorithm"], execution["config"]
    assert what == planned(implementation, family, execution["problem"], None)
    true = {"logsumexp": special.logsumexp, "sum": np.sum}[name](helpers.exact(x), -1)
    np.testing.assert_allclose(y, true, 1e-5, 1e-5)


@pytest.mark.any_version
@pytest.mark.parametrize("family", FAMILIES)
def test_every_algorithm_has_kernels(family):
    """But for a library's, whose kernels are its own; and no kernel is without an algorithm."""
    for algorithm in jax_gpuops.algorithms(family):
        assert bool(algorithm.kernels) == (algorithm.name != "cublas"), algorithm
        assert all(kernel.endswith("_kernel") for kernel in algorithm.kernels)


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("dtype", "shape", "axes", "offset", "expected"),
    [
        ("uint16", (4, 16, 64), (1, 0, 2), 0, ("copy", 16)),
        ("uint16", (4, 16, 64), (1, 0, 2), 2, ("copy", 2)),
        ("uint16", (64, 80), (1, 0), 0, ("swizzled", 2)),
        ("uint16", (64, 80), (1, 0), 8, ("copy", 2)),
        ("uint16", (528, 520), (1, 0), 8, ("shifted", 2)),
        ("uint16", (528, 520), (1, 0), 2, ("shifted", 2)),
        ("float32", (40, 40, 4), (1, 0, 2), 0, ("swizzled", 16)),
        ("float32", (40, 40, 4), (1, 0, 2), 4, ("copy", 4)),
        ("float32", (256, 512, 4), (1, 0, 2), 4, ("tiled", 4)),
    ],
)
def test_words_are_no_wider_than_addresses_allow(
    dtype, shape, axes, offset, expected, implementation
):
    if implementation != "interpret":
        pytest.skip("JAX aligns the buffers of a GPU")
    x = np.arange(np.prod(shape)).astype(dtype).reshape(shape)
    with helpers.buffers_at(offset), helpers.recorded(implementation) as executions:
        y = jax.block_until_ready(jax_gpuops.transpose(x, axes, implementation=implementation))
    np.testing.assert_array_equal(y, x.transpose(axes))
    (execution,) = executions
    assert execution["problem"]["alignment"] == (offset & -offset or 16)
    assert (execution["algorithm"], execution["config"]["word_bytes"]) == expected


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("offset", "transpose_b", "row_major"), [(0, False, 1), (4, False, 0), (0, True, 0)]
)
def test_packs_are_for_aligned_matrices(offset, transpose_b, row_major, implementation):
    if implementation != "interpret" and offset != 0:
        pytest.skip("JAX aligns the buffers of a GPU")
    a, b = helpers.normal((20, 12), "float32"), helpers.normal((12, 12), "float32", seed=1)
    how = {"implementation": implementation, "algorithm": "double_buffered"}
    with helpers.buffers_at(offset), helpers.recorded(implementation) as executions:
        y = jax.block_until_ready(jax_gpuops.gemm(a, b, transpose_b=transpose_b, **how))
    np.testing.assert_allclose(y, a @ (b.T if transpose_b else b), rtol=1e-4, atol=1e-5)
    (execution,) = executions
    assert execution["config"]["row_major"] == row_major


@pytest.mark.parametrize("dtype", ["uint8", "int64"])
def test_a_plan_refuses_a_dtype_without_kernels(dtype, implementation):
    """In words that name it: the dtype is known, and only kernels are missing."""
    x = jax.ShapeDtypeStruct((8, 8), "float32")
    jaxpr = jax.make_jaxpr(lambda x: jax_gpuops.gemm(x, x, implementation=implementation))(x)
    ((problem, _),) = described(jaxpr)
    planned(implementation, "matmul", problem, None)
    with pytest.raises(ValueError, match=f"matmul kernels support .*, not {dtype}"):
        planned(implementation, "matmul", {**problem, "dtype": dtype}, None)


@pytest.mark.parametrize("algorithm", [None, "column"])
def test_a_plan_refuses_more_columns_than_an_index_counts(algorithm, implementation):
    """Of rows that are not contiguous; indices have 32 bits there."""
    problem = {"function": "argmax", "dtype": "int8", "result": "int64", "outer": 1, "inner": 2}
    problem |= {"masked": 0, "alignment": _primitive.ALIGNMENT, "workspace": -1}
    name, _ = planned(implementation, "reduce", problem | {"columns": 2**31 - 1}, algorithm)
    assert name == "column"
    with pytest.raises(ValueError, match=r"'column' .*axes of fewer than 2.31 elements"):
        planned(implementation, "reduce", problem | {"columns": 2**31}, algorithm)
    planned(implementation, "reduce", problem | {"columns": 2**31, "inner": 1}, None)


@pytest.mark.kernel
def test_columns_in_packs_are_for_aligned_arrays(implementation):
    x = helpers.normal((300, 64), "float32", scale=1000).astype(np.int16)
    how = {"implementation": implementation, "algorithm": "column"}
    for offset, pack in ((0, 8), *([(8, 1)] if implementation == "interpret" else [])):
        with helpers.buffers_at(offset), helpers.recorded(implementation) as executions:
            y = jax.block_until_ready(jax_gpuops.max(x, 0, **how))
        np.testing.assert_array_equal(y, x.max(0))
        (execution,) = executions
        assert execution["config"]["pack"] == pack


def plan_of_rows(name, shape, dtype, implementation, **how):
    """What the plan says for a function of the softmax family, along the last axis."""

    def function(x):
        return getattr(jax_gpuops, name)(x, -1, implementation=implementation, **how)

    jaxpr = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(shape, dtype))
    ((problem, algorithm),) = described(jaxpr)
    return planned(implementation, "softmax", problem, algorithm)


def plan_of_columns(shape, dtype, implementation, **options):
    """The algorithm and the configuration for softmax along axis 1."""

    def function(x):
        return jax_gpuops.softmax(x, 1, implementation=implementation, **options)

    jaxpr = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(shape, dtype))
    ((problem, algorithm),) = described(jaxpr)
    return planned(implementation, "softmax", problem, algorithm)


@pytest.mark.parametrize(
    ("columns", "inner", "dtype", "pack", "lines"),
    [
        (21, 512, "bfloat16", 4, False),
        (21, 513, "bfloat16", 4, True),
        (21, 513, "float32", 2, True),
        (21, 513, "float64", 1, False),  # a pack is an element
        (301, 513, "float16", 4, True),
        (302, 513, "float16", 1, False),  # more shared memory than a block should have
        (21, 63, "bfloat16", 1, False),  # less than half of the narrowest tile
        (21, 65, "bfloat16", 4, True),
        (4, 513, "bfloat16", 1, False),  # a thread holds 4 columns
    ],
)
def test_columns_that_blocks_copy_in_lines(columns, inner, dtype, pack, lines, implementation):
    shape = helpers.multiprocessors(implementation), columns, inner
    how = {"algorithm": "column"}
    with helpers.x64(dtype):
        _, config = plan_of_columns(shape, dtype, implementation, **how)
        assert (config["pack"], config["lines"]) == (pack, lines)
        where = np.ones(inner, bool)
        _, config = plan_of_columns(shape, dtype, implementation, where=where, **how)
        assert (config["pack"], config["lines"]) == (1, False)  # each row has a mask of its own


def test_blocks_copy_lines_only_if_there_are_tiles_for_all_multiprocessors(implementation):
    count = helpers.multiprocessors(implementation)
    for outer, lines in ((count - 1, False), (count, True)):  # with a tile each
        _, config = plan_of_columns((outer, 40, 127), "bfloat16", implementation)
        assert config["lines"] == lines


@pytest.mark.parametrize(
    ("columns", "lanes", "packs"), [(52, 16, 1), (121, 16, 1), (122, 32, 1), (249, 32, 1)]
)
def test_few_short_masked_rows_have_a_pack_in_each_lane(columns, lanes, packs, implementation):
    """Of 16-bit elements; the rows begin anywhere in a pack, which takes one more."""
    options = {"where": np.ones((40, columns), bool), "algorithm": "warp"}
    _, config = plan_of_rows("softmax", (40, columns), "bfloat16", implementation, **options)
    assert (config["lanes"], config["packs"]) == (lanes, packs)


@pytest.mark.parametrize(("is_filled", "threads"), [(False, 8 * 32), (True, 2 * 64)])
def test_few_tiles_of_lines_have_more_threads(is_filled, threads, implementation):
    """Of 129 rows; a thread takes at most 32 of the 40 columns, and at least 4."""
    count = helpers.multiprocessors(implementation)
    outer = 20 * count if is_filled else count // 2
    _, config = plan_of_columns((outer, 40, 129), "bfloat16", implementation)
    assert (config["lines"], config["threads"]) == (True, threads)


@pytest.mark.parametrize(
    ("outer", "longest", "inner", "dtype", "lanes"),
    [
        (100_000, 1024, 30, "float32", 8),
        (100_000, 2048, 12, "bfloat16", 4),
        (1, 2048, 30, "float32", 4),  # a small array
        (1, 2048, 16, "bfloat16", 4),
        (1, 8192, 4, "bfloat16", 1),
        (1, 2048, 3, "float32", 4),  # one by one
    ],
)
def test_fewer_rows_side_by_side_hold_a_longer_axis(
    outer, longest, inner, dtype, lanes, implementation
):
    algorithm, config = plan_of_columns((outer, longest, inner), dtype, implementation)
    assert (algorithm, config["lanes"], config["threads"]) == ("column", lanes, 512)
    algorithm, _ = plan_of_columns((outer, longest + 1, inner), dtype, implementation)
    assert algorithm == ("column_split" if outer == 1 else "column_two_pass")


def test_many_short_columns_have_few_threads(implementation):
    outer = 1000 * helpers.multiprocessors(implementation)
    for count, threads in ((1, 256), (outer, 32)):
        algorithm, config = plan_of_columns((count, 128, 16), "bfloat16", implementation)
        assert (algorithm, config["threads"]) == ("column", threads)


def test_blocks_share_a_long_axis_of_few_rows(implementation):
    """As many blocks as run at a time, two on a multiprocessor, of at least 128 elements each."""
    count = helpers.multiprocessors(implementation)
    for outer, columns, parts in (
        (1, 300 * count + 2000, 2 * count),
        (1, 2100, min(17, 2 * count)),
        (count, 20_000, 2),
    ):
        algorithm, config = plan_of_columns((outer, columns, 16), "float32", implementation)
        assert (algorithm, config["slices"]) == ("column_split", parts)
    algorithm, _ = plan_of_columns((count + 1, 20_000, 16), "float32", implementation)
    assert algorithm == "column_two_pass"


@pytest.mark.parametrize("inner", [2, 4, 60, 1000])
@pytest.mark.parametrize("columns", [600, 1025, 9000, 2**20])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_workspace_for_columns_suffices_at_any_address(dtype, columns, inner, implementation):
    """A lowered program has workspace for each row, and learns addresses when it runs."""
    jaxpr = jax.make_jaxpr(
        functools.partial(jax_gpuops.softmax, axis=1, implementation="interpret")
    )
    with helpers.x64(dtype):
        ((problem, _),) = described(jaxpr(jax.ShapeDtypeStruct((1, columns, inner), dtype)))
    each_row = _library.module(implementation).workspace("softmax", {**problem, "algorithm": ""})
    for outer, alignment in itertools.product((1, 7, 1000), (16, 8, 2, 1)):
        changed = {**problem, "outer": outer, "alignment": alignment}
        _, config = planned(implementation, "softmax", changed, None)
        assert config["workspace_bytes"] <= each_row * outer * inner


@pytest.mark.parametrize(
    ("name", "rows", "columns", "dtype", "algorithm"),
    [
        ("softmax", 8192, 10, "float32", "warp"),
        ("softmax", 8193, 10, "float32", "staged"),
        ("softmax", 100, 20, "bfloat16", "staged"),
        ("softmax", 100_000, 65, "float32", "warp"),
        ("softmax", 1_000_000, 65, "float32", "staged"),
        ("softmax", 100_000, 77, "bfloat16", "staged"),
        ("softmax", 10_000, 129, "bfloat16", "warp"),
        ("softmax", 1_000_000, 129, "bfloat16", "staged"),
        ("softmax", 100, 257, "bfloat16", "warp"),
        ("logsumexp", 1_000_000, 64, "bfloat16", "warp"),  # whole packs
        ("logsumexp", 1_000_000, 63, "bfloat16", "staged"),
        ("logsumexp", 1_000_000, 65, "bfloat16", "warp"),
    ],
)
def test_short_rows_of_no_whole_packs(name, rows, columns, dtype, algorithm, implementation):
    chosen, _ = plan_of_rows(name, (rows, columns), dtype, implementation)
    assert chosen == algorithm


@pytest.mark.parametrize(("rows", "blocks"), [(9_000, 71), (100_000, 782), (2_000_000, 2605)])
def test_few_short_rows_are_divided_among_many_blocks(rows, blocks, implementation):
    """A block takes 768 rows of 10 elements, which fit 32 KiB, only if there are enough rows."""
    algorithm, config = plan_of_rows("softmax", (rows, 10), "float32", implementation)
    assert (algorithm, config["blocks"]) == ("staged", blocks)


@pytest.mark.parametrize(("rows", "layout"), [(500_000, "small"), (600_000, "aligned")])
def test_rows_of_two_packs(rows, layout, implementation):
    algorithm, config = plan_of_rows("softmax", (rows, 8), "float32", implementation)
    assert (algorithm, config["layout"]) == ("warp", layout)
    for count in (64, rows, 2**29):  # more elements than 32 bits count
        how = {"batch_invariant": True}
        algorithm, config = plan_of_rows("softmax", (count, 8), "float32", implementation, **how)
        assert (algorithm, config["layout"]) == ("warp", "aligned")


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("name", "columns", "dtype", "pack"),
    [
        ("sum", 64, "int16", 8),
        ("argmax", 64, "int16", 1),
        ("argmax", 130, "int16", 8),
        ("var", 512, "bfloat16", 1),
        ("var", 520, "bfloat16", 8),
    ],
)
def test_columns_of_small_arrays_are_read_by_elements(name, columns, dtype, pack, implementation):
    """Where a row takes long to compute, and there are threads for all rows."""
    if implementation != "interpret":
        pytest.skip("the sizes are for 4 multiprocessors")
    scale = 1000 if dtype == "int16" else 1
    x = helpers.normal((columns, 64), "float32", scale=scale).astype(jnp.dtype(dtype))
    how = {"implementation": implementation, "algorithm": "column"}
    with helpers.recorded(implementation) as executions:
        y = jax.block_until_ready(getattr(jax_gpuops, name)(x, 0, **how))
    expected = getattr(np, name)(x.astype("float64"), 0)
    tolerance = 0 if dtype == "int16" else 0.01
    np.testing.assert_allclose(np.asarray(y, "float64"), expected, rtol=tolerance, atol=tolerance)
    (execution,) = executions
    assert execution["config"]["pack"] == pack


@pytest.mark.kernel
@pytest.mark.parametrize(("dtype", "pack"), [("bfloat16", 4), ("float32", 2), ("float64", 2)])
def test_packs_of_masked_columns_for_moments(dtype, pack, implementation):
    if implementation != "interpret":
        pytest.skip("the size is for 4 multiprocessors")
    with jax.enable_x64(True):
        x = helpers.normal((2100, 64), dtype)
        mask = np.arange(x.size).reshape(x.shape) % 3 > 0
        how = {"implementation": implementation, "algorithm": "column"}
        with helpers.recorded(implementation) as executions:
            mean, _ = jax.block_until_ready(jax_gpuops.mean_and_var(x, 0, where=mask, **how))
    expected = np.mean(x.astype("float64"), 0, where=mask)
    np.testing.assert_allclose(mean, expected, rtol=0.01, atol=0.01)
    (execution,) = executions
    assert execution["config"]["pack"] == pack


@pytest.mark.kernel
@pytest.mark.parametrize(("dtype", "pack"), [("bfloat16", 4), ("float32", 4), ("float64", 2)])
def test_packs_of_masked_columns(dtype, pack, implementation):
    with jax.enable_x64(True):
        x = helpers.normal((300, 64), dtype)
        mask = np.arange(x.size).reshape(x.shape) % 3 > 0
        with helpers.recorded(implementation) as executions:
            y = jax_gpuops.max(
                x, 0, initial=-9, where=mask, implementation=implementation, algorithm="column"
            )
            jax.block_until_ready(y)
    np.testing.assert_array_equal(y, np.where(mask, x, -9).max(0))
    (execution,) = executions
    assert execution["config"]["pack"] == pack


@pytest.mark.parametrize(
    ("batch", "m", "k", "n", "streams"),
    [(1, 8192, 64, 8192, True), (1, 4096, 4096, 4096, False), (128, 1024, 128, 1024, True)],
)
def test_results_larger_than_the_cache_leave_it_first(batch, m, k, n, streams, implementation):
    shapes = [(batch, m, k), (batch, k, n)]
    how = helpers.options("matmul", "tensor_core", implementation, shapes, "bfloat16")
    operands = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    jaxpr = jax.make_jaxpr(lambda a, b: jax_gpuops.matmul(a, b, **how))(*operands)
    ((problem, algorithm),) = described(jaxpr)
    _, config = planned(implementation, "matmul", problem, algorithm)
    assert config["streams_result"] == streams


@pytest.mark.parametrize("sizes", [(0, 50, 1), (4, 0, 1), (0, 50, 3), (4, 0, 3), (4, 50, 0)])
def test_an_array_without_elements_has_a_plan(sizes, implementation):
    problem = dict(zip(("outer", "columns", "inner"), sizes, strict=True))
    problem |= {"function": "sum", "dtype": "float32", "result": "float32", "masked": 0}
    problem |= {"alignment": _primitive.ALIGNMENT, "workspace": _primitive.WORKSPACE_AS_ASKED}
    for algorithm in (None, "column"):
        _, config = planned(implementation, "reduce", problem, algorithm)
        assert config["workspace"] == 0


@pytest.mark.parametrize("inner", [1, 64])
@pytest.mark.parametrize(
    "algorithm", [None, *(each.name for each in jax_gpuops.algorithms("softmax"))]
)
def test_rows_without_elements_have_a_plan(algorithm, inner, implementation):
    problem = {"outer": 3, "columns": 0, "inner": inner, "masked": 0, "queries": 0, "scaled": 0}
    problem |= {"function": "softmax", "dtype": "float32", "alignment": _primitive.ALIGNMENT}
    _, config = planned(implementation, "softmax", problem, algorithm)
    assert config["blocks"] == config["workspace_bytes"] == 0


PADDING = {"where": np.ones((1, 1), bool)}


def kernel_of_rows(implementation, function, rows, columns, dtype, options) -> str:
    """The algorithm for contiguous rows, of a function or of its derivative."""

    def call(x):
        name = function.removesuffix("_tangent").removesuffix("_cotangent")
        how = {"axis": -1, "implementation": implementation, **options}
        y, pull_back = jax.vjp(functools.partial(getattr(jax_gpuops, name), **how), x)
        return y if name == function else pull_back(y)

    jaxpr = jax.make_jaxpr(call)(jax.ShapeDtypeStruct((rows, columns), dtype))
    problem, named = described(jaxpr)[-1]
    family = "reduce" if "result" in problem else "softmax"
    return _library.planned(implementation, family, problem, named)["algorithm"]


# As measured on an H200. A number of rows with a point is for each multiprocessor.
@pytest.mark.any_version
@pytest.mark.parametrize(
    ("function", "rows", "columns", "dtype", "options", "algorithm"),
    [
        # Of rows that fit a warp: blocks if these are long, or if there are few.
        ("softmax", 256, 512, "float32", {}, "warp"),
        ("softmax", 256, 1024, "float32", {}, "small_block"),
        ("softmax", 4096, 1024, "float32", {}, "warp"),
        ("softmax", 1024, 2048, "float32", {}, "small_block"),
        ("softmax", 2048, 2048, "float32", {}, "warp"),
        ("softmax", 4096, 2048, "float32", {}, "small_block"),
        ("softmax", 8192, 2048, "float32", {}, "block"),
        ("softmax", 8192, 2045, "float32", {}, "warp"),
        ("softmax", 4096, 1024, "float64", {}, "warp"),
        ("softmax", 16384, 4096, "bfloat16", PADDING, "small_block"),
        ("softmax", 16384, 3000, "bfloat16", PADDING, "warp"),
        ("softmax", 16384, 4089, "bfloat16", PADDING, "warp"),
        ("log_softmax", 256, 4096, "bfloat16", {}, "small_block"),
        ("log_softmax", 1024, 4096, "bfloat16", {}, "block"),
        ("log_softmax", 2048, 4096, "bfloat16", {}, "warp"),
        ("logsumexp", 256, 2048, "float32", {}, "small_block"),
        ("logsumexp", 4096, 2048, "float32", {}, "warp"),
        ("logsumexp", 256, 2049, "bfloat16", {}, "warp"),
        ("softmax_tangent", 64, 1000, "bfloat16", {}, "small_block"),
        ("softmax_tangent", 64, 1000, "bfloat16", PADDING, "warp"),
        ("softmax_tangent", 4096, 1000, "bfloat16", {}, "warp"),
        # Of rows that fit a block: clusters, if there are few long ones.
        ("softmax", 0.5, 16384, "float32", {}, "cluster"),
        ("softmax", 1.0, 16384, "float32", {}, "block"),
        ("softmax", 0.5, 8192, "float32", {}, "block"),
        ("softmax", 0.5, 16384, "float32", PADDING, "block"),
        ("softmax", 0.5, 16384, "float32", {"batch_invariant": True}, "block"),
        ("log_softmax_cotangent", 0.5, 8192, "float32", {}, "cluster"),
        # Of longer rows.
        ("softmax", 1.0, 152064, "bfloat16", {}, "cluster"),
        ("softmax", 2.0, 152064, "bfloat16", {}, "cluster_shared"),
        ("softmax", 0.5, 152064, "bfloat16", {"batch_invariant": True}, "cluster_shared"),
        ("logsumexp", 0.5, 50257, "float32", {}, "cluster"),
        ("logsumexp", 0.75, 50257, "bfloat16", {}, "cluster"),
        ("logsumexp", 1.0, 50257, "float32", {}, "block_two_pass"),
        ("logsumexp", 2.0, 65536, "float32", {}, "block_two_pass"),
        ("logsumexp", 2.25, 65536, "float32", {}, "split"),
        ("logsumexp", 1.0, 128256, "float32", {}, "split"),
        ("logsumexp", 0.5, 50257, "float32", PADDING, "split"),
        # Reductions of short rows of no whole packs.
        ("sum", 124.0, 50, "bfloat16", {}, "staged"),
        ("sum", 124.0, 129, "bfloat16", {}, "held"),
        ("argmax", 124.0, 129, "bfloat16", {}, "staged"),
        ("sum", 500.0, 250, "bfloat16", {}, "held"),
        ("max", 500.0, 250, "bfloat16", {}, "staged"),
        ("mean_and_var", 124.0, 169, "bfloat16", {}, "row"),
        ("mean_and_var", 500.0, 169, "bfloat16", {}, "staged"),
        ("mean_and_var", 500.0, 250, "bfloat16", {}, "row"),
        ("mean_and_var", 500.0, 250, "float32", {}, "held"),
        ("mean_and_var", 500.0, 169, "float32", {}, "row"),
        # And of long rows.
        ("sum", 0.25, 65536, "float32", {}, "cluster"),
        ("mean_and_var", 0.25, 65536, "float32", {}, "row"),
        ("sum", 1, 524288, "float32", {}, "multiple"),
        ("sum", 1.0, 131073, "bfloat16", {}, "row"),
        ("sum", 1.25, 131073, "bfloat16", {}, "multiple"),
    ],
)
def test_the_kernel_for_contiguous_rows(
    function, rows, columns, dtype, options, algorithm, implementation
):
    if isinstance(rows, float):
        rows = int(rows * helpers.multiprocessors(implementation))
    with helpers.x64(dtype):
        chosen = kernel_of_rows(implementation, function, rows, columns, dtype, options)
    assert chosen == algorithm


@pytest.mark.parametrize(
    ("function", "rows", "columns", "dtype", "algorithm"),
    [
        ("log_softmax_cotangent", 4, 152064, "float32", "split_pipelined"),
        ("logsumexp", 32, 131073, "bfloat16", "cluster"),
        ("logsumexp", 66, 65536, "float32", "split"),
        ("argmax", 1, 32768, "bfloat16", "cluster"),
        ("argmax", 32, 32768, "bfloat16", "held"),
        ("sum", 8, 524288, "float32", "cluster"),
        ("argmax", 8, 524288, "float32", "multiple"),
    ],
)
def test_the_kernel_for_few_long_rows_of_a_large_gpu(function, rows, columns, dtype, algorithm):
    if _library.missing("cuda") is not None or helpers.refusal("sum", "cluster", platform="cuda"):
        pytest.skip("no kernels for compute capability 9.0 are installed")
    assert kernel_of_rows("cuda", function, rows, columns, dtype, {}) == algorithm


@pytest.mark.parametrize("algorithm", ["multiple", "column", "interleaved"])
def test_rows_are_split_as_far_as_the_workspace_goes(algorithm, implementation):
    """And those that lie apart over the blocks of a cluster, which needs none, if that is more."""
    rows = 1 if algorithm == "column" else 2
    axis = 0 if algorithm == "interleaved" else 1
    x = jax.ShapeDtypeStruct((1 << 20, rows) if axis == 0 else (rows, 1 << 20), "float32")
    how = {"implementation": implementation, "algorithm": algorithm}
    ((problem, _),) = described(jax.make_jaxpr(lambda x: jax_gpuops.sum(x, axis, **how))(x))
    size = 16 if algorithm == "multiple" else 4  # a partial in a word of 8 bytes, with a tag
    row_bytes = rows * size  # for one part
    parts = []
    for workspace in (-1, 1 << 20, 3 * row_bytes, 3 * row_bytes - 1, 0):
        _, config = planned(implementation, "reduce", problem | {"workspace": workspace}, algorithm)
        in_workspace = config["parts"] > config["cluster"]
        assert config["workspace"] == (row_bytes * config["parts"] if in_workspace else 0)
        parts.append((config["parts"], config["cluster"]))
    assert parts[0] == parts[1]
    assert parts[0][0] > (3 if algorithm == "multiple" else 8)
    by_clusters = algorithm != "multiple" and not helpers.refusal("sum", "cluster")
    assert parts[2:] == ([(8, 8)] * 3 if by_clusters else [(3, 1), (2, 1), (1, 1)])


def planned_sum(implementation, shape, axis, dtype="float32", name="sum", algorithm=None):
    x = jax.ShapeDtypeStruct(shape, dtype)
    how = {"implementation": implementation}
    call = getattr(jax_gpuops, name)
    ((problem, _),) = described(jax.make_jaxpr(lambda x: call(x, axis, **how))(x))
    return planned(implementation, "reduce", problem, algorithm)[1]


@pytest.mark.parametrize(
    ("shape", "threads", "parts"),
    [
        # Blocks whose threads have 4 packs of 16 bytes each, up to about one per multiprocessor of
        # an H200; these then have fewer threads.
        ((1, 1 << 15), 128, 16),
        ((2, 1 << 17), 128, 64),
        ((1, 1 << 19), 256, 128),
        ((1, 1 << 20), 512, 128),
    ],
)
def test_blocks_of_rows_of_any_length(shape, threads, parts, implementation):
    config = planned_sum(implementation, shape, 1, algorithm="multiple")
    most = 4 * helpers.multiprocessors(implementation) // shape[0]  # that run at a time
    assert (config["threads"], config["parts"]) == (threads, min(parts, most))


@pytest.mark.parametrize(
    ("shape", "axis", "cluster", "launches"),
    [
        # As many blocks as run at a time, which are 32 of 256 threads.
        ((16, 4096, 128), 1, 2, 1),
        ((8, 4096, 128), 1, 4, 1),
        ((4, 4096, 128), 1, 8, 1),
        ((17, 4096, 128), 1, 1, 1),
        # Fewer lanes where the largest clusters are not enough, but columns of 128 bytes.
        ((4096, 128), 0, 8, 1),
        ((16384, 32), 0, 1, 2),
        # Blocks with too little to do for each thread: less where multiprocessors would have none.
        # But of few columns fewer lanes in place of clusters.
        ((2, 64, 128), 1, 1, 1),
        ((8, 384, 128), 1, 2, 1),
        ((8, 383, 128), 1, 1, 1),
        ((10, 256, 128), 1, 1, 1),
        ((10, 512, 128), 1, 2, 1),
        # Few results of very many columns.
        ((1 << 20, 3), 0, 1, 2),
        ((4, 1 << 16, 3), 1, 4, 1),
        ((16, 1 << 16, 3), 1, 2, 1),
    ],
)
def test_parts_of_columns_are_for_the_blocks_of_clusters(
    shape, axis, cluster, launches, implementation
):
    if implementation != "interpret":
        pytest.skip("the sizes are for 4 multiprocessors")
    config = planned_sum(implementation, shape, axis)
    assert config["cluster"] == cluster
    assert (config["last_threads"] > 0) == (launches == 2)
    assert (config["workspace"] > 0) == (launches == 2)
    if launches == 1:
        assert config["parts"] == cluster


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "parts"),
    [
        # Two blocks per multiprocessor, unless a thread then has more than 32 packs.
        ("sum", (3000, 3), "float32", 8),
        ("argmax", (3000, 3), "float32", 8),
        ("max", (6000, 3), "bfloat16", 8),
        ("sum", (1 << 20, 3), "float32", 32),
        ("var", (3000, 3), "float32", 32),
    ],
)
def test_interleaved_parts_for_a_second_launch(name, shape, dtype, parts, implementation):
    if implementation != "interpret":
        pytest.skip("the sizes are for 4 multiprocessors")
    config = planned_sum(implementation, shape, 0, dtype, name, "interleaved")
    assert config["parts"] == parts
    assert config["last_threads"] > 0


def test_few_columns_are_read_at_once(implementation):
    """By so few threads below each other that each has as many as it loads before it folds one."""
    for columns, depths in (
        (1, 1),
        (4, 1),
        (5, 2),
        (12, 4),
        (16, 4),
        (17, 8),
        (32, 8),
        (33, 16),
        (63, 16),
    ):
        config = planned_sum(implementation, (1, columns, 128), 1, "int32")
        assert config["threads"] // config["lanes"] == depths


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "kernel", "lanes", "threads"),
    [
        # Whole rows: of at most 32 elements, or of more if there are 640 rows.
        ("argmax", (1, 21, 65 * 65), "bfloat16", "whole_column", 256, 256),
        ("argmax", (1, 21, 1536), "float16", "whole_column", 128, 128),  # two for each thread
        ("argmax", (1, 21, 1537), "float16", "whole_column", 128, 128),
        ("sum", (1, 32, 33), "float32", "whole_column", 64, 64),
        ("max", (1, 9, 256), "float32", "whole_column", 64, 64),
        ("max", (1, 9, 4096), "float32", "whole_column", 256, 256),
        ("max", (1, 9, 4097), "float32", "whole_column", 128, 128),  # some blocks start later
        ("sum", (1, 100, 640), "bfloat16", "whole_column", 64, 64),
        ("sum", (1, 100, 639), "bfloat16", "short_column", 32, 256),  # too few
        ("sum", (1, 1024, 641), "bfloat16", "whole_column", 64, 64),
        # Those of whole packs: of argmax of at most 256 elements; of others of at most 100, and in
        # large arrays of 16 to 32.
        ("argmax", (1, 256, 2048), "bfloat16", "whole_column", 256, 256),
        ("argmax", (1, 257, 640), "bfloat16", "column", None, 256),
        ("sum", (1, 101, 640), "bfloat16", "column", None, 256),
        ("sum", (1, 16, 16384), "float32", "whole_column", 128, 128),
        ("max", (1, 32, 8192), "bfloat16", "whole_column", 256, 256),
        ("max", (1, 33, 8192), "bfloat16", "column", None, 256),
        ("argmax", (1, 33, 16384), "bfloat16", "whole_column", 128, 128),
        ("argmax", (1, 15, 65536), "bfloat16", "column", None, 256),
        ("argmax", (1, 15, 65537), "bfloat16", "whole_column", 128, 128),
        # A block for each tile, with lanes for 64 or 128 contiguous bytes unless there are few.
        ("sum", (1, 101, 513), "float32", "short_column", 32, 256),
        ("max", (1, 33, 256), "float32", "short_column", 32, 256),
        ("max", (1, 160, 256), "float32", "short_column", 32, 256),
        ("max", (1, 161, 256), "float32", "short_column", 32, 512),
        ("min", (1, 161, 257), "float32", "short_column", 32, 256),  # no room for more threads
        ("sum", (1, 300, 64), "bfloat16", "short_column", 16, 256),
        ("sum", (1, 1024, 32), "float32", "short_column", 16, 1024),
        # By column_kernel: no faster in large arrays that are read in packs.
        ("sum", (1, 1024, 256), "float32", "short_column", 32, 512),
        ("sum", (1, 1024, 257), "float32", "short_column", 32, 256),
        ("sum", (1, 1024, 260), "float32", "column", None, 256),
        ("sum", (1, 513, 256), "bfloat16", "column", None, 256),
        ("argmax", (1, 1024, 260), "float32", "short_column", 32, 256),
        ("sum", (1, 1025, 33), "float32", "column", None, 256),
        ("sum", (1, 300, 31), "float32", "column", None, 256),
        ("prod", (1, 300, 64), "float32", "column", None, 256),
        ("sum", (1, 300, 64), "float64", "column", None, 256),
        ("max", (1, 300, 64), "int32", "column", None, 256),
    ],
)
def test_columns_of_few_elements(name, shape, dtype, kernel, lanes, threads, implementation):
    if implementation != "interpret":
        pytest.skip("the sizes are for 4 multiprocessors")
    with helpers.x64(dtype):
        config = planned_sum(implementation, shape, 1, dtype, name, "column")
    assert config["column_kernel"] == kernel
    assert config["threads"] == threads
    if lanes is not None:
        assert config["lanes"] == lanes
        assert (config["pack"], config["parts"], config["workspace"]) == (1, 1, 0)


def test_columns_are_not_divided_where_rows_keep_the_gpu_busy(implementation):
    config = planned_sum(implementation, (4096, 100, 128), 1)
    assert config["lanes"] == config["threads"]
    assert config["parts"] == 1


def test_long_contiguous_rows_have_64_bytes_of_workspace_for_16_kib(implementation):
    """Only rows whose elements lie apart are divided further."""
    for function, dtype in [("sum", "float32"), ("argmax", "int8"), ("mean_and_var", "float64")]:
        problem = {"function": function, "dtype": dtype, "masked": 0, "inner": 1}
        problem |= {"result": "int32" if function == "argmax" else dtype}
        problem |= {"outer": 1, "columns": 1 << 20, "workspace": _primitive.WORKSPACE_AS_ASKED}
        problem |= {"alignment": _primitive.ALIGNMENT, "algorithm": ""}
        room = _library.module(implementation).workspace("reduce", problem)
        bytes_of_row = (1 << 20) * np.dtype(dtype).itemsize
        assert 0 < room <= bytes_of_row // (16 << 10) * 64


def test_a_step_without_its_workspace_is_refused(implementation):
    x = jax.ShapeDtypeStruct((2, 5000), "float32")
    how = {"implementation": implementation, "algorithm": "unroll"}
    ((problem, _),) = described(jax.make_jaxpr(lambda x: jax_gpuops.sum(x, 1, **how))(x))
    _, config = planned(implementation, "reduce", problem, "unroll")
    planned(implementation, "reduce", problem | {"workspace": config["workspace"]}, "unroll")
    with pytest.raises(ValueError, match="the workspace is too small"):
        planned(
            implementation, "reduce", problem | {"workspace": config["workspace"] - 1}, "unroll"
        )


def plan_of(op, shape, dtype, implementation, **arguments):
    return jax_gpuops.plan(op, shape, dtype, implementation=implementation, **arguments)


@pytest.mark.parametrize(
    ("op", "shape", "dtype", "arguments", "why"),
    [
        ("transpose", (8, 1), "int8", {"algorithm": "tiled"}, "all elements stay where they are"),
        ("transpose", (8, 1), "int8", {"algorithm": "swizzled"}, "'copy' supports this"),
        (
            "transpose",
            (8, 9, 16),
            "float32",
            {"axes": (1, 0, 2), "algorithm": "tiled"},
            "keeps runs of 64 bytes; 'copy' supports these",
        ),
        (
            "transpose",
            (8, 9, 3),
            "float32",
            {"axes": (1, 0, 2), "algorithm": "swizzled"},
            "keeps runs of 3 words of 4 bytes",
        ),
        (
            "transpose",
            (8, 9, 4),
            "float32",
            {"axes": (1, 0, 2), "algorithm": "shifted"},
            "words of up to 8 bytes, and here they have 16; 'swizzled' supports these",
        ),
        (
            "transpose",
            (8, 9, 4),
            "float32",
            {"axes": (1, 0, 2), "algorithm": "narrow"},
            "words of up to 8 bytes, and here they have 16; 'tiled' supports these",
        ),
        (
            "transpose",
            (40, 50),
            "float32",
            {"algorithm": "narrow"},
            "at most 31 columns, .* here matrices of 40 x 50 are transposed",
        ),
        (
            "transpose",
            (3 << 30, 3),
            "int8",
            {"algorithm": "narrow"},
            "at most 2\\^31 - 1 words, and here there are 9663676416",
        ),
        (
            "argmax",
            (8, 9),
            "float32",
            {"axis": 1, "algorithm": "unroll"},
            "computes only sum, prod",
        ),
        ("sum", (8, 9), "float32", {"axis": 0, "algorithm": "row"}, "'column' supports these"),
        ("sum", (8, 9), "float32", {"axis": 0, "algorithm": "multiple"}, "9 elements apart"),
        (
            "sum",
            (8, 9),
            "float32",
            {"axis": 1, "where": jax.ShapeDtypeStruct((9,), bool), "algorithm": "naive"},
            "does not support a mask; 'multiple', 'row' and 'column' do",
        ),
    ],
    ids=str,
)
def test_a_named_algorithm_refuses_what_it_cannot_take(
    op, shape, dtype, arguments, why, implementation
):
    with pytest.raises(ValueError, match=f"algorithm '{arguments['algorithm']}' .*{why}"):
        plan_of(op, shape, dtype, implementation, **arguments)
    plan_of(op, shape, dtype, implementation, **{**arguments, "algorithm": None})
