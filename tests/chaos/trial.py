"""One witness job on a cluster: handed in, watched from its own files, stopped, judged."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors.torch import load_file

from hetpipe.checker import Kind, check_run
from hetpipe.checkpoint.manifest import newest_checkpoint
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import CheckpointError, HetpipeError, Unavailable
from hetpipe.job.file import Job
from hetpipe.observe.segments import streams_in
from hetpipe.runs.judge import histories_of
from hetpipe.values import wire
from hetpipe.values.events import JobState, JobStatus, StopMode, Submission
from hetpipe.values.freezing import FreezeLineup, lineup_for
from hetpipe.values.ids import JobId
from hetpipe.values.plan import Plan
from hetpipe.values.rewinds import run_folders
from hetpipe.wire.calls import GET_STATUS, STOP_JOB, SUBMIT_JOB, GetStatusRequest, StopJobRequest, SubmitJobRequest
from hetpipe.wire.coordinator_client import new_request_id
from tests.chaos import witness_job
from tests.chaos.cluster import ROOT, Cluster
from tests.chaos.keeper import state_of
from tests.chaos.outcome import Tally
from tests.chaos.run_folder import HistoryTail
from tests.histories import whole_lines
from tests.pipeline.witness import sample_counts
from tests.polling import wait_until

#: From handing a job in to its first published clocks: imports of torch on busy processors.
_START_SECONDS = 90.0

#: From asking for a stop to the end, a checkpoint between.
_STOP_SECONDS = 60.0

#: Waves that must be published for a run to count as moving on.
MOVES_WAVES = 6


#: Kinds of violations that are about how old weights may be.
_STALE = frozenset({Kind.STALE_CLOCK, Kind.NOT_REQUIRED_CLOCK, Kind.CLOCK_DISTANCE, Kind.UNPUBLISHED_CLOCK})

#: Problems that a verdict spells out.
_TOLD = 20


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a finished trial has shown."""

    problems: tuple[str, ...]
    """Empty: nothing is lost, doubled, torn or stale."""
    tally: Tally = Tally()


