"""`hetpipe top`: a job and its cluster, polled from the coordinator every second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from hetpipe.cli.look.clocks import snapshot_text
from hetpipe.cli.options import Json, NewestJobOf, RunDir, RunsDir, TlsFolder
from hetpipe.errors import Unavailable, UnknownJob, UserError
from hetpipe.report.progress import STATE_TEXTS, cells, headings, memory_text, no_utilisation_text, totals_text
from hetpipe.report.text import columns, shown_path
from hetpipe.runs.active_layers import InactiveSince, read_inactive
from hetpipe.runs.cuts import CutChange, read_cuts
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.reconnection import Contact, Reconnection
from hetpipe.runs.run_folder import RUNS, RunFolder, RunRecord, find_run
from hetpipe.runs.shell import CoordinatorPort, Shell
from hetpipe.runs.status import NO_JOB, inactive_lines, pointing_at_status, status_of_job, worker_json
from hetpipe.values.events import JobStatus, ProgressTable
from hetpipe.values.ids import JobId
from hetpipe.values.members import ROLE_NAMES, Member
from hetpipe.values.wire import plain
from hetpipe.wire.calls import GET_STATUS, GetStatusRequest
from hetpipe.wire.coordinator_client import all_members

#: Polling interval.
REFRESH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Picture:
    """A snapshot of a job and its cluster."""

    status: JobStatus
    members: tuple[Member, ...]
    cuts: tuple[CutChange, ...] = ()
    """How virtual workers have been cut since the plan, as far as the folder of the run is at hand."""
    inactive: tuple[InactiveSince, ...] = ()
    """The inactive layers over time, likewise."""

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended, so that nothing changes any more."""
        return self.status.state is not None and self.status.state.is_terminal

    def to_json(self) -> dict[str, Any]:
        """The object of `top --json`."""
        members = [plain(Member, member) for member in self.members]
        workers = [worker_json(worker) for worker in self.status.workers]
        found = self.status.evaluations
        evaluations = None if found is None else found.to_object()
        cuts = [cut.to_json() for cut in self.cuts]
        return {
            **plain(JobStatus, self.status),
            "workers": workers,
            "evaluations": evaluations,
            "members": members,
            "cuts": cuts,
            "inactive": [asdict(one) for one in self.inactive],
        }

    def lines(self, current: Path) -> list[str]:
        """The snapshot as text for people; paths are relative to the folder `current`."""
        status = self.status
        state = NO_JOB if status.state is None else STATE_TEXTS[status.state]
        where = f" ({shown_path(Path(status.run_dir), current)})" if status.run_dir else ""
        lines = [f"{status.name or 'cluster'}: {state}{where}"]
        if status.failure:
            lines.append(status.failure)
        if status.progress is not None:
            lines.append(totals_text(status.progress))
            if status.progress.model_flops_utilisation_reason:
                lines.append(no_utilisation_text(status.progress.model_flops_utilisation_reason))
        if status.clocks is not None:
            lines.append(snapshot_text(status.clocks))
        lines += self._stages()
        now = status_of_job(status)
        lines += now.frozen_lines()
        lines += inactive_lines(self.inactive)
        if now.evaluations is not None:
            lines.append(str(now.evaluations))
        lines += map(str, self.cuts)
        lines += now.troubles()
        if status.progress is not None:
            lines += ["", *columns(_rows(status.progress))]
        if self.members:
            lines += ["", *columns([["member", "id", "address", "pid", "devices", "lease"], *map(_row, self.members)])]
        return lines

    def _stages(self) -> Iterator[str]:
        states = Counter(process.state for process in self.status.processes if process.role == "stage")
        if states:
            yield "stages: " + ", ".join(f"{number} {state}" for state, number in states.items())


def _rows(progress: ProgressTable) -> list[list[str]]:
    """The table of `train`, with memory instead of the remaining time, which is shown above it."""
    memory = [memory_text(row) for row in progress.rows]
    rows = [[*row[:-1], size] for row, size in zip(cells(progress), memory, strict=True)]
    return [[*headings(progress)[:-1], "memory"], *rows]


def _row(member: Member) -> list[str]:
    info = member.info
    types = Counter(device.type for device in info.devices)
    devices = ", ".join(f"{number} {kind}" for kind, number in types.items()) or "-"
    lease = f"{member.lease_seconds_left:.1f} s"
    return [ROLE_NAMES[info.role], info.id, info.address or info.host, str(info.pid), devices, lease]


