"""The client of a coordinator: every call by `invoke`, and two watches that go on for as long as a job does."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import NobodyLeads, UnknownJob
from hetpipe.values.events import JobEnded, NumberedEvent
from hetpipe.values.identity import Role, server_name
from hetpipe.values.ids import JobId
from hetpipe.values.run import ClockSnapshot
from hetpipe.wire.call import ReplyT, RequestT, Streaming, Unary
from hetpipe.wire.caller import Caller
from hetpipe.wire.calls import (
    GET_STATUS,
    WATCH_CLOCKS,
    WATCH_JOB,
    GetStatusRequest,
    WatchClocksRequest,
    WatchJobRequest,
)
from hetpipe.wire.connection import Target
from hetpipe.wire.tls import Tls

#: How long a coordinator that answers may tell nothing of a job. One that is led tells something every few seconds, and
#: one that nobody leads is led on, sent back to a checkpoint or ended after a minute (`decide.lifecycle.patience`).
SILENT_SECONDS = 180.0


class CoordinatorClient:
    """Calls of one coordinator. Thread-safe; `close` ends the calls under way.

    What is asked and what is answered stands in `wire.calls`. Every method raises `PeerUnreachable` or
    `DeadlineExceeded` when the coordinator is away, and what the coordinator itself raises. No job id means the newest
    job.
    """

    def __init__(self, address: str, *, tls: Tls | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.address = address
        self._clock = clock
        target = Target(address=address, role="coordinator", tls=tls, server_name=server_name(Role.COORDINATOR))
        self._caller = Caller(target, clock=clock)

    def close(self) -> None:
        """End all calls and the connection."""
        self._caller.close()

    def invoke(self, call: Unary[RequestT, ReplyT], request: RequestT) -> ReplyT:
        """Make a call of the coordinator; see `Calls.invoke`."""
        return self._caller.invoke(call, request)

    def stream(self, call: Streaming[RequestT, ReplyT], request: RequestT) -> Generator[ReplyT, None, None]:
        """One stream of the coordinator's, which ends it after `STREAM_SECONDS`; then open the next."""
        return self._caller.stream(call, request)

    def watch_job(self, job_id: JobId | None = None, *, after: int = 0) -> Iterator[NumberedEvent]:
        """The events after number `after` as they come, until `JobEnded`, which is the last.

        Raises:
            UnknownJob: there is no such job.
            NobodyLeads: for `SILENT_SECONDS` there was nothing to tell of it.
        """
        job_id = self._known_job(job_id)
        heard = self._clock.monotonic()
        while True:
            with closing(self.stream(WATCH_JOB, WatchJobRequest(job_id, after))) as events:
                for numbered in events:
                    after = max(after, numbered.sequence)
                    yield numbered
                    if isinstance(numbered.event, JobEnded):
                        return
                    heard = self._clock.monotonic()
            self._check_silence(job_id, since=heard)

    def watch_clocks(self, job_id: JobId | None = None) -> Iterator[ClockSnapshot]:
        """The clocks now and after every change, until the job has ended.

        Raises:
            UnknownJob: there is no such job.
            NobodyLeads: for `SILENT_SECONDS` nobody has led it.
        """
        job_id = self._known_job(job_id)
        last: ClockSnapshot | None = None
        led = self._clock.monotonic()
        while True:
            status = self.invoke(GET_STATUS, GetStatusRequest(job_id))
            if status.is_led:
                led = self._clock.monotonic()
            self._check_silence(job_id, since=led)
            with closing(self.stream(WATCH_CLOCKS, WatchClocksRequest(job_id))) as snapshots:
                for snapshot in snapshots:
                    if snapshot != last:
                        last = snapshot
                        yield snapshot
            if status.state is not None and status.state.is_terminal:
                return

    def _check_silence(self, job_id: JobId, *, since: float) -> None:
        """Refuse to wait any longer for a job of which nothing was told.

        Raises:
            NobodyLeads: since then it is too long.
        """
        silent = self._clock.monotonic() - since
        if silent < SILENT_SECONDS:
            return
        status = self.invoke(GET_STATUS, GetStatusRequest(job_id))
        state = "of no state" if status.state is None else status.state.value
        why = f": {status.failure}" if status.failure else ""
        raise NobodyLeads(
            f"the coordinator at {self.address} answers, but for {silent:.0f} s it has told nothing of job {job_id}, "
            f"which it has as {state}{why}"
        )

    def _known_job(self, job_id: JobId | None) -> JobId:
        """`job_id`, or the newest job's id: a watch must not change over to a newer job half-way."""
        known = job_id or self.invoke(GET_STATUS, GetStatusRequest()).job_id
        if known is None:
            raise UnknownJob(f"the coordinator at {self.address} has no job yet; submit one first")
        return known
