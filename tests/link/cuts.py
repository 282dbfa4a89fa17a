"""A cut to be linked, for tests and for the processes they start."""

from __future__ import annotations

from hetpipe.link.cut import Cut
from hetpipe.link.policy import LinkLimits
from hetpipe.values.ids import Incarnation, JobId, StageIndex, Term, VirtualWorkerIndex
from hetpipe.values.requests import Requester
from hetpipe.values.run import LinkTime

HOST = "127.0.0.1"
SECONDS = 20.0


def stage(index: int, *, vw: int = 3) -> Requester:
    return Requester(JobId("job-1"), Term(2), VirtualWorkerIndex(vw), Incarnation(4), StageIndex(index))


def earlier(limits: LinkLimits | None = None, *, vw: int = 3, pace: LinkTime | None = None) -> Cut:
    """The cut between stages 0 and 1, as stage 0 sees it."""
    return Cut(own=stage(0, vw=vw), neighbour=stage(1, vw=vw), limits=limits or LinkLimits(), pace=pace)


def later(limits: LinkLimits | None = None, *, vw: int = 3, pace: LinkTime | None = None) -> Cut:
    """The same as stage 1 sees it."""
    return earlier(limits, vw=vw, pace=pace).seen_from_there()
