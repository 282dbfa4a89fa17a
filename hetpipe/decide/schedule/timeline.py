"""Timeline of an idealized pipeline: which stage computes what, when, on which weights, as in the papers' figures.

One virtual worker, stages that take equally long, no time between them: the papers' own setting. It uses the orders,
credits and versions of the runtime, so that the picture of a policy cannot differ from the training. Times are whole
units, so that the same pipeline always gives the same timeline.

>>> for stage in play(Pipeline(num_stages=2, num_minibatches=3, weights="stash")).stages:
...     print(*(f"{box}@{box.start}" for box in stage.boxes))
F1@0 F2@1 B1@4 F3@6 B2@7 B3@10
F1@1 B1@2 F2@4 B2@5 F3@7 B3@8
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hetpipe.decide.schedule.catalogue import order_for
from hetpipe.decide.schedule.in_flight import in_flight, weight_buffers
from hetpipe.decide.schedule.policy import Action, Kind, Order, Ready, StageView
from hetpipe.decide.schedule.versions import VersionTable
from hetpipe.errors import PlanError
from hetpipe.values.ids import Minibatch, StageIndex
from hetpipe.values.policies import POLICIES, Policy, Schedule, WeightPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The simulated pipeline: K equal stages and one segment of minibatches.

    Raises:
        PlanError: a number is out of range, the policy needs another N, or cannot use the schedule.
    """

    num_stages: int
    """K."""
    num_minibatches: int
    """After the last one the pipeline drains."""
    weights: WeightPolicy = "wave"
    schedule: Schedule = "1f1b"
    minibatches_per_wave: int = 4
    """N; a multiple of `accumulate`."""
    accumulate: int = 1
    """Minibatches whose gradients make one update together; `flush` and `double_buffer` always take N."""
    forward_units: int = 1
    """Units of time that a forward takes."""
    backward_units: int = 2
    """Units of time that a backward takes; twice the forward's in the papers' figures."""

    def __post_init__(self) -> None:
        counts = {
            "stages": self.num_stages,
            "minibatches": self.num_minibatches,
            "minibatches per wave": self.minibatches_per_wave,
            "minibatches per update": self.accumulate,
            "time units of a forward": self.forward_units,
            "time units of a backward": self.backward_units,
        }
        for what, number in counts.items():
            if number < 1:
                raise PlanError(f"{number} {what} make no pipeline; give at least 1")
        least = self.policy.least_minibatches_per_wave(self.num_stages)
        if self.minibatches_per_wave < least:
            raise PlanError(
                f"the weight policy {self.weights} with {self.num_stages} stages needs at least {least} minibatches "
                f"per wave, not {self.minibatches_per_wave}; raise it, or take fewer stages"
            )
        if self.minibatches_per_wave % self.accumulate:
            raise PlanError(
                f"{self.accumulate} minibatches per update do not divide the {self.minibatches_per_wave} of a wave; "
                "give a number that does"
            )
        try:
            self.policy.schedule_of(self.schedule)
        except ValueError as error:
            raise PlanError(f"the schedule {error}") from error

    @property
    def policy(self) -> Policy:
        """The row of `weights`."""
        return POLICIES[self.weights]

    def limit(self, stage: int) -> int:
        """S_i: the most minibatches that may be in flight at a stage."""
        return in_flight(
            stage=stage,
            num_stages=self.num_stages,
            minibatches_per_wave=self.minibatches_per_wave,
            weights=self.weights,
            schedule=self.schedule,
        )

    def versions(self, stage: int) -> VersionTable:
        """The version table of a stage."""
        return VersionTable(self.weights, stage, self.num_stages, self.minibatches_per_wave, self.accumulate)

    @property
    def minibatches_per_update(self) -> int:
        """Minibatches whose gradients make one update together."""
        return self.versions(0).minibatches_per_update

    @property
    def steady_utilisation(self) -> float:
        """Share of its time that a stage computes in the steady state, independent of the simulated length.

        Under `flush` every wave fills and drains the pipeline: N/(N + K − 1) (GPipe §2.3; 2BW §2). Else the credits
        decide: min over i of S_i/(K − i), and never more than 1 (the planner's closed form for equal stages).

        >>> Pipeline(num_stages=4, num_minibatches=8, weights="flush").steady_utilisation
        0.5714285714285714
        >>> [Pipeline(num_stages=4, num_minibatches=8, minibatches_per_wave=n).steady_utilisation for n in (1, 3, 4)]
        [0.25, 0.75, 1.0]
        """
        n, k = self.minibatches_per_wave, self.num_stages
        if self.policy.drains:
            return n / (n + k - 1)
        return min(1.0, *(self.limit(stage) / (k - stage) for stage in range(k)))


