"""The commands as a user calls them, with a scripted coordinator in place of a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from hetpipe import bundled
from hetpipe.cli.app import app, run
from hetpipe.cli.run import train
from hetpipe.cli.start import demo
from hetpipe.errors import JobError, PeerUnreachable
from hetpipe.job.file import load_job
from hetpipe.runs.run_folder import RunFolder
from hetpipe.server import SERVICES
from hetpipe.values.events import JobEnded, JobState, JobStatus
from hetpipe.values.ids import Clock, JobId, ShardIndex, VirtualWorkerIndex
from hetpipe.values.run import ClockSnapshot
from tests.checker.corruptions import corrupted_lines
from tests.checker.scenario import Scenario, write_run
from tests.checker.simulator import as_lines, simulate
from tests.checkpoints import write_checkpoint
from tests.cli.fakes import RESULT, FakeCoordinator, running_status, shell_with, small_job, snapshot
from tests.support.forked import run_forked

ROOT = Path(bundled.__file__).parents[1]

CLUSTER = ("--coordinator", "127.0.0.1:7300")


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = small_job().model_dump(mode="json", exclude_none=True)
    Path("job.yaml").write_text(yaml.safe_dump(job))


def invoke(*arguments: str, coordinator: FakeCoordinator | None = None) -> Result:
    shell = shell_with(coordinator or FakeCoordinator(), Path.cwd())
    return CliRunner().invoke(app, arguments, obj=shell)


def last_line(result: Result) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return value


def newest() -> RunFolder:
    return RunFolder(Path("runs/latest").resolve())


def test_train_ends_with_the_result_as_one_line() -> None:
    result = invoke("train", "job.yaml", *CLUSTER, "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    assert last_line(result) == RESULT
    assert "state=running" in result.stderr
    assert "finished after 0.5 s of training" in result.stderr


def test_without_json_people_read_standard_output() -> None:
    result = invoke("train", "job.yaml", *CLUSTER)
    assert result.exit_code == 0, result.output
    assert "event=note sentence=\"the run's folder is runs/small-" in result.stdout
    assert "finished after 0.5 s of training" in result.stdout
    assert result.stderr == ""


def test_settings_change_the_job() -> None:
    coordinator = FakeCoordinator()
    result = invoke("train", "job.yaml", *CLUSTER, "--set", "sync.D=4", "--set", "epochs=7", coordinator=coordinator)
    assert result.exit_code == 0, result.output
    job = load_job(json.loads(coordinator.submissions[0].job_json))
    assert (job.sync.D, job.epochs) == (4, 7)


def test_a_bad_job_tells_every_mistake_and_makes_no_run() -> None:
    result = invoke("train", "job.yaml", *CLUSTER, "--set", "sync.Q=4", "--set", "epochs=many", "--json")
    assert result.exit_code == 2
    errors = last_line(result)["errors"]
    assert [error.split(":")[0] for error in errors] == ["sync.Q", "epochs"]
    assert all(f"error: {error}" in result.stderr for error in errors)
    assert not Path("runs").exists()


def test_a_run_that_fails() -> None:
    failing = FakeCoordinator([JobEnded(JobState.FAILED, "stage 0 was killed by SIGKILL", "JobFailed")])
    result = invoke("train", "job.yaml", *CLUSTER, "--json", coordinator=failing)
    assert result.exit_code == 1
    assert last_line(result) == {"errors": ["stage 0 was killed by SIGKILL"]}
    assert "Traceback" not in result.output


def test_a_job_whose_model_cannot_be_used_is_the_users_mistake() -> None:
    failing = FakeCoordinator([JobEnded(JobState.FAILED, "model: no", "CallableError", ("model: no",))])
    assert invoke("train", "job.yaml", *CLUSTER, coordinator=failing).exit_code == 2


def test_no_job() -> None:
    result = invoke("train")
    assert result.exit_code == 2
    assert "there is no job to train" in result.stderr


def test_run_dir() -> None:
    assert invoke("train", "job.yaml", *CLUSTER, "--run-dir", "mine").exit_code == 0
    assert Path("mine/result.json").exists()
    again = invoke("train", "job.yaml", *CLUSTER, "--run-dir", "mine")
    assert again.exit_code == 2
    assert "already contains a run" in again.stderr


def test_submit_follows_the_run() -> None:
    coordinator = FakeCoordinator()
    result = invoke("submit", "job.yaml", *CLUSTER, "--json", coordinator=coordinator)
    assert result.exit_code == 0, result.output
    assert last_line(result) == RESULT
    assert len(coordinator.submissions) == 1


def test_submit_needs_a_coordinator() -> None:
    assert invoke("submit", "job.yaml").exit_code == 2


def test_detached() -> None:
    coordinator = FakeCoordinator(status=running_status("x"))
    result = invoke("submit", "job.yaml", *CLUSTER, "--detach", "--json", coordinator=coordinator)
    assert result.exit_code == 0, result.output
    assert last_line(result) == {"run_dir": str(newest().path), "job_id": "small-1"}
    assert newest().read_record().job_id == "small-1"
    assert last_line(invoke("status", "--json", coordinator=coordinator))["state"] == "running"


def test_resume_begins_with_the_newest_checkpoint() -> None:
    assert invoke("train", "job.yaml", *CLUSTER).exit_code == 0
    old = newest()
    write_checkpoint(old.path, 6)
    (old.path / "facts.json").write_text(json.dumps({"num_samples": 46}))
    coordinator = FakeCoordinator()
    result = invoke("train", "--resume", "runs/latest", *CLUSTER, "--set", "epochs=9", coordinator=coordinator)
    assert result.exit_code == 0, result.output
    (submission,) = coordinator.submissions
    assert submission.restore == str(old.path / "checkpoints" / "clock-00000006")
    assert submission.run_dir != str(old.path)
    assert newest().read_record().restored_from == submission.restore

    elsewhere = Path("elsewhere").absolute()
    elsewhere.mkdir()
    old.write_record(replace(old.read_record(), import_path=str(elsewhere)))
    for arguments, expected in (((), elsewhere), (("job.yaml",), Path.cwd())):
        given = FakeCoordinator()
        ended = invoke("train", *arguments, "--resume", str(old.path), *CLUSTER, "--set", "epochs=9", coordinator=given)
        assert ended.exit_code == 0, ended.output
        assert given.submissions[0].import_path == str(expected), "a run resumed as it is has its code, too"
        assert newest().read_record().import_path == str(expected)

    refused = invoke("train", "--resume", str(old.path), *CLUSTER, "--set", "seed=4", "--json")
    assert refused.exit_code == 2
    assert last_line(refused)["errors"][0].startswith("seed: is 4 here and 0 in the run to resume")


def test_resume_says_what_it_passes_over() -> None:
    assert invoke("train", "job.yaml", *CLUSTER).exit_code == 0
    old = newest()
    write_checkpoint(old.path, 6)
    (old.path / "facts.json").write_text(json.dumps({"num_samples": 46}))
    torn = write_checkpoint(old.path, 8) / "vw-0-stage-0.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    (write_checkpoint(old.path, 9) / "manifest.json").unlink()
    coordinator = FakeCoordinator()
    result = invoke("train", "--resume", "runs/latest", *CLUSTER, "--set", "epochs=9", coordinator=coordinator)
    assert result.exit_code == 0, result.output
    (submission,) = coordinator.submissions
    assert submission.restore == str(old.path / "checkpoints" / "clock-00000006")
    assert "clock-00000009 was never completed; resuming from clock-00000006" in result.output
    assert f"{torn} has " in result.output


@pytest.mark.parametrize(
    ("content", "words"), [(None, "has no complete checkpoint"), ("{}", "so the size of the training set is unknown")]
)
def test_what_cannot_be_resumed(content: str | None, words: str) -> None:
    assert invoke("train", "job.yaml", *CLUSTER).exit_code == 0
    if content is not None:
        write_checkpoint(newest().path, 6)
        (newest().path / "facts.json").write_text(content)
    result = invoke("train", "--resume", "runs/latest", *CLUSTER)
    assert result.exit_code == 2
    assert words in result.stderr
    assert invoke("train", "--resume", "nowhere").exit_code == 2


def test_status_of_the_newest_run() -> None:
    assert invoke("train", "job.yaml", *CLUSTER).exit_code == 0
    status = invoke("status", "--json", coordinator=FakeCoordinator(status=running_status("x")))
    keys = ["run_dir", "state", "job_id", "queue", "processes", "clocks", "global_clock", "workers", "straggler"]
    keys += [
        "slow",
        "rewinds",
        "conditions",
        "proof",
        "evaluations",
        "speed",
        "frozen",
        "inactive",
        "cache",
        "checkpoints",
        "pipelines",
        "cuts",
    ]
    assert list(last_line(status)) == keys
    for_people = invoke("status", coordinator=FakeCoordinator(status=running_status("x")))
    assert for_people.stdout.startswith("small: running (x)\n")
    assert invoke("status", *CLUSTER, "--json").stdout.startswith('{"run_dir": "", "state": "no job"')


def test_no_run_yet() -> None:
    for command in ("status", "clocks", "check"):
        result = invoke(command, "--json")
        assert result.exit_code == 2
        assert last_line(result)["errors"][0].startswith("there is no run in runs/")


def test_clocks() -> None:
    running = FakeCoordinator(status=running_status("x"))
    assert invoke("submit", "job.yaml", *CLUSTER, "--detach").exit_code == 0
    found = last_line(invoke("clocks", "--json", coordinator=running))
    assert (found["clocks"], found["global_clock"], found["published"]) == ({"0": 4, "1": 3}, 3, 3)
    assert (found["staged"], found["durable"], found["applied"]) == ({"0": 5, "1": 4}, {"0": 5, "1": 4}, [])
    shown = invoke("clocks", *CLUSTER, coordinator=running)
    assert shown.stdout.splitlines() == [
        "worker  local clock  ahead  staged  durable",
        "     0            4      1       5        5",
        "     1            3      0       4        4",
        "global clock 3",
        "published clock 3, next barrier at 9 (epoch), epoch 2, largest distance so far 2, 80 samples",
    ]
    none_yet = invoke("clocks", coordinator=FakeCoordinator())
    assert none_yet.exit_code == 2
    assert "the run has no clocks yet" in none_yet.stderr


def test_a_disk_that_fails_is_told() -> None:
    assert invoke("submit", "job.yaml", *CLUSTER, "--detach").exit_code == 0
    told = replace(snapshot(4, 3), durable={VirtualWorkerIndex(0): Clock(2)}, applied=(ShardIndex(1),))
    failing = FakeCoordinator(status=replace(running_status("x"), clocks=told))
    shown = invoke("clocks", *CLUSTER, coordinator=failing).stdout.splitlines()
    assert shown[1:3] == ["     0            4      1       5        2", "     1            3      0       4        -"]
    assert shown[-1] == (
        "parameter server 1 cannot persist staged waves (level applied): a restart would rewind the run to a checkpoint"
    )
    assert last_line(invoke("clocks", *CLUSTER, "--json", coordinator=failing))["applied"] == [1]


def test_watched_clocks_are_one_line_per_change() -> None:
    assert invoke("submit", "job.yaml", *CLUSTER, "--detach").exit_code == 0
    expected = [
        "global_clock=1 published=1 vw0.clock=1 vw0.staged=2 vw0.durable=2 vw1.clock=1 vw1.staged=2 vw1.durable=2",
        "global_clock=1 published=1 vw0.clock=2 vw0.staged=3 vw0.durable=3 vw1.clock=1 vw1.staged=2 vw1.durable=2",
    ]
    assert invoke("clocks", "--watch").stdout.splitlines() == expected
    assert invoke("clocks", "--watch", *CLUSTER).stdout.splitlines() == expected
    as_json = invoke("clocks", "--watch", "--json").stdout.splitlines()
    assert [json.loads(line)["clocks"] for line in as_json] == [{"0": 1, "1": 1}, {"0": 2, "1": 1}]


def test_watched_clocks_wait_for_a_coordinator_that_goes_away() -> None:
    class Returning(FakeCoordinator):
        num_watches = 0

        def watch_clocks(self, job_id: JobId | None = None) -> Iterator[ClockSnapshot]:
            self.num_watches += 1
            if self.num_watches == 1:
                yield snapshot(1, 1)
            if self.num_watches < 4:
                raise PeerUnreachable("gone")
            yield snapshot(2, 1)

    result = invoke("clocks", "--watch", *CLUSTER, coordinator=Returning())
    assert [line.split()[2::3] for line in result.stdout.splitlines()] == [
        ["vw0.clock=1", "vw1.clock=1"],
        ["vw0.clock=2", "vw1.clock=1"],
    ]
    assert result.stderr.splitlines() == [
        "the coordinator does not answer; retrying",
        "the coordinator is reachable again after 2 s",
    ]
    nobody = invoke("clocks", "--watch", *CLUSTER, coordinator=Away())
    assert (nobody.exit_code, nobody.stderr) == (1, "error: gone\n")


class Away(FakeCoordinator):
    def watch_clocks(self, job_id: JobId | None = None) -> Iterator[ClockSnapshot]:
        raise PeerUnreachable("gone")


def test_clocks_of_an_ended_run() -> None:
    assert invoke("train", "job.yaml", *CLUSTER).exit_code == 0
    assert last_line(invoke("clocks", "--json")) == {"clocks": {"0": 6, "1": 6}, "global_clock": 6}
    assert invoke("clocks", "--watch").stdout == "global_clock=6 vw0.clock=6 vw1.clock=6\n"
    failing = FakeCoordinator([JobEnded(JobState.FAILED, "it broke", "JobFailed")])
    assert invoke("train", "job.yaml", *CLUSTER, "--run-dir", "broken", coordinator=failing).exit_code == 1
    without = invoke("clocks", "broken")
    assert without.exit_code == 2
    assert "failed without clocks" in without.stderr


def test_a_coordinator_that_does_not_answer() -> None:
    class Away(FakeCoordinator):
        def status(self, job_id: JobId | None = None) -> JobStatus:
            raise PeerUnreachable("coordinator at 127.0.0.1:7300 cannot be reached")

    result = invoke("status", *CLUSTER, "--json", coordinator=Away())
    assert result.exit_code == 1
    assert last_line(result) == {"errors": ["coordinator at 127.0.0.1:7300 cannot be reached"]}


def test_check_of_a_clean_history(tmp_path: Path) -> None:
    write_run(tmp_path / "clean", Scenario(), as_lines(simulate(Scenario())))
    result = invoke("check", "clean", "--json")
    assert result.exit_code == 0, result.output
    found = last_line(result)
    assert found["minibatches"] > 0
    assert (found["violations"], found["waves_applied_twice"], found["torn_waves"]) == (0, 0, 0)
    assert invoke("check", "clean").stdout.endswith("verdict: no violation\n")


def test_check_of_a_corrupted_history(tmp_path: Path) -> None:
    write_run(tmp_path / "bad", Scenario(), corrupted_lines("stale_clock"))
    result = invoke("check", "bad", "--json")
    assert result.exit_code == 1
    assert last_line(result)["violations"] > 0
    assert "verdict: " in invoke("check", "bad").stdout


def test_check_of_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert invoke("check", "empty").exit_code == 2


def test_export() -> None:
    assert invoke("train", "job.yaml", *CLUSTER).exit_code == 0
    write_checkpoint(newest().path, 6)
    result = invoke("export", "out.safetensors", "--json")
    assert result.exit_code == 0, result.output
    found = last_line(result)
    assert (found["clock"], found["path"]) == (6, str(Path("out.safetensors").absolute()))
    named = invoke("export", "runs/latest", "other.safetensors")
    assert named.stdout.startswith("wrote other.safetensors: ")
    assert invoke("export", "a", "b", "c").exit_code == 2
    unknown = invoke("export", "runs/latest", "other", "--to", "onnx")
    assert unknown.exit_code == 2
    no_model = invoke("export", "runs/latest", "out", "--to", "hf", "--json")
    assert no_model.exit_code == 2
    assert "model: " in last_line(no_model)["errors"][0]
    assert not Path("out").exists()


def test_init_writes_a_job_that_is_one() -> None:
    result = invoke("init", "mine")
    assert result.exit_code == 0
    assert "cd mine && hetpipe train job.yaml" in result.stdout
    load_job(Path("mine/job.yaml"))
    again = invoke("init", "mine")
    assert again.exit_code == 2
    assert "mine/job.yaml, mine/model.py and mine/job.schema.json would be overwritten" in again.stderr
    Path("mine/model.py").unlink()
    assert invoke("init", "mine").exit_code == 2
    assert not Path("mine/model.py").exists(), "all or nothing"


def test_version() -> None:
    assert invoke("version").stdout.startswith("hetpipe 0.")


def test_an_installation_without_the_demos_files_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job, root = demo.find_demo()
    assert job == root / "examples" / "digits" / "job.yaml"
    monkeypatch.setattr(bundled, "_COPIES", tmp_path)
    monkeypatch.setattr(bundled, "_PACKAGE", tmp_path)
    assert "install it from a wheel, or from a complete copy of the source" in invoke("demo").stderr


def test_what_nobody_thought_of_is_one_sentence_too() -> None:
    class Broken(FakeCoordinator):
        def status(self, job_id: JobId | None = None) -> JobStatus:
            raise ZeroDivisionError("ours")

    result = invoke("status", *CLUSTER, "--json", coordinator=Broken())
    assert result.exit_code == 1
    assert last_line(result)["errors"][0].startswith("internal error (ZeroDivisionError: ours)")


def test_ctrl_c_while_looking() -> None:
    class Pressed(FakeCoordinator):
        def status(self, job_id: JobId | None = None) -> JobStatus:
            raise KeyboardInterrupt

    assert invoke("status", *CLUSTER, coordinator=Pressed()).exit_code == 130


def test_a_reader_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(FakeCoordinator):
        def status(self, job_id: JobId | None = None) -> JobStatus:
            raise BrokenPipeError

    assert invoke("status", *CLUSTER, coordinator=Gone()).exit_code == 1


@pytest.mark.parametrize("arguments", [["train", "--bogus", "--json"], ["nosuch", "--json"], ["submit", "--json"]])
def test_wrong_options_are_told_as_json_too(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert list(json.loads(captured.out.splitlines()[-1])) == ["errors"]
    assert "Usage: hetpipe" in captured.err


def test_the_status_of_a_command_is_the_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["version"]) == 0
    assert run(["status", "nowhere"]) == 2
    assert "nowhere: no such folder" in capsys.readouterr().err
    assert run([]) in {0, 2}, "it depends on the version of typer"
    captured = capsys.readouterr()
    assert "Usage: hetpipe" in captured.out + captured.err


def test_mistakes_of_a_job_come_line_by_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise JobError(["a: first", "b: second"])

    monkeypatch.setattr(train, "new_run", refuse)
    assert run(["train", "job.yaml"]) == 2
    assert capsys.readouterr().err == "error: a: first\nerror: b: second\n"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], [], ["cluster", "--help"], ["nosuch"]])
def test_what_shows_no_command_imports_none(arguments: list[str]) -> None:
    """And so neither torch nor gRPC, nor what a run needs."""
    heavy = {"torch", "grpc", "google.protobuf", "redis", "docker", "rich", "yaml", "cryptography", "jinja2"}
    code = (
        "import sys\n"
        "from hetpipe.cli.app import run\n"
        f"run({arguments})\n"
        f"print(sorted({heavy} & set(sys.modules)), len([m for m in sys.modules if m.startswith('hetpipe.runs.')]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] 1", "of a run only how commands end"


def test_the_shell_completes_commands_and_options() -> None:
    completions = {
        "hetpipe cl": ["clocks", "cluster"],
        "hetpipe cluster f": ["from-k8s"],
        "hetpipe train --res": ["--resume"],
    }
    codes = [
        "import os\n"
        f"os.environ |= {{'COMP_WORDS': {typed!r}, 'COMP_CWORD': '{typed.count(' ')}'}}\n"
        "from hetpipe.cli.main import main; main()"
        for typed in completions
    ]
    asked = {**os.environ, "_HETPIPE_COMPLETE": "complete_bash"}
    done = run_forked(codes, imports=["hetpipe.cli.app"], environment=asked)
    assert [each.stdout.split() for each in done] == [*completions.values()], done


def test_no_command_needs_torch_or_cryptography_to_say_what_it_does() -> None:
    """What the help of every command imports, on top of one another."""
    code = (
        "import sys\n"
        "from tests.cli.regenerate_golden import help_of, kept\n"
        "assert all(map(help_of, kept()))\n"
        "sys.exit(not {'torch', 'cryptography', 'jinja2'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


def test_a_service_starts_without_the_command_line() -> None:
    """And a coordinator without torch, and without what opens a store it does not use."""
    code = (
        "import sys\n"
        "from hetpipe.cli.main import main\n"
        "sys.argv = ['hetpipe', 'serve', 'coordinator', '--store', 'mysql://x', '--log', '/dev/null']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 1\n"
        "print(sorted({'typer', 'click', 'jinja2', 'torch', 'numpy', 'redis', 'docker'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("service", SERVICES)
def test_services_are_commands_too(service: str) -> None:
    result = invoke("serve", service, "--no-such-option")
    assert result.exit_code == 2
    assert f"usage: hetpipe serve {service} " in result.stderr
