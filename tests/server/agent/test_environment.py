"""Which environment variables reach the processes that run a job's code, and that their values go nowhere else."""

from __future__ import annotations

import queue
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import JobError, UserError
from hetpipe.job.file import Job
from hetpipe.job.sections import EnvironmentSection
from hetpipe.server.agent.children import Children, Programs
from hetpipe.server.agent.environment import child_environment, missing
from hetpipe.server.agent.main import _allowed_environment
from hetpipe.values.commands import AgentReport, ChildExit, KeyedStageReport
from hetpipe.values.run import StageFailed
from tests.server.agent.test_children import Bench
from tests.server.coordinator.builders import job

OWN = {
    "PATH": "/bin",
    "LC_ALL": "C",
    "CUDA_VISIBLE_DEVICES": "1",
    "HF_HOME": "/models",
    "WANDB_API_KEY": "secret-4711",
    "AWS_SECRET_ACCESS_KEY": "secret-4712",
}
NEEDED = {"PATH", "LC_ALL", "CUDA_VISIBLE_DEVICES"}


def wish(**values: Any) -> EnvironmentSection:
    return EnvironmentSection(**values)


class TestWhatAChildHas:
    @pytest.mark.parametrize(
        ("wanted", "allowed", "names"),
        [
            (wish(), None, set(OWN)),
            (wish(inherit=()), None, NEEDED),
            (wish(inherit=("HF_HOME", "WANDB_*")), None, {*NEEDED, "HF_HOME", "WANDB_API_KEY"}),
            (wish(), (), NEEDED),
            (wish(), ("*",), NEEDED),
            (wish(inherit=("HF_HOME",)), ("HF_*", "AWS_*"), {*NEEDED, "HF_HOME"}),
            (wish(inherit=("*",)), ("*",), set(OWN)),
        ],
        ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
    )
    def test_what_every_program_needs_and_what_job_and_operator_name(
        self, wanted: EnvironmentSection, allowed: tuple[str, ...] | None, names: set[str]
    ) -> None:
        found = child_environment(OWN, wanted, allowed)

        assert found == {name: OWN[name] for name in names}

    def test_what_the_job_sets_goes_before_what_it_inherits(self) -> None:
        assert (
            child_environment(OWN, wish(inherit=("HF_HOME",), set={"HF_HOME": "/other"}), None)["HF_HOME"] == "/other"
        )

    @pytest.mark.parametrize("values", [{"inherit": ("AWS_*",)}, {"set": {"AWS_REGION": "x"}}, {"inherit": ("*",)}])
    def test_what_the_operator_does_not_name_is_refused_with_the_option(self, values: dict[str, Any]) -> None:
        with pytest.raises(UserError, match=r"have its operator add `--allow-environment '(AWS_.*|\*)'`, or remove it"):
            child_environment(OWN, wish(**values), ("HF_*",))

    def test_names_that_are_not_set_are_told(self) -> None:
        assert missing(OWN, wish(inherit=("HF_HOME", "HF_TOKEN", "NONE_*"))) == ("HF_TOKEN",)

    def test_an_agent_that_others_reach_passes_on_nothing_unless_it_is_told(self) -> None:
        assert _allowed_environment("127.0.0.1", None) is None
        assert _allowed_environment("10.0.0.7", None) == ()
        assert _allowed_environment("10.0.0.7", ["HF_*"]) == ("HF_*",)
        with pytest.raises(UserError, match="--allow-environment is empty"):
            _allowed_environment("10.0.0.7", [""])


class TestTheJob:
    @pytest.mark.parametrize(
        "name",
        ["LD_PRELOAD", "PYTHONPATH", "HETPIPE_TLS", "PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "BASH_ENV"],
    )
    def test_what_changes_the_boundary_or_is_hetpipes_own_cannot_be_set(self, name: str) -> None:
        with pytest.raises(JobError, match=rf"environment.set.*: {name} cannot be set by a job: .*; remove it"):
            Job(**{**job().model_dump(), "environment": {"set": {name: "x"}}})

    @pytest.mark.parametrize("environment", [{"inherit": ["A-B"]}, {"set": {"A=B": "x"}}, {"inherit": ["HETPIPE_TLS"]}])
    def test_names_are_names(self, environment: dict[str, Any]) -> None:
        with pytest.raises(JobError, match=r"environment\.(set|inherit)"):
            Job(**{**job().model_dump(), "environment": environment})


@pytest.mark.processes
class TestProcesses:
    def start(
        self, folder: Path, environment: dict[str, Any], allowed: tuple[str, ...] | None
    ) -> tuple[Path, list[AgentReport]]:
        """Start a stage that writes its environment down; where, and what was told."""
        found, told = folder / "environment", queue.SimpleQueue[AgentReport]()
        program = ("/bin/sh", "-c", f'env > "{found}"', "sh")
        programs = Programs(stage=program, inspection=program, allowed_environment=allowed)
        children = Children(send=told.put, environment=OWN, clock=SYSTEM_CLOCK, programs=programs)
        bench = Bench(folder)
        command = bench.start("done")
        bench.children.stop_all(grace_seconds=0.0)
        config = replace(command.config, job={**command.config.job, "environment": environment})
        children.start_stage(replace(command, config=config))
        reports: list[AgentReport] = []
        while not (reports and isinstance(reports[-1], ChildExit)):
            reports.append(told.get(timeout=10.0))
        children.stop_all()
        return found, reports

    def test_a_secret_reaches_the_stage_and_nothing_that_is_written_or_told(self, tmp_path: Path) -> None:
        wanted = {"inherit": ["WANDB_*", "GONE"], "set": {"WANDB_MODE": "offline"}}
        found, reports = self.start(tmp_path, wanted, ("WANDB_*", "GONE"))
        lines = found.read_text().splitlines()
        found.unlink()
        written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]

        assert {"WANDB_API_KEY=secret-4711", "WANDB_MODE=offline", "OMP_NUM_THREADS=1"} <= set(lines)
        assert not [line for line in lines if "4712" in line]
        assert not [text for text in (*written, *map(str, reports)) if "secret" in text]

    def test_a_stage_whose_variable_is_not_allowed_is_not_started(self, tmp_path: Path) -> None:
        found, (failed, _) = self.start(tmp_path, {"inherit": ["AWS_*"]}, ())

        assert not found.exists()
        assert isinstance(failed, KeyedStageReport)
        assert isinstance(failed.report, StageFailed)
        assert "environment.inherit: AWS_* is not among any it passes on" in failed.report.sentence
        assert "secret" not in str(failed)
