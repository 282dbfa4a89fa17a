"""A metric's value at one moment, independent of Prometheus's library.

A source is called at every scrape and copies existing facts, so that minibatches have no cost for metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from hetpipe.observe.metric_names import FAMILIES, Family, Role, families_of


@dataclass(frozen=True, slots=True)
class Distribution:
    """The value of a histogram."""

    counts: tuple[int, ...]
    """Values in each bucket, not cumulative; one more than the upper bounds."""
    total: float
    """Sum of the values."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One series of one metric."""

    name: str
    value: float | Distribution
    labels: tuple[object, ...] = ()
    """Label values as text, in the order of the list."""


#: Called at every scrape, from any thread; must return quickly.
Source = Callable[[], Iterable[Reading]]


def sorted_by_family(readings: Iterable[Reading], role: Role) -> Mapping[Family, list[Reading]]:
    """The readings of a process of that role, by metric in the order of the list; metrics without any are omitted.

    Raises:
        ValueError: a metric is not in the list, is another role's, or has other labels.
    """
    found: dict[str, list[Reading]] = {}
    for reading in readings:
        _check(reading, role)
        found.setdefault(reading.name, []).append(reading)
    return {family: found[family.name] for family in families_of(role) if family.name in found}


def _check(reading: Reading, role: Role) -> None:
    family = FAMILIES.get(reading.name)
    if family is None:
        raise ValueError(f"{reading.name} is not in the list of metrics, hetpipe/observe/metric_names.py")
    if role not in family.roles:
        raise ValueError(f"{reading.name} is exposed by {', '.join(family.roles)}, not by a {role}")
    if len(reading.labels) != len(family.labels):
        raise ValueError(f"{reading.name} has the labels {family.labels}, not {reading.labels}")
    if isinstance(reading.value, Distribution) != (family.kind == "histogram"):
        raise ValueError(f"{reading.name} is a {family.kind}; {reading.value!r} is not a valid value")
