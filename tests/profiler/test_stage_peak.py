"""Predicted memory of a stage against what the runtime's own loop really keeps."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.planner.costs import Costs, MemoryModel
from hetpipe.profiler.assembly import profile_of
from hetpipe.profiler.chain_measurement import measure_chain
from hetpipe.profiler.sampling import Sampling
from hetpipe.profiler.stage_peak import StagePeak, measure_stage_peak
from hetpipe.spec.cluster import Cluster, DeviceType, Links, LinkSpec, Node
from hetpipe.spec.ids import StageIndex
from tests.profiler import models

LINK = LinkSpec(bandwidth_bytes_per_second=1e9)
CLUSTER = Cluster(
    device_types={"cpu": DeviceType(memory_bytes=1 << 30)},
    nodes=(Node(name="n0", devices=("cpu", "cpu")),),
    links=Links(intra_node=LINK, inter_node=LINK),
)

CUTS = {"digits": (2, 2), "text": (3, 3)}
#: SGD's momentum; AdamW's two moments.
SLOTS = {"digits": 1, "text": 2}

#: Weight buffers of the runtime that the planner's model leaves out, at D ≤ 1: the own ũ of the last wave, which the
#: design keeps in host memory, and the published weights that are fetched ahead. Each D beyond keeps one more ũ.
BEYOND_THE_MODEL = 2


@cache
def costs_of(name: str) -> Costs:
    subject = models.example(name)
    measured = measure_chain(
        subject,
        torch.device("cpu"),
        "cpu",
        sampling=Sampling.fixed(1),
        clock=SYSTEM_CLOCK,
        on_layer=lambda _: None,
    )
    return Costs(profile_of(name, subject.job.batch_size, measured=[measured]), CLUSTER)


@cache
def peak(name: str, stage: int, n: int, staleness: int = 0) -> StagePeak:
    return measure_stage_peak(
        models.example(name), CUTS[name], StageIndex(stage), minibatches_per_wave=n, staleness=staleness
    )


def predicted(name: str, stage: int, n: int) -> int:
    first = sum(CUTS[name][:stage])
    memory = MemoryModel(minibatches_per_wave=n, optimizer_slots=SLOTS[name])
    return costs_of(name).stage_bytes(
        first, first + CUTS[name][stage], stage=stage, num_stages=len(CUTS[name]), memory=memory
    )


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("digits", 2),
        ("digits", 3),
        ("digits", 4),
        ("text", 2),
        pytest.param("text", 3, marks=pytest.mark.matrix),
        pytest.param("text", 4, marks=pytest.mark.matrix),
    ],
)
def test_the_planners_model_predicts_the_peak(name: str, stage: int, n: int) -> None:
    measured = peak(name, stage, n)
    beyond = measured.num_buffers - (n + 2)
    assert 0 <= beyond <= BEYOND_THE_MODEL
    assert predicted(name, stage, n) + beyond * measured.buffer_bytes == pytest.approx(measured.peak_bytes, rel=0.15)


@pytest.mark.parametrize(("staleness", "more"), [(1, 0), (2, 1), (4, 3)])
def test_staleness_keeps_own_updates(staleness: int, more: int) -> None:
    strict, loose = peak("digits", 1, 2), peak("digits", 1, 2, staleness)
    assert loose.num_buffers - strict.num_buffers == more
    assert loose.peak_bytes - strict.peak_bytes == more * strict.buffer_bytes


def test_a_minibatch_in_flight_costs_what_the_profile_says() -> None:
    """The first stage keeps N minibatches here."""
    two, three = peak("digits", 0, 2), peak("digits", 0, 3)
    costs = costs_of("digits")
    # The result of the stage's last ReLU is among its activations, and no other layer's.
    activations = costs.activation_bytes[2]
    assert three.peak_bytes - two.peak_bytes == activations + two.buffer_bytes


@pytest.mark.matrix
def test_outputs_that_only_the_next_layer_saves_stay_as_well() -> None:
    two, three = peak("text", 0, 2), peak("text", 0, 3)
    activations, output = costs_of("text").activation_bytes[3], costs_of("text").cut_bytes[3]
    assert three.peak_bytes - two.peak_bytes == activations + output + two.buffer_bytes


def test_the_parts_are_what_the_model_has() -> None:
    found = peak("digits", 0, 2)
    parameters = costs_of("digits").parameter_bytes[2]
    assert found.buffer_bytes == found.optimizer_bytes == found.module_bytes == parameters


def test_runs_a_worker_of_one_stage_and_one_of_three() -> None:
    subject = models.subject("tuples")
    alone = measure_stage_peak(subject, (5,), StageIndex(0), minibatches_per_wave=1)
    middle = measure_stage_peak(subject, (2, 1, 2), StageIndex(1), minibatches_per_wave=3)
    assert alone.peak_bytes > alone.num_buffers * alone.buffer_bytes > 0
    assert (middle.buffer_bytes, middle.optimizer_bytes) == (0, 0)
    assert middle.peak_bytes > 0
