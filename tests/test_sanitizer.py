"""Every algorithm of every op once, on awkward shapes: the subset to run under compute-sanitizer.

    XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async compute-sanitizer --tool memcheck \\
        python -m pytest -m sanitizer

and the same with `--tool racecheck` and `--tool synccheck`. memcheck sees the ends of buffers only
with that allocator: JAX's pool is one allocation, and "platform" rounds each up to 2 MiB.
"""

import os
import shutil
import subprocess
import sys

import helpers
import jax
import numpy as np
import pytest

import jax_gpuops as ops

pytestmark = [pytest.mark.sanitizer, pytest.mark.kernel]


def rows(dtype):
    return helpers.normal((5, 131), dtype)


def call_softmax(algorithm, dtype, implementation):
    x = rows(dtype)
    y = ops.softmax(x, implementation=implementation, algorithm=algorithm)
    return y, jax.nn.softmax(x.astype(np.float32))


def call_reduce(algorithm, dtype, implementation):
    x = rows(dtype)
    axis = 0 if algorithm == "column" else -1
    y = ops.max(x, axis, implementation=implementation, algorithm=algorithm)
    return y, x.astype(np.float32).max(axis)


def call_transpose(algorithm, dtype, implementation):
    x = rows(dtype)
    return ops.transpose(x, implementation=implementation, algorithm=algorithm), x.T


def call_matmul(algorithm, dtype, implementation):
    a, b = rows(dtype), helpers.normal((131, 67), dtype, seed=1)
    y = ops.matmul(a, b, implementation=implementation, algorithm=algorithm)
    return y, a.astype(np.float32) @ b.astype(np.float32)


CALLS = {
    "softmax": call_softmax,
    "reduce": call_reduce,
    "transpose": call_transpose,
    "matmul": call_matmul,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "algorithm"),
    [(family, a.name) for family in CALLS for a in ops.algorithms(family)],
)
def test_every_algorithm(family, algorithm, dtype, implementation):
    if algorithm == "cublas" and implementation != "cuda":
        pytest.skip("the library cuBLAS runs on GPUs")
    actual, expected = CALLS[family](algorithm, dtype, implementation)
    expected = np.asarray(expected, np.float32)
    rtol = 1e-5 if dtype == "float32" else 1e-2
    # Sums that cancel keep the error of their terms: a thousandth of the largest result at most.
    atol = 0.1 * rtol * np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(actual, np.float32), expected, rtol=rtol, atol=atol)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="needs compute-sanitizer")
@pytest.mark.skipif("NV_SANITIZER_INJECTION_PORT_BASE" in os.environ, reason="runs under one")
@pytest.mark.parametrize(
    ("tool", "kernel", "report"),
    [
        ("memcheck", "global_out_of_bounds", "Invalid __global__ write of size 4 bytes"),
        ("memcheck", "shared_out_of_bounds", "Invalid __shared__ write of size 4 bytes"),
        ("racecheck", "missing_barrier", "hazards displayed"),
        ("synccheck", "divergent_barrier", "Barrier error detected"),
        ("initcheck", "reverse", "ERROR SUMMARY: 0 errors"),
    ],
)
def test_a_planted_fault_is_reported(tool, kernel, report):
    program = (
        "import jax, numpy as np, jax_gpuops; x = jax.device_put(np.arange(60, dtype=np.float32));"
        "call = jax.ffi.ffi_call('jax_gpuops_selftest_v1', jax.ShapeDtypeStruct(x.shape, x.dtype));"
        f"print(call(x, kernel={kernel!r}))"
    )
    outcome = subprocess.run(
        ["compute-sanitizer", "--tool", tool, sys.executable, "-c", program],
        env={**os.environ, "XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"},
        capture_output=True,
        text=True,
    )
    assert report in outcome.stdout + outcome.stderr
