"""Few query rows over many slots, without chunk invariance: a kernel may split the slots.

hopper shares a query tile's slots out over up to eight blocks, and puts their results together.
"""

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from bounds import assert_same_bits, assert_within, lse_bound, output_bound
from cases import Case

# Of hopper: slots are shared out from 2,048 on where a group's rows fit one consumer (64), from
# 4,096 on otherwise (cuda/hopper/clusters.cuh); with 34 sequences of 8 heads or more (132 SMs), all
# query heads of a kv head get one tile.
CASES = [
    Case("decode", q_len=1, n_past=4095, q_heads=8, kv_heads=2, head_dim=128, q_dtype="bfloat16",
         kv_dtype="bfloat16"),
    Case("speculative", q_len=16, n_past=2100, q_heads=8, kv_heads=2, head_dim=128),
    Case("batch_of_prompts", batch=3, q_len=5, n_past=1200, spare=900, placement="staggered",
         q_dtype="float16"),
    Case("gqa_7_two_tiles", q_len=20, n_past=4200, q_heads=14, q_dtype="float16", head_dim=128),
    Case("chunk", q_len=129, n_past=4200, q_heads=4, kv_heads=1, head_dim=80, q_dtype="bfloat16",
         kv_dtype="bfloat16"),
    Case("chunk_float32", q_len=70, n_past=4200, q_heads=4, kv_heads=2, head_dim=128),
    Case("padding", batch=2, q_len=40, n_past=4100, placement="padded_tail", q_dtype="float16"),
    Case("anywhere", batch=2, q_len=33, kv_len=4300, placement="anywhere", q_dtype="float16"),
    Case("start_of_a_long_cache", q_len=9, spare=4000, head_dim=128, q_dtype="float16"),
    Case("group_of_64", q_len=1, n_past=2100, q_heads=64, kv_heads=1, q_dtype="float16"),
    Case("group_of_64_three_tokens", q_len=3, n_past=4200, q_heads=64, kv_heads=1,
         q_dtype="float16"),
    Case("group_of_65", q_len=2, n_past=4200, q_heads=65, kv_heads=1, q_dtype="float16"),
    Case("head_dim_256", q_len=4, n_past=4200, head_dim=256, q_dtype="float16"),
    Case("decode_a_batch", batch=40, q_len=1, n_past=300, q_heads=8, placement="staggered",
         spare=50, head_dim=128, q_dtype="float16"),
    Case("decode_a_batch_without_slots", batch=40, q_len=2, q_heads=8, kv_len=0, q_dtype="float16"),
]  # fmt: skip


@pytest.fixture
def free(attention):
    """``attention`` without chunk invariance."""
    return lambda *operands, **options: attention(*operands, chunk_invariant=False, **options)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_definition(free, kernel, case):
    q, k, v, positions = case.arrays()
    out, lse = free(q, k, v, positions, return_lse=True)
    want, want_lse = oracle.attend(q, k, v, positions, return_lse=True)
    assert_within(out, want, output_bound(kernel, q, k, v, positions))
    assert_within(lse, want_lse, lse_bound(kernel, q, k), "lse")


@pytest.mark.parametrize("name", ["speculative", "chunk", "chunk_float32"])
def test_hopper_shares_out_the_slots_of_these_cases(attention, free, kernel, name):
    """Or this file would test nothing: sums in another order end in other bits somewhere."""
    if kernel != "hopper":
        pytest.skip("of hopper alone; an H100 or H200 runs this")
    q, k, v, positions = next(case for case in CASES if case.name == name).arrays()
    assert (free(q, k, v, positions) != attention(q, k, v, positions)).any()


@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_unseen_slots_change_no_bit_and_neither_does_a_rerun(free, case, poison):
    q, k, v, positions = case.arrays()
    unseen = jnp.asarray(case.unseen_slots())[:, :, None, None]
    clean = free(q, k, v, positions, return_lse=True)
    dirty = free(
        q, jnp.where(unseen, poison, k), jnp.where(unseen, poison, v), positions, return_lse=True
    )
    for a, b in zip(clean, dirty, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf, -jnp.inf])
