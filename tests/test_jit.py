"""Inside JAX: jit, compilation counts, dtypes of the inputs, x64, threads, streams."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import assert_same_bits
from cases import Case
from scripts import run_script

import jax_fa
from jax_fa import prefill_attention


def test_one_compilation_serves_every_position(attention):
    q, k, v, _ = Case("jit", batch=2, q_len=16, n_past=496).arrays()
    traces = []

    @jax.jit
    def step(q, k, v, positions):
        traces.append(positions)
        return attention(q, k, v, positions)

    rows = np.arange(16, dtype=np.int32)
    for n_past in (0, 1, 63, 64, 300, 496, -16):
        positions = np.stack([n_past + rows, np.full(16, -1, np.int32)])
        out = step(q, k, v, positions)
        assert_same_bits(out, attention(q, k, v, positions))
    assert len(traces) == 1 and step._cache_size() == 1


def test_kinds_of_positions_share_one_trace():
    q, k, v, positions = Case("kinds", q_len=4, n_past=12).arrays()
    traces = []

    @jax.jit
    def step(q, k, v, positions):
        traces.append(1)
        return prefill_attention(q, k, v, positions, scale=0.25)

    outs = [step(q, k, v, p) for p in (positions, np.asarray(positions), jnp.arange(4)[None] + 12)]
    assert len(traces) == 1
    for out in outs[1:]:
        assert_same_bits(outs[0], out)


def test_kinds_of_scale_give_equal_bits():
    arrays = Case("scales", q_len=4, n_past=12).arrays()
    outs = [
        prefill_attention(*arrays, scale=s)
        for s in (
            0.25,
            np.float64(0.25),
            np.float32(0.25),
            np.float16(0.25),
            np.array(0.25),
            jnp.float32(0.25),
            jnp.asarray(0.25, jnp.bfloat16),
        )
    ]
    for out in outs[1:]:
        assert_same_bits(outs[0], out)
    one = prefill_attention(*arrays, scale=1.0)
    for s in (1, np.int64(1), np.uint8(1)):
        assert_same_bits(one, prefill_attention(*arrays, scale=s))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.uint32, np.int32])
def test_every_integer_dtype_of_positions_is_served(dtype):
    q, k, v, _ = Case("integers", q_len=3, kv_len=300).arrays()
    want = prefill_attention(q, k, v, jnp.asarray([[7, 100, 120]], jnp.int32))
    assert_same_bits(want, prefill_attention(q, k, v, jnp.asarray([[7, 100, 120]], dtype)))
    if np.issubdtype(dtype, np.signedinteger):
        padding = prefill_attention(q, k, v, jnp.full((1, 3), np.iinfo(dtype).min, dtype))
        assert_same_bits(padding, jnp.zeros_like(padding))


def test_unsigned_positions_beyond_int32_see_the_whole_cache():
    q, k, v, _ = Case("unsigned", q_len=2, kv_len=30).arrays()
    want = prefill_attention(q, k, v, jnp.asarray([[29, 29]], jnp.int32))
    got = prefill_attention(q, k, v, jnp.asarray([[2**31, 2**32 - 1]], jnp.uint32))
    assert_same_bits(want, got)


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
def test_numpy_inputs_are_served(kv_dtype):
    arrays = Case("numpy", q_len=3, kv_len=30, kv_dtype=kv_dtype).arrays()
    as_numpy = [np.asarray(x) for x in arrays]
    assert_same_bits(prefill_attention(*arrays), prefill_attention(*as_numpy))


def test_a_float64_numpy_query_is_what_jax_makes_of_it():
    """float32 without x64; with it, test_x64_mode_changes_nothing has it refused."""
    q, k, v, positions = Case("float64", q_len=3, kv_len=30).arrays()
    out = prefill_attention(np.asarray(q, np.float64), k, v, positions)
    assert_same_bits(out, prefill_attention(q, k, v, positions))


def test_weak_types_are_served_and_end_at_the_call():
    q, k, v, positions = Case("weak", q_len=3, kv_len=30).arrays()
    strong_q, strong_positions = jnp.full_like(q, 0.5), jnp.full_like(positions, 7)
    weak_q = jnp.broadcast_to(jnp.asarray(0.5), q.shape)
    weak_positions = jnp.broadcast_to(jnp.asarray(7), positions.shape)
    assert weak_q.weak_type and weak_positions.weak_type
    want = prefill_attention(strong_q, k, v, strong_positions, return_lse=True)
    got = prefill_attention(weak_q, k, v, weak_positions, return_lse=True)
    for a, b in zip(got, want, strict=True):
        assert not a.weak_type
        assert_same_bits(a, b)

    def layers(q, positions):
        def layer(x, _):
            return prefill_attention(x, k, v, positions), None

        return jax.lax.scan(layer, q, None, length=2)[0]

    assert_same_bits(layers(weak_q, weak_positions), layers(strong_q, strong_positions))
    d_q = jax.grad(lambda q: prefill_attention(q, k, v, weak_positions)[..., 0].sum())(weak_q)
    assert d_q.dtype == jnp.float32 and np.abs(np.asarray(d_q)).max() > 0


def test_unbatched_is_a_batch_of_one():
    arrays = Case("unbatched", q_len=30, n_past=3).arrays()
    out, lse = prefill_attention(*arrays, return_lse=True)
    flat_out, flat_lse = prefill_attention(*(x[0] for x in arrays), return_lse=True)
    assert flat_out.shape == out.shape[1:] and flat_lse.shape == lse.shape[1:]
    assert_same_bits(out[0], flat_out)
    assert_same_bits(lse[0], flat_lse)


def test_eval_shape_and_lowering_need_no_data():
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in Case("shapes", q_len=8).arrays()]
    out, lse = jax.eval_shape(lambda *a: prefill_attention(*a, return_lse=True), *shapes)
    assert out.shape == shapes[0].shape and lse.dtype == jnp.float32
    assert jax.jit(prefill_attention).lower(*shapes).compile() is not None
    _, k, v, positions = shapes
    caches = jax.eval_shape(jax_fa.update_kv_cache, k, v, k, v, positions)
    assert [(x.shape, x.dtype) for x in caches] == [(x.shape, x.dtype) for x in (k, v)]
    merged = jax.eval_shape(jax_fa.merge_states, out, lse, out, lse)
    assert [(x.shape, x.dtype) for x in merged] == [(x.shape, x.dtype) for x in (out, lse)]


def test_x64_mode_changes_nothing():
    """In a process of its own, since the flag is global."""
    script = """
