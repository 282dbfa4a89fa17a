"""What commands need of the world around them, as a value: the machine's own by default, others in tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hetpipe.cli.supervisor import Programs
from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.rpc.coordinator_client import CoordinatorClient
from hetpipe.spec.events import JobState, JobStatus, NumberedEvent, StopMode, Submission
from hetpipe.spec.ids import JobId
from hetpipe.spec.run import ClockSnapshot


class CoordinatorPort(Protocol):
    """The calls of `CoordinatorClient` that commands make; contracts and errors are described there."""

    def submit_job(self, submission: Submission) -> JobId:
        """Hand a job in."""
        ...

    def stop_job(self, job_id: JobId | None = None, *, mode: StopMode) -> JobState:
        """Ask a job to stop."""
        ...

    def status(self, job_id: JobId | None = None) -> JobStatus:
        """A job's status."""
        ...

    def watch_job(self, job_id: JobId | None = None, *, after: int = 0) -> Iterator[NumberedEvent]:
        """Its events, to the last."""
        ...

    def clocks(self, job_id: JobId | None = None) -> ClockSnapshot | None:
        """Its clocks."""
        ...

    def watch_clocks(self, job_id: JobId | None = None) -> Iterator[ClockSnapshot]:
        """Its clocks, after every change."""
        ...

    def close(self) -> None:
        """End all calls."""
        ...


def _environment() -> Mapping[str, str]:
    return dict(os.environ)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shell:
    """The world around a command."""

    clock: Clock = SYSTEM_CLOCK
    environment: Mapping[str, str] = field(default_factory=_environment)
    current: Path = field(default_factory=Path.cwd)
    """The folder that user code is imported from, and that paths are shown from."""
    open_coordinator: Callable[[str], CoordinatorPort] = CoordinatorClient
    """The coordinator at `HOST:PORT`."""
    programs: Programs = field(default_factory=Programs)
    """What the services of a local run are."""
