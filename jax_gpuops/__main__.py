"""Prints the status report."""

from jax_gpuops._status import status

if __name__ == "__main__":
    print(status())
