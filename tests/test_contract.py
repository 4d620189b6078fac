"""The contract, clause by clause (docs/contract.md), for every kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from bounds import assert_same_bits, assert_within, output_bound
from cases import BY_NAME, Case

from jax_fa import merge_states

DTYPES = [("float32", "float16"), ("float16", "float16"), ("bfloat16", "bfloat16")]


def arrays(**fields):
    return Case(fields.pop("name", "contract"), **fields).arrays()


# C1: a row sees exactly the slots up to its position, clamped to the cache.


def test_c1_each_row_sees_exactly_its_slots(attention):
    """Values are one-hot in the slot, scores all equal: the output spells out the set seen."""
    slots = 70
    positions = np.array([[0, 1, 5, 62, 63, 64, 65, 69, 70, 1000, 2**31 - 1, -1, -(2**31)]])
    q = jnp.zeros((1, positions.shape[1], 1, 128), jnp.float32)
    k = jnp.ones((1, slots, 1, 128), jnp.float16)
    v = jnp.eye(slots, 128, dtype=jnp.float16)[None, :, None, :]
    out = np.asarray(attention(q, k, v, jnp.asarray(positions, jnp.int32)))[0, :, 0]
    for row, position in zip(out, positions[0], strict=True):
        seen = min(position, slots - 1) + 1 if position >= 0 else 0
        np.testing.assert_array_equal(np.flatnonzero(row), np.arange(seen))
        np.testing.assert_allclose(row[:seen], 1 / max(seen, 1), rtol=1e-3)


def test_c1_query_head_reads_its_kv_head(attention):
    """Values hold the index of their kv head."""
    q, k, v, positions = arrays(q_heads=28, kv_heads=4, head_dim=64, q_len=66)
    v = jnp.broadcast_to(jnp.arange(4, dtype=jnp.float16)[None, None, :, None], v.shape)
    out = np.asarray(attention(q, k, v, positions))
    expected = np.broadcast_to((np.arange(28) // 7)[None, None, :, None], out.shape)
    np.testing.assert_allclose(out, expected, atol=4e-3)


# C2: padding rows.


@pytest.mark.parametrize("name", ["padded_tail", "padded_head", "all_padding", "anywhere"])
def test_c2_padding_rows_are_zero_and_minus_infinity(attention, name):
    q, k, v, positions = BY_NAME[name].arrays()
    padding = np.asarray(positions) < 0
    q = q.at[np.nonzero(padding)].set(jnp.nan)  # whatever padding tokens hold
    out, lse = (np.asarray(x) for x in attention(q, k, v, positions, return_lse=True))
    assert padding.any()
    assert (out[padding] == 0).all() and not np.signbit(out[padding]).any()
    assert (lse[padding] == -np.inf).all()
    assert np.isfinite(out).all() and np.isfinite(lse[~padding]).all()


# C3: what no row sees is never read into a result; nor is what this row does not see.


@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize(("q_dtype", "kv_dtype"), DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_c3_unseen_slots_change_no_bit(attention, poison, q_dtype, kv_dtype, head_dim):
    case = Case(
        "poison", batch=2, q_len=75, n_past=21, spare=100, placement="staggered",
        head_dim=head_dim, q_dtype=q_dtype, kv_dtype=kv_dtype,
    )  # fmt: skip
    q, k, v, positions = case.arrays()
    unseen = jnp.asarray(case.unseen_slots())[:, :, None, None]
    clean = attention(q, k, v, positions, return_lse=True)
    dirty = attention(
        q, jnp.where(unseen, poison, k), jnp.where(unseen, poison, v), positions, return_lse=True
    )
    assert_same_bits(clean[0], dirty[0])
    assert_same_bits(clean[1], dirty[1], "lse")


@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
@pytest.mark.parametrize(("q_dtype", "kv_dtype"), DTYPES)
def test_c3_a_slot_that_only_later_rows_see_changes_no_bit_of_earlier_rows(
    attention, poison, q_dtype, kv_dtype
):
    """Rows of one tile stand on both sides of the poisoned slot."""
    q, k, v, positions = arrays(q_len=100, head_dim=128, q_dtype=q_dtype, kv_dtype=kv_dtype)
    slot = 37
    clean = attention(q, k, v, positions)
    dirty = attention(q, k.at[:, slot].set(poison), v.at[:, slot].set(poison), positions)
    assert_same_bits(clean[:, :slot], dirty[:, :slot])
    assert not np.isfinite(np.asarray(dirty[:, slot:], np.float32)).all(), "the poison was not read"


def test_a_row_of_scores_of_minus_infinity_counts_as_empty(attention):
    q = jnp.ones((1, 2, 1, 64), jnp.float32)
    k = jnp.zeros((1, 70, 1, 64), jnp.float16).at[:, :66].set(-jnp.inf)
    v = jnp.ones_like(k)
    out, lse = attention(q, k, v, jnp.asarray([[65, 66]]), return_lse=True)
    assert_same_bits(out[0, 0, 0], jnp.zeros(64))
    assert np.asarray(lse)[0, 0, 0] == -np.inf
    np.testing.assert_array_equal(np.asarray(out[0, 1, 0]), 1.0)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
def test_such_a_row_takes_nothing_from_v(attention, kernel, value):
    if kernel == "hopper":
        pytest.skip("hopper's exception (docs/contract.md, Numerics); the other kernels run this")
    q = jnp.ones((1, 3, 1, 64), jnp.float32)
    k = jnp.zeros((1, 70, 1, 64), jnp.float16).at[:, :66].set(-jnp.inf)
    v = jnp.ones_like(k).at[:, jnp.asarray([0, 63, 65])].set(value)
    out, lse = attention(q, k, v, jnp.asarray([[0, 63, 65]]), return_lse=True)
    assert (np.asarray(out) == 0).all() and (np.asarray(lse) == -np.inf).all()


# C4: any order of positions.


def test_c4_shuffled_rows_give_the_rows_of_the_sorted_call(attention):
    q, k, v, positions = arrays(q_len=150, n_past=30, head_dim=64)
    order = np.random.default_rng(3).permutation(150)
    straight = attention(q, k, v, positions, return_lse=True)
    shuffled = attention(q[:, order], k, v, positions[:, order], return_lse=True)
    for a, b in zip(straight, shuffled, strict=True):
        assert_same_bits(a[:, order], b)


# C5: a row's bits depend on that row alone.


@pytest.mark.parametrize(("q_dtype", "kv_dtype"), DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("chunk", [1, 7, 64, 65, 100, 199])
def test_c5_chunks_give_the_bits_of_the_whole(attention, q_dtype, kv_dtype, head_dim, chunk):
    length = 200
    q, k, v, positions = arrays(
        q_len=length, spare=5, head_dim=head_dim, q_dtype=q_dtype, kv_dtype=kv_dtype
    )
    whole, whole_lse = attention(q, k, v, positions, return_lse=True)
    starts = range(0, length, chunk) if chunk > 1 else (0, 63, 64, 128, 199)
    for start in starts:
        rows = slice(start, min(start + chunk, length))
        part, lse = attention(q[:, rows], k, v, positions[:, rows], return_lse=True)
        assert_same_bits(whole[:, rows], part, f"rows {rows}")
        assert_same_bits(whole_lse[:, rows], lse, f"lse of rows {rows}")


def test_c5_a_larger_cache_and_batch_change_no_bit(attention):
    q, k, v, positions = arrays(batch=3, q_len=90, n_past=11, placement="staggered", head_dim=128)
    whole = attention(q, k, v, positions)
    for b in range(3):
        assert_same_bits(whole[b : b + 1], attention(*(x[b : b + 1] for x in (q, k, v, positions))))
    longer = [
        jnp.pad(x, ((0, 0), (0, 333), (0, 0), (0, 0)), constant_values=jnp.nan) for x in (k, v)
    ]
    assert_same_bits(whole, attention(q, *longer, positions))


@pytest.mark.parametrize("chunk_invariant", [True, False])
def test_many_tiles_over_a_cache_larger_than_l2(attention, kernel, chunk_invariant):
    """hopper has these heads in sections (7 kv heads by 3, 3 and 1; or 4 and 3): none is missed."""
    tokens, slots = (300, 1000) if kernel == "cpu" else (12_000, 65_536)
    q, k, v, _ = arrays(q_len=tokens, kv_len=200, q_heads=28, kv_heads=7, head_dim=128)
    positions = jnp.asarray(np.random.default_rng(3).integers(0, 200, (1, tokens)), jnp.int32)
    small = attention(q, k, v, positions)
    k, v = (jnp.pad(x, ((0, 0), (0, slots - 200), (0, 0), (0, 0))) for x in (k, v))
    large = attention(q, k, v, positions, chunk_invariant=chunk_invariant)
    if chunk_invariant:
        assert_same_bits(small, large)
    else:
        assert_within(large, small, 5e-3)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_c5_neighbouring_rows_change_no_bit(attention, head_dim):
    """Nor do neighbours with scores fifty times as large."""
    q, k, v, positions = arrays(q_len=64, n_past=300, head_dim=head_dim)
    whole = attention(q, k, v, positions)
    other = positions.at[:, 1::2].set(jnp.asarray([-1, 5, 130, 363] * 8))
    moved = attention(q.at[:, 1::2].multiply(50.0), k, v, other)
    assert_same_bits(whole[:, ::2], moved[:, ::2])


@pytest.mark.parametrize("q_dtype", ["float32", "float16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_c5_rising_row_maxima_in_few_and_in_many_tiles(attention, head_dim, q_dtype):
    """More tiles than a GPU holds at once, or few: other builds of a kernel, and a block's second
    tile, whose rows' maxima rise by themselves."""
    q, k, v, positions = arrays(
        q_len=130, n_past=300, q_heads=160, kv_heads=160, head_dim=head_dim, q_dtype=q_dtype,
        kv_dtype="float16",
    )  # fmt: skip
    ramp = jnp.linspace(0.01, 3, k.shape[1])[None, :, None, None]
    q, k = jnp.abs(q), (jnp.abs(k) * ramp).astype(k.dtype)
    whole = attention(q, k, v, positions)
    for rows, heads in ((slice(0, 130), slice(150, 154)), (slice(60, 64), slice(0, 4))):
        few = attention(q[:, rows, heads], k[:, :, heads], v[:, :, heads], positions[:, rows])
        assert_same_bits(whole[:, rows, heads], few, f"rows {rows}, heads {heads}")


