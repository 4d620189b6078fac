"""Caches stacked over layers: the bits of one layer alone, read and written where it lies."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import assert_same_bits
from cases import BY_NAME, Case
from jax import export

import jax_fa
from jax_fa import prefill_attention, reference, update_kv_cache

LAYERS = 3

CASES = [
    BY_NAME[name]
    for name in (
        "two_tiles_plus_one",
        "gqa_7",
        "anywhere",
        "all_padding",
        "batch_5",
        "decode_long",
        "one_slot",
        "head_dim_46",
        "head_dim_256_bfloat16",
        "q_bfloat16_cache_bfloat16_d64",
        "q_float16_cache_float16_d128",
    )
]


def stack(one, layer, axis=0):
    """``one`` as that layer of a stack; NaN is all around it."""
    others = [jnp.full_like(one, jnp.nan)] * LAYERS
    others[layer] = one
    return jnp.stack(others, axis)


def stacked(case, layer):
    q, k, v, positions = case.arrays()
    return q, stack(k, layer), stack(v, layer), positions


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_gives_the_bits_it_gives_alone(attention, case, layer):
    got = attention(*stacked(case, layer), layer=layer, return_lse=True)
    for a, b in zip(got, attention(*case.arrays(), return_lse=True), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("large", [1, 60])
def test_slots_that_kernels_read_a_second_time_are_of_the_layer(attention, large):
    """A NaN that some rows see, and scores that outgrow a float16's weights."""
    case = Case("again", batch=2, q_len=140, n_past=70, spare=20, kv_dtype="float16")
    q, k, v, positions = case.arrays()
    q, k = q.astype(jnp.float16), k * jnp.linspace(1, large, k.shape[1])[:, None, None]
    k, v = k.astype(jnp.float16), v.at[:, 150, 1, 3].set(jnp.nan)
    got = attention(q, stack(k, 1), stack(v, 1), positions, layer=1)
    assert np.isnan(np.asarray(got, np.float32)).any()
    assert_same_bits(got, attention(q, k, v, positions))


def test_layers_that_are_data_share_one_program_and_are_clamped(attention):
    q, k, v, positions = Case("data", batch=2, q_len=9, n_past=30).arrays()
    ks, vs = (jnp.stack([x, -x, 2 * x]) for x in (k, v))
    jitted = jax.jit(lambda q, layer: attention(q, ks, vs, positions, layer=layer))
    step = partial(jitted, q)
    for layer, read in ((0, 0), (1, 1), (2, 2), (-1, 0), (3, 2), (2**31 - 1, 2), (-(2**31), 0)):
        want = attention(q, ks[read], vs[read], positions)
        assert_same_bits(step(jnp.int32(layer)), want)
        want = reference.prefill_attention(q, ks[read], vs[read], positions)
        got = reference.prefill_attention(q, ks, vs, positions, layer=jnp.int32(layer))
        assert_same_bits(got, want)
    assert jitted._cache_size() == 1


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int64, np.array, jnp.asarray, jnp.uint32])
def test_kinds_of_layers(kind):
    q, ks, vs, positions = stacked(Case("kinds", q_len=3, n_past=4), 2)
    want = prefill_attention(q, ks[2], vs[2], positions)
    assert_same_bits(prefill_attention(q, ks, vs, positions, layer=kind(2)), want)


def test_unbatched_is_a_batch_of_one():
    q, ks, vs, positions = stacked(Case("flat", q_len=5, n_past=4), 1)
    want = prefill_attention(q, ks, vs, positions, layer=1)
    got = prefill_attention(q[0], ks[:, 0], vs[:, 0], positions[0], layer=1)
    assert_same_bits(got, want[0])
    rows = [jnp.ones((1, 5, 2, 64)), jnp.zeros((1, 5, 2, 64))]
    want = update_kv_cache(ks, vs, *rows, positions, layer=1)
    got = update_kv_cache(ks[:, 0], vs[:, 0], *(x[0] for x in rows), positions[0], layer=1)
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b[:, 0])


