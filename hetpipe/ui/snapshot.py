"""The content of the pages: a run, read from its folder, and from its coordinator while it trains.

Nothing is written. Missing or truncated files of a run, and those of another version, are treated as absent: a page
shows the rest. Curves are read through their index (`observe.down_sampled`), and of a growing file only the new lines.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from hetpipe.errors import HetpipeError
from hetpipe.observe.clock_curve import ClockPoint, ClockReduction, clock_points, clock_shard_file
from hetpipe.observe.down_sampled import FollowedCurve
from hetpipe.observe.metrics import FollowedMetrics, TimedWave
from hetpipe.runs.active_layers import InactiveSince, inactive_of
from hetpipe.runs.cuts import CutChange, cuts_of
from hetpipe.runs.run_folder import RunFolder, RunRecord, RunResult, plan_in
from hetpipe.runs.shell import Shell
from hetpipe.runs.status import RunStatus, is_running_here, job_status_of, status_from
from hetpipe.server.coordinator.job_hosts import EVALUATIONS
from hetpipe.server.decisions_file import decisions_of_run
from hetpipe.values.decisions import DecisionLine
from hetpipe.values.events import ConditionCleared, ConditionRaised, JobEvent, JobStatus, Notice
from hetpipe.values.plan import Plan
from hetpipe.values.plan_document import PlanDocument
from hetpipe.values.rewinds import run_folders
from hetpipe.values.wire import revive

#: Most bytes of a log that a page shows, from its end, and most lines.
LOG_BYTES = 256 << 10
LOG_LINES = 400

#: Most bytes of the coordinator's log that are searched for events, and most events.
_EVENT_BYTES = 4 << 20
_MOST_EVENTS = 200

_LoggedKind = Notice | ConditionRaised | ConditionCleared
#: Kind → class of the events that a coordinator logs.
_KINDS: Mapping[str, Any] = {
    str(kind.__dataclass_fields__["kind"].default): kind
    for kind in get_args(JobEvent)
    if issubclass(kind, (Notice, ConditionRaised, ConditionCleared))
}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A line of `evaluations.jsonl`."""

    minibatches: int
    rewinds: int
    whole: bool
    values: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """An event of a run, from its coordinator's log."""

    t: str
    """UTC, ISO 8601."""
    event: _LoggedKind


@dataclass(frozen=True, slots=True)
class Attempt:
    """The folder of a run, or of one of its rewinds."""

    start: int
    """Minibatches that were committed before it, over all virtual workers."""
    start_samples: int
    num_samples: int | None
    """Of the training set."""
    by_worker: Mapping[int, Sequence[TimedWave]]
    """Virtual worker → its waves, in order."""
    commits: Sequence[ClockPoint]

    @property
    def waves(self) -> Sequence[Sequence[TimedWave]]:
        """Those of each virtual worker that has some, in order."""
        return list(self.by_worker.values())


