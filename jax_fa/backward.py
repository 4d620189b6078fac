"""Gradients of prefill attention: scores and log-sum-exp recomputed, block by block.

In ``jax.numpy``, float32; XLA compiles it, for CPUs and GPUs alike. Memory is linear in T + S: one
block of [_Q_BLOCK, _KV_BLOCK] scores per query head at a time. Blocks of rows and slots that do not
see each other are skipped (under a vmap of positions or starts, where a choice becomes a selection,
they are computed and dropped). Deterministic.

Source: FlashAttention-2 (Dao, 2023), section 3.1.2, with the cotangent of lse added to delta.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa.visible import Visible, seen_by_any, visible_slots

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
    starts: jax.Array | None = None  # [B] or [B, T]
    sinks: jax.Array | None = None  # [B, Hq]


class Score(NamedTuple):
    """How q·k becomes a score: times ``scale``, then soft-capped."""

    scale: float
    cap: float | None

    def __call__(self, product: jax.Array) -> jax.Array:
        """The score of q·k."""
        scaled = self.scale * product
        return scaled if self.cap is None else self.cap * jnp.tanh(scaled / self.cap)

    def derivative(self, score: jax.Array) -> jax.Array | float:
        """By q·k, at a finite ``score``."""
        if self.cap is None:
            return self.scale
        return self.scale * (1.0 - jnp.square(score / self.cap))


class Slots(NamedTuple):
    """A block of slots; all blocks, with one more axis before these."""

    k: jax.Array  # [B, s, Hk, D] float32
    v: jax.Array
    first: jax.Array  # [] int32


def gradients(
    operands: Operands,
    scale: float,
    *,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
) -> list[jax.Array]:
    """[d_q, d_k, d_v], and d_sinks where there are sinks: shapes of the operands, in float32.

    Rows that see nothing and slots that no row sees get exactly 0, whatever they hold. A sink gets
    its share of every row, also of those that see nothing else: their lse is the sink.
    """
    q, k, v, positions, *_ = operands
    kv_len = k.shape[1]
    score = Score(scale, logits_soft_cap)
    visible = visible_slots(
        positions, kv_len, starts=operands.starts, sliding_window=sliding_window
    )
    rows = _rows(operands, visible)
    live = rows["live"].reshape(q.shape[:3])
    rows = jax.tree.map(lambda x: _into_blocks(x, _Q_BLOCK), rows)
    seen = seen_by_any(visible, kv_len)
    k_blocks, v_blocks = (
        _into_blocks(_where(seen, x.astype(jnp.float32)), _KV_BLOCK) for x in (k, v)
    )
    first = jnp.arange(k_blocks.shape[0], dtype=jnp.int32) * np.int32(_KV_BLOCK)
    slots = Slots(k_blocks, v_blocks, first)
    sinks, heads = operands.sinks, rows["d_lse"].shape[-2:]
    sink = None if sinks is None else sinks.reshape(q.shape[0], 1, *heads)

    rows |= jax.lax.map(lambda row: _statistics(row, slots, sink, score), rows)

    def kv_block(d_q: jax.Array, block: Slots) -> tuple[jax.Array, Any]:
        def q_block(sums: Any, row: Rows) -> tuple[Any, jax.Array]:
            def parts() -> tuple[Any, jax.Array]:
                d_q_part, d_k_part, d_v_part = _block(row, block, score)
                return (sums[0] + d_k_part, sums[1] + d_v_part), d_q_part

            return jax.lax.cond(_meet(row, block), parts, lambda: (sums, jnp.zeros_like(row["q"])))

        zeros = (jnp.zeros_like(block.k), jnp.zeros_like(block.v))
        (d_k, d_v), d_q_parts = jax.lax.scan(q_block, zeros, rows)
        return d_q + d_q_parts, (d_k, d_v)

    d_q_blocks, (d_k_blocks, d_v_blocks) = jax.lax.scan(kv_block, jnp.zeros_like(rows["q"]), slots)
    d_q = _where(live, _from_blocks(d_q_blocks, q.shape[1]).reshape(q.shape))
    found = [d_q, *(_from_blocks(x, kv_len) for x in (d_k_blocks, d_v_blocks))]
    if sinks is None:
        return found
    sink = sinks.reshape(1, q.shape[0], 1, *heads)  # beside rows, [blocks, B, t, g, r]
    shares = -jnp.exp(sink - rows["lse"]) * rows["delta"]
    shares = jnp.where(jnp.isneginf(sink), 0.0, shares)
    return [*found, jnp.sum(shares, axis=(0, 2)).reshape(sinks.shape)]


def _where(mask: jax.Array, x: jax.Array) -> jax.Array:
    """x where mask, which lacks x's last axes; 0 elsewhere, by selection, so NaN does not pass."""
    return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, 0.0)


def _finite(x: jax.Array) -> jax.Array:
    """x with 0 for NaN and Inf: a factor of gradients of scores, which are NaN where it counts.

    A row that sees a NaN has scores of NaN, and their gradients are; for the rows that do not see
    it they are 0, and 0 times NaN would be NaN. (A score of -inf has the gradient 0 as well.)
    """
    return jnp.where(jnp.isfinite(x), x, 0.0)


