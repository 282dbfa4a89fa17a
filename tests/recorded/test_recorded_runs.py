"""Runs that earlier versions recorded: this one reads them, or refuses them with a sentence."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hetpipe.checker import check_run
from hetpipe.checkpoint.export import export_weights
from hetpipe.checkpoint.manifest import newest_checkpoint, read_manifest
from hetpipe.errors import StateLost
from hetpipe.job.as_json import job_from_json
from hetpipe.observe.history import History
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.training import end_of
from hetpipe.server.shard.clock_shard import ClockShard
from hetpipe.server.shard.job_storage import JobStorage, StateOptions, old_jobs, read_config
from hetpipe.server.shard.shard import Shard
from hetpipe.values.events import JobState
from hetpipe.values.ids import Clock
from tests.models import mlp32
from tests.processes.harness import Train

HERE = Path(__file__).parent

FINISHED, KILLED, OLDER = "0.1-finished", "0.1-killed", "hpF2-killed"

#: Beginnings of the SHA-256 of the weights that the version which recorded it recovers on each shard, at clock 6.
RECOVERED = ("0fb6ded201c1723b", "d7a9d61839004bbe")


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    return Path(shutil.copytree(HERE / KILLED, tmp_path / KILLED))


@pytest.mark.parametrize(
    ("name", "waves", "is_complete"), [(FINISHED, 12, True), (KILLED, 12, False), (OLDER, 11, False)]
)
def test_the_history_is_judged(name: str, waves: int, *, is_complete: bool) -> None:
    report = check_run(HERE / name)

    assert not report.violations
    assert report.counts.complete is is_complete
    assert f"{waves} waves committed" in report.lines()[0]


@pytest.mark.parametrize(("name", "clock"), [(FINISHED, 6), (KILLED, 4), (OLDER, 4)])
def test_the_newest_checkpoint_is_found_and_exported(name: str, clock: int, tmp_path: Path) -> None:
    checkpoint = newest_checkpoint(HERE / name)
    assert read_manifest(checkpoint).progress.clock == clock
    export_weights(HERE / name, tmp_path / "weights.safetensors")
    weights = load_file(tmp_path / "weights.safetensors")
    model = mlp32()
    model.load_state_dict(weights)

    assert all(torch.isfinite(value).all() for value in weights.values())


def test_the_job_and_how_it_ended_are_read() -> None:
    folder = RunFolder(HERE / FINISHED)
    result = folder.read_result()
    assert result is not None
    end = end_of(folder, result)

    assert end.state is JobState.FINISHED
    assert end.result is not None
    assert (end.result.waves, end.result.samples, end.result.staleness.violations) == (12, 92, 0)
    for name in (FINISHED, KILLED, OLDER):
        assert job_from_json((HERE / name / "job.json").read_text()).name == "recorded"


class Recovered:
    """The parameter servers of a run, as restarted processes find them."""

    def __init__(self, run_dir: Path, stack: ExitStack) -> None:
        self.shards: list[Shard] = []
        self.states: list[JobStorage] = []
        for index in (0, 1):
            root = run_dir / "state" / f"shard-{index}"
            (folder,) = root.glob("*@*")
            config = read_config(folder)
            path = run_dir / "history" / f"shard-{index}.jsonl"
            history = History(path, host="h", pid=1, role="parameter_server", term=config.term)
            state = JobStorage(config, StateOptions(root=root), history)
            stack.callback(history.close)
            stack.callback(state.close)
            assert state.recovered_pushes is not None
            shard = Shard(config, state.history, state.pushes)
            shard.restore(state.recovered_pushes)
            if index == 0:
                self.clock = ClockShard(config, state.history, state.journal, state.recovered_decisions)
            self.shards.append(shard)
            self.states.append(state)

    def follow(self) -> None:
        for shard, state in zip(self.shards, self.states, strict=True):
            for record in self.clock.records_from(shard._state.followed):
                shard.follow(record)
            shard.caught_up()
            state.caught_up()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_parameter_servers_that_were_killed_go_on_with_the_same_weights(killed: Path, stack: ExitStack) -> None:
    assert list(killed.glob("state/*/*/pushes/snapshot-*.tmp")), "they were killed while they wrote snapshots"
    recovered = Recovered(killed, stack)
    recovered.follow()
    told = recovered.clock.snapshot()

    assert (told.published, told.waves, dict(told.durable)) == (6, 12, {0: 6, 1: 6})
    for shard, expected in zip(recovered.shards, RECOVERED, strict=True):
        weights = shard._versions[Clock(6)].memory()
        assert hashlib.sha256(weights).hexdigest().startswith(expected)
    assert not check_run(killed).violations, "also with what the restarted processes add to the history"


@pytest.mark.parametrize("index", [0, 1])
def test_logs_of_the_format_before_are_refused_with_what_to_do(index: int, tmp_path: Path) -> None:
    root = Path(shutil.copytree(HERE / OLDER / "state" / f"shard-{index}", tmp_path / "state"))
    [(_, refusal)] = old_jobs(root)

    assert isinstance(refusal, StateLost)
    assert "written by another version of hetpipe; end the job with that version, or restart it from" in str(refusal)


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [KILLED, OLDER])
def test_a_run_is_resumed_by_this_version(name: str, tmp_path: Path) -> None:
    """From the checkpoint of the version that was killed, to the end."""
    run_dir = shutil.copytree(HERE / name, tmp_path / name)
    outcome = Train(tmp_path, "--resume", run_dir, "--set", "epochs=3").finish()

    assert outcome.returncode == 0, outcome.stderr
    assert outcome.result["staleness"]["violations"] == 0
    before = read_manifest(newest_checkpoint(HERE / name)).progress
    assert before.samples + outcome.result["samples"] == 3 * 46