@pytest.mark.parametrize("layer", [0, 2, jnp.int32(-4), jnp.int32(9)])
def test_rows_land_in_their_layer_alone(layer):
    shape = (LAYERS, 2, 12, 2, 8)
    rng = np.random.default_rng(1)
    ks, vs = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for _ in "kv")
    rows = [jnp.asarray(rng.standard_normal((2, 5, 2, 8)), jnp.float32) for _ in "kv"]
    positions = jnp.asarray([[3, 3, -1, 12, 0], [11, 5, 2, 5, 2**31 - 1]])
    written = int(np.clip(layer, 0, LAYERS - 1))
    want = update_kv_cache(ks[written], vs[written], *rows, positions)
    for update in (update_kv_cache, jax.jit(update_kv_cache)):
        got = update(ks, vs, *rows, positions, layer=layer)
        for new, old, one in zip(got, (ks, vs), want, strict=True):
            assert_same_bits(new, old.at[written].set(one))


# In place


def over_layers(k_caches, v_caches, x, positions, kv_heads=2):
    """Layers of update and attention, the caches carried whole."""

    def layer(carry, i):
        k_caches, v_caches, x = carry
        new = x[..., :kv_heads, :]
        k_caches, v_caches = update_kv_cache(k_caches, v_caches, new, new, positions, layer=i)
        return (k_caches, v_caches, prefill_attention(x, k_caches, v_caches, positions, layer=i)), 0

    layers = jnp.arange(k_caches.shape[0])
    return jax.lax.scan(layer, (k_caches, v_caches, x), layers)[0]


def over_slices(k_caches, v_caches, x, positions):
    """The same with each layer cut out and put back, which copies it."""

    def layer(carry, i):
        k_caches, v_caches, x = carry
        new = x[..., :2, :]
        k, v = update_kv_cache(k_caches[i], v_caches[i], new, new, positions)
        x = prefill_attention(x, k, v, positions)
        return (k_caches.at[i].set(k), v_caches.at[i].set(v), x), 0

    layers = jnp.arange(k_caches.shape[0])
    return jax.lax.scan(layer, (k_caches, v_caches, x), layers)[0]


def memory_of(step, layers, shape, slots=4096, dtype=jnp.float16, tokens=4, kv_heads=2):
    """Temporary bytes of a donating step on ``shape`` + [L, S, Hk, 64] stacks, and a layer's."""
    batch, rest = shape
    cache = jax.ShapeDtypeStruct((*batch, layers, *rest, slots, kv_heads, 64), dtype)
    x = jax.ShapeDtypeStruct((*batch, *rest, tokens, 4, 64), jnp.float32)
    positions = jax.ShapeDtypeStruct((*batch, *rest, tokens), jnp.int32)
    donating = jax.jit(step, donate_argnums=(0, 1))
    analysis = donating.lower(cache, cache, x, positions).compile().memory_analysis()
    layer_bytes = 2 * int(np.prod((*batch, *rest))) * slots * kv_heads * 64 * 2
    assert analysis.alias_size_in_bytes >= layers * layer_bytes
    return analysis.temp_size_in_bytes, layer_bytes


