"""The conditions of one job: reports of processes, notification of followers, current state. Pure.

A process reports the newest state of each of its conditions, with the number of times it was raised. The first change
of a kind is announced immediately. Further ones of the same kind are batched briefly, and for a flapping kind at most
`BURST` summaries with counts are sent per `WINDOW_SECONDS`. The current state is available at any time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hetpipe.values.conditions import Condition, ConditionKind
from hetpipe.values.events import ConditionCleared, ConditionRaised, NumberedEvent

#: Batching delay after an event of a kind: all processes detect a full disk.
GATHER_SECONDS = 2.0

#: Maximum notifications per kind, and the window in seconds.
WINDOW_SECONDS = 60.0
BURST = 4

#: Maximum conditions kept of one job: those of every possible shard and stage, with some margin.
MAX_KEPT = 1_000

#: Source of conditions announced by an earlier coordinator.
_RECALLED = "recalled"

_Key = tuple[ConditionKind, str]
_Event = ConditionRaised | ConditionCleared


@dataclass(slots=True)
class _Entry:
    """One condition, over all processes that report it."""

    newest: Condition
    """As reported by the process that raised it; `times` is summed over all."""
    reporters: set[str] = field(default_factory=set)
    """Subjects for which it is active."""
    reports_by_source: dict[str, Condition] = field(default_factory=dict)
    """The last report of each process."""
    announced: bool = False
    """Whether it was active in the last notification."""
    unannounced: int = 0
    """Number of times it was raised since the last notification, while it was not active."""


class ConditionBoard:
    """The safety state of one job. Not thread-safe."""

    def __init__(self) -> None:
        self._entries: dict[_Key, _Entry] = {}
        #: By kind: changes since the last event, and the times of the last events.
        self._changed: dict[ConditionKind, list[str]] = {}
        self._announced_at: dict[ConditionKind, deque[float]] = {kind: deque(maxlen=BURST) for kind in ConditionKind}

    def recall(self, events: Iterable[NumberedEvent]) -> None:
        """Start from the events sent by earlier coordinators, in order. Processes report their conditions again."""
        for numbered in events:
            match numbered.event:
                case ConditionRaised(condition=kind, who=names, sentence=sentence, since=since, times=times):
                    for who in names:
                        raised = Condition(kind, who, sentence, since, times=times)
                        self._entries[kind, who] = _Entry(raised, {_RECALLED}, announced=True)
                case ConditionCleared(condition=kind, who=names, sentence=sentence, cleared=cleared):
                    for who in names:
                        entry = self._entries.get((kind, who))
                        if entry is not None:
                            entry.newest = replace(entry.newest, cleared=cleared, clearance=sentence)
                            entry.reporters, entry.announced = set(), False
                case _:
                    """other events are irrelevant here"""

    def take(self, source: str, reports: Sequence[Condition]) -> None:
        """Process the report of a process.

        Args:
            source: the process: its previous report is replaced.
            reports: the newest state of each of its conditions; unlisted ones are unknown.
        """
        for report in reports:
            self._take(source, report)

    def due(self, *, now: float) -> list[_Event]:
        """The notifications due at monotonic second `now`."""
        out: list[_Event] = []
        for kind in [kind for kind in self._changed if now >= self._next_at(kind)]:
            events = list(self._events(kind, self._changed.pop(kind)))
            if events:
                self._announced_at[kind].append(now)
            out += events
        return out

    @property
    def all(self) -> tuple[Condition, ...]:
        """Every condition that is or was active, by the time at which it was last raised."""
        found = (entry.newest for entry in self._entries.values() if entry.newest.times)
        return tuple(sorted(found, key=lambda one: (one.since, one.kind, one.who)))

    @property
    def current(self) -> Mapping[ConditionKind, int]:
        """Number of processes for which each kind is active; 0 for none."""
        holding = Counter(kind for (kind, _), entry in self._entries.items() if entry.newest.holds)
        return {kind: holding[kind] for kind in ConditionKind}

    # -- inside ----------------------------------------------------------------------------------------------------

    def _take(self, source: str, report: Condition) -> None:
        key = report.kind, report.who
        entry = self._entries.get(key)
        if entry is None:
            if not report.times or not self._has_room():
                return
            entry = self._entries[key] = _Entry(replace(report, times=0, cleared=report.cleared or report.since))
        raised, held, before = (
            self._raised(entry, source, report),
            entry.newest.holds,
            entry.reports_by_source.get(source),
        )
        entry.reports_by_source[source] = report
        has_begun = not held or (before is not None and before.since < report.since)
        entry.reporters.discard(_RECALLED)
        if report.holds:
            entry.reporters.add(source)
        elif not report.kind.is_permanent:
            entry.reporters.discard(source)
        times = entry.newest.times + raised
        if entry.reporters and has_begun:
            entry.newest = replace(report, times=times)
        elif not entry.reporters and (held or raised):
            entry.newest = replace(report, sentence=report.sentence or entry.newest.sentence, times=times)
        else:
            entry.newest = replace(entry.newest, times=times)
        entry.unannounced += raised if has_begun else 0  # else it was raised again while active
        if entry.newest.holds != held or entry.unannounced:
            names = self._changed.setdefault(report.kind, [])
            if report.who not in names:
                names.append(report.who)

    def _raised(self, entry: _Entry, source: str, report: Condition) -> int:
        """Number of times it was raised since the last report."""
        before = entry.reports_by_source.get(source)
        if before is not None:
            # A restarted process counts from 0 again.
            return report.times - before.times if report.times >= before.times else report.times
        if _RECALLED in entry.reporters or (entry.newest.times and not entry.reports_by_source):
            return int(report.holds and not entry.newest.holds)
        return report.times

    def _has_room(self) -> bool:
        if len(self._entries) < MAX_KEPT:
            return True
        over = next(
            (key for key, entry in self._entries.items() if not entry.newest.holds and not entry.announced), None
        )
        if over is not None:
            del self._entries[over]
        return over is not None

    def _next_at(self, kind: ConditionKind) -> float:
        announced = self._announced_at[kind]
        if not announced:
            return 0.0
        return max(announced[-1] + GATHER_SECONDS, announced[0] + WINDOW_SECONDS if len(announced) == BURST else 0.0)

    def _events(self, kind: ConditionKind, names: Sequence[str]) -> Iterator[_Event]:
        """Notifications for a kind: one event for all conditions that were raised, one for all that were cleared."""
        entries = [self._entries[kind, who] for who in names if (kind, who) in self._entries]
        raised = [entry for entry in entries if entry.unannounced]
        cleared = [entry for entry in entries if not entry.newest.holds and (entry.announced or entry.unannounced)]
        if raised:
            first = min(raised, key=lambda entry: entry.newest.since).newest
            who, times = tuple(entry.newest.who for entry in raised), sum(entry.unannounced for entry in raised)
            yield ConditionRaised(kind, who, first.sentence, first.since, times)
        if cleared:
            last = max(cleared, key=lambda entry: entry.newest.cleared or 0.0).newest
            who = tuple(entry.newest.who for entry in cleared)
            yield ConditionCleared(kind, who, last.clearance, last.cleared or 0.0, self.current[kind])
        for entry in entries:
            entry.announced, entry.unannounced = entry.newest.holds, 0
