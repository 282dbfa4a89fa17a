"""How long is a job simulated? Long enough to be in its steady state, as far as the processor's time goes.

Shared by whoever decides what is worth simulating (`decide.planner.ranking`) and the simulator's predictions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hetpipe.decide.planner.placement import Span
from hetpipe.decide.planner.shard_bytes import PlacedParameters

#: At least so many waves, and so many for each wave that virtual workers may get ahead: the second half, which is what
#: counts, then lies behind the time in which the fast ones use up their lead.
LEAST_WAVES = 64
_WAVES_PER_LEAD = 16

#: Forwards and backwards after which a prediction has to end: some seconds. The waves that count then are fewer.
MOST_COMPUTATIONS = 200_000
_FEWEST_WAVES = 12

#: A message of weights takes the simulator as long as a computation. They count from where there are as many times more
#: of them: with shards on hundreds of nodes.
_MESSAGES_PER_COMPUTATION = 4


def steady_waves(staleness: int | None) -> int:
    """Waves of each virtual worker after which a run has been in its steady state for a good while.

    >>> steady_waves(0), steady_waves(8), steady_waves(None)
    (64, 160, 64)
    """
    return max(LEAST_WAVES, _WAVES_PER_LEAD * (staleness + 2) if staleness is not None else 0)


def work_per_wave(workers: Sequence[Sequence[Span]], minibatches_per_wave: int, placed: PlacedParameters) -> int:
    """Forwards and backwards of all virtual workers, or what their messages of weights come to if that is more.

    Args:
        workers: the stages of each virtual worker.
        minibatches_per_wave: N.
        placed: the parameters on shards.
    """
    spans = Counter((stage.first, stage.last) for stages in workers for stage in stages)
    messages = 2 * sum(
        times * sum(sums[last] > sums[first] for sums in placed.by_shard) for (first, last), times in spans.items()
    )
    return max(2 * minibatches_per_wave * spans.total(), messages // _MESSAGES_PER_COMPUTATION)


def simulated_waves(work: int, staleness: int | None, waves: int | None = None) -> int:
    """Waves of each virtual worker that a prediction simulates: those asked for, as far as the time goes.

    Args:
        work: `work_per_wave`.
        staleness: D; None: no bound.
        waves: asked for; None: those after which the steady state shows.

    >>> simulated_waves(1_000, 0), simulated_waves(1_000, 0, 12), simulated_waves(1_000_000, 0)
    (64, 12, 12)
    """
    return min(steady_waves(staleness) if waves is None else waves, max(MOST_COMPUTATIONS // work, _FEWEST_WAVES))
