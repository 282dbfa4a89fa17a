"""A small job to simulate, in plain numbers: both simulators get it, so this file imports nothing of hetpipe."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Link:
    """A connection, the same in both directions."""

    bandwidth: float
    latency: float
    efficiency: float


@dataclass(frozen=True, slots=True)
class CaseStage:
    """Layers [first, last) on a device."""

    node: str
    device: int
    kind: str
    first: int
    last: int
    recompute: bool


@dataclass(frozen=True, slots=True)
class Case:
    """A whole job."""

    nodes: dict[str, list[str]]
    """Node → the types of its devices."""
    intra: Link
    inter: Link
    overrides: dict[tuple[str, str], Link]
    forward_ms: dict[str, list[float]]
    """Type → per layer."""
    backward_ms: dict[str, list[float]]
    parameter_bytes: list[int]
    output_bytes: list[int]
    workers: list[list[CaseStage]]
    shards: list[str]
    """The node of each; empty: the stages alone hold the weights."""
    shard_of_layer: list[int]
    apply_bytes_per_second: float
    n: int
    staleness: int | None
    minibatches: int
    weights: str
    schedule: str
    deterministic: bool
    pull: str
    contention: bool
    staggered: bool
    exchange_seconds: float
    halved: bool = False
    """Whether pushes have half their bytes, rounded up for each layer."""
    own_n: tuple[int, ...] = ()
    """N_v of each virtual worker; empty: n for all."""

    @property
    def waves(self) -> tuple[int, ...]:
        return self.own_n or (self.n,) * len(self.workers)

    def of(self, vw: int) -> Case:
        """The case as one virtual worker sees it; all complete as many whole waves where N differs."""
        if not self.own_n:
            return self
        num_waves = self.minibatches * len(self.workers) // sum(self.own_n)
        return replace(self, n=self.own_n[vw], minibatches=num_waves * self.own_n[vw])

    def pushed(self, layer: int) -> int:
        """Bytes of a push of a layer."""
        return (self.parameter_bytes[layer] + 1) // 2 if self.halved else self.parameter_bytes[layer]

    def link(self, source: str, target: str) -> Link:
        """Between two nodes, or within one."""
        for pair, link in self.overrides.items():
            if set(pair) == {source, target}:
                return link
        return self.intra if source == target else self.inter


KINDS = ("quick", "slow", "odd")

#: Which schedules a policy may be run in.
SCHEDULES = {
    "wave": ["auto", "1f1b", "fifo"],
    "flush": ["auto", "1f1b", "fifo", "gpipe", "gpipe"],
    **{weights: ["auto", "1f1b"] for weights in ("stash", "vertical", "double_buffer", "predict", "spectrain")},
}


def random_case(seed: int) -> Case:
    """1 to 3 virtual workers of 1 to 4 stages, with everything else drawn, too."""
    r = random.Random(seed)
    num_stages = [r.randint(1, 4) for _ in range(r.randint(1, 3))]
    num_layers = r.randint(4, 6)
    nodes: dict[str, list[str]] = {f"n{i}": [] for i in range(r.randint(1, 3))}
    workers: list[list[CaseStage]] = []
    for depth in num_stages:
        cuts = [0, *sorted(r.sample(range(1, num_layers), depth - 1)), num_layers]
        stages = []
        for first, last in itertools.pairwise(cuts):
            node, kind = r.choice(list(nodes)), r.choice(KINDS)
            nodes[node].append(kind)
            stages.append(CaseStage(node, len(nodes[node]) - 1, kind, first, last, r.random() < 0.2))
        workers.append(stages)
    names = list(nodes)
    for devices in nodes.values():
        devices.append("quick")  # no node is empty
    weights = r.choice(["wave", "wave", "flush", "flush", *SCHEDULES])
    n = r.randint(1, 6)
    if weights not in {"wave", "flush"}:
        n = max(n, *num_stages)
    staleness = r.choice([0, 1, 4, None])
    num_shards = r.randint(1 if len(workers) > 1 else 0, 2)
    speeds = (1e6, 1e7, 1e8)
    is_regular = r.random() < 0.4  # much ends in the same instant

    def time(most: int) -> float:
        return float(r.randint(1, 2)) if is_regular else r.uniform(0.1, most)

    overrides = {(names[0], names[-1]): _link(r, speeds)} if r.random() < 0.3 else {}
    return Case(
        nodes=nodes,
        intra=_link(r, speeds),
        inter=_link(r, speeds),
        overrides=overrides,
        forward_ms={kind: [time(5) for _ in range(num_layers)] for kind in KINDS},
        backward_ms={kind: [time(9) for _ in range(num_layers)] for kind in KINDS},
        parameter_bytes=[r.choice([0, 100_000, r.randint(1, 200_000)]) for _ in range(num_layers)],
        output_bytes=[r.choice([0, 10_000, r.randint(0, 20_000)]) for _ in range(num_layers)],
        workers=workers,
        shards=[r.choice(names) for _ in range(num_shards)],
        shard_of_layer=[r.randrange(num_shards) for _ in range(num_layers if num_shards else 0)],
        apply_bytes_per_second=r.choice([1e6, 1e8]),
        n=n,
        staleness=staleness,
        minibatches=r.randint(1, 7 * n),
        weights=weights,
        schedule=r.choice(SCHEDULES[weights]),
        deterministic=staleness is not None and r.random() < 0.5,
        contention=r.random() < 0.6,
        staggered=r.random() < 0.5,
        pull="required" if staleness is not None and r.random() < 0.4 else "every_wave",
        exchange_seconds=r.choice([0.0, 0.0, 0.003]),
        halved=r.random() < 0.3,
    )


def unequal_case(seed: int) -> Case:
    """The same with an N of its own for each virtual worker, and whole waves."""
    case, r = random_case(seed), random.Random(f"waves {seed}")
    least = [1 if case.weights in {"wave", "flush"} else len(stages) for stages in case.workers]
    own = tuple(r.randint(low, low + 5) for low in least)
    return replace(case, n=0, own_n=own, minibatches=sum(own) * r.randint(1, 2))


def many_shards_case(seed: int) -> Case:
    """The same with a shard for nearly every layer, several on a node: transfers have many parts, some of one size."""
    case, r = random_case(seed), random.Random(f"shards {seed}")
    num_shards = r.randint(3, 6)
    shard_of_layer = [r.randrange(num_shards) for _ in case.parameter_bytes]
    return replace(case, shards=[r.choice(list(case.nodes)) for _ in range(num_shards)], shard_of_layer=shard_of_layer)


def _link(r: random.Random, speeds: tuple[float, ...]) -> Link:
    return Link(r.choice(speeds), r.choice([0.0, 0.0005]), r.choice([1.0, 0.7]))
