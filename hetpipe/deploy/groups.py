"""The assignment of one machine's devices to agents. Pure.

A container sees the devices of its agent and no others, so the plan is where containers are cut: where the virtual
workers are known, each gets an agent of its own with one device per stage, in the order of the stages. A job that is
planned by names gets agents under these names instead: the nodes of its `cluster.file`. The coordinator deals devices
in the order in which agents register, so the order of the groups is part of the answer: the agents are started in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetpipe.deploy.box import BoxDevice
from hetpipe.errors import UserError
from hetpipe.job.file import Job
from hetpipe.values.ids import VirtualWorkerIndex
from hetpipe.values.plan_document import PlanDocument

#: The node of an agent that has the whole machine.
WHOLE = "box"


@dataclass(frozen=True, slots=True)
class AgentGroup:
    """One agent and its devices."""

    node: str
    """Begins the names of its devices."""
    devices: tuple[BoxDevice, ...]
    """In the order in which the agent numbers them."""


def needs_a_plan(job: Job) -> bool:
    """Whether the grouping of devices depends on a plan."""
    return not job.is_planned and job.cluster.file is None


def groups_of(
    job: Job | None, devices: Sequence[BoxDevice], plan: PlanDocument | None = None
) -> tuple[AgentGroup, ...]:
    """The agents for `job`, in starting order.

    Args:
        job: the job to train; None: unknown.
        devices: of this machine.
        plan: of a job that states none.

    Raises:
        UserError: devices are missing.
    """
    if job is None:
        return (AgentGroup(WHOLE, tuple(devices)),)
    pool = _Pool(devices)
    if plan is not None:
        wanted = [[(stage.device, stage.type) for stage in worker.stages] for worker in plan.virtual_workers]
        named = all(device in pool.names for stages in wanted for device, _ in stages)
        return tuple(
            AgentGroup(_vw(index), tuple(pool.take(device if named else "", kind) for device, kind in stages))
            for index, stages in enumerate(wanted)
        )
    if job.is_planned:
        counts = [job.num_stages(VirtualWorkerIndex(vw)) for vw in range(job.num_workers)]
        pool.check_enough(sum(counts), "one per stage")
        return tuple(AgentGroup(_vw(vw), pool.take_next(count)) for vw, count in enumerate(counts))
    assert job.cluster.file is not None, "a job without a cluster of its own is planned first"
    nodes = [node for node in job.cluster.file.nodes if node.devices]
    return tuple(AgentGroup(node.name, tuple(pool.take("", kind) for kind in node.devices)) for node in nodes)


def job_of_plan(job: Job, plan: PlanDocument) -> Job:
    """`job` with the cut of `plan`, so that a run of it is the plan's.

    Raises:
        UserError: a run cannot follow the plan.
    """
    if job.is_planned:
        raise UserError("the job states a plan in workers.stages, and --plan gives another one; leave one out")
    if plan.batch_size is not None and plan.batch_size != job.batch_size:
        raise UserError(
            f"the plan is for minibatches of {plan.batch_size} samples, the job has {job.batch_size}; plan again"
        )
    if plan.weights != job.weights:
        raise UserError(f"the plan is for the weight policy {plan.weights}, the job's is {job.weights}; plan again")
    recomputed = {stage.recompute for worker in plan.virtual_workers for stage in worker.stages}
    if recomputed == {True, False}:
        raise UserError(
            "the plan recomputes some stages and keeps others; plan with --recompute on or off, or let the run plan "
            "itself with `workers.stages: auto` and `memory: auto`"
        )
    if recomputed == {True} and job.memory != "recompute":
        raise UserError(
            "the plan recomputes all layers; add `memory: recompute` to the job, or plan with --recompute off"
        )
    if job.parameter_servers.placement == "ed_local":
        raise UserError(
            "parameter_servers.placement: ed_local keeps weights on the node that computes them, and here is one node "
            "only; say balanced or round_robin"
        )
    counts = [[last - first for first, last in (s.layers for s in vw.stages)] for vw in plan.virtual_workers]
    return job.with_plan(counts, plan.minibatches_per_wave, plan.staleness)


def _vw(index: int) -> str:
    return f"vw-{index}"


class _Pool:
    """The unassigned devices."""

    def __init__(self, devices: Sequence[BoxDevice]) -> None:
        self._free = list(devices)
        self._all = len(self._free)
        #: All devices.
        self.names = frozenset(device.device for device in devices)

    def check_enough(self, wanted: int, purpose: str) -> None:
        if wanted > len(self._free):
            raise self._too_few(f"the job needs {wanted} devices, {purpose}")

    def take_next(self, count: int) -> tuple[BoxDevice, ...]:
        return tuple(self._free.pop(0) for _ in range(count))

    def take(self, name: str, kind: str) -> BoxDevice:
        """The device called `name`; without a name the first one of the type, which a CPU device can always play."""
        for device in self._free:
            if device.device == name if name else not device.gpu or device.type == kind:
                self._free.remove(device)
                return device
        raise self._too_few(f"the job needs a device of type {kind}")

    def _too_few(self, need: str) -> UserError:
        free = f"{len(self._free)} of {self._all} devices of this machine are free"
        return UserError(f"{need}, and {free}; say --cpu-devices N to compute on the CPU, or change the job's cluster")
