"""The codec between frozen dataclasses and protobuf messages; generated types are used nowhere else.

A dataclass is encoded as the message of the same name, field by field under the same names. The encoding of a field
follows from its type and must match the proto file; `check` compares the two, in a test over the whole table of calls:

* numbers, text and bytes as scalars; `None` as an absent field (`optional`);
* an enum as its string value, or as the value of a proto enum whose name ends with the member's;
* a tuple as a repeated field, a mapping as a map; nested ones, and ones with `None` entries, wrap each entry in a
  message with a single field;
* a union of dataclasses as a `oneof` of the field's name, with a field per class; within a tuple as a message that
  holds only the `oneof`. A discriminator field (`kind: Literal["ready"]`) is not encoded;
* a free-form job or result as a `Document`: JSON text with a version and a digest.

Decoded values are validated against the types of the fields, with their bounds (`values.wire`) where these are stricter
than protobuf, and by `wire.checks` for some classes. A message that lacks a part or has an unknown enum value is
rejected. Codecs are compiled on first use and cached.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from hetpipe.errors import ProtocolViolation
from hetpipe.proto.v2 import coordinator_pb2, link_pb2, parameter_server_pb2, values_pb2
from hetpipe.values.wire import revive
from hetpipe.wire.checks import CHECKS

T = TypeVar("T")

#: Package of the messages; a peer of another version of the format does not implement the calls of this one.
PACKAGE: Final = "hetpipe.proto.v2"

#: Imported to register their messages in the descriptor pool.
_FILES = (coordinator_pb2, link_pb2, parameter_server_pb2, values_pb2)

#: Version of the content of a `Document`: a job as written by `job.file.Job`, or a result.
DOCUMENT_VERSION = 1
_DOCUMENT = "Document"

#: Encodes one value for protobuf's Python API; decodes one into the input of `values.wire.revive`.
_Write = Callable[[Any], Any]
_Read = Callable[[Any], Any]

_SCALARS: Mapping[type, frozenset[int]] = {
    bool: frozenset({FieldDescriptor.TYPE_BOOL}),
    int: frozenset(
        {
            FieldDescriptor.TYPE_INT32,
            FieldDescriptor.TYPE_INT64,
            FieldDescriptor.TYPE_UINT32,
            FieldDescriptor.TYPE_UINT64,
            FieldDescriptor.TYPE_SINT32,
            FieldDescriptor.TYPE_SINT64,
        }
    ),
    float: frozenset({FieldDescriptor.TYPE_DOUBLE}),
    str: frozenset({FieldDescriptor.TYPE_STRING}),
    bytes: frozenset({FieldDescriptor.TYPE_BYTES}),
}


def to_bytes(value: object) -> bytes:
    """Serialize a dataclass; None becomes the empty message."""
    return to_message(value).SerializeToString()


def from_bytes(kind: type[T], data: bytes) -> T:
    """Parse bytes from a peer; the inverse of `to_bytes`.

    Raises:
        ProtocolViolation: they are not such a message, or not a valid one.
    """
    shape = _shape(kind)
    try:
        message = shape.message.FromString(data)
    except DecodeError:
        raise ProtocolViolation(f"{len(data)} bytes that are not a valid {shape.name}") from None
    return cast("T", shape.value(message))


def to_message(value: object) -> Message:
    """Convert a dataclass to its message."""
    return _shape(type(value)).write(value)


def from_message(kind: type[T], message: Message) -> T:
    """Convert a message to its dataclass; the inverse of `to_message`.

    Raises:
        ProtocolViolation: its content is invalid.
    """
    return cast("T", _shape(kind).value(message))


def message_type(kind: type) -> type[Message]:
    """The message class that encodes a dataclass."""
    return _shape(kind).message


def check(kind: type) -> None:
    """Compare a dataclass, and everything it holds, with the proto files.

    Raises:
        TypeError: they do not match; the message names the field.
    """
    _shape(kind)


# -- one dataclass ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Field:
    """One field of a dataclass."""

    name: str
    to_proto: _Write
    """The name of the message's field and its encoded value, or None to omit it."""
    plain: _Read
    """Reads the field from the whole message."""
    is_same: bool = False
    """Whether the encoded and decoded values are equal."""


