"""Shards in the same process: no sockets, the same objects and the same bytes. For tests and for one-process runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hetpipe import failpoints
from hetpipe.decide.sync.records import Record
from hetpipe.server.shard.job_shard import JobShard
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
    Watermarks,
)
from hetpipe.values.sync import Progress

#: Longest wait for new records before `follow` ends and the caller follows again.
_FOLLOW_SECONDS = 0.1


class InProcessShard:
    """A `ShardTransport` to a shard of this process."""

    def __init__(self, job_shard: JobShard) -> None:
        self._shard = job_shard.shard

    def push(self, header: PushHeader, chunks: Iterable[bytes]) -> PushReply:
        """See `ShardTransport.push`."""
        session = self._shard.begin_push(header)
        if isinstance(session, Watermarks):
            return PushReply(duplicate=True, marks=session)
        for chunk in failpoints.passing("push", chunks):
            session.write(chunk)
        marks = session.finish()
        failpoints.reach("push.after_stage")
        return PushReply(duplicate=False, marks=marks)

    def pull(self, header: PullHeader) -> Iterator[bytes]:
        """See `ShardTransport.pull`."""
        with self._shard.pull(header) as chunks:
            yield from failpoints.passing("pull", chunks)

    def close(self) -> None:
        """Nothing to free."""


class InProcessClock:
    """A `ClockTransport` to the clock shard of this process."""

    def __init__(self, job_shard: JobShard) -> None:
        self._job = job_shard
        self._clock = job_shard.clock_shard
        self._closed = False

    def join(
        self, requester: Requester, link_address: str = "", replicas_address: str = "", *, ready: bool = True
    ) -> Meeting:
        """See `ClockTransport.join`."""
        return self._clock.join(requester, link_address, replicas_address, ready=ready)

    def initialized(self, requester: Requester) -> None:
        """See `ClockTransport.initialized`."""
        self._clock.initialized(requester)

    def staged(self, requester: Requester, wave: Wave, blocks: Blocks | None, *, segment: Clock) -> None:
        """See `ClockTransport.staged`."""
        self._clock.staged(requester, wave, blocks, segment=segment)

    def hold(self, requester: Requester, switch: int) -> tuple[Clock, Clock]:
        """See `ClockTransport.hold`."""
        return self._clock.hold(requester, switch)

    def progress(self, requester: Requester) -> Progress:
        """See `ClockTransport.progress`."""
        self._clock.check_requester(requester)
        return self._clock.progress()

    def follow(self, start: int, *, gathered: bool = False) -> Iterator[Sequence[Record]]:
        """See `ClockTransport.follow`."""
        bell = self._clock.news if gathered else self._clock.bell
        with bell:
            bell.wait_for(lambda: self._closed or self._clock.records_from(start), timeout=_FOLLOW_SECONDS)
            records = self._clock.records_from(start)
        if records:
            yield records

    def acknowledge(
        self, shard: ShardIndex, num_records: int, durable: int | None = None, *, applied: bool = False
    ) -> None:
        """See `ClockTransport.acknowledge`."""
        self._clock.acknowledge(shard, num_records, durable, applied=applied)

    def report_checkpoint(
        self, requester: Requester, clock: Clock, files: Sequence[CheckpointFile], *, failure: str = ""
    ) -> bool:
        """See `ClockTransport.report_checkpoint`."""
        self._clock.check_requester(requester)
        self._job.keeper.follow(*self._clock.passed())  # the thread that follows the log may be behind
        return self._job.keeper.report(requester, clock, files, failure=failure)

    def report_shard_checkpoint(
        self, shard: ShardIndex, clock: Clock, files: Sequence[CheckpointFile], *, failure: str = ""
    ) -> bool:
        """See `ClockTransport.report_shard_checkpoint`."""
        self._job.keeper.follow(*self._clock.passed())
        return self._job.keeper.report_shard(shard, clock, files, failure=failure)

    def push_buffers(self, header: BuffersHeader, chunks: Iterable[bytes]) -> None:
        """See `ClockTransport.push_buffers`."""
        self._clock.check_requester(header.requester)
        receiver, buffer = self._job.buffers.receive(header)
        for chunk in chunks:
            receiver.write(chunk)
        receiver.finish()
        self._job.buffers.sent(header, buffer)

    def pull_buffers(self, header: BuffersHeader) -> Iterator[bytes]:
        """See `ClockTransport.pull_buffers`."""
        self._clock.check_requester(header.requester)
        yield from self._job.buffers.stream(header)

    def close(self) -> None:
        """Who follows waits no longer."""
        self._closed = True
        with self._clock.bell:  # the lock of both
            self._clock.bell.notify_all()
            self._clock.news.notify_all()
