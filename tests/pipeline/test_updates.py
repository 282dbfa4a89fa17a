"""From gradients to updates: what is averaged, which frames carry the norm, and which gradient waits for which norm."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from hetpipe.decide.schedule.loss_scale import LossScales
from hetpipe.decide.schedule.versions import VersionTable
from hetpipe.errors import NonFiniteUpdate
from hetpipe.link.policy import Frame, FrameKind
from hetpipe.observe.timeline import Activity, NullTimeline
from hetpipe.pipeline.setup import Clipping, StageIdentity, StageParts
from hetpipe.pipeline.tally import Tally
from hetpipe.pipeline.updates import Updates
from hetpipe.values.ids import Clock, Incarnation, Minibatch, StageIndex, VirtualWorkerIndex
from hetpipe.values.policies import WeightPolicy
from hetpipe.weights.averaging import GradientsByName
from tests.support.fake_clock import FakeClock
from tests.support.link_contract import in_thread
from tests.support.replicas import InProcessReplicas, ReplicaMeeting

#: Names as the layers of a stage have them; gradients come in another order.
NAMES = ("first", "second")
SHAPES = {"first": (2,), "second": (1,)}
GLOBALLY = Clipping(max_norm=1.0, over_stages=True)
BY_STAGE = Clipping(max_norm=1.0, over_stages=False)

Numbers = dict[str, list[float] | None]


class Wire:
    """One end of a link: what was sent on it."""

    def __init__(self) -> None:
        self.sent: deque[Frame] = deque()

    def send(self, frame: Frame, *, deadline_seconds: float) -> None:
        assert deadline_seconds > 0
        self.sent.append(frame)


class Others:
    """The other replicas, which bring what is said here: their samples, and gradients times samples."""

    def __init__(self, samples: int, sums: Numbers) -> None:
        self._samples = samples
        self._sums = sums

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        counted, *sums = tensors
        assert counted.dtype == torch.float64
        counted += torch.tensor([self._samples, bool(self._samples), *(self._sums[name] is not None for name in NAMES)])
        for name, tensor in zip(NAMES, sums, strict=True):
            tensor.add_(torch.tensor(self._sums[name] or 0.0))


class Stage:
    """The updates of one stage, with lists for all that surrounds them."""

    def __init__(
        self,
        *,
        stage: int = 0,
        num_stages: int = 1,
        weights: WeightPolicy = "wave",
        n: int = 4,
        a: int = 1,
        clipping: Clipping | None = None,
        scales: LossScales | None = None,
        replicas: object = None,
        start: int = 0,
    ) -> None:
        #: (p, gradients) of each step; p of each line of the history and of each call; norms the tally heard.
        self.steps: list[tuple[int, Numbers]] = []
        self.tensors: list[GradientsByName] = []
        self.written: list[dict[str, int]] = []
        self.skipped: list[dict[str, int]] = []
        self.scales = scales
        self.made: list[int] = []
        self.computed: list[tuple[Activity, int, float]] = []
        self.upstream = Wire() if stage else None
        self.downstream = Wire() if stage < num_stages - 1 else None
        zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.tally = SimpleNamespace(gradient_norm=None, computed=lambda *call: self.computed.append(call))
        parts = SimpleNamespace(
            identity=StageIdentity(VirtualWorkerIndex(1), StageIndex(stage), Incarnation(2), num_stages),
            layers=tuple(SimpleNamespace(index=i, parameters={"weight": name}) for i, name in enumerate(NAMES)),
            versions=VersionTable(weights, stage, num_stages, n, a),
            weights=SimpleNamespace(at_barrier=SimpleNamespace(views=zeros), step=self.step),
            clipping=clipping,
            scales=scales,
            sync=SimpleNamespace(minibatches_per_wave=n),
            replicas=replicas,
            pool=SimpleNamespace(device=torch.device("cpu")),
            timeline=NullTimeline(),
            upstream=self.upstream,
            downstream=self.downstream,
            plan_version=7,
            shift=0,
            frozen=2,
            left_out=(),
            is_frozen=False,
            history=SimpleNamespace(
                step=lambda **fields: self.written.append(fields), skip=lambda **fields: self.skipped.append(fields)
            ),
            clock=FakeClock(monotonic=5.0),
        )
        self.updates = Updates(cast("StageParts", parts), cast("Tally", self.tally), self.made.append, start)

    def step(self, p: int, gradients: GradientsByName | None) -> None:
        if gradients is None:
            return
        assert self.updates.through < p, "not made yet"
        self.tensors.append(gradients)
        self.steps.append((p, {name: None if g is None else g.tolist() for name, g in gradients.items()}))

    def add(
        self,
        p: int,
        first: list[float] | None,
        second: list[float] | None,
        samples: int = 1,
        scale_exponent: int = 0,
    ) -> None:
        gradients = {name: None if g is None else torch.tensor(g) for name, g in (("second", second), ("first", first))}
        self.updates.add(Minibatch(p), gradients, samples, scale_exponent)

    @property
    def norm(self) -> float | None:
        found: float | None = self.tally.gradient_norm
        return found


def values(frame: Frame) -> list[float]:
    (tensor,) = frame.tensors
    assert tensor is not None and tensor.dtype == torch.float64
    found: list[float] = tensor.tolist()
    return found


def squares(p: int, *behind: float) -> Frame:
    return Frame(FrameKind.SQUARES, p, 0, 0, (torch.tensor(behind, dtype=torch.float64),))


def norm(p: int, value: float) -> Frame:
    return Frame(FrameKind.NORM, p, 0, 0, (torch.tensor([value], dtype=torch.float64),))


# -- without clipping ------------------------------------------------------------------------------------------------


def test_every_minibatch_makes_an_update() -> None:
    stage = Stage()
    for p in (1, 2, 3):
        stage.add(p, [1.0 * p, 0.0], None, samples=3)
        assert stage.updates.through == p
        assert stage.updates.is_settled

    assert stage.steps == [(p, {"second": None, "first": [1.0 * p, 0.0]}) for p in (1, 2, 3)]
    assert stage.written == [
        {"vw": 1, "incarnation": 2, "stage": 0, "p": p, "version": 7, "frozen": 2, "inactive": ()} for p in (1, 2, 3)
    ]
    assert stage.made == [1, 2, 3]
    assert stage.computed == [(Activity.STEP, p, 5.0) for p in (1, 2, 3)]
    assert stage.norm is None


def test_what_was_held_is_added_in_order_and_tells_its_norms() -> None:
    stage = Stage()
    stage.updates.hold()
    for p, tells_norms in ((1, False), (2, True)):
        gradients = {"first": torch.tensor([3.0 * p, 4.0 * p]), "second": None}
        stage.updates.add(Minibatch(p), gradients, 1, 0, tells_norms=tells_norms)
    assert stage.updates.is_held
    assert not stage.updates.is_settled
    assert not stage.steps

    stage.updates.release()
    assert not stage.updates.is_held
    assert stage.updates.is_settled
    assert stage.made == [1, 2]
    assert stage.updates.take_squares(Minibatch(2)) == {0: 100.0, 1: 0.0}


@pytest.mark.parametrize(("weights", "n", "a"), [("wave", 6, 3), ("flush", 3, 1), ("double_buffer", 3, 1)])
def test_several_make_one_from_their_average(weights: WeightPolicy, n: int, a: int) -> None:
    stage = Stage(weights=weights, n=n, a=a, start=n)
    for p, samples in ((n + 1, 2), (n + 2, 1)):
        stage.add(p, [4.0, 8.0], [float(samples)], samples)
        assert not stage.updates.is_settled
        assert stage.updates.through == n
    stage.add(n + 3, [8.0, 0.0], None, 1)
    assert stage.steps == [(n + 3, {"second": [5.0 / 4], "first": [5.0, 6.0]})]
    assert stage.updates.is_settled
    assert stage.made == [n + 3] == [line["p"] for line in stage.written]

    stage.add(n + 4, [1.0, 1.0], [1.0])
    stage.updates.flush()
    assert stage.steps[1:] == [(n + 4, {"second": [1.0], "first": [1.0, 1.0]})]
    assert stage.updates.through == n + 4
    stage.updates.flush()
    assert len(stage.steps) == len(stage.written) == 2, "nothing was gathered"


def test_an_empty_wave_is_no_update_of_a_stage_alone() -> None:
    stage = Stage()
    stage.updates.join_empty_wave(Minibatch(4))
    assert (stage.steps, stage.written, stage.updates.through) == ([], [], 0)


# -- clipping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clipping", [GLOBALLY, BY_STAGE])
def test_one_stage_clips_at_once(clipping: Clipping) -> None:
    stage = Stage(clipping=clipping)
    stage.add(1, [3.0, 0.0], [4.0])
    factor = 1.0 / (5.0 + 1e-6)
    clipped = {"second": (torch.tensor([4.0]) * factor).tolist(), "first": (torch.tensor([3.0, 0.0]) * factor).tolist()}
    assert stage.steps == [(1, clipped)]
    assert stage.norm == 5.0


def test_by_stage_nobody_is_asked() -> None:
    stage = Stage(stage=1, num_stages=3, clipping=BY_STAGE)
    stage.add(1, None, [2.0])
    assert stage.updates.through == 1
    assert stage.upstream is not None and stage.downstream is not None
    assert not stage.upstream.sent and not stage.downstream.sent
    assert stage.norm == 2.0


def test_a_gradient_that_is_small_enough_is_not_touched() -> None:
    stage = Stage(clipping=GLOBALLY)
    gradients: GradientsByName = {"first": torch.tensor([0.25, 0.5]), "second": None}
    stage.updates.add(Minibatch(1), gradients, 1, 0)
    assert stage.tensors[0]["first"] is gradients["first"]
    assert stage.norm == math.sqrt(0.25**2 + 0.5**2)


def test_it_is_the_average_that_is_clipped() -> None:
    stage = Stage(n=4, a=2, clipping=GLOBALLY)
    stage.add(1, [6.0, 0.0], None, 1)
    assert stage.norm is None
    stage.add(2, [0.0, 8.0], None, 1)
    assert stage.norm == 5.0


def test_the_norm_goes_round_the_pipeline() -> None:
    """Squares of the parameters behind come after a stage's own: the order of the chain."""
    stages = [Stage(stage=i, num_stages=3, clipping=GLOBALLY) for i in range(3)]
    (up, _), (middle_up, middle_down), (_, down) = [(stage.downstream, stage.upstream) for stage in stages]
    assert up is not None and middle_up is not None and middle_down is not None and down is not None
    stages[2].add(1, [2.0, 0.0], None)
    stages[1].add(1, [4.0, 4.0], [1.0])
    stages[0].add(1, None, [8.0])
    assert not any(stage.steps for stage in stages), "nobody knows the norm"

    frame = down.sent.popleft()
    assert (frame.kind, frame.minibatch, values(frame)) == (FrameKind.SQUARES, 1, [4.0, 0.0])
    assert not middle_down.sent, "the squares of the last stage are missing"
    stages[1].updates.add_squares(frame)
    frame = middle_down.sent.popleft()
    assert (frame.kind, frame.minibatch, values(frame)) == (FrameKind.SQUARES, 1, [32.0, 1.0, 4.0, 0.0])
    stages[0].updates.add_squares(frame)
    whole = math.sqrt(64.0 + 32.0 + 1.0 + 4.0)
    assert [len(stage.steps) for stage in stages] == [1, 0, 0]

    frame = up.sent.popleft()
    assert (frame.kind, frame.minibatch, values(frame)) == (FrameKind.NORM, 1, [whole])
    stages[1].updates.apply_norm(frame)
    assert [len(stage.steps) for stage in stages] == [1, 1, 0]
    frame = middle_up.sent.popleft()
    assert (frame.kind, frame.minibatch, values(frame)) == (FrameKind.NORM, 1, [whole])
    stages[2].updates.apply_norm(frame)
    assert [len(stage.steps) for stage in stages] == [1, 1, 1]
    assert [stage.norm for stage in stages] == [whole] * 3
    factor = 1.0 / (whole + 1e-6)
    assert stages[0].steps == [(1, {"first": None, "second": (torch.tensor([8.0]) * factor).tolist()})]
    assert stages[2].steps[0][1]["first"] == (torch.tensor([2.0, 0.0]) * factor).tolist()
    assert not any(wire.sent for wire in (up, middle_up, middle_down, down))


