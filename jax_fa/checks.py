"""What a caller may pass: every rule once, each with names, values and the way out.

Rules on dtypes raise TypeError, rules on shapes and values ValueError. They look at abstract values
only, so they run at trace time, before anything is launched.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa import native
from jax_fa.operands import Operands, Options

CACHE_DTYPES = (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))
QUERY_DTYPES = (jnp.dtype(jnp.float32), *CACHE_DTYPES)

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Call:
    """The operands of one call, checked, batched and of the dtypes that the kernels take.

    ``unbatched`` tells that the caller's arrays had no batch axis, so results should have none.
    """

    operands: Operands
    options: Options
    unbatched: bool


def as_array(name: str, value: Any) -> jax.Array:
    """``value`` as a jax array; refuses what only looks like one."""
    if isinstance(value, list | tuple | dict | str | bytes | int | float | complex | None):
        raise TypeError(
            f"{name} is a {type(value).__name__}; it must be an array "
            f"(for nested lists: jnp.asarray({name}))."
        )
    if isinstance(value, jax.ShapeDtypeStruct):
        raise TypeError(
            f"{name} is a jax.ShapeDtypeStruct, which holds no data; use jax.eval_shape or "
            "jax.jit(...).lower(...) to work with shapes alone."
        )
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        dtype = f" of dtype {value.dtype}" if hasattr(value, "dtype") else ""
        raise TypeError(
            f"{name} is a {type(value).__name__}{dtype}, which JAX does not take as an array; pass "
            "a jax.Array, or a plain numpy array of a dtype that JAX has, in native byte order (of "
            f"a jax.Ref, {name}[...])."
        ) from error


def _names(dtypes: tuple[Any, ...]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes[:-1]) + f" or {dtypes[-1]}"


def check_cache_dtypes(k: jax.Array, v: jax.Array, names: tuple[str, str] = ("k", "v")) -> None:
    """Both halves of the cache have one dtype, float16 or bfloat16."""
    for name, array in zip(names, (k, v), strict=True):
        if array.dtype not in CACHE_DTYPES:
            raise TypeError(
                f"{name} has dtype {array.dtype}; the cache must be {_names(CACHE_DTYPES)} "
                f"(for example {name}.astype(jnp.bfloat16))."
            )
    if k.dtype != v.dtype:
        raise TypeError(
            f"{names[0]} has dtype {k.dtype}, {names[1]} has {v.dtype}; they must be equal "
            f"(for example {names[1]}.astype({names[0]}.dtype))."
        )


def as_cache_dtype(dtype: Any) -> jnp.dtype:
    """``cache_dtype``, a dtype that a cache may have."""
    known = jnp.dtype(dtype)
    if known not in CACHE_DTYPES:
        raise TypeError(f"cache_dtype is {known}; it must be {_names(CACHE_DTYPES)}.")
    return known


def _check_query_dtype(q: jax.Array, k: jax.Array) -> None:
    if q.dtype not in QUERY_DTYPES:
        raise TypeError(
            f"q has dtype {q.dtype}; it must be {_names(QUERY_DTYPES)} "
            "(for example q.astype(jnp.float32))."
        )
    if q.dtype != jnp.float32 and q.dtype != k.dtype:
        raise TypeError(
            f"q has dtype {q.dtype} and the cache {k.dtype}; a 16-bit q must have the cache's "
            f"dtype (q.astype(jnp.{k.dtype}), or q.astype(jnp.float32))."
        )


def as_positions(positions: Any, name: str = "positions") -> jax.Array:
    """Integer positions of any width as int32; values outside it keep their meaning by clamping."""
    if isinstance(positions, np.ndarray) and np.issubdtype(positions.dtype, np.integer):
        positions = _clip_to_int32(positions, np)
    if isinstance(positions, np.ndarray | jax.Array):
        positions = as_array(name, positions)
    else:
        # Without x64, JAX would cut 64-bit integers down to 32 bits; 2^32 would become slot 0.
        with jax.enable_x64(True):
            positions = as_array(name, positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(
            f"{name} has dtype {positions.dtype}; it must be an integer array "
            f"(for example {name}.astype(jnp.int32))."
        )
    if positions.dtype == np.int32:
        return positions
    if positions.dtype.itemsize < 8:
        return _clip_on_device(positions)
    with jax.enable_x64(True):  # made under it, and cut without it
        return _clip_on_device(positions)


def _clip_to_int32(positions: Any, xp: ModuleType) -> Any:
    """Beyond int32 lies beyond any cache, and all negative positions mean padding."""
    if positions.dtype == np.int32:
        return positions
    info = jnp.iinfo(positions.dtype)
    if info.max > _INT32_MAX:
        positions = xp.clip(positions, max(-1, int(info.min)), _INT32_MAX)
    return positions.astype(np.int32)


# Compiled, so that the bounds are no transfers to the device.
@functools.partial(jax.jit, inline=True)
def _clip_on_device(positions: jax.Array) -> jax.Array:
    clipped: jax.Array = _clip_to_int32(positions, jnp)
    return clipped


def _axes(extents: tuple[Any, ...]) -> str:
    return "[" + ", ".join(str(extent) for extent in extents) + "]"


def _shape(array: Any) -> str:
    return _axes(array.shape)


def check_cache_shapes(
    k: jax.Array, v: jax.Array, names: tuple[str, str] = ("k", "v"), stacked: bool = False
) -> None:
    """k and v have one shape, [B, S, Hk, D] or [S, Hk, D], that int32 positions can address.

    ``stacked``: with a further axis L, of at least one layer, before these.
    """
    if k.ndim - stacked not in (3, 4):
        rule = "[L, B, S, Hk, D], or [L, S, Hk, D]" if stacked else "[B, S, Hk, D], or [S, Hk, D]"
        where = " with layer=" if stacked else ""
        stack = " A cache stacked over layers needs layer=." if k.ndim == 5 else ""
        raise ValueError(
            f"{names[0]} has shape {_shape(k)}; it must be {rule} unbatched{where}.{stack}"
        )
    if k.shape != v.shape:
        raise ValueError(
            f"{names[0]} has shape {_shape(k)}, {names[1]} has {_shape(v)}; they must be equal."
        )
    if stacked and isinstance(k.shape[0], int) and k.shape[0] < 1:
        raise ValueError(f"{names[0]} has shape {_shape(k)}: no layer; there must be at least 1.")
    slots, heads, head_dim = k.shape[-3:]
    if isinstance(heads, int) and isinstance(head_dim, int) and (heads < 1 or head_dim < 1):
        raise ValueError(
            f"{names[0]} has shape {_shape(k)}: {heads} heads of head_dim {head_dim}; both must be "
            "at least 1."
        )
    most = native.load().max_kv_len
    # A symbolic extent is checked by the handler.
    if isinstance(slots, int) and slots > most:
        raise ValueError(
            f"{names[0]} has {slots} slots; positions are int32 and reach {most}. "
            "Split the cache and join the parts with merge_states."
        )


def as_layer(layer: Any, layers: Any) -> jax.Array:
    """The index of a layer, of ``layers`` that are stacked, as an int32 scalar.

    A number is checked here. What is data cannot be; who reads it clamps it.
    """
    if isinstance(layer, bool | np.bool_) or not (
        isinstance(layer, int | np.integer | np.ndarray | jax.Array)
    ):
        raise TypeError(f"layer is {layer!r}; it must be an integer, or an integer scalar array.")
    if np.ndim(layer) != 0:
        raise ValueError(f"layer has shape {_shape(layer)}; it must be one number, of shape [].")
    is_integer = isinstance(layer, int) or np.issubdtype(layer.dtype, np.integer)
    if is_integer and not isinstance(layer, jax.Array):
        index, most = int(layer), layers if isinstance(layers, int) else 2**31
        if not 0 <= index < most:
            raise ValueError(
                f"layer is {index}, and {layers} layers are stacked; it must be 0 .. {most - 1}."
            )
        layer = np.asarray(index)
    return as_positions(layer, "layer")


def _check_query_shape(q: jax.Array, k: jax.Array, stacked: bool) -> None:
    if q.ndim not in (3, 4):
        raise ValueError(
            f"q has shape {_shape(q)}; it must be [B, T, Hq, D], or [T, Hq, D] unbatched."
        )
    if q.ndim != k.ndim - stacked:
        layers = ", and with layer= k has an axis of layers before it" if stacked else ""
        raise ValueError(
            f"q has shape {_shape(q)} and k {_shape(k)}; either all operands have a batch axis or "
            f"none has{layers}."
        )
    if q.ndim == 4 and q.shape[0] != k.shape[-4]:
        raise ValueError(
            f"q has batch {q.shape[0]}, k has {k.shape[-4]}; they must be equal (nothing is "
            "broadcast; use jax.vmap to share a cache)."
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"k has head_dim {k.shape[-1]}, q has {q.shape[-1]}; they must be equal.")
    q_heads, kv_heads = q.shape[-2], k.shape[-2]
    if not all(isinstance(extent, int) for extent in (q_heads, kv_heads, q.shape[-1])):
        raise ValueError(
            f"q has shape {_shape(q)}, k has {_shape(k)}; batch, tokens and slots may be symbolic, "
            "heads and head_dim must be numbers."
        )
    if q_heads < 1 or q_heads % kv_heads != 0:
        raise ValueError(
            f"q has {q_heads} heads, k has {kv_heads}; query heads must be a multiple of kv heads "
            "(query head h reads kv head h // (Hq // Hk))."
        )


def check_positions_shape(positions: jax.Array, tokens: jax.Array, name: str = "q") -> None:
    """One position for each token of ``tokens``, [B, T, ...] or [T, ...]."""
    wanted = tokens.shape[:-2]
    if positions.shape != wanted:
        raise ValueError(
            f"positions has shape {_shape(positions)}, {name} has {_shape(tokens)}; positions must "
            f"be {_axes(wanted)}, one for each token."
        )


def as_scale(scale: Any, head_dim: int) -> float:
    """The factor on q.k, rounded to float32; None means 1 / sqrt(head_dim)."""
    if scale is None:
        return float(np.float32(1.0 / math.sqrt(head_dim)))
    value = _as_static_float("scale", scale, ", or multiply q by the factor")
    if not math.isfinite(value):
        raise ValueError(f"scale is {scale!r}; it must be finite in float32.")
    return value


def _as_static_float(name: str, number: Any, way_out: str = "") -> float:
    """A number that is compiled into the program, rounded to float32; it may be infinite or NaN."""
    if isinstance(number, jax.core.Tracer):
        raise TypeError(
            f"{name} is a traced value; it is compiled into the program, so it must be a Python "
            f"number (inside jit, jnp values are traced: use numpy or math{way_out})."
        )
    if isinstance(number, bool | np.bool_ | str | bytes | complex) or np.ndim(number) != 0:
        raise TypeError(f"{name} is {number!r}; it must be a real number.")
    try:
        value = float(number)
    except OverflowError:
        value = math.inf
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is {number!r}; it must be a real number.") from error
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def as_flag(name: str, value: Any) -> bool:
    """A Python truth value that is compiled into the program."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} is {value!r}; it must be True or False.")
    return bool(value)


