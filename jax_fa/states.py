"""``merge_states``: attention over the union of two disjoint sets of slots."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_fa import checks


def merge_states(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[jax.Array, jax.Array]:
    """Joins two results of attention over disjoint slot sets into that over their union.

    Associative and commutative up to rounding; an empty state (0, -inf) is its neutral element:
    merging with it returns the other state's bits.

    Args:
      out_a: ``[..., D]``: an attention output; float32, float16 or bfloat16.
      lse_a: ``[...]`` float32: its log-sum-exp (natural logarithm), -inf where no slot was seen.
      out_b: Shape and dtype of out_a.
      lse_b: Shape of lse_a.

    Returns:
      ``(out, lse)``: dtype of out_a, and float32. Computed in float32.

    Raises:
      TypeError: A dtype is not served, or an argument is not an array.
      ValueError: Shapes do not fit each other.

    Source: FlashAttention (Dao et al., 2022), section 3.1, the rescaling of partial softmaxes.
    """
    out_a, out_b = checks.as_array("out_a", out_a), checks.as_array("out_b", out_b)
    lse_a, lse_b = checks.as_array("lse_a", lse_a), checks.as_array("lse_b", lse_b)
    checks.check_states(out_a, lse_a, out_b, lse_b)
    return _merge(out_a, lse_a, out_b, lse_b)


# Compiled as a whole also where the caller does not use jit. Its name shows in profiles.
@functools.partial(jax.jit, inline=True)
def _merge(
    out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # The heavier one first: merging commutes, however the compiler contracts the sum of products.
    swap = lse_b > lse_a
    top, low = jnp.where(swap, lse_b, lse_a), jnp.where(swap, lse_a, lse_b)
    swap_out = swap[..., None]
    top_out, low_out = jnp.where(swap_out, out_b, out_a), jnp.where(swap_out, out_a, out_b)
    # Two empty states: -inf - -inf would be NaN.
    anchor = jnp.where(jnp.isneginf(top), 0.0, top)
    top_weight, low_weight = jnp.exp(top - anchor), jnp.exp(low - anchor)
    total = top_weight + low_weight

    def part(out: jax.Array, weight: jax.Array) -> jax.Array:
        share = (weight / jnp.where(total == 0, 1.0, total))[..., None]
        # By selection: a state of weight 0 may hold anything.
        return share * jnp.where(share == 0, 0.0, out.astype(jnp.float32))

    merged = (part(top_out, top_weight) + part(low_out, low_weight)).astype(out_a.dtype)
    lse = anchor + jnp.log(jnp.where(total == 0, 1.0, total))
    # The neutral element: the other state keeps its bits, two empty ones stay empty.
    empty_a, empty_b = jnp.isneginf(lse_a), jnp.isneginf(lse_b)
    merged = jnp.where(empty_b[..., None], out_a, jnp.where(empty_a[..., None], out_b, merged))
    merged = jnp.where((empty_a & empty_b)[..., None], jnp.zeros_like(merged), merged)
    return merged, jnp.where(empty_b, lse_a, jnp.where(empty_a, lse_b, lse))
