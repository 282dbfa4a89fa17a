"""The inspected model stays as long as a stage may be built from it, and is deleted when the job has ended for good."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetpipe.decide.lifecycle.inspections import InspectionRequest, inspect_command
from hetpipe.roots import Root, Roots
from hetpipe.server.coordinator.job_hosts import discard_model
from hetpipe.values.events import JobState, StopMode
from hetpipe.values.rewinds import MODEL_FILE, rewind_folder
from tests.server.coordinator.builders import JOB_ID, agent_info, job, submission
from tests.server.coordinator.test_going_back import Loss


@pytest.fixture
def loss(tmp_path: Path) -> Loss:
    loss = Loss(tmp_path)
    _file(loss).write_text("tensors")
    return loss


def _file(loss: Loss) -> Path:
    return loss.cluster.run_dir / MODEL_FILE


def test_a_finished_job_has_none(loss: Loss) -> None:
    loss.cluster.wait(2.0)
    assert _file(loss).exists(), "stages of a running job are restarted from it"
    loss.cluster.finish(JOB_ID)
    loss.cluster.wait(1.0)
    assert loss.state() is JobState.FINISHED
    assert not _file(loss).exists()


def test_a_stopped_job_has_none(loss: Loss) -> None:
    loss.coordinator.stop_job(JOB_ID, StopMode.NOW)
    loss.end_old_stages()
    loss.cluster.wait(1.0)
    assert loss.state() is JobState.STOPPED
    assert not _file(loss).exists()


def test_a_successor_still_has_it_and_deletes_it_at_the_end(loss: Loss) -> None:
    loss.succeed()
    assert loss.state() is JobState.RUNNING
    assert _file(loss).exists()
    loss.cluster.finish(JOB_ID)
    loss.cluster.wait(1.0)
    assert not _file(loss).exists()


def test_a_job_that_goes_back_still_has_it_and_its_end_deletes_it(loss: Loss) -> None:
    loss.lose()
    loss.come_back()
    loss.train_again()
    assert (loss.state(), loss.host.machine.submission.rewinds) == (JobState.RUNNING, 1)
    assert _file(loss).exists()
    loss.cluster.finish(JOB_ID)
    loss.cluster.wait(1.0)
    assert not _file(loss).exists()


@pytest.mark.parametrize("state", [JobState.FINISHED, JobState.FAILED, JobState.STOPPED])
def test_a_coordinator_killed_before_it_deleted_the_file_leaves_that_to_the_next(loss: Loss, state: JobState) -> None:
    kept = loss.cluster.store.job(JOB_ID)
    assert kept is not None
    loss.cluster.store.replace_job(kept.at(state, failure=""))
    assert _file(loss).exists()
    loss.replace()
    assert not _file(loss).exists()


def test_a_folder_outside_the_root_is_left_alone(loss: Loss) -> None:
    ended = replace(loss.record, state=JobState.FAILED)
    elsewhere = Roots(runs=Root((loss.cluster.run_dir / "other",), "--run-root"))
    discard_model(replace(loss.cluster.shards.tools, roots=elsewhere), ended)
    assert _file(loss).exists()
    discard_model(loss.cluster.shards.tools, ended)
    assert not _file(loss).exists()


def test_an_inspection_after_a_rewind_replaces_the_file() -> None:
    rewound = replace(submission(job(), rewind_folder("/runs/a", 1)), rewinds=1)
    asked = InspectionRequest(agent_info(), with_model=True, measure=())
    assert inspect_command(asked, job(), JOB_ID, rewound).run_dir == "/runs/a"
