"""transpose against numpy, to the bit."""

import inspect
import itertools

import helpers
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_gpuops

ALGORITHMS = [algorithm.name for algorithm in jax_gpuops.algorithms("transpose")]
DTYPE_OF_EACH_WIDTH = ["uint8", "uint16", "uint32", "uint64", "complex128"]
FLOATS_OF_ONE_BYTE = [name for name in dir(ml_dtypes) if name.startswith("float8_")]
DTYPES = [
    "bool",
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *(name for name in FLOATS_OF_ONE_BYTE if hasattr(jnp, name)),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
]


def numbered(shape, dtype: str) -> np.ndarray:
    """Elements of random bits, so that one in a wrong place is noticed."""
    dtype = helpers.np_dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    if dtype.kind == "b":
        return np.random.default_rng(0).random(shape) < 0.5
    data = np.random.default_rng(0).bytes(count * dtype.itemsize)
    return np.frombuffer(data, dtype).reshape(shape)


def bits(x) -> np.ndarray:
    """The bytes of each element: NaNs of equal bits are equal."""
    x = np.ascontiguousarray(x)
    return x.reshape((*x.shape, 1)).view(np.uint8)


def takes(algorithm, x, axes) -> bool:
    """True if an algorithm is for the permutation, by the limits that it declares."""
    axes = range(x.ndim)[::-1] if axes is None else axes
    moved = [axis % x.ndim for axis in axes if x.shape[axis] != 1]
    own = sorted(moved)
    run = x.itemsize
    while moved and moved[-1] == own[-1]:
        run *= x.shape[moved.pop()]
        own.pop()
    if algorithm == "narrow":
        return x.size == 0 or (bool(moved) and run in (1, 2, 4, 8) and has_narrow(x, moved))
    if algorithm == "tiled":
        return x.size == 0 or (bool(moved) and run < 64)
    if algorithm == "swizzled":
        return x.size == 0 or (bool(moved) and run in (1, 2, 4, 8, 16))
    if algorithm == "shifted":
        return x.size == 0 or (bool(moved) and run in (1, 2, 4, 8))
    return True


def has_narrow(x, moved) -> bool:
    """True if matrices of few columns, or into few rows, are contiguous; moved are all axes."""
    own = sorted(moved)
    merged = [[moved[0]]]  # axes that stay neighbours
    for axis in moved[1:]:
        if own.index(axis) == own.index(merged[-1][-1]) + 1:
            merged[-1].append(axis)
        else:
            merged.append([axis])
    order = sorted(merged)
    size = {tuple(axes): int(np.prod([x.shape[axis] for axis in axes])) for axes in merged}
    column, row = order[-1], merged[-1]
    columns_fit = size[tuple(column)] <= 31 and order[-2] == row
    rows_fit = size[tuple(row)] <= 31 and merged[-2] == column
    return columns_fit or rows_fit


def assert_transposes(x, axes, **kwargs):
    """The algorithm that is named, if one is, transposes or refuses."""
    with helpers.x64(x.dtype.name):
        if not takes(kwargs.get("algorithm"), x, axes):
            with pytest.raises(ValueError, match=f"algorithm '{kwargs['algorithm']}'"):
                jax_gpuops.transpose(jax.device_put(x), axes, **kwargs)
            return
        # jnp.asarray compiles a program.
        y = jax_gpuops.transpose(jax.device_put(x), axes, **kwargs)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(bits(y), bits(np.transpose(x, axes)), strict=True)


# Values


