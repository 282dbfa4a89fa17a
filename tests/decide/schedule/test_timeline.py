"""Played timelines: those of the papers' figures, and what holds for every pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hetpipe.decide.schedule.catalogue import order_for
from hetpipe.decide.schedule.policy import Action, Kind, Ready, StageView, Wait
from hetpipe.decide.schedule.timeline import Box, Pipeline, StageTimeline, Timeline, play
from hetpipe.decide.schedule.versions import VersionTable
from hetpipe.errors import PlanError
from hetpipe.values.ids import Minibatch
from hetpipe.values.policies import POLICIES, WEIGHT_POLICIES, WeightPolicy
from tests.support.gates import gate_of

PAIRS = [(weights, schedule) for weights in WEIGHT_POLICIES for schedule in POLICIES[weights].schedules]


def played(num_minibatches: int, **asked: Any) -> Timeline:
    """Four stages, unless something else is asked for."""
    return play(Pipeline(num_stages=asked.pop("num_stages", 4), num_minibatches=num_minibatches, **asked))


def box_of(timeline: Timeline, stage: int, action: str) -> Box:
    return next(box for box in timeline.stages[stage].boxes if str(box) == action)


def drawn(stage: StageTimeline) -> str:
    """A row as in the papers: per unit of time the number of the minibatch (A: 10), blank where idle."""
    row = ""
    for box in stage.boxes:
        row = row.ljust(box.start) + f"{box.action.p:X}" * (box.end - box.start)
    return row


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    weights, schedule = draw(st.sampled_from(PAIRS))
    num_stages = draw(st.integers(1, 5))
    accumulate = draw(st.integers(1, 3))
    least = -(-POLICIES[weights].least_minibatches_per_wave(num_stages) // accumulate)
    return Pipeline(
        num_stages=num_stages,
        num_minibatches=draw(st.integers(1, 25)),
        weights=weights,
        schedule=schedule,
        minibatches_per_wave=accumulate * draw(st.integers(least, least + 4)),
        accumulate=accumulate,
        forward_units=draw(st.integers(1, 4)),
        backward_units=draw(st.integers(1, 4)),
    )


class TestFigure2OfPipeDream2BW:
    """K = 4, m = 4; its workers are counted from 1, its times are those of units, from 1, too."""

    TIMELINE = played(12, weights="double_buffer")

    def test_the_picture(self) -> None:
        assert [drawn(stage) for stage in self.TIMELINE.stages] == [
            "1234      11522633744855966A77B88C99 AA BB CC",
            " 123    11422533644755866977A88B99CAA BB CC",
            "  12  11322433544655766877988A99BAACBB CC",
            "   111222333444555666777888999AAABBBCCC",
        ]

    def test_every_input_has_the_version_of_the_formula(self) -> None:
        """§3.1: input k uses version max(⌊(k−1)/m⌋ − 1, 0), forward and backward, on every worker."""
        for stage in self.TIMELINE.stages:
            for box in stage.boxes:
                assert box.through == 4 * max((box.action.p - 1) // 4 - 1, 0)
                assert box.steps_ahead == 0

    def test_version_4_is_first_used_for_the_forward_of_input_9(self) -> None:
        for stage in self.TIMELINE.stages:
            assert str(next(box for box in stage.boxes if box.through == 4)) == "F9"

    def test_input_7_on_worker_3_at_21_does_not_use_the_newest_version(self) -> None:
        stage = self.TIMELINE.stages[2]
        (box,) = (box for box in stage.boxes if box.start < 21 <= box.end)
        assert str(box) == "F7"
        assert box.through == 0
        assert stage.updates[0].through == 4
        assert stage.updates[0].at < box.start

    def test_version_0_can_be_discarded_after_the_backward_of_input_8(self) -> None:
        for stage in self.TIMELINE.stages:
            assert [str(box) for box in stage.boxes if box.through == 0][-1] == "B8"


class TestFigure3OfPipeDream2BW:
    """GPipe and PipeDream-Flush, 2 stages."""

    def test_gpipe(self) -> None:
        rows = [drawn(stage) for stage in played(8, num_stages=2, weights="flush", schedule="gpipe").stages]
        assert rows == ["1234   112233445678   55667788", " 123411223344   567855667788"]

    def test_pipedream_flush(self) -> None:
        rows = [drawn(stage) for stage in played(8, num_stages=2, weights="flush").stages]
        assert rows == ["12  11322433 4456  55766877 88", " 111222333444   555666777888"]

    def test_both_compute_as_fast_on_the_newest_weights(self) -> None:
        for schedule in ("gpipe", "1f1b", "fifo"):
            timeline = played(8, num_stages=2, weights="flush", schedule=schedule)
            assert timeline.end == 30
            assert {box.through for stage in timeline.stages for box in stage.boxes if box.action.p > 4} == {4}

    def test_gpipe_keeps_more_activations(self) -> None:
        flushes = {
            schedule: played(8, num_stages=2, minibatches_per_wave=8, weights="flush", schedule=schedule)
            for schedule in ("gpipe", "1f1b")
        }
        in_flight = {name: [stage.most_in_flight for stage in one.stages] for name, one in flushes.items()}
        assert in_flight == {"gpipe": [8, 8], "1f1b": [2, 1]}


class TestFigure1OfPipeOptim:
    """4 GPUs, the 5th minibatch. The paper's W_t has the updates of t − 1 minibatches: its W_5 is "through 4" here."""

    def test_stashed_versions_of_pipedream(self) -> None:
        """(d): W_2, W_3, W_4 and W_5 on GPUs 0 to 3, forward and backward."""
        timeline = played(8, weights="stash")
        for action in ("F5", "B5"):
            assert [box_of(timeline, gpu, action).through + 1 for gpu in range(4)] == [2, 3, 4, 5]

    def test_predicted_versions_of_pipeoptim(self) -> None:
        """(e): Ŵ_{2+3}, Ŵ_{3+2}, Ŵ_{4+1} and W_5 for the forward, W_5 on every GPU for the backward."""
        timeline = played(8, weights="predict")
        forwards = [box_of(timeline, gpu, "F5") for gpu in range(4)]
        assert [(box.through + 1, box.steps_ahead) for box in forwards] == [(2, 3), (3, 2), (4, 1), (5, 0)]
        backwards = [box_of(timeline, gpu, "B5") for gpu in range(4)]
        assert [(box.through + 1, box.steps_ahead) for box in backwards] == [(5, 0)] * 4

    def test_three_updates_lie_between_forward_and_backward_on_gpu_0(self) -> None:
        """§II: it turns to W_5 "after the backward propagations of mini-batches 2, 3, and 4"."""
        timeline = played(8, weights="predict")
        first, last = box_of(timeline, 0, "F5").start, box_of(timeline, 0, "B5").start
        assert [update.through for update in timeline.stages[0].updates if first < update.at <= last] == [2, 3, 4]


