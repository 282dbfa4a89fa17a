"""Leader election: acquires and renews the lead in the store. Decisions are in `leadership`.

While it leads, one thread renews the lease and another watches its expiry, because a store call may outlast it.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable

from hetpipe.clock import Clock
from hetpipe.decide.lifecycle.leadership import (
    Decision,
    Event,
    Leadership,
    LeadershipState,
    LeadGranted,
    LeadRefused,
    NoAnswer,
    ShutdownRequested,
    TimePassed,
)
from hetpipe.errors import HetpipeError, NotLeader
from hetpipe.observe.log import get_logger
from hetpipe.storage.store import CandidateId, Fence, Lead, LeadStore
from hetpipe.values.leases import LEADER_LEASE_SECONDS

_log = get_logger(__name__)


class Candidate:
    """One candidate of the election. Call `run_for` once, then `end` once; methods in between are thread-safe."""

    def __init__(
        self,
        store: LeadStore,
        name: str,
        *,
        clock: Clock,
        on_lost: Callable[[str], None],
        lease_seconds: float = LEADER_LEASE_SECONDS,
    ) -> None:
        """Start on standby.

        Args:
            store: exclusive to this candidate; closed by `end`.
            name: human-readable name.
            clock: measures the lease.
            on_lost: called once, from a thread, with the reason, when the lead was lost; no action may follow.
            lease_seconds: duration of a lead without renewal.
        """
        self._store = store
        self._id = CandidateId(uuid.uuid4().hex)
        self._name = name
        self._clock = clock
        self._on_lost = on_lost
        self._lease_seconds = lease_seconds
        #: Guards the standing.
        self._lock = threading.Lock()
        self._leadership = Leadership(lease_seconds)
        self._logged: tuple[LeadershipState, str] | None = None
        #: Why it holds; empty unless it does.
        self._outage = ""
        #: Held by the thread that calls the store.
        self._requesting = threading.Lock()
        #: The lead granted by the store.
        self._lead: Lead | None = None
        #: Highest fence seen, and that of the newest own lead.
        self._highest = Fence(0)
        self._own = Fence(0)
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def fence(self) -> Fence:
        """Fence of the own lead, even after it ended; 0 before the first."""
        return self._own

    @property
    def outage(self) -> str:
        """See `Election.outage`."""
        return self._outage

    def run_for(self, give_up: threading.Event) -> bool:
        """Stay on standby until this coordinator leads; False if `give_up` is set before.

        Raises:
            HetpipeError: the first store call failed; later outages are tolerated.
        """
        decision = self._request_lead()
        while decision.standing is not LeadershipState.LEADING:
            if give_up.wait(self._leadership.retry_seconds):
                return False
            decision = self.request_lead()
        for target in (self._renew, self._watch):
            thread = threading.Thread(target=target, name=f"lead{target.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return True

    def raise_fence(self, fence: int) -> None:
        """Acquire the lead with a fence above `fence`, which a member has seen and the store has lost.

        Raises:
            NotLeader: another candidate won, or the lead is lost.
            StoreUnavailable: the store cannot be reached.
        """
        with self._requesting:
            if self._highest > fence:
                return
            lead = self._lead
            if lead is None:
                raise NotLeader("a member has seen a later coordinator")
            self._highest = Fence(fence)
            self._store.release_lead(lead)
            self._lead = None
            self._acquire()
        _log.warning("fence_raised", seen=fence, fence=self._highest)

    def request_lead(self) -> Decision:
        """Request the lead or its renewal from the store, once. Never raises."""
        try:
            return self._request_lead()
        except HetpipeError as error:
            return self._take(NoAnswer(str(error)))

    def check_lease(self) -> float:
        """Check the lease; return the seconds until the next check is due: its expiry if not renewed."""
        return self._take(TimePassed()).left_seconds or self._leadership.renew_seconds

    def end(self) -> None:
        """Step down and release the lead at once. No action may follow."""
        self._closing.set()
        for thread in self._threads:
            thread.join()
        self._take(ShutdownRequested())
        if self._lead is not None:
            try:
                self._store.release_lead(self._lead)
            except HetpipeError as error:
                _log.info("lead_not_released", reason=str(error))
        self._store.close()

    def _request_lead(self) -> Decision:
        requested = self._clock.monotonic()
        try:
            with self._requesting:
                self._hold(self._lead)
        except NotLeader as error:
            self._lead = None
            return self._take(LeadRefused(str(error)))
        return self._take(LeadGranted(requested))

    def _hold(self, lead: Lead | None) -> None:
        """Acquire or renew the lead."""
        if lead is None:
            self._acquire()
        else:
            self._store.renew_lead(lead, lease_seconds=self._lease_seconds)

    def _acquire(self) -> None:
        found = self._store.acquire_lead(self._id, self._name, above=self._highest, lease_seconds=self._lease_seconds)
        self._highest = max(self._highest, found.fence)
        if found.candidate != self._id:
            raise NotLeader(f"{found.name} has the lead")
        self._lead, self._own = found, found.fence

    def _take(self, event: Event) -> Decision:
        with self._lock:
            before = self._leadership.standing
            decision = self._leadership.take(event, now=self._clock.monotonic())
            if decision.standing is not LeadershipState.HOLDING:
                self._outage = ""
            elif before is not LeadershipState.HOLDING:
                self._outage = decision.reason
        self._log_decision(event, decision)
        if (
            before is LeadershipState.LEADING
            and decision.standing is LeadershipState.STEPPED_DOWN
            and not isinstance(event, ShutdownRequested)
        ):
            self._closing.set()
            self._on_lost(f"{self._name} has lost the lead: {decision.reason}")
        return decision

    def _log_decision(self, event: Event, decision: Decision) -> None:
        current = (decision.standing, decision.reason)
        if not isinstance(event, TimePassed) and current != self._logged:
            self._logged = current
            _log.info("leadership", standing=decision.standing, reason=decision.reason)

    def _renew(self) -> None:
        while not self._closing.wait(self._leadership.renew_seconds):
            self.request_lead()

    def _watch(self) -> None:
        while not self._closing.wait(self.check_lease()):
            pass
