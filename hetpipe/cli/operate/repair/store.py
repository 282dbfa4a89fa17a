"""`hetpipe repair`: give a store, or the state of a parameter server, numbers that a coordinator can lead under."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.server.coordinator.store_repair import CounterRepair, StoreRepair, repair_store
from hetpipe.server.shard.job_state import StateRepair, repair_state
from hetpipe.storage.redis_access import access_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """As the coordinator takes them, and the numbers to set."""

    url: str
    password_file: Path | None
    ca: Path | None
    tls: Path | None
    fence: int | None
    term: int | None


def store(options: StoreOptions, output: Output) -> ExitStatus:
    """Repair the store of a coordinator."""
    access = access_of(options.url, password_file=options.password_file, ca=options.ca, tls=options.tls)
    found = repair_store(options.url, access, fence=options.fence, term=options.term)
    output.answer(asdict(found), *_lines_of_store(found))
    return ExitStatus.OK


def state(folders: Sequence[Path], output: Output, *, forget_fence: bool) -> ExitStatus:
    """Repair the folders of parameter servers."""
    repairs = [(folder, repair_state(folder, forget_fence=forget_fence)) for folder in folders]
    answer = [{"folder": str(folder), **asdict(found)} for folder, found in repairs]
    lines = [line for folder, found in repairs for line in _lines_of_state(folder, found)]
    output.answer({"folders": answer}, *lines)
    return ExitStatus.OK


def _lines_of_store(found: StoreRepair) -> Iterator[str]:
    yield _line_of_counter(found.fence)
    yield _line_of_counter(found.term)
    records = found.records
    if records.jobs:
        yield f"jobs that no index named, and one does again: {', '.join(records.jobs)}"
    if records.members:
        yield f"members that no index named, and one does again: {', '.join(records.members)}"
    if records.dropped_jobs:
        yield f"jobs whose time was over, or whose records are lost: {', '.join(records.dropped_jobs)}"
    if records.renumbered:
        yield f"jobs whose events have other numbers now: {', '.join(records.renumbered)}"
    for job_id in records.lost_jobs:
        yield f"job {job_id}: its record is lost; unless a parameter server still tells of it, hand it in again"
    for key in records.unreadable:
        yield f"{key}: no job or member of this version; it was left as it is"
    if not found:
        yield "nothing had to be repaired"
    elif found.fence.is_changed:
        yield (
            "restart every agent and every parameter server, those with --state after `hetpipe repair state DIR`, and "
            "then the coordinator: whoever has seen the old number obeys no lower one"
        )


def _line_of_counter(counter: CounterRepair) -> str:
    before = "no number" if counter.before is None else str(counter.before)
    return f"{counter.name}: {before}" + (f", now {counter.after}" if counter.is_changed else "")


def _lines_of_state(folder: Path, found: StateRepair) -> Iterator[str]:
    fence = "is none that a lead can have" if found.fence is None else str(found.fence)
    yield f"{folder}: fence {fence}" + (", forgotten" if found.is_fence_forgotten else "")
    for job in found.jobs:
        resume = f"; resume it from {job.run_dir}" if job.run_dir else ""
        yield f"{folder}: job {job.job_id} in term {job.term}, which no coordinator accepts, deleted{resume}"
