"""How long does `auto` take, how does it grow with the cluster, and how far from any plan's bound does it end?"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.sizes import sized
from hetpipe.planner.allocation.auto import auto
from hetpipe.planner.allocation.equal_distribution import equal_distribution
from hetpipe.planner.allocation.hybrid_distribution import hybrid_distribution
from hetpipe.planner.allocation.node_partition import node_partition
from hetpipe.planner.allocation.packing import upper_bound
from hetpipe.planner.allocation.policy import Allocation
from hetpipe.planner.costs import Costs
from hetpipe.planner.jobs import Jobs
from hetpipe.planner.options import PlanOptions
from hetpipe.planner.partitioner import Partitioner
from hetpipe.spec.cluster import Cluster, DeviceType, Links, LinkSpec, Node
from hetpipe.spec.profile import LayerProfile, Profile

NUM_LAYERS = sized(100, 20)
DEVICES_PER_NODE = 4
#: Nodes of one type each, in turn; doubled from run to run.
SIZES = sized((4, 8, 16, 32, 64, 128, 256), (4,))

#: The paper's types: speed relative to the slowest, GiB.
_TYPES: Mapping[str, tuple[float, int]] = {"V": (2.5, 12), "R": (2.2, 24), "G": (1.3, 6), "Q": (1.0, 8)}
_BEFORE: Mapping[str, Allocation] = {"NP": node_partition, "ED": equal_distribution, "HD": hybrid_distribution}
_MIB = 1 << 20


def measure() -> dict[str, Any]:
    """Devices → seconds of one search, and samples per second against the other allocations and the bound."""
    found: dict[str, Any] = {}
    profile = _profile()
    for num_nodes in SIZES:
        costs = Costs(profile, _cluster(num_nodes))
        jobs = Jobs(costs, PlanOptions(), Partitioner(costs))
        begun = time.perf_counter()
        plan = auto(jobs)
        seconds = time.perf_counter() - begun
        others = {name: policy(jobs).rate.samples_per_second for name, policy in _BEFORE.items()}
        rate = plan.rate.samples_per_second
        found[f"{num_nodes * DEVICES_PER_NODE} devices on {num_nodes} nodes"] = {
            "seconds": round(seconds, 2),
            "samples per second": round(rate),
            "of the bound": round(rate / upper_bound(jobs), 3),
            "gain over NP, ED, HD": {name: round(rate / other, 3) for name, other in others.items()},
        }
    return found


def _profile() -> Profile:
    source = random.Random(0)
    layers = []
    for index in range(NUM_LAYERS):
        work = source.uniform(1, 3)
        layers.append(
            LayerProfile(
                name=f"layer{index}",
                parameter_bytes=source.randrange(1, 20) * _MIB,
                activation_bytes=source.randrange(5, 30) * _MIB,
                output_bytes=source.randrange(1, 8) * _MIB,
                forward_ms={kind: work / speed for kind, (speed, _) in _TYPES.items()},
                backward_ms={kind: 2 * work / speed * source.uniform(0.9, 1.1) for kind, (speed, _) in _TYPES.items()},
            )
        )
    return Profile(version=1, model="benchmark", batch_size=32, input_bytes=19 * _MIB, layers=tuple(layers))


def _cluster(num_nodes: int) -> Cluster:
    kinds = list(_TYPES)
    return Cluster(
        device_types={kind: DeviceType(memory_bytes=gib << 30) for kind, (_, gib) in _TYPES.items()},
        nodes=tuple(
            Node(name=f"n{index}", devices=(kinds[index % len(kinds)],) * DEVICES_PER_NODE)
            for index in range(num_nodes)
        ),
        links=Links(
            intra_node=LinkSpec(bandwidth_bytes_per_second=15.75e9, latency_seconds=1e-5, efficiency=0.7),
            inter_node=LinkSpec(bandwidth_bytes_per_second=7e9, latency_seconds=3e-5, efficiency=0.8),
        ),
    )
