"""A witness job of a storm: handed in and followed by `hetpipe submit`, a process of its own, and judged at its end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetpipe.checker import check_run
from hetpipe.checkpoint.manifest import newest_checkpoint
from hetpipe.errors import CheckpointError, HetpipeError
from hetpipe.runs.judge import histories_of
from hetpipe.values.events import JobState, JobStatus
from hetpipe.values.ids import JobId
from hetpipe.values.life_state import LifeState
from hetpipe.values.rewinds import run_folders
from hetpipe.wire.calls import GET_STATUS, GetStatusRequest
from tests.chaos import witness_job
from tests.chaos.cluster import COORDINATOR, Cluster
from tests.chaos.keeper import Kept, state_of
from tests.chaos.outcome import Tally
from tests.chaos.trial import Verdict, final_layers, history_faults, layer_faults

#: What the progress table is on the follower's screen.
_TABLE = " state=running epoch="


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """How far a job is."""

    rewinds: int
    clock: int
    """Published, since the newest rewind."""


class Screen:
    """What a follower shows to people, on standard output and standard error, over all of its lives."""

    def __init__(self, follower: Kept) -> None:
        self._follower = follower
        self._read: dict[Path, int] = {}

    def news(self) -> tuple[str, ...]:
        """The lines since the last time, without the progress table and without the time of day."""
        return tuple(_shortened(line) for line in self._new_lines() if _TABLE not in line)

    def _new_lines(self) -> Iterator[str]:
        key, folder = self._follower.spec.key, self._follower.folder
        outputs = [folder / f"{key}.{life.number}.out" for life in self._follower.lives]
        for path in (*outputs, folder / f"{key}.err"):
            with suppress(FileNotFoundError), path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole, _, _ = file.read().rpartition(b"\n")
                self._read[path] = self._read.get(path, 0) + (len(whole) + 1 if whole else 0)
                yield from whole.decode(errors="replace").splitlines()


class StormJob:
    """One job on a cluster, from handing it in to the verdict."""

    def __init__(self, cluster: Cluster, number: int, **changes: Any) -> None:
        """Hand it in.

        Args:
            cluster: trains it.
            number: unlike that of any other job there.
            changes: keys of the job (`witness_job.job`).
        """
        job = witness_job.job(**changes)
        file = cluster.folder / f"job-{number}.json"
        file.write_text(json.dumps(job))
        self.run_dir = cluster.runs / f"run-{number}"
        arguments = ["submit", str(file), "--coordinator", cluster.address(COORDINATOR), "--run-dir", str(self.run_dir)]
        self.follower = cluster.run_command(f"submit-{number}", arguments, ready="t=")
        self.screen = Screen(self.follower)
        self._cluster = cluster
        self._epochs: int = job["epochs"]

    @property
    def job_id(self) -> JobId | None:
        """As the follower wrote it down; None until it was handed in."""
        with suppress(OSError, ValueError):
            return JobId(json.loads((self.run_dir / "run.json").read_bytes())["job_id"]) or None
        return None

    @property
    def exit_status(self) -> int | None:
        """That of the follower; None while it follows."""
        return self.follower.exit_status

    def status(self) -> JobStatus | None:
        """What the coordinator says; None while it is away, or the job not handed in."""
        job_id = self.job_id
        if job_id is None:
            return None
        try:
            return self._cluster.client.invoke(GET_STATUS, GetStatusRequest(job_id))
        except HetpipeError:
            return None

    def position(self) -> Position | None:
        """How far it is if it is whole: it runs with all stages, which live, and every virtual worker computes.

        None where anything is missing.
        """
        status = self.status()
        if status is None or status.state is not JobState.RUNNING or status.clocks is None:
            return None
        stages = [row for row in status.processes if row.role == "stage"]
        is_whole = (
            bool(status.workers)
            and all(worker.state is LifeState.READY for worker in status.workers)
            and {row.vw for row in stages} == status.clocks.local.keys() == {worker.vw for worker in status.workers}
            and all(row.state == "ready" and state_of(row.pid) not in {"", "Z"} for row in stages)
        )
        return Position(status.rewinds, status.clocks.published) if is_whole else None

    def checkpoint(self) -> Path | None:
        """Its newest complete checkpoint, in the folder where it is now; None before any, and while one is replaced."""
        try:
            return newest_checkpoint(run_folders(self.run_dir)[-1])
        except (HetpipeError, OSError):
            return None

    def stage_pids(self) -> dict[str, int]:
        """The stages that live, as `stage-V.S`; as far as the coordinator knows."""
        status = self.status()
        rows = () if status is None else status.processes
        return {f"stage-{row.vw}.{row.index}": row.pid for row in rows if row.role == "stage" and row.pid > 0}

    def story(self) -> str:
        """How it is, in a few words."""
        status = self.status()
        if status is None:
            told = "the coordinator does not answer" if self.job_id else "the job is not handed in"
            return f"{told}; the follower: {self.follower.story()}"
        stages = [f"{row.vw}.{row.index} {row.state}" for row in status.processes if row.role == "stage"]
        workers = [f"{worker.vw} {worker.state}" for worker in status.workers]
        clock = None if status.clocks is None else status.clocks.published
        why = f" ({status.failure})" if status.failure else ""
        return (
            f"the job is {status.state}{why} at clock {clock} after {status.rewinds} rewinds, its stages are "
            f"{', '.join(stages) or 'not there'}, its virtual workers {', '.join(workers) or 'not there'}"
        )

    def verdict(self) -> StormVerdict:
        """Of a job whose follower has ended: exit status 0, no violation, every sample of every epoch once."""
        problems: list[str] = []
        if self.exit_status != 0:
            problems.append(f"`hetpipe submit` ended with status {self.exit_status}: {self.follower.last_words()}")
        lacking: list[str] = []
        tally = Tally(jobs=1)
        last = run_folders(self.run_dir)[-1]
        for folder in histories_of(self.run_dir):
            if check_run(folder).lacking:
                # A disk was full on purpose; what was trained is still judged by the weights.
                lacking.append(folder.name)
                continue
            found = history_faults(folder, is_last=folder == last)
            problems += found.problems
            tally += found.tally
        weights = self._weights(last)
        # What was trained again after a rewind was committed twice, and is looked for once.
        looked_for = self._epochs * witness_job.num_samples()
        tally = replace(tally + weights.tally, samples=looked_for)
        return StormVerdict((*problems, *weights.problems), tally, tuple(lacking))

    def _weights(self, last: Path) -> Verdict:
        """The final weights hold every sample once for every epoch, in each layer."""
        try:
            layers = final_layers(newest_checkpoint(last))
        except (CheckpointError, ValueError) as error:
            return Verdict((f"no final weights: {error}",))
        return layer_faults(layers, Counter(dict.fromkeys(range(witness_job.num_samples()), self._epochs)))


@dataclass(frozen=True, slots=True)
class StormVerdict:
    """What a finished job has shown."""

    problems: tuple[str, ...]
    """Empty: every sample of every epoch counts once, and nothing was torn or stale."""
    tally: Tally
    lacking: tuple[str, ...] = ()
    """Folders whose history a full disk has ended, so that it proves nothing."""


def _shortened(line: str) -> str:
    """Without `t=…`, and no longer than a line.

    >>> _shortened("t=4.0 event=note sentence='a word'")
    "event=note sentence='a word'"
    """
    first, _, rest = line.partition(" ")
    return (rest if first.startswith("t=") else line)[:300]