def test_1f1b_of_pipedream() -> None:
    """PipeDream-2BW Figure 1b: after the start no stage is ever idle until the end."""
    timeline = played(8, weights="stash")
    assert [drawn(stage) for stage in timeline.stages] == [
        "1234      11522633744855 66 77 88",
        " 123    11422533644755866 77 88",
        "  12  11322433544655766877 88",
        "   111222333444555666777888",
    ]


#: Activations and gradients come in one instant, and `fifo` has to choose.
TIES = Pipeline(
    num_stages=3, num_minibatches=12, weights="wave", schedule="fifo", minibatches_per_wave=7, backward_units=1
)


class TestEveryPipeline:
    """Whatever the policy, the sizes and the durations."""

    @given(pipelines())
    @settings(max_examples=150)
    def test_dependencies_are_respected(self, pipeline: Pipeline) -> None:
        stages = [{str(box): box for box in stage.boxes} for stage in play(pipeline).stages]
        for p in range(1, pipeline.num_minibatches + 1):
            way = [boxes[f"F{p}"] for boxes in stages] + [boxes[f"B{p}"] for boxes in reversed(stages)]
            assert all(later.start >= earlier.end for earlier, later in pairwise(way))

    @given(pipelines())
    @settings(max_examples=150)
    def test_a_stage_computes_everything_once_one_at_a_time(self, pipeline: Pipeline) -> None:
        for stage in play(pipeline).stages:
            for earlier, later in pairwise(stage.boxes):
                assert later.start >= earlier.end
            for kind, units in ((Kind.FORWARD, pipeline.forward_units), (Kind.BACKWARD, pipeline.backward_units)):
                boxes = [box for box in stage.boxes if box.action.kind is kind]
                assert [box.action.p for box in boxes] == list(range(1, pipeline.num_minibatches + 1))
                assert {box.end - box.start for box in boxes} == {units}
            assert stage.most_in_flight <= pipeline.limit(stage.stage)

    @given(pipelines())
    @example(TIES)
    @settings(max_examples=100)
    def test_at_every_instant_a_stage_does_what_its_order_says(self, pipeline: Pipeline) -> None:
        timeline = play(pipeline)
        order = order_for(pipeline.weights, pipeline.schedule)
        for stage in timeline.stages:
            begun = {box.start: box.action for box in stage.boxes}
            for now, view in free_instants(timeline, stage):
                decision = order.next_action(view)
                assert decision == begun[now] if now in begun else isinstance(decision, Wait)

    @given(pipelines())
    @settings(max_examples=100)
    def test_no_weights_are_used_before_they_are_made(self, pipeline: Pipeline) -> None:
        """Per-minibatch policies in strict order use the newest of their stage: what the version table says of them."""
        for stage in play(pipeline).stages:
            for box in stage.boxes:
                newest = max((update.through for update in stage.updates if update.at <= box.start), default=0)
                assert box.through <= newest
                is_forward = box.action.kind is Kind.FORWARD
                if POLICIES[pipeline.weights].predicts is not None or (pipeline.weights == "stash" and is_forward):
                    assert box.through == newest

    @given(pipelines())
    @settings(max_examples=50)
    def test_versions_are_those_of_the_table(self, pipeline: Pipeline) -> None:
        for stage in play(pipeline).stages:
            table = VersionTable(
                pipeline.weights,
                stage.stage,
                pipeline.num_stages,
                pipeline.minibatches_per_wave,
                pipeline.accumulate,
            )
            for box in stage.boxes:
                p = box.action.p
                if box.action.kind is Kind.FORWARD:
                    wanted = (table.forward_through(p), table.forward_steps_ahead(p), False)
                else:
                    is_last = p == pipeline.num_minibatches
                    wanted = (table.backward_through(p), table.backward_steps_ahead(), table.is_update(p) or is_last)
                assert (box.through, box.steps_ahead, box.makes_update) == wanted

    @given(pipelines())
    @settings(max_examples=50)
    def test_a_flush_drains_first(self, pipeline: Pipeline) -> None:
        for stage in play(pipeline).stages:
            for index, box in enumerate(stage.boxes):
                if box.action.kind is Kind.FORWARD:
                    assert not must_drain(pipeline, stage.boxes[:index])


