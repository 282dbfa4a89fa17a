"""Below which folders jobs may have their code and their runs, and that no way around leads out."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.decide.lifecycle.configs import Assignment, stage_commands
from hetpipe.decide.planner.partition import plan_job
from hetpipe.errors import UserError
from hetpipe.observe.history import MemoryHistory
from hetpipe.roots import CODE_OPTION, RUN_OPTION, Root, Roots, add_root_options, root_of, roots_of
from hetpipe.server.agent.children import Children
from hetpipe.server.coordinator.coordinator import Coordinator
from hetpipe.server.shard.server import ShardServer
from hetpipe.values.commands import AgentReport, ChildExit, InspectCommand, InspectionResult, KeyedStageReport
from hetpipe.values.events import JobState
from hetpipe.values.ids import Term
from hetpipe.values.run import StageFailed
from tests.server.coordinator.builders import JOB_ID, agent_info, job, model, shard_member, submission
from tests.server.coordinator.fakes import Cluster
from tests.server.shard.builders import shard_config, slices_of


@pytest.fixture
def root(tmp_path: Path) -> Root:
    (tmp_path / "runs").mkdir()
    found = root_of([tmp_path / "runs"], RUN_OPTION, is_needed=True)
    assert found is not None
    return found


def test_folders_below_it_whether_they_are_there_or_not(root: Root, tmp_path: Path) -> None:
    for path in ("runs", "runs/a", "runs/a/../b/checkpoints/clock-00000001"):
        root.check(str(tmp_path / path), "the folder of the run")


@pytest.mark.parametrize("path", ["", "runs-2", "runs/../etc", "runs/a/../../other", "runs/../runs/../etc"])
def test_folders_elsewhere_are_refused_with_the_fix(root: Root, tmp_path: Path, path: str) -> None:
    with pytest.raises(UserError) as caught:
        root.check(f"{tmp_path}/{path}", "the folder of the run")
    told = str(caught.value)
    assert told.startswith(f"the folder of the run {tmp_path}/{path}")
    assert f"is not below {tmp_path / 'runs'}, as required here" in told
    assert told.endswith("have this process started with another --run-root")


def test_links_are_followed_first(root: Root, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs" / "out").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in").symlink_to(tmp_path / "runs")
    (tmp_path / "runs" / "loop").symlink_to(tmp_path / "runs" / "loop")
    with pytest.raises(UserError, match=rf"which leads to {tmp_path}/elsewhere/x, is not below"):
        root.check(str(tmp_path / "runs" / "out" / "x"), "the checkpoint")
    root.check(str(tmp_path / "in" / "a"), "the folder of the run")
    with pytest.raises(UserError, match="loop"):
        root.check(str(tmp_path / "runs" / "loop"), "the folder of the run")


@pytest.mark.parametrize("path", ["relative", "runs/a", "\0"])
def test_what_is_no_absolute_path(root: Root, path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError):
        root.check(path, "the folder of the run")


def test_several_roots(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    found = Roots(runs=root_of(folders, RUN_OPTION, is_needed=False))
    found.check_run(str(folders[0] / "run"), restore=str(folders[1] / "checkpoint"))
    with pytest.raises(UserError, match="the checkpoint /etc is not below"):
        found.check_run(str(folders[0] / "run"), restore="/etc")
    found.check_code("/anywhere, as code has no root here")


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_root_options(parser, with_code=True)
    return parser.parse_args(arguments)


class TestOptions:
    def test_where_others_reach_the_process_the_working_folder_is_the_default(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        found = roots_of(options([]), is_reached=True)
        for check in (found.check_code, found.check_run):
            check(str(tmp_path / "mine"))
            with pytest.raises(UserError, match=f"is not below {tmp_path}"):
                check("/etc")

    def test_where_nobody_else_does_there_is_no_bound_unless_somebody_says_so(self, tmp_path: Path) -> None:
        roots_of(options([]), is_reached=False).check_run("/etc")
        with pytest.raises(UserError):
            roots_of(options(["--run-root", str(tmp_path)]), is_reached=False).check_run("/etc")

    def test_a_process_started_in_the_root_folder_has_to_be_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir("/")
        with pytest.raises(UserError, match="set the folder below which jobs may use paths: --code-root DIR"):
            roots_of(options([]), is_reached=True)
        found = roots_of(options(["--code-root", "/", "--run-root", "/"]), is_reached=True)
        found.check_code("/etc")

    def test_a_root_that_is_no_folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for path in ("file", "missing"):
            with pytest.raises(UserError, match=r"--run-root .*(not a folder|No such file)"):
                roots_of(options(["--run-root", str(tmp_path / path)]), is_reached=True)


class TestWhoeverReadsOrWrites:
    """Agents, coordinators and parameter servers refuse what leads elsewhere, whatever the others let pass."""

    def test_an_agent_inspects_nothing_of_elsewhere(self, tmp_path: Path) -> None:
        told: list[AgentReport] = []
        children = children_of(tmp_path, told)
        for code, run in ((tmp_path.parent, tmp_path / "run"), (tmp_path / "code", tmp_path.parent)):
            children.inspect(InspectCommand(JOB_ID, "{}", str(code), str(run)))
        assert [type(report) for report in told] == [InspectionResult, InspectionResult]
        first, second = told
        assert isinstance(first, InspectionResult)
        assert isinstance(second, InspectionResult)
        assert first.error == second.error == "UserError"
        assert "--code-root" in first.problems[0]
        assert "--run-root" in second.problems[0]
        assert children.jobs() == ()

    def test_an_agent_starts_no_stage_from_elsewhere(self, tmp_path: Path) -> None:
        told: list[AgentReport] = []
        children = children_of(tmp_path, told)
        fine = replace(submission(job(), str(tmp_path / "run")), import_path=str(tmp_path / "code"))
        elsewhere: list[dict[str, Any]] = [{"import_path": "/etc"}, {"run_dir": "/etc"}, {"restore": "/etc/checkpoint"}]
        for changes in elsewhere:
            assignment = Assignment(
                job=job(),
                submission=replace(fine, **changes),
                plan=plan_job(job(), model(), [agent_info()], Term(1), JOB_ID),
                agents=(agent_info(),),
                shards=(shard_member(0),),
            )
            children.start_stage(stage_commands(assignment)[0])
            failed, ended = told[-2:]
            assert isinstance(failed, KeyedStageReport)
            assert isinstance(failed.report, StageFailed)
            assert "is not below" in failed.report.sentence
            assert isinstance(ended, ChildExit)
        assert children.stages() == ()

    def test_a_parameter_server_serves_no_run_of_elsewhere(self, tmp_path: Path) -> None:
        roots = Roots(runs=root_of([tmp_path], RUN_OPTION, is_needed=True))
        server = ShardServer(lambda _config: MemoryHistory(), roots=roots)
        with pytest.raises(UserError, match="--run-root"):
            server.configure(shard_config(slices_of([4]), run_dir="/etc"))
        assert server.jobs() == ()

    def test_a_coordinator_takes_no_job_of_elsewhere(self, tmp_path: Path) -> None:
        class Rooted(Cluster):
            def new_coordinator(self) -> Coordinator:
                roots = Roots(runs=root_of([tmp_path], RUN_OPTION, is_needed=True))
                tools = replace(self.shards.tools, roots=roots)
                return Coordinator(self.store, tools, clock=self.clock, executor_of=lambda _: self.executor)

        cluster = Rooted(tmp_path / "run").usual()
        elsewhere: list[dict[str, Any]] = [{"run_dir": "/etc"}, {"restore": "/etc/checkpoint"}]
        for changes in elsewhere:
            with pytest.raises(UserError, match="--run-root"):
                cluster.coordinator.submit_job(replace(submission(job(), str(tmp_path / "run")), **changes))
        cluster.coordinator.submit_job(submission(job(), str(tmp_path / "run")))
        # What a folder leads to may change before it is written to.
        (tmp_path / "run").symlink_to(tmp_path.parent)
        cluster.train()
        assert cluster.coordinator.record(JOB_ID).state is JobState.FAILED
        assert "leads to" in cluster.coordinator.record(JOB_ID).failure


def children_of(folder: Path, told: list[AgentReport]) -> Children:
    (folder / "code").mkdir()
    code, runs = (
        root_of([folder / name], option, is_needed=True) for name, option in (("code", CODE_OPTION), (".", RUN_OPTION))
    )
    return Children(send=told.append, environment={}, clock=SYSTEM_CLOCK, roots=Roots(code, runs))


class TestStorage:
    def test_no_place_is_permitted_where_others_can_reach_the_process(self) -> None:
        roots = Roots(storage=())
        with pytest.raises(UserError) as caught:
            roots.check_run("/runs/a", storage="s3://bucket/runs")
        assert str(caught.value) == (
            "storage s3://bucket/runs is permitted by nobody here; use a place there, or have this process started "
            "with --storage-root URL, below which jobs may then use the store with the credentials of this process"
        )

    def test_places_below_a_root_are(self) -> None:
        roots = Roots(storage=("s3://bucket/runs",))
        roots.check_run("/runs/a", storage="s3://bucket/runs")
        roots.check_run("/runs/a", "s3://bucket/runs/team/a/checkpoints/clock-00000001", "s3://bucket/runs/team")
        for url in ("s3://bucket/runs-2", "s3://bucket", "gs://bucket/runs", "s3://other/runs"):
            with pytest.raises(UserError, match="is not below s3://bucket/runs, as required here"):
                roots.check_run("/runs/a", storage=url)
        with pytest.raises(UserError, match="the checkpoint s3://other/x is not below"):
            roots.check_run("/runs/a", restore="s3://other/x")
        with pytest.raises(UserError, match=r"storage: .* is not the URL of an object store"):
            roots.check_run("/runs/a", storage="http://bucket/runs")

    def test_a_file_url_is_a_folder_like_any_other(self, root: Root, tmp_path: Path) -> None:
        roots = Roots(runs=root, storage=())
        run = str(tmp_path / "runs" / "a")
        roots.check_run(run, storage=f"file://{tmp_path}/runs/store")
        with pytest.raises(UserError, match=r"storage file:///etc: the folder /etc is not below .*--run-root"):
            roots.check_run(run, storage="file:///etc")
        with pytest.raises(UserError, match="the folder /etc/checkpoints/clock-00000001 is not below"):
            roots.check_run(run, restore="file:///etc/checkpoints/clock-00000001")

    def test_the_option(self, tmp_path: Path) -> None:
        given = ["--storage-root", "s3://bucket/a/", "--run-root", str(tmp_path), "--code-root", str(tmp_path)]
        assert roots_of(options(given), is_reached=True).storage == ("s3://bucket/a",)
        assert roots_of(options(given[2:]), is_reached=True).storage == ()
        assert roots_of(options([]), is_reached=False).storage is None
        with pytest.raises(UserError, match=r"--storage-root: .*is not the URL of an object store"):
            roots_of(options(["--storage-root", "bucket"]), is_reached=False)


def test_initial_weights_are_below_the_root_of_runs(root: Root, tmp_path: Path) -> None:
    roots = Roots(runs=root)
    roots.check_initial_weights(None, "/anywhere")
    roots.check_initial_weights("a/model.safetensors", str(tmp_path / "runs"))
    roots.check_initial_weights(str(tmp_path / "runs" / "a"), "/anywhere")
    for source in ("../secret.safetensors", "/etc"):
        with pytest.raises(UserError, match=r"init_from .* is not below"):
            roots.check_initial_weights(source, str(tmp_path / "runs"))
    with pytest.raises(UserError, match=r"init_from: \['a'\] is no run"):
        roots.check_initial_weights(["a"], str(tmp_path))
