"""What a row sees: one interval of slots, its only mask. Contract C1 and C2, once in Python.

``attention/visible.h`` says the same to the kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_INT32_MAX = 2**31 - 1


class Visible(NamedTuple):
    """The slots [lo, hi) that each row sees, int32; a row that sees none has lo = hi = 0."""

    lo: jax.Array
    hi: jax.Array

    def sees(self, slots: jax.Array) -> jax.Array:
        """[..., s] bool: whether a row sees each of ``slots``, [s] int32."""
        slots = jnp.expand_dims(slots, tuple(range(self.lo.ndim)))
        return (self.lo[..., None] <= slots) & (slots < self.hi[..., None])


def visible_slots(
    positions: jax.Array,
    kv_len: Any,
    *,
    starts: jax.Array | None = None,
    sliding_window: int | None = None,
) -> Visible:
    """The slots ``max(0, start, p - W + 1) .. min(p, kv_len - 1)`` of rows at ``positions``.

    Args:
        positions: [..., T] int32, any value.
        kv_len: number of slots.
        starts: [...] or [..., T] int32, first slot that a sequence, or a row, may see.
        sliding_window: W, at least 1; its bound goes by the position as it is, not cut to kv_len.
    """
    # Of positions from 0 on alone, so that nothing overflows; a negative one sees nothing anyway.
    position = jnp.maximum(positions, 0)
    last = jnp.minimum(position, jnp.asarray(kv_len - 1, jnp.int32))
    hi = jnp.where(positions < 0, 0, last + 1)
    lo = jnp.zeros_like(hi)
    if starts is not None:
        of_rows = starts if starts.ndim == positions.ndim else starts[..., None]
        lo = jnp.maximum(lo, of_rows)
    if sliding_window is not None:
        lo = jnp.maximum(lo, position - np.int32(min(sliding_window - 1, _INT32_MAX)))
    some = lo < hi
    return Visible(jnp.where(some, lo, 0), jnp.where(some, hi, 0))


def seen_by_any(visible: Visible, kv_len: int) -> jax.Array:
    """[B, S] bool: the slots that some row of the sequence sees, of ``visible`` [B, T].

    Counted, so that memory is linear in T + S.
    """

    def count(lo: jax.Array, hi: jax.Array) -> jax.Array:
        steps = jnp.zeros(kv_len + 1, jnp.int32).at[lo].add(1).at[hi].add(-1)
        return jnp.cumsum(steps, dtype=jnp.int32)[:-1]

    return jax.vmap(count)(*visible) > 0
