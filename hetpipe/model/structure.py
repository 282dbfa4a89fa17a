"""Flattening of the return values of modules and functions into tensors, numbers and a skeleton to rebuild them.

Both sides of a cut have the skeleton from the recording; only the leaves differ between minibatches.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Number = bool | int | float

#: Types whose values are identical, or equal, in every process.
_CONSTANTS = (type(None), str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum, type)

_SCALARS = (*_CONSTANTS, bool, int, float)

#: Maximum depth of nested containers.
_DEEPEST = 16


@dataclass(frozen=True, slots=True)
class Leaf:
    """A new tensor."""


@dataclass(frozen=True, slots=True)
class NumberLeaf:
    """A `bool`, `int` or `float`; may differ between minibatches."""

    kind: type


@dataclass(frozen=True, slots=True)
class Alias:
    """An argument of the call, returned."""

    position: int
    """Its index among the parts of the arguments (`parts_of`)."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A value that is the same in every minibatch."""

    value: Any


@dataclass(frozen=True, slots=True)
class Several:
    """A tuple, named tuple, list or `torch.Size`."""

    kind: type
    items: tuple[Skeleton, ...]


@dataclass(frozen=True, slots=True)
class Named:
    """A mapping or a dataclass (a `ModelOutput` is both)."""

    kind: type
    keys: tuple[Any, ...]
    items: tuple[Skeleton, ...]


@dataclass(frozen=True, slots=True)
class Opaque:
    """An object of any other type: it cannot be rebuilt on the other side of a cut."""

    kind: type


Skeleton = Leaf | NumberLeaf | Alias | Constant | Several | Named | Opaque

SINGLE = Leaf()


class NotRebuilt:
    """Placeholder for an opaque object on stages that did not create it; reading an attribute is an error."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self._kind.__name__}.{name} is read on a stage that did not create the object")


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Tensors in nested containers, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item, depth + 1)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth + 1)
    elif depth < _DEEPEST and dataclasses.is_dataclass(value) and not isinstance(value, type):
        for each in dataclasses.fields(value):
            yield from tensors_in(getattr(value, each.name, None), depth + 1)


#: Types of arguments that contain no tensors; others are searched.
_WITHOUT_TENSORS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.memory_format, slice})


def tensors_of_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Tensors in the arguments of a call, in order."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind is Tensor or kind is nn.Parameter:
            found.append(value)
        elif kind not in _WITHOUT_TENSORS:
            found += tensors_in(value, 1)
    return found


def parts_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Tensors and objects in the arguments of a call, to identify those that it returns."""
    found: list[Any] = []

    def walk(value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            for item in value:
                walk(item, depth + 1)
        elif isinstance(value, dict):
            for item in value.values():
                walk(item, depth + 1)
        elif not isinstance(value, _SCALARS):
            found.append(value)

    walk(args, 0)
    walk(kwargs, 0)
    return found


def take_apart(value: Any, parts: Sequence[Any]) -> tuple[list[Tensor | Number], Skeleton]:
    """Flatten the return value of a call into leaves and a skeleton.

    Args:
        value: the return value.
        parts: parts of the call's arguments (`parts_of`).
    """
    leaves: list[Tensor | Number] = []
    positions = {id(part): position for position, part in reversed(list(enumerate(parts)))}
    return leaves, _skeleton(value, positions, leaves, 0)


def _skeleton(value: Any, positions: Mapping[int, int], leaves: list[Tensor | Number], depth: int) -> Skeleton:  # noqa: C901, PLR0911 - one case per kind of value
    def inner(item: Any) -> Skeleton:
        return _skeleton(item, positions, leaves, depth + 1)

    if isinstance(value, Tensor):
        position = positions.get(id(value))
        if position is not None:
            return Alias(position)
        leaves.append(value)
        return SINGLE
    if isinstance(value, bool | int | float) and not isinstance(value, enum.Enum):
        leaves.append(value)
        return NumberLeaf(bool if isinstance(value, bool) else int if isinstance(value, int) else float)
    if isinstance(value, _CONSTANTS):
        return Constant(value)
    if depth == _DEEPEST:
        return Opaque(type(value))
    if isinstance(value, tuple | list):
        return Several(type(value), tuple(map(inner, value)))
    if isinstance(value, dict):
        return Named(type(value), tuple(value), tuple(map(inner, value.values())))
    position = positions.get(id(value))
    if position is not None:
        return Alias(position)
    if dataclasses.is_dataclass(value):
        names = tuple(each.name for each in dataclasses.fields(value))
        return Named(type(value), names, tuple(inner(getattr(value, name)) for name in names))
    return Opaque(type(value))


def put_together(skeleton: Skeleton, leaves: Iterator[Any], parts: Sequence[Any]) -> Any:  # noqa: PLR0911 - one case per kind
    """Inverse of `take_apart`, for other leaves and the arguments of another call."""
    match skeleton:
        case Leaf() | NumberLeaf():
            return next(leaves)
        case Alias(position):
            return parts[position]
        case Constant(value):
            return value
        case Several(kind, items):
            found = [put_together(item, leaves, parts) for item in items]
            if kind is list or kind is tuple:
                return kind(found)
            return kind(*found) if hasattr(kind, "_fields") else kind(found)
        case Named(kind, keys, items):
            values = [put_together(item, leaves, parts) for item in items]
            pairs = dict(zip(keys, values, strict=True))
            return kind(**pairs) if dataclasses.is_dataclass(kind) else kind(pairs)
        case Opaque(kind):
            return NotRebuilt(kind)


def kinds_of(skeleton: Skeleton) -> Iterator[type | None]:
    """Per leaf, in order: None for a tensor, else the number's type."""
    match skeleton:
        case Leaf():
            yield None
        case NumberLeaf(kind):
            yield kind
        case Several(_, items) | Named(_, _, items):
            for item in items:
                yield from kinds_of(item)
        case _:
            return


def is_opaque(skeleton: Skeleton) -> bool:
    """Whether some part of the value cannot be rebuilt."""
    if isinstance(skeleton, Several | Named):
        return any(map(is_opaque, skeleton.items))
    return isinstance(skeleton, Opaque)
