"""Conditions as text: while a run is followed, in its status, and in its final message. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import groupby

from hetpipe.report.text import count, pairs
from hetpipe.values.conditions import Condition, ConditionKind
from hetpipe.values.events import ConditionCleared, ConditionRaised, JobEvent

ConditionEvent = ConditionRaised | ConditionCleared

#: Maximum number of further subjects named in a sentence.
_MAX_NAMED = 3


def condition_text(event: ConditionEvent) -> str:
    """A raised or cleared condition: `WARNING: the checkpoint at clock 42 was given up, …`."""
    match event:
        case ConditionRaised():
            repeated = f" ({count(event.times, 'time')} since the last warning)" if event.times > len(event.who) else ""
            return f"WARNING: {event.sentence}{_also(event.who[1:])}{repeated}"
        case ConditionCleared():
            rest = f"; of {count(event.remaining, 'other')} it is still true" if event.remaining else ""
            return f"{event.sentence}{_also(event.who[:-1])}{rest}"


def condition_line(event: ConditionEvent) -> str:
    """The same as one `key=value` line."""
    who = _named(event.who)
    values: dict[str, object] = {"event": event.kind, "condition": event.condition, "who": who}
    number = {"times": event.times} if isinstance(event, ConditionRaised) else {"remaining": event.remaining}
    return pairs({**values, **number, "sentence": event.sentence})


def _also(others: Sequence[str]) -> str:
    if not others:
        return ""
    return f" (also: {_named(others)})"


def _named(names: Sequence[str]) -> str:
    """The first few names."""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{', '.join(names[:_MAX_NAMED])}{more}"


def condition_lines(conditions: Iterable[Condition]) -> list[str]:
    """The conditions of a run, one line per kind: cleared ones first, the earliest one that holds last."""
    by_kind = sorted(conditions, key=lambda one: one.kind)
    lines = [_summed_up(list(found)) for _, found in groupby(by_kind, key=lambda one: one.kind)]
    return [line for _, _, line in sorted(lines)]


def _summed_up(found: list[Condition]) -> tuple[bool, float, str]:
    """A line about the conditions of one kind, with its sort key."""
    holding = [one for one in found if one.holds]
    first = min(holding or found, key=lambda one: one.since)
    times = sum(one.times for one in found)
    others = _also([one.who for one in (holding or found) if one is not first])
    how_often = f", {count(times, 'time')}" if times > 1 else ""
    if holding:
        return True, -first.since, f"since {_time(first.since)}{how_often}: {first.sentence}{others}"
    until = max(one.cleared or 0.0 for one in found)
    last = max(found, key=lambda one: one.cleared or 0.0)
    span = f"from {_time(first.since)} to {_time(until)}{how_often}"
    return False, -first.since, f"{span}: {first.sentence}{others}; {last.clearance}"


def _time(wall: float) -> str:
    return datetime.fromtimestamp(wall).astimezone().strftime("%H:%M:%S")


class EventConditions:
    """The conditions of a followed run, by its events. Not thread-safe."""

    def __init__(self) -> None:
        self._found: dict[tuple[ConditionKind, str], Condition] = {}

    def on_event(self, event: JobEvent) -> None:
        """Update the conditions by an event of any kind."""
        match event:
            case ConditionRaised(condition=kind, who=names):
                for who in names:
                    before = self._found.get((kind, who), Condition(kind, who))
                    times = before.times + max(1, event.times // len(names))
                    self._found[kind, who] = Condition(kind, who, event.sentence, event.since, times=times)
            case ConditionCleared(condition=kind, who=names):
                for who in names:
                    known = self._found.get((kind, who))
                    if known is not None:
                        over = replace(known, cleared=event.cleared, clearance=event.sentence)
                        self._found[kind, who] = over
            case _:
                """No-op: other events are ignored."""

    @property
    def all(self) -> tuple[Condition, ...]:
        """All conditions, by start time."""
        return tuple(sorted(self._found.values(), key=lambda one: one.since))

    def current(self) -> Iterator[str]:
        """The current conditions, one line per kind."""
        yield from condition_lines(one for one in self._found.values() if one.holds)
