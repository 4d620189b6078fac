"""Starts, windows, soft caps and sinks: the reference and the gradients against the definition.

In float64 and row by row, the definition is ``oracle.define``. Tolerances are for float32: relative
to the largest element, as in test_gradients.py.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from bounds import assert_same_bits, assert_within, lse_bound, output_bound
from cases import MASKS, Case

from jax_fa import backward, prefill_attention, reference
from jax_fa.visible import seen_by_any, visible_slots

INT32 = np.iinfo(np.int32)
TOLERANCE = 2e-5


class Crossing(NamedTuple):
    """Operands and options of one call."""

    arrays: dict  # q, k, v, d_out, d_lse
    positions: np.ndarray
    options: dict  # starts, sliding_window, logits_soft_cap, sinks; any of them absent

    @property
    def scale(self):
        return np.float32(0.4)

    @property
    def seen(self):
        masks = {n: self.options[n] for n in ("starts", "sliding_window") if n in self.options}
        return oracle.sees(self.positions, self.arrays["k"].shape[1], **masks)

    def changed(self, **arrays):
        return self._replace(arrays=self.arrays | arrays)

    def without(self, *names):
        return self._replace(options={n: x for n, x in self.options.items() if n not in names})


def crossing(seed, *, q_len=None, slots=None, every_option=False):
    """Random shapes, rows anywhere, each option there or not."""
    rng = np.random.default_rng(seed)
    batch, kv_heads, group = rng.integers(1, 3, 3)
    q_len = int(rng.choice([1, 7, 40, 261])) if q_len is None else q_len
    slots = int(rng.choice([3, 60, 300, 517])) if slots is None else slots
    q_heads, head_dim = int(kv_heads * group), 8

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    arrays = {
        "q": 2 * normal(batch, q_len, q_heads, head_dim),
        "k": normal(batch, slots, kv_heads, head_dim).astype(np.float16),
        "v": normal(batch, slots, kv_heads, head_dim).astype(np.float16),
        "d_out": normal(batch, q_len, q_heads, head_dim),
        "d_lse": normal(batch, q_len, q_heads),
    }
    positions = rng.integers(-5, slots + 30, (batch, q_len), dtype=np.int32)
    if rng.random() < 0.5:
        positions.sort(axis=1)
    positions[0, 0] = rng.choice([INT32.min, INT32.max, slots - 1])
    of_rows = (batch, q_len) if rng.random() < 0.5 else (batch,)
    sinks = normal(q_heads)
    sinks[rng.random(q_heads) < 0.2] = -np.inf
    options = {
        "starts": rng.integers(-9, slots, of_rows, dtype=np.int32) // 2,
        "sliding_window": int(rng.choice([1, 2, 17, 256, 400, 2**31 - 1, 2**40])),
        "logits_soft_cap": float(rng.choice([0.5, 3.0, 50.0])),
        "sinks": sinks,
    }
    chosen = {n: x for n, x in options.items() if every_option or rng.random() < 0.6}
    return Crossing(arrays, positions, chosen)


def reference_of(case, q, k, v, sinks=None):
    options = {n: jnp.asarray(x) if n == "starts" else x for n, x in case.options.items()}
    options.pop("sinks", None)
    attend = jax.jit(functools.partial(reference.attend, scale=case.scale, **options))
    return attend(q, k, v, jnp.asarray(case.positions), sinks=sinks)


def gradients_of(case, **arrays):
    """backward's [d_q, d_k, d_v], and d_sinks if there are sinks."""
    arrays = {n: jnp.asarray(x) for n, x in (case.arrays | arrays).items()}
    options = dict(case.options)
    starts, sinks = (arrays.pop(n, options.pop(n, None)) for n in ("starts", "sinks"))
    starts, sinks = (x if x is None else jnp.asarray(x) for x in (starts, sinks))
    _, lse = reference_of(case, *(arrays[n] for n in "qkv"), sinks)
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks, (lse.shape[0], *sinks.shape))
    operands = backward.Operands(
        **arrays, positions=jnp.asarray(case.positions), lse=lse, starts=starts, sinks=sinks
    )
    static = tuple(sorted(options.items()))
    d_q, d_k, d_v, *d_sinks = _compiled_gradients(operands, case.scale, static)
    return [d_q, d_k, d_v, *(jnp.sum(d, axis=0) for d in d_sinks)]