class Screen(Protocol):
    """A display of successive snapshots."""

    def show(self, picture: Picture) -> None:
        """Show a snapshot in place of the previous one, or after it."""
        ...

    def say(self, sentence: str) -> None:
        """Show a remark beside the snapshots."""
        ...

    def close(self) -> None:
        """Restore the terminal; the last snapshot stays on it."""
        ...


class _Pages(Screen):
    """Prints the snapshots in sequence, for pipes and `--json`."""

    def __init__(self, output: Output, current: Path) -> None:
        self._output = output
        self._current = current
        self._gap: tuple[str, ...] = ()

    def show(self, picture: Picture) -> None:
        self._output.answer(picture.to_json(), *self._gap, *picture.lines(self._current))
        self._gap = ("",)

    def say(self, sentence: str) -> None:
        self._output.note(sentence)

    def close(self) -> None:
        """No-op: nothing is buffered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Watch a run and its cluster, every second. Clocks, speed, loss, waiting, memory; members and their leases."""

    run_dir: RunDir = None
    coordinator: NewestJobOf = None
    once: Annotated[bool, typer.Option("--once", help="Show it once, and exit.")] = False
    runs_dir: RunsDir = RUNS
    tls: TlsFolder = None
    as_json: Json = False


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Show a job and its cluster until the end of the job or Ctrl-C."""
    if options.coordinator is not None and options.run_dir is None:
        shown = _screen(output, shell, once=options.once)
        reconnection = Reconnection(shell.clock, say=shown.say)
        _watch(options.coordinator, None, shown, shell, is_over=lambda _: options.once, reconnection=reconnection)
        return ExitStatus.OK
    folder = find_run(options.run_dir, runs_dir=options.runs_dir)
    record = _running(folder, shell)
    shown, there = _screen(output, shell, once=options.once), shell.alone() if record.local else shell

    def is_over(picture: Picture) -> bool:
        return options.once or picture.has_ended

    # A local coordinator ends with its run.
    reconnection = Reconnection(there.clock, say=shown.say, is_over=lambda: folder.read_result() is not None)
    try:
        with pointing_at_status(folder, shell):
            _watch(record.coordinator, JobId(record.job_id), shown, there, is_over=is_over, reconnection=reconnection)
    except Unavailable:
        if folder.read_result() is None:
            raise
    return ExitStatus.OK


def _watch(
    address: str,
    job_id: JobId | None,
    screen: Screen,
    shell: Shell,
    *,
    is_over: Callable[[Picture], bool],
    reconnection: Reconnection,
) -> None:
    contact = Contact(shell.clock)
    with closing(shell.connect(address)) as client, closing(screen):
        try:
            while True:
                try:
                    picture = _look(client, job_id)
                except (Unavailable, UnknownJob) as error:
                    reconnection.failed(error)
                    continue
                reconnection.succeeded()
                screen.show(picture)
                if is_over(picture):
                    return
                contact.saw(picture.status)
                shell.clock.sleep(REFRESH_SECONDS)
        except KeyboardInterrupt:
            return  # the usual way to quit


def _look(client: CoordinatorPort, job_id: JobId | None) -> Picture:
    status = client.invoke(GET_STATUS, GetStatusRequest(job_id))
    folder = Path(status.run_dir) if status.run_dir else None
    clock = None if status.clocks is None else int(status.clocks.global_clock)
    return Picture(
        status,
        all_members(client),
        () if folder is None else read_cuts(folder),
        () if folder is None else read_inactive(folder, clock),
    )


def _running(folder: RunFolder, shell: Shell) -> RunRecord:
    """Connect to the coordinator of the run.

    Raises:
        UserError: the run has ended, or has no job yet.
    """
    record, result = folder.read_record(), folder.read_result()
    where = shown_path(folder.path, shell.current)
    if result is not None:
        raise UserError(f"the run in {where} has ended ({result.state}); see its result with: hetpipe status {where}")
    if not record.job_id:
        raise UserError(f"the run in {where} has no job yet; its services are starting")
    return record


def _screen(output: Output, shell: Shell, *, once: bool) -> Screen:
    if once or output.machine is not None or not shell.is_screen(output.people):
        return _Pages(output, shell.current)
    from hetpipe.cli.look.top_screen import LiveScreen  # rich is needed here only

    return LiveScreen(output.people, shell.current)
