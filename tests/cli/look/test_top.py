"""`hetpipe top`: asked again and again, on a terminal, in a pipe, as JSON."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hetpipe.cli.app import app
from hetpipe.cli.look.top import REFRESH_SECONDS, Options, Picture, run
from hetpipe.errors import PeerUnreachable
from hetpipe.runs.active_layers import InactiveSince
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.run_folder import RunFolder, RunRecord
from hetpipe.runs.shell import Shell
from hetpipe.values.events import Evaluated, EvaluationSummary, JobState, JobStatus, Straggling, WorkerStatus
from hetpipe.values.freezing import FrozenSince
from hetpipe.values.ids import Clock, Incarnation, JobId, StageIndex, VirtualWorkerIndex
from hetpipe.values.life_state import LifeState
from hetpipe.values.members import Member
from hetpipe.values.run import CacheUse
from hetpipe.values.wire import plain
from tests.cli.fakes import JOB_ID, MEMBERS, FakeCoordinator, running_status, shell_with, table
from tests.support.fake_clock import FakeClock

ADDRESS = "127.0.0.1:7300"


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def running(run_dir: str = "", *clocks: int) -> JobStatus:
    picture = table(*(clocks or (4, 3)))
    rows = tuple(replace(row, memory_bytes=(row.vw + 1) << 20) for row in picture.rows)
    return replace(running_status(run_dir), progress=replace(picture, rows=rows))


def test_frozen_layers_are_shown() -> None:
    status = running()
    assert status.clocks is not None
    frozen = (FrozenSince(Clock(3), 2, 4),)
    assert status.progress is not None
    progress = replace(status.progress, cache=CacheUse(reads=30, computed=10, read_bytes=4096, kept_bytes=2048))
    picture = Picture(replace(status, clocks=replace(status.clocks, frozen=frozen), progress=progress), ())
    cached = "cache: 30 minibatches read (4 KiB), 10 computed by stages with frozen layers, 2 KiB kept"
    assert cached in picture.lines(Path.cwd())
    assert "frozen: layers 0-3 (2 with parameters) from clock 3 on" in picture.lines(Path.cwd())
    assert picture.to_json()["clocks"]["frozen"] == [{"clock": 3, "frozen": 2, "layers": 4}]


def test_inactive_layers_are_shown() -> None:
    picture = Picture(running(), (), (), (InactiveSince(4, (1, 2), ("a1", "a2")),))
    assert "inactive: layers 1-2 (a1, a2) from clock 4 on" in picture.lines(Path.cwd())
    only = {"clock": 4, "layers": (1, 2), "names": ("a1", "a2"), "fresh": (), "fresh_names": ()}
    assert picture.to_json()["inactive"] == [only]


class Changing(FakeCoordinator):
    """A coordinator whose job goes on with every look; after the last one, `then` happens."""

    def __init__(self, statuses: list[JobStatus], then: Exception | type[BaseException]) -> None:
        super().__init__()
        self.statuses = iter(statuses)
        self.then = then
        self.asked_for: list[JobId | None] = []

    def status(self, job_id: JobId | None = None) -> JobStatus:
        self.asked_for.append(job_id)
        found = next(self.statuses, None)
        if found is None:
            raise self.then
        return found


def invoke(coordinator: FakeCoordinator, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["top", *arguments], obj=shell_with(coordinator, Path.cwd()))


def test_a_picture_for_people() -> None:
    result = invoke(FakeCoordinator(status=running(str(Path.cwd() / "runs" / "a"))), "--coordinator", ADDRESS, "--once")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "small: running (runs/a)",
        "epoch 2, 60 of 240 samples (25.0 %), 300 samples/s, ETA 6.0 s",
        "published clock 3, next barrier at 9 (epoch), epoch 2, largest distance so far 2, 80 samples",
        "stages: 1 ready, 1 starting",
        "",
        "worker  stages: layers on device  clock  ahead (D = 1)  samples/s    loss  waiting  memory",
        "     0  0 on n0/0, 1-4 on n0/1        4  1 of 2               150  1.2500  12.5 %   1 MiB",
        "     1  0 on n0/2, 1-4 on n0/3        3  0 of 2               150  1.2500  12.5 %   2 MiB",
        "",
        "member            id                  address          pid  devices  lease",
        "agent             n0                  n0.example        13  2 cpu    4.2 s",
        "parameter server  parameter-server-0  n0.example:7500   12  -        3.5 s",
    ]


def test_utilisation_or_why_there_is_none_is_told() -> None:
    status = running()
    assert status.progress is not None
    known = replace(status.progress, tokens_per_second=38_400.0, model_flops_utilisation=0.412)
    shown = invoke(FakeCoordinator(status=replace(status, progress=known)), "--coordinator", ADDRESS, "--once").stdout
    assert "300 samples/s, 38400 tokens/s, 41.2 % MFU, ETA" in shown
    assert "no MFU" not in shown

    unknown = replace(status.progress, model_flops_utilisation_reason="no peak is known of ACME")
    asked = FakeCoordinator(status=replace(status, progress=unknown))
    assert "no MFU: no peak is known of ACME" in invoke(asked, "--coordinator", ADDRESS, "--once").stdout.splitlines()
    told = json.loads(invoke(asked, "--coordinator", ADDRESS, "--once", "--json").stdout)
    assert told["progress"]["model_flops_utilisation_reason"] == "no peak is known of ACME"


def test_who_was_lost_is_away_or_slow_and_that_the_job_went_back_is_told() -> None:
    picture = table(4, 3)
    rows = (picture.rows[0], replace(picture.rows[1], state=LifeState.ENDING))
    worker = WorkerStatus(VirtualWorkerIndex(1), Incarnation(0), 1, LifeState.ENDING)
    slow = (Straggling(VirtualWorkerIndex(0), StageIndex(1), 2.04),)
    there = replace(running(), progress=replace(picture, rows=rows, slow=slow), workers=(worker,), rewinds=1)
    lines = Picture(there, ()).lines(Path.cwd())
    assert lines[4:8] == [
        "the job was rewound to a checkpoint 1 time",
        "virtual worker 1: life 1, lost 1 time, ending",
        "stage 1 of virtual worker 0 takes 2.0 times as long as planned",
        "",
    ]
    assert [line.split()[8:11] for line in lines[9:11]] == [["1", "of", "2"], ["ending", "150", "1.2500"]]


def test_the_newest_and_the_best_evaluation_are_told() -> None:
    best = Evaluated(Clock(3), 1, 46, {"loss": 0.25}, minibatches=12)
    last = Evaluated(Clock(6), 2, 46, {"loss": math.inf}, minibatches=24)
    there = Picture(replace(running(), evaluations=EvaluationSummary(2, best, last)), ())
    said = "evaluation: loss - after epoch 2, clock 6 (2 so far); least loss 0.2500 after epoch 1, clock 3"
    assert said in there.lines(Path.cwd())
    assert there.to_json()["evaluations"] == {"number": 2, "best": best.to_object(), "last": last.to_object()}
    assert json.loads(json.dumps(there.to_json(), allow_nan=False))["evaluations"]["last"]["values"] == {"loss": None}


def test_a_cluster_without_a_job_and_a_job_that_failed() -> None:
    result = invoke(FakeCoordinator(), "--coordinator", ADDRESS, "--once")
    assert result.stdout.splitlines()[:3] == ["cluster: no job", "", result.stdout.splitlines()[2]]
    failed = replace(running(), state=JobState.FAILED, failure="stage 0 was killed", progress=None)
    lines = Picture(failed, ()).lines(Path.cwd())
    assert lines[:2] == ["small: failed", "stage 0 was killed"]
    assert Picture(failed, ()).has_ended


def test_json_is_one_object_per_look() -> None:
    coordinator = Changing([running("", 1, 1), running("", 2, 1)], KeyboardInterrupt)
    result = invoke(coordinator, "--coordinator", ADDRESS, "--json")
    assert result.exit_code == 0, "Ctrl-C is the usual way to leave"
    first, second = map(json.loads, result.stdout.splitlines())
    assert [row["clock"] for row in first["progress"]["rows"]] == [1, 1]
    assert [row["clock"] for row in second["progress"]["rows"]] == [2, 1]
    assert (second["state"], second["job_id"]) == ("running", JOB_ID)
    assert second["members"] == [plain(Member, member) for member in MEMBERS]


def test_in_a_pipe_pictures_follow_each_other_each_second() -> None:
    output = Output(people=io.StringIO(), complaints=io.StringIO(), machine=None)
    coordinator = Changing([running("", 1, 1), running("", 2, 1)], KeyboardInterrupt)
    shell = shell_with(coordinator, Path.cwd())
    assert run(Options(coordinator=ADDRESS), output, shell) is ExitStatus.OK
    assert isinstance(output.people, io.StringIO)
    shown = output.people.getvalue()
    assert [line for line in shown.splitlines() if line.startswith(("small", "epoch"))] == [
        "small: running",
        "epoch 2, 60 of 240 samples (25.0 %), 300 samples/s, ETA 6.0 s",
    ] * 2
    assert "\n\nsmall: running\n" in shown
    assert shell.clock.monotonic() == 2 * REFRESH_SECONDS


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_newest_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    output = Output(people=stream, complaints=io.StringIO(), machine=None)
    coordinator = Changing([running("", 1, 1), running("", 7, 6)], KeyboardInterrupt)
    run(Options(coordinator=ADDRESS), output, shell_with(coordinator, Path.cwd()))
    shown = stream.getvalue()
    assert "\x1b[" in shown, "it is drawn again in place"
    assert "worker  stages: layers on device  clock" in shown
    assert "…" in shown, "long lines are cut"
    assert shown.endswith("\x1b[?25h"), "the cursor is there again"


def folder_of_a_run() -> RunFolder:
    folder = RunFolder.create(Path("run"), name="small", clock=FakeClock())
    folder.write_record(
        RunRecord(
            run_dir=str(folder.path), name="small", host="here", started_wall=1.0, job_id=JOB_ID, coordinator=ADDRESS
        )
    )
    return folder


def shell_for(coordinator: Changing, on_sleep: Callable[[], None] = lambda: None) -> Shell:
    class Sleeping(FakeClock):
        def sleep(self, seconds: float) -> None:
            on_sleep()
            super().sleep(seconds)

    return replace(shell_with(coordinator, Path.cwd()), clock=Sleeping(auto_advance=True))


def test_a_run_is_watched_to_its_end() -> None:
    folder = folder_of_a_run()
    ended = replace(running(), state=JobState.FINISHED)
    result = invoke(coordinator := Changing([running(), ended], KeyboardInterrupt), str(folder.path), "--json")
    assert [json.loads(line)["state"] for line in result.stdout.splitlines()] == ["running", "finished"]
    assert coordinator.asked_for == [JOB_ID, JOB_ID]


def test_a_local_coordinator_ends_with_its_run() -> None:
    folder = folder_of_a_run()
    output = Output(people=io.StringIO(), complaints=io.StringIO(), machine=None)
    coordinator = Changing([running()], PeerUnreachable("gone"))
    shell = shell_for(coordinator, lambda: folder.write_result("finished", {}))
    assert run(Options(run_dir=folder.path), output, shell) is ExitStatus.OK

    result = invoke(Changing([], PeerUnreachable("gone")), str(folder.path))
    assert (result.exit_code, result.stderr) == (
        2, "error: the run in run has ended (finished); see its result with: hetpipe status run\n",
    )  # fmt: skip


def test_a_coordinator_that_is_away_is_one_sentence() -> None:
    folder = folder_of_a_run()
    result = invoke(Changing([], PeerUnreachable("the coordinator cannot be reached")), str(folder.path))
    assert (result.exit_code, result.stderr) == (
        1, "error: the coordinator cannot be reached; for the state of the run: hetpipe status run\n",
    )  # fmt: skip


def test_a_coordinator_that_goes_away_is_waited_for() -> None:
    class Returning(Changing):
        def status(self, job_id: JobId | None = None) -> JobStatus:
            self.looks += 1
            if self.looks in {2, 3}:
                raise PeerUnreachable("gone")
            return super().status(job_id)

        looks = 0

    output = Output(people=io.StringIO(), complaints=io.StringIO(), machine=None)
    coordinator = Returning([running(), running()], KeyboardInterrupt)
    assert run(Options(coordinator=ADDRESS), output, shell_for(coordinator)) is ExitStatus.OK
    assert isinstance(output.complaints, io.StringIO)
    assert output.complaints.getvalue().splitlines() == [
        "the coordinator does not answer; retrying",
        "the coordinator is reachable again after 1 s",
    ]


def test_a_job_that_nobody_leads_is_not_watched_for_ever() -> None:
    unled = replace(running(), failure="its coordinator ended")
    result = invoke(FakeCoordinator(status=unled), "--coordinator", ADDRESS)
    assert result.exit_code == 1
    assert "its coordinator ended" in result.stdout
    assert result.stderr == (f"error: job {JOB_ID} has had no leader for 180 s: its coordinator ended\n")


def test_a_run_whose_services_are_coming_up() -> None:
    folder = folder_of_a_run()
    folder.write_record(replace(folder.read_record(), job_id=""))
    result = invoke(FakeCoordinator(), str(folder.path))
    assert (result.exit_code, result.stderr) == (
        2, "error: the run in run has no job yet; its services are starting\n",
    )  # fmt: skip
