"""`hetpipe repair store`: restores the counters and indexes of a store so that a coordinator can lead with it.

It acts as a coordinator under its own lead, which excludes other writers, and needs no additional permissions.
"""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass

from hetpipe.errors import UserError
from hetpipe.storage.redis_access import RedisAccess, is_redis
from hetpipe.storage.redis_store import RedisStore
from hetpipe.storage.store import CandidateId, Fence, Lead, Repairs
from hetpipe.values.counters import FENCES, TERMS, ControlCounter
from hetpipe.values.leases import LEADER_LEASE_SECONDS


@dataclass(frozen=True, slots=True)
class CounterRepair:
    """Old and new value of one counter."""

    name: str
    before: int | None
    """None: it was no number."""
    after: int

    @property
    def is_changed(self) -> bool:
        """Whether the repair changed the value."""
        return self.before != self.after


@dataclass(frozen=True, slots=True)
class StoreRepair:
    """Result of a repair: the counters and indexes repaired."""

    fence: CounterRepair
    term: CounterRepair
    records: Repairs

    def __bool__(self) -> bool:
        """Whether anything was repaired."""
        return self.fence.is_changed or self.term.is_changed or bool(self.records)


def repair_store(url: str, access: RedisAccess, *, fence: int | None = None, term: int | None = None) -> StoreRepair:
    """Repair the store at `url` while no coordinator leads.

    A counter that is not a number, or in the reserve above all valid reports, is reset: members report their highest
    values, as after a wipe of Redis.

    Args:
        url: store URL, as for a coordinator.
        access: credentials, as for a coordinator.
        fence: highest fence seen by any process; None: that of the store.
        term: highest term seen by any process; None: that of the store.

    Raises:
        UserError: it is not Redis, a coordinator leads, or a number is out of range.
        StoreUnavailable: it cannot be reached, or denies access.
    """
    if not is_redis(url):
        raise UserError(f"--store {url} outlives no coordinator; restart that one instead, or write --store redis://…")
    for counter, given in ((FENCES, fence), (TERMS, term)):
        if given is not None and not 0 <= given <= counter.largest_reported:
            raise UserError(f"{counter.option} {given} is not from 0 to {counter.largest_reported}")
    store = RedisStore(url, access=access)
    try:
        before = store.counters()
        fences, terms = _repaired(FENCES, before[0], fence), _repaired(TERMS, before[1], term)
        if fences.is_changed or terms.is_changed:
            store.set_counters(
                fence=fences.after if fences.is_changed else None, term=terms.after if terms.is_changed else None
            )
        lead = _lead(store)
        try:
            leader = RedisStore(url, access=access, fence=lambda: lead.fence)
            try:
                records = leader.repair()
            finally:
                leader.close()
        finally:
            store.release_lead(lead)
    finally:
        store.close()
    return StoreRepair(fences, terms, records)


def _repaired(counter: ControlCounter, before: int | None, wanted: int | None) -> CounterRepair:
    is_usable = before is not None and before <= counter.largest_reported
    after = wanted if wanted is not None else before if before is not None and is_usable else 0
    return CounterRepair(counter.name, before, after)


def _lead(store: RedisStore) -> Lead:
    """Acquire the lead for this process.

    Raises:
        UserError: a coordinator holds it.
    """
    own = CandidateId(uuid.uuid4().hex)
    name = f"`hetpipe repair store` on {socket.gethostname()} with pid {os.getpid()}"
    lead = store.acquire_lead(own, name, above=Fence(0), lease_seconds=LEADER_LEASE_SECONDS)
    if lead.candidate != own:
        raise UserError(
            f"{lead.name} leads with this store; stop it, and every standby coordinator, and repeat the command "
            "(the lead of one that was killed lasts a few seconds)"
        )
    return lead
