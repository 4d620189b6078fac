"""Times built variants against FlashAttention-3, interleaved in one run, by CUPTI kernel time.

    python measure.py FOLDER LIBDEW_FLASH_ATTN3 [--cells a,b] [--rounds N] [--json FILE] NAME ...

A row a cell: FA3's time and TFLOP/s, then for each variant time and FA3's time over it (above 1: we
are faster). Every contender runs in each of the shuffled rounds; figures are medians.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import math
import os
import random
import statistics
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import torch
from check import growing, normal
from jax._src.lib import mosaic_gpu
from rig import Kernel
from variants import VARIANTS

CUPTI = mosaic_gpu._mosaic_gpu_ext

# batch, q_len, past, q_heads, kv_heads, head_dim, dtype
CELLS = {
    "l512": (1, 512, 0, 32, 8, 128, "bf16"),
    "l1k": (1, 1024, 0, 32, 8, 128, "bf16"),
    "q2k": (1, 2048, 0, 28, 4, 128, "bf16"),
    "q2k_f16": (1, 2048, 0, 28, 4, 128, "f16"),
    "l2k": (1, 2048, 0, 32, 8, 128, "bf16"),
    "l2k_half": (1, 2048, 0, 16, 4, 128, "bf16"),  # what each of two GPUs has of it
    "b8_1k": (8, 1024, 0, 32, 8, 128, "bf16"),
    "l4k": (1, 4096, 0, 32, 8, 128, "bf16"),
    "l8k": (1, 8192, 0, 32, 8, 128, "bf16"),
    "l16k": (1, 16384, 0, 32, 8, 128, "bf16"),
    "l32k": (1, 32768, 0, 32, 8, 128, "bf16"),
    "c512_8k": (1, 512, 7680, 32, 8, 128, "bf16"),
    "c2k_32k": (1, 2048, 30720, 32, 8, 128, "bf16"),
    "c8k_128k": (1, 8192, 122880, 32, 8, 128, "bf16"),
    "mha16k_f16": (1, 16384, 0, 16, 16, 128, "f16"),
    "g64_2k": (1, 2048, 0, 32, 8, 64, "bf16"),
    "m64_16k_f16": (1, 16384, 0, 32, 32, 64, "f16"),
    "m64_16k": (1, 16384, 0, 32, 32, 64, "bf16"),
    "m256_16k_f16": (1, 16384, 0, 8, 8, 256, "f16"),
    "m256_16k": (1, 16384, 0, 8, 8, 256, "bf16"),
    "c128_32k": (1, 128, 32640, 32, 8, 128, "bf16"),
    "c64_32k": (1, 64, 32704, 32, 8, 128, "bf16"),
    "c256_32k": (1, 256, 32512, 32, 8, 128, "bf16"),
    "c128_2k": (1, 128, 1920, 32, 8, 128, "bf16"),
    "c256_2k": (1, 256, 1792, 32, 8, 128, "bf16"),
    "spec16_1k": (1, 16, 1008, 32, 8, 128, "bf16"),
    "spec16_2k": (1, 16, 2032, 32, 8, 128, "bf16"),
    "spec16_32k": (1, 16, 32752, 32, 8, 128, "bf16"),
    "dec16_8k": (16, 1, 8191, 32, 8, 128, "bf16"),
}
PER_ROUND = 4  # back-to-back runs of a contender in its turn


@functools.cache
def register_flash_attention_3(library: Path) -> None:
    target = jax.ffi.pycapsule(ctypes.CDLL(str(library)).dew_flash3_mha_fwd)
    jax.ffi.register_ffi_target("dew_flash3_mha_fwd", target, platform="CUDA")


def flash_attention_3(library: Path, q, k, v):
    """The peer on the same data, causal with the last query at the last key."""
    register_flash_attention_3(library)
    q, k, v = (jnp.from_dlpack(x) for x in (q, k, v))
    batch, q_len, heads, dim = q.shape
    shapes = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct((batch, heads, q_len), jnp.float32),
        jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32),
        jax.ShapeDtypeStruct((1, 1, 1), jnp.float32),
    )
    call = jax.jit(
        lambda q, k, v: jax.ffi.ffi_call("dew_flash3_mha_fwd", shapes)(
            q, k, v, softmax_scale=np.float64(1 / math.sqrt(dim)), is_causal=True,
            window_size_left=np.int64(-1), window_size_right=np.int64(-1),
        )[0]
    )  # fmt: skip
    return lambda: call(q, k, v)


def measure(calls, expected, rounds):
    """Median seconds of each call; `expected` is the part of a kernel's name that marks it."""
    rng = random.Random(0)
    turns = []
    for _ in range(rounds):
        order = list(calls)
        rng.shuffle(order)
        turns += order
    CUPTI._cupti_init()
    for name in turns:
        for _ in range(PER_ROUND):
            jax.block_until_ready(calls[name]())
            torch.cuda.synchronize()
    records = CUPTI._cupti_get_timings(True)
    marks = set(expected.values())
    times = [(str(n), t * 1e-3) for n, t in records if any(m in str(n) for m in marks)]
    runs = [name for name in turns for _ in range(PER_ROUND)]
    if len(times) != len(runs):
        names = sorted({name for name, _ in times})
        raise RuntimeError(f"{len(times)} kernels of {len(runs)} runs: {names}")
    samples = {name: [] for name in calls}
    for run, (kernel, seconds) in zip(runs, times, strict=True):
        if expected[run] not in kernel:
            raise RuntimeError(f"{run} ran {kernel}")
        samples[run].append(seconds)
    return {name: statistics.median(values) for name, values in samples.items()}


