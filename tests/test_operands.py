"""The table of axes: optional axes, and how what has them joins a mapped axis."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_fa import operands, partitioning, split, transforms
from jax_fa.operands import Operands, form


def test_a_form_has_the_axes_that_there_are():
    assert form("k", 4).axes == ("B", "S", "Hk", "D")
    assert form("k", 5).axes == ("L", "B", "S", "Hk", "D")
    assert form("d_v", 5, layer_axis=1).axes == ("B", "L", "S", "Hk", "D")
    assert form("layer", 0).axes == ()


def test_optional_operands_are_named_in_the_order_in_which_they_are_passed():
    assert Operands(0, 1, 2, 3).optional_names == ""
    assert Operands(0, 1, 2, 3, layer=4).optional_names == "layer"
    assert jax.tree.leaves(Operands(0, 1, 2, 3, layer=4)) == [0, 1, 2, 3, 4]


class Extended(NamedTuple):
    """Operands with two that no call has, to see what the table makes of optional axes."""

    q: Any
    k: Any
    by_token: Any = None
    by_head: Any = None


ROWS = {"by_token": ("B [T]", True), "by_head": ("[B] Hq", True)}


def sum_of(x):
    """Something that has each element of out depend on its part of each operand."""
    by_token = x.by_token if x.by_token.ndim == 2 else x.by_token[:, None]
    by_head = x.by_head if x.by_head.ndim == 2 else x.by_head[None]
    rows = by_token[:, :, None, None] + by_head[:, None, :, None]
    return [x.q * (1 + jnp.sum(x.k, axis=(1, 2, 3))[:, None, None, None]) + rows]


@pytest.mark.parametrize("axis", ["B", "T"])
@pytest.mark.parametrize("by_token", [(2,), (2, 3), (5, 2), (5, 2, 3)], ids=str)
@pytest.mark.parametrize("by_head", [(4,), (2, 4), (5, 4), (5, 2, 4)], ids=str)
@pytest.mark.parametrize("q", [(2, 3, 4, 2), (5, 2, 3, 4, 2)], ids=str)
def test_optional_axes_join_a_mapped_axis(monkeypatch, axis, by_token, by_head, q):
    monkeypatch.setattr(operands, "_TABLE", operands._TABLE | ROWS)
    shapes = Extended(q, (2, 6, 2, 2), by_token, by_head)
    mapped = Extended(*(shape[0] == 5 for shape in shapes))
    if axis == "T" and mapped.by_head:
        assert not operands.may_have("by_head", "T")
        return
    rng = np.random.default_rng(0)
    arrays = Extended(*(jnp.asarray(rng.integers(0, 9, shape), jnp.float32) for shape in shapes))
    if not any(mapped):
        return
    forms = operands.forms(arrays, mapped=mapped)
    got = transforms._fold_into(axis, sum_of, 5, forms, mapped, arrays)
    want = jax.vmap(sum_of, (jax.tree.map(lambda x: 0 if x else None, mapped),))(arrays)
    np.testing.assert_array_equal(got[0], want[0])


def test_optional_axes_are_split_as_the_others_are(monkeypatch):
    monkeypatch.setattr(operands, "_TABLE", operands._TABLE | ROWS)
    chosen = split.Split(split.Layout(4, 2), ("x",), ("y",), ("z",), ())
    specs = [chosen.spec(form(*of)) for of in (("by_token", 1), ("by_token", 2), ("by_head", 1))]
    assert specs == [PartitionSpec(("x",)), PartitionSpec(("x",), ("y",)), PartitionSpec(("z",))]
    told = Extended(form("q", 4), form("k", 4), form("by_token", 2), form("by_head", 1))
    signature = partitioning.Signature(split.Layout(4, 2), told, (form("out", 4),))
    rule, factors = partitioning._rule(signature, unread=1)
    assert rule == "b t (g r) d, b s g d, u0 u1, u2,  -> b t (g r) d"
    assert factors == {"need_replication_factors": ("d", "s"), "r": 2}
