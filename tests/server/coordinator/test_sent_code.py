"""Code that is sent along with a job: every command of the job names its digest, and its agents get it by that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetpipe.errors import PermissionDenied, UnknownMember
from hetpipe.values.commands import InspectCommand, StartStageCommand
from hetpipe.values.events import CodeArchive
from hetpipe.values.ids import AgentId
from hetpipe.values.members import Registration
from tests.server.coordinator.builders import job, submission
from tests.server.coordinator.fakes import Cluster

CODE = CodeArchive("0f" * 32, b"PK")


def test_agents_get_the_code_of_a_job_by_the_digest_in_its_commands(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run").usual()
    cluster.coordinator.submit_job(replace(submission(job(), str(cluster.run_dir)), code=CODE))
    inspect = [command for agent in ("n0", "n1") for command in cluster.take(agent)]
    assert [each.code for each in inspect if isinstance(each, InspectCommand)] == [CODE.digest]
    own = cluster.registrations["n0"]
    assert cluster.coordinator.code(AgentId("n0"), own, CODE.digest) == CODE
    with pytest.raises(PermissionDenied, match="no job that is led here was sent with code of the digest ffff"):
        cluster.coordinator.code(AgentId("n0"), own, "ff" * 32)
    with pytest.raises(UnknownMember):
        cluster.coordinator.code(AgentId("stranger"), Registration("none"), CODE.digest)


def test_stages_are_started_with_it(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run").usual()
    cluster.coordinator.submit_job(replace(submission(job(), str(cluster.run_dir)), code=CODE))
    started = [command for _ in range(3) for command in cluster.obey() if isinstance(command, StartStageCommand)]
    assert started
    assert {command.code for command in started} == {CODE.digest}
