"""The compiled part of jax_gpuops: `_cuda` for NVIDIA GPUs, `_interpret` for the host.

A package of its own, kept out of the root of the source tree, so that it is always the installed
one: a checkout's `jax_gpuops/` shadows the installed `jax_gpuops` for `python -m pytest`.
"""
