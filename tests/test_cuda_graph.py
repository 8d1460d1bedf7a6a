"""Handlers are captured into CUDA graphs, and the graphs replay right with new buffers."""

import os
import pathlib
import subprocess
import sys

import jax
import pytest

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

# One call of ours and nothing else: XLA makes a command buffer of it only if the handler's traits
# let it. Each run has other input and output buffers.
PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
import jax_gpuops as ops

compiled = jax.jit(lambda x: {call}).lower(jnp.zeros(({shape}))).compile()
inputs = [jax.random.normal(jax.random.key(i), ({shape})) for i in range(6)]
outputs = [compiled(x) for x in inputs]
for x, y in zip(inputs, outputs):
    expected = {reference}
    np.testing.assert_allclose(y, expected, rtol=2e-5, atol=2e-6 * float(abs(expected).max()))
"""

CALLS = {
    "softmax": ("ops.softmax(x, implementation='cuda')", "256, 1000", "jax.nn.softmax(x)"),
    "softmax long": ("ops.softmax(x, implementation='cuda')", "2, 70001", "jax.nn.softmax(x)"),
    "softmax whose blocks wait for each other": (
        "ops.softmax(x, implementation='cuda')",
        "14, 700001",
        "jax.nn.softmax(x)",
    ),
    "softmax of a cluster's slices": (
        "ops.softmax(x, implementation='cuda')",
        "3, 200001",
        "jax.nn.softmax(x)",
    ),
    "softmax of columns in strips": (
        "ops.softmax(x, 0, implementation='cuda')",
        "3000, 72",
        "jax.nn.softmax(x, 0)",
    ),
    "logsumexp whose second kernel starts early": (
        "ops.logsumexp(x, -1, implementation='cuda')",
        "4, 300000",
        "jax.nn.logsumexp(x, -1)",
    ),
    "sum": ("ops.sum(x, implementation='cuda')", "3000000,", "jnp.sum(x)"),
    "var": ("ops.var(x, implementation='cuda')", "3000000,", "jnp.var(x)"),
    "argmax": ("ops.argmax(x, 0, implementation='cuda')", "300, 700", "jnp.argmax(x, 0)"),
    "transpose": ("ops.transpose(x, implementation='cuda')", "300, 700", "x.T"),
    "gemm": (
        "ops.matmul(x, x, precision='highest', implementation='cuda')",
        "300, 300",
        "jnp.matmul(x, x, precision='highest')",
    ),
    "linear": (
        "ops.linear(x, x, x[0], activation='relu', precision='highest', implementation='cuda')",
        "300, 300",
        "jax.nn.relu(jnp.matmul(x, x, precision='highest') + x[0])",
    ),
    "linear with a residual": (
        "ops.linear(*[jnp.sign(x).astype('bfloat16')] * 2, algorithm='tensor_core', "
        "residual=jnp.sign(x).astype('bfloat16'), implementation='cuda')",
        "8, 8",
        "(jnp.matmul(*[jnp.sign(x)] * 2) + jnp.sign(x)).astype('bfloat16')",  # small integers
    ),
    "gemm by parts, and the kernel behind for what has none": (
        "ops.matmul(x, x, precision='highest', implementation='cuda')",
        "1024, 1024",
        "jnp.matmul(x, x, precision='highest')",
    ),
    "gemm by parts of float16, and both kernels behind": (
        "ops.matmul(x, x, precision='highest', algorithm='fp16_x3', implementation='cuda')",
        "300, 300",
        "jnp.matmul(x, x, precision='highest')",
    ),
    "gemm by FMAs": (
        "ops.matmul(x, x, precision='F32_F32_F32', implementation='cuda')",
        "1024, 1024",
        "jnp.matmul(x, x, precision='highest')",
    ),
    "glu": (
        "ops.glu(*[x.astype('bfloat16')] * 3, activation=None, implementation='cuda')",
        "8, 8",
        "jnp.square(jnp.matmul(*[x.astype('bfloat16')] * 2, preferred_element_type='float32')"
        ").astype('bfloat16')",
    ),
    "scaled_matmul": (
        "ops.scaled_matmul(jnp.ones((256, 256), 'int8'), jnp.ones((256, 256), 'int8'), x, 0.5, "
        "implementation='cuda')",
        "256, 1",
        "128 * x * jnp.ones((1, 256))",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_captured_and_replays(name, tmp_path: pathlib.Path):
    call, shape, reference = CALLS[name]
    program = PROGRAM.format(call=call, shape=shape, reference=reference)
    flags = f"--xla_gpu_graph_min_graph_size=1 --xla_dump_to={tmp_path}"
    outcome = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert outcome.returncode == 0, outcome.stderr
    ours = [
        text
        for path in tmp_path.glob("*thunk_metadata.txt")
        if "gpuops" in (text := path.read_text()) or "kCustomCall" in text
    ]
    assert ours, "the dump shows no program with a custom call"
    assert all("kCommandBuffer" in text for text in ours)