class Trial:
    """One job under way."""

    def __init__(self, cluster: Cluster, run_dir: Path, **changes: Any) -> None:
        """Hand the job in.

        Args:
            cluster: trains it.
            run_dir: its folder, new.
            changes: keys of the job (`witness_job.job`).
        """
        run_dir.mkdir(parents=True)
        self._first_dir = run_dir
        self._cluster = cluster
        job = Job.model_validate(witness_job.job(**changes))
        self._job = job
        (run_dir / "job.json").write_text(job.model_dump_json())
        submission = Submission(new_request_id(), job.model_dump_json(), str(run_dir), str(ROOT))
        self.job_id: JobId = cluster.client.invoke(SUBMIT_JOB, SubmitJobRequest(submission)).job_id
        self._tail = HistoryTail(run_dir)

    @property
    def run_dir(self) -> Path:
        """Where the job goes on: its own folder, or that of its newest rewind."""
        return run_folders(self._first_dir)[-1]

    @property
    def tail(self) -> HistoryTail:
        """What the history there tells, as far as it was looked at."""
        if self._tail.run_dir != self.run_dir:
            self._tail = HistoryTail(self.run_dir)
        return self._tail

    def status(self) -> JobStatus | None:
        """What the coordinator says; None while it is away."""
        try:
            return self._cluster.client.invoke(GET_STATUS, GetStatusRequest(self.job_id))
        except HetpipeError:
            return None

    def published(self) -> int:
        """The newest published clock; -1 before any."""
        tail = self.tail
        tail.look()
        return tail.published

    def wait(self, condition: Callable[[], bool], *, timeout_seconds: float, what: str) -> None:
        """Until `condition` holds.

        Raises:
            AssertionError: it took too long, or the job has ended.
        """
        looked = SYSTEM_CLOCK.monotonic()

        def holds() -> bool:
            nonlocal looked
            if condition():
                return True
            if SYSTEM_CLOCK.monotonic() - looked > 1.0:
                looked = SYSTEM_CLOCK.monotonic()
                self.check_alive()
            return False

        began = self.published()
        try:
            wait_until(holds, timeout_seconds=timeout_seconds, what=what)
        except AssertionError as error:
            raise AssertionError(f"{error}; meanwhile the clock went from {began} to {self.published()}") from None

    def has_ended(self) -> bool:
        """By the coordinator's word."""
        status = self.status()
        return status is not None and status.state is not None and status.state.is_terminal

    def check_alive(self) -> None:
        """The job has not ended.

        Raises:
            AssertionError: it has; the message says why.
        """
        status = self.status()
        if status is not None and status.state is not None and status.state.is_terminal:
            raise AssertionError(f"the job {status.state}: {status.failure or 'without a reason'}")

    def wait_moving(self, *, waves: int = MOVES_WAVES, timeout_seconds: float = _START_SECONDS) -> None:
        """Until so many more waves are published, since the last rewind if there is one meanwhile."""
        tail, wanted = self.tail, self.published() + waves

        def has_moved() -> bool:
            nonlocal tail, wanted
            published = self.published()
            if tail is not self.tail:
                tail, wanted = self.tail, published + waves
            return published >= wanted

        self.wait(has_moved, timeout_seconds=timeout_seconds, what=f"{waves} more waves than clock {wanted - waves}")

    def stage_pids(self) -> dict[tuple[int, int], int]:
        """The stages that live, by virtual worker and stage; as far as the coordinator knows."""
        status = self.status()
        rows = () if status is None else status.processes
        return {
            (row.vw, row.index): row.pid for row in rows if row.role == "stage" and row.vw is not None and row.pid > 0
        }

    def workers_on(self, key: str) -> set[int]:
        """The virtual workers that are planned to have a stage on this agent; none on whoever is no agent."""
        plan = json.loads((self.run_dir / "plan.json").read_bytes())
        workers = plan["virtual_workers"]
        return {worker["index"] for worker in workers if any(stage["agent"] == key for stage in worker["stages"])}

    def expected(self) -> set[int]:
        """The virtual workers that are to train at the newest published clock, by script and frozen layers."""
        clock = max(0, self.published())
        lineups = self._lineups()
        if lineups:
            frozen = max((count for count, (since, _) in self.tail.frozen.items() if since < clock), default=0)
            lineup = lineup_for(lineups, frozen)
            assert lineup is not None, "there is one for every F"
            return set(lineup.members)
        return {vw for vw in range(self._job.num_ever) if not self._job.elastic.is_absent(vw, clock)}

    def _lineups(self) -> tuple[FreezeLineup, ...]:
        """Who trains with how many frozen layers, where the job has that planned; empty before it is planned."""
        try:
            plan: Plan = wire.from_json(Plan, (self.run_dir / "plan.json").read_bytes())
        except OSError:
            return ()
        return plan.freeze_lineups

    def is_whole(self) -> bool:
        """The coordinator says that it runs, and all virtual workers that are to train are members, with all stages."""
        status = self.status()
        if status is None or status.state is not JobState.RUNNING:
            return False
        expected = self.expected()
        stages = [row for row in status.processes if row.role == "stage" and row.vw in expected]
        return (
            {row.vw for row in stages} == self.tail.members.keys() == expected
            and all(row.state == "ready" for row in stages)
            and all(state_of(row.pid) not in {"", "Z"} for row in stages)
        )

    def story(self) -> str:
        """What the coordinator says of the job, in a few words."""
        status = self.status()
        if status is None:
            return "the coordinator does not answer"
        stages = [f"{row.vw}.{row.index} {row.state}" for row in status.processes if row.role == "stage"]
        members = ", ".join(f"{vw} (life {life})" for vw, life in sorted(self.tail.members.items()))
        return f"the job is {status.state}, its stages are {', '.join(stages) or 'not there'}, members are {members}"

    def stop(self) -> JobStatus:
        """Stop at a barrier with a checkpoint; how it ended."""
        self.ask_to_stop()
        return self.wait_ended(timeout_seconds=_STOP_SECONDS)

    def ask_to_stop(self) -> None:
        """Have the coordinator take the wish to stop at a barrier with a checkpoint."""
        deadline = SYSTEM_CLOCK.monotonic() + _STOP_SECONDS
        while True:
            try:
                self._cluster.client.invoke(STOP_JOB, StopJobRequest(StopMode.CHECKPOINT, self.job_id))
            except Unavailable:
                assert SYSTEM_CLOCK.monotonic() < deadline, "the coordinator takes no wish to stop"
                SYSTEM_CLOCK.sleep(0.02)
            else:
                return

    def wait_ended(self, *, timeout_seconds: float) -> JobStatus:
        """Until the job has ended; how."""
        found: JobStatus | None = None

        def has_ended() -> bool:
            nonlocal found
            found = self.status()
            return found is not None and found.state is not None and found.state.is_terminal

        wait_until(has_ended, timeout_seconds=timeout_seconds, what=f"end of the job (clock {self.published()})")
        assert found is not None
        return found

    def abandon(self) -> None:
        """End it at once, whatever its state."""
        try:
            self._cluster.client.invoke(STOP_JOB, StopJobRequest(StopMode.NOW, self.job_id))
            self.wait_ended(timeout_seconds=20.0)
        except (HetpipeError, AssertionError):
            return

    def verdict(self) -> Verdict:
        """What the history checker and the witness weights say of a job that has stopped or finished."""
        last = self.run_dir
        # A rewind that was given up for another one has a folder, and nobody trained there.
        earlier = [folder for folder in histories_of(self._first_dir) if folder != last]
        parts = [*(history_faults(folder, is_last=False) for folder in earlier), history_faults(last, is_last=True)]
        self.published()
        frozen_at: dict[int, int] = {}
        for clock, layers in sorted(self.tail.frozen.values()):
            frozen_at |= dict.fromkeys(set(range(layers)) - frozen_at.keys(), clock)
        parts.append(witness_faults(last, frozen_at))
        problems = tuple(problem for part in parts for problem in part.problems)
        return Verdict(problems, sum((part.tally for part in parts), Tally(jobs=1)))


