"""The section of a job file about failures: timeouts, and when the run continues without a process.

A duration is a number with its unit: `500ms`, `90s`, `2min`, `1h`. A number without a unit would be ambiguous.
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
#: Units that people write, and their names here.
_MEANT = {"m": "min", "mins": "min", "minutes": "min", "sec": "s", "seconds": "s", "hours": "h", "hr": "h"}
_LIKE_A_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,6})?) ?([a-z]{1,7})", re.ASCII)
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,6})?) ?(ms|s|min|h)", re.ASCII)

#: Maximum number of consecutive deaths that can be allowed.
_MOST_RESTARTS = 1_000

#: Bounds of the factor: less is noise, and no working stage is slower than that.
_LEAST_FACTOR, _MOST_FACTOR = 1.1, 1_000.0


def duration_of(value: object) -> timedelta:
    """Parse a duration; a `timedelta` is returned unchanged.

    >>> duration_of("90s") == duration_of("1.5 min")
    True
    >>> duration_of("10m")
    Traceback (most recent call last):
    ValueError: must be a number with a unit (ms, s, min or h), not the text '10m'; did you mean `10min`?

    Raises:
        ValueError: it is not a duration.
    """
    if isinstance(value, timedelta):
        return value
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        must = "must be a number with a unit (ms, s, min or h)"
        if isinstance(value, str) and (like := _LIKE_A_DURATION.fullmatch(value)) and like[2] in _MEANT:
            raise ValueError(f"{must}, not {shown(value)}; did you mean `{like[1]}{_MEANT[like[2]]}`?")
        raise ValueError(f"{must}, for example `60s`, not {shown(value)}")
    return timedelta(seconds=float(found[1]) * _UNITS[found[2]])


def duration_text(duration: timedelta) -> str:
    """Format a duration as in a job file.

    >>> duration_text(timedelta(minutes=2)), duration_text(timedelta(seconds=2.5)), duration_text(timedelta(0))
    ('120s', '2.5s', '0s')
    """
    return f"{duration.total_seconds():.3f}".rstrip("0").rstrip(".") + "s"


def _checked_factor(factor: float) -> float:
    if factor != 0.0 and not _LEAST_FACTOR <= factor <= _MOST_FACTOR:
        raise ValueError(f"must be 0, or from {_LEAST_FACTOR:g} to {_MOST_FACTOR:g}, not {factor:g}")
    return factor


def checked_bounds(duration: timedelta, *, least: str, most: str) -> timedelta:
    """Validate the bounds of a duration; returns it unchanged.

    Raises:
        ValueError: it is out of bounds.
    """
    if not duration_of(least) <= duration <= duration_of(most):
        raise ValueError(f"must be from {least} to {most}, not {duration_text(duration)}")
    return duration


Duration = Annotated[
    timedelta,
    BeforeValidator(duration_of, json_schema_input_type=Annotated[str, Field(pattern=f"^{_DURATION.pattern}$")]),
    PlainSerializer(duration_text, when_used="json"),
]


#: A stage is silent for five seconds while a parameter server is unreachable (`server.shard.retries`), and for up to
#: seven while one is frozen in the middle of a call, until keepalive detects it (`wire.channel`).
_LEAST_STALL = "7s"


class SurviveSection(Section):
    """Handling of processes that die or stop responding.

    Under `none` and `allreduce` a death rewinds the run to its newest checkpoint.
    """

    stall: Annotated[Duration, AfterValidator(partial(checked_bounds, least=_LEAST_STALL, most="1h"))] = Field(
        default=timedelta(seconds=60), examples=["60s"]
    )
    """Seconds without a report (7s to 1h) after which a stage counts as hung and is killed. It reports about once a
    second, but not in the middle of a minibatch: allow several times the duration of the slowest one.
    """
    restarts: int = Field(default=5, ge=0, le=_MOST_RESTARTS)
    """Number of consecutive deaths, each before a wave is committed, after which a virtual worker is not restarted and
    the others continue; 0: none is ever restarted. A run that is rewound to a checkpoint more often than that in a row,
    without a newer one, fails.
    """
    backoff: Annotated[Duration, AfterValidator(partial(checked_bounds, least="0s", most="1h"))] = Field(
        default=timedelta(seconds=30), examples=["30s"]
    )
    """Maximum back-off (0s to 1h) before a restart of a virtual worker: none at first, then 1, 2, 4, … seconds while it
    does not complete a wave.
    """
    absence: Annotated[Duration, AfterValidator(partial(checked_bounds, least="0s", most="24h"))] = Field(
        default=timedelta(seconds=120), examples=["2min"]
    )
    """Time (0s to 24h) for which processes that every virtual worker needs may be missing before the run fails: a
    parameter server, or the agents of all virtual workers. After half of it a virtual worker continues without its
    missing agents, if the devices of the others have enough memory.
    """
    straggler: Annotated[float, AfterValidator(_checked_factor)] = Field(default=2.0, examples=[2.0])
    """Slowdown factor (from 1.1 to 1000) relative to the plan, compared with the other stages, above which a stage is a
    straggler: it is reported, and layers are moved to other stages if that pays off. 0: no detection. A
    deterministic run is moved as well; `decisions.jsonl` has when, and repeats it as a script.
    """
    patience_waves: int = Field(default=5, ge=1, le=_MOST_RESTARTS)
    """Number of consecutive slow waves before a stage counts as a straggler; reports arrive at most once a second."""
    least_gain: float = Field(default=0.2, ge=0.01, le=100.0)
    """Minimum speed-up of the job for which layers are moved, as a fraction: 0.2 is a fifth."""
