"""A script drops virtual workers and adds them again: every bit is that of the reference with the same members."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest

from hetpipe.checker import check_run
from hetpipe.checkpoint.manifest import checkpoint_dir
from hetpipe.values.ids import Clock
from hetpipe.values.policies import WEIGHT_POLICIES
from tests.models import NUM_WITNESSES
from tests.numerics.compare import ADAMW, MOMENTUM, Case, assert_same_bits, run, trained
from tests.numerics.test_deaths import BATCH_NORM, death
from tests.numerics.test_leavers import decisions
from tests.numerics.test_witnesses import case as witness_case
from tests.numerics.test_witnesses import counts
from tests.reference.executor import run_reference

pytestmark = pytest.mark.matrix


def changes(folder: Path) -> list[tuple[int, str, int]]:
    """Clock, event and virtual worker of every `leave` and later `join`."""
    return [(line["clock"], line["event"], line["vw"]) for line in decisions(folder, "leave", "join") if line["clock"]]


@pytest.mark.parametrize(
    "what",
    [
        # Buffers, dropout, the optimizer's state of one that comes back; waves change with the members.
        Case(
            stages=[[2, 2], [2, 2], [3, 1]],
            workers=3,
            epochs=4,
            optimizer=dict(ADAMW),
            members=((1, "drop", 1), (3, "add", 1), (4, "drop", 0)),
            resized=((1, 3), (3, 2)),
            **BATCH_NORM,
        ),
        Case(
            workers=2,
            stages=2,
            minibatches=14,
            weights="stash",
            optimizer=dict(MOMENTUM),
            combine="mean",
            members=((2, "drop", 0), (4, "add", 0)),
            moves=((4, 0, (4, 1)),),
        ),
    ],
    ids=["three", "the-lowest"],
)
def test_the_bits_of_the_reference(what: Case, tmp_path: Path) -> None:
    run(what, tmp_path)
    expected = [(clock, "leave" if verb == "drop" else "join", vw) for clock, verb, vw in what.members]
    assert changes(tmp_path) == expected
    assert_same_bits(trained(tmp_path), run_reference(what.reference()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("weights", WEIGHT_POLICIES)
def test_every_policy(weights: Any, tmp_path: Path) -> None:
    what = Case(workers=3, stages=2, wave=3, weights=weights, minibatches=20, members=((2, "drop", 2), (4, "add", 2)))
    run(what, tmp_path)
    assert_same_bits(trained(tmp_path), run_reference(what.reference()))


@pytest.mark.parametrize(
    ("at", "number", "vw"),
    [
        ("before forward", 3, 0),
        pytest.param("before forward", 7, 0, marks=pytest.mark.exhaustive),
        pytest.param("before forward", 3, 1, marks=pytest.mark.exhaustive),
    ],
)
def test_every_sample_counts_once_if_a_life_ends_as_well(at: str, number: int, vw: int, tmp_path: Path) -> None:
    """Of another worker, or of the one that is dropped, before it is."""
    what = witness_case(workers=3, stages=2, wave=2, every_waves=3, members=((2, "drop", 1), (4, "add", 1)))
    result = run(what, tmp_path, deaths=(death(at, number, vw=vw),))
    assert result.num_lives == 4 + (vw != 1), "one by the script, which the death of the same worker precedes"
    assert counts(tmp_path) == [[2] * NUM_WITNESSES] * 4
    assert (4, "join", 1) in changes(tmp_path)


#: Moments of one that takes over, at the barrier at clock 2, and of the one before it.
_MOMENTS = {
    "before-prepared": death("before join", vw=1),
    "prepared": death("after join", vw=2),
    "other-before-prepared": death("before push", 1, vw=0),
    "recorded": death("before pull", 2, vw=1),
    "state-being-written": death("before report_checkpoint", 2, vw=0, stage=1),
    "state-written": death("after report_checkpoint", 2, vw=0),
    "taken-over": death("after takeover", vw=1),
    "after": death("before forward", 7, vw=2),
    "long-after": death("after staged", 3, vw=1),
}


@pytest.mark.parametrize(
    "moment",
    [
        name
        if name in ("prepared", "recorded", "state-being-written")
        else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in _MOMENTS
    ],
)
def test_every_sample_counts_once_if_a_life_ends_around_a_take_over(moment: str, tmp_path: Path) -> None:
    """Two of one stage take the devices of one of two; either, or the one before them, dies at each point of that."""
    what = witness_case(
        workers=1,
        stages=[[2, 2]],
        wave=2,
        every_waves=3,
        members=((2, "drop", 0),),
        added=((2, 1, (4,), (0,)), (2, 2, (4,), (1,))),
    )
    result = run(what, tmp_path, deaths=(_MOMENTS[moment],), stall_seconds=20.0)
    assert {(vw, incarnation) for vw, incarnation, *_ in result.ended} == {(_MOMENTS[moment].vw, 0)}
    handed_over = [line["whole"] for line in decisions(tmp_path, "handover")]
    if moment != "state-written":  # by one stage, and perhaps by the other
        assert handed_over == [int(moment != "state-being-written")] * (moment != "other-before-prepared")
    taken = [line for vw in (1, 2) for line in decisions(tmp_path, "takeover", of=f"vw-{vw}-stage-0")]
    assert [line["whole"] for line in taken if line["incarnation"] == 0][:1] in (handed_over, [])
    assert {line["whole"] for line in taken} <= set(handed_over)
    assert counts(tmp_path) == [[2] * NUM_WITNESSES] * 4
    assert {vw for _, event, vw in changes(tmp_path) if event == "join"} >= {1, 2}


#: A change of the lines of a clean history, each of which the checker reports.
_CORRUPTIONS: dict[str, Callable[[str, dict[str, Any]], list[dict[str, Any]]]] = {
    "state-not-left": lambda event, line: [line | {"whole": 0}] if event == "handover" else [line],
    "state-not-taken": lambda event, line: [line | {"whole": 0}] if event == "takeover" else [line],
    "not-decided": lambda event, line: [] if event == "handover" else [line],
    "decided-twice": lambda event, line: [line] * (1 + (event == "handover")),
    "of-another-barrier": lambda event, line: [line | {"clock": 1}] if event == "handover" else [line],
    "of-another-clock": lambda event, line: [line | {"clock": 1}] if event == "takeover" else [line],
    "of-one-that-stays": lambda event, line: [line | {"source": 3 - line["vw"]}] if event == "takeover" else [line],
    "twice": lambda event, line: [line] * (1 + (event == "takeover")),
    "by-one-stage": lambda event, line: [] if event == "takeover" and line["stage"] else [line],
}


@pytest.fixture(scope="module")
def taken_over(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which two stages of another virtual worker take over from one."""
    folder = tmp_path_factory.mktemp("taken-over")
    what = Case(
        workers=1,
        stages=[[5]],
        wave=2,
        minibatches=8,
        optimizer=dict(MOMENTUM),
        members=((2, "drop", 0),),
        added=((2, 1, (2, 3), (0, 1)),),
    )
    run(what, folder)
    assert check_run(folder).ok
    return folder


