"""Predicted memory of a stage against what the runtime's own loop really keeps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.decide.planner.assembly import profile_of
from hetpipe.decide.planner.costs import Costs, MemoryModel
from hetpipe.profiler.chain_measurement import measure_chain
from hetpipe.profiler.sampling import Sampling
from hetpipe.values.cluster import Cluster, DeviceType, Links, LinkSpec, Node
from hetpipe.values.ids import StageIndex
from hetpipe.values.memory import LayerPolicy, stage_memory
from tests.pairwise import all_pairs, every_nth
from tests.profiler import models
from tests.profiler.stage_peak import StagePeak, measure_stage_peak

LINK = LinkSpec(bandwidth_bytes_per_second=1e9)
CLUSTER = Cluster(
    device_types={"cpu": DeviceType(memory_bytes=1 << 30)},
    nodes=(Node(name="n0", devices=("cpu", "cpu")),),
    links=Links(intra_node=LINK, inter_node=LINK),
)

#: Cuts into one, two and four stages.
CUTS = {
    "digits": ((4,), (2, 2), (1, 1, 1, 1)),
    "text": ((6,), (3, 3), (2, 1, 1, 2)),
    "narrow_transformer": ((8,), (4, 4), (2, 2, 2, 2)),
    "transformer": ((8,), (4, 4), (2, 2, 2, 2)),
}
#: SGD's momentum; AdamW's two moments.
SLOTS = {"digits": 1, "text": 2, "narrow_transformer": 1, "transformer": 1}

#: A linear layer of 2.6 kB: what crosses the cut before it weighs more than its weights.
SMALLEST = ("digits", (1, 1, 1, 1), 3)


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
def peak(name: str, counts: tuple[int, ...], stage: int, n: int, staleness: int = 0) -> StagePeak:
    return measure_stage_peak(
        models.example(name), counts, StageIndex(stage), minibatches_per_wave=n, staleness=staleness
    )


def predicted(name: str, counts: tuple[int, ...], stage: int, n: int) -> int:
    first = sum(counts[:stage])
    memory = MemoryModel(minibatches_per_wave=n, optimizer_slots=SLOTS[name])
    return costs_of(name).stage_bytes(first, first + counts[stage], stage=stage, num_stages=len(counts), memory=memory)


def cases(*names: str) -> Iterator[tuple[str, tuple[int, ...], int]]:
    for name in names:
        yield from ((name, counts, n) for counts, n in itertools.product(CUTS[name], (1, 4)))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "counts", "n"),
    [
        *all_pairs(
            cases("digits", "text", "narrow_transformer"), by=lambda name, counts, n: (name, len(counts), n), step=4
        ),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in cases("transformer")),
    ],
)
def test_the_planners_model_predicts_the_peak(name: str, counts: tuple[int, ...], n: int) -> None:
    for stage in range(len(counts)):
        if (name, counts, stage) != SMALLEST:
            measured = peak(name, counts, stage, n)
            assert predicted(name, counts, stage, n) == pytest.approx(measured.peak_bytes, rel=0.15), stage


#: Model → memory policies of its layers: kept, swapped, recomputed, a new run.
MIXES = {
    "digits": ("rrrr", "ssss", "krks", "rnkk"),
    "text": ("rrrrrr", "ssssss", "rrnrrr", "krrskk", "krrkkk", "krrrkk"),
    "narrow_transformer": ("rrrrrrrr", "ssssssss", "krkrkrks", "ksskrrnk"),
}
WORDS: dict[str, LayerPolicy] = {"k": "keep", "s": "swap", "r": "recompute", "n": "recompute-new-run"}


def mixed_cases() -> Iterator[tuple[str, tuple[int, ...], int, str]]:
    for name, mixes in MIXES.items():
        for counts, mix in itertools.product(CUTS[name][:2], mixes):
            yield from ((name, counts, stage, mix) for stage in range(len(counts)))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "counts", "stage", "mix"),
    all_pairs(
        mixed_cases(), by=lambda name, counts, stage, mix: (name, (len(counts), stage), MIXES[name].index(mix)), step=6
    ),
)
def test_the_formula_predicts_the_peak_under_memory_policies(
    name: str, counts: tuple[int, ...], stage: int, mix: str
) -> None:
    """Within 15 %, also where layers behind the largest run hold much (§2)."""
    n, first = 4, sum(counts[:stage])
    policies = [WORDS[letter] for letter in mix[first : first + counts[stage]]]
    measured = measure_stage_peak(
        models.example(name), counts, StageIndex(stage), minibatches_per_wave=n, policies=policies
    )
    memory = MemoryModel(minibatches_per_wave=n, optimizer_slots=SLOTS[name])
    layers, place = (first, first + counts[stage]), (stage, len(counts))
    figures = costs_of(name).place("cpu", place, memory).figures(*layers)
    found = stage_memory(figures, policies).num_bytes
    assert found == pytest.approx(measured.peak_bytes, rel=0.15)


@pytest.mark.parametrize("n", [1, 4])
def test_what_crosses_the_cut_is_all_that_the_smallest_stage_has_beyond_the_model(n: int) -> None:
    """The input it received, which its linear layer saves, and the gradient of that, which it sends back."""
    measured = peak(*SMALLEST, n)
    crossing = 2 * costs_of("digits").cut_bytes[3]
    assert predicted(*SMALLEST, n) + crossing == pytest.approx(measured.peak_bytes, rel=0.01)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "n", "staleness"), every_nth(6, itertools.product(("digits", "text"), (1, 2, 4), (0, 1, 4)))
)
def test_a_stage_has_the_weight_buffers_of_the_model(name: str, n: int, staleness: int) -> None:
    """N, and two for the shards, at every D: own ũ that anchors still need are in host memory, and what is moved."""
    counts = CUTS[name][1]
    for stage in range(len(counts)):
        measured = peak(name, counts, stage, n, staleness)
        assert measured.num_buffers == n + 2
        assert 1 <= measured.num_host_buffers <= max(staleness, 1) + 1
        assert measured.peak_bytes == peak(name, counts, stage, n).peak_bytes


@pytest.mark.parametrize("name", ["digits", pytest.param("text", marks=pytest.mark.matrix)])
def test_a_minibatch_in_flight_costs_what_the_profile_says(name: str) -> None:
    """The first stage keeps N minibatches here, and of their outputs only what its own layers saved."""
    counts = CUTS[name][1]
    two, three = peak(name, counts, 0, 2), peak(name, counts, 0, 3)
    assert three.peak_bytes - two.peak_bytes == costs_of(name).activation_bytes[counts[0]] + two.buffer_bytes


def test_the_parts_are_what_the_model_has() -> None:
    found = peak("digits", (2, 2), 0, 2)
    parameters = costs_of("digits").parameter_bytes[2]
    assert found.buffer_bytes == found.optimizer_bytes == found.module_bytes == parameters


def test_runs_a_worker_of_one_stage_and_one_of_three() -> None:
    subject = models.subject("tuples")
    alone = measure_stage_peak(subject, (5,), StageIndex(0), minibatches_per_wave=1)
    middle = measure_stage_peak(subject, (2, 1, 2), StageIndex(1), minibatches_per_wave=3)
    assert alone.peak_bytes > alone.num_buffers * alone.buffer_bytes > 0
    assert (middle.buffer_bytes, middle.optimizer_bytes) == (0, 0)
    assert middle.peak_bytes > 0
