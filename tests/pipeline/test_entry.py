"""A stage comes in where a segment names its virtual worker, and makes the initial weights if it is asked to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn

from hetpipe.checkpoint.stage_part import PartWriter
from hetpipe.decide.sync.records import (
    BarrierRecord,
    EvictRecord,
    HandoverRecord,
    PublishRecord,
    Record,
    SegmentMember,
    SegmentRecord,
    TermRecord,
)
from hetpipe.errors import CheckpointNotWritten, DeadlineExceeded, LinkClosed, ProtocolViolation, StaleIncarnation
from hetpipe.observe.history import MemoryHistory
from hetpipe.observe.timeline import NullTimeline
from hetpipe.pipeline import entry
from hetpipe.pipeline.chain import chain_of
from hetpipe.pipeline.entry import Entry
from hetpipe.pipeline.inbox import Inbox
from hetpipe.pipeline.layer_weights import layout_of
from hetpipe.pipeline.setup import StageIdentity, StageParts
from hetpipe.pipeline.waiting import Waiter
from hetpipe.values.ids import Clock, Incarnation, JobId, StageIndex, Term
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.weights.flat import BufferPool, FlatBuffer
from tests.support.fake_clock import FakeClock

TERM = TermRecord(0, Term(1))


def segment(start: int, *members: tuple[int, int], reasons: tuple[str, ...] = ("join",)) -> SegmentRecord:
    """A segment of (virtual worker, incarnation) from `start` on."""
    named = tuple(SegmentMember(Vw(vw), Incarnation(life), 1, joined=life > 0) for vw, life in members)
    return SegmentRecord(1, Clock(start), reasons, 0, named)


class Stage:
    """Stage 0 of virtual worker 1; `calls` are what happens each time it calls at the clock shard."""

    def __init__(
        self,
        *calls: Callable[[], bool],
        incarnation: int = 1,
        has_shards: bool = True,
        complete_after: int | None = None,
    ) -> None:
        self.calls = list(calls)
        self.pushed: list[torch.Tensor] = []
        self.waits: list[str] = []
        self.on_wait: Callable[[], object] = lambda: None
        self.looks_left = complete_after
        life = (Vw(1), Incarnation(incarnation))
        self.layers = chain_of(nn.Sequential(nn.Linear(2, 1)))
        self.weight = next(iter(self.layers[0].module.parameters())).detach().clone()
        self.pool = BufferPool(layout_of(self.layers, torch.device("cpu")), torch.device("cpu"))
        self.inbox = Inbox(None, None, Clock(0), life=life)
        self.hear(TERM)
        parts = SimpleNamespace(
            identity=StageIdentity(life[0], StageIndex(0), life[1], 1),
            synchroniser=self,
            pool=self.pool,
            layers=self.layers,
            has_shards=has_shards,
            clock=FakeClock(auto_advance=True),
            last_checkpoint_seconds=10.0,
            part_writer=PartWriter(lambda clock: Path(f"clock-{clock}"), JobId("job"), "part"),
        )
        parts.history = self.history = MemoryHistory()
        parts.predecessor = lambda _: Vw(0)
        self.time = FakeClock()
        waiter = Waiter(
            "a stage",
            self.inbox.condition,
            report=lambda _: None,
            timeline=cast("NullTimeline", self),
            clock=self.time,
            stall_seconds=1.0,
        )
        self.entry = Entry(cast("StageParts", parts), self.inbox, waiter)

    def hear(self, *records: Record) -> bool:
        self.inbox.on_records(records)
        return False

    def record(self, *_: object, reason: str, **__: object) -> None:
        """Of the timeline."""
        self.waits.append(reason)
        self.on_wait()

    def join(self) -> bool:
        return self.calls.pop(0)()

    def is_complete(self, checkpoint: Path) -> bool:
        assert checkpoint == Path("clock-9")
        if self.looks_left is not None:
            self.looks_left -= 1
        return self.looks_left == 0

    def push_initial_weights(self, weights: FlatBuffer) -> None:
        self.pushed.append(weights.views["0.weight"].clone())


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "CALL_SECONDS", 0.0)


def test_it_waits_for_the_segment_that_names_its_own_life() -> None:
    stage = Stage(
        lambda: stage.hear(segment(0, (0, 0), (1, 0), reasons=()), BarrierRecord(2, Clock(4), "join", 0)),
        lambda: stage.hear(segment(4, (0, 0))),
        lambda: stage.hear(segment(6, (0, 0), (1, 1))),
    )
    assert stage.entry.wait().start == 6
    assert not stage.pushed
    assert stage.layers[0].module.get_parameter("weight").is_meta
    assert stage.waits[0].startswith("the barrier at clock 4 (join), to join there, that is for virtual workers 0, 1")


def test_it_waits_as_long_as_the_run_goes_on() -> None:
    """One that a script adds later: every second another clock is published, and then none."""

    def passes(*records: Record) -> bool:
        stage.time.advance(0.8)
        return stage.hear(*records)

    stage = Stage(
        lambda: passes(segment(0, (0, 0), reasons=()), BarrierRecord(2, Clock(9), "plan", 0)),
        *(partial(passes, PublishRecord(2 + clock, Clock(clock), ())) for clock in range(1, 6)),
        *(passes for _ in range(4)),
    )
    with pytest.raises(DeadlineExceeded, match="a stage waited 2 s for the barrier at clock 9"):
        stage.entry.wait()
    assert stage.time.monotonic() >= 6 * 0.8


def test_it_makes_the_initial_weights_once_when_asked() -> None:
    stage = Stage(
        lambda: False, lambda: True, lambda: True, lambda: stage.hear(segment(0, (1, 0), reasons=())), incarnation=0
    )
    assert stage.entry.wait().start == 0
    assert len(stage.pushed) == 1
    assert torch.equal(stage.pushed[0], stage.weight)
    assert stage.pool.host_alive == 0
    assert stage.waits[0].startswith("the run to begin")


def test_it_finds_the_run_over() -> None:
    stage = Stage(lambda: stage.hear(segment(9, (0, 0), reasons=("epoch", "end"))))
    assert stage.entry.wait().start == 9


def test_a_run_that_ended_before_its_last_checkpoint_was_written_did_not_end_well() -> None:
    gone = EvictRecord(2, Vw(0), Incarnation(0), Clock(9))
    stage = Stage(lambda: stage.hear(segment(9, (0, 0), reasons=("epoch", "end")), gone))
    with pytest.raises(CheckpointNotWritten, match="had ended at clock 9, and no stage is left to write the last"):
        stage.entry.wait()

    late = Stage(lambda: late.hear(segment(9, (0, 0), reasons=("epoch", "end")), gone), complete_after=3)
    assert late.entry.wait().start == 9


def test_the_clock_shard_says_that_its_life_is_over() -> None:
    def refuse() -> bool:
        raise StaleIncarnation("its newest one is 2")

    stage = Stage(lambda: False, refuse)
    with pytest.raises(StaleIncarnation, match="newest one is 2"):
        stage.entry.wait()


def test_so_does_the_decision_log() -> None:
    stage = Stage(
        lambda: stage.hear(
            EvictRecord(1, Vw(1), Incarnation(0), Clock(3)), EvictRecord(2, Vw(0), Incarnation(1), Clock(3))
        ),
        lambda: stage.hear(EvictRecord(3, Vw(1), Incarnation(1), Clock(4))),
    )
    with pytest.raises(StaleIncarnation, match=r"virtual worker 1 \(incarnation 1\) was evicted at clock 4"):
        stage.entry.wait()
    assert not stage.calls


@pytest.mark.parametrize(("incarnation", "reasons"), [(0, ("end",)), (1, ())])
def test_without_parameter_servers_only_founders_come_in(incarnation: int, reasons: tuple[str, ...]) -> None:
    """A second life founds the run, too, if it is there in time."""
    start = segment(3, (1, incarnation), reasons=reasons)
    stage = Stage(lambda: stage.hear(start), incarnation=incarnation, has_shards=False)
    assert stage.entry.wait() is start

    late = Stage(lambda: late.hear(segment(3, (1, 1), reasons=("join",))), has_shards=False)
    with pytest.raises(ProtocolViolation, match="cannot rejoin the run"):
        late.entry.wait()


@pytest.mark.parametrize("has_shards", [True, False])
def test_who_takes_over_begins_anew_as_soon_as_the_log_says_so(*, has_shards: bool) -> None:
    """Without parameter servers there is nothing to begin with."""
    stage = Stage(has_shards=has_shards)
    record = replace(segment(4, (1, 1)), left=(SegmentMember(Vw(0), Incarnation(2), 2, joined=False),))
    other = HandoverRecord(2, Vw(0), Incarnation(1), Clock(2), whole=True)
    own = HandoverRecord(3, Vw(0), Incarnation(2), Clock(4), whole=False)
    stage.on_wait = lambda: stage.hear(other if len(stage.waits) == 1 else own)
    if has_shards:
        stage.entry.take_over(record)
    else:
        with pytest.raises(LinkClosed, match="cannot join at clock 4: virtual worker 0, whose weights it was to take"):
            stage.entry.take_over(record)
    assert stage.waits == ["virtual worker 0 to write its state at clock 4, which it takes over"] * 2
    assert [line["whole"] for line in stage.history.of("takeover")] == [0]


def test_it_says_for_whose_state_it_has_waited_too_long() -> None:
    stage = Stage()
    stage.on_wait = lambda: stage.time.advance(0.6)
    record = replace(segment(4, (1, 1)), left=(SegmentMember(Vw(0), Incarnation(0), 1, joined=False),))
    with pytest.raises(DeadlineExceeded, match="a stage waited 1 s for virtual worker 0 to write its state at clock 4"):
        stage.entry.take_over(record)
    assert not stage.history.of("takeover")


def test_who_follows_one_that_has_not_left_begins_anew() -> None:
    stage = Stage()
    stage.entry.take_over(segment(4, (1, 1)))
    assert not stage.history.of("takeover")
