"""Cases as hetpipe's own values, and small regular jobs."""

from __future__ import annotations

from hetpipe.decide.planner.costs import Costs
from hetpipe.decide.planner.options import SCHEDULE_CHOICES
from hetpipe.decide.planner.placement import Piece
from hetpipe.decide.planner.shard_bytes import PlacedParameters
from hetpipe.decide.simulator.documents import weight_policy
from hetpipe.decide.simulator.options import SimulationOptions
from hetpipe.decide.simulator.plan import SimulatedPlan, SimulatedStage
from hetpipe.values.cluster import Cluster, DeviceType, LinkOverride, Links, LinkSpec, Node
from hetpipe.values.ids import DeviceId
from hetpipe.values.profile import LayerProfile, Profile
from tests.decide.simulator.case import Case, Link

_MEMORY_BYTES = 1 << 34


def plan_of(case: Case) -> tuple[SimulatedPlan, Costs, SimulationOptions]:
    """What `simulate` takes for `case`."""
    plan = SimulatedPlan(
        tuple(
            tuple(
                SimulatedStage(DeviceId(f"{s.node}/{s.device}"), s.kind, s.first, s.last, recompute=s.recompute)
                for s in stages
            )
            for stages in case.workers
        ),
        case.waves,
        PlacedParameters(
            [
                Piece(f"layer{layer}", layer, shard, 0, case.parameter_bytes[layer])
                for layer, shard in enumerate(case.shard_of_layer)
            ],
            case.shards,
            len(case.parameter_bytes),
            halved=[f"layer{layer}" for layer in range(len(case.parameter_bytes))] if case.halved else (),
        ),
    )
    options = SimulationOptions(
        staleness=case.staleness,
        minibatches=case.minibatches,
        weights=weight_policy(case.weights),
        schedule=next(choice for choice in SCHEDULE_CHOICES if choice == case.schedule),
        deterministic=case.deterministic,
        pull="required" if case.pull == "required" else "every_wave",
        staggered=case.staggered,
        contention=case.contention,
        apply_bytes_per_second=case.apply_bytes_per_second,
        exchange_seconds=case.exchange_seconds,
    )
    return plan, _costs(case), options


def _costs(case: Case) -> Costs:
    layers = tuple(
        LayerProfile(
            name=f"layer{layer}",
            parameter_bytes=parameters,
            activation_bytes=0,
            output_bytes=outputs,
            forward_ms={kind: times[layer] for kind, times in case.forward_ms.items()},
            backward_ms={kind: times[layer] for kind, times in case.backward_ms.items()},
        )
        for layer, (parameters, outputs) in enumerate(zip(case.parameter_bytes, case.output_bytes, strict=True))
    )
    cluster = Cluster(
        device_types={kind: DeviceType(memory_bytes=_MEMORY_BYTES) for kind in case.forward_ms},
        nodes=tuple(Node(name=name, devices=tuple(kinds)) for name, kinds in case.nodes.items()),
        links=Links(
            intra_node=_link(case.intra),
            inter_node=_link(case.inter),
            overrides=tuple(
                LinkOverride(between=pair, **_link(link).model_dump()) for pair, link in case.overrides.items()
            ),
        ),
    )
    return Costs(Profile(version=1, model="case", batch_size=1, input_bytes=100, layers=layers), cluster)


def _link(link: Link) -> LinkSpec:
    return LinkSpec(bandwidth_bytes_per_second=link.bandwidth, latency_seconds=link.latency, efficiency=link.efficiency)