@pytest.mark.parametrize("corruption", _CORRUPTIONS)
def test_a_state_that_was_not_handed_over_so_is_reported(corruption: str, taken_over: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(taken_over, tmp_path / "run")
    num_changed = 0
    for path in (folder / "history").glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        changed = [each for line in lines for each in _CORRUPTIONS[corruption](line["event"], line)]
        num_changed += changed != lines
        path.write_text("".join(json.dumps(line) + "\n" for line in changed))
    assert num_changed
    assert set(check_run(folder).kinds()) == {"handover"}


def test_members_that_the_script_does_not_have_are_reported(tmp_path: Path) -> None:
    """One that goes on although it is dropped, and one that does not come back."""
    what = Case(workers=3, stages=1, minibatches=12, members=((2, "drop", 2), (4, "add", 2)))
    run(what, tmp_path)
    job = json.loads((tmp_path / "job.json").read_text())
    for line, key, value in ((0, "at", {"clock": 1}), (1, "vw", 1)):
        changed = copy.deepcopy(job)
        changed["elastic"]["script"][line][key] = value
        (tmp_path / "job.json").write_text(json.dumps(changed))
        assert set(check_run(tmp_path).kinds()) == {"membership"}


@pytest.mark.parametrize(
    ("what", "waves"),
    [
        # N of those that stay grows, by whole updates and the rest to the lower one; a line of the script decides anew.
        (
            Case(
                workers=3,
                stages=1,
                wave=4,
                minibatches=40,
                accumulate=2,
                optimizer=dict(MOMENTUM),
                members=((1, "drop", 1), (2, "drop", 0), (3, "add", 1), (5, "add", 0)),
                resized=((4, (2, 4, 6)),),
            ),
            {1: (6, 4, 6), 2: (4, 4, 12), 3: (4, 6, 6), 4: (2, 4, 6), 5: (2, 4, 4)},
        ),
        (
            Case(workers=2, stages=2, wave=3, minibatches=24, weights="stash", members=((2, "drop", 0), (4, "add", 0))),
            {2: (3, 6), 4: (3, 3)},
        ),
    ],
    ids=["three", "stash"],
)
def test_the_others_take_over_the_minibatches(what: Case, waves: Any, tmp_path: Path) -> None:
    what = replace(what, elastic={"keep_global_batch": True})
    run(what, tmp_path)
    assert check_run(tmp_path).ok
    assert_same_bits(trained(tmp_path), run_reference(what.reference(waves=waves)))


def test_one_that_the_script_adds_first_joins_only_there_and_with_another_cut(tmp_path: Path) -> None:
    script = ({"at": {"clock": 3}, "do": "add", "vw": 0, "stages": (3, 2)},)
    what = Case(
        workers=2,
        stages=[[1, 4], [2, 3]],
        minibatches=12,
        optimizer=dict(ADAMW),
        members=((3, "add", 0),),
        moves=((3, 0, (3, 2)),),
        elastic={"script": script},
    )
    run(what, tmp_path)
    assert changes(tmp_path) == [(3, "join", 0)]
    assert_same_bits(trained(tmp_path), run_reference(what.reference()))
    job = json.loads((tmp_path / "job.json").read_text())
    job["elastic"]["script"] = [{**script[0], "vw": 1}]
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert set(check_run(tmp_path).kinds()) == {"membership"}


#: Five layers on four devices: one virtual worker of four stages becomes two of two, and one of them two of one.
COMPRESSED = Case(
    workers=1,
    stages=[[1, 1, 1, 2]],
    wave=4,
    minibatches=48,
    optimizer=dict(MOMENTUM),
    members=((2, "drop", 0), (4, "drop", 2)),
    added=((2, 1, (2, 3), (0, 1)), (2, 2, (3, 2), (2, 3)), (4, 3, (5,), (2,)), (4, 4, (5,), (3,))),
    elastic={"keep_global_batch": True},
)
SHARES = {2: (4, 2, 2, 4, 4), 4: (4, 2, 4, 1, 1)}


@pytest.mark.parametrize(
    ("but", "waves"),
    [
        ({}, SHARES),
        (
            {"elastic": {}, "resized": ((2, (4, 2, 3, 4, 4)),), "weights": "stash", "optimizer": dict(ADAMW)},
            None,
        ),
        pytest.param({"weights": "vertical", "elastic": {}}, None, marks=pytest.mark.exhaustive),
        pytest.param({"weights": "flush", "elastic": {}, "max_norm": 0.5}, None, marks=pytest.mark.exhaustive),
        pytest.param({"weights": "double_buffer", "combine": "mean"}, SHARES, marks=pytest.mark.exhaustive),
        pytest.param({"weights": "predict", "elastic": {}}, None, marks=pytest.mark.exhaustive),
    ],
    ids=["wave", "stash", "vertical", "flush", "double-buffer", "predict"],
)
def test_others_with_fewer_stages_take_the_devices_of_one_that_is_dropped(but: Any, waves: Any, tmp_path: Path) -> None:
    what = replace(COMPRESSED, **but)
    run(what, tmp_path)
    expected = [(2, "leave", 0), (2, "join", 1), (2, "join", 2), (4, "leave", 2), (4, "join", 3), (4, "join", 4)]
    assert changes(tmp_path) == expected
    numbers = {"waves": waves} if waves else {}
    assert_same_bits(trained(tmp_path), run_reference(what.reference(**numbers)))


@pytest.mark.parametrize(
    "clock", [pytest.param(2, marks=pytest.mark.exhaustive), 3, pytest.param(4, marks=pytest.mark.exhaustive)]
)
def test_a_run_goes_on_in_the_middle_of_a_script_that_changes_the_number_of_stages(clock: int, tmp_path: Path) -> None:
    """From the barriers at which others take over, and from between them."""
    what = replace(COMPRESSED, every_waves=3, minibatches=24)
    run(what, tmp_path / "whole")
    run(what, tmp_path / "resumed", restore=checkpoint_dir(tmp_path / "whole", Clock(clock)))
    assert_same_bits(trained(tmp_path / "resumed"), run_reference(what.reference(waves=SHARES)))


def test_who_trains_on_the_devices_of_one_that_does_is_reported(tmp_path: Path) -> None:
    """Those whom the script adds compute where another one does, by a plan that gives it their devices."""
    run(COMPRESSED, tmp_path)
    plan = json.loads((tmp_path / "plan.json").read_text())
    workers = plan["virtual_workers"]
    workers[2]["stages"][0]["device"] = workers[1]["stages"][0]["device"]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert set(check_run(tmp_path).kinds()) == {"membership"}
    job = json.loads((tmp_path / "job.json").read_text())
    del job["elastic"]["script"][0]
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert "membership" in set(check_run(tmp_path).kinds())


@pytest.mark.parametrize(
    "what",
    [
        # PipeTransformer's own setting: two of four stages become four of two; and these one, which has the mean of
        # their buffers.
        Case(
            kind="allreduce",
            weights="flush",
            workers=2,
            stages=[[1, 1, 1, 1], [1, 1, 1, 1]],
            wave=4,
            minibatches=24,
            optimizer=dict(ADAMW),
            members=((2, "drop", 0), (2, "drop", 1), *((4, "drop", vw) for vw in range(2, 6))),
            added=(*((2, 2 + n, (3, 1), (2 * n, 2 * n + 1)) for n in range(4)), (4, 6, (1, 3), (0, 1))),
            elastic={"keep_global_batch": True},
            **BATCH_NORM,
        ),
        Case(
            kind="none",
            weights="vertical",
            workers=1,
            stages=[[1, 1, 2]],
            wave=3,
            epochs=2,
            members=((2, "drop", 0), (5, "drop", 1)),
            added=((2, 1, (1, 3), (1, 2)), (5, 2, (2, 1, 1), (2, 1, 0))),
            **BATCH_NORM,
        ),
    ],
    ids=["allreduce", "none"],
)
def test_without_parameter_servers_others_take_over_the_weights(what: Case, tmp_path: Path) -> None:
    run(what, tmp_path)
    shares = {2: (4, 4, 2, 2, 2, 2, 4), 4: (4, 4, 4, 4, 4, 4, 8)}
    numbers = {"waves": shares} if what.kind == "allreduce" else {}
    assert_same_bits(trained(tmp_path), run_reference(what.reference(**numbers)))


def random_case(seed: int) -> Case:
    """A random run in which two or three times others, cut differently, take the devices of one that is dropped."""
    draw = random.Random(seed)
    kind = draw.choice(["wsp", "wsp", "none", "allreduce"])
    strict = ["stash", "vertical", "predict", "spectrain", "double_buffer"]
    weights = draw.choice(["flush", "double_buffer"] if kind == "allreduce" else ["flush", *strict])
    if kind == "wsp":
        weights = draw.choice(["wave", weights])
    num_layers, data = (4, dict(BATCH_NORM)) if draw.random() < 0.3 else (5, {})

    def cut(num_stages: int) -> tuple[int, ...]:
        places = [0, *sorted(draw.sample(range(1, num_layers), num_stages - 1)), num_layers]
        return tuple(last - first for first, last in pairwise(places))

    def parts(devices: list[int]) -> list[list[int]]:
        """Some or all of the devices, for the virtual workers that take them."""
        if kind == "none":
            return [draw.sample(devices, draw.randint(1, len(devices)))]
        size = min(draw.choice([1, 2, len(devices)]), len(devices))
        return [devices[at : at + size] for at in range(0, len(devices) - size + 1, size)]

    first = parts(list(range(4)))
    counts = cut(len(first[0]))
    at_start = [list(counts if kind == "allreduce" else cut(len(devices))) for devices in first]
    ends = [0, *accumulate(map(len, at_start))]
    present = {vw: list(range(*ends[vw : vw + 2])) for vw in range(len(first))}
    members: list[tuple[int, str, int]] = []
    added: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = []
    following = len(first)
    for clock in sorted(draw.sample(range(1, 6), draw.choice([2, 3]))):
        dropped = sorted(present) if kind == "allreduce" else [draw.choice(sorted(present))]
        devices = [device for vw in dropped for device in present.pop(vw)]
        members += [(clock, "drop", vw) for vw in dropped]
        groups = parts(devices)
        counts = cut(len(groups[0]))
        for group in groups:
            added.append((clock, following, counts if kind == "allreduce" else cut(len(group)), tuple(group)))
            present[following] = group
            following += 1
    return Case(
        workers=len(first),
        stages=at_start,
        wave=4,
        staleness=draw.choice([0, 1, 4]),
        minibatches=160 // len(first),
        optimizer=dict(MOMENTUM if weights == "spectrain" else draw.choice([MOMENTUM, ADAMW])),
        every_waves=draw.choice([None, 2]),
        combine=draw.choice(["sum", "mean"]),
        kind=kind,
        weights=weights,  # type: ignore[arg-type]
        max_norm=draw.choice([None, 0.5]),
        clip="stage" if weights in ("stash", "predict", "spectrain") else draw.choice(["global", "stage"]),
        servers=draw.choice([1, 2]),
        members=tuple(members),
        added=tuple(added),
        **data,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(40))
def test_random_runs_have_the_bits_of_the_reference(seed: int, tmp_path: Path) -> None:
    """Policies, kinds of synchronization, V, K, D, optimizers, clipping."""
    what = random_case(seed)
    run(what, tmp_path)
    assert_same_bits(trained(tmp_path), run_reference(what.reference()))
