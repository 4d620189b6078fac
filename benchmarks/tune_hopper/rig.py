"""Calls a built variant on torch tensors, and the float32 definition it is checked against."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import torch

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class Params(ctypes.Structure):
    """AttentionParams of attention/problem.h."""

    _fields_ = [
        *[
            (n, ctypes.c_int64)
            for n in ["batch", "q_len", "kv_len", "q_heads", "kv_heads", "head_dim", "layers"]
        ],
        ("q_dtype", ctypes.c_int32),
        ("kv_dtype", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("chunk_invariant", ctypes.c_bool),
        ("sliding_window", ctypes.c_int32),
        ("logits_soft_cap", ctypes.c_float),
        *[(n, ctypes.c_bool) for n in ["has_starts", "has_sinks"]],
        *[(n, ctypes.c_void_p) for n in ["q", "k", "v", "positions", "layer"]],
        ("layer_batch", ctypes.c_int64),
        ("starts", ctypes.c_void_p),
        ("starts_by_row", ctypes.c_bool),
        ("sinks", ctypes.c_void_p),
        ("sinks_by_sequence", ctypes.c_bool),
        *[(n, ctypes.c_void_p) for n in ["out", "lse"]],
    ]


class Kernel:
    """A variant's library; split variants share out slots only without chunk invariance."""

    def __init__(self, library: Path, chunk_invariant: bool = True):
        self._chunk_invariant = chunk_invariant
        self._launch = ctypes.CDLL(str(library)).launch
        self._launch.argtypes = [ctypes.POINTER(Params), ctypes.c_void_p]

    def bind(self, q, k, v, positions, out, lse=None, scale=None):
        """A function of no arguments that enqueues the call on the default stream."""
        batch, q_len, q_heads, head_dim = q.shape
        params = Params(
            batch, q_len, k.shape[1], q_heads, k.shape[2], head_dim, 1, DTYPES[q.dtype],
            DTYPES[k.dtype], scale or 1 / math.sqrt(head_dim), self._chunk_invariant,
            q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), positions=positions.data_ptr(),
            out=out.data_ptr(), lse=lse.data_ptr() if lse is not None else None,
        )  # fmt: skip

        def call() -> None:
            error = self._launch(ctypes.byref(params), None)
            if error:
                raise RuntimeError(f"launch failed with CUDA error {error}")

        call.tensors = (q, k, v, positions, out, lse)
        return call

    def __call__(self, q, k, v, positions, scale=None):
        """(out, lse) of one call, on poisoned outputs."""
        out = torch.full_like(q, math.nan)
        lse = torch.full(q.shape[:3], math.nan, device=q.device)
        self.bind(q, k, v, positions, out, lse, scale)()
        torch.cuda.synchronize()
        return out, lse


def reference(q, k, v, positions, scale=None):
    """(out, lse) by definition, in float64 for small shapes. Slots no row sees do not count."""
    group = q.shape[2] // k.shape[2]
    scale = scale or 1 / math.sqrt(q.shape[3])
    kind = torch.float64
    out = torch.empty(q.shape, dtype=kind, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=kind, device=q.device)
    slots = torch.arange(k.shape[1], device=q.device)
    for b in range(q.shape[0]):
        seen = slots[None, :] <= positions[b][:, None]
        empty = ~seen.any(1)
        for h in range(q.shape[2]):
            keys, values = k[b, :, h // group].to(kind), v[b, :, h // group].to(kind)
            scores = (q[b, :, h].to(kind) @ keys.T) * scale
            scores = scores.masked_fill(~seen, -math.inf)
            weights = torch.softmax(scores, -1).masked_fill(~seen, 0)
            finite = torch.nan_to_num(values, 0, 0, 0)
            row = weights @ finite
            if not torch.isfinite(values[: int(seen.sum(1).max())]).all():
                # 0 * NaN is no contribution where the slot is not seen, NaN where it is.
                row = row + (seen.to(kind) @ (~values.isfinite()).to(kind) > 0) * math.nan
            row[empty] = 0
            out[b, :, h] = row
            lse[b, :, h] = torch.logsumexp(scores, -1)
    return out, lse
