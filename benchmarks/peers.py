"""Times jax_fa and every installed peer on the cells of workload.py, in one interleaved run.

    python benchmarks/peers.py [--cells NAME,NAME] [--peers NAME,NAME] [--kernels NAME,NAME]
                               [--rounds N] [--json PATH]

Peers are looked for under these names on PyPI; the ones not found are named and left out:
dew-flash-attn-cu13 (FA3), flash-attn3-jax (FA3-kvcache), fa4-jax with nvidia-cutlass-dsl (FA4),
tokamax, and cuDNN, which comes with jax[cuda13]. How each is called: peer_calls.py. An output that
does not agree with float32 attention disqualifies its contender in that cell.

The last table and the exit status speak of jax_fa alone: 1 if one of its own outputs was wrong or
one of its calls failed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from peer_calls import PEERS, AbsentError, Attend, UnsupportedError
from timing import Call, Timing, machine, measure, print_machine, print_table
from workload import CELLS, Checker, Inputs, Workload, make_inputs, select

import jax_fa

OURS = "jax_fa"
OURS_FREE = "jax_fa, chunk_invariant=False"

# Groups whose geometric means are reported. Short chunks over a long past are listed, not grouped.
GROUPS: tuple[tuple[str, Callable[[Workload], bool]], ...] = (
    ("D = 128, T >= 512", lambda w: w.head_dim == 128 and w.q_len >= 512),
    ("D = 64", lambda w: w.head_dim == 64),
    ("D = 256", lambda w: w.head_dim == 256),
)


def main() -> int:
    """Runs the benchmark; returns the process's exit status."""
    args = _parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit(
            "peers.py compares GPU kernels, and jax sees no GPU here; "
            "benchmarks/yardstick.py has the comparison for CPUs."
        )
    cells = select(CELLS, args.cells)
    peers, absent = _load_peers(args.peers)
    report: dict[str, Any] = {
        "machine": machine(*(peer.package for peer in PEERS)),
        "settings": {"rounds": args.rounds, "per_round": args.per_round, "seed": args.seed},
        "absent": absent,
        "cells": [],
    }
    print_machine(report["machine"])
    for name, reason in absent.items():
        print(f"# without {name}: {reason}")
    kernels = [name for name in args.kernels.split(",") if name]
    for cell in cells:
        report["cells"].append(_run_cell(cell, peers, kernels, args))
        _write_json(args.json, report)
    report["groups"] = _summarise(cells, report["cells"])
    _write_json(args.json, report)
    results = [cell["results"] for cell in report["cells"]]
    sound = all(
        result["status"] == "ok"
        for cell in results
        for name, result in cell.items()
        if name in (OURS, OURS_FREE)
    )
    return 0 if sound else 1


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", default="", help="comma-separated cell names; default: all")
    parser.add_argument("--peers", default="all", help="comma-separated, or 'none'; default: all")
    parser.add_argument("--kernels", default="", help="kernels of jax_fa to time by name as well")
    parser.add_argument("--rounds", type=int, default=5, help="shuffled rounds over all contenders")
    parser.add_argument("--per-round", type=int, default=4, help="runs of a contender in its turn")
    parser.add_argument("--seed", type=int, default=0, help="of the data and the orders")
    parser.add_argument("--json", type=Path, help="also write everything there, cell by cell")
    return parser.parse_args()


def _load_peers(names: str) -> tuple[dict[str, Attend], dict[str, str]]:
    """What can be called, and what cannot with the reason."""
    wanted = [peer.name for peer in PEERS] if names == "all" else names.split(",")
    wanted = [name for name in wanted if name not in ("", "none")]
    unknown = sorted(set(wanted) - {peer.name for peer in PEERS})
    if unknown:
        known = ", ".join(peer.name for peer in PEERS)
        raise SystemExit(f"no such peer: {', '.join(unknown)}; there are: {known}")
    loaded: dict[str, Attend] = {}
    absent: dict[str, str] = {}
    for peer in PEERS:
        if peer.name not in wanted:
            absent[peer.name] = "not asked for"
            continue
        try:
            loaded[peer.name] = peer.load()
        except AbsentError as reason:
            absent[peer.name] = str(reason)
    return loaded, absent


def _our_calls(x: Inputs, kernels: Sequence[str]) -> dict[str, Call]:
    """jax_fa's default call, the call that frees its tiling, and `kernels` by name."""

    def call(**options: Any) -> Call:
        return partial(
            jax.jit(partial(jax_fa.prefill_attention, **options)), x.q, x.k, x.v, x.positions
        )

    calls = {OURS: call(), OURS_FREE: call(chunk_invariant=False)}
    return calls | {f"{OURS}: {kernel}": call(implementation=kernel) for kernel in kernels}


