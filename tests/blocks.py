"""What the tests of the blocks share: sizes, data, and bounds that follow from bounds.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from bounds import output_bound

from jax_fa import gqa
from jax_fa.gqa import AttentionConfig

B, T, SLOTS, FEATURES = 2, 21, 40, 32
# What a prompt of T may be cut into; the last ones are decoding steps.
CHUNKS = [(T,), (8, 8, 5), (1, 13, 3, 1, 1, 1, 1)]


def config(kernel, **changes):
    sizes = {"features": FEATURES, "q_heads": 4, "kv_heads": 2, "head_dim": 64}
    options = {"cache_dtype": jnp.float16, "implementation": kernel}
    return AttentionConfig(**(sizes | options | changes))


def coarse(shape, seed, step):
    """Multiples of ``step``, 31 of them around 0: their products, and sums of 32, are exact.

    So projections have the same bits however they are computed, and in chunks of any size.
    """
    steps = np.random.default_rng(seed).integers(-15, 16, shape)
    return jnp.asarray(steps * step, jnp.float32)


def rows(seed=0):
    """x, [B, T, features]."""
    return coarse((B, T, FEATURES), seed, 1 / 8)


def positions():
    return jnp.broadcast_to(jnp.arange(T), (B, T))


def in_chunks(step, x, lengths):
    """``step(chunk, positions)`` over chunks of these lengths; the results joined."""
    outs, start = [], 0
    for length in lengths:
        where = jnp.broadcast_to(start + jnp.arange(length), (B, length))
        outs.append(step(x[:, start : start + length], where))
        start += length
    return jnp.concatenate(outs, axis=1)


def by_hand(settings, x, w_q, w_k, w_v, w_o):
    """The block by the reference, and how far it may be from it: two arrays [B, T, features].

    ``w_q [features, Hq, D]``, ``w_k`` and ``w_v [features, Hk, D]``, ``w_o [Hq, D, features]``.

    A key's last bit hangs on how the compiler fuses the rotation, so keys may be rounded otherwise
    here than there; the bound of a matrix-unit kernel, which rounds once more than any other, has
    room for it.
    """
    q, k, v = (jnp.einsum("btf,fhd->bthd", x, w) for w in (w_q, w_k, w_v))
    q, k = (gqa.rotate(a, positions(), settings.rope_theta) for a in (q, k))
    k, v = k.astype(settings.cache_dtype), v.astype(settings.cache_dtype)
    out = oracle.attend(q, k, v, positions())
    return project(out, output_bound("portable", q, k, v, positions()), w_o)


def project(out, bound, w_o):
    """The last projection, [Hq, D, features], of out and of its bound: two arrays [B, T, features].

    It is linear, and sums Hq * D products in float32.
    """
    out, w_o = np.asarray(out, np.float64), np.asarray(w_o, np.float64)
    sums = np.einsum("bthd,hdf->btf", np.abs(out), np.abs(w_o))
    terms = w_o.shape[0] * w_o.shape[1]
    y_bound = np.einsum("bthd,hdf->btf", bound, np.abs(w_o)) + terms * 2.0**-24 * sums
    return np.einsum("bthd,hdf->btf", out, w_o), y_bound


def assert_gradients_close(got, want, dtype):
    """Leaf by leaf, to each leaf's largest element: a few roundings of ``dtype``."""
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want) > 0
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        g, w = np.asarray(g, np.float32), np.asarray(w, np.float32)
        largest = np.abs(w).max()
        assert largest > 0
        np.testing.assert_allclose(g, w, rtol=0, atol=4 * float(jnp.finfo(dtype).eps) * largest)
