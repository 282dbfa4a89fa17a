"""`hetpipe.minibatch` and `hetpipe.train` from a Python program."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import hetpipe
from hetpipe.cli.run.summary import summary_lines
from hetpipe.errors import CallableError, JobError, UserError
from hetpipe.runs.result import TrainResult
from hetpipe.runs.run_folder import RunFolder, RunRecord
from hetpipe.runs.training import RunEnd, Training
from hetpipe.values.events import Evaluated, JobEvent, JobState, StateChanged
from tests.cli.fakes import RESULT, small_job
from tests.models import data32, mlp32
from tests.support.fake_clock import FakeClock

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def rows_of(inputs: torch.Tensor | tuple[torch.Tensor, ...], target: torch.Tensor) -> list[int]:
    """Which samples of the data set these are."""
    assert isinstance(inputs, torch.Tensor)
    whole, targets = data32().tensors
    rows = [int((whole == row).all(dim=1).nonzero().item()) for row in inputs]
    assert torch.equal(targets[rows], target)
    return rows


def test_an_epoch_deals_every_sample_once() -> None:
    """46 samples in blocks of 4: 12 blocks, the last of 2, round-robin to two virtual workers."""
    job = small_job(epochs=1)
    dealt = {vw: [rows_of(*hetpipe.minibatch(job, vw, p)) for p in range(1, 7)] for vw in range(2)}
    assert sorted(row for blocks in dealt.values() for block in blocks for row in block) == list(range(46))
    assert [len(block) for block in dealt[0]] == [4] * 6
    assert [len(block) for block in dealt[1]] == [4] * 5 + [2]


def test_a_job_with_an_order_of_its_own_is_dealt_in_it() -> None:
    job = small_job(epochs=1, data={"train": "tests.models:data32", "shuffle": False})
    assert [rows_of(*hetpipe.minibatch(job, vw, 1)) for vw in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_run_is_read_with_the_code_that_it_was_trained_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is that of the submission, wherever the reader is; one that is gone is replaced by the reader's."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "only_of_this_run.py").write_text("from tests.models import data32 as train\n")
    folder = RunFolder.create(tmp_path / "run", name="small", clock=FakeClock())
    folder.write_job(small_job(epochs=1, data={"train": "only_of_this_run:train"}))
    recorded = RunRecord(run_dir=str(folder.path), name="small", host="h", started_wall=1.0, import_path=str(code))
    folder.write_record(recorded)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    expected = rows_of(*hetpipe.minibatch(small_job(epochs=1), 0, 1))
    assert rows_of(*hetpipe.minibatch(hetpipe.Run(folder.path), 0, 1)) == expected
    assert rows_of(*hetpipe.minibatch(folder.path / "job.json", 0, 1)) == expected
    assert folder.import_path(tmp_path) == code
    folder.write_record(replace(recorded, import_path=str(tmp_path / "gone")))
    assert folder.import_path(tmp_path) == tmp_path


def test_epochs_are_dealt_anew() -> None:
    job = small_job(epochs=2)
    first, second = (rows_of(*hetpipe.minibatch(job, 0, p)) for p in (1, 7))
    assert first != second


def test_a_stream_is_read_as_in_the_epoch_of_the_minibatch() -> None:
    """46 samples in blocks of 4 for two virtual workers: the second epoch begins at minibatch 7 of each."""
    job = small_job(data={"train": "tests.models:flipped_stream32", "shuffle": False, "length": 46}, loss=None)

    def rows_in(batch: Any) -> torch.Tensor:
        inputs, _ = batch
        assert isinstance(inputs, torch.Tensor)
        return inputs.abs()

    first, second = (hetpipe.minibatch(job, 1, p) for p in (1, 7))
    assert torch.equal(hetpipe.minibatch(job, 1, 7, indices=[4, 5, 6, 7], epoch=2)[1], second[1])
    assert torch.equal(hetpipe.minibatch(job, 1, 7, indices=[4, 5, 6, 7])[1], first[1])
    assert not torch.equal(rows_in(first), rows_in(second))


def test_numbering_skips_to_the_next_wave() -> None:
    """Three samples short of a wave: N = 4, six blocks per virtual worker, so 7 and 8 do not exist."""
    job = small_job(epochs=2, sync={"minibatches_per_wave": 4})
    hetpipe.minibatch(job, 0, 6)
    for p in (7, 8):
        with pytest.raises(LookupError) as caught:
            hetpipe.minibatch(job, 0, p)
        assert str(caught.value) == (
            f"virtual worker 0 has no minibatch {p}: numbering skips from 6, the last one before the barrier at "
            "clock 2 (epoch), to 9"
        )
    hetpipe.minibatch(job, 0, 9)
    with pytest.raises(LookupError, match="virtual worker 0 has no minibatch 17: the last one of the run is 14"):
        hetpipe.minibatch(job, 0, 17)


def test_checkpoints_cut_the_epoch_and_deal_anew() -> None:
    job = small_job(epochs=1, checkpoint={"every_waves": 2})
    dealt = [rows_of(*hetpipe.minibatch(job, vw, p)) for vw in range(2) for p in range(1, 7)]
    assert sorted(row for block in dealt for row in block) == list(range(46))
    whole = [rows_of(*hetpipe.minibatch(small_job(epochs=1), 0, p)) for p in range(1, 7)]
    assert dealt[:4] == whole[:4]
    assert dealt[4:6] != whole[4:6]


def test_a_run_given_by_minibatches_ends_there() -> None:
    job = small_job(minibatches=8)
    hetpipe.minibatch(job, 1, 8)
    with pytest.raises(LookupError, match="the last one of the run is 8"):
        hetpipe.minibatch(job, 1, 9)


@pytest.mark.parametrize(
    ("vw", "p", "words"),
    [
        (2, 1, "there is no virtual worker 2; the job has 2"),
        (-1, 1, "there is no virtual worker -1"),
        (0, 0, "there is no minibatch 0; minibatches are numbered from 1"),
    ],
)
def test_what_does_not_exist(vw: int, p: int, words: str) -> None:
    with pytest.raises(LookupError, match=words):
        hetpipe.minibatch(small_job(), vw, p)


def test_a_job_may_be_a_file_or_a_mapping(tmp_path: Path) -> None:
    job = small_job()
    values = job.model_dump(mode="json", exclude_none=True)
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(values))
    expected, _ = hetpipe.minibatch(job, 1, 3)
    for source in (path, str(path), values):
        inputs, _ = hetpipe.minibatch(source, 1, 3)
        assert torch.equal(torch.as_tensor(inputs), torch.as_tensor(expected))


def test_torchs_random_state_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    hetpipe.minibatch(small_job(), 0, 1)
    assert torch.equal(torch.rand(3), expected)


def pairs_of_inputs() -> list[tuple[tuple[torch.Tensor, torch.Tensor], int]]:
    """A data set whose samples have two inputs, one of them random."""
    return [((torch.full((2,), float(i)), torch.rand(1)), i) for i in range(8)]


def test_samples_with_several_inputs_come_as_a_tuple() -> None:
    job = small_job(data={"train": "tests.test_api:pairs_of_inputs"}, workers={"count": 1})
    inputs, target = hetpipe.minibatch(job, 0, 1)
    assert isinstance(inputs, tuple)
    assert torch.equal(inputs[0][:, 0], target.float())
    assert inputs[1].shape == (4, 1)


class Noisy:
    """Adds noise to each sample, as augmentation does."""

    def __init__(self) -> None:
        self._inputs, self._targets = data32().tensors

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inputs[index] + torch.randn(5), self._targets[index]


def test_random_augmentation_is_the_runs_own() -> None:
    job = small_job(data={"train": "tests.test_api:Noisy"})
    once, again, other = (hetpipe.minibatch(job, 0, p)[0] for p in (1, 1, 2))
    assert torch.equal(torch.as_tensor(once), torch.as_tensor(again))
    assert not torch.equal(torch.as_tensor(once), torch.as_tensor(other))


def test_what_cannot_be_used_is_told() -> None:
    with pytest.raises(CallableError, match=r"data\.train: `tests\.models` has no `nope`"):
        hetpipe.minibatch(small_job(data={"train": "tests.models:nope"}), 0, 1)
    with pytest.raises(JobError, match="no such file"):
        hetpipe.minibatch("nowhere.yaml", 0, 1)
    with pytest.raises(JobError, match=r"sync\.Q"):
        hetpipe.train(small_job(), sync={"Q": 1})
    with pytest.raises(UserError, match="there is no job to train"):
        hetpipe.train()
    with pytest.raises(JobError, match="model: is a lambda"):
        hetpipe.train(small_job(), model=lambda: None)
    with pytest.raises(JobError, match="optimizer"):
        hetpipe.train(model=mlp32)


@pytest.mark.parametrize("progress", ["lines", "none", "function"])
def test_what_the_command_prints_at_the_end(
    progress: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, on standard error; nothing for a program that shows the run itself. A notebook then shows one line."""
    result = TrainResult.from_json({**RESULT, "run_dir": str(tmp_path / "run")})
    end = RunEnd(run_dir=tmp_path / "run", state=JobState.FINISHED, result=result, resumable=True)
    monkeypatch.setattr(Training, "run", lambda _: end)
    shown: Any = progress if progress != "function" else lambda _: None
    found = hetpipe.train(small_job(), run_dir=tmp_path / "run", progress=shown)
    printed = capsys.readouterr()
    expected = "".join(f"{line}\n" for line in summary_lines(end, current=ROOT))
    assert (printed.out, printed.err) == ("", expected if progress == "lines" else "")
    assert f"export:  hetpipe export {tmp_path / 'run'} model.safetensors" in expected
    assert repr(found) == f"TrainResult(run_dir='{tmp_path / 'run'}', loss=1.1, eval={found.measures}, …)"
    assert found.measures == {"accuracy": 0.9, "loss": 1.06}


