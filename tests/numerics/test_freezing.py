"""Layers that are frozen at barriers: every bit is that of the reference executor, which freezes them there.

The reference computes their gradients no more (`requires_grad_(False)`) and has their modules in evaluation mode.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hetpipe.checkpoint.manifest import checkpoint_dir, read_manifest
from hetpipe.errors import PlanError
from hetpipe.values.ids import Clock
from hetpipe.values.policies import POLICIES
from tests import models
from tests.numerics.compare import ADAMW, MOMENTUM, SGD, Case, assert_same_bits, run, trained
from tests.numerics.test_deaths import BATCH_NORM
from tests.numerics.test_leavers import barriers, decisions, drain, membership
from tests.pairwise import all_pairs
from tests.reference.executor import run_reference

pytestmark = pytest.mark.matrix

#: One of three layers with parameters from the end of the first epoch on, two from that of the second on.
SCHEDULE: dict[str, Any] = {"schedule": [{"epoch": 1, "layers": 1}, {"epoch": 2, "layers": 2}]}

OPTIMIZERS = {"sgd": SGD, "momentum": MOMENTUM, "adamw": ADAMW}

#: (weights, kind, optimizer, layers of each stage, whether gradients are clipped) that go together. Frozen are layers
#: within a stage, whole stages, and some of the only one.
POINTS = [
    (weights, kind, optimizer, cut, is_clipped)
    for (weights, policy), kind, cut, is_clipped in itertools.product(
        POLICIES.items(), ("wsp", "bsp", "none", "allreduce"), ((1, 4), (2, 1, 2), (5,)), (False, True)
    )
    if kind != "allreduce" or policy.one_update_per_wave
    for optimizer in (["momentum"] if weights == "spectrain" else OPTIMIZERS)
]


def levels(what: Case) -> list[int]:
    """F → frozen layers of the chain: all before the (F + 1)-th layer with trainable parameters."""
    model = getattr(models, what.model)()
    assert isinstance(model, nn.Sequential)
    trained_layers = [i for i, layer in enumerate(model) if any(p.requires_grad for p in layer.parameters())]
    return [0, *trained_layers[1:]]


def frozen_clocks(what: Case, folder: Path) -> dict[int, int]:
    """Clock → frozen layers of the chain, by the epochs that ended in a run."""
    of, point = levels(what), what.freeze
    ends = [line["clock"] for line in decisions(folder, "barrier") if "epoch" in line["reason"]]
    at = {ends[entry["epoch"] - 1]: of[entry["layers"]] for entry in point.get("schedule", ())}
    return {0: of[point.get("layers", 0)], **at}


def assert_frozen(what: Case, folder: Path, **options: Any) -> dict[int, int]:
    """A run of the case has the bits of the reference executor; returns where how many layers were frozen."""
    run(what, folder, **options)
    frozen = frozen_clocks(what, folder)
    assert_same_bits(trained(folder), run_reference(what.reference(frozen=frozen)))
    return frozen


@pytest.mark.parametrize(("weights", "kind", "optimizer", "cut", "is_clipped"), all_pairs(POINTS))
def test_every_policy_equals_the_reference(
    weights: Any, kind: str, optimizer: str, cut: tuple[int, ...], *, is_clipped: bool, tmp_path: Path
) -> None:
    policy, workers = POLICIES[weights], 1 if kind == "none" else 2
    what = Case(
        workers=workers,
        stages=[list(cut)] * workers,
        wave=3,
        batch_size=6,
        staleness=0 if kind == "bsp" else 1,
        epochs=3,
        kind=kind,
        weights=weights,
        optimizer=dict(OPTIMIZERS[optimizer]),
        max_norm=0.5 if is_clipped else None,
        clip="global" if policy.clips_globally else "stage",
        freeze=SCHEDULE,
    )
    frozen = assert_frozen(what, tmp_path)
    found = {line["clock"]: (line["frozen"], line["layers"]) for line in decisions(tmp_path, "freeze")}
    last = max(found)
    assert found.pop(last) == (2, 4), "nothing freezes at the end of the run"
    assert list(found.values()) == [(1, 2), (2, 4)]
    assert {clock: layers for clock, (_, layers) in found.items()} == {c: n for c, n in frozen.items() if c}


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_dropout_and_statistics_of_frozen_layers(mode: str, tmp_path: Path) -> None:
    """`eval`: statistics are used and stay as they are, dropout does not draw; `train`: as before."""
    what = Case(
        stages=[[2, 2], [1, 3]],
        epochs=3,
        optimizer=dict(ADAMW),
        freeze={"schedule": [{"epoch": 1, "layers": 1}], "mode": mode},
        **BATCH_NORM,
    )
    run(what, tmp_path)
    frozen = frozen_clocks(what, tmp_path)
    expected = run_reference(what.reference(frozen=frozen, frozen_mode=mode))
    assert_same_bits(trained(tmp_path), expected)
    (clock,) = (clock for clock, layers in frozen.items() if layers)
    changes = any(
        not value.equal(expected.buffers[name]) for name, value in expected.barriers[Clock(clock)].buffers.items()
    )
    assert changes == (mode == "train")


def test_layers_that_are_frozen_from_the_start_keep_their_initial_weights(tmp_path: Path) -> None:
    what = Case(stages=[[1, 4], [1, 4]], wave=2, minibatches=8, weights="stash", freeze={"layers": 2})
    assert_frozen(what, tmp_path)
    found, first = trained(tmp_path), run_reference(what.reference(stop_at_clock=1, frozen={0: 4})).barriers[Clock(0)]
    assert all(found[name].equal(value) == (not name.startswith("4.")) for name, value in first.weights.items())


@pytest.mark.parametrize("kind", ["wsp", "none"])
def test_a_resumed_run_has_the_frozen_layers_of_its_checkpoint(kind: str, tmp_path: Path) -> None:
    workers = 1 if kind == "none" else 2
    what = Case(
        workers=workers,
        stages=[[2, 3]] * workers,
        wave=2,
        batch_size=6,
        epochs=3,
        kind=kind,
        weights="flush",
        freeze=SCHEDULE,
    )
    whole = tmp_path / "whole"
    frozen = assert_frozen(what, whole)
    first, second = sorted(frozen)[1:]
    for clock in (first, second):
        folder = checkpoint_dir(whole, Clock(clock))
        assert read_manifest(folder).progress.frozen == (1 if clock == first else 2)
    resumed = tmp_path / "resumed"
    run(what, resumed, restore=checkpoint_dir(whole, Clock(first)))
    assert next(decisions(resumed, "freeze"))["frozen"] == 1
    assert_same_bits(trained(resumed), run_reference(what.reference(frozen=frozen)))
    thawed = replace(what, epochs=4, freeze={})
    run(thawed, tmp_path / "further", restore=checkpoint_dir(whole, Clock(second)))
    assert {line["frozen"] for line in decisions(tmp_path / "further", "freeze")} == {2}
    assert_same_bits(trained(tmp_path / "further"), run_reference(thawed.reference(frozen=frozen)))


def test_frozen_layers_are_not_trained_again(tmp_path: Path) -> None:
    what = Case(workers=1, stages=1, wave=2, batch_size=6, epochs=2, freeze={"schedule": [{"epoch": 1, "layers": 2}]})
    run(what, tmp_path / "whole")
    clock = min(line["clock"] for line in decisions(tmp_path / "whole", "freeze"))
    again = replace(what, epochs=4, freeze={"schedule": [{"epoch": 3, "layers": 1}]})
    message = r"freeze\.schedule\[0\]: freezes 1 layers, but 2 are frozen in the checkpoint already"
    with pytest.raises(PlanError, match=message):
        run(again, tmp_path / "again", restore=checkpoint_dir(tmp_path / "whole", Clock(clock)))


def test_layers_move_where_others_are_frozen(tmp_path: Path) -> None:
    """At one barrier, and later; frozen layers move, too."""
    what = Case(
        workers=1,
        stages=[[1, 1, 3]],
        wave=4,
        batch_size=4,
        epochs=3,
        weights="stash",
        optimizer=dict(MOMENTUM),
        freeze=SCHEDULE,
    )
    run(what, tmp_path / "still")
    first = min(clock for clock, layers in frozen_clocks(what, tmp_path / "still").items() if layers)
    moved = replace(what, moves=((first, 0, (3, 1, 1)), (first + 2, 0, (2, 2, 1))))
    assert_frozen(moved, tmp_path / "moved")


def test_a_virtual_worker_that_comes_back_has_the_layers_frozen_that_the_others_have(tmp_path: Path) -> None:
    what = Case(
        stages=[[2, 2], [2, 2]],
        staleness=0,
        epochs=5,
        optimizer=dict(ADAMW),
        freeze={"schedule": [{"epoch": 1, "layers": 1}]},
        **BATCH_NORM,
    )
    result = run(what, tmp_path, deaths=(drain(number=7),))
    assert result.num_lives == 3
    reference = what.reference(
        membership=membership(tmp_path, 2),
        extra_barriers=barriers(tmp_path),
        frozen=frozen_clocks(what, tmp_path),
    )
    assert_same_bits(trained(tmp_path), run_reference(reference))


def test_a_parameter_server_with_slices_of_frozen_layers_alone(tmp_path: Path) -> None:
    """A weight that is cut into slices on three servers."""
    what = Case(
        model="wide32",
        stages=[[2, 3], [1, 4]],
        wave=2,
        batch_size=6,
        epochs=2,
        combine="mean",
        servers=3,
        freeze=SCHEDULE,
    )
    what = replace(what, freeze={"layers": 1, "schedule": [{"epoch": 1, "layers": 2}]})
    assert_frozen(what, tmp_path)
