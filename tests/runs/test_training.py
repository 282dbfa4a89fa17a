"""A run from its request to its result, on a scripted coordinator."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetpipe.checkpoint.best import Best, note_best
from hetpipe.cli.run.summary import summary_lines
from hetpipe.errors import CallableError, HetpipeError, JobFailed, PeerUnreachable
from hetpipe.job.file import Job, load_job
from hetpipe.runs.interrupts import Interrupts
from hetpipe.runs.outcome import ExitStatus
from hetpipe.runs.result import TrainResult
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.training import (
    RunEnd,
    RunRequest,
    Training,
    choose_devices,
    metrics_remark,
    planning_remark,
    resume_command,
)
from hetpipe.server.agent.devices import DeviceOffer
from hetpipe.values.events import JobEnded, JobEvent, JobState, StateChanged, StopMode
from hetpipe.values.ids import Clock
from hetpipe.values.plan_document import Predicted
from tests.checkpoints import write_checkpoint
from tests.cli.fakes import FINISHES, RESULT, FakeCoordinator, RecordingView, shell_with, small_job
from tests.deploy.deployments import plan, stage
from tests.job.test_job_cluster import CLUSTER, PROFILE
from tests.support.fake_clock import FakeClock


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    return RunFolder.create(None, name="small", clock=FakeClock())


def run(
    folder: RunFolder,
    coordinator: FakeCoordinator,
    *,
    restore: str | None = None,
    interrupts: int = 0,
    detaches: bool = False,
) -> tuple[RunEnd, RecordingView]:
    """One run, with so many interrupts heard before it ends."""
    view = RecordingView()
    shell = shell_with(coordinator, folder.path.parent.parent)
    request = RunRequest(
        job=small_job(),
        import_path=shell.current,
        restore=restore,
        coordinator="127.0.0.1:7300",
        detaches=detaches,
    )
    with Interrupts([]) as taken:
        taken.count = interrupts
        return Training(request, folder, shell, view=view, interrupts=taken).run(), view


def failing(sentence: str, error: str = "JobFailed") -> FakeCoordinator:
    return FakeCoordinator([JobEnded(JobState.FAILED, sentence, error)])


def test_an_attempt_that_fails_before_it_trains_leaves_latest_at_the_run_before(folder: RunFolder) -> None:
    run(folder, FakeCoordinator())
    assert Path("runs/latest").resolve() == folder.path
    attempt = RunFolder.create(None, name="attempt", clock=FakeClock())
    run(attempt, failing("data.train: raised", "CallableError"))
    assert Path("runs/latest").resolve() == folder.path


def test_a_run_that_finishes_leaves_its_result(folder: RunFolder) -> None:
    coordinator = FakeCoordinator()
    end, view = run(folder, coordinator)
    assert end.state is JobState.FINISHED
    assert end.exit_status is ExitStatus.OK
    assert end.to_json() == RESULT
    assert view.events == list(FINISHES)
    assert view.closed
    written = folder.read_result()
    assert written is not None
    assert written.values == {"state": "finished", **RESULT}
    record = folder.read_record()
    assert (record.job_id, record.coordinator, record.local) == ("small-1", "127.0.0.1:7300", False)
    assert folder.read_job() == small_job()


def test_what_is_handed_in(folder: RunFolder, tmp_path: Path) -> None:
    coordinator = FakeCoordinator()
    run(folder, coordinator, restore=str(tmp_path / "checkpoint"))
    (submission,) = coordinator.submissions
    assert Job.model_validate(json.loads(submission.job_json)) == small_job()
    assert submission.run_dir == str(folder.path)
    assert submission.import_path == str(tmp_path)
    assert submission.restore == str(tmp_path / "checkpoint")
    assert len(submission.request_id) >= 8


def test_a_run_that_breaks_off_says_how_to_resume(folder: RunFolder) -> None:
    write_checkpoint(folder.path, 3)
    end, _ = run(folder, failing("stage 1 of virtual worker 0 was killed by SIGKILL"))
    assert end.exit_status is ExitStatus.FAILED
    hint = f"resume with: hetpipe submit --resume runs/{folder.path.name} --coordinator 127.0.0.1:7300"
    assert end.sentences == (f"stage 1 of virtual worker 0 was killed by SIGKILL; {hint}",)
    assert end.to_json() == {"errors": list(end.sentences)}
    assert isinstance(end.exception(), JobFailed)
    written = folder.read_result()
    assert written is not None
    assert (written.state, written.errors) == ("failed", end.sentences)


def test_without_a_checkpoint_there_is_nothing_to_resume(folder: RunFolder) -> None:
    end, _ = run(folder, failing("it broke"))
    assert end.sentences == ("it broke",)


def test_the_users_mistake_is_not_to_be_resumed(folder: RunFolder) -> None:
    write_checkpoint(folder.path, 3)
    end, _ = run(folder, failing("model: there is no module `nope`", "CallableError"))
    assert end.sentences == ("model: there is no module `nope`",)
    assert end.exit_status is ExitStatus.USAGE
    assert isinstance(end.exception(), CallableError)


def test_a_run_stopped_by_ctrl_c(folder: RunFolder) -> None:
    write_checkpoint(folder.path, 3)
    end, _ = run(folder, FakeCoordinator([JobEnded(JobState.STOPPED, result=RESULT)]), interrupts=1)
    assert end.exit_status is ExitStatus.INTERRUPTED
    assert end.to_json() == RESULT
    assert "; resume with: hetpipe submit --resume runs/" in end.sentences[0]
    written = folder.read_result()
    assert written is not None
    assert written.state == "stopped"


def test_a_run_stopped_by_somebody_else_is_a_failure(folder: RunFolder) -> None:
    end, _ = run(folder, FakeCoordinator([JobEnded(JobState.STOPPED, result=RESULT)]))
    assert end.exit_status is ExitStatus.FAILED


def test_ctrl_c_while_it_is_followed(folder: RunFolder) -> None:
    coordinator = FakeCoordinator([StateChanged(JobState.RUNNING)])

    def stop(mode: StopMode) -> None:
        assert mode is StopMode.CHECKPOINT
        coordinator.script.put(JobEnded(JobState.STOPPED, result=RESULT))

    coordinator.on_stop = stop

    class Pressed(RecordingView):
        def show(self, event: JobEvent) -> None:
            super().show(event)
            if isinstance(event, StateChanged):
                interrupts._on_signal(2, None)

    shell = shell_with(coordinator, folder.path.parent.parent)
    request = RunRequest(job=small_job(), import_path=shell.current, coordinator="127.0.0.1:7300")
    with Interrupts([]) as interrupts:
        end = Training(request, folder, shell, view=Pressed(), interrupts=interrupts).run()
    assert end.exit_status is ExitStatus.INTERRUPTED
    assert end.sentences == ("the run was stopped before its end",)


def test_who_is_told_to_end_detaches_and_who_comes_after_means_the_same_job(folder: RunFolder) -> None:
    class Told(RecordingView):
        def show(self, event: JobEvent) -> None:
            super().show(event)
            if isinstance(event, StateChanged):
                interrupts._on_signal(signal.SIGTERM, None)

    first = FakeCoordinator([StateChanged(JobState.RUNNING)])
    shell = shell_with(first, folder.path.parent.parent)
    request = RunRequest(job=small_job(), import_path=shell.current, coordinator="127.0.0.1:7300", detaches=True)
    with Interrupts([]) as interrupts:
        end = Training(request, folder, shell, view=Told(), interrupts=interrupts).run()
    first.script.put(JobEnded(JobState.FINISHED))  # for the thread that still listens
    where = f"runs/{folder.path.name}"
    assert (end.exit_status, end.exit_status.value, first.stops) == (ExitStatus.DETACHED, 143, [])
    (sentence,) = end.sentences
    assert sentence.startswith("detached from job small-1, which continues; follow it again with: hetpipe submit ")
    assert sentence.endswith(f"--run-dir {where} --coordinator 127.0.0.1:7300; stop it with: hetpipe stop {where}")
    assert folder.read_result() is None

    second = FakeCoordinator()
    end, _ = run(folder, second, detaches=True)
    assert end.exit_status is ExitStatus.OK
    assert second.submissions == first.submissions, "the same request is the same job"
    third = FakeCoordinator([])
    told, _ = run(folder, third, detaches=True)
    assert (told.exit_status, told.to_json()) == (ExitStatus.OK, end.to_json())
    assert third.submissions == []


def test_what_has_begun_is_not_handed_in_again(folder: RunFolder) -> None:
    run(folder, FakeCoordinator([PeerUnreachable("gone")] * 1300), detaches=True)
    (folder.path / "facts.json").write_text("{}")
    coordinator = FakeCoordinator()
    end, _ = run(folder, coordinator, detaches=True)
    assert (end.exit_status, coordinator.submissions) == (ExitStatus.OK, [])


def test_a_coordinator_of_a_cluster_that_is_lost_leaves_no_result(folder: RunFolder) -> None:
    end, _ = run(folder, FakeCoordinator([PeerUnreachable("gone")] * 1300), detaches=True)
    assert end.exit_status is ExitStatus.LOST_CONTACT
    assert "follow it again with: hetpipe submit --run-dir" in end.sentences[0]
    assert folder.read_result() is None, "the run may go on"


def test_how_a_run_failed_is_told_again(folder: RunFolder) -> None:
    first, _ = run(folder, failing("no such thing", "CallableError"), detaches=True)
    again, _ = run(folder, FakeCoordinator([]), detaches=True)
    assert (again.exit_status, again.sentences) == (ExitStatus.USAGE, first.sentences)


def test_ctrl_c_before_the_job_is_handed_in(folder: RunFolder) -> None:
    class Slow(FakeCoordinator):
        def submit_job(self, _submission: object) -> None:  # type: ignore[override]
            raise KeyboardInterrupt

    end, _ = run(folder, Slow(), interrupts=1)
    assert end.exit_status is ExitStatus.INTERRUPTED
    assert end.to_json() == {"errors": ["the run was stopped before it began"]}


@pytest.mark.parametrize(
    ("error", "status"), [(PeerUnreachable("gone"), ExitStatus.FAILED), (CallableError("no"), ExitStatus.USAGE)]
)
def test_a_job_that_cannot_be_handed_in(folder: RunFolder, error: HetpipeError, status: ExitStatus) -> None:
    class Refusing(FakeCoordinator):
        def submit_job(self, _submission: object) -> None:  # type: ignore[override]
            raise error

    end, _ = run(folder, Refusing())
    assert end.exit_status is status
    assert end.sentences == (str(error),)


def test_a_mistake_of_ours_is_written_down_too(folder: RunFolder) -> None:
    class Broken(FakeCoordinator):
        def submit_job(self, _submission: object) -> None:  # type: ignore[override]
            raise ZeroDivisionError("ours")

    with pytest.raises(ZeroDivisionError):
        run(folder, Broken())
    written = folder.read_result()
    assert written is not None
    assert written.errors == ("internal error (ZeroDivisionError: ours)",)


def test_the_summary_says_what_came_of_it_and_what_to_do_next(folder: RunFolder, tmp_path: Path) -> None:
    write_checkpoint(folder.path, 3)
    end, _ = run(folder, FakeCoordinator())
    where = f"runs/{folder.path.name}"
    assert summary_lines(end, current=tmp_path) == [
        "finished after 0.5 s of training: 92 samples in 12 waves at 184 samples/s; clock of worker 0: 6, 1: 6",
        "loss: 1.2000 in the first wave, 1.1000 in the last",
        "evaluation: accuracy 0.9000, loss 1.0600 (46 samples)",
        "memory: at most 8 KiB of weight copies and 1.5 KiB of activations, on stage 0 of worker 0",
        "clock distance: largest seen 1, allowed at most 2; the history was not checked",
        f"results: {where} (result.json; trace.json opens in Perfetto; logs, history, checkpoints)",
        f"export:  hetpipe export {where} model.safetensors",
    ]


def test_the_summary_says_how_to_export_weights_that_were_better_than_the_last(
    folder: RunFolder, tmp_path: Path
) -> None:
    write_checkpoint(folder.path, 3)
    for clock in (3, 6):  # the last clock is 6
        note_best(folder.path, Best(Clock(clock), "accuracy", 0.95))
        write_checkpoint(folder.path, clock)
        end, _ = run(folder, FakeCoordinator())
        told = [line for line in summary_lines(end, current=tmp_path) if "--best" in line]
        where = f"runs/{folder.path.name}"
        line = f"best:    hetpipe export {where} model.safetensors --best, with accuracy 0.9500 at clock 3"
        assert told == ([line] if clock == 3 else [])


def test_the_summary_tells_what_was_survived(tmp_path: Path) -> None:
    end = RunEnd(run_dir=tmp_path / "runs" / "a", state=JobState.FINISHED)
    result = replace(small_result(0), deaths={0: 1, 1: 0, 2: 3})
    told = summary_lines(replace(end, result=result), current=tmp_path)
    assert "survived: virtual worker 0 died 1 time, virtual worker 2 died 3 times, and the run continued" in told


@pytest.mark.parametrize(
    ("violations", "words"),
    [(0, "the history shows no violation"), (1, "the history shows 1 violation: hetpipe check runs/a")],
)
def test_the_summary_tells_of_the_history(violations: int, words: str, tmp_path: Path) -> None:
    end = RunEnd(run_dir=tmp_path / "runs" / "a", state=JobState.FINISHED)
    result = small_result(violations)
    assert words in summary_lines(replace(end, result=result), current=tmp_path)[2]


def test_a_run_says_where_it_is_and_how_it_was_planned_once(folder: RunFolder) -> None:
    """Also when it begins to train again."""
    others = [(stage(f"n1/{index}", "T4", 0, 5),) for index in range(3)]
    forecast = plan((stage("n0/0", "T4", 0, 4), stage("n0/1", "P4", 4, 5)), *others)
    (folder.path / "forecast.json").write_text(forecast.model_dump_json())
    running = StateChanged(JobState.RUNNING)
    _, view = run(folder, FakeCoordinator([running, StateChanged(JobState.STARTING), *FINISHES]))
    assert [one for one in view.remarks if one.startswith(("the run's folder", "the plan"))] == [
        f"the run's folder is runs/{folder.path.name}",
        (
            "the plan: virtual worker 0 has layers 0–3 on n0/0 (T4), 4 on n0/1 (P4); "
            "virtual worker 1 has layers 0–4 on n1/0 (T4); and 2 more virtual workers"
        ),
    ]


@pytest.mark.parametrize(
    ("predicted", "emulated", "words"),
    [
        (
            200.0,
            False,
            "measured 184 over the whole run, which also steps the optimizer, reads data and evaluates (-8%)",
        ),
        (1240.0, False, "(-85%)"),
        (200.0, True, "(-8%)"),
        (1240.0, True, "computes slower than the devices that it emulates, so this says nothing of them"),
    ],
)
def test_the_summary_compares_with_the_plan(
    predicted: float,
    emulated: bool,  # noqa: FBT001 - of the cases
    words: str,
    tmp_path: Path,
) -> None:
    forecast = plan(
        (stage("n0/0", "T4", 0, 4),),
        predicted=Predicted(samples_per_second=predicted, cross_node_bytes_per_minibatch=0.0),
    )
    end = RunEnd(run_dir=tmp_path, state=JobState.FINISHED, result=small_result(0), forecast=forecast)
    (line,) = [one for one in summary_lines(replace(end, emulated=emulated), current=tmp_path) if "predicted" in one]
    assert line.endswith(words)


def test_the_summary_tells_of_skipped_updates(tmp_path: Path) -> None:
    end = RunEnd(run_dir=tmp_path / "runs" / "a", state=JobState.FINISHED)
    result = replace(small_result(0), skipped_updates={0: 3, 1: 0, 2: 1})
    assert (
        "skipped: 3 updates of virtual worker 0, 1 update of virtual worker 2, in which a gradient overflowed at the "
        "scale of the loss; their samples count"
    ) in summary_lines(replace(end, result=result), current=tmp_path)


def small_result(violations: int) -> TrainResult:
    staleness = {**RESULT["staleness"], "violations": violations}
    return TrainResult.from_json({**RESULT, "eval": {}, "stages": [], "staleness": staleness})


@pytest.mark.parametrize(
    ("changes", "cuda", "devices", "words"),
    [
        ({}, 0, DeviceOffer(num_cpu_devices=2), ", with 2 CPU devices"),
        ({}, 2, DeviceOffer(), ", with 2 CUDA devices"),
        ({}, 1, DeviceOffer(devices_per_gpu=2), ", with 1 CUDA device, shared by the job's 2 stages"),
        (
            {"workers.count": 2, "workers.stages": 2},
            3,
            DeviceOffer(devices_per_gpu=2),
            ", with 3 CUDA devices, shared by the job's 4 stages",
        ),
        (
            {"cluster": {"slowdown": 2.0}, "workers.stages": 2},
            8,
            DeviceOffer(num_cpu_devices=4),
            ", with 4 emulated devices",
        ),
    ],
)
def test_devices_of_a_local_run(changes: dict[str, object], cuda: int, devices: DeviceOffer, words: str) -> None:
    assert choose_devices(small_job(**changes), count_cuda=lambda: cuda) == (devices, words)


def auto_job(**cluster: Any) -> Job:
    return load_job(small_job(), {"workers.stages": "auto", "cluster": cluster})


def test_a_job_that_is_to_be_planned_gets_every_cpu_this_program_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5})
    assert choose_devices(auto_job(), count_cuda=lambda: 0) == (DeviceOffer(num_cpu_devices=3), ", with 3 CPU devices")
    assert choose_devices(auto_job(), count_cuda=lambda: 2) == (DeviceOffer(), ", with 2 CUDA devices")


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (small_job(), ""),
        (small_job(cluster={"file": CLUSTER, "emulate": True}), "the model is measured first"),
        (
            auto_job(),
            (
                "the run is planned first: the model is measured, unmeasured links are assumed to carry "
                "2 GB/s within a node and 1.25 GB/s between nodes (no cluster.file)"
            ),
        ),
        (auto_job(file=CLUSTER), "the run is planned first: the model is measured"),
        (auto_job(file=CLUSTER, profile=PROFILE), "the run is planned first"),
    ],
)
def test_what_comes_before_a_run_is_told(job: Job, words: str) -> None:
    assert planning_remark(job) == words


def test_metrics_that_nothing_is_evaluated_by() -> None:
    metrics = {"accuracy": "hetpipe.pipeline.metrics:accuracy"}
    assert metrics_remark(small_job()) == ""
    assert metrics_remark(small_job(metrics=metrics)).startswith(
        "accuracy: metrics are of evaluations, which need `data.eval`"
    )
    data = {"train": "tests.models:data32", "eval": "tests.models:data32"}
    assert metrics_remark(small_job(metrics=metrics, data=data)) == ""


def test_what_resumes_a_run() -> None:
    run, here = Path("/runs/one"), Path("/runs")
    assert resume_command(run, here, None) == "hetpipe train --resume one"
    assert resume_command(run, here, "h:1") == "hetpipe submit --resume one --coordinator h:1"
    assert resume_command(run, here, "h:1", "hetpipe launch --hosts a,b") == "hetpipe launch --hosts a,b --resume one"


def test_the_remark_is_shown_first(folder: RunFolder, tmp_path: Path) -> None:
    view = RecordingView()
    request = RunRequest(job=auto_job(), import_path=tmp_path, coordinator="127.0.0.1:7300")
    with Interrupts([]) as interrupts:
        Training(request, folder, shell_with(FakeCoordinator(), tmp_path), view=view, interrupts=interrupts).run()
    assert view.remarks == [f"the run's folder is runs/{folder.path.name}", planning_remark(auto_job())]
