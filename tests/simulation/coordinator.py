"""The coordinator: it notices who is gone, has it evicted, and starts its next life."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hetpipe.errors import HetpipeError, StaleIncarnation
from hetpipe.values.ids import Incarnation, VirtualWorkerIndex
from tests.simulation.scheduler import Process, Violation

if TYPE_CHECKING:
    from tests.simulation.world import World

#: How long a stage may be silent.
LEASE = 30

#: How often it looks.
_PERIOD = 8


class Coordinator(Process):
    """Decides who is evicted; whose life it is, it asks the agents (which never forget)."""

    def __init__(self, world: World) -> None:
        super().__init__("coordinator")
        self._world = world
        #: Virtual workers it has already begun to replace.
        self._failing: set[int] = set()

    def start(self) -> None:
        """Begin, or begin again."""
        self.alive = True
        self._failing = set()
        for vw, incarnation in sorted(self._world.lives.items()):
            if self._world.is_gone(vw, incarnation) and not self._world.has_left(vw, incarnation):
                self.give_up(vw, incarnation)  # the clock shard let it go, and the one who asked for that is no more
        self._look()

    def _look(self) -> None:
        world = self._world
        for vw, incarnation in sorted(world.lives.items()):
            if vw in self._failing:
                continue
            if world.has_failed(vw, incarnation, LEASE):
                self.give_up(vw, incarnation)
            elif world.has_left(vw, incarnation) and not world.promises.finished:
                self._failing.add(vw)
                self._replace(vw, incarnation)
        world.scheduler.at(_PERIOD, self._look, self)

    def give_up(self, vw: int, incarnation: int) -> None:
        """Evict a life of a virtual worker and begin its next one."""
        world = self._world
        if vw in self._failing or world.promises.finished:
            return
        self._failing.add(vw)
        world.scheduler.trace(self, f"gives up virtual worker {vw}.{incarnation}")
        world.kill_stages(vw, incarnation)
        if world.scheduler.random.random() < 0.6:
            self._ask("evict", vw, incarnation, then=lambda: self._replace(vw, incarnation))
        else:  # the two may overtake each other
            self._ask("evict", vw, incarnation)
            self._replace(vw, incarnation)

    def _replace(self, vw: int, incarnation: int) -> None:
        world = self._world
        world.scheduler.at(world.scheduler.random.randint(1, 40), lambda: self._admit(vw, incarnation + 1), self)

    def _admit(self, vw: int, incarnation: int) -> None:
        world = self._world
        self._failing.discard(vw)
        if world.lives[vw] >= incarnation or world.promises.finished:
            return
        self._ask(
            "admit",
            vw,
            incarnation,
            world.num_stages(vw, incarnation),
            then=lambda: world.begin_life(vw, incarnation),
        )

    def _ask(self, name: str, vw: int, incarnation: int, *more: int, then: Callable[[], None] = lambda: None) -> None:
        first = self._world.servers[0]
        args = (VirtualWorkerIndex(vw), Incarnation(incarnation), *more)

        def done(_: object) -> None:
            then()

        def failed(error: HetpipeError) -> None:
            if not isinstance(error, StaleIncarnation):
                raise Violation(f"{name}{args} was refused: {error}")

        self._world.network.call(self, first, name, lambda: first.clock_part.decide(name, *args), done, failed)

    def drain(self, vw: int) -> None:
        """Have a virtual worker leave at the next barrier; somebody adds it again later."""
        incarnation = self._world.lives[vw]

        def done() -> None:
            if self._world.is_gone(vw, incarnation):  # a newcomer, which nobody tells
                self.give_up(vw, incarnation)

        if vw not in self._failing:
            self._ask("drain", vw, incarnation, then=done)

    def ask_for_barrier(self, reason: str) -> None:
        """Somebody wants one."""
        first = self._world.servers[0]
        self._world.network.call(
            self,
            first,
            "request_barrier",
            lambda: self._world.request_barrier(first, reason),
            lambda _: None,
            lambda _: None,
        )