@dataclass(frozen=True, slots=True)
class LogFile:
    """A log of a run."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Brief:
    """A run in the list of runs."""

    name: str
    """Of its folder; of a run of a comparison, below the folder of that."""
    record: RunRecord
    status: RunStatus
    job: Mapping[str, Any]
    """`job.json`; empty if it cannot be read."""
    result: RunResult | None
    job_status: JobStatus | None
    """By its coordinator, while that answers."""
    start_samples: int = 0
    num_samples: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """The content of the page of a run."""

    brief: Brief
    attempts: Sequence[Attempt]
    """First the run itself, then its rewinds."""
    evaluations: Sequence[Evaluation]
    plan: Plan | None
    forecast: PlanDocument | None
    decisions: Sequence[DecisionLine]
    cuts: Sequence[CutChange]
    """Since its plan, in order."""
    inactive: Sequence[InactiveSince]
    events: Sequence[LoggedEvent]
    """Oldest first."""
    logs: Sequence[LogFile]


def runs_in(runs_dir: Path) -> dict[str, Path]:
    """The runs in a folder by name: its subfolders with a `run.json`, and those of the others; no links."""
    own = _folders_in(runs_dir)
    inner = [one for path in own if not (path / "run.json").is_file() for one in _folders_in(path)]
    return {str(one.relative_to(runs_dir)): one for one in [*own, *inner] if (one / "run.json").is_file()}


def _folders_in(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def ask(path: Path, shell: Shell) -> JobStatus | None:
    """Query the status at the coordinator of the run; None if it has none or does not answer. Blocks meanwhile."""
    folder = RunFolder(path)
    try:
        record = folder.read_record()
        if folder.read_result() is not None or (record.local and not is_running_here(record)):
            return None
        return job_status_of(record, shell)
    except HetpipeError:
        return None


def brief_of(path: Path, name: str, job_status: JobStatus | None, shell: Shell) -> Brief | None:
    """Read the run `name` for the list; None if the folder is no run, or one that is being created."""
    folder = RunFolder(path)
    try:
        record, result = folder.read_record(), folder.read_result()
        status = status_from(folder, record, result, None if result is not None and record.local else job_status, shell)
    except HetpipeError:
        return None
    facts = _object(run_folders(path)[-1] / "facts.json")
    return Brief(
        name=name,
        record=record,
        status=status,
        job=_object(path / "job.json"),
        result=result,
        job_status=job_status,
        start_samples=_start(facts, "samples"),
        num_samples=_whole(facts.get("num_samples")),
    )


class OpenRun:
    """A run whose page is open. Not thread-safe."""

    def __init__(self, path: Path, name: str) -> None:
        """Refer to the run `name` in the folder `path`, without access to it."""
        self.path = path
        self._name = name
        self._metrics: dict[Path, FollowedMetrics] = {}
        self._clocks: dict[Path, FollowedCurve] = {}
        self._events: deque[LoggedEvent] = deque(maxlen=_MOST_EVENTS)
        self._events_end = 0

    def read(self, job_status: JobStatus | None, shell: Shell) -> RunSnapshot | None:
        """Read the run; None if the folder is no run, or one that is being created."""
        brief = brief_of(self.path, self._name, job_status, shell)
        if brief is None:
            return None
        folder = RunFolder(self.path)
        try:
            forecast = folder.read_forecast()
        except HetpipeError:
            forecast = None
        try:
            decisions: Sequence[DecisionLine] = decisions_of_run(self.path)
        except (OSError, HetpipeError):
            decisions = ()
        folders = run_folders(self.path)
        attempts = tuple(map(self._attempt, folders))
        plan, facts = plan_in(folders[-1]), _object(folders[-1] / "facts.json")
        activations = () if plan is None else plan.activations
        planned = () if plan is None else plan.activation_cuts
        return RunSnapshot(
            brief=brief,
            attempts=attempts,
            evaluations=tuple(_evaluations(self.path / EVALUATIONS)),
            plan=plan,
            forecast=forecast,
            decisions=decisions,
            cuts=cuts_of(brief.job, decisions, planned, attempts[-1].by_worker),
            inactive=inactive_of(activations, facts, brief.status.global_clock),
            events=tuple(self._logged()),
            logs=logs_of(self.path),
        )

    def _attempt(self, folder: Path) -> Attempt:
        facts = _object(folder / "facts.json")
        metrics = self._metrics.setdefault(folder, FollowedMetrics(folder))
        clocks = self._clocks.setdefault(folder, FollowedCurve(clock_shard_file(folder), ClockReduction()))
        try:
            waves = metrics.read()
        except OSError:
            waves = {}
        try:
            commits = clock_points(clocks.points())
        except OSError:
            commits = []
        start, samples = _start(facts, "minibatches"), _start(facts, "samples")
        return Attempt(start, samples, _whole(facts.get("num_samples")), waves, commits)

    def _logged(self) -> Sequence[LoggedEvent]:
        path = self.path / "logs" / "coordinator.log"
        try:
            with path.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._events_end, end - _EVENT_BYTES))
                for line in log:
                    if not line.endswith(b"\n"):
                        break
                    self._events_end = log.tell()
                    if (found := _event_of(line)) is not None:
                        self._events.append(found)
        except OSError:
            """A run on a cluster has no log of the coordinator."""
        return self._events


def logs_of(path: Path) -> tuple[LogFile, ...]:
    """The logs of a run that have content, by name; no links."""
    try:
        with os.scandir(path / "logs") as entries:
            files = [entry for entry in entries if entry.is_file(follow_symlinks=False)]
            found = [LogFile(entry.name, entry.stat(follow_symlinks=False).st_size) for entry in files]
    except OSError:
        return ()
    return tuple(sorted((log for log in found if log.num_bytes), key=lambda log: log.name))


def tail_of(path: Path) -> list[str]:
    """The last lines of a log."""
    with path.open("rb") as log:
        end = log.seek(0, os.SEEK_END)
        log.seek(max(0, end - LOG_BYTES))
        lines = log.read(LOG_BYTES).decode(errors="replace").splitlines()
    return lines[1 if end > LOG_BYTES else 0 :][-LOG_LINES:]


def _event_of(line: bytes) -> LoggedEvent | None:
    """The event in a line of the coordinator's log, if it is one of the run."""
    try:
        values = json.loads(line)
        kind = _KINDS.get(values["event"])
        if kind is None:
            return None
        fields = {name: values[name] for name in kind.__dataclass_fields__ if name in values}
        return LoggedEvent(str(values["t"]), revive(kind, fields))
    except (ValueError, KeyError, TypeError, RecursionError, HetpipeError):
        return None


def _evaluations(path: Path) -> list[Evaluation]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            values = json.loads(line)
            measured = {str(name): None if value is None else float(value) for name, value in values["values"].items()}
            found.append(
                Evaluation(int(values["minibatches"]), int(values["rewinds"]), bool(values["whole"]), measured)
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return found


def _object(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _start(facts: Mapping[str, Any], name: str) -> int:
    start = facts.get("start")
    return _whole(start.get(name)) or 0 if isinstance(start, dict) else 0


def _whole(value: object) -> int | None:
    return value if type(value) is int else None