def test_slots_that_later_rows_see_change_no_bit_of_earlier_rows(free, poison):
    q, k, v, positions = Case("later", q_len=16, n_past=2500, head_dim=128).arrays()
    slot = 2508
    clean = free(q, k, v, positions)
    dirty = free(q, k.at[:, slot].set(poison), v.at[:, slot].set(poison), positions)
    assert_same_bits(clean[:, :8], dirty[:, :8])
    assert not np.isfinite(np.asarray(dirty[:, 8:], np.float32)).all(), "the poison was not read"


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_values_that_are_not_finite_reach_the_rows_that_see_them(free, kernel, value):
    """Even where the weight of their share of the slots is too small for a float32."""
    q, k, v, _ = Case("unfinite", q_len=3, kv_len=2048, head_dim=64, q_dtype="float16").arrays()
    k = k.at[:, :1024].multiply(0.01).at[:, 1500].set(8.0)
    q = jnp.abs(q) + 2  # the score of slot 1500 is above all others by more than 100
    v = v.at[:, 700, :, 5].set(value)
    positions = jnp.asarray([[699, 700, 2047]])
    out = np.asarray(free(q, k, v, positions), np.float32)
    assert np.isfinite(np.delete(out, 5, axis=-1)).all() and np.isfinite(out[:, 0]).all()
    np.testing.assert_array_equal(out[:, 1, :, 5], np.full((1, 4), value, np.float32))
    if kernel == "hopper" or np.isnan(value):  # elsewhere 0 times infinity may be NaN
        np.testing.assert_array_equal(out[:, 2, :, 5], np.full((1, 4), value, np.float32))


@pytest.mark.parametrize("q_len", [20, 50])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rising_row_maxima(free, kernel, head_dim, q_len):
    """Each share of the slots has a larger maximum than the one before, and raises its own."""
    q, k, v, positions = Case("rising", q_len=q_len, n_past=4100, head_dim=head_dim).arrays()
    ramp = jnp.linspace(0.01, 3, k.shape[1])[None, :, None, None]
    q, k = jnp.abs(q), (jnp.abs(k) * ramp).astype(k.dtype)
    want = oracle.attend(q, k, v, positions)
    assert_within(free(q, k, v, positions), want, output_bound(kernel, q, k, v, positions))


@pytest.mark.parametrize("q_dtype", ["float32", "bfloat16"])
def test_a_score_beyond_all_others_late_in_the_last_share(free, kernel, q_dtype):
    """Its weight leaves float32, so that the scores of its tile are computed again."""
    case = Case("cliff", q_len=6, n_past=4000, head_dim=128, q_dtype=q_dtype, kv_dtype="bfloat16")
    q, k, v, positions = case.arrays()
    q = jnp.abs(q) + 2
    k = (k * 0.1).at[:, 3990].set(8.0)  # scores of 180 and more, beside some of 3
    out = free(q, k, v, positions)
    assert_within(out, oracle.attend(q, k, v, positions), output_bound(kernel, q, k, v, positions))
    np.testing.assert_allclose(
        np.asarray(out, np.float32),
        np.broadcast_to(np.repeat(np.asarray(v, np.float32)[:, 3990:3991], 2, axis=2), q.shape),
        rtol=2.0**-7,
    )


def test_scores_of_minus_infinity_in_all_shares_but_one(free):
    q = jnp.ones((1, 2, 2, 64), jnp.float16)
    k = jnp.full((1, 2048, 2, 64), -jnp.inf, jnp.float16).at[:, 1700].set(1.0)
    v = jnp.ones_like(k) * jnp.arange(2048, dtype=jnp.float16)[None, :, None, None]
    out, lse = free(q, k, v, jnp.asarray([[1699, 2047]]), return_lse=True)
    out, lse = np.asarray(out, np.float32), np.asarray(lse)
    assert (out[0, 0] == 0).all() and (lse[0, 0] == -np.inf).all()
    # The slot's weight, which need not be 1, and the output are rounded to 11 bits.
    np.testing.assert_allclose(out[0, 1], 1700, rtol=2.0**-10)
    np.testing.assert_allclose(lse[0, 1], 8.0, rtol=1e-6)


def test_one_layer_of_stacked_caches(free):
    q, k, v, positions = Case("stacked", batch=2, q_len=7, n_past=2100, q_dtype="float16").arrays()
    stacks = (jnp.stack([jnp.full_like(x, jnp.nan), x]) for x in (k, v))
    want = free(q, k, v, positions)
    assert_same_bits(free(q, *stacks, positions, layer=1), want)
