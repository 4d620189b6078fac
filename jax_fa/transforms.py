"""How JAX's transformations act on the custom call.

From the outside in: ``shard_map`` over the axes that the arrays' types name, ``custom_vjp``
(gradients by blockwise recomputation), ``custom_vmap`` (mapped axes fold into the batch or into the
tokens), ``custom_partitioning`` (arrays that jit splits over devices), the ``ffi_call``. A
transformation meets the first layer that has a rule for it, so their order is part of the design.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa import backward, native, partitioning, split, stacks


@dataclass(frozen=True)
class Config:
    """What is compiled into the call. Hashed and compared by JAX's caches, so types are exact.

    A np.float32 here would compare equal to a float and hide a wrongly typed attribute; ``scale``
    is a Python float that holds a float32 value.
    """

    scale: float
    chunk_invariant: bool
    implementation: str  # a kernel's name; "" for the best one
    return_lse: bool
    # Where k and v are stacked over layers, with a fifth operand that tells which to read: before
    # the batch, as callers have them, or behind it, as vmap over caches makes them.
    layer_axis: int = 0

    def with_lse(self) -> Config:
        """The same call, returning lse too; every kernel gives out the same bits then."""
        return replace(self, return_lse=True)


def _custom_call(config: Config, *operands: jax.Array) -> Sequence[jax.Array]:
    """[out] or [out, lse]; the one place that knows the handlers' operands and attributes."""
    native.load()
    target = native.PREFILL_TARGET
    q = operands[0]
    if len(operands) == 5:
        target = native.STACKED_PREFILL_TARGET
        # [stacks, layers, batch of a stack, S, Hk, D]: [1, L, B, ...] or [B, L, 1, ...]
        k, v = (jnp.expand_dims(x, 2 * config.layer_axis) for x in operands[1:3])
        operands = (q, k, v, *operands[3:])
    results = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if config.return_lse:
        results.append(jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32))
    values = jax.ffi.ffi_call(target, results)(
        *operands,
        scale=np.float32(config.scale),
        chunk_invariant=config.chunk_invariant,
        implementation=config.implementation,
    )
    return partitioning.alike_in_shard_map([*values, q])[:-1]


def _signature(config: Config, operands: Sequence[jax.Array]) -> partitioning.Signature:
    stacked = len(operands) == 5
    layout = split.Layout(
        q_heads=operands[0].shape[2],
        kv_heads=operands[1].shape[-2],
        layer_axis=config.layer_axis if stacked else None,
    )
    return partitioning.Signature(
        layout,
        operands=("q", "k", "k", "positions", *(("layer",) if stacked else ())),
        results=("q", "lse") if config.return_lse else ("q",),
    )


def _key(scale: float, what: object) -> tuple[np.generic, ...]:
    """Scalars that stand for a call in a program, as partitioning.partitioned wants them."""
    in_words = f"{what} of jax_fa {version('jax-fa')}"
    return (np.float32(scale), np.uint32(zlib.crc32(in_words.encode())))


@functools.cache
def _partitioned_call(config: Config, signature: partitioning.Signature) -> Callable[..., Any]:
    call = functools.partial(_custom_call, config)
    key = _key(config.scale, (native.PREFILL_TARGET, config))
    return partitioning.partitioned(call, signature, lambda chosen, _: chosen.local(call), key)


@functools.cache
def _mappable_call(config: Config) -> Callable[..., list[jax.Array]]:
    """The call with a batching rule; one function object per config, as jit's cache needs."""

    @jax.custom_batching.custom_vmap
    def call(*operands: jax.Array) -> list[jax.Array]:
        if partitioning.in_shard_map():
            return list(_custom_call(config, *operands))
        return list(_partitioned_call(config, _signature(config, operands))(*operands))

    @call.def_vmap
    def rule(size: int, mapped: list[bool], *operands: Any) -> tuple[Any, list[bool]]:
        if len(operands) == 5 and not _folds(config, mapped, operands):
            mapped, operands = _choose_layer(config, mapped, operands)
        cache_is_shared = not (mapped[1] or mapped[2])
        if cache_is_shared:
            results = _fold_into_tokens(call, size, mapped, operands)
        elif len(operands) == 5:
            behind_batch = _mappable_call(replace(config, layer_axis=1))
            results = _fold_into_batch(behind_batch, size, mapped, operands)
        else:
            results = _fold_into_batch(call, size, mapped, operands)
        return results, [True] * len(results)

    return call