def free_instants(timeline: Timeline, stage: StageTimeline) -> Iterator[tuple[int, StageView]]:
    """Every unit of time at which a stage computes nothing yet, and what its order may look at then."""
    free_since = 0
    for index, box in enumerate(stage.boxes):
        for now in range(free_since, box.start + 1):
            yield now, view_at(timeline, stage, stage.boxes[:index], now)
        free_since = box.end


def view_at(timeline: Timeline, stage: StageTimeline, done: Sequence[Box], now: int) -> StageView:
    """What lies ready at a stage that has done `done`, found from the pictures of its neighbours."""
    pipeline = timeline.pipeline
    forward, backward = next_of(done, Kind.FORWARD), next_of(done, Kind.BACKWARD)
    more_forwards = forward.p <= pipeline.num_minibatches and not must_drain(pipeline, done)
    if stage.stage == 0:
        opened = since_when(pipeline, done) if more_forwards else None
    else:
        opened = end_of(timeline, stage.stage - 1, forward)
    if stage.stage == pipeline.num_stages - 1:
        returned = 0 if backward.p < forward.p else None
    else:
        returned = end_of(timeline, stage.stage + 1, backward)
    return StageView(
        pipeline.limit(stage.stage),
        forward.p - backward.p,
        None if opened is None or opened > now else Ready(forward.p, opened),
        None if returned is None or returned > now else Ready(backward.p, returned),
        more_forwards,
    )


def next_of(done: Sequence[Box], kind: Kind) -> Action:
    return Action(kind, Minibatch(1 + sum(box.action.kind is kind for box in done)))


def end_of(timeline: Timeline, stage: int, action: Action) -> int | None:
    return next((box.end for box in timeline.stages[stage].boxes if box.action == action), None)


def must_drain(pipeline: Pipeline, done: Sequence[Box]) -> bool:
    forward, backward = next_of(done, Kind.FORWARD).p, next_of(done, Kind.BACKWARD).p
    n = pipeline.minibatches_per_wave
    return forward > backward and gate_of(n, weights=pipeline.weights).starts_drained(forward)


