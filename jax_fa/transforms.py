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
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa import backward, native, partitioning


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

    def with_lse(self) -> Config:
        """The same call, returning lse too; every kernel gives out the same bits then."""
        return Config(self.scale, self.chunk_invariant, self.implementation, True)


def _custom_call(config: Config, *operands: jax.Array) -> Sequence[jax.Array]:
    """[out] or [out, lse]; the one place that knows the handler's operands and attributes."""
    native.load()
    q = operands[0]
    results = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if config.return_lse:
        results.append(jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32))
    values = jax.ffi.ffi_call(native.PREFILL_TARGET, results)(
        *operands,
        scale=np.float32(config.scale),
        chunk_invariant=config.chunk_invariant,
        implementation=config.implementation,
    )
    return partitioning.alike_in_shard_map([*values, q])[:-1]


@functools.cache
def _partitioned_call(config: Config, q_heads: int, kv_heads: int) -> Callable[..., Any]:
    in_words = f"{native.PREFILL_TARGET} {config}"
    return partitioning.partitioned(
        functools.partial(_custom_call, config),
        q_heads,
        kv_heads,
        results=2 if config.return_lse else 1,
        key=(np.float32(config.scale), np.uint32(zlib.crc32(in_words.encode()))),
    )


@functools.cache
def _mappable_call(config: Config) -> Callable[..., list[jax.Array]]:
    """The call with a batching rule; one function object per config, as jit's cache needs."""

    @jax.custom_batching.custom_vmap
    def call(*operands: jax.Array) -> list[jax.Array]:
        if partitioning.in_shard_map():
            return list(_custom_call(config, *operands))
        partitioned = _partitioned_call(config, operands[0].shape[2], operands[1].shape[2])
        return list(partitioned(*operands))

    @call.def_vmap
    def rule(size: int, mapped: list[bool], *operands: jax.Array) -> tuple[Any, list[bool]]:
        cache_is_shared = not (mapped[1] or mapped[2])
        fold = _fold_into_tokens if cache_is_shared else _fold_into_batch
        results = fold(call, size, mapped, operands)
        return results, [True] * len(results)

    return call


def _broadcast(size: int, is_mapped: bool, x: jax.Array) -> jax.Array:
    return x if is_mapped else jnp.broadcast_to(x[None], (size, *x.shape))


def _fold_into_tokens(
    call: Callable[..., list[jax.Array]], size: int, mapped: list[bool], operands: Any
) -> list[jax.Array]:
    """All elements read one cache: [V, B, T, ...] becomes [B, V * T, ...]; no copy of k and v."""
    q, k, v, positions = operands
    q, positions = _broadcast(size, mapped[0], q), _broadcast(size, mapped[3], positions)
    _, batch, tokens = positions.shape

    def to_tokens(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(batch, size * tokens, *x.shape[3:])

    def from_tokens(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(batch, size, tokens, *x.shape[2:]), 1, 0)

    return [from_tokens(x) for x in call(to_tokens(q), k, v, to_tokens(positions))]


def _fold_into_batch(
    call: Callable[..., list[jax.Array]], size: int, mapped: list[bool], operands: Any
) -> list[jax.Array]:
    """Each element has a cache of its own: [V, B, ...] becomes [V * B, ...]."""
    stacked = [
        _broadcast(size, is_mapped, x) for is_mapped, x in zip(mapped, operands, strict=True)
    ]
    batch = stacked[0].shape[1]
    results = call(*(x.reshape(size * batch, *x.shape[2:]) for x in stacked))
    return [x.reshape(size, batch, *x.shape[1:]) for x in results]


def attend(config: Config, *operands: jax.Array) -> list[jax.Array]:
    """[out] or [out, lse] of checked, batched operands; differentiable, mappable, splittable."""

    def call(*operands: jax.Array) -> list[jax.Array]:
        return _differentiable_call(config, *partitioning.alike_in_shard_map(operands))

    results = 2 if config.return_lse else 1
    return list(partitioning.over_explicit_axes(call, operands, results))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable_call(config: Config, *operands: jax.Array) -> list[jax.Array]:
    return _mappable_call(config)(*operands)


def _attend_forward(config: Config, *operands: jax.Array) -> tuple[list[jax.Array], Any]:
    # By attend itself, so that the gradient can be differentiated in its turn.
    out, lse = attend(config.with_lse(), *operands)
    results = [out, lse] if config.return_lse else [out]
    return results, (operands, lse)


def _attend_backward(config: Config, residuals: Any, cotangents: list[jax.Array]) -> Any:
    operands, lse = residuals
    d_out = cotangents[0]
    d_lse = cotangents[1] if config.return_lse else jnp.zeros_like(lse)
    d_q, d_k, d_v = backward.gradients(operands, lse, d_out, d_lse, config.scale)
    return d_q, d_k, d_v, None  # integer positions have no gradient


_differentiable_call.defvjp(_attend_forward, _attend_backward)
