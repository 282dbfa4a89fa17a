"""Frozen dataclasses to JSON text and back, checked by their own type hints.

Used for the values that travel on pipes between an agent and its children and for files in a run's folder. Nothing
is ever unpickled: what comes in is parsed as JSON and validated. Unknown keys are ignored, so that versions can mix.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from hetpipe.errors import ProtocolViolation

T = TypeVar("T")


_adapters: dict[Any, TypeAdapter[Any]] = {}


def _adapter(kind: Any) -> TypeAdapter[Any]:
    """The adapter of a type; building one is slow, and there are few types."""
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def plain(kind: Any, value: object) -> Any:
    """`value`, an instance of the type `kind`, as JSON-able Python."""
    return _adapter(kind).dump_python(value, mode="json")


def revive(kind: type[T] | Any, data: Any) -> T:
    """The inverse of `plain`.

    Raises:
        ProtocolViolation: the data does not fit the type.
    """
    try:
        return _adapter(kind).validate_python(data)  # type: ignore[no-any-return]
    except ValidationError as error:
        raise ProtocolViolation(f"not a valid {getattr(kind, '__name__', kind)}: {error}") from error


def to_json(kind: Any, value: object) -> str:
    """One line of JSON text for `value`, an instance of the type `kind`."""
    return json.dumps(_adapter(kind).dump_python(value, mode="json"))  # unlike pydantic's own, this keeps NaN a number


def from_json(kind: type[T] | Any, text: str | bytes) -> T:
    """The inverse of `to_json`.

    Raises:
        ProtocolViolation: the text is no JSON or does not fit the type.
    """
    try:
        return _adapter(kind).validate_json(text)  # type: ignore[no-any-return]
    except ValidationError as error:
        raise ProtocolViolation(f"not a valid {getattr(kind, '__name__', kind)}: {error}") from error
