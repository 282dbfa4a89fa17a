"""explicit: the user specifies the devices of every virtual worker; the planner optimises everything else."""

from __future__ import annotations

from collections import Counter

from hetpipe.decide.planner.jobs import JobPlan, Jobs
from hetpipe.errors import PlanError
from hetpipe.values.suggest import did_you_mean


def explicit(jobs: Jobs) -> JobPlan:
    """The plan with the given virtual workers.

    Raises:
        PlanError: no devices are given, one is unknown or duplicate, or the model does not fit.
    """
    workers = jobs.options.workers
    if not workers or not all(workers):
        raise PlanError("the allocation explicit needs the devices of each virtual worker; give --workers")
    for device, times in Counter(device for worker in workers for device in worker).items():
        if device not in jobs.devices:
            raise PlanError(f"--workers names the unknown device {device}; {did_you_mean(device, jobs.devices)}")
        if times > 1:
            raise PlanError(f"--workers names the device {device} {times} times; a device has one stage at most")
    return jobs.best(workers)
