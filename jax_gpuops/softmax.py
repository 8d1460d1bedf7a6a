"""softmax, log_softmax and logsumexp."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_gpuops import _primitive
from jax_gpuops._implementation import resolve

Axis = int | Sequence[int] | None

_DTYPES = ("float16", "bfloat16", "float32", "float64")


def softmax(
    x: jax.typing.ArrayLike,
    axis: Axis = -1,
    where: jax.typing.ArrayLike | None = None,
    *,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """Softmax over one or more axes; drop-in for `jax.nn.softmax`.

    Computes `exp(x - max) / sum(exp(x - max))`. As in JAX, a row of only -inf, or with +inf or NaN
    in it, is NaN; elements that `where` leaves out are ignored and give 0, and so does a row
    that it leaves out as a whole.

    Args:
      x: an array of any shape. Our kernels take float16, bfloat16, float32 and float64; 16-bit
        floats are computed in float32.
      axis: the axis or axes to normalise over; None is all of them. Another axis than the last
        is read where it lies, not transposed in memory.
      where: a boolean array that broadcasts to `x`: the elements to include.
      implementation: None for the fastest known on the platform, "cuda", "interpret" (the same
        kernels on the host) or "xla".
      algorithm: None to let the plan choose, or a name from `jax_gpuops.algorithms("softmax")`.

    Returns:
      An array of the shape and dtype of `x`.

    Raises:
      TypeError: if an argument has a type that is not accepted, or a kernel was asked for and
        has no version for the dtype.
      ValueError: if `axis` is out of range, if `implementation` or `algorithm` is unknown, cannot
        take the problem or cannot run on the platform.
    """
    return _rowwise(_softmax_p, x, axis, where, implementation, algorithm)


def log_softmax(
    x: jax.typing.ArrayLike,
    axis: Axis = -1,
    where: jax.typing.ArrayLike | None = None,
    *,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """Logarithm of softmax, without forming softmax; drop-in for `jax.nn.log_softmax`.

    Computes `x - max - log(sum(exp(x - max)))`. Elements that `where` leaves out are ignored and
    give -inf.

    Args:
      x: an array of any shape, dtypes as for `softmax`.
      axis: the axis or axes to normalise over; None is all of them.
      where: a boolean array that broadcasts to `x`: the elements to include.
      implementation: as for `softmax`.
      algorithm: None, "warp", "block_shared" or "block_uncached".

    Returns:
      An array of the shape and dtype of `x`.

    Raises:
      TypeError: as `softmax` does.
      ValueError: as `softmax` does.
    """
    return _rowwise(_log_softmax_p, x, axis, where, implementation, algorithm)


def logsumexp(
    a: jax.typing.ArrayLike,
    axis: Axis = None,
    b: jax.typing.ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: jax.typing.ArrayLike | None = None,
    *,
    implementation: str | None = None,
    algorithm: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Logarithm of the sum of exponentials; drop-in for `jax.nn.logsumexp`.

    Args:
      a: an array of any shape, dtypes as for `softmax`.
      axis: the axis or axes to sum over; None is all of them.
      b: factors of the exponentials. XLA computes this case: kernels do not take it.
      keepdims: True to keep the reduced axes with size 1.
      return_sign: True to return the sign of the sum too. XLA computes this case.
      where: a boolean array that broadcasts to `a`: the elements to include.
      implementation: as for `softmax`.
      algorithm: None, "warp", "block_shared" or "block_uncached".

    Returns:
      The result in the dtype of `a`, or with `return_sign` the pair (result, sign).

    Raises:
      TypeError: as `softmax` does.
      ValueError: as `softmax` does; also if a kernel was asked for together with `b` or
        `return_sign`.
    """
    _primitive.check_array("a", a)
    chosen = resolve(implementation, algorithm)
    if b is not None or return_sign:
        _primitive.refuse(chosen, algorithm, "logsumexp kernels take neither b nor return_sign")
        return jax.nn.logsumexp(a, axis, b, keepdims, return_sign, where)
    axes = _primitive.canonical_axes(axis, jnp.ndim(a))
    if not _takes(a, axes, chosen, algorithm):
        return jax.nn.logsumexp(a, axis, None, keepdims, False, where)
    result = _apply(
        _logsumexp_p, jnp.asarray(a), where, axes=axes, implementation=chosen, algorithm=algorithm
    )
    return jnp.expand_dims(result, axes) if keepdims else result


def _rowwise(p, x, axis, where, implementation, algorithm):
    _primitive.check_array("x", x)
    chosen = resolve(implementation, algorithm)
    axes = _primitive.canonical_axes(axis, jnp.ndim(x))
    if not _takes(x, axes, chosen, algorithm):
        upstream = jax.nn.softmax if p is _softmax_p else jax.nn.log_softmax
        return upstream(x, axis, where)
    return _apply(p, jnp.asarray(x), where, axes=axes, implementation=chosen, algorithm=algorithm)


