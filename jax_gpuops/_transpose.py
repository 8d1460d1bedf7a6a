"""transpose."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching

from jax_gpuops import _arguments, _primitive
from jax_gpuops._implementation import NoKernelError, dispatch, resolve

Permutation = tuple[int, ...]

_ELEMENT_BYTES = (1, 2, 4, 8, 16)


def transpose(
    a: jax.typing.ArrayLike,
    axes: Sequence[int] | None = None,
    *,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """Permutes the dimensions of an array; drop-in for `jax.numpy.transpose`.

    Args:
      a: an array of any shape. The kernels support every dtype of 1, 2, 4, 8 or 16 bytes: booleans,
        integers, floats down to 8 bits, complex numbers.
      axes: the dimensions of `a` in the order of the result; negative ones count from the end. None
        reverses them.
      implementation: None for the fastest known on the platform, "cuda", "interpret" (the same
        kernels on the host) or "xla". A kernel copies the array even if the permutation moves
        nothing, since the result is a new array.
      algorithm: None to let the plan choose, or a name from `jax_gpuops.algorithms("transpose")`.

    Returns:
      An array of the dtype of `a` whose dimension i is dimension `axes[i]` of `a`.

    Raises:
      TypeError: if an argument has a type that is not accepted, or if a kernel was requested and
        the elements are smaller than a byte, such as int4, or not numeric.
      ValueError: if `axes` is not a permutation of the dimensions, if `implementation` or
        `algorithm` is unknown, does not support the problem or cannot run on the platform.
    """
    a = _arguments.as_array("a", a)
    return _jitted(
        a,
        permutation=_canonical_permutation(axes, jnp.ndim(a)),
        implementation=resolve("transpose", implementation, algorithm),
        algorithm=algorithm,
    )


def _canonical_permutation(axes: Sequence[int] | None, ndim: int) -> Permutation:
    if axes is None:
        return tuple(reversed(range(ndim)))
    try:
        values = [operator.index(axis) for axis in axes]
    except TypeError:
        raise TypeError(f"axes must be a sequence of ints or None, got {axes!r}") from None
    for value in values:
        if not -ndim <= value < ndim:
            raise ValueError(f"axis {value} is out of bounds for an array of dimension {ndim}")
    permutation = tuple(value % ndim for value in values)
    if sorted(permutation) != list(range(ndim)):
        raise ValueError(
            f"axes must name each of the {ndim} dimensions of a once, got {tuple(values)}"
        )
    return permutation


def _apply(a, *, permutation: Permutation, implementation, algorithm):
    def kernel():
        if _element_bits(a.dtype) // 8 not in _ELEMENT_BYTES:
            raise NoKernelError(
                f"kernels do not support dtype {a.dtype}, only dtypes of 1, 2, 4, 8 or 16 bytes",
                TypeError,
            )
        return _primitive.bind(
            _transpose_p,
            a,
            permutation=permutation,
            implementation=implementation,
            algorithm=algorithm,
        )

    def xla():
        return jnp.transpose(a, permutation)

    return dispatch("transpose", [a], implementation, algorithm, kernel, xla)


_jitted = _primitive.jit("transpose", _apply, "permutation", "implementation", "algorithm")


def _element_bits(dtype) -> int:
    """The size of an element in an array on a device; 0 for dtypes that are not numeric."""
    if jnp.issubdtype(dtype, jax.dtypes.extended) or dtype == jax.dtypes.float0:
        return 0
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits  # numpy keeps int4 in a whole byte, XLA does not
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits
    return 8 * dtype.itemsize


def _problem(x, *, permutation: Permutation) -> dict[str, Any]:
    return {
        "element_bytes": x.dtype.itemsize,
        "shape": x.shape,
        "permutation": permutation,
        "alignment": _primitive.ALIGNMENT,
    }


def _reference(x, *, permutation: Permutation) -> jax.Array:
    return jnp.transpose(x, permutation)


def _call(launch: _primitive.Launch, x, *, permutation: Permutation) -> jax.Array:
    results = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in launch.results]
    (y,) = launch.custom_call("jax_gpuops_transpose_v1", [x], results, permutation=permutation)
    return y


_transpose_p = _primitive.primitive(
    _primitive.Kernel(
        name="gpuops_transpose",
        op="transpose",
        reference=_reference,
        problem=_problem,
        call=_call,
    )
)


def _batch(operands, axes, *, permutation: Permutation, **params):
    """Makes the mapped axis the first one of the result; the kernel reads it in place."""
    (x,), (mapped,) = operands, axes
    others = (axis + (axis >= mapped) for axis in permutation)
    return _transpose_p.bind(x, permutation=(mapped, *others), **params), 0


def _transpose_rule(cotangent, _, *, permutation: Permutation, **params):
    """Permutes the cotangent by the inverse permutation."""
    inverse = tuple(int(axis) for axis in np.argsort(permutation))
    return [_transpose_p.bind(cotangent, permutation=inverse, **params)]


batching.primitive_batchers[_transpose_p] = _batch
ad.deflinear2(_transpose_p, _transpose_rule)
