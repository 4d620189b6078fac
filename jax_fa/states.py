"""``merge_states``: attention over the union of two disjoint sets of slots."""

from __future__ import annotations

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
    top = jnp.maximum(lse_a, lse_b)
    # Two empty states: -inf - -inf would be NaN.
    anchor = jnp.where(jnp.isneginf(top), 0.0, top)
    weight_a, weight_b = jnp.exp(lse_a - anchor), jnp.exp(lse_b - anchor)
    total = weight_a + weight_b

    def part(out: jax.Array, weight: jax.Array) -> jax.Array:
        share = (weight / jnp.where(total == 0, 1.0, total))[..., None]
        # By selection: a state of weight 0 may hold anything.
        return share * jnp.where(share == 0, 0.0, out.astype(jnp.float32))

    merged = (part(out_a, weight_a) + part(out_b, weight_b)).astype(out_a.dtype)
    lse = anchor + jnp.log(jnp.where(total == 0, 1.0, total))
    # The neutral element: the other state keeps its bits, two empty ones stay empty.
    empty_a, empty_b = jnp.isneginf(lse_a), jnp.isneginf(lse_b)
    merged = jnp.where(empty_b[..., None], out_a, jnp.where(empty_a[..., None], out_b, merged))
    merged = jnp.where((empty_a & empty_b)[..., None], jnp.zeros_like(merged), merged)
    return merged, jnp.where(empty_b, lse_a, jnp.where(empty_a, lse_b, lse))