@pytest.mark.kernel
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", DTYPE_OF_EACH_WIDTH)
@pytest.mark.parametrize(
    "shape",
    [(1, 1), (1, 7), (31, 33), (64, 64), (128, 192), (65, 130), (2, 1500), (1500, 3), (7, 260)],
    ids=str,
)
def test_matrices(algorithm, dtype, shape, implementation):
    """Whole tiles, cut tiles, and matrices narrower than a tile on either side."""
    x = numbered(shape, dtype)
    assert_transposes(x, None, implementation=implementation, algorithm=algorithm)


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("matrices", "rows", "halves"),
    [("one", "most", True), ("many", "most", False), ("many", "half", True)],
)
@pytest.mark.parametrize("dtype", DTYPE_OF_EACH_WIDTH)
def test_few_or_thin_matrices_have_smaller_tiles(dtype, matrices, rows, halves, implementation):
    """So that more multiprocessors have a tile, and tiles fewer words outside the matrix."""
    word_bytes = helpers.np_dtype(dtype).itemsize
    side = {1: 128, 2: 128, 4: 64, 8: 64, 16: 32}[word_bytes]
    count = 1 if matrices == "one" else {"interpret": 40, "cuda": 1100}[implementation]
    x = numbered((count, side - 8 if rows == "most" else side // 2, side), dtype)
    with helpers.recorded(implementation) as executions:
        assert_transposes(x, (0, 2, 1), implementation=implementation, algorithm="swizzled")
    (execution,) = executions
    assert execution["config"]["tile_rows"] == (side // 2 if halves else side)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", DTYPE_OF_EACH_WIDTH)
@pytest.mark.parametrize("multiple", [1, 2, 16])
def test_rows_of_whole_chunks_or_not(multiple, dtype, implementation):
    """Where a matrix ends within a tile, chunks are whole or absent, or some are cut."""
    x = numbered((3, 5 * multiple, 33 * multiple), dtype)
    assert_transposes(x, (0, 2, 1), implementation=implementation, algorithm="swizzled")


# The last row of a matrix is in the middle of a strip, at its end, or at its beginning, and in the
# last strip of a tile or in the next tile. Rows of the operand begin at any byte of a load or only
# at some, and fill the lanes of a warp or one less; the operand ends within a load or at its end.
@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
@pytest.mark.parametrize("columns", [33, 36, 63, 125, 126, 128, 160])
@pytest.mark.parametrize("rows", [37, 63, 64, 65, 124, 130, 241, 256])
def test_rows_that_begin_at_any_word(rows, columns, dtype, implementation):
    x = numbered((3, rows, columns), dtype)
    assert_transposes(x, (0, 2, 1), implementation=implementation, algorithm="shifted")


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
@pytest.mark.parametrize("rows", [35, 64, 197])
def test_rows_that_are_apart_in_the_result(rows, dtype, implementation):
    """After one comes a row of another matrix."""
    x = numbered((2, rows, 3, 40), dtype)
    assert_transposes(x, (0, 3, 2, 1), implementation=implementation, algorithm="shifted")


@pytest.mark.kernel
@hypothesis.given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 300), st.integers(1, 140)),
    axes=st.sampled_from([(0, 2, 1), (1, 2, 0), (2, 1, 0), (2, 0, 1)]),
    dtype=st.sampled_from(["uint8", "uint16", "uint32", "uint64"]),
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_shifted_packs_of_any_shape(shape, axes, dtype, implementation):
    x = numbered(shape, dtype)
    assert_transposes(x, axes, implementation=implementation, algorithm="shifted")


# In registers, and packs of single planes with and without unused packs between them in shared
# memory; the last group of planes is whole or not.
@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
@pytest.mark.parametrize("channels", [2, 3, 4, 5, 6, 8, 16, 19, 31])
@pytest.mark.parametrize("pixels", [16, 128, 1552, 17, 131, 1545])
def test_channels_of_pixels(pixels, channels, dtype, implementation):
    """Planes that are whole packs, or whose packs begin in one and end in the next."""
    for shape in [(2, pixels, channels), (2, channels, pixels)]:
        x = numbered(shape, dtype)
        with helpers.recorded(implementation) as executions:
            assert_transposes(x, (0, 2, 1), implementation=implementation, algorithm="narrow")
        (execution,) = executions
        assert execution["config"]["aligned"] == (max(pixels, channels) * x.itemsize % 16 == 0)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
@pytest.mark.parametrize("channels", [3, 4, 6])
@pytest.mark.parametrize("pixels", [48, 49])
def test_planes_that_are_apart(pixels, channels, dtype, implementation):
    """After a plane comes one of another matrix."""
    for shape, axes in [((3, pixels, channels), (2, 0, 1)), ((channels, 3, pixels), (1, 2, 0))]:
        x = numbered((2, *shape), dtype)
        moved = (0, *(axis + 1 for axis in axes))
        assert_transposes(x, moved, implementation=implementation, algorithm="narrow")


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["uint8", "uint32"])
@pytest.mark.parametrize("channels", [3, 6])
@pytest.mark.parametrize("pixels", [48, 49])
def test_channels_of_matrices_along_several_dimensions(pixels, channels, dtype, implementation):
    for shape in [(2, 3, 5, pixels, channels), (2, 3, 5, channels, pixels)]:
        x = numbered(shape, dtype)
        for axes in [(1, 0, 2, 4, 3), (2, 1, 0, 4, 3)]:
            assert_transposes(x, axes, implementation=implementation, algorithm="narrow")


