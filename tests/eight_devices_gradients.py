"""Gradients of calls split over eight devices: each its own rows, and one sum for the cache.

Run by test_sharding.py, as eight_devices.py is.
"""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from split import (
    AUTO,
    EXPLICIT,
    WHOLE,
    XY,
    arrays,
    grid,
    mesh,
    put,
    same_gradients,
    with_lse,
)


def of_kinds(names, explicit):
    """Each way by automatic axes, and some by axes in the types, whose sums shard_map makes."""
    ways = [(name, AUTO) for name in names] + [(name, EXPLICIT) for name in explicit]
    return pytest.mark.parametrize(("name", "kind"), ways, ids=str)


OF_ONE_DEVICE = {
    "batch": P("x"),
    "batch_by_two_axes": P(XY),
    "heads": P(None, None, "x"),
    "batch_and_heads": P("x", None, "y"),
}


@of_kinds(OF_ONE_DEVICE, explicit=["batch_and_heads"])
def test_gradients_of_split_batch_and_heads_without_moving_anything(name, kind):
    rows = OF_ONE_DEVICE[name]
    operands = arrays(8, 4, batch=8)
    split = put(operands, grid(kind), (rows, rows, rows, P(*rows[:1])))
    assert same_gradients(with_lse, operands, split).moved() == []


SUMMED = {  # heads, how q, and k and v, are split, and d_k on each device
    "tokens": ((8, 4), P(None, "x"), WHOLE, (4, 32, 4, 64)),
    "tokens_by_two_axes": ((8, 4), P(None, XY), WHOLE, (4, 32, 4, 64)),
    "tokens_of_mha": ((8, 8), P(None, "x"), WHOLE, (4, 32, 8, 64)),
    "tokens_and_heads": ((8, 4), P(None, "x", "y"), P(None, None, "y"), (4, 32, 2, 64)),
    "tokens_and_batch": ((8, 4), P("y", "x"), P("y"), (2, 32, 4, 64)),
    "heads_of_mqa": ((8, 1), P(None, None, XY), WHOLE, (4, 32, 1, 64)),
    "tokens_and_heads_of_mqa": ((8, 1), P(None, "x", "y"), WHOLE, (4, 32, 1, 64)),
}


@of_kinds(SUMMED, explicit=["tokens_and_heads"])
def test_gradients_of_split_rows_of_a_shared_cache_sum_d_k_and_d_v_alone(name, kind):
    heads, q, kv, shape = SUMMED[name]
    operands = arrays(*heads)
    split = put(operands, grid(kind), (q, kv, kv, P(*q[:2])))
    assert same_gradients(with_lse, operands, split).summed() == 2 * math.prod(shape)


def test_gradients_of_split_heads_that_share_some_kv_heads_move_no_rows():
    """Eight devices, two kv heads: what goes over the wire has slots, 32, and no tokens, 16."""
    operands = arrays(8, 2)
    split = put(operands, mesh(x=8), (P(None, None, "x"), WHOLE, WHOLE, WHOLE))
    moved = same_gradients(with_lse, operands, split).moved()
    assert moved and not any(",16," in shapes for shapes in moved)


def test_gradients_of_split_rows_that_devices_do_not_divide():
    """What fills up a shard adds nothing to d_k and d_v."""
    operands, on = arrays(6, 3, q_len=7), grid()

    def constrained(q, *rest):
        rows = NamedSharding(on, P(None, "x"))
        return with_lse(jax.lax.with_sharding_constraint(q, rows), *rest)

    same_gradients(constrained, operands, put(operands, on, [WHOLE] * 4))


@pytest.mark.parametrize("shared", [True, False])
def test_gradients_of_split_rows_under_vmap(shared):
    operands = arrays()
    cache = None if shared else 0
    axes = (0, cache, cache, None)
    stacked = [
        x if axis is None else jnp.stack([x, 2 * x]) for x, axis in zip(operands, axes, strict=True)
    ]
    rows = P(None, None, "x")
    split = put(stacked, grid(), (rows, WHOLE, WHOLE, P(None, "x")))

    def attend(*operands):
        return jax.vmap(with_lse, axes)(*operands)

    compiled = same_gradients(attend, stacked, split, of=attend)
    assert shared or compiled.summed() == 2 * math.prod((8, 32, 4, 64))
