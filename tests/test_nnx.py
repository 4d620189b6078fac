"""jax_fa.nnx's attention function, with flax itself: alone and in its MultiHeadAttention."""

import functools
import os

import blocks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import assert_same_bits, assert_within, output_bound
from scripts import run_script

from jax_fa import native

if not os.environ.get("CI"):
    pytest.importorskip("flax", reason="needs the extra `flax`: pip install .[flax]")

from flax import nnx

from jax_fa.nnx import dot_product_attention

B, T = blocks.B, blocks.T
CAUSAL = np.tril(np.ones((T, T), bool))
FIRST = np.arange(T)[None] < np.array([[T], [13]])  # [B, T]: sequences of T and 13, then padding

# What both serve: (mask, is_causal).
MASKS = {
    "full": (None, False),
    "causal": (None, True),
    "make_causal_mask": (nnx.make_causal_mask(jnp.ones((B, T))), False),
    "per_head": (np.broadcast_to(CAUSAL, (B, 4, T, T)), False),
    "padded_keys": (FIRST[:, None, None, :], False),
    "padded_keys_causal": (np.broadcast_to(FIRST[:, None, None, :], (B, 1, T, T)), True),
    "combined": (nnx.combine_masks(FIRST[:, None, None, :], CAUSAL[None, None]), False),
    "prefix_lm": ((CAUSAL | (np.arange(T) < 5))[None, None], False),
    "shuffled_rows": (CAUSAL[np.random.default_rng(0).permutation(T)][None, None], False),
}
# What ours does not, and the first row (batch, head, query) that is to blame.
WRONG_MASKS = {
    "window": ((CAUSAL & ~np.tril(CAUSAL, -4))[None, None], r"\(0, 0, 4\)"),
    "padded_head": (np.arange(T)[None, None, None] >= 3, r"\(0, 0, 0\)"),
    "anticausal": (CAUSAL.T[None, None], r"\(0, 0, 1\)"),
    "heads_differ": (np.stack([CAUSAL, CAUSAL, CAUSAL, CAUSAL | True])[None], r"\(0, 0, 0\)"),
}


def arrays(seed=0, q_heads=4, kv_heads=2, batch=(B,), kv_len=T, dtype=np.float32):
    """query, key and value; key and value are float16 values."""
    rng = np.random.default_rng(seed)
    shapes = [(*batch, T, q_heads, 64), *[(*batch, kv_len, kv_heads, 64)] * 2]
    q, *kv = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    return q, *(rounded(x) for x in kv)


@pytest.fixture
def ours(kernel):
    return functools.partial(dot_product_attention, cache_dtype=jnp.float16, implementation=kernel)


def nnx_attention(*operands, **options):
    """nnx's own, in float32 also on a GPU, whose products are else of TF32."""
    with jax.default_matmul_precision("highest"):
        return nnx.dot_product_attention(*operands, **options)


def rounded(x):
    """To what a float16 cache holds."""
    return x.astype(jnp.float16).astype(x.dtype)


def rounding(query, key, value, **options):
    """nnx's own attention, after the rounding of keys and values that ours needs."""
    return nnx_attention(query, rounded(key), rounded(value), **options)


def apart(kernel, q, k, v, positions):
    """How far ours and nnx's float32 may be apart: each so far from the reference."""
    k, v = k.astype(jnp.float16), v.astype(jnp.float16)
    return sum(output_bound(name, q, k, v, positions) for name in (kernel, "naive"))


def test_import_of_jax_fa_brings_no_library():
    script = "import sys, jax_fa; print([n for n in ('flax', 'equinox') if n in sys.modules])"
    assert run_script(script).strip() == "[]"


def test_missing_library_names_the_extra():
    script = "import sys; sys.modules['flax'] = None\ntry: import jax_fa.nnx\n"
    text = run_script(script + "except ImportError as error: print(error)")
    assert "jax_fa.nnx needs flax" in text and "'.[flax]'" in text


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_numbers_are_those_of_nnx(ours, kernel, name, jitted):
    """Inside jit the mask is traced, outside its values are known."""
    mask, is_causal = MASKS[name]
    q, k, v = arrays()
    call = functools.partial(ours, is_causal=is_causal)
    got = (jax.jit(call) if jitted else call)(q, k, v, mask=mask)
    own_mask = None if mask is None else jnp.asarray(mask)
    want = nnx_attention(q, k, v, mask=own_mask, is_causal=is_causal)
    assert got.dtype == want.dtype == jnp.float32
    seen = CAUSAL if is_causal else np.ones((T, T), bool)
    seen = seen if mask is None else seen & (np.asarray(mask) != 0)[..., 0, :, :]  # of head 0
    positions = jnp.broadcast_to(jnp.asarray(seen.sum(-1) - 1, jnp.int32), (B, T))
    assert_within(got, want, apart(kernel, q, k, v, positions))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_16_bit_layers_need_no_option(kernel, dtype):
    """Against nnx's in float32 on the same values: its own 16-bit one rounds more than ours."""
    q, k, v = (x.astype(dtype) for x in arrays())
    got = dot_product_attention(q, k, v, is_causal=True, implementation=kernel)
    assert got.dtype == dtype
    want = nnx_attention(*(x.astype(jnp.float32) for x in (q, k, v)), is_causal=True)
    bound = output_bound(kernel, q, k, v, blocks.positions())
    bound += output_bound("naive", q.astype(jnp.float32), k, v, blocks.positions())
    assert_within(got, want, bound)


