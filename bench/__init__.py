"""The benchmark of jax_gpuops against XLA: `python -m bench --help`."""
