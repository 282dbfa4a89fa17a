"""Which layers freeze with which F, and what a job cannot freeze."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetpipe.decide.elastic.freezing import (
    freeze_levels,
    freezing_of,
    kept_statistics,
    lowered,
    with_freeze_levels,
)
from hetpipe.decide.lifecycle.configs import fresh_progress
from hetpipe.decide.planner.partition import plan_job
from hetpipe.decide.sync.segment import first_progress, planned_lengths
from hetpipe.errors import JobError, PlanError
from hetpipe.job.file import Job
from hetpipe.values.freezing import FreezeChange, Freezing
from hetpipe.values.ids import Clock, Term
from hetpipe.values.plan import Plan, TensorSpec
from hetpipe.values.sync import DataSpec
from tests.server.coordinator.builders import JOB_ID, job, model
from tests.server.coordinator.machine_driver import AGENTS

#: Five layers, of which the second and the fourth have no parameters.
LAYERS = tuple(
    replace(layer, parameters=() if layer.index in (1, 3) else layer.parameters) for layer in model(5).layers
)


def freezing(**section: Any) -> Job:
    return Job(**{**job().model_dump(mode="json"), "freeze": section})


def planned(of: Job, *, frozen: int = 0, epoch: int = 0) -> Plan:
    plan = plan_job(job(), replace(model(5), layers=LAYERS), AGENTS, Term(1), JOB_ID)
    start = replace(fresh_progress(40), frozen=frozen, epoch=epoch)
    return with_freeze_levels(plan, of, LAYERS, start)


def test_all_layers_before_the_next_one_with_parameters() -> None:
    assert freeze_levels(LAYERS, ignores_ties=False) == (0, 2, 4)


def test_ties_lower_it() -> None:
    """The last layer uses a parameter of the first: with the last one trained, nothing can be frozen."""
    tied = tuple(replace(layer, is_tied=layer.index > 0) for layer in LAYERS)
    assert freeze_levels(tied, ignores_ties=False) == (0, 0, 0)
    assert freeze_levels(tied, ignores_ties=True) == (0, 2, 4)
    early = tuple(replace(layer, is_tied=layer.index in (1, 2)) for layer in LAYERS)
    assert freeze_levels(early, ignores_ties=False) == (0, 0, 4)
    assert Freezing((0, 0, 4)).allowed(1) == 0


def test_a_job_that_freezes_nothing() -> None:
    plan = planned(job())
    assert plan.freeze_levels == ()
    assert freezing_of(job(), plan) is None


def test_the_changes_of_a_job() -> None:
    of = freezing(layers=1, schedule=[{"epoch": 2, "layers": 2}])
    assert freezing_of(of, planned(of)) == Freezing((0, 2, 4), (FreezeChange(1, epoch=0), FreezeChange(2, epoch=2)))


def test_fewer_layers_are_told() -> None:
    (sentence,) = lowered(Freezing((0, 0, 4), (FreezeChange(1, epoch=0), FreezeChange(2, epoch=1))))
    assert sentence.startswith("0 layers are frozen instead of 1: trained layers use a parameter of those left out")


def test_a_script_freezes_at_clocks() -> None:
    script = [{"at": {"clock": 2}, "do": "freeze", "layers": 2}]
    of = Job(**{**job().model_dump(mode="json"), "elastic": {"script": script}})
    assert freezing_of(of, planned(of)) == Freezing((0, 2, 4), (FreezeChange(2, clock=Clock(2)),))
    thawed = Job(**{**of.model_dump(mode="json"), "elastic": {"script": [{**script[0], "layers": 1}]}})
    message = r"elastic\.script\[0\]: freezes 1 layers, but 2 are frozen in the checkpoint already"
    with pytest.raises(PlanError, match=message):
        planned(thawed, frozen=2)


def test_what_a_script_and_a_schedule_say_together() -> None:
    script = [{"at": {"clock": 2}, "do": "freeze", "layers": 2}]
    both = {"freeze": {"schedule": [{"epoch": 1, "layers": 1}]}, "elastic": {"script": script}}
    with pytest.raises(JobError, match=r"freeze\.schedule: cannot be combined with `elastic\.script`"):
        Job(**{**job().model_dump(mode="json"), **both})
    fewer = {"freeze": {"layers": 2}, "elastic": {"script": script}}
    with pytest.raises(JobError, match=r"elastic\.script\[0\]\.layers: is 2, but `freeze\.layers` freezes 2 from the"):
        Job(**{**job().model_dump(mode="json"), **fewer})
    falling = {"elastic": {"script": [*script, {"at": {"clock": 3}, "do": "freeze", "layers": 2}]}}
    with pytest.raises(JobError, match="line 2 freezes 2 layers, after one that freezes 2: frozen layers stay frozen"):
        Job(**{**job().model_dump(mode="json"), **falling})


def test_a_checkpoint_with_frozen_layers_is_enough() -> None:
    assert freezing_of(job(), planned(job(), frozen=2)) == Freezing((0, 2, 4))


@pytest.mark.parametrize(
    ("section", "frozen", "wrong"),
    [
        (
            {"layers": 3},
            0,
            r"freeze\.layers: freezes 3 layers, but the model has 3 with trainable parameters, of which one",
        ),
        (
            {"schedule": [{"epoch": 1, "layers": 7}]},
            0,
            r"freeze\.schedule\[0\]: freezes 7 layers, .*; freeze at most 2",
        ),
        (
            {"schedule": [{"epoch": 1, "layers": 1}]},
            2,
            r"freeze\.schedule\[0\]: freezes 1 layers, but 2 are frozen in the ",
        ),
        ({}, 3, "the checkpoint has 3 frozen layers, but the model has 3 with trainable parameters; it is of another"),
    ],
)
def test_what_cannot_be_frozen(section: dict[str, Any], frozen: int, wrong: str) -> None:
    with pytest.raises(PlanError, match=wrong):
        planned(freezing(**section), frozen=frozen)


@pytest.mark.parametrize(
    ("section", "wrong"),
    [
        (
            {"schedule": [{"epoch": 1, "layers": 2}, {"epoch": 1, "layers": 3}]},
            "entry 2 is at epoch 1, after one at epoch 1; give them in order",
        ),
        (
            {"schedule": [{"epoch": 1, "layers": 2}, {"epoch": 2, "layers": 2}]},
            "entry 2 freezes 2 layers, after one that freezes 2: frozen layers stay frozen",
        ),
        (
            {"layers": 2, "schedule": [{"epoch": 1, "layers": 2}]},
            "entry 1 freezes 2 layers, but `layers` freezes 2 from the start",
        ),
    ],
)
def test_mistakes_of_a_job(section: dict[str, Any], wrong: str) -> None:
    with pytest.raises(JobError, match=f"freeze.schedule: {wrong}"):
        freezing(**section)


def test_the_segments_of_a_run_are_foretold_with_their_frozen_layers() -> None:
    """20 samples, 2 in a minibatch, 4 in a wave: each pass takes 3 waves. By norms as many freeze as can be."""
    data = DataSpec(num_samples=20, batch_size=2, seed=0, epochs=4, total_minibatches=None)

    def foretold(how: Freezing, frozen: int = 0) -> list[tuple[int, int]]:
        lengths = planned_lengths(
            replace(first_progress(data), frozen=frozen),
            data,
            per_wave=[2, 2],
            checkpoint_every_waves=2,
            plan_clocks=how.clocks,
            freezing=how,
        )
        return [(length.end, length.frozen_layers) for length in lengths]

    scheduled = Freezing((0, 2, 4), (FreezeChange(1, epoch=1), FreezeChange(2, clock=Clock(5))))
    assert foretold(scheduled) == [(2, 0), (3, 0), (4, 2), (5, 2), (6, 4), (8, 4), (9, 4), (10, 4), (12, 4)]
    decided = Freezing(tuple(range(8)), alpha="1/2")
    assert [layers for _, layers in foretold(decided, frozen=1)] == [1, 1, 4, 4, 6, 6, 7, 7]
    assert [layers for _, layers in foretold(replace(decided, every_waves=5))] == [0] * 4 + [4] * 4 + [6]


def test_batch_norm_in_layers_that_freeze_is_remarked_on() -> None:
    """Where it freezes in evaluation mode: its statistics stay as they are."""

    def normed(index: int) -> tuple[TensorSpec, ...]:
        names = ("running_mean", "running_var", "num_batches_tracked")
        return tuple(TensorSpec(f"{index}.bn.{name}", (4,), "float32") for name in names)

    layers = tuple(replace(layer, buffers=normed(layer.index) if layer.index in (1, 2) else ()) for layer in LAYERS)
    levels = freeze_levels(layers, ignores_ties=False)
    assert levels == (0, 2, 4)
    of = freezing(layers=1)
    sentence = kept_statistics(Freezing(levels, (FreezeChange(1, epoch=0),)), of, layers)
    assert sentence.startswith("BatchNorm in layers that freeze (1.bn) uses its running statistics")
    assert "(1.bn, 2.bn)" in kept_statistics(Freezing(levels, alpha="1/2"), of, layers)
    assert kept_statistics(Freezing(levels, alpha="1/2"), freezing(layers=1, mode="train"), layers) == ""
    assert kept_statistics(Freezing(levels, (FreezeChange(1, epoch=0),)), of, LAYERS) == ""
