"""linear_cross_entropy against float64 and against the formula, and how much memory it takes."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.test_util import check_grads

import jax_gpuops
from jax_gpuops import _linear_cross_entropy as op
from jax_gpuops import _primitive

ours = jax_gpuops.linear_cross_entropy
WAYS = {"whole": (12, 20, 12), "chunks": (24, 20, 7), "in place": (24, 20, 7)}
"""The rows, the width and the rows of a chunk; without chunks, by sums, and in place."""


def operands(rows, width, classes, dtype, *, transpose_w=False, seed=0):
    x = helpers.normal((rows, width), dtype, seed)
    w = helpers.normal((width, classes), dtype, seed + 1, scale=width**-0.5)
    labels = np.random.default_rng(seed).integers(0, classes, rows).astype(np.int32)
    return x, helpers.stored(w, transpose_w), labels


@functools.partial(jax.jit, static_argnames=("reduction", "transpose_w"))
def formula(x, w, labels, *, where=None, reduction="mean", transpose_w=False):
    """What a user of JAX writes; as one program, which is compiled faster than many."""
    logits = jnp.matmul(x, w.T if transpose_w else w, precision="highest")
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return {"mean": jnp.mean, "sum": jnp.sum}[reduction](losses, where=where)


@pytest.fixture
def way(request, monkeypatch):
    """A way to compute gradients, whatever needs less memory."""
    if request.param != "whole":
        monkeypatch.setattr(op, "_is_in_place", lambda how, x: request.param == "in place")
    op._jitted.clear_cache()
    yield request.param
    op._jitted.clear_cache()


every_way = pytest.mark.parametrize("way", WAYS, indirect=True)


def options(way, **more):
    """Those of a call that is computed in a way."""
    return {"rows_per_chunk": WAYS[way][2], "precision": "highest", **more}


# Values and gradients


def assert_accurate(loss, dx, dw, x, w, labels, logits_dtype):
    """Checks the mean and its gradients to the roundings of products, losses and gradients."""
    eps = np.finfo(np.float64 if logits_dtype == "float64" else np.float32).eps
    x, w = helpers.exact(x), helpers.exact(w)
    (rows, width), classes = x.shape, w.shape[1]
    logits = x @ w
    largest = np.abs(logits).max(-1, keepdims=True)
    off = (width + 3) * eps * (np.abs(x) @ np.abs(w)).max(-1, keepdims=True)
    off = off + helpers.spacing(largest, helpers.np_dtype(logits_dtype))  # of each logit
    shifted = logits - logits.max(-1, keepdims=True)
    log_sum = np.log(np.exp(shifted).sum(-1, keepdims=True))
    one_hot = np.arange(classes) == labels[:, None]
    losses = log_sum[:, 0] - shifted[one_hot]
    bound = np.mean(2 * off + 8 * eps * (1 + largest + np.abs(losses[:, None])))
    assert loss.dtype == (np.float64 if logits_dtype == "float64" else np.float32)
    assert np.abs(helpers.exact(loss) - np.mean(losses)) <= bound

    weights = np.exp(shifted - log_sum)
    dz = (weights - one_hot) / rows
    roundings = 2 * off + (8 + 2 * (np.abs(shifted) + log_sum)) * eps
    off_dz = roundings * (weights + one_hot) / rows + helpers.spacing(dz, dx.dtype)
    for actual, expected, depth, magnitude, off in (
        (dx, dz @ w.T, classes, np.abs(dz) @ np.abs(w.T), off_dz @ np.abs(w.T)),
        (dw, x.T @ dz, rows, np.abs(x.T) @ np.abs(dz), np.abs(x.T) @ off_dz),
    ):
        bound = (depth + 4) * eps * magnitude + off + helpers.spacing(expected, actual.dtype)
        assert np.all(np.abs(helpers.exact(actual) - expected) <= bound)


@pytest.mark.kernel
@every_way
@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("each", ["ours", None])
def test_value_and_gradients(each, dtype, transpose_w, way, implementation):
    rows, width, _ = WAYS[way]
    if each and not helpers.taken_in_turn(transpose_w, dtype):
        pytest.skip("another case has this dtype")
    x, w, labels = operands(rows, width, 131, dtype, transpose_w=transpose_w)
    how = options(way, transpose_w=transpose_w, implementation=implementation if each else None)
    with helpers.x64(dtype):
        function = jax.jit(jax.value_and_grad(lambda x, w: ours(x, w, labels, **how), (0, 1)))
        loss, (dx, dw) = function(x, w)
    assert (dx.dtype, dw.dtype) == (x.dtype, w.dtype)
    dw = np.asarray(dw)
    assert_accurate(
        loss, dx, dw.T if transpose_w else dw, x, helpers.stored(w, transpose_w), labels, dtype
    )


@pytest.mark.kernel
@every_way
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_logits_of_float32(dtype, way, implementation):
    rows, width, _ = WAYS[way]
    x, w, labels = operands(rows, width, 131, dtype)
    how = options(way, preferred_element_type="float32", implementation=implementation)
    function = jax.value_and_grad(lambda x, w: ours(x, w, labels, **how), (0, 1))
    loss, (dx, dw) = function(x, w)
    assert_accurate(loss, dx, np.asarray(dw), x, w, labels, "float32")


@pytest.mark.parametrize("rows_per_chunk", [1, 5, 8, 23, 24, 25, None])
@pytest.mark.parametrize("classes", [1, 2, 257, 1000])
def test_any_number_of_rows_and_classes(classes, rows_per_chunk):
    """Rows that are no multiple of the chunk, and classes that are none of a slice."""
    x, w, labels = operands(24, 16, classes, "float32")
    how = {"rows_per_chunk": rows_per_chunk, "precision": "highest"}
    expected = jax.value_and_grad(formula, (0, 1))(x, w, labels)
    actual = jax.value_and_grad(functools.partial(ours, **how), (0, 1))(x, w, labels)
    assert_close(actual, expected)
    assert_close(ours(x, w, labels, **how), expected[0])


def assert_close(actual, expected):
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-6), actual, expected
    )


@every_way
def test_more_slices_than_one(way):
    rows, width, _ = WAYS[way]
    x, w, labels = operands(rows, width, 2500, "float32")
    actual = jax.value_and_grad(functools.partial(ours, **options(way)), (0, 1))(x, w, labels)
    assert_close(actual, jax.value_and_grad(formula, (0, 1))(x, w, labels))


@every_way
def test_fewer_rows_than_the_width(way):
    x, w, labels = operands(13, 40, 131, "float32")
    actual = jax.value_and_grad(functools.partial(ours, **options(way)), (0, 1))(x, w, labels)
    assert_close(actual, jax.value_and_grad(formula, (0, 1))(x, w, labels))


@every_way
@pytest.mark.parametrize("argnums", [0, 1])
def test_gradient_of_one_operand(argnums, way):
    rows, width, _ = WAYS[way]
    arguments = operands(rows, width, 131, "float32")
    actual = jax.grad(functools.partial(ours, **options(way)), argnums)(*arguments)
    assert_close(actual, jax.grad(formula, argnums)(*arguments))


def test_operands_of_two_dtypes():
    x, w, labels = operands(24, 16, 31, "float32")
    x = x.astype("bfloat16")
    loss, (dx, dw) = jax.value_and_grad(ours, (0, 1))(x, w, labels)
    assert (loss.dtype, dx.dtype, dw.dtype) == ("float32", "bfloat16", "float32")
    expected = formula(x.astype("float32"), w, labels)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.parametrize("batch", [(), (6,), (2, 3), (2, 1, 3)])
def test_rows_of_any_rank(batch):
    x, w = helpers.normal((*batch, 8), "float32"), helpers.normal((8, 11), "float32")
    labels = np.random.default_rng(0).integers(0, 11, batch)
    function = functools.partial(ours, precision="highest")
    actual = jax.value_and_grad(function, (0, 1))(x, w, labels)
    assert_close(actual, jax.value_and_grad(formula, (0, 1))(x, w, labels))


@pytest.mark.parametrize("shapes", [((0, 4), (4, 5)), ((3, 0), (0, 5))])
def test_arrays_without_elements(shapes):
    x, w = (jnp.zeros(shape) for shape in shapes)
    labels = jnp.zeros(len(x), int)
    for reduction in ("mean", "sum"):
        actual = ours(x, w, labels, reduction=reduction)
        np.testing.assert_allclose(actual, formula(x, w, labels, reduction=reduction))


def test_mean_of_many_rows_has_gradients_in_float16():
    """The gradient of a logit, divided by the rows, is less than the least float16."""
    x, w, labels = operands(4096, 8, 512, "float16")
    dx, dw = jax.grad(ours, (0, 1))(x, w, labels)
    wide = (x.astype("float32"), w.astype("float32"), labels)
    for actual, expected in zip((dx, dw), jax.grad(formula, (0, 1))(*wide), strict=True):
        error = np.linalg.norm(np.asarray(actual, np.float32) - expected)
        assert error <= 2e-2 * np.linalg.norm(expected)


# Which rows count, and labels


@every_way
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_rows_that_do_not_count(reduction, way):
    """Neither their labels nor what they hold reach the loss or a gradient."""
    rows, width, _ = WAYS[way]
    x, w, labels = operands(rows, width, 31, "float32")
    where = np.random.default_rng(0).random(rows) < 0.6
    how = {"where": where, "reduction": reduction}
    expected = jax.value_and_grad(formula, (0, 1))(x, w, labels, **how)
    # New arrays: JAX may still be reading the others.
    other_x, other_labels = x.copy(), labels.copy()
    other_x[~where], other_labels[~where] = np.nan, -100
    actual = jax.value_and_grad(functools.partial(ours, **options(way)), (0, 1))(
        other_x, w, other_labels, **how
    )
    assert_close(actual, expected)


def test_no_row_counts():
    """As of jnp.mean and jnp.sum."""
    x, w, labels = operands(6, 4, 5, "float32")
    where = np.zeros(6, bool)
    assert np.isnan(ours(x, w, labels, where=where))
    total, gradients = jax.value_and_grad(ours, (0, 1))(x, w, labels, where=where, reduction="sum")
    assert total == 0
    assert not any(np.any(each) for each in gradients)


def test_labels_and_where_broadcast():
    x, w = helpers.normal((4, 5, 8), "float32"), helpers.normal((8, 11), "float32")
    labels, where = np.arange(5), np.array([[True], [False], [True], [True]])
    actual = ours(x, w, labels, where=where, precision="highest")
    expected = formula(x, w, np.broadcast_to(labels, (4, 5)), where=np.broadcast_to(where, (4, 5)))
    assert_close(actual, expected)


@every_way
def test_labels_that_are_negative_or_no_class(way):
    """As those of softmax_cross_entropy_with_integer_labels, in gradients, too."""
    rows, width, _ = WAYS[way]
    x, w, labels = operands(rows, width, 31, "float32")
    labels[[0, 3]] = -1, -31
    function = jax.value_and_grad(functools.partial(ours, **options(way)), (0, 1))
    assert_close(function(x, w, labels), jax.value_and_grad(formula, (0, 1))(x, w, labels))
    labels[[1, 2]] = 31, -32
    actual = function(x, w, labels)
    assert np.isnan(actual[0])
    assert_close(actual, jax.value_and_grad(formula, (0, 1))(x, w, labels))


# Transformations


@every_way
def test_vmap_and_its_gradient(way):
    rows, width, _ = WAYS[way]
    each = [operands(rows, width, 31, "float32", seed=seed) for seed in (0, 10, 20)]
    xs, ws, labels = map(np.stack, zip(*each, strict=True))
    for axes in ((0, 0, 0), (0, None, 0), (None, 0, None)):
        arguments = [
            a if axis == 0 else a[0] for a, axis in zip((xs, ws, labels), axes, strict=True)
        ]

        def results(function, axes=axes, arguments=arguments):
            def total(x, w):
                return (jax.vmap(function, axes)(x, w, arguments[2]) ** 2).sum()

            return jax.jit(jax.value_and_grad(total, (0, 1)))(*arguments[:2])

        assert_close(results(functools.partial(ours, **options(way))), results(formula))


@pytest.mark.any_version
@every_way
def test_derivatives_of_two_orders_in_both_modes(way):
    rows, width, _ = WAYS[way]
    with jax.enable_x64(True):
        x, w, labels = operands(rows, width, 5, "float64")
        check_grads(
            lambda x, w: ours(x, w, labels, **options(way)),
            (jnp.asarray(x), jnp.asarray(w)),
            order=2,
            modes=["fwd", "rev"],
        )


@every_way
def test_scaled_loss_inside_a_scan_with_checkpoint(way):
    rows, width, _ = WAYS[way]
    x, w, labels = operands(rows, width, 31, "float32")

    def total(function, x, w):
        def step(sum_, scale):
            return sum_ + scale * jax.checkpoint(function)(scale * x, w, labels), None

        return jax.lax.scan(step, 0.0, jnp.arange(1.0, 3.0))[0]

    actual, expected = (
        jax.jit(jax.value_and_grad(functools.partial(total, function), (0, 1)))(x, w)
        for function in (functools.partial(ours, **options(way)), formula)
    )
    assert_close(actual, expected)


@pytest.mark.kernel
@every_way
def test_jit_gives_the_same_bits_as_eager(way, implementation):
    rows, width, _ = WAYS[way]
    x, w, labels = operands(rows, width, 31, "float32")
    function = jax.grad(
        functools.partial(ours, **options(way, implementation=implementation)), (0, 1)
    )
    for eager, jitted in zip(function(x, w, labels), jax.jit(function)(x, w, labels), strict=True):
        np.testing.assert_array_equal(eager, jitted)


MANY = pytest.mark.skipif(len(jax.devices()) < 4, reason="there are fewer than four devices")


@MANY
@every_way
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_rows_over_several_devices(kind, way):
    x, w, labels = operands(24, 20, 31, "float32")
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(kind,))
    expected = jax.value_and_grad(formula, (0, 1))(x, w, labels)
    with jax.set_mesh(mesh):
        x, labels = (
            jax.device_put(each, NamedSharding(mesh, PartitionSpec("rows"))) for each in (x, labels)
        )
        function = functools.partial(ours, **options(way))
        assert_close(jax.jit(jax.value_and_grad(function, (0, 1)))(x, w, labels), expected)


@MANY
@every_way
def test_inside_shard_map(way, implementation):
    """Each device has rows of its own: the gradient of w is added up by JAX."""
    x, w, labels = operands(96, 20, 31, "float32")
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("rows")

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(rows, PartitionSpec(), rows), out_specs=PartitionSpec()
    )
    def loss(x, w, labels):
        each = ours(x, w, labels, **options(way, implementation=implementation))
        return jax.lax.pmean(each, "rows")

    actual = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w, labels)
    assert_close(actual, jax.value_and_grad(formula, (0, 1))(x, w, labels))


def test_symbolic_number_of_rows():
    """The chunks are not known: the logits are one array."""
    (n,) = jax.export.symbolic_shape("n")
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((n, 8), "float32"), ((8, 11), "float32"), ((n,), "int32"))
    ]
    function = jax.jit(functools.partial(ours, precision="highest"))
    exported = jax.export.export(function)(*shapes)
    arguments = operands(6, 8, 11, "float32")
    assert_close(exported.call(*arguments), formula(*arguments))


# What runs


@pytest.mark.kernel
def test_a_gradient_costs_three_products(implementation):
    """And the loss one; nothing is computed twice."""
    x, w, labels = operands(24, 16, 31, "float32")
    function = functools.partial(ours, implementation=implementation, precision="highest")
    for differentiated, products in (((), 1), ((0,), 2), ((1,), 2), ((0, 1), 3)):
        each = jax.value_and_grad(function, differentiated) if differentiated else function
        calls = helpers.custom_calls(each, x, w, labels)
        assert calls.count("jax_gpuops_gemm_v2") == products
        assert calls.count("jax_gpuops_cross_entropy_v2") == 1
        assert calls.count("jax_gpuops_cross_entropy_cotangent_v2") == bool(differentiated)


def test_explain_lists_products_and_losses():
    arguments = operands(24, 16, 31, "float32")
    function = jax.value_and_grad(functools.partial(ours, rows_per_chunk=8), (0, 1))
    calls = jax_gpuops.explain(function, *arguments).calls
    assert {call.op for call in calls} == {
        *("linear_cross_entropy", "cross_entropy", "cross_entropy_cotangent")
    }
    reasons = [call.plan.reason for call in calls if call.op == "linear_cross_entropy"]
    assert "XLA adds the product to the sum in place" in reasons


def test_use_sets_the_implementation(implementation):
    arguments = operands(24, 16, 31, "float32")
    function = jax.value_and_grad(lambda *xs: ours(*xs, rows_per_chunk=8), (0, 1))
    for strict in (True, False):
        with jax_gpuops.use(implementation, strict=strict):
            assert "jax_gpuops_gemm_v2" in helpers.custom_calls(function, *arguments)
    assert helpers.custom_calls(function, *arguments) == []


# Memory

HEADS = {
    "Llama 2 7B": ((8192, 4096, 32000), None, "in place", 2048),
    "GPT-2 medium": ((8192, 1024, 50257), None, "chunks", 1024),
    "Llama 3 8B": ((4096, 4096, 128256), None, "in place", 1024),
    "Gemma 3 1B": ((4096, 1152, 262144), None, "chunks", 1024),
    "Llama 3.2 1B": ((4096, 2048, 128256), "float32", "in place", 1024),
}
"""Of bench/programs: shape, dtype of the logits, way, rows of a chunk."""


def head(name):
    (rows, width, classes), dtype, *_ = HEADS[name]
    shapes = ((rows, width), "bfloat16"), ((width, classes), "bfloat16"), ((rows,), "int32")
    return [jax.ShapeDtypeStruct(*each) for each in shapes], dtype


@pytest.mark.any_version
@pytest.mark.parametrize("name", HEADS)
def test_ways_of_the_heads_of_models(name):
    (x, _, _), dtype = head(name)
    how = op._How(False, None, jnp.dtype(dtype or x.dtype), None, None)
    way = "in place" if op._is_in_place(how, x) else "chunks"
    assert (way, op._chunk_rows(how, x)) == HEADS[name][2:]


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="an older XLA plans more memory on the host"
)
@pytest.mark.parametrize("name", HEADS)
def test_memory_of_the_heads_of_models(name, implementation):
    """Beside arguments and results at most 0.35 of what plain JAX needs.

    That is on a GPU two arrays of logits, or one where another fits in the gradient of w.
    """
    arguments, dtype = head(name)
    how = {"implementation": implementation, "preferred_element_type": dtype}
    function = functools.partial(ours, **how)
    (rows, width, classes), *_ = HEADS[name]
    logits = rows * classes * jnp.dtype(dtype or "bfloat16").itemsize
    plain = logits * (1 if width >= rows else 2)
    for each, limit in ((function, logits), (jax.value_and_grad(function, (0, 1)), plain)):
        compiled = jax.jit(each).lower(*arguments).compile()
        assert compiled.memory_analysis().temp_size_in_bytes <= 0.35 * limit


@pytest.mark.parametrize("masked", [False, True])
def test_a_backward_pass_keeps_the_gradients_alone(masked, implementation):
    """In the dtype of their operands; and of a mask, one flag a row."""
    x, w, labels = operands(48, 16, 32, "bfloat16")
    where = np.arange(48) % 5 != 0 if masked else None
    function = functools.partial(
        ours, labels=labels, where=where, rows_per_chunk=16, implementation=implementation
    )
    _, vjp = jax.jit(lambda x, w: jax.vjp(function, x, w))(x, w)
    kept = [(each.shape, each.dtype) for each in jax.tree.leaves(vjp) if each.size > 48]
    assert kept == [(x.shape, x.dtype), (w.shape, w.dtype)]


@pytest.mark.parametrize("way", ["chunks"], indirect=True)
@pytest.mark.parametrize("differentiated", [False, True])
def test_no_array_of_all_logits(differentiated, way):
    x, w, labels = operands(48, 16, 523, "float32")
    function = functools.partial(ours, **options(way))
    if differentiated:
        function = jax.value_and_grad(function, (0, 1))
    text = jax.jit(function).lower(x, w, labels).compile().as_text()
    assert "[7,523]" in text
    assert "[48,523]" not in text
    assert "[49,523]" not in text
    assert "[7,7,523]" not in text


# Bad calls


X, W, LABELS, F8 = jnp.ones((4, 6)), jnp.ones((6, 5)), jnp.zeros(4, int), "float8_e4m3fn"


@pytest.mark.parametrize(
    ("arguments", "how", "error", "text"),
    [
        (([1.0], W, LABELS), {}, TypeError, "x must be an array"),
        ((X.astype(int), W, LABELS), {}, TypeError, "x must be floats, got dtype int32"),
        ((X, W.astype(complex), LABELS), {}, TypeError, "w must be floats, got dtype complex64"),
        ((X, W, LABELS / 2), {}, TypeError, "labels must be integers, got dtype float32"),
        ((X, W.T, LABELS), {}, ValueError, r"x of shape \(..., d\) and w of shape \(d, classes\)"),
        ((X, W, LABELS), {"transpose_w": True}, ValueError, r"w of shape \(classes, d\), got"),
        ((X, W, LABELS), {"transpose_w": 0}, TypeError, "transpose_w must be True or False, got 0"),
        ((X[0, 0], W, LABELS), {}, ValueError, "takes x of shape"),
        ((X, W, LABELS[:3]), {}, ValueError, r"labels must have the shape of x .*\(4,\)"),
        ((X, W, LABELS[None]), {}, ValueError, r"labels must have the shape of x"),
        ((X, W, LABELS), {"where": LABELS}, ValueError, "where must be None or a boolean array"),
        ((X, W, LABELS), {"where": X > 0}, ValueError, "where must have the shape of x"),
        ((X, W, LABELS), {"reduction": "none"}, ValueError, 'must be "mean" or "sum"'),
        ((X, W, LABELS), {"rows_per_chunk": 0}, ValueError, "must be None or at least 1, got 0"),
        ((X, W, LABELS), {"rows_per_chunk": 1.5}, TypeError, "rows_per_chunk must .* int.* 1.5"),
        (
            (X, W, LABELS),
            {"preferred_element_type": "int32"},
            TypeError,
            "floating-point dtype, got",
        ),
        ((X, W, LABELS), {"preferred_element_type": []}, TypeError, r"a dtype or None, got \[\]"),
        ((X.astype(F8), W.astype(F8), LABELS), {}, TypeError, "16 bits or more, got dtype float8"),
        ((X, W, LABELS), {"implementation": "gpu"}, ValueError, "must be None or one of 'cuda'"),
    ],
)
def test_bad_calls_raise_when_they_are_traced(arguments, how, error, text):
    with pytest.raises(error, match=text):
        jax.eval_shape(lambda *_: ours(*arguments, **how), 0)


def test_what_no_kernel_takes_is_an_error_where_one_is_named(implementation):
    how = {"preferred_element_type": "bfloat16"}
    assert ours(X, W, LABELS, **how).dtype == _primitive.accumulator("bfloat16")
    with pytest.raises(TypeError, match="a result of dtype bfloat16 for operands"):
        ours(X, W, LABELS, implementation=implementation, **how)


def test_logits_of_a_dtype_that_jax_does_not_have(implementation):
    """They are float32 in place of float64, with a warning."""
    with pytest.warns(UserWarning, match="float64"):
        loss = ours(X, W, LABELS, preferred_element_type="float64", implementation=implementation)
    assert loss == ours(X, W, LABELS, implementation=implementation)