@pytest.mark.kernel
@pytest.mark.parametrize("offset", [1, 2, 6, 8])
@pytest.mark.parametrize("channels", [3, 4, 7])
def test_channels_in_arrays_that_begin_within_a_pack(channels, offset, implementation):
    if implementation != "interpret":
        pytest.skip("JAX aligns the buffers of a GPU")
    for pixels, turned in itertools.product([5, 16, 144], [False, True]):
        shape = (2, channels, pixels) if turned else (2, pixels, channels)
        x = numbered(shape, f"uint{8 * min(offset & -offset, 8)}")
        with helpers.buffers_at(offset):
            assert_transposes(x, (0, 2, 1), implementation=implementation, algorithm="narrow")


@pytest.mark.kernel
@hypothesis.given(
    shape=st.tuples(
        st.integers(1, 3), st.integers(1, 20) | st.integers(1, 600), st.integers(2, 31)
    ),
    axes=st.sampled_from([(0, 2, 1), (1, 2, 0), (2, 1, 0), (2, 0, 1)]),
    turned=st.booleans(),
    dtype=st.sampled_from(["uint8", "uint16", "uint32", "uint64"]),
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_narrow_matrices_of_any_shape(shape, axes, turned, dtype, implementation):
    x = numbered((shape[0], *shape[:0:-1]) if turned else shape, dtype)
    assert_transposes(x, axes, implementation=implementation, algorithm="narrow")


@pytest.mark.kernel
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("shape", [(3, 5, 7), (40, 4, 4), (4, 40, 4), (33, 2, 66), (2, 65, 1)])
def test_every_permutation_of_three_dimensions(algorithm, dtype, shape, implementation):
    x = numbered(shape, dtype)
    for axes in itertools.permutations(range(3)):
        assert_transposes(x, axes, implementation=implementation, algorithm=algorithm)


@pytest.mark.kernel
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("run", [1, 2, 3, 4, 5, 8, 12, 16, 21, 64])
@pytest.mark.parametrize("dtype", DTYPE_OF_EACH_WIDTH)
def test_runs_that_stay_together(algorithm, dtype, run, implementation):
    """Pixels of an image and heads of an attention: the minor dimension stays, the others turn."""
    x = numbered((11, 37, run), dtype)
    assert_transposes(x, (1, 0, 2), implementation=implementation, algorithm=algorithm)


@pytest.mark.kernel
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((2, 3, 8, 9), (0, 2, 3, 1)),  # NCHW to NHWC
        ((2, 8, 9, 3), (0, 3, 1, 2)),  # and back
        ((2, 17, 3, 8), (0, 2, 1, 3)),  # heads of attention
        ((5, 6, 7, 8), (3, 1, 2, 0)),
        ((3, 1, 5, 1, 4), (4, 3, 2, 1, 0)),
        ((2,) * 10, tuple(reversed(range(10)))),
        ((2, 3) * 4, (1, 3, 5, 7, 0, 2, 4, 6)),
        ((), ()),
        ((9,), (0,)),
    ],
    ids=str,
)
def test_any_rank(algorithm, shape, axes, implementation):
    x = numbered(shape, "int16")
    assert_transposes(x, axes, implementation=implementation, algorithm=algorithm)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype, implementation):
    """Kernels move words: bits arrive as they are, those of NaNs too."""
    assert_transposes(numbered((33, 40), dtype), None, implementation=implementation)


