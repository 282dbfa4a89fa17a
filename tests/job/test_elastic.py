"""The section `elastic`: every mistake in a script with its line, the reason and a way out."""

from __future__ import annotations

from typing import Any

import pytest

from hetpipe.job.file import Job
from hetpipe.values.ids import VirtualWorkerIndex
from tests.job.test_job_policies import job, problems


def line(clock: int = 4, **changes: Any) -> dict[str, Any]:
    return {"at": {"clock": clock}, "do": "move", "vw": 0, "stages": (1, 1), **changes}


def memory(**changes: Any) -> dict[str, Any]:
    return {"at": {"p": 9}, "do": "memory", "vw": 0, "layers": (0, "h.*"), "policy": "swap", **changes}


def waves(given: Any = 4, clock: int = 4) -> dict[str, Any]:
    return {"at": {"clock": clock}, "do": "waves", "minibatches_per_wave": given}


def activate(clock: int = 4, active: tuple[int | str, ...] = (0, "h.*")) -> dict[str, Any]:
    return {"at": {"clock": clock}, "do": "activate", "active": active}


def script(*lines: dict[str, Any]) -> dict[str, Any]:
    return {"script": lines}


def test_a_script_survives_the_job_file() -> None:
    made = job(elastic=script(line(2), line(4, stages=(3, 1))))
    assert made.elastic.clocks == [2, 4]
    assert Job.model_validate(made.model_dump(mode="json")) == made
    assert job().elastic.script == ()


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ((line(0),), "elastic.script[0].at.clock: "),
        (
            (line(4, do="shrink"),),
            "elastic.script[0]: needs a key `do` with one of the words move, memory, waves, drop, add, freeze, act",
        ),
        ((line(4, stages=()),), "elastic.script[0].stages: "),
        ((line(4, stages=(0, 2)),), "elastic.script[0].stages[0]: "),
        ((line(4, vw=-1),), "elastic.script[0].vw: "),
        ((line(4, layers=3),), "elastic.script[0].layers: "),
        ((activate(4, ()),), "elastic.script[0].active: is empty; give the layers, for example"),
        (
            (activate(4), activate(4, (1,))),
            "elastic.script: line 2 changes the active layers a second time at clock 4; remove one",
        ),
        (
            (line(4), line(2)),
            "elastic.script: line 2 is at clock 2, after one at clock 4; give the lines in order",
        ),
        (
            (line(4), line(4)),
            "elastic.script: line 2 moves virtual worker 0 a second time at clock 4; remove one",
        ),
        (
            (line(4, stages=(1, 1, 1)),),
            "elastic.script[0].stages: has 3 stages, but virtual worker 0 has 2; a move keeps their number: give the",
        ),
        ((line(4, vw=1),), "elastic.script[0].vw: is 1, but the virtual workers are 0 to 0"),
        ((memory(vw=1),), "elastic.script[0].vw: is 1, but the virtual workers are 0 to 0"),
        ((memory(layers=()),), "elastic.script[0].layers: "),
        ((memory(layers=(-1,)),), "elastic.script[0].layers[0]: "),
        ((memory(layers=("",)),), "elastic.script[0].layers[0]: "),
        ((memory(policy="lose"),), "elastic.script[0].policy: "),
        ((memory(at={"p": 0}),), "elastic.script[0].at.p: "),
    ],
)
def test_lines_that_cannot_be(lines: tuple[dict[str, Any], ...], wrong: str) -> None:
    (found,) = problems(elastic=script(*lines), workers={"count": 1, "stages": 2})
    assert found.startswith(wrong), found


def test_several_lines_may_be_about_the_memory_of_one_virtual_worker_at_one_clock() -> None:
    lines = (line(2), memory(at={"clock": 2}), memory(at={"clock": 2}, layers=(1,), policy="keep"), memory())
    made = job(elastic=script(*lines))
    assert made.elastic.clocks == [2, 2, 2]
    assert [each.vw for each in made.elastic.moves] == [0]
    assert Job.model_validate(made.model_dump(mode="json")) == made


