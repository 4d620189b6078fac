"""The definition of prefill attention, in float32 ``jax.numpy``.

Every kernel is tested against this. It materialises the [T, S] scores: use it to check, not to run.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa import checks, stacks
from jax_fa.visible import Visible, visible_slots


class CallOptions(TypedDict, total=False):
    """What :func:`jax_fa.prefill_attention` takes by name, but for what tells how to compute it."""

    layer: Any
    starts: Any
    sinks: Any
    scale: float | None
    sliding_window: int | None
    logits_soft_cap: float | None
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

    scores = scale * q·k, soft-capped, masked, softmax with the sink as one more column, times V; K
    and V as they are stored, all in float32, the result rounded once to q's dtype.
    ``chunk_invariant`` changes nothing here.
    """
    call = checks.check_call(q, k, v, positions, **options)
    operands = call.operands
    if operands.layer is not None:
        operands = stacks.without_layer(operands)
    out, lse = attend(
        *operands[:4],
        starts=operands.starts,
        sinks=operands.sinks,
        **call.options.of_definition(),
    )
    if call.unbatched:
        out, lse = out[0], lse[0]
    return (out, lse) if checks.as_flag("return_lse", return_lse) else out


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    starts: jax.Array | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """out and lse of checked, batched operands without layers."""
    visible = visible_slots(positions, k.shape[1], starts=starts, sliding_window=sliding_window)

    def sequence(operands: Any) -> tuple[jax.Array, jax.Array]:
        return _attend(*operands, scale=scale, cap=logits_soft_cap, sinks=sinks)

    # Not vmap: it would turn the choice in _weighted_values into computing both sides.
    return jax.lax.map(sequence, (q, k, v, visible))


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: Visible,
    *,
    scale: float,
    cap: float | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """One sequence: q [T, Hq, D], k, v [S, Hk, D], visible [T] -> out [T, Hq, D], lse [T, Hq]."""
    tokens, q_heads, head_dim = q.shape
    slots, kv_heads = k.shape[:2]
    # r: the query heads of one kv head.
    heads = (kv_heads, q_heads // kv_heads)
    q_grouped = q.astype(jnp.float32).reshape(tokens, *heads, head_dim)
    scores = scale * jnp.einsum(
        "tgrd,sgd->tgrs", q_grouped, k.astype(jnp.float32), precision="highest"
    )
    if cap is not None:
        scores = np.float32(cap) * jnp.tanh(scores / np.float32(cap))
    sees = visible.sees(jnp.arange(slots, dtype=jnp.int32))  # [T, S]
    scores = jnp.where(sees[:, None, None, :], scores, -jnp.inf)

    # A sink is one more column, of value 0: it counts in the maximum and in the sum.
    sink = jnp.full(heads, -jnp.inf) if sinks is None else sinks.reshape(heads)
    sink = sink.astype(jnp.float32)[None, :, :, None]
    row_max = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf), sink)
    anchor = jnp.where(jnp.isneginf(row_max), 0.0, row_max)
    probs = jnp.exp(scores - anchor)
    row_sum = jnp.sum(probs, axis=-1, keepdims=True) + jnp.exp(sink - anchor)
    nothing = row_sum == 0
    row_sum = jnp.where(nothing, 1.0, row_sum)
    lse = jnp.where(nothing, -jnp.inf, anchor + jnp.log(row_sum))

    out = _weighted_values(probs / row_sum, v.astype(jnp.float32), sees)
    empty = nothing | (visible.hi == 0)[:, None, None, None]
    out = jnp.where(empty, 0.0, out).reshape(q.shape).astype(q.dtype)
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