@pytest.mark.kernel
@hypothesis.given(
    data=st.data(),
    shape=st.lists(st.integers(1, 9), max_size=5),
    dtype=st.sampled_from(DTYPE_OF_EACH_WIDTH),
    algorithm=st.sampled_from([None, *ALGORITHMS]),
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_any_shape_and_permutation(data, shape, dtype, algorithm, implementation):
    axes = data.draw(st.permutations(range(len(shape))))
    signs = data.draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    axes = [a - len(shape) if negative else a for a, negative in zip(axes, signs, strict=True)]
    x = numbered(shape, dtype)
    assert_transposes(x, axes, implementation=implementation, algorithm=algorithm)


@pytest.mark.kernel
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 4)], ids=str)
def test_empty_arrays(shape, implementation):
    assert_transposes(numbered(shape, "float32"), None, implementation=implementation)


@pytest.mark.large
def test_more_words_than_32_bits_count(implementation):
    """Kernels count words in 32 bits, so launches go in parts."""
    x = jnp.arange(3 * ((1 << 30) + 1), dtype=jnp.uint32).astype(jnp.uint8).reshape(3, -1)
    y = jax_gpuops.transpose(x, implementation=implementation)
    assert bool((y == jnp.transpose(x)).all())


@pytest.mark.any_version
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_any_order_of_threads(algorithm, implementation):
    """A missing barrier gives other elements under some order of the threads."""
    if implementation != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    from jax_gpuops_ffi import _interpret

    try:
        for seed in range(5):
            _interpret.set_schedule_seed(seed)
            shapes = [(70, 66), (3, 200), (201, 5)]
            for shape, dtype in itertools.product(shapes, ["uint16", "float32"]):
                x = numbered(shape, dtype)
                assert_transposes(x, None, implementation=implementation, algorithm=algorithm)
    finally:
        _interpret.set_schedule_seed(0)


# As a JAX operation


def test_the_custom_call_is_in_the_program(implementation):
    def function(x):
        return jax_gpuops.transpose(x, implementation=implementation)

    calls = helpers.custom_calls(function, jnp.zeros((4, 8)))
    assert any(call.startswith("jax_gpuops_transpose_v1") for call in calls)


def test_signature():
    ours = list(inspect.signature(jax_gpuops.transpose).parameters.values())
    upstream = list(inspect.signature(jnp.transpose).parameters.values())
    assert [(p.name, p.default, p.kind) for p in ours[:-2]] == [
        (p.name, p.default, p.kind) for p in upstream
    ]
    assert [(p.name, p.default, p.kind) for p in ours[-2:]] == [
        ("implementation", None, inspect.Parameter.KEYWORD_ONLY),
        ("algorithm", None, inspect.Parameter.KEYWORD_ONLY),
    ]


@pytest.mark.parametrize("implementation", [None, "xla", "interpret"])
def test_shape_rules(implementation):
    x = jax.ShapeDtypeStruct((3, 4, 5), jnp.bfloat16)
    for axes in [None, (0, 1, 2), (2, 0, 1), (-1, 0, 1), [1, 2, 0], np.array([1, 0, 2])]:
        actual = jax.eval_shape(
            lambda x: jax_gpuops.transpose(x, axes, implementation=implementation),  # noqa: B023
            x,
        )
        expected = jax.eval_shape(lambda x: jnp.transpose(x, axes), x)  # noqa: B023
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)


def test_weak_types_stay_weak(implementation):
    x = jnp.broadcast_to(2.0, (2, 3))
    y = jax_gpuops.transpose(x, implementation=implementation)
    assert y.weak_type == jnp.transpose(x).weak_type


@pytest.mark.any_version
@pytest.mark.parametrize("axes", [None, (1, 2, 0), (0, 2, 1)])
def test_derivatives_of_any_order(axes, implementation):
    def function(x):
        return jax_gpuops.transpose(x, axes, implementation=implementation)

    x = helpers.normal((2, 3, 4), "float32")
    check_grads(function, (x,), order=2, modes=["fwd", "rev"], atol=1e-2, rtol=1e-2, eps=1e-2)
    cotangent = helpers.normal(np.transpose(x, axes).shape, "float32", seed=1)
    np.testing.assert_array_equal(
        jax.vjp(function, x)[1](cotangent)[0],
        jax.vjp(lambda x: jnp.transpose(x, axes), x)[1](cotangent)[0],
    )
    np.testing.assert_array_equal(
        jax.linear_transpose(function, x)(cotangent)[0],
        jax.linear_transpose(lambda x: jnp.transpose(x, axes), x)(cotangent)[0],
    )


