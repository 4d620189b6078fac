"""The definition of prefill attention, in float32 ``jax.numpy``.

Every kernel is tested against this. It materialises the [T, S] scores: use it to check, not to run.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp

from jax_fa import checks, stacks


class CallOptions(TypedDict, total=False):
    """What :func:`jax_fa.prefill_attention` takes by name, but for what tells how to compute it."""

    layer: Any
    scale: float | None
    chunk_invariant: bool


@overload
def prefill_attention(
    q: Any,
    k: Any,
    v: Any,
    positions: Any,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[CallOptions],
) -> jax.Array: ...


@overload
def prefill_attention(
    q: Any,
    k: Any,
    v: Any,
    positions: Any,
    *,
    return_lse: Literal[True],
    **options: Unpack[CallOptions],
) -> tuple[jax.Array, jax.Array]: ...


def prefill_attention(
    q: Any,
    k: Any,
    v: Any,
    positions: Any,
    *,
    return_lse: bool = False,
    **options: Unpack[CallOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """:func:`jax_fa.prefill_attention` by its definition; the same arguments, results and errors.

    scores = scale * q·k, masked by position, softmax, times V; K and V as they are stored, all in
    float32, the result rounded once to q's dtype. ``chunk_invariant`` changes nothing here.
    """
    call = checks.check_call(q, k, v, positions, **options)
    q, k, v, positions, layer = call.operands
    if layer is not None:
        k, v = (stacks.layer_of(x, layer) for x in (k, v))
    # Not vmap: it would turn the choice in _weighted_values into computing both sides.
    out, lse = jax.lax.map(
        lambda sequence: _attend(*sequence, scale=call.options.scale),
        (q, k, v, positions),
    )
    if call.unbatched:
        out, lse = out[0], lse[0]
    return (out, lse) if checks.as_flag("return_lse", return_lse) else out


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """One sequence: q [T, Hq, D], k, v [S, Hk, D], positions [T] -> out [T, Hq, D], lse [T, Hq]."""
    tokens, q_heads, head_dim = q.shape
    slots, kv_heads = k.shape[:2]
    # r: the query heads of one kv head.
    q_grouped = q.astype(jnp.float32).reshape(tokens, kv_heads, q_heads // kv_heads, head_dim)
    scores = scale * jnp.einsum(
        "tgrd,sgd->tgrs", q_grouped, k.astype(jnp.float32), precision="highest"
    )
    sees = jnp.arange(slots, dtype=jnp.int32)[None] <= positions[:, None]  # [T, S]
    scores = jnp.where(sees[:, None, None, :], scores, -jnp.inf)

    row_max = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    anchor = jnp.where(jnp.isneginf(row_max), 0.0, row_max)
    probs = jnp.exp(scores - anchor)
    row_sum = jnp.sum(probs, axis=-1, keepdims=True)
    empty = row_sum == 0
    probs = probs / jnp.where(empty, 1.0, row_sum)

    out = _weighted_values(probs, v.astype(jnp.float32), sees)
    out = jnp.where(empty, 0.0, out).reshape(q.shape).astype(q.dtype)
    lse = jnp.where(empty, -jnp.inf, anchor + jnp.log(jnp.where(empty, 1.0, row_sum)))
    return out, lse.reshape(tokens, q_heads)


def _weighted_values(probs: jax.Array, v: jax.Array, sees: jax.Array) -> jax.Array:
    """probs [T, g, r, S] times v [S, g, D], where a slot that a row does not see is not read.

    A product with weight 0 would let NaN and Inf through. Where all values are finite it is the
    same thing, and much faster.
    """

    v = jnp.where(jnp.any(sees, axis=0)[:, None, None], v, 0.0)

    def by_product() -> jax.Array:
        return jnp.einsum("tgrs,sgd->tgrd", probs, v, precision="highest")

    def by_selection() -> jax.Array:
        def row(args: tuple[jax.Array, jax.Array]) -> jax.Array:
            row_probs, row_sees = args
            seen = jnp.where(row_sees[:, None, None], v, 0.0)
            return jnp.einsum("grs,sgd->grd", row_probs, seen, precision="highest")

        return jax.lax.map(row, (probs, sees))

    return jax.lax.cond(jnp.all(jnp.isfinite(v)), by_product, by_selection)