def _folds(config: Config, mapped: list[bool], operands: Sequence[jax.Array]) -> bool:
    """Whether a mapped axis joins another without moving the stacks of layers.

    Mapped stacks are [V, B, L, ...] already, or [V, L, B, ...], where B must be 1. For one of them
    alone, all layers of the other would be repeated.
    """
    if mapped[4] or mapped[1] != mapped[2]:
        return False
    return not mapped[1] or config.layer_axis == 1 or operands[0].shape[-4] == 1


def _choose_layer(
    config: Config, mapped: list[bool], operands: Sequence[jax.Array]
) -> tuple[list[bool], tuple[jax.Array, ...]]:
    """The operands without a layer, k and v being that layer's: a copy of it."""
    q, k, v, positions, layer = operands
    choose = functools.partial(stacks.layer_of, axis=config.layer_axis)

    def chosen(stack: jax.Array, is_mapped: bool) -> jax.Array:
        if not is_mapped and not mapped[4]:
            return choose(stack, layer)
        axes = (0 if is_mapped else None, 0 if mapped[4] else None)
        return jax.vmap(choose, axes)(stack, layer)

    caches = (chosen(k, mapped[1]), chosen(v, mapped[2]))
    of_caches = [is_mapped or mapped[4] for is_mapped in mapped[1:3]]
    return [mapped[0], *of_caches, mapped[3]], (q, *caches, positions)


def _broadcast(size: int, is_mapped: bool, x: jax.Array) -> jax.Array:
    return x if is_mapped else jnp.broadcast_to(x[None], (size, *x.shape))


