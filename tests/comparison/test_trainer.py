"""One run of a comparison: what is noted while it is followed, and what is kept of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetpipe.comparison.record import TrialRecord, TrialState
from hetpipe.comparison.trainer import Recorder, record_of, train_trial
from hetpipe.comparison.trials import Trial
from hetpipe.errors import CallableError
from hetpipe.observe.history import History
from hetpipe.observe.metrics import Metrics, WaveMetrics, metrics_path
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.training import RunEnd, Training
from hetpipe.values.events import Evaluated, JobState, StateChanged
from hetpipe.values.ids import Clock
from tests.cli.fakes import FakeCoordinator, RecordingView, shell_with
from tests.comparison.comparisons import result, trials
from tests.support.fake_clock import FakeClock

NUM_SAMPLES = 46


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return trials(tmp_path)[0]


@pytest.fixture
def folder(tmp_path: Path, trial: Trial) -> RunFolder:
    """A run of 12 minibatches, that is 6 waves, an epoch."""
    folder = RunFolder.create(tmp_path / "wave-seed-3", name="small", clock=FakeClock(), runs_dir=tmp_path)
    folder.write_job(trial.job)
    (folder.path / "facts.json").write_text(json.dumps({"num_samples": NUM_SAMPLES}))
    return folder


def evaluated(clock: int, loss: float) -> Evaluated:
    return Evaluated(Clock(clock), 0, 46, {"loss": loss, "accuracy": 0.5}, minibatches=2 * clock)


def followed(*, epochs: int = 2, loss: float = 0.5) -> Recorder:
    """A recorder that has heard of a run that took 10 s to start and 3 s for each epoch."""
    clock = FakeClock(monotonic=100.0)
    recorder = Recorder(RecordingView(), clock)
    recorder.show(StateChanged(JobState.STARTING))
    clock.advance(10.0)
    recorder.show(StateChanged(JobState.RUNNING))
    for epoch in range(1, epochs + 1):
        clock.advance(3.0)
        recorder.show(replace(evaluated(6 * epoch - 3, loss), within_epoch=True, whole=False))
        recorder.show(evaluated(6 * epoch, loss / epoch))
    return recorder


def kept(trial: Trial, folder: RunFolder, recorder: Recorder, **ended: Any) -> TrialRecord:
    defaults: dict[str, Any] = {"run_dir": folder.path, "state": JobState.FINISHED, "result": result()}
    return record_of(trial, RunEnd(**{**defaults, **ended}), recorder, folder)


def test_evaluations_stand_at_their_minibatches_and_seconds(trial: Trial, folder: RunFolder) -> None:
    found = kept(trial, folder, followed())
    assert [(one.minibatches, one.seconds, one.values["loss"]) for one in found.evaluations] == [
        (12, 3.0, 0.5),
        (24, 6.0, 0.25),
    ]
    assert found.is_of(trial)
    assert (found.state, found.sentence, found.run_dir) == (TrialState.FINISHED, "", "wave-seed-3")


def test_waves_stand_at_the_seconds_since_the_start_of_training(trial: Trial, folder: RunFolder) -> None:
    clock = FakeClock(monotonic=110.0)
    metrics = Metrics(metrics_path(folder.path, 0), clock=clock)
    for wave, loss in enumerate([1.0, float("nan"), 0.5]):
        clock.advance(1.5)
        line = WaveMetrics(
            wave=wave,
            p=2 * wave + 2,
            minibatches=2,
            samples=8,
            weight=8,
            loss=loss,
            learning_rate=0.1,
            gradient_norm=None,
            max_norm=None,
        )
        metrics.write(line)
    found = kept(trial, folder, followed())
    assert [(one.minibatches, one.seconds, one.values["loss"]) for one in found.losses] == [
        (2, 1.5, 1.0),
        (6, 4.5, 0.5),
    ]


def test_commits_show_how_far_virtual_workers_were_apart(trial: Trial, folder: RunFolder) -> None:
    clock = FakeClock(monotonic=110.0)
    history = History(folder.path / "history" / "shard-0.jsonl", host="n0", pid=1, role="ps", term=1, clock=clock)
    for vw, wave in ((0, 0), (1, 0), (0, 1), (0, 2)):
        clock.advance(1.5)
        history.commit(vw=vw, incarnation=0, wave=wave, samples=8)
        history.apply(shard=0, vw=vw, incarnation=0, wave=wave)
    found = kept(trial, folder, followed())
    batch = trial.job.batch_size
    assert [(one.minibatches, one.seconds, one.values) for one in found.distances] == [
        (8 * number / batch, 1.5 * number, {"clock distance": distance})
        for number, distance in enumerate([0.0, 0.0, 1.0, 2.0], start=1)
    ]


def test_values_that_are_not_finite_are_left_out(trial: Trial, folder: RunFolder) -> None:
    found = kept(trial, folder, followed(epochs=1, loss=float("inf")))
    assert found.evaluations[0].values == {"accuracy": 0.5}


def test_a_run_that_diverged_keeps_what_it_had(trial: Trial, folder: RunFolder) -> None:
    sentence = "stage 1: the update of minibatch 17 is not finite in parameter w"
    ended = {"state": JobState.FAILED, "result": None, "error": "NonFiniteUpdate", "sentences": (sentence,)}
    found = kept(trial, folder, followed(epochs=1), **ended)
    assert (found.state, found.sentence, found.result) == (TrialState.DIVERGED, sentence, None)
    assert len(found.evaluations) == 1


def test_a_run_that_broke_off_before_it_began(trial: Trial, folder: RunFolder) -> None:
    (folder.path / "facts.json").unlink()
    ended = {"state": JobState.FAILED, "result": None, "error": "PeerUnreachable", "sentences": ("gone",)}
    found = kept(trial, folder, Recorder(RecordingView(), FakeClock()), **ended)
    assert (found.state, found.evaluations, found.losses) == (TrialState.FAILED, (), ())


def test_a_run_that_somebody_else_stopped_is_no_result(trial: Trial, folder: RunFolder) -> None:
    found = kept(trial, folder, followed(), state=JobState.STOPPED, sentences=("the run was stopped",))
    assert (found.state, found.result) == (TrialState.FAILED, None)


def test_a_job_that_cannot_be_trained_ends_the_comparison(trial: Trial, folder: RunFolder) -> None:
    ended = {"state": JobState.FAILED, "result": None, "error": "CallableError", "sentences": ("model: no",)}
    with pytest.raises(CallableError, match="model: no"):
        kept(trial, folder, followed(), **ended)


def test_the_recorder_hides_nothing() -> None:
    view = RecordingView()
    recorder = Recorder(view, FakeClock())
    recorder.show(StateChanged(JobState.RUNNING))
    recorder.say("a remark")
    recorder.close()
    assert (view.events, view.remarks, view.closed) == ([StateChanged(JobState.RUNNING)], ["a remark"], True)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_run_is_trained_in_its_folder(
    trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, interrupted: bool
) -> None:
    (tmp_path / "compared").mkdir()
    run_dir = tmp_path / "compared" / "wave-seed-3"
    end = RunEnd(run_dir=run_dir, state=JobState.FINISHED, result=result())
    stopped = replace(end, state=JobState.STOPPED, interrupted=True, sentences=("the run was stopped",))
    monkeypatch.setattr(Training, "run", lambda _: stopped if interrupted else end)
    shell = shell_with(FakeCoordinator(), tmp_path)
    if interrupted:
        with pytest.raises(KeyboardInterrupt, match="the run was stopped"):
            train_trial(trial, run_dir, shell, RecordingView())
    else:
        assert train_trial(trial, run_dir, shell, RecordingView()).state is TrialState.FINISHED
    assert (run_dir / "logs").is_dir()
