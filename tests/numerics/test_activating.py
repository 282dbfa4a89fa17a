"""Layers that are active in some segments only: every bit is that of the reference executor, which leaves them out."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetpipe.checkpoint.manifest import checkpoint_dir, read_manifest
from hetpipe.errors import PlanError
from hetpipe.runs.replay import replay_minibatch
from hetpipe.values.ids import Clock, Minibatch, VirtualWorkerIndex
from hetpipe.values.policies import POLICIES
from hetpipe.values.run import StageEvaluation
from tests import models
from tests.numerics.compare import ADAMW, MOMENTUM, ROOT, SGD, Case, assert_same_bits, run, trained
from tests.numerics.test_leavers import decisions
from tests.pairwise import covering
from tests.reference.executor import run_reference

pytestmark = pytest.mark.matrix

OPTIMIZERS = {"sgd": SGD, "momentum": MOMENTUM, "adamw": ADAMW}

#: Layers of `models.supernet`.
NUM_LAYERS = 5

#: Clock → the active ones: within stages, whole stages, and the first and the last stage alone.
ACTIVE: dict[int, tuple[int | str, ...]] = {0: (0, "3", 4), 1: (0, 1, 2, 4), 3: ("0", 4), 4: (0, 2, "[34]")}

#: Clock → those that are built anew: one that has not been active, one that is all the time, and one that has been and
#: is again, beside another one that continues.
FRESH: dict[int, tuple[int | str, ...]] = {1: (1,), 3: (4,), 4: ("3",)}

#: (weights, kind, optimizer, layers of each stage, whether gradients are clipped) that go together: some, and among all
#: of them others in which each two values meet.
FEW = [
    ("wave", "wsp", "adamw", (1, 3, 1), True),
    ("stash", "none", "momentum", (2, 3), False),
    ("flush", "allreduce", "adamw", (2, 3), True),
    ("predict", "none", "adamw", (1, 3, 1), False),
]
ALL = [
    (weights, kind, optimizer, cut, is_clipped)
    for (weights, policy), kind, cut, is_clipped in itertools.product(
        POLICIES.items(), ("wsp", "bsp", "none", "allreduce"), ((2, 3), (1, 3, 1), (5,)), (False, True)
    )
    if kind != "allreduce" or policy.one_update_per_wave
    for optimizer in (["momentum"] if weights == "spectrain" else OPTIMIZERS)
]
PAIRS = [pytest.param(*ALL[number], marks=pytest.mark.exhaustive) for number in sorted(covering(ALL))]


def inactive(what: Case) -> dict[int, tuple[int, ...]]:
    """Clock → the layers that are left out from there on; names of this model's layers are their indices."""
    given = {} if what.active is None else {0: what.active}
    given |= dict(what.activates)
    meant = {at: {int(index) for entry in layers for index in str(entry).strip("[]")} for at, layers in given.items()}
    return {at: tuple(sorted(set(range(NUM_LAYERS)) - layers)) for at, layers in meant.items()}


def fresh(what: Case) -> dict[int, tuple[int, ...]]:
    """Clock → the layers that are built anew there."""
    return {at: tuple(sorted(map(int, layers))) for at, layers in what.fresh}


def case(**values: Any) -> Case:
    at_start, *later = ACTIVE.items()
    return Case(**{"model": "supernet", "wave": 3, "active": at_start[1], "activates": tuple(later), **values})


@pytest.mark.parametrize(("weights", "kind", "optimizer", "cut", "is_clipped"), [*FEW, *PAIRS])
def test_every_policy_equals_the_reference(
    weights: Any, kind: str, optimizer: str, cut: tuple[int, ...], *, is_clipped: bool, tmp_path: Path
) -> None:
    policy, workers = POLICIES[weights], 1 if kind == "none" else 2
    what = case(
        workers=workers,
        stages=[list(cut)] * workers,
        minibatches=15,
        staleness=0 if kind == "bsp" else 1,
        kind=kind,
        weights=weights,
        optimizer=dict(OPTIMIZERS[optimizer]),
        max_norm=0.5 if is_clipped else None,
        clip="global" if policy.clips_globally else "stage",
        fresh=tuple(FRESH.items()),
    )
    run(what, tmp_path)
    assert_same_bits(trained(tmp_path), run_reference(what.reference(inactive=inactive(what), fresh=fresh(what))))
    found = {line["clock"]: tuple(line["inactive"]) for line in decisions(tmp_path, "activate")}
    assert found == {**inactive(what), 5: inactive(what)[4]}, "nothing changes at the end of the run"


