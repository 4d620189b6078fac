"""Caches stacked over layers, where one layer of them is wanted as an array of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_fa.operands import Operands


def clamped(layer: jax.Array, layers: int) -> jax.Array:
    """The layer that an index stands for, as the kernels read it: the nearest that there is."""
    return jnp.clip(layer, 0, layers - 1)


def layer_of(stack: jax.Array, layer: jax.Array, axis: int = 0) -> jax.Array:
    """A copy of one layer of ``stack``, whose layers are along ``axis``."""
    index = clamped(layer, stack.shape[axis])
    return jax.lax.dynamic_index_in_dim(stack, index, axis, keepdims=False)


def without_layer(operands: Operands, axis: int = 0) -> Operands:
    """The operands without a layer, k and v being that layer's: a copy of it."""
    k, v = (layer_of(x, operands.layer, axis) for x in (operands.k, operands.v))
    return operands._replace(k=k, v=v, layer=None)


def layers_of(stack: jax.Array) -> jax.Array:
    """How many layers ``stack`` has, as the extent of an array of no elements: [L, 0]."""
    return jnp.zeros((stack.shape[0], 0), bool)


def with_zeros(one: jax.Array, layers: jax.Array, layer: jax.Array) -> jax.Array:
    """The transpose of layer_of: as many layers as ``layers``, of zeros but for that one."""
    index = clamped(layer, layers.shape[0])
    zeros = jnp.broadcast_to(jnp.zeros_like(one)[None], (layers.shape[0], *one.shape))
    return jax.lax.dynamic_update_index_in_dim(zeros, one, index, 0)