class _Shape:
    """The codec of one dataclass."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.name = "Nothing" if kind is type(None) else kind.__name__
        descriptor = _descriptor(self.name)
        self.message: type[Message] = GetMessageClass(descriptor)
        #: Fields that need conversion, the names of the others, and getters for values and messages.
        self._fields: tuple[_Field, ...] = ()
        self._same: tuple[str, ...] = ()
        self._values = _getter(())
        self._descriptor = descriptor
        #: Validates a decoded value, and may truncate it; None where the types are sufficient.
        self.check: Callable[[Any], Any] | None = CHECKS.get(kind)
        #: Whether the types are no stricter than protobuf, so that decoded values need no validation.
        self.is_bare = False

    def compile(self) -> None:
        """Build the fields; separate from the constructor because a class may contain itself."""
        if self.kind is type(None):
            return
        if not is_dataclass(self.kind):
            raise TypeError(f"{self.name} is no dataclass")
        hints = get_type_hints(self.kind, include_extras=True)
        compiled = []
        left = _parts(self._descriptor)
        for field in fields(self.kind):
            hint = _bare(hints[field.name])
            if _is_tag(hint):
                continue
            if field.name not in left:
                raise TypeError(f"message {self.name} has no field {field.name}")
            left.discard(field.name)
            compiled.append(_field(self._descriptor, field.name, hint))
        if left:
            raise TypeError(f"dataclass {self.name} has no field {', '.join(sorted(left))}")
        self._fields = tuple(field for field in compiled if not field.is_same)
        self._same = tuple(field.name for field in compiled if field.is_same)
        self._values = _getter(self._same)
        self.is_bare = all(_is_bare(hints[field.name]) for field in fields(self.kind))

    def write(self, value: Any) -> Message:
        """Encode a value."""
        given = dict(zip(self._same, self._values(value), strict=True))
        for field in self._fields:
            put = field.to_proto(getattr(value, field.name))
            if put is not None:
                given[put[0]] = put[1]
        return self.message(**given)

    def plain(self, message: Any) -> Any:
        """Decode a message into the input of `revive`; into the value itself where it needs a separate check."""
        if self.is_bare or self.check is not None:
            return self.value(message)
        return self._plain(message)

    def value(self, message: Any) -> Any:
        """Decode a message."""
        if self.kind is type(None):
            return None
        given = self._plain(message)
        found: Any = self.kind(**given) if self.is_bare else revive(self.kind, given)
        return found if self.check is None else self.check(found)

    def _plain(self, message: Any) -> dict[str, Any]:
        given = dict(zip(self._same, self._values(message), strict=True))
        for field in self._fields:
            given[field.name] = field.plain(message)
        return given


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """A getter of these attributes."""
    if not names:
        return lambda _: ()
    read = attrgetter(*names)
    return read if len(names) > 1 else lambda value: (read(value),)


#: Compiled codecs; published only once complete.
_shapes: dict[type, _Shape] = {}

#: Codecs being compiled by the thread that holds the lock: a class may contain itself.
_unfinished: dict[type, _Shape] = {}
_compiling = threading.RLock()


def _shape(kind: type) -> _Shape:
    """The codec of a class, compiled on first use together with those of all classes it contains."""
    found = _shapes.get(kind)
    if found is not None:
        return found
    with _compiling:
        found = _shapes.get(kind) or _unfinished.get(kind)
        return _compile(kind) if found is None else found


def _compile(kind: type) -> _Shape:
    is_outermost = not _unfinished
    shape = _unfinished[kind] = _Shape(kind)
    try:
        shape.compile()
        if is_outermost:
            _shapes.update(_unfinished)
    finally:
        if is_outermost:
            _unfinished.clear()
    return shape


# -- one field -------------------------------------------------------------------------------------------------------


def _field(message: Descriptor, name: str, hint: Any) -> _Field:
    """The codec of a message's field."""
    union = _classes(hint)
    if union is not None and name in message.oneofs_by_name:
        return _oneof_field(message, name, union)
    descriptor = message.fields_by_name.get(name)
    if descriptor is None:
        raise TypeError(f"message {message.name} has no field {name}")
    where = f"{message.name}.{name}"
    inner = _without_none(hint)
    if inner is not None:
        return _optional_field(descriptor, where, inner)
    if get_origin(hint) is tuple:
        return _repeated_field(descriptor, where, hint)
    if _is_map(hint, descriptor):
        return _map_field(descriptor, where, hint)
    return _required_field(descriptor, where, hint)


