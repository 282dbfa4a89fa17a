"""The faults of a storm, and the order in which a seed makes them come. Pure.

A storm begins with one fault of each kind and with every pair of `CERTAIN`, in an order that the seed makes. Then come,
in turn, faults of one process, each once before any comes again, and two of them at once.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tests.chaos.cells import Deed
from tests.chaos.cluster import COORDINATOR, REDIS, RUNS
from tests.chaos.pair_table import GAPS_SECONDS

#: The first parameter server decides which wave counts.
CLOCK_SHARD = "shard-0"

#: The process that has handed the job in and follows it.
FOLLOWER = "submit"

SHARDS = (CLOCK_SHARD, "shard-1")
AGENTS = ("agent-0", "agent-1", "agent-2")
STAGES = ("stage-0.0", "stage-0.1", "stage-1.0", "stage-1.1")

#: Who suffers what.
VICTIMS: dict[Deed, tuple[str, ...]] = {
    Deed.KILL: (COORDINATOR, REDIS, *SHARDS, *AGENTS, *STAGES, FOLLOWER),
    Deed.PAUSE: (COORDINATOR, REDIS, *SHARDS, *AGENTS, *STAGES, FOLLOWER),
    Deed.RESTART: (COORDINATOR, REDIS, *SHARDS, *AGENTS, FOLLOWER),
    Deed.WIPE: (REDIS,),
    Deed.FLUSH: (REDIS,),
    Deed.LOSE_DISK: SHARDS,
    Deed.FILL_DISK: (*SHARDS, REDIS, RUNS),
}

#: Kinds of faults that are several at once.
TWO_AT_ONCE, CONTROL_PLANE = "two at once", "coordinator + clock shard"


@dataclass(frozen=True, slots=True, order=True)
class Strike:
    """One thing that is done to one process or disk."""

    deed: Deed
    victim: str
    """Key of a process of the cluster, `stage-V.S` for a stage of virtual worker V, `submit`, or `runs` for the disk
    with the folders of runs."""

    @property
    def name(self) -> str:
        """For the table, and to choose it."""
        return f"{self.deed}/{self.victim}"


@dataclass(frozen=True, slots=True)
class StormFault:
    """One strike, or several at once."""

    strikes: tuple[Strike, ...]
    gap_seconds: float = 0.0
    """Between one and the next."""

    @property
    def name(self) -> str:
        """For the table, and to choose it."""
        return "+".join(strike.name for strike in self.strikes)

    @property
    def victims(self) -> frozenset[str]:
        """Whoever is struck."""
        return frozenset(strike.victim for strike in self.strikes)

    @property
    def row(self) -> str:
        """Its kind."""
        if {COORDINATOR, CLOCK_SHARD} <= self.victims:
            return CONTROL_PLANE
        return self.strikes[0].deed if len(self.strikes) == 1 else TWO_AT_ONCE

    @property
    def column(self) -> str:
        """All of a kind stand in one column."""
        return "survived"


def _at_once(*strikes: tuple[Deed, str]) -> StormFault:
    return StormFault(tuple(Strike(deed, victim) for deed, victim in strikes))


#: Those that come in every storm, however short.
CERTAIN = (
    _at_once((Deed.KILL, COORDINATOR), (Deed.KILL, CLOCK_SHARD)),
    _at_once((Deed.KILL, COORDINATOR), (Deed.LOSE_DISK, CLOCK_SHARD)),
    _at_once((Deed.FILL_DISK, CLOCK_SHARD), (Deed.KILL, COORDINATOR), (Deed.KILL, CLOCK_SHARD)),
    _at_once((Deed.WIPE, REDIS), (Deed.KILL, COORDINATOR)),
    _at_once((Deed.KILL, REDIS), (Deed.KILL, CLOCK_SHARD)),
)

_FORGOTTEN = (Deed.WIPE, Deed.FLUSH)

#: Pairs that are not drawn, and why.
BEYOND: dict[str, str] = {
    f"{deed}/{REDIS}+{Deed.LOSE_DISK}/{CLOCK_SHARD}": "Redis and the clock shard are the only two that know of a job"
    for deed in _FORGOTTEN
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which faults a storm may have, by patterns of `fnmatch`."""

    only: tuple[str, ...] = ()
    """Empty: all."""
    without: tuple[str, ...] = ()

    def admits(self, fault: StormFault) -> bool:
        """A pattern with a `+` is about whole faults; others are about every strike, `without` about any of them."""
        strikes = [strike.name for strike in fault.strikes]
        is_wanted = not self.only or _fits(fault.name, _whole(self.only)) or all(_fits(s, self.only) for s in strikes)
        return is_wanted and not (
            _fits(fault.name, _whole(self.without)) or any(_fits(s, self.without) for s in strikes)
        )


def single_faults() -> tuple[StormFault, ...]:
    """One for each deed and victim."""
    return tuple(_at_once((deed, victim)) for deed, victims in VICTIMS.items() for victim in victims)


def schedule(seed: int, admits: Callable[[StormFault], bool]) -> Iterator[StormFault]:
    """The faults of a storm in their order, without an end; none where none is admitted."""
    draw = random.Random(seed)
    singles = [fault for fault in single_faults() if admits(fault)]
    opening = _opening(draw, singles, admits)
    yield from opening
    decks = [deck for deck in (_rounds(draw, singles, opening), _pairs(draw, singles, admits)) if deck is not None]
    for deck in itertools.cycle(decks):
        yield next(deck)


def _opening(
    draw: random.Random, singles: Sequence[StormFault], admits: Callable[[StormFault], bool]
) -> list[StormFault]:
    """One of each kind, and what is certain."""
    kinds = {fault.row: [each for each in singles if each.row == fault.row] for fault in singles}
    opening = [*(draw.choice(kind) for kind in kinds.values()), *(fault for fault in CERTAIN if admits(fault))]
    draw.shuffle(opening)
    return opening


def _rounds(
    draw: random.Random, singles: Sequence[StormFault], opening: Sequence[StormFault]
) -> Iterator[StormFault] | None:
    """Each of `singles` once, and again; in the first round without what has come already."""

    def rounds() -> Iterator[StormFault]:
        left = [fault for fault in singles if fault not in opening]
        while True:
            draw.shuffle(left)
            yield from left
            left = list(singles)

    return rounds() if singles else None


def _pairs(
    draw: random.Random, singles: Sequence[StormFault], admits: Callable[[StormFault], bool]
) -> Iterator[StormFault] | None:
    """Two of `singles` with two victims, at once or one soon after the other."""
    strikes = [fault.strikes[0] for fault in singles]
    found = [StormFault(pair) for pair in itertools.permutations(strikes, 2) if pair[0].victim != pair[1].victim]
    found = [pair for pair in found if admits(pair) and not _is_beyond(pair)]

    def pairs() -> Iterator[StormFault]:
        while True:
            yield StormFault(draw.choice(found).strikes, draw.choice(GAPS_SECONDS))

    return pairs() if found else None


def _is_beyond(fault: StormFault) -> bool:
    return any({strike.name for strike in fault.strikes} == set(name.split("+")) for name in BEYOND)


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _whole(patterns: Sequence[str]) -> list[str]:
    """Those about several strikes."""
    return [pattern for pattern in patterns if "+" in pattern]