def _fold_into_tokens(
    call: Callable[..., list[jax.Array]], size: int, mapped: list[bool], operands: Any
) -> list[jax.Array]:
    """All elements read one cache: [V, B, T, ...] becomes [B, V * T, ...]; no copy of k and v."""
    q, k, v, positions, *layer = operands
    q, positions = _broadcast(size, mapped[0], q), _broadcast(size, mapped[3], positions)
    _, batch, tokens = positions.shape

    def to_tokens(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(batch, size * tokens, *x.shape[3:])

    def from_tokens(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(batch, size, tokens, *x.shape[2:]), 1, 0)

    return [from_tokens(x) for x in call(to_tokens(q), k, v, to_tokens(positions), *layer)]


def _fold_into_batch(
    call: Callable[..., list[jax.Array]], size: int, mapped: list[bool], operands: Any
) -> list[jax.Array]:
    """Each element has a cache of its own: [V, B, ...] becomes [V * B, ...].

    Stacks of layers become [V * B, L, ...].
    """
    batch = operands[0].shape[0 if not mapped[0] else 1]
    layer = operands[4:] if len(operands) == 5 else ()

    def fold(x: jax.Array, is_mapped: bool) -> jax.Array:
        x = _broadcast(size, is_mapped, x)
        if x.ndim == 6 and batch == 1:  # [V, L, 1, ...] or [V, 1, L, ...]
            return x.reshape(size, x.shape[1] * x.shape[2], *x.shape[3:])
        return x.reshape(size * batch, *x.shape[2:])

    to_fold = operands[: len(operands) - len(layer)]
    folded = [fold(x, is_mapped) for is_mapped, x in zip(mapped, to_fold, strict=False)]
    results = call(*folded, *layer)
    return [x.reshape(size, batch, *x.shape[1:]) for x in results]


def attend(config: Config, *operands: jax.Array) -> list[jax.Array]:
    """[out] or [out, lse] of checked, batched operands; differentiable, mappable, splittable."""

    def call(*operands: jax.Array) -> list[jax.Array]:
        return _differentiable_call(config, *partitioning.alike_in_shard_map(operands))

    return list(partitioning.over_explicit_axes(call, _signature(config, operands), operands))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable_call(config: Config, *operands: jax.Array) -> list[jax.Array]:
    return _mappable_call(config)(*operands)


def _attend_forward(config: Config, *operands: jax.Array) -> tuple[list[jax.Array], Any]:
    # By attend itself, so that the gradient can be differentiated in its turn.
    out, lse = attend(config.with_lse(), *operands)
    results = [out, lse] if config.return_lse else [out]
    q, k, v, positions, *layer = operands
    layers = stacks.layers_of(k)
    if layer:
        # Of the layer alone: a scan over layers keeps what each step leaves here.
        k, v = stacks.layer_of(k, layer[0]), stacks.layer_of(v, layer[0])
    return results, (q, k, v, positions, layer, layers, lse)


def _attend_backward(config: Config, residuals: Any, cotangents: list[jax.Array]) -> Any:
    q, k, v, positions, layer, layers, lse = residuals
    d_out = cotangents[0]
    d_lse = cotangents[1] if config.return_lse else jnp.zeros_like(lse)
    found = _gradients(config.scale, q, k, v, positions, lse, d_out, d_lse)
    d_q, d_k, d_v = (d.astype(x.dtype) for d, x in zip(found, (q, k, v), strict=True))
    if layer:
        d_k, d_v = (stacks.with_zeros(d, layers, *layer) for d in (d_k, d_v))
    return d_q, d_k, d_v, *[None] * (1 + len(layer))  # integers have no gradient


_differentiable_call.defvjp(_attend_forward, _attend_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(scale: float, *operands: jax.Array) -> list[jax.Array]:
    """backward.gradients with rules of its own: rows that devices split need not be gathered."""
    return _mappable_gradients(scale)(*operands)


def _gradients_forward(scale: float, *operands: jax.Array) -> tuple[list[jax.Array], Any]:
    return _gradients(scale, *operands), operands


def _gradients_backward(scale: float, operands: Any, cotangents: list[jax.Array]) -> Any:
    positions = operands[3]

    def plain(*floats: jax.Array) -> list[jax.Array]:
        return _plain_gradients(scale, *floats[:3], positions, *floats[3:])

    _, pull_back = jax.vjp(plain, *operands[:3], *operands[4:])
    found = pull_back(cotangents)
    return *found[:3], None, *found[3:]


_gradients.defvjp(_gradients_forward, _gradients_backward)


def _plain_gradients(scale: float, *operands: jax.Array) -> list[jax.Array]:
    return backward.gradients(backward.Operands(*operands), scale)


@functools.cache
def _mappable_gradients(scale: float) -> Callable[..., list[jax.Array]]:
    plain = functools.partial(_plain_gradients, scale)

    @jax.custom_batching.custom_vmap
    def call(*operands: jax.Array) -> list[jax.Array]:
        if partitioning.in_shard_map():
            return plain(*operands)
        layout = split.Layout(operands[0].shape[2], operands[1].shape[2], None)
        return list(_partitioned_gradients(scale, layout)(*operands))

    @call.def_vmap
    def rule(size: int, mapped: list[bool], *operands: Any) -> tuple[Any, list[bool]]:
        if mapped[1] or mapped[2]:
            results = _fold_into_batch(call, size, mapped, operands)
        else:
            # Each element has its d_k and d_v, but k and v need not be repeated for that.
            results = jax.vmap(plain, [0 if is_mapped else None for is_mapped in mapped])(*operands)
        return results, [True] * len(results)

    return call


@functools.cache
def _partitioned_gradients(scale: float, layout: split.Layout) -> Callable[..., Any]:
    call = functools.partial(_plain_gradients, scale)
    signature = partitioning.Signature(
        layout,
        operands=("q", "k", "k", "positions", "lse", "q", "lse"),
        results=("q", "k", "k"),
    )

    def local(chosen: split.Split, tokens: Any) -> split.Call:
        return chosen.local_gradients(call, tokens)

    return partitioning.partitioned(call, signature, local, _key(scale, "gradients"))
