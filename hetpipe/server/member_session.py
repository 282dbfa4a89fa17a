"""The membership of a process: registration, heartbeats from a thread, and a new registration after its loss."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hetpipe import failpoints
from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import Busy, HetpipeError, MemberReplaced, StaleTerm, Unavailable, UnknownMember
from hetpipe.observe.log import get_logger
from hetpipe.values.conditions import Condition
from hetpipe.values.ids import JobId
from hetpipe.values.leases import heartbeat_seconds
from hetpipe.values.members import Lease, MemberInfo, Registration
from hetpipe.values.run import ClockSnapshot
from hetpipe.wire.calls import HEARTBEAT, LEAVE, REGISTER, HeartbeatRequest, LeaveRequest, RegisterRequest
from hetpipe.wire.coordinator_client import CoordinatorClient
from hetpipe.wire.fencing import FenceGuard

_log = get_logger(__name__)

#: Seconds between two attempts to reach a coordinator that has not started yet.
_START_PAUSE_SECONDS = 0.2


def _no_clocks() -> Mapping[JobId, ClockSnapshot]:
    return {}


def _no_jobs() -> Sequence[JobId]:
    return ()


def _no_command() -> int:
    return 0


def _ignore_jobs(jobs: Sequence[JobId]) -> None:
    """Default hook of a member without jobs."""


def _nothing_new(info: MemberInfo) -> MemberInfo:
    return info


def _ignore_lease(lease: Lease) -> None:
    """Default hook of a member without state per registration."""


def _ignore_replacement(error: MemberReplaced) -> None:
    """Default hook of a member that continues without its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Callbacks of the heartbeat, called from its thread; they must return quickly."""

    clocks: Callable[[], Mapping[JobId, ClockSnapshot]] = _no_clocks
    """Clocks to report; clock shards only."""
    jobs: Callable[[], Sequence[JobId]] = _no_jobs
    """Jobs that the member serves."""
    lost: Callable[[], Mapping[JobId, str]] = dict
    """Jobs whose state on disk is missing or corrupted, with the reason; shards only."""
    conditions: Callable[[], Mapping[JobId, tuple[Condition, ...]]] = dict
    """Conditions of each job at this member, current and cleared; shards only."""
    last_command: Callable[[], int] = _no_command
    """Number of the last executed command; agents only."""
    on_ended_jobs: Callable[[Sequence[JobId]], None] = _ignore_jobs
    """Reported jobs that have ended or are unknown: stop serving them."""
    newest_info: Callable[[MemberInfo], MemberInfo] = _nothing_new
    """Current registration data, given that of the first registration; called before each registration."""
    on_registered: Callable[[Lease], None] = _ignore_lease
    """A new registration: the first one (called from `start`), and each one after the previous was lost."""
    on_replaced: Callable[[MemberReplaced], None] = _ignore_replacement
    """Another process registered under the name; no heartbeat follows, so the process should exit."""


class MemberSession:
    """The membership of one process. Start it once, close it once.

    An unreachable coordinator does not end it: heartbeats continue, and `silent_seconds` is the time since the last
    answer. Answers of a coordinator that no longer leads do not count.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        info: MemberInfo,
        *,
        hooks: Hooks | None = None,
        fences: FenceGuard | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Prepare the membership; nothing is sent yet.

        Args:
            client: connection to the coordinator.
            info: registration data.
            hooks: content of heartbeats, and handlers of their answers.
            fences: rejects answers with an old fence; shared with other connections to coordinators, if there are any.
            clock: measures time without an answer.
        """
        self._client = client
        self._info = info
        self._hooks = hooks or Hooks()
        self._fences = fences or FenceGuard()
        self._clock = clock
        self._wake = threading.Event()
        self._cancelled = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"heartbeat-{info.id}", daemon=True)
        #: The terms of the newest registration.
        self.lease = Lease(registration=Registration(""), lease_seconds=0.0, order=0)
        #: Whether the last answer came from the current leader.
        self.is_led = False
        self._last_answer = clock.monotonic()

    @property
    def info(self) -> MemberInfo:
        """The registered member."""
        return self._info

    @property
    def silent_seconds(self) -> float:
        """Time since the coordinator last answered."""
        return self._clock.monotonic() - self._last_answer

    def start(self, *, wait_seconds: float = 0.0) -> Lease:
        """Register, and start the heartbeats.

        Args:
            wait_seconds: timeout for a coordinator that is not reachable yet.

        Raises:
            HetpipeError: the registration failed; nothing was started.
        """
        deadline = self._clock.monotonic() + wait_seconds
        while True:
            try:
                lease = self._register()
                break
            except (Unavailable, Busy, StaleTerm):
                if self._cancelled.is_set() or self._clock.monotonic() >= deadline:
                    raise
                self._clock.sleep(_START_PAUSE_SECONDS)
        self._thread.start()
        return lease

    def cancel_start(self) -> None:
        """Abort a `start` that is waiting for the coordinator; no effect on an existing membership."""
        self._cancelled.set()

    def send_soon(self) -> None:
        """Send the next heartbeat immediately, to report a change."""
        self._wake.set()

    def abandon(self) -> None:
        """Stop the heartbeats without leaving, when the coordinator is unreachable."""
        self._closing.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def close(self) -> None:
        """Stop the heartbeats and leave the cluster. An unreachable coordinator is not an error."""
        self.abandon()
        try:
            self._client.invoke(LEAVE, LeaveRequest(self._info.id, self.lease.registration))
        except HetpipeError as error:
            _log.info("could_not_leave", member=self._info.id, reason=str(error))

    def beat(self) -> None:
        """Send one heartbeat. Errors of the coordinator or the network are logged, never raised."""
        registration = self.lease.registration
        try:
            renewal = self._client.invoke(
                HEARTBEAT,
                HeartbeatRequest(
                    self._info.id,
                    registration,
                    clocks=dict(self._hooks.clocks()),
                    jobs=tuple(self._hooks.jobs()),
                    last_command=self._hooks.last_command(),
                    lost=dict(self._hooks.lost()),
                    conditions=dict(self._hooks.conditions()),
                ),
            )
        except MemberReplaced as error:
            _log.error("member_replaced", member=self._info.id, reason=str(error))
            self._closing.set()
            self._hooks.on_replaced(error)
            return
        except UnknownMember as error:
            _log.warning("registering_again", member=self._info.id, reason=str(error))
            self._try_register()
            return
        except Unavailable as error:
            _log.warning("heartbeat_unanswered", member=self._info.id, reason=str(error))
            return
        except HetpipeError as error:
            self._last_answer = self._clock.monotonic()
            _log.warning("heartbeat_refused", member=self._info.id, reason=str(error))
            return
        try:
            self._check(renewal.fence)
        except StaleTerm as error:
            # If it is the leader and only the store lost the fence, this registration makes it acquire a higher one.
            _log.error("coordinator_leads_no_more", member=self._info.id, reason=str(error))
            self._try_register()
            return
        self._last_answer = self._clock.monotonic()
        if self.lease.registration == registration:
            self.lease = replace(self.lease, lease_seconds=renewal.lease_seconds)
        if renewal.ended_jobs:
            self._hooks.on_ended_jobs(renewal.ended_jobs)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(heartbeat_seconds(self.lease.lease_seconds))
            self._wake.clear()
            if self._closing.is_set():
                return
            try:
                self.beat()
            except Exception:  # noqa: BLE001 - an error of a hook must not cost the lease
                _log.exception("heartbeat_failed", member=self._info.id)

    def _try_register(self) -> None:
        try:
            self._register()
        except HetpipeError as error:
            _log.warning("not_registered", member=self._info.id, reason=str(error))

    def _register(self) -> Lease:
        info = replace(self._hooks.newest_info(self._info), highest_fence=self._fences.highest)
        lease = self._client.invoke(REGISTER, RegisterRequest(info))
        failpoints.reach("membership.published_not_seen")
        self._check(lease.fence)
        self._last_answer = self._clock.monotonic()
        # The hook adopts the new registration before it is visible to others.
        self._hooks.on_registered(lease)
        self.lease = lease
        # Only heartbeats report the jobs that are served.
        self._wake.set()
        return lease

    def _check(self, fence: int) -> None:
        """Accept the coordinator that answered, unless a newer fence has been seen.

        Raises:
            StaleTerm: a newer one has been seen.
        """
        try:
            self._fences.check(fence)
        except StaleTerm:
            self.is_led = False
            raise
        self.is_led = True
