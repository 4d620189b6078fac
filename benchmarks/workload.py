"""The shapes that benchmarks run, their inputs, the work in them, and a check of an output.

A workload is one layer of causal prefill: `q_len` query rows at positions n_past, n_past + 1, ...
over a cache of exactly n_past + q_len slots. How it is timed: timing.py; who runs it: the scripts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Workload:
    """One attention call; `dtype` is the cache's and, unless `q_dtype` says otherwise, q's."""

    name: str
    q_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    batch: int = 1
    n_past: int = 0
    q_dtype: str = ""

    @property
    def kv_len(self) -> int:
        """Slots of the cache, all of them filled."""
        return self.n_past + self.q_len

    def describe(self) -> str:
        """The shape in one line."""
        dtype = f"{self.q_dtype} q, {self.dtype}" if self.q_dtype else self.dtype
        return (
            f"B={self.batch} T={self.q_len} n_past={self.n_past} "
            f"heads {self.q_heads}/{self.kv_heads} D={self.head_dim} {dtype}"
        )

    def visible_pairs(self) -> int:
        """(query row, slot) pairs that the contract lets one query head see, over the batch."""
        visible = np.minimum(self.n_past + np.arange(self.q_len), self.kv_len - 1) + 1
        return self.batch * int(visible.sum())

    def flops(self) -> int:
        """Two products of 2 * head_dim operations for each visible pair and query head."""
        return 4 * self.head_dim * self.q_heads * self.visible_pairs()

    def kv_bytes(self, q_tile: int, kv_tile: int) -> int:
        """K and V bytes that a kernel asks for when each tile of `q_tile` rows of one query head
        reads, by itself and in whole tiles of `kv_tile` slots, all that its last row sees."""
        last_rows = np.minimum(np.arange(q_tile, self.q_len + q_tile, q_tile), self.q_len)
        slots = -(-(self.n_past + last_rows) // kv_tile) * kv_tile
        slots = np.minimum(slots, self.kv_len)
        row_bytes = self.head_dim * jnp.dtype(self.dtype).itemsize
        return 2 * row_bytes * self.batch * self.q_heads * int(slots.sum())


@dataclass(frozen=True)
class Inputs:
    """The arrays of one call."""

    q: jax.Array  # [batch, q_len, q_heads, head_dim]
    k: jax.Array  # [batch, kv_len, kv_heads, head_dim]
    v: jax.Array  # [batch, kv_len, kv_heads, head_dim]
    positions: jax.Array  # [batch, q_len] int32


# The cells that this library is measured by on a GPU, in the order in which they are reported.
CELLS: tuple[Workload, ...] = (
    Workload("qwen7b-2k", 2048, 28, 4, 128, dtype="float16"),
    Workload("qwen7b-2k-bf16", 2048, 28, 4, 128),
    Workload("llama8b-512", 512, 32, 8, 128),
    Workload("llama8b-1k", 1024, 32, 8, 128),
    Workload("llama8b-4k", 4096, 32, 8, 128),
    Workload("llama8b-8k", 8192, 32, 8, 128),
    Workload("llama8b-16k", 16384, 32, 8, 128),
    Workload("llama8b-32k", 32768, 32, 8, 128),
    Workload("llama8b-b8-1k", 1024, 32, 8, 128, batch=8),
    Workload("chunk-512@8k", 512, 32, 8, 128, n_past=7680),
    Workload("chunk-2k@32k", 2048, 32, 8, 128, n_past=30720),
    Workload("chunk-8k@128k", 8192, 32, 8, 128, n_past=122880),
    Workload("spec-16@32k", 16, 32, 8, 128, n_past=32752),
    Workload("chunk-128@32k", 128, 32, 8, 128, n_past=32640),
    Workload("gqa64-2k", 2048, 32, 8, 64),
    Workload("mha16-16k-d128", 16384, 16, 16, 128, dtype="float16"),
    Workload("mha32-16k-d64", 16384, 32, 32, 64, dtype="float16"),
    Workload("mha8-16k-d256", 16384, 8, 8, 256, dtype="float16"),
)

# Layers on which the kernels of one GPU are compared with each other. The first is the shape that
# README's yardstick table shows: a layer of Qwen2.5-7B over a prompt of 2,048 tokens.
YARDSTICK_GPU: tuple[Workload, ...] = (
    Workload("qwen7b-2k", 2048, 28, 4, 128, dtype="float16"),
    Workload("llama8b-2k", 2048, 32, 8, 128, dtype="float16"),
    Workload("gqa64-2k", 2048, 32, 8, 64, dtype="float16"),
    Workload("chunk-512@8k", 512, 32, 8, 128, dtype="float16", n_past=7680),
)

YARDSTICK_CPU: tuple[Workload, ...] = (
    Workload("smollm2-2k", 2048, 9, 3, 64, dtype="float16", q_dtype="float32"),
    Workload("llama8b-1k", 1024, 32, 8, 128, dtype="float16", q_dtype="float32"),
    Workload("gqa8-4k", 4096, 8, 2, 128, dtype="float16", q_dtype="float32"),
)


def make_inputs(workload: Workload, seed: int = 0) -> Inputs:
    """Unit-normal q, k and v on the default device, and the positions of a causal chunk."""
    w = workload
    keys = jax.random.split(jax.random.key(seed), 3)
    kv_shape = (w.batch, w.kv_len, w.kv_heads, w.head_dim)
    positions = w.n_past + jnp.arange(w.q_len, dtype=jnp.int32)
    q_dtype = w.q_dtype or w.dtype
    return Inputs(
        q=jax.random.normal(keys[0], (w.batch, w.q_len, w.q_heads, w.head_dim), q_dtype),
        k=jax.random.normal(keys[1], kv_shape, w.dtype),
        v=jax.random.normal(keys[2], kv_shape, w.dtype),
        positions=jnp.tile(positions, (w.batch, 1)),
    )


def select(workloads: tuple[Workload, ...], names: str) -> tuple[Workload, ...]:
    """The workloads of the comma-separated `names` in the order of `workloads`; "" means all."""
    wanted = [name for name in names.split(",") if name]
    known = [w.name for w in workloads]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise SystemExit(f"no such cell: {', '.join(unknown)}; there are: {', '.join(known)}")
    return tuple(w for w in workloads if not wanted or w.name in wanted)


class Checker:
    """Holds the float32 answer for rows sampled over the chunk, and compares outputs with it.

    Sampling keeps the check to milliseconds on the long cells; the first and the last row are
    always in it, so that a mask aligned to the wrong end cannot pass. It guards a benchmark against
    calls that compute something else; accuracy has its own tests.
    """

    # Relative to the norm of each (row, head). 16-bit probabilities cost about 2e-3; a wrong mask,
    # scale or head mapping costs tenths.
    TOLERANCE = 2e-2

    def __init__(self, inputs: Inputs, samples: int = 64):
        """Computes the expected rows of `inputs` at about `samples` places."""
        q_len = inputs.q.shape[1]
        count = min(samples, q_len)
        self._rows = np.unique(np.linspace(0, q_len - 1, count).round().astype(np.int32))
        self._expected = _attend_rows(inputs.q, inputs.k, inputs.v, inputs.positions, self._rows)

    def error(self, out: jax.Array) -> float:
        """Largest relative error over the sampled (row, head) pairs; inf if out is not finite."""
        if out.shape[:1] + out.shape[2:] != self._expected.shape[:1] + self._expected.shape[2:]:
            return math.inf
        got = out[:, self._rows].astype(jnp.float32)
        distance = jnp.linalg.norm(got - self._expected, axis=-1)
        relative = distance / jnp.linalg.norm(self._expected, axis=-1)
        worst = float(jnp.max(relative))
        return worst if math.isfinite(worst) else math.inf


@jax.jit
def _attend_rows(
    q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, rows: jax.Array
) -> jax.Array:
    """Attention of the query rows `rows` in float32: [batch, len(rows), q_heads, head_dim]."""
    batch, _, q_heads, head_dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    group = q_heads // kv_heads
    highest = jax.lax.Precision.HIGHEST

    def attend(row: jax.Array) -> jax.Array:
        q_row = q[:, row].reshape(batch, kv_heads, group, head_dim).astype(jnp.float32)
        scores = jnp.einsum("bngd,bsnd->bngs", q_row, k.astype(jnp.float32), precision=highest)
        seen = jnp.arange(kv_len) <= positions[:, row, None, None, None]
        scores = jnp.where(seen, scores / math.sqrt(head_dim), -jnp.inf)
        probs = jax.nn.softmax(scores, axis=-1)
        out = jnp.einsum("bngs,bsnd->bngd", probs, v.astype(jnp.float32), precision=highest)
        return out.reshape(batch, q_heads, head_dim)

    return jnp.moveaxis(jax.lax.map(attend, rows), 0, 1)
