"""merge_states: the union of two disjoint slot sets."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from bounds import assert_same_bits
from cases import Case

from jax_fa import merge_states

EMPTY = -jnp.inf


def state(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    out = jnp.asarray(rng.standard_normal((2, 3, 4, 8)), dtype)
    return out, jnp.asarray(rng.standard_normal((2, 3, 4)) * 5, jnp.float32)


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_parts_of_a_cache_merge_to_the_whole(parts):
    q, k, v, positions = Case("merge", batch=2, q_len=9, n_past=91, placement="anywhere").arrays()
    edges = np.linspace(0, k.shape[1], parts + 1).astype(int)
    merged = (jnp.zeros_like(q), jnp.full(q.shape[:-1], EMPTY))
    for low, high in pairwise(edges):
        shifted = jnp.maximum(positions, -1) - low
        part = oracle.attend(q, k[:, low:high], v[:, low:high], shifted, return_lse=True)
        merged = merge_states(*merged, *part)
    want = oracle.attend(q, k, v, positions, return_lse=True)
    for got, expected in zip(merged, want, strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("junk", [0.0, jnp.nan, jnp.inf])
def test_an_empty_state_is_neutral_to_the_bit(dtype, junk):
    out, lse = state(1, dtype)
    out = out.at[0].set(-0.0).at[1, 0].set(1e-40)
    empty = (jnp.full_like(out, junk), jnp.full_like(lse, EMPTY))
    for merged in (merge_states(out, lse, *empty), merge_states(*empty, out, lse)):
        assert merged[0].dtype == dtype
        assert_same_bits(merged[0], out)
        assert_same_bits(merged[1], lse)


def test_two_empty_states_stay_empty():
    zeros, empty = jnp.zeros((1, 2, 2, 8)), jnp.full((1, 2, 2), EMPTY)
    out, lse = merge_states(zeros, empty, zeros, empty)
    assert_same_bits(out, zeros)
    assert_same_bits(lse, empty)


def test_merging_commutes_to_the_bit():
    a, b = state(1), state(2)
    for x, y in zip(merge_states(*a, *b), merge_states(*b, *a), strict=True):
        assert_same_bits(x, y)


def test_merging_commutes_to_the_bit_at_one_weight():
    (out_a, lse), (out_b, _) = state(1), state(2)
    merged, swapped = merge_states(out_a, lse, out_b, lse), merge_states(out_b, lse, out_a, lse)
    for x, y in zip(merged, swapped, strict=True):
        assert_same_bits(x, y)


def test_an_eager_merge_moves_nothing_to_the_device():
    a, b = state(1), state(2)
    with jax.transfer_guard("disallow"):
        merge_states(*a, *b)


def test_far_apart_states_do_not_overflow():
    out, lse = state(3)
    merged = merge_states(out, lse + 1e4, -out, lse - 1e4)
    np.testing.assert_array_equal(np.asarray(merged[0]), np.asarray(out))
    assert np.isfinite(np.asarray(merged[1])).all()


def test_merge_works_under_jit_and_unbatched():
    a, b = state(1), state(2)
    eager = merge_states(*a, *b)
    for x, y in zip(eager, jax.jit(merge_states)(*a, *b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-6, atol=1e-6)
    flat = merge_states(a[0][0, 0, 0], a[1][0, 0, 0], b[0][0, 0, 0], b[1][0, 0, 0])
    np.testing.assert_allclose(np.asarray(flat[0]), np.asarray(eager[0][0, 0, 0]), rtol=1e-6)


def test_bad_states_are_refused_with_names():
    out, lse = state(1)
    with pytest.raises(ValueError, match=r"out_a has shape .* out_b has"):
        merge_states(out, lse, out[:1], lse)
    with pytest.raises(ValueError, match=r"lse_b has shape"):
        merge_states(out, lse, out, lse[:1])
    with pytest.raises(TypeError, match="lse_a has dtype"):
        merge_states(out, lse.astype(jnp.float16), out, lse)
    with pytest.raises(TypeError, match=r"out_a has dtype .* out_b has"):
        merge_states(out, lse, out.astype(jnp.float16), lse)
    with pytest.raises(TypeError, match="lse_a is a float"):
        merge_states(out, 0.0, out, lse)


def test_gradients_pass_by_what_an_empty_state_holds():
    out, lse = state(1)
    empty = (jnp.full_like(out, jnp.nan), jnp.full_like(lse, EMPTY))

    def loss(out, lse):
        merged, merged_lse = merge_states(out, lse, *empty)
        return jnp.sum(merged) + jnp.sum(merged_lse)

    d_out, d_lse = jax.grad(loss, (0, 1))(out, lse)
    np.testing.assert_array_equal(np.asarray(d_out), 1.0)
    np.testing.assert_array_equal(np.asarray(d_lse), 1.0)


@pytest.mark.parametrize("odd", [jnp.nan, jnp.inf])
def test_an_empty_state_is_neutral_to_odd_ones_too(odd):
    out, lse = state(1)
    merged = merge_states(
        out, jnp.full_like(lse, odd), jnp.zeros_like(out), jnp.full_like(lse, EMPTY)
    )
    assert_same_bits(merged[0], out)
    assert_same_bits(merged[1], jnp.full_like(lse, odd))
