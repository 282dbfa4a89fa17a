"""An agent follows the decision log of a job once and relays it to its stages: one stream per node and job.

A stage that has no frame for `SILENCE_SECONDS` follows the clock shard itself (`server.shard.client`): the agent is
stopped, or cannot reach the clock shard. Nobody waits for a stage: one that does not read its input is cut off.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from hetpipe.decide.sync.decision_log import FROM_NEWEST_SEGMENT
from hetpipe.decide.sync.records import Record, SegmentRecord
from hetpipe.errors import HetpipeError
from hetpipe.observe.log import get_logger
from hetpipe.server.shard.relayed_log import PULSE_SECONDS, LogFrame
from hetpipe.values.commands import StageKey
from hetpipe.values.ids import JobId, Term
from hetpipe.wire.call import Calls
from hetpipe.wire.calls import FOLLOW_LOG, FollowLogRequest

_log = get_logger(__name__)

#: Pause after a failure of the stream.
_RETRY_SECONDS = 1.0

#: Records kept for stages that start later; in a longer segment these follow the clock shard themselves.
MAX_KEPT_RECORDS = 10_000

#: Writes bytes to a stage, without waiting; False: it takes no more.
Tell = Callable[[bytes], bool]


@dataclass(frozen=True, slots=True)
class ClockShardAt:
    """A clock shard."""

    address: str
    """`HOST:PORT`."""
    member_id: str = ""
    """Which it must prove with TLS; empty: any parameter server."""


@dataclass(slots=True)
class _Listening:
    tell: Tell
    has_begun: bool = False
    """Whether it has got the first frame, which begins at the newest segment."""


class JobRelay:
    """The stages of one job on this node, and what they are told. Thread-safe."""

    def __init__(self, job_id: JobId, term: Term) -> None:
        self._job_id = job_id
        self._term = term
        self._lock = threading.Lock()
        self._stages: dict[StageKey, _Listening] = {}
        #: From the newest segment record on; None: they were too many.
        self._kept: list[Record] | None = []
        self._first = 0
        #: The next record; None before the first.
        self._following: int | None = None
        #: Whether the stream works, as far as this agent knows.
        self._is_current = False

    @property
    def request(self) -> FollowLogRequest:
        """What is to be followed next. After a failure with the newest record again, whose arrival ends the failure."""
        with self._lock:
            start = FROM_NEWEST_SEGMENT if self._following is None else self._following - (not self._is_current)
            return FollowLogRequest(self._job_id, self._term, start, gathered=True)

    def add(self, stage: StageKey, tell: Tell) -> None:
        """Relay to a stage from now on."""
        with self._lock:
            listening = self._stages[stage] = _Listening(tell)
            if self._is_current:
                self._begin(stage, listening)

    def remove(self, stage: StageKey) -> None:
        """Forget a stage."""
        with self._lock:
            self._stages.pop(stage, None)

    @property
    def has_stages(self) -> bool:
        """Whether any stage is relayed to."""
        with self._lock:
            return bool(self._stages)

    def spread(self, records: tuple[Record, ...]) -> None:
        """Relay the next records of the stream, of which the first may be known."""
        with self._lock:
            following = self._following
            new = tuple(record for record in records if following is None or record.index >= following)
            self._is_current = True
            if not new:
                return
            # A stream that is far behind goes on at the newest segment record, without what is before.
            skips = following is None or (isinstance(new[0], SegmentRecord) and new[0].index > following)
            first = new[0].index if skips or following is None else following
            self._following = new[-1].index + 1
            self._keep(new, first)
            frame = LogFrame.of(first, self._following, new).packed()
            for stage, listening in list(self._stages.items()):
                if listening.has_begun:
                    self._tell(stage, listening, frame)
                else:
                    self._begin(stage, listening)

    def pulse(self) -> None:
        """Tell the stages that there is nothing new."""
        with self._lock:
            if self._is_current and self._following is not None:
                pulse = LogFrame(self._following, self._following).packed()
                for stage, listening in list(self._stages.items()):
                    if listening.has_begun:
                        self._tell(stage, listening, pulse)

    def failed(self) -> bool:
        """The stream has failed: pulses stop until it works again. Returns whether it worked before."""
        with self._lock:
            worked, self._is_current = self._is_current, False
            return worked

    def _keep(self, new: tuple[Record, ...], first: int) -> None:
        if self._following is None or (self._kept is not None and not self._kept):
            self._first = first
        for record in new:
            if isinstance(record, SegmentRecord):
                self._kept, self._first = [record], record.index
            elif self._kept is not None:
                self._kept.append(record)
        if self._kept is not None and len(self._kept) > MAX_KEPT_RECORDS:
            self._kept = None

    def _begin(self, stage: StageKey, listening: _Listening) -> None:
        if self._kept and self._following is not None:
            listening.has_begun = True
            self._tell(stage, listening, LogFrame.of(self._first, self._following, self._kept).packed())

    def _tell(self, stage: StageKey, listening: _Listening, data: bytes) -> None:
        if not listening.tell(data):
            del self._stages[stage]
            _log.warning("stage_cut_off", stage=str(stage), consequence="it follows the clock shard itself")


class LogRelays:
    """The relays of all jobs of an agent, each with a stream and a thread. Thread-safe."""

    def __init__(self, connect: Callable[[ClockShardAt], Calls]) -> None:
        """Follow nothing yet; `connect` opens the connection to a clock shard."""
        self._connect = connect
        self._lock = threading.Lock()
        self._relays: dict[tuple[JobId, Term], tuple[JobRelay, _Stream]] = {}
        self._closed = threading.Event()
        self._pulses: threading.Thread | None = None

    def add(self, stage: StageKey, at: ClockShardAt, tell: Tell) -> None:
        """Relay the log of its job to a stage, until `remove`."""
        key = stage.job_id, stage.term
        with self._lock:
            if self._closed.is_set():
                return
            if key not in self._relays:
                relay = JobRelay(*key)
                self._relays[key] = relay, _Stream(relay, self._connect(at), f"relay-{stage.job_id}")
            if self._pulses is None:
                self._pulses = threading.Thread(target=self._pulse, name="relay-pulses", daemon=True)
                self._pulses.start()
            self._relays[key][0].add(stage, tell)

    def remove(self, stage: StageKey) -> None:
        """The stage has ended; with the last one of its job, the stream ends."""
        with self._lock:
            found = self._relays.get((stage.job_id, stage.term))
            if found is not None:
                found[0].remove(stage)
        self._end_unused()

    def close(self) -> None:
        """End all streams."""
        self._closed.set()
        with self._lock:
            relays = list(self._relays.values())
            self._relays.clear()
        for _, stream in relays:
            stream.close()

    def _pulse(self) -> None:
        while not self._closed.wait(PULSE_SECONDS):
            with self._lock:
                relays = [relay for relay, _ in self._relays.values()]
            for relay in relays:
                relay.pulse()
            self._end_unused()

    def _end_unused(self) -> None:
        with self._lock:
            unused = {key: stream for key, (relay, stream) in self._relays.items() if not relay.has_stages}
            for key in unused:
                del self._relays[key]
        for stream in unused.values():
            stream.close()


class _Stream:
    """The stream of one relay: a thread that waits for the clock shard."""

    def __init__(self, relay: JobRelay, clock_shard: Calls, name: str) -> None:
        self._relay = relay
        self._clock_shard = clock_shard
        self._ended = threading.Event()
        threading.Thread(target=self._follow, name=name, daemon=True).start()

    def close(self) -> None:
        """End the stream; its thread ends soon."""
        self._ended.set()
        self._clock_shard.close()

    def _follow(self) -> None:
        while not self._ended.is_set():
            try:
                for batch in self._clock_shard.stream(FOLLOW_LOG, self._relay.request):
                    self._relay.spread(batch.records)
            except HetpipeError as error:
                if self._relay.failed() and not self._ended.is_set():
                    _log.warning("relay_interrupted", error=type(error).__name__, reason=str(error))
                self._ended.wait(_RETRY_SECONDS)
