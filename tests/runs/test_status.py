"""The status of a run: from its coordinator, from what it left, or honestly unknown."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hetpipe.errors import PeerUnreachable, UnknownJob
from hetpipe.report.text import rate
from hetpipe.runs.run_folder import RunFolder, RunRecord
from hetpipe.runs.status import RunStatus, is_service, status_of_coordinator, status_of_run
from hetpipe.server.decisions_file import append_decision
from hetpipe.values.decisions import DecisionMoment, MoveDecision
from hetpipe.values.events import Evaluated, EvaluationSummary, JobState, JobStatus, Straggling, WorkerStatus
from hetpipe.values.freezing import FrozenSince
from hetpipe.values.ids import Clock, Incarnation, JobId, StageIndex
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.life_state import LifeState
from tests.checkpoints import write_checkpoint
from tests.cli.fakes import JOB_ID, RESULT, FakeCoordinator, running_status, shell_with, table
from tests.polling import wait_until
from tests.support.fake_clock import FakeClock

#: What brings back whoever is to come back.
AWAITED = "it is restarted after a back-off, once its agents and all parameter servers are available"

#: More than any process id.
NO_PID = 1 << 30


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    return RunFolder.create(Path("run"), name="small", clock=FakeClock())


def record(folder: RunFolder, **changes: Any) -> RunRecord:
    whole = RunRecord(
        run_dir=str(folder.path),
        name="small",
        host=socket.gethostname(),
        started_wall=1.0,
        job_id=JOB_ID,
        coordinator="127.0.0.1:7300",
        pids={"hetpipe": NO_PID, "agent": NO_PID, "parameter-server-0": NO_PID, "coordinator": NO_PID},
    )
    return replace(whole, **changes)


class Away(FakeCoordinator):
    """A coordinator that does not answer."""

    def status(self, job_id: JobId | None = None) -> JobStatus:
        raise PeerUnreachable("gone")


class Stranger(FakeCoordinator):
    """A coordinator that never heard of the job."""

    def status(self, job_id: JobId | None = None) -> JobStatus:
        raise UnknownJob("not known here")


def ask(folder: RunFolder, coordinator: FakeCoordinator) -> RunStatus:
    return status_of_run(folder, shell_with(coordinator, folder.path.parent))


def test_a_running_run_is_asked_of_its_coordinator(folder: RunFolder) -> None:
    folder.write_record(record(folder))
    status = ask(folder, FakeCoordinator(status=running_status(str(folder.path))))
    assert status.to_json() == {
        "run_dir": str(folder.path),
        "state": "running",
        "processes": [
            {"role": "coordinator", "index": 0, "vw": None, "host": "127.0.0.1", "pid": 11, "state": "up"},
            {"role": "parameter_server", "index": 0, "vw": None, "host": "127.0.0.1", "pid": 12, "state": "up"},
            {"role": "agent", "index": 0, "vw": None, "host": "127.0.0.1", "pid": 13, "state": "up"},
            {"role": "stage", "index": 0, "vw": 0, "host": "127.0.0.1", "pid": 14, "state": "ready"},
            {"role": "stage", "index": 0, "vw": 1, "host": "127.0.0.1", "pid": 0, "state": "starting"},
        ],
        "clocks": {"0": 4, "1": 3},
        "global_clock": 3,
        "workers": [],
        "straggler": None,
        "slow": [],
        "rewinds": 0,
        "conditions": [],
        "job_id": "small-1",
        "queue": None,
        "proof": None,
        "evaluations": None,
        "speed": None,
        "frozen": [],
        "inactive": [],
        "cache": None,
        "checkpoints": None,
        "pipelines": [],
        "cuts": [],
    }
    assert status.lines(folder.path.parent) == [
        "small: running (run)",
        "clocks: global 3; virtual worker 0: 4, virtual worker 1: 3",
        "",
        "role              index  vw  host       pid  state",
        "coordinator           0   -  127.0.0.1   11  up",
        "parameter_server      0   -  127.0.0.1   12  up",
        "agent                 0   -  127.0.0.1   13  up",
        "stage                 0   0  127.0.0.1   14  ready",
        "stage                 0   1  127.0.0.1    -  starting",
    ]


def test_the_stages_and_the_moves_of_a_run_that_trains(folder: RunFolder) -> None:
    folder.write_record(record(folder))
    move = MoveDecision(DecisionMoment(Clock(3)), "move", Vw(1), (2, 3), 1, "operator", "asked for", 0.5, 1.0)
    append_decision(folder.path, move)
    picture = table(4, 3)
    stages = (
        replace(picture.rows[1].stages[0], memory=("swap",), memory_bytes=3 << 28, device_bytes=12 << 30),
        replace(picture.rows[1].stages[1], memory=("keep", "recompute", "recompute", "keep"), memory_bytes=1 << 20),
    )
    rows = (picture.rows[0], replace(picture.rows[1], stages=stages, version=1))
    running = replace(running_status(str(folder.path)), progress=replace(picture, rows=rows))
    status = ask(folder, FakeCoordinator(status=running))
    lines = status.lines(folder.path.parent)
    assert "virtual worker 0: layers 0 on n0/0, 1-4 on n0/1" in lines
    layers = "0 on n0/2 (swap), 1-4 on n0/3 (layers 1 keep, 2–3 recompute, 4 keep) (plan version 1)"
    assert f"virtual worker 1: layers {layers}; memory 0.8 of 12 GiB, 1 MiB" in lines
    assert "clock 3: virtual worker 1 is cut 2-3, by operator; predicted +50 %" in lines
    shown = status.to_json()
    assert shown["pipelines"][1]["stages"][0]["memory"] == ["swap"]
    assert (shown["cuts"][0]["clock"], shown["cuts"][0]["predicted_gain"]) == (3, 0.5)


EVALUATIONS = EvaluationSummary(
    3,
    best=Evaluated(Clock(6), 1, 46, {"accuracy": 0.75, "loss": 0.5}, minibatches=24),
    last=Evaluated(Clock(18), 3, 46, {"accuracy": 0.5, "loss": math.nan}, minibatches=72, rewinds=1),
)


def test_the_last_and_the_best_evaluation_are_told(folder: RunFolder) -> None:
    folder.write_record(record(folder))
    running = replace(running_status(str(folder.path)), evaluations=EVALUATIONS)
    status = ask(folder, FakeCoordinator(status=running))
    assert status.to_json()["evaluations"] == EVALUATIONS.to_object()
    assert status.to_json()["evaluations"]["last"]["values"] == {"accuracy": 0.5, "loss": None}
    assert status.lines(folder.path.parent)[2] == (
        "evaluation: loss -, accuracy 0.5000 after epoch 3, clock 18 (3 so far); "
        "least loss 0.5000 after epoch 1, clock 6"
    )


def test_an_evaluation_within_an_epoch_is_told_with_what_it_leaves_out(folder: RunFolder) -> None:
    folder.write_record(record(folder))
    within = Evaluated(Clock(18), 4, 8, {"loss": 0.25}, minibatches=72, within_epoch=True, whole=False)
    line = "evaluation: loss 0.2500 on 8 samples in epoch 4, clock 18 (3 so far)"
    for told, expected in (
        (replace(EVALUATIONS, best=None, last=within), line),
        (replace(EVALUATIONS, last=within), f"{line}; least loss 0.5000 after epoch 1, clock 6"),
    ):
        status = ask(folder, FakeCoordinator(status=replace(running_status(str(folder.path)), evaluations=told)))
        assert status.to_json()["evaluations"] == told.to_object()
        assert status.lines(folder.path.parent)[2] == expected


def test_the_evaluations_of_an_ended_run_are_those_of_its_result(folder: RunFolder) -> None:
    folder.write_record(record(folder))
    folder.write_result(JobState.FINISHED, RESULT)
    status = ask(folder, Away())
    listed = RESULT["evaluations"]["listed"]
    assert status.to_json()["evaluations"] == {"number": 2, "best": listed[0], "last": listed[1]}


FROZEN = (FrozenSince(Clock(1), 1, 1), FrozenSince(Clock(3), 2, 4))


def test_frozen_layers_are_shown_while_a_job_trains_and_when_it_has_ended(folder: RunFolder) -> None:
    folder.write_record(record(folder))
    running = running_status(str(folder.path))
    assert running.clocks is not None
    coordinator = FakeCoordinator(status=replace(running, clocks=replace(running.clocks, frozen=FROZEN)))
    line = "frozen: layer 0 (1 with parameters) from clock 1 on; layers 0-3 (2 with parameters) from clock 3 on"
    status = ask(folder, coordinator)
    assert status.lines(folder.path.parent)[2] == line
    told = [{"clock": 1, "frozen": 1, "layers": 1}, {"clock": 3, "frozen": 2, "layers": 4}]
    assert status.to_json()["frozen"] == told
    cache = {"reads": 30, "computed": 10, "read_bytes": 4096, "stopped": "the disk is full"}
    folder.write_result(JobState.FINISHED, {**RESULT, "frozen": told, "cache": cache})
    ended = ask(folder, Away())
    assert ended.frozen == FROZEN
    assert ended.to_json()["cache"] == {**cache, "kept_bytes": 0}
    read = "cache: 30 minibatches read (4 KiB), 10 computed by stages with frozen layers"
    assert f"{read}; nothing more is kept: the disk is full" in ended.lines(folder.path)
    assert line in ended.lines(folder.path.parent)


def test_lives_and_whoever_holds_the_others_up_are_told(folder: RunFolder) -> None:
    folder.write_record(record(folder))
    workers = (
        WorkerStatus(Vw(0), Incarnation(0), 0, LifeState.READY),
        WorkerStatus(Vw(1), Incarnation(1), 1, LifeState.READY),
        WorkerStatus(Vw(2), Incarnation(4), 5, LifeState.OUT),
        WorkerStatus(Vw(3), Incarnation(0), 0, LifeState.LEAVING),
        WorkerStatus(Vw(4), Incarnation(0), 0, LifeState.AWAITING),
    )
    running = replace(
        running_status(str(folder.path)),
        workers=workers,
        progress=replace(table(4, 3), straggler=Vw(1), slow=(Straggling(Vw(1), StageIndex(0), 9.84),)),
        processes=(),
        rewinds=2,
    )
    status = ask(folder, FakeCoordinator(status=running))
    assert status.lines(folder.path.parent)[2:] == [
        "speed: 300 samples/s",
        "virtual worker 0: layers 0 on n0/0, 1-4 on n0/1",
        "virtual worker 1: layers 0 on n0/2, 1-4 on n0/3",
        "the job was rewound to a checkpoint 2 times",
        "virtual worker 1: life 2, lost 1 time",
        "virtual worker 2: life 5, lost 5 times, out: `hetpipe workers add 2` restarts it",
        "virtual worker 3: life 1, leaving",
        f"virtual worker 4: life 1, awaiting: {AWAITED}",
        "the others mostly wait for virtual worker 1, which is the slowest",
        "stage 0 of virtual worker 1 takes 9.8 times as long as planned",
    ]
    assert status.to_json()["workers"][1] == {"vw": 1, "incarnation": 1, "deaths": 1, "state": "ready"}
    assert status.to_json()["straggler"] == 1
    assert status.to_json()["slow"] == [{"vw": 1, "stage": 0, "factor": 9.84}]

    starting = replace(running, state=JobState.STARTING)
    status = ask(folder, FakeCoordinator(status=starting))
    assert (status.straggler, status.slow) == (None, ()), "the last picture is of what came before the rewind"
    assert "virtual worker 2: life 5, lost 5 times, out" in status.lines(folder.path.parent)


def test_an_ended_run_tells_its_result(folder: RunFolder) -> None:
    folder.write_record(record(folder))
    folder.write_result("finished", RESULT)
    status = ask(folder, Away())
    assert (status.state, status.clocks, status.global_clock) == ("finished", {0: 6, 1: 6}, 6)
    folder.write_result("failed", {"errors": ["stage 0 was killed"]})
    status = ask(folder, Away())
    assert (status.state, status.remark, status.clocks) == ("failed", "stage 0 was killed", {})
    assert status.rewinds == 0
    (folder.path / "rewind-1").mkdir()
    assert ask(folder, Away()).rewinds == 1, "a run without a result went back, too"


def test_a_run_whose_history_is_being_checked_has_not_died(folder: RunFolder) -> None:
    code = "import sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-S", "-c", code, "hetpipe"], stdin=subprocess.PIPE) as process:
        folder.write_record(record(folder, pids={"hetpipe": process.pid, "coordinator": NO_PID}))
        here = Path(f"/proc/{process.pid}/cmdline")
        wait_until(lambda: b"hetpipe" in here.read_bytes(), timeout_seconds=10.0, what="its command line")
        assert ask(folder, Away()).state == "ending"
        process.communicate()
    assert ask(folder, Away()).state == "died"


@pytest.mark.parametrize("coordinator", [Away(), Stranger()])
def test_a_run_whose_processes_are_gone_has_died(folder: RunFolder, coordinator: FakeCoordinator) -> None:
    folder.write_record(record(folder))
    status = ask(folder, coordinator)
    assert status.state == "died"
    assert status.remark == "its processes are gone and it has no result; it had no complete checkpoint yet"
    assert [(process.role, process.state) for process in status.processes] == [
        ("coordinator", "gone"),
        ("parameter_server", "gone"),
        ("agent", "gone"),
    ]
    write_checkpoint(folder.path, 3)
    assert ask(folder, coordinator).remark.endswith("resume with: hetpipe train --resume run")


def test_a_run_on_a_cluster_is_asked_there_even_after_its_end(folder: RunFolder) -> None:
    folder.write_record(record(folder, local=False))
    folder.write_result("finished", RESULT)
    assert ask(folder, FakeCoordinator(status=running_status("x"))).processes
    assert ask(folder, Away()).state == "finished"


def test_a_cluster_that_does_not_answer_leaves_the_state_unknown(folder: RunFolder) -> None:
    folder.write_record(record(folder, local=False, pids={}))
    status = ask(folder, Away())
    assert (status.state, status.remark) == ("unknown", "the coordinator at 127.0.0.1:7300 does not answer")
    folder.write_record(record(folder, host="another-host"))
    assert ask(folder, Away()).state == "unknown"


def test_a_run_that_is_coming_up(folder: RunFolder) -> None:
    folder.write_record(record(folder, job_id="", coordinator="", pids={"hetpipe": os.getpid()}))
    assert ask(folder, Away()).state == "starting"
    folder.write_record(record(folder, job_id="", coordinator="", pids={"hetpipe": NO_PID}))
    assert ask(folder, Away()).state == "died"


def test_a_coordinator_that_hangs(folder: RunFolder) -> None:
    code = "import sys; sys.stdin.read()"
    log = folder.logs / "coordinator.log"
    with subprocess.Popen([sys.executable, "-S", "-c", code, str(log)], stdin=subprocess.PIPE) as process:
        folder.write_record(record(folder, pids={"coordinator": process.pid}))
        there = partial(is_service, process.pid, str(folder.path))
        wait_until(there, timeout_seconds=10.0, what="command line of the new process")
        status = ask(folder, Away())
        process.communicate()
    assert (status.state, status.processes[0].state) == ("unknown", "up")
    assert not is_service(process.pid, str(folder.path))
    assert not is_service(os.getpid(), str(folder.path)), "a process that has nothing to do with the run"


def test_a_coordinator_without_a_job(tmp_path: Path) -> None:
    status = status_of_coordinator("127.0.0.1:7300", shell_with(FakeCoordinator(), tmp_path))
    assert status.state == "no job"
    assert status.lines(tmp_path) == ["run: no job"]


def test_the_speed_is_told_in_samples_tokens_and_as_a_share_of_the_peak(folder: RunFolder) -> None:
    folder.write_record(record(folder))
    picture = replace(table(4, 3), tokens_per_second=38_400.0, model_flops_utilisation=0.412)
    status = ask(folder, FakeCoordinator(status=replace(running_status(str(folder.path)), progress=picture)))
    assert "speed: 300 samples/s, 38400 tokens/s, 41.2 % MFU" in status.lines(folder.path.parent)
    assert status.to_json()["speed"] == {
        "samples_per_second": picture.samples_per_second,
        "tokens_per_second": 38_400.0,
        "model_flops_utilisation": 0.412,
        "model_flops_utilisation_reason": None,
    }


def test_why_there_is_no_utilisation_is_told_also_when_the_run_has_ended(folder: RunFolder) -> None:
    folder.write_record(record(folder))
    reason = "no peak is known of ACME"
    picture = replace(table(4, 3), model_flops_utilisation_reason=reason)
    running = ask(folder, FakeCoordinator(status=replace(running_status(str(folder.path)), progress=picture)))
    assert f"speed: 300 samples/s; no MFU: {reason}" in running.lines(folder.path.parent)

    values = {**RESULT, "model_flops_utilisation_reason": reason}
    folder.write_result("finished", values)
    ended = ask(folder, Away())
    assert f"speed: {rate(RESULT['samples_per_second'])} samples/s; no MFU: {reason}" in ended.lines(folder.path.parent)

    earlier = {key: value for key, value in values.items() if not key.startswith(("model_flops", "tokens_per"))}
    folder.write_result("finished", earlier)
    assert f"speed: {rate(RESULT['samples_per_second'])} samples/s" in ask(folder, Away()).lines(folder.path.parent)
