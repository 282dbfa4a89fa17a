"""Closed-form rate of a job whose virtual workers have waves of different numbers of minibatches (`wsp.md` §10)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetpipe.decide.planner.costs import Costs
from hetpipe.decide.planner.job_rate import JobRate, bytes_moved, job_rate
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.decide.planner.round_trip import ComputedSpan, RoundTrip, round_trip
from hetpipe.decide.planner.shard_bytes import PlacedParameters


def rate_of_own_waves(
    workers: Sequence[Sequence[ComputedSpan]],
    rates: Sequence[float],
    own: Sequence[int],
    *,
    costs: Costs,
    placed: PlacedParameters,
    options: PlanOptions,
    network_cards: Mapping[str, float],
) -> JobRate:
    """The rate of a job with N_v minibatches in a wave of each virtual worker.

    All complete waves at the rate of the one whose wave takes longest. The round trip of weights is that of each
    virtual worker alone: transfers of the others could only make it longer, so the rate is a bound.

    Args:
        workers: the stages of each virtual worker.
        rates: closed-form minibatches per tick of each.
        own: N_v of each.
        costs: costs for the batch size.
        placed: the parameters on shards.
        options: the policy, D and when weights are pulled.
        network_cards: node → bytes per second in each direction.
    """
    mean = sum(own) / len(own)
    trips = [
        round_trip(
            [stages],
            costs=costs,
            placed=placed,
            memory=options.memory(n),
            staleness=options.staleness,
            network_cards=network_cards,
            pull=options.pull,
        )
        for stages, n in zip(workers, own, strict=True)
    ]
    trip = RoundTrip(
        *(
            mean * min(limit / n for limit, n in zip(limits, own, strict=True))
            for limits in zip(*((trip.waves, trip.exchange, trip.drained) for trip in trips), strict=True)
        )
    )
    moved = [
        bytes_moved(
            stages,
            costs=costs,
            placed=placed,
            minibatches_per_wave=n,
            pulls_per_wave=options.least_pulls_per_wave,
        )
        for stages, n in zip(workers, own, strict=True)
    ]
    slowest = mean * min(rate / n for rate, n in zip(rates, own, strict=True))
    return job_rate(slowest, moved, costs=costs, minibatches_per_wave=mean, network_cards=network_cards, trip=trip)
