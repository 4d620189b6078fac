"""Gradients of prefill attention: scores and log-sum-exp recomputed, block by block.

In ``jax.numpy``, float32; XLA compiles it, for CPUs and GPUs alike. Memory is linear in T + S: one
block of [_Q_BLOCK, _KV_BLOCK] scores per query head at a time. Deterministic.

Source: FlashAttention-2 (Dao, 2023), section 3.1.2, with the cotangent of lse added to delta.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Rows = dict[str, jax.Array]

_Q_BLOCK = 256
_KV_BLOCK = 256


class Operands(NamedTuple):
    """What gradients are computed from: the call's operands, its lse, and the cotangents."""

    q: jax.Array  # [B, T, Hq, D]
    k: jax.Array  # [B, S, Hk, D]
    v: jax.Array  # [B, S, Hk, D]
    positions: jax.Array  # [B, T]
    lse: jax.Array  # [B, T, Hq]; only where it is -inf is looked at
    d_out: jax.Array  # [B, T, Hq, D]
    d_lse: jax.Array  # [B, T, Hq]


def gradients(operands: Operands, scale: float) -> list[jax.Array]:
    """[d_q, d_k, d_v], shapes of q, k, v, float32; ``scale`` is the factor on q·k.

    Rows that see nothing and slots that no row sees get exactly 0, whatever they hold.
    """
    q, k, v, positions, lse, *_ = operands
    kv_len = k.shape[1]
    rows = jax.tree.map(lambda x: _into_blocks(x, _Q_BLOCK), _rows(operands))
    index = jnp.arange(kv_len, dtype=jnp.int32)[None]
    seen = index <= jnp.max(positions, axis=1, initial=-1)[:, None]  # [B, S]
    k_blocks, v_blocks = (
        _into_blocks(_where(seen, x.astype(jnp.float32)), _KV_BLOCK) for x in (k, v)
    )
    # Counted from 1, so that the slots of zeros that _into_blocks adds stand before all others.
    number_blocks = _into_blocks(index + 1, _KV_BLOCK)

    rows |= jax.lax.map(
        lambda row: _statistics(row, k_blocks, v_blocks, number_blocks, scale), rows
    )

    def kv_block(d_q: jax.Array, block: Any) -> tuple[jax.Array, Any]:
        k_block, v_block, number = block

        def q_block(carry: Any, row_block: Any) -> tuple[Any, jax.Array]:
            d_q_part, d_k_part, d_v_part = _block(row_block, k_block, v_block, number, scale)
            return (carry[0] + d_k_part, carry[1] + d_v_part), d_q_part

        zeros = (jnp.zeros_like(k_block), jnp.zeros_like(v_block))
        (d_k, d_v), d_q_parts = jax.lax.scan(q_block, zeros, rows)
        return d_q + d_q_parts, (d_k, d_v)

    d_q_blocks, (d_k_blocks, d_v_blocks) = jax.lax.scan(
        kv_block, jnp.zeros_like(rows["q"]), (k_blocks, v_blocks, number_blocks)
    )
    d_q = _from_blocks(d_q_blocks, q.shape[1]).reshape(q.shape)
    d_q = _where(~jnp.isneginf(lse), d_q)
    return [d_q, *(_from_blocks(x, kv_len) for x in (d_k_blocks, d_v_blocks))]


def _where(mask: jax.Array, x: jax.Array) -> jax.Array:
    """x where mask, which lacks x's last axes; 0 elsewhere, by selection, so NaN does not pass."""
    return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, 0.0)


def _finite(x: jax.Array) -> jax.Array:
    """x with 0 for NaN and Inf: a factor of gradients of scores, which are NaN where it counts.

    A row that sees a NaN has scores of NaN, and their gradients are; for the rows that do not see
    it they are 0, and 0 times NaN would be NaN. (A score of -inf has the gradient 0 as well.)
    """
    return jnp.where(jnp.isfinite(x), x, 0.0)


