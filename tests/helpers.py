"""Oracles and data that tests share."""

import contextlib
import functools
import itertools
import re

import jax
import ml_dtypes
import numpy as np
import pytest
from scipy import special

import jax_gpuops
from jax_gpuops import _library, _primitive

FLOATS = ("float16", "bfloat16", "float32", "float64")

DTYPES_ON_TENSOR_CORES = [
    ("float16", "float16"),
    ("float16", "float32"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
    ("float32", "float32"),
]
"""Of the factors of a product and of its result."""


def np_dtype(name: str) -> np.dtype:
    """The numpy dtype called `name`, bfloat16 included."""
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def x64(dtype: str) -> contextlib.AbstractContextManager:
    """JAX keeps 64-bit dtypes only in this mode; other tests run in the mode users have."""
    return jax.enable_x64(np_dtype(dtype).itemsize >= 8)


def taken_in_turn(number: int, dtype: str) -> bool:
    """Whether a test of several dtypes runs the case of that number with this dtype.

    On a GPU it runs all cases with each dtype. The executor takes its time: on the host a dtype
    gets every second case, and the next one of FLOATS the others.
    """
    return jax.default_backend() == "gpu" or (number + FLOATS.index(dtype)) % 2 == 0


def with_16_bits_in_turn(*values) -> list[tuple]:
    """Parameters: every combination of the values with DTYPES_ON_TENSOR_CORES.

    The kernels of float16 and bfloat16 are instances of the same templates. On the host these two
    take turns, from each value of a list to the next one.
    """
    combinations = [
        (sum(number for number, _ in numbered), [value for _, value in numbered])
        for numbered in itertools.product(*map(enumerate, values))
    ]
    return [
        (*combination, dtype, result)
        for turn, combination in combinations
        for dtype, result in DTYPES_ON_TENSOR_CORES
        if dtype == "float32" or taken_in_turn(turn, dtype)
    ]


def normal(shape, dtype: str, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Independent normal numbers, the same for the same seed."""
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np_dtype(dtype))


def factor_of_8_bits(shape, dtype: str, seed: int = 0) -> np.ndarray:
    """Normal numbers in a float of 8 bits, or int8 of all values, the same for the same seed."""
    if dtype == "int8":
        return np.random.default_rng(seed).integers(-128, 128, shape).astype(np.int8)
    return normal(shape, dtype, seed)


OFFSETS = (0.0, 1e3, -1e5, 1e6, 1e9)


def with_offset(offset: float, shape, dtype: str) -> np.ndarray:
    """Numbers of which many, but not all, are close to the largest, all far from 0 together."""
    random = np.random.default_rng(0)
    step = np.float64(spacing(np.array(offset), np_dtype(dtype)))
    x = offset + 3 * random.standard_normal(shape) + step * random.integers(0, 3, shape)
    return x.astype(np_dtype(dtype))


def exact(x: np.ndarray) -> np.ndarray:
    """The same values in the precision that references are computed in: at least float64, in which
    processors have vectors, and a wider one where results are of float64."""
    x = np.asarray(x)
    return x.astype(np.longdouble if x.dtype.itemsize >= 8 else np.float64)


def dequantised(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """x * scale, in float64. Dims of a scale are 1, those of x, or one for each 128 of these."""
    scale = exact(scale)
    for axis in (-2, -1):
        if scale.shape[axis] not in (1, x.shape[axis]):
            scale = np.repeat(scale, 128, axis).take(range(x.shape[axis]), axis)
    return exact(x) * scale


def assert_same_bits(actual, expected) -> None:
    """Unlike equality, this tells zeros and NaN apart."""

    def bits(x):
        return np.asarray(x).view(f"uint{8 * x.dtype.itemsize}")

    np.testing.assert_array_equal(bits(actual), bits(expected))


def activated(activation: str | None, x) -> np.ndarray:
    """The activation of `linear` in float64, by formulas that do not cancel."""
    x = np.asarray(x, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        if activation == "relu":
            return np.maximum(x, 0)
        if activation == "gelu":
            return x * special.expit(2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
        if activation == "gelu_exact":
            return x * special.ndtr(x)
        return x * special.expit(x) if activation == "silu" else x


def spacing(values: np.ndarray, dtype) -> np.ndarray:
    """The distance between neighbouring numbers of `dtype` at `values`."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.spacing(np.abs(values).astype(dtype)).astype(np.float64)


def custom_calls(function, *arguments) -> list[str]:
    """The custom calls of ours in the compiled program, so that no test passes by a fallback."""
    return custom_calls_of(jax.jit(function).lower(*arguments).compile())


def custom_calls_of(program) -> list[str]:
    """The custom calls of ours in a compiled program."""
    text = program.as_text()
    return [word for word in text.replace('"', " ").split() if word.startswith("jax_gpuops_")]


def multiprocessors(implementation: str) -> int:
    """Those of the host executor, or of the GPU that plans are made for."""
    return 4 if implementation == "interpret" else 132


def refusal(op: str, algorithm: str, shape=(1, 1), dtype: str = "float32", **arguments) -> str:
    """Why an algorithm cannot run a call on this machine; empty if it can."""
    structs = {
        name: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype) if name == "where" else x
        for name, x in arguments.items()
        if x is not None
    }
    return _refusal(op, algorithm, _hashable(shape), dtype, tuple(structs.items()))


@functools.cache  # tests ask the same again and again
def _refusal(op, algorithm, shape, dtype, arguments) -> str:
    try:
        with x64(dtype):
            jax_gpuops.plan(op, shape, dtype, algorithm=algorithm, **dict(arguments))
    except ValueError as error:
        return str(error)
    return ""


def _hashable(shape):
    """A shape, or those of several operands, as tuples."""
    return tuple(map(_hashable, shape)) if isinstance(shape, list | tuple) else shape


def algorithms(op: str, *names: str, **call) -> list:
    """Parameters for tests of an op: the named algorithms, skipped where the plan refuses them."""
    return [
        pytest.param(
            name, marks=pytest.mark.skipif(bool(why := refusal(op, name, **call)), reason=why)
        )
        for name in names
    ]


@contextlib.contextmanager
def recorded(implementation: str):
    """Collects the executions of handlers in the block: what each planned and launched.

    The list is filled when the block ends; what runs in it must be waited for there.
    """
    module = _library.module(implementation)
    executions: list[dict] = []
    module.start_recording()
    try:
        yield executions
    finally:
        executions += module.stop_recording()


@contextlib.contextmanager
def buffers_at(offset: int):
    """Has the interpreter's kernels see buffers that begin `offset` bytes past where XLA aligned.

    On the GPU nothing moves a buffer from there.
    """
    module = _library.module("interpret")
    module.set_buffer_offset(offset)
    try:
        yield
    finally:
        module.set_buffer_offset(0)


def base_name(kernel: str) -> str:
    """The name of a kernel without return type, namespaces, template arguments and parameters."""
    return re.match(r"(?:void )?(?:\w+::)*(\w+)", kernel).group(1)


def options(op: str, algorithm: str, implementation: str, shapes, dtype: str) -> dict[str, str]:
    """The options of a call that names an algorithm; skips the test if it takes no such call."""
    if why := refusal(op, algorithm, shapes, dtype):
        pytest.skip(why)
    return {"implementation": implementation, "algorithm": algorithm}


every_layout = pytest.mark.parametrize(
    ("transpose_a", "transpose_b"), [(a, b) for a in (False, True) for b in (False, True)]
)


def swap(x):
    """The transposed matrices, as they lie in memory."""
    return np.ascontiguousarray(np.swapaxes(x, -1, -2))


def stored(x, transpose: bool):
    """Matrices as they are, or transposed."""
    return swap(x) if transpose else x


def to_tf32(x):
    """The nearest numbers of TF32: 11 bits of a float's 24."""
    fraction, exponent = np.frexp(np.asarray(x, np.float64))
    return np.ldexp(np.round(np.ldexp(fraction, 11)), exponent - 11).astype(np.float32)


def factor(shape, dtype, seed=0):
    """Normal numbers that tensor cores multiply as they are: of float32, those of TF32."""
    x = normal(shape, dtype, seed)
    return to_tf32(x) if dtype == "float32" else x


def dot(a, b, transpose_a, transpose_b, dtype, **how):
    """a @ b of matrices, or batches of them, that are stored transposed or not."""
    batch = tuple(range(max(a.ndim, b.ndim) - 2)) if a.ndim == b.ndim else ()
    contract = a.ndim - (2 if transpose_a else 1), b.ndim - (1 if transpose_b else 2)
    return jax_gpuops.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), (batch, batch)),
        preferred_element_type=dtype,
        **how,
    )


