"""A small unequal cluster, a model that no single device holds comfortably, and plans for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hetpipe.decide.planner.choose import with_utilisation
from hetpipe.decide.planner.costs import Costs, MemoryModel, milliseconds, minibatches_per_tick
from hetpipe.decide.planner.job_rate import samples_per_second
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.decide.planner.shard_bytes import place_bytes
from hetpipe.decide.simulator.options import SimulationOptions
from hetpipe.decide.simulator.plan import SimulatedPlan, SimulatedStage
from hetpipe.decide.simulator.simulate import simulate
from hetpipe.decide.simulator.traffic import cross_node_bytes_per_minibatch
from hetpipe.report.plan_view import PlanFacts
from hetpipe.values.cluster import Cluster, DeviceType, Links, LinkSpec, Node, node_of
from hetpipe.values.ids import DeviceId
from hetpipe.values.plan_document import Alternative, PlanDocument, PlannedStage, PlannedWorker, Predicted
from hetpipe.values.profile import LayerProfile, Profile

GIB = 1 << 30
MIB = 1 << 20

#: Relative time of a layer on each type.
SLOWNESS = {"TITAN_V": 1.0, "TITAN_RTX": 1.25, "RTX_2060": 2.4, "QUADRO_P4000": 3.9}
MEMORY_GIB = {"TITAN_V": 12, "TITAN_RTX": 24, "RTX_2060": 6, "QUADRO_P4000": 8}


def profile(num_layers: int = 12, *, estimated: tuple[str, ...] = ("QUADRO_P4000",)) -> Profile:
    """Early layers have large activations, late ones many parameters."""
    layers = []
    for index in range(num_layers):
        late = index / num_layers
        forward = 2.0 + 1.5 * (index % 3)
        layers.append(
            LayerProfile(
                name=f"block{index}.conv",
                parameter_bytes=int((4 + 60 * late) * MIB),
                activation_bytes=int(220 * (1.2 - late) * MIB),
                output_bytes=int(24 * (1.1 - late) * MIB),
                forward_ms={kind: forward * slowness for kind, slowness in SLOWNESS.items()},
                backward_ms={kind: 2.0 * forward * slowness for kind, slowness in SLOWNESS.items()},
            )
        )
    return Profile(
        version=1,
        model="vgg-like",
        batch_size=32,
        input_bytes=18 * MIB,
        layers=tuple(layers),
        estimated=estimated,
    )


def cluster(devices_per_node: int = 4) -> Cluster:
    """A node of each type, as the paper's."""
    return Cluster(
        device_types={kind: DeviceType(memory_bytes=gib * GIB) for kind, gib in MEMORY_GIB.items()},
        nodes=tuple(
            Node(name=f"n{index}", devices=(kind,) * devices_per_node) for index, kind in enumerate(MEMORY_GIB)
        ),
        links=Links(
            intra_node=LinkSpec(bandwidth_bytes_per_second=15.75e9, latency_seconds=1e-5, efficiency=0.8),
            inter_node=LinkSpec(bandwidth_bytes_per_second=7e9, latency_seconds=3e-5, efficiency=0.8),
        ),
    )


#: What a planner might say of the rest of the world.
ALTERNATIVES = (
    Alternative(name="NP", samples_per_second=201.5, reason="loses 78.8 %; its n3 is the slowest"),
    Alternative(name="HD", samples_per_second=290.0, reason="loses 69.4 %; number 2 is the slowest"),
    Alternative(name="allreduce", samples_per_second=222.4, reason="loses 76.5 %; on 8 of 16 devices"),
    Alternative(name="single:TITAN_V", samples_per_second=84.2, reason="one device holds the whole model"),
    Alternative(name="single:TITAN_RTX", samples_per_second=60.1, reason="one device holds the whole model"),
    Alternative(
        name="single:RTX_2060", samples_per_second=None, reason="the whole model needs 7 bytes and RTX_2060 has 6"
    ),
)


def plan(
    workers: Sequence[Sequence[tuple[str, int]]],
    *,
    costs: Costs,
    minibatches_per_wave: int = 4,
    recompute: frozenset[str] = frozenset(),
    alternatives: tuple[Alternative, ...] = ALTERNATIVES,
) -> PlanDocument:
    """A plan by hand.

    Args:
        workers: for each virtual worker, each stage's device and the layer after its last.
        costs: what stages cost.
        minibatches_per_wave: N.
        recompute: devices whose stages recompute.
        alternatives: other plans that were considered.
    """
    memory = MemoryModel(minibatches_per_wave=minibatches_per_wave)
    planned = [_worker(stages, costs, memory, recompute) for stages in workers]
    nodes = list(dict.fromkeys(node_of(stage.device) for worker in planned for stage in worker.stages))
    placed = place_bytes(costs.profile, shards=nodes, placement="round_robin")
    simulated = SimulatedPlan(
        workers=tuple(
            tuple(SimulatedStage(stage.device, stage.type, *stage.layers) for stage in worker.stages)
            for worker in planned
        ),
        minibatches_per_wave=(minibatches_per_wave,) * len(planned),
        placed=placed,
    )
    used = {stage.device for worker in planned for stage in worker.stages}
    return PlanDocument(
        model=costs.profile.model,
        batch_size=costs.profile.batch_size,
        allocation="ED",
        weights="wave",
        staleness=0,
        virtual_workers=tuple(planned),
        minibatches_per_wave=minibatches_per_wave,
        max_minibatches_per_wave=tuple(5 for _ in planned),
        shards=tuple(nodes),
        placement=placed.as_document(),
        idle_devices=tuple(device for device in costs.cluster.devices if device not in used),
        predicted=Predicted(
            samples_per_second=simulate(
                simulated, costs, SimulationOptions(staleness=0, minibatches=8 * minibatches_per_wave)
            ).samples_per_second,
            cross_node_bytes_per_minibatch=cross_node_bytes_per_minibatch(simulated, costs),
        ),
        alternatives=alternatives,
    )


