"""What a call is made of: its arrays by name, the axes that each has, and its static options.

From the axes follow how an array is split over devices (split.py, partitioning.py) and how it joins
a mapped axis (transforms.py). An operand more is a field of ``Operands`` and a row of ``_TABLE``,
and a line in ffi/decode.cc; an option more is a field of ``Options``, and a line there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

_REQUIRED = 4


class Operands(NamedTuple):
    """The operands of a call, in the handlers' order; the optional ones are None where absent.

    Also anything else told of each, such as whether it is mapped. A pytree, of what is there.
    """

    q: Any
    k: Any
    v: Any
    positions: Any
    layer: Any = None
    starts: Any = None
    sinks: Any = None

    @property
    def optional_names(self) -> str:
        """Which of the optional operands there are, as the handlers are told."""
        optional = zip(self._fields[_REQUIRED:], self[_REQUIRED:], strict=True)
        return " ".join(name for name, x in optional if x is not None)


@dataclass(frozen=True)
class Options:
    """What is compiled into a call: attributes, and fields of AttentionProblem, of these names.

    Hashed and compared by JAX's caches, so types are exact: a np.float32 would compare equal to a
    float and hide a wrongly typed attribute. Floats hold float32 values. None: there is none.
    """

    scale: float
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    chunk_invariant: bool = True

    def attributes(self) -> dict[str, Any]:
        """The options that there are, in the types that the handlers read."""
        types = {float: np.float32, int: np.int32, bool: bool}
        there = {name: value for name, value in vars(self).items() if value is not None}
        return {name: types[type(value)](value) for name, value in there.items()}

    def of_definition(self) -> dict[str, Any]:
        """The options that say what is computed, as reference.attend and gradients take them."""
        return {name: x for name, x in vars(self).items() if name != "chunk_invariant"}


# The axes of each array in order: B sequences, T tokens, S slots, Hq and Hk heads, D, L layers. One
# in brackets may be absent. Arrays that follow are small: they are split as the others are, and
# have no say in it.
_LEADS, _FOLLOWS = False, True
_TABLE = {
    "q": ("B T Hq D", _LEADS),
    "k": ("[L] B S Hk D", _LEADS),
    "v": ("[L] B S Hk D", _LEADS),
    "positions": ("B T", _FOLLOWS),
    "layer": ("", _FOLLOWS),
    "starts": ("B [T]", _FOLLOWS),
    "sinks": ("[B] Hq", _FOLLOWS),
    "out": ("B T Hq D", _LEADS),
    "lse": ("B T Hq", _LEADS),
}


@dataclass(frozen=True)
class Form:
    """The axes of one array, as it is."""

    axes: tuple[str, ...]
    follows: bool


def form(name: str, ndim: int, layer_axis: int = 0) -> Form:
    """Of the array of this name, or of its gradient ("d_out"), with ``ndim`` axes.

    ``layer_axis``: where k and v that are stacked over layers have L.
    """
    row, follows = _TABLE[name.removeprefix("d_")]
    words = row.split()
    absent = {word for word in words if word[0] == "["} if ndim < len(words) else set()
    axes = [word.strip("[]") for word in words if word not in absent]
    if "L" in axes:
        axes.remove("L")
        axes.insert(layer_axis, "L")
    return Form(tuple(axes), follows)


def may_have(name: str, axis: str) -> bool:
    """Whether the array of this name has the axis, or may have it."""
    return axis in _TABLE[name][0].replace("[", "").replace("]", "").split()


_Tuple = TypeVar("_Tuple", bound=Any)


def forms(arrays: _Tuple, layer_axis: int = 0, mapped: _Tuple | None = None) -> _Tuple:
    """The forms of a named tuple of arrays, less the leading axis of those that are mapped."""
    mapped = mapped or jax.tree.map(lambda _: False, arrays)
    told = {
        name: form(name, x.ndim - is_mapped, layer_axis)
        for name, x, is_mapped in zip(arrays._fields, arrays, mapped, strict=True)
        if x is not None
    }
    return type(arrays)(**dict.fromkeys(arrays._fields) | told)
