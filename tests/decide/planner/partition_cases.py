"""Random instances of the partition problem, and an oracle that tries everything. Imports no planner code.

The oracle is written from the issue's definitions and the tables of `policies.md`, not from `costs`; it rounds times to
whole picoseconds where those definitions meet the planner's, so that equal means equal.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations
from typing import Any, Literal

from hetpipe.values.cluster import Cluster, LinkSpec
from hetpipe.values.profile import Profile

MIB = 1 << 20
PS_PER_MS = 10**9

Recompute = Literal["auto", "on", "off"]
Policy = Literal["wave", "stash", "vertical", "double_buffer", "flush", "predict", "spectrain"]
Schedule = Literal["1f1b", "fifo", "gpipe"]
POLICIES: tuple[Policy, ...] = ("wave", "stash", "vertical", "double_buffer", "flush", "predict", "spectrain")
BY_WAVE = ("flush", "double_buffer")


@dataclass(frozen=True, slots=True)
class Case:
    """One instance."""

    profile: Profile
    cluster: Cluster
    weights: Policy
    minibatches_per_wave: int
    optimizer_slots: int
    reserve_bytes: int
    recompute: Recompute
    schedule: Schedule = "1f1b"
    accumulate: int = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """How large random instances get."""

    num_layers: tuple[int, int]
    num_devices: tuple[int, int]
    num_nodes: tuple[int, int]
    zeros: bool = True
    """Whether times and sizes may be 0 and are often equal."""
    room: tuple[float, float] = (0.5, 4.0)
    """A device's memory, relative to its share of four copies of the parameters and one of the activations."""


def random_case(seed: int, shape: Shape) -> Case:
    """An instance; memory is often tight and sometimes too small."""
    source = random.Random(seed)
    types = "VRG"[: source.randint(1, 3)]
    step = source.choice([1, 4]) if shape.zeros else 0
    kept = source.choice([1, 4])
    slow = {kind: source.choice([1.0, 1.0, 1.5, 3.0]) for kind in types}

    def amount(most: int) -> int:
        return source.randint(0, most) // step * step if step else source.randint(most // 20, most)

    layers: list[dict[str, Any]] = []
    for index in range(source.randint(*shape.num_layers)):
        forward, backward = amount(10), amount(20)
        own = source.random() < 0.5
        layers.append(
            {
                "name": f"layer{index}",
                "parameter_bytes": amount(8) * MIB,
                "activation_bytes": amount(12) * kept * MIB,
                "output_bytes": amount(12) * MIB,
                "forward_ms": {t: float(amount(10) if own else forward) * slow[t] for t in types},
                "backward_ms": {t: float(amount(20) if own else backward) * slow[t] for t in types},
            }
        )
    # A source of its own: the cases are the same as without it, but for what comes back and what is forbidden.
    cuts = random.Random(f"cuts {seed}")
    for layer in layers[:-1] if seed % 2 else ():
        layer["gradient_bytes"] = cuts.choice([0, 1, 2, 3]) * layer["output_bytes"] // 2
        if cuts.random() < 0.3:
            layer["no_cut"] = "so it is"
    profile = {
        "version": 2,
        "model": "random",
        "batch_size": 4,
        "input_bytes": amount(12) * MIB,
        "layers": tuple(layers),
    }
    num_devices = min(source.randint(*shape.num_devices), len(layers))
    nodes: list[list[str]] = [[] for _ in range(min(num_devices, source.randint(*shape.num_nodes)))]
    for index in range(num_devices):
        nodes[index if index < len(nodes) else source.randrange(len(nodes))].append(source.choice(types))
    per_device = sum(layer["parameter_bytes"] * 4 + layer["activation_bytes"] for layer in layers) // num_devices
    cluster = {
        "device_types": {
            t: {"memory_bytes": max(16 * MIB, int(per_device * source.uniform(*shape.room)))} for t in types
        },
        "nodes": tuple({"name": f"n{i}", "devices": tuple(node)} for i, node in enumerate(nodes)),
        "links": _links(source, len(nodes)),
    }
    weights = source.choice(POLICIES)
    n = source.randint(1, 7)
    return Case(
        Profile.model_validate(profile),
        Cluster.model_validate(cluster),
        weights=weights,
        minibatches_per_wave=n,
        optimizer_slots=source.randint(0, 2),
        reserve_bytes=source.choice([0, MIB]),
        recompute=source.choice(["auto", "auto", "on", "off"]),
        schedule=source.choice(["1f1b", "gpipe"]) if weights == "flush" else "1f1b",
        accumulate=1 if weights in BY_WAVE else source.choice([1, n]),
    )


def _links(source: random.Random, num_nodes: int) -> dict[str, Any]:
    def link() -> dict[str, float]:
        return {
            "bandwidth_bytes_per_second": source.choice([5e8, 1e9, 4e9]),
            "latency_seconds": source.choice([0.0, 1e-4, 2e-3]),
            "efficiency": source.choice([0.5, 1.0]),
        }

    pairs = [(a, b) for a in range(num_nodes) for b in range(a, num_nodes)]
    chosen = source.sample(pairs, source.choice([0, 0, min(2, len(pairs)), len(pairs)]))
    return {
        "intra_node": link(),
        "inter_node": link(),
        "overrides": tuple({**link(), "between": (f"n{a}", f"n{b}")} for a, b in chosen),
    }


