"""The decision log as an agent relays it to its stages, through the standard input of each (`server.agent.log_relay`).

The agent follows the log once for all its stages of a job, and writes *frames*: records, or a *pulse* without any,
which says that the agent has all records there are. A stage reads them here. Positions decide what is new: a frame
names the records that it covers, so that a stage may take records from the agent or from the clock shard at any time
and still gets each once and in order.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hetpipe.clock import Clock as TimeSource
from hetpipe.decide.sync.decision_log import FROM_NEWEST_SEGMENT
from hetpipe.decide.sync.records import Record
from hetpipe.errors import HetpipeError, ProtocolViolation
from hetpipe.observe.log import get_logger
from hetpipe.wire.calls import LogRecords
from hetpipe.wire.codec import from_bytes, to_bytes

_log = get_logger(__name__)

#: Interval between pulses, and silence after which a stage follows the clock shard itself: less than an agent's lease.
PULSE_SECONDS = 0.5
SILENCE_SECONDS = 2.0

#: Largest frame, and bytes of frames that wait for their stage; beyond, it follows the clock shard itself.
MAX_WAITING_BYTES = 4 * 1024 * 1024

#: Length of the records, index of the first record covered, and index after the last one.
_HEAD = struct.Struct("<IQQ")


@dataclass(frozen=True, slots=True)
class LogFrame:
    """What an agent says: records [first, following) of the log are `data`, without those that a stage does not need.

    Without `data` it is a pulse.
    """

    first: int
    following: int
    data: bytes = b""

    @classmethod
    def of(cls, first: int, following: int, records: Sequence[Record]) -> LogFrame:
        """The frame of these records."""
        return cls(first, following, to_bytes(LogRecords(tuple(records))))

    def packed(self) -> bytes:
        """As it is written to a stage."""
        return _HEAD.pack(len(self.data), self.first, self.following) + self.data


class FrameReader:
    """Finds the frames in a stream of bytes. Not thread-safe."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> list[LogFrame]:
        """The frames that end in the next bytes.

        Raises:
            ProtocolViolation: a frame is too large; the stream is of no use from there on.
        """
        data, start, frames = self._rest + data, 0, list[LogFrame]()
        while len(data) - start >= _HEAD.size:
            length, first, following = _HEAD.unpack_from(data, start)
            if length > MAX_WAITING_BYTES:
                raise ProtocolViolation(
                    f"a frame of {length} bytes of the decision log; {MAX_WAITING_BYTES} are allowed"
                )
            end = start + _HEAD.size + length
            if len(data) < end:
                break
            frames.append(LogFrame(first, following, data[start + _HEAD.size : end]))
            start = end
        self._rest = data[start:]
        return frames


class RelayedLog:
    """A stage's end. Thread-safe: one thread passes the bytes in, one takes the records."""

    def __init__(self, clock: TimeSource) -> None:
        """Wait for frames; `clock` measures the silence between them."""
        self._clock = clock
        self._condition = threading.Condition()
        self._reader: FrameReader | None = FrameReader()
        self._frames: deque[LogFrame] = deque()
        self._num_bytes = 0
        #: Index after the newest record of which the agent has told; None before the first frame.
        self._following: int | None = None
        #: Whether no frame was dropped: the first one begins where a stage may begin.
        self._is_whole = True
        #: When the agent was heard, or first waited for.
        self._heard: float | None = None
        self._closed = False

    def feed(self, data: bytes) -> None:
        """Take the next bytes from the agent."""
        with self._condition:
            if self._reader is None:
                return
            try:
                frames = self._reader.take(data)
            except ProtocolViolation as error:
                _log.warning("relay_not_understood", reason=str(error))
                self._reader = None
                return
            for frame in frames:
                self._heard, self._following = self._clock.monotonic(), frame.following
                if frame.data:
                    self._frames.append(frame)
                    self._num_bytes += len(frame.data)
            if self._num_bytes > MAX_WAITING_BYTES:
                self._frames.clear()
                self._num_bytes, self._is_whole = 0, False
            self._condition.notify_all()

    def serves(self, position: int) -> bool:
        """Whether the agent is heard, and has told nothing beyond `position` without that record itself.

        Args:
            position: the record wanted next, or `FROM_NEWEST_SEGMENT`.
        """
        with self._condition:
            return self._serves(position)

    def take(self, position: int) -> LogRecords | None:
        """Wait for records from `position` on; None once the agent does not serve them.

        The wait is for the agent. It ends after `SILENCE_SECONDS` without a frame, and with `close`.
        """
        with self._condition:
            if self._heard is None:
                self._heard = self._clock.monotonic()
            while not self._closed:
                self._drop_before(position)
                if self._frames and self._serves(position):
                    return self._next(position)
                left = self._silent_at() - self._clock.monotonic()
                if left <= 0 or not (self._serves(position) or self._is_awaited(position)):
                    return None
                self._condition.wait(left)
            return None

    def close(self) -> None:
        """End a wait."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    # -- inside, with the lock held ----------------------------------------------------------------------------------

    def _silent_at(self) -> float:
        assert self._heard is not None, "it is set by the first wait and by every frame"
        return self._heard + SILENCE_SECONDS

    def _serves(self, position: int) -> bool:
        if self._reader is None or self._following is None or self._clock.monotonic() >= self._silent_at():
            return False
        if position == FROM_NEWEST_SEGMENT:
            return self._is_whole and bool(self._frames)
        return (self._frames[0].first if self._frames else self._following) <= position

    def _is_awaited(self, position: int) -> bool:
        """Whether the agent may still tell where the log begins for a new stage."""
        return self._reader is not None and self._is_whole and self._following is None and position < 0

    def _drop_before(self, position: int) -> None:
        while self._frames and self._frames[0].following <= position:
            self._num_bytes -= len(self._frames.popleft().data)

    def _next(self, position: int) -> LogRecords | None:
        frame = self._frames.popleft()
        self._num_bytes -= len(frame.data)
        try:
            found = from_bytes(LogRecords, frame.data)
        except HetpipeError as error:
            _log.warning("relay_not_understood", reason=str(error))
            self._reader = None
            return None
        if frame.first >= position:
            return found
        return LogRecords(tuple(record for record in found.records if record.index >= position))
