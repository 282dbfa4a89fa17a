"""Scripts of moves: what they decide, and which lines a run cannot do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetpipe.decide.elastic.enlarging import new_worker
from hetpipe.decide.elastic.replanning import basis_of
from hetpipe.decide.elastic.script import (
    DecidedSince,
    building_line,
    check_script,
    memory_changes,
    most_minibatches_per_wave,
    over_rewinds,
    plan_changes,
    predecessor,
    script_of,
    wave_changes,
)
from hetpipe.decide.lifecycle.configs import data_of, fresh_progress
from hetpipe.decide.lifecycle.planning import PlannedRun, num_devices_wanted
from hetpipe.decide.planner.costs import Costs
from hetpipe.decide.planner.partition import plan_job
from hetpipe.errors import JobError, PlanError, UserError
from hetpipe.job.file import Job
from hetpipe.values.decisions import DecisionLine, DecisionMoment, MemberDecision, MoveDecision, MoveJudgement
from hetpipe.values.ids import Clock, Term
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.memory import MemoryChange
from hetpipe.values.sync import PlanChange, WaveChange, WaveNumbers
from tests.server.coordinator.builders import JOB_ID, agent_info, job, model
from tests.server.coordinator.machine_driver import AGENTS

#: 40 samples in minibatches of 4: two waves of two minibatches for each of two virtual workers, and a third one.
MODEL = model(4)
NAMES = [layer.name for layer in MODEL.layers]


def scripted(*lines: dict[str, Any]) -> Job:
    script = tuple({"do": "move", "vw": 0, "at": {"clock": 1}, "stages": (1, 3), **line} for line in lines)
    return Job(**{**job().model_dump(mode="json"), "elastic": {"script": script}})


def check(of: Job, *, clock: int = 0) -> None:
    plan = plan_job(of, MODEL, AGENTS, Term(1), JOB_ID)
    start = replace(fresh_progress(MODEL.train_samples), clock=Clock(clock))
    check_script(of, plan, data_of(of, MODEL), start, NAMES)


def test_a_job_without_a_script_changes_nothing() -> None:
    assert plan_changes(job()) == ()
    check(job())


def test_the_lines_as_changes_of_plans() -> None:
    of = scripted({}, {"vw": 1, "stages": (3, 1)}, {"at": {"clock": 2}, "stages": (2, 2)})
    assert plan_changes(of) == (
        PlanChange(Clock(1), Vw(0), (0, 1, 4)),
        PlanChange(Clock(1), Vw(1), (0, 3, 4)),
        PlanChange(Clock(2), Vw(0), (0, 2, 4)),
    )
    check(of)


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        (
            [{}, {"at": {"clock": 2}, "stages": (1, 2)}],
            r"elastic\.script\[1\]: has 3 layers for virtual worker 0, but the model has 4; give each of them",
        ),
        (
            [{"at": {"clock": 400}}],
            r"elastic\.script\[0\]: is at clock 400, but the run ends at clock \d+, where nothing is trained any more",
        ),
    ],
)
def test_a_line_that_cannot_be_done(lines: list[dict[str, Any]], wrong: str) -> None:
    with pytest.raises(PlanError, match=wrong):
        check(scripted(*lines))


def memory(**changes: Any) -> dict[str, Any]:
    return {"do": "memory", "vw": 0, "at": {"p": 5}, "layers": (0,), "policy": "swap", **changes}


def with_memory(*lines: dict[str, Any]) -> Job:
    return Job(**{**job().model_dump(mode="json"), "elastic": {"script": lines}})


def test_policies_need_barriers_only_and_are_the_affair_of_the_virtual_worker() -> None:
    of = with_memory(memory(), memory(at={"clock": 2}, layers=(NAMES[1],), policy="keep"), memory(vw=1))
    assert plan_changes(of) == (PlanChange(Clock(2), Vw(0)),)
    assert memory_changes(of, Vw(0)) == (
        MemoryChange((0,), "swap", minibatch=5),
        MemoryChange((NAMES[1],), "keep", clock=2),
    )
    assert memory_changes(of, Vw(1)) == (MemoryChange((0,), "swap", minibatch=5),)
    check(of)


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ([memory(layers=(0, 4))], r"\[0\]: names layer 4, but the model has the layers 0 to 3: "),
        ([memory(layers=("other*",))], r"\[0\]: names layer other\*, but the model has the layers 0 to 3: "),
        ([memory(at={"p": 6})], r"\[0\]: is at minibatch 6, which does not begin a wave of 4; use 5 or 9"),
        ([memory(at={"p": 401})], r"\[0\]: is at clock 100, but the run ends at clock \d+"),
        (
            [memory(at={"clock": 2}), memory(vw=1), memory()],
            r"\[2\]: takes effect in wave 1, after one in wave 2; give the lines in order of time",
        ),
    ],
)
def test_a_line_about_memory_that_cannot_be_done(lines: list[dict[str, Any]], wrong: str) -> None:
    with pytest.raises(PlanError, match=rf"elastic\.script{wrong}"):
        check(with_memory(*lines))


def waves(given: Any = 8, clock: int = 1) -> dict[str, Any]:
    return {"at": {"clock": clock}, "do": "waves", "minibatches_per_wave": given}


def test_another_n_is_a_change_of_its_own() -> None:
    of = with_memory(waves((8, 4)), memory(at={"p": 13}))
    assert wave_changes(of) == (WaveChange(Clock(1), (8, 4)),)
    assert plan_changes(of) == ()
    plan = plan_job(of, MODEL, AGENTS, Term(1), JOB_ID)
    assert [most_minibatches_per_wave(of, plan, worker.index) for worker in plan.virtual_workers] == [8, 4]


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ([waves((8, 4, 4))], r"\[0\]\.minibatches_per_wave: has 3 numbers"),
        ([waves(clock=30)], r"\[0\]: is at clock 30, but the run ends at clock \d+"),
        # Waves of 4, from clock 1 on of 8: minibatches 1 to 4, 5 to 12, 13 to 20.
        ([waves(), memory(at={"p": 9})], r"\[1\]: is at minibatch 9, which does not begin a wave of 8; use 5 or 13"),
        (
            [waves(), memory(at={"p": 13}), memory(at={"clock": 1})],
            r"\[2\]: takes effect in wave 1, after one in wave 2",
        ),
    ],
)
def test_another_n_that_cannot_be(lines: list[dict[str, Any]], wrong: str) -> None:
    with pytest.raises((PlanError, JobError), match=rf"elastic\.script{wrong}"):
        check(with_memory(*lines))


def test_a_policy_that_fills_the_pipeline_needs_as_many_minibatches_as_stages() -> None:
    of = Job(**{**job().model_dump(mode="json"), "weights": "stash", "elastic": {"script": (waves(1),)}})
    with pytest.raises(
        PlanError, match=r"\[0\]: has 1 minibatches per wave, but stash needs as many as virtual worker 0"
    ):
        check(of)


def test_minibatches_of_a_resumed_run_are_those_of_its_checkpoint() -> None:
    """At clock 1 with 6 minibatches before and waves of 2, whatever the job says; N changes at clock 2 to 8."""
    of = with_memory(waves(8, 2), memory(at={"p": 9}))
    plan = plan_job(of, MODEL, AGENTS, Term(1), JOB_ID)
    start = replace(fresh_progress(400), clock=Clock(1), waves={Vw(vw): WaveNumbers(2, 6) for vw in (0, 1)})
    check_script(of, plan, replace(data_of(of, MODEL), num_samples=400), start, NAMES)
    wrong = with_memory(waves(8, 2), memory(at={"p": 8}))
    with pytest.raises(PlanError, match=r"is at minibatch 8, which does not begin a wave of 2; use 7 or 9"):
        check_script(wrong, plan, replace(data_of(of, MODEL), num_samples=400), start, NAMES)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ({"vw": 2}, r"elastic\.script\[0\]: names virtual worker 2, but the run has 2; use 0 to 1"),
        (
            {"stages": (1, 1, 2)},
            r"elastic\.script\[0\]: has 3 stages for virtual worker 0, which has 2; a move keeps their number",
        ),
    ],
)
def test_a_line_that_does_not_fit_a_plan_made_by_the_planner(line: dict[str, Any], wrong: str) -> None:
    """Of a job that states its stages, these lines are mistakes of the job already."""
    changes = {"workers": {"stages": "auto"}, "sync": {"minibatches_per_wave": 2, "D": 0}}
    script = ({"do": "move", "vw": 0, "at": {"clock": 1}, "stages": (1, 3), **line},)
    of = Job(**{**job().model_dump(mode="json"), **changes, "elastic": {"script": script}})
    plan = plan_job(job(), MODEL, AGENTS, Term(1), JOB_ID)
    with pytest.raises(PlanError, match=wrong):
        check_script(of, plan, data_of(of, MODEL), fresh_progress(MODEL.train_samples), NAMES)


def test_a_cut_that_the_model_forbids() -> None:
    of = scripted({"stages": (3, 1)}, {"at": {"clock": 2}, "stages": (1, 3)})
    plan = plan_job(of, MODEL, AGENTS, Term(1), JOB_ID)
    basis = basis_of(PlannedRun(of, plan, model=MODEL), AGENTS)
    layers = tuple(
        layer.model_copy(update={"no_cut": "a write in place" if at == 2 else ""})
        for at, layer in enumerate(basis.profile.layers)
    )
    costs = Costs(basis.profile.model_copy(update={"version": 2, "layers": layers}), basis.cluster)
    wrong = r"elastic\.script\[0\]: stage 0 of virtual worker 0 ends before layer 3 .* cut: a write in place; let"
    with pytest.raises(PlanError, match=wrong):
        check_script(of, plan, data_of(of, MODEL), fresh_progress(MODEL.train_samples), NAMES, costs)


def test_lines_of_the_run_that_a_run_continues_are_done() -> None:
    check(scripted({"at": {"clock": 1}}), clock=1)


def test_no_virtual_worker_is_added_to_a_job_that_follows_a_script() -> None:
    of = scripted({})
    plan = plan_job(of, MODEL, AGENTS, Term(1), JOB_ID)
    with pytest.raises(UserError, match=r"follows a script of changes \(elastic\.script\), which knows only its 2 "):
        new_worker(PlannedRun(of, plan, model=MODEL), plan, [agent_info("n2", devices=2)])


def test_a_stage_is_built_anew_by_the_newest_line() -> None:
    freeze = {"at": {"clock": 3}, "do": "freeze", "layers": 2}
    lines = ({"do": "move", "vw": 0, "at": {"clock": at}, "stages": cut} for at, cut in ((2, (3, 1)), (4, (2, 2))))
    first, last = lines
    of = Job(**{**job().model_dump(mode="json"), "elastic": {"script": (first, freeze, last)}})
    assert [building_line(of, Vw(0), clock) for clock in (1, 2, 3, 4)] == [
        "",
        "elastic.script[0]: moves layers of virtual worker 0 to [3, 1] at clock 2",
        "elastic.script[1]: freezes 2 layers at clock 3",
        "elastic.script[2]: moves layers of virtual worker 0 to [2, 2] at clock 4",
    ]


def added(**changes: Any) -> dict[str, Any]:
    return {"at": {"clock": 2}, "do": "add", "vw": 2, "stages": (4,), "devices": (2,), **changes}


def drop(vw: int, clock: int = 2) -> dict[str, Any]:
    return {"at": {"clock": clock}, "do": "drop", "vw": vw}


def test_others_take_the_devices_of_one_that_is_dropped() -> None:
    """The devices of virtual worker 1 are 2 and 3; its minibatches are theirs with `keep_global_batch`."""
    of = with_memory(drop(1), added(), added(vw=3, devices=(3,)))
    plan = plan_job(of, MODEL, AGENTS, Term(1), JOB_ID)
    places = [[(stage.agent, stage.device) for stage in worker.stages] for worker in plan.virtual_workers]
    assert places[2:] == [[places[1][0]], [places[1][1]]]
    assert [worker.bounds for worker in plan.virtual_workers[2:]] == [(0, 4), (0, 4)]
    assert plan_changes(of) == ()
    check(of)
    kept = Job(**{**of.model_dump(mode="json"), "elastic": {**of.elastic.model_dump(), "keep_global_batch": True}})
    assert wave_changes(kept) == (WaveChange(Clock(2), (3, 4, 3, 2)),)


def test_another_one_has_devices_of_its_own() -> None:
    """Beyond those of the job's virtual workers, which are 0 to 3."""
    of = with_memory(added(devices=(4,)), added(vw=3, stages=(2, 2), devices=(5, 6)))
    plan = plan_job(of, MODEL, [*AGENTS, agent_info("n2", devices=3)], Term(1), JOB_ID)
    assert [stage.agent for worker in plan.virtual_workers[2:] for stage in worker.stages] == ["n2"] * 3
    assert (of.num_devices, num_devices_wanted(of)) == (7, 7)
    check_script(of, plan, data_of(of, MODEL), fresh_progress(MODEL.train_samples), NAMES)
    with pytest.raises(PlanError, match=r"\[0\]: names device 5, but no line has device 4; number further devices on "):
        plan_job(with_memory(added(devices=(5,))), MODEL, [*AGENTS, agent_info("n2", devices=3)], Term(1), JOB_ID)


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ([added()], r"\[0\]: has virtual worker 2 train on device \S+ from clock 2 on, where virtual worker 1 trains"),
        ([drop(1), added(devices=(4,))], r"\[1\]: names device 4, but the run has 4; use 0 to 3"),
        ([drop(1), added(stages=(3,))], r"\[1\]: has 3 layers, but the model has 4; give each of them to a stage"),
        (
            [drop(1), added(), {**drop(0), "do": "add", "at": {"clock": 3}, "vw": 1}],
            r"\[2\]: has virtual worker 2 train on device \S+ from clock 3 on, where virtual worker 1 trains",
        ),
    ],
)
def test_devices_that_cannot_be_had(lines: list[dict[str, Any]], wrong: str) -> None:
    with pytest.raises(PlanError, match=rf"elastic\.script{wrong}"):
        check(with_memory(*lines))


