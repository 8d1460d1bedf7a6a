"""What all tests share.

Every test of a kernel takes the fixture `implementation`: "cuda" where JAX sees a GPU, else
"interpret". The compiled modules must be there: with a silent fallback the suite would compare XLA
with XLA.
"""

import gc

import jax
import pytest

from jax_gpuops import _library

jax.config.update("jax_num_cpu_devices", 4)  # for the sharding tests; other programs use one

HAS_GPU = jax.default_backend() == "gpu"


def pytest_sessionstart(session):
    gc.disable()  # until all modules and tests are there, which live to the end
    for implementation in ["interpret", *(["cuda"] if HAS_GPU else [])]:
        if (why := _library.missing(implementation)) is not None:
            pytest.exit(f"{why}; run `pip install .`", returncode=3)


def pytest_collection_finish(session):
    """Leaves what lives to the end out of what the garbage collector visits."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item):
    if item.get_closest_marker("large") and not HAS_GPU:
        pytest.skip("GiB take the host executor an hour")


@pytest.fixture(scope="session")
def implementation():
    return "cuda" if HAS_GPU else "interpret"
