"""What the blocks of :mod:`jax_fa.nnx` and :mod:`jax_fa.equinox` share: all but the weights.

From projected q, k and v to the attention's output: rotary embedding, cache, attention, rules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa import api, checks, kv_cache


@dataclass(frozen=True)
class AttentionConfig:
    """Sizes of a causal grouped-query attention block, and how it attends.

    Attributes:
      features: Width of the block's rows, in and out.
      q_heads: Query heads, a multiple of ``kv_heads``.
      kv_heads: Heads of the keys, the values and the cache.
      head_dim: Width of a head; even, since the rotary embedding turns pairs.
      rope_theta: Base of the rotary embedding; pair i turns by ``rope_theta ** (-2i / head_dim)``
        radians a position.
      cache_dtype: float16 or bfloat16. Keys and values are rounded to it, with a cache or without.
      implementation: As for :func:`jax_fa.prefill_attention`.

    Raises:
      TypeError: ``cache_dtype`` is not served.
      ValueError: A size or ``rope_theta`` is out of range.
    """

    features: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    cache_dtype: Any = jnp.bfloat16
    implementation: str | None = None

    def __post_init__(self) -> None:
        for name in ("features", "q_heads", "kv_heads", "head_dim"):
            value = getattr(self, name)
            whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if not whole or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number, at least 1.")
            object.__setattr__(self, name, int(value))
        if self.q_heads % self.kv_heads != 0:
            raise ValueError(
                f"q_heads is {self.q_heads}, kv_heads is {self.kv_heads}; query heads must be a "
                "multiple of kv heads."
            )
        if self.head_dim % 2 != 0:
            raise ValueError(
                f"head_dim is {self.head_dim}; it must be even (the rotary embedding turns pairs)."
            )
        number = isinstance(self.rope_theta, int | float | np.number)
        if not number or not 1 <= self.rope_theta < math.inf:
            raise ValueError(
                f"rope_theta is {self.rope_theta!r}; it must be a finite number, at least 1."
            )
        object.__setattr__(self, "rope_theta", float(self.rope_theta))
        object.__setattr__(self, "cache_dtype", checks.as_cache_dtype(self.cache_dtype))


class KVCache(NamedTuple):
    """Keys, rotated, and values of one block: ``[B, S, Hk, D]`` or ``[S, Hk, D]`` each."""

    k: jax.Array
    v: jax.Array


def check_rows(config: AttentionConfig, x: jax.Array, ranks: tuple[int, ...]) -> None:
    """Rows to attend are [..., T, features], of as many axes as ``ranks`` says."""
    if x.ndim not in ranks or x.shape[-1] != config.features:
        shapes = {2: f"(T, {config.features})", 3: f"(B, T, {config.features})"}
        raise ValueError(
            f"x has shape {x.shape}; it must be {' or '.join(shapes[rank] for rank in ranks)}."
        )


def without_padding(rows: jax.Array, positions: Any, cache: KVCache | None) -> jax.Array:
    """``rows`` [..., T, features] with 0 for padding, by selection, so that NaN does not pass.

    For what goes into the projections and comes out of them: the gradient of a weight would take
    0 times a row of padding, which is NaN where that is. Positions that do not fit are for
    :func:`attend` to refuse.
    """
    if cache is None or positions is None:
        return rows
    positions = checks.as_positions(positions)
    if positions.shape != rows.shape[:-1]:
        return rows
    return jnp.where((positions >= 0)[..., None], rows, jnp.zeros_like(rows))


def empty_cache(config: AttentionConfig, slots: int, batch: int | None = None) -> KVCache:
    """A cache of ``slots`` slots, ``[B, S, Hk, D]``, or ``[S, Hk, D]`` where batch is None."""
    leading = () if batch is None else (batch,)
    shape = (*leading, slots, config.kv_heads, config.head_dim)
    return KVCache(jnp.zeros(shape, config.cache_dtype), jnp.zeros(shape, config.cache_dtype))


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary embedding: pairs (i, i + D/2) of the last axis, turned by each row's position.

    Args:
      x: ``[..., T, H, D]``, D even.
      positions: ``[..., T]``, integers.
      theta: Base of the frequencies.

    Returns:
      float32, shape of x.

    Source: RoFormer (Su et al., 2021), section 3.4.2. The pairs lie as in GPT-NeoX and in the Llama
    checkpoints of Hugging Face.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None].astype(jnp.float32) * frequency  # [..., T, 1, D/2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def attend(
    config: AttentionConfig,
    qkv: tuple[jax.Array, jax.Array, jax.Array],
    positions: Any,
    cache: KVCache | None,
) -> tuple[jax.Array, KVCache | None]:
    """Causal attention of projected rows: over each other, or over a cache that they enter first.

    Args:
      config: The block's.
      qkv: q ``[B, T, Hq, D]``, k and v ``[B, T, Hk, D]``, or all without B; not yet rotated.
      positions: ``[B, T]`` or ``[T]``, the slot of each row in ``cache``, negative for padding.
        None without a cache: the rows are whole sequences.
      cache: What came before, or None.

    Returns:
      ``(out, cache)``: out has shape and dtype of q, the cache holds the new rows. Rows of padding
      are 0; rows at or past the cache's end, which no cache can hold, are NaN.
    """
    q, k, v = qkv
    positions = _positions(positions, k, cache)
    rotated_q = rotate(q, positions, config.rope_theta).astype(q.dtype)
    rotated_k = rotate(k, positions, config.rope_theta)
    if cache is None:
        keys, values = rotated_k.astype(config.cache_dtype), v.astype(config.cache_dtype)
    else:
        keys, values = kv_cache.update_kv_cache(*cache, rotated_k, v, positions)
    if q.dtype not in (jnp.float32, keys.dtype):
        raise TypeError(
            f"the block computes in {q.dtype}, its cache is {keys.dtype}; it must compute in "
            "float32 or in the cache's dtype (cast x and the weights, or set AttentionConfig's "
            "cache_dtype)."
        )
    out = api.prefill_attention(
        rotated_q, keys, values, positions, implementation=config.implementation
    )
    if cache is None:
        return out, None
    held = positions < keys.shape[-3]
    return nan_unless(held[..., None, None], out), KVCache(keys, values)


def _positions(positions: Any, k: jax.Array, cache: KVCache | None) -> jax.Array:
    """Positions of the rows of k, [B, T] or [T]: the caller's, or 0 .. T-1 without a cache."""
    if cache is None and positions is None:
        return jnp.broadcast_to(jnp.arange(k.shape[-3], dtype=jnp.int32), k.shape[:-2])
    if cache is None:
        raise ValueError(
            "positions are given and there is no cache; they are slots of one. Make it with "
            "init_cache, or leave positions out: then x holds whole sequences."
        )
    if positions is None:
        raise ValueError(
            "there is a cache and positions is None; pass the slot of each row, negative for "
            "padding (for example n_past + jnp.arange(T)), or no cache: then x holds whole "
            "sequences."
        )
    positions = checks.as_positions(positions)
    checks.check_positions_shape(positions, k, "k")
    return positions


def nan_unless(right: jax.Array, out: jax.Array) -> jax.Array:
    """``out`` bit for bit where ``right`` holds; NaN, in its gradient too, where it does not.

    For what is wrong in the data of a compiled program, where nothing can be raised.
    """
    return out * jnp.where(right, 1.0, jnp.nan).astype(out.dtype)
