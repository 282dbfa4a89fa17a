"""Which layers on which device, in which order, so that the slowest stage is as fast as possible. Exact."""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe.decide.planner.costs import Costs, MemoryModel
from hetpipe.decide.planner.min_max_shortage import explain
from hetpipe.decide.planner.partitioner import MAX_STATES, Partition, Partitioner, StageCut
from hetpipe.decide.planner.reach_tables import Recompute
from hetpipe.errors import InfeasiblePlan
from hetpipe.values.ids import DeviceId

__all__ = ["Partition", "Partitioner", "Recompute", "StageCut", "min_max_partition"]


def min_max_partition(
    costs: Costs,
    devices: Sequence[DeviceId],
    memory: MemoryModel,
    *,
    recompute: Recompute = "auto",
    max_states: int = MAX_STATES,
) -> Partition:
    """The partition with the smallest largest stage time over all cuts and all orders of the devices.

    Every device gets at least one layer and no more than it has memory for. The result is a function of the set of
    devices: however they are ordered in the call, they are taken in the order of the cluster, and of several best
    partitions the same one is found every time. For the order of devices that it found, stages end as late as the
    bottleneck allows, from the last cut to the first.

    Args:
        costs: the profile on the cluster.
        devices: each once.
        memory: the weight policy, N, optimizer and reserve.
        recompute: `on` or `off` for every stage; `auto`: a stage recomputes only if it would not fit otherwise.
        max_states: the answer is exact up to a search space of so many states (`Partition.num_states`). Above it, only
            the most promising states are kept; `Partition.gap` then says how much better another one could be at most.

    Raises:
        InfeasiblePlan: no cuts and no order fit; says what is missing where, and what would help.
        PlanError: a device is unknown, named twice, or of a type without times.
    """
    partitioner = Partitioner(costs, recompute=recompute, max_states=max_states)
    found = partitioner.find(devices, memory)
    if found is None:
        raise InfeasiblePlan(explain(partitioner, devices, memory))
    return found
