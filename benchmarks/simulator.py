"""How fast is the simulator itself, how does it grow with the job, and how near is a scale model to the whole job?"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace
from typing import Any

from benchmarks import allocation
from benchmarks.sizes import sized
from hetpipe.decide.planner.allocation import equal_distribution, hybrid_distribution, node_partition
from hetpipe.decide.planner.costs import Costs
from hetpipe.decide.planner.jobs import Jobs
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.decide.planner.partitioner import Partitioner
from hetpipe.decide.planner.scale_model import scale_model
from hetpipe.decide.planner.shard_bytes import place_bytes
from hetpipe.decide.simulator.options import SimulationOptions
from hetpipe.decide.simulator.plan import SimulatedPlan, SimulatedStage
from hetpipe.decide.simulator.prediction import at_scale, planned
from hetpipe.decide.simulator.simulate import simulate
from hetpipe.values.cluster import Cluster, DeviceType, Links, LinkSpec, Node
from hetpipe.values.ids import DeviceId
from hetpipe.values.profile import LayerProfile, Profile

NUM_STAGES = 4
NUM_LAYERS = 16
NUM_WAVES = sized(100, 10)
MINIBATCHES_PER_WAVE = 4
#: Doubled from run to run.
SIZES = sized((16, 32, 64, 128, 256), (16,))
#: Virtual workers, and shards over which each parameter is spread.
SPREAD = sized(256, 16)
#: Nodes of four devices in the comparison with scale models, waves, and N.
_NODES, SCALED_WAVES, _N = 64, sized(12, 4), 8

_KINDS = ("fast", "slow")
_MIB = 1 << 20


def measure() -> dict[str, Any]:
    """Virtual workers → events, seconds and events per second of one simulation of `NUM_WAVES` waves."""
    found: dict[str, Any] = {}
    for num_workers in SIZES:
        plan, costs = _job(num_workers)
        options = SimulationOptions(staleness=1, minibatches=NUM_WAVES * MINIBATCHES_PER_WAVE)
        begun = time.perf_counter()
        result = simulate(plan, costs, options)
        seconds = time.perf_counter() - begun
        found[f"{num_workers} virtual workers"] = {
            "events": result.num_events,
            "seconds": round(seconds, 2),
            "events per second": round(result.num_events / seconds),
        }
    return found


def spread() -> dict[str, Any]:
    """Seconds of processor of one simulation of `NUM_WAVES` waves with the parameters spread over a shard on each node.

    A wave of a stage is a message to, and one from, each shard with a part of its layers: a quarter of all shards.
    """
    plan, costs = _job(SPREAD)
    placed = place_bytes(costs.profile, shards=plan.placed.shards, placement="balanced")
    options = SimulationOptions(staleness=1, minibatches=NUM_WAVES * MINIBATCHES_PER_WAVE)
    spans = Counter((stage.first, stage.last) for stages in plan.workers for stage in stages)
    messages = 2 * sum(
        times * sum(sums[last] > sums[first] for sums in placed.pulled.by_shard)
        for (first, last), times in spans.items()
    )
    begun = time.process_time()
    result = simulate(replace(plan, placed=placed), costs, options)
    return {
        "virtual workers and shards": SPREAD,
        "messages of weights": NUM_WAVES * messages,
        "events": result.num_events,
        "seconds of processor": round(time.process_time() - begun, 1),
        "samples per second": result.samples_per_second,
    }


def scale_models() -> dict[str, Any]:
    """Allocation → seconds of processor of the whole job and of its scale model, and the ratio of their speeds.

    The model of 100 layers of `allocation`, a shard on each node.
    """
    found: dict[str, Any] = {}
    costs = Costs(allocation.model_of_many_layers(), allocation.cluster(_NODES))
    jobs = Jobs(costs, PlanOptions(placement="balanced"), Partitioner(costs))
    divisions = {"NP": node_partition.groups(jobs), "HD": hybrid_distribution.groups(jobs)}
    divisions["ED"] = equal_distribution.groupings(jobs)[-1]
    for name, groups in divisions.items():
        plan = jobs.best_with(_N, groups)
        assert plan is not None, "a quarter of the model fits on a device"
        whole = planned(plan)
        scale = scale_model(whole.workers, whole.minibatches_per_wave, whole.placed, costs)
        assert scale is not None, "there are four kinds of nodes"
        options = SimulationOptions(staleness=0, minibatches=SCALED_WAVES * _N, staggered=True)
        begun = time.process_time()
        rate = simulate(whole, costs, options).samples_per_second
        between = time.process_time()
        small = simulate(at_scale(whole, scale), costs, replace(options, local_shards=False))
        ended = time.process_time()
        found[name] = {
            "whole": round(between - begun, 2),
            "scale model": round(ended - between, 2),
            "scale model's speed": round(sum(scale.expanded(small.worker_samples_per_second)) / rate, 3),
        }
    return found


def _job(num_workers: int) -> tuple[SimulatedPlan, Costs]:
    """One node per virtual worker, whose stages are spread over two nodes of unequal devices; a shard on each node."""
    source = random.Random(0)
    layers = tuple(
        LayerProfile(
            name=f"layer{index}",
            parameter_bytes=_MIB,
            activation_bytes=0,
            output_bytes=_MIB,
            forward_ms={kind: source.uniform(1, 2) for kind in _KINDS},
            backward_ms={kind: source.uniform(2, 4) for kind in _KINDS},
        )
        for index in range(NUM_LAYERS)
    )
    cluster = Cluster(
        device_types={kind: DeviceType(memory_bytes=1 << 34) for kind in _KINDS},
        nodes=tuple(Node(name=f"n{i}", devices=(_KINDS[i % 2],) * NUM_STAGES) for i in range(num_workers)),
        links=Links(
            intra_node=LinkSpec(bandwidth_bytes_per_second=15.75e9, latency_seconds=1e-5),
            inter_node=LinkSpec(bandwidth_bytes_per_second=7e9, latency_seconds=1e-5),
        ),
    )
    profile = Profile(version=1, model="benchmark", batch_size=32, input_bytes=_MIB, layers=layers)
    workers = []
    per = NUM_LAYERS // NUM_STAGES
    for vw in range(num_workers):
        # Neighbours swap half of their devices.
        hosts = [vw if stage < NUM_STAGES // 2 else vw ^ 1 for stage in range(NUM_STAGES)]
        workers.append(
            tuple(
                SimulatedStage(DeviceId(f"n{host}/{stage}"), _KINDS[host % 2], per * stage, per * (stage + 1))
                for stage, host in enumerate(hosts)
            )
        )
    shards = tuple(node.name for node in cluster.nodes)
    placed = place_bytes(profile, shards=shards, placement="round_robin")
    return SimulatedPlan(tuple(workers), (MINIBATCHES_PER_WAVE,) * len(workers), placed), Costs(profile, cluster)
