"""Which mesh axes one call is split by: rows and heads go their own ways, no row needs another's.

Batch, tokens and heads can be split; S and head_dim cannot (for S, see sequence_parallel.py), and
layers stay stacked. What asks for such a plan, and how it is carried out, is in partitioning.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_fa import backward, stacks
from jax_fa.operands import Form

Axes = tuple[str, ...]
Call = Callable[..., Sequence[jax.Array]]


@dataclass(frozen=True)
class Layout:
    """What of a call's operands the ways to split it depend on.

    ``layer_axis`` is where k and v have their layers, if they have some.
    """

    q_heads: int
    kv_heads: int
    layer_axis: int = 0

    @property
    def group(self) -> int:
        """Query heads that read one kv head."""
        return self.q_heads // self.kv_heads


@dataclass(frozen=True)
class Split:
    """The mesh axes that each dimension is split by, the major one first.

    ``kv_heads`` is the longest prefix of ``heads`` that divides Hk. Devices along the other axes
    of ``heads`` share kv heads, and each of them takes the one that its query heads read.
    """

    layout: Layout
    batch: Axes
    tokens: Axes
    heads: Axes
    kv_heads: Axes

    def spec(self, form: Form) -> PartitionSpec:
        """How an array of this form is split."""
        by = {"B": self.batch, "T": self.tokens, "Hq": self.heads, "Hk": self.kv_heads}
        return PartitionSpec(*(by.get(axis) for axis in form.axes))

    def local(self, call: Call) -> Call:
        """``call``, of a named tuple of operands, as one device does it, on its shards."""

        def on_shards(operands: Any) -> Any:
            head = self._kv_head(operands)
            if head is None:
                return call(operands)
            if getattr(operands, "layer", None) is not None:
                # First, since a slice of the head would copy it of every layer.
                operands = stacks.without_layer(operands, self.layout.layer_axis)
            k, v = (
                jax.lax.dynamic_slice_in_dim(x, head, 1, axis=2) for x in (operands.k, operands.v)
            )
            return call(operands._replace(k=k, v=v))

        return on_shards

    def local_gradients(self, call: Call, tokens: Any) -> Call:
        """``call``, from backward.Operands to d_q, d_k, d_v and d_sinks, on one device.

        Its rows are its own, and so is their d_q; what they add to d_k and d_v is summed over the
        devices that have the same slots and kv heads, d_sinks over those that have rows of the same
        sequences and query heads. ``tokens`` is T: rows that only pad a shard
        to its size could hold anything, and count as rows that see nothing.
        """
        over = (*self.tokens, *self.sharing)

        def on_shards(operands: backward.Operands) -> Sequence[jax.Array]:
            q, k, lse = operands.q, operands.k, operands.lse
            if self.tokens and q.shape[1] * jax.lax.axis_size(self.tokens) != tokens:
                row = jax.lax.axis_index(self.tokens) * q.shape[1] + jnp.arange(q.shape[1])
                lse = jnp.where((row < tokens)[:, None], lse, -jnp.inf)
            gradients = self.local(call)(operands._replace(lse=lse))
            if not over:
                return gradients
            d_q, d_k, d_v, *d_sinks = gradients
            d_kv = [d_k, d_v]
            head = self._kv_head(operands)
            if head is not None:
                of_all = jnp.zeros(k.shape, d_kv[0].dtype)
                d_kv = [jax.lax.dynamic_update_slice_in_dim(of_all, x, head, 2) for x in d_kv]
            if self.tokens:
                d_sinks = jax.lax.psum(d_sinks, self.tokens)
            return [d_q, *jax.lax.psum(d_kv, over), *d_sinks]

        return on_shards

    @property
    def sharing(self) -> Axes:
        """The axes whose devices share kv heads."""
        return self.heads[len(self.kv_heads) :]

    def _kv_head(self, operands: Any) -> jax.Array | None:
        """The one of this shard's kv heads that its query heads read, if they read but one."""
        if not self.sharing or operands.k.shape[-2] == 1:
            return None
        return jax.lax.axis_index(self.sharing) * operands.q.shape[2] // self.layout.group


def plan(
    layout: Layout, sizes: Mapping[str, int], wishes: Sequence[tuple[Axes, Axes, Axes]]
) -> Split:
    """The split that follows the first wish that can be had, dimension by dimension.

    Rows may be padded to fit the devices: what pads them is rows too, and changes no other.

    Args:
      layout: Of the call.
      sizes: Of the mesh axes.
      wishes: (batch, tokens, heads): how an array that takes part is split already.
    """
    q_heads, kv_heads = layout.q_heads, layout.kv_heads

    def size(axes: Axes) -> int:
        return math.prod(sizes[axis] for axis in axes)

    def longest(axes: Axes, fits: Callable[[Axes], bool]) -> Axes:
        """The longest prefix that fits."""
        prefixes = (axes[:n] for n in range(len(axes), 0, -1))
        return next((prefix for prefix in prefixes if fits(prefix)), ())

    def of_kv(axes: Axes) -> Axes:
        return longest(axes, lambda prefix: kv_heads % size(prefix) == 0)

    def heads_fit(axes: Axes) -> bool:
        if q_heads % size(axes) != 0:
            return False
        # Each device has whole groups of query heads, or a part of one.
        return of_kv(axes) == axes or (q_heads // kv_heads) % (q_heads // size(axes)) == 0

    chosen: list[Axes] = [(), (), ()]
    for wish in wishes:
        for dim, axes in enumerate(wish):
            taken = {axis for other in chosen for axis in other}
            if not chosen[dim] and taken.isdisjoint(axes):
                chosen[dim] = longest(axes, heads_fit) if dim == 2 else axes
    return Split(layout, chosen[0], chosen[1], chosen[2], of_kv(chosen[2]))
