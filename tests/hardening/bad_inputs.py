"""Malformed inputs for every call of every service, made from the descriptors, so that no field can be forgotten.

Each call has a valid request; a case changes one field of it to an odd value, cuts or garbles its bytes, or breaks the
stream it travels in. What is not an error by the protocol is named in `HARMLESS`, with the reason.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from hetpipe.checksum import checksum
from hetpipe.wire.channel import MAX_MESSAGE_BYTES
from tests.fuzz.mutations import legal_values

TWO_GIB = 1 << 31

#: Cases that are no mistakes, by call: a pattern of what is odd, and why it is taken.
HARMLESS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "Release": (("job_id = .*", "a job that is not there has been forgotten"),),
    "Join": (
        ("requester.vw = 1", "a member"),
        (".*_address = ''", "not every stage serves one"),
        ("only_meets = .*", "not ready yet"),
    ),
    "ReportInitialized": (("requester.vw = 1", "a member"),),
    "Evict": (("vw = 1", "a member"),),
    "Drain": (("vw = 1", "a member"),),
    "Admit": (
        ("vw = .*", "another one"),
        ("incarnation = .*", "a later life"),
        ("minibatches_per_wave = 1", "those of the job"),
    ),
    "ReportStaged": (
        ("without blocks", "an empty wave"),
        ("wave = 1", "the next wave"),
        (r"requester\.(stage|vw) = .*", "another stage that is there"),
    ),
    "HoldClock": (("switch = 1", "the next switch point"), ("requester.vw = 1", "a member")),
    "ReportPrepared": (("requester.vw = 1", "a member"), (".*", "no move is asked for")),
    "GetProgress": (("requester.vw = 1", "a member"),),
    "ShareMemory": (("requester.vw = 1", "a member"),),
    "ReportCheckpoint": (("files.num_bytes = .*", "nobody knows yet how large the file is"),),
    "FollowLog": (
        ("without requester", "a shard follows"),
        ("requester.vw = 1", "a member"),
        ("gathered = True", "how stages ask"),
        ("start = 1", "a record that is there"),
        ("start = -1", "from the newest segment on"),
    ),
    "Acknowledge": (
        ("num_records = 0", "none yet"),
        ("durable = .*", "as many as it has carried out"),
        ("applied = True", "its disk fails"),
    ),
    "Push": (
        ("wave = [01]", "staged already, or a wave ahead"),
        (r"requester\.(stage|vw) = .*", "another stage that is there"),
    ),
    "Pull": (("without slices", "nothing is nothing"), ("requester.vw = 1", "a member")),
    "PushBuffers": (
        ("buffers.parameter = .*", "a shard does not know the buffers' names, and uses them for nothing else"),
        ("requester.vw = 1", "a member"),
        ("NaN", "a model's buffers may be what they like; updates may not"),
        ("without buffers", "nothing is nothing"),
    ),
    "PullBuffers": (("without buffers", "nothing is nothing"), ("requester.vw = 1", "a member")),
    "Register": (
        (r"member\.(pid|shard_index|devices\.memory_bytes) = .*", "what the process says of itself"),
        (r"member\.highest_(term|fence) = .*", "what it has seen"),
        ("member.devices.type = .*", "whatever the driver calls it"),
        ("member.(without devices|address = '')", "not every member has them"),
        (r"member\.(id|host|address|stages\.job_id) = '[a-z0-9.:\[\]]+'", "a name"),
    ),
    "Heartbeat": (
        ("jobs = .*", "nobody has heard of that job"),
        ("without clocks|without lost|without conditions", "none to tell"),
    ),
    "Leave": ((".*", "whoever is no member has left"),),
    "WatchCommands": (("after = .*", "a command that is there"),),
    "Report": (
        (
            r"reports\.(stage_report|child_exit|inspection_result|inspection_step|inspection_phase).*",
            "of a process that the job does not know, or no longer",
        ),
        (r"reports\.link_(result|awaited)\.job_id = .*", "of a job that nobody knows"),
        ("without reports", "nothing is nothing"),
        ("batch = .*", "of a batch that was taken, or a later one"),
    ),
    "SubmitJob": (
        (r"submission\.(restore|run_dir|import_path) = .*", "folders are named by who may hand in jobs"),
        (r"submission\.model\..*", "what an inspection found, if it is within its bounds"),
        ("submission.has_begun = True", "it goes on from its newest checkpoint"),
    ),
    "MeasureLinks": (("fresh = True", "known links, too"),),
    "StopJob": (("job_id = ''", "the newest job"),),
    "DrainWorker": (("job_id = ''", "the newest job"), ("vw = 0", "another one")),
    "AddWorker": (("job_id = ''", "the newest job"), ("vw = 0", "another one")),
    "MoveWorker": (("job_id = ''", "the newest job"), ("vw = 0", "another one")),
    "ListMembers": (("after = .*", "the members behind any position"),),
    "GetStatus": (("job_id = ''", "the newest job"),),
    "WatchJob": (("job_id = ''", "the newest job"), ("after = .*", "an event that is there")),
    "GetClocks": (("job_id = ''", "the newest job"),),
    "WatchClocks": (("job_id = ''", "the newest job"),),
}


#: Calls that only a coordinator makes, with a document of its own in which most values are as good as others. What a
#: shard checks of it is for `tests/server/shard/test_config_check.py`, and its decoder for the fuzzer.
DOCUMENTS = frozenset({"Configure", "KeepRun"})


@dataclass(frozen=True, slots=True)
class BadInput:
    """The messages of one call."""

    call: str
    """Full name: `/SERVICE/CALL`."""
    what: str
    """What is wrong, for the test's name."""
    messages: tuple[bytes, ...]
    streams_requests: bool = False

    @property
    def is_harmless(self) -> bool:
        """Whether it may also be taken."""
        known = HARMLESS.get(self.call.rpartition("/")[2], ())
        return any(re.fullmatch(pattern, self.what) for pattern, _ in known)

    def __str__(self) -> str:
        return f"{self.call.rpartition('/')[2]}: {self.what}"


