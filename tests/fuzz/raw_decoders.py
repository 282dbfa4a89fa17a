"""Decoders of bytes: chunks, frames, files and lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import torch

from hetpipe.checker.reading import read_history
from hetpipe.errors import HetpipeError
from hetpipe.link import wire as link_wire
from hetpipe.link.credit import Window
from hetpipe.link.policy import Frame, FrameKind, LinkLimits
from hetpipe.link.stream import Assembler, credit_message, messages_of
from hetpipe.observe.metrics import read_metrics
from hetpipe.observe.timeline import merge_timelines
from hetpipe.server.agent.children import Inspection
from hetpipe.server.agent.inspection_order import InspectionAnswer
from hetpipe.server.shard.chunks import ChunkReceiver, RunMap
from hetpipe.storage.redis_records import event_of, member_of
from hetpipe.values import wire
from hetpipe.values.events import (
    JobEvent,
    JobState,
    StateChanged,
)
from hetpipe.values.members import MemberInfo
from hetpipe.values.requests import SliceHeader
from hetpipe.weights.flat import FlatBuffer, FlatLayout
from hetpipe.wire.status import error_from_name, metadata_of, translate_rpc_error
from tests.fuzz.decoder import Decoder
from tests.server.coordinator.builders import (
    JOB_ID,
    agent_member,
    model,
)
from tests.server.shard.builders import chunk_of
from tests.wire.failed_call import FailedCall

_LAYOUT = FlatLayout([("a", (3,), "float32"), ("b", (40,), "float32")])
_RUNS = RunMap(
    (SliceHeader("a", 0, 3, "float32"), SliceHeader("b", 0, 40, "float32")), [slot.offset for slot in _LAYOUT.slots]
)
_CHUNK_LENGTH_BYTES = 2
_MESSAGE_LENGTH_BYTES = 4


def _chunks(data: bytes) -> object:
    """A stream of chunks, each after its length."""
    receiver = ChunkReceiver(FlatBuffer(_LAYOUT, torch.device("cpu")), _RUNS)
    while data:
        length = int.from_bytes(data[:_CHUNK_LENGTH_BYTES], "little")
        receiver.write(data[_CHUNK_LENGTH_BYTES : _CHUNK_LENGTH_BYTES + length])
        data = data[_CHUNK_LENGTH_BYTES + length :]
    receiver.finish()
    return receiver


def _chunk_example(*lengths: int, form: int = 0) -> bytes:
    stream, offset = b"", 0
    for length in lengths:
        chunk = chunk_of(offset, bytes(length // (form + 1)), form=form)
        stream += len(chunk).to_bytes(_CHUNK_LENGTH_BYTES, "little") + chunk
        offset += length
    return stream


LIMITS = LinkLimits()


def _frame(data: bytes) -> object:
    header = link_wire.decode(memoryview(data), LIMITS)
    if isinstance(header, link_wire.FrameHeader):
        for tensor in header.tensors:
            assert tensor is None or tensor.num_bytes <= LIMITS.frame_bytes
    return header


def _frame_example(*tensors: torch.Tensor | None) -> bytes:
    frame = Frame(FrameKind.FORWARD, 3, 1, 2, tensors, 4)
    return bytes(link_wire.encode(frame).first)


_STREAM_LIMITS = LinkLimits(frame_bytes=1 << 20)


def _link_stream(data: bytes) -> object:
    """The messages of a gRPC link, each after its length; the receiver has room for three frames."""
    window = Window(3)
    assembler = Assembler(_STREAM_LIMITS, admit=window.arrive)
    received = []
    while data:
        length = int.from_bytes(data[:_MESSAGE_LENGTH_BYTES], "little")
        received.append(assembler.feed(data[_MESSAGE_LENGTH_BYTES : _MESSAGE_LENGTH_BYTES + length]))
        data = data[_MESSAGE_LENGTH_BYTES + length :]
    return received


def _link_stream_example(*tensors: torch.Tensor | None) -> bytes:
    frame = Frame(FrameKind.BACKWARD, 3, 1, 2, tensors, 4)
    messages = [*map(b"".join, messages_of(link_wire.encode(frame))), credit_message(2)]
    return b"".join(len(message).to_bytes(_MESSAGE_LENGTH_BYTES, "little") + message for message in messages)


def _failed_call(data: bytes) -> FailedCall:
    """A failed call whose trailing metadata a peer wrote: class name, sentence and problems, one per line."""
    name, _, rest = data.partition(b"\n")
    sentence, _, problems = rest.partition(b"\n")
    metadata = (("hetpipe-error", name.decode(errors="replace")), ("hetpipe-problems-bin", problems))
    return FailedCall(grpc.StatusCode.UNKNOWN, sentence.decode(errors="replace"), metadata)


def _status(data: bytes) -> object:
    error = translate_rpc_error(_failed_call(data), peer="p", role="r", call="c", elapsed_seconds=0.0)
    assert isinstance(error, HetpipeError)
    metadata_of(error)
    return str(error)


def _child_line(data: bytes) -> object:
    heard: list[object] = []
    Inspection(JOB_ID, heard.append).on_line(data)
    return heard


_FOLDER = TemporaryDirectory(prefix="hetpipe-fuzz-")


def _written(data: bytes, *parts: str) -> Path:
    path = Path(_FOLDER.name).joinpath(*parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _history(data: bytes) -> object:
    _written(data, "history", "shard-0.jsonl")
    return read_history(Path(_FOLDER.name))


def _trace(data: bytes) -> None:
    merge_timelines([_written(data, "trace", "stage.jsonl")], Path(_FOLDER.name) / "trace.json")


def _metrics(data: bytes) -> object:
    _written(data, "metrics", "vw-0.jsonl")
    return read_metrics(Path(_FOLDER.name))


def _redis_fields(data: bytes) -> dict[str, str]:
    """Fields of a hash, one `name=value` per line."""
    lines = (line.partition("=") for line in data.decode(errors="replace").split("\n"))
    return {name: value for name, _, value in lines}


def redis_decoders() -> Iterator[Decoder]:
    member = f"info={wire.to_json(MemberInfo, agent_member())}\nregistration=r\norder=3"
    yield Decoder("redis member", lambda data: member_of(_redis_fields(data)), (member.encode(),))
    event = f"id=12-0\nevent={wire.to_json(JobEvent, StateChanged(JobState.RUNNING))}"
    yield Decoder("redis event", _redis_event, (event.encode(),))


def _redis_event(data: bytes) -> object:
    fields = _redis_fields(data)
    return event_of(fields.get("id", ""), fields)


def run_file_decoders() -> Iterator[Decoder]:
    """Files that the processes of a run write into its folder, and others read."""
    origin = {"t": 0.5, "host": "n0", "pid": 1, "role": "stage", "term": 1}
    history = (
        {**origin, "event": "forward", "vw": 0, "incarnation": 0, "stage": 0, "p": 1, "clock": 0, "local_through": 0},
        {**origin, "event": "used", "vw": 0, "wave": 1, "epoch": 0, "indices": [1, 2]},
        {**origin, "event": "barrier", "clock": 1, "reason": "end"},
    )
    yield Decoder("history file", _history, tuple(json.dumps(line).encode() for line in history))
    place = {"process_index": 0, "process_name": "a", "thread_index": 0, "thread_name": "b"}
    head = json.dumps({"origin": {**place, "host": "n0", "wall_offset_seconds": 1.5}})
    span = json.dumps({"name": "forward", "cat": "compute", "args": {"p": 1}, "ts": 1.0, "dur": 2.0})
    yield Decoder("trace file", _trace, (f"{head}\n{span}\n".encode(), head.encode()))
    wave = {"t": 0.5, "wave": 1, "p": 2, "minibatches": 1, "samples": 4, "loss": 0.5}
    rest = {"learning_rate": 0.1, "gradient_norm": None, "max_norm": None}
    yield Decoder("metrics file", _metrics, (json.dumps({**wave, **rest}).encode(),))
    lines = ({"ok": wire.plain(InspectionAnswer, InspectionAnswer(model()))}, {"error": "JobError", "problems": ["a"]})
    yield Decoder("inspection line", _child_line, tuple(json.dumps(line).encode() for line in lines))


def _error_name(data: bytes) -> object:
    return error_from_name(data.decode(errors="replace"), "sentence", ["one"])


def raw_decoders() -> Iterator[Decoder]:
    yield Decoder("tensor chunks", _chunks, (_chunk_example(64, 192), _chunk_example(256, form=1)))
    yield Decoder(
        "link frame",
        _frame,
        (
            _frame_example(torch.zeros(3), None),
            _frame_example(torch.zeros(2, 0, 5), torch.zeros(40_000)),
            link_wire.encode_close(),
        ),
    )
    yield Decoder(
        "link stream",
        _link_stream,
        (_link_stream_example(torch.zeros(3), None), _link_stream_example(torch.zeros(20_000), torch.zeros(2))),
    )
    yield Decoder("call status", _status, (b'JobError\nsentence\n["one", "two"]', b"StaleTerm\nsentence\n"))
    yield Decoder("error name", _error_name, (b"LinkClosed", b"DocumentError"))