def _required_field(descriptor: FieldDescriptor, where: str, hint: Any) -> _Field:
    name = descriptor.name
    if descriptor.is_repeated:
        raise TypeError(f"{where} is repeated, but the dataclass has a single {hint}")
    write, read = _single(descriptor, where, hint)
    if descriptor.message_type is None:
        if descriptor.has_presence:
            raise TypeError(f"{where} may be absent, but the dataclass does not allow None")
        is_same = write is _as_it_is and read is _as_it_is
        return _Field(
            name, lambda value: (name, write(value)), lambda found: read(getattr(found, name)), is_same=is_same
        )
    whole = where.partition(".")[0]

    def required(found: Any) -> Any:
        if not found.HasField(name):
            raise ProtocolViolation(f"a {whole} without its required field {name}")
        return read(getattr(found, name))

    return _Field(name, lambda value: (name, write(value)), required)


def _optional_field(descriptor: FieldDescriptor, where: str, hint: Any) -> _Field:
    name = descriptor.name
    if not descriptor.has_presence:
        raise TypeError(f"{where} cannot be absent: it needs `optional`")
    write, read = _single(descriptor, where, hint)
    return _Field(
        name,
        lambda value: None if value is None else (name, write(value)),
        lambda found: read(getattr(found, name)) if found.HasField(name) else None,
    )


def _repeated_field(descriptor: FieldDescriptor, where: str, hint: Any) -> _Field:
    name = descriptor.name
    if not descriptor.is_repeated:
        raise TypeError(f"{where} is not repeated")
    (entry,) = {_bare(argument) for argument in get_args(hint) if argument is not Ellipsis}
    write, read = _entry(descriptor, where, entry)
    return _Field(
        name,
        lambda value: (name, [write(one) for one in value]),
        lambda found: tuple([read(one) for one in getattr(found, name)]),
    )


def _map_field(descriptor: FieldDescriptor, where: str, hint: Any) -> _Field:
    name = descriptor.name
    key_hint, value_hint = (_bare(argument) for argument in get_args(hint))
    entry = _message(descriptor, where).fields_by_name
    _single(entry["key"], f"{where} (key)", key_hint)
    write, read = _entry(entry["value"], where, value_hint)

    def plain(found: Any) -> dict[Any, Any]:
        given = getattr(found, name)
        return {key: read(given[key]) for key in sorted(given)}

    return _Field(name, lambda value: (name, {key: write(one) for key, one in value.items()}), plain)


def _oneof_field(message: Descriptor, name: str, classes: tuple[type, ...]) -> _Field:
    write, read = _oneof(message, name, classes)
    return _Field(name, write, read)


def _oneof(message: Descriptor, name: str, classes: tuple[type, ...]) -> tuple[_Write, _Read]:
    """A union as a `oneof`: encodes to the name of a field and its message, decodes from the whole message."""
    members = {_message(field, name).name: field.name for field in message.oneofs_by_name[name].fields}
    if members.keys() != {one.__name__ for one in classes}:
        raise TypeError(f"{message.name}.{name} has {sorted(members)}, and not {sorted(c.__name__ for c in classes)}")
    by_class = {one: (members[one.__name__], _shape(one)) for one in classes}
    by_field = dict(by_class.values())

    def write(value: Any) -> tuple[str, Message]:
        field, shape = by_class[type(value)]
        return field, shape.write(value)

    def read(found: Any) -> Any:
        field = found.WhichOneof(name)
        if field is None:
            raise ProtocolViolation(f"unknown {name} in a {message.name}: this version does not support it")
        return by_field[field].value(getattr(found, field))

    return write, read


