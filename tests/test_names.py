"""What users see of names: of modules, in tracebacks and pickles, in traces and profiles."""

import inspect
import logging
import pickle
import re
import types

import jax
import jax.numpy as jnp
import pytest
from test_transforms import OPS, name_of, public_ops

import jax_gpuops


@pytest.mark.parametrize("name", [*public_ops(), "plan", "explain", "use", "algorithms", "status"])
def test_public_functions_are_of_the_package(name):
    function = getattr(jax_gpuops, name)
    assert (function.__module__, function.__qualname__) == ("jax_gpuops", name)
    assert pickle.loads(pickle.dumps(function)) is function
    assert inspect.getsource(function).lstrip().startswith(("def ", "@"))


def test_no_function_hides_a_module():
    """`import jax_gpuops.softmax as m` would find the function or the module, by chance."""
    modules = {n for n, v in vars(jax_gpuops).items() if isinstance(v, types.ModuleType)}
    assert {name for name in modules if not name.startswith("_")} <= {"flax"}
    with pytest.raises(ModuleNotFoundError):
        __import__("jax_gpuops.softmax")


PRIMITIVES = {
    "softmax_cross_entropy_with_integer_labels": "cross_entropy",
    "std": "var",
    "matmul": "gemm",
    "dot_general": "gemm",
    "glu": "gemm",  # of float32
}


@pytest.mark.parametrize("op", OPS, ids=name_of)
def test_custom_calls_are_named_after_their_op(op, implementation):
    """Profilers show the names of instructions, and the scopes that they come from."""
    lowered = jax.jit(lambda *xs: op(*xs, implementation=implementation)).lower(*op.operands())
    text = lowered.compile().as_text()
    for scope in re.findall('op_name="([^"]*)"', text):
        assert "ffi_call" not in scope
        assert "_apply" not in scope
    lines = [line for line in text.splitlines() if 'custom_call_target="jax_gpuops_' in line]
    assert lines
    for line in lines:
        assert f"gpuops_{PRIMITIVES.get(op.name, op.name)}" in line.split(" = ")[0]


KERNELS_OF_GRADIENTS = {
    "var": {"mean_and_var"},
    "std": {"mean_and_var"},
    "softmax": {"softmax", "softmax_tangent"},
    "log_softmax": {"log_softmax", "log_softmax_cotangent"},
    "logsumexp": {"logsumexp_with_residuals", "logsumexp_cotangent"},
    "linear-gelu-highest": {"linear", "gemm"},
    "linear-None-highest": {"linear_add", "gemm"},  # with a residual
    "softmax_cross_entropy_with_integer_labels": {"cross_entropy", "cross_entropy_cotangent"},
}


@pytest.mark.parametrize("op", [op for op in OPS if op.differentiable], ids=name_of)
def test_custom_calls_of_gradients_have_names_of_their_own(op, implementation):
    def gradient(*xs):
        return jax.grad(lambda *xs: (op(*xs, implementation=implementation) ** 2).sum())(*xs)

    text = jax.jit(gradient).lower(*op.operands()).compile().as_text()
    lines = [line for line in text.splitlines() if 'custom_call_target="jax_gpuops_' in line]
    names = {re.search(r"%gpuops_([a-z_]+)", line.split(" = ")[0])[1] for line in lines}
    own = KERNELS_OF_GRADIENTS.get(op.name, {PRIMITIVES.get(op.name, op.name)})
    assert names == KERNELS_OF_GRADIENTS.get(name_of(op), own)
    for line in lines:
        scope = re.search('op_name="([^"]*)"', line)[1]
        assert scope.split("/")[-1] == re.search(r"%(gpuops_[a-z_]+)", line)[1]


@pytest.mark.parametrize("op", OPS, ids=name_of)
def test_compilations_are_logged_under_the_name_of_the_op(op, implementation, caplog):
    operands = op.operands()
    jax.clear_caches()
    with jax.log_compiles(True), caplog.at_level(logging.WARNING):
        op(*operands, implementation=implementation)
    compiled = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling")]
    assert any(op.name in message.split(" with ")[0] for message in compiled), compiled
    assert not any("_apply" in message for message in compiled)


def test_scopes_bear_the_name_of_the_op():
    text = jax.jit(lambda x: jax_gpuops.sum(jax_gpuops.softmax(x), -1)).lower(jnp.ones((2, 3)))
    text = text.as_text(debug_info=True)
    assert "/softmax/gpuops_softmax" in text
    assert "/sum/" in text