def test_dtype_promotes_as_in_nnx():
    q, k, v = arrays()
    got = dot_product_attention(q, k, v, dtype=jnp.bfloat16, is_causal=True)
    want = dot_product_attention(*(x.astype(jnp.bfloat16) for x in (q, k, v)), is_causal=True)
    assert_same_bits(got, want)


@pytest.mark.parametrize("batch", [(), (3, 2)], ids=str)
def test_any_number_of_batch_axes(ours, batch):
    q, k, v = arrays(batch=batch)
    got = ours(q, k, v, is_causal=True)
    flat = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    assert_same_bits(got, ours(*flat, is_causal=True).reshape(q.shape))


@pytest.mark.parametrize("kv_len", [T - 6, T + 9])
def test_other_keys_than_queries(ours, kernel, kv_len):
    """Cross attention; and causal as nnx has it, row t up to key t."""
    q, k, v = arrays(kv_len=kv_len)
    for is_causal in (False, True):
        positions = blocks.positions() if is_causal else jnp.full((B, T), kv_len)
        want = nnx_attention(q, k, v, is_causal=is_causal)
        got = ours(q, k, v, is_causal=is_causal)
        assert_within(got, want, apart(kernel, q, k, v, positions))


@pytest.mark.parametrize("name", WRONG_MASKS)
def test_masks_that_are_no_prefixes_are_refused_where_known(ours, name):
    mask, row = WRONG_MASKS[name]
    q, k, v = arrays()
    for known in (mask, jnp.asarray(mask, jnp.float32)):
        with pytest.raises(ValueError, match=rf"its row {row}, .* the first so many keys"):
            ours(q, k, v, mask=known)
        with pytest.raises(ValueError, match="mask is not served"):
            jax.jit(lambda q, mask=known: ours(q, k, v, mask=mask)).lower(q)  # a constant


@pytest.mark.parametrize("name", WRONG_MASKS)
def test_masks_that_are_no_prefixes_give_nan_in_jit(ours, name):
    """Row by row and head by head: the others are those of the prefixes they see."""
    mask, _ = WRONG_MASKS[name]
    q, k, v = arrays()
    got = np.asarray(jax.jit(lambda mask: ours(q, k, v, mask=mask))(mask))
    whole = np.broadcast_to(mask, (B, 4, T, T))
    count = whole.sum(-1).max(1)  # [B, T]
    right = (whole == (np.arange(T) < count[:, None, :, None])).all(-1).swapaxes(1, 2)  # [B, T, H]
    assert not right.all()
    assert np.isnan(got[~right]).all()
    prefixes = (np.arange(T) < count[..., None])[:, None]
    assert_same_bits(got[right], np.asarray(ours(q, k, v, mask=prefixes))[right])


def test_gradients_of_a_refused_mask_are_nan(ours):
    mask, _ = WRONG_MASKS["window"]
    q, k, v = arrays()
    loss = jax.jit(lambda q, k, v, mask: jnp.sum(ours(q, k, v, mask=mask) ** 2))
    d_q, d_k, _ = jax.grad(loss, (0, 1, 2))(q, k, v, mask)
    assert np.isnan(np.asarray(d_q)[:, 4:]).all() and np.isfinite(np.asarray(d_q)[:, :4]).all()
    assert np.isnan(np.asarray(d_k)).any()


def test_rows_whose_mask_shows_nothing_are_zero(ours):
    mask = (CAUSAL & (np.arange(T)[:, None] != 4))[None, None]
    q, k, v = arrays()
    for call in (ours, jax.jit(ours)):
        got = np.asarray(call(q, k, v, mask=mask))
        assert (got[:, 4] == 0).all() and (got[:, 5] != 0).all()