@pytest.mark.parametrize(("q_dtype", "kv_dtype"), DTYPES)
@pytest.mark.parametrize(("head_dim", "group"), [(64, 7), (80, 4), (128, 4)])
def test_c5_decoding_many_sequences_gives_the_bits_of_their_prompts(
    attention, head_dim, group, q_dtype, kv_dtype
):
    """hopper then has all query heads of a kv head in one tile."""
    batch = 40
    q, k, v, positions = arrays(
        batch=batch, q_len=40, n_past=260, q_heads=2 * group, head_dim=head_dim, q_dtype=q_dtype,
        kv_dtype=kv_dtype, placement="staggered",
    )  # fmt: skip
    ramp = jnp.linspace(0.01, 3, k.shape[1])[None, :, None, None]
    q, k = jnp.abs(q), (jnp.abs(k) * ramp).astype(k.dtype)  # maxima that rise
    whole = attention(q, k, v, positions, return_lse=True)
    for rows in (slice(0, 1), slice(33, 34), slice(31, 40)):
        part = attention(q[:, rows], k, v, positions[:, rows], return_lse=True)
        assert_same_bits(whole[0][:, rows], part[0], f"rows {rows}")
        assert_same_bits(whole[1][:, rows], part[1], f"lse of rows {rows}")