def as_sliding_window(window: Any) -> int | None:
    """W, the number of slots that a row sees at most; None where it can hide none."""
    if window is None:
        return None
    if isinstance(window, jax.core.Tracer):
        raise TypeError(
            "sliding_window is a traced value; it is compiled into the program, so it must be a "
            "Python integer (a bound that is data goes into starts=)."
        )
    if isinstance(window, tuple | list):
        raise TypeError(
            f"sliding_window is {window!r}; it must be one integer W: a row at position p sees at "
            "most the W slots p - W + 1 .. p, itself included. The (left, right) of FlashAttention "
            "and of jax.nn is left = W - 1, with right = 0."
        )
    if isinstance(window, bool | np.bool_) or not isinstance(window, int | np.integer):
        raise TypeError(
            f"sliding_window is {window!r}; it must be an integer, at least 1, or None."
        )
    if window < 1:
        raise ValueError(
            f"sliding_window is {window}; it must be at least 1: a row counts itself (None, not 0 "
            "or -1, stands for no window)."
        )
    return None if window > _INT32_MAX else int(window)


def as_logits_soft_cap(cap: Any) -> float | None:
    """The bound that scores approach, rounded to float32."""
    if cap is None:
        return None
    value = _as_static_float("logits_soft_cap", cap)
    if not 0 < value < math.inf:
        raise ValueError(
            f"logits_soft_cap is {cap!r}; it must be finite and above 0 in float32 (None, not 0, "
            "stands for no cap)."
        )
    return value


