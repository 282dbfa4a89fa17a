"""Skeletons of return values as JSON: types and constants by names, resolved among the modules that are imported."""

from __future__ import annotations

import enum
import sys
from typing import Any

import torch

from hetpipe.errors import UserError
from hetpipe.model.structure import Alias, Constant, Leaf, Named, NumberLeaf, Opaque, Several, Skeleton

_LEAF = "tensor"


class NotDescribable(UserError):
    """A part of the description has no name by which another process can resolve it."""


def plain_skeleton(skeleton: Skeleton) -> Any:  # noqa: PLR0911 - one case per kind
    """Convert a skeleton to JSON values.

    Raises:
        NotDescribable: a type has no name.
    """
    match skeleton:
        case Leaf():
            return _LEAF
        case NumberLeaf(kind):
            return {"number": kind.__name__}
        case Alias(position):
            return {"argument": position}
        case Constant(value):
            return {"constant": _plain_constant(value)}
        case Several(kind, items):
            return {"several": type_name(kind), "items": [plain_skeleton(item) for item in items]}
        case Named(kind, keys, items):
            return {
                "named": type_name(kind),
                "keys": [_plain_key(key) for key in keys],
                "items": [plain_skeleton(item) for item in items],
            }
        case Opaque(kind):
            return {"opaque": type_name(kind)}


def skeleton_of(plain: Any) -> Skeleton:  # noqa: PLR0911 - one case per kind
    """Convert from the result of `plain_skeleton`.

    Raises:
        NotDescribable: the name of a type does not resolve.
        KeyError, TypeError, ValueError: `plain` is not a skeleton.
    """
    match plain:
        case "tensor":
            return Leaf()
        case {"number": kind}:
            return NumberLeaf({"bool": bool, "int": int, "float": float}[kind])
        case {"argument": position}:
            return Alias(position)
        case {"constant": value}:
            return Constant(_constant(value))
        case {"several": kind, "items": items}:
            return Several(type_of(kind), tuple(map(skeleton_of, items)))
        case {"named": kind, "keys": keys, "items": items}:
            return Named(type_of(kind), tuple(keys), tuple(map(skeleton_of, items)))
        case {"opaque": kind}:
            return Opaque(type_of(kind))
        case _:
            raise ValueError(f"{plain!r:.80} is not a skeleton")


def _plain_key(key: object) -> object:
    if key is None or type(key) in {str, bool, int, float}:
        return key
    raise NotDescribable(f"a mapping with the key {key!r:.80}")


def _plain_constant(value: Any) -> Any:
    match value:
        case enum.Enum():
            return {"enum": type_name(type(value)), "member": value.name}
        case None | str():
            return value
        case bytes():
            return {"bytes": value.hex()}
        case type():
            return {"type": type_name(value)}
        case torch.device():
            return {"device": str(value)}
        case torch.dtype() | torch.layout() | torch.memory_format():
            return {"torch": str(value).removeprefix("torch.")}
        case _:
            raise NotDescribable(f"the constant {value!r:.80}")


def _constant(plain: Any) -> Any:
    match plain:
        case None | str():
            return plain
        case {"enum": kind, "member": member}:
            return type_of(kind)[member]  # type: ignore[index]  # it is an enumeration
        case {"bytes": digits}:
            return bytes.fromhex(digits)
        case {"type": kind}:
            return type_of(kind)
        case {"device": device}:
            return torch.device(device)
        case {"torch": name}:
            return getattr(torch, name)
        case _:
            raise ValueError(f"{plain!r:.80} is not a constant")


# -- names ---------------------------------------------------------------------------------------------------------


def imported(name: str) -> Any:
    """Resolve `module:qualified.name` in a module that is already imported."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for attribute in path.split("."):
        found = getattr(found, attribute, None)
    return found


def type_name(kind: type) -> str:
    """Name by which another process can resolve a type.

    Raises:
        NotDescribable: there is none.
    """
    name = f"{kind.__module__}:{kind.__qualname__}"
    if imported(name) is not kind:
        raise NotDescribable(f"the type {name}, which cannot be resolved by this name")
    return name


def type_of(name: str) -> type:
    """Resolve the name of a type.

    Raises:
        NotDescribable: it does not resolve.
    """
    found = imported(name)
    if not isinstance(found, type):
        raise NotDescribable(f"the type {name}, which cannot be resolved by this name")
    return found
