"""Scale models: a few virtual workers of each kind are simulated, and stand for all those of a large job.

Nearly all events of a simulation with hundreds of virtual workers are messages of weights: each of them with a shard on
each of hundreds of nodes. Nodes that virtual workers share form an *island*. Islands of the same kind (the same stages,
on the same types, over the same nodes among each other) behave alike, apart from the order in which they start. The
scale model has every kind of island in about the same proportion, and the parameters on a shard on each of its own
nodes. A shard then has more bytes and fewer virtual workers in proportion, so the load of each network card remains.

It is an approximation. Weights that stay on a node pass its network card, too: those are few in a large job (1/256 of
them), but not in a scale model. Messages are fewer and larger, so they wait for each other less. Speeds are nearly
exact where devices are the bottleneck, and some percent too high where the network is (`docs/benchmarks.md`, g).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Protocol, TypeVar

from hetpipe.decide.planner.costs import Costs, MemorySpan
from hetpipe.decide.planner.placement import Span, fullest_allowed
from hetpipe.decide.planner.shard_bytes import PlacedParameters, place_bytes
from hetpipe.values.cluster import node_of

#: Stages of a scale model, about. A job of less than twice as many is simulated as it is.
_SCALED_STAGES = 128

_T = TypeVar("_T")


class PlannedSpan(Span, MemorySpan, Protocol):
    """A stage of a plan: layers on a device of a known type."""


@dataclass(frozen=True, slots=True)
class ScaleModel:
    """Some of a job's virtual workers."""

    workers: tuple[int, ...]
    """Their indices in the job, ascending."""
    stand_ins: tuple[int, ...]
    """For each virtual worker of the job, the position in `workers` of the one that stands for it."""
    placed: PlacedParameters
    """The parameters on a shard on each of their nodes."""

    def chosen(self, of_each: Sequence[_T]) -> tuple[_T, ...]:
        """The entries of its virtual workers, of one entry for each of the job's."""
        return tuple(of_each[vw] for vw in self.workers)

    def expanded(self, of_chosen: Sequence[_T]) -> list[_T]:
        """An entry for each of the job's virtual workers, of those of its own."""
        return [of_chosen[like] for like in self.stand_ins]


def scale_model(
    workers: Sequence[Sequence[PlannedSpan]], waves: Sequence[int], placed: PlacedParameters, costs: Costs
) -> ScaleModel | None:
    """The scale model of a large job.

    Args:
        workers: the stages of each virtual worker.
        waves: N_v of each virtual worker.
        placed: the parameters on shards.
        costs: the profile and the cluster.

    Returns:
        None if the job is small, if its kinds of islands are many, or if nodes differ in other ways than their devices:
        in their links, or in the number and the load of their shards.
    """
    num_stages = sum(map(len, workers))
    if num_stages < 2 * _SCALED_STAGES or costs.cluster.links.overrides or not _is_even(workers, placed):
        return None
    kinds = _islands_by_kind(workers, waves)
    scale = num_stages / _SCALED_STAGES
    stands_for: dict[int, int] = {}
    for islands in kinds.values():
        kept = islands[: max(1, round(len(islands) / scale))]
        for island, like in zip(islands, cycle(kept), strict=False):
            stands_for |= zip(island, like, strict=True)
    chosen = sorted(set(stands_for.values()))
    if 2 * len(chosen) > len(workers):
        return None  # too many kinds
    nodes = dict.fromkeys(node_of(stage.device) for vw in chosen for stage in workers[vw])
    return ScaleModel(
        workers=tuple(chosen),
        stand_ins=tuple(chosen.index(stands_for[vw]) for vw in range(len(workers))),
        placed=place_bytes(
            costs.original,
            shards=tuple(nodes),
            placement="balanced",
            frozen_layers=costs.frozen_layers,
            halved=placed.halved,
        ),
    )


def _is_even(workers: Sequence[Sequence[Span]], placed: PlacedParameters) -> bool:
    """Whether there is one shard on each node that computes, and all of them have about the same bytes."""
    nodes = {node_of(stage.device) for stages in workers for stage in stages}
    if sorted(placed.shards) != sorted(nodes):
        return False
    sizes = placed.pulled.bytes_on.values()
    return max(sizes) <= fullest_allowed(sum(sizes), len(sizes))


def _islands_by_kind(
    workers: Sequence[Sequence[PlannedSpan]], waves: Sequence[int]
) -> dict[tuple[object, ...], list[list[int]]]:
    """Kind → its islands, each as the indices of its virtual workers."""
    kinds: dict[tuple[object, ...], list[list[int]]] = {}
    for island in _islands(workers):
        position: dict[str, int] = {}
        kind = tuple(
            (
                waves[vw],
                tuple(
                    (
                        position.setdefault(node_of(stage.device), len(position)),
                        *(stage.kind, stage.first, stage.last, stage.recompute, stage.memory, stage.policy_ticks),
                    )
                    for stage in workers[vw]
                ),
            )
            for vw in island
        )
        kinds.setdefault(kind, []).append(island)
    return kinds


def _islands(workers: Sequence[Sequence[Span]]) -> list[list[int]]:
    """Virtual workers that share nodes, directly or through others; in the order of the first of each."""
    joined: dict[str, str] = {}

    def root(node: str) -> str:
        while (above := joined.setdefault(node, node)) != node:
            joined[node] = node = joined[above]
        return node

    for stages in workers:
        first, *others = {root(node_of(stage.device)) for stage in stages}
        joined |= dict.fromkeys(others, first)
    islands: dict[str, list[int]] = {}
    for vw, stages in enumerate(workers):
        islands.setdefault(root(node_of(stages[0].device)), []).append(vw)
    return list(islands.values())
