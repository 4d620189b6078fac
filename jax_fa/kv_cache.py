"""``update_kv_cache``: writing new rows into a preallocated cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_fa import checks, partitioning, stacks

Pair = tuple[jax.Array, jax.Array]  # of keys and of values


def update_kv_cache(
    k_cache: Any, v_cache: Any, k: Any, v: Any, positions: Any, *, layer: Any = None
) -> tuple[jax.Array, jax.Array]:
    """The cache with the new rows of k and v at their positions.

    Under ``jit`` with both caches donated, it writes in place and copies nothing (on CPUs, a
    bfloat16 cache needs jax 0.11 or newer for that). With T > 1 it takes an int32 ``[B, S]``, to
    find slots that are named twice. Caches stacked over layers belong in the *carry* of a
    ``lax.scan``, whole, with ``layer`` telling which one to write to; then nothing is copied
    either. (Scanned over as ``xs``, all layers are.) Caches split over devices stay as they are
    split, under ``jit``, explicit axes and ``shard_map``; by batch and heads, nothing is moved.

    Args:
      k_cache: ``[B, S, Hk, D]`` or ``[S, Hk, D]``; float16 or bfloat16. With ``layer``,
        ``[L, B, S, Hk, D]`` or ``[L, S, Hk, D]``.
      v_cache: Shape and dtype of k_cache.
      k: New keys, ``[B, T, Hk, D]`` or ``[T, Hk, D]``; any floating dtype, rounded to the cache's.
      v: New values, shape of k.
      positions: ``[B, T]`` or ``[T]``, integers: the slot of each row. A row whose position is
        negative or at least S is dropped. Where several rows of a sequence name one slot, the last
        of them (the highest t) is kept.
      layer: The layer of a stacked cache to write to, as for :func:`jax_fa.prefill_attention`.

    Returns:
      ``(k_cache, v_cache)`` with those rows replaced, all other slots bit for bit as they were
      (jaxlib 0.10 on CPUs gives bfloat16 NaNs there another payload).

    Raises:
      TypeError: A dtype is not served, or an argument is not an array.
      ValueError: Shapes do not fit each other.
    """
    k_cache, v_cache = checks.as_array("k_cache", k_cache), checks.as_array("v_cache", v_cache)
    k, v = checks.as_array("k", k), checks.as_array("v", v)
    positions = checks.as_positions(positions)
    names = ("k_cache", "v_cache")
    checks.check_cache_dtypes(k_cache, v_cache, names)
    stacked = layer is not None
    checks.check_cache_shapes(k_cache, v_cache, names, stacked)
    checks.check_new_rows(k, v, k_cache, stacked)
    checks.check_positions_shape(positions, k, "k")
    at = (checks.as_layer(layer, k_cache.shape[0]),) if stacked else ()
    caches = (k_cache, v_cache)
    if k_cache.shape[-3] == 0:
        return caches
    return _update(caches, (k, v), positions, at)


# Compiled as a whole also where the caller does not use jit. Its name shows in profiles.
@functools.partial(jax.jit, inline=True)
def _update(caches: Pair, rows: Pair, positions: jax.Array, at: tuple[jax.Array, ...]) -> Pair:
    if at:
        at = (stacks.clamped(at[0], caches[0].shape[0]),)
    return partitioning.write_over_explicit_axes(_write, caches, rows, positions, at)


@jax.custom_jvp
def _write(caches: Pair, rows: Pair, positions: jax.Array, at: tuple[jax.Array, ...]) -> Pair:
    """_scatter_rows, which ``checkify.index_checks`` does not look into: rows may be dropped."""
    return _opaque(_scatter_rows)(caches, rows, positions, at)


@_write.defjvp
def _write_jvp(primals: Any, tangents: Any) -> tuple[Pair, Pair]:
    _, _, positions, at = primals
    d_caches, d_rows, *_ = tangents
    return _write(*primals), _scatter_rows(d_caches, d_rows, positions, at)


def _opaque(write: Callable[..., Pair]) -> Callable[..., Pair]:
    """``write`` as one operation, to interpreters of programs that have no rule for it.

    A custom_vmap is; its rule is that of ``write`` itself.
    """
    call = jax.custom_batching.custom_vmap(write)

    @call.def_vmap
    def rule(size: int, mapped: Any, *operands: Any) -> tuple[Pair, tuple[bool, bool]]:
        axes = jax.tree.map(lambda is_mapped: 0 if is_mapped else None, tuple(mapped))
        return _opaque(jax.vmap(write, axes, axis_size=size))(*operands), (True, True)

    return call


def _scatter_rows(
    caches: Pair, rows: Pair, positions: jax.Array, at: tuple[jax.Array, ...]
) -> Pair:
    """Writes rows [B, T, Hk, D] into caches [B, S, Hk, D] at positions [B, T]; all or none have B.

    With the index of a layer in ``at``, into that layer of caches [L, B, S, Hk, D].
    """
    slots = caches[0].shape[-3]
    to_write = functools.partial(_slots_to_write, slots=slots)
    has_batch = positions.ndim == 2
    slot = jax.vmap(to_write)(positions) if has_batch else to_write(positions)
    if slot.shape[-1] == 1:
        # XLA makes a scatter of one row something else, which copies the caches where attention
        # reads them next. Of two rows, it does not; the second is dropped. Whatever the batch is:
        # devices may split it to one sequence each.
        slot = jnp.concatenate([slot, jnp.full_like(slot, -2)], axis=-1)
        rows = (jnp.repeat(rows[0], 2, axis=-3), jnp.repeat(rows[1], 2, axis=-3))
    indices = jnp.stack([*(jnp.broadcast_to(i, slot.shape) for i in at), slot], axis=-1)
    slot_axis = len(at) + has_batch
    indexed = (*range(len(at)), slot_axis)  # the layer, if any, and the slot
    dimensions = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(slot.ndim, slot.ndim + 1),
        inserted_window_dims=indexed,
        scatter_dims_to_operand_dims=indexed,
        # The batch by name, not by an index: XLA then sees that devices which split it need no
        # others.
        operand_batching_dims=(len(at),) if has_batch else (),
        scatter_indices_batching_dims=(0,) if has_batch else (),
    )

    def write(cache: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.scatter(
            cache,
            indices,
            new.astype(cache.dtype),
            dimensions,
            unique_indices=True,
            mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
        )

    return write(caches[0], rows[0]), write(caches[1], rows[1])


def _slots_to_write(positions: jax.Array, slots: int) -> jax.Array:
    """The slot of each row [T], or one before the cache (-1 - t, all different) if it is dropped.

    A scatter with repeated indices has no defined winner on a GPU, so the winner is settled first,
    by a maximum, which has one: ``last[s]`` is the highest row that names slot s.
    """
    t = jnp.arange(positions.shape[0], dtype=jnp.int32)
    outside = (positions < 0) | (positions >= slots)
    dropped = -1 - t  # and not past the cache, where S + t may be past int32 too
    slot = jnp.where(outside, dropped, positions)
    if positions.shape[0] == 1:
        return slot
    last = jnp.full(slots, -1, jnp.int32)
    last = last.at[slot].max(t, mode="drop", wrap_negative_indices=False)
    winner = last.at[slot].get(mode="fill", fill_value=-1, wrap_negative_indices=False)
    wins = winner == t
    return jnp.where(wins, slot, dropped)