def test_layers_move_where_others_are_activated_and_a_run_resumes_with_them(tmp_path: Path) -> None:
    """Inactive layers move, with what their optimizer keeps; the summary of a history has them, too."""
    moves = tuple((clock, vw, counts) for clock, counts in ((1, (1, 4)), (3, (4, 1)), (5, (2, 3))) for vw in range(2))
    what = case(stages=[[2, 3]] * 2, minibatches=18, every_waves=2, optimizer=dict(ADAMW), moves=moves, servers=3)
    run(what, tmp_path / "whole")
    expected = run_reference(what.reference(inactive=inactive(what)))
    assert_same_bits(trained(tmp_path / "whole"), expected)
    folder = checkpoint_dir(tmp_path / "whole", Clock(4))
    assert read_manifest(folder).progress.inactive == inactive(what)[4]
    run(what, tmp_path / "resumed", restore=folder)
    assert_same_bits(trained(tmp_path / "resumed"), expected)
    # What a checkpoint has inactive stays so, whatever the job says about the start.
    plain = replace(what, active=None, activates=(), moves=moves[-2:])
    run(plain, tmp_path / "plain", restore=folder)
    assert_same_bits(trained(tmp_path / "plain"), expected)
    with pytest.raises(PlanError, match=r"frozen layers and inactive ones are not combined; remove `freeze`"):
        run(replace(plain, freeze={"layers": 1}), tmp_path / "frozen", restore=folder)


@pytest.mark.parametrize("kind", ["wsp", pytest.param("allreduce", marks=pytest.mark.exhaustive)])
def test_layers_that_move_are_built_anew_and_a_run_resumes_at_the_barrier_where_they_are(
    kind: str, tmp_path: Path
) -> None:
    """With buffers. The checkpoint of the barrier has them as they were left, and says which are built anew."""
    what = Case(
        model="dropout_batch_norm",
        stages=[[2, 2]] * 2,
        batch_size=4,
        wave=2,
        minibatches=12,
        every_waves=2,
        kind=kind,
        weights="flush",
        optimizer=dict(ADAMW),
        combine="mean",
        moves=tuple((2, vw, (1, 3)) for vw in range(2)),
        activates=((2, (0, 1, 2, 3)), (5, (0, 2, 3))),
        fresh=((2, (0, 3)),),
    )
    reference = what.reference(inactive={2: (), 5: (1,)}, fresh=fresh(what))
    run(what, tmp_path / "whole")
    expected = run_reference(reference)
    assert_same_bits(trained(tmp_path / "whole"), expected)
    folder = checkpoint_dir(tmp_path / "whole", Clock(2))
    assert read_manifest(folder).progress.fresh == (0, 3)
    assert read_manifest(checkpoint_dir(tmp_path / "whole", Clock(4))).progress.fresh == ()
    run(what, tmp_path / "resumed", restore=folder)
    assert_same_bits(trained(tmp_path / "resumed"), expected)
    assert [line.get("fresh") for line in decisions(tmp_path / "resumed", "activate")][:2] == [[0, 3], None]
    replayed = replay_minibatch(tmp_path / "whole", what.job(), ROOT, vw=1, p=5)
    assert replayed.loss == expected.minibatches[VirtualWorkerIndex(1), Minibatch(5)].loss, "with what is built anew"


@pytest.mark.parametrize("kind", ["wsp", pytest.param("allreduce", marks=pytest.mark.exhaustive)])
def test_layers_move_by_themselves_where_others_become_active(kind: str, tmp_path: Path) -> None:
    """At the same barrier, to the cut of which the slowest stage has least to do; a move of the script is no other."""
    what = Case(
        model="supernet",
        stages=[[2, 3]] * 2,
        wave=3,
        minibatches=15,
        kind=kind,
        weights="flush",
        optimizer=dict(ADAMW),
        activates=((1, (0, 1, 4)), (2, (0, 1, 2, 3, 4)), (4, (0, 2, 3, 4))),
        elastic={"recut": True},
    )
    run(what, tmp_path)
    plans: dict[int, dict[int, tuple[int, ...]]] = {}
    for line in decisions(tmp_path, "plan"):
        if line["version"]:
            counts = tuple(last - first for first, last in itertools.pairwise(line["bounds"]))
            plans.setdefault(line["clock"], {})[line["vw"]] = counts
    assert plans[1] == dict.fromkeys(range(2), (1, 4)), "the two that are active on stage 0 share two stages"
    assert set(plans) <= {1, 2, 4}
    assert_same_bits(trained(tmp_path), run_reference(what.reference(inactive=inactive(what), plans=plans)))


