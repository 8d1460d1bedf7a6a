"""softmax_cross_entropy_with_integer_labels against float64 and against optax."""

import functools
import itertools
import math

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.test_util import check_grads

import jax_gpuops
from jax_gpuops import _cross_entropy, _softmax

ROWS = ("warp", "small_block", "block", "block_two_pass", "split", "cluster", "cluster_shared")
PRODUCTION = helpers.algorithms("softmax", "staged", "strided", *ROWS)
MASKED = helpers.algorithms("softmax", "strided", *ROWS)
LONGEST = {"warp": 8000, "small_block": 16_000, "block": 64_000}  # bytes of a row
ALONG_COLUMNS = ("strip", "column_two_pass", "column_split")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

ours = jax_gpuops.softmax_cross_entropy_with_integer_labels
upstream = optax.softmax_cross_entropy_with_integer_labels


def random_labels(shape, classes, seed=0):
    return np.random.default_rng(seed).integers(0, classes, shape).astype(np.int32)


def reference(x, labels, axis=-1, where=None):
    """The loss of labels that are classes, in extended precision."""
    x = helpers.exact(x)
    kept = np.broadcast_to(True if where is None else where, x.shape)
    largest = np.where(kept, x, -np.inf).max(axis, keepdims=True)
    total = np.exp(np.where(kept, x, -np.inf) - largest).sum(axis, keepdims=True)
    label_logit = np.take_along_axis(x, np.expand_dims(labels, axis), axis)
    return np.squeeze(np.log(total) - (label_logit - largest), axis)


def assert_accurate(actual, x, labels, axis=-1, **options):
    """Checks that the loss errs by some roundings of the largest logit, and by its own."""
    expected = reference(x, labels, axis, **options)
    actual = np.asarray(actual)
    assert actual.dtype == x.dtype
    assert actual.shape == expected.shape
    accumulator = np.float64 if x.dtype == np.float64 else np.float32
    largest = np.abs(helpers.exact(x)).max(axis)
    roundings = 8 * np.finfo(accumulator).eps * (1 + largest + np.abs(expected))
    bound = roundings + helpers.spacing(expected, x.dtype)
    assert np.all(np.abs(helpers.exact(actual) - expected) <= bound), x.shape


def assert_accurate_gradient(actual, x, labels, g, axis=-1, where=None):
    """Checks `(softmax - one_hot) * g` to some roundings of its two terms and of exp's argument."""
    accumulator = np.float64 if x.dtype == np.float64 else np.float32
    weights, argument, one_hot = exact_parts(x, labels, axis, where)
    g = np.expand_dims(helpers.exact(g), axis)
    expected = (weights - one_hot) * g
    roundings = (8 + 2 * argument) * np.finfo(accumulator).eps * (weights + one_hot) * np.abs(g)
    bound = roundings + helpers.spacing(expected, actual.dtype)
    assert np.all(np.abs(helpers.exact(actual) - expected) <= bound), x.shape


def exact_parts(x, labels, axis=-1, where=None):
    """Softmax of the logits, what exp may be taken of for it, and what the labels select.

    The argument is `(x - max(x)) - log(sum)`: however large the logits are, it is not.
    """
    x, kept = helpers.exact(x), np.broadcast_to(True if where is None else where, x.shape)
    one_hot = np.zeros(x.shape)
    np.put_along_axis(one_hot, np.expand_dims(labels, axis), 1, axis)
    included = np.where(kept, x, -np.inf)
    shifted = included - included.max(axis, keepdims=True)
    log_sum = np.log(np.exp(shifted).sum(axis, keepdims=True))
    argument = np.where(kept, np.abs(shifted) + log_sum, 0)
    return np.exp(shifted - log_sum), argument, one_hot


# Values. Cases share programs: compiling takes most of the time of small ones.


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("algorithm", PRODUCTION)
def test_every_production_algorithm(algorithm, dtype, implementation):
    cases = [
        (helpers.normal((5, classes), dtype, scale=4), random_labels(5, classes))
        for classes in (1, 2, 31, 33, 127, 1001, 1023)
    ]
    function = functools.partial(ours, implementation=implementation, algorithm=algorithm)
    with helpers.x64(dtype):
        ys = jax.jit(lambda cases: [function(*each) for each in cases])(cases)
    for (x, labels), y in zip(cases, ys, strict=True):
        assert_accurate(y, x, labels)


