"""Whole programs, with plain JAX and with jax_gpuops: `python -m bench programs`."""
