"""Virtual workers that die where a test wants it, and what their stages see of it: nothing works any more.

Every call that a stage makes (to shards, to the clock shard, to the history) is a *moment*, at which its virtual worker
can die: `before staged`, `during push`, `after push_buffers`, `before forward`, and `before evaluation`, whose share of
it is computed and not reported. From then on every call of every stage of that life fails and its links are cut, as if
its processes were killed. At such a moment it can also be asked to leave.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from hetpipe.errors import InjectedFault
from hetpipe.link.policy import Link
from hetpipe.observe.history import HistoryWriter, Value
from hetpipe.values.ids import Incarnation, StageIndex, VirtualWorkerIndex
from hetpipe.wire.call import Call, Calls, Chunk, Download, ReplyT, RequestT, Streaming, Unary, Upload
from tests.support.method_calls import method_name


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
    how: Literal["killed", "evicted", "drained", "moved", "enlarged"] = "killed"
    """`evicted`: it lives on, and only the others believe that it is gone. `drained`: it is asked to leave at the next
    barrier, and comes back, if it does, when it has. `moved`: it lives on, and its layers move at the next barrier.
    `enlarged`: it lives on, and another virtual worker joins at the next barrier."""
    stages: tuple[int, ...] = ()
    """Layers of each of its stages from there on, if they move; of the other one's, if it joins."""


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
    num_running: int = 0
    """Stages that have not ended, as far as its cluster has heard."""
    is_over: bool = False
    """Nobody counts on it any more."""
    is_drained: bool = False
    """It was asked to leave."""
    has_left: bool = False
    """It did."""
    moved: set[Death] = field(default_factory=set)
    """Moves of its layers, and further virtual workers, that were asked for."""
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

    def move(self, death: Death) -> bool:
        """Its layers are to move; returns whether that is new."""
        with self._lock:
            is_new = death not in self.moved
            self.moved.add(death)
        return is_new

    def _is_new(self, death: Death) -> bool:
        match death.how:
            case "drained":
                return self.drain()
            case "moved" | "enlarged":
                return self.move(death)
            case _:
                return self.end()

    def reach(self, moment: str, number: int, stage: StageIndex) -> None:
        """A stage makes a call.

        Raises:
            InjectedFault: this life is over, now or before.
        """
        self.check()
        for death in self.deaths:
            is_here = (death.at, death.stage, death.incarnation) == (moment, stage, self.incarnation)
            if is_here and death.vw == self.vw and death.number in (None, number):
                if self._is_new(death):
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


#: What the moments of a call are named by, where it is not the name of its method.
_MOMENTS = {
    "report_initialized": "initialized",
    "report_staged": "staged",
    "hold_clock": "hold",
    "get_progress": "progress",
    "follow_log": "follow",
}


class MortalCalls:
    """The calls of one stage to something, each of them a moment."""

    def __init__(self, inner: Calls, life: Life, stage: StageIndex) -> None:
        self._inner = inner
        self._life = life
        self._stage = stage

    def invoke(self, call: Unary[RequestT, ReplyT], request: RequestT) -> ReplyT:
        with self._moment(call, request):
            return self._inner.invoke(call, request)

    def stream(self, call: Streaming[RequestT, ReplyT], request: RequestT) -> Iterator[ReplyT]:
        self._reach("before", call, request)
        return iter(_Streamed(self._inner.stream(call, request), partial(self._reach, "during", call, request)))

    def upload(self, call: Upload[RequestT, ReplyT], header: RequestT, chunks: Iterable[Chunk]) -> ReplyT:
        with self._moment(call, header):
            return self._inner.upload(call, header, _Streamed(chunks, partial(self._reach, "during", call, header)))

    def download(self, call: Download[RequestT], header: RequestT) -> Iterator[Chunk]:
        self._reach("before", call, header)
        return iter(_Streamed(self._inner.download(call, header), partial(self._reach, "during", call, header)))

    def close(self) -> None:
        self._inner.close()

    @contextmanager
    def _moment(self, call: Call, request: object) -> Iterator[None]:
        self._reach("before", call, request)
        yield
        self._reach("after", call, request)

    def _reach(self, when: str, call: Call, request: object) -> None:
        name = method_name(call)
        self._life.reach(f"{when} {_MOMENTS.get(name, name)}", _number_of(request), self._stage)


def _number_of(request: object) -> int:
    """The wave, the clock or the switch point that a call is about."""
    for name in ("wave", "clock", "switch"):
        found = getattr(request, name, None)
        if found is not None:
            return int(found)
    return -1


@dataclass(frozen=True, slots=True)
class _Streamed:
    """Items with a moment behind each, as often as they are sent."""

    items: Iterable[Any]
    each: Callable[[], None]

    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            yield item
            self.each()


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
