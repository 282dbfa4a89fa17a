"""Layers that are frozen at barriers: every bit is that of the reference executor, which freezes them there.

The reference computes their gradients no more (`requires_grad_(False)`) and has their modules in evaluation mode.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hetpipe.checkpoint.manifest import checkpoint_dir, read_manifest
from hetpipe.decide.elastic.script import script_of
from hetpipe.errors import PlanError
from hetpipe.job.elastic import FreezeLine
from hetpipe.pipeline import tally, updates
from hetpipe.pipeline.clipping import layer_squares
from hetpipe.server.decisions_file import read_decisions
from hetpipe.values.decisions import MoveDecision
from hetpipe.values.ids import Clock
from hetpipe.values.policies import POLICIES
from hetpipe.weights.averaging import GradientsByName
from tests import models
from tests.numerics.compare import ADAMW, MOMENTUM, SGD, Case, assert_same_bits, run, trained
from tests.numerics.test_deaths import BATCH_NORM
from tests.numerics.test_leavers import barriers, decisions, drain, membership
from tests.numerics.test_live_moves import Operator
from tests.pairwise import every_nth
from tests.reference.executor import run_reference

pytestmark = pytest.mark.matrix

#: One of three layers with parameters from the end of the first epoch on, two from that of the second on.
SCHEDULE: dict[str, Any] = {"schedule": [{"epoch": 1, "layers": 1}, {"epoch": 2, "layers": 2}]}

OPTIMIZERS = {"sgd": SGD, "momentum": MOMENTUM, "adamw": ADAMW}

#: (weights, kind, optimizer, layers of each stage, whether gradients are clipped) that go together. Frozen are layers
#: within a stage, whole stages, and some of the only one. The 14 of `make test` have every value, and ten of the twelve
#: pairs of a kind and a cut.
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
    schedule = point.get("schedule", ())
    ends = [line["clock"] for line in decisions(folder, "barrier") if "epoch" in line["reason"]] if schedule else []
    at = {ends[entry["epoch"] - 1]: of[entry["layers"]] for entry in schedule}
    return {0: of[point.get("layers", 0)], **at, **{clock: of[layers] for clock, layers in what.freezes}}


def assert_frozen(what: Case, folder: Path, **options: Any) -> dict[int, int]:
    """A run of the case has the bits of the reference executor; returns where how many layers were frozen."""
    run(what, folder, **options)
    frozen = frozen_clocks(what, folder)
    assert_same_bits(trained(folder), run_reference(what.reference(frozen=frozen)))
    return frozen


@pytest.mark.parametrize(("weights", "kind", "optimizer", "cut", "is_clipped"), every_nth(92, POINTS))
def test_every_policy_equals_the_reference(
    weights: Any, kind: str, optimizer: str, cut: tuple[int, ...], *, is_clipped: bool, tmp_path: Path
) -> None:
    policy, workers = POLICIES[weights], 1 if kind == "none" else 2
    what = Case(
        workers=workers,
        stages=[list(cut)] * workers,
        wave=3,
        batch_size=15,
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


@pytest.mark.parametrize("kind", ["wsp", "allreduce"])
def test_a_script_freezes_layers_and_moves_them(kind: str, tmp_path: Path) -> None:
    """At one barrier, and at those of checkpoints; a stage of frozen layers alone gets one that is trained."""
    what = Case(
        stages=[[2, 3]] * 2,
        wave=3,
        minibatches=18,
        kind=kind,
        weights="flush",
        optimizer=dict(ADAMW),
        max_norm=0.5,
        every_waves=2,
        freezes=((1, 1), (3, 2)),
        moves=tuple(
            (clock, vw, counts) for clock, counts in ((3, (1, 4)), (4, (4, 1)), (5, (3, 2))) for vw in range(2)
        ),
    )
    assert_frozen(what, tmp_path / "whole")
    folder = checkpoint_dir(tmp_path / "whole", Clock(2))
    assert read_manifest(folder).progress.frozen == 1
    run(what, tmp_path / "resumed", restore=folder)
    assert_same_bits(trained(tmp_path / "resumed"), run_reference(what.reference(frozen=frozen_clocks(what, tmp_path))))


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
        batch_size=15,
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
    what = Case(workers=1, stages=1, wave=2, batch_size=15, epochs=2, freeze={"schedule": [{"epoch": 1, "layers": 2}]})
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
    first, second = sorted(frozen_clocks(what, tmp_path / "still"))[1:]
    script = replace(what, freeze={}, freezes=((first, 1), (second, 2)))
    moved = replace(script, moves=((first, 0, (3, 1, 1)), (first + 2, 0, (2, 2, 1))))
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
        batch_size=15,
        epochs=2,
        combine="mean",
        servers=3,
        freeze=SCHEDULE,
    )
    what = replace(what, freeze={"layers": 1, "schedule": [{"epoch": 1, "layers": 2}]})
    assert_frozen(what, tmp_path)


@pytest.mark.parametrize("cut", [(5, 6), (7, 4)], ids=["a-frozen-stage", "within-a-stage"])
def test_a_tied_weight_is_frozen_everywhere_if_the_job_says_so(cut: tuple[int, ...], tmp_path: Path) -> None:
    """The head uses the embedding's: without that nothing freezes. The model is cut within its own forward."""
    what = Case(
        model="tied_scores", data="tokens", stages=[list(cut)] * 2, wave=2, minibatches=8, optimizer=dict(ADAMW)
    )
    everywhere = replace(what, freeze={"layers": 2, "tied": "everywhere"})
    run(everywhere, tmp_path / "everywhere")
    frozen, asleep = {0: 5}, {5: ("embedding", "first", "drop")}
    expected = run_reference(everywhere.reference(frozen=frozen, frozen_modules=asleep))
    assert_same_bits(trained(tmp_path / "everywhere"), expected)
    lowered = replace(what, freeze={"layers": 2})
    run(lowered, tmp_path / "lowered")
    assert not [*decisions(tmp_path / "lowered", "freeze")]
    assert_same_bits(trained(tmp_path / "lowered"), run_reference(lowered.reference()))


