"""What the blocks share: rotary embedding, attention over a cache, and the rules."""

import blocks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import assert_same_bits

from jax_fa import gqa
from jax_fa.gqa import AttentionConfig


def qkv(tokens=blocks.T, seed=0, q_dtype=jnp.float32):
    """q, k, v, [B, T, H, D], not rotated."""
    rng = np.random.default_rng(seed)
    return tuple(
        jnp.asarray(rng.standard_normal((blocks.B, tokens, heads, 64)), dtype)
        for heads, dtype in ((4, q_dtype), (2, jnp.float32), (2, jnp.float32))
    )


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_rotation_is_that_of_complex_numbers(theta):
    """Pair i is one complex number, turned by position * theta^(-2i/D)."""
    x = np.random.default_rng(0).standard_normal((2, 5, 3, 8)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3, 4], [100, 7, 7, 4095, 30000]], np.int32)
    turn = np.exp(1j * positions[..., None, None] * theta ** (-np.arange(4) / 4))
    turned = (x[..., :4] + 1j * x[..., 4:]) * turn
    want = np.concatenate([turned.real, turned.imag], axis=-1)
    got = gqa.rotate(jnp.asarray(x), jnp.asarray(positions), theta)
    # The angle has a few roundings of 2^-24, relative to itself, and moves x by as much.
    allowed = (
        1e-6 + 8 * 2.0**-24 * positions[..., None, None] * np.linalg.norm(x, axis=-1)[..., None]
    )
    assert (np.abs(np.asarray(got) - want) <= allowed).all()
    assert_same_bits(got[0, 0], x[0, 0])  # position 0 turns nothing


@pytest.mark.parametrize("lengths", blocks.CHUNKS, ids=str)
def test_chunks_over_a_cache_equal_the_whole(kernel, lengths):
    """The cache holds NaN where nothing was written yet: nobody looks there."""
    config = blocks.config(kernel)
    q, k, v = qkv()
    whole, no_cache = gqa.attend(config, (q, k, v), None, None)
    assert no_cache is None
    cache = jax.tree.map(
        lambda x: x + jnp.nan, gqa.empty_cache(config, blocks.SLOTS, batch=blocks.B)
    )
    joined = jnp.concatenate([q, k, v], axis=2)

    def step(chunk, positions):
        nonlocal cache
        out, cache = gqa.attend(config, tuple(jnp.split(chunk, (4, 6), 2)), positions, cache)
        return out

    assert_same_bits(blocks.in_chunks(step, joined, lengths), whole)
    assert_same_bits(cache.v[:, : blocks.T], v.astype(cache.v.dtype))


def test_padding_is_zero_and_enters_no_cache(kernel):
    config = blocks.config(kernel)
    positions = blocks.positions().at[1, 3:].set(-1)
    empty = gqa.empty_cache(config, blocks.SLOTS, batch=blocks.B)
    out, cache = gqa.attend(config, qkv(), positions, empty)
    assert (np.asarray(out)[1, 3:] == 0).all() and (np.asarray(out)[1, :3] != 0).all()
    assert (np.asarray(cache.v)[1, 3:] == 0).all() and (np.asarray(cache.v)[1, :3] != 0).any()


def test_rows_past_the_end_of_the_cache_are_nan(kernel):
    config = blocks.config(kernel)
    small, fits = (gqa.empty_cache(config, slots, batch=blocks.B) for slots in (19, blocks.T))
    out, _ = gqa.attend(config, qkv(), blocks.positions(), small)
    want, _ = gqa.attend(config, qkv(), blocks.positions(), fits)
    assert np.isnan(np.asarray(out)[:, 19:]).all()
    assert_same_bits(out[:, :19], want[:, :19])


def test_a_cache_and_positions_come_together():
    config = blocks.config(None)
    cache = gqa.empty_cache(config, blocks.SLOTS, batch=blocks.B)
    with pytest.raises(ValueError, match="there is a cache and positions is None; pass the slot"):
        gqa.attend(config, qkv(), None, cache)
    with pytest.raises(ValueError, match="positions are given and there is no cache.*init_cache"):
        gqa.attend(config, qkv(), blocks.positions(), None)
    with pytest.raises(ValueError, match=r"positions has shape \[21\], k has \[2, 21, 2, 64\]"):
        gqa.attend(config, qkv(), jnp.arange(blocks.T), cache)


def test_another_dtype_than_float32_and_the_caches_is_refused():
    with pytest.raises(TypeError, match="in bfloat16, its cache is float16.*cache_dtype"):
        gqa.attend(blocks.config(None), qkv(q_dtype=jnp.bfloat16), None, None)


def test_implementation_reaches_the_attention():
    with pytest.raises(ValueError, match="implementation='fastest'"):
        gqa.attend(blocks.config("fastest"), qkv(), None, None)


BAD_CONFIGS = {
    "no_features": ({"features": 0}, ValueError, "features is 0; it must be a whole number"),
    "half_a_head": ({"kv_heads": 0.5}, ValueError, "kv_heads is 0.5; it must be a whole number"),
    "heads_4_over_3": ({"kv_heads": 3}, ValueError, "q_heads is 4, kv_heads is 3.*a multiple"),
    "odd_head_dim": ({"head_dim": 63}, ValueError, "head_dim is 63; it must be even"),
    "true_features": (
        {"features": True},
        ValueError,
        "features is True; it must be a whole",
    ),
    "theta_zero": (
        {"rope_theta": 0.0},
        ValueError,
        "rope_theta is 0.0; it must be a finite",
    ),
    "theta_tiny": ({"rope_theta": 1e-300}, ValueError, "rope_theta is 1e-300; .* at least 1"),
    "theta_none": ({"rope_theta": None}, ValueError, "rope_theta is None; it must be a finite"),
    "float32_cache": ({"cache_dtype": jnp.float32}, TypeError, "is float32.*float16 or bfloat16"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_sizes_are_refused_with_names(name):
    changes, kind, words = BAD_CONFIGS[name]
    with pytest.raises(kind, match=words):
        blocks.config(None, **changes)


def test_configs_compare_and_hash_by_value():
    """They are static: equal ones share a compilation."""
    one, other = AttentionConfig(8, 2, 1, 4), AttentionConfig(8, 2, 1, 4, cache_dtype="bfloat16")
    assert one == other and hash(one) == hash(other)
    third = AttentionConfig(np.int64(8), 2, 1, 4, rope_theta=10**4)
    assert third == one and hash(third) == hash(one)
