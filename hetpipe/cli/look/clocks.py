"""`hetpipe clocks`: the clocks of a run, once or at every change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from hetpipe.cli.options import Json, NewestJobOf, RunDir, RunsDir, TlsFolder
from hetpipe.errors import Unavailable, UnknownJob, UserError
from hetpipe.report.text import columns, count, pairs
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.reconnection import Reconnection
from hetpipe.runs.run_folder import RUNS, RunFolder, find_run
from hetpipe.runs.shell import Shell
from hetpipe.runs.status import clocks_of, pointing_at_status
from hetpipe.values.ids import JobId
from hetpipe.values.run import ClockSnapshot
from hetpipe.wire.calls import GET_CLOCKS, GetClocksRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Show the clocks of a run. Local clocks count the waves that each virtual worker has committed."""

    run_dir: RunDir = None
    watch: Annotated[
        bool, typer.Option("--watch", help="Show every change, one line each, until the end of the run.")
    ] = False
    coordinator: NewestJobOf = None
    runs_dir: RunsDir = RUNS
    tls: TlsFolder = None
    as_json: Json = False


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Print the clocks of a run; with --watch after every change, until its end."""
    if options.watch:
        for found in _watched(options, output, shell):
            output.answer(found.to_json(), found.line())
        return ExitStatus.OK
    if options.coordinator is not None and options.run_dir is None:
        found = clocks_of_coordinator(options.coordinator, shell)
    else:
        found = clocks_of_run(find_run(options.run_dir, runs_dir=options.runs_dir), shell)
    output.answer(found.to_json(), *found.lines())
    return ExitStatus.OK


def _watched(options: Options, output: Output, shell: Shell) -> Iterator[Clocks]:
    if options.coordinator is not None and options.run_dir is None:
        return watch_coordinator(options.coordinator, shell, Reconnection(shell.clock, say=output.note))
    return watch_run(find_run(options.run_dir, runs_dir=options.runs_dir), shell, output.note)


@dataclass(frozen=True, slots=True)
class Clocks:
    """Local clocks and the global clock; after the end of a run, only these are known."""

    local: dict[int, int]
    global_clock: int | None
    snapshot: ClockSnapshot | None = None

    def to_json(self) -> dict[str, Any]:
        """The object of `clocks --json`."""
        values: dict[str, Any] = {
            "clocks": {str(vw): clock for vw, clock in self.local.items()},
            "global_clock": self.global_clock,
        }
        if self.snapshot is not None:
            values |= {
                "staged": {str(vw): clock for vw, clock in self.snapshot.staged.items()},
                "durable": {str(vw): clock for vw, clock in self.snapshot.durable.items()},
                "applied": list(self.snapshot.applied),
                "published": self.snapshot.published,
                "max_clock_distance": self.snapshot.max_distance,
                "epoch": self.snapshot.epoch,
                "minibatches": self.snapshot.minibatches,
                "samples": self.snapshot.samples,
                "barrier": self.snapshot.barrier,
                "barrier_reason": self.snapshot.barrier_reason,
                "term": self.snapshot.term,
            }
        return values

    def lines(self) -> list[str]:
        """The clocks as text for people."""
        marks = self._marks()
        rows = [
            [
                str(vw),
                str(clock),
                self._ahead(clock),
                *(str(clocks.get(vw, "-")) for clocks in marks.values()),
            ]
            for vw, clock in self.local.items()
        ]
        lines = columns([["worker", "local clock", "ahead", *marks], *rows])
        lines.append(f"global clock {self.global_clock}")
        if self.snapshot is not None:
            lines.append(snapshot_text(self.snapshot))
            if self.snapshot.applied:
                lines.append(applied_text(self.snapshot))
        return lines

    def line(self) -> str:
        """The clocks as one `key=value` line."""
        published = None if self.snapshot is None else self.snapshot.published
        values: dict[str, object] = {"global_clock": self.global_clock, "published": published}
        for vw, clock in self.local.items():
            values[f"vw{vw}.clock"] = clock
            values |= {f"vw{vw}.{name}": clocks.get(vw) for name, clocks in self._marks().items()}
        return pairs(values)

    def _ahead(self, clock: int) -> str:
        """Waves ahead of the slowest; a worker that left before the end is behind the global clock."""
        distance = clock - (self.global_clock or 0)
        return str(distance) if distance >= 0 else "-"

    def _marks(self) -> dict[str, dict[int, int]]:
        """The other reported clocks, by name and virtual worker."""
        if self.snapshot is None:
            return {}
        marks = {"staged": self.snapshot.staged, "durable": self.snapshot.durable}
        return {name: {int(vw): int(clock) for vw, clock in clocks.items()} for name, clocks in marks.items() if clocks}


def applied_text(snapshot: ClockSnapshot) -> str:
    """Shards with a failing disk, and the consequence."""
    shards = ", ".join(str(shard) for shard in snapshot.applied)
    some = "parameter server" if len(snapshot.applied) == 1 else "parameter servers"
    return (
        f"{some} {shards} cannot persist staged waves (level applied): a restart would rewind the run to a checkpoint"
    )


def snapshot_text(snapshot: ClockSnapshot) -> str:
    """The clock shard's state beyond local clocks."""
    why = f" ({snapshot.barrier_reason})" if snapshot.barrier_reason else ""
    return (
        f"published clock {snapshot.published}, next barrier at {snapshot.barrier}{why}, epoch "
        f"{snapshot.epoch}, largest distance so far {snapshot.max_distance}, {count(snapshot.samples, 'sample')}"
    )


