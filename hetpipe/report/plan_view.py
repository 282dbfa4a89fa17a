"""The displayed content of a plan, common to terminal and page. Pure.

Virtual workers whose pipelines have equal costs on equal types are shown once: an ED plan is one pipeline, for any
number of virtual workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hetpipe.decide.planner.costs import Costs, MemoryModel, milliseconds
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.decide.planner.waves import MOST_MINIBATCHES
from hetpipe.decide.simulator.documents import schedule_in, simulated_plan
from hetpipe.decide.simulator.plan import SimulatedPlan
from hetpipe.decide.simulator.traffic import Traffic, flows_of
from hetpipe.report.text import count, percent, rate
from hetpipe.values.ids import DeviceId
from hetpipe.values.memory import policies_text
from hetpipe.values.plan_document import (
    Alternative,
    PlanDocument,
    PlannedNode,
    PlannedStage,
    PlannedWorker,
    Predicted,
)
from hetpipe.values.quantities import bytes_text

ALL_REDUCE = "allreduce"
SINGLE = "single:"

#: Relative difference up to which rates are shown as equal.
SAME = 5e-4

#: Maximum number of names listed; the rest is counted.
_MOST_NAMES = 8

#: Maximum number of virtual workers in one sentence.
_MOST_WORKERS = 2


@dataclass(frozen=True)
class PlanFacts:
    """A plan with its inputs, from which the content is derived."""

    plan: PlanDocument
    costs: Costs
    options: PlanOptions

    def memory(self, minibatches_per_wave: int) -> MemoryModel:
        """The memory of stages with another N."""
        return self.options.memory(minibatches_per_wave)

    @cached_property
    def simulated(self) -> SimulatedPlan:
        """The plan in the simulator's form."""
        return simulated_plan(self.plan, self.costs)


@dataclass(frozen=True, slots=True)
class StageView:
    """One stage; times and bytes per minibatch."""

    device: DeviceId
    kind: str
    layers: str
    """`0–12`, the last one included."""
    names: str
    """`stem … head`."""
    forward_ms: float
    backward_ms: float
    """Time of the backward, including the recomputed forward."""
    receive_ms: float
    parameter_bytes: int
    """Bytes of all weight copies and the optimizer's state."""
    activation_bytes: int
    """Bytes of all minibatches in flight."""
    reserve_bytes: int
    device_bytes: int
    in_flight: int
    memory_policies: str
    """What is not kept: `recomputes`, or the policies of its layers; empty if all is kept."""
    is_bottleneck: bool
    is_estimated: bool
    utilisation: float | None = None
    """MFU; None if unknown."""

    @property
    def time_ms(self) -> float:
        """Stage time."""
        return self.forward_ms + self.backward_ms + self.receive_ms

    @property
    def memory_bytes(self) -> int:
        """Total memory of the stage."""
        return self.parameter_bytes + self.activation_bytes + self.reserve_bytes


@dataclass(frozen=True, slots=True)
class PipelineView:
    """Virtual workers with equal pipelines."""

    workers: tuple[int, ...]
    stages: tuple[StageView, ...]
    """Stages of the first of them."""
    devices: tuple[tuple[DeviceId, ...], ...]
    """Devices of each of them, stage by stage."""
    samples_per_second: float
    """Rate of each, without the others."""
    bottleneck_ms: float
    is_slowest: bool

    @property
    def heading(self) -> str:
        """`virtual workers 0–3, equal`."""
        if len(self.workers) == 1:
            return f"virtual worker {self.workers[0]}"
        return f"virtual workers {_ranges(self.workers)}, equal"


@dataclass(frozen=True, slots=True)
class SpeedView:
    """One way to train, with its rate."""

    name: str
    samples_per_second: float | None
    """None: not feasible."""
    remark: str


