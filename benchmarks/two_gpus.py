"""What a second GPU gains, heads split over the two: attention, and a block of a model around it.

    python benchmarks/two_gpus.py [--cells NAME,NAME] [--rounds N] [--layers N] [--json PATH]

The same jitted functions of the same global arrays, all on one GPU, and with query heads and KV
heads split over two. Three clocks for the attention: the kernel alone (CUPTI, the mean of the GPUs
that it runs on), one call of many in a program (wall clock), one call a program (wall clock, the
host's dispatch included). The block is q, k, v and o projections around it, with one all-reduce.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from timing import (
    KERNEL_TIME,
    Call,
    CuptiUnavailableError,
    kernels_launched_by,
    machine,
    measure,
    print_machine,
    print_table,
)
from workload import Checker, Workload, make_inputs, select

import jax_fa

CELLS: tuple[Workload, ...] = (
    Workload("llama8b-2k-f16", 2048, 32, 8, 128, dtype="float16"),
    Workload("llama8b-2k", 2048, 32, 8, 128),
    Workload("llama8b-8k", 8192, 32, 8, 128),
)

# Calls that are in flight together where one call is a program.
CALLS_IN_FLIGHT = 100
PROGRAMS_IN_FLIGHT = 16
CALLS_IN_SESSION = 8

# Of a block's results: the sum over GPUs is rounded in another order.
BLOCK_TOLERANCE = 2e-2

COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)

Placed = tuple[jax.Array, ...]
"""Operands of one function, all on one GPU or split over two."""


def main() -> int:
    """Runs the benchmark; returns the process's exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", default="", help="comma-separated names; default: all")
    parser.add_argument("--rounds", type=int, default=7, help="shuffled rounds over all contenders")
    parser.add_argument("--layers", type=int, default=32, help="calls, or blocks, of a program")
    parser.add_argument("--json", type=Path, help="also write everything there")
    args = parser.parse_args()
    if jax.device_count() < 2:
        raise SystemExit(f"two GPUs in one process are needed; JAX sees {jax.devices()}")
    report: dict[str, Any] = {"machine": machine() | {"GPUs": 2}, "cells": []}
    print_machine(report["machine"])
    for cell in select(CELLS, args.cells):
        report["cells"].append(run_cell(cell, args.rounds, args.layers))
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    wrong = [status for cell in report["cells"] for status in cell["wrong"]]
    for status in wrong:
        print(status)
    return 1 if wrong else 0


def run_cell(cell: Workload, rounds: int, layers: int) -> dict[str, Any]:
    """Checks and times one cell; prints its table and returns it for the report."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("gpus",))
    x = make_inputs(cell)
    operands = (x.q, x.k, x.v, x.positions)
    heads = P(None, None, "gpus")
    attention = place(operands, mesh, (heads, heads, heads, P()))
    block_operands = make_block(cell)
    # Each GPU has its heads' columns of the first three weights, and its heads' rows of the last.
    columns = P(None, "gpus")
    blocks = place(block_operands, mesh, (P(), columns, columns, columns, P("gpus"), P()))

    attend = jax.jit(jax_fa.prefill_attention)
    chain = jax.jit(partial(attend_often, layers=layers))
    prefill = jax.jit(partial(run_blocks, layers=layers, head_dim=cell.head_dim))
    wrong = check_attention(cell, Checker(x), {"a call": attend, "a program": chain}, attention)
    wrong += check_block(cell, prefill, blocks, layers)

    wall = partial(measure_both, rounds=rounds)
    measured: list[tuple[str, Sequence[float]]] = [
        ("kernel alone", kernel_times(attend, attention, rounds)),
        (f"one of {layers} in a program", wall(chain, attention, PROGRAMS_IN_FLIGHT, layers)),
        ("one a program", wall(attend, attention, CALLS_IN_FLIGHT, 1)),
        (f"block, one of {layers} in a program", wall(prefill, blocks, PROGRAMS_IN_FLIGHT, layers)),
    ]
    kernel = jax_fa.explain(*attention[0]).kernel
    print(f"\n{cell.name}: {cell.describe()}, by {kernel}, heads split over two GPUs")
    rows = [["", "one GPU, us", "two GPUs, us", "ratio"]]
    for name, seconds in measured:
        if seconds:
            one, two = seconds
            rows.append([name, f"{1e6 * one:.1f}", f"{1e6 * two:.1f}", f"{one / two:.3f}"])
    print_table(rows)
    return {
        "name": cell.name,
        "seconds": {name: list(seconds) for name, seconds in measured},
        "wrong": wrong,
    }


def place(operands: Placed, mesh: Mesh, specs: Sequence[P]) -> tuple[Placed, Placed]:
    """The operands on the first GPU of the mesh, and split over its two."""
    one = SingleDeviceSharding(mesh.devices.flat[0])
    two = [NamedSharding(mesh, spec) for spec in specs]
    return (
        tuple(jax.device_put(x, one) for x in operands),
        tuple(jax.device_put(x, s) for x, s in zip(operands, two, strict=True)),
    )


def attend_often(
    q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, *, layers: int
) -> jax.Array:
    """`layers` calls, each on the output of the one before. Unrolled: a loop copies its carry."""
    for _ in range(layers):
        q = jax_fa.prefill_attention(q, k, v, positions)
    return q


def make_block(cell: Workload) -> Placed:
    """A block's input [B, T, M] with M = Hq * D, its four weights, and positions [B, T]."""
    model = cell.q_heads * cell.head_dim
    kv = cell.kv_heads * cell.head_dim
    shapes = [(cell.batch, cell.q_len, model), (model, model), (model, kv), (model, kv)]
    shapes.append((model, model))
    keys = jax.random.split(jax.random.key(1), len(shapes))
    x, *weights = (
        jax.random.normal(key, shape, cell.dtype) for key, shape in zip(keys, shapes, strict=True)
    )
    positions = jnp.tile(jnp.arange(cell.q_len, dtype=jnp.int32), (cell.batch, 1))
    return (x, *(w / model**0.5 for w in weights), positions)