def replicas(*lines: dict[str, Any]) -> Job:
    """Two virtual workers of two stages that average gradients."""
    sync = {"kind": "allreduce", "minibatches_per_wave": 4}
    values = job().model_dump(mode="json") | {"sync": sync, "weights": "flush", "parameter_servers": {}}
    return Job(**values | {"elastic": {"script": lines}})


def test_without_parameter_servers_one_that_is_dropped_leaves_its_state() -> None:
    of = replicas(drop(0), drop(1), added(devices=(1,)), added(vw=3, devices=(3,)))
    check(of)
    plan = plan_job(of, MODEL, AGENTS, Term(1), JOB_ID)
    assert [predecessor(of, plan, Vw(vw), 2) for vw in range(4)] == [None, None, Vw(0), Vw(1)]
    assert predecessor(of, plan, Vw(2), 3) is None


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ([drop(1), added()], r"\[0\]: leaves virtual workers 0, 2 with different cuts from clock 2 on, but under"),
        (
            [drop(1), drop(0, 3), added(at={"clock": 3})],
            r"\[2\]: adds virtual worker 2, but under `allreduce` only the stages hold the weights; drop one that has",
        ),
    ],
)
def test_replicas_that_cannot_be(lines: list[dict[str, Any]], wrong: str) -> None:
    with pytest.raises(PlanError, match=rf"elastic\.script{wrong}"):
        check(replicas(*lines))