def test_waves_change_for_all_or_for_each() -> None:
    lines = (waves(4, 2), line(2), waves((4, 2), 4))
    two: dict[str, Any] = {"workers": {"count": 2, "stages": 2}, "sync": {"kind": "wsp", "D": 0}}
    made = job(**two, elastic=script(*lines))
    assert [each.counts for each in made.elastic.waves] == [(4,), (4, 2)]
    assert made.elastic.clocks == [2, 2, 4]
    assert Job.model_validate(made.model_dump(mode="json")) == made


@pytest.mark.parametrize(
    ("given", "changes", "wrong"),
    [
        (0, {}, "elastic.script[0].minibatches_per_wave: must be at least 1"),
        ((1, 2, 3), {}, "elastic.script[0].minibatches_per_wave: has 3 numbers, but there are 2 virtual workers"),
        (
            3,
            {"gradients": {"accumulate": 2}},
            "elastic.script[0].minibatches_per_wave: is not a multiple of `gradients.accumulate`, 2",
        ),
        (
            (4, 2),
            {"sync": {"kind": "allreduce", "minibatches_per_wave": 2}, "weights": "flush"},
            "elastic.script[0].minibatches_per_wave: differ, but under allreduce all virtual workers have equal waves",
        ),
    ],
)
def test_waves_that_cannot_be(given: Any, changes: dict[str, Any], wrong: str) -> None:
    two: dict[str, Any] = {"workers": {"count": 2, "stages": 2}, "sync": {"kind": "wsp", "D": 0}}
    (found,) = problems(**{**two, **changes}, elastic=script(waves(given)))
    assert found.startswith(wrong), found


def member(verb: str, vw: int = 1, clock: int = 4) -> dict[str, Any]:
    return {"at": {"clock": clock}, "do": verb, "vw": vw}


def test_virtual_workers_are_dropped_and_added() -> None:
    lines = (member("drop"), member("drop", 0, 6), member("add", 1, 8), member("drop", 1, 9))
    made = job(elastic=script(*lines), workers={"count": 3, "stages": 2})
    assert [(each.do, each.vw) for each in made.elastic.members] == [("drop", 1), ("drop", 0), ("add", 1), ("drop", 1)]
    assert [made.elastic.stays_dropped(vw) for vw in range(3)] == [True, True, False]
    assert Job.model_validate(made.model_dump(mode="json")) == made


@pytest.mark.parametrize(
    ("lines", "changes", "wrong"),
    [
        (
            (member("add"), member("add")),
            {},
            "elastic.script: line 2 is `add` of virtual worker 1, which trains already; remove it",
        ),
        (
            (member("drop", 0, 2), member("add")),
            {},
            "elastic.script[0].vw: is the last virtual worker that trains; keep one",
        ),
        (
            ({**member("add"), "stages": (2, 1, 1)},),
            {},
            "elastic.script[0].stages: has 3 stages, but virtual worker 1 has 2; a move keeps their number",
        ),
        (
            (member("drop"), member("drop")),
            {},
            "elastic.script: line 2 is `drop` of virtual worker 1, which is ",
        ),
        (
            (member("drop"), member("drop", 0)),
            {},
            "elastic.script[1].vw: is the last virtual worker that trains; keep one",
        ),
        (
            (member("add"),),
            {"sync": {"kind": "allreduce", "minibatches_per_wave": 2}, "weights": "flush"},
            "elastic.script[0]: adds virtual worker 1, but under `allreduce` only the stages hold the weights: use wsp",
        ),
    ],
)
def test_members_that_cannot_be(lines: tuple[dict[str, Any], ...], changes: dict[str, Any], wrong: str) -> None:
    (found,) = problems(**{"workers": {"count": 2, "stages": 2}, **changes}, elastic=script(*lines))
    assert found.startswith(wrong), found