def _rows(operands: Operands, visible: Visible) -> Rows:
    """What a row brings to its gradients, float32, heads grouped: [B, T, Hk, r, ...]."""
    q, k, _, _, lse, d_out, d_lse, *_ = operands
    kv_heads = k.shape[2]
    none = jnp.isneginf(lse)  # [B, T, Hq]
    live = ~none & (visible.hi > 0)[..., None]
    d_out = _where(live, d_out.astype(jnp.float32))
    rows = {
        "live": live,
        "q": _where(live, q.astype(jnp.float32)),
        "d_out": _finite(d_out),
        "d_lse": jnp.where(none, 0.0, d_lse),
        # NaN where d_out is not finite: with it the probabilities are NaN, for the seen slots only.
        "poison": jnp.where(jnp.all(jnp.isfinite(d_out), axis=-1), 0.0, jnp.nan),
    }
    heads = (kv_heads, q.shape[2] // kv_heads)
    grouped = {name: x.reshape(*x.shape[:2], *heads, *x.shape[3:]) for name, x in rows.items()}
    # The rows of zeros that _into_blocks adds see nothing.
    return grouped | visible._asdict()


def _meet(row: Rows, block: Slots) -> jax.Array:
    """Whether any row of a block sees any slot of another."""
    end = block.first + np.int32(_KV_BLOCK)
    return jnp.any((row["lo"] < end) & (block.first < row["hi"]))


def _product(rule: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(rule, a, b, precision="highest")


def _scores(row: Rows, block: Slots, score: Score) -> jax.Array:
    """Scores of a block of rows and of slots, [B, t, g, r, s]; -inf where not seen."""
    slots = block.first + jnp.arange(_KV_BLOCK, dtype=jnp.int32)
    sees = Visible(row["lo"], row["hi"]).sees(slots)[:, :, None, None]
    scores = score(_product("btgrd,bsgd->btgrs", row["q"], block.k))
    return jnp.where(sees & row["live"][..., None], scores, -jnp.inf)


def _statistics(row: Rows, slots: Slots, sink: jax.Array | None, score: Score) -> Rows:
    """lse and delta of a block of rows over all slots, [B, t, g, r]; 0 for rows that see nothing.

    delta is sum_s(probs * d_probs) - d_lse: what the normalisation takes back from each score.
    Not from the forward pass's lse and out: a kernel that rounds q has other scores than these, so
    that weights relative to its lse would not add up to 1, and a 16-bit out is rounded.
    """

    def kv_block(carry: Any, block: Slots) -> tuple[Any, None]:
        def joined() -> Any:
            top, total, weighted = carry
            scores = _scores(row, block, score)
            # A constant, as far as derivatives go: it cancels out.
            new_top = jax.lax.stop_gradient(jnp.maximum(top, jnp.max(scores, axis=-1)))
            anchor = _anchor(new_top)
            weights = jnp.exp(scores - anchor[..., None])
            d_probs = jnp.where(weights == 0, 0.0, weights * _d_probs(row, block.v))
            factor = jnp.exp(top - anchor)
            total = total * factor + jnp.sum(weights, axis=-1)
            return new_top, total, weighted * factor + jnp.sum(d_probs, axis=-1)

        return jax.lax.cond(_meet(row, block), joined, lambda: carry), None

    zeros = jnp.zeros_like(row["d_lse"])
    start = (jnp.full_like(zeros, -jnp.inf), zeros, zeros)
    if sink is not None:
        sink = zeros + sink
        top = jax.lax.stop_gradient(sink)
        start = (top, jnp.exp(sink - _anchor(top)), zeros)
    (top, total, weighted), _ = jax.lax.scan(kv_block, start, slots)
    nothing = total == 0
    total = jnp.where(nothing, 1.0, total)
    lse = jnp.where(nothing, 0.0, top + jnp.log(total)) + row["poison"]
    return {"lse": lse, "delta": weighted / total - row["d_lse"]}


def _anchor(top: jax.Array) -> jax.Array:
    return jnp.where(jnp.isneginf(top), 0.0, top)


def _d_probs(row: Rows, v: jax.Array) -> jax.Array:
    """Cotangents of the probabilities, [B, t, g, r, s]."""
    return _product("btgrd,bsgd->btgrs", row["d_out"], v)


def _block(row: Rows, block: Slots, score: Score) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Parts of d_q, d_k, d_v from one block of rows and one of slots."""
    scores = _scores(row, block, score)
    unseen = jnp.isneginf(scores)
    # By selection, here and below: the other factors may be NaN where nothing is seen.
    probs = jnp.where(unseen, 0.0, jnp.exp(scores - row["lse"][..., None]))
    d_probs = _d_probs(row, block.v)
    slope = score.derivative(jnp.where(unseen, 0.0, scores))
    d_scores = jnp.where(probs == 0, 0.0, slope * probs * (d_probs - row["delta"][..., None]))
    return (
        _product("btgrs,bsgd->btgrd", d_scores, _finite(block.k)),
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