def run_cell(cell, kernels, fa3, rounds):
    batch, q_len, past, q_heads, kv_heads, dim, kind = CELLS[cell]
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[kind]
    element = {"f16": "__half", "bf16": "__nv_bfloat16"}[kind]
    kv_len = past + q_len
    q = normal((batch, q_len, q_heads, dim), dtype, 1)
    k, v = (normal((batch, kv_len, kv_heads, dim), dtype, s) for s in (2, 3))
    positions = growing(batch, q_len, past)
    calls = {}
    for name, kernel in kernels.items():
        variant = VARIANTS[name]
        if variant.head_dim == dim and variant.element == element and not variant.query:
            calls[name] = kernel.bind(q, k, v, positions, torch.empty_like(q))
    if not calls:
        return None
    expected = dict.fromkeys(calls, "PrefillKernel")
    calls["fa3"] = flash_attention_3(fa3, q, k, v)
    expected["fa3"] = "flash"
    peer = torch.from_dlpack(jax.block_until_ready(calls["fa3"]())).float()
    for name, call in calls.items():
        if name != "fa3":
            call()
            torch.cuda.synchronize()
            out = call.tensors[4].float()
            difference = ((out - peer).norm() / peer.norm()).item()
            if not difference < 1e-2:
                print(f"{cell}: {name} differs from FA3 by {difference:.2e}", flush=True)
    flops = 4 * dim * q_heads * batch * sum(past + t + 1 for t in range(q_len))
    return measure(calls, expected, rounds), flops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("fa3", type=Path)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kernels = {
        name: Kernel(args.folder / f"{name}.so", chunk_invariant="Split" not in VARIANTS[name].base)
        for name in args.names
    }
    results = {}
    for cell in args.cells.split(","):
        found = run_cell(cell, kernels, args.fa3, args.rounds)
        if found is None:
            continue
        seconds, flops = found
        results[cell] = {"flops": flops, "seconds": seconds}
        peer = seconds["fa3"]
        columns = [f"{cell:12s} fa3 {peer * 1e6:8.1f}us {flops / peer * 1e-12:4.0f}T |"]
        columns += [
            f"{name} {s * 1e6:.1f} ({peer / s:.3f})" for name, s in seconds.items() if name != "fa3"
        ]
        print(" ".join(columns), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
