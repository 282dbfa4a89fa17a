"""The bound that staleness puts on a job's rate: the frequency of the weights' round trip.

A minibatch that waits for a published clock waits for waves of every virtual worker: for their way through the
pipeline, their push to the shards, the shards' sums, the publication, and its own pull. With D the bound, N the
minibatches per wave, Λ the latency of the pipeline (forward and backward through all stages, transfers included) and
T_sync = push + apply + pull, minibatches per second of each virtual worker are at most

* (D + 1)·N / (Λ + T_sync) with one update per minibatch: minibatch kN needs the waves up to number k − 2 − D, whose
  last minibatch is (k − 1 − D)·N;
* (D + 1)·N / (T_wave + T_sync) and N / T_wave under `flush`, T_wave the time from the first forward of a wave to its
  last backward: the first minibatch of a wave needs all waves but the D before it, and the pipeline drains;
* (D + 2)·N / (T_wave + T_sync) under `double_buffer`: the same, without the wave before.

The gate alone defines which wave needs which; the three cases follow from it. All figures here are lower bounds on
simulated times, so that a rate is never below the simulated one:

* a transfer takes its uncontended time, and a resource (one direction of a network card or PCIe root) shared by several
  transfers takes their sum until the last one is complete;
* a shard adds updates one virtual worker at a time, in their order;
* a stage pushes one wave at a time.

The same dependencies hold with `pull: required`: a virtual worker that keeps its weights has pulled them earlier. Only
the pulls of different virtual workers need not coincide any more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Literal, Protocol

from hetpipe.decide.planner.costs import APPLY_BYTES_PER_SECOND, Costs, MemoryModel, MemorySpan, ticks
from hetpipe.decide.planner.placement import Span
from hetpipe.decide.planner.shard_bytes import PlacedParameters, ShardSums
from hetpipe.decide.sync.gate import Gate
from hetpipe.values.cluster import LinkSpec, node_of
from hetpipe.values.policies import PullTiming
from hetpipe.values.sync import SyncSpec

#: One direction of a shared resource: a node's network card, or its PCIe root.
_Resource = tuple[str, Literal["card", "root"], Literal["out", "in"]]


class ComputedSpan(Span, MemorySpan, Protocol):
    """Consecutive layers on a device of a known type."""


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """Limits of the round trip of weights, in minibatches per tick of each virtual worker. Infinite for no bound."""

    waves: float
    """Limit of the waves in flight between two publications of which the later one depends on the earlier."""
    exchange: float
    """Limit of consecutive waves: a push of each stage, all pushes through shared resources, and the sums of the
    fullest shard."""
    drained: float
    """Limit of waves that begin with an empty pipeline (`flush`), for any D; of the slowest virtual worker."""

    @property
    def minibatches_per_tick(self) -> float:
        """The smallest limit."""
        return min(self.waves, self.exchange, self.drained)


NO_ROUND_TRIP = RoundTrip(math.inf, math.inf, math.inf)


def round_trip(
    workers: Sequence[Sequence[ComputedSpan]],
    *,
    costs: Costs,
    placed: PlacedParameters,
    memory: MemoryModel,
    staleness: int | None,
    network_cards: Mapping[str, float],
    pull: PullTiming = "every_wave",
    exchanges_of: Callable[[Places, PlacedParameters], Exchanges] | None = None,
) -> RoundTrip:
    """Compute the bound for each virtual worker of a job.

    Args:
        workers: the stages of each virtual worker.
        costs: times and links.
        placed: the parameters on shards; without shards there are no pushes and no waits.
        memory: the policy, its schedule and N.
        staleness: D; None for no waits.
        network_cards: node → bytes per second in each direction.
        pull: when weights are pulled.
        exchanges_of: cache of `Exchanges` on this cluster; None to compute them.
    """
    n = memory.minibatches_per_wave
    num_waves, span = _waves_of_a_round(memory, staleness or 0, pull)
    pipes = [_Pipe(stages, costs, memory) for stages in workers]
    drained = math.inf
    if memory.policy.drains:
        drained = _over(n, max(pipe.through(n, {0: 0}, {0: 0}) for pipe in pipes))
    if not placed.shards or staleness is None:
        return RoundTrip(math.inf, math.inf, drained)
    apply_ticks = max(ticks(1000 * sums[-1] / APPLY_BYTES_PER_SECOND) for sums in placed.pulled.by_shard)
    places = places_of(workers)
    exchanges = (
        Exchanges(places, costs=costs, placed=placed, network_cards=network_cards)
        if exchanges_of is None
        else exchanges_of(places, placed)
    )
    each = max(exchanges.longest_push, len(workers) * apply_ticks)
    longest = exchanges.longest(pipes, span, apply_ticks, pulls_meet=pull == "every_wave")
    return RoundTrip(_over(num_waves * n, longest), _over(n, each), drained)


def _over(minibatches: int, num_ticks: int) -> float:
    return minibatches / num_ticks if num_ticks else math.inf


def _waves_of_a_round(memory: MemoryModel, staleness: int, pull: PullTiming = "every_wave") -> tuple[int, int]:
    """(waves between a publication and the next one that depends on its round trip, minibatches concerned).

    A minibatch that needs clock c is followed by the rest of its wave w, after which clock w + 1 can be published.

    >>> _waves_of_a_round(MemoryModel(weights="wave", minibatches_per_wave=4), 1)
    (2, 1)
    >>> _waves_of_a_round(MemoryModel(weights="flush", minibatches_per_wave=4), 1)
    (2, 4)
    >>> _waves_of_a_round(MemoryModel(weights="double_buffer", minibatches_per_wave=4), 1)
    (3, 4)
    """
    n = memory.minibatches_per_wave
    gate = Gate(SyncSpec(n, staleness, weights=memory.weights, pull=pull))
    p = gate.switch_minibatch(staleness + 3)
    wave = gate.wave_of(p)
    awaited = gate.awaited(p, in_use=gate.required(p) - 1)
    return wave + 1 - awaited, (wave + 1) * n - p + 1


class _Pipe:
    """Times of minibatches in the pipeline of one virtual worker, in ticks."""

    def __init__(self, stages: Sequence[ComputedSpan], costs: Costs, memory: MemoryModel) -> None:
        self.stages = stages
        self._memory = memory
        self._forward, self._backward = list[int](), list[int]()
        for stage in stages:
            sums = costs.forward[stage.kind]
            forward = sums[stage.last] - sums[stage.first]
            both = costs.computed_ticks(stage)
            self._forward.append(forward)
            self._backward.append(both - forward)
        hops = [
            (here.last, costs.cluster.link(node_of(here.device), node_of(there.device)))
            for here, there in pairwise(stages)
        ]
        ahead = [costs.arriving(link)[cut] for cut, link in hops]
        back = [costs.returning(link)[cut] for cut, link in hops]
        #: Time from the start of the first stage's forward to that of each stage; likewise for the ends of backwards.
        self._ahead = [0, *accumulate(map(int.__add__, self._forward, ahead))]
        self._back = [0, *accumulate(map(int.__add__, self._backward, back))]

    @property
    def ticks(self) -> tuple[tuple[int, ...], ...]:
        """Everything that `through` depends on, except the policy."""
        return tuple(self._forward), tuple(self._backward), tuple(self._ahead), tuple(self._back)

    def through(self, span: int, enter: Mapping[int, int], leave: Mapping[int, int]) -> int:
        """Lower bound on the time of `span` consecutive minibatches in the pipeline.

        Args:
            span: number of minibatches.
            enter: stage → ticks before its first forward.
            leave: stage → ticks after its last backward; the latest of these ends the time.
        """
        stages = range(len(self.stages))
        ahead, back = self._ahead, self._back
        begin = [
            max((before + ahead[at] - ahead[stage] for stage, before in enter.items() if stage <= at), default=None)
            for at in stages
        ]
        end = [
            max((after + back[at] - back[stage] for stage, after in leave.items() if stage <= at), default=None)
            for at in stages
        ]
        found = max(
            before + self._at(stage, span) + after
            for stage, before, after in zip(stages, begin, end, strict=True)
            if before is not None and after is not None
        )
        if self._memory.schedule != "gpipe":
            return found
        # All forwards, then all backwards: each direction is limited by its slowest stage.
        last, spare = len(self.stages) - 1, span - 1
        down = max(b + spare * self._forward[i] - ahead[i] for i, b in enumerate(begin) if b is not None)
        up = max(e + spare * self._backward[i] - back[i] for i, e in enumerate(end) if e is not None)
        return max(found, down + ahead[last] + self._forward[last] + self._backward[last] + back[last] + up)

    def _at(self, stage: int, span: int) -> int:
        """Lower bound on the time from the first forward to the last backward of `span` minibatches at a stage."""
        behind = self._ahead[-1] - self._ahead[stage] + self._back[-1] - self._back[stage]
        turn = behind + self._forward[-1] + self._backward[-1]
        held = self._memory.in_flight(stage, len(self.stages))
        turns = (span - 1) // held
        windowed = (turns + 1) * turn + (span - 1 - turns * held) * self._backward[stage]
        return max(span * (self._forward[stage] + self._backward[stage]), windowed)


@dataclass(slots=True)
class _Load:
    """Transfers that share a resource."""

    work_ticks: int = 0
    latency_ticks: int | None = None
    """The minimum over the transfers."""

    def add(self, work_ticks: int, latency_ticks: int) -> None:
        """Add a transfer."""
        self.work_ticks += work_ticks
        known = self.latency_ticks
        self.latency_ticks = latency_ticks if known is None else min(known, latency_ticks)

    @property
    def ticks(self) -> int:
        """Time until the last one is complete, if all begin simultaneously."""
        return self.work_ticks + (self.latency_ticks or 0)


#: Node and layers [first, last) of a stage; stages with equal places have equal exchanges.
Place = tuple[str, int, int]

#: Places of all stages of each virtual worker.
Places = tuple[tuple[Place, ...], ...]


def places_of(workers: Sequence[Sequence[Span]]) -> Places:
    """The place of each stage of each virtual worker."""
    return tuple(tuple((node_of(stage.device), stage.first, stage.last) for stage in stages) for stages in workers)


@dataclass(slots=True)
class _Direction:
    """Transfers of one wave, or one clock, between all stages and shards."""

    alone: dict[Place, int] = field(default_factory=dict)
    """Place → time of a stage's own transfers, which run in parallel."""
    loads: dict[_Resource, _Load] = field(default_factory=dict)
    """Shared resources with the load of all transfers."""
    users: dict[_Resource, list[Place]] = field(default_factory=dict)


