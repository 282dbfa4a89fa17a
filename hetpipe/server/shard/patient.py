"""Nobody gives up because a parameter server is away for a while: transports that wait for it, and try again.

`PatientShard` and `PatientClock` wrap the transports of a stage. A call that fails because its server is away, or busy,
is repeated after rests that grow, until patience ends; whatever else the server answers is not repeated. This is right
because repeating any call is (`server.shard.transport`). A break in the middle of a pull begins the pull anew: the next
chunk is the first one again. A log is followed on from where it broke.

Who waits for whom is told once at the beginning and at the end of each outage in the log, and every five seconds to
whoever watches the run.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.clock import Clock as TimeSource
from hetpipe.decide.sync.records import Record
from hetpipe.errors import Busy, HetpipeError, PeerUnreachable, Unavailable
from hetpipe.observe.log import get_logger
from hetpipe.pipeline.waiting import SAY_AFTER_SECONDS
from hetpipe.server.shard.transport import ClockTransport, ShardTransport
from hetpipe.values.ids import Clock, ShardIndex, Wave
from hetpipe.values.requests import (
    Blocks,
    BuffersHeader,
    CheckpointFile,
    Meeting,
    PullHeader,
    PushHeader,
    PushReply,
    Requester,
)
from hetpipe.values.run import StageReport, StageWaiting
from hetpipe.values.sync import Progress

_log = get_logger(__name__)

T = TypeVar("T")

#: The first rest before a call is repeated, and the longest one, before chance takes up to half of it off.
_FIRST_REST_SECONDS = 0.05
_LONGEST_REST_SECONDS = 0.5

#: Longest sleep without a look whether the transport was closed.
_LOOK_UP_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """How one stage waits for parameter servers."""

    who: str
    """The stage, as the beginning of a sentence."""
    report: Callable[[StageReport], None]
    """Hears of waits; called from any thread."""
    seconds: float
    """Patience: how long a call is repeated after it has failed for the first time."""
    clock: TimeSource = SYSTEM_CLOCK
    # Never the module's own functions: user code draws from these, under seeds.
    chance: Callable[[], float] = random.SystemRandom().random
    """Shortens rests by chance, so that not everybody comes back at once; from [0, 1)."""


class Endurance:
    """One stage's patience with one parameter server. Thread-safe; its transports may share it."""

    def __init__(self, peer: str, waits: Waits) -> None:
        """Begin without an outage.

        Args:
            peer: the parameter server, as part of a sentence.
            waits: how to wait for it.
        """
        self._peer = peer
        self._waits = waits
        self._lock = threading.Lock()
        self._closed = False
        #: Since when it is known to be away, in monotonic seconds; None while it is not.
        self._away_since: float | None = None
        #: When somebody's wait was last told.
        self._told_at = float("-inf")

    def close(self) -> None:
        """Let every wait end at once, with the error that it waits out."""
        self._closed = True

    def call(self, attempt: Callable[[], T]) -> T:
        """What `attempt` gives, however often it takes.

        Raises:
            PeerUnreachable: patience ended.
            HetpipeError: what the server answers.
        """
        wait = _Wait(self)
        while True:
            try:
                answer = attempt()
            except (Unavailable, Busy) as error:
                wait.out(error)
            except HetpipeError:
                self._heard()
                raise
            else:
                self._heard()
                return answer

    def stream(self, begin: Callable[[], Iterator[T]]) -> Iterator[T]:
        """What the streams of `begin` give, the next one after each that breaks, until one ends.

        Raises:
            PeerUnreachable, HetpipeError: as `call`.
        """
        wait = _Wait(self)
        while True:
            try:
                for item in begin():
                    wait.is_over()
                    self._heard()
                    yield item
            except (Unavailable, Busy) as error:
                wait.out(error)
            except HetpipeError:
                self._heard()
                raise
            else:
                self._heard()
                return

    # -- for the waits -----------------------------------------------------------------------------------------------

    @property
    def waits(self) -> Waits:
        """How to wait."""
        return self._waits

    def check(self, error: HetpipeError, waited: float) -> None:
        """Whether there is still patience after `waited` seconds.

        Raises:
            HetpipeError: `error`, because the transport is closed; or PeerUnreachable, because patience ended.
        """
        if self._closed:
            raise error
        if waited >= self._waits.seconds:
            raise PeerUnreachable(f"{self._waits.who} waited {waited:.0f} s for {self._peer}: {error}") from error

    def tell(self, error: HetpipeError, waited: float) -> None:
        """Say that a call waits, once in a while."""
        now = self._waits.clock.monotonic()
        is_busy = isinstance(error, Busy)
        with self._lock:
            begins = self._away_since is None and not is_busy
            if begins:
                self._away_since = now
            speaks = waited >= SAY_AFTER_SECONDS and now - self._told_at >= SAY_AFTER_SECONDS
            if speaks:
                self._told_at = now
        if begins:
            _log.warning("parameter_server_away", peer=self._peer, reason=str(error))
        if speaks:
            state = "is busy" if is_busy else "is away"
            sentence = f"{self._waits.who} has waited {waited:.0f} s for {self._peer}, which {state}"
            self._waits.report(StageWaiting(sentence, waited))

    def sleep(self, seconds: float) -> None:
        """Rest, but not beyond the end of the transport."""
        while seconds > 0.0 and not self._closed:
            step = min(seconds, _LOOK_UP_SECONDS)
            self._waits.clock.sleep(step)
            seconds -= step

    def _heard(self) -> None:
        """The server has answered."""
        if self._away_since is None:
            return
        with self._lock:
            since, self._away_since = self._away_since, None
        if since is not None:
            seconds = self._waits.clock.monotonic() - since
            _log.info("parameter_server_back", peer=self._peer, away_seconds=round(seconds, 3))