SCRIPT = """
from functools import partial
import hetpipe, neighbour, torch

def samples():
    inputs = torch.randn(16, 5, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))

if __name__ == "__main__":
    result = hetpipe.train(
        model=partial(neighbour.build, hidden=4), data=samples, loss=torch.nn.functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1), epochs=1, batch_size=4, workers={"stages": 2}, progress="none",
    )
    print(result.samples)
"""

NEIGHBOUR = """
from torch import nn

def build(hidden):
    return nn.Sequential(nn.Linear(5, hidden), nn.ReLU(), nn.Linear(hidden, 3))
"""


@pytest.mark.processes
@pytest.mark.exhaustive
def test_a_script_trains_its_own_functions(tmp_path: Path) -> None:
    """From another folder than its own."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "script.py").write_text(SCRIPT)
    (tmp_path / "code" / "neighbour.py").write_text(NEIGHBOUR)
    command = [sys.executable, "code/script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stdout) == (0, "16\n"), done.stderr


@pytest.mark.processes
@pytest.mark.exhaustive
def test_train_and_resume_from_python(tmp_path: Path) -> None:
    heard: list[JobEvent] = []
    result = hetpipe.train(
        small_job(data={"train": "tests.models:data32", "eval": "tests.models:data32"}),
        run_dir=tmp_path / "first",
        progress=heard.append,
        epochs=1,
        workers={"count": 2, "stages": 2},
    )
    assert result.run_dir == tmp_path / "first"
    assert (result.samples, result.minibatches, result.clocks) == (46, 12, {0: 3, 1: 3})
    assert result.staleness.violations == 0
    assert any(isinstance(event, StateChanged) for event in heard)
    (evaluation,) = [event for event in heard if isinstance(event, Evaluated)]
    assert result.eval["loss"] == evaluation.values["loss"]
    assert json.loads((tmp_path / "first" / "result.json").read_text()) == {"state": "finished", **result.to_json()}
    _assert_minibatch_is_what_the_run_used(tmp_path / "first")
    _assert_opened(hetpipe.Run(tmp_path / "first"), result)

    again = {"count": 2, "stages": 1}
    longer = hetpipe.train(
        resume=tmp_path / "first", run_dir=tmp_path / "second", progress="none", epochs=2, workers=again
    )
    assert (longer.samples, longer.global_clock) == (46, 6)
    assert longer.staleness.violations == 0


def _assert_minibatch_is_what_the_run_used(run_dir: Path) -> None:
    job = json.loads((run_dir / "job.json").read_text())
    n = job["sync"]["minibatches_per_wave"]
    lines = map(json.loads, (run_dir / "history" / "shard-0.jsonl").read_text().splitlines())
    used = [line for line in lines if line["event"] == "used"]
    assert len(used) == 6
    for line in used:
        vw, wave = line["vw"], line["wave"]
        rows = [rows_of(*hetpipe.minibatch(job, vw, p)) for p in range(wave * n + 1, (wave + 1) * n + 1)]
        assert [row for block in rows for row in block] == line["indices"]


def _assert_opened(run: hetpipe.Run, result: hetpipe.api.TrainResult) -> None:
    assert run.result == result
    assert run.status().state == "finished"
    assert all(report.ok for report in run.check().values())
    model = mlp32()
    loaded = run.load_into(model)
    assert loaded.clock == 3
    assert torch.equal(model.state_dict()["0.weight"], loaded.tensors["0.weight"])
