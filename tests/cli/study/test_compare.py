"""The command with a trainer that plays a script."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from hetpipe.cli.study.compare import Options, run
from hetpipe.comparison.record import TrialRecord, TrialState
from hetpipe.comparison.trials import Trial
from hetpipe.errors import CallableError, JobError, UserError
from hetpipe.report.view import View
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell
from tests.cli.fakes import FakeCoordinator, shell_with
from tests.comparison.comparisons import diverged, record, write_job


@dataclass
class Trainer:
    """Makes records without training."""

    trained: list[str] = field(default_factory=list)
    make: Callable[[Trial], TrialRecord] = lambda trial: record(trial.weights, trial.seed)

    def __call__(self, trial: Trial, run_dir: Path, shell: Shell, view: View) -> TrialRecord:
        self.trained.append(str(trial))
        run_dir.mkdir()
        return replace(self.make(trial), job_digest=trial.job_digest, run_dir=run_dir.name)


@dataclass
class Called:
    """How one call went."""

    status: ExitStatus
    people: str
    complaints: str
    answers: list[dict[str, Any]]


def call(
    folder: Path,
    trainer: Trainer,
    *,
    weights: str = "wave,flush",
    seeds: int = 1,
    as_json: bool = False,
    changes: Sequence[str] = (),
    **options: Any,
) -> Called:
    people, complaints, machine = io.StringIO(), io.StringIO(), io.StringIO()
    output = Output(people=people, complaints=complaints, machine=machine if as_json else None)
    asked = Options(job=write_job(folder), weights=weights, seeds=seeds, settings=tuple(changes), **options)
    status = run(asked, output, shell_with(FakeCoordinator(), folder), trainer)
    answers = [json.loads(line) for line in machine.getvalue().splitlines()]
    return Called(status, people.getvalue(), complaints.getvalue(), answers)


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_everything_is_trained_and_told(tmp_path: Path) -> None:
    trainer = Trainer()
    called = call(tmp_path, trainer, seeds=2)
    assert called.status is ExitStatus.OK
    assert trainer.trained == ["wave, seed 3", "flush, seed 3", "wave, seed 4", "flush, seed 4"]
    lines = called.people.splitlines()
    assert lines[0].startswith("the comparison's folder is runs/compare-small-")
    assert lines[4].startswith("run 4 of 4: flush, seed 4: finished after 2.0 s: loss 0.5000")
    assert "small: 2 weight policies, 2 seeds" in called.people
    assert {"How well it trains", "How fast it is"} <= {line.strip() for line in lines}
    (folder,) = Path("runs").iterdir()
    assert {path.name for path in folder.iterdir()} >= {"compare.json", "wave-seed-3", "flush-seed-4"}


def test_the_answer_is_one_object(tmp_path: Path) -> None:
    called = call(tmp_path, Trainer(), as_json=True, run_dir=Path("kept"))
    (answer,) = called.answers
    assert list(answer) == ["run_dir", "seeds", "policies", "runs"]
    assert (answer["run_dir"], answer["seeds"]) == (str(tmp_path / "kept"), [3])
    assert [one["weights"] for one in answer["policies"]] == ["wave", "flush"]
    assert answer["policies"][0]["final"]["loss"] == {"mean": 0.5, "deviation": None, "least": 0.5, "most": 0.5}
    assert answer["runs"][1] == {
        "weights": "flush",
        "values": "",
        "seed": 3,
        "state": "finished",
        "sentence": "",
        "run_dir": str(tmp_path / "kept" / "flush-seed-3"),
    }
    assert "run 2 of 2" in called.people
    assert "How well it trains" not in called.people


def test_a_second_call_trains_what_is_not_there_yet(tmp_path: Path) -> None:
    call(tmp_path, Trainer(), run_dir=Path("kept"))
    trainer = Trainer()
    called = call(tmp_path, trainer, weights="wave,stash", seeds=2, run_dir=Path("kept"))
    assert trainer.trained == ["stash, seed 3", "wave, seed 4", "stash, seed 4"]
    assert "run 1 of 4: wave, seed 3: trained before, finished" in called.people
    changed = Trainer()
    call(tmp_path, changed, run_dir=Path("kept"), changes=["epochs=5"])
    assert len(changed.trained) == 2


def test_a_run_that_diverges_is_a_row(tmp_path: Path) -> None:
    trainer = Trainer(make=lambda trial: (diverged if trial.weights == "wave" else record)(trial.weights, trial.seed))
    called = call(tmp_path, trainer, run_dir=Path("kept"))
    assert called.status is ExitStatus.OK
    assert "wave, seed 3 diverged at minibatch 37" in called.people.replace("\n", " ")
    again = Trainer()
    call(tmp_path, again, run_dir=Path("kept"))
    assert again.trained == []


def test_a_run_that_fails_is_a_row_and_is_done_again(tmp_path: Path) -> None:
    failing = Trainer(make=lambda trial: replace(diverged(trial.weights, trial.seed), state=TrialState.FAILED))
    called = call(tmp_path, failing, run_dir=Path("kept"))
    assert called.status is ExitStatus.FAILED
    assert len(failing.trained) == 2
    again = Trainer()
    assert call(tmp_path, again, run_dir=Path("kept")).status is ExitStatus.OK
    assert len(again.trained) == 2
    assert (tmp_path / "kept" / "wave-seed-3-2").is_dir()


def stopping_at(weights: str) -> Trainer:
    def make(trial: Trial) -> TrialRecord:
        if trial.weights == weights:
            raise KeyboardInterrupt
        return record(trial.weights, trial.seed)

    return Trainer(make=make)


def test_ctrl_c_keeps_what_is_finished(tmp_path: Path) -> None:
    called = call(tmp_path, stopping_at("flush"), run_dir=Path("kept"), as_json=True)
    assert called.status is ExitStatus.INTERRUPTED
    assert "interrupted after 1 of 2 runs; continue with --run-dir kept" in called.people
    assert [one["weights"] for one in called.answers[0]["runs"]] == ["wave"]
    trainer = Trainer()
    call(tmp_path, trainer, run_dir=Path("kept"))
    assert trainer.trained == ["flush, seed 3"]


def test_ctrl_c_before_anything_is_finished(tmp_path: Path) -> None:
    called = call(tmp_path, stopping_at("wave"), run_dir=Path("kept"), as_json=True)
    assert called.status is ExitStatus.INTERRUPTED
    assert called.answers == [{"errors": ["interrupted after 0 of 2 runs; continue with --run-dir kept"]}]


def test_the_page(tmp_path: Path) -> None:
    called = call(tmp_path, Trainer(), html=Path("page.html"))
    assert "the page is in page.html" in called.people
    assert '<figure class="card curves"' in Path("page.html").read_text()


def test_a_page_that_could_not_be_written_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    trainer = Trainer()
    with pytest.raises(UserError, match=r"--html nowhere/page.html: no such folder"):
        call(tmp_path, trainer, html=Path("nowhere/page.html"))
    Path("folder").mkdir()
    with pytest.raises(UserError, match=r"cannot write folder: .*; give --html another file"):
        call(tmp_path, trainer, html=Path("folder"))


def test_refusals_come_before_anything_is_made(tmp_path: Path) -> None:
    trainer = Trainer()
    with pytest.raises(JobError):
        call(tmp_path, trainer, changes=["optimizer.lrr=1"])
    assert trainer.trained == []
    assert not Path("runs").exists()


def test_a_job_that_cannot_be_trained_ends_the_comparison(tmp_path: Path) -> None:
    def refuse(trial: Trial) -> TrialRecord:
        raise CallableError("model: no")

    trainer = Trainer(make=refuse)
    with pytest.raises(CallableError):
        call(tmp_path, trainer)
    assert len(trainer.trained) == 1
