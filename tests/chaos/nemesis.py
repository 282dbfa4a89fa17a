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
from tests.chaos.cells import Cell, Deed, Provocation
from tests.chaos.cluster import COORDINATOR, LEASE_SECONDS, REDIS, ROOT, Cluster, Layout
from tests.chaos.keeper import state_of
from tests.chaos.outcome import Outcome
from tests.chaos.sequence import STALL_SECONDS, SURVIVE, Play
from tests.chaos.trial import Trial
from tests.chaos.watch import Watch

#: Longest way to a failpoint.
REACH_SECONDS = 30.0

#: Added to the time after which a victim that is paused has lost its place: its lease, or the patience with a stage.
_MARGIN_SECONDS = 1.5

#: How long the first virtual worker stands still to make the last one wait: shorter than the patience with a stage.
REST_SECONDS = 1.0

#: The virtual worker whose stages are hit; the others are there to go on.
LAST_WORKER = 1

#: Names the folder by which failpoints are armed in processes that run (`remote/sitecustomize.py`).
ARM_VARIABLE = "HETPIPE_CHAOS_ARM"


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
            trial = Trial(cluster, folder / "run", survive=SURVIVE, **self._changes)
            trial.wait_moving()
            yield trial, Nemesis(cluster, trial, arming).play


def layout_for(arming: Path) -> Layout:
    """Two shards and two agents of two devices, which listen to the nemesis."""
    allowed = [failpoints.OPTION]
    remote = Path(__file__).parent / "remote"
    return Layout(
        options={"coordinator": allowed, "shard": allowed, "agent": allowed},
        environment={ARM_VARIABLE: str(arming), "PYTHONPATH": f"{remote}:{ROOT}"},
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
        touches_lead = {COORDINATOR, REDIS} & set(cell.victim.split("+"))
        return self._watch.play(cell, self._hit, may_end={COORDINATOR} if touches_lead else set())

    def _hit(self, cell: Cell) -> None:
        """Do the deed; returns when whoever was killed is gone, or whoever was paused goes on."""
        victims = cell.victim.split("+")
        pids = [self._hit_at_point(cell)] if cell.point != "any" else self._hit_anywhere(cell, victims)
        if cell.deed is Deed.PAUSE:
            self._pause(victims, pids)
        if cell.deed is not Deed.PAUSE or cell.victim.startswith("stage-"):
            # A stage that did not answer for so long has lost its place; it must not come back.
            self._wait_gone(cell, pids)

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
            timeout_seconds=REACH_SECONDS,
            what=f"visit of {cell.victim} to {cell.point}",
        )
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
            case Provocation.OTHERS_REST:
                others = [pid for (vw, _), pid in self._trial.stage_pids().items() if vw != LAST_WORKER]
                with continued(others):
                    for pid in others:
                        os.kill(pid, signal.SIGSTOP)
                    SYSTEM_CLOCK.sleep(REST_SECONDS)

    def _pause(self, victims: Sequence[str], pids: Sequence[int]) -> None:
        with continued(pids):
            self._trial.wait(
                lambda: all(state_of(pid) == "T" for pid in pids), timeout_seconds=5.0, what=f"stop of {victims}"
            )
            patience = STALL_SECONDS if victims[0].startswith("stage-") else LEASE_SECONDS
            SYSTEM_CLOCK.sleep(patience + _MARGIN_SECONDS)

    def _pid(self, victim: str) -> int:
        if not victim.startswith("stage-"):
            return self._cluster.kept[victim].life.pid
        key = (LAST_WORKER, int(victim.partition("-")[2]))
        found: dict[tuple[int, int], int] = {}

        def is_known() -> bool:
            nonlocal found
            found = self._trial.stage_pids()
            return key in found

        self._trial.wait(is_known, timeout_seconds=REACH_SECONDS, what=f"{victim} of virtual worker {LAST_WORKER}")
        return found[key]

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
