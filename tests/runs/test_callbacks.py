"""What a user's callbacks hear of a run."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hetpipe.checkpoint.manifest import MANIFEST, manifest_bytes, parse_manifest
from hetpipe.report.view import CallbackView
from hetpipe.runs.callbacks import Callback, CallbacksView
from hetpipe.runs.run_folder import RunFolder
from hetpipe.values.events import Evaluated, JobEnded, JobEvent, JobState, ProgressTable, Rewound, VirtualWorkerRow
from hetpipe.values.ids import Clock
from tests.cli.fakes import table
from tests.recorded.test_recorded_runs import FINISHED, HERE


class Heard(Callback):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def on_event(self, event: JobEvent) -> None:
        self.calls.append(("event", event.kind))

    def on_wave(self, worker: VirtualWorkerRow, progress: ProgressTable) -> None:
        assert worker in progress.rows
        self.calls.append(("wave", worker.vw, worker.clock))

    def on_epoch(self, epoch: int) -> None:
        self.calls.append(("epoch", epoch))

    def on_evaluation(self, evaluation: Evaluated) -> None:
        self.calls.append(("evaluation", evaluation.epoch))

    def on_checkpoint(self, checkpoint: str) -> None:
        self.calls.append(("checkpoint", Path(checkpoint).name))

    def take(self) -> list[tuple[object, ...]]:
        """The calls since the last time, without those about events."""
        calls, self.calls = self.calls, []
        return [call for call in calls if call[0] != "event"]


#: The last checkpoint of the recorded run, which has completed two epochs.
LAST = "clock-00000006"
EVALUATED = Evaluated(Clock(4), 1, 10, {"loss": 0.5})


def at(epoch: int, *clocks: int) -> ProgressTable:
    return replace(table(*clocks), epoch=epoch)


def complete_epochs(folder: RunFolder, epochs: int) -> None:
    """Let the last checkpoint be one after this number of epochs."""
    path = folder.path / "checkpoints" / LAST / MANIFEST
    manifest = parse_manifest(path.read_bytes())
    path.write_bytes(manifest_bytes(replace(manifest, progress=replace(manifest.progress, epoch=epochs))))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(Path(shutil.copytree(HERE / FINISHED, tmp_path / "run")))


def test_waves_epochs_and_the_end(folder: RunFolder) -> None:
    shutil.move(folder.path / "checkpoints", folder.path / "later")
    heard, shown = Heard(), list[JobEvent]()
    view = CallbacksView(CallbackView(shown.append), [heard], folder)
    view.show(at(1, 0, 0))
    assert heard.take() == []
    view.show(at(1, 2, 1))
    assert heard.take() == [("wave", 0, 2), ("wave", 1, 1)]
    view.show(at(1, 2, 2))
    assert heard.take() == [("wave", 1, 2)]
    view.show(EVALUATED)
    view.show(at(2, 3, 2))
    assert heard.take() == [("evaluation", 1), ("wave", 0, 3), ("epoch", 1)]
    view.show(Rewound(Clock(3), Clock(1), "run/rewind-1", "a disk was lost"))
    view.show(at(1, 1, 1))
    assert heard.take() == [("wave", 0, 1), ("wave", 1, 1)]
    view.show(at(4, 9, 9))
    assert heard.take() == [("wave", 0, 9), ("wave", 1, 9), ("epoch", 1), ("epoch", 2), ("epoch", 3)]
    shutil.move(folder.path / "later", folder.path / "checkpoints")
    complete_epochs(folder, 5)
    view.show(JobEnded(JobState.FINISHED))
    assert heard.take() == [("checkpoint", LAST), ("epoch", 4), ("epoch", 5)]
    assert len(shown) == 9


def test_a_run_without_a_report_of_progress_ends_its_epochs(folder: RunFolder) -> None:
    heard = Heard()
    view = CallbacksView(CallbackView(lambda _: None), [heard], folder)
    view.show(JobEnded(JobState.FINISHED))
    assert heard.take() == [("checkpoint", LAST), ("epoch", 1), ("epoch", 2)]


def test_a_stop_within_an_epoch_does_not_end_it(folder: RunFolder) -> None:
    heard = Heard()
    view = CallbacksView(CallbackView(lambda _: None), [heard], folder)
    complete_epochs(folder, 1)
    view.show(at(2, 1, 1))
    heard.take()
    view.show(JobEnded(JobState.STOPPED))
    assert heard.take() == []


def test_a_run_that_fails_ends_no_epoch(folder: RunFolder) -> None:
    heard = Heard()
    view = CallbacksView(CallbackView(lambda _: None), [heard], folder)
    view.show(at(2, 1, 1))
    heard.take()
    view.show(JobEnded(JobState.FAILED, "it failed"))
    assert heard.take() == []
    view.show(EVALUATED)
    assert heard.calls[0] == ("event", "evaluated")


def test_a_checkpoint_is_told_once(folder: RunFolder) -> None:
    newest = max((folder.path / "checkpoints").glob("clock-*"))
    shutil.move(newest, folder.path / newest.name)
    heard = Heard()
    view = CallbacksView(CallbackView(lambda _: None), [heard], folder)
    view.show(at(1, 0, 0))
    (before,) = heard.take()
    shutil.move(folder.path / newest.name, newest)
    view.show(at(1, 0, 0))
    view.show(at(1, 0, 0))
    assert (before[0], heard.take()) == ("checkpoint", [("checkpoint", newest.name)])


def test_an_exception_is_the_users(folder: RunFolder) -> None:
    class Failing(Callback):
        def on_evaluation(self, evaluation: Evaluated) -> None:
            raise ZeroDivisionError

    view = CallbacksView(CallbackView(lambda _: None), [Failing()], folder)
    with pytest.raises(ZeroDivisionError):
        view.show(EVALUATED)
