"""``sequence_parallel_prefill_attention``: one cache, its slots spread over the devices of an axis.

Each device attends to the slots it holds; what comes out are states that merge. Nobody ever holds
the whole cache.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_fa import api, checks, native, states


def sequence_parallel_prefill_attention(
    q: Any,
    k: Any,
    v: Any,
    positions: Any,
    *,
    axis_name: str | tuple[str, ...],
    layer: Any = None,
    starts: Any = None,
    sinks: Any = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
    chunk_invariant: bool = True,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """:func:`jax_fa.prefill_attention` inside ``shard_map``, S split over ``axis_name``.

    Device i of the n on the axis holds slots ``i * S/n .. (i + 1) * S/n - 1``. The results are
    merged in the order of the axis, so they are deterministic. They differ in rounding from those
    of one device with the whole cache, and are chunk-invariant up to rounding only.

    Where n divides T, each device merges T/n of the rows, and twice (n - 1)/n of out goes over the
    wire, as in an all-reduce. Otherwise (a decoding step) every device merges all rows, in one
    exchange of n - 1 outs.

    Take gradients outside the ``shard_map``, or inside with ``check_vma=True``. Inside with
    ``check_vma=False`` each device's copy of a loss counts, as for ``psum``.

    Args:
      q: ``[B, T, Hq, D]`` or ``[T, Hq, D]``, the same on all devices of the axis; T and Hq may be
        split over other axes.
      k: This device's slots, ``[B, S/n, Hk, D]`` or ``[S/n, Hk, D]``.
      v: Shape and dtype of k.
      positions: ``[B, T]`` or ``[T]``, integers: slots of the whole cache. The same on all devices.
      axis_name: The axis of the mesh that S is split over, or several, the major one first.
      layer: As for :func:`jax_fa.prefill_attention`, and so are the following; k and v are then
        stacks, ``[L, B, S/n, Hk, D]`` or ``[L, S/n, Hk, D]``.
      starts: See layer; first slots of the whole cache. The same on all devices.
      sinks: See layer. The same on all devices; joined once.
      scale: See layer.
      sliding_window: See layer.
      logits_soft_cap: See layer.
      return_lse: See layer.
      chunk_invariant: See layer.
      implementation: See layer.

    Returns:
      ``out``, or ``(out, lse)``, of the whole cache: the same on all devices of the axis.

    Raises:
      TypeError, ValueError: What :func:`jax_fa.prefill_attention` raises; and ``axis_name`` is not
        an axis of a ``shard_map`` around the call, k or v do not vary over it or something else
        does (told with ``check_vma=True``), or S exceeds what positions reach.

    Source: FlashAttention (Dao et al., 2022), section 3.1, for the merging; Flash-Decoding (Dao et
    al., 2023) for splitting S.
    """
    call = checks.check_call(
        q,
        k,
        v,
        positions,
        layer=layer,
        starts=starts,
        sinks=sinks,
        scale=scale,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        chunk_invariant=chunk_invariant,
    )
    return_lse = checks.as_flag("return_lse", return_lse)
    shards, index = _place_on(axis_name)
    varying_is_checked = bool(jax.typeof(index).mat.varying)
    if varying_is_checked:
        _check_split(call, axis_name)
    operands = call.operands
    slots = operands.k.shape[-3]
    most = native.load().max_kv_len
    if shards * slots > most:
        raise ValueError(
            f"k has {slots} slots on each of {shards} devices; positions are int32 and reach "
            f"{most}."
        )
    # A row that sees none of these slots comes out negative, which is padding here. Clamped first:
    # the most negative int32 less anything would not be.
    here = jnp.maximum(operands.positions, -1) - index * slots
    starts_here = operands.starts
    if starts_here is not None:
        starts_here = jnp.maximum(starts_here, 0) - index * slots
    # Sinks count once, in the merged state.
    local = operands._replace(positions=here, starts=starts_here, sinks=None)
    state = api.prefill_attention(
        **local._asdict(),
        **vars(call.options),
        return_lse=True,
        implementation=implementation,
    )
    if 0 in operands.q.shape[:2]:
        # No rows; XLA gathers along no axis of length 0. Of q, the same on all devices.
        out, lse = operands.q, operands.q[..., 0].astype(jnp.float32)
    else:
        # Its transpose would be wrong (jax 0.10) where types do not tell what varies.
        gather_to = "invarying" if varying_is_checked else "varying"
        gather = functools.partial(jax.lax.all_gather, axis_name=axis_name, to=gather_to)
        out, lse = _merge_over(axis_name, shards, gather, *state, operands.sinks)
    if call.unbatched:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def _place_on(axis_name: Any) -> tuple[int, jax.Array]:
    """The number of devices on the axis, and which of them this is."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"axis_name is {axis_name!r}; it must be the name of a mesh axis, or a tuple of names."
        )
    if len(set(names)) != len(names):
        raise ValueError(f"axis_name is {axis_name!r}; each axis may be named once.")
    try:
        return jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    except NameError as error:
        raise ValueError(
            f"axis_name={axis_name!r} is not an axis here; call this inside jax.shard_map over a "
            "mesh with that axis."
        ) from error


def _check_split(call: checks.Call, axis_name: str | tuple[str, ...]) -> None:
    """S alone is split over the axis."""
    axes = {axis_name} if isinstance(axis_name, str) else set(axis_name)
    for name, operand in call.operands._asdict().items():
        if name in ("k", "v", "layer") or operand is None:
            continue
        if axes & jax.typeof(operand).mat.varying:
            raise ValueError(
                f"{name} varies over axis_name={axis_name!r}; all devices of it must have the same "
                "(leave the axis out of its in_specs; positions and starts are slots of the whole "
                "cache)."
            )
    for name in ("k", "v"):
        if axes - jax.typeof(getattr(call.operands, name)).mat.varying:
            raise ValueError(
                f"{name} is not split over axis_name={axis_name!r}; each device must hold its own "
                "slots (name the axis for S in its in_specs)."
            )


def _merge_over(
    axis_name: str | tuple[str, ...],
    shards: int,
    gather: Any,
    out: jax.Array,
    lse: jax.Array,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """The merged states of all devices, [B, T, Hq, D] and [B, T, Hq], on all of them."""
    batch, tokens = lse.shape[:2]
    if tokens % shards != 0:
        return _merge_in_order(gather(out), gather(lse), sinks)

    def exchange(x: jax.Array) -> jax.Array:
        """Each device's T/n rows of mine for my T/n rows of each, [n, B, T/n, ...]."""
        rows = x.reshape(batch, shards, tokens // shards, *x.shape[2:])
        return jax.lax.all_to_all(jnp.moveaxis(rows, 1, 0), axis_name, 0, 0, tiled=True)

    merged_out, merged_lse = _merge_in_order(exchange(out), exchange(lse), sinks)
    return gather(merged_out, axis=1, tiled=True), gather(merged_lse, axis=1, tiled=True)


def _merge_in_order(
    outs: jax.Array, lses: jax.Array, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """[n, ...] states, and the sinks [Hq] if any, to one, in float32 until the end."""
    state = (outs[0].astype(jnp.float32), lses[0])
    for out, lse in zip(outs[1:], lses[1:], strict=True):
        state = states.merge_states(*state, out.astype(jnp.float32), lse)
    if sinks is not None:  # a state of its own: the value 0, with the sink as its lse
        sink = jnp.broadcast_to(sinks, state[1].shape)
        state = states.merge_states(*state, jnp.zeros_like(state[0]), sink)
    return state[0].astype(outs.dtype), state[1]
