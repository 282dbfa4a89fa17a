"""Frozen dataclasses to JSON text and back, validated against their type hints.

Used for the values that travel on pipes between an agent and its children and for files in a run's folder. Nothing is
ever unpickled: input is parsed as JSON and validated. Unknown keys are ignored, so that different versions can
interoperate.

Of a list only the first invalid entry is reported, in a short sentence: a peer that sends a million invalid ones must
not cause a million errors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import CoreSchema, SchemaValidator

from hetpipe.errors import ProtocolViolation

T = TypeVar("T")

#: Maximum entries of a mapping: virtual workers, metrics, keys of a job.
MAX_ENTRIES = 10_000

#: Maximum characters of an error message about invalid data.
_MAX_REASON_CHARACTERS = 600

_LISTS = frozenset({"list", "tuple", "set", "frozenset"})


@dataclass(frozen=True, slots=True)
class _Codec:
    adapter: TypeAdapter[Any]
    validator: SchemaValidator


_codecs: dict[Any, _Codec] = {}


def _codec(kind: Any) -> _Codec:
    """The serializer and validator of a type, cached: building one is slow, and there are few types."""
    if kind not in _codecs:
        adapter = TypeAdapter(kind)
        _codecs[kind] = _Codec(adapter, SchemaValidator(cast("CoreSchema", _bounded(adapter.core_schema))))
    return _codecs[kind]


def _bounded(schema: Any) -> Any:
    """`schema` with lists that stop at their first invalid entry and mappings of at most `MAX_ENTRIES`."""
    if isinstance(schema, list):
        return [_bounded(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    bounded = {key: _bounded(part) for key, part in schema.items()}
    if bounded.get("type") in _LISTS:
        bounded["fail_fast"] = True
    elif bounded.get("type") == "dict":
        bounded["max_length"] = MAX_ENTRIES
    return bounded


def plain(kind: Any, value: object) -> Any:
    """Convert `value`, of type `kind`, to plain Python data that JSON can encode."""
    return _codec(kind).adapter.dump_python(value, mode="json")


def revive(kind: type[T] | Any, data: Any) -> T:
    """Validate plain data as a value of type `kind`; the inverse of `plain`.

    Raises:
        ProtocolViolation: the data does not fit the type.
    """
    try:
        return _codec(kind).validator.validate_python(data)  # type: ignore[no-any-return]
    except ValidationError as error:
        raise _refusal(kind, error) from None


def to_json(kind: Any, value: object) -> str:
    """Serialize `value`, of type `kind`, to one line of JSON text."""
    return json.dumps(plain(kind, value))  # unlike pydantic's own, this keeps NaN a number


def to_bytes(kind: Any, value: object) -> bytes:
    """Like `to_json` but three times faster, for values without NaN or infinity, which would become null."""
    return _codec(kind).adapter.dump_json(value)


def from_json(kind: type[T] | Any, text: str | bytes) -> T:
    """Parse JSON text as a value of type `kind`; the inverse of `to_json`.

    Raises:
        ProtocolViolation: the text is not JSON or does not fit the type.
    """
    try:
        return _codec(kind).validator.validate_json(text)  # type: ignore[no-any-return]
    except ValidationError as error:
        raise _refusal(kind, error) from None


def _refusal(kind: Any, error: ValidationError) -> ProtocolViolation:
    """The error without its input, which would otherwise be kept alive with it."""
    reason = str(error)
    short = reason if len(reason) <= _MAX_REASON_CHARACTERS else f"{reason[:_MAX_REASON_CHARACTERS]}…"
    return ProtocolViolation(f"not a valid {getattr(kind, '__name__', kind)}: {short}")
