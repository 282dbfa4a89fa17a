"""Which devices form which virtual worker? The question; each answer is one sibling file.

Guarantees of every answer: no device is used twice; the same cluster, profile and options give the same plan; the plan
fits in memory; among the groupings that the answer considers, no other has a higher job rate as `decide.planner.jobs`
judges it. Only `auto` leaves devices idle.
"""

from __future__ import annotations

from typing import Protocol

from hetpipe.decide.planner.jobs import JobPlan, Jobs


class Allocation(Protocol):
    """One answer."""

    def __call__(self, jobs: Jobs) -> JobPlan:
        """The plan of this answer.

        Args:
            jobs: judges groups of devices, knows cluster, profile and options.

        Raises:
            PlanError: the cluster is not made for this answer, or the model does not fit its groups.
        """
        ...