def test_the_way_back_is_a_kernel_too(implementation):
    def loss(x):
        return (jax_gpuops.transpose(x, (1, 2, 0), implementation=implementation) ** 2).sum()

    calls = helpers.custom_calls(jax.grad(loss), jnp.zeros((2, 3, 4)))
    assert sum(call.startswith("jax_gpuops_transpose_v1") for call in calls) >= 2


def test_integers_have_no_tangents(implementation):
    def function(x):
        return jax_gpuops.transpose(x, implementation=implementation)

    x = jnp.arange(6).reshape(2, 3)
    y, tangent = jax.jvp(function, (x,), (np.zeros(x.shape, jax.dtypes.float0),))
    np.testing.assert_array_equal(y, x.T)
    assert tangent.dtype == jax.dtypes.float0


@pytest.mark.parametrize("in_axis", range(4))
@pytest.mark.parametrize("out_axis", range(4))
def test_vmap(in_axis, out_axis, implementation):
    x = numbered((3, 4, 5, 6), "int32")
    for axes in [(2, 0, 1), (0, 2, 1), None]:
        y = jax.vmap(
            lambda x: jax_gpuops.transpose(x, axes, implementation=implementation),  # noqa: B023
            in_axis,
            out_axis,
        )(x)
        expected = jax.vmap(lambda x: jnp.transpose(x, axes), in_axis, out_axis)(x)  # noqa: B023
        np.testing.assert_array_equal(y, expected)


def test_vmap_moves_no_data_for_the_mapped_axis(implementation):
    def function(x):
        return jax_gpuops.transpose(x, implementation=implementation)

    text = jax.jit(jax.vmap(function, in_axes=1)).lower(jnp.zeros((4, 3, 8))).compile().as_text()
    assert "jax_gpuops_transpose_v1" in text
    assert " copy(" not in text
    assert " transpose(" not in text


# What runs


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("shape", "axes", "dtype", "algorithm"),
    [
        ((4096, 4096), None, "float32", "swizzled"),
        ((8, 2049, 1023), (0, 2, 1), "float32", "shifted"),  # vectors do not divide the rows
        ((64, 197, 768), (0, 2, 1), "bfloat16", "shifted"),  # those of the result
        ((64, 768, 197), (0, 2, 1), "bfloat16", "shifted"),  # those of the operand
        ((64, 197, 31), (0, 2, 1), "bfloat16", "narrow"),
        ((300, 300), None, "bfloat16", "copy"),  # few words
        ((300, 300), None, "float32", "swizzled"),
        ((65536, 16, 3), (0, 2, 1), "bfloat16", "copy"),  # small matrices
        ((65536, 16, 4), (0, 2, 1), "bfloat16", "tiled"),  # tiles fit
        ((16, 3, 14, 16, 14, 16), (0, 2, 4, 3, 5, 1), "float32", "copy"),  # patches
        ((8, 224, 224, 3), (0, 3, 1, 2), "uint8", "narrow"),
        ((2, 3, 513, 513), (0, 2, 3, 1), "bfloat16", "narrow"),
        ((1 << 27, 2), None, "float32", "narrow"),
        ((1 << 30, 3), None, "uint8", "tiled"),  # too many words
        ((300, 100, 3), (2, 1, 0), "float32", "copy"),  # few words
        ((3, 20, 56, 4664), (3, 2, 1, 0), "float32", "tiled"),
        ((1000, 1000, 3), (1, 0, 2), "uint8", "tiled"),  # short runs
        ((1000, 1000, 4), (1, 0, 2), "float32", "swizzled"),  # matrices of 16-byte words
        ((64, 1024, 16, 64), (0, 2, 1, 3), "bfloat16", "copy"),
        ((3, 1, 5), (1, 0, 2), "float32", "copy"),  # nothing moves
    ],
    ids=str,
)
def test_plan(shape, axes, dtype, algorithm, implementation):
    platform = "cuda" if implementation == "cuda" else "cpu"
    plan = jax_gpuops.plan(
        "transpose", shape, dtype, axes=axes, implementation=implementation, platform=platform
    )
    assert plan.algorithm == algorithm
    for named in ("naive", algorithm):
        plan = jax_gpuops.plan(
            "transpose", shape, dtype, axes=axes, algorithm=named, platform=platform
        )
        assert plan.algorithm == named


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "float4_e2m1fn"])
def test_elements_smaller_than_a_byte_go_to_xla(dtype, implementation):
    x = jnp.arange(6).reshape(2, 3).astype(dtype)
    np.testing.assert_array_equal(jax_gpuops.transpose(x).astype(int), x.astype(int).T)
    with pytest.raises(TypeError, match=f"dtype {dtype}, only dtypes of 1, 2, 4, 8 or 16"):
        jax_gpuops.transpose(x, implementation=implementation)
    with pytest.raises(TypeError, match="algorithm='tiled' cannot run this"):
        jax_gpuops.transpose(x, algorithm="tiled")