def as_starts(starts: Any, q: jax.Array) -> jax.Array | None:
    """The first slot that each sequence of q, or each token, may see: int32, B or B T.

    q is [B, T, Hq, D], or [T, Hq, D], whose one sequence has a starts of no axes, or T.
    """
    if starts is None:
        return None
    if isinstance(starts, int | np.integer) and not isinstance(starts, bool):
        starts = np.asarray(starts)
    starts = as_positions(starts, "starts")
    of_sequences, of_tokens = q.shape[:-3], q.shape[:-2]
    if starts.shape not in (of_sequences, of_tokens):
        raise ValueError(
            f"starts has shape {_shape(starts)}, q has {_shape(q)}; starts must be "
            f"{_axes(of_sequences)}, one for each sequence, or {_axes(of_tokens)}, one for each "
            "token."
        )
    return starts


def as_sinks(sinks: Any, q: jax.Array) -> jax.Array | None:
    """One logit for each query head, float32."""
    if sinks is None:
        return None
    sinks = as_array("sinks", sinks)
    if not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise TypeError(
            f"sinks has dtype {sinks.dtype}; it must be a floating dtype "
            "(for example sinks.astype(jnp.float32))."
        )
    if sinks.shape != q.shape[-2:-1]:
        raise ValueError(
            f"sinks has shape {_shape(sinks)}, q has {_shape(q)}; sinks must be "
            f"[{q.shape[-2]}], one logit for each query head."
        )
    return sinks.astype(jnp.float32)


