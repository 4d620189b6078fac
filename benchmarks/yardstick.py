"""Times the kernels of this machine against each other on a few layers, in one run.

    python benchmarks/yardstick.py [--cells NAME,NAME] [--rounds N] [--json PATH]

On a GPU: each kernel's time per layer, its ratio to `naive` (every row reads K and V for itself),
and the K and V bytes that its tiling asks for. On a CPU: `cpu` against dense attention by
jax.nn.dot_product_attention and, where torch is installed, against its flash attention; and how the
memory of a call grows with the prompt.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from timing import Call, Timing, machine, measure, print_machine, print_table
from workload import (
    YARDSTICK_CPU,
    YARDSTICK_GPU,
    Checker,
    Inputs,
    Workload,
    make_inputs,
    select,
)

import jax_fa

# Query rows and slots of a tile of the kernels that have one size whatever the problem.
TILES = {"naive": (1, 1), "portable": (64, 64)}

MEMORY_LENGTHS = (1024, 2048, 4096)


def main() -> int:
    """Runs the benchmark; returns the process's exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", default="", help="comma-separated names; default: all")
    parser.add_argument("--rounds", type=int, default=5, help="shuffled rounds over all contenders")
    parser.add_argument("--json", type=Path, help="also write everything there")
    args = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    report: dict[str, Any] = {"machine": machine("torch"), "rounds": args.rounds, "cells": []}
    print_machine(report["machine"])
    if on_gpu:
        for cell in select(YARDSTICK_GPU, args.cells):
            report["cells"].append(_gpu_cell(cell, args.rounds))
    else:
        # Memory first: what dense attention frees stays mapped, and would hide a later growth.
        report["memory"] = _memory_growth()
        for cell in select(YARDSTICK_CPU, args.cells):
            report["cells"].append(_cpu_cell(cell, args.rounds))
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    wrong = [
        f"{cell['name']}: {name}: {result['status']}"
        for cell in report["cells"]
        for name, result in cell["results"].items()
        if result["status"].startswith("wrong")
    ]
    for line in wrong:
        print(line)
    return 1 if wrong else 0


def _our_call(x: Inputs, kernel: str) -> Call:
    attend = jax.jit(partial(jax_fa.prefill_attention, implementation=kernel))
    return partial(attend, x.q, x.k, x.v, x.positions)


def _run(
    cell: Workload, x: Inputs, calls: Mapping[str, Callable[[], Call]], rounds: int
) -> tuple[dict[str, dict[str, Any]], dict[str, Timing]]:
    """Prepares, checks and times contenders.

    Args:
      cell: what is run.
      x: its inputs.
      calls: by name, what prepares a contender; it may raise, which becomes the contender's status.
      rounds: as in timing.measure.

    Returns:
      Each contender's result for the report, and the timings of those that ran and were right.
    """
    checker = Checker(x)
    results: dict[str, dict[str, Any]] = {}
    ready: dict[str, Call] = {}
    for name, prepare in calls.items():
        try:
            call = prepare()
            error = checker.error(_as_jax(jax.block_until_ready(call())))
        except Exception as failure:  # a refusal or a missing package is this contender's result
            results[name] = {"status": " ".join(str(failure).split())}
            continue
        if error > checker.TOLERANCE:
            results[name] = {"status": f"wrong: relative error {error:.2g}"}
            continue
        results[name] = {"status": "ok", "relative_error": error}
        ready[name] = call
    timings = measure(ready, rounds=rounds)
    for name, timing in timings.items():
        results[name] |= timing.as_json() | {"flops_per_s": cell.flops() / timing.seconds}
    return results, timings


def _gpu_cell(cell: Workload, rounds: int) -> dict[str, Any]:
    x = make_inputs(cell)
    kernels = jax_fa.available_kernels()
    results, timings = _run(
        cell, x, {kernel: partial(_our_call, x, kernel) for kernel in kernels}, rounds
    )
    print(f"\n{cell.name}: {cell.describe()}, per layer")
    rows = [["kernel", "us", "quartiles", "TFLOP/s", "x naive", "K/V read by formula"]]
    for name, result in results.items():
        if name not in timings:
            print(f"  {name}: {result['status']}")
            continue
        result["kv_bytes"] = cell.kv_bytes(*TILES[name]) if name in TILES else None
        if "naive" in timings:
            result["times_naive"] = timings["naive"].seconds / timings[name].seconds
        rows.append(
            [
                name,
                f"{result['us']:.1f}",
                f"{result['q1_us']:.1f} .. {result['q3_us']:.1f}",
                f"{result['flops_per_s'] * 1e-12:.2f}",
                f"{result['times_naive']:.1f}" if "times_naive" in result else "-",
                f"{result['kv_bytes'] * 1e-9:.3f} GB" if result["kv_bytes"] else "-",
            ]
        )
    print_table(rows)
    _print_methods(timings)
    return {"name": cell.name, "shape": cell.describe(), "results": results}


