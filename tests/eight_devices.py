"""Calls that are split over devices: right numbers, and nothing moves that need not.

Written for eight; with fewer, meshes are smaller and what needs more is skipped. Run by
test_sharding.py, in a process with JAX_PLATFORMS=cpu and
XLA_FLAGS=--xla_force_host_platform_device_count=8 (so run it by hand), and by test_two_gpus.py.
"""

import jax
import jax.numpy as jnp
import pytest
from bounds import assert_same_bits
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from split import (
    DEVICES,
    EXPLICIT,
    GRID,
    WHOLE,
    XY,
    Compiled,
    arrays,
    grid,
    mesh,
    put,
    same_as_on_one_device,
    same_gradients,
    with_lse,
)

from jax_fa import native, prefill_attention

shardy_only = pytest.mark.skipif(
    not getattr(jax.config, "jax_use_shardy_partitioner", True),
    reason="GSPMD, which JAX has left, cannot do this; Shardy, the default, runs this",
)

ROWS_AND_HEADS = {  # mesh axes and sizes, heads, how q, k and v, positions are split
    "batch": (GRID, (8, 4), P("x"), P("x"), P("x")),
    "batch_by_two_axes": ({"x": 2, "y": 2}, (8, 4), P(XY), P(XY), P(XY)),
    "heads": (GRID, (8, 4), P(None, None, "x"), P(None, None, "x"), WHOLE),
    "batch_and_heads": (GRID, (8, 4), P("x", None, "y"), P("x", None, "y"), P("x")),
    "whole_positions": (GRID, (8, 4), P("x", None, "y"), P("x", None, "y"), WHOLE),
    "tokens": (GRID, (8, 4), P(None, XY), WHOLE, P(None, XY)),
    "tokens_of_whole_positions": (GRID, (8, 4), P(None, "x"), WHOLE, WHOLE),
    "tokens_and_heads": (
        GRID,
        (8, 4),
        P(None, "x", "y"),
        P(None, None, "y"),
        P(None, "x"),
    ),
    "mha": ({"x": DEVICES}, (8, 8), P(None, None, "x"), P(None, None, "x"), WHOLE),
    "mqa": ({"x": DEVICES}, (8, 1), P(None, None, "x"), WHOLE, WHOLE),
    "fewer_kv_heads_than_devices": ({"x": DEVICES}, (8, 2), P(None, None, "x"), WHOLE, WHOLE),
    "kv_heads_by_one_axis_of_two": (
        GRID,
        (8, 4),
        P(None, None, XY),
        P(None, None, "x"),
        WHOLE,
    ),
    "kv_heads_by_the_other_axis": (
        GRID,
        (8, 2),
        P(None, None, ("y", "x")),
        P(None, None, "y"),
        WHOLE,
    ),
    "six_devices": ({"x": 6}, (6, 3), P(None, None, "x"), WHOLE, WHOLE),
    "whole_q_split_heads": (GRID, (8, 4), WHOLE, P(None, None, "x"), WHOLE),
    "whole_q_split_batch": (GRID, (8, 4), WHOLE, P("x"), WHOLE),
}


@pytest.mark.parametrize("name", ROWS_AND_HEADS)
def test_rows_and_heads_are_split_without_moving_anything(name):
    sizes, heads, q, kv, positions = ROWS_AND_HEADS[name]
    operands, on = arrays(*heads), mesh(**sizes)
    split = put(operands, on, (q, kv, kv, positions))
    compiled, (out, lse) = same_as_on_one_device(with_lse, operands, split)
    assert compiled.moved() == []
    rows = q if q != WHOLE else kv
    assert out.sharding.is_equivalent_to(NamedSharding(on, rows), 4)
    assert lse.sharding.is_equivalent_to(NamedSharding(on, rows), 3)
    assert compiled.shape_of_the_call() == list(out.sharding.shard_shape(out.shape))


