"""Small-scope exploration: every next step and every fault from state after state, and from each one a way on.

`python -m tests.simulation.explore` prints how many.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tests.simulation.scheduler import Violation
from tests.simulation.small_parts import small_job
from tests.simulation.small_world import SmallWorld, Step

#: No run is longer; each step is one that cannot be taken for ever.
_LONGEST_PATH = 500

Path = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Explored:
    """What was seen."""

    states: int
    transitions: int
    exhausted: int
    """States all of whose next steps were taken."""
    is_complete: bool
    """Whether there are no further states."""


class Explorer:
    """Breadth first from every state of a run without faults; each state that is met goes on until the clock grows."""

    def __init__(self, start: SmallWorld, limit: int) -> None:
        self._limit = limit
        self._seen: set[int] = set()
        self._queue: deque[tuple[SmallWorld, Path]] = deque()
        self._exhausted = self._transitions = 0
        world = start
        path: Path = ()
        self._meet(world, path)
        while steps := world.steps():
            world, path = world.apply(steps[0]), (*path, steps[0])
            self._meet(world, path)

    def run(self) -> Explored:
        """Until there are no more states, or enough of them."""
        while self._queue and len(self._seen) < self._limit:
            world, path = self._queue.popleft()
            for step in world.steps() + world.faults():
                self._meet(self._after(world, step, path), (*path, step))
            self._exhausted += 1
        return Explored(len(self._seen), self._transitions, self._exhausted, not self._queue)

    def _after(self, world: SmallWorld, step: Step, path: Path) -> SmallWorld:
        self._transitions += 1
        try:
            return world.apply(step)
        except Exception as error:
            raise Violation(f"{error!r} after {(*path, step)}") from error

    def _meet(self, world: SmallWorld, path: Path) -> None:
        """Note a state, and that the clock can advance from it (P5): along states that are noted, too."""
        while self._is_new(world):
            if len(self._queue) < self._limit // 8:  # more would never be looked at
                self._queue.append((world, path))
            steps = world.steps()
            if not steps:
                if not world.log.finished:
                    raise Violation(f"P5: nothing can happen after {path}")
                return
            if len(path) > _LONGEST_PATH:
                raise Violation(f"P5: the clock stays at {world.log.published} for ever after {path}")
            world, path = self._after(world, steps[0], path), (*path, steps[0])

    def _is_new(self, world: SmallWorld) -> bool:
        before = len(self._seen)
        self._seen.add(world.fingerprint())
        return len(self._seen) > before


def explore(staleness: int, limit: int, *, waves: int, crashes: int = 2, copies: int = 1, drains: int = 0) -> Explored:
    """One scope: D, how many states at most, how many waves each worker computes, and the faults there may be."""
    job = small_job(staleness, samples=3 * waves, deterministic=False)
    return Explorer(SmallWorld(job, crashes=crashes, copies=copies, drains=drains), limit).run()


def main() -> int:
    """All scopes; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.explore", description=__doc__)
    parser.add_argument("--states", type=int, default=100_000, help="of each of the three values of D")
    options = parser.parse_args()
    total = _tell("no fault, one wave each", lambda: explore(0, options.states, waves=1, crashes=0, copies=0))
    for staleness in (0, 1, 2):
        what = f"D = {staleness}, two crashes, one repeated message"
        total += _tell(what, partial(explore, staleness, options.states, waves=staleness + 2))
    leaving = partial(explore, 1, options.states // 2, waves=2, crashes=1, copies=0, drains=2)
    total += _tell("D = 1, two who are asked to leave, one crash", leaving)
    sys.stdout.write(f"{total} states: no promise broken, and from each one the clock can advance\n")
    return 0


def _tell(what: str, scope: Callable[[], Explored]) -> int:
    started = time.monotonic()
    found = scope()
    how_far = "all there are" if found.is_complete else f"every step and fault from {found.exhausted} of them"
    seconds = time.monotonic() - started
    sys.stdout.write(f"{what}: {found.states} states ({how_far}), {found.transitions} steps, {seconds:.0f} s\n")
    return found.states


if __name__ == "__main__":
    sys.exit(main())
