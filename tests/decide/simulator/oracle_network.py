"""The second simulator's network: flows as processes, and servers that serve everyone present equally."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import simpy

from tests.decide.simulator.case import Case
from tests.decide.simulator.oracle_formulas import picoseconds

Process = Generator[simpy.Event, Any, None]

#: What happened: kind, virtual worker, stage, shard, number, start, end. -1 where there is none.
Happening = tuple[str, int, int, int, int, int, int]


class Instants(simpy.Environment):
    """Whole picoseconds."""

    @property
    def instant(self) -> int:
        """Now."""
        return int(self.now)

    def at_priority(self, priority: int) -> simpy.Event:
        """An event of this instant that comes after all of lower priorities; what ends has priority 1."""
        event = self.event()
        event._ok, event._value = True, None
        self.schedule(event, priority=priority)  # type: ignore[arg-type] # simpy names its own two priorities only
        return event


class Server:
    """Serves everyone present equally, in whole picoseconds."""

    def __init__(self, env: Instants) -> None:
        self.env = env
        self.left: dict[simpy.Event, int] = {}
        self.since = self.version = 0

    def serve(self, work: int) -> simpy.Event:
        self.advance()
        through = self.env.event()
        self.left[through] = work
        self.reschedule()
        return through

    def advance(self) -> None:
        if self.left:
            share = (self.env.instant - self.since) // len(self.left)
            self.left = {event: left - share for event, left in self.left.items()}
        self.since = self.env.instant

    def reschedule(self) -> None:
        self.version += 1
        if self.left:
            self.env.process(self.wait(self.version, min(self.left.values()) * len(self.left)))

    def wait(self, version: int, delay: int) -> Process:
        yield self.env.timeout(delay)
        if version == self.version:
            self.advance()
            for event in [event for event, left in self.left.items() if left == 0]:
                del self.left[event]
                event.succeed()
            self.reschedule()


class Network:
    """The servers of a case."""

    def __init__(self, env: Instants, case: Case, happened: list[Happening]) -> None:
        self.env, self.case, self.happened = env, case, happened
        self.servers: dict[tuple[str, str], Server] = {}

    def passed(self, kind: str, source: str, target: str, num_bytes: int) -> list[tuple[Server, int]]:
        """What a message passes, and the work it is there."""
        if source == target:
            link = self.case.link(source, source)
            sides = {"push": ["up"], "pull": ["down"]}.get(kind, ["up", "down"])
            work = picoseconds(1000 * num_bytes / (link.bandwidth * link.efficiency))
            return [(self.server(source, side), work) for side in sides]
        found = []
        for node, side in ((source, "out"), (target, "in")):
            links = [self.case.link(node, other) for other in self.case.nodes if other != node]
            card = max(link.bandwidth * link.efficiency for link in links)
            found.append((self.server(node, side), picoseconds(1000 * num_bytes / card)))
        return found

    def server(self, node: str, side: str) -> Server:
        return self.servers.setdefault((node, side), Server(self.env))


class Flow:
    """Moves messages of one size, one after the other."""

    def __init__(self, network: Network, name: tuple[str, int, int, int], ends: tuple[str, str], size: int) -> None:
        self.network, self.name, self.ends, self.size = network, name, ends, size
        self.messages = simpy.Store(network.env)
        network.env.process(self.move())

    def send(self, number: int, arrived: Callable[[], object]) -> None:
        self.messages.put((number, arrived))

    def move(self) -> Process:
        env, case = self.network.env, self.network.case
        link = case.link(*self.ends)
        alone = picoseconds(1000.0 * (link.latency + self.size / (link.bandwidth * link.efficiency)))
        latency = picoseconds(1000 * link.latency)
        while True:
            number, arrived = yield self.messages.get()
            start = env.instant
            if case.contention:
                passed = self.network.passed(self.name[0], *self.ends, self.size)
                yield env.all_of([server.serve(work) for server, work in passed])
                yield env.timeout(max(env.instant + latency, start + alone) - env.instant)
            else:
                yield env.timeout(alone)
            self.network.happened.append((*self.name, number, start, env.instant))
            arrived()
