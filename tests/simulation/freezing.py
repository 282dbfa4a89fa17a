"""Copies and fingerprints of state machines, faster than `copy.deepcopy` and `pickle`: thousands per second."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")


def clone(value: T) -> T:
    """A copy that shares nothing that changes; frozen dataclasses and tuples are shared."""
    kind = type(value)
    how = _CLONES.get(kind)
    if how is None:
        how = _CLONES[kind] = _clone_fields(kind) if _changes(kind) else _same
    return how(value)  # type: ignore[no-any-return]


def clone_object(machine: T, shared: frozenset[str] = frozenset()) -> T:
    """A copy of a plain object; its attributes named in `shared` are those of the original."""
    found = object.__new__(type(machine))
    found.__dict__.update({name: value if name in shared else clone(value) for name, value in vars(machine).items()})
    return found


def freeze(value: object) -> object:
    """A value that is equal, and hashes equally, exactly where the originals are equal."""
    kind = type(value)
    how = _FREEZES.get(kind)
    if how is None:
        how = _FREEZES[kind] = _freeze_fields(kind) if _changes(kind) else _same
    return how(value)


def freeze_object(machine: object, left_out: frozenset[str] = frozenset()) -> object:
    """A plain object without some of its attributes."""
    return tuple(freeze(value) for name, value in vars(machine).items() if name not in left_out)


def _same(value: Any) -> Any:
    return value


def _changes(kind: Any) -> bool:
    return is_dataclass(kind) and not vars(kind)["__dataclass_params__"].frozen


def _clone_fields(kind: Any) -> Callable[[Any], Any]:
    names = tuple(field.name for field in fields(kind))

    def how(value: Any) -> Any:
        found = copy.copy(value)
        for name in names:
            setattr(found, name, clone(getattr(value, name)))
        return found

    return how


def _freeze_fields(kind: Any) -> Callable[[Any], Any]:
    names = tuple(field.name for field in fields(kind))
    return lambda value: tuple(freeze(getattr(value, name)) for name in names)


_CLONES: dict[type, Callable[[Any], Any]] = {
    dict: lambda value: {key: clone(item) for key, item in value.items()},
    list: lambda value: [clone(item) for item in value],
    set: set,
}
_FREEZES: dict[type, Callable[[Any], Any]] = {
    dict: lambda value: frozenset((key, freeze(item)) for key, item in value.items()),
    list: lambda value: tuple(freeze(item) for item in value),
    set: frozenset,
}
