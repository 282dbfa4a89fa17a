"""`hetpipe.Client` and `hetpipe.AsyncClient`: a running cluster from a Python program."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.code_archive import pack
from hetpipe.errors import MemberReplaced, UnknownJob, UserError
from hetpipe.runs.requests import JobSource, given_run
from hetpipe.runs.shell import Shell
from hetpipe.runs.training import hand_in
from hetpipe.server.member_session import Hooks, MemberSession
from hetpipe.values.events import JobEvent, JobStatus, StopMode
from hetpipe.values.ids import Clock as WaveClock
from hetpipe.values.ids import JobId, VirtualWorkerIndex
from hetpipe.values.members import Lease, Member, MemberId, MemberInfo, MemberRole
from hetpipe.values.run import ClockSnapshot
from hetpipe.wire.calls import (
    GET_CLOCKS,
    GET_STATUS,
    STOP_JOB,
    GetClocksRequest,
    GetStatusRequest,
    StopJobRequest,
)
from hetpipe.wire.coordinator_client import CoordinatorClient, all_members
from hetpipe.wire.tls import Tls, tls_from_environment

__all__ = ["AsyncClient", "Client", "RegisteredWorker"]

ItemT = TypeVar("ItemT")


class RegisteredWorker:
    """A worker that stays registered until `close`, the end of a `with` block, or the loss of its name.

    The name is lost if another process registers it. A callback passed to `register_worker` is then called; without
    one, `check`, `lease` and the end of the `with` block raise the exception.
    """

    def __init__(self, membership: MemberSession, loss: _Loss) -> None:
        self._membership = membership
        self._loss = loss

    @property
    def id(self) -> MemberId:
        """Its member id."""
        return self._membership.info.id

    @property
    def lease(self) -> Lease:
        """The lease of its newest registration.

        Raises:
            MemberReplaced: as in `check`.
        """
        self.check()
        return self._membership.lease

    def check(self) -> None:
        """Check that this process still has the name, according to the last heartbeat.

        Raises:
            MemberReplaced: another process has registered the name, and there is no callback.
        """
        if self._loss.error is not None and self._loss.on_lost is None:
            raise self._loss.error

    def close(self) -> None:
        """End the membership."""
        self._membership.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
        if error is None:
            self.check()


class _Loss:
    """The loss of a worker's name. Set once, however many heartbeats detect it."""

    def __init__(self, on_lost: Callable[[MemberReplaced], None] | None) -> None:
        self.on_lost = on_lost
        self.error: MemberReplaced | None = None
        self._lock = threading.Lock()

    def take(self, error: MemberReplaced) -> None:
        """Record the loss of the name."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
        if self.on_lost is not None:
            self.on_lost(error)


class Client:
    """A connection to a cluster for user programs. Thread-safe; close it, or use it in a `with` block.

    Methods take a job id; the default is the newest job. They raise `PeerUnreachable` or `DeadlineExceeded` if the
    coordinator is unavailable, and `UnknownJob` if there is no such job.
    """

    def __init__(self, address: str, *, tls: str | Path | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        """Connect on first use.

        Args:
            address: `HOST:PORT` of the coordinator.
            tls: folder with the certificates of an operator, as written by `hetpipe certs issue`; None: the folder in
                the environment variable `HETPIPE_TLS`, or plaintext if it is not set.
            clock: source of time, for tests.

        Raises:
            UserError: the address is malformed, or the folder is unusable.
        """
        self._calls = CoordinatorClient(
            address, tls=tls_from_environment(os.environ) if tls is None else Tls(Path(tls)), clock=clock
        )
        self._clock = clock

    def close(self) -> None:
        """Close the connection, and end watches on it."""
        self._calls.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def register_worker(
        self, name: str, *, address: str = "", on_lost: Callable[[MemberReplaced], None] | None = None
    ) -> RegisteredWorker:
        """Register this process as a member named `name`, and renew the membership from a thread.

        Args:
            name: shown in `members`; of several processes with one name, the last to register keeps it.
            address: `HOST:PORT` of a server of the caller, listed for other members.
            on_lost: called once, in that thread, when another process has registered the name; without it, an
                exception is raised (`RegisteredWorker`).
        """
        if not name:
            raise UserError("a worker needs a name")
        info = MemberInfo(MemberRole.WORKER, MemberId(name), socket.gethostname(), os.getpid(), address)
        loss = _Loss(on_lost)
        membership = MemberSession(self._calls, info, hooks=Hooks(on_replaced=loss.take), clock=self._clock)
        membership.start()
        return RegisteredWorker(membership, loss)

    def members(self) -> tuple[Member, ...]:
        """The live members in order of registration."""
        return all_members(self._calls)

    def submit(
        self,
        job: JobSource | None = None,
        *,
        run_dir: str | Path | None = None,
        resume: str | Path | None = None,
        send_code: bool = False,
        **overrides: object,
    ) -> JobId:
        """Submit a job, as `hetpipe submit --detach` does, and return its id without waiting for anything.

        Args:
            job: as for `hetpipe.train`; functions and classes are imported again by the cluster's agents.
            run_dir: folder for the run, new or empty; by default `runs/NAME-TIME`. All nodes must have it under this
                path, unless the job has `storage`.
            resume: folder or URL of a run to continue from its newest checkpoint.
            send_code: send the Python files of the folder along that the functions come from, for agents that accept
                code.
            overrides: keys of the job, or those of `job` to change.

        Raises:
            UserError: the job, something it refers to, or an argument is invalid.
        """
        shell = Shell(clock=self._clock)
        request, folder = given_run(
            job, overrides, run_dir=run_dir, resume=resume, coordinator=self._calls.address, shell=shell
        )
        code = pack(request.import_path) if send_code else None
        return hand_in(replace(request, detaches=True, code=code), folder, self._calls, shell)

    def stop(self, job_id: str | None = None, *, now: bool = False) -> JobStatus:
        """Request that a job stops, and return its status then; `events` reports when it has.

        It stops at the next barrier, with a checkpoint; with `now` immediately, without one. A job that has ended is
        left alone.

        Raises:
            UnknownJob: there is no such job.
        """
        status = self.status(job_id)
        if status.state is None:
            raise UnknownJob(f"the coordinator at {self._calls.address} has no job yet: there is nothing to stop")
        if not status.state.is_terminal:
            mode = StopMode.NOW if now else StopMode.CHECKPOINT
            self._calls.invoke(STOP_JOB, StopJobRequest(mode, status.job_id))
        return self.status(status.job_id)

    def status(self, job_id: str | None = None) -> JobStatus:
        """State, clocks, progress, virtual workers and conditions of a job; `state` is None if there is no job yet."""
        return self._calls.invoke(GET_STATUS, GetStatusRequest(_job(job_id)))

    def events(self, job_id: str | None = None) -> Iterator[JobEvent]:
        """Yield the events of a job, those that the coordinator still has first, until the last one, `JobEnded`.

        Blocks in between.

        Raises:
            NobodyLeads: the coordinator is reachable, but no process has reported about the job for minutes.
        """
        return (numbered.event for numbered in self._calls.watch_job(_job(job_id)))

    def clocks(self, job_id: str | None = None) -> ClockSnapshot:
        """All clocks of a job.

        Raises:
            UnknownJob: there is no such job, or it has no clocks yet.
        """
        clocks = self._calls.invoke(GET_CLOCKS, GetClocksRequest(_job(job_id))).clocks
        if clocks is None:
            raise UnknownJob(f"job {job_id or '(the newest)'} has no clocks yet; watch_clocks waits for them")
        return clocks

    def local_clock(self, vw: int, job_id: str | None = None) -> WaveClock:
        """Waves that virtual worker `vw` has committed.

        Raises:
            UserError: the job has no such virtual worker.
        """
        clocks = self.clocks(job_id)
        local = clocks.local.get(VirtualWorkerIndex(vw))
        if local is None:
            raise UserError(f"virtual worker {vw} is not one of {sorted(clocks.local)}")
        return local

    def global_clock(self, job_id: str | None = None) -> WaveClock:
        """Waves that every virtual worker has committed."""
        return self.clocks(job_id).global_clock

    def watch_clocks(self, job_id: str | None = None) -> Iterator[ClockSnapshot]:
        """Yield the clocks now and after every change, until the job has ended. Blocks in between."""
        return self._calls.watch_clocks(_job(job_id))


class AsyncClient:
    """`Client` for asyncio: the same methods, which wait in threads and do not block the event loop.

    Close it, or use it in an `async with` block. Closing it ends all calls; a cancelled task leaves its call running
    until then.
    """

    def __init__(self, address: str, *, tls: str | Path | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        """As `Client`."""
        self._client = Client(address, tls=tls, clock=clock)

    async def close(self) -> None:
        """As `Client.close`."""
        await asyncio.to_thread(self._client.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def register_worker(
        self, name: str, *, address: str = "", on_lost: Callable[[MemberReplaced], None] | None = None
    ) -> RegisteredWorker:
        """As `Client.register_worker`; `on_lost` is called in another thread."""
        return await asyncio.to_thread(self._client.register_worker, name, address=address, on_lost=on_lost)

    async def members(self) -> tuple[Member, ...]:
        """As `Client.members`."""
        return await asyncio.to_thread(self._client.members)

    async def submit(
        self,
        job: JobSource | None = None,
        *,
        run_dir: str | Path | None = None,
        resume: str | Path | None = None,
        send_code: bool = False,
        **overrides: object,
    ) -> JobId:
        """As `Client.submit`."""
        submit = partial(self._client.submit, job, run_dir=run_dir, resume=resume, send_code=send_code, **overrides)
        return await asyncio.to_thread(submit)

    async def stop(self, job_id: str | None = None, *, now: bool = False) -> JobStatus:
        """As `Client.stop`."""
        return await asyncio.to_thread(self._client.stop, job_id, now=now)

    async def status(self, job_id: str | None = None) -> JobStatus:
        """As `Client.status`."""
        return await asyncio.to_thread(self._client.status, job_id)

    def events(self, job_id: str | None = None) -> AsyncIterator[JobEvent]:
        """As `Client.events`."""
        return _in_thread(partial(self._client.events, job_id))

    async def clocks(self, job_id: str | None = None) -> ClockSnapshot:
        """As `Client.clocks`."""
        return await asyncio.to_thread(self._client.clocks, job_id)

    async def local_clock(self, vw: int, job_id: str | None = None) -> WaveClock:
        """As `Client.local_clock`."""
        return await asyncio.to_thread(self._client.local_clock, vw, job_id)

    async def global_clock(self, job_id: str | None = None) -> WaveClock:
        """As `Client.global_clock`."""
        return await asyncio.to_thread(self._client.global_clock, job_id)

    def watch_clocks(self, job_id: str | None = None) -> AsyncIterator[ClockSnapshot]:
        """As `Client.watch_clocks`."""
        return _in_thread(partial(self._client.watch_clocks, job_id))


async def _in_thread(make: Callable[[], Iterator[ItemT]]) -> AsyncIterator[ItemT]:
    """Iterate in a thread of its own: threads of the loop's pool are few, and this one blocks for minutes."""
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hetpipe-watch")
    try:
        iterator = await loop.run_in_executor(thread, make)
        while True:
            items = await loop.run_in_executor(thread, lambda: list(islice(iterator, 1)))
            if not items:
                return
            yield items[0]
    finally:
        thread.shutdown(wait=False)


def _job(job_id: str | None) -> JobId | None:
    return None if job_id is None else JobId(job_id)