def _gradients(operands, scale, options):
    return backward.gradients(operands, scale, **dict(options))


_compiled_gradients = jax.jit(_gradients, static_argnums=(1, 2))


def pulled_back(case, function):
    """Gradients of sum(d_out * out) + sum(d_lse * lse) for what ``function`` gives, by autodiff."""
    names = ["q", "k", "v", *(["sinks"] if "sinks" in case.options else [])]

    def loss(*differentiated):
        out, lse = function(*differentiated)
        d_out, d_lse = (jnp.asarray(case.arrays[n], out.dtype) for n in ("d_out", "d_lse"))
        of_lse = jnp.where(jnp.isfinite(lse), lse, 0)
        return jnp.sum(d_out * out) + jnp.sum(d_lse * of_lse)

    return loss, [(case.arrays | case.options)[n] for n in names]


def defined(case, order=1):
    """(out, lse, gradients) in float64; with order=2 those of the sum of the squared gradients."""
    with jax.enable_x64(True):
        seen, cap = jnp.asarray(case.seen), case.options.get("logits_soft_cap")

        def function(q, k, v, sinks=None):
            return oracle.define(
                q, k, v, seen, scale=float(case.scale), logits_soft_cap=cap, sinks=sinks
            )

        loss, given = pulled_back(case, function)
        given = [jnp.asarray(x, jnp.float64) for x in given]
        which = tuple(range(len(given)))
        found = jax.grad(loss, which)
        if order == 2:
            first = found
            found = jax.grad(lambda *x: sum(jnp.sum(jnp.square(g)) for g in first(*x)), which)
        results = jax.jit(lambda *x: (*function(*x), *found(*x)))(*given)
        return [np.asarray(x) for x in results]


def assert_close(got, want, rtol=TOLERANCE):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    odd = ~np.isfinite(want)
    np.testing.assert_array_equal(got[odd], want[odd])
    size = max(1.0, np.abs(want[~odd]).max(initial=0))
    np.testing.assert_allclose(got[~odd], want[~odd], rtol=0, atol=rtol * size)


def assert_all_same_bits(got, want):
    for which, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(a, b, ("d_q", "d_k", "d_v", "d_sinks")[which])


def test_visible_slots_are_those_of_the_definition_for_any_integers():
    rng = np.random.default_rng(3)
    edges = np.asarray([INT32.min, INT32.min + 1, -1, 0, 1, 7, INT32.max - 1, INT32.max])
    positions = rng.choice([*edges, *range(2, 12)], 400).astype(np.int32)
    starts = rng.choice([*edges, *range(2, 12)], 400).astype(np.int32)
    for slots in (0, 1, 9, INT32.max):
        for window in (None, 1, 2, 5, 2**31 - 1, 2**31, 2**40):
            for first in (None, starts):
                got = visible_slots(
                    jnp.asarray(positions),
                    slots,
                    starts=None if first is None else jnp.asarray(first),
                    sliding_window=window,
                )
                want = [
                    oracle.interval(int(p), None if first is None else int(first[i]), window, slots)
                    for i, p in enumerate(positions)
                ]
                assert got.lo.dtype == got.hi.dtype == jnp.int32
                np.testing.assert_array_equal(np.stack(got, axis=1), want)


def test_slots_that_some_row_sees():
    case = crossing(8, q_len=5, slots=60, every_option=True)
    visible = visible_slots(
        jnp.asarray(case.positions), 60, starts=jnp.asarray(case.options["starts"]),
        sliding_window=case.options["sliding_window"],
    )  # fmt: skip
    np.testing.assert_array_equal(seen_by_any(visible, 60), case.seen.any(axis=1))


