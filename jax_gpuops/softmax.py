"""softmax, log_softmax and logsumexp."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_gpuops import _primitive
from jax_gpuops._implementation import resolve

Axis = int | Sequence[int] | None

_UPSTREAM: dict[str, Callable[..., Any]] = {
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "logsumexp": jax.nn.logsumexp,
}
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
    return _call("softmax", x, axis, where, implementation, algorithm)


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
    return _call("log_softmax", x, axis, where, implementation, algorithm)


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
    if b is not None or return_sign:
        _primitive.check_array("a", a)
        chosen = resolve("softmax", implementation, algorithm)
        _primitive.refuse(chosen, algorithm, "logsumexp kernels take neither b nor return_sign")
        return jax.nn.logsumexp(a, axis, b, keepdims, return_sign, where)
    result = _call("logsumexp", a, axis, where, implementation, algorithm, argument="a")
    axes = _primitive.canonical_axes(axis, jnp.ndim(a))
    return jnp.expand_dims(result, axes) if keepdims else result


def _call(name, x, axis, where, implementation, algorithm, *, argument="x"):
    """Runs the primitive of `name`, or upstream's function where no kernel is to run."""
    _primitive.check_array(argument, x)
    chosen = resolve("softmax", implementation, algorithm)
    _primitive.canonical_axes(axis, jnp.ndim(x))  # raises what is no axis of x
    if chosen == "xla":
        return _UPSTREAM[name](x, axis=axis, where=where)
    axis = tuple(axis) if isinstance(axis, list) else axis
    return _apply(x, where, name=name, axis=axis, implementation=chosen, algorithm=algorithm)


@functools.partial(jax.jit, static_argnames=("name", "axis", "implementation", "algorithm"))
def _apply(x, where, *, name, axis, implementation, algorithm):
    """Under jit, so that the moves around a kernel cost nothing."""
    upstream = functools.partial(_UPSTREAM[name], axis=axis, where=where)
    jax.eval_shape(upstream, x)  # raises what upstream raises, for example of `where`
    axes = _primitive.canonical_axes(axis, x.ndim)
    rows = _primitive.Rows(axes, x.ndim)
    if x.size == 0 or not axes:
        return upstream(x)
    if implementation is None and algorithm is None and (not rows.trailing or where is not None):
        # XLA reads another axis and applies a mask in passing. Moves made for a kernel would stay
        # behind where it turns out not to run.
        return upstream(x)
    if (refusal := _refusal(x, axes, where)) is not None:
        why, error = refusal
        _primitive.refuse(implementation, algorithm, why, error)
        return upstream(x)

    # The kernels know no masks: what `where` leaves out enters as -inf and is replaced afterwards.
    p = _PRIMITIVES[name]
    moved = rows.apply(x if where is None else jnp.where(where, x, -jnp.inf))
    inner_dims = rows.inner_dims
    _primitive.check_problem(p, implementation, algorithm, moved, inner_dims=inner_dims)
    y = p.bind(moved, inner_dims=inner_dims, implementation=implementation, algorithm=algorithm)
    if name == "logsumexp":
        return y
    y = rows.undo(y, x.shape)
    return y if where is None else jnp.where(where, y, 0 if name == "softmax" else -jnp.inf)


def _refusal(x, axes, where) -> tuple[str, type[Exception]] | None:
    """Returns why no kernel takes the call, and the error that says so, or None if one does."""
    if x.dtype.name not in _DTYPES:
        return f"dtype {x.dtype} is not among {', '.join(_DTYPES)}", TypeError
    if where is not None and jnp.broadcast_shapes(jnp.shape(where), x.shape) != x.shape:
        return f"where of shape {jnp.shape(where)} does not broadcast to {x.shape}", ValueError
    if len(axes) > 1 and _primitive.is_sharded_along(x, axes):
        return (
            f"x is sharded along the reduced axes, {jax.typeof(x)}; use jax.shard_map",
            ValueError,
        )
    return None


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


def _make(function: str, *, keeps_row: bool) -> Primitive:
    def reference(x, *, inner_dims: int):
        del inner_dims  # where the row lies in memory is the compiler's business here
        return _UPSTREAM[function](x, axis=-1)

    kernel = _primitive.Kernel(
        name=f"gpuops_{function}",
        op="softmax",
        target=f"jax_gpuops_{function}_v1",
        result=_same if keeps_row else _without_row,
        reference=reference,
        problem=functools.partial(_problem, function),
        attributes=_attributes,
        layouts=_layouts if keeps_row else _layouts_without_row,
        rows=((1,), 1 if keeps_row else 0),
    )
    return _primitive.primitive(kernel)


_PRIMITIVES = {
    "softmax": _make("softmax", keeps_row=True),
    "log_softmax": _make("log_softmax", keeps_row=True),
    "logsumexp": _make("logsumexp", keeps_row=False),
}


# Derivatives. Each is the one that JAX gives the upstream function, in terms of the primal result.


def _softmax_jvp(y, t):
    return y * (t - jnp.sum(y * t, -1, keepdims=True))


def _log_softmax_jvp(y, t):
    return t - jnp.sum(jnp.exp(y) * t, -1, keepdims=True)


def _logsumexp_jvp(x, y, t):
    base = jnp.where(jnp.isfinite(y), y, 0)[..., None]
    weights = jnp.exp(x - jax.lax.stop_gradient(base))
    return jnp.sum(weights * t, -1) / jnp.sum(weights, -1)


_TANGENTS = {
    "softmax": lambda x, y, t: _softmax_jvp(y, t),
    "log_softmax": lambda x, y, t: _log_softmax_jvp(y, t),
    "logsumexp": _logsumexp_jvp,
}


def _define_jvp(name: str) -> None:
    def jvp(primals, tangents, **params):
        (x,), (t,) = primals, tangents
        y = _PRIMITIVES[name].bind(x, **params)
        return y, _TANGENTS[name](x, y, ad.instantiate_zeros(t))

    ad.primitive_jvps[_PRIMITIVES[name]] = jvp


for _name in _PRIMITIVES:
    _define_jvp(_name)
