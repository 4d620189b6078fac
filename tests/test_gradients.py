"""Gradients: those of the reference, in linear memory; exact zeros where nothing is seen.

Tolerance: the forward pass of a matrix-unit kernel gives out and lse with its own roundings (see
bounds.py); gradients are linear in them, with factors of the size of the gradients themselves. So a
relative tolerance, to the largest element: a few unit roundoffs of the least exact type involved.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import MATRIX_UNIT_KERNELS, assert_same_bits
from cases import Case

from jax_fa import prefill_attention, reference

DTYPES = [("float32", "float16"), ("float16", "float16"), ("bfloat16", "bfloat16")]


def weighted_sum(attention, positions, **options):
    """A scalar of q, k, v that weighs out and lse with fixed random numbers."""

    def loss(q, k, v):
        out, lse = attention(q, k, v, positions, return_lse=True, **options)
        rng = np.random.default_rng(5)
        w_out = jnp.asarray(rng.standard_normal(out.shape), jnp.float32)
        w_lse = jnp.asarray(rng.standard_normal(lse.shape), jnp.float32)
        seen = jnp.isfinite(lse)
        return jnp.sum(w_out * out.astype(jnp.float32)) + jnp.sum(jnp.where(seen, w_lse * lse, 0))

    return loss


def tolerance(kernel, *dtypes):
    exact = kernel not in MATRIX_UNIT_KERNELS
    worst = max(jnp.finfo(d).eps for d in dtypes)
    return 4 * max(worst, 1e-6 if exact else float(jnp.finfo(dtypes[-1]).eps))


def assert_close(got, want, rtol):
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    np.testing.assert_allclose(got, want, rtol=0, atol=rtol * max(1.0, np.abs(want).max(initial=0)))


CASES = [
    Case("grad_small", batch=2, q_len=9, n_past=11, spare=7, placement="anywhere"),
    Case("grad_blocks", q_len=300, n_past=270, q_heads=3, kv_heads=1),
    Case("grad_padded", batch=2, q_len=40, n_past=3, placement="padded_head", head_dim=32),
    Case("grad_gqa_7", q_len=20, n_past=30, q_heads=14, kv_heads=2, head_dim=128),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("q_dtype", "kv_dtype"), DTYPES)
def test_gradients_match_the_references(attention, kernel, case, q_dtype, kv_dtype):
    q, k, v, positions = case.arrays()
    q, k, v = q.astype(q_dtype), k.astype(kv_dtype), v.astype(kv_dtype)
    got = jax.grad(weighted_sum(attention, positions), (0, 1, 2))(q, k, v)
    want = jax.grad(weighted_sum(reference.prefill_attention, positions), (0, 1, 2))(q, k, v)
    for g, w, x in zip(got, want, (q, k, v), strict=True):
        assert g.dtype == x.dtype and g.shape == x.shape
        assert_close(g, w, tolerance(kernel, q.dtype, k.dtype))


def test_gradients_match_finite_differences():
    """Independent of the reference's own derivative: central differences of the float32 forward."""
    q, k, v, positions = Case("finite", q_len=6, n_past=5, head_dim=8).arrays()
    loss = weighted_sum(reference.prefill_attention, positions)
    d_q = jax.grad(weighted_sum(prefill_attention, positions))(q, k, v)
    rng = np.random.default_rng(7)
    for _ in range(5):
        direction = jnp.asarray(rng.standard_normal(q.shape), jnp.float32)
        step = 1e-2
        slope = (loss(q + step * direction, k, v) - loss(q - step * direction, k, v)) / (2 * step)
        along = float(jnp.vdot(d_q, direction))
        np.testing.assert_allclose(along, float(slope), rtol=2e-2, atol=2e-2)


