"""Terms that members report: above what the store knows only as far as `ControlCounter.check_report` accepts."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from hetpipe.errors import ProtocolViolation
from hetpipe.storage.store import Store
from hetpipe.values.counters import TERMS
from hetpipe.values.ids import JobId
from hetpipe.values.members import MemberId, MemberInfo, MemberRole
from hetpipe.values.run import ClockSnapshot
from hetpipe.values.run_document import RunDescription

#: Restarts of one virtual worker: it is given up after a few in a row, and a restart takes seconds.
_MAX_INCARNATION = 1_000_000


class Terms:
    """What is known of the highest term. Thread-safe."""

    def __init__(self, store: Store) -> None:
        """Begin with what the store knows.

        Raises:
            StoreUnavailable: it cannot be reached.
            StoreDamaged: it holds no number.
        """
        self._store = store
        self._lock = threading.Lock()
        self._known = store.term()

    def meet(self, info: MemberInfo) -> None:
        """Hold the term that a process reports to what there can be; before it is made a member.

        Raises:
            ProtocolViolation: it is too far ahead.
            StoreUnavailable, StoreDamaged: as above.
        """
        if info.role is not MemberRole.WORKER and info.highest_term > self._known:
            self._learn()
            TERMS.check_report(info.highest_term, known=self._known, source=info)

    def check_clocks(self, clocks: Mapping[JobId, ClockSnapshot], source: MemberId) -> None:
        """Hold the terms of a heartbeat to what there can be. The store is not asked: it may be away.

        Raises:
            ProtocolViolation: one is too far ahead.
        """
        for snapshot in clocks.values():
            TERMS.check_report(snapshot.term, known=self._known, source=source)

    def check_description(self, description: RunDescription, source: MemberInfo) -> None:
        """Hold what a clock shard tells of a job to what there can be, before the job is adopted.

        The next term goes beyond the job's, and the next incarnation of a virtual worker beyond its newest.

        Raises:
            ProtocolViolation: a number is too far ahead.
            StoreUnavailable, StoreDamaged: as above.
        """
        term = max(description.term, description.run.plan.term)
        if term > self._known:
            self._learn()
            TERMS.check_report(term, known=self._known, source=source)
        for life in description.lives:
            if life.incarnation > _MAX_INCARNATION:
                raise ProtocolViolation(
                    f"{source} tells of incarnation {life.incarnation} of virtual worker {life.vw}; no job gets beyond "
                    f"{_MAX_INCARNATION}"
                )

    def _learn(self) -> None:
        term = self._store.term()
        with self._lock:
            self._known = max(self._known, term)
