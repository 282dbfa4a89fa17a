"""What a coordinator promises: after every step, and once nothing goes wrong any more."""

from __future__ import annotations

from collections import Counter

from hetpipe.decide.lifecycle.exchange import SendCommand
from hetpipe.decide.lifecycle.patience import Patience
from hetpipe.errors import UnknownJob
from hetpipe.server.coordinator.job_hosts import JobHost
from hetpipe.values.commands import StartStageCommand
from hetpipe.values.events import JobState, WorkerQuarantined
from hetpipe.values.ids import JobId
from hetpipe.values.life_state import LifeState
from tests.simulation.world import World

#: Notices are this far apart, and some more as time goes in steps.
_SILENT_SECONDS = 8.0

#: The same of a place in the queue that stays as it is.
_SILENT_QUEUE_SECONDS = Patience().queue_notice_seconds + 3.0

#: How the sentence of a job ends that was given up although the store knows what was handed in.
_GIVEN_UP = ("no parameter server reports it", "its state folder does not contain it", "its disk is gone")

_WANTED = frozenset({LifeState.READY, LifeState.DONE})


class Broken(AssertionError):
    """A promise is."""


class CoordinatorPromises:
    """Of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        #: (job, virtual worker) → lives and deaths told so far, and by whom: what a later coordinator does not know, it
        #: tells otherwise.
        self._lives: dict[tuple[JobId, int], tuple[object, tuple[int, int]]] = {}
        #: job → number of the newest event, with the store that has it.
        self._numbers: dict[JobId, tuple[object, int]] = {}
        #: job → number of its newest event, and when that was told.
        self._told: dict[JobId, tuple[int, float]] = {}
        #: The coordinator whose commands are looked at.
        self._watched: object = None

    def check(self) -> None:
        """After a step."""
        coordinator = self._world.coordinator
        if coordinator is None:
            return
        self._watch_commands()
        devices: Counter[str] = Counter()
        for host in coordinator.hosts():
            self._check_numbers(host)
            lives = host.machine.lives
            if lives is None or host.machine.state.is_terminal:
                continue
            plan = lives.assignment.plan
            for worker in lives:
                if worker.is_up:
                    devices.update(stage.device for stage in plan.virtual_workers[worker.vw].stages)
                told, now = self._lives.get((host.job_id, int(worker.vw))), (int(worker.incarnation), worker.deaths)
                before = told[1] if told is not None and told[0] is lives else (0, 0)
                if now[0] < before[0] or now[1] < before[1]:
                    raise Broken(f"{worker}: lives and deaths went from {before} to {now}")
                self._lives[host.job_id, int(worker.vw)] = lives, now
        twice = [device for device, count in devices.items() if count > 1]
        if twice:
            raise Broken(f"devices {twice} have two live virtual workers")

    def _check_numbers(self, host: JobHost) -> None:
        store = self._world.store._behind
        known, before = self._numbers.get(host.job_id, (store, 0))
        if known is store and before and host.events and host.events[-1].sequence == before:
            return  # nothing was told since the last step
        numbers = [event.sequence for event in host.events]
        if numbers != sorted(set(numbers)):
            raise Broken(f"events of {host.job_id} are numbered {numbers}")
        newest = numbers[-1] if numbers else 0
        if newest != self._told.get(host.job_id, (-1, 0.0))[0]:
            self._told[host.job_id] = newest, self._world.now
        if known is store and newest < before:
            raise Broken(f"events of {host.job_id} went from number {before} to {newest}")
        self._numbers[host.job_id] = (store, newest)

    def _watch_commands(self) -> None:
        """Nobody is told to start a stage of a life that counts no more."""
        coordinator = self._world.coordinator
        if self._watched is coordinator or coordinator is None:
            return
        self._watched = coordinator
        jobs = coordinator._jobs
        carry_out = jobs._carry_out

        def checked(host: JobHost, instruction: object) -> None:
            if isinstance(instruction, SendCommand) and isinstance(instruction.command, StartStageCommand):
                self._check_start(instruction.command)
            carry_out(host, instruction)  # type: ignore[arg-type]

        jobs._carry_out = checked  # type: ignore[method-assign]

    def _check_start(self, command: StartStageCommand) -> None:
        key = command.key
        served = self._world.shards.clock(key.job_id, command.config.plan.term)
        if served is None:
            return
        present = (served.log.newcomers.get(key.vw), served.log.members.get(key.vw))
        if not any(life is not None and life.incarnation == key.incarnation for life in present):
            raise Broken(f"{key} life {key.incarnation} is to start, and counts no more")

    # -- in the end --------------------------------------------------------------------------------------------------

    def why_not_well(self, job_id: JobId) -> str:
        """What of a job is not as it should be once all faults are healed; empty if all is well."""
        coordinator = self._world.coordinator
        assert coordinator is not None
        try:
            record = coordinator.record(job_id)
        except UnknownJob:
            # Nobody has to know of a job that had ended, or not begun, when the store was wiped.
            return self.left_over(job_id) if self._world.was_wiped else "it is forgotten"
        if record.state.is_terminal:
            was_given_up = record.state is JobState.FAILED and record.failure.endswith(_GIVEN_UP)
            if was_given_up and not self._world.was_wiped:
                return f"it was given up, and could have gone back to a checkpoint: {record.failure}"
            return "" if record.state is not JobState.FAILED or record.failure else "it failed without a reason"
        host = coordinator.host(job_id)
        if host is not None and host.machine.queue_place is not None and self._is_crowded(host):
            return ""
        return "nobody leads it" if host is None else self._who_waits(host) or self._strangers(host)

    def _is_crowded(self, host: JobHost) -> bool:
        """Whether another job has devices, so that this one may wait for its turn."""
        assert self._world.coordinator is not None
        others = [other for other in self._world.coordinator.hosts() if other is not host]
        return any(other.machine.agents and not other.machine.state.is_terminal for other in others)

    def check_told(self, job_id: JobId) -> None:
        """Whoever waits says for whom; what gets ready, and a job that nobody leads, have a time of their own."""
        coordinator = self._world.coordinator
        host = None if coordinator is None else coordinator.host(job_id)
        if host is None or host.machine.state.is_terminal:
            return
        why, (_, at) = self._who_waits(host), self._told.get(job_id, (0, self._world.now))
        is_queued = host.machine.queue_place is not None
        silent_seconds = _SILENT_QUEUE_SECONDS if is_queued else _SILENT_SECONDS
        if why and "starting" not in why and self._world.now - at > silent_seconds:
            raise Broken(f"{job_id} waits in silence: {why}")

    def left_over(self, job_id: JobId) -> str:
        """What is left of a job that has ended; empty if nothing is."""
        stages = [key for agent in self._world.agents.values() for key in agent.stages if key.job_id == job_id]
        there = [shard for shard in self._world.shards.all if shard.is_alive and job_id in shard.jobs]
        shards = [shard.index for shard in there]
        return f"{stages} and something on shards {shards} are left of {job_id}" if stages or shards else ""

    def check_finished(self, job_id: JobId) -> None:
        """P9: a job that passes for finished has trained what it had to."""
        coordinator, runs = self._world.coordinator, self._world.shards.runs
        assert coordinator is not None
        try:
            record = coordinator.record(job_id)
        except UnknownJob:
            return
        if record.state is JobState.FINISHED:
            runs[job_id, max(term for name, term in runs if name == job_id)].promises.check_the_end()

    @staticmethod
    def _who_waits(host: JobHost) -> str:
        """Who does not train that should."""
        lives, state = host.machine.lives, host.machine.state
        if lives is None or state is not JobState.RUNNING:
            place = host.machine.queue_place
            return f"it is {state}" if place is None else f"it is {state}: {place}"
        quarantined = {told.event.vw for told in host.events if isinstance(told.event, WorkerQuarantined)}
        for worker in lives:
            is_out = worker.state is LifeState.OUT and (worker.stays_out or worker.vw in quarantined)
            if worker.state not in _WANTED and not is_out:
                return f"{worker} is {worker.state} (life {worker.incarnation})"
        return ""

    def _strangers(self, host: JobHost) -> str:
        """Processes that the coordinator does not count, and those that it does and nobody has."""
        counted = {life.key for life in host.machine.stages if not life.exited}
        there = {key for agent in self._world.agents.values() for key in agent.stages if key.job_id == host.job_id}
        return f"processes {sorted(there ^ counted)} are not known to all" if there != counted else ""
