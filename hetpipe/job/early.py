"""The job's keys about an end before the planned one: `early_stopping`, `max_time`."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from hetpipe.job.sections import PositiveInt, Section
from hetpipe.job.survive import duration_of, duration_text


def _checked_time(duration: timedelta) -> timedelta:
    if duration < timedelta(seconds=1):
        raise ValueError(f"is {duration_text(duration)}; use at least 1s")
    return duration


#: A time of training, from a second on.
TrainingTime = Annotated[
    timedelta,
    BeforeValidator(duration_of),
    AfterValidator(_checked_time),
    PlainSerializer(duration_text, return_type=str, when_used="json"),
]


class EarlyStoppingSection(Section):
    """The end of a run whose evaluations no longer get better; evaluations of all of `data.eval` count."""

    metric: str = "loss"
    """The loss, one of several losses, or one of the job's metrics."""
    patience: PositiveInt = 3
    """Number of evaluations without an improvement after which the run ends."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether smaller or larger values are better; `auto`: smaller for losses and perplexities, larger for others."""
    min_delta: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """An improvement is more than this."""