def test_random_keys_go_to_xla(implementation):
    keys = jax.random.split(jax.random.key(0), (2, 3))
    assert jax_gpuops.transpose(keys).shape == (3, 2)
    with pytest.raises(TypeError, match="do not support dtype"):
        jax_gpuops.transpose(keys, implementation=implementation)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x, **k: jax_gpuops.transpose(x, (0, 2), **k), ValueError, "axis 2 is out of"),
        (lambda x, **k: jax_gpuops.transpose(x, (0,), **k), ValueError, "each of the 2 dim"),
        (lambda x, **k: jax_gpuops.transpose(x, (0, 0), **k), ValueError, "each of the 2 dim"),
        (lambda x, **k: jax_gpuops.transpose(x, (0, -2), **k), ValueError, "each of the 2 dim"),
        (lambda x, **k: jax_gpuops.transpose(x, 1, **k), TypeError, "axes must be a sequence"),
        (lambda x, **k: jax_gpuops.transpose(x, "ab", **k), TypeError, "axes must be a sequence"),
        (lambda x, **k: jax_gpuops.transpose([[1.0]], **k), TypeError, "a must be an array"),
        (
            lambda x, **k: jax_gpuops.transpose(x, algorithm="fast", **k),
            ValueError,
            "'fast' is unknown; known are naive, tiled",
        ),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_bad_input_is_named_at_trace_time(call, error, text, named, implementation):
    kwargs = {"implementation": implementation} if named else {}
    with pytest.raises(error, match=text):
        jax.jit(lambda x: call(x, **kwargs)).trace(jnp.zeros((2, 3)))


# Several devices


def cpu_mesh(axis_type) -> Mesh:
    return Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("d", "t"), axis_types=axis_type)


@pytest.mark.parametrize("spec", [P("d", None), P(None, "t"), P("t", "d"), P()], ids=str)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_arrays_are_left_to_xla(spec, axis_type):
    mesh = cpu_mesh((axis_type, axis_type))
    host = numbered((8, 4), "float32")
    with jax.set_mesh(mesh):
        x = jax.device_put(host, NamedSharding(mesh, spec))
        y = jax.jit(jax_gpuops.transpose)(x)
        expected = jax.jit(jnp.transpose)(x)
        assert y.sharding.is_equivalent_to(expected.sharding, y.ndim)
        np.testing.assert_array_equal(bits(y), bits(host.T))
        with pytest.raises(ValueError, match=r"jax\.shard_map"):
            jax.jit(lambda x: jax_gpuops.transpose(x, implementation="interpret"))(x)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_shard_map(axis_type):
    mesh = cpu_mesh((axis_type, axis_type))
    host = numbered((8, 4), "float32")
    with jax.set_mesh(mesh):
        x = jax.device_put(host, NamedSharding(mesh, P("d", "t")))
        mapped = jax.shard_map(
            lambda x: jax_gpuops.transpose(x, implementation="interpret"),
            in_specs=P("d", "t"),
            out_specs=P("t", "d"),
        )
        np.testing.assert_array_equal(bits(jax.jit(mapped)(x)), bits(host.T))
