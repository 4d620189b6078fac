"""Checks built variants against the definition and the contract on a Hopper GPU.

    python check.py FOLDER NAME ...

Prints one line a variant. A hang shows as a missing line: run it under timeout.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from rig import Kernel, reference
from variants import VARIANTS

DEVICE = "cuda"


def normal(shape, dtype, seed):
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def arrays(variant, batch, q_len, kv_len, q_heads, kv_heads, head_dim, seed=0):
    kv_dtype = torch.float16 if variant.element == "__half" else torch.bfloat16
    q_dtype = torch.float32 if variant.query == "float" else kv_dtype
    return (
        normal((batch, q_len, q_heads, head_dim), q_dtype, seed),
        normal((batch, kv_len, kv_heads, head_dim), kv_dtype, seed + 1),
        normal((batch, kv_len, kv_heads, head_dim), kv_dtype, seed + 2),
    )


def growing(batch, q_len, past):
    return (torch.arange(q_len, dtype=torch.int32, device=DEVICE) + past).repeat(batch, 1)


# name: batch, q_len, kv_len, past, q_heads, kv_heads
SHAPES = {
    "one_query": (1, 1, 200, 150, 2, 1),
    "tile_plus_one": (1, 129, 129, 0, 2, 2),
    "two_tiles": (2, 256, 256, 0, 4, 2),
    "ragged": (3, 300, 320, 0, 6, 2),
    "chunk": (1, 200, 1024, 700, 8, 2),
    "gqa_7": (1, 777, 777, 0, 7, 1),
    "long": (1, 1000, 4584, 3584, 2, 1),
    "short_cache": (1, 70, 20, 0, 2, 1),
    "few_rows": (2, 9, 5000, 4900, 14, 2),
    "few_rows_of_a_long_cache": (1, 40, 5000, 300, 4, 2),
}


def errors(found, wanted):
    """Largest absolute and relative (Frobenius) error, inf where non-finite elements differ."""
    found, wanted = found.double(), wanted.double()
    if not torch.equal(found.isfinite(), wanted.isfinite()):
        return math.inf, math.inf
    if not torch.equal(found.isposinf() | found.isneginf(), wanted.isposinf() | wanted.isneginf()):
        return math.inf, math.inf
    found, wanted = found.nan_to_num(0, 0, 0), wanted.nan_to_num(0, 0, 0)
    difference = found - wanted
    return difference.abs().max().item(), (difference.norm() / wanted.norm()).item()


# Padded head dim: true ones that it serves.
NARROW = {64: (8, 40), 128: (72, 96), 256: (136, 192)}

# Bits of the variant that was checked first, for those that must agree with it.
FIRST_BITS: dict[tuple, torch.Tensor] = {}


def check(name: str, kernel: Kernel, chunk_invariant: bool = True) -> list[str]:
    """The names of what failed, with numbers."""
    variant = VARIANTS[name]
    dim = variant.head_dim
    half = variant.element == "__half"
    bound = 2e-3 if half else 1e-2
    bad = []
    worst = 0.0

    def expect(what, q, k, v, positions, scale=None, bound=bound):
        nonlocal worst
        out, lse = kernel(q, k, v, positions, scale)
        again, _ = kernel(q, k, v, positions, scale)
        if not torch.equal(out.view(torch.int16), again.view(torch.int16)):
            bad.append(f"{what}: not deterministic")
        # A float32 q is rounded by the kernel, scaled first; the bound is for what comes after.
        factor = (scale or 1 / math.sqrt(q.shape[-1])) if q.dtype == torch.float32 else 1
        rounded = (q * factor).to(k.dtype) if q.dtype == torch.float32 else q
        want, want_lse = reference(rounded, k, v, positions, 1 if factor != 1 else scale)
        _, relative = errors(out, want)
        lse_error, _ = errors(lse, want_lse)
        worst = max(worst, relative if math.isfinite(relative) else 0)
        if not relative < bound:
            bad.append(f"{what}: out {relative:.2e}")
        if not lse_error < 2e-2:
            bad.append(f"{what}: lse {lse_error:.2e}")
        return out

    for what, (batch, q_len, kv_len, past, q_heads, kv_heads) in SHAPES.items():
        q, k, v = arrays(variant, batch, q_len, kv_len, q_heads, kv_heads, dim)
        expect(what, q, k, v, growing(batch, q_len, past))

    for narrow in NARROW[dim]:
        q, k, v = arrays(variant, 2, 150, 170, 6, 2, narrow)
        expect(f"head_dim {narrow}", q, k, v, growing(2, 150, 0))
    q, k, v = arrays(variant, 1, 150, 170, 2, 2, dim)
    expect("scale 2", q / 8, k, v, growing(1, 150, 0), scale=2.0)
    nothing = k[:, :0].contiguous()
    out, lse = kernel(q, nothing, nothing, growing(1, 150, 0))
    if out.abs().max() != 0 or not lse.isneginf().all():
        bad.append("empty cache: out is not zero or lse not -inf")

    # C2-C4: shuffled and repeated positions, empty rows, positions past the cache, poisoned slots.
    q, k, v = arrays(variant, 2, 300, 700, 4, 2, dim, seed=5)
    positions = torch.randint(-3, 520, (2, 300), dtype=torch.int32, device=DEVICE)
    positions[1, :130] = -1
    poisoned = k.clone(), v.clone()
    poisoned[0][:, 520:], poisoned[1][:, 520:] = math.nan, math.inf
    clean = expect("shuffled", q, k, v, positions)
    out, _ = kernel(q, *poisoned, positions)
    if not torch.equal(out, clean):
        bad.append("poisoned unseen slots changed a bit")
    if out[positions < 0].abs().max() != 0:
        bad.append("empty row is not zero")
    positions[0, 5] = 2**31 - 1
    expect("past_the_cache", q, k, v, positions)

    # A slot that some rows of a tile see must not reach those that do not.
    q, k, v = arrays(variant, 1, 300, 300, 4, 2, dim, seed=9)
    positions = growing(1, 300, 0)
    clean, _ = kernel(q, k, v, positions)
    for slot, value in ((100, math.nan), (200, math.inf), (290, math.nan)):
        dirty = v.clone()
        dirty[0, slot, :, 3] = value
        out, _ = kernel(q, k, dirty, positions)
        if not torch.equal(out[:, :slot], clean[:, :slot]):
            bad.append(f"V of slot {slot} reached rows before it")
        if not torch.equal(out[:, slot:, :, 4:], clean[:, slot:, :, 4:]):
            bad.append(f"V of slot {slot} reached other columns")
        if out[:, slot:, :, 3].isfinite().any():
            bad.append(f"V of slot {slot} did not reach rows that see it")
        dirty = k.clone()
        dirty[0, slot, :, 3] = value
        out, _ = kernel(q, dirty, v, positions)
        if not torch.equal(out[:, :slot], clean[:, :slot]):
            bad.append(f"K of slot {slot} reached rows before it")

    # Scores that outgrow the first tile's maximum, little and enormously.
    for what, factor in (("growing", 6.0), ("steep", 20.0), ("cliff", 400.0)):
        q, k, v = arrays(variant, 1, 700, 700, 2, 1, dim, seed=11)
        ramp = torch.linspace(0.02, 1, 700, device=DEVICE)[None, :, None, None]
        expect(what, (q * factor).to(q.dtype), (k * ramp).to(k.dtype), v, growing(1, 700, 0),
               bound=4 * bound)  # fmt: skip

    if not chunk_invariant:
        return report(name + ", slots shared out", worst, bad)

    # C5: chunks of any size give the bits of the whole.
    q, k, v = arrays(variant, 1, 777, 777, 4, 2, dim, seed=13)
    q = q * 4
    positions = growing(1, 777, 0)
    whole, _ = kernel(q, k, v, positions)
    start = 0
    for size in (1, 63, 200, 3, 257, 253):
        part, _ = kernel(q[:, start : start + size].contiguous(), k, v,
                         positions[:, start : start + size].contiguous())  # fmt: skip
        if not torch.equal(part, whole[:, start : start + size]):
            bad.append(f"chunk at {start} of {size} differs from the whole")
        start += size
    key = (
        variant.element,
        variant.query,
        dim,
        variant.base.endswith("Wide"),
        variant.changes.get("kTileKV", 0),
    )
    if not torch.equal(FIRST_BITS.setdefault(key, whole), whole):
        bad.append("bits differ from the first variant of the same KV tile")
    return report(name, worst, bad)


def report(what: str, worst: float, bad: list[str]) -> list[str]:
    print(f"{what}: {'ok' if not bad else 'BAD'}, worst relative error {worst:.2e}", flush=True)
    for line in bad:
        print(f"    {line}", flush=True)
    return bad


def main() -> None:
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        print(f"{name}: start", flush=True)
        check(name, Kernel(folder / f"{name}.so"))
        if "Split" in VARIANTS[name].base:
            check(name, Kernel(folder / f"{name}.so", chunk_invariant=False), chunk_invariant=False)


if __name__ == "__main__":
    main()
