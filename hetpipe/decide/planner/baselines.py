"""Baselines on the same devices without hetpipe: all-reduce data parallelism, and single devices.

Both keep weights, a gradient and the optimizer's tensors on each device, and one minibatch's activations; no shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetpipe.decide.planner.costs import Costs
from hetpipe.values.cluster import LinkSpec, node_of
from hetpipe.values.ids import DeviceId
from hetpipe.values.quantities import bytes_text
from hetpipe.values.run import LinkTime


@dataclass(frozen=True, slots=True)
class Baseline:
    """A way to train without hetpipe."""

    name: str
    """`allreduce` or `single:TYPE`."""
    samples_per_second: float | None
    """None if the model does not fit."""
    reason: str
    """The devices used, or why it is infeasible."""


def whole_model_bytes(costs: Costs, optimizer_slots: int) -> int:
    """Memory to train the whole model on one device: parameters × (2 + slots) + activations."""
    return costs.weight_bytes(2 + optimizer_slots)[-1] + costs.activation_bytes[-1]


def ring_ms(parameter_bytes: int, num_devices: int, slowest: LinkSpec) -> float:
    """Milliseconds of a ring all-reduce: 2(G − 1)/G of the bytes over the slowest link, 2(G − 1) latencies.

    >>> ring_ms(4000, 2, LinkSpec(bandwidth_bytes_per_second=1e6, latency_seconds=0.001))
    6.0
    """
    link = LinkTime(slowest.latency_seconds, slowest.effective_bytes_per_second)
    return 1000.0 * link.ring_seconds(parameter_bytes, num_devices)


def slowest_link(costs: Costs, devices: Sequence[DeviceId]) -> LinkSpec:
    """The slowest link by effective bandwidth, then by latency, between any two of at least two devices."""
    cluster = costs.cluster
    nodes = [node_of(device) for device in devices]
    used = sorted(set(nodes))
    links = {cluster.link(node, node) for node in used if nodes.count(node) > 1}
    links |= {cluster.link(node, other) for index, node in enumerate(used) for other in used[:index]}
    return min(links, key=lambda link: (link.effective_bytes_per_second, -link.latency_seconds))


def all_reduce(costs: Costs, optimizer_slots: int) -> Baseline:
    """Data parallelism over every device that holds the whole model, each with a minibatch of its own.

    An iteration takes the longest forward, then the longest backward or the ring, whichever is longer.
    """
    needed = whole_model_bytes(costs, optimizer_slots)
    devices = costs.cluster.devices
    holding = [device for device, kind in devices.items() if costs.memory_bytes[kind] >= needed]
    if not holding:
        most = max(costs.memory_bytes[kind] for kind in devices.values())
        return Baseline(
            "allreduce",
            None,
            f"no device holds the whole model: it needs {bytes_text(needed)} and the largest has {bytes_text(most)}",
        )
    kinds = sorted({devices[device] for device in holding})
    layers = costs.profile.layers
    forward_ms = max(sum(layer.forward_ms[kind] for layer in layers) for kind in kinds)
    backward_ms = max(sum(layer.backward_ms[kind] for layer in layers) for kind in kinds)
    if len(holding) > 1:
        ring = ring_ms(costs.parameter_bytes[-1], len(holding), slowest_link(costs, holding))
        backward_ms = max(backward_ms, ring)
    return Baseline(
        "allreduce",
        _per_second(len(holding) * costs.profile.batch_size, forward_ms + backward_ms),
        f"on the {len(holding)} of {len(devices)} devices that hold the whole model",
    )


def single_devices(costs: Costs, optimizer_slots: int) -> tuple[Baseline, ...]:
    """A single device, for each type in the cluster."""
    needed = whole_model_bytes(costs, optimizer_slots)
    found = []
    for kind in sorted(set(costs.cluster.devices.values())):
        memory = costs.memory_bytes[kind]
        if memory < needed:
            reason = (
                f"the whole model needs {bytes_text(needed)} and {kind} has {bytes_text(memory)}: "
                f"{bytes_text(needed - memory)} are missing"
            )
            found.append(Baseline(f"single:{kind}", None, reason))
            continue
        time_ms = sum(layer.forward_ms[kind] + layer.backward_ms[kind] for layer in costs.profile.layers)
        rate = _per_second(costs.profile.batch_size, time_ms)
        found.append(Baseline(f"single:{kind}", rate, "one device holds the whole model"))
    return tuple(found)


def _per_second(samples: int, time_ms: float) -> float | None:
    return 1000.0 * samples / time_ms if time_ms else None
