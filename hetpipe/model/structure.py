"""Flattening of the return values of modules and functions into tensors, numbers and a skeleton to rebuild them.

Both sides of a cut have the skeleton from the recording; only the leaves differ between minibatches.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Number = bool | int | float

#: Types whose values are identical, or equal, in every process.
_CONSTANTS = (type(None), str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum, type)

_SCALARS = (*_CONSTANTS, bool, int, float)

#: Attributes of modules: a path in the model, and a name.
Attributes = tuple[tuple[str, str], ...]

#: Attributes that every module has.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))

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
    if isinstance(value, tuple | list | dict):
        if not _is_rebuilt(value):
            return Opaque(type(value))
        if isinstance(value, dict):
            return Named(type(value), tuple(value), tuple(map(inner, value.values())))
        return Several(type(value), tuple(map(inner, value)))
    position = positions.get(id(value))
    if position is not None:
        return Alias(position)
    if dataclasses.is_dataclass(value) and _is_rebuilt(value):
        names = tuple(each.name for each in dataclasses.fields(value))
        return Named(type(value), names, tuple(inner(getattr(value, name)) for name in names))
    return Opaque(type(value))


def with_attributes(result: Any, attributes: Iterable[tuple[nn.Module, str]]) -> Any:
    """The return value of a module's call, followed by the values of `attributes`, which the call has set."""
    return (result, *(vars(module).get(name) for module, name in attributes))


def set_attributes(attributes: Iterable[tuple[nn.Module, str]], values: Iterable[Any]) -> None:
    """Set `attributes` to `values`. Lists and dicts stay the ones they are: others may know them too."""
    for (module, name), value in zip(attributes, values, strict=True):
        current = vars(module).get(name)
        if type(current) is list and type(value) is list:
            current[:] = value
        elif type(current) is dict and type(value) is dict:
            current.clear()
            current.update(value)
        else:
            vars(module)[name] = value


#: Type of a container → whether it is rebuilt from its items, as the first one of that type was.
_rebuilt: dict[type, bool] = {tuple: True, list: True, dict: True, OrderedDict: True, torch.Size: True}


def _is_rebuilt(value: Any) -> bool:
    """Whether containers of this type can be made of their items: a `defaultdict` and others need more."""
    kind = type(value)
    if kind not in _rebuilt:
        try:
            if isinstance(value, tuple | list):
                items = list(value)
                again = _sequence(kind, items)
                is_same = len(again) == len(items) and all(map(operator.is_, again, items))
            else:
                again, is_same = _mapping(kind, _pairs(value)), True
        except Exception:  # noqa: BLE001 - of the user's class
            _rebuilt[kind] = False
        else:
            _rebuilt[kind] = is_same and _attributes(again) == _attributes(value)
    return _rebuilt[kind]


def _pairs(value: Any) -> dict[Any, Any]:
    if not dataclasses.is_dataclass(value):
        return dict(value)
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}


def _attributes(value: Any) -> set[str]:
    return set(getattr(value, "__dict__", ()))


def _sequence(kind: type, items: list[Any]) -> Any:
    if kind is list or kind is tuple:
        return kind(items)
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


def _mapping(kind: type, pairs: dict[Any, Any]) -> Any:
    return kind(**pairs) if dataclasses.is_dataclass(kind) else kind(pairs)


def put_together(skeleton: Skeleton, leaves: Iterator[Any], parts: Sequence[Any]) -> Any:
    """Inverse of `take_apart`, for other leaves and the arguments of another call."""
    match skeleton:
        case Leaf() | NumberLeaf():
            return next(leaves)
        case Alias(position):
            return parts[position]
        case Constant(value):
            return value
        case Several(kind, items):
            return _sequence(kind, [put_together(item, leaves, parts) for item in items])
        case Named(kind, keys, items):
            values = [put_together(item, leaves, parts) for item in items]
            return _mapping(kind, dict(zip(keys, values, strict=True)))
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