def test_norms_are_added_in_the_order_of_the_chain() -> None:
    """Added in another order, or per stage first, the small ones would count: 1e8² + 1 is 1e16 in float64."""
    stage = Stage(num_stages=2, clipping=GLOBALLY)
    stage.add(1, [1e8, 0.0], [1.0])
    stage.updates.add_squares(squares(1, 1.0, 1.0))
    assert stage.norm == 1e8
    assert math.sqrt(1e16 + (1.0 + 1.0 + 1.0)) != 1e8


def test_several_wait_each_for_its_own_norm() -> None:
    """The first one's comes when the third has been waiting for long; it lets go of the first only."""
    stage = Stage(stage=1, num_stages=2, clipping=GLOBALLY)
    for p in (1, 2, 3):
        stage.add(p, [float(p), 0.0], None)
    assert stage.upstream is not None
    assert [(frame.minibatch, values(frame)) for frame in stage.upstream.sent] == [
        (p, [float(p * p), 0.0]) for p in (1, 2, 3)
    ]
    for p in (1, 2, 3):
        assert stage.updates.through == p - 1
        assert not stage.updates.is_settled
        stage.updates.apply_norm(norm(p, 0.4 * p))
        assert stage.updates.through == p == stage.made[-1]
        assert stage.norm == 0.4 * p
    assert stage.updates.is_settled
    assert [gradients["first"] for _, gradients in stage.steps[:2]] == [[1.0, 0.0], [2.0, 0.0]]
    assert [line["p"] for line in stage.written] == [1, 2, 3]