import jax
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp, numpy as np, jax_fa
rng = np.random.default_rng(0)
q = jnp.asarray(rng.standard_normal((1, 3, 4, 64)), jnp.float32)
k, v = (jnp.asarray(rng.standard_normal((1, 40, 2, 64)), jnp.float16) for _ in range(2))
want = jax_fa.prefill_attention(q, k, v, jnp.asarray([[5, 39, -1]], jnp.int32), return_lse=True)
big = jnp.asarray([[5, 2**40, -(2**40)]], jnp.int64)
assert big.dtype == jnp.int64
got = jax.jit(lambda *a: jax_fa.prefill_attention(*a, return_lse=True))(q, k, v, big)
unsigned = jax_fa.prefill_attention(q, k, v, jnp.asarray([[5, 2**63, 2**64 - 1]], jnp.uint64))
assert [x.dtype for x in got] == [jnp.float32, jnp.float32], got
assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(want, got))
assert (np.asarray(unsigned[:, 1]) == np.asarray(want[0][:, 1])).all()
for scale in (0.125, np.float64(0.125), jnp.float64(0.125)):  # 1 / sqrt(64), the default
    scaled = jax_fa.prefill_attention(q, k, v, big, scale=scale)
    assert (np.asarray(scaled) == np.asarray(want[0])).all(), scale
k2, v2 = jax_fa.update_kv_cache(k, v, q[:, :, :2], q[:, :, 2:], big)
assert k2.dtype == jnp.float16
assert (np.asarray(k2[0, 5]) == np.asarray(q[0, 0, :2], np.float16)).all()
assert (np.asarray(k2[0, 6:]) == np.asarray(k[0, 6:])).all()
try:
    jax_fa.prefill_attention(q.astype(jnp.float64), k, v, big)
