"""Number of timing samples needed for a reliable median. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

#: Standard error of a median in standard deviations over √n (normal distribution): √(π/2).
_MEDIAN_ERROR = math.sqrt(math.pi / 2)
#: Interquartile range of a normal distribution in standard deviations.
_QUARTILES = 1.349

#: Minimum time per layer; disturbances of a machine last longer than a short layer.
_LEAST_SECONDS = 0.1
#: Time limit per layer, after which the samples so far must suffice.
_MOST_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Stopping rule for the measurements of one layer."""

    warm_up: int = 3
    """Warm-up runs, in which memory is allocated and kernels are selected and loaded."""
    least: int = 20
    """Minimum number of samples, unless the time limit ends them before."""
    fewest: int = 5
    """Minimum number of samples of a layer for which the time limit is too short."""
    most: int = 1000
    """Maximum number of samples."""
    tolerance: float = 0.01
    """Sufficient relative standard error of the median."""
    least_seconds: float = _LEAST_SECONDS
    most_seconds: float = _MOST_SECONDS

    @classmethod
    def fixed(cls, repeats: int) -> Sampling:
        """Exactly `repeats` samples."""
        return cls(least=repeats, fewest=repeats, most=repeats)

    @classmethod
    def within(cls, *, num_layers: int, total_seconds: float = 60.0) -> Sampling:
        """Limits that fit a whole model into about `total_seconds`, unless the fewest samples take longer.

        >>> Sampling.within(num_layers=1200).most_seconds
        0.05
        """
        share = total_seconds / num_layers
        return cls(least_seconds=min(_LEAST_SECONDS, share), most_seconds=min(_MOST_SECONDS, share))

    def is_enough(self, samples_ms: Sequence[Sequence[float]], *, elapsed_seconds: float) -> bool:
        """Whether to stop sampling.

        Args:
            samples_ms: samples so far of each measured quantity, equally many of each.
            elapsed_seconds: total time of the samples.
        """
        count = len(samples_ms[0])
        if count >= self.most or elapsed_seconds >= self.most_seconds:
            return count >= self.fewest
        return (
            count >= self.least
            and elapsed_seconds >= self.least_seconds
            and all(relative_error(samples) <= self.tolerance for samples in samples_ms)
        )


def relative_error(samples: Sequence[float]) -> float:
    """Relative standard error of the median of `samples`, from their quartiles; robust to outliers.

    >>> relative_error([2.0] * 10)
    0.0
    >>> round(relative_error([1.8, 1.9, 2.0, 2.1, 2.2] * 5), 3)
    0.019
    """
    middle = median(samples)
    if middle == 0.0 or len(samples) == 1:
        return 0.0
    low, _, high = quantiles(samples, n=4)
    return _MEDIAN_ERROR * (high - low) / _QUARTILES / math.sqrt(len(samples)) / middle