def test_squares_find_their_minibatch_among_several() -> None:
    stage = Stage(stage=1, num_stages=3, clipping=GLOBALLY)
    for p in (1, 2):
        stage.add(p, [float(p), 0.0], None)
    assert stage.upstream is not None
    stage.updates.add_squares(squares(1, 10.0))
    stage.updates.add_squares(squares(2, 20.0))
    assert [(frame.minibatch, values(frame)) for frame in stage.upstream.sent] == [
        (1, [1.0, 0.0, 10.0]),
        (2, [4.0, 0.0, 20.0]),
    ]


# -- replicas --------------------------------------------------------------------------------------------------------


def test_gradients_are_summed_with_their_samples_and_divided_once() -> None:
    stage = Stage(weights="flush", n=2, replicas=Others(5, {"first": [10.0, 1.0], "second": [7.0]}))
    stage.add(1, [1.0, 0.0], [1.0], 2)
    stage.add(2, [4.0, 0.0], [0.0], 1)
    assert stage.steps == [(2, {"first": [16.0 / 8, 1.0 / 8], "second": [9.0 / 8]})]
    assert [line["p"] for line in stage.written] == [2]


@pytest.mark.parametrize(
    ("own", "theirs", "expected"),
    [
        (None, [6.0], [1.5]),  # 2 samples here, 2 there
        ([3.0], None, [1.5]),
        (None, None, None),
        ([0.0], None, [0.0]),
    ],
)
def test_a_parameter_that_a_replica_does_not_use(
    own: list[float] | None, theirs: list[float] | None, expected: list[float] | None
) -> None:
    """Zero where another one uses it; without a gradient where nobody does."""
    stage = Stage(weights="flush", n=1, replicas=Others(2, {"first": [2.0, 2.0], "second": theirs}))
    stage.add(1, [1.0, 1.0], own, 2)
    assert stage.steps == [(1, {"first": [1.0, 1.0], "second": expected})]


