"""Recomputed and swapped layers train to the bits of kept ones.

Under policies that predict weights, those of a recomputation are the backward's (`memory-policy.md` §4); there the
reference recomputes, too.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hetpipe.decide.planner.partition import plan_job
from hetpipe.errors import PlanError
from hetpipe.pipeline.layer_memory import LayerMemory
from hetpipe.server.agent import stage_assembly
from hetpipe.values.memory import LayerPolicy, policies_of, runs_of
from hetpipe.values.plan import Plan
from hetpipe.values.policies import POLICIES, WEIGHT_POLICIES
from tests.numerics.compare import Case, assert_same_bits, run, trained
from tests.pairwise import all_pairs, every_nth
from tests.reference.executor import run_reference
from tests.support import in_process

#: By number of layers of the model, all names being positions.
MIXES: dict[str, Any] = {
    "all": "recompute",
    "first": {"0": "recompute"},
    "last two": {"0": "keep", "1": "keep", "2": "keep", "*": "recompute"},
    "swapped": "swap",
    "mixed": {"0": "swap", "1": "keep", "2": "recompute", "*": "swap"},
    "two runs": {"1": "recompute-new-run", "3": "recompute-new-run", "*": "recompute"},
}

#: Those of the mixes in which every policy of a layer meets every weight policy; of the others `make test` takes some.
DENSE = ("mixed", "two runs")

MODELS = ("dropout_batch_norm", "noisy", "normed")


def runs_of_case(case: Case) -> tuple[tuple[int, int], ...]:
    """Runs of the whole chain: a run ends where a stage does."""
    assert case.depths is not None
    found: list[tuple[int, int]] = []
    counts = case.depths[0]
    assert all(each == counts for each in case.depths)
    first = 0
    for count in counts:
        names = [str(index) for index in range(first, first + count)]
        found += [(first + a, first + b) for a, b in runs_of(policies_of(case.memory, names))]
        first += count
    return tuple(found)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("weights", "mix", "model", "stages"),
    [
        *all_pairs(itertools.product(WEIGHT_POLICIES, DENSE, ("dropout_batch_norm", "normed"), (1, 3)), step=2),
        *all_pairs(
            itertools.chain(
                itertools.product(WEIGHT_POLICIES, [mix for mix in MIXES if mix not in DENSE], MODELS, (3, 1)),
                itertools.product(WEIGHT_POLICIES, DENSE, ("noisy",), (3, 1)),
            ),
            by=lambda _weights, mix, *_: (mix,),
        ),
    ],
)
def test_every_policy_equals_the_reference(weights: Any, mix: str, model: str, stages: int, tmp_path: Path) -> None:
    wave = max(stages, 2)
    case = Case(
        weights=weights,
        stages=stages,
        wave=wave,
        model=model,
        minibatches=4 * wave + 1,
        memory=MIXES[mix],
        every_waves=3,
    )
    run(case, tmp_path)
    predicts = POLICIES[case.weights].predicts is not None
    reference = case.reference(recompute=runs_of_case(case) if predicts else ())
    assert_same_bits(trained(tmp_path), run_reference(reference))


@pytest.mark.parametrize("weights", WEIGHT_POLICIES)
def test_recomputation_changes_what_is_predicted_and_nothing_else(weights: Any) -> None:
    case = Case(weights=weights, minibatches=9, memory="recompute", workers=1, kind="none")
    kept = run_reference(case.reference())
    again = run_reference(case.reference(recompute=runs_of_case(case)))
    differ = [name for name, weight in kept.weights.items() if not torch.equal(weight, again.weights[name])]
    assert bool(differ) == (POLICIES[case.weights].predicts is not None)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_under_autocast(precision: Any, tmp_path: Path) -> None:
    case = Case(model="dropout_batch_norm", minibatches=9, memory="recompute", precision=precision)
    run(case, tmp_path)
    assert_same_bits(trained(tmp_path), run_reference(case.reference()))


def test_a_parametrized_layer_is_recomputed(tmp_path: Path) -> None:
    case = Case(model="spectral", minibatches=5, memory="recompute", workers=1, kind="none")
    run(case, tmp_path)
    assert_same_bits(trained(tmp_path), run_reference(case.reference()))


def test_moved_layers_take_their_policy_along(tmp_path: Path) -> None:
    case = Case(
        stages=[[3, 2], [3, 2]], model="noisy", minibatches=12, memory={"2": "recompute"}, moves=((2, 0, (2, 3)),)
    )
    run(case, tmp_path)
    assert_same_bits(trained(tmp_path), run_reference(case.reference()))


def memory_lines(folder: Path, vw: int, stage: int) -> list[tuple[int, list[str]]]:
    """Minibatch and policies of every `memory` line of a stage."""
    lines = map(json.loads, (folder / "history" / f"vw-{vw}-stage-{stage}.jsonl").read_text().splitlines())
    return [(line["p"], line["policies"]) for line in lines if line["event"] == "memory"]


#: (moment, layers, policy) for five layers in stages of three and two, and waves of four.
CHANGES: tuple[tuple[dict[str, int], tuple[int | str, ...], str], ...] = (
    ({"clock": 1}, (0, 1), "recompute"),
    ({"p": 9}, (1, "3"), "swap"),
    ({"p": 13}, ("[0-2]",), "recompute-new-run"),
    ({"clock": 4}, (0, 4), "keep"),
)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("weights", "model"),
    [
        *every_nth(4, ((weights, "noisy") for weights in WEIGHT_POLICIES)),
        *every_nth(4, ((weights, "spectral") for weights in WEIGHT_POLICIES)),
    ],
)
def test_policies_change_while_a_run_trains(weights: Any, model: str, tmp_path: Path) -> None:
    """At barriers and between them; under prediction at barriers, where a recomputation is another computation."""
    predicts = POLICIES[weights].predicts is not None
    changes = [change for change in CHANGES if not (predicts and "p" in change[0])]
    case = Case(
        weights=weights,
        stages=[[3, 2], [3, 2]],
        model=model,
        wave=4,
        minibatches=22,
        policies=tuple((at, vw, layers, policy) for at, layers, policy in changes for vw in (0, 1)),
    )
    run(case, tmp_path)
    runs = {1: ((0, 2),), 4: ((1, 2),)} if predicts else {}
    assert_same_bits(trained(tmp_path), run_reference(case.reference(recompute_from=runs)))
    first, last = memory_lines(tmp_path, 1, 0), memory_lines(tmp_path, 1, 1)
    new = "recompute-new-run"
    recomputed, swapped = (5, ["recompute", "recompute", "keep"]), (9, ["recompute", "swap", "keep"])
    if predicts:
        assert (first, last) == (
            [(1, ["keep"] * 3), recomputed, (17, ["keep", "recompute", "keep"])],
            [(1, ["keep"] * 2)],
        )
    else:
        assert first == [(1, ["keep"] * 3), recomputed, swapped, (13, [new] * 3), (17, ["keep", new, new])]
        assert last == [(1, ["keep"] * 2), (9, ["swap", "keep"])]


def test_a_layer_that_moves_takes_its_changed_policy_along(tmp_path: Path) -> None:
    case = Case(
        stages=[[3, 2]],
        workers=1,
        model="noisy",
        minibatches=14,
        memory={"2": "recompute"},
        policies=(({"p": 3}, 0, (1,), "swap"), ({"clock": 4}, 0, (2,), "keep")),
        moves=((2, 0, (1, 4)),),
    )
    run(case, tmp_path)
    assert_same_bits(trained(tmp_path), run_reference(case.reference()))
    assert memory_lines(tmp_path, 0, 0) == [
        (1, ["keep", "keep", "recompute"]),
        (3, ["keep", "swap", "recompute"]),
        (5, ["keep"]),
    ]
    assert memory_lines(tmp_path, 0, 1) == [
        (1, ["keep", "keep"]),
        (5, ["swap", "recompute", "keep", "keep"]),
        (9, ["swap", "keep", "keep", "keep"]),
    ]


def test_a_pattern_that_matches_no_layer_is_refused_with_the_names(tmp_path: Path) -> None:
    case = Case(minibatches=4, memory={"5*": "recompute"})
    with pytest.raises(PlanError, match=r"^memory: `5\*` matches no layer; those without a policy are 0, 1, 2"):
        run(case, tmp_path)


def test_a_pattern_behind_another_one_that_takes_all_its_layers_is_refused(tmp_path: Path) -> None:
    case = Case(minibatches=4, memory={"*": "keep", "1": "recompute"})
    with pytest.raises(PlanError, match=r"`1` only matches layers that patterns before it match \(1\)"):
        run(case, tmp_path)


def test_a_plan_with_policies_is_what_runs(tmp_path: Path) -> None:
    """Under `memory: auto`; a script moves a layer to the other stage, which recomputes it from there on."""
    planned: dict[int, tuple[LayerPolicy, ...]] = {0: ("keep", "swap", "recompute"), 3: ("keep", "keep")}
    seen: list[list[LayerPolicy]] = []

    def with_policies(*arguments: Any) -> Plan:
        plan = plan_job(*arguments)
        workers = [
            replace(worker, stages=tuple(replace(stage, memory=planned[stage.first_layer]) for stage in worker.stages))
            for worker in plan.virtual_workers
        ]
        return replace(plan, virtual_workers=tuple(workers))

    class Seen(LayerMemory):
        def __init__(self, layers: Any, policies: Any = None, link: Any = None, changes: Any = ()) -> None:
            seen.append(list(policies))
            super().__init__(layers, policies, link, changes)

    case = Case(stages=[[3, 2]], workers=1, model="noisy", minibatches=12, memory="auto", moves=((2, 0, (2, 3)),))
    with patch.object(in_process, "plan_job", with_policies), patch.object(stage_assembly, "LayerMemory", Seen):
        run(case, tmp_path)
    assert sorted(seen) == sorted(
        [["keep", "swap", "recompute"], ["keep", "keep"], ["keep", "swap"], ["recompute", "keep", "keep"]]
    )
    assert_same_bits(trained(tmp_path), run_reference(case.reference()))