def test_waves_change_once_at_a_clock() -> None:
    (found,) = problems(elastic=script(waves(), waves(2)), workers={"count": 1, "stages": 2})
    assert found == "elastic.script: line 2 changes the waves a second time at clock 4; remove one"


def test_policies_change_at_barriers_only_where_backwards_use_other_weights_than_forwards() -> None:
    predicts: dict[str, Any] = {
        "weights": "predict",
        "workers": {"count": 1, "stages": 2},
        "sync": {"kind": "wsp", "minibatches_per_wave": 2, "D": 0},
        "optimizer": {"name": "SGD", "lr": 0.1, "momentum": 0.9},
    }
    assert job(**predicts, elastic=script(memory(at={"clock": 4}))).elastic.clocks == [4]
    (found,) = problems(**predicts, elastic=script(memory()))
    assert found.startswith(
        "elastic.script[0].at: is minibatch 9, but under `predict` policies change at barriers only"
    )


def test_replicas_move_together() -> None:
    replicas: dict[str, Any] = {
        "workers": {"count": 2, "stages": 2},
        "sync": {"kind": "allreduce", "minibatches_per_wave": 2},
        "weights": "flush",
    }
    both = script(line(4), line(4, vw=1))
    assert len(job(**replicas, elastic=both).elastic.script) == 2
    for wrong in (script(line(4)), script(line(4), line(4, vw=1, stages=(2, 1)))):
        (found,) = problems(**replicas, elastic=wrong)
        assert found.startswith(
            "elastic.script: does not move all 2 virtual workers alike at clock 4, but under allreduce"
        )


def added(clock: int = 4, **changes: Any) -> dict[str, Any]:
    return {"at": {"clock": clock}, "do": "add", "vw": 1, "stages": (2,), "devices": (0,), **changes}


def dropped(clock: int = 4, vw: int = 0) -> dict[str, Any]:
    return {"at": {"clock": clock}, "do": "drop", "vw": vw}


def test_another_virtual_worker_takes_the_place_of_the_only_one() -> None:
    made = job(
        workers={"count": 1, "stages": 2},
        elastic=script(dropped(), added(), added(vw=2, devices=(1,)), waves((4, 2, 2))),
    )
    assert (made.num_workers, made.num_ever, made.num_devices) == (1, 3, 2)
    assert [made.num_stages(VirtualWorkerIndex(vw)) for vw in range(3)] == [2, 1, 1]
    assert made.elastic.is_absent(1, 3)
    assert not made.elastic.is_absent(1, 4)
    assert Job.model_validate(made.model_dump(mode="json")) == made


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ((added(devices=(0, 0), stages=(1, 1)),), "elastic.script[0].devices: has a device twice; give each stage"),
        ((added(stages=None),), "elastic.script: line 1 has `devices`, so it needs as many `stages`"),
        ((added(stages=(1, 1)),), "elastic.script: line 1 has `devices`, so it needs as many `stages`"),
        (
            (dropped(), added(), dropped(5, 1), added(6)),
            "elastic.script: line 4 gives virtual worker 1 devices, but an",
        ),
        (
            (dropped(), added(), added(vw=3)),
            "elastic.script: line 3 adds virtual worker 3 with `devices`, but the next",
        ),
        ((added(vw=0),), "elastic.script[0].devices: are those of virtual worker 0, which the job has"),
        ((dropped(), added(), dropped(6, 1)), "elastic.script[2].vw: is the last virtual worker that trains; keep one"),
        (
            (dropped(), added(), line(6, vw=1, stages=(1, 1))),
            "elastic.script[2].stages: has 2 stages, but virtual worker 1 has 1; a move keeps their number: give the",
        ),
        (
            (dropped(), added(), waves((4, 2, 2))),
            "elastic.script[2].minibatches_per_wave: has 3 numbers, but there are 2",
        ),
    ],
)
def test_other_virtual_workers_that_cannot_be(lines: tuple[dict[str, Any], ...], wrong: str) -> None:
    found = problems(elastic=script(*lines), workers={"count": 1, "stages": 2})
    assert found[0].startswith(wrong), found