def test_a_replica_without_a_minibatch_steps_and_says_nothing_of_it() -> None:
    """Its weights stay those of the others; the history is about its own minibatches."""
    stage = Stage(weights="flush", n=2, replicas=Others(4, {"first": [8.0, 4.0], "second": None}))
    stage.updates.join_empty_wave(Minibatch(2))
    assert stage.steps == [(2, {"first": [2.0, 1.0], "second": None})]
    assert stage.made == [2]
    assert stage.updates.through == 2
    assert stage.written == []


@pytest.mark.parametrize("clipping", [None, GLOBALLY, BY_STAGE])
def test_where_no_replica_has_a_sample_there_is_no_update(clipping: Clipping | None) -> None:
    stage = Stage(weights="flush", n=2, replicas=Others(0, {"first": None, "second": None}), clipping=clipping)
    stage.updates.join_empty_wave(Minibatch(2))
    assert (stage.steps, stage.written, stage.made, stage.updates.through) == ([], [], [], 0)
    assert stage.updates.is_settled


def test_it_is_the_average_over_replicas_that_is_clipped() -> None:
    others = Others(1, {"first": [5.0, 0.0], "second": [8.0]})
    stage = Stage(weights="flush", n=1, replicas=others, clipping=GLOBALLY)
    stage.add(1, [1.0, 0.0], [0.0], 1)
    assert stage.norm == 5.0


def test_an_empty_wave_waits_for_its_norm_like_any_other() -> None:
    others = Others(1, {"first": [3.0, 0.0], "second": None})
    stage = Stage(stage=1, num_stages=2, weights="flush", n=2, replicas=others, clipping=GLOBALLY)
    stage.updates.join_empty_wave(Minibatch(2))
    assert not stage.updates.is_settled
    assert stage.upstream is not None
    assert values(stage.upstream.sent.popleft()) == [9.0, 0.0]
    stage.updates.apply_norm(norm(2, 3.0))
    assert stage.updates.is_settled
    assert stage.made == [2]
    assert stage.written == []


