"""How fast is a whole job, and how much does it send between nodes? The objective of every search over allocations.

Three things can hold a job back. Bounded staleness holds every virtual worker to the slowest one in the long run, so
together they do V times its rate. A node's network card carries activations, gradients, pushes and pulls. And with a
bound D a wave waits for the round trip of the weights of earlier ones (`round_trip`).

Whatever leaves a node has a mirror image that arrives there: the gradient of an activation has its size, a pull the
size of a push. So one figure per node stands for both directions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetpipe.decide.planner.costs import TICKS_PER_MS, Costs
from hetpipe.decide.planner.placement import Span
from hetpipe.decide.planner.round_trip import NO_ROUND_TRIP, RoundTrip
from hetpipe.decide.planner.shard_bytes import PlacedParameters
from hetpipe.values.cluster import node_of

_TICKS_PER_SECOND = 1000 * TICKS_PER_MS


@dataclass(frozen=True, slots=True)
class JobRate:
    """What a job does in the long run, by closed form."""

    samples_per_second: float
    """The smallest of the next three."""
    compute_samples_per_second: float
    """V times the slowest virtual worker."""
    network_samples_per_second: float
    """What the busiest network card lets through; infinite where nothing crosses nodes."""
    round_trip_samples_per_second: float
    """What waiting for published weights lets through; infinite where nothing is waited for."""
    busiest_node: str | None
    """The node of that card."""
    cross_node_bytes_per_minibatch: float
    """Every byte that leaves a node, per minibatch of the job."""

    @property
    def network_binds(self) -> bool:
        """Whether it is a network card that holds the job back."""
        return self.network_samples_per_second < min(
            self.compute_samples_per_second, self.round_trip_samples_per_second
        )

    @property
    def round_trip_binds(self) -> bool:
        """Whether it is the wait for published weights."""
        return self.round_trip_samples_per_second < self.compute_samples_per_second and not self.network_binds


def samples_per_second(minibatches_per_tick: float, batch_size: int) -> float:
    """A rate as people read it."""
    return minibatches_per_tick * _TICKS_PER_SECOND * batch_size


def bytes_leaving(
    stages: Sequence[Span],
    *,
    costs: Costs,
    placed: PlacedParameters,
    minibatches_per_wave: int,
    pulls_per_wave: float = 1.0,
) -> dict[str, int]:
    """Node → bytes that leave it on account of one virtual worker, per wave of that worker.

    N activations and N gradients per cut between nodes; per wave one push of every parameter, and so many pulls.
    """
    leaving, pulled = dict[str, int](), dict(placed.bytes_on)
    nodes = [node_of(stage.device) for stage in stages]
    for node, stage in zip(nodes, stages, strict=True):
        local = placed.local_bytes(node, stage.first, stage.last)
        leaving[node] = leaving.get(node, 0) + placed.bytes_of(stage.first, stage.last) - local
        pulled[node] = pulled.get(node, 0) - local
    for node, num_bytes in pulled.items():
        leaving[node] = leaving.get(node, 0) + int(num_bytes * pulls_per_wave)
    for position in range(len(stages) - 1):
        here, behind = nodes[position], nodes[position + 1]
        if here != behind:
            crossing = minibatches_per_wave * costs.cut_bytes[stages[position].last]
            leaving[here] += crossing
            leaving[behind] += crossing
    return leaving


def network_minibatches_per_second(
    leaving: Mapping[str, int], *, minibatches: int, network_cards: Mapping[str, float]
) -> tuple[float, str | None]:
    """What the cards let through, and the node that is busiest.

    Args:
        leaving: node → bytes per `minibatches` minibatches of the job.
        minibatches: how many the bytes are for.
        network_cards: node → bytes per second each way.

    Returns:
        Minibatches per second (infinite where nothing leaves), and the first of the busiest nodes.
    """
    least, busiest = math.inf, None
    for node, num_bytes in sorted(leaving.items()):
        if num_bytes and (rate := network_cards[node] * minibatches / num_bytes) < least:
            least, busiest = rate, node
    return least, busiest


def job_rate(
    slowest_minibatches_per_tick: float,
    leaving: Sequence[Mapping[str, int]],
    *,
    costs: Costs,
    minibatches_per_wave: int,
    network_cards: Mapping[str, float],
    trip: RoundTrip = NO_ROUND_TRIP,
) -> JobRate:
    """The rate of a job.

    Args:
        slowest_minibatches_per_tick: closed-form rate of the slowest virtual worker.
        leaving: `bytes_leaving` of each virtual worker.
        costs: for the batch size.
        minibatches_per_wave: N.
        network_cards: node → bytes per second each way.
        trip: what the round trip of weights allows each virtual worker.
    """
    batch_size = costs.profile.batch_size
    total: dict[str, int] = {}
    for worker in leaving:
        for node, num_bytes in worker.items():
            total[node] = total.get(node, 0) + num_bytes
    minibatches = len(leaving) * minibatches_per_wave
    network, busiest = network_minibatches_per_second(total, minibatches=minibatches, network_cards=network_cards)
    compute = len(leaving) * samples_per_second(slowest_minibatches_per_tick, batch_size)
    waiting = len(leaving) * samples_per_second(trip.minibatches_per_tick, batch_size)
    return JobRate(
        samples_per_second=min(compute, batch_size * network, waiting),
        compute_samples_per_second=compute,
        network_samples_per_second=batch_size * network,
        round_trip_samples_per_second=waiting,
        busiest_node=busiest,
        cross_node_bytes_per_minibatch=sum(total.values()) / minibatches,
    )
