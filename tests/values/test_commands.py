"""Which processes an order to end a virtual worker is about."""

from __future__ import annotations

import pytest

from hetpipe.values.commands import StageKey, StopVirtualWorkerCommand
from hetpipe.values.ids import Incarnation, JobId, StageIndex, Term, VirtualWorkerIndex

JOB = JobId("job")


@pytest.mark.parametrize(
    ("term", "life", "is_meant"),
    [(2, 1, True), (2, 0, True), (1, 7, True), (2, 2, False), (3, 0, False)],
    ids=["itself", "an earlier life", "any life of an earlier term", "a later life", "a life of a later term"],
)
def test_lives_up_to_it_end(term: int, life: int, *, is_meant: bool) -> None:
    stop = StopVirtualWorkerCommand(JOB, VirtualWorkerIndex(1), Incarnation(1), Term(2))
    key = StageKey(JOB, VirtualWorkerIndex(1), StageIndex(0), Incarnation(life), Term(term))
    assert stop.means(key) is is_meant


@pytest.mark.parametrize(("job", "vw"), [("other", 1), ("job", 0)])
def test_others_do_not(job: str, vw: int) -> None:
    stop = StopVirtualWorkerCommand(JOB, VirtualWorkerIndex(1), Incarnation(1), Term(2))
    assert not stop.means(StageKey(JobId(job), VirtualWorkerIndex(vw), StageIndex(0), Incarnation(0), Term(1)))
