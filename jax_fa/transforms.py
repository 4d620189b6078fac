"""How JAX's transformations act on the custom call.

From the outside in: ``shard_map`` over the axes that the arrays' types name, ``custom_vjp``
(gradients by blockwise recomputation), ``custom_vmap`` (mapped axes fold into the batch or into the
tokens), ``custom_partitioning`` (arrays that jit splits over devices), the ``ffi_call``. A
transformation meets the first layer that has a rule for it, so their order is part of the design.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa import backward, native, partitioning, split, stacks
from jax_fa.operands import Form, Operands, Options, form, forms, may_have

Foldable = Literal["B", "T"]


@dataclass(frozen=True)
class Config:
    """What is compiled into the call. Hashed and compared by JAX's caches, as ``options`` are."""

    options: Options
    implementation: str  # a kernel's name; "" for the best one
    return_lse: bool
    # Where k and v that are stacked over layers have L: before the batch, as callers have them, or
    # behind it, as vmap over caches makes them.
    layer_axis: int = 0

    def with_lse(self) -> Config:
        """The same call, returning lse too; every kernel gives out the same bits then."""
        return replace(self, return_lse=True)


def _custom_call(config: Config, operands: Operands) -> list[jax.Array]:
    """[out] or [out, lse]; the one place that knows the handlers' operands and attributes."""
    native.load()
    q, k, v, *_ = operands
    if operands.layer is not None:
        # [stacks, layers, batch of a stack, S, Hk, D]: [1, L, B, ...] or [B, L, 1, ...]
        k, v = (jnp.expand_dims(x, 2 * config.layer_axis) for x in (k, v))
    results = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if config.return_lse:
        results.append(jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32))
    values = jax.ffi.ffi_call(native.PREFILL_TARGET, results)(
        *jax.tree.leaves(operands._replace(k=k, v=v)),
        operands=operands.optional_names,
        implementation=config.implementation,
        **config.options.attributes(),
    )
    return partitioning.alike_in_shard_map([*values, q])[:-1]


def _signature(config: Config, operands: Operands) -> partitioning.Signature:
    results = [form("out", 4), form("lse", 3)]
    return partitioning.Signature(
        split.Layout(operands.q.shape[2], operands.k.shape[-2], config.layer_axis),
        operands=forms(operands, config.layer_axis),
        results=tuple(results if config.return_lse else results[:1]),
    )


def _key(scale: float, what: object) -> tuple[np.generic, ...]:
    """Scalars that stand for a call in a program, as partitioning.partitioned wants them."""
    in_words = f"{what} of jax_fa {version('jax-fa')}"
    return (np.float32(scale), np.uint32(zlib.crc32(in_words.encode())))


@functools.cache
def _partitioned_call(config: Config, signature: partitioning.Signature) -> Callable[..., Any]:
    call = functools.partial(_custom_call, config)
    key = _key(config.options.scale, (native.PREFILL_TARGET, config))
    return partitioning.partitioned(call, signature, lambda chosen, _: chosen.local(call), key)


@functools.cache
def _mappable_call(config: Config) -> Callable[[Operands], list[jax.Array]]:
    """The call with a batching rule; one function object per config, as jit's cache needs."""

    @jax.custom_batching.custom_vmap
    def call(operands: Operands) -> list[jax.Array]:
        if partitioning.in_shard_map():
            return _custom_call(config, operands)
        return list(_partitioned_call(config, _signature(config, operands))(operands))

    @call.def_vmap
    def rule(size: int, told: list[Operands], operands: Operands) -> tuple[Any, list[bool]]:
        mapped = told[0]
        folded: Callable[[Operands], list[jax.Array]] = call
        # All elements read one cache: into the tokens, so that k and v need not be repeated.
        names = (name for name, is_mapped in mapped._asdict().items() if is_mapped)
        axis: Foldable = "T" if all(may_have(name, "T") for name in names) else "B"
        if axis == "B" and operands.layer is not None:
            if _joins_in_place(config, mapped, operands):
                folded = _mappable_call(replace(config, layer_axis=1))
            else:
                mapped, operands = _choose_layer(config, mapped, operands)
        of_forms = forms(operands, config.layer_axis, mapped)
        results = _fold_into(axis, folded, size, of_forms, mapped, operands)
        return results, [True] * len(results)

    return call


