"""Small regular jobs, for closed forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetpipe.decide.planner.costs import Costs
from hetpipe.decide.planner.shard_bytes import place_bytes
from hetpipe.decide.simulator.options import SimulationOptions
from hetpipe.decide.simulator.plan import SimulatedPlan, SimulatedStage
from hetpipe.decide.simulator.result import SimulationResult
from hetpipe.decide.simulator.simulate import simulate
from hetpipe.values.cluster import Cluster, DeviceType, Links, LinkSpec, Node
from hetpipe.values.ids import DeviceId
from hetpipe.values.profile import LayerProfile, Profile

BATCH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Regular:
    """Virtual workers that cut the same model in the same way: layer i is stage i."""

    forward_ms: Sequence[float]
    """Of each stage."""
    backward_ms: Sequence[float]
    num_workers: int = 1
    n: int = 1
    parameter_bytes: int = 0
    """Of each layer."""
    output_bytes: int = 0
    shards: Sequence[str] = ()
    bandwidth: float = 1e9
    factors: Mapping[int, float] | None = None
    """Virtual worker → how many times longer it takes."""

    @property
    def costs(self) -> Costs:
        """One node per virtual worker, one device type per virtual worker."""
        factors = {vw: (self.factors or {}).get(vw, 1.0) for vw in range(self.num_workers)}
        layers = tuple(
            LayerProfile(
                name=f"layer{index}",
                parameter_bytes=self.parameter_bytes,
                activation_bytes=0,
                output_bytes=self.output_bytes,
                forward_ms={f"t{vw}": factor * forward for vw, factor in factors.items()},
                backward_ms={f"t{vw}": factor * backward for vw, factor in factors.items()},
            )
            for index, (forward, backward) in enumerate(zip(self.forward_ms, self.backward_ms, strict=True))
        )
        link = LinkSpec(bandwidth_bytes_per_second=self.bandwidth)
        cluster = Cluster(
            device_types={f"t{vw}": DeviceType(memory_bytes=1 << 34) for vw in factors},
            nodes=tuple(Node(name=f"n{vw}", devices=(f"t{vw}",) * len(layers)) for vw in factors),
            links=Links(intra_node=link, inter_node=link),
        )
        return Costs(Profile(version=1, model="regular", batch_size=BATCH, input_bytes=0, layers=layers), cluster)

    @property
    def plan(self) -> SimulatedPlan:
        """Virtual worker v on node nv."""
        workers = tuple(
            tuple(
                SimulatedStage(DeviceId(f"n{vw}/{index}"), f"t{vw}", index, index + 1)
                for index in range(len(self.forward_ms))
            )
            for vw in range(self.num_workers)
        )
        shards = self.shards or ("n0",)
        placed = place_bytes(self.costs.profile, shards=shards, placement="round_robin")
        return SimulatedPlan(workers, (self.n,) * self.num_workers, placed)

    def run(self, options: SimulationOptions) -> SimulationResult:
        """Simulate, with everything that goes on."""
        return simulate(self.plan, self.costs, options, with_activities=True)
