"""jax_fa in flax.nnx: an ``attention_fn`` for its MultiHeadAttention, and a block with a cache.

Needs the extra ``flax``. ``import jax_fa`` does not import this module.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa import api, checks, gqa
from jax_fa.gqa import AttentionConfig

try:
    from flax import nnx
    from flax.nnx.nn.dtypes import promote_dtype
except ImportError as error:
    raise ImportError(
        f"jax_fa.nnx needs flax, which cannot be imported ({error}). Install jax_fa's extra "
        "`flax` (pip install '.[flax]' in a checkout), or flax itself."
    ) from error

__all__ = ["AttentionConfig", "GroupedQueryAttention", "dot_product_attention"]


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    is_causal: bool = False,
    *,
    cache_dtype: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """``flax.nnx.dot_product_attention`` by :func:`jax_fa.prefill_attention`.

    For ``nnx.MultiHeadAttention(attention_fn=...)``; the arguments are those it passes, and two
    more, for ``functools.partial``. Training, prefill and ``decode=True`` are served: whatever lets
    each row see the first so many keys.

    ``is_causal=True`` costs nothing. A mask is read once, T * S elements, to see that each of its
    rows is True up to some key and False from there on, in all heads alike. Causal, prefix-LM and
    decoding masks are; so are padding masks, where the padding follows the sequence. A mask that is
    not raises where its values are known, outside ``jit``. Inside, each such row of the output, and
    its gradient, is NaN: it is never taken for another mask.

    Args:
      query: ``[batch..., T, Hq, D]``, with any number of batch axes.
      key: ``[batch..., S, Hk, D]``; Hq is a multiple of Hk.
      value: Shape of key.
      bias: Refused unless None.
      mask: Broadcastable to ``[batch..., Hq, T, S]``; a key is seen where it is not 0.
      broadcast_dropout: Not read: there is no dropout.
      dropout_rng: Not read.
      dropout_rate: Refused above 0, unless ``deterministic``.
      deterministic: Whether dropout is off.
      dtype: What query, key and value are promoted to; by default, what they have in common.
      precision: Not read, as in nnx's own where it calls ``jax.nn.dot_product_attention``. The
        kernels' numerics are in docs/contract.md.
      module: Refused unless None (``sow_weights=True``): the weights are never formed.
      is_causal: Whether row t sees no key after t.
      cache_dtype: float16 or bfloat16: what key and value are rounded to. By default they must
        have one of these dtypes after promotion. query and the result keep theirs.
      implementation: As for :func:`jax_fa.prefill_attention`.

    Returns:
      ``[batch..., T, Hq, D]``, the promoted dtype. A row whose mask shows it no key is 0 (nnx's own
      gives it the mean of all values).

    Raises:
      TypeError: A dtype is not served.
      ValueError: Shapes do not fit, or something is asked for that is not served.
    """
    _check_served(bias, module, 0.0 if deterministic else dropout_rate)
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    if cache_dtype is not None:
        cache_dtype = checks.as_cache_dtype(cache_dtype)
        key, value = key.astype(cache_dtype), value.astype(cache_dtype)
    elif key.dtype not in checks.CACHE_DTYPES:
        raise TypeError(
            f"key and value have dtype {key.dtype}; they must be float16 or bfloat16. Compute in "
            "one (nnx.MultiHeadAttention(..., dtype=jnp.bfloat16)), or have these two rounded "
            "(functools.partial(dot_product_attention, cache_dtype=jnp.bfloat16))."
        )
    _check_shapes(query, key, value)
    *batch, q_len, q_heads, _ = query.shape
    slots = key.shape[-3]
    positions, right = _positions(mask, is_causal, (*batch, q_heads, q_len, slots))
    sequences = math.prod(batch)
    out = api.prefill_attention(
        query.reshape(sequences, *query.shape[-3:]),
        key.reshape(sequences, *key.shape[-3:]),
        value.reshape(sequences, *value.shape[-3:]),
        jnp.broadcast_to(positions, (*batch, q_len)).reshape(sequences, q_len),
        implementation=implementation,
    ).reshape(query.shape)
    return out if right is None else gqa.nan_unless(right, out)


def _check_served(bias: Any, module: Any, dropout_rate: float) -> None:
    if dropout_rate > 0:
        raise ValueError(
            f"dropout_rate is {dropout_rate} and deterministic is False; attention weights are "
            "never formed here, so none can be dropped. Pass deterministic=True or dropout_rate=0 "
            "(an nnx.Dropout on the layer's output is another matter, and stays)."
        )
    if bias is not None:
        raise ValueError(
            "bias is given; a bias on the scores is not served. Leave it out (a mask goes into "
            "mask=), or use flax.nnx.dot_product_attention."
        )
    if module is not None:
        raise ValueError(
            f"module is a {type(module).__name__}, to sow attention weights into; they are never "
            "formed here. Pass sow_weights=False, or use flax.nnx.dot_product_attention."
        )


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    """What must hold before batch axes are joined; the rest is the attention's own to check."""
    if query.ndim < 3 or query.shape[:-3] != key.shape[:-3] or key.shape != value.shape:
        raise ValueError(
            f"query has shape {query.shape}, key {key.shape}, value {value.shape}; they must be "
            "(batch..., T, Hq, D) and twice (batch..., S, Hk, D), with the same batch axes."
        )