def clocks_of_run(folder: RunFolder, shell: Shell) -> Clocks:
    """The clocks of the run in `folder`; after its end, the final ones.

    Raises:
        UserError: it is not a run, or has no clocks.
    """
    record, result = folder.read_record(), folder.read_result()
    if result is not None:
        local, global_clock = clocks_of(result)
        if not local:
            raise UserError(
                f"the run in {folder.path} {result.state} without clocks; see `hetpipe status` for the reason"
            )
        return Clocks(local, global_clock)
    if not record.job_id:
        raise UserError(f"the run in {folder.path} has no clocks yet; its services are starting")
    there = shell.alone() if record.local else shell
    with pointing_at_status(folder, shell):
        return clocks_of_coordinator(record.coordinator, there, JobId(record.job_id))


def clocks_of_coordinator(address: str, shell: Shell, job_id: JobId | None = None) -> Clocks:
    """The clocks of a job, by default the newest one.

    Raises:
        UserError: the job has reported no clocks yet.
        Unavailable: the coordinator does not answer.
        UnknownJob: there is no such job.
    """
    client = shell.connect(address)
    try:
        snapshot = client.invoke(GET_CLOCKS, GetClocksRequest(job_id)).clocks
    finally:
        client.close()
    if snapshot is None:
        raise UserError("the run has no clocks yet; wait for them with: hetpipe clocks --watch")
    return _of(snapshot)


def watch_run(folder: RunFolder, shell: Shell, say: Callable[[str], None]) -> Iterator[Clocks]:
    """Yield the clocks of the run in `folder` now and after every change, until its end.

    Args:
        folder: of the run.
        shell: the command's environment.
        say: called when the coordinator is unreachable for a while.

    Raises:
        UserError: it is not a run.
    """
    record = folder.read_record()
    if folder.read_result() is not None:
        yield clocks_of_run(folder, shell)
        return
    there = shell.alone() if record.local else shell
    # A local coordinator ends with its run, in the middle of this stream.
    reconnection = Reconnection(there.clock, say=say, is_over=lambda: folder.read_result() is not None)
    try:
        with pointing_at_status(folder, shell):
            yield from watch_coordinator(record.coordinator, there, reconnection, JobId(record.job_id))
    except (Unavailable, UnknownJob):
        if folder.read_result() is None:
            raise


def watch_coordinator(
    address: str, shell: Shell, reconnection: Reconnection, job_id: JobId | None = None
) -> Iterator[Clocks]:
    """Yield the clocks of a job, by default the newest one, now and after every change, until its end.

    Raises:
        Unavailable: the coordinator does not answer.
        UnknownJob: there is no such job.
    """
    with closing(shell.connect(address)) as client:
        while True:
            try:
                for snapshot in client.watch_clocks(job_id):
                    reconnection.succeeded()
                    yield _of(snapshot)
            except (Unavailable, UnknownJob) as error:
                reconnection.failed(error)
            else:
                return


def _of(snapshot: ClockSnapshot) -> Clocks:
    return Clocks({int(vw): int(clock) for vw, clock in snapshot.local.items()}, int(snapshot.global_clock), snapshot)