def recorded_dot(a, b, transpose_a, transpose_b, dtype, **how):
    """a @ b with the factors stored transposed or not, and the config of the kernel that ran."""
    with recorded(how["implementation"]) as executions:
        a, b = stored(a, transpose_a), stored(b, transpose_b)
        y = jax.block_until_ready(dot(a, b, transpose_a, transpose_b, dtype, **how))
    (execution,) = executions
    assert execution["algorithm"] == how["algorithm"]
    return y, execution["config"]


def assert_products(batch, sizes, transpose_a, transpose_b, dtype, result, **how):
    """Checks a batch of products of m x k by k x n; returns the config of the kernel that ran."""
    m, n, k = sizes
    a, b = factor((batch, m, k), dtype), factor((batch, k, n), dtype, seed=1)
    y, config = recorded_dot(a, b, transpose_a, transpose_b, result, **how)
    assert y.dtype == result
    assert_matmul(y, a, b)
    return config


def assert_product(actual, expected, magnitude, depth):
    """Checks that sums of `depth` products are as exact as their accumulator allows.

    `magnitude` is the product of absolute values: what rounding errors are relative to. 16-bit
    results are those of float32 sums, rounded once.
    """
    actual = np.asarray(actual)
    assert actual.shape == expected.shape
    accumulated = np.float32 if actual.dtype.itemsize == 2 else actual.dtype
    bound = (depth + 3) * np.finfo(accumulated).eps * magnitude
    if actual.dtype.itemsize == 2:
        bound = bound + spacing(expected, actual.dtype)
    assert np.all(np.abs(exact(actual) - expected) <= bound)