@pytest.mark.parametrize("seed", range(10))
def test_the_reference_and_the_gradients_are_those_of_the_definition(seed):
    case = crossing(seed)
    print(seed, case.options, {n: x.shape for n, x in case.arrays.items()})
    out, lse, *want = defined(case)
    sinks = case.options.get("sinks")
    arrays = [jnp.asarray(case.arrays[n]) for n in "qkv"]
    got_out, got_lse = reference_of(case, *arrays, sinks if sinks is None else jnp.asarray(sinks))
    assert_close(got_out, out)
    assert_close(got_lse, lse)
    empty = ~case.seen.any(axis=2)
    assert not np.asarray(got_out)[empty].any()
    got = gradients_of(case)
    for g, w in zip(got, want, strict=True):
        assert_close(g, w)
    assert not np.asarray(got[0])[empty].any()
    for gradient in got[1:3]:
        assert not np.asarray(gradient)[~case.seen.any(axis=1)].any()


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_the_bounds_hold_the_reference_to_the_definition(mask):
    case = Case("masked", batch=2, q_len=40, n_past=90, head_dim=16, placement="anywhere")
    operands, options = case.arrays(), mask.options(case)
    q, k, v, positions = operands
    got = oracle.attend(*operands, return_lse=True, **options)
    seen = oracle.sees(
        positions,
        case.slots,
        starts=options.get("starts"),
        sliding_window=options.get("sliding_window"),
    )
    of_scores = {n: options[n] for n in ("logits_soft_cap", "sinks") if n in options}
    kv = (x.astype(jnp.float32) for x in (k, v))
    want = oracle.define(q, *kv, jnp.asarray(seen), scale=0.25, **of_scores)
    bounds = output_bound("cpu", *operands, **options), lse_bound("cpu", q, k, **options)
    for a, b, bound, what in zip(got, want, bounds, ("out", "lse"), strict=True):
        assert_within(a, b, bound, what)


@pytest.mark.parametrize("seed", [100, 101])
def test_the_gradients_are_those_of_the_reference(seed):
    case = crossing(seed, q_len=40, slots=300, every_option=True)
    loss, given = pulled_back(case, lambda *x: reference_of(case, *x))
    given = [jnp.asarray(x, jnp.float32) for x in given]
    want = jax.jit(jax.grad(loss, tuple(range(len(given)))))(*given)
    for g, w in zip(gradients_of(case), want, strict=True):
        assert_close(g, w)


def test_second_gradients_are_those_of_the_definition():
    case = crossing(200, q_len=12, slots=280, every_option=True)
    _, _, *want = defined(case, order=2)

    def squares(q, k, v, sinks):
        found = gradients_of(case, q=q, k=k, v=v, sinks=sinks)
        return sum(jnp.sum(jnp.square(g)) for g in found)

    given = [jnp.asarray(case.arrays[n], jnp.float32) for n in "qkv"]
    got = jax.jit(jax.grad(squares, (0, 1, 2, 3)))(*given, jnp.asarray(case.options["sinks"]))
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, 1e-4)


@pytest.mark.parametrize("seed", [300, 301, 302])
def test_what_nobody_sees_changes_no_bit(seed):
    """Slots on both sides, and the queries and cotangents of empty rows."""
    case = crossing(seed, q_len=40, slots=600, every_option=True)
    case = case._replace(options=case.options | {"sliding_window": 17})
    unseen, empty = ~case.seen.any(axis=1), ~case.seen.any(axis=2)
    assert unseen.any() and empty.any()
    clean = gradients_of(case)
    poisoned = {n: np.array(case.arrays[n]) for n in ("q", "k", "v", "d_out")}
    for name, nobody in (("q", empty), ("d_out", empty), ("k", unseen), ("v", unseen)):
        poisoned[name][nobody] = np.nan
    assert_all_same_bits(gradients_of(case.changed(**poisoned)), clean)


