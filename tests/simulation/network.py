"""Calls between processes over a network that loses, delays, repeats and reorders.

A caller is patient: it asks until it is answered, so a call may be served any number of times, also long after it was
answered. "Not yet" is asked again as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hetpipe.errors import ClockNotPublished, HetpipeError, Unavailable
from tests.simulation.scheduler import Process, Scheduler

#: After so long without an answer a caller asks again.
PATIENCE = 12

#: Copies of a call: each is sent again by itself while the target is away, so without a bound they would multiply.
_MOST_COPIES = 30

#: What a server says that will answer when there is news.
PARKED = object()


@dataclass(frozen=True, slots=True)
class Weather:
    """How bad the network is."""

    loss: float = 0.0
    duplication: float = 0.0
    slowness: int = 3
    """Longest usual delay."""
    lateness: int = 0
    """Longest delay of a second copy."""


@dataclass(slots=True)
class Call:
    """One question, however often it is asked."""

    caller: Process
    boot: int
    target: Process
    name: str
    serve: Callable[[], object]
    done: Callable[[object], None]
    failed: Callable[[HetpipeError], None]
    retries: bool
    is_answered: bool = False
    num_copies: int = 1


class Network:
    """Carries calls."""

    def __init__(self, scheduler: Scheduler, weather: Weather) -> None:
        self._scheduler = scheduler
        self._random = scheduler.random
        self.weather = weather
        #: Processes that cannot reach each other.
        self.cuts: set[tuple[str, str]] = set()
        #: target → calls that wait for news there.
        self._parked: dict[Process, list[Call]] = {}
        #: Told after each call that a process served: it may crash right there.
        self.after_serving: Callable[[Process, str], None] = lambda _process, _name: None

    def call(
        self,
        caller: Process,
        target: Process,
        name: str,
        serve: Callable[[], object],
        done: Callable[[object], None],
        failed: Callable[[HetpipeError], None],
        *,
        retries: bool = True,
    ) -> None:
        """Ask until there is an answer.

        Args:
            caller, target: who asks whom.
            name: of the call, for traces.
            serve: what happens at the target; raises a `HetpipeError` for a refusal.
            done: takes the answer at the caller.
            failed: takes a refusal there.
            retries: whether "not yet" is asked again, or is a refusal.
        """
        self._send(Call(caller, caller.boot, target, name, serve, done, failed, retries))

    def ring(self, target: Process) -> None:
        """There is news at `target`: what is parked there is served again."""
        for call in self._parked.pop(target, []):
            self._arrive(call)

    def forget(self, target: Process) -> None:
        """`target` crashed: who waits there notices, and asks again."""
        for call in self._parked.pop(target, []):
            self._again(call)

    # -- the way there and back --------------------------------------------------------------------------------------

    def _is_lost(self, call: Call) -> bool:
        loss = self.weather.loss
        pair = (call.caller.name, call.target.name)
        return (loss > 0 and self._random.random() < loss) or pair in self.cuts or pair[::-1] in self.cuts

    def _delay(self) -> int:
        return 1 + int(self._random.random() * self.weather.slowness)

    def _again(self, call: Call) -> None:
        self._scheduler.at(PATIENCE, partial(self._send, call))

    def _send(self, call: Call) -> None:
        if call.is_answered or call.caller.boot != call.boot:
            return
        if self._is_lost(call):
            self._again(call)
            return
        self._scheduler.at(self._delay(), partial(self._arrive, call))
        weather = self.weather
        if weather.duplication and self._random.random() < weather.duplication and call.num_copies < _MOST_COPIES:
            call.num_copies += 1
            self._scheduler.at(1 + self._random.randint(0, weather.lateness), partial(self._arrive, call))

    def _arrive(self, call: Call) -> None:
        target = call.target
        if not target.is_reachable:
            if target.alive:
                target.waiting.append(partial(self._arrive, call))
            self._again(call)
            return
        try:
            answer = call.serve()
        except HetpipeError as error:
            answer = error
        if answer is PARKED:
            self._parked.setdefault(target, []).append(call)
            return
        boot = target.boot
        self.after_serving(target, call.name)
        if target.boot != boot or self._is_lost(call):
            self._again(call)
            return
        self._scheduler.at(self._delay(), partial(self._return, call, answer))

    def _return(self, call: Call, answer: object) -> None:
        caller = call.caller
        if call.is_answered or caller.boot != call.boot:
            return
        if caller.paused_since is not None:
            caller.waiting.append(partial(self._return, call, answer))
            return
        if isinstance(answer, Unavailable) or (call.retries and isinstance(answer, ClockNotPublished)):
            self._scheduler.at(2, partial(self._send, call))
            return
        call.is_answered = True
        if isinstance(answer, HetpipeError):
            call.failed(answer)
        else:
            call.done(answer)
