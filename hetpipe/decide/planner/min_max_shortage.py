"""Why nothing fits, and what would: the words of an `InfeasiblePlan`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hetpipe.decide.planner.costs import MemoryModel
from hetpipe.decide.planner.partitioner import Partitioner, StageCut
from hetpipe.decide.planner.waves import choices
from hetpipe.values.ids import DeviceId
from hetpipe.values.policies import LEAST_MEMORY
from hetpipe.values.suggest import join_names

_MOST_LISTED = 8


def explain(partitioner: Partitioner, devices: Sequence[DeviceId], memory: MemoryModel) -> str:
    """Which layer or stage misses how many bytes on which device, and the changes that would help.

    What is missing is the least: of all cuts and orders, those that exceed a device's memory by the fewest bytes.

    Args:
        partitioner: whose `find` has no answer for the other arguments.
        devices: of the virtual worker.
        memory: what the stages keep.
    """
    num_layers = partitioner.costs.num_layers
    if len(devices) > num_layers:
        return f"{len(devices)} devices cannot share {num_layers} layers; use at most {num_layers} devices"
    shortage_bytes = _shortage_bytes(partitioner, devices, memory)
    enough = _with_more(memory, shortage_bytes)
    stages = partitioner.any_fit(devices, enough)
    assert stages is not None, "a cut with this shortage was just found"
    capacities = partitioner.costs.memory_bytes
    index, fullest = max(enumerate(stages), key=lambda item: item[1].memory_bytes - capacities[item[1].kind])
    changes = [*_changes(partitioner, devices, memory), f"give every device {shortage_bytes} bytes more"]
    tried = (
        "no cuts and no order of" if partitioner.decides_fit(devices) else "none of the most promising partitions on"
    )
    return (
        f"{tried} {_listed(devices)} fit; at best {_named(partitioner, index, fullest)} misses {shortage_bytes} "
        f"bytes on {fullest.device} (type {fullest.kind}, {capacities[fullest.kind]} bytes); {join_names(changes)}"
    )


def _listed(devices: Sequence[DeviceId]) -> str:
    return ", ".join(devices) if len(devices) <= _MOST_LISTED else f"the {len(devices)} devices"


def _named(partitioner: Partitioner, index: int, stage: StageCut) -> str:
    names = [layer.name for layer in partitioner.costs.profile.layers[stage.first : stage.last]]
    if len(names) == 1:
        return f"layer {stage.first} ({names[0]}), alone as stage {index},"
    return f"stage {index} with layers {stage.first} to {stage.last - 1} ({names[0]} to {names[-1]})"


def _with_more(memory: MemoryModel, extra_bytes: int) -> MemoryModel:
    """As if every device had `extra_bytes` more."""
    return replace(memory, reserve_bytes=memory.reserve_bytes - extra_bytes)


def _shortage_bytes(partitioner: Partitioner, devices: Sequence[DeviceId], memory: MemoryModel) -> int:
    """The fewest bytes with which, added to every device, something fits."""
    costs, num_stages = partitioner.costs, len(devices)
    enough = max(
        costs.stage_bytes(0, costs.num_layers, stage=stage, num_stages=num_stages, memory=memory)
        + memory.in_flight(stage, num_stages) * max(costs.cut_bytes)
        for stage in range(num_stages)
    )
    return _first(range(enough), lambda extra: partitioner.fits(devices, _with_more(memory, extra)))


def _changes(partitioner: Partitioner, devices: Sequence[DeviceId], memory: MemoryModel) -> Iterator[str]:
    """Changes of one thing each with which something fits, the cheapest for training first."""

    def misfit(changed: MemoryModel) -> bool:
        return not partitioner.fits(devices, changed)

    if partitioner.recompute != "auto" and Partitioner(partitioner.costs).fits(devices, memory):
        yield "set --recompute auto"
    smaller = choices([memory.minibatches_per_wave - 1], [len(devices)], memory.weights, memory.accumulate)
    num_fitting = _first(smaller, lambda n: misfit(replace(memory, minibatches_per_wave=n)))
    if num_fitting > 0:
        yield f"lower --minibatches-per-wave to {smaller[num_fitting - 1]}"
    num_fitting = _first(range(memory.optimizer_slots), lambda slots: misfit(replace(memory, optimizer_slots=slots)))
    if num_fitting > 0:
        yield f"take an optimizer with fewer tensors per parameter (--optimizer-slots {num_fitting - 1})"
    if memory.schedule == "gpipe" and not misfit(replace(memory, schedule="1f1b")):
        yield "set --schedule 1f1b"
    if memory.weights != LEAST_MEMORY and not misfit(replace(memory, weights=LEAST_MEMORY)):
        yield f"set --weights {LEAST_MEMORY}"
    offered = partitioner.costs.cluster.devices
    spare = {kind: device for device, kind in reversed(offered.items()) if device not in devices}
    for kind in sorted(spare.keys() & partitioner.costs.compute.keys()):
        if partitioner.fits([*devices, spare[kind]], memory):
            yield f"add {spare[kind]} (type {kind})"
            break


def _first(values: range, holds: Callable[[int], bool]) -> int:
    """How many leading `values` there are before `holds` begins to, and then stays, true."""
    return bisect_left(values, True, key=holds)  # noqa: FBT003 - the value looked for
