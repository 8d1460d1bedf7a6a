"""Prints the status report."""

import argparse

from jax_gpuops._status import status

if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m jax_gpuops",
        description="Prints what is installed, what JAX sees, and what calls run on this machine.",
    ).parse_args()
    print(status())
