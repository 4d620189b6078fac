"""What is right: the reference on the CPU, and the definition in float64, independent of it."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa import reference

_compiled = partial(jax.jit, static_argnames=("scale", "return_lse"))(reference.prefill_attention)
_compiled_with_options = partial(
    jax.jit, static_argnames=("scale", "sliding_window", "logits_soft_cap")
)(reference.attend)


def attend(q, k, v, positions, *, scale=None, return_lse=False, **options):
    """``reference.prefill_attention`` of these arrays, computed on the CPU.

    With options (starts, sinks, sliding_window, logits_soft_cap) the arrays must have a batch axis.
    """
    arrays = jax.device_put((q, k, v, positions), jax.devices("cpu")[0])
    if not options:
        return _compiled(*arrays, scale=scale, return_lse=return_lse)
    scale = np.float32(q.shape[-1] ** -0.5 if scale is None else scale)
    results = _compiled_with_options(*arrays, scale=scale, **options)
    return results if return_lse else results[0]


def interval(position, start, window, slots):
    """[lo, hi) of one row, in Python's integers; start may be None, window too."""
    lo = max(0, 0 if start is None else start, 0 if window is None else position - window + 1)
    hi = min(position, slots - 1) + 1
    return (lo, hi) if lo < hi else (0, 0)


def sees(positions, slots, *, starts=None, sliding_window=None):
    """[B, T, S] bool: what each row sees, row by row."""
    positions = np.asarray(positions)
    seen = np.zeros((*positions.shape, slots), bool)
    for b, t in np.ndindex(positions.shape):
        start = None if starts is None else int(starts[b] if starts.ndim == 1 else starts[b, t])
        lo, hi = interval(int(positions[b, t]), start, sliding_window, slots)
        seen[b, t, lo:hi] = True
    return seen


def define(q, k, v, seen, *, scale, logits_soft_cap=None, sinks=None):
    """out and lse of rows that see ``seen`` [B, T, S], in q's dtype, differentiable.

    Each row has a cache of its own, with zeros where it does not see: only for small shapes.
    """
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2)[:, None] for x in (k, v))  # [B, 1, S, Hq, D]
    k, v = (jnp.where(seen[..., None, None], x, 0) for x in (k, v))
    scores = scale * jnp.sum(q[:, :, None] * k, axis=-1)  # [B, T, S, Hq]
    if logits_soft_cap is not None:
        scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
    sinks = jnp.full(q.shape[2], -jnp.inf) if sinks is None else sinks
    column = jnp.broadcast_to(sinks, (*q.shape[:2], 1, q.shape[2]))
    there = jnp.concatenate([jnp.broadcast_to(seen[..., None], scores.shape), column > -jnp.inf], 2)
    scores = jnp.where(there, jnp.concatenate([scores, column], axis=2), 0)
    weights = jnp.where(there, jnp.exp(scores - jnp.max(scores, axis=2, keepdims=True)), 0)
    total = jnp.sum(weights, axis=2)
    nothing = total == 0
    total = jnp.where(nothing, 1, total)
    lse = jnp.where(nothing, -jnp.inf, jnp.max(scores, axis=2) + jnp.log(total))
    out = jnp.sum(weights[:, :, :-1, :, None] * v, axis=2) / total[..., None]
    return out, lse
