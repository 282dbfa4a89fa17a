"""The timeline of the real pipeline: the activities of each stage, in the trace format of Perfetto and Chrome.

During a run, each process appends its activities to a *fragment* of its own (JSON lines). At the end `merge_timelines`
merges all fragments into one trace: one Chrome "process" per virtual worker, one "thread" per stage, and additional
threads for the transfers in the background of that stage's computation.
"""

from __future__ import annotations

import enum
import json
import math
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import HistoryIncomplete
from hetpipe.observe.line_file import LineFile

#: The type of an activity's arguments; shown in the viewer.
Value = int | float | str

#: Maximum number of buffered events, and the maximum time before they are written.
_FLUSH_EVENTS = 256
_FLUSH_SECONDS = 2.0
#: Limit per fragment; later activities are counted and dropped. Viewers are slow far below the sum of a few of these.
MAX_EVENTS = 200_000

#: Chrome thread numbers per stage: the first is the stage's, the others are for concurrent transfers.
_THREADS_PER_STAGE = 100

_encode = json.JSONEncoder(separators=(",", ":")).encode


class Activity(enum.Enum):
    """The kind of an activity; the value is (the start of) its name in the trace."""

    FORWARD = "F"
    BACKWARD = "B"
    STEP = "step"
    REDUCE = "reduce"
    """Gradients are summed over replicas."""
    WAIT = "wait"
    EVALUATE = "evaluate"
    CHECKPOINT = "checkpoint"
    MOVE = "move"
    """Layers are exchanged with other stages, at a barrier."""
    PUSH = "push"
    PULL = "pull"
    SEND = "send"
    """A frame in transit to a neighbour; recorded separately by simulations only."""

    @property
    def is_transfer(self) -> bool:
        """Whether it runs concurrently to the stage's computation, and so gets a thread of its own in the trace."""
        return self in (Activity.PUSH, Activity.PULL, Activity.SEND)

    def label(self, p: int | None) -> str:
        """`F12`, `B12`; other names have no number."""
        return f"{self.value}{p}" if p is not None and len(self.value) == 1 else self.value


class TimelineWriter(Protocol):
    """Writer of finished activities. Implementations are thread-safe."""

    def record(
        self, activity: Activity, *, start_seconds: float, end_seconds: float, p: int | None = None, **args: Value
    ) -> None:
        """Record one activity.

        Args:
            activity: its kind.
            start_seconds: by the monotonic clock.
            end_seconds: by the same clock.
            p: its minibatch.
            args: additional values.
        """
        ...

    def span(self, activity: Activity, *, p: int | None = None, **args: Value) -> AbstractContextManager[None]:
        """Record the duration of the `with` block, also if it raises."""
        ...

    def close(self) -> None:
        """Flush. Idempotent; later activities are dropped."""
        ...


class NullTimeline(TimelineWriter):
    """Records nothing."""

    def record(
        self, activity: Activity, *, start_seconds: float, end_seconds: float, p: int | None = None, **args: Value
    ) -> None:
        """Without effect."""

    def span(self, activity: Activity, *, p: int | None = None, **args: Value) -> AbstractContextManager[None]:
        """Do nothing around the block."""
        return nullcontext()

    def close(self) -> None:
        """No-op: nothing is buffered."""


