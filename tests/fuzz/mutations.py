"""What a hostile or broken peer might send instead of a valid example: examples and a `Random` in, bytes out."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

#: What takes the place of a number in text, and of a value in JSON.
HUGE = (-1, 2**31, -(2**31) - 1, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 10**400)
VALUES: tuple[Any, ...] = (
    *HUGE,
    None,
    True,
    0,
    0.5,
    -1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "../../etc/passwd",
    "\x00",
    "\ud800",
    "wave",
    "9" * 5_000,
    [],
    {},
    [[]],
    {"": {}},
)
_NUMBER = re.compile(rb"-?\d+(\.\d+)?")
_DEEP = 100_000

#: What a text field can hold.
TEXTS: tuple[str, ...] = (
    "",
    "x" * 65_536,
    "../../etc/passwd",
    "/",
    "a\x00b",
    "line\nbreak",
    "\u6f22" * 2_000,
    "{",
    "[]",
    "null",
    '{"kind": "sung"}',
    "[" * 10_000,
    '{"job_id": 1e400}',
    "127.0.0.1:99999",
    "hetpipe:job:0",
)

_RANDOM_SHARE = 0.03
_DEEP_SHARE = 0.02
_FIELDS_SHARE = 0.6
_OLD_ENTRY_SHARE = 0.8
_CLEARED_SHARE = 0.1

Mutation = Callable[[random.Random, bytes], bytes]


def mutated(source: random.Random, examples: Sequence[bytes], message: type[Message] | None = None) -> bytes:
    """One to three mutations of one of the examples, or random bytes; of a `message`, half of them by its fields."""
    if source.random() < _RANDOM_SHARE:
        return source.randbytes(source.randrange(64))
    data = source.choice(examples)
    for _ in range(source.randint(1, 3)):
        if message is not None and source.random() < _FIELDS_SHARE:
            data = _fields(source, data, message)
        else:
            data = source.choice(_MUTATIONS)(source, data)
    return data


def _fields(source: random.Random, data: bytes, kind: type[Message]) -> bytes:
    """The message with another value in some field, which is legal for the field's type."""
    changed = kind()
    try:
        changed.ParseFromString(data)
    except DecodeError:
        return data
    inside: Any = changed
    while True:
        field: FieldDescriptor = source.choice(inside.DESCRIPTOR.fields)
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            break
        inside = getattr(inside, field.name)
        if field.is_repeated:
            inside = source.choice(inside) if inside and source.random() < _OLD_ENTRY_SHARE else inside.add()
        if not inside.DESCRIPTOR.fields:
            return changed.SerializeToString()
    _set(source, inside, field)
    return changed.SerializeToString()


def _set(source: random.Random, message: Message, field: FieldDescriptor) -> None:
    if field.message_type is not None or source.random() < _CLEARED_SHARE:
        message.ClearField(field.name)
        return
    values = legal_values(field)
    old = getattr(message, field.name)
    if field.type == field.TYPE_STRING and not field.is_repeated:
        values = (*values, _json(source, old.encode()).decode(errors="replace"))
    value = source.choice(values)
    if field.is_repeated:
        old.append(value)
    else:
        setattr(message, field.name, value)


#: Odd values that a field of each type can hold on the wire; of an integer, from its smallest to its largest.
_LEGAL: dict[int, tuple[Any, ...]] = {
    FieldDescriptor.TYPE_STRING: TEXTS,
    FieldDescriptor.TYPE_BYTES: (b"", b"\xff", bytes(65_536)),
    FieldDescriptor.TYPE_DOUBLE: (0.0, -1.0, 1e308, float("nan"), float("inf"), float("-inf")),
    FieldDescriptor.TYPE_BOOL: (False, True),
    FieldDescriptor.TYPE_ENUM: (0, -1, 99, 2**31 - 1),
    FieldDescriptor.TYPE_INT32: (-(2**31), -1, 0, 1, 2**31 - 1),
    FieldDescriptor.TYPE_SINT32: (-(2**31), -1, 0, 1, 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), -1, 0, 1, 2**31, 2**53, 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 1, 2**31, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 1, 2**31, 2**63, 2**64 - 1),
}


