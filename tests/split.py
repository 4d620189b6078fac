"""Meshes, split arrays, and what compiled programs move: for the tests on several devices."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from bounds import assert_same_bits, assert_within, lse_bound, output_bound
from cases import Case
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fa import explain, native, prefill_attention

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto

WHOLE = P()
XY = ("x", "y")
COLLECTIVE = re.compile(
    r"= (.*) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


DEVICES = len(jax.devices())

# Two axes over all of them, 4 x 2 where there are eight; of two devices, y gets one.
GRID = {"x": max(DEVICES // 2, 2), "y": 2 if DEVICES >= 4 else 1}


def mesh(kind=AUTO, **sizes):
    count = int(np.prod(list(sizes.values())))
    if count > DEVICES:
        pytest.skip(f"needs {count} devices; test_sharding.py runs this on eight of a CPU")
    devices = np.array(jax.devices()[:count]).reshape(*sizes.values())
    return Mesh(devices, tuple(sizes), axis_types=(kind,) * len(sizes))


def grid(kind=AUTO):
    return mesh(kind, **GRID)


def arrays(q_heads=8, kv_heads=4, **options):
    options = {"batch": 4, "q_len": 16, "n_past": 16, "placement": "anywhere", **options}
    return Case("split", q_heads=q_heads, kv_heads=kv_heads, **options).arrays()


def put(operands, on, specs):
    return [jax.device_put(x, NamedSharding(on, s)) for x, s in zip(operands, specs, strict=True)]


def with_lse(*operands):
    return tuple(prefill_attention(*operands, return_lse=True))


class Compiled:
    """A function, compiled for operands that are split as these are."""

    def __init__(self, function, *operands):
        self._run = jax.jit(function).lower(*operands).compile()
        self._text = self._run.as_text()

    def __call__(self, *operands):
        return self._run(*operands)

    def moved(self):
        """The shapes that go between devices, in words."""
        return [match[1] for match in COLLECTIVE.finditer(self._text)]

    def summed(self):
        """How many elements are summed over devices, if all that goes between them is summed.

        Not their shapes: XLA may lay them out in one array.
        """
        elements = 0
        for match in COLLECTIVE.finditer(self._text):
            assert match[2] == "all-reduce", match[0]
            # One that runs meanwhile names its operands first: ((f32[8]), f32[8]).
            results = match[1].rsplit("), ")[-1] if match[1].startswith("((") else match[1]
            for extents in re.findall(r"\[([\d,]*)\]", results):
                elements += math.prod(int(extent) for extent in extents.split(",") if extent)
        return elements

    def shape_of_the_call(self):
        """Of out, on each device."""
        call = re.search(r"= (.*) custom-call\(.*" + native.PREFILL_TARGET, self._text)
        return [int(extent) for extent in re.search(r"\[([\d,]+)\]", call[1])[1].split(",")]


def assert_right(results, operands):
    """Of out, or of out and lse, merged from states over parts of the slots."""
    q, k, v, positions = operands
    out, lse = oracle.attend(*operands, return_lse=True)
    kernel = explain(*operands).kernel
    # Merging adds a few roundings a state to those of the kernel.
    assert_within(results[0], out, 3 * output_bound(kernel, q, k, v, positions))
    for got in results[1:]:
        assert_within(got, lse, 3 * lse_bound(kernel, q, k), "lse")


def same_as_on_one_device(function, operands, split):
    """The function, compiled for the split operands; its results have the bits of the whole."""
    compiled = Compiled(function, *split)
    results = compiled(*split)
    for got, want in zip(results, function(*operands), strict=True):
        assert_same_bits(got, want)
    return compiled, results


def loss_of(attention, out_like):
    weights = jnp.asarray(np.random.default_rng(3).standard_normal(out_like.shape), jnp.float32)

    def loss(q, k, v, positions):
        out, lse = attention(q, k, v, positions)
        return jnp.sum(weights * out) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0))

    return jax.grad(loss, (0, 1, 2))


def same_gradients(attention, operands, split, of=with_lse):
    """Gradients of ``attention`` of the split operands are those of ``of`` on one device."""
    compiled = Compiled(loss_of(attention, operands[0]), *split)
    want = loss_of(of, operands[0])(*operands)
    for g, w in zip(compiled(*split), want, strict=True):
        g, w = np.asarray(g, np.float32), np.asarray(w, np.float32)
        # d_k and d_v are float16, and parts of them are summed over devices.
        np.testing.assert_allclose(g, w, rtol=0, atol=8 * 2**-11 * np.abs(w).max())
    return compiled
