"""`hetpipe stop`: with a checkpoint or at once, waited for or not, with a scripted coordinator."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hetpipe.cli.app import app
from hetpipe.cli.run import stop
from hetpipe.errors import HetpipeError, PeerUnreachable, UnknownJob
from hetpipe.values.events import JobState, JobStatus, StopMode
from tests.cli.fakes import JOB_ID, RESULT, FakeCoordinator, running_status, shell_with
from tests.cli.scripted import CLUSTER, Scripted, run_folder


def told(state: JobState, **changes: Any) -> JobStatus:
    return replace(running_status("runs/a"), state=state, **changes)


RUNNING, STOPPING, STOPPED = (told(state) for state in (JobState.RUNNING, JobState.STOPPING, JobState.STOPPED))


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def invoke(coordinator: FakeCoordinator, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["stop", *arguments], obj=shell_with(coordinator, Path.cwd()))


def test_it_is_waited_for() -> None:
    coordinator = Scripted([RUNNING, STOPPING, STOPPING, STOPPED])
    result = invoke(coordinator, *CLUSTER)

    assert coordinator.stops == [StopMode.CHECKPOINT]
    assert coordinator.asked[0] is None
    assert set(coordinator.asked[1:]) == {JOB_ID}
    assert (result.exit_code, result.stdout) == (0, f"small (job {JOB_ID}) has stopped\n")
    assert result.stderr == "waiting for the next barrier and its checkpoint\n"


def test_or_not_waited_for() -> None:
    coordinator = Scripted([RUNNING, STOPPING])
    result = invoke(coordinator, *CLUSTER, "--job", JOB_ID, "--no-wait", "--now")

    assert coordinator.stops == [StopMode.NOW]
    assert coordinator.asked == [JOB_ID, JOB_ID]
    assert (result.exit_code, result.stdout) == (0, f"small (job {JOB_ID}) is stopping\n")


def test_the_way_on_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "has_checkpoint_at", lambda place: place == str(Path("runs/a").absolute()))
    result = invoke(Scripted([RUNNING, STOPPED]), *CLUSTER, "--json")

    assert json.loads(result.stdout.splitlines()[-1]) == {
        "job_id": JOB_ID,
        "state": "stopped",
        "run_dir": "runs/a",
        "resume": "hetpipe submit --resume runs/a --coordinator 127.0.0.1:7300",
    }


@pytest.mark.parametrize(
    ("local", "command"), [(True, "train --resume runs/a"), (False, "submit --resume runs/a --coordinator h:1")]
)
def test_the_way_on_is_the_command_that_fits(local: bool, command: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001 - a parameter
    folder = run_folder(Path("runs/a"))
    folder.write_record(replace(folder.read_record(), local=local, coordinator="h:1"))
    monkeypatch.setattr(stop, "has_checkpoint_at", lambda _: True)
    result = invoke(Scripted([RUNNING, STOPPED]), "runs/a", "--json")

    assert json.loads(result.stdout.splitlines()[-1])["resume"] == f"hetpipe {command}"


@pytest.mark.parametrize(
    ("state", "failure", "status", "sentence"),
    [
        (JobState.FINISHED, "", 0, "has finished"),
        (JobState.STOPPED, "", 0, "has stopped"),
        (JobState.FAILED, "its disk is gone", 1, "has failed: its disk is gone"),
    ],
)
def test_one_that_has_ended_stays_as_it_is(state: JobState, failure: str, status: int, sentence: str) -> None:
    coordinator = Scripted([told(state, failure=failure)])
    result = invoke(coordinator, *CLUSTER)

    assert coordinator.stops == []
    assert (result.exit_code, result.stdout) == (status, f"small (job {JOB_ID}) {sentence}\n")


def test_there_must_be_a_job() -> None:
    result = invoke(FakeCoordinator(), *CLUSTER)
    assert (result.exit_code, result.stderr) == (
        2,
        "error: the coordinator has no job yet: there is nothing to stop\n",
    )


def test_it_is_not_waited_for_for_ever() -> None:
    result = invoke(Scripted([RUNNING, STOPPING]), *CLUSTER, "--timeout", "5")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        f"error: small (job {JOB_ID}) is stopping, and has not stopped within 5 s; `hetpipe clocks` shows which "
        "workers do not advance, and `hetpipe stop --now` stops it without a checkpoint"
    )


def test_a_coordinator_that_is_away_is_waited_for_no_longer_than_asked() -> None:
    gone = PeerUnreachable("the coordinator cannot be reached")
    coordinator = Scripted([RUNNING, STOPPING, gone])
    shell = shell_with(coordinator, Path.cwd())
    result = CliRunner().invoke(app, ["stop", *CLUSTER, "--timeout", "5"], obj=shell)

    assert result.exit_code == 1
    assert result.stderr.endswith("stops it without a checkpoint; now the coordinator cannot be reached\n")
    assert 5.0 <= shell.clock.monotonic() <= 6.0


def test_a_new_coordinator_is_asked_again_and_may_know_nothing_of_the_job_for_a_while() -> None:
    gone, forgotten = PeerUnreachable("gone"), UnknownJob("it is not known here")
    coordinator = Scripted([RUNNING, RUNNING, gone, forgotten, RUNNING, STOPPED])
    result = invoke(coordinator, *CLUSTER)

    assert coordinator.stops == [StopMode.CHECKPOINT] * 3
    assert (result.exit_code, result.stdout) == (0, f"small (job {JOB_ID}) has stopped\n")


def test_one_that_never_knows_it_again_is_not_asked_for_ever() -> None:
    result = invoke(Scripted([RUNNING, RUNNING, UnknownJob("job small-1 is not known here")]), *CLUSTER)

    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        "error: job small-1 is not known here; the coordinator answers, but the job has been unknown to it for 90 s"
    )


def test_a_job_that_nobody_leads_is_not_waited_for_for_ever() -> None:
    unled = replace(RUNNING, failure="its coordinator ended")
    result = invoke(Scripted([unled]), *CLUSTER)

    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (f"error: job {JOB_ID} has had no leader for 180 s: its coordinator ended")


def test_the_coordinator_of_a_local_run_ends_with_it(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "runs" / "a")
    gone: HetpipeError = PeerUnreachable("the coordinator cannot be reached")

    class EndsWithIt(Scripted):
        def status(self, job_id: Any = None) -> JobStatus:
            if len(self.asked) == 2:
                folder.write_result("stopped", RESULT)
            return super().status(job_id)

    coordinator = EndsWithIt([RUNNING, STOPPING, gone])
    result = invoke(coordinator, "runs/a")

    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, f"small (job {JOB_ID}) has stopped")
    assert invoke(coordinator, "runs/a").stderr.endswith("has stopped and is not running any more\n")
