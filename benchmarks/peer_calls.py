"""How each peer is called: one loader a peer, which returns what runs it on a workload.

A loader raises `AbsentError` where its package cannot be imported; what it returns raises
`UnsupportedError` for a workload that the peer has no call for. Every peer is called through its
own public interface in the way that is fastest for it: lengths static where it takes them static,
masks and biases built outside the timed call, every plausible split tried where it leaves the
number of splits to the caller.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from timing import Call
from workload import Inputs, Workload

Attend = Callable[[Workload, Inputs], dict[str, Call]]
"""The peer's calls for a workload, by the name to report; more than one where it has variants."""


class AbsentError(RuntimeError):
    """The peer cannot run on this machine at all; the text says what is missing."""


class UnsupportedError(RuntimeError):
    """The peer has no call for this workload; the text says why."""


@dataclass(frozen=True)
class Peer:
    """A contender: `load` imports it and returns how to call it; `package` is its name on PyPI."""

    name: str
    package: str
    load: Callable[[], Attend]


def _require(module: str, package: str) -> Any:
    """Imports `module`; whatever goes wrong in there is the reason of an AbsentError."""
    if importlib.util.find_spec(module) is None:
        raise AbsentError(f"{package} is not installed")
    try:
        return importlib.import_module(module)
    except Exception as error:  # a peer's import may fail in any way, and must not end the run
        raise AbsentError(f"{package} does not import: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


def _load_fa3() -> Attend:
    """FlashAttention-3 built for CUDA 13. Only the Hopper library of the package is loaded; its
    Python module would also map the 340 MB of FlashAttention-2 beside it."""
    package = "dew-flash-attn-cu13"
    spec = importlib.util.find_spec("dew_flash_attn")
    if spec is None or not spec.submodule_search_locations:
        raise AbsentError(f"{package} is not installed")
    path = Path(next(iter(spec.submodule_search_locations))) / "libdew_flash_attn3.so"
    target = "dew_flash3_mha_fwd"
    try:
        handler = getattr(ctypes.CDLL(str(path)), target)
    except (OSError, AttributeError) as error:
        raise AbsentError(f"{path.name} of {package} does not load: {error}") from error
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="CUDA")

    @jax.jit
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        batch, q_len, q_heads, head_dim = q.shape
        results = (
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((batch, q_heads, q_len), jnp.float32),  # lse
            jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32),  # out of a split: unused
            jax.ShapeDtypeStruct((1, 1, 1), jnp.float32),  # lse of a split: unused
        )
        # Its causal mask ends at the last key, which is the mask of a chunk.
        out, *_ = jax.ffi.ffi_call(target, results)(
            q,
            k,
            v,
            softmax_scale=np.float64(1 / math.sqrt(head_dim)),
            is_causal=True,
            window_size_left=np.int64(-1),
            window_size_right=np.int64(-1),
        )
        return out

    return lambda _, x: {"FA3": partial(attend, x.q, x.k, x.v)}


def _load_fa3_kvcache() -> Attend:
    """FlashAttention-3's KV-cache entry: the one peer whose lengths are device data."""
    package = "flash-attn3-jax"
    with_kvcache = _require("flash_attn3_jax", package).flash_mha_with_kvcache

    def calls(workload: Workload, x: Inputs) -> dict[str, Call]:
        if workload.head_dim != 128:
            raise UnsupportedError(f"{package}'s wheel is built for head_dim 128 only")

        @partial(jax.jit, static_argnames="splits")
        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, *, splits: int
        ) -> Any:
            return with_kvcache(q, k, v, cache_seqlens=lengths, is_causal=True, num_splits=splits)

        lengths = jnp.full((workload.batch,), workload.kv_len, jnp.int32)
        # It splits only where it is told to, which pays where q tiles cannot fill the GPU.
        counts = (1,) if workload.q_len >= 512 else (1, 4, 8, 16)
        return {
            "FA3-kvcache" + (f"/{n}" if n > 1 else ""): partial(
                attend, x.q, x.k, x.v, lengths, splits=n
            )
            for n in counts
        }

    return calls


def _load_fa4() -> Attend:
    package = "fa4-jax"
    flash_attn = _require("fa4_jax", package).flash_attn
    _require("cutlass", "nvidia-cutlass-dsl, which fa4-jax needs,")
    attend = jax.jit(partial(flash_attn, causal=True))  # its causal mask ends at the last key
    return lambda _, x: {"FA4": partial(attend, x.q, x.k, x.v)}


def _load_cudnn() -> Attend:
    """cuDNN's fused attention through jax.nn. Its causal mask starts at the first key, so that a
    chunk with a past needs the mask spelled out, as an additive bias."""

    @partial(jax.jit, static_argnames="is_causal")
    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None, *, is_causal: bool
    ) -> jax.Array:
        return jax.nn.dot_product_attention(
            q, k, v, bias=bias, is_causal=is_causal, implementation="cudnn"
        )

    def calls(workload: Workload, x: Inputs) -> dict[str, Call]:
        if workload.n_past == 0:
            return {"cuDNN": partial(attend, x.q, x.k, x.v, None, is_causal=True)}
        bias = _causal_bias(x.positions[0], workload.kv_len, dtype=x.q.dtype)
        return {"cuDNN": partial(attend, x.q, x.k, x.v, bias, is_causal=False)}

    return calls


@partial(jax.jit, static_argnames=("kv_len", "dtype"))
def _causal_bias(positions: jax.Array, kv_len: int, *, dtype: Any) -> jax.Array:
    """[1, 1, q_len, kv_len]: 0 for a slot that the row sees, half the lowest number otherwise."""
    hidden = float(jnp.finfo(dtype).min) / 2
    seen = jnp.arange(kv_len) <= positions[:, None]
    return jnp.where(seen, 0.0, hidden).astype(dtype)[None, None]


def _load_tokamax() -> Attend:
    package = "tokamax"
    dot_product_attention = _require("tokamax", package).dot_product_attention
    attend = jax.jit(partial(dot_product_attention, is_causal=True, implementation="mosaic"))

    def calls(workload: Workload, x: Inputs) -> dict[str, Call]:
        if workload.n_past > 0:
            raise UnsupportedError("tokamax's causal mask starts at slot 0, so it has no past")
        return {"tokamax": partial(attend, x.q, x.k, x.v)}

    return calls


PEERS: tuple[Peer, ...] = (
    Peer("FA3", "dew-flash-attn-cu13", _load_fa3),
    Peer("FA3-kvcache", "flash-attn3-jax", _load_fa3_kvcache),
    Peer("FA4", "fa4-jax", _load_fa4),
    Peer("cuDNN", "nvidia-cudnn-cu13", _load_cudnn),
    Peer("tokamax", "tokamax", _load_tokamax),
)