def test_chunk_invariant_false_still_matches_the_reference(attention, kernel):
    q, k, v, positions = arrays(batch=2, q_len=300, n_past=77, placement="anywhere", head_dim=128)
    out = attention(q, k, v, positions, chunk_invariant=False)
    want = oracle.attend(q, k, v, positions)
    assert_within(out, want, output_bound(kernel, q, k, v, positions))


# C6: the same bits on every run.


def test_c6_reruns_give_equal_bits(attention):
    q, k, v, positions = arrays(
        q_len=129, q_heads=16, head_dim=128, q_dtype="float16", kv_dtype="float16"
    )
    first = attention(q, k, v, positions)
    for _ in range(30):
        assert_same_bits(first, attention(q, k, v, positions))


# C8: zero sizes, and head counts beyond a grid axis (65,535 on a GPU).


@pytest.mark.parametrize("extents", [{"batch": 0}, {"q_len": 0}, {"kv_len": 0}])
def test_c8_zero_extents_are_served(attention, extents):
    fields = {"batch": 2, "q_len": 5, "kv_len": 9, "head_dim": 64} | extents
    q, k, v, positions = arrays(**fields)
    out, lse = attention(q, k, v, positions, return_lse=True)
    assert out.shape == q.shape and lse.shape == q.shape[:-1]
    if not extents.get("kv_len", 1):
        assert (np.asarray(out) == 0).all() and (np.asarray(lse) == -np.inf).all()


def test_c8_more_heads_than_a_grid_axis_holds(attention, kernel):
    q, k, v, positions = arrays(q_len=2, kv_len=3, q_heads=70_000, kv_heads=70_000, head_dim=64)
    out = attention(q, k, v, positions)
    want = oracle.attend(q, k, v, positions)
    assert_within(out[:, :, -8:], want[:, :, -8:], 5e-3)
    assert_within(out[:, :, :8], want[:, :, :8], 5e-3)


# Numerics that public bug reports name.