@pytest.mark.kernel
@pytest.mark.parametrize("algorithm", ["strided", "column", "column_two_pass", "column_split"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_another_axis(algorithm, axis, masked, implementation):
    x = helpers.normal((7, 9, 12), "float32", scale=4)
    shape = x.shape[:axis] + x.shape[axis + 1 :]
    labels = random_labels(shape, x.shape[axis])
    options = {"where": np.random.default_rng(0).random(x.shape) < 0.8} if masked else {}
    y = ours(x, labels, axis, implementation=implementation, algorithm=algorithm, **options)
    assert_accurate(y, x, labels, axis, **options)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_many_classes_along_another_axis(dtype, implementation):
    """By a block and by a cluster, where they hold strips; and where threads read it twice."""
    for shape, algorithm in itertools.product(((2, 300, 72), (3000, 200)), ALONG_COLUMNS):
        axis = len(shape) - 2
        if helpers.refusal("softmax", algorithm, shape, dtype, axis=axis):
            continue
        x = helpers.normal(shape, dtype, scale=4)
        labels = random_labels(shape[:axis] + shape[axis + 1 :], shape[axis])
        y = ours(x, labels, axis, implementation=implementation, algorithm=algorithm)
        assert_accurate(y, x, labels, axis)


@pytest.mark.parametrize("algorithm", PRODUCTION)
@pytest.mark.parametrize("special", ["-inf", "inf", "nan", "all -inf", "label -inf"])
def test_infinities_and_nan_as_in_optax(algorithm, special, implementation):
    x = helpers.normal((3, 300), "float32")
    labels = np.array([4, 5, 299], np.int32)
    if special == "all -inf":
        x[1] = -np.inf
    elif special == "label -inf":
        x[1, 5] = -np.inf
    else:
        x[1, 77] = float(special)
    y = ours(x, labels, implementation=implementation, algorithm=algorithm)
    np.testing.assert_allclose(y, upstream(x, labels), rtol=1e-5, atol=1e-6)


# Labels


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("algorithm", [*PRODUCTION, "column"])
def test_rows_of_large_logits(algorithm, dtype, implementation):
    """Equal but for one that is further down: the loss is that of a few classes that are level."""
    axis = 0 if algorithm == "column" else -1
    values = [-1e4, 1e5, -1e9, 3e9, -1e30, 1e38, float(jnp.finfo(dtype).min)]
    x = np.tile(np.array(values, dtype)[:, None], 24)
    x[:4:2, 5] *= 4
    x[1:6:2, 5] = -1e38
    labels = np.arange(len(x), dtype=np.int32)
    if axis == 0:
        x = np.ascontiguousarray(x.T)
    y = ours(x, labels, axis, implementation=implementation, algorithm=algorithm)
    expected = reference(x, labels, axis)
    bound = 8 * np.finfo(np.float32).eps * expected + helpers.spacing(expected, x.dtype)
    assert np.all(np.abs(helpers.exact(y) - expected) <= bound)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_of_large_logits_are_finite(dtype, implementation):
    """The loss of a padded row does not count: 0 times its gradient must not be NaN."""
    values = [-1e4, 1e5, -1e9, 3e9, -1e30, 1e38, float(jnp.finfo(dtype).min)]
    x = np.tile(np.array(values, dtype)[:, None], 24)
    labels = np.arange(len(x), dtype=np.int32)
    _, pullback = jax.vjp(lambda x: ours(x, labels, implementation=implementation), x)
    np.testing.assert_array_equal(pullback(jnp.zeros(len(x), dtype))[0], np.zeros(x.shape))
    of_ones = np.asarray(pullback(jnp.ones(len(x), dtype))[0], np.float32)
    assert np.all(np.abs(of_ones) <= 1.0)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("each", ["ours", None])
def test_labels_of_every_integer_dtype(dtype, each, implementation):
    """The extremes of the dtype are no classes, unless they are -1 and the like."""
    with jax.enable_x64(True):
        x = helpers.normal((8, 10), "float32")
        limits = np.iinfo(dtype)
        labels = np.array([0, 9, 10, limits.max, limits.max - 1, limits.min, 5, 1], dtype)
        y = ours(x, labels, implementation=implementation if each == "ours" else None)
    expected = reference(x, np.where((labels < 10) & (labels >= 0), labels, 0).astype(int))
    expected = np.where((labels < 10) & (labels >= 0), expected, np.nan)
    np.testing.assert_allclose(y, expected.astype(np.float32), rtol=1e-5, atol=1e-6)


NEGATIVE_AND_WRONG = np.array([-1, -10, -11, -100, 10, 2**31 - 1, -(2**31), 0], np.int32)


@pytest.mark.kernel
@pytest.mark.parametrize("algorithm", [None, *PRODUCTION])
def test_negative_labels_and_labels_out_of_range_as_in_optax(algorithm, implementation):
    """-1 is the last class; what is none gives NaN, and nothing is read out of bounds."""
    x = helpers.normal((8, 10), "float32")
    y = ours(x, NEGATIVE_AND_WRONG, implementation=implementation, algorithm=algorithm)
    np.testing.assert_array_equal(np.isnan(y), [0, 0, 1, 1, 1, 1, 1, 0])
    np.testing.assert_allclose(y, upstream(x, NEGATIVE_AND_WRONG), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("each", ["ours", None])
def test_gradient_of_labels_out_of_range_as_in_optax(each, implementation):
    """Such a loss depends on no label's logit: what remains is the gradient of logsumexp."""
    x = helpers.normal((8, 10), "float32")

    def gradient(function, **kwargs):
        return jax.grad(lambda x: function(x, NEGATIVE_AND_WRONG, **kwargs).sum())(x)

    actual = gradient(ours, implementation=implementation if each == "ours" else None)
    np.testing.assert_allclose(actual, gradient(upstream), rtol=1e-5, atol=1e-6)


# Masks and axes


WHERE = {
    "logits": np.random.default_rng(0).random((4, 5, 6)) < 0.7,
    "batch": np.random.default_rng(0).random((4, 5)) < 0.6,
    "classes": np.arange(6)[None, None] % 3 != 1,
    "first dim": np.arange(4)[:, None, None] % 2 == 0,
    "second dim": np.arange(5)[None, :, None] != 2,
    "nothing": np.zeros((4, 5, 6), bool),
}


def under_each_mask(function, x, labels, masks):
    """The results by the masks' names, of one program."""

    @jax.jit
    def run(x, masks):
        return {name: function(x, labels, where=where) for name, where in masks.items()}

    return run(x, masks)


@functools.cache
def optax_under_each_mask(classes):
    """Operands, masks, and what optax gives for them."""
    x = helpers.normal((4, 5, classes), "float32", scale=3)
    labels = random_labels((4, 5), classes)
    masks = {
        name: where
        if where.ndim == 2 or where.shape[-1] == 1
        else np.resize(where, (*where.shape[:2], classes))
        for name, where in WHERE.items()
    }
    return x, labels, masks, under_each_mask(upstream, x, labels, masks)


@pytest.mark.kernel
@pytest.mark.parametrize("algorithm", [None, "strided", *helpers.algorithms("softmax", *ROWS)])
@pytest.mark.parametrize("classes", [6, 8])
def test_where_as_in_optax(algorithm, classes, implementation):
    x, labels, masks, expected = optax_under_each_mask(classes)
    if algorithm and (why := helpers.refusal("softmax", algorithm, x.shape, where=x < 0)):
        pytest.skip(why)
    each = functools.partial(ours, implementation=implementation, algorithm=algorithm)
    for name, y in under_each_mask(each, x, labels, masks).items():
        np.testing.assert_allclose(y, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("each", ["ours", None])
def test_gradient_of_masked_losses_as_in_optax(each, implementation):
    x = helpers.normal((4, 5, 6), "float32", scale=3)
    labels = random_labels((4, 5), 6)

    def gradients(function, **kwargs):
        def loss(x, where):
            return (function(x, labels, where=where, **kwargs) ** 2).sum()

        masks = WHERE.values()
        return jax.jit(lambda x, masks: [jax.grad(loss)(x, each) for each in masks])(x, [*masks])

    actual = gradients(ours, implementation=implementation if each == "ours" else None)
    for name, ours_, expected in zip(WHERE, actual, gradients(upstream), strict=True):
        np.testing.assert_allclose(ours_, expected, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("axis", [(), (1, 2), (2, 1), (0, 2), (0,), (-1, 0, 1)])
@pytest.mark.parametrize("where", [None, "batch", "logits"])
def test_several_axes_as_in_optax(axis, where, implementation):
    x = helpers.normal((4, 5, 6), "float32")
    axes = [a % 3 for a in axis]
    batch = tuple(n for d, n in enumerate(x.shape) if d not in axes)
    labels = random_labels(batch, int(np.prod([x.shape[a] for a in axes])))
    mask_shape = {"batch": batch, "logits": x.shape}.get(where)
    mask = None if where is None else np.random.default_rng(1).random(mask_shape) < 0.7

    def results(function, x, **kwargs):
        def loss(x):
            return (function(x, labels, axis, where=mask, **kwargs) ** 2).sum()

        return jax.value_and_grad(loss)(x)

    @jax.jit  # one program is compiled faster than three
    def each_result(x):
        of_ours = [results(ours, x, implementation=each) for each in (implementation, None)]
        return results(upstream, x), of_ours

    expected, of_ours = each_result(x)
    for actual in of_ours:
        np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
        np.testing.assert_allclose(actual[1], expected[1], rtol=1e-4, atol=1e-5)


def test_labels_broadcast_as_in_optax(implementation):
    x, labels = helpers.normal((4, 5, 6), "float32"), random_labels((1, 5), 6)
    y = ours(x, labels, implementation=implementation)
    np.testing.assert_allclose(y, upstream(x, labels), rtol=1e-5, atol=1e-6)


@pytest.mark.kernel
@pytest.mark.parametrize("shape", [(0, 4), (3, 0, 4)])
def test_empty_batches(shape, implementation):
    y = ours(jnp.zeros(shape), jnp.zeros(shape[:-1], int), implementation=implementation)
    assert y.shape == shape[:-1]


@pytest.mark.parametrize("dtype", helpers.FLOATS)
def test_dtypes_as_in_optax(dtype):
    with helpers.x64(dtype):
        x, labels = helpers.normal((3, 4), dtype), random_labels(3, 4)
        for function in (ours, upstream):
            gradient = jax.eval_shape(jax.grad(lambda x: function(x, labels).sum()), x)  # noqa: B023
            assert gradient.dtype == x.dtype
        assert ours(x, labels).dtype == upstream(x, labels).dtype


# Derivatives


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("masked", [False, True])
def test_gradient(masked, dtype, implementation):
    cases = []
    for classes in (1, 31, 33, 127, 1001):
        x, g = helpers.normal((5, classes), dtype, scale=3), helpers.normal(5, dtype, seed=1)
        where = np.random.default_rng(1).random(x.shape) < 0.6 if masked else None
        if masked:
            where[:, 0] = True  # a row without elements has no loss
        cases.append((x, random_labels(5, classes), g, where))

    def gradient(x, labels, g, where):
        loss = functools.partial(ours, where=where, implementation=implementation)
        return jax.vjp(lambda x: loss(x, labels), x)[1](g)[0]

    with helpers.x64(dtype):
        gradients = jax.jit(lambda cases: [gradient(*each) for each in cases])(cases)
    for (x, labels, g, where), actual in zip(cases, gradients, strict=True):
        assert actual.dtype == x.dtype
        assert_accurate_gradient(actual, x, labels, g, where=where)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("algorithm", ["elementwise", "flat"])
def test_gradient_by_every_kernel(algorithm, dtype, implementation):
    """Packs hold elements of many rows, of two, or of one; the last may be cut off."""
    cases = []
    for rows, classes in ((23, 1), (17, 2), (9, 3), (5, 9), (4, 16), (31, 33), (3, 257), (1, 2500)):
        x, g = helpers.normal((rows, classes), dtype, scale=3), helpers.normal(rows, dtype, seed=1)
        cases.append((x, random_labels(rows, classes).astype(("int32", "int64")[rows % 2]), g))
    kernel = {"implementation": implementation, "algorithm": algorithm}

    def gradient(x, labels, g):
        accumulator = "float64" if dtype == "float64" else "float32"
        _, *residuals = _softmax._logsumexp_with_residuals_p.bind(
            x, axes=(1,), scale=1.0, causal=False, implementation="xla", algorithm=None
        )
        return _cross_entropy._cross_entropy_cotangent_p.bind(
            x, *residuals, g.astype(accumulator), labels, axes=(1,), **kernel
        )

    with jax.enable_x64(True):
        gradients = jax.jit(lambda cases: [gradient(*each) for each in cases])(cases)
    for (x, labels, g), actual in zip(cases, gradients, strict=True):
        assert_accurate_gradient(actual, x, labels, g)


def masks_of_any_phase(shape):
    """Whose rows lie as those of the array do, or not; a row without elements has no loss."""
    rng = np.random.default_rng(0)
    leading, rows, columns = shape
    shapes = [shape, (1, rows, columns), (leading, 1, columns), (1, 1, columns)]
    return [(rng.random(each) < 0.6) | (np.arange(columns) == 0) for each in shapes]


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("algorithm", MASKED)
def test_masks_of_rows_of_any_phase(algorithm, dtype, implementation):
    """The loss, and its gradient, which is of no named algorithm: on the host, with one of them."""
    has_gradient = implementation == "cuda" or algorithm == "block_two_pass"  # takes all lengths
    size = jnp.dtype(dtype).itemsize
    lengths = (1, 7, 9, 197, 1500, 9001)
    lengths = [n for n in lengths if n * size <= LONGEST.get(algorithm, math.inf)]
    cases = [
        (helpers.normal((2, 3, n), dtype, scale=4), random_labels((2, 3), n), where)
        for i, n in enumerate(lengths)
        for j, where in enumerate(masks_of_any_phase((2, 3, n))[: 4 if n < 9001 else 2])
        if helpers.taken_in_turn(i + j, dtype)
    ]
    g = helpers.normal((2, 3), dtype, seed=1)

    def loss_and_gradient(x, labels, where):
        how = {"where": where, "implementation": implementation, "algorithm": algorithm}
        if not has_gradient:
            return ours(x, labels, **how), None
        loss, pullback = jax.vjp(lambda x: ours(x, labels, **how), x)
        return loss, pullback(jnp.asarray(g))[0]

    with helpers.x64(dtype):
        results = jax.jit(lambda cases: [loss_and_gradient(*each) for each in cases])(cases)
    for (x, labels, where), (loss, gradient) in zip(cases, results, strict=True):
        assert_accurate(loss, x, labels, where=where)
        if has_gradient:
            assert_accurate_gradient(gradient, x, labels, g, where=where)


@pytest.mark.any_version
@pytest.mark.parametrize("each", ["ours", "xla", None])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_derivatives_are_as_exact_at_any_offset(dtype, masked, each, implementation):
    """Of all logits by the same number, which changes no derivative, of any order."""
    implementation = implementation if each == "ours" else each
    xs = [helpers.with_offset(offset, (5, 301), dtype) for offset in helpers.OFFSETS]
    labels, v = random_labels(5, 301), helpers.normal((5, 301), "float32", seed=1).astype(dtype)
    where = np.random.default_rng(1).random((5, 301)) < 0.6 if masked else None

    def derivatives(x):
        def loss(x):
            return ours(x, labels, where=where, implementation=implementation)

        gradient, second = jax.jvp(jax.grad(lambda x: loss(x).astype("float32").sum()), (x,), (v,))
        return gradient, jax.jvp(loss, (x,), (v,))[1], second

    def assert_close(actual, expected, terms):
        bound = np.finfo(np.float32).eps * terms + helpers.spacing(expected, dtype)
        error = np.abs(helpers.exact(actual) - expected)
        assert np.all(error <= bound), x[0, 0]

    results = jax.jit(lambda xs: [derivatives(x) for x in xs])(xs)
    for x, (gradient, tangent, second) in zip(xs, results, strict=True):
        assert_accurate_gradient(gradient, x, labels, np.ones(5, np.float32), where=where)
        weights, argument, one_hot = exact_parts(x, labels, where=where)
        weights_v, v_of_label = weights * helpers.exact(v), one_hot * helpers.exact(v)
        total = weights_v.sum(-1, keepdims=True)
        roundings = 16 + 2 * argument
        terms = (roundings * np.abs(weights_v) + np.abs(v_of_label)).sum(-1)
        assert_close(tangent, total[:, 0] - v_of_label.sum(-1), terms)
        terms = (roundings * np.abs(weights_v)).sum(-1, keepdims=True)
        terms = roundings * np.abs(weights_v) + weights * (terms + roundings * np.abs(total))
        assert_close(second, weights_v - weights * total, terms)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("masked", [False, True])
def test_gradient_on_another_axis(masked, dtype, implementation):
    """Threads take few classes of a pixel, or up to 32, and packs of pixels where there are any."""
    many = 512 * helpers.multiprocessors(implementation) + 8
    shapes = ((2, 3, 8), (3, 21, 9), (1, 2500, 2), (2, 37, many), (2, 37, many - 3))
    cases = []
    for i, shape in enumerate(shapes):
        outer, classes, inner = shape
        if inner > 9 and not helpers.taken_in_turn(i, dtype):
            continue
        x, g = helpers.normal(shape, dtype, scale=3), helpers.normal((outer, inner), dtype, seed=1)
        where = np.random.default_rng(1).random(shape) < 0.6 if masked else None
        if masked:
            where[:, 0] = True
        cases.append((x, random_labels((outer, inner), classes), g, where))

    def gradient(x, labels, g, where):
        loss = functools.partial(ours, axis=1, where=where, implementation=implementation)
        return jax.vjp(lambda x: loss(x, labels), x)[1](g)[0]

    with helpers.x64(dtype):
        gradients = jax.jit(lambda cases: [gradient(*each) for each in cases])(cases)
    for (x, labels, g, where), actual in zip(cases, gradients, strict=True):
        assert_accurate_gradient(actual, x, labels, g, axis=1, where=where)


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("shape_of", "expected"),
    [
        (lambda n: (1, 21, 1024 * n), {"pack": 2, "lanes": 1, "packs": 7, "steps": 3}),
        (lambda n: (1, 21, 1024 * n - 1), {"pack": 1, "lanes": 1, "packs": 21, "steps": 1}),
        (lambda n: (64 * n, 80, 4), {"pack": 2, "lanes": 16, "packs": 5, "steps": 1}),
        (lambda n: (1, 3, 2 * n), {"pack": 1, "lanes": 1, "packs": 1, "steps": 3}),
    ],
    ids=["packs of pixels", "single pixels", "16 threads share an axis", "a thread per element"],
)
def test_threads_of_a_gradient_on_another_axis(shape_of, expected, implementation):
    shape = shape_of(helpers.multiprocessors(implementation))
    x = jnp.zeros(shape)
    labels = jnp.zeros((shape[0], shape[2]), int)
    with helpers.recorded(implementation) as executions:
        jax.grad(lambda x: ours(x, labels, 1, implementation=implementation).sum())(x)
    (gradient,) = (each for each in executions if each["algorithm"] == "elementwise")
    assert {key: gradient["config"][key] for key in expected} == expected


@pytest.mark.any_version
@pytest.mark.parametrize(
    "where", [None, np.array([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], bool)]
)
@pytest.mark.parametrize("axis", [0, 1])
def test_derivatives_of_any_order(where, axis, implementation):
    """In float64, where differences are close; test_transforms has float32."""
    with jax.enable_x64(True):
        x = helpers.normal((3, 4), "float64")
        labels = random_labels(x.shape[1 - axis], x.shape[axis])
        check_grads(
            lambda x: ours(x, labels, axis, where, implementation=implementation),
            (jnp.asarray(x),),
            order=2,
            modes=["fwd", "rev"],
        )


@pytest.mark.parametrize("special", [-np.inf, np.inf, np.nan])
@pytest.mark.parametrize("each", ["ours", None])
def test_gradients_of_special_rows_as_in_optax(special, each, implementation):
    x = helpers.normal((3, 7), "float32")
    x[0, 2] = x[1] = special
    labels = np.array([3, 4, 5], np.int32)

    def gradient(function, **kwargs):
        return jax.grad(lambda x: function(x, labels, **kwargs).sum())(x)

    actual = gradient(ours, implementation=implementation if each == "ours" else None)
    np.testing.assert_allclose(actual, gradient(upstream), atol=1e-6)


def test_labels_have_no_gradient(implementation):
    x, labels = jnp.zeros((3, 4)), jnp.zeros(3, int)
    gradient = jax.grad(
        lambda x, labels: ours(x, labels, implementation=implementation).sum(), 1, allow_int=True
    )(x, labels)
    assert gradient.dtype == jax.dtypes.float0


@pytest.mark.parametrize(("x_axis", "labels_axis", "where_axis"), [(0, 0, None), (1, None, 0)])
def test_vmap(x_axis, labels_axis, where_axis, implementation):
    x = helpers.normal((5, 5, 7), "float32")
    labels = random_labels((5, 5) if labels_axis is not None else 5, 7)
    where = np.random.default_rng(0).random((5, 5, 7) if where_axis is not None else (5, 7)) < 0.7

    def mapped(function, **kwargs):
        def loss(x, labels, where):
            return function(x, labels, where=where, **kwargs).sum()

        axes = (x_axis, labels_axis, where_axis)
        return jax.jit(jax.vmap(jax.value_and_grad(loss), axes))(x, labels, where)

    actual, expected = mapped(ours, implementation=implementation), mapped(upstream)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), actual, expected
    )


def test_an_axis_that_is_an_integer_of_numpy(implementation):
    x, labels = helpers.normal((3, 5), "float32"), random_labels((3,), 5)
    y = ours(x, labels, np.int64(1), implementation=implementation)
    assert_accurate(y, x, labels, 1)


@pytest.mark.parametrize("masked", [False, True])
def test_export_with_symbolic_shapes(masked, implementation):
    def function(x, labels):
        options = {"where": x > -1} if masked else {}
        return ours(x, labels, implementation=implementation, **options).sum()

    rows, classes = jax.export.symbolic_shape("r, c")
    exported = jax.export.export(
        jax.jit(jax.value_and_grad(function)),
        platforms=[{"interpret": "cpu"}.get(implementation, implementation)],
        disabled_checks=jax_gpuops.EXPORT_CHECKS,
    )(
        jax.ShapeDtypeStruct((rows, classes), "float32"),
        jax.ShapeDtypeStruct((rows,), "int32"),
    )
    for shape in ((5, 33), (2, 40000)):
        x, labels = helpers.normal(shape, "float32"), random_labels(shape[0], shape[1])
        options = {"where": x > -1} if masked else {}
        expected = jax.value_and_grad(lambda x: upstream(x, labels, **options).sum())(x)  # noqa: B023
        for a, e in zip(exported.call(x, labels), expected, strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)


# Memory


def compiled(function, *arguments, **jit_options) -> str:
    text = jax.jit(function, **jit_options).lower(*arguments).compile().as_text()
    assert "jax_gpuops_cross_entropy_v2" in text
    assert "jax_gpuops_cross_entropy_cotangent_v2" in text
    return text


def copies(text: str, array: str) -> int:
    return sum(f"= {array}" in line and " copy(" in line for line in text.splitlines())


def test_the_gradient_takes_the_memory_of_the_logits(implementation):
    """Of intermediates and of donated arguments; one that must stay is copied."""
    labels = jnp.zeros(64, int)

    def loss(x):
        return ours(x, labels, implementation=implementation).sum()

    def of_intermediate(x):
        return jax.value_and_grad(loss)(jax.lax.optimization_barrier(2 * x))

    x = jnp.zeros((64, 128), jnp.bfloat16)
    assert copies(compiled(of_intermediate, x), "bf16[64,128]") == 0
    donated = compiled(jax.value_and_grad(loss), x, donate_argnums=0)
    assert copies(donated, "bf16[64,128]") == 0
    assert "input_output_alias" in donated
    assert copies(compiled(jax.value_and_grad(loss), x), "bf16[64,128]") == 1


def test_no_wide_copy_and_no_one_hot_of_the_logits(implementation):
    labels = jnp.zeros(64, int)
    text = compiled(
        jax.grad(lambda x: ours(x, labels, implementation=implementation).sum()),
        jnp.zeros((64, 128), jnp.bfloat16),
    )
    for dtype in ("f32", "pred", "s32"):
        assert f"{dtype}[64,128]" not in text


def test_repeats_are_bit_identical(implementation):
    x, labels = helpers.normal((9, 333), "float32", scale=5), random_labels(9, 333)
    step = jax.jit(
        jax.value_and_grad(lambda x: ours(x, labels, implementation=implementation).sum())
    )
    runs = [jax.tree.map(np.asarray, step(x)) for _ in range(3)]
    for other in runs[1:]:
        jax.tree.map(np.testing.assert_array_equal, runs[0], other)


# Arguments


def test_plan_takes_shapes_of_labels_and_masks(implementation):
    plan = jax_gpuops.plan(
        "softmax_cross_entropy_with_integer_labels",
        (64, 1000),
        "bfloat16",
        labels=jax.ShapeDtypeStruct((64,), "int32"),
        where=jax.ShapeDtypeStruct((64, 1), "bool"),
        implementation=implementation,
    )
    assert plan.implementation == implementation
    assert plan.algorithm in [a.name for a in jax_gpuops.algorithms("softmax")]


@pytest.mark.parametrize(
    ("arguments", "kwargs", "error", "text"),
    [
        (("float32", "float32"), {}, TypeError, "labels must be integers, got dtype float32"),
        (("float32", "bool"), {}, TypeError, "labels must be integers, got dtype bool"),
        (("int32", "int32"), {}, TypeError, "logits must be floats, got dtype int32"),
        (("float8_e5m2", "int32"), {}, TypeError, "do not support dtype float8_e5m2"),
        (("float32", "int32"), {"axis": 2}, ValueError, "axis 2 is out of bounds"),
        (("float32", "int32"), {"axis": None}, TypeError, "axis must be an int or a tuple"),
        (("float32", "int32"), {"axis": (0, 0)}, ValueError, "twice"),
        (("float32", "int32"), {"axis": 0}, ValueError, r"without axis, \(4,\), .* shape \(3,\)"),
        (
            ("float32", "int32"),
            {"where": np.ones((3, 4), np.float32)},
            ValueError,
            "where must be None or a boolean array",
        ),
        (
            ("float32", "int32"),
            {"where": np.ones((2, 3, 4), bool)},
            ValueError,
            r"must have 2 dimensions as logits, or 1 as logits without axis, got shape \(2, 3, 4\)",
        ),
        (
            ("float32", "int32"),
            {"where": np.ones((3, 2), bool)},
            ValueError,
            r"where of shape \(3, 2\) does not broadcast to 4 classes",
        ),
        (
            ("float32", "int32"),
            {"where": np.ones((2, 4), bool)},
            ValueError,
            r"and where of shape \(2, 4\)",
        ),
        (
            ("float32", "int32"),
            {"where": np.ones((2,), bool)},
            ValueError,
            r"got labels of shape \(3,\) and where of shape \(2,\)",
        ),
        (
            ("float32", "int32"),
            {"algorithm": "baseline"},
            ValueError,
            "'baseline' computes softmax only",
        ),
        (
            ("float32", "int32"),
            {"algorithm": "elementwise"},
            ValueError,
            "'elementwise' computes only the gradients",
        ),
    ],
)
def test_bad_input_is_named_at_trace_time(arguments, kwargs, error, text, implementation):
    x, labels = (jnp.zeros(shape, d) for shape, d in zip([(3, 4), (3,)], arguments, strict=True))
    with pytest.raises(error, match=text):
        jax.jit(lambda x: ours(x, labels, **kwargs, implementation=implementation)).trace(x)


@pytest.mark.parametrize(
    ("axis", "shape", "text"),
    [
        (1, (2, 5), r"and where of shape \(2, 5\)"),
        ((1, 2), (2,), r"and where of shape \(2,\)"),
        ((1, 2), (2, 4, 5), r"and where of shape \(2, 4, 5\)"),
        ((1, 2), (3, 2, 5), r"where of shape \(3, 2, 5\) does not broadcast to 4 x 5 classes"),
        ((2, 0), (1, 4, 2), r"where of shape \(1, 4, 2\) does not broadcast to 5 x 3 classes"),
        (1, (3, 2, 5), r"where of shape \(3, 2, 5\) does not broadcast to 4 classes"),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_the_shape_of_where_is_named_as_it_was_given(axis, shape, text, named, implementation):
    logits = jnp.zeros((3, 4, 5))
    labels = jnp.zeros(jnp.max(logits, axis).shape, int)
    with jax_gpuops.use(implementation if named else None), pytest.raises(ValueError, match=text):
        ours(logits, labels, axis, where=np.ones(shape, bool))
