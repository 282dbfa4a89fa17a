"""Folders of runs, as runs leave them: live, finished, failed, rewound, with many virtual workers, or very long."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetpipe.observe.clock_curve import ClockReduction, clock_shard_file
from hetpipe.observe.down_sampled import update_index
from hetpipe.observe.metrics import WaveReduction, metrics_path
from hetpipe.observe.segments import SEGMENT_BYTES, packed_path, segment_path
from hetpipe.runs.run_folder import RunFolder, RunRecord
from hetpipe.values.conditions import ConditionKind
from hetpipe.values.events import (
    ConditionRaised,
    JobState,
    JobStatus,
    ProcessStatus,
    ProgressTable,
    QueuePlace,
    StageRow,
    Straggling,
    WorkerLost,
    WorkerRejoined,
)
from hetpipe.values.ids import (
    AgentId,
    Clock,
    DeviceId,
    Incarnation,
    JobId,
    LayerIndex,
    StageIndex,
    Term,
    VirtualWorkerIndex,
)
from hetpipe.values.plan import Plan, StagePlan, VirtualWorkerPlan
from hetpipe.values.wire import plain, to_json
from tests.cli.fakes import JOB_ID, RESULT, running_status, small_job, snapshot, table

STARTED = 1_795_000_000.0

#: Text that would be markup if it were not escaped.
HOSTILE = '<img src=x onerror="alert(1)">\'"</script>&'


def run_in(runs_dir: Path, name: str, *, started: float = STARTED, local: bool = True, **job: Any) -> Path:
    """A run that has just begun; a local one without processes."""
    path = runs_dir / name
    (path / "logs").mkdir(parents=True)
    folder = RunFolder(path)
    folder.write_job(small_job(**job))
    record = RunRecord(
        run_dir=str(path),
        name=name,
        host="elsewhere",
        started_wall=started,
        job_id=JOB_ID,
        coordinator="127.0.0.1:1",
        local=local,
    )
    folder.write_record(record)
    return path


def plan_of(num_workers: int, num_stages: int = 2) -> Plan:
    """Stages of two layers each, on devices of their own."""
    workers = tuple(
        VirtualWorkerPlan(
            VirtualWorkerIndex(vw),
            tuple(
                StagePlan(
                    AgentId(f"n{vw}"), DeviceId(f"n{vw}/{stage}"), LayerIndex(2 * stage), LayerIndex(2 * stage + 2)
                )
                for stage in range(num_stages)
            ),
        )
        for vw in range(num_workers)
    )
    return Plan(JobId("small-1"), Term(1), workers, (), 2)


def planned(path: Path, *, num_workers: int = 2, start: int = 0, num_samples: int = 640) -> None:
    """What the coordinator writes before training on `num_samples` samples an epoch."""
    path.mkdir(exist_ok=True)
    (path / "plan.json").write_text(to_json(Plan, plan_of(num_workers)))
    begun = {"clock": start // 8, "epoch": 0, "used": [], "minibatches": start, "samples": 4 * start}
    (path / "facts.json").write_text(json.dumps({"num_samples": num_samples, "eval_samples": 46, "start": begun}))


def trained(path: Path, *, num_workers: int = 2, waves: int = 40, first: int = 0, worse: float = 0.0) -> None:
    """Metrics and the clock shard's history of training; its loss ends worse than else by `worse`."""
    (path / "metrics").mkdir(exist_ok=True)
    (path / "history").mkdir(exist_ok=True)
    for vw in range(num_workers):
        lines = [wave_line(vw, wave, worse=worse * (wave - first) / waves) for wave in range(first, first + waves)]
        metrics_path(path, vw).write_bytes(b"".join(lines))
    commits = [commit_line(vw, wave) for wave in range(first, first + waves) for vw in range(num_workers)]
    clock_shard_file(path).write_bytes(b"".join(sorted(commits)))


def wave_line(vw: int, wave: int, *, worse: float = 0.0) -> bytes:
    """A line of `metrics/vw-V.jsonl`: four minibatches, with a loss that falls."""
    loss = 2.3 * math.exp(-wave / 60) + 0.1 + 0.05 * math.sin(wave * 1.7 + vw) + worse
    return (
        b'{"t":%.6f,"wave":%d,"p":%d,"minibatches":4,"samples":16,"weight":16,"loss":%.9f,"learning_rate":0.1,'
        b'"gradient_norm":null,"max_norm":null,"losses":{}}\n'
    ) % (100 + 0.1 * wave + 0.01 * vw, wave, 4 * wave + 4, loss)


def commit_line(vw: int, wave: int) -> bytes:
    """A line of the clock shard's history."""
    return b'{"t":%.6f,"term":1,"event":"commit","vw":%d,"incarnation":0,"wave":%d,"samples":16}\n' % (
        100 + 0.1 * wave + 0.09 * vw * (1 + wave % 3) / 64 / 3,
        vw,
        wave,
    )


def evaluated(path: Path, *minibatches: int, rewinds: int = 0, name: str = "accuracy", worse: float = 0.0) -> None:
    """Evaluations at these numbers of minibatches."""
    with (path / "evaluations.jsonl").open("a") as lines:
        for at in minibatches:
            values = {"loss": 2.0 * math.exp(-at / 400) + 0.15 + worse, name: 1 - 0.7 * math.exp(-at / 200) - worse}
            told = {
                "t": "2026-11-28T05:42:13Z",
                "epoch": 1,
                "clock": at // 8,
                "minibatches": at,
                "samples": 46,
                "rewinds": rewinds,
                "within_epoch": False,
                "whole": True,
                "values": values,
            }
            lines.write(json.dumps(told) + "\n")


def ended(path: Path, state: str = "finished", **values: Any) -> None:
    """The result of the command line."""
    RunFolder(path).write_result(state, {**RESULT, "samples": 1280, "run_dir": str(path), **values})


