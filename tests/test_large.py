"""Arrays of more than 2^31 elements: offsets must be 64-bit (C8)."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from bounds import assert_within, output_bound

pytestmark = [
    pytest.mark.large,
    pytest.mark.skipif(
        jax.default_backend() == "cpu",
        reason="needs a GPU with 40 GiB: arrays of 2^31 elements take minutes on a CPU",
    ),
]


def normal(seed, shape, dtype):
    return jax.jit(lambda key: jax.random.normal(key, shape, dtype))(jax.random.key(seed))


def test_a_cache_of_more_than_2_31_elements(attention, kernel):
    """The rows see slots on both sides of element 2^31, in the first and in the last head."""
    slots, kv_heads, head_dim = 262_144 + 200, 64, 128
    q = normal(0, (1, 3, kv_heads, head_dim), jnp.float16)
    k = normal(1, (1, slots, kv_heads, head_dim), jnp.float16)
    v = normal(2, (1, slots, kv_heads, head_dim), jnp.float16)
    # The last slot decides: its key is the query itself, five times over.
    k = jax.jit(lambda k: k.at[:, -1].set(q[:, 1] * 5), donate_argnums=0)(k)
    positions = jnp.asarray([[slots - 2, slots - 1, 5]])
    out = attention(q, k, v, positions)
    for head in (0, kv_heads - 1):
        part = [x[:, :, head : head + 1] for x in (q, k, v)]
        want = oracle.attend(*part, positions)
        bound = output_bound(kernel, *part, positions)
        assert_within(out[:, :, head : head + 1], want, bound, f"head {head}")
    np.testing.assert_allclose(
        np.asarray(out[0, 1], np.float32), np.asarray(v[0, -1], np.float32), atol=1e-2
    )


def test_queries_of_more_than_2_31_elements(attention, kernel):
    tokens, q_heads, head_dim = 131_072 + 70, 128, 128
    q = normal(3, (1, tokens, q_heads, head_dim), jnp.float16)
    k, v = (normal(seed, (1, 40, 16, head_dim), jnp.float16) for seed in (4, 5))
    positions = (jnp.arange(tokens) % 40)[None]
    out, lse = attention(q, k, v, positions, return_lse=True)
    assert np.isfinite(np.asarray(lse[0, -100:])).all()
    for rows in (slice(0, 80), slice(tokens - 80, tokens)):
        part = q[:, rows]
        want = oracle.attend(part, k, v, positions[:, rows])
        bound = output_bound(kernel, part, k, v, positions[:, rows])
        assert_within(out[:, rows], want, bound, f"rows {rows}")
