"""`python -m tests.chaos.pairs`: two faults at once, or one while the job gets over the other.

    python -m tests.chaos.pairs --count 40 --seed 3                        so many, which the seed chooses
    python -m tests.chaos.pairs --only 'lose_disk/*/coordinator/*'         some
    python -m tests.chaos.pairs --only kill/shard-0/kill/agent-1/0.5s      one
    python -m tests.chaos.pairs --list                                     names only

Exit status 1 if anything is not survived.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import HetpipeError
from hetpipe.values.ids import VirtualWorkerIndex
from hetpipe.values.life_state import LifeState
from hetpipe.wire.calls import ADD_WORKER, DRAIN_WORKER, AddWorkerRequest, DrainWorkerRequest
from tests.chaos.cells import Cell, Deed
from tests.chaos.cluster import COORDINATOR, Cluster
from tests.chaos.command import Command
from tests.chaos.keeper import is_fork_server, owned, parent_of, state_of
from tests.chaos.nemesis import (
    LAST_WORKER,
    LEADING,
    MOVE_SECONDS,
    MOVES,
    REACH_SECONDS,
    Nemesis,
    continued,
    layout_for,
)
from tests.chaos.outcome import Outcome
from tests.chaos.pair_table import Opening, Pair, all_pairs
from tests.chaos.sequence import SURVIVE, Play
from tests.chaos.trial import Trial

#: Jobs at once.
LANES = 2

_WORKER = VirtualWorkerIndex(LAST_WORKER)


class PairScene:
    """Clusters that suffer two faults at once."""

    @contextmanager
    def open(self, folder: Path) -> Iterator[tuple[Trial, Play[Pair]]]:
        """A cluster with a job, and what does pairs to it."""
        arming = folder / "arming"
        arming.mkdir(parents=True)
        with Cluster(folder, layout_for(arming)) as cluster:
            trial = Trial(cluster, folder / "run", survive={**SURVIVE, **MOVES})
            trial.wait_moving()
            yield trial, PairNemesis(cluster, trial, arming).play_pair


class PairNemesis(Nemesis):
    """Hits one cluster twice, again and again."""

    def play_pair(self, pair: Pair) -> Outcome:
        """Do it, and wait until the job has got over it."""
        may_end = {COORDINATOR} if LEADING & {*pair.victims, pair.second} else set()
        return self._watch.play(pair, self._hit_both, may_end=may_end, may_leave=self._losers(pair))

    def _losers(self, pair: Pair) -> set[int]:
        """The virtual workers that lose a stage or an agent, or end."""
        if pair.opening is Opening.LOSE_DISK:
            return set(self._trial.tail.members)
        hit = {LAST_WORKER} if pair.opening in {Opening.DRAIN, Opening.ADD, Opening.MOVE} else set()
        return hit.union(*(self._hit_workers(_cell(victim)) for victim in (*pair.victims, pair.second)))

    def _hit_both(self, pair: Pair) -> None:
        """Do both; returns when whoever was killed is gone, whoever was stopped goes on, and whoever left is back."""
        stages = set(self._stage_processes())
        known = self._pid(pair.second) if pair.second.startswith("stage-") and not pair.awaits_new_stage else None
        pids = self._open(pair)
        new = self._new_stage(pair.second, stages) if pair.awaits_new_stage else known
        SYSTEM_CLOCK.sleep(pair.gap_seconds)
        self._kill(pair.second, new)
        if pair.opening is Opening.STOP:
            with continued(pids):
                self._wait_displaced(_cell(pair.first), pair.victims, pids)
        elif pair.opening is Opening.MOVE:
            self._wait_moved()
        elif pair.opening in {Opening.DRAIN, Opening.ADD}:
            self._ask_back()

    def _open(self, pair: Pair) -> Sequence[int]:
        """The first fault, up to where it has begun; the processes that have stopped."""
        match pair.opening:
            case Opening.KILL:
                for victim in pair.victims:
                    self._kill(victim, self._pid(victim))
            case Opening.STOP:
                pids = [self._pid(victim) for victim in pair.victims]
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
                return pids
            case Opening.WIPE:
                self._cluster.wipe_redis(pair.victims)
            case Opening.LOSE_DISK:
                self._hit_anywhere(Cell(point="any", victim=pair.first, deed=Deed.LOSE_DISK), pair.victims)
            case Opening.DRAIN:
                self._cluster.client.invoke(DRAIN_WORKER, DrainWorkerRequest(_WORKER, self._trial.job_id))
            case Opening.ADD:
                self._cluster.client.invoke(DRAIN_WORKER, DrainWorkerRequest(_WORKER, self._trial.job_id))
                self._wait_worker({LifeState.OUT}, REACH_SECONDS)
                self._cluster.client.invoke(ADD_WORKER, AddWorkerRequest(_WORKER, self._trial.job_id))
            case Opening.MOVE:
                self._begin_move()
        return []

    def _begin_move(self) -> None:
        try:
            self._slow_down()
            self._wait_worker(set(LifeState) - {LifeState.READY}, MOVE_SECONDS)
        finally:
            (self._arming / "slow").unlink(missing_ok=True)

    def _kill(self, victim: str, pid: int | None) -> None:
        """SIGKILL of a process of the cluster, of a stage by its number; returns when it is gone."""
        kept = self._cluster.kept.get(victim)
        if kept is not None:
            self._trial.wait(
                lambda: kept.life.code is None, timeout_seconds=REACH_SECONDS, what=f"another life of {victim}"
            )
            pid = kept.kill().pid
        else:
            assert pid is not None, f"{victim} is a stage"
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._wait_gone(_cell(victim), [pid])

    def _new_stage(self, victim: str, before: set[int]) -> int:
        """The process of a stage that is started after `before`; stages start in their order."""
        index = int(victim.partition("-")[2])
        found: list[int] = []

        def is_there() -> bool:
            nonlocal found
            found = [pid for pid in self._stage_processes() if pid not in before]
            return len(found) > index

        self._trial.wait(is_there, timeout_seconds=REACH_SECONDS, what=f"new process of {victim}")
        return found[index]

    def _stage_processes(self) -> list[int]:
        """Those of the last virtual worker's agent, oldest first; also such as nobody knows yet."""
        agent = self._cluster.kept["agent-1"].life.pid
        children = [pid for pid in owned(self._cluster.owner) if parent_of(pid) == agent and state_of(pid) != "Z"]
        return sorted(pid for pid in children if not is_fork_server(pid))

    def _wait_worker(self, states: set[LifeState], seconds: float) -> None:
        """Until the last virtual worker is in one of these states."""

        def is_there() -> bool:
            status = self._trial.status()
            return status is not None and any(each.vw == _WORKER and each.state in states for each in status.workers)

        self._trial.wait(is_there, timeout_seconds=seconds, what=f"virtual worker {_WORKER} that is {sorted(states)}")

    def _ask_back(self) -> None:
        """Have the coordinator take the wish that the last virtual worker is there."""

        def is_taken() -> bool:
            try:
                self._cluster.client.invoke(ADD_WORKER, AddWorkerRequest(_WORKER, self._trial.job_id))
            except HetpipeError:
                return False
            return True

        self._trial.wait(is_taken, timeout_seconds=REACH_SECONDS, what="coordinator that takes a wish")


def _cell(victim: str) -> Cell:
    return Cell(point="any", victim=victim, deed=Deed.KILL)


if __name__ == "__main__":
    command = Command("tests.chaos.pairs", "What is survived of two faults at once.", all_pairs(), {}, lanes=LANES)
    sys.exit(command.run(PairScene()))
