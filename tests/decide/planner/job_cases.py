"""What the tests of whole jobs share: the paper's cluster, and a planner for a random case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetpipe.decide.planner.costs import Costs
from hetpipe.decide.planner.jobs import Jobs
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.decide.planner.partitioner import Partitioner
from hetpipe.values.cluster import Cluster, DeviceType, Links, LinkSpec, Node
from hetpipe.values.profile import LayerProfile, Profile
from hetpipe.values.sync import PushCompression
from tests.decide.planner.partition_cases import Case

MIB, GIB = 1 << 20, 1 << 30

#: How much faster than a Q the paper's types are here, and their memory in GiB.
PAPER_SPEEDS: Mapping[str, float] = {"V": 2.5, "R": 2.2, "G": 1.3, "Q": 1.0}
PAPER_GIB: Mapping[str, int] = {"V": 12, "R": 24, "G": 6, "Q": 8}


def chain(
    times_ms: Sequence[float],
    speeds: Mapping[str, float] = PAPER_SPEEDS,
    *,
    parameters: int = 4 * MIB,
    output: int = MIB,
    batch_size: int = 32,
) -> Profile:
    """Layers of these times (a third of it forward) on a type of speed 1."""
    layers = tuple(
        LayerProfile(
            name=f"layer{index}",
            parameter_bytes=parameters,
            activation_bytes=2 * output,
            output_bytes=output,
            forward_ms={kind: time / 3 / speed for kind, speed in speeds.items()},
            backward_ms={kind: time * 2 / 3 / speed for kind, speed in speeds.items()},
        )
        for index, time in enumerate(times_ms)
    )
    return Profile(version=1, model="chain", batch_size=batch_size, input_bytes=output, layers=layers)


def cluster_of(
    nodes: Sequence[str], *, gib: Mapping[str, int] = PAPER_GIB, network: float = 7e9, latency_seconds: float = 0.0
) -> Cluster:
    """Nodes n0, n1, … with the devices that letters name."""
    return Cluster(
        device_types={kind: DeviceType(memory_bytes=size * GIB) for kind, size in gib.items()},
        nodes=tuple(Node(name=f"n{index}", devices=tuple(kinds)) for index, kinds in enumerate(nodes)),
        links=Links(
            intra_node=LinkSpec(bandwidth_bytes_per_second=15.75e9, latency_seconds=latency_seconds),
            inter_node=LinkSpec(bandwidth_bytes_per_second=network, latency_seconds=latency_seconds),
        ),
    )


PAPER_CLUSTER = cluster_of(["VVVV", "RRRR", "GGGG", "QQQQ"])


def jobs_for(profile: Profile, cluster: Cluster, options: PlanOptions | None = None) -> Jobs:
    """The judge of groupings; without options, of what no round trip of weights holds back."""
    options = options or PlanOptions(staleness=None)
    costs = Costs(profile, cluster)
    return Jobs(costs, options, Partitioner(costs, recompute=options.recompute))


def jobs_of(case: Case, *, any_n: bool = False, compress_pushes: PushCompression = "none") -> Jobs:
    """The same for a random case, with its N or any, and no bound on staleness: that is another formula's."""
    options = PlanOptions(
        staleness=None,
        compress_pushes=compress_pushes,
        weights=case.weights,
        schedule=case.schedule,
        accumulate=case.accumulate,
        minibatches_per_wave=None if any_n else case.minibatches_per_wave,
        optimizer_slots=case.optimizer_slots,
        recompute=case.recompute,
        reserve_bytes=case.reserve_bytes,
        placement="round_robin",  # as the brute force counts
    )
    return jobs_for(case.profile, case.cluster, options)


def without_device(case: Case, node: int) -> Case | None:
    """The case with one device less on a node; None if that was the last one of all."""
    nodes = list(case.cluster.nodes)
    if len(nodes[node].devices) + sum(len(other.devices) for other in nodes) <= 1 + len(nodes[node].devices):
        return None
    nodes[node] = nodes[node].model_copy(update={"devices": nodes[node].devices[:-1]})
    return replace(case, cluster=case.cluster.model_copy(update={"nodes": tuple(nodes)}))


def roomy(case: Case, *, network_divisor: float = 1.0) -> Case:
    """The case with four times the memory and a slower network, so that network cards bind more often."""
    cluster = case.cluster
    types = {name: DeviceType(memory_bytes=4 * kind.memory_bytes) for name, kind in cluster.device_types.items()}
    inter = cluster.links.inter_node
    slower = inter.model_copy(update={"bandwidth_bytes_per_second": inter.bandwidth_bytes_per_second / network_divisor})
    links = Links(intra_node=cluster.links.intra_node, inter_node=slower)
    return replace(case, cluster=cluster.model_copy(update={"device_types": types, "links": links}))
