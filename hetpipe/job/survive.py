"""The section of a job file about processes that die: how long what is waited for, and when to go on without it.

A duration is a number with its unit: `500ms`, `90s`, `2min`, `1h`. A number alone would not say which unit it has.
"""

from __future__ import annotations

import re
from datetime import timedelta
from functools import partial
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from hetpipe.job.sections import Section
from hetpipe.values.problems import shown

_UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,6})?) ?(ms|s|min|h)", re.ASCII)

#: A virtual worker that dies more often than that in a row is not worth it.
_MOST_RESTARTS = 1_000

#: Less is noise; no stage that still works is slower than that.
_LEAST_FACTOR, _MOST_FACTOR = 1.1, 1_000.0


def duration_of(value: object) -> timedelta:
    """The duration of a text; one that is a duration already stays.

    >>> duration_of("90s") == duration_of("1.5 min")
    True

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, timedelta):
        return value
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f"must be a number with a unit (ms, s, min or h), for example `60s`, not {shown(value)}")
    return timedelta(seconds=float(found[1]) * _UNITS[found[2]])


def duration_text(duration: timedelta) -> str:
    """A duration as it is written in a job file.

    >>> duration_text(timedelta(minutes=2)), duration_text(timedelta(seconds=2.5)), duration_text(timedelta(0))
    ('120s', '2.5s', '0s')
    """
    return f"{duration.total_seconds():.3f}".rstrip("0").rstrip(".") + "s"


def _checked_factor(factor: float) -> float:
    if factor != 0.0 and not _LEAST_FACTOR <= factor <= _MOST_FACTOR:
        raise ValueError(f"must be 0, or from {_LEAST_FACTOR:g} to {_MOST_FACTOR:g}, not {factor:g}")
    return factor


def checked_bounds(duration: timedelta, *, least: str, most: str) -> timedelta:
    """The duration.

    Raises:
        ValueError: it is out of bounds.
    """
    if not duration_of(least) <= duration <= duration_of(most):
        raise ValueError(f"must be from {least} to {most}, not {duration_text(duration)}")
    return duration


Duration = Annotated[timedelta, BeforeValidator(duration_of), PlainSerializer(duration_text, when_used="json")]


#: A stage says nothing for five seconds while a parameter server is away (`server.shard.patient`), and for up to seven
#: while one is frozen in the middle of a call, until keepalive notices (`wire.channel`).
_LEAST_STALL = "7s"


class SurviveSection(Section):
    """What happens when processes die, or stop answering.

    Under `none` and `allreduce` a death takes the run back to its newest checkpoint.
    """

    stall: Annotated[Duration, AfterValidator(partial(checked_bounds, least=_LEAST_STALL, most="1h"))] = Field(
        default=timedelta(seconds=60), examples=["60s"]
    )
    """A stage that has reported nothing for so long (7s to 1h) counts as hung and is killed. It reports about once a
    second, but not in the middle of a minibatch: give the slowest one several times its time."""
    restarts: int = Field(default=5, ge=0, le=_MOST_RESTARTS)
    """A virtual worker that dies so often in a row, each time before it has committed a wave, stays out, and the others
    go on; 0: none is ever started anew. A run that has to go back to a checkpoint more often than that in a row,
    without a newer one, fails."""
    backoff: Annotated[Duration, AfterValidator(partial(checked_bounds, least="0s", most="1h"))] = Field(
        default=timedelta(seconds=30), examples=["30s"]
    )
    """Longest pause (0s to 1h) before a virtual worker is started anew: none at first, then 1, 2, 4, … seconds while it
    does not come as far as a wave."""
    absence: Annotated[Duration, AfterValidator(partial(checked_bounds, least="0s", most="24h"))] = Field(
        default=timedelta(seconds=120), examples=["2min"]
    )
    """How long (0s to 24h) that without which nobody can train may be gone before the run fails: a parameter server, or
    the agents of all virtual workers. After half of it a virtual worker does without those of its agents that are gone,
    if the devices of the others have the memory."""
    straggler: Annotated[float, AfterValidator(_checked_factor)] = Field(default=2.0, examples=[2.0])
    """A stage that takes so many times longer (from 1.1 to 1000) than planned, by how the other stages fare, straggles:
    it is named, and layers are moved away from it if that pays. 0: none does. Nothing is moved when
    `sync.deterministic` is set, as the result would depend on when that happens."""
    patience_waves: int = Field(default=5, ge=1, le=_MOST_RESTARTS)
    """Number of consecutive slow waves before a stage counts as a straggler; reports come once a second at most."""
    least_gain: float = Field(default=0.2, ge=0.01, le=100.0)
    """How much faster the job must become for layers to be moved, as a share: 0.2 is a fifth."""