def test_nothing_seen_gives_exact_zeros_even_over_nan():
    case = Case("grad_nan", batch=2, q_len=20, n_past=5, spare=30, placement="padded_head")
    q, k, v, positions = case.arrays()
    padding = np.asarray(positions) < 0
    unseen = case.unseen_slots()
    clean = jax.grad(weighted_sum(prefill_attention, positions), (0, 1, 2))(q, k, v)
    q = q.at[np.nonzero(padding)].set(jnp.nan)
    k, v = (jnp.where(unseen[:, :, None, None], jnp.nan, x).astype(x.dtype) for x in (k, v))

    def loss(q, k, v):
        out = prefill_attention(q, k, v, positions)
        weights = jnp.where(
            padding[:, :, None, None], jnp.nan, 1.0
        )  # whatever flows back to padding
        return jnp.sum(out * weights)

    d_q, d_k, d_v = (np.asarray(x, np.float32) for x in jax.grad(loss, (0, 1, 2))(q, k, v))
    assert (d_q[padding] == 0).all() and (d_k[unseen] == 0).all() and (d_v[unseen] == 0).all()
    assert all(np.isfinite(x).all() for x in (d_q, d_k, d_v))
    dirty = jax.grad(weighted_sum(prefill_attention, positions), (0, 1, 2))(q, k, v)
    for a, b in zip(clean, dirty, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("which", ["k", "v"])
def test_a_slot_reaches_no_d_q_of_rows_that_do_not_see_it(which, poison):
    q, k, v, positions = Case("grad_slot", q_len=20, n_past=300, head_dim=16).arrays()
    slot = 309
    d_q = jax.grad(weighted_sum(prefill_attention, positions))
    clean = d_q(q, k, v)
    if which == "k":
        k = k.at[:, slot].set(poison)
    else:
        v = v.at[:, slot].set(poison)
    dirty = d_q(q, k, v)
    assert_same_bits(clean[:, :9], dirty[:, :9])
    if poison != -jnp.inf or which == "v":  # a key of -inf may only take the slot away
        assert not np.isfinite(np.asarray(dirty[:, 9:])).all(), "the poison was not read"


@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
def test_a_row_reaches_no_d_k_or_d_v_of_slots_that_it_does_not_see(poison):
    q, k, v, _ = Case("grad_row", q_len=3, kv_len=300, head_dim=16).arrays()
    positions = jnp.asarray([[299, 40, 299]])
    gradients = jax.grad(weighted_sum(prefill_attention, positions), (1, 2))
    clean = gradients(q, k, v)
    dirty = gradients(q.at[:, 1].set(poison), k, v)
    for a, b in zip(clean, dirty, strict=True):
        assert_same_bits(a[:, 41:], b[:, 41:])
        assert not np.isfinite(np.asarray(b[:, :41], np.float32)).all(), "the poison was not read"


def test_positions_get_the_cotangent_type_without_values():
    q, k, v, positions = Case("float0", q_len=4).arrays()
    _, pullback = jax.vjp(prefill_attention, q, k, v, positions)
    *_, d_positions = pullback(jnp.ones_like(q))
    assert d_positions.dtype == jax.dtypes.float0 and d_positions.shape == positions.shape


def test_transformations_compose():
    q, k, v, positions = Case("compose", q_len=7, n_past=6).arrays()

    def loss(q, k, v):
        return jnp.sum(jnp.square(prefill_attention(q, k, v, positions)))

    plain = jax.grad(loss, (0, 1, 2))(q, k, v)
    for other in (
        jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v),
        jax.grad(jax.jit(loss), (0, 1, 2))(q, k, v),
        jax.grad(jax.checkpoint(loss), (0, 1, 2))(q, k, v),
    ):
        for a, b in zip(plain, other, strict=True):
            assert_close(a, b, 1e-3)
    queries = jnp.stack([q, 2 * q])
    mapped = jax.vmap(jax.grad(loss), (0, None, None))(queries, k, v)
    for one, query in zip(mapped, queries, strict=True):
        assert_close(one, jax.grad(loss)(query, k, v), 1e-5)

    def scanned(q):
        return jnp.sum(
            jax.lax.scan(lambda x, _: (prefill_attention(x, k, v, positions), 0), q, None, 3)[0]
        )

    def unrolled(q):
        for _ in range(3):
            q = prefill_attention(q, k, v, positions)
        return jnp.sum(q)

    assert_close(jax.grad(scanned)(q), jax.grad(unrolled)(q), 1e-5)
    jacobian = jax.jacrev(lambda x: prefill_attention(x, k, v, positions)[0, 0, 0])(q)
    assert jacobian.shape == (q.shape[-1], *q.shape)


def test_gradients_are_deterministic():
    q, k, v, positions = Case("grad_again", q_len=100, n_past=200, placement="anywhere").arrays()
    grad = jax.jit(jax.grad(weighted_sum(prefill_attention, positions), (0, 1, 2)))
    first = grad(q, k, v)
    for _ in range(5):
        for a, b in zip(first, grad(q, k, v), strict=True):
            assert_same_bits(a, b)