class Timeline(TimelineWriter):
    """Appends to a fragment. At most `_FLUSH_EVENTS` buffered activities are lost if the process is killed."""

    def __init__(
        self,
        path: Path,
        *,
        process_index: int,
        process_name: str,
        thread_index: int,
        thread_name: str,
        clock: Clock = SYSTEM_CLOCK,
        host: str | None = None,
    ) -> None:
        """Open or create the fragment `path` and its folder.

        Args:
            path: this process's own fragment.
            process_index: order of the virtual worker in the trace, from 0.
            process_name: `virtual worker 0`.
            thread_index: order of the stage within it, from 0.
            thread_name: `stage 0`.
            clock: the source of the times passed to `record`.
            host: processes of one host share the monotonic clock; by default this machine's name.

        Raises:
            OSError: the file cannot be opened, for another reason than a failing disk.
        """
        self._clock = clock
        self._lock = threading.Lock()
        self._is_closed = False
        #: Buffered arguments of `record`: writing in bulk is cheaper than between two minibatches.
        self._pending: list[tuple[Activity, float, float, int | None, dict[str, Value]]] = []
        self._num_recorded = 0
        self._num_dropped = 0
        self._flushed_at = clock.monotonic()
        self._file = LineFile(path)
        origin = {
            "process_index": process_index,
            "process_name": process_name,
            "thread_index": thread_index,
            "thread_name": thread_name,
            "host": socket.gethostname() if host is None else host,
            "wall_offset_seconds": clock.wall() - clock.monotonic(),
        }
        self._file.write(f"{_encode({'origin': origin})}\n".encode())

    def record(
        self, activity: Activity, *, start_seconds: float, end_seconds: float, p: int | None = None, **args: Value
    ) -> None:
        """Implement `TimelineWriter.record`."""
        with self._lock:
            if self._is_closed or self._num_recorded >= MAX_EVENTS:
                self._num_dropped += 1
                return
            self._num_recorded += 1
            self._pending.append((activity, start_seconds, end_seconds, p, args))
            if len(self._pending) >= _FLUSH_EVENTS or end_seconds - self._flushed_at >= _FLUSH_SECONDS:
                self._flush(end_seconds)

    def span(self, activity: Activity, *, p: int | None = None, **args: Value) -> AbstractContextManager[None]:
        """Implement `TimelineWriter.span`."""
        return _Span(self, activity, p, args, self._clock)

    def on_alarm(self, listener: Callable[[HistoryIncomplete], None]) -> None:
        """Call `listener` once, when the first activity is lost: from the writing thread, or now."""
        with self._lock:
            self._file.on_alarm(listener)

    def close(self) -> None:
        """Implement `TimelineWriter.close`."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._flush(self._clock.monotonic())
            if self._num_dropped:
                self._file.write(f"{_encode({'dropped': self._num_dropped})}\n".encode())
            self._file.close()

    def _flush(self, now_seconds: float) -> None:
        self._flushed_at = now_seconds
        if self._pending:
            self._file.write("".join(_line(*activity) for activity in self._pending).encode())
            self._pending.clear()


def _line(
    activity: Activity, start_seconds: float, end_seconds: float, p: int | None, args: Mapping[str, Value]
) -> str:
    shown: dict[str, Value] = {} if p is None else {"p": p}
    for name, value in args.items():
        # JSON has no NaN; a diverged loss must not spoil the trace.
        shown[name] = str(value) if isinstance(value, float) and not math.isfinite(value) else value
    entry = {
        "name": activity.label(p),
        "cat": "transfer" if activity.is_transfer else "compute",
        "ts": round(start_seconds * 1e6, 3),
        "dur": round(max(0.0, end_seconds - start_seconds) * 1e6, 3),
        "args": shown,
    }
    return f"{_encode(entry)}\n"


class _Span(AbstractContextManager[None]):
    """One `with timeline.span(…)`."""

    __slots__ = ("_activity", "_args", "_clock", "_p", "_start_seconds", "_timeline")

    def __init__(
        self, timeline: Timeline, activity: Activity, p: int | None, args: dict[str, Value], clock: Clock
    ) -> None:
        self._timeline = timeline
        self._activity = activity
        self._p = p
        self._args = args
        self._clock = clock
        self._start_seconds = 0.0

    def __enter__(self) -> None:
        """Note the time."""
        self._start_seconds = self._clock.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Record the activity."""
        self._timeline.record(
            self._activity,
            start_seconds=self._start_seconds,
            end_seconds=self._clock.monotonic(),
            p=self._p,
            **self._args,
        )


@dataclass(frozen=True, slots=True)
class _Origin:
    """The first line of a fragment, and of each process that appended to it."""

    process_index: int
    process_name: str
    thread_index: int
    thread_name: str
    host: str
    wall_offset_seconds: float


@dataclass(slots=True)
class _Part:
    """The record of one process; times in microseconds of its host's monotonic clock."""

    origin: _Origin
    events: list[dict[str, Any]]
    num_dropped: int = 0