# -- the oracle --------------------------------------------------------------------------------------------------------


def in_flight(case: Case, k: int, i: int) -> int:
    """The column "in flight" of `policies.md`."""
    policy, n = case.weights, case.minibatches_per_wave
    if policy == "flush":
        return n if case.schedule == "gpipe" else min(n, k - i)
    if policy != "wave":
        return k - i
    if k == 1:
        return 1
    return min(n, k - i) if n <= k else k - i + ((n - k) * (k - 1 - i)) // (k - 1)


def weight_buffers(case: Case, k: int, i: int) -> int:
    """The column "weight buffers" of `policies.md`, where the planner counts the predicting policies as 2."""
    return {
        "wave": case.minibatches_per_wave,
        "stash": k - i,
        "vertical": k,
        "double_buffer": 2,
        "flush": 1,
        "predict": 2,
        "spectrain": 2,
    }[case.weights]


def gradients(case: Case) -> int:
    """One, and an average that grows beside it where several minibatches make an update."""
    averaged = case.minibatches_per_wave if case.weights in BY_WAVE else case.accumulate
    return 2 if averaged > 1 else 1


def transfer_ps(link: LinkSpec, num_bytes: int) -> int:
    """transfer_ms(link, b) = 1000·(latency + b / (bandwidth·efficiency))."""
    seconds = link.latency_seconds + num_bytes / (link.bandwidth_bytes_per_second * link.efficiency)
    return round(1000.0 * seconds * PS_PER_MS)


def link_between(cluster: Cluster, a: str, b: str) -> LinkSpec:
    """The link of two nodes; the override if there is one."""
    for override in cluster.links.overrides:
        if sorted(override.between) == sorted((a, b)):
            return override
    return cluster.links.intra_node if a == b else cluster.links.inter_node


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers [first, last) as stage `index` of `num_stages`, on a type on a node, with its neighbours' nodes."""

    index: int
    num_stages: int
    kind: str
    node: str
    before: str | None
    behind: str | None
    first: int
    last: int


def stage_bytes(case: Case, stage: Stage, *, recompute: bool) -> int:
    """The issue's stage memory."""
    layers = case.profile.layers[stage.first : stage.last]
    position = (case, stage.num_stages, stage.index)
    tensors = weight_buffers(*position) + 2 + gradients(case) + case.optimizer_slots
    activations = sum(layer.activation_bytes for layer in layers)
    kept = in_flight(*position) * activations
    if recompute:
        entering = case.profile.layers[stage.first - 1].output_bytes if stage.first else case.profile.input_bytes
        kept = in_flight(*position) * entering + activations
    return sum(layer.parameter_bytes for layer in layers) * tensors + kept + case.reserve_bytes


def stage_ps(case: Case, stage: Stage) -> int | None:
    """The stage time of its definition in picoseconds, recomputing as the case says.

    None where memory does not suffice, or where the stage begins or ends at a forbidden cut.
    """
    if any(case.profile.layers[cut - 1].no_cut for cut in (stage.first, stage.last) if cut):
        return None
    capacity = case.cluster.device_types[stage.kind].memory_bytes
    allowed = {"on": [True], "off": [False], "auto": [False, True]}[case.recompute]
    fitting = [again for again in allowed if stage_bytes(case, stage, recompute=again) <= capacity]
    if not fitting:
        return None
    layers = case.profile.layers
    total = 0
    for layer in layers[stage.first : stage.last]:
        total += round(layer.forward_ms[stage.kind] * PS_PER_MS) * (2 if fitting[0] else 1)
        total += round(layer.backward_ms[stage.kind] * PS_PER_MS)
    if stage.before is not None:
        link = link_between(case.cluster, stage.before, stage.node)
        total += transfer_ps(link, layers[stage.first - 1].output_bytes)
    if stage.behind is not None:
        link = link_between(case.cluster, stage.node, stage.behind)
        total += transfer_ps(link, layers[stage.last - 1].backward_bytes)
    return total


def best_of_all(case: Case) -> int | None:
    """The smallest largest stage time over every order and every cut, or None if none fits."""
    places = [(node.name, kind) for node in case.cluster.nodes for kind in node.devices]
    num_layers, num_stages = len(case.profile.layers), len(places)
    known: dict[Stage, int | None] = {}
    longest: list[int] = []
    for order in set(permutations(places)):
        nodes = [None, *(node for node, _ in order), None]
        for cut in combinations(range(1, num_layers), num_stages - 1):
            times = []
            for index, (first, last) in enumerate(pairwise((0, *cut, num_layers))):
                node, kind = order[index]
                stage = Stage(index, num_stages, kind, node, nodes[index], nodes[index + 2], first, last)
                if stage not in known:
                    known[stage] = stage_ps(case, stage)
                time = known[stage]
                if time is None:
                    break
                times.append(time)
            else:
                longest.append(max(times))
    return min(longest, default=None)
