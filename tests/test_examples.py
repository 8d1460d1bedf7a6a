"""The examples run."""

import importlib
import pathlib
import re

import helpers
import jax.numpy as jnp
import pytest
from flax import nnx

import jax_gpuops

ROOT = pathlib.Path(__file__).parent.parent


def test_the_readme(capsys):
    """Its Python runs as written, from top to bottom."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) > 1
    exec("\n".join(blocks), {})
    assert "logsumexp_cotangent" in capsys.readouterr().out


def test_the_explanation_of_debugging_md(capsys):
    """The program prints what the page says."""
    page = (ROOT / "docs" / "debugging.md").read_text()
    code, printed = re.search(
        r"```python\n([^`]*explain.*?)```.*?```\n(.*?)```", page, re.S
    ).groups()
    exec(code, {})
    assert capsys.readouterr().out == printed


@pytest.fixture
def digits(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("digits")


def test_digits(digits, tmp_path, implementation, capsys):
    """One epoch of each training; the full example takes a minute on two cores."""
    figure = tmp_path / "digits.png"
    runs = digits.main(
        ["--epochs", "1", "--implementation", implementation, "--figure", str(figure)]
    )
    stock, ours = runs.values()
    assert len(stock.losses) == len(ours.losses) == 22
    assert ours.losses[-1] < ours.losses[0]
    assert ours.accuracy > 0.5
    assert figure.stat().st_size > 0
    assert "largest difference" in capsys.readouterr().out


def test_digits_runs_our_kernels(digits, implementation):
    """Otherwise the example would compare the stock layers with themselves."""
    model = digits.Classifier(is_ours=True, rngs=nnx.Rngs(0))
    with jax_gpuops.use(implementation):
        calls = helpers.custom_calls(lambda x: model(x), jnp.zeros((2, 8, 8)))
    assert {call.split(",")[0].rstrip(")") for call in calls} >= {
        "jax_gpuops_gemm_v2",
        "jax_gpuops_softmax_v1",
    }