@dataclass(frozen=True, slots=True)
class PlanView:
    """The content of screen and page, except the reasons."""

    title: str
    subtitle: str
    speeds: tuple[SpeedView, ...]
    """This plan first, then all-reduce, then the best single device."""
    pipelines: tuple[PipelineView, ...]
    facts: tuple[tuple[str, str], ...]
    """Label and sentence."""
    estimated: tuple[str, ...]
    """Types in use whose times were not measured."""
    remarks: tuple[str, ...]
    """Remarks for the user before training by this plan."""

    @property
    def longest_ms(self) -> float:
        """The largest stage time: the full length of a time bar."""
        return max(stage.time_ms for pipeline in self.pipelines for stage in pipeline.stages)


def view_of(facts: PlanFacts) -> PlanView:
    """The displayed content of a plan."""
    plan = facts.plan
    num_used = sum(len(worker.stages) for worker in plan.virtual_workers)
    num_devices = num_used + len(plan.idle_devices)
    used = {stage.type for worker in plan.virtual_workers for stage in worker.stages}
    return PlanView(
        title=f"{plan.model}: {count(len(plan.virtual_workers), 'virtual worker')} on {num_used} of "
        f"{count(num_devices, 'device')}",
        subtitle=f"allocation {plan.allocation} · {count(facts.costs.profile.batch_size, 'sample')} per minibatch · "
        f"{count(facts.costs.num_layers, 'layer')} · weights {plan.weights} · schedule {schedule_in(plan)}",
        speeds=_speeds(plan),
        pipelines=_pipelines(facts),
        facts=tuple(_facts(facts)),
        estimated=tuple(kind for kind in facts.costs.profile.estimated if kind in used),
        remarks=tuple(_remarks(plan)),
    )


def plan_line(plan: PlanDocument) -> str:
    """The plan in one sentence: which layers are where; of virtual workers beyond the second only their number."""
    parts = []
    for index, worker in enumerate(plan.virtual_workers[:_MOST_WORKERS]):
        stages = (
            f"{_ranges(range(*stage.layers))} on {stage.device} ({stage.type})" for stage in worker.stages[:_MOST_NAMES]
        )
        more = len(worker.stages) - _MOST_NAMES
        rest = f" and {count(more, 'more stage')}" if more > 0 else ""
        parts.append(f"virtual worker {index} has layers {', '.join(stages)}{rest}")
    left = len(plan.virtual_workers) - len(parts)
    return "the plan: " + "; ".join(parts) + (f"; and {count(left, 'more virtual worker')}" if left else "")


def best_single(alternatives: Sequence[Alternative]) -> Alternative | None:
    """The fastest single device; None if the model fits on none."""
    able = [one for one in alternatives if one.name.startswith(SINGLE) and one.samples_per_second is not None]
    return max(able, key=_rate_of, default=None)


def _speeds(plan: PlanDocument) -> tuple[SpeedView, ...]:
    predicted = plan.predicted.samples_per_second
    speeds = [SpeedView("this plan", predicted, "simulated")]
    others = [one for one in plan.alternatives if one.name == ALL_REDUCE]
    names = ["all-reduce"] * len(others)
    single = best_single(plan.alternatives)
    if single is not None:
        others.append(single)
        names.append(f"one {single.name.removeprefix(SINGLE)}")
    for name, other in zip(names, others, strict=True):
        speeds.append(SpeedView(name, other.samples_per_second, other.reason))
    if single is None and any(one.name.startswith(SINGLE) for one in plan.alternatives):
        speeds.append(SpeedView("one device", None, "the whole model fits on none"))
    return tuple(speeds)


