"""`hetpipe repair store`: restore valid counters and indices in the coordinator's store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetpipe.cli.options import Json
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell
from hetpipe.storage.redis_access import access_of
from hetpipe.wire.tls import TLS_VARIABLE

if TYPE_CHECKING:
    from hetpipe.server.coordinator.store_repair import CounterRepair, StoreRepair


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Repair the coordinator's store. Counters and indices; every coordinator must be stopped."""

    url: Annotated[str, typer.Option("--store", metavar="URL", help="The coordinator's Redis, its option --store.")]
    password_file: Annotated[
        Path | None, typer.Option("--store-password-file", metavar="FILE", help="Its password is the text in FILE.")
    ] = None
    ca: Annotated[
        Path | None, typer.Option("--store-ca", metavar="FILE", help="Authority that signed its certificate.")
    ] = None
    tls: Annotated[
        Path | None,
        typer.Option(
            "--tls", metavar="DIR", envvar=TLS_VARIABLE, help="Certificate to show to Redis: the coordinator's folder."
        ),
    ] = None
    fence: Annotated[
        int | None,
        typer.Option(metavar="N", help="Set the fence: the next lead is above N.  [default: kept if valid]"),
    ] = None
    term: Annotated[
        int | None,
        typer.Option(metavar="N", help="Set the term: the next plan is above N.  [default: kept if valid]"),
    ] = None
    as_json: Json = False


def run(options: Options, output: Output, _shell: Shell) -> ExitStatus:
    """Repair the store of a coordinator."""
    from hetpipe.server.coordinator.store_repair import repair_store  # redis is slow to import

    access = access_of(options.url, password_file=options.password_file, ca=options.ca, tls=options.tls)
    found = repair_store(options.url, access, fence=options.fence, term=options.term)
    output.answer(asdict(found), *_lines_of_store(found))
    return ExitStatus.OK


def _lines_of_store(found: StoreRepair) -> Iterator[str]:
    yield _line_of_counter(found.fence)
    yield _line_of_counter(found.term)
    records = found.records
    if records.jobs:
        yield f"jobs added to the index: {', '.join(records.jobs)}"
    if records.members:
        yield f"members added to the index: {', '.join(records.members)}"
    if records.dropped_jobs:
        yield f"jobs removed from the index, expired or without a record: {', '.join(records.dropped_jobs)}"
    if records.renumbered:
        yield f"jobs with renumbered events: {', '.join(records.renumbered)}"
    for job_id in records.lost_jobs:
        yield f"job {job_id}: its record is lost; submit it again, unless a parameter server still reports it"
    for key in records.unreadable:
        yield f"{key}: not a job or member of this version; left unchanged"
    if not found:
        yield "no repairs needed"
    elif found.fence.is_changed:
        yield (
            "restart every agent and every parameter server, those with --state after `hetpipe repair state DIR`, and "
            "then the coordinator: processes that have seen the old number reject a lower one"
        )


def _line_of_counter(counter: CounterRepair) -> str:
    before = "no number" if counter.before is None else str(counter.before)
    return f"{counter.name}: {before}" + (f", now {counter.after}" if counter.is_changed else "")
