"""Who was asked to stay out is kept by the clock shard, so that no later coordinator starts them anew. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from hetpipe.decide.elastic.worker_life import WorkerLife
from hetpipe.decide.lifecycle.configs import Assignment
from hetpipe.decide.lifecycle.exchange import KeepOut, KeptOut
from hetpipe.values.ids import VirtualWorkerIndex


class Outs:
    """What the clock shard has been told of it. Not thread-safe; every call gives the monotonic time."""

    def __init__(self, kept: Iterable[VirtualWorkerIndex], *, retry_seconds: float) -> None:
        """Begin with what it has `kept`; after a failure it is asked again in `retry_seconds`."""
        self._kept = frozenset(kept)
        self._retry_seconds = retry_seconds
        self._is_asked = False
        self._ask_at = 0.0

    def order(self, workers: Iterable[WorkerLife], assignment: Assignment, *, now: float) -> list[KeepOut]:
        """What to tell it now: one order at a time, and none while it knows."""
        wanted = frozenset(worker.vw for worker in workers if worker.stays_out)
        if wanted == self._kept or self._is_asked or now < self._ask_at:
            return []
        self._is_asked = True
        return [KeepOut(tuple(sorted(wanted)), assignment.plan.term, assignment.shards[0])]

    def answered(self, answer: KeptOut, *, now: float) -> None:
        """It has kept them, or could not be told."""
        self._is_asked = False
        if answer.is_kept:
            self._kept = frozenset(answer.out)
        else:
            self._ask_at = now + self._retry_seconds