@dataclass(frozen=True, slots=True)
class Box:
    """One computation. Prints as its action, `F12`."""

    action: Action
    start: int
    end: int
    """Units of time."""
    through: Minibatch
    """The newest own update in the weights it computes with, before any prediction."""
    steps_ahead: int
    """Number of updates by which these weights are predicted ahead; 0: not predicted (PipeOptim eq. 4)."""
    makes_update: bool
    """Whether an update follows: of a backward, at its end."""

    def __str__(self) -> str:
        """`F12`."""
        return str(self.action)


@dataclass(frozen=True, slots=True)
class Update:
    """A new weight version."""

    at: int
    """Time of the update, the end of a backward, in units."""
    through: Minibatch
    """The last minibatch whose update it contains: that of the backward."""


@dataclass(frozen=True, slots=True)
class StageTimeline:
    """One row of the picture."""

    stage: StageIndex
    boxes: tuple[Box, ...]
    """In the order of time."""
    weight_buffers: int
    """Weight-sized tensors that the policy keeps at rest, without shards; under prediction with the predicted ones."""

    @property
    def updates(self) -> tuple[Update, ...]:
        """The versions that are made here, in the order of time.

        >>> play(Pipeline(num_stages=1, num_minibatches=6, weights="double_buffer")).stages[0].updates
        (Update(at=12, through=4), Update(at=18, through=6))
        """
        return tuple(Update(at=box.end, through=box.action.p) for box in self.boxes if box.makes_update)

    @property
    def busy_units(self) -> int:
        """Time that it computes."""
        return sum(box.end - box.start for box in self.boxes)

    @property
    def most_in_flight(self) -> int:
        """The most minibatches between forward and backward; S_i, if enough were played to fill the pipeline."""
        most = flying = 0
        for box in self.boxes:
            flying += 1 if box.action.kind is Kind.FORWARD else -1
            most = max(most, flying)
        return most


@dataclass(frozen=True, slots=True)
class Timeline:
    """The resulting timeline."""

    pipeline: Pipeline
    stages: tuple[StageTimeline, ...]

    @property
    def end(self) -> int:
        """End of the last backward, on the first stage, in units of time; the first forward begins at 0."""
        return max(stage.boxes[-1].end for stage in self.stages)

    @property
    def bubble(self) -> float:
        """Idle share of all stages from the first action of the pipeline to its last one.

        Of a single wave under `flush` it is (K − 1)/(N + K − 1) (GPipe §2.3).

        >>> play(Pipeline(num_stages=4, num_minibatches=4, weights="flush", schedule="gpipe")).bubble == 3 / 7
        True
        """
        whole = self.end * len(self.stages)
        return (whole - sum(stage.busy_units for stage in self.stages)) / whole


def play(pipeline: Pipeline) -> Timeline:
    """Simulate `pipeline` from empty to empty."""
    order = order_for(pipeline.weights, pipeline.schedule)
    stages = [_Stage(pipeline, stage) for stage in range(pipeline.num_stages)]
    now = 0
    while True:
        # All actions ending at an instant are processed before any starts.
        for stage in stages:
            stage.begin(order, now)
        ends = [stage.busy_until for stage in stages if stage.busy_until is not None]
        if not ends:
            break
        now = min(ends)
        for index, stage in enumerate(stages):
            if stage.busy_until == now:
                _deliver(stages, index, stage.finish())
    assert all(stage.is_done for stage in stages), "an order deadlocked"
    return Timeline(pipeline, tuple(stage.timeline() for stage in stages))


def _deliver(stages: list[_Stage], sender: int, done: Box) -> None:
    if done.action.kind is Kind.FORWARD:
        if sender + 1 < len(stages):
            stages[sender + 1].activations.append(done.end)
    elif sender:
        stages[sender - 1].gradients.append(done.end)