def decided_by_norms(
    what: Case, folder: Path, alpha: Fraction, others: tuple[int, ...] = ()
) -> tuple[dict[int, int], Any]:
    """Clock → F, and the reference run: decisions from the gradients of the reference alone.

    They are found one after the other: each is made of minibatches that only earlier ones have a part in. The norms in
    the history are those of the reference. `others` are further clocks with a barrier.
    """
    recorded = {
        (line["clock"], line["vw"]): dict(zip(line["layers"], line["squares"], strict=True))
        for line in decisions(folder, "norms")
    }
    of, clocks = levels(what), sorted({line["clock"] for line in decisions(folder, "norms")})
    found: dict[int, int] = {0: what.freeze.get("layers", 0)}
    for clock in clocks:
        chosen = {at: of[frozen] for at, frozen in found.items()}
        extra = (*others, *(other for other in clocks if other not in found))
        result = run_reference(what.reference(frozen=chosen, extra_barriers=extra))
        before, totals = found[max(found)], dict[int, float]()
        for vw in range(what.workers):
            waves = [
                (p - 1) // what.wave
                for owner, p in result.minibatches
                if owner == vw and max(found) * what.wave < p <= clock * what.wave
            ]
            own = dict[int, float]()
            for (owner, p), record in sorted(result.minibatches.items()):
                if owner == vw and (p - 1) // what.wave == max(waves, default=None):
                    own = {layer: own.get(layer, 0.0) + square for layer, square in record.squares.items()}
            assert recorded.get((clock, vw), {}) == own
            totals = {layer: totals.get(layer, 0.0) + square for layer, square in own.items()}
        layers = sorted(totals)
        bound = int(before + alpha * (len(of) - before))
        least = layers.index(min(layers, key=lambda layer: totals[layer]))
        found[clock] = max(before, min(bound, before + least))
    frozen = {at: of[frozen] for at, frozen in found.items()}
    return found, run_reference(what.reference(frozen=frozen, extra_barriers=others))


