"""The coordinator's client: every call by `invoke`, and two watches that last as long as a job."""

from __future__ import annotations

import uuid
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Protocol

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import NobodyLeads, UnknownJob
from hetpipe.values.events import JobEnded, NumberedEvent
from hetpipe.values.identity import Role, server_name
from hetpipe.values.ids import JobId
from hetpipe.values.members import Member, MemberId
from hetpipe.values.run import ClockSnapshot
from hetpipe.wire.call import ReplyT, RequestT, Streaming, Unary
from hetpipe.wire.caller import Caller
from hetpipe.wire.calls import (
    GET_STATUS,
    LIST_MEMBERS,
    WATCH_CLOCKS,
    WATCH_JOB,
    GetStatusRequest,
    ListMembersRequest,
    WatchClocksRequest,
    WatchJobRequest,
)
from hetpipe.wire.connection import Target
from hetpipe.wire.tls import Tls

#: Timeout of a reachable coordinator that reports nothing about a job. A job with a leader reports every few seconds;
#: one without is adopted, rewound to a checkpoint or ended after a minute (`decide.lifecycle.patience`).
SILENT_SECONDS = 180.0


class Invoking(Protocol):
    """Makes unary calls of a coordinator."""

    def invoke(self, call: Unary[RequestT, ReplyT], request: RequestT) -> ReplyT:
        """Make a unary call."""
        ...


def all_members(calls: Invoking) -> tuple[Member, ...]:
    """The live members in order of registration; those that come or go meanwhile may be missing."""
    found: dict[MemberId, Member] = {}
    request: ListMembersRequest | None = ListMembersRequest()
    while request is not None:
        page = calls.invoke(LIST_MEMBERS, request)
        found |= {member.info.id: member for member in page.members}
        request = ListMembersRequest(page.members[-1].order) if page.has_more else None
    return tuple(found.values())


class CoordinatorClient:
    """Calls of one coordinator. Thread-safe; `close` cancels pending calls.

    Requests and replies are defined in `wire.calls`. Every method raises `PeerUnreachable` or `DeadlineExceeded` when
    the coordinator is unreachable, and the coordinator's own errors. Without a job id the newest job is meant.
    """

    def __init__(self, address: str, *, tls: Tls | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.address = address
        self._clock = clock
        target = Target(address=address, role="coordinator", tls=tls, server_name=server_name(Role.COORDINATOR))
        self._caller = Caller(target, clock=clock)

    def close(self) -> None:
        """Cancel all calls and close the connection."""
        self._caller.close()

    def invoke(self, call: Unary[RequestT, ReplyT], request: RequestT) -> ReplyT:
        """Make a unary call of the coordinator, as `Calls.invoke` does."""
        return self._caller.invoke(call, request)

    def stream(self, call: Streaming[RequestT, ReplyT], request: RequestT) -> Generator[ReplyT, None, None]:
        """Open a stream of the coordinator; the server ends it after `STREAM_SECONDS`, the caller opens the next."""
        return self._caller.stream(call, request)

    def watch_job(self, job_id: JobId | None = None, *, after: int = 0) -> Iterator[NumberedEvent]:
        """Yield the events after sequence number `after` as they arrive; the last one is `JobEnded`.

        Raises:
            UnknownJob: there is no such job.
            NobodyLeads: the coordinator has reported nothing about it for `SILENT_SECONDS`.
        """
        job_id = self._known_job(job_id)
        last_answer = self._clock.monotonic()
        while True:
            with closing(self.stream(WATCH_JOB, WatchJobRequest(job_id, after))) as events:
                for numbered in events:
                    after = max(after, numbered.sequence)
                    yield numbered
                    if isinstance(numbered.event, JobEnded):
                        return
                    last_answer = self._clock.monotonic()
            self._check_silence(job_id, since=last_answer)

    def watch_clocks(self, job_id: JobId | None = None) -> Iterator[ClockSnapshot]:
        """Yield the current clocks and every change of them until the job has ended.

        Raises:
            UnknownJob: there is no such job.
            NobodyLeads: the job has had no leader for `SILENT_SECONDS`.
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
        """Check how long ago the coordinator last reported on a job.

        Raises:
            NobodyLeads: longer than `SILENT_SECONDS` ago.
        """
        silent = self._clock.monotonic() - since
        if silent < SILENT_SECONDS:
            return
        status = self.invoke(GET_STATUS, GetStatusRequest(job_id))
        state = "unknown" if status.state is None else status.state.value
        why = f": {status.failure}" if status.failure else ""
        raise NobodyLeads(
            f"the coordinator at {self.address} is reachable but has reported nothing about job {job_id} for "
            f"{silent:.0f} s; its last known state is {state}{why}"
        )

    def _known_job(self, job_id: JobId | None) -> JobId:
        """`job_id`, or the newest job's id, looked up once: a watch must not switch to a newer job."""
        known = job_id or self.invoke(GET_STATUS, GetStatusRequest()).job_id
        if known is None:
            raise UnknownJob(f"the coordinator at {self.address} has no job yet; submit one first")
        return known


def new_request_id() -> str:
    """A request id for `Submission`."""
    return uuid.uuid4().hex