class Exchanges:
    """Pushes of one wave of every virtual worker, and pulls of one clock: their mirror image, except for halved bytes.

    A large cluster has many equal stages, so each kind is computed once. Independent of N and D.
    """

    def __init__(
        self,
        places: Places,
        *,
        costs: Costs,
        placed: PlacedParameters,
        network_cards: Mapping[str, float],
    ) -> None:
        """Sum the loads of all resources.

        Args:
            places: `places_of` the virtual workers.
            costs: times and links.
            placed: the parameters on shards.
            network_cards: node → bytes per second in each direction.
        """
        self._costs = costs
        self._cards = network_cards
        self._places = places
        self._pushes = self._direction(placed.pushed, placed.shards)
        self._pulls = self._pushes if placed.pulled is placed.pushed else self._direction(placed.pulled, placed.shards)

    def _direction(self, sums: ShardSums, shards: Sequence[str]) -> _Direction:
        direction = _Direction()
        moved: dict[tuple[int, int], list[tuple[str, int]]] = {}
        for place, times in Counter(place for places in self._places for place in places).items():
            _, first, last = place
            if (first, last) not in moved:
                moved[first, last] = [
                    (shard, num_bytes)
                    for shard, on_shard in zip(shards, sums.by_shard, strict=True)
                    if (num_bytes := on_shard[last] - on_shard[first])
                ]
            self._add(direction, place, moved[first, last], times)
        return direction

    def _add(self, direction: _Direction, place: Place, moved: Sequence[tuple[str, int]], times: int) -> None:
        """Add the transfers of `times` equal stages, each to these shards."""
        node, longest = place[0], 0
        own: dict[_Resource, _Load] = {}
        for shard, num_bytes in moved:
            alone, latency, passes = self._transfer(node, shard, num_bytes)
            longest = max(longest, alone)
            for resource, work in passes:
                own.setdefault(resource, _Load()).add(work, latency)
        direction.alone[place] = max(longest, max((load.ticks for load in own.values()), default=0))
        for resource, load in own.items():
            direction.users.setdefault(resource, []).append(place)
            direction.loads.setdefault(resource, _Load()).add(times * load.work_ticks, load.latency_ticks or 0)

    @property
    def longest_push(self) -> int:
        """Ticks per wave and virtual worker, as a stage pushes one wave at a time."""
        return max(0, *self._pushes.alone.values(), *(load.work_ticks for load in self._pushes.loads.values()))

    def longest(self, pipes: Sequence[_Pipe], span: int, apply_ticks: int, *, pulls_meet: bool) -> int:
        """Ticks of the longest round trip, from one publication to another.

        Args:
            pipes: the virtual workers.
            span: number of minibatches in it.
            apply_ticks: time of one wave of one virtual worker on the fullest shard.
            pulls_meet: whether all virtual workers pull within it.
        """
        num_workers, found = len(pipes), 0
        pushes, pulls = self._pushes, self._pulls
        # The last pull through a resource follows all others there; the first push precedes all others.
        rest: dict[Place, int] = {}
        begun: dict[Place, int] = {}
        ways: dict[tuple[object, ...], _Ways] = {}
        for vw, (pipe, places) in enumerate(zip(pipes, self._places, strict=True)):
            pushed, pulled = (tuple(direction.alone[place] for place in places) for direction in (pushes, pulls))
            alike = (*pipe.ticks, pushed, pulled)
            way = ways.get(alike)
            if way is None:
                way = ways[alike] = _ways(pipe, span, pulled=dict(enumerate(pulled)), pushed=dict(enumerate(pushed)))
            added = (num_workers - vw) * apply_ticks
            found = max(found, way.whole + added)
            for place, after, before in zip(places, way.rest, way.begun, strict=True):
                rest[place] = min(rest.get(place, after + added), after + added)
                begun[place] = min(begun.get(place, before), before)
        for resource, load in pushes.loads.items():
            found = max(found, load.ticks + min(begun[place] for place in pushes.users[resource]) + apply_ticks)
        if pulls_meet:
            for resource, load in pulls.loads.items():
                found = max(found, load.ticks + min(rest[place] for place in pulls.users[resource]))
        return found

    def _transfer(self, source: str, target: str, num_bytes: int) -> tuple[int, int, list[tuple[_Resource, int]]]:
        """For a push: uncontended ticks, latency, and resources with the ticks of work at each."""
        link: LinkSpec = self._costs.cluster.link(source, target)
        alone, latency = ticks(link.transfer_ms(num_bytes)), ticks(1000 * link.latency_seconds)
        if source == target:
            work = ticks(1000 * num_bytes / link.effective_bytes_per_second)
            return alone, latency, [((source, "root", "out"), work)]
        return (
            alone,
            latency,
            [
                ((source, "card", "out"), ticks(1000 * num_bytes / self._cards[source])),
                ((target, "card", "in"), ticks(1000 * num_bytes / self._cards[target])),
            ],
        )


@dataclass(frozen=True, slots=True)
class _Ways:
    """Times of some minibatches in a pipeline."""

    whole: int
    """Including the pulls before and the pushes after."""
    rest: tuple[int, ...]
    """Per stage: from its first forward on, without any pull."""
    begun: tuple[int, ...]
    """Per stage: to its last backward, without any push."""


def _ways(pipe: _Pipe, span: int, *, pulled: Mapping[int, int], pushed: Mapping[int, int]) -> _Ways:
    """`pulled`, `pushed`: stage → ticks of its own pull, and of its own push."""
    return _Ways(
        pipe.through(span, pulled, pushed),
        tuple(pipe.through(span, {stage: 0}, pushed) for stage in pushed),
        tuple(pipe.through(span, pulled, {stage: 0}) for stage in pulled),
    )
