"""The coordinator of a running job, and polling that survives its absence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from hetpipe.errors import DeadlineExceeded, Unavailable, UnknownJob, UserError
from hetpipe.runs.reconnection import Contact, Reconnection
from hetpipe.runs.run_folder import RunFolder, RunRecord, find_run
from hetpipe.runs.shell import CoordinatorPort, Shell
from hetpipe.runs.status import pointing_at_status
from hetpipe.values.events import JobState, JobStatus
from hetpipe.values.ids import JobId
from hetpipe.wire.calls import GET_STATUS, GetStatusRequest

#: Seconds between two polls.
_POLL_SECONDS = 0.5


class WhichJob(Protocol):
    """Options that select a job: that of the run in a folder, one of a coordinator, or that of the newest run."""

    @property
    def run_dir(self) -> Path | None:
        """Folder of the run; None: the newest run."""

    @property
    def coordinator(self) -> str | None:
        """`HOST:PORT`."""

    @property
    def job(self) -> str | None:
        """Job id at the coordinator; None: its newest job."""

    @property
    def runs_dir(self) -> Path:
        """The folder to search for the newest run."""


@dataclass(frozen=True, slots=True)
class JobConnection:
    """The coordinator of a job, with the run's folder."""

    client: CoordinatorPort
    job_id: JobId | None
    """None: the newest job."""
    folder: RunFolder | None
    """Folder of the run, if known."""
    cluster: str | None = None
    """`HOST:PORT` of the coordinator; None: the coordinator of a local run, which ends with the run."""

    def wait(
        self,
        status: JobStatus,
        is_reached: Callable[[JobStatus], bool],
        late: Callable[[JobStatus], str],
        say: Callable[[str], None],
        shell: Shell,
        *,
        timeout_seconds: float,
        again: Callable[[], object] = lambda: None,
    ) -> JobStatus:
        """Poll a job until a condition holds or the job has ended; returns its status.

        Args:
            status: the newest one.
            is_reached: the condition.
            late: the error message when the timeout expires.
            say: called with changes of the connection's state.
            shell: provides the clock.
            timeout_seconds: limit of the wait, including outages of the coordinator.
            again: repeats the request, as the coordinator that accepted it may have died.

        Raises:
            DeadlineExceeded: the condition did not hold in time.
            Unavailable, UnknownJob: for minutes the coordinator has not answered, or the job has been unknown to it.
            NobodyLeads: the coordinator answers, but the job has had no leader for minutes.
        """
        reconnection, contact = Reconnection(shell.clock, say=say), Contact(shell.clock)
        reconnection.succeeded()
        until = shell.clock.monotonic() + timeout_seconds
        was_away = False
        while True:
            try:
                if was_away:
                    again()
                status = self.client.invoke(GET_STATUS, GetStatusRequest(status.job_id))
            except (Unavailable, UnknownJob) as error:
                result = None if self.folder is None else self.folder.read_result()
                if result is not None:  # the coordinator of a local run ends with it
                    return replace(status, state=JobState(result.state))
                was_away = True
                if shell.clock.monotonic() >= until:
                    raise DeadlineExceeded(f"{late(status)}; now {error}") from error
                reconnection.failed(error)
                continue
            reconnection.succeeded()
            was_away = False
            if is_over(status) or is_reached(status):
                return status
            if shell.clock.monotonic() >= until:
                raise DeadlineExceeded(late(status))
            contact.saw(status)
            shell.clock.sleep(_POLL_SECONDS)


def is_over(status: JobStatus) -> bool:
    """Whether the job has ended, or does not exist."""
    return status.state is None or status.state.is_terminal


@contextmanager
def job_connection(which: WhichJob, shell: Shell) -> Iterator[JobConnection]:
    """Connect to the coordinator of the selected job."""
    folder: RunFolder | None = None
    cluster = which.coordinator
    if which.coordinator is not None:
        job_id = None if which.job is None else JobId(which.job)
        address, there = which.coordinator, shell
        hint: AbstractContextManager[None] = nullcontext()
    else:
        folder, record = _run_of(which)
        address, there, job_id = record.coordinator, shell.alone() if record.local else shell, JobId(record.job_id)
        cluster = None if record.local else address
        hint = pointing_at_status(folder, shell)
    with hint, closing(there.connect(address)) as client:
        yield JobConnection(client, job_id, folder, cluster)


def _run_of(which: WhichJob) -> tuple[RunFolder, RunRecord]:
    """The run that the options select, and its coordinator.

    Raises:
        UserError: there is no run, or it is not running.
    """
    if which.job is not None:
        raise UserError("--job names a job of a coordinator; add --coordinator HOST:PORT")
    folder = find_run(which.run_dir, runs_dir=which.runs_dir)
    record, result = folder.read_record(), folder.read_result()
    if result is not None:
        raise UserError(f"the run in {folder.path} has {result.state} and is not running any more")
    if not record.job_id:
        raise UserError(f"the run in {folder.path} has no job yet; its services are starting")
    return folder, record