def _cpu_cell(cell: Workload, rounds: int) -> dict[str, Any]:
    x = make_inputs(cell)
    contenders: dict[str, Callable[[], Call]] = {
        "cpu": partial(_our_call, x, "cpu"),
        "dense jax.nn, float32": partial(_dense_call, x),
        "torch flash, float32": partial(_torch_call, x, "float32"),
        "torch flash, bfloat16": partial(_torch_call, x, "bfloat16"),
    }
    results, timings = _run(cell, x, contenders, rounds)
    print(f"\n{cell.name}: {cell.describe()}, per layer")
    rows = [["contender", "ms", "quartiles", "GFLOP/s", "time / cpu's"]]
    for name, result in results.items():
        if name not in timings:
            print(f"  {name}: {result['status']}")
            continue
        if "cpu" in timings:
            result["times_ours"] = timings[name].seconds / timings["cpu"].seconds
        first, third = timings[name].quartiles
        rows.append(
            [
                name,
                f"{result['us'] * 1e-3:.1f}",
                f"{first * 1e3:.1f} .. {third * 1e3:.1f}",
                f"{result['flops_per_s'] * 1e-9:.1f}",
                f"{result['times_ours']:.2f}" if "times_ours" in result else "-",
            ]
        )
    print_table(rows)
    _print_methods(timings)
    return {"name": cell.name, "shape": cell.describe(), "results": results}


def _dense_call(x: Inputs) -> Call:
    """Attention with materialised scores, spared the conversion of the cache to float32."""
    k, v = x.k.astype(jnp.float32), x.v.astype(jnp.float32)
    return partial(_dense, x.q, k, v)


@jax.jit
def _dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def _torch_call(x: Inputs, dtype: str) -> Call:
    """torch's fused attention on [batch, heads, length, head_dim] arrays of its own, every core."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError as error:
        raise RuntimeError(f"torch is not installed ({error})") from error
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    q, k, v = (
        torch.tensor(jax.device_get(a.astype(jnp.float32)))
        .transpose(1, 2)
        .contiguous()
        .to(getattr(torch, dtype))
        for a in (x.q, x.k, x.v)
    )

    def call() -> Any:
        with torch.inference_mode(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
        return out

    return call


def _as_jax(result: Any) -> jax.Array:
    """A contender's output as [batch, q_len, q_heads, head_dim]."""
    if isinstance(result, jax.Array):
        return result
    return jnp.asarray(result.float().transpose(1, 2).contiguous().numpy())  # torch's order


def _memory_growth() -> list[dict[str, Any]]:
    """Prints and returns what one call needs beyond its operands and result, by prompt length."""
    shapes = [
        Workload("memory", q_len, 8, 2, 128, dtype="float16", q_dtype="float32")
        for q_len in MEMORY_LENGTHS
    ]
    print(f"\nMemory of one call beyond operands and result, T = S, {shapes[0].describe()}")
    rows = [["contender", *(f"T = {shape.q_len}" for shape in shapes)]]
    report = []
    for name, compile_call in (("cpu", _compile_ours), ("dense jax.nn, float32", _compile_dense)):
        needs = [_memory_of(compile_call, shape) for shape in shapes]
        report.append({"contender": name, "q_len": MEMORY_LENGTHS, "bytes": needs})
        rows.append([f"{name}: XLA temporaries", *(_mib(need["temporaries"]) for need in needs)])
        rows.append([f"{name}: growth of peak RSS", *(_mib(need["peak_rss"]) for need in needs)])
    print_table(rows)
    return report


Compiled = tuple[jax.stages.Compiled, tuple[jax.Array, ...]]


def _compile_ours(x: Inputs) -> Compiled:
    attend = jax.jit(partial(jax_fa.prefill_attention, implementation="cpu"))
    operands = (x.q, x.k, x.v, x.positions)
    return attend.lower(*operands).compile(), operands


def _compile_dense(x: Inputs) -> Compiled:
    operands = (x.q, x.k.astype(jnp.float32), x.v.astype(jnp.float32))
    return _dense.lower(*operands).compile(), operands


def _memory_of(
    compile_call: Callable[[Inputs], Compiled], shape: Workload
) -> dict[str, int | None]:
    """Bytes that XLA sets aside for temporaries, and bytes by which the first run raises the peak
    of resident memory past what operands and result need. The second counts the kernel's own."""
    compiled, operands = compile_call(make_inputs(shape))
    jax.block_until_ready(operands)
    analysis = compiled.memory_analysis()
    before = _reset_peak_rss()
    jax.block_until_ready(compiled(*operands))
    peak = _status_bytes("VmHWM")
    grown = None
    if before is not None and peak is not None:
        grown = max(0, peak - before - operands[0].nbytes)  # the result is as large as q
    return {
        "temporaries": None if analysis is None else analysis.temp_size_in_bytes,
        "peak_rss": grown,
    }


def _reset_peak_rss() -> int | None:
    """Makes the kernel forget the peak so far, and returns the bytes resident now (Linux only)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _status_bytes("VmRSS")


def _status_bytes(field: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")]
    return sizes[0] if sizes else None


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.1f} MiB"


def _print_methods(timings: Mapping[str, Timing]) -> None:
    for method in sorted({timing.method for timing in timings.values()}):
        print(f"({method})", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