@pytest.mark.parametrize("which", ["k", "v"])
def test_a_nan_stays_with_the_rows_that_see_it(which):
    """Also where it comes back: as the cotangent of the rows whose out it made NaN."""
    case = crossing(400, q_len=300, slots=300)
    case = case._replace(options={"sliding_window": 20, "logits_soft_cap": 3.0})
    slot = 150
    hit = case.seen[:, :, slot]  # [B, T]
    touched = (case.seen & hit[:, :, None]).any(axis=1)  # slots that such a row sees
    assert hit.any() and not hit.all() and not touched.all()
    poisoned, d_out = np.array(case.arrays[which]), np.array(case.arrays["d_out"])
    poisoned[:, slot] = np.nan
    d_out[hit] = np.nan
    clean = gradients_of(case)
    dirty = gradients_of(case.changed(**{which: poisoned, "d_out": d_out}))
    for a, b, reached in zip(clean, dirty, (hit, touched, touched), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert_same_bits(a[~reached], b[~reached])
        assert np.isnan(b[reached]).all(), "the poison was not read"


def test_options_that_change_nothing_change_no_bit():
    case = crossing(500, q_len=40, slots=300, every_option=True)
    plain = case.without("starts", "sliding_window", "sinks")
    arrays = [jnp.asarray(case.arrays[n]) for n in "qkv"]
    want, wanted = reference_of(plain, *arrays), gradients_of(plain)
    q_heads = case.arrays["q"].shape[2]
    idle = {
        "starts": np.full(case.positions.shape[:1], -3, np.int32),
        "sliding_window": 2**31,  # a position may be 2^31 - 1
        "sinks": np.full(q_heads, -np.inf, np.float32),
    }
    for name, value in idle.items():
        other = plain._replace(options=plain.options | {name: value})
        sinks = value if name == "sinks" else None
        for a, b in zip(reference_of(other, *arrays, sinks), want, strict=True):
            assert_same_bits(a, b, name)
        got = gradients_of(other)
        assert_all_same_bits(got[:3], wanted)
        assert not any(np.asarray(x).any() for x in got[3:])


def test_empty_rows_give_their_sink_and_its_gradient():
    case = crossing(600, q_len=7, slots=60, every_option=True)
    case = case._replace(positions=np.full_like(case.positions, -1))
    arrays = [jnp.asarray(case.arrays[n]) for n in "qkv"]
    sinks = np.array(case.options["sinks"])
    sinks[:1] = -np.inf
    case = case._replace(options=case.options | {"sinks": sinks})
    out, lse = reference_of(case, *arrays, jnp.asarray(sinks))
    assert not np.asarray(out).any()
    assert_same_bits(lse, np.broadcast_to(sinks, lse.shape))
    *zeros, d_sinks = gradients_of(case)
    assert not any(np.asarray(x).any() for x in zeros)
    want = np.where(np.isinf(sinks), 0, case.arrays["d_lse"].sum(axis=(0, 1)))
    np.testing.assert_allclose(d_sinks, want, rtol=1e-5)


@pytest.mark.parametrize(("window", "blocks"), [(None, 10), (256, 7), (1, 4)])
def test_blocks_that_nobody_sees_are_not_computed(monkeypatch, window, blocks):
    computed = []
    block = backward._block

    def counted(*args):
        jax.debug.callback(lambda: computed.append(1))
        return block(*args)

    monkeypatch.setattr(backward, "_block", counted)
    length = 4 * 256
    rows, lse = jnp.ones((1, length, 1, 8)), jnp.zeros((1, length, 1))
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    operands = backward.Operands(rows, rows, rows, positions, lse, rows, lse)
    jax.block_until_ready(backward.gradients(operands, 1.0, sliding_window=window))
    jax.effects_barrier()
    assert len(computed) == blocks


def test_wide_types_and_strict_promotion_change_nothing():
    """Under enable_x64, ranges would be int64, and a strict promotion would refuse them."""
    case = crossing(700, q_len=7, slots=60, every_option=True)
    q, k, v = (jnp.asarray(case.arrays[n]) for n in "qkv")
    positions = jnp.asarray(case.positions)

    def everything():
        results = list(gradients_of(case))
        results += reference_of(case, q, k, v, jnp.asarray(case.options["sinks"]))
        for attention in (prefill_attention, reference.prefill_attention):
            loss = lambda *x, f=attention: jnp.sum(f(*x, positions))  # noqa: E731
            results += jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)[1]
        return results

    want = everything()
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        got = everything()
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)