def _takes(x, axes: tuple[int, ...], implementation: str | None, algorithm: str | None) -> bool:
    """True if the primitive takes `x`; else XLA does, unless a kernel was asked for."""
    if implementation == "xla":
        return False
    dtype = jnp.result_type(x)
    if dtype.name not in _DTYPES:
        _primitive.refuse(
            implementation, algorithm, f"dtype {dtype} is not among {', '.join(_DTYPES)}", TypeError
        )
        return False
    return len(axes) > 0


@functools.partial(
    jax.jit, static_argnums=0, static_argnames=("axes", "implementation", "algorithm")
)
def _apply(p, x, where, *, axes, implementation, algorithm):
    """Runs primitive `p` over `axes`, under jit so that the moves around it cost nothing.

    The kernels know no masks: what `where` leaves out enters as -inf and is replaced afterwards.
    """
    rows = _primitive.Rows(axes, x.ndim)
    if where is not None:
        x_masked = jnp.where(where, x, -jnp.inf)
        if x_masked.shape != x.shape:
            raise ValueError(
                f"where of shape {jnp.shape(where)} does not broadcast to x of shape {x.shape}"
            )
        x = x_masked
    moved = rows.apply(x)
    inner_dims = rows.inner_dims
    _primitive.check_problem(p, implementation, algorithm, moved, inner_dims=inner_dims)
    y = p.bind(moved, inner_dims=inner_dims, implementation=implementation, algorithm=algorithm)
    if p is _logsumexp_p:
        return y
    y = rows.undo(y, x.shape)
    if where is None:
        return y
    return jnp.where(where, y, 0 if p is _softmax_p else -jnp.inf)


def _problem(function: str, x, *, inner_dims: int) -> dict[str, Any]:
    return {
        "function": function,
        "dtype": x.dtype.name,
        **_primitive.row_problem(x.shape, inner_dims),
    }


def _same(x, *, inner_dims: int):
    del inner_dims
    return x.update(weak_type=False)


def _without_row(x, *, inner_dims: int):
    del inner_dims
    sharding = x.sharding.update(spec=x.sharding.spec[:-1])
    return x.update(shape=x.shape[:-1], sharding=sharding, weak_type=False)


def _layouts(x, *, inner_dims: int):
    layout = _primitive.row_layout(x.ndim, inner_dims)
    return [layout], [layout]


def _layouts_without_row(x, *, inner_dims: int):
    return [_primitive.row_layout(x.ndim, inner_dims)], [tuple(reversed(range(x.ndim - 1)))]


def _attributes(*, inner_dims: int):
    return {"inner_dims": inner_dims}


def _reference(upstream):
    def reference(x, *, inner_dims: int):
        del inner_dims  # where the row lies in memory is the compiler's business here
        return upstream(x, axis=-1)

    return reference


def _make(function: str, upstream, *, keeps_row: bool) -> Primitive:
    kernel = _primitive.Kernel(
        name=f"gpuops_{function}",
        op="softmax",
        target=f"jax_gpuops_{function}_v1",
        result=_same if keeps_row else _without_row,
        reference=_reference(upstream),
        problem=functools.partial(_problem, function),
        attributes=_attributes,
        layouts=_layouts if keeps_row else _layouts_without_row,
        rows=((1,), 1 if keeps_row else 0),
    )
    return _primitive.primitive(kernel)


_softmax_p = _make("softmax", jax.nn.softmax, keeps_row=True)
_log_softmax_p = _make("log_softmax", jax.nn.log_softmax, keeps_row=True)
_logsumexp_p = _make("logsumexp", jax.nn.logsumexp, keeps_row=False)


# Derivatives. Each is the one that JAX gives the upstream function, in terms of the primal result.


def _softmax_jvp(y, t):
    return y * (t - jnp.sum(y * t, -1, keepdims=True))


def _log_softmax_jvp(y, t):
    return t - jnp.sum(jnp.exp(y) * t, -1, keepdims=True)


def _logsumexp_jvp(x, y, t):
    base = jnp.where(jnp.isfinite(y), y, 0)[..., None]
    weights = jnp.exp(x - jax.lax.stop_gradient(base))
    return jnp.sum(weights * t, -1) / jnp.sum(weights, -1)


def _define_jvp(p: Primitive, tangent_rule) -> None:
    def jvp(primals, tangents, **params):
        (x,), (t,) = primals, tangents
        y = p.bind(x, **params)
        return y, tangent_rule(x, y, ad.instantiate_zeros(t))

    ad.primitive_jvps[p] = jvp


_define_jvp(_softmax_p, lambda x, y, t: _softmax_jvp(y, t))
_define_jvp(_log_softmax_p, lambda x, y, t: _log_softmax_jvp(y, t))
_define_jvp(_logsumexp_p, _logsumexp_jvp)
