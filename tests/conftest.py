"""What all tests share.

Every test of a kernel takes the fixture `implementation`: "cuda" where JAX sees a GPU, else
"interpret". The compiled modules must be there: with a silent fallback the suite would compare XLA
with XLA.
"""

import gc
import threading

import jax
import pytest
from jax._src.interpreters import mlir

from jax_gpuops import _library

jax.config.update("jax_num_cpu_devices", 4)  # for the sharding tests; other programs use one

HAS_GPU = jax.default_backend() == "gpu"


def _each_ten_times(make):
    """A function that returns what make() does, and the same up to ten times in a thread."""
    last = threading.local()

    def take():
        if getattr(last, "left", 0) == 0:
            last.made, last.left = make(), 10
        last.left -= 1
        return last.made

    return take


if jax.__version_info__ < (0, 11):  # as later versions do: a quarter of the tests' time went there
    mlir.make_ir_context = _each_ten_times(mlir.make_ir_context)


def pytest_sessionstart(session):
    gc.disable()  # until all modules and tests are there, which live to the end
    for implementation in ["interpret", *(["cuda"] if HAS_GPU else [])]:
        if (why := _library.missing(implementation)) is not None:
            pytest.exit(f"{why}; run `pip install .`", returncode=3)


def pytest_collection_finish(session):
    """Leaves what lives to the end out of what the garbage collector visits, and lets it come less
    often: lowering a program makes thousands of objects, and few of them in cycles.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    gc.enable()


def pytest_runtest_setup(item):
    if item.get_closest_marker("large") and not HAS_GPU:
        pytest.skip("GiB take the host executor an hour")


@pytest.fixture(scope="session")
def implementation():
    return "cuda" if HAS_GPU else "interpret"