def member(clock: int, do: Any, vw: int, by: str = "drain", *devices: int) -> MemberDecision:
    return MemberDecision(DecisionMoment(Clock(clock)), do, Vw(vw), by, "why", 1.0, (4,) * len(devices), devices)


def moved(clock: int, version: int, vw: int = 0) -> MoveDecision:
    return MoveDecision(DecisionMoment(Clock(clock)), "move", Vw(vw), (1, 3), version, "straggler", "why", 1.0, 1.0)


#: Two virtual workers, and a rewind to clock 8.
@pytest.mark.parametrize(
    ("before", "since", "num_workers", "expected"),
    [
        # Below, at and above the checkpoint; and since.
        (
            [moved(4, 1), moved(8, 2), moved(9, 3)],
            [moved(10, 3)],
            2,
            ["4 move 0", "8 barrier", "8 move 0", "10 move 0"],
        ),
        # One that was out stays out, one that was back stays in.
        ([member(4, "drop", 1)], [member(8, "drop", 1, "rewind")], 2, ["4 drop 1", "8 barrier"]),
        ([member(4, "drop", 1), member(6, "add", 1)], [], 2, ["4 drop 1", "6 add 1", "8 barrier"]),
        # One that was out is back, with its agent; or out only now.
        ([member(4, "drop", 1)], [], 2, ["4 drop 1", "8 barrier", "8 add 1"]),
        ([member(8, "drop", 1)], [], 2, ["8 barrier"]),
        ([member(9, "drop", 1)], [member(8, "drop", 1, "rewind")], 2, ["8 barrier", "8 drop 1"]),
        (
            [member(4, "drop", 1), member(8, "add", 1)],
            [member(8, "drop", 1, "rewind"), member(12, "add", 1)],
            2,
            ["4 drop 1", "8 barrier", "12 add 1"],
        ),
        # One of an operator's is kept, with the plan in which it is, or lost with it.
        ([member(4, "add", 2, "operator", 2)], [], 3, ["4 add 2", "8 barrier"]),
        ([member(9, "add", 2, "operator", 2)], [], 3, ["8 barrier", "8 add 2"]),
        ([member(4, "add", 2, "operator", 2)], [], 2, ["4 add 2", "8 barrier", "8 drop 2"]),
        ([member(9, "add", 2, "operator", 2)], [], 2, ["8 barrier"]),
        ([member(9, "add", 2, "operator", 2)], [member(8, "drop", 2, "rewind")], 3, ["8 barrier"]),
    ],
)
def test_what_is_decided_over_a_rewind(
    before: list[DecisionLine], since: list[DecisionLine], num_workers: int, expected: list[str]
) -> None:
    found = over_rewinds(before, [DecidedSince(Clock(8), num_workers, tuple(since))])
    lines = [f"{line.at.clock} {line.do} {getattr(line, 'vw', '')}".strip() for line in script_of(found)]  # type: ignore[union-attr]
    assert lines == expected
    Job(**{**job().model_dump(mode="json"), "elastic": {"script": [line.model_dump() for line in script_of(found)]}})


def test_a_judgement_goes_with_its_move() -> None:
    judged = [MoveJudgement("judge", Vw(0), version, 1.0, "it helped", 1.0) for version in (1, 2)]
    found = over_rewinds([moved(4, 1), moved(9, 2), *judged], [DecidedSince(Clock(8), 2, ())])
    assert [line for line in found if isinstance(line, MoveJudgement)] == judged[:1]


def test_who_is_absent_after_a_rewind_to_the_start_is_added_first() -> None:
    since = (member(0, "drop", 1, "rewind"), member(3, "add", 1))
    assert over_rewinds([moved(4, 1)], [DecidedSince(Clock(0), 2, since)]) == since[1:]
