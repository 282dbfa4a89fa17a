"""Emulation of another cluster's devices by stages: computation times and link speeds. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetpipe.decide.planner.baselines import slowest_link
from hetpipe.decide.planner.costs import Costs, milliseconds
from hetpipe.values.cluster import LinkSpec, node_of
from hetpipe.values.ids import DeviceId
from hetpipe.values.run import LinkTime, StageEmulation


@dataclass(frozen=True, slots=True)
class EmulatedStage:
    """Consecutive layers [first, last) on a device of the emulated cluster."""

    device: DeviceId
    first: int
    last: int


def emulations(
    costs: Costs,
    stages: Sequence[EmulatedStage],
    shard_nodes: Sequence[str],
    *,
    with_links: bool,
    stragglers: Mapping[str, float] | None = None,
    replicas: Sequence[Sequence[DeviceId]] = (),
) -> tuple[StageEmulation, ...]:
    """The emulation of each stage of one virtual worker.

    Args:
        costs: the profile on the emulated cluster.
        stages: first stage first.
        shard_nodes: the node of each shard.
        with_links: whether transfers take their links' times as well; a shard on a stage's own node is reached over the
            link within the node, as in the simulator.
        stragglers: device → slowdown factor relative to its profile.
        replicas: the devices with which each stage averages gradients, its own included; empty if it does not.
    """
    nodes = [node_of(stage.device) for stage in stages]
    return tuple(
        StageEmulation(
            forward_seconds=tuple(slowdown * _seconds(forward) for forward, _ in ticks),
            backward_seconds=tuple(slowdown * _seconds(total - forward) for forward, total in ticks),
            upstream=_link(costs, nodes[index], nodes[index - 1]) if with_links and index > 0 else None,
            downstream=_link(costs, nodes[index], nodes[index + 1]) if with_links and index + 1 < len(nodes) else None,
            shards=tuple(_link(costs, nodes[index], shard) for shard in shard_nodes) if with_links else (),
            replicas=_time(slowest_link(costs, replicas[index])) if with_links and replicas else None,
        )
        for index, stage in enumerate(stages)
        for ticks in ([_ticks(costs, stage, layer) for layer in range(costs.num_layers)],)
        for slowdown in ((stragglers or {}).get(stage.device, 1.0),)
    )


def _ticks(costs: Costs, stage: EmulatedStage, layer: int) -> tuple[int, int]:
    """Ticks of the forward through a layer on the device of a stage, and of forward and backward."""
    kind = costs.cluster.devices[stage.device]
    forward = costs.forward[kind][layer + 1] - costs.forward[kind][layer]
    return forward, costs.compute_ticks(kind, layer, layer + 1)


def _seconds(ticks: int) -> float:
    return milliseconds(ticks) / 1000.0


def _link(costs: Costs, node: str, other: str) -> LinkTime:
    return _time(costs.cluster.link(node, other))


def _time(link: LinkSpec) -> LinkTime:
    return LinkTime(link.latency_seconds, link.effective_bytes_per_second)