def _joins_in_place(config: Config, mapped: Operands, operands: Operands) -> bool:
    """Whether a mapped axis joins the batch without moving or repeating the stacks of layers.

    Mapped stacks are [V, B, L, ...] already, or [V, L, B, ...], where B must be 1. For one of them
    alone, all layers of the other would be repeated.
    """
    if mapped.layer or not (mapped.k and mapped.v):
        return False
    return config.layer_axis == 1 or operands.q.shape[-4] == 1


def _choose_layer(
    config: Config, mapped: Operands, operands: Operands
) -> tuple[Operands, Operands]:
    """Both of operands without a layer, k and v being that layer's: a copy of it."""

    def chosen(stack: jax.Array, is_mapped: bool) -> jax.Array:
        choose = functools.partial(stacks.layer_of, axis=config.layer_axis)
        if is_mapped or mapped.layer:
            choose = jax.vmap(choose, (0 if is_mapped else None, 0 if mapped.layer else None))
        return choose(stack, operands.layer)

    k, v = chosen(operands.k, mapped.k), chosen(operands.v, mapped.v)
    of_k, of_v = mapped.k or mapped.layer, mapped.v or mapped.layer
    return mapped._replace(k=of_k, v=of_v, layer=None), operands._replace(k=k, v=v, layer=None)


def _fold_into(
    axis: Foldable,
    call: Callable[[Any], list[jax.Array]],
    size: int,
    of_forms: Any,
    mapped: Any,
    operands: Any,
) -> list[jax.Array]:
    """V calls as one, their axis joined to the batch, [V * B, T, ...], or tokens, [B, V * T, ...].

    What has no such axis and is not mapped is alike for all. Stacks of layers become [V * B, L].
    """
    place = ("B", "T").index(axis)
    extent = operands.q.shape[mapped.q + place]

    def fold(of: Form, is_mapped: bool, x: jax.Array) -> jax.Array:
        if not is_mapped:
            if axis not in of.axes:
                return x
            x = jnp.broadcast_to(x[None], (size, *x.shape))
        if axis in of.axes:
            x = jnp.moveaxis(x, (0, of.axes.index(axis) + 1), (place, place + 1))
        else:
            shape = (*x.shape[1 : place + 1], size, extent, *x.shape[place + 1 :])
            x = jnp.broadcast_to(jnp.expand_dims(jnp.moveaxis(x, 0, place), place + 1), shape)
        return x.reshape(*x.shape[:place], size * extent, *x.shape[place + 2 :])

    def unfold(x: jax.Array) -> jax.Array:
        x = x.reshape(*x.shape[:place], size, extent, *x.shape[place + 1 :])
        return jnp.moveaxis(x, place, 0)

    return [unfold(x) for x in call(jax.tree.map(fold, of_forms, mapped, operands))]


def attend(config: Config, operands: Operands) -> list[jax.Array]:
    """[out] or [out, lse] of checked, batched operands; differentiable, mappable, splittable."""

    def call(operands: Operands) -> list[jax.Array]:
        return _differentiable_call(config, partitioning.alike_in_shard_map(operands))

    return list(partitioning.over_explicit_axes(call, _signature(config, operands), operands))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable_call(config: Config, operands: Operands) -> list[jax.Array]:
    return _mappable_call(config)(operands)


def _attend_forward(config: Config, operands: Operands) -> tuple[list[jax.Array], Any]:
    # By attend itself, so that the gradient can be differentiated in its turn.
    out, lse = attend(config.with_lse(), operands)
    results = [out, lse] if config.return_lse else [out]
    layer, layers = operands.layer, stacks.layers_of(operands.k)
    if layer is not None:
        # Of the layer alone: a scan over layers keeps what each step leaves here.
        operands = stacks.without_layer(operands)
    return results, (operands, layer, layers, lse)


