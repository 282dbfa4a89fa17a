"""A stage's part of a checkpoint: who writes what, and what is waited for at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from hetpipe.checkpoint.format import CheckpointReader
from hetpipe.checkpoint.stage_part import LEAVER_SECONDS, PartWriter
from hetpipe.errors import CheckpointNotWritten, DeadlineExceeded
from hetpipe.observe.timeline import NullTimeline
from hetpipe.pipeline.barrier import stage_checkpoints
from hetpipe.pipeline.chain import chain_of
from hetpipe.pipeline.waiting import Waiter
from hetpipe.values.ids import Clock, JobId
from tests.support.fake_clock import FakeClock

NAME = "vw-0-stage-0.safetensors"
LAST_CHECKPOINT_SECONDS = 20.0


class Bell:
    """A condition at which time passes."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self.on_wait: Callable[[float], object] = lambda _: None

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, seconds: float) -> None:
        self._clock.advance(seconds)
        self.on_wait(self._clock.monotonic())


class Stage:
    """A stage of one frozen and one trained layer, whose clock shard gives these answers."""

    def __init__(self, folder: Path, answers: Iterable[bool | Exception] = (), *, has_shards: bool = True) -> None:
        self.answers = list(answers)
        self.reports: list[tuple[Path | None, str]] = []
        self.clock = FakeClock()
        self.condition = condition = Bell(self.clock)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        model.get_parameter("0.weight").requires_grad = False
        model[0].register_buffer("mean", torch.zeros(2))
        parts = SimpleNamespace(
            timeline=NullTimeline(),
            layers=chain_of(model),
            has_shards=has_shards,
            scales=None,
            part_writer=PartWriter(lambda _: folder, JobId("job"), NAME),
            weights=SimpleNamespace(
                at_barrier=SimpleNamespace(views={"1.weight": torch.ones(1, 2)}),
                optimizer=SimpleNamespace(state=lambda: {"1.weight": {"num_updates": 3}}),
            ),
            synchroniser=SimpleNamespace(report_checkpoint=self.report),
            clock=self.clock,
            last_checkpoint_seconds=LAST_CHECKPOINT_SECONDS,
        )
        waiter = Waiter(
            "stage 0",
            cast("threading.Condition", condition),
            report=lambda _: None,
            timeline=NullTimeline(),
            clock=self.clock,
            stall_seconds=60.0,
        )
        self.work = stage_checkpoints(cast("Any", parts), cast("Any", SimpleNamespace(condition=condition)), waiter)
        self.path = folder / NAME

    def report(self, clock: Clock, path: Path | None, *, failure: str = "") -> bool:
        assert clock == 4
        self.reports.append((path, failure))
        if failure:
            raise CheckpointNotWritten("given up")
        answer = self.answers.pop(0) if self.answers else False
        if isinstance(answer, Exception):
            raise answer
        return answer

    def run(self, *, is_keeper: bool = True, is_last: bool = False, leaves: bool = False) -> None:
        self.work.run(Clock(4), is_keeper=is_keeper, is_last=is_last, leaves=leaves)

    def keys(self) -> list[str]:
        return CheckpointReader([self.path]).keys("")


def test_the_shards_have_the_weights(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.run()
    assert stage.reports == [(stage.path, "")]
    assert stage.keys() == ["buffers/0.mean", "buffers/0.weight"]
    assert CheckpointReader([stage.path]).optimizer_state(["1.weight"]) == {"1.weight": {"num_updates": 3}}


def test_without_shards_a_keeper_has_the_weights(tmp_path: Path) -> None:
    stage = Stage(tmp_path, has_shards=False)
    stage.run()
    assert stage.keys() == ["buffers/0.mean", "buffers/0.weight", "weights/1.weight"]


@pytest.mark.parametrize("has_shards", [True, False])
def test_others_have_their_optimizer_state_only(tmp_path: Path, *, has_shards: bool) -> None:
    stage = Stage(tmp_path, has_shards=has_shards)
    stage.run(is_keeper=False)
    assert stage.keys() == []


def test_the_last_checkpoint_is_waited_for(tmp_path: Path) -> None:
    stage = Stage(tmp_path, [False] * 5 + [True])
    stage.run(is_last=True)
    assert stage.reports == [(stage.path, "")] * 6


def test_who_leaves_waits_for_it_but_not_for_long(tmp_path: Path) -> None:
    stage = Stage(tmp_path, [False] * 5 + [True])
    stage.run(leaves=True)
    assert stage.reports == [(stage.path, "")] * 6
    stage = Stage(tmp_path)
    stage.run(leaves=True)
    assert LEAVER_SECONDS <= stage.clock.monotonic() < LEAVER_SECONDS + 0.1
    Stage(tmp_path, [False, CheckpointNotWritten("given up")]).run(leaves=True)


def test_not_for_ever(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    with pytest.raises(DeadlineExceeded, match="stage 0 waited 80 s for the other parts of the checkpoint at clock 4"):
        stage.run(is_last=True)


def test_one_that_is_given_up_is_the_end_of_a_run_only_at_its_end(tmp_path: Path) -> None:
    error = CheckpointNotWritten("the checkpoint at clock 4 was given up: shard 1 is full")
    Stage(tmp_path, [error]).run()
    with pytest.raises(CheckpointNotWritten, match="shard 1 is full"):
        Stage(tmp_path, [False, error]).run(is_last=True)


def test_a_disk_that_cannot_be_written_to_is_reported(tmp_path: Path) -> None:
    """Here it is a file where the folder should be; `test_checkpoint` fills one."""
    (tmp_path / "no folder").write_bytes(b"")
    stage = Stage(tmp_path / "no folder")
    stage.run()
    ((path, failure),) = stage.reports
    assert path is None
    assert f"{NAME} cannot be written" in failure
    assert stage.clock.monotonic() == 0, "the next one comes soon"
    with pytest.raises(CheckpointNotWritten, match="given up"):
        stage.run(is_last=True)
    assert stage.clock.monotonic() == LAST_CHECKPOINT_SECONDS


def test_the_last_one_is_written_as_soon_as_there_is_room(tmp_path: Path) -> None:
    blocked = tmp_path / "no folder"
    blocked.write_bytes(b"")
    stage = Stage(blocked, [True])

    def make_room(seconds: float) -> None:
        if seconds > LAST_CHECKPOINT_SECONDS / 2:
            blocked.unlink(missing_ok=True)

    stage.condition.on_wait = make_room
    stage.run(is_last=True)
    assert stage.reports == [(stage.path, "")], "nobody was told of a failure"
