"""Requirements, configurations and evaluations."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from hetpipe.decide.lifecycle.configs import (
    Assignment,
    assignment_of,
    check_progress,
    data_of,
    fresh_progress,
    later_life,
    run_document,
    shard_configs,
    stage_commands,
)
from hetpipe.decide.lifecycle.evaluations import MAX_LISTED, EvaluationHistory, Evaluations
from hetpipe.decide.lifecycle.job_queue import ClusterView, claim_devices, could_fit, missing
from hetpipe.decide.planner.partition import plan_job
from hetpipe.errors import CheckpointError, JobError
from hetpipe.job.file import Job
from hetpipe.storage.store import MAX_EVENTS
from hetpipe.values.events import Evaluated, JobEvent, JobState, NumberedEvent, Rewound, StateChanged
from hetpipe.values.ids import Clock, Incarnation, JobId, LayerIndex, Term
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.run import RatioSums, StageEmulation, StageEvaluation
from tests.server.coordinator.builders import JOB_ID, agent_info, job, model, shard_member, submission

AGENTS = (agent_info("n0", devices=3), agent_info("n1", devices=3))
SHARDS = (shard_member(0), shard_member(1))


def assignment(of: Job) -> Assignment:
    plan = plan_job(of, model(), AGENTS, Term(3), JOB_ID)
    return Assignment(job=of, submission=submission(of), plan=plan, agents=AGENTS, shards=SHARDS)


class TestRequirements:
    def test_nothing_is_missing(self) -> None:
        assert missing(job(), ClusterView(AGENTS, 0, SHARDS)) == ""

    def test_everything_missing_is_told_with_numbers(self) -> None:
        view = ClusterView((agent_info(devices=1),), 4, (shard_member(0),), held=((JobId("a"), 3), (JobId("b"), 1)))

        assert missing(job(), view) == (
            "needs 4 devices, one per stage, and 1 of 5 is free (job a holds 3, job b holds 1), and needs 2 parameter "
            "servers, 1 registered: start 1 more"
        )

    @pytest.mark.parametrize(
        ("view", "words"),
        [
            (
                ClusterView((), 0, ()),
                "needs 4 devices, one per stage, and no agent is registered, and needs 2 parameter",
            ),
            (
                ClusterView((agent_info(devices=1),), 2, SHARDS),
                "needs 4 devices, one per stage, more than the 1 registered agent has (3): start more agents",
            ),
        ],
    )
    def test_what_nobody_has_is_told(self, view: ClusterView, words: str) -> None:
        assert missing(job(), view).startswith(words)
        assert not could_fit(job(), view)

    def test_devices_are_claimed_in_order(self) -> None:
        claimed = claim_devices(4, (agent_info("none", devices=0), *AGENTS))

        assert [[device.device for device in agent.devices] for agent in claimed] == [
            ["n0/0", "n0/1", "n0/2"],
            ["n1/0"],
        ]


class TestConfigs:
    def test_a_batch_larger_than_the_data_is_refused(self) -> None:
        with pytest.raises(JobError, match=r"batch_size: is 4, but data.train has 3 samples"):
            data_of(job(), model(samples=3))

    def test_minibatches_bound_the_whole_run(self) -> None:
        assert data_of(job("minibatches=5"), model()).total_minibatches == 10

    def test_a_new_run_has_used_nothing(self) -> None:
        assert fresh_progress(9).used == bytes(2)

    def test_a_checkpoint_of_other_data_is_refused(self) -> None:
        check_progress(fresh_progress(40), folder="c", num_samples=40)
        with pytest.raises(CheckpointError, match=r"about 40 samples, but data.train has 100"):
            check_progress(fresh_progress(40), folder="c", num_samples=100)

    def test_every_stage_is_told_its_part(self) -> None:
        commands = stage_commands(assignment(job()))

        assert [(c.config.vw, c.config.stage, c.config.host) for c in commands] == [
            (0, 0, "n0.host"),
            (0, 1, "n0.host"),
            (1, 0, "n0.host"),
            (1, 1, "n1.host"),
        ]
        config = commands[0].config
        assert config.shard_addresses == ("shards.host:7000", "shards.host:7001")
        assert (config.run_dir, config.import_path, config.incarnation, config.restore) == (
            "/nowhere/run",
            "/code",
            0,
            None,
        )
        assert Job.model_validate(config.job) == job()
        assert {c.config.device.torch_device for c in commands} == {"cpu"}

    @pytest.mark.parametrize(("newest", "restore"), [("/run/c9", "/run/c9"), (None, "/old/c4")])
    def test_a_later_life_begins_from_the_newest_checkpoint(self, newest: str | None, restore: str) -> None:
        of = assignment(job())
        resumed = replace(of, submission=replace(of.submission, restore="/old/c4"))
        first = stage_commands(resumed)[2:]
        later = later_life(resumed, Vw(1), Incarnation(3), newest)

        assert [command.config for command in later] == [
            replace(command.config, incarnation=Incarnation(3), restore=restore) for command in first
        ]

    def test_a_virtual_worker_may_go_on_by_another_plan(self) -> None:
        of = assignment(job("cluster.devices=[{slowdown: 2.0}, {slowdown: 3.0}, {slowdown: 4.0}]"))
        first, second = of.plan.virtual_workers
        alone = replace(first, stages=(replace(first.stages[1], first_layer=LayerIndex(0)),))
        changed = of.with_worker(alone)

        assert changed.plan == replace(of.plan, virtual_workers=(alone, second))
        assert [(c.config.vw, c.config.stage) for c in stage_commands(changed)] == [(0, 0), (1, 0), (1, 1)]
        assert [c.config.device.slowdown for c in stage_commands(changed)] == [2.0, 4.0, 2.0]
        assert of.with_worker(replace(second, index=Vw(2))).plan.virtual_workers[:2] == (first, second)

    def test_devices_that_are_played_go_with_the_plan(self) -> None:
        slow, fast = StageEmulation((2.0,), (4.0,)), StageEmulation((1.0,), (2.0,))
        of = replace(assignment(job()), emulations=((slow, slow), (fast, fast)))
        first = of.plan.virtual_workers[0]

        assert of.with_worker(first, (fast, slow)).emulations == ((fast, slow), (fast, fast))

    def test_emulated_devices_are_dealt_in_order(self) -> None:
        commands = stage_commands(assignment(job("cluster.devices=[{slowdown: 2.0}, {slowdown: 3.0, jitter: 0.5}]")))

        assert [(c.config.device.slowdown, c.config.device.jitter) for c in commands] == [
            (2.0, 0.0),
            (3.0, 0.5),
            (2.0, 0.0),
            (3.0, 0.5),
        ]

    def test_every_shard_is_told_its_part(self) -> None:
        of = job("checkpoint.every_waves=5", "sync.D=2")
        run = run_document(
            assignment(of), data_of(of, model()), fresh_progress(40), eval_samples=10, submitted_wall=5.0
        )
        configs = shard_configs(of, run)

        assert [config.shard for config in configs] == [0, 1]
        assert [[part.layer for part in config.slices] for config in configs] == [[0, 2], [1, 3]]
        for config in configs:
            assert config.term == 3
            assert config.clock_shard_address == "shards.host:7000"
            assert config.membership.num_stages == {0: 2, 1: 2}
            assert config.sync.staleness == 2
            assert config.checkpoint_every_waves == 5
            assert config.data.num_samples == 40
        assert [config.run for config in configs] == [run, None]
        assert assignment_of(run) == assignment(of)


def part(clock: int, samples: int, loss: float, **sums: float) -> StageEvaluation:
    return StageEvaluation(Clock(clock), 0, samples, {"loss": loss, **sums})


class TestEvaluationHistory:
    @staticmethod
    def heard(*losses: float) -> EvaluationHistory:
        """Evaluations at clock 1, 2, …."""
        history = EvaluationHistory()
        for clock, loss in enumerate(losses, start=1):
            assert history.add(Evaluated(Clock(clock), 1, 4, {"loss": loss}))
        return history

    def test_the_best_is_the_first_with_the_least_finite_loss(self) -> None:
        summary = self.heard(math.nan, 0.5, 0.25, 0.25, -math.inf).summary
        assert summary is not None and summary.best is not None
        assert (summary.number, summary.best.clock, summary.last.clock) == (5, 3, 5)
        assert EvaluationHistory().summary is None

    def test_one_of_a_part_of_the_data_is_never_the_best(self) -> None:
        history = EvaluationHistory()
        history.add(Evaluated(Clock(2), 1, 2, {"loss": 0.1}, within_epoch=True, whole=False))
        summary = history.summary
        assert summary is not None
        assert (summary.number, summary.best, summary.last.clock) == (1, None, 2)
        assert history.last_whole is None
        history.add(Evaluated(Clock(3), 1, 4, {"loss": 0.5}))
        history.add(Evaluated(Clock(4), 2, 2, {"loss": 0.2}, within_epoch=True, whole=False))
        summary = history.summary
        assert summary is not None and summary.best is not None and history.last_whole is not None
        assert (summary.best.clock, history.last_whole.clock, summary.last.clock) == (3, 3, 4)

    def test_many_of_a_part_of_the_data_are_listed_without_a_best(self) -> None:
        history = EvaluationHistory()
        for clock in range(1, 1001):
            assert history.add(Evaluated(Clock(clock), 1, 2, {"loss": 1.0}, within_epoch=True, whole=False))
        assert [history.listed[place].clock for place in (0, -1)] == [1, 1000]
        assert len(history.listed) == MAX_LISTED

    def test_one_that_was_overtaken_stands_in_its_place(self) -> None:
        """The last part of the evaluation at a barrier may come later than one of the epoch after it."""
        history = EvaluationHistory()
        within = Evaluated(Clock(8), 2, 4, {"loss": 0.25}, within_epoch=True)
        assert history.add(within)
        assert history.add(Evaluated(Clock(6), 1, 4, {"loss": 0.5}))
        assert not history.add(within)
        assert [one.clock for one in history.listed] == [6, 8]

    def test_only_so_many_are_held(self) -> None:
        history = EvaluationHistory()
        for clock in range(1, MAX_EVENTS + 2):
            assert history.add(Evaluated(Clock(clock), 1, 4, {"loss": 1.0}))
        assert history.summary is not None
        assert (history.summary.number, history.listed[0].clock) == (MAX_EVENTS, 2)
        assert not history.add(Evaluated(Clock(1), 1, 4, {"loss": 1.0})), "it was held before"

    def test_all_are_listed_while_they_are_few(self) -> None:
        assert [one.clock for one in self.heard(*([1.0] * MAX_LISTED)).listed] == list(range(1, MAX_LISTED + 1))

    @pytest.mark.parametrize("best", [1, 2, 400, 770, 999, 1000])
    def test_of_many_an_even_choice_is_listed_with_first_best_and_last(self, best: int) -> None:
        clocks_listed = [one.clock for one in self.heard(*(abs(best - at) for at in range(1, 1001))).listed]
        assert len(set(clocks_listed)) == MAX_LISTED
        assert {1, best, 1000} <= set(clocks_listed)
        assert clocks_listed == sorted(clocks_listed)
        assert max(after - before for before, after in itertools.pairwise(clocks_listed)) <= 20

    def test_a_rewind_undoes_what_came_after_its_checkpoint(self) -> None:
        history = self.heard(0.5, 0.4, 0.1)
        history.rewind(Clock(2))
        assert [one.clock for one in history.listed] == [1, 2]
        assert history.add(Evaluated(Clock(3), 1, 4, {"loss": 0.2}, rewinds=1))
        assert [one.rewinds for one in history.listed] == [0, 0, 1]

    def test_what_is_told_again_counts_once(self) -> None:
        history = self.heard(0.5, 0.4)
        assert not history.add(Evaluated(Clock(2), 1, 4, {"loss": 0.4}))
        assert len(history.listed) == 2

    def test_a_successor_recalls_it_with_the_rewinds(self) -> None:
        told: list[JobEvent] = [
            Evaluated(Clock(3), 1, 4, {"loss": 0.5}),
            Evaluated(Clock(6), 2, 4, {"loss": 0.4}),
            Rewound(Clock(7), Clock(3), "/run/rewind-1", "its disk is gone"),
            StateChanged(JobState.RUNNING),
            Evaluated(Clock(6), 2, 4, {"loss": 0.3}, rewinds=1),
        ]
        history = EvaluationHistory()
        history.recall(NumberedEvent(number, event) for number, event in enumerate(told, 1))
        assert list(history.listed) == [told[0], told[4]]


class TestEvaluations:
    def test_parts_are_divided_once(self) -> None:
        evaluations = Evaluations(4)

        assert evaluations.add(Vw(1), part(4, 1, 4.0, accuracy=1.0)) is None
        whole = evaluations.add(Vw(0), part(4, 3, 2.0, accuracy=2.0))

        assert whole is not None
        assert (whole.clock, whole.samples, whole.values) == (4, 4, {"accuracy": 0.75, "loss": 1.5})
        assert evaluations.latest == whole

    def test_a_part_that_comes_twice_counts_once(self) -> None:
        evaluations = Evaluations(4)
        for _ in range(2):
            assert evaluations.add(Vw(0), part(4, 2, 2.0)) is None
        assert evaluations.add(Vw(1), part(4, 2, 4.0)) is not None
        assert evaluations.add(Vw(1), part(4, 2, 4.0)) is None

    def test_one_within_an_epoch_has_no_other_parts(self) -> None:
        """And it is no reason to give up the evaluation of a barrier before it."""
        evaluations = Evaluations(4)
        evaluations.add(Vw(0), part(4, 2, 2.0))
        alone = StageEvaluation(Clock(6), 2, 2, {"loss": 1.0}, 24, within_epoch=True, whole=False)
        told = evaluations.add(Vw(0), alone)
        assert told == Evaluated(Clock(6), 2, 2, {"loss": 0.5}, minibatches=24, within_epoch=True, whole=False)
        whole = evaluations.add(Vw(1), part(4, 2, 4.0))
        assert whole is not None
        assert (whole.clock, whole.samples) == (4, 4)

    def test_means_are_over_weights_and_ratios_of_sums(self) -> None:
        evaluations = Evaluations(4)
        first = RatioSums((1.0, 3.0), (2.0, 4.0))
        second = RatioSums((1.0, 0.0), (2.0, 1.0))
        evaluations.add(Vw(0), replace(part(4, 2, 6.0), weight=3, ratios={"f1": first}))
        whole = evaluations.add(Vw(1), replace(part(4, 2, 2.0), weight=1, ratios={"f1": second}))
        assert whole is not None
        assert whole.values == {"f1": (2 / 4 + 3 / 5) / 2, "loss": 2.0}
        assert list(whole.values) == ["f1", "loss"]

    def test_where_nothing_counts_there_is_no_mean(self) -> None:
        whole = Evaluations(2).add(Vw(0), replace(part(4, 2, 0.0), weight=0))
        assert whole is not None
        assert math.isnan(whole.values["loss"])

    def test_ratios_of_unequal_parts_do_not_end_the_coordinator(self) -> None:
        assert (RatioSums((1.0,), (2.0,)) + RatioSums((1.0, 1.0), (2.0, 4.0))).value == (0.5 + 0.25) / 2
        assert math.isnan(RatioSums((1.0,), ()).value)
        assert RatioSums((1e9,), (1.0,), exponential=True).value == math.inf

    def test_parts_are_added_in_index_order(self) -> None:
        forth, back = Evaluations(3), Evaluations(3)
        losses = [0.1, 0.2, 0.3]
        for vw in (0, 1, 2):
            forth.add(Vw(vw), part(1, 1, losses[vw]))
        for vw in (2, 1, 0):
            back.add(Vw(vw), part(1, 1, losses[vw]))
        assert forth.latest == back.latest

    def test_parts_that_will_not_come_are_not_waited_for(self) -> None:
        evaluations = Evaluations(6)
        evaluations.add(Vw(0), part(4, 2, 2.0))
        assert evaluations.without([Vw(0), Vw(1), Vw(2)]) is None
        evaluations.add(Vw(2), part(4, 2, 4.0))
        whole = evaluations.without([Vw(0), Vw(2)])

        assert whole is not None
        assert (whole.samples, whole.values) == (4, {"loss": 1.5})
        assert evaluations.without([Vw(0), Vw(2)]) is None

    def test_a_later_part_says_that_an_earlier_one_will_not_come(self) -> None:
        evaluations = Evaluations(4)
        evaluations.add(Vw(0), part(4, 2, 2.0))
        evaluations.add(Vw(1), part(7, 2, 2.0))
        whole = evaluations.without([Vw(0), Vw(1)])

        assert whole is not None
        assert (whole.clock, whole.samples) == (4, 2)

    def test_a_virtual_worker_without_a_share_is_not_waited_for(self) -> None:
        assert Evaluations(2).add(Vw(0), part(1, 2, 1.0)) is not None

    def test_without_their_number_everybody_is_waited_for(self) -> None:
        evaluations = Evaluations(None)
        assert evaluations.add(Vw(0), part(1, 2, 1.0)) is None
        assert evaluations.without([Vw(0), Vw(1)]) is None
        assert evaluations.add(Vw(1), part(1, 2, 1.0)) is None
        whole = evaluations.without([Vw(0), Vw(1)])
        assert whole is not None
        assert whole.samples == 4

    def test_without_samples_there_are_no_values(self) -> None:
        whole = Evaluations(0).add(Vw(0), part(1, 0, 0.0))
        assert whole is not None
        assert whole.values == {}
