"""A llama-style decoder in plain JAX: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

`step` is the only thing that runs: it writes the new tokens' keys and values into the cache and
attends to it. Where each token stands is data (`positions`), so one compiled step of a given number
of rows serves the first chunk of a prompt, its last and partly padded one, and everything between.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jax_fa

# (q [T, Hq, D], k [S, Hk, D], v [S, Hk, D], positions [T]) -> out [T, Hq, D]
Attention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
# One (k, v) pair per layer, each [S, Hk, D] float16. Separate arrays, so that every one of them can
# be donated and updated in place, and attention reads it without a slice being cut out first.
Cache = tuple[tuple[jax.Array, jax.Array], ...]


class Config(NamedTuple):
    """Hyper-parameters, named as in the GGUF metadata's meaning."""

    layers: int
    model_dim: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    norm_epsilon: float
    context_length: int


class Layer(NamedTuple):
    """Weights of one decoder layer; every matrix is stored [out, in]."""

    attn_norm: jax.Array
    wq: jax.Array
    wk: jax.Array
    wv: jax.Array
    wo: jax.Array
    ffn_norm: jax.Array
    w_gate: jax.Array
    w_up: jax.Array
    w_down: jax.Array


class Weights(NamedTuple):
    """All weights; `unembedding` is the embedding itself where the two are tied."""

    embedding: jax.Array  # [vocab, model_dim]
    layers: tuple[Layer, ...]
    final_norm: jax.Array
    unembedding: jax.Array  # [vocab, model_dim]


def empty_cache(config: Config, kv_len: int) -> Cache:
    """A cache of `kv_len` slots per layer."""
    shape = (kv_len, config.kv_heads, config.head_dim)
    return tuple(
        (jnp.zeros(shape, jnp.float16), jnp.zeros(shape, jnp.float16)) for _ in range(config.layers)
    )


@partial(jax.jit, static_argnames=("config", "attention"), donate_argnames="cache")
def step(
    weights: Weights,
    cache: Cache,
    tokens: jax.Array,
    positions: jax.Array,
    rows: jax.Array,
    *,
    config: Config,
    attention: Attention,
) -> tuple[jax.Array, Cache]:
    """Feeds a block of tokens through the model.

    Args:
        cache: donated; its slots before these tokens hold the sequence so far.
        tokens: [T] int32.
        positions: [T] int32, slot of each token in the sequence; -1 marks padding.
        rows: [R] int32, the rows whose logits are wanted (the vocabulary is too wide to do all).
        attention: which attention to run; a new callable compiles a new step.

    Returns:
        logits [R, vocab] float32 and the updated cache.
    """
    x = weights.embedding[tokens]  # [T, model_dim]
    # Depth is unrolled on purpose. A scan over stacked layers compiles faster (0.6 s against 1.9 s)
    # but cuts each layer's weights and cache out of the stack at every step, which doubles the time
    # of a decoding step (30-40 ms to 60-100 ms; 2 Zen 3 cores, jax 0.10.2, 2026-11-30).
    updated = []
    for layer, (k_cache, v_cache) in zip(weights.layers, cache, strict=True):
        q, k, v = _project(layer, x, positions, config)
        k_cache, v_cache = jax_fa.update_kv_cache(k_cache, v_cache, k, v, positions)
        attended = attention(q, k_cache, v_cache, positions)  # [T, Hq, D]
        x = x + attended.reshape(x.shape[0], -1) @ layer.wo.T
        x = x + _feed_forward(layer, x, config)
        updated.append((k_cache, v_cache))
    hidden = _rms_norm(x[rows], weights.final_norm, config.norm_epsilon)
    return hidden @ weights.unembedding.T, tuple(updated)


def _project(
    layer: Layer, x: jax.Array, positions: jax.Array, config: Config
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [T, Hq, D], k and v [T, Hk, D], the rotary embedding applied to q and k."""
    normed = _rms_norm(x, layer.attn_norm, config.norm_epsilon)
    q, k, v = (
        (normed @ matrix.T).reshape(x.shape[0], heads, config.head_dim)
        for matrix, heads in (
            (layer.wq, config.q_heads),
            (layer.wk, config.kv_heads),
            (layer.wv, config.kv_heads),
        )
    )
    return _rotate(q, positions, config.rope_theta), _rotate(k, positions, config.rope_theta), v


def _feed_forward(layer: Layer, x: jax.Array, config: Config) -> jax.Array:
    normed = _rms_norm(x, layer.ffn_norm, config.norm_epsilon)
    return (jax.nn.silu(normed @ layer.w_gate.T) * (normed @ layer.w_up.T)) @ layer.w_down.T


def _rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight


def _rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary embedding over interleaved pairs (2i, 2i+1) of the last axis.

    GGUF stores the q and k rows of llama models permuted for interleaved pairs; the halves (i,
    i + D/2) of the original checkpoints would need the rows put back.
    """
    head_dim = x.shape[-1]
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = positions.astype(jnp.float32)[:, None, None] * frequency  # [T, 1, D/2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    even, odd = x[..., 0::2], x[..., 1::2]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)