def live(**changes: Any) -> dict[str, Any]:
    return line(at={"p": 9}, **changes)


def test_a_line_may_move_layers_without_a_barrier() -> None:
    made = job(elastic=script(live()), sync={"kind": "wsp", "D": 1, "minibatches_per_wave": 4})
    assert made.elastic.clocks == []
    assert [number for number, _ in made.elastic.live_moves] == [0]
    assert Job.model_validate(made.model_dump(mode="json")) == made


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"weights": "stash"}, "under weights: stash versions depend on the stage; use weights: "),
        (
            {"weights": "double_buffer", "sync": {"deterministic": False}},
            "the clock changes during a move, and depends on the time; set `sync.deterministic",
        ),
        ({"gradients": {"max_norm": 1.0, "clip": "stage"}}, "the norm of a stage's gradient depends on its layers"),
        ({"elastic": {**script(live()), "active": [0]}}, "inactive layers and moves between barriers are not"),
        ({"elastic": script(live(), memory())}, "lines `memory` of the script and moves between barriers are not"),
        ({"freeze": {"layers": 1}}, "`freeze` and moves between barriers are not combined"),
    ],
)
def test_where_layers_move_at_barriers_only(changes: dict[str, Any], why: str) -> None:
    sync = {"kind": "wsp", "D": 1, "minibatches_per_wave": 4, "deterministic": True, **changes.get("sync", {})}
    (problem,) = problems(**{"elastic": script(live()), **changes, "sync": sync})
    assert problem.startswith("elastic.script[0].at: is a minibatch of virtual worker 0, but ")
    assert why in problem
    assert "give a `clock`" in problem


@pytest.mark.parametrize(
    ("freeze", "elastic", "wrong"),
    [
        ({"layers": 1}, {"active": (0,)}, "freeze: freezes layers, but `elastic` says which layers are active"),
        ({"layers": 1}, script(activate()), "freeze: freezes layers, but `elastic` says which layers are active"),
        (
            {},
            script(activate(2), {"at": {"clock": 4}, "do": "freeze", "layers": 1}),
            "elastic.script: freezes layers, but `elastic` says which layers are active",
        ),
    ],
)
def test_frozen_and_inactive_layers_are_not_combined(
    freeze: dict[str, Any], elastic: dict[str, Any], wrong: str
) -> None:
    assert any(problem.startswith(wrong) for problem in problems(freeze=freeze, elastic=elastic))
    assert job(elastic=elastic if not elastic.get("script") else script(activate())).elastic.activates


def test_layers_are_built_anew_where_nobody_is_away() -> None:
    wrong = "elastic.script[0].fresh: builds layers anew, and other lines drop or add virtual workers"
    fresh = {**activate(2), "fresh": ("h.*",)}
    found = problems(
        elastic=script(fresh, {"at": {"clock": 4}, "do": "drop", "vw": 1}), workers={"count": 2, "stages": 2}
    )
    assert [problem.startswith(wrong) for problem in found] == [True]
    assert job(elastic=script(fresh)).elastic.script[0].model_dump()["fresh"] == ("h.*",)


def test_one_decides_where_layers_move() -> None:
    wrong = "elastic.script[1]: moves layers of virtual worker 0, but with `elastic.recut` the active layers decide how"
    found = problems(elastic={"recut": True, **script(activate(2), line(4))})
    assert [problem.startswith(wrong) for problem in found] == [True]


def test_a_job_with_inactive_layers_moves_others_at_barriers_only() -> None:
    live = {"at": {"p": 9}, "do": "move", "vw": 0, "stages": (1, 1)}
    found = problems(
        sync={"kind": "wsp", "D": 1, "minibatches_per_wave": 4, "deterministic": True},
        elastic={"active": (0,), **script(live)},
    )
    assert any("inactive layers and moves between barriers are not combined" in problem for problem in found), found
