"""The table of named cases, and the arrays they stand for.

One case is one call: extents, dtypes and where the rows stand. Every kernel runs every case.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

PADDING = -1


@dataclass(frozen=True)
class Case:
    """One call. ``placement`` says how positions are made; see :meth:`positions`."""

    name: str
    batch: int = 1
    q_len: int = 64
    n_past: int = 0
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    spare: int = 0  # slots of the cache beyond the last position
    placement: str = "growing"
    q_dtype: str = "float32"
    kv_dtype: str = "float16"
    kv_len: int | None = None  # overrides n_past + q_len + spare

    def __str__(self) -> str:
        return self.name

    @property
    def slots(self) -> int:
        return self.n_past + self.q_len + self.spare if self.kv_len is None else self.kv_len

    @property
    def seed(self) -> int:
        return zlib.crc32(self.name.encode())

    def positions(self) -> np.ndarray:
        """[B, T] int32."""
        growing = self.n_past + np.arange(self.q_len, dtype=np.int32)
        rows = np.broadcast_to(growing, (self.batch, self.q_len)).copy()
        rng = np.random.default_rng(self.seed + 1)
        if self.placement == "growing":
            return rows
        if self.placement == "staggered":  # each sequence of the batch at another place
            return np.maximum(rows - 7 * np.arange(self.batch, dtype=np.int32)[:, None], PADDING)
        if self.placement == "padded_tail":
            rows[:, -max(1, self.q_len // 3) :] = PADDING
            return rows
        if self.placement == "padded_head":
            rows[:, : max(1, self.q_len // 3)] = -7
            return rows
        if self.placement == "all_padding":
            return np.full_like(rows, PADDING)
        if self.placement == "shuffled":
            return rng.permuted(rows, axis=1)
        if self.placement == "anywhere":  # repeats, gaps, padding, past the end of the cache
            rows = rng.integers(-20, self.slots + 20, rows.shape, dtype=np.int32)
            rows[0, 0] = np.iinfo(np.int32).max
            return rows
        raise ValueError(self.placement)

    def arrays(self) -> tuple[jnp.ndarray, jnp.ndarray, jnp.ndarray, jnp.ndarray]:
        """q, k, v, unit normal, and positions."""
        rng = np.random.default_rng(self.seed)

        def normal(length: int, heads: int, dtype: str) -> jnp.ndarray:
            shape = (self.batch, length, heads, self.head_dim)
            return jnp.asarray(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)

        return (
            normal(self.q_len, self.q_heads, self.q_dtype),
            normal(self.slots, self.kv_heads, self.kv_dtype),
            normal(self.slots, self.kv_heads, self.kv_dtype),
            jnp.asarray(self.positions()),
        )

    def unseen_slots(self) -> np.ndarray:
        """[B, S] bool: slots that no row of the sequence sees."""
        highest = self.positions().max(axis=1, initial=PADDING)
        return np.arange(self.slots)[None] > highest[:, None]


def _lengths() -> list[Case]:
    named = {
        "one_query": 1,
        "two_queries": 2,
        "tile_minus_one": 63,
        "tile": 64,
        "tile_plus_one": 65,
        "two_tiles_minus_one": 127,
        "two_tiles": 128,
        "two_tiles_plus_one": 129,
        "three_tiles_plus_one": 193,
        "four_tiles_plus_one": 257,
    }
    return [Case(name, q_len=length, spare=3) for name, length in named.items()]


def _head_groups() -> list[Case]:
    heads = {
        "mha": (4, 4),
        "mqa": (4, 1),
        "gqa_3": (9, 3),
        "gqa_5": (5, 1),
        "gqa_7": (28, 4),
        "gqa_8": (32, 4),
        "gqa_16": (16, 1),
    }
    return [
        Case(name, q_len=70, n_past=61, q_heads=q_heads, kv_heads=kv_heads)
        for name, (q_heads, kv_heads) in heads.items()
    ]


def _placements() -> list[Case]:
    base = Case("", batch=2, q_len=131, n_past=40, spare=29)
    return [
        replace(base, name=placement, placement=placement)
        for placement in (
            "staggered",
            "padded_tail",
            "padded_head",
            "all_padding",
            "shuffled",
            "anywhere",
        )
    ]


def _dtypes() -> list[Case]:
    pairs = [
        ("float32", "float16"),
        ("float32", "bfloat16"),
        ("float16", "float16"),
        ("bfloat16", "bfloat16"),
    ]
    return [
        Case(
            f"q_{q_dtype}_cache_{kv_dtype}_d{head_dim}",
            q_len=100,
            n_past=33,
            spare=11,
            head_dim=head_dim,
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
        )
        for q_dtype, kv_dtype in pairs
        for head_dim in (64, 128)
    ]


CASES: list[Case] = [
    *_lengths(),
    *_head_groups(),
    *_placements(),
    *_dtypes(),
    Case("chunk_in_the_middle", q_len=100, n_past=157, spare=300),
    Case("chunk_at_tile_edge", q_len=64, n_past=192, spare=1),
    Case("decode_long", batch=3, q_len=1, n_past=1000, placement="staggered"),
    Case("kv_shorter_than_q", q_len=256, n_past=-253, kv_len=3, q_heads=2, kv_heads=1),
    Case("one_slot", q_len=5, kv_len=1),
    Case("batch_5", batch=5, q_len=33, n_past=21, placement="staggered", q_heads=6, kv_heads=2),
    *(
        Case(f"head_dim_{d}", q_len=70, n_past=5, spare=2, head_dim=d)
        for d in (1, 8, 32, 46, 80, 96, 256, 320)
    ),
    *(
        Case(f"head_dim_{d}_{t}", q_len=70, n_past=5, head_dim=d, q_dtype=t, kv_dtype=t)
        for d, t in ((80, "bfloat16"), (256, "bfloat16"), (256, "float16"), (46, "float16"))
    ),
]

BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES), "two cases share a name"


@dataclass(frozen=True)
class Mask:
    """Options of a call, for any case; see :meth:`options`."""

    name: str
    starts: str = ""  # "sequences": one a sequence; "rows": one a row; "": none
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        return self.name

    def options(self, case: Case) -> dict[str, object]:
        """Keywords of ``prefill_attention``: only the options that are there."""
        rng = np.random.default_rng(case.seed + 2)
        found: dict[str, object] = {}
        if self.starts:
            shape = (case.batch, case.q_len) if self.starts == "rows" else (case.batch,)
            starts = rng.integers(-5, max(1, case.slots // 2), shape, dtype=np.int32)
            found["starts"] = jnp.asarray(starts)
        for option in ("sliding_window", "logits_soft_cap"):
            if getattr(self, option) is not None:
                found[option] = getattr(self, option)
        if self.sinks:
            sinks = rng.standard_normal(case.q_heads).astype(np.float32)
            sinks[-1] = -np.inf
            found["sinks"] = jnp.asarray(sinks)
        return found


MASKS: list[Mask] = [
    Mask("left_padded", starts="sequences"),
    Mask("documents", starts="rows"),
    Mask("window_1", sliding_window=1),
    Mask("window_tile_plus_one", sliding_window=65),
    Mask("cap", logits_soft_cap=3.0),
    Mask("sinks", sinks=True),
    Mask("gpt_oss", sliding_window=128, sinks=True),
    Mask("gemma_2", starts="sequences", sliding_window=100, logits_soft_cap=50.0),
    Mask("everything", starts="rows", sliding_window=70, logits_soft_cap=2.0, sinks=True),
]
