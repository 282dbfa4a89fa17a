"""Every request and reply of the table of calls travels as it is, and nothing else is taken for one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from google.protobuf import descriptor_pool
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.decide.sync.records import CommitRecord
from hetpipe.errors import HetpipeError, ProtocolViolation
from hetpipe.proto.v2 import coordinator_pb2 as pb
from hetpipe.proto.v2 import parameter_server_pb2 as shard_pb
from hetpipe.proto.v2 import values_pb2
from hetpipe.values.conditions import Condition
from hetpipe.values.events import JobEnded, JobStatus, NumberedEvent, StateChanged, WorkerStatus
from hetpipe.values.members import MemberInfo
from hetpipe.values.requests import LinkHello, LinkTransport, PushHeader
from hetpipe.wire import calls, codec
from hetpipe.wire.call import Streaming, Unary
from hetpipe.wire.calls import CALLS, TENSOR_SERVICE
from hetpipe.wire.codec import check, from_bytes, from_message, message_type, to_bytes, to_message
from tests.server.shard.builders import requester
from tests.wire.examples import CLOCKS, EXAMPLES, KEY
from tests.wire.strategies import values_of

#: Every class that travels.
KINDS = sorted(
    {kind for call in CALLS for kind in (call.request, getattr(call, "reply", type(None)))} - {type(None)}
    | {LinkHello, LinkTransport},
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_table_and_the_proto_files_say_the_same(kind: type) -> None:
    check(kind)


@pytest.mark.parametrize("service", sorted({call.service for call in CALLS} - {TENSOR_SERVICE}))
def test_the_calls_are_those_of_the_proto_files(service: str) -> None:
    methods = descriptor_pool.Default().FindServiceByName(service).methods
    rows = [call for call in CALLS if call.service == service and isinstance(call, Unary | Streaming)]
    assert sorted(
        (method.name, method.input_type.name, method.output_type.name, method.server_streaming) for method in methods
    ) == sorted(
        (
            call.name,
            message_type(call.request).DESCRIPTOR.name,
            message_type(call.reply).DESCRIPTOR.name,
            isinstance(call, Streaming),
        )
        for call in rows
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_goes_out_comes_back_the_same(kind: type) -> None:
    @settings(max_examples=10, database=None)
    @given(values_of(kind))
    def round_trip(value: object) -> None:
        assert from_bytes(kind, to_bytes(value)) == value

    round_trip()


@pytest.mark.parametrize(
    "example",
    [example for kind in KINDS for example in EXAMPLES.get(kind, ())],
    ids=lambda example: type(example).__name__,
)
def test_real_ones_come_back_the_same(example: object) -> None:
    assert from_bytes(type(example), to_bytes(example)) == example


INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.builds(CommitRecord, INT64, INT64, INT64, INT64, INT64))
def test_numbers_of_records_have_64_bits(record: CommitRecord) -> None:
    sent = calls.LogRecords((record,))
    assert from_bytes(calls.LogRecords, to_bytes(sent)) == sent


@pytest.mark.parametrize("wave", [None, 0])
def test_what_is_absent_is_not_what_is_zero(wave: Any) -> None:
    header = PushHeader(requester(), wave, ())
    assert from_bytes(PushHeader, to_bytes(header)) == header


def test_clocks_come_in_the_order_of_their_virtual_workers() -> None:
    assert list(from_bytes(type(CLOCKS), to_bytes(CLOCKS)).local) == [0, 1, 2]


def message_of(value: object, **changes: Any) -> Any:
    message: Any = to_message(value)
    for name, changed in changes.items():
        setattr(message, name, changed)
    return message


MEMBER = EXAMPLES[calls.RegisterRequest][0].member  # type: ignore[attr-defined]
FULL = Condition(kind="disk_nearly_full", who="x")  # type: ignore[arg-type]


def job_ended(json: str, **changes: Any) -> Any:
    message: Any = to_message(NumberedEvent(1, JobEnded(state="failed", result={})))  # type: ignore[arg-type]
    sent: Any = message.job_ended.result
    sent.CopyFrom(values_pb2.Document(version=1, sha256=sent.sha256, json=json))
    for name, value in changes.items():
        setattr(sent, name, value)
    return message


@pytest.mark.parametrize(
    ("kind", "message", "sentence"),
    [
        (MemberInfo, lambda: message_of(MEMBER, role=0), "unknown member role 0: this version"),
        (MemberInfo, lambda: message_of(MEMBER, role=99), "unknown member role 99"),
        (MemberInfo, lambda: message_of(MEMBER, id=""), "'' is not a member id"),
        (MemberInfo, lambda: message_of(MEMBER, host="a b"), "'a b' is not a valid host name"),
        (MemberInfo, lambda: message_of(MEMBER, shard_index=64), "registers as shard 64; a job has at most 64 shards"),
        (MemberInfo, lambda: message_of(MEMBER, highest_term=1 << 60), "is not a valid count"),
        (calls.RegisterRequest, pb.RegisterRequest, "a RegisterRequest without its required field member"),
        (type(KEY), lambda: message_of(KEY, job_id="a/b"), "'a/b' is not a job id"),
        (type(KEY), lambda: message_of(KEY, term=1 << 60), "the incarnation of a stage: .* is not a valid count"),
        (type(CLOCKS), lambda: message_of(CLOCKS, samples=1 << 60), "the clocks of a job: .* is not a valid count"),
        (Condition, lambda: message_of(FULL, kind="no_such"), "unknown condition kind 'no_such': this version"),
        (Condition, lambda: message_of(FULL, since=-1.0), "not a valid Condition"),
        (Condition, lambda: message_of(FULL, since=float("nan")), "not a valid Condition"),
        (Condition, lambda: message_of(FULL, who="x" * 2_000), "not a valid Condition"),
        (Condition, lambda: message_of(FULL, times=1 << 60), "not a valid Condition"),
        (NumberedEvent, pb.NumberedEvent, "unknown event in a NumberedEvent"),
        (calls.ReportRequest, lambda: pb.ReportRequest(reports=[pb.AgentReport()]), "unknown report in a AgentReport"),
        (calls.LogRecords, lambda: shard_pb.LogRecords(records=[shard_pb.LogRecord()]), "unknown record in a LogRec"),
        (StateChanged, pb.StateChanged, "unknown job state 0: this version"),
        (calls.StopJobRequest, pb.StopJobRequest, "unknown stop mode 0: this version"),
        (WorkerStatus, lambda: pb.WorkerStatus(vw=1, state="asleep"), "unknown life state 'asleep'"),
        (JobStatus, lambda: pb.JobStatus(processes=[pb.ProcessStatus(role="cook")]), "not a valid JobStatus"),
        (NumberedEvent, lambda: job_ended("["), "is corrupted"),
        (NumberedEvent, lambda: job_ended("{}", version=2), "has version 2; this process supports version 1"),
    ],
)
def test_what_cannot_be_is_refused(kind: type, message: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ProtocolViolation, match=sentence):
        from_message(kind, message())


def test_garbage_is_no_message() -> None:
    with pytest.raises(ProtocolViolation, match="16 bytes that are not a valid JoinRequest"):
        from_bytes(calls.JoinRequest, b"\xff" * 16)


def test_a_heartbeat_tells_of_so_many_jobs() -> None:
    beat: Any = to_message(EXAMPLES[calls.HeartbeatRequest][0])
    beat.jobs.extend(f"job{number}" for number in range(1_001))
    with pytest.raises(ProtocolViolation, match="not a valid HeartbeatRequest"):
        from_message(calls.HeartbeatRequest, beat)


def test_sentences_are_cut() -> None:
    request: Any = to_message(EXAMPLES[calls.ReportCheckpointRequest][0])
    request.failure = "x" * 10_000
    assert len(from_message(calls.ReportCheckpointRequest, request).failure) == 4_000


def test_no_codec_is_made_of_what_does_not_fit() -> None:
    @dataclass(frozen=True, slots=True)
    class Barrier:
        clock: str

    @dataclass(frozen=True, slots=True)
    class HeldClock:
        clock: int

    @dataclass(frozen=True, slots=True)
    class KnownClocks:
        clocks: int

    @dataclass(frozen=True, slots=True)
    class Certificate:
        pem: bytes | None

    @dataclass(frozen=True, slots=True)
    class Unheard:
        clock: int

    for kind, sentence in (
        (Barrier, "Barrier.clock has another type"),
        (HeldClock, "dataclass HeldClock has no field barrier"),
        (KnownClocks, "KnownClocks.clocks has another type"),
        (Certificate, "Certificate.pem cannot be absent"),
        (Unheard, "no proto file defines a message Unheard"),
    ):
        with pytest.raises(TypeError, match=sentence):
            check(kind)


def test_nobody_writes_with_a_codec_that_another_thread_is_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    example = EXAMPLES[calls.HeartbeatRequest][0]
    whole = to_bytes(example)
    monkeypatch.setattr(codec, "_shapes", {})
    compile_it = codec._Shape.compile
    written: list[bytes] = []
    other = threading.Thread(target=lambda: written.append(to_bytes(example)), daemon=True)

    def compile_while_another_writes(shape: Any) -> None:
        if other.ident is None:
            other.start()
            other.join(0.2)  # without a lock it has written by now
        compile_it(shape)

    monkeypatch.setattr(codec._Shape, "compile", compile_while_another_writes)
    assert to_bytes(example) == whole
    other.join(10.0)
    assert written == [whole]


def test_a_size_beyond_the_row_is_refused_before_it_is_read() -> None:
    from hetpipe.wire.serving import reader

    with pytest.raises(HetpipeError, match=r"the request of HoldClock has 64\.1 KiB; the limit is 64 KiB"):
        reader(calls.HOLD_CLOCK, calls.HoldClockRequest)(bytes(65_537))
