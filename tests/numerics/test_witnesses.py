"""Runs whose weights are counts: whatever the timing, every sample of every epoch was added exactly once everywhere."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from hetpipe.checkpoint.manifest import newest_checkpoint
from hetpipe.decide.sync.records import CommitRecord, Record
from hetpipe.decide.sync.shard_state import ShardState
from hetpipe.errors import ClockNotPublished
from hetpipe.server.shard.push_session import PushSession
from hetpipe.server.shard.shard import Shard
from hetpipe.values.ids import Clock
from hetpipe.values.requests import PushHeader, Watermarks
from tests.models import NUM_WITNESSES
from tests.numerics.compare import Case, run, trained
from tests.pairwise import every_nth
from tests.pipeline.witness import sample_counts
from tests.support.in_process import InProcessResult

#: With lr = 1 an update is the sum of the samples of its minibatch.
COUNTING: dict[str, Any] = {"name": "SGD", "lr": 1.0}


def case(**changes: Any) -> Case:
    """Two epochs over samples that are their own witnesses."""
    values: dict[str, Any] = {
        "model": "witnesses",
        "data": "witness_data",
        "loss": "tests.pipeline.witness:witness_loss",
        "optimizer": COUNTING,
        "workers": 3,
        "epochs": 2,
        "batch_size": 3,
        "deterministic": False,
    }
    return Case(**{**values, **changes})


def counts(folder: Path) -> list[list[int]]:
    """Per layer, how often each sample was used."""
    return [sample_counts(cells, NUM_WITNESSES) for name, cells in sorted(trained(folder).items())]


def clock_of(result: InProcessResult) -> int:
    assert result.snapshot is not None
    return result.snapshot.published


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("kind", "staleness", "wave", "stages"),
    every_nth(
        2,
        [
            ("wsp", 0, 4, 3),
            ("wsp", 0, 1, 2),
            ("wsp", 1, 1, [[1, 3], [3, 1], [4]]),
            ("wsp", 1, 2, 4),
            ("wsp", 4, 3, 2),
            ("asp", 0, 1, 3),
            ("asp", 0, 4, [[4], [2, 2], [1, 1, 1, 1]]),
        ],
    ),
)
def test_every_sample_counts_once_per_epoch_on_every_layer(
    *, kind: str, staleness: int, wave: int, stages: Any, seed: int, tmp_path: Path
) -> None:
    run(
        case(kind=kind, staleness=staleness, wave=wave, stages=stages, every_waves=3),
        tmp_path,
        delay_seconds=0.002,
        delay_seed=seed,
    )
    assert counts(tmp_path) == [[2] * NUM_WITNESSES] * 4


@pytest.mark.parametrize("order", ["fifo", "1f1b"])
def test_deterministic_runs_count_the_same(order: str, tmp_path: Path) -> None:
    run(case(deterministic=True, schedule=order, wave=4, stages=2, epochs=3), tmp_path, delay_seconds=0.001)
    assert counts(tmp_path) == [[3] * NUM_WITNESSES] * 4


@pytest.mark.parametrize(
    ("kind", "wave", "stop_at"),
    every_nth(3, [("wsp", 2, 1), ("wsp", 1, 2), ("asp", 4, 0), ("asp", 1, 1), ("asp", 3, 1)]),
)
def test_a_stop_and_a_resumed_run_together_count_every_sample_once(
    kind: str, wave: int, stop_at: int, tmp_path: Path
) -> None:
    """A stop may come at any time: under `asp` right at the start, too, when minibatches run far ahead unasked."""
    whole = case(kind=kind, wave=wave, stages=2)
    stopped = run(
        whole, tmp_path / "a", stop_when=lambda clocks: clocks.published >= stop_at, delay_seconds=0.001, delay_seed=7
    )
    after_stop = counts(tmp_path / "a")
    assert after_stop.count(after_stop[0]) == 4, "every layer holds the same waves"
    resumed = run(whole, tmp_path / "b", restore=newest_checkpoint(tmp_path / "a"), delay_seconds=0.001)
    assert clock_of(resumed) > clock_of(stopped)
    assert counts(tmp_path / "b") == [[2] * NUM_WITNESSES] * 4


def test_a_shard_that_falls_far_behind_slows_the_others_down_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `asp` no clock holds a worker back; a shard that cannot keep up says "later" to its pushes."""
    follow, begin_push, check_pull = Shard.follow, Shard.begin_push, ShardState.check_pull
    was_refused, may_go_on = threading.Event(), threading.Event()

    def stuck(shard: Shard, record: Record) -> None:
        if shard.config.shard == 1 and isinstance(record, CommitRecord) and record.wave >= 2:
            assert may_go_on.wait(30.0)
            if not was_refused.is_set():
                may_go_on.clear()
        follow(shard, record)

    def awaited(state: ShardState, clock: Clock) -> None:
        """A clock that was published before the shard got stuck may be awaited there: it goes on by a record."""
        try:
            check_pull(state, clock)
        except ClockNotPublished:
            may_go_on.set()
            raise

    def noticed(shard: Shard, header: PushHeader) -> PushSession | Watermarks:
        try:
            return begin_push(shard, header)
        except ClockNotPublished:
            was_refused.set()
            may_go_on.set()
            raise

    monkeypatch.setattr(ShardState, "check_pull", awaited)
    monkeypatch.setattr(Shard, "follow", stuck)
    monkeypatch.setattr(Shard, "begin_push", noticed)
    run(case(kind="asp", workers=1, wave=1, batch_size=1, epochs=1), tmp_path, delay_seconds=0.0)
    assert was_refused.is_set()
    assert counts(tmp_path) == [[1] * NUM_WITNESSES] * 4


def test_mean_adds_a_share_of_everything(tmp_path: Path) -> None:
    """Four workers, powers of two: a quarter of each count is exact."""
    run(case(workers=4, combine="mean", stages=2, wave=2, epochs=1), tmp_path, delay_seconds=0.001)
    layers = [4.0 * cells for _, cells in sorted(trained(tmp_path).items())]
    assert [sample_counts(cells, NUM_WITNESSES) for cells in layers] == [[1] * NUM_WITNESSES] * 4