def history_faults(run_dir: Path, *, is_last: bool) -> Verdict:
    """What the checker says of one folder of a run; only the last one has an end."""
    try:
        report = check_run(run_dir, require_complete=is_last)
    except HetpipeError as error:
        return Verdict((f"the history cannot be judged: {error}",))
    tally = Tally(
        waves=report.counts.waves,
        samples=report.counts.samples,
        doubled_waves=report.waves_applied_twice,
        torn_waves=report.torn_waves,
        stale=sum(violation.kind in _STALE for violation in report.violations),
        violations=len(report.violations),
    )
    return Verdict(tuple(f"{v.kind.value}: {v.message} ({v.where})" for v in report.violations[:_TOLD]), tally)


def witness_faults(run_dir: Path, frozen_at: Mapping[int, int]) -> Verdict:
    """Every sample that the final weights do not hold exactly as often as the ledger of commits says, in each layer.

    Args:
        run_dir: the last folder of a run.
        frozen_at: layer → the clock from which on it is frozen, and counts nothing any more.
    """
    try:
        layers = final_layers(newest_checkpoint(run_dir))
    except CheckpointError as error:
        return Verdict((f"no final weights: {error}",))
    own = {f"weights/{layer}.cells": _ledger(run_dir, below=clock) for layer, clock in frozen_at.items()}
    return layer_faults(layers, _ledger(run_dir), own)


def layer_faults(
    layers: Mapping[str, Sequence[int]],
    ledger: Mapping[int, int],
    own: Mapping[str, Mapping[int, int]] = MappingProxyType({}),
) -> Verdict:
    """What differs between how often samples were added to each layer and how often they were committed.

    Args:
        layers: how often each has which sample.
        ledger: how often each sample was committed.
        own: the same of layers that others have trained longer than.
    """
    if unknown := own.keys() - layers.keys():
        return Verdict((f"the final weights have layers {sorted(layers)}, and not {sorted(unknown)}",))
    if len(layers) != witness_job.NUM_LAYERS:
        return Verdict((f"the final weights have layers {sorted(layers)}, not {witness_job.NUM_LAYERS}",))
    problems, tally = [], Tally()
    for name, found in sorted(layers.items()):
        wanted = own.get(name, ledger)
        lost = [sample for sample, count in enumerate(found) if count < wanted.get(sample, 0)]
        doubled = [sample for sample, count in enumerate(found) if count > wanted.get(sample, 0)]
        tally += Tally(lost_samples=len(lost), doubled_samples=len(doubled))
        if lost or doubled:
            problems.append(
                f"{name}: {len(lost)} samples lost (first {lost[:3]}), {len(doubled)} doubled (first {doubled[:3]})"
            )
    first, *others = (tuple(found) for name, found in sorted(layers.items()) if name not in own)
    if torn := sum(other != first for other in others):
        problems.append("layers differ: a wave was torn")
        tally += Tally(torn_layers=torn)
    return Verdict(tuple(problems), tally)


def final_layers(checkpoint: Path) -> Mapping[str, list[int]]:
    """How often each layer of the weights holds each sample, by name of the layer."""
    layers: dict[str, list[int]] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        for name, cells in load_file(path).items():
            if name.startswith("weights/"):
                layers[name] = sample_counts(cells, witness_job.num_samples())
    return layers


def _ledger(run_dir: Path, *, below: float = math.inf) -> Counter[int]:
    """How often each sample was committed: once per epoch, by the checker's word, so (epoch, sample) is a set.

    Args:
        run_dir: the last folder of a run.
        below: only in waves before this clock; the run began before it.
    """
    start = json.loads((run_dir / "facts.json").read_bytes())["start"]
    used = {(epoch, index) for epoch in range(start["epoch"]) for index in range(witness_job.num_samples())}
    used |= {(start["epoch"], index) for index in start["used"]}
    for path in streams_in(run_dir / "history", "shard-"):
        for record in whole_lines(path, b'"used"'):
            if record["wave"] < below:
                used |= {(record["epoch"], index) for index in record["indices"]}
    return Counter(index for _, index in used)
