"""The best checkpoint of a run: noted, kept, and found again."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hetpipe
from hetpipe.checkpoint.best import Best, find_best, note_best, read_best
from hetpipe.checkpoint.export import export_weights
from hetpipe.checkpoint.manifest import checkpoint_dir
from hetpipe.decide.lifecycle.endings import best_evaluation
from hetpipe.errors import CheckpointError, JobError
from hetpipe.values.events import Evaluated
from hetpipe.values.ids import Clock
from tests.checkpoint.test_keeper import Parts
from tests.cli.fakes import small_job
from tests.models import mlp32
from tests.recorded.test_recorded_runs import FINISHED, HERE

DATA = {"train": "tests.models:data32", "eval": "tests.models:data32"}
ACCURACY = {"accuracy": "hetpipe.pipeline.metrics:accuracy"}


def at(clock: int, **values: float) -> Evaluated:
    return Evaluated(Clock(clock), clock, 10, values)


class TestWhich:
    EVALUATIONS = (at(2, loss=3.0, accuracy=0.9), at(4, loss=1.0, accuracy=0.8), at(6, loss=2.0, accuracy=0.9))

    def best(self, **keys: object) -> tuple[str, int] | None:
        found = best_evaluation(small_job(data=DATA, metrics=ACCURACY, **keys), self.EVALUATIONS)
        return None if found is None else (found[0], found[1].clock)

    def test_it_is_that_of_the_metric(self) -> None:
        assert self.best() is None
        assert self.best(checkpoint={"best": "loss"}) == ("loss", 4)
        assert self.best(checkpoint={"best": "accuracy"}) == ("accuracy", 2)
        assert self.best(early_stopping={"metric": "accuracy", "mode": "min"}) == ("accuracy", 4)
        assert self.best(early_stopping={}, checkpoint={"best": "accuracy"}) == ("accuracy", 2)

    def test_only_whole_evaluations_at_barriers_count(self) -> None:
        job = small_job(data=DATA, checkpoint={"best": "loss"})
        odd = [
            replace(at(3, loss=0.1), within_epoch=True),
            replace(at(4, loss=0.2), whole=False),
            at(5, loss=float("nan")),
        ]
        assert best_evaluation(job, odd) is None
        assert best_evaluation(job, [*odd, at(6, loss=9.0)]) == ("loss", at(6, loss=9.0))

    def test_what_cannot_be_best_is_refused(self) -> None:
        with pytest.raises(JobError, match=r"checkpoint\.best: needs evaluations, which need `data\.eval`"):
            small_job(checkpoint={"best": "loss"})
        with pytest.raises(JobError, match=r"checkpoint\.best: is accurcy, .* did you mean `accuracy`"):
            small_job(data=DATA, metrics=ACCURACY, checkpoint={"best": "accurcy"})
        with pytest.raises(JobError, match=r"checkpoint\.best: is for checkpoints in the folder of the run"):
            small_job(data=DATA, checkpoint={"best": "loss"}, storage="s3://bucket/runs")


def test_the_keeper_keeps_it_until_another_is_better(tmp_path: Path) -> None:
    parts = Parts(tmp_path, keep=1)
    parts.all(2)
    note_best(tmp_path, Best(Clock(2), "loss", 1.0))
    parts.all(4)
    parts.all(6)
    assert parts.folders == [2, 6]
    note_best(tmp_path, Best(Clock(6), "loss", 0.5))
    parts.all(8)
    assert parts.folders == [6, 8]


class TestFinding:
    @pytest.fixture
    def run_dir(self, tmp_path: Path) -> Path:
        return Path(shutil.copytree(HERE / FINISHED, tmp_path / "run"))

    def test_it_is_read_and_exported(self, run_dir: Path, tmp_path: Path) -> None:
        clocks = sorted(int(path.name.partition("-")[2]) for path in (run_dir / "checkpoints").glob("clock-*"))
        assert len(clocks) > 1
        run = hetpipe.Run(run_dir)
        assert run.best() is None
        best = Best(Clock(clocks[0]), "loss", 0.25)
        note_best(run_dir, best)
        assert (read_best(run_dir), run.best()) == (best, best)
        state = run.load_into(model := mlp32(), best=True)
        assert state.clock == clocks[0]
        assert torch.equal(model.state_dict()["0.weight"], state.tensors["0.weight"])
        assert run.weights().clock == clocks[-1]
        assert hetpipe.export(run, tmp_path / "best.safetensors", best=True).clock == clocks[0]

    def test_that_of_an_earlier_rewind(self, run_dir: Path) -> None:
        (oldest, *_) = sorted((run_dir / "checkpoints").glob("clock-*"))
        best = Best(Clock(int(oldest.name.partition("-")[2])), "loss", 0.25)
        note_best(run_dir / "rewind-1", best)
        assert find_best(run_dir) == (oldest, best)

    def test_what_is_not_there(self, run_dir: Path, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"no best checkpoint: .* set checkpoint\.best or early_stopping"):
            export_weights(run_dir, tmp_path / "best.safetensors", is_best=True)
        note_best(run_dir, Best(Clock(99), "loss", 0.25))
        assert not checkpoint_dir(run_dir, Clock(99)).exists()
        with pytest.raises(CheckpointError, match="no longer has the checkpoint at clock 99, where loss was best"):
            find_best(run_dir)
        with pytest.raises(CheckpointError, match="is in an object store"):
            export_weights("s3://bucket/run", tmp_path / "best.safetensors", is_best=True)