def test_layers_that_are_left_out_draw_nothing_and_change_no_statistics(tmp_path: Path) -> None:
    """Under recomputation and swapping, whose regions lose layers."""
    what = Case(
        stages=[[2, 2], [1, 3]],
        model="dropout_batch_norm",
        wave=2,
        minibatches=12,
        batch_size=4,
        combine="mean",
        memory={"0": "recompute", "1": "recompute", "2": "keep", "3": "recompute"},
        activates=((2, (0, 2, 3)), (4, (0, 1, 3))),
    )
    run(what, tmp_path)
    assert_same_bits(trained(tmp_path), run_reference(what.reference(inactive={2: (1,), 4: (2,)})))


@pytest.mark.parametrize(
    ("active", "message"),
    [
        (
            (0, "block*", 4),
            r"elastic\.script\[0\]\.active: `block\*` matches no layer; the model's are 0, 1, 2, 3 and 4$",
        ),
        ((0, 7), r"elastic\.script\[0\]\.active: there is no layer 7; the model has the layers 0 to 4$"),
    ],
)
def test_entries_that_mean_no_layer_are_named(active: tuple[int | str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=message):
        run(Case(model="supernet", minibatches=4, activates=((1, active),)), tmp_path)


def test_only_active_layers_are_built_anew(tmp_path: Path) -> None:
    what = Case(model="supernet", minibatches=4, activates=((1, (0, 1, 4)),), fresh=((1, (1, "[23]")),))
    message = r"^elastic\.script\[0\]\.fresh: layer 2 \(2\) is not active there, and only active layers are built anew"
    with pytest.raises(PlanError, match=message):
        run(what, tmp_path)
    with pytest.raises(PlanError, match=r"^elastic\.script\[0\]\.fresh: there is no layer 9; the model has"):
        run(replace(what, fresh=((1, (9,)),)), tmp_path)


def test_a_job_that_leaves_nothing_to_train_is_rejected(tmp_path: Path) -> None:
    message = r"elastic\.active: leaves no layer with trainable parameters active \(layers 0, 2, 4 are off\)"
    with pytest.raises(PlanError, match=message):
        run(Case(minibatches=4, active=(1, 3)), tmp_path)


def test_whoever_joins_evaluates_with_the_layers_that_were_active_before(tmp_path: Path) -> None:
    """At the end of an epoch, where other layers become active: all have a share of the same architecture."""
    what = Case(
        model="supernet",
        data="data32",
        stages=[[2, 3]] * 2,
        batch_size=4,
        epochs=2,
        evaluate={},
        active=(0, 1, 4),
        members=((1, "drop", 1),),
    )
    run(what, tmp_path / "dropped")
    joins = next(line["clock"] for line in decisions(tmp_path / "dropped", "barrier") if "epoch" in line["reason"])
    again = replace(what, members=(*what.members, (joins, "add", 1)), activates=((joins, (0, 3, 4)),))
    result = run(again, tmp_path / "joined")
    found = [report for _, _, report in result.reports if isinstance(report, StageEvaluation) and report.clock == joins]
    assert len(found) == 2, "both have a share"
    reference = run_reference(again.reference(inactive={0: (2, 3), joins: (1, 2)}))
    supernet, data = models.supernet(), models.data32()
    supernet.load_state_dict(reference.barriers[Clock(joins)].weights)
    assert isinstance(supernet, nn.Sequential)
    with torch.no_grad():
        outputs = supernet[4](supernet[1](supernet[0](data.tensors[0])))
        expected = float(models.loss(outputs, data.tensors[1]))
    assert sum(report.sums["loss"] for report in found) / len(data) == pytest.approx(expected)
