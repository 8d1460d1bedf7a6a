"""Prints the status report."""

from jax_gpuops.status import status

if __name__ == "__main__":
    print(status())
