"""The assignment of one machine's devices to agents. Pure.

A container has access to the devices of its agent only, so the grouping follows the plan: if the virtual workers are
known, each gets an agent of its own with one device per stage, in the order of the stages. A job planned for a
`cluster.file` gets agents with the names of its nodes instead. The coordinator assigns devices in the order in which
agents register, so the agents are started in the order of the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetpipe.deploy.box import BoxDevice
from hetpipe.errors import UserError
from hetpipe.job.file import Job
from hetpipe.values.ids import VirtualWorkerIndex
from hetpipe.values.plan_document import PlanDocument

#: Node name of an agent with all devices of the machine.
WHOLE = "box"


@dataclass(frozen=True, slots=True)
class AgentGroup:
    """One agent and its devices."""

    node: str
    """Prefix of the names of its devices."""
    devices: tuple[BoxDevice, ...]
    """In the agent's order."""


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
        counts = {vw: job.num_stages(VirtualWorkerIndex(vw)) for vw in range(job.num_workers)}
        pool.check_enough(job.num_devices, "one per stage")
        for _, line in job.elastic.added:
            counts[line.vw] = max(0, 1 + max(line.devices or (-1,)) - sum(counts.values()))
        return tuple(AgentGroup(_vw(vw), pool.take_next(count)) for vw, count in counts.items() if count)
    assert job.cluster.file is not None, "a job without a cluster of its own is planned first"
    nodes = [node for node in job.cluster.file.nodes if node.devices]
    return tuple(AgentGroup(node.name, tuple(pool.take("", kind) for kind in node.devices)) for node in nodes)


def job_of_plan(job: Job, plan: PlanDocument) -> Job:
    """`job` with the cut of `plan`.

    Raises:
        UserError: the plan cannot be executed for the job.
    """
    if job.is_planned:
        raise UserError("the job has a plan in workers.stages, and --plan gives another one; leave one out")
    if plan.batch_size is not None and plan.batch_size != job.batch_size:
        raise UserError(
            f"the plan is for minibatches of {plan.batch_size} samples, the job has {job.batch_size}; plan again"
        )
    if plan.weights != job.weights:
        raise UserError(f"the plan is for the weight policy {plan.weights}, the job has {job.weights}; plan again")
    stages = [stage for worker in plan.virtual_workers for stage in worker.stages]
    if {policy for stage in stages for policy in stage.memory} - {"keep"}:
        raise UserError(
            "the plan has memory policies for single layers, which a run takes from a plan of its own only; leave out "
            "--plan, with `workers.stages: auto` and `memory: auto` in the job"
        )
    recomputed = {stage.recompute for stage in stages}
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
            "parameter_servers.placement: ed_local places weights on the node that computes them, but there is only "
            "one node; use balanced or round_robin"
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
        """Take the device `name`; without a name the first one of the type, which any CPU device can emulate."""
        for device in self._free:
            if device.device == name if name else not device.gpu or device.type == kind:
                self._free.remove(device)
                return device
        raise self._too_few(f"the job needs a device of type {kind}")

    def _too_few(self, need: str) -> UserError:
        free = f"{len(self._free)} of {self._all} devices of this machine are free"
        return UserError(f"{need}, and {free}; give --cpu-devices N to compute on the CPU, or change the job's cluster")
