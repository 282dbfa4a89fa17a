"""Rate of a whole job, and its traffic between nodes: the objective of every search over allocations.

Three bounds apply. Bounded staleness limits every virtual worker to the rate of the slowest one in the long run, so the
job's rate is V times that. A node's network card carries activations, gradients, pushes and pulls. And with a bound D,
a wave waits for the round trip of the weights of earlier ones (`round_trip`).

Network cards are full duplex. The bytes of a cut differ by direction (only values that need a gradient have one), so
each direction of a card is bounded separately.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hetpipe.decide.planner.costs import TICKS_PER_MS, Costs
from hetpipe.decide.planner.placement import Span
from hetpipe.decide.planner.round_trip import NO_ROUND_TRIP, RoundTrip
from hetpipe.decide.planner.shard_bytes import PlacedParameters, ShardSums
from hetpipe.values.cluster import node_of

_TICKS_PER_SECOND = 1000 * TICKS_PER_MS


@dataclass(frozen=True, slots=True)
class JobRate:
    """Closed-form rates of a job in the long run."""

    samples_per_second: float
    """The smallest of the next three."""
    compute_samples_per_second: float
    """V times the rate of the slowest virtual worker."""
    network_samples_per_second: float
    """Limit of the busiest network card; infinite if nothing crosses nodes."""
    round_trip_samples_per_second: float
    """Limit of waiting for published weights; infinite if nothing waits."""
    busiest_node: str | None
    """Node of the busiest card."""
    cross_node_bytes_per_minibatch: float
    """All bytes that leave a node, per minibatch of the job."""

    @property
    def network_binds(self) -> bool:
        """Whether a network card is the bottleneck."""
        return self.network_samples_per_second < min(
            self.compute_samples_per_second, self.round_trip_samples_per_second
        )

    @property
    def round_trip_binds(self) -> bool:
        """Whether waiting for published weights is the bottleneck."""
        return self.round_trip_samples_per_second < self.compute_samples_per_second and not self.network_binds


def samples_per_second(minibatches_per_tick: float, batch_size: int) -> float:
    """A rate in samples per second, for display."""
    return minibatches_per_tick * _TICKS_PER_SECOND * batch_size


#: A direction of a node's network card.
CardSide = tuple[str, Literal["in", "out"]]


def bytes_moved(
    stages: Sequence[Span],
    *,
    costs: Costs,
    placed: PlacedParameters,
    minibatches_per_wave: int,
    pulls_per_wave: float = 1.0,
) -> dict[CardSide, int]:
    """Bytes that leave and that enter each node because of one virtual worker, per wave of that worker.

    N activations and N gradients per cut between nodes; per wave one push of every parameter, and `pulls_per_wave`
    pulls.
    """
    nodes = [node_of(stage.device) for stage in stages]
    pulled = _exchanged(stages, nodes, placed.pulled)
    pushed = pulled if placed.pushed is placed.pulled else _exchanged(stages, nodes, placed.pushed)
    moved: dict[CardSide, int] = {}
    for node, (to_stages, from_shards) in pulled.items():
        from_stages, to_shards = pushed[node]
        moved[node, "out"] = from_stages + int(from_shards * pulls_per_wave)
        moved[node, "in"] = int(to_stages * pulls_per_wave) + to_shards
    for position in range(len(stages) - 1):
        here, behind = nodes[position], nodes[position + 1]
        if here != behind:
            cut = stages[position].last
            forward = minibatches_per_wave * costs.cut_bytes[cut]
            backward = minibatches_per_wave * costs.returning_bytes[cut]
            moved[here, "out"] += forward
            moved[behind, "in"] += forward
            moved[behind, "out"] += backward
            moved[here, "in"] += backward
    return moved


def _exchanged(stages: Sequence[Span], nodes: Sequence[str], sums: ShardSums) -> dict[str, tuple[int, int]]:
    """Node → bytes between its stages and shards elsewhere, and between its shards and stages elsewhere."""
    of_stages, of_shards = dict.fromkeys(nodes, 0), dict.fromkeys(nodes, 0) | sums.bytes_on
    for node, stage in zip(nodes, stages, strict=True):
        local = sums.local_bytes(node, stage.first, stage.last)
        of_stages[node] += sums.bytes_of(stage.first, stage.last) - local
        of_shards[node] -= local
    return {node: (of_stages.get(node, 0), num_bytes) for node, num_bytes in of_shards.items()}


def bytes_leaving(moved: Mapping[CardSide, int]) -> int:
    """Sum of `bytes_moved`, with each byte counted once."""
    return sum(num_bytes for (_, side), num_bytes in moved.items() if side == "out")


def network_minibatches_per_second(
    moved: Mapping[CardSide, int], *, minibatches: float, network_cards: Mapping[str, float]
) -> tuple[float, str | None]:
    """Limit of the network cards, and the busiest node.

    Args:
        moved: bytes per `minibatches` minibatches of the job.
        minibatches: number of minibatches that the bytes refer to.
        network_cards: node → bytes per second in each direction.

    Returns:
        Minibatches per second (infinite if nothing is moved), and the first of the busiest nodes.
    """
    least, busiest = math.inf, None
    for (node, _), num_bytes in sorted(moved.items()):
        if num_bytes and (rate := network_cards[node] * minibatches / num_bytes) < least:
            least, busiest = rate, node
    return least, busiest


def job_rate(
    slowest_minibatches_per_tick: float,
    moved: Sequence[Mapping[CardSide, int]],
    *,
    costs: Costs,
    minibatches_per_wave: float,
    network_cards: Mapping[str, float],
    trip: RoundTrip = NO_ROUND_TRIP,
) -> JobRate:
    """The rate of a job.

    Args:
        slowest_minibatches_per_tick: closed-form rate of the slowest virtual worker.
        moved: `bytes_moved` of each virtual worker.
        costs: costs for the batch size.
        minibatches_per_wave: N, or the mean of the virtual workers; rates are means, too.
        network_cards: node → bytes per second in each direction.
        trip: limits of the round trip of weights.
    """
    batch_size = costs.profile.batch_size
    total: dict[CardSide, int] = {}
    for worker in moved:
        for side, num_bytes in worker.items():
            total[side] = total.get(side, 0) + num_bytes
    minibatches = len(moved) * minibatches_per_wave
    network, busiest = network_minibatches_per_second(total, minibatches=minibatches, network_cards=network_cards)
    compute = len(moved) * samples_per_second(slowest_minibatches_per_tick, batch_size)
    waiting = len(moved) * samples_per_second(trip.minibatches_per_tick, batch_size)
    return JobRate(
        samples_per_second=min(compute, batch_size * network, waiting),
        compute_samples_per_second=compute,
        network_samples_per_second=batch_size * network,
        round_trip_samples_per_second=waiting,
        busiest_node=busiest,
        cross_node_bytes_per_minibatch=bytes_leaving(total) / minibatches,
    )
