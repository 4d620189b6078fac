"""``update_kv_cache``: writing new rows into a preallocated cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_fa import checks


def update_kv_cache(
    k_cache: Any, v_cache: Any, k: Any, v: Any, positions: Any
) -> tuple[jax.Array, jax.Array]:
    """The cache with the new rows of k and v at their positions.

    Under ``jit`` with both caches donated, it writes in place and copies nothing (on CPUs, a
    bfloat16 cache needs jax 0.11 or newer for that). With T > 1 it takes an int32 ``[B, S]``, to
    find slots that are named twice. Caches stacked over layers belong in the *carry* of a
    ``lax.scan`` (``k_caches[i]`` in, ``.at[i].set`` out): one layer is copied at a time then;
    scanned over as ``xs``, all of them are. On several devices it takes ``jit`` with automatic axes
    and ``shard_map``; under explicit axes, wrap it in ``jax.sharding.auto_axes``.

    Args:
      k_cache: ``[B, S, Hk, D]`` or ``[S, Hk, D]``; float16 or bfloat16.
      v_cache: Shape and dtype of k_cache.
      k: New keys, ``[B, T, Hk, D]`` or ``[T, Hk, D]``; any floating dtype, rounded to the cache's.
      v: New values, shape of k.
      positions: ``[B, T]`` or ``[T]``, integers: the slot of each row. A row whose position is
        negative or at least S is dropped. Where several rows of a sequence name one slot, the last
        of them (the highest t) is kept.

    Returns:
      ``(k_cache, v_cache)`` with those rows replaced, all other slots bit for bit as they were.

    Raises:
      TypeError: A dtype is not served, or an argument is not an array.
      ValueError: Shapes do not fit each other.
    """
    k_cache, v_cache = checks.as_array("k_cache", k_cache), checks.as_array("v_cache", v_cache)
    k, v = checks.as_array("k", k), checks.as_array("v", v)
    positions = checks.as_positions(positions)
    names = ("k_cache", "v_cache")
    checks.check_cache_dtypes(k_cache, v_cache, names)
    checks.check_cache_shapes(k_cache, v_cache, names)
    checks.check_new_rows(k, v, k_cache)
    checks.check_positions_shape(positions, k, "k")
    if k.ndim == 3:
        caches = (k_cache[None], v_cache[None])
        k_new, v_new = _scatter_rows(caches, (k[None], v[None]), positions[None])
        return k_new[0], v_new[0]
    return _scatter_rows((k_cache, v_cache), (k, v), positions)


def _scatter_rows(
    caches: tuple[jax.Array, jax.Array], rows: tuple[jax.Array, jax.Array], positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Writes rows [B, T, Hk, D] into caches [B, S, Hk, D] at positions [B, T]."""
    batch, slots = caches[0].shape[:2]
    if slots == 0:
        return caches
    b = jnp.arange(batch, dtype=jnp.int32)[:, None]
    slot = _slots_to_write(positions, slots)

    def write(cache: jax.Array, new: jax.Array) -> jax.Array:
        return cache.at[b, slot].set(new.astype(cache.dtype), mode="drop", unique_indices=True)

    return write(caches[0], rows[0]), write(caches[1], rows[1])


def _slots_to_write(positions: jax.Array, slots: int) -> jax.Array:
    """The slot of each row, or one past the cache (S + t, all different) if it must be dropped.

    A scatter with repeated indices has no defined winner on a GPU, so the winner is settled first,
    by a maximum, which has one: ``last[b, s]`` is the highest row that names slot s.
    """
    batch, tokens = positions.shape
    b = jnp.arange(batch, dtype=jnp.int32)[:, None]
    t = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), positions.shape)
    outside = (positions < 0) | (positions >= slots)
    dropped = slots + t
    slot = jnp.where(outside, dropped, positions)
    if tokens == 1:
        return slot
    last = jnp.full((batch, slots), -1, jnp.int32).at[b, slot].max(t, mode="drop")
    wins = last.at[b, slot].get(mode="fill", fill_value=-1) == t
    return jnp.where(wins, slot, dropped)
