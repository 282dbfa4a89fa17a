"""Evaluations within epochs: training does not feel them, and their values are the reference's of the same weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetpipe.checkpoint.manifest import checkpoint_dir
from hetpipe.pipeline.evaluation import EvaluationPass
from hetpipe.pipeline.seeds import generator_states
from hetpipe.values.ids import Clock
from hetpipe.values.run import StageEvaluation
from hetpipe.weights.flat import FlatBuffer
from tests.numerics.compare import MOMENTUM, Case, assert_same_bits, run, trained
from tests.numerics.evaluations import reference_of, value_of
from tests.pairwise import every_nth
from tests.reference.executor import run_reference
from tests.support.in_process import InProcessResult
from tests.support.lives import Death

EVERY, MAX = 2, 3


def case_of(**changes: Any) -> Case:
    """46 samples in minibatches of 2, evaluated in blocks of 2: the first 6 of them."""
    evaluated = {"every_waves": EVERY, "max_batches": MAX}
    values = {"data": "data32", "batch_size": 2, "epochs": 2, "optimizer": MOMENTUM, "evaluate": evaluated, **changes}
    return Case(**{"model": "dropout_batch_norm", **values})


def heard(result: InProcessResult) -> list[StageEvaluation]:
    """The evaluations within epochs, by clock."""
    told = [report for _, _, report in result.reports if isinstance(report, StageEvaluation) and report.within_epoch]
    return sorted(told, key=lambda report: report.clock)


#: Two policies in three with shards or without, and all else in `make exhaustive`.
CASES: list[Any] = [
    *every_nth(3, (("wsp", weights, 2) for weights in ("wave", "stash", "double_buffer"))),
    *every_nth(3, (("none", weights, 2) for weights in ("vertical", "flush", "predict"))),
    *(pytest.param("none", weights, 2, marks=pytest.mark.exhaustive) for weights in ("wave", "stash", "double_buffer")),
    *(pytest.param("wsp", weights, 2, marks=pytest.mark.exhaustive) for weights in ("vertical", "flush", "predict")),
    pytest.param("wsp", "wave", 1, marks=pytest.mark.exhaustive),
    ("wsp", "wave", 3),
    ("none", "spectrain", 3),
    ("allreduce", "flush", 2),
    pytest.param("allreduce", "double_buffer", 2, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("kind", "weights", "stages"), CASES)
def test_training_keeps_its_bits_and_the_values_are_the_references(
    kind: str, weights: Any, stages: int, tmp_path: Path
) -> None:
    """With dropout and BatchNorm, at checkpoints' barriers and between them."""
    workers = 1 if kind == "none" else 2
    case = case_of(kind=kind, weights=weights, stages=stages, wave=max(2, stages), workers=workers, every_waves=3)
    result = run(case, tmp_path)
    reference, final, expected = reference_of(case)
    assert_same_bits(trained(tmp_path), final)
    told = heard(result)
    assert [report.clock for report in told] == sorted(expected)
    assert len(told) >= 2
    for report in told:
        wanted = expected[report.clock]
        assert (report.samples, report.whole) == (MAX * 2, False)
        assert report.sums["loss"] / report.samples == value_of(reference, wanted, MAX * 2)
        assert (report.minibatches, report.epoch) == (wanted.minibatches, wanted.epoch)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_buffer_that_changes_in_evaluation_mode_is_put_back(stages: int, tmp_path: Path) -> None:
    case = case_of(model="counts", stages=stages, workers=1)
    assert heard(run(case, tmp_path))
    assert_same_bits(trained(tmp_path), run_reference(case.reference()))


def test_random_generators_go_on_as_if_nothing_was_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers and data draw from all of them; one stage alone, so nobody else does meanwhile."""
    run_pass, passes = EvaluationPass.run, []

    def compared(evaluation: EvaluationPass, weights: FlatBuffer) -> None:
        before = generator_states()
        run_pass(evaluation, weights)
        passes.append(before == generator_states())

    monkeypatch.setattr(EvaluationPass, "run", compared)
    case = case_of(model="noisy", data="flipped32", loss="distance", optimizer={"name": "SGD", "lr": 0.001})
    case = replace(case, kind="none", workers=1, stages=1)
    assert heard(run(case, tmp_path))
    assert passes and all(passes)


def test_without_a_bound_all_data_are_evaluated(tmp_path: Path) -> None:
    case = case_of(evaluate={"every_waves": EVERY}, epochs=1)
    told = heard(run(case, tmp_path))
    assert told and all((report.samples, report.whole) == (46, True) for report in told)


def test_clipping_by_the_norm_over_all_stages_goes_on_around_evaluations(tmp_path: Path) -> None:
    """Norms and evaluations travel over the same links, which hold fewer frames than an evaluation has."""
    case = case_of(stages=3, wave=3, max_norm=0.05, evaluate={"every_waves": EVERY})
    assert heard(run(case, tmp_path))
    assert_same_bits(trained(tmp_path), run_reference(case.reference()))


def test_a_resumed_run_evaluates_what_an_undisturbed_one_does_and_nothing_twice(tmp_path: Path) -> None:
    case = case_of(every_waves=4)
    whole = heard(run(case, tmp_path / "whole"))
    stopped = run(case, tmp_path / "stopped", stop_when=lambda clocks: clocks.published >= 3)
    resumed = run(case, tmp_path / "resumed", restore=checkpoint_dir(tmp_path / "stopped", Clock(4)))
    assert [*heard(stopped), *heard(resumed)] == whole


def test_when_the_first_virtual_worker_is_gone_the_next_one_evaluates(tmp_path: Path) -> None:
    """A clock that the first one has evaluated just before, too, where the next one is behind."""
    case = case_of(epochs=3, deterministic=False)
    death = Death(vw=0, at="before staged", number=2, comes_back=False)
    result = run(case, tmp_path, deaths=(death,), delay_seconds=0.0)
    told = [(vw, report.clock) for vw, _, report in result.reports if report in heard(result)]
    assert told and {vw for vw, clock in told if clock > 3} == {1}
    assert len(told) == len(set(told))
