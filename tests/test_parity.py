"""Every kernel against the reference, over the table of named cases."""

import numpy as np
import oracle
import pytest
from bounds import ORIGINAL_GATE, assert_within, lse_bound, output_bound
from cases import CASES


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case_matches_reference(attention, kernel, case):
    q, k, v, positions = case.arrays()
    out, lse = attention(q, k, v, positions, return_lse=True)
    want, want_lse = oracle.attend(q, k, v, positions, return_lse=True)
    assert out.dtype == q.dtype and lse.dtype == np.float32
    assert_within(out, want, output_bound(kernel, q, k, v, positions))
    assert_within(lse, want_lse, lse_bound(kernel, q, k), "lse")
    if case.kv_dtype == "float16":
        worst = np.abs(np.asarray(out, np.float32) - np.asarray(want, np.float32)).max(initial=0)
        assert worst <= ORIGINAL_GATE


@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-4, 7.0])
def test_scale_matches_reference(attention, kernel, scale):
    from cases import BY_NAME

    q, k, v, positions = BY_NAME["tile_plus_one"].arrays()
    out, lse = attention(q, k, v, positions, scale=scale, return_lse=True)
    want, want_lse = oracle.attend(q, k, v, positions, scale=scale, return_lse=True)
    assert_within(lse, want_lse, lse_bound(kernel, q, k, scale), "lse")
    # At scale 7 the first-order bound is looser than the values themselves; lse is what tells.
    assert_within(out, want, output_bound(kernel, q, k, v, positions, scale))


def test_lse_is_not_computed_differently_without_being_asked_for(attention):
    from bounds import assert_same_bits
    from cases import BY_NAME

    arrays = BY_NAME["gqa_3"].arrays()
    alone = attention(*arrays)
    with_lse, _ = attention(*arrays, return_lse=True)
    assert_same_bits(alone, with_lse)


def test_reference_matches_a_float64_loop():
    """The definition itself, against the contract's words written as a loop."""
    from cases import BY_NAME

    for name in ("anywhere", "padded_head", "gqa_3", "head_dim_46", "kv_shorter_than_q"):
        q, k, v, positions = BY_NAME[name].arrays()
        out, lse = oracle.attend(q, k, v, positions, return_lse=True)
        want, want_lse = _float64_loop(q, k, v, np.asarray(positions))
        np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(np.asarray(lse, np.float64), want_lse, rtol=2e-5, atol=2e-5)


def _float64_loop(q, k, v, positions):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, tokens, q_heads, head_dim = q.shape
    group = q_heads // k.shape[2]
    out, lse = np.zeros_like(q), np.full(q.shape[:3], -np.inf)
    for b, t, h in np.ndindex(batch, tokens, q_heads):
        seen = max(0, min(int(positions[b, t]), k.shape[1] - 1) + 1)
        if seen == 0:
            continue
        scores = k[b, :seen, h // group] @ q[b, t, h] / np.sqrt(head_dim)
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights @ v[b, :seen, h // group] / weights.sum()
        lse[b, t, h] = scores.max() + np.log(weights.sum())
    return out, lse
