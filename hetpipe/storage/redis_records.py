"""The codec between what Redis keeps and values: whatever has become of it there, a record is read or refused. Pure.

It is apart from `redis_store` because it decodes what others may have written: it is under the import contract of pure
code, and fuzzed without a Redis.
"""

from __future__ import annotations

from collections.abc import Mapping

from hetpipe.errors import ProtocolViolation
from hetpipe.storage.store import JobRecord, MemberRecord
from hetpipe.values.bounds import MAX_COUNT
from hetpipe.values.events import JobEvent, NumberedEvent
from hetpipe.values.members import MemberInfo, Registration
from hetpipe.values.wire import from_json


def member_of(fields: Mapping[str, str]) -> MemberRecord:
    """The member in the fields of its hash.

    Raises:
        ProtocolViolation: they are not what this program writes.
    """
    info: MemberInfo = from_json(MemberInfo, _field(fields, "info"))
    return MemberRecord(info, Registration(_field(fields, "registration")), _number(_field(fields, "order")))


def job_of(fields: Mapping[str, str]) -> JobRecord:
    """The job in the fields of its hash.

    Raises:
        ProtocolViolation: they are not what this program writes.
    """
    return from_json(JobRecord, _field(fields, "record"))


def event_of(entry: str, fields: Mapping[str, str]) -> NumberedEvent:
    """The event in the fields of a stream's entry, whose id begins with the event's number.

    Raises:
        ProtocolViolation: they are not what this program writes.
    """
    return NumberedEvent(_number(entry.partition("-")[0]), from_json(JobEvent, _field(fields, "event")))


def sequence_of(entry: str) -> int:
    """The number of an event by the id of its stream's entry, which Redis holds to 64 bits."""
    return int(entry.partition("-")[0])


def _field(fields: Mapping[str, str], name: str) -> str:
    if name not in fields:
        raise ProtocolViolation(f"a record in Redis has no field {name}; did another program write it?")
    return fields[name]


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > len(str(MAX_COUNT)):
        raise ProtocolViolation(f"a record in Redis has {text!r:.40} for a number; did another program write it?")
    return int(text)