def _rows(operands: Operands) -> Rows:
    """What a row brings to its gradients, float32, heads grouped: [B, T, Hk, r, ...]."""
    q, k, _, positions, lse, d_out, d_lse = operands
    kv_len, kv_heads = k.shape[1:3]
    empty = jnp.isneginf(lse)  # [B, T, Hq]
    rows = {
        "live": ~empty,
        "q": _where(~empty, q.astype(jnp.float32)),
        "d_out": _where(~empty, d_out.astype(jnp.float32)),
        "d_lse": jnp.where(empty, 0.0, d_lse),
    }
    heads = (kv_heads, q.shape[2] // kv_heads)
    grouped = {name: x.reshape(*x.shape[:2], *heads, *x.shape[3:]) for name, x in rows.items()}
    # A count, not a position, so that the rows of zeros that _into_blocks adds see nothing.
    return grouped | {"visible": jnp.clip(positions, -1, kv_len - 1) + 1}


def _product(rule: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(rule, a, b, precision="highest")


def _scores(row: Rows, k: jax.Array, number: jax.Array, scale: float) -> jax.Array:
    """Scaled scores of a block of rows and of slots, [B, t, g, r, s]; -inf where not seen."""
    number = number[:, None, None, None]  # [1, 1, 1, 1, s], from 1; 0 is no slot
    sees = (number > 0) & (number <= row["visible"][:, :, None, None, None])
    scores = scale * _product("btgrd,bsgd->btgrs", row["q"], k)
    return jnp.where(sees & row["live"][..., None], scores, -jnp.inf)


def _statistics(
    row: Rows, k_blocks: jax.Array, v_blocks: jax.Array, number_blocks: jax.Array, scale: float
) -> Rows:
    """lse and delta of a block of rows over all slots, [B, t, g, r]; 0 for rows that see nothing.

    delta is sum_s(probs * d_probs) - d_lse: what the normalisation takes back from each score.
    Not from the forward pass's lse and out: a kernel that rounds q has other scores than these, so
    that weights relative to its lse would not add up to 1, and a 16-bit out is rounded.
    """

    def kv_block(carry: Any, block: Any) -> tuple[Any, None]:
        (top, total, weighted), (k, v, number) = carry, block
        scores = _scores(row, k, number, scale)
        # A constant, as far as derivatives go: it cancels out.
        new_top = jax.lax.stop_gradient(jnp.maximum(top, jnp.max(scores, axis=-1)))
        anchor = jnp.where(jnp.isneginf(new_top), 0.0, new_top)
        weights = jnp.exp(scores - anchor[..., None])
        d_probs = jnp.where(weights == 0, 0.0, weights * _d_probs(row, v))
        factor = jnp.exp(top - anchor)
        total = total * factor + jnp.sum(weights, axis=-1)
        return (new_top, total, weighted * factor + jnp.sum(d_probs, axis=-1)), None

    zeros = jnp.zeros_like(row["d_lse"])
    start = (jnp.full_like(zeros, -jnp.inf), zeros, zeros)
    blocks = (k_blocks, v_blocks, number_blocks)
    (top, total, weighted), _ = jax.lax.scan(kv_block, start, blocks)
    nothing = total == 0
    total = jnp.where(nothing, 1.0, total)
    lse = jnp.where(nothing, 0.0, top + jnp.log(total))
    return {"lse": lse, "delta": weighted / total - row["d_lse"]}


def _d_probs(row: Rows, v: jax.Array) -> jax.Array:
    """Cotangents of the probabilities, [B, t, g, r, s]."""
    return _product("btgrd,bsgd->btgrs", row["d_out"], v)


def _block(
    row: Rows, k: jax.Array, v: jax.Array, number: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Parts of d_q, d_k, d_v from one block of rows and one of slots."""
    scores = _scores(row, k, number, scale)
    # By selection, here and below: the other factors may be NaN where nothing is seen.
    probs = jnp.where(jnp.isneginf(scores), 0.0, jnp.exp(scores - row["lse"][..., None]))
    d_probs = _d_probs(row, v)
    d_scores = jnp.where(probs == 0, 0.0, scale * probs * (d_probs - row["delta"][..., None]))
    return (
        _product("btgrs,bsgd->btgrd", d_scores, _finite(k)),
        _product("btgrs,btgrd->bsgd", d_scores, _finite(row["q"])),
        _product("btgrs,btgrd->bsgd", probs, row["d_out"]),
    )


def _into_blocks(x: jax.Array, size: int) -> jax.Array:
    """[B, N, ...] to [ceil(N / size), B, size, ...], padded with zeros."""
    batch, length = x.shape[:2]
    blocks = -(-length // size)
    padding = [(0, 0)] * x.ndim
    padding[1] = (0, blocks * size - length)
    padded = jnp.pad(x, padding).reshape(batch, blocks, size, *x.shape[2:])
    return jnp.moveaxis(padded, 1, 0)


def _from_blocks(x: jax.Array, length: int) -> jax.Array:
    """The inverse of _into_blocks."""
    blocks, batch, size = x.shape[:3]
    return jnp.moveaxis(x, 0, 1).reshape(batch, blocks * size, *x.shape[3:])[:, :length]
