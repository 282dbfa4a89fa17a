"""Whoever makes things go wrong: each fault of the seed's mix at a time of its own, and then no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.decide.sync.scenario import TERM
from tests.simulation.job import FAULTY_TICKS
from tests.simulation.network import Weather
from tests.simulation.scheduler import Action, Process

if TYPE_CHECKING:
    from tests.simulation.server import Server
    from tests.simulation.stage import Stage
    from tests.simulation.world import World


class Nemesis:
    """Plans its deeds at the start, so that a seed replays them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = world.scheduler.random
        #: When all is well again.
        self.ends_at = 0
        #: What was done, for reports.
        self.done: list[str] = []
        #: Server → how many calls it serves before it crashes.
        self._armed: dict[Process, int] = {}

    def start(self) -> None:
        """Plan."""
        faults = self._world.job.faults
        deeds: list[tuple[int, Action]] = [
            (faults.stage_crashes, self._crash_stage),
            (faults.stage_pauses, self._pause_stage),
            (faults.false_evictions, self._evict_falsely),
            (faults.server_crashes, self._crash_server),
            (faults.server_pauses, self._pause_server),
            (faults.all_servers_crash, self._crash_all_servers),
            (faults.power_cuts, self._cut_power),
            (faults.coordinator_crashes, self._crash_coordinator),
            (faults.clock_jumps, self._jump),
            (faults.cuts, self._cut),
            (faults.barriers, self._ask_for_barrier),
            (faults.drains, self._drain),
            (faults.old_terms, self._speak_of_an_old_term),
            (faults.stop, self._stop),
            (faults.drains_of_all, self._drain_all),
            (faults.drained_evictions, self._drain_and_evict),
        ]
        for count, deed in deeds:
            for _ in range(count):
                self._world.scheduler.at(self._random.randint(1, FAULTY_TICKS), deed)
        if sum(count for count, _ in deeds):
            self.ends_at = FAULTY_TICKS + 60
        self._world.network.after_serving = self._after_serving
        self._world.scheduler.at(self.ends_at, self._calm_down)

    def _calm_down(self) -> None:
        network = self._world.network
        network.weather = Weather()
        network.cuts.clear()
        self._armed.clear()

    def _note(self, what: str, whom: object) -> None:
        self.done.append(what)
        self._world.scheduler.trace("nemesis", what, whom)

    # -- processes ---------------------------------------------------------------------------------------------------

    def _some_stage(self) -> Stage | None:
        alive = [stage for stages in self._world.stages.values() for stage in stages if stage.alive]
        return self._random.choice(alive) if alive else None

    def _crash_stage(self) -> None:
        stage = self._some_stage()
        if stage is not None:
            self._note("crash of a stage", stage)
            self._world.crash_stage(stage)

    def _pause(self, process: Process, ticks: int) -> None:
        if process.is_reachable:
            self._note("pause", f"of {process}, {ticks} ticks")
            process.pause(self._world.scheduler.now)
            boot = process.boot
            self._world.scheduler.at(ticks, lambda: self._resume(process, boot))

    def _resume(self, process: Process, boot: int) -> None:
        if process.boot == boot:
            process.resume()

    def _pause_stage(self) -> None:
        stage = self._some_stage()
        if stage is not None:
            self._pause(stage, self._random.choice((10, 60, 120)))

    def _evict_falsely(self) -> None:
        if self._world.coordinator.is_reachable:
            vw = self._some_worker()
            self._note("false eviction", vw)
            self._world.coordinator.give_up(vw, self._world.lives[vw])

    def _jump(self) -> None:
        if self._world.coordinator.is_reachable:
            self._note("jump of the coordinator's clock", "")
            for vw, incarnation in sorted(self._world.lives.items()):
                self._world.coordinator.give_up(vw, incarnation)

    def _crash_coordinator(self) -> None:
        coordinator = self._world.coordinator
        if coordinator.alive:
            self._note("crash of the coordinator", "")
            coordinator.end()
            self._world.scheduler.at(self._random.randint(5, 60), coordinator.start)

    # -- servers -----------------------------------------------------------------------------------------------------

    def _some_server(self) -> Server:
        return self._random.choice(self._world.servers)

    def _crash_server(self) -> None:
        server = self._some_server()
        if self._random.random() < 0.5:
            self._armed[server] = self._random.randint(1, 20)
        else:
            self._crash(server)

    def _after_serving(self, process: Process, name: str) -> None:
        left = self._armed.get(process)
        if left is None:
            return
        if left > 1:
            self._armed[process] = left - 1
            return
        del self._armed[process]
        self._note("crash before an answer", f"to {name}")
        self._crash(next(server for server in self._world.servers if server is process))

    def _crash(self, server: Server, *, power: bool = False) -> None:
        if not server.alive:
            return
        self._note("loss of power" if power else "crash of a shard", server)
        server.crash(power=power)
        self._world.scheduler.at(self._random.randint(2, 40), lambda: self._restart(server))

    def _restart(self, server: Server) -> None:
        self._world.scheduler.trace(server, "restarts")
        server.restart()

    def _crash_all_servers(self) -> None:
        for server in self._world.servers:
            self._crash(server)

    def _cut_power(self) -> None:
        self._crash(self._some_server(), power=self._world.job.fsync)

    def _pause_server(self) -> None:
        self._pause(self._some_server(), self._random.choice((5, 30, 60)))

    # -- the network, and people -------------------------------------------------------------------------------------

    def _cut(self) -> None:
        server = self._some_server()
        others: list[Process] = [self._world.coordinator, *self._world.servers]
        others += [stage for stages in self._world.stages.values() for stage in stages]
        pair = (server.name, self._random.choice(others).name)
        self._note("cut", pair)
        self._world.network.cuts.add(pair)
        self._world.scheduler.at(self._random.randint(10, 60), lambda: self._world.network.cuts.discard(pair))

    def _ask_for_barrier(self) -> None:
        self._ask("replan")

    def _some_worker(self) -> int:
        return self._random.randrange(len(self._world.job.scenario.num_stages))

    def _drain(self) -> None:
        if self._world.coordinator.is_reachable:
            vw = self._some_worker()
            self._note("drain", vw)
            self._world.coordinator.drain(vw)

    def _drain_all(self) -> None:
        if self._world.coordinator.is_reachable:
            self._note("drain of all", "")
            for vw in sorted(self._world.lives):
                self._world.coordinator.drain(vw)

    def _drain_and_evict(self) -> None:
        if self._world.coordinator.is_reachable:
            vw = self._some_worker()
            incarnation = self._world.lives[vw]
            self._note("drain, then eviction", vw)
            self._world.coordinator.drain(vw)

            def evict() -> None:
                if self._world.lives[vw] == incarnation:
                    self._world.coordinator.give_up(vw, incarnation)

            self._world.scheduler.at(self._random.randint(1, 40), evict, self._world.coordinator)

    def _speak_of_an_old_term(self) -> None:
        """A stage of the term before this one wakes up and pushes what it had to push."""
        stage = self._some_stage()
        if stage is not None and stage.segment is not None:
            self._note("push in an old term", stage)
            stage.pusher.push_in_term(TERM - 1)

    def _stop(self) -> None:
        self._ask("stop")

    def _ask(self, reason: str) -> None:
        if self._world.coordinator.is_reachable:
            self._note("barrier", reason)
            self._world.coordinator.ask_for_barrier(reason)
