"""vmap: every pattern of mapped operands, one launch, no copy of a shared cache."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import assert_same_bits
from cases import Case

from jax_fa import prefill_attention

SIZE = 3
PATTERNS = [axes for axes in itertools.product((0, None), repeat=4) if axes != (None,) * 4]


def stacked(axes, at=0):
    """Operands of which those with an axis hold SIZE different elements."""
    shape = {"batch": 2, "q_len": 5, "kv_len": 20, "q_heads": 6, "kv_heads": 2}
    elements = [Case(f"vmap_{i}", **shape, placement="anywhere").arrays() for i in range(SIZE)]
    return [
        elements[0][n] if axis is None else jnp.stack([e[n] for e in elements], at)
        for n, axis in enumerate(axes)
    ]


@pytest.mark.parametrize("axes", PATTERNS, ids=str)
def test_vmap_gives_the_bits_of_a_loop(axes):
    arrays = stacked(axes)
    got = jax.vmap(lambda *a: prefill_attention(*a, return_lse=True), in_axes=axes)(*arrays)
    for i in range(SIZE):
        one = [x if axis is None else x[i] for x, axis in zip(arrays, axes, strict=True)]
        for a, b in zip(got, prefill_attention(*one, return_lse=True), strict=True):
            assert_same_bits(a[i], b)


def test_other_in_and_out_axes():
    arrays = stacked((0, 0, 0, 0), at=1)
    got = jax.vmap(prefill_attention, in_axes=1, out_axes=2)(*arrays)
    for i in range(SIZE):
        assert_same_bits(got[:, :, i], prefill_attention(*(x[:, i] for x in arrays)))


def test_nested_vmap_over_queries_and_caches():
    q, k, v, positions = stacked((0, 0, 0, 0))
    queries = jnp.stack([q, q * 2])  # [2, SIZE, B, T, Hq, D]
    over_caches = jax.vmap(prefill_attention)
    got = jax.vmap(over_caches, in_axes=(0, None, None, None))(queries, k, v, positions)
    for n, i in itertools.product(range(2), range(SIZE)):
        assert_same_bits(got[n, i], prefill_attention(queries[n, i], k[i], v[i], positions[i]))


def test_unbatched_operands_under_vmap():
    q, k, v, positions = Case("unbatched", batch=4, q_len=9, n_past=3).arrays()
    assert_same_bits(
        jax.vmap(prefill_attention)(q, k, v, positions), prefill_attention(q, k, v, positions)
    )


@pytest.mark.parametrize("size", [0, 1])
def test_vmap_over_no_and_over_one_element(size):
    q, k, v, positions = Case("few", q_len=3, kv_len=9).arrays()
    got = jax.vmap(prefill_attention, in_axes=(0, None, None, None))(
        jnp.broadcast_to(q, (size, *q.shape)), k, v, positions
    )
    assert got.shape == (size, *q.shape)


def compiled_text_and_temporaries(function, *shapes):
    compiled = jax.jit(function).lower(*shapes).compile()
    return compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes


def test_a_shared_cache_is_neither_copied_nor_looped_over():
    cache = jax.ShapeDtypeStruct((1, 8192, 2, 64), jnp.float16)
    cache_bytes = 8192 * 2 * 64 * 2
    text, temporaries = compiled_text_and_temporaries(
        jax.vmap(prefill_attention, in_axes=(0, None, None, 0)),
        jax.ShapeDtypeStruct((64, 1, 1, 4, 64), jnp.float32),
        cache,
        cache,
        jax.ShapeDtypeStruct((64, 1, 1), jnp.int32),
    )
    assert temporaries < cache_bytes
    assert text.count("jax_fa_prefill_attention_v2") == 1 and " while(" not in text


def test_vmap_inside_jit_and_scan():
    q, k, v, positions = stacked((0, None, None, 0))

    @jax.jit
    def run(q, positions):
        def step(carry, _):
            return carry, jax.vmap(prefill_attention, (0, None, None, 0))(q, k, v, positions)

        return jax.lax.scan(step, 0, None, length=2)[1]

    want = np.asarray(jax.vmap(prefill_attention, (0, None, None, 0))(q, k, v, positions))
    for got in run(q, positions):
        assert_same_bits(got, want)