class _Stage:
    """State of one stage."""

    def __init__(self, pipeline: Pipeline, stage: int) -> None:
        self._pipeline = pipeline
        self._stage = stage
        self._is_first, self._is_last = stage == 0, stage == pipeline.num_stages - 1
        self._limit = pipeline.limit(stage)
        self._versions = pipeline.versions(stage)
        #: The last minibatch whose forward and whose backward ended here.
        self._forwarded = self._backwarded = 0
        #: First stage: the next minibatch, and since when it may start.
        self._opened = (0, 0)
        #: Arrival times of unused inputs from the neighbours, in the order of p.
        self.activations: deque[int] = deque()
        self.gradients: deque[int] = deque()
        #: End of the computation in progress; None without one.
        self.busy_until: int | None = None
        self._boxes: list[Box] = []

    @property
    def is_done(self) -> bool:
        """Whether all backwards are complete."""
        return self._backwarded == self._pipeline.num_minibatches

    def begin(self, order: Order, now: int) -> None:
        """Start the action selected by the order, unless the stage is busy or must wait."""
        if self.busy_until is not None or self.is_done:
            return
        more_forwards = self._more_forwards()
        view = StageView(
            limit=self._limit,
            num_in_flight=self._forwarded - self._backwarded,
            forward=self._next_forward(now, more_forwards=more_forwards),
            backward=self._next_backward(),
            more_forwards=more_forwards,
        )
        decision = order.next_action(view)
        if isinstance(decision, Action):
            self._boxes.append(self._box(decision, now))
            self.busy_until = self._boxes[-1].end

    def finish(self) -> Box:
        """Finish the current computation."""
        box = self._boxes[-1]
        self.busy_until = None
        if box.action.kind is Kind.FORWARD:
            self._forwarded = box.action.p
            if not self._is_first:
                self.activations.popleft()
        else:
            self._backwarded = box.action.p
            if not self._is_last:
                self.gradients.popleft()
        return box

    def timeline(self) -> StageTimeline:
        """Its row of the timeline."""
        pipeline = self._pipeline
        return StageTimeline(
            stage=StageIndex(self._stage),
            boxes=tuple(self._boxes),
            weight_buffers=weight_buffers(
                stage=self._stage,
                num_stages=pipeline.num_stages,
                minibatches_per_wave=pipeline.minibatches_per_wave,
                weights=pipeline.weights,
            ),
        )

    def _more_forwards(self) -> bool:
        """Whether another forward comes before the pipeline drains: at the end, under `flush` after every wave."""
        if self._forwarded == self._pipeline.num_minibatches:
            return False
        ends_wave = self._forwarded % self._pipeline.minibatches_per_wave == 0
        return not (self._pipeline.policy.drains and ends_wave and self._forwarded > self._backwarded)

    def _next_forward(self, now: int, *, more_forwards: bool) -> Ready | None:
        p = Minibatch(self._forwarded + 1)
        if not self._is_first:
            return Ready(p, self.activations[0]) if self.activations else None
        if not more_forwards or self._forwarded - self._backwarded >= self._limit:
            return None
        if self._opened[0] != p:
            self._opened = (p, now)
        return Ready(p, self._opened[1])

    def _next_backward(self) -> Ready | None:
        """The last stage makes its gradients itself, at once."""
        p = Minibatch(self._backwarded + 1)
        if self._is_last:
            return Ready(p, 0) if self._forwarded >= p else None
        return Ready(p, self.gradients[0]) if self.gradients else None

    def _box(self, action: Action, now: int) -> Box:
        versions, p = self._versions, action.p
        if action.kind is Kind.FORWARD:
            end = now + self._pipeline.forward_units
            through, steps_ahead = versions.forward_through(p), versions.forward_steps_ahead(p)
            return Box(action, now, end, through, steps_ahead, makes_update=False)
        end = now + self._pipeline.backward_units
        through, steps_ahead = versions.backward_through(p), versions.backward_steps_ahead()
        # A group at the end of the run may be short.
        makes_update = versions.is_update(p) or p == self._pipeline.num_minibatches
        return Box(action, now, end, through, steps_ahead, makes_update)
