"""When a median can be trusted."""

from __future__ import annotations

import random
from statistics import median

import pytest

from hetpipe.profiler.sampling import Sampling, relative_error

SAMPLING = Sampling(least=5, fewest=3, most=50, tolerance=0.01, least_seconds=0.5, most_seconds=2.0)
CALM = [1.0] * 5
WILD = [1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("samples", "elapsed_seconds", "is_enough"),
    [
        ([CALM[:2], CALM[:2]], 9.0, False),  # too few, however long they took
        ([CALM[:3], WILD[:3]], 2.0, True),  # no more time
        ([CALM[:4], CALM[:4]], 1.9, False),  # too few, and there is time
        ([CALM, CALM], 0.4, False),  # too soon
        ([CALM, CALM], 0.5, True),
        ([CALM, WILD], 1.9, False),  # one of the two times is not stable yet
        ([CALM, WILD], 2.0, True),  # no more time
        ([WILD * 10, WILD * 10], 0.1, True),  # no more samples
    ],
)
def test_when_to_stop(samples: list[list[float]], elapsed_seconds: float, is_enough: bool) -> None:  # noqa: FBT001
    assert SAMPLING.is_enough(samples, elapsed_seconds=elapsed_seconds) is is_enough


def test_a_number_given_by_hand_is_kept_to() -> None:
    sampling = Sampling.fixed(3)
    assert not sampling.is_enough([WILD[:2], WILD[:2]], elapsed_seconds=100.0)
    assert sampling.is_enough([WILD[:3], WILD[:3]], elapsed_seconds=0.0)


def test_a_model_of_many_layers_gets_less_time_for_each() -> None:
    assert Sampling.within(num_layers=6) == Sampling()
    assert Sampling.within(num_layers=600).most_seconds == 0.1
    assert Sampling.within(num_layers=6000).least_seconds == 0.01


def test_the_error_is_that_of_medians_of_many_tries() -> None:
    generator = random.Random(5)
    tries = [[generator.gauss(10.0, 1.0) for _ in range(100)] for _ in range(300)]
    medians = [median(samples) for samples in tries]
    spread = (sum((m - 10.0) ** 2 for m in medians) / len(medians)) ** 0.5 / 10.0
    assert median(relative_error(samples) for samples in tries) == pytest.approx(spread, rel=0.15)


def test_outliers_do_not_count() -> None:
    assert relative_error([1.0] * 20 + [50.0]) == 0.0


def test_a_time_of_zero_has_no_error() -> None:
    assert relative_error([0.0, 0.0, 0.0]) == 0.0
