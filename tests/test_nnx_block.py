"""jax_fa.nnx's block, with flax itself: against the same block by hand and with nnx's attention."""

import functools
import os

import blocks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import assert_same_bits, assert_within

from jax_fa import gqa, native

if not os.environ.get("CI"):
    pytest.importorskip("flax", reason="needs the extra `flax`: pip install .[flax]")

from flax import nnx
from test_nnx import make_exact, rounding

from jax_fa.nnx import GroupedQueryAttention

B, T = blocks.B, blocks.T


def block_of(kernel, **changes):
    """A block whose first projections are exact (see blocks.coarse)."""
    block = GroupedQueryAttention(blocks.config(kernel, **changes), rngs=nnx.Rngs(0))
    make_exact(block.q_proj, block.k_proj, block.v_proj)
    return block


def kernels(block):
    return [p.kernel[...] for p in (block.q_proj, block.k_proj, block.v_proj, block.o_proj)]


@nnx.jit
def apply(block, x, positions=None):
    return block(x, positions)


@pytest.mark.parametrize("theta", [10_000.0, 500.0])
def test_block_is_what_it_says(kernel, theta):
    block, x = block_of(kernel, rope_theta=theta), blocks.rows()
    assert_within(apply(block, x), *blocks.by_hand(block.config, x, *kernels(block)))


@pytest.mark.parametrize("lengths", blocks.CHUNKS, ids=str)
def test_block_in_chunks_is_the_block(kernel, lengths):
    block, x = block_of(kernel), blocks.rows()
    block.init_cache(blocks.SLOTS, batch=B)
    got = blocks.in_chunks(functools.partial(apply, block), x, lengths)
    assert_within(got, *blocks.by_hand(block.config, x, *kernels(block)))
    assert (np.asarray(block.cached_key[...])[:, T:] == 0).all()


def test_block_without_batch_is_a_batch_of_one(kernel):
    block, x = block_of(kernel), blocks.rows()
    block.init_cache(blocks.SLOTS)
    got = block(x[0], jnp.arange(T))
    want, bound = blocks.by_hand(block.config, x, *kernels(block))
    assert_within(got, want[0], bound[0])


def test_block_calls_the_kernel(kernel):
    block = block_of(kernel)
    block.init_cache(blocks.SLOTS, batch=B)
    graph, state = nnx.split(block)
    arguments = (state, blocks.rows(), blocks.positions())
    lowered = jax.jit(lambda s, x, p: nnx.merge(graph, s)(x, p)).lower(*arguments)
    assert native.PREFILL_TARGET in lowered.as_text()


@pytest.mark.parametrize("cached", [False, True])
def test_block_has_the_gradients_of_nnx(kernel, cached):
    """Of every parameter, through a cache too, against nnx's own attention in the block's place."""
    block, x = block_of(kernel), blocks.rows()
    if cached:
        block.init_cache(blocks.SLOTS, batch=B)
    positions = blocks.positions() if cached else None
    got = nnx.grad(lambda block: jnp.sum(apply(block, x, positions) ** 2))(block)
    assert set(got) == {"q_proj", "k_proj", "v_proj", "o_proj"}

    def theirs(w_q, w_k, w_v, w_o):
        q, k, v = (jnp.einsum("btf,fhd->bthd", x, w) for w in (w_q, w_k, w_v))
        q, k = (gqa.rotate(a, blocks.positions(), 10_000.0) for a in (q, k))
        out = rounding(q, k, v, is_causal=True)
        return jnp.sum(jnp.einsum("bthd,hdf->btf", out, w_o) ** 2)

    want = jax.jit(jax.grad(theirs, (0, 1, 2, 3)))(*kernels(block))
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    blocks.assert_gradients_close([got[name]["kernel"][...] for name in names], want, jnp.float16)


def test_block_in_16_bits(kernel):
    """dtype=bfloat16 throughout: near the block in float32, by a few roundings of its inputs."""
    config, x = blocks.config(kernel, cache_dtype=jnp.bfloat16), blocks.rows()
    exact = GroupedQueryAttention(config, rngs=nnx.Rngs(0))
    rough = GroupedQueryAttention(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    got, want = rough(x.astype(jnp.bfloat16)), np.asarray(exact(x))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(got, np.float32), want, rtol=0, atol=8 * 2.0**-8 * np.abs(want).max()
    )


def test_block_and_its_cache(kernel):
    block, x = block_of(kernel), blocks.rows()
    block.init_cache(slots=blocks.SLOTS, batch=B)
    assert {type(block.cached_key), type(block.cached_value)} == {nnx.Cache}
    assert block.cached_key.shape == (B, blocks.SLOTS, 2, 64)
    with pytest.raises(ValueError, match="there is a cache and positions is None"):
        block(x)
    block.drop_cache()
    with pytest.raises(ValueError, match="there is no cache"):
        block(x, blocks.positions())
    assert jax.tree.leaves(nnx.state(block, nnx.Cache)) == []
    for wrong in (x[0, 0], x[None], x[..., :-1]):
        with pytest.raises(ValueError, match=r"x has shape \(.*; it must be \(T, .* or \(B, T,"):
            block(wrong)
    assert block(x[:, :0]).shape == (B, 0, x.shape[-1])


def test_block_donated_writes_its_cache_in_place(kernel):
    block = block_of(kernel)
    block.init_cache(blocks.SLOTS, batch=B)
    step = nnx.jit(lambda block, x, positions: block(x, positions), donate_argnums=0)
    before = block.cached_key[...].unsafe_buffer_pointer()
    step(block, blocks.rows(), blocks.positions())
    assert block.cached_key[...].unsafe_buffer_pointer() == before


def test_what_padding_holds_reaches_no_gradient(kernel):
    """NaN in the rows of x, and in the cotangents of their rows of y."""
    x, positions = blocks.rows(), blocks.positions().at[1, 3:].set(-1)
    real = (positions >= 0)[..., None]

    def gradients(junk):
        block = block_of(kernel)
        block.init_cache(blocks.SLOTS, batch=B)

        def loss(block, x):
            return jnp.sum(jnp.where(real, 1.0, junk) * block(x, positions) ** 2)

        return nnx.grad(loss, argnums=(0, 1))(block, jnp.where(real, x, junk))

    got, want = jax.tree.leaves(gradients(jnp.nan)), jax.tree.leaves(gradients(0.0))
    assert len(got) == len(want) == 5
    for g, w in zip(got, want, strict=True):
        assert_same_bits(g, w)