class _Wait:
    """The waits of one call."""

    def __init__(self, endurance: Endurance) -> None:
        self._endurance = endurance
        #: When it failed for the first time since it last went well, in monotonic seconds; None while it goes well.
        self._since: float | None = None
        self._rest = _FIRST_REST_SECONDS

    def out(self, error: HetpipeError) -> None:
        """Wait out a failure; returns when it is time for another attempt.

        Raises:
            HetpipeError: there will be none.
        """
        waits = self._endurance.waits
        now = waits.clock.monotonic()
        self._since = now if self._since is None else self._since
        waited = now - self._since
        self._endurance.check(error, waited)
        self._endurance.tell(error, waited)
        self._endurance.sleep(self._rest * (1.0 - 0.5 * waits.chance()))
        self._endurance.check(error, waited)
        self._rest = min(2.0 * self._rest, _LONGEST_REST_SECONDS)

    def is_over(self) -> None:
        """It goes well again."""
        self._since = None
        self._rest = _FIRST_REST_SECONDS


class PatientShard:
    """A `ShardTransport` that waits for its shard."""

    def __init__(self, shard: ShardTransport, endurance: Endurance) -> None:
        self._shard = shard
        self._endurance = endurance

    def push(self, header: PushHeader, chunks: Iterable[bytes]) -> PushReply:
        """See `ShardTransport.push`."""
        return self._endurance.call(lambda: self._shard.push(header, chunks))

    def pull(self, header: PullHeader) -> Iterator[bytes]:
        """See `ShardTransport.pull`; after a break the chunks begin anew."""
        return self._endurance.stream(lambda: self._shard.pull(header))

    def close(self) -> None:
        """See `ShardTransport.close`; waits end at once."""
        self._endurance.close()
        self._shard.close()


class PatientClock:
    """A `ClockTransport` that waits for the clock shard."""

    def __init__(self, clock_shard: ClockTransport, endurance: Endurance) -> None:
        self._clock_shard = clock_shard
        self._endurance = endurance

    def join(
        self, requester: Requester, link_address: str = "", replicas_address: str = "", *, ready: bool = True
    ) -> Meeting:
        """See `ClockTransport.join`."""
        return self._endurance.call(
            lambda: self._clock_shard.join(requester, link_address, replicas_address, ready=ready)
        )

    def initialized(self, requester: Requester) -> None:
        """See `ClockTransport.initialized`."""
        self._endurance.call(lambda: self._clock_shard.initialized(requester))

    def staged(self, requester: Requester, wave: Wave, blocks: Blocks | None, *, segment: Clock) -> None:
        """See `ClockTransport.staged`."""
        self._endurance.call(lambda: self._clock_shard.staged(requester, wave, blocks, segment=segment))

    def hold(self, requester: Requester, switch: int) -> tuple[Clock, Clock]:
        """See `ClockTransport.hold`."""
        return self._endurance.call(lambda: self._clock_shard.hold(requester, switch))

    def progress(self, requester: Requester) -> Progress:
        """See `ClockTransport.progress`."""
        return self._endurance.call(lambda: self._clock_shard.progress(requester))

    def follow(self, start: int, *, gathered: bool = False) -> Iterator[Sequence[Record]]:
        """See `ClockTransport.follow`; a break is mended from the position that was reached."""
        position = start

        def begin() -> Iterator[Sequence[Record]]:
            return self._clock_shard.follow(position, gathered=gathered)

        for records in self._endurance.stream(begin):
            position = records[-1].index + 1
            yield records

    def acknowledge(
        self, shard: ShardIndex, num_records: int, durable: int | None = None, *, applied: bool = False
    ) -> None:
        """See `ClockTransport.acknowledge`."""
        self._endurance.call(lambda: self._clock_shard.acknowledge(shard, num_records, durable, applied=applied))

    def report_checkpoint(
        self, requester: Requester, clock: Clock, files: Sequence[CheckpointFile], *, failure: str = ""
    ) -> bool:
        """See `ClockTransport.report_checkpoint`."""
        return self._endurance.call(
            lambda: self._clock_shard.report_checkpoint(requester, clock, files, failure=failure)
        )

    def report_shard_checkpoint(
        self, shard: ShardIndex, clock: Clock, files: Sequence[CheckpointFile], *, failure: str = ""
    ) -> bool:
        """See `ClockTransport.report_shard_checkpoint`."""
        return self._endurance.call(
            lambda: self._clock_shard.report_shard_checkpoint(shard, clock, files, failure=failure)
        )

    def push_buffers(self, header: BuffersHeader, chunks: Iterable[bytes]) -> None:
        """See `ClockTransport.push_buffers`."""
        self._endurance.call(lambda: self._clock_shard.push_buffers(header, chunks))

    def pull_buffers(self, header: BuffersHeader) -> Iterator[bytes]:
        """See `ClockTransport.pull_buffers`; after a break the chunks begin anew."""
        return self._endurance.stream(lambda: self._clock_shard.pull_buffers(header))

    def close(self) -> None:
        """See `ClockTransport.close`; waits end at once."""
        self._endurance.close()
        self._clock_shard.close()
