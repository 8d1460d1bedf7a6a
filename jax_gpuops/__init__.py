"""CUDA kernels for softmax, reductions, transpose and matrix multiplication as JAX operations."""

__version__ = "0.1.0"

from jax_gpuops._cross_entropy import (
    softmax_cross_entropy_with_integer_labels as softmax_cross_entropy_with_integer_labels,
)
from jax_gpuops._glu import glu as glu
from jax_gpuops._implementation import use as use
from jax_gpuops._library import EXPORT_CHECKS as EXPORT_CHECKS
from jax_gpuops._library import Algorithm as Algorithm
from jax_gpuops._library import algorithms as algorithms
from jax_gpuops._linear import linear as linear
from jax_gpuops._linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from jax_gpuops._matmul import dot_general as dot_general
from jax_gpuops._matmul import gemm as gemm
from jax_gpuops._matmul import matmul as matmul
from jax_gpuops._measurements import load_measurements as load_measurements
from jax_gpuops._moments import mean_and_var as mean_and_var
from jax_gpuops._moments import std as std
from jax_gpuops._moments import var as var
from jax_gpuops._plan import Explanation as Explanation
from jax_gpuops._plan import explain as explain
from jax_gpuops._plan import plan as plan
from jax_gpuops._reduce import argmax as argmax
from jax_gpuops._reduce import argmin as argmin
from jax_gpuops._reduce import max as max
from jax_gpuops._reduce import mean as mean
from jax_gpuops._reduce import min as min
from jax_gpuops._reduce import prod as prod
from jax_gpuops._reduce import sum as sum
from jax_gpuops._report import Call as Call
from jax_gpuops._report import Plan as Plan
from jax_gpuops._scaled_matmul import scaled_matmul as scaled_matmul
from jax_gpuops._softmax import log_softmax as log_softmax
from jax_gpuops._softmax import logsumexp as logsumexp
from jax_gpuops._softmax import softmax as softmax
from jax_gpuops._status import status as status
from jax_gpuops._transpose import transpose as transpose

for _public in list(globals().values()):  # tracebacks and pickles name what users import
    if getattr(_public, "__module__", "").startswith(f"{__name__}._"):
        _public.__module__ = __name__
del _public