def _run_cell(
    cell: Workload,
    peers: Mapping[str, Attend],
    kernels: Sequence[str],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Checks and times every contender on one cell, prints the block, returns it for the JSON."""
    x = make_inputs(cell, args.seed)
    served_by = jax_fa.explain(x.q, x.k, x.v, x.positions).kernel
    print(f"\n{cell.name}: {cell.describe()}; jax_fa: {served_by}", flush=True)
    calls = _our_calls(x, kernels)
    results: dict[str, dict[str, Any]] = {}
    for name, attend in peers.items():
        try:
            calls |= attend(cell, x)
        except UnsupportedError as reason:
            results[name] = {"status": f"skipped: {reason}"}
    checker = Checker(x)
    for name, call in calls.items():
        results[name] = _check(call, checker)
    sound = {name: call for name, call in calls.items() if results[name]["status"] == "ok"}
    timings = measure(sound, rounds=args.rounds, per_round=args.per_round, seed=args.seed)
    for name, timing in timings.items():
        results[name] |= timing.as_json() | {"tflops": cell.flops() / timing.seconds * 1e-12}
    ratios = _ratios(timings)
    for name, result in results.items():
        print(f"  {name:<30}{_describe(result)}", f"x {ratios[name]:.3f}" if name in ratios else "")
    return {
        "name": cell.name,
        "shape": cell.describe(),
        "flops": cell.flops(),
        "served_by": served_by,
        "results": results,
        "best_peer": _best_peer(timings),
        "ratios": ratios,
    }


def _check(call: Call, checker: Checker) -> dict[str, Any]:
    """Compiles and runs a contender once, and compares its output."""
    try:
        error = checker.error(jax.block_until_ready(call()))
    except Exception as failure:  # whatever a contender raises is its result in this cell
        text = " ".join(str(failure).split())
        return {"status": f"failed: {type(failure).__name__}: {text[:160]}"}
    status = "ok" if error <= checker.TOLERANCE else f"wrong: relative error {error:.2g}"
    return {"status": status, "relative_error": error}


def _is_ours(name: str) -> bool:
    return name.startswith(OURS)


def _best_peer(timings: Mapping[str, Timing]) -> str | None:
    peers = [name for name in timings if not _is_ours(name)]
    return min(peers, key=lambda name: timings[name].seconds, default=None)


def _ratios(timings: Mapping[str, Timing]) -> dict[str, float]:
    """The best peer's time over each of ours: above 1 we are ahead."""
    best = _best_peer(timings)
    if best is None:
        return {}
    return {
        name: timings[best].seconds / timing.seconds
        for name, timing in timings.items()
        if _is_ours(name)
    }


def _describe(result: Mapping[str, Any]) -> str:
    if result["status"] != "ok":
        return str(result["status"])
    return (
        f"{result['us']:9.1f} us  [{result['min_us']:.1f} | {result['q1_us']:.1f} .. "
        f"{result['q3_us']:.1f}]  {result['tflops']:6.1f} TFLOP/s  "
        f"err {result['relative_error']:.1e}"
    )


def _summarise(
    cells: Sequence[Workload], reports: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Prints the table of cells and the groups' means; returns the groups."""
    names = [name for name in (OURS, OURS_FREE) if any(name in r["ratios"] for r in reports)]
    print()
    rows = [["cell", f"{OURS}, us", "TFLOP/s", "best peer", "us", *(f"x {name}" for name in names)]]
    for report in reports:
        ours, best = report["results"][OURS], report["best_peer"]
        peer_us = f"{report['results'][best]['us']:.1f}" if best else "-"
        times = [f"{ours['us']:.1f}", f"{ours['tflops']:.0f}"] if "us" in ours else ["-", "-"]
        ratios = [f"{report['ratios'][n]:.3f}" if n in report["ratios"] else "-" for n in names]
        rows.append([report["name"], *times, best or "-", peer_us, *ratios])
    print_table(rows)
    print(f"(x NAME: best peer's time / NAME's; method: {_methods(reports)})\n")
    groups: list[dict[str, Any]] = []
    for label, belongs in GROUPS:
        for name in names:
            ratios_by_cell = {
                cell.name: report["ratios"][name]
                for cell, report in zip(cells, reports, strict=True)
                if belongs(cell) and name in report["ratios"]
            }
            if ratios_by_cell:
                groups.append(_group(label, name, ratios_by_cell))
    return groups


def _group(label: str, name: str, ratios: Mapping[str, float]) -> dict[str, Any]:
    mean = statistics.geometric_mean(ratios.values())
    worst = min(ratios, key=lambda cell: ratios[cell])
    print(
        f"{label}: {name}: geometric mean {mean:.3f} over {len(ratios)} cells, "
        f"lowest {ratios[worst]:.3f} ({worst})"
    )
    return {
        "group": label,
        "contender": name,
        "geometric_mean": mean,
        "cells": len(ratios),
        "lowest": ratios[worst],
        "lowest_cell": worst,
    }


def _methods(reports: Sequence[Mapping[str, Any]]) -> str:
    methods = {
        result["method"]
        for report in reports
        for result in report["results"].values()
        if "method" in result
    }
    return "; ".join(sorted(methods)) or "nothing was timed"


def _write_json(path: Path | None, report: Mapping[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    # Peers allocate beside XLA, which would otherwise take three quarters of the memory at start.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    raise SystemExit(main())