def run_blocks(
    x: jax.Array,
    w_q: jax.Array,
    w_k: jax.Array,
    w_v: jax.Array,
    w_o: jax.Array,
    positions: jax.Array,
    *,
    layers: int,
    head_dim: int,
) -> jax.Array:
    """`layers` blocks x + attention(n w_q, n w_k, n w_v) w_o of the normalised x, n.

    All with the same weights.
    """
    for _ in range(layers):
        x32 = x.astype(jnp.float32)
        n = (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True))).astype(x.dtype)
        q, k, v = (
            (n @ w).reshape(*n.shape[:2], w.shape[1] // head_dim, head_dim) for w in (w_q, w_k, w_v)
        )
        out = jax_fa.prefill_attention(q, k, v, positions)
        x = x + out.reshape(*x.shape[:2], w_o.shape[0]) @ w_o
    return x


def check_attention(
    cell: Workload,
    checker: Checker,
    functions: dict[str, Callable[..., jax.Array]],
    placed: tuple[Placed, Placed],
) -> list[str]:
    """What is wrong: a call's error, bits that differ between one GPU and two, or arrays moved."""
    wrong = []
    error = checker.error(functions["a call"](*placed[0]))
    if error > checker.TOLERANCE:
        wrong.append(f"{cell.name}: wrong: relative error {error:.2g}")
    for name, function in functions.items():
        one, two = (np.asarray(function(*operands)) for operands in placed)
        if (one.view(np.uint16) != two.view(np.uint16)).any():
            wrong.append(f"{cell.name}: wrong: {name} has other bits on two GPUs")
        if moved := collectives(function, placed[1]):
            wrong.append(f"{cell.name}: wrong: {name} moves arrays: {moved}")
    return wrong


def check_block(
    cell: Workload, function: Callable[..., jax.Array], placed: tuple[Placed, Placed], layers: int
) -> list[str]:
    """What is wrong with the block: its numbers, or other moves than an all-reduce a block."""
    wrong = []
    one, two = (np.asarray(function(*operands), np.float32) for operands in placed)
    error = float(np.linalg.norm(two - one) / np.linalg.norm(one))
    if not error <= BLOCK_TOLERANCE:
        wrong.append(f"{cell.name}: wrong: blocks on two GPUs have relative error {error:.2g}")
    if (moved := collectives(function, placed[1])) != {"all-reduce": layers}:
        wrong.append(f"{cell.name}: wrong: {layers} blocks move arrays by {moved}")
    return wrong


def collectives(function: Any, operands: Placed) -> dict[str, int]:
    """How often the compiled function moves arrays between GPUs, by what instruction."""
    text = function.lower(*operands).compile().as_text()
    return dict(collections.Counter(COLLECTIVE.findall(text)))


def measure_both(
    function: Callable[..., Any],
    placed: tuple[Placed, Placed],
    in_flight: int,
    layers: int,
    *,
    rounds: int,
) -> tuple[float, float]:
    """Seconds a layer on one GPU and on two: wall clock, `in_flight` programs back to back."""
    calls: dict[str, Call] = {
        name: partial(function, *operands)
        for name, operands in zip(("one", "two"), placed, strict=True)
    }
    timings = measure(calls, rounds=rounds, per_round=in_flight, wall=True)
    return timings["one"].seconds / layers, timings["two"].seconds / layers


def kernel_times(
    function: Callable[..., Any], placed: tuple[Placed, Placed], rounds: int
) -> tuple[float, ...]:
    """Seconds of the kernel on one GPU, and on each of two; () where CUPTI cannot be had."""
    samples: list[list[float]] = [[], []]
    try:
        for _ in range(rounds):
            for gpus, operands in enumerate(placed, start=1):

                def turn(operands: Placed = operands) -> list[jax.Array]:
                    return [function(*operands) for _ in range(CALLS_IN_SESSION)]

                kernels = kernels_launched_by(turn)
                if len(kernels) != gpus * CALLS_IN_SESSION:
                    raise CuptiUnavailableError(
                        f"CUPTI saw {len(kernels)} kernels of {CALLS_IN_SESSION} calls on {gpus}"
                    )
                samples[gpus - 1].append(statistics.fmean(seconds for _, seconds in kernels))
    except CuptiUnavailableError as error:
        print(f"(no {KERNEL_TIME}: {error})")
        return ()
    return tuple(statistics.median(of_gpus) for of_gpus in samples)


if __name__ == "__main__":
    raise SystemExit(main())
