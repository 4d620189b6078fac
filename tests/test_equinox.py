"""jax_fa.equinox with equinox itself: the block against its MultiheadAttention."""

import os

import blocks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import assert_same_bits, assert_within
from scripts import run_script

from jax_fa import gqa, native

if not os.environ.get("CI"):
    pytest.importorskip("equinox", reason="needs the extra `equinox`: pip install .[equinox]")

import equinox as eqx

from jax_fa.equinox import GroupedQueryAttention

B, T = blocks.B, blocks.T


def block_of(kernel):
    """A block whose first projections are exact (see blocks.coarse)."""
    block = GroupedQueryAttention(blocks.config(kernel), key=jax.random.key(0))
    weights = lambda b: (b.q_proj.weight, b.k_proj.weight, b.v_proj.weight)  # noqa: E731
    exact = [blocks.coarse(w.shape, seed + 5, 1 / 64) for seed, w in enumerate(weights(block))]
    return eqx.tree_at(weights, block, exact)


@eqx.filter_jit
def apply(block, x, cache=None, positions=None):
    return jax.vmap(block)(x, cache, positions)


def by_hand(block, x):
    to_heads = lambda p: p.weight.T.reshape(x.shape[-1], -1, 64)  # noqa: E731
    w_o = block.o_proj.weight.T.reshape(-1, 64, x.shape[-1])
    projections = map(to_heads, (block.q_proj, block.k_proj, block.v_proj))
    return blocks.by_hand(block.config, x, *projections, w_o)


def equinox_attention(block, x):
    """equinox.nn.MultiheadAttention and RotaryPositionalEmbedding, with the block's weights.

    It has no grouped queries: the kv heads' weights are repeated. Keys and values are rounded to
    the cache's dtype, as the block does it.
    """
    config = block.config
    rope = eqx.nn.RotaryPositionalEmbedding(config.head_dim, config.rope_theta)

    def process_heads(q, k, v):
        q, k = (jax.vmap(rope, in_axes=1, out_axes=1)(heads) for heads in (q, k))
        return q, *(heads.astype(config.cache_dtype).astype(q.dtype) for heads in (k, v))

    def repeated(weight):
        heads = weight.reshape(config.kv_heads, config.head_dim, config.features)
        return jnp.repeat(heads, config.q_heads // config.kv_heads, 0).reshape(-1, config.features)

    whole = eqx.nn.MultiheadAttention(
        config.q_heads,
        config.features,
        qk_size=config.head_dim,
        vo_size=config.head_dim,
        key=jax.random.key(1),
    )
    whole = eqx.tree_at(
        lambda m: [getattr(m, f"{n}_proj").weight for n in ("query", "key", "value", "output")],
        whole,
        [
            block.q_proj.weight,
            repeated(block.k_proj.weight),
            repeated(block.v_proj.weight),
            block.o_proj.weight,
        ],
    )
    mask = jnp.tril(jnp.ones((T, T), bool))
    return jax.vmap(lambda x: whole(x, x, x, mask=mask, process_heads=process_heads))(x)


def test_missing_library_names_the_extra():
    script = "import sys; sys.modules['equinox'] = None\ntry: import jax_fa.equinox\n"
    text = run_script(script + "except ImportError as error: print(error)")
    assert "jax_fa.equinox needs equinox" in text and "'.[equinox]'" in text


def test_rotation_is_that_of_equinox():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((T, 3, 64)), jnp.float32)
    rope = eqx.nn.RotaryPositionalEmbedding(64, 10_000.0)
    want = jax.vmap(rope, in_axes=1, out_axes=1)(x)
    np.testing.assert_allclose(gqa.rotate(x, jnp.arange(T), 10_000.0), want, rtol=0, atol=1e-5)


def test_block_is_what_it_says(kernel):
    """At one theta: equinox 0.13 keeps rotary tables by size alone, not by theta."""
    block, x = block_of(kernel), blocks.rows()
    y, cache = apply(block, x)
    assert cache is None
    want, bound = by_hand(block, x)
    assert_within(y, want, bound)
    assert_within(y, equinox_attention(block, x), 2 * bound)


@pytest.mark.parametrize("lengths", blocks.CHUNKS, ids=str)
def test_block_in_chunks_is_the_block(kernel, lengths):
    block, x = block_of(kernel), blocks.rows()
    cache = block.init_cache(blocks.SLOTS, batch=B)

    def step(chunk, positions):
        nonlocal cache
        y, cache = apply(block, chunk, cache, positions)
        return y

    assert_within(blocks.in_chunks(step, x, lengths), *by_hand(block, x))
    assert cache.k.shape == (B, blocks.SLOTS, 2, 64) and cache.k.dtype == jnp.float16
    assert (np.asarray(cache.k)[:, T:] == 0).all()