def pending_status(run_dir: Path) -> JobStatus:
    """What the coordinator says of a run that waits for devices."""
    needs = "needs 4 devices, one per stage, and 0 of 4 are free (job other-1 holds 4)"
    running = running_status(str(run_dir))
    return replace(running, state=JobState.PENDING, processes=(), clocks=None, queue=QueuePlace(2, needs, 5))


def finished(runs_dir: Path, name: str, *, started: float = STARTED, num_workers: int = 2, **job: Any) -> Path:
    """A whole run that has finished."""
    path = run_in(runs_dir, name, started=started, **job)
    planned(path, num_workers=num_workers)
    trained(path, num_workers=num_workers)
    evaluated(path, 80, 160, 240, 320)
    ended(path)
    log(path, "coordinator.log")
    return path


def failed(runs_dir: Path, name: str, sentence: str, *, started: float = STARTED) -> Path:
    """A run that failed after a while, with what had happened before."""
    path = run_in(runs_dir, name, started=started)
    planned(path)
    trained(path, waves=12)
    log(path, "coordinator.log")
    log(path, "vw-1-stage-0.log", level="error", event="stage_failed", sentence=sentence)
    RunFolder(path).write_result("failed", {"errors": [sentence], "error": "JobFailed"})
    return path


def rewound(runs_dir: Path, name: str) -> Path:
    """A run of 160 minibatches that went back to 80, and then on to 240."""
    path = run_in(runs_dir, name)
    planned(path, num_samples=480)
    trained(path, waves=20, worse=0.4)
    evaluated(path, 80)
    evaluated(path, 160, worse=0.2)
    planned(path / "rewind-1", start=80, num_samples=480)
    trained(path / "rewind-1", waves=20, first=10)
    evaluated(path, 160, 240, rewinds=1)
    ended(path, rewinds=1, samples=640)
    return path


def log(path: Path, name: str, **extra: object) -> None:
    """A log with a lost and a rejoined virtual worker, a condition, and a line of `extra`."""
    lost = WorkerLost(VirtualWorkerIndex(1), Incarnation(0), f"stage 0 was killed by SIGKILL {HOSTILE}")
    back = WorkerRejoined(VirtualWorkerIndex(1), Incarnation(1))
    full = ConditionRaised(ConditionKind.DISK_NEARLY_FULL, ("the disk of /runs",), "the disk of /runs is full", 1.0, 1)
    lines: list[Mapping[str, object]] = [{"event": "member_registered", "level": "info", "member": HOSTILE}]
    for event in (lost, back, full):
        values = plain(type(event), event)
        lines.append({**values, "event": values.pop("kind"), "level": event.severity, "job": JOB_ID})
    if extra:
        lines.append(extra)
    text = "".join(json.dumps({"t": "2026-11-28T05:42:11.143720Z", **line}) + "\n" for line in lines)
    (path / "logs" / name).write_text(text)


def status_of(run_dir: Path, num_workers: int = 2) -> JobStatus:
    """What the coordinator says of a run that trains, with a straggler."""
    clocks = [20 + vw % 3 for vw in range(num_workers)]
    processes = tuple(
        ProcessStatus("stage", stage, VirtualWorkerIndex(vw), "n0", 100 + vw, "ready")
        for vw in range(num_workers)
        for stage in range(2)
    )
    whole: ProgressTable = table(*clocks, staleness=1)
    rows = tuple(
        replace(
            row,
            waiting_share=(row.vw % 5) / 6,
            memory_bytes=(3 + row.vw % 4) << 30,
            loss=1.1 + row.vw % 7 / 50,
            stages=tuple(
                StageRow(LayerIndex(3 * at), LayerIndex(3 * at + 3), DeviceId(f"node-{row.vw}/{at}")) for at in range(2)
            ),
        )
        for row in whole.rows
    )
    slow = (Straggling(VirtualWorkerIndex(0), StageIndex(1), 2.4),)
    progress = replace(whole, rows=rows, slow=slow, straggler=VirtualWorkerIndex(0), samples=800, total_samples=1280)
    clocks_now = replace(snapshot(*clocks), published=Clock(20))
    return replace(running_status(str(run_dir)), processes=processes, progress=progress, clocks=clocks_now)


def long_run(
    runs_dir: Path,
    name: str,
    *,
    minibatches: int = 1_000_000,
    num_workers: int = 2,
    segment_bytes: int = SEGMENT_BYTES,
) -> Path:
    """A finished run of many minibatches: histories in compressed segments with an index, as processes leave them."""
    path = run_in(runs_dir, name)
    planned(path, num_workers=num_workers)
    waves = minibatches // (4 * num_workers)
    for folder in ("metrics", "history"):
        (path / folder).mkdir()
    for vw in range(num_workers):
        _segments(metrics_path(path, vw), (wave_line(vw, wave) for wave in range(waves)), segment_bytes)
        update_index(metrics_path(path, vw), WaveReduction())
    commits = (commit_line(vw, wave) for wave in range(waves) for vw in range(num_workers))
    _segments(clock_shard_file(path), commits, segment_bytes)
    update_index(clock_shard_file(path), ClockReduction())
    evaluated(path, *range(minibatches // 100, minibatches + 1, minibatches // 100))
    ended(path)
    return path


def _segments(path: Path, lines: Iterable[bytes], segment_bytes: int) -> None:
    number, held, size = 0, list[bytes](), 0
    for line in lines:
        held.append(line)
        size += len(line)
        if size > segment_bytes:
            packed_path(path, number).write_bytes(gzip.compress(b"".join(held), compresslevel=1))
            number, held, size = number + 1, [], 0
    segment_path(path, number).write_bytes(b"".join(held))