def _entry(descriptor: FieldDescriptor, where: str, hint: Any) -> tuple[_Write, _Read]:
    """The codec of an entry of a list or a map; entries that protobuf cannot nest are wrapped in a message."""
    union = _classes(hint)
    if union is not None:
        inner = _message(descriptor, where)
        (oneof,) = inner.oneofs
        around = GetMessageClass(inner)
        write_oneof, read_oneof = _oneof(inner, oneof.name, union)

        def write(value: Any) -> Message:
            field, put = write_oneof(value)
            return around(**{field: put})

        return write, read_oneof
    if _without_none(hint) is not None or get_origin(hint) is tuple:
        inner = _message(descriptor, where)
        if len(inner.fields) != 1:
            raise TypeError(f"{where} needs a wrapper message with one field for each entry")
        around = GetMessageClass(inner)
        wrapped = _field(inner, inner.fields[0].name, hint)

        def wrap(value: Any) -> Message:
            put = wrapped.to_proto(value)
            return around() if put is None else around(**{put[0]: put[1]})

        return wrap, wrapped.plain
    return _single(descriptor, where, hint)


def _single(descriptor: FieldDescriptor, where: str, hint: Any) -> tuple[_Write, _Read]:
    """The codec of a singular value."""
    hint = _bare(hint)
    if descriptor.message_type is not None and descriptor.message_type.name == _DOCUMENT:
        return _document(where, hint)
    if isinstance(hint, type) and is_dataclass(hint):
        if descriptor.message_type is None or descriptor.message_type.name != hint.__name__:
            raise TypeError(f"{where} is not a {hint.__name__}")
        shape = _shape(hint)
        return shape.write, shape.plain
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum(descriptor, where, hint)
    scalar = str if get_origin(hint) is Literal else hint
    if scalar not in _SCALARS or descriptor.type not in _SCALARS[scalar]:
        raise TypeError(f"{where} has another type than {hint} in the dataclass")
    return _as_it_is, _as_it_is


def _as_it_is(value: Any) -> Any:
    return value


def _enum(descriptor: FieldDescriptor, where: str, kind: type[Enum]) -> tuple[_Write, _Read]:
    what = _words(kind.__name__)
    if descriptor.enum_type is None:
        if descriptor.type != FieldDescriptor.TYPE_STRING:
            raise TypeError(f"{where} is neither an enum nor text")
        by_word = {member.value: member for member in kind}

        def from_word(word: str) -> Enum:
            member = by_word.get(word)
            if member is None:
                raise ProtocolViolation(f"unknown {what} {word!r:.40}: this version does not support it")
            return member

        return _as_it_is, from_word
    numbers = _enum_numbers(descriptor.enum_type, kind, where)
    members = {number: member for member, number in numbers.items()}

    def from_number(number: int) -> Enum:
        member = members.get(number)
        if member is None:
            raise ProtocolViolation(f"unknown {what} {number}: this version does not support it")
        return member

    return numbers.__getitem__, from_number


def _enum_numbers(descriptor: EnumDescriptor, kind: type[Enum], where: str) -> dict[Enum, int]:
    prefix = _words(kind.__name__).replace(" ", "_").upper()
    known = {value.name: value.number for value in descriptor.values if value.number}
    wanted = {f"{prefix}_{member.name}": member for member in kind}
    if known.keys() != wanted.keys():
        raise TypeError(f"{where}: {descriptor.name} has {sorted(known)}, and not {sorted(wanted)}")
    return {member: known[name] for name, member in wanted.items()}


