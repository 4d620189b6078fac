"""update_kv_cache: what lands where, what is dropped, what is copied (nothing)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from bounds import assert_same_bits
from jax.experimental import checkify

from jax_fa import kv_cache, prefill_attention, update_kv_cache


def make(
    batch=2, slots=12, tokens=5, heads=2, head_dim=8, dtype=jnp.float16, new_dtype=jnp.float32
):
    rng = np.random.default_rng(11)
    caches = [
        jnp.asarray(rng.standard_normal((batch, slots, heads, head_dim)), dtype) for _ in "kv"
    ]
    rows = [
        jnp.asarray(rng.standard_normal((batch, tokens, heads, head_dim)), new_dtype) for _ in "kv"
    ]
    return caches, rows


def by_loop(cache, rows, positions):
    cache, positions = np.array(cache), np.asarray(positions)
    for b, t in np.ndindex(positions.shape):
        if 0 <= positions[b, t] < cache.shape[1]:
            cache[b, positions[b, t]] = np.asarray(rows[b, t].astype(cache.dtype))
    return cache


POSITIONS = {
    "growing": [[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]],
    "dropped": [[-1, 11, 12, 2**31 - 1, -(2**31)], [13, -5, 0, 100, 3]],
    "repeated": [[3, 3, 3, 1, 1], [5, 2, 5, 2, 5]],
    "shuffled": [[9, 0, 4, 7, 2], [1, 11, 0, 5, 3]],
}


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("new_dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_rows_land_as_in_a_loop(name, dtype, new_dtype):
    caches, rows = make(dtype=dtype, new_dtype=new_dtype)
    positions = jnp.asarray(POSITIONS[name], jnp.int32)
    for update in (update_kv_cache, jax.jit(update_kv_cache)):
        got = update(*caches, *rows, positions)
        for new, cache, row in zip(got, caches, rows, strict=True):
            assert new.dtype == dtype
            assert_same_bits(new, by_loop(cache, row, positions))


def test_unbatched_is_a_batch_of_one():
    caches, rows = make(batch=1)
    positions = jnp.asarray(POSITIONS["repeated"][:1], jnp.int32)
    batched = update_kv_cache(*caches, *rows, positions)
    flat = update_kv_cache(*(x[0] for x in caches), *(x[0] for x in rows), positions[0])
    for a, b in zip(batched, flat, strict=True):
        assert_same_bits(a[0], b)


def test_nan_bits_of_untouched_slots_survive():
    (k, v), rows = make()
    payload = jax.lax.bitcast_convert_type(jnp.full(k.shape, 0x7E5A, jnp.uint16), jnp.float16)
    new_k, _ = update_kv_cache(payload, v, *rows, jnp.full((2, 5), -1, jnp.int32))
    assert_same_bits(new_k, payload)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_donated_caches_are_updated_in_place(dtype):
    """One jitted step of update and attention: no temporary of the caches' size."""
    if dtype == jnp.bfloat16 and jax.default_backend() == "cpu" and jax.__version_info__ < (0, 11):
        pytest.skip("jaxlib 0.10 widens a bfloat16 scatter on CPUs; jax 0.11 or a GPU runs this")
    slots = 4096

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(k_cache, v_cache, k, v, q, positions):
        k_cache, v_cache = update_kv_cache(k_cache, v_cache, k, v, positions)
        return k_cache, v_cache, prefill_attention(q, k_cache, v_cache, positions)

    (k_cache, v_cache), rows = make(slots=slots, heads=2, head_dim=64, dtype=dtype)
    q = jnp.ones((2, 5, 4, 64), jnp.float32)
    positions = jnp.asarray([[0, 1, 2, 3, 4], [9, -1, 10, 11, slots]], jnp.int32)
    arguments = (k_cache, v_cache, *rows, q, positions)
    compiled = step.lower(*arguments).compile()
    cache_bytes = k_cache.size * k_cache.dtype.itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < cache_bytes / 8
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * cache_bytes

    # Of copies: while numpy looks at a buffer, it is not given away.
    want_k = by_loop(jnp.copy(k_cache), rows[0], positions)
    want_v = by_loop(jnp.copy(v_cache), rows[1], positions)
    pointer = k_cache.unsafe_buffer_pointer()
    new_k, new_v, out = step(*arguments)
    assert k_cache.is_deleted() and new_k.unsafe_buffer_pointer() == pointer
    assert_same_bits(new_k, want_k)
    assert_same_bits(new_v, want_v)
    want = oracle.attend(q, new_k, new_v, positions)
    np.testing.assert_allclose(np.asarray(out), np.asarray(want), atol=2e-2)


def test_the_callers_cache_is_left_alone_without_donation():
    caches, rows = make()
    before = [np.array(x) for x in caches]
    update_kv_cache(*caches, *rows, jnp.asarray(POSITIONS["growing"], jnp.int32))
    for cache, old in zip(caches, before, strict=True):
        assert_same_bits(cache, old)


def test_bad_arguments_are_refused_with_names():
    (k_cache, v_cache), (k, v) = make()
    positions = jnp.asarray(POSITIONS["growing"], jnp.int32)
    with pytest.raises(TypeError, match="k_cache has dtype float32"):
        update_kv_cache(k_cache.astype(jnp.float32), v_cache, k, v, positions)
    with pytest.raises(TypeError, match="v has dtype int32"):
        update_kv_cache(k_cache, v_cache, k, v.astype(jnp.int32), positions)
    with pytest.raises(TypeError, match="positions has dtype float32"):
        update_kv_cache(k_cache, v_cache, k, v, positions.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"k_cache has shape .* v_cache has"):
        update_kv_cache(k_cache, v_cache[:, :5], k, v, positions)
    with pytest.raises(ValueError, match=r"k has shape .* v has"):
        update_kv_cache(k_cache, v_cache, k, v[:, :3], positions)
    with pytest.raises(ValueError, match=r"k has shape .* k_cache has"):
        update_kv_cache(k_cache, v_cache, k[..., :4], v[..., :4], positions)
    with pytest.raises(ValueError, match=r"positions has shape \[2, 4\], k has"):
        update_kv_cache(k_cache, v_cache, k, v, positions[:, :4])