def with_counted_operations(facts: PlanFacts) -> PlanFacts:
    """The same plan of a model of token sequences whose layers' operations are known."""
    flops = {"forward_flops": 20 * 10**9, "backward_flops": 40 * 10**9}
    layers = tuple(layer.model_copy(update=flops) for layer in facts.costs.profile.layers)
    counted = facts.costs.profile.model_copy(update={"layers": layers, "tokens_per_sample": 128})
    return replace(facts, plan=with_utilisation(facts.plan, counted, facts.costs.cluster))


def _worker(
    stages: Sequence[tuple[str, int]], costs: Costs, memory: MemoryModel, recompute: frozenset[str]
) -> PlannedWorker:
    nodes = [node_of(DeviceId(device)) for device, _ in stages]
    links = [None, *(costs.cluster.link(here, behind) for here, behind in pairwise(nodes)), None]
    firsts = [0, *(last for _, last in stages)]
    planned, times = [], []
    for index, (device, last) in enumerate(stages):
        kind, first = costs.cluster.devices[DeviceId(device)], firsts[index]
        receive = costs.receive_ticks(first, last, links[index], links[index + 1])
        times.append(receive + costs.compute_ticks(kind, first, last, recompute=device in recompute))
        needed = costs.stage_bytes(
            first, last, stage=index, num_stages=len(stages), memory=memory, recompute=device in recompute
        )
        planned.append(
            PlannedStage(
                device=DeviceId(device),
                type=kind,
                layers=(first, last),
                time_ms=milliseconds(times[-1]),
                memory_bytes=needed,
                receive_ms=milliseconds(receive),
                recompute=device in recompute,
                in_flight=memory.in_flight(index, len(stages)),
            )
        )
    return PlannedWorker(
        stages=tuple(planned),
        bottleneck_ms=milliseconds(max(times)),
        samples_per_second=samples_per_second(minibatches_per_tick(times, memory), costs.profile.batch_size),
    )


def equal_mix(minibatches_per_wave: int = 4) -> PlanFacts:
    """Four virtual workers alike, one device of each type in each; the last node's last device idle."""
    costs = Costs(profile(), cluster(5))
    ends = (("n2", 1), ("n3", 2), ("n1", 7), ("n0", 12))
    workers = [[(f"{node}/{vw}", last) for node, last in ends] for vw in range(4)]
    document = plan(
        workers,
        costs=costs,
        minibatches_per_wave=minibatches_per_wave,
        recompute=frozenset({f"n2/{vw}" for vw in range(4)}),
    )
    return PlanFacts(document, costs, PlanOptions(allocation="ED"))


def node_by_node() -> PlanFacts:
    """One virtual worker per node."""
    costs = Costs(profile(), cluster())
    workers = [[(f"n{node}/{index}", 3 * index + 3) for index in range(4)] for node in range(4)]
    return PlanFacts(plan(workers, costs=costs, minibatches_per_wave=2), costs, PlanOptions(allocation="NP"))


def long_names() -> PlanFacts:
    """Names that no column is made for, and that HTML must not take for its own."""
    kind, node = "<b>A&B</b>_WITH_A_VERY_LONG_NAME", "<script>alert(1)</script>-node-with-a-long-name"
    node = node.replace("/", "|")
    given = profile(3, estimated=())
    layers = tuple(
        layer.model_copy(
            update={
                "name": f"encoder.<img src=x onerror=alert({index})>.attention.out_projection",
                "forward_ms": {kind: 1234.5},
                "backward_ms": {kind: 2345.6},
            }
        )
        for index, layer in enumerate(given.layers)
    )
    costs = Costs(
        given.model_copy(update={"layers": layers, "estimated": (kind,), "model": "</title><script>x</script>"}),
        Cluster(
            device_types={kind: DeviceType(memory_bytes=24 * GIB)},
            nodes=(Node(name=node, devices=(kind,) * 3),),
            links=cluster().links,
        ),
    )
    document = plan([[(f"{node}/{index}", index + 1) for index in range(3)]], costs=costs, minibatches_per_wave=3)
    return PlanFacts(document, costs, PlanOptions(allocation="NP"))


def many_workers() -> PlanFacts:
    """More virtual workers than a picture has room for, of two kinds: with two stages and with four."""
    costs = Costs(profile(), cluster(24))
    workers: list[list[tuple[str, int]]] = [[(f"n0/{vw}", 8), (f"n1/{vw}", 12)] for vw in range(20)]
    workers += [[(f"n{2 + index // 2}/{2 * vw + index % 2}", 3 * index + 3) for index in range(4)] for vw in range(8)]
    return PlanFacts(plan(workers, costs=costs, minibatches_per_wave=2), costs, PlanOptions())


def all_different(num_workers: int = 12) -> PlanFacts:
    """Every virtual worker is cut at another layer."""
    costs = Costs(profile(num_workers + 1), cluster(num_workers))
    workers = [[(f"n0/{vw}", vw + 1), (f"n1/{vw}", num_workers + 1)] for vw in range(num_workers)]
    return PlanFacts(plan(workers, costs=costs, minibatches_per_wave=2), costs, PlanOptions())