TO_BE_MOVED = {
    "head_dim": ((8, 4), P(None, None, None, "x"), P(None, None, None, "x"), WHOLE),
    "slots": ((8, 4), WHOLE, P(None, "x"), WHOLE),
    "batch_of_q_slots_of_kv": ((8, 4), P("x"), P(None, "x"), WHOLE),
    "tokens_of_q_batch_of_kv": ((8, 4), P(None, "x"), P("x"), P(None, "x")),
    "tokens_and_slots_by_one_axis": ((8, 4), P(None, "x"), P(None, "x"), P(None, "x")),
    "groups_do_not_fit": ((6, 3), P(None, None, "y"), WHOLE, WHOLE),
}


@pytest.mark.parametrize("name", TO_BE_MOVED)
def test_what_cannot_be_split_is_moved_and_right(name):
    heads, q, kv, positions = TO_BE_MOVED[name]
    if "y" in str(q) and GRID["y"] == 1:
        pytest.skip("needs four devices; test_sharding.py runs this on eight of a CPU")
    operands = arrays(*heads)
    split = put(operands, grid(), (q, kv, kv, positions))
    compiled, _ = same_as_on_one_device(with_lse, operands, split)
    assert compiled.moved()


@pytest.mark.parametrize("positions", [P(None, "y"), P("y", "x"), P(None, "x")])
def test_positions_split_otherwise_follow_q(positions):
    operands = arrays()
    split = put(operands, grid(), (P("x"), P("x"), P("x"), positions))
    compiled, (out, _) = same_as_on_one_device(with_lse, operands, split)
    assert out.sharding.spec == P("x")
    assert all("f32" not in shape and "f16" not in shape for shape in compiled.moved())


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        (("x",), [-(-5 // GRID["x"]), 7, 6, 64]),
        ((None, "x"), [5, -(-7 // GRID["x"]), 6, 64]),
        ((None, None, "x"), [5, 7, 6, 64]),
    ],
    ids=["batch", "tokens", "heads"],
)
def test_extents_that_devices_do_not_divide(axes, shape):
    """Rows are padded, heads gathered."""
    operands, on = arrays(6, 3, batch=5, q_len=7), grid()

    def constrained(q, k, v, positions):
        rows = NamedSharding(on, P(*axes))
        q = jax.lax.with_sharding_constraint(q, rows)
        return with_lse(q, k, v, positions)

    compiled = Compiled(constrained, *put(operands, on, [WHOLE] * 4))
    results = compiled(*put(operands, on, [WHOLE] * 4))
    for got, want in zip(results, with_lse(*operands), strict=True):
        assert_same_bits(got, want)
    assert compiled.shape_of_the_call() == shape


def test_projections_split_beyond_the_kv_heads():
    """[B, T, Hk * D] over more devices than Hk: a mesh axis of 8 splits heads by 2, D by 4."""
    operands, on = arrays(8, 2), mesh(x=8)
    flat = [x.reshape(*x.shape[:2], -1) for x in operands[:3]]

    def from_flat(q, k, v, positions):
        heads = [x.reshape(*x.shape[:2], -1, 64) for x in (q, k, v)]
        out = prefill_attention(*heads, positions)
        return [out.reshape(q.shape)]

    split = put([*flat, operands[3]], on, [P(None, None, "x")] * 3 + [WHOLE])
    compiled, (out,) = same_as_on_one_device(from_flat, [*flat, operands[3]], split)
    assert out.sharding.spec == P(None, None, "x")
    # Each device needs its own kv head whole, and gets no more than that.
    assert compiled.moved() and all("f16[4,32,1,64]" in x for x in compiled.moved())


def test_an_output_wanted_whole_is_gathered_after_the_call():
    operands, on = arrays(), grid()
    split = put(operands, on, [P(None, None, "x")] * 3 + [WHOLE])
    whole = jax.jit(with_lse, out_shardings=(NamedSharding(on, WHOLE),) * 2)
    compiled = Compiled(whole, *split)
    for got, want in zip(compiled(*split), with_lse(*operands), strict=True):
        assert_same_bits(got, want)
    assert compiled.shape_of_the_call() == [4, 16, 8 // GRID["x"], 64]


def test_an_output_wanted_split_is_computed_split():
    operands, on = arrays(), grid()
    rows = NamedSharding(on, P("x", None, "y"))
    split = jax.jit(with_lse, out_shardings=(rows, rows))
    whole = put(operands, on, [WHOLE] * 4)
    local = [4 // GRID["x"], 16, 8 // GRID["y"], 64]
    assert Compiled(split, *whole).shape_of_the_call() == local
    for got, want in zip(split(*whole), with_lse(*operands), strict=True):
        assert_same_bits(got, want)


def test_a_mesh_that_jax_does_not_know():
    from jax._src.sharding_impls import GSPMDSharding

    operands, on = arrays(), grid()
    of_batch = NamedSharding(on, P("x"))
    unnamed = [
        jax.device_put(
            x, GSPMDSharding(list(on.devices.flat), of_batch._to_xla_hlo_sharding(x.ndim))
        )
        for x in operands
    ]
    compiled, _ = same_as_on_one_device(with_lse, operands, unnamed)
    assert compiled.moved() == []


def test_eager_scan_and_set_mesh():
    operands = arrays()
    split = put(operands, grid(), [P("x", None, "y")] * 3 + [P("x")])
    out = prefill_attention(*split)
    assert_same_bits(out, prefill_attention(*operands))
    assert out.sharding.is_equivalent_to(split[0].sharding, 4)

    def layers(q, k, v, positions):
        def layer(x, _):
            return prefill_attention(x, k, v, positions), None

        return [jax.lax.scan(layer, q, None, length=3)[0]]

    compiled, _ = same_as_on_one_device(layers, operands, split)
    assert compiled.moved() == []
    with jax.set_mesh(grid()):
        same_as_on_one_device(with_lse, operands, split)


@pytest.mark.parametrize(
    ("q", "kv"), [(P("x"), WHOLE), (P(None, "x"), P("x")), (P("x"), P("x"))], ids=str
)
def test_vmap_over_what_is_split(q, kv):
    operands = arrays(8, 2)
    is_shared = q != kv
    axes = (0, None, None, 0) if is_shared else (0, 0, 0, 0)
    stacked = [
        x if axis is None else jnp.stack([x] * 8) for x, axis in zip(operands, axes, strict=True)
    ]

    def mapped(*operands):
        return [jax.vmap(prefill_attention, axes)(*operands)]

    split = put(stacked, grid(), (q, kv, kv, q))
    compiled, _ = same_as_on_one_device(mapped, stacked, split)
    assert compiled.moved() == []


# By hand


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    operands, on = arrays(), grid()
    specs = (P("x", None, "y"), P("x", None, "y"), P("x", None, "y"), P("x"))
    rows = (P("x", None, "y"), P("x", None, "y"))
    local = jax.shard_map(with_lse, mesh=on, in_specs=specs, out_specs=rows, check_vma=check_vma)
    split = put(operands, on, specs)
    compiled = Compiled(local, *split)
    for got, want in zip(compiled(*split), with_lse(*operands), strict=True):
        assert_same_bits(got, want)
    assert compiled.moved() == []


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_in_shard_map_of_a_shared_cache(check_vma):
    operands, on = arrays(), grid()
    specs = (P(None, "x"), WHOLE, WHOLE, P(None, "x"))
    rows = (P(None, "x"), P(None, "x"))
    local = jax.shard_map(with_lse, mesh=on, in_specs=specs, out_specs=rows, check_vma=check_vma)
    same_gradients(local, operands, put(operands, on, specs))


def test_results_in_shard_map_vary_as_their_operands_do():
    """An output marked as equal on all devices could be returned as whole, and be wrong."""
    operands, on = arrays(), grid()
    local = jax.shard_map(
        prefill_attention,
        mesh=on,
        in_specs=(P(None, "x"), WHOLE, WHOLE, P(None, "x")),
        out_specs=WHOLE,
    )
    with pytest.raises(ValueError, match="out_specs"):
        local(*operands)


@pytest.mark.parametrize("by_hand", ["x", "y"])
def test_a_mesh_split_by_hand_in_part(by_hand):
    operands, on = arrays(), grid()
    split = put(operands, on, [P("x", None, "y")] * 3 + [P("x")])
    spec = P("x") if by_hand == "x" else P(None, None, "y")
    specs = (spec, spec, spec, P("x") if by_hand == "x" else WHOLE)
    local = jax.shard_map(
        with_lse, mesh=on, in_specs=specs, out_specs=(spec, spec), axis_names={by_hand}
    )
    for got, want in zip(jax.jit(local)(*split), with_lse(*operands), strict=True):
        assert_same_bits(got, want)


# Axes that are part of the arrays' types


@pytest.mark.parametrize(
    ("q", "kv", "positions"),
    [
        (P("x", None, "y"), P("x", None, "y"), P("x")),
        (P(None, "x"), WHOLE, P(None, "x")),
        (P(None, None, XY), WHOLE, WHOLE),
    ],
    ids=["batch_and_heads", "tokens", "fewer_kv_heads"],
)
def test_explicit_axes_stay_in_the_types(q, kv, positions):
    operands, on = arrays(8, 2), grid(EXPLICIT)
    split = put(operands, on, (q, kv, kv, positions))
    types = []

    def typed(*operands):
        results = with_lse(*operands)
        types[:] = types or [jax.typeof(x).sharding.spec for x in results]
        return results

    compiled, _ = same_as_on_one_device(typed, operands, split)
    assert compiled.moved() == []
    entries = [e if isinstance(e, tuple) or e is None else (e,) for e in (*q, *[None] * 3)]
    for spec in types:
        given = [e if isinstance(e, tuple) or e is None else (e,) for e in spec]
        assert [e or None for e in given] == entries[: len(given)]
    same_gradients(with_lse, operands, split)


@pytest.mark.parametrize("q", [P(None, None, None, "x"), WHOLE])
def test_explicit_axes_of_what_cannot_be_split(q):
    operands = arrays(8, 2)
    split = put(operands, grid(EXPLICIT), (q, P(None, "y"), P(None, "y"), WHOLE))
    with jax.set_mesh(grid(EXPLICIT)):
        same_as_on_one_device(with_lse, operands, split)


def test_explicit_axes_of_the_cache_alone():
    _, k, v, positions = operands = arrays(8, 2)
    split = put(operands, grid(EXPLICIT), (WHOLE, P("x"), P("x"), P("x")))

    def step(k, v, positions):
        return [prefill_attention(jnp.ones((4, 16, 8, 64)), k, v, positions)]

    compiled, _ = same_as_on_one_device(step, (k, v, positions), split[1:])
    assert compiled.moved() == []


@shardy_only
def test_explicit_axes_left_in_a_mesh_split_by_hand_in_part():
    operands, on = arrays(8, 2), grid(EXPLICIT)
    split = put(operands, on, [P("x", None, "y")] * 3 + [P("x")])
    local = jax.shard_map(
        with_lse, mesh=on, in_specs=P("x"), out_specs=(P("x"), P("x")), axis_names={"x"}
    )
    out, _ = jax.jit(local)(*split)
    assert_same_bits(out, prefill_attention(*operands))
    assert jax.typeof(out).sharding.spec == P("x", None, "y", None)


@shardy_only
def test_vmap_over_an_explicit_axis():
    operands, on = arrays(8, 2), grid(EXPLICIT)
    axes = (0, None, None, 0)
    stacked = [
        x if axis is None else jnp.stack([x] * 8) for x, axis in zip(operands, axes, strict=True)
    ]
    split = put(stacked, on, (P("x"), WHOLE, WHOLE, P("x")))
    with jax.set_mesh(on):
        got = jax.jit(jax.vmap(prefill_attention, axes))(*split)
    assert_same_bits(got[5], prefill_attention(*operands))


@shardy_only
def test_a_split_call_of_explicit_axes_is_exported():
    export = pytest.importorskip("jax.export")
    pytest.importorskip("flatbuffers")
    operands, on = arrays(), mesh(EXPLICIT, x=DEVICES)
    split = put(operands, on, [P(None, "x"), WHOLE, WHOLE, P(None, "x")])
    safe = [export.DisabledSafetyCheck.custom_call(native.PREFILL_TARGET)]
    program = export.export(jax.jit(with_lse), disabled_checks=safe)(*split)
    again = export.deserialize(program.serialize())
    assert again.nr_devices == DEVICES
    for got, want in zip(again.call(*split), with_lse(*operands), strict=True):
        assert_same_bits(got, want)