def test_replicas_make_the_same_update() -> None:
    """Three with 2, 1 and no minibatches, of unequal size: as one process with all of them."""
    meeting, members = ReplicaMeeting(3), [VirtualWorkerIndex(vw) for vw in range(3)]
    replicas = [InProcessReplicas(lambda *_: meeting, vw, 10.0) for vw in members]
    for each in replicas:
        each.regroup(Clock(0), members)
    stages = [Stage(weights="flush", n=2, replicas=each, clipping=GLOBALLY) for each in replicas]

    def first() -> None:
        stages[0].add(1, [1.0, 2.0], None, 4)
        stages[0].add(2, [3.0, 1.0], [8.0], 2)

    def second() -> None:
        stages[1].add(1, [2.0, 2.0], None, 2)
        stages[1].updates.flush()

    bodies: list[Callable[[], Any]] = [first, second, lambda: stages[2].updates.join_empty_wave(Minibatch(2))]
    for thread, outcome in [in_thread(body) for body in bodies]:
        thread.join(10.0)
        assert outcome == [None]
    whole = {"first": torch.tensor([14.0, 14.0]) / 8, "second": torch.tensor([16.0]) / 8}
    length = math.sqrt(float(torch.cat(list(whole.values())).double().square().sum()))
    clipped = {name: (g * (1.0 / (length + 1e-6))).tolist() for name, g in whole.items()}
    assert [stage.steps for stage in stages] == [[(2, clipped)], [(1, clipped)], [(2, clipped)]]
    assert [[line["p"] for line in stage.written] for stage in stages] == [[2], [1], []]


class TestLossScale:
    def test_gradients_are_divided_by_the_scale_of_their_minibatch_before_they_are_averaged(self) -> None:
        stage = Stage(scales=LossScales(), a=2)
        stage.add(1, [64.0, 0.0], None, samples=3, scale_exponent=5)
        stage.add(2, [8.0, 16.0], None, samples=1, scale_exponent=3)
        assert stage.steps == [(2, {"first": [1.75, 0.5], "second": None})]
        assert stage.scales is not None and stage.scales.newest.finite_updates == 1
        assert stage.norm is None, "there is no clipping"

    def test_an_overflow_on_another_stage_skips_the_update_here(self) -> None:
        stage = Stage(num_stages=2, scales=LossScales())
        stage.add(1, [2.0**16, 0.0], [0.0], scale_exponent=16)
        assert not stage.steps
        squares = torch.tensor([0.0, math.inf], dtype=torch.float64)
        stage.updates.add_squares(Frame(FrameKind.SQUARES, 1, 0, 0, (squares,)))
        assert not stage.steps and not stage.written
        assert stage.skipped == [
            {"vw": 1, "incarnation": 2, "stage": 0, "p": 1, "scale": 2**16, "version": 7, "frozen": 2, "inactive": ()}
        ]
        assert stage.updates.through == 1 and stage.made == [1]
        assert stage.downstream is not None
        assert [values(frame) for frame in stage.downstream.sent] == [[math.inf]], "the verdict is passed on"
        assert stage.updates.scale_exponent(Minibatch(5)) == 15

    def test_at_scale_1_an_overflow_is_an_error_where_it_is(self) -> None:
        stage = Stage(scales=LossScales())
        with pytest.raises(NonFiniteUpdate, match="gradient of minibatch 1 is not finite in parameter second"):
            stage.add(1, [1.0, 0.0], [math.nan], scale_exponent=0)

    def test_clipping_by_stage_takes_the_norm_of_the_stage_and_the_verdict_of_all(self) -> None:
        stage = Stage(num_stages=2, clipping=BY_STAGE, scales=LossScales())
        stage.add(1, [3.0 * 2, 0.0], [4.0 * 2], scale_exponent=1)
        stage.updates.add_squares(Frame(FrameKind.SQUARES, 1, 0, 0, (torch.tensor([144.0], dtype=torch.float64),)))
        assert stage.norm == 5.0
        ((_, gradients),) = stage.steps
        assert gradients["first"] == [pytest.approx(0.6), 0.0]

    def test_an_update_of_minibatches_at_two_scales_is_judged_by_the_larger(self) -> None:
        stage = Stage(scales=LossScales(), a=2)
        stage.add(1, [0.0, 0.0], None, scale_exponent=16)
        stage.add(2, [math.inf, 0.0], None, scale_exponent=15)
        assert stage.scales is not None and stage.scales.newest.exponent == 15
