"""What one call costs the host: a jitted call, and the first one (trace, lower, compile).

    python benchmarks/overhead.py

Small arrays, so that the device's time hides behind the host's. Ours beside
`jax.nn.dot_product_attention` and a plain elementwise operation, in one process, interleaved;
medians of blocks of calls that are dispatched back to back and waited for together.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from timing import machine, print_machine, print_table

import jax_fa

CALLS = 200
BLOCKS = 15


def contenders() -> tuple[dict[str, Callable[..., Any]], tuple[jax.Array, ...]]:
    key = jax.random.key(0)
    q = jax.random.normal(key, (1, 16, 8, 64), jnp.bfloat16)
    k = v = jax.random.normal(key, (1, 128, 2, 64), jnp.bfloat16)
    positions = jnp.arange(16)[None]

    def dense(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
        mask = jnp.arange(k.shape[1]) <= positions[:, None, :, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask)

    def elementwise(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
        return q + 1

    calls = {
        "jax_fa.prefill_attention": jax_fa.prefill_attention,
        "jax.nn.dot_product_attention": dense,
        "q + 1": elementwise,
    }
    return calls, (q, k, v, positions)


def first_call_ms(function: Callable[..., Any], arrays: tuple[jax.Array, ...]) -> float:
    """Trace, lower, compile and run of a function that JAX has not seen."""
    start = time.perf_counter()
    jax.block_until_ready(jax.jit(lambda *a: function(*a))(*arrays))
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    print_machine(machine("jax", "jaxlib", "jax-fa"))
    calls, arrays = contenders()
    jax.block_until_ready(jax.jit(lambda x: x * 2)(arrays[0]))  # starts the backend
    first = {
        name: min(first_call_ms(call, arrays) for _ in range(3)) for name, call in calls.items()
    }
    jitted = {name: jax.jit(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for block in range(BLOCKS + 1):
        for name, call in jitted.items():
            jax.block_until_ready(call(*arrays))
            start = time.perf_counter()
            results = [call(*arrays) for _ in range(CALLS)]
            elapsed = time.perf_counter() - start
            jax.block_until_ready(results)
            if block > 0:
                times[name].append(1e6 * elapsed / CALLS)
    rows = [
        [name, f"{statistics.median(samples):.1f}", f"{first[name]:.1f}"]
        for name, samples in times.items()
    ]
    print_table([["call", "us a call", "first call, ms"], *rows])


if __name__ == "__main__":
    main()
