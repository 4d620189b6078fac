"""``prefill_attention``: from the caller's arrays to the one custom call."""

from __future__ import annotations

import functools
from typing import Any, Literal, overload

import jax

from jax_fa import checks, dispatch, transforms
from jax_fa.operands import Operands


@overload
def prefill_attention(
    q: jax.typing.ArrayLike,
    k: jax.typing.ArrayLike,
    v: jax.typing.ArrayLike,
    positions: jax.typing.ArrayLike,
    *,
    layer: jax.typing.ArrayLike | None = None,
    starts: jax.typing.ArrayLike | None = None,
    sinks: jax.typing.ArrayLike | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    return_lse: Literal[False] = False,
    chunk_invariant: bool = True,
    implementation: str | None = None,
) -> jax.Array: ...


@overload
def prefill_attention(
    q: jax.typing.ArrayLike,
    k: jax.typing.ArrayLike,
    v: jax.typing.ArrayLike,
    positions: jax.typing.ArrayLike,
    *,
    layer: jax.typing.ArrayLike | None = None,
    starts: jax.typing.ArrayLike | None = None,
    sinks: jax.typing.ArrayLike | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    return_lse: Literal[True],
    chunk_invariant: bool = True,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]: ...


def prefill_attention(
    q: Any,
    k: Any,
    v: Any,
    positions: Any,
    *,
    layer: Any = None,
    starts: Any = None,
    sinks: Any = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
    chunk_invariant: bool = True,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Masked grouped-query softmax attention of query tokens against a preallocated KV cache.

    Row t of sequence b, at position ``p = positions[b, t]``, sees exactly the cache slots
    ``max(0, start, p - W + 1) <= s <= min(p, S - 1)``, start and W being those of ``starts`` and
    ``sliding_window``. Positions and starts are data, so one compiled program serves a whole
    prompt, any chunk of one, a padded batch, packed documents or a speculative tree. What lies in
    slots that no row sees (NaN included) changes nothing.

    Args:
      q: Queries, ``[B, T, Hq, D]`` or ``[T, Hq, D]``; float32, or the cache's dtype.
      k: Keys, the cache, ``[B, S, Hk, D]`` or ``[S, Hk, D]``; float16 or bfloat16. ``Hq`` is a
        multiple of ``Hk``; query head h reads kv head ``h // (Hq // Hk)``.
      v: Values, shape and dtype of k.
      positions: ``[B, T]`` or ``[T]``, integers: the slot of each query row in its sequence.
        Negative means padding. Any order, with repeats and gaps; growing is the fast case.
      layer: With it, k and v are caches stacked over layers, ``[L, B, S, Hk, D]`` or
        ``[L, S, Hk, D]``, and this is the index of the one to attend to: an integer scalar, and
        like positions it may be data, such as the counter of a ``lax.scan`` over layers. Nothing
        is cut out of the stack or copied. A number outside ``0 .. L - 1`` is an error; data are
        clamped to it, as by ``lax.dynamic_slice``.
      starts: ``[B]`` or ``[B, T]`` (unbatched: one number, or ``[T]``), integers: the first slot
        that a sequence, or a row, may see. Any value; what is negative hides nothing.
      sinks: ``[Hq]``, floating: a logit for each query head that joins the softmax of its rows,
        with the value 0. It is not scaled, capped or masked; -inf stands for none.
      scale: Factor on q·k, a finite Python number; by default ``1 / sqrt(D)``.
      sliding_window: W, a Python integer, at least 1: a row at p sees at most the W slots
        ``p - W + 1 .. p``, itself included.
      logits_soft_cap: A Python number above 0: scores become ``cap * tanh(scores / cap)``, after
        the scale and before the mask and the sinks.
      return_lse: Whether to return the log-sum-exp too.
      chunk_invariant: If True, a row's bits depend on that row and its cache alone, not on T, B,
        the chunking or its neighbours. False lets a kernel choose its tiles, and share out the
        slots of few rows, for speed: a few tokens over a long cache are several times as fast.
      implementation: Name of the kernel to use, or None for the best one that serves the call;
        :func:`jax_fa.explain` lists them.

    Returns:
      ``out``, shape and dtype of q; rows that see no slot (a negative position, a start beyond it)
      are exactly 0. With ``return_lse=True``, ``(out, lse)``: lse is float32 ``[B, T, Hq]`` or
      ``[T, Hq]``, the natural logarithm of the sum of ``exp(score)`` over the slots seen and the
      sink, -inf where there are none.

    Raises:
      TypeError: A dtype is not served, or an argument is not an array or not static.
      ValueError: Shapes do not fit each other, an option is out of range, or ``implementation`` is
        unknown, not built, or cannot serve this call.

    Source: online softmax by tiles, as in FlashAttention (Dao et al., 2022, section 3.1); grouped
    queries, Ainslie et al., 2023; soft caps, Gemma 2 (2024), section 2; sinks, a learned variant of
    StreamingLLM's (Xiao et al., 2023), as in gpt-oss.
    """
    call = checks.check_call(
        q,
        k,
        v,
        positions,
        layer=layer,
        starts=starts,
        sinks=sinks,
        scale=scale,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        chunk_invariant=chunk_invariant,
    )
    return_lse = checks.as_flag("return_lse", return_lse)
    wanted = dispatch.check_implementation(implementation)
    if wanted:
        dispatch.check_can_serve(call, wanted, (q, k, v, positions, layer, starts, sinks))
    config = transforms.Config(call.options, implementation=wanted, return_lse=return_lse)
    results = _attend(config, call.operands)
    if call.unbatched:
        results = [result[0] for result in results]
    return (results[0], results[1]) if return_lse else results[0]


# Compiled as a whole also where the caller does not use jit. Its name shows in profiles.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _attend(config: transforms.Config, operands: Operands) -> list[jax.Array]:
    return transforms.attend(config, operands)