def assert_matmul(actual, a, b):
    """Checks a @ b against float64."""
    a, b = exact(a), exact(b)
    assert_product(actual, a @ b, np.abs(a) @ np.abs(b), a.shape[-1])


def assert_gemm_of_batch(a, b, share, transpose_a, transpose_b, **how):
    """Compares the products of a batch of factors, of which `share`, if any, is one matrix."""
    a, b = a[0] if share == "a" else a, b[0] if share == "b" else b
    y = jax_gpuops.gemm(
        stored(a, transpose_a),
        stored(b, transpose_b),
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        **how,
    )
    assert_matmul(y, a, b)


def primitive(function: str):
    """The primitive of one of our kernels, for what no argument of a public function reaches."""
    return next(p for p, k in _primitive.KERNELS.items() if k.name == f"gpuops_{function}")


def under_each_schedule(function, schedules):
    """The result of `function()` in the order of threads that the executor has of itself, after a
    check that it is the same in other ones: pairs of a seed and what is held back."""
    from jax_gpuops_ffi import _interpret

    expected = np.asarray(function())
    try:
        for seed, held_back in schedules:
            _interpret.set_schedule_seed(seed)
            _interpret.set_held_back(**held_back)
            np.testing.assert_array_equal(np.asarray(function()), expected, f"{seed} {held_back}")
    finally:
        _interpret.set_schedule_seed(0)
        _interpret.set_held_back()
    return expected


def assert_not_gathered(layer, *operands, tolerance=1e-4) -> None:
    """Checks that XLA keeps the first two dims of operands and results on the devices they are on.

    Args:
      layer: a function of the operands; its result has their first two dims, as do gradients.
      *operands: arrays that are divided over four devices along these dims, or None.
      tolerance: of the results and the gradients, compared with XLA's on one of them, relative to
        the largest element.
    """
    devices = np.array(jax.devices("cpu")[:4]).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("d", "t"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    divided = jax.device_put(operands, jax.sharding.NamedSharding(mesh, jax.P("d", "t")))

    def loss(operands):
        y = layer(*operands)
        return (y.astype("float32") ** 2).sum(), y

    gradient = jax.grad(loss, has_aux=True)
    with jax_gpuops.use("xla"):
        expected = gradient(jax.device_put(operands, devices[0, 0]))
    compiled = jax.jit(gradient).lower(divided).compile()
    assert "all-gather" not in compiled.as_text()
    for y, reference in zip(*map(jax.tree.leaves, (compiled(divided), expected)), strict=True):
        assert y.sharding.spec == jax.P("d", "t")
        y, reference = (np.asarray(each, "float32") for each in (y, reference))
        np.testing.assert_allclose(y, reference, rtol=0, atol=tolerance * np.abs(reference).max())
