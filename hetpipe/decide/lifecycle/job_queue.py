"""The queue of jobs that wait for members: whose turn it is. Pure.

First in, first out: nobody overtakes a job that comes before it, also not a smaller one for which there is room. There
is one exception: a job that needs more than all registered members have holds nobody up, as nobody knows whether those
will ever register. It keeps its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetpipe.decide.lifecycle.requirements import ClusterView, could_fit
from hetpipe.job.file import Job
from hetpipe.values.ids import JobId


@dataclass(frozen=True, slots=True)
class Turn:
    """Where one job stands in the queue."""

    position: int = 1
    """Among all that wait; 1 is the oldest."""
    behind: JobId | None = None
    """Who goes first; None: nobody does."""


def turns(waiting: Sequence[tuple[JobId, Job]], cluster: ClusterView) -> list[Turn]:
    """Where each job stands.

    Args:
        waiting: the jobs that wait, oldest first.
        cluster: what is there for them. While members may still be on their way (`is_settled`), nobody knows what they
            will have in all, and nobody overtakes anybody.
    """
    found, first = [], None
    for position, (job_id, job) in enumerate(waiting, start=1):
        found.append(Turn(position, first))
        if first is None and (not cluster.is_settled or could_fit(job, cluster)):
            first = job_id
    return found
