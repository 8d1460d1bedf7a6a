"""The shapes of the programs, from published models, and their floors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bench.problem import Floor, Problem, Shape, first_of_each_op
from bench.programs import texts

_DEFAULT = Floor(ratio=0.98)
"""Swapping only the import must not lose speed."""


def problems(names: Sequence[str] = (), *, gpu: bool, quick: bool = False) -> list[Problem]:
    """Returns the problems of programs, grouped by program.

    Args:
      names: the names of programs; empty for all.
      gpu: True for the shapes of published models, False for sizes that run fast on the host.
      quick: True for only the first problem of each program.
    """
    found = [each for each in (_gpu() if gpu else _host()) if each.op in (names or texts.PROGRAMS)]
    return first_of_each_op(found) if quick else found


def floor(problem: Problem, *, gradient: bool, named: bool) -> Floor | None:
    """Returns the floor of a way to run a program, relative to plain JAX.

    Args:
      problem: a problem of a program.
      gradient: True for the gradient, False for the forward pass alone.
      named: True if kernels were requested, False if only the import was swapped.
    """
    has_narrow_logits = problem.op == "lm_head" and "logits" not in problem.options
    is_small = has_narrow_logits or problem.op == "lm_head_loss"
    memory = 0.35 if is_small and gradient else None
    if not named:
        return Floor(ratio=_DEFAULT.ratio, memory=memory)
    ratio = _NAMED.get(str(problem)) if gradient else None
    return None if ratio is None and memory is None else Floor(ratio=ratio, memory=memory)


def _problem(
    op: str, model: str | None, shape: Shape, dtype: str = "bfloat16", **options: Any
) -> Problem:
    return Problem(op, shape, dtype, options, model=model)


_CAUSAL = _problem("attention", "Pythia 1.4B", (4, 2048, 16, 128), mask="causal")
_ODD_VOCABULARY = _problem("lm_head", "GPT-Neo 1.3B", (8192, 2048, 50257))
_MLP = _problem("mlp", "GPT-J 6B", (8192, 4096, 16384), activation="gelu")
_NAMED = {str(_CAUSAL): 1.8, str(_ODD_VOCABULARY): 2.0, str(_MLP): 1.0}
"""The least speeds of programs with gradients, if kernels are requested."""


def _gpu() -> Iterator[Problem]:
    p = _problem
    yield _CAUSAL
    yield p("attention", "Pythia 1.4B", _CAUSAL.shape, mask="causal", by_hand=True)
    yield p("attention", "Pythia 1.4B", _CAUSAL.shape, mask="causal", scores="float32")
    yield p("attention", "Pythia 1.4B", _CAUSAL.shape, "float32", mask="causal")
    yield p("attention", "GPT", (32, 512, 12, 64), mask="causal")
    yield p("attention", "Llama 2 7B", (2, 4096, 32, 128), mask="causal")
    yield p("attention", "MusicGen medium", (4, 1500, 24, 64), mask="causal")
    yield p("attention", "CLIP ViT-B/32, text", (256, 77, 8, 64), mask="causal")
    yield p("attention", "BERT large", (32, 512, 16, 64), mask="padded")
    yield p("attention", "nomic-bert-2048", (8, 2048, 12, 64), mask="padded")
    yield p("attention", "Whisper large, encoder", (4, 1500, 20, 64), mask="padded")
    yield p("attention", "ViT-B/16", (64, 197, 12, 64), "float32", mask="padded")

    yield _ODD_VOCABULARY
    for program in ("lm_head", "lm_head_loss"):
        yield p(program, "Llama 2 7B", (8192, 4096, 32000))
        yield p(program, "GPT-2 medium", (8192, 1024, 50257))
        yield p(program, "Llama 3 8B", (4096, 4096, 128256))
        yield p(program, "Gemma 3 1B", (4096, 1152, 262144))
        yield p(program, "Llama 3.2 1B", (4096, 2048, 128256), logits="float32")

    yield p("router", "Mixtral 8x7B", (8192, 4096, 8), top_k=2)
    yield p("router", "Qwen3 30B-A3B", (8192, 2048, 128), top_k=8)

    yield p("classifier", "ResNet-50, head", (256, 7, 7, 2048), layers=(1000,))
    yield p("classifier", "LeNet-300-100", (8192, 784), "float32", layers=(300, 100, 10))

    yield p("mlp", "OPT 6.7B", (8192, 4096, 16384), activation="relu")
    yield _MLP
    yield p("mlp", "BERT large", (16384, 1024, 4096), activation="gelu_exact")

    yield p("layer_norm", "BERT large", (32, 512, 1024))
    yield p("layer_norm", "GPT-2 XL", (8, 1024, 1600), "float32")
    yield p("batch_norm", "ResNet-50, stage 1", (256, 56, 56, 64))
    yield p("batch_norm", "ResNet-50, stage 3", (64, 14, 14, 1024), "float32")

    yield p("sampling", "Llama 3 8B", (64, 128256), top_k=50, temperature=0.75)
    yield p("sampling", "GPT-2", (256, 50257), "float32", top_k=40, temperature=0.75)

    yield p("images", "ResNet-50, input", (256, 224, 224, 3), to="NCHW")
    yield p("images", "ResNet-50, input", (256, 3, 224, 224), "float32", to="NHWC")
    yield p("heads", "Llama 2 7B", (2, 4096, 32, 128))
    yield p("heads", "BERT large", (32, 512, 16, 64), "float32")


def _host() -> Iterator[Problem]:
    """Small, odd sizes."""

    def p(op, shape, dtype="bfloat16", **options):
        return _problem(op, None, shape, dtype, **options)

    yield p("attention", (2, 33, 2, 8), mask="causal", scores="float32")
    yield p("attention", (2, 40, 2, 8), "float32", mask="padded")
    yield p("lm_head", (24, 16, 131))
    yield p("lm_head_loss", (24, 16, 131), rows_per_chunk=9)
    yield p("lm_head_loss", (24, 20, 131), logits="float32", rows_per_chunk=9)
    yield p("router", (40, 16, 8), top_k=2)
    yield p("classifier", (9, 3, 3, 16), "float32", layers=(12, 7))
    yield p("mlp", (24, 16, 40), activation="gelu")
    yield p("layer_norm", (2, 9, 70), "float32")
    yield p("batch_norm", (3, 5, 5, 6))
    yield p("sampling", (6, 300), top_k=5, temperature=0.75)
    yield p("images", (2, 9, 11, 3), to="NCHW")
    yield p("images", (2, 3, 9, 11), "float32", to="NHWC")
    yield p("heads", (2, 9, 3, 8))