def since_when(pipeline: Pipeline, done: Sequence[Box]) -> int | None:
    """First stage: since when the next minibatch may start: the first instant after its forerunner with room for it."""
    forward = next_of(done, Kind.FORWARD).p
    for length in range(len(done) + 1):
        before = done[:length]
        has_room = forward - next_of(before, Kind.BACKWARD).p < pipeline.limit(0)
        if next_of(before, Kind.FORWARD).p == forward and has_room and not must_drain(pipeline, before):
            return before[-1].end if before else 0
    return None


class TestFigures:
    """What a timeline says of itself."""

    @pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "fifo"])
    @pytest.mark.parametrize(("num_stages", "n"), [(1, 3), (2, 4), (4, 4), (4, 16), (5, 2)])
    def test_the_bubble_of_a_flush(self, schedule: str, num_stages: int, n: int) -> None:
        """(K − 1)/(N + K − 1), however many waves (GPipe §2.3)."""
        timeline = played(
            3 * n, num_stages=num_stages, minibatches_per_wave=n, weights="flush", schedule=schedule, backward_units=3
        )
        assert timeline.bubble == pytest.approx((num_stages - 1) / (n + num_stages - 1))
        assert timeline.bubble == pytest.approx(1 - timeline.pipeline.steady_utilisation)

    @pytest.mark.parametrize(("weights", "schedule"), PAIRS)
    @pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
    def test_steady_utilisation_is_what_a_long_run_shows(
        self, weights: WeightPolicy, schedule: Any, num_stages: int
    ) -> None:
        for n in range(POLICIES[weights].least_minibatches_per_wave(num_stages), 7):
            pipeline = Pipeline(
                num_stages=num_stages,
                num_minibatches=14 * n,
                weights=weights,
                schedule=schedule,
                minibatches_per_wave=n,
            )
            timeline = play(pipeline)
            early, late = (box_of(timeline, 0, f"B{waves * n}").end for waves in (6, 10))
            assert 4 * n * 3 / (late - early) == pytest.approx(pipeline.steady_utilisation)

    @pytest.mark.parametrize("weights", [weights for weights in WEIGHT_POLICIES if POLICIES[weights].predicts is None])
    @pytest.mark.parametrize("n", [4, 6])
    def test_weight_buffers_are_the_versions_that_are_still_wanted(self, weights: WeightPolicy, n: int) -> None:
        for stage in played(6 * n, minibatches_per_wave=n, weights=weights).stages:
            assert max(num_wanted(stage, index) for index in range(len(stage.boxes))) == stage.weight_buffers

    def test_the_rows_of_pipedream_get_shorter(self) -> None:
        stages = played(12, weights="stash").stages
        assert [stage.most_in_flight for stage in stages] == [4, 3, 2, 1]
        assert [stage.weight_buffers for stage in stages] == [4, 3, 2, 1]
        assert [stage.busy_units for stage in stages] == [36] * 4

    def test_updates_of_accumulated_gradients(self) -> None:
        (stage,) = played(5, num_stages=1, weights="stash", accumulate=2).stages
        assert [(update.at, update.through) for update in stage.updates] == [(6, 2), (12, 4), (15, 5)]


def num_wanted(stage: StageTimeline, index: int) -> int:
    """Versions there before a box, the newest or wanted by that box or a later one."""
    now = stage.boxes[index].start
    newest = max((update.through for update in stage.updates if update.at <= now), default=0)
    return len({newest} | {box.through for box in stage.boxes[index:] if box.through <= newest})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_stages": 0}, "0 stages make no pipeline"),
        ({"num_minibatches": 0}, "0 minibatches make no pipeline"),
        ({"minibatches_per_wave": 0}, "0 minibatches per wave"),
        ({"accumulate": 0}, "0 minibatches per update"),
        ({"forward_units": 0}, "0 time units of a forward"),
        ({"backward_units": -1}, "-1 time units of a backward"),
        ({"weights": "stash", "minibatches_per_wave": 3}, "needs at least 4 minibatches per wave, not 3; raise it"),
        ({"accumulate": 3}, "3 minibatches per update do not divide the 4 of a wave"),
        ({"weights": "stash", "schedule": "gpipe"}, "the schedule is gpipe, but"),
    ],
)
def test_what_is_no_pipeline_is_refused(changed: Mapping[str, Any], said: str) -> None:
    asked: dict[str, Any] = {"num_stages": 4, "num_minibatches": 8, **changed}
    with pytest.raises(PlanError, match=said):
        Pipeline(**asked)
