"""Counters and reports of a running stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hetpipe.clock import Clock as TimeSource
from hetpipe.observe.metrics import MetricsWriter, WaveMetrics
from hetpipe.observe.timeline import Activity, TimelineWriter
from hetpipe.pipeline.inbox import Inbox
from hetpipe.pipeline.synchroniser import Synchroniser
from hetpipe.pipeline.waiting import Waiter
from hetpipe.values.ids import Clock, Minibatch
from hetpipe.values.memory import LayerPolicy
from hetpipe.values.run import CacheUse, StageProgress, StageReport

#: Interval of reports.
REPORT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Measurements of a stage's components for reports and metrics (`StageProgress`, `WaveMetrics`)."""

    weight_bytes: int
    activation_bytes: int
    learning_rate: float | None
    max_norm: float | None
    loss_scale: float | None = None
    skipped_updates: int = 0
    memory: tuple[LayerPolicy, ...] = ()
    cache: CacheUse | None = None


@dataclass(frozen=True, slots=True)
class MinibatchLoss:
    """The loss of one minibatch."""

    value: float
    """Mean over what counts in it; without meaning if nothing does."""
    weight: int
    """In means over several."""
    samples: int
    each: Mapping[str, float] = field(default_factory=dict)
    """Name → value, of several losses."""


def mean_losses(minibatches: Sequence[MinibatchLoss]) -> tuple[float | None, dict[str, float]]:
    """The weighted mean, in order, of the loss and of each by name; None if nothing counts.

    >>> mean_losses([MinibatchLoss(1.0, 3, 2, {"main": 2.0}), MinibatchLoss(5.0, 1, 2, {"main": 4.0})])
    (2.0, {'main': 2.5})
    """
    counted = [one for one in minibatches if one.weight]
    weight = sum(one.weight for one in counted)
    if not weight:
        return None, {}
    names = counted[0].each
    return sum(one.value * one.weight for one in counted) / weight, {
        name: sum(one.each[name] * one.weight for one in counted) / weight for name in names
    }


class Tally:
    """Losses per wave, computing time, and a report about once a second."""

    def __init__(
        self,
        inbox: Inbox,
        waiter: Waiter,
        synchroniser: Synchroniser,
        *,
        report: Callable[[StageReport], None],
        timeline: TimelineWriter,
        clock: TimeSource,
        measure: Callable[[], Figures],
        metrics: MetricsWriter,
    ) -> None:
        self._inbox = inbox
        self._waiter = waiter
        self._synchroniser = synchroniser
        self._report = report
        self._timeline = timeline
        self._clock = clock
        self._measure = measure
        self._metrics = metrics
        #: `StageParts.shift`.
        self.shift = 0
        #: Norm of the latest stepped gradient, before clipping.
        self.gradient_norm: float | None = None
        self._reported_at = clock.monotonic()
        waiter.show_life = self.tick
        self._compute_seconds = 0.0
        #: Forward seconds of the minibatches whose backward is still to come.
        self._forward_seconds: dict[Minibatch, float] = {}
        self._minibatches = 0
        self._samples = 0
        self._waves = Clock(0)
        self._first_loss: float | None = None
        self._last_loss: float | None = None
        #: Each loss by name in the first and in the latest wave.
        self._first_losses: dict[str, float] = {}
        self._last_losses: dict[str, float] = {}
        #: Of the minibatches in the open wave, in order.
        self._losses: dict[Minibatch, MinibatchLoss] = {}

    def begin(self, clock: Clock) -> None:
        """Record that this stage entered the run at `clock`."""
        self._waves = clock

    def loss(self, p: Minibatch, loss: MinibatchLoss) -> None:
        """Record the loss of minibatch `p`; last stage only."""
        self._losses[p] = loss
        self._samples += loss.samples

    def computed(self, activity: Activity, p: Minibatch, started: float) -> None:
        """Record the end of a computation that began at `started`.

        All time of a minibatch counts at the end of its backward, so that the seconds per minibatch between any two
        reports are those of whole minibatches.
        """
        ended = self._clock.monotonic()
        if activity is Activity.FORWARD:
            self._forward_seconds[p] = ended - started
        else:
            self._compute_seconds += ended - started
        if activity is Activity.BACKWARD:
            self._compute_seconds += self._forward_seconds.pop(p, 0.0)
            self._minibatches += 1
        self._timeline.record(activity, start_seconds=started, end_seconds=ended, p=p + self.shift)

    def wave_closed(self, num_waves: int, last: Minibatch) -> None:
        """Record that a wave is complete, with `last` as its last minibatch; the next wave may have begun."""
        self._waves = Clock(num_waves)
        done = [self._losses.pop(p) for p in list(self._losses) if p <= last]
        if not done:
            return
        loss, each = mean_losses(done)
        if loss is not None:
            self._last_loss, self._last_losses = loss, each
        if self._first_loss is None:
            self._first_loss, self._first_losses = loss, each
        figures = self._measure()
        self._metrics.write(
            WaveMetrics(
                wave=num_waves - 1,
                p=last + self.shift,
                minibatches=len(done),
                samples=sum(one.samples for one in done),
                weight=sum(one.weight for one in done),
                loss=loss,
                losses=dict(each),
                learning_rate=figures.learning_rate,
                gradient_norm=self.gradient_norm,
                max_norm=figures.max_norm,
            )
        )

    def tick(self, *, now: bool = False) -> None:
        """Report if the interval has passed, or `now`."""
        moment = self._clock.monotonic()
        if not now and moment - self._reported_at < REPORT_SECONDS:
            return
        self._reported_at = moment
        with self._inbox.condition:
            published = self._inbox.log.published
        figures = self._measure()
        self._report(
            StageProgress(
                minibatches=self._minibatches,
                samples=self._samples,
                clock=self._waves,
                published=published,
                loss=self._last_loss,
                first_loss=self._first_loss,
                waiting_seconds=self._waiter.waiting_seconds,
                idle_seconds=self._waiter.idle_seconds,
                compute_seconds=self._compute_seconds,
                pushed_bytes=self._synchroniser.pushed_bytes,
                pulled_bytes=self._synchroniser.pulled_bytes,
                weight_bytes=figures.weight_bytes,
                activation_bytes=figures.activation_bytes,
                gradient_norm=self.gradient_norm,
                learning_rate=figures.learning_rate,
                losses=self._last_losses,
                first_losses=self._first_losses,
                loss_scale=figures.loss_scale,
                skipped_updates=figures.skipped_updates,
                memory=figures.memory,
                cache=figures.cache,
            )
        )