def legal_values(field: FieldDescriptor) -> tuple[Any, ...]:
    """Odd values of the field. A type that no message uses so far has to be added to the table."""
    return _LEGAL[field.type]


def _flip(source: random.Random, data: bytes) -> bytes:
    if not data:
        return data
    place, changed = source.randrange(len(data)), bytearray(data)
    changed[place] ^= 1 << source.randrange(8)
    return bytes(changed)


def _set_byte(source: random.Random, data: bytes) -> bytes:
    if not data:
        return data
    place = source.randrange(len(data))
    return data[:place] + bytes([source.choice((0, 1, 0x7F, 0x80, 0xFF, 0x22, 0x7B, 0x2D))]) + data[place + 1 :]


def _truncate(source: random.Random, data: bytes) -> bytes:
    return data[: source.randrange(len(data) + 1)]


def _piece(source: random.Random, data: bytes) -> bytes:
    start = source.randrange(len(data) + 1)
    return data[start : start + source.choice((1, 2, 8, 64))]


def _insert(source: random.Random, data: bytes, piece: bytes) -> bytes:
    place = source.randrange(len(data) + 1)
    return data[:place] + piece + data[place:]


def _duplicate(source: random.Random, data: bytes) -> bytes:
    return _insert(source, data, _piece(source, data))


def _splice(source: random.Random, data: bytes) -> bytes:
    first, second = source.randrange(len(data) + 1), source.randrange(len(data) + 1)
    return data[:first] + data[second:]


def _noise(source: random.Random, data: bytes) -> bytes:
    return _insert(source, data, source.randbytes(source.choice((1, 4, 10))))


def _varint(source: random.Random, data: bytes) -> bytes:
    """Ones to the end of a 64-bit number, as protobuf and fixed-size headers have them."""
    return _insert(source, data, source.choice((b"\xff" * 9 + b"\x01", b"\xff" * 8, b"\x00" * 8, b"\x80" * 12)))


def _number(source: random.Random, data: bytes) -> bytes:
    """Another number where the text has one."""
    found = list(_NUMBER.finditer(data))
    if not found:
        return _set_byte(source, data)
    match = source.choice(found)
    return data[: match.start()] + str(source.choice(HUGE)).encode() + data[match.end() :]


def _deep(source: random.Random, data: bytes) -> bytes:
    """Nesting without end, rarely: it is long."""
    if source.random() > _DEEP_SHARE:
        return _flip(source, data)
    return _insert(source, data, source.choice((b"[", b'{"a":', b"- ", b"[{")) * _DEEP)


def _json(source: random.Random, data: bytes) -> bytes:
    """Another value somewhere in a JSON document, or one less, or one twice."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return _number(source, data)
    return json.dumps(_with_change(source, document)).encode()


def _with_change(source: random.Random, document: Any) -> Any:
    places = list(_places(document, ()))
    path = source.choice(places)
    if not path:
        return source.choice(VALUES)
    *above, last = path
    parent = document
    for part in above:
        parent = parent[part]
    match source.randrange(4):
        case 0:
            del parent[last]
        case 1 if isinstance(parent, list):
            parent.insert(last, parent[last])
        case 2 if isinstance(parent, dict):
            parent[source.choice(("", "x", "self", "kind", "0", "-1", str(2**64)))] = parent.pop(last)
        case _:
            parent[last] = source.choice(VALUES)
    return document


def _places(value: Any, path: tuple[Any, ...]) -> Any:
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from _places(part, (*path, key))


_MUTATIONS: tuple[Mutation, ...] = (
    _flip,
    _set_byte,
    _truncate,
    _duplicate,
    _splice,
    _noise,
    _varint,
    _number,
    _deep,
    _json,
    _json,
    _json,
    _json,
)
