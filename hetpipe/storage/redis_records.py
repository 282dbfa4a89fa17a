"""Codec between Redis values and records; invalid stored data is rejected. Pure.

It is separate from `redis_store` because it decodes data that other programs may have written: it is under the import
contract of pure code, and is fuzzed without Redis.
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
    """Decode a member from the fields of its hash.

    Raises:
        ProtocolViolation: they were not written by this program.
    """
    info: MemberInfo = from_json(MemberInfo, _field(fields, "info"))
    return MemberRecord(info, Registration(_field(fields, "registration")), _number(_field(fields, "order")))


def job_of(fields: Mapping[str, str]) -> JobRecord:
    """Decode a job from the fields of its hash.

    Raises:
        ProtocolViolation: they were not written by this program.
    """
    return from_json(JobRecord, _field(fields, "record"))


def event_of(entry: str, fields: Mapping[str, str]) -> NumberedEvent:
    """Decode an event from the fields of a stream entry, whose id begins with the event's number.

    Raises:
        ProtocolViolation: they were not written by this program.
    """
    return NumberedEvent(_number(entry.partition("-")[0]), from_json(JobEvent, _field(fields, "event")))


def sequence_of(entry: str) -> int:
    """The number of an event from the id of its stream entry, which Redis limits to 64 bits."""
    return int(entry.partition("-")[0])


def _field(fields: Mapping[str, str], name: str) -> str:
    if name not in fields:
        raise ProtocolViolation(f"a record in Redis has no field {name}; did another program write it?")
    return fields[name]


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > len(str(MAX_COUNT)):
        raise ProtocolViolation(
            f"a record in Redis has {text!r:.40} in place of a number; did another program write it?"
        )
    return int(text)