def _positions(mask: Any, is_causal: Any, weights_shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Where the rows stand, broadcastable to ``[batch..., T]``, and :func:`_prefixes`' second."""
    is_causal = checks.as_flag("is_causal", is_causal)
    q_len, slots = weights_shape[-2:]
    if mask is not None:
        return _prefixes(_seen_keys(mask, weights_shape, is_causal))
    if is_causal:
        return jnp.arange(q_len, dtype=jnp.int32), None
    return jnp.full(q_len, slots - 1, jnp.int32), None


def _seen_keys(mask: Any, weights_shape: tuple[int, ...], is_causal: bool) -> Any:
    """Whether row t sees key s, [..., Hq or 1, T or 1, S] bool: what the masks together say."""
    known = not isinstance(mask, jax.core.Tracer)
    mask = np.asarray(mask) if known else mask
    if not (mask.dtype == bool or jnp.issubdtype(mask.dtype, np.number)):
        raise TypeError(f"mask has dtype {mask.dtype}; it must be an array of bool or numbers.")
    rank, (q_len, slots) = len(weights_shape), weights_shape[-2:]
    shape = (1,) * (rank - mask.ndim) + mask.shape
    fits = len(shape) == rank and all(
        extent in (1, whole) for extent, whole in zip(shape, weights_shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"mask has shape {mask.shape}; it must be broadcastable to {weights_shape}, "
            "(batch..., Hq, T, S)."
        )
    xp = np if known else jnp
    mask = mask if mask.dtype == bool else mask != 0
    seen = xp.broadcast_to(mask.reshape(shape), (*shape[:-1], slots))
    if is_causal:
        seen = seen & (xp.arange(slots) <= xp.arange(q_len)[:, None])
    return seen


def _prefixes(seen: Any) -> tuple[Any, Any]:
    """Positions of rows that see what ``seen`` says, and where it is the prefix they stand for.

    Args:
      seen: ``[..., Hq or 1, T or 1, S]`` bool, of numpy where its values are known.

    Returns:
      positions ``[..., T or 1]`` int32, and None if all rows are known to be prefixes, or bool
      ``[..., T or 1, Hq or 1, 1]``, to go with the output.

    Raises:
      ValueError: Some row is known not to be one.
    """
    xp: ModuleType = np if isinstance(seen, np.ndarray) else jnp
    slots = seen.shape[-1]
    # Of all heads the most, so that a row that any head shows something is no row of padding,
    # whose gradient would be 0 and not NaN.
    count = seen.sum(axis=-1, dtype=np.int32).max(axis=-2)  # [..., T or 1]
    prefix = xp.arange(slots, dtype=np.int32) < count[..., None, :, None]
    right = (seen == prefix).all(axis=-1)  # [..., Hq or 1, T or 1]
    if xp is jnp:
        return count - 1, jnp.swapaxes(right, -1, -2)[..., None]
    if not right.all():
        at = tuple(int(i) for i in np.argwhere(~right)[0])
        raise ValueError(
            f"mask is not served: its row {at}, (batch..., head, query), shows keys "
            f"{_abbreviated(np.flatnonzero(seen[at]))}; each row must show the first so many keys, "
            f"here 0 .. {count[(*at[:-2], at[-1])] - 1}, in all heads alike. Put padding after the "
            "sequences, or use flax.nnx.dot_product_attention."
        )
    return count - 1, None


def _abbreviated(numbers: np.ndarray[Any, Any]) -> str:
    shown = ", ".join(str(number) for number in numbers[:8])
    return f"[{shown}{', ...' if len(numbers) > 8 else ''}]"


class GroupedQueryAttention(nnx.Module):
    """Causal grouped-query self-attention with rotary embedding, and a preallocated KV cache.

    Without a cache, a call takes whole sequences (training). :meth:`init_cache` makes one; from
    then on each call says at which slots its rows stand, enters them and attends to all up to
    there, so prompts go in whole or in chunks, and decoding is a chunk of one::

        block = GroupedQueryAttention(AttentionConfig(512, 8, 2, 64), rngs=nnx.Rngs(0))
        block.init_cache(slots=4096, batch=2)
        step = nnx.jit(lambda block, x, positions: block(x, positions), donate_argnums=0)
        y = step(block, x, positions)

    The cache lies in two ``nnx.Cache`` variables, so that ``nnx.split``, ``nnx.grad`` and the
    others tell it from the ``nnx.Param`` of the projections. With ``donate_argnums`` it is
    written in place.

    Attributes:
      q_proj, k_proj, v_proj: ``nnx.LinearGeneral``, features to heads, no bias.
      o_proj: ``nnx.LinearGeneral``, heads to features, no bias.
      cached_key, cached_value: ``nnx.Cache`` of ``[B, S, Hk, D]`` or ``[S, Hk, D]``, or None.
    """

    def __init__(
        self,
        config: AttentionConfig,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        """Makes the projections.

        Args:
          config: Sizes, and how to attend.
          dtype: What the block computes in, float32 or ``config.cache_dtype``; by default what x
            and the parameters have in common.
          param_dtype: Of the projections' parameters.
          rngs: ``rngs.params`` initialises them.
        """
        self.config = config
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}

        def to_heads(heads: int) -> Any:
            size = (heads, config.head_dim)
            return nnx.LinearGeneral(config.features, size, use_bias=False, rngs=rngs, **dtypes)

        self.q_proj = to_heads(config.q_heads)
        self.k_proj = to_heads(config.kv_heads)
        self.v_proj = to_heads(config.kv_heads)
        self.o_proj = nnx.LinearGeneral(
            (config.q_heads, config.head_dim),
            config.features,
            axis=(-2, -1),
            use_bias=False,
            rngs=rngs,
            **dtypes,
        )
        self.drop_cache()

    def init_cache(self, slots: int, batch: int | None = None) -> None:
        """Makes an empty cache: of ``batch`` sequences, or of one where x has no batch axis."""
        cache = gqa.empty_cache(self.config, slots, batch)
        self.cached_key, self.cached_value = nnx.Cache(cache.k), nnx.Cache(cache.v)

    def drop_cache(self) -> None:
        """Leaves the block without a cache, for whole sequences."""
        self.cached_key, self.cached_value = nnx.data(None), nnx.data(None)

    def __call__(self, x: jax.Array, positions: Any = None) -> jax.Array:
        """Attention of the rows of x.

        Args:
          x: ``[B, T, features]``, or ``[T, features]`` where the cache has no batch axis.
          positions: ``[B, T]`` or ``[T]``, integers: with a cache, the slot of each row; negative
            means padding. None without a cache: row t stands at t.

        Returns:
          Shape of x. Rows of padding are 0 and add nothing to any gradient, whatever they hold;
          rows at or past the cache's end are NaN.

        Raises:
          TypeError: The block computes in another dtype than float32 and the cache's, or positions
            are not integers.
          ValueError: Positions without a cache, a cache without positions, or shapes that do not
            fit.
        """
        gqa.check_rows(self.config, x, (2, 3))
        has_cache = self.cached_key is not None
        cache = gqa.KVCache(self.cached_key[...], self.cached_value[...]) if has_cache else None
        x = gqa.without_padding(x, positions, cache)
        qkv = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        out, cache = gqa.attend(self.config, qkv, positions, cache)
        if cache is not None:
            self.cached_key[...], self.cached_value[...] = cache
        return gqa.without_padding(self.o_proj(out), positions, cache)
