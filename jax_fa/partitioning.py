"""How JAX has a call split over devices: what its partitioners ask, and axes in the arrays' types.

``partitioned`` answers XLA's partitioners, ``over_explicit_axes`` reads the types; both carry out
the plan of split.py. Inside ``shard_map`` everything is local already. Writing into caches needs no
plan: ``write_over_explicit_axes`` only says where things are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_fa.operands import Form, Operands
from jax_fa.split import Axes, Call, Layout, Split, plan

Caches = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class Signature:
    """What a call takes, a named tuple with q, k and v, and what it gives, in forms."""

    layout: Layout
    operands: Any
    results: tuple[Form, ...]


def partitioned(
    call: Call,
    signature: Signature,
    local: Callable[[Split, Any], Call],
    key: Sequence[Any],
) -> Call:
    """``call`` with the rules for arrays that ``jit`` splits over devices by itself.

    Where there is one device, or in a ``shard_map``, JAX lowers this to ``call`` and nothing else.

    Args:
      call: The function of whole arrays, a named tuple of them.
      signature: Of it.
      local: Gives the function of shards, told the split and the number of tokens, T.
      key: Scalars that tell calls apart. They are operands that nothing reads: the program that
        XLA partitions names no function, so to JAX's compilation cache, calls of two scales
        would be one program.
    """
    of_operands = jax.tree.leaves(signature.operands)
    tree: Any = jax.tree.structure(signature.operands)
    read = len(of_operands)

    def ignoring_key(*operands: Any) -> list[jax.Array]:
        return list(call(tree.unflatten(operands[:read])))

    def split(mesh: Any, operands: Any, outputs: Any) -> tuple[Split, Any]:
        arrays = [*operands[:read], *outputs]
        mesh = _fine_mesh(mesh, arrays)
        told = [_axes_of(x, mesh) for x in arrays]
        wishes = _wishes([*of_operands, *signature.results], told)
        return plan(signature.layout, mesh.shape, wishes), mesh

    def shardings(mesh: Any, chosen: Split, forms: Sequence[Form]) -> list[NamedSharding]:
        return [NamedSharding(mesh, chosen.spec(form)) for form in forms]

    def infer(mesh: Any, operands: Any, outputs: Any) -> list[NamedSharding]:
        chosen, mesh = split(mesh, operands, ())
        if chosen.sharing:
            # Kv heads split by a part of an axis: JAX could not tell that of a program's results.
            chosen = replace(chosen, kv_heads=())
        return shardings(mesh, chosen, signature.results)

    def partition(mesh: Any, operands: Any, outputs: Any) -> tuple[Any, ...]:
        chosen, mesh = split(mesh, operands, outputs)
        on_shards = local(chosen, tree.unflatten(operands[:read]).q.shape[1])

        def lower(*shards: Any) -> list[jax.Array]:
            # Under no mesh: with one of explicit axes around, JAX 0.11 and 0.12 would mark what
            # jnp makes here by shardings, which XLA has no more use for and refuses.
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                return list(on_shards(tree.unflatten(shards[:read])))

        unread = [NamedSharding(mesh, PartitionSpec())] * len(key)
        return (
            mesh,
            lower,
            shardings(mesh, chosen, signature.results),
            (*shardings(mesh, chosen, of_operands), *unread),
        )

    call_with_rules = custom_partitioning(ignoring_key)
    call_with_rules.def_partition(
        partition,
        infer_sharding_from_operands=infer,  # GSPMD asks this
        decode_shardings=False,  # JAX's own decoding fails where an axis is split further
        sharding_rule=lambda *_: _rule(signature, len(key)),  # Shardy asks this
    )
    return lambda operands: call_with_rules(*jax.tree.leaves(operands), *key)


def _wishes(forms: Sequence[Form], told: Sequence[Sequence[Axes]]) -> list[tuple[Axes, Axes, Axes]]:
    """How the large arrays are split already, those of rows first; for ``plan``."""
    large = [dict(zip(form.axes, x, strict=True)) for form, x in zip(forms, told, strict=False)]
    rows = [(of["B"], of["T"], of["Hq"]) for of in large if {"T", "D"} <= of.keys()]
    caches: list[tuple[Axes, Axes, Axes]] = [(of["B"], (), of["Hk"]) for of in large if "S" in of]
    return [*rows, *caches]


def _rule(signature: Signature, unread: int) -> tuple[str, dict[str, Any]]:
    """Which dimensions are split alike, as Shardy wants it told.

    What follows has factors of its own, and so no say. A factor of size 1 may not be part of a
    dimension.
    """
    kv_heads, group = signature.layout.kv_heads, signature.layout.group
    heads, kv = ("(g r)", "g") if kv_heads > 1 and group > 1 else ("h", "h")
    if kv_heads == 1 and group > 1:
        kv = "g"
    letters = {"B": "b", "T": "t", "S": "s", "D": "d", "L": "l", "Hq": heads, "Hk": kv}
    own = (f"u{i}" for i in itertools.count())

    def words(forms: Sequence[Form]) -> str:
        named = ([next(own) if x.follows else letters[axis] for axis in x.axes] for x in forms)
        return ", ".join(" ".join(of_one) for of_one in named)

    operands = words([*jax.tree.leaves(signature.operands), *[Form((), True)] * unread])
    # In the order in which the rule names them, as Shardy wants it.
    named = dict.fromkeys(operands.replace(",", " ").split())
    whole = tuple(word for word in named if word in ("d", "l", "s"))
    sizes = {"r": group} if heads == "(g r)" else {}
    rule = f"{operands} -> {words(signature.results)}"
    return rule, {"need_replication_factors": whole, **sizes}


def _prime_factors(number: int) -> list[int]:
    for factor in range(2, math.isqrt(number) + 1):
        if number % factor == 0:
            return [factor, *_prime_factors(number // factor)]
    return [number] if number > 1 else []


def _fine_mesh(mesh: Any, arrays: Sequence[Any]) -> jax.sharding.Mesh:
    """The mesh with its axes cut into their prime factors: partitioners split by parts of axes.

    JAX passes none where shardings do not name one; then all devices are one axis. Where nothing is
    split yet, GSPMD asks without any sharding: any mesh can say "whole".
    """
    x = next((x for x in arrays if x.sharding is not None), None)
    if not mesh.empty:
        devices = mesh.devices
    elif x is not None:
        count = len(x.sharding.device_set)
        devices = np.array(list(x.sharding.devices_indices_map((count,) * len(x.shape))))
    else:
        devices = np.array(jax.devices()[:1])
    factors = [factor for size in devices.shape for factor in _prime_factors(size)]
    names = tuple(f"axis{i}" for i in range(len(factors)))
    return jax.sharding.Mesh(devices.reshape(factors), names)


def _axes_of(x: Any, mesh: jax.sharding.Mesh) -> tuple[Axes, ...]:
    """For each dimension of x, the axes of ``mesh`` that split it; () where that is not known.

    From where each device's shard begins, in an array of as many elements as devices along each
    dimension: a sum over axes of the device's coordinate times a stride.
    """
    if x.sharding is None:
        return ((),) * len(x.shape)
    indices = x.sharding.devices_indices_map((mesh.size,) * len(x.shape))
    starts = np.array([[part.start or 0 for part in index] for index in indices.values()])
    coordinates = np.indices(mesh.devices.shape).reshape(len(mesh.axis_names), mesh.size)
    alone = coordinates.sum(axis=0) == 1  # the devices one step along one axis
    strides = coordinates[:, alone] @ starts[alone]  # [axes, dims]
    axes = []
    for dim, told in enumerate((coordinates.T @ strides == starts).all(axis=0)):
        order = np.argsort(-strides[:, dim], kind="stable")
        split_by = tuple(mesh.axis_names[i] for i in order if strides[i, dim] > 0)
        axes.append(split_by if told else ())
    return tuple(axes)


def over_explicit_axes(call: Call, signature: Signature, operands: Operands) -> Sequence[jax.Array]:
    """``call``, each device on its shards, where the arrays' types say how they are split."""
    kinds = [jax.typeof(x).sharding for x in (operands.q, operands.k)]
    mesh = kinds[0].mesh
    if AxisType.Explicit not in mesh.axis_types:
        return call(operands)

    def axes(entry: Any) -> Axes:
        return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)

    told = [[axes(entry) for entry in kind.spec] for kind in kinds]
    wishes = _wishes([signature.operands.q, signature.operands.k], told)
    split = plan(signature.layout, mesh.shape, wishes)
    specs = jax.tree.map(split.spec, signature.operands)
    moved = jax.tree.map(lambda x, s: jax.reshard(x, NamedSharding(mesh, s)), operands, specs)
    # Over all axes of the mesh but those that vmap has taken.
    return jax.shard_map(
        split.local(call),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=[split.spec(form) for form in signature.results],
    )(moved)