def _document(where: str, hint: Any) -> tuple[_Write, _Read]:
    """Free-form JSON: a mapping, or text that is already JSON."""
    document = GetMessageClass(_descriptor(_DOCUMENT))
    is_text = hint is str
    if not is_text and get_origin(hint) is not dict:
        raise TypeError(f"{where} is a {_DOCUMENT}, but neither a mapping nor text in the dataclass")

    def write(value: Any) -> Message:
        text = value if is_text else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return document(version=DOCUMENT_VERSION, sha256=_digest(text), json=text)

    def read(found: Any) -> Any:
        if found.version != DOCUMENT_VERSION:
            raise ProtocolViolation(
                f"{where} has version {found.version}; this process supports version {DOCUMENT_VERSION}"
            )
        if found.sha256 != _digest(found.json):
            raise ProtocolViolation(f"{where} is corrupted: its digest does not match")
        return found.json if is_text else _parsed(found.json, where)

    return write, read


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ProtocolViolation(f"{where} is not valid JSON") from None


# -- types -----------------------------------------------------------------------------------------------------------


@cache
def _descriptor(name: str) -> Descriptor:
    """The message called `name`.

    Raises:
        TypeError: there is none.
    """
    try:
        return descriptor_pool.Default().FindMessageTypeByName(f"{PACKAGE}.{name}")
    except KeyError:
        raise TypeError(f"no proto file defines a message {name}") from None


def _message(field: FieldDescriptor, where: str) -> Descriptor:
    """The message that a field holds.

    Raises:
        TypeError: it is not a message field.
    """
    if field.message_type is None:
        raise TypeError(f"{where} is not a message")
    return field.message_type


def _bare(hint: Any) -> Any:
    """A type without annotations that only mypy or pydantic use."""
    while True:
        if get_origin(hint) is Annotated:
            hint = get_args(hint)[0]
        elif hasattr(hint, "__supertype__"):
            hint = hint.__supertype__
        else:
            return hint


def _arguments_of_union(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in {Union, types.UnionType} else ()


def _without_none(hint: Any) -> Any:
    """The type inside an optional type; None for other types."""
    arguments = _arguments_of_union(hint)
    if type(None) not in arguments:
        return None
    left = tuple(argument for argument in arguments if argument is not type(None))
    return _bare(left[0]) if len(left) == 1 else None


def _classes(hint: Any) -> tuple[type, ...] | None:
    """The dataclasses of a union; None for other types."""
    arguments = _arguments_of_union(hint)
    return arguments if arguments and all(is_dataclass(argument) for argument in arguments) else None


def _is_bare(hint: Any) -> bool:
    """Whether every value that protobuf can decode for a type is valid: no bounds, no choice of words, no map."""
    if _is_tag(hint):
        return True
    origin = get_origin(hint)
    if origin in {Annotated, Literal, dict}:
        return False
    if hasattr(hint, "__supertype__"):
        return _is_bare(hint.__supertype__)
    if is_dataclass(hint):
        return _shape(cast("type", hint)).is_bare
    return all(_is_bare(argument) for argument in get_args(hint) if argument is not Ellipsis)


def _is_tag(hint: Any) -> bool:
    """Whether a field is a discriminator of its class."""
    return get_origin(hint) is Literal and len(get_args(hint)) == 1


def _is_map(hint: Any, descriptor: FieldDescriptor) -> bool:
    is_document = descriptor.message_type is not None and descriptor.message_type.name == _DOCUMENT
    return get_origin(hint) is dict and not is_document


def _parts(message: Descriptor) -> set[str]:
    """The names of a message's fields and unions."""
    unions = {oneof.name for oneof in message.oneofs if not _is_synthetic(oneof)}
    within = {field.name for oneof in message.oneofs if oneof.name in unions for field in oneof.fields}
    return unions | {field.name for field in message.fields} - within


def _is_synthetic(oneof: Any) -> bool:
    """Whether a `oneof` is protobuf's internal representation of an `optional` field."""
    return str(oneof.name).startswith("_")


def _words(name: str) -> str:
    """The name of a class as lower-case words.

    >>> _words("ConditionKind")
    'condition kind'
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()
