"""float32 products by 16-bit parts on tensor cores: as exact as a chain of float32 FMAs."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jax_gpuops

LEAST = 2.0**-149
"""The least float32: what a result may be off by without regard to its factors is half of it."""


FEW_TERMS = {"bf16_x6": 4, "fp16_x3": 14}
"""What the errors of products of few terms may be, in units of 2^-24 of their magnitude.

Of one or two terms a chain of FMAs has one or two units. The products of parts that are left out
are up to two, by fp16_x3 eight, and what is tiny beside the rest of its row is one; as much as the
tensor cores' sums cut off is up to four.
"""


def options_of(algorithm, implementation):
    """The options of a product by an algorithm that not every GPU can run."""
    return helpers.options("matmul", algorithm, implementation, [(8, 8), (8, 8)], "float32")


@pytest.fixture(params=FEW_TERMS)
def parts(request, implementation):
    return options_of(request.param, implementation)


@pytest.fixture
def bf16_x6(implementation):
    return options_of("bf16_x6", implementation)


@pytest.fixture
def fp16_x3(implementation):
    return options_of("fp16_x3", implementation)


def fma_chain(a, b):
    """a @ b as SGEMM adds: one product after the other, each sum rounded to float32."""
    sums = np.zeros((a.shape[0], b.shape[1]), np.float32)
    a, b = helpers.exact(a), helpers.exact(b)
    with np.errstate(over="ignore"):
        for k in range(a.shape[1]):
            sums = (helpers.exact(sums) + a[:, k : k + 1] * b[k : k + 1]).astype(np.float32)
    return sums


def error(y, a, b):
    """The largest |y - a b| in units of 2^-24 |a| |b|, over the finite components of y.

    Where float32 has no number as small as the result, half of its least number is free.
    """
    y, a, b = map(helpers.exact, (y, a, b))
    magnitude = np.abs(a) @ np.abs(b)
    counted = np.isfinite(y) & (magnitude > 0)
    excess = np.abs(y - a @ b)[counted] - LEAST / 2
    return float(np.max(excess / magnitude[counted], initial=0)) * 2**24


def assert_exact(y, a, b, algorithm):
    """Checks that errors are no larger than those of a chain of FMAs, or FEW_TERMS.

    Infinite are the results that float32 has no numbers for, and no others; a chain may leave
    float32 before.
    """
    y = np.asarray(y)
    assert y.dtype == np.float32
    with np.errstate(over="ignore"):
        rounded = (helpers.exact(a) @ helpers.exact(b)).astype(np.float32)
    np.testing.assert_array_equal(np.isinf(y), np.isinf(rounded))
    magnitude = np.abs(helpers.exact(a)) @ np.abs(helpers.exact(b))
    np.testing.assert_array_equal(y[magnitude == 0], 0)
    found = error(y, a, b)  # that of a chain takes long to compute
    assert found <= FEW_TERMS[algorithm] or found <= error(fma_chain(a, b), a, b)


def floats(kind, m, n, k):
    """Factors whose sums are hard: of one sign, of all sizes, or of terms of all sizes."""
    random = np.random.default_rng(k)
    a, b = random.standard_normal((m, k)), random.standard_normal((k, n))
    if kind == "uniform":
        a, b = random.random((m, k)), random.random((k, n))
    elif kind == "rows and columns of all sizes":
        a *= 10.0 ** random.uniform(-30, 30, (m, 1))
        b *= 10.0 ** random.uniform(-30, 30, (1, n))
    elif kind == "terms of all sizes":
        scale = 10.0 ** random.uniform(-10, 10, k)
        a, b = a * scale, b / scale[:, None]
    elif kind == "elements of all sizes":
        a *= 10.0 ** random.uniform(-25, 0, (m, k))
        b *= 10.0 ** random.uniform(-15, 0, (k, n))
    elif kind == "denormals":
        a, b = a * 1e-41, b * 1e30
    elif kind == "denormal results":
        a, b = a * 1e-25, b * 1e-18
    elif kind == "a large term":
        a, b = np.abs(a), np.abs(b)
        a[:, 0] *= 1e5
    elif kind == "last bits":
        # Parts at their largest: what is left out of the products adds up.
        a, b = 1 + 2.0**-8 - 2.0**-17 + 0 * a, 1 + 2.0**-8 - 2.0**-17 + 0 * b
    elif kind == "last bits of float16":
        element = 1 + 2.0**-11 + 2.0**-23  # the second part is 2^-11, and 2^-23 is left over
        a = element * 2.0 ** random.integers(-3, 3, (m, k))
        b = element * 2.0 ** random.integers(-3, 3, (k, n))
    return a.astype(np.float32), b.astype(np.float32)


KINDS = [
    "normal",
    "uniform",
    "rows and columns of all sizes",
    "terms of all sizes",
    "elements of all sizes",
    "denormals",
    "denormal results",
    "a large term",
    "last bits",
    "last bits of float16",
]


# Of memory the tests of layouts tell as much, so those of what values alone decide are not marked
# `kernel`: they take three times as long under AddressSanitizer.


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("kind", "depth"),
    [
        (kind, depth)
        for kind in KINDS
        for depth in (1, 2, 7, 64, 65, 128, 200, 1000, 4100)
        if kind not in ("normal", "uniform") or depth < 1000  # the next test has these
    ],
)
def test_errors_are_those_of_float32(kind, depth, parts):
    m, n = (40, 24) if depth > 200 else (72, 56)
    a, b = floats(kind, m, n, depth)
    assert_exact(jax_gpuops.matmul(a, b, **parts), a, b, parts["algorithm"])


@pytest.mark.any_version
@pytest.mark.parametrize("depth", [256, 1000, 4100])
@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_long_sums_are_more_exact_than_a_chain(kind, depth, parts):
    a, b = floats(kind, 40, 24, depth)
    y = np.asarray(jax_gpuops.matmul(a, b, **parts))
    assert_exact(y, a, b, parts["algorithm"])
    assert error(y, a, b) <= error(fma_chain(a, b), a, b)


# Shapes and layouts


def recorded_gemm(a, b, transpose_a, transpose_b, **how):
    """a @ b with the factors stored transposed or not, and the execution of the handler."""
    with helpers.recorded(how["implementation"]) as executions:
        y = jax_gpuops.gemm(
            helpers.stored(a, transpose_a),
            helpers.stored(b, transpose_b),
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            **how,
        )
        y = np.asarray(y)
    (execution,) = executions
    return y, execution


@pytest.mark.kernel
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1),
        (3, 5, 7),
        (128, 128, 64),
        (129, 132, 68),
        (131, 129, 65),
        (260, 136, 200),
        (257, 131, 67),
        (64, 300, 130),
        (1, 200, 300),
        (200, 1, 300),
    ],
    ids=str,
)
def test_every_layout(sizes, transpose_b, transpose_a, parts):
    """Rows, columns and a depth that no tile, strip or pack divides, and such as they do."""
    m, n, k = sizes
    a, b = helpers.normal((m, k), "float32"), helpers.normal((k, n), "float32", seed=1)
    y, execution = recorded_gemm(a, b, transpose_a, transpose_b, **parts)
    assert_exact(y, a, b, parts["algorithm"])
    config, problem = execution["config"], execution["problem"]  # a row is also a column
    assert config["cluster_rows"] == (2 if m > 128 else 1)
    assert config["pack_a"] == ((m if problem["transpose_a"] else k) % 4 == 0)
    assert config["pack_b"] == ((k if problem["transpose_b"] else n) % 4 == 0)
    assert config["pack_result"] == (n % 4 == 0)


@pytest.mark.kernel
@pytest.mark.parametrize("share", ["", "a", "b"])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("sizes", [(136, 132, 72), (131, 67, 69)], ids=str)
def test_batches(sizes, transpose_b, transpose_a, share, parts):
    """Each row and column of each matrix has a scale of its own."""
    m, n, k = sizes
    random = np.random.default_rng(0)
    a, b = helpers.normal((3, m, k), "float32"), helpers.normal((3, k, n), "float32", seed=1)
    a *= 10 ** random.uniform(-9, 9, (3, m, 1)).astype(np.float32)
    b *= 10 ** random.uniform(-9, 9, (3, 1, n)).astype(np.float32)
    a, b = a[0] if share == "a" else a, b[0] if share == "b" else b
    y, _ = recorded_gemm(a, b, transpose_a, transpose_b, **parts)
    for i in range(3):
        assert_exact(
            y[i], a if share == "a" else a[i], b if share == "b" else b[i], parts["algorithm"]
        )


@pytest.mark.kernel
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("sizes", [(132, 136, 72), (5, 67, 69)], ids=str)
def test_alpha_and_c(sizes, special, parts):
    """Added to the product where it is written, also by the kernel for what cannot be split."""
    m, n, k = sizes
    a, b = helpers.normal((m, k), "float32"), helpers.normal((k, n), "float32", seed=1)
    c = helpers.normal((m, n), "float32", seed=2)
    if special:
        a[1, 2] = np.inf
    y = np.asarray(jax_gpuops.gemm(a, b, c, alpha=-0.5, beta=3, **parts))
    with np.errstate(invalid="ignore"):
        exact = -0.5 * (helpers.exact(a) @ helpers.exact(b)) + 3 * helpers.exact(c)
    np.testing.assert_array_equal(np.isinf(y), np.isinf(exact))
    magnitude = 0.5 * (np.abs(helpers.exact(a)) @ np.abs(helpers.exact(b))) + 3 * np.abs(c)
    finite = np.isfinite(exact)
    units = FEW_TERMS[parts["algorithm"]] if not special else k + 3
    difference = np.abs(y[finite] - exact[finite])
    assert np.all(difference <= units * 2.0**-24 * magnitude[finite])


@pytest.mark.kernel
@pytest.mark.parametrize("deep", [True, False])
def test_rows_long_enough_for_a_block(deep, parts):
    """Rows of more than 1024 elements are scaled by a block, shorter ones by a warp."""
    a, b = helpers.normal((9, 1028), "float32"), helpers.normal((1028, 5), "float32", seed=1)
    a[:, -1], b[-1] = 1e6, -1e6
    y, execution = recorded_gemm(a, b, not deep, deep, **parts)
    assert_exact(y, a, b, parts["algorithm"])
    splits = {helpers.base_name(name) for name in execution["kernels"]}
    assert ("split_rows_kernel" in splits) == deep
    assert ("split_columns_kernel" in splits) == (not deep)


@pytest.mark.kernel
def test_no_depth_is_zero(parts):
    y = jax_gpuops.matmul(jnp.ones((8, 0)), jnp.ones((0, 16)), **parts)
    np.testing.assert_array_equal(y, np.zeros((8, 16)))


@pytest.mark.kernel
@pytest.mark.parametrize("offset", [4, 8])
def test_factors_at_any_address(offset, parts):
    if parts["implementation"] != "interpret":
        pytest.skip("JAX aligns the buffers of a GPU")
    a, b = helpers.normal((132, 72), "float32"), helpers.normal((72, 136), "float32", seed=1)
    with helpers.buffers_at(offset):
        y = np.asarray(jax_gpuops.matmul(a, b, **parts))
    assert_exact(y, a, b, parts["algorithm"])


# What cannot be split


def assert_like_sgemm(y, a, b):
    """Compares infinities and NaN with those of a chain of FMAs, and the rest with its errors."""
    y = np.asarray(y)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = fma_chain(a, b)
    for which in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(which(y), which(expected))
    finite = np.isfinite(expected)
    with np.errstate(invalid="ignore", over="ignore"):
        magnitude = (np.abs(helpers.exact(a)) @ np.abs(helpers.exact(b)))[finite]
    difference = np.abs(helpers.exact(y)[finite] - helpers.exact(expected)[finite])
    assert np.all(difference <= (a.shape[1] + 3) * 2.0**-23 * magnitude + LEAST)


@pytest.mark.kernel
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("factor", ["a", "b", "both"])
def test_special_values_are_those_of_sgemm(factor, transpose_b, transpose_a, parts):
    a, b = helpers.normal((133, 70), "float32"), helpers.normal((70, 37), "float32", seed=1)
    if factor != "b":
        a[3, 69], a[7, 0], a[8, 5], a[132, 69] = np.inf, np.nan, -np.inf, -np.inf
        b[69, 36] = 0  # 0 * inf is NaN
    if factor != "a":
        b[2, 36], b[69, 4], b[69, 5] = -np.inf, np.nan, np.inf
    y, _ = recorded_gemm(a, b, transpose_a, transpose_b, **parts)
    assert_like_sgemm(y, a, b)


@pytest.mark.kernel
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("position", [(0, 0), (129, 64), (64, 128)])
def test_one_special_value_anywhere_is_seen(position, value, parts):
    a, b = helpers.normal((130, 129), "float32"), helpers.normal((129, 5), "float32", seed=1)
    a[position] = value
    assert_like_sgemm(jax_gpuops.matmul(a, b, **parts), a, b)
    assert_like_sgemm(
        jax_gpuops.matmul(helpers.swap(b), helpers.swap(a), **parts),
        helpers.swap(b),
        helpers.swap(a),
    )


@pytest.mark.kernel
def test_a_row_may_span_what_no_scale_brings_into_range(parts):
    """The products are 2^-22, of factors that lie 2^276 apart within their row or column."""
    large, least = np.float32(2.0**127), np.float32(LEAST)
    a, b = np.ones((5, 2), "float32"), np.ones((2, 3), "float32")
    a[2], b[:, 1] = [large, least], [least, large]
    y = np.asarray(jax_gpuops.matmul(a, b, **parts))
    assert y[2, 1] == 2.0**-21
    assert_exact(y, a, b, parts["algorithm"])


@pytest.mark.kernel
@pytest.mark.parametrize("zeros", [False, True])
def test_weights_that_underflow_beside_large_ones(zeros, parts):
    """As softmax gives them: from 1 to the least float32 in a row, where zeros may hide the 1."""
    a = np.exp2(-np.arange(150)).astype("float32") * np.ones((6, 1), "float32")
    b = helpers.normal((150, 7), "float32")
    if zeros:
        b[:70] = 0
    assert_exact(jax_gpuops.matmul(a, b, **parts), a, b, parts["algorithm"])


@pytest.mark.kernel
def test_results_beyond_float32_are_infinite(parts):
    a, b = np.full((3, 70), 2e19, "float32"), np.full((70, 4), 3e19, "float32")
    b[:, 1], b[:, 2], a[2] = -b[:, 1], 1e-19, 0
    y = np.asarray(jax_gpuops.matmul(a, b, **parts))
    np.testing.assert_array_equal(y[:2, 0], np.inf)
    np.testing.assert_array_equal(y[:2, 1], -np.inf)
    np.testing.assert_array_equal(y[2], 0)
    np.testing.assert_allclose(y[:2, 2], 140, rtol=1e-6)


@pytest.mark.kernel
def test_the_largest_float32_cancels(parts):
    """Sums may leave float32 and come back: scaled, they do not overflow."""
    most = np.finfo(np.float32).max
    a = np.array([[most, most, most, -most, -most, -most, 1]], "float32")
    y = jax_gpuops.matmul(a, np.ones((7, 2), "float32"), **parts)
    np.testing.assert_array_equal(np.abs(y) <= 8, True)


# Which data float16 takes: the kernel that does the work is told by its bits


def numbers(shape, seed=0):
    """Of both signs, from 1 to 2 in magnitude: none is small beside another."""
    random = np.random.default_rng(seed)
    return (random.uniform(1, 2, shape) * random.choice([-1, 1], shape)).astype(np.float32)


def takes_float16(a, b, fp16_x3, transpose_a=False, transpose_b=False):
    """Whether fp16_x3 multiplies the factors itself; else its bits are those of bf16_x6."""
    y, execution = recorded_gemm(a, b, transpose_a, transpose_b, **fp16_x3)
    assert_exact(y, a, b, "fp16_x3")
    products = [kernel for kernel in execution["kernels"] if "part_products" in kernel]
    assert len(products) == 2  # both are launched in any case
    z, _ = recorded_gemm(a, b, transpose_a, transpose_b, **{**fp16_x3, "algorithm": "bf16_x6"})
    return not np.array_equal(y, z)


BELOW = {power: np.nextafter(np.float32(power), np.float32(0)) for power in (2.0**-9, 2.0**-16)}


@pytest.mark.any_version
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("factor", ["a", "b"])
@pytest.mark.parametrize(
    ("small", "most"),
    [
        (0, 208),  # of 256 an eighth is kept free, and a 16th is the other factor's
        (BELOW[2.0**-9], 208),
        (2.0**-9, 255),
        (2.0**-16, 208),
        (BELOW[2.0**-16], 12),  # each counts 17 times
        (-LEAST, 12),
    ],
)
def test_how_many_elements_of_a_row_may_be_small(
    small, most, factor, transpose_b, transpose_a, fp16_x3
):
    """A row of a or column of b, the last or one within, whose largest element is from 1 to 2."""
    for count in {most, min(most + 1, 255)}:
        a, b = numbers((37, 256)), numbers((256, 35), seed=1)
        row = (a[36] if factor == "a" else b[:, 17])[: count + 1]
        row[1:] = small
        took = takes_float16(a, b, fp16_x3, transpose_a, transpose_b)
        assert took == (count == most), count


@pytest.mark.kernel
def test_small_elements_of_both_factors_add_up(fp16_x3):
    for of_a, of_b, takes in ((100, 124, True), (100, 125, False), (101, 124, False)):
        a, b = numbers((5, 256)), numbers((256, 6), seed=1)
        a[2, :of_a], b[256 - of_b :, 3] = 0, 0
        assert takes_float16(a, b, fp16_x3) == takes


@pytest.mark.kernel
@pytest.mark.parametrize("deep", [False, True])
def test_rows_of_zeros_alone_are_exact(deep, fp16_x3):
    a, b = numbers((40, 300)), numbers((300, 50), seed=1)
    a[7], b[:, [0, 49]] = 0, 0
    assert takes_float16(a, b, fp16_x3, not deep, deep)


@pytest.mark.kernel
def test_any_matrix_of_a_batch_may_be_the_one(fp16_x3):
    for matrix in range(3):
        a, b = numbers((3, 20, 260)), numbers((3, 260, 30), seed=1)
        a[matrix, 19, 30:] = 1e-6
        y, _ = recorded_gemm(a, b, False, False, **fp16_x3)
        z, _ = recorded_gemm(a, b, False, False, **{**fp16_x3, "algorithm": "bf16_x6"})
        np.testing.assert_array_equal(y, z)


@pytest.mark.any_version
@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        "normal",
        "uniform",
        "rows and columns of all sizes",
        "denormals",
        "relu",
        "zeros",
        "outliers",
    ],
)
def test_data_that_float16_takes(kind, deep, fp16_x3):
    """As activations and weights are: of any size, half or 70 % of it 0, or a hundredth large."""
    a, b = floats(kind, 40, 24, 1100)
    if kind == "relu":
        a = np.maximum(a, 0)
    elif kind == "zeros":
        a = np.where(a < 0.52, 0, a)
    elif kind == "outliers":
        a[:, ::97] *= 100
    assert takes_float16(a, b, fp16_x3, not deep, deep)


@pytest.mark.any_version
@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize(
    "kind", ["terms of all sizes", "elements of all sizes", "a large term", "one term"]
)
def test_data_that_float16_leaves_to_bfloat16(kind, deep, fp16_x3):
    a, b = floats(kind, 40, 24, 1100)
    if kind == "one term":
        b = np.eye(1100, 24, dtype=np.float32)
    assert not takes_float16(a, b, fp16_x3, not deep, deep)


@pytest.mark.any_version
@pytest.mark.parametrize("exponent", [-149, -120, -90])
def test_rows_and_columns_of_tiny_elements(exponent, bf16_x6):
    """Sums are scaled back by less than the smallest float, whose square they do not exceed."""
    a, b = np.full((3, 4096), 2.0**exponent, "float32"), np.full((4096, 5), 2.0**-90, "float32")
    y = jax_gpuops.matmul(a, b, **bf16_x6)
    np.testing.assert_array_equal(np.asarray(y), np.float32(4096 * 2.0 ** (exponent - 90)))


@pytest.mark.kernel
def test_tiny_elements_cost_a_unit_at_most(fp16_x3):
    """As many as may be, whose last bits float16 has not, by the largest of the other factor."""
    a, b = 2.0**-9 * numbers((8, 256)), 2.0**-9 * numbers((256, 8), seed=1)
    a[:, :12], b[:12] = 2.0**-18 * (1 + 2.0**-7 - 2.0**-21), 1.99
    a[:, 12] = 1
    a, b = a.astype(np.float32), b.astype(np.float32)
    assert takes_float16(a, b, fp16_x3)
    assert error(jax_gpuops.matmul(a, b, **fp16_x3), a, b) <= 9 + 4


@pytest.mark.kernel
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_special_values_go_through_to_fmas(value, fp16_x3):
    a, b = numbers((20, 300)), numbers((300, 30), seed=1)
    a[3, 299] = value
    y, z = (
        np.asarray(jax_gpuops.matmul(a, b, **{**fp16_x3, "algorithm": algorithm}))
        for algorithm in ("fp16_x3", "double_buffered")
    )
    np.testing.assert_array_equal(y, z)


@pytest.mark.kernel
def test_one_execution_by_each_kernel_after_another(fp16_x3):
    """What is reported, in workspace that XLA uses again, says nothing of the next execution."""
    b = jnp.asarray(numbers((256, 40), seed=1))
    jitted = {
        algorithm: jax.jit(
            lambda a, how={**fp16_x3, "algorithm": algorithm}: jax_gpuops.matmul(a, b, **how)
        )
        for algorithm in ("fp16_x3", "bf16_x6", "double_buffered")
    }
    in_range = numbers((40, 256))
    wide, special = in_range.copy(), in_range.copy()
    wide[3, 5:], special[3, 5] = 1e-9, np.nan
    first = np.asarray(jitted["fp16_x3"](in_range))
    assert not np.array_equal(first, jitted["bf16_x6"](in_range))
    for _ in range(2):
        np.testing.assert_array_equal(jitted["fp16_x3"](wide), jitted["bf16_x6"](wide))
        np.testing.assert_array_equal(
            jitted["fp16_x3"](special), jitted["double_buffered"](special)
        )
        np.testing.assert_array_equal(jitted["fp16_x3"](in_range), first)


# Order, plan, derivatives


@pytest.mark.kernel
@pytest.mark.parametrize("sizes", [(40, 24, 200), (136, 132, 72)], ids=str)
def test_any_order_of_threads(sizes, parts):
    if parts["implementation"] != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    m, n, k = sizes
    a, b = helpers.normal((2, m, k), "float32"), helpers.normal((2, k, n), "float32", seed=1)
    helpers.under_each_schedule(
        lambda: jax_gpuops.matmul(a, b, **parts),
        [(1, {}), (2, {}), (3, {"warp": 4}), (4, {"warp": 8}), (5, {"block": 1})],
    )


@pytest.mark.kernel
def test_repeats_are_bit_identical(parts):
    a, b = helpers.normal((200, 132), "float32"), helpers.normal((132, 136), "float32", seed=1)
    runs = [np.asarray(jax_gpuops.matmul(a, b, **parts)).view(np.int32) for _ in range(3)]
    np.testing.assert_array_equal(runs[0], runs[1])
    np.testing.assert_array_equal(runs[0], runs[2])


@pytest.mark.kernel
def test_one_execution_leaves_nothing_to_the_next(parts):
    """What is reported of one factor, in workspace that XLA uses again, says nothing of another."""
    b = jnp.asarray(helpers.normal((72, 40), "float32", seed=1))
    function = jax.jit(lambda a: jax_gpuops.matmul(a, b, **parts))
    a = helpers.normal((40, 72), "float32")
    special = a.copy()
    special[3, 5] = np.nan
    for each in (a, special, a):
        assert_like_sgemm(function(jnp.asarray(each)), each, np.asarray(b))


def plan(implementation, sizes, precision, dtype="float32", **how):
    m, n, k = sizes
    how |= {"implementation": implementation, "precision": precision}
    return jax_gpuops.plan("matmul", [(m, k), (k, n)], dtype, **how)


def test_the_plan_takes_them_for_the_highest_precision(parts):
    implementation = parts["implementation"]
    for sizes in ((768, 768, 768), (1024, 1024, 1024), (4096, 4096, 1024), (129, 4096, 2048)):
        for precision in ("highest", "float32"):
            assert plan(implementation, sizes, precision).algorithm in FEW_TERMS, sizes
        assert plan(implementation, sizes, "F32_F32_F32").algorithm not in FEW_TERMS
        assert plan(implementation, sizes, None).algorithm == "tensor_core"


def test_the_plan_takes_float16_for_large_products_of_many_terms(parts):
    implementation = parts["implementation"]
    for sizes in ((4096, 4096, 1024), (4096, 4096, 256), (4097, 4095, 4099)):
        assert plan(implementation, sizes, "highest").algorithm == "fp16_x3"
    for sizes in ((4096, 4096, 255), (4096, 4096, 128)):
        assert plan(implementation, sizes, "highest").algorithm == "bf16_x6"


def test_the_plan_does_not_take_them_where_fmas_are_done_first_or_more_exact(parts):
    implementation = parts["implementation"]
    for sizes in ((4096, 4096, 127), (64, 4096, 4096), (4096, 8, 4096), (128, 128, 127)):
        assert plan(implementation, sizes, "highest").algorithm not in FEW_TERMS


def test_the_preset_of_its_name_takes_bf16_x6_for_any_size(bf16_x6):
    implementation = bf16_x6["implementation"]
    for sizes in ((1, 1, 1), (4096, 8, 63), (512, 512, 512), (4096, 4096, 4096)):
        assert plan(implementation, sizes, "BF16_BF16_F32_X6").algorithm == "bf16_x6"


@pytest.mark.kernel
def test_a_product_by_its_preset(bf16_x6):
    a, b = floats("uniform", 20, 30, 100)
    y = jax_gpuops.matmul(
        a, b, precision="BF16_BF16_F32_X6", implementation=bf16_x6["implementation"]
    )
    assert_exact(y, a, b, "bf16_x6")


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (
            lambda x, **how: jax_gpuops.gemm(x[:, :0], x[:0], x, beta=1, **how),
            "supports c, a bias and an activation only for a depth k of at least 1",
        ),
        (
            lambda x, **how: jax_gpuops.matmul(x, x, precision="F32_F32_F32", **how),
            "multiplies float32 .* not .*F32_F32_F32",
        ),
        (
            lambda x, **how: jax_gpuops.matmul(x.astype("bfloat16"), x.astype("bfloat16"), **how),
            "supports only float32, not bfloat16",
        ),
        (
            lambda x, **how: jax_gpuops.linear(x[:, :0], x[:0], x[0], precision="highest", **how),
            "supports c, a bias and an activation only for a depth k of at least 1",
        ),
    ],
)
def test_what_they_refuse(call, why, parts):
    with pytest.raises(ValueError, match=f"algorithm '{parts['algorithm']}' {why}"):
        call(jnp.ones((16, 16)), **parts)


def test_float16_refuses_depths_that_its_counts_do_not_hold(fp16_x3):
    implementation = fp16_x3["implementation"]
    plan(implementation, (8, 8, 2**26), "highest", algorithm="fp16_x3")
    with pytest.raises(ValueError, match=r"'fp16_x3' supports a depth k of at most 2\^26"):
        plan(implementation, (8, 8, 2**26 + 1), "highest", algorithm="fp16_x3")


@pytest.mark.parametrize("algorithm", ["tensor_core", "split_k", "double_buffered", "fp16_x3"])
def test_other_algorithms_refuse_the_preset_of_bf16_x6(algorithm, bf16_x6):
    how = {"implementation": bf16_x6["implementation"], "algorithm": algorithm}
    with pytest.raises(ValueError, match=f"'{algorithm}' multiplies float32 .*BF16_BF16_F32_X6"):
        jax_gpuops.matmul(*[jnp.ones((8, 8))] * 2, precision="BF16_BF16_F32_X6", **how)


@pytest.mark.any_version
def test_derivatives_of_any_order(parts):
    a, b = helpers.normal((3, 4), "float32"), helpers.normal((4, 2), "float32", seed=1)
    check_grads(
        lambda a, b: jax_gpuops.matmul(a, b, **parts),
        (a, b),
        order=2,
        modes=["fwd", "rev"],
        atol=1e-2,
        rtol=1e-2,
        eps=1e-2,
    )


@pytest.mark.kernel
def test_gradients(parts):
    """The factors of a gradient are stored in other orders than those of the product."""
    a, b = helpers.normal((72, 40), "float32"), helpers.normal((40, 136), "float32", seed=1)
    g = helpers.normal((72, 136), "float32", seed=2)
    _, pull = jax.vjp(lambda a, b: jax_gpuops.matmul(a, b, **parts), a, b)
    a_bar, b_bar = pull(jnp.asarray(g))
    assert_exact(a_bar, g, helpers.swap(b), parts["algorithm"])
    assert_exact(b_bar, helpers.swap(a), g, parts["algorithm"])


@pytest.mark.kernel
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_vmap(axes, parts):
    a, b = helpers.normal((3, 20, 70), "float32"), helpers.normal((3, 70, 12), "float32", seed=1)
    a, b = a if axes[0] == 0 else a[0], b if axes[1] == 0 else b[0]
    y = jax.jit(jax.vmap(lambda a, b: jax_gpuops.matmul(a, b, **parts), axes))(a, b)
    for i in range(3):
        assert_exact(
            y[i], a if axes[0] is None else a[i], b if axes[1] is None else b[i], parts["algorithm"]
        )


def test_jit_has_the_custom_call(parts):
    x = jnp.ones((16, 16))
    calls = helpers.custom_calls(lambda x: jax_gpuops.matmul(x, x, **parts), x)
    assert any(call.startswith("jax_gpuops_gemm_v2") for call in calls)
