"""A membership kept alive: registers, sends heartbeats from a thread, and registers again when it was forgotten."""

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

#: Seconds between two attempts to reach a coordinator that is not there yet.
_START_PAUSE_SECONDS = 0.2


def _no_clocks() -> Mapping[JobId, ClockSnapshot]:
    return {}


def _no_jobs() -> Sequence[JobId]:
    return ()


def _no_command() -> int:
    return 0


def _ignore_jobs(jobs: Sequence[JobId]) -> None:
    """Nothing is done for any job."""


def _nothing_new(info: MemberInfo) -> MemberInfo:
    return info


def _ignore_lease(lease: Lease) -> None:
    """Nothing depends on the registration."""


def _ignore_replacement(error: MemberReplaced) -> None:
    """Being listed no more hurts nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Callbacks of the heartbeat. All are called from the heartbeat's thread and must return soon."""

    clocks: Callable[[], Mapping[JobId, ClockSnapshot]] = _no_clocks
    """The clocks to tell; of clock shards."""
    jobs: Callable[[], Sequence[JobId]] = _no_jobs
    """The jobs the member does something for."""
    lost: Callable[[], Mapping[JobId, str]] = dict
    """The jobs of which what was kept on disk is gone or damaged, and why; of shards."""
    conditions: Callable[[], Mapping[JobId, tuple[Condition, ...]]] = dict
    """By job, what endangers it at this member, or has; of shards."""
    last_command: Callable[[], int] = _no_command
    """Number of the last command carried out; of agents."""
    on_ended_jobs: Callable[[Sequence[JobId]], None] = _ignore_jobs
    """Jobs of those told that have ended or are unknown: stop what is done for them."""
    newest_info: Callable[[MemberInfo], MemberInfo] = _nothing_new
    """What to tell of the process when it registers, now or again, from what was told of it at first."""
    on_registered: Callable[[Lease], None] = _ignore_lease
    """A new registration: at the start (then from `start`), and whenever the old one was forgotten."""
    on_replaced: Callable[[MemberReplaced], None] = _ignore_replacement
    """Another process has the name now; no heartbeat follows, so the process should end."""


class MemberSession:
    """Keeps one process a member. Start it once, close it once.

    Losing the coordinator ends nothing: heartbeats go on, and `silent_seconds` tells for how long nobody answered. What
    a coordinator says that leads no more is no answer.
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
        """Prepare everything; nothing is sent yet.

        Args:
            client: the connection to the coordinator.
            info: what to register.
            hooks: what to tell and whom.
            fences: which coordinators may give orders, for a process that hears of them elsewhere, too.
            clock: measures the silence.
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
        #: Whether the coordinator that answered last may give orders.
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
        """Register, and keep the lease from now on.

        Args:
            wait_seconds: how long to wait for a coordinator that cannot be reached yet.

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
        """Let a `start` that waits for the coordinator give up; a membership that has begun goes on until `close`."""
        self._cancelled.set()

    def beat_soon(self) -> None:
        """Send the next heartbeat at once, because there is something to tell."""
        self._wake.set()

    def abandon(self) -> None:
        """Stop the heartbeats without leaving: the coordinator is lost anyway."""
        self._closing.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def close(self) -> None:
        """Stop the heartbeats and leave. A coordinator that is away does not matter."""
        self.abandon()
        try:
            self._client.invoke(LEAVE, LeaveRequest(self._info.id, self.lease.registration))
        except HetpipeError as error:
            _log.info("could_not_leave", member=self._info.id, reason=str(error))

    def beat(self) -> None:
        """One heartbeat. Never raises for what the coordinator or the network does."""
        try:
            renewal = self._client.invoke(
                HEARTBEAT,
                HeartbeatRequest(
                    self._info.id,
                    self.lease.registration,
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
            # If it does lead, and only the number is lost, it takes a higher one now.
            _log.error("coordinator_leads_no_more", member=self._info.id, reason=str(error))
            self._try_register()
            return
        self._last_answer = self._clock.monotonic()
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
            except Exception:  # noqa: BLE001 - a hook's mistake must not cost the lease
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
        # Whoever depends on the registration is ready for the new one before anybody can use it.
        self._hooks.on_registered(lease)
        self.lease = lease
        # Only a heartbeat tells which jobs are served.
        self._wake.set()
        return lease

    def _check(self, fence: int) -> None:
        """Obey the coordinator that answered, unless a later one has been heard.

        Raises:
            StaleTerm: a later one has.
        """
        try:
            self._fences.check(fence)
        except StaleTerm:
            self.is_led = False
            raise
        self.is_led = True