def write_over_explicit_axes(
    write: Callable[..., Caches], caches: Caches, rows: Caches, positions: jax.Array, *rest: Any
) -> Caches:
    """``write(caches, rows, positions, *rest)`` where types say how arrays are split.

    Caches stay where they are, whole where theirs says nothing, and rows go there. XLA splits the
    writing itself.
    """
    kinds = [jax.typeof(x).sharding for x in (*caches, *rows, positions)]
    meshes = (kind.mesh for kind in kinds)
    mesh = next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)
    if mesh is None:
        return write(caches, rows, positions, *rest)

    def moved(x: jax.Array, spec: Sequence[Any]) -> jax.Array:
        return jax.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))

    def of_rows(of_cache: Sequence[Any]) -> list[Any]:
        return [*(of_cache[-4:-3] if positions.ndim == 2 else ()), None]

    told = [
        [None] * x.ndim if kind.mesh.empty else list(kind.spec)
        for kind, x in zip(kinds, caches, strict=False)
    ]
    k, v = (moved(x, [*of_rows(s), *s[-2:]]) for x, s in zip(rows, told, strict=True))
    at = moved(positions, of_rows(told[0]))
    names = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return jax.sharding.auto_axes(
        write,
        axes=tuple(name for name, type_ in names if type_ == AxisType.Explicit),
        out_sharding=tuple(NamedSharding(mesh, PartitionSpec(*s)) for s in told),
    )(caches, (k, v), at, *rest)


def in_shard_map() -> bool:
    """Whether arrays are shards here, by a ``shard_map`` over all of the mesh or a part of it.

    A part: JAX cannot decode those shardings for custom_partitioning, and GSPMD would abort on
    that, so XLA is left to gather over the rest of the mesh.
    """
    return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types


def alike_in_shard_map(arrays: Any) -> Any:
    """A pytree of arrays, all marked as varying over the same axes, as ``check_vma=True`` asks.

    A cache that devices share gets its gradient summed over them by the transpose of this.
    """
    union = frozenset().union(*(jax.typeof(x).mat.varying for x in jax.tree.leaves(arrays)))

    def alike(x: jax.Array) -> jax.Array:
        lacking = union - jax.typeof(x).mat.varying
        return jax.lax.pcast(x, tuple(lacking), to="varying") if lacking else x

    return jax.tree.map(alike, arrays)
