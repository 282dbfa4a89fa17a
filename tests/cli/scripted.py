"""A coordinator that tells what a test wrote down, and the folder of a run that it leads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from hetpipe.errors import HetpipeError
from hetpipe.runs.run_folder import RunFolder, RunRecord
from hetpipe.values.events import JobStatus
from hetpipe.values.ids import JobId
from tests.cli.fakes import JOB_ID, FakeCoordinator
from tests.support.fake_clock import FakeClock

CLUSTER = ("--coordinator", "127.0.0.1:7300")


class Scripted(FakeCoordinator):
    """Tells one status after the other, the last one again and again; an error is raised in its place."""

    def __init__(self, statuses: Iterable[JobStatus | HetpipeError]) -> None:
        super().__init__()
        self._statuses: Iterator[JobStatus | HetpipeError] = iter(statuses)
        self._newest: JobStatus | HetpipeError = JobStatus(None, "", None, "", "")
        self.asked: list[JobId | None] = []

    def status(self, job_id: JobId | None = None) -> JobStatus:
        self.asked.append(job_id)
        self._newest = next(self._statuses, self._newest)
        if isinstance(self._newest, HetpipeError):
            raise self._newest
        return self._newest


def run_folder(path: Path) -> RunFolder:
    """Of a run that is under way."""
    folder = RunFolder.create(path, name="small", clock=FakeClock())
    folder.write_record(
        RunRecord(
            run_dir=str(folder.path),
            name="small",
            host="here",
            started_wall=1.0,
            job_id=JOB_ID,
            coordinator="127.0.0.1:7300",
        )
    )
    return folder
