"""What a stage counts: losses belong to the wave of their minibatch, whenever that is closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from hetpipe.observe.metrics import WaveMetrics
from hetpipe.observe.timeline import Activity, NullTimeline
from hetpipe.pipeline.inbox import Inbox
from hetpipe.pipeline.synchroniser import Synchroniser
from hetpipe.pipeline.tally import Figures, MinibatchLoss, Tally
from hetpipe.pipeline.waiting import Waiter
from hetpipe.values.ids import Clock, Minibatch
from hetpipe.values.run import StageProgress, StageReport
from tests.support.fake_clock import FakeClock


class Lines:
    """Metrics kept in a list."""

    def __init__(self) -> None:
        self.waves: list[WaveMetrics] = []

    def write(self, wave: WaveMetrics) -> None:
        self.waves.append(wave)

    def close(self) -> None:
        """Nothing is open."""


class Nobody:
    """A synchroniser that moved nothing."""

    pushed_bytes = pulled_bytes = 0


def tally_with(
    lines: Lines,
    report: Callable[[StageReport], None],
    clock: FakeClock | None = None,
    *,
    loss_scale: float | None = None,
) -> Tally:
    clock, timeline, inbox = clock or FakeClock(), NullTimeline(), Inbox(None, None, Clock(0))
    around: dict[str, Any] = {"report": report, "timeline": timeline, "clock": clock}
    waiter = Waiter("a stage", inbox.condition, stall_seconds=1.0, **around)
    others: dict[str, Any] = {"loss_scale": loss_scale, "skipped_updates": 3, "memory": ("swap", "keep")}
    figures = Figures(7, 9, learning_rate=0.5, max_norm=1.0, **others)
    measure = lambda: figures  # noqa: E731
    return Tally(inbox, waiter, cast("Synchroniser", Nobody()), measure=measure, metrics=lines, **around)


def test_minibatches_of_the_next_wave_may_be_computed_before_a_wave_is_closed() -> None:
    """As under clipping by the norm over all stages, where the last update of a wave waits for it."""
    lines = Lines()
    reports: list[StageReport] = []
    tally = tally_with(lines, reports.append)
    for p, loss, samples in ((1, 4.0, 2), (2, 2.0, 2), (3, 100.0, 2), (4, 50.0, 1)):
        tally.loss(Minibatch(p), MinibatchLoss(loss, samples, samples))
    tally.gradient_norm = 1.5
    tally.wave_closed(1, Minibatch(2))
    tally.wave_closed(2, Minibatch(4))
    tally.wave_closed(3, Minibatch(6))  # an empty one

    assert [(wave.wave, wave.p, wave.minibatches, wave.samples) for wave in lines.waves] == [(0, 2, 2, 4), (1, 4, 2, 3)]
    assert [wave.loss for wave in lines.waves] == [3.0, pytest.approx(250.0 / 3)]
    assert (lines.waves[0].gradient_norm, lines.waves[0].max_norm) == (1.5, 1.0)
    assert lines.waves[0].learning_rate == 0.5

    tally.tick(now=True)
    (progress,) = reports
    assert isinstance(progress, StageProgress)
    assert (progress.first_loss, progress.clock) == (3.0, Clock(3))
    assert progress.loss == pytest.approx(250.0 / 3)
    assert (progress.weight_bytes, progress.activation_bytes, progress.learning_rate) == (7, 9, 0.5)


def test_a_stage_that_waits_reports_as_often_as_one_that_computes() -> None:
    clock, timeline, inbox = FakeClock(), NullTimeline(), Inbox(None, None, Clock(0))
    reports: list[StageReport] = []
    around: dict[str, Any] = {"report": reports.append, "timeline": timeline, "clock": clock}
    waiter = Waiter("a stage", inbox.condition, stall_seconds=100.0, **around)
    measure = lambda: Figures(weight_bytes=7, activation_bytes=9, learning_rate=0.5, max_norm=1.0)  # noqa: E731
    Tally(inbox, waiter, cast("Synchroniser", Nobody()), measure=measure, metrics=Lines(), **around)
    for _ in range(8):
        clock.advance(0.5)
        with inbox.condition:
            waiter.sleep("nothing", for_clock=False, at_most_seconds=0.0)

    assert [type(report) for report in reports] == [StageProgress] * 4


def test_what_a_minibatch_took_counts_when_it_is_done() -> None:
    """Else seconds per minibatch between two reports were those of backwards here, and of forwards there."""
    reports: list[StageReport] = []
    clock = FakeClock()
    tally = tally_with(Lines(), reports.append, clock)

    def compute(activity: Activity, p: int, seconds: float) -> None:
        started = clock.monotonic()
        clock.advance(seconds)
        tally.computed(activity, Minibatch(p), started)

    compute(Activity.FORWARD, 1, 4.0)
    compute(Activity.FORWARD, 2, 8.0)
    tally.tick(now=True)
    compute(Activity.BACKWARD, 1, 1.0)
    compute(Activity.STEP, 1, 0.5)
    tally.tick(now=True)
    compute(Activity.BACKWARD, 2, 2.0)
    tally.tick(now=True)

    told = [(one.minibatches, one.compute_seconds) for one in reports if isinstance(one, StageProgress)]
    assert told == [(0, 0.0), (1, 5.5), (2, 15.5)]


def test_the_scale_of_losses_is_reported() -> None:
    reports: list[StageReport] = []
    tally_with(Lines(), reports.append, loss_scale=1024.0).tick(now=True)
    (progress,) = reports
    assert isinstance(progress, StageProgress)
    assert (progress.loss_scale, progress.skipped_updates, progress.memory) == (1024.0, 3, ("swap", "keep"))