def check_call(
    q: Any,
    k: Any,
    v: Any,
    positions: Any,
    *,
    layer: Any = None,
    starts: Any = None,
    sinks: Any = None,
    scale: Any = None,
    sliding_window: Any = None,
    logits_soft_cap: Any = None,
    chunk_invariant: Any = True,
) -> Call:
    """Applies every rule of the contract that can be applied without data."""
    q, k, v = as_array("q", q), as_array("k", k), as_array("v", v)
    positions = as_positions(positions)
    check_cache_dtypes(k, v)
    _check_query_dtype(q, k)
    stacked = layer is not None
    check_cache_shapes(k, v, stacked=stacked)
    _check_query_shape(q, k, stacked)
    check_positions_shape(positions, q)
    starts, sinks = as_starts(starts, q), as_sinks(sinks, q)
    unbatched = q.ndim == 3
    if unbatched:
        q, positions = q[None], positions[None]
        starts = None if starts is None else starts[None]
        k, v = (jnp.expand_dims(x, int(stacked)) for x in (k, v))
    layer = as_layer(layer, k.shape[0]) if stacked else None
    options = Options(
        scale=as_scale(scale, q.shape[-1]),
        sliding_window=as_sliding_window(sliding_window),
        logits_soft_cap=as_logits_soft_cap(logits_soft_cap),
        chunk_invariant=as_flag("chunk_invariant", chunk_invariant),
    )
    return Call(Operands(q, k, v, positions, layer, starts, sinks), options, unbatched)


def check_new_rows(k: jax.Array, v: jax.Array, k_cache: jax.Array, stacked: bool = False) -> None:
    """New rows k and v, [B, T, Hk, D] or [T, Hk, D], fit the cache they are written to."""
    for name, array in (("k", k), ("v", v)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name} has dtype {array.dtype}; it must be a floating dtype.")
    if k.shape != v.shape:
        raise ValueError(f"k has shape {_shape(k)}, v has {_shape(v)}; they must be equal.")
    of_layer = k_cache.shape[stacked:]
    if k.shape[:-3] != of_layer[:-3] or k.shape[-2:] != of_layer[-2:] or k.ndim != len(of_layer):
        alike = "less its layers, they may" if stacked else "they may"
        raise ValueError(
            f"k has shape {_shape(k)}, k_cache has {_shape(k_cache)}; {alike} differ only in "
            "the number of tokens and slots (the third axis from the end)."
        )


def check_states(out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array) -> None:
    """Two attention states, outs [..., D] and lses [...], that can be merged."""
    for name, out in (("out_a", out_a), ("out_b", out_b)):
        if out.dtype not in QUERY_DTYPES:
            raise TypeError(f"{name} has dtype {out.dtype}; it must be {_names(QUERY_DTYPES)}.")
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if lse.dtype != jnp.float32:
            raise TypeError(f"{name} has dtype {lse.dtype}; it must be float32.")
    if out_a.dtype != out_b.dtype:
        raise TypeError(
            f"out_a has dtype {out_a.dtype}, out_b has {out_b.dtype}; they must be equal."
        )
    if out_a.ndim < 1 or out_a.shape != out_b.shape:
        raise ValueError(
            f"out_a has shape {_shape(out_a)}, out_b has {_shape(out_b)}; they must be equal."
        )
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if lse.shape != out_a.shape[:-1]:
            raise ValueError(
                f"{name} has shape {_shape(lse)}, out_a has {_shape(out_a)}; lse must be out's "
                "shape less its last axis."
            )
