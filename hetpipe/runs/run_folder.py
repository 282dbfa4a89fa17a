"""The folder of a run: its name, its lookup, and the files written by the command line.

    run.json     the processes of the run, written at the start
    job.json     the job
    submission.json  the job as submitted to a cluster, so that a repeated command refers to the same job
    result.json  its ending; missing while it runs, or if the program that followed it was killed
    trace.json   the trace of the pipeline, merged from trace/*.jsonl at the end
    rewind-N/    the continuation of the run after its N-th rewind, with the same layout

`plan.json`, `facts.json`, `forecast.json`, `profile.json` and `cluster.yaml` are the coordinator's; histories,
checkpoints and logs each process's own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from hetpipe.clock import Clock
from hetpipe.errors import HetpipeError, ProtocolViolation, UserError
from hetpipe.job.file import Job
from hetpipe.observe.timeline import merge_timelines
from hetpipe.values.conditions import Condition
from hetpipe.values.document import read_document
from hetpipe.values.events import Submission
from hetpipe.values.plan import Plan
from hetpipe.values.plan_document import PlanDocument
from hetpipe.values.rewinds import run_folders
from hetpipe.values.storage_url import is_url, place_of_run
from hetpipe.values.wire import from_json, plain, revive

#: Default folder of runs, in the current folder.
RUNS = Path("runs")

#: Symbolic link in `RUNS` to the newest run that began to train.
LATEST = "latest"

_RECORD, _JOB, _RESULT, _FORECAST, _FACTS = "run.json", "job.json", "result.json", "forecast.json", "facts.json"
_SUBMISSION = "submission.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The content of `run.json`."""

    run_dir: str
    name: str
    """Name of the job."""
    host: str
    """Host of the program that follows the run."""
    started_wall: float
    """Seconds since 1970."""
    job_id: str = ""
    """Job id; empty until the job is submitted."""
    coordinator: str = ""
    """`HOST:PORT` of the coordinator; empty until it is known."""
    local: bool = True
    """The services of the run were started for it alone, on `host`."""
    pids: dict[str, int] = field(default_factory=dict)
    """Process ids on `host`: `hetpipe`, and of a local run `coordinator`, `parameter-server-0`, …, `agent`."""
    restored_from: str | None = None
    """The checkpoint from which it was resumed."""
    import_path: str = ""
    """Folder from which its user code was imported first; empty in older runs."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """The content of `result.json`."""

    state: str
    errors: tuple[str, ...]
    values: dict[str, Any]
    """The whole object; for a run with a result, that of `train --json` and `state`."""

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The recorded conditions of the run."""
        try:
            return revive(tuple[Condition, ...], self.values.get("conditions", ()))
        except ProtocolViolation:
            return ()