@pytest.mark.parametrize(
    "what",
    [
        Case(stages=[[2, 3], [1, 4]], wave=2, batch_size=15, epochs=4, freeze={"every": "epoch", "alpha": "1/2"}),
        Case(
            workers=1,
            stages=[[1, 1, 3]],
            wave=3,
            minibatches=24,
            kind="none",
            weights="stash",
            max_norm=0.5,
            clip="stage",
            optimizer=dict(ADAMW),
            freeze={"waves": 2, "alpha": 0.7, "layers": 1},
        ),
        Case(
            stages=[[2, 3]] * 2,
            wave=2,
            minibatches=16,
            kind="allreduce",
            weights="flush",
            freeze={"waves": 3, "alpha": "2/3"},
        ),
    ],
    ids=["epochs", "waves", "replicas"],
)
def test_norms_of_gradients_decide_what_freezes(what: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed for the last wave of each virtual worker before a barrier alone."""
    computed: list[object] = []

    def noted(gradients: GradientsByName, layers: Mapping[int, Sequence[str]]) -> dict[int, float]:
        computed.append(layers)
        return layer_squares(gradients, layers)

    monkeypatch.setattr(updates, "layer_squares", noted)
    run(what, tmp_path)
    planned = {0, *(line["clock"] for line in decisions(tmp_path, "barrier"))}
    assert isinstance(what.stages, list)
    last_waves = sum(len(counts) for counts in what.stages) * (len(planned) - 1)
    assert last_waves <= len(computed) <= last_waves * what.wave, "one wave for each stage and barrier"
    found, expected = decided_by_norms(what, tmp_path, Fraction(str(what.freeze["alpha"])))
    assert_same_bits(trained(tmp_path), expected)
    frozen = {line["clock"]: line["frozen"] for line in decisions(tmp_path, "freeze")}
    assert all(frozen.get(clock, 0) == count for clock, count in found.items())
    script = script_of(read_decisions(tmp_path))
    lines = tuple((line.at.clock, line.layers) for line in script if isinstance(line, FreezeLine))
    assert lines == tuple((b, found[b]) for a, b in itertools.pairwise(found) if found[b] > found[a])


@pytest.mark.parametrize(
    "what",
    [
        Case(
            stages=[[2, 3]] * 2,
            wave=3,
            minibatches=72,
            weights="vertical",
            optimizer=dict(ADAMW),
            freeze={"waves": 6, "alpha": "1/2"},
        ),
        pytest.param(
            Case(
                workers=1,
                stages=[[2, 3]],
                wave=3,
                minibatches=72,
                kind="none",
                weights="vertical",
                optimizer=dict(ADAMW),
                max_norm=0.5,
                freeze={"waves": 6, "alpha": "1/2"},
            ),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["workers", "one"],
)
def test_norms_decide_the_same_while_an_operator_moves_layers(
    what: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each move has a barrier, at which no norms decide unless that was planned; later ones are of the new cut."""
    monkeypatch.setattr(tally, "REPORT_SECONDS", 0.0)
    asked = [(1, 0, (3, 2)), (7, 0, (1, 4))]
    run(what, tmp_path, coordinate=Operator(*asked, live=False).hear)
    plans = cuts_in_force(tmp_path)
    assert [cuts[0] for cuts in plans.values()] == [(3, 2), (1, 4)]
    decided = {line["clock"] for line in decisions(tmp_path, "norms")}
    assert decided == {6, 12, 18}, "nothing is decided where the run ends"
    found, expected = decided_by_norms(what, tmp_path, Fraction(1, 2), tuple(set(plans) - decided))
    frozen = {line["clock"]: line["frozen"] for line in decisions(tmp_path, "freeze")}
    assert all(frozen.get(clock, 0) == count for clock, count in found.items())
    assert_same_bits(trained(tmp_path), expected)


def cuts_in_force(folder: Path) -> dict[int, dict[int, tuple[int, ...]]]:
    """Clock → virtual worker → layers of each stage, of all plan versions but the first ones."""
    found: dict[int, dict[int, tuple[int, ...]]] = {}
    for line in decisions(folder, "plan"):
        if line["version"]:
            counts = tuple(b - a for a, b in itertools.pairwise(line["bounds"]))
            found.setdefault(line["clock"], {})[line["vw"]] = counts
    return found


@pytest.mark.parametrize(
    "what",
    [
        Case(
            stages=[[1, 1, 3], [2, 3]],
            wave=3,
            batch_size=15,
            epochs=4,
            weights="stash",
            optimizer=dict(ADAMW),
            freeze={**SCHEDULE, "recut": True},
        ),
        pytest.param(
            Case(
                workers=1,
                stages=[[1, 1, 3]],
                wave=3,
                batch_size=15,
                epochs=4,
                kind="none",
                max_norm=0.5,
                clip="stage",
                optimizer=dict(MOMENTUM),
                freeze={**SCHEDULE, "recut": True},
            ),
            marks=pytest.mark.exhaustive,
        ),
        Case(
            stages=[[2, 3]] * 2,
            wave=2,
            batch_size=15,
            epochs=4,
            kind="allreduce",
            weights="flush",
            freeze={**SCHEDULE, "recut": True},
        ),
    ],
    ids=["workers", "one", "replicas"],
)
def test_layers_move_where_others_freeze(what: Case, tmp_path: Path) -> None:
    """The cuts are those of the clock shard's history; the reference has them from its barriers on."""
    run(what, tmp_path)
    plans = cuts_in_force(tmp_path)
    assert plans, "a model of which the first layers are frozen is cut in another way"
    lines = list(decisions(tmp_path, "freeze"))
    first = {line["frozen"]: line["clock"] for line in reversed(lines)}
    assert set(plans) <= set(first.values()), "at barriers at which more layers freeze, and at no others"
    if what.kind == "allreduce":
        assert all(len(set(cuts.values())) == 1 for cuts in plans.values())
    frozen = {0: 0, **{line["clock"]: line["layers"] for line in lines}}
    expected = run_reference(what.reference(frozen=frozen, plans=plans))
    assert_same_bits(trained(tmp_path), expected)
    moves = [line for line in read_decisions(tmp_path) if isinstance(line, MoveDecision)]
    assert {(line.at.clock, line.vw, line.stages) for line in moves} == {
        (clock, vw, counts) for clock, cuts in plans.items() for vw, counts in cuts.items()
    }
    assert {line.by for line in moves} == {"freeze"}
    run(what, tmp_path / "resumed", restore=checkpoint_dir(tmp_path, Clock(max(plans))))
    assert_same_bits(trained(tmp_path / "resumed"), expected)
