"""The interface of allocations, which choose the devices of each virtual worker; each implementation is a sibling file.

Guarantees: no device is used twice; the plan is a function of cluster, profile and options; it fits in memory; among
the groupings that the allocation considers, no other has a higher job rate according to `decide.planner.jobs`. Only
`auto` leaves devices idle.
"""

from __future__ import annotations

from typing import Protocol

from hetpipe.decide.planner.jobs import JobPlan, Jobs


class Allocation(Protocol):
    """An allocation."""

    def __call__(self, jobs: Jobs) -> JobPlan:
        """The plan of this allocation.

        Args:
            jobs: evaluates groups of devices; holds cluster, profile and options.

        Raises:
            PlanError: the cluster does not suit this allocation, or the model does not fit its groups.
        """
        ...
