"""How long does `auto` take, how does it grow with the cluster, and how far from any plan's bound does it end?

And how long do fast virtual workers wait for slow ones, with one N for all and with waves in proportion?
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.sizes import sized
from hetpipe.decide.planner.allocation.bound import upper_bound
from hetpipe.decide.planner.choose import choose_plan
from hetpipe.decide.planner.costs import Costs
from hetpipe.decide.planner.jobs import Jobs
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.decide.planner.partitioner import Partitioner
from hetpipe.decide.planner.shard_bytes import PlacedParameters
from hetpipe.decide.planner.simulation_length import steady_waves
from hetpipe.decide.simulator.documents import simulated_plan
from hetpipe.decide.simulator.options import SimulationOptions
from hetpipe.decide.simulator.prediction import predicted
from hetpipe.decide.simulator.simulate import simulate
from hetpipe.decide.sync.division import mean_minibatches
from hetpipe.values.cluster import Cluster, DeviceType, Links, LinkSpec, Node
from hetpipe.values.profile import LayerProfile, Profile
from tests.decide.planner import models

NUM_LAYERS = sized(100, 20)
DEVICES_PER_NODE = 4
#: Nodes of one type each, in turn; four times as many from run to run.
SIZES = sized((4, 16, 64, 256), (4,))

#: The paper's types: speed relative to the slowest, GiB.
_TYPES: Mapping[str, tuple[float, int]] = {"V": (2.5, 12), "R": (2.2, 24), "G": (1.3, 6), "Q": (1.0, 8)}
_NAMED = ("NP", "ED", "HD")
_MIB = 1 << 20


def profiles() -> dict[str, Profile]:
    """Name → the model that is planned; a smoke run has one."""
    known = {"VGG-19-like": models.vgg19(), "GPT-2-like": models.gpt2()}
    return {**sized(known, {}), f"{NUM_LAYERS} layers": model_of_many_layers()}


def measure(profile: Profile) -> dict[str, Any]:
    """Devices → time of one search, and samples per second against the other allocations and the bound.

    The search is that of `hetpipe plan`, simulations included; the figures are those of the simulation. It runs on one
    thread, so seconds of the processor are what it takes on a core that does nothing else.
    """
    found: dict[str, Any] = {}
    for num_nodes in SIZES:
        costs = Costs(profile, cluster(num_nodes))
        begun = time.process_time()
        plan = choose_plan(profile, costs.cluster, PlanOptions(), predict=predicted)
        seconds = time.process_time() - begun
        rate = plan.predicted.samples_per_second
        others = {one.name: one.samples_per_second for one in plan.alternatives if one.name in _NAMED}
        bound = upper_bound(Jobs(costs, PlanOptions(), Partitioner(costs)))
        found[f"{num_nodes * DEVICES_PER_NODE} devices on {num_nodes} nodes"] = {
            "seconds of processor": round(seconds, 1),
            "samples per second": round(rate),
            "N": plan.minibatches_per_wave,
            "of the bound": round(rate / bound, 3),
            "gain over NP, ED, HD": {name: round(rate / other, 3) for name, other in others.items() if other},
        }
    return found


def waves(profile: Profile) -> dict[str, Any]:
    """Under NP on the paper's cluster: speed, and waiting for slower virtual workers, with one N and in proportion.

    The waiting is the share of the time, over virtual workers, in which a first stage waits for a clock if weights are
    pushed and pulled in no time, so that only the waves of others are waited for.
    """
    costs, found = Costs(profile, cluster(sized(len(_TYPES), 2))), dict[str, Any]()
    for staleness in sized((0, 4), (0,)):
        for name, proportional in (("one N", False), ("in proportion", True)):
            options = PlanOptions(allocation="NP", staleness=staleness, proportional=proportional)
            plan = choose_plan(profile, costs.cluster, options, predict=predicted)
            free = replace(simulated_plan(plan, costs), placed=PlacedParameters((), (), costs.num_layers))
            length = mean_minibatches(4 * steady_waves(staleness), plan.waves)
            run = simulate(free, costs, SimulationOptions(staleness=staleness, minibatches=length, staggered=True))
            found[f"D = {staleness}, {name}"] = {
                "N": plan.minibatches_per_wave,
                "samples per second": round(plan.predicted.samples_per_second),
                "waiting for slower workers": round(sum(run.waiting_seconds) / len(plan.waves) / run.seconds, 3),
            }
    return found


def model_of_many_layers() -> Profile:
    """Of unequal layers, without any pattern."""
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


def cluster(num_nodes: int) -> Cluster:
    """Nodes of four devices of one type, four types in turn."""
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