def test_no_slots_and_no_rows_are_served():
    (k_cache, v_cache), (k, v) = make()
    positions = jnp.asarray(POSITIONS["growing"], jnp.int32)
    empty = update_kv_cache(k_cache[:, :0], v_cache[:, :0], k, v, positions)
    assert empty[0].shape == (2, 0, 2, 8)
    same = update_kv_cache(k_cache, v_cache, k[:, :0], v[:, :0], positions[:, :0])
    assert_same_bits(same[0], k_cache)


@pytest.mark.parametrize("position", [0, 11, 12, -1])
def test_one_row_lands_or_is_dropped(position):
    caches, rows = make(tokens=1)
    positions = jnp.full((2, 1), position)
    for new, cache, row in zip(
        update_kv_cache(*caches, *rows, positions), caches, rows, strict=True
    ):
        assert_same_bits(new, by_loop(cache, row, positions))


def test_positions_beyond_int32_are_dropped(wide_array):
    (k_cache, v_cache), (k, v) = make(tokens=2)
    far = wide_array([[2**32, -(2**63)], [2**63 - 1, -(2**32) + 1]])
    new_k, new_v = update_kv_cache(k_cache, v_cache, k, v, far)
    assert_same_bits(new_k, k_cache)
    assert_same_bits(new_v, v_cache)


def test_dropped_rows_stand_before_the_cache_however_long_it_is():
    """Past its end, the indices of a cache near 2^31 slots would wrap, and displace other rows."""
    positions = jnp.full(8300, -1, jnp.int32).at[:3].set(jnp.asarray([0, 7, 12]))
    slot = np.asarray(kv_cache._slots_to_write(positions, 12))
    assert slot[:2].tolist() == [0, 7]
    assert (slot[2:] < 0).all() and len(set(slot.tolist())) == len(slot)


@pytest.mark.parametrize("change", [lambda f: f, jax.jit, jax.vmap], ids=["eager", "jit", "vmap"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_index_checks_raise_no_alarm_for_dropped_rows(tokens, change):
    caches, rows = make(tokens=tokens)
    positions = jnp.asarray(POSITIONS["dropped"], jnp.int32)[:, -tokens:]
    checked = checkify.checkify(change(update_kv_cache), errors=checkify.index_checks)
    error, got = checked(*caches, *rows, positions)
    error.throw()
    assert_same_bits(got[0], by_loop(caches[0], rows[0], positions))


def test_index_checks_raise_no_alarm_for_one_row_of_one_sequence():
    (k_cache, v_cache), (k, v) = make(batch=1, tokens=1)
    checked = checkify.checkify(update_kv_cache, errors=checkify.index_checks)
    error, _ = checked(k_cache[0], v_cache[0], k[0], v[0], jnp.asarray([3]))
    error.throw()


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("layer", [None, 1])
def test_an_eager_update_moves_nothing_to_the_device(tokens, layer):
    caches, rows = make(tokens=tokens)
    options = {}
    if layer is not None:
        caches = [jnp.stack([x, x]) for x in caches]
        options = {"layer": jnp.int32(layer)}
    positions = jnp.asarray(POSITIONS["dropped"], jnp.int32)[:, :tokens]
    with jax.transfer_guard("disallow"):
        update_kv_cache(*caches, *rows, positions, **options)


def in_dense_algebra(cache, rows, positions):
    """The update as a sum of products with one-hot rows; the last row that names a slot wins."""
    named = positions[:, None, :] == jnp.arange(cache.shape[1])[:, None]  # [B, S, T]
    later = jnp.cumsum(named[..., ::-1], axis=-1)[..., ::-1] - named
    wins = (named & (later == 0)).astype(jnp.float32)
    kept = cache.astype(jnp.float32) * (1 - wins.sum(axis=-1))[..., None, None]
    return kept + jnp.einsum("bst,bthd->bshd", wins, rows, precision="highest")


@pytest.mark.parametrize("name", POSITIONS)
def test_derivatives_are_those_of_dense_algebra(name):
    """Forwards and backwards: of rows that are kept, rows that are not, and untouched slots."""
    caches, rows = make()
    positions = jnp.asarray(POSITIONS[name], jnp.int32)
    weights = jnp.arange(1.0, 1 + caches[0].size).reshape(caches[0].shape) / caches[0].size

    def loss(k_cache, k):
        new_k, _ = update_kv_cache(k_cache, caches[1], k, rows[1], positions)
        return jnp.sum(weights * new_k.astype(jnp.float32))

    def by_hand(k_cache, k):
        return jnp.sum(weights * in_dense_algebra(k_cache, k, positions))

    got, want = (jax.grad(f, (0, 1))(caches[0], rows[0]) for f in (loss, by_hand))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(
            np.asarray(g, np.float32), np.asarray(w, np.float32), rtol=2**-9, atol=0
        )
    tangents = (jnp.ones_like(caches[0]), jnp.ones_like(rows[0]))
    primals = (caches[0], rows[0])
    (_, got), (_, want) = (jax.jvp(f, primals, tangents) for f in (loss, by_hand))
    np.testing.assert_allclose(float(got), float(want), rtol=1e-5)
