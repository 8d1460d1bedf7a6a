"""Trains a small classifier of handwritten digits twice: with stock Flax layers, and with ours.

    python examples/digits.py [--epochs 20] [--implementation cuda|interpret|xla] [--figure PATH]

Both runs start from the same parameters and see the same batches, so their losses must agree up to
rounding; the program fails if they do not, or if the test accuracy is not above 96 %. Without a GPU
our kernels run on the host, by implementation="interpret": slow for their size, but the same code.
Needs `pip install 'jax_gpuops[test]'` for Flax, Optax, scikit-learn, Rich and Matplotlib.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.progress import Progress
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jax_gpuops
from jax_gpuops.flax import attention_fn

SIDE = 8  # the images are 8 x 8
BATCH = 64


class Classifier(nnx.Module):
    """One attention block over the rows of an image, then a linear layer over their features."""

    def __init__(self, *, is_ours: bool, rngs: nnx.Rngs, features: int = 32):
        """Makes the layers; `is_ours` makes them multiply and normalize by jax_gpuops."""
        linear = {"dot_general": jax_gpuops.dot_general} if is_ours else {}
        attention = {"attention_fn": attention_fn} if is_ours else {}
        self.embed = nnx.Linear(SIDE, features, rngs=rngs, **linear)
        self.position = nnx.Param(0.1 * jax.random.normal(rngs.params(), (SIDE, features)))
        self.attention = nnx.MultiHeadAttention(
            2, features, features, decode=False, rngs=rngs, **attention
        )
        self.hidden = nnx.Linear(SIDE * features, 2 * features, rngs=rngs, **linear)
        self.output = nnx.Linear(2 * features, 10, rngs=rngs, **linear)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns the logits (batch, 10) of images (batch, 8, 8)."""
        x = self.embed(images) + self.position
        x = x + self.attention(x)
        x = nnx.gelu(self.hidden(x.reshape(len(x), -1)))
        return self.output(x)


@dataclasses.dataclass
class Run:
    """What one training gave."""

    losses: np.ndarray  # by step
    accuracy: float
    seconds: float


@nnx.jit
def train_step(model, optimizer, images, labels):
    """Takes one step and returns the loss before it."""

    def loss_of(model):
        losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
        return losses.mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def count_correct(model, images, labels):
    """Returns how many images the model labels rightly."""
    return (model(images).argmax(-1) == labels).sum()


def load() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns training images, test images, and their labels; pixels from 0 to 1."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, SIDE, SIDE).astype(np.float32)
    return train_test_split(
        images, labels.astype(np.int32), test_size=360, stratify=labels, random_state=0
    )


def train(
    *, is_ours: bool, implementation: str, epochs: int, progress: Progress, seed: int = 0
) -> Run:
    """Trains a classifier from the parameters and with the batches that `seed` gives."""
    images, test_images, labels, test_labels = load()
    model = Classifier(is_ours=is_ours, rngs=nnx.Rngs(seed))
    steps = epochs * (len(images) // BATCH)
    schedule = optax.cosine_decay_schedule(1e-2, steps)
    optimizer = nnx.Optimizer(model, optax.adam(schedule), wrt=nnx.Param)
    random = np.random.default_rng(seed)
    name = f"jax_gpuops ({implementation})" if is_ours else "stock Flax"
    task = progress.add_task(name, total=steps)
    losses = []
    start = time.perf_counter()
    with jax_gpuops.use(implementation if is_ours else None):
        for _ in range(epochs):
            order = random.permutation(len(images))
            for batch in order[: len(order) // BATCH * BATCH].reshape(-1, BATCH):
                losses.append(train_step(model, optimizer, images[batch], labels[batch]))
                losses[-1].block_until_ready()  # so that the bar shows what is done
                progress.advance(task)
        correct = count_correct(model, jnp.asarray(test_images), jnp.asarray(test_labels))
    return Run(np.array(losses), float(correct) / len(test_labels), time.perf_counter() - start)


def plot(runs: dict[str, Run], path: pathlib.Path) -> None:
    """Saves the loss curves and their difference."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, sharex=True, figsize=(7, 6), height_ratios=(2, 1))
    for (name, run), style in zip(runs.items(), ("-", "--"), strict=True):
        top.plot(run.losses, style, label=f"{name}: test accuracy {run.accuracy:.1%}")
    top.set(yscale="log", ylabel="training loss", title="Handwritten digits, one loss curve twice")
    top.legend()
    stock, ours = (run.losses for run in runs.values())
    bottom.plot(np.abs(ours - stock), color="black", linewidth=0.8)
    bottom.set(yscale="log", xlabel="step", ylabel="difference")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> dict[str, Run]:
    """Trains both, compares them, and saves the figure.

    Raises:
      SystemExit: if the losses differ by more than rounding explains, or the accuracy is low.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--implementation", choices=["cuda", "interpret", "xla"])
    parser.add_argument("--figure", type=pathlib.Path, default=pathlib.Path("digits.png"))
    options = parser.parse_args(arguments)
    has_gpu = jax.default_backend() == "gpu"
    implementation = options.implementation or ("cuda" if has_gpu else "interpret")

    # Ours multiplies float32 exactly; XLA on a GPU does so only when asked.
    with Progress() as progress, jax.default_matmul_precision("highest"):
        runs = {
            name: train(
                is_ours=is_ours,
                implementation=implementation,
                epochs=options.epochs,
                progress=progress,
            )
            for name, is_ours in (("stock Flax", False), ("jax_gpuops", True))
        }
    plot(runs, options.figure)
    for name, run in runs.items():
        print(f"{name:<11} test accuracy {run.accuracy:.1%}, {run.seconds:.1f} s")
    stock, ours = (run.losses for run in runs.values())
    difference = np.abs(ours - stock).max()
    print(f"largest difference of the losses {difference:.1e}; figure in {options.figure}")
    if difference > 1e-2:
        raise SystemExit("the two loss curves differ")
    if options.epochs >= 10 and min(run.accuracy for run in runs.values()) <= 0.96:
        raise SystemExit("the test accuracy is not above 96 %")
    return runs


if __name__ == "__main__":
    main()