class RunFolder:
    """The folder of one run. Files are replaced atomically."""

    def __init__(self, path: Path, *, runs_dir: Path = RUNS) -> None:
        """Refer to a folder, without access to it.

        Args:
            path: the folder.
            runs_dir: folder whose link `latest` will refer to it once it trains.
        """
        #: Absolute.
        self.path = path.absolute()
        self._runs_dir = runs_dir.absolute()

    @classmethod
    def create(cls, run_dir: Path | None, *, name: str, clock: Clock, runs_dir: Path = RUNS) -> RunFolder:
        """Create the folder of a new run: `run_dir`, or one in `runs_dir` named after the job and the time.

        Raises:
            UserError: `run_dir` already has a run, or cannot be created.
        """
        try:
            if run_dir is None:
                folder = cls(fresh_folder(runs_dir, name, clock), runs_dir=runs_dir)
            else:
                run_dir.mkdir(parents=True, exist_ok=True)
                folder = cls(run_dir, runs_dir=runs_dir)
                if any((folder.path / name).exists() for name in (_RECORD, _JOB, _SUBMISSION)):
                    raise UserError(f"--run-dir {run_dir}: already contains a run; name a new folder")
            (folder.path / "logs").mkdir(exist_ok=True)
        except OSError as error:
            where = run_dir or runs_dir
            raise UserError(
                f"cannot create the run's folder {where}: {error.strerror}; name another with --run-dir"
            ) from error
        return folder

    def discard(self) -> None:
        """Remove the folder of a run that was not begun; one that has files stays."""
        with suppress(OSError):
            self.logs.rmdir()
            self.path.rmdir()

    @property
    def logs(self) -> Path:
        """The folder of the logs."""
        return self.path / "logs"

    @property
    def state(self) -> Path:
        """The folder of persistent state of a local run's parameter servers."""
        return self.path / "state"

    def write_job(self, job: Job) -> None:
        """Write `job.json`."""
        self._write(_JOB, job.model_dump(mode="json"))

    def read_job(self) -> Job:
        """The job of the run.

        Raises:
            UserError: the folder is not a run.
            JobError: the file was changed and is not a valid job any more.
        """
        path = self.path / _JOB
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{self.path} is not a run: it has no {_JOB}; runs are in {RUNS}/ by default") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        return Job.model_validate(values)

    @property
    def place(self) -> str:
        """Location of its checkpoints: the URL of the run in its job's storage, or this folder."""
        try:
            return place_of_run(str(self.path), self.read_job().storage)
        except HetpipeError:
            return str(self.path)

    @property
    def checkpoints_url(self) -> str:
        """The URL of its checkpoints; empty if they are in this folder."""
        place = self.place
        return place if is_url(place) else ""

    @property
    def has_job(self) -> bool:
        """Whether the job was written."""
        return (self.path / _JOB).exists()

    @property
    def has_begun(self) -> bool:
        """Whether the job was planned, so that this folder may contain trained state."""
        return (self.path / _FACTS).exists()

    def write_submission(self, submission: Submission) -> None:
        """Write `submission.json`: before the job is submitted, so that it is not submitted twice."""
        self._write(_SUBMISSION, plain(Submission, submission))

    def read_submission(self) -> Submission | None:
        """The submission to a cluster, sent or about to be; None without one.

        Raises:
            UserError: it cannot be read.
        """
        path = self.path / _SUBMISSION
        try:
            submission: Submission = from_json(Submission, path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ProtocolViolation) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        return submission

    def write_record(self, record: RunRecord) -> None:
        """Write `run.json`."""
        self._write(_RECORD, plain(RunRecord, record))

    def read_record(self) -> RunRecord:
        """The content of `run.json`.

        Raises:
            UserError: the folder is not a run.
        """
        path = self.path / _RECORD
        try:
            record: RunRecord = from_json(RunRecord, path.read_bytes())
        except FileNotFoundError:
            raise UserError(f"{self.path} is not a run: it has no {_RECORD}; runs are in {RUNS}/ by default") from None
        except (OSError, ProtocolViolation) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        return record

    def import_path(self, current: Path) -> Path:
        """The first folder to import the run's user code from: that of the run, or `current` where it does not exist.

        A run that was copied from another machine, or whose code has moved, is used in the folder with its code.

        Raises:
            UserError: the folder is not a run.
        """
        recorded = self.read_record().import_path
        return Path(recorded) if recorded and Path(recorded).is_dir() else current

    def write_result(self, state: str, values: Mapping[str, Any]) -> None:
        """Write `result.json`: the state and `values`."""
        self._write(_RESULT, {"state": state, **values})

    def read_result(self) -> RunResult | None:
        """The content of `result.json`; None if it does not exist.

        Raises:
            UserError: it cannot be read.
        """
        path = self.path / _RESULT
        try:
            values = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise UserError(f"{path} does not contain a JSON object")
        return RunResult(str(values.get("state", "")), tuple(map(str, values.get("errors", ()))), values)

    def read_num_samples(self) -> int:
        """The number of samples of the run's training set.

        Raises:
            UserError: the run ended before that was known.
        """
        path = self.path / _FACTS
        try:
            return int(json.loads(path.read_bytes())["num_samples"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} cannot be read, so the size of the training set is unknown: {error}") from error

    def read_forecast(self) -> PlanDocument | None:
        """The planner's forecast, or None for a run that was not planned.

        Raises:
            DocumentError: it cannot be read.
        """
        path = self.path / _FORECAST
        return read_document(PlanDocument, path) if path.exists() else None

    def merge_trace(self) -> None:
        """Merge the processes' fragments, if any, into `trace.json`; likewise for each rewind.

        Raises:
            OSError: a file cannot be read or written.
        """
        for where in run_folders(self.path):
            fragments = list((where / "trace").glob("*.jsonl"))
            if fragments:
                merge_timelines(fragments, where / "trace.json")

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        unfinished = self.path / f".{name}.{os.getpid()}"
        try:
            unfinished.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
            unfinished.replace(self.path / name)
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise UserError(f"cannot write {self.path / name}: {error.strerror}") from error

    def point_latest(self) -> None:
        """Point `latest` at this run, which trains, or has been submitted.

        A failed attempt leaves `latest` at the previous run, which is the one to inspect or to resume. An unwritable
        folder is not an error.
        """
        link = self._runs_dir / LATEST
        unfinished = link.with_name(f".{LATEST}.{os.getpid()}")
        inside = self.path.parent == link.parent
        try:
            self._runs_dir.mkdir(parents=True, exist_ok=True)
            if link.exists() and not link.is_symlink():
                return
            unfinished.unlink(missing_ok=True)
            unfinished.symlink_to(self.path.name if inside else self.path)
            unfinished.replace(link)
        except OSError:
            return


def plan_in(folder: Path) -> Plan | None:
    """The plan in a folder of a run, its own or that of a rewind; None if it cannot be read."""
    try:
        plan: Plan = from_json(Plan, (folder / "plan.json").read_bytes())
    except (OSError, HetpipeError):
        return None
    return plan


def run_of_job_file(path: Path) -> RunFolder | None:
    """The run whose `job.json` is `path`, possibly that of a rewind; None if it belongs to no run."""
    for parent in path.absolute().parents[:2] if path.name == _JOB else ():
        if (parent / _RECORD).is_file():
            return RunFolder(parent)
    return None


def fresh_folder(runs_dir: Path, name: str, clock: Clock) -> Path:
    """Create a folder in `runs_dir`, named after `name` and the time, with the suffix -2, -3 … if it already exists.

    Raises:
        OSError: it cannot be created.
    """
    runs_dir.mkdir(parents=True, exist_ok=True)
    stamp = datetime.fromtimestamp(clock.wall()).astimezone().strftime("%Y%m%d-%H%M%S")
    number = 1
    while True:
        path = runs_dir / (f"{name}-{stamp}" if number == 1 else f"{name}-{stamp}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def find_run(run_dir: Path | None, *, runs_dir: Path = RUNS) -> RunFolder:
    """Find the run in `run_dir`, or the latest one in `runs_dir`.

    Raises:
        UserError: there is no run.
    """
    if run_dir is not None:
        folder = RunFolder(run_dir.resolve())
        if not folder.path.is_dir():
            raise UserError(f"{run_dir}: no such folder; name the folder of a run")
        return folder
    newest = max(_started(runs_dir), key=lambda found: found[0], default=None)
    if newest is None:
        raise UserError(
            f"there is no run in {runs_dir}/; start one with `hetpipe train job.yaml`, or name the folder of a run"
        )
    return newest[1]


def _started(runs_dir: Path) -> Iterator[tuple[float, RunFolder]]:
    """The runs in `runs_dir` with their start times; other folders are ignored."""
    for path in sorted({entry.resolve() for entry in runs_dir.glob("*")}):
        folder = RunFolder(path)
        try:
            yield folder.read_record().started_wall, folder
        except HetpipeError:
            continue