def _remarks(plan: PlanDocument) -> Iterator[str]:
    """Alternatives that are faster than the plan, according to the simulation."""
    least = plan.predicted.samples_per_second * (1 + SAME)
    faster = [one for one in plan.alternatives if _rate_of(one) > least]
    baselines = [one for one in faster if one.name == ALL_REDUCE or one.name.startswith(SINGLE)]
    allocations = [one for one in faster if one not in baselines]
    if allocations:
        best = max(allocations, key=_rate_of)
        yield (
            f"According to the simulation {best.name} would be faster, {rate(_rate_of(best))} samples/s: plan it with "
            f"--allocation {best.name}."
        )
    for one in baselines[:1]:
        if one.name == ALL_REDUCE:
            yield (
                f"All-reduce would be faster, {rate(_rate_of(one))} samples/s {one.reason.rpartition('; ')[2]}: set "
                "`sync: {kind: allreduce, minibatches_per_wave: 1}`, `weights: flush` and `workers: {count: …, stages: "
                "1}` with as many virtual workers as these devices."
            )
        else:
            yield (
                f"One {one.name.removeprefix(SINGLE)} is faster than this plan: prefer it if the whole model fits on a "
                "device."
            )


def _rate_of(alternative: Alternative) -> float:
    return alternative.samples_per_second or 0.0


def _pipelines(facts: PlanFacts) -> tuple[PipelineView, ...]:
    workers = facts.plan.virtual_workers
    waves = facts.plan.waves
    slowest = min(worker.samples_per_second / n for worker, n in zip(workers, waves, strict=True))
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, worker in enumerate(workers):
        alike.setdefault((waves[index], *(_cost_of(stage) for stage in worker.stages)), []).append(index)
    return tuple(
        PipelineView(
            workers=tuple(indices),
            stages=tuple(_stages(facts, workers[indices[0]], waves[indices[0]])),
            devices=tuple(tuple(stage.device for stage in workers[index].stages) for index in indices),
            samples_per_second=workers[indices[0]].samples_per_second,
            bottleneck_ms=workers[indices[0]].bottleneck_ms,
            is_slowest=workers[indices[0]].samples_per_second / waves[indices[0]] == slowest,
        )
        for indices in alike.values()
    )


def _cost_of(stage: PlannedStage) -> tuple[object, ...]:
    """The costs of a stage, for the comparison of pipelines."""
    return tuple(value for key, value in stage if key != "device")


def _stages(facts: PlanFacts, worker: PlannedWorker, minibatches_per_wave: int) -> list[StageView]:
    costs, memory = facts.costs, facts.memory(minibatches_per_wave)
    bottleneck = max(range(len(worker.stages)), key=lambda index: worker.stages[index].time_ms)
    found = []
    for index, stage in enumerate(worker.stages):
        first, last = stage.layers
        forward = milliseconds(costs.forward[stage.type][last] - costs.forward[stage.type][first])
        weights = costs.weight_bytes(memory.copies(index, len(worker.stages)))
        parameter_bytes = weights[last] - weights[first]
        found.append(
            StageView(
                device=stage.device,
                kind=stage.type,
                layers=f"{first}–{last - 1}" if last - first > 1 else str(first),
                names=_names(facts, first, last),
                forward_ms=forward,
                backward_ms=stage.time_ms - stage.receive_ms - forward,
                receive_ms=stage.receive_ms,
                parameter_bytes=parameter_bytes,
                activation_bytes=stage.memory_bytes - parameter_bytes - memory.reserve_bytes,
                reserve_bytes=memory.reserve_bytes,
                device_bytes=costs.memory_bytes[stage.type],
                in_flight=memory.in_flight(index, len(worker.stages)),
                memory_policies=policies_text(stage.memory, first) or ("recomputes" if stage.recompute else ""),
                is_bottleneck=index == bottleneck,
                is_estimated=stage.type in costs.profile.estimated,
                utilisation=stage.model_flops_utilisation,
            )
        )
    return found


def _names(facts: PlanFacts, first: int, last: int) -> str:
    layers = facts.costs.profile.layers
    ends = (layers[first].name, layers[last - 1].name)
    return ends[0] if last - first == 1 else " … ".join(ends)


def _facts(facts: PlanFacts) -> list[tuple[str, str]]:
    plan = facts.plan
    return [
        ("in a wave", f"N = {_waves(plan)} minibatches; {_most_minibatches(plan)}"),
        *_synchronisation(facts),
        ("over the network", _crossing(facts)),
        *_host_memory(plan.host_memory),
        *_model_speed(plan.predicted),
        ("idle", _listed([f"{name} ({facts.costs.cluster.devices[name]})" for name in plan.idle_devices]) or "nothing"),
    ]