def skip_where_scatters_widen(dtype):
    if dtype == jnp.bfloat16 and jax.default_backend() == "cpu" and jax.__version_info__ < (0, 11):
        pytest.skip("jaxlib 0.10 widens a bfloat16 scatter on CPUs; jax 0.11 or a GPU runs this")


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_scan_over_donated_stacks_copies_nothing(dtype):
    """What is left is the int32 [B, S] of update_kv_cache, and rows."""
    skip_where_scatters_widen(dtype)
    batch, slots = 2, 4096
    for layers in (2, 12):
        temporaries, layer_bytes = memory_of(over_layers, layers, ((), (batch,)), slots, dtype)
        assert temporaries <= batch * slots * 4 + 64 * 1024 < layer_bytes / 8
    # So that the bound tells: cutting layers out is over it.
    temporaries, layer_bytes = memory_of(over_slices, 12, ((), (batch,)), slots, jnp.float16)
    assert temporaries >= layer_bytes


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("batch", [(), (1,), (2,)], ids=str)
def test_a_scan_of_few_rows_copies_nothing(batch, tokens, kv_heads):
    """Decoding: XLA treats scatters of one row, and axes of one, by rules of their own."""

    def step(*operands):
        return over_layers(*operands, kv_heads=kv_heads)

    temporaries, layer_bytes = memory_of(
        step, 4, ((), batch), slots=8192, tokens=tokens, kv_heads=kv_heads
    )
    assert temporaries < layer_bytes / 4


def test_a_scan_under_vmap_copies_nothing():
    """A model of one sequence, [L, S, Hk, D], mapped over sequences: [V, L, S, Hk, D]."""
    temporaries, layer_bytes = memory_of(jax.vmap(over_layers), 6, ((3,), ()))
    assert temporaries < layer_bytes / 8


@pytest.mark.parametrize("mapped", [False, True])
def test_a_scan_in_place_gives_the_bits_of_one_with_slices(mapped):
    rng = np.random.default_rng(4)
    ks, vs = (jnp.asarray(rng.standard_normal((2, 4, 1, 40, 2, 64)), jnp.float16) for _ in "kv")
    x = jnp.asarray(rng.standard_normal((2, 1, 5, 4, 64)), jnp.float32)
    positions = jnp.asarray([[[7, 8, 9, 10, -1]], [[0, 1, 39, 2, 3]]])
    operands = (ks, vs, x, positions) if mapped else (ks[0], vs[0], x[0], positions[0])
    change = jax.vmap if mapped else lambda f: f
    got, want = (jax.jit(change(f))(*operands) for f in (over_layers, over_slices))
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)


def test_a_scan_over_donated_stacks_stays_where_it_is():
    ks, vs = (jnp.zeros((4, 1, 512, 2, 64), jnp.float16) for _ in "kv")
    address = ks.unsafe_buffer_pointer()
    step = jax.jit(over_layers, donate_argnums=(0, 1))
    new, *_ = step(ks, vs, jnp.ones((1, 2, 4, 64)), jnp.asarray([[0, 1]]))
    assert ks.is_deleted() and new.unsafe_buffer_pointer() == address


# Transformations

PATTERNS = [axes for axes in itertools.product((0, None), repeat=5) if axes != (None,) * 5]
SIZE = 2


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("axes", PATTERNS, ids=str)
def test_vmap_gives_the_bits_of_a_loop(axes, batch):
    shape = {"batch": batch, "q_len": 3, "kv_len": 12, "head_dim": 8, "placement": "anywhere"}
    elements = [Case(f"stack_vmap_{i}", **shape).arrays() for i in range(SIZE * LAYERS)]
    elements = [
        (
            elements[i][0],
            *(jnp.stack([e[n] for e in elements[i::SIZE]]) for n in (1, 2)),
            elements[i][3],
            jnp.int32(2 - i),
        )
        for i in range(SIZE)
    ]
    operands = [
        elements[0][n] if axis is None else jnp.stack([e[n] for e in elements])
        for n, axis in enumerate(axes)
    ]

    def attend(q, k, v, positions, layer):
        return prefill_attention(q, k, v, positions, layer=layer, return_lse=True)

    got = jax.vmap(attend, axes)(*operands)
    for i in range(SIZE):
        one = [x if axis is None else x[i] for x, axis in zip(operands, axes, strict=True)]
        for a, b in zip(got, attend(*one), strict=True):
            assert_same_bits(a[i], b)