def test_large_scores_do_not_overflow_16_bits(attention):
    """Raw products of 453,120 and 460,800: beyond float16, and far apart once scaled."""
    q = jnp.full((1, 4, 2, 128), 60.0, jnp.float16)
    k = jnp.full((1, 64, 1, 128), 60.0, jnp.float16).at[0, ::2].set(59.0)
    v = jnp.asarray(np.random.default_rng(49).standard_normal((1, 64, 1, 128)), jnp.float16)
    positions = jnp.arange(60, 64)[None]
    out = np.asarray(attention(q, k, v, positions), np.float32)
    want = np.asarray(oracle.attend(q, k, v, positions), np.float32)
    np.testing.assert_allclose(out, want, atol=5e-3)


def test_long_sums_do_not_overflow_16_bits(attention):
    q = jnp.zeros((1, 2, 1, 64), jnp.float16)
    k = jnp.zeros((1, 4096, 1, 64), jnp.float16)
    v = jnp.full((1, 4096, 1, 64), 60.0, jnp.float16)
    out = attention(q, k, v, jnp.asarray([[4094, 4095]]))
    np.testing.assert_array_equal(np.asarray(out, np.float32), 60.0)


def test_more_than_32768_slots(attention, kernel):
    q, k, v, positions = arrays(q_len=2, n_past=33_726, head_dim=64, q_heads=1, kv_heads=1)
    k = k.at[0, 33_700].set((q[0, 0, :1] * 4).astype(k.dtype))
    out = attention(q, k, v, positions)
    want = oracle.attend(q, k, v, positions)
    assert_within(out, want, output_bound(kernel, q, k, v, positions))


@pytest.mark.parametrize("q_heads", [4, 160])  # fewer tiles than a GPU holds at once, and more
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rising_and_falling_row_maxima(attention, kernel, head_dim, q_heads):
    """Keys that grow (or shrink) along S make every tile (or none) raise the row maximum."""
    q, k, v, positions = arrays(
        q_len=130, n_past=300, q_heads=q_heads, kv_heads=2, head_dim=head_dim
    )
    ramp = jnp.linspace(0.01, 3, k.shape[1])[None, :, None, None]
    for keys in (k * ramp, k * ramp[:, ::-1], jnp.abs(k) * ramp):
        keys = keys.astype(k.dtype)
        queries = jnp.abs(q)
        out = attention(queries, keys, v, positions)
        want = oracle.attend(queries, keys, v, positions)
        assert_within(out, want, output_bound(kernel, queries, keys, v, positions))


def test_two_halves_of_a_cache_merge_to_the_whole(attention):
    q, k, v, positions = arrays(q_len=20, n_past=236, head_dim=64)
    half = 128
    a = attention(q, k[:, :half], v[:, :half], positions, return_lse=True)
    b = attention(q, k[:, half:], v[:, half:], positions - half, return_lse=True)
    out, lse = merge_states(*a, *b)
    want, want_lse = oracle.attend(q, k, v, positions, return_lse=True)
    np.testing.assert_allclose(np.asarray(out), np.asarray(want), atol=5e-3)
    np.testing.assert_allclose(np.asarray(lse), np.asarray(want_lse), atol=5e-3)


def test_layouts_and_slices_of_larger_arrays(attention):
    """XLA may hand over a slice of a stacked cache, or an array it holds in another layout."""
    layers, slots, head_dim = 3, 17, 40
    rng = np.random.default_rng(4)
    stacked_k, stacked_v = (
        jnp.asarray(rng.standard_normal((layers, 1, slots, 1, head_dim)), jnp.bfloat16)
        for _ in range(2)
    )
    q = jnp.asarray(rng.standard_normal((1, 4, 3, head_dim)), jnp.bfloat16)
    positions = jnp.arange(13, 17)[None]
    attention(q, stacked_k[0], stacked_v[0], positions)  # skips if the kernel refuses

    @jax.jit
    def scan(q, stacked_k, stacked_v):
        def layer(carry, i):
            return carry, attention(q, stacked_k[i], stacked_v[i], positions)

        return jax.lax.scan(layer, 0, jnp.arange(layers))[1]

    @jax.jit
    def swapped(q, heads_first_k, v):
        return attention(q, jnp.swapaxes(heads_first_k, 1, 2), v, positions)

    for i, out in enumerate(scan(q, stacked_k, stacked_v)):
        alone = attention(q, stacked_k[i], stacked_v[i], positions)
        assert_same_bits(out, alone)
        assert_same_bits(swapped(q, jnp.swapaxes(stacked_k[i], 1, 2), stacked_v[i]), alone)
