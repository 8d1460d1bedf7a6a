"""The host executor catches what it promises to catch, through the same path that ops take.

tests/simt/ tests the executor itself, in C++.
"""

import subprocess
import sys

import helpers
import jax
import numpy as np
import pytest
from jax_gpuops_ffi import _interpret

import jax_gpuops  # noqa: F401  registers the targets

SANITIZED = _interpret.build_info()["sanitized"]


def run(kernel: str, x: np.ndarray) -> np.ndarray:
    call = jax.ffi.ffi_call("jax_gpuops_selftest_v1", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return np.asarray(jax.device_get(call(jax.device_put(x, jax.devices("cpu")[0]), kernel=kernel)))


@pytest.fixture
def seeds():
    """Gives every test the schedule seeds, and the natural order back to the next one."""
    yield range(6)
    _interpret.set_schedule_seed(0)


@pytest.mark.kernel
@pytest.mark.parametrize("size", [1, 31, 64, 65, 200])
def test_a_correct_kernel_is_right_in_any_order(size, seeds):
    x = helpers.normal(size, "float32")
    for seed in seeds:
        _interpret.set_schedule_seed(seed)
        np.testing.assert_array_equal(run("reverse", x), x[::-1])


def test_a_missing_barrier_shows_in_some_order(seeds):
    x = helpers.normal(64, "float32")
    right = np.concatenate([x[:1], x[:-1]])
    outcomes = []
    for seed in seeds:
        _interpret.set_schedule_seed(seed)
        outcomes.append(np.array_equal(run("missing_barrier", x), right))
    assert outcomes[0], "in ascending order the kernel happens to work"
    assert not all(outcomes)


def test_a_divergent_barrier_is_an_error():
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"block.*thread.*__syncthreads"):
        run("divergent_barrier", np.ones(64, np.float32))


def test_a_shuffle_that_names_absent_lanes_is_an_error():
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"block.*thread.*__shfl_xor_sync"):
        run("absent_lanes", np.ones(40, np.float32))


def test_shared_memory_that_nobody_wrote_is_nan():
    y = run("unwritten_shared", np.ones(64, np.float32))
    assert np.isnan(y[-1])
    assert np.all(y[:-1] == 1)


def test_an_unknown_kernel_is_an_ffi_error():
    with pytest.raises(jax.errors.JaxRuntimeError, match="no self-test kernel 'none'"):
        run("none", np.ones(4, np.float32))


@pytest.mark.kernel
@pytest.mark.skipif(not SANITIZED, reason="AddressSanitizer sees these: CI builds with it")
@pytest.mark.parametrize("kernel", ["global_out_of_bounds", "shared_out_of_bounds"])
def test_an_access_out_of_bounds_is_reported(kernel):
    program = (
        f"import sys; sys.path.insert(0, {str(sys.path[0])!r}); import numpy as np; "
        f"import test_interpreter; test_interpreter.run({kernel!r}, np.ones(60, np.float32))"
    )
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert outcome.returncode != 0
    assert "heap-buffer-overflow" in outcome.stderr
    assert kernel in outcome.stderr
