"""How far a kernel may be from the reference: derived from its roundings and the data.

Let u be the unit roundoff of a 16-bit type (half its epsilon). A matrix-unit kernel rounds

* the scaled query once to 16 bits: each score moves by at most ``u * scale * sum_d |q_d k_d|``; the
  roundings are independent, so the probabilistic form (Higham & Mary, 2019, "A new approach to
  probabilistic rounding error analysis") holds: ``lambda * u * scale * sqrt(sum_d (q_d k_d)^2)``,
  with lambda = 6 exceeded with probability below 1e-7 a score;
* each probability once to 16 bits: a relative u of each term of P.V.

A score error of delta moves softmax weights by a factor within exp(+-2 delta), so the output by at
most ``2 delta * sum_s p_s |v_s|`` to first order. float32 arithmetic adds ``(D + S)`` roundings of
2^-24 in the worst case, relative to the same sums. Kernel and reference both round the result to
q's dtype: one unit in the last place apart at most.

A soft cap's slope is at most 1, so a score moves no further for it, but for the cap's own
arithmetic: at most 1e-5 of the cap. A sink is one more score, without a rounding of its own, whose
value is 0.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import oracle

# The gate of the CUDA kernel this library began as: float16 caches, unit-normal data.
ORIGINAL_GATE = 5e-3

_UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_LAMBDA = 6.0

# Kernels whose matrix products take 16-bit inputs; the others compute in float32 throughout.
MATRIX_UNIT_KERNELS = {"portable", "hopper"}


def _score_scale(q: jnp.ndarray, k: jnp.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """For each (b, t, h): the largest over slots of scale*sqrt(sum (qk)^2) and scale*sum |qk|.

    Over all slots, seen or not: an upper bound that needs no mask. Not finite slots count as 0.
    """
    q32, k32 = (
        np.asarray(q, np.float32),
        np.nan_to_num(np.asarray(k, np.float32), posinf=0, neginf=0),
    )
    group = q32.shape[-2] // k32.shape[-2]
    k32 = np.repeat(k32, group, axis=-2)
    squares = np.einsum("bthd,bshd->bths", q32**2, k32**2)
    sums = np.einsum("bthd,bshd->bths", np.abs(q32), np.abs(k32))
    return (
        abs(scale) * np.sqrt(squares.max(axis=-1, initial=0)),
        abs(scale) * sums.max(axis=-1, initial=0),
    )


def _cap_error(options):
    """How far a soft cap may move a score, beside what the score moves before it."""
    return 1e-5 * (options.get("logits_soft_cap") or 0.0)


def output_bound(kernel, q, k, v, positions, scale=None, **options):
    """Elementwise bound on |kernel - reference|, like out: [B, T, Hq, D] float32.

    ``options``: starts, sinks, sliding_window, logits_soft_cap, as for ``oracle.attend``.
    """
    head_dim, slots = q.shape[-1], k.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    rms, total = _score_scale(q, k, scale)
    u32 = _UNIT_ROUNDOFF["float32"]
    delta = head_dim * u32 * total + _cap_error(options)
    roundings = (slots + 16) * u32
    if kernel in MATRIX_UNIT_KERNELS:
        u16 = _UNIT_ROUNDOFF[str(k.dtype)]
        delta = delta + _LAMBDA * u16 * rms
        roundings = roundings + u16
    weighted = np.asarray(
        oracle.attend(q.astype(jnp.float32), k, jnp.abs(v), positions, scale=scale, **options)
    )
    u_out = 0.0 if q.dtype == jnp.float32 else 2 * _UNIT_ROUNDOFF[str(q.dtype)]
    return weighted * (2 * delta[..., None] + roundings + u_out) + 1e-7


def lse_bound(kernel, q, k, scale=None, **options):
    """Elementwise bound on |kernel - reference| of lse, [B, T, Hq] float32.

    lse is a smooth maximum of the scores: it moves by at most delta, plus the roundings of the sum
    and of the logarithm, relative to its own size (at most max|score| + log S).
    """
    head_dim, slots = q.shape[-1], k.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    rms, total = _score_scale(q, k, scale)
    u32 = _UNIT_ROUNDOFF["float32"]
    sinks = np.asarray(options.get("sinks", 0.0), np.float32)
    size = total + np.where(np.isfinite(sinks), np.abs(sinks), 0) + np.log(slots + 1)
    bound = head_dim * u32 * total + (slots + 16) * u32 + 4 * u32 * size + _cap_error(options)
    if kernel in MATRIX_UNIT_KERNELS:
        bound = bound + _LAMBDA * _UNIT_ROUNDOFF[str(k.dtype)] * rms
    return bound + 1e-7


def assert_within(got, want, bound, what="out"):
    """Elementwise |got - want| <= bound; not finite elements must agree exactly, and come first."""
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    odd = ~np.isfinite(got) | ~np.isfinite(want)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    if np.any(odd & ~same):
        at = tuple(np.argwhere(odd & ~same)[0])
        raise AssertionError(
            f"{what}: {np.sum(odd & ~same)} not finite elements differ; first at {at}: "
            f"got {got[at]}, expected {want[at]}"
        )
    if got.size == 0:
        return
    with np.errstate(invalid="ignore"):
        excess = np.where(odd, 0.0, np.abs(got - want) / np.broadcast_to(bound, got.shape))
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    assert excess[worst] <= 1.0, (
        f"{what}: {np.sum(excess > 1)} elements out of bounds; worst at {worst}: got {got[worst]}, "
        f"expected {want[worst]}, {excess[worst]:.2f} times the bound"
    )


def assert_same_bits(a, b, what="out"):
    """Equal bit for bit, NaN and signed zeros included."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype and a.shape == b.shape, (
        f"{what}: {a.dtype}{a.shape}, {b.dtype}{b.shape}"
    )
    bits = np.dtype(f"u{a.dtype.itemsize}")
    differ = a.view(bits) != b.view(bits)
    if differ.any():
        at = tuple(np.argwhere(differ)[0])
        raise AssertionError(
            f"{what}: {differ.sum()} elements differ; first at {at}: {a[at]}, {b[at]}"
        )