def test_memory_of_gradients_is_linear():
    """Twice the tokens and slots: about twice the temporaries, not four times."""

    def temporaries(length):
        shapes = [
            jax.ShapeDtypeStruct((1, length, 4, 64), jnp.float32),
            *[jax.ShapeDtypeStruct((1, length, 2, 64), jnp.float16)] * 2,
        ]
        positions = jnp.arange(length)[None]
        grad = jax.grad(lambda *a: jnp.sum(prefill_attention(*a, positions)), (0, 1, 2))
        return jax.jit(grad).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(8192) < 2.5 * temporaries(4096)


def test_forward_mode_says_what_it_cannot():
    q, k, v, positions = Case("forward", q_len=4).arrays()
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: prefill_attention(q, k, v, positions), (q,), (q,))


@pytest.mark.parametrize("slots", [1, 255, 256, 300])
def test_gradients_are_right_where_scores_are_far_below_zero(attention, kernel, slots):
    """exp(-lse) overflows, so slots that only fill up a block must not count as seen; and a kernel
    that rounds q is off by more than 1 in lse, which must not scale the gradients."""
    q = jnp.full((1, 1, 1, 8), 10.0)
    k = jnp.full((1, slots, 1, 8), -10.0, jnp.bfloat16)
    v = jnp.ones_like(k)
    positions = jnp.full((1, 1), slots - 1)

    def loss(function):
        return lambda q, k, v: jnp.sum(function(q, k, v, positions))

    got = jax.grad(loss(attention), (0, 1, 2))(q, k, v)
    want = jax.grad(loss(reference.prefill_attention), (0, 1, 2))(q, k, v)
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, tolerance(kernel, q.dtype, k.dtype))


def test_gradients_can_be_differentiated_in_their_turn(attention, kernel):
    q, k, v, positions = Case("second", q_len=5, n_past=4, head_dim=8).arrays()

    def curvature(function):
        def loss(q):
            return jnp.sum(jnp.sin(function(q, k, v, positions)))

        return jax.grad(lambda q: jnp.sum(jnp.square(jax.grad(loss)(q))))(q)

    rtol = tolerance(kernel, q.dtype, k.dtype) if kernel in MATRIX_UNIT_KERNELS else 1e-5
    assert_close(curvature(attention), curvature(reference.prefill_attention), rtol)


def test_strict_rank_promotion_is_no_hindrance():
    arrays = Case("ranks", q_len=5, n_past=4).arrays()
    with jax.numpy_rank_promotion("raise"):
        for attention in (prefill_attention, reference.prefill_attention):
            jax.grad(lambda q, f=attention: jnp.sum(f(q, *arrays[1:])))(arrays[0])


def test_a_16_bit_out_does_not_round_the_gradients(attention):
    """Values far from 0: what the rounding of out takes away is not taken from the scores."""
    q, k, v, positions = Case("offset", q_len=20, n_past=30, head_dim=64).arrays()
    q, k = (x.astype(jnp.bfloat16) for x in (q, k))
    v = (v + 200).astype(jnp.bfloat16)
    weights = jnp.asarray(np.random.default_rng(2).standard_normal(q.shape), jnp.float32)

    def loss(function):
        return lambda q: jnp.sum(weights * function(q, k, v, positions).astype(jnp.float32))

    got = np.asarray(jax.grad(loss(attention))(q), np.float32)
    exact = q.astype(jnp.float32)  # the reference then keeps out in float32
    want = np.asarray(jax.grad(loss(reference.prefill_attention))(exact), np.float32)
    assert np.linalg.norm(got - want) <= 2**-7 * np.linalg.norm(want)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("attention", [prefill_attention, reference.prefill_attention])
def test_gradients_promote_no_dtype(attention, x64):
    q, k, v, positions = Case("strict", q_len=3, kv_len=9).arrays()

    def loss(q, k, v):
        return jnp.sum(jnp.sin(attention(q, k, v, positions)))

    want = jax.grad(loss, (0, 1, 2))(q, k, v)
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        got = jax.grad(loss, (0, 1, 2))(q, k, v)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        assert_close(g, w, tolerance("cpu", q.dtype, k.dtype))


def test_gradients_of_gradients_promote_no_dtype():
    q, k, v, positions = Case("strict", q_len=3, kv_len=9).arrays()

    def inner(q):
        return jnp.sum(jnp.sin(prefill_attention(q, k, v, positions)))

    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        second = jax.grad(lambda q: jnp.sum(jnp.sin(jax.grad(inner)(q))))(q)
    assert np.isfinite(np.asarray(second)).all()
