"""Which mesh axes one call is split by: rows and heads go their own ways, no row needs another's.

Batch, tokens and heads can be split; S and head_dim cannot (for S, see sequence_parallel.py). What
asks for such a plan, and how it is carried out, is in partitioning.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

Axes = tuple[str, ...]
Call = Callable[..., Sequence[jax.Array]]  # (q, k, v, positions) to [out] or [out, lse]


@dataclass(frozen=True)
class Split:
    """The mesh axes that each dimension is split by, the major one first.

    ``kv_heads`` is the longest prefix of ``heads`` that divides Hk. Devices along the other axes
    of ``heads`` share kv heads, and each of them takes the one that its query heads read.
    """

    batch: Axes
    tokens: Axes
    heads: Axes
    kv_heads: Axes

    def operands(self) -> list[PartitionSpec]:
        """Of q, k, v and positions."""
        cache = PartitionSpec(self.batch, None, self.kv_heads, None)
        return [self.results()[0], cache, cache, PartitionSpec(self.batch, self.tokens)]

    def results(self) -> list[PartitionSpec]:
        """Of out and lse."""
        rows = (self.batch, self.tokens, self.heads)
        return [PartitionSpec(*rows, None), PartitionSpec(*rows)]

    def local(self, call: Call, group: int) -> Call:
        """``call`` as one device does it, on its shards; ``group`` is Hq // Hk."""
        sharing = self.heads[len(self.kv_heads) :]

        def on_shards(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> Any:
            if sharing and k.shape[2] > 1:
                head = jax.lax.axis_index(sharing) * q.shape[2] // group
                k, v = (jax.lax.dynamic_slice_in_dim(x, head, 1, axis=2) for x in (k, v))
            return call(q, k, v, positions)

        return on_shards


def plan(
    q_heads: int, kv_heads: int, sizes: Mapping[str, int], wishes: Sequence[tuple[Axes, Axes, Axes]]
) -> Split:
    """The split that follows the first wish that can be had, dimension by dimension.

    Rows may be padded to fit the devices: what pads them is rows too, and changes no other.

    Args:
      q_heads: Hq.
      kv_heads: Hk.
      sizes: Of the mesh axes.
      wishes: (batch, tokens, heads): how an array that takes part is split already.
    """

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
    return Split(chosen[0], chosen[1], chosen[2], of_kv(chosen[2]))