def service_cases(service: ServiceDescriptor, valid: Mapping[str, Message]) -> Iterator[BadInput]:
    """Every case of the calls of a service with messages; `valid` has a good request of each."""
    for method in service.methods:
        call = f"/{service.full_name}/{method.name}"
        cases = spoilt_bytes if method.name in DOCUMENTS else message_cases
        for what, raw in cases(valid[method.name]):
            yield BadInput(call, what, (raw,))


def message_cases(message: Message) -> Iterator[tuple[str, bytes]]:
    """`message` with each of its fields changed, and its bytes spoilt."""
    for path, changed in _changed(message):
        if changed != message:
            yield path, changed.SerializeToString()
    yield from spoilt_bytes(message)


def spoilt_bytes(message: Message) -> Iterator[tuple[str, bytes]]:
    """What is no message, or not all of one."""
    raw = message.SerializeToString()
    yield "garbage", b"\xff" * 16
    yield "a field of 2 GiB - 1", b"\x0a\xff\xff\xff\xff\x07" + raw
    yield "an endless varint", b"\x08" + b"\xff" * 32
    yield "an unfinished group", b"\x0b" * 200
    yield "one byte over the limit", b"\x0a" + _varint(MAX_MESSAGE_BYTES - 4) + bytes(MAX_MESSAGE_BYTES - 4)
    for length in sorted({1, len(raw) // 2, len(raw) - 1} & set(range(1, len(raw)))):
        yield f"cut after {length} bytes", raw[:length]


def _changed(message: Message) -> Iterator[tuple[str, Message]]:
    """The last fields first, and what is left out last: what an earlier case might leave behind is the least then."""
    fields: Any = message.DESCRIPTOR.fields
    field: FieldDescriptor
    for field in reversed(fields):
        if field.message_type is None:
            for value in legal_values(field):
                if field.is_repeated or value != getattr(message, field.name):
                    yield f"{field.name} = {_shown(value)}", _with(message, field, value)
            continue
        if not field.message_type.GetOptions().map_entry:
            yield from _changed_below(message, field)
        cleared = _copy(message)
        cleared.ClearField(field.name)
        yield f"without {field.name}", cleared


def _changed_below(message: Message, field: FieldDescriptor) -> Iterator[tuple[str, Message]]:
    """With a change in the part that `field` is; of a list, in its first entry."""
    part: Any = getattr(message, field.name)
    if field.is_repeated:
        assert field.message_type is not None
        part = part[0] if part else GetMessageClass(field.message_type)()
    for path, below in _changed(part):
        outer = _copy(message)
        inner: Any = getattr(outer, field.name)
        if field.is_repeated:
            del inner[:1]
            inner.insert(0, below)
        else:
            inner.CopyFrom(below)
        yield f"{field.name}.{path}", outer


def _with(message: Message, field: FieldDescriptor, value: object) -> Message:
    changed = _copy(message)
    if field.is_repeated:
        getattr(changed, field.name)[:] = [value] * 3
    else:
        setattr(changed, field.name, value)
    return changed


def _copy(message: Message) -> Message:
    copied = type(message)()
    copied.CopyFrom(message)
    return copied


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 24 else f"{text[:20]}… ({len(text)})"


def _varint(number: int) -> bytes:
    raw = b""
    while number > 0x7F:
        raw += bytes([number & 0x7F | 0x80])
        number >>= 7
    return raw + bytes([number])


# -- streams of tensors ------------------------------------------------------------------------------------------------


def chunk(offset: int, payload: bytes) -> bytes:
    """As `server.shard.chunks` has it."""
    return b"hpC4" + struct.pack("<IQ", 0, offset) + checksum(payload, place=offset) + payload


def push_cases(call: str, header: Message, num_bytes: int) -> Iterator[BadInput]:
    """Streams that are not what a good header announces, and headers whose fields are changed."""
    good = header.SerializeToString()
    payload = bytes(num_bytes)
    nan = struct.pack("<f", float("nan")) * (num_bytes // 4)
    streams: Mapping[str, Sequence[bytes]] = {
        "no header": (),
        "an empty header": (b"",),
        "a chunk in place of the header": (chunk(0, payload),),
        "no chunk": (good,),
        "an empty chunk": (good, b""),
        "a chunk without payload": (good, chunk(0, b"")),
        "a chunk shorter than its offset": (good, b"\0\0\0"),
        "a chunk too short": (good, chunk(0, payload[:-64])),
        "a chunk that ends inside an alignment unit": (good, chunk(0, payload[:-1])),
        "a chunk too long": (good, chunk(0, payload + b"\0")),
        "a chunk far too long": (good, chunk(0, bytes(1 << 20))),
        "a damaged chunk": (good, chunk(0, payload)[:-1] + b"\x01"),
        "a chunk of the version before": (good, struct.pack("<QI", 0, zlib.crc32(bytes(8) + payload)) + payload),
        "a chunk at 64": (good, chunk(64, payload)),
        "a chunk at 2 GiB": (good, chunk(TWO_GIB, payload)),
        "a chunk at 2^64 - 1": (good, chunk(2**64 - 1, payload)),
        "chunks out of order": (good, chunk(64, payload[64:]), chunk(0, payload[:64])),
        "a chunk twice": (good, chunk(0, payload[:64]), chunk(0, payload[:64])),
        "one chunk too many": (good, chunk(0, payload), chunk(num_bytes, payload)),
        "two headers": (good, good, chunk(0, payload)),
        "a chunk over the limit": (good, chunk(0, bytes(MAX_MESSAGE_BYTES))),
        "NaN": (good, chunk(0, nan)),
    }
    for what, messages in streams.items():
        yield BadInput(call, what, tuple(messages), streams_requests=True)
    for what, raw in message_cases(header):
        yield BadInput(call, what, (raw, chunk(0, bytes(num_bytes))), streams_requests=True)


def pull_cases(call: str, header: Message) -> Iterator[BadInput]:
    """A request for tensors whose fields are changed."""
    for what, raw in message_cases(header):
        yield BadInput(call, what, (raw,))
