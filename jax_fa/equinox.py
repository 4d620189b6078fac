"""jax_fa in equinox: a block with a cache.

Needs the extra ``equinox``. ``import jax_fa`` does not import this module.
"""

from __future__ import annotations

from typing import Any

import jax

from jax_fa import gqa
from jax_fa.gqa import AttentionConfig, KVCache

try:
    import equinox as eqx
except ImportError as error:
    raise ImportError(
        f"jax_fa.equinox needs equinox, which cannot be imported ({error}). Install jax_fa's "
        "extra `equinox` (pip install '.[equinox]' in a checkout), or equinox itself."
    ) from error

__all__ = ["AttentionConfig", "GroupedQueryAttention", "KVCache"]


class GroupedQueryAttention(eqx.Module):
    """Causal grouped-query self-attention with rotary embedding, and a preallocated KV cache.

    As equinox's own layers do, it takes one sequence; ``jax.vmap`` makes a batch, which is one call
    of the kernel. The cache is passed and returned. Without one, a call takes a whole sequence
    (training). With one, each call says at which slots its rows stand, enters them and attends to
    all up to there, so prompts go in whole or in chunks, and decoding is a chunk of one::

        block = GroupedQueryAttention(AttentionConfig(512, 8, 2, 64), key=jax.random.key(0))
        cache = block.init_cache(slots=4096, batch=2)
        step = eqx.filter_jit(lambda b, *rest: jax.vmap(b)(*rest), donate="all-except-first")
        y, cache = step(block, x, cache, positions)

    With ``donate``, the cache is written in place, and x is used up.

    Attributes:
      q_proj, k_proj, v_proj, o_proj: ``equinox.nn.Linear`` without bias.
      config: Sizes, and how to attend; static.
    """

    q_proj: eqx.nn.Linear
    k_proj: eqx.nn.Linear
    v_proj: eqx.nn.Linear
    o_proj: eqx.nn.Linear
    config: AttentionConfig = eqx.field(static=True)

    def __init__(self, config: AttentionConfig, *, dtype: Any = None, key: jax.Array) -> None:
        """Makes the projections.

        Args:
          config: Sizes, and how to attend.
          dtype: Of the weights; by default, equinox's.
          key: Initialises them.
        """
        q_key, k_key, v_key, o_key = jax.random.split(key, 4)
        q_width, kv_width = (h * config.head_dim for h in (config.q_heads, config.kv_heads))

        def linear(width_in: int, width_out: int, key: jax.Array) -> Any:
            return eqx.nn.Linear(width_in, width_out, use_bias=False, dtype=dtype, key=key)

        self.q_proj = linear(config.features, q_width, q_key)
        self.k_proj = linear(config.features, kv_width, k_key)
        self.v_proj = linear(config.features, kv_width, v_key)
        self.o_proj = linear(q_width, config.features, o_key)
        self.config = config

    def init_cache(self, slots: int, batch: int | None = None) -> KVCache:
        """An empty cache, ``[S, Hk, D]`` twice; with ``batch``, ``[B, S, Hk, D]``, for a vmap."""
        return gqa.empty_cache(self.config, slots, batch)

    def __call__(
        self, x: jax.Array, cache: KVCache | None = None, positions: Any = None
    ) -> tuple[jax.Array, KVCache | None]:
        """Attention of the rows of x.

        Args:
          x: ``[T, features]``.
          cache: What came before; None for a whole sequence.
          positions: ``[T]``, integers: with a cache, the slot of each row; negative means padding.
            None without a cache: row t stands at t.

        Returns:
          ``(y, cache)``: y has x's shape; rows of padding are 0 and add nothing to any gradient,
          whatever they hold; rows at or past the cache's end are NaN. The cache holds the new rows,
          or is None as it came.

        Raises:
          TypeError: The block computes in another dtype than float32 and the cache's, or positions
            are not integers.
          ValueError: Positions without a cache, a cache without positions, or shapes that do not
            fit.
        """
        gqa.check_rows(self.config, x, (2,))
        x = gqa.without_padding(x, positions, cache)
        qkv = (
            self._to_heads(self.q_proj, x, self.config.q_heads),
            self._to_heads(self.k_proj, x, self.config.kv_heads),
            self._to_heads(self.v_proj, x, self.config.kv_heads),
        )
        out, cache = gqa.attend(self.config, qkv, positions, cache)
        width = self.config.q_heads * self.config.head_dim
        y = jax.vmap(self.o_proj)(out.reshape(out.shape[0], width))
        return gqa.without_padding(y, positions, cache), cache

    def _to_heads(self, projection: eqx.nn.Linear, x: jax.Array, heads: int) -> jax.Array:
        """[T, features] to [T, heads, head_dim]."""
        return jax.vmap(projection)(x).reshape(x.shape[0], heads, self.config.head_dim)