def test_nested_vmap_over_stacks():
    q, ks, vs, positions = stacked(Case("nested", q_len=3, n_past=9), 1)
    many = [jnp.stack([jnp.stack([x, 2 * x]), jnp.stack([3 * x, -x])]) for x in (q, ks, vs)]

    def attend(q, k, v):
        return prefill_attention(q, k, v, positions, layer=1)

    got = jax.vmap(jax.vmap(attend))(*many)
    for i, j in np.ndindex(2, 2):
        assert_same_bits(got[i, j], attend(*(x[i, j] for x in many)))


def test_gradients_are_those_of_the_layer_and_zero_elsewhere():
    q, k, v, positions = Case("grad_stack", batch=2, q_len=5, n_past=6).arrays()

    def loss(q, k, v, **options):
        out, lse = prefill_attention(q, k, v, positions, return_lse=True, **options)
        return jnp.sum(jnp.sin(out)) + jnp.sum(lse)

    want = jax.grad(loss, (0, 1, 2))(q, k, v)
    for layer in (1, jnp.int32(1)):
        grads = jax.grad(partial(loss, layer=layer), (0, 1, 2))
        got = grads(q, stack(k, 1), stack(v, 1))
        assert_same_bits(got[0], want[0])
        for d_stack, d_one in zip(got[1:], want[1:], strict=True):
            assert_same_bits(d_stack[1], d_one)
            assert (np.asarray(d_stack[::2]) == 0).all()


def test_gradients_through_a_scan_over_stacks():
    ks, vs = (
        jnp.asarray(np.random.default_rng(n).standard_normal((3, 1, 9, 2, 64)), jnp.float16)
        for n in (1, 2)
    )
    x = jnp.asarray(np.random.default_rng(3).standard_normal((1, 3, 4, 64)), jnp.float32)
    positions = jnp.asarray([[3, 4, 5]])

    def gradients(step):
        def loss(k, v, x):
            return jnp.sum(step(k, v, x, positions)[2] ** 2)

        return jax.jit(jax.grad(loss, (0, 1, 2)))(ks, vs, x)

    for got, want in zip(gradients(over_layers), gradients(over_slices), strict=True):
        got, want = (np.asarray(g, np.float32) for g in (got, want))
        np.testing.assert_allclose(got, want, rtol=0, atol=2**-9 * np.abs(want).max())


def test_gradients_of_a_scan_keep_a_layer_for_each_step_and_not_the_stack():
    def bytes_of(step, layers):
        def loss(*operands):
            return jnp.sum(jnp.sin(step(*operands)[2]))

        cache = jax.ShapeDtypeStruct((layers, 1, 1024, 2, 64), jnp.float16)
        x = jax.ShapeDtypeStruct((1, 4, 4, 64), jnp.float32)
        positions = jax.ShapeDtypeStruct((1, 4), jnp.int32)
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(cache, cache, x, positions).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert bytes_of(over_layers, 16) < 1.25 * bytes_of(over_slices, 16)


def test_symbolic_layers_export_for_cpu_and_cuda_in_one():
    pytest.importorskip("flatbuffers")
    extents = export.symbolic_shape("layers, b, t, s")
    layers, b, t, s = extents
    cache = jax.ShapeDtypeStruct((layers, b, s, 2, 64), jnp.float16)
    shapes = (
        jax.ShapeDtypeStruct((b, t, 4, 64), jnp.float32),
        cache,
        cache,
        jax.ShapeDtypeStruct((b, t), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
    )

    def attend(q, k, v, positions, layer):
        return prefill_attention(q, k, v, positions, layer=layer)

    exported = export.export(
        jax.jit(attend), platforms=("cpu", "cuda"), disabled_checks=jax_fa.export_checks()
    )(*shapes)
    again = export.deserialize(exported.serialize())
    operands = (*stacked(Case("exported", batch=2, q_len=4, n_past=5), 2), jnp.int32(2))
    assert_same_bits(again.call(*operands), attend(*operands))
