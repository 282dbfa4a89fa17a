"""`precision`: distributed = reference executor, bit for bit, under every policy."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.checker import check_run
from hetpipe.checker.events import Skip
from hetpipe.checker.reading import read_history
from hetpipe.checkpoint.manifest import checkpoint_dir, read_manifest
from hetpipe.errors import NonFiniteUpdate
from hetpipe.pipeline import updates
from hetpipe.pipeline.clipping import squared_norms
from hetpipe.values.ids import Clock
from hetpipe.values.policies import POLICIES, policies_where
from hetpipe.values.precision import Precision
from tests import models
from tests.numerics.compare import ADAMW, MOMENTUM, Case, assert_same_bits, run, trained
from tests.pairwise import all_pairs
from tests.reference.executor import run_reference
from tests.reference.worker import read_block

KINDS = ("wsp", "none", "allreduce")
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16")


def case_of(weights: Any, stages: int, kind: str, precision: Precision, **values: Any) -> Case:
    wave = max(2, stages)
    defaults: dict[str, Any] = {
        "workers": 1 if kind == "none" else 2,
        "minibatches": (8 if precision == "fp16" else 3) * wave + 1,
        "model": "amplified32" if precision == "fp16" else "mlp32",
        "optimizer": ADAMW if stages == 2 else MOMENTUM,
        "max_norm": 0.5 if POLICIES[weights].clips_globally and kind == "wsp" else None,
    }
    return Case(weights=weights, stages=stages, kind=kind, wave=wave, precision=precision, **(defaults | values))


def _can(weights: str, _stages: int, kind: str, precision: Precision) -> bool:
    policy = POLICIES[weights]
    if precision == "fp16" and not policy.clips_globally:
        return False
    return kind != "allreduce" or policy.one_update_per_wave


POINTS = [
    point
    for point in itertools.product(policies_where(lambda row: row.predicts is None), (1, 2, 4), KINDS, PRECISIONS)
    if _can(*point)
]


@pytest.mark.parametrize(("weights", "stages", "kind", "precision"), all_pairs(POINTS, step=2))
def test_every_policy_equals_the_reference(
    weights: Any, stages: int, kind: str, precision: Precision, tmp_path: Path
) -> None:
    case = case_of(weights, stages, kind, precision)
    run(case, tmp_path)
    assert_same_bits(trained(tmp_path), run_reference(case.reference()))


#: One stage per layer but the last; only the first has gradients that overflow.
ALONE = Case(workers=1, kind="none", wave=1, stages=[[1, 1, 3]], model="amplified32", precision="fp16", minibatches=20)


def plain_loop(case: Case) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights after torch's own loop with autocast and a GradScaler, on the samples of the run; and the scales."""
    reference = case.reference()
    expected = run_reference(reference)
    model = reference.model()
    model.load_state_dict(dict(expected.barriers[Clock(0)].weights))
    optimizer = torch.optim.SGD(model.parameters(), **reference.arguments)  # type: ignore[arg-type]  # a mapping of any
    scaler = torch.amp.GradScaler("cpu")
    scales = []
    for record in expected.minibatches.values():
        inputs, target = read_block(reference.train, record.samples)
        scales.append(scaler.get_scale())
        with torch.autocast("cpu", torch.float16):
            loss = models.loss(model(*inputs), target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch ships it untyped
        scaler.step(optimizer)
        scaler.update()
    return dict(model.state_dict()), scales


def test_an_overflow_on_one_stage_skips_the_update_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own: dict[int, set[bool]] = {0: set(), 1: set(), 2: set()}

    def noted(gradients: Any, names: Any) -> list[float]:
        found = squared_norms(gradients, names)
        own[{"0": 0, "2": 2, "4": 2}[names[0][0]] if names else 1].add(all(map(math.isfinite, found)))
        return found

    monkeypatch.setattr(updates, "squared_norms", noted)
    run(ALONE, tmp_path)
    assert own == {0: {True, False}, 1: {True}, 2: {True}}, "the first stage alone has gradients that overflow"

    wanted, scales = plain_loop(ALONE)
    found = trained(tmp_path)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    skips = [event for event in read_history(tmp_path).events if isinstance(event, Skip)]
    at = [p for p, scale in enumerate(scales, start=1) if p < len(scales) and scales[p] < scale]
    assert 2 <= len(at) < len(scales) / 2
    assert sorted((skip.stage, skip.p, skip.scale) for skip in skips) == [
        (stage, p, int(scales[p - 1])) for stage in range(3) for p in at
    ]
    report = check_run(tmp_path)
    assert report.counts.skipped_updates == report.to_json()["skipped_updates"] == len(at)
    assert f"{len(at)} updates skipped" in report.lines()[0]
    assert report.counts.samples == 20 * ALONE.batch_size, "the samples of skipped updates count"


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_goes_on_with_its_scale(kind: str, tmp_path: Path) -> None:
    """With other stages than before. It is lower than at the start, where the updates would be skipped again."""
    weights = "flush" if kind == "allreduce" else "wave"
    case = case_of(weights, 2, kind, "fp16", every_waves=2)
    before = run_reference(case.reference())
    run(case, tmp_path / "whole")
    first = read_manifest(min((tmp_path / "whole" / "checkpoints").iterdir())).progress.clock
    assert 0 < first < before.final.clock
    assert all(0 < scale.exponent < 16 for scale in before.barriers[first].scales)
    after = replace(case, stages=1)
    run(after, tmp_path / "resumed", restore=checkpoint_dir(tmp_path / "whole", first))
    assert_same_bits(trained(tmp_path / "resumed"), before)


def test_an_overflow_at_scale_1_ends_the_run(tmp_path: Path) -> None:
    case = replace(ALONE, model="infinite_gradient", stages=1, minibatches=30)
    with pytest.raises(NonFiniteUpdate, match="minibatch 17 is not finite in parameter"):
        run(case, tmp_path)


def test_a_loss_that_is_not_finite_skips_its_update_and_is_no_part_of_the_mean(tmp_path: Path) -> None:
    case = replace(ALONE, model="mlp32", data="poisoned32", minibatches=None, epochs=1, batch_size=4)
    run(case, tmp_path, writes_metrics=True)
    assert_same_bits(trained(tmp_path), run_reference(case.reference()))
    lines = [json.loads(line) for line in (tmp_path / "metrics" / "vw-0.jsonl").read_text().splitlines()]
    poisoned = [line for line in lines if line["loss"] is None]
    assert len(poisoned) == 1
    assert all(line["loss"] < 100 for line in lines if line["loss"] is not None)
