"""S split over devices: sequence_parallel_prefill_attention. See eight_devices.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import assert_same_bits
from jax.sharding import PartitionSpec as P
from split import DEVICES, WHOLE, Compiled, arrays, assert_right, grid, mesh, same_gradients

from jax_fa import native, sequence_parallel_prefill_attention


def over_slots(on, axis_name="x", check_vma=True, **options):
    """A function of whole arrays that gives out and lse."""
    slots = P(None, axis_name)

    def local(*operands):
        return tuple(
            sequence_parallel_prefill_attention(
                *operands, axis_name=axis_name, return_lse=True, **options
            )
        )

    return jax.jit(
        jax.shard_map(
            local,
            mesh=on,
            in_specs=(WHOLE, slots, slots, WHOLE),
            out_specs=(WHOLE, WHOLE),
            check_vma=check_vma,
        )
    )


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("tokens", [1, 3, 16])
@pytest.mark.parametrize("placement", ["growing", "anywhere", "all_padding"])
def test_slots_over_devices(tokens, placement, check_vma):
    operands = arrays(q_len=tokens, kv_len=64, placement=placement)
    run = over_slots(mesh(x=DEVICES), check_vma=check_vma)
    results = run(*operands)
    assert_right(results, operands)
    for again, first in zip(run(*operands), results, strict=True):
        assert_same_bits(again, first)


@pytest.mark.parametrize("tokens", [3, 16])
def test_slots_over_devices_move_states_and_no_cache(tokens):
    operands = arrays(q_len=tokens, kv_len=64)
    shapes = Compiled(over_slots(mesh(x=DEVICES)), *operands).moved()
    assert shapes and all("f16" not in shape for shape in shapes)
    all_states = f"f32[{DEVICES},4,{tokens},8,64]"
    assert any(all_states in shape for shape in shapes) == (tokens % DEVICES != 0)


def test_slots_over_two_axes():
    operands = arrays(kv_len=64)
    assert_right(over_slots(grid(), ("y", "x"))(*operands), operands)


def test_slots_over_devices_with_a_16_bit_q():
    operands = arrays(kv_len=64, q_dtype="bfloat16", kv_dtype="bfloat16")
    results = over_slots(mesh(x=DEVICES))(*operands)
    assert results[0].dtype == jnp.bfloat16
    assert_right(results, operands)


def test_slots_over_devices_with_the_ends_of_int32():
    q, k, v, _ = arrays(q_len=2, kv_len=64)
    ends = jnp.asarray([[-(2**31), 2**31 - 1]] * 4, jnp.int32)
    assert_right(over_slots(mesh(x=DEVICES))(q, k, v, ends), (q, k, v, ends))


def test_unseen_slots_on_other_devices_may_hold_nan():
    q, k, v, _ = arrays(q_len=4, kv_len=64)
    positions = jnp.broadcast_to(jnp.arange(4) + 9, (4, 4))
    clean = over_slots(mesh(x=DEVICES))(q, k, v, positions)
    k, v = (x.at[:, 13:].set(jnp.nan) for x in (k, v))
    for a, b in zip(clean, over_slots(mesh(x=DEVICES))(q, k, v, positions), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("tokens", [3, 16])
def test_gradients_of_slots_over_devices(tokens, check_vma):
    operands = arrays(q_len=tokens, kv_len=64)
    same_gradients(over_slots(mesh(x=DEVICES), check_vma=check_vma), operands, operands)


def test_slots_over_devices_unbatched_without_lse():
    operands = [x[0] for x in arrays(kv_len=64)]
    local = jax.shard_map(
        lambda *a: sequence_parallel_prefill_attention(*a, axis_name="x"),
        mesh=mesh(x=DEVICES),
        in_specs=(WHOLE, P("x"), P("x"), WHOLE),
        out_specs=WHOLE,
    )
    out = jax.jit(local)(*operands)
    assert_right([out[None]], [x[None] for x in operands])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize("empty", ["tokens", "batch", "slots"])
def test_nothing_over_devices_gives_nothing(empty, layered, check_vma):
    q, k, v, positions = arrays(q_len=4, kv_len=64)
    if empty == "tokens":
        q, positions = q[:, :0], positions[:, :0]
    elif empty == "batch":
        q, k, v, positions = (x[:0] for x in (q, k, v, positions))
    else:
        k, v = k[:, :0], v[:, :0]
    options = {"layer": 1} if layered else {}
    if layered:
        k, v = jnp.stack([k, k]), jnp.stack([v, v])
    slots = P(*[None] * (1 + layered), "x")

    def local(*operands):
        return tuple(
            sequence_parallel_prefill_attention(
                *operands, axis_name="x", return_lse=True, **options
            )
        )

    run = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh(x=DEVICES),
            in_specs=(WHOLE, slots, slots, WHOLE),
            out_specs=(WHOLE, WHOLE),
            check_vma=check_vma,
        )
    )
    out, lse = run(q, k, v, positions)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert lse.shape == q.shape[:-1] and lse.dtype == jnp.float32
    assert (np.asarray(out) == 0).all() and np.isneginf(np.asarray(lse)).all()
    d_k = jax.grad(lambda k: jnp.sum(run(q, k, v, positions)[0]))(k)
    assert d_k.shape == k.shape and (np.asarray(d_k) == 0).all()


def test_sequence_parallel_errors():
    operands = arrays(kv_len=64)
    slots, tokens = P(None, "x"), P(None, "x")

    def call(axis_name, *specs, shift=0):
        def local(q, k, v, positions):
            positions = positions + shift * jax.lax.axis_index("x") if shift else positions
            return sequence_parallel_prefill_attention(q, k, v, positions, axis_name=axis_name)

        jax.eval_shape(
            jax.shard_map(local, mesh=mesh(x=DEVICES), in_specs=specs, out_specs=WHOLE), *operands
        )

    with pytest.raises(ValueError, match="q varies over axis_name='x'; all devices"):
        call("x", tokens, slots, slots, tokens)
    with pytest.raises(ValueError, match="positions varies over axis_name='x'"):
        call("x", WHOLE, slots, slots, WHOLE, shift=-8)
    with pytest.raises(ValueError, match="k is not split over axis_name='x'"):
        call("x", WHOLE, WHOLE, WHOLE, WHOLE)
    with pytest.raises(ValueError, match="axis_name='z' is not an axis here.*shard_map"):
        call("z", WHOLE, slots, slots, WHOLE)
    with pytest.raises(ValueError, match=r"axis_name is \('x', 'x'\); each axis may be named once"):
        call(("x", "x"), WHOLE, slots, slots, WHOLE)
    with pytest.raises(TypeError, match="axis_name is 3"):
        call(3, WHOLE, slots, slots, WHOLE)
    with pytest.raises(ValueError, match="axis_name='x' is not an axis here"):
        sequence_parallel_prefill_attention(*operands, axis_name="x")


def test_sequence_parallel_slots_beyond_positions():
    most = native.load().max_kv_len
    cache = jax.ShapeDtypeStruct((1, most // DEVICES * DEVICES + DEVICES, 1, 1), jnp.float16)
    shapes = [
        jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32),
        cache,
        cache,
        jax.ShapeDtypeStruct((1, 1), jnp.int32),
    ]
    slots = P(None, "x")
    local = jax.shard_map(
        lambda *a: sequence_parallel_prefill_attention(*a, axis_name="x"),
        mesh=mesh(x=DEVICES),
        in_specs=(WHOLE, slots, slots, WHOLE),
        out_specs=WHOLE,
    )
    with pytest.raises(ValueError, match=f"on each of {DEVICES} devices.*positions are int32"):
        jax.eval_shape(local, *shapes)
