"""Simulated time: events in a heap, one source of chance, processes that crash, pause and come back.

Nothing here reads a clock: the same seed gives the same history on every machine.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections.abc import Callable

Action = Callable[[], None]


class Violation(AssertionError):
    """A promise was broken. The message says which; the seed replays it."""


class Process:
    """Something that can crash and pause. What it knew in memory is its subclass's to forget."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        #: Which start of it this is: what an earlier one had set in motion happens no more.
        self.boot = 0
        self.paused_since: int | None = None
        #: What came while it was paused.
        self.waiting: list[Action] = []

    @property
    def is_reachable(self) -> bool:
        """Whether it would answer."""
        return self.alive and self.paused_since is None

    def end(self) -> None:
        """It is gone, with all it had in memory."""
        self.alive = False
        self.boot += 1
        self.paused_since = None
        self.waiting.clear()

    def pause(self, now: int = 0) -> None:
        """Do nothing until `resume`; what comes meanwhile waits."""
        if self.is_reachable:
            self.paused_since = now

    def resume(self) -> None:
        """Go on, with what has come meanwhile first."""
        self.paused_since, boot = None, self.boot
        waiting, self.waiting = self.waiting, []
        for action in waiting:
            if self.boot == boot:
                action()

    def __str__(self) -> str:
        return self.name


class Scheduler:
    """Time, in ticks, and what will happen."""

    def __init__(self, seed: int, *, traces: bool = False) -> None:
        self.random = random.Random(f"hetpipe/simulation/{seed}")
        self.now = 0
        self.traces = traces
        self._heap: list[tuple[int, int, Process | None, int, Action]] = []
        self._count = 0

    def at(self, delay: int, action: Action, process: Process | None = None) -> None:
        """Do `action` later; `process`: only if that is still in its present life, and not while it is paused."""
        self._count += 1
        boot = 0 if process is None else process.boot
        heapq.heappush(self._heap, (self.now + delay, self._count, process, boot, action))

    def step(self) -> bool:
        """Let the next thing happen; False if there is none."""
        if not self._heap:
            return False
        self.now, _, process, boot, action = heapq.heappop(self._heap)
        if process is None:
            action()
        elif process.boot == boot:
            if process.paused_since is None:
                action()
            else:
                process.waiting.append(action)
        return True

    def run_until(self, tick: int) -> None:
        """Let everything happen that happens up to `tick`."""
        while self._heap and self._heap[0][0] <= tick:
            self.step()
        self.now = tick

    def trace(self, who: object, *what: object) -> None:
        """A line for people who replay a seed."""
        if self.traces:
            sys.stdout.write(f"{self.now:6d}  {who!s:<14} {' '.join(str(part) for part in what)}\n")
