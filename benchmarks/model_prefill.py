"""Prefill of a real prompt through a real model, with one attention after another in its place.

    python benchmarks/model_prefill.py [--chunk N] [--gguf PATH]

The 1,079-token prompt of the tests through SmolLM2-135M (examples/smollm2): the kernel that serves
here, the reference, and `jax.nn.dot_product_attention` with a mask. Interleaved, wall clock,
median of 7.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from timing import machine, print_machine, print_table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from generate import attention_of  # noqa: E402
from smollm2.fetch import find_gguf  # noqa: E402
from smollm2.session import Session  # noqa: E402
from smollm2.weights import load_model  # noqa: E402

ROUNDS = 7


def dense(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
    mask = (jnp.arange(k.shape[0])[None] <= positions[:, None])[None]
    return jax.nn.dot_product_attention(q, k.astype(q.dtype), v.astype(q.dtype), mask=mask)


def long_prompt() -> list[int]:
    cases = json.loads((ROOT / "tests" / "data" / "smollm2_reference.json").read_text())
    ids: list[int] = max((case["ids"] for case in cases["prompts"]), key=len)
    return ids


def prefill_seconds(session: Any, ids: list[int], chunk: int) -> float:
    start = time.perf_counter()
    session.extend(ids, chunk=chunk).block_until_ready()
    elapsed = time.perf_counter() - start
    session.filled = 0
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunk", type=int, help="tokens at a time (default: all)")
    parser.add_argument("--gguf", help="model file (default: fetched, 92 MiB)")
    args = parser.parse_args()
    print_machine(machine())
    model, ids = load_model(find_gguf(args.gguf)), long_prompt()
    chunk = args.chunk or len(ids)
    attentions = {
        "jax_fa": attention_of("jax_fa", None),
        "jax.nn.dot_product_attention": dense,
        "jax_fa.reference": attention_of("reference", None),
    }
    sessions = {name: Session(model, len(ids), a) for name, a in attentions.items()}
    for session in sessions.values():
        session.warm_up(chunk)
        prefill_seconds(session, ids, chunk)
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(ROUNDS):
        for name, session in sessions.items():
            times[name].append(prefill_seconds(session, ids, chunk))
    rows = [["attention", "s", "tokens/s"]]
    for name, samples in times.items():
        median = statistics.median(samples)
        rows.append([name, f"{median:.3f}", f"{len(ids) / median:.0f}"])
    print_table(rows)


if __name__ == "__main__":
    main()