except TypeError as error:
    assert "float64" in str(error)
else:
    raise AssertionError("float64 q was served")
d_q, d_k, d_v = jax.grad(
    lambda q, k, v: jax_fa.prefill_attention(q, k, v, big).sum(), (0, 1, 2)
)(q, k, v)
assert [x.dtype for x in (d_q, d_k, d_v)] == [jnp.float32, jnp.float16, jnp.float16]
assert np.isfinite(np.asarray(d_q)).all() and np.abs(np.asarray(d_v)).max() > 0
out, lse = jax_fa.merge_states(*want, *want)
assert out.dtype == lse.dtype == jnp.float32
print("x64 ok")
"""
    assert "x64 ok" in run_script(script)


def test_calls_from_many_threads_are_right():
    from concurrent.futures import ThreadPoolExecutor

    cases = [Case(f"thread_{i}", q_len=20 + i, n_past=5 * i).arrays() for i in range(8)]
    want = [np.asarray(prefill_attention(*arrays)) for arrays in cases]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            got = pool.map(lambda arrays: np.asarray(prefill_attention(*arrays)), cases)
            for a, b in zip(want, got, strict=True):
                assert_same_bits(a, b)


def test_the_call_runs_after_what_it_depends_on():
    """Producers keep the device busy until just before the call, a consumer follows at once."""
    q, k, v, positions = Case(
        "stream",
        batch=2,
        q_len=64,
        n_past=128,
        head_dim=64,
        q_dtype="bfloat16",
        kv_dtype="bfloat16",
    ).arrays()
    mix = jnp.asarray(np.random.default_rng(83).standard_normal((64, 64)) / 8, jnp.bfloat16)

    @jax.jit
    def chain(q, k, v, positions):
        for _ in range(30):
            k = (k @ mix).astype(jnp.bfloat16)
        out = prefill_attention(q, k, v, positions)
        return out, (out.astype(jnp.float32) @ mix.astype(jnp.float32)).sum(), k

    first = chain(q, k, v, positions)
    assert_same_bits(first[0], prefill_attention(q, first[2], v, positions))
    for _ in range(20):
        for a, b in zip(first, chain(q, k, v, positions), strict=True):
            assert_same_bits(a, b)


def test_memory_does_not_grow_with_tokens_times_slots():
    """XLA knows of no temporary at all, and the handler's own scratch is bounded."""
    shapes = [
        jax.ShapeDtypeStruct((1, 4096, 8, 128), jnp.float32),
        *[jax.ShapeDtypeStruct((1, 4096, 2, 128), jnp.float16)] * 2,
        jax.ShapeDtypeStruct((1, 4096), jnp.int32),
    ]
    analysis = jax.jit(prefill_attention).lower(*shapes).compile().memory_analysis()
    assert analysis.temp_size_in_bytes == 0


def test_reference_takes_no_part_in_a_call(monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("the reference was called")

    monkeypatch.setattr(jax_fa.reference, "prefill_attention", forbidden)
    prefill_attention(*Case("alone", q_len=3).arrays())


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_numpy_positions_beyond_int32_keep_their_meaning(dtype):
    """Without x64 JAX itself would cut them to 32 bits, and 2^32 would be slot 0."""
    q, k, v, _ = Case("wide", q_len=2, kv_len=30).arrays()
    far = np.array([[2**32, 2**31 + 5]], dtype)
    want = prefill_attention(q, k, v, np.array([[29, 29]], np.int32))
    assert_same_bits(want, prefill_attention(q, k, v, far))
    if dtype == np.int64:
        padding = prefill_attention(q, k, v, np.array([[-(2**32), -(2**40)]]))
        assert_same_bits(padding, jnp.zeros_like(padding))
        caches = jax_fa.update_kv_cache(k, v, k[:, :2], v[:, :2], np.array([[2**32 + 3, -(2**32)]]))
        assert_same_bits(caches[0], k)