def _attend_backward(config: Config, residuals: Any, cotangents: list[jax.Array]) -> Any:
    operands, layer, layers, lse = residuals
    q, k, v, positions, *_ = operands
    sinks = operands.sinks
    by_sequence = sinks
    if sinks is not None and sinks.ndim == 1:
        # Each sequence's own, as whatever splits or maps the batch can have them; summed below.
        by_sequence = jnp.broadcast_to(sinks, (q.shape[0], *sinks.shape))
    found = _gradients(
        config.options,
        backward.Operands(
            q,
            k,
            v,
            positions,
            lse,
            d_out=cotangents[0],
            d_lse=cotangents[1] if config.return_lse else jnp.zeros_like(lse),
            starts=operands.starts,
            sinks=by_sequence,
        ),
    )
    d_q, d_k, d_v = (d.astype(x.dtype) for d, x in zip(found, (q, k, v), strict=False))
    if layer is not None:
        d_k, d_v = (stacks.with_zeros(d, layers, layer) for d in (d_k, d_v))
    # Integers have no gradient.
    gradients = Operands(d_q, d_k, d_v, positions=None)
    if sinks is not None:
        d_sinks = found[3] if sinks.ndim == 2 else jnp.sum(found[3], axis=0)
        gradients = gradients._replace(sinks=d_sinks)
    return (gradients,)


_differentiable_call.defvjp(_attend_forward, _attend_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(options: Options, operands: backward.Operands) -> list[jax.Array]:
    """backward.gradients with rules of its own: rows that devices split need not be gathered."""
    return _mappable_gradients(options)(operands)


def _gradients_forward(
    options: Options, operands: backward.Operands
) -> tuple[list[jax.Array], Any]:
    return _gradients(options, operands), operands


def _gradients_backward(
    options: Options, operands: backward.Operands, cotangents: list[jax.Array]
) -> Any:
    def plain(floats: dict[str, jax.Array]) -> list[jax.Array]:
        return _plain_gradients(options)(operands._replace(**floats))

    there = {name: x for name, x in operands._asdict().items() if x is not None}
    floats = {n: x for n, x in there.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    _, pull_back = jax.vjp(plain, floats)
    none = dict.fromkeys(operands._fields)
    return (backward.Operands(**none | pull_back(cotangents)[0]),)


_gradients.defvjp(_gradients_forward, _gradients_backward)


def _plain_gradients(options: Options) -> Callable[[backward.Operands], list[jax.Array]]:
    return functools.partial(backward.gradients, **options.of_definition())


@functools.cache
def _mappable_gradients(options: Options) -> Callable[[backward.Operands], list[jax.Array]]:
    plain = _plain_gradients(options)

    @jax.custom_batching.custom_vmap
    def call(operands: backward.Operands) -> list[jax.Array]:
        if partitioning.in_shard_map():
            return plain(operands)
        results = [form("d_q", 4), form("d_k", 4), form("d_v", 4)]
        if operands.sinks is not None:
            results.append(form("d_sinks", 2))
        signature = partitioning.Signature(
            split.Layout(operands.q.shape[2], operands.k.shape[2]),
            operands=forms(operands),
            results=tuple(results),
        )
        return list(_partitioned_gradients(options, signature)(operands))

    @call.def_vmap
    def rule(
        size: int, told: list[backward.Operands], operands: backward.Operands
    ) -> tuple[Any, list[bool]]:
        mapped = told[0]
        if mapped.k or mapped.v:
            of_forms = forms(operands, mapped=mapped)
            results = _fold_into("B", call, size, of_forms, mapped, operands)
        else:
            # Each element has its d_k and d_v, but k and v need not be repeated for that.
            axes = jax.tree.map(lambda is_mapped: 0 if is_mapped else None, mapped)
            results = jax.vmap(plain, (axes,))(operands)
        return results, [True] * len(results)

    return call


@functools.cache
def _partitioned_gradients(
    options: Options, signature: partitioning.Signature
) -> Callable[..., Any]:
    call = _plain_gradients(options)

    def local(chosen: split.Split, tokens: Any) -> split.Call:
        return chosen.local_gradients(call, tokens)

    key = _key(options.scale, ("gradients", options))
    return partitioning.partitioned(call, signature, local, key)