def test_block_takes_one_sequence(kernel):
    block, x = block_of(kernel), blocks.rows()
    y, cache = block(x[0], block.init_cache(blocks.SLOTS), jnp.arange(T))
    want, bound = by_hand(block, x)
    assert_within(y, want[0], bound[0])
    assert cache.v.shape == (blocks.SLOTS, 2, 64)


def test_a_batch_is_one_call_of_the_kernel(kernel):
    block = block_of(kernel)
    arrays = (blocks.rows(), block.init_cache(blocks.SLOTS, batch=B), blocks.positions())
    text = jax.jit(lambda *arrays: jax.vmap(block)(*arrays)).lower(*arrays).as_text()
    assert text.count(f"custom_call @{native.PREFILL_TARGET}") == 1


@pytest.mark.parametrize("cached", [False, True])
def test_block_has_the_gradients_of_equinox(kernel, cached):
    """Of every weight, through a cache too."""
    block, x = block_of(kernel), blocks.rows()
    arrays = (block.init_cache(blocks.SLOTS, batch=B), blocks.positions()) if cached else ()
    got = eqx.filter_grad(lambda block: jnp.sum(apply(block, x, *arrays)[0] ** 2))(block)
    want = eqx.filter_grad(lambda block: jnp.sum(equinox_attention(block, x) ** 2))(block)
    assert len(jax.tree.leaves(got)) == 4
    blocks.assert_gradients_close(got, want, jnp.float16)


def test_block_in_16_bits(kernel):
    """bfloat16 throughout: near the block in float32, by a few roundings of its inputs."""
    config, x = blocks.config(kernel, cache_dtype=jnp.bfloat16), blocks.rows()
    rough = GroupedQueryAttention(config, dtype=jnp.bfloat16, key=jax.random.key(0))
    exact = jax.tree.map(lambda w: w.astype(jnp.float32), rough)
    got, want = apply(rough, x.astype(jnp.bfloat16))[0], np.asarray(apply(exact, x)[0])
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(got, np.float32), want, rtol=0, atol=8 * 2.0**-8 * np.abs(want).max()
    )


def test_a_cache_and_positions_come_together(kernel):
    block, x = block_of(kernel), blocks.rows()[0]
    with pytest.raises(ValueError, match="there is a cache and positions is None"):
        block(x, block.init_cache(blocks.SLOTS))
    with pytest.raises(ValueError, match="there is no cache"):
        block(x, positions=jnp.arange(T))


def test_rows_of_other_shapes_are_refused_and_no_rows_served(kernel):
    block, x = block_of(kernel), blocks.rows()
    for wrong in (x, x[0, 0], x[0, :, :-1]):
        with pytest.raises(ValueError, match=r"x has shape \(.*; it must be \(T, "):
            block(wrong)
    out, cache = block(x[0, :0], block.init_cache(blocks.SLOTS), jnp.zeros(0, jnp.int32))
    assert out.shape == (0, x.shape[-1]) and (np.asarray(cache.k) == 0).all()


def test_block_donated_writes_its_cache_in_place(kernel):
    block = block_of(kernel)
    cache = block.init_cache(blocks.SLOTS, batch=B)
    step = eqx.filter_jit(lambda block, *rest: jax.vmap(block)(*rest), donate="all-except-first")
    before = cache.k.unsafe_buffer_pointer()
    _, after = step(block, blocks.rows(), cache, blocks.positions())
    assert cache.k.is_deleted() and after.k.unsafe_buffer_pointer() == before


def test_what_padding_holds_reaches_no_gradient(kernel):
    """NaN in the rows of x, and in the cotangents of their rows of y."""
    block, x, positions = block_of(kernel), blocks.rows(), blocks.positions().at[1, 3:].set(-1)
    real = (positions >= 0)[..., None]
    cache = block.init_cache(blocks.SLOTS, batch=B)

    def gradients(junk):
        def loss(operands):
            block, x = operands
            y, _ = jax.vmap(block)(x, cache, positions)
            return jnp.sum(jnp.where(real, 1.0, junk) * y**2)

        return eqx.filter_grad(loss)((block, jnp.where(real, x, junk)))

    got, want = jax.tree.leaves(gradients(jnp.nan)), jax.tree.leaves(gradients(0.0))
    assert len(got) == len(want) == 5
    for g, w in zip(got, want, strict=True):
        assert_same_bits(g, w)
