"""A coordinator in the election: acquires and renews the lead in the store. Decisions are in `leadership`.

While it leads, one thread renews the lease and another watches its end, because a question to the store may outlast it.
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
    LeadGranted,
    LeadRefused,
    NoAnswer,
    ShutdownRequested,
    Standing,
    TimePassed,
)
from hetpipe.errors import HetpipeError, NotLeader
from hetpipe.observe.log import get_logger
from hetpipe.storage.store import CandidateId, Fence, Lead, LeadStore
from hetpipe.values.leases import LEADER_LEASE_SECONDS

_log = get_logger(__name__)


class Candidate:
    """One candidate of the election. `run_for` once, then `end` once; methods in between are thread-safe."""

    def __init__(
        self,
        store: LeadStore,
        name: str,
        *,
        clock: Clock,
        on_lost: Callable[[str], None],
        lease_seconds: float = LEADER_LEASE_SECONDS,
    ) -> None:
        """Stand by.

        Args:
            store: of its own: used only for the lead, and closed by `end`.
            name: for people.
            clock: measures the lease.
            on_lost: called once, from a thread, with a sentence, when the lead was lost; nothing may act after that.
            lease_seconds: how long a lead lasts without renewal.
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
        self._told: tuple[Standing, str] | None = None
        #: Why it holds; empty unless it does.
        self._outage = ""
        #: Held by the thread that calls the store.
        self._asking = threading.Lock()
        #: The lead granted by the store.
        self._lead: Lead | None = None
        #: Highest fence seen, and that of the newest own lead.
        self._highest = Fence(0)
        self._own = Fence(0)
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def fence(self) -> Fence:
        """The fence of the own lead, also when it is over; 0 before there was one."""
        return self._own

    @property
    def outage(self) -> str:
        """As `Election.outage`."""
        return self._outage

    def run_for(self, give_up: threading.Event) -> bool:
        """Stand by until this coordinator leads; False when `give_up` is set before.

        Raises:
            HetpipeError: the store did not answer the first time; later on it may be away.
        """
        decision = self._ask()
        while decision.standing is not Standing.LEADING:
            if give_up.wait(self._leadership.retry_seconds):
                return False
            decision = self.ask()
        for target in (self._renew, self._watch):
            thread = threading.Thread(target=target, name=f"lead{target.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return True

    def outbid(self, fence: int) -> None:
        """Lead with a higher fence than `fence`, which a member has seen: the store has forgotten it.

        Raises:
            NotLeader: another one was faster, or this coordinator leads no more.
            StoreUnavailable: the store is away.
        """
        with self._asking:
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

    def ask(self) -> Decision:
        """Request the lead or its renewal from the store, once. Never raises."""
        try:
            return self._ask()
        except HetpipeError as error:
            return self._take(NoAnswer(str(error)))

    def look(self) -> float:
        """Look at the clock; seconds until the next look is due: when the lease is over, if nothing renews it."""
        return self._take(TimePassed()).left_seconds or self._leadership.renew_seconds

    def end(self) -> None:
        """Step down and let another one lead at once. Nothing may act any more."""
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

    def _ask(self) -> Decision:
        asked = self._clock.monotonic()
        try:
            with self._asking:
                self._hold(self._lead)
        except NotLeader as error:
            self._lead = None
            return self._take(LeadRefused(str(error)))
        return self._take(LeadGranted(asked))

    def _hold(self, lead: Lead | None) -> None:
        """Have the lead renewed, or get it."""
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
            if decision.standing is not Standing.HOLDING:
                self._outage = ""
            elif before is not Standing.HOLDING:
                self._outage = decision.reason
        self._tell(event, decision)
        if (
            before is Standing.LEADING
            and decision.standing is Standing.STEPPED_DOWN
            and not isinstance(event, ShutdownRequested)
        ):
            self._closing.set()
            self._on_lost(f"{self._name} leads no more: {decision.reason}")
        return decision

    def _tell(self, event: Event, decision: Decision) -> None:
        told = (decision.standing, decision.reason)
        if not isinstance(event, TimePassed) and told != self._told:
            self._told = told
            _log.info("leadership", standing=decision.standing, reason=decision.reason)

    def _renew(self) -> None:
        while not self._closing.wait(self._leadership.renew_seconds):
            self.ask()

    def _watch(self) -> None:
        while not self._closing.wait(self.look()):
            pass