def merge_timelines(fragments: Iterable[Path], out: Path) -> None:
    """Merge all fragments into one trace in Chrome's JSON format, replacing `out` atomically.

    Times of processes on one host are aligned exactly, as they share a monotonic clock; hosts are aligned by their wall
    clocks. The trace begins at 0. Torn lines (of a killed process), unknown lines and missing fragments are skipped.

    Raises:
        OSError: a fragment cannot be read or `out` not be written.
    """
    parts = [part for path in sorted(fragments) for part in _read(path)]
    shifts = _shifts_us(parts)
    begin_us = min((e["ts"] + shifts[part.origin.host] for part in parts for e in part.events), default=0.0)
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        _write_trace(temporary, parts, shifts, begin_us)
        temporary.replace(out)
    except OSError:
        # The partial file would take space on a full disk.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _write_trace(path: Path, parts: Sequence[_Part], shifts: Mapping[str, float], begin_us: float) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = ""
        for event in _chrome_events(parts, shifts, begin_us):
            file.write(separator + _encode(event))
            separator = ",\n"
        dropped = sum(part.num_dropped for part in parts)
        file.write(f'\n],"otherData":{{"dropped_activities":"{dropped}"}}}}\n')


def _read(path: Path) -> list[_Part]:
    if not path.exists():
        return []
    parts: list[_Part] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                _read_entry(json.loads(line), parts)
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                continue
    return parts


def _read_entry(entry: dict[str, Any], parts: list[_Part]) -> None:
    if "origin" in entry:
        parts.append(_Part(_origin(entry["origin"]), []))
    elif not parts:
        return
    elif "dropped" in entry:
        parts[-1].num_dropped += int(entry["dropped"])
    else:
        wanted = {"name": str(entry["name"]), "cat": str(entry["cat"]), "args": dict(entry["args"])}
        start, duration = float(entry["ts"]), float(entry["dur"])
        if math.isfinite(start) and math.isfinite(duration):
            parts[-1].events.append({**wanted, "ts": start, "dur": duration})


def _origin(values: dict[str, Any]) -> _Origin:
    """The origin in `values`; raises the errors that `_read` skips."""
    return _Origin(
        process_index=int(values["process_index"]),
        process_name=str(values["process_name"]),
        thread_index=int(values["thread_index"]),
        thread_name=str(values["thread_name"]),
        host=str(values["host"]),
        wall_offset_seconds=float(values["wall_offset_seconds"]),
    )


def _shifts_us(parts: Sequence[_Part]) -> dict[str, float]:
    """The offsets of each host's clock from that of the first host."""
    offsets: dict[str, float] = {}
    for part in parts:
        offsets.setdefault(part.origin.host, part.origin.wall_offset_seconds)
    reference = next(iter(offsets.values()), 0.0)
    return {host: (offset - reference) * 1e6 for host, offset in offsets.items()}


def _chrome_events(parts: Sequence[_Part], shifts: Mapping[str, float], begin_us: float) -> Iterator[dict[str, Any]]:
    named: set[tuple[int, int]] = set()
    for part in parts:
        origin = part.origin
        for lane, event in _with_lanes(part.events):
            process, thread = origin.process_index, origin.thread_index * _THREADS_PER_STAGE + lane
            if (process, thread) not in named:
                named.add((process, thread))
                yield from _names(origin, process, thread, lane)
            start = round(event["ts"] + shifts[origin.host] - begin_us, 3)
            yield {"ph": "X", "pid": process, "tid": thread, **event, "ts": start}


def _with_lanes(events: list[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number each event's thread within its stage: 0 for computation, from 1 on for transfers.

    Chrome events of one thread must nest or be disjoint, so transfers that overlap get different threads.
    """
    ends: list[float] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        if event["cat"] != "transfer":
            yield 0, event
            continue
        free = next((lane for lane, end in enumerate(ends) if end <= event["ts"]), len(ends))
        free = min(free, _THREADS_PER_STAGE - 2)
        ends[free : free + 1] = [event["ts"] + event["dur"]]
        yield free + 1, event


def _names(origin: _Origin, process: int, thread: int, lane: int) -> Iterator[dict[str, Any]]:
    name = origin.thread_name
    if lane:
        name += " transfers" + (f" {lane}" if lane > 1 else "")
    described: list[tuple[str, dict[str, Value]]] = [
        ("process_name", {"name": origin.process_name}),
        ("process_sort_index", {"sort_index": process}),
        ("thread_name", {"name": name}),
        ("thread_sort_index", {"sort_index": thread}),
    ]
    for kind, args in described:
        yield {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": args}
