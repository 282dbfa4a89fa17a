"""`hetpipe workers`: who is there, and the wishes that one leaves or comes back, with a scripted coordinator."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hetpipe.cli.app import app
from hetpipe.errors import PeerUnreachable, UserError
from hetpipe.runs.run_folder import RunFolder
from hetpipe.values.events import JobState, JobStatus, WorkerStatus
from hetpipe.values.ids import Incarnation, VirtualWorkerIndex
from hetpipe.values.life_state import LifeState
from hetpipe.wire.calls import DrainWorkerRequest
from tests.cli.fakes import JOB_ID, RESULT, FakeCoordinator, running_status, shell_with, table
from tests.cli.scripted import CLUSTER, Scripted, run_folder


def worker(vw: int, state: str, *, life: int = 0, deaths: int = 0) -> WorkerStatus:
    return WorkerStatus(VirtualWorkerIndex(vw), Incarnation(life), deaths, LifeState(state))


def status(*workers: WorkerStatus, **changes: Any) -> JobStatus:
    return replace(running_status("/runs/small"), **{"workers": workers, "progress": table(4, 3), **changes})


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def invoke(coordinator: FakeCoordinator, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["workers", *arguments], obj=shell_with(coordinator, Path.cwd()))


def last_line(result: Result) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return value


class TestList:
    THERE = status(worker(0, "ready"), worker(1, "out", life=2, deaths=1))

    def test_people_see_a_table(self) -> None:
        result = invoke(Scripted([self.THERE]), "list", *CLUSTER)

        assert result.exit_code == 0, result.output
        assert result.stdout.splitlines() == [
            "small: running (job small-1)",
            "",
            "vw  life  state  lost  clock  ahead  stages: layers on device",
            " 0     1  ready     0      4      1  0 on n0/0, 1-4 on n0/1",
            " 1     3  out       1      3      -  0 on n0/2, 1-4 on n0/3",
        ]

    def test_programs_see_everything(self) -> None:
        result = invoke(Scripted([self.THERE]), "list", *CLUSTER, "--json")

        assert last_line(result)["job_id"] == JOB_ID
        first, second = last_line(result)["workers"]
        assert first == {
            "vw": 0,
            "incarnation": 0,
            "deaths": 0,
            "state": "ready",
            "clock": 4,
            "distance": 1,
            "stages": [
                {
                    "stage": 0,
                    "host": "127.0.0.1",
                    "pid": 14,
                    "state": "ready",
                    "device": "n0/0",
                    "first_layer": 0,
                    "last_layer": 1,
                    "memory": [],
                    "memory_bytes": 0,
                    "device_bytes": None,
                }
            ],
        }
        assert (second["incarnation"], second["distance"]) == (2, None)

    def test_before_the_first_picture_less_is_known(self) -> None:
        starting = status(worker(0, "starting"), worker(1, "starting"), progress=None, clocks=None)
        result = invoke(Scripted([starting, starting]), "list", *CLUSTER)
        assert result.stdout.splitlines()[-1] == " 1     1  starting     0      -      -  1 stage"
        result = invoke(Scripted([starting]), "list", *CLUSTER, "--json")
        assert last_line(result)["workers"][0]["stages"][0]["device"] is None

    def test_a_job_without_any_says_so(self) -> None:
        result = invoke(Scripted([status(progress=None)]), "list", *CLUSTER)
        assert result.stdout.splitlines()[-1] == "it has no virtual workers at the moment"

    def test_there_must_be_a_job(self) -> None:
        result = invoke(FakeCoordinator(), "list", *CLUSTER)
        assert (result.exit_code, result.stderr) == (
            2,
            "error: the coordinator has no job yet; submit one with `hetpipe submit`\n",
        )


class TestDrain:
    def test_each_is_asked_to_leave(self) -> None:
        coordinator = FakeCoordinator()
        result = invoke(coordinator, "drain", "1", "2", *CLUSTER, "--job", "other")

        assert coordinator.wishes == [("drain", 1, "other"), ("drain", 2, "other")]
        assert result.stdout.splitlines() == [
            "virtual worker 1 leaves at the next barrier",
            "virtual worker 2 leaves at the next barrier",
        ]

    def test_with_wait_it_returns_when_they_have_left(self) -> None:
        away = PeerUnreachable("the coordinator does not answer")
        leaving, left = status(worker(0, "ready"), worker(1, "leaving")), status(worker(0, "ready"), worker(1, "out"))
        coordinator = Scripted([leaving, away, leaving, left])
        result = invoke(coordinator, "drain", "1", *CLUSTER, "--wait", "--json")

        assert result.exit_code == 0, result.output
        assert last_line(result) == {"workers": [{"vw": 1, "incarnation": 0, "deaths": 0, "state": "out"}]}
        assert len(coordinator.asked) == 4

    def test_the_wait_ends(self) -> None:
        result = invoke(Scripted([status(worker(1, "leaving"))]), "drain", "1", *CLUSTER, "--wait", "--timeout", "5")

        assert result.exit_code == 1
        assert result.stderr.splitlines()[-1] == (
            "error: not all workers have left within 5 s: virtual worker 1 leaves at the next barrier"
        )

    def test_the_run_may_end_first(self) -> None:
        over = status(worker(1, "leaving"), state=JobState.FINISHED)
        assert invoke(Scripted([over]), "drain", "1", *CLUSTER, "--wait").exit_code == 0

    def test_what_the_coordinator_refuses_is_told(self) -> None:
        class Refusing(FakeCoordinator):
            def drain_worker(self, request: DrainWorkerRequest) -> WorkerStatus:
                raise UserError(f"virtual worker {request.vw} is the last one")

        result = invoke(Refusing(), "drain", "1", *CLUSTER)
        assert (result.exit_code, result.stderr) == (2, "error: virtual worker 1 is the last one\n")

    def test_if_one_is_refused_it_is_said_who_goes_all_the_same(self) -> None:
        class Refusing(FakeCoordinator):
            def drain_worker(self, request: DrainWorkerRequest) -> WorkerStatus:
                if request.vw == 1:
                    raise UserError("virtual worker 1 is the last one")
                return super().drain_worker(request)

        result = invoke(Refusing(), "drain", "0", "1", *CLUSTER, "--json")
        assert result.stderr.splitlines() == [
            "virtual worker 0 leaves at the next barrier",
            "error: virtual worker 1 is the last one",
        ]
        assert (result.exit_code, last_line(result)) == (2, {"errors": ["virtual worker 1 is the last one"]})

    @pytest.mark.parametrize("arguments", [(), ("-1",), ("one",)])
    def test_somebody_must_be_named(self, arguments: tuple[str, ...]) -> None:
        assert invoke(FakeCoordinator(), "drain", *arguments).exit_code == 2


class TestAdd:
    def test_without_a_name_all_that_are_out_come_back(self) -> None:
        coordinator = FakeCoordinator()
        result = invoke(coordinator, "add", *CLUSTER)

        assert coordinator.wishes == [("add", None, None)]
        assert result.stdout.splitlines() == [
            "virtual worker 1 is being restarted",
            "virtual worker 2 is being restarted",
        ]

    def test_a_new_one_is_told_with_its_devices(self) -> None:
        coordinator = FakeCoordinator()
        coordinator.new = (replace(worker(2, "admitting", life=1), devices=("n2/0", "n3/0")),)
        result = invoke(coordinator, "add", *CLUSTER)
        assert result.stdout == (
            "virtual worker 2 is new, and joins at a barrier as soon as it is ready; it has n2/0, n3/0\n"
        )
        assert last_line(invoke(coordinator, "add", *CLUSTER, "--json"))["workers"] == [
            {"vw": 2, "incarnation": 1, "deaths": 0, "state": "admitting", "devices": ["n2/0", "n3/0"]}
        ]

    def test_or_those_that_are_named(self) -> None:
        coordinator = FakeCoordinator()
        result = invoke(coordinator, "add", "2", "4", *CLUSTER, "--json")

        assert coordinator.wishes == [("add", 2, None), ("add", 4, None)]
        assert [one["vw"] for one in last_line(result)["workers"]] == [2, 4]


class TestMove:
    def test_the_cut_before_and_after_is_told(self) -> None:
        coordinator = FakeCoordinator()
        result = invoke(coordinator, "move", "1", "3,1", *CLUSTER, "--job", "other")

        assert coordinator.moves == [(1, (3, 1), "other")]
        assert result.stdout == "virtual worker 1: layers 2, 2 become 3, 1, at the next barrier at the latest\n"
        assert last_line(invoke(coordinator, "move", "1", " 3, 1", *CLUSTER, "--json")) == {
            "workers": [{"vw": 1, "incarnation": 0, "deaths": 0, "state": "ready"}],
            "before": [2, 2],
            "after": [3, 1],
        }

    def test_there_may_be_nothing_to_move(self) -> None:
        result = invoke(FakeCoordinator(), "move", "0", "2,2", *CLUSTER)
        assert (result.exit_code, result.stdout) == (0, "virtual worker 0: its stages have 2, 2 layers already\n")

    @pytest.mark.parametrize("cut", ["", "3;1", "3,", "4,0", "two,two", "1.5,2.5"])
    def test_a_cut_is_numbers_with_commas(self, cut: str) -> None:
        coordinator = FakeCoordinator()
        result = invoke(coordinator, "move", "0", cut, *CLUSTER)
        assert (result.exit_code, result.stderr) == (
            2,
            f"error: `{cut}` is no cut: give the layers of each stage, at least 1, with commas, as in 3,1\n",
        )
        assert coordinator.moves == []


class TestWhichRun:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> RunFolder:
        return run_folder(tmp_path / "runs" / "a")

    @pytest.mark.parametrize("arguments", [(), ("--run-dir", "runs/a")])
    def test_the_job_of_a_run(self, folder: RunFolder, arguments: tuple[str, ...]) -> None:
        coordinator = FakeCoordinator()
        assert invoke(coordinator, "drain", "1", *arguments).exit_code == 0
        assert coordinator.wishes == [("drain", 1, JOB_ID)]

    def test_one_that_is_over(self, folder: RunFolder) -> None:
        folder.write_result("finished", RESULT)
        result = invoke(FakeCoordinator(), "drain", "1")
        assert result.stderr.endswith("has finished and is not running any more\n")

    def test_one_that_is_coming_up(self, folder: RunFolder) -> None:
        folder.write_record(replace(folder.read_record(), job_id="", coordinator=""))
        result = invoke(FakeCoordinator(), "list")
        assert result.stderr.endswith("has no job yet; its services are starting\n")

    def test_one_that_died_is_told_by_its_status(self, folder: RunFolder) -> None:
        result = invoke(Scripted([PeerUnreachable("the coordinator cannot be reached")]), "list")
        assert (result.exit_code, result.stderr) == (
            1,
            "error: the coordinator cannot be reached; for the state of the run: hetpipe status runs/a\n",
        )

    def test_a_job_is_one_of_a_coordinator(self) -> None:
        result = invoke(FakeCoordinator(), "list", "--job", JOB_ID)
        assert result.stderr == ("error: --job names a job of a coordinator; add --coordinator HOST:PORT\n")