REFUSED = {
    "dropout": ({"dropout_rate": 0.1}, "dropout_rate is 0.1.*deterministic=True"),
    "bias": ({"bias": jnp.zeros((1, 1, T, T))}, "bias is given.*mask="),
    "weights": ({"module": object()}, "module is a object.*sow_weights=False"),
    "mask_shape": ({"mask": np.ones((T, 5))}, r"mask has shape \(21, 5\).*\(2, 4, 21, 21\)"),
    "mask_axes": ({"mask": np.ones((1, 1, 1, T, T))}, "mask has shape.*broadcastable"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_with_a_way_out(ours, name):
    options, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        ours(*arrays(), **options)


def test_dtypes_and_shapes_are_refused_with_a_way_out(ours):
    q, k, v = arrays()
    with pytest.raises(TypeError, match=r"key and value have dtype float32.*cache_dtype=jnp"):
        dot_product_attention(q, k, v)
    with pytest.raises(TypeError, match="cache_dtype is float32; it must be float16 or bfloat16"):
        dot_product_attention(q, k, v, cache_dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"query has shape \(2, 21, 4, 64\), key \(1, "):
        ours(q, k[:1], v[:1])
    for mask in ("x", object(), np.array([None] * T)):
        with pytest.raises(TypeError, match="mask has dtype .*; it must be an array of bool or"):
            ours(q, k, v, mask=mask)
    with pytest.raises(TypeError, match="is_causal is 1; it must be True or False"):
        ours(q, k, v, is_causal=1)


def test_implementation_reaches_the_attention():
    with pytest.raises(ValueError, match="implementation='fastest'"):
        dot_product_attention(*arrays(), cache_dtype=jnp.float16, implementation="fastest")


def layer(attention_fn, **options):
    """The same parameters for every attention_fn; projections are exact (see blocks.coarse)."""
    model = nnx.MultiHeadAttention(
        num_heads=4,
        in_features=blocks.FEATURES,
        qkv_features=256,
        num_kv_heads=2,
        attention_fn=attention_fn,
        rngs=nnx.Rngs(0),
        **({"decode": False, "use_bias": False} | options),
    )
    make_exact(model.query, model.key, model.value)
    return model


def make_exact(*projections):
    for seed, projection in enumerate(projections):
        projection.kernel[...] = blocks.coarse(projection.kernel.shape, seed + 5, 1 / 64)


@nnx.jit
def apply_causal(model, x):
    return model(x, is_causal=True)


def test_layer_is_that_of_nnx(ours, kernel):
    model, x = layer(ours), blocks.rows()
    q, k, v = model.query(x), rounded(model.key(x)), rounded(model.value(x))
    _, bound = blocks.project(
        nnx_attention(q, k, v, is_causal=True),
        apart(kernel, q, k, v, blocks.positions()),
        model.out.kernel[...],
    )
    assert_within(apply_causal(model, x), layer(rounding)(x, is_causal=True), 2 * bound)


def test_layer_calls_the_kernel(ours):
    graph, state = nnx.split(layer(ours))
    lowered = jax.jit(lambda s, x: nnx.merge(graph, s)(x, is_causal=True)).lower(
        state, blocks.rows()
    )
    assert native.PREFILL_TARGET in lowered.as_text()


def test_layer_has_the_gradients_of_nnx(ours):
    def gradients(attention_fn):
        loss = lambda model: jnp.sum(apply_causal(model, blocks.rows()) ** 2)  # noqa: E731
        return nnx.grad(loss)(layer(attention_fn))

    blocks.assert_gradients_close(gradients(ours), gradients(rounding), jnp.float16)


def test_layer_decodes_to_what_it_prefills(ours):
    """decode=True: nnx writes the cache, and says by a mask how far it is filled."""
    model, x = layer(ours), blocks.rows()
    whole = apply_causal(model, x)
    out = ours(model.query(x), model.key(x), model.value(x), is_causal=True)
    model.set_attributes(decode=True)
    model.init_cache((B, T + 4, blocks.FEATURES))
    steps = [apply_one(model, x[:, t : t + 1]) for t in range(T)]
    # The attention's own rows have the same bits; the last projection sums in another order.
    _, bound = blocks.project(out, np.zeros(out.shape), model.out.kernel[...])
    assert_within(jnp.concatenate(steps, axis=1), whole, 2 * bound)


@nnx.jit
def apply_one(model, x):
    return model(x)


def test_layer_refuses_dropout_only_while_it_drops(ours):
    model = layer(ours, dropout_rate=0.5)
    with pytest.raises(ValueError, match=r"dropout_rate is 0\.5"):
        model(blocks.rows(), is_causal=True, deterministic=False)
    got = model(blocks.rows(), is_causal=True, deterministic=True)
    assert_same_bits(got, layer(ours)(blocks.rows(), is_causal=True))
    with pytest.raises(ValueError, match="module is a MultiHeadAttention"):
        layer(ours)(blocks.rows(), is_causal=True, sow_weights=True)


@pytest.mark.parametrize("jitted", [False, True])
def test_masks_promote_no_dtype(ours, jitted):
    q, k, v = (jnp.ones((B, T, 2, 8), dtype) for dtype in (jnp.float32, jnp.float16, jnp.float16))

    def call(mask):
        return ours(q, k.astype(q.dtype), v.astype(q.dtype), mask=mask, is_causal=True)

    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        got = (jax.jit(call) if jitted else call)(CAUSAL)
    assert (np.asarray(got) == 1).all()
