"""Does one cell to a cluster with a running witness job."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hetpipe import failpoints
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.values.life_state import LifeState
from tests.chaos.cells import Cell, Deed, Provocation
from tests.chaos.cluster import COORDINATOR, LEASE_SECONDS, REDIS, ROOT, Cluster, Layout
from tests.chaos.keeper import is_fork_server, owned, parent_of, state_of
from tests.chaos.outcome import Outcome
from tests.chaos.sequence import SURVIVE, Play
from tests.chaos.trial import Trial
from tests.chaos.watch import Watch
from tests.chaos.witness_job import SLOW_VARIABLE

#: Longest way to a failpoint.
REACH_SECONDS = 60.0

#: How much longer a victim is paused than it takes to lose its place.
_MARGIN_SECONDS = 0.5

#: Who leads, and what the lead is kept in: nobody is left to tell when their lease has run out.
LEADING = frozenset({COORDINATOR, REDIS})

#: How long the first virtual worker stands still to make the last one wait: shorter than the patience with a stage.
REST_SECONDS = 1.0

#: What is slow here is so on purpose; layers move soon, and again soon.
MOVES = {"straggler": 5.0, "patience_waves": 1}

#: The same where layers have to be moved for it, perhaps some seconds after the last time.
MOVE_SECONDS = 75.0

#: How long a stage is left alone before it becomes slow: some reports.
WELL_SECONDS = 4.0

#: The virtual worker whose stages are hit; the others are there to go on.
LAST_WORKER = 1

#: Names the folder by which failpoints are armed in processes that run (`remote/sitecustomize.py`).
ARM_VARIABLE = "HETPIPE_CHAOS_ARM"

#: The victim that is a child of an agent, and no service.
FORK_SERVER = "fork-server"


class FailpointScene:
    """Clusters whose processes can be made to fail at failpoints."""

    def __init__(self, **changes: Any) -> None:
        """Prepare.

        Args:
            changes: keys of the job (`witness_job.job`).
        """
        self._changes = changes

    @contextmanager
    def open(self, folder: Path) -> Iterator[tuple[Trial, Play[Cell]]]:
        """A cluster with a job, and what does cells to it."""
        arming = folder / "arming"
        arming.mkdir(parents=True)
        with Cluster(folder, layout_for(arming)) as cluster:
            trial = Trial(cluster, folder / "run", survive={**SURVIVE, **MOVES}, **self._changes)
            trial.wait_moving()
            yield trial, Nemesis(cluster, trial, arming).play


def layout_for(arming: Path) -> Layout:
    """Two shards and two agents of two devices, which listen to the nemesis."""
    allowed = [failpoints.OPTION]
    remote = Path(__file__).parent / "remote"
    return Layout(
        options={"coordinator": allowed, "shard": allowed, "agent": allowed},
        environment={
            ARM_VARIABLE: str(arming),
            SLOW_VARIABLE: str(arming / "slow"),
            "PYTHONPATH": f"{remote}:{ROOT}",
        },
    )


class Nemesis:
    """Hits one cluster, again and again."""

    def __init__(self, cluster: Cluster, trial: Trial, arming: Path) -> None:
        """Prepare.

        Args:
            cluster: the victims, made by `layout_for(arming)`.
            trial: the job.
            arming: a folder.
        """
        self._cluster = cluster
        self._trial = trial
        self._arming = arming
        self._watch = Watch(cluster, trial)
        self._count = 0

    def play(self, cell: Cell) -> Outcome:
        """Do it, and wait until the job has got over it."""
        touches_lead = LEADING & set(cell.victim.split("+"))
        may_end = {COORDINATOR} if touches_lead else set()
        return self._watch.play(cell, self._hit, may_end=may_end, may_leave=self._hit_workers(cell))

    def _hit_workers(self, cell: Cell) -> set[int]:
        """The virtual workers that lose a stage or an agent; with a disk all of them do."""
        if cell.deed is Deed.LOSE_DISK:
            return set(self._trial.tail.members)
        hit = {LAST_WORKER} if cell.provocation in {Provocation.WORKER_DIES, Provocation.WORKER_SLOWS} else set()
        for victim in set(cell.victim.split("+")) - {FORK_SERVER}:
            hit |= {LAST_WORKER} if victim.startswith("stage-") else self._trial.workers_on(victim)
        return hit

    def _hit(self, cell: Cell) -> None:
        """Do the deed; returns when whoever was killed is gone, or whoever was paused goes on."""
        victims = cell.victim.split("+")
        pids = [self._hit_at_point(cell)] if cell.point != "any" else self._hit_anywhere(cell, victims)
        if cell.deed is Deed.PAUSE:
            self._pause(cell, victims, pids)
            if cell.provocation is Provocation.WORKER_SLOWS:
                self._wait_moved()
        else:
            self._wait_gone(cell, pids)

    def _wait_moved(self) -> None:
        """Until whoever was about to move layers, if it still leads, has done so."""

        def is_settled() -> bool:
            status = self._trial.status()
            return status is not None and all(worker.state == LifeState.READY for worker in status.workers)

        SYSTEM_CLOCK.sleep(WELL_SECONDS)
        self._trial.wait(is_settled, timeout_seconds=REACH_SECONDS, what="virtual workers that are ready")

    def _wait_gone(self, cell: Cell, pids: Sequence[int]) -> None:
        """Until nobody takes these processes for living ones."""
        known = [kept for key, kept in self._cluster.kept.items() if key in cell.victim.split("+")]
        self._trial.wait(
            lambda: (
                not any(state_of(pid) not in {"", "Z"} for pid in pids)
                and not any(kept.life.pid in pids and kept.life.code is None for kept in known)
            ),
            timeout_seconds=REACH_SECONDS,
            what=f"end of {cell.victim} (processes {list(pids)})",
        )

    def _hit_anywhere(self, cell: Cell, victims: Sequence[str]) -> list[int]:
        pids = [self._pid(victim) for victim in victims]
        if cell.deed is Deed.WIPE:
            self._cluster.wipe_redis(victims)
            return pids
        if cell.deed is Deed.LOSE_DISK:
            folder = self._trial.run_dir
            self._cluster.lose_disk(victims)
            self._trial.wait(lambda: self._trial.run_dir != folder, timeout_seconds=REACH_SECONDS, what="rewind")
            return pids
        for victim, pid in zip(victims, pids, strict=True):
            if cell.deed is Deed.KILL:
                self._expect(victim, pid)
            os.kill(pid, signal.SIGKILL if cell.deed is Deed.KILL else signal.SIGSTOP)
        return pids

    def _hit_at_point(self, cell: Cell) -> int:
        """Have the victim come to the point; the process that did."""
        self._count += 1
        marks = self._arming / f"marks-{self._count}"
        marks.mkdir(parents=True)
        entry = f"{cell.point}={'kill' if cell.deed is Deed.KILL else 'stop'}"
        if cell.provocation is Provocation.VICTIM_REGISTERS:
            kept = self._cluster.kept[cell.victim]
            kept.once |= {failpoints.VARIABLE: entry, failpoints.ONCE_VARIABLE: str(marks)}
            kept.kill()
        else:
            self._arm(self._pid(cell.victim), entry, marks)
            self._provoke(cell.provocation)
        mark = marks / f"0-{cell.point}"
        self._trial.wait(
            lambda: mark.exists() and mark.stat().st_size > 0,
            timeout_seconds=MOVE_SECONDS if cell.provocation is Provocation.WORKER_SLOWS else REACH_SECONDS,
            what=f"visit of {cell.victim} to {cell.point}",
        )
        (self._arming / "slow").unlink(missing_ok=True)
        pid = int(json.loads(mark.read_text())["pid"])
        self._expect(cell.victim, pid)
        return pid

    def _arm(self, pid: int, entry: str, marks: Path) -> None:
        order = self._arming / str(pid)
        unfinished = order.with_suffix(".new")
        unfinished.write_text(f"{entry}\n{marks}\n")
        unfinished.replace(order)
        self._trial.wait(
            lambda: not order.exists() or state_of(pid) in {"", "Z"},
            timeout_seconds=REACH_SECONDS,
            what=f"process {pid} that takes the order to fail at {entry}",
        )

    def _provoke(self, provocation: Provocation) -> None:
        match provocation:
            case Provocation.MEMBER_RETURNS:
                self._cluster.kept["shard-1"].kill()
            case Provocation.WORKER_DIES:
                with suppress(ProcessLookupError):
                    os.kill(self._pid("stage-0"), signal.SIGKILL)
            case Provocation.WORKER_SLOWS:
                self._slow_down()
            case Provocation.OTHERS_REST:
                others = [pid for (vw, _), pid in self._trial.stage_pids().items() if vw != LAST_WORKER]
                with continued(others):
                    for pid in others:
                        os.kill(pid, signal.SIGSTOP)
                    SYSTEM_CLOCK.sleep(REST_SECONDS)

    def _pause(self, cell: Cell, victims: Sequence[str], pids: Sequence[int]) -> None:
        """Have who has stopped lose its place, and then go on, if it still can."""
        with continued(pids):
            self._trial.wait(
                lambda: all(state_of(pid) == "T" for pid in pids), timeout_seconds=5.0, what=f"stop of {victims}"
            )
            self._wait_displaced(cell, victims, pids)

    def _wait_displaced(self, cell: Cell, victims: Sequence[str], pids: Sequence[int]) -> None:
        """Until who has stopped has lost its place."""
        if LEADING & set(victims):
            SYSTEM_CLOCK.sleep(LEASE_SECONDS + _MARGIN_SECONDS)
        elif victims[0].startswith("stage-"):
            # Its agent ends a stage that did not answer for so long: it never goes on.
            self._wait_gone(cell, pids)
        else:
            self._trial.wait(
                lambda: self._cluster.are_gone(victims),
                timeout_seconds=REACH_SECONDS,
                what=f"end of the leases of {victims}",
            )
            SYSTEM_CLOCK.sleep(_MARGIN_SECONDS)

    def _slow_down(self) -> None:
        """Make a stage of the last virtual worker slow, when whoever leads has seen how fast it was."""
        SYSTEM_CLOCK.sleep(WELL_SECONDS)
        (self._arming / "slow").write_text(str(self._pid(self._largest_stage())))

    def _largest_stage(self) -> str:
        """The stage of the last virtual worker with the most layers to move."""
        status = self._trial.status()
        assert status is not None, "a cluster that is whole has a status"
        assert status.progress is not None, "a cluster that is whole trains"
        rows = status.progress.rows[LAST_WORKER].stages
        return f"stage-{max(range(len(rows)), key=lambda at: rows[at].last_layer - rows[at].first_layer)}"

    def _pid(self, victim: str) -> int:
        if victim == FORK_SERVER:
            return self._fork_server()
        if not victim.startswith("stage-"):
            return self._cluster.kept[victim].life.pid
        return self._stage_pid(LAST_WORKER, int(victim.partition("-")[2]))

    def _stage_pid(self, vw: int, stage: int) -> int:
        key = (vw, stage)
        found: dict[tuple[int, int], int] = {}

        def is_known() -> bool:
            nonlocal found
            found = self._trial.stage_pids()
            return key in found

        self._trial.wait(is_known, timeout_seconds=REACH_SECONDS, what=f"stage {stage} of virtual worker {vw}")
        return found[key]

    def _fork_server(self) -> int:
        """That of the last virtual worker's agent, which starts another one in place of one that has died."""
        agent = self._cluster.kept["agent-1"].life.pid
        found: list[int] = []

        def is_there() -> bool:
            nonlocal found
            children = [pid for pid in owned(self._cluster.owner) if parent_of(pid) == agent]
            found = [pid for pid in children if is_fork_server(pid) and state_of(pid) != "Z"]
            return bool(found)

        self._trial.wait(is_there, timeout_seconds=REACH_SECONDS, what="fork server of agent-1")
        return found[0]

    def _expect(self, victim: str, pid: int) -> None:
        """When this process dies now, it was meant to."""
        kept = self._cluster.kept.get(victim)
        for life in kept.lives if kept is not None else ():
            life.expected |= life.pid == pid


@contextmanager
def continued(pids: Sequence[int]) -> Iterator[None]:
    """Whatever happens in the block, none of `pids` stays stopped."""
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
