"""Clients of a coordinator: `Client` for users, `CoordinatorClient` with every call for hetpipe itself."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import MemberReplaced, UnknownJob, UserError
from hetpipe.server.member_session import Hooks, MemberSession
from hetpipe.values.ids import Clock as WaveClock
from hetpipe.values.ids import JobId, VirtualWorkerIndex
from hetpipe.values.members import Lease, Member, MemberId, MemberInfo, MemberRole
from hetpipe.values.run import ClockSnapshot
from hetpipe.wire.calls import GET_CLOCKS, LIST_MEMBERS, GetClocksRequest, ListMembersRequest
from hetpipe.wire.coordinator_client import CoordinatorClient
from hetpipe.wire.tls import Tls, tls_from_environment

__all__ = ["Client", "CoordinatorClient", "RegisteredWorker", "new_request_id"]


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
        return self._calls.invoke(LIST_MEMBERS, ListMembersRequest()).members

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


def _job(job_id: str | None) -> JobId | None:
    return None if job_id is None else JobId(job_id)


def new_request_id() -> str:
    """A request id for `Submission`."""
    return uuid.uuid4().hex
