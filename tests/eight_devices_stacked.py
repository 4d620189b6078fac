"""Caches stacked over layers, split over devices: nothing moves, and nothing is copied.

Run by test_sharding.py, as eight_devices.py is.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import assert_same_bits
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from split import (
    AUTO,
    COLLECTIVE,
    DEVICES,
    EXPLICIT,
    GRID,
    WHOLE,
    XY,
    Compiled,
    arrays,
    assert_right,
    grid,
    mesh,
    put,
    same_as_on_one_device,
)
from test_stacked import over_layers

from jax_fa import prefill_attention, sequence_parallel_prefill_attention, update_kv_cache

WAYS = {  # mesh axes and sizes, heads, how q and one layer of k and v are split
    "batch": (GRID, (8, 4), P("x"), P("x")),
    "heads": (GRID, (8, 4), P(None, None, "x"), P(None, None, "x")),
    "batch_and_heads": (GRID, (8, 4), P("x", None, "y"), P("x", None, "y")),
    "tokens": (GRID, (8, 4), P(None, XY), WHOLE),
    "mha": ({"x": DEVICES}, (8, 8), P(None, None, "x"), P(None, None, "x")),
    "mqa": ({"x": DEVICES}, (8, 1), P(None, None, "x"), WHOLE),
    "fewer_kv_heads_than_devices": ({"x": 8}, (8, 2), P(None, None, "x"), WHOLE),
    "whole_q_split_batch": (GRID, (8, 4), WHOLE, P("x")),
}


def stacks(q, k, v, positions):
    """Three layers, and the second of them as data."""
    return q, jnp.stack([-k, k, 2 * k]), jnp.stack([v, v, 2 * v]), positions, jnp.int32(1)


def attend(q, k, v, positions, layer):
    return tuple(prefill_attention(q, k, v, positions, layer=layer, return_lse=True))


def placed(name, kind):
    sizes, heads, q, kv = WAYS[name]
    operands, stack = stacks(*arrays(*heads)), P(None, *kv)
    return operands, put(operands, mesh(kind, **sizes), (q, stack, stack, P(*q[:2]), WHOLE))


@pytest.mark.parametrize("name", WAYS)
def test_stacks_are_split_without_moving_anything(name):
    operands, split = placed(name, kind=jax.sharding.AxisType.Auto)
    compiled, (out, _) = same_as_on_one_device(attend, operands, split)
    assert compiled.moved() == []
    rows = WAYS[name][2] if WAYS[name][2] != WHOLE else WAYS[name][3]
    assert out.sharding.is_equivalent_to(NamedSharding(split[0].sharding.mesh, rows), 4)


@pytest.mark.parametrize("name", WAYS)
def test_stacks_of_explicit_axes(name):
    operands, split = placed(name, kind=EXPLICIT)
    compiled, _ = same_as_on_one_device(attend, operands, split)
    assert compiled.moved() == []


def test_stacks_on_one_device_while_a_mesh_of_explicit_axes_is_set():
    operands = stacks(*arrays())
    want = attend(*operands)
    with jax.set_mesh(grid(EXPLICIT)):
        got = attend(*operands[:4], layer=1)
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)


def test_stacks_split_by_layers_or_slots_are_moved_and_right():
    operands = stacks(*arrays(batch=4))
    operands = (*(jnp.concatenate([x, x[:1]]) if x.ndim == 5 else x for x in operands),)
    for kv in (P("x"), P(None, None, "x")):
        split = put(operands, grid(), (WHOLE, kv, kv, WHOLE, WHOLE))
        compiled, _ = same_as_on_one_device(attend, operands, split)
        assert compiled.moved()


@pytest.mark.parametrize("mapped", [0, 1])
def test_vmap_over_split_stacks_without_moving_anything(mapped):
    """Of caches of their own, [V, L, 1, S, Hk, D]; and of queries alone."""
    q, k, v, positions, layer = stacks(*arrays(8, 2, batch=1))
    axes = (0, 0 if mapped else None, 0 if mapped else None, None, None)
    operands = [
        jnp.stack([x] * 8) if axis == 0 else x
        for x, axis in zip((q, k, v, positions, layer), axes, strict=True)
    ]
    specs = [P(XY) if axis == 0 else WHOLE for axis in axes]
    split = put(operands, grid(), specs)
    compiled, _ = same_as_on_one_device(jax.vmap(attend, axes), operands, split)
    assert compiled.moved() == []


def test_gradients_of_split_stacks():
    operands, split = placed("batch_and_heads", kind=jax.sharding.AxisType.Auto)

    def gradients(q, k, v, positions, layer):
        def loss(q, k, v):
            return jnp.sum(jnp.sin(prefill_attention(q, k, v, positions, layer=layer)))

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    compiled = Compiled(gradients, *split)
    assert compiled.moved() == []
    for got, want in zip(compiled(*split), gradients(*operands), strict=True):
        got, want = (np.asarray(x, np.float32) for x in (got, want))
        np.testing.assert_allclose(got, want, rtol=0, atol=2**-9 * np.abs(want).max())


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("by", ["batch", "heads"])
def test_a_scan_over_donated_split_stacks_moves_and_copies_nothing(by, tokens):
    layers, shape, on = 6, (6, 8, 4096, 8, 16), grid()
    rows = {"batch": P(XY), "heads": P(None, None, XY)}[by]
    cache = P(None, *rows)
    x = jax.ShapeDtypeStruct((8, tokens, 8, 16), jnp.float32, sharding=NamedSharding(on, rows))
    k = jax.ShapeDtypeStruct(shape, jnp.float16, sharding=NamedSharding(on, cache))
    at = jax.ShapeDtypeStruct((8, tokens), jnp.int32, sharding=NamedSharding(on, P(*rows[:1])))

    def step(*operands):
        return over_layers(*operands, kv_heads=8)

    run = jax.jit(step, donate_argnums=(0, 1)).lower(k, k, x, at).compile()
    analysis = run.memory_analysis()
    layer_bytes = 2 * np.prod(shape[1:]) // DEVICES * 2
    assert analysis.alias_size_in_bytes >= layers * layer_bytes
    assert analysis.temp_size_in_bytes < layer_bytes / 2
    assert COLLECTIVE.search(run.as_text()) is None


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("layer", [None, 1])
@pytest.mark.parametrize("by", ["batch", "heads"])
def test_rows_are_written_without_moving_anything(by, layer, kind):
    rows = {"batch": P("x"), "heads": P(None, None, "x")}[by]
    _, k, v, positions = arrays(8, 4)
    new = [jnp.sin(jnp.arange(4.0 * 16 * 4 * 64)).reshape(4, 16, 4, 64) + i for i in range(2)]
    caches, cache = ((k, v), rows) if layer is None else ((stacks(k, k, v, 0)[1:3]), P(None, *rows))
    operands = (*caches, *new, positions)
    split = put(operands, grid(kind), (cache, cache, rows, rows, P(*rows[:1])))

    def update(*operands):
        return update_kv_cache(*operands, layer=layer)

    compiled, (new_k, _) = same_as_on_one_device(update, operands, split)
    assert compiled.moved() == []
    assert new_k.sharding.is_equivalent_to(split[0].sharding, new_k.ndim)
    assert jax.typeof(new_k).sharding.spec == jax.typeof(split[0]).sharding.spec


def rows_to_write(**options):
    """Caches, rows and positions, on one device, and what they give."""
    _, k, v, positions = arrays(8, 4, kv_len=32, **options)
    new = jnp.cos(jnp.arange(float(positions.size * 4 * 64))).reshape(*positions.shape, 4, 64)
    operands = (k, v, new, 2 * new, positions)
    return operands, update_kv_cache(*operands)


@pytest.mark.parametrize("tokens", [1, 5])
def test_explicit_axes_of_rows_that_are_written(tokens):
    """Inside a shard_map over one of them, and under vmap."""
    on, (operands, want) = grid(EXPLICIT), rows_to_write(q_len=tokens)
    both = P("x", None, "y")
    local = jax.shard_map(
        update_kv_cache, mesh=on, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}
    )
    twice = [jnp.stack([x, x]) for x in operands]
    mapped = (P(None, *both),) * 4 + (P(None, "x"),)
    for update, given, specs, of_one in (
        (local, operands, (both,) * 4 + (P("x"),), lambda x: x),
        (jax.vmap(update_kv_cache), twice, mapped, lambda x: x[1]),
    ):
        split = put(given, on, specs)
        results = jax.jit(update)(*split)
        for got, w in zip(results, want, strict=True):
            assert_same_bits(of_one(np.asarray(got)), w)
            assert got.sharding.is_equivalent_to(split[0].sharding, got.ndim)


SPLIT_APART = {  # k_cache, v_cache (None: of no mesh), rows, positions
    "whole_rows": (P("x", None, "y"), P("x", None, "y"), WHOLE, WHOLE),
    "slots": (P(None, "x"), P(None, "x"), WHOLE, WHOLE),
    "tokens": (P("x"), P("x"), P(None, "x"), P(None, "x")),
    "head_dim": (P(None, "y", None, "x"), P(None, None, None, "x"), P(None, None, None, XY), WHOLE),
    "k_and_v_apart": (P("x"), P(None, None, "x"), P("y"), P("y")),
    "no_caches": (None, None, P("x", None, "y"), P("x")),
    "no_k_cache": (None, P("x", None, "y"), P("x"), P("x")),
    "no_v_cache": (P("x", None, "y"), None, P("x"), P("x")),
}


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("name", SPLIT_APART)
def test_explicit_axes_of_caches_and_rows_that_are_split_apart(name, jit):
    k_split, v_split, rows, positions = SPLIT_APART[name]
    operands, want = rows_to_write(q_len=8)
    specs = (k_split, v_split, rows, rows, positions)
    operands = [
        x if spec is None else put([x], grid(EXPLICIT), [spec])[0]
        for x, spec in zip(operands, specs, strict=True)
    ]
    results = (jax.jit(update_kv_cache) if jit else update_kv_cache)(*operands)
    for got, w, spec in zip(results, want, specs, strict=False):
        assert_same_bits(got, w)
        assert jax.typeof(got).sharding.spec == P(*(spec or ()), *[None] * (4 - len(spec or ())))


def test_slots_of_stacks_spread_over_devices():
    one_layer = arrays()
    operands = stacks(*one_layer)
    local = jax.shard_map(
        lambda *a: sequence_parallel_prefill_attention(*a[:4], axis_name="x", layer=a[4]),
        mesh=grid(),
        in_specs=(WHOLE, P(None, None, "x"), P(None, None, "x"), WHOLE, WHOLE),
        out_specs=WHOLE,
    )
    assert_right([jax.jit(local)(*operands)], one_layer)


@pytest.mark.parametrize("check_vma", [True, False])
def test_stacks_in_shard_map(check_vma):
    operands = stacks(*arrays())
    cache = P(None, "x", None, "y")
    specs = (P("x", None, "y"), cache, cache, P("x"), WHOLE)
    rows = P("x", None, "y")
    local = jax.shard_map(
        attend, mesh=grid(), in_specs=specs, out_specs=(rows, rows), check_vma=check_vma
    )
    for got, want in zip(jax.jit(local)(*operands), attend(*operands), strict=True):
        assert_same_bits(got, want)
