"""The progress table and the result of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hetpipe.decide.lifecycle.configs import data_of, fresh_progress
from hetpipe.decide.lifecycle.evaluations import EvaluationHistory
from hetpipe.decide.lifecycle.progress import ProgressBoard
from hetpipe.decide.lifecycle.summary import FinishedRun, clocks_from_reports, result_object
from hetpipe.decide.planner.partition import plan_job
from hetpipe.values.commands import StageKey
from hetpipe.values.events import Evaluated
from hetpipe.values.freezing import FrozenSince
from hetpipe.values.ids import Clock, Incarnation, StageIndex, Term
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.life_state import LifeState
from hetpipe.values.plan import ProofReport
from hetpipe.values.run import CacheUse
from hetpipe.values.sync import Progress
from tests.server.coordinator.builders import JOB_ID, STAGES, agent_info, clocks, job, model, progress

PLAN = plan_job(job(), model(), [agent_info()], Term(1), JOB_ID)
START = fresh_progress(40)


BOTH = {Vw(0): LifeState.READY, Vw(1): LifeState.READY}


def key(vw: int, stage: int, life: int = 0) -> StageKey:
    return StageKey(JOB_ID, Vw(vw), StageIndex(stage), Incarnation(life), Term(1))


@pytest.fixture
def board() -> ProgressBoard:
    return ProgressBoard(PLAN, data_of(job(), model()), START, 1, now=100.0)


class TestProgressBoard:
    def test_an_empty_table_has_all_rows(self, board: ProgressBoard) -> None:
        table = board.table(None, states=BOTH, now=100.0)

        assert [row.vw for row in table.rows] == [0, 1]
        assert [(s.first_layer, s.last_layer, s.device) for s in table.rows[1].stages] == [
            (0, 2, "n0/2"),
            (2, 4, "n0/3"),
        ]
        assert table.eta_seconds is None
        assert table.total_samples == 80
        assert table.staleness == 1

    def test_clocks_come_from_the_clock_shard(self, board: ProgressBoard) -> None:
        table = board.table(clocks(5, 3, samples=16), states=BOTH, now=101.0)

        assert [(row.clock, row.distance) for row in table.rows] == [(5, 2), (3, 0)]
        assert (table.global_clock, table.samples) == (3, 16)

    def test_without_it_from_the_first_stages(self, board: ProgressBoard) -> None:
        board.add(key(0, 0), progress(clock=4), now=101.0)

        assert [row.clock for row in board.table(None, states=BOTH, now=101.0).rows] == [4, 0]

    def test_rates_come_from_the_last_stage_over_the_last_seconds(self, board: ProgressBoard) -> None:
        for second in range(1, 31):
            samples = 10 * second if second <= 15 else 150 + 20 * (second - 15)
            board.add(key(0, 1), progress(samples=samples, loss=0.5), now=100.0 + second)
            board.add(key(0, 0), progress(samples=9_999), now=100.0 + second)

        row = board.table(clocks(1, 1, samples=40), states=BOTH, now=130.0).rows[0]

        assert row.samples_per_second == pytest.approx(20.0)
        assert row.loss == 0.5

    def test_a_rate_falls_when_nothing_is_heard(self, board: ProgressBoard) -> None:
        board.add(key(0, 1), progress(samples=40), now=102.0)

        rates = [
            board.table(None, states=BOTH, now=now).rows[0].samples_per_second for now in (102.0, 105.0, 110.0, 140.0)
        ]

        assert rates == [20.0, 20.0, 4.0, 1.0]

    def test_the_last_epoch_is_not_exceeded_at_the_end(self, board: ProgressBoard) -> None:
        last = data_of(job(), model()).epochs
        assert last is not None
        for epoch, shown in ((last, last), (last + 1, last)):
            now = replace(clocks(1, 1, samples=40), epoch=epoch)
            assert board.table(now, states=BOTH, now=101.0).epoch == shown

    def test_time_left_is_what_is_left_at_the_rate(self, board: ProgressBoard) -> None:
        board.add(key(0, 1), progress(samples=10), now=102.0)
        board.add(key(1, 1), progress(samples=30), now=102.0)

        table = board.table(clocks(1, 1, samples=40), states=BOTH, now=102.0)

        assert table.samples_per_second == pytest.approx(20.0)
        assert table.eta_seconds == pytest.approx(2.0)

    def test_waiting_is_a_share_of_the_running_time(self, board: ProgressBoard) -> None:
        board.add(key(1, 0), progress(waiting_seconds=2.5), now=110.0)

        assert board.table(None, states=BOTH, now=110.0).rows[1].waiting_share == pytest.approx(0.25)

    def test_memory_is_summed_over_the_stages(self, board: ProgressBoard) -> None:
        for stage in range(2):
            board.add(key(1, stage), progress(weight_bytes=300, activation_bytes=20), now=101.0)
        assert [row.memory_bytes for row in board.table(None, states=BOTH, now=101.0).rows] == [0, 640]

    def test_use_of_the_cache_is_summed_and_what_a_node_keeps_counts_once(self, board: ProgressBoard) -> None:
        assert board.table(None, states=BOTH, now=100.0).cache is None
        for vw in range(2):
            board.add(key(vw, 0), progress(cache=CacheUse(3, 2, 100, kept_bytes=60 + vw)), now=101.0)
        board.add(key(0, 0, 1), progress(cache=CacheUse(5, 1, 10, kept_bytes=70, stopped="full")), now=102.0)

        stopped = "stage 0 of virtual worker 0: full"
        assert board.table(None, states=BOTH, now=102.0).cache == CacheUse(11, 5, 210, kept_bytes=70, stopped=stopped)

    def test_each_stage_has_its_policies_and_its_memory(self, board: ProgressBoard) -> None:
        """Policies of a cut with another number of layers are those from before a move."""
        layers = [stage.last_layer - stage.first_layer for stage in board.plan.virtual_workers[1].stages]
        board.add(key(1, 0), progress(weight_bytes=300, memory=("swap",) * layers[0]), now=101.0)
        board.add(key(1, 1), progress(weight_bytes=10, memory=("swap",) * (layers[1] + 1)), now=101.0)
        device = board.plan.virtual_workers[1].stages[0].device
        first, second = board.table(None, states=BOTH, now=101.0, device_bytes={device: 500}).rows[1].stages
        assert (first.memory, first.memory_bytes, first.device_bytes) == (("swap",) * layers[0], 300, 500)
        assert (second.memory, second.memory_bytes, second.device_bytes) == ((), 10, 0)

    def test_the_last_stage_of_a_shorter_plan_counts_from_where_it_is(self, board: ProgressBoard) -> None:
        board.add(key(0, 1), progress(samples=500), now=105.0)
        first, second = board.plan.virtual_workers
        alone = replace(first, stages=(replace(first.stages[0], last_layer=first.stages[1].last_layer),))
        board.plan = replace(board.plan, virtual_workers=(alone, second))
        for samples in (10, 30):
            board.add(key(0, 0, life=1), progress(samples=samples), now=106.0 + samples / 10)

        row = board.table(None, states=BOTH, now=109.0).rows[0]
        assert row.samples_per_second == pytest.approx(10.0)
        assert len(row.stages) == 1

    def test_counts_go_on_over_lives(self, board: ProgressBoard) -> None:
        first = progress(clock=3, samples=40, pushed_bytes=100, loss=2.0, first_loss=5.0, weight_bytes=30)
        board.add(key(1, 1), first, now=101.0)
        for samples in (4, 8):
            later = progress(clock=9, samples=samples, pushed_bytes=samples, first_loss=1.0, weight_bytes=20)
            board.add(key(1, 1, life=1), later, now=102.0)

        report = board.reports[Vw(1), StageIndex(1)]
        assert (report.clock, report.samples, report.pushed_bytes) == (9, 48, 108)
        assert (report.first_loss, report.loss, report.weight_bytes) == (5.0, 2.0, 30)

    def test_distances_are_from_the_slowest_that_is_there(self, board: ProgressBoard) -> None:
        board.add(key(1, 1), progress(samples=30), now=101.0)
        table = board.table(clocks(7, 3), states=BOTH | {Vw(1): LifeState.ENDING}, now=101.0)

        assert [(row.clock, row.distance, row.state) for row in table.rows] == [(7, 0, "ready"), (3, 0, "ending")]
        assert table.global_clock == 7

    @pytest.mark.parametrize(("state", "rate"), [("ready", 30.0), ("starting", 0.0), ("ending", 0.0), ("done", 30.0)])
    def test_who_does_not_compute_has_no_rate(self, board: ProgressBoard, state: str, rate: float) -> None:
        board.add(key(1, 1), progress(samples=30), now=101.0)
        table = board.table(clocks(7, 3), states=BOTH | {Vw(1): LifeState(state)}, now=101.0)

        assert (table.rows[1].samples_per_second, table.samples_per_second) == (rate, rate)

    @pytest.mark.parametrize("state", [LifeState.STARTING, LifeState.READY])
    def test_who_begins_its_next_life_holds_nobody_up_until_it_is_a_member(
        self, board: ProgressBoard, state: LifeState
    ) -> None:
        for vw, waited in ((0, 9.0), (1, 0.0)):
            board.add(key(vw, 0), progress(clock=3, waiting_seconds=waited), now=110.0)
        told = clocks(30, 3)
        others = replace(told, local={Vw(0): told.local[Vw(0)]})
        table = board.table(others, states=BOTH | {Vw(1): state}, now=110.0)

        assert [(row.clock, row.distance) for row in table.rows] == [(30, 0), (3, 0)]
        assert (table.global_clock, table.straggler) == (30, None)

    @pytest.mark.parametrize(("waits", "straggler"), [((9.0, 0.0), 1), ((4.0, 0.0), None), ((9.0, 6.0), None)])
    def test_who_holds_the_others_up_is_named(
        self, board: ProgressBoard, waits: tuple[float, float], straggler: int | None
    ) -> None:
        for vw, seconds in enumerate(waits):
            board.add(key(vw, 0), progress(waiting_seconds=seconds), now=110.0)

        assert board.table(clocks(4, 2), states=BOTH, now=110.0).straggler == straggler
        alone = BOTH | {Vw(0): LifeState.OUT}
        assert board.table(clocks(4, 2), states=alone, now=110.0).straggler is None


def record(**values: Any) -> FinishedRun:
    reports = {}
    for index, (vw, stage) in enumerate(STAGES):
        reports[vw, stage] = progress(
            samples=40,
            loss=0.1 * (vw + 1) if stage == 1 else None,
            first_loss=1.0 * (vw + 1) if stage == 1 else None,
            waiting_seconds=float(index),
            idle_seconds=float(10 * index),
            pushed_bytes=100,
            pulled_bytes=10,
            weight_bytes=1000 * stage,
            activation_bytes=7,
            gradient_norm=0.5 if stage == 1 else None,
            learning_rate=0.1,
            cache=CacheUse(6, 2, 300, 100) if stage == 0 else None,
        )
    defaults: dict[str, Any] = {
        "run_dir": "/runs/digits",
        "plan": PLAN,
        "start": START,
        "reported_clocks": replace(
            clocks(6, 5, samples=80, minibatches=20, max_distance=2), frozen=(FrozenSince(Clock(3), 1, 2),)
        ),
        "reports": reports,
        "evaluations": history(
            Evaluated(Clock(3), 1, 10, {"accuracy": 0.8, "loss": 0.1}, minibatches=10),
            Evaluated(Clock(6), 2, 10, {"accuracy": 0.9, "loss": 0.2}, minibatches=20, rewinds=1),
        ),
        "running_seconds": 4.0,
        "staleness": 1,
        "deaths": {Vw(1): 2},
        "rewinds": 1,
        "proof": ProofReport("whole model", "bits", 4, 0.3, ("outputs",)),
    }
    return FinishedRun(**{**defaults, **values})


def history(*evaluations: Evaluated) -> EvaluationHistory:
    found = EvaluationHistory()
    assert all(found.add(evaluated) for evaluated in evaluations)
    return found


def listed(epoch: int, accuracy: float, loss: float, *, rewinds: int) -> dict[str, Any]:
    values = {"accuracy": accuracy, "loss": loss}
    place = {"epoch": epoch, "clock": 3 * epoch, "minibatches": 10 * epoch}
    kind = {"within_epoch": False, "whole": True}
    return {**place, "samples": 10, "rewinds": rewinds, **kind, "values": values}


class TestResult:
    def test_it_has_the_published_shape(self) -> None:
        assert result_object(record()) == {
            "run_dir": "/runs/digits",
            "waves": 11,
            "minibatches": 20,
            "samples": 80,
            "wall_seconds": 4.0,
            "samples_per_second": 20.0,
            "tokens_per_second": None,
            "model_flops_utilisation": None,
            "model_flops_utilisation_reason": "the operations of the model were not counted",
            "loss": {"first": pytest.approx(1.5), "last": pytest.approx(0.15)},
            "losses": {},
            "skipped_updates": {"0": 0, "1": 0},
            "eval": {"epoch": 2, "clock": 6, "samples": 10, "accuracy": 0.9, "loss": 0.2},
            "evaluations": {
                "number": 2,
                "best": listed(1, 0.8, 0.1, rewinds=0),
                "listed": [listed(1, 0.8, 0.1, rewinds=0), listed(2, 0.9, 0.2, rewinds=1)],
            },
            "staleness": {"bound_clock_distance": 2, "max_clock_distance": 2, "violations": None},
            "clocks": {"0": 6, "1": 5},
            "global_clock": 5,
            "bytes": {"pushed": 400, "pulled": 40},
            "cache": {"reads": 12, "computed": 4, "read_bytes": 600, "stopped": ""},
            "waiting_seconds": {"0": 0.0, "1": 2.0},
            "idle_seconds": {"0": 5.0, "1": 25.0},
            "deaths": {"0": 0, "1": 2},
            "rewinds": 1,
            "frozen": [{"clock": 3, "frozen": 1, "layers": 2}],
            "conditions": [],
            "proof": {
                "scope": "whole model",
                "equality": "bits",
                "samples": 4,
                "seconds": 0.3,
                "checked": ["outputs"],
                "notices": [],
                "work": None,
            },
            "stages": [
                {
                    "vw": vw,
                    "stage": stage,
                    "weight_bytes": 1000 * stage,
                    "activation_bytes": 7,
                    "gradient_norm": 0.5 if stage == 1 else None,
                    "learning_rate": 0.1,
                }
                for vw in (0, 1)
                for stage in (0, 1)
            ],
        }

    def test_several_losses_are_averaged_by_name(self) -> None:
        """A virtual worker whose minibatches never counted has none."""
        told = [
            progress(
                loss=1.0, first_loss=2.0, losses={"main": 1.0, "aux": 0.5}, first_losses={"main": 3.0, "aux": 4.0}
            ),
            progress(loss=3.0, first_loss=2.0, losses={"main": 2.0, "aux": 1.5}, first_losses={}),
        ]
        reports = {(Vw(vw), StageIndex(1)): report for vw, report in enumerate(told)}
        result = result_object(record(reports=reports))
        assert result["losses"] == {"aux": {"first": 4.0, "last": 1.0}, "main": {"first": 3.0, "last": 1.5}}

    def test_who_is_out_has_the_clock_it_came_to(self) -> None:
        told = clocks(6, 5)
        others = replace(told, local={Vw(0): told.local[Vw(0)]})
        reports = {**record().reports, (Vw(1), StageIndex(0)): progress(clock=3)}

        assert result_object(record(reported_clocks=others, reports=reports))["clocks"] == {"0": 6, "1": 3}
        assert result_object(record(reported_clocks=others, reports={}))["clocks"] == {"0": 6, "1": START.clock}

    def test_counts_are_of_this_run_alone(self) -> None:
        start = Progress(Clock(4), 1, bytes(5), minibatches=12, samples=48)

        result = result_object(record(start=start))

        assert (result["waves"], result["minibatches"], result["samples"]) == (11, 8, 32)
        assert result["samples_per_second"] == 8.0
        assert result["clocks"] == {"0": 6, "1": 5}

    def test_numbers_json_does_not_have_become_null(self) -> None:
        nan, infinite = float("nan"), float("inf")
        last = progress(loss=nan, first_loss=infinite, gradient_norm=nan, learning_rate=infinite)
        reports = {(Vw(0), StageIndex(1)): last}
        evaluation = Evaluated(Clock(1), 0, 1, {"loss": float("nan")})

        result = result_object(record(reports=reports, evaluations=history(evaluation)))

        assert result["loss"] == {"first": None, "last": None}
        assert result["eval"]["loss"] is None
        assert result["evaluations"]["best"]["values"] == {"loss": None}
        assert (result["stages"][0]["gradient_norm"], result["stages"][0]["learning_rate"]) == (None, None)
        assert json.loads(json.dumps(result, allow_nan=False)) == result

    def test_asp_has_no_bound_and_an_empty_run_no_rate(self) -> None:
        result = result_object(record(staleness=None, running_seconds=0.0, evaluations=history(), reports={}))

        assert result["staleness"]["bound_clock_distance"] is None
        assert result["samples_per_second"] == 0.0
        assert result["eval"] == {}
        assert result["evaluations"] == {"number": 0, "best": None, "listed": []}
        assert result["loss"] == {"first": None, "last": None}

    def test_without_a_clock_shard_the_stages_clocks_stand_in(self) -> None:
        stand_in = clocks_from_reports(PLAN, START, [progress(clock=3), progress(clock=2)])

        assert stand_in.local == {0: 3, 1: 3}
        assert stand_in.global_clock == 3
