"""Virtual workers that die where a test wants it, and what their stages see of it: nothing works any more.

Every call that a stage makes (to shards, to the clock shard, to the history) is a *moment*, at which its virtual worker
can die: `before staged`, `during push`, `after push_buffers`, `before forward`, and `before evaluation`, whose share of
it is computed and not reported. From then on every call of every stage of that life fails and its links are cut, as if
its processes were killed. At such a moment it can also be asked to leave.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from hetpipe.errors import InjectedFault
from hetpipe.link.policy import Link
from hetpipe.observe.history import HistoryWriter, Value
from hetpipe.server.shard.transport import ClockTransport, ShardTransport
from hetpipe.values.ids import Incarnation, StageIndex, VirtualWorkerIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """When a life of a virtual worker ends."""

    vw: int
    at: str
    """The moment: `before`, `during` or `after` a call, and its name."""
    number: int | None = None
    """Of the wave, the clock or the minibatch that the call is about; None: whichever comes first."""
    stage: int = 0
    """Whose call."""
    incarnation: int = 0
    comes_back: bool = True
    also: tuple[int, ...] = ()
    """Other virtual workers that die in the same moment."""
    how: Literal["killed", "evicted", "drained"] = "killed"
    """`evicted`: it lives on, and only the others believe that it is gone. `drained`: it is asked to leave at the next
    barrier, and comes back, if it does, when it has."""


@dataclass(slots=True, eq=False)
class Life:
    """One life of a virtual worker. Thread-safe."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    deaths: Sequence[Death]
    ends: Callable[[Life, Death], None]
    """Called once, on the thread that died."""
    links: list[Link] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)
    is_over: bool = False
    """Nobody counts on it any more."""
    is_drained: bool = False
    """It was asked to leave."""
    has_left: bool = False
    """It did."""
    _is_dead: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def end(self) -> bool:
        """Nobody counts on it any more; returns whether somebody did until now."""
        with self._lock:
            counted, self.is_over = not self.is_over, True
        return counted

    def drain(self) -> bool:
        """It is to leave; returns whether that is new."""
        with self._lock:
            is_new, self.is_drained = not self.is_drained, True
        return is_new

    def reach(self, moment: str, number: int, stage: StageIndex) -> None:
        """A stage makes a call.

        Raises:
            InjectedFault: this life is over, now or before.
        """
        self.check()
        for death in self.deaths:
            is_here = (death.at, death.stage, death.incarnation) == (moment, stage, self.incarnation)
            if is_here and death.vw == self.vw and death.number in (None, number):
                if self.drain() if death.how == "drained" else self.end():
                    self.ends(self, death)
                self.check()

    def check(self) -> None:
        """See `reach`."""
        if self._is_dead:
            raise InjectedFault(f"virtual worker {self.vw} (incarnation {self.incarnation}) was killed")

    def kill(self) -> None:
        """Nothing works any more."""
        self._is_dead = True
        for link in self.links:
            link.close()


class _MortalCalls:
    """The calls of one stage to something, each of them a moment."""

    def __init__(self, inner: object, life: Life, stage: StageIndex) -> None:
        self._inner = inner
        self._life = life
        self._stage = stage

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        life, stage = self._life, self._stage
        if name == "close":
            return method

        def call(*arguments: Any, **options: Any) -> Any:
            number = _number_of(arguments)
            life.reach(f"before {name}", number, stage)
            if name.startswith("push"):
                header, chunks = arguments
                arguments = (header, _Streamed(chunks, lambda: life.reach(f"during {name}", number, stage)))
            result = method(*arguments, **options)
            if isinstance(result, Iterator):
                return iter(_Streamed(result, lambda: life.reach(f"during {name}", number, stage)))
            life.reach(f"after {name}", number, stage)
            return result

        return call


def _number_of(arguments: tuple[Any, ...]) -> int:
    """The wave or the clock that a call is about: of its header, or its second argument."""
    for name in ("wave", "clock"):
        found = getattr(arguments[0], name, None) if arguments else None
        if found is not None:
            return int(found)
    second = arguments[1] if len(arguments) > 1 else None
    return second if isinstance(second, int) else -1


@dataclass(frozen=True, slots=True)
class _Streamed:
    """Items with a moment behind each, as often as they are sent."""

    items: Iterable[Any]
    each: Callable[[], None]

    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            yield item
            self.each()


def mortal_shard(shard: ShardTransport, life: Life, stage: StageIndex) -> ShardTransport:
    """The calls of one stage to a shard."""
    return cast("ShardTransport", _MortalCalls(shard, life, stage))


def mortal_clock(clock: ClockTransport, life: Life, stage: StageIndex) -> ClockTransport:
    """The calls of one stage to the clock shard."""
    return cast("ClockTransport", _MortalCalls(clock, life, stage))


class MortalHistory(HistoryWriter):
    """What one stage writes down; the number of such a moment is the minibatch's."""

    def __init__(self, inner: HistoryWriter, life: Life, stage: StageIndex) -> None:
        self._inner = inner
        self._life = life
        self._stage = stage

    def write(self, event: str, **fields: Value) -> None:
        """See `HistoryWriter.write`."""
        p = fields.get("p", -1)
        assert isinstance(p, int), "minibatches have numbers"
        self._life.reach(f"before {event}", p, self._stage)
        self._inner.write(event, **fields)
        self._life.reach(f"after {event}", p, self._stage)