def _model_speed(predicted: Predicted) -> list[tuple[str, str]]:
    """Tokens and operations, at the speed of the plan."""
    rows = []
    if predicted.tokens_per_second is not None:
        rows.append(("tokens", f"{rate(predicted.tokens_per_second)} tokens/s"))
    if predicted.model_flops_utilisation is not None:
        share = percent(predicted.model_flops_utilisation)
        rows.append(("MFU", f"{share} of the peak of the devices in use"))
    elif predicted.model_flops_utilisation_reason is not None:
        rows.append(("MFU", f"unknown: {predicted.model_flops_utilisation_reason}"))
    return rows


def _synchronisation(facts: PlanFacts) -> list[tuple[str, str]]:
    plan = facts.plan
    if not plan.has_shards:
        return [("shards", "none; the stages alone hold the weights")]
    return [
        ("staleness", "D = ∞, no bound" if plan.staleness is None else f"D = {plan.staleness}"),
        (
            "shards",
            f"{len(plan.shards)} on {_listed(list(dict.fromkeys(plan.shards)))}, {plan.placement_policy or 'by hand'}",
        ),
    ]


def _waves(plan: PlanDocument) -> str:
    given = plan.minibatches_per_wave
    return str(given) if isinstance(given, int) else f"{_listed([str(n) for n in given])} (virtual workers in order)"


def _host_memory(nodes: Sequence[PlannedNode]) -> list[tuple[str, str]]:
    """The peak per node, with equal nodes grouped."""
    if not nodes:
        return []
    alike: dict[str, list[str]] = {}
    for node in nodes:
        peak = bytes_text(node.peak_bytes)
        when = " while the model is inspected" if node.inspection_bytes > node.training_bytes else ""
        alike.setdefault(f"{peak}{when}", []).append(node.node)
    peaks = [f"{peak} on {'each of ' if len(names) > 1 else ''}{_listed(names)}" for peak, names in alike.items()]
    return [("host memory", f"at most {'; '.join(peaks)}")]


def _most_minibatches(plan: PlanDocument) -> str:
    most, searched = plan.max_minibatches_per_wave, plan.searched_minibatches_per_wave
    tried = "" if searched is None else f"up to {searched} were tried, "
    if min(most) >= MOST_MINIBATCHES:
        return f"{tried}memory allows {MOST_MINIBATCHES} and more"
    if len(set(most)) == 1:
        return f"{tried}memory allows {most[0]}"
    return f"{tried}memory allows {_listed([str(one) for one in most])} (virtual workers in order)"


def _crossing(facts: PlanFacts) -> str:
    total = facts.plan.predicted.cross_node_bytes_per_minibatch
    if not total:
        return "no traffic between nodes"
    per_wave = sum(
        flow.num_bytes
        for flow in flows_of(facts.simulated, facts.costs)
        if flow.traffic in (Traffic.PUSH, Traffic.PULL) and flow.source != flow.target
    )
    weights = per_wave / sum(facts.plan.waves)
    rounded = facts.plan.compress_pushes
    exchanged = "pushes and pulls" if rounded == "none" else f"pushes (in {rounded}) and pulls"
    if not weights:
        parts = "all of it activations and gradients"
    elif weights == total:
        parts = f"all of it {exchanged}"
    else:
        parts = f"{bytes_text(total - weights)} activations and gradients, {bytes_text(weights)} {exchanged}"
    return f"{bytes_text(total)} between nodes per minibatch: {parts}"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: `0–2, 5`."""
    ends: list[list[int]] = []
    for number in numbers:
        if ends and number == ends[-1][1] + 1:
            ends[-1][1] = number
        else:
            ends.append([number, number])
    return _listed([str(first) if first == last else f"{first}–{last}" for first, last in ends])
