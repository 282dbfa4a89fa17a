"""Length of simulations: enough to reach the steady state, within a limit on processor time.

Shared by the ranking (`decide.planner.ranking`) and the simulator's predictions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hetpipe.decide.planner.placement import Span
from hetpipe.decide.planner.shard_bytes import PlacedParameters

#: Minimum number of waves, and waves per wave of lead that virtual workers may build up: the second half, which counts,
#: is then after the time in which fast ones use up their lead.
LEAST_WAVES = 64
_WAVES_PER_LEAD = 16

#: Forwards and backwards after which a prediction must end: a few seconds. Fewer waves count then.
MOST_COMPUTATIONS = 200_000
_FEWEST_WAVES = 12

#: A message of weights takes the simulator as long as a computation. Messages count once their number exceeds that of
#: computations by this factor: with shards on hundreds of nodes.
_MESSAGES_PER_COMPUTATION = 4


def steady_waves(staleness: int | None) -> int:
    """Waves of each virtual worker after which a run has been in its steady state for some time.

    >>> steady_waves(0), steady_waves(8), steady_waves(None)
    (64, 160, 64)
    """
    return max(LEAST_WAVES, _WAVES_PER_LEAD * (staleness + 2) if staleness is not None else 0)


def work_per_wave(
    workers: Sequence[Sequence[Span]], minibatches_per_wave: Sequence[int], placed: PlacedParameters
) -> int:
    """Forwards and backwards of all virtual workers, or their messages of weights if these take longer.

    Args:
        workers: the stages of each virtual worker.
        minibatches_per_wave: N_v of each virtual worker.
        placed: the parameters on shards.
    """
    spans = Counter((stage.first, stage.last) for stages in workers for stage in stages)
    messages = 2 * sum(
        times * sum(sums[last] > sums[first] for sums in placed.pulled.by_shard)
        for (first, last), times in spans.items()
    )
    computations = 2 * sum(n * len(stages) for n, stages in zip(minibatches_per_wave, workers, strict=True))
    return max(computations, messages // _MESSAGES_PER_COMPUTATION)


def simulated_waves(work: int, staleness: int | None, waves: int | None = None) -> int:
    """Waves of each virtual worker in a prediction: the requested number, limited by `MOST_COMPUTATIONS`.

    Args:
        work: `work_per_wave`.
        staleness: D; None for no bound.
        waves: requested number; None for enough to reach the steady state.

    >>> simulated_waves(1_000, 0), simulated_waves(1_000, 0, 12), simulated_waves(1_000_000, 0)
    (64, 12, 12)
    """
    return min(steady_waves(staleness) if waves is None else waves, max(MOST_COMPUTATIONS // work, _FEWEST_WAVES))
